"""`tl.dot` as Triton compiles it for sm_80 and sm_100, against sums in float64; sm_90 is what kernels' tests run on."""

from __future__ import annotations

import re

import pytest
import torch
import triton
import triton.language as tl
from tests.ptx.driver import state

pytestmark = pytest.mark.usefixtures("emulator")


@triton.jit
def _dot(  # type: ignore[no-untyped-def]
    a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STEP: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, PRECISION: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    row, column, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, STEP)
    total = tl.zeros((M, N), tl.float32)
    for first in range(0, K, STEP):
        # Transposed in memory, or as they are.
        at = (first + inner)[:, None] * M + row[None, :] if LEFT else row[:, None] * K + (first + inner)[None, :]
        x = tl.load(a + at)
        if LEFT:
            x = tl.trans(x)
        at = column[:, None] * K + (first + inner)[None, :] if RIGHT else (first + inner)[:, None] * N + column[None, :]
        y = tl.load(b + at)
        if RIGHT:
            y = tl.trans(y)
        if FLIP:  # takes the left factor to registers
            word: tl.constexpr = tl.int32 if x.dtype.primitive_bitwidth == 32 else tl.int16
            x = (x.to(word, bitcast=True) ^ FLIP).to(x.dtype, bitcast=True)
        total = tl.dot(x, y, total, input_precision=PRECISION)
    tl.store(c + row[:, None] * N + column[None, :], total)


# Those that kernels take: factors transposed in memory or not, the left one in registers.
@pytest.mark.parametrize(
    ("dtype", "m", "n", "step", "left", "right", "flipped"),
    [
        (torch.bfloat16, 64, 64, 64, 1, 0, 0), (torch.bfloat16, 16, 16, 16, 1, 0, 0),
        (torch.float32, 64, 32, 32, 1, 0, 0), (torch.float32, 64, 32, 32, 0, 1, 1),
        (torch.bfloat16, 128, 64, 32, 1, 0, 0), (torch.float32, 128, 64, 16, 0, 1, 1),
    ],
)  # fmt: skip
def test_products(
    target: str, dtype: torch.dtype, m: int, n: int, step: int, left: int, right: int, flipped: int
) -> None:
    k = 3 * step
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=draw).to(dtype) for shape in ((m, k), (k, n)))
    out = torch.full((m, n), float("nan"))
    flip, word = (flipped << 13, torch.int32) if flipped else (0, torch.int16)
    done = _dot[(1,)](
        a.T.contiguous() if left else a, b.T.contiguous() if right else b, out, M=m, N=n, K=k, STEP=step, LEFT=left,
        RIGHT=right, PRECISION="tf32", FLIP=flip, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    # What tensor cores multiply: TF32 factors are cut off.
    x, y = ((t.view(torch.int32) & -8192).view(torch.float32) if dtype == torch.float32 else t for t in (a, b))
    want = (x.view(word) ^ flip).view(dtype).double() @ y.double()
    assert float((out - want).abs().max()) < 2e-5 * k
    assert ("tcgen05.mma" if target == "sm_100" and m >= 64 else "mma.sync") in done.asm["ptx"]


def test_products_take_the_instructions_that_kernels_take() -> None:
    text = "".join(
        code.statement.text for own in state().kernels.values() if own.name == "_dot" for code in own.encoded.codes
    )
    assert [name for name in ("ldmatrix", "32x32b", "16x32bx2") if name not in text] == []
    # With the left factor in either memory.
    assert re.search(r"tcgen05\.mma\S+ \[[^]]*\], \[", text) and re.search(r"tcgen05\.mma\S+ \[[^]]*\], %rd", text)
