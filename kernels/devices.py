"""Exchange between the host and a device: bytes through pinned memory, and the order of work on streams.

    send      host --pinned, asynchronous--> device          the current stream
    Download  device --pinned, asynchronous--> host          the current stream; `wait` waits for this copy alone
    Mark      a point in the work of a stream                the host waits for it, or another stream begins behind it

Nothing else in the codec waits for a device on purpose. On the CPU, work has finished when a call returns, so these
functions do nothing there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy.typing as npt
import torch

from cuvee.codec.errors import InputError


def on_host(device: torch.device) -> bool:
    """Return whether `device` is the host, where work needs no ordering."""
    return device.type == "cpu"


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the current one: Triton launches there, and pinned memory belongs to it."""
    return nullcontext() if on_host(device) else torch.cuda.device(device)


def memory_of(device: torch.device) -> tuple[int, int] | None:
    """Return the free and the total bytes of a device's memory, as its driver counts them; None for the host."""
    return None if on_host(device) else torch.cuda.mem_get_info(device)


def host_buffer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialized tensor on the host that `device` copies from and to asynchronously.

    PyTorch keeps its memory until started copies have ended, even if no reference is left.
    """
    return torch.empty(shape, dtype=dtype, pin_memory=not on_host(device))


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Start copying a host tensor to `device` on its current stream; on the CPU, return `tensor`."""
    if on_host(device):
        return tensor
    staged = host_buffer(tuple(tensor.shape), tensor.dtype, device)
    staged.copy_(tensor)
    return staged.to(device, non_blocking=True)


class Mark:
    """The work that the current stream of a device has been given until now; on the CPU there is nothing to wait for.

    Raises:
        InputError: the stream is being captured into a CUDA graph.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._event: torch.cuda.Event | None = None
        if on_host(device):
            return
        with torch.cuda.device(device):
            refuse_capture(device)
            # The thread that waits sleeps: one that spins would take a core from the engine and from the coders.
            self._event = torch.cuda.Event(blocking=True)
            self._event.record(torch.cuda.current_stream(device))

    @property
    def over(self) -> bool:
        """Whether all of it has ended; never waits."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Let the calling thread wait until all of it has ended."""
        if self._event is not None:
            self._event.synchronize()

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Give what is done inside to a stream of the calling thread's own, which begins behind the mark.

        A thread keeps its stream: what PyTorch's allocator has freed for one stream it lends to no other, so every
        stream keeps the most scratch that it ever took.
        """
        if self._event is None:
            yield
            return
        stream = _thread_stream(self.device)
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            stream.wait_event(self._event)
            yield


_of_thread = threading.local()


def _thread_stream(device: torch.device) -> torch.cuda.Stream:
    streams: dict[torch.device, torch.cuda.Stream] = _of_thread.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    return streams[device]


class Download:
    """A tensor on its way to the host; the copy begins at once, on the current stream. On the CPU it is not copied."""

    def __init__(self, source: torch.Tensor) -> None:
        self._host = source
        if not on_host(source.device):
            self._host = host_buffer(tuple(source.shape), source.dtype, source.device)
            self._host.copy_(source, non_blocking=True)
        self.mark = Mark(source.device)

    def wait(self) -> npt.NDArray[Any]:
        """Wait for this copy and for nothing that came after it; from any thread, whatever its stream."""
        self.mark.wait()
        return self._host.numpy()


@contextmanager
def settled(device: torch.device) -> Iterator[None]:
    """If the block raises, wait first for the work that it started: the caller may free or overwrite the memory."""
    try:
        yield
    except BaseException:
        Mark(device).wait()
        raise


def refuse_capture(device: torch.device) -> None:
    """Raise InputError if the current stream is being captured: coding waits for the device and allocates."""
    if not on_host(device) and torch.cuda.is_current_stream_capturing():
        raise InputError(
            f"stream: must not be captured into a CUDA graph, got a capture on {device}; encode and decode before the "
            "capture or after it, because coding waits for the device"
        )
