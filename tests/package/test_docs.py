"""Test the documentation: its Python runs, its commands parse, the navigation lists every page, the site builds.

What a block holds otherwise is named in `NOT_RUN_HERE`, with the test that reads it or why none can.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pkgutil
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, closing
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
import yaml
from tests.fuzz.targets import TARGETS
from tests.integrations.stores import test_stores as contract
from tests.learned import learned_once, shared_folder
from tests.package import stability
from typer.testing import CliRunner

import cuvee
from cuvee.cli import app
from cuvee.integrations.stores.base import Store, StoreError
from cuvee.integrations.stores.counted import CountedStore
from cuvee.integrations.vllm.connector_config import Options
from cuvee.integrations.vllm.metric_table import METRICS
from cuvee.integrations.vllm.metrics import Recorder
from cuvee.integrations.vllm.scheduler.explaining import REASONS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
FIRST = "getting-started.md"  # writes the profile that the other pages load
BLOCK = re.compile(r"^([ ]*)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
INCLUDE = re.compile(r"^<!-- include: (\S+) -->$", re.MULTILINE)
FOREIGN = "cuvee eval "  # it hands its arguments on to lm-eval
ROOMS = ("blend", "codec", "docs", "eval", "integrations", "kernels", "notebooks")
# But for results and the changelog, which name the commands of their day.
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *(page for room in ROOMS for page in (ROOT / room).rglob("*.md")))
    if path.name != "CHANGELOG.md" and "results" not in path.parts
)
PYTHON_RUNS = ("README.md", "integrations/stores/README.md")  # in test_readme.py and integrations/vllm/test_docs.py
DRAWING = "a drawing"
NOT_RUN_HERE = {  # document -> how a block begins -> where else, or why not
    "docs/concepts/data-flow.md": {
        " LEARN ": DRAWING,
        "flowchart LR\n  early": "integrations/vllm/scheduler/test_phases.py",
        "flowchart LR\n  restoring": "there",
    },
    "docs/guides/operating.md": {
        "ENV NUMBA_CACHE_DIR": "a part of a Dockerfile, which needs Docker",
        "cuvee store explain file:///var/cache/kv\n": "cli/test_store.py, with what it prints",
    },
    "docs/guides/vllm-cpu.md": {
        "uv venv": "integrations/vllm/test_cpu_page.py",
        "cat > chat.jinja": "there",
        "export VLLM_CPU": "there",
        "python - > prompt.json": "there",
        "curl -sS --fail http://localhost:8000/v1": "there",
        "curl -sS --fail http://localhost:8000/metrics": "there",
    },
    "docs/index.md": {"keys, values --remove": DRAWING},
    "docs/recipes/deploy.md": {"spec:": "test_deploy.py"},
    "eval/tasks/README.md": {"include: LM_EVAL": "eval/test_tasks.py has tasks of this form"},
    "integrations/lmcache/README.md": {"lmcache server": "integrations/lmcache/test_docs.py"},
    "integrations/sglang/README.md": {"python -m sglang": "integrations/sglang/test_docs.py"},
    "integrations/vllm/README.md": {
        "redis-server": "a server, and an engine whose options are read here",
        "vllm serve MODEL …": "other options take the place of the dots",
        "rate(vllm:": "integrations/vllm/test_docs.py, by the names of metrics",
        "export CUVEE_KEY": "other options take the place of the dots",
    },
    "kernels/README.md": {
        "decode   class": DRAWING,
        "cache = PagedCache": "needs a GPU: tests/kernels does the same in the emulator",
        "python3 -m pip": "for a machine with a GPU and without a network",
    },
    "notebooks/README.md": {"pip install": "test_notebooks.py runs the notebooks"},
}


def blocks(page: str, *kinds: str) -> list[str]:
    """Return the code of a page's fenced blocks of some languages; "" stands for blocks without one."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return [code for _, kind, code in BLOCK.findall(text) if kind in kinds]


def run(page: str, folder: Path) -> dict[str, Any]:
    """Run the Python of a page in `folder`, block by block, and return its names."""
    name = "docs_" + re.sub(r"\W", "_", page)
    module = ModuleType(name)
    sys.modules[name] = module  # dataclasses resolve annotations there
    text = (DOCS / page).read_text(encoding="utf-8")
    try:
        with chdir(folder):
            for block in BLOCK.finditer(text):
                if block[2] == "python":
                    # Keep the page's line numbers: tracebacks show them, and Triton reads its kernels there.
                    before = "\n" * text.count("\n", 0, block.start(3))
                    exec(compile(before + block[3], str(DOCS / page), "exec"), module.__dict__)
    finally:
        del sys.modules[name]
    return module.__dict__


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the folder that the pages run in, and run the page that makes their profile."""
    made = tmp_path_factory.mktemp("docs")
    with pytest.MonkeyPatch.context() as patch:
        learn = learned_once(cuvee.calibrate, shared_folder(tmp_path_factory, "learned"))
        patch.setattr(cuvee, "calibrate", learn)  # the README learns the same profile
        assert run(FIRST, made)["moved"].start == 200
    return made


@pytest.mark.parametrize("page", [page for page in PAGES if page != FIRST and blocks(page, "python")])
def test_the_python_of_a_page_runs(page: str, folder: Path) -> None:
    run(page, folder)


def test_the_commands_of_the_first_page_run_after_its_python(folder: Path, tmp_path: Path) -> None:
    """Learning takes minutes: what the Python has learned stands in for it, where the command would write."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    with chdir(tmp_path):
        for line in commands((DOCS / FIRST).read_text(encoding="utf-8")):
            words = shlex.split(line, comments=True)[1:]
            if words[:2] == ["profile", "learn"]:
                out = Path(words[words.index("-o") + 1])
                assert not out.exists(), f"{line}: refused, because the Python of the page wrote {out}"
                shutil.copy("books-3m.safetensors", out)
            else:
                done = CliRunner().invoke(app, words)
                assert done.exit_code == 0, f"{line}: {done.output}"
        assert Path("restored.safetensors").is_file()


# --- the recipes, held to the tests that they name


RECIPES = {"store": "recipe_store", "place": "recipe_place", "caplog": "caplog"}  # fixtures in place of the contract's


def contract_tests() -> list[Callable[..., None]]:
    """Return the tests of the stores' contract that take a store or a place, and nothing unknown."""
    found = [(test, [*signature(test).parameters]) for name, test in vars(contract).items() if name.startswith("test_")]
    return [test for test, taken in found if taken[:1] in (["store"], ["place"]) and {*taken} <= RECIPES.keys()]


@pytest.mark.parametrize("check", contract_tests(), ids=lambda test: test.__name__)
def test_the_store_of_the_recipe_keeps_the_contract(check: Callable[..., None], request: pytest.FixtureRequest) -> None:
    check(**{name: request.getfixturevalue(RECIPES[name]) for name in signature(check).parameters})


@pytest.fixture(scope="module")
def recipe(folder: Path) -> dict[str, Any]:
    return run("recipes/store.md", folder)


@pytest.fixture
def recipe_store(recipe: dict[str, Any], tmp_path: Path) -> Iterator[Store]:
    store: Store = recipe["SqliteStore"](str(tmp_path / "blobs.sqlite"))
    yield store
    store.close()


@pytest.fixture
def recipe_place(recipe: dict[str, Any], tmp_path: Path) -> Iterator[contract.Place]:
    with ExitStack() as stack:

        def make(**named: Any) -> CountedStore:
            made: CountedStore = recipe["SqliteStore"](str(tmp_path / "place.sqlite"), **named)
            return stack.enter_context(closing(made))

        planter: Any = make()
        yield make, lambda key, data: planter._run("INSERT OR REPLACE INTO blobs VALUES (?, ?)", key, data)


@pytest.mark.parametrize("planted", ["substr(entry, 1, 66)", "7", "'text'"])
def test_the_store_of_the_recipe_refuses_damage(recipe: dict[str, Any], tmp_path: Path, planted: str) -> None:
    with closing(recipe["SqliteStore"](str(tmp_path / "blobs.sqlite"))) as store:
        store.put("ab/1", b"blob")
        store._run(f"UPDATE blobs SET entry = {planted}")
        assert store.get("ab/1") is None and store.contains(["ab/1"]) == [False]
        assert store.counters()["sqlite"].corrupt == 1


def test_the_store_of_the_recipe_works_once_its_database_can_be_written(recipe: dict[str, Any], tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "blobs.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with closing(recipe["SqliteStore"](str(tmp_path / "blobs.sqlite"))) as store:
            with pytest.raises(StoreError, match="locked"):
                store.put("ab/01", b"blob")
            other.execute("ROLLBACK")
            assert store.put("ab/01", b"blob") and store.get("ab/01") == b"blob"


@pytest.mark.parametrize("check", [["check"], ["format", "--check"]], ids=" ".join)
def test_the_store_of_the_recipe_passes_lint(check: list[str]) -> None:
    command = [sys.executable, "-m", "ruff", *check, "--stdin-filename", "integrations/stores/sqlite.py", "-"]
    subprocess.run(command, input=blocks("recipes/store.md", "python")[0], text=True, cwd=ROOT, check=True)


def test_the_metric_of_the_recipe_is_counted_and_listed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    row = run("recipes/index.md", folder)["row"]
    monkeypatch.setitem(METRICS, row.name, row)
    recorder = Recorder()
    (call,) = re.findall(r"`(recorder\.count\(.+?\))`", (DOCS / "recipes" / "index.md").read_text(encoding="utf-8"))
    eval(call, {"recorder": recorder})
    assert recorder.drain() == {f"{row.name}|client": 1}
    for name, label in ((row.name, "nobody"), (f"{row.name}s", "client")):
        with pytest.raises(KeyError):
            recorder.count(name, label=label)
    assert row.name in stability.public()["metrics"] and f"`{row.name}`" not in stability.PAGE.read_text()


# --- commands


def commands(text: str) -> list[str]:
    """Return the lines that call `cuvee` in blocks of shell or without a language, with continued lines joined."""
    found = []
    for _, kind, code in BLOCK.findall(text):
        if kind in ("", "sh", "bash"):
            lines = code.replace("\\\n", " ").splitlines()
            found += [line.strip() for line in lines if re.match(r"\s*cuvee ", line)]
    return found


def of_documents() -> list[tuple[str, str]]:
    """Return (file, command) for every document."""
    return [(name, line) for name in DOCUMENTS for line in commands((ROOT / name).read_text(encoding="utf-8"))]


def parse(line: str) -> None:
    """Parse a command line as the program does, except for the values of options.

    Raises:
        ClickException, ValueError: no such command or option, or arguments that it does not take.
    """
    words = shlex.split(line, comments=True)
    words = [word for word in words[words.index("cuvee") + 1 :] if word not in ("…", "...")]
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        name = words.pop(0) if words else ""
        if name not in command.commands:
            raise ValueError(f"no such command: {name!r}")
        command = command.commands[name]
    given, more, _ = command.make_parser(command.context_class(command)).parse_args(words)
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    missing = [each.name for each in arguments if each.required and not given.get(each.name)]
    if more or (missing and "help" not in given):
        raise ValueError(f"arguments that are not taken: {more}, missing: {missing}")


@pytest.mark.parametrize(("file", "line"), of_documents())
def test_commands_parse(file: str, line: str) -> None:
    if not line.startswith(FOREIGN):
        parse(line)


# Commands of cuvee and make are tested here, what pip installs in test_install.py, and what engines get below.
TESTED = re.compile(r"(cuvee |make |uv pip install |#|$)")
TRANSFER = re.compile(r"vllm serve [^']*--kv-transfer-config\s+'(\{.*?\})'", re.DOTALL)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_no_test_runs_is_named(document: str) -> None:
    left = []
    for _, kind, code in BLOCK.findall((ROOT / document).read_text(encoding="utf-8")):
        lines = TRANSFER.sub("", code.replace("\\\n", " ")).splitlines()
        runs = kind == "python" and (document.startswith("docs/") or document in PYTHON_RUNS)
        if not runs and (kind or not all(TESTED.match(line) for line in lines)):
            left.append(code)
    named = NOT_RUN_HERE.get(document, {})
    assert [[start for start in named if code.startswith(start)] for code in left] == [[start] for start in named]


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if "vllm_tier" not in name])  # has a test of its own
def test_engines_take_what_a_document_passes(document: str) -> None:
    for transfer in map(json.loads, TRANSFER.findall((ROOT / document).read_text(encoding="utf-8"))):
        assert (transfer["kv_connector"], transfer["kv_role"]) == ("CuveeConnector", "kv_both")
        Options.from_dict(transfer["kv_connector_extra_config"])


# --- the site


def configuration() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    return data


def leaves(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in leaves(part)]


def test_nav_names_every_page() -> None:
    assert sorted(leaves(configuration()["nav"])) == PAGES


def test_files_that_pages_show_and_targets_that_they_name_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in PAGES:
        text = (DOCS / page).read_text(encoding="utf-8")
        for name in INCLUDE.findall(text):
            assert (ROOT / name).is_file(), f"{page}: {name}"
        for names in re.findall(r"--targets ([\w,]+)", text):
            assert set(names.split(",")) <= set(TARGETS), f"{page}: --targets {names}"
    for name in DOCUMENTS:
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE):
            assert f"\n{target}:" in makefile, f"{name}: make {target}"


def test_members_that_the_reference_lists_exist() -> None:
    """MkDocs leaves out, without a word, what is not there."""
    listed = 0
    for path in sorted((DOCS / "reference").glob("*.md")):
        shown = re.findall(r"^::: ([\w.]+)\n +options:\n(?: +.*\n)*? +members: \[(.+)\]", path.read_text("utf-8"), re.M)
        for owner, members in shown:
            there = pkgutil.resolve_name(owner)
            listed += 1
            assert not [name for name in members.split(", ") if not hasattr(there, name)], f"{path.name}: {owner}"
    assert listed > 10


def test_the_version_has_a_section_in_the_changelog() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (version,) = re.findall(r'^version = "(.+)"', text, re.MULTILINE)
    assert f"\n## [{version}] - 2" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.nightly  # 12 s; CI builds it with every change (`make docs`)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    if any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")):
        pytest.skip("MkDocs is not installed: pip install 'cuvee[docs]'")
    # Not --quiet, which silences warnings before --strict counts them.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = (tmp_path / "site" / "guides" / "vllm" / "index.html").read_text(encoding="utf-8")
    assert "chunk_tokens" in shown and "<!-- include" not in shown
    options = (tmp_path / "site" / "reference" / "vllm" / "index.html").read_text(encoding="utf-8")
    assert all(f"<code>{name}</code>" in options for name in (*METRICS, *REASONS))
    assert "{missing}" not in options and "{refused}" not in options
    assert "cuvee profile learn" in (tmp_path / "site" / "reference" / "commands" / "index.html").read_text("utf-8")
