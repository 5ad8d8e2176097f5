"""Score a trained model: perplexity, memory usage, KL, words per second; or facts of its training text that it knows; or tasks.

python scripts/evaluate.py runs/quickstart
python scripts/evaluate.py runs/quickstart --split valid --checkpoint latest --stride 64 --json
python scripts/evaluate.py runs/quickstart --facts         # kept in the run's facts.json; scripts/compare.py sets runs side by side
python scripts/evaluate.py runs/quickstart --tasks lambada_openai,hellaswag --limit 100    # of lm-evaluation-harness
"""

import argparse
import importlib.util
import json
from pathlib import Path

from pkm.errors import UserError, exits_cleanly


@exits_cleanly
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--split", choices=["train", "valid", "test"], help="default: test")
    parser.add_argument("--checkpoint", default="best", help="best, latest or a step (default: %(default)s)")
    parser.add_argument("--documents", type=int, help="only the first so many documents (default: all)")
    parser.add_argument("--stride", type=int, help="tokens a window moves on (default: the run's evaluate.stride)")
    parser.add_argument("--batch", type=int, help="windows of one forward pass (default: the run's evaluate.batch)")
    parser.add_argument(
        "--facts",
        type=int,
        nargs="?",
        const=3000,
        metavar="N",
        help="ask for N names, places and numbers as the rest of their sentence, and score nothing else: a third of held-out "
        "articles, a third read once in training, a third more often (N: %(const)s)",
    )
    parser.add_argument("--tasks", metavar="A,B", help="score these tasks of lm-evaluation-harness, and nothing else")
    parser.add_argument("--tasks-from", type=Path, metavar="DIR", help="with --tasks: a folder of tasks of your own")
    parser.add_argument("--shots", type=int, help="with --tasks: examples before each question (default: the task's)")
    parser.add_argument("--limit", type=int, help="with --tasks: only the first so many questions of each")
    parser.add_argument("--corpus", type=Path, help="where the prepared corpus lies now (default: the run's)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"])
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    args = parser.parse_args()
    if args.documents is not None and args.documents < 1:
        raise UserError(f"{args.documents} documents cannot be scored", "--documents", "give 1 or more")
    if args.facts is not None and args.facts < 1:
        raise UserError(f"{args.facts} facts cannot be asked for", "--facts", "give 1 or more")
    if args.tasks is not None and not all(tasks := [task.strip() for task in args.tasks.split(",")]):
        raise UserError(
            "a task without a name cannot be scored", "--tasks", "name them: --tasks lambada_openai,hellaswag"
        )
    if args.facts and args.tasks:
        raise UserError("--facts and --tasks each score nothing else", "--facts", "give one of the two at a time")
    if args.facts or args.tasks:
        alone = "--facts" if args.facts else "--tasks"
        if idle := [name for name in ("split", "documents", "stride") if getattr(args, name) is not None]:
            raise UserError(f"{alone} scores no split of the corpus", f"--{idle[0]}", "leave it out")
    asked = [
        f"--{name}" for name in ("tasks-from", "shots", "limit") if getattr(args, name.replace("-", "_")) is not None
    ]
    if asked and not args.tasks:
        raise UserError("no task is named that it could be for", asked[0], "add --tasks A,B, or leave it out")
    if args.limit is not None and args.limit < 1:
        raise UserError(f"{args.limit} questions cannot be asked", "--limit", "give 1 or more")
    if args.shots is not None and args.shots < 0:
        raise UserError(f"{args.shots} examples cannot be shown", "--shots", "give 0 or more")
    if args.tasks_from is not None and not args.tasks_from.is_dir():
        raise UserError(
            f"there is no directory {args.tasks_from}", "--tasks-from", "name the folder of the tasks' files"
        )
    if args.tasks:
        return score_tasks(args, tasks)
    overrides = [f"device={args.device}"]
    overrides += [f"evaluate.{key}={value}" for key in ("stride", "batch") if (value := getattr(args, key)) is not None]
    overrides += [f"corpus.path={json.dumps(str(args.corpus))}"] if args.corpus else []

    from pkm.evaluation.evaluate import evaluate, measure_speed
    from pkm.evaluation.recall import FILE, recall, recall_markdown
    from pkm.evaluation.report import report_markdown, report_record
    from pkm.files import atomic_write, json_text
    from pkm.inference.trained import load_trained

    trained = load_trained(args.run, args.checkpoint, tuple(overrides))
    config, corpus, model = trained.config, trained.corpus, trained.model
    if args.facts:
        known = recall(model, corpus, config, trained.compute, trained.step, args.facts)
        atomic_write(args.run / FILE, found := json_text(known.record(), indent=1))
        print(found.rstrip() if args.json else recall_markdown(known))
        return 0
    split = corpus.split(args.split or "test")
    if split is None:
        raise UserError(
            f"the corpus has no {args.split or 'test'} split", str(corpus.path), "prepare it with held-out articles"
        )
    evaluation = evaluate(model, corpus, split, config, trained.compute, args.documents)
    speed = measure_speed(model, corpus, split, config, trained.compute)
    record = report_record(config, model, trained.step, evaluation, speed)
    print(json_text(record, indent=2).rstrip() if args.json else report_markdown(record, evaluation, speed))
    return 0


def score_tasks(args: argparse.Namespace, tasks: list[str]) -> int:
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("lm-evaluation-harness is not installed", "--tasks", "pip install 'pkm[eval]'")
    from pkm.evaluation import harness
    from pkm.files import json_text

    model = harness.HarnessModel(args.run, args.checkpoint, args.corpus, args.batch, args.device)
    found = harness.score_tasks(model, tasks, args.tasks_from, args.shots, args.limit)
    print(json_text(found, indent=2).rstrip() if args.json else harness.tasks_markdown(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
