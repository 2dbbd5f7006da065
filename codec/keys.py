"""Secrets that authenticate blobs: where they come from, and the names that tell them apart.

A secret comes from an environment variable or a file, never from an option's own value: options are logged, shown by
`repr` and echoed by servers.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from cuvee.codec.errors import InputError

MIN_KEY_BYTES = 16
MAX_KEY_BYTES = hashlib.blake2b.MAX_KEY_SIZE
KEY_ID_BYTES = 8
MAX_FILE_BYTES = 1 << 16  # of a file with one secret: a device, or a disk image given by mistake, is not read whole


@dataclass(frozen=True, slots=True)
class Key:
    """A secret and its name. Neither its repr nor a pickle shows the secret: it refuses to be pickled.

    Attributes:
        id: 8 bytes that name the secret and do not tell it: keyed BLAKE2b of nothing.
        secret: 16 to 64 bytes.
    """

    id: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def of(cls, secret: object) -> Key:
        """The key of a secret.

        Raises:
            InputError: it is not 16 to 64 bytes.
        """
        if not isinstance(secret, bytes) or not MIN_KEY_BYTES <= len(secret) <= MAX_KEY_BYTES:
            got = f"{len(secret)} bytes" if isinstance(secret, bytes) else type(secret).__name__
            raise InputError(f"key must be {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes of secret, got {got}")
        name = hashlib.blake2b(key=secret, digest_size=KEY_ID_BYTES, person=b"cuvee-key-id").digest()
        return cls(name, secret)

    def __reduce__(self) -> NoReturn:
        raise InputError(
            "a Codec with a key= is not pickled or copied: the bytes would hold the secret. Make one where it is used, "
            "with the key from that process's own environment; a Codec can be shared between threads as it is"
        )


def make_keys(key: bytes | Sequence[bytes] | None) -> tuple[Key, ...]:
    """The keys of an argument `key=`: of one secret, or of several, the first of which writes; none of None.

    Raises:
        InputError: not bytes, of another length than 16 to 64, or an empty list.
    """
    if key is None:
        return ()
    secrets = [key] if isinstance(key, bytes) or not isinstance(key, Sequence) else list(key)
    if not secrets:
        raise InputError("key must hold at least one secret; None for blobs without a tag")
    # While secrets are replaced, the old and the new one may be the same for a while.
    return tuple(dict.fromkeys(Key.of(secret) for secret in secrets))


def read_secret(option: str, *, env: str | None = None, file: str | None = None) -> bytes:
    """A secret from an environment variable or a file, without the white space around it.

    White space is left out because editors, shells and secret managers add line ends, and one replica's secret must not
    differ from another's by them.

    Args:
        option: names what asks, for messages.
        env: name of the variable.
        file: or path of the file.

    Raises:
        InputError: the variable is not set, the file cannot be read, or nothing is in it. Messages never hold a value.
    """
    if env is not None:
        try:
            value = os.environ.get(env)
        except ValueError:  # no variable can be called so: half of a surrogate pair
            value = None
        # Somebody may have given the secret itself instead of a name: what does not look like one is not shown.
        where = f"the environment variable {env}" if re.fullmatch("[A-Z_][A-Z0-9_]*", env) else "the variable it names"
        if value is None:
            raise InputError(f"{option}: {where} is not set")
        data = os.fsencode(value)
    else:
        where = f"the file {file}" if str(file).startswith(("/", ".", "~")) else "the file it names"
        try:
            with open(str(file), "rb") as stream:
                data = stream.read(MAX_FILE_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise InputError(f"{option}: {where} cannot be read: {reason}") from None
        if len(data) > MAX_FILE_BYTES:
            raise InputError(f"{option}: {where} is too large for one secret")
    secret = data.strip()
    if not secret:
        raise InputError(f"{option}: {where} is empty")
    return secret
