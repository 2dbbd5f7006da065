"""The launches that encoding and decoding make compile as they are made, once a model; see `compile_launches.py`.

For NVIDIA alone: that every kernel compiles for AMD, too, is what `test_static_costs.py` is for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("compile_launches.py")
UNSET = ("TRITON_INTERPRET", "TRITON_DEFAULT_FP_FUSION")


@pytest.fixture(scope="module", params=["sm_90"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    environment = {name: value for name, value in os.environ.items() if name not in UNSET}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    # Triton warns of defaults that will change: every launch says what it wants.
    command = [sys.executable, "-W", "error::UserWarning", str(SCRIPT), request.param]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_launch_compiles(report: Any) -> None:
    # Each launcher's reference stood in for it, with the arguments of the launch, and the outcome is right.
    assert report["launchers"] == 16
    for case, error in report["right"].items():
        assert error < (2**-6 if case.startswith("bfloat16") else 2**-9), case
    names = {name for compiled in report["compiled"].values() for name in compiled}
    assert {"_decode_kernel", "_encode_kernel", "_synthesize", "_analyze", "_merge_planes"} <= names
    assert {"_dequantize", "_place_escapes", "_quantize", "_write_kernel"} <= names


def test_a_model_compiles_once(report: Any) -> None:
    """Neither the number of chunks nor their lengths are specialized on: serving must not stop to compile."""
    assert report["again"] == {case: [] for case in report["right"]}
