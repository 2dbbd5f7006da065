"""Engines that differ in one thing share a store, one after the other: no answer is another one's.

    python tests/fuzz/identities.py --seconds 300 --seed 0

Each engine is drawn: plain, with overrides of the configuration, with a function that changes it, with adapters, or
with images (if torchvision is there, for a model of its own). Adapters are deployed into one folder at any time: before
they are loaded, between the arrival of a request and its first step, and while others run. Images come without names
from an engine that counts them, and with names that clients use for several. Every answer is compared with that of an
engine without a connector which has read the same things.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "src")]

from tests.integrations.stores.dict_store import DictStore
from tests.integrations.vllm.engines import Answer, distance, import_vllm, run_script, save_tiny_model
from tests.integrations.vllm.faults import CHUNK, Driven

NOISE = 1e-3  # nats, in float32, of batches of another size
EPS = {"override": 0.3, "function": 0.6}
KINDS = ("plain", "override", "function", "adapters", "images")
VERSIONS = (1, 2, 3)  # of the adapter, and of the image


class Wrong(Exception):
    """An answer is another one's."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What an engine answered: its kind, the prompt, and the version of the adapter or the image, 0 for none."""

    kind: str
    ids: tuple[int, ...]
    version: int = 0


class Living(Driven):
    """An engine of one kind.

    Args:
        kind: of `KINDS`.
        folder: with the models and the adapters.
        store: of its connector; None: it has none.
    """

    def __init__(self, kind: str, folder: Path, store: DictStore | None) -> None:
        options: dict[str, Any] = {"max_model_len": 512}
        if kind == "override":
            options["hf_overrides"] = {"rms_norm_eps": EPS[kind]}
        if kind == "function":
            options["hf_overrides"] = lambda config: (config.update({"rms_norm_eps": EPS[kind]}), config)[1]
        if kind == "adapters":
            options |= {"enable_lora": True, "max_lora_rank": 8, "max_loras": 4, "max_cpu_loras": 16}
        if kind == "images":  # vLLM counts them
            options |= {"enable_prefix_caching": False, "mm_processor_cache_gb": 0, "skip_tokenizer_init": False}
        super().__init__(folder / ("llava" if kind == "images" else "llama"), store, **options)
        self.kind, self.folder = kind, folder
        self.waiting: dict[str, Asked] = {}
        self.answers: list[tuple[Asked, Answer]] = []
        self.counts: Counter[str] = Counter()

    def add(self, ids: Sequence[int], version: int = 0, lora: Any = None, name: str | None = None) -> None:
        """Add a request; one with an image's name is not compared, since vLLM trusts the name."""
        from vllm import SamplingParams

        self._count += 1
        request = f"{self.kind} {self._count}"
        prompt: dict[str, Any] = {"prompt_token_ids": list(ids)}
        if self.kind == "images" and version:
            prompt["multi_modal_data"] = {"image": picture(version)}
            if name is not None:
                prompt["multi_modal_uuids"] = {"image": [name]}
        parameters = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=5)
        self.engine.add_request(request, prompt, parameters, lora_request=lora)
        self.waiting[request] = Asked(self.kind, tuple(ids), version if name is None else -1)

    def advance(self, steps: int = 10_000) -> None:
        """Step until all requests have ended, or so often."""
        while self.engine.has_unfinished_requests() and steps:
            steps -= 1
            for output in self.engine.step():
                if output.finished:
                    best, asked = output.outputs[0], self.waiting.pop(output.request_id)
                    said = [{token: entry.logprob for token, entry in at.items()} for at in best.logprobs]
                    self.counts["cached"] += output.num_cached_tokens or 0
                    self.answers.append((asked, Answer(list(best.token_ids), said, output.num_cached_tokens or 0)))

    def lora(self, number: int, path: Path) -> Any:
        """vLLM's request of an adapter."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(f"tuned {number}", number, str(path))  # vLLM tells adapters apart by their names


def picture(version: int) -> Any:
    """An image."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(version).integers(0, 255, (56, 56, 3), dtype=np.uint8))


def deploy(folder: Path, version: int) -> None:
    """Put a version of the adapter where the engine looks for it."""
    shutil.rmtree(folder / "served", ignore_errors=True)
    shutil.copytree(folder / f"adapter{version}", folder / "served")


def prompts_of(dice: random.Random, image: int | None) -> list[tuple[int, ...]]:
    """Prompts that begin alike; with the token of an image if it is given one."""
    starts = [tuple(dice.choices(range(4, 200), k=3 * CHUNK)) for _ in range(3)]
    made = []
    for _ in range(9):
        start = dice.choice(starts)
        middle = () if image is None else (image,)
        made.append((*start[:10], *middle, *start[10:], *dice.choices(range(4, 200), k=dice.randint(1, 40))))
    return made


def live(kind: str, folder: Path, store: DictStore, dice: random.Random, until: float) -> Living:
    """Run an engine for a while; it is closed."""
    engine = Living(kind, folder, store)
    # The same prompts for all engines of a model: what one stored, another looks for.
    prompts = prompts_of(random.Random(0), IMAGE if kind == "images" else None)
    number, deployed, loaded = 0, 0, dict[int, int]()
    for _ in range(dice.randint(4, 10)):
        if time.monotonic() > until:
            break
        ids = dice.choice(prompts)
        if kind == "adapters" and dice.random() < 0.8:
            if not loaded or dice.random() < 0.6:
                number, deployed = number + 1, dice.choice(VERSIONS)
                deploy(folder, deployed)
                if dice.random() < 0.5:
                    engine.llm.llm_engine.add_lora(engine.lora(number, folder / "served"))
                    loaded[number] = deployed
                    if dice.random() < 0.5:  # the next version is deployed after this one was loaded
                        deployed = dice.choice(VERSIONS)
                        deploy(folder, deployed)
            chosen = dice.choice([*loaded, number])
            lora = engine.lora(chosen, folder / "served")
            if chosen in loaded:
                engine.add(ids, loaded[chosen], lora)
            else:
                after = dice.choice(VERSIONS) if dice.random() < 0.4 else deployed
                engine.add(ids, after, lora)
                if after != deployed:  # between arrival and the first step, in which it is read
                    deployed = after
                    deploy(folder, deployed)
                engine.advance(1)
                loaded[chosen] = after
        elif kind == "images":
            engine.add(ids, dice.choice(VERSIONS), name="mine" if dice.random() < 0.4 else None)
        else:
            engine.add(ids)
        if dice.random() < 0.6:
            engine.advance()
            engine.llm.reset_prefix_cache()
    engine.advance()
    time.sleep(0.3)  # what is being stored
    engine.close()
    return engine


def compare(folder: Path, answers: Sequence[tuple[Asked, Answer]]) -> float:
    """Return the largest distance from what engines without a connector say."""
    worst = 0.0
    for kind in KINDS:
        ours = [(asked, answer) for asked, answer in answers if asked.kind == kind and asked.version >= 0]
        if not ours:
            continue
        reference, right = Living(kind, folder, None), dict[Asked, Answer]()
        for asked in dict.fromkeys(asked for asked, _ in ours):
            adapter = kind == "adapters" and asked.version
            path = folder / f"adapter{asked.version}"
            reference.add(asked.ids, asked.version, reference.lora(asked.version, path) if adapter else None)
            reference.advance()
            right[asked] = reference.answers[-1][1]
        reference.close()
        for asked, answer in ours:
            far = distance(answer, right[asked])
            if far > NOISE:
                raise Wrong(f"{answer.tokens} instead of {right[asked].tokens}, {far} nats away, of {asked}")
            worst = max(worst, far)
    return worst


def save_adapter(folder: Path, model: Path, version: int) -> None:
    """Write an adapter of attention as PEFT does."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, dim = config["hidden_size"], config["hidden_size"] // config["num_attention_heads"]
    heads = config["num_key_value_heads"] * dim
    sizes = {"q_proj": hidden, "k_proj": heads, "v_proj": heads}
    dice, tensors = torch.Generator().manual_seed(version), {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in sizes.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{place}.lora_A.weight"] = torch.randn(8, hidden, generator=dice) / 8
            tensors[f"{place}.lora_B.weight"] = torch.randn(size, 8, generator=dice) / 8
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    entries = {"peft_type": "LORA", "r": 8, "lora_alpha": 32, "target_modules": list(sizes), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**entries, "task_type": "CAUSAL_LM"}))


IMAGE = 244  # the token of an image


def save_llava(path: Path) -> None:
    """Write a small model of images, with a tokenizer of words."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 3} | {f"w{at}": 4 + at for at in range(240)} | {"<image>": IMAGE}
    words_only = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    words_only.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words_only, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        additional_special_tokens=["<image>"],
    )  # fmt: skip
    vision = transformers.CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, image_size=56, patch_size=14,
        projection_dim=64, initializer_factor=8.0,
    )  # fmt: skip
    text = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, bos_token_id=None, eos_token_id=None,
        pad_token_id=None, tie_word_embeddings=False, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            vision_config=vision, text_config=text, image_token_index=IMAGE, vision_feature_layer=-1,
            vision_feature_select_strategy="default",
        )
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "projector" in name and parameter.ndim > 1:
                parameter.mul_(20)
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    old = {name.replace("vision_tower.", "vision_tower.vision_model.", 1): each for name, each in tensors.items()}
    known = any("vision_tower.vision_model." in name for name in tensors)  # vLLM wants the names of older releases
    save_file(tensors if known else old, path / "model.safetensors", {"format": "pt"})
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    images = CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    transformers.LlavaProcessor(
        image_processor=images, tokenizer=tokenizer, patch_size=14, vision_feature_select_strategy="default",
        image_token="<image>", num_additional_image_tokens=1,
    ).save_pretrained(path)  # fmt: skip


def _within(seconds: float, seed: int, results: Path) -> None:
    folder, dice = results.parent, random.Random(seed)
    save_tiny_model("llama", folder / "llama")
    for version in VERSIONS:
        save_adapter(folder / f"adapter{version}", folder / "llama", version)
    kinds = [kind for kind in KINDS if kind != "images" or find_spec("torchvision")]
    if "images" in kinds:
        save_llava(folder / "llava")
    import_vllm()
    store, until = DictStore(), time.monotonic() + seconds
    answers: list[tuple[Asked, Answer]] = []
    cached, lives = Counter[str](), Counter[str]()
    order = dice.sample(kinds, len(kinds))
    while time.monotonic() < until:
        kind = order[sum(lives.values()) % len(order)]
        engine = live(kind, folder, store, dice, until)
        store.calls.clear()
        answers += engine.answers
        lives[kind] += 1
        cached[kind] += engine.counts["cached"]
    worst = compare(folder, answers)
    found = {"engines": lives, "cached tokens": cached, "answers": len(answers), "largest distance": worst}
    results.write_text(json.dumps(found))


def identities(seconds: float, seed: int, folder: Path) -> dict[str, Any]:
    """Run it in a process of its own, and say what was done.

    Raises:
        Wrong: an answer is another one's.
    """
    results = folder / "results.json"
    status, log = run_script(
        folder, __file__, "--within", str(results), "--seconds", str(seconds), "--seed", str(seed),
        timeout=3 * seconds + 600, ONEDNN_MAX_CPU_ISA="AVX512_CORE_BF16",
    )  # fmt: skip
    if status != 0:
        raise Wrong(f"seed {seed}: {status}\n{log[-6000:]}")
    return json.loads(results.read_text())  # type: ignore[no-any-return]


def main() -> int:
    """Exit code 1 if something was wrong."""
    parser = argparse.ArgumentParser(description="Engines that differ in one thing share a store.")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--within", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.within:
        _within(arguments.seconds, arguments.seed, arguments.within)
        return 0
    with tempfile.TemporaryDirectory(prefix="cuvee-identities-") as folder:
        try:
            done = identities(arguments.seconds, arguments.seed, Path(folder))
        except Wrong as wrong:
            print(f"WRONG: {wrong}")
            return 1
    print(json.dumps(done))
    return 0


if __name__ == "__main__":
    sys.exit(main())
