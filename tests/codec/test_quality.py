"""`Quality`: one thing that is asked for, checked where it is made, and the same codec however it is said."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

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
    ({"bits": float("nan")}, "bits: must be a positive number"),
    ({"ratio": True}, "ratio: must be a positive number"),
    ({"step": -1.0}, "step: must be a positive number"),
    ({"kl": 1e-3, "worst": 1}, "worst: must be True or False"),
    ({"preset": "high", "worst": True}, "worst: must be True or False, and True only with kl="),
    ({"ratio": 4.0, "dtype": "int8"}, "dtype: must be one of bfloat16, float16, float32, got 'int8'"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_what_cannot_be_asked_for_is_refused_where_it_is_said(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match="^" + message.replace("?", r"\?")):
        Quality(**arguments)


def test_a_codec_takes_a_quality_its_preset_or_its_arguments(fitted: Callable[..., Profile]) -> None:
    profile = fitted("gqa", "layer").with_curve(CURVE)
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
        assert codec.described_quality == f"{quality}, {codec.quality_name}"
    assert Codec(profile, Quality("lossless")).lossless and Codec(Profile.unlearned(profile.layout)).lossless


def test_nothing_is_asked_for_beside_a_quality(fitted: Callable[..., Profile]) -> None:
    profile = fitted("gqa", "layer").with_curve(CURVE)
    asks: tuple[Callable[..., object], ...] = (partial(Codec, profile), profile.resolve)
    for ask in asks:
        with pytest.raises(InputError, match=re.escape("quality: must come alone if it is a Quality, got kl, worst")):
            ask(Quality("high"), kl=1e-3, worst=True)
    with pytest.raises(TypeError, match="limit"):
        Codec(profile, limit=3)  # type: ignore[call-arg]


def test_a_quality_is_a_value() -> None:
    assert Quality("high") == Quality("high") != Quality("small")
    assert {Quality(kl=1e-3), Quality(kl=1e-3), Quality(kl=1e-3, worst=True)} == {
        Quality(kl=1e-3),
        replace(Quality(kl=1e-3), worst=True),
    }
    assert [str(own) for own in (Quality("small"), Quality(bits=3.0))] == ["quality=small", "bits=3.0"]
    assert [own.limits_kl for own in (Quality("small"), Quality(kl=1.0), Quality("lossless"), Quality(step=1.0))] == [
        True, True, False, False,
    ]  # fmt: skip
