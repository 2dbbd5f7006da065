"""Centers of tokens on the device: bit by bit what the CPU subtracts and adds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.conftest import fitted_profile
from tests.predicting import VOCABULARY, predicting, with_sinks

from cuvee.kernels import centers as module
from cuvee.kernels.centers import Centers
from cuvee.kernels.plans import TransformPlan


def runs() -> list[tuple[npt.NDArray[np.int64], int]]:
    """Runs from the first position on, from one amid the sinks, and from one behind them; ids occur several times."""
    rng = np.random.default_rng(0)
    return [(rng.integers(0, VOCABULARY // 4, tokens), start) for tokens, start in ((9, 0), (40, 2), (5, 1000))]


def centers_of(plan: TransformPlan, sections: range) -> Centers:
    assert plan.token_centers is not None
    ids, starts = zip(*runs(), strict=True)
    arrays = plan.token_centers.lay_out(ids, starts)
    assert len(arrays["embedding"]) < len(arrays["rows"]) == sum(map(len, ids))
    sent = {name: torch.from_numpy(array).to(plan.device) for name, array in arrays.items()}
    return plan.token_centers.centers(sent, sections)


@pytest.mark.parametrize(
    ("name", "group", "columns"),
    [("irregular", "layer", 48), ("gqa", "heads:2", 48), ("bfloat16", "layers:2", 1024)],
)
def test_centers_are_those_of_the_cpu(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, name: str, group: str, columns: int
) -> None:
    monkeypatch.setattr(module, "BLOCK_COLUMNS", columns)
    profile = with_sinks(predicting(fitted_profile(name, group)))
    plan = TransformPlan(profile, 0, device, torch.float32, True)
    found = centers_of(plan, range(len(profile.sections)))
    rows, tiles, first = found.rows.cpu().long(), plan.geometry.tiles, 0
    for ids, start in runs():
        at = slice(first, first + len(ids))
        for index, section in enumerate(profile.learned):
            own = slice(int(tiles.bounds[index]), int(tiles.bounds[index + 1]))
            predictions = profile.predictions[index].of(ids, start)
            predicted = predictions.rows[torch.from_numpy(predictions.index)]
            want = section.basis.means(start, slice(0, len(ids))) + predicted.float()
            assert torch.equal(found.table.cpu()[rows[at], own], tiles.pack(want, index))
        first = at.stop


def test_sinks_are_finite_whatever_is_predicted(device: torch.device) -> None:
    """A profile may be forged: what overflows stays with the tokens that are predicted."""
    profile = with_sinks(predicting(fitted_profile("gqa", "layer")))
    for section in profile.learned:
        assert section.token_map is not None
        section.token_map.scale.fill_(3e38)
    plan = TransformPlan(profile, 0, device, torch.float32, True)
    found = centers_of(plan, range(len(plan.learned)))
    assert torch.equal(found.table[found.rows[0].long()], plan.means[0])
    assert not found.table.isfinite().all()
