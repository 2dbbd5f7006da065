"""A simulated GPU for tests: it records all calls, and does all work as late as possible.

Tensors on `cuda:0` are held by the CPU (`DeviceTensor`). Work that is given to a stream waits in its queue until the
host waits for it, or until another stream has to wait for it: whoever reads too early reads poison, whoever overwrites
a pinned buffer before its copy was made changes the copy. Streams may be made `hasty` instead, so that they run ahead
of those that they should have waited for. Memory is allocated as PyTorch does: what was freed is lent again at once, to
the stream for which it was allocated, whatever other streams still do with it. Waiting, copies, allocations and
launches are written down (`Entry`).

Kernels are emulated. What is simulated is order, not speed.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from inspect import isfunction
from types import ModuleType
from typing import Any, Self

import pytest
import torch
from tests.kernels.emulation import KERNELS_RUN_ON
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

CUDA = torch.device("cuda", 0)
POISON = 0xA5
_GRAIN = 512  # bytes: of PyTorch's allocator

# They bring a value to the host, or a size that depends on values.
_WAITING = {
    "_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero", "unique_dim", "_unique2",
}  # fmt: skip
_FILLED = {"arange", "full", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "zeros"}


@dataclass(frozen=True)
class Entry:
    """A recorded action.

    Attributes:
        kind: `launch`, `operation` (of torch), `to device`, `to host`, `allocate`, `pin`, `wait` (which would have kept
            the host waiting), `record`, `after` (a stream behind an event).
        name: of the kernel, of torch's operation, or of what waited.
        stream: number of the current stream; 0 is the default one.
        thread: its name.
        bytes: copied or allocated.
        pinned: of a copy: whether the host's side is pinned.
        blocking: of a copy: whether the host waits for it.
    """

    kind: str
    name: str
    stream: int
    thread: str
    bytes: int = 0
    pinned: bool = False
    blocking: bool = False


class Stream:
    """A stream like `torch.cuda.Stream`, whose work runs in order."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.owner = _current()
        with self.owner.lock:
            self.number = len(self.owner.streams)
            self.owner.streams.append(self)
        self.queue: deque[Callable[[], object]] = deque()
        self.given = self.done = 0
        self.hasty = self.number in self.owner.hasty
        self.capturing = False

    def give(self, work: Callable[[], object]) -> None:
        self.queue.append(work)
        self.given += 1
        for stream in self.owner.streams:
            if stream.hasty:
                stream.run(stream.given)

    def run(self, end: int) -> None:
        """Do the work up to number `end`."""
        while self.done < end:
            self.done += 1
            self.queue.popleft()()

    def wait_event(self, event: Event) -> None:
        with self.owner.lock:
            self.owner.note("after", "event", stream=self)
            behind, end = event.stream, event.end
            self.give(lambda: behind.run(end) if behind else None)


class Event:
    """See `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self.owner = _current()
        self.blocking = blocking
        self.stream: Stream | None = None
        self.end = 0

    def record(self, stream: Stream | None = None) -> None:
        with self.owner.lock:
            self.stream = stream or self.owner.stream
            self.end = self.stream.given
            self.owner.note("record", "event", stream=self.stream)

    def query(self) -> bool:
        return self.stream is None or self.stream.done >= self.end

    def synchronize(self) -> None:
        if self.stream is not None:
            self.owner.wait("event.synchronize", self.stream, self.end)


class Block:
    """A block of the device's memory. It is reused once nothing references it."""

    def __init__(self, owner: LateDevice, stream: Stream, memory: torch.Tensor) -> None:
        self.owner, self.stream, self.memory = owner, stream, memory

    def __del__(self) -> None:
        with self.owner.lock:
            self.owner.free.setdefault(self.stream.number, []).append(self.memory)


class DeviceTensor(torch.Tensor):
    """A tensor on `cuda:0`, with host memory in place of the device's."""

    held: torch.Tensor
    block: Block
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: torch.Tensor, block: Block) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=CUDA,
        )  # fmt: skip
        made.held, made.block = held, block
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _current().call(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    # What torch does for these in C++ wants a real device.
    def item(self) -> Any:
        owner = _current()
        owner.wait("item", owner.stream, owner.stream.given)
        return self.held.item()

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    __index__ = __int__

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> DeviceTensor:
        _current().call(torch.ops.aten.copy_.default, (self, source, non_blocking), {})
        return self

    def __getitem__(self, index: Any) -> Any:
        each = index if isinstance(index, tuple) else (index,)
        if not any(isinstance(one, torch.Tensor) for one in each):
            return DeviceTensor(self.held[index], self.block)
        first = next(at for at, one in enumerate(each) if isinstance(one, torch.Tensor))
        whole = all(one == slice(None) for one in each[:first])
        if not whole or not all(isinstance(one, torch.Tensor) for one in each[first:]):
            raise NotImplementedError(f"{index}")
        return _current().call(torch.ops.aten.index.Tensor, (self, [*[None] * first, *each[first:]]), {})

    def __setitem__(self, index: Any, value: Any) -> None:
        each = index if isinstance(index, tuple) else (index,)
        if not any(isinstance(one, torch.Tensor) for one in each):
            part = self[index]
            part.copy_(value) if isinstance(value, torch.Tensor) else part.fill_(value)
            return
        given = torch.as_tensor(value, dtype=self.dtype)
        _current().call(torch.ops.aten.index_put_.default, (self, list(each), given), {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeviceTensor({list(self.shape)}, {self.dtype})"

    __hash__ = torch.Tensor.__hash__


class _Mode(TorchDispatchMode):
    """A mode that catches functions that make tensors on the device from no tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _current().call(func, args, kwargs or {})


_present: list[LateDevice] = []


def _current() -> LateDevice:
    return _present[-1]


class LateDevice:
    """One device.

    Args:
        hasty: numbers of the streams that do their work at once, unless they have to wait for another.

    Attributes:
        entries: what was done, in order.
        engine: stream 1: that of the test's own thread.
    """

    def __init__(self, hasty: set[int] | None = None) -> None:
        self.lock = threading.RLock()
        self.hasty = hasty or set()
        self.streams: list[Stream] = []
        self.free: dict[int, list[torch.Tensor]] = {}
        self.entries: list[Entry] = []
        self._local = threading.local()
        self._pinned: dict[int, torch.Tensor] = {}  # kept: PyTorch's allocator frees none with a copy under way

    @property
    def stream(self) -> Stream:
        found: Stream = getattr(self._local, "stream", self.streams[0])
        return found

    @property
    def engine(self) -> Stream:
        return self.streams[1]

    # What tests ask ---------------------------------------------------------------------------------------------

    def of(self, *kinds: str) -> list[Entry]:
        """Return the entries of some kinds."""
        return [entry for entry in self.entries if entry.kind in kinds]

    def counts(self) -> Counter[str]:
        """Return the number of entries of each kind."""
        return Counter(entry.kind for entry in self.entries)

    def finish(self) -> None:
        """Do all work. Call it last in a test, as it hides missing waits."""
        with self.lock:
            for stream in self.streams:
                stream.run(stream.given)

    # Streams ----------------------------------------------------------------------------------------------------

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        before = self.stream
        self._local.stream = before if stream is None else stream
        try:
            yield
        finally:
            self._local.stream = before

    def note(self, kind: str, name: str, stream: Stream | None = None, **more: Any) -> None:
        number = (stream or self.stream).number
        self.entries.append(Entry(kind, name, number, threading.current_thread().name, **more))

    def wait(self, name: str, stream: Stream, end: int) -> None:
        """The host waits until a stream has done its work up to number `end`."""
        self._refuse_capture(name)
        with self.lock:
            if stream.done < end:
                self.note("wait", name, stream=stream)
                stream.run(end)

    def _refuse_capture(self, what: str) -> None:
        if any(stream.capturing for stream in self.streams):
            raise RuntimeError(f"{what}: operation not permitted when stream is capturing")

    # Memory -----------------------------------------------------------------------------------------------------

    def _allocate(self, like: torch.Tensor) -> DeviceTensor:
        """Return memory for a tensor of the shape, strides and dtype of `like`."""
        self._refuse_capture("allocation")
        extent = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True)) if like.numel() else 0
        size = max(-(-extent * like.element_size() // _GRAIN), 1) * _GRAIN
        self.note("allocate", "memory", bytes=size)
        known = self.free.setdefault(self.stream.number, [])
        fitting = [memory for memory in known if len(memory) == size]
        if fitting:
            memory = fitting[-1]
            known[:] = [each for each in known if each is not memory]
        else:
            memory = torch.full((size,), POISON, dtype=torch.uint8)
        held = torch.as_strided(memory[: extent * like.element_size()].view(like.dtype), like.shape, like.stride())
        return DeviceTensor(held, Block(self, self.stream, memory))

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    # Work -------------------------------------------------------------------------------------------------------

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do a torch operation, on the host or on the device."""
        flat, _ = tree_flatten((args, kwargs))
        wrapped = [each for each in flat if isinstance(each, DeviceTensor)]
        target = kwargs.get("device")
        here = func._schema.name.removeprefix("aten::").rstrip("_")
        if not wrapped and (target is None or torch.device(target).type != "cuda"):
            if kwargs.get("pin_memory"):
                return self._pin(func, args, kwargs)
            return func(*args, **kwargs)
        with self.lock:
            if here in ("_to_copy", "copy"):
                return self._copy(func, args, kwargs)
            if not wrapped or here.startswith("new_"):
                return self._make(func, here, args, kwargs)
            if func.is_view or here in ("_unsafe_view",):
                out = func(*_bare(args), **_bare(kwargs))
                return tree_map(lambda t: DeviceTensor(t, wrapped[0].block), out)
            if here == "record_stream":
                raise NotImplementedError("record_stream")
            return self._compute(func, here, args, kwargs)

    def _pin(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        with self.lock:
            self._refuse_capture("pinned memory")
            made: torch.Tensor = func(*args, **{**kwargs, "pin_memory": False})
            if made.numel():
                made.view(torch.uint8).fill_(POISON)
                self._pinned[made.untyped_storage().data_ptr()] = made
            self.note("pin", "memory", bytes=made.nbytes)
            return made

    def _make(self, func: Any, here: str, args: Any, kwargs: Any) -> DeviceTensor:
        kind = here.removeprefix("new_")
        plain = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
        made = func(*_bare(args), **plain, device="cpu")
        out = self._allocate(made)
        if kind in _FILLED:
            held = out.held  # the work must not hold the block
            self._give(f"aten.{kind}", lambda: held.copy_(made))
        return out

    def _give(self, name: str, work: Callable[[], object], kind: str = "operation") -> None:
        self.note(kind, name)
        self.stream.give(work)

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Between host and device, or on the device with another dtype."""
        if func._schema.name == "aten::copy_":
            target, source = args[:2]
            asynchronous = bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking"))
        else:
            source, target = args[0], None
            asynchronous = bool(kwargs.get("non_blocking"))
            there = torch.device(kwargs.get("device") or source.device)
            like = torch.empty_like(_bare(source), dtype=kwargs.get("dtype") or source.dtype)
            target = like if there.type == "cpu" else self._allocate(like)
        to, of = _bare(target), _bare(source)
        if isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor):
            self._give("aten.copy", lambda: to.copy_(of))
            return target
        host = of if isinstance(target, DeviceTensor) else to
        pinned = self._is_pinned(host)
        blocking = not (asynchronous and pinned)
        kind = "to device" if isinstance(target, DeviceTensor) else "to host"
        self.note(kind, "copy", bytes=to.nbytes, pinned=pinned, blocking=blocking)
        self.stream.give(lambda: to.copy_(of))
        if blocking:
            self.wait("copy", self.stream, self.stream.given)
        return target

    def _compute(self, func: Any, here: str, args: Any, kwargs: Any) -> Any:
        for each in tree_flatten((args, kwargs))[0]:
            if isinstance(each, torch.Tensor) and not isinstance(each, DeviceTensor) and each.ndim:
                raise RuntimeError(f"{here}: a tensor of the host among those of the device")
        bare_args, bare_kwargs = _bare(args), _bare(kwargs)
        masked = here in ("index", "index_put") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in bare_args[1]
        )
        if here in _WAITING or masked:
            raise RuntimeError(f"{here}: the host waits for a value of the device")
        if func._schema.is_mutable:
            self._give(f"aten.{here}", lambda: func(*bare_args, **bare_kwargs))
            return kwargs.get("out", args[0])
        shapes = func(*tree_map(_meta, bare_args), **tree_map(_meta, bare_kwargs))
        outs = [self._allocate(each) for each in tree_flatten(shapes)[0]]
        targets = [each.held for each in outs]

        def work() -> None:
            results, _ = tree_flatten(func(*bare_args, **bare_kwargs))
            for target, result in zip(targets, results, strict=True):
                target.copy_(result)

        self._give(f"aten.{here}", work)
        left = iter(outs)
        return tree_map(lambda _: next(left), shapes)

    def launch(self, name: str, work: Callable[..., None]) -> Callable[..., None]:
        """Return a launcher that gives its work to the current stream."""

        def launcher(*args: Any, **kwargs: Any) -> None:
            with self.lock:
                if not getattr(self._local, "current", False):
                    raise RuntimeError(f"{name} is launched where the cache's device is not the current one")
                bare_args, bare_kwargs = _arguments(name, args), _arguments(name, kwargs)
                self._give(name, lambda: work(*bare_args, **bare_kwargs), "launch")

        return launcher

    @contextmanager
    def made_current(self, _: Any) -> Iterator[None]:
        before = getattr(self._local, "current", False)
        self._local.current = True
        try:
            yield
        finally:
            self._local.current = before


def _bare(tree: Any) -> Any:
    return tree_map(lambda each: each.held if isinstance(each, DeviceTensor) else each, tree)


def _meta(each: Any) -> Any:
    if not isinstance(each, torch.Tensor) or not each.ndim:
        return torch.device("meta") if isinstance(each, torch.device) else each
    return torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")


def _arguments(launcher: str, tree: Any) -> Any:
    """Return a launcher's arguments with CPU tensors, also inside the classes of `ops.arguments`."""
    if isinstance(tree, DeviceTensor):
        return tree.held
    if isinstance(tree, torch.Tensor):
        raise RuntimeError(f"{launcher} is given a tensor of the host")
    if isinstance(tree, tuple | list):
        return type(tree)(_arguments(launcher, each) for each in tree)
    if isinstance(tree, dict):
        return {name: _arguments(launcher, each) for name, each in tree.items()}
    if is_dataclass(tree) and not isinstance(tree, type):
        return replace(tree, **{f.name: _arguments(launcher, getattr(tree, f.name)) for f in fields(tree)})
    return tree


def launchers() -> Iterator[tuple[ModuleType, str, Callable[..., None]]]:
    """Yield (module, name, what does the work) for every place where the backend calls a launcher."""
    from cuvee.kernels import class_predictor, lossless_scheme, outgoing, plans, transform_scheme

    for user in (plans, class_predictor, outgoing, transform_scheme, lossless_scheme):
        for name, launcher in list(vars(user).items()):
            home = getattr(launcher, "__module__", "") or ""
            if home.startswith("cuvee.kernels.ops.") and isfunction(launcher) and _returns_nothing(launcher):
                yield user, name, launcher


def _returns_nothing(function: Callable[..., object]) -> bool:
    return function.__annotations__.get("return") == "None"


@contextmanager
def late_device(patch: pytest.MonkeyPatch, hasty: set[int] | None = None) -> Iterator[LateDevice]:
    """Install a device for the calling thread, which uses an engine's stream, and for all threads started inside."""
    if KERNELS_RUN_ON != "ptx":
        pytest.skip(f"kernels run on: {KERNELS_RUN_ON}")
    from cuvee.kernels import backend
    from cuvee.kernels.backend import TritonBackend

    torch._C._ensureCUDADeviceGuardSet()
    device = LateDevice(hasty)
    run = threading.Thread.run

    def run_with_device(thread: threading.Thread) -> None:
        with _Mode():  # type: ignore[no-untyped-call]
            run(thread)

    patch.setattr(threading.Thread, "run", run_with_device)
    cuda: Any = torch.cuda
    for name, value in {
        "_lazy_init": lambda: None,
        "Stream": Stream,
        "Event": Event,
        "stream": device.on,
        "device": device.made_current,
        "current_stream": lambda _=None: device.stream,
        "current_device": lambda: 0,
        "is_current_stream_capturing": lambda: device.stream.capturing,
        "mem_get_info": lambda _=None: (1 << 36, 1 << 38),
    }.items():
        patch.setattr(cuda, name, value)
    for user, name, work in list(launchers()):
        patch.setattr(user, name, device.launch(name, work))
    patch.setattr(backend, "shared", TritonBackend())
    _present.append(device)
    try:
        Stream()
        engine = Stream()
        with _Mode(), device.on(engine):  # type: ignore[no-untyped-call]
            yield device
    finally:
        _present.remove(device)
