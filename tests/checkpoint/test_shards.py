"""Tensors that some ranks wrote come back bit by bit on any other number of ranks, whole or by columns."""

import itertools

import pytest
import torch

from pkm.checkpoint.checkpoints import Checkpoints
from pkm.checkpoint.shards import own_parts
from pkm.distributed import dist
from pkm.errors import UserError
from tests.support.checkpoints import rewritten
from tests.support.fork import on_ranks

TABLES = {"table", "table.mean"}


def whole():
    generator = torch.Generator().manual_seed(0)
    return {
        "table": torch.randn(7, 8, generator=generator),
        "table.mean": torch.randn(7, 8, generator=generator).bfloat16(),
        "weight": torch.randn(5, 3, 2, generator=generator),
        "bias": torch.arange(11),
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(0.1, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
    }


def held(rank, ranks, sharded):
    """What a rank holds, and the names of what it holds columns of."""
    tensors = whole()
    if sharded:
        tensors |= {name: tensors[name].chunk(ranks, dim=1)[rank].clone() for name in TABLES}
    return tensors, TABLES if sharded else set()


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in theirs
    )


def save(root, ranks, sharded, **options):
    def write(rank):
        tensors, columns = held(rank, ranks, sharded)
        checkpoints = Checkpoints(root, 1, **options)
        checkpoints.save(3, tensors, {"a": 1}, columns=columns)
        checkpoints.wait()

    on_ranks(ranks, write)


def load(root, ranks, sharded):
    def read(rank):
        expected, columns = held(rank, ranks, sharded)
        found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        Checkpoints(root, 1).newest().copy_into(found, columns)
        return same(found, expected)

    return on_ranks(ranks, read)


LAYOUTS = [(1, False), (2, False), (4, False), (2, True), (4, True)]


@pytest.mark.parametrize(("ranks", "sharded"), LAYOUTS)
def test_what_was_written_one_way_is_read_every_other_way(tmp_path, ranks, sharded):
    save(tmp_path, ranks, sharded)
    assert same(Checkpoints(tmp_path, 1).load("latest").tensors, whole())
    for readers, by_columns in LAYOUTS[1:]:
        assert load(tmp_path, readers, by_columns) == [True] * readers


def test_names_and_shapes_in_a_manifest_do_not_tell_how_many_ranks_wrote_it(tmp_path):
    told = []
    for ranks, sharded in LAYOUTS:
        root = tmp_path / f"{ranks}-{sharded}"
        save(root, ranks, sharded)
        entries = Checkpoints(root, 1).load("latest").entries
        told.append({name: (entry["dtype"], entry["shape"]) for name, entry in entries.items()})
    assert all(one == told[0] for one in told)


def test_a_save_in_the_background_writes_the_same_files(tmp_path):
    save(tmp_path / "a", 2, True)
    save(tmp_path / "b", 2, True, in_background=True)
    files = [sorted((tmp_path / run / "step-0000003").glob("*.safetensors")) for run in "ab"]
    assert len(files[0]) == 2
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(*files, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 16])
def test_ranks_share_tensors_out_by_bytes_and_each_row_is_one_ranks(monkeypatch, ranks):
    monkeypatch.setattr(dist, "world_size", lambda: ranks)
    tensors = whole()
    covered = {name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in tensors.items()}
    sizes = []
    for rank in range(ranks):
        monkeypatch.setattr(dist, "rank", lambda rank=rank: rank)
        parts = own_parts(tensors)
        for name, part in parts.items():
            region = tuple(slice(a, a + n) for a, n in zip(part.start, part.tensor.shape, strict=True))
            assert torch.equal(tensors[name][region], part.tensor) and part.whole == list(tensors[name].shape)
            covered[name][region] += 1
        sizes.append(sum(part.tensor.nbytes for part in parts.values()))
    assert all(bool((count == 1).all()) for count in covered.values())
    largest_row = max(tensor[0].nbytes for tensor in tensors.values() if tensor.ndim and len(tensor))
    assert max(sizes) - min(sizes) <= 2 * largest_row


def test_a_rank_reads_no_file_that_holds_nothing_it_needs(tmp_path):
    save(tmp_path, 2, True)
    loaded = Checkpoints(tmp_path, 1).newest()
    (loaded.directory / "rank-00001.safetensors").unlink()
    from pkm.checkpoint.shards import Reader

    left = torch.zeros(7, 4)
    with Reader(loaded.directory, loaded.entries) as reader:
        reader.read_into(left, "table", 0)
        assert torch.equal(left, whole()["table"][:, :4])
        with pytest.raises(FileNotFoundError):
            reader.read_into(left, "table", 4)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"weight": torch.zeros(5, 3, 1)}, r"weight is F32 \[5, 3, 2\], and the model's is F32 \[5, 3, 1\]"),
        ({"table.mean": torch.zeros(7, 8)}, r"table.mean is BF16 \[7, 8\], and the model's is F32 \[7, 8\]"),
        ({"more": torch.zeros(1)}, "more is not in it"),
        ({"bias": None}, r"bias is I64 \[11\], and the model's is not there"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_the_tensor_and_nothing_is_copied(tmp_path, change, named):
    save(tmp_path, 2, False)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in whole().items()} | change
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(UserError, match=named):
        Checkpoints(tmp_path, 1).load(3).copy_into(tensors)
    assert not any(bool(tensor.any()) for tensor in tensors.values())


def test_parts_that_are_not_the_whole_of_a_tensor_are_damage(tmp_path):
    save(tmp_path, 2, True)
    entries = Checkpoints(tmp_path, 1).load(3).entries
    entries["table"]["parts"].pop()
    rewritten(tmp_path / "step-0000003", tensors=entries)
    with pytest.raises(UserError, match="parts of table that are not the whole"):
        Checkpoints(tmp_path, 1).load(3)


def test_the_smallest_of_tensors_and_more_ranks_than_rows_are_no_special_case(monkeypatch):
    for ranks, rows in itertools.product((1, 7), (0, 1, 3)):
        monkeypatch.setattr(dist, "world_size", lambda ranks=ranks: ranks)
        found = 0
        for rank in range(ranks):
            monkeypatch.setattr(dist, "rank", lambda rank=rank: rank)
            found += sum(len(part.tensor) for part in own_parts({"a": torch.ones(rows, 2)}).values())
        assert found == rows
