"""`TierOptions`: the options of the tier, in vLLM's list `secondary_tiers`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cuvee.integrations.options import CodingOptions, limited


@dataclass(frozen=True, slots=True, repr=False)
class TierOptions(CodingOptions):
    """Options of the tier, by the names of the JSON that sets them: those of `CodingOptions`, and its own.

    Attributes:
        model: folder or hub id of the served checkpoint; default: the model that vLLM serves.
        locality: "LOCAL" or "REMOTE", for vLLM's filter of tiers and back-pressure; default: as the store's URL tells.
        max_pending_gb: budget for chunks that wait to be stored, in 10^9 bytes; vLLM keeps them in its host memory
            meanwhile, and beyond it chunks are not stored.
        load_timeout: seconds that the store may take for anything but a lookup, and after which what a job has not
            begun is given up.

    Raises:
        InputError: a value of the wrong type or range.

    Example:
        >>> TierOptions.from_dict({"store": "file:///var/cache/kv?max_gb=200"}).local
        True
    """

    SOURCE: ClassVar[str] = "secondary_tiers"

    model: str | None = None
    locality: str | None = limited(None, choices=("LOCAL", "REMOTE"))
    max_pending_gb: float = 2.2
