"""Lossless means every bit, whatever the bits are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.conftest import decoded_layers

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.format.container import inspect
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.models.rope import rotate, unrotate
from cuvee.codec.profiles.profile import Profile

ROPE = Rope(tuple(1e4 ** (-i / 4) for i in range(4)), attention_scaling=1.2)
BITS = {"bfloat16": torch.int16, "float16": torch.int16, "float32": torch.int32}


def one_layer(dtype: str, heads: int, size: int, rope: Rope | None = None) -> KVLayout:
    return KVLayout("synthetic", (LayerLayout(heads, size, size, rope),), dtype, 4096)


def patterns(dtype: str, kind: str) -> torch.Tensor:
    """`[T, 4, 64]` bit patterns."""
    generator = torch.Generator().manual_seed(3)
    if kind == "every":  # all 65536 of them, NaN payloads and subnormals included; in order and at random
        ordered = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
        if dtype == "float32":  # … each as the high and as the low half of a word
            words = torch.cat([ordered.int() << 16, ordered.int() & 0xFFFF])
            return words.view(-1, 4, 64)
        shuffled = ordered[torch.randperm(1 << 16, generator=generator)]
        return torch.cat([ordered, shuffled]).view(-1, 4, 64)
    low, high = (-(1 << 15), 1 << 15) if BITS[dtype] == torch.int16 else (-(1 << 31), 1 << 31)
    if kind == "random":
        return torch.randint(low, high, (131, 4, 64), generator=generator).to(BITS[dtype])
    value = {"zero": 0, "minus zero": low, "ones": -1, "constant": 0x3F80}[kind]
    return torch.full((131, 4, 64), value, dtype=BITS[dtype])


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    bits = torch.int16 if left.element_size() == 2 else torch.int32
    return torch.equal(left.contiguous().view(bits), right.contiguous().view(bits))


@pytest.mark.parametrize("kind", ["every", "random", "zero", "minus zero", "ones", "constant"])
@pytest.mark.parametrize("dtype", list(BITS))
def test_every_bit_comes_back(dtype: str, kind: str) -> None:
    check_every_bit(dtype, patterns(dtype, kind), kind, "numba")
    if kind != "every":  # the reference takes its time
        check_every_bit(dtype, patterns(dtype, kind)[:, :1, :8], kind, "reference")


def check_every_bit(dtype: str, bits: torch.Tensor, kind: str, backend: str) -> None:
    layout = one_layer(dtype, *bits.shape[1:])
    keys = bits.view(layout.torch_dtype)
    values = bits.flip(0).view(layout.torch_dtype)
    codec = Codec(Profile.unlearned(layout), "lossless", backend=backend)
    blob = codec.encode(KVChunk([keys], [values], layout, 5))
    back = codec.decode(blob)
    assert back.start == 5
    assert same_bits(back.keys[0], keys) and same_bits(back.values[0], values)
    for run in ((0, 1), (127, 130), (100, 131)):
        part = codec.decode(blob, tokens=range(*run))
        assert same_bits(part.keys[0], keys[slice(*run)]) and same_bits(part.values[0], values[slice(*run)])
    if backend == "numba":
        # Noise costs hardly more than itself, and constants hardly anything.
        assert inspect(blob).ratio > (0.99 if kind in ("every", "random") else 8)


@pytest.mark.parametrize("dtype", list(BITS))
@pytest.mark.parametrize("tokens", [1, 2, 63, 128, 129])
def test_all_lengths(dtype: str, tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    layout = one_layer(dtype, 3, 5)
    keys, values = (torch.randn(tokens, 3, 5, generator=generator).to(layout.torch_dtype) for _ in range(2))
    keys[tokens // 2, 1, 2], values[-1, -1, -1], values[0, 0, 0] = float("nan"), float("-inf"), -0.0
    codec = Codec(Profile.unlearned(layout), "lossless")
    back = codec.decode(codec.encode(KVChunk([keys], [values], layout)))
    assert same_bits(back.keys[0], keys) and same_bits(back.values[0], values)


@pytest.mark.parametrize("dtype", list(BITS))
def test_moved_keys_are_rotated_and_rounded_once(dtype: str) -> None:
    layout = one_layer(dtype, 2, 12, ROPE)
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(150, 2, 12, generator=generator).to(layout.torch_dtype)
    codec = Codec(Profile.unlearned(layout), "lossless")
    blob = codec.encode(KVChunk([keys], [keys], layout, 10))
    free = unrotate(keys, ROPE, torch.arange(10, 160))
    for start in (0, 11, 3000):
        there = codec.decode(blob, start)
        want = rotate(free, ROPE, torch.arange(start, start + 150))
        unit = torch.finfo(layout.torch_dtype).eps
        torch.testing.assert_close(there.keys[0].float(), want, rtol=0.51 * unit + 1e-6, atol=1e-6)
        assert same_bits(there.values[0], keys)
        assert same_bits(there.keys[0][..., 8:], keys[..., 8:])  # not rotated
    assert same_bits(codec.decode(blob, 10).keys[0], keys)
    assert same_bits(codec.decode(blob, 50, tokens=range(40, 60)).keys[0], keys[40:60])
    assert same_bits(codec.decode(blob, 90, tokens=range(40, 60)).keys[0], codec.decode(blob, 50).keys[0][40:60])


def test_size_on_smooth_bfloat16() -> None:
    generator = torch.Generator().manual_seed(0)
    layout = one_layer("bfloat16", 2, 64)
    spread = torch.rand(2, 64, generator=generator).exp2()
    keys, values = (torch.randn(256, 2, 64, generator=generator) * spread for _ in range(2))
    blob = Codec(Profile.unlearned(layout), "lossless").encode(KVChunk([keys.bfloat16()], [values.bfloat16()], layout))
    assert inspect(blob).bits_per_value <= 11.2


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 11.2), ("float16", 14.5), ("float32", 27.5)])
def test_channels_of_different_scales_share_a_table(dtype: str, limit: float) -> None:
    generator = torch.Generator().manual_seed(0)
    layout = one_layer(dtype, 2, 64)
    spread = 2.0 ** torch.linspace(-6, 6, 128).view(2, 64)
    keys, values = ((torch.randn(512, 2, 64, generator=generator) * spread).to(layout.torch_dtype) for _ in range(2))
    blob = Codec(Profile.unlearned(layout), "lossless").encode(KVChunk([keys], [values], layout))
    assert inspect(blob).bits_per_value <= limit


def test_layers_of_different_shapes(layouts: dict[str, KVLayout], make_chunk: Callable[..., KVChunk]) -> None:
    chunk = make_chunk(layouts["irregular"], 70, start=3)
    codec = Codec(Profile.unlearned(layouts["irregular"]), "lossless")
    blob = codec.encode(chunk)
    keys, values = decoded_layers(codec, blob, range(1, 3))
    assert [k.shape for k in keys] == [(70, 1, 30), (70, 3, 5)]
    assert all(map(same_bits, [*keys, *values], [*chunk.keys[1:], *chunk.values[1:]]))


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", list(BITS))
def test_moved_keys_that_are_not_finite_are_the_same_on_both_stages(dtype: str, special: float) -> None:
    layout = one_layer(dtype, 2, 8, ROPE)
    keys, values = torch.randn(2, 70, 2, 8, generator=torch.Generator().manual_seed(0)).to(layout.torch_dtype)
    keys[3, 0, 1] = keys[20, 1, 6] = keys[40, 0, 2] = special
    keys[40, 0, 6] = -special
    keys[50] = special
    blob = Codec(Profile.unlearned(layout), "lossless").encode(KVChunk([keys], [values], layout, 5))
    compiled, reference = (
        Codec(Profile.unlearned(layout), "lossless", backend=backend).decode(blob, start=31)
        for backend in ("numba", "reference")
    )
    assert not compiled.keys[0][50].isfinite().any() and compiled.keys[0][:3].isfinite().all()
    assert same_bits(compiled.keys[0], reference.keys[0])
    assert same_bits(compiled.values[0], values) and same_bits(reference.values[0], values)
