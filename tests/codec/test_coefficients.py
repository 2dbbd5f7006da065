"""How many tokens share a stream: the same on every device, whose sums of floats have other orders."""

from __future__ import annotations

import numpy as np

from cuvee.codec.entropy.token_classes import CLASSES
from cuvee.codec.schemes.coefficients import streams_of_classes, tokens_per_stream


def spread(counts: list[int]) -> np.ndarray:
    return np.array([*counts, *[0] * (CLASSES - len(counts))])


def test_a_mean_of_planes_is_not_rounded_down_by_its_order() -> None:
    """Shares of 386 tokens times 512 planes add up to 512 or to less, depending on the order."""
    counts, planes = spread([80, 68, 81, 74, 83]), np.full(CLASSES, 512, np.int32)
    shares = counts / counts.sum()
    orders = {int(shares @ planes), int(shares[::-1] @ planes), int((shares * planes).sum()), int(sum(shares * planes))}
    assert 511 in orders, "this is the case that floats get wrong"
    assert streams_of_classes(counts, planes, np.full(CLASSES, 1e6)) == tokens_per_stream(512, 1e6) == 1
