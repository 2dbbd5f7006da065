"""Speed on a GPU: bytes to a paged bfloat16 cache and back, every stage, and what the machine could do at best.

    ceilings    device copy, bfloat16 matrix product, copy from pinned memory, in the same run
    codec       per model shape, group and number of chunks: encode and decode as a caller sees them (from an idle
                device, checksums, copies and the final check included), the stages inside by events of the device,
                and what those would take if the bytes they move and their products were all
    restore     decode against copying the uncompressed cache from pinned memory
    incumbent   a CacheGen-style decoder (`cachegen.py`) on the same chunks
    synthesis   the inverse transform in every configuration there is to choose from
    rans        the entropy decoder alone, at several table resolutions
    compile     what Triton compiled, and how long that took

Nothing is timed before it is proved right: a small cache goes through GPU and CPU, both ways, every full-size cache
is compared with what it was made of, and so is what timed runs left behind. Profiles and caches are synthetic (no model
is needed): random orthogonal bases, a falling spectrum that costs about BITS a value, logistic noise. Times are
medians, with the 20th and 80th percentile; where a working set would fit the L2 cache, several take turns.
1 GB = 10**9 bytes.
"""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
import triton
from rich import box
from rich.console import Console
from rich.table import Table
from triton.runtime.errors import OutOfResources, PTXASError

from cuvee.codec import rans, rans_numba, symbols
from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.coefficients import tokens_per_stream
from cuvee.codec.container import Reader, read_header, read_section, read_streams, write_streams
from cuvee.codec.errors import CuveeError, InputError
from cuvee.codec.family import OCTAVE, coding_plan, default_family, scale_codes
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.paged import PagedCache
from cuvee.codec.profile import Profile, SectionProfile
from cuvee.codec.rope import rotate
from cuvee.codec.symbols import I16, I32, Prediction
from cuvee.codec.tables import EntropyTables, normalize_counts
from cuvee.codec.transform import SectionBasis, partition
from cuvee.eval.baselines import cachegen
from cuvee.eval.bench.cpu import Effort, Timing
from cuvee.eval.bench.machine import hardware
from cuvee.kernels.batch import Memory, join, outgoing, place_jobs, trace_stages
from cuvee.kernels.jobs import Job, Plan, Tile
from cuvee.kernels.pages import contiguity
from cuvee.kernels.plans import TransformPlan
from cuvee.kernels.rans import rans_decode
from cuvee.kernels.transform import (
    SYNTHESIS_CONFIGS,
    SynthesisConfig,
    synthesis_config,
    synthesize,
    synthesize_reference,
)

__all__ = ["FULL", "QUICK", "Case", "Scope", "print_gpu_report", "run_gpu_bench"]

BITS = 1.4  # a value, aimed at
RANK = 0.68  # of a block's values are coded at that rate; measured on Llama-3.1-8B, group `layer`
SINKS = 4
DISTINCT = 4  # different chunks; more of them are copies
L2_TIMES = 3  # the sets that take turns are so many times as large as the L2 cache
SYNTHESIS = "synthesize"  # the stage whose arithmetic is counted
LIMIT = 0.2  # relative error of a unit above which its cache was not restored; quantization costs about 0.07
CLOCK_RATE = 2e9  # cycles a second, about
HEAD_START = 0.05  # seconds at most that a device sleeps until launches are queued
TF32X3 = 6  # products of bfloat16 that one costs as three of TF32, each at half the rate
ROUNDING = 2.0**-7  # relative difference of two decoders that round operands and results to bfloat16


@dataclass(frozen=True, slots=True)
class Shape:
    """The cache of a model: layers, KV heads, head size, RoPE theta."""

    layers: int
    heads: int
    size: int
    theta: float

    def layout(self, layers: int | None = None) -> KVLayout:
        """Its layout, bfloat16, without a limit of positions."""
        rope = Rope(tuple(self.theta ** (-2 * i / self.size) for i in range(self.size // 2)))
        layer = LayerLayout(self.heads, self.size, self.size, rope)
        return KVLayout("llama", (layer,) * (layers or self.layers), "bfloat16", None)


@dataclass(frozen=True, slots=True)
class Scope:
    """What a run measures, and how long it may take.

    Attributes:
        shapes: models by name.
        groups: of the profiles.
        chunks: how many chunks go through one call.
        tokens: of a chunk.
        block_tokens: of a block of the paged cache.
        proof_tokens: of the chunk that goes through GPU and CPU.
        effort: how long a figure may take.
        copy_bytes: of the device copy.
        matrix: rows and columns of the matrix product.
        prob_bits: resolutions of the entropy decoder alone.
        rans_jobs: sections that it decodes at once.
        synthesis_groups: of the first shape, for the configurations of the inverse transform.
        synthesis_chunks: how many chunks those are measured on.
        limit: seconds after which no further case is begun; what is left out is named in the report.
    """

    shapes: Mapping[str, Shape]
    groups: tuple[str, ...]
    chunks: tuple[int, ...]
    tokens: int = 256
    block_tokens: int = 16
    proof_tokens: int = 101
    effort: Effort = field(default=Effort(0.2, 5, 50))
    copy_bytes: int = 2 << 30
    matrix: int = 8192
    prob_bits: tuple[int, ...] = (10, 11, 12)
    rans_jobs: int = 1024
    synthesis_groups: tuple[str, ...] = ("head", "layer")
    synthesis_chunks: tuple[int, ...] = (1, 16)
    limit: float = 420.0


SHAPES = {
    "Llama-3.1-8B": Shape(32, 8, 128, 5e5),
    "Qwen3-0.6B": Shape(28, 8, 128, 1e6),
    "Llama-3.1-70B/TP4": Shape(80, 2, 128, 5e5),
}
FULL = Scope(SHAPES, ("head", "unit", "layer", "layers:2"), (1, 4, 16, 64))
QUICK = Scope(
    {"Llama-3.1-8B": SHAPES["Llama-3.1-8B"]}, ("head", "layer"), (1, 16), effort=Effort(0.05, 3, 20), rans_jobs=256
)


# Clocks ----------------------------------------------------------------------------------------------------------


class Clock:
    """Times calls that leave their work to a device; on the CPU all clocks are the host's.

    Every method takes calls that take turns, so that they do not find each other's data in the cache.
    """

    def __init__(self, device: torch.device, effort: Effort) -> None:
        self.device, self._effort = device, effort
        self._gpu = device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self._gpu:
            torch.cuda.synchronize(self.device)

    def once(self, call: Callable[[], object]) -> float:
        """Seconds of one call, from an idle device to an idle device."""
        self.synchronize()
        began = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - began

    def whole(self, calls: Sequence[Callable[[], object]]) -> Timing:
        """Seconds a call, from an idle device to an idle device, the host's work included."""
        calls[0]()
        taken: list[float] = []
        for call in cycle(calls):
            if len(taken) >= self._effort.least and (
                sum(taken) >= self._effort.seconds or len(taken) >= self._effort.most
            ):
                break
            taken.append(self.once(call))
        return quantiles(taken)

    def inside(self, calls: Sequence[Callable[[], object]]) -> Timing:
        """Seconds a call on the device, by its events: for calls whose launches run ahead of it."""
        if not self._gpu:
            return self.whole(calls)
        runs = self._runs(calls[0])
        # The device sleeps until launches are queued, or short calls would be charged for the host's work.
        torch.cuda._sleep(int(CLOCK_RATE * min(runs * self.once(calls[0]), HEAD_START)))
        events = []
        for _, call in zip(range(runs), cycle(calls), strict=False):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            events.append((begin, end))
        self.synchronize()
        return quantiles([begin.elapsed_time(end) / 1e3 for begin, end in events])

    def stages(self, calls: Sequence[Callable[[], object]]) -> dict[str, Timing]:
        """Seconds a call on the device in each of the backend's stages; empty on the CPU, which has no events.

        Encoding waits for the device halfway: its last stages include what the host takes to launch them.
        """
        if not self._gpu:
            return {}
        runs = self._runs(calls[0])
        # As in `inside`: a stage is not to be charged for the host's work before it.
        cycles = int(CLOCK_RATE * max(self.once(call) for call in calls[:2]))
        traces = []
        for _, call in zip(range(runs), cycle(calls), strict=False):
            torch.cuda._sleep(cycles)
            with trace_stages() as trace:
                call()
            self.synchronize()
            traces.append(trace)
        return sum_stages([[(s.name, s.begin.elapsed_time(s.end) / 1e3) for s in trace] for trace in traces])

    def _runs(self, call: Callable[[], object]) -> int:
        call()
        each = max(self.once(call), 1e-6)
        return min(max(int(self._effort.seconds / each), self._effort.least), self._effort.most)


def quantiles(taken: Sequence[float]) -> Timing:
    """Median and 20th and 80th percentile."""
    p20, median, p80 = np.quantile(taken, [0.2, 0.5, 0.8]).tolist()
    return Timing(median, p20, p80, len(taken))


def sum_stages(runs: Sequence[Sequence[tuple[str, float]]]) -> dict[str, Timing]:
    """Timings by name of runs of (name, seconds); a stage that came up several times in a run is added up."""
    names = list(dict.fromkeys(name for run in runs for name, _ in run))
    return {name: quantiles([sum(s for other, s in run if other == name) for run in runs]) for name in names}


def turns(working_set: int, l2: int, most: int) -> int:
    """How many sets of so many bytes must take turns to exceed an L2 cache; `most` there are."""
    return max(min(-(-L2_TIMES * l2 // max(working_set, 1)), most), 1)


# What is measured on ---------------------------------------------------------------------------------------------


def spectrum(size: int) -> I16:
    """Falling scales of the coded components of a block of `size` values, in 1/64 octaves above step 1.

    They fall quadratically (in octaves) to the last scale that is coded, from as high as BITS a value ask for.
    """
    rank = math.ceil(RANK * size)
    fall = (1 - (np.arange(rank) + 0.5) / rank) ** 2
    entropy = default_family().tables.entropy

    def scales(height: float) -> I16:
        made: I16 = np.rint(OCTAVE * ((height + 2) * fall - 2)).astype(np.int16)
        return made

    low, high = 0.0, 10.0
    for _ in range(30):
        middle = (low + high) / 2
        bits = float(entropy[coding_plan(scale_codes(scales(middle), 0)).rest].sum()) / size
        low, high = (middle, high) if bits < BITS else (low, middle)
    return scales(low)


def make_profile(layout: KVLayout, group: str, device: torch.device) -> Profile:
    """A profile at whose step 1 the caches of `make_chunks` cost about BITS a value. Blocks of a size share a basis."""
    sections = partition(layout, group)
    noise = torch.Generator().manual_seed(0)
    maps: dict[int, tuple[torch.Tensor, torch.Tensor, I16]] = {}
    for size in sorted({size for section in sections for size in section.blocks}):
        basis, _ = torch.linalg.qr(torch.randn(size, size, generator=noise).to(device))
        scale = spectrum(size)
        kept = basis[:, : len(scale)].cpu()
        maps[size] = (kept.T.contiguous(), kept.contiguous(), scale)
    learned = []
    for section in sections:
        mean = torch.randn(section.values, generator=noise)
        sinks = mean + torch.randn(SINKS, section.values, generator=noise)
        forward, inverse, scales = zip(*(maps[size] for size in section.blocks), strict=True)
        scale = np.concatenate(scales)
        basis_maps = SectionBasis(mean, sinks, forward, inverse)
        learned.append(SectionProfile(basis_maps, scale, Prediction.NONE, scale, np.zeros(len(scale), np.int16)))
    return Profile(layout, group, "fitted", default_family(), tuple(learned), min_step=0)


def make_chunks(profile: Profile, count: int, tokens: int, device: torch.device, seed: int = 0) -> list[KVChunk]:
    """Chunks that follow each other, drawn from what the profile says of its components."""
    layout = profile.layout
    noise = torch.Generator(device).manual_seed(seed)
    moved: dict[int, torch.Tensor] = {}
    chunks = []
    for index in range(count):
        start = index * tokens
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        positions = torch.arange(start, start + tokens, device=device)
        for section, learned in zip(profile.sections, profile.learned, strict=True):
            deviation = torch.from_numpy(2.0 ** (learned.scale / OCTAVE)).float().to(device)
            uniform = torch.rand(len(deviation), tokens, generator=noise, device=device).clamp(1e-6, 1 - 1e-6)
            y = uniform.logit() * (3**0.5 / math.pi * deviation)[:, None]
            parts, row = [], 0
            for matrix in learned.basis.inverse:
                if id(matrix) not in moved:
                    moved[id(matrix)] = matrix.to(device)
                parts.append((moved[id(matrix)] @ y[row : row + matrix.shape[1]]).T)
                row += matrix.shape[1]
            x = torch.cat(parts, 1) + learned.basis.means(start, slice(0, tokens)).to(device)
            units = x.split([n for layer in section.layers(layout) for n in (layer.key_values, layer.value_values)], 1)
            for layer, key, value in zip(section.layers(layout), units[::2], units[1::2], strict=True):
                turned = rotate(key.unflatten(1, (layer.kv_heads, layer.head_dim)), layer.rope, positions)
                keys.append(turned.to(layout.torch_dtype))
                values.append(value.unflatten(1, (layer.kv_heads, layer.value_dim)).to(layout.torch_dtype))
        chunks.append(KVChunk(keys, values, layout, start))
    return chunks


class Pages:
    """A paged cache with room for some chunks, whose blocks lie in random order.

    Attributes:
        rows: `[2 * layers, slots, heads * size]`: unit 2 * l is K, 2 * l + 1 is V of layer l.
        slots: of each region of one chunk, int64 `[tokens]`.
        cache: the same memory as the codec sees it.
    """

    def __init__(self, layout: KVLayout, regions: int, tokens: int, block_tokens: int, device: torch.device) -> None:
        layer = layout.layers[0]
        each = -(-tokens // block_tokens)
        shape = (2 * layout.num_layers, regions * each, block_tokens, layer.kv_heads, layer.head_dim)
        data = torch.empty(shape, dtype=layout.torch_dtype, device=device)
        self.rows = data.view(shape[0], regions * each * block_tokens, layer.key_values)
        order = torch.randperm(regions * each, generator=torch.Generator().manual_seed(0)).view(regions, each, 1)
        slots = (order * block_tokens + torch.arange(block_tokens)).view(regions, -1)[:, :tokens]
        self.slots = list(slots.to(device).contiguous())
        self.cache = PagedCache(layout, list(data[0::2]), list(data[1::2]))

    def fill(self, chunks: Sequence[KVChunk]) -> None:
        """Write the chunks to the regions, again and again."""
        stacks = [stack(chunk) for chunk in chunks]
        for region, at in enumerate(self.slots):
            self.rows[:, at] = stacks[region % len(stacks)]

    def poison(self) -> None:
        """Forget everything: what a decoder does not write is NaN afterwards."""
        self.rows.fill_(float("nan"))

    def check(self, chunks: Sequence[KVChunk], regions: range) -> float:
        """The largest relative error of the regions, restored from `chunks`.

        Raises:
            CuveeError: a region does not hold what it should.
        """
        stacks = [stack(chunk).float() for chunk in chunks]
        errors = []
        for region in regions:
            want = stacks[region % len(stacks)]
            # Unit by unit: a layer that was never written does not hide behind the others.
            difference = self.rows[:, self.slots[region]].float() - want
            errors.append((difference.norm(dim=(1, 2)) / want.norm(dim=(1, 2))).max())
        worst = float(torch.stack(errors).max())
        if not worst < LIMIT:
            raise CuveeError(f"a cache came back with a relative error of {worst:.3g}: nothing is reported")
        return worst


def stack(chunk: KVChunk) -> torch.Tensor:
    """`[2 * layers, T, heads * size]`, K and V of a layer in turn."""
    pairs = zip(chunk.keys, chunk.values, strict=True)
    return torch.stack([tensor.flatten(1) for pair in pairs for tensor in pair])


# Proofs ----------------------------------------------------------------------------------------------------------


def prove_codec(shape: Shape, group: str, scope: Scope, device: torch.device) -> dict[str, Any]:
    """Two layers through the GPU and through the CPU: equal bytes after the integers, values within rounding.

    Raises:
        CuveeError: they disagree.
    """
    layout = shape.layout(min(shape.layers, 2))
    profile = make_profile(layout, group, device)
    (chunk,) = make_chunks(profile, 1, scope.proof_tokens, torch.device("cpu"), seed=9)
    ours, reference = Codec(profile, step=1.0, backend="triton"), Codec(profile, step=1.0, backend="numba")
    pages = Pages(layout, 2, chunk.tokens, scope.block_tokens, device)
    pages.poison()
    at = pages.slots[1]
    pages.rows[:, at] = stack(chunk).to(device)
    (blob,) = ours.encode_paged(pages.cache, [at], [chunk.start])
    theirs = reference.encode(chunk)
    levels = [recode(coded, profile) for coded in (blob, theirs)]
    # The coefficients are float32 sums in another order: now and then one falls on the other side of a threshold.
    distances = [np.abs(a - b) for a, b in zip(*levels, strict=True)]
    moved = float(np.mean(np.concatenate([d.ravel() for d in distances]) > 0))
    if max(int(d.max(initial=0)) for d in distances) > 1 or moved > 0.02:
        raise CuveeError(f"{shape}, group {group}: GPU and CPU quantize {moved:.1%} of the levels differently")
    worst = 0.0
    for coded in (blob, theirs):
        want = stack(reference.decode(coded))
        pages.poison()
        ours.decode_paged([coded], pages.cache, [at], [chunk.start]).check()
        got = pages.rows[:, at].cpu()
        rest = torch.ones(pages.rows.shape[1], dtype=torch.bool)
        rest[at.cpu()] = False
        if not bool(pages.rows[:, rest.to(device)].isnan().all()):
            raise CuveeError(f"{shape}, group {group}: the decoder wrote to slots that are not the chunk's")
        worst = max(worst, difference(got, want, f"{shape}, group {group}, GPU and CPU"))
    return {"tokens": chunk.tokens, "levels_moved": moved, "difference": worst}


def difference(got: torch.Tensor, want: torch.Tensor, what: str) -> float:
    """Relative difference of two caches `[units, T, C]`, the worst unit.

    Raises:
        CuveeError: it is more than rounding.
    """
    got, want = got.float(), want.float()
    apart = (got - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2))
    most = (got - want).abs().amax((1, 2)) / want.abs().amax((1, 2))
    if not bool((apart <= ROUNDING).all() and (most <= 4 * ROUNDING).all()):
        raise CuveeError(f"{what}: values lie {float(apart.max()):.3g} apart (relative)")
    return float(apart.max())


def recode(blob: bytes, profile: Profile) -> list[I32]:
    """The levels `[R, T]` of each section, after coding them anew on the CPU gave the very bytes.

    Raises:
        CuveeError: it did not.
    """
    header = read_header(blob)
    family, out = profile.family, []
    for index, learned in enumerate(profile.learned):
        _, plan = learned.plan(header.step)
        data = read_section(blob, header, index)
        reader = Reader(data)
        streams, escapes, n = read_streams(reader, plan.planes, len(plan.shift), header.tokens)
        reader.finish()
        planes = rans.rans_decode(streams, plan.first, plan.rest, family.tables, n, header.tokens)
        levels = symbols.unpredict(symbols.unpack(planes, escapes, plan), plan, n)
        packed, listed = symbols.pack(symbols.predict(levels, plan, n), plan, family.tables, n)
        again = rans.rans_encode(packed, plan.first, plan.rest, family.tables, n)
        if write_streams(again, listed, plan.planes, n) != data:
            raise CuveeError(f"section {index}: coding its levels again on the CPU gives other bytes")
        out.append(levels)
    return out


# Measurements ----------------------------------------------------------------------------------------------------


def measure_ceilings(clock: Clock, scope: Scope) -> dict[str, Any]:
    """What the device does at best: a copy (bytes read and written), a bfloat16 product on random data."""
    device = clock.device
    source = torch.randint(256, (scope.copy_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = clock.inside([partial(target.copy_, source)])
    del source, target
    a, b = (torch.randn(scope.matrix, scope.matrix, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    product = clock.inside([partial(torch.mm, a, b, out=out)])
    return {
        "copy_bytes": scope.copy_bytes,
        "copy_gb_per_s": copy.per_second(2 * scope.copy_bytes / 1e9),
        "matrix": scope.matrix,
        "matrix_tflop_per_s": product.per_second(2 * scope.matrix**3 / 1e12),
    }


class Link:
    """The copy from pinned host memory to the device."""

    def __init__(self, clock: Clock, size: int) -> None:
        self._clock = clock
        pinned = clock.device.type == "cuda"
        self._device = torch.randint(256, (size,), dtype=torch.uint8, device=clock.device)
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self._host.copy_(self._device)

    def measure(self, size: int) -> Timing:
        """Seconds for so many bytes."""
        source, target = self._host[:size], self._device[:size]
        return self._clock.inside([partial(target.copy_, source, non_blocking=True)])


@dataclass(frozen=True, slots=True)
class Case:
    """A shape and a group, ready to be measured."""

    shape: str
    group: str
    profile: Profile
    codec: Codec
    chunks: list[KVChunk]


def make_case(name: str, group: str, scope: Scope, device: torch.device) -> Case:
    """Profile, codec and chunks."""
    profile = make_profile(scope.shapes[name].layout(), group, device)
    chunks = make_chunks(profile, min(DISTINCT, max(scope.chunks)), scope.tokens, device)
    return Case(name, group, profile, Codec(profile, step=1.0, backend="triton"), chunks)


def synthesis_flop(profile: Profile, tokens: int) -> int:
    """Floating-point operations of the inverse transform at step 1."""
    flop = 0
    for section, learned in zip(profile.sections, profile.learned, strict=True):
        ranks, _ = learned.plan(0)
        flop += sum(2 * rank * size for rank, size in zip(ranks, section.blocks, strict=True))
    return flop * tokens


@dataclass(frozen=True, slots=True)
class Work:
    """What a stage cannot do without: bytes of device memory, read or written, and floating-point operations."""

    bytes: float
    flop: float = 0.0


def stage_work(profile: Profile, tokens: int, compressed: int) -> dict[str, dict[str, Work]]:
    """The work of the stages of `decode` and `encode` at step 1, each array read and written once.

    Args:
        profile: of group and shape.
        tokens: of all chunks.
        compressed: bytes of their blobs.
    """
    layout, plans = profile.layout, [learned.plan(0)[1] for learned in profile.learned]
    planes = tokens * sum(plan.planes for plan in plans)
    components = tokens * sum(len(plan.shift) for plan in plans)
    values = tokens * layout.values_per_token
    flop = float(synthesis_flop(profile, tokens))
    basis = flop / (2 * tokens)
    tables = Work(8 * tokens * layout.layers[0].head_dim / 2)
    return {
        "decode": {
            "rotation tables": tables,
            "rans": Work(compressed + planes),
            "dequantize": Work(planes + 2 * components),
            SYNTHESIS: Work(2 * components + 2 * basis + 2 * values, flop),
        },
        "encode": {
            "rotation tables": tables,
            "gather": Work(2 * values + 4 * values),
            "analyze": Work(4 * values + 4 * basis + 4 * components, TF32X3 * flop),
            "quantize": Work(4 * components + planes),
            "rans": Work(planes + compressed),
            "write": Work(2 * compressed),
        },
    }


def limits(
    work: Mapping[str, Work], stages: Mapping[str, Timing], ceilings: Mapping[str, Any]
) -> dict[str, dict[str, float | None]]:
    """The least time of every stage, by the ceilings of this device, and its share of the time measured.

    A share above 1 means that data stayed in the L2 cache, from one stage to the next.
    """
    out: dict[str, dict[str, float | None]] = {}
    for name, needed in work.items():
        moved = needed.bytes / (1e9 * ceilings["copy_gb_per_s"]["median"])
        least = max(moved, needed.flop / (1e12 * ceilings["matrix_tflop_per_s"]["median"]))
        share = least / stages[name].median if name in stages else None
        out[name] = {"bytes": needed.bytes, "flop": needed.flop, "seconds": least, "share": share}
    return out


def measure_case(
    clock: Clock,
    case: Case,
    scope: Scope,
    pages: Pages,
    link: Link,
    raw: Mapping[int, Timing],
    incumbent: Mapping[int, float],
    ceilings: Mapping[str, Any],
    l2: int,
) -> dict[str, Any]:
    """Encode and decode at every number of chunks.

    Args:
        clock: for this device.
        case: what to code.
        scope: of the run.
        pages: with room for the largest number of chunks.
        link: for the copy of the compressed bytes.
        raw: copy of the uncompressed cache, by number of chunks.
        incumbent: seconds of the incumbent's decoder on the device, by number of chunks.
        ceilings: from `measure_ceilings`.
        l2: bytes of the L2 cache.

    Raises:
        CuveeError: a cache did not come back, or one batch is encoded otherwise than another.
    """
    began = time.perf_counter()
    codec, chunks, regions = case.codec, case.chunks, len(pages.slots)
    starts = [chunks[region % len(chunks)].start for region in range(regions)]

    def encode(at: slice) -> list[bytes]:
        return codec.encode_paged(pages.cache, pages.slots[at], starts[at])

    distinct: list[bytes] = []
    pages.fill(chunks)
    first = {"encode": clock.once(lambda: distinct.extend(encode(slice(0, len(chunks)))))}
    # Copies with bytes of their own, as chunks from a store would have.
    blobs = [bytes(bytearray(distinct[region % len(distinct)])) for region in range(regions)]

    def decode(at: slice) -> None:
        codec.decode_paged(blobs[at], pages.cache, pages.slots[at], starts[at]).check()

    pages.poison()
    first["decode"] = clock.once(lambda: decode(slice(0, regions)))
    error = pages.check(chunks, range(regions))
    each = chunks[0].nbytes
    runs: list[dict[str, Any]] = []
    for count in scope.chunks:
        sets = turns(count * each, l2, regions // count)
        parts = [slice(index * count, (index + 1) * count) for index in range(sets)]
        compressed = sum(map(len, blobs[:count]))
        pages.fill(chunks)  # what was decoded before is quantized, and easier to code
        if encode(parts[-1]) != blobs[parts[-1]]:
            raise CuveeError(f"{case.shape}, group {case.group}: {count} chunks at once become other bytes")
        encodes = [partial(encode, part) for part in parts]
        decodes = [partial(decode, part) for part in parts]
        work = stage_work(case.profile, scope.tokens * count, compressed)
        whole, stages = clock.whole(encodes), clock.stages(encodes)
        encoding = rates(whole, stages, count * each, compressed)
        encoding["stage_limits"] = limits(work["encode"], stages, ceilings)
        pages.poison()  # what the timed runs leave behind is checked
        whole, stages = clock.whole(decodes), clock.stages(decodes)
        decoding = rates(whole, stages, count * each, compressed)
        decoding["stage_limits"] = limits(work["decode"], stages, ceilings)
        pages.check(chunks, range(sets * count))
        synthesis, flop = stages.get(SYNTHESIS), work["decode"][SYNTHESIS].flop
        matrix = 1e12 * ceilings["matrix_tflop_per_s"]["median"]
        device = decoding["device_seconds"]
        runs.append(
            {
                "chunks": count,
                "sets": sets,
                "raw_bytes": count * each,
                "compressed_bytes": compressed,
                "bits_per_value": 16 * compressed / (count * each),
                "encode": encoding,
                "decode": decoding,
                "verify_seconds": asdict(clock.whole([partial(verify, blobs[:count])])),
                "restore": {
                    "raw_copy_seconds": asdict(raw[count]),
                    "compressed_copy_seconds": asdict(link.measure(compressed)),
                    "decode_seconds": asdict(whole),
                    "speedup": raw[count].median / whole.median,
                },
                "incumbent": {
                    "speedup": incumbent[count] / whole.median,
                    "device_speedup": incumbent[count] / device if device else None,
                },
                "synthesis": {
                    "flop": flop,
                    "tflop_per_s": flop / synthesis.median / 1e12 if synthesis else None,
                    "share_of_matrix_product": flop / synthesis.median / matrix if synthesis else None,
                },
            }
        )
    return {
        "shape": case.shape,
        "group": case.group,
        "tokens": scope.tokens,
        "error": error,
        "first_call_seconds": first,
        "seconds": time.perf_counter() - began,
        "runs": runs,
    }


class Synthesis:
    """Inverse transforms of random coefficients, all chunks alike, into the first regions of a paged cache.

    Args:
        case: whose profile.
        pages: where the values go.
        tokens: of a chunk.
        count: chunks per launch.
        sets: launches that write to regions of their own.
    """

    def __init__(self, case: Case, pages: Pages, tokens: int, count: int, sets: int) -> None:
        device, sections = pages.rows.device, len(case.profile.sections)
        plan, memory = TransformPlan(case.profile, 0, device, torch.bfloat16), Memory.of(pages.cache)
        self.regions = [pages.slots[index * count : (index + 1) * count] for index in range(sets)]
        table, jobs = outgoing(self.regions[0], [0] * count, sections)
        _, size = place_jobs(jobs, plan.arrays.plans)
        y = torch.randn(size // count, generator=torch.Generator(device).manual_seed(0), device=device)
        self._chunks, job_table = torch.from_numpy(table).to(device), torch.from_numpy(jobs).to(device)
        self._parts = [
            (part, join(own)) for part, own in zip(y.to(plan.product).repeat(sets, count), self.regions, strict=True)
        ]
        unit_stride, aligned = contiguity(memory.table, plan.maps.tiles, memory.element)
        cos, sin = plan.geometry.rotations(self._chunks, count * tokens, tokens)
        self._before = (job_table, plan.maps.device_tiles, plan.maps.inverse, plan.means)
        status = torch.zeros(len(jobs), dtype=torch.int32, device=device)
        self._after = (cos, sin, memory.places, memory.scales, status)
        self._options: dict[str, Any] = {
            "sections": sections, "first_section": 0, "max_tokens": tokens, "element": memory.element,
            "unit_stride": unit_stride, "aligned": aligned, "pairs": plan.geometry.tiles.pairs,
        }  # fmt: skip
        self.chosen = synthesis_config(
            plan.product, memory.element, int(plan.maps.tiles[:, Tile.RANK].max()), tokens, aligned
        )

    def reference(self) -> None:
        """Write the first region."""
        y, slots = self._parts[0]
        synthesize_reference(y, *self._before, self._chunks[:1], slots, *self._after, **self._options)

    def calls(self, config: SynthesisConfig) -> list[Callable[[], None]]:
        """Launches that take turns."""
        return [
            partial(
                synthesize, y, *self._before, self._chunks, slots, *self._after, **self._options, config=config
            )
            for y, slots in self._parts
        ]  # fmt: skip


def measure_synthesis(
    clock: Clock, case: Case, scope: Scope, pages: Pages, l2: int, late: Callable[[], bool]
) -> list[dict[str, Any]]:
    """The inverse transform in every configuration. `late` tells that time is up; the rest is left out then.

    Raises:
        CuveeError: a configuration does not give what the reference gives.
    """
    each = case.chunks[0].nbytes
    out: list[dict[str, Any]] = []
    for count in scope.synthesis_chunks:
        sets = turns(count * each, l2, len(pages.slots) // count)
        synthesis = Synthesis(case, pages, scope.tokens, count, sets)
        synthesis.reference()
        expected = pages.rows[:, pages.slots[0]].clone()
        for config in SYNTHESIS_CONFIGS:
            if late():
                return out
            entry = {
                "shape": case.shape, "group": case.group, "chunks": count, "config": asdict(config),
                "chosen": config == synthesis.chosen,
            }  # fmt: skip
            calls = synthesis.calls(config)
            pages.poison()
            try:
                calls[0]()
            except (OutOfResources, PTXASError) as error:
                out.append({**entry, "error": str(error)})
                continue
            timing = clock.inside(calls)
            for call in calls:  # few runs may not have come to all
                call()
            for at in (at for part in synthesis.regions for at in part):
                difference(pages.rows[:, at], expected, f"{case.shape}, group {case.group}, {config}")
            flop = synthesis_flop(case.profile, scope.tokens) * count
            out.append(
                {
                    **entry,
                    "seconds": asdict(timing),
                    "tflop_per_s": timing.per_second(flop / 1e12)["median"],
                    "gb_per_s": timing.per_second(count * each / 1e9)["median"],
                }
            )
    return out


@contextmanager
def compilations() -> Iterator[list[dict[str, Any]]]:
    """Collect what Triton compiles inside: kernel, seconds, and whether it only read a file of its cache."""
    done: list[dict[str, Any]] = []
    knobs = triton.knobs.compilation
    before = knobs.listener

    def listen(*, src: Any, times: Any, cache_hit: bool, **rest: Any) -> None:
        done.append({"kernel": src.name, "seconds": times.total / 1e6, "cached": cache_hit})
        if before is not None:
            before(src=src, times=times, cache_hit=cache_hit, **rest)

    knobs.listener = listen
    try:
        yield done
    finally:
        knobs.listener = before


def verify(blobs: Sequence[bytes]) -> None:
    """What the host does with blobs before a device sees them: headers and checksums."""
    for blob in blobs:
        header = read_header(blob)
        for index in range(len(header.section_bytes)):
            read_section(blob, header, index)


def rates(whole: Timing, stages: Mapping[str, Timing], raw: int, compressed: int) -> dict[str, Any]:
    """A call's seconds, those of its stages, and what they mean in GB/s of bfloat16 and of compressed bytes."""
    device = sum(stage.median for stage in stages.values())
    return {
        "seconds": asdict(whole),
        "gb_per_s": whole.per_second(raw / 1e9),
        "compressed_gb_per_s": whole.per_second(compressed / 1e9),
        "stage_seconds": {name: asdict(stage) for name, stage in stages.items()},
        "device_seconds": device or None,
        "device_gb_per_s": raw / device / 1e9 if device else None,
    }


def measure_incumbent(
    clock: Clock, name: str, chunk: KVChunk, scope: Scope, pages: Pages, link: Link, raw: Mapping[int, Timing], l2: int
) -> dict[str, Any]:
    """The CacheGen-style decoder on copies of one chunk. Arguments: see `measure_case`.

    Raises:
        CuveeError: it does not give back what was coded.
    """
    device, regions = clock.device, len(pages.slots)
    began = time.perf_counter()
    one = cachegen.encode(chunk)
    encode_seconds = time.perf_counter() - began
    coded = one.to(device).repeat(regions)
    size = one.nbytes
    slots = torch.stack(pages.slots)
    shape = (regions, coded.units, coded.tokens, coded.channels)
    out = torch.empty(shape, dtype=torch.uint8, device=device)

    def entropy(at: slice) -> None:
        cachegen.decode(coded.part(at.start, at.stop), out[at])

    def scale(at: slice) -> None:
        cachegen.dequantize(coded.part(at.start, at.stop), out[at], slots[at], pages.rows)

    def both(at: slice) -> None:
        entropy(at)
        scale(at)

    levels = cachegen.quantize(chunk)[0].to(device)
    expected = torch.empty_like(pages.rows[:, : scope.tokens])
    own = torch.arange(scope.tokens, device=device)[None]
    cachegen.dequantize_reference(coded.part(0, 1), levels[None], own, expected)

    def poison() -> None:
        out.fill_(0xAB)
        pages.poison()

    def check(restored: int) -> None:
        for region in range(restored):
            values = pages.rows[:, pages.slots[region]]
            if not (torch.equal(out[region], levels) and torch.equal(values, expected)):
                raise CuveeError(f"{name}: the CacheGen-style decoder does not give back what was coded")

    poison()
    first = clock.once(lambda: both(slice(0, regions)))
    check(regions)
    runs = []
    for count in scope.chunks:
        sets = turns(count * size, l2, regions // count)
        at = [slice(index * count, (index + 1) * count) for index in range(sets)]
        poison()
        timings = {
            stage: clock.inside([partial(call, part) for part in at])
            for stage, call in (("entropy", entropy), ("dequantize", scale), ("whole", both))
        }
        check(sets * count)
        copied = link.measure(count * size)
        restored = timings["whole"].median + copied.median
        runs.append(
            {
                "chunks": count,
                "sets": sets,
                "raw_bytes": count * chunk.nbytes,
                "compressed_bytes": count * size,
                "bits_per_value": 8 * size / one.values,
                "seconds": {stage: asdict(timing) for stage, timing in timings.items()},
                "gb_per_s": timings["whole"].per_second(count * chunk.nbytes / 1e9),
                "compressed_gb_per_s": timings["whole"].per_second(count * size / 1e9),
                "compressed_copy_seconds": asdict(copied),
                "restore_speedup": raw[count].median / restored,
            }
        )
    return {"shape": name, "cpu_encode_seconds": encode_seconds, "first_call_seconds": first, "runs": runs}


def measure_rans(clock: Clock, scope: Scope) -> list[dict[str, Any]]:
    """The entropy decoder alone, on symbols of group `layer` of the first shape, coded at several resolutions.

    Raises:
        CuveeError: it does not give back what was coded.
    """
    layout = next(iter(scope.shapes.values())).layout()
    family = default_family()
    plan = coding_plan(scale_codes(spectrum(layout.values_per_token // layout.num_layers), 0))
    slot = np.random.default_rng(0).integers(0, 1 << family.tables.prob_bits, (plan.planes, scope.tokens))
    data = (family.tables.slots[plan.rest[:, None], slot] >> 24).astype(np.uint8)
    per_stream = tokens_per_stream(plan.planes, float(family.tables.entropy[plan.rest].sum()))
    count = scope.rans_jobs
    plans = np.zeros((1, len(Plan)), np.int64)
    plans[0, [Plan.PLANES, Plan.ROWS]] = plan.planes, len(plan.shift)
    which = torch.from_numpy(plan.rest.astype(np.int32)).to(clock.device)
    want = torch.from_numpy(data).flatten().to(clock.device)
    out: list[dict[str, Any]] = []
    for bits in scope.prob_bits:
        tables = EntropyTables(np.stack([normalize_counts(row, bits) for row in family.tables.freq]), bits)
        streams = rans_numba.rans_encode(data, plan.rest, plan.rest, tables, per_stream)
        parts = (streams.states, streams.lengths.astype(np.uint16), streams.words)
        raw = np.concatenate([part.view(np.uint8) for part in parts])
        size = -(-len(raw) // 16) * 16
        at = size * np.arange(count)
        jobs = np.zeros((count, len(Job)), np.int64)
        jobs[:, Job.STATES] = at // 4
        jobs[:, Job.LENGTHS] = (at + streams.states.nbytes) // 2
        jobs[:, Job.WORDS] = jobs[:, Job.LENGTHS] + len(streams.lengths)
        jobs[:, Job.WORD_COUNT] = len(streams.words)
        jobs[:, Job.STREAMS] = len(streams.states)
        jobs[:, Job.TOKENS] = scope.tokens
        jobs[:, Job.PER_STREAM] = per_stream
        jobs[:, Job.PLANES] = data.size * np.arange(count)
        jobs[:, Job.STRIDE] = scope.tokens
        source = np.tile(np.pad(raw, (0, size - len(raw))), count)
        coded, job_table, plan_table, slots = (
            torch.from_numpy(array).to(clock.device) for array in (source, jobs, plans, tables.slots)
        )
        planes = torch.full((count * data.size,), 0xAB, dtype=torch.uint8, device=clock.device)
        status = torch.zeros(count, dtype=torch.int32, device=clock.device)
        decode = partial(rans_decode, coded, job_table, plan_table, which, slots, planes, status, len(streams.states))
        decode()
        if bool(status.any()) or not bool((planes.view(count, -1) == want).all()):
            raise CuveeError(f"the rANS decoder does not give back what was coded with {bits} bits")
        timing = clock.inside([decode])
        size = 8 * (streams.states.nbytes + 2 * len(streams.lengths) + streams.words.nbytes)
        out.append(
            {
                "prob_bits": bits,
                "table_bytes": tables.slots[0].nbytes,
                "tables": len(np.unique(plan.rest)),
                "symbols": count * data.size,
                "streams": count * len(streams.states),
                "bits_per_symbol": size / data.size,
                "seconds": asdict(timing),
                "gsymbols_per_s": timing.per_second(count * data.size / 1e9),
            }
        )
    return out


# The machine and the report --------------------------------------------------------------------------------------


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures depend on."""
    gpu: dict[str, Any] = {}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = {
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "capability": f"{properties.major}.{properties.minor}",
            "driver": _driver(),
            "cuda": torch.version.cuda,
        }
    return {**hardware(), "device": device.type, "triton": triton.__version__, **gpu}


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split("\n")[0].strip() or None if done.returncode == 0 else None


def need_gpu() -> torch.device:
    """The GPU.

    Raises:
        InputError: there is none, or it is not one that the figures are for.
    """
    if not torch.cuda.is_available():
        raise InputError(
            "device=cuda: torch sees no GPU. Run this where `nvidia-smi` lists one, with a build of torch for CUDA "
            f"(this is {torch.__version__}), or measure the CPU with --device cpu"
        )
    return torch.device("cuda", torch.cuda.current_device())


def run_gpu_bench(
    quick: bool = False,
    progress: Console | None = None,
    *,
    scope: Scope | None = None,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """Run the benchmark.

    Args:
        quick: fewer cases and repeats.
        progress: where to say what is being measured; None is silent.
        scope: what to measure; default: `QUICK` or `FULL`.
        device: where; default: the GPU. On the CPU the kernels run in Triton's interpreter, if that is on, and only
            prove that the benchmark works.

    Returns:
        A JSON-ready report.

    Raises:
        InputError: there is no GPU.
        CuveeError: something did not come back as it went in; then nothing is reported.
    """
    device = device or need_gpu()
    scope = scope or (QUICK if quick else FULL)
    with compilations() as compiled:
        report = _measure(quick, progress, scope, device)
    kernels = sorted((entry for entry in compiled if not entry["cached"]), key=lambda entry: -entry["seconds"])
    seconds = sum(entry["seconds"] for entry in kernels)
    report["compile"] = {"seconds": seconds, "cached": len(compiled) - len(kernels), "kernels": kernels}
    return report


def _measure(quick: bool, progress: Console | None, scope: Scope, device: torch.device) -> dict[str, Any]:
    began = time.perf_counter()

    def say(what: str) -> None:
        if progress is not None:
            progress.print(f"{time.perf_counter() - began:6.1f} s  {what}", highlight=False, style="dim")

    clock = Clock(device, scope.effort)
    report: dict[str, Any] = {"quick": quick, "hardware": machine(device), "scope": asdict(scope)}
    l2 = report["hardware"].get("l2_bytes", 0)
    proofs = report["proofs"] = []
    for (heads, size), shape in {(s.heads, s.size): s for s in scope.shapes.values()}.items():
        for group in scope.groups:
            say(f"proof: {heads} x {size}, group {group}")
            proofs.append({"heads": heads, "size": size, "group": group, **prove_codec(shape, group, scope, device)})
    say("ceilings")
    ceilings = report["ceilings"] = measure_ceilings(clock, scope)
    say("entropy decoder alone")
    report["rans"] = measure_rans(clock, scope)
    for part in ("link", "incumbent", "codec", "synthesis", "skipped"):
        report[part] = []

    def late() -> bool:
        return time.perf_counter() - began > scope.limit

    for name, shape in scope.shapes.items():
        layout = shape.layout()
        pages = Pages(layout, max(scope.chunks), scope.tokens, scope.block_tokens, device)
        each = scope.tokens * layout.bytes_per_token
        link = Link(clock, max(scope.chunks) * each)
        raw = {count: link.measure(count * each) for count in scope.chunks}
        for count, timing in raw.items():
            entry = {"shape": name, "chunks": count, "raw_bytes": count * each}
            report["link"].append({**entry, "gb_per_s": timing.per_second(count * each / 1e9)})
        for group in scope.groups:
            if late():
                report["skipped"].append({"shape": name, "group": group})
                continue
            say(f"{name}, group {group}: profile")
            case = make_case(name, group, scope, device)
            if group == scope.groups[0]:
                say(f"{name}: CacheGen-style decoder")
                one = case.chunks[0]
                report["incumbent"].append(measure_incumbent(clock, name, one, scope, pages, link, raw, l2))
            say(f"{name}, group {group}")
            theirs = {run["chunks"]: run["seconds"]["whole"]["median"] for run in report["incumbent"][-1]["runs"]}
            report["codec"].append(measure_case(clock, case, scope, pages, link, raw, theirs, ceilings, l2))
            if name == next(iter(scope.shapes)) and group in scope.synthesis_groups:
                say(f"{name}, group {group}: configurations of the inverse transform")
                report["synthesis"] += measure_synthesis(clock, case, scope, pages, l2, late)
        del pages, link
    report["seconds"] = time.perf_counter() - began
    return report


def print_gpu_report(report: dict[str, Any], console: Console) -> None:
    """Print a report as tables of 80 columns."""
    hard, ceilings = report["hardware"], report["ceilings"]
    console.print(
        f"{hard.get('gpu', hard['cpu'])}; driver {hard.get('driver')}, CUDA {hard.get('cuda')}, "
        f"torch {hard['torch']}, Triton {hard['triton']}; commit {hard['commit']}, {hard['date']}",
        style="dim",
        highlight=False,
    )
    links = [entry["gb_per_s"]["median"] for entry in report["link"]]
    moved = max(proof["levels_moved"] for proof in report["proofs"])
    apart = max(proof["difference"] for proof in report["proofs"])
    console.print(
        f"Proved: bytes equal after the integers; {moved:.2%} of the levels differ by one, values by {apart:.4f}.\n"
        f"Ceilings: device copy {ceilings['copy_gb_per_s']['median']:,.0f} GB/s (read + written), "
        f"bf16 product {ceilings['matrix_tflop_per_s']['median']:,.0f} TFLOP/s,\n"
        f"pinned host to device {max(links, default=0):,.1f} GB/s. GB/s below count the uncompressed bfloat16 cache.",
        highlight=False,
    )
    for entry in report["codec"]:
        first = entry["first_call_seconds"]
        title = (
            f"{entry['shape']}, group {entry['group']}, chunks of {entry['tokens']} tokens; first calls "
            f"{first['encode']:.1f} s, {first['decode']:.1f} s"
        )
        table = _table(
            title, "chunks", "bits", "encode", "decode", "on device", "verify", "raw copy", "restore", "CacheGen"
        )
        for run in entry["runs"]:
            restore, device = run["restore"], run["decode"]["device_gb_per_s"]
            ratio = run["incumbent"]["device_speedup"]
            table.add_row(
                str(run["chunks"]),
                f"{run['bits_per_value']:.2f}",
                f"{run['encode']['gb_per_s']['median']:,.1f}",
                f"{run['decode']['gb_per_s']['median']:,.1f}",
                "" if device is None else f"{device:,.0f}",
                _milliseconds(run["verify_seconds"]),
                _milliseconds(restore["raw_copy_seconds"]),
                _milliseconds(restore["decode_seconds"]),
                "" if ratio is None else f"{ratio:,.1f}x",
            )
        console.print(table)
    for what in ("decode", "encode"):
        for shape in dict.fromkeys(entry["shape"] for entry in report["codec"]):
            runs = {e["group"]: e["runs"][-1] for e in report["codec"] if e["shape"] == shape}
            names = list(dict.fromkeys(name for run in runs.values() for name in run[what]["stage_seconds"]))
            if names:
                console.print(_stage_table(f"Stages of {what}: {shape}, most chunks, ms", names, runs, what))
    if report["synthesis"]:
        console.print(_synthesis_table(report["synthesis"]))
    table = _table("CacheGen-style decoder, ms on the device", "cache", "chunks", "bits", "entropy", "scale", "GB/s")
    for entry in report["incumbent"]:
        for run in entry["runs"]:
            seconds = run["seconds"]
            table.add_row(
                entry["shape"],
                str(run["chunks"]),
                f"{run['bits_per_value']:.2f}",
                _milliseconds(seconds["entropy"]),
                _milliseconds(seconds["dequantize"]),
                f"{run['gb_per_s']['median']:,.1f}",
            )
    console.print(table)
    table = _table("rANS decoder alone", "table bits", "table bytes", "bits/symbol", "G symbols/s")
    for entry in report["rans"]:
        table.add_row(
            str(entry["prob_bits"]),
            f"{entry['table_bytes']:,}",
            f"{entry['bits_per_symbol']:.3f}",
            f"{entry['gsymbols_per_s']['median']:,.1f}",
        )
    console.print(table)
    console.print(
        "encode, decode: GB/s from an idle device to an idle device, host included; on device: the stages alone.\n"
        "verify (checksums), raw copy (uncompressed, from pinned memory), restore (bytes to pages): ms.\n"
        "CacheGen: its decoder's time on the device over ours. limit: the least time by the ceilings, of the time.\n"
        f"Triton compiled {len(report['compile']['kernels'])} kernels in {report['compile']['seconds']:.0f} s.",
        style="dim",
        highlight=False,
    )
    for entry in report["skipped"]:
        console.print(f"Left out for lack of time: {entry['shape']}, group {entry['group']}", highlight=False)


def _stage_table(title: str, names: Sequence[str], runs: Mapping[str, Mapping[str, Any]], what: str) -> Table:
    table = _table(title, "group", *(name.replace(" ", "\n") for name in names))
    for group, run in runs.items():
        stages, least = run[what]["stage_seconds"], run[what]["stage_limits"]
        table.add_row(group, *(_milliseconds(stages[name]) if name in stages else "" for name in names))
        shares = (least[name]["share"] if name in least else None for name in names)
        table.add_row("limit", *("" if share is None else f"{share:.0%}" for share in shares))
    return table


def _synthesis_table(entries: Sequence[Mapping[str, Any]]) -> Table:
    cases = list(dict.fromkeys((entry["group"], entry["chunks"]) for entry in entries))
    names = [f"{group}\n{chunks} chunk{'s' * (chunks > 1)}" for group, chunks in cases]
    table = _table("Inverse transform by configuration, ms; * in use", "tokens x components", *names)
    for config in SYNTHESIS_CONFIGS:
        row = []
        for group, chunks in cases:
            found = [e for e in entries if (e["group"], e["chunks"], e["config"]) == (group, chunks, asdict(config))]
            shown = "".join("too large" if "error" in e else _milliseconds(e["seconds"]) for e in found)
            row.append(shown + "*" * any(entry["chosen"] for entry in found))
        label = f"{config.block_t} x {config.block_r}, {config.num_warps} warps, {config.num_stages} stages"
        table.add_row(label, *row)
    return table


def _milliseconds(timing: Mapping[str, float]) -> str:
    return f"{1e3 * timing['median']:,.2f}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold", no_wrap=bool(index))
    return table
