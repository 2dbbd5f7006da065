"""The groups of layers for which vLLM keeps tables of blocks of their own, and which of them are supported.

    full attention    one table, which names a block for every token
    sliding window    a table in which blocks before the window are `NULL_BLOCK`, once no token attends to them

A model whose layers are all alike has one group. In other models a block's number means other memory in every group.
With `--disable-hybrid-kv-cache-manager` vLLM keeps all tokens of a mixed model in one group; it does not where every
layer has the same window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cuvee.codec.errors import UnsupportedModelError

NULL_BLOCK = 0  # stands in the table of a group with a window for a block that the engine has dropped, or never had

_WINDOW = "SlidingWindowSpec"
_SUPPORTED = ("FullAttentionSpec", _WINDOW)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a table of blocks.

    Attributes:
        layers: their indices in the model.
        window: number of tokens before the next one that the engine keeps for them; None: all.
    """

    layers: tuple[int, ...]
    window: int | None = None


def read_groups(kv_cache_config: Any) -> tuple[tuple[LayerGroup, ...], list[Any]]:
    """Return the groups of layers of vLLM's `KVCacheConfig`, and the spec of each layer in the model's order.

    Raises:
        UnsupportedModelError: no layers, or layers that cache no plain keys and values, by name.
    """
    groups = kv_cache_config.kv_cache_groups
    by_group = [_specs_of(group) for group in groups]
    by_name = {name: spec for specs in by_group for name, spec in specs.items()}
    if not by_name:
        raise UnsupportedModelError("the model caches no keys and values: serve it without CuveeConnector")
    for spec in by_name.values():
        _check_kind(spec)
    order = {name: at for at, name in enumerate(sorted(by_name, key=_number_of))}
    made = []
    for specs in by_group:
        windows = [int(spec.sliding_window) for spec in specs.values() if _kind(spec) == _WINDOW]
        made.append(LayerGroup(tuple(sorted(order[name] for name in specs)), min(windows, default=None)))
    return tuple(made), [by_name[name] for name in order]


def block_tokens(specs: Sequence[Any]) -> int:
    """Return the tokens per block, which all layers must share.

    Raises:
        UnsupportedModelError: they do not.
    """
    sizes = sorted({int(spec.block_size) for spec in specs})
    if len(sizes) != 1:
        raise UnsupportedModelError(
            f"layers with blocks of different sizes ({', '.join(map(str, sizes))} tokens) are not supported: pass "
            "--disable-hybrid-kv-cache-manager to vLLM, which then gives all layers blocks of one size"
        )
    return sizes[0]


def _specs_of(group: Any) -> Mapping[str, Any]:
    """Return the specs of a group's layers by name: one for all, or each its own (`UniformTypeKVCacheSpecs`)."""
    each = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return dict.fromkeys(group.layer_names, group.kv_cache_spec) if each is None else each


def _kind(spec: Any) -> str:
    return type(spec).__name__


def _check_kind(spec: Any) -> None:
    kind = _kind(spec)
    if "MLA" in kind:
        raise UnsupportedModelError(f"multi-head latent attention (MLA) is not supported ({kind})")
    if kind == "MambaSpec":
        raise UnsupportedModelError(
            "recurrent layers (MambaSpec: Mamba, linear attention, hybrids with them) are not supported, because they "
            "keep a state instead of keys and values: serve this model without CuveeConnector"
        )
    if kind == "ChunkedLocalAttentionSpec":
        raise UnsupportedModelError(
            "layers with chunked attention that drop tokens (ChunkedLocalAttentionSpec) are not supported: pass "
            "--disable-hybrid-kv-cache-manager to vLLM"
        )
    if kind not in _SUPPORTED:
        raise UnsupportedModelError(
            f"layers that cache a {kind} are not supported (supported: {', '.join(_SUPPORTED)}): serve this model "
            "without CuveeConnector"
        )
    if getattr(spec, "non_causal", False):
        raise UnsupportedModelError("non-causal attention is not supported: a prefix cannot be reused")


def _number_of(name: str) -> int:
    """Return the number of a layer in its name, as vLLM's `extract_layer_index` does."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise UnsupportedModelError(f"{name}: must have one number in its name, so that the layers have an order")
    return numbers[0]
