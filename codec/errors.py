"""The exceptions that cuvee raises. `CuveeError` is their base.

A message names the argument, field or file first: `NAME: must …, got …`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar


class CuveeError(Exception):
    """Base of every exception that cuvee raises.

    Attributes:
        blames_blob: whether the blob is at fault. Every reader then fails under its key, so a cache may delete it.
            False: the fault lies with the request, the memory, the store or the configuration, and the blob may be
            sound. Every class sets it explicitly.
    """

    blames_blob: ClassVar[bool] = False


class FormatError(CuveeError):
    """The bytes are not a cuvee blob, or violate `codec/FORMAT.md`."""

    blames_blob = True


class VersionError(FormatError):
    """The blob or profile was written in a format version that this build does not read."""

    blames_blob = True


class CorruptError(FormatError):
    """A checksum or an authentication tag does not match: the bytes changed after they were written."""

    blames_blob = True


class ProfileMismatchError(CuveeError):
    """The blob belongs to another profile than the codec's, or the profile to another model."""

    blames_blob = False  # it is sound, and a reader with its profile decodes it


class ProfileError(CuveeError):
    """A profile cannot be built or loaded, or cannot do what was requested; the message gives the remedy."""

    blames_blob = False


class InputError(CuveeError, ValueError):
    """An argument has the wrong shape, dtype or range; the message names it and the remedy."""

    blames_blob = False


class KeyMismatchError(CuveeError):
    """The blob's authentication tag and the codec's keys do not match: the keys differ, or one side has none."""

    blames_blob = True  # a store's key names the secret


class UnsupportedModelError(CuveeError):
    """cuvee does not handle the model's kind of attention or positions; the message names it."""

    blames_blob = False


class OutOfMemoryError(CuveeError, MemoryError):
    """There is not enough memory on the CPU or the device; the message names the work."""

    blames_blob = False


# On a device torch raises torch.OutOfMemoryError. Elsewhere it is a RuntimeError, with one of these texts.
_ALLOCATION = (
    "can't allocate memory",
    "not enough memory",
    "Storage size calculation overflowed",
    "multiplication overflow",
)


@contextmanager
def allocations(what: str) -> Iterator[None]:
    """Turn failed allocations into `OutOfMemoryError`, whose message begins with `what`; let other errors pass."""
    try:
        yield
    except CuveeError:
        raise
    except MemoryError as error:
        raise OutOfMemoryError(f"{what}: not enough memory: {error}") from error
    except RuntimeError as error:
        text = str(error)
        if type(error).__name__ != "OutOfMemoryError" and not any(part in text for part in _ALLOCATION):
            raise
        raise OutOfMemoryError(f"{what}: not enough memory: {text.splitlines()[0]}") from error
