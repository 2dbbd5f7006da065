"""Pieces of heads to and from memory of any layout: dense tensors, pages in any physical order, any of `ELEMENTS`.

A program handles tokens (rows) of one tile (columns): the first and the second dimension of up to PAIRS pairs, as two
`[tokens, PAIRS]` float32 blocks that RoPE turns together. The kernels share the device functions; the host functions
describe memory to them.

FP8 is converted here, bit by bit, so that every GPU writes the same bytes, whether it has instructions for it or not.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from cuvee.codec.errors import InputError
from cuvee.kernels.jobs import STATUS, TILE, UNIT, TileField, UnitField

MAX_SLOTS = tl.constexpr(2**31 - 1)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def token_offsets(units, unit, slots, token, inside, status):  # type: ignore[no-untyped-def]
    """Where tokens of a unit lie: offsets in elements (int64), and which tokens have a slot.

    `slots[token]` are their slots, -1 for nowhere, where they are `inside`. The job's `status` gets STATUS.SLOT for a
    slot beyond the cache.
    """
    unit_fields = units + unit * UNIT.FIELDS
    slot = tl.load(slots + token, mask=inside, other=-1)
    # A slot fits 32 bits, whose division is several times cheaper.
    total = tl.minimum(tl.load(unit_fields + UNIT.SLOTS), MAX_SLOTS)
    beyond = inside & ((slot >= total) | (slot < -1))
    tl.atomic_or(status, STATUS.SLOT, mask=tl.max(beyond.to(tl.int32), 0) > 0)
    exists = inside & (slot >= 0) & (slot < total)
    small = tl.where(exists, slot, 0).to(tl.uint32)
    block_tokens = tl.load(unit_fields + UNIT.BLOCK_TOKENS).to(tl.uint32)
    block = small // block_tokens
    row = (small - block * block_tokens).to(tl.int64)
    return block.to(tl.int64) * tl.load(unit_fields + UNIT.BLOCK) + row * tl.load(unit_fields + UNIT.TOKEN), exists


@triton.jit
def half_addresses(  # type: ignore[no-untyped-def]
    units, tile, offset, exists, DIM: tl.constexpr, COUNT: tl.constexpr, ELEMENT: tl.constexpr,
    UNIT_STRIDE: tl.constexpr, ALIGNED: tl.constexpr, PAIRS: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Addresses `[tokens, PAIRS]` of a tile's first or second dimensions, and which of them exist."""
    unit = tl.load(tile + TILE.UNIT)
    unit_fields = units + unit * UNIT.FIELDS
    pair = FIRST + tl.arange(0, PAIRS)
    count = tl.load(tile + COUNT).to(tl.int32)
    row = offset + tl.load(tile + TILE.HEAD) * tl.load(unit_fields + UNIT.HEAD)
    row += tl.load(tile + DIM) * tl.load(unit_fields + UNIT.DIM)
    # FP8 is read and written as bytes.
    if ELEMENT.primitive_bitwidth == 8:
        base = tl.load(unit_fields + UNIT.POINTER).to(tl.pointer_type(tl.uint8))
    else:
        base = tl.load(unit_fields + UNIT.POINTER).to(tl.pointer_type(ELEMENT))
    if ALIGNED:
        row = tl.multiple_of(row, 128 // ELEMENT.primitive_bitwidth)
        count = tl.multiple_of(count, 128 // ELEMENT.primitive_bitwidth)
        base = tl.multiple_of(base, 16)
    address = base + row[:, None]
    if UNIT_STRIDE:
        address = address + pair[None, :]
    else:
        step = tl.load(tile + TILE.STEP) * tl.load(unit_fields + UNIT.DIM)
        address = address + (pair * step)[None, :]
    return address, exists[:, None] & (pair < count)[None, :]


@triton.jit
def pair_addresses(  # type: ignore[no-untyped-def]
    units, tile, offset, exists, ELEMENT: tl.constexpr, UNIT_STRIDE: tl.constexpr, ALIGNED: tl.constexpr,
    PAIRS: tl.constexpr, FIRST: tl.constexpr = 0,
):  # fmt: skip
    """Addresses of a tile's first dimensions and which exist, and the same of its second ones: see `half_addresses`."""
    at0, mask0 = half_addresses(
        units, tile, offset, exists, TILE.DIM0, TILE.COUNT0, ELEMENT, UNIT_STRIDE, ALIGNED, PAIRS, FIRST
    )  # fmt: skip
    at1, mask1 = half_addresses(
        units, tile, offset, exists, TILE.DIM1, TILE.COUNT1, ELEMENT, UNIT_STRIDE, ALIGNED, PAIRS, FIRST
    )  # fmt: skip
    return at0, mask0, at1, mask1


@triton.jit
def _scale(units, tile):  # type: ignore[no-untyped-def]
    """Return what the FP8 values of a tile are multiplied by."""
    return tl.load((units + tl.load(tile + TILE.UNIT) * UNIT.FIELDS + UNIT.SCALE).to(tl.pointer_type(tl.float32)))


@triton.jit
def load_pairs(  # type: ignore[no-untyped-def]
    units, tile, offset, exists, ELEMENT: tl.constexpr, UNIT_STRIDE: tl.constexpr, PAIRS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Read a tile: values `[tokens, PAIRS]` float32 of its two halves at `token_offsets`; zero where there is none."""
    at0, mask0, at1, mask1 = pair_addresses(units, tile, offset, exists, ELEMENT, UNIT_STRIDE, ALIGNED, PAIRS)
    if ELEMENT.primitive_bitwidth == 8:
        scale = _scale(units, tile)
        a = _from_fp8(tl.load(at0, mask=mask0, other=0), ELEMENT) * scale
        b = _from_fp8(tl.load(at1, mask=mask1, other=0), ELEMENT) * scale
    else:
        a = tl.load(at0, mask=mask0, other=0.0).to(tl.float32)
        b = tl.load(at1, mask=mask1, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def store_pairs(  # type: ignore[no-untyped-def]
    units, tile, offset, exists, a, b, ELEMENT: tl.constexpr, UNIT_STRIDE: tl.constexpr, PAIRS: tl.constexpr,
    ALIGNED: tl.constexpr = False, FIRST: tl.constexpr = 0,
):  # fmt: skip
    """Write a tile: the inverse of `load_pairs`, rounded to nearest even; FP8 is divided by its scale and saturates."""
    at0, mask0, at1, mask1 = pair_addresses(units, tile, offset, exists, ELEMENT, UNIT_STRIDE, ALIGNED, PAIRS, FIRST)
    if ELEMENT.primitive_bitwidth == 8:
        scale = tl.div_rn(1.0, _scale(units, tile))
        tl.store(at0, _to_fp8(a, scale, ELEMENT), mask=mask0)
        tl.store(at1, _to_fp8(b, scale, ELEMENT), mask=mask1)
    else:
        tl.store(at0, a.to(ELEMENT), mask=mask0)
        tl.store(at1, b.to(ELEMENT), mask=mask1)


@triton.jit
def saturated(x, which, ELEMENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 within the range of `ELEMENT`, where `which` says so; of FP8 only finite: it saturates when stored."""
    limit: tl.constexpr = (
        65504.0 if tl.float16 == ELEMENT else 3.3895313892515355e38 if tl.bfloat16 == ELEMENT else 3.4028234663852886e38
    )
    return tl.where(which & (x > limit), limit, tl.where(which & (x < -limit), -limit, x))


@triton.jit
def finite(x):  # type: ignore[no-untyped-def]
    """Which numbers are neither infinite nor NaN."""
    return tl.abs(x) < INFINITY


@triton.jit
def _from_fp8(byte, ELEMENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bytes of an FP8 `ELEMENT` -> float32, exact."""
    # One return at the end: what follows an early one is compiled all the same, assertions included.
    if tl.float8e5 == ELEMENT:
        # The upper byte of a float16.
        value = (byte.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        tl.static_assert(tl.float8e4nv == ELEMENT)
        wide = byte.to(tl.uint32)
        # Exponent and mantissa at their places in a float32, which is then too small by the difference of the biases.
        bits = tl.where((wide & 0x7F) == 0x7F, 0x7FC00000, ((wide & 0x80) << 24) | ((wide & 0x7F) << 20))
        value = bits.to(tl.uint32).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return value


@triton.jit
def _to_fp8(x, scale, ELEMENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 times `scale` -> the bytes of the nearest FP8 `ELEMENT`, ties to even, saturated if `x` is finite.

    NaN stays NaN, and infinity stays infinite in e5m2; e4m3 has none.
    """
    e4m3: tl.constexpr = tl.float8e4nv == ELEMENT
    tl.static_assert(e4m3 or tl.float8e5 == ELEMENT)
    limit: tl.constexpr = 448.0 if e4m3 else 57344.0
    least: tl.constexpr = 0.015625 if e4m3 else 6.103515625e-05  # the smallest normal number
    dropped: tl.constexpr = 20 if e4m3 else 21  # of 23 mantissa bits
    rebias: tl.constexpr = (127 - 7) << 3 if e4m3 else (127 - 15) << 2
    magic: tl.constexpr = 16384.0 if e4m3 else 128.0  # 2**23 smallest subnormals: the last bit of a sum counts them
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(x * scale), limit)
    bits = size.to(tl.uint32, bitcast=True)
    normal = ((bits + ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1)) >> dropped) - rebias
    subnormal = (size + magic).to(tl.uint32, bitcast=True) & 0xFF
    code = tl.where(tl.abs(x) <= INFINITY, tl.where(size < least, subnormal, normal), 0x7F)
    if not e4m3:
        code = tl.where(tl.abs(x) == INFINITY, 0x7C, code)
    return (sign | code).to(tl.uint8)


@triton.jit
def rotate_pairs(  # type: ignore[no-untyped-def]
    a, b, turns, row, inside, ANGLES, column, PAIRS: tl.constexpr, INVERSE: tl.constexpr,
    ALIGNED: tl.constexpr = False,
):  # fmt: skip
    """Turn pairs by the angles in rows `row`, columns `column …` of a table of turns; INVERSE turns back.

    The table, `[rows, 2, ANGLES]`, has cosines, then sines.

    ALIGNED: `column` is a multiple of 4.
    """
    pair = tl.arange(0, PAIRS)
    column = column.to(tl.int32)
    if ALIGNED:
        column = tl.multiple_of(column, 4)
    at = (row.to(tl.int64) * (2 * ANGLES))[:, None] + (column + pair)[None, :]
    # The last tile of a head may reach past the tables; what lies there is not stored.
    mask = inside[:, None] & ((column + pair) < ANGLES)[None, :]
    c = tl.load(turns + at, mask=mask, other=0.0)
    s = tl.load(turns + ANGLES + at, mask=mask, other=0.0)
    if INVERSE:
        s = -s
    return a * c - b * s, b * c + a * s


def unit_row(memory: torch.Tensor, scale: float = 1.0) -> list[int]:
    """A row of `units`: where a unit lies, a view `[blocks, tokens, heads, dimensions]` with whatever strides.

    Raises:
        InputError: another number of dimensions, or 2**31 slots and more.
    """
    if memory.ndim != 4:
        raise InputError(f"memory: must be [blocks, tokens, heads, dimensions], got {list(memory.shape)}")
    blocks, tokens = memory.shape[:2]
    if blocks * tokens >= 2**31:
        raise InputError(f"memory: must have at most {2**31 - 1} slots, got {blocks * tokens}")
    # Kernels divide by the tokens of a block, even where a cache has no slots.
    bits = int(np.float32(scale).view(np.uint32))
    return [memory.data_ptr(), *memory.stride(), max(tokens, 1), blocks * tokens, bits]


def contiguity(
    units: npt.NDArray[np.int64], tiles: npt.NDArray[np.int64], element: torch.dtype
) -> tuple[bool, bool]:  # fmt: skip
    """Which fast ways to memory the tables of units and tiles allow: `(unit_stride, aligned)`.

    With unit strides, pairs lie one element apart in every tile. If moreover every run of a tile begins and ends at a
    multiple of 16 bytes, and its angles at a multiple of 4 columns, 16 bytes can be moved at a time.
    """
    used = units[np.unique(tiles[:, TileField.UNIT])]
    unit_stride = bool(np.all(used[:, UnitField.DIM] == 1) and np.all(tiles[:, TileField.STEP] == 1))
    strides = used[:, [UnitField.BLOCK, UnitField.TOKEN, UnitField.HEAD]] * element.itemsize
    runs = tiles[:, [TileField.DIM0, TileField.DIM1, TileField.COUNT0, TileField.COUNT1]] * element.itemsize
    angles = np.maximum(tiles[:, TileField.ANGLE], 0)
    whole = not np.any(used[:, UnitField.POINTER] % 16) and not np.any(strides % 16) and not np.any(runs % 16)
    return unit_stride, unit_stride and whole and not np.any(angles % 4)
