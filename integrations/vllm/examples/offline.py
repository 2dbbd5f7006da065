"""Two engines, one after the other, that share a folder: the second finds the KV of the first's prompts.

    python offline.py MODEL STORE_URL [PROMPT_TOKENS]

vLLM runs each engine in a process of its own. Prints what the second one loaded, and whether it says the same.
"""

import sys


def answers(model: str, store: str, tokens: int) -> list[tuple[list[int], int]]:
    """What the model says to three prompts, and how many tokens of each were not computed."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        enforce_eager=True,
        gpu_memory_utilization=0.5,  # on a CPU: of the RAM, which must be free
        kv_transfer_config={
            "kv_connector": "CuveeConnector",
            "kv_connector_module_path": "cuvee.integrations.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"store": store, "quality": "lossless", "chunk_tokens": 128},
        },
    )
    prompts = [{"prompt_token_ids": [(7 * i + i // 5 + n) % 500 + 5 for i in range(tokens)]} for n in range(3)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    result = [(list(output.outputs[0].token_ids), output.num_cached_tokens or 0) for output in outputs]
    llm.llm_engine.engine_core.shutdown()  # also waits for what is being stored
    return result


if __name__ == "__main__":
    model, store, *rest = sys.argv[1:]
    arguments = (model, store, int(rest[0]) if rest else 400)
    first, second = answers(*arguments), answers(*arguments)
    print("same words:", [words for words, _ in first] == [words for words, _ in second])
    print("tokens loaded:", [loaded for _, loaded in second])
