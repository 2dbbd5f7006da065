"""The scheduler's side: what is in the store, what pays to load, what is new and to be stored.

    new request -> keys of its chunks -> ask the store (in the background) -> load, or recompute
    each step   -> chunks that became complete -> to be stored

Runs in the engine's loop: nothing here waits for a store longer than a millisecond.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from cuvee.codec.identity import Identity, Media, PrefixChain, Scope, store_key
from cuvee.integrations.stores import Store
from cuvee.integrations.stores.threads import Crew
from cuvee.integrations.vllm.decision import BreakEven, Estimate
from cuvee.integrations.vllm.messages import Load, Report, Save, StepPlan
from cuvee.integrations.vllm.metrics import Recorder
from cuvee.integrations.vllm.setup import Setup

logger = logging.getLogger(__name__)

_PATIENCE = 1e-3  # seconds a step of the engine waits for lookups, all together, before it goes on and asks again
_LOOKUP_AGE = 10.0  # seconds after which an answer is asked for anew: entries may have been evicted
# Share of `lookup_timeout` after which a call of the store is to blame for a lookup that took too long.
_HANGS = 0.5
_LOOKUP_BATCH = 64  # chunks a question to the store; most prefixes end early
_KNOWN = 1 << 20  # digests remembered as stored
_KNOWN_AGE = 60.0  # seconds they are believed; then the worker asks the store again
_LEAST_PREFILL = 16  # prompt tokens of a step that tells anything about the speed of prefill


@dataclass(slots=True)
class _Lookup:
    """A question to the store: of the first `limit` chunks, how many are there in a row?"""

    limit: int
    asked: float
    answer: Future[int]


@dataclass(slots=True)
class _Tracked:
    """What is known of a request."""

    request: Any
    tenant: str
    chain: PrefixChain
    lookup: _Lookup | None = None
    found: int = 0  # chunks in the store, by the last answer
    settled: bool = False  # the answer was judged and counted; the engine may ask again
    refused: bool = False  # nothing is loaded for it any more: too slow, declined or failed once
    stale: bool = False  # computed some tokens before a reset: nothing of it is stored
    saved: int = 0  # chunks that need not be stored (again)


class SchedulerSide:
    """Decides for every request what to load and what to store.

    Args:
        setup: of the engine.
        identity: of its blobs.
        store: looked into, never read from.
        recorder: takes the figures of all ranks.
        adapter_identity: names the weights of an adapter, by name and path.
        own_store: no worker has this store object, so nobody else counts what goes wrong with it.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        setup: Setup,
        identity: Identity,
        store: Store,
        recorder: Recorder,
        adapter_identity: Callable[[str, str], str],
        own_store: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = setup.options
        self._loads_at_all, self._stores_at_all = setup.loads, setup.stores
        self._chunk = setup.options.chunk_tokens
        self._block = setup.block_tokens
        self._positions = setup.layout.max_positions
        self._identity = identity
        self._shards = setup.shards
        self._key_ids = setup.options.key_ids() or (b"",)
        self._store = store
        self._recorder = recorder
        self._adapter_identity = adapter_identity
        self._own_store = own_store
        self._troubles: dict[str, tuple[int, int]] = {}  # errors and skipped operations by tier, as counted so far
        self._clock = clock
        self._pool = Crew(4, "cuvee-lookup", self._options.lookup_timeout)
        self._requests: dict[str, _Tracked] = {}
        self._loads: dict[str, Load] = {}
        self._shares_loads = setup.prefix_caching
        self._under_way: dict[str, list[bytes]] = {}  # digests of the load of a request
        self._loading: dict[bytes, str] = {}  # and whose load they are in
        self._distrusted = -1.0  # lookups from before this time are not believed: a load failed
        self._known: OrderedDict[bytes, float] = OrderedDict()
        self._break_even = BreakEven()
        self._step = 0
        self._patience = _PATIENCE
        self._timed_steps: dict[int, tuple[int, float]] = {}

    # Requests --------------------------------------------------------------------------------------------------

    def arrived(self, request: Any) -> None:
        """A new request: ask for it now, so that the answer is there when its turn comes."""
        tracked = self._track(request)
        if tracked is not None and self._worth_asking(request, 0):
            self._ask(tracked, (request.num_tokens - 1) // self._chunk)

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens after the first `computed` that can be loaded, and whether asynchronously; None: ask again."""
        tracked = self._track(request)
        if tracked is None or tracked.refused or not self._worth_asking(request, computed):
            return 0, False
        limit = (request.num_tokens - 1) // self._chunk  # the last token is computed: its output is what is asked for
        found = self._look_up(tracked, limit)
        if found is None:
            return None, False
        tracked.found = found
        tokens = found * self._chunk - computed
        if tokens >= self._options.least_tokens and self._is_loaded_by_another(tracked, computed):
            return None, False
        result = "miss" if not found else ("hit" if found == limit else "partial")
        if tokens < self._options.least_tokens:
            tokens, result = 0, "miss" if not found else result
        elif not tracked.settled and not self._pays(tokens):
            tokens, result, tracked.refused = 0, "declined", True
        if not tracked.settled:
            tracked.settled = True
            self._recorder.count("lookups", label=result)
        return tokens, bool(tokens)

    def allocated(self, request: Any, blocks: list[int], tokens: int) -> None:
        """The engine allocated `blocks` for the request and wants `tokens` of them loaded (0: none)."""
        tracked = self._track(request)
        if tracked is None or not tokens:
            return
        end = tracked.found * self._chunk
        start = end - tokens
        first = start // self._chunk
        digests = tracked.chain.digests(request.all_token_ids, tracked.found)[first:]
        self._under_way[request.request_id] = digests
        for digest in digests:
            self._loading.setdefault(digest, request.request_id)
        self._loads[request.request_id] = Load(
            request.request_id,
            tracked.tenant,
            digests,
            first,
            start,
            end,
            blocks[first * self._chunk // self._block : end // self._block],
        )
        tracked.saved = max(tracked.saved, tracked.found)

    def finished(self, request: Any) -> None:
        """The request is done or was aborted."""
        tracked = self._requests.pop(request.request_id, None)
        self._loads.pop(request.request_id, None)
        self._load_is_over(request.request_id)
        if tracked is not None and tracked.lookup is not None:
            tracked.lookup.answer.cancel()

    # Steps -----------------------------------------------------------------------------------------------------

    def plan(self, output: Any) -> StepPlan:
        """Loads and stores of the step that the engine has just scheduled (its `SchedulerOutput`)."""
        self._step += 1
        self._patience = _PATIENCE
        plan = StepPlan(self._step, list(self._loads.values()), idle=not output.total_num_scheduled_tokens)
        self._loads.clear()
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        prompt_tokens = 0
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            before = computed[request_id]
            prompt_tokens += max(min(before + scheduled, tracked.request.num_prompt_tokens) - before, 0)
            if self._stores_at_all and not tracked.stale:
                plan.saves += self._new_chunks(tracked, before, before + scheduled, output.kv_connector_block_state)
        mostly_prefill = 2 * prompt_tokens >= max(output.total_num_scheduled_tokens, 2 * _LEAST_PREFILL)
        if mostly_prefill and (self._options.load_async or not plan.loads):
            self._timed_steps[self._step] = (prompt_tokens, self._clock())
        return plan

    def take(self, report: Report) -> None:
        """What the workers say about the steps before."""
        now = self._clock()
        timed = [self._timed_steps.pop(step) for step in report.steps if step in self._timed_steps]
        for tokens, begun in timed:
            self._break_even.observe_prefill(tokens, max(now - begun, 1e-6))
        for tokens, seconds in report.loaded:
            self._break_even.observe_load(tokens, max(seconds, 1e-6))
        for request_id in report.ended:
            self._load_is_over(request_id)
        if report.failed:
            self._distrusted = now
        for request_id in report.failed:
            tracked = self._requests.get(request_id)
            if tracked is not None:  # it would only fail again
                tracked.refused = True
        for digest in report.unsaved:
            self._known.pop(digest, None)
        if report.metrics is not None:
            self._recorder.absorb(report.metrics)
        if self._own_store:
            self._count_troubles()
        estimate = self._break_even.estimate if timed or report.loaded else None
        if estimate is not None:
            self._recorder.gauge("break_even_tokens", estimate.break_even)
            self._recorder.gauge("prefill_tokens_per_second", estimate.prefill_rate)
            self._recorder.gauge("load_tokens_per_second", estimate.load_rate)
            if self._break_even.changed():
                logger.info("cuvee: %s", self._break_even.describe())

    def reset(self) -> None:
        """Find nothing that was stored until now: the weights may have changed. The store keeps its entries."""
        self._identity = replace(self._identity, model=f"{self._identity.model} reset {uuid4().hex}")
        self._known.clear()
        for tracked in self._requests.values():
            tracked.chain = self._chain(tracked.request)
            tracked.lookup, tracked.found, tracked.saved = None, 0, 0
            tracked.stale = tracked.request.num_computed_tokens > 0

    def close(self) -> None:
        """Stop asking the store, and say what was done. Waits for nothing."""
        self._pool.dismiss(0, cancel=True)
        logger.info("cuvee: %s; %s", self._recorder.summary(), self._break_even.describe())

    # Parts -----------------------------------------------------------------------------------------------------

    def _track(self, request: Any) -> _Tracked | None:
        """State of a request; None of one whose tokens do not say what is cached."""
        tracked = self._requests.get(request.request_id)
        if tracked is not None:
            return tracked
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            return None
        if request.resumable:  # a session with streamed input: tokens that were hashed may be replaced
            return None
        tracked = _Tracked(request, self._tenant(request), self._chain(request))
        self._requests[request.request_id] = tracked
        return tracked

    def _tenant(self, request: Any) -> str:
        return request.cache_salt or self._options.tenant

    def _chain(self, request: Any) -> PrefixChain:
        lora = request.lora_request
        media = tuple(
            Media(item.mm_position.offset, item.mm_position.offset + item.mm_position.length, item.identifier)
            for item in request.mm_features
        )
        adapter = "" if lora is None else self._adapter_identity(lora.lora_name, lora.lora_path)
        return PrefixChain(self._identity, Scope(self._tenant(request), adapter, media), self._chunk)

    def _is_loaded_by_another(self, tracked: _Tracked, computed: int) -> bool:
        """Whether the next chunk is on its way for another request: soon the engine has it, and one load is enough."""
        if not self._shares_loads:
            return False
        digests = tracked.chain.digests(tracked.request.all_token_ids, tracked.found)
        owner = self._loading.get(digests[computed // self._chunk])
        return owner is not None and owner != tracked.request.request_id

    def _load_is_over(self, request_id: str) -> None:
        for digest in self._under_way.pop(request_id, ()):
            if self._loading.get(digest) == request_id:
                del self._loading[digest]

    @property
    def estimate(self) -> Estimate | None:
        """The rates behind the decision to load or to compute; None until both were measured often enough."""
        return self._break_even.estimate

    def _pays(self, tokens: int) -> bool:
        return self._options.decide == "always" or self._break_even.worth_loading(tokens)

    def _worth_asking(self, request: Any, computed: int) -> bool:
        """Whether enough tokens after the first `computed` could be found."""
        could = (request.num_tokens - 1) // self._chunk * self._chunk - computed
        return self._loads_at_all and not request.skip_reading_prefix_cache and could >= self._options.least_tokens

    def _ask(self, tracked: _Tracked, limit: int) -> _Lookup:
        """Send off the question how many of the first `limit` chunks are there."""
        digests = tracked.chain.digests(tracked.request.all_token_ids, limit)
        tracked.lookup = _Lookup(limit, self._clock(), self._pool.submit(self._find, tracked.tenant, digests))
        tracked.settled = False
        return tracked.lookup

    def _look_up(self, tracked: _Tracked, limit: int) -> int | None:
        """How many of the first `limit` chunks are there; None: not known yet."""
        now = self._clock()
        lookup = tracked.lookup
        stale = lookup is not None and (
            lookup.limit != limit or now - lookup.asked > _LOOKUP_AGE or lookup.asked <= self._distrusted
        )
        if lookup is None or (stale and lookup.answer.done()):
            lookup = self._ask(tracked, limit)
        found = self._answer(lookup)
        if found is None:
            if now - lookup.asked <= self._options.lookup_timeout:
                return None
            tracked.refused = tracked.settled = True
            self._recorder.count("lookups", label="timeout")
            # What hangs costs this request its patience; the next ones shall not lose theirs to the same.
            lookup.answer.cancel()
            self._store.overdue("contains", _HANGS * self._options.lookup_timeout)
            return 0
        found = min(found, limit)
        for digest in tracked.chain.digests(tracked.request.all_token_ids, limit)[found:]:
            self._known.pop(digest, None)  # it is not there, or not known to be, whatever was believed
        for digest in tracked.chain.digests(tracked.request.all_token_ids, found):
            self._is_known(digest)
        return found

    def _answer(self, lookup: _Lookup) -> int | None:
        """The answer, if it is there or comes while this step's patience lasts."""
        begun = time.monotonic()
        try:
            return lookup.answer.result(self._patience)
        except FutureTimeout:
            return None
        finally:
            self._patience = max(self._patience - (time.monotonic() - begun), 0)

    def _find(self, tenant: str, digests: list[bytes]) -> int:
        """How many chunks in a row are there, on every rank; 0 if the store fails, which it counts."""
        begun = self._clock()
        found = 0
        try:
            for first in range(0, len(digests), _LOOKUP_BATCH):
                batch = digests[first : first + _LOOKUP_BATCH]
                there = self._contains(tenant, batch)
                for at in range(len(batch)):
                    if not all(there[at * self._shards : (at + 1) * self._shards]):
                        return found
                    found += 1
            return found
        except Exception:
            logger.exception("cuvee: a lookup failed; its request is computed")
            self._recorder.count("failures", label="lookup")
            return 0
        finally:
            self._recorder.count("lookup_seconds", self._clock() - begun)

    def _contains(self, tenant: str, digests: list[bytes]) -> list[bool]:
        """Whether each rank's part of each chunk is there, with a tag of any accepted secret: rank by rank."""
        parts = [(digest, rank) for digest in digests for rank in range(self._shards)]
        there = [False] * len(parts)
        for key_id in self._key_ids:
            missing = [at for at, found in enumerate(there) if not found]
            if not missing:
                break
            keys = [store_key(tenant, *parts[at], key_id) for at in missing]
            for at, found in zip(missing, self._store.contains(keys), strict=True):
                there[at] = found
        return there

    def _count_troubles(self) -> None:
        for tier, now in self._store.counters().items():
            errors, skipped = self._troubles.get(tier, (0, 0))
            self._recorder.count("store_errors", now.errors - errors, tier)
            self._recorder.count("store_skipped", now.skipped - skipped, tier)
            self._troubles[tier] = now.errors, now.skipped

    def _new_chunks(self, tracked: _Tracked, before: int, after: int, block_state: Any) -> Iterable[Save]:
        """Chunks of a request that this step completes (tokens `before … after` are computed in it)."""
        request = tracked.request
        # What is sampled in this step has no KV yet; under asynchronous scheduling its tokens are not known either.
        known = request.num_tokens if self._options.store_generated else request.num_prompt_tokens
        if self._positions is not None:
            known = min(known, self._positions)
        done = min(after, known) // self._chunk
        first = min(tracked.saved, before // self._chunk)  # fewer than saved: a load failed, or it was preempted
        if done <= first:
            return []
        digests = tracked.chain.digests(request.all_token_ids, done)
        tracked.saved = done
        wanted = [chunk for chunk in range(first, done) if not self._is_known(digests[chunk])]
        if not wanted:
            return []
        blocks = block_state.get_block_ids(request.request_id)[0]
        per_chunk = self._chunk // self._block
        return [
            Save(tracked.tenant, digests[chunk], chunk, list(blocks[chunk * per_chunk : (chunk + 1) * per_chunk]))
            for chunk in wanted
        ]

    def _is_known(self, digest: bytes) -> bool:
        """Whether a chunk was stored a moment ago; remembers that it is now."""
        now = self._clock()
        if now - self._known.get(digest, -_KNOWN_AGE) < _KNOWN_AGE:
            return True
        self._known[digest] = now
        self._known.move_to_end(digest)
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)
        return False
