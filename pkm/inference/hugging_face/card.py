"""README.md of an exported directory: what the model is, what it read, what it scored, its settings."""

from __future__ import annotations

from typing import Any

from pkm.config.load import dump
from pkm.config.schema import Config
from pkm.files import read_json
from pkm.format import markdown_table, perplexity
from pkm.inference.trained import Trained
from pkm.machine import code_version
from pkm.model.transformer import parameters

HEAD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- {tags}
---
"""
USE = """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DIRECTORY, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(DIRECTORY{trust})
    inputs = tokenizer("The prime minister said", return_tensors="pt")
    print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50, do_sample=True)[0]))
"""


def model_card(trained: Trained, is_llama: bool) -> str:
    config, model = trained.config, trained.config.model
    tags = ["llama"] if is_llama else ["pkm", *(["product-key-memory"] if config.memory else [])]
    trust = "" if is_llama else ", trust_remote_code=True"
    kind = "a LlamaForCausalLM, which needs no code of its own" if is_llama else "PkmForCausalLM, in `modeling_pkm.py`"
    dense, values = parameters(trained.model)
    limit = "learned" if model.positions == "learned" else "trained on"
    return "".join(
        [
            HEAD.format(tags="\n- ".join(tags)),
            f"\n# {config.name}\n\n",
            f"A causal language model of {model.layers} blocks of width {model.dim} with {dense:,} dense parameters",
            _memories(config, values),
            f", after {trained.step:,} steps: {kind}.\n",
            USE.format(trust=trust),
            f"\nIt reads windows of {config.corpus.context} tokens: positions are {limit} for that many. A text begins with `</s>`, and "
            "each of its lines ends with one: generation goes on over lines until it has as many tokens as it is asked for.\n",
            "\n## Data\n\n",
            _data(trained),
            "\n## Numbers\n\n",
            _numbers(trained),
            f"\n## Settings\n\nTrained with pkm {code_version()['pkm']}; the same as `config.yaml`.\n\n```yaml\n{dump(config)}```\n",
        ]
    )


def _memories(config: Config, values: int) -> str:
    found = []
    for memory in config.memories:
        layers = ", ".join(map(str, config.layers_of(memory)))
        place = PLACES[memory.place]
        what = f"{memory.heads} heads that read {memory.knn} of {memory.size:,} slots each ({memory.keys} keys)"
        if memory.keys == "ngram":
            orders = " and ".join(map(str, memory.orders))
            what = f"rows that the last {orders} ids name, {memory.heads} each of about {memory.slots:,}"
        found.append(f"at layer {layers}, {place}, {what}")
    return f" and {values:,} values of memories: {'; '.join(found)}" if found else ""


PLACES = {
    "replace": "in place of the feed-forward network",
    "beside": "beside the feed-forward network",
    "after": "after the feed-forward network",
    "before": "before the block",
}


def _data(trained: Trained) -> str:
    splits: dict[str, Any] = trained.corpus.manifest["splits"]
    rows = [[name, *(f"{split[key]:,}" for key in COUNTS)] for name, split in splits.items() if split["documents"]]
    return markdown_table(["split", *COUNTS], rows) + f"\nCorpus `{trained.corpus.fingerprint[:16]}`.\n"


COUNTS = ("documents", "words", "tokens", "bytes")


def _numbers(trained: Trained) -> str:
    """Those of the run's report, if it is of these weights."""
    report = read_json(trained.directory / "report.json") or {}
    scored = report.get("evaluation")
    if scored is None or report.get("step") != trained.step:
        return "The run has no report of these weights.\n"
    rows = [
        (
            "scored",
            f"{scored['tokens']:,} tokens, {scored['words']:,} words, {scored['documents']:,} documents ({scored['split']})",
        ),
        ("perplexity per token", perplexity(scored["perplexity"], scored["loss"])),
        ("perplexity per word", perplexity(scored["word_perplexity"], scored["word_loss"])),
    ]
    if scored.get("bits_per_byte") is not None:
        rows.append(("bits per byte", f"{scored['bits_per_byte']:.4f}"))
    for layer, use in (scored.get("memories") or {}).items():
        rows.append((f"memory at layer {layer}", f"usage {use['percent']:.2f} %, KL {use['kl']:.4f}"))
    return markdown_table(["", ""], rows)
