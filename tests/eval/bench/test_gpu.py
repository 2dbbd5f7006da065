"""The day a GPU is there: tests, and a bench that proves before it times; both are rehearsed nightly.

Without a GPU the kernels are emulated and the clock is the host's: nothing about speed is asserted.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cuvee.codec.backends import PendingDecode
from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import CuveeError
from cuvee.eval.bench.gpu.__main__ import main
from cuvee.eval.bench.gpu.cases import (
    BITS,
    GPU_REHEARSAL,
    LOSSLESS,
    MOST_ERROR,
    Pages,
    spectrum,
    stack,
    synthetic_chunks,
    synthetic_profile,
)
from cuvee.eval.bench.gpu.speed import Clock, measure_group, measure_speed
from cuvee.eval.bench.shapes import llama_layout

ROOT = Path(__file__).parents[3]
LAYOUT = GPU_REHEARSAL.layout
TINY = replace(GPU_REHEARSAL, groups=("layer", LOSSLESS))


# Speed -----------------------------------------------------------------------------------------------------------


def test_every_figure_is_there(device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    states: list[dict[str, Any]] = []
    report = measure_speed(TINY, device, lambda data: states.append(json.loads(json.dumps(data, allow_nan=False))))
    assert [len(state["runs"]) for state in states] == [0, 2, 4], "saved after each group"
    assert states[-1] == json.loads(json.dumps(report)) and report["errors"] == {}
    assert report["kernels"] == {"layer": [], LOSSLESS: []}
    assert all(rate["median"] > 0 for rate in report["ceilings"].values()) and len(report["ceilings"]) == 4
    assert [(run["group"], run["tokens"]) for run in report["runs"]] == [
        ("layer", 8), ("layer", 16), (LOSSLESS, 8), (LOSSLESS, 16)
    ]  # fmt: skip
    for run in report["runs"]:
        assert run["raw_bytes"] == run["tokens"] * 2 * 2 * 16 * 2
        assert run["bits_per_value"] == pytest.approx(8 * run["compressed_bytes"] / (run["raw_bytes"] / 2))
        for way in ("encode", "decode"):
            seconds = run[f"{way}_seconds"]["median"]
            assert run[f"{way}_gb_per_s"]["median"] == pytest.approx(run["raw_bytes"] / seconds / 1e9)
        assert run["raw_copy_seconds"]["median"] > 0
    said = capsys.readouterr().out
    assert said.startswith("device copy: ") and len(re.findall(r"(?m)^  (8|16) tokens, .* GB/s, decode ", said)) == 4


def test_lossless_bytes_unlike_the_cpus_are_refused_and_the_other_groups_measured(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    right = Codec.encode

    def wrong(self: Codec, *args: Any) -> Any:
        blob = right(self, *args)
        return blob + b"!" if isinstance(args[0], KVChunk) and self.lossless else blob

    monkeypatch.setattr(Codec, "encode", wrong)
    report = measure_speed(TINY, device, lambda data: None)
    assert report["errors"] == {LOSSLESS: "lossless bytes are not those of the CPU; nothing is reported"}
    assert {run["group"] for run in report["runs"]} == {"layer"}


def other_values(right: Any, calls: int, codec: Codec, *given: Any) -> Any:
    chunk = right(codec, *given)
    chunk.values[1].mul_(0.7)
    return chunk


def other_keys_of_a_chunk(right: Any, calls: int, codec: Codec, *given: Any) -> Any:
    if not isinstance(given[0], KVChunk):
        return right(codec, *given)
    chunk = given[0]
    return right(codec, KVChunk([key * 0.5 for key in chunk.keys], chunk.values, chunk.layout, chunk.start))


def nothing_after_the_proof(right: Any, calls: int, codec: Codec, *given: Any) -> Any:
    """The caches that were encoded lie in the pages: what timed runs leave behind must not be those."""
    return right(codec, *given) if calls < 2 else PendingDecode(())


def other_bytes_of_batches(right: Any, calls: int, codec: Codec, *given: Any) -> Any:
    blobs = right(codec, *given)
    return blobs if calls < 2 else [blob[:-1] + b"!" for blob in blobs]


@pytest.mark.parametrize(
    ("method", "wrong", "message"),
    [
        ("decode", other_values, "the CPU reads these bytes"),
        ("encode", other_keys_of_a_chunk, "a decoded cache has a relative error"),
        ("decode_paged", nothing_after_the_proof, "nothing is reported"),
        ("encode", other_bytes_of_batches, "1 chunks at once become other bytes"),
    ],
)
def test_nothing_is_reported_of_a_wrong_codec(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, method: str, wrong: Callable[..., Any], message: str
) -> None:
    right, calls = getattr(Codec, method), iter(range(100))
    monkeypatch.setattr(Codec, method, lambda codec, *given: wrong(right, next(calls), codec, *given))
    scope = replace(TINY, chunks=(1,))
    with pytest.raises(CuveeError, match=message):
        measure_group(Clock(device, TINY.effort), "layer", scope, Pages(LAYOUT, 1, 8, 4, device), {})


def test_synthetic_caches_cost_what_they_should() -> None:
    layout, group = llama_layout(2, 2, 64, 1e4), "layers:2"
    profile = synthetic_profile(layout, group, torch.device("cpu"))
    chunks = synthetic_chunks(profile, 2, 256, torch.device("cpu"))
    codec = Codec(profile, step=1.0, backend="numba")
    blob = codec.encode(chunks[1])
    assert 8 * len(blob) / (256 * layout.values_per_token) == pytest.approx(BITS, abs=0.1)
    want, got = stack(chunks[1]).float(), stack(codec.decode(blob)).float()
    assert float((got - want).norm() / want.norm()) < MOST_ERROR / 2
    assert chunks[1].start == 256 and not torch.equal(chunks[0].keys[0], chunks[1].keys[0])
    assert spectrum(2048)[0] > 4 * 64 - 16  # beyond the last table: low bits are coded apart


# Steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_remedy_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["speed", "--out", str(tmp_path / "out")]) == 1
    assert "--device emulated" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.nightly
def test_a_test_that_faults_or_hangs_costs_one_process(tmp_path: Path) -> None:
    """pytest-xdist starts another process for the tests that are left; each failure is named once."""
    (tmp_path / "test_device.py").write_text(
        "import builtins, time, pytest\n"
        "pytestmark = pytest.mark.gpu\n"
        "def test_a(): pass\n"
        "def test_b():\n"
        "    builtins.LOST = True\n"
        "    raise RuntimeError('CUDA error: an illegal memory access was encountered')\n"
        "def test_c(): assert not hasattr(builtins, 'LOST')\n"
        "def test_d(): time.sleep(60)\n"
        "def test_e(): pass\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: x\n")
    code = (
        "import json, sys, torch; from pathlib import Path; from tests.kernels import device_step as own\n"
        "own.FULL = ('test_device.py',)\n"
        "own.os.cpu_count = lambda: 2\n"
        "own.run_step(torch.device('cuda'), lambda d: Path('found.json').write_text(json.dumps(d)))"
    )
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    # A worker of pytest-xdist must not pass for one of the inner run.
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**outer, "PYTHONPATH": paths, "CUVEE_TEST_SECONDS": "10"},
    )  # fmt: skip
    found = json.loads((tmp_path / "found.json").read_text())
    assert done.returncode == 1, done.stdout + done.stderr
    assert (found["collected"], found["passed"], found["failed"], found["not_run"]) == (5, 3, 2, 0), done.stdout
    fault, hang = (found["failures"][f"test_device.py::test_{name}"] for name in "bd")
    assert "illegal memory access" in fault and "crashed" in hang


@pytest.mark.nightly
def test_the_rehearsal(tmp_path: Path) -> None:
    """Both steps end well on the emulator, as they are run where the GPU is."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(("src", "."))}
    for step in ("tests", "speed"):
        command = [sys.executable, "-m", "cuvee.eval.bench.gpu", step, "--device", "emulated", "--out", str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    tests, speed = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("tests", "speed"))
    assert tests["device"] == speed["device"] == "emulated" and speed["hardware"]["cores"]
    assert tests["passed"] > 50 and tests["failed"] == 0
    assert {run["group"] for run in speed["runs"]} == {"head", LOSSLESS, "layer", "layers:2"}
    assert all(math.isfinite(rate["median"]) for rate in speed["ceilings"].values())
