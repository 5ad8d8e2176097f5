"""XLM's checkpoints: files of its names and shapes against its formulas in float64, which share nothing with ours."""

import pytest
import torch
import torch.nn.functional as F

from pkm.corpus.store import open_corpus
from pkm.errors import UserError
from pkm.inference.imported import import_model
from pkm.inference.trained import load_trained
from tests.support.tiny import VOCAB_SIZE, random_corpus

D, LAYERS, HEADS, FFN = 24, 3, 4, 40
PARAMS = {
    "n_layers": LAYERS, "n_heads": HEADS, "emb_dim": D, "dropout": 0.1, "gelu_activation": True, "share_inout_emb": True,
    "bptt": 8, "n_langs": 1, "asm": False, "clm_steps": [("en", None)], "mlm_steps": [], "mem_heads": 2, "mem_knn": 3,
    "mem_implementation": "pq_fast", "mem_temperature": 1.0, "mem_score_softmax": True, "mem_modulo_size": -1,
}  # fmt: skip


def shapes(
    layer, sub_keys=5, size=6, heads=2, norm=True, prefix="query_proj.query_mlps.", hidden=None, flat=None, one=False
):
    """Of a memory in place of a layer's network."""
    keys = (heads, flat, size) if flat else (heads, 2, sub_keys, size // 2)
    found = {"keys": keys[-2:] if one else keys, "values.weight": (flat or sub_keys**2, D)}
    if hidden:
        found |= {f"{prefix}0.0.weight": (hidden, D), f"{prefix}0.0.bias": (hidden,)}
        found |= {f"{prefix}0.2.weight": (heads * size, hidden), f"{prefix}0.2.bias": (heads * size,)}
    else:
        found |= {f"{prefix}0.weight": (heads * size, D), f"{prefix}0.bias": (heads * size,)}
    if norm:
        names = ("weight", "bias", "running_mean", "running_var")
        found |= {f"{prefix}1.{name}": (heads * size,) for name in names} | {f"{prefix}1.num_batches_tracked": ()}
    return {f"memories.{layer}_in.{name}": shape for name, shape in found.items()}


def model_shapes(memories, tied=True):
    found = {
        "embeddings.weight": (VOCAB_SIZE, D),
        "position_embeddings.weight": (16, D),
        "pred_layer.proj.bias": (VOCAB_SIZE,),
    }
    found["pred_layer.proj.weight"] = (VOCAB_SIZE, D)
    names = {"layer_norm_emb": (D,)}
    for i in range(LAYERS):
        names |= {f"attentions.{i}.{x}_lin": (D, D) for x in ("q", "k", "v", "out")}
        names |= {f"layer_norm1.{i}": (D,), f"layer_norm2.{i}": (D,)}
        if not any(name.startswith(f"memories.{i}_in.") for name in memories):
            names |= {f"ffns.{i}.lin1": (FFN, D), f"ffns.{i}.lin2": (D, FFN)}
    return (
        found | memories | {f"{n}.weight": s for n, s in names.items()} | {f"{n}.bias": s[:1] for n, s in names.items()}
    )


def written(path, memories, corpus, prefix="module.", **params):
    """A checkpoint of XLM; its tensors in float64 by their names without the prefix."""
    generator = torch.Generator().manual_seed(7)
    state = {name: torch.randn(shape, generator=generator) * 0.4 for name, shape in model_shapes(memories).items()}
    for name, tensor in state.items():
        if name.endswith("running_var"):
            tensor.abs_().add_(0.2)
    if PARAMS.get("share_inout_emb") and params.get("share_inout_emb", True):
        state["pred_layer.proj.weight"] = state["embeddings.weight"]
    pieces = open_corpus(corpus).vocab.pieces
    words = dict(enumerate(pieces))
    file = {
        "epoch": 3, "n_total_iter": 700, "best_metrics": {}, "model": {prefix + name: t for name, t in state.items()},
        "params": PARAMS | params, "dico_id2word": words, "dico_word2id": {w: i for i, w in words.items()},
        "dico_counts": {piece: 1 for piece in pieces[14:]},
    }  # fmt: skip
    torch.save(file, path)
    return {name: tensor.double() for name, tensor in state.items()}


def norm(state, name, x):
    mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
    return (x - mean) / (var + 1e-12).sqrt() * state[f"{name}.weight"] + state[f"{name}.bias"]


def lin(state, name, x):
    return x @ state[f"{name}.weight"].T + state.get(f"{name}.bias", 0.0)


def memory(state, layer, x, heads, k, activation):
    own = {
        n.removeprefix(f"memories.{layer}_in."): t for n, t in state.items() if n.startswith(f"memories.{layer}_in.")
    }
    own = {n.replace("query_proj.query_mlps.", "query_proj."): t for n, t in own.items()}
    if "query_proj.0.0.weight" in own:
        q = lin(own, "query_proj.0.2", lin(own, "query_proj.0.0", x).clamp(min=0))
    else:
        q = lin(own, "query_proj.0", x)
    if "query_proj.1.weight" in own:
        scale = own["query_proj.1.weight"] / (own["query_proj.1.running_var"] + 1e-5).sqrt()
        q = (q - own["query_proj.1.running_mean"]) * scale + own["query_proj.1.bias"]
    keys, y = own["keys"], torch.zeros_like(x)
    for token, out in zip(q.flatten(0, 1), y.flatten(0, 1), strict=True):
        for h, query in enumerate(token.view(heads, -1)):
            if len(own["values.weight"]) == keys.shape[-2]:
                scores = (keys if keys.ndim == 2 else keys[h]) @ query
            else:
                halves = query.view(2, -1)
                first, second = (keys if keys.ndim == 2 else keys[h, s] for s in (0, 1))
                scores = ((first @ halves[0])[:, None] + (second @ halves[1])[None]).flatten()
            best, slots = scores.topk(k)
            out += best.softmax(0) @ own["values.weight"][slots]
    return y


def forward(state, ids, params):
    x = state["embeddings.weight"][ids] + state["position_embeddings.weight"][: ids.shape[1]]
    x = norm(state, "layer_norm_emb", x)
    activation = F.gelu if params["gelu_activation"] else F.relu
    for i in range(LAYERS):
        q, k, v = (lin(state, f"attentions.{i}.{n}_lin", x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for n in "qkv")
        scores = q / (D // HEADS) ** 0.5 @ k.transpose(2, 3)
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)
        context = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = norm(state, f"layer_norm1.{i}", x + lin(state, f"attentions.{i}.out_lin", context))
        if f"memories.{i}_in.keys" in state:
            y = memory(state, i, x, params["mem_heads"], params["mem_knn"], activation)
        else:
            y = lin(state, f"ffns.{i}.lin2", activation(lin(state, f"ffns.{i}.lin1", x)))
        x = norm(state, f"layer_norm2.{i}", x + y)
    return x @ state["pred_layer.proj.weight"].T + state["pred_layer.proj.bias"]


@pytest.fixture
def corpus(tmp_path):
    return random_corpus(tmp_path / "corpus")


CASES = {
    "no memory": ({}, {}),
    "as in the paper": (shapes(1), {}),
    "two": (shapes(0) | shapes(2), {}),
    "the notebook's names": (shapes(1, prefix="query_proj."), {}),
    "without BatchNorm, ReLU, two embeddings": (shapes(1, norm=False), {"gelu_activation": False, "share_inout_emb": False}),
    "a hidden layer": (shapes(1, hidden=7, norm=False), {}),
    "flat": (shapes(1, flat=11), {"mem_implementation": "flat"}),
    "the same keys for all heads": (shapes(1, one=True), {}),
    "without biases of queries": ({n: s for n, s in shapes(1).items() if not n.endswith("0.bias")}, {}),
}  # fmt: skip


@pytest.mark.parametrize(("memories", "params"), CASES.values(), ids=CASES)
def test_a_model_computes_here_what_its_formulas_say(tmp_path, corpus, memories, params):
    state = written(tmp_path / "model.pth", memories, corpus, **params)
    config = import_model("xlm", tmp_path / "model.pth", tmp_path / "runs" / "xlm", [f"corpus.path={corpus}"])
    assert config.corpus.context == 8
    trained = load_trained(tmp_path / "runs" / "xlm", overrides=("device=cpu",))
    assert trained.step == 700
    model, ids = (
        trained.model.double(),
        torch.randint(14, VOCAB_SIZE, (2, 8), generator=torch.Generator().manual_seed(1)),
    )
    with torch.no_grad():
        logits = model.logits(model.hidden(ids))
    torch.testing.assert_close(logits, forward(state, ids, PARAMS | params), rtol=1e-6, atol=1e-6)


def test_its_dictionary_lies_beside_the_run_and_a_corpus_with_another_is_refused(tmp_path, corpus):
    written(tmp_path / "model.pth", shapes(1), corpus)
    run = tmp_path / "runs" / "xlm"
    import_model("xlm", tmp_path / "model.pth", run, [f"corpus.path={corpus}"])
    assert (run / "vocab").read_bytes() == (corpus / "vocab").read_bytes()
    other = tmp_path / "other"
    random_corpus(other)
    written(tmp_path / "renamed.pth", shapes(1), corpus)
    file = torch.load(tmp_path / "renamed.pth", weights_only=True)
    file["dico_id2word"][20] = "another"
    torch.save(file, tmp_path / "renamed.pth")
    import_model("xlm", tmp_path / "renamed.pth", tmp_path / "runs" / "renamed", [f"corpus.path={corpus}"])
    with pytest.raises(UserError, match="trained with another vocab"):
        load_trained(tmp_path / "runs" / "renamed")


def broken(memories=None, names=(), **params):
    return lambda path, corpus: written(path, (memories or shapes(1)) | dict(names), corpus, **params)


REFUSED = {
    "mem_temperature": (broken(mem_temperature=2.0), "mem_temperature: 2.0"),
    "mem_score_softmax": (broken(mem_score_softmax=False), "mem_score_softmax: False"),
    "mem_modulo_size": (broken(mem_modulo_size=7), "mem_modulo_size: 7"),
    "several languages": (broken(n_langs=2), "n_langs: 2"),
    "masked": (broken(mlm_steps=[("en", None)], clm_steps=[]), "mlm_steps"),
    "after": (broken(names={"memories.1_after.keys": (2, 2, 5, 3)}), r"memories\.1_after: a memory after a layer"),
    "inner BatchNorm": (
        broken(names={"memories.1_in.query_proj.query_mlps.0.1.running_mean": (7,)}),
        "BatchNorm inside a query network",
    ),
    "shuffled": (broken(names={"memories.1_in.head_permutations": (2, 25)}), "nothing here that memories.1_in.head_permutations"),
    "cut": (broken(n_layers=4), r"it lacks attentions\.3\.k_lin"),
    "no heads": (lambda path, corpus: torch.save({"params": {"n_layers": 1}, "model": {"embeddings.weight": torch.zeros(3, 2), "position_embeddings.weight": torch.zeros(3, 2)}}, path), "it lacks 'n_heads'"),
    "other ids": (lambda path, corpus: torch.save({"params": PARAMS, "model": {}, "dico_id2word": {0: "a"}}, path), "its first ids are a"),
    "no checkpoint": (lambda path, corpus: torch.save({"model": {}}, path), "has no params"),
}  # fmt: skip


@pytest.mark.parametrize(("write", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_expressed_is_refused_by_its_name_there(tmp_path, corpus, write, said):
    write(tmp_path / "model.pth", corpus)
    with pytest.raises(UserError, match=said):
        import_model("xlm", tmp_path / "model.pth", tmp_path / "runs" / "xlm")
    assert not list((tmp_path / "runs").iterdir() if (tmp_path / "runs").exists() else [])
