"""docs/memories.md: every memory that it shows can be had, and costs what its table says."""

from pathlib import Path

import pytest
import torch
import yaml

from pkm.config.rules import impossible
from pkm.model import cost
from pkm.model.summary import summary
from pkm.model.transformer import build_model
from tests.support.tiny import tiny_config

PAGE = (Path(__file__).parents[2] / "docs" / "memories.md").read_text()
MODEL = {"layers": 12, "dim": 768, "heads": 12}


def shown() -> list:
    """What stands in the page's indented parts."""
    found, lines = [], []
    for line in [*PAGE.splitlines(), ""]:
        if line.startswith("    "):
            lines.append(line[4:])
        elif lines:
            found.append(yaml.safe_load("\n".join(lines))["memory"])
            lines = []
    return found


def config(memory, **sections):
    several = memory if isinstance(memory, list) else [memory]
    return tiny_config(memory=several, model=MODEL, corpus={"context": 256}, optim={"batch_tokens": 2048}, **sections)


@pytest.mark.parametrize(
    "memory", shown(), ids=lambda m: "several" if isinstance(m, list) else m.get("keys", "product")
)
def test_it_can_be_counted_and_smaller_it_runs(memory) -> None:
    whole = config(memory)
    assert impossible(whole) == [] and summary(whole, 30_000)
    small = [dict(m, **({"sub_keys": 8} if "sub_keys" in m else {"slots": 50}), knn=4) for m in
             (memory if isinstance(memory, list) else [memory])]  # fmt: skip
    model = build_model(config(small), 50).eval()
    ids = torch.randint(14, 50, (1, 6))
    with torch.no_grad():
        assert model(ids[:, :-1], ids[:, 1:]).isfinite()


def test_the_tables_numbers_are_those_that_are_counted() -> None:
    _, *kinds = shown()
    names = ["PKM", "Memory+", "PEER", "UltraMem", "UltraMemV2", "Engram", "bigrams"]
    assert len(kinds) == len(names)
    for name, memory in zip(names, kinds, strict=True):
        c = config(memory)
        work = cost.flops(c, 30_000)
        values, flops = cost.parameters(c, 30_000).values / 1e6, (work.query + work.search + work.read) / 1e6
        (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| {name} |")]
        told = row.split("|")[-2].replace(" M", "").split("(")[0].split(";")
        assert float(told[0]) == pytest.approx(values, rel=0.01)
        assert float(told[1]) == pytest.approx(flops, rel=0.04)
