"""The report on blending: its figures follow from the values of each prompt, which are those of the blender."""

from __future__ import annotations

import copy
import io
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from tests.conftest import fitted_to
from typer.testing import CliRunner, Result

import cuvee
from cuvee.blend import Blender, Boundary, Nothing, Segment, default_selector
from cuvee.cli import app
from cuvee.codec.chunk import KVChunk
from cuvee.codec.data.bundled import EVALUATION_TEXTS, load_bundled_model
from cuvee.codec.data.corpus import read_corpus, spread_sequences
from cuvee.codec.errors import CorruptError, CuveeError, InputError, ProfileMismatchError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.forward import prefill
from cuvee.codec.profiles.profile import Profile
from cuvee.eval.blend_report import blend_plots as plots
from cuvee.eval.blend_report import wall_time as blend_wall
from cuvee.eval.blend_report.blend_report_config import BlendConfig, quick_blend_config
from cuvee.eval.blend_report.blend_report_run import run_blend_report
from cuvee.eval.blend_report.blend_sections import (
    blend_markdown,
    blend_sections,
    print_blend_summary,
    write_blend_report,
)
from cuvee.eval.blend_report.prompts import (
    ahead_prompts,
    multidoc_prompts,
    passage_prompts,
    public_prompts,
    reread_prompts,
)
from cuvee.eval.blend_report.selectors import ON_ALONE, ON_OTHERS
from cuvee.eval.blend_report.shares import ratio_of_shares, share_recovered
from cuvee.eval.blend_report.wall_time import measure_wall_time
from cuvee.eval.progress import ProgressBar

pytest.importorskip("matplotlib")
TINY = BlendConfig(
    calibration=("harbour",),
    evaluation=("orchard", "lantern"),
    prompts=3,
    chunks=3,
    chunk_tokens=24,
    suffix=16,
    documents=2,
    contexts=2,
    context_tokens=16,
    costs=(0.15, 0.3, 1.0),
    few_costs=(0.3,),
    qualities=("balanced",),
    lengths=(),
)
ITEM = {"id": 1, "passages": ["The cat sat.", "The dog ran."], "gold": 1, "query": "The dog", "target": " ran."}
TIMED = ("seconds", "date", "commit", "command")
RUN = CliRunner(env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def console() -> Iterator[Console]:
    with open("/dev/null", "w", encoding="utf-8") as file:
        yield Console(file=file)


@pytest.fixture(scope="module")
def bundled() -> tuple[Any, Any]:
    return load_bundled_model()


@pytest.fixture(scope="module")
def tiny(bundled: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> BlendConfig:
    """A few prompts of a few tokens, coded with a profile of synthetic caches, and a file of prompts."""
    folder = tmp_path_factory.mktemp("given")
    fitted_to(KVLayout.from_config(bundled[0].config, dtype=torch.float32)).save(folder / "fitted")
    lines = [json.dumps({**ITEM, "id": i, "gold": i % 2}) for i in range(2)]
    (folder / "pets.jsonl").write_text("\n".join(lines) + "\n\n")
    return replace(TINY, profile=str(folder / "fitted"), multidoc=(str(folder / "pets.jsonl"),))


def less_of(config: BlendConfig) -> BlendConfig:
    return replace(config, prompts=2, documents=1, multidoc=(), costs=(0.3,), qualities=())


@pytest.fixture(scope="module")
def small_wall() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "vocab_size": 64, "head_dim": 8}
        patch.setattr(blend_wall, "RANDOM_LLAMA", {**blend_wall.RANDOM_LLAMA, **sizes})
        patch.setattr(blend_wall, "ROUNDS", (2, 2))
        yield


@pytest.fixture
def no_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots take longer than what they show."""
    monkeypatch.setattr("cuvee.eval.blend_report.blend_report_run.write_blend_report", lambda report, folder: None)


@pytest.fixture(scope="module")
def done(
    tiny: BlendConfig, tmp_path_factory: pytest.TempPathFactory, console: Console, small_wall: None
) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("blend") / "run"
    return out, run_blend_report(replace(tiny, lengths=(256, 400)), out, console, command="cuvee blend-report")


def construction(data: dict[str, Any], name: str) -> dict[str, Any]:
    (made,) = (made for made in data["constructions"] if made["name"] == name)
    return dict(made)


def entries(made: dict[str, Any], **named: Any) -> list[dict[str, Any]]:
    return [entry for entry in made["entries"] if all(entry[key] == value for key, value in named.items())]


def entry(made: dict[str, Any], kv: str, chunks: str, selector: str, cost: float | None) -> dict[str, Any]:
    (found,) = entries(made, kv=kv, chunks=chunks, selector=selector, cost=cost)
    return found


def floor_of(made: dict[str, Any]) -> list[float]:
    return list(entry(made, "exact", "alone", "nothing", None)["per_prompt"]["kl"])


def untimed(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: untimed(value) for key, value in data.items() if key not in TIMED}
    return [untimed(item) for item in data] if isinstance(data, list) else data


# --- what is shown while it is measured


def test_figures_of_exact_chunks_come_before_a_profile_is_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_documents: None
) -> None:
    """On a real model learning takes minutes, and whoever waits wants to see something."""
    file = io.StringIO()
    learned: list[str] = []

    def stop(*_: Any, **__: Any) -> Profile:
        learned.append(file.getvalue())
        raise KeyboardInterrupt

    monkeypatch.setattr(cuvee, "calibrate", stop)
    with pytest.raises(KeyboardInterrupt):
        run_blend_report(replace(TINY, documents=1), tmp_path / "run", Console(file=file, width=200))
    (seen,) = learned
    assert re.search(r"reread, prompts: 1; KL of the floor 0\.\d+; recovered at cost 0\.15: random -?\d", seen)
    assert "interrupted: " in file.getvalue()
    assert json.loads((tmp_path / "run" / "blend.json").read_text())["complete"] is False


@pytest.mark.parametrize("qualities", [(), ("high",)])
def test_every_blend_is_part_of_an_expected_step(
    tiny: BlendConfig, tmp_path: Path, console: Console, no_documents: None, monkeypatch: pytest.MonkeyPatch,
    qualities: tuple[str, ...],
) -> None:  # fmt: skip
    blends: list[int] = []  # of each step
    expected: list[int] = []
    step, expect, blend = ProgressBar.step, ProgressBar.expect, Blender.blend

    def counted(self: ProgressBar, what: str) -> Any:
        blends.append(0)
        return step(self, what)

    def blended(self: Blender, *args: Any, **options: Any) -> Any:
        blends[-1] += 1
        return blend(self, *args, **options)

    def counting(self: ProgressBar, steps: int) -> None:
        expected.append(steps)
        expect(self, steps)

    monkeypatch.setattr(ProgressBar, "step", counted)
    monkeypatch.setattr(Blender, "blend", blended)
    monkeypatch.setattr(ProgressBar, "expect", counting)
    config = replace(less_of(tiny), constructions=("reread",), qualities=qualities)
    run_blend_report(config, tmp_path / "run", console)
    assert expected == [len(blends)] == [4 if qualities else 2]
    assert all(blends)


def test_a_run_that_needs_no_profile_learns_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console, no_documents: None, tiny: BlendConfig
) -> None:
    monkeypatch.setattr(cuvee, "calibrate", lambda *a, **k: pytest.fail("there are no decoded chunks"))
    config = replace(less_of(tiny), profile=None, few_costs=(0.3,))
    data = run_blend_report(config, tmp_path / "run", console)
    assert data["complete"] and data["profile"] is None


# --- what is measured


def test_a_report_holds_every_method_and_how_it_was_made(done: tuple[Path, dict[str, Any]]) -> None:
    out, data = done
    assert json.loads((out / "blend.json").read_text()) == data
    assert data["complete"] and data["command"] == "cuvee blend-report" and data["environment"]["cpu"]
    assert data["configuration"]["seed"] == 7 and data["profile"]["given"] and data["text"]["contexts"] == 2
    assert [made["name"] for made in data["constructions"]] == ["reread", "ahead", "passages", "pets"]
    for made, costs in zip(data["constructions"], ((0.15, 0.3, 1.0), (0.3,), (0.3,), (0.3,)), strict=True):
        keys = [(e["kv"], e["chunks"], e["selector"], e["cost"]) for e in made["entries"]]
        assert len(set(keys)) == len(keys)
        for chunks, selectors in (("alone", ON_ALONE), ("averaged", ON_OTHERS)):
            for selector in selectors:
                found = [e["cost"] for e in entries(made, kv="exact", chunks=chunks, selector=selector)]
                assert found == ([None] if selector == "nothing" else list(costs))
        assert {(e["chunks"], e["cost"]) for e in entries(made, kv="balanced")} == {
            ("alone", None), ("alone", 0.3), ("averaged", None), ("averaged", 0.3),
        }  # fmt: skip
        assert all(0.1 < coded["bits_per_value"] < 16 for coded in made["coded"]) and len(made["coded"]) == 2
    kinds = [prompt["kind"] for prompt in construction(data, "reread")["prompts"]]
    assert kinds == ["re-read", "ordinary", "re-read"]


def test_nothing_is_the_floor_and_everything_is_the_full_prefill(done: tuple[Path, dict[str, Any]]) -> None:
    for made in done[1]["constructions"]:
        floor = entry(made, "exact", "alone", "nothing", None)
        assert floor["share"] == 0 and floor["share_stderr"] == 0 and floor["kl"] > 1e-4
        for found in entries(made, kv="exact", cost=1.0):
            assert found["share"] == pytest.approx(1, abs=1e-4) and found["top1"] == 1
            assert found["spent"] == pytest.approx(1) and abs(found["delta_nll"]) < 1e-4


def test_no_method_spends_more_than_it_was_asked_to(done: tuple[Path, dict[str, Any]]) -> None:
    for made in done[1]["constructions"]:
        for found in made["entries"]:
            if found["reason"] is None:
                spent = found["per_prompt"]["spent"]
                assert max(spent) <= (found["cost"] or 0) + 1e-9 and found["spent"] == pytest.approx(np.mean(spent))
    reread = construction(done[1], "reread")
    assert entry(reread, "exact", "alone", "boundary", 0.3)["spent"] > 0.28


def test_a_cost_that_pays_for_no_check_is_left_out_with_its_reason(done: tuple[Path, dict[str, Any]]) -> None:
    reread = construction(done[1], "reread")
    refused = entry(reread, "exact", "alone", "hkvd", 0.15)
    assert "pay for" in refused["reason"] and "kl" not in refused
    for compared in done[1]["comparison"]:
        for against in compared["against"]:
            if (compared["construction"], compared["cost"], against["rival"]) == ("reread", 0.15, "hkvd"):
                assert against["ratio"] is None and against["reason"] == refused["reason"]
    assert entry(reread, "exact", "alone", "hkvd", 0.3)["reason"] is None


def test_figures_follow_from_the_values_of_each_prompt(done: tuple[Path, dict[str, Any]]) -> None:
    for made in done[1]["constructions"]:
        floor = floor_of(made)
        kinds = [prompt["kind"] for prompt in made["prompts"]]
        for found in made["entries"]:
            if found["reason"] is not None:
                continue
            values = found["per_prompt"]
            assert {len(values[name]) for name in ("kl", "delta_nll", "top1", "spent")} == {len(floor)}
            for name in ("kl", "delta_nll", "top1"):
                assert found[name] == pytest.approx(sum(values[name]) / len(floor))
            ratio = sum(values["kl"]) / sum(floor)
            assert found["share"] == pytest.approx(1 - ratio)
            residuals = [kl - ratio * below for kl, below in zip(values["kl"], floor, strict=True)]
            spread = math.sqrt(sum(r * r for r in residuals) / (len(floor) - 1) / len(floor))
            assert found["share_stderr"] == pytest.approx(spread * len(floor) / sum(floor), abs=1e-12)
            for kind, part in found["parts"].items():
                own = [i for i, k in enumerate(kinds) if k == kind]
                above, below = (sum(x[i] for i in own) for x in (values["kl"], floor))
                assert part["prompts"] == len(own) and part["share"] == pytest.approx(1 - above / below)


def test_the_comparison_and_the_cost_of_coding_follow_too(done: tuple[Path, dict[str, Any]]) -> None:
    data = done[1]
    assert {(c["cost"], c["chunks"]) for c in data["comparison"]} == {
        (cost, chunks) for cost in (0.15, 0.3) for chunks in ("alone", "averaged")
    }
    for compared in data["comparison"]:
        made = construction(data, compared["construction"])
        of = entry(made, "exact", compared["chunks"], compared["selector"], compared["cost"])
        rivals = entries(made, kv="exact", chunks=compared["chunks"], cost=compared["cost"])
        best = max(e["share"] for e in rivals if e["reason"] is None)
        assert compared["share"] == of["share"] and (of["share"] == best or not compared["best"])
        for against in compared["against"]:
            if against["selector"] is not None:
                other = entry(made, "exact", against["chunks"], against["selector"], compared["cost"])
                settings = [e for e in made["entries"] if e["label"].lower().split(",")[0] == against["rival"]]
                same = {name: against[name] if name == "chunks" else other[name] for name in ("kv", "chunks", "cost")}
                allowed = [e for e in settings if e["reason"] is None and all(e[n] == v for n, v in same.items())]
                assert other["share"] == max(e["share"] for e in allowed)
                if other["share"] > 0:
                    assert against["ratio"] == pytest.approx(of["share"] / other["share"])
    assert sum(compared["best"] for compared in data["comparison"]) == (2 + 1 + 1 + 1) * 2
    assert len(data["codec_cost"]) == 4 * 2 * 3
    for lost in data["codec_cost"]:
        made = construction(data, lost["construction"])
        named = (lost["chunks"], lost["selector"], lost["cost"])
        exact, coded = entry(made, "exact", *named), entry(made, lost["kv"], *named)
        assert lost["points"] == pytest.approx(100 * (exact["share"] - coded["share"]), abs=1e-9)
        difference = np.subtract(coded["per_prompt"]["kl"], exact["per_prompt"]["kl"])
        error = difference.std(ddof=1) / math.sqrt(len(difference)) / np.mean(floor_of(made))
        assert lost["points_stderr"] == pytest.approx(100 * error)


@pytest.mark.parametrize(("name", "correct"), [("boundary", False), ("default-uncorrected", False), ("default", True)])
def test_a_value_is_that_of_the_blender(
    done: tuple[Path, dict[str, Any]], bundled: tuple[Any, Any], name: str, correct: bool
) -> None:
    """KL, loss and agreement of one prompt, by hand."""
    model, _ = bundled
    layout = KVLayout.from_config(model.config, dtype=torch.float32)
    texts = [read_corpus(name, "books-3m") for name in TINY.evaluation]
    prompt = reread_prompts(texts, 3, 3, 24, 16, 7).prompts[2]
    with torch.no_grad():
        segments = [Segment(chunk, prefill(model, chunk[None], layout)[0]) for chunk in prompt.chunks]
        selector = Boundary(cost=0.3) if name == "boundary" else default_selector(cost=0.3)
        result = Blender(model, selector=selector, correct=correct).blend(
            [*segments, Segment(prompt.text)], logits_to_keep=16
        )
        exact = model(prompt.tokens[None]).logits[0, -16:-1].double().log_softmax(-1)
    blended = result.logits[:-1].double().log_softmax(-1)
    right = prompt.text[1:, None]
    values = entry(construction(done[1], "reread"), "exact", "alone", name, 0.3)["per_prompt"]
    assert values["kl"][2] == pytest.approx(float((exact.exp() * (exact - blended)).sum(-1).mean()), rel=1e-3)
    assert values["delta_nll"][2] == pytest.approx(float((exact - blended).gather(1, right).mean()), rel=1e-3)
    assert values["top1"][2] == pytest.approx(float((exact.argmax(-1) == blended.argmax(-1)).float().mean()))


def test_seeds_reproduce(tiny: BlendConfig, tmp_path: Path, console: Console, no_documents: None) -> None:
    config = less_of(tiny)
    first, again, other = (
        run_blend_report(replace(config, seed=seed), tmp_path / name, console)
        for name, seed in (("first", 7), ("again", 7), ("other", 8))
    )
    assert untimed(first) == untimed(again)
    passages, same = (construction(data, "passages") for data in (first, other))
    assert passages["tokens_sha256"] == same["tokens_sha256"] and floor_of(passages) == floor_of(same)
    drawn = [entry(made, "exact", "alone", "random", 0.3)["per_prompt"]["kl"] for made in (passages, same)]
    assert drawn[0] != drawn[1]
    assert construction(first, "reread")["tokens_sha256"] != construction(other, "reread")["tokens_sha256"]


def test_averaged_chunks_are_means_behind_the_contexts(
    done: tuple[Path, dict[str, Any]], bundled: tuple[Any, Any]
) -> None:
    """But for the first chunk of a prompt, which is exact alone."""
    model, _ = bundled
    layout = KVLayout.from_config(model.config, dtype=torch.float32)
    contexts = spread_sequences([read_corpus("harbour", "books-3m")], 16, 2)
    prompt = reread_prompts([read_corpus(name, "books-3m") for name in TINY.evaluation], 3, 3, 24, 16, 7).prompts[1]
    with torch.no_grad():
        segments = [Segment(prompt.chunks[0], prefill(model, prompt.chunks[0][None], layout)[0])]
        for tokens in prompt.chunks[1:]:
            behind = prefill(model, torch.cat([contexts, tokens.expand(2, -1)], 1), layout)
            keys, values = (
                [torch.stack([layer[16:] for layer in layers]).mean(0) for layers in zip(*caches, strict=True)]
                for caches in ([chunk.keys for chunk in behind], [chunk.values for chunk in behind])
            )
            segments.append(Segment(tokens, KVChunk(keys, values, layout, 16)))
        result = Blender(model).blend([*segments, Segment(prompt.text)], logits_to_keep=16, selector=Nothing())
        exact = model(prompt.tokens[None]).logits[0, -16:-1].log_softmax(-1)
    kl = (exact.exp() * (exact - result.logits[:-1].log_softmax(-1))).sum(-1).mean()
    found = entry(construction(done[1], "reread"), "exact", "averaged", "nothing", None)["per_prompt"]
    assert found["kl"][1] == pytest.approx(float(kl), rel=1e-3)


def test_chunks_cut_out_of_other_prompts_are_as_those_prompts_left_them(
    tiny: BlendConfig, tmp_path: Path, console: Console, bundled: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the first chunk of a prompt, which is exact alone."""
    seen: list[list[Any]] = []  # the chunks of each blend
    blend = Blender.blend

    def watched(blender: Blender, segments: Any, **more: Any) -> Any:
        seen.append([segment.chunk for segment in segments[:-1]])
        return blend(blender, segments, **more)

    monkeypatch.setattr(Blender, "blend", watched)
    config = replace(
        less_of(tiny), prompts=3, constructions=("reread",), contexts=0, behind=2, selectors=("default",),
        qualities=("balanced",), few_costs=(0.3,),
    )  # fmt: skip
    data = run_blend_report(config, tmp_path / "run", console)
    made = construction(data, "reread")
    methods = [(e["kv"], e["chunks"], e["selector"], e["cost"]) for e in made["entries"]]
    per_kind = [("nothing", None), ("default", 0.3)]
    assert methods == [
        (kv, chunks, *one) for kv in ("exact", "balanced") for chunks in ("alone", "behind") for one in per_kind
    ]
    model, _ = bundled
    layout = KVLayout.from_config(model.config, dtype=torch.float32)
    prompts = reread_prompts([read_corpus(name, "books-3m") for name in TINY.evaluation], 3, 3, 24, 16, 7).prompts
    for index, prompt in enumerate(prompts):
        alone, harvested = seen[8 * index], seen[8 * index + 2]  # of each kind there are two blends
        others = [tokens for other in prompts if other is not prompt for tokens in other.chunks]
        assert torch.equal(harvested[0].keys[3], alone[0].keys[3])
        for tokens, chunk in zip(prompt.chunks[1:], harvested[1:], strict=True):
            assert (chunk.start, chunk.tokens) == (48, 24)
            found = 0
            for before in permutations(others, 2):
                with torch.no_grad():
                    (whole,) = prefill(model, torch.cat([*before, tokens])[None], layout)
                found += torch.allclose(whole.values[5][48:], chunk.values[5], atol=1e-5)
            assert found == 1
    text = (tmp_path / "run" / "blend.md").read_text()
    assert "exact chunks cut out of other prompts" in text and "exact chunks averaged over contexts" not in text
    figure = plots.share_cost(data)
    assert figure is not None and len(figure.axes) == 2  # a column for each kind of chunks that was measured


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"behind": 7}, r"^behind: reread has a prompt beside which there are only 6 chunks of others, not 7"),
        (
            {"behind": 6, "chunk_tokens": 320, "prompts": 3},
            r"^behind: 6 chunks of reread .* may have 2240 tokens; the model",
        ),
    ],
)
def test_there_must_be_chunks_to_stand_before_others(
    tiny: BlendConfig, tmp_path: Path, console: Console, change: dict[str, Any], message: str
) -> None:
    config = replace(less_of(tiny), **{"prompts": 3, "constructions": ("reread",), **change})
    with pytest.raises(InputError, match=message):
        run_blend_report(config, tmp_path / "run", console)


def test_a_choice_is_predicted_as_if_it_were_text(done: tuple[Path, dict[str, Any]], bundled: tuple[Any, Any]) -> None:
    model, tokenizer = bundled
    layout = KVLayout.from_config(model.config, dtype=torch.float32)
    values = entry(construction(done[1], "passages"), "exact", "alone", "nothing", None)["per_prompt"]
    for index, prompt in enumerate(passage_prompts(tokenizer, 2).prompts):
        right = prompt.choices[prompt.answer]
        text = torch.cat([prompt.text, torch.tensor(right)])
        with torch.no_grad():
            segments = [Segment(chunk, prefill(model, chunk[None], layout)[0]) for chunk in prompt.chunks]
            result = Blender(model).blend([*segments, Segment(text)], logits_to_keep=len(right) + 1, selector=Nothing())
            exact = model(torch.cat([*prompt.chunks, text])[None]).logits[0, -len(right) - 1 : -1].log_softmax(-1)
        kl = (exact.exp() * (exact - result.logits[:-1].log_softmax(-1))).sum(-1).mean()
        assert values["kl"][index] == pytest.approx(float(kl), rel=1e-3)


# --- prompts


def test_passages_are_scored_as_lm_eval_does(bundled: tuple[Any, Any], done: tuple[Path, dict[str, Any]]) -> None:
    model, tokenizer = bundled
    made = passage_prompts(tokenizer, 2)
    taken = []
    for prompt in made.prompts:
        assert len(prompt.chunks) == 6 and len(prompt.choices) == 6
        text = tokenizer.decode(prompt.tokens)
        assert tokenizer(text).input_ids == prompt.tokens.tolist()
        scores = []
        for choice in prompt.choices:
            whole = tokenizer(text + tokenizer.decode(choice)).input_ids
            assert whole == [*prompt.tokens.tolist(), *choice] and tokenizer.decode(choice).startswith(" ")
            with torch.no_grad():
                steps = model(torch.tensor([whole])).logits[0, :-1].log_softmax(-1)
            scores.append(sum(float(steps[t, whole[t + 1]]) for t in range(len(prompt.tokens) - 1, len(whole) - 1)))
        taken.append(int(np.argmax(scores)) == prompt.answer)
    passages = construction(done[1], "passages")
    assert passages["full"]["correct"] == taken
    for found in entries(passages, kv="exact"):
        if found["reason"] is None:
            correct = found["per_prompt"]["correct"]
            assert found["accuracy"] == sum(correct) / 2
            assert found["difference"] == pytest.approx((sum(correct) - sum(taken)) / 2)
    assert entry(construction(done[1], "reread"), "exact", "alone", "nothing", None)["accuracy"] is None


def test_the_rest_of_every_second_prompt_repeats_a_part_of_its_chunks() -> None:
    texts = [read_corpus(name, "books-3m") for name in EVALUATION_TEXTS]
    made = reread_prompts(texts, 8, 3, 32, 16, 7)
    for index, prompt in enumerate(made.prompts):
        cached = torch.cat(prompt.chunks).tolist()
        found = any(cached[t : t + 16] == prompt.text.tolist() for t in range(len(cached) - 15))
        assert found == (index % 2 == 0) and prompt.scored == 15 and [len(c) for c in prompt.chunks] == [32] * 3


def test_ahead_scores_what_is_not_there_when_tokens_are_selected() -> None:
    texts = [read_corpus(name, "books-3m") for name in EVALUATION_TEXTS]
    whole = reread_prompts(texts, 4, 3, 32, 16, 7)
    for given, prompt in zip(whole.prompts, ahead_prompts(whole).prompts, strict=True):
        assert torch.equal(torch.cat([prompt.text, torch.tensor(prompt.choices[0])]), given.text)
        assert (len(prompt.text), len(prompt.choices), prompt.scored, prompt.kind) == (8, 1, 0, given.kind)


def test_prompts_of_a_file(bundled: tuple[Any, Any], tmp_path: Path, done: tuple[Path, dict[str, Any]]) -> None:
    tokenizer = bundled[1]
    long = {**ITEM, "passages": ["word " * 200, "The dog ran. " * 30], "gold": 0}
    path = tmp_path / "two.jsonl"
    path.write_text(json.dumps(ITEM) + "\n\n" + json.dumps(long))
    made = multidoc_prompts(path, tokenizer, 9, 100)
    short, cut = made.prompts
    assert made.name == "two" and tokenizer.decode(short.tokens) == "The cat sat.\n\nThe dog ran.\n\nThe dog"
    assert [tokenizer.decode(choice) for choice in short.choices] == [" ran."] and short.scored == 0
    assert [len(chunk) for chunk in cut.chunks] == [64, 64] and short.kind != cut.kind
    assert len(multidoc_prompts(path, tokenizer, 9, 10_000).prompts[1].chunks[0]) > 64
    assert len(multidoc_prompts(path, tokenizer, 1, 100).prompts) == 1
    assert set(entry(construction(done[1], "pets"), "exact", "alone", "boundary", 0.3)["parts"]) == {
        "answer in the first passage", "answer in a later passage",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("{", "pets.jsonl:2: must hold JSON, but"),
        ("[1]", r"pets.jsonl:2: must be an object"),
        (json.dumps({k: v for k, v in ITEM.items() if k != "id"}), "id is missing"),
        (json.dumps({**ITEM, "query": 5}), "query is missing or of another kind"),
        (json.dumps({**ITEM, "passages": []}), "not empty"),
        (json.dumps({**ITEM, "passages": ["a", ""]}), "not empty"),
        (json.dumps({**ITEM, "query": ""}), "not empty"),
        (json.dumps({**ITEM, "gold": 2}), "gold must be from 0 to 1, got 2"),
        (json.dumps({**ITEM, "target": ""}), "target must have at least one token"),
    ],
)
def test_lines_that_are_no_prompts(line: str, match: str, bundled: tuple[Any, Any], tmp_path: Path) -> None:
    path = tmp_path / "pets.jsonl"
    path.write_text(json.dumps(ITEM) + "\n" + line)
    with pytest.raises(InputError, match=match):
        multidoc_prompts(path, bundled[1], 9, 512)


def test_files_that_hold_no_prompts(bundled: tuple[Any, Any], tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    path.write_text("\n")
    with pytest.raises(InputError, match="must hold at least one prompt"):
        multidoc_prompts(path, bundled[1], 9, 512)
    path.write_bytes(b"\xff")
    with pytest.raises(InputError, match="must be UTF-8 text"):
        multidoc_prompts(path, bundled[1], 9, 512)
    with pytest.raises(FileNotFoundError):
        multidoc_prompts(tmp_path / "nowhere", bundled[1], 9, 512)


# --- public data


def public_data(folder: Path) -> None:
    """Six questions in the format of XQuAD, of two articles, and three in that of MuSiQue."""

    def paragraph(number: int) -> dict[str, Any]:
        asked = {"question": f"Who found hill {number}?", "answers": [{"text": f"Old Ann {number}"}]}
        return {"context": f"Hill {number} was found by old Ann {number}.", "qas": [asked]}

    articles = [{"paragraphs": [paragraph(5 * a + p) for p in range(5)]} for a in range(3)]
    (folder / "xquad.en.json").write_text(json.dumps({"data": articles}))
    paragraphs = [{"title": f"P{i}", "paragraph_text": f"P{i} lies in Q{i}."} for i in range(3)]
    rows = [{"question": f"Where is P{i}?", "answer": f"Q{i}", "paragraphs": paragraphs} for i in range(3)]
    (folder / "musique_ans_v1.0_dev.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_questions_of_public_data_become_prompts(bundled: tuple[Any, Any], tmp_path: Path) -> None:
    public_data(tmp_path)
    tokenizer = bundled[1]
    made = public_prompts("xquad", str(tmp_path), True, tokenizer, 9)
    assert made.name == "xquad" and len(made.prompts) == 8  # every second of 15
    for index, prompt in enumerate(made.prompts):
        text, answer = tokenizer.decode(prompt.text), tokenizer.decode(prompt.choices[0])
        assert text.endswith(f"Question: Who found hill {2 * index}?\nAnswer:") and answer == f" Old Ann {2 * index}"
        assert prompt.words == 3 and prompt.scored == 0 and len(prompt.chunks) == 6
        passages = [tokenizer.decode(chunk) for chunk in prompt.chunks]
        assert passages.count(f"Hill {2 * index} was found by old Ann {2 * index}.\n\n") == 1
    several = public_prompts("musique", str(tmp_path), True, tokenizer, 1).prompts
    assert [len(prompt.chunks) for prompt in several] == [3] and several[0].words == 1
    assert tokenizer.decode(several[0].chunks[1]) == "P1\nP1 lies in Q1.\n\n"
    with pytest.raises(CorruptError, match="any_version=true"):
        public_prompts("xquad", str(tmp_path), False, tokenizer, 9)


def test_what_the_answer_loses_is_measured(
    tiny: BlendConfig, tmp_path: Path, console: Console, bundled: tuple[Any, Any]
) -> None:
    public_data(tmp_path)
    config = replace(
        less_of(tiny), constructions=("musique",), data=str(tmp_path), any_version=True, documents=2, contexts=0,
        selectors=("boundary", "default"), costs=(0.3, 1.0), few_costs=(0.3, 1.0),
    )  # fmt: skip
    data = run_blend_report(config, tmp_path / "run", console)
    (made,) = data["constructions"]
    assert data["text"]["evaluation"] == [] and data["text"]["contexts"] == 0
    assert str(tmp_path) not in json.dumps(data["configuration"])
    assert [(e["chunks"], e["selector"], e["cost"]) for e in made["entries"]] == [
        ("alone", "nothing", None), ("alone", "boundary", 0.3), ("alone", "boundary", 1.0), ("alone", "default", 0.3),
        ("alone", "default", 1.0),
    ]  # fmt: skip
    model, tokenizer = bundled
    prompts = public_prompts("musique", str(tmp_path), True, tokenizer, 2).prompts
    expected = []
    for prompt in prompts:
        whole = torch.cat([prompt.tokens, torch.tensor(prompt.choices[0])])
        with torch.no_grad():
            steps = model(whole[None]).logits[0, len(prompt.tokens) - 1 : -1].log_softmax(-1)
        expected.append(-float(steps.gather(1, torch.tensor(prompt.choices[0])[:, None]).sum()) / prompt.words)
    assert made["answers"]["per_prompt"] == pytest.approx(expected, rel=1e-3)
    floor = np.array(made["entries"][0]["per_prompt"]["delta_nll"])
    per_word = np.array([len(prompt.choices[0]) / prompt.words for prompt in prompts])
    for found in made["entries"]:
        lost = np.array(found["per_prompt"]["delta_nll"]) * per_word
        assert found["answer_loss"] == pytest.approx(lost.mean())
        if (floor * per_word).mean() > 0:
            assert found["answer_share"] == pytest.approx(1 - lost.mean() / (floor * per_word).mean())
        if found["cost"] == 1:
            assert found["answer_loss"] == pytest.approx(0, abs=1e-3)
    text = (tmp_path / "run" / "blend.md").read_text()
    assert "nats per word" in text and "averaged over contexts" not in text.replace("| contexts averaged over |", "")


# --- numbers


def test_shares_where_there_is_nothing_to_recover() -> None:
    assert share_recovered([0.25], [0.5]) == (0.5, None)
    assert share_recovered([0.1, 0.1], [0.0, 0.0]) == (None, None)
    floor = np.array([1.0, 2.0, 1.5, 1.2])
    twice = ratio_of_shares(0.2 * floor, 0.6 * floor, floor, 0)
    assert [twice[end] for end in ("ratio", "low", "high")] == pytest.approx([2, 2, 2])
    worse = ratio_of_shares(0.2 * floor, 1.1 * floor, floor, 0)
    assert worse == {"ratio": None, "low": None, "high": None}


def test_wall_time_is_of_the_prompts_asked_for(done: tuple[Path, dict[str, Any]]) -> None:
    wall = done[1]["wall_time"]
    assert [length["tokens"] for length in wall["lengths"]] == [256, 400]
    for length in wall["lengths"]:
        assert length["cached"] == length["tokens"] - 64 and length["rounds"] == 2
        full = length["full"]["seconds"]
        for blend in length["blends"]:
            assert blend["spent"] <= blend["cost"] + 1e-9
            assert blend["ratio"]["median"] == pytest.approx(np.median(np.divide(blend["seconds"], full)))
        assert length["decode"]["bytes"] > 0
    assert {(b["selector"], b["cost"]) for b in wall["lengths"][0]["blends"]} >= {("nothing", 0.0), ("boundary", 1.0)}


def test_what_is_not_the_full_prefill_is_not_timed(small_wall: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blend_wall, "TOLERANCE", -1.0)
    with pytest.raises(CuveeError, match="not timed"):
        measure_wall_time((256,), 0, lambda what: None)


# --- what is refused


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"prompts": 0}, "prompts"),
        ({"contexts": -1}, "contexts"),
        ({"constructions": ("reread", "squad")}, "constructions: must be among reread, ahead, .*, got 'squad'"),
        ({"constructions": ()}, "constructions: must be at least one"),
        ({"selectors": ("query", "oracle")}, "selectors: must be among nothing, random, .*, got 'oracle'"),
        ({"chunks": 1}, "chunks"),
        ({"costs": (0.3, 1.5)}, "costs"),
        ({"few_costs": (0.2,)}, "few_costs"),
        ({"lengths": (64,)}, "lengths"),
    ],
)
def test_configurations_that_cannot_be(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        replace(TINY, **changes)


def test_inputs_that_do_not_fit(
    tiny: BlendConfig, tmp_path: Path, console: Console, fitted: Callable[[str, str], Profile]
) -> None:
    def fails(error: type[Exception], match: str | None, **changes: Any) -> None:
        with pytest.raises(error, match=match):
            run_blend_report(replace(tiny, **changes), tmp_path / "out", console)
        assert not (tmp_path / "out").exists()

    fitted("bfloat16", "layer").save(tmp_path / "other")
    fails(ProfileMismatchError, None, profile=str(tmp_path / "other"))
    fails(InputError, "2048 positions", context_tokens=2040)
    fails(InputError, "text: must hold at least 12016 tokens", chunk_tokens=4000)
    fails(InputError, "a name of its own", multidoc=tiny.multidoc * 2)
    (tmp_path / "out").write_text("")
    with pytest.raises(InputError, match="must be a folder"):
        run_blend_report(tiny, tmp_path / "out", console)
    with pytest.raises(InputError, match="not empty"):
        run_blend_report(tiny, tmp_path, console)


def test_a_profile_is_learned_from_the_calibration_texts(
    tiny: BlendConfig, tmp_path: Path, console: Console, no_documents: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def calibrate(model: Any, tokens: torch.Tensor, group: str, **options: Any) -> Profile:
        asked.append((list(tokens.shape), group, options["prefix"], torch.is_grad_enabled()))
        return Profile.load(str(tiny.profile))

    monkeypatch.setattr(cuvee, "calibrate", calibrate)
    config = replace(less_of(tiny), profile=None, calibration_sequences=4, qualities=("high",))
    data = run_blend_report(config, tmp_path / "out", console)
    assert (
        asked == [([4, 512], "layer", 384, True)] and data["profile"]["seconds"] >= 0 and not data["profile"]["given"]
    )


# --- an end before its time


def stop_at(patch: pytest.MonkeyPatch, blend: int) -> list[int]:
    """Interrupt the run at a blend, counted from 0; returns the numbers of those before it, as they are made."""
    made: list[int] = []
    original = Blender.blend

    def counted(self: Blender, *args: Any, **options: Any) -> Any:
        if len(made) == blend:
            raise KeyboardInterrupt
        result = original(self, *args, **options)
        made.append(len(made))
        return result

    patch.setattr(Blender, "blend", counted)
    return made


def blends_per_prompt(made: dict[str, Any]) -> int:
    return sum(found["reason"] is None for found in made["entries"])


def test_an_interrupted_run_goes_on_at_its_prompt_and_ends_the_same(
    tiny: BlendConfig, tmp_path: Path, no_documents: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(less_of(tiny), constructions=("reread", "passages"), documents=2, qualities=("high",))
    file = io.StringIO()
    console = Console(file=file, width=300)
    whole = run_blend_report(config, tmp_path / "whole", console)
    reread, passages = map(blends_per_prompt, whole["constructions"])
    # In the second prompt of a construction: the first one is kept, and so is the construction before.
    for at, prompts in ((reread + 3, 1), (2 * reread + passages + 3, 3)):
        out = tmp_path / str(prompts)
        with monkeypatch.context() as patch:
            stop_at(patch, at)
            with pytest.raises(KeyboardInterrupt):
                run_blend_report(config, out, console)
        assert f"interrupted: {out} keeps what was measured" in file.getvalue()
        half = json.loads((out / "blend.json").read_text())
        assert half["unfinished"]["prompts"] == 1 and len(half["constructions"]) == prompts // 2
        with monkeypatch.context() as patch:
            rest = stop_at(patch, -1)
            found = run_blend_report(config, out, console)
        assert f"{out} holds this run, {prompts} measurements done: continuing" in file.getvalue()
        assert untimed(found) == untimed(whole)
        assert len(rest) == 2 * (reread + passages) - (reread, 0, 2 * reread + passages)[prompts - 1]
    with monkeypatch.context() as patch:
        stop_at(patch, 0)  # nothing is left to measure
        assert untimed(run_blend_report(config, out, console)) == untimed(whole)
    assert f"{out} holds this run, complete: continuing" in file.getvalue()


def test_a_folder_of_another_run_or_with_damaged_results_is_refused(
    tiny: BlendConfig, tmp_path: Path, console: Console, no_documents: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out = replace(less_of(tiny), constructions=("reread",)), tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_at(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            run_blend_report(config, out, console)
    with pytest.raises(InputError, match=r"^out: .* holds another run .it differs in contexts, seed.: choose another"):
        run_blend_report(replace(config, contexts=1, seed=8), out, console)
    kept = json.loads((out / "blend.json").read_text())
    for unfinished in ({"prompts": 1}, {"prompts": 1, "methods": [{"of": "exact"}]}):
        (out / "blend.json").write_text(json.dumps({**kept, "unfinished": unfinished}))
        with pytest.raises(InputError, match=r"^out: .*blend\.json is damaged .*: choose another folder, or --force"):
            run_blend_report(config, out, console)
    for content in ("[]", "{}", "x"):
        (out / "blend.json").write_text(content)
        with pytest.raises(InputError, match=r"^out: .*blend\.json is not a report: choose another folder, or --force"):
            run_blend_report(config, out, console)
    assert run_blend_report(config, out, console, force=True)["complete"]


def test_a_profile_is_learned_once_and_stays_the_same(
    tiny: BlendConfig,
    tmp_path: Path,
    console: Console,
    no_documents: None,
    monkeypatch: pytest.MonkeyPatch,
    fitted: Callable[[str, str], Profile],
) -> None:
    learned: list[Profile] = []

    def calibrate(*_: Any, **__: Any) -> Profile:
        learned.append(Profile.load(str(tiny.profile)))
        return learned[-1]

    monkeypatch.setattr(cuvee, "calibrate", calibrate)
    less = replace(less_of(tiny), constructions=("reread",), qualities=("high",))
    config, out = replace(less, profile=None, calibration_sequences=4), tmp_path / "out"
    whole = run_blend_report(config, tmp_path / "whole", console)
    assert len(learned) == 1
    with monkeypatch.context() as patch:
        stop_at(patch, blends_per_prompt(whole["constructions"][0]))
        with pytest.raises(KeyboardInterrupt):
            run_blend_report(config, out, console)
    assert len(learned) == 2 and sorted(path.name for path in out.iterdir()) == ["blend.json", "profile.safetensors"]
    assert untimed(run_blend_report(config, tmp_path / "whole", console)) == untimed(whole) and len(learned) == 2
    path = out / "profile.safetensors"
    path.rename(tmp_path / "kept")
    fitted("gqa", "layer").save(path)
    with pytest.raises(
        InputError, match=r"^out: .*profile\.safetensors is not the profile that this report was measured"
    ):
        run_blend_report(config, out, console)
    (tmp_path / "kept").rename(path)
    assert untimed(run_blend_report(config, out, console)) == untimed(whole) and len(learned) == 2
    path.unlink()
    assert run_blend_report(config, out, console)["complete"]  # and it is not needed any more


def test_sixteen_bits_are_enough(tiny: BlendConfig, tmp_path: Path, console: Console, no_documents: None) -> None:
    """A model that does not fit in memory in float32 is measured in its own dtype."""
    config = replace(less_of(tiny), constructions=("reread", "passages"), documents=4, behind=2, dtype="bfloat16")
    exact, rounded = (
        run_blend_report(one, tmp_path / one.dtype, console) for one in (replace(config, dtype="float32"), config)
    )
    assert rounded["model"]["dtype"] == "bfloat16"
    for made, same in zip(rounded["constructions"], exact["constructions"], strict=True):
        # Their mean: one prompt of a few tokens moves by a fifth, up or down, with how a CPU adds up in bfloat16.
        assert np.mean(floor_of(made)) == pytest.approx(np.mean(floor_of(same)), rel=0.15)
        for found, other in zip(made["entries"], same["entries"], strict=True):
            assert found["reason"] == other["reason"]


def test_quick_is_less_of_everything() -> None:
    quick = quick_blend_config(BlendConfig())
    assert quick.quick and quick.prompts == 10 and quick.qualities == ("balanced",) and quick.lengths == (512, 1024)
    assert quick.costs == (0.15, 0.3, 0.45, 1.0) and quick_blend_config(TINY).prompts == 3


# --- documents


def test_the_documents_say_what_was_measured(done: tuple[Path, dict[str, Any]]) -> None:
    out, data = done
    text = (out / "blend.md").read_text()
    for name in ("share_cost", "share_source", "wall_time"):
        assert f"(plots/{name}.png)" in text and (out / "plots" / f"{name}.svg").stat().st_size > 1000
    share = entry(construction(data, "reread"), "exact", "averaged", "overlap*boundary", 0.3)["share"]
    row = next(line for line in text.splitlines() if line.startswith("| overlap x boundary | averaged | 30 %"))
    assert len(row.split("|")) == 7
    assert f"{100 * share:.0f}" in text and "Not to be had: HKVD at 15 %" in text and "not to be had" in text
    for heading in ("equal cost", "Decoded chunks", "Wall time", "Right choices", "How it was measured"):
        assert heading in text


def test_parts_that_are_absent_are_left_out(done: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    data = copy.deepcopy(done[1])
    data |= {"wall_time": None, "codec_cost": [], "comparison": [], "complete": False, "profile": None, "command": ""}
    data["constructions"] = [construction(data, "reread")]
    data["constructions"][0]["coded"] = []
    text = blend_markdown(data, {})
    assert "not complete" in text and "Wall time is of" not in text and "![" not in text
    for absent in ("equal cost", "Decoded chunks", "Wall time against", "Right choices"):
        assert absent not in text
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "wall_time.png").write_text("of another report")
    write_blend_report(data, tmp_path)
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"share_cost.png", "share_cost.svg"}
    data["constructions"] = []
    assert [section.id for section in blend_sections(data)] == ["protocol", "limits"]
    write_blend_report(data, tmp_path)
    assert not list((tmp_path / "plots").iterdir())


def test_a_single_prompt_has_no_standard_error(done: tuple[Path, dict[str, Any]]) -> None:
    data = copy.deepcopy(done[1])
    for made in data["constructions"]:
        for found in made["entries"]:
            found |= {name: None for name in found if name.endswith("_stderr")}
    assert "None" not in blend_markdown(data, {})


# --- the command


def run(*args: str | Path, code: int = 0) -> Result:
    result = RUN.invoke(app, ["blend-report", *map(str, args)])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_the_command_writes_a_folder(tiny: BlendConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[BlendConfig] = []

    def less(config: BlendConfig) -> BlendConfig:
        given.append(config)
        return replace(less_of(tiny), multidoc=config.multidoc, seed=config.seed)

    monkeypatch.setattr("cuvee.eval.blend_report.blend_report_config.quick_blend_config", less)
    monkeypatch.chdir(tmp_path)
    options = ["--profile", tiny.profile or "", "--measure-on", "orchard", "--calibrate-on", "harbour", "--seed", "3"]
    shown = run("--quick", *options, "--multidoc", tiny.multidoc[0]).stdout
    assert "Selectors at equal cost" in shown and "out/blend/blend.md" in shown
    assert json.loads((tmp_path / "out" / "blend" / "blend.json").read_text())["configuration"]["seed"] == 3
    assert given == [
        BlendConfig(
            profile=tiny.profile, evaluation=("orchard",), calibration=("harbour",), multidoc=tiny.multidoc, seed=3
        )
    ]
    assert "another run (it differs in multidoc, seed)" in run("--quick", code=1).stderr
    assert json.loads(run("--quick", "--force", "--json").stdout)["complete"]


def test_the_command_measures_what_is_named(tiny: BlendConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[BlendConfig] = []

    def stop(config: BlendConfig, *_: Any, **__: Any) -> None:
        given.append(config)
        raise InputError("seen")

    monkeypatch.setattr("cuvee.eval.blend_report.blend_report_run.run_blend_report", stop)
    run("--constructions", "xquad, musique", "--data", tmp_path, "--metadata", "any_version=true", "--documents", "3",
        "--selectors", "boundary,default", "--costs", ".05,0.15", "--qualities", "none", "--contexts", "0",
        "--no-wall-time", code=1)  # fmt: skip
    assert given == [
        BlendConfig(
            constructions=("xquad", "musique"), data=str(tmp_path), any_version=True, documents=3, contexts=0,
            selectors=("boundary", "default"), costs=(0.05, 0.15), few_costs=(0.05, 0.15), qualities=(), lengths=(),
        )
    ]  # fmt: skip
    assert "any_version" in run("--metadata", "passages=3", code=2).stderr
    assert "numbers" in run("--costs", "a", code=2).stderr


def test_options_that_do_not_apply_are_refused_by_name(tmp_path: Path) -> None:
    for option in (
        ["--tasks", "none"], ["--length", "512"], ["--no-reread"], ["--group", "layer"], ["--limit", "3"],
        ["--sequences", "3"], ["--batch-size", "2"], ["--compare", "a", "b"],
    ):  # fmt: skip
        assert f"No such option: {option[0]}" in run("-o", tmp_path / "r", *option, code=2).stderr
    assert "one --profile" in run("--profile", "a", "--profile", "b", code=2).stderr
    done = RUN.invoke(app, ["report", "--multidoc", "x.jsonl", "-o", str(tmp_path / "r")])
    assert done.exit_code == 2 and "cuvee blend-report" in done.stderr
    assert "nowhere" in run("-o", tmp_path / "r", "--multidoc", tmp_path / "nowhere.jsonl", code=1).stderr


def test_the_summary_is_shown(done: tuple[Path, dict[str, Any]]) -> None:
    written = io.StringIO()
    print_blend_summary(done[1], Console(width=200, file=written))
    shown = written.getvalue()
    assert "overlap x boundary" in shown and "Wall time against full prefill" in shown
