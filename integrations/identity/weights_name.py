"""`WeightsName`: the name of the weights that an engine computes with; none while that is not known.

    WeightsName(make) ──thread──> current ──withdraw──> none ──make, use──> current …

Every key that an adapter stores under or looks up is derived from such a name, so the contract for adapters is:

- **Before** anything is stored, looked up or loaded, read `current` once and derive all of its keys from that `Named`.
  None: nothing is stored or found. Reading it costs an attribute: it may be done for every request and step.
- **After** the work, before its result counts (an entry is handed to the store, an engine is told that pages are
  loaded), ask `holds(named)`: False means that the weights may have changed meanwhile. Drop the result.
- Whoever keeps what it derived from a name (chains of digests, `PageNames`) compares the kept `Named` with `current` by
  `is`. A name that is made again is another `Named`, even with the same text.
- Whoever learns that the weights may be others calls `withdraw(reason)` at once, on any thread, and then `make` or
  `use` once the new weights can be named. Between the two nothing is stored or loaded, and requests are computed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from cuvee.codec.errors import ProfileMismatchError
from cuvee.integrations.core.niceness import give_way

logger = logging.getLogger(__name__)

START_SECONDS = 2.0
"""Seconds that an engine's start waits for the name: enough for small checkpoints, and for digests that are kept."""

_NICENESS = 10  # of the threads that read while the engine serves
_READERS = ("cuvee-weights", "cuvee-digest")  # how their names begin

Make = Callable[[threading.Event], str]
"""Makes the text of a name; may read all of a checkpoint. Once the event is set, it may give up with any error.

It raises a ProfileMismatchError where nothing may be stored under any name, because the profile is of other weights.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Named:
    """A name of weights, equal to no other one.

    Attributes:
        text: `Identity.model` of what is stored under it: the same for the same weights in every process.
    """

    text: str


class WeightsName:
    """The present name of an engine's weights. Thread-safe; nothing here waits but `wait` and `wait_at_start`.

    Args:
        make: makes the first name, on a thread of its own that starts now.
        failed: called when the weights cannot be named.

    Attributes:
        current: the present name; None: it is not known.

    Example:
        >>> weights = WeightsName(lambda stop: "a7f3")
        >>> named = weights.wait(10)
        >>> named.text, weights.holds(named)
        ('a7f3', True)
        >>> weights.withdraw("the engine loaded other weights")
        >>> weights.current is None, weights.holds(named)
        (True, False)
        >>> weights.use("b201").text
        'b201'
    """

    def __init__(self, make: Make, failed: Callable[[], object] = lambda: None) -> None:
        self.current: Named | None = None
        self._changed = threading.Condition()
        self._stop = threading.Event()  # of the thread that makes a name now, or of the last one
        self._making = False
        self._gives_way = False  # whether threads that read give way: not while an engine's start waits for them
        self._failed = failed
        self._refused: ProfileMismatchError | None = None
        self.make(make)

    def holds(self, named: Named | None) -> bool:
        """Return whether a name that was read before is still the present one; False for None."""
        return named is not None and named is self.current

    def make(self, make: Make) -> None:
        """Make a name in the background, and withdraw the present one until then.

        What an earlier call is still making is dropped. An error of `make` is logged; then there is no name until
        another call.
        """
        with self._changed:
            self._end()
            self._stop = stop = threading.Event()
            self._making = True
        thread = threading.Thread(target=self._run, args=(make, stop), name="cuvee-weights", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no thread can be started
            self._fail(stop, error)

    def use(self, text: str) -> Named:
        """Use a name that is known, such as the engine's own version of its weights, from now on."""
        with self._changed:
            return self._publish(text)

    def withdraw(self, reason: str) -> None:
        """Have no name until `make` or `use`, because the weights may be others; logs the reason."""
        with self._changed:
            had = self.current
            self._end()
        logger.warning(
            "cuvee: nothing is stored or loaded until the weights have a new name, because %s%s", reason,
            "" if had is None else f" (they were {had.text})",
        )  # fmt: skip

    def wait(self, seconds: float) -> Named | None:
        """Return the name once it is known; None if it is not within some seconds, or nobody is making one."""
        with self._changed:
            self._changed.wait_for(lambda: self.current is not None or not self._making, seconds)
            return self.current

    def wait_at_start(self) -> None:
        """Wait a moment for the first name, as an engine's start may. Logs if it takes longer.

        Raises:
            ProfileMismatchError: the profile is of other weights, and that is known within this moment, as it is of
                small checkpoints and of those that were read before.
        """
        self.wait(START_SECONDS)
        self._gives_way = True
        for thread in threading.enumerate():
            if thread.name.startswith(_READERS) and thread.native_id is not None:  # None: it is about to run
                give_way(_NICENESS, thread.native_id)
        if self._refused is not None:
            raise self._refused
        if self._making:
            logger.info("cuvee: the checkpoint is being read to name it; until then nothing is stored or loaded")

    def close(self) -> None:
        """Have no name any more, and stop making one."""
        with self._changed:
            self._end()

    def _end(self) -> None:
        """Drop the name and what is being made. Called with the lock held."""
        self._stop.set()
        self._making, self.current = False, None
        self._changed.notify_all()

    def _publish(self, text: str) -> Named:
        """Take a name. Called with the lock held."""
        self._end()
        self.current = named = Named(text)
        return named

    def _run(self, make: Make, stop: threading.Event) -> None:
        if self._gives_way:
            give_way(_NICENESS)
        began = time.monotonic()
        try:
            text = make(stop)
        except Exception as error:
            self._fail(stop, error)
            return
        with self._changed:
            if stop.is_set():  # withdrawn meanwhile
                return
            self._publish(text)
        if (seconds := time.monotonic() - began) > START_SECONDS:
            logger.info("cuvee: the weights have a name after %.1f s: from now on KV is stored and loaded", seconds)

    def _fail(self, stop: threading.Event, error: Exception) -> None:
        with self._changed:
            if stop.is_set():
                return
            if isinstance(error, ProfileMismatchError):
                self._refused = error
                logger.error("cuvee: nothing is stored or loaded: %s; then restart", error)
            else:
                logger.error(
                    "cuvee: nothing is stored or loaded, because the weights cannot be named (%s: %s): set option "
                    "'model_id' to a name of your own that changes with the weights, and restart",
                    type(error).__name__, error,
                )  # fmt: skip
            self._failed()
            self._end()
