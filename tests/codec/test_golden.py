"""Blobs written once and kept: every later version must read them, to the same tokens.

What must be equal on every machine is what is integer: the bytes of a lossless chunk, and the quantized levels of a
lossy one, which are hashed. The tensors of a lossy chunk come out of floating-point products, whose last bits differ
between machines; they are compared with the stored ones within a tolerance. Encoding again need not give the same
bytes, for the same reason, except for lossless.

A change that fails here misreads the blobs that users keep: it needs a new format version, and
`pytest tests/codec/test_golden.py --regenerate-golden`, which writes all files of `tests/codec/golden` anew but the
profile. Also a new version must decode its blobs of the same chunks to the same tensors (`KEPT_DIGEST`). A new version
of profiles is given to the same profile: load it as it was, and save it as it is to be. Learned anew, it is another.
"""

from __future__ import annotations

import hashlib
import json
import struct
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.classed import with_classes
from tests.codec.planned import Planned, coding_of
from tests.codec.reference import get_stages, stage_names
from tests.codec.reference.rans import decode_classes, rans_decode
from tests.codec.reference.sections import read_part
from tests.codec.reference.symbols import from_planes
from tests.codec.reference.token_order import coding_order
from tests.codec.vectors import (
    DTYPES,
    EXPECTED,
    FOLDER,
    LAYOUT,
    LOSSY,
    MANIFEST,
    NAMES,
    PARTS,
    PROFILE,
    SEEDS,
    STEP,
    golden_chunk,
    golden_codec,
)
from tests.predicting import VOCABULARY, predicting

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.entropy.token_classes import class_frequencies
from cuvee.codec.format.container import inspect, read_header, read_section
from cuvee.codec.profiles.class_predictor import Predictor
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.step_coding import StepCoding
from cuvee.codec.stages.stages import Stages
from cuvee.codec.support.arrays import I32, I64, U8
from cuvee.learning.calibrate import fit

TOKENS = 37
KEPT_DIGEST = "8803e8c1ee0e1e78ed081cf64cb14fac"
CLASSED_TOKENS, KEPT = 270, slice(None, None, 7)  # more than a window; which of them `expected` holds
# Many classes, in no order; one token is worth nothing.
WEIGHTS = [0.0 if t == 100 else 2.0 ** (7 * t % 12 - 6) for t in range(CLASSED_TOKENS)]


def converted(chunk: KVChunk, dtype: str) -> KVChunk:
    layout = replace(chunk.layout, dtype=dtype)
    kind = layout.torch_dtype
    return KVChunk([k.to(kind) for k in chunk.keys], [v.to(kind) for v in chunk.values], layout, chunk.start)


def digest(*parts: bytes) -> str:
    return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()


def tensor_digest(chunk: KVChunk) -> str:
    return digest(*(t.contiguous().view(torch.uint8).numpy().tobytes() for t in (*chunk.keys, *chunk.values)))


# Each id several times; some tokens of the sequence's start are sinks.
IDS = np.arange(TOKENS) * 7 % (VOCABULARY // 2)


def tokens_of(name: str) -> int:
    return CLASSED_TOKENS if name.startswith("classes") else TOKENS


def named_tensors(name: str, chunk: KVChunk) -> dict[str, torch.Tensor]:
    kept = KEPT if name.startswith("classes") else slice(None)
    tensors = {f"{name}.keys.{i}": k[kept].contiguous() for i, k in enumerate(chunk.keys)}
    return tensors | {f"{name}.values.{i}": v[kept].contiguous() for i, v in enumerate(chunk.values)}


@dataclass(frozen=True)
class Coded:
    """What a lossy section holds before any floating-point arithmetic."""

    levels: I32  # of the columns
    escapes: int
    streams: int
    wide: bool  # whether components have low bits of their own
    classes: U8  # of the tokens


def coded_sections(blob: bytes, codec: Codec, backend: Stages) -> list[Coded]:
    """What the sections hold, read step by step; and as the decoder of whole sections reads them."""
    header, family = read_header(blob), codec.profile.family
    learned = codec.profile.learned_for(header.token_id_bytes > 0)
    # Nothing is shrunk and every step is 1: coefficients are levels.
    flat = replace(family, quantizer=replace(family.quantizer, shrink=np.zeros_like(family.quantizer.shrink)))
    out = []
    for index, section in enumerate(StepCoding(learned, family, header.step_index).sections):
        data, plan = read_section(blob, header, index), copy(section.classed)
        plan.steps = np.ones_like(plan.steps)
        part = read_part(data, plan, header.tokens)
        classes = decode_classes(part.classes, section.class_table, header.tokens)
        columns = classes[coding_order(classes)]
        planes = rans_decode(part.streams, columns, plan, family.tables, part.tokens_per_stream)
        y = from_planes(planes, columns, part.escapes, plan, flat.quantizer)
        coding = coding_of([Planned(plan, section.class_ranks, section.class_table)], flat)
        indexed = backend.index_sections(coding, [(0, data)], header.tokens)
        (tile,) = backend.decode_sections(indexed, slice(0, header.tokens), torch.float32)
        assert torch.equal(tile.y[0, : len(y)], y) and not tile.y[0, len(y) :].any()
        wide, counts = bool(plan.shift[columns].any()), (len(part.escapes.index), len(part.streams.states))
        out.append(Coded(y.numpy().astype(np.int32), *counts, wide=wide, classes=classes))
    return out


def levels_digest(sections: list[Coded]) -> str:
    parts = []
    for section in sections:
        parts.append(struct.pack("<II", *section.levels.shape) + section.levels.astype("<i4").tobytes())
        parts.append(section.classes.tobytes())
    return digest(*parts)


def with_predictor(profile: Profile) -> Profile:
    """The profile with a predictor of token classes in its second section, and class tables in both."""
    predictor = Predictor(
        np.array([0, 1, 4], np.int32), np.array([2.0, 1.0, 0.25], np.float32), np.array([0.5, -0.25, 0.0], np.float32),
        np.array([0.125, 0.0, -0.25], np.float32), -0.125, 0.5, np.array([-2.0], np.float32),
        np.array([-1.0, -1.25, -1.5, 2.0], np.float32), np.empty(0, np.float32),
    )  # fmt: skip
    class_scale = np.array([40, 40, 30, 30, 20, 20, 10, 10, 0, 0, 0, -10, -10, -20, -20, -20], np.int16)
    freq = class_frequencies(np.array([1, 1, 2, 4, 8, 16, 32, 64, 64, 32, 32, 16, 8, 4, 2, 1]))
    first, second = (replace(section, class_freq=freq, class_scale=class_scale) for section in profile.learned)
    learned = (first, replace(second, predictor=predictor))
    return Profile(profile.layout, profile.group, profile.source, profile.family, learned)


def with_tokens(profile: Profile) -> Profile:
    """The profile with a token table; blobs without ids have scales of their own."""
    wide = predicting(profile)
    learned = tuple(replace(section, plain_scale=section.scale + np.int16(16)) for section in wide.learned)
    return Profile(
        wide.layout, wide.group, wide.source, wide.family, learned, token_table=wide.token_table
    )  # fmt: skip


def learned() -> Profile:
    """How the profile was made. Last bits of it differ between machines, so it is made once."""
    profile = fit(LAYOUT, [golden_chunk(seed, 96, 100 * (seed % 3)) for seed in range(15)], "layer")
    return with_tokens(with_predictor(profile))


def part_ids() -> I64:
    return np.arange(CLASSED_TOKENS) * 7 % (VOCABULARY // 2)


def encoded(name: str, profile: Profile) -> tuple[KVChunk, bytes]:
    """The chunk of a vector, and its blob of today."""
    chunk = converted(golden_chunk(SEEDS[name], tokens_of(name), 0, outlier=500.0), name.split("-")[1])
    chosen = with_classes(profile, WEIGHTS, keep_id=True) if name.startswith("classes") else profile
    ids = IDS if name.startswith("tokens") else None
    return chunk, golden_codec(name, chosen).encode(chunk.with_token_ids(ids))


def encoded_parts(profile: Profile) -> tuple[bytes, ...]:
    chosen = with_classes(profile, WEIGHTS, keep_id=True)
    chunk = golden_chunk(200, CLASSED_TOKENS, 0, outlier=500.0).with_token_ids(part_ids())
    return tuple(Codec(chosen, step=STEP, refinements=1, threads=1).encode_parts(chunk))


def regenerate() -> None:
    if not PROFILE.exists():
        learned().save(PROFILE)
    profile = Profile.load(PROFILE)
    for old in FOLDER.glob("*.bin"):
        old.unlink()
    manifest: dict[str, Any] = {"profile": profile.id.hex(), "vectors": {}}
    expected: dict[str, torch.Tensor] = {}
    for name in NAMES:
        codec = golden_codec(name, profile)
        chunk, blob = encoded(name, profile)
        (FOLDER / f"{name}.bin").write_bytes(blob)
        vector = {"blob": digest(blob)}
        back = codec.decode(blob)
        if name in LOSSY:
            vector["levels"] = levels_digest(coded_sections(blob, codec, get_stages("reference")))
            expected |= named_tensors(name, back)
        else:
            vector["tensors"] = tensor_digest(chunk)
        manifest["vectors"][name] = vector
    parts = encoded_parts(profile)
    for file, part in zip(PARTS, parts, strict=True):
        file.write_bytes(part)
    manifest["parts"] = [digest(part) for part in parts]
    for count in (1, 2):
        expected |= named_tensors(
            f"classes {count}", golden_codec("", profile).decode(parts[0], refinements=parts[1:count])
        )
    save_file(expected, EXPECTED)
    MANIFEST.write_text(json.dumps(manifest, indent=2) + "\n")


@dataclass(frozen=True)
class Golden:
    """The committed files."""

    profile: Profile
    manifest: dict[str, Any]
    expected: dict[str, torch.Tensor]

    def blob(self, name: str) -> bytes:
        return (FOLDER / f"{name}.bin").read_bytes()


@pytest.fixture(scope="module")
def golden(request: pytest.FixtureRequest) -> Golden:
    if request.config.getoption("--regenerate-golden"):
        assert not hasattr(request.config, "workerinput"), "regenerate in one process: without -n"
        regenerate()
    return Golden(Profile.load(PROFILE), json.loads(MANIFEST.read_text()), load_file(EXPECTED))


TRITON = pytest.param("triton", marks=pytest.mark.gpu)


@pytest.fixture(params=[*stage_names(), TRITON])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def decode(golden: Golden, name: str, backend: str) -> KVChunk:
    """A vector, on the CPU but where `triton` has a GPU."""
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    chunk = golden_codec(name, golden.profile, backend).decode(golden.blob(name), device=device)
    return KVChunk([k.cpu() for k in chunk.keys], [v.cpu() for v in chunk.values], chunk.layout, chunk.start)


def test_the_expected_tensors_are_those_of_the_last_version(golden: Golden) -> None:
    """Lossless tensors are compared with the chunks themselves; these are the lossy ones.

    The first section has no class predictor. Version 3 coded it without classes, so version 4 does otherwise.
    """
    changed = [name for name in golden.expected if name.endswith(".0") and name.startswith(("transform", "tokens"))]
    kept = sorted(name for name in golden.expected.keys() - changed if " " not in name)
    assert len(changed) == 12 and len(kept) == 24
    tensors = (golden.expected[name].contiguous().view(torch.uint8).numpy().tobytes() for name in kept)
    assert digest(*(name.encode() for name in kept), *tensors) == KEPT_DIGEST


def test_all_vectors_are_there_and_nothing_else(golden: Golden) -> None:
    files = {path.name for path in FOLDER.iterdir()}
    assert files == {PROFILE.name, MANIFEST.name, EXPECTED.name, *(f"{name}.bin" for name in NAMES)} | {
        file.name for file in PARTS
    }
    assert list(golden.manifest["vectors"]) == list(NAMES)
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 152_000


@pytest.mark.parametrize("name", NAMES)
def test_the_files_are_those_that_were_committed(golden: Golden, name: str) -> None:
    assert golden.profile.id.hex() == golden.manifest["profile"]
    assert digest(golden.blob(name)) == golden.manifest["vectors"][name]["blob"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_lossless_vectors_decode_to_the_same_bits(golden: Golden, dtype: str, backend: str) -> None:
    name = f"lossless-{dtype}"
    chunk = decode(golden, name, backend)
    assert tensor_digest(chunk) == golden.manifest["vectors"][name]["tensors"]


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("stages", stage_names())
def test_lossy_vectors_hold_the_same_levels(golden: Golden, name: str, stages: str) -> None:
    sections = coded_sections(golden.blob(name), golden_codec(name, golden.profile), get_stages(stages))
    assert levels_digest(sections) == golden.manifest["vectors"][name]["levels"]


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_vectors_decode_to_the_same_tensors_within_rounding(golden: Golden, name: str, backend: str) -> None:
    chunk = decode(golden, name, backend)
    # A few units in the last place of the dtype, at the size of a head's largest values. Products may be taken in fewer
    # bits, bfloat16 for such a cache and TF32 for one of float16: sums carry the rounding of every term then, of other
    # heads of the token, too.
    share = {"bfloat16": 2.0**-6, "float16": 2.0**-9, "float32": 2.0**-18}[name.split("-")[1]]
    if backend == "triton" and share < 2.0**-16:
        share = 2.0**-16  # its sums are in another order
    tensors = named_tensors(name, chunk)
    token = torch.stack([golden.expected[what].float().abs().amax((1, 2)) for what in tensors]).amax(0)
    for what, tensor in tensors.items():
        want = golden.expected[what]
        assert tensor.dtype == want.dtype and tensor.shape == want.shape
        head = want.float().abs().amax(-1, keepdim=True)
        short = name.endswith("bfloat16") or (name.endswith("float16") and backend == "triton")
        bound = share * (token[:, None, None] if short else head).clamp_min(1.0)
        assert ((tensor.float() - want.float()).abs() <= bound).all(), what


@pytest.mark.parametrize("stages", stage_names())
def test_a_base_and_its_refinement_decode_to_the_same_tensors(golden: Golden, stages: str) -> None:
    base, refinement = (file.read_bytes() for file in PARTS)
    assert [digest(base), digest(refinement)] == golden.manifest["parts"]
    infos = [inspect(base), inspect(refinement)]
    assert [info.kind for info in infos] == ["chunk", "refinement"] and [info.step for info in infos] == [
        4 * STEP,
        STEP,
    ]
    codec, chunk = golden_codec("", golden.profile, stages), golden_chunk(200, CLASSED_TOKENS, 0, outlier=500.0)
    errors, todays = [], encoded_parts(golden.profile)
    for count, refinements in ((1, ()), (2, (refinement,))):
        again = codec.decode(todays[0], refinements=todays[1:count])
        back = codec.decode(base, refinements=refinements)
        np.testing.assert_array_equal(back.token_ids, part_ids())
        for what, tensor in named_tensors(f"classes {count}", back).items():
            want = golden.expected[what]
            bound = 2.0**-18 * want.abs().amax(-1, keepdim=True).clamp_min(1.0)
            assert ((tensor - want).abs() <= bound).all(), what
        for today, committed in zip(again.values, back.values, strict=True):
            assert ((today - committed).abs() <= STEP * 2.0**-6).float().mean() > 0.99
        errors.append(sum(float((a - b).abs().median()) for a, b in zip(back.values, chunk.values, strict=True)))
    assert errors[1] < errors[0] / 2


@pytest.mark.parametrize("name", NAMES)
def test_todays_blobs_decode_as_well_as_the_committed_ones(golden: Golden, name: str) -> None:
    """On another CPU the last bits of sums differ, and a coefficient between two levels may take the other."""
    chunk, blob = encoded(name, golden.profile)
    back = golden_codec(name, golden.profile).decode(blob)
    assert len(blob) < 1.01 * len(golden.blob(name))
    if name not in LOSSY:
        assert tensor_digest(back) == tensor_digest(chunk)
        return
    exact, errors = named_tensors(name, chunk), []
    for tensors in (named_tensors(name, back), golden.expected):
        errors.append(sum(float((tensors[what].double() - exact[what].double()).square().sum()) for what in exact))
    assert errors[0] < 1.01 * errors[1]
