import itertools
import json

import pytest
import torch

from pkm import device
from pkm.checkpoint.checkpoints import Checkpoints
from pkm.corpus.store import open_corpus
from pkm.errors import UserError
from pkm.evaluation.evaluate import evaluate
from pkm.inference.trained import load_trained
from pkm.model.transformer import Transformer
from pkm.run.metrics import read
from pkm.run.stop import REASONS, StopFlag
from pkm.train import loop
from pkm.train import optim as its_optim
from pkm.train import step as its_step
from pkm.train.optim import LossScale, Optimizers
from tests.support.checkpoints import rewritten
from tests.support.fork import on_ranks
from tests.support.tiny import everything, random_corpus, tiny_config


@pytest.fixture
def nan_at(monkeypatch):
    """Makes the loss of the given forward passes in training (from 1) NaN, after BatchNorm saw the batch.

    gradient    that of every token too; else they stay what they were, as where one token alone is NaN
    """

    def inject(passes, gradient=True):
        forward, count = Transformer.forward, iter(range(1, 10**6))

        def poisoned(self, *batch):
            loss = forward(self, *batch)
            if not self.training or next(count) not in passes:
                return loss
            return loss * float("nan") if gradient else loss + float("nan")

        monkeypatch.setattr(Transformer, "forward", poisoned)

    return inject


@pytest.fixture
def fp16(monkeypatch):
    """Autocast to fp16 and loss scaling where there is no GPU: a CPU computes it as well, only slowly."""

    def begin(scale):
        monkeypatch.setattr(device, "pick_precision", lambda config, device: "fp16")
        monkeypatch.setattr(LossScale, "INITIAL", scale)

    return begin


def losses(directory):
    return [r["loss"] for r in read(directory / "metrics.jsonl") if r["kind"] == "train"]


def test_a_model_learns(train):
    _, _, _, directory = train(optim={"steps": 60})
    assert losses(directory)[-1] < 0.7 * losses(directory)[0]


def test_metrics_carry_what_a_researcher_looks_for(train):
    _, _, _, directory = train()
    records = list(read(directory / "metrics.jsonl"))
    last = [r for r in records if r["kind"] == "train"][-1]
    groups = {"dense", "embeddings", "addressing", "values"}
    assert last["step"] == 20 and set(last["lr"]) == set(last["update_size"]) == groups
    assert set(last["gradient_norm"]) == {"dense", "values"}
    assert all(0 < size < 1 for size in last["update_size"].values()) and last["memories"]["2"]["output_share"] > 0
    assert last["tokens_per_second"] > 0 and last["peak_memory_bytes"] > 0 and last["skipped"] == 0
    assert 0 < last["memories"]["2"]["usage"] <= 100 and last["memories"]["2"]["kl"] >= 0
    valid = [r for r in records if r["kind"] == "valid"]
    assert [r["step"] for r in valid] == [10, 20] and valid[0]["perplexity"] > valid[1]["perplexity"]
    # 60 documents of 40 tokens are 299 windows of 8 and a target more; a step takes 8 of them.
    assert last["tokens"] == 20 * 64 and last["epochs"] == pytest.approx(20 * 8 / 299)


def test_each_evaluation_writes_a_sample_that_no_step_depends_on(train, tiny_corpus_path):
    corpus = open_corpus(tiny_corpus_path)
    model, optim, _, directory = train(name="a")
    samples = [r["sample"] for r in read(directory / "metrics.jsonl") if r["kind"] == "valid"]
    assert len(samples) == 2 and all(sample["text"].strip() for sample in samples)
    given = corpus.valid.read(0, 4)  # half a context, without the word that it cuts
    while not corpus.vocab.word_ends[given[-1]]:
        given = given[:-1]
    assert {sample["prompt"] for sample in samples} == {corpus.encoder().decode(given)}
    silent, its_optim, _, directory = train(name="b", evaluate={"sample": 0})
    assert not [r for r in read(directory / "metrics.jsonl") if "sample" in r]
    ours, others = everything(model, optim), everything(silent, its_optim)
    assert all(torch.equal(ours[name], others[name]) for name in ours)


@pytest.mark.parametrize("update", ["dense", "sparse", "in_backward"])
def test_slots_that_training_never_read_are_told_also_after_resuming(train, update):
    def shares(steps):
        *_, directory = train(
            memory={"sub_keys": 16, "knn": 2}, optim={"steps": steps, "values": {"update": update}, "dense": {"lr": 1e-5}},
            evaluate={"every_steps": 1}, checkpoint={"every_steps": 1}, model={"dropout": 0.0},
        )  # fmt: skip
        valid = [r for r in read(directory / "metrics.jsonl") if r["kind"] == "valid"]
        return [r["memories"]["2"]["never_read"] for r in valid]

    read_by_step = set()
    take = Optimizers.step
    moved = []

    def watched(self, step, *others):
        before = next(iter(self.tables.values())).weight.detach().clone()
        take(self, step, *others)
        after = next(iter(self.tables.values())).weight.detach()
        read_by_step.update(torch.where((before != after).any(1))[0].tolist())
        moved.append(100 * (1 - len(read_by_step) / 256))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Optimizers, "step", watched)
        first = shares(2)
        both = shares(4)
    assert both[:2] == first and 0 < both[3] < both[0] < 100
    if update != "in_backward":  # there the rows move before the step
        assert both == pytest.approx(moved)


@pytest.mark.parametrize("gradient", [True, False], ids=["nan gradients", "nan loss alone"])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("update", ["dense", "sparse", "in_backward"])
def test_a_skipped_step_leaves_no_trace_but_its_number(train, nan_at, update, kernels, gradient):
    settings = {"name": "four", "memory": {"kernels": kernels}}
    model, optim, _, _ = train(**settings, optim={"steps": 4, "values": {"update": update}})
    before = {name: t.clone() for name, t in everything(model, optim).items()}
    nan_at({5 - 4}, gradient)  # the one step that the longer run still has to do
    model, optim, state, _ = train(**settings, optim={"steps": 5, "values": {"update": update}})
    assert (state.step, state.skipped, state.skipped_in_a_row) == (5, 1, 1)
    after = everything(model, optim)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_run_with_a_weight_that_is_not_finite_ends_and_its_good_checkpoints_stay(train, tmp_path, monkeypatch):
    update = Optimizers.step

    def breaks_a_weight(self, step, *of_step):
        update(self, step, *of_step)
        if step == 8:
            self.values.tables[0].weight.data[0] = float("inf")

    monkeypatch.setattr(Optimizers, "step", breaks_a_weight)
    with pytest.raises(UserError, match=r"step 8: .* not finite in model.blocks.1.memory.values.weight"):
        train(checkpoint={"every_steps": 2, "keep": 1}, evaluate={"every_steps": 100})
    checkpoints = Checkpoints(tmp_path / "runs" / "tiny" / "checkpoints", keep=1)
    assert checkpoints.steps() == [6]


def test_fp16_with_a_scaled_loss_learns_as_fp32_does(train, fp16):
    *_, exact = train(name="fp32", log={"every_steps": 1})
    fp16(scale=2.0**10)
    *_, directory = train(name="fp16", log={"every_steps": 1})
    assert losses(directory) == pytest.approx(losses(exact), rel=2e-2)


def test_a_loss_scale_too_large_skips_steps_until_it_fits_and_they_are_counted(train, fp16):
    fp16(scale=2.0**40)
    model, _, state, directory = train(optim={"steps": 60, "max_consecutive_skips": 50}, log={"every_steps": 1})
    assert state.skipped > 10 and state.skipped_in_a_row < state.skipped
    assert state.loss_scale["value"] == 2.0 ** (40 - state.skipped)
    skipped = [r["skipped"] for r in read(directory / "metrics.jsonl") if r["kind"] == "train"]
    assert skipped[0] == 1 and skipped[-1] == state.skipped
    assert all(p.isfinite().all() for p in model.parameters())


def test_the_loss_scale_is_kept_in_checkpoints_and_the_resumed_run_ends_with_the_same_bits(train, fp16):
    fp16(scale=2.0**22)
    model, optim, state, _ = train(name="whole", optim={"steps": 15})
    train(name="parts", optim={"steps": 7})
    fp16(scale=1.0)  # of a run that begins
    again, its_optim, its_state, _ = train(name="parts", optim={"steps": 15})
    assert state.skipped and state == its_state
    ours, theirs = everything(model, optim), everything(again, its_optim)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_too_many_skipped_steps_stop_the_run_and_leave_the_last_good_checkpoint(train, nan_at, tmp_path):
    nan_at(set(range(8, 100)))
    with pytest.raises(UserError, match=r"3 steps in a row.*not finite"):
        train(optim={"max_consecutive_skips": 3})
    directory = tmp_path / "runs" / "tiny"
    assert Checkpoints(directory / "checkpoints", keep=3).load("latest").step == 5
    assert json.loads((directory / "status.json").read_text())["state"] == "failed"


def test_a_run_in_which_no_step_was_taken_fails_and_a_report_of_it_is_never_written(train, nan_at, tmp_path):
    nan_at(set(range(1, 100)))
    with pytest.raises(
        UserError, match=r"step 4: all 4 steps of the run had a loss .* not finite; nothing was learned"
    ):
        train(optim={"steps": 4})
    directory = tmp_path / "runs" / "tiny"
    assert json.loads((directory / "status.json").read_text())["state"] == "failed"
    assert not Checkpoints(directory / "checkpoints", keep=3).steps()


def test_a_nan_between_good_steps_does_not_spoil_training(train, nan_at):
    nan_at({3, 7})
    model, _, state, _ = train()
    assert state.skipped == 2 and state.skipped_in_a_row == 0
    assert all(p.isfinite().all() for p in model.parameters())


def test_accumulation_takes_the_same_steps_as_one_big_batch(train):
    # LayerNorm on the query: BatchNorm's statistics are those of a micro-batch.
    memory = {"query": {"norm": "layer"}}
    curves = []
    for name, micro_batch in (("whole", None), ("parts", 3)):
        _, _, _, directory = train(
            name=name, memory=memory, optim={"steps": 8, "micro_batch": micro_batch}, log={"every_steps": 1}
        )
        curves.append(losses(directory))
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)


@pytest.mark.parametrize("change", [{"documents": None}, {"stride": 1}])
def test_best_starts_anew_when_a_resumed_run_validates_on_something_else(train, capsys, change):
    first = {"documents": 1, "every_steps": 5}
    _, _, state, directory = train(optim={"steps": 10}, evaluate=first)
    # As if what was measured then could not be reached any more.
    _set_state(directory, best_loss=0.01)
    old = load_trained(directory, "best").step
    _, _, state, _ = train(optim={"steps": 12}, evaluate=first)
    assert state.best_loss == 0.01 and load_trained(directory, "best").step == old
    capsys.readouterr()
    _, _, state, _ = train(optim={"steps": 14}, evaluate=first | change)
    said = capsys.readouterr().out
    assert "validation measures something else now" in said and ("documents 1 -> 4" in said or "stride 8 -> 1" in said)
    valid = [r for r in read(directory / "metrics.jsonl") if r["kind"] == "valid"]
    assert state.best_loss == valid[-1]["loss"] > 0.01 and load_trained(directory, "best").step == 14
    train(optim={"steps": 15}, evaluate=first | change)
    assert "something else" not in capsys.readouterr().out


def test_the_best_of_before_stays_until_the_next_validation(train):
    _, _, _, directory = train(optim={"steps": 10}, evaluate={"documents": 1})
    train(optim={"steps": 10}, evaluate={"documents": None}, checkpoint={"keep": 1})
    assert load_trained(directory, "best").step == 10


@pytest.mark.parametrize("documents, kept", [(4, True), (1, False)])
def test_a_checkpoint_that_does_not_say_what_its_best_loss_was_measured_on_loads(train, documents, kept, capsys):
    _, _, _, directory = train(optim={"steps": 10}, evaluate={"documents": 4})
    _set_state(directory, best_on=None)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    old = [{key: value for key, value in r.items() if key not in ("context", "stride")} for r in lines]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in old))
    capsys.readouterr()
    _, _, state, _ = train(optim={"steps": 11}, evaluate={"documents": documents, "every_steps": 100})
    assert state.step == 11 and ("something else" not in capsys.readouterr().out) == kept


def test_what_a_checkpoint_says_is_json_also_before_the_first_validation(train):
    _, _, _, directory = train(optim={"steps": 5}, evaluate={"every_steps": 100})

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    for manifest in directory.glob("checkpoints/*/manifest.json"):
        json.loads(manifest.read_text(), parse_constant=refuse)
    _, _, state, _ = train(optim={"steps": 6}, evaluate={"every_steps": 100})
    assert state.step == 6


def _set_state(directory, **values):
    """Change what the checkpoints say of the run; None takes it away."""
    for path in directory.glob("checkpoints/step-*"):
        record = json.loads((path / "manifest.json").read_text())["record"]
        record["state"] |= values
        record["state"] = {key: value for key, value in record["state"].items() if value is not None}
        rewritten(path, record=record)


def test_best_is_the_checkpoint_with_the_lowest_validation_loss(train):
    _, _, state, directory = train(optim={"steps": 40, "dense": {"lr": 0.05}})
    valid = {r["step"]: r["loss"] for r in read(directory / "metrics.jsonl") if r["kind"] == "valid"}
    best = load_trained(directory, "best")
    assert valid[best.step] == min(valid.values()) == state.best_loss
    again = evaluate(
        best.model, best.corpus, best.corpus.valid, best.config, best.compute, best.config.evaluate.documents
    )
    assert again.loss == pytest.approx(state.best_loss, rel=1e-6)


def test_another_corpus_than_the_run_began_with_is_refused(train, tmp_path, tiny_corpus_path):
    _, _, _, directory = train()
    other = random_corpus(tmp_path / "other", seed=5)
    with pytest.raises(UserError, match="another corpus"):
        load_trained(directory, "best", (f"corpus.path={json.dumps(str(other))}",))


def test_the_largest_seed_trains(train):
    assert train(seed=2**63 - 1, optim={"steps": 2})[2].step == 2


def test_a_dense_model_trains_without_a_values_group(train):
    _, optim, _, directory = train(memory=None, optim={"steps": 3})
    assert optim.values is None
    assert (directory / "metrics.jsonl").read_text().count('"memories": {}') >= 1


def test_a_run_that_recomputes_its_activations_learns_the_same(train):
    """BatchNorm's statistics included: backward's second forward pass must not count the batch twice."""
    plain, *_ = train(name="plain", optim={"steps": 5})
    again, *_ = train(name="again", optim={"steps": 5}, parallel={"activation_checkpointing": True})
    torch.testing.assert_close(plain.state_dict(), again.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("steps", [8, 12], ids=["ended without a word", "stopped"])
def test_a_run_whose_checkpoints_are_out_of_sight_is_refused_and_keeps_what_it_measured(train, steps):
    *_, directory = train(optim={"steps": 8}, checkpoint={"every_steps": 4})
    if steps == 12:  # as earlier versions wrote it
        (directory / "status.json").write_text('{"state": "stopped", "step": 8, "reason": "SIGTERM"}')
    measured = (directory / "metrics.jsonl").read_bytes()
    (directory / "checkpoints").rename(directory.parent / "elsewhere")
    for _ in range(2):  # that it failed is no reason to begin again either
        with pytest.raises(UserError, match=r"no checkpoint, and status.json says that one of step 8"):
            train(optim={"steps": steps}, checkpoint={"every_steps": 4})
        assert json.loads((directory / "status.json").read_text())["state"] == "failed"
        assert (directory / "metrics.jsonl").read_bytes() == measured
    (directory.parent / "elsewhere").rename(directory / "checkpoints")
    assert train(optim={"steps": steps}, checkpoint={"every_steps": 4})[2].step == steps


def test_a_run_that_failed_before_its_first_checkpoint_begins_again(train, monkeypatch):
    monkeypatch.setattr(Checkpoints, "save", lambda *args, **also: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(optim={"steps": 8}, checkpoint={"every_steps": 4})
    monkeypatch.undo()
    assert train(optim={"steps": 8}, checkpoint={"every_steps": 4})[2].step == 8


def test_a_time_limit_saves_and_stops(train):
    _, _, state, directory = train(max_minutes=1e-4, optim={"steps": 2000})
    status = json.loads((directory / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("stopped", "time limit")
    assert Checkpoints(directory / "checkpoints", keep=3).load("latest").step == state.step < 2000


def test_profiled_steps_leave_a_trace_each(train):
    *_, directory = train(optim={"steps": 4}, profile={"from_step": 2, "steps": 2})
    assert {p.name for p in directory.glob("profile-*")} == {f"profile-000000{n}-rank0.json" for n in (2, 3)}


@pytest.mark.parametrize("values", [{"update": "in_backward"}, {"dtype": "bf16+master"}])
def test_ways_to_keep_and_move_the_values_learn_as_the_plain_one(train, values):
    curves = []
    for name, changed in (("plain", {}), ("changed", values)):
        *_, directory = train(name=name, optim={"values": changed}, log={"every_steps": 1})
        curves.append(losses(directory))
    assert curves[0] == pytest.approx(curves[1], rel=1e-5 if "update" in values else 2e-2)
    assert curves[0][-1] < curves[0][0]


@pytest.mark.parametrize(
    "values", [{"update": "in_backward"}, {"dtype": "bf16", "state_dtype": "bf16"}, {"dtype": "bf16+master"}]
)
def test_values_resume_bit_for_bit_however_they_are_kept(train, values):
    model, optim, *_ = train(name="whole", optim={"steps": 9, "values": values})
    train(name="parts", optim={"steps": 4, "values": values})
    again, its_optim, *_ = train(name="parts", optim={"steps": 9, "values": values})
    ours, theirs = everything(model, optim), everything(again, its_optim)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("kept", ["bf16", "bf16+master"])
def test_a_model_whose_values_are_kept_in_bf16_is_found_again_as_it_is(train, kept):
    model, *_, directory = train(optim={"steps": 4, "values": {"dtype": kept}})
    found = load_trained(directory, "latest").model
    theirs = found.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in model.state_dict().items())
    assert found.memory(2).values.weight.dtype is torch.bfloat16


def test_values_are_kept_in_bf16_with_an_fp32_copy_on_a_gpu_that_computes_in_half_precision():
    kept = {}
    for kind, precision in (("cuda", "bf16"), ("cuda", "fp16"), ("cuda", "fp32"), ("cuda", "tf32"), ("cpu", "bf16")):
        compute = device.Compute(torch.device(kind), precision)
        kept[kind, precision] = device.settled_optim(tiny_config(), compute).values.dtype
    assert [where for where, dtype in kept.items() if dtype == "bf16+master"] == [("cuda", "bf16"), ("cuda", "fp16")]
    assert set(kept.values()) == {"bf16+master", "fp32"}
    half = device.Compute(torch.device("cuda"), "bf16")
    assert device.settled_optim(tiny_config(optim={"values": {"update": "dense"}}), half).values.dtype == "fp32"
    assert device.settled_optim(tiny_config(optim={"values": {"dtype": "bf16"}}), half).values.dtype == "bf16"


def test_a_run_that_began_with_fp32_values_goes_on_where_auto_is_that(train):
    train(name="kept", optim={"steps": 3, "values": {"dtype": "fp32"}})
    _, _, state, _ = train(name="kept", optim={"steps": 4})
    assert state.step == 4
    with pytest.raises(UserError, match="does not fit this model"):
        train(name="kept", optim={"steps": 5, "values": {"dtype": "bf16"}})


@pytest.mark.parametrize(
    "optim",
    [
        {"dense": {"schedule": "wsd", "floor": 0.1, "cooldown": 0.5, "weight_decay": 0.1}, "z_loss": 1e-2},
        {"matrices": {"optimizer": "muon", "lr": "2x", "weight_decay": 0.1}, "dense": {"schedule": "constant"}},
    ],
)
def test_dense_parameters_resume_bit_for_bit_whatever_updates_them(train, optim):
    model, its_optim, _, directory = train(name="whole", optim={"steps": 9, **optim}, log={"every_steps": 1})
    pieces = {"name": "parts", "optim": {"steps": 9, **optim}}
    with pytest.MonkeyPatch.context() as stopped:
        stopped.setattr("pkm.run.stop.StopFlag.requested", lambda self, directory: "test")
        train(**pieces)
    again, other_optim, state, _ = train(**pieces)
    assert state.step == 9
    ours, theirs = everything(model, its_optim), everything(again, other_optim)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    last = [r for r in read(directory / "metrics.jsonl") if r["kind"] == "train"][-1]
    assert set(last["lr"]) == set(last["update_size"]) >= {"dense", *optim} - {"z_loss"}


def test_z_loss_pulls_the_denominator_towards_one_and_the_loss_that_is_told_is_without_it(train):
    found = {}
    for z in (0.0, 1.0):
        model, _, _, directory = train(name=f"z{z:g}", optim={"z_loss": z, "steps": 40}, log={"every_steps": 1})
        logits = model.eval().logits(model.hidden(torch.randint(14, 50, (4, 8))))
        found[z] = float(logits.detach().logsumexp(-1).square().mean()), losses(directory)[0]
    assert found[1.0][0] < 0.5 * found[0.0][0]
    assert found[1.0][1] == found[0.0][1]


def test_a_run_goes_on_in_the_precision_that_it_began_with_or_not_at_all(train, monkeypatch):
    train(name="auto", precision="auto", optim={"steps": 3})
    began = "bf16" if device.cpu_has_bf16() else "fp32"
    other = {"bf16": "fp32", "fp32": "bf16"}[began]
    monkeypatch.setattr(device, "cpu_has_bf16", lambda: other == "bf16")
    with pytest.raises(UserError, match=f"computed in {began} so far") as refused:
        train(name="auto", precision="auto", optim={"steps": 4})
    assert refused.value.fix == f"give precision={began} to go on as it began"
    with pytest.raises(UserError, match=f"computed in {began} so far"):
        train(name="auto", precision=other, optim={"steps": 4})
    # Neither was written down as the run's: that would refuse what the fix says.
    _, _, state, _ = train(name="auto", precision=began, optim={"steps": 4})
    assert state.step == 4
    monkeypatch.setattr(device, "cpu_has_bf16", lambda: began == "bf16")
    assert train(name="auto", precision="auto", optim={"steps": 5})[2].step == 5


def test_gpus_tell_each_other_to_stop_with_the_loss_and_stop_at_the_same_step(train):
    def stopped(rank):
        calls = itertools.count(1)
        with pytest.MonkeyPatch.context() as patched:
            for module in (its_optim, its_step, loop):  # numbers that one has to wait for, as those of a GPU
                patched.setattr(module, "is_known", lambda number: isinstance(number, float))
            patched.setattr(StopFlag, "requested", lambda self, directory: pytest.fail("one more message"))
            asked = REASONS.index("SIGUSR1")
            patched.setattr(StopFlag, "position", lambda self, _: asked if next(calls) >= 3 and rank == 1 else 0)
            *_, state, directory = train(optim={"steps": 9}, log={"every_steps": 100})
        return state.step, directory

    # Told with the third step's loss, which is read after the fourth.
    (one, directory), (other, _) = on_ranks(2, stopped)
    assert one == other == 4
    assert json.loads((directory / "status.json").read_text())["reason"] == "SIGUSR1"
