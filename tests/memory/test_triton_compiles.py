"""The Triton kernels compile for A100, H100 and B200 (sm_80, sm_90, sm_100), which needs no GPU: the assembler comes with Triton.

The interpreter checks what a kernel computes; only the compiler says whether it can be built, and whether its registers do.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs triton, not interpreted", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pkm.memory.kernels import triton_adam, triton_dots, triton_read, triton_rows, triton_search, triton_statistics
from pkm.memory.kernels.pairs import candidate_pairs
from pkm.model import triton_loss

INTEGERS, LONGS, HALVES, BYTES = "*i32", "*i64", "*bf16", "*i8"
CAPABILITIES = [80, 90, 100]


def registers_and_stack(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int, capability: int = 90
) -> tuple[int, int]:
    """Compile; what is not named is a pointer to fp32, all pointers aligned to 16 bytes; i32:16 is a multiple of 16."""
    found = {n: "constexpr" if n in constants else types.get(n, "*fp32") for n in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(found.values()) if t.startswith("*") or ":16" in t}
    signature = {n: t.removesuffix(":16") for n, t in found.items()}
    source = ASTSource(kernel, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    used = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert used, said
    return int(used[1]), int(used[2])


def search_sizes(sub_keys: int, k: int) -> dict[str, int]:
    k_width = max(2, triton.next_power_of_2(k))
    width = max(k_width, triton.next_power_of_2(sub_keys))
    pairs = max(triton.next_power_of_2(len(candidate_pairs(k))), k_width)
    piece, group = triton_search.piece_size(width, k_width), triton_search.group_size(width, k_width)
    return {"H": 4, "C": sub_keys, "PIECE": piece, "S": group, "K": k, "KP": k_width, "P": pairs, "BR": 1}


# Sub-keys a side, k, compute capability -> registers a thread at most: a processor has 65,536 for programs of 32 threads.
SEARCHES = {
    (512, 32, 80): 96, (512, 32, 90): 96, (512, 32, 100): 96, (1024, 32, 90): 128, (48, 12, 90): 128, (1, 1, 90): 128,
    (4096, 64, 90): 168, (11_314, 32, 90): 168, (16_384, 32, 80): 168, (16_384, 32, 90): 168, (16_384, 32, 100): 168,
}  # fmt: skip


@pytest.mark.parametrize("sub_keys, k, capability", SEARCHES)
def test_the_search_compiles_without_spilling(sub_keys: int, k: int, capability: int) -> None:
    sizes = search_sizes(sub_keys, k)
    types = {"pairs": INTEGERS, "out_slots": INTEGERS, "unproven": BYTES, "N": "i32", "END": "i32"}
    registers, spilled = registers_and_stack(triton_search.search_kernel, types, sizes, 1, capability)
    assert spilled == 0 and registers <= SEARCHES[sub_keys, k, capability]
    repair = {key: sizes[key] for key in ("H", "C", "K", "KP", "P")}
    repair |= {"PIECE": min(triton_search.REPAIR_PIECE, sizes["PIECE"]), "ROWS": triton_search.REPAIR_ROWS}
    assert registers_and_stack(triton_search.repair_kernel, types, repair, 1, capability)[1] == 0


def test_score_gradients_compile_without_spilling() -> None:
    types = {"slots": INTEGERS, "out": HALVES}
    constants = {"C": 512, "K": 32, "KP": 32, "ZEROS": triton_search.ZEROS}
    assert registers_and_stack(triton_search.score_gradient_kernel, types, constants, 1)[1] == 0


def test_the_read_compiles_without_spilling() -> None:
    types = {"table": HALVES, "indices": INTEGERS, "out": HALVES}
    constants = {"J": 128, "D": 1024, "BD": triton_read.READ_BYTES // 2, "BJ": triton_read.READ_ROWS}
    assert registers_and_stack(triton_read.read_kernel, types, constants, triton_read.READ_WARPS)[1] == 0


def test_products_with_rows_compile_without_spilling() -> None:
    types = {"x": HALVES, "table": HALVES, "indices": INTEGERS}
    constants = {"J": 128, "D": 1024, "BD": triton_dots.COLUMNS, "BJ": triton_dots.ROWS}
    assert registers_and_stack(triton_dots.dots_kernel, types, constants, triton_dots.WARPS)[1] == 0


MODES = {"compact": (0, False), "bf16": (1, False), "bf16+master": (1, True)}


@pytest.mark.parametrize("what", MODES)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_gradient_by_row_compiles_with_registers_for_seven_programs_a_processor_six_of_an_a100(
    what: str, capability: int
) -> None:
    mode, master = MODES[what]
    types = dict.fromkeys(("pieces", "row_places", "state", "slots"), INTEGERS)
    types |= {"piece_slots": LONGS, "order": LONGS, "counts": LONGS, "grad": HALVES, "table": HALVES, "M": "i32"}
    if what == "bf16":
        types |= {"mean": HALVES, "square": HALVES}
    sizes = {"J": 128, "D": 1024, "BD": 1024, "BJ": triton_rows.ROWS_BLOCK, "PIECE": triton_rows.PIECE}
    constants = sizes | {"MODE": mode, "MASTER": master, "DOTS": True}
    warps = triton_rows.ROWS_WARPS
    registers, spilled = registers_and_stack(triton_rows.rows_kernel, types, constants, warps, capability)
    assert spilled == 0 and 65_536 // (registers * 32 * warps) >= (6 if capability == 80 else 7)
    joined = {key: constants[key] for key in ("D", "BD", "PIECE", "MODE", "MASTER")}
    assert registers_and_stack(triton_rows.join_kernel, types, joined, 4, capability)[1] == 0


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_adam_on_rows_compiles_without_spilling(master: bool, capability: int) -> None:
    types = {"rows": LONGS, "count": INTEGERS, "table": HALVES}
    constants = {"D": 1024, "BD": 1024, "MASTER": master}
    assert registers_and_stack(triton_adam.adam_kernel, types, constants, 4, capability)[1] == 0


def test_the_plan_and_statistics_compile() -> None:
    integers = dict.fromkeys(("slots", "pieces", "rows", "places", "fresh", "ranks", "state"), INTEGERS)
    types = integers | {"M": "i32"} | dict.fromkeys(("marks", "counts", "piece_slots", "listed"), LONGS)
    registers_and_stack(triton_rows.mark_kernel, types, {"PIECE": 512, "BLOCK": 1024}, 4)
    for kernel in (triton_rows.list_kernel, triton_rows.fresh_kernel, triton_rows.place_kernel):
        registers_and_stack(kernel, types, {"BLOCK": 1024}, 4)
    whole = {"x": HALVES, "mask": BYTES, "out": HALVES, "N": "i32", "F": "i32", "B": "i32"}
    tile = {"MASKED": True, "ROWS": triton_statistics.ROWS, "COLUMNS": triton_statistics.COLUMNS}
    registers_and_stack(triton_statistics.parts_kernel, whole, tile, 4)
    registers_and_stack(triton_statistics.join_kernel, whole, {"BLOCKS": 128, "COLUMNS": 16}, 4)
    registers_and_stack(triton_statistics.backward_kernel, whole, {"MASKED": True, "ROWS": 32, "COLUMNS": 128}, 4)


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("logits", ["*bf16", "*fp16", "*fp32"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_cross_entropy_compiles_with_registers_for_two_rows_a_processor(
    capability: int, logits: str, capped: bool
) -> None:
    types = {"logits": logits, "targets": LONGS, "W": "i32:16", "cap": "fp32", "z": "fp32"}
    constants = {"IGNORE": -100, "BLOCK": triton_loss.BLOCK, "CAPPED": capped, "GRADIENTS": True}
    kernel, warps = triton_loss.cross_entropy_kernel, triton_loss.WARPS
    registers, spilled = registers_and_stack(kernel, types, constants, warps, capability)
    assert spilled == 0 and 65_536 // (registers * 32 * warps) >= 2
