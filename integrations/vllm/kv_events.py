"""Events that tell routers which blocks the store holds, as vLLM publishes them for its own (`--kv-events-config`).

An event names a chunk's blocks by the hashes that vLLM's own events have for them, so a router can compare both.
`scheduler.events` decides when an event is due.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash, to_event_extra_keys

from cuvee.integrations.vllm.scheduler.events import EventPair


def event_maker(store_name: str, block_tokens: int) -> Callable[[Any, range], EventPair | None]:
    """Return what makes the events of a request's tokens.

    Args:
        store_name: of the store, or of its tiers.
        block_tokens: tokens per block hash of the engine.
    """
    medium = MEDIUM_CPU if store_name == "memory" else MEDIUM_STORAGE

    def make(request: Any, tokens: range) -> EventPair | None:
        first, end = tokens.start // block_tokens, tokens.stop // block_tokens
        hashes = [maybe_convert_block_hash(each) for each in request.block_hashes[first:end]]
        if tokens.start % block_tokens or tokens.stop % block_tokens or len(hashes) != end - first:
            return None
        extra_keys = []
        item = 0
        for start in range(tokens.start, tokens.stop, block_tokens):
            keys, item = generate_block_hash_extra_keys(request, start, start + block_tokens, item)
            extra_keys.append(keys)
        lora = request.lora_request
        stored = BlockStored(
            block_hashes=hashes,
            parent_block_hash=maybe_convert_block_hash(request.block_hashes[first - 1]) if first else None,
            token_ids=list(request.all_token_ids[tokens.start : tokens.stop]),
            block_size=block_tokens,
            lora_id=None if lora is None else lora.adapter_id,
            medium=medium,
            lora_name=None if lora is None else lora.name,
            extra_keys=to_event_extra_keys(extra_keys),
        )
        return EventPair(stored, BlockRemoved(block_hashes=hashes, medium=medium))

    return make
