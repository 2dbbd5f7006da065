"""`cuvee bench pages`: what it says is what the methods do, and nothing is said of pages that did not come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from tests.recognizing import TOKENS, cached, ids_of, learned_profile, small_model

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import CuveeError, InputError
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.learning.calibrate import fit
from cuvee.eval.bench.pages import pages_bench
from cuvee.eval.bench.pages.page_methods import ARRANGEMENTS, CopiedPages, HostPages, StoredPages
from cuvee.eval.bench.pages.pages_bench import COPY, QUICK_ROUNDS, QUICK_TOKENS, ZSTD, run_pages_bench
from cuvee.eval.bench.pages.pages_tables import pages_markdown, print_pages_report
from cuvee.integrations.pages import PageStore

LAYOUT = KVLayout(
    "test", (LayerLayout(2, 16, 16, Rope(tuple(10.0 ** -(i / 2) for i in range(8)))),) * 3, "bfloat16", 4096
)


def chunk(tokens: int, seed: int = 0) -> KVChunk:
    generator = torch.Generator().manual_seed(seed)
    widths = 2.0 ** -torch.arange(16)
    units = [(torch.randn(tokens, 2, 16, generator=generator) * widths).bfloat16() for _ in range(6)]
    return KVChunk(units[:3], units[3:], LAYOUT, 256)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of no model, which are there at once."""
    monkeypatch.setattr(pages_bench, "model_chunk", lambda name, tokens: chunk(tokens))


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_pages_lie_as_the_arrangement_says(arrangement: str) -> None:
    own = chunk(32)
    host = HostPages(own, 8, arrangement)
    back = host.cache.read(host.slots, 256)
    assert all(map(torch.equal, back.keys + back.values, own.keys + own.values))
    for page, units in enumerate(host.pages):
        for unit, layers in zip(units, (own.keys, own.values), strict=True):
            wanted = torch.stack([layer[8 * page : 8 * page + 8] for layer in layers])
            assert torch.equal(unit, wanted)
    of_layers, of_tokens, *_ = host.pages[0][0].stride()
    assert (of_tokens > of_layers) == (arrangement == "page_first"), "tokens come first there"
    host.erase()
    assert not host.cache.read(host.slots, 256).keys[0].any()


def test_the_report(model: None, tmp_path: Path) -> None:
    profile = fit(LAYOUT, [chunk(128, seed) for seed in range(1, 9)], "layer")
    path = tmp_path / "profile.safetensors"
    profile.save(path)
    report = run_pages_bench("any", path, (64, 256), quick=True)
    assert [(case["page_tokens"], case["arrangement"], case["pages"]) for case in report["cases"]] == [
        (size, arrangement, QUICK_TOKENS // size) for size in (64, 256) for arrangement in ARRANGEMENTS
    ]
    for case in report["cases"]:
        methods = {entry["method"]: entry for entry in case["methods"]}
        alone = [name for name in methods if name.endswith(", a blob per page")]
        assert len(methods) == 7 + len(alone) and len(alone) == (4 if case["page_tokens"] == 64 else 0)
        assert "cuvee balanced, a call per blob" in methods
        assert methods[COPY]["bits_per_value"] == 16
        assert methods["cuvee balanced"]["bits_per_value"] < methods["cuvee lossless"]["bits_per_value"] < 16
        for entry in methods.values():
            for way in ("save", "load"):
                assert entry[f"{way}_mb_per_s"]["median"] > 0 and entry[f"{way}_over_zstd"]["runs"] == QUICK_ROUNDS
        assert methods[ZSTD]["load_over_zstd"]["median"] == 1
    console = Console(record=True, width=200)
    print_pages_report(report, console)
    text, markdown = console.export_text(), pages_markdown(report)
    for shown in (
        "page_first_direct",
        "cuvee balanced, a blob per page",
        "cuvee balanced, a call per blob",
        "zstd -1, byte planes",
        "one thread",
    ):
        assert shown in text and shown in markdown
    assert markdown.startswith("# cuvee bench pages")
    (entry, _) = report["recognition"]
    # The keys of this cache are noise, and its profile has no token table.
    assert (entry["tokens"], entry["chunks"], entry["ids"], entry["positions"]) == (64, QUICK_TOKENS // 64, 0, 0)
    assert "What recognition finds" in text and "What recognition finds" in markdown


def test_what_is_recognized_is_counted() -> None:
    told = cached(small_model())
    ids = np.array(ids_of(range(TOKENS)))
    told = KVChunk(told.keys, told.values, told.layout, told.start, ids)
    found = pages_bench._recognition(learned_profile(), told, 100)
    assert (found["chunks"], found["ids"], found["positions"]) == (3, 1, 1) and found["mb_per_s"]["median"] > 0
    ids[5] = 0
    moved = KVChunk(told.keys, told.values, told.layout, told.start + 1, ids)
    found = pages_bench._recognition(learned_profile(), moved, 100)
    assert (found["ids"], found["positions"]) == (1 - 1 / TOKENS, 0)


def test_a_call_saves_so_many_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    own, calls = chunk(64), []
    host = HostPages(own, 8, "page_first")
    saving = PageStore.save

    def save(self: PageStore, cache: Any, slots: torch.Tensor, names: Any, start: int) -> list[bool]:
        calls.append((len(names), start, slots.tolist()))
        return saving(self, cache, slots, names, start)

    monkeypatch.setattr(PageStore, "save", save)
    stored = StoredPages.open(host, Codec.without_profile(LAYOUT), 8, 2, own.start, call_pages=3)
    stored.save()
    host.erase()
    stored.load()
    stored.pages.close()
    first = own.start
    assert [call[:2] for call in calls] == [(3, first), (3, first + 24), (2, first + 48)]
    assert [slot for call in calls for slot in call[2]] == list(range(64))
    back = host.cache.read(host.slots, first)
    assert all(map(torch.equal, back.keys + back.values, own.keys + own.values))


def test_without_a_profile_only_lossless_is_measured(model: None) -> None:
    (case, *_) = run_pages_bench("any", None, (256,), quick=True)["cases"]
    assert [entry["method"] for entry in case["methods"]] == [COPY, ZSTD, "cuvee lossless"]


@pytest.mark.parametrize("sizes", [(100,), (0,), (64, 1024)])
def test_pages_must_divide_what_is_read(sizes: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=f"page_tokens: must divide {QUICK_TOKENS}"):
        run_pages_bench("any", None, sizes, quick=True)


def test_a_profile_of_another_model_is_refused(model: None, tmp_path: Path) -> None:
    other = KVLayout("other", LAYOUT.layers, "bfloat16", 4096)
    samples = [KVChunk(each.keys, each.values, other) for each in (chunk(64, seed) for seed in range(1, 9))]
    fit(other, samples, "layer").save(tmp_path / "p")
    with pytest.raises(InputError, match="profile: must be one for any"):
        run_pages_bench("any", tmp_path / "p", (256,), quick=True)


def test_pages_that_do_not_come_back_are_no_result(model: None, monkeypatch: pytest.MonkeyPatch) -> None:
    load = CopiedPages.load

    def forgetful(self: Any) -> None:
        load(self)
        self._host.pages[0][1][0].zero_()

    monkeypatch.setattr(CopiedPages, "load", forgetful)
    with pytest.raises(CuveeError, match=r"did not give back its pages"):
        run_pages_bench("any", None, (256,), quick=True)
