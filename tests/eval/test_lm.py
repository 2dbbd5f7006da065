"""The lm-eval model: what goes through the method, and that nothing else changes."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tests.conftest import LAYOUTS, Books, fitted_to, synthetic_chunk, tiny_config, tiny_model
from tests.every_model import build
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from cuvee.calibration.bundled import bundled_text
from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import InputError, ProfileError, ProfileMismatchError, UnsupportedModelError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.fingerprint import model_fingerprint
from cuvee.codec.models.forward import prefill
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.quality import CurvePoint
from cuvee.eval import cached_reading
from cuvee.eval.baselines.quantizers import CacheGen, Destroyed, Kivi, Uncompressed
from cuvee.eval.cached_reading import ExactCaches, Read
from cuvee.eval.lm import CuveeLM
from cuvee.eval.lm_command import complete_arguments, run_cli
from cuvee.eval.methods import BASELINES, baseline, method_identity
from cuvee.eval.quality import CodecMethod, Method
from cuvee.eval.tasks import TASKS_PATH
from cuvee.learning.calibrate import fit

WORDS = ["<pad>", "<end>", "<unk>", *(f"w{index}" for index in range(3, 61))]
TOLERANCE = 1e-4

Score = list[tuple[float, bool]]


def word_tokenizer(**arguments: Any) -> PreTrainedTokenizerFast:
    """One token a word; a text begins and ends with <end>."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, **arguments)


def words(count: int, seed: int = 0) -> str:
    """So many random words, none of them special."""
    picked = torch.randint(3, 61, (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[index] for index in picked.tolist())


def ask(kind: str, *arguments: Any, task: str | None = "recall") -> Instance:
    return Instance(kind, {}, arguments, 0, (task, 0, 1))


def choices(contexts: list[int], continuations: list[int], task: str = "recall") -> list[Instance]:
    """Every continuation after every context, as lengths in words; the same words never come twice."""
    return [
        ask("loglikelihood", words(context, context), " " + words(length, 100 + at), task=task)
        for context in contexts
        for at, length in enumerate(continuations)
    ]


def quiet(lm: Any, kind: str, requests: list[Instance]) -> Any:
    return getattr(lm, kind)(requests, disable_tqdm=True)


def difference(a: Score, b: Score) -> float:
    return max(abs(x[0] - y[0]) for x, y in zip(a, b, strict=True))


@dataclass(frozen=True)
class Recording(Uncompressed):
    seen: list[KVChunk] = field(default_factory=list, repr=False)

    def encode(self, chunk: KVChunk) -> tuple[Any, float]:
        self.seen.append(chunk)
        return super().encode(chunk)

    @property
    def spans(self) -> list[tuple[int, int]]:
        return [(chunk.start, chunk.tokens) for chunk in self.seen]


@dataclass(frozen=True)
class Short(Uncompressed):
    def decode(self, stored: Any) -> KVChunk:
        chunk: KVChunk = super().decode(stored)
        return chunk.slice(0, chunk.tokens - 1)


def lively(family: str, **changes: Any) -> Any:
    """A tiny model whose predictions depend on its cache; a new one's are all but uniform."""
    model = tiny_model(family, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return model


def llama(**arguments: Any) -> CuveeLM:
    """A tiny Llama of 64 positions."""
    model = lively("llama", max_position_embeddings=64)
    return CuveeLM(model, **{"tokenizer": word_tokenizer(), "batch_size": 4, **arguments})


# The same as HFLM ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["deepseek_v3", "gemma3-sliding-first", "gpt2"])
def test_families_answer_like_hflm(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents, windows, positions that end; the caches of all others are tested in transformers'."""
    model, tokenizer = lively(family), word_tokenizer()
    scored = [*choices([25, 3, 1, 14, 2, 40], [1, 6, 3]), ask("loglikelihood", "", words(4))]
    whole = [ask("loglikelihood_rolling", words(count, count)) for count in (1, 2, 31, 165)]
    begun = [
        ask("generate_until", words(count, count), {"until": ["w5 w5 w5"], "max_gen_toks": 7})
        for count in (2, 30, 1, 11, 9)
    ]
    alike = [
        ask("generate_until", f"{words(30)} {words(count, count)}", {"until": ["w5 w5 w5"], "max_gen_toks": 7})
        for count in (2, 9, 4)
    ]
    monkeypatch.setattr(cached_reading, "_SHARED_TOKENS", 20)
    for batch_size in (1, 4):
        arguments: dict[str, Any] = {"tokenizer": tokenizer, "batch_size": batch_size, "max_length": 60}
        reference, lm = HFLM(model, **arguments), CuveeLM(model, method=Uncompressed(), chunk_tokens=8, **arguments)
        expected: Score = quiet(reference, "loglikelihood", scored)
        got: Score = quiet(lm, "loglikelihood", scored)
        assert difference(got, expected) < TOLERANCE
        assert [greedy for _, greedy in got] == [greedy for _, greedy in expected]
        rolled = quiet(reference, "loglikelihood_rolling", whole)
        assert quiet(lm, "loglikelihood_rolling", whole) == pytest.approx(rolled, rel=1e-6, abs=TOLERANCE)
        for asked in (begun, alike):
            assert quiet(lm, "generate_until", asked) == quiet(reference, "generate_until", asked)
    lm.use(Destroyed())  # of what all this would not notice if the cache did not matter
    assert difference(quiet(lm, "loglikelihood", scored), expected) > 0.01


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_beginning_that_prompts_share_is_read_once(batch_size: int) -> None:
    """As worked examples are, by all methods. The whole cache of each prompt still goes through the method."""
    model = lively("llama", max_position_embeddings=256)
    stop = {"until": ["w5 w5 w5"], "max_gen_toks": 7}
    texts = [f"{words(100)} {words(count, count)}" for count in (9, 12, 17, 11, 5)]
    begun = [ask("generate_until", text, stop) for text in texts]
    arguments: dict[str, Any] = {"tokenizer": word_tokenizer(), "batch_size": batch_size}
    method = Recording()
    lm = CuveeLM(model, method=method, chunk_tokens=64, **arguments)
    passes: list[int] = []
    forward = lm._forward

    def counted(tokens: torch.Tensor, **given: Any) -> torch.Tensor:
        passes.append(tokens.numel())
        return forward(tokens, **given)

    lm._reader._forward = counted
    assert quiet(lm, "generate_until", begun) == quiet(HFLM(model, **arguments), "generate_until", begun)
    # The last token of a prompt is not cached; rows are padded to the longest of their batch.
    assert passes == {1: [116, 11, 10, 8, 4], 3: [100, 3 * 16, 2 * 8]}[batch_size]
    assert lm.statistics.cached_tokens == sum(chunk.tokens for chunk in method.seen) == 116 + 111 + 110 + 108 + 104
    lm.use(Uncompressed())
    passes.clear()
    lm._reader._forward = counted
    assert quiet(lm, "generate_until", begun) == quiet(HFLM(model, **arguments), "generate_until", begun)
    assert passes == {1: [1, 11, 10, 8, 4], 3: [3 * 16, 2 * 8]}[batch_size]  # the next method reads it no more
    scored = [*choices([80, 30], [2, 3]), *(ask("loglikelihood", text, " w7 w8") for text in texts)]
    expected = quiet(HFLM(model, **arguments), "loglikelihood", scored)
    assert difference(quiet(lm, "loglikelihood", scored), expected) < TOLERANCE


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("fitting", [0, 2, 4])
def test_the_next_methods_share_the_exact_caches_that_fit(
    fitting: int, batch_size: int, prefills: list[list[int]]
) -> None:
    """Those that come first are kept, longest first, and all answers stay as they are."""
    arguments: dict[str, Any] = {"tokenizer": word_tokenizer(), "batch_size": batch_size}
    lm = CuveeLM(lively("llama", max_position_embeddings=256), method=Uncompressed(), **arguments)
    cached = [89, 69, 49, 29]  # the last token of a prompt is not
    texts = [words(count + 1, count) for count in cached]
    scored = [ask("loglikelihood", text, " w7 w8") for text in texts]
    begun = [ask("generate_until", text, {"until": ["w5 w5 w5"], "max_gen_toks": 7}) for text in texts]

    def answers(method: Method) -> list[Any]:
        lm.use(method)
        return [quiet(lm, "loglikelihood", scored), quiet(lm, "generate_until", begun)]

    expected = [(method, answers(method)) for method in (Uncompressed(), Destroyed())]
    assert expected[0][1] != expected[1][1]
    lm.exact_caches = ExactCaches(sum(cached[:fitting]) * lm.layout.values_per_token * 4)
    assert answers(Uncompressed()) == expected[0][1]
    for method, answered in expected:
        prefills.clear()
        assert answers(method) == answered
        assert sorted(length for each in prefills for length in each) == sorted(2 * cached[fitting:])
        assert lm.statistics.cached_tokens == 2 * sum(cached)


def test_a_text_that_spells_out_its_bos_is_one_without() -> None:
    """Chat templates write BOS, the tokenizer puts another before it; one of a batch may have it, the others not."""
    tokenizer, leading, ids = word_tokenizer(bos_token="<pad>"), ("<pad>", "<end>"), [0, 1]
    special = list(zip(leading, ids, strict=True))
    template = processors.TemplateProcessing(single="<pad> <end> $A", special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = template
    model = lively("llama", max_position_embeddings=64)
    lm = CuveeLM(model, tokenizer=tokenizer, batch_size=4, method=Uncompressed())
    plain = [words(20, 1), words(9, 2)]
    spelt = [" ".join((*leading, text)) for text in plain]
    assert lm.tok_encode(plain[0]) == [*ids, *(WORDS.index(word) for word in plain[0].split())]
    other = CuveeLM(model, tokenizer=tokenizer, prefix_token_id=5, method=Uncompressed())
    assert other.tok_encode(spelt[0]) == lm.tok_encode(plain[0])

    def answers(texts: list[str]) -> tuple[list[str], list[float]]:
        asked = [ask("generate_until", text, {"until": ["w5 w5"], "max_gen_toks": 6}) for text in texts]
        pairs = [ask("loglikelihood", text, " w7 w8") for text in texts]
        whole = [ask("loglikelihood_rolling", text) for text in texts]
        scored = [value for value, _ in quiet(lm, "loglikelihood", pairs)] + quiet(lm, "loglikelihood_rolling", whole)
        return quiet(lm, "generate_until", asked), scored

    written, scores = answers(plain)
    again, scored = answers([plain[0], spelt[1]])
    assert again == written and scored == pytest.approx(scores, abs=TOLERANCE)


def test_a_rolling_window_does_not_score_bos() -> None:
    """HFLM puts BOS before the tokenizer's own, and counts how likely the second is."""
    tokenizer = word_tokenizer(bos_token="<pad>")
    bos = ("<pad>", WORDS.index("<pad>"))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<pad> $A", special_tokens=[bos])
    model = lively("llama", max_position_embeddings=64)
    lm = CuveeLM(model, tokenizer=tokenizer, method=Uncompressed())
    (got,) = quiet(lm, "loglikelihood_rolling", [ask("loglikelihood_rolling", words(20))])
    tokens = torch.tensor([[bos[1], *(WORDS.index(word) for word in words(20).split())]])
    with torch.no_grad():
        predicted = model(tokens[:, :-1]).logits.log_softmax(-1)
    assert got == pytest.approx(float(predicted.gather(-1, tokens[:, 1:, None]).sum()), abs=TOLERANCE)


def test_a_hybrid_answers_like_hflm() -> None:
    """Its states go with the chunks; and they would not fit behind padding."""
    model, _, _ = build("qwen3_next")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    arguments: dict[str, Any] = {"tokenizer": word_tokenizer(), "max_length": 60}
    reference, lm = HFLM(model, **arguments), CuveeLM(model, quality="lossless", chunk_tokens=8, **arguments)
    scored = choices([25, 3, 1, 40], [1, 6])
    begun = [ask("generate_until", words(count, count), {"until": ["w5 w5"], "max_gen_toks": 7}) for count in (30, 2)]
    expected: Score = quiet(reference, "loglikelihood", scored)
    assert difference(quiet(lm, "loglikelihood", scored), expected) < TOLERANCE
    assert quiet(lm, "generate_until", begun) == quiet(reference, "generate_until", begun)
    lm.use(Destroyed())
    assert difference(quiet(lm, "loglikelihood", scored), expected) > 0.01
    with pytest.raises(InputError, match=r"^batch_size: must be 1 for qwen3_next, .* got 4"):
        CuveeLM(model, quality="lossless", batch_size=4, **arguments)


def test_one_batch_holds_contexts_at_the_end_of_the_positions() -> None:
    # Padding behind a short continuation must not ask GPT-2 for positions that it does not have.
    model, tokenizer = lively("gpt2", max_position_embeddings=24), word_tokenizer()
    requests = [*choices([22], [2]), *choices([3], [20])]
    expected = quiet(HFLM(model, tokenizer=tokenizer, batch_size=2), "loglikelihood", requests)
    lm = CuveeLM(model, tokenizer=tokenizer, batch_size=2, method=Uncompressed())
    assert difference(quiet(lm, "loglikelihood", requests), expected) < TOLERANCE


def test_beams_and_repeated_prompts() -> None:
    model, tokenizer = lively("llama"), word_tokenizer()
    for arguments in ({"num_beams": 3}, {"num_beams": 1}):
        begun = [
            ask("generate_until", words(count, count), {"until": ["w5 w5 w5"], "max_gen_toks": 6, **arguments})
            for count in (12, 5, 12)
        ]
        expected = quiet(HFLM(model, tokenizer=tokenizer, batch_size=4), "generate_until", begun)
        lm = CuveeLM(model, tokenizer=tokenizer, batch_size=4, method=Uncompressed())
        assert quiet(lm, "generate_until", begun) == expected
        assert lm.statistics.contexts == 2
        lm.use(Destroyed())
        assert quiet(lm, "generate_until", begun) != expected


GENERATION: dict[str, Any] = {
    "bad_words_ids": [[5], [7, 8]], "begin_suppress_tokens": [9], "encoder_no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.5, "eos_token_id": 12, "exponential_decay_length_penalty": (2, 1.5),
    "forced_bos_token_id": 4, "forced_eos_token_id": 4, "min_length": 14, "min_new_tokens": 3,
    "no_repeat_ngram_size": 2, "repetition_penalty": 3.0, "suppress_tokens": list(range(3, 30)),
}  # fmt: skip
SAMPLING: dict[str, Any] = {
    "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.2, "typical_p": 0.5, "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.01, "renormalize_logits": True, "remove_invalid_values": True,
}  # fmt: skip
BEAMS: dict[str, Any] = {"length_penalty": 2.0, "early_stopping": True}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of transformers: some arguments are for what is not asked for
def test_generation_arguments_have_the_effect_that_they_have_without_a_cache() -> None:
    model, tokenizer = lively("llama"), word_tokenizer()
    hf = HFLM(model, tokenizer=tokenizer, batch_size=4)
    ours = CuveeLM(model, tokenizer=tokenizer, batch_size=4, method=Uncompressed())
    asked = [
        *({"do_sample": False, "eos_token_id": 12, name: value} for name, value in GENERATION.items()),
        *({"do_sample": True, "temperature": 1.0, name: value} for name, value in SAMPLING.items()),
        *({"num_beams": 3, name: value} for name, value in BEAMS.items()),
        {"do_sample": False, "prompt_lookup_num_tokens": None},
    ]
    for arguments in asked:
        requests = [
            ask("generate_until", words(count, count), {"until": ["w5 w5 w5"], "max_gen_toks": 6, **arguments})
            for count in (12, 5)
        ]
        texts = []
        for lm in (hf, ours):
            torch.manual_seed(0)
            texts.append(quiet(lm, "generate_until", requests))
        assert texts[0] == texts[1], arguments


@pytest.mark.parametrize("arguments", [{"prompt_lookup_num_tokens": 3}, {"use_cache": False}])
def test_generation_that_needs_a_cache_of_its_own_is_refused(arguments: dict[str, Any]) -> None:
    lm = llama(method=Uncompressed())
    with pytest.raises(InputError, match=rf"got {next(iter(arguments))} from recall: leave it out"):
        quiet(lm, "generate_until", [ask("generate_until", words(9), {"until": ["<end>"], **arguments})])
    assert lm.statistics.contexts == 0


def test_what_only_makes_a_checkpoint_faster_is_left_out() -> None:
    model, tokenizer = lively("llama"), word_tokenizer()
    requests = [ask("generate_until", words(30), {"until": ["w5 w5 w5"], "max_gen_toks": 6})]
    expected = quiet(HFLM(model, tokenizer=tokenizer), "generate_until", requests)
    model.generation_config.update(prompt_lookup_num_tokens=3, cache_implementation="static")
    lm = CuveeLM(model, tokenizer=tokenizer, method=Uncompressed())
    assert quiet(lm, "generate_until", requests) == expected and lm.statistics.contexts == 1


def test_mixed_precision_and_softmax_dtype() -> None:
    arguments: dict[str, Any] = {"mixed_precision_dtype": "bfloat16", "softmax_dtype": "float32"}
    arguments["tokenizer"] = word_tokenizer()
    model, requests = lively("llama"), choices([20, 6], [3, 2])
    expected = quiet(HFLM(model, **arguments), "loglikelihood", requests)
    recording = Recording()
    got = quiet(CuveeLM(model, method=recording, **arguments), "loglikelihood", requests)
    assert difference(got, expected) < 0.1 < max(abs(value) for value, _ in expected)
    assert {chunk.keys[0].dtype for chunk in recording.seen} == {torch.float32}


def test_likelihoods_of_a_model_in_16_bits_are_those_of_its_logits() -> None:
    """In bfloat16 each logarithm would be rounded to 8 bits, and so would their sum."""
    model, requests = lively("llama", dtype=torch.bfloat16), choices([20, 6], [9, 2])
    lm = CuveeLM(model, tokenizer=word_tokenizer(), method=Uncompressed())
    exact = CuveeLM(model, tokenizer=word_tokenizer(), method=Uncompressed(), softmax_dtype="float64")
    found, expected = (quiet(one, "loglikelihood", requests) for one in (lm, exact))
    assert difference(found, expected) < 1e-4
    rough = torch.tensor([value for value, _ in expected]).bfloat16().tolist()
    assert max(abs(value - each) for (value, _), each in zip(expected, rough, strict=True)) > 1e-2


# What goes through the method ------------------------------------------------------------------------------------


def test_each_context_goes_through_the_method_once_in_chunks() -> None:
    recording = Recording()
    lm = llama(method=recording, chunk_tokens=8, batch_size=2)
    quiet(lm, "loglikelihood", choices([21, 9, 2, 1], [1, 4, 2]))
    assert sorted(recording.spans) == sorted([(0, 8), (8, 8), (16, 4), (0, 8), (0, 1)])
    assert lm.statistics.contexts == 3 and lm.statistics.cached_tokens == 20 + 8 + 1
    assert lm.statistics.uncached_requests == 3  # those of the context of one token
    assert lm.bits_per_value == 32
    # The chunks hold the cache of those very tokens, at their positions.
    tokens = torch.tensor([lm.tok_encode(words(21, 21))[:-1]])
    with torch.no_grad():
        (whole,) = prefill(lm.model, tokens, lm.layout)
    long = next(chunk for chunk in recording.seen if chunk.start == 16)
    torch.testing.assert_close(long.keys[1], whole.keys[1][16:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(long.values[0], whole.values[0][16:], rtol=1e-4, atol=1e-5)
    assert long.token_ids is not None and long.token_ids.tolist() == tokens[0, 16:].tolist()


def test_half_of_each_rolling_window_is_scored_exactly() -> None:
    recording = Recording()
    lm = llama(method=recording, max_length=20)
    text = words(50, 3)
    exact = quiet(lm, "loglikelihood_rolling", [ask("loglikelihood_rolling", text)])
    # 50 tokens after one to begin with: windows of 20, 20, and the last 10 after 10 of the second.
    assert recording.spans == [(0, 10)] * 3
    lm.use(Destroyed())
    spoilt = quiet(lm, "loglikelihood_rolling", [ask("loglikelihood_rolling", text)])
    assert abs(spoilt[0] - exact[0]) > 0.1


def test_likeliest_are_all_targets_or_none() -> None:
    lm = llama(method=Uncompressed())
    tokens = tuple(lm.tok_encode(words(12)))
    likeliest = lm._forward(torch.tensor([tokens]))[0].argmax(-1).tolist()
    for wrong in (None, 0, 11):  # before and after the split
        targets = tuple((token + (at == wrong)) % 61 for at, token in enumerate(likeliest))
        ((_, greedy),) = lm._reader.score([Read(tokens, 6, targets)], 1, tqdm(disable=True))
        assert greedy == (wrong is None)


def test_a_codec_changes_little_and_its_bits_are_those_of_its_blobs(bundled: tuple[Any, Any], books: Books) -> None:
    model, tokenizer = bundled
    ids = tokenizer(bundled_text("orchard")).input_ids
    requests = [
        (("", ""), ids[first : first + count], ids[at : at + 3])
        for first, count in ((100, 80), (300, 33))
        for at in (first + count, 900)
    ]
    exact = HFLM(model, tokenizer=tokenizer)._loglikelihood_tokens(requests, disable_tqdm=True)
    lm = CuveeLM(model, tokenizer=tokenizer, batch_size=4, profile=books.profile, quality="high", chunk_tokens=64)
    assert 1e-4 < difference(lm._loglikelihood_tokens(requests, disable_tqdm=True), exact) < 0.5
    codec = Codec(books.profile, "high")
    blobs = 0
    with torch.no_grad():
        for context in (ids[100:179], ids[300:332]):
            (chunk,) = prefill(model, torch.tensor([context]), lm.layout)
            pieces = [chunk.slice(t, min(t + 64, chunk.tokens)) for t in range(0, chunk.tokens, 64)]
            blobs += sum(len(codec.encode(piece)) for piece in pieces)
    # The batch's sums are rounded otherwise than those of a row alone: a few levels differ.
    assert lm.bits_per_value == pytest.approx(8 * blobs / (111 * lm.layout.values_per_token), rel=1e-3)
    lm.use(CodecMethod(Codec(Profile.unlearned(lm.layout), "lossless")))
    assert lm.bits_per_value is None and lm.statistics.contexts == 0
    assert difference(lm._loglikelihood_tokens(requests, disable_tqdm=True), exact) < TOLERANCE


def test_chunks_are_coded_in_the_dtype_asked_for() -> None:
    recording, requests = Recording(), choices([20], [3, 2])
    exact = quiet(llama(method=Uncompressed()), "loglikelihood", requests)
    lm = llama(method=recording, cache_dtype="bfloat16")
    assert 0 < difference(quiet(lm, "loglikelihood", requests), exact) < 0.1
    assert {chunk.keys[0].dtype for chunk in recording.seen} == {torch.bfloat16} and lm.bits_per_value == 16


def test_the_bundled_model_goes_by_its_name(tmp_path: Path) -> None:
    lm = CuveeLM("books-3m", quality="lossless", device="cpu")
    assert lm.layout.num_layers == 6 and lm.configuration["model"] == model_fingerprint(lm.model)
    before = lm.configuration
    lm.model.config.rms_norm_eps = 0.1
    assert {name for name, value in lm.configuration.items() if value != before[name]} == {"function"}
    with pytest.raises(FileNotFoundError, match="no such model folder"):
        CuveeLM(tmp_path / "nowhere", quality="lossless", device="cpu")


def test_a_profile_is_loaded_and_used(tmp_path: Path) -> None:
    layout = llama(method=Uncompressed()).layout
    profile = fit(layout, [synthetic_chunk(layout, 60, seed) for seed in range(4)])
    profile.save(tmp_path / "p.safetensors")
    lm = llama(profile=str(tmp_path / "p.safetensors"), step=1)
    assert isinstance(lm.method, CodecMethod)
    assert lm.method.codec.step_index == Codec(profile, step=1).step_index
    assert method_identity(lm.method)["profile"] == profile.id.hex()


def test_the_profile_of_other_weights_is_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    lm = llama(method=Uncompressed())
    chunks = [synthetic_chunk(lm.layout, 60, seed) for seed in range(4)]
    for model, other in ((model_fingerprint(lm.model), False), (f"w2-{0:032x}", True)):
        lm.use(CodecMethod(Codec(fit(lm.layout, chunks, model=model), step=1)))
        assert ("learned from other weights" in caplog.text) is other


# Requests that say nothing, or do not fit --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["loglikelihood", "loglikelihood_rolling", "generate_until"])
def test_a_task_without_context_is_refused(kind: str) -> None:
    lm = llama(method=Uncompressed())
    rest: dict[str, tuple[Any, ...]] = {
        "loglikelihood": (" w7 w8",),
        "loglikelihood_rolling": (),
        "generate_until": ({"until": ["w5"], "max_gen_toks": 3},),
    }
    empty = [ask(kind, text, *rest[kind], task="bare") for text in ("w4", "w9")]
    with pytest.raises(InputError, match=r"tasks: bare has no context of two tokens .*num_fewshot"):
        quiet(lm, kind, [*empty, ask(kind, words(9), *rest[kind], task="rich")])
    # One request with a context is enough, and the others are counted.
    got = quiet(lm, kind, [*empty, ask(kind, words(9), *rest[kind], task="bare")])
    assert len(got) == 3 and lm.statistics.uncached_requests == 2 and lm.statistics.contexts == 1


def test_two_tasks_may_ask_the_same_and_a_request_may_have_no_task() -> None:
    # What one task has of context is in the requests that the other asks as well.
    shared = choices([9], [2], task="one")
    again = choices([9], [2], task="two")
    bare = [ask("loglikelihood", "", " w7", task="one"), ask("loglikelihood", words(9), " w7", task=None)]
    assert len(quiet(llama(method=Uncompressed()), "loglikelihood", [*shared, *bare, *again])) == 4


def test_a_request_too_long_is_refused_or_cut() -> None:
    model, tokenizer = lively("llama", max_position_embeddings=64), word_tokenizer()
    requests = choices([70, 62, 61, 10], [4, 2])
    with pytest.raises(InputError, match=r"tasks: recall has a request of 73 tokens, .* 64: only with truncation=True"):
        quiet(CuveeLM(model, tokenizer=tokenizer, method=Uncompressed()), "loglikelihood", requests)
    expected = quiet(HFLM(model, tokenizer=tokenizer), "loglikelihood", requests)
    lm = CuveeLM(model, tokenizer=tokenizer, method=Uncompressed(), truncation=True)
    assert difference(quiet(lm, "loglikelihood", requests), expected) < TOLERANCE
    assert lm.statistics.truncated_requests == 3  # 62 + 2 and 61 + 4 read 63 and 64 tokens
    with pytest.raises(InputError, match="its continuation alone is too long"):
        quiet(lm, "loglikelihood", choices([5], [65]))


def test_a_prompt_too_long_is_refused_or_cut() -> None:
    model = lively("llama", max_position_embeddings=64)
    tokenizer = word_tokenizer(model_max_length=64)
    stop = {"until": ["w5 w5 w5"], "max_gen_toks": 10}
    requests = [ask("generate_until", words(count, count), stop) for count in (70, 54, 55, 8)]
    expected = quiet(HFLM(model, tokenizer=tokenizer, batch_size=4), "generate_until", requests)
    for batch_size in (1, 4):
        lm = CuveeLM(model, tokenizer=tokenizer, method=Uncompressed(), batch_size=batch_size)
        with pytest.raises(
            InputError, match=r"tasks: recall has a request of 70 tokens, .* 54: only with truncation=True"
        ):
            quiet(lm, "generate_until", requests)
        lm = CuveeLM(model, tokenizer=tokenizer, method=Uncompressed(), batch_size=batch_size, truncation=True)
        assert quiet(lm, "generate_until", requests) == expected
        assert lm.statistics.truncated_requests == 2


@pytest.mark.parametrize(
    ("kind", "method", "request_", "message"),
    [
        (
            "generate_until", Uncompressed(), ask("generate_until", words(5), {"until": ["w5"], "max_gen_toks": 64}),
            "tasks: recall generates up to 64 tokens, the model reads 64: lower max_gen_toks",
        ),
        ("loglikelihood", Uncompressed(), ask("loglikelihood", words(5), ""), "tasks: recall has an empty continuat"),
        ("loglikelihood", Short(), *choices([9], [2]), "method: Short must return a chunk of the same tokens"),
    ],
)  # fmt: skip
def test_requests_that_cannot_be_answered(kind: str, method: Method, request_: Instance, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        quiet(llama(method=method), kind, [request_])


# Arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"method: nothing says .* give profile=, quality= or method="),
        ({"method": Uncompressed(), "profile": "p.safetensors", "kl": 0.1}, "method: .* leave profile=, kl= out"),
        ({"method": "kivi4", "quality": "high"}, "method: .* leave quality= out"),
        ({"quality": "high", "bits": 2}, "quality: give at most one of .* got quality, bits"),
        ({"kl": "tiny"}, "kl: must be a number, got 'tiny'"),
        ({"method": Uncompressed(), "chunk_tokens": True}, "chunk_tokens: must be a whole number .* got True"),
        ({"method": Uncompressed(), "batch_size": "0"}, "batch_size: .* got '0'"),
        ({"method": Uncompressed(), "batch_size": "auto:4"}, "batch_size: 'auto' is not supported"),
        ({"method": Uncompressed(), "cache_dtype": "float8"}, "cache_dtype: must be one of bfloat16, .* got 'float8'"),
        ({"method": Uncompressed(), "dtype": "float17"}, "^dtype: must be one of bfloat16, .* got 'float17'"),
        ({"method": Uncompressed(), "mixed_precision_dtype": "half17"}, "^mixed_precision_dtype: .* got 'half17'"),
        ({"method": Uncompressed(), "softmax_dtype": "bfloat16"}, "softmax_dtype: must be float32 or float64, got bfl"),
        ({"method": Uncompressed(), "device": "gpu"}, "device: must be a device that torch can use here, got 'gpu'"),
        ({"method": Uncompressed(), "backend": "seq2seq"}, "backend: seq2seq models are not supported"),
        ({"method": Uncompressed(), "tp_plan": "auto"}, "tp_plan: .* in one process"),
        ({"method": Uncompressed(), "max_length": 65}, "max_length: the model has 64 positions, got 65"),
        ({"method": "kivi5"}, r"^method: 'kivi5' is not known; .*did you mean 'kivi"),
        ({"kl": 0.01}, "^kl: must be quality='lossless' with an unlearned profile"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        llama(**arguments)


def test_misspelt_arguments_are_named() -> None:
    with pytest.raises(InputError, match="qualty: is no argument; did you mean 'quality'"):
        CuveeLM("books-3m", method="kivi4", qualty="balanced", device="cpu")


def test_counts_and_baselines_may_come_from_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = llama(method="kivi2", chunk_tokens="16", batch_size="2")
    assert (repr(lm.method), lm.chunk_tokens, lm.batch_size) == (repr(Kivi(2)), 16, 2)
    lm.use("destroyed")
    assert repr(lm.method) == repr(Destroyed())
    monkeypatch.setattr(CuveeLM, "world_size", 2)
    with pytest.raises(InputError, match="accelerate: several processes are not supported"):
        llama(method=Uncompressed())


def test_what_cannot_work_fails_before_weights_are_read(tmp_path: Path) -> None:
    other = Profile.unlearned(KVLayout.from_config(tiny_model("qwen2").config, dtype="float32"))
    tiny_config("llama").save_pretrained(tmp_path / "llama")
    with pytest.raises(ProfileMismatchError, match="heads, sizes"):
        CuveeLM(tmp_path / "llama", profile=other)
    for given, message in (
        ({"method": "kivi5"}, "^method: 'kivi5' is not known"),
        ({"quality": "blanced"}, "^quality: must be one of"),
        ({"kl": 0.01}, "^kl: must be quality='lossless' with an unlearned profile"),
    ):
        with pytest.raises(InputError, match=message):
            CuveeLM(tmp_path / "llama", **given)
    layout = KVLayout.from_config(tiny_config("llama"), dtype="float32")
    curve = [CurvePoint(index, bits, 0.1, kl=0.01) for index, bits in ((-64, 4.0), (0, 2.0))]
    curved = fitted_to(layout).with_curve(curve)
    for dtype, message in (("bfloat16", "ratio: must lie in 4 … 8 "), ("float32", "ratio: must lie in 8 … 16 ")):
        for make in (partial(CuveeLM, dtype=dtype), partial(CuveeLM, cache_dtype=dtype)):
            with pytest.raises(ProfileError, match=f"^{message}"):
                make(tmp_path / "llama", profile=curved, ratio=17)
    transformers.MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=61).save_pretrained(tmp_path / "mamba")
    with pytest.raises(UnsupportedModelError, match="mamba"):
        CuveeLM(tmp_path / "mamba", method=Uncompressed())
    with pytest.raises(FileNotFoundError):
        CuveeLM(tmp_path / "llama", profile=tmp_path / "none.safetensors")
    with pytest.raises(ProfileMismatchError):
        llama(method=CodecMethod(Codec.without_profile(LAYOUTS["gqa"])))


def test_virtual_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = llama(method=Uncompressed())
    forward = lm.model.forward

    @wraps(forward)
    def longer(input_ids: torch.Tensor, **arguments: Any) -> Any:
        return forward(input_ids=torch.cat([input_ids[:, :1], input_ids], 1), **arguments)

    monkeypatch.setattr(lm.model, "forward", longer)
    with pytest.raises(UnsupportedModelError, match=r"keys and values of all 8 tokens in .*virtual tokens"):
        quiet(lm, "loglikelihood", choices([9], [2]))


# Identities ---------------------------------------------------------------------------------------------------------


def test_what_tells_methods_apart() -> None:
    profile = fitted_to(LAYOUTS["gqa"])
    codecs = [CodecMethod(Codec(profile, quality)) for quality in ("high", "balanced", "lossless")]
    methods: list[Method] = [*(baseline(name) for name in BASELINES), *codecs]
    assert len({json.dumps(method_identity(method)) for method in methods}) == len(methods)
    assert method_identity(codecs[0]).items() >= {"profile": profile.id.hex(), "source": "fitted"}.items()
    for nameless in (CacheGen(torch.eye(2)), object()):  # type: ignore[arg-type]
        with pytest.raises(InputError, match=r"method: .* attribute `identity`"):
            method_identity(nameless)  # type: ignore[arg-type]


def test_a_response_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^use_cache: must be left out, got .*a.db: "):
        CachingLM(llama(method=Uncompressed()), str(tmp_path / "a.db"))


# The command line --------------------------------------------------------------------------------------------------

YAML = """
task: orchard
custom_dataset: !function data.load
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: ["w7", "w8"]
doc_to_target: 0
metric_list:
  - metric: acc
"""
DATA = """
from datasets import Dataset

def load(**_):
    return {"test": Dataset.from_list([{"text": "w9 w10 w11 w12"}, {"text": "w9 w20 w3"}])}
"""


def test_the_command_line_runs_a_local_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **arguments: asked.append(arguments))
    # The index of all of lm-eval's own tasks takes seconds.
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    monkeypatch.setenv("TOKENIZERS_PARALLELIZM", "false")  # which lm-eval sets, and leaves
    lively("llama").save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "orchard.yaml").write_text(YAML)
    (tmp_path / "tasks" / "data.py").write_text(DATA)
    before = sys.argv
    status = run_cli(
        f"--model_args pretrained={tmp_path / 'model'},quality=lossless,chunk_tokens=2 --tasks orchard --device cpu "
        f"--include_path {tmp_path / 'tasks'} --output_path {tmp_path / 'out.json'}".split()
    )
    assert status == 0 and sys.argv is before and not asked
    shown = capsys.readouterr().out
    assert "orchard" in shown
    last = shown.strip().splitlines()[-1]
    assert re.fullmatch(r"cuvee: quality=lossless: [\d.]+ bits per value, [\d.]+x smaller .* \(2 contexts .*\)", last)
    (written,) = tmp_path.glob("out*.json")
    facts = json.loads(written.read_text())["config"]["cuvee"]
    assert facts["method"]["lossless"] and facts["chunk_tokens"] == 2 and facts["contexts"] == 2
    assert run_cli(["--tasks", "orchard", "--model_arguments", "x"]) == 2 and sys.argv is before
    assert "unrecognized arguments" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"^--tasks: not known: orchrd; `cuvee eval ls tasks` lists them"):
        run_cli(["--tasks", "orchrd", "--include_path", str(tmp_path / "tasks")])
    assert sys.argv is before


def test_arguments_are_completed_and_not_overruled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, model = ["--include_path", str(TASKS_PATH)], ["--model", "cuvee"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert complete_arguments(["run", "--tasks", "a"]) == ["run", *ours, *model, "--tasks", "a"]
    assert complete_arguments(["--tasks", "a"]) == ["run", *ours, *model, "--tasks", "a"]
    # The user's own come last, and the last one counts.
    assert complete_arguments(["--model", "hf", "-t", "a"])[-4:] == ["--model", "hf", "-t", "a"]
    assert complete_arguments(["ls", "tasks"]) == ["ls", *ours, "tasks"]
    assert complete_arguments(["validate", "--tasks", "a"]) == ["validate", *ours, "--tasks", "a"]
    for help_ in ([], ["--help"], ["-h"], ["run"]):
        assert complete_arguments(help_) == help_
    config = tmp_path / "c.yaml"
    config.write_text("model: hf\ntasks: [a]\n")
    for args in (["--config", str(config)], [f"--config={config}"], ["-C", str(config)]):
        assert complete_arguments(args) == ["run", *ours, *args]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # lm-eval's default would be refused
    named = ["-t", "a", "--device", "x"]
    assert complete_arguments(named) == ["run", *ours, *model, "--device", "cpu", *named]


def test_without_a_network_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable() -> None:
        raise ConnectionError("Couldn't reach 'google/xquad' on the Hub")

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", unreachable)
    with pytest.raises(
        InputError, match=r"^--tasks: Couldn't reach 'google/xquad' on the Hub: .* or let a task read local"
    ):
        run_cli(["--tasks", "xquad_en"])


@pytest.mark.parametrize(("code", "status"), [(None, 0), (3, 3), ("no such task", 1)])
def test_the_exit_status(
    code: Any, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: sys.exit(code))
    assert run_cli(["ls", "tasks"]) == status
    assert capsys.readouterr().err.strip() == (code if isinstance(code, str) else "")


def test_the_help_names_our_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["run", "--help"]) == 0
    assert re.search(r"--tasks.*profile=FILE.*quality=NAME", capsys.readouterr().out, re.DOTALL)
