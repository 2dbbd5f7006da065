"""Numbers in the format of reports."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cuvee.eval.report.schema import Ratio

__all__ = ["format_bits", "format_interval", "format_number", "format_ratio", "with_error"]

_MOST_DECIMALS = 7  # beyond these a number is written with an exponent


def _decimals(value: float, digits: int) -> int:
    """Return the number of decimals that show `digits` significant digits."""
    return max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0


def _format(value: float, decimals: int, signed: bool = False) -> str:
    sign = "+" if signed else ""
    text = f"{value:{sign}.1e}" if decimals > _MOST_DECIMALS else f"{value:{sign},.{decimals}f}"
    return text.replace("-", "\N{MINUS SIGN}", 1) if text.startswith("-") else text


def format_number(value: float | None, digits: int = 3, signed: bool = False) -> str:
    """Write a number with this many significant digits; empty for None.

    Example:
        >>> format_number(0.00123456), format_number(1234.5, 2)
        ('0.00123', '1,234')
    """
    if value is None:
        return ""
    if value == 0:
        return "0"
    return _format(value, _decimals(value, digits), signed)


def with_error(value: float, error: float | None, *, signed: bool = False, percent: bool = False) -> str:
    """Write a number down to the second digit of its standard error. A value other than 0 keeps at least one digit.

    Example:
        >>> with_error(0.123456, 0.0021), with_error(0.98, 0.01, percent=True)
        ('0.1235 ± 0.0021', '98.0 ± 1.0%')
    """
    scale, unit = (100.0, "%") if percent else (1.0, "")
    value *= scale
    if error is None:
        return format_number(value, 4 if percent else 3, signed) + unit
    error *= scale
    decimals = _decimals(error, 2) if error else _decimals(value, 3)
    if value and not round(value, decimals):
        decimals = _decimals(value, 1)
    return f"{_format(value, decimals, signed)} ± {_format(error, decimals) if error else '0'}{unit}"


def format_bits(bits: float | None) -> str:
    """Write bits per value; empty for None."""
    if bits is None:
        return ""
    return "0" if bits == 0 else f"{bits:.2f}" if bits >= 0.1 else format_number(bits)


def format_ratio(ratio: float | None) -> str:
    """Write how many times smaller, such as 8.25x; empty for None."""
    if ratio is None:
        return ""
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x"


def format_interval(ratio: Ratio | None) -> str:
    """Write a ratio and its interval. Either end may lie beyond the measured range."""
    if ratio is None or ratio.ratio is None:
        return "not reached"
    size, low, high = map(format_ratio, (ratio.ratio, ratio.low, ratio.high))
    if low and high:
        return f"{size} ({low} to {high})"
    if low or high:
        return f"{size} (above {low})" if low else f"{size} (below {high})"
    return size
