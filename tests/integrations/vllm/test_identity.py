"""Images and adapters by what they hold, not by what somebody calls them."""

from __future__ import annotations

import threading
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.integrations.vllm.sides import Desk, image, make_request
from tests.integrations.vllm.small_engine import SmallEngine
from tests.waiting import wait_until

from cuvee.integrations.identity import lora_files as adapters
from cuvee.integrations.vllm.scheduler import media_names
from cuvee.integrations.vllm.scheduler.media_names import MediaNames


def item(name: str = "x", embeds: Any = None, modality: str = "image", **fields: Any) -> SimpleNamespace:
    """vLLM's item with the processed data of its fields."""
    data = UserDict({key: SimpleNamespace(data=value) for key, value in fields.items()})
    place = SimpleNamespace(offset=0, length=4, is_embed=embeds)
    return SimpleNamespace(identifier=name, modality=modality, mm_position=place, data=data)


def test_an_image_is_named_by_what_the_encoder_gets() -> None:
    pixels, grid = torch.arange(6.0).view(2, 3), [2, 3]
    others = [
        item(pixels=pixels, grid=grid), item(pixels=pixels, grid=[3, 2]), item(pixels=pixels.view(3, 2), grid=grid),
        item(pixels=pixels.int(), grid=grid), item(pixels=pixels.bfloat16(), grid=grid), item(pixel=pixels, grid=grid),
        item(pixels=pixels.view(2, 3).flip(0), grid=grid), item(pixels=[pixels], grid=grid), item(pixels=pixels),
        item(pixels=pixels, grid=grid, modality="video"), item(pixels=pixels.numpy(), grid=grid),
        item(pixels=pixels, grid=[2, 3, None]), item(pixels=pixels, grid=[2.0, 3]), item(pixels=pixels, grid=[True, 3]),
        item(pixels=pixels, grid={"h": 2, "w": 3}), item(pixels=pixels, grid=["2", "3"]), item(pixels=torch.empty(0)),
        item(embeds=torch.tensor([True, False]), pixels=pixels, grid=grid),
        item(pixels=pixels, grid=[b"2", np.int64(3)]),
    ]  # fmt: skip
    found = [MediaNames().name(each) for each in others]
    assert all(found) and len(set(found)) == len(found)
    copy = item("another name", pixels=torch.stack([pixels, pixels], -1)[..., 0], grid=list(grid))
    assert MediaNames().name(copy) == found[0], "strides are not content"


@pytest.mark.parametrize("data", [None, "text", {"pixels": SimpleNamespace(data=object())}])
def test_an_image_whose_content_is_not_here_has_no_name(data: Any) -> None:
    unknown = item(pixels=torch.ones(3))
    unknown.data = data
    assert MediaNames().name(unknown) == ""
    assert MediaNames().name(item(address=1, monotonic_id=2, signature=[3])) == "", "it is in shared memory"


def test_a_name_that_stood_for_two_images_is_not_trusted_again() -> None:
    """vLLM may use what it computed from the one for the other."""
    names, cat, dog = MediaNames(), item("mine", pixels=torch.zeros(3)), item("mine", pixels=torch.ones(3))
    first = names.name(cat)
    assert first and names.name(cat) == first
    assert names.name(dog) == "" and names.name(cat) == ""
    assert names.name(item("yours", pixels=torch.ones(3)))


def test_an_image_that_is_repeated_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    real = media_names._hexdigest

    def counted(value: Any) -> str:
        read.append(value)
        return real(value)

    monkeypatch.setattr(media_names, "_hexdigest", counted)
    names, cat = MediaNames(), item(pixels=torch.zeros(3))
    assert len({names.name(cat) for _ in range(3)}) == len(read) == 1
    del cat, read[:]
    assert names._digests == {}, "as long as vLLM holds it"


def test_few_names_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_names, "_MOST_NAMES", 3)
    names = MediaNames()
    for number in range(9):
        names.name(item(f"{number}", pixels=torch.zeros(3)))
    assert list(names._by_name) == ["6", "7", "8"]


# Requests ------------------------------------------------------------------------------------------------------------


def stored(d: Desk, request: Any) -> set[bytes]:
    """The digests of what a request would store."""
    d.matched(request)
    return {save.entry.digest for save in d.plan((request, 0, request.num_prompt_tokens)).saves}


def test_names_that_count_are_in_no_key(desk: Callable[..., Desk]) -> None:
    """Each process of vLLM begins with `renderer0-mm-1-image-0` when its caches are off."""
    cat, dog = (stored(desk(), make_request(mm_features=[image("1", content=each)])) for each in ("cat", "dog"))
    again = stored(desk(), make_request(mm_features=[image("2", content="cat")]))
    assert cat and cat == again and not cat & dog


def test_a_client_that_reuses_a_name_is_not_cached(desk: Callable[..., Desk], caplog: pytest.LogCaptureFixture) -> None:
    d = desk()
    assert stored(d, make_request("a", mm_features=[image("mine", content="cat")]))
    for name, content in (("b", "dog"), ("c", "cat")):
        assert not stored(d, make_request(name, mm_features=[image("mine", content=content)]))
    assert d.recorder.totals()["uncached", "media"] == 2
    assert caplog.text.count("a client gave two images one name") == 1


@pytest.mark.parametrize("why", [{"prompt_embeds": "tensor"}, {"resumable": True}, {"cache_salt": 7}])
def test_names_of_requests_that_are_not_cached_count_as_well(desk: Callable[..., Desk], why: dict[str, Any]) -> None:
    """vLLM keeps what it computed for them, too."""
    d = desk()
    d.matched(make_request("a", mm_features=[image("mine", content="cat")], **why))
    assert not stored(d, make_request("b", mm_features=[image("mine", content="dog")]))


def test_what_another_engine_encoded_is_not_known(desk: Callable[..., Desk]) -> None:
    d = desk()
    d.side._state.encodes = False
    assert not stored(d, make_request("a", mm_features=[image()])) and stored(d, make_request("b"))


# Adapters ------------------------------------------------------------------------------------------------------------


def adapter(folder: Path, seed: int) -> SimpleNamespace:
    """A request's adapter, whose files are put into a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.bin").unlink(missing_ok=True)
    (folder / "adapter_model.bin").write_bytes(bytes([seed]) * 64)
    return SimpleNamespace(lora_int_id=1, lora_name="x", lora_path=str(folder))


IDS = [3 * at % 53 for at in range(40)]


def test_an_adapter_that_changes_before_its_first_step_is_not_stored(
    engine: Callable[..., SmallEngine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine reads its weights in that step; the request was named before."""
    e = engine()
    request = e.submit("r", IDS, lora_request=adapter(tmp_path / "a", 1))
    wait_until(lambda: e.side._requests.is_named(e.side._records.of(request)), "the request is named")
    adapter(tmp_path / "a", 2)
    e.submit("s", IDS)
    e.run()
    assert sorted(e.done) == ["r", "s"]
    alone = engine()
    alone.submit("s", IDS)
    alone.run()
    assert e.store.entries.keys() == alone.store.entries.keys()
    assert f"the files in {tmp_path / 'a'} have changed" in caplog.text
    e.submit("t", IDS, lora_request=adapter(tmp_path / "a", 2))
    e.run()
    assert e.recorder.totals()["uncached", "adapter"] == 1, "nobody knows which weights the engine has"


def test_an_adapter_that_is_loaded_anew_while_its_request_is_named(
    engine: Callable[..., SmallEngine], tmp_path: Path
) -> None:
    e, folder = engine(), tmp_path / "a"
    request = e.submit("r", IDS, lora_request=adapter(folder, 1))
    wait_until(lambda: e.side._requests.is_named(e.side._records.of(request)), "the request is named")
    with e.side._requests._adapters.loading(1, str(folder), again=True):
        pass
    e.run()
    assert e.recorder.totals()["uncached", "adapter"] == 1 and not e.store.entries


def test_an_adapter_that_is_dropped_while_its_request_is_named(
    engine: Callable[..., SmallEngine], tmp_path: Path
) -> None:
    """The engine reads its old weights in that request's first step; the next request finds other files."""
    e = engine()
    request = e.submit("r", IDS, lora_request=adapter(tmp_path / "a", 1))
    wait_until(lambda: e.side._requests.is_named(e.side._records.of(request)), "the request is named")
    e.side._requests._adapters.unloaded(1)
    e.run()
    e.submit("s", IDS, lora_request=adapter(tmp_path / "a", 2))
    e.run()
    assert e.recorder.totals()["uncached", "adapter"] == 2 and not e.store.entries


def test_the_adapter_of_requests_that_wait_together_is_looked_at_once(
    engine: Callable[..., SmallEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    e, go, looked, signature = engine(), threading.Event(), list[str](), adapters._signature
    tuned = adapter(tmp_path / "a", 1)

    def noting(path: str) -> Any:
        looked.append(path)
        return signature(path)

    monkeypatch.setattr(adapters, "_signature", noting)

    def submitted(name: str, count: int) -> int:
        """How often the adapter's files are looked at for so many requests."""
        looked.clear()
        blocked = e.side._requests._thread.submit(go.wait)
        waiting = [e.submit(f"{name}{number}", IDS, lora_request=tuned) for number in range(count)]
        go.set()
        blocked.result()
        records = [e.side._records.of(request) for request in waiting]
        wait_until(lambda: all(map(e.side._requests.is_named, records)), "the requests are named")
        go.clear()
        return len(looked)

    alone = [submitted("first", 1), submitted("later", 1)]
    assert [submitted("several", 8), submitted("again", 8)] == [alone[1]] * 2 and 0 < alone[1] <= alone[0]
    adapter(tmp_path / "a", 2)
    submitted("changed", 8)
    e.run()
    assert e.recorder.totals()["uncached", "adapter"] == 8


def test_an_adapter_that_is_not_named_in_time(engine: Callable[..., SmallEngine], tmp_path: Path) -> None:
    """The engine has its old weights when the next request finds other files."""
    e, read = engine(), threading.Event()
    requests = e.side._requests
    blocked = requests._thread.submit(read.wait)  # what a disk that hangs does
    request = e.submit("r", IDS, lora_request=adapter(tmp_path / "a", 1))
    record = e.side._records.of(request)
    assert record.naming is not None
    record.naming = record.naming._replace(begun=record.naming.begun - 2 * requests._state.options.lookup_timeout)
    assert requests.is_named(record)
    e.run()
    read.set()
    blocked.result()
    e.submit("s", IDS, lora_request=adapter(tmp_path / "a", 2))
    e.run()
    assert e.recorder.totals()["uncached", "adapter"] == 2 and not e.store.entries


def test_an_adapter_that_stays_the_same_is_cached(engine: Callable[..., SmallEngine], tmp_path: Path) -> None:
    e = engine()
    tuned = adapter(tmp_path / "a", 1)
    e.submit("r", IDS, lora_request=tuned)
    e.run()
    e.submit("again", [*IDS, 1], lora_request=tuned)
    e.submit("without", [*IDS, 1])
    e.run()
    assert sum(value for (name, _), value in e.recorder.totals().items() if name == "load_seconds") == 1
