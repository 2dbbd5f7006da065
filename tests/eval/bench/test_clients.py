"""vLLM's own benchmark: what is run against what, what is read of it, and what is left when something fails."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import pytest
from rich.console import Console
from tests.integrations.vllm.engines import need_vllm

from cuvee.calibration.bundled import bundled_model_path
from cuvee.codec.errors import CuveeError, InputError
from cuvee.eval.bench import clients
from cuvee.eval.bench.clients import BASELINE, COLD, RESTART, VARIANTS, WARM, Server, choose, run_clients


def test_variants_are_chosen_by_name() -> None:
    lossless = [name for name in VARIANTS if "high" not in name and "balanced" not in name]
    assert choose((), None) == lossless
    # The baseline is always there, and variants keep their order.
    assert choose(["cuvee high", "cuvee lossless"], Path("p")) == [BASELINE, "cuvee lossless", "cuvee high"]
    for name, said in (
        ("cuvee high", "profile: 'cuvee high' needs one of the model: give --profile"),
        ("cuvee", "variant: must be one of 'no cache', .*, got 'cuvee'"),
    ):
        with pytest.raises(InputError, match=said):
            choose([name], None)


def test_the_commands_are_what_servers_and_clients_take(tmp_path: Path) -> None:
    assert clients._arguments(BASELINE, tmp_path, None)[-1] == "--no-enable-prefix-caching"
    transfer = json.loads(clients._arguments("cuvee high", Path("/s"), Path("/p"))[-1])
    extra = {"store": "file:///s", "quality": "high", "profile": "/p"}
    assert transfer["kv_connector_extra_config"] == extra and transfer["kv_connector"] == "CuveeConnector"
    assert f"--result-dir={tmp_path}" in clients.client_command("http://s", "m", clients.REQUESTS, tmp_path)


def test_what_the_client_writes_is_read(tmp_path: Path) -> None:
    with pytest.raises(CuveeError, match="left no result that can be read"):
        clients.first_tokens(tmp_path)
    file = tmp_path / "requests.json"
    file.write_text('{"errors": ["", ""], "ttfts": [0.5, 1]}')
    assert clients.first_tokens(tmp_path) == [0.5, 1.0]
    for text, said in (
        ('{"errors": ["", "no"], "ttfts": [0.5, 0]}', "1 of 2 requests failed: no"),
        ('{"errors": [], "ttfts": []}', "none was made"),
        *((text, "left no result that can be read") for text in ("[", "{}", '{"errors": null, "ttfts": []}')),
    ):
        file.write_text(text)
        with pytest.raises(CuveeError, match=said):
            clients.first_tokens(tmp_path)


class FakeServer:
    """What `Server` shows; it does not start if its arguments have a word."""

    started: list[Sequence[str]] = []  # noqa: RUF012
    fails_with = ""
    model, url = "model", "http://nowhere"

    def __init__(self, log: Path, model: Path, arguments: Sequence[str]) -> None:
        self.started.append(arguments)
        self._tokens = 0.0

    def __enter__(self) -> Self:
        if self.fails_with and any(self.fails_with in argument for argument in self.started[-1]):
            raise CuveeError("the server did not start\nno memory")
        return self

    def __exit__(self, *_: object) -> None: ...

    def counters(self) -> dict[str, float]:
        self._tokens += 100
        hits = {"vllm:prefix_cache_hits_total": self._tokens / 4, "vllm:external_prefix_cache_hits_total": 0.0}
        return {"vllm:prompt_tokens_total": self._tokens, **hits}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeServer]:
    """No server, and a client that is a line of Python, run as a process like the real one."""
    monkeypatch.setattr(clients, "Server", FakeServer)
    monkeypatch.setattr(FakeServer, "started", [])
    monkeypatch.setattr(
        clients, "client_command", lambda url, model, code, folder: [sys.executable, "-c", *code, str(folder)]
    )
    return FakeServer


GOOD = """import sys; open(sys.argv[1] + '/requests.json', 'w').write('{"errors": [], "ttfts": [0.1, 0.2, 0.3]}')"""


def test_every_variant_is_measured(tmp_path: Path, fake: type[FakeServer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "fails_with", "high")
    names = [BASELINE, "vLLM's prefix cache", "cuvee lossless", "cuvee high"]
    report = json.loads(json.dumps(run_clients(tmp_path, names, [GOOD], Path("p"), None)))
    found = report["variants"]
    assert [list(found[name]) for name in names[:3]] == [[COLD], [COLD, WARM], [COLD, WARM, RESTART]]
    measured = found["cuvee lossless"][RESTART]
    assert measured["p50"] == 0.2 and measured["p99"] == pytest.approx(0.298)
    assert measured["prompt_tokens"] == 100 and measured["hit_rate"] == 0.25
    assert found["cuvee high"][COLD]["error"].startswith("the server did not start")
    assert len(fake.started) == 1 + 1 + 2 + 2
    out = io.StringIO()
    clients.show_clients(report).print(Console(file=out, width=200))
    assert "failed: the server did not start" in out.getvalue()


@pytest.mark.parametrize(
    ("code", "seconds", "said"),
    [
        ("raise SystemExit('no tokenizer')", 60.0, "the client ended with status 1: no tokenizer"),
        ("import time; time.sleep(60)", 0.5, "no end within 0.5 s"),
    ],
)
def test_a_client_that_fails_or_hangs(
    tmp_path: Path, fake: type[FakeServer], monkeypatch: pytest.MonkeyPatch, code: str, seconds: float, said: str
) -> None:
    monkeypatch.setattr(clients, "_CLIENT_SECONDS", seconds)
    report = run_clients(tmp_path, [BASELINE], [code], None, None)
    assert report["variants"][BASELINE][COLD] == {"error": said}


def test_a_server_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = subprocess.Popen
    code = "import sys; print('no such model'); sys.exit(4)"
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: begun([sys.executable, "-c", code], **options))
    with pytest.raises(CuveeError, match=r"the server did not start; .*log ends with\nno such model"):
        Server(tmp_path / "log", tmp_path, ()).__enter__()


@pytest.mark.nightly  # the server is that of test_serve; here it is asked by another client
def test_vllms_own_client_asks_a_real_server(tmp_path: Path) -> None:
    need_vllm()
    small = (
        "--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len=256", "--num-prompts=4",
        "--prefix-repetition-suffix-len=16", "--prefix-repetition-num-prefixes=2", "--prefix-repetition-output-len=4",
    )  # fmt: skip
    sizes = ("--max-model-len", "512", "--kv-cache-memory-bytes", str(64 << 20))
    arguments = (*clients._arguments("cuvee lossless", tmp_path / "store", None), *sizes)
    with Server(tmp_path / "log", bundled_model_path(), arguments) as server:
        measured = clients._measured(server, small, tmp_path / "cold")
        assert "error" not in measured, measured
        assert len(measured["first_token_seconds"]) == 4 and 0 < measured["p50"] < measured["p99"]
        assert measured["hit_rate"] > 0.4  # the second request of each prefix
    with pytest.raises(CuveeError, match="the server did not answer"):
        server.counters()
