"""The memory as a module of anybody's model, and its copies."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import pkm
from pkm import ProductKeyMemory
from pkm.config.schema import MemoryConfig, QueryConfig, ValuesOptim
from pkm.errors import UserError, UserErrors
from pkm.memory.adam import ValuesAdam
from pkm.memory.layer import MemoryLayer
from pkm.memory.values import tables

SMALL = {"sub_keys": 8, "heads": 2, "knn": 3, "query": {"dim": 8}}


def test_importing_the_package_loads_no_torch_and_asking_it_for_a_memory_does():
    program = (
        "import sys, pkm; assert 'torch' not in sys.modules; pkm.ProductKeyMemory, pkm.optimizers; sys.modules['torch']"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=Path(pkm.__file__).parents[1]).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pkm.nothing


def test_keyword_arguments_make_the_layer_that_a_config_makes():
    torch.manual_seed(1)
    ours = ProductKeyMemory(dim=10, **SMALL)
    torch.manual_seed(1)
    theirs = MemoryLayer(MemoryConfig(layers=(1,), sub_keys=8, heads=2, knn=3, query=QueryConfig(dim=8)), 10)
    x = torch.randn(2, 5, 10)
    assert torch.equal(ours(x), theirs(x))
    assert ours.state_dict().keys() == theirs.state_dict().keys()


def test_any_number_of_dimensions_goes_before_the_width():
    memory = ProductKeyMemory(dim=10, **SMALL).eval()
    x = torch.randn(2, 3, 4, 10)
    torch.testing.assert_close(memory(x[0, 0, 0]), memory(x)[0, 0, 0])
    torch.testing.assert_close(memory(x.flatten(0, 2)).view_as(x), memory(x))


def test_every_mistake_is_said_at_once_by_the_name_of_its_argument():
    with pytest.raises(
        UserErrors,
        match=r"- knn must be a whole number > 0; found many\n- keys must be one of: product, flat, .*\n  fix: did you mean product\?",
    ):
        ProductKeyMemory(16, sub_keys=8, keys="produkt", knn="many")
    with pytest.raises(
        UserErrors,
        match=r"query\.nrom is no setting\n  fix: did you mean query\.norm\?\n- query\.hidden\[0\] must be a whole",
    ):
        ProductKeyMemory(16, sub_keys=8, query={"nrom": "batch", "hidden": [-1]})
    for dim in (0, -1, 1.5, "16", None):
        with pytest.raises(UserErrors, match=r"- dim must be a whole number > 0; found .*\n- knn must be"):
            ProductKeyMemory(dim, sub_keys=8, knn=0)
    with pytest.raises(
        UserErrors, match=r"sub_keys: product keys need their number.*\n  fix: write for example `sub_keys"
    ):
        ProductKeyMemory(16)
    with pytest.raises(
        UserErrors, match=r"knn: k = 9 is more than the 8 sub-keys of a side\n  fix: choose knn <= sub_keys"
    ):
        ProductKeyMemory(16, sub_keys=8, knn=9)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_no_token_at_all_trains_as_nothing_but_padding_does(norm, kernels):
    memory = ProductKeyMemory(dim=10, kernels=kernels, **{**SMALL, "query": {"dim": 8, "norm": norm}})
    before = {name: tensor.clone() for name, tensor in memory.state_dict().items()}
    optimizer = pkm.optimizers(memory)
    x = torch.randn(0, 10, requires_grad=True)
    memory(x).sum().backward()
    optimizer.step()
    assert x.grad.shape == (0, 10)
    assert all(torch.equal(tensor, before[name]) for name, tensor in memory.state_dict().items())


@pytest.mark.parametrize("norm", ["batch", "layer", "none"])
def test_in_float64_it_computes_in_float64(norm):
    memory = ProductKeyMemory(dim=10, **{**SMALL, "query": {"dim": 8, "norm": norm}}).double()
    plain = ProductKeyMemory(dim=10, kernels="reference", **{**SMALL, "query": {"dim": 8, "norm": norm}}).double()
    plain.load_state_dict(memory.state_dict())
    x = torch.randn(4, 5, 10, dtype=torch.float64)
    out = memory(x)
    assert out.dtype is torch.float64
    torch.testing.assert_close(out, plain(x), rtol=1e-12, atol=1e-12)


def test_a_padding_mask_hides_padding_from_batch_norm_and_from_the_values():
    torch.manual_seed(1)
    memory, alone = (ProductKeyMemory(dim=10, **SMALL) for _ in range(2))
    alone.load_state_dict(memory.state_dict())
    x, mask = torch.randn(2, 5, 10), torch.ones(2, 5, dtype=torch.bool)
    mask[1, 3:] = False
    x[1, 3:] = 1e6
    out = memory(x, mask)
    torch.testing.assert_close(out[mask], alone(x[mask]))
    assert (out[~mask] == 0).all()
    torch.testing.assert_close(memory.query.norm.running_var, alone.query.norm.running_var)


COPIES = [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]


@pytest.mark.parametrize("copied", COPIES, ids=["deepcopy", "pickle"])
def test_a_copys_gradient_is_its_own(copied):
    model = nn.Sequential(nn.Linear(10, 10), ProductKeyMemory(dim=10, **SMALL))
    ValuesAdam({"values": model[1].values}, ValuesOptim())
    x = torch.randn(6, 10)
    model(x).sum().backward()
    before = model[1].values.gradient()
    other = copied(model)
    assert other[1].values.gradient() is None  # as a copied parameter has none
    other(2 * x).square().sum().backward()
    assert model[1].values.gradient() is before
    assert other[1].values.gradient() is not None and other[1].values.weight.grad is None
    assert not torch.equal(other[1].values.gradient().values, before.values)


@pytest.mark.parametrize("copied", COPIES, ids=["deepcopy", "pickle"])
def test_a_copy_made_while_backward_updates_leaves_the_originals_table_alone(copied):
    memory = ProductKeyMemory(dim=10, **SMALL)
    adam = ValuesAdam({"values": memory.values}, ValuesOptim(update="in_backward"))
    adam.begin(1.0, 1)
    other, before = copied(memory), memory.values.weight.clone()
    other(torch.randn(6, 10)).sum().backward()
    assert torch.equal(memory.values.weight, before) and torch.equal(other.values.weight, before)
    assert other.values.gradient() is not None


def test_moved_weights_are_computed_by_what_fits_them_and_shared_tables_are_one():
    first, second = (ProductKeyMemory(dim=10, **SMALL) for _ in range(2))
    second.values = first.values
    model = nn.ModuleList([first, second])
    from pkm.memory.values import tables

    assert list(tables(model)) == ["0.values"]
    assert first.backend.name == second.values.backend.name == first.query.norm.backend.name == "torch"
    model.to("meta")
    assert first.backend.name == first.values.backend.name == first.keys.backend.name == "reference"


@pytest.mark.parametrize("keys", [{"keys": "tucker", "sub_keys": 64}, {"keys": "ngram", "slots": 100}])
def test_kinds_that_need_the_model_around_them_are_refused(keys):
    with pytest.raises(UserErrors, match=r"keys: .* keys depend on the model around them"):
        ProductKeyMemory(16, **keys)


def test_the_settings_of_memory_plus_and_peer_are_arguments_too():
    memory = ProductKeyMemory(
        16, sub_keys=8, heads=2, knn=3, query={"dim": 8, "norm": "rms"}, keys_norm="rms", keys_shared_by_heads=True,
        read="experts", activation="relu", gate="silu", values_dim=6,
    )  # fmt: skip
    assert memory(torch.randn(3, 16)).shape == (3, 16)
    assert [table.weight.shape[1] for table in tables(memory).values()] == [6, 16]


def test_a_memory_that_was_saved_is_loaded_again(tmp_path):
    memory = ProductKeyMemory(10, **SMALL | {"query": {"dim": 8, "norm": "layer_halves", "hidden": [5]}})
    memory.save(str(tmp_path / "saved"))
    again = ProductKeyMemory.load(tmp_path / "saved")
    x = torch.randn(4, 10)
    assert torch.equal(memory(x), again(x)) and again.settings == memory.settings
    with pytest.raises(UserError, match="there already"):
        memory.save(tmp_path / "saved")


@pytest.mark.parametrize(
    ("file", "content"), [("memory.yaml", "dim: 12"), ("memory.yaml", "[1"), ("memory.safetensors", "x")]
)
def test_a_damaged_memory_is_named(tmp_path, file, content):
    ProductKeyMemory(10, **SMALL).save(tmp_path / "saved")
    (tmp_path / "saved" / file).write_text(content)
    with pytest.raises(UserError, match=r"saved|ProductKeyMemory cannot be made"):
        ProductKeyMemory.load(tmp_path / "saved")
    (tmp_path / "saved" / file).unlink()
    with pytest.raises(UserError, match=file):
        ProductKeyMemory.load(tmp_path / "saved")
