"""The shape of a model's cache, by which the benches make caches without a model."""

from __future__ import annotations

from dataclasses import dataclass

from cuvee.codec.layout import KVLayout, LayerLayout, Rope

__all__ = ["CacheShape"]


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The shape of a model's cache.

    Attributes:
        layers: their number.
        heads: KV heads of each layer.
        size: dimensions of a head.
        theta: the base of RoPE's frequencies.
    """

    layers: int
    heads: int
    size: int
    theta: float

    def layout(self, layers: int | None = None) -> KVLayout:
        """Return the layout in bfloat16 without a limit on positions, with all layers or the given number."""
        rope = Rope(tuple(self.theta ** (-2 * i / self.size) for i in range(self.size // 2)))
        layer = LayerLayout(self.heads, self.size, self.size, rope)
        return KVLayout("llama", (layer,) * (layers or self.layers), "bfloat16", None)
