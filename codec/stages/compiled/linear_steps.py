"""Means, predictions and rotations of sixteen values at a time: the inner loops of `transform.py`."""

from __future__ import annotations

from typing import Any

from numba.core import types

from cuvee.codec.stages.compiled.simd import Code, spelled_out


def _shifting(placing: bool) -> tuple[Any, Any]:
    """Make the steps that add a mean and a prediction to values, after which pairs are rotated; or that undo it.

    Undoing, pairs are rotated first, and the sum of mean and prediction is subtracted.
    """

    def shifted(code: Code, x: Any, offset: Any) -> Any:
        return code.builder.fadd(x, offset) if placing else code.builder.fsub(x, offset)

    @spelled_out
    def shift_step(typing: Any, x, at, mean, of_mean, guess, of_guess, out, to):  # type: ignore[no-untyped-def]
        """Shift 16 values: `add_step`, or `subtract_step`. After each array comes the entry at which they begin.

        The values `x`, their predictions `guess` and `out` are float32, or uint16 for the bits of bfloat16; `mean` is
        float32.
        """
        signature = types.void(x, at, mean, of_mean, guess, of_guess, out, to)

        def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            code = Code(context, builder, sig.args, values)
            offset = builder.fadd(code.floats(2, 3), code.floats(4, 5))
            value = shifted(code, code.floats(0, 1), offset)
            code.store_floats(code.saturated(value, 6) if placing else value, 6, 7)
            return context.get_dummy_value()

        return signature, generate

    @spelled_out
    def rotate_step(typing: Any, x, at, mean, of_mean, guess, of_guess, half, cos, sin, angle, out, to):  # type: ignore[no-untyped-def]
        """Shift and rotate 16 pairs of values: `add_and_rotate_step`, or `rotate_and_subtract_step`.

        Arrays are those of `add_step`. The second of each pair come `half` entries after the first in all of them. The
        entries of `cos` and `sin`, float32, begin at `angle`.
        """
        signature = types.void(x, at, mean, of_mean, guess, of_guess, half, cos, sin, angle, out, to)

        def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            code = Code(context, builder, sig.args, values)
            places = None, code.integer(6, types.int64)
            pair = [code.floats(0, 1, later) for later in places]
            offsets = [builder.fadd(code.floats(2, 3, later), code.floats(4, 5, later)) for later in places]
            if placing:
                pair = [shifted(code, x, offset) for x, offset in zip(pair, offsets, strict=True)]
            a, b = pair
            c, s = code.floats(7, 9), code.floats(8, 9)
            pair = [
                builder.fsub(builder.fmul(a, c), builder.fmul(b, s)),
                builder.fadd(builder.fmul(b, c), builder.fmul(a, s)),
            ]
            if not placing:
                pair = [shifted(code, x, offset) for x, offset in zip(pair, offsets, strict=True)]
            for value, later in zip(pair, places, strict=True):
                code.store_floats(code.saturated(value, 10) if placing else value, 10, 11, later)
            return context.get_dummy_value()

        return signature, generate

    return shift_step, rotate_step


add_step, add_and_rotate_step = _shifting(placing=True)
subtract_step, rotate_and_subtract_step = _shifting(placing=False)
