"""vLLM's offloaded chunks in its canonical layout, as a `PagedCache`: views, no copies.

    row c of the primary tier   [layer 0 | layer 1 | ... | unused]
    a layer                     [block 0 | block 1 | ...]            the blocks of the chunk
    a block, LBNHC              [tokens, heads, 2 * dim]             a head's keys, then its values
    a block, LBHNC              [heads, tokens, 2 * dim]

The row holds the heads of all tensor-parallel ranks in order, so entries do not depend on how many there are. That this
is so in the running version is checked by vLLM's own mapping from the ranks' pages to the row (`check_mapping`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from cuvee.codec.dtypes import TORCH_DTYPES
from cuvee.codec.errors import UnsupportedModelError
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import PagedCache
from cuvee.integrations.core.refusals import refuse

LAYOUTS = {"LBNHC": False, "LBHNC": True}  # names of vLLM's `KVCacheLayout`, and whether heads come before tokens


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
        self._shape, self._rows = shape, rows
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
            f"CuveeTier does not support a KV cache of {name} (use kv_cache_dtype 'auto', and a model in "
            f"{', '.join(TORCH_DTYPES)})"
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
        f"the KV cache layout {config.kv_cache_layout} (set VLLM_KV_CACHE_LAYOUT to {' or '.join(LAYOUTS)})": (
            config.kv_cache_layout not in LAYOUTS
        ),
    }  # fmt: skip
    refuse(features, "CuveeTier does not support {}")
    (group,) = groups
    places = _places(group.layer_names, layout.num_layers)
    shape = RowShape(group.tokens_per_block, config.cache.blocks_per_chunk, LAYOUTS[config.kv_cache_layout], places)
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


def check_mapping(layout: KVLayout, shape: RowShape, ranks: int, kv_cache_layout: str) -> None:
    """Compare the views with vLLM's own mapping from the blocks of all ranks to a canonical block.

    Each number of a block is replaced by a number of its own, on every rank, and brought to the canonical block by the
    runs that vLLM's workers copy. The views must find it there.

    Args:
        layout: of the whole model, with one shape for all layers.
        shape: of a row.
        ranks: tensor-parallel size.
        kv_cache_layout: name of vLLM's `KVCacheLayout`.

    Raises:
        UnsupportedModelError: another version of vLLM arranges blocks in another way, or does not map them.
    """
    layer = layout.layers[0]
    heads, tokens, dim = layer.kv_heads, shape.block_tokens, layer.head_dim
    numbers = torch.arange(heads * tokens * 2 * dim, dtype=torch.int32).view(heads, tokens, 2 * dim)
    block = torch.full((1, numbers.numel()), -1, dtype=torch.int32)
    try:
        for rank in range(ranks):
            _copy_rank(numbers, block[0], layout, rank, ranks, kv_cache_layout)
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        ImportError,
        LookupError,
        RuntimeError,
        TypeError,
    ) as error:
        raise UnsupportedModelError(
            f"this version of vLLM does not map blocks to its canonical layout as 0.32 does: {error!r}"
        ) from error
    # Bits of float32, which a cache may hold. Numbers stay what they are, because nothing computes with them.
    single = KVLayout(layout.model_type, layout.layers[:1], "float32", layout.max_positions)
    one_block = RowShape(tokens, 1, shape.heads_first, (0,))
    cache = ChunkRows(block.view(torch.float32), single, one_block).cache
    for name, view, part in (("keys", cache.keys, numbers[..., :dim]), ("values", cache.values, numbers[..., dim:])):
        if not torch.equal(view[0][0].view(torch.int32), part.transpose(0, 1)):
            raise UnsupportedModelError(
                f"this version of vLLM has {name} elsewhere in a canonical block of {kv_cache_layout} than 0.32 has"
            )


def _copy_rank(
    numbers: torch.Tensor, block: torch.Tensor, layout: KVLayout, rank: int, ranks: int, kv_cache_layout: str
) -> None:
    """Copy a rank's part of a block to the canonical block, as the worker of that rank does.

    Args:
        numbers: int32 `[heads, tokens, 2 * dim]`, of all ranks.
        block: int32 `[heads * tokens * 2 * dim]`, the canonical block, written.
        layout: of the whole model.
        rank: tensor-parallel rank.
        ranks: tensor-parallel size.
        kv_cache_layout: name of vLLM's `KVCacheLayout`.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import derive_canonical_mappings
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_layout import KVCacheLayout

    heads, tokens, content = numbers.shape
    own = max(1, heads // ranks)
    first = rank * heads // ranks
    # Of a layer of one block, with logical dimensions [blocks, heads, tokens, content].
    order = KVCacheLayout[kv_cache_layout].layer_view_order
    page = numbers[None, first : first + own].permute(order).contiguous()
    inverse = [order.index(dimension) for dimension in range(4)]
    tensor = torch.empty(page.shape, dtype=layout.torch_dtype, device="meta").permute(inverse)
    spec = FullAttentionSpec(
        block_size=tokens, num_kv_heads=own, head_size=content // 2, dtype=layout.torch_dtype
    )  # fmt: skip
    parallel = SimpleNamespace(
        tensor_parallel_size=ranks, world_size=ranks, rank=rank, prefill_context_parallel_size=1,
        decode_context_parallel_size=1, cp_kv_cache_interleave_size=1,
    )  # fmt: skip
    engine = SimpleNamespace(
        parallel_config=parallel, model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads)
    )
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"])
    caches = SimpleNamespace(num_blocks=1, kv_cache_groups=[group])
    mapping = derive_canonical_mappings(engine, caches, {"layer": tensor})["layer"]
    size = layout.torch_dtype.itemsize
    if not mapping.parallelism_agnostic or mapping.canonical_page_size_bytes != size * numbers.numel():
        raise UnsupportedModelError(
            f"vLLM does not map blocks of {own} heads of {content // 2} numbers, in layout {kv_cache_layout}, to "
            "canonical ones that are the same on any number of ranks"
        )
    if not mapping.is_writer(0):
        return
    local = page.flatten()
    for run in mapping.runs:
        for fragment in range(run.num_fragments):
            source = (run.local_offset + fragment * run.local_stride) // size
            target = (run.canonical_offset + fragment * run.canonical_stride) // size
            count = run.fragment_size // size
            block[target : target + count] = local[source : source + count]
