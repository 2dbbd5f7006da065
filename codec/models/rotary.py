"""`Rope`: how a layer rotates its keys."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cuvee.codec.errors import InputError
from cuvee.codec.support.fields import check_keys, check_tuple, check_type, checked_list


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding of one layer (RoFormer, arXiv:2104.09864).

    Args:
        inv_freq: angle per position of each rotated pair (rad/token), finite, not negative: the model's own
            float32 values; other values are rounded to float32.
        attention_scaling: factor on cos and sin (YaRN, arXiv:2309.00071); the keys carry it once.
        interleaved: pairs are dimensions (2i, 2i+1), not (i, i + rotary_dim/2).

    Raises:
        InputError: an empty, negative or non-finite table, or a scaling that is not positive and finite.

    Example:
        >>> Rope(inv_freq=(1.0, 0.1, 0.01)).rotary_dim
        6
    """

    inv_freq: tuple[float, ...]
    attention_scaling: float = 1.0
    interleaved: bool = False

    def __post_init__(self) -> None:
        check_tuple("Rope.inv_freq", self.inv_freq, "frequency (rope=None says no RoPE)")
        object.__setattr__(self, "inv_freq", tuple(_float32(value) for value in self.inv_freq))
        object.__setattr__(self, "attention_scaling", _scaling(self.attention_scaling))
        check_type("Rope.interleaved", self.interleaved, bool)

    @property
    def rotary_dim(self) -> int:
        """Number of leading dimensions of a head that are rotated."""
        return 2 * len(self.inv_freq)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict; floats survive `json` exactly."""
        return {
            "inv_freq": list(self.inv_freq),
            "attention_scaling": self.attention_scaling,
            "interleaved": self.interleaved,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Rope:
        """Invert `to_dict`. Raise InputError for missing, unknown or ill-typed entries."""
        check_keys("Rope", data, required=("inv_freq",), optional=("attention_scaling", "interleaved"))
        return cls(**{**data, "inv_freq": tuple(checked_list("Rope.inv_freq", data["inv_freq"]))})


def _float32(value: Any) -> float:
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except (struct.error, OverflowError, TypeError) as error:
        raise InputError(f"Rope.inv_freq: must hold float32 numbers, got {value!r}") from error
    if isinstance(value, bool) or not math.isfinite(rounded) or rounded < 0:
        raise InputError(f"Rope.inv_freq: must hold finite numbers >= 0, got {value!r}")
    return rounded


def _scaling(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        raise InputError(f"Rope.attention_scaling: must be a finite number above 0, got {value!r}")
    return float(value)
