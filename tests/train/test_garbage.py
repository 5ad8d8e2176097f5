import gc

import pytest

from pkm.train import garbage


@pytest.fixture(autouse=True)
def enabled():
    gc.unfreeze()
    gc.enable()
    yield
    gc.enable()
    gc.freeze()  # as tests/conftest.py has it


def test_the_collector_is_off_between_its_intervals_and_on_again_after_a_run(monkeypatch):
    monkeypatch.setattr(garbage, "EVERY_STEPS", 10)
    collections = []
    gc.callbacks.append(lambda phase, info: collections.append(info["generation"]) if phase == "start" else None)
    try:
        with garbage.collected_at_intervals() as collect:
            for step in range(7, 31):
                collect(step)
                assert gc.isenabled() == (step < 9)
            frozen = gc.get_freeze_count()
    finally:
        gc.callbacks.pop()
    assert frozen > 0 and collections.count(2) >= 4  # at step 9, which is its third, and at 10, 20 and 30
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_a_run_that_raises_leaves_the_collector_as_it_was():
    with pytest.raises(RuntimeError), garbage.collected_at_intervals() as collect:
        for step in range(1, 5):
            collect(step)
        raise RuntimeError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    with garbage.collected_at_intervals() as collect:
        collect(1)
    assert not gc.isenabled()


def test_what_a_caller_has_frozen_stays_frozen_and_nothing_joins_it():
    gc.freeze()
    frozen = gc.get_freeze_count()
    with garbage.collected_at_intervals() as collect:
        kept = [[step] for step in range(1000)]
        for step in range(1, 5):
            collect(step)
        assert not gc.isenabled() and len(kept) == 1000
    assert gc.get_freeze_count() <= frozen
