"""Learning without an engine: what is planned, what is summed, and what becomes of good, late and damaged sums."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.stores.redis_server import wait_until
from tests.integrations.vllm.engines import save_tiny_model
from tests.integrations.vllm.sides import LAYOUT, TENANT
from transformers import AutoConfig, AutoModelForCausalLM

from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.learning.running_moments import RunningMoments
from cuvee.codec.models.fingerprint import model_fingerprint
from cuvee.codec.paged import PagedCache
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.token_ids import NO_TOKEN
from cuvee.integrations.checkpoint import WeightFingerprints
from cuvee.integrations.guard import Guard
from cuvee.integrations.options import CodingOptions
from cuvee.integrations.profile_collection.collection import ProfileCollection
from cuvee.integrations.vllm import scheduler_learn, worker_learn
from cuvee.integrations.vllm.connector_config import Options
from cuvee.integrations.vllm.learning import Learning
from cuvee.integrations.vllm.messages import Entry, Save, SumsPiece
from cuvee.integrations.vllm.metrics import Recorder
from cuvee.integrations.vllm.scheduler_learn import ProfileLearner
from cuvee.integrations.vllm.worker_learn import ENTRIES_PER_REQUEST, TrafficSums

Contained = list[tuple[str, BaseException]]
TOKENS = 64  # of an entry
IDS = [index % 50 for index in range(TOKENS)]
WEIGHTS = "a1" * 16
SLOTS = torch.arange(TOKENS)


def learning(place: str = "/nowhere", shards: int = 1) -> Learning:
    embedding = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    return Learning(place, LAYOUT, shards, "heads:1" if shards > 1 else "layer", embedding, WEIGHTS)


def copied(layout: KVLayout, seed: int = 0) -> PagedCache:
    """The copy of an entry."""
    shape = (TOKENS, layout.layers[0].kv_heads, 16)
    noise = torch.randn(2, 3, *shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return PagedCache.dense(layout, list(noise[0]), list(noise[1]))


def save(request: str = "r", **changes: Any) -> Save:
    fields: dict[str, Any] = {"tenant": "", "entry": Entry("chunk", b"d" * 32, 0, TOKENS), "token_ids": IDS}
    return Save(**{**fields, "request": request, **changes})


class Pool:
    """Runs jobs at once, or when it is told to."""

    def __init__(self, at_once: bool = True) -> None:
        self.at_once = at_once
        self.jobs: list[Callable[[], object]] = []

    def submit(self, work: Callable[..., object], *arguments: Any) -> None:
        self.jobs.append(lambda: work(*arguments))
        while self.at_once and self.jobs:
            self.jobs.pop(0)()

    def dismiss(self, timeout: float | None = None, *, cancel: bool = False) -> bool:
        self.jobs.clear()
        return True


class Rank:
    """The sums of a rank without threads, on a clock by which each entry takes two seconds.

    Attributes:
        rests: seconds that were to be waited after each entry.
    """

    def __init__(self, own: Learning | None = None, rank: int = 0, at_once: bool = True, **options: Any) -> None:
        self.learning = own or learning()
        self.recorder, self.pool = Recorder(), Pool(at_once)
        self.rests: list[float] = []
        self.now = 0.0
        asked = {"profile": "learn:/nowhere", "quality": "high", "learn_tokens": 1000, **options}
        pool: Any = self.pool
        self.sums = TrafficSums(
            self.learning, rank, Options.from_dict(asked), self.recorder, Guard(self.recorder), pool, self._tick
        )
        self.sums._closing.wait = self._rest  # type: ignore[method-assign]
        self.layout = LAYOUT.shard(rank, self.learning.shards)

    def _tick(self) -> float:
        self.now += 1
        return self.now

    def _rest(self, timeout: float | None = None) -> bool:
        self.rests.append(timeout or 0)
        return False

    def offer(self, *saves: Save, copy: PagedCache | None = None) -> None:
        for at, each in enumerate(saves):
            self.sums.offer(each, copy or copied(self.layout, at), SLOTS)

    def pieces(self) -> list[SumsPiece]:
        return list(iter(self.sums.take_piece, None))

    def count(self, name: str, label: str = "") -> float:
        return self.recorder.totals().get((name, label), 0)


def learned(own: Learning) -> list[SumsPiece]:
    """What all ranks report in the end."""
    pieces = []
    for rank in range(own.shards):
        one = Rank(own, rank)
        one.offer(*(save(str(at)) for at in range(20)))
        pieces += one.pieces()
    return pieces


# A plan ----------------------------------------------------------------------------------------------------------


def test_a_plan_takes_what_fits(tmp_path: Path) -> None:
    path = save_tiny_model("llama", tmp_path / "model")
    layout = KVLayout.from_config(AutoConfig.from_pretrained(path), "float32")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def plan(most: int, shards: int = 1) -> Learning:
        return Learning.plan("/nowhere", layout, shards, str(path), None, most)

    whole = plan(10**9)
    assert (whole.group, whole.weights) == ("layer", model_fingerprint(model))
    expected = model.get_parameter("model.embed_tokens.weight")
    assert whole.embedding is not None and torch.equal(whole.embedding, expected)
    assert plan(10**9, shards=2).group == "heads:1"
    sizes = [RunningMoments.size(layout, group) for group in ("layer", "unit", "head")]
    assert [(own.group, own.features) for own in map(plan, sizes)] == [("layer", 0), ("unit", 0), ("head", 0)]
    with pytest.raises(InputError, match="learn_max_mb: must be at least"):
        plan(sizes[-1] - 1)


def test_weights_that_cannot_be_known_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = WeightFingerprints(unknown="the checkpoint is quantized")
    monkeypatch.setattr("cuvee.integrations.vllm.learning.weight_fingerprints", lambda *a, **k: unknown)
    with pytest.raises(InputError, match=r"profile: cannot be learned, .* quantized"):
        Learning.plan("/nowhere", LAYOUT, 1, "model", None, 10**9)


def test_options_say_where_and_how(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    good = {"profile": "learn:redis://user:word@host/0", "quality": "balanced"}
    assert Options.from_dict(good).learning_place == "redis://user:word@host/0"
    assert "word" not in repr(Options.from_dict(good)) and "learn:redis://" in repr(Options.from_dict(good))
    for changes, message in (
        ({"profile": "learn"}, "profile: must name the collection"),
        ({"profile": "learn:"}, "profile: must name the collection"),
        ({"profile": f"learn:file:///p?id={'0' * 32}"}, "profile: must name no id"),
        ({"profile": f"learn:{tmp_path}/file"}, "profile: must be a folder"),
        ({"profile": "learn:memory://"}, "profile: must be in one place that lasts"),
        ({"quality": None}, "quality: must be high, balanced or small .* got none"),
        ({"quality": "lossless"}, "quality: must be high.* got lossless"),
        ({"quality": None, "kl": 0.01}, "quality: must be high.* got kl"),
        ({"learn_tokens": 0}, "learn_tokens: must be"),
        ({"learn_share": 1.5}, "learn_share: must be at most 1"),
        ({"learn_max_mb": 0}, "learn_max_mb: must be"),
        ({"learn_tenants": 1}, "learn_tenants: must be true or false"),
    ):
        with pytest.raises(InputError, match=message):
            Options.from_dict({**good, **changes})


def test_other_adapters_refuse_to_learn() -> None:
    with pytest.raises(InputError, match="only vLLM's CuveeConnector learns profiles"):
        CodingOptions.from_dict({"profile": "learn:/srv/profiles", "quality": "high"})


# Sums ------------------------------------------------------------------------------------------------------------


def test_only_what_may_be_learned_from_is_summed() -> None:
    rank = Rank()
    rank.offer(
        save(tenant=TENANT), save(request=""), save(token_ids=None), save(token_ids=[*IDS[1:], NO_TOKEN]),
        save(entry=Entry("segment", b"d" * 32, 0, TOKENS)),
    )  # fmt: skip
    assert rank.count("learned_tokens") == 0
    rank.offer(*[save("long")] * (ENTRIES_PER_REQUEST + 3), save("other"))
    assert rank.count("learned_tokens") == (ENTRIES_PER_REQUEST + 1) * (TOKENS - 4)
    tenants = Rank(learn_tenants=True)
    tenants.offer(save(tenant=TENANT))
    assert tenants.count("learned_tokens") == TOKENS - 4


def test_requests_that_are_long_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_learn, "_REMEMBERED", 2)
    rank = Rank()
    rank.offer(*(save(name) for name in "abcd"))
    assert list(rank.sums._taken) == ["c", "d"]


def test_copies_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    size = TOKENS * LAYOUT.bytes_per_token
    for limit, expected in ((3 * size, 3), (1, 1)):
        monkeypatch.setattr(worker_learn, "WAITING_BYTES", limit)
        rank = Rank(at_once=False)
        rank.offer(*(save(str(at)) for at in range(6)))
        assert len(rank.pool.jobs) == expected
        rank.pool.jobs.pop(0)()
        rank.offer(save("later"))
        assert len(rank.pool.jobs) == expected


def test_it_rests_for_its_share() -> None:
    rank = Rank(learn_share=0.25)
    rank.offer(save())
    spent = rank.count("learning_seconds")
    assert spent == torch.get_num_threads() and rank.rests == [3 * spent]


def test_an_entry_that_cannot_be_summed_costs_nothing_else(contained: Contained) -> None:
    rank = Rank()
    broken = copied(LAYOUT)
    broken.keys[0][0, 3] = torch.nan
    rank.offer(save("a"), copy=broken)
    assert [entry for entry, _ in contained] == ["learn"] and rank.count("learned_tokens") == 0
    rank.offer(save("b"))
    assert rank.count("learned_tokens") == TOKENS - 4 and rank.sums._waiting == 0


def test_finished_sums_travel_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_learn, "PIECE_BYTES", 10_000)
    rank = Rank()
    rank.offer(*(save(str(at)) for at in range(16)))
    assert not rank.pieces()  # 960 tokens
    rank.offer(*(save(str(at)) for at in range(16, 30)))
    pieces = rank.pieces()
    assert rank.count("learned_tokens") == 17 * (TOKENS - 4)
    assert [(piece.rank, piece.number, piece.count) for piece in pieces] == [
        (0, number, len(pieces)) for number in range(len(pieces))
    ]
    assert len(pieces) > 3 and max(len(piece.data) for piece in pieces) == 10_000
    assert RunningMoments.from_bytes(b"".join(piece.data for piece in pieces), LAYOUT).tokens == 17 * (TOKENS - 4)


def test_it_stops_in_the_middle() -> None:
    rank = Rank(at_once=False)
    rank.offer(*(save(str(at)) for at in range(3)))
    (first, *_) = rank.pool.jobs
    rank.sums.close()
    first()
    assert not rank.pool.jobs and rank.count("learned_tokens") == 0


# Profiles --------------------------------------------------------------------------------------------------------


class Learner:
    """The scheduler's part, with its figures."""

    def __init__(self, own: Learning) -> None:
        self.recorder = Recorder()
        self.learner = ProfileLearner(own, self.recorder, Guard(self.recorder))

    def take(self, *pieces: SumsPiece) -> None:
        self.learner.take(pieces)

    def count(self, label: str) -> float:
        return self.recorder.totals().get(("learned_profiles", label), 0)

    def wait(self, label: str, value: float = 1) -> None:
        wait_until(lambda: self.count(label) >= value, f"learned_profiles {label}")


def pulled(place: Path) -> Profile:
    with ProfileCollection.open(str(place)) as collection:
        return collection.pull(LAYOUT, place.parent / "pulled", weights=WeightFingerprints((WEIGHTS,))).profile


@pytest.mark.parametrize("shards", [1, 2])
def test_sums_of_all_ranks_become_a_profile_once(tmp_path: Path, shards: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    own = learning(str(tmp_path / "profiles"), shards)
    first, *rest = learned(own)
    learner = Learner(own)
    learner.take(*rest)
    learner.take(first)
    learner.wait("published")
    profile = pulled(tmp_path / "profiles")
    assert (profile.source, profile.model, profile.group) == ("fitted", WEIGHTS, own.group)
    assert profile.token_table is not None and profile.shard(shards - 1, shards).learned
    assert profile.id.hex() in caplog.text

    late = Learner(own)  # a replica that learned the same, or something else
    late.take(*(replace(piece) for piece in learned(own)))
    late.wait("found")
    assert pulled(tmp_path / "profiles").id == profile.id
    for each in (learner, late):
        each.learner.close()
    assert "lost" not in caplog.text


def test_pieces_that_are_missing_or_damaged_make_no_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contained: Contained
) -> None:
    monkeypatch.setattr(worker_learn, "PIECE_BYTES", 10_000)
    own = learning(str(tmp_path / "profiles"))
    pieces = learned(own)
    learner = Learner(own)
    learner.take(*pieces[1:])
    assert not learner.recorder.totals()
    learner.take(replace(pieces[0], data=b"?" * len(pieces[0].data)))
    learner.wait("failed")
    assert [str(error)[:17] for _, error in contained] == ["sums: are damaged"] and not (tmp_path / "profiles").exists()
    learner.learner.close()


def test_a_collection_that_fails_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scheduler_learn, "FIRST_RETRY", 0.01)
    monkeypatch.setattr(scheduler_learn, "LAST_RETRY", 0.02)
    place = tmp_path / "profiles"
    place.touch()
    own = learning(str(place))
    learner = Learner(own)
    learner.take(*learned(own))
    learner.wait("failed", 2)
    assert "the learned profile was not published, next attempt in" in caplog.text
    place.unlink()
    learner.wait("published")
    assert pulled(place).model == WEIGHTS
    learner.learner.close()
    assert "is lost" not in caplog.text


def test_an_engine_that_stops_before_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = tmp_path / "profiles"
    (place / "cuvee-profiles").mkdir(parents=True)
    own = learning(str(place))
    learner = Learner(own)
    folder = place / "cuvee-profiles" / replace(LAYOUT, dtype="bfloat16").fingerprint.hex()
    folder.symlink_to(tmp_path)  # hostile: a link in the place of a folder
    learner.take(*learned(own))
    learner.wait("failed")
    learner.learner.close()
    wait_until(lambda: "is lost" in caplog.text, "the loss is logged")
    assert not list(tmp_path.glob("*.safetensors"))
