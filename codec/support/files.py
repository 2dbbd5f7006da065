"""Atomic writes, so that readers never see a partial file."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["replacing", "write_atomically", "write_json"]


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty temporary file beside `path`, and replace `path` with it if the block succeeds.

    Readers see the old file until the block ends, then the complete new file. If the block fails, the temporary file is
    deleted and `path` does not change.

    Args:
        path: the file to write. Its folder must exist.

    Yields:
        The temporary file, `.NAME.PID-RANDOM.tmp` in the same folder, with the permissions of any new file.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb"):
            mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # some writers, such as safetensors, make their files readable by the owner only
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file atomically, and create its folder if it is missing. See `replacing`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path, data: object) -> None:
    """Write indented JSON atomically. See `replacing`.

    Raises:
        ValueError: `data` holds NaN or infinities.
    """
    write_atomically(path, json.dumps(data, indent=1, allow_nan=False).encode() + b"\n")
