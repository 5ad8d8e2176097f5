"""One process at a time holds a lock; a dead holder's is taken over, with flock and without."""

import json
import os
import socket
import threading

import pytest

from pkm.errors import UserError
from pkm.run import lock
from pkm.run.lock import Lock, lock_holder


def held_by(path, **holder):
    path.write_text(json.dumps({"pid": 1, "host": socket.gethostname(), "since": "then", **holder}))


def test_a_holder_on_another_machine_that_shows_no_life_is_taken_over(tmp_path):
    path, heard, waited = tmp_path / "lock", [], []
    held_by(path, host="elsewhere")
    Lock(path, wait=waited.append).acquire(heard.append)
    assert "process 1 on elsewhere" in heard[0] and "took over from process 1 on elsewhere" in heard[1]
    assert sum(waited) >= 3 * lock.BEAT_SECONDS


@pytest.mark.parametrize("beat", [10.0, 4e9], ids=["its clock is behind", "its clock is ahead"])
def test_a_holder_on_another_machine_that_shows_life_is_refused(tmp_path, beat):
    path = tmp_path / "lock"
    held_by(path, host="elsewhere")
    with pytest.raises(UserError, match="process 1 on elsewhere"):
        Lock(path, wait=lambda seconds: os.utime(path, (beat, beat))).acquire(lambda line: None)
    assert json.loads(path.read_text())["host"] == "elsewhere"


@pytest.fixture
def no_flock(monkeypatch):
    def flock(file, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(lock.fcntl, "flock", flock)


def test_where_the_file_system_has_no_flock_a_living_process_is_refused_and_a_dead_one_taken_over(tmp_path, no_flock):
    path, heard = tmp_path / "lock", []
    held_by(path, pid=os.getppid())
    with pytest.raises(UserError, match=f"process {os.getppid()}"):
        Lock(path).acquire(heard.append)
    gone = os.fork() or os._exit(0)
    os.waitpid(gone, 0)
    held_by(path, pid=gone)
    Lock(path, wait=lambda seconds: None).acquire(heard.append)
    assert f"took over from process {gone}" in heard[0]


@pytest.mark.parametrize("jobs", [2, 5])
def test_of_jobs_that_start_together_where_there_is_no_flock_one_gets_the_lock(tmp_path, no_flock, monkeypatch, jobs):
    """All look at the empty file before any writes."""
    path, together, looked = tmp_path / "lock", threading.Barrier(jobs, timeout=60), set()
    look = Lock._holder

    def look_together(self):
        found = look(self)
        if self not in looked:
            looked.add(self)
            together.wait()
        return found

    monkeypatch.setattr(Lock, "_holder", look_together)
    got, refused = [], []

    def job():
        own = Lock(path, wait=lambda seconds: together.wait())
        try:
            own.acquire(pytest.fail)
            got.append(own)
        except UserError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=job) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1 and len(refused) == jobs - 1 and got[0].mine()
    assert all(f"at work on this run: process {os.getpid()}" in message for message in refused)
    got[0].release()
    assert path.read_bytes() == b""


def test_where_there_is_a_flock_nobody_waits(tmp_path):
    own = Lock(tmp_path / "lock", wait=pytest.fail)
    own.acquire(pytest.fail)
    own.release()


def test_a_lock_that_another_took_over_is_given_up_and_is_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.001)
    path, lost, by = tmp_path / "lock", threading.Event(), []
    own = Lock(path, lambda who: (by.append(who), lost.set()))
    own.acquire(pytest.fail)
    path.write_text("")  # as it is for a moment while another takes it
    held_by(path, host="elsewhere", token="another")
    before = path.read_text()
    assert lost.wait(60) and by == ["process 1 on elsewhere, since then"]
    own.release()
    assert path.read_text() == before


def test_the_holder_shows_that_it_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.001)
    held = Lock(tmp_path / "lock")
    held.acquire(lambda line: None)
    os.utime(tmp_path / "lock", (10, 10))
    while (tmp_path / "lock").stat().st_mtime == 10:
        pass
    held.release()


def test_a_lock_file_with_anything_in_it_is_taken(tmp_path):
    (tmp_path / "lock").write_bytes(b"\xff\0[")
    Lock(tmp_path / "lock").acquire(pytest.fail)


def test_a_lock_counts_only_while_its_holder_lives(tmp_path):
    path, here = tmp_path / "lock", socket.gethostname()
    assert lock_holder(path) is None
    lock = Lock(path)
    lock.acquire(pytest.fail)
    assert lock_holder(path) == f"process {os.getpid()} on {here}"
    lock.release()
    assert lock_holder(path) is None
    # A holder that died, whose number another process has now: this one.
    path.write_text(json.dumps({"pid": os.getpid(), "host": here}))
    assert lock_holder(path) is None
    path.write_text(json.dumps({"pid": 2**22 + 1, "host": here}))
    assert lock_holder(path) is None
    path.write_text(json.dumps({"pid": 1, "host": "another"}))
    assert lock_holder(path) == "process 1 on another"
    os.utime(path, (0, 0))
    assert lock_holder(path) is None
