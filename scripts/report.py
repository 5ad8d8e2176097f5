"""The page of one run, going on or done: numbers, curves, use of its memories over time, samples, settings.

    python scripts/report.py runs/quickstart                 # writes runs/quickstart/report.html
    python scripts/report.py quickstart --html page.html --over tokens

Several runs side by side: scripts/compare.py.
"""

import argparse
from pathlib import Path

from pkm.errors import UserError, exits_cleanly


@exits_cleanly
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="run directory, or name below --runs")
    parser.add_argument(
        "--runs",
        dest="root",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="where names are looked for (default: %(default)s)",
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="what to write (default: report.html in the run's directory)"
    )
    parser.add_argument(
        "--over",
        choices=["step", "tokens", "time"],
        default="step",
        help="what the curves are drawn over: %(choices)s (default: %(default)s)",
    )
    args = parser.parse_args()

    from pkm.files import atomic_write
    from pkm.report import single
    from pkm.report.run_directories import find, read

    found = find([args.run], args.root)
    if len(found) > 1:
        raise UserError(
            f"{args.run} stands for {len(found)} runs", "RUN", "name one of them, or use scripts/compare.py"
        )
    (run,) = read(found)
    file = args.html or run.directory / "report.html"
    atomic_write(file, single.html(run, args.over))
    print(f"written: {file}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
