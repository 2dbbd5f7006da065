"""Test that all that says how to install cuvee agrees, and the workflow that would publish it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PUBLISHED = False  # on PyPI
ROOMS = ("codec", "kernels", "blend", "integrations", "eval", "src", "docs", "notebooks")
PROSE = (".md", ".ipynb")
INSTALL = re.compile(r"pip install ([^`#\n]*?(?:cuvee|\.\[)[^`#;&\n]*)")
CHECKOUT = re.compile(r"""^(?:--torch-backend=(?:cpu|auto) )?(?:-e )?\\?"\.\[([a-z,]+)\]\\?"(?: |$)""")
EXTRA = re.compile(r"""^'cuvee\\*\[([a-z,]+)\]'""")
WHEEL = re.compile(r"^(?:/tmp|dist)/cuvee-\*\.whl")


def told() -> list[tuple[str, str]]:
    """Return (file, arguments) wherever a text or a message has somebody install cuvee with pip."""
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*") if path.suffix in (".py", *PROSE)]
    files += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile")]
    named = [(path.relative_to(ROOT).as_posix(), path) for path in files if "results" not in path.parts]
    return [(name, said.strip()) for name, path in named for said in INSTALL.findall(path.read_text(encoding="utf-8"))]


TOLD = told()
assert len(TOLD) > 25


@pytest.mark.parametrize(("name", "said"), TOLD)
def test_all_that_says_how_to_install_agrees(name: str, said: str) -> None:
    """Messages and docs of a part that is missing add an extra to what is installed; nothing else names the package."""
    found = CHECKOUT.match(said) or EXTRA.match(said)
    assert found or WHEEL.match(said) or PUBLISHED, f"{name}: pip install {said}: cuvee is not on PyPI"
    extras = found[1].split(",") if found else []
    assert set(extras) <= set(PROJECT["optional-dependencies"]), f"{name}: {said}"


def test_torch_for_a_cpu_brings_no_compiler_for_gpus() -> None:
    named = {re.split(r"[^\w.-]", entry)[0] for entry in PROJECT["dependencies"]}
    assert "torch" in named and "triton" not in named
    assert [entry for entry in PROJECT["optional-dependencies"]["gpu"] if entry.startswith("triton>=")]
    versions = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d", name)]
    assert versions == workflow("ci")["jobs"]["check"]["strategy"]["matrix"]["python"] and versions[0] == "3.11"


def torch_arguments(folder: Path, *tools: str) -> list[str]:
    """Return what `make setup` tells pip about torch on a machine that has make, a shell and `tools`."""
    folder.mkdir()
    for name in ("make", "bash"):
        (folder / name).symlink_to(str(shutil.which(name)))
    for name in tools:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    command = ["make", "-n", "setup", f"PYTHON={sys.executable}", f"VENV={folder}"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH", "MAKE", "MFLAGS"))}
    shown = subprocess.run(
        command, cwd=ROOT, env=kept | {"PATH": str(folder)}, capture_output=True, text=True, check=True
    ).stdout
    (step,) = [line for line in shown.splitlines() if line.split()[-1].startswith("torch==")]
    return step.partition(" install ")[2].split()


def test_make_takes_torch_for_a_cpu_where_there_is_no_gpu(tmp_path: Path) -> None:
    """Of one version, pip takes `2.13.0+cpu` rather than `2.13.0`, and does without an index that fails."""
    arguments = torch_arguments(tmp_path / "cpu")
    assert arguments[arguments.index("--extra-index-url") + 1] == "https://download.pytorch.org/whl/cpu"
    assert "--extra-index-url" not in torch_arguments(tmp_path / "gpu", "nvidia-smi")


def workflow(name: str) -> dict[Any, Any]:
    data: dict[Any, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text(encoding="utf-8"))
    return data


def test_nothing_is_published_until_it_is_switched_on() -> None:
    release = workflow("release")
    assert release[True] == {"release": {"types": ["published"]}}  # YAML reads `on` as a boolean
    build, publish = release["jobs"]["build"], release["jobs"]["publish"]
    assert build["if"] == "vars.PUBLISH_TO_PYPI == 'true'" and publish["needs"] == "build" and "if" not in publish
    assert publish["environment"] == "pypi" and publish["permissions"] == {"id-token": "write"}
    assert release["permissions"] == {"contents": "read"} and "permissions" not in build
    assert [step for step in build["steps"] if "make dist" in step.get("run", "")]
    (tag,) = [step for step in build["steps"] if "TAG" in step.get("env", {})]
    assert tag["run"].startswith('grep -qx "version = ') and 'version = "' + PROJECT["version"] + '"' in (
        ROOT / "pyproject.toml"
    ).read_text(encoding="utf-8")
    assert bool(PROJECT.get("urls")) or not PUBLISHED
