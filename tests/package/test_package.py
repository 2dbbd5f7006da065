"""Test the package as users see it: lazy names, importable modules, a complete wheel."""

import ast
import importlib
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import warnings
import zipfile
from pathlib import Path

import pytest

import cuvee
from cuvee.calibration.bundled import TEXTS

ROOT = Path(__file__).parents[2]
# Not `cuvee.__version__`: an editable installation keeps the version that it was made with.
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
SUBPACKAGES = ("codec", "kernels", "blend", "integrations", "eval")
# What an extra brings that `dev` does not: a module may need one of these, and nothing else, to be imported.
# The last two are SGLang's, which is installed here without its dependencies.
OPTIONAL = {"obstore", "lmcache", "redis", "sglang", "vllm", "sentencepiece", "torchvision"}
# vLLM warns while it is imported; its own tests import these, in processes of their own.
NEED_VLLM = (
    "cuvee.integrations.vllm.blending.paged_model",
    "cuvee.integrations.vllm.connector",
    "cuvee.integrations.vllm.other_connectors",
    "cuvee.integrations.vllm.prometheus",
    "cuvee.integrations.vllm_tier.tier",
)
DATA_FILES = (
    "cuvee/py.typed",
    "cuvee/calibration/models/books-3m/config.json",
    "cuvee/calibration/models/books-3m/model.safetensors",
    "cuvee/calibration/models/books-3m/tokenizer.json",
    "cuvee/calibration/models/books-3m/README.md",
    *(f"cuvee/calibration/texts/{name}.txt" for name in TEXTS),
    "cuvee/calibration/texts/README.md",
    *(f"cuvee/calibration/texts/mixture/{name}.txt" for name in ("code", "encyclopaedia", "prose", "tables")),
    "cuvee/calibration/texts/mixture/dialogue.json",
    "cuvee/eval/REPORT.md",
    "cuvee/eval/tasks/cuvee_kv_8.yaml",
    "cuvee/eval/tasks/cuvee_kv_8.jsonl",
)


def module_names() -> list[str]:
    """Return every module below src/cuvee, through the symlinks, which `rglob` does not follow."""
    names = []
    for folder, _, files in os.walk(ROOT / "src" / "cuvee", followlinks=True):
        parts = Path(folder).relative_to(ROOT / "src").parts
        for file in files:
            if file.endswith(".py") and file != "__main__.py":
                names.append(".".join(parts if file == "__init__.py" else (*parts, file[:-3])))
    return sorted(names)


def run_python(code: str, *arguments: str, cwd: Path) -> str:
    """Run `code` in a fresh interpreter that fails on the first warning; return what it printed."""
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONWARNINGS")}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


# --- import cuvee


def test_public_names_agree_with_the_typed_ones() -> None:
    """A type checker sees the TYPE_CHECKING block, the interpreter sees __getattr__: both list __all__."""
    tree = ast.parse((ROOT / "src" / "cuvee" / "__init__.py").read_text(encoding="utf-8"))
    typed = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("cuvee.")
        for alias in node.names
    }
    assert typed == cuvee._HOME
    assert sorted(cuvee.__all__) == sorted({*typed, "__version__"})


def test_unknown_name() -> None:
    """The ignore is a test as well: mypy reports it as unused if it no longer knows the names."""
    with pytest.raises(AttributeError, match="module 'cuvee' has no attribute 'Codek'"):
        _ = cuvee.Codek  # type: ignore[attr-defined]


# --- modules


ENGINES = ("cuvee.integrations.sglang", "cuvee.integrations.lmcache")


@pytest.mark.parametrize("name", [name for name in module_names() if name not in NEED_VLLM and "examples" not in name])
def test_module_imports(name: str) -> None:
    try:
        with warnings.catch_warnings():
            if name.startswith(ENGINES):
                warnings.simplefilter("ignore")  # about what these engines import
            importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in OPTIONAL:
            raise
        pytest.skip(f"needs {missing}")


def test_nothing_that_is_shipped_asserts() -> None:
    """`python -O` drops asserts: raise an error for a check, and write a test for an invariant."""
    found = []
    for name in module_names():
        path = ROOT / "src" / name.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        tree = ast.parse(file.read_text(encoding="utf-8"))
        found += [f"{name}:{node.lineno}" for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    assert found == []


def test_kernels_is_a_namespace_package() -> None:
    """With an __init__.py, transformers would mistake the folder for its own in a program started in the root."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


# --- the distributions


def build(tmp_path_factory: pytest.TempPathFactory, *what: str) -> Path:
    """Build distributions in a copy of the tree, because a build writes into its tree."""
    source = tmp_path_factory.mktemp("source") / "cuvee"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source / name)
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", *SUBPACKAGES):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=unwanted)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", *what]
    result = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return source / "dist"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (path,) = build(tmp_path_factory, "--wheel").iterdir()
    return path


@pytest.mark.nightly
def test_sdist_contains_the_license_and_the_model_and_makes_the_same_wheel(
    wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    built = build(tmp_path_factory)  # the wheel from the sdist
    (path,), (other,) = built.glob("*.tar.gz"), built.glob("*.whl")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "NOTICE", "pyproject.toml"} <= names
    assert not {f"src/{name}" for name in DATA_FILES} - names
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(other) as same:
        assert sorted(one.namelist()) == sorted(same.namelist())


def test_wheel_contains_all_modules_and_data(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        told = {
            name: archive.read(f"cuvee-{VERSION}.dist-info/{name}").decode()
            for name in ("METADATA", "entry_points.txt", "licenses/LICENSE")
        }
    modules = {name for name in names if name.endswith(".py")}
    expected = set()
    for name in module_names():
        if name.startswith("cuvee.eval.bench"):
            continue  # benchmarks are run from a checkout
        path = name.replace(".", "/")
        is_package = (ROOT / "src" / path).is_dir()
        expected.add(f"{path}/__init__.py" if is_package else f"{path}.py")
    expected.add("cuvee/__main__.py")
    assert modules == expected
    assert not set(DATA_FILES) - names
    assert {name.partition("/")[0] for name in names} == {"cuvee", f"cuvee-{VERSION}.dist-info"}
    assert not [name for name in names if "__pycache__" in name]
    assert "License-Expression: Apache-2.0\n" in told["METADATA"] and "the cuvee authors" in told["licenses/LICENSE"]
    assert "cuvee = cuvee.cli:main" in told["entry_points.txt"]
    assert "[lm_eval.models]\ncuvee = cuvee.eval.lm:CuveeLM" in told["entry_points.txt"]


def test_wheel_works_once_installed(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    shutil.unpack_archive(wheel, target, "zip")  # which is all that an installer does with a wheel of Python files
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import cuvee, cuvee.codec, cuvee.kernels, cuvee.blend, cuvee.integrations, cuvee.eval
from cuvee.codec.errors import CuveeError
from cuvee.calibration import bundled_text, load_bundled_model
assert cuvee.CuveeError is CuveeError
model, tokenizer = load_bundled_model()
assert tokenizer.decode(tokenizer(bundled_text("orchard")[:200]).input_ids) == bundled_text("orchard")[:200]
print(cuvee.__file__, cuvee.__version__)
"""
    where, version = run_python(code, str(target), cwd=tmp_path).split()
    assert Path(where).is_relative_to(target)
    assert version == VERSION
