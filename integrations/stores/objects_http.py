"""Reading objects over HTTP from a server that is not trusted.

fsspec reads the whole body of a response, whatever range was requested, and decompresses it if the server says that it
is compressed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError
from fsspec.asyn import sync

# For one request with its redirects and its whole response, since a server may send bytes slowly or redirect forever.
SECONDS = 60.0
_T = TypeVar("_T")


async def get_client(**named: Any) -> aiohttp.ClientSession:
    """Make the session of a file system. It decompresses nothing and keeps no cookies, which would pile up."""
    defaults = {"timeout": aiohttp.ClientTimeout(total=SECONDS), "auto_decompress": False}
    return aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), **{**defaults, **named})


def on_clean_connection(call: Callable[[], _T]) -> _T:
    """Return `call()`. If what the server sends is not HTTP, call once more, on another connection.

    Some servers send more than they announced, such as a body in response to HEAD. A connection that is used again then
    holds the rest of an earlier response where the next one should be.
    """
    try:
        return call()
    except aiohttp.ClientResponseError as error:
        if not isinstance(error.__cause__, HttpProcessingError):
            raise
    return call()


def read(fs: Any, url: str, most: int) -> bytes:
    """Read at most the first `most` bytes of an object.

    Args:
        fs: fsspec's file system for HTTP.
        url: the object's URL.
        most: bytes to read. If there are more, the connection is closed.

    Raises:
        FileNotFoundError: there is no such object.
        OSError, aiohttp.ClientError, TimeoutError: the server refuses, breaks off, or takes too long.
    """
    data: bytes = sync(fs.loop, _read, fs, url, most)
    return data


async def _read(fs: Any, url: str, most: int) -> bytes:
    session = await fs.set_session()
    options = dict(fs.kwargs)
    wanted = {"Range": f"bytes=0-{most - 1}", "Accept-Encoding": "identity"}
    options.setdefault("timeout", aiohttp.ClientTimeout(total=SECONDS))
    options["headers"] = {**options.get("headers", {}), **wanted}
    async with session.get(fs.encode_url(url), **options) as answer:
        if answer.status == 404:
            raise FileNotFoundError(url)
        answer.raise_for_status()
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise OSError("Content-Encoding: must be identity, as requested")
        data = bytearray()
        while len(data) < most and (part := await answer.content.read(most - len(data))):
            data += part
    return bytes(data)
