"""Engines that differ in one thing share a store, for some seconds; `tests/fuzz/identities.py` does so for longer."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fuzz.identities import identities
from tests.integrations.vllm.engines import need_vllm


@pytest.mark.slow
def test_no_answer_is_anothers(tmp_path: Path) -> None:
    need_vllm()
    done = identities(40.0, 1, tmp_path)
    assert set(done["engines"]) >= {"plain", "override", "function", "adapters"} and done["answers"] > 20
    assert sum(done["cached tokens"].values()) > 0
