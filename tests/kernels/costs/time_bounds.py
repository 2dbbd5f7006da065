"""Lower bounds of the time that kernels take on Hopper, computed without a GPU: `make costs` with `--model`.

    counts.json            work of each kernel per value: executed PTX, sectors, passes over shared memory, FLOPs
    static_costs.report    machine instructions per PTX instruction, and the share of integer instructions
    Machine                throughputs of a GPU

A kernel takes at least the longest of the times that its instructions, its integer instructions, its first-level cache
and shared memory, its second-level cache, its memory and its tensor cores need. The bounds leave out
latency, cache misses on loads, and launches that do not fill the device; only a GPU can measure those.

`counts.json` was counted for sm_90 on one chunk of 256 tokens of Llama-3.1-8B's shape, bfloat16, whose spectrum falls
by 2.5% per component, at 1.4 bits per value. `python -m tests.kernels.costs.counting` counts again; a test compares
the kernels with the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuvee.codec.errors import CuveeError

TARGET = "sm_90"
LIMITS = ("issue", "integer", "L1", "L2", "DRAM", "tensor")
SECTOR = 32  # bytes
ELEMENT = 2  # bytes of a value of bfloat16
_ISSUED = 4  # instructions of warps per clock and multiprocessor: one of each of its four schedulers
_INTEGER = 2  # likewise, of the pipe for additions, logic, shifts and comparisons, which has 64 lanes


@dataclass(frozen=True, slots=True)
class Machine:
    """A GPU: multiprocessors, clock in GHz, TB/s of second-level cache and memory, TFLOP/s of bfloat16 products."""

    multiprocessors: int
    clock: float
    l2: float
    dram: float
    tensor: float


# NVIDIA's data sheets "H200 Tensor Core GPU" and "H100 Tensor Core GPU", SXM. The clock is that at which their products
# come about; the second-level cache is assumed, as data sheets do not give it.
MACHINES = {"H200": Machine(132, 1.83, 5.5, 4.8, 989.0), "H100": Machine(132, 1.83, 5.5, 3.35, 989.0)}


@dataclass(frozen=True, slots=True)
class Count:
    """Work of a kernel per value, on average over a chunk.

    Attributes:
        instructions: PTX instructions that warps run.
        sectors: sectors of 32 bytes that accesses to global memory touch.
        through: sectors that the first-level cache always passes on: of stores, atomics, asynchronous copies.
        transfers: clocks of the first-level cache for these accesses, at four sectors per clock.
        written: bytes stored to global memory.
        passes: clocks of shared memory; `least_passes`: the same without bank conflicts.
        barriers: barriers that warps meet.
        flops: operations of tensor cores; those of TF32 count twice, as they take twice as long as bfloat16.
        lanes: how many of 32 lanes take part in an instruction, on average.
    """

    instructions: float
    sectors: float
    through: float
    transfers: float
    written: float
    passes: float
    least_passes: float
    barriers: float
    flops: float
    lanes: float


# The kernels whose output each kernel reads. These bytes come from memory in launches whose arrays exceed the
# second-level cache. "cache": the cache of the engine, "blob": the blob.
_READS = {
    "gather": ("cache",), "sum_bytes": ("cache",), "count_symbols": ("cache",), "split_planes": ("cache",),
    "analyze": ("gather",),
    "quantize": ("analyze",), "rans_encode": ("quantize",), "write_coded": ("rans_encode",),
    "rans_decode": ("blob",), "dequantize": ("rans_decode",), "synthesize": ("dequantize",),
    "merge_planes": ("rans_decode",),
}  # fmt: skip


def counts() -> dict[str, dict[str, Any]]:
    """What was counted: by scheme `values`, `bits` per value, and `encode` and `decode`: Count by kernel."""
    read = json.loads(Path(__file__).with_name("counts.json").read_text())
    return {
        scheme: {
            **found,
            **{way: {name: Count(**own) for name, own in found[way].items()} for way in ("encode", "decode")},
        }
        for scheme, found in read.items()
    }


def bounds(count: Count, read: float, expansion: float, integer: float, machine: Machine) -> dict[str, float]:
    """Picoseconds per value that each of LIMITS allows at least, of a launch that fills the device.

    Args:
        count: of the kernel.
        read: bytes per value that come from memory.
        expansion: machine instructions per PTX instruction.
        integer: share of these that the integer pipe takes.
        machine: which GPU.
    """
    clocks = machine.multiprocessors * machine.clock * 1e-3  # of all multiprocessors, per picosecond
    issued = count.instructions * expansion
    return {
        "issue": issued / _ISSUED / clocks,
        "integer": issued * integer / _INTEGER / clocks,
        "L1": (count.transfers + count.passes) / clocks,
        "L2": count.through * SECTOR / machine.l2,
        "DRAM": (read + count.written) / machine.dram,
        "tensor": count.flops / machine.tensor,
    }


def model(report: Mapping[str, Any], names: Sequence[str] = tuple(MACHINES)) -> list[dict[str, Any]]:
    """Bounds of every kernel, and of encoding and decoding as a whole: their kernels one after the other.

    Args:
        report: from `static_costs.report`, for TARGET.
        names: names of MACHINES.

    Returns:
        per machine, scheme and way (`encode`, `decode`): `bits` per value; `kernels`, each with its `kernel`, its
        `bounds` in picoseconds per value, the `limit` that is largest, and `gb_per_s` of bfloat16; and `ps` and
        `gb_per_s` of all. JSON can hold it.

    Raises:
        CuveeError: the report lacks a kernel.
    """
    compiled = {(entry["kernel"], entry["target"]): entry for entry in report["kernels"]}
    out = []
    for name in names:
        machine = MACHINES[name]
        for scheme, found in counts().items():
            for way in ("decode", "encode"):
                kernels = []
                for kernel, count in found[way].items():
                    entry = compiled.get((kernel, TARGET))
                    if entry is None or not entry.get("expansion"):
                        raise CuveeError(f"the report says nothing of {kernel} on {TARGET}")
                    read = _read(kernel, found, way)
                    limits = bounds(count, read, entry["expansion"], entry["integer_share"], machine)
                    longest = max(limits, key=lambda limit: limits[limit])
                    speed = ELEMENT * 1e3 / limits[longest]
                    kernels.append({"kernel": kernel, "bounds": limits, "limit": longest, "gb_per_s": speed})
                total = sum(own["bounds"][own["limit"]] for own in kernels)
                out.append(
                    {
                        "machine": name, "scheme": scheme, "way": way, "bits": found["bits"], "kernels": kernels,
                        "ps": total, "gb_per_s": ELEMENT * 1e3 / total,
                    }
                )  # fmt: skip
    return out


def _read(kernel: str, found: Mapping[str, Any], way: str) -> float:
    """Return the bytes per value of other kernels' output that a kernel reads."""
    read = 0.0
    for source in _READS.get(_plain(kernel), ()):
        if source == "cache":
            read += ELEMENT
        elif source == "blob":
            # Stored byte planes bypass the entropy coder.
            read += found["bits"] / 8 - _stored(found)
        else:
            read += sum(own.written for name, own in found[way].items() if _plain(name) == source)
    return read + (_stored(found) if kernel == "merge_planes" else 0)


def _stored(found: Mapping[str, Any]) -> float:
    """Return the bytes per value that a lossless blob stores uncoded."""
    decode = found["decode"]
    return ELEMENT - decode["rans_decode"].written if "merge_planes" in decode else 0.0


def _plain(kernel: str) -> str:
    """Return the name of a kernel without the name of its variant."""
    return kernel.split(" ", maxsplit=1)[0]
