"""Raw text to ids and back: normalise, tokenize as Moses, split as fastBPE, look up.

The ids of each whitespace chunk are cached (chunks.py says when that is exact), so that most of a text is one look-up
in a dictionary a word.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Literal

import numpy as np

from pkm.errors import UserError
from pkm.text.bounded_cache import BoundedCache
from pkm.text.bpe import END, Codes
from pkm.text.chunks import NEWLINE, document_keys, key_tokens
from pkm.text.moses import Normalization, detokenize
from pkm.text.normalize import normalize_xlm
from pkm.text.other_tokenizers import fastbpe_pieces, sacremoses_tokens
from pkm.text.vocab import CONTINUES, EOS_ID, UNK_ID, Vocab

Backend = Literal["pkm", "sacremoses", "fastbpe"]

_BYTES_REMEMBERED = 256
"""What a cached chunk or word takes with its ids: 130 bytes measured on English news, more for other scripts."""


class Encoder:
    """Documents -> ids: every line's pieces, then `</s>`; lines without a token are skipped.

    codes, vocab      pieces outside the vocabulary are split on, as `applybpe CODES VOCAB` does; what is left is <unk>
    escape            write Moses' entities (tokenizer.perl without -no-escape)
    normalize         "xlm": first the normalising chain of the paper's code base
    cache_megabytes   bound on what is remembered; a process needs about 100 MB beside it
    backend           "sacremoses" tokenizes, "fastbpe" splits with that library instead, to compare: the ids of the
                      latter are the same, those of the former nearly
    """

    def __init__(
        self,
        codes: Codes,
        vocab: Vocab,
        *,
        escape: bool = False,
        normalize: Normalization = None,
        cache_megabytes: int = 512,
        backend: Backend = "pkm",
    ):
        """Raises UserError for a backend that is not installed and for settings that do not exist."""
        if normalize not in (None, "xlm"):
            raise UserError(f"normalize is {normalize!r}", fix='choose "xlm" or none')
        if cache_megabytes < 1:
            raise UserError(f"cache_megabytes is {cache_megabytes}", fix="give at least 1")
        self.codes, self.vocab, self.escape, self.normalize = codes, vocab, escape, normalize
        self.size, self.unknown_id = vocab.size, UNK_ID
        self.end_id = EOS_ID
        self.unsampled = [i for i in range(vocab.first) if i != EOS_ID]
        """Ids that generation never gives: special ones but for the end of a line."""
        self._dtype = np.dtype(np.uint16 if vocab.size < 1 << 16 else np.uint32)
        self._inner_unknown = vocab.size  # <unk> where the word goes on; no id of the vocabulary
        self._piece_ids = _PieceIds(vocab, self._dtype, self._inner_unknown)
        self._ends = np.append(vocab.word_ends, False)
        self._pieces = self._piece_maker(backend)
        self._symbol_ids = {} if backend == "fastbpe" else _symbol_ids(self._piece_ids)
        self._tokens = sacremoses_tokens(escape) if backend == "sacremoses" else None
        capacity = cache_megabytes * 1_000_000 // _BYTES_REMEMBERED
        self._words = BoundedCache(self._word_ids, capacity // 3)
        self._chunks = BoundedCache(self._chunk_ids, capacity - capacity // 3)

    def encode(self, text: str, out: array[int]) -> int:
        """Append the ids of a document to `out`, an array of integers that hold them; returns its Moses words."""
        assert self.vocab.size <= 1 << 8 * out.itemsize, f"an array of {out.itemsize} bytes an item is too small"
        if self.normalize == "xlm":
            text = normalize_xlm(text)
        if self._tokens is None:
            data = b"".join(map(self._chunks.__getitem__, document_keys(text)))
        else:
            data = b"".join(map(self._line_ids, text.split(NEWLINE)))
        ids = np.frombuffer(data, self._dtype)
        words = int(np.count_nonzero(self._ends[ids]))
        if self._piece_ids.met_inner_unknown:
            ids = np.where(ids == self._inner_unknown, self._dtype.type(UNK_ID), ids)
        out.frombytes(ids.astype(f"{'u' if out.typecode.isupper() else 'i'}{out.itemsize}", copy=False).tobytes())
        return words

    def decode(self, ids: Iterable[int]) -> str:
        """Readable text: pieces joined, tokens detokenized, a newline for every `</s>`.

        Other specials are left out; <unk> stands where it is. Spacing that Moses dropped, and whether `@@ ` in the
        original was a mark of the pieces or its own, is not recoverable.
        """
        lines: list[str] = []
        pieces: list[str] = []
        for i in ids:
            if i == EOS_ID:
                lines.append(_readable(pieces) + NEWLINE)
                pieces = []
            elif i == UNK_ID or i >= self.vocab.first:
                pieces.append(self.vocab.pieces[i])
        return "".join(lines) + _readable(pieces)

    def prompt(self, text: str) -> list[int]:
        """What a model sees before it goes on from a text: a line begins, and the text's last line does not end."""
        ids = array("I")
        self.encode(text, ids)
        return [EOS_ID, *ids[:-1]]

    def remembered(self) -> int:
        """Chunks and words in the caches now: at most what cache_megabytes allows."""
        return self._chunks.held() + self._words.held()

    def _piece_maker(self, backend: str) -> Callable[[str], list[str]]:
        if backend == "fastbpe":
            return fastbpe_pieces(self.codes, self.vocab)
        if backend in ("pkm", "sacremoses"):
            return lambda word: self.codes.pieces(word, self._piece_ids)
        raise UserError(f"there is no text backend {backend!r}", fix="choose pkm, sacremoses or fastbpe")

    def _chunk_ids(self, key: str) -> bytes:
        if key == NEWLINE:
            return np.array([EOS_ID], self._dtype).tobytes()
        if key.isalnum() and key.isascii():
            return self._words[key]
        return self._token_ids(key_tokens(key, self.escape))

    def _line_ids(self, line: str) -> bytes:
        assert self._tokens is not None
        tokens = self._tokens(line)
        return self._token_ids(tokens) + self._chunks[NEWLINE] if tokens else b""

    def _token_ids(self, tokens: str) -> bytes:
        return b"".join(map(self._words.__getitem__, tokens.split(" ")))

    def _word_ids(self, word: str) -> bytes:
        if not word:
            return b""
        if self._symbol_ids and END not in word:
            try:
                return b"".join(map(self._symbol_ids.__getitem__, self.codes.symbols(word)))
            except KeyError:
                pass  # A symbol is not in the vocabulary: it has to be split on.
        return b"".join(map(self._piece_ids.__getitem__, self._pieces(word)))


def _symbol_ids(piece_ids: dict[str, bytes]) -> dict[str, bytes]:
    """Bytes of a piece's id by the symbol that prints as the piece: inside a word, and at its end."""
    inside = {piece.removesuffix(CONTINUES): ids for piece, ids in piece_ids.items() if piece.endswith(CONTINUES)}
    return inside | {piece + END: ids for piece, ids in piece_ids.items()}


class _PieceIds(dict[str, bytes]):
    """Bytes of a piece's id; of <unk> for a piece outside the vocabulary, or `inner_unknown` where its word goes on."""

    def __init__(self, vocab: Vocab, dtype: np.dtype, inner_unknown: int):
        ids = np.arange(vocab.first, vocab.size, dtype=dtype)
        super().__init__(zip(vocab.pieces[vocab.first :], map(bytes, ids[:, None]), strict=True))
        self._unknown, self._inner_unknown = (np.array([i], dtype).tobytes() for i in (UNK_ID, inner_unknown))
        self.met_inner_unknown = False

    def __missing__(self, piece: str) -> bytes:
        if not piece.endswith(CONTINUES):
            return self._unknown
        self.met_inner_unknown = True
        return self._inner_unknown


def _readable(pieces: list[str]) -> str:
    return detokenize(" ".join(pieces).replace(CONTINUES + " ", "").removesuffix(CONTINUES))
