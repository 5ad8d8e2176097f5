"""Near-duplicates: articles that share most of their runs of five words, found with datatrove's MinHash.

Three steps of datatrove's (Broder, 1997; as FineWeb does it), of which the first two run in parallel:

    work/near/signatures/   MinHashes of every unit's articles, in 14 buckets of 8
    work/near/matches/      pairs of articles that agree in a whole bucket, one task a bucket
    work/near/removed/      all but one article of each group that such pairs connect

Two articles of which a share s of the runs are common agree in a bucket with probability 1 - (1 - s^8)^14: 92 % for s = 0.8,
56 % for 0.7, 5 % for 0.5. Words are what stands between white space, without case, punctuation and accents, and all digits alike.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from pkm.files import explained
from pkm.prepare.assign import Assignment
from pkm.prepare.spool import SPOOLED_ID, spooled
from pkm.prepare.stage import Tick
from pkm.prepare.subwords import given_ids
from pkm.prepare.tasks import load_config
from pkm.text.library import LibraryEncoder

BUCKETS = 14


@dataclass(frozen=True)
class Near:
    """What was found, as the manifest has it: of the articles with different texts, those that nearly are another's."""

    articles: int
    near_duplicates: int

    @property
    def share(self) -> float:
        return self.near_duplicates / max(1, self.articles)

    def line(self) -> str:
        """For people."""
        return f"near-duplicates: {self.near_duplicates:,} of {self.articles:,} different articles ({100 * self.share:.2f} %)"


def _config() -> Any:
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.utils.hashing import HashConfig

    # A hash that Python has: the other one needs a package more.
    return MinhashConfig(num_buckets=BUCKETS, hash_config=HashConfig(hash_fc="sha1"))


def _words() -> Any:
    from datatrove.utils.word_tokenizers import WordTokenizer

    class WhiteSpace(WordTokenizer):
        def word_tokenize(self, text: str) -> list[str]:
            return text.split()

        def sent_tokenize(self, text: str) -> list[str]:
            return text.splitlines()

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            raise NotImplementedError("MinHash asks for words alone")

    return WhiteSpace()


def sign(work: Path, rank: int, tick: Tick) -> dict[str, Any]:
    """Write the signatures of a unit's articles, later copies of a text left out."""
    from datatrove.pipeline.dedup.minhash import MinhashDedupSignature

    wanted = np.load(work / "near" / f"first-{rank:05d}.npy") == 0
    words = 0

    def documents() -> Iterator[Any]:
        from datatrove.data import Document

        nonlocal words
        for number, text in _texts(work, rank, wanted):
            words += len(text.split())
            tick(number / max(1, len(wanted)), words)
            yield Document(text=text, id=str(number))

    with explained(work / "near"):
        folder = str((work / "near" / "signatures").absolute())
        MinhashDedupSignature(folder, _config(), language=_words()).run(documents(), rank)
    return {"words": words}


def _texts(work: Path, rank: int, wanted: np.ndarray) -> Iterator[tuple[int, str]]:
    config = load_config(work)
    given = given_ids(config) if config.ids_given else None
    for number, content in spooled(work / "read" / f"{rank:05d}", wanted):
        if isinstance(given, LibraryEncoder):
            yield number, given.decode(np.frombuffer(content, SPOOLED_ID).tolist())
        else:
            yield number, content.decode("utf-8")


def match(work: Path, rank: int, tick: Tick) -> dict[str, Any]:
    """Write the pairs that agree in a bucket."""
    from datatrove.pipeline.dedup.minhash import MinhashDedupBuckets

    folders = (str((work / "near" / name).absolute()) for name in ("signatures", "matches"))
    with explained(work / "near"):
        MinhashDedupBuckets(*folders, config=_config()).run(None, rank, BUCKETS)
    return {}


def remove(work: Path, fixed: list[np.ndarray]) -> Near:
    """Mark in `fixed` (by unit, (articles,) uint8, DUPLICATE for later copies of a text) all but one of each group."""
    from datatrove.pipeline.dedup.minhash import MinhashDedupCluster

    removed = work / "near" / "removed"
    shutil.rmtree(removed, ignore_errors=True)
    folders = [str(path.absolute()) for path in (work / "near" / "matches", removed)]
    with explained(work / "near"), redirect_stderr(StringIO()):
        # Its own bar of progress would go there.
        MinhashDedupCluster(*folders, config=_config()).run(None)
    found = 0
    for unit, known in enumerate(fixed):
        path, signed = removed / f"{unit:06d}.remove", np.flatnonzero(known == 0)
        if path.exists():
            numbers = np.fromfile(path, "<u4")
            known[signed[numbers]] = Assignment.NEAR_DUPLICATE
            found += len(numbers)
    articles = sum(int((known != Assignment.DUPLICATE).sum()) for known in fixed)
    return Near(articles, found)
