"""Profiles that several tests learn alike, learned once for all of them, whichever of pytest's workers asks first."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from cuvee.codec.profiles.profile import Profile


def shared_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """A folder of this run that all workers see."""
    base = factory.getbasetemp()
    # A worker of pytest-xdist has a folder of its own below that of the run.
    folder = (base.parent if base.name.startswith("popen-") else base) / name
    folder.mkdir(exist_ok=True)
    return folder


def learned_once(learn: Callable[..., Profile], folder: Path) -> Callable[..., Profile]:
    """`learn(model, token_ids, group="auto", **options)`, which looks first for what these arguments gave before.

    The same arguments give the same profile, which `tests/learning/test_calibrate.py` proves.
    """
    if getattr(learn, "learns_once", False):
        return learn  # patched already: a second lock on the same file would wait for the first for good

    def once(model: Any, token_ids: Any, group: str = "auto", **options: Any) -> Profile:
        digest = hashlib.blake2b(digest_size=16)
        for name, parameter in model.named_parameters():
            digest.update(f"{name} {parameter.dtype} {parameter.device} {tuple(parameter.shape)}".encode())
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        kinds = token_ids if isinstance(token_ids, Mapping) else {"": token_ids}
        for kind, tokens in kinds.items():
            digest.update(f"{kind} {tuple(tokens.shape)}".encode() + tokens.cpu().numpy().tobytes())
        kept = {name: value for name, value in sorted(options.items()) if name != "progress"}
        digest.update(f"{group} {kept}".encode())
        path = folder / f"{digest.hexdigest()}.safetensors"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                learn(model, token_ids, group, **options).save(path)
            return Profile.load(path)

    once.learns_once = True  # type: ignore[attr-defined]
    return once
