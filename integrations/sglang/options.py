"""What `CuveeHiCache` is told in SGLang's JSON."""

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
