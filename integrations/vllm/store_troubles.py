"""`StoreTroubles`: counts what goes wrong in a store that no worker reports."""

from __future__ import annotations

from cuvee.integrations.stores import Store
from cuvee.integrations.vllm.metrics import Recorder


class StoreTroubles:
    """Errors and skipped operations of the scheduler's own store. What it reads is that of the workers' stores, too.

    Args:
        store: of the scheduler.
        recorder: told of `store_operations` that are errors or skipped.
    """

    def __init__(self, store: Store, recorder: Recorder) -> None:
        self._store, self._recorder = store, recorder
        self._counted: dict[str, tuple[int, int]] = {}  # by tier

    def count(self) -> None:
        """Count what happened since the last call."""
        for tier, now in self._store.counters().items():
            before = self._counted.get(tier, (0, 0))
            self._counted[tier] = now.errors, now.skipped
            for result, value, last in zip(("error", "skipped"), self._counted[tier], before, strict=True):
                # A value below the last one means that the store was opened anew.
                self._recorder.count("store_operations", value - last if value >= last else value, f"{tier}:{result}")
