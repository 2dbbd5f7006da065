"""Two commits in turns: two processes that take turns. No speed is asserted."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Books

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import CuveeError, InputError
from cuvee.eval.bench import turns, turns_worker

ROOT = Path(__file__).parents[3]
CASE = {"cache": "c", "profile": "p", "tokens": 64, "threads": 1, "new": False, "bits_per_value": 1, "bytes": 1}


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return turns.compare_with(str(ROOT), quick=True)


def test_every_case_has_both_speeds_and_their_ratio(report: dict[str, Any]) -> None:
    assert report["against"] == str(ROOT) and report["hardware"]["cpu"]
    named = [(case["profile"], case["tokens"], case["threads"]) for case in report["cases"]]
    assert named == [(of, tokens, 1) for of in ("lossless", "head") for tokens in (64, 256)]
    for case in report["cases"]:
        assert case["bits_per_value"][0] == case["bits_per_value"][1]
        for way in ("encode", "decode"):
            theirs, mine = (side["median"] for side in case[way]["gb_per_s"])
            assert theirs > 0 and mine > 0
            ratio = case[way]["ratio"]
            assert ratio["runs"] == turns.QUICK_TURNS and 0 < ratio["p20"] <= ratio["median"] <= ratio["p80"]


def test_the_report_is_shown(report: dict[str, Any]) -> None:
    (table,) = turns.show_turns(report).tables
    assert len(table.rows) == len(report["cases"]) and {row[1] for row in table.rows} == {"lossless", "head"}


def test_a_profile_is_also_measured_on_chunks_that_are_new(
    books: Books, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "learned.safetensors"
    books.profile.save(path)
    chunks: list[KVChunk] = []
    profiles: list[set[int]] = [set(), set()]
    encode, decode = Codec.encode, Codec.decode

    def encoded(codec: Codec, chunk: KVChunk) -> bytes:
        chunks.append(chunk)
        profiles[0].add(id(codec.profile))
        return encode(codec, chunk)

    def decoded(codec: Codec, blob: bytes, start: int | None = None) -> KVChunk:
        profiles[1].add(id(codec.profile))
        return decode(codec, blob, start)

    monkeypatch.setattr(Codec, "encode", encoded)
    monkeypatch.setattr(Codec, "decode", decoded)
    asked = {"models": [], "profiles": [str(path)], "tokens": [32, 64], "threads": [1], "turns": 3}
    ((case, first, measured),) = turns_worker.cases_of_text(asked, "books-3m")
    assert (case["profile"], case["tokens"], case["new"], first.tokens) == ("learned", 64, True, 64)
    assert all(min(measured()) > 0 for _ in range(3))
    starts = [chunk.start for chunk in chunks]
    assert not profiles[0] & profiles[1]  # what one has met, the other has not
    assert len(chunks) == 4 and starts == list(range(starts[0], starts[0] + 4 * 64, 64))
    with pytest.raises(StopIteration):
        measured()


def test_the_source_of_a_commit_is_checked_out_and_removed() -> None:
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode:
        pytest.skip("not a checkout")
    with turns._source_of("HEAD") as source:
        assert (source / "cuvee" / "__init__.py").exists() and source.parent.name == head.stdout[:12]
    assert not source.exists()
    listed = subprocess.run(["git", "-C", str(ROOT), "worktree", "list"], capture_output=True, text=True, check=True)
    assert str(source.parent) not in listed.stdout


@pytest.mark.parametrize("other", ["no-such-commit", "--help", ""])
def test_a_commit_that_is_not_there_is_refused(other: str) -> None:
    with pytest.raises(InputError, match="against: must be a commit of this checkout"):
        turns.compare_with(other, quick=True)


def test_a_worker_that_fails_is_reported_with_its_last_line(tmp_path: Path) -> None:
    package = tmp_path / "src" / "cuvee"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('this cuvee is broken')")
    with pytest.raises(CuveeError, match="against: measuring failed: RuntimeError: this cuvee is broken"):
        turns.compare_with(str(tmp_path), quick=True)


def test_ratios_say_how_many_times_as_fast_this_cuvee_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, os, sys\n"
        "seconds = [2.0, 6.0] if 'other' in os.environ['PYTHONPATH'] else [1.0, 2.0]\n"
        f"case = {CASE | {'bytes': 4e9}}\n"
        "print(json.dumps({'cases': [case]}), flush=True)\n"
        "for _ in sys.stdin:\n"
        "    print(json.dumps([seconds]), flush=True)\n"
    )
    monkeypatch.setattr(turns, "_WORKER", worker)
    (tmp_path / "other" / "src" / "cuvee").mkdir(parents=True)
    (case,) = turns.compare_with(str(tmp_path / "other"))["cases"]
    assert [side["median"] for side in case["encode"]["gb_per_s"]] == [2.0, 4.0]
    assert (case["encode"]["ratio"]["median"], case["decode"]["ratio"]["median"]) == (2.0, 3.0)
    assert case["decode"]["ratio"]["runs"] == turns.TURNS


def test_other_cases_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, os\n"
        "tokens = 64 if 'other' in os.environ['PYTHONPATH'] else 128\n"
        f"case = {CASE} | {{'tokens': tokens}}\n"
        "print(json.dumps({'cases': [case]}))\n"
    )
    monkeypatch.setattr(turns, "_WORKER", worker)
    (tmp_path / "other" / "src" / "cuvee").mkdir(parents=True)
    with pytest.raises(CuveeError, match="measures other cases"):
        turns.compare_with(str(tmp_path / "other"), quick=True)
