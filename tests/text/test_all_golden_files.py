"""Every golden file that lies beside the checkout, whole; skipped where there are none."""

import pytest
import zstandard

from pkm.text.bpe import Codes, apply, count_words, learn
from pkm.text.moses import tokenize
from pkm.text.vocab import format_counts, read_counts
from tests.text.goldens import SHARED

pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason=f"no golden files at {SHARED}")


def read(folder: str, name: str) -> str:
    path = SHARED / folder / name
    if path.exists():
        return path.read_bytes().decode()
    return zstandard.ZstdDecompressor().decompress((SHARED / folder / f"{name}.zst").read_bytes(), 1 << 28).decode()


@pytest.mark.parametrize("kind", ["nasty", "news", "fuzz"])
@pytest.mark.parametrize(
    ("printed", "options"),
    [("no-escape", {}), ("escape", {"escape": True}), ("xlm", {"normalize": "xlm"})],
    ids=["no-escape", "escape", "xlm"],
)
def test_moses(kind, printed, options):
    found = tokenize(read("moses", f"{kind}.txt"), **options).split("\n")
    expected = read("moses", f"{kind}.{printed}").split("\n")
    assert len(found) == len(expected)
    assert [pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1]] == []


def test_bpe():
    codes = Codes.load(SHARED / "bpe" / "codes10k")
    assert apply(codes, read("bpe", "nasty.tok")) == read("bpe", "nasty.bpe")
    assert apply(codes, read("bpe", "news.tok")) == read("bpe", "news.bpe")
    vocab = read_counts(SHARED / "bpe" / "vocab3000")
    assert apply(codes, read("bpe", "news.tok"), vocab) == read("bpe", "news.bpe-vocab3000")
    assert format_counts(count_words([read("bpe", "news.bpe")])).decode() == read("bpe", "news.vocab")


def test_at_least_99_percent_of_fastbpes_2000_merges_are_found_with_their_counts():
    learned = learn(count_words([read("bpe", "news.tok")]), 2000)
    theirs = Codes.load(SHARED / "bpe" / "news.codes2000")
    assert learned.counts == theirs.counts
    first = next(i for i in range(2000) if learned.merges[i] != theirs.merges[i])
    assert learned.counts.count(learned.counts[first]) > 1, "the first difference must be a tie"
    found = set(zip(learned.merges, learned.counts, strict=True)) & set(zip(theirs.merges, theirs.counts, strict=True))
    assert len(found) >= 1980
