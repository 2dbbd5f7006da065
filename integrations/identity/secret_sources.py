"""Where secrets come from: an environment variable or a file, never the value of an option.

Options are logged, shown by `repr`, and echoed by servers.
"""

from __future__ import annotations

import os
import re

from cuvee.codec.errors import InputError

MAX_FILE_BYTES = 1 << 16  # limit for a file with a secret, so that no device or disk image is read by mistake


def read_secret(option: str, *, env: str | None = None, file: str | None = None) -> bytes:
    """Read a secret from an environment variable or a file, without surrounding white space.

    White space is stripped because editors, shells and secret managers add line ends, in which the secrets of two
    replicas must not differ.

    Args:
        option: name of the option, for messages.
        env: name of the variable.
        file: path of the file, used if `env` is None.

    Raises:
        InputError: the variable is not set, the file cannot be read, or the secret is empty. Messages never show it.
    """
    if env is not None:
        try:
            value = os.environ.get(env)
        except ValueError:  # an impossible name: half of a surrogate pair
            value = None
        # A value that does not look like a name is not shown: it may be the secret itself.
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
