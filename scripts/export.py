"""Write a trained model into a directory of its own, that needs neither the run nor its corpus.

python scripts/export.py runs/quickstart exported/quickstart                  # for pkm: one safetensors file, config, subwords
python scripts/export.py runs/quickstart exported/quickstart --format hf      # for transformers: model code and tokenizer too
"""

import argparse
from pathlib import Path

from pkm.errors import exits_cleanly


@exits_cleanly
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("directory", type=Path, help="where to write; must not exist, or be empty")
    parser.add_argument("--checkpoint", default="best", help="best, latest or a step (default: %(default)s)")
    parser.add_argument(
        "--format", choices=["pkm", "hf"], default="pkm", help="pkm's own, or Hugging Face's (default: %(default)s)"
    )
    args = parser.parse_args()

    from pkm.inference.export import export
    from pkm.inference.hugging_face.export import export_hugging_face
    from pkm.inference.trained import load_trained

    trained = load_trained(args.run, args.checkpoint, ("device=cpu",))
    if args.format == "hf":
        export_hugging_face(trained, args.directory)
    else:
        export(trained, args.directory)
    print(f"step {trained.step} of {args.run} -> {args.directory}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
