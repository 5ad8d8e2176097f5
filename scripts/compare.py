"""Compare runs, going on or done: the settings in which they differ against what they measured, and their curves.

    python scripts/compare.py quickstart mine/first                     # names below runs/
    python scripts/compare.py runs/mine 'runs/sweep/*seed1*' --html compare.html --over time

A folder stands for all runs in it. The table is printed; --html writes it with the curves, --csv with every digit.
"""

import argparse
from pathlib import Path

from pkm.errors import exits_cleanly


@exits_cleanly
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run directory, name below --runs, folder of runs or glob"
    )
    parser.add_argument(
        "--runs",
        dest="root",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="where names are looked for (default: %(default)s)",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with the table and the curves")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table for a program")
    parser.add_argument(
        "--over",
        choices=["step", "tokens", "time"],
        default="step",
        help="what the curves are drawn over: %(choices)s (default: %(default)s)",
    )
    args = parser.parse_intermixed_args()

    from pkm.files import atomic_write
    from pkm.report import compare
    from pkm.report.run_directories import find, read

    runs = read(find(args.runs, args.root))
    print(compare.markdown(runs))
    if args.html:
        atomic_write(args.html, compare.html(runs, args.over))
        print(f"written: {args.html}")
    if args.csv:
        atomic_write(args.csv, compare.csv_text(runs))
        print(f"written: {args.csv}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
