"""Rotate keys to positions and back (RoFormer, arXiv:2104.09864; YaRN scaling, arXiv:2309.00071).

    k --rotate(p)--> cached key --unrotate(p)--> k --rotate(p')--> the key the model would cache at p'

All arithmetic is float32. Frequencies and angles are computed as transformers computes them, so that the tables agree
bit for bit on one device. A bfloat16 model rounds its cos and sin to bfloat16; these functions do not imitate that.
"""

from __future__ import annotations

import torch

from cuvee.codec.errors import InputError
from cuvee.codec.models.dtypes import TORCH_DTYPES
from cuvee.codec.models.rotary import Rope


def cos_sin(rope: Rope, positions: torch.Tensor, limit: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute rotation tables, including `attention_scaling`.

    Args:
        rope: the layer's rotary embedding.
        positions: int64 [T]. Checking their range synchronizes with the device.
        limit: the model's number of positions (`KVLayout.max_positions`), or None.

    Returns:
        cos and sin, float32 [T, rotary_dim / 2], on the device of `positions`.

    Raises:
        InputError: the positions have the wrong shape or dtype, or are negative or not below `limit`.
    """
    _check_positions(positions, limit)
    inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float32, device=positions.device)
    angles = positions[:, None].float() * inv_freq
    return angles.cos() * rope.attention_scaling, angles.sin() * rope.attention_scaling


def rotate(keys: torch.Tensor, rope: Rope | None, positions: torch.Tensor, limit: int | None = None) -> torch.Tensor:
    """Rotate position-free keys to `positions`.

    Args:
        keys: bfloat16, float16 or float32 [T, H, D]. Dimensions from `rotary_dim` on pass through unchanged.
        rope: the layer's rotary embedding. None only converts to float32.
        positions: int64 [T], on the device of `keys`.
        limit: the model's number of positions, or None.

    Returns:
        float32 [T, H, D]; `keys` itself if it is float32 and `rope` is None.

    Raises:
        InputError: a shape, dtype or device is wrong, or a position is out of range.
    """
    _check_keys(keys, rope, positions)
    if rope is None:
        _check_positions(positions, limit)
        return keys.float()
    cos, sin = cos_sin(rope, positions, limit)
    return turn(keys, rope, cos[:, None], sin[:, None])


def unrotate(keys: torch.Tensor, rope: Rope | None, positions: torch.Tensor, limit: int | None = None) -> torch.Tensor:
    """Rotate keys at `positions` to position-free keys: the inverse of `rotate`, with the same arguments and errors."""
    _check_keys(keys, rope, positions)
    if rope is None:
        _check_positions(positions, limit)
        return keys.float()
    cos, sin = cos_sin(rope, positions, limit)
    # cos and sin include the scaling s, so the transpose of the rotation is s^2 times its inverse.
    square = rope.attention_scaling**2
    return turn(keys, rope, cos[:, None] / square, sin[:, None] / -square)


def turn(keys: torch.Tensor, rope: Rope, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
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


def _check_keys(keys: torch.Tensor, rope: Rope | None, positions: torch.Tensor) -> None:
    if keys.ndim != 3:
        raise InputError(f"keys: must have shape [T, H, D], got {list(keys.shape)}")
    if keys.dtype not in TORCH_DTYPES.values():
        raise InputError(f"keys: must be {', '.join(TORCH_DTYPES)}, got {keys.dtype}: convert them by value first")
    if rope is not None and rope.rotary_dim > keys.shape[-1]:
        raise InputError(f"keys: must have D of at least {rope.rotary_dim}, the rotary_dim, got {keys.shape[-1]}")
    if positions.shape != keys.shape[:1]:
        raise InputError(f"positions: must have shape [T] = [{keys.shape[0]}], got {list(positions.shape)}")
    if positions.device != keys.device:
        raise InputError(f"positions: must be on {keys.device} like the keys, got {positions.device}: move them")


def _check_positions(positions: torch.Tensor, limit: int | None) -> None:
    if positions.ndim != 1 or positions.dtype != torch.int64:
        raise InputError(f"positions: must be int64 [T], got {positions.dtype} {list(positions.shape)}")
    if positions.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.stack(torch.aminmax(positions)).tolist())
    if low < 0:
        raise InputError(f"positions: must be at least 0, got {low}")
    if limit is not None and high >= limit:
        raise InputError(f"positions: must be below {limit}, the positions of the model, got {high}")
