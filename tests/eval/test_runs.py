"""How a run ends before its time: signals, also within a call that Python cannot interrupt, and disks that are full."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cuvee.codec.errors import InputError
from cuvee.eval.runs import Interrupted, check_folder, interruptible, need_packages, save_results, writing

BUSY = """
import hashlib, sys, time
from cuvee.eval.runs import interruptible, writing
from pathlib import Path
with interruptible(lambda: print("farewell", flush=True)):
    print("ready", flush=True)
    {work}
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_work_and_says_goodbye(number: signal.Signals) -> None:
    said: list[str] = []
    before = signal.getsignal(number)

    def work() -> None:
        with interruptible(lambda: said.append("bye")):
            os.kill(os.getpid(), number)
            time.sleep(5)

    with pytest.raises(Interrupted) as stopped:
        work()
    assert stopped.value.number == number and str(stopped.value) == number.name and said == ["bye"]
    assert signal.getsignal(number) == before and isinstance(stopped.value, KeyboardInterrupt)


def test_work_that_ends_leaves_no_trace() -> None:
    before, threads = signal.getsignal(signal.SIGTERM), threading.active_count()
    with interruptible(lambda: pytest.fail("nothing was interrupted")):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before and threading.active_count() == threads


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    seen = []

    def work() -> None:
        with interruptible(lambda: None):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_call_that_python_cannot_interrupt_is_ended_with_the_process(number: signal.Signals) -> None:
    work = "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"  # half an hour
    with subprocess.Popen([sys.executable, "-c", BUSY.format(work=work)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        began = time.monotonic()
        process.send_signal(number)
        assert process.wait(20) == 128 + number
        assert 1.5 < time.monotonic() - began < 10 and process.stdout.read() == "farewell\n"


def test_a_file_that_is_being_written_is_finished_first(tmp_path: Path) -> None:
    out = tmp_path / "file"
    work = (
        f"exec('''with writing(Path({str(out)!r})):\n"
        f" hashlib.pbkdf2_hmac('sha256', b'', b'', 12_000_000)\n"
        f" Path({str(out)!r}).write_text('whole')''')"
    )
    with subprocess.Popen([sys.executable, "-c", BUSY.format(work=work)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    # The signal is heard as soon as the call comes back, or the process ends when the file is there.
    assert process.returncode != 0 and (not out.exists() or out.read_text() == "whole")


def test_what_cannot_be_written_is_said_and_what_was_there_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    save_results(path, {"done": 1})

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(
        InputError, match=r"^out: .*report.json cannot be written \(No space left.*make room .* same command"
    ):
        save_results(path, {"done": 2})
    assert json.loads(path.read_text()) == {"done": 1} and [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_a_missing_package_is_named_with_the_remedy() -> None:
    need_packages("cuvee report", "json")
    with pytest.raises(ImportError, match=r"^cuvee report needs no_such_package: pip install 'cuvee\[eval\]'$"):
        need_packages("cuvee report", "json", "no_such_package")


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"^out: .* cannot be written"):
        save_results(tmp_path / "file" / "report.json", {})
    with pytest.raises(InputError, match=r"^out: .* cannot be written"), writing(tmp_path):
        (tmp_path / "no" / "folder").write_text("")
    with pytest.raises(InputError, match=r"^out: must be a folder"):
        check_folder(tmp_path / "file", force=False)
