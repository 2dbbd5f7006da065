"""`ProfileCollection`: profiles of many models in one place, and `find_profile`: the one that an engine asks for.

    cuvee-profiles/<layout>/<id>.safetensors             a profile, as `Profile.save` writes it
    cuvee-profiles/<layout>/newest-<weights>-v<n>        the id pushed last for these weights, and when; written last

- `<layout>` is the fingerprint of the model's KV layout, without its dtype, since profiles serve caches of any dtype.
- `<weights>` is the fingerprint of the weights that the profile was calibrated on.
- `<id>` is the profile's own, which everything that decoding depends on is hashed to.
- `<n>` is the version of profile files. A build takes the newest that it can read, so builds of two versions share a
  collection while a fleet is upgraded.

**Which profile is taken**: the one that was pushed last for the model's weights, or the one that an id names. One small
file says which is the newest, and is replaced atomically after the profile is there, so a reader finds the old profile
or the new one, whoever else pushes. (A checkpoint has a fingerprint for each dtype that its weights may be loaded in;
between profiles of several of these, the times of the pushes decide.)

**Nothing that is read is trusted**: sizes are bounded, `Profile.load` parses, and layout, weights and id must be those
that the names promise. Whoever can write to the place can still replace the newest profile by another valid one; an id
in the location pins it.
"""

from __future__ import annotations

import logging
import re
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from cuvee.codec.errors import CuveeError, FormatError, InputError, ProfileMismatchError
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.profile_file import VERSION
from cuvee.integrations.profile_collection.files import files_at
from cuvee.integrations.profile_collection.location import ProfileLocation, check_id, names_collection
from cuvee.integrations.weight_fingerprints import WeightFingerprints, weight_fingerprints

logger = logging.getLogger(__name__)

# What may be read into memory. That of SmolLM2-135M takes 39 MB; a profile grows more slowly than its model.
MAX_PROFILE_BYTES = 8 << 30
_MAX_NEWEST_BYTES = 100
_NEWEST = re.compile(rb"([0-9a-f]{32}) ([0-9]{1,11})\n")  # an id, and the time of its push in seconds since 1970
_FINGERPRINT = re.compile(r"(?:w2-)?[0-9a-f]{32}")  # without the prefix: of cuvee before 0.4


class ProfileCollection:
    """Profiles of many models in one place.

        >>> from tempfile import TemporaryDirectory
        >>> from cuvee.codec.layout import LayerLayout
        >>> layout = KVLayout("mine", (LayerLayout(2, 8, 8, None),) * 3, "bfloat16", None)
        >>> with TemporaryDirectory() as folder:
        ...     collection = ProfileCollection(f"{folder}/profiles")
        ...     profile = Profile.unlearned(layout)
        ...     _ = collection.push(profile)
        ...     collection.pull(layout, id=profile.id.hex()).id == profile.id
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

        It becomes the newest of its model if it names the model's weights. A profile of the same id is replaced: its
        curve may differ, which the id does not cover.

        Raises:
            InputError: the profile is too large, or names its weights by something else than a fingerprint.
            StoreError: the place cannot be reached, or refuses the profile. What was the newest still is.
        """
        layout, identity, weights = _layout_name(profile.layout), profile.id.hex(), profile.model
        if weights is not None and _FINGERPRINT.fullmatch(weights) is None:
            raise InputError(
                f"profile.model: must be w2- and 32 hex digits, the fingerprint of the weights, got {weights!r:.80}; "
                "learn the profile anew (cuvee profile learn)"
            )
        with tempfile.TemporaryDirectory(prefix="cuvee-") as folder:
            profile.save(f"{folder}/profile")
            data = Path(f"{folder}/profile").read_bytes()
        if len(data) > MAX_PROFILE_BYTES:
            raise InputError(f"profile: must be at most {MAX_PROFILE_BYTES} bytes, got {len(data)}")
        files = {_file_name(layout, identity): data}
        if weights is not None:
            files[_newest_name(layout, weights)] = f"{identity} {int(time.time())}\n".encode()
        self._files.write(files)
        return len(data)

    def pull(self, layout: KVLayout, *, weights: WeightFingerprints | None = None, id: str | None = None) -> Profile:
        """Return a profile of a model, after everything about it is verified. The log says which.

        Args:
            layout: of the model's cache; its dtype does not matter.
            weights: of the model. Without `id` they say which profile is meant. With `id` the profile must have been
                calibrated on them, if they are known; None: on any.
            id: of the profile, 32 hex digits; None: the newest of the model's weights.

        Raises:
            FileNotFoundError: there is no such profile.
            InputError: `id` is malformed, or missing although the weights are not known.
            FormatError: the file in the collection is damaged, or not what cuvee pushed there.
            VersionError: this build does not read the profile's version.
            ProfileMismatchError: the file holds another profile than its name says, or one of another model.
            StoreError: the place cannot be reached, or holds something else than a file of a sensible size.
        """
        of_layout, why = _layout_name(layout), "named by its id"
        accepted = () if weights is None else weights.found
        if id is None:
            pushed, identity, newest = self._newest(of_layout, weights, layout.model_type)
            why = f"the newest of these weights, pushed on {time.strftime('%Y-%m-%d %H:%M', time.gmtime(pushed))} UTC"
            accepted = (newest,)
        else:
            identity = check_id(id)
        name = _file_name(of_layout, identity)
        data = self._files.read(name, MAX_PROFILE_BYTES)
        if data is None:
            raise FileNotFoundError(
                f"no profile {identity} of this model's layout ({of_layout}) in {self._where}: name another id, or "
                "push it (cuvee profile push)"
            )
        profile = self._loaded(name, data)
        for field, wanted, got in (
            ("id", (identity,), profile.id.hex()),
            ("layout", (of_layout,), _layout_name(profile.layout)),
            ("weights", accepted, profile.model or "weights that it does not name"),
        ):
            if wanted and got not in wanted:
                raise ProfileMismatchError(
                    f"{field}: must be {' or '.join(wanted)}, got a profile of {got} in {name} of {self._where}; push "
                    "a profile of this model there again, or name its id"
                )
        logger.info(
            "cuvee: took profile %s (%s, group %s, %d bytes), %s, from %s",
            identity, profile.source, profile.group, len(data), why, self._where,
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

    def _newest(self, layout: str, weights: WeightFingerprints | None, model_type: str) -> tuple[int, str, str]:
        """Return the time of the last push of a model, the profile's id, and the weights that it was pushed for."""
        if weights is None or not weights.found:
            why = "" if weights is None else f" ({weights.unknown})"
            raise InputError(
                f"id: must name the profile, because the fingerprint of the model's weights is not known{why}, got "
                f"none for {self._where}: end its URL in ?id=…; cuvee profile push printed it"
            )
        found: list[tuple[int, str, str]] = []
        for own in weights.found:
            name = _newest_name(layout, own)
            data = self._files.read(name, _MAX_NEWEST_BYTES)
            if data is None:
                continue
            match = _NEWEST.fullmatch(data)
            if match is None:
                wrong = f"{name} in {self._where}: must be an id and a time, got {data!r}"
                raise FormatError(f"{wrong}: push a profile of this model there again")
            found.append((int(match[2]), match[1].decode(), own))
        if not found:
            raise FileNotFoundError(
                f"no profile of this {model_type} model in {self._where} (layout {layout}, weights "
                f"{' or '.join(weights.found)}, profiles of version {VERSION}): learn one (cuvee profile learn) and "
                "push it (cuvee profile push), or name another place"
            )
        return max(found)


def find_profile(where: str, layout: KVLayout, checkpoint: str | Path, *, revision: str | None = None) -> Profile:
    """Return the profile that an engine's option `profile` names: a file's, or the model's in a collection.

    A profile that is named by its id, or by its file, may be of other weights: `refuse_other_weights` says.

    Args:
        where: path of a file, or location of a collection.
        layout: of the model's cache.
        checkpoint: of the model, as in `checkpoint_identity`. It is read only if no id is named.
        revision: of a hub id.

    Raises:
        FileNotFoundError: there is no such file, or no profile of the model in the collection.
        CuveeError: as `ProfileCollection.pull` and `Profile.load`.
    """
    if not names_collection(where):
        return Profile.load(where)
    location = ProfileLocation.parse(where)
    weights = None if location.id else weight_fingerprints(checkpoint, revision=revision)
    return ProfileCollection(location).pull(layout, weights=weights, id=location.id)


def _layout_name(layout: KVLayout) -> str:
    return replace(layout, dtype="bfloat16").fingerprint.hex()


def _file_name(layout: str, identity: str) -> str:
    return f"cuvee-profiles/{layout}/{identity}.safetensors"


def _newest_name(layout: str, weights: str) -> str:
    return f"cuvee-profiles/{layout}/newest-{weights}-v{VERSION}"
