"""Whole chunks coded by the kernels and compared with the CPU, to test compiled code."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from tests import conftest
from tests.classed import with_classes
from tests.predicting import VOCABULARY, predicting, with_sinks

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.support.arrays import I64

SCHEMES = ("layer", "classes", "tokens", "lossless")
TOKENS = 70  # neither a multiple nor a power of anything: partial tiles everywhere
LAYOUT = "bfloat16"
CLOSE = 2.0**-6  # of the largest value: products are taken in bfloat16


def profile_of(scheme: str, layout: str) -> Profile:
    """Return the profile of a scheme: `classes` and `tokens` have sections of one layer."""
    if scheme == "lossless":
        return Profile.unlearned(conftest.LAYOUTS[layout])
    learned = conftest.fitted_profile(layout, "layer" if scheme in ("classes", "tokens") else scheme)
    if scheme == "classes":
        return with_classes(learned)
    return with_sinks(predicting(learned)) if scheme == "tokens" else learned


def start_of(scheme: str) -> int:
    """Return the position of a chunk: where tokens are predicted, the first of them is a sink in some sections."""
    return 1 if scheme == "tokens" else 5


def ids_of(scheme: str, tokens: int) -> I64 | None:
    """Return the ids of a chunk's tokens; some occur several times."""
    return np.random.default_rng(tokens).integers(0, VOCABULARY, tokens) if scheme == "tokens" else None


@cache
def codecs(scheme: str, layout: str = LAYOUT) -> tuple[Codec, Codec]:
    """Return the CPU's codec and the kernels'."""
    profile = profile_of(scheme, layout)
    if scheme == "lossless":
        return Codec(profile, "lossless"), Codec(profile, "lossless", backend="triton")
    return Codec(profile, step=0.25), Codec(profile, step=0.25, backend="triton")


@cache
def example(scheme: str, layout: str = LAYOUT, tokens: int = TOKENS) -> tuple[KVChunk, bytes, KVChunk]:
    """A chunk, the CPU's blob of it, and what the CPU reads there."""
    chunk = conftest.synthetic_chunk(conftest.LAYOUTS[layout], tokens, 3, start_of(scheme))
    if scheme != "lossless":
        chunk.values[0][tokens // 2, 0, :2] += 3000.0  # a value or two that escape
    cpu, _ = codecs(scheme, layout)
    blob = cpu.encode(chunk, tokens=ids_of(scheme, tokens))
    return chunk, blob, cpu.decode(blob, 1000)


def apart(got: KVChunk, want: KVChunk) -> float:
    """The largest difference of a unit, relative to its largest value; infinite where one is no number."""
    worst = 0.0
    for a, b in zip([*got.keys, *got.values], [*want.keys, *want.values], strict=True):
        error = float((a.float() - b.float()).abs().max() / b.float().abs().max())
        worst = max(worst, float("inf") if math.isnan(error) else error)
    return worst


def decodes(scheme: str, layout: str = LAYOUT, tokens: int = TOKENS) -> None:
    """Fail unless the kernels read the CPU's blob as the CPU does."""
    _, blob, want = example(scheme, layout, tokens)
    got = codecs(scheme, layout)[1].decode(blob, 1000)
    if scheme == "lossless":
        got, want = (codec.decode(blob) for codec in codecs(scheme, layout)[::-1])
        assert apart(got, want) == 0
    assert apart(got, want) <= CLOSE


def encodes(scheme: str, layout: str = LAYOUT, tokens: int = TOKENS) -> None:
    """Fail unless the CPU reads the kernels' blob, finds in it what it finds in its own, and it is no larger.

    Lossless blobs are the same bytes; in others a level here and there is the neighbor, as sums are in another order.
    """
    chunk, blob, want = example(scheme, layout, tokens)
    cpu, gpu = codecs(scheme, layout)
    mine = gpu.encode(chunk, tokens=ids_of(scheme, tokens))
    if scheme == "lossless":
        assert mine == blob
        return
    assert abs(len(mine) - len(blob)) <= 0.002 * len(blob) + 8
    got = cpu.decode(mine, 1000)
    for a, b in zip([*got.keys, *got.values], [*want.keys, *want.values], strict=True):
        assert float((a != b).double().mean()) < 0.05
    assert apart(got, want) < 0.05
