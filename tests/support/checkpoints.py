"""Small checkpoints to save, spoil and load."""

import json

import torch

from pkm.checkpoint import manifest
from pkm.checkpoint.checkpoints import Checkpoints

SHARD, MANIFEST = "rank-00000.safetensors", "manifest.json"


def weights(step, size=40):
    generator = torch.Generator().manual_seed(step)
    return {"a": torch.randn(size, 3, generator=generator), "b": torch.arange(step)}


def saved(root, *steps, keep=10, best=()):
    checkpoints = Checkpoints(root, keep)
    for step in steps:
        checkpoints.save(step, weights(step), {"step was": step}, best=step in best)
    return checkpoints


def holds(loaded, step):
    expected = weights(step)
    return (
        loaded.step == step
        and loaded.record == {"step was": step}
        and loaded.tensors.keys() == expected.keys()
        and all(torch.equal(loaded.tensors[name], tensor) for name, tensor in expected.items())
    )


def names(root):
    return sorted(path.name for path in root.iterdir())


def warnings_of(root, load=Checkpoints.newest, keep=10):
    heard = []
    return load(Checkpoints(root, keep, warn=heard.append)), heard


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def rewritten(directory, **changes):
    """Change the manifest the way an attacker would: with its hash made right again."""
    written = json.loads((directory / MANIFEST).read_text())
    del written["sha256"]
    (directory / MANIFEST).write_bytes(manifest.sealed(written | changes))
