"""Steps in processes of their own, each with a limit of time; what they have found so far is always in one file.

    results.json   `about`, and of each step its `status` (running, done, failed, cut), `seconds`, `limit`, `result`
    log.txt        what the steps print

A kernel that faults leaves its process unable to use the device, and one that hangs never returns: neither takes
anything from the other steps. A step that has ended well is not run again in the same folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuvee.eval.files import write_json

__all__ = ["LOG", "RESULTS", "Step", "read_results", "run_steps"]

RESULTS, LOG = "results.json", "log.txt"
_SAID = 6000  # characters of its output that are kept of a step that did not end well
_TICK = 0.2  # seconds


@dataclass(frozen=True, slots=True)
class Step:
    """A command that writes JSON to the file that is appended to its arguments, as often as it knows more.

    Attributes:
        name: in the results.
        seconds: after which it is killed, with every process that it started.
        command: without the file.
    """

    name: str
    seconds: float
    command: tuple[str, ...]


def run_steps(
    steps: Sequence[Step],
    folder: Path,
    about: Mapping[str, Any],
    tell: Callable[[str], None],
    show: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Run the steps that have not ended well in this folder, and return the results.

    Args:
        steps: in order.
        folder: for results and log; made if missing.
        about: what the results depend on. Results of something else are not continued.
        tell: called with a line at the beginning and at the end of each step.
        show: called with the results at the end of each step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = read_results(folder)
    data: dict[str, Any] = kept if kept.get("about") == about else {"about": dict(about), "steps": {}}
    for step in steps:
        if data["steps"].get(step.name, {}).get("status") == "done":
            tell(f"{step.name}: done before")
            continue
        tell(f"{step.name}: at most {step.seconds:.0f} s")
        entry = data["steps"][step.name] = {"status": "running", "seconds": 0.0, "limit": step.seconds, "result": None}
        _run(step, folder, entry, lambda: write_json(folder / RESULTS, data))
        tell(f"{step.name}: {entry['status']} after {entry['seconds']:.1f} s")
        _show(show, data, tell)
    _show(show, data, tell)
    return data


def _show(show: Callable[[dict[str, Any]], None], data: dict[str, Any], tell: Callable[[str], None]) -> None:
    """Show the results; what a step left half done must not end the steps that follow."""
    try:
        show(data)
    except Exception as error:
        tell(f"the results cannot be shown: {error!r}")


def read_results(folder: Path) -> dict[str, Any]:
    """Return the results in a folder; {} if there are none, or none that can be read."""
    try:
        data = json.loads((folder / RESULTS).read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _run(step: Step, folder: Path, entry: dict[str, Any], save: Callable[[], None]) -> None:
    """Run one step, and keep its entry and the file of results up to date."""
    began, seen = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="cuvee-gpu-") as scratch, open(folder / LOG, "ab") as log:
        found = Path(scratch, "result.json")
        log.write(f"\n=== {step.name}\n".encode())
        log.flush()
        start = log.tell()
        process = subprocess.Popen(
            [*step.command, str(found)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            while True:
                code = process.poll()
                entry["seconds"] = time.monotonic() - began
                with contextlib.suppress(OSError, ValueError):
                    if (changed := found.stat().st_mtime_ns) != seen:
                        entry["result"], seen = json.loads(found.read_text()), changed
                        save()
                if code is not None or entry["seconds"] > step.seconds:
                    break
                time.sleep(_TICK)
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended, with all that it started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        entry["status"] = "cut" if code is None else "failed" if code else "done"
        if code != 0:
            entry["said"] = _from(folder / LOG, start)[-_SAID:]
        save()


def _from(log: Path, start: int) -> str:
    with open(log, "rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")
