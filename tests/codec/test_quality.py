"""`Quality`: one thing that is asked for, checked where it is made, and the same codec however it is said."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tests.conftest import fitted_profile, synthetic_chunk

from cuvee import Codec, Profile, Quality
from cuvee.codec.errors import InputError
from cuvee.codec.profiles.quality import KL_MARGIN, CurvePoint

CURVE = [CurvePoint(64 * k, 4.0 - k, 1e-2 * 4.0**k, 1e-3 * 4.0**k) for k in range(-3, 3)]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "quality: must be given as exactly one of quality=, kl=, bits=, ratio=, step=, got none"),
    ({"preset": "high", "kl": 1e-3}, "quality: must be given as exactly one of .* got quality, kl"),
    ({"bits": 3.0, "ratio": 4.0}, "quality: must be given as exactly one of .* got bits, ratio"),
    ({"preset": "best"}, "quality: must be one of lossless, high, balanced, small, got 'best'"),
    ({"preset": 1e-3}, "quality: must be one of .* got 0.001: a limit in nats per token is kl="),
    ({"kl": "high"}, "kl: must be a positive number, got 'high'; did you mean quality='high'?"),
    ({"kl": 0.0}, "kl: must be a positive number"),
    ({"kl": 10**400}, "kl: must be a positive number"),
    ({"bits": float("inf")}, "bits: must be a positive number"),
    ({"bits": float("nan")}, "bits: must be a positive number"),
    ({"ratio": True}, "ratio: must be a positive number"),
    ({"step": -1.0}, "step: must be a positive number"),
    ({"kl": 1e-3, "worst": 1}, "worst: must be True or False"),
    ({"preset": "high", "worst": True}, "worst: must be True or False, and True only with kl="),
    ({"kl": 1e-3, "dtype": "float32"}, "dtype: must come with ratio=, which it is for, got 'float32' with kl="),
    ({"ratio": 4.0, "dtype": "int8"}, "dtype: must be one of bfloat16, float16, float32, got 'int8'"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_what_cannot_be_asked_for_is_refused_where_it_is_said(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match="^" + message.replace("?", r"\?")):
        Quality(**arguments)


def test_a_codec_takes_a_quality_its_preset_or_its_arguments() -> None:
    profile = fitted_profile("gqa", "layer").with_curve(CURVE)
    for quality, arguments in (
        (Quality("high"), {"quality": "high"}),
        (Quality(kl=KL_MARGIN * 4e-3), {"kl": KL_MARGIN * 4e-3}),
        (Quality(bits=3.5), {"bits": 3.5}),
        (Quality(ratio=8.0, dtype="float32"), {"ratio": 8.0, "dtype": "float32"}),
        (Quality(step=0.5), {"step": 0.5}),
        (Quality("balanced"), {}),
    ):
        codec = Codec(profile, **arguments)
        assert codec.quality == quality and codec.quality_name == Codec(profile, quality).quality_name
        assert codec.step_index == profile.resolve(quality)
        assert codec.described_quality == f"{quality}: step={2 ** (codec.step_index / 64):.4g}"
    assert Codec(profile, Quality("lossless")).lossless and Codec(Profile.unlearned(profile.layout)).lossless


def test_a_kl_is_asked_of_the_curve_with_a_margin_for_other_text() -> None:
    """1.3 times lower: as text that a profile was not learned on loses that much more."""
    profile = fitted_profile("gqa", "layer").with_curve(CURVE)
    assert profile.resolve(kl=1.3 * 1e-3) == 0 and profile.resolve(kl=1e-3) == round(-64 * math.log(1.3, 4)) == -12
    fine = Codec(profile, "high").step_index
    assert fine == -12 and profile.measured().kl_at(0) == pytest.approx(1.3e-3)


@pytest.mark.usefixtures("untold")
def test_a_context_longer_than_those_of_the_curve_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    unknown = fitted_profile("gqa", "layer").with_curve(CURVE)
    profile = unknown.with_curve(CURVE, [40, 64])
    chunk = synthetic_chunk(profile.layout, 65)

    def told(encode: Callable[[], object]) -> int:
        caplog.clear()
        encode()
        return sum("contexts of up to 64 tokens" in record.getMessage() for record in caplog.records)

    balanced = Codec(profile, "balanced")
    assert told(lambda: balanced.encode(chunk.slice(0, 64))) == 0
    for silent in (Codec(profile, "lossless"), Codec(profile, step=0.5), Codec(profile, bits=4.0), Codec(unknown)):
        assert told(lambda own=silent: own.encode(chunk)) == 0  # type: ignore[misc]
    assert told(lambda: balanced.encode(chunk.slice(60, 65))) == 1
    assert told(lambda: Codec(profile, kl=2e-3).encode(chunk)) == 0, "once for a profile"


def test_nothing_is_asked_for_beside_a_quality() -> None:
    profile = fitted_profile("gqa", "layer").with_curve(CURVE)
    asks: tuple[Callable[..., object], ...] = (partial(Codec, profile), profile.resolve)
    for ask in asks:
        with pytest.raises(InputError, match=re.escape("quality: must come alone if it is a Quality, got kl, worst")):
            ask(Quality("high"), kl=1e-3, worst=True)
    with pytest.raises(TypeError, match="limit"):
        Codec(profile, limit=3)  # type: ignore[call-arg]
