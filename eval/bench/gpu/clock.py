"""Timing calls that leave their work to a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import cycle

import torch

from cuvee.eval.bench.timing import Effort, Timing
from cuvee.kernels.tracing import trace_stages

__all__ = ["CLOCK_RATE", "HEAD_START", "L2_TIMES", "Clock", "sum_stages", "turns"]


L2_TIMES = 3  # the sets that take turns are this many times as large as the L2 cache
CLOCK_RATE = 2e9  # about how many cycles a device makes per second
HEAD_START = 0.05  # seconds that a device sleeps at most until launches are queued


class Clock:
    """Times calls that leave their work to a device. On the CPU, all times are those of the host.

    The calls given to a method take turns, so that none finds its own data in the cache.
    """

    def __init__(self, device: torch.device, effort: Effort) -> None:
        self.device, self._effort = device, effort
        self._gpu = device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self._gpu:
            torch.cuda.synchronize(self.device)

    def once(self, call: Callable[[], object]) -> float:
        """Seconds of one call, from an idle device until it is idle again."""
        self.synchronize()
        began = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - began

    def whole(self, calls: Sequence[Callable[[], object]]) -> Timing:
        """Seconds per call, from an idle device until it is idle again, with the host's work included."""
        calls[0]()
        taken: list[float] = []
        for call in cycle(calls):
            if self._effort.is_enough(taken):
                break
            taken.append(self.once(call))
        return Timing.of(taken)

    def inside(self, calls: Sequence[Callable[[], object]]) -> Timing:
        """Seconds per call on the device, by its events. This is for calls whose launches run ahead of the device."""
        if not self._gpu:
            return self.whole(calls)
        runs = self._runs(calls[0])
        # The device sleeps until launches are queued: otherwise short calls would be charged for the host's work.
        torch.cuda._sleep(int(CLOCK_RATE * min(runs * self.once(calls[0]), HEAD_START)))
        events = []
        for _, call in zip(range(runs), cycle(calls), strict=False):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            events.append((begin, end))
        self.synchronize()
        return Timing.of([begin.elapsed_time(end) / 1e3 for begin, end in events])

    def stages(self, calls: Sequence[Callable[[], object]]) -> dict[str, Timing]:
        """Seconds per call on the device in each stage of the backend. Empty on the CPU, which has no events.

        Encoding waits for the device halfway, so its last stages include the time the host takes to launch them.
        """
        if not self._gpu:
            return {}
        runs = self._runs(calls[0])
        # As in `inside`: a stage must not be charged for the host's work before it.
        cycles = int(CLOCK_RATE * max(self.once(call) for call in calls[:2]))
        traces = []
        for _, call in zip(range(runs), cycle(calls), strict=False):
            torch.cuda._sleep(cycles)
            with trace_stages() as trace:
                call()
            self.synchronize()
            traces.append(trace)
        return sum_stages([[(s.name, s.begin.elapsed_time(s.end) / 1e3) for s in trace] for trace in traces])

    def _runs(self, call: Callable[[], object]) -> int:
        call()
        each = max(self.once(call), 1e-6)
        return min(max(int(self._effort.seconds / each), self._effort.least), self._effort.most)


def sum_stages(runs: Sequence[Sequence[tuple[str, float]]]) -> dict[str, Timing]:
    """Timings by name, from runs of (name, seconds). If a stage comes up several times in a run, it is added up."""
    names = list(dict.fromkeys(name for run in runs for name, _ in run))
    return {name: Timing.of([sum(s for other, s in run if other == name) for run in runs]) for name in names}


def turns(working_set: int, l2: int, most: int) -> int:
    """How many sets of `working_set` bytes must take turns to exceed an L2 cache; at most `most`."""
    return max(min(-(-L2_TIMES * l2 // max(working_set, 1)), most), 1)
