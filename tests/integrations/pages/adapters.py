"""The adapters that keep an engine's pages, each behind its engine's own classes, as one kind of thing.

    save     the engine offloads the first pages of a sequence       load    it restores them, compared bit for bit
    found    it asks how many of them, from the first on, are there

A sequence is a number; its pages depend on it, unless they are those of a given chunk.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.integrations.lmcache import real_lmcache, test_l2_adapter
from tests.integrations.sglang import real_sglang, test_hicache
from tests.integrations.stores.dict_store import DictStore
from tests.integrations.vllm.engines import need_vllm
from tests.integrations.vllm_tier import real_tiers
from tests.waiting import PATIENCE, wait_until

from cuvee.calibration.bundled import bundled_model_path
from cuvee.codec.chunk import KVChunk
from cuvee.integrations.identity.checkpoint import read_layout

MODEL = str(bundled_model_path())
MOST = 8  # pages of a sequence


class Adapter:
    """An adapter over a store that tests can break.

    Args:
        store: what it writes to; `cuvee.integrations.pages.opening.open_store` must return it.
        options: of the adapter.
        dtype: of the engine's cache.
        chunk: the pages of all sequences; None: smooth random numbers.

    Attributes:
        page: tokens per page.
        layout: of the cache.
    """

    page = 16

    def __init__(
        self,
        store: DictStore,
        options: dict[str, Any],
        dtype: torch.dtype = torch.bfloat16,
        chunk: KVChunk | None = None,
    ) -> None:
        self.store, self.chunk = store, chunk
        given = {"model": MODEL, "load_timeout": PATIENCE, "lookup_timeout": PATIENCE, **options}
        self.layout = read_layout(given["model"], dtype)
        self.open(given, dtype)

    def open(self, options: dict[str, Any], dtype: torch.dtype) -> None:
        raise NotImplementedError

    def submit(self, count: int, sequence: int = 0) -> None:
        """Have pages stored, in the background where the engine does so."""
        raise NotImplementedError

    def settle(self) -> None:
        """Wait until all that was submitted has ended, and forget the pages in the engine."""

    def save(self, count: int, sequence: int = 0) -> None:
        self.submit(count, sequence)
        self.settle()

    def load(self, count: int, sequence: int = 0, expected: Sequence[KVChunk] | None = None) -> int:
        """Restore pages and compare them; return how many, from the first on, were restored."""
        raise NotImplementedError

    def found(self, count: int, sequence: int = 0) -> int:
        raise NotImplementedError

    @property
    def counters(self) -> dict[str, float]:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def content(self, number: int, sequence: int = 0) -> KVChunk:
        """Page number `number` of a sequence."""
        if self.chunk is not None:
            return self.chunk.slice(number * self.page, (number + 1) * self.page)
        return real_tiers.values(100 * sequence + number, self.layout, self.page)

    def pages(self, count: int, sequence: int = 0) -> list[torch.Tensor]:
        """Keys of each layer, then values, of some pages: `[tokens, heads, dim]`."""
        parts = [self.content(number, sequence) for number in range(count)]
        return [torch.cat(own) for own in zip(*([*part.keys, *part.values] for part in parts), strict=True)]

    def tokens(self, count: int, sequence: int = 0) -> list[int]:
        """Token ids, by which SGLang names pages."""
        return random.Random(sequence).choices(range(4096), k=MOST * self.page)[: count * self.page]

    def same(
        self, found: Sequence[torch.Tensor], count: int, sequence: int, expected: Sequence[KVChunk] | None
    ) -> bool:
        """Whether these are the pages, as in `pages`; or what is expected of each."""
        wanted = self.pages(count, sequence)
        if expected is not None:
            own = ([*part.keys, *part.values] for part in expected[:count])
            wanted = [torch.cat(each) for each in zip(*own, strict=True)]
        return all(map(torch.equal, found, wanted))


class Tier(Adapter):
    page = real_tiers.CHUNK

    def open(self, options: dict[str, Any], dtype: torch.dtype) -> None:
        need_vllm()
        layer = self.layout.layers[0]
        shape = {"layers": self.layout.num_layers, "heads": layer.kv_heads, "dim": layer.head_dim}
        given = {**options, "store": "memory://?max_gb=0.009"}
        name = str(dtype).removeprefix("torch.")
        self.engine = real_tiers.Engine(given, dtype=name, model=options["model"], chunks=64, **shape)
        self._contexts: list[Any] = []

    def submit(self, count: int, sequence: int = 0) -> None:
        chunks = [self.content(number, sequence) for number in range(count)]
        self._contexts.append(self.engine.offload(self._numbers(count, sequence), chunks))

    def settle(self) -> None:
        self.engine.settle()
        while self._contexts:
            self.engine.manager.on_request_finished(self._contexts.pop())
        self.engine.forget()

    def load(self, count: int, sequence: int = 0, expected: Sequence[KVChunk] | None = None) -> int:
        wanted = expected or [self.content(number, sequence) for number in range(count)]
        loaded = self.engine.load(self._numbers(count, sequence), wanted)
        self.engine.forget()
        return loaded

    def found(self, count: int, sequence: int = 0) -> int:
        # What is found is loaded into the primary tier as well.
        found = self.engine.lookup(self._numbers(count, sequence))
        self.engine.forget()
        return found

    def _numbers(self, count: int, sequence: int) -> list[int]:
        return [100 * sequence + number for number in range(count)]

    @property
    def counters(self) -> dict[str, float]:
        return self.engine.counters

    def close(self) -> None:
        self.engine.close()


class L2(Adapter):
    page = real_lmcache.CHUNK

    def open(self, options: dict[str, Any], dtype: torch.dtype) -> None:
        layer, params = self.layout.layers[0], {**options, "chunk_tokens": self.page}
        params["dtype"] = str(dtype).removeprefix("torch.")
        shape = 2, self.layout.num_layers, self.page, layer.key_values
        self._desc = real_lmcache.layout_desc(shape, dtype)
        self.memory = test_l2_adapter.Memory(self.store, params)
        self._tasks: set[int] = set()

    def _keys(self, count: int, sequence: int) -> list[Any]:
        return [real_lmcache.object_key(100 * sequence + number) for number in range(count)]

    def submit(self, count: int, sequence: int = 0) -> None:
        objects = [self.memory.object(self._desc) for _ in range(count)]
        for number, each in enumerate(objects):
            each.get_tensor(0).copy_(test_l2_adapter.split_values(self.content(number, sequence)))
        self._tasks.add(self.memory.adapter.submit_store_task(self._keys(count, sequence), objects))

    def settle(self) -> None:
        def done() -> bool:
            self._tasks -= self.memory.adapter.pop_completed_store_tasks().keys()
            return not self._tasks

        wait_until(done)

    def load(self, count: int, sequence: int = 0, expected: Sequence[KVChunk] | None = None) -> int:
        adapter, objects = self.memory.adapter, [self.memory.object(self._desc) for _ in range(count)]
        task = adapter.submit_load_task(self._keys(count, sequence), objects)
        there = set(test_l2_adapter.result_of(lambda: adapter.query_load_result(task)).get_indices_list())
        for number in there:
            wanted = self.content(number, sequence) if expected is None else expected[number]
            assert torch.equal(objects[number].get_tensor(0), test_l2_adapter.split_values(wanted))
        return next((number for number in range(count) if number not in there), count)

    def found(self, count: int, sequence: int = 0) -> int:
        adapter, keys = self.memory.adapter, self._keys(count, sequence)
        task = adapter.submit_lookup_and_lock_task(keys, {0: self._desc})
        there = test_l2_adapter.result_of(lambda: adapter.query_lookup_and_lock_result(task)).get_indices_list()
        adapter.submit_unlock([keys[number] for number in there])
        return next((number for number in range(count) if number not in there), count)

    @property
    def counters(self) -> dict[str, float]:
        return self.memory.counters

    def close(self) -> None:
        self.memory.adapter.close()


class HiCache(Adapter):
    def open(self, options: dict[str, Any], dtype: torch.dtype) -> None:
        layer = self.layout.layers[0]
        pool = real_sglang.host_pool(
            "layer_first", layers=self.layout.num_layers, heads=layer.kv_heads, dim=layer.head_dim,
            page_tokens=self.page, pages=2 * MOST, dtype=dtype,
        )  # fmt: skip
        self.rank = test_hicache.Rank({**options, "store": "memory://?max_gb=0.009"}, pool=pool)

    def submit(self, count: int, sequence: int = 0) -> None:
        at, layers = self.rank.alloc(count), self.layout.num_layers
        values = torch.stack(self.pages(count, sequence))
        self.rank.pool.kv_buffer[:, :, at] = values.view(2, layers, *values.shape[1:])
        self.rank.back_up(self.tokens(count, sequence), at, [])
        self.rank.pool.free(at)

    def load(self, count: int, sequence: int = 0, expected: Sequence[KVChunk] | None = None) -> int:
        into = self.rank.alloc(count)
        loaded = self.rank.prefetch(self.tokens(count, sequence), into)
        assert loaded % self.page == 0
        if loaded:
            held = self.rank.pool.kv_buffer[:, :, into[:loaded]].flatten(0, 1)
            assert self.same([*held], loaded // self.page, sequence, expected)
        self.rank.pool.free(into)
        return loaded // self.page

    def found(self, count: int, sequence: int = 0) -> int:
        return int(self.rank.backend.batch_exists(self.rank.hashes(self.tokens(count, sequence))))

    @property
    def counters(self) -> dict[str, float]:
        counters: dict[str, float] = self.rank.backend.counters()
        return counters

    def close(self) -> None:
        self.rank.backend.close()


ADAPTERS = [
    pytest.param(Tier, id="vllm_tier"),
    pytest.param(L2, id="lmcache", marks=real_lmcache.NEED_LMCACHE),
    pytest.param(HiCache, id="hicache", marks=real_sglang.need_sglang),
]
