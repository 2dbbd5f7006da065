"""HumanEval's tests of a completion, in a process of its own with limits on time, memory and files."""

import resource
import subprocess
import sys
import tempfile
from typing import Any


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether the completion of a problem passes its tests."""
    program = f"{doc['prompt']}{results[0]}\n{doc['test']}\ncheck({doc['entry_point']})\n"
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", program], check=False, cwd=folder, env={}, preexec_fn=_limit,
                stdin=subprocess.DEVNULL, capture_output=True, timeout=30,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"pass": 0.0}
    return {"pass": float(done.returncode == 0)}
