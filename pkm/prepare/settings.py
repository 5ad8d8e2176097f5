"""The schema of data/*.yaml: every setting of a preparation, its unit and its default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from pkm.config.part import Natural, Part, Positive
from pkm.text.vocab import UNIVERSAL, may_be_a_piece

END = "<|endoftext|>"
"""Ends a document where a byte-level BPE is learned here, unless `end` says otherwise."""

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Megabytes = Annotated[float, Field(gt=0, allow_inf_nan=False)]


IDS = ("parquet-ids", "nanogpt", "llm.c", "megatron")
"""Formats of text that is tokenised already."""


class Source(Part):
    """Files of one kind."""

    path: str | tuple[str, ...]
    """A file, a folder (read recursively), a glob, or a list of these; local, or a URL that fsspec knows (s3://, hf://, ...)."""
    format: Literal["auto", "text", "jsonl", "parquet", "warc", "parquet-ids", "nanogpt", "llm.c", "megatron"] = "auto"
    """auto = by the name's ending: .txt, .jsonl, .parquet, .warc or .wet, each also compressed (.gz, .zst, .xz). The last four
    are text that is tokenised already: lists of ids in a column of Parquet, or files .bin (Megatron's with .idx beside)."""
    documents: Literal["file", "line", "blank"] = "file"
    """Plain text: one document a file, one a line, or separated by blank lines."""
    column: str = "text"
    """JSONL and Parquet: where the article's text is, or its ids."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Share of the corpus's bytes that are to be of this source, beside the weights of the others: any positive numbers, for
    every source or for none. Nothing is repeated: the source that runs out first ends the mixture. null = all of it."""


class HeldOut(Part):
    valid: Natural = 5000
    """Articles of the validation split."""
    test: Natural = 5000
    """Articles of the test split."""


class Filters(Part):
    min_words: Natural = 1
    """Articles of fewer words (split at white space) are dropped."""
    max_words: Positive | None = None
    """Articles of more words are dropped; null = none are."""
    language: Annotated[str, Field(pattern="^[a-z]{2,3}$")] | None = "en"
    """Articles identified as another language are dropped; null = none are. ISO 639 code."""
    language_confidence: Share = 0.3
    """Probability below which a language does not count as identified, and the article is dropped."""
    duplicates: Literal["drop", "keep"] = "drop"
    """drop: of articles with the same text only the first stays. Copies of held-out articles are dropped either way."""
    near_duplicates: Literal["drop", "keep"] = "keep"
    """drop: of articles that share most of their runs of five words only one stays, in all splits together (datatrove's MinHash,
    14 buckets of 8: found with 92 % probability where four fifths are shared)."""


class Limits(Part):
    document_megabytes: Megabytes = 16
    """A record that unpacks to more is skipped before it is unpacked whole."""
    damaged: Share = 0.01
    """Share of records that cannot be read, or of bytes lost with files that end early, beyond which the run stops."""


class Subwords(Part):
    """Moses tokens split by fastBPE's merges, unless `learn` or `tokenizer` names another way."""

    learn: Literal["moses", "byte-level"] = "moses"
    """moses: `codes` merges of Moses tokens; byte-level: BPE of the text's bytes as GPT-2's, `vocab_size` tokens, by the library
    of the extra `tokenizers`. Words of the latter are what stands between white space."""
    codes: Positive = 60000
    """BPE merges to learn."""
    vocab_size: Positive | None = None
    """With `learn: byte-level`: tokens of the vocabulary, `end`, `specials` and the 256 bytes included. With sources of ids and
    no `tokenizer`: how many there are, from 0 on."""
    sample_megabytes: Megabytes = 1024
    """Text to learn them from, drawn from the training articles by their hashes."""
    min_count: Positive = 1
    """Subwords seen fewer times in the sample are left out of the vocabulary."""
    specials: tuple[Annotated[str, Field(pattern=r"^\S+$")], ...] = tuple(f"<special{i}>" for i in range(10))
    """Marks for uses of one's own, with ids from 4 on, before those of subwords (the paper's code has ten)."""
    codes_file: Path | None = None
    """fastBPE codes to use instead of learning."""
    vocab_file: Path | None = None
    """fastBPE vocabulary that goes with codes_file."""
    tokenizer: Path | None = None
    """Hugging Face tokenizer.json to use instead of Moses tokens and codes, kind and all; needs the extra `tokenizers`. Words
    are then what stands between white space."""
    end: str | None = None
    """With `tokenizer`: its token to put after every document; null = <|endoftext|>, </s> or another usual one that it has.
    With `learn: byte-level`: its name; null = <|endoftext|>."""

    end_id: Natural | None = None
    """With sources of ids and no `tokenizer`: the id that ends a document (GPT-2's: 50256)."""


class Tokenizer(Part):
    escape: bool = False
    """Write &, <, > and others as Moses' XML entities (tokenizer.perl without -no-escape)."""
    normalize: Literal["xlm"] | None = None
    """xlm: XLM's chain (replace-unicode-punctuation, normalize-punctuation, remove-non-printing-char) comes first."""
    backend: Literal["pkm", "sacremoses", "fastbpe"] = "pkm"
    """Who tokenizes and splits: sacremoses, or fastbpe where it is installed, are there to compare with."""


class Slurm(Part):
    partition: str | None = None
    """Partition to submit to; needed for `executor: slurm`."""
    hours: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 12
    """Time limit of one job."""
    memory_gigabytes: Positive = 4
    """Memory of one worker."""
    options: dict[str, str] = Field(default={})
    """Further options of sbatch, without dashes: {account: me}."""


class PrepareConfig(Part):
    """A preparation, whole. The result depends on everything but `executor`, `workers` and `slurm`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Of the corpus."""
    output: Path | None = None
    """Directory to write; null = prepared/<name>."""
    download: Literal["lee_background"] | None = None
    """Sample corpus to fetch first, into data/raw."""
    sources: Annotated[tuple[Source, ...], Field(min_length=1)]
    """What to read, in this order."""
    held_out: HeldOut = HeldOut()
    filters: Filters = Filters()
    limits: Limits = Limits()
    subwords: Subwords = Subwords()
    tokenizer: Tokenizer = Tokenizer()
    executor: Literal["local", "slurm"] = "local"
    """Workers of this machine, or SLURM jobs (run the command on a login node; it waits for them)."""
    workers: Positive | None = None
    """Tasks at a time; null = one a core (local), as many as SLURM starts (slurm)."""
    slurm: Slurm = Slurm()

    @property
    def is_moses(self) -> bool:
        """Whether ids are those of Moses tokens and codes."""
        return self.subwords.tokenizer is None and self.subwords.learn == "moses" and not self.ids_given

    @property
    def ids_given(self) -> bool:
        """Whether the text is tokenised already: sources of ids are alone, or refused."""
        return any(source.format in IDS for source in self.sources)

    @property
    def counts_words(self) -> bool:
        """Whether merges are learned from the counts of Moses tokens."""
        return self.is_moses and self.subwords.codes_file is None

    @property
    def weights(self) -> list[float] | None:
        """Of the sources, where they are mixed."""
        given = [source.weight for source in self.sources if source.weight is not None]
        return given if len(given) == len(self.sources) else None

    @property
    def directory(self) -> Path:
        return self.output or Path("prepared") / self.name


def _contradictions_of_subwords(config: PrepareConfig) -> list[tuple[str, str, str]]:
    """As `impossible`: ways of making subwords that exclude each other."""
    subwords, found = config.subwords, []
    learned = subwords.learn == "byte-level"
    for name in ("codes_file", "tokenizer"):
        if learned and getattr(subwords, name) is not None:
            found.append(
                ("subwords.learn", f"with {name} there is nothing to learn", f"leave out one of learn and {name}")
            )
    if subwords.tokenizer is not None and subwords.codes_file is not None:
        fix = "give a tokenizer, or codes and vocabulary"
        found.append(("subwords.tokenizer", "codes_file says how to split words, too", fix))
    if subwords.end is not None and subwords.tokenizer is None and not learned:
        fix = "leave it out"
        found.append(("subwords.end", "it goes with subwords.tokenizer or `learn: byte-level`", fix))
    if not config.is_moses and config.tokenizer != Tokenizer():
        what = "these are settings of Moses' tokens, which subwords.tokenizer and `learn: byte-level` do without"
        found.append(("tokenizer", what, "leave the section out"))
    if config.ids_given:
        found += _contradictions_of_ids(config)
    elif subwords.end_id is not None:
        fix = "leave it out; `end` names a token of a tokenizer"
        found.append(("subwords.end_id", "it goes with sources of ids (format: nanogpt, ...)", fix))
    if not config.ids_given and learned != (subwords.vocab_size is not None):
        what = "how many tokens to learn is not said" if learned else "it goes with `learn: byte-level`"
        fix = "give a number, such as 32000" if learned else "leave it out; `codes` is the number of merges"
        found.append(("subwords.vocab_size", what, fix))
    least = 256 + 1 + len(subwords.specials)
    if learned and subwords.vocab_size is not None and subwords.vocab_size < least:
        what = f"256 bytes, the end of a document and {len(subwords.specials)} specials are {least} tokens already"
        found.append(("subwords.vocab_size", what, "choose a larger number, such as 32000"))
    if learned and subwords.sample_megabytes >= 2048:
        what = "the library counts pairs in 32 bits, which may not suffice for as much text"
        found.append(("subwords.sample_megabytes", what, "choose less than 2048"))
    if learned and (subwords.end or END) in subwords.specials:
        found.append(
            ("subwords.specials", f"{subwords.end or END} ends a document", "give every mark a name of its own")
        )
    return found


def _contradictions_of_ids(config: PrepareConfig) -> list[tuple[str, str, str]]:
    """As `impossible`, of text that is tokenised already."""
    subwords, filters, found = config.subwords, config.filters, []
    for number, source in enumerate(config.sources):
        if source.format not in IDS:
            what = f"it is text ({source.format}), and other sources are ids"
            found.append((f"sources[{number}].format", what, "prepare text and ids apart"))
    for name in ("learn", "codes_file"):
        if getattr(subwords, name) not in ("moses", None):
            found.append((f"subwords.{name}", "ids come from a tokenizer that is there already", "leave it out"))
    for name in ("vocab_size", "end_id"):
        if subwords.tokenizer is None and getattr(subwords, name) is None:
            fix = "give it (GPT-2's ids: vocab_size 50257, end_id 50256), or `tokenizer`, which says it"
            found.append((f"subwords.{name}", "what the sources' ids mean is not said", fix))
        elif subwords.tokenizer is not None and getattr(subwords, name) is not None:
            found.append((f"subwords.{name}", "subwords.tokenizer says it", "leave it out"))
    if subwords.vocab_size is not None and subwords.end_id is not None and subwords.end_id >= subwords.vocab_size:
        what = f"{subwords.end_id} is none of the ids 0 to {subwords.vocab_size - 1}"
        found.append(("subwords.end_id", what, "choose one of them, or a larger vocab_size"))
    if subwords.tokenizer is None:
        plain = {"language": None, "max_words": None, "min_words": 1, "near_duplicates": "keep"}
        for name, value in plain.items():
            if getattr(filters, name) != value:
                fix = f"set it to {'null' if value is None else value}, or give `subwords.tokenizer`, by which ids are read"
                found.append((f"filters.{name}", "nothing is known of ids but their numbers", fix))
    return found


LATER = {"filters": ("near_duplicates",), "subwords": ("learn", "vocab_size", "tokenizer", "end", "end_id")}
"""Settings of later versions: where they say nothing, a preparation is the one that it was before there were any."""


def settings_that_matter(config: PrepareConfig, exclude: Any = None) -> dict[str, Any]:
    """All settings, JSON-ready, but for later ones at their defaults."""
    settings = config.model_dump(mode="json", exclude=exclude)
    for source in settings.get("sources", ()):
        if source.get("weight") is None:
            source.pop("weight", None)
    for section, names in LATER.items():
        before = type(getattr(config, section))().model_dump(mode="json", include=set(names))
        for name in names:
            if settings[section][name] == before[name]:
                del settings[section][name]
    return settings


def impossible(config: PrepareConfig) -> list[tuple[str, str, str]]:
    """(dotted key, what is wrong, how to fix it) of settings that contradict each other."""
    found = []
    if (config.subwords.codes_file is None) != (config.subwords.vocab_file is None):
        missing = "vocab_file" if config.subwords.vocab_file is None else "codes_file"
        found.append(
            (f"subwords.{missing}", "codes and vocabulary go together", "give both files, or neither to learn")
        )
    found += _contradictions_of_subwords(config)
    weighed = [number for number, source in enumerate(config.sources) if source.weight is not None]
    if weighed and len(weighed) < len(config.sources):
        without = next(i for i in range(len(config.sources)) if i not in weighed)
        fix = "give every source a weight, or none"
        found.append((f"sources[{without}].weight", "it has none, and other sources have", fix))
    if weighed and config.filters.duplicates == "keep":
        what = "how often a text is there would change what the weights of sources say"
        found.append(("filters.duplicates", what, "drop duplicates, or leave out the weights"))
    if config.filters.near_duplicates == "drop" and config.filters.duplicates == "keep":
        fix = "drop both, or keep near-duplicates, too"
        found.append(("filters.duplicates", "near-duplicates are dropped, and copies are the nearest", fix))
    specials = config.subwords.specials
    for number, special in enumerate(specials):
        key = f"subwords.specials[{number}]"
        if special in UNIVERSAL or special in specials[:number]:
            found.append((key, f"{special} is there already", "give every mark a name of its own"))
        elif config.counts_words and may_be_a_piece(special, config.tokenizer.escape):
            fix = f"write it so that no word of a text can be it, such as <{special.strip('<>@') or 'mark'}>"
            found.append((key, f"{special} may be a word of the text, or a part of one", fix))
    if config.executor == "slurm" and config.slurm.partition is None:
        found.append(("slurm.partition", "SLURM needs a partition", "name one (`sinfo` lists them)"))
    if config.filters.max_words is not None and config.filters.max_words < config.filters.min_words:
        found.append(("filters.max_words", "it is below filters.min_words", "choose a larger one"))
    return found
