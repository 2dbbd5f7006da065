"""Files in a repository of the Hugging Face hub, through huggingface_hub.

Every read is of one commit: a branch is resolved once, so that the files that belong together are of one push. Files of
a commit never change, so huggingface_hub's cache serves them again; with a commit in the location, it does so without a
network. Access tokens and the address of the hub are huggingface_hub's own (HF_TOKEN, HF_ENDPOINT).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from cuvee.integrations.profile_collection.files import NamedFiles
from cuvee.integrations.stores.base import StoreError

_COMMIT = re.compile(r"[0-9a-f]{40}")
_LONGEST_MESSAGE = 300  # characters of the hub's own messages that are shown

_T = TypeVar("_T")


class HubFiles(NamedFiles):
    """Files in a model repository of the hub.

    Args:
        repository: `owner/name`.
        revision: branch, tag or commit; None: the main branch.
        shown: the location for messages.

    Raises:
        ImportError: huggingface_hub is missing.
    """

    def __init__(self, repository: str, revision: str | None, shown: str) -> None:
        try:
            import huggingface_hub  # noqa: F401 - its absence is reported before any work
        except ImportError as missing:
            raise ImportError("hf:// needs huggingface_hub: pip install cuvee[transformers]") from missing
        self.shown = shown
        self.remedy = (
            "push the profile there again, or, if only this machine's copy is damaged, remove that (hf cache rm "
            f"model/{repository})"
        )
        self._repository, self._revision = repository, revision
        self._commit = revision if revision and _COMMIT.fullmatch(revision) else None

    def read(self, name: str, most: int) -> bytes | None:
        """See `NamedFiles.read`. The bound holds for the size that the hub announces, before anything is downloaded."""
        from huggingface_hub import (
            get_hf_file_metadata,
            get_token,
            hf_hub_download,
            hf_hub_url,
            try_to_load_from_cache,
        )
        from huggingface_hub.errors import EntryNotFoundError

        commit = self._resolved()
        cached = try_to_load_from_cache(self._repository, name, revision=commit)
        if not isinstance(cached, str):
            try:
                url = hf_hub_url(self._repository, name, revision=commit)
                size = self._ask(lambda: get_hf_file_metadata(url, token=get_token()).size)
                if size is None or size > most:
                    raise self.too_large(name, most, size)
                cached = self._ask(lambda: hf_hub_download(self._repository, name, revision=commit))
            except EntryNotFoundError:
                return None
        file = Path(cached)
        if file.stat().st_size > most:
            raise self.too_large(name, most, file.stat().st_size)
        return file.read_bytes()

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write all files in one commit, so that readers see all of them or none."""
        from huggingface_hub import CommitOperationAdd, HfApi

        if self._revision is not None and _COMMIT.fullmatch(self._revision):
            raise StoreError(f"{self.shown}: is a commit, which never changes: push to a branch, or leave it out")
        operations = [CommitOperationAdd(name, data) for name, data in files.items()]
        self._ask(
            lambda: HfApi().create_commit(
                self._repository, operations, commit_message="Push a cuvee profile", revision=self._revision
            )
        )

    def _resolved(self) -> str:
        """Return the commit that all reads are of."""
        if self._commit is None:
            from huggingface_hub import HfApi

            commit = self._ask(lambda: HfApi().model_info(self._repository, revision=self._revision).sha)
            # It becomes part of the paths of huggingface_hub's cache.
            if not isinstance(commit, str) or _COMMIT.fullmatch(commit) is None:
                raise StoreError(f"{self.shown}: the hub names no commit of it, but {commit!r:.80}")
            self._commit = commit
        return self._commit

    def _ask(self, call: Callable[[], _T]) -> _T:
        """Return `call()`; huggingface_hub's EntryNotFoundError if there is no such file, else a StoreError."""
        from huggingface_hub import errors

        try:
            return call()
        except errors.LocalEntryNotFoundError as error:  # the hub did not answer, and the file is not cached
            raise self._failed(error) from error
        except errors.EntryNotFoundError:
            raise
        except Exception as error:  # of huggingface_hub's HTTP client, which is another one in each of its versions
            known: dict[type[Exception], str] = {
                errors.OfflineModeIsEnabled: "cannot be read offline (HF_HUB_OFFLINE), except a commit "
                "(hf://owner/name@<40 hex digits>) that is in the local cache",
                errors.RepositoryNotFoundError: "there is no such repository, or it is not visible: create it (hf repo "
                "create), or log in (hf auth login, or HF_TOKEN)",
                errors.RevisionNotFoundError: "the repository has no such branch, tag or commit",
            }
            for kind, what in known.items():
                if isinstance(error, kind):
                    raise StoreError(f"{self.shown}: {what}") from error
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> StoreError:
        why = " ".join(str(error).split())[:_LONGEST_MESSAGE]
        return StoreError(f"{self.shown}: the hub failed, or cannot be reached: {type(error).__name__}: {why}")
