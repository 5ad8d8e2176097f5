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
from pathlib import Path

import pytest

from pkm.config.load import dump
from tests.support.fake_slurm import REPOSITORY, SLURM, Cluster
from tests.support.tiny import tiny_config


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
        start = "-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 4 "
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
        # Port 10007, unless somebody listens there.
        rest = re.compile(
            r"--nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint head:10\d\d\d --rdzv-id 7.2 "
            rf"--max-restarts 3 {REPOSITORY}/train.py c.yaml a.b=1$"
        )
        assert rest.search(first) and rest.search(second)

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
    file.write_text(dump(config))
    (cluster.folder / "bin" / "python").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    cluster.settings = {"PKM_RANKS": "2", "PKM_DOCTOR": "no", "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    process = cluster.start(SLURM / "one_node.sbatch", file)
    impatience = threading.Timer(400, os.killpg, (process.pid, signal.SIGKILL))
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
