"""Turn moments into a profile: bases, scales, classes and entropy tables of each section."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from cuvee.codec.entropy.family import deviation_of, fit_family, scale_codes, scale_index
from cuvee.codec.entropy.token_classes import class_step_index
from cuvee.codec.errors import ProfileError
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.block_map import BlockMap
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.section_basis import SectionBasis, eigenbasis
from cuvee.codec.profiles.section_profile import SectionProfile
from cuvee.codec.support.arrays import F32, I16
from cuvee.codec.support.steps import OCTAVE, step_value
from cuvee.learning.class_predictor import TokenSample, learn_classes, learn_predictors
from cuvee.learning.moments import SINK_EXCESS, SINKS, Moments
from cuvee.learning.run import Run
from cuvee.learning.token_model import TokenModel

FAMILY_VALUES = 2_000_000  # coefficients per step that the tables are fitted on
FAMILY_STEPS = tuple(range(-7 * OCTAVE, OCTAVE + 1, OCTAVE))
MIN_STEP_INDEX = -8 * OCTAVE


def build_profile(
    layout: KVLayout,
    group: str,
    source: str,
    moments: list[Moments],
    metrics_of: Callable[[Moments], list[torch.Tensor]],
    model: str | None,
    tokens: TokenModel | None = None,
    run: Run | None = None,
) -> Profile:
    """Learn bases, scales, sinks and tables from the sums; with `tokens`, those of what tokens do not predict."""
    run = run or Run(shown=False)
    bases, deviations = [], []
    for section in run.stage("learning bases", moments):
        pairs = zip(section.covariances(), metrics_of(section), strict=True)
        maps = []
        for covariance, metric in pairs:
            inverse, deviation = eigenbasis(covariance, metric)
            maps.append((inverse.cpu(), deviation.cpu()))
        section.to_cpu()
        bases.append(maps)
        deviations.append([deviation for _, deviation in maps])
    # Step 1 is the root mean square of the coefficients, so that steps are comparable between profiles.
    everything = torch.cat([d for section in deviations for d in section])
    unit = float(everything.square().mean().sqrt())
    if not 0 < unit < float("inf"):
        raise ProfileError("samples: must vary, and the loss must depend on them, or there is nothing to learn")
    built = [base_section(m, maps, unit) for m, maps in zip(moments, bases, strict=True)]
    if all(run.gradient is not None for m in moments for run in m.sample):
        built, samples = _with_classes(moments, built, layout, tokens, run)
    else:
        samples = _family_samples(moments, built)
    family = fit_family(samples, FAMILY_STEPS, track=lambda rounds: run.stage("learning tables", rounds))
    if tokens is not None:
        built = [with_tokens(section, tokens, index) for index, section in enumerate(built)]
    return Profile(
        layout, group, source, family, tuple(built), min_step_index=MIN_STEP_INDEX, model=model,
        token_table=None if tokens is None else tokens.table, text_tokens=moments[0].count,
    )  # fmt: skip


def base_section(moments: Moments, maps: list[tuple[torch.Tensor, torch.Tensor]], unit: float) -> SectionProfile:
    """Return a section without predictor: its mean, sinks and maps, of which `maps` are the inverse and the deviations
    of each block, and `unit` the deviation that becomes step 1.
    """
    blocks, scales = [], []
    for inverse, deviation in maps:
        block, block_scale = _rounded(inverse * unit, deviation / unit)
        blocks.append(block)
        scales.append(block_scale)
    mean = moments.mean().float()
    scale = np.concatenate(scales)
    basis = SectionBasis(mean, mean.new_zeros(0, len(mean)), tuple(blocks))
    # A leading position gets a separate mean if that mean is farther out than the spread of ordinary tokens.
    usable = 0 if not len(scale) else int((moments.sink_count >= 2).cumprod(0).sum())
    sink_means = (moments.sink_total[:usable] / moments.sink_count[:usable, None]).float()
    everything = slice(0, usable)
    if usable:
        energy = np.square(deviation_of(scale)).sum()
        excess = basis.analyze(sink_means, 1 << 30, everything, basis.block_ranks).square().sum(0).numpy() / energy
        sinks = 1 + int(np.flatnonzero(excess > SINK_EXCESS)[-1]) if (excess > SINK_EXCESS).any() else 0
        basis = SectionBasis(mean, sink_means[:sinks].contiguous(), tuple(blocks))
    return SectionProfile(basis, scale)


def _rounded(inverse: torch.Tensor, deviation: torch.Tensor) -> tuple[BlockMap, I16]:
    """Return a map, rounded, and the scales of its components, which the rounding makes less different."""
    block = BlockMap.of(inverse, _coded(scale_index(deviation.numpy())))
    if not block.rank:
        return block, np.zeros(0, np.int16)
    leaks = torch.linalg.solve(block.square(), inverse)  # from the exact components to those of the rounded map
    actual = (leaks.square() @ deviation.square()).sqrt()
    scale = _coded(_falling(scale_index(actual.numpy())))
    return replace(block, rank=len(scale)), scale


def _coded(scale: I16) -> I16:
    """Return the scales of the components that are coded at any step, of falling ones."""
    return scale[: int((scale_codes(scale, MIN_STEP_INDEX) >= 0).sum())]


def _falling(scale: I16) -> I16:
    """Return the least scales that are not below these and never rise."""
    falling: I16 = np.maximum.accumulate(scale[::-1])[::-1]
    return falling


def with_tokens(section: SectionProfile, tokens: TokenModel, index: int) -> SectionProfile:
    """Add the token map to a section, and the scales of its components where no tokens are known."""
    # What is predicted and what is not are uncorrelated, so their variances add up.
    predicted = tokens.spread(index, section.basis).square().sum(0).numpy()
    variance = np.square(deviation_of(section.scale)) + predicted
    scale, first = scale_index(np.sqrt(variance)), 0
    for rank in section.basis.block_ranks:  # they must fall, as those of the whole do
        scale[first : first + rank] = _falling(scale[first : first + rank])
        first += rank
    return replace(section, token_map=tokens.maps[index], plain_scale=scale)


def _with_classes(
    moments: list[Moments],
    sections: list[SectionProfile],
    layout: KVLayout,
    tokens: TokenModel | None,
    run: Run,
) -> tuple[list[SectionProfile], list[tuple[F32, I16]]]:
    """Add predictors and class tables to the sections; return them and one (coefficients, scales) pair per class."""
    # A section that the loss does not depend on has no components, and its predictor would have no input.
    coded = [i for i, section in enumerate(sections) if len(section.scale)]
    samples = [_token_sample(moments[i], sections[i], i, tokens) for i in run.stage("learning classes", coded)]
    scales = [sections[i].scale for i in coded]
    predictors = learn_predictors(samples, scales, [len(moments[i].section.layers(layout)) for i in coded])
    wanted = max(FAMILY_VALUES // max(sum(map(len, scales)), 1), 64)
    out, pairs = list(sections), []
    for i, sample, predictor in zip(coded, samples, predictors, strict=True):
        section = sections[i]
        classes, frequencies, class_scale = learn_classes(sample, predictor, section.scale)
        out[i] = replace(section, predictor=predictor, class_freq=frequencies, class_scale=class_scale)
        stride = max(len(classes) // wanted, 1)
        y, classes = sample.y[:, ::stride], classes[::stride]
        for k in np.unique(classes):
            # Like the quantizer, the family sees coefficients divided by the step of their class.
            units = class_step_index(0, int(k))
            scale = (section.scale.astype(np.int32) + int(class_scale[k]) - units).astype(np.int16)
            pairs.append((y[:, classes == k] / np.float32(step_value(units)), scale))
    return out, pairs


def _token_sample(moments: Moments, section: SectionProfile, index: int, tokens: TokenModel | None) -> TokenSample:
    """Compute the coefficients of the sampled tokens and the costs of errors on them."""
    sinks = len(section.basis.sinks)
    ys, wholes, energies, distances = [], [], [], []
    sink_energy, sink_count = np.zeros(sinks, np.float32), np.zeros(sinks, np.float32)
    for run in moments.sample:
        x, predicted = run.x, None
        if tokens is not None and run.token_ids is not None:
            predicted = tokens.predicted(index, run.token_ids)
            x = x.clone()
            x[sinks:SINKS] -= predicted[sinks:SINKS]  # positions that did not become sinks
        y, z = _coefficients(section, run.start, x), _pulled_back(section, run.gradient)
        whole = y
        if predicted is not None:
            whole = y + section.basis.coefficients(predicted, section.basis.block_ranks).numpy()
        energy = z.square().sum(1).numpy()
        leading = max(min(sinks - run.start, len(run.x)), 0)
        sink_energy[run.start : run.start + leading] += energy[:leading]
        sink_count[run.start : run.start + leading] += 1
        ys.append(y[:, leading:])
        wholes.append(whole[:, leading:])
        energies.append(energy[leading:])
        distances.append(np.arange(run.length, 0, -1)[leading : len(run.x)])
    joined = np.concatenate(ys, axis=1)
    whole = joined if tokens is None else np.concatenate(wholes, axis=1)
    means: F32 = (sink_energy / np.maximum(sink_count, 1)).astype(np.float32)
    return TokenSample(joined, whole, np.concatenate(energies), np.concatenate(distances), means, sink_count)


def _pulled_back(section: SectionProfile, gradient: torch.Tensor | None) -> torch.Tensor:
    """Map gradients `[t, N]` to the section's leading coordinates, `[t, K]`."""
    if gradient is None:
        raise ProfileError("samples: must have gradients")
    parts, column = [], 0
    for inverse in section.basis.inverse:
        size, rank = inverse.shape
        # Components below the usual steps are never coded, so the quantizer does not cause their errors.
        parts.append(gradient[:, column : column + size].float() @ inverse[:, : max(rank // 4, min(rank, 1))])
        column += size
    return torch.cat(parts, dim=1)


def _coefficients(section: SectionProfile, start: int, x: torch.Tensor) -> F32:
    y: F32 = section.basis.analyze(x, start, slice(0, len(x)), section.basis.block_ranks).numpy()
    return y


def _family_samples(moments: list[Moments], sections: list[SectionProfile]) -> list[tuple[F32, I16]]:
    rows = sum(len(section.scale) for section in sections)
    wanted = max(FAMILY_VALUES // rows, 64)
    out = []
    for sums, section in zip(moments, sections, strict=True):
        available = sum(len(run.x) for run in sums.sample)
        stride = max(available // wanted, 1)
        y = np.concatenate([_coefficients(section, run.start, run.x)[:, ::stride] for run in sums.sample], axis=1)
        out.append((y, section.scale))
    return out
