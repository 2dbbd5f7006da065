"""The whole pipeline: chunks to blobs and back, for every scheme and layout."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.chunks import same
from tests.conftest import LAYOUTS, decoded_layers, fitted_profile, make_codec, synthetic_chunk, tiny_model
from tests.cpus import multiply, needs_avx2

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.cpu.backend import MAX_SCHEMES, CpuBackend
from cuvee.codec.errors import (
    CorruptError,
    InputError,
    ProfileError,
    ProfileMismatchError,
)
from cuvee.codec.format.container import inspect
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.quality import PRESET_KL, CurvePoint
from cuvee.codec.rope import rotate, unrotate
from cuvee.codec.stages.products import Products

GROUPS = ["head", "heads:1", "unit", "layer", "layers:2", "all"]
SCHEMES = [*GROUPS, "lossless"]
NAMES = [
    "gqa", "mha", "mqa", "bfloat16", "float16", "narrow-values", "no-rope", "partial", "interleaved", "yarn",
    "irregular",
]  # fmt: skip
LENGTHS = [1, 63, 128, 129, 257]
STEP = 2**-3


def quality(scheme: str) -> dict[str, float]:
    return {} if scheme == "lossless" else {"step": STEP}


def tensors(chunk: KVChunk) -> list[torch.Tensor]:
    return [*chunk.keys, *chunk.values]


def position_free(chunk: KVChunk) -> list[torch.Tensor]:
    at = torch.arange(chunk.start, chunk.end)
    keys = [unrotate(k, layer.rope, at) for k, layer in zip(chunk.keys, chunk.layout.layers, strict=True)]
    return [*keys, *(v.float() for v in chunk.values)]


def relative_error(chunk: KVChunk, back: KVChunk, reference: KVChunk) -> float:
    """Squared error over the variance that `reference` has, mean over units."""
    ratios = [
        (a.float() - b.float()).square().mean() / (c - c.mean(0)).square().mean()
        for a, b, c in zip(tensors(chunk), tensors(back), position_free(reference), strict=True)
    ]
    return float(torch.stack(ratios).mean())


def moved(chunk: KVChunk, start: int) -> list[torch.Tensor]:
    """Keys of `chunk` at other positions, float32."""
    there = torch.arange(start, start + chunk.tokens)
    free = position_free(chunk)
    return [rotate(k, layer.rope, there) for k, layer in zip(free, chunk.layout.layers, strict=False)]


@pytest.mark.parametrize(
    ("name", "scheme"),
    [*((name, SCHEMES[number % 6]) for number, name in enumerate(NAMES)), *((name, "lossless") for name in NAMES),
     *(("irregular", scheme) for scheme in GROUPS if scheme != "layers:2")],
)  # fmt: skip
def test_round_trip(name: str, scheme: str) -> None:
    layout = LAYOUTS[name]
    codec = make_codec(name, scheme, **quality(scheme))
    reference = synthetic_chunk(layout, 500, seed=5)
    for tokens in LENGTHS if name in ("gqa", "irregular") else [129]:
        chunk = synthetic_chunk(layout, tokens, seed=1, start=7)
        blob = codec.encode(chunk)
        back = codec.decode(blob)
        assert (back.start, back.tokens, back.layout) == (7, tokens, layout)
        info = inspect(blob)
        assert (info.tokens, info.start, info.dtype, info.total_bytes) == (tokens, 7, layout.dtype, len(blob))
        assert info.raw_bytes == chunk.nbytes
        if scheme == "lossless":
            assert same(chunk, back)
        else:
            # A uniform quantizer's s^2 / 12, and room for the dead zone and for what is not coded.
            assert relative_error(chunk, back, reference) < 0.2 * STEP**2, tokens
            assert not same(chunk, back)


@needs_avx2
@pytest.mark.parametrize("kind", Products)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_round_trip_on_other_cpus(kind: Products, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply(kind, monkeypatch)
    test_round_trip("bfloat16", scheme)


@pytest.mark.parametrize("scheme", ["layer", "lossless"])
def test_tensors_that_require_gradients(scheme: str) -> None:
    chunk = synthetic_chunk(LAYOUTS["gqa"], 20)
    codec = make_codec("gqa", scheme, **quality(scheme))
    expected = codec.encode(chunk)
    for tensor in tensors(chunk):
        tensor.requires_grad_()
    assert codec.encode(chunk) == expected


@pytest.mark.parametrize("scheme", SCHEMES)
def test_same_bytes_and_values_from_every_backend_and_thread_count(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cuvee.codec.cpu.backend.PARALLEL_VALUES", 1)
    chunk = synthetic_chunk(LAYOUTS["irregular"], 200, seed=4)
    settings: list[dict[str, object]] = [
        {"backend": "numba", "threads": 1},
        {"backend": "numba", "threads": 8},
        {"backend": "reference", "threads": 1},
        {"backend": "reference", "threads": 8},
        {"backend": "auto"},
    ]
    codecs = [make_codec("irregular", scheme, **quality(scheme), **setting) for setting in settings]
    blobs = [codec.encode(chunk) for codec in codecs for _ in range(2)]
    assert len(set(blobs)) == 1
    one, eight, plain, plain_eight, auto = (codec.decode(blobs[0]) for codec in codecs)
    assert same(one, eight) and same(one, auto) and same(plain, plain_eight)
    if scheme == "lossless":
        assert same(plain, one)
    for ours, theirs in zip(tensors(one), tensors(plain), strict=True):  # sums in another order
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 * float(theirs.abs().max()))


def of_the_host(codec: Codec) -> CpuBackend:
    """The backend that codes the codec's chunks on the CPU."""
    backend = codec._backends.of("cpu")
    assert isinstance(backend, CpuBackend)
    return backend


def test_blobs_of_many_steps_do_not_pile_up() -> None:
    chunk = synthetic_chunk(LAYOUTS["gqa"], 20)
    codec = make_codec("gqa", "layer", step=0.2)
    backend = of_the_host(codec)
    own = next(iter(backend._schemes))
    for power in range(-20, 1):
        blob = make_codec("gqa", "layer", step=2 ** (power / 4)).encode(chunk)
        assert codec.decode(blob).tokens == 20
        assert len(backend._schemes) <= MAX_SCHEMES
        assert own in backend._schemes
    assert len(backend._schemes) == MAX_SCHEMES


def test_a_scheme_that_another_thread_evicts_is_used_all_the_same() -> None:
    """Without a global lock a thread may come between any two accesses of a dict."""

    class Evicting(dict[Any, Any]):
        """Another thread evicts right after whatever is looked up."""

        def __contains__(self, key: object) -> bool:
            found = super().__contains__(key)
            self.pop(key, None)
            return found

        def get(self, key: Any, default: Any = None) -> Any:
            found = super().get(key, default)
            self.pop(key, None)
            return found

    codec, chunk = make_codec("gqa", "layer", threads=1), synthetic_chunk(LAYOUTS["gqa"], 9)
    blob = codec.encode(chunk)
    backend = of_the_host(codec)
    backend._schemes = Evicting(backend._schemes)
    assert same(codec.decode(blob), make_codec("gqa", "layer").decode(blob))


@pytest.mark.parametrize(
    ("name", "scheme"),
    [("gqa", "layer"), ("bfloat16", "layer"), ("irregular", "layer"), ("partial", "layer"), ("float16", "lossless"),
     ("bfloat16", "lossless"), ("interleaved", "lossless"), ("yarn", "lossless"), ("irregular", "lossless")],
)  # fmt: skip
def test_decoding_elsewhere_is_rotation(name: str, scheme: str) -> None:
    codec = make_codec(name, scheme, **quality(scheme))
    chunk = synthetic_chunk(LAYOUTS[name], 140, start=11)
    blob = codec.encode(chunk)
    here = codec.decode(blob)
    unit = torch.finfo(here.layout.torch_dtype).eps
    for start in (0, 12, 3000):
        there = codec.decode(blob, start)
        assert there.start == start
        for got, want in zip(there.keys, moved(here, start), strict=True):
            largest = float(want.abs().max())
            torch.testing.assert_close(got.float(), want, atol=max(2 * unit, 2e-6) * largest, rtol=0)
        assert all(torch.equal(a, b) for a, b in zip(here.values, there.values, strict=True))
        assert not torch.equal(here.keys[0], there.keys[0])
    assert same(codec.decode(blob, 11), here)


def test_layers_are_decoded_without_the_others() -> None:
    codec = make_codec("gqa", "layer", step=STEP)
    blob = bytearray(codec.encode(synthetic_chunk(LAYOUTS["gqa"], 30)))
    keys, _ = decoded_layers(codec, bytes(blob), range(2))
    blob[-1] ^= 1
    assert torch.equal(decoded_layers(codec, bytes(blob), range(2))[0][1], keys[1])
    with pytest.raises(CorruptError, match="section 2"):
        codec.decode(bytes(blob))


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "cpu:x"])
def test_devices_that_do_not_exist(device: str) -> None:
    codec = make_codec("mha", "lossless")
    blob = codec.encode(synthetic_chunk(LAYOUTS["mha"], 5))
    with pytest.raises(InputError, match=f"^device: must be a device that torch can use here, got '{device}'"):
        codec.decode(blob, device=device)


@pytest.mark.parametrize("scheme", ["layer", "lossless"])
def test_positions_that_do_not_exist(scheme: str) -> None:
    codec = make_codec("gqa", scheme, **quality(scheme))
    blob = codec.encode(synthetic_chunk(LAYOUTS["gqa"], 10))
    assert codec.decode(blob, 4086).end == 4096
    for start, message in ((4087, "4096 positions"), (-1, "got -1"), (1.0, "int"), (True, "int")):
        with pytest.raises(InputError, match=message):
            codec.decode(blob, start)  # type: ignore[arg-type]
    assert codec.decode(blob, 4095, tokens=range(4, 5)).end == 4096
    for run in ((0, 0), (3, 2), (-1, 3), (0, 11)):
        with pytest.raises(InputError, match="10 tokens"):
            codec.decode(blob, tokens=range(*run))
    for odd in (range(0, 8, 2), range(3, 0, -1), slice(0, 3), (0, 3), 3):
        with pytest.raises(InputError, match=r"^tokens: must "):
            codec.decode(blob, tokens=odd)  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", ["layer", "lossless"])
def test_a_cache_without_rope_stays_where_it_is(scheme: str) -> None:
    codec = make_codec("no-rope", scheme, **quality(scheme))
    blob = codec.encode(synthetic_chunk(LAYOUTS["no-rope"], 10, start=5))
    assert codec.decode(blob, 5).start == 5
    assert codec.decode(blob, 7, tokens=range(2, 4)).start == 7
    for start, run in ((4, None), (5, range(2, 4))):
        with pytest.raises(InputError, match="has no RoPE"):
            codec.decode(blob, start, tokens=run)


@pytest.mark.parametrize("scheme", ["layer", "lossless"])
def test_other_layouts_are_refused(scheme: str) -> None:
    codec = make_codec("gqa", scheme, **quality(scheme))
    for name in ("mha", "no-rope", "partial", "interleaved", "yarn"):
        with pytest.raises(ProfileMismatchError, match="the profile is for synthetic"):
            codec.encode(synthetic_chunk(LAYOUTS[name], 10))
        blob = make_codec(name, scheme, **quality(scheme)).encode(synthetic_chunk(LAYOUTS[name], 10))
        with pytest.raises(ProfileMismatchError, match="another model"):
            codec.decode(blob)


def test_blobs_of_another_profile_are_refused() -> None:
    chunk = synthetic_chunk(LAYOUTS["gqa"], 10)
    codecs = {scheme: make_codec("gqa", scheme, step=STEP) for scheme in ("head", "layer")}
    for scheme, codec in codecs.items():
        for other, stranger in codecs.items():
            if other != scheme:
                with pytest.raises(ProfileMismatchError, match=stranger.profile.id.hex()):
                    stranger.decode(codec.encode(chunk))


def test_lossless_blobs_need_only_the_layout() -> None:
    chunk = synthetic_chunk(LAYOUTS["gqa"], 10)
    blob = make_codec("gqa", "lossless").encode(chunk)
    assert same(make_codec("gqa", "layer").decode(blob), chunk)
    assert inspect(blob).profile_id is None


@pytest.mark.parametrize(
    ("dtype", "scheme", "start"),
    [("bfloat16", "unit", 3000), ("float16", "unit", 7), ("float32", "unit", 3000), ("bfloat16", "lossless", 3000),
     ("float16", "lossless", 3000), ("float32", "lossless", 7)],
)  # fmt: skip
def test_the_ends_of_a_dtype_stay_finite(scheme: str, dtype: str, start: int) -> None:
    chunk = synthetic_chunk(replace(LAYOUTS["gqa"], dtype=dtype), 140, start=7)
    # Learned schemes count steps from the unit that they learned, of which float16's range has few enough.
    most = torch.finfo(chunk.keys[0].dtype).max if scheme != "unit" or dtype == "float16" else 2.0**15
    for layer, (keys, values) in enumerate(zip(chunk.keys, chunk.values, strict=True)):
        values[..., 3] = most - values[..., 3].abs() / 200 * most
        values[0] = -most if layer == 1 and most < 2**16 else values[0]
        if scheme == "lossless" or most < 2**16:  # others may be refused: un-rotated, they leave float32's range
            keys[..., 5] = most
            keys[::2, :, 1] = -most
    back = [make_codec("gqa", scheme, backend=name, **quality(scheme)) for name in ("numba", "reference")]
    blob = back[0].encode(chunk)
    one, other = (codec.decode(blob, start) for codec in back)
    assert all(bool(tensor.isfinite().all()) for tensor in tensors(one))
    if scheme != "unit":  # whose products may round differently
        assert same(one, other)
    assert all(bool(tensor.isfinite().all()) for tensor in tensors(other))


def test_the_repr_shows_what_was_asked_for_and_no_secret() -> None:
    codec = make_codec("gqa", "layer", quality="small", threads=3, key=b"k" * 16)
    step = f"{2 ** (codec.step_index / 64):.4g}"
    assert repr(codec) == (
        f"Codec(quality=small: step={step}; backend 'auto', 3 threads, with a key; {codec.profile!r})"
    )
    assert repr(make_codec("gqa", "lossless")).startswith("Codec(quality=lossless; backend ")
    with pytest.raises(InputError, match=r"got 0\.01: a limit in nats per token is kl="):
        Codec(codec.profile, 0.01)  # type: ignore[arg-type]


def test_arguments() -> None:
    """`test_quality.py` has those that ask for a quality."""
    profile = fitted_profile("gqa", "layer")
    high, balanced, small = (Codec(profile, quality) for quality in PRESET_KL)
    assert high.step_index < balanced.step_index < small.step_index and not balanced.lossless
    assert Codec(profile, step=0.5).step_index == -64 and Codec(profile, "lossless").lossless
    for step in (1e-6, 300.0):
        with pytest.raises(ProfileError, match=r"^step: must lie in 0\.0039\d* … 256 for this profile"):
            Codec(profile, step=step)
    with pytest.raises(InputError, match=r"^threads: must be at least 1, got 0"):
        Codec(profile, threads=0)
    with pytest.raises(InputError, match=r"backend: must be one of .*, got 'x'"):
        Codec(profile, backend="x")


def test_what_is_no_profile_is_said() -> None:
    for odd, message in (
        ("model.safetensors", r"got str: cuvee\.Profile\.load\('model\.safetensors'\) reads one"),
        (Path("p"), r"cuvee\.Profile\.load\('p'\) reads one"),
        (None, r"got NoneType: cuvee\.calibrate\(model, token_ids\) learns one, and Codec\.without_profile"),
        (LAYOUTS["gqa"], "got KVLayout: "),
    ):
        with pytest.raises(InputError, match=rf"^profile: must be a Profile, .*{message}"):
            Codec(odd)  # type: ignore[arg-type]


def test_without_a_profile(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    layout = KVLayout.from_config(model.config, "bfloat16")
    for source in (model, layout):
        assert Codec.without_profile(source).profile.layout == layout
    # A model may have been loaded in another dtype than its configuration says.
    assert Codec.without_profile(model.config).profile.layout.fingerprint
    chunk = synthetic_chunk(LAYOUTS["gqa"], 33)
    codec = Codec.without_profile(LAYOUTS["gqa"], key=bytes(16), threads=1, backend="numba")
    assert codec.lossless and codec.threads == 1 and len(codec.key_ids) == 1
    assert same(codec.decode(codec.encode(chunk)), chunk)
    for odd in ("llama", None, 3):
        with pytest.raises(InputError, match=r"^model: must be a transformers model or configuration, or a KVLayout"):
            Codec.without_profile(odd)


def test_an_unlearned_profile_is_lossless_by_default_and_takes_no_other_quality() -> None:
    unlearned, chunk = Profile.unlearned(LAYOUTS["gqa"]), synthetic_chunk(LAYOUTS["gqa"], 33)
    codec = Codec(unlearned)
    assert codec.lossless and codec.step_index == 0
    assert torch.equal(codec.decode(codec.encode(chunk)).keys[0], chunk.keys[0])
    curve = [CurvePoint(64 * k, 9.0 - k, 1e-2 * 4.0**k, 1e-3 * 4.0**k) for k in range(-3, 5)]
    asked: list[dict[str, Any]] = [
        *({"quality": quality} for quality in PRESET_KL), {"kl": 0.005}, {"bits": 4.0}, {"ratio": 4.0}, {"step": 0.5},
    ]  # fmt: skip
    for request in asked:
        (name,) = request
        for profile in (unlearned, unlearned.with_curve(curve)):
            with pytest.raises(InputError, match=rf"^{name}: must be .*`cuvee profile learn` .* cuvee.fit"):
                Codec(profile, **request)
    with pytest.raises(InputError, match=r"^quality: must be one of"):
        Codec(unlearned, "finest")
    learned = fitted_profile("gqa", "layer")
    assert not Codec(learned).lossless and Codec(learned).step_index == Codec(learned, "balanced").step_index


@pytest.mark.usefixtures("untold")
def test_a_preset_that_promises_no_kl_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    learned = fitted_profile("gqa", "layer")
    curve = [CurvePoint(64 * k, 9.0 - k, 1e-2 * 4.0**k, 1e-3 * 4.0**k) for k in range(-3, 5)]
    with caplog.at_level(logging.WARNING, "cuvee"):
        Codec(learned, "lossless"), Codec(learned, step=0.5)  # which promise no KL
        Codec(learned.with_curve(curve), "small"), Codec(Profile.unlearned(LAYOUTS["gqa"]))
        assert not caplog.records
        for quality in ("balanced", "high"):
            caplog.clear()
            Codec(learned, quality), Codec(learned, quality)
            (record,) = caplog.records
            assert record.levelno == logging.WARNING
            for part in (
                f"quality={quality!r}",
                f"KL of {PRESET_KL[quality]:g} nats",
                "fitted",
                "`cuvee profile learn`",
            ):
                assert part in record.getMessage()
    with pytest.raises(ProfileError, match=r"^kl=0.005: this profile has no curve for kl. `cuvee profile learn`"):
        Codec(learned, kl=0.005)
