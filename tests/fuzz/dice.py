"""What all generators of cases share: choices, odd numbers, and bytes that are no longer what they were."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")

# Around the edges of fields, and what signs, shifts and sums trip over.
ODD = (0, 1, 2, 3, 7, 8, 15, 16, 17, 127, 128, 129, 254, 255, 256, 0x7FFF, 0x8000, 0xFFFE, 0xFFFF, 0x10000)
ODD_WIDE = (*ODD, (1 << 24) - 1, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1)


class Dice:
    """Random choices of one case: the same ones for the same target, seed and number, on every machine.

    Attributes:
        mischief: whether `trick` is ever true: with one rule broken in every part, no case would get far.
    """

    def __init__(self, target: str, seed: int, number: int) -> None:
        self.mischief = True
        self.rng = np.random.default_rng([zlib.crc32(target.encode()), seed, number])

    def chance(self, share: float) -> bool:
        """True in so many of the cases."""
        return bool(self.rng.random() < share)

    def trick(self, share: float) -> bool:
        """True in so many of the cases in which a rule may be broken."""
        return self.mischief and self.chance(share)

    def number(self, low: int, high: int) -> int:
        """`low` … `high`, both included."""
        return int(self.rng.integers(low, high, endpoint=True))

    def pick(self, options: Sequence[T]) -> T:
        """One of them."""
        return options[int(self.rng.integers(len(options)))]

    def small(self, high: int) -> int:
        """1 … `high`, most often small."""
        return 1 + int((high - 1) * float(self.rng.random()) ** 3)

    def junk(self, length: int) -> bytes:
        """Random bytes."""
        return self.rng.bytes(length)

    def odd(self, width: int, near: int = 0) -> int:
        """An unsigned number of `width` bytes: of the edges, near `near`, or any."""
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
        """`data` after one to four changes: bytes set, cut out, put in, repeated, or taken from `others`."""
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
