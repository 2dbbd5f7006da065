"""`CodingOptions`: the options of every engine's adapter about its store, its codec and its model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

from cuvee.codec.errors import InputError
from cuvee.codec.format.keys import Key, make_keys
from cuvee.codec.profiles.profile_file import check_profile_file
from cuvee.codec.profiles.quality import LOSSLESS, Quality
from cuvee.codec.support.suggest import suggestion
from cuvee.integrations.identity.secret_sources import read_secret
from cuvee.integrations.profiles.location import (
    ProfileLocation,
    names_collection,
    shown_profile,
)
from cuvee.integrations.stores import open_store
from cuvee.integrations.stores.redaction import redacted

_LOCAL = ("memory:", "file:")  # stores of this host
_QUALITIES = ("quality", "kl", "bits", "ratio", "step")


def limited(default: Any, **limits: Any) -> Any:
    """Declare an option with limits: `least` and `most` of a number, or the `choices` of a text.

    One that is checked `elsewhere` is left to that place.
    """
    return field(default=default, metadata=limits)


def check_values(options: Any, prefix: str = "") -> None:
    """Check each field of a dataclass that is declared as a switch, a text or a number.

    Unless their declaration is `limited`, texts are not empty, whole numbers are at least 1, and others above 0.

    Raises:
        InputError: names the first that is wrong.
    """
    for each in fields(options):
        kind, _, optional = str(each.type).partition(" | ")
        value = getattr(options, each.name)
        if each.metadata.get("elsewhere") or (optional and value is None):
            continue
        if wanted := _wanted(kind, value, **each.metadata):
            raise InputError(
                f"{prefix}{each.name}: must be {wanted}{', or left out' if optional else ''}, got {value!r:.100}"
            )


def _wanted(kind: str, value: Any, least: int = 1, most: float = math.inf, choices: Sequence[str] = ()) -> str | None:
    """Return what a value declared as `kind` must be; None if it is that."""
    if kind == "bool" and not isinstance(value, bool):
        return "true or false"
    if choices and value not in choices:
        return f"one of {', '.join(choices)}"
    if kind == "str" and not (isinstance(value, str) and value):
        return "a string that is not empty"
    if kind == "int" and not (type(value) is int and least <= value <= most):
        return f"a whole number of at least {least}" if most == math.inf else f"a whole number from {least} to {most}"
    if kind == "float" and not (type(value) in (int, float) and 0 < value < math.inf):
        return "a number above 0"
    return None


@dataclass(frozen=True, slots=True, repr=False)
class CodingOptions:
    """The options that adapters have in common, by the names of the JSON that sets them.

    Attributes:
        SOURCE: name of the engine's option that holds the JSON, for messages.
        store: a store URL, or a list of them, fastest first (`cuvee.integrations.stores`).
        profile: path of the model's profile, or its id at a place (`cuvee.integrations.profiles.location`);
            None: lossless.
        quality, kl, bits, ratio, step: at most one, as `cuvee.Codec` takes them; default `quality="balanced"` with a
            profile, `"lossless"` without one, which then is the only quality.
        tenant: of requests without a `cache_salt`.
        model_id: identifies the weights; default: computed from the checkpoint's files. Where SGLang updates weights
            while it serves, it names the run of training that counts their versions.
        check_model: refuse a profile that was calibrated on other weights; only with `profile`.
        threads: CPU threads that encode and decode.
        key_env: name of the environment variable that holds the secret, or a list of them; blobs are then
            authenticated: written with the first secret, accepted with any.
        key_file: instead of `key_env`: path of a file with the secret, or a list of them.
        lookup_timeout: seconds that a lookup may take; then what it asks for is not found.
        load_timeout: seconds that the store may take for anything else.
    """

    SOURCE: ClassVar[str] = "options"

    store: tuple[str, ...] = ("memory://?max_gb=4",)
    profile: str | None = None
    quality: str | None = None
    kl: float | None = limited(None, elsewhere=True)
    bits: float | None = limited(None, elsewhere=True)
    ratio: float | None = limited(None, elsewhere=True)
    step: float | None = limited(None, elsewhere=True)
    tenant: str = limited("", elsewhere=True)
    model_id: str | None = None
    check_model: bool = True
    threads: int = 2
    key_env: tuple[str, ...] | None = None
    key_file: tuple[str, ...] | None = None
    lookup_timeout: float = 2.0
    load_timeout: float = 30.0

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
        check_values(self)
        if self.profile is not None and names_collection(self.profile):
            ProfileLocation.parse(self.profile).need_id()
        if not isinstance(self.tenant, str):
            raise InputError(f"tenant: must be a string, got {type(self.tenant).__name__}")
        limits: Any = self.codec_quality
        quality = Quality.of(limits.pop("quality", None), limits, default=LOSSLESS)
        if self.profile is None and not quality.lossless:
            raise InputError(
                f"{next(iter(self.codec_quality))}: must be left out without a profile, whose coding is lossless, got "
                f"{quality}: learn a profile (cuvee profile learn), and name it in option 'profile'"
            )
        if self.profile is None and not self.check_model:
            raise InputError("check_model: must be left out without a profile, which is what it checks, got false")

    def __repr__(self) -> str:
        """Show all options, secrets in URLs and the tenant redacted: a tenant is as good as a secret."""
        shown = {each.name: getattr(self, each.name) for each in fields(self)}
        shown["store"] = tuple(map(redacted, self.store))
        shown["profile"] = None if self.profile is None else shown_profile(self.profile)
        shown["tenant"] = "***" if self.tenant else ""
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @classmethod
    def from_dict(cls, extra: Mapping[str, Any]) -> Self:
        """Return options from the engine's JSON.

        Raises:
            InputError: an unknown name (with the nearest known one), or a value of the wrong type or range.
        """
        known = [each.name for each in fields(cls)]
        for name in extra:
            if name not in known:
                raise InputError(f"{cls.SOURCE}: has no option {name!r}: {suggestion(name, known)}")
        return cls(**extra)

    @property
    def codec_quality(self) -> dict[str, Any]:
        """The configured quality, as arguments of `Codec` and `Profile.resolve`; empty: the default."""
        return {name: getattr(self, name) for name in _QUALITIES if getattr(self, name) is not None}

    def quality_of(self, dtype: str) -> dict[str, Any]:
        """The same for a cache of this dtype, whose size a ratio is of."""
        return self.codec_quality | ({} if self.ratio is None else {"dtype": dtype})

    def check(self) -> None:
        """Find out without a model whether profile, secrets and stores can be right. Of a profile's file, only what it
        says about itself is read; no collection is asked, no store is connected to, and no folder made.

        Raises:
            FileNotFoundError, CuveeError: as `Profile.load`, if option `profile` names a file.
            InputError: as `secrets`; a URL that no store has.
            ImportError: the package of a store's client is missing.
        """
        self.secrets()
        if self.profile is not None and not names_collection(self.profile):
            check_profile_file(self.profile)
        open_store(self.store).close()

    @property
    def local(self) -> bool:
        """Whether every store is on this host, as far as its URL tells."""
        return all(url.startswith(_LOCAL) for url in self.store)

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
