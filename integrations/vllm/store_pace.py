"""`StorePace`: how much of a core storing may take while the engine computes.

    engine's steps --> EngineSteps: busy or idle? --+
    CPU time spent on storing ----------------------+--> StorePace: how long does the next entry wait?

The engine is busy while one of its steps runs, and for a short time afterwards: a few times the mean interval between
its steps, because then the next step is to be expected. While it is busy, storing may take `share` seconds of CPU time
per second. While it is idle, storing takes what it wants and owes nothing.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

# What was not spent for so long is lost: after a pause, storing may take `share` times this at once.
WINDOW_SECONDS = 1.0
# The engine is taken for idle after so many of its mean intervals without a step, within these limits. A server needs
# some time between two steps, and between a request and the next one of a client that waits for its answers.
PATIENCE_INTERVALS = 4
LEAST_PATIENCE = 0.05
MOST_PATIENCE = 1.0
# A step that has not ended by then will not: the engine failed in the middle of it.
LONGEST_STEP = 60.0
_WEIGHT = 1 / 8  # of the last interval in the mean


class EngineSteps:
    """Tells from the times of the engine's steps whether it is busy. All times are of one monotonic clock, in seconds.

    Attributes:
        interval: exponentially weighted mean of the seconds from one step to the next; None before the second step.
    """

    def __init__(self) -> None:
        self.interval: float | None = None
        self._begun = -math.inf
        self._last = -math.inf  # when the engine was last seen in a step
        self._running = False

    def begin(self, now: float) -> None:
        """A step begins, unless one is running already."""
        if self._running:
            return
        interval = now - self._begun
        # Longer intervals are pauses, or steps so long that they alone tell that the engine is busy.
        if interval <= MOST_PATIENCE:
            last = interval if self.interval is None else self.interval
            self.interval = last + _WEIGHT * (interval - last)
        self._begun = self._last = now
        self._running = True

    def end(self, now: float) -> None:
        """The step ends."""
        self._last = now
        self._running = False

    def seconds_until_idle(self, now: float) -> float:
        """Return after how many seconds the engine will be idle if no further step begins; 0: it is. A step that runs
        may end at any moment, so it counts as if it ended now.
        """
        if self._running:
            return self._patience if now < self._begun + LONGEST_STEP else 0.0
        return max(self._last + self._patience - now, 0.0)

    @property
    def _patience(self) -> float:
        if self.interval is None:
            return MOST_PATIENCE
        return min(max(PATIENCE_INTERVALS * self.interval, LEAST_PATIENCE), MOST_PATIENCE)


class StorePace:
    """Decides when the next entry may be encoded. Thread-safe.

    An entry is charged when it is done, because what it takes is not known before: one may begin whenever nothing is
    owed. So in any span of a busy engine, storing takes at most `share` of it, and `share` seconds (`WINDOW_SECONDS`),
    and what the last entries take.

    Args:
        share: seconds of CPU time per second; above 0.
        clock: monotonic, in seconds.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._clock = clock
        self._lock = threading.Lock()
        self._steps = EngineSteps()
        self._settled = -math.inf  # the time at which all that was spent is paid off

    def begin_step(self) -> None:
        """Note that the engine begins a step, if it is in none."""
        with self._lock:
            self._steps.begin(self._clock())

    def end_step(self) -> None:
        """Note that the engine's step is over."""
        with self._lock:
            self._steps.end(self._clock())

    def charge(self, seconds: float) -> None:
        """Charge CPU time that was spent on storing; it is free if the engine is idle now."""
        with self._lock:
            now = self._clock()
            if self._steps.seconds_until_idle(now):
                self._settled = max(self._settled, now - WINDOW_SECONDS) + seconds / self._share

    def wait(self, running: int) -> float:
        """Return after how many seconds a further entry may begin at the soonest; 0: now.

        It may be later, because the engine goes on: ask again then.

        Args:
            running: number of entries that are being encoded. While the engine is busy, there are never more than fill
                the share, because none of them is charged yet.
        """
        with self._lock:
            now = self._clock()
            busy = self._steps.seconds_until_idle(now)
            if running >= math.ceil(self._share):
                return busy
            return min(max(self._settled - now, 0.0), busy)
