"""The errors cuvee raises on purpose: catch `CuveeError` and you have caught them all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class CuveeError(Exception):
    """Base of every error that cuvee raises on purpose."""


class FormatError(CuveeError):
    """The bytes are not a cuvee blob, or break a rule of `codec/FORMAT.md`."""


class VersionError(FormatError):
    """The blob or profile was written by a format version this build does not read."""


class CorruptError(FormatError):
    """A checksum or an authentication tag does not match: the bytes changed after they were written."""


class ProfileMismatch(CuveeError):
    """The blob names another profile, or the profile belongs to another model, than the one at hand."""


class ProfileError(CuveeError):
    """A profile cannot be built, loaded or asked for what was asked (the message says what it needs)."""


class InputError(CuveeError, ValueError):
    """An argument has the wrong shape, dtype or range; the message names it and the remedy."""


class KeyMismatch(InputError):
    """The blob's authentication tag and the codec's keys do not go together: another key, or none on one side."""


class UnsupportedModel(CuveeError):
    """The model's attention or positions are of a kind that cuvee does not handle; refused by name."""


class OutOfMemory(CuveeError, MemoryError):
    """There is not enough memory, on the CPU or the device, for what was asked; the message says what it was."""


# How torch says it: torch.OutOfMemoryError on a device, a RuntimeError of its allocator or of its arithmetic elsewhere.
_ALLOCATION = (
    "can't allocate memory",
    "not enough memory",
    "Storage size calculation overflowed",
    "multiplication overflow",
)


@contextmanager
def allocations(what: str) -> Iterator[None]:
    """Turn failures to allocate into `OutOfMemory`; `what` was asked for. Other errors pass as they are."""
    try:
        yield
    except CuveeError:
        raise
    except MemoryError as error:
        raise OutOfMemory(f"{what}: not enough memory: {error}") from error
    except RuntimeError as error:
        text = str(error)
        if type(error).__name__ != "OutOfMemoryError" and not any(part in text for part in _ALLOCATION):
            raise
        raise OutOfMemory(f"{what}: not enough memory: {text.splitlines()[0]}") from error
