"""Errors in the middle of the connector: `Injector` lets any inner call of its two sides raise."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from cuvee.integrations.vllm.scheduler.side import SchedulerSide
from cuvee.integrations.vllm.worker.side import WorkerSide
from cuvee.naming.identity import PrefixChain

# What vLLM calls, and what runs in threads on its behalf.
SCHEDULER_HOOKS = ("arrived", "matched_tokens", "allocated", "plan", "take", "finished", "outcome", "reset")
WORKER_HOOKS = {
    "start_loads": "loads.start", "drop": "loads.drop", "blend": "blends.advance",
    "save": "saves.save", "take_arrived": "loads.take_arrived", "take_invalid_blocks": "loads.take_invalid_blocks",
    "report": "report",
}  # fmt: skip
THREADS = {"cuvee-lookup": "lookup", "cuvee-load": "load", "cuvee-fetch": "load", "cuvee-decode": "load",
           "cuvee-encode": "store", "cuvee-write": "store"}  # fmt: skip

# Inner calls, by side. Left out: what contains errors itself, and what puts things right (`_give_up`, `_end`).
SCHEDULER = (
    "_record_of", "_begin", "_requests.begin", "_requests.chain",
    "_requests._adapters.find", "_requests._media_names.name", "_loads.match",
    "_match", "_promise", "_loads.promise", "_loads.withdraw",
    "_loads._is_loaded_by_another", "_state.is_needed", "_loads.allocate",
    "_planner.match", "_planner.promise", "_planner.allocate", "_state.usable",
    "_state.addressed", "_loads.worth_asking", "_loads.ask", "_loads.learn", "_state.whole",
    "_loads._search._tail_sizes", "_loads._search.find", "_state.keys.find",
    "_state.lookup_threads.submit", "_recorder.record_store", "_saves.completed", "_saves._segments", "_saves._tail",
    "_saves._last_tail", "_saves._storable", "_saves._held", "_saves.unchanged", "_recent.check", "_blends.take",
    "_blends.budget", "_plan_requests", "_refuse", "_pays.take", "_pays.begin_step", "_forget", "_loads.note_end",
    "_loads.release", "_blends.drop", "_state.clock", "_loads.take", "_record",
    "_recorder.count", "_recorder.absorb", "_state.store.report_overdue", "_state.store.counters",
    "_state.store.contains", "_pays.observe", "_pays.judge", "_pays.note",
    "_planner.segment", "_planner.ask", "_planner.learn", "_planner.harvest", "_planner.refuse", "_planner.rename",
)  # fmt: skip
WORKER = (
    "loads._place", "blends._slice", "blends._blended", "loads._restorer.fetched",
    "loads._restorer.get", "_state.keys.bound_to", "loads._restorer.restore",
    "_state.pages.restore", "_state.pages.io.in_a_row", "_state.pages.io.restore",
    "loads._restorer.discard", "loads._book", "_state.keys.find", "_state.pages.io.encode",
    "loads._count_load", "saves._copy", "saves._complete", "saves._encode",
    "loads._restorer._restore_drafts",
    "saves._fail", "saves._bytes", "saves._key", "_state.keys.written", "_state.slots",
    "_pools.loaders.submit", "_pools.fetchers.submit", "_pools.encoders.submit", "_pools.writers.submit",
    "_state.recorder.count", "_state.recorder.gauge", "_state.recorder.record_store", "_state.recorder.drain",
    "_state.store.report_overdue", "_state.store.counters", "_state.store.contains", "_state.store.get_many",
    "_state.store.put", "_state.store.delete", "_state.codec.encode_parts", "_state.codec.decode_paged",
    "_state.codec.open", "_state.codec.on_device",
)  # fmt: skip
CHAIN = ("digests", "tails")
# Tables that are empty once all requests have ended, by side.
SCHEDULER_TABLES = (
    "_records", "_records.admitted", "_loads._orders", "_records.loading", "_blends._ready", "_blends._drops",
)  # fmt: skip
WORKER_TABLES = (
    "loads._jobs", "loads._ended", "loads._invalid", "saves._sizes", "saves._pending",
)  # fmt: skip
POINTS = (*(f"s.{name}" for name in SCHEDULER), *(f"w.{name}" for name in WORKER), *(f"c.{name}" for name in CHAIN))


def kept(side: SchedulerSide, worker: WorkerSide) -> dict[str, Any]:
    """The tables that are not empty, by name."""
    tables = {
        name: attrgetter(name)(owner)
        for owner, names in ((side, SCHEDULER_TABLES), (worker, WORKER_TABLES))
        for name in names
    }
    return {name: table for name, table in tables.items() if table}


class Injected(Exception):
    """Nobody can have foreseen this."""


class Injector:
    """Calls `decide(point)` at every inner call: "before" or "after" it an error is raised; None: it goes on.

    Attributes:
        active: whether to inject at all.
        fired: errors by the hook that they were in, and by point.
    """

    def __init__(self, side: SchedulerSide, worker: WorkerSide, decide: Callable[[str], str | None]) -> None:
        self.active = True
        self.fired: Counter[tuple[str, str]] = Counter()
        self._decide = decide
        self._within = threading.local()
        self._undo: list[Callable[[], None]] = []
        hooks: list[tuple[Any, str, str]] = [(side, name, name) for name in SCHEDULER_HOOKS]
        hooks += [(worker, path, name) for name, path in WORKER_HOOKS.items()]
        for hooked, place, name in hooks:
            part_of, _, method = place.rpartition(".")
            of = attrgetter(part_of)(hooked) if part_of else hooked
            self._replace(of, method, self._hook(name, getattr(of, method)))
        owners: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
            ("s", side, SCHEDULER), ("w", worker, WORKER), ("c", PrefixChain, CHAIN),
        )  # fmt: skip
        for letter, owner, points in owners:
            for point in points:
                *path, name = point.split(".")
                found: Any = owner
                for part in path:
                    found = getattr(found, part)
                if found is not None:
                    self._replace(found, name, self._breakable(f"{letter}.{point}", getattr(found, name)))

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()

    def hooks(self) -> Counter[str]:
        """Errors by hook."""
        hooks: Counter[str] = Counter()
        for (hook, _), count in self.fired.items():
            hooks[hook] += count
        return hooks

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        own = vars(owner) if hasattr(owner, "__dict__") else {}
        if name in own:
            before = own[name]
            self._undo.append(lambda: setattr(owner, name, before))
        else:
            self._undo.append(lambda: delattr(owner, name))
        setattr(owner, name, new)

    def _hook(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def hook(*args: Any, **more: Any) -> Any:
            before, self._within.hook = getattr(self._within, "hook", ""), name
            try:
                return inner(*args, **more)
            finally:
                self._within.hook = before

        return hook

    def _breakable(self, point: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            when = self._decide(point) if self.active else None
            if when == "before":
                self._fire(point)
            answer = inner(*args, **more)
            if when == "after":
                self._fire(point)
            return answer

        return call

    def _fire(self, point: str) -> None:
        thread = threading.current_thread().name.rpartition("-")[0]
        hook = getattr(self._within, "hook", "") or THREADS.get(thread, "elsewhere")
        self.fired[hook, point] += 1
        raise Injected(f"{point} in {hook}")
