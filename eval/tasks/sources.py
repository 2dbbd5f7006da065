"""The public data of tasks: a file in a folder that the user names, or a copy on the Hugging Face hub.

    --data DIR    DIR/FILE ──▶ size and SHA-256 are those of the published file ──▶ bytes
    otherwise     datasets.load_dataset(hub id) ──▶ what a task reads has the SHA-256 of the published file's ──▶ rows

No file of these is part of cuvee. Both ways give the same documents. Whoever owns a copy on the hub can change it, so
that one whose content is not pinned here is loaded only by those who take any version.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuvee.codec.errors import CorruptError, InputError
from cuvee.codec.support.plain_json import parse_json

__all__ = [
    "ANY_VERSION",
    "SOURCES",
    "Source",
    "check_content",
    "content_digest",
    "hub_rows",
    "malformed",
    "read_bytes",
    "read_json",
    "read_objects",
    "read_text",
]


@dataclass(frozen=True, slots=True)
class Source:
    """A published file.

    Attributes:
        file: its name in the folder that `--data` names. Upstream, some are called only `test.csv`.
        size: bytes.
        sha256: in hex.
        origin: where to download it.
        license: of the data.
        hub: arguments of `datasets.load_dataset` for a copy on the hub: an id, perhaps a configuration. Empty if we
            know of none.
        split: of that copy.
        content: SHA-256, in hex, of what tasks read from the published file (`content_digest`), which a copy on the hub
            must have as well. Empty: not pinned.
    """

    file: str
    size: int
    sha256: str
    origin: str
    license: str
    hub: tuple[str, ...] = ()
    split: str = ""
    content: str = ""


_GITHUB = "https://raw.githubusercontent.com/"

SOURCES: dict[str, Source] = {
    "xquad": Source(
        "xquad.en.json", 609_383, "e4c57d1c9143aaa1c5d265ba5987a65f4e69528d2a98f29d6e75019b10344f29",
        f"{_GITHUB}google-deepmind/xquad/master/xquad.en.json", "CC BY-SA 4.0", ("google/xquad", "xquad.en"),
        "validation", "e8bdd528f37d9095be85ea1c2616b680654b8d1e63d9b6bd90ce240ab6d7b3d6",
    ),
    "kv_uuid": Source(
        "kv-retrieval-75_keys.jsonl.gz", 1_667_554, "eb6d61fc3473349f2b86df76757c6ab659cc929d907d24caf1c69928e03f6203",
        f"{_GITHUB}nelson-liu/lost-in-the-middle/main/kv_retrieval_data/kv-retrieval-75_keys.jsonl.gz", "MIT",
    ),
    "wikitext2": Source(
        "wikitext2_valid.txt", 1_121_681, "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
        f"{_GITHUB}pytorch/examples/main/word_language_model/data/wikitext-2/valid.txt", "CC BY-SA 3.0",
        ("Salesforce/wikitext", "wikitext-2-v1"), "validation",
        "ebe14a8ef495bccd734ac488430281b174b27f40c8268e1c6e02b06a0e5c802e",
    ),
    "musique": Source(
        "musique_ans_v1.0_dev.jsonl", 30_439_728, "15fa63794d18a94ce12411aca6e2327e65b6e83b0b1490efab3f1962e48abf3b",
        "https://github.com/StonyBrookNLP/musique", "CC BY 4.0", ("dgslibisey/MuSiQue",), "validation",
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


def read_bytes(name: str, data: str | Path, any_version: Any = False) -> bytes:
    """The content of a source's file, unpacked if its name ends in .gz.

    Args:
        name: of the source.
        data: the folder.
        any_version: do not compare the file's size and SHA-256 with the published file.

    Raises:
        CorruptError: the file is truncated, or another version.
        InputError: no such folder, or the file is not in it.
    """
    source, folder = SOURCES[name], Path(data).expanduser()
    if not folder.is_dir():
        raise InputError(f"data: must be the folder that holds {source.file}, got {folder}")
    path = folder / source.file
    if not path.is_file():
        hub = f", or leave --data out to load {source.hub[0]} from the hub" if source.hub else ""
        raise InputError(
            f"data: {folder} holds no {source.file}: download it from {source.origin} ({source.license}) under that "
            f"name{hub}"
        )
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


def read_text(name: str, data: str | Path, any_version: Any = False) -> str:
    """The text of a source's file. Errors: see `read_bytes`; `CorruptError` if it is not UTF-8."""
    try:
        return read_bytes(name, data, any_version).decode("utf-8")
    except UnicodeDecodeError as error:
        raise malformed(name, data, f"is not UTF-8 text: {error.reason} at byte {error.start}") from error


def read_json(name: str, data: str | Path, any_version: Any = False) -> Any:
    """The content of a JSON file. Errors: see `read_text`; `CorruptError` if it is not JSON."""
    text = read_text(name, data, any_version)
    try:
        return parse_json(text)
    except ValueError as error:
        raise malformed(name, data, f"is not JSON: {error}") from error


def read_objects(name: str, data: str | Path, any_version: Any = False) -> list[dict[str, Any]]:
    """The objects of a JSON list, or of a file of one JSON object per line.

    Errors: see `read_text`; `CorruptError` for a file that holds anything else, or nothing.
    """
    text = read_text(name, data, any_version)
    found = []
    if text.lstrip().startswith("["):
        found = list(read_json(name, data, any_version))
    else:
        # Not splitlines(): JSON strings may contain U+2028 and other characters that it takes for the end of a line.
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                try:
                    found.append(parse_json(line))
                except ValueError as error:
                    raise malformed(name, data, f"is no JSON in line {number}: {error}") from error
    if not found or not all(isinstance(item, dict) for item in found):
        raise malformed(name, data, "does not hold JSON objects")
    return found


def malformed(name: str, data: str | Path | None, what: str) -> CorruptError:
    """The error for a file, or for rows of the hub if `data` is None, that lack what a task needs."""
    if data is None:
        hub = SOURCES[name].hub[0]
        return CorruptError(f"{hub} on the hub {what}: it has changed; give the published file with --data DIR")
    source = SOURCES[name]
    return CorruptError(f"{Path(data) / source.file} {what}: download it again from {source.origin}")


def content_digest(content: Any) -> str:
    """Return the SHA-256, in hex, of the text or lists of texts that a task reads from its data."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def check_content(name: str, content: Any, any_version: Any = False) -> None:
    """Compare what arrived from the hub with what the published file holds, if that is pinned.

    Raises:
        CorruptError: it is something else.
    """
    source = SOURCES[name]
    if source.content and not _is_true("any_version", any_version) and content_digest(content) != source.content:
        raise CorruptError(
            f"{source.hub[0]} on the hub does not hold what {source.origin} does: it has changed; give the published "
            f"file with --data DIR; {ANY_VERSION}"
        )


def hub_rows(name: str, columns: Sequence[str], split: str = "", any_version: Any = False) -> Any:
    """Load a source's copy on the hub as a `datasets.Dataset`, which keeps its downloads.

    What is made of them must go through `check_content`. Code that a copy brings is never run: `datasets` 2.20 and
    newer refuse it.

    Args:
        name: of the source.
        columns: that the copy must have.
        split: default: the one the source names.
        any_version: load the copy although its content is not pinned.

    Raises:
        CorruptError: a column is missing.
        InputError: there is no copy that we know of, its content is not pinned, or it cannot be loaded: the hub cannot
            be reached.
    """
    import datasets

    source = SOURCES[name]
    remedy = f"download {source.origin} ({source.license}) as DIR/{source.file} and give --data DIR"
    if not source.hub:
        raise InputError(f"data: {source.file} has no copy on the hub: {remedy}")
    if not source.content and not _is_true("any_version", any_version):
        raise InputError(
            f"data: {source.hub[0]} on the hub is not checked against anything, and its owner may change it: {remedy}; "
            f"{ANY_VERSION}"
        )
    try:
        rows = datasets.load_dataset(*source.hub, split=split or source.split)
    except Exception as error:  # of many kinds, none of them ours
        first = str(error).strip().partition("\n")[0]
        raise InputError(
            f"data: {source.hub[0]} cannot be loaded from the hub ({type(error).__name__}: {first}): {remedy}"
        ) from error
    if missing := [column for column in columns if column not in rows.column_names]:
        raise malformed(name, None, f"has no column {missing[0]!r}")
    return rows
