"""Counting of the kernels' work on a chunk of Llama-3.1-8B's shape in the emulator: `counts.json`.

    python -m tests.kernels.costs.counting            # counts all schemes for sm_90 and writes the file

The chunk has 256 tokens of two layers (one where a section is a layer), 8 heads of 128, bfloat16. Its spectrum falls by
2.5% per component, and a profile's step is one at which this takes about 1.4 bits per value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import CuveeError
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.learning.calibrate import fit
from cuvee.codec.models.rope import rotate
from cuvee.codec.profiles.class_predictor import choose_classes
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.support.arrays import U8
from cuvee.kernels.transform_scheme import TransformDevice

FILE = Path(__file__).with_name("counts.json")
TOKENS, HEADS, DIM = 256, 8, 128
LAYERS = {"head": 2, "head, classes": 2, "layer": 1, "lossless": 2}
# Kernels by the names of their specs; those that are compiled in several ways are told apart by the scheme.
NAMES = {
    "_decode_kernel": "rans_decode", "_encode_kernel": "rans_encode", "_count_kernel": "count_words",
    "_write_kernel": "write_coded",
}  # fmt: skip
PRODUCTS = {
    ("_synthesize", "head"): "synthesize head", ("_synthesize", "head, classes"): "synthesize head",
    ("_synthesize", "layer"): "synthesize layer",
}  # fmt: skip
_THROUGH = ("st.global", "atom.global", "cp.async")  # what a first-level cache does not keep from the second


def _layout(layers: int) -> KVLayout:
    turns = (500000.0 ** (-torch.arange(0, DIM, 2) / DIM)).tolist()
    return KVLayout(
        "llama", (LayerLayout(HEADS, DIM, DIM, Rope(tuple(turns), 1.0, False)),) * layers, "bfloat16", 131072
    )


def _chunk(layout: KVLayout, tokens: int, seed: int) -> KVChunk:
    noise = torch.Generator().manual_seed(seed)
    parts: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    falling = 0.975 ** torch.arange(DIM)
    for index, layer in enumerate(layout.layers):
        fixed = torch.Generator().manual_seed(1000 + index)
        for rope, out in zip((layer.rope, None), parts, strict=True):
            heads = []
            for _ in range(HEADS):
                turn, _ = torch.linalg.qr(torch.randn(DIM, DIM, generator=fixed))
                mean = torch.randn(DIM, generator=fixed)
                heads.append(torch.randn(tokens, DIM, generator=noise) @ (turn * falling[:, None]) + mean)
            x = torch.stack(heads, 1)
            out.append((x if rope is None else rotate(x, rope, torch.arange(tokens))).to(torch.bfloat16))
    return KVChunk(*parts, layout, 0)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _choose(device: Any, *_: object) -> U8:
    """Random classes, in place of those of a predictor, whose kernels are those of `analyze` once more."""
    octaves = -0.75 * torch.randn(TOKENS, generator=torch.Generator().manual_seed(1))
    classes = choose_classes(octaves - octaves.mean(), 0)
    return np.concatenate([np.maximum(classes, np.uint8(finest)) for finest in device._plan.finest[0]])


def count(scheme: str) -> dict[str, Any]:
    """Encode and decode one chunk on the emulator, which is installed.

    Returns:
        `values` of the chunk, `bits` per value, and `encode` and `decode`: what each kernel did per value, by the names
        of `time_bounds.Count`.
    """
    layers = LAYERS[scheme]
    layout = _layout(layers)
    kind, _, classed = scheme.partition(", ")
    if kind == "lossless":
        profile = Profile.unlearned(layout)
    else:
        seen = 2900 if kind == "layer" else 320
        with one_thread():  # more add up in another order, and then other values escape
            profile = fit(layout, [_chunk(layout, seen, seed) for seed in range(100, 104)], kind)
    quality: dict[str, Any] = {"quality": "lossless"} if kind == "lossless" else {"step": 0.8}
    codec = Codec(profile, backend="triton", **quality)
    one = _chunk(layout, TOKENS, 0)
    values = 2 * layers * HEADS * DIM * TOKENS
    with pytest.MonkeyPatch.context() as patch, counted() as encoded:
        if classed:
            patch.setattr(TransformDevice, "_choose", _choose)
        blob = codec.encode(one)
    with counted() as decoded:
        codec.decode(blob, 1000)
    made: dict[str, Any] = {"values": values, "bits": round(8 * len(blob) / values, 3)}
    for name, kernels in (("encode", encoded), ("decode", decoded)):
        made[name] = {
            PRODUCTS.get((own.name, scheme), NAMES.get(own.name, own.name.removeprefix("_"))): _summary(own, values)
            for own in kernels
        }
    return made


@dataclass(frozen=True)
class Ran:
    """A kernel's name, its instructions, and what was counted of each, by name of the count."""

    name: str
    codes: Sequence[Any]
    counts: Mapping[str, Any]


@contextmanager
def counted() -> Iterator[list[Ran]]:
    """The kernels that run within, and what they do there, once it is left."""
    from tests.ptx.driver import state

    current = state()
    before = {key: own.counts.copy() for key, own in current.kernels.items()}
    options, current.options = current.options, replace(current.options, count=True)
    ran: list[Ran] = []
    try:
        yield ran
    finally:
        current.options = options
    for key, own in current.kernels.items():
        names = own.counts.dtype.names or ()
        counts = {name: own.counts[name] - (before[key][name] if key in before else 0) for name in names}
        if counts["runs"].any():
            ran.append(Ran(own.name, own.encoded.codes, counts))


def _summary(kernel: Ran, values: int) -> dict[str, float]:
    """A kernel's row, per value."""
    out = dict.fromkeys(
        ("instructions", "sectors", "through", "transfers", "written", "passes", "least_passes", "barriers", "flops"),
        0.0,
    )  # fmt: skip
    lanes = 0
    for index, code in enumerate(kernel.codes):
        counts = {name: int(of[index]) for name, of in kernel.counts.items()}
        runs, units, op = counts["runs"], counts["units"], code.op
        out["instructions"] += runs
        lanes += counts["lanes"]
        if op.endswith(".global") or op == "cp.async":
            out["sectors"] += units
            out["through"] += units if op in _THROUGH else 0
            out["transfers"] += max(counts["requests"], units / 4)
            if op == "st.global":
                out["written"] += counts["lanes"] * int(code.fields["width"]) * int(code.fields["count"])
        elif counts["requests"]:
            out["passes"] += units
            out["least_passes"] += counts["least"]
        if op == "bar.sync":
            out["barriers"] += runs
        if op == "mma":
            wide = int(code.fields["width"])
            out["flops"] += runs * 2 * 16 * 8 * wide * (2 if code.fields["mode"] == 2 else 1)
        elif op == "wgmma":
            # A warp's quarter of 64 rows. A product of TF32 takes the time of two of bfloat16.
            deep, times = (8, 2) if code.fields["mode"] == 2 else (16, 1)
            out["flops"] += runs * 2 * 16 * 8 * int(code.fields["width"]) * deep * times
        elif op == "tcgen05.mma":
            out["flops"] += units * (1 if code.fields["mode"] else 2)
    made = {name: float(f"{amount / values:.4g}") for name, amount in out.items()}
    return {**made, "lanes": round(lanes / max(1.0, out["instructions"]), 2)}


def _lines(found: Mapping[str, Any]) -> str:
    """Return the file: a line for each kernel."""
    schemes = []
    for scheme, own in found.items():
        ways = ",\n".join(
            f'  "{way}": {{\n'
            + ",\n".join(f"   {json.dumps(name)}: {json.dumps(kernel)}" for name, kernel in own[way].items())
            + "\n  }"
            for way in ("encode", "decode")
        )
        schemes.append(f' {json.dumps(scheme)}: {{"values": {own["values"]}, "bits": {own["bits"]},\n{ways}\n }}')
    return "{\n" + ",\n".join(schemes) + "\n}\n"


def _main() -> None:
    """Count all schemes and write the file."""
    from tests import emulation

    if (emulation.KERNELS_RUN_ON, emulation.TARGET) != ("ptx", "sm_90"):
        raise CuveeError(f"counts are those of PTX for sm_90, kernels run on {emulation.KERNELS_RUN_ON} here")
    emulation.start()
    FILE.write_text(_lines({scheme: count(scheme) for scheme in LAYERS}))


if __name__ == "__main__":
    _main()
