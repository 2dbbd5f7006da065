"""cuvee beside what a user would take instead: the same bytes, in the same run, in rounds."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from cuvee.codec.codec import Codec
from cuvee.codec.errors import CuveeError, InputError
from cuvee.codec.profiles.profile import Profile
from cuvee.eval.bench.cpu.alternatives import ALTERNATIVES, MEMCPY, ZSTD_METHOD, Alternative, FlatCache
from cuvee.eval.bench.cpu.caches import BenchCache
from cuvee.eval.bench.cpu.cases import BACKEND
from cuvee.eval.bench.timing import Timing
from cuvee.eval.machine import torch_threads

__all__ = ["COMPARED_TOKENS", "LEAST_SAMPLE", "LOSSLESS_METHOD", "check_threads", "compare", "run_rounds"]

K = TypeVar("K", bound=Hashable)

COMPARED_TOKENS = (64, 256)
LOSSLESS_METHOD = "cuvee lossless"
LEAST_SAMPLE = 2e-3  # seconds: a shorter call is repeated within a round, so that the clock and the caches are steady
MOST_ERROR = 0.5  # a lossy method with a larger relative error did not restore the cache


@dataclass(frozen=True, slots=True)
class _Runner:
    """One method with some threads."""

    encode: Callable[[], object]
    decode: Callable[[], object]
    stored_bytes: Callable[[], int]
    restored: Callable[[], Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Method:
    name: str
    exact: bool
    group: str | None
    make: Callable[[FlatCache, FlatCache, int, ThreadPoolExecutor], _Runner]


def check_threads(threads: Sequence[int]) -> None:
    """Refuse numbers of threads that do not rise from at least 1.

    Raises:
        InputError: they do not.
    """
    if not threads or list(threads) != sorted(set(threads)) or threads[0] < 1:
        raise InputError(f"threads: must rise from at least 1, got {list(threads)}")


def compare(cache: BenchCache, tokens: int, threads: Sequence[int], rounds: int) -> dict[str, Any]:
    """Time every method on the first tokens of a cache.

    Args:
        cache: whose bytes, and with which profiles.
        tokens: at most the tokens of the cache.
        threads: what to measure with, rising.
        rounds: each times every method once, forwards and backwards in turn. Ratios are taken within rounds.

    Returns:
        The figures, as a dict for JSON. A method whose package is not installed has only `skipped`, which says so.

    Raises:
        CuveeError: an exact method did not return its input, or another method returned something too different.
        InputError: `threads` out of order or range.
    """
    check_threads(threads)
    chunk = cache.chunk.slice(0, tokens)
    source, target = FlatCache.copy_of(chunk), FlatCache(chunk.layout, tokens, chunk.start)
    missing = {method.name: why for method in ALTERNATIVES if (why := method.missing())}
    methods = [_alternative(method) for method in ALTERNATIVES if method.name not in missing]
    methods += _own(cache.profiles)
    with ThreadPoolExecutor(threads[-1], initializer=torch.set_num_threads, initargs=(1,)) as pool, torch_threads(1):
        runners = {
            (method.name, count): method.make(source, target, count, pool) for method in methods for count in threads
        }
        errors = {
            (method.name, count): _proved(method, runners[method.name, count], source, target)
            for method in methods
            for count in threads
        }
        calls = {}
        for key, runner in runners.items():
            calls[*key, "encode"] = runner.encode
            calls[*key, "decode"] = runner.decode
        others = _CoresOfOthers()
        times = run_rounds(calls, rounds)
        busy = others.since_then()
    values = len(source.values)
    balanced = next(method.name for method in methods if method.group is not None)
    entries: list[dict[str, Any]] = [
        {"method": method.name, "exact": method.exact, "skipped": missing[method.name]}
        for method in ALTERNATIVES
        if method.name in missing
    ]
    for method in methods:
        by_threads = []
        for count in threads:
            own = {what: times[method.name, count, what] for what in ("encode", "decode")}
            entry: dict[str, Any] = {"threads": count}
            entry["bits_per_value"] = 8 * runners[method.name, count].stored_bytes() / values
            for what, runs in own.items():
                entry[f"{what}_gb_per_s"] = Timing.of(runs).per_second(source.values.nbytes / 1e9)
            entry["decode_over"] = {
                name: _ratio(times[name, count, "decode"], own["decode"])
                for name in (MEMCPY, LOSSLESS_METHOD, balanced)
            }
            by_threads.append(entry)
        most, fewest = threads[-1], threads[0]
        scaling = {
            what: _ratio(times[method.name, fewest, what], times[method.name, most, what])
            for what in ("encode", "decode")
        }
        entries.append(
            {
                "method": method.name,
                "exact": method.exact,
                "group": method.group,
                "bits_per_value": by_threads[0]["bits_per_value"],
                "relative_error": errors[method.name, fewest],
                "by_threads": by_threads,
                "most_over_fewest_threads": scaling if most > fewest else None,
            }
        )
    over = None if ZSTD_METHOD in missing else [_over_zstd(times, runners, count) for count in threads]
    order = [method.name for method in ALTERNATIVES] + [method.name for method in methods]
    return {
        "cache": cache.name,
        "real": cache.real,
        "profiles": {group: profile.source for group, profile in cache.profiles.items()},
        "layers": chunk.layout.num_layers,
        "tokens": tokens,
        "raw_bytes": source.values.nbytes,
        "threads": list(threads),
        "rounds": rounds,
        "cores_used_by_others": busy,
        "references": [MEMCPY, LOSSLESS_METHOD, balanced],
        "lossless_over_zstd": over,
        "methods": sorted(entries, key=lambda entry: order.index(entry["method"])),
    }


def _over_zstd(
    times: Mapping[tuple[str, int, str], Sequence[float]], runners: Mapping[tuple[str, int], _Runner], threads: int
) -> dict[str, Any]:
    """Return how many times as fast lossless coding is as zstd with as many threads, and its bytes over zstd's."""
    speeds = {
        what: _ratio(times[ZSTD_METHOD, threads, what], times[LOSSLESS_METHOD, threads, what])
        for what in ("encode", "decode")
    }
    stored = [runners[name, threads].stored_bytes() for name in (LOSSLESS_METHOD, ZSTD_METHOD)]
    return {"threads": threads, **speeds, "bytes": stored[0] / stored[1]}


class _CoresOfOthers:
    """Return the number of cores that other processes keep busy, which slows threads that wait for each other."""

    def __init__(self) -> None:
        self._began = (time.perf_counter(), _busy_seconds(), time.process_time())

    def since_then(self) -> float | None:
        """Their mean number since this was made. None without /proc."""
        wall, busy, own = self._began
        now = _busy_seconds()
        if busy is None or now is None:
            return None
        others = (now - busy) - (time.process_time() - own)
        return max(others, 0.0) / (time.perf_counter() - wall)


def _busy_seconds() -> float | None:
    """Seconds that all cores together were not idle since the machine started; with what a host took from them."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def run_rounds(calls: Mapping[K, Callable[[], object]], rounds: int) -> dict[K, list[float]]:
    """Seconds of each call, one sample a round; every second round goes through them backwards.

    What disturbs the machine for longer than a round then disturbs all of them alike. A call is repeated within its
    sample until that takes LEAST_SAMPLE seconds.

    Example:
        >>> {name: len(runs) for name, runs in run_rounds({"nothing": lambda: None}, 3).items()}
        {'nothing': 3}
    """
    repeats = {}
    for key, call in calls.items():
        call()
        began = time.perf_counter()
        call()
        repeats[key] = max(1, math.ceil(LEAST_SAMPLE / max(time.perf_counter() - began, 1e-7)))
    times: dict[K, list[float]] = {key: [] for key in calls}
    order = list(calls)
    for number in range(rounds):
        for key in order if number % 2 == 0 else reversed(order):
            call, count = calls[key], repeats[key]
            began = time.perf_counter()
            for _ in range(count):
                call()
            times[key].append((time.perf_counter() - began) / count)
    return times


def _ratio(others: Sequence[float], own: Sequence[float]) -> dict[str, float]:
    """Return the speed over the other method's: the median over rounds, with percentiles."""
    return Timing.of([other / mine for other, mine in zip(others, own, strict=True)]).to_dict()


def _alternative(method: Alternative) -> _Method:
    def make(source: FlatCache, target: FlatCache, threads: int, pool: ThreadPoolExecutor) -> _Runner:
        parts = 1 if method.by_torch else threads
        pairs = zip(source.parts(parts), target.parts(parts), strict=True)
        coders = [method.make(*pair) for pair in pairs]

        def shared(work: list[Callable[[], None]]) -> Callable[[], object]:
            if threads == 1:
                return work[0]
            if method.by_torch:
                return partial(_with_torch_threads, threads, work[0])
            return lambda: list(pool.map(_call, work))

        return _Runner(
            shared([coder.encode for coder in coders]),
            shared([coder.decode for coder in coders]),
            lambda: sum(coder.stored_bytes() for coder in coders),
            lambda: target.chunk.keys + target.chunk.values,
        )

    return _Method(method.name, method.exact, None, make)


def _call(work: Callable[[], None]) -> None:
    work()


def _with_torch_threads(count: int, work: Callable[[], None]) -> None:
    with torch_threads(count):
        work()


def _own(profiles: Mapping[str, Profile]) -> list[_Method]:
    def method(name: str, profile: Profile, quality: str, group: str | None) -> _Method:
        def make(source: FlatCache, target: FlatCache, threads: int, pool: ThreadPoolExecutor) -> _Runner:
            codec = Codec(profile, quality, backend=BACKEND, threads=threads)
            state = {"blob": b""}

            def encode() -> None:
                state["blob"] = codec.encode(source.chunk)

            out = target.chunk.keys, target.chunk.values  # as the alternatives do: new memory costs time of its own
            return _Runner(
                encode,
                lambda: codec.decode(state["blob"], out=out),
                lambda: len(state["blob"]),
                lambda: target.chunk.keys + target.chunk.values,
            )

        return _Method(name, quality == "lossless", group, make)

    lossless = method(LOSSLESS_METHOD, next(iter(profiles.values())), "lossless", None)
    return [
        lossless,
        *(method(f"cuvee balanced, {group}", own, "balanced", group) for group, own in profiles.items()),
    ]


def _proved(method: _Method, runner: _Runner, source: FlatCache, target: FlatCache) -> float:
    """The relative error of what comes back; 0 where every bit does.

    Raises:
        CuveeError: something else comes back.
    """
    target.values.fill_(math.nan)
    runner.encode()
    runner.decode()
    error = energy = 0.0
    exact = True
    for own, back in zip(source.chunk.keys + source.chunk.values, runner.restored(), strict=True):
        exact = exact and torch.equal(own.view(torch.int16), back.view(torch.int16))
        error += float((own.float() - back.float()).square().sum())
        energy += float(own.float().square().sum())
    relative = 0.0 if exact else math.sqrt(error / energy)
    if (method.exact and not exact) or not relative < MOST_ERROR:
        raise CuveeError(f"{method.name} did not return its input: a relative error of {relative:.3g}")
    return relative
