"""The streams and events that stand for a GPU's in tests of vLLM's offloading."""

from __future__ import annotations

import threading

from tests.integrations.vllm_tier.cpu_copies import Event, Stream
from tests.waiting import PATIENCE, wait_until


def test_a_stream_waits_for_an_event_as_it_was_when_told_to() -> None:
    """vLLM records an event again once its transfer has ended, though a stream that waited for it may not have looked
    yet. The new transfer waits for that stream, which would wait for the new one.
    """
    busy = threading.Event()
    late, other, first, end, again = Stream(), Stream(), Event(True), Event(True), Event(True)
    late.enqueue(lambda: busy.wait(PATIENCE))
    first.record(other)
    late.wait_event(first)
    end.record(late)
    wait_until(first.query, "the first transfer has ended")
    other.wait_event(end)
    first.record(other)
    again.record(other)
    busy.set()
    wait_until(again.query, "both streams go on")
