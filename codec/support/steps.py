"""Quantizer steps: scales and steps are integers in units of 1/64 octave, so that they are equal on all machines."""

from __future__ import annotations

OCTAVE = 64  # units of a scale or step per factor of two


def step_value(step_index: int) -> float:
    """Return the quantizer step of an index."""
    return float(2.0 ** (step_index / OCTAVE))
