"""Kernels loaded into the engine and launched there, with their faults."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.ptx.build import library
from tests.ptx.encode import encode
from tests.ptx.syntax import PtxError, parse

# As in machine.h, in its order.
KINDS = (
    "out of bounds", "misaligned", "shared memory out of bounds", "shared-memory race",
    "shared memory read before written", "asynchronous copy read before waited for",
    "shared memory read by tensor cores without a fence", "local memory out of bounds", "lanes missing", "endless loop",
    "tensor memory out of bounds", "tensor memory read before written",
    "tensor memory touched before waited for", "tensor-memory race",
    "tensor memory allocated, given back or addressed wrongly", "mbarrier used wrongly",
)  # fmt: skip
INSTRUCTION = np.dtype(
    [("op", "u2"), ("negated", "u1"), ("width", "u1"), ("count", "u1"), ("sign", "u1"), ("mode", "u1"), ("row", "u1")]
    + [(name, "i4") for name in ("guard", "d", "a", "b", "c", "e", "list", "target")]
    + [("imm", "i8"), ("origin", "u8")]
)  # fmt: skip
FAULT = np.dtype([(name, "i4") for name in ("kind", "pc", "program", "warp", "lane", "size")] + [("address", "u8")])
ANYWHERE = 2**64 - 1
FAULT_ROOM = 64


class _Region(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64), ("origin", ctypes.c_uint64)]


class _Program(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_void_p), ("lists", ctypes.c_void_p), ("constants", ctypes.c_void_p),
        ("length", ctypes.c_int32), ("file_bytes", ctypes.c_int32), ("constants_at", ctypes.c_int32),
        ("constants_bytes", ctypes.c_int32), ("local_bytes", ctypes.c_int32), ("special", ctypes.c_int32 * 7),
    ]  # fmt: skip


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3), ("warps", ctypes.c_uint32), ("shared_bytes", ctypes.c_uint32),
        ("shuffled", ctypes.c_uint32), ("parameters", ctypes.c_void_p), ("regions", ctypes.c_void_p),
        ("region_count", ctypes.c_int32), ("quantum", ctypes.c_uint32), ("seed", ctypes.c_uint64),
        ("limit", ctypes.c_uint64), ("faults", ctypes.c_void_p),
        ("fault_room", ctypes.c_int32), ("fault_count", ctypes.c_int32), ("fault_totals", ctypes.c_uint64 * 24),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    """Options for running programs.

    Attributes:
        seed: None: programs in order, each warp up to its next barrier. Else programs in an order that is drawn, and
            warps in turns of up to `quantum` instructions.
        quantum: see `seed`.
        limit: instructions of warps that one program may run.
    """

    seed: int | None = None
    quantum: int = 40
    limit: int = 1 << 27


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes `low … high - 1` that a launch may touch; of parameter number `parameter`, or None: found in memory."""

    low: int
    high: int
    parameter: int | None
    name: str


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a kernel, at its first occurrence; `source` begins with the innermost call."""

    kind: str
    text: str
    line: int
    source: tuple[str, ...]
    program: int
    warp: int
    lane: int
    where: str

    def __str__(self) -> str:
        source = " < ".join(self.source) or "no line"
        place = f"program {self.program}, warp {self.warp}, lane {self.lane}"
        return f"{self.kind}: {source}: `{self.text}` (PTX line {self.line}; {place}{self.where})"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a launch: `totals` of faults by kind, of which the first are in `faults`."""

    totals: Counter[str]
    faults: list[Fault]


@cache
def handlers() -> dict[str, int]:
    """Numbers of the engine's handlers by name."""
    engine = library()
    engine.ptx_handler_name.restype = ctypes.c_char_p
    sizes = [INSTRUCTION.itemsize, FAULT.itemsize, *map(ctypes.sizeof, (_Region, _Program, _Launch))]
    if (there := [engine.ptx_size(k) for k in range(len(sizes))]) != sizes:
        raise RuntimeError(f"engine.py and machine.h disagree about the sizes of structures: {sizes}, {there}")
    return {engine.ptx_handler_name(k).decode(): k for k in range(engine.ptx_handler_count())}


class Kernel:
    """A kernel in the engine.

    Args:
        text: PTX of one entry.

    Attributes:
        text: as given.

    Raises:
        PtxError: an instruction that the engine does not know.
        NoCompiler: see `build.library`.
    """

    def __init__(self, text: str) -> None:
        known = handlers()
        self.text = text
        self._data: list[npt.NDArray[np.uint8]] = []
        self.memory: list[Memory] = []
        self.encoded = found = encode(parse(text), self._keep)
        self.name = found.entry.name
        self._code = np.zeros(len(found.codes), INSTRUCTION)
        for name in ("guard", "d", "a", "b", "c", "e", "list", "target"):
            self._code[name] = -1
        for row, code in zip(self._code, found.codes, strict=True):
            if code.op not in known:
                s = code.statement
                raise PtxError(f"line {s.line}: cannot run `{s.text}` ({', '.join(s.source)}): no {code.op}")
            row["op"] = known[code.op]
            for name, value in code.fields.items():
                row[name] = value
        self._lists = np.array(found.lists or [0], np.int32)
        self._constants = np.frombuffer(found.constants + bytes(64), np.uint8)
        self._program = _Program(
            self._code.ctypes.data, self._lists.ctypes.data, self._constants.ctypes.data, len(self._code),
            found.file_bytes, found.constants_at, len(found.constants), found.local_bytes,
            (ctypes.c_int32 * 7)(*found.special),
        )  # fmt: skip

    def _keep(self, name: str, initial: bytes, size: int) -> int:
        data = np.zeros(max(size, len(initial), 1), np.uint8)
        data[: len(initial)] = np.frombuffer(initial, np.uint8)
        self._data.append(data)
        address = int(data.ctypes.data)
        self.memory.append(Memory(address, address + len(data), None, name))
        return address

    def launch(
        self,
        grid: Sequence[int],
        parameters: Sequence[int],
        memory: Sequence[Memory] = (),
        shared_bytes: int = 0,
        options: Options | None = None,
    ) -> Outcome:
        """Run a grid of programs; other threads may do so at the same time.

        Args:
            grid: programs along three axes.
            parameters: their bits, one number each.
            memory: what the programs may touch.
            shared_bytes: given at launch.
            options: None: the default.
        """
        chosen = options or Options()
        values = np.array([value % 2**64 for value in parameters] or [0], np.uint64)
        if len(parameters) != len(self.encoded.entry.parameters):
            raise ValueError(
                f"parameters: {self.name} takes {len(self.encoded.entry.parameters)}, got {len(parameters)}"
            )
        allowed = [*memory, *self.memory]
        regions = (_Region * max(1, len(allowed)))(
            *(_Region(m.low, m.high, 0 if m.parameter is None else 1 << m.parameter) for m in allowed)
        )
        for index in range(len(memory), len(allowed)):
            regions[index].origin = ANYWHERE
        faults = np.zeros(FAULT_ROOM, FAULT)
        request = _Launch(
            (ctypes.c_uint32 * 3)(*grid), self.encoded.entry.threads // 32, shared_bytes + self.encoded.shared_bytes,
            chosen.seed is not None, values.ctypes.data,
            ctypes.addressof(regions), len(allowed), chosen.quantum if chosen.seed is not None else 0,
            chosen.seed or 0, chosen.limit, faults.ctypes.data, FAULT_ROOM, 0,
        )  # fmt: skip
        library().ptx_launch(ctypes.byref(self._program), ctypes.byref(request))
        totals = Counter({kind: int(n) for kind, n in zip(KINDS, request.fault_totals, strict=False) if n})
        found = [self._describe(fault, allowed) for fault in faults[: request.fault_count]]
        return Outcome(totals, found)

    def _describe(self, fault: Any, memory: Sequence[Memory]) -> Fault:
        statement = self.encoded.codes[int(fault["pc"])].statement
        kind, address, size = KINDS[int(fault["kind"])], int(fault["address"]), int(fault["size"])
        where = ""
        if kind in KINDS[:2] and memory:
            near = min(memory, key=lambda m: min(abs(address - m.low), abs(address - m.high)))
            where = f"; {size} bytes at {address - near.low} of {near.name}, which has {near.high - near.low}"
        elif kind in KINDS[2:8]:
            where = f"; {size} bytes at {address}"
        elif kind in KINDS[10:]:
            where = f"; row {address >> 16}, column {address & 0xFFFF}" if size else f"; at {address}"
        return Fault(kind, statement.text, statement.line, statement.source, int(fault["program"]), int(fault["warp"]),
                     int(fault["lane"]), where)  # fmt: skip
