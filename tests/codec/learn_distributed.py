"""Run by `tests/codec/test_distributed.py`: `learn_distributed.py FOLDER PROCESSES`.

The processes are forked once everything is imported, which takes longer than all they do. torchrun is tested with the
command.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM

from cuvee.codec.errors import CuveeError
from cuvee.codec.layout import KVLayout
from cuvee.codec.learning import calibrate, curve
from cuvee.codec.learning.distributed import TorchProcessGroup
from cuvee.codec.learning.moments import Moments
from cuvee.codec.learning.token_model import TokenSums
from cuvee.codec.profiles.sections import partition


def small_model() -> LlamaForCausalLM:
    """Two layers of random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.eval()
    return model


def tokens(count: int = 24) -> torch.Tensor:
    """The text to learn from."""
    return torch.randint(64, (count, 96), generator=torch.Generator().manual_seed(1))


def some_moments(layout: KVLayout, runs: slice) -> Moments:
    """The sums over some of nine runs, whose means differ."""
    section = partition(layout, "layer")[0]
    moments = Moments(section, layout, 10_000)
    generator = torch.Generator().manual_seed(2)
    for x, gradient in [torch.randn(2, 20, section.values, generator=generator) for _ in range(9)][runs]:
        moments.add(x + 100 + x.mean(), 0, gradient)
    return moments


def refusal(**arguments: object) -> str:
    """The message of `calibrate` about arguments that differ between processes."""
    try:
        calibrate.calibrate(small_model(), tokens(), progress=False, distributed=True, **arguments)  # type: ignore[arg-type]
    except CuveeError as error:
        return str(error)
    return ""


def auto(rank: int) -> str:
    """The group chosen where the budgets of all but the first, as on other devices, would have them choose another."""
    with mock.patch.multiple(calibrate, CODED_SHARE=8.0, CPU_FLOPS=10**6 if rank else 600):
        budget = calibrate.CPU_FLOPS
        layout = KVLayout.from_config(small_model().config, dtype=torch.float32)
        alone, _ = calibrate.choose_group(layout, 10**6, budget)
        assert alone == ("all" if rank else "layer"), alone
        return calibrate.calibrate(small_model(), tokens(), progress=False, distributed=True).group


FAILURES: dict[str, tuple[Any, str, int]] = {
    # Where, what fails there, and in which process.
    "reading the model": (calibrate, "model_fingerprint", 1),
    "preparing": (calibrate, "by_kind", 2),
    "reading": (TokenSums, "add_text", 1),
    "learning from tokens": (calibrate, "learn_token_model", 0),
    "calibrating": (calibrate, "sample_gradients", 0),
    "adding up": (Moments, "move_origin", 1),
    "building the profile": (calibrate, "build_profile", 0),
    "measuring": (curve, "default_step_indices", 2),
}


def failure(rank: int, where: str) -> list[str]:
    """The error in this process if one process fails: its class, message and notes."""
    owner, name, failing = FAILURES[where]
    broken = mock.patch.object(owner, name, side_effect=RuntimeError(f"out of memory in {name}"))
    try:
        with broken if rank == failing else nullcontext():
            calibrate.calibrate(small_model(), tokens(), "layer", progress=False, distributed=True)
    except Exception as error:  # whatever it is, the test looks at it
        return [type(error).__name__, str(error), *getattr(error, "__notes__", ())]
    return []


def learn(folder: Path, rank: int, processes: int) -> None:
    """Write the results of this process."""
    meeting = f"file://{folder / 'meeting'}"
    distributed.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=processes, timeout=timedelta(seconds=60)
    )
    group = TorchProcessGroup()
    model = small_model()
    layout = KVLayout.from_config(model.config, dtype=model.dtype)
    # Three processes, nine runs; the last process has none.
    moments = some_moments(layout, slice(group.rank, 9, 2) if group.rank < 2 else slice(0))
    group.all_reduce([moments])
    torch.save(
        {
            "count": moments.count, "mean": moments.mean(), "covariances": moments.covariances(),
            "metrics": moments.loss_metrics(), "sinks": moments.sink_total, "sink_count": moments.sink_count,
            "sample": sum(len(run.x) for run in moments.sample),
        },
        folder / f"moments-{group.rank}.pt",
    )  # fmt: skip
    # Only the sequences of the first process count.
    sequences = tokens() if group.rank == 0 else tokens()[:4]
    for name, predicting in (("profile", False), ("predicting", True)):
        profile = calibrate.calibrate(
            model, sequences, "layer", predict_tokens=predicting, progress=False, distributed=True
        )
        profile.save(folder / f"{name}-{group.rank}.safetensors")
    refused = refusal(group="layer" if group.rank else "head")
    (folder / f"refused-{group.rank}.json").write_text(json.dumps(refused))
    chosen = auto(rank)
    failed = {where: failure(rank, where) for where in FAILURES}
    (folder / f"ended-{group.rank}.json").write_text(json.dumps({"group": chosen, "failed": failed}))
    distributed.destroy_process_group()


def main(folder: Path, processes: int) -> int:
    """Exit code 1 if a process failed; the others, which wait for it, are ended."""
    running = set()
    for rank in range(processes):
        if child := os.fork():
            running.add(child)
            continue
        try:
            learn(folder, rank, processes)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    failed = False
    while running:
        child, status = os.wait()
        running.remove(child)
        if status and not failed:
            failed = True
            for other in running:
                os.kill(other, signal.SIGKILL)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
