"""Whole chunks coded by the kernels and by the CPU: profiles of every kind by name, codecs of both, caches in pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from tests.classed import with_classes
from tests.codec.reference import rans
from tests.codec.reference.sections import read_part
from tests.conftest import LAYOUTS, fitted_profile, synthetic_chunk
from tests.predicting import VOCABULARY, predicting, with_sinks

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.entropy.token_classes import CLASSES, class_frequencies, class_table
from cuvee.codec.format.container import read_header, read_section
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import PagedCache
from cuvee.codec.profiles.class_predictor import Predictor
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.support.arrays import I64, U8

CPU = torch.device("cpu")
# Of sums and products, relative to the largest value of a unit: a bfloat16 product rounds both factors (2**-9 each) and
# the result; a float32 one is far finer.
ROUNDING = {"bfloat16": 2**-6, "float16": 2**-9, "float32": 2**-15}


@cache
def profile_of(name: str, scheme: str) -> Profile:
    """The profile of a layout for `lossless`, or for a group and any of `classes`, `predictor`, `tokens`, `parts`.

    Token classes go by position (`classes`) or by a predictor, but for section 1; `tokens` are predicted from ids;
    `parts` are a base and its refinement.
    """
    group, *more = scheme.split()
    if group == "lossless":
        return Profile.unlearned(LAYOUTS[name])
    profile = fitted_profile(name, group)
    profile = with_sinks(predicting(profile)) if "tokens" in more else profile
    profile = with_classes(profile) if "classes" in more else profile
    return with_predictors(profile) if "predictor" in more else profile


@cache
def codecs(name: str, scheme: str) -> tuple[Codec, Codec]:
    """The CPU's codec and the kernels'."""
    quality: dict[str, Any] = {"quality": "lossless"} if scheme == "lossless" else {"step": 0.25}
    quality |= {"refinements": 1} if "parts" in scheme else {}
    profile = profile_of(name, scheme)
    return Codec(profile, **quality), Codec(profile, backend="triton", **quality)


def ids_of(scheme: str, tokens: int) -> I64 | None:
    """Ids of a chunk's tokens where they are predicted; some occur several times."""
    return np.random.default_rng(tokens).integers(0, VOCABULARY, tokens) if "tokens" in scheme else None


def chunk_of(name: str, scheme: str, tokens: int, seed: int = 0, start: int = 2) -> KVChunk:
    """A chunk, with ids where the scheme predicts, and with values that escape.

    Where one block holds all units, these would make all that is beside them as coarse.
    """
    chunk = synthetic_chunk(LAYOUTS[name], tokens, seed, start)
    if scheme.split(maxsplit=1)[0] not in ("lossless", "all"):
        chunk.values[0][tokens // 2, 0, :2] += 300.0
    return KVChunk(chunk.keys, chunk.values, chunk.layout, chunk.start, ids_of(scheme, tokens))


def coded(codec: Codec, chunk: KVChunk) -> list[bytes]:
    """The blob of a chunk, and its refinement if the codec makes one."""
    return list(codec.encode_parts(chunk)) if codec.refinements else [codec.encode(chunk)]


def with_predictors(profile: Profile) -> Profile:
    """The profile with a predictor of token classes in every section but the second."""
    rng = np.random.default_rng(0)
    learned = []
    for index, section in enumerate(profile.learned):
        if index == 1:
            learned.append(section)
            continue
        count = min(7 + index, len(section.scale))
        chosen = np.sort(rng.permutation(len(section.scale))[:count]).astype(np.int32)
        scale = np.exp2(section.scale[chosen] / 64).astype(np.float32)
        weights = rng.normal(0, 0.4, (2, count)).astype(np.float32)
        predictor = Predictor(
            chosen, scale, weights[0], weights[1], 0.05, 0.3, np.array([-1.5, -0.5, 0.1][: 2 + index % 2], np.float32),
            np.zeros(count + 1, np.float32), np.array([2.0, 1.5, 0.5, 0.0][index % 2 :], np.float32),
        )  # fmt: skip
        freq = class_frequencies(np.exp2(-np.abs(np.arange(CLASSES) - 7.0)))
        learned.append(replace(section, predictor=predictor, class_freq=freq))
    return Profile(
        profile.layout, profile.group, profile.source, profile.family, tuple(learned),
        min_step_index=profile.min_step_index, token_table=profile.token_table,
    )  # fmt: skip


def classes_of(blob: bytes, codec: Codec) -> list[U8]:
    """Of each section the classes of the tokens."""
    header = read_header(blob)
    out = []
    for index, learned in enumerate(codec.profile.learned):
        part = read_part(read_section(blob, header, index), learned.classed_plan(header.step_index), header.tokens)
        out.append(rans.decode_classes(part.classes, class_table(learned.class_freq), header.tokens))
    return out


def tensors(chunk: KVChunk) -> list[torch.Tensor]:
    return [unit.cpu() for pair in zip(chunk.keys, chunk.values, strict=True) for unit in pair]


def on(device: torch.device, chunk: KVChunk) -> KVChunk:
    keys, values = ([unit.to(device) for unit in units] for units in (chunk.keys, chunk.values))
    return KVChunk(keys, values, chunk.layout, chunk.start, chunk.token_ids)


def apart(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """The largest difference of a unit, relative to its largest value; infinite where one is no number."""
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        error = float((a.cpu().double() - b.cpu().double()).abs().max() / b.double().abs().max().clamp_min(1e-30))
        worst = max(worst, float("inf") if math.isnan(error) else error)
    return worst


def assert_close(got: KVChunk, want: KVChunk, rounding: float | None = None) -> None:
    """Equal but for the rounding of sums and products."""
    assert got.start == want.start and got.layout == want.layout
    assert apart(tensors(got), tensors(want)) <= (ROUNDING[want.layout.dtype] if rounding is None else rounding)


class Pages:
    """A cache of sevens in blocks of 16 or so tokens; before the first and after the last lie guards."""

    def __init__(
        self, layout: KVLayout, device: torch.device, dtype: torch.dtype | None = None, blocks: int = 8, size: int = 16
    ) -> None:
        shapes = [(n.kv_heads, dim) for n in layout.layers for dim in (n.head_dim, n.value_dim)]
        kind = dtype or layout.torch_dtype
        self.units = [
            torch.full((blocks + 2, heads, size, dim), 7.0).to(kind).to(device).transpose(1, 2) for heads, dim in shapes
        ]
        inner = [unit[1:-1] for unit in self.units]
        scales = [0.5] * layout.num_layers if dtype is not None and dtype.itemsize == 1 else None
        self.cache = PagedCache(layout, inner[::2], inner[1::2], scales, scales)

    def by_slot(self, unit: int) -> torch.Tensor:
        """`[slots, H, D]`, on the CPU."""
        return self.units[unit][1:-1].cpu().float().flatten(0, 1)

    def unharmed(self, slots: Sequence[int] = ()) -> bool:
        """Whether all but these slots are still sevens, the guards among them."""
        size = self.units[0].shape[1]
        free = torch.ones(self.units[0].shape[0] * size, dtype=torch.bool)
        free[torch.tensor([*slots], dtype=torch.int64) + size] = False
        return all(bool((unit.cpu().float().flatten(0, 1)[free] == 7).all()) for unit in self.units)
