"""The kernels of lossless sections against the codec: every bit, wherever the cache lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.packing import launch

from cuvee.codec.entropy.tables import EntropyTables, normalize_counts
from cuvee.codec.layout import KVLayout, Rope
from cuvee.codec.models.dtypes import saturated
from cuvee.codec.models.rope import cos_sin, rotate, unrotate
from cuvee.codec.profiles.sections import partition
from cuvee.codec.stages.reference.byte_planes import byte_planes, choose_tables, split_unit
from cuvee.kernels.jobs import ChunkField, Status, TileField
from cuvee.kernels.ops.lossless import BytePlaneField
from cuvee.kernels.ops.merge_planes import decoding_tables, merge_planes
from cuvee.kernels.ops.pages import contiguity, place_row
from cuvee.kernels.ops.rans import WIDTH, decoding_table
from cuvee.kernels.ops.split_planes import count_symbols, split_planes, sum_bytes
from cuvee.kernels.tiles import lay_out_tiles

POISON = 0xAB
ODD, EVEN = (1, 63, 70), (64, 8)
BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Cache:
    """Units in memory, poisoned: `[blocks, tokens per block, heads, dimensions]` views of `raw`."""

    raw: list[torch.Tensor]
    units: list[torch.Tensor]
    places: torch.Tensor
    slots: torch.Tensor

    def bytes(self) -> list[torch.Tensor]:
        return [raw.view(torch.uint8).cpu() for raw in self.raw]

    def rows(self, unit: int, at: slice) -> torch.Tensor:
        """The values of some tokens, `[t, H, D]`."""
        view = self.units[unit]
        slot = self.slots[at]
        bits = view.view(BITS.get(view.element_size(), torch.uint8))
        return bits[slot // view.shape[1], slot % view.shape[1]].view(view.dtype)

    def fill(self, unit: int, at: slice, rows: torch.Tensor) -> None:
        view = self.units[unit]
        slot = self.slots[at]
        whole = BITS.get(view.element_size(), torch.uint8)
        view.view(whole)[slot // view.shape[1], slot % view.shape[1]] = rows.to(view.dtype).to(slot.device).view(whole)


def make_cache(layout: KVLayout, tokens: int, kind: str, element: torch.dtype, device: torch.device) -> Cache:
    block = tokens + 3 if kind == "dense" else 16
    blocks = 1 if kind == "dense" else -(-tokens // block) + 2
    raw, units = [], []
    for layer in layout.layers:
        for size in (layer.head_dim, layer.value_dim):
            shape = [blocks, block, layer.kv_heads, size]
            if kind == "pages by head":  # [blocks, heads, tokens, dimensions]
                shape = [blocks, layer.kv_heads, block, size]
            memory = torch.full((int(np.prod(shape)) * element.itemsize,), POISON, dtype=torch.uint8, device=device)
            raw.append(memory)
            view = memory.view(element).view(shape)
            units.append(view.transpose(1, 2) if kind == "pages by head" else view)
    places = torch.tensor([place_row(view) for view in units], device=device)
    order = torch.randperm(blocks * block, generator=torch.Generator().manual_seed(5))
    slots = torch.arange(2, 2 + tokens) if kind == "dense" else order[:tokens]
    return Cache(raw, units, places, slots.to(device))


@dataclass(frozen=True)
class Tables:
    """What all launches of a test share."""

    layout: KVLayout
    tokens: tuple[int, ...]
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    device: torch.device

    @property
    def total(self) -> int:
        return sum(self.tokens)

    @property
    def itemsize(self) -> int:
        return self.layout.torch_dtype.itemsize

    def at(self, chunk: int) -> slice:
        first = sum(self.tokens[:chunk])
        return slice(first, first + self.tokens[chunk])

    def angles(self) -> dict[Rope, int]:
        columns: dict[Rope, int] = {}
        for layer in self.layout.layers:
            if layer.rope is not None and layer.rope not in columns:
                columns[layer.rope] = sum(rope.rotary_dim // 2 for rope in columns)
        return columns

    def rotations(self, source: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Tables as `codec.rope` makes them; those of the source turn back."""
        starts = self.sources if source else self.targets
        positions = torch.cat([torch.arange(s, s + t) for s, t in zip(starts, self.tokens, strict=True)])
        parts = [torch.zeros(2, self.total, 1)]
        for rope in self.angles():
            scale = rope.attention_scaling**2 if source else 1.0
            parts.append(torch.stack(cos_sin(rope, positions)) / scale)
        cos, sin = torch.cat(parts[1:] or parts, dim=2).to(self.device).unbind()
        return cos.contiguous(), sin.contiguous()

    def values(self, layer: int, unit: int) -> int:
        sizes = self.layout.layers[layer]
        return (sizes.key_values, sizes.value_values)[unit]

    def arguments(self, cache: Cache, element: torch.dtype, **changes: Any) -> dict[str, Any]:
        """The arguments of `merge_planes` and its kin but for the arrays of bytes."""
        sections = partition(self.layout, "unit")
        laid = lay_out_tiles(self.layout, sections, self.angles())
        chunks = np.zeros((len(self.tokens), len(ChunkField)), np.int64)
        chunks[:, ChunkField.TOKENS] = self.tokens
        chunks[:, ChunkField.FIRST] = np.cumsum(self.tokens) - self.tokens
        chunks[:, ChunkField.SOURCE], chunks[:, ChunkField.TARGET] = self.sources, self.targets
        unit_stride, aligned = contiguity(cache.places.cpu().numpy(), laid.tiles, element)
        return {
            "chunks": torch.from_numpy(chunks).to(self.device),
            "tiles": torch.from_numpy(laid.tiles).to(self.device),
            "places": cache.places,
            "scales": torch.rand(len(cache.places), generator=torch.Generator().manual_seed(8)).to(self.device) + 0.01,
            "slots": cache.slots,
            "status": torch.zeros(len(self.tokens) * len(sections), dtype=torch.int32, device=self.device),
            "sections": len(sections),
            "first_section": 0,
            "max_tokens": max(self.tokens),
            "pairs": laid.pairs,
            "dtype": self.layout.torch_dtype,
            "element": element,
            "unit_stride": unit_stride,
            "aligned": aligned,
            **changes,
        }

    def turning(self) -> dict[str, Any]:
        """The further arguments of `merge_planes`."""
        source_cos, source_sin = self.rotations(True)
        cos, sin = self.rotations(False)
        return {
            "source_cos": source_cos, "source_sin": source_sin, "target_cos": cos, "target_sin": sin,
            "moved": self.sources != self.targets, "even": not any(t % 4 for t in self.tokens),
        }  # fmt: skip

    def units(self) -> list[tuple[int, int, int, int]]:
        """(chunk, layer, unit, values per token) in the order of the rows of `table`."""
        layers = range(self.layout.num_layers)
        return [(c, x, u, self.values(x, u)) for c in range(len(self.tokens)) for x in layers for u in (0, 1)]

    def coded(self, values: Sequence[Sequence[torch.Tensor]], base: int = 0) -> dict[str, Any]:
        """Chunks' values `[chunk][2 * layer + unit]` -> data, planes, table, with some planes coded, some stored."""
        choose = np.random.default_rng(4)
        data, planes, table = bytearray(b"head"), bytearray(), []
        for chunk, layer, unit, width in self.units():
            head_dim = values[chunk][2 * layer + unit].shape[2]
            for plane in byte_planes(values[chunk][2 * layer + unit].flatten(1)):
                if choose.random() < 0.5:
                    table.append((len(data), -1, head_dim))
                    data += plane.tobytes()
                    continue
                reference = choose.integers(0, 256, width, dtype=np.uint8)
                table.append((base + len(planes), len(data), head_dim))
                data += reference.tobytes() + bytes(-width % 4)
                planes += (plane - reference[:, None]).tobytes()
        coded = torch.frombuffer(planes or bytearray(1), dtype=torch.uint8).to(self.device)
        if base:
            there = torch.empty(base + len(coded), dtype=torch.uint8, device=self.device)
            there[base:] = coded
            coded = there
        return {
            "data": torch.frombuffer(data, dtype=torch.uint8).to(self.device),
            "planes": coded,
            "table": torch.tensor(table, device=self.device),
        }


def random_values(tables: Tables, noise: bool, seed: int = 0) -> list[list[torch.Tensor]]:
    """`[chunk][unit]` of values: all bit patterns, or what a cache may hold."""
    generator = torch.Generator().manual_seed(seed)
    dtype = tables.layout.torch_dtype
    chunks = []
    for tokens in tables.tokens:
        units = []
        for layer in tables.layout.layers:
            for size in (layer.head_dim, layer.value_dim):
                shape = (tokens, layer.kv_heads, size)
                if noise:
                    bits = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator)
                    units.append(bits.to(BITS[dtype.itemsize]).view(dtype))
                else:
                    units.append((4 * torch.randn(shape, generator=generator)).to(dtype))
        chunks.append(units)
    return chunks


def with_ends(chunks: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """The same with a token at the end of the dtype's range: rotations and smaller types leave it."""
    for units in chunks:
        for unit in units:
            unit[1] = torch.finfo(unit.dtype).max
    return chunks


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    whole = BITS.get(left.element_size(), torch.uint8)
    return torch.equal(left.contiguous().view(whole).cpu(), right.contiguous().view(whole).cpu())


def setting(layout: KVLayout, device: torch.device, dtype: str, tokens: tuple[int, ...], moved: bool = False) -> Tables:
    sources = tuple(10 + 7 * i for i in range(len(tokens)))
    targets = tuple(s + 500 * (i % 2) for i, s in enumerate(sources)) if moved else sources
    return Tables(replace(layout, dtype=dtype), tokens, sources, targets, device)


def merged(
    tables: Tables, kind: str, element: torch.dtype, coded: dict[str, Any], **changes: Any
) -> tuple[Cache, torch.Tensor]:
    """A cache that `merge_planes` wrote, and the status of the jobs."""
    cache = make_cache(tables.layout, tables.total, kind, element, tables.device)
    arguments = tables.arguments(cache, element, **changes)
    launch(merge_planes, **coded, **arguments, **tables.turning())
    return cache, arguments["status"]


def assert_holds(cache: Cache, tables: Tables, kind: str, values: Sequence[Sequence[torch.Tensor]]) -> None:
    """These values `[chunk][unit]` of the cache's type, at the slots of their tokens, and poison everywhere else."""
    want = make_cache(tables.layout, tables.total, kind, cache.units[0].dtype, tables.device)
    for chunk, units in enumerate(values):
        for unit, rows in enumerate(units):
            want.fill(unit, tables.at(chunk), rows)
    assert all(torch.equal(a, b) for a, b in zip(cache.bytes(), want.bytes(), strict=True))


def moved(tables: Tables, values: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """The values with the keys of chunk 1 turned to its target, as the codec turns them."""
    out = [list(units) for units in values]
    source, target = (torch.arange(tables.tokens[1]) + x[1] for x in (tables.sources, tables.targets))
    for index, layer in enumerate(tables.layout.layers):
        if layer.rope is not None:
            free = unrotate(out[1][2 * index], layer.rope, source)
            out[1][2 * index] = saturated(rotate(free, layer.rope, target), tables.layout.torch_dtype)
            assert not same_bits(out[1][2 * index], values[1][2 * index])
    return out


def test_decoding_tables(device: torch.device) -> None:
    generator = np.random.default_rng(0)
    counts = [np.bincount([s], minlength=256) for s in (0, 1, 254, 255)]
    counts += [np.ones(256, np.int64), np.arange(256), np.bincount([0, 255, 255], minlength=256)]
    counts += [generator.geometric(p, 256) * (generator.random(256) < 0.5) for p in (0.5, 0.01, 0.0001)]
    tables = EntropyTables(np.stack([normalize_counts(count, 12) for count in counts]), 12)
    shape = (len(counts) + 1, WIDTH)
    decoding = torch.full(shape, POISON, dtype=torch.int32).view(torch.uint32).to(device)
    decoding_tables(torch.from_numpy(tables.freq).to(device), decoding[:-1])
    expected = np.full(shape, POISON, np.uint32)
    expected[:-1] = decoding_table(tables)
    assert decoding.cpu().numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("name", "dtype", "kind", "tokens"),
    [
        ("irregular", "bfloat16", "dense", ODD),
        ("irregular", "float16", "pages", (15, 8)),
        ("irregular", "float32", "pages by head", (2, 65)),
        ("gqa", "bfloat16", "pages by head", EVEN),
        ("gqa", "bfloat16", "pages", EVEN),
        ("mqa", "float16", "dense", (256,)),
        ("mqa", "float32", "dense", EVEN),
    ],
)
def test_merge_restores_every_bit(
    layouts: dict[str, KVLayout], device: torch.device, name: str, dtype: str, kind: str, tokens: tuple[int, ...]
) -> None:  # fmt: skip
    tables = setting(layouts[name], device, dtype, tokens)
    values = random_values(tables, noise=True)
    cache, status = merged(tables, kind, tables.layout.torch_dtype, tables.coded(values))
    assert not status.any()
    assert_holds(cache, tables, kind, values)


@pytest.mark.parametrize(("name", "dtype"), [("irregular", "float32"), ("partial", "bfloat16"), ("yarn", "float16")])
def test_merge_turns_the_keys_of_chunks_that_move(
    layouts: dict[str, KVLayout], device: torch.device, name: str, dtype: str
) -> None:  # fmt: skip
    tables = setting(layouts[name], device, dtype, (15, 70, 3), moved=True)
    values = with_ends(random_values(tables, noise=False))
    cache, status = merged(tables, "pages", tables.layout.torch_dtype, tables.coded(values))
    assert not status.any()
    assert_holds(cache, tables, "pages", moved(tables, values))
    # What is not finite stays so: it is no value beyond the range.
    for unit in values[1][::2]:
        unit[:, 0, 0] = float("inf")
    cache, _ = merged(tables, "pages", tables.layout.torch_dtype, tables.coded(values))
    for index, layer in enumerate(tables.layout.layers):
        if layer.rope is not None:
            assert not bool(cache.rows(2 * index, tables.at(1))[:, 0, 0].isfinite().any())


@pytest.mark.parametrize("element", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.float32])
def test_a_cache_of_another_type_gets_the_values(
    layouts: dict[str, KVLayout], device: torch.device, element: torch.dtype
) -> None:  # fmt: skip
    tables = setting(layouts["gqa"], device, "bfloat16", (15, 20), moved=True)
    values = with_ends(random_values(tables, noise=False))
    cache, _ = merged(tables, "pages", element, tables.coded(values))
    scales = tables.arguments(cache, element)["scales"].cpu()
    narrow = element.itemsize == 1
    expected = [
        [
            saturated(
                rows.float() * (1 / scale) if narrow else rows.float(), element, None if narrow else ~rows.isinf()
            )
            for rows, scale in zip(units, scales, strict=True)
        ]
        for units in moved(tables, values)
    ]
    assert_holds(cache, tables, "pages", expected)


@pytest.mark.parametrize("element", [torch.float16, torch.float8_e5m2])
def test_tokens_without_a_slot(layouts: dict[str, KVLayout], device: torch.device, element: torch.dtype) -> None:
    tables = setting(layouts["mqa"], device, "float16", (9, 5))
    values = random_values(tables, noise=False)
    cache = make_cache(tables.layout, tables.total, "pages", element, device)
    slots = cache.slots.clone()
    slots[:3] = -1  # as for tokens that nobody asked for
    slots[10], slots[11] = 1 << 40, -2
    result, status = merged(tables, "pages", element, tables.coded(values), slots=slots)
    assert [int(x) for x in status] == [0] * 3 + [int(Status.SLOT)] * 3
    for at in (slice(0, 3), slice(10, 12)):
        assert bool((result.rows(0, at).view(torch.uint8) == POISON).all())
    if element == torch.float16:
        assert same_bits(result.rows(0, slice(3, 9)), values[0][0][3:])
        assert same_bits(result.rows(1, slice(12, 14)), values[1][1][3:])


def test_a_run_of_layers(layouts: dict[str, KVLayout], device: torch.device) -> None:
    tables = setting(layouts["irregular"], device, "bfloat16", (9, 18))
    values = random_values(tables, noise=True)
    coded = tables.coded(values)
    cache = make_cache(tables.layout, tables.total, "dense", torch.bfloat16, device)
    whole = tables.arguments(cache, torch.bfloat16)
    tiles = whole["tiles"][whole["tiles"][:, TileField.SECTION] >= 1]
    own: dict[str, Any] = {"tiles": tiles, "sections": 2, "first_section": 1}
    coded["table"] = coded["table"].view(2, 3, -1, len(BytePlaneField))[:, 1:].reshape(-1, len(BytePlaneField))
    own["status"] = torch.zeros(4, dtype=torch.int32, device=device)
    cache, _ = merged(tables, "dense", torch.bfloat16, coded, **own)
    for unit in range(6):
        assert same_bits(cache.rows(unit, tables.at(1)), values[1][unit]) == (unit >= 2)
    assert bool((cache.raw[0] == POISON).all())


def run_step(step: Callable[..., None], arguments: dict[str, Any], **arrays: Any) -> torch.Tensor:
    status = torch.zeros_like(arguments["status"])
    launch(step, **{**arguments, **arrays, "status": status})
    return status


def poisoned(size: int, device: torch.device) -> torch.Tensor:
    return torch.full((size,), POISON, dtype=torch.uint8, device=device)


@pytest.mark.parametrize(
    ("name", "dtype", "element", "tokens", "kind", "noise"),
    [
        ("irregular", "bfloat16", torch.bfloat16, ODD, "pages", True),
        ("irregular", "float32", torch.float32, (15, 3), "dense", True),
        ("gqa", "float16", torch.float16, EVEN, "pages by head", True),
        ("mqa", "bfloat16", torch.bfloat16, (257, 1), "pages", False),
        ("interleaved", "bfloat16", torch.float8_e4m3fn, (15, 20), "pages", False),
        ("mqa", "float16", torch.float8_e5m2, (4, 8), "pages", False),
    ],
)
def test_encoding(
    layouts: dict[str, KVLayout], device: torch.device, name: str, dtype: str, element: torch.dtype,
    tokens: tuple[int, ...], kind: str, noise: bool,
) -> None:  # fmt: skip
    tables = setting(layouts[name], device, dtype, tokens)
    cache = make_cache(tables.layout, tables.total, kind, element, device)
    values = random_values(tables, noise)
    for chunk, units in enumerate(values):
        for unit, rows in enumerate(units):
            cache.fill(unit, tables.at(chunk), rows)
    arguments = tables.arguments(cache, element)
    # What the codec would encode: the bits as they are, or the values of another type.
    if element != tables.layout.torch_dtype:
        scale = arguments["scales"]
        values = [
            [
                (cache.rows(u, tables.at(c)).float() * scale[u]).to(tables.layout.torch_dtype).cpu()
                for u in range(len(units))
            ]
            for c, units in enumerate(values)
        ]
    models = [
        plane for chunk, layer, unit, _ in tables.units() for plane in split_unit(values[chunk][2 * layer + unit])
    ]
    planes = [model.data for model in models]
    head_dims = [
        values[chunk][2 * layer + unit].shape[2] for chunk, layer, unit, _ in tables.units()
        for _ in range(tables.itemsize)
    ]  # fmt: skip
    channels = [len(plane) for plane in planes]
    first = np.cumsum(channels) - channels + 5
    total = int(first[-1]) + channels[-1] + 3
    table = torch.tensor([(-(1 << 40), r, d) for r, d in zip(first, head_dims, strict=True)], device=device)

    sums = torch.zeros(total, dtype=torch.int64, device=device)
    references, counts = poisoned(total, device), torch.zeros(len(planes), 256, dtype=torch.int32, device=device)
    assert not run_step(sum_bytes, arguments, table=table, sums=sums).any()
    assert not run_step(count_symbols, arguments, table=table, sums=sums, references=references, counts=counts).any()
    wanted = np.full(total, POISON, np.uint8)
    for index, (model, at) in enumerate(zip(models, first, strict=True)):
        wanted[at : at + len(model.reference)] = model.reference
        assert np.array_equal(counts[index].cpu().numpy(), model.counts)
    assert np.array_equal(references.cpu().numpy(), wanted)

    # As the codec chooses; where it stores all planes, code one all the same.
    chosen = choose_tables(np.stack([model.counts for model in models]), np.array([len(m.data) for m in models]))
    stored = np.array([table is None for table in chosen])
    stored[1] = False
    sizes = np.array([plane.size for plane in planes])
    offsets = np.where(stored, np.cumsum(sizes * stored) - sizes, np.cumsum(sizes * ~stored) - sizes) + 8
    table[:, BytePlaneField.PLANE] = torch.from_numpy(offsets).to(device)
    table[:, BytePlaneField.REFERENCE] = torch.from_numpy(np.where(stored, -1, first)).to(device)
    coded, out = (poisoned(int(sizes.sum()) + 16, device) for _ in range(2))
    arrays = {"table": table, "references": references, "planes": coded, "out": out}
    assert not run_step(split_planes, arguments, **arrays, even=not any(t % 4 for t in tokens)).any()
    expected = [np.full(len(out), POISON, np.uint8) for _ in range(2)]
    for model, at, kept in zip(models, offsets, stored, strict=True):
        plane = model.data if kept else (model.data - model.reference[:, None]).astype(np.uint8)
        expected[int(kept)][at : at + plane.size] = plane.ravel()
    for got, want in zip((coded, out), expected, strict=True):
        assert np.array_equal(got.cpu().numpy(), want)


def test_means_are_rounded_to_even(device: torch.device, layouts: dict[str, KVLayout]) -> None:
    """Ties, and sums near 2**32, which the largest chunk may reach."""
    tables = setting(layouts["mqa"], device, "bfloat16", (16,))
    cache = make_cache(tables.layout, tables.total, "dense", torch.bfloat16, device)
    arguments = tables.arguments(cache, torch.bfloat16)
    head_dim = tables.layout.layers[0].head_dim
    table = torch.tensor([(0, index * 32, head_dim) for index in range(12)], device=device)
    for tokens in (2, 16, (1 << 24) - 1):
        exact = torch.arange(32) * tokens // 2 if tokens < 99 else 255 * tokens - torch.arange(32) * (tokens // 2)
        arguments["chunks"][:, ChunkField.TOKENS] = tokens
        arguments["max_tokens"] = 1  # the first programs write the references
        references, sums = poisoned(12 * 32, device), exact.repeat(12).to(device)
        counts = torch.zeros(12, 256, dtype=torch.int32, device=device)
        slots = cache.slots.new_full((64,), -1)
        arrays = {"table": table, "sums": sums, "references": references, "counts": counts, "slots": slots}
        run_step(count_symbols, arguments, **arrays)
        expected = np.rint(exact.numpy() / tokens).astype(np.uint8)
        assert np.array_equal(references.cpu().numpy().reshape(12, 32), np.broadcast_to(expected, (12, 32)))


def test_planes_beyond_two_gigabytes(layouts: dict[str, KVLayout], device: torch.device) -> None:
    tables = setting(layouts["mqa"], device, "bfloat16", (3,))
    values = random_values(tables, noise=True)
    coded = tables.coded(values, base=(1 << 31) + 8)
    cache = make_cache(tables.layout, tables.total, "dense", torch.bfloat16, device)
    arguments = tables.arguments(cache, torch.bfloat16)
    launch(merge_planes, **coded, **arguments, **tables.turning())
    for unit, expected in enumerate(values[0]):
        assert same_bits(cache.rows(unit, tables.at(0)), expected)
    back, out = torch.empty_like(coded["planes"]), torch.zeros_like(coded["data"])
    arrays = {"table": coded["table"], "references": coded["data"], "planes": back, "out": out}
    run_step(split_planes, arguments, **arrays, even=False)
    assert torch.equal(back[(1 << 31) + 8 :], coded["planes"][(1 << 31) + 8 :])


def test_nothing_to_do(layouts: dict[str, KVLayout], device: torch.device) -> None:
    tables = setting(layouts["mqa"], device, "bfloat16", (3,))
    cache = make_cache(tables.layout, tables.total, "dense", torch.bfloat16, device)
    none = torch.empty(0, dtype=torch.uint8, device=device)
    table = torch.empty(0, len(BytePlaneField), dtype=torch.int64, device=device)
    arguments = tables.arguments(cache, torch.bfloat16)
    arguments["tiles"] = arguments["tiles"][:0]
    launch(merge_planes, data=none, planes=none, table=table, **arguments, **tables.turning())
    decoding_tables(torch.empty(0, 256, dtype=torch.uint16), torch.empty(0, WIDTH, dtype=torch.uint32))
    assert all(bool((raw == POISON).all()) for raw in cache.raw)
