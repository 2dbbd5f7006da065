"""Untrusted JSON: whatever is wrong with it is a ValueError, in every reader the error that it documents."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from cuvee.codec.support.plain_json import MAX_DEPTH, parse_json

DEEP = [10**5, sys.getrecursionlimit() // 2, MAX_DEPTH + 1]  # more than the parser takes, or its readers
BAD = {
    "nothing": "",
    "cut off": '{"a": 1',
    "digits": "1" * 10**5,
    "not a number": "[NaN]",
    "infinite": '{"a": -Infinity}',
    "overflowing": "[1e999]",
    **{f"nested {depth}": '{"a":[' * (depth // 2 + 1) + "]}" * (depth // 2 + 1) for depth in DEEP},
}


@pytest.mark.parametrize("text", BAD.values(), ids=list(BAD))
def test_every_fault_is_a_value_error(text: str) -> None:
    for given in (text, text.encode(), text.encode() + b"\xff\xfe\xff"):
        with pytest.raises(ValueError) as failure:
            parse_json(given)
        assert len(str(failure.value)) < 200


@pytest.mark.parametrize("data", [None, 1, 1.5, "[[", [], {}, {"a": [1, {"b": None}], "c": "NaN"}, 10**4000])
def test_all_else_is_read_as_python_does(data: Any) -> None:
    assert parse_json(json.dumps(data)) == data
    assert parse_json(json.dumps(data), constants=True) == data


def test_as_deep_as_is_allowed() -> None:
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    with pytest.raises(ValueError, match="nested deeper than 64"):
        parse_json("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))


def test_constants_where_python_wrote_them() -> None:
    assert parse_json("[0.0, Infinity, 1e999]", constants=True) == [0.0, float("inf"), float("inf")]
    with pytest.raises(ValueError, match="nested"):
        parse_json("[" * 1000 + "]" * 1000, constants=True)
