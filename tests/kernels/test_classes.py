"""Token classes on the device: tables, class streams, sorted columns, predictors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.codec.reference import rans
from tests.codec.reference.token_order import coding_order
from tests.kernels.coding import profile_of as profile_with
from tests.kernels.world import FAMILY, LAYOUT, STEP, mix, plan_of, profile_of
from tests.predicting import VOCABULARY

from cuvee.codec.entropy.token_classes import CLASSES, class_table
from cuvee.codec.errors import ProfileError
from cuvee.codec.format.streams import WINDOW
from cuvee.codec.profiles.class_predictor import finer_near_end
from cuvee.codec.profiles.profile import Profile
from cuvee.kernels.class_predictor import DevicePredictor
from cuvee.kernels.class_streams import sort_columns, write_classes
from cuvee.kernels.ops.arguments import ChunkBatch
from cuvee.kernels.plans import TransformPlan
from cuvee.kernels.workspace import running_offsets

CPU = torch.device("cpu")


def test_components_must_fall_with_the_class() -> None:
    scale = (-100 + 40 * np.arange(CLASSES)).astype(np.int16)
    rising = [replace(section, class_scale=scale) for section in profile_of("layer", top=6).learned]
    profile = Profile(LAYOUT, "layer", "fitted", FAMILY, tuple(rising), min_step_index=-640)
    with pytest.raises(ProfileError, match="coarser"):
        TransformPlan(profile, STEP, CPU, torch.float32)


# --- classes on the host


@pytest.mark.parametrize("kind", ["one", "each", "mixed"])
def test_class_streams_are_those_of_the_codec(kind: str, device: torch.device) -> None:
    plan = plan_of("unit", device)
    sizes = np.array([1, 63, 256, 257, 700])
    sections = np.arange(len(sizes)) % 2
    finest = plan.finest[0, sections]
    classes = [mix(size, kind, int(least), size) for size, least in zip(sizes.tolist(), finest, strict=True)]
    first, _ = running_offsets(sizes)
    words, fields = write_classes(np.concatenate(classes), first, sizes, plan.freq, sections)
    for job, (section, own) in enumerate(zip(sections, classes, strict=True)):
        want = rans.encode_classes(own, class_table(profile_of("unit").learned[section].class_freq))
        at = fields["class_words"][job]
        assert np.array_equal(words[at : at + fields["class_word_count"][job]], want.words)
        assert fields["class_state"][job] == want.states[0]
    columns, order, counts = sort_columns(np.concatenate(classes), first, sizes)
    for begin, own, count in zip(first, classes, counts, strict=True):
        at = slice(begin, begin + len(own))
        want_order = coding_order(own)
        assert np.array_equal(order[at] + np.arange(len(own)) // WINDOW * WINDOW, want_order)
        assert np.array_equal(columns[at], own[want_order])
        assert np.array_equal(count, np.bincount(own, minlength=CLASSES))


def _section_coefficients(plan: TransformPlan, x: torch.Tensor, section: int) -> list[torch.Tensor]:
    """All coefficients of each block, by the profile's own bases."""
    tiles = plan.geometry.tiles
    first, end = tiles.bounds[section], tiles.bounds[section + 1]
    order = torch.from_numpy(tiles.order[first:end]).long().to(x.device)
    basis = plan.profile.learned[section].basis
    values = torch.zeros(len(x), len(basis.mean), device=x.device)
    values[:, order[order >= 0]] = x[:, first:end][:, order >= 0]
    parts, column = [], 0
    for matrix in basis.forward:
        size = matrix.shape[1]
        parts.append(matrix.to(x.device) @ values[:, column : column + size].T)
        column += size
    return parts


# --- predictors


def test_offsets_are_those_of_the_predictor(device: torch.device) -> None:
    profile = profile_with("gqa", "head predictor")
    plan = TransformPlan(profile, STEP, device, torch.float32)
    predictor = DevicePredictor(plan.coding[0].sections, plan.geometry.tiles, device)
    x = 3 * torch.randn(12, plan.geometry.tiles.columns, generator=torch.Generator().manual_seed(1)).to(device)
    chunks = np.array([[7, 0, 0, 0], [5, 7, 1, 1]], np.int64)
    jobs, positions, levels = (torch.from_numpy(array.copy()).to(device) for array in predictor.inputs(chunks, [0, 30]))
    status = torch.zeros(len(jobs), dtype=torch.int32, device=device)
    batch = ChunkBatch(torch.from_numpy(chunks).to(device), status, len(profile.learned), 0, 7)
    found = predictor.offsets(x, jobs, batch, positions, levels)
    for row, section in enumerate(predictor.sections):
        own = profile.learned[section].predictor
        assert own is not None
        y = torch.cat(_section_coefficients(plan, x, int(section)))[torch.from_numpy(own.components).long()].cpu()
        first, second = finer_near_end(own.recency, 0, 7, 0), finer_near_end(own.recency, 1, 5, 30)
        assert float(first[-1]) > float(second[-1]) > 0
        want = torch.cat([own.offsets(y[:, :7], 0, 0, first), own.offsets(y[:, 7:], 1, 0, second)])
        torch.testing.assert_close(found[row].cpu(), want, rtol=1e-4, atol=1e-4)


def test_offsets_are_those_of_values_with_their_predictions(device: torch.device) -> None:
    profile = profile_with("gqa", "head predictor tokens")
    plan = TransformPlan(profile, STEP, device, torch.float32, True)
    predictor = DevicePredictor(plan.coding[0].sections, plan.geometry.tiles, device)
    x = 3 * torch.randn(12, plan.geometry.tiles.columns, generator=torch.Generator().manual_seed(1)).to(device)
    ids, sections = np.random.default_rng(0).integers(0, VOCABULARY, 12), range(len(profile.learned))
    assert plan.token_centers is not None
    arrays = plan.token_centers.lay_out([ids[:7], ids[7:]], [0, 1])
    sent = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    centers = plan.token_centers.centers(sent, sections)
    chunks = np.array([[7, 0, 0, 0], [5, 7, 1, 1]], np.int64)
    jobs, positions, levels = (torch.from_numpy(array.copy()).to(device) for array in predictor.inputs(chunks, [0, 0]))
    status = torch.zeros(len(jobs), dtype=torch.int32, device=device)
    batch = ChunkBatch(torch.from_numpy(chunks).to(device), status, len(sections), 0, 7)
    # Not rounded to bfloat16, as on the CPU.
    predicted = torch.zeros(len(arrays["position"]), plan.geometry.tiles.columns)
    for index, section in enumerate(plan.learned):
        own = slice(int(plan.geometry.tiles.bounds[index]), int(plan.geometry.tiles.bounds[index + 1]))
        token_map = section.token_map
        assert token_map is not None
        embedding = torch.from_numpy(arrays["embedding"] * arrays["row_scale"][:, None])
        exact = embedding @ (token_map.weights * token_map.scale)
        exact[torch.from_numpy(arrays["position"]) < len(section.basis.sinks)] = 0
        predicted[:, own] = plan.geometry.tiles.pack(exact, index)
    whole = x + predicted.to(device)[centers.rows.long()]
    found = predictor.offsets(x, jobs, batch, positions, levels, centers)
    plain = predictor.offsets(x, jobs, batch, positions, levels)
    torch.testing.assert_close(found, predictor.offsets(whole, jobs, batch, positions, levels), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, plain, atol=1e-2)
