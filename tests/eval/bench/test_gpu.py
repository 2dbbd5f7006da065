"""The GPU benchmark on a tiny case: it runs, it proves before it times, and its report is complete.

Without a GPU the kernels run in Triton's interpreter and the clock is the host's: nothing about speed is asserted.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
from rich.console import Console
from triton.runtime.errors import OutOfResources
from typer.testing import CliRunner

from cuvee.cli import app
from cuvee.codec.codec import Codec, PendingDecode
from cuvee.codec.errors import CuveeError, InputError
from cuvee.codec.paged import PagedCache
from cuvee.eval.baselines import cachegen
from cuvee.eval.bench.gpu import gpu_bench as gpu_run
from cuvee.eval.bench.gpu import proofs, rans, synthesis
from cuvee.eval.bench.gpu.cases import (
    BITS,
    GPU_FULL,
    GPU_QUICK,
    GPU_SHAPES,
    MOST_ERROR,
    GpuCase,
    GpuScope,
    Pages,
    make_case,
    spectrum,
    stack,
    synthetic_chunks,
    synthetic_profile,
)
from cuvee.eval.bench.gpu.ceilings import Link, limits, stage_work, synthesis_flop
from cuvee.eval.bench.gpu.clock import Clock, compilations, sum_stages, turns
from cuvee.eval.bench.gpu.codec import measure_case
from cuvee.eval.bench.gpu.gpu_bench import run_gpu_bench
from cuvee.eval.bench.gpu.gpu_tables import print_gpu_report
from cuvee.eval.bench.gpu.incumbent import measure_incumbent
from cuvee.eval.bench.gpu.proofs import check_difference, prove_codec, recode
from cuvee.eval.bench.gpu.rans import measure_rans
from cuvee.eval.bench.gpu.synthesis import measure_synthesis
from cuvee.eval.bench.shapes import CacheShape
from cuvee.eval.timing import Effort, Timing
from cuvee.kernels.ops.rans import rans_decode
from cuvee.kernels.ops.synthesize import SYNTHESIS_CONFIGS, SynthesisConfig, synthesize

SHAPE = CacheShape(2, 1, 16, 1e4)
TINY = GpuScope(
    {"tiny": replace(SHAPE, layers=1)},
    ("layer",),
    (1, 2),
    tokens=8,
    block_tokens=4,
    proof_tokens=9,
    effort=Effort(0.0, 1, 1),
    copy_bytes=1 << 16,
    matrix=16,
    prob_bits=(10, 12),
    rans_jobs=2,
    synthesis_groups=("layer",),
    synthesis_chunks=(1, 2),
)


CEILINGS = {"copy_gb_per_s": {"median": 4000.0}, "matrix_tflop_per_s": {"median": 600.0}}


@pytest.fixture(scope="module")
def report(device: torch.device) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(run_gpu_bench(scope=TINY, device=device), allow_nan=False))
    return data


def numbers(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield from numbers(value, f"{path}.{key}")
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from numbers(value, f"{path}[{index}]")
    elif not isinstance(data, str | bool):
        yield path, data


def test_every_figure_is_there(report: dict[str, Any], device: torch.device) -> None:
    names = "synthesis.tflop_per_s share_of_matrix_product device_seconds device_gb_per_s device_speedup share"
    events = {f".{name}" for name in names.split()}  # of a GPU only
    for part in ("proofs", "ceilings", "link", "incumbent", "codec", "synthesis", "rans", "compile"):
        assert report[part]
        for path, number in numbers(report[part], part):
            if device.type != "cuda" and any(path.endswith(name) for name in events):
                assert number is None, path
            else:
                assert isinstance(number, int | float) and math.isfinite(number) and number >= 0, path
    assert report["skipped"] == []
    (entry,) = report["codec"]
    assert (entry["shape"], entry["group"], [run["chunks"] for run in entry["runs"]]) == ("tiny", "layer", [1, 2])
    for run in entry["runs"]:
        assert run["raw_bytes"] == run["chunks"] * 8 * 2 * 16 * 2
        assert run["decode"]["seconds"]["median"] > 0 and run["encode"]["gb_per_s"]["median"] > 0
        assert run["bits_per_value"] == pytest.approx(8 * run["compressed_bytes"] / (run["raw_bytes"] / 2))
        assert bool(run["decode"]["stage_seconds"]) == (device.type == "cuda")
        assert run["verify_seconds"]["median"] > 0
        assert set(run["decode"]["stage_limits"]) == {"rotation tables", "rans", "dequantize", "synthesize"}
        seconds, restore = run["decode"]["seconds"]["median"], run["restore"]
        assert run["decode"]["gb_per_s"]["median"] == pytest.approx(run["raw_bytes"] / seconds / 1e9)
        assert run["decode"]["compressed_gb_per_s"]["median"] == pytest.approx(run["compressed_bytes"] / seconds / 1e9)
        assert restore["speedup"] == pytest.approx(restore["raw_copy_seconds"]["median"] / seconds)
        theirs = report["incumbent"][0]["runs"][run["chunks"] - 1]["seconds"]["whole"]["median"]
        assert run["incumbent"]["speedup"] == pytest.approx(theirs / seconds)
    (incumbent,) = report["incumbent"]
    assert [run["chunks"] for run in incumbent["runs"]] == [1, 2]
    assert incumbent["runs"][1]["compressed_bytes"] == 2 * incumbent["runs"][0]["compressed_bytes"]
    assert [entry["prob_bits"] for entry in report["rans"]] == [10, 12]
    cases = [(entry["chunks"], SynthesisConfig(**entry["config"])) for entry in report["synthesis"]]
    assert cases == [(count, config) for count in (1, 2) for config in SYNTHESIS_CONFIGS]
    assert [entry["chosen"] for entry in report["synthesis"]].count(True) == 2
    assert report["rans"][0]["bits_per_symbol"] > 0 and report["rans"][0]["table_bytes"] == 2048


def test_the_report_names_the_machine_and_the_versions(report: dict[str, Any], device: torch.device) -> None:
    machine = report["hardware"]
    assert machine.keys() >= {"cpu", "torch", "triton", "commit", "date", "device", "cuvee"}
    if device.type == "cuda":
        assert machine["gpu"] and machine["l2_bytes"] > 0 and machine["cuda"] and machine["driver"]
    assert report["scope"]["tokens"] == 8 and report["scope"]["shapes"]["tiny"]["layers"] == 1


def test_the_tables_fit_80_columns(report: dict[str, Any]) -> None:
    # As long as on a real machine.
    wide = json.loads(json.dumps(report))
    wide["codec"][0].update(shape="Llama-3.1-70B/TP4", group="layers:2")
    for run in wide["codec"][0]["runs"]:
        for what in ("encode", "decode"):
            run[what]["gb_per_s"]["median"], run[what]["device_gb_per_s"] = 1234.5, 2345.6
            names = ["upload", "rotation tables", "rans", "dequantize", "synthesize"]
            if what == "encode":
                names = ["rotation tables", "gather", "analyze", "quantize", "rans", "escapes", "write", "download"]
            run[what]["stage_seconds"] = {name: {"median": 0.12345} for name in names}
            for limit in run[what]["stage_limits"].values():
                limit["share"] = 0.456
        run["incumbent"]["device_speedup"] = 12.3
        run["restore"] = {key: {"median": 0.12345} for key in run["restore"]} | {"speedup": 12.3}
    entry = wide["synthesis"][0]
    del entry["seconds"]
    entry["error"] = "out of resource: shared memory"
    wide["synthesis"] += [{**entry, "group": "head", "seconds": {"median": 0.1}} for entry in wide["synthesis"][1:]]
    out = io.StringIO()
    print_gpu_report(wide, Console(file=out, width=80))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    text = " ".join(out.getvalue().split())
    assert max(map(len, lines)) <= 80
    for shown in (
        "Llama-3.1-70B/TP4", "layers:2", "1,234.5", "2,346", "46%", "123.45", "CacheGen-style", "2,048", "12.3x",
        "too large", "download", "Stages of encode: Llama-3.1-70B/TP4", "2 chunks",
    ):  # fmt: skip
        assert shown in text, shown
    assert "…" not in text.replace("restore", "")


def test_cases_out_of_time_are_named(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    proof = {"tokens": 9, "levels_moved": 0.0, "difference": 0.0}
    monkeypatch.setattr(gpu_run, "prove_codec", lambda *args: proof)
    monkeypatch.setattr(gpu_run, "measure_rans", lambda *args: [])
    late = run_gpu_bench(scope=replace(TINY, limit=-1.0), device=device)
    assert late["codec"] == [] and late["skipped"] == [{"shape": "tiny", "group": "layer"}]
    out = io.StringIO()
    print_gpu_report(late, Console(file=out, width=80))
    assert "Left out for lack of time: tiny, group layer" in out.getvalue()


# Refusals --------------------------------------------------------------------------------------------------------


def test_a_decoder_that_damages_one_value_is_refused(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    right = Codec.decode_paged

    def wrong(self: Codec, blobs: Any, cache: PagedCache, slots: Any, *rest: Any) -> PendingDecode:
        pending = right(self, blobs, cache, slots, *rest)
        if self._backend_name == "triton":
            pending.check()
            cache.values[1].view(-1, 16)[slots[0][3], 5] += 1.0
        return pending

    monkeypatch.setattr(Codec, "decode_paged", wrong)
    with pytest.raises(CuveeError, match="apart"):
        prove_codec(SHAPE, "layer", TINY, device)


def test_a_decoder_that_writes_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    right = Codec.decode_paged

    def wrong(self: Codec, blobs: Any, cache: PagedCache, slots: Any, *rest: Any) -> PendingDecode:
        pending = right(self, blobs, cache, slots, *rest)
        cache.keys[0].nan_to_num_(0.0)
        return pending

    monkeypatch.setattr(Codec, "decode_paged", wrong)
    with pytest.raises(CuveeError, match="not the chunk's"):
        prove_codec(SHAPE, "layer", TINY, device)


def test_an_encoder_of_other_bytes_is_refused(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(proofs, "write_streams", lambda *args: b"other bytes")
    with pytest.raises(CuveeError, match="other bytes"):
        prove_codec(SHAPE, "layer", TINY, device)


def test_an_encoder_that_quantizes_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    right = Codec.encode_paged

    def coarse(self: Codec, cache: PagedCache, slots: Any, starts: Any, **options: Any) -> list[bytes]:
        if not options:  # `encode` of the CPU's codec comes here too, with options
            for tensor in cache.keys:
                tensor.mul_(1.05)
        return right(self, cache, slots, starts, **options)

    monkeypatch.setattr(Codec, "encode_paged", coarse)
    with pytest.raises(CuveeError, match="differently"):
        prove_codec(SHAPE, "layer", TINY, device)


def test_pages_that_were_not_restored_are_found(device: torch.device) -> None:
    layout = SHAPE.layout()
    chunks = synthetic_chunks(synthetic_profile(layout, "layer", device), 2, 16, device)
    pages = Pages(layout, 3, 16, 4, device)
    pages.fill(chunks)
    assert pages.check(chunks, range(3)) == 0.0
    assert torch.equal(pages.rows[:, pages.slots[2]], stack(chunks[0]))
    pages.rows[3, pages.slots[1][7], 4] = float("nan")
    with pytest.raises(CuveeError, match="nothing is reported"):
        pages.check(chunks, range(3))
    assert pages.check(chunks, range(1)) == 0.0
    pages.fill(chunks)
    pages.rows[2, pages.slots[0]] *= 0.7  # one unit of four: half as much over all
    with pytest.raises(CuveeError, match="nothing is reported"):
        pages.check(chunks, range(3))


def test_one_wrong_value_among_many_is_a_difference() -> None:
    want = torch.randn(2, 500, 64, generator=torch.Generator().manual_seed(0))
    got = want * (1 + 2**-9)
    assert check_difference(got, want, "case") == pytest.approx(2**-9, rel=0.01)
    got[1, 77, 3] += 0.5
    with pytest.raises(CuveeError, match=r"^case: values lie .* apart"):
        check_difference(got, want, "case")


def test_a_wrong_incumbent_is_refused(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    layout, clock = SHAPE.layout(), Clock(device, TINY.effort)
    (chunk,) = synthetic_chunks(synthetic_profile(layout, "layer", device), 1, 8, device)
    pages, link = Pages(layout, 2, 8, 4, device), Link(clock, 1 << 16)

    def wrong(coded: cachegen.CodedChunks, symbols: torch.Tensor) -> None:
        symbols.zero_()

    monkeypatch.setattr(cachegen, "decode", wrong)
    with pytest.raises(CuveeError, match="CacheGen-style"):
        measure_incumbent(clock, "tiny", chunk, TINY, pages, link, {}, 0)


def test_a_wrong_entropy_decoder_is_refused(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    right = rans_decode

    def wrong(*args: Any) -> None:
        right(*args)
        args[3][-1] ^= 1

    monkeypatch.setattr(rans, "rans_decode", wrong)
    with pytest.raises(CuveeError, match="rANS decoder"):
        measure_rans(Clock(device, TINY.effort), TINY)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_remedy_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nvidia-smi.*cuvee bench cpu"):
        run_gpu_bench()
    done = CliRunner().invoke(app, ["bench", "gpu", "--out", str(tmp_path / "report.json")])
    assert done.exit_code == 1 and "cuvee bench cpu" in done.output
    assert not (tmp_path / "report.json").exists()


def test_a_wrong_configuration_of_the_inverse_transform_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    def wrong(*args: Any, **options: Any) -> None:
        synthesize(*args, **options)
        if options["config"] == SYNTHESIS_CONFIGS[1]:
            pages.rows[0, pages.slots[1][0], 0] += 9.0

    case = make_case("tiny", "layer", TINY, device)
    pages = Pages(case.profile.layout, 2, 8, 4, device)
    monkeypatch.setattr(synthesis, "synthesize", wrong)
    with pytest.raises(CuveeError, match=r"block_t=128.* apart"):
        measure_synthesis(
            Clock(device, TINY.effort), case, replace(TINY, synthesis_chunks=(2,)), pages, 0, lambda: False
        )


def test_a_configuration_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    def tight(*args: Any, **options: Any) -> None:
        if options["config"].block_t > 16:
            raise OutOfResources(300000, 232448, "shared memory")
        synthesize(*args, **options)

    case = make_case("tiny", "layer", TINY, device)
    pages, clock = Pages(case.profile.layout, 1, 8, 4, device), Clock(device, TINY.effort)
    monkeypatch.setattr(synthesis, "synthesize", tight)
    scope = replace(TINY, synthesis_chunks=(1,))
    entries = measure_synthesis(clock, case, scope, pages, 0, lambda: False)
    assert ["error" in entry for entry in entries] == [config.block_t > 16 for config in SYNTHESIS_CONFIGS]
    assert "shared memory" in entries[0]["error"] and entries[-1]["chosen"]
    assert measure_synthesis(clock, case, scope, pages, 0, lambda: True) == []


def test_a_decoder_that_stops_writing_is_refused(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The caches that were encoded lie in the pages: what timed runs leave behind must not be those."""
    right, calls = Codec.decode_paged, iter(range(100))

    def wrong(self: Codec, *args: Any) -> PendingDecode:
        return right(self, *args) if next(calls) == 0 else PendingDecode(())

    case, clock = make_case("tiny", "layer", TINY, device), Clock(device, TINY.effort)
    monkeypatch.setattr(Codec, "decode_paged", wrong)
    with pytest.raises(CuveeError, match="nothing is reported"):
        measure(case, clock, device)


def test_batches_of_other_bytes_are_refused(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    right, calls = Codec.encode_paged, iter(range(100))

    def wrong(self: Codec, *args: Any) -> list[bytes]:
        blobs = right(self, *args)
        return blobs if next(calls) == 0 else [blob[:-1] + b"!" for blob in blobs]

    case, clock = make_case("tiny", "layer", TINY, device), Clock(device, TINY.effort)
    monkeypatch.setattr(Codec, "encode_paged", wrong)
    with pytest.raises(CuveeError, match="1 chunks at once become other bytes"):
        measure(case, clock, device)


def measure(case: GpuCase, clock: Clock, device: torch.device) -> dict[str, Any]:
    scope = replace(TINY, chunks=(1,))
    pages, link = Pages(case.profile.layout, 1, 8, 4, device), Link(clock, 1 << 16)
    return measure_case(clock, case, scope, pages, link, {1: Timing.of([1.0])}, {1: 1.0}, CEILINGS, 0)


# Parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", ["head", "unit", "layer", "layers:2"])
def test_synthetic_caches_cost_what_they_should(group: str) -> None:
    layout = CacheShape(2, 2, 64, 1e4).layout()
    profile = synthetic_profile(layout, group, torch.device("cpu"))
    chunks = synthetic_chunks(profile, 2, 256, torch.device("cpu"))
    codec = Codec(profile, step=1.0, backend="numba")
    blob = codec.encode(chunks[1])
    assert 8 * len(blob) / (256 * layout.values_per_token) == pytest.approx(BITS, abs=0.1)
    want, got = stack(chunks[1]).float(), stack(codec.decode(blob)).float()
    assert float((got - want).norm() / want.norm()) < MOST_ERROR / 2
    assert recode(blob, profile)[0].any()
    assert chunks[1].start == 256 and not torch.equal(chunks[0].keys[0], chunks[1].keys[0])


def test_spectra_fall_and_hold_wide_components() -> None:
    scales = spectrum(2048)
    assert bool((np.diff(scales) <= 0).all()) and scales[-1] >= -2 * 64
    assert scales[0] > 4 * 64  # beyond the last table: low bits are coded apart
    assert len(scales) == math.ceil(0.68 * 2048)


def test_synthesis_counts_two_operations_a_product() -> None:
    profile = synthetic_profile(SHAPE.layout(), "layer", torch.device("cpu"))
    assert synthesis_flop(profile, 3) == 3 * 2 * 2 * len(spectrum(32)) * 32


def test_limits_of_stages_follow_from_bytes_and_products() -> None:
    layout = GPU_SHAPES["Llama-3.1-8B"].layout(2)
    profile = synthetic_profile(layout, "layer", torch.device("cpu"))
    work = stage_work(profile, 4096, 1000)["decode"]
    rank, size = len(spectrum(2048)), 2048
    planes = sum(learned.plan(0)[1].planes for learned in profile.learned)
    assert work["rans"].bytes == 1000 + 4096 * planes and work["rotation tables"].bytes == 4096 * 64 * 8
    assert work["dequantize"].bytes == 4096 * (planes + 2 * rank * 2)
    assert work["synthesize"].bytes == 2 * (2 * 4096 * rank + 2 * rank * size + 2 * 4096 * size)
    assert work["synthesize"].flop == 2 * 2 * 4096 * rank * size
    least = limits(work, {"rans": Timing.of([1e-5]), "synthesize": Timing.of([2e-4])}, CEILINGS)
    assert least["rans"]["seconds"] == work["rans"].bytes / 4e12
    assert least["rans"]["share"] == pytest.approx(work["rans"].bytes / 4e12 / 1e-5)
    assert least["synthesize"]["seconds"] == work["synthesize"].flop / 6e14  # products, not bytes
    assert least["dequantize"]["share"] is None


def test_compilations_are_collected() -> None:
    heard: list[bool] = []
    knobs = triton.knobs.compilation
    before = knobs.listener
    knobs.listener = lambda **event: heard.append(event["cache_hit"])
    try:
        with compilations() as done:
            for hit in (False, True):
                knobs.listener(
                    src=SimpleNamespace(name="kernel"), metadata={}, metadata_group={},
                    times=SimpleNamespace(total=1500000), cache_hit=hit,
                )  # fmt: skip
        knobs.listener(cache_hit=False)
    finally:
        knobs.listener = before
    assert done == [{"kernel": "kernel", "seconds": 1.5, "cached": hit} for hit in (False, True)]
    assert heard == [False, True, False]


def test_regions_lie_apart_and_out_of_order() -> None:
    pages = Pages(SHAPE.layout(), 5, 10, 4, torch.device("cpu"))
    slots = torch.cat(pages.slots)
    assert len(slots.unique()) == 50 and int(slots.max()) < pages.cache.keys[0].shape[:2].numel() == 60
    assert not torch.equal(slots, slots.sort().values)
    pages.poison()
    assert pages.cache.keys[1].isnan().all() and pages.cache.values[0].isnan().all()
    pages.rows[3, pages.slots[4][9]] = 7.0
    assert pages.cache.read(pages.slots[4], 0).values[1][9].eq(7.0).all()


@pytest.mark.parametrize(
    ("size", "l2", "most", "expected"), [(10, 100, 64, 30), (10, 100, 8, 8), (1000, 100, 8, 1), (10, 0, 8, 1)]
)
def test_working_sets_take_turns_beyond_the_cache(size: int, l2: int, most: int, expected: int) -> None:
    assert turns(size, l2, most) == expected


def test_stages_of_a_run_add_up_by_name() -> None:
    timings = sum_stages([[("a", 1.0), ("b", 5.0), ("a", 2.0)], [("a", 4.0)]])
    assert list(timings) == ["a", "b"]
    assert timings["a"].median == 3.5 and timings["a"].runs == 2
    assert timings["b"].median == 2.5
    assert Timing.of([1.0, 2.0, 3.0]).median == 2.0


def test_calls_take_turns(device: torch.device) -> None:
    seen: list[int] = []
    clock = Clock(device, Effort(0.0, 5, 5))
    timing = clock.whole([lambda: seen.append(0), lambda: seen.append(1)])
    assert timing.runs == 5 and seen == [0, 0, 1, 0, 1, 0]


def test_a_full_run_covers_what_it_promises() -> None:
    assert set(GPU_FULL.shapes) == {"Llama-3.1-8B", "Qwen3-0.6B", "Llama-3.1-70B/TP4"}
    assert GPU_FULL.groups == ("head", "unit", "layer", "layers:2") and GPU_FULL.chunks == (1, 4, 16, 64)
    assert (
        GPU_FULL.prob_bits == (10, 11, 12) and set(GPU_QUICK.shapes) <= set(GPU_FULL.shapes) and GPU_QUICK.limit < 480
    )
