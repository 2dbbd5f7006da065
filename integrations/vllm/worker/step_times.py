"""The time that a rank takes for the forward of each step: its own, whatever the engine has scheduled meanwhile."""

from __future__ import annotations

import time
from collections import deque

import torch

from cuvee.kernels.devices import on_host

_UNDER_WAY = 16  # steps of which a device has not said yet that they are over


class StepTimes:
    """Times steps between `begin` and `end`. On a device, the step's place on its stream is timed, so that neither
    the step before nor the CPU's lead counts, and nothing waits for it.
    """

    def __init__(self) -> None:
        self._begun: tuple[int, float | torch.cuda.Event] | None = None
        self._done: deque[tuple[int, float | torch.cuda.Event, float | torch.cuda.Event]] = deque(maxlen=_UNDER_WAY)

    def begin(self, step: int, device: torch.device) -> None:
        """Note that a step begins on a device's current stream."""
        self._begun = step, self._now(device)

    def end(self, device: torch.device, failed: bool) -> None:
        """Note that the work of the step has been given to the device; a step that `failed` is not timed."""
        if self._begun is not None and not failed:
            self._done.append((*self._begun, self._now(device)))
        self._begun = None

    def take(self) -> dict[int, float]:
        """Return the seconds of the steps that are over, by step, each once."""
        seconds: dict[int, float] = {}
        while self._done:
            step, begun, ended = self._done[0]
            if isinstance(begun, float) and isinstance(ended, float):
                seconds[step] = ended - begun
            elif isinstance(begun, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
                if not ended.query():
                    break
                seconds[step] = begun.elapsed_time(ended) / 1e3
            self._done.popleft()
        return seconds

    def _now(self, device: torch.device) -> float | torch.cuda.Event:
        if on_host(device):
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event
