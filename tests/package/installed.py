"""Try the installed package where only its dependencies are: every module that needs no extra, and both commands.

python tests/package/installed.py        of an environment without this checkout: `make dist`
"""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

import cuvee
from cuvee.codec.chunk import KVChunk

EXTRAS = {
    "datasets",
    "lm_eval",
    "lmcache",
    "matplotlib",
    "obstore",
    "psutil",  # comes with SGLang
    "redis",
    "sglang",
    "transformers",
    "triton",
    "vllm",
}


def import_everything() -> int:
    """Import every module; one that fails must need a package that an extra brings. Return how many were imported."""
    imported = 0
    for found in pkgutil.walk_packages(cuvee.__path__, "cuvee.", onerror=lambda name: None):
        if found.name == "cuvee.__main__":  # runs the program
            continue
        try:
            importlib.import_module(found.name)
            imported += 1
        except ImportError as error:
            named = {(error.name or "").partition(".")[0], *str(error).replace(":", " ").split()}
            if not EXTRAS & {name.replace("lm-eval", "lm_eval") for name in named}:
                raise
    return imported


def main() -> None:
    """Import, code a cache losslessly, and run the program; raise if anything is wrong."""
    if Path(cuvee.__file__).is_relative_to(Path(__file__).parents[2] / "src"):
        raise SystemExit("installed: must not be the checkout's own package: run it with the environment's python -I")
    layout = cuvee.KVLayout("tried", (cuvee.LayerLayout(2, 16, 16, None),) * 3, "bfloat16", max_positions=None)
    keys, values = torch.randn(2, 3, 64, 2, 16).to(torch.bfloat16)
    codec = cuvee.Codec(cuvee.Profile.unlearned(layout), "lossless")
    back = codec.decode(codec.encode(KVChunk(keys, values, layout)))
    if not all(map(torch.equal, back.keys, keys)) or not all(map(torch.equal, back.values, values)):
        raise SystemExit("installed: a lossless cache came back different")
    shown = subprocess.run(
        [sys.executable, "-I", "-m", "cuvee", "--version"], capture_output=True, text=True, check=True
    )
    if shown.stdout.split() != ["cuvee", version("cuvee")]:
        raise SystemExit(f"installed: must print its version, got {shown.stdout!r}")
    brought = sorted(name for name in EXTRAS if find_spec(name))
    of = f"cuvee {version('cuvee')}, Python {sys.version.split()[0]}, torch {torch.__version__}"
    print(f"{of}: {import_everything()} modules; of the extras here: {', '.join(brought) or 'none'}")


if __name__ == "__main__":
    main()
