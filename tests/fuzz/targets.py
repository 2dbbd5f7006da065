"""All targets by name. Their modules, which import a lot, are imported on demand."""

from __future__ import annotations

from importlib import import_module

from tests.fuzz.engine import Target

TARGETS = {
    "blob": "blobs.BlobTarget",
    "states": "states.StatesTarget",
    "profile": "profiles.ProfileTarget",
    "envelope": "entries.EntryTarget",
    "pages": "pages.PagesTarget",
    "url": "entries.UrlTarget",
}


def named(name: str) -> Target:
    module, _, kind = TARGETS[name].partition(".")
    target: Target = getattr(import_module(f"tests.fuzz.{module}"), kind)()
    return target
