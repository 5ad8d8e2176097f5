"""What a run would be, before it starts: a table of its sizes, its work, and what its ranks would send each other."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from pkm.config.rules import cut_short
from pkm.config.schema import Config, MemoryConfig
from pkm.corpus.store import vocab_size_of
from pkm.errors import UserError
from pkm.format import amount, size
from pkm.model.cost import (
    PAPER_VOCABULARY,
    bytes_per_slot,
    checkpoint_bytes,
    flops,
    parameters,
    planned_precision,
    traffic,
    training_bytes,
)

Row = tuple[str, str, str]


def summary(config: Config, vocab_size: int, ranks: int = 1) -> list[Row]:
    """(what, how much, remark) of everything worth knowing before a run starts."""
    count, work = parameters(config, vocab_size), flops(config, vocab_size)
    model = config.model
    rows: list[Row] = [
        ("model", f"{model.layers} layers x {model.dim}", _blocks(config)),
        ("vocabulary", f"{vocab_size:,}", f"context {config.corpus.context}"),
        *_expert_rows(config),
        *_memory_rows(config),
        ("parameters", amount(count.total), f"{count.total:,}"),
        ("  dense", amount(count.dense), f"{count.dense:,}: embeddings {amount(count.tokens + count.positions + count.output)}, "
         f"attention {amount(count.attention)}, feed-forward {amount(count.feed_forward)}, "
         f"queries {amount(count.query)}, keys {amount(count.keys)}"
         + (f", experts {amount(count.experts)}" if count.experts else "")),
        ("  values", amount(count.values), f"{count.values:,}"),
        ("FLOPs per token", amount(work.forward), f"forward: attention {amount(work.attention)}, feed-forward "
         f"{amount(work.feed_forward)}, output {amount(work.output)}, memory {amount(work.query + work.search + work.read)}"),
        ("", amount(work.training), "training: forward and backward"),
        *_size_rows(config, vocab_size, ranks),
    ]  # fmt: skip
    return rows


def _blocks(config: Config) -> str:
    """What the blocks are made of; what is as in the paper's model only where it is always said."""
    m = config.model
    said = {
        f"{m.heads} heads": True,
        f"{m.kv_heads} of keys and values": m.kv_heads is not None,
        f"{m.norm}-norm": True,
        "RMSNorm": m.norm_type == "rms",
        "norms of queries and keys": m.qk_norm,
        f"{m.activation} of {config.ffn}": True,
        "rotary positions": m.positions == "rotary",
        "no positions": m.positions == "none",
        f"window {m.window}": m.window is not None,
        "documents apart": m.document_mask,
        "no biases": not m.bias,
        "output of its own": not m.tie_embeddings,
        f"logits to +-{m.logit_cap or 0:g}": m.logit_cap is not None,
    }
    return ", ".join(word for word, holds in said.items() if holds)


def _expert_rows(config: Config) -> list[Row]:
    experts = config.model.experts
    if experts is None:
        return []
    layers = ", ".join(map(str, config.expert_layers))
    return [
        ("experts at layers", layers, f"{experts.count} of width {config.expert_ffn}, {experts.active} for each token")
    ]


def _memory_rows(config: Config) -> list[Row]:
    if not config.memories:
        return [("memory", "none", "a dense model")]
    return [row for memory in config.memories for row in _rows_of_a_memory(config, memory)]


def _rows_of_a_memory(config: Config, m: MemoryConfig) -> list[Row]:
    layers = ", ".join(map(str, config.layers_of(m)))
    keys = f"{m.sub_keys}^2 = {m.size:,}" if m.sub_keys else f"{m.size:,}"
    if m.expansion > 1:
        keys += f" x {m.expansion}"
    return [
        ("memory at layers", layers, {"replace": "in place of the feed-forward network", "beside": "beside the feed-forward "
         "network", "after": "after the feed-forward network", "before": "added to what the block gets"}[m.place] + (f", added {m.skip} blocks later" if m.skip else "")),
        ("slots of a memory", keys, f"{_address(m)}, kernels: {m.kernels}"),
        ("bytes per slot", f"{bytes_per_slot(config, m):,}", f"value {config.optim.values.dtype}, Adam's moments "
         f"{config.optim.values.state_dtype}, update: {config.optim.values.update}{_of_values(m)}"),
    ]  # fmt: skip


def _address(m: MemoryConfig) -> str:
    """How a token comes to its slots."""
    if m.keys == "ngram":
        return (
            f"hashes of the last {', '.join(map(str, m.orders))} ids, {m.heads} of each, of about {m.slots:,} rows each"
        )
    query = f"query {m.query.dim} ({m.query.norm} norm)"
    return f"{m.keys} keys, H = {m.heads}, k = {m.knn}, {query}{_of_keys(m)}"


def _of_keys(m: MemoryConfig) -> str:
    """What is not as in the paper."""
    said = {
        f"rank {m.rank}, {m.cores} core{'s' * (m.cores > 1)}": m.keys == "tucker",
        f"loss of cores x {m.cores_loss:g}": m.cores_loss > 0,
        "a query for each rank": m.queries_by_rank,
        "keys shared by heads": m.keys_shared_by_heads,
        f"{m.keys_norm} norm of keys": m.keys_norm != "none",
    }
    return "".join(f", {word}" for word, holds in said.items() if holds)


def _of_values(m: MemoryConfig) -> str:
    """The same."""
    said = {
        f"values of {m.values_dim}": m.values_dim is not None,
        f"{m.read} ({m.activation})": m.read == "experts",
        m.read: m.read == "experts-linear",
        "one table for all layers": m.share_values,
        f"{m.gate} gate": m.gate != "none",
        f"convolution of {m.convolution}": m.convolution is not None,
    }
    return "".join(f", {word}" for word, holds in said.items() if holds)


def _size_rows(config: Config, vocab_size: int, ranks: int) -> list[Row]:
    needed = training_bytes(config, vocab_size, ranks)
    windows = -(-config.sequences // ranks)
    at_once = min(config.optim.micro_batch or windows, windows)
    rank = f" of each of {ranks} ranks" if ranks > 1 else ""
    return [
        ("batch", f"{config.optim.batch_tokens:,} tokens", f"{config.sequences} windows, {at_once} at once a rank; "
         f"{config.optim.steps:,} steps = {amount(config.optim.steps * config.optim.batch_tokens)} tokens"),
        ("memory needed", size(needed.total), f"in training{rank}, about: weights {size(needed.weights)}, gradients up to "
         f"{size(needed.gradients)}, Adam {size(needed.adam)}, activations {size(needed.activations)} in {planned_precision(config)}"),
        ("checkpoint", size(checkpoint_bytes(config, vocab_size)), f"on disk, {config.checkpoint.keep} kept and the best"),
        *_traffic_rows(config, vocab_size, ranks if ranks > 1 else 8),
    ]  # fmt: skip


def _traffic_rows(config: Config, vocab_size: int, ranks: int) -> list[Row]:
    rows: list[Row] = []
    for values in ("replicated", "sharded") if config.memory else ("replicated",):
        parallel = config.parallel.model_copy(update={"values": values})
        sent = traffic(config.model_copy(update={"parallel": parallel}), vocab_size, ranks)
        remark = f"dense gradients {size(sent.dense)}"
        if config.memory:
            most = "up to " if values == "replicated" and config.optim.values.update != "dense" else ""
            remark += f", values {most}{size(sent.values)} {values}, BatchNorm {size(sent.batch_norm)}"
        what = f"sent in a step by each of {ranks} ranks" if not rows else ""
        rows.append((what, size(sent.total), remark))
    return rows


def table(config: Config, vocab_size: int, ranks: int = 1) -> Table:
    """The summary for a terminal."""
    grid = Table(box=None, show_header=False, title=config.name, title_justify="left")
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(style="dim")
    for row in summary(config, vocab_size, ranks):
        grid.add_row(*row)
    return grid


def print_plan(config: Config, ranks: int = 1) -> None:
    """Print the summary, with the vocabulary of the prepared corpus if it is there, else with the paper's."""
    # Imported late: torch takes seconds, and counting needs none of it.
    from pkm.device import settled

    config, known = settled(config), vocab_size_of(config.corpus.path)
    # A pipe has no width: 80 columns would break every remark.
    Console(width=None if sys.stdout.isatty() else 160).print(table(config, known or PAPER_VOCABULARY, ranks))
    if known is None:
        how = f"counted with a vocabulary of {PAPER_VOCABULARY:,}, as in the paper"
        print(f"no corpus at {config.corpus.path} yet: {how}")
    if short := cut_short(config):
        print(short)


def kernels_line(config: Config) -> str:
    """Who would compute the memories on this machine, for a dry run."""
    if not config.memories:
        return "no memory, no kernels"
    from pkm.device import pick_device  # late, as above
    from pkm.memory.kernels.backend import choose

    def line(wanted: str) -> str:
        try:
            return f"kernels on this machine: {choose(wanted, pick_device(config))}"
        except UserError as missing:  # a login node may well lack the GPU that the run will have
            return f"kernels: {wanted}; on this machine not to be told: {missing.what}"

    return "\n".join(line(wanted) for wanted in dict.fromkeys(m.kernels for m in config.memories))
