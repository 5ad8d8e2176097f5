"""The state of a run beside its tensors: saved in each checkpoint, restored from the newest."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from pkm.corpus.store import Corpus
from pkm.device import Compute
from pkm.distributed import dist
from pkm.errors import UserError
from pkm.evaluation.evaluate import conditions
from pkm.model.transformer import Transformer, column_sharded
from pkm.run.metrics import read
from pkm.run.run import Run
from pkm.train.optim import Optimizers


@dataclass
class State:
    """What resuming needs beside the tensors of the model and the optimizers."""

    step: int = 0
    """Updates done, skipped ones included."""
    skipped: int = 0
    """Steps skipped so far because loss or gradient was not finite."""
    skipped_in_a_row: int = 0
    best_loss: float = math.inf
    """Lowest validation loss so far, nats per token; infinite before the first."""
    best_on: dict[str, Any] = field(default_factory=dict)
    """What it was measured on (pkm.evaluation.evaluate.conditions): a loss on anything else is not compared with it."""
    loss_scale: dict[str, float] = field(default_factory=dict)

    def count(self, updated: bool, loss_scale: dict[str, float]) -> None:
        """A step is known to have been an update, or skipped."""
        self.loss_scale = loss_scale
        self.skipped += not updated
        self.skipped_in_a_row = 0 if updated else self.skipped_in_a_row + 1

    def record(self) -> dict[str, Any]:
        """As JSON, which knows no infinity."""
        return asdict(self) | {"best_loss": self.best_loss if math.isfinite(self.best_loss) else None}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> State:
        """Of this version or an earlier one, which did not say what the best loss was measured on."""
        return cls(**record | {"best_loss": math.inf if record["best_loss"] is None else record["best_loss"]})


def restore(run: Run, compute: Compute, model: Transformer, optim: Optimizers, corpus: Corpus) -> State:
    """Load the newest checkpoint that verifies into model and optimizers; the state of step 0 if there is none yet.

    UserError if there were checkpoints once and none is found now: beginning again would write over what they led to.
    """
    loaded = run.checkpoints.newest()
    if loaded is None:
        run.refuse_to_begin_again()
        with dist.raise_on_all_ranks():
            run.metrics.cut(0)
        state = State()
        compare_with_its_like(run, corpus, state)
        return state
    if "imported" in loaded.record:
        what = f"this run was imported (scripts/import.py --from {loaded.record['imported']}): it has weights, and nothing to go on with"
        fix = f"start a run of another name from it: init_from={run.directory}"
        raise dist.raised_by_rank_0(UserError(what, str(run.directory), fix))
    if loaded.record["corpus"] != corpus.fingerprint:
        what = f"the run began on another corpus ({loaded.record['corpus'][:12]}) than this one ({corpus.fingerprint[:12]})"
        fix = "point corpus.path at the corpus it began with, or start another run with another name"
        raise dist.raised_by_rank_0(UserError(what, str(corpus.path), fix))
    refuse_another_precision(compute, loaded.record)
    everything = state_tensors(model, optim)
    with dist.raise_on_all_ranks():
        loaded.copy_into(everything, column_sharded(model, everything))
        optim.sync_step_count()
        run.metrics.cut(loaded.step)
        run.keep_settings()
    state = State.from_record(loaded.record["state"])
    compare_with_its_like(run, corpus, state)
    return state


def refuse_another_precision(compute: Compute, record: dict[str, Any]) -> None:
    """UserError if the run computed in another precision so far: `auto` may be another one on this machine or in this version."""
    # Checkpoints did not say so while `auto` was fp32 on every CPU; what it was on a GPU they do not tell.
    then = record.get("precision", "fp32" if compute.device.type == "cpu" else compute.precision)
    if then != compute.precision:
        what = f"the run computed in {then} so far, and would go on in {compute.precision} here"
        raise dist.raised_by_rank_0(UserError(what, "precision", f"give precision={then} to go on as it began"))


def compare_with_its_like(run: Run, corpus: Corpus, state: State) -> None:
    """Start the best anew, and say so, if the validation from here on measures something else than the one before.

    The checkpoint that was the best stays until the next validation, whose checkpoint is the best of the new ones.
    """
    if corpus.valid is None:
        return
    now = conditions(run.config, corpus.valid, run.config.evaluate.documents)
    then = state.best_on
    if not then and math.isfinite(state.best_loss):
        # An earlier version's: its record of that validation says how many documents there were.
        found = [r for r in read(run.metrics.path) if r["kind"] == "valid" and r.get("loss") == state.best_loss]
        then = dist.broadcast_object({key: found[-1][key] for key in now if key in found[-1]} if found else {})
    changed = [f"{key} {then[key]} -> {now[key]}" for key in now if then.get(key, now[key]) != now[key]]
    state.best_on = now
    if changed:
        run.say(
            f"validation measures something else now ({', '.join(changed)}): the best loss so far, {state.best_loss:.4f}, "
            "is not compared with what comes, and the best checkpoint is that of the next validation or a later one"
        )
        state.best_loss = math.inf


def save(
    run: Run, compute: Compute, model: Transformer, optim: Optimizers, corpus: Corpus, state: State, best: bool
) -> None:
    """Write a checkpoint of everything that the next step depends on."""
    everything = state_tensors(model, optim)
    record = {"state": state.record(), "corpus": corpus.fingerprint, "precision": compute.precision}
    run.checkpoints.save(state.step, everything, record, best, column_sharded(model, everything))
    with dist.raise_on_all_ranks():
        run.note_checkpoint()  # in the background it is that of the save before


def state_tensors(model: Transformer, optim: Optimizers) -> dict[str, Tensor]:
    """All tensors that the next step depends on, themselves and not copies."""
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    return weights | {f"optim.{name}": tensor for name, tensor in optim.state_tensors().items()}
