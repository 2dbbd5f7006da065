"""For the engines that tests start: hides AMX, so that vLLM lays out pages alike on every CPU.

With AMX vLLM's CPU backend packs bfloat16 keys in tiles, which the connector refuses by name (`test_probe.py`).
Python imports this module on its own where its folder is on PYTHONPATH, in the processes of the engine's workers, too.
"""

import sys
from importlib.abc import MetaPathFinder


class _HideAmx(MetaPathFinder):
    """Acts when vLLM is first imported: before, torch need not be loaded."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "vllm":
            sys.meta_path.remove(self)
            import torch

            torch.cpu._is_amx_tile_supported = lambda: False


sys.meta_path.insert(0, _HideAmx())
