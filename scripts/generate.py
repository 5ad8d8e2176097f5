"""Let a trained model go on from a prompt.

python scripts/generate.py runs/quickstart --prompt "The prime minister said"
python scripts/generate.py runs/quickstart --prompt-file - --top-p 0.9 --samples 3 < prompt.txt
"""

import argparse
import sys
from pathlib import Path

from pkm.errors import UserError, exits_cleanly


@exits_cleanly
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run directory, or what scripts/export.py wrote without --format")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", help="text to go on from")
    prompts.add_argument("--prompt-file", help="file that holds it; - for standard input")
    parser.add_argument("--tokens", type=int, default=100, help="BPE tokens to add (default: %(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 = always the most likely (default: %(default)s)"
    )
    parser.add_argument("--top-k", type=int, help="sample from the k most likely only")
    parser.add_argument("--top-p", type=float, help="sample from the smallest set of that probability")
    parser.add_argument("--samples", type=int, default=1, help="how many (default: %(default)s)")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the first sample; the next ones have the next numbers (default: %(default)s)",
    )
    parser.add_argument("--checkpoint", default="best", help="best, latest or a step (default: %(default)s)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"])
    args = parser.parse_args()
    prompt = args.prompt if args.prompt is not None else read_prompt(args.prompt_file)

    from pkm.files import explained
    from pkm.inference.export import WEIGHTS, load_exported
    from pkm.inference.generate import generate
    from pkm.inference.trained import load_trained

    overrides = (f"device={args.device}",)
    with explained(args.run):
        is_exported = (args.run / WEIGHTS).is_file()
    if is_exported:
        exported = load_exported(args.run, overrides)
        model, encoder = exported.model, exported.encoder
    else:
        trained = load_trained(args.run, args.checkpoint, overrides)
        model, encoder = trained.model, trained.corpus.encoder()
    texts = generate(
        model,
        encoder,
        prompt,
        args.tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seeds=range(args.seed, args.seed + args.samples),
    )
    print(f"\n{'-' * 40}\n\n".join(f"{text}\n" for text in texts), end="")
    return 0


def read_prompt(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"the prompt cannot be read: {error}", name, "give a UTF-8 text file, or - for standard input"
        ) from None


if __name__ == "__main__":
    raise SystemExit(main())
