"""`cuvee bench pages`: what it says is what the methods do, and nothing is said of pages that did not come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import CuveeError, InputError
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.learning.calibrate import fit
from cuvee.eval.bench.pages import pages_bench
from cuvee.eval.bench.pages.page_methods import ARRANGEMENTS, CopiedPages, HostPages
from cuvee.eval.bench.pages.pages_bench import COPY, QUICK_ROUNDS, QUICK_TOKENS, ZSTD, run_pages_bench
from cuvee.eval.bench.pages.pages_tables import pages_markdown, print_pages_report

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
        assert len(methods) == 6 + len(alone) and len(alone) == (4 if case["page_tokens"] == 64 else 0)
        assert methods[COPY]["bits_per_value"] == 16
        assert methods["cuvee balanced"]["bits_per_value"] < methods["cuvee lossless"]["bits_per_value"] < 16
        for entry in methods.values():
            for way in ("save", "load"):
                assert entry[f"{way}_mb_per_s"]["median"] > 0 and entry[f"{way}_over_zstd"]["runs"] == QUICK_ROUNDS
        assert methods[ZSTD]["load_over_zstd"]["median"] == 1
    console = Console(record=True, width=200)
    print_pages_report(report, console)
    text, markdown = console.export_text(), pages_markdown(report)
    for shown in ("page_first_direct", "cuvee balanced, a blob per page", "zstd -1, byte planes", "one thread"):
        assert shown in text and shown in markdown
    assert markdown.startswith("# cuvee bench pages")


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
