"""Inputs of the GPU bench: shapes of models, synthetic profiles and caches, and a paged cache to hold them.

No model is needed: bases are random and orthogonal, the spectrum falls such that a value costs about `BITS`, and the
noise is logistic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.entropy.family import default_family, deviation_of
from cuvee.codec.errors import CuveeError
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import PagedCache
from cuvee.codec.profiles.block_map import BlockMap
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.section_basis import SectionBasis
from cuvee.codec.profiles.section_profile import SectionProfile
from cuvee.codec.profiles.sections import partition
from cuvee.codec.rope import rotate
from cuvee.codec.support.arrays import I16
from cuvee.codec.support.steps import OCTAVE
from cuvee.eval.bench.shapes import llama_layout
from cuvee.learning.moments import SINKS

__all__ = [
    "BITS", "GPU_FULL", "GPU_REHEARSAL", "LOSSLESS", "MOST_ERROR", "Effort", "GpuScope", "Pages", "make_case",
    "spectrum", "stack", "synthetic_chunks", "synthetic_profile",
]  # fmt: skip

BITS = 1.4  # per value, which it is with
HEIGHT = 4.05  # the largest scale, in octaves above the step
RANK = 0.68  # the share of a block's values that is coded at that rate, as measured on Llama-3.1-8B, group `layer`
DISTINCT = 4  # how many chunks differ; any further ones are copies
MOST_ERROR = 0.2  # a unit with a larger relative error was not restored; quantization costs about 0.07
LOSSLESS = "lossless"  # among the groups of a scope: no profile


@dataclass(frozen=True, slots=True)
class Effort:
    """A call is timed for `seconds`, but at least and at most this often."""

    seconds: float
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class GpuScope:
    """Scope of a run.

    Attributes:
        name, layout: of the model whose cache is coded.
        groups: of the profiles, most important first; also `LOSSLESS`.
        chunks: how many chunks go through one call.
        tokens: tokens in a chunk.
        block_tokens: tokens in a block of the paged cache.
        effort: how long a figure may take.
        copy_bytes: how much the device copies.
    """

    name: str
    layout: KVLayout
    groups: tuple[str, ...]
    chunks: tuple[int, ...]
    tokens: int = 256
    block_tokens: int = 16
    effort: Effort = field(default=Effort(0.1, 5, 30))
    copy_bytes: int = 2 << 30


# 256 to 16,384 tokens.
GPU_FULL = GpuScope(
    "Llama-3.1-8B", llama_layout(32, 8, 128, 5e5), ("head", LOSSLESS, "layer", "layers:2"), (1, 4, 16, 64)
)
# The emulator takes a second for a thousand values.
GPU_REHEARSAL = GpuScope(
    "tiny", llama_layout(2, 1, 16, 1e4), ("head", LOSSLESS, "layer", "layers:2"), (1, 2), tokens=8, block_tokens=4,
    effort=Effort(0.0, 1, 1), copy_bytes=1 << 16,
)  # fmt: skip


def spectrum(size: int) -> I16:
    """The scales of the coded components in a block of `size` values, in 1/64 octaves above step 1.

    They fall quadratically (in octaves) from `HEIGHT` down to the last scale that is coded.
    """
    rank = math.ceil(RANK * size)
    fall = (1 - (np.arange(rank) + 0.5) / rank) ** 2
    made: I16 = np.rint(OCTAVE * ((HEIGHT + 2) * fall - 2)).astype(np.int16)
    return made


def synthetic_profile(layout: KVLayout, group: str, device: torch.device) -> Profile:
    """A profile with which the caches of `synthetic_chunks` cost about `BITS` per value at step 1.

    Blocks of the same size share a basis.
    """
    sections = partition(layout, group)
    noise = torch.Generator().manual_seed(0)
    maps: dict[int, tuple[BlockMap, I16]] = {}
    for size in sorted({size for section in sections for size in section.blocks}):
        basis, _ = torch.linalg.qr(torch.randn(size, size, generator=noise).to(device))
        scale = spectrum(size)
        maps[size] = BlockMap.of(basis.cpu(), scale), scale
    learned = []
    for section in sections:
        mean = torch.randn(section.values, generator=noise)
        sinks = mean + torch.randn(SINKS, section.values, generator=noise)
        blocks, scales = zip(*(maps[size] for size in section.blocks), strict=True)
        learned.append(SectionProfile(SectionBasis(mean, sinks, blocks), np.concatenate(scales)))
    return Profile(layout, group, "fitted", default_family(), tuple(learned), min_step_index=0)


def synthetic_chunks(profile: Profile, count: int, tokens: int, device: torch.device) -> list[KVChunk]:
    """Make chunks that follow each other, drawn from the profile's statistics of its components."""
    layout = profile.layout
    noise = torch.Generator(device).manual_seed(0)
    moved: dict[int, torch.Tensor] = {}
    chunks = []
    for index in range(count):
        start = index * tokens
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        positions = torch.arange(start, start + tokens, device=device)
        for section, learned in zip(profile.sections, profile.learned, strict=True):
            deviation = torch.from_numpy(deviation_of(learned.scale)).float().to(device)
            uniform = torch.rand(len(deviation), tokens, generator=noise, device=device).clamp(1e-6, 1 - 1e-6)
            y = uniform.logit() * (3**0.5 / math.pi * deviation)[:, None]
            parts, row = [], 0
            for matrix in learned.basis.inverse:
                if id(matrix) not in moved:
                    moved[id(matrix)] = matrix.to(device)
                parts.append((moved[id(matrix)] @ y[row : row + matrix.shape[1]]).T)
                row += matrix.shape[1]
            x = torch.cat(parts, 1) + learned.basis.means(start, slice(0, tokens)).to(device)
            units = x.split([n for layer in section.layers(layout) for n in (layer.key_values, layer.value_values)], 1)
            for layer, key, value in zip(section.layers(layout), units[::2], units[1::2], strict=True):
                turned = rotate(key.unflatten(1, (layer.kv_heads, layer.head_dim)), layer.rope, positions)
                keys.append(turned.to(layout.torch_dtype))
                values.append(value.unflatten(1, (layer.kv_heads, layer.value_dim)).to(layout.torch_dtype))
        chunks.append(KVChunk(keys, values, layout, start))
    return chunks


class Pages:
    """A paged cache with room for some chunks, whose blocks lie in random order.

    Attributes:
        rows: `[2 * layers, slots, heads * size]`. Unit 2 * l is K and unit 2 * l + 1 is V of layer l.
        slots: int64 `[tokens]` for each region, which holds one chunk.
        cache: the same memory, as the codec sees it.
    """

    def __init__(self, layout: KVLayout, regions: int, tokens: int, block_tokens: int, device: torch.device) -> None:
        layer = layout.layers[0]
        each = -(-tokens // block_tokens)
        shape = (2 * layout.num_layers, regions * each, block_tokens, layer.kv_heads, layer.head_dim)
        data = torch.empty(shape, dtype=layout.torch_dtype, device=device)
        self.rows = data.view(shape[0], regions * each * block_tokens, layer.key_values)
        order = torch.randperm(regions * each, generator=torch.Generator().manual_seed(0)).view(regions, each, 1)
        slots = (order * block_tokens + torch.arange(block_tokens)).view(regions, -1)[:, :tokens]
        self.slots = list(slots.to(device).contiguous())
        self.cache = PagedCache(layout, list(data[0::2]), list(data[1::2]))

    def fill(self, chunks: Sequence[KVChunk]) -> None:
        """Write the chunks to the regions in turn, until all regions are full."""
        stacks = [stack(chunk) for chunk in chunks]
        for region, at in enumerate(self.slots):
            self.rows[:, at] = stacks[region % len(stacks)]

    def poison(self) -> None:
        """Fill everything with NaN, which will still be there wherever a decoder does not write."""
        self.rows.fill_(float("nan"))

    def check(self, chunks: Sequence[KVChunk], regions: range) -> float:
        """The largest relative error of regions that were restored from `chunks`.

        Raises:
            CuveeError: a region does not hold what it should.
        """
        stacks = [stack(chunk).float() for chunk in chunks]
        errors = []
        for region in regions:
            want = stacks[region % len(stacks)]
            # Unit by unit, so that a layer that was never written cannot hide behind the others.
            difference = self.rows[:, self.slots[region]].float() - want
            errors.append((difference.norm(dim=(1, 2)) / want.norm(dim=(1, 2))).max())
        worst = float(torch.stack(errors).max())
        if not worst < MOST_ERROR:
            raise CuveeError(f"a decoded cache has a relative error of {worst:.3g}; nothing is reported")
        return worst


def stack(chunk: KVChunk) -> torch.Tensor:
    """A chunk as `[2 * layers, T, heads * size]`, with K and V of each layer in turn."""
    pairs = zip(chunk.keys, chunk.values, strict=True)
    return torch.stack([tensor.flatten(1) for pair in pairs for tensor in pair])


def make_case(group: str, scope: GpuScope, device: torch.device) -> tuple[Profile, list[KVChunk]]:
    """Return the profile of a group, and chunks to code with it."""
    layout = scope.layout
    profile = synthetic_profile(layout, "head" if group == LOSSLESS else group, device)
    chunks = synthetic_chunks(profile, min(DISTINCT, max(scope.chunks)), scope.tokens, device)
    return Profile.unlearned(layout) if group == LOSSLESS else profile, chunks
