"""Checkpoints of Meta's memory code: files of their names and shapes against their formulas in float64, which share nothing with ours."""

import json

import pytest
import torch
import torch.nn.functional as F

from pkm.errors import UserError
from pkm.inference.adapters import meta
from pkm.inference.adapters.names import to_theirs
from pkm.inference.imported import import_model
from pkm.inference.trained import load_trained
from tests.support.tiny import VOCAB_SIZE, random_corpus

D, LAYERS, HEADS, FFN, H, C, Q, K = 24, 3, 4, 40, 2, 5, 6, 3
PARAMS = {
    "name": "a run", "data": {"seq_len": 8},
    "model": {"n_heads": HEADS, "rope_theta": 500.0, "norm_eps": 1e-5, "productkey_args": {"mem_knn": K}},
}  # fmt: skip


def memory(layer, gate=True, tables=("values",), width=D):
    names = {
        "keys": (2 * H * C, Q // 2),
        "query_proj.query_mlps.0.weight": (H * Q, D),
        "query_proj.query_mlps.0.bias": (H * Q,),
    }
    names |= {f"{table}.weight": (C * C, width) for table in tables}
    if gate:
        names |= {"swilu_projection.weight": (width, D), "swilu_projection.bias": (width,)}
        names |= {"value_proj.weight": (D, width), "value_proj.bias": (D,)}
    return {f"layers.{layer}.feed_forward.{name}": shape for name, shape in names.items()}


def written(directory, memories, params=PARAMS, kv_heads=2, tied=False, extra=()):
    generator = torch.Generator().manual_seed(7)
    shapes = {"tok_embeddings.weight": (VOCAB_SIZE, D), "norm.weight": (D,)}
    if not tied:
        shapes["output.weight"] = (VOCAB_SIZE, D)
    for i in range(LAYERS):
        rows = {"wq": D, "wk": D // HEADS * kv_heads, "wv": D // HEADS * kv_heads, "wo": D}
        shapes |= {f"layers.{i}.attention.{name}.weight": (n, D) for name, n in rows.items()}
        shapes |= {f"layers.{i}.{name}.weight": (D,) for name in ("attention_norm", "ffn_norm")}
        if f"layers.{i}.feed_forward.keys" not in memories:
            sizes = {"w1": (FFN, D), "w3": (FFN, D), "w2": (D, FFN)}
            shapes |= {f"layers.{i}.feed_forward.{name}.weight": size for name, size in sizes.items()}
    shapes |= memories | dict(extra)
    state = {name: torch.randn(shape, generator=generator) * 0.4 for name, shape in shapes.items()}
    directory.mkdir(exist_ok=True)
    torch.save({"model": state}, directory / "consolidated.pth")
    if params is not None:
        (directory / "params.json").write_text(json.dumps(params))
    return {name: tensor.double() for name, tensor in state.items()}


def norm(weight, x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turned(x, theta):
    """Neighbours turned as complex numbers: x (B, T, heads, size)."""
    size = x.shape[-1]
    angles = torch.outer(torch.arange(x.shape[1]).double(), theta ** -(torch.arange(0, size, 2).double() / size))
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[None, :, None]).flatten(-2)


def read(state, layer, x, tables):
    own = {
        n.removeprefix(f"layers.{layer}.feed_forward."): t
        for n, t in state.items()
        if n.startswith(f"layers.{layer}.feed_forward.")
    }
    keys = own["keys"].view(H, 2, C, Q // 2)
    queries = (x @ own["query_proj.query_mlps.0.weight"].T + own["query_proj.query_mlps.0.bias"]).unflatten(
        -1, (H, 2, Q // 2)
    )
    y = x.new_zeros(*x.shape[:2], next(iter(tables.values())).shape[1])
    for b in range(len(x)):
        for t in range(x.shape[1]):
            for h in range(H):
                first, second = (keys[h, s] @ queries[b, t, h, s] for s in (0, 1))
                scores, slots = (first[:, None] + second[None]).flatten().topk(K)
                weights = scores.softmax(0)
                if "values_u" in tables:
                    weights = weights * F.gelu(tables["values_u"][slots] @ x[b, t])
                    y[b, t] += weights @ tables["values_v"][slots]
                else:
                    y[b, t] += weights @ tables["values"][slots]
    if "swilu_projection.weight" in own and "values_u" not in tables:
        gate = F.silu(x @ own["swilu_projection.weight"].T + own["swilu_projection.bias"])
        y = (y * gate) @ own["value_proj.weight"].T + own["value_proj.bias"]
    return y


def forward(state, ids, theta=500.0):
    x = state["tok_embeddings.weight"][ids]
    tables = {}
    for i in range(LAYERS):
        there = f"layers.{i}"
        h = norm(state[f"{there}.attention_norm.weight"], x)
        q, k, v = ((h @ state[f"{there}.attention.w{n}.weight"].T).unflatten(-1, (-1, D // HEADS)) for n in "qkv")
        q, k = turned(q, theta), turned(k, theta)
        k, v = (t.repeat_interleave(HEADS // t.shape[2], dim=2) for t in (k, v))
        scores = torch.einsum("bthd,bshd->bhts", q, k) / (D // HEADS) ** 0.5
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)
        x = (
            x
            + torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).flatten(2)
            @ state[f"{there}.attention.wo.weight"].T
        )
        h = norm(state[f"{there}.ffn_norm.weight"], x)
        if f"{there}.feed_forward.keys" in state:
            for name in ("values", "values_u", "values_v"):
                if (found := state.get(f"{there}.feed_forward.{name}.weight")) is not None:
                    tables[name] = found
            x = x + read(state, i, h, tables)
        else:
            w1, w2, w3 = (state[f"{there}.feed_forward.w{n}.weight"] for n in (1, 2, 3))
            x = x + (F.silu(h @ w1.T) * (h @ w3.T)) @ w2.T
    return norm(state["norm.weight"], x) @ state.get("output.weight", state["tok_embeddings.weight"]).T


CASES = {
    "no memory": {"memories": {}},
    "tied, all heads their own": {"memories": {}, "kv_heads": HEADS, "tied": True},
    "memory": {"memories": memory(1, gate=False)},
    "memory+": {"memories": memory(1)},
    "one table under the first name": {"memories": memory(0) | memory(2, tables=())},
    "values of another width": {"memories": memory(1, width=10)},
    "two tables": {"memories": memory(0) | memory(2)},
    "experts": {"memories": memory(1, tables=("values_u", "values_v"))},
}


@pytest.fixture
def corpus(tmp_path):
    return random_corpus(tmp_path / "corpus")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_model_computes_here_what_its_formulas_say(tmp_path, corpus, case):
    state = written(tmp_path / "run", **case)
    config = import_model("meta", tmp_path / "run", tmp_path / "runs" / "meta", [f"corpus.path={corpus}"])
    assert config.corpus.context == 8
    model = load_trained(tmp_path / "runs" / "meta", overrides=("device=cpu",)).model.double()
    ids = torch.randint(14, VOCAB_SIZE, (2, 8), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model.logits(model.hidden(ids))
    # Our angles are fp32's.
    torch.testing.assert_close(logits, forward(state, ids), rtol=1e-5, atol=1e-5)


def test_one_table_under_every_name_is_one_here(tmp_path, corpus):
    written(tmp_path / "run", memory(0) | memory(2))
    file = torch.load(tmp_path / "run" / "consolidated.pth", weights_only=True)
    file["model"]["layers.2.feed_forward.values.weight"] = file["model"]["layers.0.feed_forward.values.weight"]
    torch.save(file, tmp_path / "run" / "consolidated.pth")
    config = import_model("meta", tmp_path / "run", tmp_path / "runs" / "meta", [f"corpus.path={corpus}"])
    [section] = config.memories
    assert section.share_values
    assert len(load_trained(tmp_path / "runs" / "meta").model.tables()) == 1


def test_the_table_gives_the_names_back(tmp_path, corpus):
    written(tmp_path / "run", memory(1))
    config = import_model("meta", tmp_path / "run", tmp_path / "runs" / "meta", [f"corpus.path={corpus}"])
    ours = load_trained(tmp_path / "runs" / "meta").model.state_dict()
    state = torch.load(tmp_path / "run" / "consolidated.pth", weights_only=True)["model"]
    again = to_theirs(meta.table(config, state), ours)
    assert again.keys() == state.keys() and all(torch.equal(again[name], state[name]) for name in state)


def test_what_the_file_does_not_tell_is_asked_for(tmp_path, corpus):
    state = written(tmp_path / "run", memory(1), params=None)
    given = [f"corpus.path={corpus}", "model.heads=4", "model.rotary.base=500", "corpus.context=8", "model.kv_heads=2"]
    with pytest.raises(UserError, match=r"does not tell memory\.knn\n  fix: give them: memory\.knn="):
        import_model("meta", tmp_path / "run" / "consolidated.pth", tmp_path / "runs" / "meta", given)
    with pytest.raises(
        UserError, match=r"model\.heads, model\.rotary\.base, corpus\.context, memory\.knn, model\.kv_heads"
    ):
        import_model("meta", tmp_path / "run", tmp_path / "runs" / "meta")
    import_model("meta", tmp_path / "run", tmp_path / "runs" / "meta", [*given, f"memory.knn={K}"])
    model = load_trained(tmp_path / "runs" / "meta").model.double()
    ids = torch.arange(14, 22).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(model.logits(model.hidden(ids)), forward(state, ids), rtol=1e-5, atol=1e-5)


REFUSED = {
    "scalar gate": ({"layers.1.feed_forward.gating.weight": (1, D)}, r"nothing here that layers\.1\.feed_forward\.gating\.weight"),
    "norm of queries": ({"layers.1.feed_forward.query_proj.norm.weight": (H * Q,)}, r"query_proj\.norm\.weight could be"),
    "projection without a gate": ({"layers.2.feed_forward.value_proj.weight": (D, D)}, r"nothing here that layers\.2\.feed_forward\.value_proj"),
    "bias": ({"layers.0.attention.wq.bias": (D,)}, r"attention\.wq\.bias"),
}  # fmt: skip


@pytest.mark.parametrize(("extra", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_expressed_is_refused_by_its_name_there(tmp_path, extra, said):
    written(tmp_path / "run", memory(1), extra=extra)
    with pytest.raises(UserError, match=said):
        import_model("meta", tmp_path / "run", tmp_path / "runs" / "meta")
    assert not list((tmp_path / "runs").iterdir())


def test_a_distributed_checkpoint_and_other_files_are_named(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".metadata").write_bytes(b"\x80\x04N.")
    with pytest.raises(UserError, match=r"\.metadata is a pickle that runs code"):
        import_model("meta", tmp_path / "folder", tmp_path / "runs" / "meta")
    torch.save({"model": {"a": torch.zeros(1)}}, tmp_path / "other.pth")
    with pytest.raises(UserError, match="no tok_embeddings"):
        import_model("meta", tmp_path / "other.pth", tmp_path / "runs" / "meta")
