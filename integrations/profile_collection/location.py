"""Where a collection of profiles is, as users write it.

    /srv/profiles                      a folder
    file:///srv/profiles?id=12ab…      the same folder; `id` names one profile in place of the newest of the model
    s3://bucket/prefix?id=12ab…        a store: also gs, az, abfs, fsspec+<protocol>, redis, valkey, unix
    hf://owner/name@revision?id=12ab…  a repository of the Hugging Face hub, at its main branch without a revision

A store takes the options of `open_store`, except those that would delete profiles.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

from cuvee.codec.errors import InputError
from cuvee.integrations.stores.redaction import redacted

_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")
_TIERED = "tiered:"
_ID = re.compile(r"[0-9a-f]{32}")
_REPOSITORY = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?", re.ASCII)
# Options of stores that delete entries, which a profile must survive.
_DELETING = ("max_gb", "max_mb", "max_gb_per_tenant", "ttl")


@dataclass(frozen=True, slots=True)
class ProfileLocation:
    """A parsed location.

        >>> where = ProfileLocation.parse("hf://mine/profiles@v2")
        >>> where.kind, where.place, where.revision
        ('hub', 'mine/profiles', 'v2')

    Attributes:
        kind: what holds the collection.
        place: path of the folder, URL of the store, or `owner/name` of the repository.
        shown: the location for messages, without secrets.
        id: of one profile, 32 hex digits; None: the newest of the model.
        revision: branch, tag or commit of the repository; None: its main branch.
    """

    kind: Literal["folder", "store", "hub"]
    place: str
    shown: str
    id: str | None = None
    revision: str | None = None

    @classmethod
    def parse(cls, where: str) -> ProfileLocation:
        """Return the location that `where` names. A text without a scheme is the path of a folder, which may not exist.

        Raises:
            InputError: the scheme, an option, a path or the name of a repository is wrong. No message shows secrets.
        """
        shown = redacted(where)
        scheme = _URL.match(where)
        if where.startswith(_TIERED) or (scheme and scheme[1].lower() == "memory"):
            raise InputError(
                f"profile: must be in one place that lasts, got {shown}: name a folder, a store that others see, or "
                "hf://owner/name"
            )
        if not scheme:
            if not where:
                raise InputError("profile: must name a folder, a store or hf://owner/name, got an empty string")
            return cls("folder", where, where)
        place, named, options = _without_id(where, shown)
        kind = scheme[1].lower()
        if kind not in ("hf", "file"):
            for option in options:
                name = option.partition("=")[0]
                if name in _DELETING:
                    raise InputError(
                        f"{name}: must be left out where profiles are kept, because it deletes entries, got {shown}"
                    )
            return cls("store", place, shown, named)
        if options:
            raise InputError(
                f"{options[0].partition('=')[0]}: must be no option of {kind}://, which takes id alone, got {shown}"
            )
        rest = place.partition("://")[2]
        if kind == "file":
            path = unquote(rest)
            if not path.startswith("/") or set(rest) & set("#\0") or "\0" in path:
                raise InputError(f"profile: must be file:///absolute/path, with %23 for # and %3F for ?, got {shown}")
            return cls("folder", path, shown, named)
        repository = _REPOSITORY.fullmatch(rest.rstrip("/"))
        if repository is None or ".." in rest:
            raise InputError(f"profile: must be hf://owner/name or hf://owner/name@revision, got {shown}")
        return cls("hub", repository[1], shown, named, repository[2])


def names_collection(profile: str) -> bool:
    """Return whether an engine's option `profile` names a collection, by a URL or as a folder, and not a file."""
    return profile.startswith(_TIERED) or _URL.match(profile) is not None or Path(profile).is_dir()


def shown_profile(profile: str) -> str:
    """Return an engine's option `profile` for messages: a URL without its secrets, a path as it is."""
    return redacted(profile) if _URL.match(profile) else profile


def check_id(name: str) -> str:
    """Return `name` if it may be the id of a profile.

    Raises:
        InputError: it is not 32 lower-case hexadecimal digits.
    """
    if _ID.fullmatch(name) is None:
        raise InputError(f"id: must be 32 lower-case hex digits, as cuvee profile show prints them, got {name!r:.80}")
    return name


def _without_id(where: str, shown: str) -> tuple[str, str | None, list[str]]:
    """Return a URL without the option `id`, the id, and the other options."""
    place, _, query = where.partition("?")
    named: str | None = None
    options: list[str] = []
    for pair in query.split("&") if query else ():
        name, _, value = pair.partition("=")
        if name != "id":
            options.append(pair)
        elif named is not None:
            raise InputError(f"id: must be given once, got it twice in {shown}")
        else:
            named = check_id(value)
    return place + (f"?{'&'.join(options)}" if options else ""), named, options
