"""What scripts/size.py proposes is a config that has what was asked for, and says what it takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pkm.config.schema import load
from pkm.errors import UserError
from pkm.experiments.grid import load_grid
from pkm.experiments.size import number, proposed
from pkm.model.cost import flops, parameters
from tests.support.tiny import VOCAB_SIZE

ROOT = Path(__file__).parents[2]
MODERN = ROOT / "configs/modern.yaml"


@pytest.mark.parametrize(("text", "value"), [("20M", 20_000_000), ("1.5B", 1_500_000_000), ("3k", 3000), ("7", 7)])
def test_numbers_are_read_as_people_write_them(text: str, value: int) -> None:
    assert number(text, "--parameters") == value


@pytest.mark.parametrize("text", ["", "0", "M", "20T", "-3M", "1e6"])
def test_what_is_no_number_is_refused_by_the_option(text: str) -> None:
    with pytest.raises(UserError) as refused:
        number(text, "--tokens")
    assert refused.value.where == "--tokens"


@pytest.mark.parametrize("wanted", [200_000, 1_000_000, 20_000_000, 300_000_000])
@pytest.mark.parametrize("memory", [[], ["memory=null"]])
def test_a_proposal_has_about_as_many_parameters_and_tokens(
    tiny_corpus_path: Path, wanted: int, memory: list[str]
) -> None:
    path = f"corpus.path={tiny_corpus_path}"
    made = load(MODERN, proposed(MODERN, wanted, "20x", [path, *memory])).config
    dense = parameters(made, VOCAB_SIZE).dense
    assert dense == pytest.approx(wanted, rel=0.2)
    assert made.optim.steps * made.optim.batch_tokens == pytest.approx(20 * dense, rel=0.05)
    assert made.memory is None or len(made.memory_layers) == 1
    assert 15 <= made.model.dim / made.model.layers <= 70


def test_larger_runs_take_larger_batches(tiny_corpus_path: Path) -> None:
    sizes = [
        load(MODERN, proposed(MODERN, 1_000_000, tokens, [f"corpus.path={tiny_corpus_path}"])).config.optim.batch_tokens
        for tokens in ("4M", "40M", "4B")
    ]
    # 0.58 D^0.571: 3,426, 12,758 and 176,880.
    assert sizes == [4096, 16384, 131072]


def test_a_size_that_the_vocabulary_alone_exceeds_is_refused() -> None:
    with pytest.raises(UserError, match=r"the nearest model has .* with a vocabulary of 60,014"):
        proposed(MODERN, 1_000_000, "20x", ["corpus.path=prepared/none"])


def test_it_says_that_the_corpus_is_not_prepared_if_it_is_not(tiny_corpus_path: Path) -> None:
    for path, fix in (
        ("prepared/none", "prepare prepared/none, whose"),
        (tiny_corpus_path, "prepare a corpus with another"),
    ):
        with pytest.raises(UserError) as refused:
            proposed(MODERN, 100, "20x", [f"corpus.path={path}"])
        assert fix in refused.value.fix


@pytest.mark.parametrize("tokens", ["0x", "0.0000001x", f"1{'0' * 30}x"])
def test_tokens_from_which_nothing_can_be_learned_are_refused(tiny_corpus_path: Path, tokens: str) -> None:
    with pytest.raises(UserError, match="a run cannot learn from") as refused:
        proposed(MODERN, 1_000_000, tokens, [f"corpus.path={tiny_corpus_path}"])
    assert refused.value.where == "--tokens"


SEVERAL = (
    "[{layers: [2], sub_keys: 32, knn: 8, query: {dim: 16}}, {layers: [1], keys: ngram, slots: 50, place: before}]"
)


@pytest.mark.parametrize("memory", ["null", SEVERAL], ids=["dense", "memories of several kinds"])
def test_the_script_writes_a_config_that_loads_and_never_over_another(
    tiny_corpus_path: Path, tmp_path: Path, memory: str
) -> None:
    out = tmp_path / "my.yaml"
    base = tmp_path / "base.yaml"
    base.write_text(f"base: {ROOT / 'configs/modern.yaml'}\nmemory: {memory}\n")
    command = [
        sys.executable,
        ROOT / "scripts/size.py",
        "--parameters",
        "1M",
        "--base",
        base,
        "--out",
        out,
        f"corpus.path={tiny_corpus_path}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    made = load(out).config
    assert (
        parameters(made, VOCAB_SIZE).dense == pytest.approx(1_000_000, rel=0.2) and made.corpus.path == tiny_corpus_path
    )
    assert [m.query.dim for m in made.memories][:1] == [16] * (memory == SEVERAL)
    assert "tokens/s" in out.read_text() and "FLOP" in out.read_text()
    again = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert again.returncode == 2 and "is there already" in again.stderr


def test_the_cells_of_isoflop_take_as_many_flops() -> None:
    cells = load_grid("isoflop", "paper").cells
    spent = [flops(one.config, 2495).training * one.config.optim.steps * one.config.optim.batch_tokens for one in cells]
    assert len(cells) == 12 and max(spent) / min(spent) < 1.01
    assert {(one.config.memory is None, one.config.model.experts is None) for one in cells} == {
        (True, True), (True, False), (False, True),
    }  # fmt: skip
