"""The time and the work of each stage of one encode and one decode, beside the limits of the core that runs it."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from cuvee.codec.backends import register
from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.cpu.backend import CpuBackend
from cuvee.codec.format.container import inspect, read_header, read_section, write_blob
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.step_coding import SectionCoding
from cuvee.codec.schemes import lossless
from cuvee.codec.stages.implementations import Stages, get_stages
from cuvee.eval.bench.cpu.cases import BACKEND
from cuvee.eval.bench.cpu.limits import StageTotal, against_limits, probes
from cuvee.eval.bench.cpu.stage_work import count_work
from cuvee.eval.machine import torch_threads
from cuvee.eval.timing import Effort, Timing

__all__ = ["CONTAINER", "REST", "STAGE_FUNCTIONS", "measure_stages"]


# What each row of the table adds up, by the names in `Stages` and in `_OTHERS`.
STAGE_FUNCTIONS = {
    "gather": ("gather_centered",),
    "choose classes": ("classes",),
    "sort by class": ("arrange",),
    "split bytes": ("split_unit",),
    "choose tables": ("choose_tables",),
    "product": ("analyze", "synthesize"),
    "quantize and pack": ("quantize", "pack", "to_planes"),
    "entropy coding": ("rans_encode", "encode_classed"),
    "read sections": ("index_sections",),
    "read tables": ("index_layers",),
    "entropy decoding, dequantize": ("decode_sections",),
    "entropy decoding, join, place": ("decode_layers",),
    "place": ("place",),
}
# Functions that schemes and the backend call besides the stages.
_OTHERS: tuple[tuple[Any, str], ...] = (
    (lossless, "choose_tables"),
    (SectionCoding, "classes"),
)
CONTAINER, REST = "container", "rest"
MOST_RUNS = 20
_ROWS = {function: row for row, functions in STAGE_FUNCTIONS.items() for function in functions}
_WATCHED = "numba-watched"


class _Watch:
    """Adds up the time spent in stages, and, when asked to, counts their work instead."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.totals: dict[str, StageTotal] = {}
        self._counting = False

    def wrap(self, row: str, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            if self._counting:
                return self._count(row, stage, function, args, options)
            began = time.thread_time()
            result = function(*args, **options)
            self.seconds[row] += time.thread_time() - began
            return result

        return watched

    def _count(
        self, row: str, stage: str, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        args = tuple(list(own) if isinstance(own, Iterator) else own for own in args)
        result = function(*args, **options)
        before = self.totals.get(row, StageTotal(0, {}))
        work = dict(before.work)
        for unit, amount in count_work(stage, args, result).items():
            work[unit] = work.get(unit, 0) + amount
        self.totals[row] = StageTotal(before.calls + 1, work)
        return result

    def count(self, call: Callable[[], object]) -> dict[str, StageTotal]:
        """Return the work of the stages in a call, which takes longer than usual."""
        self.totals, self._counting = {}, True
        try:
            call()
        finally:
            self._counting = False
        return self.totals

    def stages(self, stages: Stages) -> Stages:
        """The stages with a watch on each."""
        watched: dict[str, Any] = {
            function: self.wrap(row, function, getattr(stages, function))
            for function, row in _ROWS.items()
            if hasattr(stages, function)
        }
        return replace(stages, name=_WATCHED, **watched)

    @contextmanager
    def others(self) -> Iterator[None]:
        """Watch the functions besides the stages, too, until this is left."""
        with ExitStack() as stack:
            for owner, name in _OTHERS:
                function = getattr(owner, name)
                stack.callback(setattr, owner, name, function)
                setattr(owner, name, self.wrap(_ROWS[name], name, function))
            yield


@contextmanager
def _on_one_core() -> Iterator[None]:
    """Keep this thread on one core, where the system can do that: one core may be a third slower than the next."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def measure_stages(effort: Effort, profile: Profile, quality: str, chunk: KVChunk) -> dict[str, Any]:
    """Time the stages of encoding and decoding one chunk, count their work, and measure the core's limits.

    Every round encodes, decodes, and runs each probe of `limits.py` once, all in one thread on one core. Figures are
    medians over the rounds. Seconds are the thread's own: what other processes take of the core in between does not
    count, since it would slow down a long stage and spare a short probe.

    Args:
        effort: bounds the number of rounds.
        profile: of the codec.
        quality: of the codec.
        chunk: is encoded.

    Returns:
        The figures, as a dict for JSON. For each way: `seconds` by stage, in which `container` is the blob's header and
        checksums, measured by themselves, and `rest` the time of `Codec.encode` or `Codec.decode` that none of these
        accounts for (Python, and what it calls besides the stages); `whole`, the seconds of that call; and for each
        stage its `work` (see `against_limits`).
    """
    watch = _Watch()
    watched = watch.stages(get_stages(BACKEND))
    register(_WATCHED, partial(CpuBackend, watched))
    codec = Codec(profile, quality, backend=_WATCHED, threads=1)
    with torch_threads(1), torch.no_grad(), _on_one_core(), watch.others():
        blob = codec.encode(chunk)
        out = [torch.empty_like(unit) for unit in chunk.keys], [torch.empty_like(unit) for unit in chunk.values]
        calls: dict[str, Callable[[], object]] = {
            "encode": partial(codec.encode, chunk),
            "decode": partial(codec.decode, blob, chunk.start, out=out),
        }
        containers = _container_calls(blob)
        totals = {way: watch.count(call) for way, call in calls.items()}
        limits = probes(total for stages in totals.values() for total in stages.values())
        runs: dict[str, defaultdict[str, list[float]]] = {way: defaultdict(list) for way in calls}
        limit_runs: defaultdict[str, list[float]] = defaultdict(list)
        for number in range(max(effort.least, min(effort.most, MOST_RUNS)) + 1):
            for way, call in calls.items():
                watch.seconds.clear()
                whole = _seconds(call)
                container = _seconds(containers[way])
                if number:  # the first round warms up
                    _record(runs[way], watch.seconds, container, whole)
            for name, probe in limits.items():
                limit_runs[name].append(probe.seconds())
    rates = {name: limits[name].amount / Timing.of(own).median for name, own in limit_runs.items()}
    return {
        "tokens": chunk.tokens,
        "raw_bytes": chunk.nbytes,
        "bits_per_value": inspect(blob).bits_per_value,
        "limits_per_second": rates,
        **{way: _figures(runs[way], totals[way], rates, chunk.nbytes) for way in calls},
    }


def _seconds(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began


def _record(
    runs: defaultdict[str, list[float]], stages: defaultdict[str, float], container: float, whole: float
) -> None:
    """Add one run: the seconds of each stage, of the container, of the rest, and of the whole call."""
    for name, seconds in stages.items():
        runs[name].append(seconds)
    runs[CONTAINER].append(container)
    runs[REST].append(max(whole - container - sum(stages.values()), 0.0))
    runs["whole"].append(whole)


def _figures(
    runs: defaultdict[str, list[float]], totals: dict[str, StageTotal], rates: dict[str, float], raw_bytes: int
) -> dict[str, Any]:
    medians = {name: Timing.of(seconds).median for name, seconds in runs.items()}
    whole = medians.pop("whole")
    return {
        "whole": whole,
        "seconds": medians,
        "share_of_rest": medians[REST] / whole,
        "gb_per_s": {name: raw_bytes / s / 1e9 for name, s in medians.items() if s and name != REST},
        "work": against_limits(totals, medians, rates),
    }


def _container_calls(blob: bytes) -> dict[str, Callable[[], object]]:
    """The work on a blob's header and checksums, in both directions."""

    def read() -> list[bytes | memoryview]:
        header = read_header(blob)
        return [read_section(blob, header, index) for index in range(len(header.section_bytes))]

    header, sections = read_header(blob), [bytes(section) for section in read()]

    def write() -> None:
        write_blob(header, sections)

    return {"encode": write, "decode": read}
