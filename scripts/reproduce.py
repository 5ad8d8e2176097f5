"""Reproduce tables and figures of the paper: run their cells, then print our numbers beside the paper's.

    python scripts/reproduce.py table2 --scale cpu --corpus prepared/sample
    python scripts/reproduce.py table2 table3 table4 --seeds 3          # mean and spread over three seeds
    python scripts/reproduce.py all --dry-run                           # cells, parameters, time and memory; runs nothing

The same command again goes on where it was stopped: what is finished is not run again, nor what two tables share.
"""

import argparse
import json
from pathlib import Path

from pkm.errors import EXIT_INTERRUPTED, UserError, exits_cleanly


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("grids", nargs="+", metavar="GRID", help="table1 ... table4, a figure, a YAML file of your own, or all")
    add("--scale", help="sizes that stand for the paper's, of configs/paper/scales (default: gpu with a GPU, else cpu)")
    add("--corpus", type=Path, metavar="DIR", help="prepared corpus (default: what each cell's config names)")
    add("--seeds", type=int, default=1, metavar="N", help="runs of each cell, with seeds 1 to N (default: %(default)s)")
    add("--set", nargs="+", default=[], metavar="key=value", help="settings that win in every cell")
    add("--jobs", type=int, metavar="N", help="runs at a time (default: one a GPU, or as the cores allow)")
    add("--gpus-per-run", type=int, default=1, metavar="N", help="ranks of each run (default: %(default)s)")
    add("--report-only", action="store_true", help="run nothing; report what is there")
    add("--report", type=Path, metavar="DIR", help="where the report goes (default: runs/reproduce/SCALE/report)")
    add("--measure-speed-again", action="store_true", help="words a second, also where they are measured already")
    return parser


@exits_cleanly
def main() -> int:
    args = parser().parse_args()
    if args.seeds < 1:
        raise UserError(f"{args.seeds} seeds are no run", "--seeds", "write at least 1")

    from pkm import experiments, workers
    from pkm.board import Board
    from pkm.corpus.store import open_corpus
    from pkm.grid import load_grid, names
    from pkm.pool import Pool

    gpus = workers.visible_gpus()
    scale = args.scale or ("gpu" if gpus else "cpu")
    corpus = [f"corpus.path={json.dumps(str(args.corpus))}"] if args.corpus else []
    chosen = dict.fromkeys(name for given in args.grids for name in (names() if given == "all" else [given]))
    grids = [load_grid(name, scale, [*corpus, *args.set]) for name in chosen]
    seeds = range(1, args.seeds + 1)
    jobs = experiments.jobs(grids, seeds)
    code = 0
    if not args.report_only:
        for path in dict.fromkeys(job.config.corpus.path for job in jobs):
            open_corpus(path)
        at_work = workers.workers([job.config for job in jobs], gpus, args.gpus_per_run, args.jobs)
        pool = Pool(jobs, at_work, Board(), args.measure_speed_again)
        pool.run()
        if pool.stopped_by:
            print(f"stopped by {pool.stopped_by}; the same command goes on")
            return EXIT_INTERRUPTED
        code = 1 if pool.failed else 0

    from pkm.report.page import write_report
    from pkm.report.results import read_results
    from pkm.report.tables import grid_table

    results = [read_results(grid, seeds) for grid in grids]
    for result in results:
        print(f"\n{result.grid.settings.title}\n\n{grid_table(result)}")
    written = write_report(results, args.report or jobs[0].config.runs / "reproduce" / scale / "report")
    print(f"report: {written[0]}")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
