"""Entropy coders on one core: our rANS, constriction's AnsCoder and a decoder in torch, on the same symbols."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cuvee.codec.entropy.coefficients import tokens_per_stream
from cuvee.codec.entropy.family import coding_plan, default_family
from cuvee.codec.entropy.streams import Streams
from cuvee.codec.entropy.tables import EntropyTables
from cuvee.codec.errors import CuveeError, InputError
from cuvee.codec.stages.implementations import get_stages
from cuvee.codec.support.arrays import U8, U16
from cuvee.eval.bench.cpu.cases import BACKEND
from cuvee.eval.machine import torch_threads
from cuvee.eval.timing import Effort

__all__ = ["Symbols", "compare_coders", "draw_symbols", "import_constriction", "torch_decoder"]


@dataclass(frozen=True, slots=True)
class Symbols:
    """Bytes `[steps, tokens]` drawn from the tables of their steps."""

    data: U8
    which: U16
    tables: EntropyTables


def draw_symbols(steps: int, tokens: int) -> Symbols:
    """Symbols of components whose deviation falls from four steps to half a step: about 2.3 bits per symbol."""
    plan = coding_plan(np.linspace(16, 4, steps).round().astype(np.int32))
    tables = default_family().tables
    rng = np.random.default_rng(0)
    slot = rng.integers(0, 1 << tables.prob_bits, (steps, tokens))
    data = (tables.slots[plan.tables[:, None], slot] >> 24).astype(np.uint8)
    return Symbols(data, plan.tables, tables)


def import_constriction() -> Any:
    """Import constriction, which a machine that only measures its GPU need not have."""
    try:
        import constriction
    except ModuleNotFoundError as error:
        raise InputError(
            "bench: the CPU's entropy coder is measured beside constriction, which is not installed: "
            "pip install constriction"
        ) from error
    return constriction


def compare_coders(effort: Effort, tokens: int, steps: int = 96) -> dict[str, Any]:
    """Time our rANS, constriction's AnsCoder and a decoder in torch on one core, with the same symbols and model."""
    constriction = import_constriction()
    symbols = draw_symbols(steps, tokens)
    data, which, tables = symbols.data, symbols.which, symbols.tables
    backend = get_stages(BACKEND)
    entropy = float(tables.entropy[which].sum())
    n = tokens_per_stream(steps, entropy)
    streams = backend.rans_encode(data, which, tables, n)
    # Give constriction its symbols table by table, in a few large calls: one call per step would time Python.
    models = [constriction.stream.model.Categorical(f / 2.0**tables.prob_bits, perfect=False) for f in tables.freq]
    used = sorted(set(which.tolist()))
    bunches = {table: data[which == table].ravel().astype(np.int32) for table in used}

    def theirs_encode() -> Any:
        coder = constriction.stream.stack.AnsCoder()
        for table in reversed(used):
            coder.encode_reverse(bunches[table], models[table])
        return coder.get_compressed()

    compressed = theirs_encode()

    def theirs_decode() -> list[Any]:
        coder = constriction.stream.stack.AnsCoder(compressed)
        return [coder.decode(models[table], len(bunches[table])) for table in used]

    lanes = torch_decoder(streams, which, tables, n, tokens)
    with torch_threads(1):
        right = (
            np.array_equal(backend.rans_decode(streams, which, tables, n, tokens), data)
            and all(np.array_equal(a, b) for a, b in zip(theirs_decode(), bunches.values(), strict=True))
            and np.array_equal(lanes().numpy(), data)
        )
        if not right:
            raise CuveeError("an entropy coder did not return its input")
        million = data.size / 1e6
        timings = {
            "encode": effort.measure(lambda: backend.rans_encode(data, which, tables, n)),
            "decode": effort.measure(lambda: backend.rans_decode(streams, which, tables, n, tokens)),
            "constriction_encode": effort.measure(theirs_encode),
            "constriction_decode": effort.measure(theirs_decode),
            "torch_decode": effort.measure(lanes),
        }
    ideal = float(tables.bits[which[:, None], data].sum())
    ours_bits = 8.0 * (streams.words.nbytes + streams.states.nbytes + 2 * len(streams.lengths))
    return {
        "symbols": data.size,
        "streams": len(streams.states),
        "bits_per_symbol": {
            "ideal": ideal / data.size,
            "rans": ours_bits / data.size,
            "constriction": 8.0 * compressed.nbytes / data.size,
        },
        "msymbols_per_s": {name: timing.per_second(million) for name, timing in timings.items()},
        "ratios": {
            "encode_over_constriction": timings["constriction_encode"].median / timings["encode"].median,
            "decode_over_constriction": timings["constriction_decode"].median / timings["decode"].median,
            "decode_over_torch": timings["torch_decode"].median / timings["decode"].median,
        },
    }


def torch_decoder(
    streams: Streams, which: U16, tables: EntropyTables, n: int, tokens: int
) -> Callable[[], torch.Tensor]:
    """A decoder that needs no compiler: tensor operations advance all streams together, one lane per stream.

    Returns:
        A function that decodes `[steps, tokens]` uint8.

    Raises:
        InputError: `tokens` is not a multiple of `n`. All lanes must be equally long here.
    """
    if tokens % n:
        raise InputError(f"tokens: must be a multiple of {n}, got {tokens}")
    slots = torch.from_numpy(tables.slots.astype(np.int64))
    words = torch.from_numpy(np.append(streams.words, np.uint16(0)).astype(np.int64))
    ends = torch.from_numpy(np.cumsum(streams.lengths, dtype=np.int64))
    starts = ends - torch.from_numpy(streams.lengths.astype(np.int64))
    states = torch.from_numpy(streams.states.astype(np.int64))
    mask, order = (1 << tables.prob_bits) - 1, which.tolist()

    def decode() -> torch.Tensor:
        x, at = states.clone(), starts.clone()
        out = torch.empty(len(order), len(states), n, dtype=torch.uint8)
        for j in range(n):
            for step, table in enumerate(order):
                slot = slots[table][x & mask]
                out[step, :, j] = (slot >> 24).to(torch.uint8)
                x = ((slot >> 12) & 0xFFF) * (x >> tables.prob_bits) + (slot & 0xFFF)
                need = x < 1 << 16
                x = torch.where(need, x << 16 | words[at], x)
                at += need
        return out.flatten(1)

    return decode
