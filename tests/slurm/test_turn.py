"""What looks after a turn of a job, run as a job does, with stand-ins for SLURM's programs and, where not said otherwise, for the
run's. tests/slurm/real does it on a cluster."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
from pathlib import Path

import psutil
import pytest

from pkm.config.load import dump
from pkm.distributed.torchrun import kill_all
from tests.support.fake_slurm import REPOSITORY, Cluster
from tests.support.tiny import tiny_config


class TestRequeue:
    @pytest.mark.parametrize(
        ("train", "requeued", "exit_status"),
        [
            ("finish", False, 0),
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
        code, output = cluster.job("status stopped 'time limit'", nodes=2)
        assert (code, cluster.requeues()) == (0, 1), output
        code, output = cluster.job("finish", nodes=2)
        assert (code, cluster.requeues()) == (0, 1), output

    def test_a_status_that_an_earlier_job_left_is_not_taken_for_this_ones(self, cluster: Cluster) -> None:
        cluster.job("status stopped 'time limit'")
        code, output = cluster.job("echo error: the corpus is gone; exit 2")
        assert (code, cluster.requeues()) == (2, 1), output

    def test_a_run_that_was_finished_before_ends_the_job_well_and_is_left_alone(self, cluster: Cluster) -> None:
        cluster.job("finish")
        assert cluster.job("exit 1")[0] == 0
        assert cluster.requeues() == 0 and len(cluster.said("python")) == 1

    def test_a_run_that_cannot_say_why_it_ended_is_marked_as_failed(self, cluster: Cluster) -> None:
        cluster.job("exit 2")
        status = json.loads((cluster.run / "status.json").read_text())
        assert (status["state"], status["reason"]) == ("failed", "ended with status 2: see the job's log")

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
    @pytest.mark.parametrize("nodes", [1, 2])
    def test_on_a_signal_the_run_finds_the_file_stop_and_is_waited_for(
        self, cluster: Cluster, number: signal.Signals, nodes: int
    ) -> None:
        train = "until_asked; cat $FAKE/run/STOP >>$FAKE/stop; rm $FAKE/run/STOP; status stopped 'STOP file'"
        if nodes == 2:
            train = f"if ((SLURM_NODEID == 0)); then {train}; fi"
        code, output = cluster.job(train, nodes=nodes, send=number)
        assert (cluster.folder / "stop").read_text() == f"SLURM job 7, {number.name}\n", output
        assert (code, cluster.requeues()) == (0, 1), output

    def test_a_run_that_finishes_meanwhile_is_not_requeued_and_leaves_no_stop_behind(self, cluster: Cluster) -> None:
        assert cluster.job("until_asked; finish", send=signal.SIGUSR1)[0] == 0
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
        code, output = cluster.job(train, "--grace=1", send=signal.SIGUSR1)
        os.write(never, b"\n")
        os.close(never)
        assert "did not stop within 1 s" in output
        assert (code, cluster.requeues()) == (0, 1)

    def test_a_stop_that_a_killed_job_left_does_not_stop_the_next_one(self, cluster: Cluster) -> None:
        (cluster.run / "STOP").write_text("SLURM job 6, SIGUSR1\n")
        cluster.job("[[ ! -e $FAKE/run/STOP ]] && finish")
        assert json.loads((cluster.run / "status.json").read_text())["state"] == "finished"

    def test_a_stop_that_a_user_wrote_stays_for_the_run(self, cluster: Cluster) -> None:
        (cluster.run / "STOP").touch()
        assert cluster.job("[[ -e $FAKE/run/STOP ]] && status stopped 'STOP file'")[0] == 0
        assert cluster.requeues() == 0


class TestDoctor:
    def test_training_does_not_begin_on_nodes_that_the_doctor_refuses(self, cluster: Cluster) -> None:
        code, _ = cluster.job("touch $FAKE/trained", "--doctor", FAKE_DOCTOR="exit 1")
        assert code == 1 and not (cluster.folder / "trained").exists() and cluster.requeues() == 0

    def test_the_doctor_can_be_left_out(self, cluster: Cluster) -> None:
        assert cluster.job("finish", FAKE_DOCTOR="exit 1")[0] == 0

    def test_preempted_while_the_doctor_looks_the_job_is_requeued_without_training(self, cluster: Cluster) -> None:
        code, output = cluster.job("touch $FAKE/trained", "--doctor", send=signal.SIGTERM, FAKE_DOCTOR="until_asked")
        assert not (cluster.folder / "trained").exists()
        assert (code, cluster.requeues()) == (0, 1), output


class TestSpeed:
    MEASURED = """echo '{"trained": true}' >"$FAKE_RUN/speed.json" """

    def test_words_a_second_are_measured_once_on_the_first_gpu_when_the_run_is_finished(self, cluster: Cluster) -> None:
        gpus = {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b", "FAKE_SPEED": self.MEASURED}
        assert cluster.job("status stopped 'time limit'", "--speed", **gpus)[0] == 0
        assert "speed.py" not in cluster.said("python")[-1]
        for _ in range(2):
            code, output = cluster.job("finish", "--speed", **gpus)
            assert (code, cluster.requeues()) == (0, 1), output
        assert [line.partition("scripts/")[2] for line in cluster.said("python")[2:]] == [
            f"speed.py {cluster.config} optim.steps=7"
        ]
        assert "CUDA_VISIBLE_DEVICES=GPU-a" in (cluster.folder / "environment").read_text().splitlines()

    def test_out_of_time_the_measurement_is_made_again_in_the_next_turn(self, cluster: Cluster) -> None:
        speed = 'echo >"$FAKE/begun"; while true; do sleep 0.1; done'
        code, output = cluster.job("finish", "--speed", send=signal.SIGUSR1, FAKE_SPEED=speed)
        assert (code, cluster.requeues()) == (0, 1), output
        assert not (cluster.run / "STOP").exists()

    def test_a_measurement_that_fails_fails_the_job(self, cluster: Cluster) -> None:
        code, output = cluster.job("finish", "--speed", FAKE_SPEED="exit 3")
        assert (code, cluster.requeues()) == (3, 0) and "could not be measured" in output

    def test_a_run_is_asked_for_facts_once_after_its_speed(self, cluster: Cluster) -> None:
        given = {"FAKE_SPEED": self.MEASURED, "FAKE_FACTS": """echo '{"step": 7}' >"$FAKE_RUN/facts.json" """}
        for _ in range(2):
            code, output = cluster.job("finish", "--speed", "--facts", **given)
            assert (code, cluster.requeues()) == (0, 0), output
        assert [line.partition("scripts/")[2] for line in cluster.said("python")[1:]] == [
            f"speed.py {cluster.config} optim.steps=7", f"evaluate.py {cluster.run} --facts",
        ]  # fmt: skip
        (cluster.run / "facts.json").unlink()
        code, output = cluster.job("finish", "--facts", FAKE_FACTS="exit 3")
        assert (code, cluster.requeues()) == (3, 0) and "recall could not be measured" in output


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
        cluster.job("finish", "--doctor")
        doctor, train = cluster.said("python")
        start = "-m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node=4 "
        assert doctor == start + f"{REPOSITORY}/scripts/doctor.py {cluster.config} optim.steps=7"
        assert train == start + f"--max-restarts=3 {REPOSITORY}/train.py {cluster.config} optim.steps=7"
        environment = (cluster.folder / "environment").read_text().splitlines()
        assert "OMP_NUM_THREADS=3" in environment

    def test_many_nodes_meet_at_the_first_one_which_alone_hosts_the_meeting(self, cluster: Cluster) -> None:
        cluster.job("finish", nodes=2, SLURM_RESTART_COUNT="2")
        first, second = cluster.said("python")
        assert " --rdzv-conf is_host=1 " in first and " --rdzv-conf is_host=0 " in second
        # Port 10007, unless somebody listens there.
        rest = re.compile(
            r"--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=head:10\d\d\d --rdzv-id=7.2.train --nproc-per-node=4 "
            rf"--max-restarts=3 {REPOSITORY}/train.py \S+ optim.steps=7$"
        )
        assert rest.search(first) and rest.search(second)

    def test_a_port_that_somebody_listens_at_is_passed_over(self, cluster: Cluster) -> None:
        server, number = listening()
        with server:
            cluster.job("finish", nodes=2, SLURM_JOB_ID=str(number))
        meeting = cluster.said("python")[0].split("head:")[1].split()[0]
        assert int(meeting) > 10000 + number

    def test_a_failure_of_one_node_fails_the_job(self, cluster: Cluster) -> None:
        code, _ = cluster.job("((SLURM_NODEID == 0))", nodes=2)
        assert code == 1 and cluster.requeues() == 0


def ranks_below(pid: int) -> dict[int, psutil.Process]:
    """Rank -> process, of the train.py processes that descend from `pid`."""
    ranks = [child for child in psutil.Process(pid).children(recursive=True) if "RANK" in child.environ()]
    return {int(rank.environ()["RANK"]): rank for rank in ranks}


def test_in_a_real_job_a_rank_that_dies_is_started_again_and_all_save_when_everyone_is_told_to_end(
    cluster: Cluster, tmp_path: Path, tiny_corpus_path: Path
) -> None:
    """torchrun and train.py as they are; only SLURM is a stand-in. When a job is cancelled, SLURM sends SIGTERM to every process."""
    config = tiny_config(
        name="run", runs=str(tmp_path), corpus={"path": tiny_corpus_path}, optim={"steps": 5000},
        checkpoint={"every_steps": 2}, log={"every_steps": 1, "tensorboard": False},
    )  # fmt: skip
    cluster.config.write_text(dump(config))
    (cluster.folder / "bin" / "python").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    cluster.settings = {"OMP_NUM_THREADS": "1", "FAKE_STATE": "CANCELLED"}
    process = cluster.turn("--ranks=2", steps=5000)
    impatience = threading.Timer(400, kill_all, [process.pid])
    impatience.start()
    assert process.stdout is not None
    output: list[str] = []
    first: dict[int, psutil.Process] = {}
    for line in process.stdout:
        output.append(line)
        if not re.match(r"step +([3-9]|\d\d)", line):
            continue
        ranks = ranks_below(process.pid)
        if not first:
            first = ranks
            first[1].kill()
        elif ranks.get(0, first[0]) != first[0]:
            for told in psutil.Process(process.pid).children(recursive=True):
                told.terminate()
            process.terminate()
            break
    output += process.stdout
    impatience.cancel()
    after = "".join(output[output.index(line) :])
    assert (process.wait(), cluster.requeues()) == (0, 0), "".join(output)
    assert "Traceback" not in after and "SignalException" not in after, after
    status = json.loads((cluster.run / "status.json").read_text())
    assert status["state"] == "stopped" and 3 <= status["step"] < 5000 and not (cluster.run / "STOP").exists()
