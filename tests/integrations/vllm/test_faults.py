"""Whatever happens to a store, a load or a process: every request of a real engine is answered right."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.integrations.vllm import faults
from tests.integrations.vllm.engines import save_tiny_model

pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a process with engines: its exit status, what became of its scenarios, and what it said."""

    status: int | str
    scenarios: dict[str, str]
    log: str

    def expect_sound(self, scenario: str) -> None:
        """Fail as the scenario did."""
        problem = self.scenarios.get(scenario, f"the process ended before it, with {self.status}\n{self.log[-4000:]}")
        assert not problem, f"{scenario}: {problem}"


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return save_tiny_model("llama", folder / "llama")


@pytest.fixture(scope="module")
def served(folder: Path, model: Path) -> Outcome:
    """Every scenario that the process of its engine survives."""
    place = folder / "served"
    place.mkdir()
    status, log = faults.run_group("served", place, model)
    results = place / "results.json"
    return Outcome(status, json.loads(results.read_text()) if results.exists() else {}, log)


@pytest.mark.parametrize("scenario", faults.INJECTED)
def test_answers_are_right(scenario: str, served: Outcome) -> None:
    served.expect_sound(scenario)


def test_processes_end(served: Outcome) -> None:
    """Also with loads given up, and stores that failed."""
    assert served.status == 0, served.log[-4000:]
