"""Where a collection of profiles is, as users write it.

/srv/profiles                      a folder
file:///srv/profiles?id=12ab…      the same folder; `id` names one profile in place of the newest of the model
s3://bucket/prefix?id=12ab…        object storage: also gs, az, abfs, http and https
hf://owner/name@revision?id=12ab…  a repository of the Hugging Face hub, at its main branch without a revision
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

from cuvee.codec.errors import InputError
from cuvee.integrations.stores.base import OBJECT_SCHEMES
from cuvee.integrations.stores.redaction import redacted

_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")
_TIERED = "tiered:"
_ID = re.compile(r"[0-9a-f]{32}")
_REPOSITORY = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ProfileLocation:
    """A parsed location.

        >>> where = ProfileLocation.parse("hf://mine/profiles@v2")
        >>> where.kind, where.place, where.revision
        ('hub', 'mine/profiles', 'v2')

    Attributes:
        kind: what holds the collection.
        place: path of the folder, URL of the prefix, or `owner/name` of the repository.
        shown: the location for messages, without secrets.
        id: of one profile, 32 hex digits; None: the newest of the model.
        revision: branch, tag or commit of the repository; None: its main branch.
    """

    kind: Literal["folder", "objects", "hub"]
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
        shown, scheme = redacted(where), _URL.match(where)
        if not scheme and where and not where.startswith(_TIERED):
            return cls("folder", where, where)
        kind = scheme[1].lower() if scheme else ""
        place, _, query = where.partition("?")
        rest, named = place.partition("://")[2], None
        if query:
            name, _, value = query.partition("=")
            if name != "id":
                raise InputError(f"{name}: must be no option of {kind}://, which takes one id alone, got {shown}")
            named = check_id(value)
        if kind == "file":
            path = unquote(rest)
            if not path.startswith("/") or set(rest) & set("#\0") or "\0" in path:
                raise InputError(f"profile: must be file:///absolute/path, with %23 for # and %3F for ?, got {shown}")
            return cls("folder", path, shown, named)
        if kind in OBJECT_SCHEMES:
            return cls("objects", place, shown, named)
        repository = _REPOSITORY.fullmatch(rest.rstrip("/"))
        if kind != "hf" or repository is None or ".." in rest:
            raise InputError(
                f"profile: must name a folder, object storage ({', '.join(OBJECT_SCHEMES)}), hf://owner/name or "
                f"hf://owner/name@revision, got {shown!r}"
            )
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
