"""`cuvee demo`, on the bundled model, with fewer sequences than a user gets."""

from __future__ import annotations

import json
import re
from importlib.metadata import requires

import pytest
from tests.package.cli.running import run
from tests.package.test_docs import parse

from cuvee.calibration.corpus import BUNDLED_MODEL
from cuvee.codec.profiles.quality import PRESET_KL
from cuvee.eval import demo
from cuvee.integrations.vllm.connector_config import Options


def test_the_demo_measures_and_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(demo.SCOPES, BUNDLED_MODEL, demo.DemoScope(learned=12, sequences=2))
    monkeypatch.setattr(demo, "CONTINUED", ("cuvee lossless", "cuvee balanced", demo.FP8))
    measured: list[demo.Demo] = []
    real = demo.run_demo
    monkeypatch.setattr(demo, "run_demo", lambda *given, **named: measured.append(real(*given, **named)))
    done = run("demo")
    (found,) = measured
    sizes = {entry.name: entry.bits_per_value for entry in found.quality}
    assert list(sizes) == [*demo.BASELINES, "cuvee lossless", *(f"cuvee {name}" for name in PRESET_KL)]
    assert sizes[demo.FP8] > 2 * sizes["cuvee balanced"] > 2 * sizes["cuvee small"]
    one, said = found.restored, found.continued
    assert one.raw_bytes > 8 * one.blob_bytes and f"{one.raw_bytes:,} bytes" in done.stdout
    prompts = 2 * len(demo.PROMPT_TOKENS)
    assert said.exact.shape == (prompts, demo.CONTINUED_TOKENS) and len(said.prompts) == prompts
    assert said.equal("cuvee lossless") == (1, 0) and 1 > said.equal(demo.FP8)[0] > 0.1, "a narrower cache differs"
    share, error = said.equal("cuvee balanced")
    by_prompt = (said.others["cuvee balanced"] == said.exact).double().mean(1)
    assert (share, error) == pytest.approx(
        (float(by_prompt.mean()), float(by_prompt.std()) / prompts**0.5)
    ) and error > 0
    assert f"over all {prompts} prompts" in done.stdout and f"{share:.1%} ± {100 * error:.1f}" in done.stdout
    assert done.stdout.count("exact cache  ") == demo.SHOWN_PROMPTS
    assert "learning a profile from three novels" in done.stderr  # progress is on standard error
    commands_end_it(done.stdout)


def commands_end_it(shown: str) -> None:
    """The commands to go on with are right."""
    (extra,) = re.findall(r"^.*pip install 'cuvee\[(.+)\]'$", shown, re.MULTILINE)
    assert f"gguf>=0.17; extra == '{extra}'" in [line.replace('"', "'") for line in requires("cuvee") or ()]
    learn, report = re.findall(r"^\S*cuvee ((?:profile|report) .*)$", shown, re.MULTILINE)
    for command in (learn, report):
        parse(f"cuvee {command}")
    (transfer,) = re.findall(r"^vllm serve MODEL --kv-transfer-config '(.+)'$", shown, re.MULTILINE | re.DOTALL)
    options = Options.from_dict(json.loads(transfer)["kv_connector_extra_config"])
    assert options.profile is not None and f"-o {options.profile}" in learn
    assert options.store != Options().store, "RAM of one process, which servers with several refuse"
