"""The public data of tasks: published files in a folder that the user names.

    --data DIR    DIR/FILE ──▶ size and SHA-256 are those of the published file ──▶ documents

None of these files is part of cuvee.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuvee.codec.errors import CorruptError, InputError
from cuvee.codec.support.plain_json import parse_json

__all__ = ["ANY_VERSION", "SOURCES", "Source", "malformed", "read_bytes", "read_json", "read_objects", "read_text"]


@dataclass(frozen=True, slots=True)
class Source:
    """A published file.

    Attributes:
        file: its name in the folder that `--data` names. Upstream, some are called only `test.csv`.
        size: bytes.
        sha256: in hex.
        origin: where to download it.
        license: of the data.
    """

    file: str
    size: int
    sha256: str
    origin: str
    license: str


_GITHUB = "https://raw.githubusercontent.com/"

SOURCES: dict[str, Source] = {
    "xquad": Source(
        "xquad.en.json", 609_383, "e4c57d1c9143aaa1c5d265ba5987a65f4e69528d2a98f29d6e75019b10344f29",
        f"{_GITHUB}google-deepmind/xquad/master/xquad.en.json", "CC BY-SA 4.0",
    ),
    "kv_uuid": Source(
        "kv-retrieval-75_keys.jsonl.gz", 1_667_554, "eb6d61fc3473349f2b86df76757c6ab659cc929d907d24caf1c69928e03f6203",
        f"{_GITHUB}nelson-liu/lost-in-the-middle/main/kv_retrieval_data/kv-retrieval-75_keys.jsonl.gz", "MIT",
    ),
    "wikitext2": Source(
        "wikitext2_valid.txt", 1_121_681, "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
        f"{_GITHUB}pytorch/examples/main/word_language_model/data/wikitext-2/valid.txt", "CC BY-SA 3.0",
    ),
    "musique": Source(
        "musique_ans_v1.0_dev.jsonl", 30_439_728, "15fa63794d18a94ce12411aca6e2327e65b6e83b0b1490efab3f1962e48abf3b",
        "https://github.com/StonyBrookNLP/musique", "CC BY 4.0",
    ),
}  # fmt: skip
"""Sources by name, with the hashes of the published files; `any_version` uses another file knowingly."""

MAX_UNPACKED_BYTES = 1 << 26  # of a .gz, many times the largest; a small file may unpack to any size
ANY_VERSION = "to use another version knowingly, add --metadata any_version=true"


def _is_true(name: str, value: Any) -> bool:
    """A switch, which may come from a command line as text.

    Raises:
        InputError: it is neither true nor false.
    """
    known = {"true": True, "false": False}
    if str(value).lower() not in known:
        raise InputError(f"{name}: must be true or false, got {value!r}")
    return known[str(value).lower()]


def read_bytes(name: str, data: str | Path | None, any_version: Any = False) -> bytes:
    """The content of a source's file, unpacked if its name ends in .gz.

    Args:
        name: of the source.
        data: the folder; None is refused, with where to download the file.
        any_version: do not compare the file's size and SHA-256 with the published file.

    Raises:
        CorruptError: the file is truncated, or another version.
        InputError: no such folder, or the file is not in it.
    """
    source = SOURCES[name]
    remedy = f"download it from {source.origin} ({source.license}) under that name, and give its folder with --data"
    if data is None or not Path(data).expanduser().is_dir():
        raise InputError(f"data: must be the folder that holds {source.file}, got {data}: {remedy}")
    folder = Path(data).expanduser()
    path = folder / source.file
    if not path.is_file():
        raise InputError(f"data: {folder} holds no {source.file}: {remedy}")
    content = path.read_bytes()
    if not _is_true("any_version", any_version):
        if len(content) < source.size:
            raise CorruptError(
                f"{path} has {len(content):,} bytes instead of {source.size:,}: it is truncated, or another version; "
                f"download it again from {source.origin} (SHA-256 {source.sha256}); {ANY_VERSION}"
            )
        digest = hashlib.sha256(content).hexdigest()
        if digest != source.sha256:
            raise CorruptError(
                f"{path} has the SHA-256 {digest} instead of {source.sha256}: it is another version, or damaged; "
                f"download it again from {source.origin}; {ANY_VERSION}"
            )
    if path.suffix != ".gz":
        return content
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as packed:
            unpacked = packed.read(MAX_UNPACKED_BYTES + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise CorruptError(
            f"{path} cannot be unpacked ({error}): it is truncated or damaged; download it again from {source.origin}"
        ) from error
    if len(unpacked) > MAX_UNPACKED_BYTES:
        raise CorruptError(
            f"{path} unpacks to more than {MAX_UNPACKED_BYTES:,} bytes, many times what was published: download it "
            f"again from {source.origin}"
        )
    return unpacked


def read_text(name: str, data: str | Path | None, any_version: Any = False) -> str:
    """The text of a source's file. Errors: see `read_bytes`; `CorruptError` if it is not UTF-8."""
    try:
        return read_bytes(name, data, any_version).decode("utf-8")
    except UnicodeDecodeError as error:
        raise malformed(name, data, f"is not UTF-8 text: {error.reason} at byte {error.start}") from error


def read_json(name: str, data: str | Path | None, any_version: Any = False) -> Any:
    """The content of a JSON file. Errors: see `read_text`; `CorruptError` if it is not JSON."""
    text = read_text(name, data, any_version)
    try:
        return parse_json(text)
    except ValueError as error:
        raise malformed(name, data, f"is not JSON: {error}") from error


def read_objects(name: str, data: str | Path | None, any_version: Any = False) -> list[dict[str, Any]]:
    """The objects of a file of one JSON object per line.

    Errors: see `read_text`; `CorruptError` for a file that holds anything else, or nothing.
    """
    found = []
    # Not splitlines(): JSON strings may contain U+2028 and other characters that it takes for the end of a line.
    for number, line in enumerate(read_text(name, data, any_version).split("\n"), 1):
        if line.strip():
            try:
                found.append(parse_json(line))
            except ValueError as error:
                raise malformed(name, data, f"is no JSON in line {number}: {error}") from error
    if not found or not all(isinstance(item, dict) for item in found):
        raise malformed(name, data, "does not hold JSON objects")
    return found


def malformed(name: str, data: str | Path | None, what: str) -> CorruptError:
    """The error for a file that lacks what a task needs."""
    source = SOURCES[name]
    return CorruptError(f"{Path(data or '') / source.file} {what}: download it again from {source.origin}")
