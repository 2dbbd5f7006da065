"""Ask a question about the text files of a folder, through the OpenAI API of a server that blends.

    vllm serve MODEL --enable-prompt-tokens-details --kv-transfer-config '{"kv_connector": "CuveeConnector",
        "kv_role": "kv_both", "kv_connector_extra_config": {"store": "file:///var/cache/kv", "blend": {}}}'
    python rag.py http://localhost:8000/v1 FOLDER "What is the question?"

The first question computes the documents, and stores in the background those that stand behind other text. Later ones
find these, in whatever order they come.
Needs `pip install openai`.
"""

import re
import sys
import time
from pathlib import Path


def ranked(folder: str, question: str) -> list[str]:
    """The eight documents that share most words with the question, best first: your retriever goes here."""
    wanted = set(re.findall(r"\w+", question.lower()))
    texts = [path.read_text() for path in sorted(Path(folder).glob("*.txt"))]
    if not texts:
        sys.exit(f"rag.py: no *.txt in {folder}")
    return sorted(texts, key=lambda text: -len(wanted & set(re.findall(r"\w+", text.lower()))))[:8]


def ask(url: str, folder: str, question: str) -> None:
    """Print the answer, the seconds to its first token, and how much of the prompt was cached or blended."""
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key="none")
    documents = "\n\n".join(ranked(folder, question))
    began, first, words = time.perf_counter(), None, []
    stream = client.completions.create(
        model=client.models.list().data[0].id,
        prompt=f"{documents}\n\nQuestion: {question}\nAnswer:",
        max_tokens=32,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for event in stream:
        if event.choices:
            first = first or time.perf_counter() - began
            words.append(event.choices[0].text)
        if event.usage:
            # Of a server with --enable-prompt-tokens-details. All tokens of a blend count, also those that it computes.
            details = event.usage.prompt_tokens_details
            cached = details.cached_tokens if details else "unknown"
            prompt = event.usage.prompt_tokens
            print(f"first token after {first:.2f} s; {cached} of {prompt} prompt tokens were cached or blended")
    print("".join(words).strip())


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    ask(*sys.argv[1:])
