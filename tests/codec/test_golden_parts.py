"""A base and its refinements, written once and kept: every later version must read them, to the same coefficients.

`golden/profile.safetensors` has no nested family, so these parts hold the built-in one's tables. Coefficients are one
product of a level and its step, the same on every machine. What `test_golden.py` says of changes holds here, too:
`pytest tests/codec/test_golden_parts.py --regenerate-golden` writes the parts anew.
"""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.classed import with_classes
from tests.codec.vectors import PROFILE, golden_chunk

from cuvee.codec.codec import Codec
from cuvee.codec.format.container import inspect, read_header, read_section
from cuvee.codec.profiles.nested_coding import NestedCoding
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.stages.implementations import get_stages, stage_names

FOLDER = Path(__file__).parent / "golden_parts"
MANIFEST = FOLDER / "manifest.json"
FILES = [FOLDER / f"{number}.bin" for number in range(3)]
TOKENS, STEP = 270, 2.0**-1
WEIGHTS = [0.0 if t == 100 else 2.0 ** (7 * t % 12 - 6) for t in range(TOKENS)]
IDS = np.arange(TOKENS) * 7 % 64


def coefficients_digest(profile: Profile, parts: list[bytes], stages: str) -> str:
    """The digest of the coefficients of all sections, with the order and the classes of their columns."""
    headers = [read_header(part) for part in parts]
    coding = NestedCoding(profile.learned_for(True), profile.nested, headers[0].step_index, len(parts) - 1)
    sections = [
        (index, [read_section(part, header, index) for part, header in zip(parts, headers, strict=True)])
        for index in range(len(profile.sections))
    ]
    use, whole = get_stages(stages), slice(0, TOKENS)
    digest = hashlib.blake2b(digest_size=16)
    if len(parts) == 1:
        bases = [(index, data[0]) for index, data in sections]
        tiles = use.decode_sections(use.index_sections(coding.base, bases, TOKENS), whole, torch.float32)
    else:
        tiles = use.decode_refined(use.index_refined(coding, sections, TOKENS), whole, torch.float32)
    for tile in tiles:
        assert tile.classes is not None
        digest.update(tile.order.astype("<i8").tobytes() + tile.classes.tobytes())
        digest.update(tile.y.numpy().astype("<f4").tobytes())
    return digest.hexdigest()


def regenerate() -> None:
    FOLDER.mkdir(exist_ok=True)
    profile = Profile.load(PROFILE)
    chunk = golden_chunk(200, TOKENS, 0, outlier=500.0)
    chosen = with_classes(profile, WEIGHTS, keep_id=True)
    parts = Codec(chosen, step=STEP, refinements=2).encode_parts(chunk, tokens=IDS)
    for file, part in zip(FILES, parts, strict=True):
        file.write_bytes(part)
    manifest = {
        "parts": [hashlib.blake2b(part, digest_size=16).hexdigest() for part in parts],
        "coefficients": [coefficients_digest(profile, list(parts[: 1 + n]), "reference") for n in range(3)],
    }
    MANIFEST.write_text(json.dumps(manifest, indent=2) + "\n")


@pytest.fixture(scope="module")
def parts(request: pytest.FixtureRequest) -> list[bytes]:
    if request.config.getoption("--regenerate-golden"):
        assert not hasattr(request.config, "workerinput"), "regenerate in one process: without -n"
        regenerate()
    return [file.read_bytes() for file in FILES]


def test_the_files_are_those_that_were_committed(parts: list[bytes]) -> None:
    manifest = json.loads(MANIFEST.read_text())
    assert [hashlib.blake2b(part, digest_size=16).hexdigest() for part in parts] == manifest["parts"]
    infos = [inspect(part) for part in parts]
    assert [(info.scheme, info.is_base, info.tokens) for info in infos] == [
        ("transform", True, TOKENS), ("refinement", False, TOKENS), ("refinement", False, TOKENS),
    ]  # fmt: skip


@pytest.mark.parametrize("backend", stage_names())
def test_parts_hold_the_same_coefficients(parts: list[bytes], backend: str) -> None:
    profile, manifest = Profile.load(PROFILE), json.loads(MANIFEST.read_text())
    found = [coefficients_digest(profile, parts[: 1 + known], backend) for known in range(3)]
    assert found == manifest["coefficients"]


def test_the_parts_exercise_the_format(parts: list[bytes]) -> None:
    """Escapes in every part, many classes, low bits in the base, and a component that begins in each refinement."""
    profile = Profile.load(PROFILE)
    for part in parts:
        sections = [read_section(part, read_header(part), index) for index in range(len(profile.sections))]
        assert any(int.from_bytes(section[4:8], "little") for section in sections)
    coding = NestedCoding(profile.learned_for(True), profile.nested, read_header(parts[0]).step_index, 2)
    depths = [[int(own.classed.rows.sum()) for own in section.parts] for section in coding.sections]
    assert any(before < middle < after for before, middle, after in depths), depths
    assert any(section.parts[0].classed.shift.any() for section in coding.sections)
    codec, chunk = Codec(profile, step=STEP), golden_chunk(200, TOKENS, 0, outlier=500.0)
    errors = []
    for known in range(3):
        back = codec.decode(parts[0], refinements=parts[1 : 1 + known])
        np.testing.assert_array_equal(back.token_ids, IDS)
        errors.append(sum(float((a - b).abs().median()) for a, b in zip(back.values, chunk.values, strict=True)))
    assert all(finer < coarser / 1.5 for coarser, finer in pairwise(errors))
