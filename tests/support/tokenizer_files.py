"""Files tokenizer.json of several kinds, trained by the library itself on the golden sample of news."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.text.goldens import golden

END = "<|endoftext|>"


@cache
def tokenizer_file(kind: str) -> str:
    """Content of a tokenizer.json: byte-level, metaspace (Unigram, as T5's) or wordpiece (as BERT's, truncating)."""
    news = golden("moses")["news.txt"].split("\n")
    return {"byte-level": _byte_level, "metaspace": _metaspace, "wordpiece": _wordpiece}[kind](news).to_str()


def changed(kind: str, **model: object) -> str:
    """Such a file with other settings of its model."""
    content = json.loads(tokenizer_file(kind))
    content["model"] |= model
    return json.dumps(content)


def _byte_level(news: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _train(
        tokenizer, news, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=[END, "<|pad|>"])
    )
    return tokenizer


def _metaspace(news: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    _train(
        tokenizer, news, trainers.UnigramTrainer(vocab_size=500, special_tokens=["<unk>", "</s>"], unk_token="<unk>")
    )
    return tokenizer


def _wordpiece(news: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    _train(tokenizer, news, trainers.WordPieceTrainer(vocab_size=500, special_tokens=["[UNK]", "[CLS]", "[SEP]"]))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    return tokenizer


def _train(tokenizer: Tokenizer, news: list[str], trainer: trainers.Trainer) -> None:
    trainer.show_progress = False
    tokenizer.train_from_iterator(news, trainer)
