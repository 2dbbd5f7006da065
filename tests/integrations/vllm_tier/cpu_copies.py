"""vLLM's offloading on a CPU: all of it as it is, but the copies between a device and host memory.

vLLM offloads from GPUs only. `install` replaces what of its worker needs one, and nothing else:

    CPUOffloadingSpec.get_worker      refuses a platform without a GPU; here it does not
    pages of the engine               say that they are on a GPU, which vLLM's handler of copies asserts
    swap_blocks_batch                 vLLM's kernel, which moves bytes by lists of addresses; here torch does, into the
                                      order of a GPU's backends, which vLLM's names of layouts mean: on a CPU, the keys
                                      of a block's head lie before its values, transposed
    streams and events                a stream is a thread that does what it is given in order; an event waits for it

The plan of the copies, their lists of addresses, their order, their jobs and their ends are vLLM's own, and so is all
else: connector, scheduler, manager, primary tier and shared memory. Workers in processes of their own are `WORKER`.
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

WORKER = f"{__name__}.Worker"


def __getattr__(name: str) -> Any:
    """vLLM's worker, in a process that offloads from a CPU."""
    if name != WORKER.rpartition(".")[2]:
        raise AttributeError(name)
    install()
    return importlib.import_module("vllm.v1.worker.cpu_worker").CPUWorker


class DevicePages(torch.Tensor):
    """Pages in the host's memory that say otherwise."""

    is_cuda = True


class Stream:
    """Does what it is given in order, on a thread of its own."""

    current: Stream | None = None

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "copies")

    def enqueue(self, work: Callable[[], object]) -> None:
        self._thread.submit(work)

    def wait_stream(self, computing: None) -> None:
        """What computes on a CPU has done so when it returns."""

    def wait_event(self, event: Event) -> None:
        """Do nothing more before an event, as it was recorded last: like a GPU's, it may be recorded again."""
        self.enqueue(event.reached.wait)


class Event:
    """A point in a stream. `enable_timing`: as vLLM asks for it."""

    def __init__(self, enable_timing: bool) -> None:
        self.reached, self._time = threading.Event(), 0.0

    def record(self, stream: Stream) -> None:
        """Be after all that the stream was given."""
        reached = self.reached = threading.Event()

        def reach() -> None:
            self._time = time.monotonic()
            reached.set()

        stream.enqueue(reach)

    def query(self) -> bool:
        return self.reached.is_set()

    def synchronize(self) -> None:
        self.reached.wait()

    def elapsed_time(self, other: Event) -> float:
        return 1000 * (other._time - self._time)


@contextmanager
def _in(stream: Stream) -> Iterator[None]:
    Stream.current = stream
    try:
        yield
    finally:
        Stream.current = None


class _Order:
    """The order of a head's keys and values of a block on a CPU, among that of a GPU's backends.

    Args:
        pages: of an engine, `[blocks, heads, tokens, 2 * dim]`.
    """

    def __init__(self, pages: torch.Tensor) -> None:
        attention: Any = importlib.import_module("vllm.v1.attention.backends.cpu_attn")
        _, _, tokens, width = pages.shape
        isa = attention._get_attn_isa(pages.dtype, tokens, width // 2)
        self.dtype, self.places = pages.dtype, torch.zeros(tokens * width, dtype=torch.int64)
        numbers = torch.arange(tokens * width).view(tokens, 1, width)
        for scale in (1, 128, 128**2):  # in digits that every dtype holds
            own = torch.empty(1, 1, 2 * tokens, width // 2, dtype=pages.dtype)
            keys, values = (numbers // scale % 128).to(pages.dtype).chunk(2, -1)
            attention.ops.cpu_attn_reshape_and_cache(
                keys.contiguous(), values.contiguous(), *own.chunk(2, 2), torch.arange(tokens), isa
            )
            self.places += own.flatten().long() * scale

    def move(self, to: int, at: int, size: int, *, from_device: bool) -> None:
        """Copy heads from one address to another."""
        source, target = (
            torch.frombuffer((ctypes.c_char * size).from_address(each), dtype=self.dtype).view(-1, len(self.places))
            for each in (at, to)
        )
        if from_device:
            target[:, self.places] = source
        else:
            target[:] = source[:, self.places]


_device: list[tuple[list[range], _Order | None]] = []  # addresses of the pages of the engine that runs, if one does


def _swap_blocks_batch(
    sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, is_src_access_order_any: bool
) -> None:
    moves = list(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))
    device, order = _device[0] if _device else ([], None)

    def move() -> None:
        for to, at, size in moves:
            if order is None:
                ctypes.memmove(to, at, size)
            else:
                order.move(to, at, size, from_device=any(at in each for each in device))

    assert Stream.current is not None
    Stream.current.enqueue(move)


def _notice(caches: Any, groups: int) -> None:
    """Remember the pages of the engine that runs, by its names of layers, which are in so many groups."""
    layers = [each for held in caches.values() for each in (held if isinstance(held, list) else [held])]
    memory = [each.untyped_storage() for each in layers]
    alike = groups == len({each.shape[1:] for each in layers}) == 1 and layers[0].ndim == 4
    ranges = [range(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in memory]
    _device[:] = [(ranges, _Order(layers[0]) if alike and layers[0].dtype.itemsize > 1 else None)]


def _get_worker(self: Any, kv_caches: Any) -> Any:
    if not self._worker:
        pages = [replace(each, tensor=each.tensor.as_subclass(DevicePages)) for each in kv_caches.tensors]
        self._worker = self.create_worker(replace(kv_caches, tensors=pages))
    return self._worker


@cache
def install() -> None:
    worker: Any = importlib.import_module("vllm.v1.kv_offload.cpu.gpu_worker")
    spec: Any = importlib.import_module("vllm.v1.kv_offload.cpu.spec")
    worker.ops = SimpleNamespace(swap_blocks_batch=_swap_blocks_batch)
    worker.torch = SimpleNamespace(**{**vars(torch), "Event": Event})
    worker.current_platform = SimpleNamespace(
        is_xpu=lambda: False, Stream=Stream, stream=_in, current_stream=lambda: None
    )
    spec.CPUOffloadingSpec.get_worker = _get_worker
    offloading: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker")
    register = offloading.OffloadingConnectorWorker.register_kv_caches

    def noticed(self: Any, kv_caches: Any) -> None:
        _notice(kv_caches, len(self.kv_cache_config.kv_cache_groups))
        register(self, kv_caches)

    offloading.OffloadingConnectorWorker.register_kv_caches = noticed
