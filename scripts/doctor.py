"""Is this machine, or are these nodes, fit for training? Checks Python, packages, devices, disk, and trains a tiny model
for some seconds.

    python scripts/doctor.py                                    this machine
    python scripts/doctor.py configs/quickstart.yaml [a.b=c]    and what that run needs: corpus, device, room on the disk
    python scripts/doctor.py --json
    torchrun --nproc-per-node 8 scripts/doctor.py my.yaml       and the ranks together: GPUs, versions, network, clocks,
                                                                shared files (with srun, all nodes)

Exit status 1 if something that a run cannot do without is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pkm.errors import UserError, exits_cleanly

if TYPE_CHECKING:
    from pkm.config.load import Resolved
    from pkm.config.schema import Config
    from pkm.doctor.finding import Finding


@exits_cleanly
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", help="a run's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file")
    parser.add_argument("--json", action="store_true", help="print findings as JSON")
    args = parser.parse_intermixed_args()

    from rich.console import Console

    from pkm.doctor.finding import as_json, table

    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    found = []
    with Console(stderr=True, quiet=rank != 0).status("examining ...") as status:
        for finding in of_machine(args) if ranks == 1 else of_ranks(args):
            found.append(finding)
            status.update(f"examined {finding.about} ...")
    if rank != 0:
        return 0
    if args.json:
        print(json.dumps(as_json(found), indent=2))
    else:
        # A log has no width; rich takes it for 80 columns.
        Console(width=None if sys.stdout.isatty() else 160).print(table(found))
    failed = list(dict.fromkeys(finding.about for finding in found if finding.status == "fail"))
    if failed and not args.json:
        print(f"not fit for training: {', '.join(failed)}")
    return 1 if failed else 0


def of_machine(args: argparse.Namespace) -> Iterator[Finding]:
    from pkm.config.schema import load
    from pkm.doctor import node

    config = load(args.config, args.overrides).config if args.config else None
    yield from node.examine(config.runs if config else Path("runs"), config)


def of_ranks(args: argparse.Namespace) -> Iterator[Finding]:
    """Findings of all ranks together. UserErrors of a config that none can read are rank 0's to show."""
    from pkm.config.schema import load
    from pkm.distributed import dist
    from pkm.doctor import ranks as ranks_doctor

    resolved: Resolved[Config] | UserError | None
    try:
        resolved = load(args.config, args.overrides) if args.config else None
    except UserError as error:
        resolved = error  # another rank may read it: they all have to hear of this
    try:
        yield from ranks_doctor.examine(resolved)
    except UserError as error:
        if dist.is_main() or error is not resolved:
            raise
    dist.stop()


if __name__ == "__main__":
    raise SystemExit(main())
