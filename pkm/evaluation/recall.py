"""Recall: how well a model knows the facts that it was trained on, beside facts of articles that it never read.

Each fact (pkm.corpus.facts) is asked as the rest of its sentence: the model is given the sentence up to the answer, without
what stands before the sentence. What it read once is compared with what it never read: a fact of a training article that
stands nowhere else in training is like one of a held-out article that stands nowhere in training, but for that one reading.
So the difference of the two is what was memorised, and not how well the model knows the language.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from pkm.config.schema import Config
from pkm.corpus.batches import PAD_ID, TrainingBatches
from pkm.corpus.facts import Fact, Seen, ages, facts_held_out, facts_seen, when_seen
from pkm.corpus.store import Corpus
from pkm.corpus.words import words_of
from pkm.device import Compute
from pkm.distributed import dist
from pkm.errors import UserError
from pkm.evaluation.evaluate import inference
from pkm.files import read_json
from pkm.format import markdown_table
from pkm.model.transformer import Transformer
from pkm.run.status import read_report

FILE = "facts.json"
POOL = 8
"""Candidates for each fact that is asked: most were read once, and those read more often must be found among them."""
EXAMPLES = 6
HELD_OUT_SEED = 1
"""Of the held-out facts, which are the same for every run on a corpus."""


@dataclass(frozen=True)
class Asked:
    """A fact and how the model answered."""

    fact: Fact
    seen: Seen
    nll: float
    """Of the answer, nats."""
    exact: bool
    """Whether the likeliest token was the answer's, at each of its tokens: what greedy generation would have said."""
    said: tuple[int, ...]
    """Those likeliest tokens."""


@dataclass(frozen=True)
class Group:
    """Means over facts that are alike in how often and how long ago they were read."""

    facts: int
    tokens: int
    """Of all answers."""
    nll: float
    """Of an answer, nats."""
    nll_error: float | None
    """Its standard error; None of a single fact."""
    nll_per_token: float
    exact: float
    """Answered exactly, %."""


@dataclass(frozen=True)
class Recall:
    """What facts of the text a model knows at a step of its training."""

    step: int
    asked: int
    held_out: str | None
    """The split that the facts never read are of; None where the corpus has none."""
    groups: dict[str, Group]
    """`never`, `once`, `more often`; these by how often (`2-3 times`) and, of those read once, by how long ago (`4-15 steps ago`)."""
    kinds: dict[str, dict[str, Group]]
    """By name, place and number: `never` and `once`."""
    batch_tokens: int
    """Tokens of a step."""
    examples: list[dict[str, Any]]

    def record(self) -> dict[str, Any]:
        """As JSON-ready values."""
        return asdict(self)


def recall(
    model: Transformer, corpus: Corpus, config: Config, compute: Compute, step: int, facts: int,
    between: Callable[[], None] = lambda: None,
) -> Recall:  # fmt: skip
    """Ask about `facts` facts after `step` steps of training: a third never read, a third read once, a third more often.

    Which facts those are depends on the corpus, the seed and the step alone; there may be fewer than asked for. `between`
    is called before each batch. UserError for a model that has not been trained, for text that came as ids without a tokenizer,
    and if the text holds no facts.
    """
    train, held_out = corpus.train, corpus.test or corpus.valid
    if step < 1 or train is None:
        raise UserError("a model that has read nothing cannot be asked for facts", "--facts", "train it first")
    words = words_of(corpus)
    batches = TrainingBatches(train, config.corpus.context, config.sequences, config.seed)
    candidates = facts_seen(batches, words, step, POOL * facts, config.seed)
    if held_out is not None:
        candidates += facts_held_out(held_out, config.corpus.context, words, 2 * facts, HELD_OUT_SEED)
    with_seen = list(zip(candidates, when_seen(candidates, batches, words, step), strict=True))
    chosen = choose(with_seen, step, facts, config.seed)
    if not chosen:
        what = "no names, places or numbers were found in the text that was read, with four words of their sentence before them"
        raise UserError(what, str(corpus.path), "ask a model of longer windows (corpus.context) or of other text")
    asked = ask(model, corpus, config, compute, chosen, between)
    encoder = corpus.encoder()
    shown = [
        {
            "kind": one.fact.kind,
            "sentence": encoder.decode(one.fact.prompt),
            "answer": encoder.decode(one.fact.answer),
            "likeliest": encoder.decode(one.said),
            "times": one.seen.times,
            "nll": one.nll,
        }
        for one in _even([list(group) for group in _thirds(asked, lambda one: one.seen)], EXAMPLES)
    ]
    where = held_out.name if held_out else None
    return Recall(step, len(asked), where, *grouped(asked, step), config.optim.batch_tokens, shown)


def choose(candidates: Sequence[tuple[Fact, Seen]], step: int, wanted: int, seed: int) -> list[tuple[Fact, Seen]]:
    """Of the candidates a third of each: never read; read once, evenly over ages; more often, evenly over how often."""
    order = np.random.default_rng(seed).permutation(len(candidates))
    never, once, more = _thirds([candidates[i] for i in order], lambda pair: pair[1])
    by_age = [[pair for pair in once if low <= step - pair[1].last <= high] for low, high in ages(step)]
    by_times: dict[int, list[tuple[Fact, Seen]]] = {}
    for pair in more:
        by_times.setdefault(pair[1].times.bit_length(), []).append(pair)
    each = -(-wanted // 3)
    return never[:each] + _even(by_age, each) + _even([by_times[key] for key in sorted(by_times)], each)


def _thirds(items: Sequence[Any], seen: Callable[[Any], Seen]) -> tuple[list[Any], list[Any], list[Any]]:
    """Those never read, read once, and more often."""
    return tuple([one for one in items if min(seen(one).times, 2) == times] for times in (0, 1, 2))  # type: ignore[return-value]


def _even(groups: Sequence[list[Any]], total: int) -> list[Any]:
    """So many in all, as evenly from the groups as they allow."""
    taken: list[Any] = []
    left = sorted(groups, key=len)
    for i, group in enumerate(left):
        taken += group[: -(-(total - len(taken)) // (len(left) - i))]
    return taken[:total]


def ask(
    model: Transformer, corpus: Corpus, config: Config, compute: Compute, facts: Sequence[tuple[Fact, Seen]],
    between: Callable[[], None] = lambda: None,
) -> list[Asked]:  # fmt: skip
    """Each fact's prompt as at a document's beginning, then its answer; all ranks share the facts, and get all answers."""
    by_length = sorted(facts, key=lambda pair: len(pair[0].prompt) + len(pair[0].answer))
    ranks = dist.world_size()
    by_length += by_length[: -len(by_length) % ranks]  # so that all ranks have as many
    each = -(-config.evaluate.batch // ranks) * ranks
    found: list[Asked] = []
    with inference(model):
        for first in range(0, len(by_length), each):
            between()
            batch = by_length[first : first + each]
            found += _answers(model, compute, batch, corpus.end_id, config.corpus.context)
    order = {fact.statement: i for i, (fact, _) in enumerate(facts)}
    together = {one.fact.statement: one for some in dist.gather_objects(found) for one in some}
    return sorted(together.values(), key=lambda one: order[one.fact.statement])


def _answers(
    model: Transformer, compute: Compute, batch: Sequence[tuple[Fact, Seen]], end_id: int, context: int
) -> Iterator[Asked]:
    """This rank's part of a batch's answers; every rank's part has the same shape."""
    texts = [[end_id, *fact.prompt, *fact.answer][-context - 1 :] for fact, _ in batch]
    width, rows = max(map(len, texts)) - 1, range(dist.rank(), len(batch), dist.world_size())
    ids = torch.full((len(rows), width), PAD_ID)
    for i, row in enumerate(rows):
        ids[i, : len(texts[row]) - 1] = torch.tensor(texts[row][:-1])
    # By length, since another tokenizer's text may hold the id of padding.
    real = torch.arange(width) < torch.tensor([[len(texts[row]) - 1] for row in rows])
    with compute.autocast():
        hidden = model.hidden(ids.to(compute.device), real.to(compute.device))
        for i, row in enumerate(rows):
            (fact, seen), end = batch[row], len(texts[row]) - 1
            logits = model.logits(hidden[i, end - len(fact.answer) : end]).float().cpu()
            said = tuple(logits.argmax(1).tolist())
            nll = float(F.cross_entropy(logits, torch.tensor(fact.answer), reduction="sum"))
            if not math.isfinite(nll):
                fix = "use precision fp32 or bf16; if it stays so, go back to an earlier checkpoint"
                raise UserError(f"the model's loss on a fact is {nll}", fix=fix)
            yield Asked(fact, seen, nll, said == fact.answer, said)


def grouped(asked: Sequence[Asked], step: int) -> tuple[dict[str, Group], dict[str, dict[str, Group]]]:
    """`groups` and `kinds` of a Recall: what has no facts is left out."""
    never, once, more = _thirds(asked, lambda one: one.seen)
    parts: dict[str, list[Asked]] = {"never": never, "once": once, "more often": more}
    for bits in range(2, max((one.seen.times.bit_length() for one in more), default=0) + 1):
        parts[f"{1 << bits - 1}-{(1 << bits) - 1} times"] = [o for o in more if o.seen.times.bit_length() == bits]
    for low, high in ages(step):
        parts[f"{low}-{high} steps ago"] = [one for one in once if low <= step - one.seen.last <= high]
    kinds = {
        kind: {name: [one for one in parts[name] if one.fact.kind == kind] for name in ("never", "once")}
        for kind in ("name", "place", "number")
    }
    return _means(parts), {kind: means for kind, of in kinds.items() if (means := _means(of))}


def _means(parts: dict[str, list[Asked]]) -> dict[str, Group]:
    groups = {}
    for name, part in parts.items():
        if part:
            nlls, tokens = [one.nll for one in part], sum(len(one.fact.answer) for one in part)
            error = statistics.stdev(nlls) / math.sqrt(len(part)) if len(part) > 1 else None
            exact = 100 * sum(one.exact for one in part) / len(part)
            groups[name] = Group(len(part), tokens, statistics.fmean(nlls), error, sum(nlls) / tokens, exact)
    return groups


def read_facts(directory: Path) -> dict[str, Any] | None:
    """How a run answered: its facts.json, else its report's; None if it was not asked."""
    return read_json(directory / FILE) or (read_report(directory) or {}).get("facts")


def is_asked(directory: Path) -> bool:
    """Whether a run that is finished was asked at the step that its report is of."""
    facts, report = read_facts(directory), read_report(directory)
    return facts is not None and report is not None and facts["step"] == report["step"]


def nats_saved(facts: Mapping[str, Any]) -> float | None:
    """What a token of answers costs fewer where training held their sentences more than once than where it never did; None without both.

    Of tokens, since answers that stand more often are shorter: a model that knows nothing has saved nothing.
    """
    groups = facts.get("groups", {})
    never, more = (groups.get(name, {}).get("nll_per_token") for name in ("never", "more often"))
    return None if never is None or more is None else never - more


def recall_markdown(found: Recall) -> str:
    """Tables: by how often and how long ago, by kind; and some of the questions."""
    f = found
    label = {"never": f"never ({f.held_out} split)", "once": "once", "more often": "more often"}
    rows = []
    for name, group in f.groups.items():
        low, _, rest = name.partition("-")
        high, _, unit = rest.partition(" ")
        text = label.get(name, f"- {name}")
        if unit == "steps ago":
            tokens = (f"{int(n) * f.batch_tokens:,}" for n in (low, high))
            text = f"- once, {name} ({' to '.join(tokens)} tokens)"
        rows.append([text, *_cells(group)])
    columns = ["facts", "nats an answer", "nats a token", "exact %"]
    text = f"## Recall of facts\n\n{f.asked:,} names, places and numbers, each asked as the rest of its sentence, after step {f.step:,} (± standard error).\n\n"
    text += markdown_table(["read in training", *columns], rows)
    kinds = [[kind, label[name], *_cells(group)] for kind, of in f.kinds.items() for name, group in of.items()]
    text += "\n" + markdown_table(["kind", "read in training", *columns], kinds) + "\n"
    for one in f.examples:
        times = {0: "never read", 1: "read once"}.get(one["times"], f"read {one['times']} times")
        said = "" if one["likeliest"] == one["answer"] else f", the model’s: {one['likeliest']}"
        text += f"- {one['sentence']} **{one['answer']}** ({times}; {one['nll']:.1f} nats{said})\n"
    return text


def _cells(group: Group) -> list[str]:
    error = "" if group.nll_error is None else f" ± {group.nll_error:.2f}"
    return [f"{group.facts:,}", f"{group.nll:.2f}{error}", f"{group.nll_per_token:.3f}", f"{group.exact:.1f}"]
