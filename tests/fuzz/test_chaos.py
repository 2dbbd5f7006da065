"""A real engine whose connector fails at random, for some seconds; `make chaos` does so for longer."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fuzz import chaos
from tests.integrations.vllm.engines import NO_FP8, fp8_runs, need_vllm


@pytest.mark.nightly
@pytest.mark.parametrize("kind", chaos.KINDS)
def test_no_engine_ends_and_no_answer_is_another_one(kind: str, tmp_path: Path) -> None:
    need_vllm()
    if kind == "fp8" and not fp8_runs():
        pytest.skip(NO_FP8)
    done = chaos.chaos(25.0, 7, tmp_path, kind)
    asked, errors = done["requests"], done["errors by hook"]
    assert asked["answers"] > 100 and all(asked.get(fate) for fate in chaos.fates_of(kind))
    assert done["counted"]["loads"] > 10 and sum(done["faults of the store"].values()) > 50
    assert set(errors) >= chaos.NEEDED
