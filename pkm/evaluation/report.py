"""The report of one run: its best checkpoint on the test split, as report.json and report.md."""

from __future__ import annotations

from typing import Any

from pkm.config.schema import Config
from pkm.corpus.store import Corpus
from pkm.corpus.unknown import WARNS, percent
from pkm.corpus.words import NO_WORDS
from pkm.device import Compute
from pkm.distributed import dist
from pkm.evaluation.evaluate import MOSES, Evaluation, Speed, evaluate, measure_speed
from pkm.evaluation.recall import Recall, recall, recall_markdown
from pkm.files import atomic_write, json_text
from pkm.format import markdown_table, perplexity
from pkm.inference.trained import load_weights
from pkm.machine import machine
from pkm.model.transformer import Transformer, parameters
from pkm.run.metrics import read
from pkm.run.run import Run
from pkm.run.stop import StopFlag


def report(run: Run, compute: Compute, corpus: Corpus, model: Transformer, stop: StopFlag) -> None:
    """Evaluate the checkpoint with the lowest validation loss (the last one, without validation) on the test split.

    dist.Stopped, with nothing written, if the run is told to stop meanwhile.
    """
    config, split = run.config, corpus.test
    if split is None:
        run.say(f"no report: {corpus.path} has no test split (prepare it with held-out articles for one)")
        return
    best = run.checkpoints.load("best" if corpus.valid else "latest")
    load_weights(model, best)
    asked = config.evaluate
    documents = min(asked.test_documents or split.documents, split.documents)
    run.say(f"evaluating step {best.step} on {documents:,} test documents")

    def between() -> None:
        stop.check(run.directory)

    evaluation = evaluate(model, corpus, split, config, compute, asked.test_documents, between)
    fitted = None
    if asked.train_documents and corpus.train is not None:
        fitted = evaluate(model, corpus, corpus.train, config, compute, asked.train_documents, between)
    known = None
    if asked.facts and not corpus.decodes:
        run.say(f"not asked for facts: {NO_WORDS}")
    elif asked.facts:
        known = recall(model, corpus, config, compute, best.step, asked.facts, between)
    speed = measure_speed(model, corpus, split, config, compute)
    between()
    run.metrics.write(config.optim.steps, "test", **evaluation.record())
    trained = dist.broadcast_object([one for one in read(run.metrics.path) if one["kind"] == "train"][-1:])
    record = report_record(config, model, best.step, evaluation, speed, fitted, known)
    record["tables"] = trained[0].get("tables", {}) if trained else {}
    text = report_markdown(record, evaluation, speed, known)
    with dist.raise_on_all_ranks():
        if dist.is_main():
            run.refuse_if_taken_over()
            atomic_write(run.directory / "report.json", json_text(record, indent=2))
            atomic_write(run.directory / "report.md", text)
    run.say(text)


def report_record(
    config: Config,
    model: Transformer,
    step: int,
    evaluation: Evaluation,
    speed: Speed,
    fitted: Evaluation | None = None,
    known: Recall | None = None,
) -> dict[str, Any]:
    """What report.json holds. `fitted` scores training text, `known` facts of it."""
    dense, values = parameters(model)
    return {
        "run": config.name,
        "step": step,
        "parameters": {"dense": dense, "values": values},
        "evaluation": evaluation.record(),
        "training": fitted and fitted.record(),
        "facts": known and known.record(),
        "speed": vars(speed),
        "machine": machine(),
    }


def report_markdown(record: dict[str, Any], evaluation: Evaluation, speed: Speed, known: Recall | None = None) -> str:
    """Tables: the model, each of its memories, each mixture of experts, and what facts it knows."""
    e, fit, parameters = evaluation, record["training"], record["parameters"]
    # Reports of Moses tokens, as the paper's are, say it nowhere else.
    of = "" if e.words_are == MOSES else f" ({e.words_are})"
    model = [
        ("checkpoint", f"step {record['step']:,}"),
        ("parameters", f"{parameters['dense']:,} dense, {parameters['values']:,} values"),
        ("scored", f"{e.tokens:,} BPE tokens, {e.words:,} words{of}, {e.documents:,} documents ({e.split})"),
        ("perplexity per BPE token", perplexity(e.perplexity, e.loss)),
        (f"perplexity per word{of}", "-" if e.word_loss is None else perplexity(e.word_perplexity, e.word_loss)),
        *([("perplexity on training text", perplexity(fit["perplexity"], fit["loss"]))] if fit else []),
        ("bits per byte", f"- ({e.bits_per_byte_withheld})" if e.bits_per_byte is None else f"{e.bits_per_byte:.4f}"),
        ("<unk> among scored tokens", percent(e.unknown_share) + (" (warning)" if e.unknown_share >= WARNS else "")),
        ("words/s at inference", f"{speed.words_per_second:,.0f}"),
        ("BPE tokens/s at inference", f"{speed.tokens_per_second:,.0f}"),
        ("measured on", f"{speed.device}, {speed.precision}, {speed.batch_windows} windows of {speed.context} tokens"),
    ]
    text = f"# {record['run']}\n\n" + markdown_table(["", ""], model)
    if e.memories:
        top = [f"top {share} % in" for share in (50, 90, 99)]
        rows = []
        for layer, u in e.memories.items():
            slots = [f"{share:.2f} % of slots" for share in (u.top50, u.top90, u.top99)]
            use = f"{u.percent:.2f}", f"{u.kl:.4f}", f"{u.gini:.3f}"
            rows.append([str(layer), *use, *slots, f"{u.shared_by_two_heads:.3f}"])
        text += "\n" + markdown_table(["memory at layer", "usage %", "KL", "Gini", *top, "slots two heads share"], rows)
        inexact = [(str(layer), f"{100 * u.recall:.1f}") for layer, u in e.memories.items() if u.recall is not None]
        if inexact:
            text += "\n" + markdown_table(["memory at layer", "best slots that the search finds, %"], inexact)
    if tables := record.get("tables"):
        rows = [
            [name, *(f"{of[key]:.1f}" if key in of else "-" for key in ("dead", "stale"))]
            for name, of in tables.items()
        ]
        text += "\n" + markdown_table(
            ["table", "rows that training never read, %", "steps since others were read"], rows
        )
    if e.experts:
        uses = [(str(layer), f"{u.percent:.2f}", f"{u.kl:.4f}", f"{u.gini:.3f}") for layer, u in e.experts.items()]
        text += "\n" + markdown_table(["experts at layer", "usage %", "KL", "Gini"], uses)
    if known:
        text += "\n" + recall_markdown(known)
    return text + f"\n{record['machine']}\n"
