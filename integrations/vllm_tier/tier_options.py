"""`TierOptions`: what the tier is told in vLLM's list `secondary_tiers`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cuvee.codec.errors import InputError
from cuvee.integrations.options import CodingOptions

LOCALITIES = ("LOCAL", "REMOTE")


@dataclass(frozen=True, slots=True, repr=False)
class TierOptions(CodingOptions):
    """Options of the tier, by the names of the JSON that sets them: those of `CodingOptions`, and its own.

    Attributes:
        model: folder or hub id of the served checkpoint; default: the model that vLLM serves.
        locality: "LOCAL" or "REMOTE", for vLLM's events and back-pressure; default: as the store's URL tells.
        enable_kv_events: tell vLLM's KV events which chunks were stored.
        max_waiting: with so many chunks waiting to be stored, which vLLM keeps in host memory meanwhile, no more are
            accepted.
        waiting_timeout: seconds after which what a job has not begun is given up.
        lookup_timeout: seconds that a lookup may take.
        load_timeout: seconds that the store may take for anything else.

    Raises:
        InputError: a value of the wrong type or range.

    Example:
        >>> TierOptions.from_dict({"store": "file:///var/cache/kv?max_gb=200"}).local
        True
    """

    SOURCE: ClassVar[str] = "secondary_tiers"

    model: str | None = None
    locality: str | None = None
    enable_kv_events: bool = False
    max_waiting: int = 1024
    waiting_timeout: float = 60.0
    lookup_timeout: float = 2.0
    load_timeout: float = 30.0

    def __post_init__(self) -> None:
        CodingOptions.__post_init__(self)  # `super()` does not know a class with slots
        self._check_texts("model")
        self._check_switches("enable_kv_events")
        self._check_counts("max_waiting")
        self._check_positive("waiting_timeout", "lookup_timeout", "load_timeout")
        if self.locality is not None and self.locality not in LOCALITIES:
            raise InputError(f"locality: must be {' or '.join(LOCALITIES)}, or left out, got {self.locality!r}")
