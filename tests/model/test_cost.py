"""Parameters, FLOPs and bytes against numbers worked out by hand, and against the model that is built."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.parallel import VOCABULARY as SENT_VOCABULARY
from benchmarks.parallel import measure
from pkm.config.schema import Config, load
from pkm.corpus.writer import write_manifest
from pkm.format import amount, size
from pkm.model import cost, summary
from pkm.model.cost import traffic
from pkm.text.vocab import Vocab
from tests.support.fork import on_ranks
from tests.support.tiny import tiny_config

REPOSITORY = Path(__file__).parents[2]
MINIMAL = "name: a\ncorpus: {path: p, context: 10}\noptim: {steps: 5, batch_tokens: 80}\nmodel: {layers: 2, dim: 8, heads: 2}\n"
MEMORY = "memory: {layers: [2], sub_keys: 5, heads: 3, knn: 2, query: {dim: 4}}\n"
VOCABULARY = 100


def config(tmp_path: Path, text: str, *overrides: str) -> Config:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return load(path, overrides).config


class TestParameters:
    def test_a_dense_model_by_hand(self, tmp_path: Path) -> None:
        found = cost.parameters(config(tmp_path, MINIMAL), VOCABULARY)
        assert found == cost.Parameters(
            tokens=800,  # 100 x 8
            positions=80,  # 10 x 8
            output_bias=100,
            attention=576,  # 2 blocks x (8 x 24 + 24 + 8 x 8 + 8 = 288)
            feed_forward=1104,  # 2 blocks x (8 x 32 + 32 + 32 x 8 + 8 = 552)
            norms=80,  # (1 + 2 x 2) x 16
            query=0,
            keys=0,
            values=0,
        )
        assert (found.total, found.dense) == (2740, 2740)

    def test_a_memory_in_place_of_a_feed_forward_network_by_hand(self, tmp_path: Path) -> None:
        found = cost.parameters(config(tmp_path, MINIMAL + MEMORY), VOCABULARY)
        assert found.feed_forward == 552
        assert found.query == 132  # 8 x 12 + 12, and 2 x 12 of BatchNorm
        assert found.keys == 60  # 3 heads x 2 halves x 5 sub-keys x 2
        assert found.values == 200  # 25 slots x 8
        assert (found.total, found.dense) == (2580, 2380)

    @pytest.mark.parametrize(
        ("overrides", "part", "number"),
        [
            (["memory.place=beside"], "feed_forward", 1104),
            (["memory.place=beside"], "norms", 80),
            (["memory.place=after"], "feed_forward", 1104),
            (["memory.place=after"], "norms", 96),  # one LayerNorm more
            (["model.norm=pre"], "norms", 96),  # one at the end
            (["model.norm_type=rms"], "norms", 40),  # 5 x 8
            (["model.bias=false"], "norms", 40),
            (["model.embedding_norm=false"], "norms", 64),
            (["model.bias=false"], "output_bias", 0),
            (["model.bias=false"], "attention", 512),  # 2 x (8 x 24 + 8 x 8)
            (["model.bias=false"], "feed_forward", 512),  # 8 x 32 + 32 x 8
            (["model.kv_heads=1"], "attention", 432),  # 2 x (8 x 16 + 16 + 8 x 8 + 8)
            (["model.qk_norm=true"], "attention", 608),  # 2 x (288 + two LayerNorms over 4)
            (["model.qk_norm=true", "model.norm_type=rms"], "attention", 592),
            (["model.activation=swiglu"], "feed_forward", 632),  # f = 24: 2 x (8 x 24 + 24) + 24 x 8 + 8
            (["model.activation=swiglu", "model.ffn=20"], "feed_forward", 528),  # 2 x (8 x 20 + 20) + 20 x 8 + 8
            (["model.activation=relu2"], "feed_forward", 552),
            (["model.positions=rotary"], "positions", 0),
            (["model.positions=none"], "positions", 0),
            (["model.tie_embeddings=false"], "output", 800),
            (["model.experts={count: 3}"], "experts", 792),  # block 1: 8 x 3 and 3 x (8 x 16 + 16 x 8)
            (["model.experts={count: 3}"], "feed_forward", 0),
            (["model.experts={count: 3}", "memory=null"], "experts", 1584),
            (["model.experts={count: 3, at: [1]}", "memory=null"], "feed_forward", 552),
            (["model.experts={count: 3, ffn: 5}", "model.activation=swiglu"], "experts", 384),  # 24 and 3 x 3 x 8 x 5
            (["model.window=3", "model.logit_cap=5", "model.document_mask=true"], "attention", 576),
            (["model.ffn=20"], "feed_forward", 348),  # 8 x 20 + 20 + 20 x 8 + 8
            (["memory.query.norm=none"], "query", 108),
            (["memory.query.norm=layer"], "query", 132),
            (["memory.query.hidden=[6, 7]"], "query", 429),  # 3 x ((8x6+6) + (6x7+7) + (7x4+4)) + 24
            (["memory.layers=[1, 2]"], "values", 400),
            (["memory.layers=[1, 2]"], "feed_forward", 0),
            (["memory.layers=null", "memory.count=1"], "values", 200),
            (["memory.keys=flat", "memory.sub_keys=null", "memory.slots=30"], "keys", 360),  # 3 x 30 x 4
            (["memory.keys=flat", "memory.sub_keys=null", "memory.slots=30"], "values", 240),
        ],
    )
    def test_each_setting_counts_as_by_hand(self, tmp_path: Path, overrides: list[str], part: str, number: int) -> None:
        found = cost.parameters(config(tmp_path, MINIMAL + MEMORY, *overrides), VOCABULARY)
        assert getattr(found, part) == number

    def test_the_papers_model_has_268_million_values_in_a_memory(self) -> None:
        # 512^2 slots of 1,024 numbers.
        found = cost.parameters(
            load(REPOSITORY / "configs/paper/ccnews.yaml", ["memory={count: 1, sub_keys: 512}"]).config, 60_014
        )
        assert found.values == 262_144 * 1024
        assert found.keys == 4 * 2 * 512 * 256
        assert found.query == 1024 * 2048 + 2048 + 2 * 2048
        assert found.feed_forward == 11 * (2 * 1024 * 4096 + 4096 + 1024)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["memory=null"],
        ["memory=null", "model.norm=pre"],
        ["memory.place=beside", "memory.query.norm=none"],
        ["memory.place=after", "model.norm=pre"],
        ["memory.query.hidden=[6, 7]", "memory.query.norm=layer", "memory.layers=[1, 2]"],
        ["memory.query.hidden=[6]", "model.ffn=20"],
        ["memory.keys=flat", "memory.sub_keys=null", "memory.slots=30"],
        ["model.bias=false", "model.norm=pre", "model.kv_heads=1", "model.qk_norm=true"],
        ["memory=null", "model.norm_type=rms", "model.activation=swiglu", "model.qk_norm=true"],
        ["model.positions=rotary", "model.activation=swiglu", "model.bias=false", "model.tie_embeddings=false"],
        ["model.experts={count: 3, at: [2], ffn: 5}", "memory.place=beside", "model.activation=swiglu"],
        ["model.positions=none", "model.norm_type=rms", "model.embedding_norm=false", "model.activation=relu2"],
    ],
)
def test_the_built_model_has_as_many_parameters(tmp_path: Path, overrides: list[str]) -> None:
    from pkm.memory.values import Values
    from pkm.model.transformer import build_model

    made = config(tmp_path, MINIMAL + MEMORY, *overrides)
    model = build_model(made, VOCABULARY)
    found = cost.parameters(made, VOCABULARY)
    assert sum(p.numel() for p in model.parameters()) == found.total
    assert sum(m.weight.numel() for m in model.modules() if isinstance(m, Values)) == found.values


class TestFlops:
    def test_a_dense_model_by_hand(self, tmp_path: Path) -> None:
        found = cost.flops(config(tmp_path, MINIMAL), VOCABULARY)
        assert found.attention == 1376  # 2 blocks x (8 x 64 + 2 x 8 x 11)
        assert found.feed_forward == 2048  # 2 blocks x 4 x 8 x 32
        assert found.output == 1600
        assert (found.forward, found.training) == (5024, 15072)

    @pytest.mark.parametrize(
        ("overrides", "part", "number"),
        [
            (["model.kv_heads=1"], "attention", 1120),  # 2 x (2 x 8 x (8 + 8) + 2 x 8 x 8 + 2 x 8 x 11)
            (
                ["model.window=4"],
                "attention",
                1240,
            ),  # 2 x (8 x 64 + 4 x 8 x 3.4): of 10 tokens 1, 2, 3, 4, 4, ... are seen: 34 in all, of 55
            (["model.window=99"], "attention", 1376),
            (["model.activation=swiglu"], "feed_forward", 2304),  # 2 x 6 x 8 x 24
            (["model.activation=relu2"], "feed_forward", 2048),
            (["model.experts={count: 3, at: [2]}"], "feed_forward", 2096),  # 2 x 4 x 8 x 32 and the router's 2 x 8 x 3
            (["model.tie_embeddings=false", "model.positions=rotary", "model.bias=false"], "output", 1600),
        ],
    )
    def test_each_setting_costs_as_by_hand(self, tmp_path: Path, overrides: list[str], part: str, number: int) -> None:
        assert getattr(cost.flops(config(tmp_path, MINIMAL, *overrides), VOCABULARY), part) == number

    def test_a_memory_by_hand(self, tmp_path: Path) -> None:
        found = cost.flops(config(tmp_path, MINIMAL + MEMORY), VOCABULARY)
        assert found.query == 192  # 2 x 8 x 12
        assert found.search == 120  # 2 x 3 heads x 5 sub-keys x 4
        assert found.read == 96  # 2 x 3 heads x 2 slots x 8
        assert found.search_backward == 96  # 4 x 3 heads x 2 slots x 4
        assert found.forward == 1376 + 1024 + 1600 + 192 + 120 + 96
        assert found.training == 3 * (found.forward - 120) + 120 + 96

    def test_flat_keys_cost_all_slots_and_product_keys_their_square_root(self, tmp_path: Path) -> None:
        product = cost.flops(config(tmp_path, MINIMAL + MEMORY, "memory.sub_keys=100"), VOCABULARY)
        flat = cost.flops(
            config(tmp_path, MINIMAL + MEMORY, "memory.keys=flat", "memory.sub_keys=null", "memory.slots=10000"),
            VOCABULARY,
        )
        assert product.search == 2 * 3 * 100 * 4  # C x d_q, paper 3.2
        assert flat.search == 2 * 3 * 10_000 * 4
        assert flat.read == product.read

    def test_attention_of_the_token_scores_is_what_a_causal_mask_leaves(self, tmp_path: Path) -> None:
        # Token t sees t tokens: 2 d for the score of each and 2 d for its share in the sum.
        made = config(tmp_path, MINIMAL)
        d, context, blocks = 8, 10, 2
        pairs = sum(t for t in range(1, context + 1))
        scores = blocks * pairs * 4 * d
        assert cost.flops(made, VOCABULARY).attention * context == scores + blocks * context * 8 * d * d


class TestBytes:
    def test_training_by_hand(self, tmp_path: Path) -> None:
        found = cost.training_bytes(config(tmp_path, MINIMAL + MEMORY), VOCABULARY)
        assert found.weights == 2580 * 4
        assert found.adam == 2580 * 8
        # Every slot can be read by 80 tokens: 25 rows of 8 numbers with a row number each.
        assert found.gradients == 2380 * 4 + 25 * (8 * 4 + 8)

    def test_muon_keeps_one_moment_of_the_matrices(self, tmp_path: Path) -> None:
        muon = "optim.matrices={optimizer: muon}"
        found = cost.training_bytes(config(tmp_path, MINIMAL + MEMORY, muon), VOCABULARY)
        matrices = 2 * (8 * 24 + 8 * 8) + 2 * 8 * 32  # attention's of both blocks, the feed-forward network's of one
        assert found.adam == (2580 * 2 - matrices) * 4

    def test_few_tokens_touch_few_rows(self, tmp_path: Path) -> None:
        made = config(tmp_path, MINIMAL + MEMORY, "optim.batch_tokens=10", "memory.sub_keys=100")
        assert cost.training_bytes(made, VOCABULARY).gradients % 10_000 != 0
        dense = cost.parameters(made, VOCABULARY).dense
        assert cost.training_bytes(made, VOCABULARY).gradients == dense * 4 + 10 * 3 * 2 * (8 * 4 + 8)

    @pytest.mark.parametrize(
        ("dtype", "state", "per_slot"), [("fp32", "fp32", 96), ("bf16", "bf16", 48), ("bf16+master", "fp32", 112)]
    )
    def test_bytes_per_slot_are_value_and_moments(self, tmp_path: Path, dtype: str, state: str, per_slot: int) -> None:
        overrides = [f"optim.values.dtype={dtype}", f"optim.values.state_dtype={state}"]
        made = config(tmp_path, MINIMAL + MEMORY, *overrides)
        assert cost.bytes_per_slot(made, made.memory) == per_slot
        plain = cost.training_bytes(config(tmp_path, MINIMAL + MEMORY), VOCABULARY)
        found = cost.training_bytes(made, VOCABULARY)
        assert plain.weights + plain.adam - found.weights - found.adam == 25 * (96 - per_slot)

    def test_a_dense_update_keeps_a_gradient_of_the_whole_table(self, tmp_path: Path) -> None:
        made = config(tmp_path, MINIMAL + MEMORY, "optim.values.update=dense", "optim.batch_tokens=10")
        assert cost.training_bytes(made, VOCABULARY).gradients == 2580 * 4

    def test_sharded_values_are_divided_by_the_ranks_and_a_checkpoint_holds_them_whole(self, tmp_path: Path) -> None:
        made = config(tmp_path, MINIMAL + MEMORY, "parallel.values=sharded")
        assert cost.training_bytes(made, VOCABULARY, ranks=4).weights == 2380 * 4 + 50 * 4
        assert cost.checkpoint_bytes(made, VOCABULARY) == 2580 * 12

    def test_accumulation_and_recomputation_lower_activations_and_nothing_else(self, tmp_path: Path) -> None:
        whole = cost.training_bytes(config(tmp_path, MINIMAL + MEMORY), VOCABULARY)
        for override in ("optim.micro_batch=2", "parallel.activation_checkpointing=true"):
            less = cost.training_bytes(config(tmp_path, MINIMAL + MEMORY, override, "model.layers=12"), VOCABULARY)
            more = cost.training_bytes(config(tmp_path, MINIMAL + MEMORY, "model.layers=12"), VOCABULARY)
            assert less.activations < more.activations
            assert (less.weights, less.gradients, less.adam) == (more.weights, more.gradients, more.adam)
        assert whole.total == whole.weights + whole.gradients + whole.adam + whole.activations

    @pytest.mark.parametrize(
        "overrides",
        [
            [],
            ["precision=bf16"],
            ["memory=null"],
            ["memory=null", "precision=bf16", "model.norm=pre"],
            ["memory=null", "model.activation=relu", "model.layers=6"],
            ["memory=null", "model.activation=relu2", "model.bias=false"],
            ["memory=null", "model.activation=swiglu", "model.norm_type=rms"],
            ["memory=null", "model.positions=rotary", "model.qk_norm=true", "model.kv_heads=1"],
            ["memory=null", "model.positions=rotary", "model.qk_norm=true", "precision=bf16"],
            ["memory=null", "model.experts={count: 8}"],
            ["memory=null", "model.experts={count: 8, at: [2]}", "precision=bf16", "model.activation=swiglu"],
            ["memory.sub_keys=256", "memory.layers=[1, 2]"],
        ],
    )
    def test_activations_are_estimated_within_a_quarter(self, overrides: list[str]) -> None:
        """Against the tensors that autograd saves; shared storage counted once, parameters not at all."""
        import torch

        from pkm.model.transformer import build_model

        smaller = [
            "model.dim=128",
            "model.dropout=0.0",  # what dropout keeps depends on the device's attention
            "model.layers=3",
            "memory.layers=[2]",
            "memory.query.dim=128",
            "optim.batch_tokens=1024",
        ]
        made = load(REPOSITORY / "configs/quickstart.yaml", [*smaller, *overrides]).config
        vocab_size = 500
        model = build_model(made, vocab_size)
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        saved: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        ids = torch.randint(14, vocab_size, (made.sequences, made.corpus.context + 1))
        bf16 = torch.autocast("cpu", torch.bfloat16, enabled=made.precision == "bf16")
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), bf16:
            model(ids[:, :-1], ids[:, 1:])
        # Logits are gone by then: the loss works out their gradient at once.
        logits = ids[:, 1:].numel() * vocab_size * cost.BYTES[cost.planned_precision(made)]
        estimate = cost.training_bytes(made, vocab_size).activations - logits
        assert estimate == pytest.approx(sum(saved.values()), rel=0.25)

    @pytest.mark.parametrize(("device", "means"), [("cuda", "bf16"), ("cpu", "fp32"), ("auto", "fp32")])
    def test_precision_auto_counts_as_what_the_named_device_makes_of_it(
        self, tmp_path: Path, device: str, means: str
    ) -> None:
        def needed(precision: str) -> tuple[int, int]:
            made = config(
                tmp_path, MINIMAL + MEMORY, f"device={device}", f"precision={precision}", "parallel.values=sharded"
            )
            return cost.training_bytes(made, VOCABULARY).total, traffic(made, VOCABULARY, 2).total

        assert needed("auto") == needed(means) != needed("bf16" if means == "fp32" else "fp32")

    def test_the_chunk_of_logits_is_the_losses_own(self) -> None:
        from pkm.model.loss import CHUNK_LOGITS

        assert cost.CHUNK_LOGITS == CHUNK_LOGITS


class TestSummary:
    def test_it_names_layers_parameters_flops_and_memory(self, tmp_path: Path) -> None:
        rows = summary.summary(config(tmp_path, MINIMAL + MEMORY), VOCABULARY)
        text = "\n".join(" ".join(row) for row in rows)
        for part in (
            "memory at layers 2",
            "5^2 = 25",
            "2,580",
            "2,380",
            "FLOPs per token",
            "memory needed",
            "checkpoint",
        ):
            assert part in text

    def test_a_dense_model_says_that_it_has_no_memory(self, tmp_path: Path) -> None:
        assert ("memory", "none", "a dense model") in summary.summary(config(tmp_path, MINIMAL), VOCABULARY)

    def test_the_plan_takes_the_vocabulary_of_the_prepared_corpus(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        made = config(tmp_path, MINIMAL, f"corpus.path={tmp_path}")
        summary.print_plan(made)
        assert "no corpus at" in capsys.readouterr().out
        vocab = Vocab(["the", "of"], [5, 3], specials=("<one>", "<two>", "<three>"))
        for name in ("codes", "vocab"):
            vocab.save(tmp_path / name)
        write_manifest(tmp_path, {"train": [], "valid": [], "test": []}, vocab, {}, {})
        summary.print_plan(made)
        out = capsys.readouterr().out
        assert (
            "no corpus at" not in out and " 9 " in out
        )  # four ids that every vocabulary has, three specials, two pieces

    @pytest.mark.parametrize(("bf16", "means"), [(True, "bf16"), (False, "fp32")])
    def test_the_plan_counts_what_this_machines_gpu_makes_of_precision_auto(
        self,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        bf16: bool,
        means: str,
    ) -> None:
        import torch

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: bf16)
        summary.print_plan(config(tmp_path, MINIMAL))
        plan = capsys.readouterr().out
        summary.print_plan(config(tmp_path, MINIMAL, f"precision={means}"))
        assert capsys.readouterr().out == plan and f"in {means}" in plan

    @pytest.mark.parametrize(
        ("number", "text"),
        [(0, "0"), (999, "999"), (1000, "1.0 k"), (12_345_678, "12.3 M"), (999_600, "1.0 M"), (2**31, "2.1 G")],
    )
    def test_amounts_are_short(self, number: int, text: str) -> None:
        assert amount(number) == text

    def test_sizes_are_in_powers_of_1024(self) -> None:
        assert [size(n) for n in (5, 1024, 1536 * 2**20, 200 * 2**30)] == ["5 B", "1.0 KiB", "1.5 GiB", "200 GiB"]


def test_counting_imports_no_torch() -> None:
    program = "import sys, pkm.model.summary, pkm.config.schema; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY).returncode == 0


# ---- bytes that ranks send --------------------------------------------------------------------------------------------


FEW = 64  # bytes: the loss and the norms


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {"values": "sharded"}},
        {"parallel": {"values": "sharded"}, "optim": {"micro_batch": 1}},
        {"parallel": {"values": "sharded", "activation_checkpointing": True}},
        {"optim": {"values": {"update": "dense"}}},
        {"parallel": {"sync_batch_norm": False}, "optim": {"values": {"update": "dense"}}},
        {"memory": None},
    ],
)
def test_the_dry_run_expects_what_ranks_send(ranks, sections):
    config = tiny_config(**sections)
    for found in on_ranks(ranks, lambda rank: measure(config, steps=1)):
        assert found["sent_bytes"] == pytest.approx(found["expected_bytes"], abs=FEW * ranks)


def test_replicated_values_send_less_than_the_dry_run_expects_at_most():
    config = tiny_config()
    (found, _) = on_ranks(2, lambda rank: measure(config, steps=1))
    most = traffic(config, SENT_VOCABULARY, 2)
    assert most.total - most.values < found["sent_bytes"] <= most.total + FEW


def test_one_rank_sends_nothing():
    assert traffic(tiny_config(), VOCABULARY, 1).total == 0
