"""Waits of tests for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 60.0  # seconds, as long as threads may take that get no processor


def wait_until(condition: Callable[[], object], what: str = "what the test waits for") -> None:
    """Look every few milliseconds until `condition` holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"not within {PATIENCE:g} s: {what}"
        time.sleep(0.005)
