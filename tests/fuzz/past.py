"""Findings from before the fuzzer existed, as cases: `python tests/fuzz/past.py` writes them into `corpus/`.

A test replays every file there. Findings of the fuzzer are copied there unchanged, under descriptive names.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "src")]

import numpy as np
from tests.fuzz.commands import _CONFIG, _good, _joined
from tests.fuzz.entries import KEY, NOW
from tests.fuzz.profiles import file_of, named_by_content, parts
from xxhash import xxh3_64_digest, xxh3_128_digest

from cuvee.codec.layout import KVLayout, LayerLayout

CORPUS = Path(__file__).parent / "corpus"


def _profiles() -> Iterator[tuple[str, bytes]]:
    data, arrays = parts()[2]
    changed = dict(arrays)
    changed["family.dead_zone"] = arrays["family.dead_zone"][:1]
    yield "short-quantizer", file_of(data, changed)
    changed = dict(arrays)
    changed["section.0.class_freq"] = np.zeros(16, np.uint16)
    yield "classes-that-cannot-be-coded", file_of(data, changed)
    changed = dict(arrays)
    changed["section.0.class_scale"] = np.array([(-1) ** k * 30000 for k in range(16)], np.int16)
    yield "coarse-classes-code-more", file_of(data, changed)
    curve = [{"step": 0, "bits_per_value": 10**400, "error": 1e308}]
    yield "numbers-beyond-floats", file_of({**data, "curve": curve}, arrays)
    data, arrays = parts()[3]
    layout = KVLayout("wide", (LayerLayout(1 << 12, 1 << 12, 1, None),) * 2, "float32", None)
    yield "huge-layout", file_of({**data, "layout": layout.to_dict()}, arrays)
    data, arrays = parts()[0]
    changed = dict(arrays)
    for name in arrays:
        if ".predictor." in name and name.rpartition(".")[2] in ("linear", "square"):
            changed[name] = np.full_like(arrays[name], 3e38)
    if changed.keys() == arrays.keys():
        yield "extreme-predictor", file_of(named_by_content(data, changed), changed)


def _entries() -> Iterator[tuple[str, bytes]]:
    def entry(written: float, length: int, blob: bytes) -> bytes:
        fields = struct.Struct("<4sB3sdQ16s16s")
        digests = xxh3_128_digest(blob), xxh3_128_digest(KEY.encode())
        head = fields.pack(b"cuvS", 1, bytes(3), written, length, *digests)
        return head + xxh3_64_digest(head) + blob

    yield "length-beyond-the-file", b"\0" + entry(NOW, (1 << 64) - 1, b"blob")
    yield "written-never", b"\1" + entry(math.nan, 4, b"blob")


def cases() -> Iterator[tuple[str, bytes]]:
    """Yield names and bytes of the cases."""
    yield from (("profile-" + name, data) for name, data in _profiles())
    yield from (("envelope-" + name, data) for name, data in _entries())
    config = {**_CONFIG, "num_hidden_layers": None}
    yield "cli-config-without-layers", _joined("decode-config", [_good()["blob"], json.dumps(config).encode()])
    config = {**_CONFIG, "model_type": "other", "auto_map": {"AutoConfig": "evil.Config"}}
    yield "cli-config-with-code", _joined("decode-config", [_good()["blob"], json.dumps(config).encode()])


if __name__ == "__main__":
    CORPUS.mkdir(exist_ok=True)
    for name, data in cases():
        (CORPUS / f"{name}.bin").write_bytes(data)
