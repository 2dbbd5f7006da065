"""Why nothing of a request was loaded, or only a part: for its client, and for the log."""

from __future__ import annotations

from typing import Any

from cuvee.integrations.vllm.decision import Verdict
from cuvee.integrations.vllm.phases import RequestPhase
from cuvee.integrations.vllm.scheduler.request_record import RequestRecord
from cuvee.integrations.vllm.scheduler.state import SchedulerState

REASONS = {
    "hit": "all that can be loaded was found",
    "absent": "nothing was found under this cache salt{adapter} for these tokens and this engine's identity; a tier "
    "that is down counts as empty",
    "below_chunk": "the prompt is shorter than a chunk: it is found only up to where a stored prompt or answer ends, "
    "and none does within it{adapter}; a tier that is down counts as empty",
    "partial": "the entry that begins at token {missing} was not found{adapter}; a tier that is down counts as empty",
    "storing": "the entry that begins at token {missing} is being stored, or was dropped a moment ago",
    "declined": "loading what was found takes longer than computing it, by what both took before",
    "queued": "other loads were before it for as long as computing takes",
    "deadline": "the deadline left no time to load more",
    "timeout": "the store did not answer within lookup_timeout",
    "failed": "the load failed, so its tokens were computed{cause}",
    "short": "fewer tokens than min_tokens can be loaded",
    "engine": "the engine has the tokens in its own cache",
    "unread": "the request or the engine reads no cache (prompt_logprobs, kv_role)",
    "unnamed": "the weights had no name yet: the checkpoint was still being read",
    "uncached": "the request is not cached: {refused}",
}
"""What each `reason` means. It is never said whether another tenant has the tokens: that would tell what others ask."""

_BLENDED = "; this is about the exact prefix, and not about what was blended behind it"
_VERDICTS = {Verdict.SLOW: "declined", Verdict.WAITED: "queued"}


def explanation(record: RequestRecord, state: SchedulerState) -> dict[str, Any]:
    """Return what was found of a request, as JSON.

    Returns:
        `reason`: a key of `REASONS`, and `text`: what it means; `prompt_tokens`; `found_tokens`, in the store, and
        `loaded_tokens` of them; `missing_from`: position of the first token that the store does not have, -1 if it was
        not asked, or has all.
    """
    reason = _reason(record, state)
    asked = record.learned is not None
    missing = record.found.chunks * state.chunk + record.found.tail if asked else -1
    if reason == "hit":
        missing = -1
    blended = record.segmented is not None and record.segmented.outcome["blended"]
    adapter = " with this adapter" if record.adapter is not None else ""
    return {
        "reason": reason,
        "text": REASONS[reason].format(
            missing=missing, adapter=adapter, refused=record.refused, cause=f": {record.cause}" if record.cause else ""
        )
        + _BLENDED * blended,
        "prompt_tokens": record.request.num_prompt_tokens,
        "found_tokens": record.end,
        "loaded_tokens": record.given,
        "missing_from": missing,
    }


def _reason(record: RequestRecord, state: SchedulerState) -> str:
    usable = state.usable(record.request.num_prompt_tokens)
    if record.phase is RequestPhase.EARLY:
        return "unnamed"
    if record.refused:
        return "uncached"
    if not state.loads or record.request.skip_reading_prefix_cache:
        return "unread"
    if record.cut:
        return record.cut
    if record.lookup is not None and record.lookup.timed_out:
        return "timeout"
    if record.verdict in _VERDICTS and not record.given:
        return _VERDICTS[record.verdict]
    if record.learned is None:
        return "short" if usable < state.options.least_tokens else "engine"
    if record.end >= usable:
        return "hit" if record.given else "engine"
    if record.awaited:
        return "storing"
    if record.end:
        return "partial"
    return "absent" if state.whole(record.request.num_prompt_tokens) else "below_chunk"
