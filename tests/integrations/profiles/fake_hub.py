"""A stand-in of the Hugging Face hub on a loopback port, which huggingface_hub itself talks to."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

import pytest
from huggingface_hub import constants
from tests.integrations.stores.fake_http import FakeHTTP, answer

REPOSITORY = "mine/profiles"
_API = f"/api/models/{REPOSITORY}"


class FakeHub(FakeHTTP):
    """One model repository: its commits, and the branch `main`.

    Attributes:
        commits: files by name, by commit, the oldest first.
        branches: commit by branch or tag.
    """

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        super().__init__()
        self.commit({})

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Add or replace files, in a commit; return it."""
        before = self.commits.get(self.branches.get(branch, ""), {})
        name = hashlib.sha1(str(len(self.commits)).encode()).hexdigest()
        self.commits[name] = {**before, **files}
        self.branches[branch] = name
        return name

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[self.branches["main"]]

    def honest(self, method: str, path: str, body: bytes) -> bytes:
        """Respond as the hub does, as far as the tests of profiles need it."""
        path = unquote(path)
        if found := re.fullmatch(rf"{_API}(?:/revision/(.+))?", path):
            commit = self._commit_of(found[1] or "main")
            if commit is None:
                return _missing("RevisionNotFound")
            return _json({"id": REPOSITORY, "modelId": REPOSITORY, "sha": commit, "siblings": []})
        if found := re.fullmatch(rf"{_API}/tree/([^/]+)/([^?]+)\?.*", path):
            files = self.commits[self._commit_of(found[1]) or ""]
            last = {"id": "0" * 40, "title": "Push", "date": "2026-01-02T03:04:05.000Z"}
            below = {name: data for name, data in files.items() if name.startswith(f"{found[2]}/")}
            if not below:
                return _missing("EntryNotFound")
            return _json(
                [
                    {"type": "file", "path": name, "size": len(data), "oid": "0" * 40, "lastCommit": last}
                    for name, data in below.items()
                ]
            )
        if found := re.fullmatch(rf"/{REPOSITORY}/resolve/([^/]+)/(.+)", path):
            commit = self._commit_of(found[1])
            if commit is None:
                return _missing("RevisionNotFound")
            data = self.commits[commit].get(found[2])
            if data is None:
                return _missing("EntryNotFound")
            tag, size = f'"{hashlib.sha1(data).hexdigest()}"', str(len(data))
            return answer(
                "200 OK", b"" if method == "HEAD" else data, X_Repo_Commit=commit, ETag=tag, Content_Length=size
            )
        if re.fullmatch(rf"{_API}/preupload/main", path):
            names = [file["path"] for file in json.loads(body)["files"]]
            return _json({"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]})
        if path == "/api/validate-yaml":
            return _json({})
        if re.fullmatch(rf"{_API}/commit/main", path):
            lines = [json.loads(line) for line in body.splitlines()]
            files = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            commit = self.commit(files)
            return _json(
                {
                    "success": True,
                    "commitOid": commit,
                    "commitUrl": f"https://huggingface.co/{REPOSITORY}/commit/{commit}",
                }
            )
        return _missing("RepoNotFound")

    def _commit_of(self, revision: str) -> str | None:
        return self.branches.get(revision, revision if revision in self.commits else None)


def _json(data: object) -> bytes:
    return answer(body=json.dumps(data).encode(), Content_Type="application/json")


def _missing(code: str) -> bytes:
    return answer("404 Not Found", X_Error_Code=code, X_Error_Message=code)


@contextmanager
def fake_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Yield a hub that huggingface_hub takes for the real one, with a local cache in `cache`; close it afterwards."""
    hub = FakeHub()
    address = f"http://127.0.0.1:{hub.port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    try:
        yield hub
    finally:
        hub.close()
