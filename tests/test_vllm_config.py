"""The connector's options: every wrong one is refused by name when the engine starts."""

from __future__ import annotations

from typing import Any

import pytest

from cuvee.codec.errors import InputError
from cuvee.integrations.vllm.config import Options


def test_defaults() -> None:
    options = Options.from_dict({})
    assert options.store == ("memory://?max_gb=4",)
    assert options.codec_quality == {}
    assert options.least_tokens == options.chunk_tokens == 256


def test_everything_can_be_set() -> None:
    options = Options.from_dict(
        {
            "store": ["memory://", "file:///x"], "profile": "p.cuvee", "ratio": 8, "chunk_tokens": 128,
            "min_tokens": 512, "load_async": False, "decide": "always", "store_generated": False, "tenant": "t",
            "model_id": "m", "check_model": False, "threads": 1, "max_pending_mb": 1.5, "lookup_timeout": 1,
            "load_timeout": 2.5, "key_env": "SECRET",
        }
    )  # fmt: skip
    assert options.store == ("memory://", "file:///x")
    assert options.codec_quality == {"ratio": 8}
    assert options.least_tokens == 512
    assert hash(options) is not None, "stores are shared by their URLs"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"stores": "x"}, "no option 'stores': did you mean 'store'"),
        ({"zzz": 1}, "no option 'zzz': known: store, profile"),
        ({"store": ""}, "store: must be"),
        ({"store": []}, "store: must be"),
        ({"store": [1]}, "store: must be"),
        ({"store": 5}, "store: must be"),
        ({"profile": ""}, "profile: must be"),
        ({"profile": 1}, "profile: must be"),
        ({"quality": ""}, "quality: must be"),
        ({"model_id": 1}, "model_id: must be"),
        ({"key_env": ""}, "key_env: must be"),
        ({"tenant": None}, "tenant: must be"),
        ({"load_async": 1}, "load_async: must be true or false"),
        ({"store_generated": "yes"}, "store_generated: must be true or false"),
        ({"check_model": None}, "check_model: must be true or false"),
        ({"chunk_tokens": 0}, "chunk_tokens: must be a whole number"),
        ({"chunk_tokens": 2.0}, "chunk_tokens: must be a whole number"),
        ({"chunk_tokens": True}, "chunk_tokens: must be a whole number"),
        ({"chunk_tokens": None}, "chunk_tokens: must be a whole number"),
        ({"min_tokens": 0}, "min_tokens: must be a whole number"),
        ({"threads": 0}, "threads: must be a whole number"),
        ({"max_pending_mb": 0}, "max_pending_mb: must be a number above 0"),
        ({"lookup_timeout": -1}, "lookup_timeout: must be a number above 0"),
        ({"lookup_timeout": float("nan")}, "lookup_timeout: must be a number above 0"),
        ({"load_timeout": float("inf")}, "load_timeout: must be a number above 0"),
        ({"load_timeout": True}, "load_timeout: must be a number above 0"),
        ({"decide": "maybe"}, "decide: must be one of measured, always"),
        (
            {"quality": "high", "kl": 0.1},
            "quality: give at most one of quality, kl, bits, ratio, step, got quality, kl",
        ),
        ({"bits": 2, "step": 1}, "quality: give at most one of"),
    ],
)
def test_what_makes_no_sense_is_refused(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Options.from_dict(extra)


def test_the_secret_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Options().secret() is None
    options = Options.from_dict({"key_env": "CUVEE_TEST_KEY"})
    monkeypatch.delenv("CUVEE_TEST_KEY", raising=False)
    with pytest.raises(InputError, match="key_env: the environment variable CUVEE_TEST_KEY is not set"):
        options.secret()
    monkeypatch.setenv("CUVEE_TEST_KEY", "s" * 20)
    assert options.secret() == b"s" * 20
    assert "s" * 20 not in repr(options)
