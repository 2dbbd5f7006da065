"""What a request asks of its load: a time by which its first token is due, and a floor of quality."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from cuvee.codec.errors import InputError
from cuvee.integrations.vllm.request_params import PARAMETERS, request_fields, shown

MOST_MS = 3_600_000  # a later deadline is none
MOST_KL = 100.0


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """What is asked of a load.

    Attributes:
        deadline: seconds from a request's arrival to its first token; None: whenever it comes.
        kl_max: nats per token that what is loaded may lose in the mean, tokens that are computed instead counting as 0;
            None: whatever the store's parts lose.
    """

    deadline: float | None = None
    kl_max: float | None = None

    def __bool__(self) -> bool:
        return self.deadline is not None or self.kl_max is not None

    @classmethod
    def read(cls, source: str, deadline_ms: Any, kl_max: Any) -> LoadTarget:
        """Return the target of two values of JSON; None: not given.

        Args:
            source: what stands in front of the names in messages, with its dot.
            deadline_ms: milliseconds.
            kl_max: nats per token; 0: nothing that is lossy is loaded.

        Raises:
            InputError: a value of the wrong type or range.
        """
        if deadline_ms is not None and not (_is_number(deadline_ms) and 0 < deadline_ms <= MOST_MS):
            raise InputError(
                f"{source}deadline_ms: must be milliseconds, above 0 and at most {MOST_MS}, got {shown(deadline_ms)}"
            )
        if kl_max is not None and not (_is_number(kl_max) and 0 <= kl_max <= MOST_KL):
            raise InputError(f"{source}kl_max: must be nats per token, from 0 to {MOST_KL:g}, got {shown(kl_max)}")
        return cls(None if deadline_ms is None else float(deadline_ms) / 1e3, None if kl_max is None else float(kl_max))

    def of_request(self, params: Any) -> LoadTarget:
        """Return the target of a request: this one, the engine's, where `kv_transfer_params` do not name another.

        A field that is `null` asks for no deadline, or for no floor.

        Raises:
            InputError: an unknown field, or a value of the wrong type or range.
        """
        fields = request_fields(params) or {}
        asked = self.read(f"{PARAMETERS}.", fields.get("deadline_ms"), fields.get("kl_max"))
        return LoadTarget(
            asked.deadline if "deadline_ms" in fields else self.deadline,
            asked.kl_max if "kl_max" in fields else self.kl_max,
        )


@dataclass(slots=True)
class Targeted:
    """A request's target, and what became of it.

    Attributes:
        target: what it asked for.
        arrived: when it arrived, on the clock of the scheduler's side.
        step: the step of the engine that computes its first token; 0: it is to come.
        first_token: seconds from its arrival to its first token; None: it is to come.
    """

    target: LoadTarget
    arrived: float
    step: int = 0
    first_token: float | None = None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and not (isinstance(value, float) and math.isnan(value))
