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
from typing import Any, NamedTuple

from cuvee.codec.errors import InputError
from cuvee.codec.support.once import Once
from cuvee.integrations.core.costs import prefill_quantities
from cuvee.integrations.vllm.decision import MIN_SAMPLES, Pays, Verdict
from cuvee.integrations.vllm.messages import LOADERS, Aim, Delivery, Entry, Load, Report
from cuvee.integrations.vllm.phases import UNDER_WAY, RequestPhase
from cuvee.integrations.vllm.request_params import deadline_of
from cuvee.integrations.vllm.scheduler.block_names import set_apart
from cuvee.integrations.vllm.scheduler.lookups import Lookup
from cuvee.integrations.vllm.scheduler.prefix_lookup import PrefixSearch
from cuvee.integrations.vllm.scheduler.request_record import NOTHING, Found, RequestRecord, RequestTable
from cuvee.integrations.vllm.scheduler.state import RecentEntries, SchedulerState
from cuvee.naming.identity import canonical

logger = logging.getLogger(__name__)

_MOST_LOADS = 2 * LOADERS  # that ranks are given at a time, so that a thread which ends one has the next
_LOOKUP_AGE = 10.0  # seconds after which the store is asked again: entries may have been evicted


class PrefixMatch(NamedTuple):
    """What can be loaded of a request's prefix."""

    tokens: int | None  # after those that the engine has; None: the engine is to ask again
    result: str = ""  # for the metric `lookups`; empty: it is not counted
    verdict: Verdict | None = None  # whether the load pays
    queues: bool = False  # whether it waits because ranks have enough loads


NOT_ASKED = PrefixMatch(0)
ASK_AGAIN = PrefixMatch(None)
_TOO_FEW = {result: PrefixMatch(0, result) for result in ("miss", "partial", "hit")}


class SchedulerLoads:
    """Decides what to load and keeps account of it.

    Args:
        state: of the scheduler's side.
        records: of all requests.
        recent: learns what is there and what is not.
        pays: decides whether a load does.
        share: whether one request finds in the engine what another one loaded.
        in_part: whether loads may end early in this engine.
    """

    def __init__(
        self,
        state: SchedulerState,
        records: RequestTable,
        recent: RecentEntries,
        pays: Pays,
        share: bool,
        in_part: bool,
    ) -> None:
        self._state = state
        self._records = records
        self._search = PrefixSearch(state)
        self._recent = recent
        self._pays = pays
        self._share, self._in_part = share, in_part
        self._distrusted = -1.0  # lookups from before this time are not believed
        self._orders: list[Load] = []  # to be started by the next step
        self._first_tokens: list[
            tuple[int, float | None, RequestRecord]
        ] = []  # steps of them, and by when they are due
        self._once = Once(logger)

    def begin(self, record: RequestRecord) -> None:
        """Read a new request's deadline. One that cannot be aimed at is left out, counted, and logged once."""
        request = record.request
        record.arrived = self._state.clock() - max(time.time() - request.arrival_time, 0.0)
        reason, why = "engine", "windows and recurrent layers load a prefix as a whole or not at all"
        try:
            deadline = deadline_of(request.kv_transfer_params, self._state.options.deadline_ms)
        except InputError as error:
            reason, why, deadline = "parameters", str(error), 0.0
            record.error = record.error or why
        if deadline and self._in_part:
            record.due = record.arrived + deadline
        elif deadline is not None:
            self._state.recorder.count("deadlines", label="refused")
            self._once(reason, "cuvee: request %s has no deadline: %s", request.request_id, why)

    def note_step(self, record: RequestRecord, before: int, after: int, step: int) -> None:
        """Note that a step computes a request's tokens `before … after`."""
        if not record.started and before < record.request.num_prompt_tokens <= after:
            self._first_tokens.append((step, record.due, record))
            record.started = True
            record.due = None  # there is no hurry if it is preempted from here on

    def take(self, report: Report) -> None:
        """Believe no lookup from before now if a load failed; time first tokens that are there."""
        now, waiting, recorder = self._state.clock(), self._first_tokens, self._state.recorder
        if report.failed:
            self._distrusted = now
        self._first_tokens = [each for each in waiting if each[0] not in report.steps]
        for step, due, record in waiting:
            if step not in report.steps:
                continue
            recorder.count("ttft_loaded_seconds" if record.given else "ttft_computed_seconds", now - record.arrived)
            if due is not None:
                recorder.count("deadlines", label="met" if now <= due else "missed")

    def note_delivery(self, record: RequestRecord, delivery: Delivery) -> None:
        """Note what a rank restored, before the engine hears that the load is over. What its deadline leaves out is
        computed, and not loaded after all. From the first block on that is worse than what is stored, the request's
        blocks are renamed.
        """
        starts = accumulate(delivery.tokens, initial=delivery.start)
        if not delivery.complete:
            self._records.load_no_more(record)
            record.given, record.cut = min(record.given, sum(delivery.tokens)), record.cut or "deadline"
        worse = [start for start, parts in zip(starts, delivery.parts, strict=False) if parts < self._state.parts]
        if worse:
            first = worse[0] // self._state.block
            recipe = canonical(first.to_bytes(8, "little"), bytes(delivery.parts))
            set_apart(record.request, first, hashlib.blake2b(recipe, digest_size=32, person=b"cuvee-parts").digest())
            record.unstored = "quality"

    def worth_asking(self, request: Any, computed: int) -> bool:
        """Return whether enough tokens after the first `computed` could be found."""
        state = self._state
        could = state.usable(request.num_tokens) - computed
        return state.loads and not request.skip_reading_prefix_cache and could >= state.options.least_tokens

    def ask(self, record: RequestRecord) -> Lookup[Found]:
        """Ask in the background what the store has of a request's tokens."""
        tokens, ids = record.request.num_tokens, record.request.all_token_ids
        digests = record.chain.digests(ids, self._state.whole(tokens))
        find = partial(self._search.find, record.chain, ids, tokens, digests)
        record.lookup = lookup = Lookup(self._state, record.tenant, find, NOTHING, tokens)
        if record.verdict is not None and record.verdict.restores:
            record.verdict = None
        return lookup

    def learn(self, record: RequestRecord) -> bool:
        """Take the store's answer about a request's prefix, and note which entries are there and which are not. Asks
        if that was not done or is long ago.

        Returns:
            whether what is known is of use; False: the engine is to ask again.
        """
        request, lookup = record.request, record.lookup
        if lookup is None or (lookup.over and self._is_stale(lookup, request)):
            lookup = self.ask(record)
        if lookup is record.learned:
            return True
        found = lookup.in_time()
        if found is None:
            return False
        if lookup.timed_out and not found.chunks and not found.tail:
            self._records.load_no_more(record)
            if not record.counted:
                self._count(record, "timeout")
            found = NOTHING
        elif lookup.tokens != request.num_tokens:  # this question has no answer yet; ask again once it has
            return False
        else:
            self._note(record, found)
        usable = self._state.usable(request.num_tokens)
        record.found, record.end, record.learned = found, min(self._coded(found), usable), lookup
        if self._state.recurrent:
            self._have_state_kept(request, found)
        return True

    def match(self, record: RequestRecord, computed: int) -> PrefixMatch:
        """Return how many tokens after the first `computed` can be loaded from a prefix. Changes nothing.

        The engine asks at every step for each request that waits: it must be no more than a glance.
        """
        options, found, verdict = self._state.options, record.found, record.verdict
        tokens = record.end - computed
        if tokens >= options.least_tokens and self._is_loaded_by_another(record, computed):
            return ASK_AGAIN
        coded = self._coded(found)
        full = coded >= self._state.usable(record.request.num_tokens)
        result = "miss" if not coded else "hit" if full else "partial"
        if tokens < options.least_tokens:
            return _TOO_FEW[result]
        if verdict is None and record.due is None and options.decide == "measured":  # else the load decides
            first, chunk = computed // self._state.chunk, self._state.chunk
            sizes = [chunk] * (found.chunks - first) + [found.tail] * bool(found.tail)
            verdict = self._pays.judge("load", computed, record.end, sizes)
        if verdict is not None and not verdict.restores:
            return PrefixMatch(0, "declined", verdict)
        if self.have_room:
            return PrefixMatch(tokens, result, verdict)
        if self._has_waited_enough(record, computed):
            return PrefixMatch(0, "declined", Verdict.WAITED)
        return PrefixMatch(None, verdict=verdict, queues=True)

    def promise(self, record: RequestRecord, computed: int, match: PrefixMatch, tokens: int | None) -> None:
        """Note what a match decides, and that the engine is told of `tokens` after the first `computed`; 0 or None: of
        none.
        """
        if match.verdict is not None:
            if record.verdict is None:
                self._pays.note("load", match.verdict)
            record.verdict = match.verdict
        if match.queues and record.queued is None:
            record.queued = self._state.clock()
        if match.result and not record.counted:
            self._count(record, match.result)
        if tokens:
            record.first = computed
            self._records.enter(record, RequestPhase.PROMISED)

    def withdraw(self, record: RequestRecord) -> None:
        """Take a promise back, if there is one: the engine has not taken it, or what was found may be gone."""
        if record.phase is RequestPhase.PROMISED:
            self._records.enter(record, RequestPhase.ASKING)

    @property
    def have_room(self) -> bool:
        """Whether ranks have few enough loads to be given another. What they cannot begin soon would hold blocks of the
        engine all the while.
        """
        return self._records.admitted < _MOST_LOADS

    def _has_waited_enough(self, record: RequestRecord, computed: int) -> bool:
        """Return whether a request has waited for a load's place as long as computing it takes: then it is computed. By
        that it takes at most twice the time of the better choice, however long the queue turns out to be.
        """
        if self._state.options.decide == "always" or record.queued is None:
            return False
        computing = self._pays.prefill.marginal(*prefill_quantities(computed, record.end))
        return self._state.clock() - record.queued >= computing

    def _count(self, record: RequestRecord, result: str) -> None:
        """Count the first answer to a request."""
        record.counted = True
        self._state.recorder.count("lookups", label=result)

    def _coded(self, found: Found) -> int:
        """Return the end of what was found."""
        return found.stated if self._state.recurrent else found.chunks * self._state.chunk + found.tail

    def allocate(self, record: RequestRecord, tables: Sequence[Sequence[int]], tokens: int) -> None:
        """Plan a load of the request's last `tokens` tokens before the end of its prefix or blend.

        Args:
            record: the request, with its blend if it has one.
            tables: the engine's blocks for it in each group of layers.
            tokens: to restore.
        """
        blend, sizes = record.blend, self._state.blocks
        end = record.end if blend is None else record.blend_end
        start = end - tokens
        held = [table[: -(-end // size)] for table, size in zip(tables, sizes, strict=True)]
        found, chunk = record.found, self._state.chunk
        names = record.chain.digests(record.request.all_token_ids, found.chunks)
        prefix = [Entry("chunk", names[at], at * chunk, chunk) for at in range(start // chunk, found.chunks)]
        if found.tail:
            prefix.append(Entry("tail", found.digest, found.chunks * chunk, found.tail))
        exact = end if blend is None else blend.start
        prefix = [entry.within(held, sizes) for entry in prefix if start < exact and entry.start < exact]
        prefix = [entry for entry in prefix if self._state.is_needed(entry)]
        load = Load(record.id, record.tenant, prefix, start, end, list(held[0][start // sizes[0] :]), blend)
        record.given = max(exact - start, 0)
        if record.due is not None:
            rest = record.request.num_tokens - record.end
            load.aim = Aim(record.due - self._state.clock(), rest, self._pays.prefill.learned)
        if self._state.recurrent:
            state = Entry("state", found.state, end - self._state.block, self._state.block)
            load.state = state.within(held, sizes)
        self._records.enter(record, RequestPhase.LOADING)
        record.digests, record.ranks, record.placed = [entry.digest for entry in prefix], self._state.shards, 0
        for digest in record.digests:
            self._records.loading.setdefault(digest, record)
        self._orders.append(load)

    def fail(self, record: RequestRecord, blocks: Sequence[int]) -> None:
        """Plan a load that fails in place of a request's own, which cannot begin. `blocks` are all that it has."""
        first, block = record.first // self._state.block, self._state.block
        self._forget_order(record)
        self._orders.append(Load(record.id, "", [], first * block, len(blocks) * block, list(blocks[first:])))

    def take_step(self) -> list[Load]:
        """Return and forget the loads that the next step starts."""
        loads, self._orders = self._orders, []
        return loads

    def note_end(self, record: RequestRecord) -> None:
        """Note that a rank has ended the load of a request. Once all have, it may load again, unless it was the last
        time.
        """
        if record.phase not in UNDER_WAY:
            return
        record.ranks -= 1
        if record.ranks <= 0:
            self.release(record)
            if record.given and self._pays.prefill.samples >= MIN_SAMPLES:
                saved = self._pays.prefill.marginal(*prefill_quantities(record.first, record.first + record.given))
                self._state.recorder.count("saved_seconds_estimate", saved)
            last = record.phase is RequestPhase.ENDING
            self._records.enter(record, RequestPhase.OVER if last else RequestPhase.ASKING)
            record.placed = 0

    def release(self, record: RequestRecord) -> None:
        """Have no request wait for this one's load, and do not start it if it has not begun."""
        self._forget_order(record)
        self._records.release(record)

    def _forget_order(self, record: RequestRecord) -> None:
        self._orders = [load for load in self._orders if load.request != record.id]

    def _is_stale(self, lookup: Lookup[Found], request: Any) -> bool:
        old = self._state.clock() - lookup.asked > _LOOKUP_AGE or lookup.asked <= self._distrusted
        return old or lookup.tokens != request.num_tokens

    def _note(self, record: RequestRecord, found: Found) -> None:
        """Note which entries are there and which are not."""
        tokens = record.request.num_tokens
        whole = record.chain.digests(record.request.all_token_ids, self._state.whole(tokens))
        record.awaited = found.chunks < len(whole) and self._recent.has(whole[found.chunks])
        for digest in (*whole[found.chunks :], *found.absent):
            self._recent.forget(digest)  # it is absent, or not known to be there
        for digest in whole[: found.chunks] + [found.digest] * bool(found.tail) + [found.state] * bool(found.stated):
            self._recent.check(digest)

    def _have_state_kept(self, request: Any, found: Found) -> None:
        """Have a step of the engine end with the chunks that were found, if the store has no state after them: others
        begin with these chunks, too, and will find it. vLLM keeps a state there for its own cache as well.
        """
        shared = min(found.chunks * self._state.chunk, self._state.usable(request.num_tokens))
        shared = shared // self._state.chunk * self._state.chunk
        if shared > max(found.stated, request.shared_prefix_boundary):
            request.shared_prefix_boundary = shared

    def _is_loaded_by_another(self, record: RequestRecord, computed: int) -> bool:
        """Return whether the next entry is on its way for another request: the engine will have it soon."""
        if not self._share:
            return False
        owner = self._records.loading.get(self._next_digest(record, computed))
        return owner is not None and owner.phase in UNDER_WAY

    def _next_digest(self, record: RequestRecord, computed: int) -> bytes:
        """Return the digest of the first entry to load."""
        at, found = computed // self._state.chunk, record.found
        if at >= found.chunks:
            return found.digest
        return record.chain.digests(record.request.all_token_ids, at + 1)[-1]
