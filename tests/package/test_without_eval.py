"""The library and its main commands work in an installation without `cuvee.eval`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Makes `cuvee.eval` unimportable, as if the folder had been left out.
BLOCK = """
import sys

class NoEval:
    def find_spec(self, name, path=None, target=None):
        if name == "cuvee.eval" or name.startswith("cuvee.eval."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoEval())
"""

LIBRARY = """
import torch

import cuvee
from cuvee.blend import Blender, Segment
from cuvee.calibration import bundled_text, load_bundled_model, read_corpus, spread_sequences

model, tokenizer = load_bundled_model()
text = torch.tensor(tokenizer(bundled_text("harbour")).input_ids)
sequences = spread_sequences([read_corpus("harbour", "books-3m")], 128, 12)
profile = cuvee.calibrate(model, sequences, "head", progress=False)
profile.save("profile.safetensors")
codec = cuvee.Codec(cuvee.Profile.load("profile.safetensors"), "balanced")
with torch.no_grad():
    cache = model(text[None, :64], use_cache=True).past_key_values
blobs = cuvee.encode_cache(codec, cache)
assert cuvee.decode_cache(codec, blobs, model).get_seq_length() == 64
result = Blender(model, codec).blend([Segment([1, 2]), Segment(text[:64], blobs[0]), Segment([3])])
assert result.cache.get_seq_length() == 67
assert not [name for name in sys.modules if name.startswith("cuvee.eval")]
"""

COMMAND = """
from cuvee.cli import app

app(prog_name="cuvee")
"""


def run(code: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCK + code, *arguments],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_the_library_learns_codes_and_blends_without_eval(tmp_path: Path) -> None:
    ran = run(LIBRARY, tmp_path)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("command", ["profile learn", "profile pull", "encode", "decode", "inspect", "store info"])
def test_commands_do_without_eval(command: str, tmp_path: Path) -> None:
    ran = run(COMMAND, tmp_path, *command.split(), "--help")
    assert ran.returncode == 0, ran.stderr
