"""Small kernels of a few instructions, for the tests of single instructions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.ptx.engine import Kernel, Memory, Options, Outcome
from tests.ptx.syntax import BYTES

Array = npt.NDArray[Any]
_REGISTERS = {1: "b16", 2: "b16", 4: "b32", 8: "b64"}


def kernel(body: str, pointers: Sequence[str] = (), threads: int = 32, before: str = "") -> Kernel:
    """A kernel of `body`, which may use the pointers as %rd_NAME, %t (thread), %r0 …, %rd0 …, %rs0 …, %p0 …."""
    parameters = ",".join(f".param .u64 .ptr .global .align 1 {name}" for name in pointers)
    loads = "".join(f"ld.param.b64 %rd_{name}, [{name}];\n" for name in pointers)
    declared = "".join(f".reg .b64 %rd_{name};\n" for name in pointers)
    return Kernel(
        f"""{before}
.visible .entry small({parameters})
.reqntid {threads}
{{
.reg .pred %p<16>; .reg .b16 %rs<32>; .reg .b32 %r<64>; .reg .b64 %rd<32>; .reg .b32 %t;
{declared}
mov.u32 %t, %tid.x;
{loads}
{body}
ret;
}}"""
    )


def run(
    small: Kernel, arrays: Mapping[str, Array], shared_bytes: int = 0, options: Options | None = None, programs: int = 1
) -> Outcome:
    """Launch the kernel with an array for each pointer."""
    memory = [
        Memory(int(a.ctypes.data), int(a.ctypes.data) + a.nbytes, k, name) for k, (name, a) in enumerate(arrays.items())
    ]
    return small.launch((programs, 1, 1), [m.low for m in memory], memory, shared_bytes, options)


def lanewise(instructions: str, out: str, **inputs: tuple[str, Array]) -> Array:
    """Return the results of instructions for every element.

    Args:
        instructions: with registers %d (out), and %a, %b … of the inputs.
        out: type of %d, as in an opcode; `pred` gives ones and zeros.
        inputs: of each register its type and its values, all as many.

    Returns:
        unsigned integers of the width of `out`, as bits.
    """
    count = len(next(iter(inputs.values()))[1])
    padded = -(-count // 32) * 32
    declared, loads, arrays = "", "", {}
    for name, (kind, values) in inputs.items():
        width = BYTES[kind]
        column = np.zeros(padded, f"u{width}")
        column[:count] = np.asarray(values).view(f"u{width}")
        arrays[name] = column
        declared += f".reg .{_REGISTERS[width]} %{name};\n"
        loads += f"mad.wide.u32 %rd1, %r0, {width}, %rd_{name};\nld.global.b{8 * width} %{name}, [%rd1];\n"
    width = 4 if out == "pred" else BYTES[out]
    arrays["out"] = result = np.zeros(padded, f"u{width}")
    declared += ".reg .pred %d;\n.reg .b32 %chosen;\n" if out == "pred" else f".reg .{_REGISTERS[width]} %d;\n"
    chosen = "selp.b32 %chosen, 1, 0, %d;\n" if out == "pred" else ""
    small = kernel(
        f"""{declared}
mov.u32 %r1, %ctaid.x;
mad.lo.s32 %r0, %r1, 32, %t;
{loads}{instructions}
{chosen}mad.wide.u32 %rd1, %r0, {width}, %rd_out;
st.global.b{8 * width} [%rd1], {"%chosen" if out == "pred" else "%d"};""",
        list(arrays),
    )
    outcome = run(small, arrays, programs=padded // 32)
    assert not outcome.totals, "\n".join(map(str, outcome.faults))
    return result[:count]


def bits(width: int, seed: int = 0, count: int = 960) -> Array:
    """Unsigned integers: every pattern at the edges, the powers of two and their neighbors, and random ones."""
    top = 1 << 8 * width
    edges = {0, 1, 2, 3, top - 1, top - 2, top // 2, top // 2 - 1, top // 2 + 1, 255, 256, 31, 32, 33, 63, 64}
    edges |= {1 << k for k in range(8 * width)} | {(1 << k) - 1 for k in range(8 * width)}
    draw = np.random.default_rng(seed)
    some = np.array(sorted(edge % top for edge in edges), f"u{width}")
    many = draw.integers(0, top, count - len(some), dtype=f"u{width}")
    return draw.permutation(np.concatenate([some, many]))


def floats(seed: int, count: int = 960) -> Array:
    """float32 of every size: zeros, subnormal numbers, infinities, NaN, ties, neighbors of integers, random ones."""
    info = np.finfo(np.float32)
    some = np.array([0.0, 1, 0.5, 1.5, 2.5, 3.5, 1e-3, info.max, info.tiny, info.tiny / 2, info.smallest_subnormal,
                     1 + info.eps, 1 - info.eps / 2, np.inf, np.nan, 127.5, 128.5, 65504, 65520, 2.0**31, 2.0**32,
                     2.0**31 - 128], np.float32)  # fmt: skip
    draw = np.random.default_rng(seed)
    n = (count - 2 * len(some)) // 2
    wide = draw.integers(0, 1 << 32, n, dtype=np.uint32).view(np.float32)
    near = draw.normal(0, 100, count - 2 * len(some) - n).astype(np.float32)
    return draw.permutation(np.concatenate([some, -some, wide, near]))


def dtype_of(kind: str) -> Any:
    return np.dtype({"s": "i", "u": "u", "b": "u", "f": "f"}[kind[0]] + str(BYTES[kind]))


def exact(kind: str, array: Array) -> Array:
    """Python integers, so that nothing overflows."""
    values: Array = array.view(dtype_of(kind)).astype(object)
    return values


def wrapped(values: Any, kind: str) -> Array:
    mask = (1 << 8 * BYTES[kind]) - 1
    return np.array([int(value) & mask for value in values], f"u{BYTES[kind]}")
