"""Raw JSONL to ids: this package beside sacremoses, Hugging Face tokenizers and fastBPE, and the learner.

    python benchmarks/text.py [--corpus ../shared/corpus] [--merges 60000] [--json FILE]

Every measurement is a process of its own (cold caches, its own peak memory) that reads plain JSONL. Ours read all of
the corpus; the others, which are slower by an order and gain nothing from more text, every `--every`-th article.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zstandard

from pkm.errors import UserError, exits_cleanly
from pkm.files import json_text
from pkm.text.bpe import Codes, count_pieces, learn
from pkm.text.encode import Encoder
from pkm.text.moses import Tokenizer, WordCounter
from pkm.text.vocab import EOS_ID, Vocab

SHARDS = 2


COLUMNS = {
    "what": "what",
    "processes": "processes",
    "words": "M words",
    "seconds": "s",
    "rate": "M words/s",
    "cpu": "CPU s",
    "ratio": "x chain",
    "memory": "peak MB a process",
}


@exits_cleanly
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path("../shared/corpus"), help="folder of .jsonl.zst files")
    parser.add_argument("--merges", type=int, default=60_000, help="how many merges to learn and use")
    parser.add_argument("--every", type=int, default=16, help="the others read every so many-th article")
    parser.add_argument("--repeat", type=int, default=3, help="measure so many times in turn and keep the fastest")
    parser.add_argument("--json", type=Path, help="write the numbers there as well")
    options = parser.parse_args()
    files = sorted(options.corpus.glob("*.jsonl.zst"))
    if not files:
        raise UserError("no .jsonl.zst file there", where=str(options.corpus), fix="name a folder with --corpus")
    with tempfile.TemporaryDirectory() as folder:
        rows = measure_all(files, Path(folder), options.merges, options.every, options.repeat)
    report = {"machine": machine(), "corpus": [file.name for file in files], "merges": options.merges, "rows": rows}
    print(json.dumps(report["machine"]))
    print_table(rows)
    if options.json:
        options.json.write_text(json_text(report, indent=1))


def measure_all(files: list[Path], folder: Path, merges: int, every: int, repeat: int) -> list[dict[str, Any]]:
    """One row per measurement, the fastest of its repetitions. words: Moses words, as ours count them, for everyone."""
    write_shards(files, folder)
    shards = [folder / f"{i}.jsonl" for i in range(SHARDS)]
    rows = [alone(f"learn {merges:,} merges", learn_codes, folder, shards, merges)]
    runs: list[dict[str, Any]] = []
    for _ in range(repeat):
        runs += alone("ours, one process", encode_twice, folder, shards)
        runs.append(together("ours, cold", folder, shards))
        runs += alone("others", encode_with_others, folder, shards, every)
    kinds = dict.fromkeys((run["what"], run["processes"]) for run in runs)
    for kind in kinds:
        rows.append(
            min((run for run in runs if (run["what"], run["processes"]) == kind), key=lambda run: run["seconds"])
        )
    chain = next((row["rate"] for row in rows if "chain" in row["what"]), None)
    for row in rows:
        row["ratio"] = row["rate"] / chain if chain and "learn" not in row["what"] else None
    return rows


def write_shards(files: list[Path], folder: Path) -> None:
    """The articles of all files, dealt out to plain JSONL files of about equal size."""
    outputs = [open(folder / f"{i}.jsonl", "wb") for i in range(SHARDS)]  # noqa: SIM115
    number = 0
    for file in files:
        with zstandard.open(file, "rb") as lines:
            buffer = b""
            while block := lines.read(1 << 22):
                *whole, buffer = (buffer + block).split(b"\n")
                for line in whole:
                    outputs[number % SHARDS].write(line + b"\n")
                    number += 1
    for output in outputs:
        output.close()


def articles(shards: list[Path], every: int = 1) -> Iterator[str]:
    for shard in shards:
        with open(shard, "rb") as lines:
            for number, line in enumerate(lines):
                if number % every == 0:
                    yield json.loads(line)["text"]


def row(what: str, words: float, began: tuple[float, float], processes: int = 1) -> dict[str, Any]:
    seconds, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    found = {"what": what, "processes": processes, "words": words / 1e6, "seconds": seconds}
    found |= {"rate": words / seconds / 1e6, "cpu": cpu, "memory": peak}
    print(f"  {what}: {found['rate']:.2f} M words/s", file=sys.stderr)
    return found


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def learn_codes(folder: Path, shards: list[Path], merges: int) -> dict[str, Any]:
    """Count the words of everything, learn, count the pieces; leaves `codes` and `vocab` in the folder."""
    began = now()
    counter = WordCounter()
    for text in articles(shards):
        counter.add(text)
    words = counter.words()
    codes = learn(words, merges)
    Vocab.from_counts(count_pieces(codes, words)).save(folder / "vocab")
    codes.save(folder / "codes")
    return row(f"learn {merges:,} merges and the vocabulary", sum(words.values()), began)


def encode_twice(folder: Path, shards: list[Path]) -> list[dict[str, Any]]:
    encoder = Encoder(Codes.load(folder / "codes"), Vocab.load(folder / "vocab"))
    rows = []
    for what in ("ours, cold", "ours, warm"):
        began = now()
        ids = array("H" if encoder.vocab.size < 1 << 16 else "I")
        words = sum(encoder.encode(text, ids) for text in articles(shards))
        rows.append(row(what, words, began))
    return rows


def encode_one(folder: Path, shard: Path) -> dict[str, Any]:
    began = now()
    encoder = Encoder(Codes.load(folder / "codes"), Vocab.load(folder / "vocab"))
    ids = array("H" if encoder.vocab.size < 1 << 16 else "I")
    words = sum(encoder.encode(text, ids) for text in articles([shard]))
    return row("one of several", words, began)


def together(what: str, folder: Path, shards: list[Path]) -> dict[str, Any]:
    """One process a shard, at once; loading codes and vocabulary is in the time."""
    with multiprocessing.get_context("spawn").Pool(len(shards)) as pool:
        pool.map(os.path.exists, shards, chunksize=1)  # the processes are up
        began = now()
        parts = pool.starmap(encode_one, [(folder, shard) for shard in shards], chunksize=1)
        found = row(what, sum(part["words"] for part in parts) * 1e6, began, len(shards))
    return found | {"cpu": sum(part["cpu"] for part in parts), "memory": max(part["memory"] for part in parts)}


def encode_with_others(folder: Path, shards: list[Path], every: int) -> list[dict[str, Any]]:
    """The same articles through sacremoses, Hugging Face tokenizers and fastBPE, where they are installed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    texts = list(articles(shards, every))
    codes, vocab = Codes.load(folder / "codes"), Vocab.load(folder / "vocab")
    ours = Encoder(codes, vocab)
    ids = array("I")
    words = sum(ours.encode(text, ids) for text in texts)
    lines = [line for text in texts for line in text.split("\n") if line.strip()]
    tokenized = [line for line in Tokenizer().text("\n".join(lines)).split("\n") if line.strip()]
    rows = []
    try:
        rows += encode_with_sacremoses(lines, words, huggingface(codes, vocab, tokenized), ids)
    except ImportError as error:
        print(f"left out: {error}", file=sys.stderr)
    try:
        from fastBPE import fastBPE

        began = now()
        fastBPE(str(folder / "codes"), str(folder / "vocab")).apply(tokenized)
        rows.append(row("fastBPE alone (binding), from tokens", words, began))
    except ImportError as error:
        print(f"left out: {error}", file=sys.stderr)
    return rows


def encode_with_sacremoses(
    lines: list[str], words: int, encode: Callable[[str], list[int]], ours: array[int]
) -> list[dict[str, Any]]:
    from sacremoses import MosesTokenizer

    tokenizer = MosesTokenizer(lang="en")
    began = now()
    for line in lines:
        tokenizer.tokenize(line, escape=False, return_str=True)
    rows = [row("sacremoses alone, to tokens", words, began)]
    began = now()
    ids = array("I")
    for line in lines:
        ids.extend(encode(tokenizer.tokenize(line, escape=False, return_str=True)))
        ids.append(EOS_ID)
    rows.append(row("chain sacremoses + tokenizers", words, began))
    print(f"ids of ours {len(ours):,}, of the chain {len(ids):,}", file=sys.stderr)
    return rows


def huggingface(codes: Codes, vocab: Vocab, tokenized: list[str]) -> Callable[[str], list[int]]:
    """Hugging Face's BPE with these codes: tokenized line -> ids."""
    from tokenizers import Tokenizer as HuggingFace
    from tokenizers import models, pre_tokenizers

    characters = sorted({c for line in tokenized for c in line} - {" "})
    parts = (part for left, right in codes.merges for part in (left, right, left + right))
    pieces = dict.fromkeys([*characters, *(f"{c}</w>" for c in characters), *parts])
    numbers = {piece: number for number, piece in enumerate(pieces)}
    model = HuggingFace(models.BPE(numbers, codes.merges, end_of_word_suffix="</w>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    printed = [p[:-4] if p.endswith("</w>") else f"{p}@@" for p in numbers]
    ids = [vocab.id(piece) for piece in printed]
    return lambda line: [ids[i] for i in model.encode(line).ids]


def alone(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result, computed in a fresh process."""
    print(f"measuring: {what} ...", file=sys.stderr)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def machine() -> dict[str, Any]:
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    load = os.getloadavg()[0]
    return {
        "cpu": names[0],
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load before": round(load, 2),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    cells = [list(COLUMNS.values()), ["---"] * len(COLUMNS)]
    for entry in rows:
        values = [entry.get(key) for key in COLUMNS]
        cells.append(["" if v is None else f"{v:.2f}" if isinstance(v, float) else str(v) for v in values])
    for line in cells:
        print("| " + " | ".join(line) + " |")


if __name__ == "__main__":
    sys.exit(main())
