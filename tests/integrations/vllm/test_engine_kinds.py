"""Engines of every kind: what one stored, another loads, and answers as from the engine's own prefix cache.

    gemma3        three layers with a window, one without, and two RoPE bases: groups of layers with tables of their own
    gemma3n       the last four layers attend to the caches of the two before them
    gemma4        the same; layers without a window have larger heads, and blocks of half as many tokens
    gpt_oss       every other layer has a window, and attention has sinks
    llama4        a window of two chunks begins anew at each multiple of its length; one layer has no positions
    mistral       all layers have the same window: one group, which drops tokens
    granite       Mamba 2 and attention; steps of one block, so that there is a state at the end of every chunk
    lfm2          short convolutions and attention; steps as long as they come, so that most chunks end without a state
    qwen3_next    gated delta rule (as in Qwen3.5) and attention in bfloat16, its states partly in float32; the same
    falcon_h1     Mamba 2 beside attention in every layer
    nemotron_h    Mamba 2 and attention
    fp8_…         a cache of codes
    ngram, draft_model, eagle, mtp    drafted tokens, by layers of their own but for ngram

What each kind shows in one way is shown for all of them; below that, what only some have. The engine without us answers
its prompts twice, the second time from its own prefix cache, and an engine that loads must answer as this one does: of
models with recurrent layers, whose answers move with the length of steps, to the last bit. All run in one process;
`test_engine` has engines of several. Kinds that have nothing for us that no other one has are tested by night.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.integrations.vllm import gpu_defaults
from tests.integrations.vllm.engines import (
    FP8,
    NO_FP8,
    Answer,
    Engine,
    EngineFailure,
    Ran,
    Step,
    cached,
    distance,
    distinct_chunks,
    fp8_runs,
    ids,
    params,
    run_engines,
    save_tiny_model,
    spread,
    transfer,
)
from tests.integrations.vllm.gpu_defaults import GPU
from tests.predicting import predicting
from transformers import AutoModelForCausalLM

from cuvee.codec.codec import Codec
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.forward import prefill
from cuvee.codec.profiles.profile import Profile
from cuvee.integrations.stores import open_store
from cuvee.integrations.stores.base import is_record
from cuvee.learning.calibrate import fit

pytestmark = pytest.mark.slow

CHUNK = WINDOW = 64
BLOCK = 32
WINDOWS = ("gemma3", "gemma3n", "gemma4", "gpt_oss", "llama4", "mistral")
# On a CPU, vLLM 0.32 and 0.33 raise where a step of Mamba 2 crosses a block's end.
ONE_BLOCK = {"max_num_batched_tokens": BLOCK}
RECURRENT: dict[str, dict[str, Any]] = {
    "granite": ONE_BLOCK,
    "falcon_h1": ONE_BLOCK,
    "nemotron_h": ONE_BLOCK,
    "lfm2": {},
    "qwen3_next": {"dtype": "bfloat16"},
}
DRAFTERS: tuple[str, ...] = ("draft_model", "eagle", "mtp")  # with layers of their own
DRAFTS: tuple[str, ...] = ("ngram", *DRAFTERS)
KINDS: tuple[str, ...] = (*WINDOWS, *RECURRENT, *FP8, *DRAFTS)
if gpu_defaults.wanted():
    # Triton's interpreter does not run the kernel by which vLLM's second model runner looks tokens up.
    RECURRENT, DRAFTERS, DRAFTS = {}, ("draft_model",), ("draft_model",)
    KINDS = (*WINDOWS, *FP8, *DRAFTS)
RARE = ("gemma3n", "gpt_oss", "nemotron_h")
BRANCHED = tuple(kind for kind in ("granite", "lfm2", "qwen3_next") if kind in RECURRENT)
SLEEPING = ("gemma3", "gemma4")  # several groups of layers, and blocks of several sizes
DAMAGED = ("gemma3", *BRANCHED[1:2])  # several groups of layers; states
LOSSY = {"gemma3": 0.01, "fp8_e4m3": 0.03}  # steps

COMMON = ids(4 * CHUNK + 10, 0)
APART = [ids(6 * CHUNK + 7, 1), ids(3 * CHUNK + BLOCK + 2, 2), ids(5 * CHUNK, 3)]
SHARED = [[*COMMON, *ids(40, 4)], [*COMMON, *ids(100, 5)], ids(WINDOW + 1, 6)]
# The first prompt's text, with other ends behind three chunks.
BRANCHES = [[*APART[0][: 3 * CHUNK + 5], *ids(50, seed)] for seed in (7, 8)]
ASKED = ids(100, 9)  # a chunk, and the beginning of another
ACCEPTED, DRAFTED = ("vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_draft_tokens")
PIECES = {"max_num_batched_tokens": 48}  # no multiple of a block: chunks are computed in several steps
TOLD, PRIVATE = ids(100, 10), ids(100, 11)  # one is stored with its ids, the other asks not to be stored


def prompts(kind: str) -> list[list[int]]:
    """Of models with recurrent layers, and with drafts, those without a common beginning: how much of that is found is
    another test.

    A head computes the last block of the engine's own hits anew, so that its drafts are others behind a load of nearly
    all of a prompt: of theirs, several tokens are left.
    """
    if kind in ("eagle", "mtp"):
        return [ids(300, seed) for seed in range(4)]
    return APART if kind in RECURRENT or kind in DRAFTS else [*APART, *SHARED]


def loadable(kind: str) -> list[int]:
    """Tokens of each prompt that are loaded: whole blocks, and the last token is always computed."""
    block = 2 * BLOCK if kind == "gemma4" else BLOCK  # that of its layers with a window
    return [(len(prompt) - 1) // block * block for prompt in prompts(kind)]


def ask(kind: str, **changes: Any) -> Step:
    """One prompt after the other."""
    return Step(prompts(kind), **{"max_tokens": 30 if kind in DRAFTS else 4, **changes})


def talk(kind: str) -> Step:
    """A question. Its answer fills the second chunk, and is longer than a window, whose layers drop the question."""
    return Step([ASKED], max_tokens=WINDOW + 6 if kind in WINDOWS else 30, forget=True)


def options(folder: Path, kind: str) -> dict[str, Any]:
    """Of an engine."""
    if kind in RECURRENT:
        return {"enable_prefix_caching": True, **RECURRENT[kind]}
    if kind in FP8:
        return {"kv_cache_dtype": kind}
    drafters: dict[str, dict[str, Any]] = {
        "ngram": {"prompt_lookup_max": 3, "prompt_lookup_min": 1},
        "draft_model": {"model": str(folder / "drafter")},
        "eagle": {"model": str(folder / "head")},
        "mtp": {},
    }
    if kind in drafters:
        return {"speculative_config": {"method": kind, "num_speculative_tokens": 3, **drafters[kind]}}
    return {}


def model_of(folder: Path, kind: str) -> Path:
    return folder / (kind if kind in (*WINDOWS, *RECURRENT, "eagle", "mtp") else "llama")


def save_drafter(model: Path, drafter: Path) -> None:
    """A model that is like another one, and drafts what that often generates and often does not."""
    network: Any = AutoModelForCausalLM.from_pretrained(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(1 + 0.03 * torch.randn_like(weight))
    network.save_pretrained(drafter)


def save_with_head(kind: str, folder: Path) -> None:
    """Save a model of one layer, and a head that predicts with this layer from tokens alone: it is often right, and
    hardly ever without what the layer holds of the prompt.

    A head norms its layer's input otherwise than the model does, so rows of the table of tokens get a norm of one.
    """
    model = save_tiny_model("qwen2" if kind == "mtp" else "llama", folder / kind, num_hidden_layers=1)
    weights, config = load_file(model / "model.safetensors"), json.loads((model / "config.json").read_text())
    table = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = table / table.square().mean(-1, keepdim=True).sqrt()
    own = {name.removeprefix("model.layers.0."): each for name, each in weights.items() if ".layers.0." in name}
    size = table.shape[1]
    hidden, token = torch.zeros(size, size), torch.eye(size)
    if kind == "eagle":
        head = {f"layers.0.{name}": each for name, each in own.items() if name != "input_layernorm.weight"}
        (folder / "head").mkdir()
        save_file({**head, "fc.weight": torch.cat([token, hidden], 1)}, folder / "head" / "model.safetensors")
        (folder / "head" / "config.json").write_text(json.dumps(config))
    else:  # MiMo, whose heads are in the model's checkpoint
        norms = {f"{name}_layernorm.weight": torch.ones(size) for name in ("token", "hidden", "final")}
        head = {**own, **norms, "input_proj.weight": torch.cat([hidden, token], 1)}
        weights |= {f"model.mtp_layers.0.{name}": each.clone() for name, each in head.items()}
        config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    (model / "config.json").write_text(json.dumps(config))


def fitted(path: Path) -> Profile:
    """A profile of a checkpoint, learned from caches of random text."""
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    layout = KVLayout.from_config(model.config, "float32")
    with torch.no_grad():
        return fit(layout, prefill(model, torch.randint(1, 256, (8, 256)), layout), "layer")


def each(kinds: Sequence[str]) -> pytest.MarkDecorator:
    """A test of each of some kinds."""
    return pytest.mark.parametrize("kind", params(kinds, nightly=RARE))


@pytest.fixture(scope="module")
def kinds(request: pytest.FixtureRequest) -> list[str]:
    """Those that the chosen tests are about."""
    own = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    asked = {item.callspec.params.get("kind") if hasattr(item, "callspec") else None for item in own}
    more = {"gemma3", "fp8_e4m3"} if None in asked else set[str]()  # others look at these
    able = [kind for kind in KINDS if kind not in FP8 or fp8_runs()]
    return [kind for kind in able if kind in {*asked, *more}]


@pytest.fixture(scope="module")
def models(folder: Path) -> Path:
    """The folder, with checkpoints of all kinds, those that draft, and profiles."""
    for family in ("llama", *WINDOWS, *RECURRENT):
        save_tiny_model(family, folder / family)
    save_drafter(folder / "llama", folder / "drafter")
    for kind in ("eagle", "mtp"):
        save_with_head(kind, folder)
    for kind in LOSSY:
        fitted(model_of(folder, kind)).save(folder / f"{kind}.profile")
    return folder


@pytest.fixture(scope="module")
def first(models: Path, kinds: list[str]) -> Mapping[str, Ran]:
    """Engines without us, and engines that fill a store."""
    engines = []
    for kind in kinds:
        own, model = options(models, kind), model_of(models, kind)
        together = Step(BRANCHES) if kind in RECURRENT else ask(kind, together=True, forget=True)
        steps = [ask(kind), ask(kind), together, talk(kind), Step([[3, 0, ids(10, 12)]], forget=True)]
        engines.append(Engine(f"reference {kind}", model, steps, own))
        storing = PIECES if kind in WINDOWS else {}
        filled = [ask(kind, settles=True), ask(kind), replace(talk(kind), settles=True)]
        engines.append(Engine(f"stored {kind}", model, filled, {**own, **storing, **transfer(models, kind)}))
    if "eagle" in kinds:  # nothing is drafted, so that nothing of a drafter is stored
        plain = transfer(models, "plain eagle")
        engines.append(Engine("plain eagle", model_of(models, "eagle"), [ask("eagle", settles=True)], plain))
    engines.append(Engine("apart", models / "llama4", [], transfer(models, "llama4", chunk_tokens=3 * BLOCK)))
    if RECURRENT:
        without = {"enable_prefix_caching": False, **transfer(models, "none")}
        engines.append(Engine("no states", models / "lfm2", [], without))
    return run_engines(models / "first", engines, timeout=900.0)


@pytest.fixture(scope="module")
def loaded(models: Path, first: Mapping[str, Ran], kinds: list[str]) -> Mapping[str, Ran]:
    """Engines that find what the first ones have stored: whole, damaged, or of another kind."""
    engines = []
    for kind in kinds:
        alone = ask(kind, forget=True)
        # A prompt whose first chunks wait to be stored anew is a miss, and what is damaged behind them is not seen.
        both = [replace(alone, settles="each"), alone]
        together = (
            Step(BRANCHES, forget=True, settles="each") if kind in RECURRENT else ask(kind, together=True, forget=True)
        )
        steps = [alone, together, talk(kind), Step([[2, 0, ids(10, 12)]], forget=True)]
        if kind in SLEEPING:
            steps += [replace(alone, sleeps=True), Step(APART[:1], sleeps="changed")]
        given = {**options(models, kind), **transfer(models, kind)}
        engines.append(Engine(kind, model_of(models, kind), steps, given))
        if kind in DAMAGED:
            store = shutil.copytree(models / "stores" / kind, models / "stores" / f"damaged {kind}")
            for path in sorted(store.glob("*/*/*"))[:: 1 if kind in RECURRENT else 3]:
                path.write_bytes(path.read_bytes()[:-1] + b"?")
            broken = {**options(models, kind), **transfer(models, f"damaged {kind}")}
            engines.append(Engine(f"damaged {kind}", models / kind, both, broken))
        if kind in LOSSY:
            lossy = transfer(
                models, f"lossy {kind}", quality=None, step=LOSSY[kind], profile=str(models / f"{kind}.profile")
            )
            engines.append(Engine(f"lossy {kind}", model_of(models, kind), both, {**options(models, kind), **lossy}))
        if kind == "eagle":
            plain = {**options(models, kind), **transfer(models, "plain eagle")}
            engines.append(Engine("without eagle", model_of(models, kind), [alone], plain))
    codes = transfer(models, "fp8_e4m3")
    stored_first = [Step([*APART, SHARED[0]], forget=True, settles=True), Step(SHARED[1:], forget=True)]
    for name, dtype in (("other codes", options(models, "fp8_e5m2")), ("no codes", {})) if fp8_runs() else ():
        engines.append(Engine(name, models / "llama", stored_first, {**dtype, **codes}))
    whole = {"disable_hybrid_kv_cache_manager": True, **transfer(models, "gemma3")}
    engines.append(Engine("whole", models / "gemma3", [ask("gemma3", forget=True)], whole))
    predicting(fitted(models / "llama"), vocabulary=256).save(models / "predicting.profile")
    with_ids = {"quality": None, "step": 0.05, "profile": str(models / "predicting.profile")}
    told = [Step([TOLD], max_tokens=40, settles=True), Step([PRIVATE], params=[{"cuvee": {"store": False}}])]
    engines.append(Engine("ids", models / "llama", [*told, Step(settles=True)], transfer(models, "ids", **with_ids)))
    return run_engines(models / "second", engines, timeout=900.0)


def assert_same(kind: str, answers: Sequence[Answer], expected: Sequence[Answer], reference: Ran) -> None:
    """Same tokens; logprobs to the last bit, or as close as batching alone leaves them."""
    allowed = 0.0 if kind in RECURRENT else max(4 * spread([reference.steps[0], reference.steps[2]]), 1e-4)
    assert allowed < 0.05, "the reference does not agree with itself"
    distances = [distance(answer, other) for answer, other in zip(answers, expected, strict=True)]
    assert max(distances) <= allowed, distances


@each(KINDS)
def test_storing_changes_nothing(kind: str, first: Mapping[str, Ran]) -> None:
    """Of a prompt that the engine's own cache holds neither, where layers with windows hold only ends."""
    reference, ran = first[f"reference {kind}"], first[f"stored {kind}"]
    assert_same(kind, ran.steps[0], reference.steps[0], reference)
    assert_same(kind, ran.steps[1], reference.steps[1], reference)
    ran.assert_sound("stores_skipped")
    assert ran.metric("vllm:cuvee_stored{kind=chunk}", 0) >= distinct_chunks(CHUNK, *prompts(kind))
    assert ran.metric("vllm:cuvee_stored{kind=chunk}") == ran.metric("vllm:cuvee_stored{kind=chunk}", 0) + 2
    loads = [ran.metric("vllm:cuvee_load_seconds_count", step) for step in range(2)]
    assert loads[0] == loads[1], "the engine has all of it"


@each(KINDS)
@pytest.mark.serves(model="sliding windows", where="engine")
@pytest.mark.serves(model="chunked attention", where="engine")
@pytest.mark.serves(model="layers that share a cache", where="engine")
@pytest.mark.serves(model="heads of different sizes", where="engine")
@pytest.mark.serves(model="recurrent layers", where="engine")
@pytest.mark.serves(cache="fp8_e4m3", where="engine")
@pytest.mark.serves(cache="fp8_e5m2", where="engine")
@pytest.mark.serves(drafts="ngram", where="engine")
@pytest.mark.serves(drafts="draft_model", where="engine")
@pytest.mark.serves(drafts="eagle", where="engine")
@pytest.mark.serves(drafts="mtp", where="engine")
# `make nightly` runs this file with vLLM's defaults on a GPU, too (`gpu_defaults`).
@pytest.mark.serves(model="sliding windows", runner="V2, async", where="engine")
@pytest.mark.serves(model="layers that share a cache", runner="V2, async", where="engine")
@pytest.mark.serves(model="heads of different sizes", runner="V2, async", where="engine")
def test_a_load_answers_as_a_hit_in_the_engines_own_cache(
    kind: str, first: Mapping[str, Ran], loaded: Mapping[str, Ran]
) -> None:
    """A state of another step, or in another block, would answer another prompt."""
    reference, ran = first[f"reference {kind}"], loaded[kind]
    assert_same(kind, ran.steps[0], reference.steps[1], reference)
    assert cached(ran.steps[0]) == loadable(kind)
    assert ran.metric("vllm:external_prefix_cache_hits", 0) == sum(loadable(kind))
    if kind in RECURRENT:
        assert cached(reference.steps[1]) == loadable(kind), "the reference found its own"
        assert ran.metric("vllm:cuvee_loaded{kind=state}", 0) >= len(APART)
    else:
        assert_same(kind, ran.steps[1], reference.steps[2], reference)
    ran.assert_sound("stores_skipped")


@each(KINDS)
def test_a_conversation_goes_on_from_its_answer(kind: str, first: Mapping[str, Ran], loaded: Mapping[str, Ran]) -> None:
    """Question and answer fill a chunk that neither fills alone."""
    reference, ran = first[f"reference {kind}"], loaded[kind]
    assert ran.steps[2][0].tokens == reference.steps[3][0].tokens
    assert ran.steps[3][0].cached >= 2 * CHUNK
    if kind not in RECURRENT:
        assert_same(kind, ran.steps[3], reference.steps[4], reference)


# Windows --------------------------------------------------------------------------------------------------------------


@each(SLEEPING)
def test_after_a_sleep_what_was_stored_before_is_loaded_unless_weights_changed(
    kind: str, first: Mapping[str, Ran], loaded: Mapping[str, Ran]
) -> None:
    """Into the pages that the engine's layers have then: those from before are noise to nobody."""
    answers = loaded[kind].steps[4]
    assert_same(kind, answers, first[f"reference {kind}"].steps[1], first[f"reference {kind}"])
    assert cached(answers) == loadable(kind) and cached(loaded[kind].steps[5]) == [0]


def test_a_chunk_must_not_cross_the_end_of_one_of_the_attention(first: Mapping[str, Ran]) -> None:
    """The engine says so because it drops tokens there: the others of this family would not show it."""
    with pytest.raises(EngineFailure, match=r"chunk_tokens: must divide the 128 tokens of a chunk .*set it to 32"):
        first["apart"]


def test_an_engine_that_keeps_all_tokens_loads_the_same_entries(
    first: Mapping[str, Ran], loaded: Mapping[str, Ran]
) -> None:
    """Without vLLM's hybrid manager."""
    reference = first["reference gemma3"]
    assert_same("gemma3", loaded["whole"].steps[0], reference.steps[1], reference)
    assert cached(loaded["whole"].steps[0]) == loadable("gemma3")
    loaded["whole"].assert_sound("stores_skipped")


# Damage and loss ------------------------------------------------------------------------------------------------------


@each(DAMAGED)
def test_what_is_damaged_is_computed_and_stored_again(
    kind: str, first: Mapping[str, Ran], loaded: Mapping[str, Ran]
) -> None:
    """As a whole: the engine cannot keep a part of such a load, and stops if it is told of blocks."""
    reference, ran = first[f"reference {kind}"], loaded[f"damaged {kind}"]
    assert_same(kind, ran.steps[0], reference.steps[0], reference)
    assert_same(kind, ran.steps[1], reference.steps[1], reference)
    failed = ran.metric("vllm:cuvee_failures", 0)
    assert 0 < failed <= len(prompts(kind)) and ran.metric("vllm:cuvee_store_operations{result=corrupt}", 0) > 0
    assert failed * BLOCK <= ran.metric("vllm:cuvee_recomputed_tokens", 0) <= sum(loadable(kind))
    assert ran.metric("vllm:cuvee_contained") == 0
    assert cached(ran.steps[1]) == loadable(kind), "stored anew by what computed them"


@each([*LOSSY])
def test_a_lossy_cache_is_close_and_not_the_same(
    kind: str, first: Mapping[str, Ran], loaded: Mapping[str, Ran]
) -> None:
    """So the comparison of the others would see what is not exact; RoPE is undone and done again, by each layer's base.

    Where keys were rotated otherwise than they are stored, answers would be those of another prompt.
    """
    exact, ran = first[f"reference {kind}"].steps[1], loaded[f"lossy {kind}"]
    assert cached(ran.steps[1]) == loadable(kind)
    for answer, expected in zip(ran.steps[1], exact, strict=True):
        ours, theirs = answer.logprobs[0], expected.logprobs[0]
        moved = max(abs(ours[token] - theirs[token]) for token in ours.keys() & theirs.keys())
        assert 1e-4 < moved < 0.5
    stored, whole = (each.metric("vllm:cuvee_stored_bytes", 0) for each in (ran, first[f"stored {kind}"]))
    assert 0 < stored < whole
    ran.assert_sound("stores_skipped")


@pytest.mark.parametrize("name", ["other codes", "no codes"])
@pytest.mark.skipif(not fp8_runs(), reason=NO_FP8)
def test_caches_of_another_dtype_are_not_shared(name: str, loaded: Mapping[str, Ran]) -> None:
    first, second = (cached(step) for step in loaded[name].steps)
    assert (first, second) == ([0] * 4, [4 * CHUNK, 0]), "only what it has just stored"


# Recurrent layers -----------------------------------------------------------------------------------------------------


@each(BRANCHED)
def test_a_load_is_as_long_as_the_last_state(kind: str, first: Mapping[str, Ran], loaded: Mapping[str, Ran]) -> None:
    """The chunks before a branch are all there; whether a state is, depends on where the engine's steps ended. Where it
    is not, the engine has a step end there, so that the next branch finds it.
    """
    answers, expected = loaded[kind].steps[1], first[f"reference {kind}"].steps[2]
    assert cached(expected) == [0, 3 * CHUNK], "the engine's own cache drops more states"
    assert cached(answers) == [3 * CHUNK if kind == "granite" else 0, 3 * CHUNK]
    assert_same(kind, answers, expected, first[f"reference {kind}"])


@pytest.mark.skipif(not RECURRENT, reason="served by vLLM's first model runner alone")
@pytest.mark.serves(model="recurrent layers, no states kept", where="refused")
def test_without_states_at_the_ends_of_blocks_the_engine_does_not_start(first: Mapping[str, Ran]) -> None:
    with pytest.raises(EngineFailure, match=r"mamba_cache_mode='none' are not supported, .*--enable-prefix-caching"):
        first["no states"]


# Drafts ---------------------------------------------------------------------------------------------------------------


def accepted(ran: Ran, step: int = 0) -> float:
    """Of the tokens that were drafted in a step."""
    counts = [ran.metric(name, step) - (ran.metric(name, step - 1) if step else 0) for name in (ACCEPTED, DRAFTED)]
    return counts[0] / counts[1]


@each([kind for kind in ("ngram", "draft_model") if kind in DRAFTS])
def test_drafts_were_made_and_many_rejected(kind: str, first: Mapping[str, Ran]) -> None:
    """Otherwise the tests of answers would not tell whether rejected drafts are stored."""
    assert accepted(first[f"stored {kind}"]) < 0.9
    assert accepted(first[f"stored {kind}"]) > 0 or kind == "ngram"


@each(DRAFTERS)
def test_as_much_is_accepted_behind_a_restored_prompt_as_behind_a_cached_one(
    kind: str, first: Mapping[str, Ran], loaded: Mapping[str, Ran]
) -> None:
    """And what a drafter's layers hold is not needed for answers."""
    reference, ran = first[f"reference {kind}"], loaded[kind]
    assert ran.metric("vllm:cuvee_loaded{kind=drafts}", 0) == ran.metric("vllm:cuvee_loaded", 0) / 2
    assert accepted(ran) == pytest.approx(accepted(reference, 1), abs=0.01)
    if kind != "eagle":
        return
    without = loaded["without eagle"]
    assert accepted(without) < accepted(ran) - 0.05, "otherwise nobody would see that drafts are not restored"
    assert_same(kind, without.steps[0], reference.steps[1], reference)
    assert without.metric("vllm:cuvee_loaded{kind=drafts}") == 0


# Tails ----------------------------------------------------------------------------------------------------------------


def test_an_engine_stores_the_ids_of_prompt_and_answer(loaded: Mapping[str, Ran], folder: Path) -> None:
    """So that a codec can predict from them: of two chunks, and of the tail where the prompt ended; not what asks not
    to be stored.
    """
    (answer,) = loaded["ids"].steps[0]
    store = open_store(f"file://{folder / 'stores' / 'ids'}", guarded=False)
    keys = [f"{path.parents[1].name}/{path.name}" for path in folder.glob("stores/ids/*/*/*")]
    blobs = store.get_many([key for key in keys if not is_record(key)])
    text, found = [*TOLD, *answer.tokens], set()
    for blob in blobs:
        chunk = Codec(Profile.load(folder / "predicting.profile"), step=0.05).decode(blob or b"")
        assert chunk.token_ids is not None and chunk.token_ids.tolist() == text[chunk.start : chunk.end]
        found.add((chunk.start, chunk.tokens))
    assert found == {(0, 64), (64, 64), (64, 32)}
    assert loaded["ids"].metric("vllm:cuvee_unstored_tokens") > 0


# vLLM's defaults on a GPU ---------------------------------------------------------------------------------------------


@pytest.mark.serves(runner="V2, async", where="engine")
def test_with_the_defaults_of_a_gpu_a_load_changes_no_bit(models: Path) -> None:
    """V2 model runner, async scheduling; a sleep, too. By night, all kinds run so."""
    model, ours = models / "llama", transfer(models, "gpu")
    once = Step([APART[1], SHARED[2]], forget=True, max_tokens=4)
    slept = replace(once, prompts=APART[1:2], sleeps=True)
    stored = Engine("stored", model, [replace(once, settles=True)], ours)
    found = Engine("loaded", model, [once, slept], ours)
    both = run_engines(models / "gpu", [Engine("reference", model, [once]), stored, found], 600.0, False, **GPU)
    (expected,), ran = both["reference"].steps, both["loaded"]
    assert cached(ran.steps[0]) == [loadable("")[at] for at in (1, 5)] and cached(ran.steps[1]) == [loadable("")[1]]
    for answers in (*both["stored"].steps, *ran.steps):
        assert all(distance(answer, other) == 0.0 for answer, other in zip(answers, expected, strict=False))
    ran.assert_sound("stores_skipped")
    for engine in both.values():
        assert "V2 runner: True, async scheduling: True" in engine.log
