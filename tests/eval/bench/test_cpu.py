"""The codec beside alternatives: what each method stores and gives back, and that nothing wrong is timed."""

from __future__ import annotations

import io
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.conftest import fitted_profile

import cuvee
from cuvee.codec.errors import CuveeError, InputError, ProfileMismatchError
from cuvee.codec.layout import KVLayout, LayerLayout
from cuvee.eval.bench import cpu
from cuvee.eval.bench.cpu import LOSSLESS, MEMCPY, ZSTD, BenchCache, FlatCache, compare, make_chunk, methods_of
from cuvee.eval.bench.shapes import llama_layout
from cuvee.eval.machine import hardware


@cache
def small_cache() -> BenchCache:
    layout = llama_layout(2, 2, 16, 1e4)
    profile = cuvee.fit(layout, [make_chunk(layout, 200, seed) for seed in range(8)], "layer")
    return BenchCache("small", make_chunk(layout, 64, seed=20), profile)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def coded(name: str, values: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Send values `[T, H, D]` through a method as the keys of a layer; returns them back, and the bytes stored."""
    _, heads, size = values.shape
    layout = KVLayout("synthetic", (LayerLayout(heads, size, size, None),), "bfloat16", None)
    source, target = FlatCache(layout, len(values)), FlatCache(layout, len(values))
    for unit in source.units:
        unit.copy_(values)
    target.values.fill_(math.nan)
    profile = cuvee.Profile.unlearned(layout)
    method = methods_of(source, target, profile)[name]
    method.encode()
    method.decode()
    return target.units[0], method.stored_bytes()


def test_only_bfloat16_is_compared() -> None:
    with pytest.raises(InputError, match=r"^layout.*bfloat16"):
        FlatCache(KVLayout("synthetic", (LayerLayout(2, 12, 20, None),), "float16", None), 3)


@pytest.mark.parametrize("name", [MEMCPY, ZSTD, LOSSLESS])
def test_exact_methods_give_every_bit_back(name: str) -> None:
    words = torch.randint(-(1 << 15), 1 << 15, (63, 3, 5), generator=torch.Generator().manual_seed(1))
    values = words.to(torch.int16).view(torch.bfloat16)  # NaN payloads, infinities, both zeros
    assert same_bits(coded(name, values)[0], values)


def test_fp8_scales_each_head_and_never_overflows() -> None:
    # Two heads a thousandfold apart: with one scale for both the smaller one would lose nearly everything.
    noise = torch.randn(512, 2, 4, generator=torch.Generator().manual_seed(1))
    values = (noise * torch.tensor([1.0, 1e-3])[:, None]).bfloat16()
    values[0] = torch.tensor([3e38, -1e-30])[:, None].expand(2, 4) * 0 + values[0]
    back, stored = coded("FP8 e4m3", values)
    for head in (0, 1):
        own, other = values[:, head].float(), back[:, head].float()
        assert 0.01 < float((own - other).norm() / own.norm()) < 0.04
    assert stored == 2 * (values.numel() + 2 * 2)  # keys and values, each with a scale of two bytes per head
    for extreme in ([0.0, 0.0], [-3e38, 2e38], [1e-40, 0.0], [449.0, 447.0]):
        given = torch.tensor(extreme).bfloat16()[:, None, None]
        back, _ = coded("FP8 e4m3", given)
        assert torch.isfinite(back).all()
        assert float((back.float() - given.float()).abs().max()) <= 0.04 * float(given.float().abs().max()) + 1e-30


def test_every_method_is_compared() -> None:
    entry = compare(small_cache(), 64, 1)
    rows = {row["method"]: row for row in entry["methods"]}
    assert list(rows) == [MEMCPY, "FP8 e4m3", ZSTD, LOSSLESS, "cuvee balanced, layer"]
    assert [row["error"] == 0 for row in rows.values()] == [True, False, True, True, False]
    bits = {name: row["bits_per_value"] for name, row in rows.items()}
    assert bits.pop(MEMCPY) == 16 and all(0 < other < 17 for other in bits.values()) and 8 < bits["FP8 e4m3"] < 8.3
    report = {"hardware": hardware(), "comparison": [entry]}
    out = io.StringIO()
    cpu.show_cpu(report).print(Console(file=out, width=140))
    assert "cuvee balanced, layer" in out.getvalue()


@pytest.mark.parametrize(("exact", "change"), [(True, 1.0), (False, math.nan)])
def test_a_wrong_method_is_not_timed(monkeypatch: pytest.MonkeyPatch, exact: bool, change: float) -> None:
    def broken(source: FlatCache, target: FlatCache) -> cpu.Method:
        return cpu.Method(exact, int, lambda: target.values.copy_(source.values + change), int)

    monkeypatch.setattr(cpu, "_memcpy", broken)
    monkeypatch.setattr(cpu, "run_rounds", lambda *_: pytest.fail("timed"))
    with pytest.raises(CuveeError, match="memcpy did not return its input"):
        compare(small_cache(), 16, 1)


def test_rounds_go_forwards_and_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "LEAST_SAMPLE", 0.0)
    seen: list[str] = []
    times = cpu.run_rounds({name: lambda name=name: seen.append(name) for name in "abc"}, 3)  # type: ignore[misc]
    assert "".join(seen) == "aabbcc" + "abc" + "cba" + "abc"
    assert {name: len(runs) for name, runs in times.items()} == {"a": 3, "b": 3, "c": 3}


def test_caches_of_models_and_their_profiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, books: Any) -> None:
    monkeypatch.setattr(cpu, "load_model", lambda *_: books.model)
    books.profile.save(tmp_path / "mine.safetensors")
    fitted_profile("gqa", "layer").save(tmp_path / "other.safetensors")
    found = cpu.real_cache("books-3m", tmp_path / "mine.safetensors")
    assert found.profile.id == books.profile.id and (found.chunk.tokens, found.chunk.start) == (256, cpu.SKIPPED)
    monkeypatch.setattr(cpu, "load_model", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(ProfileMismatchError):
        cpu.real_cache("books-3m", tmp_path / "other.safetensors")
