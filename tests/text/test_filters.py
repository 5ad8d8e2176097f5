"""The programs that read standard input and write standard output."""

import subprocess
import sys

import pytest

from tests.text.goldens import golden


def run(module: str, *arguments: str, text: bytes = b"") -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", f"pkm.text.{module}", *arguments], input=text, capture_output=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("filters")
    for name in ("codes10k", "vocab3000"):
        (folder / name).write_bytes(golden("bpe")[name].encode())
    return folder


@pytest.mark.parametrize(
    ("arguments", "printed"), [((), "no-escape"), (("--escape",), "escape"), (("--normalize", "xlm"), "xlm")]
)
def test_the_moses_filter_writes_the_bytes_of_the_perl_script(arguments, printed):
    done = run("moses", *arguments, text=golden("moses")["fuzz.txt"].encode())
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == golden("moses")[f"fuzz.{printed}"].encode()


def test_the_bpe_filter_writes_the_bytes_of_fastbpe(folder):
    text = golden("bpe")["sample.tok"].encode()
    assert run("bpe", "apply", str(folder / "codes10k"), text=text).stdout == golden("bpe")["sample.bpe"].encode()
    limited = run("bpe", "apply", str(folder / "codes10k"), str(folder / "vocab3000"), text=text)
    assert limited.stdout == golden("bpe")["sample.bpe-vocab3000"].encode()


def test_the_vocab_filter_writes_the_bytes_of_fastbpe():
    done = run("bpe", "vocab", text=golden("bpe")["sample.bpe"].encode())
    assert done.stdout == golden("bpe")["sample.vocab"].encode()


def test_the_learn_filter_writes_codes_and_says_when_it_stops_early():
    done = run("bpe", "learn", "5", text=b"abc abc\n")
    assert done.stdout == b"a b 2\nab c</w> 2\n"
    assert b"only 2 of 5" in done.stderr and done.returncode == 0


def test_a_last_line_without_newline_is_kept(folder):
    assert run("moses", text=b"one, two").stdout == b"one , two\n"
    assert run("moses").stdout == b""
    assert run("bpe", "apply", str(folder / "codes10k"), text=b"the the").stdout == b"the the\n"
    assert run("bpe", "vocab", text=b"the of the").stdout == b"the 2\nof 1\n"


def test_bytes_that_are_not_utf8_pass_through_bpe_and_are_named_by_moses(folder):
    assert run("bpe", "apply", str(folder / "codes10k"), text=b"the \xff\n").stdout == b"the \xff\n"
    done = run("moses", text=b"fine\nbad \xff\n")
    assert done.returncode == 2
    assert b"standard input:2" in done.stderr and b"Traceback" not in done.stderr


def test_detokenizing_undoes_the_filter():
    text = b'He said "no," and left (at once).\n'
    assert run("moses", "--detokenize", text=run("moses", "--escape", text=text).stdout).stdout == text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("bpe", "apply", "absent"), [b"absent", b"cannot be read"]),
        (("bpe", "learn", "0"), [b"'0' is not a whole number above 0"]),
        (("bpe", "learn", "5"), [b"no word to learn from"]),
        (("moses", "--normalize", "nfc"), [b"invalid choice"]),
        (("moses", "--detokenize", "--escape"), [b"--detokenize takes"]),
    ],
)
def test_mistakes_end_with_status_2_and_one_message(arguments, words):
    done = run(*arguments)
    assert done.returncode == 2 and done.stdout == b""
    assert b"Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_a_reader_that_goes_away_ends_the_filter_quietly():
    program = f"{sys.executable} -m pkm.text.moses | head -1"
    done = subprocess.run(program, shell=True, input=b"a line, again\n" * 200_000, capture_output=True)
    assert done.stdout == b"a line , again\n"
    assert done.stderr == b""


def test_help_says_what_the_programs_do():
    assert b"tokenizer.perl" in run("moses", "--help").stdout
    assert b"fastBPE" in run("bpe", "--help").stdout
