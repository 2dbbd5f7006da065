"""What clients ask of the connector, in a request's `kv_transfer_params`: `{"cuvee": {"deadline_ms": 300, …}}`.

Here the object is read, its fields are known by name, and `store`, `explain` and `deadline_ms` are read;
`blending.blend_options` reads the fields about blends.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Any

from cuvee.codec.errors import InputError
from cuvee.codec.support.suggest import suggestion

_NAME = "cuvee"
PARAMETERS = f"kv_transfer_params.{_NAME}"
_FIELDS = ("deadline_ms", "store", "blend", "segments", "cost", "explain")
_SEPARATES = ("salt", "tenant")  # in the name of a field that says with whom a request shares
_MOST_MS = 3_600_000  # a later deadline is none
_ALIKE = 0.8  # and above: a short key is taken for a misspelt `cuvee`; those of vLLM's connectors are far below
_MOST_SHOWN = 40  # characters of a client's value that go into a message, and so into the log


def request_fields(params: Any) -> Mapping[str, Any]:
    """Return what `kv_transfer_params` say to this connector.

    Raises:
        InputError: not an object, an unknown field, a wrong `store` or `explain`, or beside it a key that is nearly its
            own, or one by which a client may mean to share nothing. Other keys are other connectors'.
    """
    for key, value in params.items() if isinstance(params, Mapping) else ():
        if _is_misspelt(key):
            raise InputError(f"kv_transfer_params: has no field {shown(key)}: did you mean {_NAME!r}?")
        if key == "store" and value is not True:
            raise InputError(_misplaced(key))
        if isinstance(key, str) and any(part in key.lower() for part in _SEPARATES):
            raise InputError(
                f"kv_transfer_params: has no field {shown(key)}: a tenant is told by the request's own field cache_salt"
            )
    given = _given(params)
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InputError(f"{PARAMETERS}: must be an object, got {type(given).__name__}")
    for name in given:
        if name not in _FIELDS:
            raise InputError(f"{PARAMETERS}: has no field {shown(name)}: {suggestion(shown(name), _FIELDS)}")
    for name in ("store", "explain"):
        if type(given.get(name, True)) is not bool:
            raise InputError(f"{PARAMETERS}.{name}: must be true or false, got {shown(given[name])}")
    return given


def misplaced_field(params: Any) -> str:
    """Return a message about a field that stands beside `cuvee` and has the name of one in it, where it has no effect;
    empty: there is none. It may be another connector's, though none of vLLM's has one.
    """
    outer = params if isinstance(params, Mapping) else {}
    return next((_misplaced(name) for name in _FIELDS if name in outer), "")


def wants_reason(params: Any) -> bool:
    """Return whether the client asks why nothing was loaded, or not all of it."""
    given = _given(params)
    return isinstance(given, Mapping) and given.get("explain") is True


def deadline_of(params: Any, default: float | None) -> float | None:
    """Return the seconds from a request's arrival to its first token that it asks for; None: whenever it comes.

    Args:
        params: `kv_transfer_params`; a `deadline_ms` that is `null` asks for no deadline.
        default: the engine's `deadline_ms`.

    Raises:
        InputError: a value of the wrong type or range. What is wrong with other fields is no deadline's fault.
    """
    given = _given(params)
    fields = given if isinstance(given, Mapping) else {}
    return read_deadline(f"{PARAMETERS}.", fields.get("deadline_ms", default))


def read_deadline(source: str, given: Any) -> float | None:
    """Return milliseconds of JSON in seconds; None: not given.

    Raises:
        InputError: a value of the wrong type or range; `source` stands in front of the name in the message.
    """
    if given is None:
        return None
    if type(given) not in (int, float) or not 0 < given <= _MOST_MS:
        raise InputError(
            f"{source}deadline_ms: must be milliseconds, above 0 and at most {_MOST_MS}, got {shown(given)}"
        )
    return float(given) / 1e3


def _given(params: Any) -> Any:
    return params.get(_NAME) if isinstance(params, Mapping) else None


def _misplaced(name: str) -> str:
    return f'kv_transfer_params: cuvee reads no field {name!r} here: if meant, give {{"{_NAME}": {{"{name}": …}}}}'


def _is_misspelt(key: object) -> bool:
    if not isinstance(key, str) or key == _NAME:
        return False
    key = key.lower()
    short = len(key) < 2 * len(_NAME)  # a client may send any number of long ones
    return _NAME in key or (short and SequenceMatcher(None, key, _NAME, autojunk=False).ratio() >= _ALIKE)


def shown(value: object) -> str:
    """Show a client's value in a message, in few characters whatever it is."""
    if isinstance(value, int) and not -(10**_MOST_SHOWN) < value < 10**_MOST_SHOWN:  # Python may refuse to write it
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str):
        return repr(value[:_MOST_SHOWN]) + "…" * (len(value) > _MOST_SHOWN)
    return repr(value) if value is None or isinstance(value, bool | int | float) else type(value).__name__
