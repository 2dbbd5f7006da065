"""URLs and errors of stores as messages and logs may show them: without the secrets that a URL holds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import unquote

_LEAST_SECRET = 4  # characters; anything shorter is no secret, and hiding it would garble messages
# Options that a message may show. Any other may be a secret.
_HARMLESS = {"max_gb", "max_mb", "max_gb_per_tenant", "max_entry_mb", "ttl", "timeout", "db"}


def redacted(url: str) -> str:
    """`url`, of one store or `tiered:`, as messages and logs may show it. When in doubt, a part is hidden."""
    # Not every comma ends a URL. One in a password should have been written %2C, but must not reveal the rest of it.
    return ",".join(_redacted(part) for part in re.split(r",(?=\s*[a-zA-Z][a-zA-Z0-9+.-]*://)", url))


def _redacted(url: str) -> str:
    head, separator, rest = url.partition("://")
    if not separator:
        head, rest = "", url
    # The last @ counts: a password that somebody forgot to quote may hold others, and / and ?, too.
    user, at, place = rest.rpartition("@")
    name, colon, _ = user.partition(":")
    if at and (colon or "/" not in user):
        rest = (f"{name}:***@" if colon else "***@") + place
    elif not at and (broken := re.match(r"([^/?\[]*?):(?![0-9]*([/?]|$))", rest)):
        rest = f"{broken[1]}:***"
    place, question, query = rest.partition("?")
    names = ((pair, pair.partition("=")[0]) for pair in query.split("&"))
    shown = "&".join(pair if name in _HARMLESS else f"{name}=***" for pair, name in names) if question else ""
    return head + separator + place + question + shown


def secrets_of(url: str) -> tuple[str, ...]:
    """What `redacted` hides of the URL of one store, quoted and unquoted: servers may send it back in messages."""
    place, _, query = url.partition("://")[2].partition("?")
    user, _, _ = place.rpartition("@")
    found = [user.partition(":")[2]]
    found += [value for name, _, value in (pair.partition("=") for pair in query.split("&")) if name not in _HARMLESS]
    both = [form for secret in found for form in (secret, unquote(secret))]
    return tuple(dict.fromkeys(form for form in both if len(form) >= _LEAST_SECRET))


def scrubbed(error: BaseException, secrets: Sequence[str]) -> str:
    """The message of an error without the secrets. They are also removed from its causes, which logs show."""
    one: BaseException | None = error
    for _ in range(16):  # bounded, because a chain of causes may be a ring
        if one is None:
            break
        one.args = tuple(_without(part, secrets) if isinstance(part, str) else part for part in one.args)
        # Some make their message of attributes: aiohttp of `message`, an OSError of `strerror`.
        for name in (*getattr(one, "__dict__", ()), "strerror", "filename"):
            part = getattr(one, name, None)
            if isinstance(part, str) and _without(part, secrets) != part:
                with suppress(AttributeError, TypeError):
                    setattr(one, name, _without(part, secrets))
        one = one.__cause__ or one.__context__
    return _without(str(error), secrets)


def _without(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, "***")
    return text
