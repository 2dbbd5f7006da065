"""The day a GPU is there: steps in processes, each with a limit; all of it is rehearsed nightly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cuvee.eval.bench.gpu import steps
from cuvee.eval.bench.gpu.__main__ import STEPS, main
from cuvee.eval.bench.gpu.gpu_report import gpu_markdown, write_report
from cuvee.eval.bench.gpu.steps import Step, read_results, run_steps

ROOT = Path(__file__).parents[3]
SAVE = "import json,pathlib,sys,time; save=lambda d: pathlib.Path(sys.argv[1]).write_text(json.dumps(d))\n"


def step(name: str, code: str, seconds: float = 60.0) -> Step:
    return Step(name, seconds, (sys.executable, "-S", "-c", SAVE + code))


def run(made: list[Step], folder: Path, about: str = "one") -> tuple[dict[str, Any], list[str]]:
    told: list[str] = []
    data = run_steps(made, folder, {"device": about}, told.append, lambda data: write_report(data, folder))
    assert read_results(folder) == json.loads(json.dumps(data))
    return data["steps"], told


def test_a_step_that_fails_or_hangs_takes_nothing_from_the_others(tmp_path: Path) -> None:
    child = "import subprocess; child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])\n"
    made = [
        step("good", "save({'a': 1})"),
        step("bad", "save({'b': 2}); print('last words'); sys.exit(3)"),
        step("killed", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        step("slow", f"{child}save(child.pid)\ntime.sleep(60)", seconds=1.5),
        step("last", "save({'d': 4})"),
    ]
    found, told = run(made, tmp_path)
    assert [entry["status"] for entry in found.values()] == ["done", "failed", "failed", "cut", "done"]
    pid = found["slow"]["result"]
    assert [entry["result"] for entry in found.values()] == [{"a": 1}, {"b": 2}, None, pid, {"d": 4}]
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z", "what a step starts is killed"
    assert found["bad"]["said"] == "last words\n" and "said" not in found["good"]
    assert "last words" in (tmp_path / steps.LOG).read_text() and len(told) == 10
    text = (tmp_path / "report.md").read_text()
    assert "| slow | cut |" in text and "last words" in text


def test_a_cut_of_everything_loses_no_step(tmp_path: Path) -> None:
    """What the machine has found when it is taken away is on the disk, the running step's share included."""
    code = (
        "from cuvee.eval.bench.gpu.steps import Step, run_steps; import sys; from pathlib import Path\n"
        f"save = {SAVE!r}\n"
        "own = lambda code: (sys.executable, '-S', '-c', save + code)\n"
        "made = [Step('one', 60, own('save(1)')), Step('two', 60, own('save(2); time.sleep(60)'))]\n"
        "run_steps(made, Path(sys.argv[1]), {}, print, print)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.DEVNULL)
    try:
        while (read_results(tmp_path).get("steps", {}).get("two") or {}).get("result") != 2:
            assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    found = read_results(tmp_path)["steps"]
    assert found["one"]["status"] == "done" and found["two"]["status"] == "running"


def test_what_has_ended_well_is_not_run_again(tmp_path: Path) -> None:
    count = f"pathlib.Path({str(tmp_path / 'count')!r}).open('a').write('x')"
    broken, mended = step("two", "sys.exit(1)"), step("two", "save(2)")
    run([step("one", f"{count}; save(1)"), broken], tmp_path / "out")
    found, told = run([step("one", f"{count}; save(1)"), mended], tmp_path / "out")
    assert told[0] == "one: done before" and (tmp_path / "count").read_text() == "x"
    assert [entry["status"] for entry in found.values()] == ["done", "done"]
    run([step("one", f"{count}; save(1)")], tmp_path / "out", about="another machine")
    assert (tmp_path / "count").read_text() == "xx"
    (tmp_path / "out" / steps.RESULTS).write_text("{damaged")
    run([step("one", f"{count}; save(1)")], tmp_path / "out", about="another machine")
    assert (tmp_path / "count").read_text() == "xxx"


def test_a_report_that_fails_ends_no_step(tmp_path: Path) -> None:
    def show(data: dict[str, Any]) -> None:
        raise KeyError("half a result")

    told: list[str] = []
    data = run_steps([step("a", "save(1)"), step("b", "save(2)")], tmp_path, {}, told.append, show)
    assert [entry["status"] for entry in data["steps"].values()] == ["done", "done"]
    assert any("half a result" in line for line in told)


def test_the_limits_are_eight_minutes() -> None:
    assert sum(limit for _, limit in STEPS.values()) <= 8 * 60 - 10
    assert STEPS["tests"][1] <= 3 * 60


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_remedy_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "out")]) == 1
    assert "--device emulated" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_failures_are_shown_in_full() -> None:
    result = {
        "collected": 9, "passed": 5, "failed": 1, "skipped": 0, "not_run": 3, "seconds_by_file": {},
        "failures": {"tests/kernels/test_rans.py::test_x": "E   CUDA error: an illegal memory access"},
        "more_failures": [],
    }  # fmt: skip
    entry = {"status": "cut", "seconds": 180.0, "limit": 180, "result": result}
    text = gpu_markdown({"about": {"device": "cuda"}, "steps": {"tests": entry}})
    assert "5 passed, 1 failed, 0 skipped, 3 not run" in text and "an illegal memory access" in text


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
        "own.run_step(torch.device('cuda'), lambda d: Path('found.json').write_text(json.dumps(d)), Path())"
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
    """Every step ends well on the emulator, as it is run where the GPU is."""
    command = [sys.executable, "-m", "cuvee.eval.bench.gpu", "--device", "emulated", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(("src", "."))}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    data = read_results(tmp_path)["steps"]
    assert list(data) == list(STEPS)
    assert data["tests"]["result"]["passed"] > 50 and data["tests"]["result"]["failed"] == 0
    assert [entry["group"] for entry in data["speed"]["result"]["codec"]] == ["head", "lossless", "layer", "layers:2"]
    assert data["model"]["result"]["device"]["kl"] == pytest.approx(data["model"]["result"]["cpu"]["kl"], rel=0.1)
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "report.md", "log.txt"}
