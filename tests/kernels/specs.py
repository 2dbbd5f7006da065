"""What the kernels are compiled with ahead of time: the arguments of their most common launches, and their budgets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import triton.language as tl

from cuvee.kernels.jobs import ELEMENTS
from cuvee.kernels.ops import analyze, coded_part, dequantize, merge_planes, quantize, rans, split_planes, transform
from cuvee.kernels.ops import lossless as byte_planes
from cuvee.kernels.ops import synthesize as synthesis

_BIG_ALIGNED = ("x", "y", "basis", "means", "turns", "tiles", "columns", "width", "angles")


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """A kernel with the constants of its most common launch.

    Attributes:
        name: the kernel's name in reports.
        kernel: the `@triton.jit` function.
        constants: value of each constexpr argument.
        num_warps: as in the launch.
        options: further compile options, e.g. `enable_fp_fusion`.
        registers: the most that a lane may take on an H100, and then nothing may be spilled; None: no limit.
        divisible: arguments that launches guarantee to be multiples of 16; None: all pointers but `_UNALIGNED`.
        amd: the entries of `constants` and `options` that differ on AMD.
        types: of the arguments whose types are not those of `_TYPES`, or i32.
    """

    name: str
    kernel: Any
    constants: dict[str, Any]
    num_warps: int = 4
    options: dict[str, Any] = field(default_factory=dict)
    registers: int | None = None
    divisible: tuple[str, ...] | None = None
    amd: dict[str, Any] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)

    def signature(self) -> dict[str, str]:
        """Return the Triton type of each argument that is not a constexpr."""
        types = _TYPES | self.types
        return {name: types.get(name, "i32") for name in self.kernel.arg_names if name not in self.constants}

    def aligned(self) -> list[str]:
        """Return the arguments that are multiples of 16."""
        pointers = [name for name, kind in self.signature().items() if kind.startswith("*") and name not in _UNALIGNED]
        return pointers if self.divisible is None else [name for name in self.divisible if name in self.signature()]


# Types of arguments, by name.
_I64 = ("jobs", "parts", "plans", "chunks", "tiles", "blocks", "units", "slots", "table", "coding", "totals", "starts",
        "sums")  # fmt: skip
_I32 = ("tables", "row_maps", "rows", "reach", "counts", "status", "escape_counts", "block_ranks", "center_rows",
        "escape_value", "value")  # fmt: skip
_FLOATS = ("y", "base", "left", "x", "means", "turns", "turns_back", "inv_freq", "scaling")
_TYPES = {
    **dict.fromkeys(_I64, "*i64"), **dict.fromkeys(_I32, "*i32"), **dict.fromkeys(_FLOATS, "*fp32"),
    **dict.fromkeys(("data32", "decoding", "states", "lengths", "escape_index", "index", "out32", "data"), "*u32"),
    **dict.fromkeys(("words", "class_words", "freq"), "*u16"),
    **dict.fromkeys(("planes", "classes", "order", "references", "out"), "*u8"),
}  # fmt: skip
_UNALIGNED = ("classes", "order")  # a job's columns begin anywhere
_UNFUSED = {"enable_fp_fusion": False}


def _symbols(name: str, kernel: Any, registers: int, constants: dict[str, Any], **types: str) -> KernelSpec:
    return KernelSpec(name, kernel, constants, options=_UNFUSED, registers=registers, types=types)


def _placing(predicted: bool) -> dict[str, Any]:
    return {"UNIT_STRIDE": True, "ALIGNED": True, "PAIRS": 64, **({} if predicted else {"center_rows": None})}


def _synthesis(
    name: str, dtype: torch.dtype, element: torch.dtype, max_rank: int, predicted: bool = False
) -> KernelSpec:
    config = synthesis.synthesis_config(dtype, element, max_rank, 256)
    y = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[dtype]
    constants = {
        "BLOCK_T": config.block_t, "BLOCK_R": config.block_r, "ELEMENT": ELEMENTS[element],
        "PRECISION": synthesis.product_precision(dtype, element), **_placing(predicted),
    }  # fmt: skip
    stages = config.num_stages if synthesis.FENCED else 1
    amd = {"num_stages": min(config.num_stages, synthesis.HIP_STAGES), "PRECISION": "ieee"}
    return KernelSpec(
        name, synthesis._synthesize, constants, config.num_warps, {"num_stages": stages}, divisible=_BIG_ALIGNED,
        amd=amd, types={"y": y, "basis": y},
    )  # fmt: skip


def _gather(name: str, predicted: bool) -> KernelSpec:
    return KernelSpec(name, analyze._gather, {"ELEMENT": tl.bfloat16, **_placing(predicted)}, divisible=_BIG_ALIGNED)


def _analysis(name: str, is_sorted: bool) -> KernelSpec:
    constants = {
        "BLOCK_T": analyze.ANALYSIS_TOKENS, "BLOCK_R": analyze.ANALYSIS_ROWS, "PRECISION": "tf32x3",
        **({} if is_sorted else dict.fromkeys(("classes", "order", "block_ranks"))),
    }  # fmt: skip
    return KernelSpec(
        name, analyze._analyze, constants, 8, divisible=_BIG_ALIGNED, amd={"PRECISION": "ieee"},
        types={"basis": "*fp32"},
    )  # fmt: skip


_BYTES = {
    "DTYPE": tl.bfloat16, "ELEMENT": tl.bfloat16, "WORD": tl.uint16, "UNIT_STRIDE": True, "ALIGNED": True, "PAIRS": 64,
}  # fmt: skip


def _byte_planes(name: str, kernel: Any, **constants: Any) -> KernelSpec:
    options = _UNFUSED if name == "merge_planes" else {}
    return KernelSpec(name, kernel, _BYTES | constants, byte_planes.WARPS, options, types={"data": "*u8"})


_ROTATE = {"SOURCE": False, "BLOCK_A": 64}

SPECS: tuple[KernelSpec, ...] = (
    KernelSpec("rans_decode", rans._decode_kernel, {"LANES": 32}, 1, {"maxnreg": 40}, registers=40,
               amd={"LANES": 64, "maxnreg": None}, types={"blocks": "i32"}),
    KernelSpec("rans_encode", rans._encode_kernel, {"LANES": 32}, 1, registers=64, amd={"LANES": 64},
               types={"blocks": "i32"}),
    KernelSpec("count_words", coded_part._count_kernel, {"BLOCK": 256}),
    KernelSpec("write_coded", coded_part._write_kernel, {}, types={"blocks": "i32"}),
    _symbols("dequantize", dequantize._dequantize, 80, {"base": None}, y="*bf16"),
    _symbols("dequantize refinement", dequantize._dequantize, 80, {}, y="*bf16"),
    _symbols("place_escapes", dequantize._write_escapes, 48, {"base": None}, y="*bf16"),
    _symbols("place_escapes refinement", dequantize._write_escapes, 48, {}, y="*bf16"),
    _symbols("quantize", quantize._quantize, 128, {"left": None}),
    _symbols("quantize base", quantize._quantize, 144, {}),
    _symbols("list_escapes", quantize._list_escapes, 128, {}),
    KernelSpec("rotation_tables", transform._rotation_tables, _ROTATE, options=_UNFUSED, divisible=_BIG_ALIGNED),
    _gather("gather", False),
    _gather("gather predicted", True),
    _analysis("analyze", True),
    _analysis("analyze unsorted", False),
    _synthesis("synthesize layer", torch.bfloat16, torch.bfloat16, 1400),
    _synthesis("synthesize predicted", torch.bfloat16, torch.bfloat16, 1400, True),
    _synthesis("synthesize head", torch.bfloat16, torch.bfloat16, 128),
    _synthesis("synthesize float16", torch.float32, torch.float16, 1400),
    KernelSpec("decoding_tables", merge_planes._decoding_tables, {}, byte_planes.WARPS),
    _byte_planes("merge_planes", merge_planes._merge_planes, FACTOR=4),
    _byte_planes("sum_bytes", split_planes._sum_bytes),
    _byte_planes("count_symbols", split_planes._count_symbols),
    _byte_planes("split_planes", split_planes._split_planes, FACTOR=4),
)  # fmt: skip
