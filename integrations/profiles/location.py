"""Where a collection of profiles is, as users write it.

/srv/profiles#12ab…               a folder, and the id of a profile in it
file:///srv/profiles#12ab…        the same
s3://bucket/prefix#12ab…          object storage: also gs, az, abfs, http and https
hf://owner/name@revision#12ab…    a repository of the Hugging Face hub, at its main branch without a revision

Without an id, a location names the collection.
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
_ENDED = re.compile(r"(.+)#([0-9a-f]{32})", re.DOTALL)
_REPOSITORY = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ProfileLocation:
    """A parsed location.

        >>> where = ProfileLocation.parse("hf://mine/profiles@v2")
        >>> where.kind, where.root, where.revision
        ('hub', 'mine/profiles', 'v2')

    Attributes:
        kind: what holds the collection.
        root: path of the folder, URL of the prefix, or `owner/name` of the repository.
        shown: the location for messages, without secrets.
        id: of one profile, 32 hex digits; None: of none.
        revision: branch, tag or commit of the repository; None: its main branch.
    """

    kind: Literal["folder", "objects", "hub"]
    root: str
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
            ended = _ENDED.fullmatch(where)
            if ended is None and (identity := _meant_id(where)) is not None:
                check_id(identity)
            return cls("folder", ended[1], where, ended[2]) if ended else cls("folder", where, where)
        kind = scheme[1].lower() if scheme else ""
        root, _, fragment = where.partition("#")
        rest, named = root.partition("://")[2], check_id(fragment) if fragment else None
        if "?" in root:
            raise InputError(f"profile: must have no options, and may end in #ID, the id of a profile, got {shown}")
        if kind == "file":
            path = unquote(rest)
            if not path.startswith("/") or "\0" in rest or "\0" in path:
                raise InputError(f"profile: must be file:///absolute/path, with %23 for # and %3F for ?, got {shown}")
            return cls("folder", path, shown, named)
        if kind in OBJECT_SCHEMES:
            return cls("objects", root, shown, named)
        repository = _REPOSITORY.fullmatch(rest.rstrip("/"))
        if kind != "hf" or repository is None or ".." in rest:
            raise InputError(
                f"profile: must name a folder, object storage ({', '.join(OBJECT_SCHEMES)}), hf://owner/name or "
                f"hf://owner/name@revision, got {shown!r}"
            )
        return cls("hub", repository[1], shown, named, repository[2])

    def need_id(self) -> str:
        """Return the id.

        Raises:
            InputError: the location names a collection.
        """
        if self.id is None:
            raise InputError(
                f"profile: must name a file, or a place and an id (URL#id), got {self.shown}: cuvee profile list "
                f"{self.shown} shows the ids"
            )
        return self.id


def names_collection(profile: str) -> bool:
    """Return whether option `profile` of an engine names a collection, by a URL, an id or a folder, and not a file."""
    named = _URL.match(profile) or _ENDED.fullmatch(profile)
    return profile.startswith(_TIERED) or named is not None or Path(profile).is_dir() or _meant_id(profile) is not None


def _meant_id(where: str) -> str | None:
    """Return what follows the last # if a folder is named before it, and no file or folder by all of it."""
    folder, _, identity = where.rpartition("#")
    return identity if folder and Path(folder).is_dir() and not Path(where).exists() else None


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
