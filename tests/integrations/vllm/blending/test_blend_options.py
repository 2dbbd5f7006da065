"""What may be asked of blending, by the engine's options and by a client's request. Clients send anything."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from cuvee.blend.segmentation import ContentChunker, LineBreaks, ParagraphChunker
from cuvee.codec.errors import InputError
from cuvee.integrations.vllm.blending.blend_options import BlendOptions, BlendRequest
from cuvee.integrations.vllm.connector_config import Options

REQUEST = "kv_transfer_params.cuvee"


def asked(given: Any, tokens: int = 100) -> BlendRequest:
    """What a request says whose `cuvee` is this."""
    return BlendRequest.of({"cuvee": given}, tokens)


# Of the engine -------------------------------------------------------------------------------------------------------


def test_defaults() -> None:
    assert Options.from_dict({}).blend is None and Options.from_dict({"blend": None}).blend is None
    nothing: list[Any] = [None, {"cuvee": None}, {"other": {"cost": 7}}, [], "cuvee"]
    for params in nothing:
        assert BlendRequest.of(params, 100) == BlendRequest(True, None, None)
    options = BlendOptions()
    assert Options.from_dict({"blend": {}}).blend == options
    assert (options.cost, options.min_context) == (0.15, 128)
    assert (options.least_tokens, options.min_position, options.min_reused) == (64, 64, 256)
    assert options.chunker() == ContentChunker(64, 192, 768)
    breaks = LineBreaks.of(["a", "\n"])
    assert options.chunker(breaks) == ParagraphChunker(ContentChunker(64, 192, 768), breaks)


def test_everything_can_be_set() -> None:
    given = {"cost": 1, "segment_tokens": 24, "min_context": 7}
    options = Options.from_dict({"blend": json.loads(json.dumps(given))})
    assert options.blend == BlendOptions(1, 24, 7)
    assert (options.blend.least_tokens, options.blend.min_position, options.blend.min_reused) == (8, 8, 32)
    assert hash(options) is not None, "stores are shared by their options"
    assert Options(blend=options.blend) == options


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (True, r"blend: must be an object such as \{\}"),
        ({"costs": 0.2}, "blend: has no option 'costs': did you mean 'cost'"),
        ({"cost": True}, "blend.cost: must be a number from 0 to 1"),
        ({"cost": 1.1}, "blend.cost: must be a number from 0 to 1, got 1.1"),
        ({"segment_tokens": 11}, "blend.segment_tokens: must be a whole number of at least 12, got 11"),
        ({"min_context": -1}, "blend.min_context: must be a whole number of at least 0, got -1"),
    ],
)
def test_wrong_options_are_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}" if message.startswith("blend") else message):
        Options.from_dict({"blend": given})


# Of a request --------------------------------------------------------------------------------------------------------


def test_everything_can_be_asked_for() -> None:
    request = asked({"blend": False, "segments": [[0, 3], (3, 5), [7, 100]], "cost": 0})
    assert request == BlendRequest(False, ((0, 3), (3, 5), (7, 100)), 0)
    assert asked({"cost": None, "segments": None}) == BlendRequest()
    assert asked({"segments": []}).segments == (), "none at all, which is not the same as: find them"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (5, f"{REQUEST}: must be an object, got int"),
        ({"segment": []}, f"{REQUEST}: has no field 'segment': did you mean 'segments'"),
        ({5: []}, f"{REQUEST}: has no field 5"),
        ({"blend": 1}, f"{REQUEST}.blend: must be true or false, got 1"),
        ({"cost": math.nan}, f"{REQUEST}.cost: must be a number from 0 to 1"),
        ({"segments": 5}, f"{REQUEST}.segments: must be a list of .start, end., got int"),
        ({"segments": [[0, 5], [5]]}, rf"{REQUEST}.segments\[1\]: must be .start, end., two token positions"),
        ({"segments": [[False, True]]}, rf"{REQUEST}.segments\[0\]: must be .start, end."),
        ({"segments": [[-1, 5]]}, rf"{REQUEST}.segments\[0\]: must be a span of tokens 0 … 100"),
        ({"segments": [[5, 5]]}, rf"{REQUEST}.segments\[0\]: must be a span of tokens 0 … 100"),
        ({"segments": [[0, 101]]}, rf"{REQUEST}.segments\[0\]: must be a span of tokens 0 … 100"),
        ({"segments": [[0, 10], [9, 20]]}, rf"{REQUEST}.segments\[1\]: must be a span of tokens 10 … 100"),
    ],
)
def test_wrong_requests_are_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        asked(given)


def test_a_request_with_a_misplaced_field_is_not_blended() -> None:
    """It may be a wish not to be."""
    with pytest.raises(InputError, match=r"^kv_transfer_params: cuvee reads no field 'blend' here"):
        BlendRequest.of({"blend": False}, 100)


HUGE = int("9" * 4000) ** 3  # more digits than Python writes out
DEEP: Any = []
for _ in range(5000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "given",
    [
        {"cost": -HUGE}, {"cost": DEEP}, {"cost": {"a": {"b": "c" * 10**6}}}, {"blend": "x" * 10**6}, {"x" * 10**6: 1},
        {HUGE: 1}, {"segments": [DEEP]}, {"segments": [[0, HUGE]]}, {"segments": [["x" * 10**6, 1]]},
        {"segments": [[0, 1]] * 10**6}, {"segments": [[at, at + 1] for at in range(10**5)]}, DEEP, "x" * 10**6,
    ],
)  # fmt: skip
def test_whatever_a_client_sends_the_message_is_short(given: Any) -> None:
    """It is written to the log: a client must not be able to fill that."""
    with pytest.raises(InputError) as refused:
        asked(given)
    assert len(str(refused.value)) < 300
