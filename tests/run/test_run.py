import json
import os
import signal
import socket
from contextlib import suppress

import pytest
import torch

from pkm.checkpoint import kill_points
from pkm.checkpoint.save import POINTS
from pkm.config.load import dump
from pkm.distributed import dist
from pkm.distributed.watchdog import RankWatchdog
from pkm.errors import UserError
from pkm.run import lock
from pkm.run.run import Run
from pkm.run.status import read_status
from pkm.run.stop import StopFlag
from tests.support.fork import error_of, exit_code_of, on_ranks, without_root
from tests.support.tiny import tiny_config

TAKEN_OVER = json.dumps({"pid": 1, "host": "elsewhere", "since": "then", "token": "another"})


@pytest.fixture
def opened(tmp_path, capsys):
    """Open the run `tiny` below tmp_path with some settings changed; `opened.heard()` is what was said since."""

    def open_run(**sections):
        config = tiny_config(runs=tmp_path, **sections)
        return Run.open(config, dump(config))

    open_run.directory = tmp_path / "tiny"
    open_run.heard = lambda: capsys.readouterr().out
    return open_run


def settings(opened):
    return (opened.directory / "config.yaml").read_text()


# ---- settings -----------------------------------------------------------------------------------------------------


def test_a_new_run_writes_its_settings_and_the_same_ones_open_it_again(opened):
    with opened() as run:
        assert run.directory == opened.directory and not run.is_finished()
        assert settings(opened) == dump(run.config)
    with opened():
        assert opened.heard() == ""


def test_a_run_that_was_refused_before_its_first_step_begins_anew_with_any_settings(opened):
    for seed in (1, 2, 3):
        with pytest.raises(UserError, match="another model"), opened(seed=seed) as run:
            assert settings(opened) == dump(run.config)
            run.status("running", 0)
            raise UserError("it is another model than this one")
    with pytest.raises(UserError, match="gone wrong"), opened(seed=4) as run:
        run.status("running", 0)
        run.metrics.write(1, "train", loss=2.0)
        raise UserError("gone wrong")
    with pytest.raises(UserError, match="seed: 4 -> 5"):
        opened(seed=5)


def test_changed_settings_are_refused_all_at_once_with_both_values(opened):
    opened().__exit__(None, None, None)
    before = settings(opened)
    with pytest.raises(UserError) as caught:
        opened(seed=2, memory={"query": {"norm": "none"}}, optim={"dense": {"lr": 0.5}}, checkpoint={"keep": 7})
    message = str(caught.value)
    assert str(opened.directory / "config.yaml") in message
    assert "seed: 1 -> 2" in message
    assert "memory.query.norm: batch -> none" in message
    assert "optim.dense.lr: 0.01 -> 0.5" in message
    assert "checkpoint.keep" not in message and "name=" in caught.value.fix
    assert settings(opened) == before
    with opened():
        pass


def test_a_run_that_began_under_old_names_of_settings_is_taken_up_and_has_the_new_ones_then(opened):
    with opened(optim={"values": {"update": "in_backward"}}):
        now = settings(opened)
    then = now.replace("implementation: torch", "fused: torch").replace("update: in_backward", "update: fused")
    then = then.replace("max_consecutive_skips: 20", "max_skipped: 20").replace("in_background: false", "async: false")
    then = then.replace("sync_batch_norm: true", "batch_norm: all ranks")
    (opened.directory / "config.yaml").write_text(then)
    with pytest.raises(UserError, match=r"optim\.values\.update: in_backward -> sparse"):
        opened(optim={"values": {"update": "sparse"}})
    assert settings(opened) == then
    with opened(optim={"values": {"update": "in_backward"}}):
        assert settings(opened) == now and "settings changed" not in opened.heard()


def test_a_memory_that_was_not_there_is_a_change(opened):
    opened(memory=None).__exit__(None, None, None)
    with pytest.raises(UserError, match=r"memory.sub_keys: null -> 8"):
        opened()


def test_settings_that_may_change_are_said_and_kept(opened):
    opened().__exit__(None, None, None)
    with opened(checkpoint={"keep": 7}, log={"every_steps": 3}, corpus={"path": "moved"}) as run:
        assert settings(opened) == dump(run.config)
        heard = opened.heard()
        assert "checkpoint.keep: 3 -> 7" in heard and "corpus.path: prepared/tiny -> moved" in heard


@pytest.mark.parametrize(
    ("dense", "values", "memory", "steps", "refusal"),
    [
        ("inverse_sqrt", "constant", True, 30, None),
        ("constant", "inverse_sqrt", True, 30, None),
        ("cosine", "constant", True, 30, "cosine"),
        ("constant", "linear", True, 30, "linear"),
        ("constant", "linear", False, 30, None),
        ("constant", "constant", True, 10, "may only grow"),
    ],
)
def test_a_run_may_be_made_longer_where_no_schedule_depends_on_its_length(
    opened, dense, values, memory, steps, refusal
):
    sections = {"memory": {} if memory else None}
    optim = {"dense": {"schedule": dense}, "values": {"schedule": values}}
    opened(optim={"steps": 20, **optim}, **sections).__exit__(None, None, None)
    if refusal is None:
        with opened(optim={"steps": steps, **optim}, **sections) as run:
            assert run.config.optim.steps == steps
    else:
        with pytest.raises(UserError, match=rf"optim.steps: 20 -> {steps}.*{refusal}"):
            opened(optim={"steps": steps, **optim}, **sections)


def test_checkpoints_without_settings_are_refused(opened):
    with opened() as run:
        run.checkpoints.save(1, {}, {})
    (opened.directory / "config.yaml").unlink()
    with pytest.raises(UserError, match="checkpoints but no settings"):
        opened()


def test_leftovers_of_a_killed_write_are_removed(opened):
    opened.directory.mkdir()
    (opened.directory / ".config.yaml.123.tmp").write_text("half")
    with opened():
        assert not list(opened.directory.glob(".*"))


# ---- status -------------------------------------------------------------------------------------------------------


def test_status_says_where_the_run_stands(opened):
    with opened() as run:
        run.status("running", 3)
        status = read_status(opened.directory)
        assert (status["state"], status["step"], status["reason"]) == ("running", 3, None)
        assert (status["host"], status["pid"]) == (socket.gethostname(), os.getpid())
        run.status("stopped", 4, "SIGTERM")
    status = read_status(opened.directory)
    assert (status["state"], status["step"], status["reason"]) == ("stopped", 4, "SIGTERM")


def test_a_finished_run_is_finished_until_more_steps_are_asked_for(opened):
    with opened() as run:
        run.status("finished", 20)
        (run.directory / "report.json").write_text('{"evaluation": {}}')
    with opened() as run:
        assert run.is_finished()
    with opened(optim={"steps": 30}) as run:
        assert not run.is_finished()


def test_a_finished_run_that_was_made_longer_and_then_fails_does_not_stay_finished(opened):
    with opened() as run:
        run.status("finished", 20)
    with pytest.raises(UserError), opened(optim={"steps": 30}):
        status = read_status(opened.directory)
        assert (status["state"], status["step"], status["pid"]) == ("running", 20, os.getpid())
        raise UserError("none of the 2 checkpoints can be used")
    status = read_status(opened.directory)
    assert (status["state"], status["step"]) == ("failed", 20) and "none of the 2" in status["reason"]


def test_a_finished_run_whose_report_cannot_be_shown_stays_finished(opened):
    with opened() as run:
        run.status("finished", 20)
    with pytest.raises(UserError), opened():
        raise UserError("no permission")
    assert read_status(opened.directory)["state"] == "finished"


@pytest.mark.parametrize("left", [None, "", '{"evaluation"', "{}", '{"evaluation": null}'])
def test_a_run_whose_report_is_lost_or_broken_is_not_finished_where_there_is_something_to_report(opened, left):
    with opened() as run:
        run.status("finished", 20)
        if left is not None:
            (run.directory / "report.json").write_text(left)
    with opened() as run:
        assert not run.is_finished() and run.is_finished(reports=False)


def test_a_finished_run_shows_its_report_if_it_has_one_and_does_not_log_it_again(opened, capsys):
    with opened() as run:
        run.show_report()
        assert capsys.readouterr().out == f"{run.directory} is finished\n"
        (run.directory / "report.md").write_text("| perplexity | 12.34 |\n")
        run.show_report()
        assert "| perplexity | 12.34 |" in capsys.readouterr().out
        assert "12.34" not in (run.directory / "log.txt").read_text()


def test_a_stop_file_is_gone_once_it_was_obeyed(opened):
    with opened() as run:
        (opened.directory / "STOP").touch()
        run.status("running", 4)
        assert (opened.directory / "STOP").exists()
        run.status("stopped", 4, "STOP file")
        assert not (opened.directory / "STOP").exists()


@pytest.mark.parametrize("error", [UserError("the disk is full"), RuntimeError("boom"), KeyboardInterrupt()])
def test_a_run_that_fails_says_why_and_lets_go(opened, error):
    with pytest.raises(type(error)), opened() as run:
        run.status("running", 3)
        run.metrics.write(7, "train", loss=1.0)
        raise error
    status = read_status(opened.directory)
    assert (status["state"], status["step"]) == ("failed", 7)
    named = "RuntimeError: boom" if isinstance(error, RuntimeError) else str(error)
    assert status["reason"] == (named or "interrupted")
    with opened():
        assert "took over" not in opened.heard()


@pytest.mark.parametrize("left", ["[", '{"state": "finished", "step": null}', '{"state": 3}', '{"checkpoint": "x"}'])
def test_a_garbled_status_is_no_status(opened, left):
    opened().__exit__(None, None, None)
    (opened.directory / "status.json").write_text(left)
    with opened() as run:
        assert not run.is_finished()


def test_what_is_said_is_logged(opened):
    with opened() as run:
        run.say("[bold]step[/bold] 1")
    assert opened.heard() == "[bold]step[/bold] 1\n"
    assert (opened.directory / "log.txt").read_text().endswith("  [bold]step[/bold] 1\n")


def test_ranks_that_nobody_can_watch_are_named(opened, monkeypatch):
    monkeypatch.setattr(RankWatchdog, "watch", lambda self: [2, 3])
    with opened():
        assert "warning: no connection between rank 0 and these ranks: 2, 3." in opened.heard()


# ---- directories that say no --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o555, 0o000])
def test_a_directory_without_permission_is_named(opened, tmp_path, mode):
    os.chmod(tmp_path, mode)
    error = error_of(opened, UserError, before=without_root)
    os.chmod(tmp_path, 0o777)
    assert f"{opened.directory}: no permission" in error and "fix: " in error


def test_a_file_where_the_directory_should_be_is_named(opened):
    opened.directory.write_text("")
    with pytest.raises(UserError, match="tiny: a file stands where a directory is needed"):
        opened()


# ---- lock ---------------------------------------------------------------------------------------------------------


def test_two_processes_cannot_work_on_one_run(opened):
    with opened():
        error = error_of(opened, UserError)
        assert f"process {os.getpid()} on {socket.gethostname()}" in error and "fix: wait for it" in error
        assert exit_code_of(opened) == 1
    with opened():
        assert "took over" not in opened.heard()


def test_a_dead_holder_is_taken_over_and_that_is_said(opened):
    def die():
        opened()
        os.kill(os.getpid(), signal.SIGKILL)

    assert exit_code_of(die) == -signal.SIGKILL
    with opened():
        assert "took over from process" in opened.heard()
    with opened():
        assert opened.heard() == ""


def everything_in(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def taken_over(run):
    """Another process takes the run over and begins a save; returns all that is there then."""
    (run.directory / "lock").write_text(TAKEN_OVER)
    (run.directory / "checkpoints" / "step-0000009.tmp").mkdir(parents=True, exist_ok=True)
    (run.directory / "checkpoints" / "step-0000009.tmp" / "rank-00000.safetensors").write_text("half of it")
    (run.directory / "STOP").touch()
    return everything_in(run.directory)


def test_a_run_that_another_process_took_over_is_told_to_stop_and_says_so_elsewhere(opened, monkeypatch, capsys):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.001)
    flag = StopFlag()
    before = signal.signal(signal.SIGTERM, flag._handle)
    try:
        with opened() as run:
            there = taken_over(run)
            run._lock._thread.join(60)
            assert flag.requested(opened.directory) == "SIGTERM"
            said = f"warning: another process took {opened.directory} over: process 1 on elsewhere, since then"
            assert said in capsys.readouterr().err
            assert everything_in(opened.directory) == there
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("background", [False, True])
def test_after_another_process_took_the_run_over_nothing_is_written_there(opened, background):
    """Before the lock's own thread has noticed it, too."""
    with pytest.raises(UserError, match="the disk is full"), opened(checkpoint={"in_background": background}) as run:
        run.status("running", 3)
        run.metrics.write(3, "train", loss=1.0)
        there = taken_over(run)
        run.say("on with it")
        run.metrics.write(4, "train", loss=1.0)
        with pytest.raises(
            UserError, match=r"cannot save.*step 9: another process took this run over: process 1 on else"
        ):
            run.checkpoints.save(9, {"a": torch.ones(3)}, {})
            run.checkpoints.wait()
        run.status("stopped", 4, "SIGTERM")
        raise UserError("the disk is full")
    assert everything_in(opened.directory) == there


@pytest.mark.parametrize("point", [point for point in POINTS if "in-" not in point])
def test_a_save_during_which_another_process_takes_the_run_over_goes_no_further(opened, monkeypatch, point):
    there = {}
    with opened() as run:
        run.checkpoints.save(8, {"a": torch.ones(3)}, {}, best=True)

        def pass_by(name):
            if name == point:
                there.update(taken_over(run))

        monkeypatch.setattr(kill_points, "point", pass_by)
        with suppress(UserError):
            run.checkpoints.save(9, {"a": torch.ones(3)}, {})
    assert there and everything_in(opened.directory) == there


def _taken_over_while_ranks_work(rank, config):
    with pytest.raises(UserError, match="another process took this run over"), Run.open(config, dump(config)) as run:
        run.checkpoints.save(8, {"a": torch.ones(3)}, {})
        there = dist.broadcast_object(taken_over(run) if rank == 0 else None)
        if rank == 1:
            run._fail(RuntimeError("this rank failed"), None)
        run.checkpoints.save(9, {"a": torch.ones(3)}, {})
    return everything_in(config.directory) == there


def test_no_rank_writes_after_another_process_took_the_run_over(tmp_path):
    config = tiny_config(runs=tmp_path)
    assert on_ranks(2, lambda rank: _taken_over_while_ranks_work(rank, config)) == [True, True]
