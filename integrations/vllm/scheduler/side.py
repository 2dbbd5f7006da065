"""The scheduler's side of the connector: decides what to load and what to store for each request.

    new request -> keys of its chunks -> ask the store (in the background) -> load, or recompute
    each step   -> chunks that became complete -> to be stored
    prompt done, request done -> the blocks after the last whole chunk, its tail -> to be stored

`SchedulerSide` has one method per call of the engine and hands each on: to `loads` (what the store has, and what is
loaded by when), `blending.planning` (segments behind the prefix), `saves` (what is stored) and `decision` (what pays).
They share `state`, and the record that `request_record` has of each request; `requests` names requests.

These modules run in the engine's loop: nothing waits for a store longer than a millisecond, and no error leaves them. A
request with an error is not cached from there on: it is computed, and nothing of it is stored. If the engine already
waits for its load, the workers report that load as failed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from cuvee.blend.segmentation import LineBreaks
from cuvee.integrations.core.costs import prefill_quantities
from cuvee.integrations.core.guard import Guard
from cuvee.integrations.identity.identity_records import IdentityRecords
from cuvee.integrations.identity.lora_files import Adapters
from cuvee.integrations.identity.weights_name import WeightsName
from cuvee.integrations.stores import Store
from cuvee.integrations.vllm.blending.planning import NO_BLEND, BlendMatch, BlendPlanner
from cuvee.integrations.vllm.decision import Pays
from cuvee.integrations.vllm.messages import Report, StepPlan
from cuvee.integrations.vllm.metrics import Recorder
from cuvee.integrations.vllm.phases import UNDER_WAY, RequestPhase
from cuvee.integrations.vllm.request_params import wants_reason
from cuvee.integrations.vllm.scheduler.blends import SchedulerBlends
from cuvee.integrations.vllm.scheduler.explaining import explanation
from cuvee.integrations.vllm.scheduler.loads import ASK_AGAIN, NOT_ASKED, PrefixMatch, SchedulerLoads
from cuvee.integrations.vllm.scheduler.request_record import NOTHING, RequestRecord, RequestTable
from cuvee.integrations.vllm.scheduler.requests import Requests
from cuvee.integrations.vllm.scheduler.saves import SchedulerSaves
from cuvee.integrations.vllm.scheduler.state import PATIENCE, RecentEntries, SchedulerState
from cuvee.integrations.vllm.setup import Setup
from cuvee.naming.identity import Identity

logger = logging.getLogger(__name__)

_CONFIRMING = 4  # steps without requests, at most
_NEW = (RequestPhase.EARLY, RequestPhase.NAMING)


class SchedulerSide:
    """Decides for every request what to load and what to store.

    Args:
        setup: of the engine.
        identity: of its blobs.
        store: looked into, never read from.
        recorder: takes the figures of all ranks.
        adapters: of the engine.
        clock: seconds, monotonic.
        breaks: line breaks of the engine's vocabulary, by which blending finds paragraphs, if they are known.
        weights: makes the identity's name of the weights; until that is known, requests are computed, and not cached.
            None: the identity has its name.
        records: is told the engine's identity and its entries; None: nobody is.
    """

    def __init__(
        self,
        setup: Setup,
        identity: Identity,
        store: Store,
        recorder: Recorder,
        adapters: Adapters,
        clock: Callable[[], float] = time.monotonic,
        breaks: LineBreaks | None = None,
        weights: WeightsName | None = None,
        records: IdentityRecords | None = None,
    ) -> None:
        options = setup.options
        self._recorder = recorder
        self._counted_store = store if setup.remote_workers else None  # no worker counts what this one does
        self._step = 0
        self._confirmed = 0  # all ranks have ended this step and all steps before it
        self._announced = 0  # of these, the last that ranks know of
        self._saving = 0  # the last step of which something is stored
        self._alone = setup.alone
        self._weights = weights
        self._named = weights is None
        self._other_connectors = setup.other_connectors
        self._identities = records
        self._guard = Guard(recorder)
        self._state = state = SchedulerState(setup, store, recorder, clock)
        self._coding = setup.coding(state.keys.key_ids)
        self._pays = Pays(state.chunk)
        self._planner = BlendPlanner(state, options.blend, identity, self._pays, breaks, setup.other_connectors)
        self._recent = recent = RecentEntries(state)
        self._requests = Requests(state, identity, adapters)
        self._records = RequestTable()
        in_engine = setup.prefix_caching, setup.loads_in_part
        self._loads = SchedulerLoads(state, self._records, recent, self._pays, *in_engine)
        self._blends = SchedulerBlends(self._records, state.shards, setup.step_tokens)
        self._saves = SchedulerSaves(state, recent, self._planner)
        if records is not None:
            self._take_name()  # if it is there already: entries are counted from the start

    # Requests, in the order in which the engine calls ------------------------------------------------------------

    def arrived(self, request: Any) -> None:
        """Look up a new request now, so that the answer is there when its turn comes."""
        with self._guard("arrived", partial(self._give_up, request)):
            self._begin(self._record_of(request))

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Return how many tokens after the first `computed` can be loaded, and whether asynchronously; None: ask
        again. The engine asks as often as it likes: each question takes the last answer back.
        """
        with self._guard("matched_tokens", partial(self._give_up, request)):
            record = self._records.of(request)
            if record.request is not request or record.phase is not RequestPhase.ASKING:
                record = self._record_of(request)
                if not self._begin(record):
                    return None, False
                self._loads.withdraw(record)
                if record.phase is not RequestPhase.ASKING:
                    return 0, False
            if self._requests.waits(self._step):
                return None, False
            asks = self._loads.worth_asking(request, computed)
            if asks and not self._loads.learn(record):
                return None, False
            if record.segmented is not None and not self._planner.learn(record):
                return None, False
            prefix, blend = self._match(record, computed, asks)
            tokens = None if prefix is ASK_AGAIN else self._promise(record, computed, prefix, blend)
            return tokens, bool(tokens)
        return 0, False

    def _match(self, record: RequestRecord, computed: int, asks: bool) -> tuple[PrefixMatch, BlendMatch]:
        """Return what can be loaded and blended after the first `computed` tokens. Changes nothing."""
        prefix = self._loads.match(record, computed) if asks else NOT_ASKED
        if record.segmented is None or prefix.tokens is None:
            return prefix, NO_BLEND
        return prefix, self._planner.match(record, computed + prefix.tokens)

    def _promise(self, record: RequestRecord, computed: int, prefix: PrefixMatch, blend: BlendMatch) -> int | None:
        """Decide by a match, and return what the engine is told: tokens to load; None: it is to ask again."""
        tokens = prefix.tokens
        if record.segmented is not None and not self._planner.promise(record, record.segmented, blend):
            tokens = None
        elif record.blend is not None:
            tokens = record.blend_end - computed if self._loads.have_room else None
        self._loads.promise(record, computed, prefix, tokens)
        return tokens

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], tokens: int) -> None:
        """Plan the load of a request for which the engine allocated blocks in each group of layers, and wants `tokens`
        loaded (0: none).
        """

        def give_up() -> None:
            if tokens:  # the engine waits for them
                self._loads.fail(self._records.of(request), tables[0])
            self._give_up(request)

        with self._guard("allocated", give_up):
            record = self._record_of(request)
            record.computed = 0  # any blocks it had before were other ones
            if not tokens:
                self._loads.withdraw(record)
            elif record.phase is RequestPhase.PROMISED:
                self._planner.allocate(record, tables[0])
                self._loads.allocate(record, tables, tokens)
            else:  # its promise was taken back by a reset, but the engine waits
                self._loads.fail(record, tables[0])

    def outcome(self, request: Any) -> dict[str, Any] | None:
        """Return what the client of a request learns of its blend, and of options that were refused; None: nothing."""
        with self._guard("finished"):
            record = self._records.get(request.request_id)
            if record is not None and record.cached:
                blended = {} if record.segmented is None else record.segmented.outcome
                return {**blended, **({"error": record.error} if record.error else {})} or None
        return None

    def explanation(self, request: Any) -> dict[str, Any] | None:
        """Return why a request that ends was not loaded as a whole (`explaining.explanation`), if its client asks and
        may be answered: vLLM refuses two connectors' answers to one request. Logs it at DEBUG.
        """
        asks = not self._other_connectors and wants_reason(request.kv_transfer_params)
        with self._guard("finished"):
            record = self._records.get(request.request_id)
            if record is None or not (asks or logger.isEnabledFor(logging.DEBUG)):
                return None
            found = explanation(record, self._state)
            logger.debug("cuvee: request %s: %s", request.request_id, found)
            return found if asks else None
        return None

    def finished(self, request: Any, tables: Sequence[Sequence[int]]) -> None:
        """Forget a request that is done or was aborted; `tables` are the blocks it had, which are free now.

        They keep their content until the next step begins: that is when the request's tail is copied.
        """
        record = self._records.get(request.request_id)
        if record is None:
            return
        if record.phase is RequestPhase.EARLY:
            self._recorder.count("uncached", label="unnamed")
        with self._guard("finished"):
            if record.cached and self._state.stores and not record.unstored:
                self._saves.end(record, tables)
        with self._guard("finished"):
            self._blends.drop(record)
        with self._guard("finished"):
            self._loads.release(record)
        with self._guard("finished"):
            self._records.remove(record)

    # Steps -----------------------------------------------------------------------------------------------------

    def plan(self, output: Any) -> StepPlan:
        """Return the loads and saves of the step that the engine has just scheduled (its `SchedulerOutput`)."""
        self._step += 1
        self._state.patience = PATIENCE
        loads = self._loads.take_step()
        plan = StepPlan(self._step, loads, confirmed=self._confirmed, names=self._requests.ask(self._step))
        plan.coding = self._coding
        saves = self._saves.take_last()
        with self._guard("plan", partial(self._saves.forget, saves)):
            plan.last_saves = self._saves.unchanged(saves, output)
        ready = self._blends.ready()
        with self._guard("plan", partial(self._blends.drop_all, ready)):
            plan.blend_tokens = self._blends.budget(output.total_num_scheduled_tokens)
            plan.blends = ready
        plan.idle = not output.total_num_scheduled_tokens and not plan.blends
        plan.drops = self._blends.take_drops()
        with self._guard("plan"):
            self._plan_requests(plan, output)
        if self._identities is not None:
            for save in (*plan.last_saves, *plan.saves):
                self._identities.note(save.tenant, save.entry.digest)
        self._announced = plan.confirmed
        if plan.saves or plan.last_saves:
            self._saving = plan.step if plan.saves else max(self._saving, plan.step - 1)
        return plan

    @property
    def waits_for_a_step(self) -> bool:
        """Whether ranks hold copies that they store once another step tells them that all ranks have computed these.

        With asynchronous scheduling, vLLM's own step after the last request is planned too early for that. A step that
        has failed is never confirmed; so an engine without requests does no more than a few for it.
        """
        return not self._alone and self._announced < self._saving and self._step < self._saving + _CONFIRMING

    def _plan_requests(self, plan: StepPlan, output: Any) -> None:
        """Plan to store what a step completes, and time the step if it tells the speed of prefill."""
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        prompt_tokens, looked_at = 0, 0.0
        for request_id, scheduled in output.num_scheduled_tokens.items():
            record = self._records.get(request_id)
            if record is None or not record.cached:
                continue
            with self._guard("plan", partial(self._give_up, record.request)):
                before = computed[request_id]
                after = before + scheduled
                prompt = max(min(after, record.request.num_prompt_tokens), before)
                prompt_tokens += prompt - before
                looked_at += prefill_quantities(before, prompt)[1]
                self._loads.note_step(record, before, after, self._step)
                record.computed = after
                if self._state.stores and record.unstored:
                    self._state.not_stored(record.unstored, scheduled)
                elif self._state.stores:
                    plan.saves += self._saves.completed(record, before, after, output.kv_connector_block_state)
        self._pays.begin_step(plan, prompt_tokens, looked_at, output.total_num_scheduled_tokens)

    def take(self, report: Report) -> None:
        """Learn what the workers report about the steps before."""
        with self._guard("take"):
            while report.steps.count(self._confirmed + 1) >= self._state.shards:
                self._confirmed += 1
        with self._guard("take", partial(self._blends.drop_all, report.placed)):
            self._blends.take(report)
        for record in self._records.present(report.failed):
            with self._guard("take", partial(self._give_up, record.request)):
                record.cause = report.causes.get(record.id, "")
                self._refuse(record)
        for delivery in report.delivered:
            for record in self._records.present([delivery.request]):
                with self._guard("take", partial(self._give_up, record.request)):
                    self._loads.note_delivery(record, delivery)
        for record in self._records.present(report.ended):
            with self._guard("take"):
                self._loads.note_end(record)
        for digest in report.unsaved:
            self._recent.forget(digest)
        for learn in (self._loads.take, self._record, self._pays.take):
            with self._guard("take"):
                learn(report)
        with self._guard("take", self._stop):
            if self._requests.settle(report):
                if self._requests.changed:
                    self._tell_identity()
                    self._recorder.count("weights_changed")
                    logger.warning(
                        "cuvee: the engine's weights have changed: they are named %s", self._requests.identity.model
                    )
                self._readdress(found=True)
        with self._guard("take", self._stop):
            if report.changed and not self._requests.unnamed:
                logger.warning(
                    "cuvee: the engine's weights have changed and nobody said so: nothing is loaded or stored until "
                    "all ranks have read them"
                )
                self._forget()

    # At any time -----------------------------------------------------------------------------------------------

    def reset(self) -> bool:
        """Have the weights read anew, because they may have changed. The store keeps its entries.

        Until all ranks have said in the next step which weights they have, no request is looked up; then what was
        stored by equal ones is found.

        Returns:
            whether that succeeded. If not, nothing is loaded or stored until a reset succeeds: it may be of other
            weights.
        """
        with self._guard("reset", self._stop):
            self._forget()
            self._state.enable(True)
            return True
        return False

    def close(self) -> None:
        """Stop asking the store, and log what was done. Waits for nothing."""
        if self._weights is not None:
            self._weights.close()
        with self._guard("close"):
            self._state.lookup_threads.dismiss(0, cancel=True)
            self._requests.close()
        with self._guard("close"):
            logger.info("cuvee: %s", self._recorder.summary())

    def _record(self, report: Report) -> None:
        """Add the figures of the workers, and those of a store that no worker has."""
        if report.metrics is not None:
            self._recorder.absorb(report.metrics)
        if self._counted_store is not None:  # its gauges are those of the workers' stores
            self._recorder.record_store(self._counted_store.counters(), ("misses", "errors", "skipped"))

    # Across tasks ----------------------------------------------------------------------------------------------

    def _record_of(self, request: Any) -> RequestRecord:
        """Return what is known of a request."""
        record = self._records.of(request)
        if record.request is request:
            return record
        # Another request of this id never ended. What ranks report of its load would be taken for this one's.
        if record.phase in UNDER_WAY:
            record.request = request
            self._give_up(request)
            return record
        self._records.remove(record)
        return self._records.of(request)

    def _begin(self, record: RequestRecord) -> bool:
        """Ask the store for a new request once the weights, its images and its adapter have names; return whether all
        was done for that. A request that the engine schedules before the weights have a name is not cached.
        """
        if record.phase not in _NEW:
            return True
        if record.phase is RequestPhase.EARLY and self._take_name():
            self._records.enter(record, RequestPhase.NAMING)
        if not self._requests.is_named(record):  # also if it is early: vLLM keeps its images and its adapter for others
            return False
        if record.phase is RequestPhase.EARLY:
            return True
        reason = self._requests.begin(record)
        if reason:
            self._give_up(record.request, reason)
            return True
        self._records.enter(record, RequestPhase.ASKING)
        self._loads.begin(record)
        self._planner.segment(record)
        if self._loads.worth_asking(record.request, 0):
            self._loads.ask(record)
            self._planner.ask(record)
        return True

    def _take_name(self) -> bool:
        """Return whether the weights have a name, and take it when it is there."""
        if not self._named and self._weights is not None and (named := self._weights.current) is not None:
            self._requests.name(named.text)
            self._planner.identity = self._requests.identity
            self._named = True
            self._tell_identity()
        return self._named

    def _tell_identity(self) -> None:
        if self._identities is not None:
            self._identities.use(self._requests.identity)

    def _give_up(self, request: Any, reason: str = "error") -> None:
        """Neither load nor store anything for a request from here on. A load that a worker has begun goes on to its
        end, but is not blended any more.
        """
        record = self._records.of(request)
        counts = record.cached or record.phase in _NEW
        record.cached = False
        if counts:
            record.refused = reason
        self._blends.drop(record)
        self._records.load_no_more(record)
        record.forget_lookups()
        if counts:
            self._recorder.count("uncached", label=reason)

    def _refuse(self, record: RequestRecord) -> None:
        """Load nothing more for a request whose load failed, because it would only fail again."""
        record.given, record.cut = 0, "failed"
        if record.cached and record.blend is not None and record.segmented is not None:
            self._planner.refuse(record.segmented, "failed")
        self._blends.drop(record)
        self._records.load_no_more(record)

    def _forget(self) -> None:
        """Find nothing that was stored until now, and store nothing under its names."""
        self._saves.reset()
        self._requests.rename()
        self._readdress(found=False)

    def _readdress(self, found: bool) -> None:
        """Give all requests that are under way names of the present identity, under which something is `found`."""
        self._planner.identity = self._requests.identity
        for record in self._records.cached():
            with self._guard("reset", partial(self._give_up, record.request)):
                self._loads.withdraw(record)
                record.forget_lookups()
                record.chain = self._requests.chain(record.scope)
                record.lookup, record.learned, record.found = None, None, NOTHING
                record.end, record.saved, record.stated = 0, 0, 0
                if record.request.num_computed_tokens > 0:
                    record.unstored = record.unstored or "reset"
                self._planner.rename(record)
                if found and not record.request.num_computed_tokens:  # it waits for this
                    self._planner.ask(record)

    def _stop(self) -> None:
        """Load and store nothing until a reset succeeds."""
        self._state.enable(False)
        self._requests.rename()
        for record in self._records.cached():
            self._give_up(record.request)
