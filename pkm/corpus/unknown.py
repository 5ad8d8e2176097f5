"""How much of a corpus its vocabulary does not know: numbers of models are comparable only where that is next to nothing."""

from __future__ import annotations

from pkm.corpus.store import SPLITS, Corpus

WARNS = 0.01
"""Share of <unk> among tokens from which it is warned of, and bits per byte are withheld."""


def shares(corpus: Corpus) -> dict[str, float]:
    """By split, the share of its tokens that are <unk>; splits without tokens are left out."""
    splits = {name: corpus.split(name) for name in SPLITS}
    return {name: split.unknown_share for name, split in splits.items() if split is not None and split.tokens}


def percent(share: float) -> str:
    """As people read it; what is there is not rounded to nothing."""
    return "0 %" if share == 0 else "under 0.01 %" if share < 0.0001 else f"{100 * share:.2f} %"


def warning(corpus: Corpus) -> str:
    """What to say of a corpus that is not known well enough; "" of others."""
    high = {name: share for name, share in shares(corpus).items() if share >= WARNS}
    if not high:
        return ""
    found = ", ".join(f"{percent(share)} of the tokens of {name}" for name, share in high.items())
    return (
        f"warning: {found} are <unk>: codes and vocabulary are not of this text, were learned from too little of it, or "
        "subwords.min_count is too high. "
        "A model is told nothing by <unk> and guesses it easily: perplexities are not comparable, bits per byte are withheld"
    )
