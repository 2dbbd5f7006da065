"""Test `cuvee inspect`."""

from __future__ import annotations

import json

from tests.package.cli.running import Files, run

import cuvee
from cuvee.codec.profiles.profile import Profile


def test_inspect_prints_what_the_library_says(files: Files) -> None:
    out = files.folder / "blobs"
    run("encode", files.cache, out, "--profile", files.profile, "--step", "0.5", "--chunk-tokens", "100")
    data = json.loads(run("inspect", out, "--json").stdout)
    assert [(entry["tokens"], entry["start"]) for entry in data] == [
        (100, files.chunk.start),
        (50, files.chunk.start + 100),
    ]
    for entry, path in zip(data, sorted(out.iterdir()), strict=True):
        info = cuvee.inspect(path.read_bytes())
        assert entry["file"] == str(path) and entry["ratio"] == info.ratio and entry["step"] == 0.5
        assert entry["profile_id"] == Profile.load(files.profile).id.hex()
        assert sum(entry["section_bytes"]) + entry["header_bytes"] == entry["total_bytes"] == path.stat().st_size
    text = run("inspect", out).stdout
    assert "20 … 119" in text and "2 blobs:" in text and "transform" in text
