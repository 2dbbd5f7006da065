"""`ProfileCollection`: profiles of many models in one place, and `find_profile`: the one that an engine asks for.

    cuvee-profiles/<layout>/<id>.safetensors        a profile, as `Profile.save` writes it
    cuvee-profiles/<layout>/<id>.md                 what is in it, for people (`profile_card`)
    README.md                                       the same of the first profile, where the hub shows it

- `<layout>` is the fingerprint of the model's KV layout, without its dtype, since profiles serve caches of any dtype.
- `<id>` is the profile's own, which everything that decoding depends on is hashed to.

A profile is taken by its id alone: all processes of an engine and of a fleet then have the same one, whoever pushes.
Nothing in a place is trusted: `Profile.load` parses without executing anything, and layout, weights and id must be what
the names promise.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cuvee.codec.errors import CuveeError, ProfileMismatchError
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.support.files import replacing
from cuvee.integrations.profiles.card import profile_card, text_of_card
from cuvee.integrations.profiles.location import ProfileLocation, names_collection
from cuvee.integrations.stores.base import StoreError

logger = logging.getLogger(__name__)

# What object storage may send. SmolLM2-135M's profile takes 41 MB; a profile grows more slowly than its model.
MAX_PROFILE_BYTES = 8 << 30
_CARD_BYTES = 4096  # of a card that are read: its first table
_FOLDER = "cuvee-profiles"
_NAME = re.compile(rf"{_FOLDER}/([0-9a-f]{{32}})/([0-9a-f]{{32}})\.safetensors")
_REMEDY = "push the profile there again"  # about a damaged file
_LONGEST_MESSAGE = 500  # characters of huggingface_hub's messages that are shown


@dataclass(frozen=True, slots=True)
class Found:
    """A profile in a collection.

    Attributes:
        id: of the profile, 32 hex digits.
        layout: fingerprint of the KV layout of its model, 32 hex digits.
        size: bytes of its file.
        time: when it was pushed, in seconds since 1970; 0: unknown.
    """

    id: str
    layout: str
    size: int
    time: float


class ProfileCollection:
    """Profiles of many models in one place.

        >>> from tempfile import TemporaryDirectory
        >>> from cuvee.codec.layout import LayerLayout
        >>> layout = KVLayout("mine", (LayerLayout(2, 8, 8, None),) * 3, "bfloat16", None)
        >>> with TemporaryDirectory() as folder:
        ...     profile = Profile.unlearned(layout)
        ...     _ = ProfileCollection(folder).push(profile)
        ...     (found,) = ProfileCollection(folder).list()
        ...     ProfileCollection(f"{folder}#{found.id}").pull(layout).id == profile.id
        True

    Args:
        where: the location (`profiles.location`).

    Raises:
        InputError: the location is wrong.
        ImportError: obstore or huggingface_hub is missing.
    """

    def __init__(self, where: str | ProfileLocation) -> None:
        self._where = ProfileLocation.parse(where) if isinstance(where, str) else where
        self._files = _BACKENDS[self._where.kind](self._where)

    def push(self, profile: Profile) -> int:
        """Put a profile into the collection; return the bytes of its file.

        A profile of the same id is replaced: its curve may differ, which the id does not cover. So is its card. A
        repository of the hub gets the card as README.md, too, unless it has one.

        Raises:
            StoreError: the place cannot be reached, or refuses the profile.
        """
        with tempfile.TemporaryDirectory(prefix="cuvee-") as folder:
            file = Path(folder, "profile")
            profile.save(file)
            card = Path(folder, "card")
            card.write_text(profile_card(profile, self._where.shown), encoding="utf-8")
            name = _file_name(layout_name(profile.layout), profile.id.hex())
            with self._reaching():
                self._files.write({name: file, str(Path(name).with_suffix(".md")): card})
            return file.stat().st_size

    def list(self, layout: KVLayout | None = None) -> list[Found]:
        """Return the profiles of a layout, or all, the last pushed first.

        Raises:
            StoreError: the place cannot be reached, or does not list files.
        """
        wanted = None if layout is None else layout_name(layout)
        with self._reaching():
            named = [(_NAME.fullmatch(name), size, time) for name, size, time in self._files.list()]
        found = [Found(name[2], name[1], size, time) for name, size, time in named if name is not None]
        return sorted((each for each in found if wanted in (None, each.layout)), key=lambda each: (-each.time, each.id))

    def layout_of(self, found: Found) -> str:
        """Return the layout of a listed profile's model for people, from its card; without one, its fingerprint.

        Raises:
            StoreError: the place cannot be reached.
        """
        name = str(Path(_file_name(found.layout, found.id)).with_suffix(".md"))
        with self._reaching(), self._files.fetched(name) as file, open(file or os.devnull, "rb") as card:
            text = card.read(_CARD_BYTES).decode(errors="replace")
        return text_of_card(text) or f"layout {found.layout}"

    def pull(self, layout: KVLayout, *, weights: Callable[[], Sequence[str]] = tuple) -> Profile:
        """Return the profile that the location names, after everything about it is verified. The log says which.

        Args:
            layout: of the model's cache; its dtype does not matter.
            weights: returns fingerprints of the weights that it may have been calibrated on; none: any. Called once
                all else is verified, because it may read all weights.

        Raises:
            FileNotFoundError: there is no such profile.
            InputError: the location names no id.
            FormatError: the file in the collection is damaged, or not what cuvee pushed there.
            VersionError: this build does not read the profile's version.
            ProfileMismatchError: the file holds another profile than its name says, or one of another model.
            StoreError: the place cannot be reached, or announces too large a file.
        """
        shown, identity = self._where.shown, self._where.need_id()
        of_layout = layout_name(layout)
        name = _file_name(of_layout, identity)
        profile = self._loaded(name)
        if profile is None:
            raise FileNotFoundError(
                f"no profile {identity} of this model's layout ({of_layout}) in {shown}: name another id "
                "(cuvee profile list), or push it (cuvee profile push)"
            )
        checks: list[tuple[str, Callable[[], Sequence[str]], str]] = [
            ("id", lambda: (identity,), profile.id.hex()),
            ("layout", lambda: (of_layout,), layout_name(profile.layout)),
            ("weights", weights, profile.model or "weights that it does not name"),
        ]
        for field, known, got in checks:
            if (wanted := known()) and got not in wanted:
                raise ProfileMismatchError(
                    f"{field}: must be {' or '.join(wanted)}, got a profile of {got} in {name} of {shown}; push a "
                    "profile of this model there, and name its id"
                )
        logger.info("cuvee: took profile %s (%s, group %s) from %s", identity, profile.source, profile.group, shown)
        return profile

    def _loaded(self, name: str) -> Profile | None:
        """Return the profile in a file; None if there is no such file. Errors name the place."""
        with self._reaching(), self._files.fetched(name) as file:
            if file is None:
                return None
            try:
                return Profile.load(file)
            except CuveeError as error:
                text = str(error).removeprefix(f"{file}: ")
                raise type(error)(f"{self._where.shown}: {name}: {text}; {self._files.remedy}") from error

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Turn what a place raises into a StoreError that names it."""
        try:
            yield
        except CuveeError:
            raise
        except Exception as error:  # of huggingface_hub's HTTP client, which is another one in each of its versions
            why = " ".join(str(error).split())[:_LONGEST_MESSAGE]
            raise StoreError(
                f"{self._where.shown}: failed, or cannot be reached: {type(error).__name__}: {why}"
            ) from error


def find_profile(where: str, layout: KVLayout) -> Profile:
    """Return the profile that an engine's option `profile` names: a file's, or that of an id in a collection.

    It may be of other weights: `refuse_other_weights` says.

    Args:
        where: path of a file, or location of a collection, with an id.
        layout: of the model's cache.

    Raises:
        FileNotFoundError: there is no such file or profile.
        InputError: a collection is named without an id.
        CuveeError: as `ProfileCollection.pull` and `Profile.load`.
    """
    return ProfileCollection(where).pull(layout) if names_collection(where) else Profile.load(where)


def layout_name(layout: KVLayout) -> str:
    """Return the name of a layout in collections: its fingerprint, whatever the dtype."""
    return replace(layout, dtype="bfloat16").fingerprint.hex()


def _file_name(layout: str, identity: str) -> str:
    return f"{_FOLDER}/{layout}/{identity}.safetensors"


class _Folder:
    """Files in a folder, which the first `write` creates.

    As in the other places, `fetched` yields the path of a file on this machine, or None; `write` replaces files of the
    same names, each all or nothing; `list` returns name, bytes and time of each file.
    """

    remedy = _REMEDY

    def __init__(self, location: ProfileLocation) -> None:
        self._path = Path(location.root).expanduser().absolute()

    def fetched(self, name: str) -> AbstractContextManager[Path | None]:
        file = self._path / name
        return nullcontext(file if file.is_file() else None)

    def write(self, files: Mapping[str, Path]) -> None:
        for name, file in files.items():
            (self._path / name).parent.mkdir(parents=True, exist_ok=True)
            with replacing(self._path / name) as temporary:
                shutil.copyfile(file, temporary)

    def list(self) -> list[tuple[str, int, float]]:
        files = [(file, file.stat()) for file in self._path.glob(f"{_FOLDER}/*/*")]
        return [(str(file.relative_to(self._path)), info.st_size, info.st_mtime) for file, info in files]


class _Bucket:
    """Files as objects of the same names below a prefix, the URL of an `ObjectStore`."""

    remedy = _REMEDY

    def __init__(self, location: ProfileLocation) -> None:
        from cuvee.integrations.stores.objects import ObjectStore

        self._store = ObjectStore(location.root)

    @contextmanager
    def fetched(self, name: str) -> Iterator[Path | None]:
        def fits(size: int) -> bool:
            if size > MAX_PROFILE_BYTES:
                raise StoreError(f"{name}: must be at most {MAX_PROFILE_BYTES} bytes, got {size}: push it again")
            return True

        data = self._store.attempt(self._store.read_object, name, fits)
        with tempfile.NamedTemporaryFile(prefix="cuvee-") as file:
            file.write(data or b"")
            file.flush()
            yield None if data is None else Path(file.name)

    def write(self, files: Mapping[str, Path]) -> None:
        for name, file in files.items():
            self._store.attempt(self._store.write_object, name, file.read_bytes())

    def list(self) -> list[tuple[str, int, float]]:
        return self._store.attempt(self._store.list_objects, _FOLDER)


class _Hub:
    """Files in a model repository of the Hugging Face hub.

    All of it is huggingface_hub's: its cache, which serves a file again when the hub cannot be reached, its retries,
    and its settings (HF_TOKEN, HF_ENDPOINT).
    """

    def __init__(self, location: ProfileLocation) -> None:
        try:
            import huggingface_hub  # noqa: F401 - its absence is reported before any work
        except ImportError as missing:
            raise ImportError("hf:// needs huggingface_hub: pip install 'cuvee[transformers]'") from missing
        self._repository, self._revision = location.root, location.revision
        self.remedy = (
            f"{_REMEDY}, or, if only this machine's copy is damaged, remove that (hf cache rm model/{location.root})"
        )

    def fetched(self, name: str) -> AbstractContextManager[Path | None]:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import RemoteEntryNotFoundError

        try:
            return nullcontext(Path(hf_hub_download(self._repository, name, revision=self._revision)))
        except RemoteEntryNotFoundError:
            return nullcontext(None)

    def write(self, files: Mapping[str, Path]) -> None:
        from huggingface_hub import CommitOperationAdd, HfApi

        *_, card = files.values()
        shown = HfApi().file_exists(self._repository, "README.md", revision=self._revision)
        added = files if shown else {**files, "README.md": card}
        HfApi().create_commit(
            self._repository,
            [CommitOperationAdd(name, file) for name, file in added.items()],
            revision=self._revision,
            commit_message="Push a cuvee profile",
        )

    def list(self) -> list[tuple[str, int, float]]:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RemoteEntryNotFoundError

        named: Any = {"recursive": True, "expand": True, "revision": self._revision}
        try:
            tree = [*HfApi().list_repo_tree(self._repository, _FOLDER, **named)]
        except RemoteEntryNotFoundError:
            return []
        files = [each for each in tree if hasattr(each, "size")]
        return [(each.path, each.size, each.last_commit.date.timestamp() if each.last_commit else 0) for each in files]


_BACKENDS: dict[str, Any] = {"folder": _Folder, "objects": _Bucket, "hub": _Hub}
