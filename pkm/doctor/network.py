"""The network between ranks: do sums over all of them arrive, are they right, how fast are they; do clocks agree?"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as td

from pkm.config.schema import Config
from pkm.corpus.store import vocab_size_of
from pkm.distributed import dist
from pkm.doctor.finding import Finding
from pkm.doctor.gather import gather_results
from pkm.errors import UserError
from pkm.format import size
from pkm.model.cost import parameters

GLOO_SIZES = (1 << 10, 1 << 20, 8 << 20)
NCCL_SIZES = (1 << 20, 64 << 20, 512 << 20)
"""Bytes."""
NCCL_SECONDS = 90
SLOW_NCCL = 5e9
"""Bytes/s of an all-reduce between GPUs below which something is wrong: 100 Gbit/s Ethernet gives twice that."""
CLOCK_NOTE_SECONDS = 1.0
CLOCK_FAIL_SECONDS = 300.0
"""What munge, Kerberos and TLS tolerate."""


def gloo(config: Config | None) -> Finding:
    """Sums of numbers on the CPU, which a run exchanges also where it trains on GPUs."""
    found = gather_results(lambda: all_reduce_seconds("cpu", GLOO_SIZES))
    return found.failure("gloo") or speed("gloo", found.results, config)


def nccl(config: Config | None) -> Finding:
    """Sums between GPUs, one of each rank."""
    # Make a failed operation raise here; by default NCCL's watchdog thread ends the process.
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"

    def between_gpus() -> dict[int, float]:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
        group = td.new_group(backend="nccl", timeout=timedelta(seconds=NCCL_SECONDS))
        return all_reduce_seconds(device, NCCL_SIZES, group)

    found = gather_results(between_gpus)
    advice = "NCCL_DEBUG=INFO tells more; name the network that the nodes share in NCCL_SOCKET_IFNAME"
    return found.failure("nccl", advice) or speed("nccl", found.results, config)


def all_reduce_seconds(device: str, sizes: Sequence[int], group: Any = None, rounds: int = 5) -> dict[int, float]:
    """Bytes -> seconds of the median all-reduce of fp32 numbers. UserError if a sum is wrong, once all are done."""
    ranks, seconds, wrong = dist.world_size(), {}, []
    for count in sizes:
        x = torch.empty(count // 4, device=device)
        times = []
        for attempt in range(rounds + 1):  # the first one sets up connections
            x.fill_(dist.rank() + 1)
            _finish(device)
            start = time.perf_counter()
            td.all_reduce(x, group=group)
            _finish(device)
            if attempt:
                times.append(time.perf_counter() - start)
            if not bool((x == ranks * (ranks + 1) / 2).all()):
                wrong.append(count)
        seconds[count] = sorted(times)[len(times) // 2]
    if wrong:
        raise UserError(f"{len(wrong)} sums over all ranks came out wrong, the first one of {size(wrong[0])}", device)
    return seconds


def _finish(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def speed(backend: str, found: Sequence[dict[int, float]], config: Config | None) -> Finding:
    """found   of each rank, bytes -> seconds of an all-reduce"""
    ranks = len(found)
    slowest = {count: max(seconds[count] for seconds in found) for count in found[0]}
    # What every link carries, whatever the number of ranks (as NCCL's tests define it).
    per_second = {count: 2 * (ranks - 1) / ranks * count / seconds for count, seconds in slowest.items()}
    parts = [f"{size(n)} in {slowest[n] * 1000:.2f} ms ({per_second[n] / 1e9:.2f} GB/s)" for n in slowest]
    text, largest = "all-reduce of " + ", ".join(parts), max(slowest)
    if config is not None:
        dense = 4 * parameters(config, vocab_size_of(config.corpus.path) or 0).dense
        milliseconds = dense / largest * slowest[largest] * 1000
        text += f"; the dense gradients of a step, {size(dense)}, take {milliseconds:.1f} ms"
    if backend == "nccl" and ranks > 1 and per_second[largest] < SLOW_NCCL:
        advice = "slow for GPUs: does NCCL fall back to TCP? NCCL_DEBUG=INFO tells which network it uses"
        return Finding(backend, "note", text, advice)
    return Finding(backend, "ok", text)


def clocks(hosts: Sequence[str]) -> Finding:
    """How far the clocks of other nodes are from rank 0's, by messages there and back.

    hosts   of the ranks
    """
    # One rank of every node; on a single node the last one, since asking costs nothing.
    first = {host: rank for rank, host in reversed(list(enumerate(hosts)))}
    asked = sorted({*first.values(), dist.world_size() - 1} - {0})
    found = gather_results(lambda: {rank: offset(rank) for rank in asked})
    return found.failure("clocks") or farthest(found.results[0])


def offset(rank: int, rounds: int = 5) -> float:
    """Seconds that `rank`'s clock is ahead of rank 0's, from the quickest of some rounds; known to rank 0 alone."""
    best = (float("inf"), 0.0)
    told = torch.zeros(1, dtype=torch.float64)
    for _ in range(rounds):
        if dist.rank() == 0:
            sent = time.time()
            td.send(told, rank)
            td.recv(told, rank)
            back = time.time()
            best = min(best, (back - sent, float(told) - (sent + back) / 2))
        elif dist.rank() == rank:
            td.recv(told, 0)
            told[0] = time.time()
            td.send(told, 0)
    return best[1]


def farthest(offsets: dict[int, float]) -> Finding:
    """offsets   rank -> seconds that its clock is ahead of rank 0's"""
    rank, worst = max(offsets.items(), key=lambda entry: abs(entry[1]))
    found = f"that of rank {rank} is the farthest from rank 0's: {worst * 1000:+,.1f} ms"
    if abs(worst) > CLOCK_FAIL_SECONDS:
        return Finding("clocks", "fail", found, "have the nodes' clocks set (NTP): so far off credentials are refused")
    if abs(worst) > CLOCK_NOTE_SECONDS:
        return Finding("clocks", "note", found, "have the nodes' clocks set (NTP): logs and file times will mislead")
    return Finding("clocks", "ok", found)
