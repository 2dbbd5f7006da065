"""The kernels of lossless sections against the codec: every bit, wherever the cache lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.codec.reference.byte_planes import byte_planes
from tests.conftest import LAYOUTS
from tests.kernels.chunk_world import HOLE, POISON, Batch, fill, make_cache, random_units, round_trips
from tests.kernels.coding import ROUNDING

from cuvee.codec.codec import Codec
from cuvee.codec.entropy.tables import EntropyTables, normalize_counts
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged_chunks import PagedChunks
from cuvee.codec.profiles.profile import Profile
from cuvee.kernels.jobs import ChunkField
from cuvee.kernels.ops.merge_planes import decoding_tables, merge_planes
from cuvee.kernels.ops.rans import WIDTH, decoding_table
from cuvee.kernels.ops.split_planes import count_symbols, split_planes

CPU = torch.device("cpu")
OTHERS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.float32]


def coded(batch: Batch, values: Sequence[Sequence[torch.Tensor]], base: int) -> tuple[torch.Tensor, ...]:
    """Chunks' values `[chunk][unit]` -> data, planes (from `base` on), table, with some planes coded, some stored."""
    choose = np.random.default_rng(4)
    data, planes, table = bytearray(b"head"), bytearray(), []
    for own in (own for units in values for own in units):
        for plane in byte_planes(own.flatten(1)):
            if choose.random() < 0.5:
                table.append((len(data), -1, own.shape[2]))
                data += plane.tobytes()
                continue
            reference = choose.integers(0, 256, len(plane), dtype=np.uint8)
            table.append((base + len(planes), len(data), own.shape[2]))
            data += reference.tobytes() + bytes(-len(plane) % 4)
            planes += (plane - reference[:, None]).tobytes()
    there = torch.empty(base + len(planes), dtype=torch.uint8, device=batch.device)
    there[base:] = torch.frombuffer(planes, dtype=torch.uint8)
    return torch.frombuffer(data, dtype=torch.uint8).to(batch.device), there, torch.tensor(table, device=batch.device)


def random_values(batch: Batch, noise: bool) -> list[list[torch.Tensor]]:
    """`[chunk][unit]` of values: all bit patterns, or what a cache may hold."""
    generator = torch.Generator().manual_seed(0)
    return [random_units(batch.layout, tokens, generator, noise) for tokens in batch.tokens]


def setting(layout: KVLayout, device: torch.device, tokens: int) -> Batch:
    return Batch(replace(layout, dtype="bfloat16"), (tokens,), (10,), (10,), device)


def test_decoding_tables(device: torch.device) -> None:
    generator = np.random.default_rng(0)
    counts = [np.bincount([s], minlength=256) for s in (0, 1, 254, 255)]
    counts += [np.ones(256, np.int64), np.arange(256), np.bincount([0, 255, 255], minlength=256)]
    counts += [generator.geometric(p, 256) * (generator.random(256) < 0.5) for p in (0.5, 0.01, 0.0001)]
    tables = EntropyTables(np.stack([normalize_counts(count) for count in counts]))
    shape = (len(counts) + 1, WIDTH)
    decoding = torch.full(shape, POISON, dtype=torch.int32).view(torch.uint32).to(device)
    decoding_tables(torch.from_numpy(tables.freq).to(device), decoding[:-1])
    expected = np.full(shape, POISON, np.uint32)
    expected[:-1] = decoding_table(tables)
    assert decoding.cpu().numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("name", "dtype", "element", "tokens", "kind", "to"),
    [
        ("irregular", "bfloat16", torch.bfloat16, (63, 70), "bthd", None),
        ("mqa", "bfloat16", torch.bfloat16, (257, 1), "bthd2", None),
        ("irregular", "float32", torch.float32, (15, 70), "bthd", (510, 7)),
        ("yarn", "float16", torch.float16, (15, 70), "bhdt", (510, 7)),
        *(("gqa", "bfloat16", own, (15, 20), "bthd", (10, 507)) for own in OTHERS),
        ("mqa", "float16", torch.float8_e5m2, (16, 8), "single", None),
    ],
)  # fmt: skip
def test_pages_hold_the_bits_of_the_codec(
    device: torch.device, name: str, dtype: str, element: torch.dtype, tokens: tuple[int, ...], kind: str,
    to: tuple[int, ...] | None,
) -> None:  # fmt: skip
    """Keys as a cache may hold them, to the end of their range; values of all bit patterns, where their type stays."""
    layout = replace(LAYOUTS[name], dtype=dtype)
    batches = [Batch(layout, tokens, (10, 7), (10, 7), at) for at in (CPU, device)]
    values, noise = (random_values(batches[0], noise=noise) for noise in (False, True))
    for own, other in zip(values, noise, strict=True):
        for unit in own:
            unit[-1] = 0.9 * min(torch.finfo(of).max for of in (unit.dtype, element))
        if element == layout.torch_dtype:
            own[1::2] = other[1::2]
    caches = [fill(make_cache(layout, b.total, kind, element, b.device), b, values) for b in batches]
    profile = Profile.unlearned(layout)
    codecs = [Codec(profile, "lossless", backend=backend) for backend in ("auto", "triton")]
    (theirs, mine), (want, got) = round_trips(codecs, caches, batches, to or (10, 7))
    assert mine == theirs
    kept = torch.arange(sum(tokens)) != HOLE
    rounding = 2**-2 if element.itemsize == 1 else ROUNDING[dtype]
    for number in range(len(want.units)):
        a, b = (cache.rows(number, slice(None)).cpu()[kept] for cache in (got, want))
        if to is None or number % 2 or layout.layers[number // 2].rope is None:
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        else:  # the tables of sines differ in their last bits
            error, size = (a.float() - b.float()).abs().amax(2), b.float().abs().amax(2)
            assert bool((error <= rounding * size).all())
    assert got.holds_only(kept) and want.holds_only(kept)


@pytest.mark.parametrize("to", [10, 510])
@pytest.mark.parametrize("element", OTHERS[:2])
def test_what_is_not_finite_in_fp8_pages(device: torch.device, element: torch.dtype, to: int) -> None:
    """NaN stays NaN, and infinity infinite where the type has it, and finite values finite; keys that move alike."""
    batches = [setting(LAYOUTS["gqa"], at, 16) for at in (CPU, device)]
    values = random_values(batches[0], noise=False)
    for unit in values[0]:
        unit[7, 0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30])
    source = fill(make_cache(batches[0].layout, 16, "dense", torch.bfloat16, CPU), batches[0], values)
    caches = [make_cache(batch.layout, 16, "bthd", element, batch.device) for batch in batches]
    profile = Profile.unlearned(batches[0].layout)
    codecs = [Codec(profile, "lossless", backend=backend) for backend in ("auto", "triton")]
    (blob,) = codecs[0].encode(PagedChunks(source.paged(), [source.slots], [10]))
    for codec, cache in zip(codecs, caches, strict=True):
        codec.decode_paged([blob], cache.paged(), [cache.slots], [to]).check()
    for number in range(len(values[0])):
        want, got = (cache.rows(number, slice(None)).cpu().float() for cache in caches)
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
        not_a_number, *others = want[7, 0, :4]
        infinite = element == torch.float8_e5m2
        assert bool(not_a_number.isnan())
        if to == 10 or number % 2:
            limit = torch.finfo(element).max
            assert others == [torch.inf, -torch.inf, limit] if infinite else others == [limit, -limit, limit]
        elif infinite:
            assert not bool(torch.stack(others[:2]).isfinite().any())


def test_means_are_rounded_to_even(device: torch.device) -> None:
    """Ties, and sums near 2**32, which the largest chunk may reach."""
    batch = setting(LAYOUTS["mqa"], device, 16)
    cache = make_cache(batch.layout, batch.total, "dense", torch.bfloat16, device)
    tiles, chunks, view = batch.arguments(cache)
    chunks, view = replace(chunks, max_tokens=1), replace(view, slots=cache.slots.new_full((64,), -1))
    table = torch.tensor([(0, index * 32, batch.layout.layers[0].head_dim) for index in range(12)], device=device)
    for tokens in (2, 16, (1 << 24) - 1):
        exact = torch.arange(32) * tokens // 2 if tokens < 99 else 255 * tokens - torch.arange(32) * (tokens // 2)
        chunks.chunks[:, ChunkField.TOKENS] = tokens  # the first programs write the references
        references = torch.full((12 * 32,), POISON, dtype=torch.uint8, device=device)
        counts = torch.zeros(12, 256, dtype=torch.int32, device=device)
        count_symbols(table, tiles, chunks, view, exact.repeat(12).to(device), references, counts, dtype=torch.bfloat16)
        expected = np.rint(exact.numpy() / tokens).astype(np.uint8)
        assert np.array_equal(references.cpu().numpy().reshape(12, 32), np.broadcast_to(expected, (12, 32)))


def test_planes_beyond_two_gigabytes(device: torch.device) -> None:
    batch = setting(LAYOUTS["mqa"], device, 3)
    values = random_values(batch, noise=True)
    data, planes, table = coded(batch, values, base=(1 << 31) + 8)
    cache = make_cache(batch.layout, batch.total, "dense", torch.bfloat16, device)
    launched = batch.arguments(cache)
    merge_planes(data, planes, table, *launched, None, dtype=torch.bfloat16, even=False)
    want = fill(cache.copy(), batch, values)
    assert all(torch.equal(a, b) for a, b in zip(cache.bytes(), want.bytes(), strict=True))
    back, out = torch.empty_like(planes), torch.zeros_like(data)
    split_planes(table, *launched, data, back, out, dtype=torch.bfloat16, even=False)
    assert torch.equal(back[(1 << 31) + 8 :], planes[(1 << 31) + 8 :])
