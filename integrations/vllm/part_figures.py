"""`PartFigures`: what the parts of an engine's entries take, and what they lose."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from cuvee.codec.codec import Codec
from cuvee.integrations.loading import ChunkParts, Part

# Bits per value and part to begin with, where the profile's curve does not reach.
_BITS = 1.0
_LOSSLESS_BITS = 11.0
_LEAST_WEIGHT = 1 / 16  # of the last entry in the mean size of a part
_UNCERTAIN_KL = 4.0  # times as much as with the next part, where no KL was measured
_LEAST_GAIN = 0.99  # a part lowers the KL to this share at least, whatever the curve says


class PartFigures:
    """What parts of this engine's entries take and lose. Thread-safe.

    Args:
        codec: of this rank.
        values: of a token on this rank.
        worst: the KL is that of the worst kind of text.

    Attributes:
        known: whether the profile's curve measures the KL of all parts.
    """

    def __init__(self, codec: Codec, values: int, worst: bool) -> None:
        expected = codec.settings.expected_parts(worst)
        kls = [part.kl for part in expected if part.kl is not None]
        self.known = len(kls) == len(expected)
        finest = len(expected) - 1
        self._kls = kls if self.known else [_UNCERTAIN_KL ** (finest - at) for at in range(finest + 1)]
        for at in range(1, finest + 1):
            self._kls[at] = min(self._kls[at], _LEAST_GAIN * self._kls[at - 1])
        bits = [part.bits for part in expected if part.bits is not None]
        each = [high - low for low, high in zip([0.0, *bits], bits, strict=False)]
        if len(each) < len(expected) or min(each) <= 0:
            each = [_LOSSLESS_BITS if codec.lossless else _BITS] * len(expected)
        self._bytes = [one * values / 8 for one in each]  # per token
        self._observed = [0] * len(expected)
        self._lock = threading.Lock()

    def observe(self, tokens: int, number: int, nbytes: int) -> None:
        """Note the size of a part of an entry."""
        with self._lock:
            self._observed[number] += 1
            weight = max(1 / self._observed[number], _LEAST_WEIGHT)
            self._bytes[number] += weight * (nbytes / tokens - self._bytes[number])

    def mean_kl(self, tokens: Sequence[int], parts: Sequence[int]) -> float | None:
        """Return the nats per token to expect of entries in the mean over their tokens; None: it was not measured.

        Args:
            tokens: of each entry.
            parts: of how many parts each of the first entries is; those behind them are computed.
        """
        if not self.known or not tokens:
            return None
        return sum(own * self._kls[count - 1] for own, count in zip(tokens, parts, strict=False)) / sum(tokens)

    def expected(self, tokens: int, tiers: Sequence[str]) -> ChunkParts:
        """Return what to expect of the parts of an entry, the first of which lies in the first of the tiers."""
        with self._lock:
            sizes = [max(round(tokens * own), 1) for own in self._bytes]
        return ChunkParts(
            tokens,
            tuple(Part(size, kl, tier) for size, kl, tier in zip(sizes, self._kls, tiers, strict=True)),
        )
