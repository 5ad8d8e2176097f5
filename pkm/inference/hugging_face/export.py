"""A trained model as a directory that transformers loads.

    config.json  generation_config.json    what the model is; a Llama where it is one, else PkmForCausalLM
    model-0000I-of-0000N.safetensors       weights, the values of memories in files of their own; model.safetensors.index.json
    modeling_pkm.py  blocks_pkm.py  ...    the model in plain PyTorch, unless it is a Llama
    tokenizer_config.json, tokenization_pkm.py, chunks.py, ...  codes  vocab  moses.json
    README.md  config.yaml                 data, numbers and settings for people

Nothing here needs transformers: the directory does, to be loaded.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from pkm.checkpoint import tensor_file
from pkm.config.load import dump
from pkm.config.schema import Config, MemoryConfig
from pkm.corpus.store import TOKENIZER, Corpus, OtherVocab
from pkm.errors import UserError
from pkm.files import atomic_write, explained, json_text, publish
from pkm.inference.adapters import llama
from pkm.inference.adapters.names import to_theirs
from pkm.inference.hugging_face.card import model_card
from pkm.inference.trained import Trained
from pkm.machine import code_version
from pkm.memory import hashing
from pkm.text import perl_classes
from pkm.text.vocab import PAD_ID

INDEX = "model.safetensors.index.json"
MOST_BYTES = 4_000_000_000
"""Of a file of weights that holds more than one tensor."""

HERE, TEXT = Path(__file__).parent, Path(perl_classes.__file__).parent
MODEL_FILES = ("modeling_pkm.py", "blocks_pkm.py", "memories_pkm.py", "keys_pkm.py")
TEXT_MODULES = ("chunks", "detokenize", "moses_rules", "normalize")
"""Of pkm.text, what the tokenizer needs besides perl_classes."""

# What MODEL_FILES compute. A setting that is in neither set is refused unless it has its default.
MODEL = {
    "layers", "dim", "heads", "kv_heads", "qk_norm", "window", "ffn", "activation", "experts", "positions", "rotary",
    "norm", "norm_type", "norm_eps", "embedding_norm", "bias", "tie_embeddings", "logit_cap", "dropout",
    "document_mask",
}  # fmt: skip
MEMORY = {
    "layers", "count", "keys", "sub_keys", "slots", "orders", "heads", "keys_norm", "keys_shared_by_heads", "rank", "cores",
    "cores_loss", "expansion", "queries_by_rank", "knn", "query", "read", "activation", "values_dim", "input_dim", "gate", "convolution",
    "share_values", "values_std", "place", "skip", "kernels",
}  # fmt: skip
QUERY = {"dim", "hidden", "norm"}
# Of settings that name a kind, the kinds that it computes.
KINDS = {
    "memory.keys": {"product", "flat", "tucker", "ngram"},
    "memory.read": {"rows", "experts", "experts-linear"},
    "memory.gate": {"none", "silu", "engram"},
    "memory.place": {"replace", "beside", "after", "before"},
    "memory.keys_norm": {"none", "rms"},
    "memory.query.norm": {"batch", "layer", "layer_halves", "rms", "none"},
}


def export_hugging_face(trained: Trained, directory: Path, most_bytes: int = MOST_BYTES) -> None:
    """Write `directory` whole.

    UserError if it is there already and not empty, if it cannot be written, or if the model has a setting that
    MODEL_FILES do not know.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError("it is there already, and not empty", str(directory), "remove it, or name another directory")
    config = trained.config
    refuse_unknown(config)
    is_llama = llama.fits(config)
    tensors = dict(trained.model.state_dict())
    values = {f"{name}.weight" for name in trained.model.tables()}
    if is_llama:
        tensors = to_theirs(llama.table(config), tensors)
    described = llama.config_json(config, trained.corpus.vocab.size) if is_llama else config_json(trained)
    temporary = directory.with_name(f".{directory.name}.tmp")
    try:
        with explained(directory):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            write_weights(temporary, tensors, values, most_bytes)
            if not is_llama:
                write_code(temporary, [HERE / name for name in MODEL_FILES])
            write_tokenizer(trained.corpus, config.corpus.context, temporary)
            for name, content in {
                "config.json": described | about(trained),
                "generation_config.json": generation(trained),
            }.items():
                atomic_write(temporary / name, json_text(content, indent=2))
            atomic_write(temporary / "config.yaml", dump(config))
            atomic_write(temporary / "README.md", model_card(trained, is_llama))
        publish(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def refuse_unknown(config: Config) -> None:
    """UserError that names a setting which MODEL_FILES do not know."""
    sections: list[tuple[str, Any, set[str]]] = [("model", config.model, MODEL)]
    for memory in config.memories:
        sections += [("memory", memory, MEMORY), ("memory.query", memory.query, QUERY)]
    for section, settings, known in sections:
        for key, field in type(settings).model_fields.items():
            name, value = f"{section}.{key}", getattr(settings, key)
            if (key not in known and value != field.default) or value not in KINDS.get(name, {value}):
                what = f"{name}: {value} is not yet in the model that is written for transformers"
                raise UserError(what, "--format hf", "export it with --format pkm")


def config_json(trained: Trained) -> dict[str, Any]:
    """What PkmForCausalLM is made of."""
    config = trained.config
    model, experts = config.model, config.model.experts
    memories = {
        str(layer): {name: memory_json(config, memory, layer) for name, memory in config.memories_at(layer).items()}
        for layer in sorted({*config.memory_layers})
    }
    of_experts = experts and {"count": experts.count, "active": experts.active, "ffn": config.expert_ffn}
    named = {"layers", "dim", "heads", "kv_heads", "ffn", "experts", "tie_embeddings", "document_mask"}
    return {
        "architectures": ["PkmForCausalLM"],
        "model_type": "pkm",
        "auto_map": {
            "AutoConfig": "modeling_pkm.PkmConfig",
            "AutoModelForCausalLM": "modeling_pkm.PkmForCausalLM",
        },
        "vocab_size": trained.corpus.vocab.size,
        "hidden_size": model.dim,
        "intermediate_size": config.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads or model.heads,
        "max_position_embeddings": config.corpus.context,
        "block": model.model_dump(mode="json", include=MODEL - named),
        "memories": memories,
        "experts": {str(layer): of_experts for layer in config.expert_layers},
    }


def memory_json(config: Config, memory: MemoryConfig, layer: int) -> dict[str, Any]:
    elsewhere = {"layers", "count", "values_std", "kernels"}
    described = {
        **memory.model_dump(mode="json", include=MEMORY - elsewhere),
        "section": config.memories.index(memory),
    }
    if memory.keys == "ngram":
        described["rows"] = hashing.sizes(memory, config.layers_of(memory).index(layer))
    return described


def about(trained: Trained) -> dict[str, Any]:
    """What config.json says of either kind, and what is needed to read the directory back (pkm)."""
    return {
        "tie_word_embeddings": trained.config.model.tie_embeddings,
        "bos_token_id": trained.corpus.encoder().end_id,
        "eos_token_id": trained.corpus.encoder().end_id,
        "pad_token_id": pad_id(trained.corpus),
        "use_cache": True,
        "dtype": "float32",
        "pkm": {"step": trained.step, "corpus": trained.corpus.fingerprint, "code": code_version()},
    }


def generation(trained: Trained) -> dict[str, Any]:
    """As pkm generates: a line's end is no end of the text, and ids without a piece of text are never sampled."""
    encoder, pad = trained.corpus.encoder(), pad_id(trained.corpus)
    return {
        "bos_token_id": encoder.end_id,
        "pad_token_id": pad,
        "suppress_tokens": encoder.unsampled,
        "use_cache": True,
    }


def pad_id(corpus: Corpus) -> int:
    """What fills up shorter texts of a batch, which attention does not see: a tokenizer.json may have nothing for it."""
    return corpus.vocab.end_id if isinstance(corpus.vocab, OtherVocab) else PAD_ID


def write_weights(directory: Path, tensors: dict[str, Tensor], values: set[str], most_bytes: int) -> None:
    """Safetensors files of at most so many bytes, or one tensor, and an index; `values` apart from all others."""
    files: list[dict[str, Tensor]] = []
    for group in ([n for n in tensors if n not in values], [n for n in tensors if n in values]):
        held = most_bytes + 1
        for name in group:
            held += tensors[name].nbytes
            if held > most_bytes:
                files.append({})
                held = tensors[name].nbytes
            files[-1][name] = tensors[name]
    names = [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    if len(files) == 1:
        names = ["model.safetensors"]
    for name, part in zip(names, files, strict=True):
        tensor_file.write(directory / name, part, {"format": "pt"})
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": {tensor: name for name, part in zip(names, files, strict=True) for tensor in part},
        }
        atomic_write(directory / INDEX, json_text(index, indent=2))


def write_tokenizer(corpus: Corpus, context: int, directory: Path) -> None:
    """The tokenizer's files and the code that reads them; of a tokenizer.json, which transformers reads itself, its own."""
    if isinstance(corpus.vocab, OtherVocab):
        shutil.copy(corpus.path / TOKENIZER, directory / TOKENIZER)
        end = corpus.manifest["tokenizer"]["end"]
        described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "bos_token": end, "pad_token": end}
        described |= {"model_max_length": context, "padding_side": "left", "clean_up_tokenization_spaces": False}
        atomic_write(directory / "tokenizer_config.json", json_text(described, indent=2))
        return
    for name in ("codes", "vocab"):
        shutil.copy(corpus.path / name, directory / name)
    settings = {"specials": corpus.vocab.specials, "encoder": corpus.manifest["tokenizer"]}
    atomic_write(directory / "moses.json", json.dumps(settings, indent=1) + "\n")
    tokenizer = {
        "tokenizer_class": "PkmTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_pkm.PkmTokenizer", None]},
        "model_max_length": context,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    atomic_write(directory / "tokenizer_config.json", json_text(tokenizer, indent=2))
    write_code(directory, [HERE / "tokenization_pkm.py", *(TEXT / f"{name}.py" for name in TEXT_MODULES)])
    atomic_write(directory / "perl_classes.py", perl_classes_source())


def write_code(directory: Path, sources: list[Path]) -> None:
    """Modules of pkm side by side, where they find each other as transformers loads them."""
    for source in sources:
        text = re.sub(
            r"^from pkm\.\S+\.(\w+) import", r"from .\1 import", source.read_text("utf-8"), flags=re.MULTILINE
        )
        atomic_write(directory / source.name, text)


def perl_classes_source() -> str:
    """pkm.text.perl_classes with its lists of code points written out."""
    constants = {
        name: value for name, value in vars(perl_classes).items() if name.isupper() and not name.startswith("_")
    }
    lines = [f"{name} = {_literal(value)}" for name, value in sorted(constants.items())]
    return '"""The Unicode classes that Moses tests for, as perl 5.36 defines them."""\n\n' + "\n".join(lines) + "\n"


def _literal(value: str | frozenset[str]) -> str:
    return ascii(value) if isinstance(value, str) else f"frozenset({sorted(value)!a})"
