"""`CuveeHiCache`: a storage backend of SGLang's hierarchical cache that keeps pages compressed.

    --enable-hierarchical-cache --page-size 64 --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
    '{"backend_name": "cuvee", "module_path": "cuvee.integrations.sglang.hicache", "class_name": "CuveeHiCache",
      "interface_v1": 1, "hicache_storage_pass_prefix_keys": true, "store": "file:///var/cache/kv?max_gb=200"}'

SGLang calls it from threads of its own, with up to 128 pages at a time, and computes every page that is not there.
Pages are coded in place, in the pool's memory.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from threading import Lock
from typing import Any

import psutil
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolTransfer,
    PoolTransferResult,
)

from cuvee.codec.errors import InputError, UnsupportedModelError
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import PagedCache
from cuvee.integrations.core.guard import Guard
from cuvee.integrations.pages import Counts, PageStore, PageStores
from cuvee.integrations.sglang.host_pool import OpaquePool, check_pool, holds_latents, pool_cache
from cuvee.integrations.sglang.options import HiCacheOptions
from cuvee.integrations.sglang.served_model import ServedModel
from cuvee.integrations.sglang.weight_updates import watch_updates

logger = logging.getLogger(__name__)

_ENGINE = "sglang-hicache"
_SGLANGS_OWN = ("backend_name", "module_path", "class_name", "interface_v1")
_MOST_MOVED = 1000


class CuveeHiCache(HiCacheStorage):  # type: ignore[misc]  # types are checked without SGLang
    """SGLang's view of a `PageStore`. SGLang makes it, on every rank.

    Args:
        storage_config: of SGLang: ranks, model, and the user's JSON.
        kwargs: of SGLang; not needed.

    Raises:
        InputError: an unknown option, or a value out of range.
        UnsupportedModelError: a feature of the engine that cuvee does not support.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        extra = dict(storage_config.extra_config or {})
        version = extra.get("interface_v1")
        if not version:
            raise InputError(f"interface_v1: must be 1, because pages are coded in the pool's memory, got {version!r}")
        self._options = HiCacheOptions.from_dict({k: v for k, v in extra.items() if k not in _SGLANGS_OWN})
        self._config = storage_config
        if storage_config.should_split_heads:
            raise UnsupportedModelError(
                "CuveeHiCache does not support pages shared by engines of different tensor-parallel sizes (tp_lcm_size)"
            )
        self._counts = Counts()
        self._guard = Guard(self._counts)
        self._attached: tuple[PageStores, PagedCache | None] | None = None  # once SGLang has registered its pool
        self._opaque: dict[str, OpaquePool] = {}
        self._lock = Lock()
        self._moved = _moved()

    # Start and end --------------------------------------------------------------------------------------------------

    def on_host_pools_registered(self) -> None:
        """Open the store for the registered pool. SGLang answers the attempt to attach with an error raised here.

        Raises:
            InputError, ProfileError, FormatError, ProfileMismatchError, FileNotFoundError: as `PageStores`.
        """
        pool, options = self.mem_pool_host, self._options
        model = ServedModel.find(options.model)
        layout, cache = None, None
        rank, ranks = self._config.tp_rank, self._config.tp_size
        if self._config.is_mla_model:  # all ranks hold the same latents, and SGLang stores those of the first
            rank, ranks = 0, 1
        self._opaque.clear()
        try:
            layout, cache = self._known(model, rank, ranks)
        except UnsupportedModelError as error:
            logger.warning("cuvee: pages are stored as bytes, without loss and without a profile: %s", error)
            self._pool("kv")
        stores = PageStores(
            options, layout, model.naming(options.model_id, pool.dtype), checkpoint=(model.path, model.revision),
            engine=_ENGINE, page_tokens=pool.page_size, counts=self._counts, shard=(rank, ranks),
        )  # fmt: skip
        self._attached = stores, cache
        self._stores, self._rank = stores, (rank, ranks)
        if model.updated():
            self.updating()
            self.updated(flushed=True, version=None)
        watch_updates(self)
        if options.model_id is None and (file := model.changed_since(_started())):
            stores.withdraw(
                f"{file} changed after SGLang's start, which may have read others than there are now: restart it"
            )
        self._pages("kv")  # whose identity is recorded from now on

    def _known(self, model: ServedModel, rank: int, ranks: int) -> tuple[KVLayout, PagedCache]:
        """Return the model's layout, and the pool as keys and values of a rank.

        Raises:
            UnsupportedModelError: their order is not known.
        """
        pool = self.mem_pool_host
        check_pool(pool, self._config)
        layout = model.layout(pool.dtype)
        own = layout.shard(rank, ranks)
        return layout, pool_cache(pool, own, adjacent_pairs=holds_latents(pool) and model.adjacent_pairs())

    def close(self) -> None:
        """Wait for what is being stored, close the store, and log what happened."""
        attached, self._attached = self._attached, None
        if attached is None:
            return
        with self._guard("close"):
            attached[0].close()
        logger.info("cuvee: closed after %s", self._counts.snapshot())

    def updating(self) -> None:
        """Have no pages, because SGLang is about to change its weights."""
        with self._guard("updating"):
            self._stores.withdraw("SGLang updates its weights")

    def updated(self, flushed: bool, version: str | None) -> None:
        """Have pages again, of other names.

        Args:
            flushed: whether SGLang holds no pages of the old weights. If it does, there are none until its cache is
                flushed.
            version: `weight_version` of the update, if it has one.
        """
        with self._guard("updating"):
            if not flushed:
                logger.warning(
                    "cuvee: nothing is stored or loaded, because SGLang may keep pages of before an update of its "
                    "weights: flush its cache (POST /flush_cache), or restart"
                )
                return
            self._stores.rename(version)

    def clear(self) -> None:
        """Delete what this backend's tenant has in the store, on all ranks and for all models."""
        with self._guard("clear"):
            self._pages("kv").delete_all()

    # Pages ----------------------------------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Return whether a page is stored."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return how many pages from the first on are stored.

        Args:
            keys: SGLang's hashes of adjacent pages.
            extra_info: of SGLang; not needed.
        """
        there: list[bool] = []
        with self._guard("batch_exists"):
            there = self._pages("kv").stored(_names(keys))
        return [*there, False].index(False)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return how many pages from the first on can be used, given what further pools hold of them.

        Args:
            keys: as in `batch_exists`.
            pool_transfers: the further pools, and which of their pages must be there: all, or the last.
            extra_info: of SGLang; not needed.
        """
        with self._guard("batch_exists"):
            whole = self.batch_exists(keys)
            usable, hits = set(range(1, whole + 1)), {"kv": whole}
            for transfer in pool_transfers or ():
                there, need = self._pages(str(transfer.name)).stored(_names(keys[:whole])), whole
                if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                    need = max(len(transfer.keys or ()), 1)
                elif transfer.hit_policy != PoolHitPolicy.ALL_PAGES:
                    there = [False] * whole
                own = {count for count in usable if all(there[max(count - need, 0) : count])}
                hits[transfer.name], usable = max(own, default=0), usable & own
            return PoolTransferResult(
                max(usable, default=0), {name: count for name, count in hits.items() if count}, sorted(usable)
            )
        return PoolTransferResult.empty()

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Restore pages of any pools, bit for bit; return by pool whether each was restored."""
        return {each.name: self._move_all("prefetch", each, extra_info) for each in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of any pools; return by pool whether each is stored."""
        return {each.name: self._move_all("backup", each, extra_info) for each in transfers}

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Restore pages into the pool; return whether each of them was restored.

        Args:
            keys: SGLang's hashes of adjacent pages.
            host_indices: `[pages * page tokens]`, where the pages' tokens go in the pool.
            extra_info: the hashes of all pages before these, which say where in the sequence these are.
        """
        return self._move("prefetch", keys, host_indices, extra_info)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages of the pool; return whether each of them is stored.

        Args:
            keys: as in `batch_get_v1`.
            host_indices: where the pages' tokens are.
            extra_info: as in `batch_get_v1`.
        """
        return self._move("backup", keys, host_indices, extra_info)

    def get_stats(self) -> Any:
        """Return what was moved since the last call as SGLang's `StorageMetrics`: pages, and GB/s uncompressed."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            moved, self._moved = self._moved, _moved()
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in moved["prefetch"]],
            backup_pgs=[pages for pages, _ in moved["backup"]],
            prefetch_bandwidth=[rate for _, rate in moved["prefetch"]],
            backup_bandwidth=[rate for _, rate in moved["backup"]],
        )

    def counters(self) -> dict[str, float]:
        """Return what happened so far, by the names in `cuvee.integrations.pages.Counts`."""
        return self._counts.snapshot()

    # The interface before v1, which passes copies of pages. SGLang does not call it with `interface_v1`.

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Return None: see `batch_get_v1`."""

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        """Return None for every page: see `batch_get_v1`."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Return False: see `batch_set_v1`."""
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Return False: see `batch_set_v1`."""
        return False

    def _move_all(
        self, direction: str, transfer: PoolTransfer, extra_info: HiCacheStorageExtraInfo | None
    ) -> list[bool]:
        name, keys, indices = str(transfer.name), transfer.keys or [], transfer.host_indices
        if name == "kv":
            return self._move(direction, keys, indices, extra_info)
        with self._guard(f"{direction}_pool"):
            if indices is not None and len(indices) == len(keys) * self._pool(name).page_tokens:
                return self._move_opaque(direction, name, keys, indices)[0]
        return [False] * len(keys)

    def _move(
        self, direction: str, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None
    ) -> list[bool]:
        """Load pages ("prefetch") or save them ("backup"), and keep the figures for `get_stats`."""
        done, began = [False] * len(keys), time.monotonic()
        with self._guard("batch_get_v1" if direction == "prefetch" else "batch_set_v1"):
            pages, (_, cache) = self._pages("kv"), self._there
            if cache is None:
                done, page_bytes = self._move_opaque(direction, "kv", keys, host_indices)
            else:
                page_tokens = self.mem_pool_host.page_size
                prefix = None if extra_info is None else extra_info.prefix_keys
                start = None if prefix is None else len(prefix) * page_tokens
                method = pages.load if direction == "prefetch" else pages.save
                done = method(cache, host_indices.to("cpu", torch.int64), _names(keys), start)
                page_bytes = page_tokens * cache.layout.bytes_per_token
            size = sum(done) * page_bytes
            with self._lock:
                self._moved[direction].append((sum(done), size / max(time.monotonic() - began, 1e-9) / 1e9))
        return done

    def _move_opaque(
        self, direction: str, name: str, keys: Sequence[str], indices: torch.Tensor
    ) -> tuple[list[bool], int]:
        """Load or save pages of a pool as bytes; return whether each was, and bytes of a page."""
        pool, pages = self._pool(name), self._pages(name)
        memory = pool.read(indices) if direction == "backup" else pool.blank(len(keys))
        if direction == "backup":
            done = pages.save_opaque(memory, _names(keys))
        else:
            done = pages.load_opaque(memory, _names(keys))
            pool.write(memory[: sum(done)], indices)
        return done, memory[0].nbytes if memory else 0

    def _pool(self, name: str) -> OpaquePool:
        if name not in self._opaque:
            pools = {str(own): pool for own, pool in getattr(self, "registered_pools", {}).items()}
            self._opaque[name] = OpaquePool(name, {**pools, "kv": self.mem_pool_host}[name], self._config)
        return self._opaque[name]

    def _pages(self, name: str) -> PageStore:
        """Return the page store of a pool, of the weights as they are now."""
        stores, cache = self._there
        if name == "kv" and cache is not None:
            return stores.of(*self._rank, self._options.tenant)
        pool = self._pool(name)
        return stores.opaque(pool.description, self._options.tenant, rank=pool.rank, main=name == "kv")

    @property
    def _there(self) -> tuple[PageStores, PagedCache | None]:
        attached = self._attached
        if attached is None:
            raise RuntimeError("no host pool is registered, or the backend was closed")
        return attached


def _started() -> int:
    """Return when this process started, before it read any weights, in nanoseconds since the epoch."""
    return int(psutil.Process().create_time() * 1e9)


def _moved() -> dict[str, deque[tuple[int, float]]]:
    """Return room for pages and GB/s of the last batches, which SGLang asks for only if its metrics are on."""
    return {direction: deque(maxlen=_MOST_MOVED) for direction in ("prefetch", "backup")}


def _names(keys: Sequence[str]) -> list[bytes]:
    return [key.encode() for key in keys]
