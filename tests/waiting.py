"""Waits of tests for what another thread or process does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PATIENCE = 60.0  # seconds, as long as threads may take that get no processor


def wait_until(condition: Callable[[], object], what: str = "what the test waits for") -> None:
    """Look every few milliseconds until `condition` holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"not within {PATIENCE:g} s: {what}"
        time.sleep(0.005)


def let_name(go: threading.Event) -> None:
    """Set what the threads wait for that name an engine's weights; return once they have ended."""
    naming = [each for each in threading.enumerate() if each.name == "cuvee-weights"]
    go.set()
    for each in naming:
        each.join(PATIENCE)
