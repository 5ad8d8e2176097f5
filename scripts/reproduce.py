"""Reproduce tables and figures of the paper: run their cells, then print our numbers beside the paper's.

    python scripts/reproduce.py table2 --scale cpu --corpus prepared/sample
    python scripts/reproduce.py table2 table3 table4 --seeds 3          # mean and spread over three seeds
    python scripts/reproduce.py isoflop --corpus prepared/news2k        # dense, experts and a memory at equal FLOPs
    python scripts/reproduce.py all --dry-run                           # cells, parameters, time and memory; runs nothing

The same command again goes on where it was stopped: what is finished is not run again, nor what two tables share.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pkm.errors import EXIT_INTERRUPTED, UserError, exits_cleanly

if TYPE_CHECKING:
    from pkm.experiments.estimate import Estimator
    from pkm.experiments.grid import Grid
    from pkm.experiments.jobs import Job


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("grids", nargs="+", metavar="GRID", help="table1 ... table4, a figure, a YAML file of your own, or all")
    add(
        "--scale",
        help="sizes that stand for the paper's, of configs/paper/scales (default: gpu with a GPU or --slurm, else cpu; paper, which keeps all sizes, for other files)",
    )
    add("--corpus", type=Path, metavar="DIR", help="prepared corpus (default: what each cell's config names)")
    add("--seeds", type=int, default=1, metavar="N", help="runs of each cell, with seeds 1 to N (default: %(default)s)")
    add(
        "--set",
        nargs="+",
        default=[],
        metavar="key=value",
        help="settings that win in every cell (memory.*: with a memory)",
    )
    add("--jobs", type=int, metavar="N", help="runs at a time (default: one a GPU, or as the cores allow)")
    add(
        "--gpus-per-run",
        type=int,
        default=1,
        metavar="N",
        help="ranks of each run; with --slurm 0 = on a CPU (default: %(default)s)",
    )
    add("--dry-run", action="store_true", help="show cells, parameters, estimated time and memory; run nothing")
    add("--commands", action="store_true", help="print the command that runs each cell by hand; run nothing")
    add("--report-only", action="store_true", help="run nothing; report what is there")
    add("--report", type=Path, metavar="DIR", help="where the report goes (default: runs/reproduce/SCALE/report)")
    add("--measure-speed-again", action="store_true", help="words a second, also where they are measured already")
    add("--slurm", action="store_true", help="submit what is not finished as one job array ")
    add = parser.add_argument_group("with --slurm, as for scripts/launch_slurm.py").add_argument
    add("--nodes", type=int, default=1, help="of each run, which share its GPUs evenly (default: %(default)s)")
    add("--time", default="24:00:00", help="of one turn of a job, as for sbatch (default: %(default)s)")
    add("--margin", type=float, metavar="MINUTES", help="of it, to stop and save in (default: 15, at most a quarter)")
    add("--cpus-per-task", type=int, metavar="CORES", help="of a node (default: 8 a GPU)")
    for name in ("--mem", "--partition", "--account", "--qos", "--constraint", "--job-name"):
        add(name)
    add("--sbatch", action="append", default=[], metavar="OPTION", help="any other: --sbatch=--reservation=week12")
    add("--setup", action="append", default=[], metavar="LINE", help="shell line before the start: 'module load cuda'")
    return parser


@exits_cleanly
def main() -> int:
    args = parser().parse_intermixed_args()
    least = {"seeds": 1, "jobs": 1, "nodes": 1, "gpus_per_run": 0 if args.slurm else 1}
    for name, number in least.items():
        if (given := getattr(args, name)) is not None and given < number:
            raise UserError(f"{given} is too few", f"--{name.replace('_', '-')}", f"write at least {number}")
    if args.slurm and args.measure_speed_again:
        raise UserError("with --slurm, what is measured stays", "--measure-speed-again", "leave one of the two out")

    from pkm.experiments import preview
    from pkm.experiments.estimate import Estimator
    from pkm.experiments.grid import load_grid, names
    from pkm.experiments.jobs import list_jobs
    from pkm.machine import visible_gpus

    gpus = visible_gpus()
    studies = not any(given in (*names(), "all") for given in args.grids)  # which have the sizes they are meant to have
    scale = args.scale or ("paper" if studies else "gpu" if gpus or args.slurm else "cpu")
    corpus = [f"corpus.path={json.dumps(str(args.corpus))}"] if args.corpus else []
    chosen = dict.fromkeys(name for given in args.grids for name in (names() if given == "all" else [given]))
    grids = [load_grid(name, scale, [*corpus, *args.set]) for name in chosen]
    seeds = range(1, args.seeds + 1)
    jobs = list_jobs(grids, seeds)
    folder = jobs[0].directory.parent
    estimator = Estimator(args.gpus_per_run)
    estimator.learn_from_disk(folder)
    code = 0
    if args.commands:
        print(*preview.commands(jobs, max(args.gpus_per_run, 1)), sep="\n")
        return 0
    if args.slurm and not args.report_only:
        submit(jobs, folder / "slurm", args)
        return 0
    if args.dry_run:
        show(jobs, gpus, estimator, args)
        return 0
    if not args.report_only:
        code = run(jobs, gpus, estimator, args)
    if code != EXIT_INTERRUPTED:
        report(grids, seeds, args.report or folder / "report")
    return code


def show(jobs: list[Job], gpus: list[str], estimator: Estimator, args: argparse.Namespace) -> None:
    from rich.console import Console

    from pkm.experiments import preview, workers

    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False)
    at_work = workers.workers([job.config for job in jobs], gpus, args.gpus_per_run, args.jobs)
    for line in preview.plan(jobs, estimator, at_work):
        console.print(line)


def run(jobs: list[Job], gpus: list[str], estimator: Estimator, args: argparse.Namespace) -> int:
    """Exit status: 1 if a run failed, 130 if it was told to stop."""
    from pkm.experiments import workers
    from pkm.experiments.jobs import check
    from pkm.experiments.live_table import LiveTable
    from pkm.experiments.scheduler import Scheduler

    at_work = workers.workers([job.config for job in jobs], gpus, args.gpus_per_run, args.jobs)
    check(jobs, args.gpus_per_run)
    pool = Scheduler(jobs, at_work, LiveTable(estimator), args.measure_speed_again)
    pool.run()
    if pool.stopped_by:
        print(f"stopped by {pool.stopped_by}; the same command goes on")
        return EXIT_INTERRUPTED
    return 1 if pool.failed else 0


def submit(jobs: list[Job], folder: Path, args: argparse.Namespace) -> None:
    from pkm.experiments.jobs import check
    from pkm.slurm import job_array, launch

    if args.gpus_per_run % args.nodes:
        what = f"{args.nodes} nodes cannot share {args.gpus_per_run} GPUs evenly"
        raise UserError(what, "--gpus-per-run", "choose a multiple of --nodes")
    names = ("nodes", "time", "margin", "cpus_per_task", "mem", "partition", "account", "qos", "constraint", "job_name")
    given = {name: getattr(args, name) for name in names}
    asked = launch.Job(
        **given, gpus_per_node=args.gpus_per_run // args.nodes, sbatch=tuple(args.sbatch), setup=tuple(args.setup),
        venv=launch.environment(), doctor=False,
    )  # fmt: skip
    check(jobs, asked.ranks, here=False)
    waiting = job_array.waiting(jobs, asked)
    if args.dry_run and waiting:
        print(job_array.script(waiting, asked, folder, args.jobs))
    elif waiting:
        number = job_array.submit(waiting, asked, folder, args.jobs)
        print(f"submitted job array {number}: {len(waiting)} runs, of {len(jobs)}; logs in {folder}")
        print("when they are done, the same command with --report-only in place of --slurm reports them")
    else:
        print("nothing to submit: every run is finished, at work or queued")


def report(grids: list[Grid], seeds: Sequence[int], folder: Path) -> None:
    from pkm.report.page import write_report
    from pkm.report.results import read_results
    from pkm.report.tables import grid_table

    results = [read_results(grid, seeds) for grid in grids]
    for result in results:
        print(f"\n{result.grid.settings.title}\n\n{grid_table(result)}")
    print(f"report: {write_report(results, folder)[0]}")


if __name__ == "__main__":
    raise SystemExit(main())
