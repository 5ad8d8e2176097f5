"""Where the ranks of one attempt meet.

torchrun keeps one store through all its restarts, and in it still stand the addresses of the ranks that died: who reads those
first connects to nobody. Nor does it tell all nodes the same number of restarts. So the ranks first agree on a name that no
earlier attempt can have known, by answers to questions that were never asked before, and leave everything else below it.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

WAIT = timedelta(minutes=30)


def meet() -> tuple[Store, int, int]:
    """By the variables that torchrun sets: a store for these ranks alone, this rank, and how many there are."""
    store, rank, ranks = next(rendezvous("env://", timeout=WAIT))
    return fresh(store, rank, ranks), rank, ranks


def fresh(store: Store, rank: int, ranks: int) -> Store:
    """The part of `store` that only the ranks now calling this know. RuntimeError if one does not come in time."""
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
            # It may be a dead rank's: then the living one's takes its place, and is answered in a later round.
            if store.check([f"hello/{other}"]):
                store.set(f"answer/{store.get(f'hello/{other}').decode()}", mine)
            if store.check([f"thanks/{mine}/{other}"]):
                missing.remove(other)
        if time.monotonic() > deadline:
            raise RuntimeError(f"ranks {sorted(missing)} did not come within {WAIT}")
        time.sleep(0.01)
    return PrefixStore(mine, store)
