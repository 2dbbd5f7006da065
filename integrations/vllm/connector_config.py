"""Options of the connector in `kv_connector_extra_config`, checked when the engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from cuvee.codec.errors import InputError
from cuvee.codec.format.keys import Key, make_keys, read_secret
from cuvee.codec.support.suggest import suggestion
from cuvee.integrations.stores.redaction import redacted
from cuvee.integrations.vllm.blending.blend_options import BlendOptions

_QUALITIES = ("quality", "kl", "bits", "ratio", "step")
_MOST_NICE = 19  # of Linux
_DECISIONS = ("measured", "always")
# A request that loads waits for at least one step of the engine, and this many more tokens hardly lengthen a step.
_LEAST_TOKENS = 64


@dataclass(frozen=True, slots=True, repr=False)
class Options:
    """Options of the connector, by the names of the JSON that sets them.

    Attributes:
        store: a store URL, or a list of them, fastest first (`cuvee.integrations.stores`).
        profile: path of the model's profile; None: the generic profile, which is not fitted to any model.
        quality, kl, bits, ratio, step: at most one, as `cuvee.Codec` takes them; default `quality="balanced"` with a
            profile, `"lossless"` without one.
        worst: with `kl`: the worst kind of text decides, as it does for presets.
        chunk_tokens: tokens per blob; a multiple of the engine's block size.
        min_tokens: shorter hits are not loaded; default: 64, or one chunk if that is shorter.
        load_async: load while other requests run; False: the engine waits for its loads.
        decide: "measured": load if that is expected to be faster than computing; "always": load all that is found.
        store_generated: also store generated tokens: the next turn of a conversation begins with them.
        tenant: of requests without a `cache_salt`.
        model_id: identifies the weights; default: computed from the checkpoint's files.
        check_model: refuse a profile that was calibrated on other weights.
        threads: CPU threads that encode and decode.
        store_niceness: how far threads that store give way to others, 0 to 19, as the `nice` of Linux: of a core that
            others want all the time, they get a third at 3, a tenth at 10 and 1.4 % at 19.
        store_share: seconds of CPU time per second that each rank may spend on encoding and writing while the engine is
            busy; what waits is encoded later, tails last. None: no limit.
        max_pending_mb: budget for uncompressed chunks that wait to be stored, in 10^6 bytes; beyond it chunks are not
            stored.
        lookup_timeout: seconds that a request waits to learn whether it is cached.
        load_timeout: seconds after which a load is given up and its tokens are computed.
        close_timeout: seconds that the engine's stop waits for chunks being stored; the rest is lost.
        tenant_metrics: count what each tenant stores and loads; each tenant adds its own time series.
        key_env: name of the environment variable that holds the secret, or a list of them; blobs are then
            authenticated: written with the first secret, accepted with any.
        key_file: instead of `key_env`: path of a file with the secret, or a list of them.
        blend: reuse cached segments at any position and recompute some of their tokens, so that answers are
            approximations (`cuvee.integrations.vllm.blending.blend_options.BlendOptions`). None: never.
    """

    store: tuple[str, ...] = ("memory://?max_gb=4",)
    profile: str | None = None
    quality: str | None = None
    kl: float | None = None
    bits: float | None = None
    ratio: float | None = None
    step: float | None = None
    worst: bool = False
    chunk_tokens: int = 256
    min_tokens: int | None = None
    load_async: bool = True
    decide: str = "measured"
    store_generated: bool = True
    tenant: str = ""
    model_id: str | None = None
    check_model: bool = True
    threads: int = 2
    store_niceness: int = 0
    store_share: float | None = None
    max_pending_mb: float = 1024
    lookup_timeout: float = 2.0
    load_timeout: float = 30.0
    close_timeout: float = 30.0
    tenant_metrics: bool = False
    key_env: tuple[str, ...] | None = None
    key_file: tuple[str, ...] | None = None
    blend: BlendOptions | None = None

    def __post_init__(self) -> None:
        given: Any = self.store
        urls = tuple(given) if isinstance(given, list | tuple) else (given,)
        if not urls or not all(isinstance(url, str) and url for url in urls):
            shown = ", ".join(repr(redacted(url)) if isinstance(url, str) else type(url).__name__ for url in urls)
            raise InputError(f"store: must be a store URL or a list of them, got {shown or 'none'}")
        object.__setattr__(self, "store", urls)
        for name in ("key_env", "key_file"):
            value: Any = getattr(self, name)
            if value is None:
                continue
            names = tuple(value) if isinstance(value, list | tuple) else (value,)
            if not names or not all(isinstance(each, str) and each for each in names):
                # The value is not shown: it may be the secret itself.
                raise InputError(f"{name}: must be a name or a list of them, or left out")
            object.__setattr__(self, name, names)
        if self.key_env and self.key_file:
            raise InputError("key_file: must be left out if key_env is given, got both")
        for name in ("profile", "quality", "model_id"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise InputError(f"{name}: must be a string that is not empty, or left out, got {value!r}")
        if not isinstance(self.tenant, str):
            raise InputError(f"tenant: must be a string, got {type(self.tenant).__name__}")
        for name in ("worst", "load_async", "store_generated", "check_model", "tenant_metrics"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name}: must be true or false, got {getattr(self, name)!r}")
        for name in ("chunk_tokens", "min_tokens", "threads"):
            value = getattr(self, name)
            if not (name == "min_tokens" and value is None) and (type(value) is not int or value < 1):
                raise InputError(f"{name}: must be a whole number of at least 1, got {value!r}")
        if type(self.store_niceness) is not int or not 0 <= self.store_niceness <= _MOST_NICE:
            raise InputError(
                f"store_niceness: must be a whole number from 0 to {_MOST_NICE}, got {self.store_niceness!r}"
            )
        for name in ("store_share", "max_pending_mb", "lookup_timeout", "load_timeout", "close_timeout"):
            value = getattr(self, name)
            if name == "store_share" and value is None:
                continue
            if type(value) not in (int, float) or not 0 < value < float("inf"):
                left_out = ", or left out" if name == "store_share" else ""
                raise InputError(f"{name}: must be a number above 0{left_out}, got {value!r}")
        if self.decide not in _DECISIONS:
            raise InputError(f"decide: must be one of {', '.join(_DECISIONS)}, got {self.decide!r}")
        blend: Any = self.blend
        if not isinstance(blend, BlendOptions | None):
            object.__setattr__(self, "blend", BlendOptions.from_json(blend))
        given_qualities = self.codec_quality.keys() - {"worst"}
        if len(given_qualities) > 1:
            got = ", ".join(name for name in _QUALITIES if name in given_qualities)
            raise InputError(f"quality: must be at most one of {', '.join(_QUALITIES)}, got {got}")

    def __repr__(self) -> str:
        """Show all options, secrets in the store's URLs and the tenant redacted: a tenant is as good as a secret."""
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        shown["store"] = tuple(map(redacted, self.store))
        shown["tenant"] = "***" if self.tenant else ""
        return f"Options({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @classmethod
    def from_dict(cls, extra: Mapping[str, Any]) -> Options:
        """Return options from the engine's JSON.

        Raises:
            InputError: an unknown name (with the nearest known one), or a value of the wrong type or range.
        """
        known = [field.name for field in fields(cls)]
        for name in extra:
            if name not in known:
                raise InputError(f"kv_connector_extra_config: has no option {name!r}: {suggestion(name, known)}")
        return cls(**extra)

    @property
    def codec_quality(self) -> dict[str, Any]:
        """The configured quality, as arguments of `Codec` and `Profile.resolve`; empty: the default."""
        given = {name: getattr(self, name) for name in _QUALITIES if getattr(self, name) is not None}
        return {**given, "worst": True} if self.worst else given

    @property
    def least_tokens(self) -> int:
        """Fewest tokens worth a load."""
        return min(self.chunk_tokens, _LEAST_TOKENS) if self.min_tokens is None else self.min_tokens

    def secrets(self) -> tuple[bytes, ...]:
        """Return the secrets that authenticate blobs, the writing secret first; none without `key_env` and `key_file`.

        Raises:
            InputError: a variable is not set, a file cannot be read, or a secret is not 16 to 64 bytes.
        """
        sources = [("key_env", name) for name in self.key_env or ()]
        sources += [("key_file", path) for path in self.key_file or ()]
        secrets = []
        for option, source in sources:
            secret = read_secret(option, **{option.removeprefix("key_"): source})
            try:
                Key.of(secret)
            except InputError as error:
                raise InputError(f"{option}: {error}") from None
            secrets.append(secret)
        return tuple(secrets)

    def key_ids(self) -> tuple[bytes, ...]:
        """Return the ids of the secrets, as `Codec.key_ids`.

        Raises:
            InputError: as `secrets`.
        """
        return tuple(key.id for key in make_keys(self.secrets() or None))
