"""pkm/prepare/assign.py against a few lines of plain Python that say the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pkm.prepare import assign as module
from pkm.prepare.assign import Assignment, decide
from pkm.prepare.spool import SpoolWriter, content_hash, spooled


def plainly(units: list[list[bytes]], valid: int, test: int, sample: int, keep: bool) -> list[list[Assignment]]:
    """The assignments by definition: texts in ascending order of their hashes."""
    flat = [text for unit in units for text in unit]
    ranked = sorted(set(flat), key=content_hash)
    held = {text: Assignment.VALID if i < valid else Assignment.TEST for i, text in enumerate(ranked[: valid + test])}
    chosen, total = set(), 0
    for text in ranked[valid + test :]:
        if total < sample:
            chosen.add(text)
            total += len(text)
    assignments, seen = [], set()
    for text in flat:
        if text in seen:
            assignments.append(Assignment.TRAIN if keep and text not in held else Assignment.DUPLICATE)
        else:
            assignments.append(held.get(text, Assignment.SAMPLE if text in chosen else Assignment.TRAIN))
        seen.add(text)
    ends = np.cumsum([len(unit) for unit in units]).tolist()
    return [assignments[end - len(unit) : end] for unit, end in zip(units, ends, strict=True)]


def spool(path: Path, units: list[list[bytes]]) -> list[Path]:
    stems = []
    for number, unit in enumerate(units):
        writer = SpoolWriter(path / f"{number:05d}")
        for text in unit:
            writer.add(text)
        writer.close()
        stems.append(path / f"{number:05d}")
    return stems


@settings(max_examples=60, deadline=None)
@given(
    units=st.lists(st.lists(st.integers(0, 12).map(lambda i: b"x" * i), max_size=12), min_size=1, max_size=5),
    valid=st.integers(0, 4),
    test=st.integers(0, 4),
    sample=st.integers(0, 60),
    keep=st.booleans(),
    at_once=st.sampled_from([2, 5, 1000]),
)
def test_fates_are_those_of_the_definition_however_many_are_sorted_at_a_time(
    tmp_path_factory, units, valid, test, sample, keep, at_once
):
    stems = spool(tmp_path_factory.mktemp("spool"), units)
    before = module.AT_ONCE
    module.AT_ONCE = at_once
    try:
        decision = decide(stems, valid, test, sample, keep)
    finally:
        module.AT_ONCE = before
    expected = plainly(units, valid, test, sample, keep)
    assert [assignments.tolist() for assignments in decision.assignments] == expected
    flat = [assignment for assignments in expected for assignment in assignments]
    assert decision.documents.tolist() == [flat.count(assignment) for assignment in Assignment]
    assert decision.bytes.sum() == sum(len(text) for unit in units for text in unit)


def test_spooled_articles_come_back_and_only_those_wanted(tmp_path: Path):
    texts = [text.encode() for text in ("one", "", "drei\nzeilen", "caf\u00e9 \u2028", "x" * 100_000)]
    (stem,) = spool(tmp_path, [texts])
    assert list(spooled(stem, np.ones(5, bool))) == list(enumerate(texts))
    assert list(spooled(stem, np.array([0, 0, 1, 0, 1], bool))) == [(2, texts[2]), (4, texts[4])]
