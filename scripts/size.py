"""Propose a config for a number of parameters and of tokens, and say what it would cost on this machine.

    python scripts/size.py --parameters 20M --tokens 20x --out my.yaml
    python scripts/size.py --parameters 1M --tokens 20M --base configs/quickstart.yaml memory=null

Parameters are all but a memory's values; 20x is so many tokens a parameter. Width, layers, batch, steps and rates are set, all
else is as in the base config, of whose corpus the vocabulary is counted. The proposal is a config: python train.py my.yaml
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from pkm.errors import UserError, exits_cleanly

ROOT = Path(__file__).resolve().parent.parent


@exits_cleanly
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", required=True, metavar="N", help="as 20M")
    parser.add_argument(
        "--tokens", default="20x", metavar="N", help="as 400M, or 20x the parameters (default: %(default)s)"
    )
    parser.add_argument(
        "--base", type=Path, default=ROOT / "configs/modern.yaml", help="(default: configs/modern.yaml)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the config here (default: print it)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over base and proposal")
    args = parser.parse_intermixed_args()

    import yaml

    from pkm.config.schema import load
    from pkm.experiments.size import costs, number, proposed
    from pkm.files import atomic_write, explained

    wanted = number(args.parameters, "--parameters")
    settings = proposed(args.base, wanted, args.tokens, args.overrides)
    config = load(args.base, settings).config
    tree: dict = {"base": os.path.relpath(args.base, args.out.parent if args.out else ".")}
    if not any(setting.startswith("name=") for setting in settings):
        tree["name"] = f"{args.parameters}-{args.tokens}"
    for setting in settings:
        key, value = setting.split("=", 1)
        *sections, last = key.split(".")
        here = tree
        for section in sections:
            here = here.setdefault(section, {})
        here[last] = yaml.safe_load(value)
    if isinstance(config.memory, tuple):  # a file gives a list whole, and not by the numbers of its sections
        tree["memory"] = [memory.model_dump(mode="json", exclude_unset=True) for memory in config.memory]
    text = "".join(f"# {line}\n" for line in costs(config)) + yaml.safe_dump(tree, sort_keys=False)
    if args.out is None:
        print(text, end="")
        return 0
    if args.out.exists():
        raise UserError("is there already", str(args.out), "name a file that is not")
    with explained(args.out):
        atomic_write(args.out, text)
    print(text, end="", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
