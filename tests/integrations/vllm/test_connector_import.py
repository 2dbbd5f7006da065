"""What vLLM imports before its workers start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.integrations.vllm.engines import need_vllm

import cuvee


def test_the_connector_is_imported_without_numba() -> None:
    """vLLM's workers call `vars` on all modules when they start on a CPU, which fails for a module of llvmlite's."""
    need_vllm()
    code = "import sys, cuvee.integrations.vllm.connector; print({'numba', 'llvmlite'} & set(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(Path(cuvee.__path__[0]).parent)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "set()"
