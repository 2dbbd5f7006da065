"""Estimate how a layer's cached tokens change, and add it to them, in one compiled pass.

The same as `Correction.estimate` between reading the old KV and adding, but for the order of
sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cuvee.blend.correction_steps import (
    ROWS,
    add_across_step,
    add_step,
    subtract_step,
    turn_step,
    weigh,
    weigh_by_4,
)
from cuvee.codec.stages.compiled.bfloat16 import saturated, to_float
from cuvee.codec.stages.compiled.compiler import compiled, inner
from cuvee.codec.stages.compiled.simd import WIDTH
from cuvee.codec.stages.compiled.transform import plain
from cuvee.codec.stages.rows import Rows, all_memory
from cuvee.codec.support.arena import Arena
from cuvee.codec.support.arrays import F32, I64

_TINY = np.float32(np.finfo(np.float32).tiny)
_BY_4 = 4 * WIDTH
_ADDED = 2 * WIDTH  # tokens that are corrected together: their values stay in the first cache
_FEW = 3  # adjacent tokens from which on they are written side by side

_arena = Arena()


@inner
def _weigh_rows(weights, first, values, at, width, count, sums, to):  # type: ignore[no-untyped-def]
    """Write four rows of `width` weighted sums, a multiple of 16, of `count` rows of values."""
    i = np.int64(0)
    while i + _BY_4 <= width:
        weigh_by_4(weights, first, values, at + i, width, count, sums, to + i, width)
        i += _BY_4
    while i < width:
        weigh(weights, first, values, at + i, width, count, sums, to + i, width)
        i += WIDTH


@inner
def _turn(x, at, half, cos, sin, angle):  # type: ignore[no-untyped-def]
    """Rotate the `half` pairs of values that begin at entry `at`."""
    i = 0
    while i + WIDTH <= half:
        turn_step(x, at + i, half, cos, sin, angle + i)
        i += WIDTH
    while i < half:
        a, b = x[at + i], x[at + half + i]
        c, s = cos[angle + i], sin[angle + i]
        x[at + i], x[at + half + i] = a * c - b * s, b * c + a * s
        i += 1


@inner
def _subtract(new, at, memory, begin, size, out, to):  # type: ignore[no-untyped-def]
    """Write the difference of a head's new values from those in memory, where they are adjacent."""
    i = 0
    while i + WIDTH <= size:
        subtract_step(new, at + i, memory, begin + i, out, to + i)
        i += WIDTH
    while i < size:
        out[to + i] = to_float(new[at + i]) - to_float(memory[begin + i])
        i += 1


@inner
def _add(x, at, scale, memory, begin, size):  # type: ignore[no-untyped-def]
    """Add a multiple of a head's values to those in memory, where they are adjacent."""
    i = 0
    while i + WIDTH <= size:
        add_step(x, at + i, scale, memory, begin + i)
        i += WIDTH
    while i < size:
        memory[begin + i] = saturated(to_float(memory[begin + i]) + x[at + i] * scale, memory)
        i += 1


@inner
def _add_placed(x, width, rows, scale, memory, begins, offsets, kinds, h, first, lanes):  # type: ignore[no-untyped-def]
    """Add a multiple of a head's values to those of the tokens from `first` on, which lie where `offsets` say."""
    heads, size = offsets.shape[1:]
    offsets_ = offsets.reshape(offsets.size)
    k = 0
    while k < rows:
        begin, kind = begins[first + k], kinds[first + k]
        if begin < 0:
            k += 1
            continue
        lanes[:] = -1
        end = k
        while end < rows and kinds[first + end] == kind and 0 <= begins[first + end] - begin < WIDTH:
            lanes[begins[first + end] - begin] = end
            end += 1
        i, of_head = 0, (kind * heads + h) * size
        while end - k >= _FEW and i + WIDTH <= size:
            add_across_step(x, i, width, lanes, scale, offsets_, of_head + i, memory, begin)
            i += WIDTH
        for row in range(k, end):
            for rest in range(i, size):
                place = begins[first + row] + offsets_[of_head + rest]
                memory[place] = saturated(to_float(memory[place]) + x[row * width + rest] * scale, memory)
        k = end


@inner
def _share(others, first, known, at, width, count, units, sums, agreeing, energy):  # type: ignore[no-untyped-def]
    """Return the share of a head's estimates that predictions of its known changes from each other bear out."""
    agreeing[:], energy[:] = 0, 0  # by column, so that columns are summed side by side
    for row in range(0, count, ROWS):
        _weigh_rows(others, first + row * count, known, at, width, count, sums, np.int64(0))
        for k in range(min(ROWS, count - row)):
            predicted, begin, unit = sums[k * width : (k + 1) * width], at + (row + k) * width, 1 / units[row + k]
            change = known[begin : begin + width]
            for i in range(width):
                agreeing[i] += predicted[i] * change[i] * unit
                energy[i] += predicted[i] * predicted[i]
    share = agreeing.sum() / max(energy.sum(), _TINY)
    if share < 0:
        return np.float32(0)
    return np.float32(1) if share > 1 else np.float32(share)


@inner
def _correct_unit(  # type: ignore[no-untyped-def]
    new, token_stride, new_head_stride, memory, begins, head_stride, offsets, kinds, size, cos, sin, trust, row_of,
    windows, matrices, units, known,
):  # fmt: skip
    """Correct the keys or the values; `cos` and `sin` are those of the observed tokens, then of the corrected ones."""
    heads, total, width = known.shape
    half = cos.shape[1]
    cos_, sin_, known_ = cos.reshape(cos.size), sin.reshape(sin.size), known.reshape(known.size)
    sums = np.empty(_ADDED * width, np.float32)
    agreeing, energy = np.empty(width, np.float32), np.empty(width, np.float32)
    lanes = np.empty(WIDTH, np.int32)
    observed = len(row_of)
    permuted = len(offsets) > 0
    for w in range(len(windows)):
        seen, count, first, earlier, done, corrected, of_others, of_weights = windows[w]
        for t in range(seen, seen + count):
            for h in range(heads):
                at, to = (
                    row_of[t] * token_stride + h * new_head_stride,
                    (h * total + first + earlier + t - seen) * width,
                )
                if permuted:
                    places = offsets[kinds[t], h]
                    for i in range(size):
                        known_[to + i] = to_float(new[at + i]) - to_float(memory[begins[t] + places[i]])
                else:
                    _subtract(new, at, memory, begins[t] + h * head_stride, size, known_, to)
                _turn(known_, to, half, cos_, sin_, t * half)
        if corrected == 0:
            continue
        count += earlier
        for h in range(heads):
            slab = (h * total + first) * width
            for k in range(count):
                for i in range(slab + k * width + size, slab + (k + 1) * width):
                    known_[i] = 0
            scale = trust[w] * _share(
                matrices, of_others, known_, slab, width, count, units[first : first + count], sums, agreeing, energy
            )
            if scale == 0:
                continue
            for begin in range(0, corrected, _ADDED):
                rows, t = min(_ADDED, corrected - begin), observed + done + begin
                for row in range(0, rows, ROWS):
                    weights = of_weights + (begin + row) * count
                    _weigh_rows(matrices, weights, known_, slab, width, count, sums, row * width)
                for k in range(rows):
                    _turn(sums, k * width, half, cos_, sin_, (t + k) * half)
                if permuted:
                    _add_placed(sums, width, rows, scale, memory, begins, offsets, kinds, h, t, lanes)
                    continue
                for k in range(rows):
                    if begins[t + k] >= 0:
                        _add(sums, k * width, scale, memory, begins[t + k] + h * head_stride, size)


@compiled
def _correct(  # type: ignore[no-untyped-def]
    keys, key_token_stride, key_new_head_stride, key_memory, key_begins, key_head_stride, key_offsets, key_kinds,
    key_size, cos, sin, trust_of_keys, known_keys,
    values, value_token_stride, value_new_head_stride, value_memory, value_begins, value_head_stride, value_offsets,
    value_kinds, value_size, no_cos, no_sin, trust, known_values,
    row_of, windows, matrices, units,
):  # fmt: skip
    _correct_unit(
        keys, key_token_stride, key_new_head_stride, key_memory, key_begins, key_head_stride, key_offsets, key_kinds,
        key_size, cos, sin, trust_of_keys, row_of, windows, matrices, units, known_keys,
    )  # fmt: skip
    _correct_unit(
        values, value_token_stride, value_new_head_stride, value_memory, value_begins, value_head_stride,
        value_offsets, value_kinds, value_size, no_cos, no_sin, trust, row_of, windows, matrices, units, known_values,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class WindowTables:
    """Weights of windows of tokens, as the loop takes them.

    Attributes:
        windows: int64 `[W, 8]`, per window: the first of its observed tokens and their number, the first of its known
            ones (those that were observed earlier, then these) and the number of the former, the first of its
            corrected tokens and their number, and where its weights begin in `matrices`: those of known tokens for
            known ones, and for corrected ones.
        matrices: float32, row after row; rows are rounded up to a multiple of `ROWS` by zeros.
        units: float32 `[K]`, of the known tokens of all windows.
        trust: float32 `[W]`.
    """

    windows: I64
    matrices: F32
    units: F32
    trust: F32

    @classmethod
    def of(
        cls, observed: Sequence[int], others: Sequence[torch.Tensor], weights: Sequence[torch.Tensor],
        units: Sequence[torch.Tensor], trust: Sequence[float],
    ) -> WindowTables:  # fmt: skip
        """Make the tables from the number of observed tokens of each window, and its tensors.

        Args:
            observed: how many of each window's known tokens, the last ones, are observed.
            others: float32 `[k, k]`.
            weights: float32 `[R, k]`.
            units: float32 `[k, 1, 1]`.
            trust: of each window.
        """
        fields = np.empty((len(observed), 8), np.int64)
        matrices: list[F32] = []
        seen = known = done = at = 0
        for row, count, *pair in zip(fields, observed, others, weights, strict=True):
            here, corrected = len(pair[0]), len(pair[1])
            row[:6] = seen, count, known, here - count, done, corrected
            for number, matrix in enumerate(pair):
                row[6 + number] = at
                fill = -len(matrix) % ROWS * here
                matrices += [matrix.numpy().reshape(-1), np.zeros(fill, np.float32)]
                at += matrix.numel() + fill
            seen, known, done = seen + count, known + here, done + corrected
        joined = np.concatenate([each.numpy().reshape(-1) for each in units])
        return cls(fields, np.concatenate(matrices), joined, np.array(trust, np.float32))


def room_for_known(heads: int, tokens: int, key_size: int, value_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return room for the known changes of keys and values, float32 `[H, K, D]` with D rounded up to `WIDTH`.

    It is valid until this thread asks again.
    """
    widths = [-(-size // WIDTH) * WIDTH for size in (key_size, value_size)]
    keys, values = (
        _arena.tensor(name, heads * tokens * width, torch.float32).view(heads, tokens, width)
        for name, width in zip(("keys", "values"), widths, strict=True)
    )
    return keys, values


def correct_rows(
    new: tuple[torch.Tensor, torch.Tensor],
    row_of: I64,
    rows: tuple[Rows, Rows],
    tables: WindowTables,
    rotations: tuple[F32, F32] | None,
    key_share: float,
    known: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Correct the keys and values of a layer in their rows.

    Args:
        new: keys and values `[H, S, D]`, bfloat16 or float32.
        row_of: int64 `[n]`, which of the S tokens each observed one is.
        rows: where keys and values of the n observed tokens, then of the R corrected ones are, bfloat16 or float32.
        tables: of the windows.
        rotations: cos and sin `[n + R, rotary_dim / 2]`, which take the observed tokens' keys to position 0, and the
            corrected ones' from there; None if keys are not rotated.
        key_share: what share of the estimate keys are corrected by.
        known: room for the known changes, from `room_for_known`, which holds those that were observed earlier. Receives
            the others.
    """
    units = []
    none = np.empty((len(rows[0].begins), 0), np.float32)
    for part, place, (cos, sin), share, room in zip(
        new, rows, (rotations or (none, none), (none, none)), (key_share, 1.0), known, strict=True
    ):
        given = part if part.stride(2) == 1 else part.contiguous()
        units += [
            plain(all_memory(given)), given.stride(1), given.stride(0), plain(place.memory), place.begins,
            place.head_stride, place.offsets, place.kinds, place.size, cos, sin,
            tables.trust * np.float32(share), room.numpy(),
        ]  # fmt: skip
    _correct(*units, row_of, tables.windows, tables.matrices, tables.units)
