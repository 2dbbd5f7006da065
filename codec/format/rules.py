"""What the bytes of a section can break, and the error about it.

A parser, compiled or not, finds the first broken rule. It says which one by its number, and adds the numbers that the
message shows.
"""

from __future__ import annotations

from cuvee.codec.errors import CorruptError, FormatError

# The rules are plain numbers, because compiled loops return them.
SHORT = 1
LONG = 2
HEADER = 3
CLASS_STATE = 4
ONE_CLASS = 5
PADDING = 6
STATE = 7
LENGTHS = 8
ESCAPE_ORDER = 9
PLANE_MODE = 10
TABLE_ORDER = 11
TABLE_SUM = 12
CLASS_STREAM = 13
CLASS_RANGE = 14
STREAM = 15
ESCAPE_LIST = 16

_FORMAT = {
    SHORT: "section: ends {0} bytes too early",
    LONG: "section: has {0} bytes too many",
    HEADER: "section: has a stream header out of range",
    CLASS_STATE: "section: has a class stream that begins in a state below its lower bound",
    ONE_CLASS: "section: has token classes or escapes, but all of its tokens have one class",
    PADDING: "section: has padding that is not zero",
    STATE: "section: has a stream that begins in a state below its lower bound: stream {0}",
    LENGTHS: "section: has streams whose lengths do not add up: to {0} words, the header says {1}",
    ESCAPE_ORDER: "section: has escapes out of order or out of range: escape {0}",
    PLANE_MODE: "byte plane: must have mode 0 or 1, got {0}",
    TABLE_ORDER: "table: must have rising symbols with frequencies above zero, got other ones",
    TABLE_SUM: "table: must have frequencies of two or more symbols that add up to 2**12, got other ones",
    CLASS_RANGE: "section: must have token classes {0} … 15, got token classes outside {0} … 15",
}
_CORRUPT = {
    CLASS_STREAM: "the class stream of a section does not end where it must: the bytes are damaged",
    STREAM: "entropy-coded stream {0} of {1} does not end where it must: the bytes are damaged",
    ESCAPE_LIST: "the escape list does not match the coded symbols: the bytes are damaged",
}


def rule_error(rule: int, *numbers: int) -> FormatError:
    """Return the error about a broken rule, given the numbers that its message shows."""
    if rule in _CORRUPT:
        return CorruptError(_CORRUPT[rule].format(*numbers))
    return FormatError(_FORMAT[rule].format(*numbers))
