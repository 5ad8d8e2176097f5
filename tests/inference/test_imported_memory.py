"""Layers of other packages against what those packages compute."""

import pickle

import pytest
import torch
from torch import nn

import pkm
from pkm.errors import UserError, UserErrors
from pkm.inference.adapters import lucidrains, peer
from pkm.inference.adapters.names import to_theirs
from pkm.inference.imported_memory import import_memories

X = torch.randn(2, 7, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


class Of2020(nn.Module):
    """The layer of releases 0.0 to 0.1.10, after its formula in float64: the package that is installed is a later one."""

    def __init__(self, dim, heads, sub_keys, size):
        super().__init__()
        self.heads, self.sub_keys = heads, sub_keys
        self.to_queries = nn.Linear(dim, heads * size, bias=False)
        self.norm = nn.ModuleDict({"fn": nn.BatchNorm1d(heads * size)})
        self.keys = nn.Parameter(torch.randn(heads, sub_keys, 2, size // 2))
        self.values = nn.EmbeddingBag(sub_keys**2, dim, mode="sum")

    def forward(self, x, k):
        queries = self.norm["fn"](self.to_queries(x).flatten(0, 1)).view(*x.shape[:2], 2, self.heads, -1)
        y = torch.zeros_like(x)
        for b in range(len(x)):
            for t in range(x.shape[1]):
                for h in range(self.heads):
                    first, second = (self.keys[h, :, side] @ queries[b, t, side, h] for side in (0, 1))
                    every = (first.unsqueeze(1) + second).flatten()
                    scores, slots = every.topk(k)
                    y[b, t] += scores.softmax(-1) @ self.values.weight[slots]
        return y


def stirred(layer):
    """Weights and statistics that are all different from their beginnings, in float64."""
    torch.manual_seed(3)
    for tensor in layer.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand_like(tensor) + 0.1)
    for name, p in layer.named_parameters():
        if "norm" not in name:
            nn.init.normal_(p)
    return layer.double().eval()


def imported(tmp_path, kind, layer, *overrides, wrap=lambda state: state):
    torch.save(wrap(layer.state_dict()), tmp_path / "layer.pt")
    [directory] = import_memories(kind, tmp_path / "layer.pt", tmp_path / "memory", overrides)
    return pkm.ProductKeyMemory.load(directory).double().eval()


def test_a_layer_of_2020_computes_the_same_here(tmp_path):
    theirs = stirred(Of2020(24, 3, 6, 10))
    ours = imported(tmp_path, "lucidrains", theirs, "knn=4")
    with torch.no_grad():
        torch.testing.assert_close(ours(X), theirs(X, 4), rtol=1e-5, atol=1e-5)


def of_today(**settings):
    package = pytest.importorskip("product_key_memory")
    return stirred(package.PKM(24, heads=3, num_keys=6, topk=4, dim_head=8, **settings))


def test_a_layer_of_the_package_computes_the_same_here(tmp_path):
    theirs = of_today()
    ours = imported(tmp_path, "lucidrains", theirs, "memory.knn=4")
    with torch.no_grad():
        torch.testing.assert_close(ours(X), theirs(X), rtol=1e-5, atol=1e-5)


def test_the_table_gives_the_packages_names_back(tmp_path):
    theirs = of_today()
    ours = imported(tmp_path, "lucidrains", theirs, "knn=4")
    state = theirs.state_dict()
    again = to_theirs(lucidrains.table(state, ""), ours.state_dict())
    assert again.keys() == state.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(again[name], tensor, rtol=1e-6, atol=1e-6)


def test_every_layer_of_a_models_file_becomes_a_memory(tmp_path):
    model = nn.Sequential(nn.Linear(24, 24), of_today(), of_today())
    nn.init.zeros_(model[2].values.weight)
    torch.save({"model": model.state_dict(), "step": 3}, tmp_path / "model.pt")
    places = import_memories("lucidrains", tmp_path / "model.pt", tmp_path / "memories", ["knn=4"])
    assert [place.name for place in places] == ["1", "2"]
    first, second = (pkm.ProductKeyMemory.load(place).double().eval() for place in places)
    with torch.no_grad():
        torch.testing.assert_close(first(X), model[1](X), rtol=1e-5, atol=1e-5)
        assert not second(X).any()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pre_layernorm": True}, "pre_layernorm"),
        ({"norm_output": True}, "output_norm"),
        ({"concat_values_and_combine": True}, "heads side by side"),
        ({"use_layernorm": False}, r"norm\.fn: BatchNorm over the tokens"),
    ],
)
def test_what_the_package_has_and_a_memory_here_has_not_is_refused_by_name(tmp_path, settings, said):
    with pytest.raises(UserError, match=said):
        imported(tmp_path, "lucidrains", of_today(**settings), "knn=4")
    assert not (tmp_path / "memory").exists()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "does not tell knn\n  fix: give them: knn="),
        (["knn"], "write name=value"),
        (["knn=["], r"argument 'knn=\[': its value cannot be read"),
        (["knn=4", "query.norm=layer"], r"a memory has no argument 'query\.norm'\n  fix: it has: knn, dim, .*query"),
        (["knn=9"], "k = 9 is more than the 6 sub-keys"),
        (["knn=4", "values_std=1e-3", "sub_keys=8"], r"keys\.weight would be \(3, 2, 6, 8\) of the file, and of these settings it is \(3, 2, 8, 8\)"),
    ],
)  # fmt: skip
def test_what_the_file_does_not_tell_is_asked_for(tmp_path, overrides, said):
    with pytest.raises((UserError, UserErrors), match=said):
        imported(tmp_path, "lucidrains", of_today(), *overrides)


class Runs:
    def __reduce__(self):
        return print, ("run",)


def test_nothing_in_a_pickle_is_run(tmp_path, capsys):
    (tmp_path / "layer.pt").write_bytes(pickle.dumps({"keys": Runs()}))
    torch.save({"keys": Runs()}, tmp_path / "zip.pt")
    (tmp_path / "empty.pt").touch()
    refused = {"layer.pt": "torch.save did not write it", "zip.pt": r"\S*print is in it", "empty.pt": "it is empty.*"}
    for name, found in refused.items():
        with pytest.raises(UserError, match=f"no file of tensors and plain values.*: {found}\n"):
            import_memories("lucidrains", tmp_path / name, tmp_path / "memory", ["knn=4"])
    assert "run" not in capsys.readouterr().out.split()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"text",
        torch.zeros(2),
        {"a": 1},
        {"keys": torch.zeros(2)},
        [1],
        {"keys": torch.zeros(3), "to_queries.weight": torch.zeros(2)},
    ],
    ids=str,
)
def test_a_file_without_such_a_layer_is_named(tmp_path, content):
    if isinstance(content, bytes):
        (tmp_path / "layer.pt").write_bytes(content)
    else:
        torch.save(content, tmp_path / "layer.pt")
    with pytest.raises(UserError, match=r"layer\.pt: (it is no file of tensors|no layer of that kind)"):
        import_memories("lucidrains", tmp_path / "layer.pt", tmp_path / "memory", ["knn=4"])
    with pytest.raises(UserError, match="no such file"):
        import_memories("lucidrains", tmp_path / "none.pt", tmp_path / "memory", ["knn=4"])


def test_of_several_memories_all_are_written_or_none(tmp_path):
    torch.save(nn.Sequential(of_today(), of_today()).state_dict(), tmp_path / "model.pt")
    (tmp_path / "memories" / "1").mkdir(parents=True)
    with pytest.raises(UserError, match="memories/1: it is there already"):
        import_memories("lucidrains", tmp_path / "model.pt", tmp_path / "memories", ["knn=4"])
    assert [path.name for path in (tmp_path / "memories").iterdir()] == ["1"]


def test_a_layers_name_leads_nowhere_outside_the_directory(tmp_path):
    state = of_today().state_dict()
    named = {f"{prefix}.{name}": tensor for prefix in ("../../out", "in") for name, tensor in state.items()}
    torch.save(named, tmp_path / "model.pt")
    with pytest.raises(UserError, match=r"'\.\./\.\./out', which is no name for a directory"):
        import_memories("lucidrains", tmp_path / "model.pt", tmp_path / "a" / "b", ["knn=4"])
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("values.weight", torch.full((36, 24), float("nan")), r"values\.weight would not be finite"),
        ("to_queries.weight", torch.zeros(7, 24), r"to_queries\.weight \(7, 24\) cannot be query\.first\.weight"),
    ],
)
def test_a_tensor_that_nothing_can_go_on_from_is_named(tmp_path, name, tensor, said):
    state = of_today().state_dict()
    assert name in state
    torch.save({**state, name: tensor}, tmp_path / "layer.pt")
    with pytest.raises(UserError, match=said):
        import_memories("lucidrains", tmp_path / "layer.pt", tmp_path / "memory", ["knn=4"])
    assert not (tmp_path / "memory").exists()


def of_peer(**settings):
    package = pytest.importorskip("PEER_pytorch")
    sizes = {"heads": 3, "num_experts": 36, "num_experts_per_head": 4, "dim_key": 8}
    return stirred(package.PEER(24, **{**sizes, "non_competing_scores": False, **settings}))


@pytest.mark.parametrize(("activation", "name"), [(nn.GELU, "gelu"), (nn.ReLU, "relu"), (nn.SiLU, "silu")])
def test_experts_of_the_package_compute_the_same_here(tmp_path, activation, name):
    theirs = of_peer(activation=activation)
    ours = imported(tmp_path, "peer", theirs, "knn=4", "non_competing_scores=false", f"activation={name}")
    with torch.no_grad():
        torch.testing.assert_close(ours(X), theirs(X), rtol=1e-5, atol=1e-5)
    again = to_theirs(peer.table(theirs.state_dict(), ""), ours.state_dict())
    for key, tensor in theirs.state_dict().items():
        torch.testing.assert_close(again[key], tensor, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "given", "said"),
    [
        ({}, ["knn=4"], "does not tell non_competing_scores"),
        (
            {"non_competing_scores": True},
            ["knn=1", "non_competing_scores=true"],
            "ReLU of the scores of one expert a head",
        ),
        ({"pre_rmsnorm": True}, ["knn=4", "non_competing_scores=false"], r"norm\.gamma"),
        ({"separate_embed_per_head": True}, ["knn=4", "non_competing_scores=false"], "tables for each head"),
    ],
)
def test_experts_that_a_memory_here_has_not_are_refused_by_name(tmp_path, settings, given, said):
    with pytest.raises(UserError, match=said):
        imported(tmp_path, "peer", of_peer(**settings), *given)
    assert not (tmp_path / "memory").exists()
