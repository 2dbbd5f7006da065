"""Removal of secrets from the URLs and errors of stores, so that messages and logs can show them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import unquote

_LEAST_SECRET = 4  # characters; a shorter string is no secret, and hiding it would garble messages
# Options that a message may show. Any other option may be a secret.
_HARMLESS = {"max_gb", "ttl", "timeout", "db", "id"}


def redacted(url: str) -> str:
    """Return `url`, of one store or `tiered:`, without secrets. A part that may be a secret is hidden."""
    # Only a comma before a scheme ends a URL. Another one is part of a password, although it should be written %2C.
    return ",".join(_redacted(part) for part in re.split(r",(?=\s*[a-zA-Z][a-zA-Z0-9+.-]*://)", url))


def _redacted(url: str) -> str:
    head, separator, rest = url.partition("://")
    if not separator:
        head, rest = "", url
    # The last @ counts, because a password that was not quoted may contain @, / and ?.
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
    """Return the secrets that `redacted` hides in the URL of one store, both quoted and unquoted."""
    place, _, query = url.partition("://")[2].partition("?")
    user, _, _ = place.rpartition("@")
    found = [user.partition(":")[2]]
    found += [value for name, _, value in (pair.partition("=") for pair in query.split("&")) if name not in _HARMLESS]
    both = [form for secret in found for form in (secret, unquote(secret))]
    return tuple(dict.fromkeys(form for form in both if len(form) >= _LEAST_SECRET))


def scrubbed(error: BaseException, secrets: Sequence[str]) -> str:
    """Return the message of an error without secrets. The error still has them: let no other have it as its cause."""
    text = str(error)
    for secret in secrets:
        text = text.replace(secret, "***")
    return text
