"""The entries of a store that hold pages.

    page's digest ──> index entry: which run holds the page, and where
    run's digest ───> run entry: digests of its pages, and the blob of their tokens

Several pages share a blob, because the codec needs more tokens than small pages have. Numbers are little-endian.

    index entry   bytes                      run entry   bytes
        0    4    magic "cuvI"                   0    4    magic "cuvR"
        4    1    version, 1                     4    1    version, 1
        5    1    zero                           5    1    zero
        6    2    position of the page           6    2    pages, n
        8   32    digest of the run              8  32n    digest of each page, in order
                                           8 + 32n    .    the blob

An index entry proves nothing. The digest of a run commits to the digests of its pages, and the tag of the blob covers
the run's store key. So with a key (`Codec(key=)`) no change of any entry can give a page the contents of another.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from cuvee.codec.errors import CorruptError, InputError
from cuvee.naming.identity import DIGEST_BYTES

MAX_RUN_PAGES = 4096

_INDEX, _RUN = b"cuvI", b"cuvR"
_VERSION = 1
_HEAD = struct.Struct("<4sBBH")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a page is: the digest of its run, and its position there."""

    run: bytes
    position: int


def make_index_entry(place: Place) -> bytes:
    """Make the index entry of a page."""
    return _HEAD.pack(_INDEX, _VERSION, 0, place.position) + place.run


def parse_index_entry(data: bytes) -> Place:
    """Invert `make_index_entry`.

    Raises:
        CorruptError: the bytes are no index entry of this version.
    """
    if len(data) != _HEAD.size + DIGEST_BYTES:
        raise CorruptError(f"index entry: must have {_HEAD.size + DIGEST_BYTES} bytes, got {len(data)}")
    position = _number(data, _INDEX, "index entry")
    if position >= MAX_RUN_PAGES:
        raise CorruptError(f"index entry: must give a position below {MAX_RUN_PAGES}, got {position}")
    return Place(data[_HEAD.size :], position)


def make_run_entry(pages: Sequence[bytes], blob: bytes) -> bytes:
    """Make the entry of a run, given the digests of its pages and the blob of their tokens.

    Raises:
        InputError: no pages, or more than `MAX_RUN_PAGES`.
    """
    if not 1 <= len(pages) <= MAX_RUN_PAGES:
        raise InputError(f"pages: must be 1 … {MAX_RUN_PAGES}, got {len(pages)}")
    return b"".join((_HEAD.pack(_RUN, _VERSION, 0, len(pages)), *pages, blob))


def parse_run_entry(data: bytes) -> tuple[list[bytes], memoryview]:
    """Return the digests of a run's pages, and the blob.

    Raises:
        CorruptError: the bytes are no run entry of this version, or end early.
    """
    if len(data) < _HEAD.size:
        raise CorruptError(f"run entry: must have at least {_HEAD.size} bytes, got {len(data)}")
    count = _number(data, _RUN, "run entry")
    end = _HEAD.size + count * DIGEST_BYTES
    if not 1 <= count <= MAX_RUN_PAGES or len(data) <= end:
        raise CorruptError(
            f"run entry: must hold 1 … {MAX_RUN_PAGES} pages and a blob, got {count} in {len(data)} bytes"
        )
    pages = [data[at : at + DIGEST_BYTES] for at in range(_HEAD.size, end, DIGEST_BYTES)]
    return pages, memoryview(data)[end:]


def _number(data: bytes, magic: bytes, name: str) -> int:
    found, version, reserved, number = _HEAD.unpack_from(data)
    if (found, version, reserved) != (magic, _VERSION, 0):
        raise CorruptError(f"{name}: must begin with {magic!r}, version {_VERSION}, got {found!r}, {version}")
    return int(number)
