"""What adapters refuse: features of an engine, and models whose layers have caches of several shapes."""

from __future__ import annotations

from collections.abc import Mapping

from cuvee.codec.errors import UnsupportedModelError
from cuvee.codec.layout import KVLayout


def check_uniform(layout: KVLayout) -> None:
    """Refuse a model whose layers' caches differ in shape, where an engine's memory holds one shape for all.

    Raises:
        UnsupportedModelError: layers with other heads than the first, or values of another size than keys.
    """
    first = layout.layers[0]
    for index, layer in enumerate(layout.layers):
        heads = layer.kv_heads, layer.head_dim, layer.value_dim
        if heads != (first.kv_heads, first.head_dim, first.head_dim):
            raise UnsupportedModelError(
                f"model: must have {first.kv_heads} heads of {first.head_dim} numbers for keys and for values in every "
                f"layer, got {heads[0]} of {heads[1]} and {heads[2]} in layer {index}"
            )


def refuse(refused: Mapping[str, bool], message: str) -> None:
    """Refuse the first feature that is there, by its name, which replaces {} in the message.

    Raises:
        UnsupportedModelError: there is one.
    """
    for name, there in refused.items():
        if there:
            raise UnsupportedModelError(message.format(name))
