"""What `cuvee report` and `cuvee blend-report` have in common: a folder to fill, profiles and texts to name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from cuvee.codec.errors import InputError, ProfileMismatch
from cuvee.codec.layout import KVLayout
from cuvee.codec.profile import Profile
from cuvee.eval.corpus import Corpus

__all__ = ["check_folder", "load_matching_profile", "text_entry"]


def check_folder(out: Path, force: bool, resumed: str | None = None) -> None:
    """Make sure that a report may be written into a folder, before anything slow is loaded.

    Args:
        out: the folder; it need not exist.
        force: allow a folder that holds other things.
        resumed: a folder that holds this file is fine too: the report in it will be continued.

    Raises:
        InputError: a file, a folder with other things in it, or one that cannot be written to.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"out: {out} is a file: choose a folder")
    if out.is_dir() and any(out.iterdir()) and not force and not (resumed and (out / resumed).exists()):
        holds = " and holds no report" if resumed else ""
        raise InputError(f"out: {out} is not empty{holds}: choose another folder, or --force")
    if not os.access(next(p for p in (out, *out.parents) if p.exists()), os.W_OK):
        raise InputError(f"out: {out} cannot be written to")


def load_matching_profile(path: str, layout: KVLayout, fingerprint: str, model: str) -> Profile:
    """Load a profile and make sure that it was calibrated on this model.

    Args:
        path: the profile's file.
        layout: of the model's caches.
        fingerprint: of the model's weights.
        model: what the user calls the model.

    Raises:
        ProfileMismatch: it belongs to another layout or to other weights.
        FormatError, OSError: see `Profile.load`.
    """
    profile = Profile.load(path)
    profile.check_layout(layout)
    if profile.model not in (None, fingerprint):
        raise ProfileMismatch(
            f"{path}: was calibrated on other weights ({profile.model[:12]}…) than those of {model} "
            f"({fingerprint[:12]}…): learn one for this model, or leave --profile out"
        )
    return profile


def text_entry(corpus: Corpus) -> dict[str, Any]:
    """What a report says of a text. Its folder is nobody's business."""
    return {"name": Path(corpus.name).name, "sha256": corpus.sha256, "tokens": corpus.tokens}
