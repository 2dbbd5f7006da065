"""The backend `triton`: whole chunks through a handful of launches, from and into a `PagedCache`.

    decode   blobs --verify, upload--> rans_decode --> dequantize --> synthesize (product, mean, RoPE, pages)
    encode   pages --> gather (un-rotate, center) --> analyze --> quantize --> rans_encode --> write_coded --> blobs

Every launch handles all sections of as many chunks as the workspace holds. Decoding never waits for the device; the
check of the decoded chunks waits once. Encoding waits twice per batch, for the sizes of its output and for its bytes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy.typing as npt
import torch

from cuvee.codec.backends import Coding, DecodeRequest, EncodeRequest
from cuvee.codec.errors import InputError
from cuvee.codec.paged import PagedCache
from cuvee.codec.schemes import batches
from cuvee.kernels.chunks import join, raise_status, touched
from cuvee.kernels.devices import Download, Mark, current, memory_of, refuse_capture, settled
from cuvee.kernels.lossless_scheme import LosslessKernels
from cuvee.kernels.plans import TransformPlan
from cuvee.kernels.transform_scheme import TransformKernels

WORKSPACE_BYTES = 1 << 30  # scratch of one batch of launches that encode
# Decoding fills a device with less work, so its batches are smaller: the host verifies one while another is decoded.
DECODE_SHARE = 4
WORKSPACE_SHARE = 0.25  # of a device's free memory, which an engine's forwards need as well
MAX_SCHEMES = 8  # most recently used schemes that are kept, with their bases
MAX_GRID = 65_535  # programs along the second and third axis of a launch
MAX_TOKENS = 16 * MAX_GRID  # of a chunk: `rotation_tables` takes 16 per program

_Scheme = TransformKernels | LosslessKernels


class TritonBackend:
    """Runs the kernels.

    Args:
        devices: the types of devices whose tensors are coded; with an emulator of GPUs, the CPU's are as well.
        workspace_bytes: scratch of one batch of launches that encode, at most a quarter of what is free on the device
            at first. A batch that decodes gets a quarter of it. A batch has at least one chunk, even if the chunk needs
            more.
    """

    name = "triton"
    batched = True

    def __init__(self, devices: tuple[str, ...] = ("cuda",), workspace_bytes: int = WORKSPACE_BYTES) -> None:
        self.devices = devices
        self.workspace_bytes = workspace_bytes
        self._free: dict[torch.device, int | None] = {}  # bytes when the device was first used
        self._schemes: OrderedDict[tuple[Any, ...], _Scheme] = OrderedDict()
        self._in_flight: list[tuple[Mark, tuple[object, ...]]] = []  # marks of work, and the objects that it reads
        # A forked child has no use for them: CUDA does not work there.
        self._making, self._holding = threading.Lock(), threading.Lock()

    def prepare(self, coding: Coding) -> None:
        """See `Backend.prepare`. Everything here depends on the device, so it is made once the device is known."""

    def encode(self, coding: Coding, requests: Sequence[EncodeRequest]) -> list[list[bytes]]:
        """See `Backend.encode`."""
        out: list[list[bytes]] = []
        cache = requests[0].cache
        refuse_capture(cache.device)
        with current(cache.device), torch.no_grad(), settled(cache.device):
            scheme = self._scheme(coding, cache)
            slots = [request.slots for request in requests]
            weights = [scheme.encode_bytes(_check_tokens(request.source.tokens)) for request in requests]
            for run in batches(weights, self._workspace(cache.device), MAX_GRID):
                out += scheme.encode(cache, slots[run], requests[run], run.start)
        return out

    def to_host(self, values: torch.Tensor) -> npt.NDArray[Any]:
        """See `Backend.to_host`."""
        with current(values.device):
            return Download(values).wait()

    def decode(self, coding: Coding, requests: Sequence[DecodeRequest]) -> Callable[[], None]:
        """See `Backend.decode`."""
        cache, layers = requests[0].cache, requests[0].layers
        refuse_capture(cache.device)
        with current(cache.device), torch.no_grad(), settled(cache.device):
            scheme = self._scheme(coding, cache)
            weights = [scheme.decode_bytes(_check_tokens(request.opened.tokens)) for request in requests]
            runs = batches(weights, self._workspace(cache.device) // DECODE_SHARE, MAX_GRID)
            statuses = [scheme.decode(requests[run], cache, layers) for run in runs]
            download = Download(join(statuses))
        self._hold(download.mark, scheme, *(request.slots for request in requests))
        used, numbers = touched(scheme.sections, layers), [request.number for request in requests]

        def check() -> None:
            raise_status(download.wait(), scheme.sections[used.start : used.stop], numbers)

        return check

    def _workspace(self, device: torch.device) -> int:
        """Return the scratch of a batch. What is free is asked once: later, PyTorch holds this scratch itself."""
        if device not in self._free:
            memory = memory_of(device)
            self._free[device] = None if memory is None else memory[0]
        free = self._free[device]
        return self.workspace_bytes if free is None else min(self.workspace_bytes, int(WORKSPACE_SHARE * free))

    def _hold(self, until: Mark, *things: object) -> None:
        """Keep objects alive until the work in flight that reads them has ended.

        PyTorch's allocator immediately reuses freed memory for the stream that it was allocated on. Tables may have
        been allocated on another stream than the one that decodes, and be dropped while it runs.
        """
        with self._holding:
            self._in_flight = [each for each in self._in_flight if not each[0].over]
            if not until.over:
                self._in_flight.append((until, things))

    def _scheme(self, coding: Coding, cache: PagedCache) -> _Scheme:
        # A bfloat16 product is as precise as a bfloat16 or FP8 cache; float16 has a longer mantissa.
        product = torch.bfloat16 if cache.dtype == torch.bfloat16 or cache.scaled else torch.float32
        key = (coding.profile.id, coding.setting, coding.dtype, coding.predicted, cache.device, product)
        with self._making:
            if key not in self._schemes:
                self._schemes[key] = self._make(coding, cache, product)
                Mark(cache.device).wait()  # another stream may use the scheme next
                if len(self._schemes) > MAX_SCHEMES:
                    self._schemes.popitem(last=False)
            self._schemes.move_to_end(key)
            return self._schemes[key]

    def _make(self, coding: Coding, cache: PagedCache, product: torch.dtype) -> _Scheme:
        device, layout = cache.device, replace(coding.profile.layout, dtype=coding.dtype)
        if coding.setting.lossless:
            return LosslessKernels(layout, device)
        setting = coding.setting
        refined = setting.refinements > 0
        return TransformKernels(
            TransformPlan(coding.profile, setting.step_index, device, product, coding.predicted, refined)
        )


def _check_tokens(tokens: int) -> int:
    """Return `tokens`, or raise InputError if one launch cannot take a chunk of that length."""
    if tokens > MAX_TOKENS:
        raise InputError(f"chunk: must have at most {MAX_TOKENS} tokens on a GPU, got {tokens}; use shorter chunks")
    return tokens


# One per process, with its tables and bases. An emulator of GPUs puts another in its place.
shared = TritonBackend()


def make_backend(name: str, threads: int) -> TritonBackend:
    """Return the process's backend; `name` is "triton", and threads of the host do nothing here."""
    return shared
