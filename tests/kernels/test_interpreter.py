"""Triton's interpreter still runs the kernels, where one looks for an error or has no g++: one test of each kind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.emulation import KERNELS_RUN_ON
from tests.kernels.conftest import CHOSEN

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
@pytest.mark.skipif(KERNELS_RUN_ON != "ptx", reason=f"kernels run on: {KERNELS_RUN_ON}")
def test_kernels_run_in_the_interpreter() -> None:
    environment = {**os.environ, "CUVEE_KERNELS": "interpreter"}
    chosen = [f"tests/kernels/{test}" for test in CHOSEN]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *chosen]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " skipped" not in done.stdout and " passed" in done.stdout
