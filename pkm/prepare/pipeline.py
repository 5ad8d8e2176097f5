"""Raw articles to a prepared corpus: the stages in their order."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pkm.config.load import flatten
from pkm.corpus.store import SPLITS, OtherVocab, Shard, read_manifest
from pkm.corpus.writer import write_manifest
from pkm.errors import UserError
from pkm.files import atomic_write, explained, fsync_tree, publish, read_json, sha256
from pkm.prepare import near, tasks
from pkm.prepare.assign import STAY_OUT, Assignment, decide, later_copies
from pkm.prepare.damage import DamageLimit, examples
from pkm.prepare.executor import run_stage
from pkm.prepare.input.listing import LeftOut
from pkm.prepare.input.sources import Input, Piece, list_inputs, needs_unpacking, piece_bytes, pieces_of, units_of
from pkm.prepare.mixture import mix
from pkm.prepare.settings import PrepareConfig
from pkm.prepare.spool import spooled_index
from pkm.prepare.stage import Progress, Stage
from pkm.prepare.subwords import check_given, encoder_of, files, learn
from pkm.prepare.work_directory import (
    discard_stale,
    listing,
    remove_unfinished,
    settings_of,
    working_directory,
    working_path,
)
from pkm.text.library import LibraryEncoder
from pkm.text.vocab import Vocab

SMALLEST_SHARD, LARGEST_SHARD, SHARDS = 4 << 20, 64 << 20, 64
"""Bytes of text a shard holds: little corpora are cut into about 64."""

Show = Callable[[Stage, Progress], None]


@dataclass
class Outcome:
    """What a preparation did, to be shown: nothing of it goes into the corpus.

    stages: by title, tasks, words, seconds and cpu_seconds (of all workers together), peak_kilobytes (of one worker).
    """

    fresh: bool
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)


def prepare(config: PrepareConfig, show: Show, say: Callable[[str], None]) -> Outcome:
    """Prepare a corpus, or finish what an earlier call began, or see that it is there already.

    show hears about every second how far a stage is; say hears a line about each step.
    """
    final = config.directory
    if final.exists():
        _check_same(config, final)
        if working_path(final).exists():
            # Killed after the corpus was published.
            with working_directory(final) as work:
                shutil.rmtree(work)
        return Outcome(fresh=False)
    outcome = Outcome(fresh=True)
    check_given(config)
    left_out = LeftOut()
    inputs = list_inputs(config, left_out)
    with working_directory(final) as work:
        discard_stale(config, inputs, work, say)
        damage = _read(config, inputs, work, show, outcome)
        _decide(config, damage, work, show, say, outcome)
        _learn(config, work, show, say, outcome)
        shards = _encode(config, work, show, outcome)
        _assemble(config, inputs, left_out, damage, shards, work)
        publish(work / "corpus", final)
        shutil.rmtree(work)
    return outcome


def _check_same(config: PrepareConfig, final: Path) -> None:
    """UserError unless the corpus that is there was prepared from these files with these settings."""
    if not (final / "manifest.json").exists():
        fix = "choose another `name` or `output`, or remove it"
        raise UserError("something is there already that is not a prepared corpus", str(final), fix)
    manifest = read_manifest(final)
    then, now = flatten(manifest.get("settings") or {}), flatten(settings_of(config))
    both = ((key, then.get(key), now.get(key)) for key in {**then, **now})
    if differing := [f"{key} was {json.dumps(a)}, is now {json.dumps(b)}" for key, a, b in both if a != b]:
        fix = "choose another `name` or `output`, or remove that directory"
        raise UserError(f"it was prepared with other settings: {'; '.join(differing[:8])}", str(final), fix)
    given = config.subwords.tokenizer
    if given is not None and given.exists() and sha256(given) != manifest["tokenizer"]["sha256"]:
        fix = "choose another `name` or `output`, or remove that directory"
        raise UserError(f"it was prepared with another {given} than the one there now", str(final), fix)
    try:
        inputs = list_inputs(config)
    except UserError:
        # The raw text may be gone by now.
        return
    if listing(inputs) != manifest["inputs"]:
        fix = "remove that directory to prepare anew, or choose another `name` or `output`"
        raise UserError("the files that it was prepared from have changed since", str(final), fix)


def _run(config: PrepareConfig, stage: Stage, show: Show, outcome: Outcome) -> list[dict[str, Any]]:
    slurm = config.slurm if config.executor == "slurm" else None
    run_stage(stage, config.workers, slurm, lambda progress: show(stage, progress))
    reports = stage.reports()
    outcome.stages[stage.title] = {
        "tasks": len(reports),
        "words": sum(report.get("words", 0) for report in reports),
        "seconds": sum(report["seconds"] for report in reports),
        "cpu_seconds": sum(report["cpu_seconds"] for report in reports),
        "peak_kilobytes": max((report["peak_kilobytes"] for report in reports), default=0),
    }
    return reports


def _read(config: PrepareConfig, inputs: list[Input], work: Path, show: Show, outcome: Outcome) -> DamageLimit:
    """Unpack what has to be, read everything, filter, spool."""
    target = piece_bytes(inputs)
    large = [file for file in inputs if needs_unpacking(file, target)]
    atomic_write(work / "unpack.json", json.dumps({"target": target, "files": [asdict(file) for file in large]}))
    damage = DamageLimit(config.limits.damaged, sum(file.size for file in inputs))
    chunks: dict[Input, list[Piece]] = {}
    if large:
        stage = Stage("unpack", "unpacking large files", work, [file.size for file in large], tasks.unpack)
        for file, report in zip(large, _run(config, stage, show, outcome), strict=True):
            damage.add(report)
            chunks[file] = [Piece(file, c["offset"], None, c["path"], c["size"]) for c in report["chunks"]]
    if not (work / "units.jsonl").exists():
        pieces = (piece for file in inputs for piece in chunks.get(file) or pieces_of(file, target))
        tasks.save_units(work, units_of(pieces, target))
    costs = [sum(piece.text_bytes for piece in unit) for unit in tasks.load_units(work)]
    stage = Stage("read", "reading and filtering", work, costs, tasks.read)

    def watch(stage: Stage, progress: Progress) -> None:
        show(stage, progress)
        early = DamageLimit(config.limits.damaged, damage.total_bytes)
        for report in progress.reports:
            early.add(report)
        early.check_early(progress.bytes_done / max(1, sum(costs)))

    for report in _run(config, stage, watch, outcome):
        damage.add(report)
    damage.check()
    for piece in (piece for pieces in chunks.values() for piece in pieces):
        Path(piece.chunk or "").unlink(missing_ok=True)
    return damage


def _near_duplicates(
    config: PrepareConfig, fixed: list[np.ndarray], work: Path, show: Show, say: Callable[[str], None], outcome: Outcome
) -> None:
    """Mark near-duplicates in `fixed`."""
    for unit, known in enumerate(fixed):
        with explained(work):
            np.save(work / "near" / f"first-{unit:05d}.npy", known)
    costs = [sum(piece.text_bytes for piece in unit) for unit in tasks.load_units(work)]
    _run(config, Stage("near_sign", "signing articles", work, costs, near.sign), show, outcome)
    costs = [max(1, sum(map(len, fixed)))] * near.BUCKETS
    _run(config, Stage("near_match", "finding near-duplicates", work, costs, near.match), show, outcome)
    found = near.remove(work, fixed)
    atomic_write(work / "near.json", json.dumps({**asdict(found), "share": found.share}))
    say(found.line())


def _decide(
    config: PrepareConfig, damage: DamageLimit, work: Path, show: Show, say: Callable[[str], None], outcome: Outcome
) -> None:
    """Held-out articles, duplicates, the sample; and which units make one shard."""
    if (work / "groups.json").exists():
        return
    sources = [unit[0].file.source for unit in tasks.load_units(work)]
    stems = [work / "read" / f"{unit:05d}" for unit in range(len(sources))]
    fixed = None
    if config.weights or config.filters.near_duplicates == "drop":
        fixed = later_copies(stems)
    if fixed is not None and config.filters.near_duplicates == "drop":
        _near_duplicates(config, fixed, work, show, say, outcome)
    if fixed is not None and config.weights:
        taken = mix(stems, sources, config.weights, fixed)
        for number, one in enumerate(taken):
            if not one.available_bytes:
                what = "it has no article that stays, so that the mixture would be empty: nothing is repeated"
                raise UserError(what, f"sources[{number}]", "check its path and `filters`, or leave it out")
        atomic_write(work / "mixture.json", json.dumps({"sources": [one.record() for one in taken]}))
        for number, one in enumerate(taken):
            say(one.line(number))
    held, sample = config.held_out, int(config.subwords.sample_megabytes * 2**20)
    decision = decide(stems, held.valid, held.test, sample, config.filters.duplicates == "keep", fixed)
    dropped = ", ".join(f"{n:,} {kind.replace('_', ' ')}" for kind, n in damage.dropped.most_common()) or "none"
    if decision.distinct == 0:
        what = f"there is no article in the input (dropped: {dropped})" + examples(damage.named, "damaged", "too_large")
        raise UserError(what, "sources", "check paths, `format`, `documents`, `column`, and `filters`")
    if decision.distinct <= held.valid + held.test:
        valid, test = _fewer_held_out(decision.distinct, held.valid, held.test)
        what = (
            f"there are {decision.distinct} different articles (dropped: {dropped}), too few to hold out {held.valid} for "
            f"validation and {held.test} for test and train on the others"
        )
        fix = f"add text, or hold out fewer, for example held_out.valid={valid} held_out.test={test}"
        raise UserError(what, "held_out", fix)
    for unit, assignments in enumerate(decision.assignments):
        with explained(work):
            np.save(work / "decide" / f"{unit:05d}.npy", assignments)
    fsync_tree(work / "decide")
    both = zip(stems, decision.assignments, strict=True)
    trained = [int(spooled_index(stem)["bytes"][assignments <= Assignment.SAMPLE].sum()) for stem, assignments in both]
    atomic_write(work / "groups.json", json.dumps(_groups(trained)))
    say(
        f"{decision.distinct:,} different articles: {decision.documents[Assignment.VALID]:,} valid, "
        f"{decision.documents[Assignment.TEST]:,} test; dropped: {dropped}, {decision.documents[Assignment.DUPLICATE]:,} duplicates"
    )


def _fewer_held_out(articles: int, valid: int, test: int) -> tuple[int, int]:
    """Numbers of articles to hold out, none above what was asked, that leave some to train on: about a twentieth each."""
    few = max(1, articles // 20)
    valid = min(valid, few, articles - 1)
    return valid, min(test, few, articles - 1 - valid)


def _groups(train_bytes: list[int]) -> list[tuple[int, int, int]]:
    """(first unit, last unit + 1, bytes for training) of each shard; every shard has some."""
    target = max(SMALLEST_SHARD, min(LARGEST_SHARD, sum(train_bytes) // SHARDS))
    groups: list[tuple[int, int, int]] = []
    first, size = 0, 0
    for unit, more in enumerate(train_bytes):
        size += more
        if size >= target:
            groups.append((first, unit + 1, size))
            first, size = unit + 1, 0
    if first < len(train_bytes):
        if size or not groups:
            groups.append((first, len(train_bytes), size))
        else:
            groups[-1] = (groups[-1][0], len(train_bytes), groups[-1][2])
    return groups


def _learn(config: PrepareConfig, work: Path, show: Show, say: Callable[[str], None], outcome: Outcome) -> None:
    """What makes subwords: learned from the sample, or taken as it is."""
    if all((work / "learn" / name).exists() for name in files(config)):
        return
    paths: list[Path] = []
    if config.counts_words:
        costs = [size for _, _, size in tasks.load_groups(work)]
        stage = Stage("count", "counting words", work, costs, tasks.count)
        _run(config, stage, show, outcome)
        paths = [work / "count" / f"{rank:05d}.words" for rank in range(len(costs))]
    learn(config, paths, tasks.sample_texts(work), work / "learn", say, outcome.stages)


def _encode(config: PrepareConfig, work: Path, show: Show, outcome: Outcome) -> list[Shard]:
    costs = [size for _, _, size in tasks.load_groups(work)]
    stage = Stage("encode", "encoding", work, costs, tasks.encode)
    reports = _run(config, stage, show, outcome)
    return [Shard(**report["shard"]) for report in reports]


def _assemble(
    config: PrepareConfig, inputs: list[Input], left_out: LeftOut, damage: DamageLimit, train: list[Shard], work: Path
) -> None:
    """The held-out splits, in the order of their articles' hashes; codes, vocabulary and manifest."""
    corpus = work / "corpus"
    remove_unfinished(corpus)
    for name in files(config):
        atomic_write(corpus / name, (work / "learn" / name).read_bytes())
    encoder = encoder_of(config, work / "learn")
    shards: dict[str, list[Shard]] = {name: [] for name in SPLITS} | {"train": train}
    about, ids = tasks.load_held(work, len(train))
    ends = np.cumsum([0, *about["tokens"]])
    for name, assignment in (("valid", Assignment.VALID), ("test", Assignment.TEST)):
        chosen = np.flatnonzero(about["fate"] == assignment)
        if not len(chosen):
            continue
        writer = tasks.shard_writer(corpus, f"{name}-00000", encoder)
        for i in chosen[np.lexsort((about["low"][chosen], about["high"][chosen]))].tolist():
            writer.ids.extend(ids[ends[i] : ends[i + 1]].tolist())
            writer.end_document(int(about["words"][i]), int(about["bytes"][i]))
        shards[name] = [writer.close()]
    counts = np.zeros(len(Assignment), np.int64)
    for path in (work / "decide").glob("*.npy"):
        counts += np.bincount(np.load(path), minlength=len(Assignment))
    dropped = Counter(damage.dropped) + Counter({kind.name.lower(): int(counts[kind]) for kind in STAY_OUT})
    nearly = read_json(work / "near.json")
    mixture = (read_json(work / "mixture.json") or {}).get("sources")
    vocab: Vocab | OtherVocab
    if isinstance(encoder, LibraryEncoder):
        vocab = OtherVocab(encoder.size, encoder.end_id, encoder.unknown_id)
        tokenizer: dict[str, Any] = {"library": "tokenizers", "end": encoder.end}
    elif isinstance(encoder, OtherVocab):
        vocab, tokenizer = encoder, {"library": None, "end": None}
    else:
        vocab, tokenizer = encoder.vocab, config.tokenizer.model_dump()
    write_manifest(
        corpus,
        shards,
        vocab,
        tokenizer,
        {
            "name": config.name,
            "settings": settings_of(config),
            "inputs": listing(inputs),
            "left_out": left_out.counts(),
            "records": damage.records,
            "dropped": dict(sorted(dropped.items())),
            "lost_bytes": damage.lost_bytes,
            "named": sorted(damage.named)[:100],
            **({"near_duplicates": nearly} if nearly else {}),
            **({"mixture": mixture} if mixture else {}),
        },
    )
