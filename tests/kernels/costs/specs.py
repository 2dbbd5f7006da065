"""What the kernels are compiled with ahead of time: the arguments of their most common launches, and their budgets."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from tests.kernels.costs.kernel_spec import Access, Budget, KernelSpec

from cuvee.kernels.jobs import ELEMENTS, ChunkField
from cuvee.kernels.ops import (
    analyze,
    coded_part,
    dequantize,
    merge_planes,
    quantize,
    rans,
    split_planes,
    transform,
)
from cuvee.kernels.ops import lossless as byte_planes
from cuvee.kernels.ops import synthesize as synthesis

# Types of arguments, by name; `_spec` takes those that differ.
_I64 = ("jobs", "parts", "plans", "chunks", "tiles", "blocks", "places", "slots", "table", "coding", "totals", "starts",
        "sums")  # fmt: skip
_I32 = ("tables", "row_maps", "row_ints", "reach", "counts", "status", "found", "block_ranks", "center_rows",
        "escape_value", "value")  # fmt: skip
_FLOATS = ("y", "base", "left", "row_floats", "steps", "inverses", "limits", "x", "means", "cos", "sin", "source_cos",
           "source_sin", "scales", "inv_freq", "scaling")  # fmt: skip
_TYPES = {
    **dict.fromkeys(_I64, "*i64"), **dict.fromkeys(_I32, "*i32"), **dict.fromkeys(_FLOATS, "*fp32"),
    **dict.fromkeys(("data32", "decoding", "states", "lengths", "escape_index", "index", "out32", "data"), "*u32"),
    **dict.fromkeys(("data16", "words", "class_words", "out16", "freq"), "*u16"),
    **dict.fromkeys(("planes", "classes", "order", "references", "out"), "*u8"),
}  # fmt: skip
_SIZES_OF_16 = ("columns", "width", "angles")  # Llama-3.1-8B's are multiples of 16
_UNALIGNED = ("classes", "order")  # a job's columns begin anywhere
_BIG_ALIGNED = ("x", "y", "basis", "means", "cos", "sin", "tiles", *_SIZES_OF_16)


def _spec(
    name: str,
    kernel: Any,
    constants: dict[str, Any],
    *,
    budget: Budget | None = None,
    access: Access | None = None,
    divisible: tuple[str, ...] | None = None,
    num_warps: int = 4,
    num_stages: int = 3,
    options: dict[str, Any] | None = None,
    changes: dict[str, dict[str, Any]] | None = None,
    **types: str,
) -> KernelSpec:
    """Return the spec of a kernel whose arguments have the types of `_TYPES`, or i32."""
    signature = {n: (_TYPES | types).get(n, "i32") for n in kernel.arg_names if n not in constants}
    if divisible is None:
        divisible = tuple(n for n, kind in signature.items() if kind.startswith("*") and n not in _UNALIGNED)
    return KernelSpec(
        name, kernel, signature, constants, num_warps, num_stages, options,
        tuple(n for n in divisible if n in signature), access, {"sm_90": budget} if budget else {}, changes or {},
    )  # fmt: skip


def _coder(name: str, kernel: Any, most: int) -> KernelSpec:
    decodes = "decode" in name
    constants: dict[str, Any] = {"PROB_BITS": 12, "LANES": 32, "BLOCK": rans.PRECEDING} if decodes else {"LANES": 32}
    return _spec(
        name, kernel, constants, num_warps=1, options={"maxnreg": 40} if decodes else None,
        access="store8" if decodes else "load8", changes={"gfx942": {"constants": {"LANES": 64}}}, blocks="i32",
        budget=Budget(instructions_per_symbol=most, registers=40 if decodes else 64, spilled_bytes=0),
    )  # fmt: skip


def _symbols(name: str, kernel: Any, registers: int, constants: dict[str, Any], **types: Any) -> KernelSpec:
    budget = Budget(registers=registers, spilled_bytes=0)
    return _spec(name, kernel, constants, budget=budget, options={"enable_fp_fusion": False}, **types)


_UNSORTED = {"classes": None, "order": None, "block_ranks": None, "SORTED": False}
_UNPREDICTED = {"center_rows": None, "PREDICTED": False}


def _synthesis(
    name: str, dtype: torch.dtype, element: torch.dtype, max_rank: int, predicted: bool = False
) -> KernelSpec:
    config = synthesis.synthesis_config(dtype, element, max_rank, 256)
    y = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[dtype]
    constants = {
        "BLOCK_T": config.block_t, "BLOCK_R": config.block_r, "ELEMENT": ELEMENTS[element], "UNIT_STRIDE": True,
        "ALIGNED": True, "PAIRS": 64, "PRECISION": synthesis.product_precision(dtype, element),
        **({"PREDICTED": True} if predicted else _UNPREDICTED),
    }  # fmt: skip
    hip = {"num_stages": min(config.num_stages, synthesis.HIP_STAGES), "constants": {"PRECISION": "ieee"}}
    return _spec(
        name, synthesis._synthesize, constants, num_warps=config.num_warps, y=y, basis=y, divisible=_BIG_ALIGNED,
        num_stages=config.num_stages if synthesis.FENCED else 1, changes={"gfx942": hip},
    )  # fmt: skip


def _gather(name: str, predicted: bool) -> KernelSpec:
    constants = {
        "BLOCK_T": analyze.GATHER_TOKENS, "ELEMENT": tl.bfloat16, "UNIT_STRIDE": True, "ALIGNED": True, "PAIRS": 64,
        **({"PREDICTED": True} if predicted else _UNPREDICTED),
    }  # fmt: skip
    return _spec(name, analyze._gather, constants, divisible=_BIG_ALIGNED)


def _analysis(name: str, is_sorted: bool) -> KernelSpec:
    constants = {
        "BLOCK_T": analyze.ANALYSIS_TOKENS, "BLOCK_R": analyze.ANALYSIS_ROWS, "BLOCK_K": analyze.ANALYSIS_COLUMNS,
        "PRECISION": "tf32x3", **({"SORTED": True} if is_sorted else _UNSORTED),
    }  # fmt: skip
    return _spec(
        name, analyze._analyze, constants, num_warps=8, basis="*fp32", divisible=_BIG_ALIGNED,
        changes={"gfx942": {"constants": {"PRECISION": "ieee"}}},
    )  # fmt: skip


_BYTES = {
    "DTYPE": tl.bfloat16, "ELEMENT": tl.bfloat16, "WORD": tl.uint16, "UNIT_STRIDE": True, "ALIGNED": True, "PAIRS": 64,
    "TOKENS": byte_planes.TOKENS,
}  # fmt: skip


def _byte_planes(name: str, kernel: Any, fusion: bool = True, **constants: Any) -> KernelSpec:
    options = None if fusion else {"enable_fp_fusion": False}
    return _spec(name, kernel, {**_BYTES, **constants}, num_warps=byte_planes.WARPS, options=options, data="*u8")


_WRITE = {
    "STREAMS": coded_part._WRITE_STREAMS, "WORDS": coded_part._WRITE_WORDS, "ESCAPES": coded_part._WRITE_ESCAPES,
    "BLOCK": coded_part._WRITE_PRECEDING,
}  # fmt: skip
_COLUMNS = {"ROWS": dequantize._ROWS, "COLUMNS": dequantize.MIN_DEPTH}
_WINDOWS = {"ROWS": quantize._BLOCK_ROWS, "COLUMNS": 256}
_ENTRIES = {"ENTRIES": dequantize.ENTRIES}
_ROTATE = {"POSITION": int(ChunkField.TARGET), "INVERSE": False, "BLOCK_T": transform.TABLE_TOKENS, "BLOCK_A": 64}

SPECS: tuple[KernelSpec, ...] = (
    _coder("rans_decode", rans._decode_kernel, 42),
    _coder("rans_encode", rans._encode_kernel, 36),
    _spec("count_words", coded_part._count_kernel, {"BLOCK": 256}),
    _spec("write_coded", coded_part._write_kernel, _WRITE, blocks="i32"),
    _symbols("dequantize", dequantize._dequantize, 80, {**_COLUMNS, "base": None}, y="*bf16"),
    _symbols("dequantize refinement", dequantize._dequantize, 80, _COLUMNS, y="*bf16"),
    _symbols("place_escapes", dequantize._place_escapes, 48, {**_ENTRIES, "base": None}, y="*bf16"),
    _symbols("place_escapes refinement", dequantize._place_escapes, 48, _ENTRIES, y="*bf16"),
    _symbols("quantize", quantize._quantize, 128, {**_WINDOWS, "left": None}),
    _symbols("quantize base", quantize._quantize, 144, _WINDOWS),
    _symbols("list_escapes", quantize._list_escapes, 128, _WINDOWS),
    _spec("rotation_tables", transform._rotation_tables, _ROTATE, options={"enable_fp_fusion": False},
          divisible=_BIG_ALIGNED),
    _gather("gather", False),
    _gather("gather predicted", True),
    _analysis("analyze", True),
    _analysis("analyze unsorted", False),
    _synthesis("synthesize layer", torch.bfloat16, torch.bfloat16, 1400),
    _synthesis("synthesize predicted", torch.bfloat16, torch.bfloat16, 1400, True),
    _synthesis("synthesize head", torch.bfloat16, torch.bfloat16, 128),
    _synthesis("synthesize float16", torch.float32, torch.float16, 1400),
    _spec("decoding_tables", merge_planes._decoding_tables, {}, num_warps=byte_planes.WARPS),
    _byte_planes("merge_planes", merge_planes._merge_planes, False, FACTOR=4, MOVED=True),
    _byte_planes("sum_bytes", split_planes._sum_bytes),
    _byte_planes("count_symbols", split_planes._count_symbols),
    _byte_planes("split_planes", split_planes._split_planes, FACTOR=4),
)  # fmt: skip
