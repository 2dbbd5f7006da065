"""Atomic writes, so that readers never see a partial file; and the folder of what is kept between runs."""

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


def cache_folder() -> Path:
    """Return the folder of what is kept between runs: $CUVEE_CACHE, else `cuvee` in $XDG_CACHE_HOME or ~/.cache."""
    if folder := os.environ.get("CUVEE_CACHE"):
        return Path(folder).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    return (Path(shared) if os.path.isabs(shared) else Path.home() / ".cache") / "cuvee"
