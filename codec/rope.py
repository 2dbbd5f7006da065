"""How a layer rotates its keys to positions, and back (RoFormer, arXiv:2104.09864; YaRN scaling, arXiv:2309.00071).

    k --rotate(p)--> cached key --unrotate(p)--> k --rotate(p')--> the key the model would cache at p'

All arithmetic is float32. Frequencies and angles are computed as transformers computes them, so that the tables agree
bit for bit on one device. A bfloat16 model rounds its cos and sin to bfloat16; these functions do not imitate that.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

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
        return {**asdict(self), "inv_freq": list(self.inv_freq)}

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


def cos_sin(rope: Rope, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, with `attention_scaling`, of int64 positions `[T]`: float32 `[T, rotary_dim / 2]`."""
    inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float32, device=positions.device)
    angles = positions[:, None].float() * inv_freq
    return angles.cos() * rope.attention_scaling, angles.sin() * rope.attention_scaling


def rotate(keys: torch.Tensor, rope: Rope | None, positions: torch.Tensor) -> torch.Tensor:
    """Rotate position-free keys `[T, H, D]` to positions `[T]`; return float32.

    Dimensions from `rotary_dim` on pass through unchanged, as do all without a rope.
    """
    if rope is None:
        return keys.float()
    cos, sin = cos_sin(rope, positions)
    return rotate_by_tables(keys, rope, cos[:, None], sin[:, None])


def unrotate(keys: torch.Tensor, rope: Rope | None, positions: torch.Tensor) -> torch.Tensor:
    """Rotate keys at `positions` to position-free keys: the inverse of `rotate`."""
    if rope is None:
        return keys.float()
    cos, sin = cos_sin(rope, positions)
    # cos and sin include the scaling s, so the transpose of the rotation is s^2 times its inverse.
    square = rope.attention_scaling**2
    return rotate_by_tables(keys, rope, cos[:, None] / square, sin[:, None] / -square)


def rotate_by_tables(keys: torch.Tensor, rope: Rope, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate keys `[T, H, D]` by tables that broadcast to `[T, H, rotary_dim / 2]`; return float32 `[T, H, D]`."""
    width = rope.rotary_dim
    rotated = keys[..., :width].float()
    if rope.interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated[..., : width // 2], rotated[..., width // 2 :]
    pair = (first * cos - second * sin, second * cos + first * sin)
    tail = [keys[..., width:].float()] if width < keys.shape[-1] else []
    if not rope.interleaved:
        return torch.cat([*pair, *tail], dim=-1)
    turned = torch.stack(pair, dim=-1).flatten(-2)
    return torch.cat([turned, *tail], dim=-1) if tail else turned
