"""A script that is forked from a process with vLLM runs as if it had been started."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from tests.integrations.vllm import forking
from tests.integrations.vllm.engines import environment, need_vllm, run_script

TELLS = """
import atexit, os, sys, threading
print(__name__, sys.argv[1:], os.getcwd(), os.environ["OF_THE_SCRIPT"], os.getsid(0) == os.getpid(), flush=True)
print("vllm" in sys.modules, "cuvee" in sys.modules, "numba" in sys.modules, threading.active_count(), flush=True)
print("read", sys.stdin.read(), "beside", __import__("beside").__name__, flush=True)
atexit.register(print, "at the end")
sys.exit(int(sys.argv[1]))
"""

ENDS = """
import os
from tests.integrations.vllm import forking
begin, end = os.pipe()
if (child := os.fork()) == 0:
    os.dup2(begin, 0)
    os.close(end)
    os._exit(5 if forking._serve() is None else 6)
os.close(end)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def write(folder: Path, code: str) -> str:
    (folder / "beside.py").touch()
    script = folder / "script.py"
    script.write_text(code)
    return str(script)


def test_a_script_has_its_arguments_environment_folder_session_and_end(tmp_path: Path) -> None:
    """And begins with nothing but what importing vLLM leaves."""
    need_vllm()
    status, said = run_script(tmp_path, write(tmp_path, TELLS), "3", "more", OF_THE_SCRIPT="x")
    assert status == 3
    first, second, *last = said.splitlines()[:4]  # Triton has more to say
    assert first == f"__main__ ['3', 'more'] {tmp_path} x True"
    assert second == "True False False 1"
    assert last == ["read  beside beside", "at the end"]
    # The next one finds nothing of it.
    status, said = run_script(tmp_path, write(tmp_path, "import os, beside; print('OF_THE_SCRIPT' in os.environ)"))
    assert status == 0 and said.startswith("False\n"), said


def test_what_a_script_raises_is_in_its_output(tmp_path: Path) -> None:
    need_vllm()
    status, said = run_script(tmp_path, write(tmp_path, "raise ValueError('oh')"))
    assert status == 1
    assert "\nValueError: oh\n" in said


def test_a_script_that_takes_too_long_is_ended_with_what_it_started(tmp_path: Path) -> None:
    need_vllm()
    code = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True); import time; time.sleep(60)"
    status, said = run_script(tmp_path, write(tmp_path, code), timeout=1)
    assert status == "not done after 1 s"
    for _ in range(100):
        try:
            state = Path(f"/proc/{int(said)}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            break
        if state == "Z":  # in a container, nobody may be there to take its status
            break
        time.sleep(0.1)
    else:
        pytest.fail("what the script has started still runs")
    status, said = run_script(tmp_path, write(tmp_path, "print('next')"))
    assert status == 0 and said.startswith("next\n"), said


def test_a_vllm_that_cannot_be_imported_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forking, "_running", [])
    (tmp_path / "vllm.py").write_text("raise ImportError('no engine here')")
    script = write(tmp_path, "print('never')")
    path = os.pathsep.join((str(tmp_path), environment()["PYTHONPATH"]))
    for _ in range(2):
        with pytest.raises(forking.ForkingError, match=r"has ended\n(.*\n)*ImportError: no engine here"):
            run_script(tmp_path, script, PYTHONPATH=path)
    (failed,) = forking._running
    assert not failed.lives
    failed.close()


def test_the_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    """The end of its input is all that it needs to notice."""
    need_vllm()
    status, said = run_script(tmp_path, write(tmp_path, ENDS))
    assert status == 0 and said.startswith("5\n"), said
