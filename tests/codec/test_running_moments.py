"""Profiles from sums of a stream of KV: what they gain, that sums add up and travel, and what is refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import FormatError, InputError, ProfileError, ProfileMismatchError
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.learning.running_moments import RunningMoments
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.stages.rotation import Rotation

LENGTH = 256


@dataclass(frozen=True)
class Traffic:
    """The cache of a text in chunks, with their ids; the last ones are left to be coded."""

    layout: KVLayout
    embedding: torch.Tensor
    chunks: list[KVChunk]
    ids: list[torch.Tensor]

    @property
    def features(self) -> int:
        return self.embedding.shape[1]

    def sums(self, which: slice, group: str = "layer", rank: int = 0, ranks: int = 1) -> RunningMoments:
        """The sums of some chunks, by a rank that has its heads of them."""
        sums = RunningMoments(self.layout.shard(rank, ranks), group, self.features)
        for chunk, ids in zip(self.chunks[which], self.ids[which], strict=True):
            sums.add(shard(chunk, rank, ranks), self.embedding[ids])
        return sums


def shard(chunk: KVChunk, rank: int, ranks: int) -> KVChunk:
    """A rank's heads of a chunk."""
    heads = [list(own) for own in chunk.layout.shard_heads(rank, ranks)]

    def own(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor[:, kept] for tensor, kept in zip(tensors, heads, strict=True)]

    return KVChunk(own(chunk.keys), own(chunk.values), chunk.layout.shard(rank, ranks), start=chunk.start)


ROPE = Rope((1.0, 0.3, 0.1, 0.01))
LAYOUT = KVLayout("synthetic", (LayerLayout(2, 8, 8, ROPE),) * 3, "float32", None)
VOCABULARY, FEATURES = 64, 16


@pytest.fixture(scope="module")
def traffic() -> Traffic:
    """Values of a few common directions, a third of which follows from the ids."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    embedding = normal(VOCABULARY, FEATURES)
    predicted, mixed = normal(FEATURES, LAYOUT.values_per_token), normal(6, LAYOUT.values_per_token)
    chunks, rows = [], []
    for _ in range(12):
        ids = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        x = 5 + embedding[ids] @ predicted / 4 + normal(LENGTH, 6) @ mixed + normal(LENGTH, LAYOUT.values_per_token) / 8
        keys, values = x.view(LENGTH, 3, 2, 2, 8).permute(2, 1, 0, 3, 4)
        rotation, everything = Rotation(0, LENGTH, torch.device("cpu")), slice(0, LENGTH)
        rotated = [rotation.apply(key, ROPE, everything) for key in keys]
        chunks.append(KVChunk(rotated, list(values), LAYOUT))
        rows.append(ids)
    return Traffic(LAYOUT, embedding, chunks, rows)


LEARNED, LEFT = slice(0, -4), slice(-4, None)


def bits_and_error(profile: Profile, traffic: Traffic, step: float) -> tuple[float, float]:
    """Bits per value and mean squared error over variance of the chunks that are left."""
    codec, size, values, errors = Codec(profile, step=step), 0, 0, []
    for chunk, ids in zip(traffic.chunks[LEFT], traffic.ids[LEFT], strict=True):
        blob = codec.encode(chunk, tokens=ids)
        back = codec.decode(blob)
        size, values = size + len(blob), values + chunk.tokens * chunk.layout.values_per_token
        for exact, coded in zip(chunk.keys + chunk.values, back.keys + back.values, strict=True):
            errors.append(float((exact - coded).square().mean() / (exact - exact.mean(0)).square().mean()))
    return 8 * size / values, sum(errors) / len(errors)


def test_ids_make_it_smaller(traffic: Traffic) -> None:
    sums = traffic.sums(LEARNED)
    plain = RunningMoments(traffic.layout)
    for chunk in traffic.chunks[LEARNED]:
        plain.add(chunk)
    with_ids = bits_and_error(sums.profile(traffic.embedding), traffic, 0.3)
    without = bits_and_error(plain.profile(), traffic, 0.3)
    assert with_ids[0] < 0.9 * without[0] and with_ids[1] < 1.02 * without[1]


def test_layers_whose_keys_vary_more_are_coded_finer(traffic: Traffic) -> None:
    """A quarter of the variance in one layer's keys: its share of the error is larger, in K and in V."""
    sums = RunningMoments(traffic.layout)
    for chunk in traffic.chunks[LEARNED]:
        sums.add(KVChunk([chunk.keys[0] / 2, *chunk.keys[1:]], chunk.values, traffic.layout))
    codec, chunk = Codec(sums.profile(), step=0.3), traffic.chunks[-1]
    back = codec.decode(codec.encode(chunk))
    errors = [float((exact - coded).square().mean()) for exact, coded in zip(chunk.values, back.values, strict=True)]
    assert errors[0] > 2 * max(errors[1:])


def test_sums_add_up_and_travel(traffic: Traffic) -> None:
    """The order does not matter, and rounding to float32 costs nothing."""
    whole = traffic.sums(LEARNED)
    halves = [traffic.sums(slice(0, 3)), traffic.sums(slice(3, -4))]
    other = RunningMoments.from_bytes(halves[1].to_bytes(), traffic.layout)
    halves[0].merge(RunningMoments(traffic.layout, "layer", traffic.features))
    halves[0].merge(other)
    assert halves[0].tokens == whole.tokens
    expected = bits_and_error(whole.profile(traffic.embedding), traffic, 0.3)
    assert bits_and_error(halves[0].profile(traffic.embedding), traffic, 0.3) == pytest.approx(expected, rel=2e-3)
    assert len(other.to_bytes()) <= RunningMoments.size(traffic.layout, "layer", traffic.features)


def test_ranks_join_to_the_sums_of_the_whole_model(traffic: Traffic) -> None:
    ranks = [traffic.sums(LEARNED, "heads:1", rank, 2) for rank in range(2)]
    joined = RunningMoments.join(traffic.layout, ranks)
    expected = bits_and_error(traffic.sums(LEARNED, "heads:1").profile(traffic.embedding), traffic, 0.3)
    assert bits_and_error(joined.profile(traffic.embedding), traffic, 0.3) == pytest.approx(expected, rel=1e-3)
    assert joined.profile(traffic.embedding).shard(1, 2).layout == ranks[1].layout


def test_ranks_may_have_summed_different_tokens(traffic: Traffic) -> None:
    ranks = [traffic.sums(slice(2, -4), "heads:1", 0, 2), traffic.sums(slice(0, -6), "heads:1", 1, 2)]
    joined = RunningMoments.join(traffic.layout, ranks).profile(traffic.embedding)
    expected = bits_and_error(traffic.sums(LEARNED, "heads:1").profile(traffic.embedding), traffic, 0.3)
    assert bits_and_error(joined, traffic, 0.3) == pytest.approx(expected, rel=0.05)


def test_chunks_that_do_not_fit_add_nothing(traffic: Traffic) -> None:
    sums = traffic.sums(slice(0, 1))
    chunk, embedded = traffic.chunks[0], traffic.embedding[traffic.ids[0]]
    before = sums.to_bytes()
    other = replace(traffic.layout, max_positions=7777)
    with pytest.raises(ProfileMismatchError, match="chunk: must have the layout"):
        sums.add(KVChunk(chunk.keys, chunk.values, other), embedded)
    for wrong in (None, embedded[:-1], embedded[:, :-1]):
        with pytest.raises(InputError, match=r"embedded: must be \[256, 16\]"):
            sums.add(chunk, wrong)
    values = [value.clone() for value in chunk.values]
    values[-1][3, 1, 5] = torch.nan
    with pytest.raises(InputError, match="finite"):
        sums.add(KVChunk(chunk.keys, values, traffic.layout), embedded)
    assert sums.to_bytes() == before


def test_too_few_tokens_make_no_profile(traffic: Traffic) -> None:
    few = traffic.sums(slice(0, 1))
    assert few.tokens < few.needed
    with pytest.raises(ProfileError, match="tokens: must be at least 512"):
        few.profile(traffic.embedding)
    with pytest.raises(InputError, match="embedding: must have 16 columns"):
        few.profile()
    with pytest.raises(ProfileError, match="group: 'layer' spans 32 values and must have at least 128"):
        RunningMoments(traffic.layout).profile()


def test_values_that_never_change_make_no_profile(traffic: Traffic) -> None:
    sums, ones = RunningMoments(traffic.layout), torch.ones(3, 256, 2, 8)
    for _ in range(6):
        sums.add(KVChunk(torch.zeros_like(ones), ones, traffic.layout, start=256))
    with pytest.raises(ProfileError, match="chunks: must vary"):
        sums.profile()


def test_other_sums_are_refused(traffic: Traffic) -> None:
    sums = RunningMoments(traffic.layout)
    with pytest.raises(ProfileMismatchError, match="other: must be sums of the same layout"):
        sums.merge(RunningMoments(traffic.layout, "unit"))
    ranks = [traffic.sums(slice(0, 1), "heads:1", rank, 2) for rank in range(2)]
    with pytest.raises(InputError, match=r"shards\[0\]: must be of the heads of rank 0 of 1"):
        RunningMoments.join(traffic.layout, ranks[:1])
    empty = RunningMoments(traffic.layout.shard(1, 2), "heads:1", traffic.features)
    with pytest.raises(InputError, match="got 'heads:1', 16 and 0 tokens"):
        RunningMoments.join(traffic.layout, [ranks[0], empty])
    with pytest.raises(InputError, match="group: must be 'heads:n' for several ranks, got 'layer'"):
        RunningMoments.join(traffic.layout, [traffic.sums(slice(0, 1), "layer", rank, 2) for rank in range(2)])
    with pytest.raises(InputError, match="group: must span one layer"):
        RunningMoments(traffic.layout, "layers:2")
    with pytest.raises(InputError, match="features: must be a whole number"):
        RunningMoments(traffic.layout, "layer", -1)


def test_damaged_sums_are_refused(traffic: Traffic) -> None:
    sums = RunningMoments(traffic.layout.shard(0, 2), "heads:1", 2)
    sums.add(shard(traffic.chunks[0], 0, 2), traffic.embedding[traffic.ids[0], :2])
    data = sums.to_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])

    def with_about(**changes: object) -> bytes:
        about = {**json.loads(header["__metadata__"]["cuvee"]), **changes}
        text = json.dumps({**header, "__metadata__": {"cuvee": json.dumps(about)}}).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + length :]

    damaged = [
        b"", data[:7], data[:-1], data[: 8 + length], b"\xff" * 8 + data[8:], with_about(layout="00" * 16),
        with_about(group="everything"), with_about(group="head"), with_about(features=3), with_about(features=-1),
        with_about(version=2), with_about(tokens="many"), with_about(tokens=-1), with_about(tokens=None),
    ]  # fmt: skip
    for each in damaged:
        with pytest.raises(FormatError, match="sums: "):
            RunningMoments.from_bytes(each, sums.layout)
    infinite = data[:-4] + struct.pack("<f", torch.inf)
    with pytest.raises(FormatError, match="sums: must be finite"):
        RunningMoments.from_bytes(infinite, sums.layout)
    assert RunningMoments.from_bytes(data, sums.layout).to_bytes() == data
