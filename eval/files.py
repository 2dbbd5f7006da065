"""Files that a run writes: all at once, so that readers never see a part."""

from __future__ import annotations

import json
from pathlib import Path

from cuvee.codec.support.files import replacing


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
