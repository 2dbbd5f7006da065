"""Small models with multi-head latent attention, as engines keep their caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.forward import prefill


class Latents:
    def __init__(self, model: Any, folder: Path) -> None:
        self.model, self.path = model, str(folder / "model")
        model.save_pretrained(self.path)
        self.layout = KVLayout.from_config(model.config, "bfloat16")
        layer = self.layout.layers[0]
        self.latent, self.rotated = layer.value_dim, layer.head_dim
        assert layer.rope is not None
        self.rope, self.adjacent = layer.rope, getattr(model.config, "rope_interleave", True)

    def chunk(self) -> KVChunk:
        """The model's own cache of 64 tokens."""
        ids = torch.randint(61, (1, 64), generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            (chunk,) = prefill(self.model, ids, self.layout)
        return chunk

    def as_engines_keep_it(self, chunk: KVChunk, layer: int) -> torch.Tensor:
        """Latent and rotated part of a layer, `[T, 1, latent + rotated]`."""
        keys = chunk.keys[layer]
        if self.adjacent and not self.rope.interleaved:
            keys = keys.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        return torch.cat([chunk.values[layer], keys], -1)
