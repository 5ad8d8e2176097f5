"""A real SLURM on this machine: munged, slurmctld and a slurmd for each of its nodes, on free ports, below one folder.

    python -m tests.slurm.real.cluster FOLDER     brings it up, and down again on Ctrl-C; `SLURM_CONF=FOLDER/slurm.conf sinfo`

Its nodes are names for this machine, with more cores than there are. What SLURM waits with for minutes, so that large clusters
stay calm, is set to seconds.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
NODES = ("127.0.0.1", "127.0.0.2")
# Debian keeps the daemons where only root's PATH looks.
PATH = os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"
PATIENCE_SECONDS = 180.0

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# cred_expire: also how long a job that was requeued waits before it starts again.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=4
KillWait=60
MinJobAge=300
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=usual Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=9 PreemptMode=OFF
"""


def missing() -> str | None:
    """Why there can be no cluster here; None if there can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: slurm-wlm, munge)"
    return "SLURM's daemons need root" if os.geteuid() != 0 else None


def until(holds: Callable[[], object], what: str | Callable[[], str]) -> None:
    """Wait for it. AssertionError, saying `what`, if it does not come to hold in time."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(0.02)


class RealCluster:
    """Nodes `one` and `two`, of 4 cores each; partitions `usual` and `urgent`, whose jobs preempt those of the first."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> RealCluster:
        with ExitStack() as undo:
            undo.callback(self.stop)
            self._configure()
            self._start_munge()
            self._start("slurmctld", "slurmctld", "-D", "-i")
            for node in NODES:
                self.start_node(node)
            undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        for node in NODES:
            self.kill_node(node)
        for daemon in reversed(self.daemons.values()):
            with suppress(ProcessLookupError):
                daemon.terminate()
        for daemon in self.daemons.values():
            daemon.wait()

    def _configure(self) -> None:
        # Held until all are chosen, so that they differ.
        with ExitStack() as held:
            servers = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(1 + len(NODES))]
            ports = [server.getsockname()[1] for server in servers]
        host = socket.gethostname()
        nodes = [
            f"NodeName={node} NodeHostname={host} NodeAddr={node} Port={port} CPUs=4 State=UNKNOWN"
            for node, port in zip(NODES, ports[1:], strict=True)
        ]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        text = CONFIGURATION.format(host=host, controller_port=ports[0], folder=self.folder, nodes="\n".join(nodes))
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "state").mkdir()

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
        # --force: below a folder that all may write to, such as /tmp.
        self._start("munged", "munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *files)
        until((self.folder / "munge.socket").exists, "munged does not start")

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self.daemons[name] = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def start_node(self, node: str) -> None:
        """Bring a node up, or up again."""
        self._start(node, "slurmd", "-D", "-N", node)
        until(lambda: "State=IDLE" in self.ask("scontrol", "show", "node", node), f"node {node} does not come up")

    def kill_node(self, node: str) -> None:
        """As a failure of power does: its slurmd, and all jobs on it. Who could still tell of another's end goes first."""
        jobs = self._jobs_on(node)
        watchers = [parent for job in jobs if (parent := job.parent()) and parent.name() == "slurmstepd"]
        if node in self.daemons:
            daemon = self.daemons.pop(node)
            daemon.kill()
            daemon.wait()
        for process in (*watchers, *jobs):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def _jobs_on(self, node: str) -> list[psutil.Process]:
        """What SLURM has started there. (Its watchers, slurmstepd, are nobody's children and do not say where they are.)"""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                variables = process.environ()
                ours = variables.get("SLURM_CONF") == self.environment["SLURM_CONF"]
                if ours and variables.get("SLURMD_NODENAME") == node:
                    found.append(process)
        return found

    def ask(self, *command: str, ok: tuple[int, ...] = (0,)) -> str:
        """What one of SLURM's programs prints."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
        assert done.returncode in ok, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, script: str, *options: str) -> str:
        """A job that is none of ours; its id."""
        path = self.folder / "job.sh"
        path.write_text(script)
        return self.ask("sbatch", "--parsable", "--output=/dev/null", *options, str(path)).strip()

    def about(self, job: str, what: str) -> str:
        """`what` of a job, as scontrol shows it."""
        shown = self.ask("scontrol", "show", "job", job)
        return shown.partition(f"{what}=")[2].split()[0]

    def state(self, job: str) -> str:
        return self.about(job, "JobState")

    def restarts(self, job: str) -> int:
        return int(self.about(job, "Restarts"))

    def queued(self) -> str:
        """All jobs that wait, run or are on their way out."""
        return self.ask("squeue", "--noheader", "--format=%i %T")

    def restore(self) -> None:
        """Kill all jobs at once, and bring up the nodes that are down."""
        numbers = [line.split()[0] for line in self.queued().splitlines()]
        if numbers:
            self.ask("scancel", "--full", "--signal=KILL", *numbers, ok=(0, 1))
            self.ask("scancel", *numbers, ok=(0, 1))
            until(lambda: not self.queued(), "jobs do not end")
        for node in NODES:
            if node not in self.daemons:
                self.start_node(node)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with RealCluster(Path(sys.argv[1]).absolute()) as cluster:
        print(f"export SLURM_CONF={cluster.folder}/slurm.conf", flush=True)
        with suppress(KeyboardInterrupt):
            signal.pause()
