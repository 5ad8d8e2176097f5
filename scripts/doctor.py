"""Is this machine fit for training? Checks Python, packages, devices, disk, and trains a tiny model for some seconds.

    python scripts/doctor.py                                    this machine
    python scripts/doctor.py configs/quickstart.yaml [a.b=c]    and what that run needs: corpus, device, room on the disk
    python scripts/doctor.py --json

Exit status 1 if something that a run cannot do without is missing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pkm.errors import exits_cleanly


@exits_cleanly
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", help="a run's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file")
    parser.add_argument("--json", action="store_true", help="print findings as JSON")
    args = parser.parse_intermixed_args()

    from rich.console import Console

    from pkm import doctor
    from pkm.config import load

    config = load(Path(args.config), args.overrides).config if args.config else None
    console = Console(stderr=True)
    findings = []
    with console.status("examining ...") as status:
        for finding in doctor.examine(config.runs if config else Path("runs"), config):
            findings.append(finding)
            status.update(f"examined {finding.about} ...")
    if args.json:
        print(json.dumps(doctor.as_json(findings), indent=2))
    else:
        Console().print(doctor.table(findings))
    failed = [finding.about for finding in findings if finding.status == "fail"]
    if failed and not args.json:
        print(f"not fit for training: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
