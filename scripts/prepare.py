"""Raw articles to a prepared corpus.

python scripts/prepare.py data/ccnews.yaml                     prepare, or go on where an earlier call stopped
python scripts/prepare.py data/ccnews.yaml name=mine sources.0.path=~/news/*.parquet
python scripts/prepare.py data/ccnews.yaml --dry-run           files, sizes, estimated time and disk
python scripts/prepare.py --stats prepared/sample              what a corpus holds (--verify: also hash its shards)
python scripts/prepare.py --show 3 prepared/sample             document 3 decoded back (--split valid)
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console

from pkm.config.load import load
from pkm.corpus.store import SPLITS, open_corpus, verify
from pkm.errors import UserError, exits_cleanly
from pkm.prepare.display import console_on, progress_on, show_outcome, show_plan, show_stats
from pkm.prepare.input import sample
from pkm.prepare.input.listing import LeftOut
from pkm.prepare.input.sources import list_inputs
from pkm.prepare.pipeline import prepare
from pkm.prepare.settings import PrepareConfig, impossible
from pkm.prepare.subwords import check_given


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="a YAML file of data/, or, to look at, a prepared corpus")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--stats", action="store_true", help="print what a prepared corpus holds")
    parser.add_argument("--verify", action="store_true", help="hash every shard of a prepared corpus")
    parser.add_argument("--show", type=int, metavar="N", help="print document N, counted from 0, decoded back")
    parser.add_argument("--split", choices=SPLITS, default="train", help="split that --show takes it from")
    return parser.parse_intermixed_args()


@exits_cleanly
def main() -> None:
    given = arguments()
    console = console_on(sys.stdout)
    if given.stats or given.verify or given.show is not None:
        look(given, console)
        return
    config = load(given.path, given.overrides, PrepareConfig, impossible).config
    if config.download and not config.directory.exists():
        sample.fetch()
    began = time.monotonic()
    if given.dry_run:
        check_given(config)
    if given.dry_run or not config.directory.exists():
        left_out = LeftOut()
        show_plan(config, list_inputs(config, left_out), left_out, console)
    if given.dry_run:
        return
    with progress_on(console) as show:
        outcome = prepare(config, show, console.print)
    if outcome.fresh:
        show_outcome(outcome, time.monotonic() - began, console)
    else:
        console.print(f"{config.directory} is prepared already")
    show_stats(open_corpus(config.directory), console)


def look(given: argparse.Namespace, console: Console) -> None:
    """--stats, --verify, --show: of a prepared corpus, or of the one that a YAML file prepares."""
    path = given.path
    if path.suffix in (".yaml", ".yml"):
        path = load(path, given.overrides, PrepareConfig, impossible).config.directory
    corpus = open_corpus(path)
    if given.stats:
        show_stats(corpus, console)
    if given.verify:
        verify(corpus)
        console.print(f"{path}: every shard is what it was when it was written")
    if given.show is not None:
        split = corpus.split(given.split)
        if split is None or not 0 <= given.show < split.documents:
            holds = f"{split.documents:,} documents, counted from 0" if split else "no documents"
            raise UserError(f"there is no document {given.show}: {given.split} has {holds}", "--show")
        print(corpus.encoder().decode(split.document(given.show)))


if __name__ == "__main__":
    sys.exit(main())
