"""`CuveeLinker`: an external linker of SGLang's prefix cache that keeps pages compressed, without pages in host memory.

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker": "CuveeLinker",
      "linker_module_path": "cuvee.integrations.sglang.linker",
      "linker_extra_config": {"store": "file:///var/cache/kv?max_gb=200"}}'

    offload   device pages ──copy──> host ──codec──> store                         in threads
    lookup    store ──> entries, verified and held until the load                   the scheduler waits briefly
    load      entries ──codec──> device pages, layer by layer beside the forward    in a thread

SGLang aborts a request whose load fails, and all ranks must take the same decisions. So whatever can fail or differ
among ranks happens in `lookup`, over whose result they agree. What `load` answers depends on the calls so far only.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
    LayerWiseLoadCounter,
    UnifiedCacheLinker,
    device_module,
)

from cuvee.codec.errors import CuveeError, InputError, UnsupportedModelError
from cuvee.codec.paged import PagedCache
from cuvee.integrations.guard import Guard
from cuvee.integrations.pages import Counts, Fetched, PageStores
from cuvee.integrations.pages.refusals import refuse_features
from cuvee.integrations.sglang.device_pool import check_device_pool, device_cache
from cuvee.integrations.sglang.host_pool import holds_latents
from cuvee.integrations.sglang.options import LinkerOptions
from cuvee.integrations.sglang.served_model import ServedModel
from cuvee.integrations.stores.threads import ThreadPool

logger = logging.getLogger(__name__)

_ENGINE = "sglang-linker"
_FETCHES = 4  # lookups at a time
_OFFLOADS = 2  # at a time; they mostly wait for the codec's threads and the store
_COPIED_TOKENS = 2048  # of an offload, that are in host memory at a time


@dataclass(frozen=True, slots=True)
class _Held:
    """A lookup: the names that it asked for, and the verified pages among them once they are there."""

    names: tuple[bytes, ...]
    fetching: Future[list[Fetched]]

    @property
    def fetched(self) -> list[Fetched]:
        """What was found so far."""
        done = self.fetching.done() and not self.fetching.cancelled()
        return self.fetching.result() if done else []


class CuveeLinker(UnifiedCacheLinker):  # type: ignore[misc]  # types are checked without SGLang
    """SGLang's view of a `PageStore`. SGLang makes it on every rank, and calls it from its scheduler's thread.

    Args:
        server_args: of SGLang.
        params: of SGLang's prefix cache: its device pool, page size and process groups.
        components: the kinds of caches that the model has.
        extra_config: the user's JSON, `linker_extra_config`.
        forward_stream: of SGLang: where the device's pages are written.
        kwargs: of other versions of SGLang; not needed.

    Attributes:
        layer_done_counter: SGLang's counter of layers that are loaded.
        pools: SGLang's device pools that are served, by name.

    Raises:
        InputError: an unknown option, a value out of range, a store or a secret that cannot be used; a lossy quality
            without a learned profile, or of a model without RoPE.
        ProfileError, FormatError, ProfileMismatchError, FileNotFoundError: as `PageStores`.
        UnsupportedModelError: a model, or a feature of the engine, that cuvee does not support.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: set[Any],
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
        **kwargs: Any,
    ) -> None:
        options = LinkerOptions.from_dict(extra_config or {})
        _refuse_features(server_args, params, components)
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        check_device_pool(pool)
        self.forward_stream = forward_stream
        self._options, self._page_tokens = options, int(params.page_size)
        self._counts = Counts()
        self._guard = Guard(self._counts)
        model = ServedModel.find(options.model, getattr(server_args, "model_path", None))
        layout = model.layout(pool.dtype)
        rank, ranks = _rank(params)
        adjacent_pairs, self._writes = False, True
        if holds_latents(pool):  # all ranks hold the same latents: the first one stores them
            self._writes = rank == 0
            rank, ranks, adjacent_pairs = 0, 1, model.adjacent_pairs()
        self._cache = device_cache(pool, layout.shard(rank, ranks), adjacent_pairs=adjacent_pairs)
        page_bytes = self._page_tokens * self._cache.layout.bytes_per_token
        self._most_held = int(options.held_gb * 1e9 / page_bytes)
        if not self._most_held:
            raise InputError(f"held_gb: must hold at least a page of {page_bytes} bytes, got {options.held_gb}")
        # The store may take longer than the scheduler waits.
        stores = PageStores(
            replace(options, lookup_timeout=options.load_timeout), layout,
            lambda: model.weights(options.model_id, layout), checkpoint=(model.path, model.revision),
            engine=_ENGINE, page_tokens=self._page_tokens, counts=self._counts, positions=False, rank=rank, ranks=ranks,
        )  # fmt: skip
        self._pages = stores.of(rank, ranks, options.tenant)
        if not self._pages.serves(self._cache.device):
            self._pages.close()
            raise UnsupportedModelError(
                f"device pool: must be in memory for which the codec has kernels, got {self._cache.device}: install "
                "triton, or use the storage backend of HiCache"
            )
        self._stream = None if self._cache.device.type == "cpu" else device_module.Stream(self._cache.device)
        self.layer_done_counter = LayerWiseLoadCounter(layout.num_layers)
        self.pools = {PoolName.KV: pool}
        self._closed = False
        self._held: OrderedDict[str, _Held] = OrderedDict()  # by request, the last looked up last
        self._queued: dict[str, tuple[list[Fetched], torch.Tensor]] = {}  # by request
        self._loads: list[Future[None]] = []
        self._offloads: deque[Future[bool]] = deque()  # in the order in which SGLang is told of them
        self._fetching = ThreadPool(_FETCHES, "cuvee-lookup", options.load_timeout)
        self._loading = ThreadPool(1, "cuvee-load", float("inf"))
        self._offloading = ThreadPool(_OFFLOADS, "cuvee-offload", float("inf"))

    # Loading --------------------------------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Fetch and verify a request's pages; return each number of pages from the first on that can be restored.

        SGLang's scheduler, and so every request, waits for the answer: at most `lookup_timeout` seconds, and only the
        first time. What arrives later is found when SGLang asks again, which it does for requests that wait. An answer
        stands while it is held.

        Args:
            rid: of the request.
            transfers: SGLang's `PoolTransfer`, with the hashes of pages.
        """
        names = _names(transfers)[: self._most_held]
        if self._closed:
            self._counts.count("missed_pages", len(names))
            return []
        held = self._held.pop(rid, None)
        if held is None or held.names != names:
            if held is not None:
                held.fetching.cancel()
            # The oldest make room, by what was asked for, so that all ranks let go of the same ones.
            asked = sum(len(each.names) for each in self._held.values())
            while asked + len(names) > self._most_held:
                _, oldest = self._held.popitem(last=False)
                oldest.fetching.cancel()
                asked -= len(oldest.names)
            held = _Held(names, Future())
            with self._guard("lookup"):
                held = _Held(names, self._fetching.submit(self._fetch, names))
                wait([held.fetching], self._options.lookup_timeout)
        self._held[rid] = held
        return list(range(1, len(held.fetched) + 1))

    def _fetch(self, names: Sequence[bytes]) -> list[Fetched]:
        with self._guard("lookup"):
            return self._pages.fetch(names, None)
        return []

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Queue a load of pages that a lookup found; return whether they are still held.

        Args:
            rid: of the request.
            transfers: SGLang's `PoolTransfer`, with the hashes of pages and the slots of their tokens.
        """
        names, slots = _names(transfers), _slots(transfers)
        held = self._held.pop(rid, None)
        if held is None or slots is None or rid in self._queued or not names:
            return False
        if names != held.names[: len(names)] or len(held.fetched) < len(names):
            return False
        self._queued[rid] = held.fetched[: len(names)], slots
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        """Forget a load that has not started; return whether there was one."""
        return self._queued.pop(rid, None) is not None

    def start_layer_wise_loading(self) -> int:
        """Start the queued loads; return the index by which SGLang waits for them, -1 if there are none."""
        if not self._queued:
            return -1
        loads, self._queued = list(self._queued.values()), {}
        index = int(self.layer_done_counter.update_producer())

        def fail() -> None:
            self.layer_done_counter.fail(index, CuveeError("the load could not be started"))

        with self._guard("start_layer_wise_loading", then=fail):
            freed = device_module.Event()  # what SGLang's streams still read in these slots
            freed.record()
            self._loads = [each for each in self._loads if not each.done()]
            self._loads.append(self._loading.submit(self._place, index, loads, freed))
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until a load that was started writes no more; return whether all of it was restored."""
        return bool(self.layer_done_counter.finish(counter_index))

    def _place(self, index: int, loads: Sequence[tuple[list[Fetched], torch.Tensor]], freed: Any) -> None:
        """Restore pages of some requests, and let SGLang's counter know, layer by layer or of the failure."""

        def complete(layers: range) -> None:
            for layer in layers:
                self.layer_done_counter.complete(index, layer)

        def fail() -> None:
            self.layer_done_counter.fail(index, CuveeError("pages could not be restored"))

        with self._guard("load", then=fail):
            freed.synchronize()
            with self._on_stream():
                placed = self._pages.place(self._cache, [(each, _on_host(slots)) for each, slots in loads], complete)
            if not placed:
                fail()

    # Offloading -----------------------------------------------------------------------------------------------------

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Store pages in the background; return whether there are any. SGLang keeps them until that is done.

        Args:
            transfers: SGLang's `PoolTransfer`, with the hashes of pages and the slots of their tokens.
            session_id: of SGLang; not needed.
        """
        names, slots = _names(transfers), _slots(transfers)
        if slots is None or not names:
            return False
        # All ranks answer alike: whatever fails, here or later, is an offload that is completed without success.
        told: Future[bool] = Future()
        if not self._writes:
            told.set_result(True)
        else:
            with self._guard("offload", then=lambda: told.set_result(False)):
                ready = self.record_offload_ready()
                told = self._offloading.submit(self._store, names, slots, ready, time.monotonic())
        self._offloads.append(told)
        return True

    def num_completed_offloads(self) -> int:
        """Return how many of the oldest offloads are completed."""
        return next((number for number, each in enumerate(self._offloads) if not each.done()), len(self._offloads))

    def pop_completed_offload(self) -> bool:
        """Return whether the oldest offload, which is completed, has stored all of its pages."""
        return self._offloads.popleft().result()

    def _store(self, names: Sequence[bytes], slots: torch.Tensor, ready: Sequence[Any], submitted: float) -> bool:
        """Store pages; return whether all of them are stored."""
        with self._guard("offload"):
            if time.monotonic() - submitted > self._options.load_timeout:
                # SGLang cannot use the slots of pages that wait here.
                self._counts.count("unsaved_pages", len(names))
                return False
            for event in ready:
                event.synchronize()
            several = max(_COPIED_TOKENS // self._page_tokens, 1)
            for first in range(0, len(names), several):
                part = names[first : first + several]
                with self._on_stream():
                    copied = _copy(self._cache, slots[first * self._page_tokens :][: len(part) * self._page_tokens])
                after = (len(names) - first - len(part)) * self._page_tokens
                at = torch.arange(len(part) * self._page_tokens)
                if not all(self._pages.save(copied, at, part, None, following=after)):
                    self._counts.count("unsaved_pages", len(names) - first - len(part))
                    return False
            return True
        return False

    # End ------------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget what is queued, wait for what has begun, and forget it, too."""
        with self._guard("reset"):
            self._queued.clear()
            for held in self._held.values():
                held.fetching.cancel()
            self._held.clear()
            for offload in self._offloads:
                offload.cancel()
            wait(self._loads)
            wait([each for each in self._offloads if not each.cancelled()])
            self._loads.clear()
            self._offloads.clear()
            self.layer_done_counter.reset()

    def close(self) -> None:
        """Do what `reset` does, close the store, and log what happened. May be called more than once."""
        self._closed = True
        self.reset()
        with self._guard("close"):
            self._fetching.dismiss(0, cancel=True)
            self._loading.dismiss()
            self._offloading.dismiss()
            self._pages.close()
        logger.info("cuvee: closed after %s", self.counters())

    def counters(self) -> dict[str, float]:
        """Return what happened so far, by the names in `cuvee.integrations.pages.Counts`."""
        return self._counts.snapshot()

    def _on_stream(self) -> AbstractContextManager[Any]:
        """Return a context in which this thread's work on the device waits for nothing of SGLang's."""
        return nullcontext() if self._stream is None else device_module.stream(self._stream)


def _refuse_features(server_args: Any, params: Any, components: set[Any]) -> None:
    others = sorted(each.name for each in components if each != ComponentType.FULL)
    drafts = len(params.mtp_draft_device_pools) + len(params.sidecar_draft_device_pools)
    dcp = getattr(server_args, "dcp_size", 1)
    features = {
        f"models with other caches than keys and values, got {', '.join(others)}": bool(others),
        f"pipeline parallelism (pp_size={params.pp_size})": params.pp_size > 1,
        f"context parallelism (attn_cp_size={params.attn_cp_size}, dcp_size={dcp})": max(params.attn_cp_size, dcp) > 1,
        "speculative decoding whose draft has a cache of its own": drafts > 0,
    }
    refuse_features("CuveeLinker", features)


def _rank(params: Any) -> tuple[int, int]:
    """Return this process's rank among those that share the heads of the cache, and their number."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0, 1
    group = params.attn_tp_cache_group or params.tp_cache_group
    return torch.distributed.get_rank(group), torch.distributed.get_world_size(group)


def _names(transfers: Sequence[Any]) -> tuple[bytes, ...]:
    """Return the names of the pages of keys and values."""
    return tuple(key.encode() for each in transfers if each.name == PoolName.KV for key in each.keys or ())


def _slots(transfers: Sequence[Any]) -> torch.Tensor | None:
    """Return where the tokens of the pages of keys and values are in the device's pool."""
    return next((each.device_indices for each in transfers if each.name == PoolName.KV), None)


def _on_host(slots: torch.Tensor) -> torch.Tensor:
    return slots.to("cpu", torch.int64)


def _copy(cache: PagedCache, slots: torch.Tensor) -> PagedCache:
    """Copy tokens to host memory, one layer at a time, so that the device needs memory for one only."""
    read = cache.reader(slots.to(cache.device, torch.int64))
    layers = [[part.cpu() for part in read(layer)] for layer in range(cache.layout.num_layers)]
    return PagedCache.dense(cache.layout, [keys for keys, _ in layers], [values for _, values in layers])
