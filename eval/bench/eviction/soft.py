"""Soft eviction: what a press would drop stays in the cache, in the coarsest class, at a few bits.

`Codec.encode(importance=)` takes one weight per token; a press decides for each layer and KV head. So a token's *votes*
are the share of the heads that keep it.

    by scores    the weight is the token's votes, averaged over compression ratios: a rank, roughly
    by classes   the weights that give each token the class that the profile predicts, averaged over sections; those
                 with the fewest votes get weight 0, the coarsest class: two octaves above the blob's step
    alone        the same with a blob's step so coarse, and kept tokens so much finer than it, that the coarsest class
                 codes next to nothing: dropped tokens are their predictions alone
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cuvee.codec.codec import Codec
from cuvee.codec.entropy.token_classes import CLASSES, NEUTRAL
from cuvee.codec.format.container import read_header, read_sections
from cuvee.codec.profiles.class_predictor import CLASSES_PER_OCTAVE, EXPONENT
from cuvee.codec.profiles.step_coding import StepCoding
from cuvee.codec.stages.reference.sections import index_sections
from cuvee.codec.support.arrays import F64, U8
from cuvee.eval.bench.eviction.presses import Kept

__all__ = ["alone", "coarsest_components", "evicted", "token_classes", "votes", "weights_of_classes"]


def votes(kept: Sequence[Kept]) -> F64:
    """Return the share of layers and heads that keep each token, averaged over several presses or ratios, `[T]`."""
    shares: F64 = np.mean([own.mean((0, 1)) for own in kept], axis=0)
    return shares


def evicted(weights: F64, kept: Kept, ratio: float) -> F64:
    """Return weights `[T]` of which those of a share of the tokens are 0: of those with the fewest votes."""
    count = max(1, int(len(weights) * (1 - ratio)))
    chosen = np.argsort(-votes([kept]), kind="stable")[:count]
    out = np.zeros_like(weights)
    out[chosen] = weights[chosen]
    return out


def alone(weights: F64, kept: Kept, ratio: float, octaves: float) -> F64:
    """Return weights `[T]` as `evicted` does, but with kept tokens finer by `octaves` than the blob's step on average.

    Weights of 0 do not count in the mean that the neutral class stands for. So dropped tokens get a weight above it,
    one that is small enough. It puts them `octaves` times kept over dropped tokens above the blob's step.
    """
    bits = np.log2(weights)
    chosen = evicted(weights, kept, ratio) > 0
    level = bits[chosen].mean() - 2 / EXPONENT * octaves
    low = (level * len(bits) - bits[chosen].sum()) / max((~chosen).sum(), 1)
    out: F64 = np.exp2(np.where(chosen, bits, low) - level)
    return out


def token_classes(codec: Codec, blob: bytes) -> U8:
    """Return the class of each token in each section of a blob with token ids, uint8 `[S, T]`."""
    header = read_header(blob)
    coding = _coding(codec)
    parts = list(enumerate(read_sections(blob, header, range(len(coding.sections)))))
    found = index_sections(coding, parts, header.tokens).classes
    return np.stack([each for each in found if each is not None])


def weights_of_classes(classes: U8) -> F64:
    """Return weights `[T]` for `importance=` that give each token its mean class `[S, T]`, where nothing is evicted."""
    octaves = (classes.mean(0) - NEUTRAL) / CLASSES_PER_OCTAVE
    weights: F64 = np.exp2(-2 / EXPONENT * octaves)
    return weights


def coarsest_components(codec: Codec) -> tuple[int, int]:
    """Return how many components of a token the coarsest class codes, and how many the neutral class codes."""
    rows = [section.classed.rows for section in _coding(codec).sections]
    return sum(int(own[CLASSES - 1]) for own in rows), sum(int(own[NEUTRAL]) for own in rows)


def _coding(codec: Codec) -> StepCoding:
    profile = codec.profile
    return StepCoding(profile.learned_for(True), profile.family, codec.step_index)
