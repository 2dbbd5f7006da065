"""Refinements that come after a load, on one rank: fetched and decoded aside, written between the engine's steps.

    load ends at its deadline --> a refiner: store -> missing parts -> dense copy of an entry --+
                                       ^                                                        |
                                       +------ the next entry ------ a step: copy -> pages <----+

The pages belong to a request that is running. They are written in the engine's thread, in a step that computes this
request, so they are its own; its later tokens attend to better keys and values. What the request has computed until
then does not change.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from cuvee.codec.errors import CuveeError
from cuvee.codec.paged import PagedCache
from cuvee.integrations.guard import Guard
from cuvee.integrations.vllm.messages import Entry, Load
from cuvee.integrations.vllm.metric_table import PARTS
from cuvee.integrations.vllm.worker_restore import PoorEntry, Restorer
from cuvee.integrations.vllm.worker_state import WorkerPools, WorkerState
from cuvee.kernels.devices import Mark, send

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Request:
    """What is to be refined of a request.

    Attributes:
        load: of the request.
        entries: to do, in order.
        staged: an entry that is decoded and not written yet, its slots and the copy.
    """

    load: Load
    entries: deque[PoorEntry]
    staged: tuple[Entry, torch.Tensor, PagedCache] | None = field(default=None)


class WorkerRefinements:
    """The refinements of one rank.

    Args:
        state: of the worker.
        pools: threads of the worker.
        restorer: decodes entries.
        guard: contains errors.
    """

    def __init__(self, state: WorkerState, pools: WorkerPools, restorer: Restorer, guard: Guard) -> None:
        self._state = state
        self._pools = pools
        self._restorer = restorer
        self._guard = guard
        self._requests: dict[str, _Request] = {}  # the state's lock guards it

    def begin(self, load: Load, entries: Sequence[PoorEntry]) -> None:
        """Refine a load's entries while its request runs, first things first."""
        request = _Request(load, deque(entries))
        with self._state.lock:
            if self._state.closed or not entries:
                return
            self._requests[load.request] = request
        self._go_on(request)

    def write(self, requests: Sequence[str]) -> None:
        """Write what is ready of some requests to their pages, at most one entry of each.

        Runs in the engine's thread, in a step that computes these requests.
        """
        for name in requests:
            with self._state.lock:
                request = self._requests.get(name)
                if request is None or request.staged is None:
                    continue
                (entry, slots, copy), request.staged = request.staged, None
            with self._guard("refine", partial(self._end, request)):
                self._state.pages.write(
                    [keys[0] for keys in copy.keys], [values[0] for values in copy.values], slots
                )  # fmt: skip
                self._state.recorder.count("refined_tokens", len(request.load.placed(entry)))
                self._go_on(request)

    def drop(self, requests: Sequence[str]) -> None:
        """Refine these requests no more: they have ended, or have other blocks."""
        with self._state.lock:
            for name in requests:
                self._requests.pop(name, None)

    def drop_all(self) -> None:
        """Refine nothing any more of what is under way."""
        with self._state.lock:
            self._requests.clear()

    def _go_on(self, request: _Request) -> None:
        """Prepare the next entry of a request, if there is one."""
        if request.entries:
            self._pools.refiners.submit(self._prepare, request)
        else:
            self._end(request)

    def _end(self, request: _Request) -> None:
        """Refine a request no more. Another load of the same request, which may have begun, goes on."""
        with self._state.lock:
            if self._requests.get(request.load.request) is request:
                del self._requests[request.load.request]

    def _prepare(self, request: _Request) -> None:
        """Fetch and decode the next entry that has more parts than it was restored from."""
        with self._guard("refine", partial(self._end, request)):
            while request.entries and self._is_wanted(request):
                poor = request.entries.popleft()
                try:
                    ready = self._decoded(request.load, poor)
                except CuveeError as error:
                    logger.debug("cuvee: request %s: an entry is not refined: %s", request.load.request, error)
                    ready = None
                if ready is not None:
                    with self._state.lock:
                        request.staged = ready
                    return
            self._end(request)

    def _is_wanted(self, request: _Request) -> bool:
        with self._state.lock:
            return self._requests.get(request.load.request) is request

    def _decoded(self, load: Load, poor: PoorEntry) -> tuple[Entry, torch.Tensor, PagedCache] | None:
        """Return an entry with its missing parts, as far as they are there; None: none is.

        Raises:
            CuveeError: they are damaged or belong to another base.
        """
        parts = list(poor.parts)
        for part in self._state.store.get_many(poor.keys):
            if part is None:
                break
            self._state.recorder.count("fetched_parts", label=PARTS[len(parts)])
            parts.append(part)
        if len(parts) == len(poor.parts):
            return None
        device = self._state.pages.device
        copy = self._restorer.decode_apart(load, poor.entry, parts)
        (slots,) = self._state.slots(poor.entry, load.placed(poor.entry))
        placed = send(slots, device)
        Mark(device).wait()  # it is written on another stream
        return poor.entry, placed, copy
