"""Values of an engine's options: their defaults, and JSON that stands for them in every process."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import torch

from cuvee.codec.models.fingerprint import VOLATILE

LEFT_OUT = object()
"""Stands for a default that there is not, and for a value that does not count."""


class UnstableError(Exception):
    """What a value is that processes write differently."""


def is_record(value: Any) -> bool:
    """Return whether a value is an object whose fields are options; transformers' configurations are written whole."""
    return not isinstance(value, type) and not hasattr(value, "to_dict") and (
        dataclasses.is_dataclass(value) or hasattr(value, "__struct_fields__")
    )  # fmt: skip


def fields_of(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and default of each field; LEFT_OUT: it has none."""
    if dataclasses.is_dataclass(config):
        fields: Any = dataclasses.fields(config)
    else:
        import msgspec

        fields = msgspec.structs.fields(config)
    for field in fields:
        value, factory = field.default, field.default_factory
        if hasattr(value, "get_default"):  # pydantic's description of a field
            value, factory = value.default, value.default_factory
        if callable(factory) and not _is_nothing(factory):
            value = factory()
        yield field.name, LEFT_OUT if _is_nothing(value) else value


def _is_nothing(value: Any) -> bool:
    """Return whether a value says that there is none, in dataclasses, pydantic or msgspec."""
    return value is dataclasses.MISSING or type(value).__name__ in ("PydanticUndefinedType", "NoDefaultType")


def plain_json(value: Any) -> Any:
    """Return JSON that stands for a value in every process.

    Raises:
        UnstableError: there is none.
    """
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, torch.dtype | PurePath):
        return str(value)
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if hasattr(value, "to_dict"):
        return plain_json(value.to_dict())
    if isinstance(value, Mapping):
        kept = {key: each for key, each in value.items() if key not in VOLATILE}
        return {
            key if isinstance(key, str) else canonical_text([plain_json(key)]): plain_json(each)
            for key, each in kept.items()
        }
    if isinstance(value, set | frozenset):
        return {"set": sorted((plain_json(each) for each in value), key=canonical_text)}
    if isinstance(value, list | tuple):
        return [plain_json(each) for each in value]
    if is_record(value):
        return {name: plain_json(getattr(value, name)) for name, _ in fields_of(value)}
    raise UnstableError("a function" if callable(value) else f"an object of type {type(value).__name__}")


def canonical_text(plain: Any) -> str:
    """Return JSON in one spelling."""
    return json.dumps(plain, sort_keys=True)
