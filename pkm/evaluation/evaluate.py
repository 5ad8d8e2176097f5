"""What a model is worth: perplexity, memory usage and KL on a split, and words per second (paper 4.2)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pkm.config.schema import Config
from pkm.corpus.batches import IGNORE, evaluation_batches, evaluation_windows
from pkm.corpus.store import MOSES, UNKNOWN_WORDS, Corpus, OtherVocab, Split
from pkm.corpus.unknown import WARNS, percent
from pkm.device import Compute
from pkm.distributed import dist
from pkm.errors import UserError
from pkm.format import LARGEST_PERPLEXITY
from pkm.memory.usage import Usage, UsageMeter
from pkm.model.transformer import MemoryName, Transformer

WARM_UP_BATCHES = 3


@dataclass(frozen=True)
class Evaluation:
    """One pass over a split. Losses in nats; `memories` maps a memory's name (its layer, counted from 1) to its usage."""

    split: str
    documents: int
    context: int
    stride: int
    tokens: int
    words: int
    loss: float
    perplexity: float | None
    """exp(loss); None beyond 1e300."""
    word_loss: float | None
    """Per word; None where words are not known."""
    word_perplexity: float | None
    """exp(word_loss); None beyond 1e300, or where words are not known."""
    bits_per_byte: float | None
    memories: dict[MemoryName, Usage]
    unknown_share: float = 0.0
    """Of the scored tokens, those that are <unk>."""
    bits_per_byte_withheld: str | None = None
    """Why bits_per_byte is None."""
    experts: dict[MemoryName, Usage] = field(default_factory=dict)
    """Of each layer with a mixture of experts (counted from 1) the use of its experts, as of a memory's slots."""
    words_are: str = MOSES
    """What is counted as a word."""

    def record(self) -> dict[str, Any]:
        """As JSON-ready values."""
        used: dict[str, dict[Any, Usage]] = {"memories": self.memories, "experts": self.experts}
        return asdict(self) | {
            name: {str(layer): asdict(usage) for layer, usage in of.items()} for name, of in used.items()
        }


@dataclass(frozen=True)
class Speed:
    """Inference: forward passes over the test split after a warm-up, nothing recorded."""

    words_per_second: float
    tokens_per_second: float
    device: str
    precision: str
    batch_windows: int
    context: int


def evaluate(
    model: Transformer, corpus: Corpus, split: Split, config: Config, compute: Compute, documents: int | None = None,
    between: Callable[[], None] = lambda: None,
) -> Evaluation:  # fmt: skip
    """Score the first `documents` of `split` (None = all) in windows of the context; `between` is called before each batch.

    perplexity per BPE token is exp(nll / tokens), per word exp(nll / words), where nll is the total over all tokens but
    the first of the split; bits per byte is given for a whole split only, and only where next to nothing of it is <unk>,
    which costs little to guess and tells nothing of the bytes it stands for. Usage and KL are those of the slots read for
    the tokens scored here, over the whole pass, in float64 (paper 4.2).
    """
    other, word_ends = isinstance(corpus.vocab, OtherVocab), _word_ends(corpus)
    usage = UsageMeters(model)
    losses: list[Tensor] = []
    tokens = words = unknown = 0
    with inference(model), recording(model):
        for inputs, targets, *apart in _batches(split, config, documents):
            between()
            with compute.autocast():
                losses.append(_forward(model, compute, inputs, targets, *apart))
            scored = targets != IGNORE
            tokens += int(scored.sum())
            words += int(word_ends[targets[scored]].sum())
            unknown += int((targets[scored] == corpus.unknown_id).sum())
            # Never padding: what follows it is not scored.
            usage.update(_sent(scored.ravel(), compute.device))
    # Asked for once, at the end, that nobody waits for the device before.
    nll = sum(torch.stack(losses).tolist()) if losses else 0.0
    nll, tokens, words, unknown = _sum_over_ranks(nll, tokens, words, unknown)
    usage.sum_over_ranks()
    if not math.isfinite(nll):
        fix = "use precision fp32 or bf16; if it stays so, go back to an earlier checkpoint"
        raise UserError(f"the model's loss on the {split.name} split is {nll}", fix=fix)
    whole = documents is None or documents >= split.documents
    if whole:
        words = split.words  # Moses's own count: an unknown character within a word ends no word
    elif other:
        words = split.words_before(documents or 0)
    word_loss = None if corpus.words_are == UNKNOWN_WORDS else nll / max(words, 1)
    withheld = None
    if not whole:
        withheld = f"{documents} of {split.documents} documents are scored"
    elif not split.bytes:
        withheld = "the text came as ids" if word_loss is None else "the split holds no bytes"
    elif unknown >= WARNS * tokens:
        withheld = f"{percent(unknown / tokens)} of the scored tokens are <unk>, which stand for bytes nobody predicted"
    return Evaluation(
        **conditions(config, split, documents),
        tokens=tokens,
        words=words,
        loss=nll / tokens,
        perplexity=_exp(nll / tokens),
        word_loss=word_loss,
        word_perplexity=None if word_loss is None else _exp(word_loss),
        bits_per_byte=nll / math.log(2) / split.bytes if withheld is None else None,
        memories={layer: meter.result() for layer, meter in usage.memories.items()},
        unknown_share=unknown / tokens,
        bits_per_byte_withheld=withheld,
        experts={layer: meter.result() for layer, meter in usage.experts.items()},
        words_are=corpus.words_are,
    )


def _word_ends(corpus: Corpus) -> np.ndarray:
    """Whether an id ends a word, by id: (V,) bool, all false where ids do not tell."""
    vocab = corpus.vocab
    return np.zeros(vocab.size, bool) if isinstance(vocab, OtherVocab) else vocab.word_ends


def conditions(config: Config, split: Split, documents: int | None) -> dict[str, Any]:
    """What a loss depends on besides the model and the corpus: only losses under the same are to be compared."""
    context = config.corpus.context
    return {
        "split": split.name,
        "documents": min(documents or split.documents, split.documents),
        "context": context,
        "stride": config.evaluate.stride or context,
    }


def scored_tokens(config: Config, corpus: Corpus) -> int:
    """Tokens that pass through the model in an evaluation of the validation split, windows that overlap counted whole."""
    if corpus.valid is None:
        return 0
    at = conditions(config, corpus.valid, config.evaluate.documents)
    return corpus.valid.document_start(at["documents"]) * at["context"] // at["stride"]


def measure_speed(
    model: Transformer, corpus: Corpus, split: Split, config: Config, compute: Compute, seconds: float = 10.0
) -> Speed:
    """Words and BPE tokens per second at inference, over `split`, for at most about `seconds` after a warm-up."""
    other, word_ends = isinstance(corpus.vocab, OtherVocab), _word_ends(corpus)
    with inference(model), compute.autocast():
        for batch in islice(_batches(split, config, None), WARM_UP_BATCHES):
            compute.wait()
            started = time.perf_counter()
            _forward(model, compute, *batch)
            compute.wait()
            one = time.perf_counter() - started
        count = dist.broadcast_object(max(1, int(seconds / one)))  # every rank must do as many
        tokens = words = 0
        started = time.perf_counter()
        for inputs, targets, *apart in islice(_batches(split, config, None), count):
            _forward(model, compute, inputs, targets, *apart)
            scored = targets != IGNORE
            tokens += int(scored.sum())
            words += int(word_ends[targets[scored]].sum())
        compute.wait()
        elapsed = max(dist.gather_objects(time.perf_counter() - started))
    _, tokens, words, _ = _sum_over_ranks(0.0, tokens, words, 0)
    return Speed(
        words_per_second=(tokens * split.words / split.tokens if other else words) / elapsed,
        tokens_per_second=tokens / elapsed,
        device=compute.hardware,
        precision=compute.precision,
        batch_windows=len(inputs) * dist.world_size(),
        context=config.corpus.context,
    )


def _batches(split: Split, config: Config, documents: int | None) -> Iterator[tuple[Any, ...]]:
    """This rank's windows of every batch; all ranks get as many batches, and rows of padding where text runs out.

    Inputs, targets, which inputs are text and not padding; with `model.document_mask` the documents of the inputs besides.
    """
    context, stride = config.corpus.context, config.evaluate.stride
    total = split.document_start(split.documents if documents is None else min(documents, split.documents))
    windows = evaluation_windows(total, context, stride or context)
    each = -(-max(1, min(config.evaluate.batch, windows)) // dist.world_size())
    rows = slice(dist.rank() * each, (dist.rank() + 1) * each)
    together = each * dist.world_size()
    for number, (inputs, targets) in enumerate(evaluation_batches(split, context, together, stride, documents)):
        window = (number * together + np.arange(rows.start, rows.stop))[:, None]
        places = window * (stride or context) + np.arange(context)
        text = (window < windows) & (places < total)
        apart = (split.documents_at(places),) if config.model.document_mask else ()
        yield inputs[rows], targets[rows], text, *apart


def _sum_over_ranks(nll: float, *counts: int) -> tuple[float, int, int, int]:
    total = dist.all_reduce(torch.tensor([nll, *counts], dtype=torch.float64)).tolist()
    return total[0], int(total[1]), int(total[2]), int(total[3])


@contextmanager
def inference(model: Transformer) -> Iterator[None]:
    """Evaluation mode without gradients; training mode comes back as it was."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


@contextmanager
def recording(model: Transformer, active: bool = True) -> Iterator[None]:
    """Every memory keeps what it last read, and every mixture of experts what it chose, for a UsageMeter."""
    recorded: list[Any] = [*(memory for _, memory in model.memories()), *(experts for _, experts in model.experts())]
    for one in recorded:
        one.record = active
    try:
        yield
    finally:
        for one in recorded:
            one.record = False


class UsageMeters:
    """By layer, what each memory reads and each mixture of experts chooses, while `recording`."""

    def __init__(self, model: Transformer):
        self.model, device = model, next(model.parameters()).device
        self.memories = {name: UsageMeter(memory.slots, memory.heads, device) for name, memory in model.memories()}
        self.experts: dict[MemoryName, UsageMeter] = {
            layer: UsageMeter(experts.count, 1, device) for layer, experts in model.experts()
        }

    def update(self, counts: Tensor | None = None) -> None:
        """Take in the last forward pass; counts (N,) bool: which of its tokens, None = those that are not padding."""
        for meters, parts in ((self.memories, self.model.memories()), (self.experts, self.model.experts())):
            for name, part in parts:
                indices, weights, real = part.selection
                recall = getattr(part, "recall", None)
                meters[name].update(indices, weights, real if counts is None else counts, recall)

    def sum_over_ranks(self) -> None:
        """As a meter's."""
        for meter in (*self.memories.values(), *self.experts.values()):
            meter.sum_over_ranks()


def _forward(model: Transformer, compute: Compute, *batch: Any) -> Tensor:
    """The summed loss of a batch of NumPy arrays; text ends within it, and what follows is padding."""
    ids, wanted, text, *documents = (_sent(part, compute.device) for part in batch)
    return model(ids, wanted, text, *documents)


def _sent(part: np.ndarray, device: torch.device) -> Tensor:
    """On the device; a GPU fetches it while this goes on."""
    found = torch.from_numpy(part)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)


def _exp(x: float) -> float | None:
    return math.exp(x) if x < math.log(LARGEST_PERPLEXITY) else None
