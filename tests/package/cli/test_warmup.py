"""`cuvee warmup` compiles what coding needs, once, and says where it is; a folder that cannot be written is read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.package.cli.running import fails

CODED = """
from dataclasses import replace
import numpy as np, torch
from cuvee import Codec, KVChunk, Profile, fit
from cuvee.codec.profiles.class_predictor import Predictor
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
layer = LayerLayout(2, 32, 32, Rope(tuple(0.5**i for i in range(16))))
layout = KVLayout("other", (layer,) * 3, "bfloat16", None)
def chunk(seed, tokens):
    torch.manual_seed(seed)
    return KVChunk(torch.randn(3, tokens, 2, 32).bfloat16(), torch.randn(3, tokens, 2, 32).bfloat16(), layout)
profile = fit(layout, [chunk(seed, 300) for seed in range(3)], "head")
one = np.ones(1, np.float32)
predictor = Predictor(np.zeros(1, np.int32), one, one, one, 0.0, 0.0, one[:0], np.ones(2, np.float32), one[:0])
learned = tuple(replace(section, predictor=predictor) for section in profile.learned)
classed = Profile(profile.layout, profile.group, profile.source, profile.family, learned)
coded = (Codec(p, step=s, threads=1) for p in (profile, classed) for s in (0.1, 3.0))
for codec in (Codec.without_profile(layout, threads=1), *coded):
    for tokens in (9, 300):
        assert codec.decode(codec.encode(chunk(9, tokens)), 4).tokens == tokens
print("coded")
"""
# What a read-only file system says, also to root.
READ_ONLY = """
import builtins, os, tempfile
def refuse(*arguments, **options):
    raise OSError(30, "Read-only file system")
tempfile.TemporaryFile = refuse
opened = builtins.open
builtins.open = lambda path, mode="r", *more, **options: (
    refuse()
    if "w" in mode and str(path).startswith(os.environ["NUMBA_CACHE_DIR"])
    else opened(path, mode, *more, **options)
)
"""


def python(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment, cwd="/"
    )


@pytest.mark.nightly  # a minute in the compiler
def test_nothing_is_left_to_compile_after_it(tmp_path: Path) -> None:
    code = (
        "from cuvee.cli import warmup; warmup.DTYPES = ('bfloat16',)\n"
        "import sys; sys.argv = ['cuvee', 'warmup']; from cuvee.cli import main; main()"
    )
    done = python(tmp_path, "-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    *steps, place = done.stdout.splitlines()
    assert [step.partition(" ... ")[0] for step in steps] == ["bfloat16"]
    assert place.startswith(f"compiled code: {tmp_path}")
    compiled = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nb?")}
    assert len(compiled) > 20
    done = python(tmp_path, "-c", READ_ONLY + CODED)  # compiled code is also found where nothing can be written
    assert done.stdout == "coded\n" and "compiled anew" not in done.stderr, done.stderr
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nb?")} == compiled


def test_without_a_place_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    fails("warmup", match="no place for compiled code: set NUMBA_CACHE_DIR to a folder that this user alone can write")
