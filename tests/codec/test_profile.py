"""Profiles: files that tell when they are damaged, ids, and the way from a wish to a step."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch
from tests.conftest import LAYOUTS, fitted_profile, fitted_to, synthetic_chunk
from tests.predicting import VOCABULARY, predicting

from cuvee.codec.codec import Codec
from cuvee.codec.entropy.token_classes import class_frequencies
from cuvee.codec.errors import FormatError, InputError, ProfileError, VersionError
from cuvee.codec.profiles import profile_file
from cuvee.codec.profiles.class_predictor import MAX_DISTANCES, MAX_SINKS, Predictor
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.profile_file import arrays_of, metadata_of, profile_arguments, sealed
from cuvee.codec.profiles.quality import KL_MARGIN, CurvePoint

# Every octave the KL and the error quadruple and one bit goes.
CURVE = [CurvePoint(64 * k, 4.0 - k, 1e-2 * 4.0**k, 1e-3 * 4.0**k, 1e-5) for k in (-3, -2, -1, 0, 1)]


@pytest.fixture(params=["head", "layer", "all", "unlearned", "whole"])
def profile(request: pytest.FixtureRequest) -> Profile:
    if request.param == "unlearned":
        return Profile.unlearned(LAYOUTS["irregular"])
    if request.param == "whole":
        return whole()
    return fitted_profile("irregular", request.param).with_curve(CURVE)


def metadata(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    data: dict[str, Any] = json.loads(header["__metadata__"]["cuvee"])
    return data


def reseal(data: Any) -> str:
    """The metadata with a digest that fits, so that a test reaches the check it is about."""
    data.pop("digest", None)
    try:
        return sealed(data)
    except ValueError:  # a NaN
        return json.dumps(data)


def rewrite(source: Path, target: Path, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> Path:
    """Copy a profile with its metadata and arrays changed in place."""
    data, arrays = metadata(source), load_file(source)
    change(data, arrays)
    save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, target, {"cuvee": reseal(data)})
    return target


def test_round_trip(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    profile.save(path)
    loaded = Profile.load(path)
    assert loaded.id == profile.id and len(loaded.id) == 16
    assert (loaded.token_table is None) == (profile.token_table is None)
    assert loaded.layout == profile.layout and loaded.curve == profile.curve
    assert (loaded.group, loaded.source, loaded.model, loaded.min_step_index) == (
        profile.group, profile.source, profile.model, profile.min_step_index,
    )  # fmt: skip
    chunk = synthetic_chunk(profile.layout, 140).with_token_ids(np.arange(140) % VOCABULARY)
    quality: dict[str, Any] = {"step": 0.2} if profile.learned else {}
    ours, theirs = Codec(profile, **quality), Codec(loaded, **quality)
    blob = ours.encode(chunk)
    assert theirs.encode(chunk) == blob
    for a, b in zip(theirs.decode(blob).keys, ours.decode(blob).keys, strict=True):
        assert torch.equal(a, b)
    # Saved again, the same bytes; `str` paths will do.
    loaded.save(str(tmp_path / "b"))
    assert (tmp_path / "b").read_bytes() == path.read_bytes()
    assert metadata(path)["id"] == profile.id.hex()


def whole() -> Profile:
    """With all that there is: a token table, predictors for some of the sections, class tables that are no default."""
    plain = predicting(fitted_profile("irregular", "layer"))
    counts = np.arange(16.0)[::-1] ** 2
    learned = []
    for i, section in enumerate(plain.learned):
        components = np.array([0, 2, 3 + i], np.int32)
        predictor = Predictor(
            components, np.exp2(section.scale[components] / 64).astype(np.float32),
            np.array([0.5, -0.25, 0.0], np.float32), np.array([-0.25, 0.0, -0.5], np.float32),
            -0.125, 0.5 + i, np.array([-3.0, -1.0], np.float32)[:i],
            np.array([-1.0, -1.25, -1.5, 2.0], np.float32), np.array([1.0, 0.5, 0.0], np.float32)[: 2 * i],
        )  # fmt: skip
        learned.append(
            replace(
                section,
                predictor=None if i == 1 else predictor,
                class_freq=class_frequencies(counts + i),
                class_scale=np.linspace(100, -100 - i, 16).astype(np.int16),
            )
        )
    return Profile(plain.layout, plain.group, "fitted", plain.family, tuple(learned), token_table=plain.token_table)


CLASS_ARRAYS: list[tuple[str, str, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]]] = [
    ("sum", "class_freq", lambda a: a + np.eye(16, dtype=np.uint16)[0]),
    ("sum that wraps", "class_freq", lambda a: np.full(16, 4096, np.uint16)),
    ("none", "class_freq", lambda a: np.zeros(16, np.uint16)),
    ("a class that cannot be coded", "class_freq", lambda a: np.array([a[0] + a[1], 0, *a[2:]], np.uint16)),
    ("certain", "class_freq", lambda a: 4096 * np.eye(16, dtype=np.uint16)[8]),
    ("rises too fast", "class_scale", lambda a: np.where(np.arange(16) == 9, a[8] + 33, a).astype(np.int16)),
    ("rises by all there is", "class_scale", lambda a: np.where(np.arange(16) < 8, -(2**15), 2**15 - 1).astype("i2")),
]


@pytest.mark.parametrize("failing", ["save_file", "replace"])
def test_a_failed_save_leaves_the_old_file(failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p"
    fitted_profile("gqa", "layer").save(path)
    before = path.read_bytes()

    def fail(*args: Any, **kwargs: Any) -> None:
        if failing == "save_file":
            Path(args[1]).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(profile_file if failing == "save_file" else os, failing, fail)
    with pytest.raises(OSError, match="disk full"):
        fitted_profile("gqa", "head").save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path, damaged = tmp_path / "p", tmp_path / "damaged"
    fitted_profile("gqa", "layer").with_curve(CURVE).save(path)
    good = path.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    curve = range(good.index(b"curve"), good.index(b"format", good.index(b"curve")))
    generator = np.random.default_rng(0)
    places = [*range(32), *generator.integers(0, header, 200), *generator.integers(header, len(good), 60)]
    for place in (int(p) for p in places):
        for bit in (0, 5):
            raw = bytearray(good)
            raw[place] ^= 1 << bit
            damaged.write_bytes(raw)
            if place in curve:  # the curve is advice, outside the id
                with contextlib.suppress(FormatError):
                    Profile.load(damaged)
                continue
            try:
                Profile.load(damaged)
            except FormatError:
                continue
            # A digit beyond a float's precision: every number that is read is the same.
            assert place < header and chr(good[place]).isdigit() and metadata(damaged) == metadata(path)


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "p"
    with pytest.raises(FileNotFoundError):
        Profile.load(path)
    with pytest.raises(OSError, match="no profile at"):
        Profile.load(tmp_path)
    for content in (b"", b"hello", b"PK\x03\x04" * 100, bytes(100)):
        path.write_bytes(content)
        with pytest.raises(FormatError, match="not a safetensors file"):
            Profile.load(path)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        save_torch({"weight": torch.zeros(3).to(dtype)}, path)
        with pytest.raises(FormatError):
            Profile.load(path)
        save_torch({"weight": torch.zeros(3).to(dtype)}, path, {"format": "pt"})
        with pytest.raises(FormatError):
            Profile.load(path)


METADATA: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("format", lambda d: d.update(format="other")),
    ("no format", lambda d: d.pop("format")),
    ("no layout", lambda d: d.pop("layout")),
    ("layout is a list", lambda d: d.update(layout=[])),
    ("layout has an unknown key", lambda d: d["layout"].update(x=1)),
    ("group", lambda d: d.update(group="heads")),
    ("another group", lambda d: d.update(group="layers:2")),
    ("min_step is text", lambda d: d.update(min_step="1")),
    ("min_step is not a number", lambda d: d.update(min_step=math.nan)),
    ("another min_step", lambda d: d.update(min_step=-1)),
    ("another source", lambda d: d.update(source="unlearned")),
    ("another model", lambda d: d.update(model="ab")),
    ("no id", lambda d: d.pop("id")),
    ("id is a number", lambda d: d.update(id=1)),
    ("curve is a number", lambda d: d.update(curve=1)),
    ("curve of numbers", lambda d: d.update(curve=[1])),
    ("unknown curve field", lambda d: d["curve"][0].update(color=1)),
    ("missing curve field", lambda d: d["curve"][0].pop("bits_per_value")),
    ("curve step is text", lambda d: d["curve"][0].update(step="1")),
    ("curve value is null", lambda d: d["curve"][0].update(error=None)),
    ("curve's worst KL is infinite", lambda d: d["curve"][0].update(kl_worst=math.inf)),
    ("a step twice in the curve", lambda d: d["curve"].append(d["curve"][0])),
    ("curve plain is a number", lambda d: d["curve"][0].update(plain=1)),
    ("curve kind is a list", lambda d: d["curve"][0].update(kind=["prose"])),
    ("curve value is not a number", lambda d: d["curve"][0].update(kl=math.nan)),
    *((f"features {n!r}", lambda d, n=n: d.update(features=n)) for n in (3, 1 << 15, True, -1, "1")),
]


@pytest.mark.parametrize("version", [4, 99, "5", None])
def test_other_versions(version: object, tmp_path: Path) -> None:
    fitted_profile("gqa", "layer").save(tmp_path / "p")
    path = rewrite(tmp_path / "p", tmp_path / "q", lambda data, _: data.update(version=version))
    with pytest.raises(VersionError, match=r"^version: must be 5 for this build, got .*: learn the profile anew"):
        Profile.load(path)


def test_metadata_that_is_not_json(tmp_path: Path) -> None:
    for text in ("", "{", "[]", "1", "null", '"x"', "[" * 100_000, "{}"):
        save_file({"x": np.zeros(1, np.float32)}, tmp_path / "q", {"cuvee": text})
        with pytest.raises(FormatError):
            Profile.load(tmp_path / "q")


def test_arrays_that_break_a_rule(tmp_path: Path) -> None:
    """Of another shape, dtype or sign, not finite, or missing. The id tells the rest."""
    whole().save(tmp_path / "p")
    good = load_file(tmp_path / "p")
    assert len(good) == 4 + 2 + 3 * (11 + 3) + 2 * 8

    def bad(value: np.ndarray[Any, Any]) -> Iterable[np.ndarray[Any, Any]]:
        yield value[:-1]
        yield value[..., :-1]
        yield value[None]
        yield value[:0]
        yield np.concatenate([value, value[:1]])
        if value.size > 1:  # of one number, NumPy makes an array of the same shape
            yield value.reshape(-1)[0]
        yield value.astype(np.float64)
        yield value.astype(np.int32)
        yield np.zeros_like(value) - value
        if value.dtype == np.float32 and value.size:
            yield np.where(np.arange(value.size).reshape(value.shape) == value.size - 1, np.float32("nan"), value)

    for name, value in good.items():
        if name.startswith(("section.0.", "section.1.")):
            continue
        for other in bad(value):
            same = other.shape == value.shape and np.array_equal(other, value)
            if same and (name == "family.freq" or other.dtype == value.dtype):
                continue
            path = rewrite(tmp_path / "p", tmp_path / "q", lambda _, a, n=name, o=other: a.update({n: o}))  # type: ignore[misc]
            with pytest.raises(FormatError) as caught:
                Profile.load(path)
            by_shape = "class_" in name and other.shape != value.shape
            if other.dtype != value.dtype or by_shape or np.isnan(other.sum()):
                assert "hash to its id" not in str(caught.value), name
        path = rewrite(tmp_path / "p", tmp_path / "q", lambda _, arrays, name=name: arrays.pop(name))  # type: ignore[misc]
        with pytest.raises(FormatError):
            Profile.load(path)


def _set(array: np.ndarray[Any, Any], value: float) -> np.ndarray[Any, Any]:
    changed = array.copy()
    changed.flat[-1] = value
    return changed


def _without(byte: int) -> Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    def change(freq: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        changed = freq.copy()
        changed[20, 0] += changed[20, byte]
        changed[20, byte] = 0
        return changed

    return change


PREDICTOR: list[tuple[str, str, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]]] = [
    ("out of order", "components", lambda a: a[[1, 0, *range(2, len(a))]]),
    ("out of range", "components", lambda a: _set(a, 10**6)),
    ("below", "components", lambda a: a - a[0] - 1),
    ("none", "components", lambda a: a[:0]),
    ("zero", "scale", lambda a: _set(a, 0)),
    ("one less", "linear", lambda a: a[:-1]),
    ("one more", "constants", lambda a: np.append(a, a[:1])),
    ("one less", "means", lambda a: a[:-1]),
    ("too many", "sinks", lambda a: np.zeros(MAX_SINKS + 1, np.float32)),
    ("too many", "recency", lambda a: np.zeros(MAX_DISTANCES + 1, np.float32)),
    ("too large", "recency", lambda a: np.array([65.0], np.float32)),
]
# `test_arrays_that_break_a_rule` changes shapes and dtypes.
FAMILY: list[tuple[str, str, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]]] = [
    (what, name, change)
    for name in ("dead_zone", "rounding", "shrink")
    for what, change in (
        ("infinite", lambda a: _set(a, math.inf)),
        ("large", lambda a: _set(a, 1e30)),
        ("below", lambda a: _set(a, -2.5)),
        ("one too many", lambda a: np.concatenate([a, a[:1]])),
        ("empty", lambda a: a[:0]),
    )
] + [
    ("another sum", "freq", lambda a: _set(a, float(a.flat[-1] + 1))), ("no escapes", "freq", _without(0x80)),
    ("gaps", "freq", _without(2)),
]  # fmt: skip
ARRAYS = [(what, f"family.{name}", change) for what, name, change in FAMILY]
ARRAYS += [(what, f"section.2.{name}", change) for what, name, change in CLASS_ARRAYS]
ARRAYS += [(what, f"section.2.predictor.{name}", change) for what, name, change in PREDICTOR]
ARRAYS += [("negative", f"section.2.{name}.0", lambda a: -a) for name in ("row_scale", "column_scale")]
ARRAYS += [
    ("one column less", "section.2.faint.0", lambda a: a[:, :-1]),
    ("too many columns", "section.2.wide.0", lambda a: np.repeat(a, 99, 1)),
    ("too many columns", "section.2.narrow.0", lambda a: np.repeat(a, 9, 1)),
    ("one row less", "tokens.row_scale", lambda a: a[:-1]),
    ("one column less", "tokens.embedding", lambda a: a[:, :-1]),
]


@pytest.mark.parametrize(("what", "key", "change"), ARRAYS, ids=[f"{key}: {what}" for what, key, _ in ARRAYS])
def test_numbers_that_break_a_rule(
    what: str, key: str, change: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]], tmp_path: Path
) -> None:
    """Refused by the rule, not by the id, which is anybody's to compute: compiled loops divide by what they find."""
    whole().save(tmp_path / "p")
    path = rewrite(tmp_path / "p", tmp_path / "q", lambda _, arrays: arrays.update({key: change(arrays[key])}))
    with pytest.raises(FormatError) as caught:
        Profile.load(path)
    assert "hash to its id" not in str(caught.value)


def test_a_token_table_has_rows(tmp_path: Path) -> None:
    whole().save(tmp_path / "p")

    def empty(_: object, arrays: dict[str, Any]) -> None:
        for key in ("tokens.embedding", "tokens.row_scale"):
            arrays[key] = arrays[key][:0]

    path = rewrite(tmp_path / "p", tmp_path / "q", empty)
    with pytest.raises(FormatError, match=r"tokens\.embedding: must have 1 "):
        Profile.load(path)


def _kind(data: dict[str, Any], **changes: Any) -> None:
    for kind in data["layout"]["kinds"]:
        kind.update(changes)


def _heads(data: dict[str, Any], heads: int) -> list[dict[str, Any]]:
    return [{**kind, "kv_heads": heads} for kind in data["layout"]["kinds"]]


HUGE: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("more heads than a number holds", lambda d: _kind(d, kv_heads=10**400)),
    ("heads that the arrays are too few for", lambda d: _kind(d, kv_heads=1 << 18)),
    ("head size", lambda d: _kind(d, head_dim=10**10, value_dim=10**10)),
    ("layers", lambda d: d["layout"].update(layers=[0] * 100_000)),
    ("layers of many heads", lambda d: d["layout"].update(layers=[0] * 60_000, kinds=_heads(d, 1000))),
    ("finest step", lambda d: d.update(min_step=-(10**9))),
    ("finest step beyond numbers", lambda d: d.update(min_step=-(10**400))),
    ("finest step above all", lambda d: d.update(min_step=10**400)),
    ("step of a point", lambda d: d["curve"][0].update(step=-(10**30))),
    ("no bits", lambda d: d["curve"][0].update(bits_per_value=0)),
    ("value of a point", lambda d: d["curve"][0].update(bits_per_value=10**400)),
    ("value of a point that overflows", lambda d: d["curve"][0].update(kl=1e-310)),
    ("frequency", lambda d: _kind(d, rope={"inv_freq": [10**400]})),
    ("scaling", lambda d: _kind(d, rope={"inv_freq": [1.0], "attention_scaling": 10**400})),
    ("group", lambda d: d.update(group="layers:" + "9" * 1000)),
    ("model is a list", lambda d: d.update(model=[1])),
    ("source is a number", lambda d: d.update(source=1)),
]


@pytest.mark.parametrize(("what", "change"), METADATA + HUGE, ids=[what for what, _ in METADATA + HUGE])
def test_metadata_is_refused_before_anything_is_made_of_it(
    what: str, change: Callable[[dict[str, Any]], Any], tmp_path: Path
) -> None:
    fitted_profile("gqa", "layer").with_curve(CURVE).save(tmp_path / "p")
    path = rewrite(tmp_path / "p", tmp_path / "q", lambda data, _: change(data))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            Profile.load(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 * path.stat().st_size + 2_000_000


@pytest.mark.parametrize(("heads", "group"), [(10**7, "unit"), (10**10, "head")])
def test_an_unlearned_profile_has_bounds_too(heads: int, group: str, tmp_path: Path) -> None:
    """No array of the file says how large a model may be."""
    Profile.unlearned(LAYOUTS["gqa"]).save(tmp_path / "p")

    def change(data: dict[str, Any], _: object) -> None:
        _kind(data, kv_heads=heads)
        data.update(group=group)

    with pytest.raises(FormatError) as caught:
        Profile.load(rewrite(tmp_path / "p", tmp_path / "q", change))
    assert "hash to its id" not in str(caught.value)
    with pytest.raises(FormatError, match=r"^group: must be 'unit'"):
        Profile.load(rewrite(tmp_path / "p", tmp_path / "q", lambda data, _: data.update(group="head")))


def test_the_id_depends_on_what_decoding_depends_on() -> None:
    profile = fitted_profile("gqa", "layer")
    assert profile.with_curve(CURVE).id == profile.id
    assert profile.with_curve([]).id == profile.id

    def changed(**changes: Any) -> Profile:
        arguments = {
            "layout": profile.layout, "group": profile.group, "source": profile.source, "family": profile.family,
            "learned": profile.learned, "min_step_index": profile.min_step_index, "model": profile.model,
            **changes,
        }  # fmt: skip
        return Profile(**arguments)

    def section(**changes: Any) -> tuple[Any, ...]:
        return (replace(profile.learned[0], **changes), *profile.learned[1:])

    def basis(**changes: Any) -> tuple[Any, ...]:
        return section(basis=replace(profile.learned[0].basis, **changes))

    first = profile.learned[0]
    half = first.basis
    predictor = whole().learned[0].predictor
    assert predictor is not None
    quantizer = profile.family.quantizer
    others = [
        changed(),
        changed(layout=replace(profile.layout, max_positions=17)),
        changed(layout=replace(profile.layout, model_type="other")),
        changed(min_step_index=-1),
        changed(learned=section(scale=first.scale - 1)),
        changed(learned=section(class_freq=class_frequencies(np.arange(16.0)))),
        changed(learned=section(class_scale=first.class_scale - 1)),
        changed(learned=section(predictor=predictor)),
        changed(learned=section(predictor=replace(predictor, sinks=np.ones(1, np.float32)))),
        changed(learned=basis(mean=half.mean + 1)),
        changed(learned=basis(sinks=half.mean[None])),
        *(
            changed(learned=basis(maps=(replace(half.maps[0], **{name: getattr(half.maps[0], name)[::-1]}),)))
            for name in ("wide", "narrow", "faint", "row_scale", "column_scale")
        ),
        changed(family=replace(profile.family, quantizer=replace(quantizer, shrink=quantizer.shrink + 1))),
        changed(family=replace(profile.family, quantizer=replace(quantizer, rounding=1 - quantizer.rounding))),
        changed(family=replace(profile.family, quantizer=replace(quantizer, dead_zone=1 - quantizer.dead_zone))),
        changed(family=fitted_profile("gqa", "head").family),
    ]
    assert others[0].id == profile.id
    ids = [other.id for other in others]
    assert len(set(ids)) == len(ids)


def test_a_profile_needs_all_its_sections() -> None:
    profile = fitted_profile("gqa", "layer")
    with pytest.raises(FormatError, match=r"^learned: must have 3 sections for group 'layer', got 2"):
        Profile(profile.layout, "layer", "fitted", profile.family, profile.learned[:2])


@pytest.mark.parametrize("group", ["layers:2", "heads:2"])
@pytest.mark.parametrize("layers", [[0, 3], [1, 2], [0, 2], [3], [2, 3, 0, 1], [0, 0]])
def test_layers_never_get_the_bases_of_others(group: str, layers: list[int]) -> None:
    """Layers 0 and 1 share bases, and so do 2 and 3, all of the same sizes."""
    mha = LAYOUTS["mha"]
    profile = fitted_to(replace(mha, layers=mha.layers[:1] * 4), group)
    assert profile.of_layers([2, 3]).learned == profile.learned[1:]
    with pytest.raises(ProfileError, match=r"^group: must be 'layer', .*, whose bases mix them with others"):
        profile.of_layers(layers)


def test_interpolation_by_hand() -> None:
    profile = fitted_profile("gqa", "layer").with_curve(reversed(CURVE))
    assert [p.step_index for p in profile.curve] == [-192, -128, -64, 0, 64]
    # On the points, half-way between them (geometric in KL), and near the ends.
    for kl, step in ((1e-3, 0), (4e-3, 64), (1e-3 / 64, -192), (2e-3, 32), (1e-3 / 2, -32), (1e-3 * 4**0.25, 16)):
        assert profile.resolve(kl=KL_MARGIN * kl) == step
    for bits, step in ((4.0, 0), (5.0, -64), (math.sqrt(20), -32), (math.sqrt(12), 32)):
        assert profile.resolve(bits=bits) == step
    assert profile.resolve(step=2.0) == 64 and profile.resolve(step=2 ** (1 / 64)) == 1


def test_ratios_count_the_dtype_of_the_cache_and_not_that_of_the_profile() -> None:
    profile = fitted_profile("gqa", "layer")
    for learned_in in ("float32", "bfloat16"):
        layout = replace(profile.layout, dtype=learned_in)
        own = Profile(layout, "layer", "fitted", profile.family, profile.learned, curve=CURVE)
        assert own.id == profile.id
        assert own.resolve(ratio=4.0) == own.resolve(bits=4.0) == 0
        assert own.resolve(ratio=4.0, dtype="float16") == own.resolve(ratio=4.0, dtype="bfloat16") == 0
        assert own.resolve(ratio=8.0, dtype="float32") == Codec(own, ratio=8.0, dtype="float32").step_index == 0
        assert Codec(own, ratio=4.0).step_index == 0
        assert [point.ratio for point in own.curve] == [16 / 7, 16 / 6, 16 / 5, 4.0, 16 / 3]
        for dtype, cache, low, high in (
            (None, "cache in bfloat16 or float16", 2.286, 5.333), ("float32", "float32 cache", 4.571, 10.67),
        ):  # fmt: skip
            said = rf"^ratio: must lie in {low} … {high} for this profile and a {cache}, got 20$"
            with pytest.raises(ProfileError, match=said):
                own.resolve(ratio=20.0, dtype=dtype)
        with pytest.raises(InputError, match=r"^dtype: must be one of bfloat16, float16, float32, got 'int8'$"):
            own.resolve(ratio=4.0, dtype="int8")


def test_the_repr_shows_model_source_group_and_curve() -> None:
    unlearned = Profile.unlearned(LAYOUTS["gqa"])
    assert repr(unlearned) == "Profile(synthetic, 3 layers, 192 values per token; unlearned, group 'unit'; no curve)"
    curve = [CurvePoint(64 * k, 9.0 - k, 1e-2 * 4.0**k, 1e-3 * 4.0**k) for k in range(-3, 5)]
    measured = fitted_profile("gqa", "layer").with_curve(curve)
    assert repr(measured).endswith("; fitted, group 'layer'; 12.00 to 5.00 bits per value)")
    assert repr(measured.with_curve(curve[-1:])).endswith("group 'layer'; 5.00 bits per value)")


def test_how_much_text_there_was_is_kept_and_no_part_of_the_id(tmp_path: Path) -> None:
    profile = fitted_profile("gqa", "head")
    profile.save(tmp_path / "p")
    again = Profile.load(tmp_path / "p")
    assert again.text_tokens == profile.text_tokens == profile.with_curve([]).text_tokens
    assert again.shard(0, 2).text_tokens == profile.text_tokens
    measured = profile.with_curve(CURVE, [512, 96, 512])
    measured.save(tmp_path / "p")
    again = Profile.load(tmp_path / "p")
    assert again.lengths == (96, 512) == again.shard(0, 2).lengths and again.id == profile.id
    # As a profile of an earlier build.
    again.text_tokens, again.lengths = None, ()
    again.save(tmp_path / "p")
    older = Profile.load(tmp_path / "p")
    assert older.text_tokens is None and older.lengths == () and older.id == profile.id


@pytest.mark.parametrize("lengths", [512, [0], [True], ["512"], {}])
def test_lengths_that_are_none_are_refused(lengths: object, tmp_path: Path) -> None:
    profile = fitted_profile("gqa", "head").with_curve(CURVE, [512])
    data = {**metadata_of(profile), "lengths": lengths}
    with pytest.raises(FormatError, match=r"^lengths: must be a list of positive numbers of tokens"):
        profile_arguments(data, arrays_of(profile))


def test_limits_outside_the_curve() -> None:
    profile = fitted_profile("gqa", "layer").with_curve(CURVE)
    for arguments, message in (
        ({"kl": 1e-6}, r"^kl: must lie in 2.03.e-05 … 0.0052, .* got 1e-06: use quality='lossless'"),
        ({"bits": 2.9}, "^bits: must lie in 3 … 7, the measured range of this profile, got 2.9"),
        ({"bits": 7.1}, r"^bits: must lie in 3 … 7, .* got 7\.1: for larger blobs use step=, or quality='lossless'$"),
        ({"ratio": 100.0}, r"^ratio: must lie in 2\.286 … 5\.333 .* got 100$"),
        ({"ratio": 0.5}, r"^ratio: must lie in 2\.286 … 5\.333 .* got 0\.5: for larger blobs use step=, or"),
    ):
        with pytest.raises(ProfileError, match=message):
            profile.resolve(**arguments)  # type: ignore[arg-type]
    assert profile.resolve(bits=7.0) == profile.resolve(bits=7.001) == -192 and profile.resolve(ratio=5.3335) == 64
    # All of the curve keeps a KL above it: the step that comes closest is taken.
    assert profile.resolve(kl=1.0) == profile.resolve(kl=0.0053) == 64
    assert profile.resolve(kl=0.0052) == profile.resolve(kl=0.00519) == 64 > profile.resolve(kl=0.005)
    blind = profile.with_curve([replace(p, kl=None) for p in CURVE])
    bare = profile.with_curve([])
    for other, arguments in (
        (blind, {"kl": 1e-3}),
        (bare, {"kl": 1e-3}),
        (bare, {"bits": 4.0}),
        (bare, {"ratio": 4.0}),
    ):
        with pytest.raises(ProfileError, match=r"no curve for .*cuvee.calibrate or cuvee.measure"):
            other.resolve(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ProfileError, match="no curve"):
        profile.with_curve(CURVE[:1]).resolve(kl=1e-3)


def test_the_kl_to_expect_at_a_step() -> None:
    """Every octave quadruples it, between measured points and outside them."""
    profile = fitted_profile("gqa", "layer").with_curve(CURVE)
    for octave in (-5.0, -3.0, -0.5, 0.25, 1.0, 2.5):
        expected = KL_MARGIN * 1e-3 * 4.0**octave
        assert profile.measured().kl_at(round(64 * octave)) == pytest.approx(expected)
    for short in ([], CURVE[:1], [replace(point, kl=None) for point in CURVE]):
        assert profile.with_curve(short).measured().kl_at(0) is None
