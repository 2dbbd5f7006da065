"""Atomic writes, so that readers never see a partial file."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty temporary file beside `path`, and replace `path` with it if the block succeeds.

    Readers see the old file until the block ends, then the complete new file. If the block fails, the temporary file is
    deleted and `path` does not change. The file is `.NAME.PID-RANDOM.tmp`, with the permissions of any new file.
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
