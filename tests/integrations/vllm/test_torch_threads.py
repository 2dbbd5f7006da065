"""Threads whose operations torch does not share out, in processes of their own: the numbers belong to a process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, threading, time, torch
from cuvee.integrations.vllm.cores import compute_alone

def tasks():
    return len(os.listdir("/proc/self/task"))

def within(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]

def alone():
    before = tasks()
    {call}
    torch.ones(1 << 22) + 1
    patience = time.monotonic() + 2
    while tasks() > before and time.monotonic() < patience:  # a thread that was joined may take a while to go
        time.sleep(0.01)
    return torch.get_num_threads(), tasks() - before

torch.set_num_threads(3)
torch.ones(1 << 22) + 1
{replaced}
print(within(alone), torch.get_num_threads(), within(torch.get_num_threads))
"""


def told(call: str, replaced: str = "") -> str:
    script = SCRIPT.replace("{call}", call).replace("{replaced}", replaced)
    environment = {**os.environ, "OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    return done.stdout.strip()


pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="the system does not list threads")


def test_operations_start_no_threads() -> None:
    assert told("compute_alone(3)") == "(1, 0) 3 3"
    assert told("pass") == "(3, 2) 3 3", "and otherwise they would"


def test_an_engine_that_replaces_the_setting_does_not_matter() -> None:
    assert told("compute_alone(3)", "torch.set_num_threads = lambda number: None") == "(1, 0) 3 3"


def test_without_a_further_thread_the_default_stays_right() -> None:
    refused = "threading.Thread.start = lambda thread: (_ for _ in ()).throw(RuntimeError())"
    call = f"start = threading.Thread.start; {refused}; compute_alone(3); threading.Thread.start = start"
    assert told(call).endswith(" 3 3")
