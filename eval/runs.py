"""What a run of measurements needs: a folder of whole files, its model, and what its figures follow from.

Files are written completely or not at all, so a run that anything ends can be continued.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cuvee.calibration.corpus import load_model
from cuvee.codec.errors import InputError, ProfileMismatchError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.fingerprint import are_others, model_fingerprint
from cuvee.codec.models.forward import coded_layout
from cuvee.codec.profiles.profile import Profile
from cuvee.eval.files import write_json

__all__ = [
    "MeasuredModel",
    "check_folder",
    "metadata_pairs",
    "need_packages",
    "save_results",
    "software",
    "writing",
]


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Write into the folder of a run.

    Raises:
        InputError: the path cannot be written. Earlier contents stay.
    """
    try:
        yield
    except OSError as error:
        raise InputError(
            f"out: {path} cannot be written ({error.strerror or error}): what was saved before is kept; make room "
            "or allow writing, and give the same command again"
        ) from error


def save_results(path: Path, data: Any) -> None:
    """Write all measurements so far, completely or not at all. Errors: see `writing`."""
    with writing(path):
        write_json(path, data)


def need_packages(command: str, *packages: str) -> None:
    """Fail before anything slow happens if a package that a command needs is missing.

    Raises:
        ImportError: the message names the packages and the remedy.
    """
    if missing := [package for package in packages if find_spec(package) is None]:
        raise ImportError(f"{command} needs {', '.join(missing)}: pip install 'cuvee[eval]'")


def check_folder(out: Path, force: bool, resumed: str | None = None) -> None:
    """Check that a report may be written into a folder, before anything slow is loaded.

    Args:
        out: the folder; it need not exist.
        force: allow a folder that holds other files.
        resumed: allow a folder that holds this file, because the report in it will be continued.

    Raises:
        InputError: `out` is a file, holds other files, or cannot be written to.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"out: must be a folder, got the file {out}")
    if out.is_dir() and any(out.iterdir()) and not force and not (resumed and (out / resumed).exists()):
        holds = " and holds no report" if resumed else ""
        raise InputError(f"out: {out} is not empty{holds}: choose another folder, or --force")
    try:  # a permission says nothing to root, nor of a disk that is read-only
        with tempfile.TemporaryFile(
            dir=next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
        ):
            pass
    except OSError as error:
        raise InputError(f"out: {out} cannot be written to ({error.strerror}): choose another folder") from error


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """A loaded model, the layout of its caches, and the fingerprint of its weights."""

    name: str
    lm: Any
    layout: KVLayout
    fingerprint: str

    @classmethod
    def load(cls, name: str, dtype: str, device: str = "cpu") -> MeasuredModel:
        """Load a model by the names that `load_model` takes. Errors: see there."""
        lm = load_model(name, dtype, device)
        return cls(name, lm, coded_layout(lm), model_fingerprint(lm))

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(p.numel() for p in self.lm.parameters())

    def check_profile(self, path: str, profile: Profile) -> None:
        """Check that the profile in a file was calibrated on this model.

        Raises:
            ProfileMismatchError: the profile belongs to another layout or to other weights.
        """
        profile.check_layout(self.layout)
        if are_others(profile.model, self.fingerprint):
            raise ProfileMismatchError(
                f"{path}: was calibrated on other weights ({str(profile.model)[:12]}…) than those of {self.name} "
                f"({self.fingerprint[:12]}…): learn one for this model"
            )

    def describe(self) -> dict[str, Any]:
        """The model as reports describe it."""
        return {
            "name": Path(self.name).name,
            "fingerprint": self.fingerprint,
            "model_type": self.layout.model_type,
            "parameters": self.parameters,
            "dtype": self.layout.dtype,
            "layers": self.layout.num_layers,
            "values_per_token": self.layout.values_per_token,
        }


def software(machine: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `hardware()` that figures follow from, without the commit, the date and the number of cores."""
    return {name: value for name, value in machine.items() if name not in ("commit", "date", "cores")}


def metadata_pairs(pairs: Collection[str]) -> dict[str, str]:
    """Split "name=value" strings.

    Raises:
        InputError: a string has no "=".
    """
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise InputError(f"metadata: must be name=value, got {wrong[0]!r}")
    return dict(pair.split("=", 1) for pair in pairs)
