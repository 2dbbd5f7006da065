"""What SGLang's adapters are told in its JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cuvee.integrations.options import CodingOptions


@dataclass(frozen=True, slots=True, repr=False)
class HiCacheOptions(CodingOptions):
    """Options of the storage backend, by the names of the JSON that sets them: those of `CodingOptions`, and its own.

    Attributes:
        model: folder or hub id of the checkpoint; default: SGLang's `--model-path`.
    """

    SOURCE: ClassVar[str] = "hicache-storage-backend-extra-config"

    model: str | None = None

    def __post_init__(self) -> None:
        CodingOptions.__post_init__(self)  # `super()` does not know a class with slots
        self._check_texts("model")


@dataclass(frozen=True, slots=True, repr=False)
class LinkerOptions(HiCacheOptions):
    """Options of the external linker: those of the storage backend, and its own.

    Attributes:
        lookup_timeout: seconds that SGLang's scheduler waits for a lookup. All requests wait meanwhile. What takes
            longer is found if SGLang asks again. The store may take `load_timeout`.
        held_gb: 10^9 bytes of uncompressed pages whose entries are kept between SGLang's lookup and its load.
    """

    SOURCE: ClassVar[str] = "linker_extra_config"

    lookup_timeout: float = 0.05
    held_gb: float = 8.0

    def __post_init__(self) -> None:
        HiCacheOptions.__post_init__(self)
        self._check_positive("held_gb")
