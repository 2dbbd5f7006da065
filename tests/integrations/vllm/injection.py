"""Errors in the middle of the connector: `Injector` lets any inner call of its two sides raise."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from cuvee.codec.identity import PrefixChain
from cuvee.integrations.vllm.scheduler import SchedulerSide
from cuvee.integrations.vllm.worker import WorkerSide

# What vLLM calls, and what runs in threads on its behalf.
SCHEDULER_HOOKS = ("arrived", "matched_tokens", "allocated", "plan", "take", "finished", "told", "reset")
WORKER_HOOKS = ("void", "start_loads", "drop", "blend", "save", "take_arrived", "take_invalid_blocks", "report")
THREADS = {"cuvee-lookup": "lookup", "cuvee-load": "load", "cuvee-fetch": "load", "cuvee-decode": "load",
           "cuvee-encode": "store", "cuvee-write": "store"}  # fmt: skip
HOOKS = (*SCHEDULER_HOOKS, *WORKER_HOOKS, *dict.fromkeys(THREADS.values()))

# Inner calls, by side. Left out: what contains errors itself, and what puts things right (`_give_up`, `_end`).
SCHEDULER = (
    "_arrive", "_match", "_allocate", "_track", "_why_uncached", "_tenant", "_chain", "_is_loaded_by_another",
    "_prefix_tokens", "_blended_tokens", "_pays", "_usable", "_storable", "_entries", "_tail_sizes", "_worth_asking",
    "_ask", "_whole", "_look_up", "_answer", "_find", "_lookups._contains", "_lookups.begin",
    "_count_troubles", "_new_saves", "_new_segments",
    "_tail", "_last_tail", "_unchanged", "_is_known", "_take_blends", "_blend_tokens", "_plan_requests", "_refuse",
    "_take_rates", "_rename", "_load_is_over", "_drop", "_clock", "_adapter_identity",
    "_lookups._crew.submit",
    "_recorder.count", "_recorder.gauge", "_recorder.absorb", "_store.overdue", "_store.counters", "_store.contains",
    "_break_even.observe_load", "_break_even.observe_prefill", "_break_even.worth_loading", "_break_even.changed",
    "_planner.segment", "_planner.ask", "_planner.offer", "_planner.harvest", "_planner.refuse", "_planner.rename",
)  # fmt: skip
WORKER = (
    "_try_to_load", "_place", "_blend_slice", "_blended", "_fetched", "_get", "_bound_to", "_restore",
    "_decode",
    "_in_a_row", "_open", "_discard", "_book", "_count_load", "_copy", "_try_to_save",
    "_encode", "_try_to_write", "_fail", "_bytes", "_key", "_slots", "_slots_of_save", "_slots_of_entry",
    "_importance", "_loaders.submit", "_fetchers.submit", "_encoders.submit", "_writers.submit", "_recorder.count",
    "_recorder.gauge", "_recorder.record_store", "_recorder.drain", "_store.overdue", "_store.counters",
    "_store.contains", "_store.get_many", "_store.put", "_store.delete", "_codec.encode_paged", "_codec.decode_paged",
    "_codec.open_expected", "_codec.on_device",
)  # fmt: skip
CHAIN = ("digests", "tails")
POINTS = (*(f"s.{name}" for name in SCHEDULER), *(f"w.{name}" for name in WORKER), *(f"c.{name}" for name in CHAIN))


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
        for hooked, names in ((side, SCHEDULER_HOOKS), (worker, WORKER_HOOKS)):
            for name in names:
                self._replace(hooked, name, self._hook(name, getattr(hooked, name)))
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
