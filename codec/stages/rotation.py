"""The RoPE rotations of a run of positions."""

from __future__ import annotations

import torch

from cuvee.codec.layout import Rope
from cuvee.codec.rope import cos_sin, rotate_by_tables
from cuvee.codec.support.arrays import F32


class Rotation:
    """cos and sin of a run of positions, computed once per distinct RoPE, when they are first asked for.

    Threads share it. If two of them compute the same tables, the first result wins.
    """

    def __init__(self, start: int, tokens: int, device: torch.device, inverse: bool = False) -> None:
        self._run, self._device, self._inverse = range(start, start + tokens), device, inverse
        self._tensors: dict[Rope, tuple[torch.Tensor, torch.Tensor]] = {}
        self._arrays: dict[Rope, tuple[F32, F32]] = {}

    def _tables(self, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin `[t, rotary_dim / 2]` of the whole run."""
        tables = self._tensors.get(rope)
        if tables is None:
            positions = torch.arange(self._run.start, self._run.stop, dtype=torch.int64, device=self._device)
            cos, sin = cos_sin(rope, positions)
            if self._inverse:
                square = rope.attention_scaling**2
                cos, sin = cos / square, sin / -square
            tables = self._tensors.setdefault(rope, (cos, sin))
        return tables

    def tables(self, rope: Rope, at: slice) -> tuple[F32, F32]:
        """Return cos and sin `[t, rotary_dim / 2]` float32 of the tokens `at`, on the CPU."""
        tables = self._arrays.get(rope)
        if tables is None:
            cos, sin = self._tables(rope)
            tables = self._arrays.setdefault(rope, (cos.numpy(), sin.numpy()))
        return tables[0][at], tables[1][at]

    def apply(self, keys: torch.Tensor, rope: Rope | None, at: slice) -> torch.Tensor:
        """Rotate the keys `[t, H, D]` of the tokens `at` of the run; return float32."""
        if rope is None:
            return keys.float()
        cos, sin = self._tables(rope)
        return rotate_by_tables(keys, rope, cos[at, None], sin[at, None])
