"""Can the ranks of a run work together? The ranks that torchrun started compare what they have and measure the network.

Refuses at the start what would fail at hour ten: nodes with other software, another corpus or no view of the run's
directory, two ranks on one GPU, a network that does not carry sums, too little memory or room.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from pkm.config.load import Resolved
from pkm.config.rules import impossible_for
from pkm.config.schema import Config
from pkm.distributed import dist
from pkm.doctor import network, shared_files
from pkm.doctor.finding import Finding, Status
from pkm.doctor.gather import Found, gather_results, join, named
from pkm.doctor.node import examine as examine_machine
from pkm.doctor.node import examine_rank
from pkm.errors import UserError
from pkm.machine import code_version


def examine(resolved: Resolved[Config] | UserError | None) -> Iterator[Finding]:
    """Every check, on every rank; all come to the same judgements, of which rank 0's are to be shown.

    resolved   this rank's config, or why it has none; None = no run is asked about

    UserError if the ranks cannot reach each other, or if none of them can read the config.
    """
    config = resolved.config if isinstance(resolved, Resolved) else None
    # Before the ranks meet: afterwards the others would wait for a slow rank, and time out.
    own = [] if isinstance(resolved, UserError) else list(by_itself(config))
    join()
    kinds = gather_results(lambda: kind_of(config))
    kind = "cuda" if set(kinds.results) == {"cuda"} and not kinds.problems else "cpu"
    places = gather_results(lambda: place(kind))
    yield places.failure("ranks") or where_ranks_are(places.results)
    yield same("software", gather_results(software), "install the same versions on all nodes")
    if resolved is not None:
        yield from same_run(resolved)
    if not places.problems:
        yield from merged(gather_results(lambda: own).results, [at.host for at in places.results])
        yield network.clocks([at.host for at in places.results])
    yield network.gloo(config)
    if kind == "cuda":
        yield network.nccl(config)
    yield from shared_files.examine(config)


def by_itself(config: Config | None) -> Iterator[Finding]:
    """What this rank finds out alone; what concerns its whole node, only the first rank there."""
    ranks, runs = int(os.environ["WORLD_SIZE"]), config.runs if config else shared_files.RUNS
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        return examine_machine(runs, config, ranks)
    return examine_rank(config, ranks)


def kind_of(config: Config | None) -> str:
    """cuda or cpu: where this rank would compute."""
    from pkm.device import pick_device

    if config is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return pick_device(config).type


@dataclass(frozen=True)
class Place:
    """Where a rank runs, and on what."""

    host: str
    device: str
    unit: str = ""
    """A GPU's UUID, to find two ranks on one GPU; empty on a CPU, which ranks may share."""


def place(kind: str) -> Place:
    """This rank's; `kind` is cuda or cpu."""
    host, number = socket.gethostname(), int(os.environ.get("LOCAL_RANK", "0"))
    if kind != "cuda":
        return Place(host, "cpu")
    there = torch.cuda.device_count()
    if number >= there:
        raise UserError(f"{host} has {there} GPUs, and no GPU {number}", "LOCAL_RANK", "start one rank for each GPU")
    properties = torch.cuda.get_device_properties(number)
    return Place(host, properties.name, str(getattr(properties, "uuid", number)))


def where_ranks_are(places: Sequence[Place]) -> Finding:
    """How many ranks on which nodes; two on one GPU would be slow and soon out of memory."""
    hosts: dict[str, list[int]] = {}
    units: dict[tuple[str, str], list[int]] = {}
    for rank, at in enumerate(places):
        hosts.setdefault(at.host, []).append(rank)
        if at.unit:
            units.setdefault((at.host, at.unit), []).append(rank)
    devices = sorted({at.device for at in places})
    on = "; ".join(f"{host}: {named(ranks)}" for host, ranks in hosts.items())
    found = f"{len(places)} on {len(hosts)} node{'s' * (len(hosts) > 1)} ({on}), {' and '.join(devices)}"
    shared = [ranks for ranks in units.values() if len(ranks) > 1]
    if shared:
        return Finding("ranks", "fail", f"{found}; ranks {named(shared[0])} share a GPU", "start one rank for each GPU")
    if len(devices) > 1:
        return Finding("ranks", "note", found, "all will wait for the slowest")
    if len({len(ranks) for ranks in hosts.values()}) > 1:
        return Finding("ranks", "note", found, "not equally many on each")
    return Finding("ranks", "ok", found)


def software() -> dict[str, str]:
    """Versions of what decides the bits of a result."""
    versions = {"python": platform.python_version(), **{name: str(v) for name, v in code_version().items() if v}}
    if torch.cuda.is_available():
        versions |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return versions


def same(about: str, found: Found[dict[str, str]], advice: str) -> Finding:
    """One line if all ranks found the same; otherwise what differs, and on which ranks."""
    broken = found.failure(about)
    if broken:
        return broken
    differing = []
    for key in dict.fromkeys(key for entry in found.results for key in entry):
        ranks: dict[str, list[int]] = {}
        for rank, entry in enumerate(found.results):
            ranks.setdefault(entry.get(key, "none"), []).append(rank)
        if len(ranks) > 1:
            differing.append(f"{key} " + ", ".join(f"{value} on rank {named(who)}" for value, who in ranks.items()))
    if differing:
        return Finding(about, "fail", "; ".join(differing), advice)
    alike = ", ".join(f"{key} {value}" for key, value in found.results[0].items())
    return Finding(about, "ok", f"{alike}, on all ranks")


def same_run(resolved: Resolved[Config] | UserError) -> Iterator[Finding]:
    """Whether all ranks would train the same: settings, directory, precision, corpus, and a batch that they can share."""

    def mine() -> Resolved[Config]:
        if isinstance(resolved, UserError):
            raise resolved
        return resolved

    def settings() -> dict[str, str]:
        digest = hashlib.sha256(mine().yaml.encode()).hexdigest()[:12]
        return {"settings": digest, "directory": str(mine().config.directory.absolute())}

    def precision() -> dict[str, str]:
        from pkm.device import pick_device, pick_precision

        device = pick_device(mine().config)
        return {"device": device.type, "precision": pick_precision(mine().config, device)}

    def corpus() -> dict[str, str]:
        from pkm.corpus.store import open_corpus

        return {"fingerprint": open_corpus(mine().config.corpus.path).fingerprint[:12]}

    read = gather_results(settings)
    if isinstance(resolved, UserError) and not read.results:
        raise resolved
    yield same("config", read, "start all ranks with the same file, in the same directory")
    advice = "set device and precision instead of auto, or use nodes of one kind"
    yield same("precision", gather_results(precision), advice)
    yield same("same corpus", gather_results(corpus), "put the corpus where all nodes see it")
    if isinstance(resolved, Resolved):
        yield from batch(resolved, dist.world_size())


def batch(resolved: Resolved[Config], ranks: int) -> Iterator[Finding]:
    """Whether so many ranks can share the work."""
    wrong = impossible_for(resolved.config, ranks)
    for key, what, fix in wrong:
        yield Finding("batch", "fail", f"{resolved.where(key)}: {what}", fix)
    if not wrong:
        windows = resolved.config.sequences
        yield Finding("batch", "ok", f"{windows} windows, {windows // ranks} a rank")


def merged(found: Sequence[list[Finding]], hosts: Sequence[str]) -> Iterator[Finding]:
    """One line for each check if all ranks agree, else the worst result with its ranks."""
    severity: list[Status] = ["ok", "note", "fail"]
    for about in dict.fromkeys(finding.about for findings in found for finding in findings):
        entries = [(rank, f) for rank, findings in enumerate(found) for f in findings if f.about == about]
        worst = max((finding for _, finding in entries), key=lambda finding: severity.index(finding.status))
        ranks = [rank for rank, finding in entries if finding.status == worst.status]
        if len(ranks) == len(entries):
            yield worst
        else:
            who = f"rank {named(ranks)} on {', '.join(dict.fromkeys(hosts[rank] for rank in ranks))}"
            yield Finding(about, worst.status, f"{who}: {worst.found}", worst.advice)
