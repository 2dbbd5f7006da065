"""Coding takes the threads it was given: it changes no thread's number of torch threads, and no bit depends on one."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from tests.chunks import same
from tests.conftest import LAYOUTS, decoded_layers, fitted_to, synthetic_chunk
from tests.predicting import VOCABULARY, predicting, with_sinks

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.quality import Quality
from cuvee.codec.schemes.transform import TransformScheme
from cuvee.codec.support import torch_threads
from cuvee.codec.support.torch_threads import compute_alone, computing_alone
from cuvee.eval import machine

TOKENS = 2 * 128 + 5


@pytest.fixture(autouse=True)
def runs_are_coded_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole chunks are large enough for several threads here, runs of their tokens are not."""
    monkeypatch.setattr(
        "cuvee.codec.cpu.backend.PARALLEL_VALUES", TOKENS * min(each.values_per_token for each in LAYOUTS.values())
    )


def in_new_thread() -> int:
    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(torch.get_num_threads).result()


@pytest.mark.parametrize(("threads", "tokens"), [(1, TOKENS), (4, TOKENS), (4, 20)])
def test_no_other_thread_notices(threads: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that runs, nor one that starts while a chunk is coded, nor the caller afterwards."""
    seen: dict[str, set[int]] = {"own": set(), "new": set(), "running": set()}
    codec = Codec(fitted_to(LAYOUTS["gqa"]), step=0.25, threads=threads)
    chunk = synthetic_chunk(LAYOUTS["gqa"], tokens)
    codec.decode(codec.encode(chunk))

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            assert not torch.is_grad_enabled()
            seen["own"].add(torch.get_num_threads())
            seen["new"].add(in_new_thread())
            seen["running"].add(running.submit(torch.get_num_threads).result())
            return method(*given)

        return call

    for name in ("encode", "decode"):
        monkeypatch.setattr(TransformScheme, name, watched(getattr(TransformScheme, name)))
    with machine.torch_threads(3), ThreadPoolExecutor(1) as running:
        assert running.submit(torch.get_num_threads).result() == 3
        blob = codec.encode(chunk)
        assert torch.get_num_threads() == in_new_thread() == 3
        codec.decode(blob)
        assert torch.get_num_threads() == in_new_thread() == 3
        monkeypatch.setattr(TransformScheme, "decode", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            codec.decode(blob)
        assert torch.get_num_threads() == in_new_thread() == 3
    assert seen == {"own": {1}, "new": {3}, "running": {3}}


def with_ids(chunk: KVChunk) -> KVChunk:
    return chunk.with_token_ids(np.arange(chunk.tokens) * 7 % VOCABULARY)


# Each pair of a group, a layout, ids or none, and a step at which most coefficients are zero, or few: a dense product.
CASES = [
    ("head", "gqa", True, 0.25), ("heads:1", "bfloat16", False, 2**-7), ("unit", "irregular", False, 2**-7),
    ("layer", "bfloat16", True, 0.25), ("layers:2", "gqa", True, 2**-7), ("all", "irregular", False, 0.25),
    ("lossless", "bfloat16", False, 0.0), ("lossless", "irregular", False, 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("group", "name", "ids", "step"), CASES)
def test_parts_equal_the_whole_whatever_threads_there_are(group: str, name: str, ids: bool, step: float) -> None:
    """MKL's products of 5 rows, as many as the last tile has, have other last bits with other numbers of threads."""
    layout, lossless = LAYOUTS[name], group == "lossless"
    profile = Profile.unlearned(layout) if lossless else fitted_to(layout, group)
    chunk = synthetic_chunk(layout, TOKENS, start=0 if ids else 40)
    if ids:  # and attention sinks, which are not predicted
        profile, chunk = with_sinks(predicting(profile)), with_ids(chunk)
    wanted: tuple[bytes, KVChunk] | None = None
    for number, threads in ((1, 1), (4, 1), (1, 2), (2, 4)):
        with machine.torch_threads(number):
            codec = Codec(profile, "lossless" if lossless else Quality(step=step), threads=threads)
            blob = codec.encode(chunk)
            whole, elsewhere = codec.decode(blob), codec.decode(blob, 1000)
            wanted = wanted or (blob, whole)
            assert blob == wanted[0] and same(whole, wanted[1])
            for run in (range(1), range(127, 129), range(37, 80), range(250, 259), range(258, TOKENS)):
                assert same(codec.decode(blob, tokens=run), whole.slice(run.start, run.stop))
                part = codec.decode(blob, 1000 + run.start, tokens=run)
                assert same(part, elsewhere.slice(run.start, run.stop))
            for layer in range(layout.num_layers):
                keys, values = decoded_layers(codec, blob, range(layer, layer + 1))
                assert torch.equal(keys[0], whole.keys[layer]) and torch.equal(values[0], whole.values[layer])


# The numbers belong to a process, and so do the threads that torch starts.
SCRIPT = """
import os, threading, time, torch
from cuvee.codec.support.torch_threads import compute_alone, computing_alone

def tasks():
    return len(os.listdir("/proc/self/task"))

def within(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]

def shared():
    before = tasks()
    torch.ones(1 << 22) + 1
    torch.ones(512, 512) @ torch.ones(512, 512)
    patience = time.monotonic() + 60
    while tasks() > before and time.monotonic() < patience and {alone}:  # what was joined may take a while to go
        time.sleep(0.01)
    return torch.get_num_threads(), tasks() - before

def called():
    {call}

torch.set_num_threads(3)
torch.ones(1 << 22) + 1
torch.set_num_threads = lambda number: None  # as vLLM's CPU worker does
print(within(called), torch.get_num_threads(), within(torch.get_num_threads))
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="the system does not list threads")
@pytest.mark.parametrize(
    ("call", "counted"),
    [
        ("compute_alone(); return shared()", (1, 0)),
        ("return shared()", (3, 2)),
    ],
)
def test_operations_start_no_threads(call: str, counted: tuple[int, int]) -> None:
    script = SCRIPT.replace("{call}", call).replace("{alone}", str(counted[0] == 1))
    environment = {**os.environ, "OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == f"{counted} 3 3"


@pytest.mark.usefixtures("untold")
def test_another_openmp_is_told_of_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A library that torch does not call obeys, and torch does not."""
    torch_threads._setters.cache_clear()
    monkeypatch.setattr(torch_threads, "_loaded", lambda name: lambda number: number)
    try:
        with machine.torch_threads(3), caplog.at_level(logging.WARNING):
            for _ in range(2):
                with computing_alone():
                    assert torch.get_num_threads() == 3
            thread = threading.Thread(target=compute_alone)
            thread.start()
            thread.join()
        assert len(caplog.messages) == 1 and "OMP_NUM_THREADS=1" in caplog.text
    finally:
        torch_threads._setters.cache_clear()
