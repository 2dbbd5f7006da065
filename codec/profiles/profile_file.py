"""The file of a profile: safetensors whose metadata is one JSON string; nothing in it is executed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from cuvee.codec.entropy.coding_plan import Quantizer
from cuvee.codec.entropy.family import TABLES, make_family
from cuvee.codec.errors import FormatError, InputError, VersionError
from cuvee.codec.format.container import MAX_SECTIONS, MAX_STEP_INDEX
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.quality import CurvePoint
from cuvee.codec.profiles.section_profile import read_section_profile
from cuvee.codec.profiles.sections import partition
from cuvee.codec.profiles.token_prediction import read_token_table
from cuvee.codec.support.files import replacing
from cuvee.codec.support.plain_json import parse_json
from cuvee.codec.support.steps import OCTAVE

if TYPE_CHECKING:
    from cuvee.codec.profiles.profile import Profile

FORMAT = "cuvee-profile"
VERSION = 5
ID_BYTES = 16
# Values per token: 128 layers of 128 heads of 512 have this many. The limit bounds what a small file can claim.
MAX_VALUES = 1 << 24

Arrays = dict[str, npt.NDArray[Any]]


def metadata_of(profile: Profile) -> dict[str, Any]:
    """Return what the file's JSON holds, but for the id."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "layout": profile.layout.to_dict(),
        "group": profile.group,
        "source": profile.source,
        "min_step": profile.min_step_index,
        "model": profile.model,
        "features": 0 if profile.token_table is None else profile.token_table.features,
        "curve": [point.to_dict() for point in profile.points],
        **({} if profile.text_tokens is None else {"text_tokens": profile.text_tokens}),
        **({"lengths": list(profile.lengths)} if profile.lengths else {}),
    }


def arrays_of(profile: Profile) -> Arrays:
    """Return the file's tensors."""
    quantizer = profile.family.quantizer
    arrays: Arrays = {
        "family.freq": profile.family.tables.freq[:TABLES],
        "family.dead_zone": quantizer.dead_zone,
        "family.rounding": quantizer.rounding,
        "family.shrink": quantizer.shrink,
    }
    if profile.token_table is not None:
        arrays["tokens.embedding"] = profile.token_table.packed()
        arrays["tokens.row_scale"] = profile.token_table.row_scale.numpy()
    for i, section in enumerate(profile.learned):
        arrays |= section.arrays(f"section.{i}")
    return arrays


def profile_id(profile: Profile) -> bytes:
    """Return `Profile.id`."""
    digest = hashlib.blake2b(digest_size=ID_BYTES, person=b"cuvee-profile")
    layout = replace(profile.layout, dtype="bfloat16")  # chunks of any dtype may be coded
    identity = {**metadata_of(profile), "layout": layout.fingerprint.hex(), "curve": None, "id": None}
    for name in ("text_tokens", "lengths"):  # which decoding does not depend on, and older files lack
        identity.pop(name, None)
    digest.update(_canonical(identity).encode())
    for name, array in sorted(arrays_of(profile).items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()


def write_profile_file(profile: Profile, path: str | os.PathLike[str]) -> None:
    """See `Profile.save`."""
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays_of(profile).items()}
    metadata = {"cuvee": sealed({**metadata_of(profile), "id": profile.id.hex()})}
    with replacing(path) as temporary:
        save_file(arrays, temporary, metadata)


def read_profile_file(path: str | os.PathLike[str]) -> tuple[dict[str, Any], str]:
    """Return the arguments of `Profile`, and the id that the file names, in hex; errors as `Profile.load`."""
    with _metadata_of(path) as (file, data):
        try:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except TypeError as error:
            raise FormatError(f"{os.fspath(path)}: holds tensors of a dtype that no profile has: {error}") from error
        return profile_arguments(data, arrays), data["id"]


def check_profile_file(path: str | os.PathLike[str]) -> None:
    """Raise as `Profile.load`, as far as the file's metadata tell: they are read in an instant, arrays are not."""
    with _metadata_of(path) as (_, data):
        KVLayout.from_dict(data["layout"])


@contextmanager
def _metadata_of(path: str | os.PathLike[str]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield an open file and its metadata; what is raised within is told of the file."""
    name = os.fspath(path)
    if not Path(path).is_file():
        raise FileNotFoundError(f"no profile at {name}: name another file, or learn one (cuvee profile learn)")
    try:
        with safe_open(path, "np") as file:
            text = (file.metadata() or {}).get("cuvee")
            if text is None:
                raise FormatError(f"{name}: is a safetensors file but not a cuvee profile")
            yield file, unsealed(text)
    except FormatError:
        raise
    except SafetensorError as error:
        raise FormatError(f"{name}: is not a safetensors file, or is truncated: {error}") from error
    except (InputError, AttributeError, KeyError, TypeError, ValueError, IndexError, ArithmeticError) as error:
        raise FormatError(f"{name}: is not a well-formed profile: {error!r:.500}") from error


def profile_arguments(data: dict[str, Any], arrays: Arrays) -> dict[str, Any]:
    """Return the arguments of `Profile`, from untrusted metadata and arrays.

    Raises:
        FormatError: they break a rule; all other exceptions that ill-typed data causes.
    """
    layout = KVLayout.from_dict(data["layout"])
    is_learned = any(name.startswith("section.") for name in arrays)
    _check_size(layout, arrays if is_learned else None)
    freq = arrays["family.freq"]
    if freq.dtype != np.uint16:
        raise FormatError("family.freq: has the wrong dtype")
    quantizer = Quantizer(arrays["family.dead_zone"], arrays["family.rounding"], arrays["family.shrink"])
    features = data["features"]
    sections = partition(layout, data["group"]) if is_learned else ()
    min_step, text_tokens, lengths = data["min_step"], data.get("text_tokens"), data.get("lengths", [])
    arguments = {
        "layout": layout,
        "group": data["group"],
        "source": data["source"],
        "family": make_family(freq, quantizer),
        "token_table": None if features == 0 else read_token_table(features, arrays),
        "learned": tuple(
            read_section_profile(f"section.{i}", section, arrays, features) for i, section in enumerate(sections)
        ),
        "curve": [CurvePoint.from_dict(point) for point in data["curve"]],
        "min_step_index": min_step,
        "model": data["model"],
        "text_tokens": text_tokens,
        "lengths": lengths,
    }
    if len({(point.step_index, point.kind, point.plain) for point in arguments["curve"]}) < len(arguments["curve"]):
        raise FormatError("curve: must have one point for each step and kind of text")
    if type(min_step) is not int or not -MAX_STEP_INDEX <= min_step <= 8 * OCTAVE:
        raise FormatError(f"min_step: must be a step index, {-MAX_STEP_INDEX} … {8 * OCTAVE}")
    if text_tokens is not None and (type(text_tokens) is not int or text_tokens < 0):
        raise FormatError("text_tokens: must be a number of tokens")
    if type(lengths) is not list or any(type(length) is not int or length < 1 for length in lengths):
        raise FormatError("lengths: must be a list of positive numbers of tokens")
    if not isinstance(data["source"], str) or not isinstance(data["model"], str | None):
        raise FormatError("source, model: must be names")
    if not sections and data["group"] != "unit":
        raise FormatError(f"group: must be 'unit' in a profile without learned sections, got {data['group']!r}")
    return arguments


def _check_size(layout: KVLayout, arrays: Arrays | None) -> None:
    """Refuse a layout that does not fit the file before allocating anything of its size."""
    values = layout.values_per_token
    if layout.num_layers > MAX_SECTIONS or values > MAX_VALUES:
        raise FormatError(
            f"layout: must have at most {MAX_SECTIONS} layers and {MAX_VALUES} values per token, got "
            f"{layout.num_layers} and {values}"
        )
    if arrays is not None and values > sum(array.size for array in arrays.values()):
        raise FormatError(f"layout: has {values} values per token, more than the profile's arrays hold")


def sealed(data: dict[str, Any]) -> str:
    """Return canonical JSON that contains its own BLAKE2b digest: the id does not cover all of the metadata."""
    digest = hashlib.blake2b(_canonical(data).encode(), digest_size=ID_BYTES).hexdigest()
    return _canonical({**data, "digest": digest})


def unsealed(text: str) -> dict[str, Any]:
    """Return the data of `sealed` text.

    Raises:
        FormatError: the text is not that of a profile, or the digest does not match.
        VersionError: this build does not read the profile's version, whose digest may differ.
        ValueError: the text is not JSON.
    """
    data = parse_json(text)
    if not isinstance(data, dict):
        raise FormatError("metadata: must be an object")
    if data.get("format") != FORMAT:
        raise FormatError(f"format: must be {FORMAT!r}, got {data.get('format')!r}")
    if data.get("version") != VERSION:
        raise VersionError(
            f"version: must be {VERSION} for this build, got {data.get('version')}: learn the profile anew "
            "(cuvee profile learn)"
        )
    digest = data.pop("digest", None)
    if json.loads(sealed(data))["digest"] != digest:
        raise FormatError("metadata: are damaged, they do not hash to their digest")
    return data


def _canonical(data: dict[str, Any]) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
