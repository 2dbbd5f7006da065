"""Tensor parallelism: the codec of one rank codes its heads as the codec of the whole cache does among all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.classed import with_classes
from tests.conftest import fitted_profile, synthetic_chunk

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import InputError, ProfileError, ProfileMismatchError
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.quality import CurvePoint
from cuvee.learning.calibrate import fit

ROPE = Rope((1.0, 0.3, 0.1, 0.03))
# Heads differ from layer to layer, and so do the sizes of keys and values; four ranks share the heads of layer 1.
UNLIKE = KVLayout(
    "unlike", (LayerLayout(4, 8, 16, ROPE), LayerLayout(2, 16, 8, ROPE), LayerLayout(8, 8, 8, None)), "float32", None
)


def of_rank(chunk: KVChunk, rank: int, size: int) -> KVChunk:
    """What the rank holds of the chunk."""
    heads = chunk.layout.shard_heads(rank, size)
    keys, values = (
        [unit[:, part.start : part.stop].contiguous() for unit, part in zip(units, heads, strict=True)]
        for units in (chunk.keys, chunk.values)
    )
    return KVChunk(keys, values, chunk.layout.shard(rank, size), chunk.start)


def units(chunk: KVChunk) -> list[torch.Tensor]:
    """Keys and values of each layer in turn."""
    return [unit for pair in zip(chunk.keys, chunk.values, strict=True) for unit in pair]


def assert_equal(got: KVChunk, want: KVChunk) -> None:
    """Bit for bit."""
    assert (got.layout, got.start) == (want.layout, want.start)
    for a, b in zip(units(got), units(want), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def assert_alike(got: KVChunk, want: KVChunk) -> None:
    """To the rounding of a product: where blocks are not aligned, BLAS may add up in another order."""
    for a, b in zip(units(got), units(want), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2**-20 * float(b.abs().max()))


def speech(layout: KVLayout, tokens: int, seed: int, start: int = 0) -> KVChunk:
    """A cache whose tokens resemble those before and whose position 0 lies far out; the last head of a layer is still.

    Means of the first positions pay on it, and blocks without components turn up.
    """
    noise = torch.Generator().manual_seed(seed)
    out: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for layer in layout.layers:
        for size, tensors in ((layer.head_dim, out[0]), (layer.value_dim, out[1])):
            x = torch.randn(tokens, layer.kv_heads, size, generator=noise)
            for t in range(1, tokens):
                x[t] = 0.95 * x[t - 1] + 0.3 * x[t]
            x *= torch.linspace(2, 0.5, size) * torch.linspace(1, 2, layer.kv_heads)[:, None]
            if start == 0:
                x[0] = 40 + torch.arange(layer.kv_heads)[:, None]
            x[:, -1] = 1.5
            tensors.append(x.to(layout.torch_dtype))
    return KVChunk(out[0], out[1], layout, start)


GROUPS = ("head", "heads:2")


@pytest.fixture(scope="module", params=GROUPS)
def rich(request: pytest.FixtureRequest) -> Profile:
    """Means of the first positions and blocks without components, in heads that differ by layer."""
    layout = replace(UNLIKE, layers=tuple(replace(layer, rope=None) for layer in UNLIKE.layers))
    samples = [speech(layout, 160, seed, 50 * (seed % 3)) for seed in range(12)]
    profile = fit(layout, samples, "head" if request.param == "head" else "heads:1")
    assert all(len(section.basis.sinks) for section in profile.learned)
    assert all(section.basis.block_ranks[-1] == 0 < section.basis.block_ranks[0] for section in profile.learned)
    return profile


@pytest.mark.parametrize("size", [1, 4, 16])
def test_ranks_hold_what_vllm_gives_them(size: int) -> None:
    # vLLM: max(1, heads // size) heads a rank; with more ranks than heads each head is on size // heads of them.
    for rank in range(size):
        layout, parts = UNLIKE.shard(rank, size), UNLIKE.shard_heads(rank, size)
        for whole, layer, part in zip(UNLIKE.layers, layout.layers, parts, strict=True):
            count = max(1, whole.kv_heads // size)
            first = rank * count if size <= whole.kv_heads else rank // (size // whole.kv_heads)
            assert part == range(first, first + count)
            assert layer == replace(whole, kv_heads=count)
        assert replace(layout, layers=UNLIKE.layers) == UNLIKE
    held = [UNLIKE.shard_heads(rank, size) for rank in range(size)]
    for index, whole in enumerate(UNLIKE.layers):
        copies = max(size // whole.kv_heads, 1)
        everything = sorted(head for parts in held for head in parts[index])
        assert everything == sorted([*range(whole.kv_heads)] * copies)


@pytest.mark.parametrize(
    ("rank", "size", "message"),
    [
        (0, 0, "size: must be an int above 0, got 0"),
        (0, True, "size: must be an int above 0, got True"),
        (-1, 2, "rank: must be one of 0 … 1, got -1"),
        (2, 2, "rank: must be one of 0 … 1, got 2"),
        (1.0, 2, "rank: must be one of 0 … 1, got 1.0"),
        (0, 3, "size: must divide the 4 KV heads of layer 0 or be a multiple of them, got 3"),
        (0, 12, "size: must divide the 8 KV heads of layer 2 or be a multiple of them, got 12"),
    ],
)
def test_ranks_that_do_not_exist(rank: Any, size: Any, message: str) -> None:
    for ask in (UNLIKE.shard, UNLIKE.shard_heads, Profile.unlearned(UNLIKE).shard):
        with pytest.raises(InputError) as caught:
            ask(rank, size)
        assert str(caught.value) == message


@pytest.mark.parametrize("group", ["unit", "all"])
def test_bases_that_mix_heads_cannot_be_cut(group: str) -> None:
    for size in (2, 4):
        with pytest.raises(ProfileError, match=f"^group: must be 'heads:n' or 'head' .* '{group}'.* tensor_parallel="):
            fitted_profile("gqa", group).shard(0, size)


@pytest.mark.parametrize("group", ["unit", "all", *GROUPS])
def test_ranks_that_share_the_only_head_share_the_profile(group: str) -> None:
    profile = fitted_profile("mqa", group)
    assert profile.shard(1, 4) is profile


def test_ids(rich: Profile, tmp_path: Path) -> None:
    ids = [rich.shard(rank, 8).id for rank in range(8)]
    assert len({rich.id, *ids}) == 9
    assert ids == [rich.shard(rank, 8).id for rank in range(8)]
    rich.save(tmp_path / "whole")
    loaded = Profile.load(tmp_path / "whole")
    assert ids == [loaded.shard(rank, 8).id for rank in range(8)]
    # Copies of a head are one profile, so that one rank's blobs serve the other.
    gqa = replace(rich.layout, layers=rich.layout.layers[1:2])
    two = Profile(gqa, rich.group, rich.source, rich.family, rich.learned[1:2], min_step_index=rich.min_step_index)
    assert two.shard(0, 4).id == two.shard(1, 4).id == two.shard(0, 2).id != two.shard(2, 4).id


def test_a_shard_is_a_profile_like_any(rich: Profile, tmp_path: Path) -> None:
    curve = [CurvePoint(-64, 3.0, 1e-3, 1e-3), CurvePoint(64, 1.0, 1e-2, 4e-2)]
    whole = Profile(
        rich.layout, rich.group, "calibrated", rich.family, rich.learned, min_step_index=-320, model="ab" * 16,
        curve=curve,
    )  # fmt: skip
    shard = whole.shard(1, 2)
    shard.save(tmp_path / "shard")
    loaded = Profile.load(tmp_path / "shard")
    assert loaded.id == shard.id and loaded.layout == rich.layout.shard(1, 2)
    assert (loaded.curve, loaded.model, loaded.min_step_index) == (tuple(curve), "ab" * 16, -320)
    assert loaded.resolve("balanced") == whole.resolve("balanced")  # the same step on every rank
    chunk = of_rank(speech(rich.layout, 40, 99), 1, 2)
    codec = Codec(loaded)
    blob = Codec(shard).encode(chunk)
    assert codec.encode(chunk) == blob
    assert_equal(codec.decode(blob), Codec(shard).decode(blob))
    # A shard of a shard is a shard.
    assert whole.shard(1, 2).shard(1, 2).id == whole.shard(3, 4).id


# One tile, and several; at the start of a sequence, and later.
@pytest.mark.parametrize(
    ("name", "size", "group", "tokens", "start"),
    [("gqa", 2, "head", 1, 0), ("gqa", 4, "heads:2", 256, 0), ("mha", 2, "heads:2", 700, 3), ("mha", 4, "head", 256, 0),
     ("bfloat16", 2, "heads:2", 700, 3), ("partial", 2, "head", 700, 3)],
)  # fmt: skip
def test_shards_together_are_the_whole(name: str, size: int, tokens: int, start: int, group: str) -> None:
    """Bit for bit: a block's product has the same shape in the shard."""
    profile = fitted_profile(name, group)
    chunk = synthetic_chunk(profile.layout, tokens, 5, start)
    for step in (0.05, 0.7):
        codec = Codec(profile, step=step)
        whole = codec.decode(codec.encode(chunk))
        for rank in range(size):
            own = Codec(profile.shard(rank, size), step=step)
            assert_equal(own.decode(own.encode(of_rank(chunk, rank, size))), of_rank(whole, rank, size))


@pytest.mark.parametrize("group", GROUPS)
def test_shards_that_choose_the_same_classes_are_the_whole(group: str) -> None:
    """Predictors that go by the position choose the same classes on every rank as in the whole."""
    plain, size, tokens = fitted_profile("mha", group), 4, 300
    class_scale = np.linspace(90, -60, 16).astype(np.int16)
    learned = tuple(replace(section, class_scale=class_scale) for section in plain.learned)
    weights = np.exp2(np.random.default_rng(0).normal(size=tokens) * 3)
    profile = with_classes(Profile(plain.layout, group, "fitted", plain.family, learned), weights, 3, every=True)
    chunk = synthetic_chunk(profile.layout, tokens, 5, 3)
    codec = Codec(profile, step=0.2)
    whole = codec.decode(codec.encode(chunk))
    for rank in range(size):
        own, part = Codec(profile.shard(rank, size), step=0.2), of_rank(chunk, rank, size)
        # Blocks of several units are longer, and not all of a whole section's are aligned as in the shard.
        check = assert_equal if group == "head" else assert_alike
        check(own.decode(own.encode(part)), of_rank(whole, rank, size))


@pytest.mark.parametrize("size", [2, 8])
def test_shards_of_a_rich_profile_are_the_whole(rich: Profile, size: int) -> None:
    """With means of the first positions, blocks and sections without components."""
    for start in (0, 2, 70):
        chunk = speech(rich.layout, 200, 7, start)
        for step in (0.05, 0.5, 32.0):
            codec = Codec(rich, step=step)
            whole = codec.decode(codec.encode(chunk))
            for rank in range(size):
                own = Codec(rich.shard(rank, size), step=step)
                blob = own.encode(of_rank(chunk, rank, size))
                assert_equal(own.decode(blob), of_rank(whole, rank, size))


def test_a_shard_reads_and_writes_its_own_blobs_alone() -> None:
    profile = fitted_profile("gqa", "head")
    chunk = synthetic_chunk(profile.layout, 20)
    whole, first, second = (Codec(p, step=0.2) for p in (profile, profile.shard(0, 2), profile.shard(1, 2)))
    blob = first.encode(of_rank(chunk, 0, 2))
    with pytest.raises(ProfileMismatchError, match=r"must be of profile .* the profile that encoded it"):
        second.decode(blob)
    with pytest.raises(ProfileMismatchError, match="another model"):
        whole.decode(blob)
    with pytest.raises(ProfileMismatchError, match="another model"):
        first.decode(whole.encode(chunk))
    with pytest.raises(ProfileMismatchError, match="3 layers of 1 x 16"):
        first.encode(chunk)
    # Copies of a head serve one another.
    copies = [Codec(profile.shard(rank, 4), step=0.2) for rank in range(2)]
    assert_equal(copies[1].decode(copies[0].encode(of_rank(chunk, 0, 4))), first.decode(blob))


def test_shards_of_an_unlearned_profile() -> None:
    unlearned = Profile.unlearned(UNLIKE).with_curve([CurvePoint(-80, 4.0, 1e-2)])
    shards = [unlearned.shard(rank, 4) for rank in range(4)]
    assert {shard.id for shard in shards} == {Profile.unlearned(UNLIKE.shard(0, 4)).id}
    assert all(shard.curve == unlearned.curve and shard.source == "unlearned" for shard in shards)


@pytest.mark.parametrize(("rank", "size"), [(2, 4), (7, 8)])  # rank 7 of 8 has no component at all
def test_kernels_on_a_shard(device: torch.device, rich: Profile, rank: int, size: int) -> None:
    """One shard on the device and on the CPU: blobs cross over."""
    shard, part = rich.shard(rank, size), of_rank(speech(rich.layout, 9, 7, 2), rank, size)
    cpu, triton = Codec(shard, step=0.25), Codec(shard, step=0.25, backend="triton")
    there = KVChunk([k.to(device) for k in part.keys], [v.to(device) for v in part.values], part.layout, part.start)
    blob, mine = cpu.encode(part), triton.encode(there)
    assert abs(len(mine) - len(blob)) <= 0.002 * len(blob) + 8
    want = cpu.decode(blob)
    for got in (cpu.decode(mine), triton.decode(blob, device=device)):
        for a, b in zip(units(got), units(want), strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=0, atol=2**-14 * float(b.abs().max()))
