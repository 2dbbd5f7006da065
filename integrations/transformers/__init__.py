"""Caches of transformers: coded, decoded, and kept in files. `caches` is the way in."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cuvee.integrations.transformers.caches import (
        chunks_from_cache,
        decode_cache,
        encode_cache,
        load_cache,
        save_cache,
    )

__all__ = ["chunks_from_cache", "decode_cache", "encode_cache", "load_cache", "save_cache"]

# Imported on first use: files of caches are read and written without transformers. Hidden from type checkers: they
# would accept any name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from cuvee.integrations.transformers import caches

        return getattr(caches, name)
