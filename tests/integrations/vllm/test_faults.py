"""Whatever happens to a store, a load or a process: every request of a real engine is answered right."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integrations.vllm import faults
from tests.integrations.vllm.engines import save_tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(folder: Path) -> faults.Outcome:
    """Every scenario that the process of its engine survives."""
    return faults.run_group("served", folder, save_tiny_model("llama", folder / "llama"))


@pytest.mark.parametrize("scenario", faults.INJECTED)
def test_answers_are_right(scenario: str, served: faults.Outcome) -> None:
    served.expect_sound(scenario)


def test_processes_end(served: faults.Outcome) -> None:
    """Also with loads given up, and stores that failed."""
    assert served.status == 0, served.log[-4000:]
