"""Memory that threads use again. That each has its own, `test_torch_threads.py` shows."""

from __future__ import annotations

import numpy as np

from cuvee.codec.support.arena import MAX_CACHED, Arena


def test_a_large_buffer_is_not_kept() -> None:
    arena = Arena()
    kept = arena.array("a", 100, np.uint8)
    assert arena.array("a", MAX_CACHED + 1, np.uint8).shape == (MAX_CACHED + 1,)
    assert np.shares_memory(kept, arena.array("a", 100, np.uint8))
