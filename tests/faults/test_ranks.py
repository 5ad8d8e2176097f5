"""What goes wrong on one of several ranks is the same decision, and the same reason, on all of them."""

import os
import re
import shutil
import signal

import pytest

from tests.faults.test_bad_input import flip
from tests.support.fork import small_disk
from tests.support.tiny import random_corpus

SIGTERM_AT_9 = {"when": {"step": 9, "signals": ["SIGTERM"]}}


def codes(ended):
    return [end.code for end in ended]


def refused(ended, *parts):
    """Assert that the ranks were refused together, by one message with all these parts on one of them."""
    assert codes(ended) == [2] * len(ended), [(end.code, end.err) for end in ended]
    (told,) = [end.err for end in ended if end.err]
    assert "Traceback" not in told and told.count("error: ") == 1
    for part in (*parts, "fix: "):
        assert part in told
    return told


def ends_as_the_whole(runs, name, other_saves=False):
    runs.finish(2, name)
    runs.finish(2, "whole")
    assert runs.outcome(name, other_saves) == runs.outcome("whole", other_saves)


# ---- told to stop -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "signals", "reason"),
    [
        (1, ["SIGTERM"], "SIGTERM"),
        (0, ["SIGUSR1"], "SIGUSR1"),
        (1, ["SIGINT"], "SIGINT"),
        (1, ["SIGTERM", "SIGUSR1"] * 100, "SIGTERM"),
    ],
    ids=["SIGTERM", "SIGUSR1", "Ctrl-C", "a storm"],
)
def test_a_signal_to_one_rank_stops_all_of_them_at_the_same_step(runs, rank, signals, reason):
    ended = runs.run_ranks(2, "run", on={rank: {"when": {"step": 9, "signals": signals}}})
    assert codes(ended) == [0, 0] and [end.err for end in ended] == ["", ""]
    assert runs.status("run") == ("stopped", 9, reason)
    ends_as_the_whole(runs, "run", other_saves=True)


def test_a_file_STOP_stops_all_ranks(runs):
    touch = str(runs.directory("run") / "STOP")
    assert codes(runs.run_ranks(2, "run", on={1: {"when": {"step": 9, "touch": touch}}})) == [0, 0]
    assert runs.status("run")[0] == "stopped" and runs.status("run")[2] == "STOP file"
    assert not os.path.exists(touch)
    ends_as_the_whole(runs, "run", other_saves=True)


def test_storms_of_signals_in_every_step_and_on_every_rank_lose_nothing(runs):
    for turn in range(1, 25):
        storm = {rank: {"when": {"step": turn * 3, "signals": ["SIGTERM", "SIGUSR1"] * 10}} for rank in range(2)}
        assert codes(runs.run_ranks(2, "run", on=storm)) == [0, 0]
        if runs.status("run")[0] == "finished":
            break
    assert turn == 9  # stopped after each third step, then before the report, then done
    ends_as_the_whole(runs, "run", other_saves=True)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_while_the_report_is_made_is_a_stop_and_the_same_command_makes_the_report(runs, ranks, name):
    on = {ranks - 1: {"when": {"said": "evaluating step", "signals": [name]}}}
    if ranks == 1:
        assert runs.run("run", **on[0]).code == 0
    else:
        assert codes(runs.run_ranks(2, "run", on=on)) == [0, 0]
    assert runs.status("run") == ("stopped", 24, name)
    assert "the same command writes it" in runs.log("run")
    assert not (runs.directory("run") / "report.json").exists()
    if ranks == 1:
        assert runs.run("run").code == runs.run("whole").code == 0
        assert runs.outcome("run") == runs.outcome("whole")
    else:
        ends_as_the_whole(runs, "run")


def test_an_impatient_second_ctrl_c_in_the_report_is_no_failure(runs):
    ended = runs.run("run", when={"said": "evaluating step", "signals": ["SIGINT", "SIGINT"]})
    assert ended.code == 130 and runs.status("run") == ("stopped", 24, "interrupted")
    assert runs.run("run").code == 0 and runs.status("run")[0] == "finished"


# ---- a rank that fails --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_on_one_rank_ends_the_others_with_its_reason(runs, rank):
    ended = runs.run_ranks(2, "run", on={rank: {"when": {"step": 9, "raises": "boom"}}})
    other = ended[1 - rank]
    assert ended[rank].code == 1 and "Traceback" in ended[rank].err and "boom" in ended[rank].err
    assert other.code == 2 and "Traceback" not in other.err
    reason = f"rank {rank} failed: RuntimeError: boom"
    assert reason in other.err and runs.status("run") == ("failed", 9, reason)
    assert reason in runs.log("run")
    ends_as_the_whole(runs, "run")


@pytest.mark.parametrize("dead", [0, 2])
def test_ranks_held_up_where_no_signal_reaches_end_with_the_reason_when_one_is_killed(runs, dead):
    """As ranks that wait for a GPU, whose collective never ends."""
    on = {rank: {"when": {"step": 9, "held": True}} for rank in range(4)}
    on[dead] = {"when": {"step": 9, "signals": ["SIGKILL"]}}
    ended = runs.run_ranks(4, "run", "optim.micro_batch=2", on=on)
    assert [end.code for end in ended] == [-9 if rank == dead else 2 for rank in range(4)]
    state, step, reason = runs.status("run")
    assert (state, step) == ("failed", 9)
    assert re.fullmatch(f"rank [0-3] lost another rank: rank {dead} has ended", reason) and reason in runs.log("run")
    for end in ended:
        assert end.code == -9 or (f"lost another rank: rank {dead} has ended" in end.err and "Traceback" not in end.err)


def test_a_rank_held_up_ends_with_the_reason_of_the_one_that_failed(runs):
    on = {0: {"when": {"step": 9, "held": True}}, 1: {"when": {"step": 9, "raises": "boom"}}}
    ended = runs.run_ranks(2, "run", on=on)
    reason = "rank 1 failed: RuntimeError: boom"
    assert codes(ended) == [2, 1] and reason in ended[0].err
    assert runs.status("run") == ("failed", 9, reason) and "lost another rank" not in runs.log("run")


def test_a_loss_that_is_no_number_on_one_rank_is_skipped_on_all(runs):
    for name, rank in (("run", 0), ("other", 1)):
        ended = runs.run_ranks(2, name, "optim.steps=9", on={rank: {"nan": 7}})
        assert codes(ended) == [0, 0], [end.err for end in ended]
        assert "step 7 skipped" in runs.log(name)
        assert [record["skipped"] for record in runs.metrics(name) if record["kind"] == "train"][5:8] == [0, 1, 1]
    assert runs.outcome("run")["checkpoints"] == runs.outcome("other")["checkpoints"]


def test_ranks_that_are_held_up_change_nothing(runs):
    ranks = runs.start_ranks(2, "run")
    for step in range(2, 20, 3):
        slow = ranks.jobs[step % 2]
        ranks.jobs[0].until(f"step {step:>2}/24")
        slow.signal(signal.SIGSTOP)
        while state(slow.pid) not in "TZ":  # stopped, or on a busy machine at its end already
            pass
        slow.signal(signal.SIGCONT)
    assert codes(ranks.wait()) == [0, 0]
    ends_as_the_whole(runs, "run")


def state(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0]


# ---- what ranks share ---------------------------------------------------------------------------------------------


def test_a_second_job_on_the_same_run_is_refused_on_all_its_ranks(runs):
    long = "optim.steps=100000"
    first = runs.start_ranks(2, "run", long)
    first.jobs[0].until("step      5/100000")
    refused(runs.run_ranks(2, "run", long), f"process {first.jobs[0].pid}")
    first.jobs[1].signal(signal.SIGTERM)
    assert codes(first.wait()) == [0, 0] and runs.status("run")[0] == "stopped"


def test_the_lock_of_ranks_that_died_is_taken_over_at_once_and_that_is_said(runs):
    ended = runs.run_ranks(2, "run", on={rank: {"when": {"step": 9, "signals": ["SIGKILL"]}} for rank in range(2)})
    assert codes(ended) == [-9, -9]
    ends_as_the_whole(runs, "run")
    assert "took over from process" in runs.log("run") and "watching" not in runs.log("run")


def test_ranks_refuse_another_corpus_and_go_on_with_theirs_moved(runs):
    assert codes(runs.run_ranks(2, "run", on={1: SIGTERM_AT_9})) == [0, 0]
    other = random_corpus(runs.root / "other", seed=1)
    refused(runs.run_ranks(2, "run", f"corpus.path={other}"), "another corpus", str(other))
    runs.corpus.rename(runs.root / "moved")
    runs.finish(2, "run", f"corpus.path={runs.root}/moved")


@pytest.mark.parametrize("file", ["rank-00000.safetensors", "rank-00001.safetensors", "manifest.json"])
def test_a_flipped_byte_in_any_file_is_named_and_all_ranks_go_back_to_the_checkpoint_before(runs, file):
    assert codes(runs.run_ranks(2, "run", on={0: {"when": {"step": 14, "signals": ["SIGTERM"]}}})) == [0, 0]
    assert runs.checkpoints("run").steps() == [12, 14]
    flip(runs.checkpoints("run").directory(14) / file)
    ends_as_the_whole(runs, "run")
    assert re.search(f"step-0000014 is damaged: .*{file}", runs.log("run"))
    assert "going on from step 12" in runs.log("run")


def test_a_directory_of_checkpoints_that_cannot_be_read_is_named_once(runs):
    assert codes(runs.run_ranks(2, "run", on={1: SIGTERM_AT_9})) == [0, 0]
    checkpoints = runs.directory("run") / "checkpoints"
    ordinary = {rank: {"ordinary": True} for rank in range(2)}
    os.chmod(checkpoints, 0o000)
    refused(runs.run_ranks(2, "run", on=ordinary), str(checkpoints), "no permission")
    os.chmod(checkpoints, 0o777)
    os.chmod(checkpoints / "step-0000009" / "rank-00001.safetensors", 0o000)
    runs.run_ranks(2, "run", on=ordinary)
    assert "step-0000009 is damaged: rank-00001.safetensors cannot be read: no permission" in runs.log("run")
    ends_as_the_whole(runs, "run")


def test_a_checkpoint_whose_directory_cannot_be_read_is_named_and_the_one_before_is_used(runs):
    assert codes(runs.run_ranks(2, "run", on={0: {"when": {"step": 14, "signals": ["SIGTERM"]}}})) == [0, 0]
    os.chmod(runs.checkpoints("run").directory(14), 0o000)
    runs.run_ranks(2, "run", on={rank: {"ordinary": True} for rank in range(2)})
    assert re.search("step-0000014 is damaged: .*cannot be read", runs.log("run"))
    assert "going on from step 12" in runs.log("run")
    ends_as_the_whole(runs, "run")


# ---- disks and clocks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", ["false", "true"], ids=["in the loop", "in the background"])
def test_a_save_that_one_rank_cannot_write_ends_all_with_the_reason_and_leaves_no_half(runs, background):
    setting = f"checkpoint.in_background={background}"
    assert codes(runs.run_ranks(2, "run", setting, on={0: SIGTERM_AT_9})) == [0, 0]
    before = runs.checkpoints("run").steps()
    ended = runs.run_ranks(2, "run", setting, on={1: {"file_size": 6000}})
    told = refused(ended, "cannot save the checkpoint of step 12", "(rank 1)", "ulimit -f", "goes on from step 9")
    assert ended[1].err == told
    state, _, reason = runs.status("run")
    assert state == "failed" and "(rank 1)" in reason
    assert runs.checkpoints("run").steps() == before
    assert not list((runs.directory("run") / "checkpoints").glob("*.tmp"))
    ends_as_the_whole(runs, "run", other_saves=True)


@pytest.mark.parametrize("background", ["false", "true"], ids=["in the loop", "in the background"])
def test_a_full_disk_ends_all_ranks_and_they_go_on_when_there_is_room(runs, background):
    with small_disk(runs.root / "disk", 3000) as disk:
        settings = (f"runs={disk}", f"checkpoint.in_background={background}")
        assert codes(runs.run_ranks(2, "whole", *settings, on={0: SIGTERM_AT_9})) == [0, 0]
        filler = disk / "filler"
        filler.write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - 200_000))
        refused(runs.run_ranks(2, "whole", *settings), "checkpoint of step 12", "MB free", "goes on from step 9")
        filler.unlink()
        assert codes(runs.run_ranks(2, "whole", *settings)) == [0, 0]
        shutil.copytree(disk / "whole", runs.directory("run"))
    ends_as_the_whole(runs, "run", other_saves=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_depends_on_clocks(runs, ranks):
    """Times that run backwards, and files of the oldest checkpoint that claim to be from the future."""
    backwards = {"clock_runs_backwards": True}
    stop = {**backwards, **SIGTERM_AT_9}
    turns = [{0: stop, 1: backwards}, dict.fromkeys(range(2), backwards)]
    for turn in turns:
        ended = [runs.run("run", **turn[0])] if ranks == 1 else runs.run_ranks(2, "run", on=turn)
        assert codes(ended) == [0] * ranks, [end.err for end in ended]
        for age, step in enumerate(runs.checkpoints("run").steps()):
            for path in runs.checkpoints("run").directory(step).iterdir():
                os.utime(path, (4e9 - age * 1e9,) * 2)
    if ranks == 1:
        assert runs.run("whole").code == 0
        assert runs.outcome("run", other_saves=True) == runs.outcome("whole", other_saves=True)
    else:
        ends_as_the_whole(runs, "run", other_saves=True)
