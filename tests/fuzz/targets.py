"""All targets by name. Their modules, which import much, are imported when they are asked for."""

from __future__ import annotations

from importlib import import_module

from tests.fuzz.engine import Target

TARGETS = {
    "blob": "blobs.BlobTarget",
    "profile": "profiles.ProfileTarget",
    "envelope": "entries.EntryTarget",
    "url": "entries.UrlTarget",
    "connector": "connector.ConnectorTarget",
    "cli": "commands.CommandTarget",
    "redis": "peers.RedisTarget",
    "http": "peers.HttpTarget",
}


def named(name: str) -> Target:
    """A target by its name; KeyError if there is none."""
    module, _, kind = TARGETS[name].partition(".")
    target: Target = getattr(import_module(f"tests.fuzz.{module}"), kind)()
    return target
