"""Rotation tables, and the parts that `analyze.py` and `synthesize.py` share.

The M *columns* of x, of the means and of the bases are a section's values in the order of its tiles: see `tiles.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cuvee.codec.entropy.token_classes import CLASSES
from cuvee.codec.format.streams import WINDOW
from cuvee.kernels.jobs import CHUNK, JOB

TABLE_TOKENS = 16  # a program of `rotation_tables`
_TABLE_TOKENS = tl.constexpr(TABLE_TOKENS)
_WINDOW = tl.constexpr(WINDOW)
_CLASSES = tl.constexpr(CLASSES)


@triton.jit
def _sorted_columns(job, block, start, column, inside, classes, order, block_ranks):  # type: ignore[no-untyped-def]
    """Return the tokens of columns from `start` on, all of one window, and the components that they have of a block."""
    first = tl.load(job + JOB.COLUMNS)
    token = start // _WINDOW * _WINDOW + tl.load(order + first + column, mask=inside, other=0).to(tl.int32)
    finest = tl.load(classes + first + start).to(tl.int64)
    return token, tl.load(block_ranks + (block * _CLASSES + finest))


@triton.jit
def _rotation_tables(  # type: ignore[no-untyped-def]
    chunks, inv_freq, scaling, turns, angles, SOURCE: tl.constexpr, BLOCK_A: tl.constexpr
):
    chunk = chunks + tl.program_id(0) * CHUNK.FIELDS
    token = tl.program_id(1) * _TABLE_TOKENS + tl.arange(0, _TABLE_TOKENS)
    angle = tl.program_id(2) * BLOCK_A + tl.arange(0, BLOCK_A)
    has = angle < angles
    position = (tl.load(chunk + (CHUNK.SOURCE if SOURCE else CHUNK.TARGET)) + token).to(tl.float32)
    scale = tl.load(scaling + angle, mask=has)
    if SOURCE:
        scale = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    radians = position[:, None] * tl.load(inv_freq + angle, mask=has)[None, :]
    at = ((tl.load(chunk + CHUNK.FIRST) + token) * (2 * angles))[:, None] + angle[None, :]
    mask = (token < tl.load(chunk + CHUNK.TOKENS))[:, None] & has[None, :]
    # On all targets these are the accurate functions, with a full reduction of large arguments.
    tl.store(turns + at, tl.cos(radians) * scale[None, :], mask=mask)
    tl.store(turns + angles + at, tl.sin(radians) * scale[None, :], mask=mask)


def rotation_tables(
    chunks: torch.Tensor,
    inv_freq: torch.Tensor,
    scaling: torch.Tensor,
    turns: torch.Tensor,
    source: bool,
    max_tokens: int,
) -> None:
    """Write cos and sin of all tokens of all chunks: `cos_sin` of `codec/rope.py` for all RoPEs of a layout.

    Args:
        chunks: int64 `[chunks, len(ChunkField)]`.
        inv_freq: float32 `[A]`: angle per position.
        scaling: float32 `[A]`: `Rope.attention_scaling`.
        turns: float32 `[tokens, 2, A]`, rows ChunkField.FIRST … are written.
        source: to turn back what the source has turned: positions count from ChunkField.SOURCE, not from
            ChunkField.TARGET, and what is written is divided by the scaling, as `unrotate` does.
    """
    angles = len(inv_freq)
    if not angles:
        return
    block_a = min(triton.next_power_of_2(angles), 64)
    grid = (len(chunks), triton.cdiv(max_tokens, TABLE_TOKENS), triton.cdiv(angles, block_a))
    _rotation_tables[grid](
        chunks, inv_freq, scaling, turns, angles, SOURCE=source, BLOCK_A=block_a, num_warps=4,
        enable_fp_fusion=False,  # an angle is rounded before its reduction, as in codec/rope.py
    )  # fmt: skip
