"""`CuveeL2Adapter`: an L2 adapter of LMCache that keeps chunks compressed.

    --l2-adapter '{"type": "plugin", "module_path": "cuvee.integrations.lmcache.l2_adapter",
      "class_name": "CuveeL2Adapter",
      "adapter_params": {"model": "Qwen/Qwen3-8B", "store": "file:///var/cache/kv?max_gb=200",
        "profile": "qwen3-8b.safetensors"}}'

LMCache's controllers submit tasks and are told by file descriptors when they are done. A task is divided into parts,
one per memory object, that threads of this adapter do:

    store    memory object ──view──> PageStore ──codec──> entry
    lookup   keys of one rank and salt ──> PageStore.stored ──> locks
    load     entry ──codec──> memory object, in place
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from threading import Lock
from typing import Any, Self

import torch
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase

from cuvee.codec.dtypes import TORCH_DTYPES
from cuvee.codec.errors import CuveeError, UnsupportedModelError
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import PagedCache
from cuvee.codec.support.once import Once
from cuvee.integrations.core.guard import Guard, Recorder
from cuvee.integrations.core.refusals import check_uniform
from cuvee.integrations.identity.checkpoint import naming_of_weights, read_layout
from cuvee.integrations.lmcache.l2_accounts import Accounts
from cuvee.integrations.lmcache.l2_options import LMCacheOptions
from cuvee.integrations.lmcache.l2_tasks import Results, run_parts
from cuvee.integrations.lmcache.memory_objects import check_heads, check_shapes, object_cache, object_page
from cuvee.integrations.lmcache.object_keys import following_tokens, page_name
from cuvee.integrations.pages import Counts, PageStore, PageStores
from cuvee.integrations.pages.opaque import LAYOUT
from cuvee.integrations.stores.threads import ThreadPool

logger = logging.getLogger(__name__)

_ENGINE = "lmcache-l2"
_THREADS = 4  # for each kind of task; they mostly wait for the store and for the codec's threads
_ACCOUNTED = 1 << 19  # objects, of which the size is known
_SAID = 100  # kinds of refusals, which hold names of models that clients choose


class CuveeL2AdapterConfig(L2AdapterConfigBase):  # type: ignore[misc]  # types are checked without LMCache
    """What LMCache makes of `adapter_params`.

    Args:
        options: of the adapter.
    """

    def __init__(self, options: LMCacheOptions) -> None:
        self.options = options

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Self:
        """Return the configuration that `adapter_params` describe.

        Raises:
            InputError: as `LMCacheOptions.from_dict`; a ValueError.
        """
        return cls(LMCacheOptions.from_dict(d))

    @classmethod
    def help(cls) -> str:
        """Name the options, for LMCache's command line."""
        return f"cuvee's adapter_params: {', '.join(field.name for field in fields(LMCacheOptions))}"


class CuveeL2Adapter(L2AdapterInterface):  # type: ignore[misc]  # types are checked without LMCache
    """LMCache's view of the page stores of one model. LMCache makes it, once for all ranks.

    Args:
        config: of the adapter.
        l1_memory_desc: of LMCache; not needed.

    Raises:
        InputError: an option out of range, no such checkpoint, a store or a secret that cannot be used; a lossy quality
            without a learned profile, or of a model without RoPE.
        ProfileError, FormatError, ProfileMismatchError, FileNotFoundError: as `PageStores`.
    """

    def __init__(self, config: CuveeL2AdapterConfig, l1_memory_desc: Any = None) -> None:
        options = config.options
        super().__init__(max_capacity_bytes=int((options.max_gb or 0) * 1e9))
        self._options = options
        path, revision = str(options.model), options.revision  # required
        self._once = Once(logger, most=_SAID)
        self._layout: KVLayout | None = None
        try:
            self._layout = _layout_of_values(path, revision, options.dtype)
        except UnsupportedModelError as error:
            self._without_layout = self._as_bytes(error)
        self._model_name = options.model_name or path
        self._counts = Counts()
        self._guard = Guard(self._counts)
        self._pages = PageStores(
            options, self._layout,
            naming_of_weights(
                path, (self._layout or LAYOUT).torch_dtype, model_id=options.model_id, revision=revision
            ),
            checkpoint=(path, revision), engine=_ENGINE, page_tokens=options.chunk_tokens, counts=self._counts,
            positions=False,
        )  # fmt: skip
        self._slots = torch.arange(options.chunk_tokens)
        self._storing, self._looking, self._loading, self._removing = (
            ThreadPool(_THREADS, f"cuvee-{kind}", options.load_timeout)
            for kind in ("store", "lookup", "load", "delete")
        )
        self._stored: Results[L2StoreResult] = Results()
        self._found: Results[Bitmap] = Results()
        self._loaded: Results[Bitmap] = Results()
        self._tasks = itertools.count()
        self._lock = Lock()
        self._accounts = Accounts(self._notify_keys_stored, self._notify_keys_deleted, _ACCOUNTED)
        self._locks: Counter[ObjectKey] = Counter()
        self._deleting: set[ObjectKey] = set()
        self._closed = False

    # Descriptors that say that tasks of a kind are done -------------------------------------------------------------

    def get_store_event_fd(self) -> int:  # noqa: D102
        return self._stored.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:  # noqa: D102
        return self._found.fileno()

    def get_load_event_fd(self) -> int:  # noqa: D102
        return self._loaded.fileno()

    # Storing --------------------------------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        """Store LMCache's `MemoryObj`s, which it keeps until the task is done; return the number of the task."""
        task = next(self._tasks)
        with self._guard("submit_store_task", then=lambda: self._stored.put(task, L2StoreResult(False, 0))):
            parts: list[Callable[[], int | None]] = [
                partial(self._part, "store", partial(self._store, following=after), key, memory, time.monotonic())
                for key, memory, after in zip(
                    keys, objects, following_tokens(keys, self._options.chunk_tokens), strict=True
                )
            ]
            size = max((each.get_size() for each in objects), default=0)
            if self._storing.waiting * size >= self._options.max_pending_gb * 1e9:
                self._counts.count("unsaved_pages", len(parts))
                self._stored.put(task, L2StoreResult(False, 0))
            else:
                run_parts(self._storing, parts, partial(self._finish_store, task, keys))
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Return the bytes that each finished task has put into the store, -1 if not all of its objects are there."""
        return self._stored.take_all()

    def _store(self, key: ObjectKey, memory: Any, following: int) -> int | None:
        """Store an object; return the bytes of its entry, 0 if it was there already, None if it is not stored."""
        counts = Counts(self._counts)
        pages, cache = self._pages_of(key, memory, counts)
        if cache is None:
            (done,) = pages.save_opaque([object_page(memory, _kind(key, memory))], [page_name(key)])
        else:
            (done,) = pages.save(cache, self._slots, [page_name(key)], None, following=following)
        return int(counts.snapshot().get("blob_bytes", 0)) if done else None

    def _finish_store(self, task: int, keys: Sequence[ObjectKey], sizes: Sequence[int | None]) -> None:
        with self._guard("stored"):
            self._accounts.add([(key, size) for key, size in zip(keys, sizes, strict=True) if size])
        total = sum(size or 0 for size in sizes)
        self._stored.put(task, L2StoreResult(None not in sizes, total))

    # Finding --------------------------------------------------------------------------------------------------------

    def submit_lookup_and_lock_task(self, keys: list[ObjectKey], group_layout_descs: Any) -> int:
        """Find out which objects are stored, and lock these against `delete`; return the number of the task.

        Args:
            keys: of any ranks and salts.
            group_layout_descs: of LMCache: shapes and dtypes of the objects of each group.
        """
        task = next(self._tasks)
        with self._guard("submit_lookup_and_lock_task", then=lambda: self._found.put(task, Bitmap(len(keys)))):
            together: dict[tuple[str, int, int, str], list[int]] = {}
            for number, key in enumerate(keys):
                kind = key.model_name, key.kv_rank, key.object_group_id, key.cache_salt
                together.setdefault(kind, []).append(number)
            numbers = list(together.values())
            parts: list[Callable[[], list[bool]]] = [
                partial(self._look_up, [keys[number] for number in each], group_layout_descs or {}) for each in numbers
            ]
            run_parts(self._looking, parts, partial(self._finish_lookup, task, keys, numbers))
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Return which objects were found and are locked, once; None before that and afterwards."""
        return self._found.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Take back one lock of each object."""
        with self._lock:
            for key in keys:
                self._locks[key] -= 1
                if self._locks[key] <= 0:
                    del self._locks[key]

    def _look_up(self, keys: Sequence[ObjectKey], descs: Mapping[int, Any]) -> list[bool]:
        """Return which of these keys, which differ in their hashes only, are stored."""
        with self._guard("lookup"):
            if keys[0].model_name == self._model_name:  # a store task says so
                return self._found_pages(keys[0], descs.get(keys[0].object_group_id)).stored(list(map(page_name, keys)))
        return [False] * len(keys)

    def _found_pages(self, key: ObjectKey, desc: Any) -> PageStore:
        """Return the page store in which an object is, by what LMCache tells of it at a lookup."""
        try:
            pages = self._pages_of_values(key, self._counts)
            if desc is not None:
                check_shapes(desc.shapes, desc.dtypes, pages.layout, self._options.chunk_tokens)
        except UnsupportedModelError:
            return self._opaque_pages(key, self._counts)
        return pages

    def _finish_lookup(
        self,
        task: int,
        keys: Sequence[ObjectKey],
        numbers: Sequence[Sequence[int]],
        found: Sequence[Sequence[bool] | None],
    ) -> None:
        bitmap = Bitmap(len(keys))
        with self._lock:
            for these, there in zip(numbers, found, strict=True):
                for number, stored in zip(these, there or [False] * len(these), strict=True):
                    if stored and keys[number] not in self._deleting:
                        self._locks[keys[number]] += 1
                        bitmap.set(number)
        self._found.put(task, bitmap)

    # Loading --------------------------------------------------------------------------------------------------------

    def submit_load_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        """Restore objects into LMCache's memory; return the number of the task.

        Args:
            keys: one of each object.
            objects: LMCache's `MemoryObj`, whose contents are undefined if they are not restored.
        """
        task = next(self._tasks)
        with self._guard("submit_load_task", then=lambda: self._loaded.put(task, Bitmap(len(keys)))):
            parts: list[Callable[[], int | None]] = [
                partial(self._part, "load", self._load, key, memory, time.monotonic())
                for key, memory in zip(keys, objects, strict=True)
            ]
            run_parts(self._loading, parts, partial(self._finish_load, task, keys))
        return task

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Return which objects were restored, once; None before that and afterwards."""
        return self._loaded.take(task_id)

    def _load(self, key: ObjectKey, memory: Any) -> int | None:
        """Restore an object; return the bytes of its entry, None if it was not restored."""
        counts = Counts(self._counts)
        pages, cache = self._pages_of(key, memory, counts)
        if cache is None:
            (done,) = pages.load_opaque([object_page(memory, _kind(key, memory))], [page_name(key)])
        else:
            (done,) = pages.load(cache, self._slots, [page_name(key)], None)
        return int(counts.snapshot()["loaded_blob_bytes"]) if done else None

    def _finish_load(self, task: int, keys: Sequence[ObjectKey], sizes: Sequence[int | None]) -> None:
        bitmap = Bitmap(len(keys))
        loaded = [(number, size) for number, size in enumerate(sizes) if size is not None]
        bitmap.batched_set([number for number, _ in loaded])
        with self._guard("loaded"):
            # An entry of an earlier process, or of another one, is known to LMCache from here on.
            self._accounts.add([(keys[number], size) for number, size in loaded])
            if loaded:
                self._notify_keys_accessed([keys[number] for number, _ in loaded])
        self._loaded.put(task, bitmap)

    # Deleting -------------------------------------------------------------------------------------------------------

    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete objects that are not locked, in the background. LMCache's listeners are told once they are gone."""
        with self._guard("delete"):
            with self._lock:
                free = [key for key in dict.fromkeys(keys) if not self._locks[key] and key not in self._deleting]
                self._deleting.update(free)
            parts: list[Callable[[], bool]] = [partial(self._delete, key) for key in free]
            run_parts(self._removing, parts, partial(self._finish_delete, free))

    def _delete(self, key: ObjectKey) -> bool:
        """Delete an object, which may be stored in either way; return whether it is gone."""
        with self._guard("delete"):
            ways = [self._opaque_pages(key, self._counts)]
            with suppress(UnsupportedModelError):
                ways.append(self._pages_of_values(key, self._counts))
            return [pages.delete([page_name(key)]) for pages in ways] == [[True]] * len(ways)
        return False

    def _finish_delete(self, keys: Sequence[ObjectKey], gone: Sequence[bool | None]) -> None:
        deleted = [key for key, done in zip(keys, gone, strict=True) if done]
        with self._guard("deleted"):
            self._accounts.remove(deleted)
        with self._lock:
            self._deleting.difference_update(keys)

    # What LMCache knows ---------------------------------------------------------------------------------------------

    def get_memory_tags(self) -> Any:
        """Return LMCache's `MemoryTags`, which 0.5.7 asks for: storage, of this host or of others."""
        from lmcache.v1.distributed.api import MemoryResidency, MemorySegment, MemoryTags

        local = not self._shared and self._options.local
        return MemoryTags(MemorySegment.STORAGE, MemoryResidency.LOCAL if local else MemoryResidency.REMOTE)

    def report_status(self) -> dict[str, Any]:
        """Return LMCache's status of an adapter: whether it is open, what it holds, and what happened so far."""
        return {
            "is_healthy": not self._closed,
            "type": type(self).__name__,
            "stored_object_count": len(self._accounts),
            "locked_key_count": len(self._locks),
            "current_size_bytes": self.get_usage().total_bytes_used,
            "max_capacity_bytes": self._max_capacity_bytes,
            "counters": self.counters(),
        }

    def counters(self) -> dict[str, float]:
        """Return what happened so far, by the names in `cuvee.integrations.pages.Counts`."""
        return self._counts.snapshot()

    def close(self) -> None:
        """Let what has begun end, give up what waits, close the store, and log what happened.

        Takes `load_timeout` seconds if the store hangs. May be called more than once.
        """
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        until = time.monotonic() + self._options.load_timeout
        for pool in (self._storing, self._looking, self._loading, self._removing):
            with self._guard("close"):
                pool.dismiss(max(until - time.monotonic(), 0), cancel=True)
        with self._guard("close"):
            self._pages.close()
        for results in (self._stored, self._found, self._loaded):
            results.close()
        logger.info("cuvee: closed after %s", self.counters())

    # Parts of tasks -------------------------------------------------------------------------------------------------

    def _part(
        self, kind: str, work: Callable[[ObjectKey, Any], int | None], key: ObjectKey, memory: Any, submitted: float
    ) -> int | None:
        """Return what the work on an object returns; None if it fails, or is too late to begin.

        LMCache's locks on its memory end by themselves after some minutes. Then the memory may hold another object.
        """
        with self._guard(kind):
            if time.monotonic() - submitted > self._options.load_timeout:
                self._counts.count("unsaved_pages" if kind == "store" else "missed_pages")
                return None
            try:
                return work(key, memory)
            except UnsupportedModelError as error:
                self._counts.count("refused_pages")
                self._once(str(error), "cuvee: objects are not stored or loaded: %s", error)
        return None

    def _pages_of(self, key: ObjectKey, memory: Any, counts: Recorder) -> tuple[PageStore, PagedCache | None]:
        """Return the page store of an object, and the object as a cache; None if it is one of bytes.

        Raises:
            UnsupportedModelError: a key of another model, or fewer heads than one of its ranks has.
        """
        if key.model_name != self._model_name:
            raise UnsupportedModelError(
                f"model_name: must be {self._model_name!r}, got objects of {key.model_name!r}: set model_name to the "
                "engine's name of this model, and give every model an --l2-adapter of its own"
            )
        if self._layout is not None:
            check_heads(memory.get_shapes(), self._layout, self._rank(key)[1])
        try:
            pages = self._pages_of_values(key, counts)
            return pages, object_cache(memory, pages.layout, self._options.chunk_tokens)
        except UnsupportedModelError as error:
            self._as_bytes(error)
        return self._opaque_pages(key, counts), None

    def _as_bytes(self, why: UnsupportedModelError) -> str:
        """Log once that objects are stored as bytes, and why; return why."""
        self._once(str(why), "cuvee: objects are stored as bytes, without loss and without a profile: %s", why)
        return str(why)

    def _opaque_pages(self, key: ObjectKey, counts: Recorder) -> PageStore:
        """Return the page store of objects of bytes, which name their shapes and dtypes themselves."""
        tenant, servers = key.cache_salt or self._options.tenant, self._options.servers
        of_server = "" if servers == 1 else f" of server {self._options.server_index} of {servers}"
        return self._pages.opaque(f"objects{of_server}", tenant, counts, main=not key.object_group_id)

    def _pages_of_values(self, key: ObjectKey, counts: Recorder) -> PageStore:
        """Return the page store of a key's rank and salt.

        Raises:
            UnsupportedModelError: objects whose order is not known: of a further object group, of ranks among which the
                model's heads cannot be divided.
        """
        if self._layout is None:
            raise UnsupportedModelError(self._without_layout)
        if key.object_group_id:
            raise UnsupportedModelError(f"object_group_id: must be 0 of keys and values, got {key.object_group_id}")
        try:
            return self._pages.of(*self._rank(key), key.cache_salt or self._options.tenant, counts)
        except CuveeError as error:
            raise UnsupportedModelError(
                f"kv_rank: must be one of tensor parallelism, got {key.kv_rank:#x}: {error}"
            ) from error

    def _rank(self, key: ObjectKey) -> tuple[int, int]:
        """Return the tensor-parallel rank of a key and the number of ranks, those of other servers included."""
        ranks, rank = key.kv_rank >> 24 & 0xFF, key.kv_rank >> 16 & 0xFF  # ObjectKey.ComputeKVRank
        return self._options.server_index * ranks + rank, self._options.servers * ranks


def _layout_of_values(path: str, revision: str | None, dtype: str | None) -> KVLayout:
    """Return the layout of a model whose objects may hold keys and values in a known order.

    Raises:
        InputError: as `read_layout`.
        UnsupportedModelError: they never do.
    """
    layout = read_layout(path, None if dtype is None else TORCH_DTYPES[dtype], revision=revision)
    if any(layer.latent for layer in layout.layers):
        raise UnsupportedModelError("model: must keep keys and values of heads, got latents (MLA)")
    check_uniform(layout)
    return layout


def _kind(key: ObjectKey, memory: Any) -> str:
    """Return what counters call an object of bytes: its group, or its dtype."""
    return f"group {key.object_group_id}" if key.object_group_id else str(memory.get_dtypes()[0]).removeprefix("torch.")
