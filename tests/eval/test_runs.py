"""The folder of a run: disks that are full, packages that are missing, files in the way."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from cuvee.codec.errors import InputError
from cuvee.eval.runs import check_folder, need_packages, save_results, writing


def test_what_cannot_be_written_is_said_and_what_was_there_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    save_results(path, {"done": 1})

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(
        InputError, match=r"^out: .*report.json cannot be written \(No space left.*make room .* same command"
    ):
        save_results(path, {"done": 2})
    assert json.loads(path.read_text()) == {"done": 1} and [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_a_missing_package_is_named_with_the_remedy() -> None:
    with pytest.raises(ImportError, match=r"^cuvee report needs no_such_package: pip install 'cuvee\[eval\]'$"):
        need_packages("cuvee report", "json", "no_such_package")


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"^out: .* cannot be written"):
        save_results(tmp_path / "file" / "report.json", {})
    with pytest.raises(InputError, match=r"^out: .* cannot be written"), writing(tmp_path):
        (tmp_path / "no" / "folder").write_text("")
    with pytest.raises(InputError, match=r"^out: must be a folder"):
        check_folder(tmp_path / "file", force=False)
    with pytest.raises(InputError, match=r"^out: /proc/x/y cannot be written to"):
        check_folder(Path("/proc/x/y"), force=False)
