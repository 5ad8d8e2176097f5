"""Tokenizers of other projects, called as the encoder calls its own, to compare with."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from pkm.errors import UserError
from pkm.text.bpe import Codes
from pkm.text.vocab import Vocab


def sacremoses_tokens(escape: bool) -> Callable[[str], str]:
    """Line -> its tokens with single spaces between, by sacremoses. Raises UserError where it is not installed."""
    try:
        from sacremoses import MosesTokenizer
    except ImportError as error:
        raise _missing("sacremoses", "pip install sacremoses") from error
    tokenizer = MosesTokenizer(lang="en")
    return lambda line: str(tokenizer.tokenize(line, escape=escape, return_str=True)).strip()


def fastbpe_pieces(codes: Codes, vocab: Vocab) -> Callable[[str], list[str]]:
    """Word -> its pieces, by fastBPE's own C++. Raises UserError where it is not installed."""
    try:
        from fastBPE import fastBPE
    except ImportError as error:
        how = "pip install setuptools wheel Cython, then pip install --no-build-isolation fastBPE"
        raise _missing("fastBPE", how) from error
    with tempfile.TemporaryDirectory() as folder:
        codes.save(Path(folder) / "codes")
        vocab.save(Path(folder) / "vocab")
        applier = fastBPE(f"{folder}/codes", f"{folder}/vocab")
    return lambda word: applier.apply([word])[0].split(" ")


def _missing(library: str, how: str) -> UserError:
    return UserError(f"the text backend {library} is not installed", fix=f"{how}; or use the backend pkm")
