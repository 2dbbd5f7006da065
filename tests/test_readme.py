"""The README's Python runs as it stands, and says what is true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

import cuvee

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_python_of_the_readme_runs() -> None:
    library, paged = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(library, "README.md", "exec"), names)
    assert names["cache"].get_seq_length() == 300
    assert len(names["blobs"]) == 2
    assert 5 < cuvee.inspect(names["blobs"][0]).ratio < 50
    exec(compile(paged, "README.md", "exec"), names)
    restored = names["paged"].read(names["slots"], 0)
    for layer, keys in enumerate(restored.keys):
        assert torch.equal(keys.transpose(0, 1), names["cache"].layers[layer].keys[0])
    (blob,) = names["blobs"]
    assert cuvee.inspect(blob).tokens == 300


def test_files_and_commands_that_the_readme_names_exist() -> None:
    for name in re.findall(r"`([\w/.]+\.(?:md|py))`", README):
        assert any((ROOT / folder / name).is_file() for folder in (".", "codec")), name
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert f"\n{target}:" in makefile
    for preset in ("lossless", "high", "balanced", "small"):
        assert f'"{preset}"' in README
