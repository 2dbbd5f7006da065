"""Blends in the scheduler: placed by every rank, then recomputed by all ranks in the same steps."""

from __future__ import annotations

from collections.abc import Sequence

from cuvee.integrations.vllm.blending.planning import least_slice
from cuvee.integrations.vllm.messages import Report
from cuvee.integrations.vllm.phases import RequestPhase
from cuvee.integrations.vllm.scheduler.request_record import RequestRecord, RequestTable


class SchedulerBlends:
    """Keeps account of the blends that ranks have or get.

    Args:
        records: of all requests.
        shards: ranks that have to place the segments of each.
        step_tokens: most tokens that a step of the engine computes.
    """

    def __init__(self, records: RequestTable, shards: int, step_tokens: int) -> None:
        self._records = records
        self._shards = shards
        self._step_tokens = step_tokens
        self._ready: list[RequestRecord] = []  # in the order in which all ranks had placed them
        self._drops: list[str] = []

    def ready(self) -> list[str]:
        """Return the requests to recompute in the next step: all ranks can, or have begun to."""
        self._ready = [record for record in self._ready if record.phase is RequestPhase.PLACED]
        return [record.id for record in self._ready]

    def budget(self, scheduled: int) -> int:
        """Return the number of tokens that blends may compute in a step for which the engine has scheduled some itself.

        Blends get the rest of a step, and a share even of a full step: otherwise they would never end on a busy engine.
        """
        return max(self._step_tokens - scheduled, least_slice(self._step_tokens))

    def take_drops(self) -> list[str]:
        """Return and forget the blends that the workers have to give up."""
        drops, self._drops = self._drops, []
        return drops

    def take(self, report: Report) -> None:
        """Note which blends are placed."""
        for request_id in report.placed:
            record = self._records.get(request_id)
            if record is None or record.phase is not RequestPhase.LOADING:  # it has ended, or another rank failed
                self._drops.append(request_id)
                continue
            record.placed += 1
            if record.placed == self._shards:
                self._records.enter(record, RequestPhase.PLACED)
                self._ready.append(record)

    def drop(self, record: RequestRecord) -> None:
        """Do not finish a blend that is under way: ranks that wait with it give it up."""
        if record.placed:
            record.placed = 0
            self._records.load_no_more(record)
            self._drops.append(record.id)

    def drop_all(self, request_ids: Sequence[str]) -> None:
        """Finish none of these blends, whatever is known of them."""
        for request_id in request_ids:
            record = self._records.get(request_id)
            if record is not None:
                record.placed = 0
                self._records.load_no_more(record)
        self._drops += request_ids
