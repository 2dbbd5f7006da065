"""When loads and blends pay: from which length on, what is tried although it looks too slow, and small pieces."""

from __future__ import annotations

import pytest

from cuvee.integrations.core.costs import prefill_quantities
from cuvee.integrations.vllm.decision import MIN_SAMPLES, TRIAL_EVERY, Kind, Pays, Restored, decoding_work

CHUNK = 256


def judge(token: float = 1e-3, looked_at: float = 0.0, steps: int = 8, constant: float = 0.0) -> Pays:
    """What was learned of computing from steps of several lengths, and nothing of restoring."""
    pays = Pays(CHUNK)
    for at in range(steps):
        x, y = prefill_quantities(1024 * (at % 3), 1024 * (at % 3) + 256 * (1 + at % 4))
        pays.prefill.observe(x, y, constant + token * x + looked_at * y)
    return pays


def load(pays: Pays, overhead: float, token: float, loads: int = 8) -> None:
    for at in range(loads):
        work = 256 * (1 + at % 4)
        pays.observe(Restored("load", work, 0.0, overhead + token * work))


def worth(pays: Pays, kind: Kind, start: int, stop: int, sizes: list[int], computed: float = 0.0) -> bool:
    """Whether a request is restored that is answered now."""
    verdict = pays.judge(kind, start, stop, sizes, computed)
    assert verdict is pays.judge(kind, start, stop, sizes, computed), "asking changes nothing"
    pays.note(kind, verdict)
    return verdict.restores


def pays_for(pays: Pays, start: int, stop: int, kind: Kind = "load") -> bool:
    """Whether a load pays whose work is that of its tokens."""
    return worth(pays, kind, start, stop, [CHUNK] * ((stop - start) // CHUNK) + [(stop - start) % CHUNK])


@pytest.mark.parametrize("constant", [0.0, 0.5])
def test_the_first_length_that_pays(constant: float) -> None:
    """What every step takes makes no load pay: the rest of the prompt is computed in a step of its own after it."""
    pays = judge(1e-3, constant=constant)
    load(pays, 0.1, 1e-4)
    assert pays_for(pays, 0, 160) and not pays_for(pays, 0, 80), "0.1 s / 0.9 ms, and the fixed share of a chunk"


def test_attention_over_a_long_prefix_makes_loads_pay() -> None:
    pays = judge(1e-4, 2e-7)
    load(pays, 0.02, 3e-4)
    assert not pays_for(pays, 0, 64) and pays_for(pays, 8192, 8256)


def test_what_a_load_has_to_decode() -> None:
    assert decoding_work([256] * 3, CHUNK) == 768 and decoding_work([1000], CHUNK) == 1000
    assert decoding_work([16], CHUNK) == 16 + 80 and decoding_work([256, 253], CHUNK) == 256 + 253 + 1
    pays = judge(1e-3)
    load(pays, 0.01, 5e-4)
    assert worth(pays, "load", 240, 512, [272]) and not worth(pays, "load", 240, 512, [1024]), "decoded in vain"


def test_loads_until_both_sides_are_known() -> None:
    few = judge(1e-5, steps=MIN_SAMPLES - 1)
    load(few, 1.0, 1.0)
    assert not few.knows("load") and pays_for(few, 0, 100)
    few = judge(1e-5)
    load(few, 1.0, 1.0, loads=MIN_SAMPLES - 1)
    assert not few.knows("load") and pays_for(few, 0, 100)


def test_one_in_so_many_declined_is_tried_and_notices_a_store_that_has_recovered() -> None:
    pays = judge(1e-4)
    load(pays, 1.0, 1e-3)
    answers = [pays_for(pays, 0, 512) for _ in range(3 * TRIAL_EVERY)]
    assert [at for at, tried in enumerate(answers, 1) if tried] == [TRIAL_EVERY, 2 * TRIAL_EVERY, 3 * TRIAL_EVERY]
    load(pays, 1e-4, 1e-6, loads=32)
    assert all(pays_for(pays, 0, 512) for _ in range(8))


def test_useless_blends_of_one_client_do_not_have_those_of_others_declined() -> None:
    """A thousand pieces of four tokens, and much text between them: each piece has its fixed cost."""
    useful, useless = ([256] * 4, 100.0), ([4] * 1000, 3000.0)
    pays = judge(1e-3)
    for _ in range(8):
        pays.observe(Restored("blend", decoding_work(useful[0], CHUNK), useful[1], 0.2))
    for _ in range(24):
        pays.observe(Restored("blend", decoding_work(useless[0], CHUNK), useless[1], 20.0))
    assert worth(pays, "blend", 0, 1200, *useful) and not worth(pays, "blend", 0, 7000, *useless)
    assert pays_for(pays, 0, 64), "nothing was measured of loads"
    for _ in range(32):
        pays.observe(Restored("blend", decoding_work(useless[0], CHUNK), useless[1], 0.5))
    assert worth(pays, "blend", 0, 7000, *useless), "they have become quicker"


def test_without_work_nothing_is_learned() -> None:
    pays = judge()
    pays.observe(Restored("load", 0, 0, 1.0))
    pays.observe(Restored("blend", 256, 0, 0.0))
    assert not pays.knows("load") and not pays.knows("blend")
