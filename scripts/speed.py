"""Measure a model's words a second at inference and write speed.json into its run directory.

    python scripts/speed.py runs/quickstart                          # a trained model, by its best checkpoint
    python scripts/speed.py configs/quickstart.yaml memory.sub_keys=256   # any config: trained or with untrained weights

Let nothing else work on the machine meanwhile. To compare models, measure them in turn, several times each, with --again. Words are those of the test set, tokens its BPE tokens; device, precision
and batch (evaluate.batch windows of corpus.context tokens) stand in the file.
"""

import argparse
from pathlib import Path

from pkm.errors import exits_cleanly


@exits_cleanly
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run directory or YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file")
    parser.add_argument("--seconds", type=float, default=10.0, help="at most about so long (default: %(default)s)")
    parser.add_argument(
        "--again",
        action="store_true",
        help="one more round: keep the speeds measured before and write the median of all",
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing")
    args = parser.parse_intermixed_args()
    file = args.run / "config.yaml" if args.run.is_dir() else args.run

    from pkm.config.schema import load

    config = load(file, args.overrides).config

    from pkm.evaluation.speed import time_run

    measured = time_run(config, args.seconds, args.again)
    if not args.quiet:
        print(
            f"{measured['words_per_second']:,.0f} words/s, {measured['tokens_per_second']:,.0f} BPE tokens/s "
            f"({measured['device']}, {measured['precision']}, {measured['batch_windows']} windows of "
            f"{measured['context']} tokens, weights {measured['weights']}) -> {config.directory}/speed.json"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
