"""LMCache's own classes, which need no GPU: its storage manager with our adapter behind it.

`NEED_LMCACHE`, as `pytestmark`, skips a module's tests where LMCache is not installed, unless CUVEE_REQUIRE_LMCACHE=1.
The Makefile installs it without its dependencies.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.integrations.vllm_tier.real_tiers import bits
from tests.waiting import wait_until

from cuvee.calibration.bundled import bundled_model_path

NEED_LMCACHE = [
    pytest.mark.skipif(
        importlib.util.find_spec("lmcache") is None and os.environ.get("CUVEE_REQUIRE_LMCACHE") != "1",
        reason="LMCache is not installed",
    ),
    # Of the handlers that LMCache gives each of its loggers, in modules that it imports late.
    pytest.mark.filterwarnings("ignore:`LoggingHandler` in `opentelemetry-sdk` is deprecated:DeprecationWarning"),
]

LAYERS, HEADS, DIM = 6, 2, 64  # of the bundled model
CHUNK = 32  # tokens
MODEL = str(bundled_model_path())
PLUGIN = {
    "type": "plugin", "module_path": "cuvee.integrations.lmcache.l2_adapter", "class_name": "CuveeL2Adapter",
}  # fmt: skip
PARAMS = {"model": MODEL, "model_name": "served", "chunk_tokens": CHUNK, "dtype": "bfloat16"}


def real(name: str) -> ModuleType:
    """Import one of LMCache's modules, or of ours that import them."""
    os.environ["LMCACHE_TRACK_USAGE"] = "false"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about devices that are not there
        return importlib.import_module(name)


def object_key(number: int, *, rank: int = 0, ranks: int = 1, **changes: Any) -> Any:
    """Return LMCache's key of a chunk."""
    api = real("lmcache.v1.distributed.api")
    kv_rank = api.ObjectKey.ComputeKVRank(ranks, rank, ranks, rank)
    given = {"chunk_hash": number.to_bytes(32, "big"), "model_name": "served", "kv_rank": kv_rank, **changes}
    return api.ObjectKey(**given)


def layout_desc(shape: Sequence[int] | None = None, dtype: torch.dtype = torch.bfloat16, *, ranks: int = 1) -> Any:
    """Return LMCache's description of a chunk's memory: by default keys and values of a rank, apart."""
    api = real("lmcache.v1.distributed.api")
    given = (2, LAYERS, CHUNK, HEADS // ranks * DIM) if shape is None else shape
    return api.MemoryLayoutDesc([torch.Size(given)], [dtype])


def values(number: int, desc: Any) -> torch.Tensor:
    """Return values of a chunk, which depend on its number: smooth, so that they compress."""
    shape = desc.shapes[0]
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(number))
    return (noise + 3 * torch.arange(shape[-1]).sin()).to(desc.dtypes[0])


def configured(*adapters: dict[str, Any], **flags: Any) -> Any:
    """Return LMCache's configuration, as its command line makes it."""
    config = real("lmcache.v1.distributed.config")
    parser = config.add_storage_manager_args(argparse.ArgumentParser())
    given = {"l1-size-gb": 0.2, "eviction-policy": "LRU", **flags}
    arguments = ["--no-l1-use-lazy", *(text for name, value in given.items() for text in (f"--{name}", str(value)))]
    for adapter in adapters:
        arguments += ["--l2-adapter", json.dumps(adapter)]
    return config.parse_args_to_config(parser.parse_args(arguments))


def plugin(params: dict[str, Any], **beside: Any) -> dict[str, Any]:
    """Return the JSON of `--l2-adapter`, without the parameters that are None."""
    given = {name: value for name, value in {**PARAMS, **params}.items() if value is not None}
    return {**PLUGIN, "adapter_params": given, **beside}


def make_adapter(params: dict[str, Any]) -> Any:
    """Return the adapter, made by LMCache's factory."""
    config = configured(plugin(params)).l2_adapter_config.adapters[0]
    return real("lmcache.v1.distributed.l2_adapters").create_l2_adapter(config, None)


class Server:
    """LMCache's storage manager: memory, controllers, eviction, and our adapter.

    Attributes:
        manager: of LMCache.
        adapter: ours, made by its factory.
    """

    def __init__(self, params: dict[str, Any], *, beside: dict[str, Any] | None = None, **flags: Any) -> None:
        manager = real("lmcache.v1.distributed.storage_manager")
        self.manager = manager.StorageManager(configured(plugin(params, **(beside or {})), **flags))
        ((_, self.adapter),) = self.manager.l2_adapters()
        self._closed = False
        self._written = self._done = 0
        self._submitted: dict[int, int] = {}  # number of keys by task
        submit, pop = self.adapter.submit_store_task, self.adapter.pop_completed_store_tasks

        def submitting(keys: Sequence[Any], objects: Sequence[Any]) -> int:
            task = int(submit(keys, objects))
            self._submitted[task] = len(keys)
            return task

        def popping() -> Any:
            results = pop()
            self._done += sum(self._submitted[task] for task in results)
            return results

        self.adapter.submit_store_task, self.adapter.pop_completed_store_tasks = submitting, popping

    def write(self, numbers: Sequence[int], desc: Any, **key: Any) -> None:
        """Write chunks into LMCache's memory, from where its controller stores them."""
        keys = [object_key(number, **key) for number in numbers]
        reserved = self.manager.reserve_write(keys, desc)
        assert len(reserved) == len(keys)
        for number, each in zip(numbers, keys, strict=True):
            reserved[each].get_tensor(0).copy_(values(number, desc))
        self.manager.finish_write(keys)
        self._written += len(keys)

    def store(self, numbers: Sequence[int], desc: Any, **key: Any) -> None:
        """Write chunks and wait until the adapter's tasks are done, then forget the chunks in memory."""
        self.write(numbers, desc, **key)
        wait_until(lambda: self._done == self._written)
        self.manager.clear(force=True)

    def fetch(self, numbers: Sequence[int], desc: Any, **key: Any) -> int:
        """Prefetch chunks from the adapter and compare them; return how many from the first on were there."""
        api = real("lmcache.v1.distributed.api")
        keys = [object_key(number, **key) for number in numbers]
        spec = api.PrefetchTaskSpec([api.GroupedObjectKeys(keys, keys[0].object_group_id, desc)])
        handle = self.manager.submit_prefetch_task(spec)
        assert self.manager.wait_prefetch_status(handle, 60)
        result = self.manager.query_prefetch_status(handle)
        found = int(result.hit_cells[0].count_leading_ones())
        if found:
            with self.manager.read_prefetched_results(keys[:found]) as objects:
                assert objects is not None
                for number, memory in zip(numbers, objects, strict=False):
                    assert torch.equal(bits(memory.get_tensor(0)), bits(values(number, desc))), number
            self.manager.finish_read_prefetched(keys[:found])
        self.manager.clear(force=True)
        return found

    def close(self) -> None:
        """End the controllers, then the adapter. May be called more than once."""
        if not self._closed:
            self._closed = True
            self.manager.close()
