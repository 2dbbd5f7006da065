"""`WeightsName`: one name at a time, made in the background, and none in between."""

from __future__ import annotations

import logging
import os
import sys
import threading

import pytest

from cuvee.integrations.identity.weights_name import WeightsName


def test_the_same_text_again_is_another_name() -> None:
    weights = WeightsName(lambda stop: "a")
    first = weights.wait(60)
    assert first is not None
    weights.withdraw("of a test")
    assert weights.current is None and not weights.holds(first)
    again = weights.use("a")
    assert weights.holds(again) and not weights.holds(first) and again != first
    weights.make(lambda stop: "b")
    made = weights.wait(60)
    assert made is not None and made.text == "b" and not weights.holds(again)


def test_weights_that_cannot_be_named_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def make(stop: threading.Event) -> str:
        raise OSError("no such file")

    with caplog.at_level(logging.ERROR, "cuvee"):
        weights = WeightsName(make)
        assert weights.wait(60) is None
        assert weights.wait(60) is None
    (record,) = caplog.records
    assert "model_id" in record.message and "no such file" in record.message


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a priority belongs to a process")
def test_threads_that_read_give_way_once_the_engine_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, it waits for them. Names that are made later are made beside requests."""
    monkeypatch.setattr("cuvee.integrations.identity.weights_name.START_SECONDS", 0.0)
    begun, go, later = threading.Event(), threading.Event(), []
    usual = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def slow(stop: threading.Event) -> str:
        later.append(threading.get_native_id())
        begun.set()
        go.wait(60)
        return f"{os.getpriority(os.PRIO_PROCESS, threading.get_native_id())}"

    weights = WeightsName(slow)
    assert begun.wait(60) and os.getpriority(os.PRIO_PROCESS, later[0]) == usual
    weights.wait_at_start()
    go.set()
    named = weights.wait(60)
    assert named is not None and int(named.text) == max(usual, 10)
    weights.make(slow)
    named = weights.wait(60)
    assert named is not None and int(named.text) == max(usual, 10)
    weights.close()


def test_a_thread_that_is_about_to_run_lends_its_priority_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no number yet, and without one the calling thread is meant: the engine's."""
    starting, given = threading.Thread(name="cuvee-digest_0"), list[object]()
    weights = WeightsName(lambda stop: "a")
    assert weights.wait(60)
    monkeypatch.setattr(threading, "enumerate", lambda: [starting])
    monkeypatch.setattr("cuvee.integrations.identity.weights_name.give_way", lambda *of: given.append(of))
    weights.wait_at_start()
    assert not given
    weights.close()
