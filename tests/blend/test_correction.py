"""`Correction` against Gaussian conditioning written out, and which tokens `corrections` assigns to which block."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cuvee.blend.correction import Correction, Window, corrections
from cuvee.blend.recompute import Placed
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.rope import rotate, unrotate

HEADS, DIM, VALUE = 2, 8, 6
ROPE = Rope(inv_freq=(1.0, 0.3, 0.1, 0.02))
CPU = torch.device("cpu")
F64 = npt.NDArray[np.float64]


def layout(rope: Rope | None = ROPE) -> KVLayout:
    return KVLayout("mine", (LayerLayout(HEADS, DIM, VALUE, rope),) * 2, "float32", max_positions=None)


def covariance(left: Sequence[int], right: Sequence[int]) -> F64:
    """The model of the module's docstring, number by number."""
    found = np.empty((len(left), len(right)))
    for i, s in enumerate(left):
        for j, t in enumerate(right):
            common = 0.27 * np.exp(-((np.log((s + 2) / (t + 2)) / 3.2) ** 2) / 2)
            alike = common + 0.19 * np.exp(-abs(s - t) / 3) + (0.54 if s == t else 0)
            found[i, j] = (s + 2) ** -0.265 * (t + 2) ** -0.265 * alike
    return found


def expected(observed: Sequence[int], corrected: Sequence[int], changes: F64) -> tuple[F64, F64, F64]:
    """Estimates before they are scaled, and by leaving each observed token out: predictions and truth, in units."""
    means = covariance(corrected, observed) @ np.linalg.solve(covariance(observed, observed), changes)
    predicted = np.zeros_like(changes)
    for at in range(len(observed)):
        others = [index for index in range(len(observed)) if index != at]
        if others:
            there = [observed[index] for index in others]
            cross = covariance([observed[at]], there)
            predicted[at] = (cross @ np.linalg.solve(covariance(there, there), changes[others]))[0]
    units = (np.array(observed)[:, None] + 2.0) ** -0.265
    return means, predicted / units, changes / units


@pytest.mark.parametrize(
    ("observed", "like"), [([4], 3.0), ([0, 1, 30], 0.0), ([7, 8, 9, 11, 200], 0.7), ([7, 8, 9, 11, 200], 3.0)]
)
def test_estimates_are_conditional_means_scaled_by_what_leaving_out_predicts(observed: list[int], like: float) -> None:
    generator = np.random.default_rng(len(observed))
    corrected, begin = [2, 10, 31, 400], 50
    shape = (len(observed), HEADS * VALUE)
    changes = generator.normal(size=shape) + like
    keys = torch.zeros(len(observed), HEADS, DIM)
    values = torch.tensor(changes, dtype=torch.float32).view(len(observed), HEADS, VALUE)
    window = Window(torch.tensor(observed) + begin, torch.tensor(corrected) + begin, begin)
    no_keys, found = Correction(layout(), [window], CPU).estimate(1, keys, values)
    means, predicted, truth = (x.reshape(-1, HEADS, VALUE) for x in expected(observed, corrected, changes))
    energy = (predicted**2).sum((0, 2))
    agreeing = (predicted * truth).sum((0, 2))
    trust = len(observed) / (len(observed) + 8)
    share = trust * np.clip(np.divide(agreeing, energy, out=np.zeros(HEADS), where=energy > 0), 0, 1)[:, None]
    assert np.allclose(found.numpy(), share * means, atol=1e-5)
    assert not no_keys.any()
    if len(observed) == 1:
        assert not found.any(), "nothing says whether tokens of this chunk change alike"
    elif like == 3:
        assert (share > 0.9 * trust).all()


@pytest.mark.parametrize(
    "rope",
    [None, ROPE, Rope((0.5, 0.1), attention_scaling=1.3), Rope((1.0, 0.2), interleaved=True)],
    ids=["none", "whole", "scaled-half", "interleaved-half"],
)
def test_keys_change_alike_where_their_positions_are_taken_off(rope: Rope | None) -> None:
    observed, corrected = torch.tensor([40, 41, 47, 90]), torch.tensor([43, 60, 300])
    common = torch.randn(1, HEADS, DIM, generator=torch.Generator().manual_seed(1))

    def at(positions: torch.Tensor) -> torch.Tensor:
        return rotate(common.repeat(len(positions), 1, 1), rope, positions)

    correction = Correction(layout(rope), [Window(observed, corrected, 33)], CPU)
    keys, values = correction.estimate(0, at(observed), torch.zeros(4, HEADS, VALUE))
    assert not values.any()
    means, predicted, truth = expected([7, 8, 14, 57], [10, 27, 267], np.ones((4, 1)))
    shares = means * np.clip((predicted * truth).sum() / (predicted**2).sum(), 0, 1) * 4 / 12 / 2
    assert 1 / 6 > shares[0] > shares[1] > shares[2] > 0.03
    multiple = torch.tensor(shares, dtype=torch.float32)[:, :, None] * common
    assert torch.allclose(unrotate(keys, rope, corrected), multiple, atol=1e-5)


NOTHING: tuple[list[int], list[int]] = ([], [])

# Which tokens --------------------------------------------------------------------------------------------------------


def placed(text: str, known: int = 0) -> Placed:
    """A prompt by one letter per token: capitals are tokens of exact chunks, "." is text, other letters are chunks."""
    segment = torch.tensor([0, *(a != b for a, b in pairwise(text))]).cumsum(0)
    starts = torch.tensor([int((segment == each).nonzero()[0]) for each in range(int(segment[-1]) + 1)])
    offset = torch.arange(len(text)) - starts[segment]
    letters = list(text)
    cached = torch.tensor([letter != "." for letter in letters])
    leading = torch.tensor([letter.isupper() for letter in letters])
    return Placed(torch.zeros(len(text)), segment, offset, cached, leading, torch.arange(len(text)) < known, len(text))


def assigned(text: str, *blocks: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Observed and corrected tokens of each block."""
    found = corrections(layout(), placed(text), [torch.tensor(block, dtype=torch.int64) for block in blocks], CPU)
    return [
        (
            [at for each in group for at in each.observed.tolist()],
            [at for each in group for at in each.corrected.tolist()],
        )
        for group in found
    ]


def test_the_other_tokens_of_chunks_with_recomputed_tokens_are_corrected() -> None:
    assert assigned("..aaaaa.bbbb.ccc.", [0, 1, 3, 4, 7, 12, 14, 16]) == [([3, 4, 14], [2, 5, 6, 13, 15])]


def test_exact_chunks_and_chunks_that_are_computed_whole_are_left_alone() -> None:
    assert assigned("AAAA.bbb.", [1, 4, 5, 6, 7, 8]) == [NOTHING]


def test_each_token_is_corrected_once_and_before_a_later_token_attends_to_it() -> None:
    #       0123456789
    text = ".aaaaaaaaa.bbbb."
    blocks = [[0, 3], [6, 7], [10, 12, 15]]
    found = assigned(text, *blocks)
    assert found == [([3], [1, 2]), ([6, 7], [4, 5, 8, 9]), ([12], [11, 13, 14])]
    corrected = [token for _, tokens in found for token in tokens]
    assert sorted(corrected) == sorted(set(corrected))


def test_a_block_without_tokens_corrects_nothing() -> None:
    assert assigned(".aaaa.", [], [2], []) == [NOTHING, ([2], [1, 3, 4]), NOTHING]
    assert assigned(".aaaa.", []) == [NOTHING]


def test_a_long_chunk_is_corrected_in_windows_of_512_tokens() -> None:
    text = "a" * 1300
    computed = [10, 20, 700, 701, 1200]
    ((first, second),) = corrections(layout(), placed(text), [torch.tensor(computed)], CPU)
    assert first.observed.tolist() == computed[:4] and second.observed.tolist() == [1200]
    assert first.corrected.tolist() == [at for at in range(1024) if at not in computed]
    values = torch.zeros(4, HEADS, VALUE)
    values[:2] = 1
    _, added = first.estimate(0, torch.zeros(4, HEADS, DIM), values)
    assert added[:510].all() and not added[510:].any()


# From block to block -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "blocks",
    [
        [[0, 3], [6, 7], [10, 12, 15]],
        [[0, 1, 2, 3], [5], [8, 12]],  # the first block computes tokens of the chunk and has none to correct
        [[2], [], [3], [9, 11], [13]],
    ],
)
def test_a_token_learns_from_all_tokens_of_its_chunk_up_to_its_block(blocks: list[list[int]]) -> None:
    text = ".aaaaaaaaa.bbbb."
    generator = torch.Generator().manual_seed(4)
    keys, values = (torch.randn(len(text), HEADS, size, generator=generator) + 2 for size in (DIM, VALUE))
    so_far: list[int] = []
    learned = 0
    found = corrections(layout(), placed(text), [torch.tensor(block, dtype=torch.int64) for block in blocks], CPU)
    for block, of_block in zip(blocks, found, strict=True):
        so_far += block
        for each in of_block:
            added = each.estimate(1, keys[each.observed], values[each.observed])
            for row, at in enumerate(each.corrected.tolist()):
                known = torch.tensor([other for other in so_far if text[other] == text[at]])
                alone = Correction(layout(), [Window(known, torch.tensor([at]), text.index(text[at]))], CPU)
                expected = alone.estimate(1, keys[known], values[known])
                assert all(torch.allclose(x[row], y[0], atol=1e-6) for x, y in zip(added, expected, strict=True))
                learned += bool(expected[1].any()) and not set(known.tolist()) <= set(block)
    assert learned, "from another block"


def test_no_more_than_one_window_is_carried_from_block_to_block() -> None:
    """The changes of its recomputed tokens, and nothing else that was in their block."""
    text = "a" * 1300 + "b" * 100
    chosen = torch.arange(0, 1400, 2)
    found = corrections(layout(), placed(text), list(chosen.split(48)), CPU)
    values_per_token = HEADS * (DIM + VALUE)
    most = 0
    for of_block in found:
        for each in of_block:
            for layer in range(2):
                each.estimate(layer, *(torch.randn(len(each.observed), HEADS, size) for size in (DIM, VALUE)))
        carried = [x for all_of in found for each in all_of for window in each.windows for x in window.changes.values()]
        stored = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in carried}
        most = max(most, sum(stored.values()))
        ends = int(of_block[-1].observed[-1]) + 1
        begins = ends - ends % 512 if ends <= 1300 else 1300
        assert sum(stored.values()) in (0, 2 * 4 * values_per_token * len(range(begins, ends, 2)))
    assert 256 - 48 < most / (2 * 4 * values_per_token) < 256
    assert not carried
