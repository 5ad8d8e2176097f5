"""Ranks that torchrun started again must not find the addresses of those that died."""

import threading

import pytest
from torch.distributed import HashStore

from pkm.distributed import rendezvous


def meet(store, ranks):
    """Each rank's part of the store, by rank."""
    found = {}
    threads = [
        threading.Thread(target=lambda rank=rank: found.update({rank: rendezvous.fresh(store, rank, ranks)}))
        for rank in reversed(range(ranks))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(ranks)]


def test_every_attempt_has_its_own_part_of_one_store():
    store, seen = HashStore(), []
    for attempt in range(3):
        parts = meet(store, 4)
        assert not parts[0].check(["address of rank 1"])
        parts[1].set("address of rank 1", str(attempt))
        assert [part.get("address of rank 1") for part in parts] == [str(attempt).encode()] * 4
        seen.append(parts[0])
    assert [part.get("address of rank 1") for part in seen] == [b"0", b"1", b"2"]


@pytest.mark.parametrize("dead", ["before it was answered", "before it said thanks"])
def test_a_rank_that_died_on_the_way_is_not_taken_for_the_living_one(dead):
    store = HashStore()
    store.set("hello/1", "of the dead")
    if dead == "before it said thanks":
        store.set("answer/of the dead", "an attempt before")
    parts = meet(store, 2)
    parts[1].set("address of rank 1", "here")
    assert parts[0].get("address of rank 1") == b"here"


def test_a_rank_that_does_not_come_is_named(monkeypatch):
    monkeypatch.setattr(rendezvous, "WAIT", rendezvous.timedelta(0))
    with pytest.raises(RuntimeError, match=r"ranks \[1, 2\] did not come"):
        rendezvous.fresh(HashStore(), 0, 3)
