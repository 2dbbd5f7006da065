"""The errors cuvee raises on purpose: catch `CuveeError` and you have caught them all."""


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


class UnsupportedModel(CuveeError):
    """The model's attention or positions are of a kind that cuvee does not handle; refused by name."""
