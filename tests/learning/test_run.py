"""A long run: the time that it still takes, and what it goes on from after an interruption."""

from __future__ import annotations

import copy
import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import tiny_model

from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.quality import CurvePoint
from cuvee.learning.calibrate import calibrate
from cuvee.learning.moments import Moments
from cuvee.learning.run import Run, key_of

PLACES = {  # what each stage calls once a batch, and the call that is interrupted
    "reading": ("cuvee.learning.token_model.prefill", 3),
    "calibrating": ("cuvee.learning.calibrate.sample_gradients", 4),
    "adding text": ("cuvee.learning.calibrate.prefill", 2),
    "measuring re-read text": ("cuvee.learning.curve.round_trip", 8),
}


def rows(count: int, seed: int) -> torch.Tensor:
    return torch.randint(1, 61, (count, 40), generator=torch.Generator().manual_seed(seed))


def learned(tiny: Any, run: Run, seed: int = 0) -> Profile:
    return calibrate(tiny, rows(20, 0), "unit", more_text=rows(12, 1), seed=seed, progress=run)


def counted(monkeypatch: pytest.MonkeyPatch, place: str, stop: int | None) -> list[int]:
    """Count the calls of a function, and interrupt one of them."""
    module, _, name = place.rpartition(".")
    calls: list[int] = []
    real = getattr(__import__(module, fromlist=[name]), name)

    def call(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == stop:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(place, call)
    return calls


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("cuvee.learning.curve.CURVE_STEP_INDICES", (-256, -128, 0))
    monkeypatch.setattr("cuvee.learning.token_model.TOKENS_PER_FEATURE", 8)
    for name in ("LEAST_PAUSE", "WRITING"):  # every batch is kept
        monkeypatch.setattr(f"cuvee.learning.run.{name}", -1.0)
    return copy.deepcopy(tiny_model("llama")).to(torch.bfloat16)


@pytest.mark.parametrize("stage", PLACES)
def test_an_interrupted_run_goes_on_to_the_same_profile(stage: str, tiny: Any, tmp_path: Path) -> None:
    place, stop = PLACES[stage]
    kept, files = tmp_path / "kept", [tmp_path / "whole", tmp_path / "resumed"]
    with pytest.MonkeyPatch.context() as patch:
        every = counted(patch, place, None)
        whole = learned(tiny, Run(shown=False))
    assert whole.token_table is not None and list(whole.curves) == ["text", "reread"] and len(every) >= stop
    whole.save(files[0])
    with pytest.MonkeyPatch.context() as patch:
        counted(patch, place, stop)
        with pytest.raises(KeyboardInterrupt):
            learned(tiny, Run(shown=False, keep=kept))
    run = Run(shown=False, keep=kept)
    assert str(kept) in run.kept()
    with pytest.MonkeyPatch.context() as patch:
        again = counted(patch, place, None)
        learned(tiny, run).save(files[1])
    assert len(again) == len(every) - stop + 1
    assert files[1].read_bytes() == files[0].read_bytes()
    run.finish()
    assert not kept.exists()


def test_what_is_damaged_or_of_another_run_is_named_and_not_used(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = tmp_path / "kept"
    learned(tiny, Run(shown=False, keep=kept))
    data, calls = kept.read_bytes(), counted(monkeypatch, "cuvee.learning.calibrate.sample_gradients", None)
    caplog.clear()
    learned(tiny, Run(shown=False, keep=kept))
    assert not calls and not caplog.records, "a run that had ended goes on from its end"
    with caplog.at_level(logging.WARNING):
        learned(tiny, Run(shown=False, keep=kept), seed=1)
        assert len(calls) == 5 and f"{kept}: is of other weights, texts or options" in caplog.text
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        for number, damaged in enumerate((data[:middle], b"", flipped)):
            kept.write_bytes(damaged)
            caplog.clear()
            learned(tiny, Run(shown=False, keep=kept))
            assert f"{kept}: is damaged, or was not kept by a run" in caplog.text
            assert len(calls) == 5 * (number + 2)


@pytest.mark.parametrize(
    ("keys", "stop", "goes_on"),
    [
        ((), None, True),
        (("other",), None, False),  # what comes later depends on it
        (("a", "other"), None, True),  # from the first part
        (("other", "b"), None, False),
        (("other",), "put", True),  # this run's own
    ],
)
def test_what_an_interrupted_run_says_that_it_goes_on_from(
    keys: tuple[str, ...], stop: str | None, goes_on: bool, tmp_path: Path
) -> None:
    before = Run(shown=False, keep=tmp_path / "kept")
    assert before.kept() == ""
    for part, key in (("samples", "a"), ("learning", "b")):
        before.begin(part, key)
        before.put("value", 1)
    run = Run(shown=False, keep=tmp_path / "kept")
    for part, key in zip(("samples", "learning"), keys, strict=False):
        run.begin(part, key)
    if stop:
        run.put("value", 2)
    assert bool(run.kept()) == goes_on
    (tmp_path / "kept").write_bytes(b"damaged")
    assert Run(shown=False, keep=tmp_path / "kept").kept() == ""


def test_a_key_is_of_the_texts_the_options_and_the_model() -> None:
    tiny, text = tiny_model("llama"), rows(2, 0)
    other, slow = copy.deepcopy(tiny).to(torch.bfloat16), copy.deepcopy(tiny)
    slow.model.rotary_emb.inv_freq /= 2  # in no weights
    keys = {
        key_of(tiny, "w2-a", 1, [("prose", text)]), key_of(tiny, "w2-b", 1, [("prose", text)]),
        key_of(tiny, "w2-a", 2, [("prose", text)]), key_of(tiny, "w2-a", 1, [("code", text)]),
        key_of(tiny, "w2-a", 1, [("prose", text + 1)]), key_of(tiny, "w2-a", 1, [("prose", text[:1])]),
        key_of(tiny, "w2-a", 1, [("prose", text.T)]), key_of(other, "w2-a", 1, [("prose", text)]),
        key_of(slow, "w2-a", 1, [("prose", text)]),
    }  # fmt: skip
    assert len(keys) == 9 and key_of(tiny, "w2-a", 1, [("prose", text.clone())]) in keys


def test_the_time_left_is_that_of_all_stages(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Of a stage from its own speed, of those to come from their cost at the speed so far."""
    now = [0.0]
    monkeypatch.setattr("cuvee.learning.run.time.monotonic", lambda: now[0])
    run = Run()
    run.expect(("reading", 100.0), ("measuring", 50.0), ("measuring", 350.0))
    for _ in run.stage("reading", range(10)):
        now[0] += 10
    for _ in run.stage("measuring", range(2)):
        now[0] += 10
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "reading: 1 of 10, 8 min left in all"  # 90 s, and 400 at a unit a second
    assert lines[9] == "reading: 10 of 10, 7 min left in all"
    assert lines[10:] == [
        "measuring: 1 of 2, 5 min left in all",  # 10 s, and 350 at 110 s for 125
        "measuring: 2 of 2, 5 min left in all",  # 350 at 120 s for 150
    ]
    for _ in run.stage("measuring", range(100)):
        now[0] += 1
    assert capsys.readouterr().err.splitlines()[-2:] == [
        "measuring: 90 of 100, 10 s left in all", "measuring: 100 of 100, 0 s left in all"
    ]  # fmt: skip


@pytest.mark.parametrize("keeps", [False, True])
def test_sums_are_gone_when_the_curve_is_measured(
    keeps: bool, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take gigabytes, and so do the predictions of a large vocabulary."""
    # `isinstance` would ask weak proxies, whose objects may be gone.
    alive: list[int] = []

    def counted_sums(profile: Profile, *_: Any, **__: Any) -> Profile:
        gc.collect()
        alive.append(sum(type(own) is Moments for own in gc.get_objects()))
        return profile.with_curve([CurvePoint(0, 1.0, 1e-2, 1e-3, kind="reread")], [40])

    monkeypatch.setattr("cuvee.learning.calibrate.measure", counted_sums)
    gc.collect()
    before = sum(type(own) is Moments for own in gc.get_objects())
    learned(tiny, Run(shown=False, keep=tmp_path / "kept" if keeps else None))
    assert alive == [before, before]
