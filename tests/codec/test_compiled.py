"""Compiled loops work without a place for Numba's cache, and say once what that costs."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core import caching

from cuvee.codec.stages.compiled import compiler as module
from cuvee.codec.stages.compiled import rans
from cuvee.codec.stages.compiled.compiler import compiled, inner, source_stamp

ROUND_TRIP = """
import logging, torch
logging.basicConfig()
from cuvee import Codec, KVChunk, KVLayout, Profile
from cuvee.codec.layout import LayerLayout
layout = KVLayout("tiny", (LayerLayout(1, 4, 4, None),), "float32", None)
values = torch.randn(1, 9, 1, 4)
codec = Codec.without_profile(layout)
assert codec.decode(codec.encode(KVChunk(values, values, layout))).tokens == 9
print("coded")
"""
# What Numba finds on a file system where it may write nowhere.
NO_PLACE = """
from numba.core import caching
caching.CompileResultCacheImpl._locator_classes = []
"""


pytestmark = pytest.mark.usefixtures("untold")


def run(code: str, **changes: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **changes}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment, cwd="/"
    )


@pytest.mark.nightly
def test_without_a_place_for_the_cache_everything_works() -> None:
    done = run(NO_PLACE + ROUND_TRIP)
    assert done.returncode == 0 and done.stdout == "coded\n", done.stderr
    assert done.stderr.count("there is no writable folder for compiled code") == 1
    assert "NUMBA_CACHE_DIR" in done.stderr and done.stderr.count("\n") == 1


def twice(x: Any) -> Any:
    return x + x


def test_an_inner_function_gets_no_machine_code() -> None:
    made = inner(twice)
    outer = compiled(lambda x: made(x) + 1)
    assert outer(np.ones(2)).tolist() == [3, 3]
    (overload,) = made.overloads.values()
    assert overload.library.get_pointer_to_function(overload.fndesc.llvm_func_name) == 0
    with pytest.raises(RuntimeError, match="no compiled object"):
        overload.library._get_compiled_object()


@pytest.mark.parametrize("operation", ["load_overload", "save_overload"])
def test_a_cache_that_fails_later_costs_time_and_not_the_call(
    operation: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(caching.FunctionCache, operation, fail)
    function, other = compiled(twice), compiled(twice)
    for made in (function, other):
        assert made(np.ones(2)).tolist() == [2, 2]
        assert made(np.ones(2, np.int32)).tolist() == [2, 2]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "No space left" in record.getMessage()
    assert "NUMBA_CACHE_DIR" in record.getMessage()


def test_a_damaged_cache_is_compiled_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    assert compiled(twice)(np.ones(2)).tolist() == [2, 2]
    for path in tmp_path.rglob("*.nb[ic]"):
        path.write_bytes(path.read_bytes()[:20])
    assert compiled(twice)(np.ones(2)).tolist() == [2, 2]
    assert any("compiled code cannot be" in record.getMessage() for record in caplog.records)


def test_a_switched_off_compiler_is_named() -> None:
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", ROUND_TRIP], check=False, env=environment, capture_output=True, text=True
    )
    assert ran.returncode and "InputError: NUMBA_DISABLE_JIT: must not be set" in ran.stderr
    assert ran.stderr.rstrip().endswith("unset it")


def test_a_change_of_any_file_that_is_compiled_in_is_noticed(tmp_path: Path) -> None:
    """Functions and constants of other files are compiled into a function: its cache must not outlive them."""
    (tmp_path / "constants").mkdir()
    for name in ("loop.py", "constants/sizes.py"):
        (tmp_path / name).write_text("x = 1\n")
    stamp = source_stamp(tmp_path)
    (tmp_path / "note.txt").write_text("no code")
    os.utime(tmp_path / "loop.py", (2e9, 2e9))
    assert source_stamp(tmp_path) == stamp, "what an image copies has other times"
    (tmp_path / "constants" / "sizes.py").write_text("x = 2\n")
    changed = source_stamp(tmp_path)
    (tmp_path / "constants" / "sizes.py").rename(tmp_path / "constants" / "other.py")
    assert len({stamp, changed, source_stamp(tmp_path)}) == 3
    # By test_imports, the codec imports no other room, so no constant comes from elsewhere.
    codec = Path(module.__file__).parents[2]
    assert codec.name == "codec" and rans._encode._cache._cache_file._source_stamp[1] == source_stamp(codec)
