"""The planner's shortcuts find what trying everything finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.integrations.loading.driver import KL, SIZES, TOKENS, Drive, request

from cuvee.integrations.loading import ChunkParts, Compute, Part, plan
from cuvee.integrations.loading.state import Timeline

MB = 1e6


def random_load(seed: int) -> Drive:
    """Parts of two tiers, with a decoder that is sometimes the slower of the two."""
    random = np.random.default_rng(seed)
    own = tuple(
        ChunkParts(
            TOKENS,
            tuple(
                Part(int(size * random.uniform(0.5, 2)), kl, str(random.choice(["net", "disk"])))
                for size, kl in zip(SIZES, KL, strict=True)
            ),
        )
        for _ in range(8)
    )
    rates = 10 ** random.uniform(5.7, 6.5, size=40)
    deadline, kl_max, compute = float(random.uniform(0.7, 1.5)), (0.008, 0.02)[seed % 2], list(Compute)[seed // 2 % 2]
    return Drive(
        request(own, deadline, kl_max, compute),
        {"net": lambda now: float(rates[int(now / 0.1) % 40]), "disk": lambda now: 2 * MB},
        decode_seconds=0.05 if seed % 3 == 0 else 0.002,
    )


@pytest.mark.parametrize("seed", range(4))
def test_searches_agree_with_trying_every_number(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: Counter[str] = Counter()
    search, bases = plan._Tries.most, Timeline.loaded_bases

    def checked_search(
        self: Any, least: int, most: int, guess: int, arranged: Callable[[int], tuple[list[int], list[float]]]
    ) -> Any:
        count, found = search(self, least, most, guess, arranged)
        whole = len(arranged(len(SIZES) * 8)[0])
        in_time = [n for n in range(least, whole + 1) if self._try(*arranged(n)).in_time]
        assert count == max(in_time, default=least) and found == self._try(*arranged(count))
        tried["number"] += least < count < whole
        return count, found

    def checked_bases(self: Timeline, lacking: list[int], most: int, slower: float = 1.0) -> list[float]:
        ends = bases(self, lacking, most, slower)
        for m in range(most + 1):
            own = [number for number in lacking if number < m * len(SIZES)]
            assert ends[m] == pytest.approx(self.loaded(m, own, self.arrivals(own), slower)[1], rel=1e-12)
        tried["bases"] += len(lacking)
        return ends

    monkeypatch.setattr(plan._Tries, "most", checked_search)
    monkeypatch.setattr(Timeline, "loaded_bases", checked_bases)
    random_load(seed).run()
    assert tried["number"] and tried["bases"], "not only what is clear without a search"


@pytest.mark.parametrize("seed", range(4))
def test_what_cannot_be_better_need_not_be_planned(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    choose, several = plan._Planning._choose, 0

    def checked(self: Any, fits: list[int], before: int | None, in_time: bool) -> plan.Plan:
        nonlocal several
        chosen = choose(self, fits, before, in_time)
        losses = {m: self._refined(m, in_time).kl for m in fits}
        best = min(fits, key=lambda m: (losses[m], -m))
        kept = before in losses and losses[best] >= plan._WORTH_CHANGING * losses[before]
        assert chosen.chunks == (before if kept else best)
        several += len(fits) > 1
        return chosen

    monkeypatch.setattr(plan._Planning, "_choose", checked)
    drive = random_load(seed)
    drive.asked = request(drive.asked.chunks, drive.asked.deadline + 0.3, compute=Compute.EXACT)
    drive.run()
    assert several
