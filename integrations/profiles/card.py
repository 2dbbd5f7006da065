"""`profile_card`: the page about a profile that is put beside it, with the metadata that the Hugging Face hub reads."""

from __future__ import annotations

import json

from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.support.steps import step_value

_MODEL = "| model | "
_LICENSES = (
    "Those that come with cuvee (prose, encyclopaedia, tokenized, code, dialogue, tables, reread, long) are licensed "
    "under Apache-2.0, and the model wrote `samples` itself. The profile does not record the license of others."
)


def profile_card(profile: Profile, where: str) -> str:
    """Return a model card in Markdown, from the profile alone: model, texts, curve, and how to load it.

        >>> from cuvee.codec.layout import KVLayout, LayerLayout
        >>> layout = KVLayout("mine", (LayerLayout(2, 8, 8, None),), "bfloat16", None)
        >>> profile_card(Profile.unlearned(layout), "hf://owner/name").splitlines()[:2]
        ['---', 'library_name: cuvee']

    Args:
        profile: what it is about.
        where: the collection that holds it, without secrets, as `cuvee profile pull` takes it.
    """
    layout = profile.layout
    named, weights = f"{where}#{profile.id.hex()}", profile.model or "not recorded"
    tags = "".join(f"- {json.dumps(tag)}\n" for tag in ("cuvee", "kv-cache", layout.model_type))
    return f"""---
library_name: cuvee
tags:
{tags}---

# Profile of a {layout.model_type} for its KV cache

With it, cuvee compresses the KV cache of one model, and decodes what was compressed. It runs nothing.

| | |
|---|---|
{_MODEL}{layout_text(layout)} |
| weights | {weights} |
| profile | `{profile.id.hex()}`, {profile.source}, group {profile.group} |

## Load it

```
cuvee profile pull MODEL {named} -o profile.safetensors
```

In Python, `cuvee.Profile.load("profile.safetensors")`; engines take `"profile": "{named}"`.

## Size and loss

{_curve(profile)}
## Texts

{_texts(profile)}
"""


def layout_text(layout: KVLayout) -> str:
    """Return a model's layout as people read it: its type, layers, heads x width, and dtype."""
    first, shapes = layout.layers[0], len(set(layout.layers))
    shape = f"{layout.num_layers} layers" + (f" of {shapes} shapes, the first" if shapes > 1 else "")
    return f"{layout.model_type}, {shape} {first.kv_heads} x {first.head_dim}, {layout.dtype}"


def text_of_card(card: str) -> str:
    """Return what `layout_text` wrote into a card, which anybody may have changed since; empty if it is not there."""
    line = card.partition(f"\n{_MODEL}")[2].partition(" |\n")[0]
    return line if line.isprintable() else ""


def _curve(profile: Profile) -> str:
    if not profile.curve:
        return "Nothing was measured.\n"
    lengths = f" of {', '.join(map(str, profile.lengths))} tokens" if profile.lengths else ""
    rows = "".join(
        f"| {step_value(point.step_index):.3g} | {point.bits_per_value:.3f} | {_number(point.kl, '.5f')} | "
        f"{_number(point.top1, '.1%')} |\n"
        for point in profile.curve
    )
    return (
        f"Means over the kinds of text below, on sequences{lengths}; KL in nats per token.\n\n"
        f"| step | bits per value | KL | top-1 |\n|---|---|---|---|\n{rows}"
    )


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _texts(profile: Profile) -> str:
    learned = "" if profile.text_tokens is None else f"Learned from {profile.text_tokens} tokens. "
    kinds = ", ".join(f"`{kind}`" for kind in profile.curves)
    return f"{learned}Kinds: {kinds}. {_LICENSES}" if kinds else f"{learned}Their kinds and licenses are not recorded."
