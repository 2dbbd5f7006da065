"""Short soak tests of stores with three processes; `make soak` runs them for longer."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fuzz import soak
from tests.integrations.stores.redis_server import require_redis


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("file", marks=pytest.mark.nightly), "tiered", "redis"])
def test_nothing_wrong_is_returned(kind: str) -> None:
    if kind == "redis":
        require_redis()
    done = soak.soak(kind, 5.0)  # including two or three seconds in which the processes start
    assert done["operations"] > 100 and done["hits"] and done["puts"] and done["held in the audit"]


def test_a_wrong_value_is_told(tmp_path: Path) -> None:
    key = soak.every_key()[0]
    assert soak.checked(key, None) is False and soak.checked(key, soak.value_of(key)) is True
    assert len({soak.value_of(key) for key in soak.every_key()}) > len(soak.every_key()) // 2
    with pytest.raises(soak.Wrong, match="not its own"):
        soak.checked(key, soak.value_of(soak.every_key()[1]) + b"x")


def test_a_store_over_its_budget_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit measures the folder rather than trusting the store's counters."""
    monkeypatch.setattr(soak, "MAX_MB", 0.1)
    with pytest.raises(soak.Wrong, match="budget is"):
        soak._audit(f"file://{tmp_path / 'store'}", tmp_path / "store")
