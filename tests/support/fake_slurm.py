"""A cluster to run sbatch files on: stand-ins for SLURM's programs and, where a test does not ask for more, for python."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
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
        output, _ = process.communicate(timeout=300)
        return process.returncode, output

    def said(self, name: str) -> list[str]:
        log = self.folder / f"{name}.log"
        return log.read_text().splitlines() if log.exists() else []

    def requeues(self) -> int:
        return self.said("scontrol").count("requeue 7")


def built(folder: Path) -> Cluster:
    """The stand-ins, in an empty folder."""
    (folder / "bin").mkdir()
    for name, text in {"scontrol": SCONTROL, "srun": SRUN, "sbatch": SBATCH, "python": PYTHON}.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    (folder / "run" / "checkpoints").mkdir(parents=True)
    return Cluster(folder)
