"""A cluster to run jobs on: stand-ins for SLURM's programs and, where a test does not ask for more, for what a job starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from pkm.config.load import dump
from tests.support.tiny import tiny_config

REPOSITORY = Path(__file__).parents[2]

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
# Runs what looks after a turn of a job as it is; plays the doctor, and for train.py, speed.py and evaluate.py what the test asks for.
PYTHON = """#!/bin/bash
if [[ "$*" == *pkm.slurm.turn* ]]; then exec $REAL_PYTHON "$@"; fi
echo "$*" >>"$FAKE/python.log"
status() { echo "{\\"state\\": \\"$1\\", \\"step\\": 7, \\"reason\\": \\"$2\\", \\"pid\\": $$}" >"$FAKE_RUN/status.json"; }
finish() { status finished; echo '{"step": 7, "evaluation": {}}' >"$FAKE_RUN/report.json"; }
until_asked() { echo >"$FAKE/begun"; until [[ -e $FAKE_RUN/STOP ]]; do sleep 0.02; done; }
case "$*" in
*doctor.py*) eval "${FAKE_DOCTOR:-true}" ;;
*train.py*) env >"$FAKE/environment"; eval "$FAKE_TRAIN" ;;
*speed.py*) env >"$FAKE/environment"; eval "${FAKE_SPEED:-true}" ;;
*evaluate.py*) eval "${FAKE_FACTS:-true}" ;;
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

    @property
    def config(self) -> Path:
        return self.folder / "c.yaml"

    def environment(self, nodes: int) -> dict[str, str]:
        return {
            "PATH": f"{self.folder}/bin:/usr/bin:/bin", "FAKE": str(self.folder), "FAKE_STATE": "RUNNING",
            "FAKE_RUN": str(self.run), "REAL_PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY),
            "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_NODELIST": "n[0-1]",
            "SLURM_CPUS_PER_TASK": "12", **self.settings,
        }  # fmt: skip

    def start(self, *command: str | Path, nodes: int = 1, cwd: Path = REPOSITORY) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*map(str, command)], env=self.environment(nodes), cwd=cwd, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def turn(self, *options: str, nodes: int = 1, steps: int = 7) -> subprocess.Popen[str]:
        """What an sbatch file starts."""
        arguments = ("--ranks=4", "--train", *options, self.config, f"optim.steps={steps}")
        return self.start(sys.executable, "-m", "pkm.slurm.turn", *arguments, nodes=nodes)

    def job(
        self, train: str, *options: str, nodes: int = 1, send: signal.Signals | None = None, **settings: str
    ) -> tuple[int, str]:
        """Run a turn of a job, sending it a signal once its run has begun: its exit status and what it said."""
        self.settings = {"FAKE_TRAIN": train, **settings}
        begun = self.folder / "begun"
        begun.unlink(missing_ok=True)
        os.mkfifo(begun)
        process = self.turn(*options, nodes=nodes)
        if send is not None:
            begun.read_text()
            process.send_signal(send)
        output, _ = process.communicate(timeout=300)
        return process.returncode, output

    def said(self, name: str) -> list[str]:
        log = self.folder / f"{name}.log"
        return log.read_text().splitlines() if log.exists() else []

    def requeues(self) -> int:
        return self.said("scontrol").count("requeue 7")


def built(folder: Path) -> Cluster:
    """The stand-ins, in an empty folder, and the config of a run."""
    (folder / "bin").mkdir()
    for name, text in {"scontrol": SCONTROL, "srun": SRUN, "sbatch": SBATCH, "python": PYTHON}.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    (folder / "run" / "checkpoints").mkdir(parents=True)
    cluster = Cluster(folder)
    cluster.config.write_text(dump(tiny_config(name="run", runs=str(folder), threads=None)))
    return cluster
