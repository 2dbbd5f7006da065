"""Token ids on their way into a blob and out of it."""

from __future__ import annotations

import logging

import numpy as np
import xxhash

from cuvee.codec.errors import CorruptError, FormatError, InputError
from cuvee.codec.format.container import ID_BYTES, Header
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.support.advice import ADVISES
from cuvee.codec.support.arrays import I64
from cuvee.codec.support.once import Once
from cuvee.codec.token_ids import NO_TOKEN

_once = Once(logging.getLogger(__name__))


class IdCoding:
    """Token ids as one profile uses them; without loss, chunks are coded without."""

    def __init__(self, profile: Profile, used: bool) -> None:
        self._profile, self._used = profile, used

    def usable(self, ids: I64 | None) -> I64 | None:
        """Return the ids of a chunk; None if a token has none, or if nothing is predicted from them.

        Raises:
            InputError: one is not of the vocabulary.
        """
        table = self._profile.token_table
        if table is None or not self._used:
            return None
        if ids is None or ids.min() == NO_TOKEN:
            if ADVISES.get():
                _warn_of_no_ids(bool(self._profile.plain_curve))
            return None
        if ids.max() >= table.vocabulary:
            raise InputError(
                f"token_ids: must be below {table.vocabulary}, the vocabulary of the profile's model, got {ids.max()}"
            )
        return ids

    def write(self, ids: I64 | None) -> bytes:
        """Return the ids as a blob holds them; nothing without ids."""
        table = self._profile.token_table
        return b"" if ids is None or table is None else write_token_ids(ids, table.vocabulary)

    def read(self, blob: bytes | memoryview, header: Header) -> I64 | None:
        """Return the ids that a blob holds; None if it holds none.

        Raises:
            CorruptError, FormatError: they are damaged, or the profile has no table for them.
        """
        table = self._profile.token_table
        if table is not None:
            return read_token_ids(blob, header, table.vocabulary)
        if header.token_id_bytes:
            raise FormatError("header: must list no token ids, which the profile has no table for")
        return None


def write_token_ids(token_ids: I64, vocabulary: int) -> bytes:
    """Write the ids of a chunk's tokens, `[T]`, all below `vocabulary`."""
    width = next(width for width in ID_BYTES if vocabulary <= 1 << 8 * width)
    wire = token_ids.astype("<u4")
    return wire.view(np.uint8).reshape(-1, 4)[:, :width].tobytes()


def read_token_ids(blob: bytes | memoryview, header: Header, vocabulary: int) -> I64 | None:
    """Return the ids of the chunk's tokens, `[T]`; None if the blob holds none.

    Raises:
        CorruptError: their checksum does not match.
        FormatError: an id is outside the vocabulary.
    """
    if not header.token_id_bytes:
        return None
    part = memoryview(blob)[header.header_bytes : header.header_bytes + header.token_id_bytes]
    if xxhash.xxh3_64_intdigest(part) != header.token_id_hash:
        raise CorruptError("token ids: their checksum does not match: the bytes are damaged")
    width = header.token_id_bytes // header.tokens
    wide = np.zeros((header.tokens, 4), np.uint8)
    wide[:, :width] = np.frombuffer(part, np.uint8).reshape(-1, width)
    ids = wide.view("<u4")[:, 0].astype(np.int64)
    if ids.max() >= vocabulary:
        raise FormatError(f"token ids: must be below {vocabulary}, the profile's vocabulary, got {ids.max()}")
    return ids


def _warn_of_no_ids(has_curve: bool) -> None:
    """Warn once per process."""
    _once(
        has_curve,
        "a chunk without token ids, or with a token that has none, is coded with a profile that predicts from tokens: "
        "its blob is larger%s. Give the chunk its token_ids, or learn the profile with predict_tokens=False",
        "" if has_curve else ", and its KL may exceed the profile's curve, which was measured with ids alone",
    )
