"""How long a training step of the quickstart takes on a CPU, and the pages that the system hands out in it.

    python benchmarks/step_cpu.py [--steps 20] [--threads N] [--generate] [key=value ...]

Run it in two checkouts in turn to compare them: it asks nothing of the code but what both have. A step is a batch's loss and
gradient, norms and both updates, as in train.py; data of the prepared sample. Times are medians, of the clock and of the process'
own CPU time, which says more where others use the cores. --generate: milliseconds a sampled token at several places instead.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from pathlib import Path

import torch

from pkm.config.schema import load
from pkm.corpus.batches import TrainingBatches
from pkm.corpus.store import open_corpus
from pkm.device import configure_torch, decide
from pkm.model.transformer import build_model
from pkm.train.optim import build_optimizers


def steps(settings: list[str], count: int) -> None:
    config = load("configs/quickstart.yaml", settings).config
    compute = decide(config)
    configure_torch(config, compute)
    corpus = open_corpus(Path(config.corpus.path))
    assert corpus.train is not None
    model = build_model(config, corpus.vocab.size).train()
    optim = build_optimizers(config.optim, model)
    batches = TrainingBatches(corpus.train, config.corpus.context, config.sequences, config.seed)
    times, cpu_times, faults = [], [], []
    for step in range(1, count + 4):
        ids, targets = (torch.from_numpy(part.copy()) for part in batches.batch(step))
        torch.manual_seed(step)
        clock, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        optim.clear()
        optim.begin(step)
        with compute.autocast():
            loss = model(ids, targets) / config.optim.batch_tokens
        loss.backward()
        optim.step(step, optim.gradient_norms())
        after = resource.getrusage(resource.RUSAGE_SELF)
        times.append(1e3 * (time.perf_counter() - clock))
        cpu_times.append(1e3 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))
        faults.append(after.ru_minflt - before.ru_minflt)
    wall, cpu, pages = (statistics.median(x[3:]) for x in (times, cpu_times, faults))
    print(
        f"{compute.precision}, {torch.get_num_threads()} threads: {wall:.0f} ms a step, {cpu:.0f} ms of CPU "
        f"(fastest {min(cpu_times[3:]):.0f}), {pages:.0f} page faults, loss {loss.item():.4f}"
    )


def generation(settings: list[str]) -> None:
    from pkm.inference.generate import Reader

    config = load("configs/quickstart.yaml", ["corpus.context=1024", *settings]).config
    model = build_model(config, 3000).eval()
    for samples in (1, 8):
        reader, times = Reader(model, torch.full((samples, 1), 20)), []
        with torch.no_grad():
            for _ in range(1020):
                before = time.process_time()
                reader.append(reader.logits().argmax(-1, keepdim=True))
                times.append(1e3 * (time.process_time() - before))
        places = {place: statistics.median(times[place - 8 : place + 8]) for place in (10, 100, 500, 1000)}
        print(f"{samples} samples:", ", ".join(f"{ms:.2f} ms at position {place}" for place, ms in places.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the quickstart's")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--generate", action="store_true")
    arguments = parser.parse_intermixed_args()
    torch.set_num_threads(arguments.threads)
    if arguments.generate:
        generation(arguments.overrides)
    else:
        steps(arguments.overrides, arguments.steps)


if __name__ == "__main__":
    main()
