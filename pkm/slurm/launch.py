"""Runs as jobs of a SLURM cluster: the sbatch file that starts one, or an array of them, checked beforehand, and its submission.

The file only says what is asked of the cluster and what is to be run. How it is run (one torchrun a node, the signal
before the end, the requeue) is in turn.py.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pkm import files
from pkm.config.load import Resolved
from pkm.config.rules import impossible_for
from pkm.config.schema import Config, load
from pkm.corpus.store import vocab_size_of
from pkm.errors import UserError, UserErrors

TIME = "minutes, hours:minutes:seconds, days-hours or days-hours:minutes:seconds"
SHORTEST_MINUTES = 5.0
MARGIN_MINUTES = 15.0
"""Of a job's time, before its end: for what comes before the first step, and to stop and save in. At most a quarter."""
CPUS_PER_RANK = 8


@dataclass(frozen=True)
class Job:
    """What is asked of the cluster. Every text goes into the file as it is."""

    nodes: int
    gpus_per_node: int
    """0 = one rank a node, on its CPU."""
    time: str
    """As sbatch takes it; the job requeues itself until the run is finished."""
    margin: float | None = None
    """Minutes; see MARGIN_MINUTES."""
    cpus_per_task: int | None = None
    """Cores of a node, shared by its ranks."""
    mem: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    job_name: str | None = None
    output: str | None = None
    sbatch: tuple[str, ...] = ()
    """Any other options of sbatch: `--reservation=x`."""
    venv: Path | None = None
    setup: tuple[str, ...] = ()
    """Shell lines before the run starts: `module load cuda`."""
    doctor: bool = True

    @property
    def ranks_per_node(self) -> int:
        return max(self.gpus_per_node, 1)

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def margin_minutes(self) -> float:
        return self.margin or min(MARGIN_MINUTES, minutes(self.time) / 4)

    @property
    def signal_seconds(self) -> int:
        """Before the end: when SLURM tells a run to stop that did not do so by itself."""
        return round(self.margin_minutes * 60 * 2 / 3)


def minutes(time: str) -> float:
    """A time limit as sbatch reads it, in minutes. UserError if it is none."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time.strip())
    if match is None:
        raise UserError(f"{time!r} is not a time", "--time", f"write {TIME}, for example 24:00:00")
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    # Without days one number is minutes and two are minutes:seconds; after days they are hours and hours:minutes.
    if days is None and len(numbers) < 3:
        numbers.insert(0, 0)
    hours, mins, seconds = (*numbers, 0, 0)[:3]
    return int(days or 0) * 1440 + hours * 60 + mins + seconds / 60


def check(job: Job, resolved: Resolved[Config]) -> list[str]:
    """Refuse what the job would fail of hours after it was submitted; returns what is only worth knowing.

    UserErrors with every mistake in the job; UserErrors for a config that so many ranks cannot share; UserError for a
    run that is finished or did not begin with these settings.
    """
    wrong = list(_mistakes(job, resolved))
    if wrong:
        raise UserErrors(f"{len(wrong)} mistake{'s' * (len(wrong) > 1)} in what is asked of SLURM", wrong)
    resolved.refuse(impossible_for(resolved.config, job.ranks))
    notes = list(_of_the_run(resolved.config))
    if vocab_size_of(resolved.config.corpus.path) is None:
        notes.append(f"there is no prepared corpus at {resolved.config.corpus.path} yet: the job will fail without one")
    return notes


def _of_the_run(config: Config) -> Iterator[str]:
    """What is worth knowing of a run that began already; UserError if it is finished or began with other settings."""
    if not (config.directory / "config.yaml").exists():
        return
    from pkm.run.changes import refuse_changes
    from pkm.run.status import read_status  # brings torch

    refuse_changes(config.directory / "config.yaml", config)
    status = read_status(config.directory)
    if status.get("state") == "finished" and status.get("step", 0) >= config.optim.steps:
        fix = "read its report.md; to train on, raise optim.steps; to train again, give it another name"
        raise UserError(f"the run is finished: all {config.optim.steps} steps are done", str(config.directory), fix)
    if status.get("state") == "running":
        yield f"the run was at work on {status.get('host')} at {status.get('time')}: while it is, a second job is refused"


OF_THE_FILE = {
    "--job-name": True, "--nodes": True, "--gpus-per-node": True, "--cpus-per-task": True, "--mem": True, "--time": True,
    "--partition": True, "--account": True, "--qos": True, "--constraint": True, "--output": True,
    "--ntasks-per-node": False, "--array": False, "--open-mode": False, "--signal": False, "--no-requeue": False,
}  # fmt: skip
"""Options of sbatch that `script` writes, and whether an argument of the same name says their value."""

PLAIN = re.compile(r"[\w.,:;/@%+=&|*()\[\]{}!~^-]+")


def _mistakes(job: Job, resolved: Resolved[Config]) -> Iterator[UserError]:
    for number, least, name in ((job.nodes, 1, "--nodes"), (job.gpus_per_node, 0, "--gpus-per-node")):
        if number < least:
            yield UserError(f"{number} is too few", name, f"write at least {least}")
    if job.cpus_per_task is not None and job.cpus_per_task < 1:
        yield UserError(f"{job.cpus_per_task} is too few", "--cpus-per-task", "write at least 1")
    yield from _mistakes_in_time(job)
    device = resolved.config.device
    if device == "cpu" and job.gpus_per_node:
        what = f"device: cpu leaves {job.gpus_per_node} GPUs of every node idle"
        yield UserError(what, resolved.where("device"), "ask for --gpus-per-node 0, or set device=auto")
    if device == "cuda" and not job.gpus_per_node:
        yield UserError("device: cuda, and no GPU is asked for", resolved.where("device"), "ask for --gpus-per-node")
    for name in ("mem", "partition", "account", "qos", "constraint", "job_name"):
        value = getattr(job, name)
        if value is not None and not PLAIN.fullmatch(value):
            yield UserError(f"{value!r} cannot stand in an sbatch file", "--" + name.replace("_", "-"), "no spaces")
    for option in job.sbatch:
        if not re.fullmatch(r"--[a-z][a-z-]*(=[^\n]*)?", option):
            yield UserError(f"{option!r} is not an option", "--sbatch", "write --sbatch=--option=value")
        elif (name := option.split("=")[0]) in OF_THE_FILE:
            fix = f"give {name} itself" if OF_THE_FILE[name] else "leave it out: the turns of a run depend on it"
            yield UserError(f"{option!r} would contradict the file's own {name}", "--sbatch", fix)
    for line in job.setup:
        if "\n" in line:
            yield UserError("it has more than one line", "--setup", "give --setup once for each line")
    if job.venv is not None and not (job.venv / "bin/activate").is_file():
        yield UserError(f"{job.venv} is no virtual environment: it has no bin/activate", "--venv", "check the path")


def _mistakes_in_time(job: Job) -> Iterator[UserError]:
    try:
        limit = minutes(job.time)
    except UserError as error:
        yield error
        return
    if limit < SHORTEST_MINUTES:
        least = f"at least {SHORTEST_MINUTES:g} minutes are needed"
        yield UserError(f"{limit:g} minutes are over before a run has begun: {least}", "--time", f"write {TIME}")
    elif job.margin is not None and not 1 <= job.margin < limit:
        what = f"{job.margin:g} minutes do not fit into {limit:g}"
        yield UserError(what, "--margin", "write at least 1 and less than --time")


def max_minutes(job: Job, config: Config) -> float:
    """After how many minutes of training a run stops by itself, so that it is over in time."""
    limit = round(minutes(job.time) - job.margin_minutes, 1)
    return min(limit, config.max_minutes or limit)


@dataclass(frozen=True)
class Work:
    """What one job, or one of an array, has to do."""

    title: str
    config: Config
    arguments: tuple[str, ...]
    """Of train.py: a config file and key=value."""
    train: bool = True
    speed: bool = False
    """Whether words a second are measured too."""
    facts: bool = False
    """Whether it is asked for facts, too."""


def script(job: Job, work: Sequence[Work], name: str, log: str, directory: Path, at_once: int | None = None) -> str:
    """The sbatch file; of an array for several pieces of work.

    name         of the job
    log          where it goes if the job does not say; with sbatch's patterns
    directory    where relative paths start
    at_once      jobs of an array that may run at a time
    """
    log = job.output or log
    options = {
        "job-name": job.job_name or name,
        "array": f"0-{len(work) - 1}" + (f"%{at_once}" if at_once else "") if len(work) > 1 else None,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus_per_node or None,
        "cpus-per-task": job.cpus_per_task or CPUS_PER_RANK * job.ranks_per_node,
        "mem": job.mem,
        "time": job.time.strip(),
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "constraint": job.constraint,
        "output": f'"{log}"' if " " in log else log,
        "open-mode": "append",
        "signal": f"B:USR1@{job.signal_seconds}",
    }
    asked = [f"--{option}={value}" for option, value in options.items() if value is not None]
    grace = max(job.signal_seconds - 30, 10)
    turn = f"exec python -m pkm.slurm.turn --ranks {job.ranks_per_node} --grace {grace}" + " --doctor" * job.doctor
    runs = [_arguments(job, one) for one in work]
    if len(work) == 1:
        what = [f"{turn} \\", f"    {runs[0]}"]
    else:
        cases = [f"{n}) work=({run}) ;; # {one.title}" for n, (run, one) in enumerate(zip(runs, work, strict=True))]
        what = ["case $SLURM_ARRAY_TASK_ID in", *cases, "esac", f'{turn} "${{work[@]}}"']
    more = f" and {len(work) - 1} more" if len(work) > 1 else ""
    lines = [
        "#!/bin/bash",
        f"# {work[0].title}{more}, on {job.ranks} ranks. Submit it again with sbatch: it goes on where it was.",
        "",
        *(f"#SBATCH {option}" for option in (*asked, "--requeue", *job.sbatch)),
        "",
        f"cd {shlex.quote(str(directory))} || exit 2",
        *job.setup,
        *([f"source {shlex.quote(str(job.venv.absolute()))}/bin/activate"] if job.venv else []),
        *what,
    ]
    return "\n".join(lines) + "\n"


def _arguments(job: Job, work: Work) -> str:
    """Of turn.py."""
    flags = ["--train"] * work.train + ["--speed"] * work.speed + ["--facts"] * work.facts
    return " ".join(map(shlex.quote, [*flags, *work.arguments, f"max_minutes={max_minutes(job, work.config):g}"]))


def submit(path: Path) -> str:
    """Hand an sbatch file to SLURM; returns the job's id.

    UserError without sbatch on this machine, or with what sbatch says against it. The file stays in both cases.
    """
    if shutil.which("sbatch") is None:
        what = "there is no sbatch on this machine, so nothing was submitted"
        raise UserError(what, str(path), "the file is written: run `sbatch` on it where SLURM is")
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
        raise UserError(f"sbatch refused it: {said}", str(path), "change what you ask for; the file stays")
    # `--parsable`: the id, and the cluster behind a semicolon where there are several.
    return done.stdout.strip().split(";")[0]


def environment() -> Path | None:
    """The virtual environment that runs this, if it is one."""
    return Path(sys.prefix) if sys.prefix != sys.base_prefix else None


def escaped(folder: Path) -> str:
    """A folder in a pattern of sbatch: a % would start one of those, of which %j, the job's id, is meant."""
    return str(folder.absolute()).replace("%", "%%")


def launch(job: Job, config_file: str, overrides: list[str], dry_run: bool = False) -> Iterator[str]:
    """Check, write and submit the job of a run; yields what is to be shown.

    UserError(s) if something is wrong with the config, the job, their fit, the disk or the submission.
    """
    resolved = load(config_file, overrides)
    config = resolved.config
    for note in check(job, resolved):
        yield f"note: {note}"
    path = config.directory / "slurm" / "launch.sbatch"
    work = Work(str(config.directory), config, (config_file, *overrides))
    text = script(job, [work], config.name, f"{escaped(path.parent)}/%j.log", Path.cwd())
    if dry_run:
        yield text
        return
    files.atomic_write(path, text)
    if job.output and "%" not in (folder := str(Path(job.output).parent)):
        with files.explained(folder):
            Path(folder).mkdir(parents=True, exist_ok=True)  # SLURM does not, and the job would die without a word
    number = submit(path)
    yield f"submitted job {number}: {job.ranks} ranks on {job.nodes} node{'s' * (job.nodes > 1)}, from {path}"
    yield f"log: {(job.output or str(path.with_name('%j.log'))).replace('%j', number)}"
