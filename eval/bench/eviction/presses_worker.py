"""What kvpress keeps: run by path, with the Python of an environment that has kvpress, and without cuvee.

kvpress needs an older transformers than cuvee's other baselines, so it has an environment of its own. The arguments are
two files. The first says what is asked, as JSON:

    {"model": FOLDER, "presses": ["SnapKVPress", …], "ratios": [0.5, …], "contexts": [[token ids], …]}

The second is written: `{"kvpress": VERSION, "transformers": VERSION, "layers": L, "heads": H, "kept": KEPT}`, where
`KEPT[context][press][ratio index]` holds the kept positions of all layers and KV heads: base64 of the bits of a boolean
array `[L, H, T]`, the first bit of a byte being its highest. Every press keeps equally many positions per head.

A context is read once. Presses prune after a layer's attention, so none changes what later layers read.
"""

from __future__ import annotations

import base64
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

try:
    import kvpress
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.cache_utils import DynamicCache
except ImportError as error:
    if __name__ != "__main__":
        raise
    raise SystemExit(f"{error.name} is not installed in {sys.executable}: pip install kvpress==0.5.5") from error


class Recorder(kvpress.presses.base_press.BasePress):  # type: ignore[misc]
    """A press that prunes nothing, and records which positions each of many presses would keep.

    Args:
        presses: by name, one for each ratio.
    """

    def __init__(self, presses: dict[str, list[Any]]) -> None:
        self.presses = presses
        self.kept: dict[str, list[list[Any]]] = {name: [[] for _ in own] for name, own in presses.items()}

    def post_init_from_model(self, model: Any) -> None:
        """Prepare the presses for a model."""
        for own in self.presses.values():
            for press in own:
                press.post_init_from_model(model)

    def compress(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        """Record what the presses keep of one layer, and keep everything."""
        given = (module, hidden_states, keys, values, attentions, kwargs)
        for name, own in self.presses.items():
            for press, layers in zip(own, self.kept[name], strict=True):
                layers.append(positions(press, given))
        return keys, values


def positions(press: Any, given: tuple[Any, ...]) -> Any:
    """Return which positions a press keeps, boolean `[H, T]`: those whose keys and values its `compress` returns."""
    keys, values = given[2:4]
    pruned = press.compress(*given)
    count = pruned[0].shape[2]
    # `compress` returns tensors, no positions. They follow from the scores, and are checked against what it returned.
    index = press.score(*given).topk(count, dim=-1).indices
    rows = index.unsqueeze(-1).expand(-1, -1, -1, keys.shape[-1])
    if not (torch.equal(keys.gather(2, rows), pruned[0]) and torch.equal(values.gather(2, rows), pruned[1])):
        raise SystemExit(f"{type(press).__name__} keeps other positions than those with its highest scores")
    kept = torch.zeros(keys.shape[1:3], dtype=torch.bool)
    kept.scatter_(1, index[0].cpu(), True)
    return kept.numpy()


def main() -> None:
    """Read the first file, and write the second."""
    asked = json.loads(Path(sys.argv[1]).read_text())
    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32, local_files_only=True).eval()
    kept = []
    for number, context in enumerate(asked["contexts"], 1):
        print(f"context {number} of {len(asked['contexts'])}", flush=True)
        recorder = Recorder(
            {name: [getattr(kvpress, name)(compression_ratio=r) for r in asked["ratios"]] for name in asked["presses"]}
        )
        with torch.no_grad(), recorder(model):
            # Only the cache is wanted: the head is the largest matrix of a small model.
            model.model(torch.tensor([context]), past_key_values=DynamicCache(), use_cache=True)
        kept.append(
            {
                name: [base64.b64encode(np.packbits(np.stack(layers)).tobytes()).decode() for layers in own]
                for name, own in recorder.kept.items()
            }
        )
    config = model.config
    told = {
        "kvpress": version("kvpress"),
        "transformers": version("transformers"),
        "layers": config.num_hidden_layers,
        "heads": config.num_key_value_heads,
        "kept": kept,
    }
    Path(sys.argv[2]).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
