"""The engine: compiled with g++ once per source, compiler flags and CPU, and kept in `out/ptx` of the repository."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).with_name("engine")
KEPT = Path(__file__).parents[2] / "out" / "ptx"
# Rounding as written: no fused or reassociated arithmetic.
FLAGS = ("-std=c++20", "-O2", "-ftree-vectorize", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-shared",
         "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-psabi")  # fmt: skip
HELP = "the PTX emulator needs g++ 10 or newer: install it (Debian: apt-get install g++)"


class NoCompiler(RuntimeError):
    """There is no g++."""


def compiler() -> str:
    """Return the path of g++.

    Raises:
        NoCompiler: there is none.
    """
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        raise NoCompiler(HELP)
    return found


def _cpu() -> str:
    """Return the CPU's features, which -march=native depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(("flags", "Features"))}))


@cache
def library() -> ctypes.CDLL:
    """Return the engine; compile it first if necessary.

    Raises:
        NoCompiler: there is no g++ to compile it with.
    """
    key = hashlib.sha256(" ".join((*FLAGS, _cpu())).encode())
    for source in sorted(SOURCES.iterdir()):
        key.update(source.read_bytes())
    path = KEPT / f"engine-{key.hexdigest()[:16]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Workers may compile it at the same time; whoever is last puts the same in its place.
        own = path.with_suffix(f".{os.getpid()}")
        command = [compiler(), *FLAGS, "-o", str(own), str(SOURCES / "engine.cpp")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"g++ does not compile the PTX emulator:\n{done.stderr[-4000:]}")
        own.replace(path)
    return ctypes.CDLL(str(path))
