"""Compress the KV cache of a language model into small files and back, and compose cached pieces.

Everything public is imported on first use (PEP 562), so that `import cuvee` does not load torch:

    KVLayout, KVChunk   what a cache looks like, and a run of tokens of one
    PagedCache          where the pages of a serving engine's cache lie
    Profile             what was learned offline for one model
    Codec               encode a chunk to bytes, decode bytes to a chunk
    inspect             what a blob says about itself, without its profile
    CuveeError …        the errors raised on purpose
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cuvee.codec.chunk import KVChunk
    from cuvee.codec.codec import Codec
    from cuvee.codec.container import inspect
    from cuvee.codec.errors import (
        CorruptError,
        CuveeError,
        FormatError,
        InputError,
        KeyMismatch,
        OutOfMemory,
        ProfileError,
        ProfileMismatch,
        UnsupportedModel,
        VersionError,
    )
    from cuvee.codec.layout import KVLayout
    from cuvee.codec.paged import PagedCache
    from cuvee.codec.profile import Profile

    __version__: str

__all__ = [
    "Codec",
    "CorruptError",
    "CuveeError",
    "FormatError",
    "InputError",
    "KVChunk",
    "KVLayout",
    "KeyMismatch",
    "OutOfMemory",
    "PagedCache",
    "Profile",
    "ProfileError",
    "ProfileMismatch",
    "UnsupportedModel",
    "VersionError",
    "__version__",
    "inspect",
]

_HOME = {
    "Codec": "cuvee.codec.codec",
    "CorruptError": "cuvee.codec.errors",
    "CuveeError": "cuvee.codec.errors",
    "FormatError": "cuvee.codec.errors",
    "InputError": "cuvee.codec.errors",
    "KVChunk": "cuvee.codec.chunk",
    "KVLayout": "cuvee.codec.layout",
    "KeyMismatch": "cuvee.codec.errors",
    "OutOfMemory": "cuvee.codec.errors",
    "PagedCache": "cuvee.codec.paged",
    "Profile": "cuvee.codec.profile",
    "ProfileError": "cuvee.codec.errors",
    "ProfileMismatch": "cuvee.codec.errors",
    "UnsupportedModel": "cuvee.codec.errors",
    "VersionError": "cuvee.codec.errors",
    "inspect": "cuvee.codec.container",
}


# Hidden from type checkers: with a module-level __getattr__ they would accept any name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import a public name on first use and keep it.

        Raises:
            AttributeError: `name` is not public.
        """
        if name == "__version__":
            from importlib.metadata import PackageNotFoundError, version

            try:
                value: Any = version("cuvee")
            except PackageNotFoundError:  # a source tree on the path, not an installation
                value = "0+uninstalled"
        elif name in _HOME:
            value = getattr(import_module(_HOME[name]), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
