"""Make a run of a model that another program trained, or a memory of its layer.

python scripts/import.py --from hf exported/quickstart runs/quickstart-again     # what export.py --format hf wrote, or a Llama
python scripts/import.py --from xlm checkpoint.pth runs/xlm                      # the paper's own code
python scripts/import.py --from meta consolidated.pth runs/meta                  # Meta's memory code
python scripts/import.py --from lucidrains model.pt memories/mine knn=32         # layers of product-key-memory
python scripts/import.py --from peer model.pt memories/mine knn=16 non_competing_scores=false      # and of PEER-pytorch

A run is there to generate with, to score, to export, to train on from (init_from); a memory for pkm.ProductKeyMemory.load.
Settings that the file does not tell are given as on train.py's command line: corpus.path=prepared/mine model.heads=8
"""

import argparse
from pathlib import Path

from pkm.errors import exits_cleanly


@exits_cleanly
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--from",
        dest="kind",
        required=True,
        choices=["hf", "xlm", "meta", "lucidrains", "peer"],
        help="whose format it is",
    )
    parser.add_argument("source", type=Path, help="file or directory to read")
    parser.add_argument("directory", type=Path, help="where to write; must not exist, or be empty")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, by their dotted names")
    args = parser.parse_intermixed_args()

    from pkm.inference.imported import MODELS, import_model
    from pkm.inference.imported_memory import import_memories

    if args.kind not in MODELS:
        for place in import_memories(args.kind, args.source, args.directory, args.overrides):
            print(f'{args.source} -> {place}: pkm.ProductKeyMemory.load("{place}")')
        return 0
    config = import_model(args.kind, args.source, args.directory, args.overrides)
    print(f"{args.source} -> {args.directory}, whose text is to be in {config.corpus.path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
