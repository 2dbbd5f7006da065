"""The stages beside the core's limits: what is counted, and how rates and shares follow. No speed is asserted."""

from __future__ import annotations

import io
import os
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from tests.cpus import multiply
from typer.testing import CliRunner

from cuvee.cli import app
from cuvee.codec.chunk import KVChunk
from cuvee.codec.cpu import backend
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.step_coding import SectionCoding
from cuvee.codec.stages.products import Products
from cuvee.codec.stages.rotation import Rotation
from cuvee.eval.bench.cpu import cpu_bench, stages
from cuvee.eval.bench.cpu.caches import real_cache
from cuvee.eval.bench.cpu.cases import fit_profile, make_chunk
from cuvee.eval.bench.cpu.cpu_tables import cpu_markdown, print_cpu_report
from cuvee.eval.bench.cpu.limits import (
    CYCLES,
    GATHERS,
    StageTotal,
    against_limits,
    copy_bytes,
    copy_name,
    limit_of,
    probes,
)
from cuvee.eval.bench.cpu.stage_work import BYTES, DECODED, DENSE, ENCODED, PRODUCTS, count_work
from cuvee.eval.bench.cpu.stages import measure_stages
from cuvee.eval.bench.shapes import CacheShape
from cuvee.eval.timing import Effort

ONCE = Effort(0.0, 1, 1)
TOKENS = 64
VALUES = 2 * 2 * 2 * 16  # of a token: layers, keys and values, heads, dimensions
FLOAT32 = PRODUCTS[torch.float32]


@pytest.fixture(scope="module")
def layout() -> KVLayout:
    return CacheShape(2, 2, 16, 1e4).layout()


@pytest.fixture(scope="module")
def chunk(layout: KVLayout) -> KVChunk:
    return make_chunk(layout, TOKENS)


@pytest.fixture(scope="module")
def fitted(layout: KVLayout) -> Profile:
    return fit_profile(layout, "layer")


def amounts(entry: dict[str, Any], way: str) -> dict[str, dict[str, float]]:
    """The amounts of work by stage and unit."""
    return {name: {own["unit"]: own["amount"] for own in work} for name, work in entry[way]["work"].items()}


def test_rates_and_shares_follow_from_amounts_and_seconds() -> None:
    totals = {
        "product": StageTotal(2, {FLOAT32: 4e9, DENSE: 1e10, BYTES: 3e5}),
        "entropy decoding": StageTotal(1, {DECODED: 1e6}),
        "entropy coding": StageTotal(1, {ENCODED: 3e6}),
        "positions": StageTotal(1, {}),
    }
    seconds = {"product": 0.1, "entropy decoding": 2e-3, "entropy coding": 1e-2, "positions": 1.0}
    limits = {
        CYCLES: 3e9, GATHERS: 1.5e8, FLOAT32: 1.6e11, DECODED: 1e9, ENCODED: 4e8, copy_name(262144): 6e6,
    }  # fmt: skip
    out = against_limits(totals, seconds, limits)
    product, moved = out["product"]
    assert product == {
        "unit": FLOAT32, "amount": 4e9, "per_second": 4e10, "limit": FLOAT32, "limit_per_second": 1.6e11,
        "share": pytest.approx(0.25), "dense": 1e10,
    }  # fmt: skip
    assert moved["limit"] == "copy of 262144 bytes" and moved["share"] == pytest.approx(0.5)
    (decoded,), (encoded,) = out["entropy decoding"], out["entropy coding"]
    assert decoded["cycles"] == pytest.approx(6) and decoded["limit_cycles"] == pytest.approx(3)
    assert decoded["share"] == pytest.approx(0.5)
    assert decoded["gather_cycles"] == pytest.approx(2 * 20 / 16)  # a gather takes 20 cycles
    assert encoded["cycles"] == pytest.approx(10) and "gather_cycles" not in encoded
    assert out["positions"] == []


@pytest.mark.parametrize(
    ("touched", "size"), [(0, 1 << 17), (1 << 17, 1 << 17), ((1 << 17) + 1, 1 << 18), (1e12, 1 << 28)]
)
def test_copies_are_at_least_as_large_as_what_they_stand_for(touched: float, size: int) -> None:
    assert copy_bytes(touched) == size
    assert limit_of(BYTES, StageTotal(3, {BYTES: 3 * touched})) == copy_name(size)


def test_only_the_limits_that_are_needed_are_measured() -> None:
    assert list(probes([StageTotal(1, {})])) == [CYCLES]
    found = probes([StageTotal(1, {FLOAT32: 1.0, DENSE: 2.0, BYTES: 10.0}), StageTotal(1, {DECODED: 5.0, BYTES: 9.0})])
    assert set(found) == {CYCLES, FLOAT32, copy_name(1 << 17), DECODED, ENCODED, GATHERS}
    assert found[FLOAT32].amount == 2 * 1024**3 and found[DECODED].amount == found[ENCODED].amount == 2048 * 128
    assert found[copy_name(1 << 17)].amount % (1 << 17) == 0
    for probe in found.values():
        assert probe.seconds() > 0


def test_the_work_of_a_learned_profile(chunk: KVChunk, fitted: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply(Products.FLOAT32, monkeypatch)
    entry = measure_stages(ONCE, fitted, "balanced", chunk)
    encode, decode = amounts(entry, "encode"), amounts(entry, "decode")
    symbols = encode["entropy coding"][ENCODED]
    assert symbols == decode["entropy decoding, dequantize"][DECODED] + decode["read sections"].get(DECODED, 0)
    assert encode["gather"][BYTES] == TOKENS * VALUES * (2 + 4)
    assert decode["place"][BYTES] == TOKENS * VALUES * (2 + 4)
    section = VALUES // 2
    assert 0 < encode["product"][FLOAT32] <= 2 * 2 * TOKENS * section**2
    (product,) = (own for own in entry["decode"]["work"]["product"] if own["unit"] == FLOAT32)
    assert 0 < product["amount"] <= product["dense"] <= 2 * 2 * TOKENS * section**2
    multiply(Products.MIXED, monkeypatch)
    decode = amounts(measure_stages(ONCE, fitted, "balanced", chunk), "decode")
    assert decode["product"][PRODUCTS[torch.bfloat16]] > 0


def test_the_work_of_lossless_coding(layout: KVLayout, chunk: KVChunk) -> None:
    entry = measure_stages(ONCE, Profile.unlearned(layout), "lossless", chunk)
    encode, decode = amounts(entry, "encode"), amounts(entry, "decode")
    join = decode["entropy decoding, join, place"]
    assert encode["entropy coding"][ENCODED] == join[DECODED] and join[DECODED] % TOKENS == 0
    assert join[DECODED] + join[BYTES] == 2 * TOKENS * VALUES * 2  # a byte of input is coded or stored; then the output
    assert encode["split bytes"][BYTES] == 2 * 2 * TOKENS * VALUES


def test_a_stage_that_is_only_timed_has_no_work() -> None:
    assert count_work("arrange", (np.zeros(3, np.uint8),), None) == {}


def test_everything_is_as_before(layout: KVLayout, chunk: KVChunk, monkeypatch: pytest.MonkeyPatch) -> None:
    before = SectionCoding.classes, os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    measure_stages(ONCE, Profile.unlearned(layout), "lossless", chunk)

    def refuse(*args: Any) -> None:
        raise ValueError("no")

    monkeypatch.setattr(stages, "probes", refuse)
    with pytest.raises(ValueError, match="no"):
        measure_stages(ONCE, Profile.unlearned(layout), "lossless", chunk)
    after = SectionCoding.classes, os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    assert before == after and vars(backend)["Rotation"] is Rotation


def test_the_rest_is_what_no_stage_accounts_for() -> None:
    runs: defaultdict[str, list[float]] = defaultdict(list)
    for place, whole in ((1.0, 4.0), (2.0, 8.0), (1.5, 5.0)):
        stages._record(runs, defaultdict(float, place=place, product=1.0), 0.5, whole)
    assert runs["rest"] == [1.5, 4.5, 2.0]
    totals = {"place": StageTotal(1, {BYTES: 3.0}), "product": StageTotal(1, {FLOAT32: 8.0})}
    figures = stages._figures(runs, totals, {CYCLES: 1.0, FLOAT32: 32.0, copy_name(1 << 17): 4.0}, 10**9)
    assert figures["whole"] == 5.0 and figures["share_of_rest"] == pytest.approx(2.0 / 5.0)
    assert figures["seconds"] == {"place": 1.5, "product": 1.0, "container": 0.5, "rest": 2.0}
    assert figures["gb_per_s"] == {"place": 1 / 1.5, "product": 1.0, "container": 2.0}
    assert figures["work"]["place"][0]["share"] == 0.5 and figures["work"]["product"][0]["share"] == 0.25


def test_a_watch_adds_up_calls_and_counts_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(thread_time=iter([0.0, 1.0, 5.0, 7.5]).__next__)
    monkeypatch.setattr("cuvee.eval.bench.cpu.stages.time", clock)
    watch = stages._Watch()
    quantize = watch.wrap("quantize and pack", "quantize", lambda y, *_: y)
    for _ in range(2):
        quantize(np.zeros(4, np.float32))
    assert watch.seconds == {"quantize and pack": 3.5}
    totals = watch.count(lambda: [quantize(np.zeros(4, np.float32)) for _ in range(3)])
    assert totals == {"quantize and pack": StageTotal(3, {BYTES: 3 * 32})}
    assert watch.seconds == {"quantize and pack": 3.5}


def test_a_report_of_some_parts_prints(chunk: KVChunk, fitted: Profile) -> None:
    entry = {"cache": "some cache", "profile": "layer", **measure_stages(ONCE, fitted, "balanced", chunk)}
    hardware = {"cpu": "c", "cores": 1, "python": "3", "torch": "2", "numba": "0", "commit": "x", "date": "d"}
    report = {"hardware": hardware, "stages": [entry, entry]}
    text = cpu_markdown(report)
    assert text.count("## Stages and limits: some cache, layer, 64 tokens") == 2
    assert text.count("In turns on one core") == 1 and "GFLOP/s" in text and " cycles |" in text
    out = io.StringIO()
    print_cpu_report(report, Console(file=out, width=100))
    assert "…" not in out.getvalue() and max(map(len, out.getvalue().splitlines())) <= 100


def test_a_part_of_the_bench() -> None:
    report = cpu_bench.run_cpu_bench(quick=True, parts=("scaling",))
    assert report["scaling"] and not {"coders", "stages", "comparison", "memory"} & report.keys()
    assert cpu_markdown(report).count("\n## ") == 1
    done = CliRunner().invoke(app, ["bench", "cpu", "--only", "rans"])
    assert done.exit_code == 1 and "must be among coders, stages, whole" in " ".join(done.output.split())


def test_profiles_from_files_replace_those_that_are_learned(tmp_path: Path, fitted: Profile) -> None:
    cache = real_cache("books-3m", True)
    mine, other = tmp_path / "mine.safetensors", tmp_path / "other.safetensors"
    cache.profiles["layer"].save(mine)
    fitted.save(other)
    given = real_cache("books-3m", True, (mine, other))
    assert list(given.profiles) == ["mine"] and given.profiles["mine"].id == cache.profiles["layer"].id
    assert torch.equal(given.chunk.keys[0], cache.chunk.keys[0])
    with pytest.raises(InputError, match=r"^profile: must include one for books-3m, got .*other"):
        real_cache("books-3m", True, (other,))
