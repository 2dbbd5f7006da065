"""Encodes entries one by one and only as fast as `StorePace` allows, in the threads that encode.

An entry waits in a queue, not in a thread: the threads that encode have no job that looks as if it were stuck, and more
urgent entries overtake it. One thread more watches the queue, and hands the next entry over when its time has come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from cuvee.integrations.guard import Guard
from cuvee.integrations.stores.threads import ThreadPool
from cuvee.integrations.vllm.save_queue import CopiedSave, SaveQueue
from cuvee.integrations.vllm.store_pace import StorePace
from cuvee.integrations.vllm.worker_state import WorkerPools, WorkerState

_RETRY_SECONDS = 1.0  # after an error in this module


class PacedSaves:
    """The entries of one rank that wait to be encoded.

    Args:
        state: of the worker.
        pools: threads of the worker.
        guard: contains errors.
        pace: says when the next entry may be encoded.
        work: encodes an entry and hands it to the writers; raises nothing.
        release: books an entry as not stored.
        clock: monotonic, in seconds.
        cpu_clock: CPU time of the calling thread, in seconds.

    Attributes:
        queue: what waits; the state's lock guards it.
    """

    def __init__(
        self,
        state: WorkerState,
        pools: WorkerPools,
        guard: Guard,
        pace: StorePace,
        work: Callable[[CopiedSave], None],
        release: Callable[[CopiedSave], None],
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._state = state
        self._encoders: ThreadPool = pools.encoders
        self._pacer: ThreadPool = pools.pacer
        self._guard = guard
        self._pace = pace
        self._work, self._release = work, release
        self._clock, self._cpu_clock = clock, cpu_clock
        self._changed = threading.Condition(state.lock)
        # The state's lock guards these.
        self.queue = SaveQueue()
        self._running: dict[int, float] = {}  # when each entry was handed to the threads that encode, by its number
        self._handed_over = 0
        self._watching = False
        self._finished = False

    def add(self, copied: CopiedSave) -> None:
        """Encode an entry when its time has come.

        Raises:
            RuntimeError: no thread can be started.
        """
        with self._changed:
            finished = self._finished
            if not finished:
                if not self._watching:
                    self._pacer.submit(self._watch)
                    self._watching = True
                self.queue.add(copied)
                self._changed.notify()
        if finished:
            self._hand_over(copied)

    def charge(self, cpu_seconds: float) -> None:
        """Charge CPU time that storing took outside the threads that encode."""
        self._pace.charge(cpu_seconds)

    def finish(self) -> None:
        """Hand all that waits to the threads that encode, because the engine stops."""
        with self._changed:
            self._finished = True
            waiting = [self.queue.take() for _ in range(len(self.queue))]
            self._changed.notify_all()
        for copied in waiting:
            self._hand_over(copied)

    def _watch(self) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        """Hand over the next entry, or wait for its time; False: finished. One call per entry, so that no entry stays
        referenced while this waits.
        """
        with self._guard("store"):
            return self._try_to_step()
        with self._changed:
            self._wait(_RETRY_SECONDS)
        return True

    def _try_to_step(self) -> bool:
        with self._changed:
            if self._finished:
                return False
            pause, waiting = self._hindrance()
            if pause == 0:
                copied = self.queue.take()
            else:
                begun = self._clock()
                self._wait(pause)
                waited = self._clock() - begun
        if pause == 0:
            self._hand_over(copied)
        elif waiting:
            self._state.recorder.count("deferred_seconds", waiting * waited)
        return True

    def _hindrance(self) -> tuple[float | None, int]:
        """Return for how many seconds no entry may begin, unless something changes (None: for ever), and how many
        entries wait because of the budget. The state's lock is held.
        """
        if not self.queue:
            return None, 0
        # As in the pool, what takes too long hangs, and another thread starts in its place.
        now = self._clock()
        begun = [at for at in self._running.values() if now - at <= self._state.timeout]
        if len(begun) >= self._encoders.threads:
            return max(min(begun) + self._state.timeout - now, 1e-3), 0
        pause = self._pace.wait(len(begun))
        return pause, len(self.queue) if pause else 0

    def _wait(self, seconds: float | None) -> None:
        """Wait until something changes; the state's lock is held."""
        self._changed.wait(seconds)

    def _hand_over(self, copied: CopiedSave) -> None:
        with self._state.lock:
            self._handed_over += 1
            number = self._handed_over
            self._running[number] = self._clock()
        with self._guard("store", partial(self._fail, number, copied)):
            self._encoders.submit(self._encode, number, copied)

    def _fail(self, number: int, copied: CopiedSave) -> None:
        self._release(copied)
        self._end(number, 0.0)

    def _encode(self, number: int, copied: CopiedSave) -> None:
        # The time of this thread is all that an entry takes of the CPU: the connector's codec starts no threads
        # (`Setup.codec`). Time on a clock would also count what the engine takes of this core meanwhile, and what a
        # store lets us wait; the process's time is mostly the engine's.
        begun = self._cpu_clock()
        try:
            self._work(copied)
        finally:
            self._end(number, self._cpu_clock() - begun)

    def _end(self, number: int, cpu_seconds: float) -> None:
        with self._changed:
            self._running.pop(number, None)
            self._changed.notify()
            with self._guard("store"):
                self._pace.charge(cpu_seconds)
