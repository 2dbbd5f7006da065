"""Random choices for generators of cases: picks, odd numbers, and damaged bytes."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")

# Values around the limits of fields, and values at which signs, shifts and sums may fail.
ODD = (0, 1, 2, 3, 7, 8, 15, 16, 17, 127, 128, 129, 254, 255, 256, 0x7FFF, 0x8000, 0xFFFE, 0xFFFF, 0x10000)
ODD_WIDE = (*ODD, (1 << 24) - 1, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1)


class Dice:
    """The random choices of one case, which depend only on its target, seed and number.

    Attributes:
        mischief: whether `trick` may return True. If every part broke a rule, most cases would fail early.
    """

    def __init__(self, target: str, seed: int, number: int) -> None:
        self.mischief = True
        self.rng = np.random.default_rng([zlib.crc32(target.encode()), seed, number])

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def trick(self, share: float) -> bool:
        """Return True with probability `share` if this case may break rules."""
        return self.mischief and self.chance(share)

    def number(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high, endpoint=True))

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self.rng.integers(len(options)))]

    def small(self, high: int) -> int:
        """Return a number from 1 to `high`, mostly small."""
        return 1 + int((high - 1) * float(self.rng.random()) ** 3)

    def junk(self, length: int) -> bytes:
        return self.rng.bytes(length)

    def odd(self, width: int, near: int = 0) -> int:
        """Return an unsigned number of `width` bytes: a limit, a number near `near`, or any number."""
        kind = self.number(0, 3)
        if kind == 0:
            value = near + self.number(-3, 3)
        elif kind == 1:
            value = near ^ (1 << self.number(0, 8 * width - 1))
        elif kind == 2:
            value = int.from_bytes(self.junk(width), "little")
        else:
            value = self.pick(ODD_WIDE)
        return value & ((1 << 8 * width) - 1)

    def damaged(self, data: bytes, others: Sequence[bytes] = ()) -> bytes:
        """Return `data` after one to four changes: bytes set, removed, inserted, repeated, or taken from `others`."""
        out = bytearray(data)
        for _ in range(self.small(4)):
            at = self.number(0, max(len(out) - 1, 0))
            kind = self.number(0, 9)
            if kind <= 3 and out:
                out[at] = out[at] ^ (1 << self.number(0, 7)) if kind < 2 else self.odd(1, out[at])
            elif kind == 4 and len(out) - at >= 4:
                out[at : at + 4] = self.odd(4, int.from_bytes(out[at : at + 4], "little")).to_bytes(4, "little")
            elif kind == 5:
                del out[at : at + self.small(64)]
            elif kind == 6:
                out[at:at] = self.junk(self.small(64)) if self.chance(0.5) else bytes(self.small(64))
            elif kind == 7:
                out[at:at] = out[at : at + self.small(64)]
            elif kind == 8 and others:
                other = self.pick(others)
                first = self.number(0, max(len(other) - 1, 0))
                run = self.small(256)
                out[at : at + run] = other[first : first + run]
            else:
                del out[at:]
                out += self.junk(self.number(0, 16))
        return bytes(out)
