"""Test `cuvee profile`: learning from texts and mixtures, and showing a profile."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.conftest import fitted_profile
from tests.package.cli.running import Files, fails, misused, run
from tests.package.test_docs import parse

import cuvee
from cuvee.calibration import corpus, kinds
from cuvee.calibration.bundled import bundled_model_path
from cuvee.calibration.kinds import KINDS, LONG
from cuvee.cli.profile import LEAST_SEQUENCES, MIXTURE_SEQUENCES, QUICK_SEQUENCES
from cuvee.codec.errors import InputError
from cuvee.codec.models.fingerprint import model_fingerprint
from cuvee.codec.models.forward import prefill
from cuvee.codec.profiles.profile import Profile
from cuvee.integrations.stores import open_store
from cuvee.naming.identity import store_key

ALL_KINDS = (*KINDS[:7], LONG, *KINDS[7:])  # of a mixture


def test_profile_show(files: Files, tmp_path: Path, books: Any) -> None:
    profile = Profile.load(files.profile)
    data = json.loads(run("profile", "show", files.profile, "--json").stdout)
    assert data["id"] == profile.id.hex() and data["group"] == "layer" and data["presets"] == []
    assert data["bytes"] == files.profile.stat().st_size and len(data["curve"]) == len(profile.curve)
    assert (
        data["text_tokens"] == profile.text_tokens and data["layout"]["fingerprint"] == profile.layout.fingerprint.hex()
    )
    shown = run("profile", "show", files.profile).stdout
    assert profile.id.hex() in shown and f"learned from {profile.text_tokens} tokens" in shown
    first, *others = books.profile.curve
    books.profile.with_curve([replace(first, kl=12e-6, kl_stderr=34e-7), *others]).save(tmp_path / "small")
    fitted_profile("gqa", "all").save(tmp_path / "one")
    assert "0.0000120 ± 0.0000034" in run("profile", "show", tmp_path / "small").stdout
    assert "all: 1 section\n" in re.sub(" +\n", "\n", run("profile", "show", tmp_path / "one").stdout)
    fails("profile", "show", files.cache, match="not a cuvee profile")


@pytest.mark.parametrize("command", [["learn", "no/such/model"], ["pull", "no/such/model", "file:///no/such/folder"]])
def test_an_output_that_cannot_be_written_is_found_first(command: list[str], tmp_path: Path) -> None:
    fails("profile", *command, "-o", "/proc/x", match="/proc/x: must be in a folder that can be")
    fails("profile", *command, "-o", tmp_path, "--force", match="must be a file, got a folder")


def test_ctrl_c_keeps_what_the_same_command_goes_on_from(
    tmp_path: Path, books: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, seen = tmp_path / "p.safetensors", []
    learn = ("profile", "learn", "books-3m", "-o", out, "--length", "16", "--sequences", "27")

    def interrupted(*given: Any, **_: Any) -> Any:
        seen.append(given[1])
        raise KeyboardInterrupt

    def noted(*given: Any, **_: Any) -> Profile:
        seen.append(given[1])
        return cast(Profile, books.profile)

    monkeypatch.setattr(kinds, "more_text", lambda *_: books.harbour[:50, :16])  # reading all of it takes seconds
    with monkeypatch.context() as early:
        early.setattr(kinds, "mixture", interrupted)
        assert "was not written; the same command starts from the beginning" in run(*learn, code=130).stderr
        assert not [*tmp_path.iterdir()]
    seen.clear()
    calibrate = cuvee.calibrate
    monkeypatch.setattr(cuvee, "calibrate", interrupted)
    done = run(*learn, code=130)
    assert "p.safetensors was not written; the same command goes on from" in done.stderr and "sampling: " in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["p.safetensors.partial"]
    with monkeypatch.context() as real:
        real.setattr(cuvee, "calibrate", calibrate)
        assert "group: 'all' spans" in run(*learn, "--group", "all", code=1).stderr  # an error, too, keeps it
    assert [path.name for path in tmp_path.iterdir()] == ["p.safetensors.partial"]
    monkeypatch.setattr(kinds, "sample_text", lambda *_: 1 / 0)
    monkeypatch.setattr(cuvee, "calibrate", noted)
    assert f"going on from {out}.partial" in run(*learn).stderr
    assert Profile.load(out).id == books.profile.id and [*tmp_path.iterdir()] == [out]
    assert all(torch.equal(rows, seen[1][kind]) for kind, rows in seen[0].items()) and kinds.SAMPLES in seen[0]


def test_a_device_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    out = tmp_path / "p.safetensors"
    for device in ("gpu", "cuda:99"):
        fails("profile", "learn", "books-3m", "-o", out, "--device", device, match="--device: must be a device")


def test_what_needs_no_weights_is_checked_before_they_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "load_model", lambda *_: pytest.fail("the model was loaded"))
    for options, match in (
        (("--length", "4096"), "--length: must be at most 512, the model's positions, got 4096"),
        (("--group", "layer:2"), "group: must be one of head, unit, layer, layers:n"),
        (("--group", "all", "--sequences", "24", "--length", "64"), "group: 'all' spans 1536 values"),
    ):
        fails("profile", "learn", "books-3m", "-o", tmp_path / "p", *options, match=match)
    shutil.copy(bundled_model_path() / "config.json", tmp_path)
    fails("profile", "learn", tmp_path, "-o", tmp_path / "p", match="error: ")  # there is no tokenizer


def test_a_profile_is_learned(tmp_path: Path, books: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learn from the mixture and added texts, kind by kind, and prediction from a part of the bundled texts."""
    monkeypatch.setattr("cuvee.learning.curve.CURVE_STEP_INDICES", (-256, -128, 0))  # a few, for speed
    whole = kinds.more_text
    monkeypatch.setattr(kinds, "more_text", lambda *given: whole(*given)[::20])
    (tmp_path / "own.txt").write_text("It rained. " * 300)
    rows = [{"input_ids": row} for row in books.harbour[:4].tolist()]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n" + json.dumps(rows[0]["input_ids"]))
    out, texts = tmp_path / "profile", ("--text", tmp_path / "own.txt", "--text", tmp_path / "a.jsonl")
    learn = ("profile", "learn", bundled_model_path(), "-o", out)
    options = ("--length", "64", "--sequences", "24", "--group", "unit", "--dtype", "float32", *texts)
    learned = run(*learn, *options).stdout
    report = next(line for line in learned.splitlines() if line.startswith("Measure it"))
    parse(report.partition(":  ")[2])
    profile = Profile.load(out)
    assert profile.group == "unit" and profile.source == "calibrated" and profile.id.hex() in learned
    assert sorted(profile.curves) == sorted((*ALL_KINDS, "own.txt", "a.jsonl"))
    data = json.loads(run("profile", "show", out, "--json").stdout)
    assert data["id"] == profile.id.hex() and tuple(data["curves"]) == tuple(profile.curves)
    assert [p["kl"] for p in data["curves"]["code"]] == [p.kl for p in profile.curves["code"]]
    shown = run("profile", "show", out).stdout
    assert "±" in shown and "6 layers 2 x 64" in shown
    assert "presets go by the worst" in shown
    assert [p["kl"] for p in data["plain_curve"]] == [p.kl for p in profile.plain_curve] != []
    fails(*learn, *options, match="--force")
    (tmp_path / "bad.jsonl").write_text('{"text": 3}')
    q = ("-o", tmp_path / "q")
    for model, text, match in (
        (bundled_model_path(), "none", "none: no such text"),
        (bundled_model_path(), "bad.jsonl", "bad.jsonl:1"),
        (tmp_path / "nowhere", "own.txt", "nowhere"),
    ):
        fails("profile", "learn", model, *q, "--text", tmp_path / text, match=match)
    (tmp_path / "short.txt").write_text("It rained.")
    short = ("--text", tmp_path / "short.txt")
    fails("profile", "learn", bundled_model_path(), *q, *short, match="text: must hold at least 512 tokens")


def test_a_quick_profile_promises_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From fewer sequences, with a curve of every kind but the model's samples."""
    monkeypatch.setattr("cuvee.learning.curve.CURVE_STEP_INDICES", (-256, -192, -128, -64, 0))
    monkeypatch.setattr(kinds, "sample_text", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(kinds, "more_text", lambda *_: 1 / 0)
    out = tmp_path / "profile"
    done = run("profile", "learn", "books-3m", "-o", out, "--quick", "--length", "64", "--group", "unit")
    profile = Profile.load(out)
    assert "dtype " in done.stderr and MIXTURE_SEQUENCES == kinds.MIXTURE_SEQUENCES
    assert sorted(profile.curves) == sorted({*ALL_KINDS} - {kinds.SAMPLES}) and profile.token_table is None
    assert all(point.kl is not None for curve in profile.curves.values() for point in curve)
    steps = {kind: [point.step_index for point in profile.curves[kind]] for kind in ("prose", "reread")}
    assert steps == {"prose": [-256, -128, 0], "reread": [-256, 0]}
    assert profile.text_tokens is not None and 30 * 44 <= profile.text_tokens <= QUICK_SEQUENCES * 44


def test_a_profile_is_fitted_to_a_store(tmp_path: Path, books: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine finds it by the weights it names."""
    layout, ids = books.profile.layout, books.harbour[:8, :256]
    store = open_store(url := f"file://{tmp_path}/kv", guarded=False)
    for at, row in enumerate(ids):
        (cache,) = prefill(books.model, row[None], layout)
        codec = cuvee.Codec(Profile.unlearned(layout), "lossless", key=b"0123456789abcdef")
        digest = bytes([at]) * 32
        bound = store_key("salt", digest).encode()
        store.put(store_key("salt", digest, 0, codec.key_ids[0]), codec.encode(cache, associated_data=bound))
    store.close()
    monkeypatch.setenv("SECRET", "0123456789abcdef")
    out, fit = tmp_path / "profile", ("profile", "fit", bundled_model_path())
    tenant = ("--salt", "salt", "--key-env", "SECRET")
    fitted = run(*fit, url, *tenant, "--group", "unit", "-o", out).stdout
    profile = Profile.load(out)
    assert profile.id.hex() in fitted and (profile.source, profile.group) == ("fitted", "unit")
    assert profile.model == model_fingerprint(books.model) and profile.curve
    q = ("-o", tmp_path / "q")
    hashed = "cuvee.integrations.identity.weight_fingerprints.weight_fingerprints"
    monkeypatch.setattr(hashed, lambda *_: pytest.fail("the weights were read"))
    fails(*fit, url, *q, match="without a secret, got none")
    fails(*fit, "redis://127.0.0.1:1/0", *q, match="127.0.0.1:1")
    fails(*fit, "memory://", *q, match="url: must name a shared store")
    fails(*fit, url, *q, "--key-env", "NONE", match="NONE is not set")
    fails(*fit, url, *q, "--group", "layer:2", match="group: must be one of head")
    fails(*fit, url, "-o", out, match="--force")
    fails(*fit, url, *q, match="without a secret, got none")
    fails(*fit, url, *q, *tenant, "--group", "no", match="group: must be one of")
    fails(*fit, url, *q, *tenant, "--ranks", "7", match="7")


def test_what_the_options_of_learning_mean(tmp_path: Path, books: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, str, dict[str, Any]]] = []

    def calibrate(model: Any, tokens: Any, group: str, **arguments: Any) -> Profile:
        calls.append((tokens, group, arguments | {"dtype": model.dtype}))
        return books.profile  # type: ignore[no-any-return]

    monkeypatch.setattr(cuvee, "calibrate", calibrate)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)  # of a CPU that is quicker in float32
    (tmp_path / "prose").write_text("It rained. " * 3000)
    (tmp_path / "a=b").write_text("It snowed. " * 3000)
    learn = ("profile", "learn", bundled_model_path(), "--length", "64")
    number = iter(range(100))

    def learned(*options: str | Path) -> tuple[Any, str, dict[str, Any]]:
        run(*learn, "-o", tmp_path / f"p{next(number)}", *options)
        return calls[-1]

    # The default is the mixture; an added kind replaces one of the same name.
    tokens, group, arguments = learned("--sequences", "40", "--text", tmp_path / "prose", "--text", tmp_path / "a=b")
    assert list(tokens) == [*ALL_KINDS, "a=b"] and group == "auto"
    defaults = {"batch_size": 4, "seed": 0, "tensor_parallel": False, "step_indices": None}
    more = arguments.pop("more_text")
    assert more.shape[1] == 64 and len(more) > 10 * 40, "all bundled texts, to predict from tokens"
    assert arguments.pop("progress").keeps
    assert arguments == {**defaults, "dtype": torch.float32}
    assert {kind: len(tokens[kind]) for kind in ("prose", "code", "a=b")} == {"prose": 10, "code": 8, "a=b": 10}
    assert len({tuple(row[4:8].tolist()) for row in tokens["prose"]}) <= 4, "one sentence over and over"
    # Neither is looked at below: reading all texts, and having the model write some, takes seconds.
    monkeypatch.setattr(kinds, "more_text", lambda *_: more)
    monkeypatch.setattr(kinds, "sample_text", lambda *_, **__: tokens[kinds.SAMPLES])
    _, group, arguments = learned("--sequences", "24", "--group", "unit", "--dtype", "bfloat16")
    assert (group, arguments["dtype"]) == ("unit", torch.bfloat16)
    assert learned("--sequences", "24", "--tensor-parallel")[2]["tensor_parallel"] is True
    fails(*learn, "-o", tmp_path / "q", "--text", tmp_path / "none", match="no such text")
    # These fail before a model is looked for.
    missing = ("profile", "learn", tmp_path / "none", "-o", tmp_path / "q")
    few = misused(*missing, "--sequences", "23", "--length", "64")
    assert "Invalid value for '--sequences'" in few and str(LEAST_SEQUENCES) in few
    kinds.check_mixture_size(LEAST_SEQUENCES, 8)
    with pytest.raises(InputError, match=r"^sequences: must be at least 24, got 23"):
        kinds.check_mixture_size(LEAST_SEQUENCES - 1, 8)
