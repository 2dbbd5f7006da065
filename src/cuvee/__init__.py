"""Compress the KV cache of a language model into small files and back, and compose cached pieces.

Everything public is imported on first use (PEP 562), so that `import cuvee` does not load torch:

    KVLayout, LayerLayout, Rope   the shape of a cache
    KVChunk                       a run of tokens of a cache
    NO_TOKEN                      the id of a token that has none, such as a part of an image
    PagedCache, PagedChunks       the pages of a serving engine's cache; chunks that lie there
    calibrate, fit, measure       learn a profile of a model; measure it on other text
    Profile                       the learned bases, tables and measurements
    Codec, Quality, OpenBlob      encode chunks to blobs and decode blobs; what to ask for; a verified blob
    encode_cache, decode_cache    encode a transformers cache to a list of blobs, and back (with `cuvee[transformers]`)
    save_cache, load_cache        save a transformers cache, uncompressed, to a file that `cuvee encode` reads, and back
    inspect, BlobInfo             read a blob's header, without its profile
    CuveeError …                  the errors raised on purpose
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cuvee.codec.chunk import KVChunk
    from cuvee.codec.codec import Codec
    from cuvee.codec.coding.open_blob import OpenBlob
    from cuvee.codec.errors import (
        CorruptError,
        CuveeError,
        FormatError,
        InputError,
        KeyMismatchError,
        OutOfMemoryError,
        ProfileError,
        ProfileMismatchError,
        UnsupportedModelError,
        VersionError,
    )
    from cuvee.codec.format.container import BlobInfo, inspect
    from cuvee.codec.layout import KVLayout, LayerLayout, Rope
    from cuvee.codec.paged import PagedCache
    from cuvee.codec.paged_chunks import PagedChunks
    from cuvee.codec.profiles.profile import Profile
    from cuvee.codec.profiles.quality import Quality
    from cuvee.codec.token_ids import NO_TOKEN
    from cuvee.integrations.transformers.caches import decode_cache, encode_cache, load_cache, save_cache
    from cuvee.learning.calibrate import calibrate, fit
    from cuvee.learning.curve import measure

    __version__: str

__all__ = [
    "NO_TOKEN",
    "BlobInfo",
    "Codec",
    "CorruptError",
    "CuveeError",
    "FormatError",
    "InputError",
    "KVChunk",
    "KVLayout",
    "KeyMismatchError",
    "LayerLayout",
    "OpenBlob",
    "OutOfMemoryError",
    "PagedCache",
    "PagedChunks",
    "Profile",
    "ProfileError",
    "ProfileMismatchError",
    "Quality",
    "Rope",
    "UnsupportedModelError",
    "VersionError",
    "__version__",
    "calibrate",
    "decode_cache",
    "encode_cache",
    "fit",
    "inspect",
    "load_cache",
    "measure",
    "save_cache",
]

# The public names of each module.
_NAMES = {
    "codec.chunk": "KVChunk",
    "codec.codec": "Codec",
    "codec.errors": (
        "CorruptError CuveeError FormatError InputError KeyMismatchError "
        "OutOfMemoryError ProfileError ProfileMismatchError UnsupportedModelError VersionError"
    ),
    "codec.format.container": "BlobInfo inspect",
    "codec.layout": "KVLayout LayerLayout Rope",
    "learning.calibrate": "calibrate fit",
    "learning.curve": "measure",
    "codec.coding.open_blob": "OpenBlob",
    "codec.paged": "PagedCache",
    "codec.paged_chunks": "PagedChunks",
    "codec.profiles.profile": "Profile",
    "codec.profiles.quality": "Quality",
    "codec.token_ids": "NO_TOKEN",
    "integrations.transformers.caches": "decode_cache encode_cache load_cache save_cache",
}
_HOME = {name: f"cuvee.{module}" for module, names in _NAMES.items() for name in names.split()}


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
            try:
                module = import_module(_HOME[name])
            except ModuleNotFoundError as error:
                if error.name != "transformers":
                    raise
                raise ImportError(f"cuvee.{name} needs transformers: pip install 'cuvee[transformers]'") from error
            value = getattr(module, name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
