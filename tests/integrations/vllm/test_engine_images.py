"""Images in a real engine: their cache is found by what the encoder was given, whatever its placeholders or names are.

    reference   no connector             answers computed, and from the engine's own cache
    stored      connector, empty store   the same answers, though all prompts have the same ids
    restarted   connector, full store    the same answers, from the store
    named       names of a client        two images with one name
    counted     names of vLLM            numbers, which are another image's in another engine
    lossy       tokens are predicted     but for those of an image

Idefics 3, because vLLM's other models need packages of pictures that are not installed for a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import fitted_to
from tests.integrations.vllm.engines import (
    Answer,
    Engine,
    Ran,
    Step,
    cached,
    distance,
    ids,
    run_engines,
    transfer,
)
from tests.predicting import predicting
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)

from cuvee.codec.codec import Codec
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.profile import Profile
from cuvee.integrations.stores import open_store
from cuvee.integrations.stores.base import is_record

pytestmark = pytest.mark.slow

CHUNK = 64
PIXELS, TOKENS = 32, 16  # edge of an image, and what the model makes of it
AROUND, IMAGE, GLOBAL, VOCABULARY = 256, 257, 259, 260
PLACEHOLDERS = [AROUND, GLOBAL, *[IMAGE] * TOKENS, AROUND]
BEFORE, AFTER = ids(2 * CHUNK - 8, 1), ids(CHUNK + 40, 2)  # the end of the second chunk is in the image
PROMPT, TEXT = [*BEFORE, IMAGE, *AFTER], [*BEFORE, *PLACEHOLDERS, *AFTER]
WHOLE = len(TEXT) // 32 * 32  # tokens that can be loaded, in blocks
ROUNDING = 1e-3  # of logits in float32, where other parts of a prompt are computed
STEP = 0.01
ALL = (1, 2, None)
UNCACHED = "vllm:cuvee_uncached{reason=media}"


def save_model(path: Path) -> None:
    """A model with a tokenizer of words, a picture of 32 by 32 pixels, and weights as those of `save_tiny_model`."""
    special = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
    ids_of = {word: at for at, word in enumerate([*(f"w{at}" for at in range(AROUND)), *special])}
    words = Tokenizer(models.WordLevel(ids_of, "w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, additional_special_tokens=special, unk_token="w0")
    edge = {"longest_edge": PIXELS}
    pictures = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    Idefics3Processor(pictures, tokenizer, image_seq_len=TOKENS).save_pretrained(path)
    given: dict[str, Any] = {
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": PIXELS, "patch_size": 4, "initializer_range": 0.2,
        },
        "text_config": {
            "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256,
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
            "max_position_embeddings": 1024, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
            "initializer_range": 0.2,
        },
        "image_token_id": IMAGE, "scale_factor": 2, "initializer_range": 0.2, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(0)
    Idefics3ForConditionalGeneration(Idefics3Config(**given)).save_pretrained(path)


def ask(*seeds: int | None, name: str | None = None, **changes: Any) -> Step:
    """One prompt with one image after the other, which a client may name; None: with the placeholders alone."""
    from PIL import Image

    media: list[dict[str, Any]] = []
    for seed in seeds:
        if seed is None:
            media.append({})
            continue
        pixels = np.random.default_rng(seed).integers(0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8)
        media.append({"multi_modal_data": {"image": Image.fromarray(pixels)}})
        if name is not None:
            media[-1]["multi_modal_uuids"] = {"image": [name]}
    prompts = [TEXT if seed is None else PROMPT for seed in seeds]
    return Step(prompts, **{"media": media, "forget": True, "settles": "each", **changes})


@pytest.fixture(scope="module")
def ran(folder: Path) -> Mapping[str, Ran]:
    save_model(folder / "model")
    layout = KVLayout.from_config(Idefics3Config.from_pretrained(folder / "model").text_config, "float32")
    predicting(fitted_to(layout), vocabulary=VOCABULARY).save(folder / "profile")
    own: dict[str, Any] = {"settles": False, "forget": False}
    unnamed = {"enable_prefix_caching": False, "mm_processor_cache_gb": 0, **transfer(folder, "unnamed")}
    lossy = transfer(folder, "lossy", quality=None, step=STEP, profile=str(folder / "profile"))
    engines: dict[str, tuple[list[Step], dict[str, Any]]] = {
        "reference": ([ask(*ALL, 3, settles=False), ask(*ALL, **own), ask(*ALL, **own)], {}),
        "stored": ([ask(*ALL), ask(*ALL)], transfer(folder, "plain")),
        "restarted": ([ask(*ALL), ask(3)], transfer(folder, "plain")),
        "named": ([ask(1), *(ask(seed, name="mine") for seed in (2, 1, 2))], unnamed),
        "counted": ([ask(3), ask(1, 2)], unnamed),
        "lossy": ([ask(1, None)], lossy),
    }
    started = [
        Engine(name, folder / "model", steps, {"skip_tokenizer_init": False, **options})
        for name, (steps, options) in engines.items()
    ]
    return run_engines(folder / "run", started)


def assert_same(answers: Sequence[Answer], expected: Sequence[Answer], within: float = 0.0) -> None:
    distances = [distance(answer, other) for answer, other in zip(answers, expected, strict=True)]
    assert max(distances) <= within, distances


@pytest.mark.serves(model="images", where="engine")
def test_an_image_finds_its_own_cache_and_no_other_image_or_text_does(ran: Mapping[str, Ran]) -> None:
    """All have the same ids. The chunk in front of the image is everybody's."""
    (*computed, third), held = ran["reference"].steps[0], ran["reference"].steps[2]
    assert min(distance(*pair) for pair in combinations([*computed, third], 2)) > 100 * ROUNDING
    stored, restarted = ran["stored"], ran["restarted"]
    assert cached(stored.steps[0]) == [0, CHUNK, CHUNK] and cached(stored.steps[1]) == [WHOLE] * 3
    assert_same(stored.steps[0], computed, ROUNDING)
    assert_same(stored.steps[1], held)
    assert cached(restarted.steps[0]) == [WHOLE] * 3 and cached(restarted.steps[1]) == [CHUNK]
    assert_same(restarted.steps[0], held)
    assert_same(restarted.steps[1], [third], ROUNDING)
    for each in (stored, restarted):
        each.assert_sound()
        assert each.metric("vllm:cuvee_uncached") == 0


def test_names_of_images_are_in_no_key(ran: Mapping[str, Ran]) -> None:
    """vLLM takes what it made of the second image for the first, which has its name: none of that is stored."""
    named, counted, computed = ran["named"], ran["counted"], ran["reference"].steps[0]
    assert [cached(step) for step in named.steps] == [[0], [CHUNK], [0], [0]]
    assert [named.metric(UNCACHED, after) for after in range(4)] == [0, 0, 1, 2]
    assert named.log.count("a client gave two images one name") == 1
    assert cached(counted.steps[0]) == [CHUNK] and cached(counted.steps[1]) == [WHOLE] * 2
    assert_same([*counted.steps[0], *counted.steps[1]], [computed[3], *computed[:2]], ROUNDING)


def test_placeholders_of_an_image_are_no_tokens_to_predict_from(ran: Mapping[str, Ran], folder: Path) -> None:
    """Chunks that hold a part of one are stored without ids."""
    assert cached(ran["lossy"].steps[0]) == [0, CHUNK]
    store = open_store(f"file://{folder / 'stores' / 'lossy'}", guarded=False)
    keys = [f"{path.parents[1].name}/{path.name}" for path in folder.glob("stores/lossy/*/*/*")]
    codec = Codec(Profile.load(folder / "profile"), step=STEP)
    chunks = [codec.decode(blob or b"") for blob in store.get_many([key for key in keys if not is_record(key)])]
    found = [(each.start, None if each.token_ids is None else each.token_ids.tolist()) for each in chunks]
    bounds = [(0, 64), (64, 128), (128, 192), (192, 224)]
    texts = [(start, TEXT[start:end]) for start, end in bounds]
    expected = [*texts, (64, None), (128, None), texts[-1]]  # everybody's first chunk is stored once
    assert sorted(found, key=str) == sorted(expected, key=str)
