"""EleutherAI's lm-evaluation-harness on a trained model: its tasks, by our scoring.

Importing this needs lm-eval (`pip install 'pkm[eval]'`) and makes the model known to the harness as `pkm`:

    model_args: run=runs/NAME, and maybe checkpoint=best|latest|STEP, corpus=prepared/NAME

A run is a run's directory or what scripts/export.py wrote. Its text is what the model was trained on: tokenized by Moses,
</s> for the end of a line; white space that Moses drops is not scored and not generated.
"""

from __future__ import annotations

import difflib
import json
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from pkm.config.schema import Config
from pkm.corpus.batches import IGNORE, PAD_ID, evaluation_batches
from pkm.device import Compute, configure_torch, decide
from pkm.errors import UserError
from pkm.evaluation.evaluate import inference
from pkm.format import markdown_table
from pkm.inference.export import WEIGHTS, load_exported
from pkm.inference.generate import Reader, pick
from pkm.inference.trained import load_trained
from pkm.model.transformer import Transformer
from pkm.text.encode import Encoder
from pkm.text.library import LibraryEncoder

GENERATED = 256
"""Tokens that are generated at most where a task does not say."""


class Text:
    """Ids as evaluation reads a split: one document."""

    name, documents = "text", 1

    def __init__(self, ids: Sequence[int]):
        self._ids = np.array(ids, np.int64)
        self.tokens = len(ids)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._ids[start:stop]


@register_model("pkm")
class HarnessModel(TemplateLM):
    """A trained model, as the harness asks it."""

    def __init__(
        self,
        run: str | Path,
        checkpoint: str | int = "best",
        corpus: str | Path | None = None,
        batch_size: str | int | None = None,
        device: str | None = None,
        max_batch_size: int | None = None,
    ):
        """batch_size: windows of one forward pass, None or "auto" = the run's evaluate.batch; UserError as load_trained."""
        super().__init__()
        # cuda:0 is what the harness's command asks for where its user asked for nothing.
        overrides = [f"device={'auto' if device in (None, 'cuda:0') else device}"]
        overrides += [f"corpus.path={json.dumps(str(corpus))}"] if corpus else []
        overrides += [f"evaluate.batch={batch_size}"] if batch_size and batch_size != "auto" else []
        found = open_model(Path(run), str(checkpoint), tuple(overrides))
        self.config, self.compute, self.model, self.encoder = found
        self.context = self.model.context

    @property
    def eot_token_id(self) -> int:
        return self.encoder.end_id

    @property
    def max_length(self) -> int:
        return self.context

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids; the last line goes on unless the text ends it."""
        ids = array("I")
        self.encoder.encode(string, ids)
        ends = string.rstrip(" ").endswith("\n")
        return ids.tolist() if ends or not ids else ids[:-1].tolist()

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Split where the text and its context begin to differ: pieces at the border may depend on what follows."""
        whole, before = (
            [self.encoder.end_id, *self.tok_encode(context + continuation)],
            [self.encoder.end_id, *self.tok_encode(context)],
        )
        same = next(
            (i for i, (a, b) in enumerate(zip(whole, before, strict=False)) if a != b), min(len(whole), len(before))
        )
        return whole[:same], whole[same:]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Of each continuation after its context and a </s> before it: its log-probability and whether it is the likeliest."""
        pairs = [request.args for request in requests]
        encoded = [(pair, *self._encode_pair(*pair)) for pair in pairs]
        return self._loglikelihood_tokens(encoded, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        windows = [(i, *w) for i, (_, c, t) in enumerate(requests) for w in scored_windows(c, t, self.context)]
        windows.sort(key=lambda window: -len(window[1]))
        totals, greedy = [0.0] * len(requests), [True] * len(requests)
        with inference(self.model):
            for first in range(0, len(windows), self.config.evaluate.batch):
                batch = windows[first : first + self.config.evaluate.batch]
                for (i, *_), (total, likeliest) in zip(batch, self._score([w[1:] for w in batch]), strict=True):
                    totals[i] += total
                    greedy[i] &= likeliest
        for (pair, *_), result in zip(requests, found := list(zip(totals, greedy, strict=True)), strict=True):
            self.cache_hook.add_partial("loglikelihood", pair, result)
        return found

    def _score(self, windows: Sequence[tuple[list[int], int]]) -> Iterator[tuple[float, bool]]:
        """Of windows of ids, each with how many of its last are scored."""
        ids = torch.full((len(windows), len(windows[0][0]) - 1), PAD_ID)
        for row, (text, _) in zip(ids, windows, strict=True):
            row[: len(text) - 1] = torch.tensor(text[:-1])
        inputs = ids.to(self.compute.device)
        with self.compute.autocast():
            hidden = self.model.hidden(inputs, inputs != PAD_ID)
            for i, (text, scored) in enumerate(windows):
                logits = self.model.logits(hidden[i, len(text) - 1 - scored : len(text) - 1]).float().cpu()
                wanted = torch.tensor(text[-scored:])
                total = -float(F.cross_entropy(logits, wanted, reduction="sum"))
                yield total, bool((logits.argmax(1) == wanted).all())

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, each after a </s>, in the windows in which we evaluate a split (evaluate.stride)."""
        found = []
        for request in requests:
            ids = [self.encoder.end_id, *self.tok_encode(request.args[0])]
            total = -self._nll(Text(ids)) if len(ids) > 1 else 0.0
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
            found.append(total)
        return found

    def _nll(self, text: Text) -> float:
        total, evaluate = 0.0, self.config.evaluate
        windows = min(evaluate.batch, -(-text.tokens // (evaluate.stride or self.context)))
        with inference(self.model):
            for arrays in evaluation_batches(text, self.context, windows, evaluate.stride):  # type: ignore[arg-type]
                inputs, targets = (torch.from_numpy(part).to(self.compute.device) for part in arrays)
                assert int((targets != IGNORE).sum())
                with self.compute.autocast():
                    total += float(self.model(inputs, targets, inputs != PAD_ID))
        return total

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """What follows each context, up to the first of the task's `until`; the likeliest unless it samples."""
        found = []
        for number, request in enumerate(requests):
            context, settings = request.args
            text = self._generated(context, settings, torch.Generator().manual_seed(number))
            self.cache_hook.add_partial("generate_until", request.args, text)
            found.append(text)
        return found

    def _generated(self, context: str, settings: dict[str, Any], rng: torch.Generator) -> str:
        until = settings.get("until") or []
        until = [until] if isinstance(until, str) else until
        temperature = settings.get("temperature") or 0.0 if settings.get("do_sample") else 0.0
        top_k, top_p = settings.get("top_k") or None, settings.get("top_p")
        prompt = [self.encoder.end_id, *self.tok_encode(context)]
        never = self.encoder.unsampled
        text, before = "", self.encoder.decode(prompt[1:])
        with inference(self.model):
            reader = Reader(self.model, torch.tensor([prompt]))
            for _ in range(settings.get("max_gen_toks", GENERATED)):
                with self.compute.autocast():
                    logits = reader.logits()
                logits[:, never] = -torch.inf
                reader.append(torch.tensor([[pick(logits[0], temperature, top_k, top_p, rng)]]))
                ids = reader.ids[0].tolist()
                whole = self.encoder.decode(ids[1:])
                text = whole[len(before) :] if whole.startswith(before) else self.encoder.decode(ids[len(prompt) :])
                ends = [text.index(end) for end in until if end and end in text]
                if ends:
                    return text[: min(ends)]
        return text


def scored_windows(context: list[int], text: list[int], size: int) -> Iterator[tuple[list[int], int]]:
    """Ids of at most size + 1, each with how many of its last are to be scored: all of `text` at once, or what is too long for it
    in halves of a window, each after half a window of what stands before it."""
    ids, step = context + text, len(text) if len(text) <= size else max(size // 2, 1)
    for first in range(len(context), len(ids), step or 1):
        end = min(first + step, len(ids))
        yield ids[max(0, end - size - 1) : end], end - first


def score_tasks(
    model: HarnessModel, tasks: Sequence[str], folder: Path | None, shots: int | None, limit: int | None
) -> dict[str, Any]:
    """The harness's results of tasks, by their names or those in `folder`; JSON-ready. UserError for what it does not know.

    shots    examples before each question; None = as each task has it
    limit    questions of each task; None = all
    """
    from datasets.exceptions import DatasetsError
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder) if folder else None)
    for name in tasks:
        if not manager.match_tasks([name]):
            near = difflib.get_close_matches(name, manager.all_tasks, 3, 0.6)
            fix = (
                f"did you mean {' or '.join(near)}?"
                if near
                else "`lm-eval ls tasks` lists them; --tasks-from adds a folder's"
            )
            raise UserError(f"lm-evaluation-harness has no task {name!r}", "--tasks", fix)
    try:
        found = simple_evaluate(
            model, tasks=list(tasks), task_manager=manager, num_fewshot=shots, limit=limit, log_samples=False
        )
    except (DatasetsError, OSError) as error:
        what = f"the data of a task could not be read: {error}"
        raise UserError(
            what, "--tasks", "the harness loads it from where the task's file says, or downloads it"
        ) from error
    assert found is not None
    kept = ("results", "groups", "versions", "n-shot", "higher_is_better", "n-samples")
    return {key: found[key] for key in kept if key in found}


def tasks_markdown(found: dict[str, Any]) -> str:
    """A table of tasks, metrics and their standard errors."""
    rows = []
    for task, values in found["results"].items():
        for key, value in values.items():
            metric, _, filtered = key.partition(",")
            if filtered and not metric.endswith("_stderr") and isinstance(value, int | float):
                error = values.get(f"{metric}_stderr,{filtered}")
                shown = f"{value:.4f}" + (f" ± {error:.4f}" if isinstance(error, int | float) else "")
                shots, count = (
                    found["n-shot"].get(task, ""),
                    found.get("n-samples", {}).get(task, {}).get("effective", ""),
                )
                rows.append(
                    [
                        values.get("alias", task),
                        str(shots),
                        str(count),
                        metric + (f" ({filtered})" if filtered != "none" else ""),
                        shown,
                    ]
                )
    return markdown_table(["task", "examples before it", "questions", "metric", "value ± standard error"], rows)


def open_model(
    run: Path, checkpoint: str, overrides: tuple[str, ...]
) -> tuple[Config, Compute, Transformer, Encoder | LibraryEncoder]:
    """Of a run's directory, or of what was exported; ready to be asked."""
    if (run / WEIGHTS).is_file():
        exported = load_exported(run, overrides)
        compute = decide(exported.config)
        config, model, encoder = exported.config, exported.model, exported.encoder
    else:
        trained = load_trained(run, checkpoint, overrides)
        compute, config, model, encoder = trained.compute, trained.config, trained.model, trained.corpus.encoder()
    configure_torch(config, compute)
    return config, compute, model.to(compute.device).eval(), encoder
