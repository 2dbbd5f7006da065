"""`PartSizes`: what the parts of an engine's entries take, by which loads with a deadline are planned."""

from __future__ import annotations

import threading

from cuvee.codec.codec import Codec

# Bits per value and part to begin with, where the profile's curve does not reach.
_BITS, _LOSSLESS_BITS = 1.0, 11.0
_LEAST_WEIGHT = 1 / 16  # of the last entry in the mean size of a part


class PartSizes:
    """How many bytes the parts of this engine's entries take per token. Thread-safe.

    Args:
        codec: of this rank.
        values: of a token on this rank.
    """

    def __init__(self, codec: Codec, values: int) -> None:
        expected = [part.bits for part in codec.settings.expected_parts()]
        bits = [each for each in expected if each is not None]
        each = [high - low for low, high in zip([0.0, *bits], bits, strict=False)]
        if len(each) < len(expected) or min(each) <= 0:
            each = [_LOSSLESS_BITS if codec.lossless else _BITS] * len(expected)
        self._bytes = [one * values / 8 for one in each]
        self._observed = [0] * len(expected)
        self._lock = threading.Lock()

    def observe(self, tokens: int, number: int, nbytes: int) -> None:
        """Note the size of a part of an entry."""
        with self._lock:
            self._observed[number] += 1
            weight = max(1 / self._observed[number], _LEAST_WEIGHT)
            self._bytes[number] += weight * (nbytes / tokens - self._bytes[number])

    def expected(self, tokens: int, number: int) -> int:
        """Return the bytes to expect of a part of an entry."""
        with self._lock:
            return max(round(tokens * self._bytes[number]), 1)
