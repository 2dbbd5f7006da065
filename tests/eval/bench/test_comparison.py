"""cuvee beside what a user would take instead: what each method stores and gives back, and what is left out."""

from __future__ import annotations

import argparse
import io
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from cuvee.codec.errors import CuveeError, InputError
from cuvee.codec.layout import KVLayout, LayerLayout
from cuvee.codec.learning.calibrate import fit
from cuvee.codec.models.forward import prefill
from cuvee.eval.bench.cpu import caches, comparison
from cuvee.eval.bench.cpu import cpu_bench as run
from cuvee.eval.bench.cpu.alternatives import (
    ALTERNATIVES,
    ZSTD_METHOD,
    Alternative,
    Coder,
    FlatCache,
    Part,
    merge_bytes,
    split_bytes,
)
from cuvee.eval.bench.cpu.caches import BenchCache, real_cache
from cuvee.eval.bench.cpu.cases import CPU_SHAPES, make_chunk
from cuvee.eval.bench.cpu.comparison import compare, run_rounds
from cuvee.eval.bench.shapes import CacheShape
from cuvee.eval.machine import hardware

BY_NAME = {method.name: method for method in ALTERNATIVES}
EXACT = [method.name for method in ALTERNATIVES if method.exact]
FP8 = ["FP8, torch's cast", "FP8, by table"]
UNEVEN = KVLayout(
    "synthetic",
    (LayerLayout(2, 12, 20, None), LayerLayout(1, 30, 7, None), LayerLayout(3, 5, 5, None), LayerLayout(3, 5, 5, None)),
    "bfloat16",
    None,
)


@cache
def small_cache(tokens: int = 64) -> BenchCache:
    layout = CacheShape(2, 2, 16, 1e4).layout()
    profile = fit(layout, [make_chunk(layout, 200, seed) for seed in range(8)], "layer")
    return BenchCache("small", False, make_chunk(layout, tokens, seed=20), {"layer": profile})


def coded(name: str, values: torch.Tensor, heads: int = 1) -> tuple[torch.Tensor, Coder]:
    """Send values `[N]` through a method, as one unit; returns what comes back."""
    units = values.view(1, -1, heads, 1)
    back = torch.full_like(values, math.nan)
    coder = BY_NAME[name].make(Part(values, (units,)), Part(back, (back.view(units.shape),)))
    coder.encode()
    coder.decode()
    return back, coder


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize("tokens", [1, 5, 64])
@pytest.mark.parametrize("parts", [1, 2, 3, 9])
def test_a_flat_cache_is_the_chunk(tokens: int, parts: int) -> None:
    chunk = make_chunk(UNEVEN, tokens)
    cache = FlatCache.copy_of(chunk)
    for own, other in zip(cache.chunk.keys + cache.chunk.values, chunk.keys + chunk.values, strict=True):
        assert same_bits(own, other)
    cut = cache.parts(parts)
    assert len(cut) == min(parts, 4)
    assert same_bits(torch.cat([part.values for part in cut]), cache.values)
    for part in cut:
        assert same_bits(torch.cat([run.flatten() for run in part.runs]), part.values)
    layers = zip(chunk.keys, chunk.values, strict=True)
    units = [unit for part in cut for run in part.runs for unit in run]
    assert all(same_bits(unit, other) for unit, other in zip(units, (u for pair in layers for u in pair), strict=True))


def test_alike_units_are_one_run() -> None:
    cache = FlatCache(UNEVEN, 7)
    assert [tuple(run.shape) for run in cache.parts(1)[0].runs] == [
        (1, 7, 2, 12), (1, 7, 2, 20), (1, 7, 1, 30), (1, 7, 1, 7), (4, 7, 3, 5),
    ]  # fmt: skip


def test_only_bfloat16_is_compared() -> None:
    with pytest.raises(InputError, match=r"^layout.*bfloat16"):
        FlatCache(replace(UNEVEN, dtype="float16"), 3)


@pytest.mark.parametrize("size", [0, 1, 63, 1000])
def test_bytes_are_split_and_merged(size: int) -> None:
    words = np.random.default_rng(size).integers(0, 1 << 16, size).astype(np.uint16)
    planes, back = np.full(2 * size, 7, np.uint8), np.full(size, 7, np.uint16)
    split_bytes(words, planes)
    assert planes.tolist() == [word >> 8 for word in words.tolist()] + [word & 255 for word in words.tolist()]
    merge_bytes(planes, back)
    assert np.array_equal(back, words)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("size", [1, 63, 4096])
def test_exact_methods_give_every_bit_back(name: str, size: int) -> None:
    words = torch.randint(-(1 << 15), 1 << 15, (size,), generator=torch.Generator().manual_seed(size))
    values = words.to(torch.int16).view(torch.bfloat16)  # NaN payloads, infinities, both zeros
    back, coder = coded(name, values)
    assert same_bits(back, values) and coder.stored_bytes() >= size
    zeros = torch.zeros(size, dtype=torch.bfloat16)
    assert same_bits(coded(name, zeros)[0], zeros)


@pytest.mark.parametrize("name", [name for name in EXACT if name != "memcpy"])
def test_compressors_compress(name: str) -> None:
    values = torch.randn(20000, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert coded(name, values)[1].stored_bytes() < 0.95 * values.nbytes


@pytest.mark.parametrize("name", FP8)
def test_fp8_scales_each_head(name: str) -> None:
    # Two heads a thousandfold apart: with one scale for both the smaller one would lose nearly everything.
    noise = torch.randn(512, 2, generator=torch.Generator().manual_seed(1))
    values = (noise * torch.tensor([1.0, 1e-3])).bfloat16().flatten()
    back, coder = coded(name, values, heads=2)
    for head in (0, 1):
        own, other = values.view(-1, 2)[:, head].float(), back.view(-1, 2)[:, head].float()
        assert 0.01 < float((own - other).norm() / own.norm()) < 0.04
    assert coder.stored_bytes() == len(values) + 2 * 2


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("values", [[0.0] * 8, [1.0, -3e38, 0.0, 2e38], [1e-40, 0.0], [449.0, 447.0, -1.0]])
def test_fp8_never_overflows(name: str, values: list[float]) -> None:
    given = torch.tensor(values).bfloat16()
    back, _ = coded(name, given)
    assert torch.isfinite(back).all()
    assert float((back.float() - given.float()).abs().max()) <= 0.04 * float(given.float().abs().max()) + 1e-30


def test_both_fp8_rows_restore_the_same() -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert same_bits(coded(FP8[0], values)[0], coded(FP8[1], values)[0])


def test_threads_store_the_same_values() -> None:
    entry = compare(small_cache(), 64, (1, 2, 3), 1)
    for row in entry["methods"]:
        assert [one["threads"] for one in row["by_threads"]] == [1, 2, 3]
        assert row["by_threads"][2]["bits_per_value"] == pytest.approx(row["bits_per_value"], rel=0.2)


def test_lossless_is_set_beside_zstd(monkeypatch: pytest.MonkeyPatch) -> None:
    def injected(calls: Mapping[Any, Any], rounds: int) -> dict[Any, list[float]]:
        seconds = {"cuvee lossless": [2.0, 4.0, 5.0], ZSTD_METHOD: [3.0, 8.0, 5.0]}
        return {key: seconds.get(key[0], [1.0] * 3) for key in calls}

    monkeypatch.setattr(comparison, "run_rounds", injected)
    entry = compare(small_cache(), 64, (1, 2), 3)
    bits = {row["method"]: [one["bits_per_value"] for one in row["by_threads"]] for row in entry["methods"]}
    for index, own in enumerate(entry["lossless_over_zstd"]):
        assert own["threads"] == index + 1
        assert own["decode"]["median"] == own["encode"]["median"] == 1.5  # of 1.5, 2 and 1, within rounds
        assert own["bytes"] == pytest.approx(bits["cuvee lossless"][index] / bits[ZSTD_METHOD][index])
    table = run._over_zstd([{"cache": "smollm2", "skipped": "not downloaded"}, entry])
    assert [row[:3] for row in table.rows] == [["small, 64 tokens", str(n), "1.50 (1.20-1.80)"] for n in (1, 2)]
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert compare(small_cache(), 16, (1,), 1)["lossless_over_zstd"] is None


def test_one_number_of_threads_has_no_scaling() -> None:
    entry = compare(small_cache(), 16, (1,), 1)
    assert all(row["most_over_fewest_threads"] is None for row in entry["methods"])
    header = run._compared(entry).columns
    assert "dec 1" in header and not any("/1" in column for column in header)


@pytest.mark.parametrize("threads", [(), (2, 1), (1, 1), (0, 1)])
def test_threads_out_of_order(threads: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"^threads: must rise"):
        compare(small_cache(), 16, threads, 1)
    with pytest.raises(InputError, match=r"^threads: must rise"):
        run.run_cpu_bench(quick=True, threads=threads)


@pytest.mark.parametrize("method", [method for method in ALTERNATIVES if method.module], ids=lambda m: m.package)
def test_a_missing_package_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch, method: Alternative) -> None:
    monkeypatch.setitem(sys.modules, str(method.module), None)
    entry = compare(small_cache(), 16, (1,), 1)
    skipped = [row for row in entry["methods"] if "skipped" in row]
    why = f"{method.package} is not installed: pip install {method.package}"
    assert skipped == [{"method": method.name, "exact": True, "skipped": why}]
    assert [row["method"] for row in entry["methods"]][: len(ALTERNATIVES)] == list(BY_NAME)
    table = run._compared(entry)
    assert [f"{method.name}: skipped, {why}"] == [row[0] for row in table.rows if "skipped" in row[0]]


class Broken:
    """Restores other values than it got."""

    def __init__(self, source: Part, target: Part) -> None:
        self.source, self.target = source.values, target.values

    def encode(self) -> None:
        pass

    def decode(self) -> None:
        self.target.copy_(self.source)
        self.target[3] += 1

    def stored_bytes(self) -> int:
        return 1


class Idle(Broken):
    """Restores nothing."""

    def decode(self) -> None:
        pass


@pytest.mark.parametrize(("broken", "exact"), [(Broken, True), (Idle, True), (Idle, False)])
def test_a_wrong_method_is_not_timed(monkeypatch: pytest.MonkeyPatch, broken: type[Broken], exact: bool) -> None:
    def untimed(*arguments: Any) -> None:
        raise AssertionError("timed")

    monkeypatch.setattr(comparison, "ALTERNATIVES", (Alternative("broken", exact, broken),))
    monkeypatch.setattr(comparison, "run_rounds", untimed)
    with pytest.raises(CuveeError, match="broken did not return its input"):
        compare(small_cache(), 16, (1,), 1)


def test_rounds_go_forwards_and_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "LEAST_SAMPLE", 0.0)
    seen: list[str] = []
    times = run_rounds({name: lambda name=name: seen.append(name) for name in "abc"}, 3)  # type: ignore[misc]
    assert "".join(seen) == "aabbcc" + "abc" + "cba" + "abc"
    assert {name: len(runs) for name, runs in times.items()} == {"a": 3, "b": 3, "c": 3}


def test_short_calls_are_repeated_within_a_round() -> None:
    calls: list[int] = []
    (runs,) = run_rounds({"a": lambda: calls.append(1)}, 2).values()
    assert len(calls) > 100 and all(0 < seconds < 1e-3 for seconds in runs)


def test_what_others_do_meanwhile_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of 3 s in which two cores were busy for 4 s, this process took 1 s.
    monkeypatch.setattr(comparison, "_busy_seconds", iter([100.0, 104.0]).__next__)
    clocks = SimpleNamespace(perf_counter=iter([7.0, 10.0]).__next__, process_time=iter([0.5, 1.5]).__next__)
    monkeypatch.setattr("cuvee.eval.bench.cpu.comparison.time", clocks)
    assert comparison._CoresOfOthers().since_then() == 1.0


def test_what_others_do_may_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "_busy_seconds", lambda: None)
    entry = compare(small_cache(), 16, (1,), 1)
    assert entry["cores_used_by_others"] is None
    assert "others" not in run._compared(entry).title
    entry["cores_used_by_others"] = 0.94
    assert "others used 0.9 cores" in run._compared(entry).title


def listed(models: tuple[str, ...], quick: bool) -> list[dict[str, Any]]:
    def of_model(model: str) -> BenchCache:
        made: BenchCache = vars(run)["real_cache"](model, quick)
        return made

    return run._compare_on_models(models, quick, (1,), 1, lambda line: None, of_model)


@pytest.fixture
def small_caches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """What caches are asked for, which are small ones here."""
    asked: list[tuple[str, bool]] = []

    def make(model: str, quick: bool) -> BenchCache:
        asked.append((model, quick))
        return replace(small_cache(256), name=model, real=True)

    monkeypatch.setattr(run, "real_cache", make)
    return asked


def test_the_real_model_is_compared_where_it_is_at_hand(
    monkeypatch: pytest.MonkeyPatch, small_caches: list[tuple[str, bool]]
) -> None:
    monkeypatch.setattr(run, "smollm2_at_hand", lambda: True)
    assert [entry["cache"] for entry in listed((), False)] == ["books-3m", "books-3m", "smollm2", "smollm2"]
    assert small_caches == [("books-3m", False), ("smollm2", False)]
    monkeypatch.setattr(run, "smollm2_at_hand", lambda: False)
    assert listed((), False)[2:] == [{"cache": "smollm2", "skipped": "not downloaded; --model smollm2 does that"}]


def test_models_that_are_named(monkeypatch: pytest.MonkeyPatch, small_caches: list[tuple[str, bool]]) -> None:
    monkeypatch.setattr(run, "smollm2_at_hand", lambda: False)  # it is asked for, so it is fetched
    assert [entry["cache"] for entry in listed(("smollm2",), True)] == ["smollm2", "smollm2"]
    assert small_caches == [("smollm2", True)]


def test_without_transformers_a_cache_is_skipped_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "a model needs transformers: install cuvee[transformers]"

    def refuse(model: str, quick: bool) -> BenchCache:
        raise ImportError(why)

    monkeypatch.setattr(run, "real_cache", refuse)
    assert listed((), True)[0] == {"cache": "books-3m", "skipped": why}
    with pytest.raises(ImportError, match="transformers"):
        listed(("books-3m",), True)


def test_a_report_is_shown_with_what_was_left_out() -> None:
    entry = compare(small_cache(), 16, (1, 4), 1)
    report = {"hardware": hardware(), "comparison": [{"cache": "smollm2", "skipped": "not downloaded"}, entry]}
    shown = run.show_cpu(report)
    compared, over, left = shown.tables
    assert compared.columns.count("4/1") == 2 and len({len(row) for row in compared.rows}) == 1
    assert over.title == f"cuvee lossless / {ZSTD_METHOD}" and left.rows == [["smollm2", "not downloaded"]]
    out = io.StringIO()
    shown.print(Console(file=out, width=140))
    assert "zstd" in out.getvalue() and "…" not in out.getvalue()
    text = shown.markdown()
    assert text.startswith("# The codec on a CPU\n") and "\n\n\n" not in text
    for block in text.split("\n\n"):
        if block.startswith("|"):
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1, block


def test_what_the_methods_store() -> None:
    rows = {row["method"]: row for row in compare(small_cache(256), 256, (1,), 1)["methods"]}
    assert list(rows) == [*BY_NAME, "cuvee lossless", "cuvee balanced, layer"]
    for row in rows.values():
        assert (row["relative_error"] == 0) is row["exact"]
        assert row["by_threads"][0]["encode_gb_per_s"]["median"] > 0 < row["by_threads"][0]["decode_gb_per_s"]["median"]
    bits = {name: row["bits_per_value"] for name, row in rows.items()}
    assert bits.pop("memcpy") == 16 and all(0 < other < 17 for other in bits.values())
    assert 8 < bits["FP8, by table"] == bits["FP8, torch's cast"] < 8.1


def test_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    run.cpu_options(parser)
    given = parser.parse_args(["--quick", "-m", "a", "-m", "b", "--profile", "p", "--threads", "4", "--threads", "2"])
    asked: list[Any] = []
    monkeypatch.setattr(run, "run_cpu_bench", lambda *arguments: asked.extend(arguments))
    run.measure_cpu(given, Console())
    assert asked[:4] == [True, ["a", "b"], (2, 4), [Path("p")]]


def test_synthetic_caches_repeat() -> None:
    layout = CPU_SHAPES["books-3m"].layout()
    a, b, c = make_chunk(layout, 5), make_chunk(layout, 5), make_chunk(layout, 5, seed=1)
    assert torch.equal(a.keys[3], b.keys[3]) and not torch.equal(a.keys[3], c.keys[3])


def test_a_real_cache_is_what_the_model_reads() -> None:
    cache = real_cache("books-3m", quick=True)
    assert cache.real and cache.chunk.tokens == 256 and cache.chunk.start == caches.SKIPPED
    assert cache.chunk.layout.dtype == "bfloat16" and {g: p.source for g, p in cache.profiles.items()} == {
        "layer": "fitted"
    }


@pytest.mark.slow
def test_smollm2_is_compared_on_its_own_cache(smollm2: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = smollm2
    monkeypatch.setitem(caches.LOADERS, "smollm2", lambda: smollm2)
    cache = real_cache("smollm2", quick=True)
    entry = compare(cache, 64, (1,), 1)
    assert entry["real"] and entry["layers"] == 30 and entry["raw_bytes"] == 64 * 30 * 2 * 3 * 64 * 2
    bits = {row["method"]: row["bits_per_value"] for row in entry["methods"]}
    assert bits["cuvee balanced, layer"] < 3 < bits["cuvee lossless"] < bits["zstd -1, byte planes"] < 12
    from cuvee.calibration.bundled import bundled_text

    ids = torch.tensor(tokenizer(bundled_text("orchard")).input_ids)[None, :512]
    with torch.no_grad():
        read = prefill(model, ids, cache.chunk.layout)[0].slice(256, 512)
    assert torch.equal(read.keys[0], cache.chunk.keys[0]) and torch.equal(read.values[29], cache.chunk.values[29])
