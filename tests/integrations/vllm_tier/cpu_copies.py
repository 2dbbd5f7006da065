"""vLLM's offloading on a CPU: all of it as it is, but the copies between a device and host memory.

vLLM offloads from GPUs only. `install` replaces what of its worker needs one, and nothing else:

    CPUOffloadingSpec.get_worker      refuses a platform without a GPU; here it does not
    pages of the engine               say that they are on a GPU, which vLLM's handler of copies asserts
    swap_blocks_batch                 vLLM's kernel, which moves bytes by lists of addresses; here `memmove`
    streams and events                a stream is a thread that does what it is given in order; an event waits for it

The plan of the copies, their lists of addresses, their order, their jobs and their ends are vLLM's own, and so is all
else: connector, scheduler, manager, primary tier and shared memory.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch


class DevicePages(torch.Tensor):
    """Pages in the host's memory that say otherwise."""

    is_cuda = True


class Stream:
    """Does what it is given in order, on a thread of its own."""

    current: Stream | None = None

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "copies")

    def enqueue(self, work: Callable[[], object]) -> None:
        """Do this after all before it."""
        self._thread.submit(work)

    def wait_stream(self, computing: None) -> None:
        """What computes on a CPU has done so when it returns."""

    def wait_event(self, event: Event) -> None:
        """Do nothing more before an event."""
        self.enqueue(event.synchronize)


class Event:
    """A point in a stream. `enable_timing`: as vLLM asks for it."""

    def __init__(self, enable_timing: bool) -> None:
        self._reached, self._time = threading.Event(), 0.0

    def record(self, stream: Stream) -> None:
        """Be after all that the stream was given."""

        def reach() -> None:
            self._time = time.monotonic()
            self._reached.set()

        self._reached.clear()
        stream.enqueue(reach)

    def query(self) -> bool:
        """Whether the stream got there."""
        return self._reached.is_set()

    def synchronize(self) -> None:
        """Wait until it does."""
        self._reached.wait()

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds to another."""
        return 1000 * (other._time - self._time)


@contextmanager
def _in(stream: Stream) -> Iterator[None]:
    Stream.current = stream
    try:
        yield
    finally:
        Stream.current = None


def _swap_blocks_batch(
    sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, is_src_access_order_any: bool
) -> None:
    moves = list(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))

    def move() -> None:
        for to, at, size in moves:
            ctypes.memmove(to, at, size)

    assert Stream.current is not None
    Stream.current.enqueue(move)


def _get_worker(self: Any, kv_caches: Any) -> Any:
    if not self._worker:
        pages = [replace(each, tensor=each.tensor.as_subclass(DevicePages)) for each in kv_caches.tensors]
        self._worker = self.create_worker(replace(kv_caches, tensors=pages))
    return self._worker


@cache
def install() -> None:
    """Let this process offload from a CPU."""
    worker: Any = importlib.import_module("vllm.v1.kv_offload.cpu.gpu_worker")
    spec: Any = importlib.import_module("vllm.v1.kv_offload.cpu.spec")
    worker.ops = SimpleNamespace(swap_blocks_batch=_swap_blocks_batch)
    worker.torch = SimpleNamespace(**{**vars(torch), "Event": Event})
    worker.current_platform = SimpleNamespace(
        is_xpu=lambda: False, Stream=Stream, stream=_in, current_stream=lambda: None
    )
    spec.CPUOffloadingSpec.get_worker = _get_worker
