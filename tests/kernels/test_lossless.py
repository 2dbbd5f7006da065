"""The kernels of lossless sections against the codec: every bit, wherever the cache lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.chunk_world import BITS, POISON, Batch, Cache, fill, make_cache, random_units
from tests.kernels.packing import launch

from cuvee.codec.entropy.tables import EntropyTables, normalize_counts
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.dtypes import saturated
from cuvee.codec.models.rope import rotate, unrotate
from cuvee.codec.stages.reference.byte_planes import byte_planes, choose_tables, split_unit
from cuvee.kernels.jobs import ChunkField, Status
from cuvee.kernels.ops.lossless import BytePlaneField
from cuvee.kernels.ops.merge_planes import decoding_tables, merge_planes
from cuvee.kernels.ops.rans import WIDTH, decoding_table
from cuvee.kernels.ops.split_planes import count_symbols, split_planes, sum_bytes

ODD, EVEN = (1, 63, 70), (64, 8)


def launched(step: Callable[..., None], batch: Batch, arguments: dict[str, Any], **arrays: Any) -> torch.Tensor:
    """Launch; the status of the jobs."""
    arguments = {**arguments, "status": torch.zeros_like(arguments["status"]), "dtype": batch.layout.torch_dtype}
    launch(step, **arguments, **arrays)
    status: torch.Tensor = arguments["status"]
    return status


def turning(batch: Batch) -> dict[str, Any]:
    """The further arguments of `merge_planes`."""
    (source_cos, source_sin), (cos, sin) = batch.rotations(True), batch.rotations(False)
    return {
        "source_cos": source_cos, "source_sin": source_sin, "target_cos": cos, "target_sin": sin,
        "moved": batch.sources != batch.targets, "even": not any(t % 4 for t in batch.tokens),
    }  # fmt: skip


def units_of(batch: Batch) -> list[tuple[int, int]]:
    """Chunk and unit in the order of the rows of `table`."""
    return [(chunk, unit) for chunk in range(len(batch.tokens)) for unit in range(2 * batch.layout.num_layers)]


def coded(batch: Batch, values: Sequence[Sequence[torch.Tensor]], base: int = 0) -> dict[str, Any]:
    """Chunks' values `[chunk][unit]` -> data, planes, table, with some planes coded, some stored."""
    choose = np.random.default_rng(4)
    data, planes, table = bytearray(b"head"), bytearray(), []
    for chunk, unit in units_of(batch):
        own = values[chunk][unit]
        for plane in byte_planes(own.flatten(1)):
            if choose.random() < 0.5:
                table.append((len(data), -1, own.shape[2]))
                data += plane.tobytes()
                continue
            reference = choose.integers(0, 256, len(plane), dtype=np.uint8)
            table.append((base + len(planes), len(data), own.shape[2]))
            data += reference.tobytes() + bytes(-len(plane) % 4)
            planes += (plane - reference[:, None]).tobytes()
    made = torch.frombuffer(planes or bytearray(1), dtype=torch.uint8).to(batch.device)
    if base:
        there = torch.empty(base + len(made), dtype=torch.uint8, device=batch.device)
        there[base:] = made
        made = there
    return {
        "data": torch.frombuffer(data, dtype=torch.uint8).to(batch.device), "planes": made,
        "table": torch.tensor(table, device=batch.device),
    }  # fmt: skip


def random_values(batch: Batch, noise: bool) -> list[list[torch.Tensor]]:
    """`[chunk][unit]` of values: all bit patterns, or what a cache may hold."""
    generator = torch.Generator().manual_seed(0)
    return [random_units(batch.layout, tokens, generator, noise) for tokens in batch.tokens]


def with_ends(chunks: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """The same with a token at the end of the dtype's range: rotations and smaller types leave it."""
    for units in chunks:
        for unit in units:
            unit[1] = torch.finfo(unit.dtype).max
    return chunks


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    whole = BITS[left.element_size()]
    return torch.equal(left.contiguous().view(whole).cpu(), right.contiguous().view(whole).cpu())


def setting(layout: KVLayout, device: torch.device, dtype: str, tokens: tuple[int, ...], moved: bool = False) -> Batch:
    sources = tuple(10 + 7 * i for i in range(len(tokens)))
    targets = tuple(s + 500 * (i % 2) for i, s in enumerate(sources)) if moved else sources
    return Batch(replace(layout, dtype=dtype), tokens, sources, targets, device)


def merged(
    batch: Batch, kind: str, element: torch.dtype, parts: dict[str, Any], run: slice = slice(None), **changes: Any
) -> tuple[Cache, torch.Tensor]:
    """A cache that `merge_planes` wrote, and the status of the jobs."""
    cache = make_cache(batch.layout, batch.total, kind, element, batch.device)
    return cache, launched(merge_planes, batch, batch.arguments(cache, run=run) | changes, **parts, **turning(batch))


def assert_holds(cache: Cache, batch: Batch, values: Sequence[Sequence[torch.Tensor]]) -> None:
    """These values `[chunk][unit]` of the cache's type, at the slots of their tokens, and poison everywhere else."""
    want = fill(cache.copy(), batch, values)
    assert all(torch.equal(a, b) for a, b in zip(cache.bytes(), want.bytes(), strict=True))


def moved(batch: Batch, values: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """The values with the keys of chunk 1 turned to its target, as the codec turns them."""
    out = [list(units) for units in values]
    source, target = (torch.arange(batch.tokens[1]) + x[1] for x in (batch.sources, batch.targets))
    for index, layer in enumerate(batch.layout.layers):
        if layer.rope is not None:
            free = unrotate(out[1][2 * index], layer.rope, source)
            out[1][2 * index] = saturated(rotate(free, layer.rope, target), batch.layout.torch_dtype)
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
        ("irregular", "bfloat16", "dense", ODD), ("irregular", "float16", "bthd", (15, 8)),
        ("irregular", "float32", "bhtd", (2, 65)), ("gqa", "bfloat16", "bhtd", EVEN),
        ("gqa", "bfloat16", "bthd", EVEN), ("mqa", "float16", "dense", (256,)), ("mqa", "float32", "bthd2", EVEN),
    ],
)  # fmt: skip
def test_merge_restores_every_bit(
    layouts: dict[str, KVLayout], device: torch.device, name: str, dtype: str, kind: str, tokens: tuple[int, ...]
) -> None:
    batch = setting(layouts[name], device, dtype, tokens)
    values = random_values(batch, noise=True)
    cache, status = merged(batch, kind, batch.layout.torch_dtype, coded(batch, values))
    assert not status.any()
    assert_holds(cache, batch, values)


@pytest.mark.parametrize(("name", "dtype"), [("irregular", "float32"), ("partial", "bfloat16"), ("yarn", "float16")])
def test_merge_turns_the_keys_of_chunks_that_move(
    layouts: dict[str, KVLayout], device: torch.device, name: str, dtype: str
) -> None:
    batch = setting(layouts[name], device, dtype, (15, 70, 3), moved=True)
    values = with_ends(random_values(batch, noise=False))
    cache, status = merged(batch, "bthd", batch.layout.torch_dtype, coded(batch, values))
    assert not status.any()
    assert_holds(cache, batch, moved(batch, values))
    # What is not finite stays so: it is no value beyond the range.
    for unit in values[1][::2]:
        unit[:, 0, 0] = float("inf")
    cache, _ = merged(batch, "bthd", batch.layout.torch_dtype, coded(batch, values))
    for index, layer in enumerate(batch.layout.layers):
        if layer.rope is not None:
            assert not bool(cache.rows(2 * index, batch.at(1))[:, 0, 0].isfinite().any())


@pytest.mark.parametrize("element", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.float32])
def test_a_cache_of_another_type_gets_the_values(
    layouts: dict[str, KVLayout], device: torch.device, element: torch.dtype
) -> None:
    batch = setting(layouts["gqa"], device, "bfloat16", (15, 20), moved=True)
    values = with_ends(random_values(batch, noise=False))
    cache, _ = merged(batch, "bthd", element, coded(batch, values))
    narrow, scales = element.itemsize == 1, cache.scales
    expected = [
        [
            saturated(rows.float() * (1 / scale if narrow else 1), element, None if narrow else ~rows.isinf())
            for rows, scale in zip(units, scales, strict=True)
        ]
        for units in moved(batch, values)
    ]
    assert_holds(cache, batch, expected)


@pytest.mark.parametrize("element", [torch.float16, torch.float8_e5m2])
def test_tokens_without_a_slot(layouts: dict[str, KVLayout], device: torch.device, element: torch.dtype) -> None:
    batch = setting(layouts["mqa"], device, "float16", (9, 5))
    values = random_values(batch, noise=False)
    slots = make_cache(batch.layout, batch.total, "bthd", element, device).slots
    slots[:3] = -1  # as for tokens that nobody asked for
    slots[10], slots[11] = 1 << 40, -2
    result, status = merged(batch, "bthd", element, coded(batch, values), slots=slots)
    assert [int(x) for x in status] == [0] * 3 + [int(Status.SLOT)] * 3
    for at in (slice(0, 3), slice(10, 12)):
        assert bool((result.rows(0, at).view(torch.uint8) == POISON).all())
    if element == torch.float16:
        assert same_bits(result.rows(0, slice(3, 9)), values[0][0][3:])
        assert same_bits(result.rows(1, slice(12, 14)), values[1][1][3:])


def test_a_run_of_layers(layouts: dict[str, KVLayout], device: torch.device) -> None:
    batch = setting(layouts["irregular"], device, "bfloat16", (9, 18))
    values = random_values(batch, noise=True)
    parts = coded(batch, values)
    fields = len(BytePlaneField)
    parts["table"] = parts["table"].view(2, 3, -1, fields)[:, 1:].reshape(-1, fields)
    cache, _ = merged(batch, "dense", torch.bfloat16, parts, slice(1, 3))
    for unit in range(6):
        assert same_bits(cache.rows(unit, batch.at(1)), values[1][unit]) == (unit >= 2)
    assert bool((cache.raw[0] == POISON).all())


def poisoned(size: int, device: torch.device) -> torch.Tensor:
    return torch.full((size,), POISON, dtype=torch.uint8, device=device)


@pytest.mark.parametrize(
    ("name", "dtype", "element", "tokens", "kind", "noise"),
    [
        ("irregular", "bfloat16", torch.bfloat16, ODD, "bthd", True),
        ("irregular", "float32", torch.float32, (15, 3), "dense", True),
        ("gqa", "float16", torch.float16, EVEN, "bhtd", True),
        ("mqa", "bfloat16", torch.bfloat16, (257, 1), "bthd", False),
        ("interleaved", "bfloat16", torch.float8_e4m3fn, (15, 20), "bthd", False),
        ("mqa", "float16", torch.float8_e5m2, (4, 8), "bthd", False),
    ],
)
def test_encoding(
    layouts: dict[str, KVLayout], device: torch.device, name: str, dtype: str, element: torch.dtype,
    tokens: tuple[int, ...], kind: str, noise: bool,
) -> None:  # fmt: skip
    batch = setting(layouts[name], device, dtype, tokens)
    cache = make_cache(batch.layout, batch.total, kind, element, device)
    values = random_values(batch, noise)
    fill(cache, batch, values)
    # What the codec would encode: the bits as they are, or the values of another type.
    if element != batch.layout.torch_dtype:
        values = [
            [
                (cache.rows(u, batch.at(c)).float().cpu() * scale).to(batch.layout.torch_dtype)
                for u, scale in enumerate(cache.scales)
            ]
            for c in range(len(tokens))
        ]
    arguments = batch.arguments(cache)
    models = [plane for chunk, unit in units_of(batch) for plane in split_unit(values[chunk][unit])]
    itemsize = batch.layout.torch_dtype.itemsize
    head_dims = [values[chunk][unit].shape[2] for chunk, unit in units_of(batch) for _ in range(itemsize)]
    channels = [len(model.data) for model in models]
    first = np.cumsum(channels) - channels + 5
    total = int(first[-1]) + channels[-1] + 3
    table = torch.tensor([(-(1 << 40), r, d) for r, d in zip(first, head_dims, strict=True)], device=device)

    sums = torch.zeros(total, dtype=torch.int64, device=device)
    references, counts = poisoned(total, device), torch.zeros(len(models), 256, dtype=torch.int32, device=device)
    assert not launched(sum_bytes, batch, arguments, table=table, sums=sums).any()
    arrays = {"table": table, "sums": sums, "references": references, "counts": counts}
    assert not launched(count_symbols, batch, arguments, **arrays).any()
    wanted = np.full(total, POISON, np.uint8)
    for index, (model, at) in enumerate(zip(models, first, strict=True)):
        wanted[at : at + len(model.reference)] = model.reference
        assert np.array_equal(counts[index].cpu().numpy(), model.counts)
    assert np.array_equal(references.cpu().numpy(), wanted)

    # As the codec chooses; where it stores all planes, code one all the same.
    chosen = choose_tables(np.stack([model.counts for model in models]), np.array(channels))
    stored = np.array([own is None for own in chosen])
    stored[1] = False
    sizes = np.array([model.data.size for model in models])
    offsets = np.where(stored, np.cumsum(sizes * stored) - sizes, np.cumsum(sizes * ~stored) - sizes) + 8
    table[:, BytePlaneField.PLANE] = torch.from_numpy(offsets).to(device)
    table[:, BytePlaneField.REFERENCE] = torch.from_numpy(np.where(stored, -1, first)).to(device)
    planes, out = (poisoned(int(sizes.sum()) + 16, device) for _ in range(2))
    arrays = {"table": table, "references": references, "planes": planes, "out": out}
    assert not launched(split_planes, batch, arguments, **arrays, even=not any(t % 4 for t in tokens)).any()
    expected = [np.full(len(out), POISON, np.uint8) for _ in range(2)]
    for model, at, kept in zip(models, offsets, stored, strict=True):
        plane = model.data if kept else (model.data - model.reference[:, None]).astype(np.uint8)
        expected[int(kept)][at : at + plane.size] = plane.ravel()
    for got, want in zip((planes, out), expected, strict=True):
        assert np.array_equal(got.cpu().numpy(), want)


def test_means_are_rounded_to_even(device: torch.device, layouts: dict[str, KVLayout]) -> None:
    """Ties, and sums near 2**32, which the largest chunk may reach."""
    batch = setting(layouts["mqa"], device, "bfloat16", (16,))
    cache = make_cache(batch.layout, batch.total, "dense", torch.bfloat16, device)
    arguments = batch.arguments(cache) | {"max_tokens": 1, "slots": cache.slots.new_full((64,), -1)}
    table = torch.tensor([(0, index * 32, batch.layout.layers[0].head_dim) for index in range(12)], device=device)
    for tokens in (2, 16, (1 << 24) - 1):
        exact = torch.arange(32) * tokens // 2 if tokens < 99 else 255 * tokens - torch.arange(32) * (tokens // 2)
        arguments["chunks"][:, ChunkField.TOKENS] = tokens  # the first programs write the references
        references, sums = poisoned(12 * 32, device), exact.repeat(12).to(device)
        counts = torch.zeros(12, 256, dtype=torch.int32, device=device)
        launched(count_symbols, batch, arguments, table=table, sums=sums, references=references, counts=counts)
        expected = np.rint(exact.numpy() / tokens).astype(np.uint8)
        assert np.array_equal(references.cpu().numpy().reshape(12, 32), np.broadcast_to(expected, (12, 32)))


def test_planes_beyond_two_gigabytes(layouts: dict[str, KVLayout], device: torch.device) -> None:
    batch = setting(layouts["mqa"], device, "bfloat16", (3,))
    values = random_values(batch, noise=True)
    parts = coded(batch, values, base=(1 << 31) + 8)
    cache, _ = merged(batch, "dense", torch.bfloat16, parts)
    assert_holds(cache, batch, values)
    back, out = torch.empty_like(parts["planes"]), torch.zeros_like(parts["data"])
    arrays = {"table": parts["table"], "references": parts["data"], "planes": back, "out": out}
    launched(split_planes, batch, batch.arguments(cache), **arrays, even=False)
    assert torch.equal(back[(1 << 31) + 8 :], parts["planes"][(1 << 31) + 8 :])


def test_nothing_to_do(layouts: dict[str, KVLayout], device: torch.device) -> None:
    batch = setting(layouts["mqa"], device, "bfloat16", (3,))
    none = torch.empty(0, dtype=torch.uint8, device=device)
    table = torch.empty(0, len(BytePlaneField), dtype=torch.int64, device=device)
    cache, _ = merged(batch, "dense", torch.bfloat16, {"data": none, "planes": none, "table": table}, slice(0, 0))
    decoding_tables(torch.empty(0, 256, dtype=torch.uint16), torch.empty(0, WIDTH, dtype=torch.uint32))
    assert all(bool((raw == POISON).all()) for raw in cache.raw)
