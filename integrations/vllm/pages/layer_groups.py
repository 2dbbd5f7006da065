"""The layers that vLLM caches, in the model's order, and the groups for which it keeps tables of blocks of their own.

    full attention    one table, which names a block for every token
    latents (MLA)     the same: a token's page holds its latent and the rotated part of its keys
    sliding window    a table in which blocks before the window are `NULL_BLOCK`, once no token attends to them
    chunked           the same, with a window that begins anew at each multiple of its length
    recurrent         a table in which block i is the state after (i + 1) blocks of tokens, or `NULL_BLOCK` where the
                      engine has not kept that: it keeps states where its steps end (`mamba_cache_mode` "align")

A model whose layers are all alike has one group. In other models a block's number means other memory in every group.
With `--disable-hybrid-kv-cache-manager` vLLM keeps all tokens of a mixed model in one group; it does not where every
layer has the same window.

Layers of a drafter (EAGLE, MTP, draft models) are in vLLM's groups, too: see `draft_layers`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cuvee.codec.errors import UnsupportedModelError

NULL_BLOCK = 0  # stands in the table of a group with a window for a block that the engine has dropped, or never had

_FULL, _WINDOW, _LATENT = "FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec"
_CHUNKED, _RECURRENT = "ChunkedLocalAttentionSpec", "MambaSpec"
_SUPPORTED = (_FULL, _WINDOW, _CHUNKED, _LATENT)
_INDEXER = ".indexer."  # in names of the keys by which sparse attention chooses latents (DeepSeek V3.2, GLM-5)
_DRAFT = "draft_model."  # vLLM's prefix of the layers of a draft model that numbers its layers from 0


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a table of blocks.

    Attributes:
        layers: their indices among the cached layers of this process.
        window: most tokens before the next one that the engine keeps for them; None: all.
        chunked: whether it drops all of them at each multiple of `window`.
        block: tokens of their blocks; None: as many as the scheduler's, which are whole blocks of every group.
        recurrent: whether they keep a state in place of tokens. `layers` is empty then.
    """

    layers: tuple[int, ...]
    window: int | None = None
    chunked: bool = False
    block: int | None = None
    recurrent: bool = False


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """A layer that keeps a state in place of tokens.

    Attributes:
        name: in vLLM.
        group: number of its group.
        shapes, dtypes: of the tensors of one state.
    """

    name: str
    group: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one state."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))


@dataclass(frozen=True, slots=True)
class CachedLayers:
    """The layers that a process of vLLM caches and cuvee stores.

    Attributes:
        names: in the model's order.
        specs: vLLM's description of each layer's pages.
        groups: all of vLLM's, in its order; one that holds draft layers alone has no layers.
        recurrent: layers that keep states, in the model's order.
        block: fewest tokens that are whole blocks of every layer.
    """

    names: tuple[str, ...]
    specs: tuple[Any, ...]
    groups: tuple[LayerGroup, ...]
    recurrent: tuple[RecurrentLayer, ...]
    block: int


def read_layers(kv_cache_config: Any, model_layers: int | None = None, drafts: bool = False) -> CachedLayers:
    """Read vLLM's `KVCacheConfig`.

    Args:
        kv_cache_config: vLLM's.
        model_layers: number of layers of the model, if it has a drafter, whose layers have numbers behind these.
        drafts: read the drafter's layers, of which there may be none, in place of the model's.

    Raises:
        UnsupportedModelError: no layers, or layers that cache no plain keys and values, by name.
    """
    by_group = [
        {name: spec for name, spec in _specs_of(group).items() if is_draft(name, model_layers) is drafts}
        for group in kv_cache_config.kv_cache_groups
    ]
    every = {name: spec for specs in by_group for name, spec in specs.items()}
    for name, spec in every.items():
        _check_kind(name, spec)
    by_name = {name: spec for name, spec in every.items() if _kind(spec) != _RECURRENT}
    if not by_name and not drafts:
        raise UnsupportedModelError("the model caches no keys and values: serve it without CuveeConnector")
    names = tuple(sorted(by_name, key=lambda name: (_number_of(name), name)))
    order = {name: at for at, name in enumerate(names)}
    groups = []
    common = block_tokens(list(every.values()))
    for group, specs in zip(kv_cache_config.kv_cache_groups, by_group, strict=True):
        kept = specs or _specs_of(group)
        layers = tuple(sorted(order[name] for name in specs if name in order))
        recurrent = any(_kind(spec) == _RECURRENT for spec in kept.values())
        windows = [int(spec.sliding_window) for spec in kept.values() if _kind(spec) == _WINDOW]
        chunks = [int(spec.attention_chunk_size) for spec in kept.values() if _kind(spec) == _CHUNKED]
        window = min(windows + chunks, default=None)
        block = block_tokens(list(kept.values())) if kept else common
        groups.append(LayerGroup(layers, window, bool(chunks), None if block == common else block, recurrent))
    states = tuple(
        RecurrentLayer(name, number, tuple(map(tuple, specs[name].shapes)), tuple(specs[name].dtypes))
        for number, specs in enumerate(by_group)
        for name in specs
        if name not in order
    )
    states = tuple(sorted(states, key=lambda layer: (_number_of(layer.name), layer.name)))
    return CachedLayers(names, tuple(by_name[name] for name in names), tuple(groups), states, common)


def block_tokens(specs: Sequence[Any]) -> int:
    """Return the fewest tokens that are whole blocks of every layer: larger heads have shorter blocks."""
    return math.lcm(*(int(spec.block_size) for spec in specs))


def is_latent(spec: Any) -> bool:
    """Return whether a layer's pages hold latents (MLA)."""
    return _kind(spec) == _LATENT


def all_latent(kv_cache_config: Any) -> bool:
    """Return whether all layers that vLLM caches, a drafter's among them, hold latents (MLA), which ranks replicate."""
    return all(is_latent(spec) for group in kv_cache_config.kv_cache_groups for spec in _specs_of(group).values())


def _specs_of(group: Any) -> Mapping[str, Any]:
    """Return the specs of a group's layers by name: one for all, or each its own (`UniformTypeKVCacheSpecs`)."""
    each = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return dict.fromkeys(group.layer_names, group.kv_cache_spec) if each is None else each


def _kind(spec: Any) -> str:
    return type(spec).__name__


def is_draft(name: str, model_layers: int | None) -> bool:
    """Return whether a layer is a drafter's: vLLM numbers these behind the model's, or prefixes their names."""
    return model_layers is not None and (name.startswith(_DRAFT) or _number_of(name) >= model_layers)


def _check_kind(name: str, spec: Any) -> None:
    kind = _kind(spec)
    if _INDEXER in name:
        raise UnsupportedModelError(
            f"{name}: sparse attention with an indexer is not supported: serve this model without CuveeConnector"
        )
    if kind == _RECURRENT:
        mode = getattr(spec, "mamba_cache_mode", "none")
        if mode != "align":
            raise UnsupportedModelError(
                f"recurrent layers (Mamba, linear attention, hybrids with them) with mamba_cache_mode={mode!r} are not "
                "supported, because the engine keeps no state where blocks end: pass --enable-prefix-caching to vLLM, "
                "and no --mamba-cache-mode but align"
            )
        return
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
