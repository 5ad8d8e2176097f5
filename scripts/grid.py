"""Run several configs one after another and print their results side by side.

    python scripts/grid.py configs/paper/table3/*.yaml --set corpus.path=prepared/mine optim.steps=2000

Finished runs are not run again, so the same command goes on where it was stopped; a failed run does not stop the others.
"""

import argparse
from pathlib import Path

from pkm.errors import exits_cleanly


@exits_cleanly
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+", type=Path, help="YAML files")
    parser.add_argument("--set", nargs="+", default=[], metavar="key=value", help="settings that win over every file")
    parser.add_argument("--dry-run", action="store_true", help="print what each would be; run nothing")
    args = parser.parse_args()

    from pkm import experiments
    from pkm.count import print_plan
    from pkm.report.tables import comparison

    grid = experiments.cells(args.configs, args.set)
    if args.dry_run:
        for cell in grid:
            print_plan(cell.config)
        return 0
    outcomes = experiments.run(grid)
    print(comparison([(o.cell.config.name, o.state, o.reason, o.cell.report()) for o in outcomes]))
    return 0 if all(outcome.state == "finished" for outcome in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
