"""An engine without a model: both sides of the connector, and around them what vLLM's scheduler and worker do.

The KV of a token follows from the tokens up to it, so it can be checked at any time whether the pages hold what they
must.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from tests.integrations.stores.dict_store import DictStore
from tests.integrations.vllm.injection import kept
from tests.integrations.vllm.sides import (
    BLOCK,
    BLOCKS,
    IDENTITY,
    LAYOUT,
    Bench,
    generate,
    make_request,
    patience,
    scheduled,
)
from tests.waiting import PATIENCE

from cuvee.codec.paged import PagedCache
from cuvee.integrations.identity.lora_files import Adapters
from cuvee.integrations.vllm.messages import Blend, StepPlan
from cuvee.integrations.vllm.metrics import Recorder
from cuvee.integrations.vllm.scheduler.side import SchedulerSide

STEP = 24  # tokens of a request per step
BLENDING = {"segment_tokens": 12, "min_context": 0}  # segments of 4 tokens and more, of which 16 are reused
_KINDS = 1009
_NOISE = torch.randn(2, 3, _KINDS, 2, 16, generator=torch.Generator().manual_seed(5)).bfloat16()


class Wrong(AssertionError):
    """The engine would have ended, waited for ever, or taken KV for what it is not."""


def _truth(ids: Sequence[int], salt: str | None) -> torch.Tensor:
    """KV of all tokens, `[2, layers, tokens, heads, dim]`."""
    name, names = hash(salt or "") % _KINDS, []
    for token in ids:
        name = (name * 31 + token + 7) % 1_000_003
        names.append(name % _KINDS)
    return _NOISE[:, :, names]


class _Blender:
    """Computes everything: the KV of a blend is exact."""

    def __init__(self, engine: SmallEngine) -> None:
        self._engine = engine

    def agree(self, well: bool) -> bool:
        return well

    def begin(self, blend: Blend, end: int) -> _Blending:
        return _Blending(self._engine, blend, end)


class _Blending:
    """One blend, in two slices: the first half of its tokens, then the rest."""

    def __init__(self, engine: SmallEngine, blend: Blend, end: int) -> None:
        self._engine, self._blend = engine, blend
        self._bounds = [blend.start, (blend.start + end) // 2, end]
        self.done = False
        self.checked_from: float | None = None
        self.tokens = {"reused": 0, "recomputed": 0, "new": end - blend.start}
        self.kl: float | None = None

    def advance(self, budget: float) -> float:
        blend, (start, end) = self._blend, self._bounds[:2]
        self._engine.write(blend.tokens, self._engine.salt_of(blend.blocks), blend.blocks, start, end)
        del self._bounds[0]
        self.done = len(self._bounds) == 1
        return float(end - start)


class SmallEngine:
    """Requests in, finished requests out. Every answer of the connector is checked as vLLM asserts it.

    Args:
        store: of both sides.
        options: of the connector.
    """

    def __init__(self, store: DictStore | None = None, **options: Any) -> None:
        options = {"decide": "always", "min_tokens": 16, "blend": BLENDING, "lookup_timeout": PATIENCE, **options}
        self.bench = Bench(store=store, setup={"remote_workers": True}, **options)
        self.store, self.worker = self.bench.store, self.bench.worker
        self.cache: PagedCache = self.bench.cache
        self.recorder = Recorder()
        self.side = SchedulerSide(self.bench.setup, IDENTITY, self.store, self.recorder, Adapters())
        self.blender = _Blender(self)
        self.free = list(range(BLOCKS))
        self.blocks: dict[str, list[int]] = {}
        self.wanted: dict[str, int] = {}
        self.waiting: list[SimpleNamespace] = []
        self.loading: list[SimpleNamespace] = []
        self.running: list[SimpleNamespace] = []
        self.gone: dict[str, SimpleNamespace] = {}  # aborted while they were loading
        self.done: list[str] = []

    # Requests ----------------------------------------------------------------------------------------------------

    def submit(self, name: str, ids: Sequence[int], wanted: int = 3, **changes: Any) -> SimpleNamespace:
        """A new request for so many tokens."""
        request = make_request(name, ids=ids, **changes)
        self.wanted[name] = wanted
        self.waiting.append(request)
        self.side.arrived(request)
        return request

    def abort(self, name: str) -> None:
        """The client goes."""
        for requests in (self.waiting, self.loading, self.running):
            for request in requests:
                if request.request_id == name:
                    requests.remove(request)
                    if requests is self.loading:
                        self.gone[name] = request
                        self._end(request, free=False)
                    else:
                        self._end(request)
                    return

    def preempt(self, name: str) -> None:
        """Take a running request's blocks."""
        for request in list(self.running):
            if request.request_id == name:
                self.running.remove(request)
                self.free += self.blocks.pop(name)
                request.num_computed_tokens = 0
                self.waiting.insert(0, request)

    def run(self) -> None:
        """Step until all requests have ended, and all is stored."""
        for _ in patience():
            if not (self.waiting or self.loading or self.running or self.gone):
                self.step()  # what the last ones left behind
                self.bench.drain()
                return
            self.step()
        left = {name: [r.request_id for r in getattr(self, name)] for name in ("waiting", "loading", "running")}
        raise Wrong(f"never ended: {left}, {list(self.gone)}, {len(self.worker.saves._sizes)} chunks")

    def close(self) -> None:
        """Both sides, and what they must not keep."""
        self.run()
        self.worker.close()
        self.side.close()
        if left := kept(self.side, self.worker):
            raise Wrong(f"kept: {str(left)[:2000]}")
        if sorted(self.free) != list(range(BLOCKS)):
            raise Wrong(f"blocks are lost: {self.free}")

    # Steps -------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One step, in vLLM's order."""
        self._schedule()
        planned = [(r, r.num_computed_tokens, min(STEP, r.num_tokens - r.num_computed_tokens)) for r in self.running]
        plan: StepPlan = self.side.plan(scheduled(planned, lambda name: (self.blocks[name],)))
        if pickle.loads(pickle.dumps(plan)) != plan:
            raise Wrong("a plan changes on its way")
        for request, before, count in planned:
            request.num_computed_tokens = before + count
        worker = self.worker
        worker.begin_step(plan.step, plan.confirmed)
        worker.saves.save(plan.last_saves)
        worker.settle(plan.step, plan.names, plan.coding)
        worker.loads.start(plan.loads)
        worker.loads.drop(plan.drops)
        worker.blends.advance(plan.blends, plan.blend_tokens, self.blender)  # type: ignore[arg-type]  # not vLLM's layers
        for request, before, count in planned:
            blocks = self.blocks[request.request_id]
            self.write(request.all_token_ids, request.cache_salt, blocks, before, before + count)
        worker.end_step()
        worker.saves.save(plan.saves)
        arrived = worker.loads.take_arrived(0.002 if plan.idle else 0.0)
        invalid = worker.loads.take_invalid_blocks()
        report = worker.report(plan.step)
        for key, value in (report.metrics or {}).items():
            key.encode()
            if type(value) is not float and (type(value) is not int or not -(1 << 63) <= value < 1 << 63):
                raise Wrong(f"cannot be sent: {key!r} {value!r}")
        self._invalidate(invalid)
        for request, before, count in planned:
            if before + count == request.num_tokens:
                self._sampled(request)
        self.side.take(report)
        for name in arrived:
            self._arrive(name)

    def _schedule(self) -> None:
        for request in list(self.waiting):
            name, computed = request.request_id, request.num_computed_tokens
            tokens = 0
            if not computed:
                answer = self.side.matched_tokens(request, 0)
                if answer[0] is None:
                    continue
                tokens = answer[0]
                if not 0 <= tokens < request.num_tokens or answer[1] is not bool(tokens):
                    raise Wrong(f"{answer} for {request.num_tokens} tokens")
                need = -(-(request.num_tokens + self.wanted[name]) // BLOCK)
                if need > len(self.free):
                    break
                self.blocks[name] = [self.free.pop() for _ in range(need)]
            blocks = self.blocks[name]
            self.side.allocated(request, [blocks[: -(-tokens // BLOCK)] if tokens else list(blocks)], tokens)
            self.waiting.remove(request)
            request.num_computed_tokens = computed + tokens
            (self.loading if tokens else self.running).append(request)

    def _invalidate(self, invalid: set[int]) -> None:
        for request in self.loading:
            held = self.blocks[request.request_id][: -(-request.num_computed_tokens // BLOCK)]
            bad = [at for at, block in enumerate(held) if block in invalid]
            if bad:
                request.num_computed_tokens = bad[0] * BLOCK
        for request in self.running:
            if invalid & set(self.blocks[request.request_id]):
                raise Wrong(f"blocks of {request.request_id}, which loads nothing, are invalid")

    def _arrive(self, name: str) -> None:
        if name in self.gone:
            self.free += self.blocks.pop(self.gone.pop(name).request_id)
            return
        found = [request for request in self.loading if request.request_id == name]
        if not found:
            raise Wrong(f"{name} arrived, but did not wait")
        (request,) = found
        self.loading.remove(request)
        self._check(request)
        if not request.num_computed_tokens:
            self.free += self.blocks.pop(name)
        self.waiting.insert(0, request)

    def _sampled(self, request: SimpleNamespace) -> None:
        generate(request, 1)
        self.wanted[request.request_id] -= 1
        if not self.wanted[request.request_id]:
            self.running.remove(request)
            self._check(request)
            self.done.append(request.request_id)
            self._end(request)

    def _end(self, request: SimpleNamespace, free: bool = True) -> None:
        self.side.outcome(request)
        blocks = self.blocks.get(request.request_id, [])
        self.side.finished(request, [list(blocks)])
        if free:
            self.free += self.blocks.pop(request.request_id, [])

    # Pages -------------------------------------------------------------------------------------------------------

    def salt_of(self, blocks: Sequence[int]) -> str | None:
        """Whose request has these blocks."""
        name = next(name for name, held in self.blocks.items() if held[: len(blocks)] == list(blocks))
        everyone = [*self.waiting, *self.loading, *self.running, *self.gone.values()]
        salt: str | None = next(request.cache_salt for request in everyone if request.request_id == name)
        return salt

    def write(self, ids: Sequence[int], salt: str | None, blocks: Sequence[int], start: int, end: int) -> None:
        """Compute tokens into their pages."""
        keys, values = _truth(ids[:end], salt)[:, :, start:]
        self.cache.write(list(keys), list(values), _slots(blocks, start, end))

    def _check(self, request: SimpleNamespace) -> None:
        """What counts as computed is in the pages."""
        tokens = request.num_computed_tokens
        if not tokens:
            return
        truth = _truth(request.all_token_ids[:tokens], request.cache_salt)
        held = self.cache.read(_slots(self.blocks[request.request_id], 0, tokens), 0)
        for layer in range(len(LAYOUT.layers)):
            if not torch.equal(held.keys[layer], truth[0, layer]) or not torch.equal(
                held.values[layer], truth[1, layer]
            ):
                raise Wrong(f"{request.request_id}: the first {tokens} tokens are not in the pages of layer {layer}")


def _slots(blocks: Sequence[int], start: int, end: int) -> torch.Tensor:
    tokens = torch.arange(start, end)
    return torch.tensor(blocks)[tokens // BLOCK] * BLOCK + tokens % BLOCK
