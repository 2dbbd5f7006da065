"""The page about vLLM on a CPU: every line of it runs, and what it says about the outcome is so."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from tests.integrations.stores.loopback import free_port
from tests.integrations.vllm.engines import environment, need_vllm, serving
from tests.waiting import PATIENCE

from cuvee.integrations.vllm.connector_config import Options

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "guides" / "vllm-cpu.md").read_text(encoding="utf-8")
LOADED = int(re.findall(r"Both say (\d+)", PAGE)[0])  # tokens of the prompt after a restart


def test_it_installs_what_make_test_does() -> None:
    """Not run here, where everything is installed: `make test` takes the same steps with pip."""
    install = PAGE.split("```\n")[1]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (engine,) = re.findall(r"^ENGINE \?= (\S+)$", makefile, re.MULTILINE)
    (removed,) = re.findall(r"uv pip uninstall ([a-z ]+?) +#", install)
    assert f'"{engine}"' in install and f"pip uninstall --yes {removed}\n" in makefile


def test_the_connector_takes_what_the_page_passes() -> None:
    (transfer,) = re.findall(r"--kv-transfer-config\s+'(\{.*?\})'", PAGE, re.DOTALL)
    Options.from_dict(json.loads(transfer)["kv_connector_extra_config"])


@pytest.mark.nightly  # two starts of a server: 90 s
def test_every_line_runs(tmp_path: Path) -> None:
    need_vllm()
    port = free_port()
    text = PAGE.replace("localhost:8000", f"127.0.0.1:{port}").replace("--port 8000", f"--port {port}")
    text = text.replace("/tmp/cuvee-kv", f"{tmp_path}/kv")
    template, serve, ask, chat, metrics = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    exec_last = serve.replace("\npython -m", "\nexec python -m")  # so that a stop reaches the server, as Ctrl-C does

    def sh(lines: str) -> str:
        done = subprocess.run(
            ["bash", "-euc", lines],
            cwd=tmp_path,
            env=environment(PATH=path),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr + (tmp_path / "log.txt").read_text(errors="replace")[-4000:]
        return done.stdout

    def server() -> AbstractContextManager[str]:
        become = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
        return serving(tmp_path, ["-c", become, "bash", "-euc", exec_last], port, PATH=path)

    sh(template)
    with server():
        answer = json.loads(sh(ask))["choices"][0]["text"]
        assert answer and json.loads(sh(chat))["choices"][0]["message"]["content"]
        assert set(counted(sh(metrics)).values()) <= {0.0}
    assert any(file.is_file() for file in (tmp_path / "kv").rglob("*")), "the stop stores what waits"
    with server():
        assert json.loads(sh(ask))["choices"][0]["text"] == answer
        deadline = time.monotonic() + PATIENCE
        while (found := counted(sh(metrics)))["vllm:cuvee_loaded_tokens_total"] == 0 and time.monotonic() < deadline:
            sh(chat)  # counters travel with the engine's steps
    assert len(found) == 2 and min(found.values()) >= LOADED, "the prompt, and what the chats share with the first one"
    (info,) = re.findall(r"`(cuvee store info .+?)`", text)
    assert re.search(r"disk +yes +[1-9]", sh(info).replace("│", " "))


def counted(metrics: str) -> dict[str, float]:
    """Return the counters that a server printed, without their labels."""
    lines = (line.rpartition(" ") for line in metrics.splitlines())
    return {name.partition("{")[0]: float(value) for name, _, value in lines}


def test_the_command_vllm_fails_as_the_page_says() -> None:
    need_vllm()
    with pytest.raises(PackageNotFoundError, match="No package metadata was found for vllm"):
        version("vllm")  # what the command asks first
