"""The step `tests`: the kernels' tests on the device. Also the pytest plugin that this step loads into every process.

A test that faults costs its process the device. So the process ends after such a test, and pytest-xdist starts another
one for the tests that are left. A test that hangs ends its process, too.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch

__all__ = ["run_step"]

SECONDS = float(os.environ.get("CUVEE_TEST_SECONDS", "1800"))  # for one test
EVERY = 2.0  # seconds between two savings
MOST_TEXT = 20_000  # characters of one failure; all of them have to fit into a file that comes back
MOST_FAILURES = 300
HOSTILE = "300"  # forged blobs
_FAULTS = ("CUDA error", "device-side assert", "Triton Error [CUDA]", "AcceleratorError")
# What a rehearsal runs: a test of each kind, as the emulator takes minutes for all of them.
REHEARSED = (
    "tests/kernels/test_rans.py", "tests/kernels/test_symbols.py",
    "tests/kernels/test_backend.py::test_each_reads_what_the_other_wrote",
    "tests/kernels/test_backend.py::test_lossless_is_the_same_bytes",
    "tests/kernels/test_forged_blobs.py",
)  # fmt: skip
FULL = ("tests/kernels",)


class Outcomes:
    """Collects outcomes where pytest distributes the tests, and saves them now and then."""

    def __init__(self, save: Callable[[object], None]) -> None:
        self._save, self._saved = save, 0.0
        self._outcomes: dict[str, str] = {}
        self._seconds: dict[str, float] = {}
        self._failures: dict[str, str] = {}
        self.collected = 0

    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """Take the number of tests from any of the processes."""
        self.collected = len(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the outcome of a test's phase."""
        test = report.nodeid
        file = test.split("::")[0]
        self._seconds[file] = self._seconds.get(file, 0.0) + report.duration
        if report.failed:
            # The first text is the test's own: a process that ends after it is reported as another failure.
            self._failures.setdefault(test, str(report.longrepr)[:MOST_TEXT])
        if report.failed or self._outcomes.get(test) is None or self._outcomes[test] == "passed":
            self._outcomes[test] = report.outcome
        if time.monotonic() - self._saved > EVERY:
            self.save()

    def save(self) -> None:
        """Save what is known so far."""
        self._saved = time.monotonic()
        counts = Counter(self._outcomes.values())
        self._save(
            {
                "collected": self.collected,
                **{name: counts[name] for name in ("passed", "failed", "skipped")},
                "not_run": max(self.collected - len(self._outcomes), 0),
                "seconds_by_file": {name: round(own, 2) for name, own in self._seconds.items()},
                "failures": dict(list(self._failures.items())[:MOST_FAILURES]),
                "more_failures": list(self._failures)[MOST_FAILURES:],
            }
        )


def run_step(device: torch.device, save: Callable[[object], None]) -> None:
    """Run the tests and save their outcomes as they come."""
    gpu = device.type == "cuda"
    os.environ["CUVEE_PTX_MUTANTS"] = HOSTILE if gpu else "24"
    if gpu:
        os.environ.setdefault("CUVEE_TEST_SECONDS", "90")
    outcomes = Outcomes(save)
    processes = min(8, max((os.cpu_count() or 2) // 2, 1)) if gpu else 2
    # A warning that only this machine gives must not fail what else would pass.
    given = ["-m", "gpu", "-q", "-W", "default", "-p", "no:cacheprovider", "-p", __name__, "-n", str(processes)]
    code = pytest.main(
        [*given, "--dist", "worksteal", "--max-worker-restart", "60", *(FULL if gpu else REHEARSED)], [outcomes]
    )
    outcomes.save()
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        sys.exit(f"pytest ended with {code!r}")
    sys.exit(int(code))


# The plugin ------------------------------------------------------------------------------------------------------

_faulty: list[str] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End a process whose test hangs, with the stacks on standard error."""
    faulthandler.dump_traceback_later(SECONDS, exit=True, file=2)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a test that has lost the device."""
    if report.failed and "PYTEST_XDIST_WORKER" in os.environ and any(f in str(report.longrepr) for f in _FAULTS):
        _faulty.append(report.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish(nodeid: str) -> None:
    """End a process that has lost the device, once its test has been reported."""
    if nodeid in _faulty:
        os._exit(1)
