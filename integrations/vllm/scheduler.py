"""The scheduler's side: what is in the store, what pays to load, what is new and to be stored.

    new request -> keys of its chunks -> ask the store (in the background) -> load, or recompute
    each step   -> chunks that became complete -> to be stored
    prompt done, request done -> the blocks after the last whole chunk, its tail -> to be stored

A tail has a key of its own, made of the chunks before it and of its tokens. Only two of a request are stored: one where
its prompt ends and one where it ends itself, because a tail for every block would write each token of a chunk many
times over. A lookup prefers the whole chunk, then the longest tail. So a chunk or a longer tail supersedes a tail by
being found first; nobody deletes the shorter one. It is all that is left to a request that takes another way from
there: the same prompt again, an answer that is asked for anew, a chat template that drops the reasoning of earlier
answers. Those may be another replica's requests, of which this one knows nothing. A tail that nobody asks for is the
first that the store evicts.

What a chunk adds to a tail that was loaded is coded together with what the tail was decoded to. That is exact at
lossless. A learned profile codes each token by itself and finds the same numbers again: the squared error grows by 2 to
3 % once, and then no more. The generic profile scales a chunk by its own tokens, so its error grew eightfold over 15
such tails: with it, there are none.

Runs in the engine's loop: nothing here waits for a store longer than a millisecond, and no error gets out of here. A
request that one is about is not cached from there on: it is computed, and nothing of it is stored. If the engine waits
for its load already, the workers report that as failed.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import uuid4

from cuvee.codec.identity import Identity, Media, PrefixChain, Scope, store_key
from cuvee.codec.profiles.quality import LOSSLESS
from cuvee.integrations.stores import Store
from cuvee.integrations.stores.threads import ThreadPool
from cuvee.integrations.vllm.blending.planning import BlendPlanner, Segmented, least_slice
from cuvee.integrations.vllm.decision import BlendPays, BreakEven, Estimate, load_work
from cuvee.integrations.vllm.guard import Guard
from cuvee.integrations.vllm.lookups import THREADS, Asking, Lookup, Lookups, Question
from cuvee.integrations.vllm.messages import Blend, Load, Report, Save, StepPlan
from cuvee.integrations.vllm.metrics import Recorder
from cuvee.integrations.vllm.setup import Setup

logger = logging.getLogger(__name__)

_PATIENCE = 1e-3  # seconds a step of the engine waits for lookups, all together, before it goes on and asks again
_LOOKUP_AGE = 10.0  # seconds after which an answer is asked for anew: entries may have been evicted
# Share of `lookup_timeout` after which a call of the store hangs. It is asked for few keys, whatever a lookup takes.
_HANGS = 0.5
_KNOWN = 1 << 20  # digests remembered as stored
_KNOWN_AGE = 60.0  # seconds they are believed; then the worker asks the store again
_LONGEST_NAME = 4096  # characters of a salt or of an image's id: they are hashed again for every key
_LEAST_PREFILL = 16  # prompt tokens of a step that tells anything about the speed of prefill


@dataclass(frozen=True, slots=True)
class _Found:
    """What is in the store of a prompt, on every rank.

    Attributes:
        chunks: whole ones, in a row.
        tail: tokens of the longest tail after them; 0: there is none.
        digest: of that tail.
        absent: digests of the tails that were asked for and are not there.
    """

    chunks: int = 0
    tail: int = 0
    digest: bytes = b""
    absent: tuple[bytes, ...] = ()


_NOTHING = _Found()


@dataclass(slots=True)
class _Lookup:
    """A question to the store: what is there of a prompt of so many tokens?"""

    tokens: int
    asked: float
    lookup: Lookup[_Found]

    @property
    def answer(self) -> Future[_Found]:
        """To come."""
        return self.lookup.answer


@dataclass(slots=True)
class _Tracked:
    """What is known of a request."""

    request: Any
    tenant: str
    chain: PrefixChain
    lookup: _Lookup | None = None
    found: _Found = _NOTHING  # in the store, by the last answer
    end: int = 0  # and how many of the prompt's tokens that can give
    computed: int = 0  # tokens that have KV in the blocks the request has now, once its last step is over
    settled: bool = False  # the answer was judged and counted; the engine may ask again
    refused: bool = False  # nothing is loaded for it any more: too slow, or failed once
    declined: bool = False  # its prefix is quicker computed than loaded
    stale: bool = False  # computed some tokens before a reset: nothing of it is stored
    saved: int = 0  # chunks that need not be stored (again)
    segmented: Segmented | None = None  # what of it may be blended
    blend: Blend | None = None  # what was offered to the engine last, and where that ends
    blend_end: int = 0


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
        separator: token ids of blending's separator, if it has one.
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
        separator: Sequence[int] | None = None,
    ) -> None:
        self._options = setup.options
        self._role = setup.loads, setup.stores
        self._loads_at_all, self._stores_at_all = self._role
        self._chunk = setup.options.chunk_tokens
        self._block = setup.block_tokens
        self._positions = setup.layout.max_positions
        self._step_tokens = setup.step_tokens
        self._tails = setup.quality == LOSSLESS or bool(setup.profile.learned)
        self._identity = identity
        self._shards = setup.shards
        self._key_ids = setup.options.key_ids() or (b"",)
        self._store = store
        self._recorder = recorder
        self._adapter_identity = adapter_identity
        self._own_store = own_store
        self._troubles: dict[str, tuple[int, int]] = {}  # errors and skipped operations by tier, as counted so far
        self._clock = clock
        self._pool = ThreadPool(THREADS, "cuvee-lookup", self._options.lookup_timeout)
        self._lookups = Lookups(self._pool, self._contains, setup.shards, self._options.lookup_timeout)
        self._guard = Guard(recorder)
        self._requests: dict[str, _Tracked] = {}
        self._uncached: set[str] = set()  # requests that are neither loaded nor stored, until they end
        self._promised: dict[str, int] = {}  # tokens in front of what a request was told that it can load
        self._loads: dict[str, Load] = {}
        self._voids: dict[str, list[int]] = {}  # as in `StepPlan`
        self._shares_loads = setup.prefix_caching
        self._under_way: dict[str, list[bytes]] = {}  # digests of the load of a request
        self._loading: dict[bytes, str] = {}  # and whose load they are in
        self._distrusted = -1.0  # lookups from before this time are not believed: a load failed
        self._known: OrderedDict[bytes, float] = OrderedDict()
        self._break_even = BreakEven()
        self._step = 0
        self._patience = _PATIENCE
        self._timed_steps: dict[int, tuple[int, float]] = {}
        self._last_saves: list[Save] = []  # of requests that ended since the last step was planned
        self._placed: dict[str, int] = {}  # ranks that have placed the segments of a request
        self._ready: list[str] = []  # requests that all ranks can recompute, or have begun to
        self._drops: list[str] = []
        self._planner: BlendPlanner | None = None
        if setup.options.blend is not None:
            self._planner = BlendPlanner(
                setup.options.blend, identity, self._block, self._lookups, self._overdue, recorder,
                self._options.lookup_timeout, self._options.decide == "always", self._positions, separator,
                clock,
            )  # fmt: skip

    # Requests --------------------------------------------------------------------------------------------------

    def arrived(self, request: Any) -> None:
        """A new request: ask for it now, so that the answer is there when its turn comes."""
        with self._guard("arrived", partial(self._give_up, request.request_id)):
            self._arrive(request)

    def _arrive(self, request: Any) -> None:
        tracked = self._track(request)
        if tracked is None:
            return
        if self._planner is not None:
            tracked.segmented = self._planner.segment(request, tracked.tenant)
        if self._worth_asking(request, 0):
            self._ask(tracked)
            if self._planner is not None and tracked.segmented is not None:
                self._planner.ask(tracked.segmented, tracked.tenant)

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens after the first `computed` that can be loaded, and whether asynchronously; None: ask again."""
        tokens: int | None = 0
        with self._guard("matched_tokens", partial(self._give_up, request.request_id)):
            tokens = self._match(request, computed)
            if tokens:
                self._promised[request.request_id] = computed
        return tokens, bool(tokens)

    def _match(self, request: Any, computed: int) -> int | None:
        tracked = self._track(request)
        if tracked is None or tracked.refused:
            return 0
        tokens = self._prefix_tokens(tracked, computed) if self._worth_asking(request, computed) else 0
        if tokens is not None and self._planner is not None and tracked.segmented is not None and not tracked.refused:
            tokens = self._blended_tokens(tracked, tracked.segmented, self._planner, computed, tokens)
        return tokens

    def _prefix_tokens(self, tracked: _Tracked, computed: int) -> int | None:
        """How many tokens after the first `computed` can be loaded and continue what is there; None: ask again."""
        request = tracked.request
        found = self._look_up(tracked)
        if found is None:
            return None
        usable = self._usable(request.num_tokens)
        coded = found.chunks * self._chunk + found.tail
        tracked.found, tracked.end = found, min(coded, usable)
        tokens = tracked.end - computed
        if tokens >= self._options.least_tokens and self._is_loaded_by_another(tracked, computed):
            return None
        result = "miss" if not coded else ("hit" if tracked.end == usable else "partial")
        if tokens < self._options.least_tokens or tracked.declined:
            tokens = 0
        elif not tracked.settled and not self._pays(tracked, computed):
            tokens, result, tracked.declined = 0, "declined", True
        if not tracked.settled:
            tracked.settled = True
            self._recorder.count("lookups", label=result)
        return tokens

    def _blended_tokens(
        self, tracked: _Tracked, segmented: Segmented, planner: BlendPlanner, computed: int, tokens: int
    ) -> int | None:
        """As many, or those up to the end of a blend that goes on from there; None: ask again."""
        tracked.blend = None
        begun = time.monotonic()
        blend = planner.offer(tracked.request, segmented, computed + tokens, self._patience)
        self._patience = max(self._patience - (time.monotonic() - begun), 0)
        if blend is True:
            return None
        if not isinstance(blend, Blend):
            return tokens
        last = blend.pieces[-1]
        tracked.blend = blend
        tracked.blend_end = min(last.start + last.tokens, tracked.request.num_prompt_tokens - 1)
        return tracked.blend_end - computed

    def allocated(self, request: Any, blocks: list[int], tokens: int) -> None:
        """The engine allocated `blocks` for the request and wants `tokens` of them loaded (0: none)."""
        first = self._promised.pop(request.request_id, 0) // self._block

        def give_up() -> None:
            if tokens:  # the engine waits for them
                self._loads.pop(request.request_id, None)
                self._voids[request.request_id] = list(blocks[first:])
            self._give_up(request.request_id)

        with self._guard("allocated", give_up):
            self._allocate(request, blocks, tokens)

    def _allocate(self, request: Any, blocks: list[int], tokens: int) -> None:
        tracked = self._track(request)
        if tracked is None:
            if tokens:
                raise LookupError(f"{tokens} tokens are to be loaded for a request that is not cached")
            return
        tracked.computed = 0  # these are other blocks than it had before, if it had any
        if not tokens:
            return
        blend = tracked.blend
        end = tracked.end if blend is None else tracked.blend_end
        start = end - tokens
        first = start // self._chunk
        digests = self._entries(tracked)[first:] if blend is None or blend.start > start else []
        if blend is not None:
            blend.blocks = blocks[: -(-end // self._block)]
            self._placed[request.request_id] = 0
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
            blocks[first * self._chunk // self._block : -(-end // self._block)],
            tracked.found.tail if digests else 0,
            blend,
        )
        tracked.saved = max(tracked.saved, tracked.found.chunks)

    def finished(self, request: Any, blocks: Sequence[int]) -> None:
        """The request is done or was aborted; `blocks` are those it had, which are free now.

        They keep what they hold until the next step begins: that is when its tail is copied.
        """
        tracked = self._requests.get(request.request_id)
        with self._guard("finished"):
            if tracked is not None and self._stores_at_all and not tracked.stale:
                self._last_saves += self._last_tail(tracked, blocks)
        with self._guard("finished"):
            if tracked is not None:
                self._forget_lookups(tracked)
        self._requests.pop(request.request_id, None)
        self._uncached.discard(request.request_id)
        self._promised.pop(request.request_id, None)
        self._loads.pop(request.request_id, None)
        self._voids.pop(request.request_id, None)
        with self._guard("finished"):
            self._drop(request.request_id)
        with self._guard("finished"):
            self._load_is_over(request.request_id)

    def _last_tail(self, tracked: _Tracked, blocks: Sequence[int]) -> list[Save]:
        """The tail of a request that has ended."""
        request = tracked.request
        # A preempted request has no blocks, and none of its tokens count as computed. The last token's KV is left out:
        # where the engine plans ahead it may be there, but nobody is told.
        end = min(tracked.computed, request.num_computed_tokens, request.num_tokens - 1, len(blocks) * self._block)
        return self._tail(tracked, min(end, self._storable(tracked)), blocks)

    def _give_up(self, request_id: str, reason: str = "error") -> None:
        """Neither load nor store anything for a request from here on. What a worker loads for it goes on to its end,
        but it is blended no more.
        """
        tracked = self._requests.pop(request_id, None)
        known = request_id in self._uncached
        self._uncached.add(request_id)
        self._drop(request_id)
        if tracked is not None:
            self._forget_lookups(tracked)
        if not known:
            self._recorder.count("uncached", label=reason)

    # Steps -----------------------------------------------------------------------------------------------------

    def plan(self, output: Any) -> StepPlan:
        """Loads and stores of the step that the engine has just scheduled (its `SchedulerOutput`)."""
        self._step += 1
        self._patience = _PATIENCE
        plan = StepPlan(self._step, list(self._loads.values()), voids=self._voids)
        self._loads.clear()
        saves, self._last_saves, self._voids = self._last_saves, [], {}
        with self._guard("plan", partial(self._not_saved, saves)):
            plan.last_saves = self._unchanged(saves, output)
        ready = list(self._ready)
        with self._guard("plan", partial(self._drop_all, ready)):
            plan.blend_tokens = self._blend_tokens(output.total_num_scheduled_tokens)
            plan.blends = ready
        plan.idle = not output.total_num_scheduled_tokens and not plan.blends
        plan.drops, self._drops = self._drops, []
        with self._guard("plan"):
            self._plan_requests(plan, output)
        return plan

    def _plan_requests(self, plan: StepPlan, output: Any) -> None:
        """What a step completes is to be stored; and time the step, if it tells the speed of prefill."""
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        prompt_tokens = 0
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            with self._guard("plan", partial(self._give_up, request_id)):
                before = computed[request_id]
                prompt_tokens += max(min(before + scheduled, tracked.request.num_prompt_tokens) - before, 0)
                tracked.computed = before + scheduled
                if self._stores_at_all and not tracked.stale:
                    plan.saves += self._new_saves(tracked, before, before + scheduled, output.kv_connector_block_state)
        mostly_prefill = 2 * prompt_tokens >= max(output.total_num_scheduled_tokens, 2 * _LEAST_PREFILL)
        if mostly_prefill and not plan.blends and (self._options.load_async or not plan.loads):
            self._timed_steps[self._step] = (prompt_tokens, self._clock())

    def take(self, report: Report) -> None:
        """What the workers say about the steps before."""
        with self._guard("take", partial(self._drop_all, report.placed)):
            self._take_blends(report)
        for request_id in report.failed:
            with self._guard("take", partial(self._give_up, request_id)):
                self._refuse(request_id)
            with self._guard("take"):
                self._drop(request_id)
        for request_id in report.ended:
            with self._guard("take"):
                self._load_is_over(request_id)
        for digest in report.unsaved:
            self._known.pop(digest, None)
        with self._guard("take"):
            if report.failed:
                self._distrusted = self._clock()
        with self._guard("take"):
            if report.metrics is not None:
                self._recorder.absorb(report.metrics)
        with self._guard("take"):
            if self._own_store:
                self._count_troubles()
        with self._guard("take"):
            self._take_rates(report)

    def _refuse(self, request_id: str) -> None:
        """A request's load failed: it would only fail again."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        tracked.refused = True
        if tracked.segmented is not None and tracked.blend is not None and self._planner is not None:
            self._planner.refuse(tracked.segmented, "failed")

    def _take_rates(self, report: Report) -> None:
        """What was measured about the speed of loading and of computing."""
        now = self._clock()
        timed = [self._timed_steps.pop(step) for step in report.steps if step in self._timed_steps]
        for tokens, begun in timed:
            for decision in self._decisions:
                decision.observe_prefill(tokens, max(now - begun, 1e-6))
        for tokens, seconds in report.loaded:
            self._break_even.observe_load(tokens, max(seconds, 1e-6))
        estimate = self._break_even.estimate if timed or report.loaded else None
        if estimate is not None:
            self._recorder.gauge("break_even_tokens", estimate.break_even)
            self._recorder.gauge("prefill_tokens_per_second", estimate.prefill_rate)
            self._recorder.gauge("load_tokens_per_second", estimate.load_rate)
            if self._break_even.changed():
                logger.info("cuvee: %s", self._break_even.describe())

    def reset(self) -> bool:
        """Find nothing that was stored until now: the weights may have changed. The store keeps its entries.

        Returns:
            whether that is so. If not, nothing is loaded or stored until a reset succeeds: it may be of other weights.
        """
        self._known.clear()
        self._last_saves.clear()
        with self._guard("reset", self._stop):
            self._rename()
            self._loads_at_all, self._stores_at_all = self._role
            return True
        return False

    def _rename(self) -> None:
        """Another identity, for requests that are under way, too."""
        self._identity = replace(self._identity, model=f"{self._identity.model} reset {uuid4().hex}")
        if self._planner is not None:
            self._planner.identity = self._identity
        for request_id, tracked in list(self._requests.items()):
            with self._guard("reset", partial(self._give_up, request_id)):
                self._forget_lookups(tracked)
                tracked.chain = self._chain(tracked.request)
                tracked.lookup, tracked.found, tracked.end, tracked.saved = None, _NOTHING, 0, 0
                tracked.stale = tracked.request.num_computed_tokens > 0
                if tracked.segmented is not None and self._planner is not None:
                    self._planner.rename(tracked.segmented, tracked.request, tracked.tenant)

    def _stop(self) -> None:
        """Load and store nothing."""
        self._loads_at_all = self._stores_at_all = False
        for request_id in list(self._requests):
            self._give_up(request_id)

    def told(self, request: Any) -> dict[str, Any] | None:
        """What the client of a request learns of its blend; None: nothing was to be blended."""
        with self._guard("told"):
            tracked = self._requests.get(request.request_id)
            segmented = None if tracked is None else tracked.segmented
            return None if segmented is None else segmented.told
        return None

    def close(self) -> None:
        """Stop asking the store, and say what was done. Waits for nothing."""
        with self._guard("close"):
            self._pool.dismiss(0, cancel=True)
        with self._guard("close"):
            logger.info("cuvee: %s; %s", self._recorder.summary(), self._break_even.describe())

    # Parts -----------------------------------------------------------------------------------------------------

    def _track(self, request: Any) -> _Tracked | None:
        """State of a request; None of one that is not cached."""
        tracked = self._requests.get(request.request_id)
        if tracked is not None and tracked.request is request:
            return tracked
        if request.request_id in self._uncached:
            return None
        reason = self._why_uncached(request)
        if request.request_id in self._under_way:  # of another request of this name, which never ended
            reason = reason or "error"
        if reason:
            self._give_up(request.request_id, reason)
            return None
        tracked = _Tracked(request, self._tenant(request), self._chain(request))
        self._requests[request.request_id] = tracked
        return tracked

    def _why_uncached(self, request: Any) -> str:
        """Why nothing is cached of a request whose tokens do not say what its KV is, or for whom; empty: it may be."""
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            return "embeddings"
        if request.resumable:  # a session with streamed input: tokens that were hashed may be replaced
            return "streamed"
        # Servers take the salt and the names of images from clients as they are.
        salt = request.cache_salt
        if salt is not None and not (isinstance(salt, str) and len(salt) <= _LONGEST_NAME):
            return "salt"
        for item in request.mm_features:
            start, tokens, name = item.mm_position.offset, item.mm_position.length, item.identifier
            if not (isinstance(start, int) and isinstance(tokens, int) and isinstance(name, str)):
                return "media"
            if not (0 <= start < start + tokens <= request.num_prompt_tokens and 0 < len(name) <= _LONGEST_NAME):
                return "media"
        return ""

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
        owner = self._loading.get(self._entries(tracked)[computed // self._chunk])
        return owner is not None and owner != tracked.request.request_id

    @property
    def _decisions(self) -> list[BreakEven | BlendPays]:
        """Both are about the same computing."""
        return [self._break_even, *([self._planner.pays] if self._planner is not None else [])]

    def _take_blends(self, report: Report) -> None:
        """Where every rank has placed a request's segments, it can be recomputed: by all of them in one step."""
        for request_id in report.placed:
            if request_id in self._placed:
                self._placed[request_id] += 1
                if self._placed[request_id] == self._shards:
                    del self._placed[request_id]
                    self._ready.append(request_id)
            else:  # another rank failed, or the request has ended
                self._drops.append(request_id)
        if self._planner is not None:
            for done in report.blended:
                self._planner.pays.observe(done)

    def _blend_tokens(self, scheduled: int) -> int:
        """Tokens that blends may compute in a step for which the engine has scheduled some itself.

        They get what is left of a step, and a share even of a full one: else they would never end on a busy engine.
        """
        return max(self._step_tokens - scheduled, least_slice(self._step_tokens))

    def _drop(self, request_id: str) -> None:
        """A blend that is under way is not to be finished: ranks that wait with it give it up."""
        if self._placed.pop(request_id, None) or request_id in self._ready:
            self._ready = [other for other in self._ready if other != request_id]
            self._drops.append(request_id)

    def _drop_all(self, request_ids: Sequence[str]) -> None:
        """None of these blends is to be finished, whatever is known of them."""
        for request_id in request_ids:
            self._placed.pop(request_id, None)
        self._ready = [other for other in self._ready if other not in request_ids]
        self._drops += request_ids

    def _not_saved(self, saves: Sequence[Save]) -> None:
        """What was to be stored is not, whatever is believed."""
        for save in saves:
            self._known.pop(save.digest, None)

    def _load_is_over(self, request_id: str) -> None:
        if request_id in self._ready:
            self._ready.remove(request_id)
        for digest in self._under_way.pop(request_id, ()):
            if self._loading.get(digest) == request_id:
                del self._loading[digest]

    @property
    def estimate(self) -> Estimate | None:
        """The rates behind the decision to load or to compute; None until both were measured often enough."""
        return self._break_even.estimate

    def _pays(self, tracked: _Tracked, computed: int) -> bool:
        """Whether it pays to load what was found after the first `computed` tokens."""
        if self._options.decide == "always":
            return True
        found = tracked.found
        work = load_work(max(found.chunks - computed // self._chunk, 0), found.tail, self._chunk)
        return self._break_even.worth_loading(tracked.end - computed, work)

    def _usable(self, tokens: int) -> int:
        """How much of a prompt of so many tokens can be loaded: whole blocks, and not the last token, which is
        computed, because its output is what is asked for. Without tails, no more than its whole chunks hold.
        """
        blocks = min(tokens - 1, self._addressed(tokens)) // self._block * self._block
        return blocks if self._tails else min(blocks, self._addressed(tokens) // self._chunk * self._chunk)

    def _addressed(self, tokens: int) -> int:
        """How many of so many tokens have positions that the model has: nothing beyond is stored, and none decodes."""
        return tokens if self._positions is None else min(tokens, self._positions)

    def _storable(self, tracked: _Tracked) -> int:
        """How many of a request's tokens may be stored once they have KV: those before the first that is not exact."""
        request = tracked.request
        # What is sampled in a step has no KV yet; under asynchronous scheduling its tokens are not known either.
        known: int = request.num_tokens if self._options.store_generated else request.num_prompt_tokens
        segmented = tracked.segmented
        exact = known if segmented is None or segmented.exact is None else segmented.exact
        return min(self._addressed(known), exact)

    def _entries(self, tracked: _Tracked) -> list[bytes]:
        """Digests of what was found, in order."""
        chunks = tracked.chain.digests(tracked.request.all_token_ids, tracked.found.chunks)
        return [*chunks, tracked.found.digest] if tracked.found.tail else chunks

    def _tail_sizes(self, tokens: int, chunk: int) -> list[int]:
        """Tokens that a tail of this chunk may have, to be of use to a prompt of so many tokens; longest first."""
        start = chunk * self._chunk
        if not self._tails or start >= self._usable(tokens):
            return []
        most = min(self._chunk, self._addressed(tokens) - start + 1)
        return list(range(self._block, most, self._block))[::-1]

    def _worth_asking(self, request: Any, computed: int) -> bool:
        """Whether enough tokens after the first `computed` could be found."""
        could = self._usable(request.num_tokens) - computed
        return self._loads_at_all and not request.skip_reading_prefix_cache and could >= self._options.least_tokens

    def _ask(self, tracked: _Tracked) -> _Lookup:
        """Send off the question what is there of a request's tokens."""
        tokens = tracked.request.num_tokens
        digests = self._whole(tracked, tokens)
        asking = self._find(tracked.chain, tracked.request.all_token_ids, tokens, digests)
        tracked.lookup = _Lookup(tokens, self._clock(), self._lookups.begin(tracked.tenant, asking, _NOTHING))
        tracked.settled = False
        return tracked.lookup

    def _whole(self, tracked: _Tracked, tokens: int) -> list[bytes]:
        """Digests of the whole chunks among a request's first tokens that are of use: of the last, maybe a part is."""
        limit = min(self._addressed(tokens) // self._chunk, -(-self._usable(tokens) // self._chunk))
        return tracked.chain.digests(tracked.request.all_token_ids, limit)

    def _look_up(self, tracked: _Tracked) -> _Found | None:
        """What is there of a request's tokens; None: not known yet."""
        now = self._clock()
        lookup = tracked.lookup
        stale = lookup is not None and (
            lookup.tokens != tracked.request.num_tokens
            or now - lookup.asked > _LOOKUP_AGE
            or lookup.asked <= self._distrusted
        )
        if lookup is None or (stale and lookup.answer.done()):
            lookup = self._ask(tracked)
        found = self._answer(lookup)
        if found is None:
            if now - lookup.asked <= self._options.lookup_timeout:
                return None
            self._overdue()
            found = lookup.lookup.settle()
            if not found.chunks and not found.tail:
                tracked.refused = tracked.settled = True
                self._recorder.count("lookups", label="timeout")
                return _NOTHING
        if lookup.tokens != tracked.request.num_tokens:  # a question that still waits for its answer; ask anew then
            return None
        whole = self._whole(tracked, lookup.tokens)
        for digest in (*whole[found.chunks :], *found.absent):
            self._known.pop(digest, None)  # it is not there, or not known to be, whatever was believed
        for digest in whole[: found.chunks] + [found.digest] * bool(found.tail):
            self._is_known(digest)
        return found

    def _answer(self, lookup: _Lookup) -> _Found | None:
        """The answer, if it is there or comes while this step's patience lasts."""
        begun = time.monotonic()
        try:
            return lookup.answer.result(self._patience)
        except FutureTimeout:
            return None
        finally:
            self._patience = max(self._patience - (time.monotonic() - begun), 0)

    def _overdue(self) -> None:
        """A lookup took too long. What hangs cost this request its patience, and shall cost no other one its own."""
        self._store.overdue("contains", _HANGS * self._options.lookup_timeout)

    def _forget_lookups(self, tracked: _Tracked) -> None:
        """Nobody waits for a request's lookups any more: what is still to be asked is not."""
        if tracked.lookup is not None:
            tracked.lookup.answer.cancel()
        if tracked.segmented is not None:
            tracked.segmented.forget_lookup()

    def _find(self, chain: PrefixChain, ids: Sequence[int], tokens: int, digests: Sequence[bytes]) -> Asking[_Found]:
        """What is there, on every rank, of the first `tokens` of `ids`, whose whole chunks have these digests.

        Nothing if the store fails, which it counts.
        """
        begun = self._clock()
        try:
            found = yield from self._find_in_parts(chain, ids, tokens, digests)
        except Exception:
            logger.exception("cuvee: a lookup failed; its request is computed")
            self._recorder.count("failures", label="lookup")
            found = _NOTHING
        self._recorder.count("lookup_seconds", self._clock() - begun)
        return found

    def _find_in_parts(
        self, chain: PrefixChain, ids: Sequence[int], tokens: int, digests: Sequence[bytes]
    ) -> Asking[_Found]:
        """All tails of a chunk are one question: those of the prompt's last chunk go along with the last whole ones,
        those of a chunk that is missing need another.
        """
        size = self._lookups.batch
        for first in range(0, max(len(digests), 1), size):
            batch = digests[first : first + size]
            chunk = first + len(batch)
            sizes = self._tail_sizes(tokens, chunk) if chunk == len(digests) else []
            tails = chain.tails(ids, chunk, sizes)
            there = yield Question([*batch, *tails], _Found(first))
            if not all(there[: len(batch)]):
                chunk = first + there.index(False)
                sizes = self._tail_sizes(tokens, chunk)
                tails = chain.tails(ids, chunk, sizes)
                there = yield Question(tails, _Found(chunk))
                return _longest(chunk, sizes, tails, there)
        return _longest(chunk, sizes, tails, there[len(batch) :])

    def _contains(self, tenant: str, digests: Sequence[bytes]) -> list[bool]:
        """Whether each entry is there, every rank's part of it, with a tag of any accepted secret."""
        parts = [(digest, rank) for digest in digests for rank in range(self._shards)]
        there = [False] * len(parts)
        for key_id in self._key_ids:
            missing = [at for at, found in enumerate(there) if not found]
            if not missing:
                break
            keys = [store_key(tenant, *parts[at], key_id) for at in missing]
            for at, found in zip(missing, self._store.contains(keys), strict=True):
                there[at] = found
        return [all(there[at : at + self._shards]) for at in range(0, len(there), self._shards)]

    def _count_troubles(self) -> None:
        for tier, now in self._store.counters().items():
            before = self._troubles.get(tier, (0, 0))
            self._troubles[tier] = now.errors, now.skipped
            for name, value, last in zip(("store_errors", "store_skipped"), self._troubles[tier], before, strict=True):
                self._recorder.count(name, value - last if value >= last else value, tier)  # less: it was opened anew

    def _new_saves(self, tracked: _Tracked, before: int, after: int, block_state: Any) -> list[Save]:
        """Chunks of a request that this step completes (tokens `before … after` are computed in it), and the tail of
        its prompt, if this step computes the end of that.
        """
        request = tracked.request
        segments = self._new_segments(tracked, after, block_state)
        done = min(after, self._storable(tracked)) // self._chunk
        first = min(tracked.saved, before // self._chunk)  # fewer than saved: a load failed, or it was preempted
        prompt_ends = before < request.num_prompt_tokens <= after
        if done <= first and not prompt_ends:
            return segments
        digests = tracked.chain.digests(request.all_token_ids, max(done, first))
        tracked.saved = max(done, first)
        wanted = [chunk for chunk in range(first, done) if not self._is_known(digests[chunk])]
        if not wanted and not prompt_ends:
            return segments
        blocks = block_state.get_block_ids(request.request_id)[0]
        per_chunk = self._chunk // self._block
        saves = [
            Save(tracked.tenant, digests[chunk], chunk, list(blocks[chunk * per_chunk : (chunk + 1) * per_chunk]))
            for chunk in wanted
        ]
        end = min(request.num_prompt_tokens, self._storable(tracked))
        return saves + (self._tail(tracked, end, blocks) if prompt_ends else []) + segments

    def _new_segments(self, tracked: _Tracked, after: int, block_state: Any) -> list[Save]:
        """Segments of a prompt whose last token this step computes, or an earlier one did, and that are new."""
        segmented = tracked.segmented
        if segmented is None or self._planner is None:
            return []
        harvest = self._planner.harvest(segmented, self._addressed(after))
        new = [at for at in harvest if not self._is_known(segmented.digests[at])]
        if not new:
            return []
        blocks = block_state.get_block_ids(tracked.request.request_id)[0]
        return [
            Save(
                tracked.tenant, segmented.digests[at], 0,
                list(blocks[start // self._block : -(-end // self._block)]), segment=(start, end - start),
            )
            for at in new
            for start, end in [segmented.spans[at]]
        ]  # fmt: skip

    def _tail(self, tracked: _Tracked, end: int, blocks: Sequence[int]) -> list[Save]:
        """The tail of a request's first `end` tokens, which have KV in `blocks`: the whole blocks after the last whole
        chunk. None if that was stored a moment ago, or if there are too few tokens ever to be loaded.
        """
        chunk, tokens = divmod(end // self._block * self._block, self._chunk)
        if not self._tails or not tokens or chunk * self._chunk + tokens < self._options.least_tokens:
            return []
        ids = tracked.request.all_token_ids
        tracked.chain.digests(ids, chunk)
        (digest,) = tracked.chain.tails(ids, chunk, [tokens])
        if self._is_known(digest):
            return []
        first = chunk * self._chunk // self._block
        return [Save(tracked.tenant, digest, chunk, list(blocks[first : first + tokens // self._block]), tokens)]

    def _unchanged(self, saves: list[Save], output: Any) -> list[Save]:
        """Without those whose blocks the engine overwrites before the step begins, by zeros or by copies of others."""
        overwritten = set(output.new_block_ids_to_zero or ())
        overwritten.update(block for copied in output.kv_cache_block_copies or () for block in copied)
        kept = [save for save in saves if overwritten.isdisjoint(save.blocks)]
        for save in saves:
            if save not in kept:
                self._known.pop(save.digest, None)
        return kept

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


def _longest(chunk: int, sizes: Sequence[int], tails: Sequence[bytes], there: Sequence[bool]) -> _Found:
    """What there is after `chunk` whole chunks: of the tails, longest first, the first that is there."""
    at = next((at for at, found in enumerate(there) if found), len(there))
    absent = tuple(digest for digest, found in zip(tails, there, strict=True) if not found)
    return _Found(chunk, sizes[at], tails[at], absent) if at < len(there) else _Found(chunk, absent=absent)
