"""How often a chunk repeats its values, from a sample: few bytes hold a cache of zeros without loss, or of few values.

Let p be the share of pairs of tokens that have the same value in a channel. The entropy of the values of a channel is
at least -log2 p bits (Rényi's entropy of order two), and lossless coding takes no fewer: it tells channels apart by no
more than their central bytes. So a blob of fewer bits per value is smaller than a lossless one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.backends import EncodeRequest
from cuvee.codec.chunk import KVChunk

# Of a sample, which takes 45 us: a chunk of 256 tokens of SmolLM2-135M takes 20 ms to encode.
_TOKENS, _LAYERS, _CHANNELS = 16, 4, 256
_GOLDEN = (5**0.5 - 1) / 2  # spreads the layers without a period that kinds of layers could share
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_MARGIN = 1.0  # bits by which a sample may err


def sampled(requests: Sequence[EncodeRequest]) -> tuple[torch.Tensor, list[int]]:
    """Return values of some tokens of each chunk, as stored, `[tokens, channels]`, and the number of tokens of each.

    The chunks lie in one cache, which has all their slots.
    """
    source = requests[0].source
    counts = [request.source.tokens for request in requests]
    steps = [-(-tokens // _TOKENS) for tokens in counts]
    layout = source.layout if isinstance(source, KVChunk) else source.cache.layout
    layers = [int(layout.num_layers * (number * _GOLDEN % 1)) for number in range(1, _LAYERS + 1)]
    if isinstance(source, KVChunk):
        units = [unit[layer][:: steps[0]] for layer in layers for unit in (source.keys, source.values)]
    else:
        slots = torch.cat([request.slots[::step] for request, step in zip(requests, steps, strict=True)])
        read = source.cache.reader(slots)
        units = [unit for layer in layers for unit in read(layer)]
    step = -(-sum(unit.shape[1] * unit.shape[2] for unit in units) // _CHANNELS)
    values = torch.cat([unit.flatten(1)[:, ::step] for unit in units], 1)
    return values.view(_WORDS[values.itemsize]), [-(-tokens // by) for tokens, by in zip(counts, steps, strict=True)]


def may_be_smaller(values: npt.NDArray[Any], bits: float) -> bool:
    """Return whether a lossless blob may take fewer than `bits` bits per value, given sampled values of its chunk."""
    tokens = len(values)
    if tokens < 2:
        return False
    equal = int(np.count_nonzero(values[:, None] == values)) - values.size  # but for each token and itself
    return bool(equal * 2.0 ** (bits + _MARGIN) >= values.size * (tokens - 1))
