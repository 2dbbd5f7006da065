"""Images and adapters by what they hold, not by what somebody calls them, as `test_engine_images` shows of images."""

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


# Requests ------------------------------------------------------------------------------------------------------------


def stored(d: Desk, request: Any) -> set[bytes]:
    """The digests of what a request would store."""
    d.matched(request)
    return {save.entry.digest for save in d.plan((request, 0, request.num_prompt_tokens)).saves}


@pytest.mark.parametrize("why", [{"resumable": True}, {"cache_salt": 7}])
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
    (folder / "new").write_bytes(bytes([seed]) * 64)
    (folder / "new").replace(folder / "adapter_model.bin")  # of another inode, if within a clock's tick
    return SimpleNamespace(lora_int_id=1, lora_name="x", lora_path=str(folder))


IDS = [3 * at % 53 for at in range(40)]


@pytest.mark.parametrize("how", ["its files change", "it is loaded anew", "it is dropped", "its disk hangs"])
def test_an_adapter_that_changes_after_its_request_was_named_is_not_stored(
    engine: Callable[..., SmallEngine], tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """The engine reads its weights in the request's first step, or has its old ones when the next request finds other
    files.
    """
    e, read = engine(), threading.Event()
    requests = e.side._requests
    before = requests._thread.submit(read.wait)  # whoever arrives has no name at once
    request = e.submit("r", IDS, lora_request=adapter(tmp_path / "a", 1))
    record = e.side._records.of(request)
    if how == "its disk hangs":
        assert record.naming is not None
        record.naming = record.naming._replace(begun=record.naming.begun - 2 * requests._state.options.lookup_timeout)
    else:
        read.set()
    wait_until(lambda: requests.is_named(record), "the request is named, or late")
    if how == "its files change":
        adapter(tmp_path / "a", 2)
    elif how == "it is loaded anew":
        with requests._adapters.loading(1, str(tmp_path / "a"), again=True):
            pass
    elif how == "it is dropped":
        requests._adapters.unloaded(1)
    e.run()
    read.set()
    before.result()
    e.submit("s", IDS, lora_request=adapter(tmp_path / "a", 2))
    e.run()
    assert sorted(e.done) == ["r", "s"] and not e.store.entries
    changes = how == "its files change"
    assert (f"the files in {tmp_path / 'a'} have changed" in caplog.text) == changes
    assert e.recorder.totals()["uncached", "adapter"] == 2 - changes, "nobody knows which weights the engine has"


def test_an_adapter_that_stays_the_same_is_cached(engine: Callable[..., SmallEngine], tmp_path: Path) -> None:
    e = engine()
    tuned = adapter(tmp_path / "a", 1)
    e.submit("r", IDS, lora_request=tuned)
    e.run()
    e.submit("again", [*IDS, 1], lora_request=tuned)
    e.submit("without", [*IDS, 1])
    e.run()
    assert sum(value for (name, _), value in e.recorder.totals().items() if name == "load_seconds") == 1
