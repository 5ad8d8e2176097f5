import pytest

from pkm.format import duration
from pkm.train.clock import Clock


def test_time_left_is_at_the_pace_of_this_session():
    clock = Clock(step=10, steps=20)
    clock.seconds, clock.step = 5.0, 15
    assert clock.left() == pytest.approx(5.0)


def test_pauses_are_not_counted_as_training():
    clock = Clock(step=0, steps=10)
    clock.last -= 100
    clock.pause()
    clock.tick(1, tokens=64)
    assert clock.seconds < 50


def test_a_clock_stops_in_time_for_the_longest_save():
    clock = Clock(step=0, steps=10, max_minutes=1)
    assert not clock.must_stop(0.0, saving=False)
    assert not clock.must_stop(30.0, saving=False)
    assert clock.must_stop(30.0, saving=True)  # which the last save would have to wait for
    assert clock.must_stop(41.0, saving=False)


def test_a_clock_stops_in_time_for_a_save_and_an_evaluation_that_it_has_not_seen_yet():
    clock = Clock(step=0, steps=100, max_minutes=1, save_seconds=41.0)
    assert clock.must_stop(0.0, saving=False) and not clock.must_stop(10.0, saving=False)
    clock = Clock(step=0, steps=100, max_minutes=1, evaluation_steps=100)
    clock.seconds, clock.step = 5.0, 10  # half a second each
    assert clock.must_stop(0.0, saving=False, evaluates=True) and not clock.must_stop(0.0, saving=False)
    clock.last -= 10
    clock.evaluated()
    assert clock.evaluation_seconds >= 10 and not clock.must_stop(0.0, saving=False, evaluates=True)


def test_a_clock_of_ranks_that_were_started_again_has_what_is_left_of_the_limit():
    assert not Clock(step=5, steps=10, max_minutes=10, spent=500).must_stop(0.0, saving=False)
    assert Clock(step=5, steps=10, max_minutes=10, spent=600).must_stop(0.0, saving=False)


def test_durations_read_as_a_clock():
    assert [duration(s) for s in (3725, 59.6, 0)] == ["1:02:05", "1:00", "0:00"]
