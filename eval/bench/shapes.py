"""The layout of a model's cache, by which the benches make caches without a model."""

from __future__ import annotations

from cuvee.codec.layout import KVLayout, LayerLayout, Rope

__all__ = ["llama_layout"]


def llama_layout(layers: int, heads: int, size: int, theta: float) -> KVLayout:
    """Return a layout in bfloat16 without a limit on positions.

    Args:
        layers: their number.
        heads: KV heads of each layer.
        size: dimensions of a head.
        theta: the base of RoPE's frequencies.
    """
    rope = Rope(tuple(theta ** (-2 * i / size) for i in range(size // 2)))
    return KVLayout("llama", (LayerLayout(heads, size, size, rope),) * layers, "bfloat16", None)
