"""`ProfileCollection`: profiles of many models in one place, and `find_profile`: the one that an engine asks for.

    cuvee-profiles/<layout>/<id>.safetensors        a profile, as `Profile.save` writes it

- `<layout>` is the fingerprint of the model's KV layout, without its dtype, since profiles serve caches of any dtype.
- `<id>` is the profile's own, which everything that decoding depends on is hashed to.

A profile is taken by its id alone: all processes of an engine and of a fleet then have the same one, whoever pushes.
**Nothing that is read is trusted**: sizes are bounded, `Profile.load` parses, and layout, weights and id must be those
that the names promise.
"""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cuvee.codec.errors import CuveeError, InputError, ProfileMismatchError
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.profile import Profile
from cuvee.integrations.profile_collection.files import files_at
from cuvee.integrations.profile_collection.location import ProfileLocation, check_id, names_collection
from cuvee.integrations.stores.base import StoreError

logger = logging.getLogger(__name__)

# What may be read into memory. That of SmolLM2-135M takes 39 MB; a profile grows more slowly than its model.
MAX_PROFILE_BYTES = 8 << 30
_FOLDER = "cuvee-profiles"
_NAME = re.compile(rf"{_FOLDER}/([0-9a-f]{{32}})/([0-9a-f]{{32}})\.safetensors")


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
        ...     collection = ProfileCollection(f"{folder}/profiles")
        ...     profile = Profile.unlearned(layout)
        ...     _ = collection.push(profile)
        ...     (found,) = collection.list()
        ...     collection.pull(layout, found.id).id == profile.id
        True

    Args:
        where: the location (`profile_collection.location`). An id in it is not used here.

    Raises:
        InputError: the location is wrong.
        ImportError: obstore or huggingface_hub is missing.
    """

    def __init__(self, where: str | ProfileLocation) -> None:
        location = ProfileLocation.parse(where) if isinstance(where, str) else where
        self._where, self._files = location.shown, files_at(location)

    def push(self, profile: Profile) -> int:
        """Put a profile into the collection; return the bytes of its file.

        A profile of the same id is replaced: its curve may differ, which the id does not cover.

        Raises:
            InputError: the profile is too large.
            StoreError: the place cannot be reached, or refuses the profile.
        """
        with tempfile.TemporaryDirectory(prefix="cuvee-") as folder:
            profile.save(f"{folder}/profile")
            data = Path(f"{folder}/profile").read_bytes()
        if len(data) > MAX_PROFILE_BYTES:
            raise InputError(f"profile: must be at most {MAX_PROFILE_BYTES} bytes, got {len(data)}")
        self._files.write(_file_name(layout_name(profile.layout), profile.id.hex()), data)
        return len(data)

    def list(self, layout: KVLayout | None = None) -> list[Found]:
        """Return the profiles of a layout, or all, the last pushed first.

        Raises:
            StoreError: the place cannot be reached, or does not list files.
        """
        wanted = None if layout is None else layout_name(layout)
        named = ((_NAME.fullmatch(file.name), file) for file in self._files.list(_FOLDER))
        found = [Found(name[2], name[1], file.size, file.time) for name, file in named if name is not None]
        return sorted((each for each in found if wanted in (None, each.layout)), key=lambda each: (-each.time, each.id))

    def pull(self, layout: KVLayout, id: str, *, weights: Sequence[str] = ()) -> Profile:
        """Return a profile of a model, after everything about it is verified. The log says which.

        Args:
            layout: of the model's cache; its dtype does not matter.
            id: of the profile, 32 hex digits.
            weights: fingerprints of the weights that it may have been calibrated on; none: any.

        Raises:
            FileNotFoundError: there is no such profile.
            InputError: `id` is malformed.
            FormatError: the file in the collection is damaged, or not what cuvee pushed there.
            VersionError: this build does not read the profile's version.
            ProfileMismatchError: the file holds another profile than its name says, or one of another model.
            StoreError: the place cannot be reached, or holds something else than a file of a sensible size.
        """
        of_layout, identity = layout_name(layout), check_id(id)
        name = _file_name(of_layout, identity)
        data = self._files.read(name, MAX_PROFILE_BYTES)
        if data is None:
            raise FileNotFoundError(
                f"no profile {identity} of this model's layout ({of_layout}) in {self._where}: name another id "
                "(cuvee profile list), or push it (cuvee profile push)"
            )
        profile = self._loaded(name, data)
        for field, wanted, got in (
            ("id", (identity,), profile.id.hex()),
            ("layout", (of_layout,), layout_name(profile.layout)),
            ("weights", tuple(weights), profile.model or "weights that it does not name"),
        ):
            if wanted and got not in wanted:
                raise ProfileMismatchError(
                    f"{field}: must be {' or '.join(wanted)}, got a profile of {got} in {name} of {self._where}; push "
                    "a profile of this model there, and name its id"
                )
        logger.info(
            "cuvee: took profile %s (%s, group %s, %d bytes) from %s",
            identity, profile.source, profile.group, len(data), self._where,
        )  # fmt: skip
        return profile

    def _loaded(self, name: str, data: bytes) -> Profile:
        """Return the profile in the bytes of a file; errors name the place that it came from."""
        with tempfile.NamedTemporaryFile(prefix="cuvee-") as file:
            file.write(data)
            file.flush()
            try:
                return Profile.load(file.name)
            except CuveeError as error:
                text = str(error).replace(f"{file.name}: ", "")
                raise type(error)(f"{self._where}: {name}: {text}; {self._files.remedy}") from error


def find_profile(where: str, layout: KVLayout) -> Profile:
    """Return the profile that an engine's option `profile` names: a file's, or that of an id in a collection.

    It may be of other weights: `refuse_other_weights` says.

    Args:
        where: path of a file, or location of a collection, with an id.
        layout: of the model's cache.

    Raises:
        FileNotFoundError: there is no such file or profile.
        InputError: no id is named; the message says which there is, or how to list them.
        CuveeError: as `ProfileCollection.pull` and `Profile.load`.
    """
    if not names_collection(where):
        return Profile.load(where)
    location = ProfileLocation.parse(where)
    collection = ProfileCollection(location)
    if location.id is not None:
        return collection.pull(layout, location.id)
    remedy = f"cuvee profile list {location.shown} shows them"
    try:
        found = collection.list(layout)
    except StoreError as error:
        remedy = f"it cannot be listed ({error})"
    else:
        if len(found) == 1:
            remedy = f"it holds {location.shown}#{found[0].id}"
        elif not found:
            remedy = "it holds none of this model: learn one (cuvee profile learn) and push it (cuvee profile push)"
    raise InputError(f"profile: must name a file, or a place and an id (URL#id), got {location.shown}: {remedy}")


def layout_name(layout: KVLayout) -> str:
    """Return the name of a layout in collections: its fingerprint, whatever the dtype."""
    return replace(layout, dtype="bfloat16").fingerprint.hex()


def _file_name(layout: str, identity: str) -> str:
    return f"{_FOLDER}/{layout}/{identity}.safetensors"
