"""Speed and memory on this machine: every stage alone, whole encodes and decodes, and how both scale.

    stages      one core, one 256-token chunk: transform, quantize and pack, rANS, container
    coders      rANS on one core beside constriction's AnsCoder and a vectorized torch decoder: the same symbols, the
                same quantized model
    whole       Codec.encode and Codec.decode, one thread and all
    scaling     over tokens and over layers
    memory      peak of a fresh process above what it had, over the raw chunk

The caches are synthetic (falling spectrum, layers that share directions), so that the bench needs no model; sizes are
reported elsewhere, on a real one. Nothing is timed before it is proved right. Times are medians, with the 20th and
80th percentile; throughput counts the uncompressed bfloat16 cache, 1 GB = 10**9 bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from cuvee.codec.backends import Backend, get_backend
from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.coefficients import tokens_per_stream
from cuvee.codec.container import inspect, read_header, read_section, write_blob
from cuvee.codec.errors import CuveeError, InputError
from cuvee.codec.family import coding_plan, default_family
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.profile import Profile
from cuvee.codec.rans import U8, U16, Streams
from cuvee.codec.rope import rotate
from cuvee.codec.schemes import Target
from cuvee.codec.schemes.transform import TransformScheme
from cuvee.codec.tables import EntropyTables
from cuvee.codec.transform import Rotation, gather, synthesize, tile_tokens, tiles
from cuvee.eval.bench.machine import hardware, torch_threads

__all__ = ["print_report", "run_bench"]

BACKEND = "numba"
SHAPES: dict[str, tuple[int, int, int, float]] = {  # layers, KV heads, head size, RoPE theta
    "books-3m": (6, 2, 64, 1e4),
    "llama-3.1-8b, 4 of 32 layers": (4, 8, 128, 5e5),
}
SMALL, LARGE = SHAPES
FIT_CHUNK = 512
RUN_SECONDS = 0.25  # a timing repeats for so long …
RUNS = (5, 40)  # … but at least and at most so often
MEMORY_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call."""

    median: float
    p20: float
    p80: float
    runs: int

    def per_second(self, amount: float) -> dict[str, float]:
        """Throughput: `amount` a call. The 20th percentile is the slower one."""
        return {"median": amount / self.median, "p20": amount / self.p80, "p80": amount / self.p20, "runs": self.runs}


@dataclass(frozen=True, slots=True)
class Effort:
    """How long the bench may take."""

    seconds: float
    least: int
    most: int

    def measure(self, call: Callable[[], object]) -> Timing:
        """Time a call, after one that is not counted."""
        call()
        taken: list[float] = []
        while len(taken) < self.least or (sum(taken) < self.seconds and len(taken) < self.most):
            began = time.perf_counter()
            call()
            taken.append(time.perf_counter() - began)
        return _timing(taken)


def _timing(taken: Sequence[float]) -> Timing:
    p20, median, p80 = np.quantile(taken, [0.2, 0.5, 0.8]).tolist()
    return Timing(median, p20, p80, len(taken))


def run_bench(quick: bool = False, progress: Console | None = None) -> dict[str, Any]:
    """Run the benchmark.

    Args:
        quick: fewer cases and repeats.
        progress: where to say what is being measured; None is silent.

    Returns:
        A JSON-ready report.

    Raises:
        InputError: constriction is not installed.
        CuveeError: something did not come back as it went in; then nothing is reported.
    """
    _constriction()  # if it is missing, say so at once
    effort = Effort(0.05, 3, 10) if quick else Effort(RUN_SECONDS, *RUNS)
    began = time.perf_counter()

    def say(what: str) -> None:
        if progress is not None:
            progress.print(f"{time.perf_counter() - began:6.1f} s  {what}", highlight=False, style="dim")

    cases: list[tuple[str, str]] = [(SMALL, "layer"), (LARGE, "head")]
    if not quick:
        cases.insert(1, (SMALL, "all"))
    profiles = {}
    for shape, group in cases:
        say(f"a profile for {shape}, group {group}")
        with torch_threads(1):
            profiles[shape, group] = make_profile(make_layout(shape), group)
    report: dict[str, Any] = {"quick": quick, "hardware": hardware(), "backend": BACKEND}

    say("entropy coders")
    report["coders"] = compare_coders(effort, 2048 if quick else 16384)
    report["stages"], report["whole"] = [], []
    for (shape, group), profile in profiles.items():
        say(f"stages: {shape}, group {group}")
        with torch_threads(1):
            report["stages"].append({"shape": shape, "group": group, **measure_stages(effort, profile, 256)})
        for tokens in (64, 256) if quick else (64, 256, 1024):
            say(f"whole: {shape}, group {group}, {tokens} tokens")
            for threads in sorted({1, os.cpu_count() or 1}):
                entry = {"shape": shape, "group": group, **measure_whole(effort, profile, tokens, threads)}
                report["whole"].append(entry)
    say("scaling")
    small = profiles[SMALL, "layer"]
    lengths = (16, 256, 2048) if quick else (16, 64, 256, 1024, 4096, 16384)
    report["scaling"] = {
        "tokens": {
            "shape": SMALL,
            "group": "layer",
            "points": [measure_whole(effort, small, tokens, 1) for tokens in lengths],
        },
        "layers": {
            "shape": f"{SHAPES[SMALL][1]} x {SHAPES[SMALL][2]}",
            "group": "layer",
            "points": [
                {"layers": layers, **measure_whole(effort, cut_layers(small, layers), 256, 1)}
                for layers in ((1, 6) if quick else (1, 2, 4, 6))
            ],
        },
    }
    say("memory")
    tokens = 512 if quick else MEMORY_TOKENS
    report["memory"] = [
        {"shape": shape, "group": group, **measure_memory(profile, tokens)}
        for (shape, group), profile in profiles.items()
        if not quick or shape == LARGE
    ]
    report["seconds"] = time.perf_counter() - began
    return report


# What is measured on ---------------------------------------------------------------------------------------------


def make_layout(shape: str, layers: int | None = None) -> KVLayout:
    """The layout of a shape, bfloat16, without a limit of positions."""
    count, heads, size, theta = SHAPES[shape]
    rope = Rope(tuple(theta ** (-2 * i / size) for i in range(size // 2)))
    return KVLayout("llama", (LayerLayout(heads, size, size, rope),) * (layers or count), "bfloat16", None)


def make_chunk(layout: KVLayout, tokens: int, seed: int = 0) -> KVChunk:
    """A cache of correlated noise: all layers see the same few hidden directions, each unit has a falling spectrum."""
    noise = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 64, generator=noise) * torch.arange(1, 65).pow(-0.5)
    out: dict[str, list[torch.Tensor]] = {"keys": [], "values": []}
    for index, layer in enumerate(layout.layers):
        for kind, rope, size in (("keys", layer.rope, layer.head_dim), ("values", None, layer.value_dim)):
            fixed = torch.Generator().manual_seed(2 * index + (kind == "keys"))
            width = layer.kv_heads * size
            own = torch.randn(tokens, layer.kv_heads, size, generator=noise) * torch.arange(1, size + 1).pow(-0.8)
            mixed = own @ (torch.randn(layer.kv_heads, size, size, generator=fixed) / size**0.5)[0]
            shared = (hidden @ torch.randn(64, width, generator=fixed)).unflatten(1, (layer.kv_heads, size))
            x = mixed + 0.2 * shared + torch.randn(layer.kv_heads, size, generator=fixed)
            out[kind].append(rotate(x, rope, torch.arange(tokens)).to(layout.torch_dtype))
    return KVChunk(out["keys"], out["values"], layout)


def make_profile(layout: KVLayout, group: str) -> Profile:
    """`Profile.fit` on as many synthetic chunks as the group needs."""
    values = {"head": layout.layers[0].head_dim, "all": layout.values_per_token}
    largest = values.get(group, layout.values_per_token // layout.num_layers)
    count = max(8 * largest // FIT_CHUNK, 3) + 3
    return Profile.fit(layout, (make_chunk(layout, FIT_CHUNK, 1000 + seed) for seed in range(count)), group)


def cut_layers(profile: Profile, layers: int) -> Profile:
    """The first layers of a profile of group `layer`."""
    return Profile(
        replace(profile.layout, layers=profile.layout.layers[:layers]),
        profile.group,
        profile.source,
        profile.family,
        profile.learned[:layers],
        min_step=profile.min_step,
        curve=profile.curve,
    )


# Whole codec -----------------------------------------------------------------------------------------------------


def measure_whole(effort: Effort, profile: Profile, tokens: int, threads: int) -> dict[str, Any]:
    """Encode and decode of one chunk at the preset `balanced`."""
    codec = Codec(profile, "balanced", backend=BACKEND, threads=threads)
    chunk = make_chunk(profile.layout, tokens)
    # Sections are what the codec's threads share out; torch must not start a second set of threads below them.
    with torch_threads(1):
        blob = codec.encode(chunk)
        back = codec.decode(blob)
        error = _relative_error(chunk, back)
        if not error < 0.2 or codec.encode(chunk) != blob:
            raise CuveeError(f"a chunk of {tokens} tokens came back with a relative error of {error:.3g}")
        encode = effort.measure(lambda: codec.encode(chunk))
        decode = effort.measure(lambda: codec.decode(blob))
    return {
        "tokens": tokens,
        "threads": threads,
        "raw_bytes": chunk.nbytes,
        "bits_per_value": inspect(blob).bits_per_value,
        "encode_gb_per_s": encode.per_second(chunk.nbytes / 1e9),
        "decode_gb_per_s": decode.per_second(chunk.nbytes / 1e9),
    }


def _relative_error(chunk: KVChunk, back: KVChunk) -> float:
    """Root of squared error over squared values."""
    error = energy = 0.0
    for exact, other in zip(chunk.keys + chunk.values, back.keys + back.values, strict=True):
        error += float((exact.float() - other.float()).square().sum())
        energy += float(exact.float().square().sum())
    return math.sqrt(error / energy)


# Stages ----------------------------------------------------------------------------------------------------------


class _Stopwatch:
    """Adds up the time spent in wrapped functions, under names."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds[name] += time.perf_counter() - began

        return timed

    def backend(self, backend: Backend) -> Backend:
        """The backend with a watch on its stages."""
        return replace(
            backend,
            rans_encode=self.wrap("rans", backend.rans_encode),
            rans_decode=self.wrap("rans", backend.rans_decode),
            quantize=self.wrap("quantize and pack", backend.quantize),
            dequantize=self.wrap("quantize and pack", backend.dequantize),
            predict=self.wrap("quantize and pack", backend.predict),
            unpredict=self.wrap("quantize and pack", backend.unpredict),
            pack=self.wrap("quantize and pack", backend.pack),
            unpack=self.wrap("quantize and pack", backend.unpack),
            place=self.wrap("place", backend.place),
        )


def measure_stages(effort: Effort, profile: Profile, tokens: int) -> dict[str, Any]:
    """Seconds a stage for one chunk, all sections one after the other; `other` is what no stage accounts for."""
    step = Codec(profile, "balanced").step
    layout, chunk = profile.layout, make_chunk(profile.layout, tokens)
    watch = _Stopwatch()
    scheme = TransformScheme(profile, step, watch.backend(get_backend(BACKEND)))
    cpu, sections = torch.device("cpu"), range(len(profile.sections))
    unrotation = Rotation(layout, 0, tokens, cpu, inverse=True)
    rotation = Rotation(layout, 0, tokens, cpu)
    coded = [scheme.encode(chunk, i, unrotation) for i in sections]
    plans = [learned.plan(step) for learned in profile.learned]
    symbols = sum(plan.planes for _, plan in plans) * tokens

    def wrapped() -> bytes:
        return write_blob(
            scheme_id, layout.dtype, tokens, 0, step, layout.values_per_token, layout.fingerprint, profile.id,
            coded, None,
        )  # fmt: skip

    scheme_id = read_header(Codec(profile, step=2.0 ** (step / 64)).encode(chunk)).scheme
    blob = wrapped()

    def unwrapped() -> None:
        header = read_header(blob)
        for index in sections:
            read_section(blob, header, index)

    def analyzed() -> None:
        for section, learned, (ranks, _) in zip(profile.sections, profile.learned, plans, strict=True):
            for at in tiles(tokens, tile_tokens(section, layout)):
                learned.basis.analyze(gather(chunk, section, unrotation, at), 0, at, ranks)

    fast = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    maps, coefficients = [], []
    for learned, (ranks, _) in zip(profile.learned, plans, strict=True):
        pairs = zip(learned.basis.inverse, ranks, strict=True)
        maps.append(tuple(matrix[:, :rank].T.to(fast).contiguous() for matrix, rank in pairs))
        coefficients.append(torch.randn(sum(ranks), tokens).to(fast))

    def synthesized() -> None:
        for section, y, inverse in zip(profile.sections, coefficients, maps, strict=True):
            for at in tiles(tokens, tile_tokens(section, layout)):
                synthesize(y[:, at], inverse)

    def encoded() -> None:
        for index in sections:
            scheme.encode(chunk, index, unrotation)

    keys = [torch.empty_like(k) for k in chunk.keys]
    values = [torch.empty_like(v) for v in chunk.values]
    target = Target(layout, keys, values, slice(0, tokens), tokens, 0, 0)

    def decoded() -> None:
        for index in sections:
            scheme.decode(memoryview(coded[index]), index, target, rotation)

    def split(call: Callable[[], None], alone: Callable[[], None], container: Callable[[], object]) -> dict[str, Any]:
        call()
        runs: defaultdict[str, list[float]] = defaultdict(list)
        for _ in range(max(effort.least, min(effort.most, 20))):
            watch.seconds.clear()
            began = time.perf_counter()
            call()
            total = time.perf_counter() - began
            for name, seconds in watch.seconds.items():
                runs[name].append(seconds)
            runs["rest"].append(total - sum(watch.seconds.values()))
        timings = {name: _timing(seconds) for name, seconds in runs.items()}
        transform, blob_time = effort.measure(alone), effort.measure(container)
        rest = timings.pop("rest")
        medians = {name: timing.median for name, timing in timings.items()} | {
            "transform": transform.median,
            "container": blob_time.median,
            "other": max(rest.median - transform.median, 0.0),
        }
        return {
            "seconds": medians,
            "gb_per_s": {name: chunk.nbytes / s / 1e9 for name, s in medians.items() if s and name != "other"},
            "rans_msymbols_per_s": timings["rans"].per_second(symbols / 1e6),
        }

    return {
        "tokens": tokens,
        "raw_bytes": chunk.nbytes,
        "bits_per_value": inspect(blob).bits_per_value,
        "symbols": symbols,
        "encode": split(encoded, analyzed, wrapped),
        "decode": split(decoded, synthesized, unwrapped),
    }


# Entropy coders --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Symbols:
    """Bytes `[steps, tokens]` drawn from the tables of their steps."""

    data: U8
    which: U16
    tables: EntropyTables


def _draw(steps: int, tokens: int) -> _Symbols:
    """About 2.3 bits per symbol: components whose deviation falls from four steps to half of one."""
    plan = coding_plan(np.linspace(16, 4, steps).round().astype(np.int32))
    tables = default_family().tables
    rng = np.random.default_rng(0)
    slot = rng.integers(0, 1 << tables.prob_bits, (steps, tokens))
    data = (tables.slots[plan.rest[:, None], slot] >> 24).astype(np.uint8)
    return _Symbols(data, plan.rest, tables)


def _constriction() -> Any:
    """The package, which a machine that only measures its GPU does not need."""
    try:
        import constriction
    except ModuleNotFoundError as error:
        raise InputError(
            "bench: the CPU's entropy coder is measured beside constriction, which is not installed: "
            "pip install constriction"
        ) from error
    return constriction


def compare_coders(effort: Effort, tokens: int, steps: int = 96) -> dict[str, Any]:
    """Our rANS beside constriction's AnsCoder and a torch decoder: one core, the same symbols and quantized model."""
    constriction = _constriction()
    symbols = _draw(steps, tokens)
    data, which, tables = symbols.data, symbols.which, symbols.tables
    backend = get_backend(BACKEND)
    entropy = float(tables.entropy[which].sum())
    n = tokens_per_stream(steps, entropy)
    streams = backend.rans_encode(data, which, which, tables, n)
    # constriction gets its symbols table by table, in few large calls: one call per step would measure Python.
    models = [constriction.stream.model.Categorical(f / 2.0**tables.prob_bits, perfect=False) for f in tables.freq]
    used = sorted(set(which.tolist()))
    bunches = {table: data[which == table].ravel().astype(np.int32) for table in used}

    def theirs_encode() -> Any:
        coder = constriction.stream.stack.AnsCoder()
        for table in reversed(used):
            coder.encode_reverse(bunches[table], models[table])
        return coder.get_compressed()

    compressed = theirs_encode()

    def theirs_decode() -> list[Any]:
        coder = constriction.stream.stack.AnsCoder(compressed)
        return [coder.decode(models[table], len(bunches[table])) for table in used]

    lanes = torch_decoder(streams, which, tables, n, tokens)
    with torch_threads(1):
        right = (
            np.array_equal(backend.rans_decode(streams, which, which, tables, n, tokens), data)
            and all(np.array_equal(a, b) for a, b in zip(theirs_decode(), bunches.values(), strict=True))
            and np.array_equal(lanes().numpy(), data)
        )
        if not right:
            raise CuveeError("an entropy coder did not give back what it got")
        million = data.size / 1e6
        timings = {
            "encode": effort.measure(lambda: backend.rans_encode(data, which, which, tables, n)),
            "decode": effort.measure(lambda: backend.rans_decode(streams, which, which, tables, n, tokens)),
            "constriction_encode": effort.measure(theirs_encode),
            "constriction_decode": effort.measure(theirs_decode),
            "torch_decode": effort.measure(lanes),
        }
    ideal = float(tables.bits[which[:, None], data].sum())
    ours_bits = 8.0 * (streams.words.nbytes + streams.states.nbytes + 2 * len(streams.lengths))
    return {
        "symbols": data.size,
        "streams": len(streams.states),
        "bits_per_symbol": {
            "ideal": ideal / data.size,
            "rans": ours_bits / data.size,
            "constriction": 8.0 * compressed.nbytes / data.size,
        },
        "msymbols_per_s": {name: timing.per_second(million) for name, timing in timings.items()},
        "ratios": {
            "encode_over_constriction": timings["constriction_encode"].median / timings["encode"].median,
            "decode_over_constriction": timings["constriction_decode"].median / timings["decode"].median,
            "decode_over_torch": timings["torch_decode"].median / timings["decode"].median,
        },
    }


def torch_decoder(
    streams: Streams, which: U16, tables: EntropyTables, n: int, tokens: int
) -> Callable[[], torch.Tensor]:
    """A decoder that steps all streams at once with tensor operations, a lane a stream: no compiler needed.

    Returns:
        a function that decodes `[steps, tokens]` uint8.

    Raises:
        InputError: `tokens` is no multiple of `n` (all lanes must be alike here).
    """
    if tokens % n:
        raise InputError(f"tokens: {tokens} is no multiple of {n}")
    slots = torch.from_numpy(tables.slots.astype(np.int64))
    words = torch.from_numpy(np.append(streams.words, np.uint16(0)).astype(np.int64))
    ends = torch.from_numpy(np.cumsum(streams.lengths, dtype=np.int64))
    starts = ends - torch.from_numpy(streams.lengths.astype(np.int64))
    states = torch.from_numpy(streams.states.astype(np.int64))
    mask, order = (1 << tables.prob_bits) - 1, which.tolist()

    def decode() -> torch.Tensor:
        x, at = states.clone(), starts.clone()
        out = torch.empty(len(order), len(states), n, dtype=torch.uint8)
        for j in range(n):
            for step, table in enumerate(order):
                slot = slots[table][x & mask]
                out[step, :, j] = (slot >> 24).to(torch.uint8)
                x = ((slot >> 12) & 0xFFF) * (x >> tables.prob_bits) + (slot & 0xFFF)
                need = x < 1 << 16
                x = torch.where(need, x << 16 | words[at], x)
                at += need
        return out.flatten(1)

    return decode


# Memory ----------------------------------------------------------------------------------------------------------


def measure_memory(profile: Profile, tokens: int) -> dict[str, Any]:
    """Peak memory of one encode and one decode in fresh processes, over the raw chunk. None where /proc is missing.

    What the operation returns (the blob, the decoded chunk) is part of the peak; the chunk it is given is not.
    """
    peaks: dict[str, Any] = {"tokens": tokens, "raw_bytes": tokens * profile.layout.bytes_per_token}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile"
        profile.save(path)
        for what in ("encode", "decode"):
            command = [sys.executable, "-m", "cuvee.eval.bench.cpu", what, str(path), str(tokens)]
            # A fixed threshold makes glibc hand back every large buffer at once, so that none is reused unseen.
            environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            if done.returncode:
                raise CuveeError(f"measuring memory failed: {done.stderr.strip().splitlines()[-1:]}")
            extra = json.loads(done.stdout)
            peaks[f"{what}_over_raw"] = None if extra is None else extra / peaks["raw_bytes"]
    return peaks


def _memory_child(what: str, path: str, tokens: int) -> int | None:
    """Bytes by which the peak rises above what the process held before the call."""
    torch.set_num_threads(1)
    codec = Codec(Profile.load(path), "balanced", backend=BACKEND, threads=1)
    layout = codec.profile.layout
    codec.decode(codec.encode(make_chunk(layout, 128)))  # compiles
    chunk = make_chunk(layout, tokens)
    blob = codec.encode(chunk) if what == "decode" else b""
    held = _reset_peak()
    if held is None:
        return None
    result = codec.encode(chunk) if what == "encode" else codec.decode(blob)
    peak = _status("VmHWM")
    del result
    return None if peak is None else max(peak - held, 0)


def _reset_peak() -> int | None:
    """Forget the peak of this process; returns the bytes it holds now."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _status("VmRSS")


def _status(field: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    return None


# The report --------------------------------------------------------------------------------------


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print a report as tables."""
    machine = report["hardware"]
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores; Python {machine['python']}, torch {machine['torch']}, "
        f"numba {machine['numba']}; commit {machine['commit']}, {machine['date']}",
        style="dim",
        highlight=False,
    )
    coders = report["coders"]
    speed = {name: value["median"] for name, value in coders["msymbols_per_s"].items()}
    table = _table("Entropy coder, one core, M symbols/s", "coder", "encode", "decode", "bits/symbol")
    bits = coders["bits_per_symbol"]
    table.add_row("cuvee", f"{speed['encode']:.0f}", f"{speed['decode']:.0f}", f"{bits['rans']:.3f}")
    theirs = (speed["constriction_encode"], speed["constriction_decode"])
    table.add_row("constriction AnsCoder", *(f"{s:.0f}" for s in theirs), f"{bits['constriction']:.3f}")
    table.add_row("vectorized torch", "", f"{speed['torch_decode']:.0f}", "")
    console.print(table)
    ratios = coders["ratios"]
    console.print(
        f"cuvee / constriction: encode {ratios['encode_over_constriction']:.1f}x, "
        f"decode {ratios['decode_over_constriction']:.1f}x; cuvee / torch: decode {ratios['decode_over_torch']:.1f}x",
        highlight=False,
    )
    for entry in report["stages"]:
        names = ["transform", "quantize and pack", "rans", "place", "container", "other"]
        title = f"Stages, one core: {entry['shape']}, group {entry['group']}, {entry['tokens']} tokens, µs"
        table = _table(title, "", *names)
        for what in ("encode", "decode"):
            seconds = entry[what]["seconds"]
            table.add_row(what, *(f"{1e6 * seconds[name]:,.0f}" if name in seconds else "" for name in names))
        console.print(table)
    table = _table(
        "Whole codec, GB/s of bfloat16", "cache", "group", "tokens", "threads", "bits/value", "encode", "decode"
    )
    for entry in report["whole"]:
        table.add_row(entry["shape"], entry["group"], *_whole_row(entry))
    for name in ("tokens", "layers"):
        scaling = report["scaling"][name]
        table.add_section()
        for entry in scaling["points"]:
            shape = f"{entry['layers']} layers of {scaling['shape']}" if "layers" in entry else scaling["shape"]
            table.add_row(shape, scaling["group"], *_whole_row(entry))
    console.print(table)
    table = _table("Peak memory over the raw chunk", "cache", "group", "tokens", "encode", "decode")
    for entry in report["memory"]:
        peaks = (entry["encode_over_raw"], entry["decode_over_raw"])
        shown = ("unknown" if peak is None else f"{peak:.2f}" for peak in peaks)
        table.add_row(entry["shape"], entry["group"], str(entry["tokens"]), *shown)
    console.print(table)


def _whole_row(entry: dict[str, Any]) -> tuple[str, ...]:
    speeds = (f"{entry[name]['median']:.3f}" for name in ("encode_gb_per_s", "decode_gb_per_s"))
    return (str(entry["tokens"]), str(entry["threads"]), f"{entry['bits_per_value']:.2f}", *speeds)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    return table


if __name__ == "__main__":
    print(json.dumps(_memory_child(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
