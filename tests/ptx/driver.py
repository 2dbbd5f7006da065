"""A Triton driver without a GPU: kernels are compiled to PTX, which the engine runs.

Triton goes its usual way: it specializes, compiles, loads, launches. In place of a cubin it gets the PTX itself, in
place of a device this engine, and tensors lie in the memory of the CPU.

A kernel may touch the views that it is given, each through addresses that derive from its own parameter. Addresses
found in memory lead to what `State.places` describes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tests.ptx.engine import Fault, Kernel, Memory, Options

TARGETS = ("sm_80", "sm_90", "sm_100")
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}  # that a program may have
MOST_THREADS = 1024


class Faulty(AssertionError):
    """A kernel made a fault; `faults` are the first of each launch."""

    def __init__(self, name: str, totals: dict[str, int], faults: list[Fault]) -> None:
        self.faults = faults
        counted = ", ".join(f"{count} of {kind}" for kind, count in totals.items())
        super().__init__("\n  ".join([f"{name}: {counted}", *map(str, faults[:8])]))


class State:
    """State of the process's emulator.

    Attributes:
        target: compiled for.
        options: of the launches to come.
        kernels: every one that was loaded, by its text.
        tables: names of arguments that hold addresses: the first column of their int64 rows.
        places: of memory that tables point to: its end by its start.
    """

    def __init__(self, target: str, options: Options, tables: Sequence[str] = ()) -> None:
        self.target, self.options, self.tables = target, options, tables
        self.kernels: dict[str, Kernel] = {}
        self.places: dict[int, int] = {}
        self._lock = threading.Lock()

    def kernel(self, text: str) -> Kernel:
        """Return the kernel of a PTX text."""
        with self._lock:
            if text not in self.kernels:
                self.kernels[text] = Kernel(text)
            return self.kernels[text]


_state: State | None = None


def installed() -> bool:
    """Return whether `install` was called."""
    return _state is not None


def state() -> State:
    """Return the state of the emulator that `install` has installed."""
    if _state is None:
        raise RuntimeError("the emulator is not installed")
    return _state


def extent(view: torch.Tensor) -> tuple[int, int]:
    """Return the first address of a view and the address after its last element."""
    first = view.data_ptr()
    if not view.numel():
        return first, first
    last = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    return first, first + (last + 1) * view.element_size()


class _Launcher:
    """The launcher that Triton calls with the arguments of a launch."""

    def __init__(self, source: Any, metadata: Any) -> None:
        signature = enumerate(source.signature.items())
        self.arguments = [(index, name, kind) for index, (name, kind) in signature if kind != "constexpr"]
        self.shared_bytes = metadata.shared
        if metadata.global_scratch_size or metadata.profile_scratch_size or metadata.num_ctas != 1:
            raise NotImplementedError(f"{metadata.name} wants scratch memory or clusters, which the emulator has not")

    def __call__(self, x: int, y: int, z: int, stream: int, kernel: Kernel, packed: Any, launch_metadata: Any,
                 enter: Any, leave: Any, *values: Any) -> None:  # fmt: skip
        current = state()
        parameters: list[int] = []
        memory: list[Memory] = []
        for index, name, kind in self.arguments:
            value = values[index]
            if kind.startswith("*"):
                memory.append(Memory(*extent(value), len(parameters), name))
                parameters.append(value.data_ptr())
                if name in current.tables:
                    for start in set(np.asarray(value)[..., 0].flatten().tolist()) & current.places.keys():
                        memory.append(Memory(start, current.places[start], None, f"memory that {name} point to"))
            elif kind.startswith(("i", "u")):
                parameters.append(int(value))
            else:
                raise NotImplementedError(f"{kernel.name}: no argument of type {kind}")
        # Triton appends two pointers to scratch memory, which no kernel here has.
        parameters += [0] * (len(kernel.encoded.entry.parameters) - len(parameters))
        enter(launch_metadata)
        outcome = kernel.launch((x, y, z), parameters, memory, self.shared_bytes, current.options)
        leave(launch_metadata)
        if outcome.totals:
            raise Faulty(kernel.name, outcome.totals, outcome.faults)


class _Utilities:
    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, Kernel, int, int, int]:
        """Module, function, registers, spills, threads."""
        return object(), state().kernel(binary.decode()), 0, 0, MOST_THREADS

    def unload_module(self, module: Any) -> None:
        """Do nothing: kernels stay loaded."""

    def get_device_properties(self, device: int) -> dict[str, Any]:
        """Return the device properties that Triton asks for."""
        return {"max_shared_mem": SHARED_BYTES[state().target], "multiprocessor_count": 1, "warpSize": 32}


class _Driver:
    launcher_cls = _Launcher

    def __init__(self) -> None:
        self.utils = _Utilities()

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", int(state().target.removeprefix("sm_")), 32)

    def get_current_device(self) -> int:
        # Triton keeps what it compiled by device.
        return TARGETS.index(state().target)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def _stages(*given: Any) -> tuple[str, str] | None:
    """Triton's hook into its stages: PTX stands for the binary. Without arguments: a name for what is changed."""
    if not given:
        return "ptx", "ptx"
    _, stages, options, *_ = given
    if options.backend_name != "cuda":
        raise NotImplementedError("the emulator runs PTX alone")
    stages["cubin"] = lambda text, metadata: text.encode()
    return None


def install(target: str, options: Options | None = None, tables: Sequence[str] = ()) -> State:
    """Make Triton compile for `target` and run what it compiles here, in this process and for good.

    Args:
        target: one of TARGETS.
        options, tables: see `State`.

    Raises:
        NoCompiler: there is no g++.
    """
    global _state  # noqa: PLW0603 - Triton has one active driver, too
    if target not in TARGETS:
        raise ValueError(f"target: must be one of {', '.join(TARGETS)}, got {target!r}")
    from tests.ptx.build import library
    from triton import knobs
    from triton.runtime import driver

    library()
    if _state is not None:
        raise RuntimeError("the emulator is installed already")
    _state = State(target, options or Options(), tables)
    knobs.runtime.add_stages_inspection_hook = _stages
    driver.set_active(_Driver())
    return _state
