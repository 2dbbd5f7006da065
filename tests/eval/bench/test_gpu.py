"""The speed on a GPU on a tiny case: it runs, it proves before it times, and its report is complete.

Without a GPU the kernels are emulated and the clock is the host's: nothing about speed is asserted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cuvee.codec.backends import PendingDecode
from cuvee.codec.codec import Codec
from cuvee.codec.errors import CuveeError
from cuvee.eval.bench.gpu import gpu_bench
from cuvee.eval.bench.gpu.cases import (
    BITS,
    GPU_REHEARSAL,
    LOSSLESS,
    MOST_ERROR,
    GpuCase,
    Pages,
    make_case,
    spectrum,
    stack,
    synthetic_chunks,
    synthetic_profile,
)
from cuvee.eval.bench.gpu.clock import Clock, sum_stages, turns
from cuvee.eval.bench.gpu.codec import measure_case
from cuvee.eval.bench.gpu.gpu_bench import measure_speed
from cuvee.eval.bench.gpu.gpu_report import gpu_markdown, write_report
from cuvee.eval.bench.shapes import CacheShape
from cuvee.eval.bench.timing import Effort, Timing

SHAPE = GPU_REHEARSAL.shape
TINY = replace(GPU_REHEARSAL, groups=("layer", LOSSLESS))


@pytest.fixture(scope="module")
def saved() -> list[dict[str, Any]]:
    """Every state of the report that `report` was saved in."""
    return []


@pytest.fixture(scope="module")
def report(device: torch.device, saved: list[dict[str, Any]]) -> dict[str, Any]:
    def save(data: object) -> None:
        saved.append(json.loads(json.dumps(data, allow_nan=False)))

    measure_speed(TINY, device, save)
    return saved[-1]


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
    events = {".device_seconds", ".device_gb_per_s"}  # of a GPU only
    for part in ("ceilings", "link", "codec"):
        assert report[part]
        for path, number in numbers(report[part], part):
            if device.type != "cuda" and any(path.endswith(name) for name in events):
                assert number is None, path
            else:
                assert isinstance(number, int | float) and math.isfinite(number) and number >= 0, path
    assert report["errors"] == {}
    assert [entry["group"] for entry in report["codec"]] == ["layer", LOSSLESS]
    assert report["codec"][1]["error"] == 0
    for entry in report["codec"]:
        assert [run["tokens"] for run in entry["runs"]] == [8, 16]
        for run in entry["runs"]:
            assert run["raw_bytes"] == run["chunks"] * 8 * 2 * 2 * 16 * 2
            assert run["decode"]["seconds"]["median"] > 0 and run["encode"]["gb_per_s"]["median"] > 0
            assert run["bits_per_value"] == pytest.approx(8 * run["compressed_bytes"] / (run["raw_bytes"] / 2))
            assert bool(run["decode"]["stage_seconds"]) == (device.type == "cuda")
            seconds = run["decode"]["seconds"]["median"]
            assert run["decode"]["gb_per_s"]["median"] == pytest.approx(run["raw_bytes"] / seconds / 1e9)
            assert run["decode_over_copy"] == pytest.approx(run["raw_copy_seconds"]["median"] / seconds)


def test_a_report_is_saved_after_each_group(report: dict[str, Any], saved: list[dict[str, Any]]) -> None:
    assert [len(state["codec"]) for state in saved] == [0, 1, 2]
    assert saved[0]["ceilings"] == report["ceilings"]
    for state in saved:  # a report that was cut can be shown
        shown = {"about": {"device": "emulated"}, "steps": {"speed": {**STEP, "status": "cut", "result": state}}}
        assert "Device copy" in gpu_markdown(shown)


STEP = {"status": "done", "seconds": 1.0, "limit": 2.0}


def test_results_become_a_table(report: dict[str, Any], tmp_path: Any) -> None:
    data = {"about": {"device": "cuda"}, "steps": {"speed": {**STEP, "result": report}}}
    write_report(data, tmp_path)
    text = (tmp_path / "report.md").read_text()
    for shown in ("| layer | 16 |", "| lossless | 8 | ", "casts to FP8"):
        assert shown in text, shown


def test_a_wrong_group_is_named_and_the_others_measured(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    right = measure_case

    def wrong(clock: Clock, case: GpuCase, *rest: Any) -> dict[str, Any]:
        if case.group == "layer":
            raise CuveeError("values lie apart")
        return right(clock, case, *rest)

    monkeypatch.setattr(gpu_bench, "measure_case", wrong)
    report = measure_speed(TINY, device, lambda data: None)
    assert report["errors"] == {"layer": "values lie apart"}
    assert [entry["group"] for entry in report["codec"]] == [LOSSLESS]
    shown = gpu_markdown({"about": {"device": "cuda"}, "steps": {"speed": {**STEP, "result": report}}})
    assert "**layer is wrong**: values lie apart" in shown


# Refusals --------------------------------------------------------------------------------------------------------


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


def test_a_decoder_that_stops_writing_is_refused(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The caches that were encoded lie in the pages: what timed runs leave behind must not be those."""
    right, calls = Codec.decode_paged, iter(range(100))

    def wrong(self: Codec, *args: Any) -> PendingDecode:
        return right(self, *args) if next(calls) == 0 else PendingDecode(())

    case, clock = make_case("layer", TINY, device), Clock(device, TINY.effort)
    monkeypatch.setattr(Codec, "decode_paged", wrong)
    with pytest.raises(CuveeError, match="nothing is reported"):
        measure(case, clock, device)


def test_batches_of_other_bytes_are_refused(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    right: Callable[..., Any] = Codec.encode
    calls = iter(range(100))

    def wrong(self: Codec, *args: Any) -> list[bytes]:
        blobs = right(self, *args)
        return blobs if next(calls) == 0 else [blob[:-1] + b"!" for blob in blobs]

    case, clock = make_case("layer", TINY, device), Clock(device, TINY.effort)
    monkeypatch.setattr(Codec, "encode", wrong)
    with pytest.raises(CuveeError, match="1 chunks at once become other bytes"):
        measure(case, clock, device)


def measure(case: GpuCase, clock: Clock, device: torch.device) -> dict[str, Any]:
    scope = replace(TINY, chunks=(1,))
    return measure_case(clock, case, scope, Pages(SHAPE.layout(), 1, 8, 4, device), {1: Timing.of([1.0])}, 0)


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
    assert chunks[1].start == 256 and not torch.equal(chunks[0].keys[0], chunks[1].keys[0])


def test_spectra_fall_and_hold_wide_components() -> None:
    scales = spectrum(2048)
    assert bool((np.diff(scales) <= 0).all()) and scales[-1] >= -2 * 64
    assert scales[0] > 4 * 64  # beyond the last table: low bits are coded apart
    assert len(scales) == math.ceil(0.68 * 2048)


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
