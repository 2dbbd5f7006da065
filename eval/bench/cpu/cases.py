"""The inputs of the CPU bench: synthetic caches, and profiles fitted to them.

The caches have a falling spectrum and layers that share directions, as real ones do. No model is needed; sizes are
reported elsewhere, on a real one.
"""

from __future__ import annotations

import torch

import cuvee
from cuvee.codec.chunk import KVChunk
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.rope import rotate
from cuvee.codec.profiles.profile import Profile
from cuvee.eval.bench.shapes import CacheShape

__all__ = ["BACKEND", "CPU_SHAPES", "FIT_CHUNK", "LARGE", "SMALL", "fit_profile", "make_chunk"]

BACKEND = "numba"
CPU_SHAPES = {
    "books-3m": CacheShape(6, 2, 64, 1e4),
    "llama-3.1-8b, 4 of 32 layers": CacheShape(4, 8, 128, 5e5),
}
SMALL, LARGE = CPU_SHAPES
FIT_CHUNK = 512


def make_chunk(layout: KVLayout, tokens: int, seed: int = 0) -> KVChunk:
    """A cache of correlated noise: all layers see the same few hidden directions, and each unit's spectrum falls."""
    noise = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 64, generator=noise) * torch.arange(1, 65).pow(-0.5)
    out: dict[str, list[torch.Tensor]] = {"keys": [], "values": []}
    for index, layer in enumerate(layout.layers):
        for kind, rope, size in (("keys", layer.rope, layer.head_dim), ("values", None, layer.value_dim)):
            fixed = torch.Generator().manual_seed(2 * index + (kind == "keys"))
            width = layer.kv_heads * size
            own = torch.randn(tokens, layer.kv_heads, size, generator=noise) * torch.arange(1, size + 1).pow(-0.8)
            mixed = own @ (torch.randn(layer.kv_heads, size, size, generator=fixed) / size**0.5)[0]
            shared = (hidden @ torch.randn(64, width, generator=fixed)).unflatten(1, (layer.kv_heads, size))
            x = mixed + 0.2 * shared + torch.randn(layer.kv_heads, size, generator=fixed)
            out[kind].append(rotate(x, rope, torch.arange(tokens)).to(layout.torch_dtype))
    return KVChunk(out["keys"], out["values"], layout)


def fit_profile(layout: KVLayout, group: str) -> Profile:
    """`cuvee.fit` on as many synthetic chunks as the group needs."""
    values = {"head": layout.layers[0].head_dim, "all": layout.values_per_token}
    largest = values.get(group, layout.values_per_token // layout.num_layers)
    count = max(8 * largest // FIT_CHUNK, 3) + 3
    return cuvee.fit(layout, (make_chunk(layout, FIT_CHUNK, 1000 + seed) for seed in range(count)), group)
