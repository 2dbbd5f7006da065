"""Learning on several devices: processes that torchrun starts, models that are spread out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.codec.learn_distributed import FAILURES, small_model, some_moments, tokens

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.learning.calibrate import _device_of_moments, calibrate
from cuvee.codec.learning.distributed import SingleProcess, raise_on_all_ranks
from cuvee.codec.models.forward import score
from cuvee.codec.profiles.profile import Profile

PROCESSES = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that three processes wrote."""
    folder = tmp_path_factory.mktemp("processes")
    script = Path(__file__).parent / "learn_distributed.py"
    ran = subprocess.run(
        [sys.executable, str(script), str(folder), str(PROCESSES)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return folder


def test_sums_of_several_processes_are_those_of_one(folder: Path) -> None:
    layout = KVLayout.from_config(small_model().config, dtype=torch.float32)
    whole = some_moments(layout, slice(0, 9))
    for rank in range(PROCESSES):
        theirs = torch.load(folder / f"moments-{rank}.pt", weights_only=True)
        assert theirs["count"] == whole.count and theirs["sample"] == 180
        torch.testing.assert_close(theirs["mean"], whole.mean())
        torch.testing.assert_close(theirs["covariances"], whole.covariances(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(theirs["metrics"], whole.loss_metrics(), rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(theirs["sinks"], whole.sink_total)
        torch.testing.assert_close(theirs["sink_count"], whole.sink_count)


def test_all_get_one_profile_which_is_about_that_of_one_process(folder: Path) -> None:
    profiles = [Profile.load(folder / f"profile-{rank}.safetensors") for rank in range(PROCESSES)]
    assert len({profile.id for profile in profiles}) == 1
    assert len({profile.curve for profile in profiles}) == 1
    alone = calibrate(small_model(), tokens(), "layer", predict_tokens=False, progress=False)
    # Other targets were drawn, so the metric differs; what is measured on the held-out text hardly does.
    assert [point.step_index for point in profiles[0].curve] == [point.step_index for point in alone.curve]
    for ours, theirs in zip(alone.curve, profiles[0].curve, strict=True):
        assert theirs.bits_per_value == pytest.approx(ours.bits_per_value, rel=0.05)


def test_all_predict_from_tokens_as_one_process_does(folder: Path) -> None:
    """All of them read the same text, in shares."""
    profiles = [Profile.load(folder / f"predicting-{rank}.safetensors") for rank in range(PROCESSES)]
    assert len({profile.id for profile in profiles}) == 1
    alone = calibrate(small_model(), tokens(), "layer", progress=False)
    mine, ours = profiles[0].token_table, alone.token_table
    assert mine is not None and ours is not None
    apart = (mine.embedding.int() - ours.embedding.int()).abs()
    assert int(apart.max()) <= 1 and float((apart > 0).float().mean()) < 0.01


def test_arguments_that_differ_are_refused_in_every_process(folder: Path) -> None:
    for rank in range(PROCESSES):
        refused = json.loads((folder / f"refused-{rank}.json").read_text())
        assert refused == "group: must be the same in all processes, got 'layer' in rank 1 and 'head' in rank 0"


def test_the_first_process_chooses_the_group_for_all(folder: Path) -> None:
    """Another device has another budget, with which the others would have chosen another group."""
    groups = [json.loads((folder / f"ended-{rank}.json").read_text())["group"] for rank in range(PROCESSES)]
    assert groups == ["layer"] * PROCESSES


@pytest.mark.parametrize("where", FAILURES)
def test_all_processes_end_if_one_fails(folder: Path, where: str) -> None:
    """None waits for the failed one, and each says which that is."""
    _, name, failing = FAILURES[where]
    for rank in range(PROCESSES):
        kind, message, *notes = json.loads((folder / f"ended-{rank}.json").read_text())["failed"][where]
        if rank == failing:
            assert (kind, message) == ("RuntimeError", f"out of memory in {name}")
            assert notes == [f"in the process of rank {rank} of {PROCESSES}, while {where}"]
        else:
            assert kind == "ProfileError" and not notes
            cause = f"(RuntimeError: out of memory in {name})"
            assert message.startswith(f"distributed: the process of rank {failing} failed while {where} {cause}")


def test_a_single_process_raises_its_error_unchanged() -> None:
    with pytest.raises(RuntimeError, match="mine") as caught, raise_on_all_ranks(SingleProcess(), "calibrating"):
        raise RuntimeError("mine")
    assert not hasattr(caught.value, "__notes__")


def test_needs_a_process_group() -> None:
    with pytest.raises(InputError, match="torchrun"):
        calibrate(small_model(), tokens(), "layer", progress=False, distributed=True)


def test_processes_of_the_command_share_the_work(tmp_path: Path) -> None:
    model = tmp_path / "model"
    small_model().save_pretrained(model)
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps(row.tolist()) + "\n" for row in tokens()))
    out = tmp_path / "profile"
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "cuvee",
         "profile", "learn", str(model), str(text), "-o", str(out), "--length", "96", "--group", "layer", "--json"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["group"] == "layer"  # one process says it, not two
    assert Profile.load(out).source == "calibrated"


def test_sums_that_do_not_fit_beside_the_model_stay_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layout = KVLayout.from_config(small_model().config, dtype=torch.float32)
    model: Any = SimpleNamespace(device=torch.device("cuda", 1))
    # Two sections of one block of 32 values: two matrices each, and eight while one is worked on; half may be taken.
    needed = 8 * (4 + 8) * 32 * 32
    for free, where in ((2 * needed, "cuda"), (2 * needed - 1, "cpu")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 10**12))
        caplog.clear()
        assert _device_of_moments(model, layout, "layer").type == where
        assert ("kept on the CPU, which is slower" in caplog.text) == (where == "cpu")
    model.device = torch.device("cpu")
    assert _device_of_moments(model, layout, "layer").type == "cpu"


def test_a_cache_goes_where_the_model_keeps_each_layer() -> None:
    """Models that `device_map=` spreads over devices; the device `meta` stands for a second one."""
    layout = KVLayout.from_config(small_model().config, dtype=torch.float32)
    seen: list[list[str]] = []

    class Spread:
        device, dtype, hf_device_map = torch.device("cpu"), torch.float32, {"layers.0": "cpu", "layers.1": "meta"}

        def __call__(self, input_ids: torch.Tensor, past_key_values: Any) -> Any:
            if not past_key_values.layers:
                for layer, device in enumerate(self.hf_device_map.values()):
                    past_key_values.update(*torch.zeros(2, 1, 2, 1, 8, device=device), layer)
            else:
                seen.append([layer.keys.device.type for layer in past_key_values.layers])
            return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 64))

        forward = __call__

    tensors = [torch.zeros(5, 2, 8) for _ in range(2)]
    model: Any = Spread()
    assert score(model, [KVChunk(tensors, tensors, layout)], torch.zeros(1, 4, dtype=torch.int64)).shape == (1, 3, 64)
    assert seen == [["cpu", "meta"]]
