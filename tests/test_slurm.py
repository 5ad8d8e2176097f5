"""The sbatch files are run for real, with stand-ins for SLURM's programs and, where not said otherwise, for python."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pkm import configfile, slurm
from pkm.errors import UserError, UserErrors
from tests.tiny import tiny_config

REPOSITORY = Path(__file__).parent.parent
SLURM = REPOSITORY / "scripts" / "slurm"

SCONTROL = """#!/bin/bash
echo "$*" >>"$FAKE/scontrol.log"
case "$1" in
show) if [[ $2 == hostnames ]]; then printf 'head\\nsecond\\n'; else echo "JobId=$3 JobState=$FAKE_STATE Reason=None"; fi ;;
requeue) exit "${FAKE_REQUEUE:-0}" ;;
esac
"""
# Runs its command once a node, as srun does, and fails if one of them fails.
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do case $1 in *=* | --label) shift ;; *) shift 2 ;; esac; done
code=0
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do SLURM_NODEID=$node "$@" || code=$?; done
exit $code
"""
SBATCH = """#!/bin/bash
echo "$*" >>"$FAKE/sbatch.log"
if [[ -n ${FAKE_REFUSAL:-} ]]; then echo "$FAKE_REFUSAL" >&2; exit 1; fi
echo '4711;cluster'
"""
# Tells the run's directory, plays the doctor, and for train.py what the test asks for.
PYTHON = """#!/bin/bash
echo "$*" >>"$FAKE/python.log"
status() { echo "{\\"state\\": \\"$1\\", \\"step\\": 7, \\"reason\\": \\"$2\\", \\"pid\\": $$}" >"$FAKE/run/status.json"; }
until_asked() { echo >"$FAKE/begun"; until [[ -e $FAKE/run/STOP ]]; do sleep 0.02; done; }
case "$*" in
*--print-directory*) echo "$FAKE/run" ;;
*doctor.py*) eval "${FAKE_DOCTOR:-true}" ;;
*train.py*) env >"$FAKE/environment"; eval "$FAKE_TRAIN" ;;
esac
"""


@dataclass
class Cluster:
    """A folder with stand-ins, and jobs that run in it."""

    folder: Path
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def environment(self, nodes: int) -> dict[str, str]:
        return {
            "PATH": f"{self.folder}/bin:/usr/bin:/bin", "FAKE": str(self.folder), "FAKE_STATE": "RUNNING",
            "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_NODELIST": "n[0-1]",
            "SLURM_SUBMIT_DIR": str(REPOSITORY), "SLURM_CPUS_PER_TASK": "12", "SLURM_GPUS_ON_NODE": "4",
            "VIRTUAL_ENV": "stand-in", **self.settings,
        }  # fmt: skip

    def start(self, *arguments: str | Path, nodes: int = 1, cwd: Path = REPOSITORY) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", *map(str, arguments)], env=self.environment(nodes), cwd=cwd, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def job(
        self, train: str, file: str = "one_node.sbatch", send: signal.Signals | None = None, **settings: str
    ) -> tuple[int, str]:
        """Run a job, sending it a signal once its run has begun: its exit status and what it said."""
        self.settings = {"FAKE_TRAIN": train, **settings}
        begun = self.folder / "begun"
        begun.unlink(missing_ok=True)
        os.mkfifo(begun)
        process = self.start(SLURM / file, "c.yaml", "a.b=1", nodes=1 + (file != "one_node.sbatch"))
        if send is not None:
            begun.read_text()
            process.send_signal(send)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def said(self, name: str) -> list[str]:
        log = self.folder / f"{name}.log"
        return log.read_text().splitlines() if log.exists() else []

    def requeues(self) -> int:
        return self.said("scontrol").count("requeue 7")


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    (tmp_path / "bin").mkdir()
    for name, text in {"scontrol": SCONTROL, "srun": SRUN, "sbatch": SBATCH, "python": PYTHON}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    return Cluster(tmp_path)


class TestRequeue:
    @pytest.mark.parametrize(
        ("train", "requeued", "exit_status"),
        [
            ("status finished", False, 0),
            ("status stopped 'time limit'", True, 0),
            # torchrun ends with an error when it had a signal to forward.
            ("status stopped SIGTERM; exit 1", True, 0),
            ("status failed 'loss is not finite'; exit 3", False, 3),
            ("status running; exit 137", False, 137),
            ("exit 2", False, 2),
        ],
    )
    def test_a_job_is_requeued_exactly_if_its_run_stopped(
        self, cluster: Cluster, train: str, requeued: bool, exit_status: int
    ) -> None:
        code, output = cluster.job(train)
        assert (code, cluster.requeues()) == (exit_status, int(requeued)), output

    def test_many_nodes_are_requeued_by_the_same_rule(self, cluster: Cluster) -> None:
        assert cluster.job("status finished", "many_nodes.sbatch")[0] == 0
        assert cluster.requeues() == 0
        code, output = cluster.job("status stopped 'time limit'", "many_nodes.sbatch")
        assert (code, cluster.requeues()) == (0, 1), output

    def test_a_status_that_an_earlier_job_left_is_not_taken_for_this_ones(self, cluster: Cluster) -> None:
        cluster.job("status stopped 'time limit'")
        code, output = cluster.job("echo error: the corpus is gone; exit 2")
        assert (code, cluster.requeues()) == (2, 1), output

    def test_a_run_that_was_finished_before_ends_the_job_well(self, cluster: Cluster) -> None:
        cluster.job("status finished")
        assert cluster.job("echo is finished")[0] == 0
        assert cluster.requeues() == 0

    def test_a_user_who_writes_the_file_stop_is_obeyed(self, cluster: Cluster) -> None:
        code, output = cluster.job("status stopped 'STOP file'")
        assert (code, cluster.requeues()) == (0, 0)
        assert "somebody wrote" in output

    @pytest.mark.parametrize("state", ["CANCELLED", "COMPLETING", "PENDING"])
    def test_a_job_that_was_cancelled_is_not_brought_back(self, cluster: Cluster, state: str) -> None:
        code, output = cluster.job("status stopped SIGTERM; exit 1", FAKE_STATE=state)
        assert (code, cluster.requeues()) == (0, 0)
        assert state in output

    def test_a_cluster_that_does_not_requeue_makes_the_job_fail_with_advice(self, cluster: Cluster) -> None:
        code, output = cluster.job("status stopped 'time limit'", FAKE_REQUEUE="1")
        assert code == 1 and "submit the job again" in output


class TestSignal:
    @pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
    @pytest.mark.parametrize("file", ["one_node.sbatch", "many_nodes.sbatch"])
    def test_on_a_signal_the_run_finds_the_file_stop_and_is_waited_for(
        self, cluster: Cluster, number: signal.Signals, file: str
    ) -> None:
        train = "until_asked; cat $FAKE/run/STOP >>$FAKE/stop; rm $FAKE/run/STOP; status stopped 'STOP file'"
        if file == "many_nodes.sbatch":
            train = f"if ((SLURM_NODEID == 0)); then {train}; fi"
        code, output = cluster.job(train, file, number)
        assert (cluster.folder / "stop").read_text() == f"SLURM job 7, {number.name}\n", output
        assert (code, cluster.requeues()) == (0, 1), output

    def test_a_run_that_finishes_meanwhile_is_not_requeued_and_leaves_no_stop_behind(self, cluster: Cluster) -> None:
        assert cluster.job("until_asked; status finished", send=signal.SIGUSR1)[0] == 0
        assert cluster.requeues() == 0
        assert not (cluster.run / "STOP").exists()

    def test_a_run_that_fails_meanwhile_is_not_requeued(self, cluster: Cluster) -> None:
        assert cluster.job("until_asked; status failed; exit 1", send=signal.SIGUSR1)[0] == 1
        assert cluster.requeues() == 0

    def test_out_of_time_a_run_goes_on_from_its_newest_checkpoint_but_not_twice_from_the_same(
        self, cluster: Cluster
    ) -> None:
        endless = "status running; until_asked; exit 137"
        latest = cluster.run / "checkpoints" / "latest"
        for step, requeues in ((1, 1), (2, 2), (2, 2), (3, 3)):
            latest.write_text(f"step-000000{step}\n")
            _, output = cluster.job(endless, send=signal.SIGUSR1)
            assert cluster.requeues() == requeues, output
            assert not (cluster.run / "STOP").exists()

    def test_a_run_that_does_not_stop_is_waited_for_no_longer_than_the_grace(self, cluster: Cluster) -> None:
        # Until the test closes the pipe, long after the job has ended.
        os.mkfifo(cluster.folder / "never")
        never = os.open(cluster.folder / "never", os.O_RDWR)
        train = 'until_asked; exec 1>&- 2>&-; read -r _ <"$FAKE/never"'
        code, output = cluster.job(train, send=signal.SIGUSR1, PKM_GRACE="1")
        os.write(never, b"\n")
        os.close(never)
        assert "did not stop within 1 s" in output
        assert (code, cluster.requeues()) == (0, 1)

    def test_a_stop_that_a_killed_job_left_does_not_stop_the_next_one(self, cluster: Cluster) -> None:
        (cluster.run / "STOP").write_text("SLURM job 6, SIGUSR1\n")
        cluster.job("[[ ! -e $FAKE/run/STOP ]] && status finished")
        assert json.loads((cluster.run / "status.json").read_text())["state"] == "finished"

    def test_a_stop_that_a_user_wrote_stays_for_the_run(self, cluster: Cluster) -> None:
        (cluster.run / "STOP").touch()
        assert cluster.job("[[ -e $FAKE/run/STOP ]] && status stopped 'STOP file'")[0] == 0
        assert cluster.requeues() == 0


class TestDoctor:
    def test_training_does_not_begin_on_nodes_that_the_doctor_refuses(self, cluster: Cluster) -> None:
        code, _ = cluster.job("touch $FAKE/trained", FAKE_DOCTOR="exit 1")
        assert code == 1 and not (cluster.folder / "trained").exists() and cluster.requeues() == 0

    def test_the_doctor_can_be_left_out(self, cluster: Cluster) -> None:
        assert cluster.job("status finished", FAKE_DOCTOR="exit 1", PKM_DOCTOR="no")[0] == 0

    def test_preempted_while_the_doctor_looks_the_job_is_requeued_without_training(self, cluster: Cluster) -> None:
        code, output = cluster.job("touch $FAKE/trained", send=signal.SIGTERM, FAKE_DOCTOR="until_asked")
        assert not (cluster.folder / "trained").exists()
        assert (code, cluster.requeues()) == (0, 1), output


def listening() -> tuple[socket.socket, int]:
    """A server at the port where the ranks of a job would meet, and the job's id."""
    for number in range(1000, 2000):
        try:
            return socket.create_server(("127.0.0.1", 10000 + number)), number
        except OSError:
            continue
    pytest.skip("no port is free")


class TestTorchrun:
    def test_one_node_starts_a_rank_for_each_gpu_with_its_share_of_the_cores(self, cluster: Cluster) -> None:
        cluster.job("status finished")
        directory, doctor, train = cluster.said("python")
        assert directory.endswith("launch_slurm.py --print-directory c.yaml a.b=1")
        start = "-m torch.distributed.run --standalone --nproc-per-node 4 "
        assert doctor == start + f"{REPOSITORY}/scripts/doctor.py c.yaml a.b=1"
        assert train == start + f"--max-restarts 3 {REPOSITORY}/train.py c.yaml a.b=1"
        environment = (cluster.folder / "environment").read_text().splitlines()
        assert "OMP_NUM_THREADS=3" in environment
        assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=570" in environment
        assert any(line.startswith("PET_SIGNALS_TO_HANDLE=") and "SIGUSR1" in line for line in environment)

    def test_many_nodes_meet_at_the_first_one_which_alone_hosts_the_meeting(self, cluster: Cluster) -> None:
        cluster.job("status finished", "many_nodes.sbatch", PKM_DOCTOR="no", SLURM_RESTART_COUNT="2")
        first, second = [line for line in cluster.said("python") if "train.py" in line]
        assert " --rdzv-conf is_host=1 " in first and " --rdzv-conf is_host=0 " in second
        rest = (
            "--nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint head:10007 --rdzv-id 7.2 --max-restarts 3 "
            f"{REPOSITORY}/train.py c.yaml a.b=1"
        )
        assert first.endswith(rest) and second.endswith(rest)

    def test_a_port_that_somebody_listens_at_is_passed_over(self, cluster: Cluster) -> None:
        server, number = listening()
        with server:
            cluster.job("status finished", "many_nodes.sbatch", PKM_DOCTOR="no", SLURM_JOB_ID=str(number))
        meeting = next(line for line in cluster.said("python") if "train.py" in line).split("head:")[1].split()[0]
        assert int(meeting) > 10000 + number

    def test_a_failure_of_one_node_fails_the_job(self, cluster: Cluster) -> None:
        code, _ = cluster.job("((SLURM_NODEID == 0))", "many_nodes.sbatch")
        assert code == 1 and cluster.requeues() == 0


def test_the_shell_files_are_clean_to_shellcheck() -> None:
    found = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(
        [found, "-x", "-P", REPOSITORY, *sorted(SLURM.iterdir())], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("time", "minutes"),
    [("90", 90), ("90:30", 90.5), ("24:00:00", 1440), ("1:30:30", 90.5), ("2-0", 2880), ("1-12:30", 2190),
     ("1-0:0:30", 1440.5), (" 7 ", 7)],
)  # fmt: skip
def test_times_are_read_as_sbatch_reads_them(time: str, minutes: float) -> None:
    assert slurm.minutes(time) == minutes


@pytest.mark.parametrize("time", ["", "x", "1h", "1:2:3:4", "-5", "1-", "UNLIMITED", "1.5"])
def test_what_is_no_time_is_refused(time: str) -> None:
    with pytest.raises(UserError, match="is not a time"):
        slurm.minutes(time)


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's config in a folder of its own, which is also where one works."""
    folder = tmp_path / "at work 100%"
    folder.mkdir()
    (folder / "corpus").mkdir()
    (folder / "corpus" / "vocab").write_text("the 3\n")
    config = tiny_config(name="a/b", corpus={"path": "corpus"}, device="auto")
    (folder / "c.yaml").write_text(configfile.dump(config))
    monkeypatch.chdir(folder)
    return folder / "c.yaml"


def launch(config_file: Path, *overrides: str, dry_run: bool = True, **settings: object) -> str:
    job = slurm.Job(**{"nodes": 2, "gpus_per_node": 2, "time": "24:00:00"} | settings)  # type: ignore[arg-type]
    return "\n".join(slurm.launch(job, config_file.name, list(overrides), REPOSITORY, dry_run))


class TestLaunch:
    def test_a_dry_run_prints_the_file_and_leaves_nothing(self, config_file: Path) -> None:
        before = sorted(config_file.parent.rglob("*"))
        text = launch(
            config_file, partition="gpu", qos="high", mem="500G", constraint="a100&ib", sbatch=("--exclusive",)
        )
        assert sorted(config_file.parent.rglob("*")) == before
        asked = {line.split()[1] for line in text.splitlines() if line.startswith("#SBATCH ")}
        assert asked >= {
            "--nodes=2", "--gpus-per-node=2", "--ntasks-per-node=1", "--cpus-per-task=16", "--time=24:00:00",
            "--job-name=a/b", "--partition=gpu", "--qos=high", "--mem=500G", "--constraint=a100&ib", "--exclusive",
            "--requeue", "--open-mode=append", "--signal=B:USR1@600",
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("settings", "overrides", "minutes"),
        [
            ({}, (), "1425"),
            ({"margin": 60.0}, (), "1380"),
            ({"time": "20"}, (), "15"),
            ({}, ("max_minutes=30",), "30"),
            ({}, ("max_minutes=3000",), "1425"),
        ],
    )
    def test_the_run_stops_by_itself_before_its_time_is_over(
        self, config_file: Path, settings: dict[str, object], overrides: tuple[str, ...], minutes: str
    ) -> None:
        # The last one wins.
        assert launch(config_file, *overrides, **settings).split()[-1] == f"max_minutes={minutes}"

    def test_the_signal_comes_after_the_run_should_have_stopped_and_leaves_time_to_save(
        self, config_file: Path
    ) -> None:
        for limit in ("5", "20", "24:00:00", "7-0"):
            job = slurm.Job(nodes=1, gpus_per_node=1, time=limit)
            stops = slurm.max_minutes(job, tiny_config()) * 60
            signalled = slurm.minutes(limit) * 60 - job.signal_seconds
            assert stops < signalled < slurm.minutes(limit) * 60 - 30

    @pytest.mark.parametrize("nodes", [1, 2])
    def test_the_file_it_writes_runs_as_a_job_wherever_it_is_started(
        self, config_file: Path, cluster: Cluster, nodes: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        venv = cluster.folder / "venv of 'mine'"
        (venv / "bin").mkdir(parents=True)
        (venv / "bin" / "activate").write_text('activated="yes, $loaded"\nexport activated\n')
        monkeypatch.setenv("PATH", f"{cluster.folder}/bin:/usr/bin:/bin")
        monkeypatch.setenv("FAKE", str(cluster.folder))
        shown = launch(
            config_file, "optim.steps=9", dry_run=False, nodes=nodes, venv=venv, setup=("loaded='a module'",)
        )
        path = Path("runs/a/b/slurm/launch.sbatch")
        assert "submitted job 4711" in shown and "slurm/4711.log" in shown
        assert cluster.said("sbatch") == [f"--parsable {path}"]
        cluster.settings = {"FAKE_TRAIN": "pwd >$FAKE/where; status stopped 'time limit'"}
        process = cluster.start(path.absolute(), nodes=nodes, cwd=cluster.folder)
        output, _ = process.communicate(timeout=60)
        assert (process.returncode, cluster.requeues()) == (0, 1), output
        assert (cluster.folder / "where").read_text().strip() == str(config_file.parent)
        train = [line for line in cluster.said("python") if "train.py" in line]
        assert len(train) == nodes
        assert (
            train[0].endswith("/train.py c.yaml optim.steps=9 max_minutes=1425") and "--nproc-per-node 2 " in train[0]
        )
        environment = (cluster.folder / "environment").read_text().splitlines()
        assert {"activated=yes, a module", "OMP_NUM_THREADS=6", "PKM_DOCTOR=yes"} <= set(environment)

    def test_the_log_goes_to_the_runs_directory_whatever_its_path(self, config_file: Path) -> None:
        line = next(line for line in launch(config_file).splitlines() if "--output" in line)
        folder = str(config_file.parent).replace("%", "%%")
        assert line == f'#SBATCH --output="{folder}/runs/a/b/slurm/%j.log"'

    def test_a_batch_that_the_ranks_cannot_share_is_refused_with_its_line(self, config_file: Path) -> None:
        with pytest.raises(UserErrors, match=r"c.yaml:\d+: optim.batch_tokens.*which 6 ranks cannot share evenly"):
            launch(config_file, nodes=3)

    def test_every_mistake_in_what_is_asked_is_named_at_once(self, config_file: Path, tmp_path: Path) -> None:
        with pytest.raises(UserErrors) as caught:
            launch(
                config_file, "device=cpu", nodes=0, time="soon", partition="a b", venv=tmp_path, cpus_per_task=0,
                sbatch=("reservation",), setup=("a\nb",), gpus_per_node=-1,
            )  # fmt: skip
        places = [error.where for error in caught.value.errors]
        assert places[:4] == ["--nodes", "--gpus-per-node", "--cpus-per-task", "--time"]
        assert {"--partition", "--sbatch", "--setup", "--venv", "argument 'device=cpu'"} <= set(places)

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"time": "4"}, "over before a run has begun"),
            ({"margin": 2000.0}, "do not fit into 1440"),
            ({"margin": 0.0}, "do not fit into 1440"),
            ({"gpus_per_node": 0, "nodes": 2}, "no GPU is asked for"),
        ],
    )
    def test_what_cannot_work_is_refused(self, config_file: Path, settings: dict[str, object], words: str) -> None:
        with pytest.raises(UserErrors, match=words):
            launch(config_file, "device=cuda", **settings)

    def test_a_mistake_in_the_config_is_refused(self, config_file: Path) -> None:
        with pytest.raises(UserErrors, match=r"optim\.step"):
            launch(config_file, "optim.step=3")

    def test_settings_that_the_run_did_not_begin_with_are_refused(self, config_file: Path) -> None:
        folder = config_file.parent / "runs/a/b"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(config_file.read_text())
        launch(config_file, "max_minutes=30")
        with pytest.raises(UserError, match="seed: 1 -> 2"):
            launch(config_file, "seed=2")

    def test_a_run_that_is_finished_is_not_submitted_again_unless_it_is_made_longer(self, config_file: Path) -> None:
        folder = config_file.parent / "runs/a/b"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(config_file.read_text())
        (folder / "status.json").write_text('{"state": "finished", "step": 20}')
        with pytest.raises(UserError, match="all 20 steps are done"):
            launch(config_file)
        launch(config_file, "optim.steps=30")

    def test_a_run_that_is_at_work_is_said(self, config_file: Path) -> None:
        folder = config_file.parent / "runs/a/b"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(config_file.read_text())
        (folder / "status.json").write_text('{"state": "running", "step": 0, "host": "n7", "time": "noon"}')
        assert "note: the run was at work on n7 at noon" in launch(config_file)

    def test_the_folder_of_a_log_of_ones_own_is_made(
        self, config_file: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", f"{cluster.folder}/bin:/usr/bin:/bin")
        monkeypatch.setenv("FAKE", str(cluster.folder))
        assert "log: logs/today/4711.txt" in launch(config_file, dry_run=False, output="logs/today/%j.txt")
        assert Path("logs/today").is_dir()

    def test_a_corpus_that_is_not_there_yet_is_said(self, config_file: Path) -> None:
        assert "note: there is no prepared corpus at later" in launch(config_file, "corpus.path=later")

    def test_what_sbatch_says_against_it_is_shown(
        self, config_file: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", f"{cluster.folder}/bin:/usr/bin:/bin")
        monkeypatch.setenv("FAKE", str(cluster.folder))
        monkeypatch.setenv("FAKE_REFUSAL", "sbatch: error: invalid partition")
        with pytest.raises(UserError, match=r"launch\.sbatch: sbatch refused it: sbatch: error: invalid partition"):
            launch(config_file, dry_run=False)

    def test_without_sbatch_it_says_where_the_file_is(self, config_file: Path) -> None:
        done = subprocess.run(
            [sys.executable, REPOSITORY / "scripts/launch_slurm.py", "c.yaml", "--gpus-per-node", "2"],
            capture_output=True, text=True, env={"PATH": "/nowhere", "PYTHONPATH": str(REPOSITORY)},
        )  # fmt: skip
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert "no sbatch on this machine" in done.stderr and "runs/a/b/slurm/launch.sbatch" in done.stderr
        assert "one_node.sbatch" in Path("runs/a/b/slurm/launch.sbatch").read_text()


def ranks_below(pid: int) -> dict[int, int]:
    """Rank -> process, of the train.py processes that descend from `pid`."""
    found = {}
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        found |= ranks_below(child)
        if b"train.py" in Path(f"/proc/{child}/cmdline").read_bytes():
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            found |= {int(v.removeprefix(b"RANK=")): child for v in variables if v.startswith(b"RANK=")}
    return found


def test_in_a_real_job_a_rank_that_dies_is_started_again_and_all_stop_on_a_signal(
    cluster: Cluster, tmp_path: Path, tiny_corpus_path: Path
) -> None:
    """torchrun and train.py as they are; only SLURM is a stand-in."""
    config = tiny_config(
        runs=tmp_path / "runs", corpus={"path": tiny_corpus_path}, optim={"steps": 5000},
        checkpoint={"every_steps": 2}, log={"every_steps": 1, "tensorboard": False},
    )  # fmt: skip
    file, run = tmp_path / "c.yaml", tmp_path / "runs" / "tiny"
    file.write_text(configfile.dump(config))
    (cluster.folder / "bin" / "python").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    cluster.settings = {"PKM_RANKS": "2", "PKM_DOCTOR": "no", "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    process = cluster.start(SLURM / "one_node.sbatch", file)
    impatience = threading.Timer(120, os.killpg, (process.pid, signal.SIGKILL))
    impatience.start()
    assert process.stdout is not None
    output: list[str] = []
    first: dict[int, int] = {}
    for line in process.stdout:
        output.append(line)
        if not re.match(r"step +([3-9]|\d\d)", line):
            continue
        ranks = ranks_below(process.pid)
        if not first:
            first = ranks
            os.kill(first[1], signal.SIGKILL)
        elif ranks.get(0, first[0]) != first[0]:
            process.send_signal(signal.SIGUSR1)
            break
    output += process.stdout
    impatience.cancel()
    assert (process.wait(), cluster.requeues()) == (0, 1), "".join(output)
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "stopped" and 3 <= status["step"] < 5000 and not (run / "STOP").exists()
