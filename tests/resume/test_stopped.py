"""A run that is told to stop saves, says so, and goes on from there when the same command is given again."""

import signal

import pytest


def stop(runs, name, *signals, step=9, **when):
    """Start or resume a run that gets these signals in a step, and return how it ended."""
    return runs.run(name, when={"step": step, "signals": signals, **when})


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_saves_and_exits_0_and_the_run_ends_bit_identical(runs, name):
    ended = stop(runs, name, name)
    assert ended.code == 0 and ended.err == ""
    assert runs.status(name) == ("stopped", 9, name)
    assert f"stopped at step 9 ({name})" in ended.out
    assert runs.checkpoints(name).load("latest").step == 9
    assert runs.run(name).code == 0
    assert runs.outcome(name, other_saves=True) == runs.outcome("whole", other_saves=True)


@pytest.mark.parametrize("step", [8, 12, 24], ids=["saved anyway", "saved and evaluated anyway", "last"])
def test_a_signal_in_a_step_that_is_saved_anyway_saves_once(runs, step):
    assert stop(runs, f"at-{step}", "SIGTERM", step=step).code == 0
    assert runs.status(f"at-{step}") == ("stopped", step, "SIGTERM")
    assert runs.run(f"at-{step}").code == 0
    assert runs.outcome(f"at-{step}") == runs.outcome("whole")


def test_a_file_STOP_saves_and_exits_0_and_does_not_stop_the_run_a_second_time(runs):
    ended = stop(runs, "file", touch=str(runs.directory("file") / "STOP"))
    assert ended.code == 0
    assert runs.status("file") == ("stopped", 9, "STOP file")
    assert runs.run("file").code == 0
    assert runs.outcome("file", other_saves=True) == runs.outcome("whole", other_saves=True)


def test_a_storm_of_signals_is_one_stop(runs):
    ended = stop(runs, "storm", *["SIGTERM", "SIGUSR1"] * 50)
    assert ended.code == 0 and runs.status("storm") == ("stopped", 9, "SIGTERM")
    assert runs.run("storm").code == 0
    assert runs.outcome("storm", other_saves=True) == runs.outcome("whole", other_saves=True)


def test_a_second_ctrl_c_interrupts_at_once_and_nothing_is_lost(runs):
    ended = stop(runs, "impatient", "SIGINT", "SIGINT")
    assert ended.code == 130 and "Traceback" not in ended.err
    assert runs.status("impatient") == ("failed", 9, "interrupted")
    assert runs.checkpoints("impatient").load("latest").step == 8
    assert runs.run("impatient").code == 0
    assert runs.outcome("impatient") == runs.outcome("whole")


def test_resuming_twice_replays_nothing(runs):
    for step in (5, 14):
        stop(runs, "twice", "SIGTERM", step=step)
        assert runs.status("twice") == ("stopped", step, "SIGTERM")
    assert runs.run("twice").code == 0
    steps = [record["step"] for record in runs.metrics("twice") if record["kind"] == "train"]
    assert steps == list(range(1, 25))
    assert runs.outcome("twice", other_saves=True) == runs.outcome("whole", other_saves=True)


def test_a_finished_run_says_so_prints_its_report_again_and_changes_nothing(runs):
    before = {
        p: p.read_bytes() for p in runs.directory("whole").rglob("*") if p.is_file() and p.name not in ("log.txt",)
    }
    ended = runs.run("whole")
    assert ended.code == 0 and "finished" in ended.out and ended.err == ""
    assert (runs.directory("whole") / "report.md").read_text() in ended.out
    assert before == {path: path.read_bytes() for path in before}


def test_a_run_killed_in_its_report_writes_it_once_when_it_goes_on(runs):
    killed = stop(runs, "report", "SIGKILL", step=24, kind="test")
    assert killed.code == -signal.SIGKILL
    ended = runs.run("report")
    assert ended.code == 0
    assert runs.outcome("report") == runs.outcome("whole")


@pytest.mark.parametrize("moments", ["at the end", "in the middle"])
def test_a_run_that_is_made_longer_equals_one_that_was_long_from_the_start(runs, moments):
    name, middle = f"longer {moments}".replace(" ", "-"), "optim.steps=12"
    assert runs.run("short-" + name, middle).code == 0
    if moments == "in the middle":
        assert runs.run("short-" + name, "optim.steps=18").code == 0
    assert runs.run("short-" + name).code == 0
    ours, whole = runs.outcome("short-" + name, other_saves=True), runs.outcome("whole", other_saves=True)
    assert ours == whole


def test_resumes_at_and_around_the_end_of_an_epoch_change_nothing(runs):
    """The corpus has 299 windows of 8: with 4 of them a step, the first epoch ends inside step 75."""
    settings = (
        "optim.batch_tokens=32",
        "optim.micro_batch=null",
        "checkpoint.every_steps=1000",
        "evaluate.every_steps=1000",
    )
    assert runs.run("epochs", "optim.steps=90", *settings).code == 0
    for steps in (67, 74, 75, 76, 90):
        ended = runs.run("epochs-resumed", f"optim.steps={steps}", *settings)
        assert ended.code == 0, ended.err
    ours, whole = runs.outcome("epochs-resumed", other_saves=True), runs.outcome("epochs", other_saves=True)
    assert ours["checkpoints"]["step-0000090"] == whole["checkpoints"]["step-0000090"]


def test_a_changed_setting_is_refused_by_name_and_the_run_still_goes_on(runs):
    stop(runs, "changed", "SIGTERM")
    before = runs.status("changed")
    ended = runs.run("changed", "model.layers=3", "seed=9", "optim.dense.lr=0.5")
    assert ended.code == 2 and "Traceback" not in ended.err
    for line in ("model.layers: 2 -> 3", "seed: 1 -> 9", "optim.dense.lr: 0.01 -> 0.5", "config.yaml", "fix: "):
        assert line in ended.err
    assert runs.status("changed") == before
    assert runs.run("changed").code == 0
    assert runs.outcome("changed", other_saves=True) == runs.outcome("whole", other_saves=True)


def test_settings_that_do_not_touch_the_numbers_may_change_on_the_way(runs):
    stop(runs, "logging", "SIGTERM")
    ended = runs.run("logging", "checkpoint.keep=5", "log.tensorboard=false", "checkpoint.every_steps=3")
    assert ended.code == 0 and "checkpoint.keep: 2 -> 5" in ended.out
    ours, whole = runs.outcome("logging", other_saves=True), runs.outcome("whole", other_saves=True)
    assert ours == whole


def test_two_processes_cannot_train_one_run(runs):
    long = "optim.steps=100000"
    job = runs.start("locked", long)
    job.until("step      5/100000")
    second = runs.run("locked", long)
    assert second.code == 2 and f"process {job.pid}" in second.err and "fix: " in second.err
    job.signal(signal.SIGTERM)
    assert job.wait().code == 0
    assert runs.status("locked")[0] == "stopped"


def test_a_resume_after_a_kill_says_whose_lock_it_took_over(runs):
    killed = stop(runs, "dead", "SIGKILL")
    assert killed.code == -signal.SIGKILL
    ended = runs.run("dead")
    assert ended.code == 0 and "took over from process" in ended.out
