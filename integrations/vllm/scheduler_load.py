"""Loads of prefixes: what the store is asked for, how much of a request is loaded by when, and which are under way.

**What is worse than stored keeps no exact name.** A load may restore an entry from fewer parts than a chunk has,
because a deadline or the store left out the others. From the first such block on, the request's blocks are renamed
before the engine registers them, so that they never answer for another request, and the request stores nothing: what it
computes follows from them.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from cuvee.codec.errors import InputError
from cuvee.integrations.costs import prefill_quantities
from cuvee.integrations.guard import Once
from cuvee.integrations.vllm.block_names import set_apart
from cuvee.integrations.vllm.decision import Pays
from cuvee.integrations.vllm.lookups import Lookup
from cuvee.integrations.vllm.messages import LOADERS, Aim, Delivery, Entry, Load, Report
from cuvee.integrations.vllm.request_params import deadline_of
from cuvee.integrations.vllm.scheduler_events import SchedulerEvents
from cuvee.integrations.vllm.scheduler_lookup import PrefixSearch
from cuvee.integrations.vllm.scheduler_state import NOTHING, Found, KnownEntries, SchedulerState, Tracked
from cuvee.naming.identity import canonical

logger = logging.getLogger(__name__)

_MOST_LOADS = 2 * LOADERS  # that ranks are given at a time, so that a thread which ends one has the next
_LOOKUP_AGE = 10.0  # seconds after which the store is asked again: entries may have been evicted


class SchedulerLoads:
    """Decides what to load and keeps account of it.

    Args:
        state: of the scheduler's side.
        known: learns what is there and what is not.
        events: learns what is gone.
        pays: decides whether a load does.
        share: whether one request finds in the engine what another one loaded.
        in_part: whether loads may end early in this engine.
    """

    def __init__(
        self, state: SchedulerState, known: KnownEntries, events: SchedulerEvents, pays: Pays, share: bool,
        in_part: bool,
    ) -> None:  # fmt: skip
        self._state = state
        self._search = PrefixSearch(state)
        self._known = known
        self._events = events
        self._pays = pays
        self._share, self._in_part = share, in_part
        self._distrusted = -1.0  # lookups from before this time are not believed
        self._promised: dict[str, int] = {}  # tokens before those that a request was told it can load
        self._loads: dict[str, Load] = {}  # to be started by the next step
        # Digests of the prefix in a request's load, and the number of ranks that have not ended it.
        self._under_way: dict[str, tuple[list[bytes], int]] = {}
        self._loading: dict[bytes, str] = {}  # the request in whose load each digest is
        self._given: dict[str, Tracked] = {}  # requests that were given a load, also if they are not cached any more
        self._first_tokens: list[tuple[int, float]] = []  # steps that compute one, and by when it has to come
        self._once = Once(logger)

    def begin(self, tracked: Tracked) -> None:
        """Read a new request's deadline. One that cannot be aimed at is left out, counted, and logged once."""
        request = tracked.request
        reason, why = "engine", "windows and recurrent layers load a prefix as a whole or not at all"
        try:
            deadline = deadline_of(request.kv_transfer_params, self._state.options.deadline_ms)
        except InputError as error:
            reason, why, deadline = "parameters", str(error), 0.0
            tracked.error = tracked.error or why
        if deadline and self._in_part:
            waited = max(time.time() - request.arrival_time, 0.0)
            tracked.due = self._state.clock() - waited + deadline
        elif deadline is not None:
            self._state.recorder.count("deadlines", label="refused")
            self._once(reason, "cuvee: request %s has no deadline: %s", request.request_id, why)

    def note_step(self, tracked: Tracked, before: int, after: int, step: int) -> None:
        """Note that a step computes a request's tokens `before … after`."""
        if tracked.due is not None and before < tracked.request.num_prompt_tokens <= after:
            self._first_tokens.append((step, tracked.due))
            tracked.due = None  # there is no hurry if it is preempted from here on

    def take(self, report: Report) -> None:
        """Believe no lookup from before now if a load failed; count the deadlines of first tokens that are there."""
        now, waiting = self._state.clock(), self._first_tokens
        if report.failed:
            self._distrusted = now
        self._first_tokens = [(step, due) for step, due in waiting if step not in report.steps]
        for step, due in waiting:
            if step in report.steps:
                self._state.recorder.count("deadlines", label="met" if now <= due else "missed")

    def note_delivery(self, delivery: Delivery) -> None:
        """Note what a rank restored, before the engine hears that the load is over. What its deadline leaves out is
        computed, and not loaded after all. From the first block on that is worse than what is stored, the request's
        blocks are renamed.
        """
        tracked = self._given.get(delivery.request)
        if tracked is None:  # the request has ended
            return
        ends = list(accumulate(delivery.tokens, initial=delivery.start))
        if not delivery.complete:
            tracked.refused = True
        worse = [end for end, parts in zip(ends, delivery.parts, strict=False) if parts < self._state.parts]
        if worse:
            first = worse[0] // self._state.block
            recipe = canonical(first.to_bytes(8, "little"), bytes(delivery.parts))
            set_apart(tracked.request, first, hashlib.blake2b(recipe, digest_size=32, person=b"cuvee-parts").digest())
            tracked.unstored = "quality"

    def worth_asking(self, request: Any, computed: int) -> bool:
        """Return whether enough tokens after the first `computed` could be found."""
        state = self._state
        could = state.usable(request.num_tokens) - computed
        return state.loads and not request.skip_reading_prefix_cache and could >= state.options.least_tokens

    def ask(self, tracked: Tracked) -> Lookup[Found]:
        """Ask in the background what the store has of a request's tokens."""
        tokens, ids = tracked.request.num_tokens, tracked.request.all_token_ids
        digests = tracked.chain.digests(ids, self._state.whole(tokens))
        find = partial(self._search.find, tracked.chain, ids, tokens, digests)
        tracked.lookup = lookup = Lookup(self._state, tracked.tenant, find, NOTHING, tokens)
        tracked.settled = False
        return lookup

    def match(self, tracked: Tracked, computed: int) -> int | None:
        """Return how many tokens after the first `computed` can be loaded from a prefix; None: ask again.

        The engine asks at every step for each request that waits, so only the first time after a lookup is more than a
        glance.
        """
        request, options, lookup = tracked.request, self._state.options, tracked.lookup
        if lookup is None or (lookup.answer.done() and self._is_stale(lookup, request)):
            lookup = self.ask(tracked)
        if lookup is not tracked.learned and not self._learn(tracked, lookup):
            return None
        found, tokens = tracked.found, tracked.end - computed
        if tokens >= options.least_tokens and self._is_loaded_by_another(tracked, computed):
            return None
        coded = self._coded(found)
        result = "miss" if not coded else ("hit" if coded >= self._state.usable(request.num_tokens) else "partial")
        if tokens < options.least_tokens or tracked.declined:
            tokens = 0
        elif not tracked.settled and tracked.due is None and options.decide == "measured":  # else the load decides
            first, chunk = computed // self._state.chunk, self._state.chunk
            sizes = [chunk] * (found.chunks - first) + [found.tail] * bool(found.tail)
            tracked.declined = not self._pays.worth("load", computed, tracked.end, sizes)
        if tokens and not tracked.declined and not self.has_place(request.request_id):
            if not self._has_waited_enough(tracked, computed):
                return None
            tracked.declined = True
        if tracked.declined:
            tokens, result = 0, "declined"
        tracked.settled = True
        self._count(tracked, result)
        return tokens

    def has_place(self, request_id: str) -> bool:
        """Return whether ranks have few enough loads to be given another. What they cannot begin soon would hold blocks
        of the engine all the while.
        """
        return len((self._promised.keys() | self._under_way.keys()) - {request_id}) < _MOST_LOADS

    def _has_waited_enough(self, tracked: Tracked, computed: int) -> bool:
        """Return whether a request has waited for a load's place as long as computing it takes: then it is computed. By
        that it takes at most twice the time of the better choice, however long the queue turns out to be.
        """
        if self._state.options.decide == "always":
            return False
        if tracked.queued is None:
            tracked.queued = self._state.clock()
        computing = self._pays.prefill.marginal(*prefill_quantities(computed, tracked.end))
        return self._state.clock() - tracked.queued >= computing

    def _count(self, tracked: Tracked, result: str) -> None:
        """Count the answer to a request, once."""
        if not tracked.counted:
            tracked.counted = True
            self._state.recorder.count("lookups", label=result)

    def _coded(self, found: Found) -> int:
        """Return the end of what was found."""
        return found.stated if self._state.recurrent else found.chunks * self._state.chunk + found.tail

    def promise(self, request_id: str, computed: int) -> None:
        """Note that the engine was told of tokens to load after the first `computed`."""
        self._promised[request_id] = computed

    def take_promise(self, request_id: str) -> int:
        """Return and forget the number of tokens before those that were promised."""
        return self._promised.pop(request_id, 0)

    def allocate(self, tracked: Tracked, tables: Sequence[Sequence[int]], tokens: int) -> None:
        """Plan a load of the request's last `tokens` tokens before the end of its prefix or blend.

        Args:
            tracked: the request, with its blend if it has one.
            tables: the engine's blocks for it in each group of layers.
            tokens: to restore.
        """
        request_id, blend, sizes = tracked.request.request_id, tracked.blend, self._state.blocks
        end = tracked.end if blend is None else tracked.blend_end
        start = end - tokens
        held = [table[: -(-end // size)] for table, size in zip(tables, sizes, strict=True)]
        found, chunk = tracked.found, self._state.chunk
        names = tracked.chain.digests(tracked.request.all_token_ids, found.chunks)
        prefix = [Entry("chunk", names[at], at * chunk, chunk) for at in range(start // chunk, found.chunks)]
        if found.tail:
            prefix.append(Entry("tail", found.digest, found.chunks * chunk, found.tail))
        exact = end if blend is None else blend.start
        prefix = [entry.within(held, sizes) for entry in prefix if start < exact and entry.start < exact]
        prefix = [entry for entry in prefix if self._state.is_needed(entry)]
        digests = [entry.digest for entry in prefix]
        self._under_way[request_id] = digests, self._state.shards
        for digest in digests:
            self._loading.setdefault(digest, request_id)
        own = [*held[0][start // sizes[0] :]]
        load = Load(request_id, tracked.tenant, prefix, start, end, own, blend)
        if tracked.due is not None:
            rest = tracked.request.num_tokens - tracked.end
            load.aim = Aim(tracked.due - self._state.clock(), rest, self._pays.prefill.learned)
        if self._state.recurrent:
            state = Entry("state", found.state, end - self._state.block, self._state.block)
            load.state = state.within(held, sizes)
        self._loads[request_id], self._given[request_id] = load, tracked

    def fail(self, request_id: str, first: int, blocks: list[int]) -> None:
        """Plan a load that fails in place of a request's own, which cannot begin.

        Args:
            request_id: of the request.
            first: number of its first block that was to be restored.
            blocks: the engine's blocks from there on.
        """
        start = first * self._state.block
        self._loads[request_id] = Load(request_id, "", [], start, start + len(blocks) * self._state.block, blocks)

    def take_step(self) -> list[Load]:
        """Return and forget the loads that the next step starts."""
        loads = list(self._loads.values())
        self._loads.clear()
        return loads

    def forget(self, request_id: str) -> None:
        """Start nothing for a request that has ended, and note no more of it."""
        self._given.pop(request_id, None)
        self._promised.pop(request_id, None)
        self._loads.pop(request_id, None)

    def is_under_way(self, request_id: str) -> bool:
        """Return whether a load for a request of this id has not ended yet."""
        return request_id in self._under_way

    def ended(self, request_id: str) -> bool:
        """Note that a rank has ended the load of a request; return whether it was the last one."""
        if request_id not in self._under_way:
            return False
        digests, ranks = self._under_way[request_id]
        self._under_way[request_id] = digests, ranks - 1
        return ranks <= 1

    def over(self, request_id: str) -> None:
        """Note that the load of a request has ended, on all ranks or with the request."""
        for digest in self._under_way.pop(request_id, ([], 0))[0]:
            if self._loading.get(digest) == request_id:
                del self._loading[digest]

    def _is_stale(self, lookup: Lookup[Found], request: Any) -> bool:
        old = self._state.clock() - lookup.asked > _LOOKUP_AGE or lookup.asked <= self._distrusted
        return old or lookup.tokens != request.num_tokens

    def _learn(self, tracked: Tracked, lookup: Lookup[Found]) -> bool:
        """Note what a lookup has found and which entries are there and which are not; False: ask again."""
        request, found = tracked.request, lookup.in_time()
        if found is None:
            return False
        if lookup.late and not found.chunks and not found.tail:
            tracked.refused = True
            self._count(tracked, "timeout")
            found = NOTHING
        elif lookup.tokens != request.num_tokens:  # this question has no answer yet; ask again once it has
            return False
        else:
            self._note(tracked, found)
        usable = self._state.usable(request.num_tokens)
        tracked.found, tracked.end, tracked.learned = found, min(self._coded(found), usable), lookup
        if self._state.recurrent:
            self._have_state_kept(request, found)
        return True

    def _note(self, tracked: Tracked, found: Found) -> None:
        """Note which entries are there and which are not."""
        tokens = tracked.request.num_tokens
        whole = tracked.chain.digests(tracked.request.all_token_ids, self._state.whole(tokens))
        self._events.gone(found.missing)
        for digest in (*whole[found.chunks :], *found.absent):
            self._known.forget(digest)  # it is absent, or not known to be there
        for digest in whole[: found.chunks] + [found.digest] * bool(found.tail) + [found.state] * bool(found.stated):
            self._known.check(digest)

    def _have_state_kept(self, request: Any, found: Found) -> None:
        """Have a step of the engine end with the chunks that were found, if the store has no state after them: others
        begin with these chunks, too, and will find it. vLLM keeps a state there for its own cache as well.
        """
        shared = min(found.chunks * self._state.chunk, self._state.usable(request.num_tokens))
        shared = shared // self._state.chunk * self._state.chunk
        if shared > max(found.stated, getattr(request, "shared_prefix_boundary", shared)):
            request.shared_prefix_boundary = shared

    def _is_loaded_by_another(self, tracked: Tracked, computed: int) -> bool:
        """Return whether the next entry is on its way for another request: the engine will have it soon."""
        if not self._share:
            return False
        owner = self._loading.get(self._next_digest(tracked, computed))
        return owner is not None and owner != tracked.request.request_id

    def _next_digest(self, tracked: Tracked, computed: int) -> bytes:
        """Return the digest of the first entry to load."""
        at, found = computed // self._state.chunk, tracked.found
        if at >= found.chunks:
            return found.digest
        return tracked.chain.digests(tracked.request.all_token_ids, at + 1)[-1]
