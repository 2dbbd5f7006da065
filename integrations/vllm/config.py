"""What a user may write into `kv_connector_extra_config`, checked when the engine starts."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from cuvee.codec.errors import InputError

_QUALITIES = ("quality", "kl", "bits", "ratio", "step")
_DECISIONS = ("measured", "always")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the connector, by the names of the JSON that sets them.

    Attributes:
        store: where the blobs go: a store URL, or a list of them, fastest first (`cuvee.integrations.stores`).
        profile: path of the model's profile; None: the generic profile.
        quality, kl, bits, ratio, step: at most one, as `cuvee.Codec` takes them; default `quality="balanced"`.
        chunk_tokens: tokens a blob; a multiple of the engine's block size.
        min_tokens: shorter hits are not loaded; default: one chunk.
        load_async: load while other requests run; False: the engine waits for its loads.
        decide: "measured": load where that is expected to beat recompute; "always": load whatever is found.
        store_generated: store what the model generated, too: the next turn of a conversation begins with it.
        tenant: of requests that carry no `cache_salt`.
        model_id: names the weights; default: computed from the checkpoint's files.
        check_model: refuse a profile that was calibrated on other weights.
        threads: CPU threads that encode and decode.
        max_pending_mb: uncompressed chunks that may wait to be stored, in 10^6 bytes; more are not stored.
        lookup_timeout: seconds that a request waits for the answer whether it is cached.
        load_timeout: seconds after which a load is given up and the tokens are recomputed.
        key_env: name of the environment variable that holds the secret; blobs are then authenticated.
    """

    store: tuple[str, ...] = ("memory://?max_gb=4",)
    profile: str | None = None
    quality: str | None = None
    kl: float | None = None
    bits: float | None = None
    ratio: float | None = None
    step: float | None = None
    chunk_tokens: int = 256
    min_tokens: int | None = None
    load_async: bool = True
    decide: str = "measured"
    store_generated: bool = True
    tenant: str = ""
    model_id: str | None = None
    check_model: bool = True
    threads: int = 2
    max_pending_mb: float = 1024
    lookup_timeout: float = 2.0
    load_timeout: float = 30.0
    key_env: str | None = None

    def __post_init__(self) -> None:
        given: Any = self.store
        urls = tuple(given) if isinstance(given, list | tuple) else (given,)
        if not urls or not all(isinstance(url, str) and url for url in urls):
            raise InputError(f"store: must be a store URL or a list of them, got {given!r}")
        object.__setattr__(self, "store", urls)
        for name in ("profile", "quality", "model_id", "key_env"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise InputError(f"{name}: must be a string that is not empty, or left out, got {value!r}")
        if not isinstance(self.tenant, str):
            raise InputError(f"tenant: must be a string, got {self.tenant!r}")
        for name in ("load_async", "store_generated", "check_model"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name}: must be true or false, got {getattr(self, name)!r}")
        for name in ("chunk_tokens", "min_tokens", "threads"):
            value = getattr(self, name)
            if not (name == "min_tokens" and value is None) and (type(value) is not int or value < 1):
                raise InputError(f"{name}: must be a whole number of at least 1, got {value!r}")
        for name in ("max_pending_mb", "lookup_timeout", "load_timeout"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < float("inf"):
                raise InputError(f"{name}: must be a number above 0, got {value!r}")
        if self.decide not in _DECISIONS:
            raise InputError(f"decide: must be one of {', '.join(_DECISIONS)}, got {self.decide!r}")
        if len(self.codec_quality) > 1:
            raise InputError(
                f"quality: give at most one of {', '.join(_QUALITIES)}, got {', '.join(self.codec_quality)}"
            )

    @classmethod
    def from_dict(cls, extra: Mapping[str, Any]) -> Options:
        """Options from the engine's JSON.

        Raises:
            InputError: an unknown name (with the nearest known one), or a value of the wrong type or range.
        """
        known = [field.name for field in fields(cls)]
        for name in extra:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
                raise InputError(f"kv_connector_extra_config: has no option {name!r}: {hint}")
        return cls(**extra)

    @property
    def codec_quality(self) -> dict[str, Any]:
        """The one quality asked for, as arguments of `Codec` and `Profile.resolve`; empty: the default."""
        return {name: getattr(self, name) for name in _QUALITIES if getattr(self, name) is not None}

    @property
    def least_tokens(self) -> int:
        """Shortest load worth a look."""
        return self.chunk_tokens if self.min_tokens is None else self.min_tokens

    def secret(self) -> bytes | None:
        """The key of authenticated blobs.

        Raises:
            InputError: the variable is not set.
        """
        if self.key_env is None:
            return None
        value = os.environ.get(self.key_env)
        if not value:
            raise InputError(f"key_env: the environment variable {self.key_env} is not set")
        return value.encode()
