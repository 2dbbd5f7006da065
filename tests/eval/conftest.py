"""What the tests of reports and of the lm-eval model share."""

from __future__ import annotations

from typing import Any

import pytest

from cuvee.eval.cached_reading import CachedReader


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Of each prefill, the tokens of its contexts."""
    lengths: list[list[int]] = []
    prefill = CachedReader._prefill

    def noted(self: CachedReader, contexts: Any, *given: Any) -> Any:
        lengths.append([*map(len, contexts)])
        return prefill(self, contexts, *given)

    monkeypatch.setattr(CachedReader, "_prefill", noted)
    return lengths
