"""The ranks agree on a fresh key prefix after each restart, so that stale addresses are never read.

torchrun keeps one key-value store through all its restarts. It still holds the addresses of ranks that died, and a rank that
reads one of those connects to nobody. The number of restarts is no prefix: torchrun does not tell all nodes the same one. So
each rank writes a random id, rank 0 answers under that id with a random prefix, and all other keys go below the prefix.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

WAIT = timedelta(minutes=30)


def meet() -> tuple[Store, int, int]:
    """(store for these ranks alone, this rank, number of ranks), from the variables that torchrun sets."""
    store, rank, ranks = next(rendezvous("env://", timeout=WAIT))
    return fresh(store, rank, ranks), rank, ranks


def fresh(store: Store, rank: int, ranks: int) -> Store:
    """`store` below a prefix that only the ranks calling this now know. RuntimeError if one does not come in time."""
    mine = uuid.uuid4().hex
    if rank != 0:
        store.set(f"hello/{rank}", mine)
        name = store.get(f"answer/{mine}").decode()
        store.set(f"thanks/{name}/{rank}", "")
        return PrefixStore(name, store)
    missing = set(range(1, ranks))
    deadline = time.monotonic() + WAIT.total_seconds()
    while missing:
        for other in sorted(missing):
            # The id may be a dead rank's. The living rank then overwrites it, and is answered in a later round.
            if store.check([f"hello/{other}"]):
                store.set(f"answer/{store.get(f'hello/{other}').decode()}", mine)
            if store.check([f"thanks/{mine}/{other}"]):
                missing.remove(other)
        if time.monotonic() > deadline:
            raise RuntimeError(f"ranks {sorted(missing)} did not come within {WAIT}")
        time.sleep(0.01)
    return PrefixStore(mine, store)
