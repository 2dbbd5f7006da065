"""The examples of docstrings run, and everything public has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
from types import ModuleType

import pytest

import cuvee

# Where examples are looked for, besides everything that `cuvee` exports.
MODULES = (
    "cuvee.blend.blender", "cuvee.blend.chunk_cache", "cuvee.blend.hkvd", "cuvee.blend.segments",
    "cuvee.blend.selectors", "cuvee.codec.chunk", "cuvee.codec.codec", "cuvee.codec.container", "cuvee.codec.layout",
    "cuvee.codec.learning.calibrate", "cuvee.codec.learning.curve", "cuvee.codec.paged", "cuvee.codec.profile",
    "cuvee.integrations.stores.disk", "cuvee.integrations.stores.memory", "cuvee.integrations.stores.objects",
    "cuvee.integrations.stores.redis", "cuvee.integrations.stores.tiered", "cuvee.integrations.stores.urls",
    "cuvee.integrations.transformers",
)  # fmt: skip
WITHOUT = {  # what is plain data that another's example shows, or an error
    "BlobInfo", "OpenBlob", "inspect", "__version__",
    *(name for name in cuvee.__all__ if isinstance(getattr(cuvee, name), type) and
      issubclass(getattr(cuvee, name), Exception)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module: ModuleType = importlib.import_module(name)
    failed, tried = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE, extraglobs={"__name__": name})
    assert tried, f"{name} has no example"
    assert not failed, "the report is above"


@pytest.mark.parametrize("name", sorted(set(cuvee.__all__) - WITHOUT))
def test_what_is_public_has_an_example(name: str) -> None:
    assert ">>>" in (inspect.getdoc(getattr(cuvee, name)) or ""), name
