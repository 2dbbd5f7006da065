"""What this core can do at most, in the units of `stage_work.py`, measured in turns with the stages.

| unit | limit |
|---|---|
| decoded symbols, encoded symbols | the coder alone: 128 full streams of 2,048 symbols with one table, in the cache |
| float32 operations, bfloat16 operations | `torch.mm` of two matrices of 1,024 x 1,024 |
| bytes | a copy of as many bytes as one call of the stage touches, again and again, so from the cache that holds them |

None of these is a law of nature. The first is what the coder itself reaches in its best case, so it says nothing about
a better coder. For decoding there is a bound beside it: sixteen symbols take two vector gathers, of their table's
entries and of their next words, and a loop of nothing but gathers from one table measures what these take. A copy
counts what it reads and what it writes, and is rounded up to a power of two, at least 128 KiB.

**Cycles** are counted by a loop in which each operation needs the result of the one before: an addition and an
exclusive or, which take a cycle each on current CPUs. Virtual machines rarely offer the counters of `perf`. A CPU that
changes its clock makes the cycles of the loop and of the stages longer alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from cuvee.codec.entropy.family import coding_plan, default_family
from cuvee.codec.stages.compiled.coder_steps import lookup_step
from cuvee.codec.stages.compiled.compiler import compiled
from cuvee.codec.stages.compiled.simd import WIDTH
from cuvee.codec.stages.implementations import get_stages
from cuvee.eval.bench.cpu.cases import BACKEND
from cuvee.eval.bench.cpu.stage_work import BYTES, DECODED, DENSE, ENCODED, PRODUCTS, Work

__all__ = [
    "CYCLES",
    "GATHERS",
    "Probe",
    "StageTotal",
    "against_limits",
    "copy_bytes",
    "copy_name",
    "limit_of",
    "probes",
]

CYCLES, GATHERS = "cycles", "gathers of sixteen"
GATHERS_PER_SYMBOL = 2 / WIDTH  # of the decoder
SYMBOLS = (DECODED, ENCODED)
STEPS, STREAMS, SCALE_CODE = 2048, 128, 10  # of the coder's long run: 2.3 bits per symbol
MATRIX = 1024
LEAST_COPY, MOST_COPY = 128 << 10, 256 << 20  # bytes read and written
COPIED = 8 << 20  # a smaller copy is repeated until this many bytes are read and written
SPINS, GATHERED = 200_000, 20_000


@dataclass(frozen=True, slots=True)
class Probe:
    """A call that reaches a limit.

    Attributes:
        call: what is timed.
        amount: of the limit's unit in one call.
    """

    call: Callable[[], object]
    amount: float

    def seconds(self) -> float:
        """Return the seconds that this thread works on one call."""
        self.call()  # the stage before has filled the cache with other data
        began = time.thread_time()
        self.call()
        return time.thread_time() - began


@dataclass(frozen=True, slots=True)
class StageTotal:
    """What one stage did in one encode or decode.

    Attributes:
        calls: how often it was called.
        work: the amounts of all calls together, by unit.
    """

    calls: int
    work: Work


def copy_bytes(touched: float) -> int:
    """Return the size of the copy that is the limit of a call: bytes read and written, a power of two."""
    size = LEAST_COPY
    while size < touched and size < MOST_COPY:
        size *= 2
    return size


def copy_name(size: int) -> str:
    """Name the limit of copies of this many bytes, read and written."""
    return f"copy of {size} bytes"


def limit_of(unit: str, stage: StageTotal) -> str:
    """Name the limit for one unit of a stage's work: the key of its probe."""
    return copy_name(copy_bytes(stage.work[BYTES] / stage.calls)) if unit == BYTES else unit


def probes(stages: Iterable[StageTotal]) -> dict[str, Probe]:
    """Prepare a probe for the cycles, and for each limit that these stages are compared with, by the limit's name."""
    found = {CYCLES: Probe(partial(_spin, SPINS, 3, 5), 2 * SPINS)}
    kinds = {unit: dtype for dtype, unit in PRODUCTS.items()}
    for stage in stages:
        for unit in stage.work:
            name = limit_of(unit, stage)
            if unit == DENSE or name in found:
                continue
            if unit in SYMBOLS:
                found |= _coder_probes()
            elif unit in kinds:
                a, b, out = (torch.ones(MATRIX, MATRIX, dtype=kinds[unit]) for _ in range(3))
                found[name] = Probe(partial(torch.mm, a, b, out=out), 2 * MATRIX**3)
            else:
                found[name] = _copy_probe(copy_bytes(stage.work[BYTES] / stage.calls))
    return found


@compiled
def _spin(count, a, b):  # type: ignore[no-untyped-def]
    """Do `2 * count` operations, one after the other."""
    x = np.int64(0)
    for _ in range(count):
        x = (x + a) ^ b
    return x


@compiled
def _gather(count, table, index, out):  # type: ignore[no-untyped-def]
    """Look up sixteen entries of a table, `count` times."""
    for i in range(count):
        lookup_step(table, 0, index, i * WIDTH % len(index), out)


def _coder_probes() -> dict[str, Probe]:
    """The coder on a long run of symbols of one table, one token per stream, so that nothing is rearranged."""
    coder, tables = get_stages(BACKEND), default_family().tables
    plan = coding_plan(np.full(STEPS, SCALE_CODE, np.int32))
    slot = np.random.default_rng(0).integers(0, 1 << tables.prob_bits, (STEPS, STREAMS))
    symbols = (tables.slots[plan.tables[:, None], slot] >> 24).astype(np.uint8)
    streams = coder.rans_encode(symbols, plan.tables, tables, 1)
    table, looked_up = tables.slots[plan.tables[0]], slot[: 1024 // STREAMS].astype(np.uint32).reshape(-1)
    return {
        DECODED: Probe(partial(coder.rans_decode, streams, plan.tables, tables, 1, STREAMS), symbols.size),
        ENCODED: Probe(partial(coder.rans_encode, symbols, plan.tables, tables, 1), symbols.size),
        GATHERS: Probe(partial(_gather, GATHERED, table, looked_up, np.empty_like(looked_up)), GATHERED),
    }


def _copy_probe(size: int) -> Probe:
    source, target = np.ones(size // 2, np.uint8), np.zeros(size // 2, np.uint8)
    repeats = max(1, COPIED // size)

    def copies() -> None:
        for _ in range(repeats):
            np.copyto(target, source)

    return Probe(copies, size * repeats)


def against_limits(
    totals: Mapping[str, StageTotal], seconds: Mapping[str, float], limits: Mapping[str, float]
) -> dict[str, list[dict[str, Any]]]:
    """Set what stages reached beside the limits.

    Args:
        totals: the work of each stage.
        seconds: its time, for the same work.
        limits: per second, by name, with `CYCLES`, and with `GATHERS` if symbols are decoded.

    Returns:
        for each stage and unit the amount, both rates per second and their quotient, as dicts for JSON. Symbols also
        have cycles per symbol, with those of the gathers if they are decoded, and products `dense`, what they would
        execute without skipping zeros.
    """
    out: dict[str, list[dict[str, Any]]] = {}
    for name, stage in totals.items():
        out[name] = []
        for unit, amount in stage.work.items():
            if unit == DENSE or not amount:
                continue
            rate, limit = amount / seconds[name], limits[limit_of(unit, stage)]
            entry = {
                "unit": unit,
                "amount": amount,
                "per_second": rate,
                "limit": limit_of(unit, stage),
                "limit_per_second": limit,
                "share": rate / limit,
            }
            if unit in SYMBOLS:
                entry |= {"cycles": limits[CYCLES] / rate, "limit_cycles": limits[CYCLES] / limit}
            if unit == DECODED:
                entry["gather_cycles"] = GATHERS_PER_SYMBOL * limits[CYCLES] / limits[GATHERS]
            if unit in PRODUCTS.values():
                entry["dense"] = stage.work.get(DENSE, amount)
            out[name].append(entry)
    return out
