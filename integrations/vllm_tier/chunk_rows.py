"""vLLM's offloaded chunks: in its canonical layout a `PagedCache`, otherwise opaque pages. Views, no copies.

    row c of the primary tier   [layer 0 | layer 1 | ... | unused]
    a layer                     [block 0 | block 1 | ...]            the blocks of the chunk
    a block, v1-nhd             [tokens, heads, 2 * dim]             a head's keys, then its values
    a block, v1-hnd             [heads, tokens, 2 * dim]

The row holds the heads of all tensor-parallel ranks in order, so entries do not depend on how many there are. vLLM
names the format, and promises another name if it changes. Of other rows nothing is known but their bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cuvee.codec.dtypes import TORCH_DTYPES
from cuvee.codec.errors import UnsupportedModelError
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import PagedCache
from cuvee.integrations.core.refusals import refuse
from cuvee.integrations.pages import OpaquePage

FORMATS = {"v1-nhd": False, "v1-hnd": True}  # vLLM's names of canonical formats, and whether heads precede tokens


@dataclass(frozen=True, slots=True)
class RowShape:
    """The arrangement of a chunk's values in its row.

    Attributes:
        block_tokens: tokens per block of the engine.
        blocks: blocks per chunk.
        heads_first: whether heads come before tokens in a block.
        places: of each layer of the model, in order: its place among the layers of the row.
    """

    block_tokens: int
    blocks: int
    heads_first: bool
    places: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens per chunk."""
        return self.block_tokens * self.blocks


class ChunkRows:
    """All rows of the primary tier as one cache.

    Args:
        memory: `[rows, row]` of the layout's dtype, contiguous; not copied.
        layout: of the whole model, with one shape for all layers.
        shape: of a row.

    Attributes:
        cache: keys and values of all chunks.
        tokens: per chunk.

    Raises:
        UnsupportedModelError: rows that are too short for a chunk.

    Example:
        >>> from cuvee.codec.layout import LayerLayout
        >>> layout = KVLayout("mine", (LayerLayout(2, 8, 8, None),) * 3, "float32", max_positions=None)
        >>> rows = ChunkRows(torch.zeros(5, 4096), layout, RowShape(16, 2, False, (0, 1, 2)))
        >>> rows.slots([4]).shape, rows.cache.keys[0].shape
        (torch.Size([32]), torch.Size([5, 32, 2, 8]))
    """

    def __init__(self, memory: torch.Tensor, layout: KVLayout, shape: RowShape) -> None:
        rows, row = memory.shape
        heads, dim = layout.layers[0].kv_heads, layout.layers[0].head_dim
        page = shape.block_tokens * heads * 2 * dim
        if row < layout.num_layers * shape.blocks * page:
            raise UnsupportedModelError(
                f"chunk: must have at least {layout.num_layers * shape.blocks * page} numbers, as the model's "
                f"configuration says, got {row}"
            )
        self._shape, self._rows, self.tokens = shape, rows, shape.tokens
        # The blocks of a chunk follow each other. With tokens first, so do their tokens, and a chunk is one block.
        # With heads first they do not: then blocks of the cache overlap, and begin wherever a block of a chunk may.
        split = shape.heads_first and shape.blocks > 1
        tokens = shape.block_tokens if split else shape.tokens
        self._step = math.gcd(row, page) if split else row
        self._row, self._page = row, page if split else 0
        last = (rows - 1) * row + (shape.blocks - 1) * self._page
        size = last // self._step + 1, tokens, heads, dim
        within = (2 * dim, tokens * 2 * dim, 1) if shape.heads_first else (heads * 2 * dim, 2 * dim, 1)
        flat, stride = memory.view(-1), (self._step, *within)
        first = [place * shape.blocks * page for place in shape.places]
        self.cache = PagedCache(
            layout,
            [flat.as_strided(size, stride, flat.storage_offset() + at) for at in first],
            [flat.as_strided(size, stride, flat.storage_offset() + at + dim) for at in first],
        )

    def slots(self, rows: Any) -> torch.Tensor:
        """Return the slots of the tokens of some chunks, int64 `[chunks * tokens]`.

        Args:
            rows: of the chunks, whole numbers.

        Raises:
            UnsupportedModelError: a row that is not there.
        """
        row = torch.as_tensor(rows, dtype=torch.int64)
        if len(row) and not 0 <= int(row.min()) <= int(row.max()) < self._rows:
            raise UnsupportedModelError(f"chunk: must be in a row 0 … {self._rows - 1}, got {row.tolist()}")
        tokens = self.cache.keys[0].shape[1]
        blocks = torch.arange(self._shape.tokens // tokens) * self._page
        block = (row[:, None] * self._row + blocks) // self._step
        return (block[..., None] * tokens + torch.arange(tokens)).flatten()


def row_memory(view: memoryview, layout: KVLayout) -> torch.Tensor:
    """Return vLLM's view of the primary tier, `(rows, bytes)`, as `[rows, row]` of the layout's dtype; not copied."""
    return torch.from_numpy(np.asarray(view)).view(layout.torch_dtype)


def cache_dtype(config: Any) -> torch.dtype:
    """Return the dtype of the engine's cache, from vLLM's `OffloadingConfig`.

    Raises:
        UnsupportedModelError: a quantized cache, or any other dtype.
    """
    name = str(config.model.dtype)
    if name not in TORCH_DTYPES:
        raise UnsupportedModelError(
            f"CuveeTier codes keys and values of {', '.join(TORCH_DTYPES)} only, got a KV cache of {name} "
            "(kv_cache_dtype)"
        )
    return TORCH_DTYPES[name]


def row_shape(config: Any, layout: KVLayout, row_bytes: int) -> RowShape:
    """Return the shape of a chunk's row.

    Args:
        config: vLLM's `OffloadingConfig`.
        layout: of the whole model, with one shape for all layers.
        row_bytes: size of a row.

    Raises:
        UnsupportedModelError: a feature of the engine, or a model, whose chunks are not supported.
    """
    parallel, groups = config.parallel, config.groups
    features = {
        "chunks in the layout of the workers: set \"canonical_layout\": true beside \"secondary_tiers\"": (
            not config.canonical_layout
        ),
        f"{len(groups)} groups of layers (sliding windows of their own, Mamba, hybrids)": len(groups) != 1,
        "multi-head latent attention (MLA)": config.replicated_layout,
        f"pipeline parallelism (pipeline_parallel_size={parallel.pp_size})": parallel.pp_size > 1,
        "context parallelism": max(parallel.dcp_size, parallel.pcp_size) > 1,
        f"{parallel.world_size} workers of which {parallel.tp_size} are tensor-parallel": (
            parallel.world_size != parallel.tp_size
        ),
        "chunks whose bytes depend on the number of ranks": not parallel.is_parallelism_agnostic,
        f"vLLM's format {_format(config)} (set VLLM_KV_CACHE_LAYOUT to LBNHC)": _format(config) not in FORMATS,
    }  # fmt: skip
    refuse(features, "CuveeTier does not know the order of keys and values with {}")
    (group,) = groups
    places = _places(group.layer_names, layout.num_layers)
    shape = RowShape(group.tokens_per_block, config.cache.blocks_per_chunk, FORMATS[_format(config)], places)
    heads = layout.layers[0].kv_heads
    own = max(1, heads // parallel.tp_size)
    expected = shape.block_tokens * layout.bytes_per_token * own // heads
    if config.worker_kv_bytes_per_block != expected:
        raise UnsupportedModelError(
            f"block: must have {expected} bytes on each of {parallel.tp_size} ranks, as the model's configuration "
            f"says, got {config.worker_kv_bytes_per_block}: MLA, draft layers and padded or quantized caches are not "
            "supported"
        )
    if row_bytes % layout.torch_dtype.itemsize or row_bytes < shape.tokens * layout.bytes_per_token:
        raise UnsupportedModelError(
            f"chunk: must have at least {shape.tokens * layout.bytes_per_token} bytes, got {row_bytes}"
        )
    return shape


def _places(names: tuple[str, ...], layers: int) -> tuple[int, ...]:
    """Return the place of each layer of the model among vLLM's names of layers, which hold its number."""
    found = [re.search(r"\.(\d+)\.", name) for name in names]
    numbers = [int(each[1]) for each in found if each is not None]
    if sorted(numbers) != list(range(layers)):
        raise UnsupportedModelError(
            f"the engine offloads {len(names)} layers, the model has {layers}: layers that share a cache, or draft "
            f"layers, are not supported (got {', '.join(names[:3])}, …)"
        )
    return tuple(numbers.index(layer) for layer in range(layers))


def _format(config: Any) -> str:
    """Return vLLM's name of the order of bytes in a row; without one, they are as the workers have them."""
    if not config.canonical_layout or config.kv_cache_layout is None:
        return "none"
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import canonical_format_id

    return str(canonical_format_id(config.kv_cache_layout))


class OpaqueRows:
    """All rows of the primary tier as opaque pages.

    A row holds what one group of layers has in a chunk. Bytes that this group does not use are what they were, as in
    vLLM's own tiers.

    Args:
        spec: vLLM's `TieringOffloadingSpec`.
        view: memory of the primary tier, `(rows, bytes)`.
        caches: vLLM's `KVCacheConfig`, which tells what the groups are; None: not known.

    Attributes:
        description: all that determines the bytes of a chunk besides weights and tokens.
        tokens: per chunk; of the largest group.
    """

    def __init__(self, spec: Any, view: memoryview, caches: Any) -> None:
        config = spec.config
        parallel, blocks = config.parallel, config.cache.blocks_per_chunk
        copies = 1 if spec.replicated_layout else parallel.world_size
        used = config.worker_kv_bytes_per_block * blocks * copies
        self._memory = torch.from_numpy(np.asarray(view))[:, :used]
        self._groups = {group.group_id: _kind(config, group, caches) for group in config.groups}
        self.tokens = max(group.tokens_per_block for group in config.groups) * blocks
        self.description = repr(
            (
                _format(config), config.kv_cache_layout, config.model.dtype, used, copies, blocks,
                parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size, parallel.world_size,
                [(group.group_id, group.tokens_per_block, tuple(group.layer_names)) for group in config.groups],
                sorted((number, kind, str(dtype)) for number, (kind, dtype) in self._groups.items()),
                None if caches is None else [repr(group.kv_cache_spec) for group in caches.kv_cache_groups],
            )
        )  # fmt: skip

    def pages(self, keys: Sequence[bytes], rows: Any) -> list[OpaquePage]:
        """Return the pages of some chunks.

        Args:
            keys: vLLM's, which tell the group of layers.
            rows: of the chunks, whole numbers.

        Raises:
            UnsupportedModelError: a row that is not there.
        """
        from vllm.v1.kv_offload.base import get_offload_group_idx

        found = []
        for key, row in zip(keys, rows, strict=True):
            if not 0 <= row < len(self._memory):
                raise UnsupportedModelError(f"chunk: must be in a row 0 … {len(self._memory) - 1}, got {row}")
            kind, dtype = self._groups[get_offload_group_idx(key)]
            found.append(OpaquePage(kind, [self._memory[int(row)].view(dtype)]))
        return found


def _kind(config: Any, group: Any, caches: Any) -> tuple[str, torch.dtype]:
    """Return what vLLM calls a group of layers, and a dtype with the size of most of its elements."""
    spec: Any = None if caches is None else caches.kv_cache_groups[group.group_id].kv_cache_spec
    while hasattr(spec, "kv_cache_specs"):  # of layers that differ
        spec = next(iter(spec.kv_cache_specs.values()))
    dtypes = getattr(spec, "dtypes", None) or [getattr(spec, "dtype", TORCH_DTYPES.get(config.model.dtype, torch.int8))]
    size = dtypes[-1].itemsize  # of states the last is the largest
    aligned = config.worker_kv_bytes_per_block % size == 0
    return type(spec).__name__ if spec else config.model.dtype, dtypes[-1] if aligned else torch.int8
