"""Refinements: blobs of what their base left over.

A refinement codes y - y', where y are the coefficients of a chunk and y' the ones, in float32, that a decoder makes of
the base. It is an ordinary blob at a quarter of the base's step, with the base's classes. A decoder adds both in
float32.

What is left of a component that the base coded is about uniform over a step of the base, however wide the component
is. So the scale codes of a refinement are limited: a component has one plane and no low bits.
"""

from __future__ import annotations

from cuvee.codec.support.steps import OCTAVE

MAX_REFINEMENTS = 1
FINER = 2 * OCTAVE  # the step index of a base minus that of its refinement
WIDEST = 9  # the largest scale code of a component: of a quarter of a step, a uniform step has this deviation
