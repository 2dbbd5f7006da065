"""The RoPE rotations of a run of positions."""

from __future__ import annotations

import torch

from cuvee.codec.layout import KVLayout, Rope
from cuvee.codec.models.rope import cos_sin, turn
from cuvee.codec.support.arrays import F32


class Rotation:
    """cos and sin of a run of positions, computed once per distinct RoPE of a layout."""

    def __init__(self, layout: KVLayout, start: int, tokens: int, device: torch.device, inverse: bool = False) -> None:
        positions = torch.arange(start, start + tokens, dtype=torch.int64, device=device)
        self._tables: dict[Rope, tuple[torch.Tensor, torch.Tensor]] = {}
        self._arrays: dict[Rope, tuple[F32, F32]] = {}
        for rope in {layer.rope for layer in layout.layers}:
            if rope is None:
                continue
            cos, sin = cos_sin(rope, positions)
            if inverse:
                square = rope.attention_scaling**2
                cos, sin = cos / square, sin / -square
            self._tables[rope] = (cos[:, None], sin[:, None])
            if device.type == "cpu":
                self._arrays[rope] = cos.numpy(), sin.numpy()

    def tables(self, rope: Rope, at: slice) -> tuple[F32, F32]:
        """Return cos and sin `[t, rotary_dim / 2]` float32 of the tokens `at`, on the CPU."""
        cos, sin = self._arrays[rope]
        return cos[at], sin[at]

    def apply(self, keys: torch.Tensor, rope: Rope | None, at: slice) -> torch.Tensor:
        """Rotate the keys `[t, H, D]` of the tokens `at` of the run; return float32."""
        if rope is None:
            return keys.float()
        cos, sin = self._tables[rope]
        return turn(keys, rope, cos[at], sin[at])
