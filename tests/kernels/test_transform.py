"""The linear maps on the device against their references; `test_backend.py` holds both to the codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.kernels.naive.transform import (
    analyze_reference,
    gather_reference,
    rotation_tables_reference,
    synthesize_reference,
)
from tests.kernels.packing import launch

from cuvee.codec.entropy.token_classes import CLASSES
from cuvee.codec.errors import InputError
from cuvee.codec.format.streams import WINDOW
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.models.rope import cos_sin
from cuvee.codec.profiles.block_map import BlockMap
from cuvee.codec.profiles.section_basis import SectionBasis
from cuvee.codec.profiles.sections import Section, partition
from cuvee.kernels.jobs import BlockField, JobField, Status, TileField
from cuvee.kernels.ops import synthesize as synthesize_module
from cuvee.kernels.ops.analyze import analyze, gather
from cuvee.kernels.ops.arguments import ChunkBatch, RotationTables
from cuvee.kernels.ops.pages import contiguity, place_row
from cuvee.kernels.ops.synthesize import (
    SYNTHESIS_CONFIGS,
    SynthesisConfig,
    product_precision,
    synthesis_config,
    synthesize,
)
from cuvee.kernels.ops.transform import rotation_tables
from cuvee.kernels.tiles import TileLayout, lay_out_tiles

CPU = torch.device("cpu")
POISON = float("nan")
SINKS = 3


def rope(rotary_dim: int, scaling: float = 1.0, interleaved: bool = False) -> Rope:
    return Rope(tuple(1e4 ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)), scaling, interleaved)


def uniform(layer: LayerLayout, layers: int = 2, dtype: str = "float32") -> KVLayout:
    return KVLayout("synthetic", (layer,) * layers, dtype, None)


LAYOUTS: dict[str, KVLayout] = {
    "32": uniform(LayerLayout(2, 32, 32, rope(32))),
    "64": uniform(LayerLayout(1, 64, 64, rope(64)), dtype="bfloat16"),
    "80": uniform(LayerLayout(1, 80, 80, rope(80)), dtype="float16"),
    "96": uniform(LayerLayout(1, 96, 96, rope(96))),
    "128": uniform(LayerLayout(2, 128, 128, rope(128)), dtype="bfloat16"),
    "256": uniform(LayerLayout(1, 256, 256, rope(256))),
    "odd": uniform(LayerLayout(3, 7, 13, None), 3),
    "partial": uniform(LayerLayout(2, 33, 20, rope(10, 1.3))),
    "interleaved": uniform(LayerLayout(2, 40, 40, rope(40, interleaved=True))),
    "yarn": uniform(LayerLayout(2, 16, 16, rope(16, 1.3)), dtype="bfloat16"),
    "irregular": KVLayout(
        "synthetic",
        (
            LayerLayout(2, 12, 20, rope(12)),
            LayerLayout(1, 30, 7, rope(10, 1.2, True)),
            LayerLayout(3, 5, 9, None),
            LayerLayout(1, 160, 40, rope(12)),
        ),
        "float32",
        None,
    ),
}


@dataclass
class World:
    """Chunks of a layout in one dense cache each layer and unit, and all that the kernels take."""

    layout: KVLayout
    sections: tuple[Section, ...]
    device: torch.device
    counts: tuple[int, ...]  # tokens of each chunk
    ranks: list[tuple[int, ...]]
    bases: list[SectionBasis]
    tables: TileLayout
    tiles: Any
    blocks: Any
    inv_freq: torch.Tensor
    scaling: torch.Tensor
    chunk_rows: list[list[int]]
    slots: torch.Tensor
    units: list[torch.Tensor]
    places: Any
    elements: int

    @property
    def chunks(self) -> torch.Tensor:
        return torch.tensor(self.chunk_rows, device=self.device)

    @property
    def total(self) -> int:
        return sum(self.counts)

    def to_device(self, table: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(table)).to(self.device)

    def means(self) -> torch.Tensor:
        parts = [self.tables.pack(torch.cat([basis.sinks, basis.mean[None]]), i) for i, basis in enumerate(self.bases)]
        return torch.cat(parts, 1).contiguous().to(self.device)

    def basis(self, inverse: bool, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        parts = []
        for i, basis in enumerate(self.bases):
            matrices = [m.T for m in basis.inverse] if inverse else list(basis.forward)
            coded = [m[:rank] for m, rank in zip(matrices, self.ranks[i], strict=True)]
            parts += [m.flatten() for m in self.tables.pack_basis(coded, i)]
        # The rows of the next block follow: they must not be used.
        return torch.cat(parts).to(dtype).contiguous().to(self.device)

    def tables_of(self, use_source: bool, inverse: bool) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = (torch.full((self.total, len(self.inv_freq)), POISON, device=self.device) for _ in range(2))
        tables = RotationTables(cos, sin)
        rotation_tables_reference(
            self.chunks, self.inv_freq, self.scaling, tables, use_source, inverse, max(self.counts)
        )
        return cos, sin

    def batch(self, sections: int | None = None, first_section: int = 0) -> ChunkBatch:
        count = sections or len(self.sections)
        status = torch.zeros(len(self.counts) * count, dtype=torch.int32, device=self.device)
        return ChunkBatch(self.chunks, status, count, first_section, max(self.counts))

    def jobs(self) -> tuple[torch.Tensor, int]:
        """Jobs of all sections of all chunks, strides with room beyond the tokens, and the coefficients they need."""
        rows, size = [], 16
        for tokens in self.counts:
            for section, ranks in enumerate(self.ranks):
                row = [0] * len(JobField)
                row[JobField.TOKENS], row[JobField.COEFFICIENTS] = tokens, size
                row[JobField.STRIDE] = -(-tokens // 16) * 16 + 16 * (section % 2)
                size += sum(ranks) * row[JobField.STRIDE] + 16
                rows.append(row)
        return torch.tensor(rows, device=self.device), size

    def scales(self) -> torch.Tensor:
        return torch.full((len(self.units),), POISON, device=self.device)

    def status(self) -> torch.Tensor:
        return torch.zeros(len(self.counts) * len(self.sections), dtype=torch.int32, device=self.device)


@dataclass(frozen=True)
class FreeMap:
    """A `BlockMap` of any rank whose two maps have nothing to do with each other."""

    forward: torch.Tensor
    inverse: torch.Tensor

    @property
    def rank(self) -> int:
        return len(self.forward)

    @property
    def size(self) -> int:
        return len(self.inverse)


def make_world(
    name: str, group: str, device: torch.device, counts: tuple[int, ...] = (15, 1, 33), seed: int = 0,
    max_rank: int = 24,
) -> World:  # fmt: skip
    layout = LAYOUTS[name]
    sections = partition(layout, group)
    generator = torch.Generator().manual_seed(seed)
    angles: dict[Rope, int] = {}
    inv_freq: list[float] = []
    scaling: list[float] = []
    for layer in layout.layers:
        if layer.rope is not None and layer.rope not in angles:
            angles[layer.rope] = len(inv_freq)
            padding = -len(layer.rope.inv_freq) % 4
            inv_freq += [*layer.rope.inv_freq, *[0.0] * padding]
            scaling += [layer.rope.attention_scaling] * (len(layer.rope.inv_freq) + padding)
    tables = lay_out_tiles(layout, sections, angles)
    ranks, bases = [], []
    for index, section in enumerate(sections):
        stored = [min(n, max_rank) for n in section.blocks]
        ranks.append(tuple(max(r - (7 * (index + i)) % (r + 1), 0) for i, r in enumerate(stored)))
        shapes = list(zip(stored, section.blocks, strict=True))
        bases.append(
            SectionBasis(
                torch.randn(section.values, generator=generator),
                torch.randn(SINKS, section.values, generator=generator) * 5,
                cast(
                    tuple[BlockMap, ...],
                    tuple(
                        FreeMap(torch.randn(r, n, generator=generator), torch.randn(n, r, generator=generator))
                        for r, n in shapes
                    ),
                ),
            )
        )
    tiles, blocks, elements = tables.with_ranks(ranks)
    rows, first = [], 0
    for index, tokens in enumerate(counts):
        rows.append([tokens, first, (0, SINKS - 1, 1000)[index % 3], (7, 0, 100_000)[index % 3]])
        first += tokens
    cache_slots = first + 9
    slots = torch.randperm(cache_slots, generator=generator)[:first]
    units = []
    for layer in layout.layers:
        for size in (layer.head_dim, layer.value_dim):
            x = torch.randn(1, cache_slots, layer.kv_heads, size, generator=generator).to(layout.torch_dtype)
            units.append(x.to(device))
    places = np.array([place_row(unit) for unit in units], np.int64)
    return World(
        layout, sections, device, counts, ranks, bases, tables, tiles, blocks,
        torch.tensor(inv_freq, device=device), torch.tensor(scaling, device=device), rows, slots.to(device), units,
        places, elements,
    )  # fmt: skip


GROUPS = ["head", "heads:2", "unit", "layer", "layers:2", "all"]
CASES = [
    *(("irregular", group) for group in ("head", "unit", "layers:2")), ("64", "all"), ("32", "unit"),
    ("80", "layer"), ("96", "head"), ("128", "layer"), ("256", "head"), ("odd", "layers:2"),
    ("partial", "unit"), ("interleaved", "layer"), ("yarn", "all"), ("128", "heads:2"), ("odd", "heads:2"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "group"),
    # The layers of "irregular" differ in their number of heads, so each is a section of its own.
    [(n, g) for n in LAYOUTS for g in (*GROUPS, "layers:3", "heads:1") if (n, g) != ("irregular", "heads:2")],
)
def test_tiles_cover_every_value_once(name: str, group: str) -> None:
    layout = LAYOUTS[name]
    sections = partition(layout, group)
    ropes = {layer.rope for layer in layout.layers if layer.rope}
    tables = lay_out_tiles(layout, sections, {r: 100 * i for i, r in enumerate(ropes)})
    assert tables.columns == len(tables.tiles) * 2 * tables.pairs == len(tables.order) == tables.bounds[-1]
    assert 16 <= tables.pairs <= 64 and tables.order.dtype == np.int32
    for index, section in enumerate(sections):
        order = tables.order[tables.bounds[index] : tables.bounds[index + 1]]
        assert sorted(order[order >= 0].tolist()) == list(range(section.values))
        # Where each value lies according to the codec's order.
        where = [
            (2 * i + is_value, head, dim)
            for i, layer in enumerate(section.layers(layout), section.first_layer)
            for is_value, size in ((0, layer.head_dim), (1, layer.value_dim))
            for head in range(layer.kv_heads)
            for dim in range(size)
        ]
        if section.by_head:
            where.sort(key=lambda value: value[1])  # stable: by head, then as before
        own = tables.tiles[tables.tiles[:, TileField.SECTION] == index]
        ends = np.cumsum(section.blocks)
        blocks = tables.blocks[tables.blocks[:, BlockField.SECTION] == index]
        assert len(blocks) == len(section.blocks)
        assert np.array_equal(
            blocks[:, BlockField.COLUMN], tables.bounds[index] + np.cumsum([0, *blocks[:-1, BlockField.COLUMNS]])
        )
        for tile in own.tolist():
            layer = layout.layers[tile[TileField.UNIT] // 2]
            held = set()
            for half, (first, count) in enumerate(
                ((tile[TileField.DIM0], tile[TileField.COUNT0]), (tile[TileField.DIM1], tile[TileField.COUNT1]))
            ):
                column = tile[TileField.COLUMN] + half * tables.pairs
                values = tables.order[column : column + tables.pairs]
                assert (values[count:] == -1).all()
                for pair in range(count):
                    dim = first + pair * tile[TileField.STEP]
                    assert where[values[pair]] == (tile[TileField.UNIT], tile[TileField.HEAD], dim)
                    held.add(int(np.searchsorted(ends, values[pair], side="right")))
                    turned = layer.rope is not None and tile[TileField.UNIT] % 2 == 0 and dim < layer.rope.rotary_dim
                    assert turned == (tile[TileField.ANGLE] >= 0)
            assert len(held) == 1
            block = blocks[held.pop()]
            assert (
                block[BlockField.COLUMN]
                <= tile[TileField.COLUMN]
                < block[BlockField.COLUMN] + block[BlockField.COLUMNS]
            )
            if tile[TileField.ANGLE] >= 0:
                assert layer.rope is not None
                pair = tile[TileField.ANGLE] % 100
                half_dim = layer.rope.rotary_dim // 2
                expected = (2 * pair, 2 * pair + 1) if layer.rope.interleaved else (pair, pair + half_dim)
                assert (tile[TileField.DIM0], tile[TileField.DIM1]) == expected


def test_llama_is_one_tile_a_head() -> None:
    layout = uniform(LayerLayout(8, 128, 128, rope(128)), 2, "bfloat16")
    for group, blocks in (("head", 32), ("unit", 4), ("layer", 2), ("layers:2", 1)):
        tables = lay_out_tiles(layout, partition(layout, group), {rope(128): 0})
        assert (len(tables.tiles), tables.pairs, len(tables.blocks), tables.columns) == (32, 64, blocks, 4096)
        assert not (tables.order < 0).any()


def test_a_block_must_not_end_within_a_head() -> None:
    layout = LAYOUTS["odd"]
    with pytest.raises(InputError, match="an end within a head"):
        lay_out_tiles(layout, [Section(0, 1, (10, 50))], {})


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("use_source", [False, True])
def test_rotation_tables(use_source: bool, inverse: bool, device: torch.device) -> None:
    ropes = [rope(12), rope(128, 1.3), Rope((1.0, 0.9999999, 0.5), 0.7)]
    inv_freq = torch.tensor([f for r in ropes for f in r.inv_freq], device=device)
    scaling = torch.tensor([r.attention_scaling for r in ropes for _ in r.inv_freq], device=device)
    rows = [[33, 2, 0, 5], [1, 35, 2**20 - 1, 2**24 + 1], [16, 40, 131_056, 2**20 - 16]]
    chunks = torch.tensor(rows, device=device)
    got, want = ([torch.full((60, len(inv_freq)), POISON, device=device) for _ in range(2)] for _ in range(2))
    rotation_tables(chunks, inv_freq, scaling, RotationTables(*got), use_source, inverse, 33)
    rotation_tables_reference(chunks, inv_freq, scaling, RotationTables(*want), use_source, inverse, 33)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=3e-7, equal_nan=True)  # two units of float32 at 1.43
        assert int(a.isnan().all(1).sum()) == 60 - 50
    # The codec's own tables.
    for tokens, first, source, target in rows:
        positions = torch.arange(tokens, device=device) + (source if use_source else target)
        column = 0
        for r in ropes:
            tables = cos_sin(r, positions)
            square = r.attention_scaling**2 if inverse else 1
            for mine, theirs in zip(got, tables, strict=True):
                part = mine[first : first + tokens, column : column + len(r.inv_freq)]
                torch.testing.assert_close(part, theirs / square, rtol=0, atol=3e-7)
            column += len(r.inv_freq)


def test_no_rotation_tables(device: torch.device) -> None:
    none = torch.empty(0, device=device)
    table = torch.empty(5, 0, device=device)
    tables = RotationTables(table, table)
    rotation_tables(torch.tensor([[5, 0, 0, 0]], device=device), none, none, tables, True, True, 5)


def gather_arguments(world: World, sections: slice = slice(None)) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """Arguments of `gather` for a run of sections, poisoned x, status."""
    first, end, _ = sections.indices(len(world.sections))
    own = (world.tiles[:, TileField.SECTION] >= first) & (world.tiles[:, TileField.SECTION] < end)
    tiles = world.tiles[own]
    bounds = world.tables.bounds
    width = int(bounds[end]) + 32
    x = torch.full((world.total + 2, width), POISON, device=world.device)
    cos, sin = world.tables_of(True, True)
    status = torch.zeros(len(world.counts) * (end - first), dtype=torch.int32, device=world.device)
    unit_stride, aligned = contiguity(world.places, tiles, world.layout.torch_dtype)
    return (
        {
            "tiles": world.to_device(tiles), "means": world.means(), "chunks": world.chunks, "slots": world.slots,
            "cos": cos, "sin": sin, "places": world.to_device(world.places), "scales": world.scales(), "x": x,
            "status": status, "sections": end - first, "first_section": first, "max_tokens": max(world.counts),
            "element": world.layout.torch_dtype, "unit_stride": unit_stride, "aligned": aligned,
            "pairs": world.tables.pairs,
        },
        x,
        status,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "group"), CASES)
def test_gather(name: str, group: str, device: torch.device) -> None:
    world = make_world(name, group, device)
    arguments, x, status = gather_arguments(world)
    arguments["means"][:, torch.from_numpy(world.tables.order < 0)] = 7
    want = torch.full_like(x, POISON)
    want_status = torch.zeros_like(status)
    launch(gather, **arguments)
    launch(gather_reference, **{**arguments, "x": want, "status": want_status})
    # At most three roundings of sums of two products.
    torch.testing.assert_close(x, want, rtol=1e-6, atol=1e-5, equal_nan=True)
    assert not status.any() and not want_status.any()
    assert bool(x[world.total :].isnan().all() and x[:, world.tables.columns :].isnan().all())
    packed = x[: world.total, : world.tables.columns]
    assert bool((packed[:, torch.from_numpy(world.tables.order < 0)] == 0).all())


def centers(world: World, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with a center of its own for every third token, in rows behind the means."""
    generator = torch.Generator().manual_seed(11)
    means = arguments["means"]
    further = torch.randn(world.total, means.shape[1], generator=generator).to(world.device)
    rows = torch.cat([torch.arange(tokens).clamp_max(len(means) - 1) for tokens, *_ in world.chunk_rows])
    own = torch.arange(world.total) % 3 == 0
    rows[own] = len(means) + torch.randperm(world.total, generator=generator)[own]
    return {**arguments, "means": torch.cat([means, further]), "center_rows": rows.int().to(world.device)}


@pytest.mark.parametrize(("name", "group"), [("irregular", "layer"), ("64", "layers:2"), ("80", "head")])
def test_gather_with_centers(name: str, group: str, device: torch.device) -> None:
    world = make_world(name, group, device)
    arguments, x, status = gather_arguments(world)
    arguments = centers(world, arguments)
    want = torch.full_like(x, POISON)
    launch(gather, **arguments)
    launch(gather_reference, **{**arguments, "x": want})
    torch.testing.assert_close(x, want, rtol=1e-6, atol=1e-5, equal_nan=True)
    assert not status.any()
    means, rows = arguments["means"], arguments["center_rows"].long()
    plain, same, _ = gather_arguments(world)
    launch(gather, **{**plain, "means": torch.zeros_like(plain["means"])})
    held = torch.from_numpy(world.tables.order >= 0)
    columns = slice(0, world.tables.columns)
    torch.testing.assert_close(
        x[: world.total, columns][:, held], (same[: world.total, columns] - means[rows])[:, held], rtol=1e-6, atol=1e-5
    )


def test_gather_a_run_of_sections_with_holes(device: torch.device) -> None:
    world = make_world("irregular", "layer", device)
    world.slots[[2, 15, 40]] = -1
    arguments, x, status = gather_arguments(world, slice(1, 3))
    want = torch.full_like(x, POISON)
    launch(gather, **arguments)
    launch(gather_reference, **{**arguments, "x": want})
    torch.testing.assert_close(x, want, rtol=1e-6, atol=1e-5, equal_nan=True)
    assert not status.any()
    own = slice(int(world.tables.bounds[1]), int(world.tables.bounds[3]))
    torch.testing.assert_close(x[2, own], -world.means()[2, own], rtol=0, atol=0)
    torch.testing.assert_close(x[40, own], -world.means()[SINKS, own], rtol=0, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_gather_flags_what_is_not_finite_and_slots(value: float, device: torch.device) -> None:
    world = make_world("irregular", "layer", device)
    sections = len(world.sections)
    # Slots 0 … in chunk order, so that it is known who reads what.
    world.slots = torch.arange(world.total, device=device)
    world.units[0][0, 3, 1, 11] = value  # chunk 0, layer 0
    world.units[5][0, 15, 2, 8] = value  # chunk 1, layer 2
    world.units[6][0, world.total + 1] = value  # nobody's
    world.slots[20] = 10**6  # chunk 2: all sections
    arguments, x, status = gather_arguments(world)
    want = torch.zeros_like(status)
    launch(gather, **arguments)
    launch(gather_reference, **{**arguments, "x": torch.empty_like(x), "status": want})
    expected = torch.zeros(3, sections, dtype=torch.int32)
    expected[0, 0] = expected[1, 2] = int(Status.NOT_FINITE)
    expected[2] = int(Status.SLOT)
    assert torch.equal(status.cpu(), expected.flatten()) and torch.equal(want, status)


@pytest.mark.parametrize(("name", "group"), CASES)
def test_analyze(name: str, group: str, device: torch.device) -> None:
    world = make_world(name, group, device)
    arguments, x, _ = gather_arguments(world)
    launch(gather_reference, **arguments)
    jobs, size = world.jobs()
    y, want = (torch.full((size,), POISON, device=device) for _ in range(2))
    max_rank = max(r for ranks in world.ranks for r in ranks)
    shared = (jobs, world.to_device(world.blocks), world.basis(inverse=False), world.batch())
    analyze(x, *shared, y, max_rank)
    analyze_reference(x, *shared, want, max_rank)
    # Nothing but the owed elements; float32 sums of up to N products, far from bfloat16's error.
    length = max(section.values for section in world.sections)
    bound = 4e-6 * float(x[: world.total, : world.tables.columns].abs().max()) * length**0.5 * 4
    torch.testing.assert_close(y, want, rtol=0, atol=bound, equal_nan=True)


def test_analyze_a_run_of_sections_and_large_ranks(device: torch.device) -> None:
    world = make_world("128", "layer", device, (20,), max_rank=200)
    world.ranks = [(200,), (131,)]
    world.tiles, world.blocks, _ = world.tables.with_ranks(world.ranks)
    arguments, x, _ = gather_arguments(world, slice(1, 2))
    launch(gather_reference, **arguments)
    rows, size = world.jobs()
    y, want = (torch.full((size,), POISON, device=device) for _ in range(2))
    blocks = world.to_device(world.blocks[1:])
    shared = (rows[1:], blocks, world.basis(inverse=False), world.batch(1, 1))
    analyze(x, *shared, y, 131)
    analyze_reference(x, *shared, want, 131)
    torch.testing.assert_close(y, want, rtol=0, atol=2e-3, equal_nan=True)
    assert int((~y.isnan()).sum()) == 131 * 20
    analyze(x, *shared, y, 0)  # nothing is coded, nothing is launched


def synthesis(world: World, dtype: torch.dtype, sections: slice = slice(None)) -> tuple[dict[str, Any], torch.Tensor]:
    """Arguments of `synthesize` with random coefficients, and these; the cache is poisoned."""
    first, end, _ = sections.indices(len(world.sections))
    own = (world.tiles[:, TileField.SECTION] >= first) & (world.tiles[:, TileField.SECTION] < end)
    tiles = world.tiles[own]
    all_jobs, size = world.jobs()
    rows = all_jobs.view(len(world.counts), len(world.sections), -1)[:, first:end].flatten(0, 1)
    y = torch.full((size,), POISON, dtype=dtype, device=world.device)
    generator = torch.Generator().manual_seed(5)
    for index, row in enumerate(rows.tolist()):
        rank = sum(world.ranks[first + index % (end - first)])
        part = y.as_strided((rank, row[JobField.TOKENS]), (row[JobField.STRIDE], 1), row[JobField.COEFFICIENTS])
        part.copy_(torch.randn(part.shape, generator=generator))
    cos, sin = world.tables_of(False, False)
    element = world.units[0].dtype
    # All tokens have class 0, so that they keep their order.
    columns = torch.arange(max(world.counts), device=world.device)
    block_ranks = world.to_device(world.blocks[:, BlockField.RANK]).int()[:, None].repeat(1, CLASSES)
    unit_stride, aligned = contiguity(world.places, tiles, element)
    return {
        "y": y, "jobs": rows, "tiles": world.to_device(tiles), "basis": world.basis(True, dtype),
        "means": world.means(), "chunks": world.chunks, "slots": world.slots, "cos": cos, "sin": sin,
        "places": world.to_device(world.places), "scales": world.scales(),
        "status": torch.zeros(len(rows), dtype=torch.int32, device=world.device), "sections": end - first,
        "first_section": first, "max_tokens": max(world.counts), "element": element, "unit_stride": unit_stride,
        "pairs": world.tables.pairs, "aligned": aligned, "order": (columns % WINDOW).to(torch.uint8),
        "classes": torch.zeros(len(columns), dtype=torch.uint8, device=world.device), "block_ranks": block_ranks,
        "config": synthesis_config(dtype, element, 1 << 16, max(world.counts), aligned),
    }, y  # fmt: skip


def poison(world: World) -> None:
    for unit in world.units:
        unit.view(torch.uint8).fill_(0xAB)


def run_both(world: World, arguments: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Caches that the kernel and its reference wrote."""
    poison(world)
    launch(synthesize, **arguments)
    got = [unit.clone() for unit in world.units]
    poison(world)
    status = torch.zeros_like(arguments["status"])
    launch(synthesize_reference, **{**arguments, "status": status})
    assert torch.equal(status, arguments["status"])
    return got, [unit.clone() for unit in world.units]


def assert_same_cache(got: list[torch.Tensor], want: list[torch.Tensor], terms: int) -> None:
    """Equal but for the order of float32 sums: then at most a step of the element type apart, mostly none."""
    for a, b in zip(got, want, strict=True):
        step = torch.finfo(a.dtype).eps
        largest = float(b.float().abs().max())
        # On a GPU products that become float16 round their factors to TF32.
        factor = 2**-11 if a.dtype == torch.float16 else 2e-7
        bound = factor * terms**0.5 * 8 * largest
        torch.testing.assert_close(a.float(), b.float(), rtol=step, atol=bound)
        if a.dtype == torch.bfloat16:
            assert float((a.view(torch.int16) != b.view(torch.int16)).float().mean()) < 0.01


@pytest.mark.parametrize(
    ("name", "group", "dtype"),
    [
        *((*case, torch.bfloat16) for case in CASES),
        *((name, "layer", torch.float32) for name in ("irregular", "80", "partial")),
        ("yarn", "unit", torch.float16),
    ],
)
def test_synthesize(name: str, group: str, dtype: torch.dtype, device: torch.device) -> None:
    world = make_world(name, group, device)
    arguments, _ = synthesis(world, dtype)
    got, want = run_both(world, arguments)
    assert_same_cache(got, want, 24)
    assert not arguments["status"].any()
    untouched = torch.ones(world.units[0].shape[1], dtype=torch.bool)
    untouched[world.slots.cpu()] = False
    for unit in got:
        rest = unit[0][untouched.to(device)].contiguous().view(torch.uint8)
        assert len(rest) == 9 and bool((rest == 0xAB).all())


@pytest.mark.parametrize(("name", "group"), [("irregular", "layer"), ("64", "layers:2"), ("80", "head")])
def test_synthesize_with_centers(name: str, group: str, device: torch.device) -> None:
    world = make_world(name, group, device)
    arguments, _ = synthesis(world, torch.bfloat16)
    arguments = centers(world, arguments)
    got, want = run_both(world, arguments)
    assert_same_cache(got, want, 24)
    without, _ = run_both(world, {name: x for name, x in arguments.items() if name != "center_rows"})
    assert any(not torch.equal(a, b) for a, b in zip(got, without, strict=True))


@pytest.mark.parametrize("config", SYNTHESIS_CONFIGS)
def test_synthesize_in_every_config(config: SynthesisConfig, device: torch.device) -> None:
    world = make_world("64", "layer", device, (1, 63, 17, 257), max_rank=40)
    arguments, _ = synthesis(world, torch.bfloat16)
    assert_same_cache(*run_both(world, {**arguments, "config": config}), 40)


def test_synthesize_long_sums(device: torch.device) -> None:
    world = make_world("128", "layers:2", device, (63,), max_rank=301)
    arguments, _ = synthesis(world, torch.bfloat16)
    assert world.ranks == [(301,)]
    assert_same_cache(*run_both(world, arguments), 301)


def test_synthesize_only_means(device: torch.device) -> None:
    world = make_world("irregular", "unit", device)
    world.ranks = [tuple(0 for _ in ranks) for ranks in world.ranks]
    world.tiles, world.blocks, _ = world.tables.with_ranks(world.ranks)
    arguments, y = synthesis(world, torch.bfloat16)
    assert bool(y.isnan().all())
    got, want = run_both(world, arguments)
    assert_same_cache(got, want, 1)
    last = world.slots[-1]
    torch.testing.assert_close(got[1][0, last].flatten(), world.bases[0].mean[-40:].to(device))


@pytest.mark.parametrize("name", ["80", "yarn", "96"])  # of float16, bfloat16 and float32
def test_synthesize_stays_in_range(name: str, device: torch.device) -> None:
    world = make_world(name, "layer", device, (5,))
    arguments, _ = synthesis(world, torch.bfloat16)
    arguments["means"][:, ::11] = 3.4028e38  # one of a pair; `yarn` turns it and scales it
    got, want = run_both(world, arguments)
    limit = torch.finfo(got[0].dtype).max
    for a, b in zip(got, want, strict=True):
        assert bool(a.isfinite().all()) and torch.equal(a == limit, b == limit)
    assert any(bool((unit == limit).any()) for unit in got) or name == "96"


@pytest.mark.parametrize("element", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("order", ["bthd", "bhtd", "bhdt", "packed"])
def test_synthesize_and_gather_in_pages(element: torch.dtype, order: str, device: torch.device) -> None:
    world = make_world("32", "layer", device, (33, 15))
    shape = {"b": 4, "t": 16, "h": 2, "d": 32}
    axes = "bthd" if order == "packed" else order
    units = []
    for _ in world.units[::2]:
        sizes = [shape[axis] for axis in axes]
        sizes[-1] *= 1 + (order == "packed")
        raws = [torch.zeros(sizes, device=device).to(element) for _ in range(1 if order == "packed" else 2)]
        pair = raws[0].split(32, -1) if order == "packed" else raws
        units += [raw.permute([axes.index(axis) for axis in "bthd"]) for raw in pair]
    world.units = units
    world.places = np.array([place_row(unit) for unit in units], np.int64)
    world.slots[5] = -1
    world.slots[40] = 64  # beyond: chunk 1
    arguments, _ = synthesis(world, torch.bfloat16)
    arguments["scales"] = torch.tensor([0.25, 0.1, 3.0, 1.0], device=device)

    def run(function: Any, status: torch.Tensor) -> list[torch.Tensor]:
        for unit in units:
            unit.copy_(torch.full((), 7.0).to(element))
        launch(function, **{**arguments, "status": status})
        return [unit.float() for unit in units]

    got = run(synthesize, arguments["status"])
    status = torch.zeros_like(arguments["status"])
    want = run(synthesize_reference, status)
    assert arguments["status"].tolist() == [0, 0, int(Status.SLOT), int(Status.SLOT)] == status.tolist()
    used = set(world.slots.tolist()) - {-1, 64}
    for a, b, scale in zip(got, want, arguments["scales"].tolist(), strict=True):
        # A sum that lies at a tie of the element type may fall to either side.
        torch.testing.assert_close(a, b, rtol=2 * torch.finfo(element).eps, atol=1e-3 / min(scale, 1))
        assert float((a != b).float().mean()) < 0.02
        for slot in set(range(64)) - used:
            assert bool((a.flatten(0, 1)[slot] == 7).all())
    inputs, x, _ = gather_arguments(world)
    inputs |= {"scales": arguments["scales"], "element": element}
    inputs["unit_stride"], inputs["aligned"] = contiguity(world.places, world.tiles, element)
    theirs = torch.full_like(x, POISON)
    launch(gather, **inputs)
    launch(gather_reference, **{**inputs, "x": theirs})
    torch.testing.assert_close(x, theirs, rtol=1e-6, atol=2e-5, equal_nan=True)


def test_synthesize_a_run_of_sections(device: torch.device) -> None:
    world = make_world("irregular", "layer", device)
    arguments, _ = synthesis(world, torch.float32, slice(1, 3))
    got, want = run_both(world, arguments)
    assert_same_cache(got[2:6], want[2:6], 24)
    for unit in (*got[:2], *got[6:]):
        assert bool((unit.view(torch.uint8) == 0xAB).all())


def test_float16_takes_products_of_its_own_precision() -> None:
    assert product_precision(torch.float32, torch.float16) == "tf32"
    assert product_precision(torch.float32, torch.float32) == "ieee"
    wide, exact = (synthesis_config(torch.float32, element, 1400, 256) for element in (torch.float16, torch.float32))
    assert wide.block_t > exact.block_t


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_amd_is_never_asked_for_tf32(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """gfx1100 has no such precision, and its compiler refuses the word even where it means nothing."""
    monkeypatch.setattr(torch.version, "hip", "6.3")
    assert {product_precision(dtype, element) for element in (torch.float16, torch.bfloat16)} == {"ieee"}


def test_choice_of_config() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for rank in (0, 88, 128, 1400):
            for tokens in (1, 16, 17, 64, 128, 256):
                config = synthesis_config(dtype, torch.float16, rank, tokens)
                assert config in SYNTHESIS_CONFIGS and (tokens > 16 or config.block_t == 16)


def test_a_triton_without_the_fence_copies_nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator finds the missing fence where such a Triton is installed; here, that the launch avoids it."""
    launched: list[int] = []
    for fenced in (True, False):
        monkeypatch.setattr(synthesize_module, "FENCED", fenced)
        launched += [synthesize_module._stages(config) for config in SYNTHESIS_CONFIGS]
    assert launched == [config.num_stages for config in SYNTHESIS_CONFIGS] + [1] * len(SYNTHESIS_CONFIGS)
