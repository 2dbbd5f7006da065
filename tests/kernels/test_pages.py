"""Tiles of heads to and from memory: every physical order, every element type, hostile slots, far addresses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.profiles.sections import partition
from cuvee.kernels.jobs import ELEMENTS, TileField, UnitField
from cuvee.kernels.ops import pages
from cuvee.kernels.ops.pages import contiguity, unit_row
from cuvee.kernels.tiles import TileLayout, lay_out_tiles

FLOATS = [torch.bfloat16, torch.float16, torch.float32]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
HEADS = 2


@triton.jit
def _read(  # type: ignore[no-untyped-def]
    units, tiles, slots, out, status, count, ELEMENT: tl.constexpr, UNIT_STRIDE: tl.constexpr,
    ALIGNED: tl.constexpr, PAIRS: tl.constexpr, FIELDS: tl.constexpr, UNIT: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(0) * FIELDS
    token = tl.arange(0, BLOCK_T)
    offset, exists = pages.token_offsets(units, tl.load(tile + UNIT), slots, token, token < count, status)
    a, b = pages.load_pairs(units, tile, offset, exists, ELEMENT, UNIT_STRIDE, PAIRS, ALIGNED)
    at = out + (tl.program_id(0) * count + token[:, None]) * (2 * PAIRS) + tl.arange(0, PAIRS)[None, :]
    tl.store(at, a, mask=(token < count)[:, None])
    tl.store(at + PAIRS, b, mask=(token < count)[:, None])


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    units, tiles, slots, values, status, count, ELEMENT: tl.constexpr, UNIT_STRIDE: tl.constexpr,
    ALIGNED: tl.constexpr, PAIRS: tl.constexpr, FIELDS: tl.constexpr, UNIT: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(0) * FIELDS
    token = tl.arange(0, BLOCK_T)
    offset, exists = pages.token_offsets(units, tl.load(tile + UNIT), slots, token, token < count, status)
    at = values + (tl.program_id(0) * count + token[:, None]) * (2 * PAIRS) + tl.arange(0, PAIRS)[None, :]
    a = tl.load(at, mask=(token < count)[:, None])
    b = tl.load(at + PAIRS, mask=(token < count)[:, None])
    pages.store_pairs(units, tile, offset, exists, a, b, ELEMENT, UNIT_STRIDE, PAIRS, ALIGNED)


def cache(
    order: str, element: torch.dtype, device: torch.device, blocks: int, tokens: int, dims: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A poisoned allocation (bytes), and in it a unit `[blocks, tokens, HEADS, dims]` with axes in physical `order`."""
    sizes = {"b": blocks, "t": tokens, "h": HEADS, "d": dims}
    axes = [axis for axis in order if axis in sizes]
    shape = [sizes[axis] for axis in axes]
    if "2" in order:  # K and V packed, `[..., :D]` and `[..., D:]`
        shape[-1] *= 2
    raw = torch.full((int(np.prod(shape)) * element.itemsize,), 0xAB, dtype=torch.uint8, device=device)
    whole = raw.view(element).view(shape)
    if "2" in order:
        whole = whole[..., dims:]
    return raw, whole.permute([axes.index(axis) for axis in "bthd"])


def one_layer(dims: int, rotary: int = 0, interleaved: bool = False) -> TileLayout:
    rope = Rope(tuple(0.5**i for i in range(rotary // 2)), 1.0, interleaved) if rotary else None
    layout = KVLayout("synthetic", (LayerLayout(HEADS, dims, dims, rope),), "float32", None)
    return lay_out_tiles(layout, partition(layout, "unit"), {rope: 0} if rope else {})


def launch(
    kernel: object, tables: TileLayout, units: list[torch.Tensor], slots: torch.Tensor, array: torch.Tensor,
    element: torch.dtype,
) -> int:  # fmt: skip
    """Run a kernel over all tiles; returns the status."""
    places = np.array([unit_row(unit) for unit in units], np.int64)
    unit_stride, aligned = contiguity(places, tables.tiles, element)
    status = torch.zeros(1, dtype=torch.int32, device=slots.device)
    kernel[(len(tables.tiles),)](  # type: ignore[index]
        torch.from_numpy(places).to(slots.device), torch.from_numpy(tables.tiles).to(slots.device), slots,
        array, status, len(slots), ELEMENT=ELEMENTS[element], UNIT_STRIDE=unit_stride, ALIGNED=aligned,
        PAIRS=tables.pairs, FIELDS=len(TileField), UNIT=int(TileField.UNIT),
        BLOCK_T=max(16, triton.next_power_of_2(len(slots))), enable_fp_fusion=True,
    )  # fmt: skip
    return int(status)


def bytes_of(unit: torch.Tensor) -> torch.Tensor:
    """`[blocks, tokens, n]` bytes of a unit."""
    return unit.contiguous().flatten(2).view(torch.uint8)


def dense(element: torch.dtype, slots: int, dims: int, device: torch.device) -> torch.Tensor:
    return cache("bthd", element, device, 1, slots, dims)[1]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NaN times a scale, in numpy
@pytest.mark.parametrize("element", FP8)
def test_fp8_agrees_with_torch(element: torch.dtype, device: torch.device) -> None:
    tables = one_layer(64)
    unit = torch.arange(256, dtype=torch.uint8, device=device).view(1, 2, HEADS, 64).view(element)
    slots = torch.arange(2, device=device)
    out = torch.full((len(tables.tiles), 2, 2 * tables.pairs), float("nan"), device=device)
    assert launch(_read, tables, [unit, unit], slots, out, element) == 0
    want = unit.float().permute(2, 1, 0, 3).reshape(HEADS, 2, 64)
    torch.testing.assert_close(out[:HEADS], want, rtol=0, atol=0, equal_nan=True)

    limit = torch.finfo(element).max
    grid = torch.arange(256, dtype=torch.uint8).view(element).float()
    grid = grid[grid.isfinite()].sort().values
    ties = (grid[1:] + grid[:-1]) / 2
    near = torch.cat([ties, ties.nextafter(torch.tensor(1e9)), ties.nextafter(torch.tensor(-1e9)), grid])
    tiny = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 1e-9, limit, -limit, 2 * limit, -1e30, 3e38])
    wild = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 10 ** torch.linspace(-8, 5, 4096)
    values = torch.cat([near, tiny, wild, torch.tensor([torch.nan, torch.inf, -torch.inf])])
    values = torch.cat([values, torch.zeros(-len(values) % (HEADS * 64))])
    packed = values.view(-1, HEADS, 64).permute(1, 0, 2)
    packed = torch.cat([packed, packed]).contiguous().to(device)
    units = [dense(element, packed.shape[1], 64, device) for _ in range(2)]
    slots = torch.arange(packed.shape[1], device=device)
    assert launch(_write, tables, units, slots, packed, element) == 0
    saturated = values.clamp(-limit, limit)
    saturated = saturated if element == torch.float8_e4m3fn else torch.where(values.isinf(), values, saturated)
    want = saturated.to(element).view(torch.uint8).to(device)
    for unit in units:
        assert torch.equal(bytes_of(unit).flatten(), want)


@pytest.mark.parametrize(("order", "element"), [("far blocks", torch.bfloat16), ("far dimensions", torch.float8_e5m2)])
def test_memory_beyond_32_bits(order: str, element: torch.dtype, device: torch.device, tmp_path: Path) -> None:
    far = 2**31 + 4096
    strides = (far, 64, 32, 1) if order == "far blocks" else (64, 1, 16, far // 16)
    size = (far + 4096) * element.itemsize if order == "far blocks" else (2 * far + 4096) * element.itemsize
    if device.type == "cpu":  # a sparse file takes no memory
        raw = torch.from_numpy(np.memmap(tmp_path / "sparse", np.uint8, "w+", shape=(size,)))
    else:
        raw = torch.zeros(size, dtype=torch.uint8, device=device)
    unit = raw.view(element).as_strided((2, 2, HEADS, 32), strides)
    other = dense(element, 4, 32, device)
    tables = one_layer(32)
    slots = torch.tensor([3, 0, 2], device=device)
    values = torch.randint(1, 8, (len(tables.tiles), 3, 2 * tables.pairs), device=device).float()
    assert launch(_write, tables, [unit, other], slots, values, element) == 0
    for head in range(HEADS):
        assert torch.equal(unit.flatten(0, 1)[slots][:, head].float(), values[head])
    assert not bool(unit.flatten(0, 1)[1].float().any())
    out = torch.full_like(values, float("nan"))
    assert launch(_read, tables, [unit, other], slots, out, element) == 0
    assert torch.equal(out, values)


def test_unit_row_and_contiguity(device: torch.device) -> None:
    unit = cache("bhtd", torch.bfloat16, device, 3, 16, 32)[1]
    assert unit_row(unit, 0.5) == [unit.data_ptr(), 16 * HEADS * 32, 32, 16 * 32, 1, 16, 48, 0x3F000000]
    with pytest.raises(InputError, match="blocks, tokens, heads, dimensions"):
        unit_row(unit[0])
    with pytest.raises(InputError, match="slots"):
        unit_row(torch.zeros(1).expand(2**16, 2**15, 1, 1))
    tiles = one_layer(32).tiles
    for order, element, dims, want in (
        ("bthd", torch.float8_e4m3fn, 32, (True, True)),
        ("bthd", torch.bfloat16, 36, (True, False)),
        ("bdht", torch.bfloat16, 32, (False, False)),
    ):
        unit = cache(order, element, torch.device("cpu"), 3, 16, dims)[1]
        places = np.array([unit_row(unit)] * 2, np.int64)
        tiles = one_layer(dims).tiles
        assert contiguity(places, tiles, element) == want
        places[1, UnitField.POINTER] += 8
        assert contiguity(places, tiles, element) == (want[0], False)
