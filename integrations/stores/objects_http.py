"""Reading objects over HTTP, from a server that may send anything.

fsspec reads the whole body of an answer, whatever range was asked for, and unpacks it if the server says it is packed.
"""

from __future__ import annotations

from typing import Any

import aiohttp
from fsspec.asyn import sync

# For a request with its redirects and all of the answer: a server may send byte after byte, or never come to the point.
SECONDS = 60.0


async def get_client(**named: Any) -> aiohttp.ClientSession:
    """The session of a file system: no cookies, which a server could pile up, and nothing is unpacked."""
    defaults = {"timeout": aiohttp.ClientTimeout(total=SECONDS), "auto_decompress": False}
    return aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), **{**defaults, **named})


def read(fs: Any, url: str, most: int) -> bytes:
    """At most the first `most` bytes of an object.

    Args:
        fs: fsspec's file system for HTTP.
        url: of the object.
        most: bytes to read. If there are more, the connection is closed.

    Raises:
        FileNotFoundError: there is no such object.
        OSError, aiohttp.ClientError, TimeoutError: the server refuses, or breaks off, or takes too long.
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
            raise OSError("the server packs what it was asked not to (Content-Encoding)")
        data = bytearray()
        while len(data) < most and (part := await answer.content.read(most - len(data))):
            data += part
    return bytes(data)
