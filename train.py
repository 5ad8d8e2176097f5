"""Train a language model with product-key memories from one YAML file.

    python train.py configs/quickstart.yaml
    python train.py my.yaml model.layers=6 optim.dense.lr=3e-4      # any setting, by its dotted name
    python train.py my.yaml --dry-run --ranks 8                     # what it would be: layers, parameters, memory, traffic

The same command again goes on where the run was, whatever ended it.
"""

import argparse
import os

from pkm.config.rules import impossible_for
from pkm.config.schema import load
from pkm.errors import exits_cleanly


@exits_cleanly
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="YAML file; configs/base.yaml shows every setting")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved config and its counts; build nothing"
    )
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    parser.add_argument("--ranks", type=int, default=ranks, help="with --dry-run: as on that many processes")
    args = parser.parse_intermixed_args()
    if args.ranks < 1:
        parser.error("--ranks: at least 1")

    resolved = load(args.config, args.overrides)  # every mistake at once, or a frozen Config
    config = resolved.config
    if args.dry_run:
        from pkm.model.summary import kernels_line, print_plan
        from pkm.train.first_model import refuse_init_from

        resolved.refuse(impossible_for(config, args.ranks))
        refuse_init_from(config)
        print(resolved.yaml)
        print_plan(config, args.ranks)
        print(kernels_line(config))
        return 0

    # Only now what takes seconds to import.
    from pkm.corpus.store import open_corpus
    from pkm.device import configure_torch, decide, settled_optim
    from pkm.distributed import dist
    from pkm.evaluation.report import report
    from pkm.run.run import Run
    from pkm.run.stop import StopFlag
    from pkm.train.first_model import first_model
    from pkm.train.loop import train
    from pkm.train.optim import build_optimizers
    from pkm.train.parallel import apply_parallelism
    from pkm.train.state import restore

    compute = decide(config)  # device and precision
    configure_torch(config, compute)
    dist.start(compute.device)
    stop = StopFlag().install()  # SIGTERM, SIGUSR1, Ctrl-C or a file STOP: save, then leave
    with dist.raise_on_all_ranks():  # what one rank cannot do ends all of them
        resolved.refuse(impossible_for(config, dist.world_size()))
        corpus = open_corpus(config.corpus.path)

    with Run.open(config, resolved.yaml) as run:  # directory, lock, log; refuses what cannot go on
        if run.is_finished(reports=corpus.test is not None):
            run.show_report()
        else:
            model = apply_parallelism(first_model(run, corpus), config).to(compute.device)
            optim = build_optimizers(settled_optim(config, compute), model)
            state = restore(run, compute, model, optim, corpus)  # the newest checkpoint that verifies, or step 0
            state = train(run, compute, corpus, model, optim, state, stop)
            if state.step == config.optim.steps:
                with run.stops_in_report(state.step):
                    report(run, compute, corpus, model, stop)
                    reported = "report written" if corpus.test else "no report: the corpus has no test split"
                    run.status("finished", state.step, f"all steps done, {reported}")
    dist.stop()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
