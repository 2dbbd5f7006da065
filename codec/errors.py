"""The errors that cuvee raises on purpose. `CuveeError` is the base of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class CuveeError(Exception):
    """Base of every error that cuvee raises on purpose."""


class FormatError(CuveeError):
    """The bytes are not a cuvee blob, or break a rule of `codec/FORMAT.md`."""


class VersionError(FormatError):
    """The blob or profile was written in a format version that this build does not read."""


class CorruptError(FormatError):
    """A checksum or an authentication tag does not match: the bytes changed after they were written."""


class ProfileMismatch(CuveeError):
    """The blob belongs to another profile than the one at hand, or the profile to another model."""


class ProfileError(CuveeError):
    """A profile cannot be built or loaded, or cannot do what was asked; the message says what it takes."""


class InputError(CuveeError, ValueError):
    """An argument has the wrong shape, dtype or range; the message names it and the remedy."""


class KeyMismatch(InputError):
    """The blob's authentication tag and the codec's keys do not match: the keys differ, or one side has none."""


class UnsupportedModel(CuveeError):
    """The model's attention or positions are of a kind that cuvee does not handle; the message names it."""


class OutOfMemory(CuveeError, MemoryError):
    """There is not enough memory, on the CPU or the device, for what was asked; the message says for what."""


# On a device torch raises torch.OutOfMemoryError. Elsewhere it is a RuntimeError, with one of these texts.
_ALLOCATION = (
    "can't allocate memory",
    "not enough memory",
    "Storage size calculation overflowed",
    "multiplication overflow",
)


@contextmanager
def allocations(what: str) -> Iterator[None]:
    """Turn failures to allocate into `OutOfMemory`, whose message begins with `what`. Other errors pass unchanged."""
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
