"""The incumbent's decoder: the levels of the quality baseline, their entropy in bytes, alike from the kernels."""

from __future__ import annotations

import pytest
import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout, LayerLayout
from cuvee.eval.baselines import quantizers as baselines
from cuvee.eval.baselines.cachegen import (
    CDF_ENTRIES,
    CodedChunks,
    decode,
    decode_reference,
    dequantize,
    dequantize_reference,
    encode,
    encode_symbols,
    quantize,
)
from cuvee.eval.baselines.quantizers import cachegen_bins


def make(tokens: int, layers: int = 2, heads: int = 2, size: int = 12, seed: int = 0) -> KVChunk:
    generator = torch.Generator().manual_seed(seed)
    layout = KVLayout("synthetic", (LayerLayout(heads, size, size, None),) * layers, "bfloat16", None)
    wide = torch.arange(1, size + 1) ** -0.7

    def tensor() -> torch.Tensor:
        return (torch.randn(tokens, heads, size, generator=generator) * wide).bfloat16()

    return KVChunk([tensor() for _ in range(layers)], [tensor() for _ in range(layers)], layout)


def coded_symbols(coded: CodedChunks) -> torch.Tensor:
    return torch.full((coded.chunks, coded.units, coded.tokens, coded.channels), 0xAB, dtype=torch.uint8)


@pytest.mark.parametrize("layers", [1, 2, 28, 32, 80])
def test_bins_are_those_of_the_quality_baseline(layers: int) -> None:
    keys, values = cachegen_bins(layers)[::2], cachegen_bins(layers)[1::2]
    assert keys.count(32) == -(-10 * layers // 32) and keys == tuple(sorted(keys, reverse=True))
    assert values.count(32) == max(1, -(-2 * layers // 32)) and values == tuple(sorted(values, reverse=True))
    if layers == 32:
        assert (keys.count(32), values.count(32)) == (10, 2)


@pytest.mark.parametrize("tokens", [1, 7, 64, 257])
def test_the_reference_gives_back_the_baselines_values(tokens: int) -> None:
    chunk = make(tokens, layers=3)
    coded = encode(chunk)
    symbols = coded_symbols(coded)
    decode_reference(coded, symbols)
    assert torch.equal(symbols[0], quantize(chunk)[0])
    out = torch.full((coded.units, tokens, coded.channels), float("nan"), dtype=torch.bfloat16)
    dequantize_reference(coded, symbols, torch.arange(tokens)[None], out)
    back, _ = baselines.CacheGen().encode(chunk)
    for layer in range(3):
        assert torch.equal(out[2 * layer], back.keys[layer].flatten(1))
        assert torch.equal(out[2 * layer + 1], back.values[layer].flatten(1))


def test_the_bytes_are_the_entropy_that_the_baseline_counts() -> None:
    chunk = make(512)
    coded = encode(chunk)
    _, ideal = baselines.CacheGen().encode(chunk)
    # Every stream ends in a whole byte after up to two bits more, and no symbol may have less than one of 2**16.
    assert 0.999 * ideal < 8 * coded.nbytes < ideal + 14 * coded.streams
    assert coded.values == 512 * chunk.layout.values_per_token


@pytest.mark.parametrize("top", [15, 7])
def test_extreme_symbols_survive(top: int, device: torch.device) -> None:
    # One channel always the largest, one always the smallest, one that jumps: intervals near both ends and the middle.
    chunk = make(33, layers=1, heads=1, size=4)
    for tensor in (*chunk.keys, *chunk.values):
        tensor[:, 0, 0], tensor[:, 0, 1], tensor[:, 0, 2] = 64.0, -64.0, 0.0
        tensor[::2, 0, 3], tensor[1::2, 0, 3] = 64.0, -64.0
        if top == 7:
            tensor[:, 0, 2] = torch.linspace(-64, 64, 33)
    coded = encode(chunk)
    want = quantize(chunk)[0]
    reference, got = coded_symbols(coded), coded_symbols(coded).to(device)
    decode_reference(coded, reference)
    decode(coded.to(device), got)
    assert torch.equal(reference[0], want) and torch.equal(got.cpu()[0], want)


@pytest.mark.parametrize("tokens", [1, 19])
def test_kernels_and_references_agree(tokens: int, device: torch.device) -> None:
    chunk = make(tokens, layers=2, size=9)  # 72 streams: the last program is not full
    one = encode(chunk)
    assert one.streams % 32
    coded = one.repeat(2)
    coded.data[(len(coded.data) - 8) // 2 :] ^= 0x10  # the second chunk is none, but it is another
    moved = coded.to(device)
    assert coded.nbytes == 2 * one.nbytes
    want, got = coded_symbols(coded), coded_symbols(coded).to(device)
    decode_reference(coded, want)
    decode(moved, got)
    assert torch.equal(got.cpu(), want) and torch.equal(want[0], quantize(chunk)[0])
    assert tokens == 1 or not torch.equal(want[0], want[1])
    part = coded_symbols(one).to(device)
    decode(moved.part(1, 2), part)
    assert torch.equal(part[0].cpu(), want[1]) and coded.part(1, 2).nbytes == one.nbytes
    # Slots in any order, some left alone.
    slots = torch.randperm(3 * tokens, generator=torch.Generator().manual_seed(1))[: 2 * tokens].view(2, tokens)
    out = torch.full((coded.units, 3 * tokens, coded.channels), 9.5, dtype=torch.bfloat16)
    other = out.clone().to(device)
    dequantize_reference(coded, want, slots, out)
    dequantize(moved, got, slots.to(device), other)
    assert torch.equal(other.cpu(), out)
    assert int((out[0, :, 0] == 9.5).sum()) == tokens


def test_all_32_symbols_can_be_coded(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    # The highest often, alone in one channel, all alike in another.
    symbols = torch.randint(0, 64, (1, 80, 5), generator=generator).clamp_max(31).to(torch.uint8)
    symbols[0, :, 3] = 31
    symbols[0, :, 4] = torch.arange(80) % 32
    coded = encode_symbols(symbols, torch.ones(1, 80).bfloat16(), torch.tensor([15], dtype=torch.int32))
    want, got = coded_symbols(coded), coded_symbols(coded).to(device)
    decode_reference(coded, want)
    decode(coded.to(device), got)
    assert torch.equal(want[0], symbols) and torch.equal(got.cpu()[0], symbols)
    assert coded.lengths.sum() == len(coded.data) - 8 and int(coded.lengths[3]) <= 4


def test_a_wrong_byte_changes_only_what_follows_in_its_stream(device: torch.device) -> None:
    chunk = make(64, layers=1, heads=1, size=4)
    coded = encode(chunk)
    coded.data[int(coded.starts[3]) + 6] ^= 0x40
    want, got = coded_symbols(coded), coded_symbols(coded).to(device)
    decode_reference(coded, want)
    decode(coded.to(device), got)
    right = quantize(chunk)[0]
    assert torch.equal(got.cpu(), want) and not torch.equal(want[0], right)
    assert torch.equal(want[0, 0, :, :3], right[0, :, :3]) and torch.equal(want[0, 1], right[1])


def test_tables_have_the_size_that_is_counted() -> None:
    coded = encode(make(20))
    assert coded.cdf.shape == (coded.streams, CDF_ENTRIES) and coded.cdf.dtype == torch.uint16
    steps = coded.cdf.to(torch.int64).diff(dim=1)
    steps[:, -1] += 1 << 16
    assert bool((steps >= 1).all()) and bool((steps.sum(1) == 1 << 16).all())


def test_only_alike_bfloat16_units_are_taken() -> None:
    chunk = make(4)
    narrow = KVLayout("synthetic", (LayerLayout(2, 12, 8, None),) * 2, "bfloat16", None)
    with pytest.raises(InputError, match=r"^chunk"):
        encode(KVChunk(chunk.keys, [value[..., :8] for value in chunk.values], narrow))
    floats = KVLayout("synthetic", chunk.layout.layers, "float32", None)
    with pytest.raises(InputError, match=r"^chunk"):
        encode(KVChunk([k.float() for k in chunk.keys], [v.float() for v in chunk.values], floats))
