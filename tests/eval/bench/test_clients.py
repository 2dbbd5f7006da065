"""vLLM's own benchmark: what is run against what, what is read of it, and what is left when something fails."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console
from tests.integrations.vllm.engines import need_vllm

from cuvee.calibration.bundled import bundled_model_path
from cuvee.codec.errors import CuveeError
from cuvee.eval.bench import clients
from cuvee.eval.bench.clients import BASELINE, COLD, RESTART, VARIANTS, WARM, run_clients, serving

LOSSY = ["cuvee high", "cuvee balanced"]
GOOD = """import sys; open(sys.argv[1] + '/requests.json', 'w').write('{"errors": [""], "ttfts": [0.1, 0.2, 0.3]}')"""
ONE_FAILS = GOOD.replace('[""]', '["", "no"]')


def test_the_servers_arguments_are_those_of_their_variants() -> None:
    assert clients._arguments(BASELINE, Path("/s"), None)[-1] == "--no-enable-prefix-caching"
    transfer = json.loads(clients._arguments("cuvee high", Path("/s"), Path("/p"))[-1])
    extra = {"store": "file:///s", "quality": "high", "profile": "/p"}
    assert transfer["kv_connector_extra_config"] == extra and transfer["kv_connector"] == "CuveeConnector"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """No server, but the arguments of each; the client is a line of Python, run as a process like the real one."""
    started: list[Sequence[str]] = []
    counted = iter(range(100, 10_000, 100))

    @contextmanager
    def fake(log: Path, model: Path, arguments: Sequence[str]) -> Iterator[str]:
        started.append(arguments)
        if any("blend" in argument for argument in arguments):
            raise CuveeError("the server did not start\nno memory")
        yield "http://nowhere"

    def counters(url: str) -> list[float]:
        tokens = next(counted)
        return [tokens, tokens / 4, 0]

    monkeypatch.setattr(clients, "serving", fake)
    monkeypatch.setattr(clients, "counters", counters)
    monkeypatch.setattr(
        clients, "client_command", lambda url, model, code, folder: [sys.executable, "-c", *code, str(folder)]
    )
    return started


def test_each_variant_is_asked_cold_warm_and_after_a_restart(tmp_path: Path, served: list[Sequence[str]]) -> None:
    report = json.loads(json.dumps(run_clients(tmp_path, [GOOD], None), allow_nan=False))
    found = report["variants"]
    assert list(found) == [name for name in VARIANTS if name not in LOSSY], "lossy ones need a profile"
    assert list(found[BASELINE]) == [COLD]
    assert list(found["vLLM's prefix cache"]) == [COLD, WARM]
    assert list(found["cuvee lossless"]) == [COLD, WARM, RESTART]
    assert found["cuvee lossless"][WARM] == {
        "first_token_seconds": [0.1, 0.2, 0.3], "p50": 0.2, "p99": pytest.approx(0.298), "hit_rate": 0.25,
    }  # fmt: skip
    # A server that fails takes nothing from the others.
    assert found["cuvee lossless, blend"][COLD]["error"].startswith("the server did not start")
    assert len(served) == 1 + 1 + 2 + 2
    out = io.StringIO()
    clients.show_clients(report).print(Console(file=out, width=200))
    assert "failed: the server did not start" in out.getvalue()


@pytest.mark.parametrize(
    ("code", "seconds", "said"),
    [
        ("raise SystemExit('no tokenizer')", 60.0, "the client ended with status 1: no tokenizer"),
        ("import time; time.sleep(60)", 0.5, "the client did not end within 0.5 s"),
        (ONE_FAILS, 60.0, "1 of 3 requests failed: no"),
    ],
)
def test_a_client_that_fails_or_hangs(
    tmp_path: Path, served: object, monkeypatch: pytest.MonkeyPatch, code: str, seconds: float, said: str
) -> None:
    monkeypatch.setattr(clients, "_CLIENT_SECONDS", seconds)
    monkeypatch.setattr(clients, "VARIANTS", {BASELINE: None})
    assert run_clients(tmp_path, [code], None)["variants"][BASELINE][COLD] == {"error": said}


def test_a_server_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = subprocess.Popen
    code = "import sys; print('no such model'); sys.exit(4)"
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: begun([sys.executable, "-c", code], **options))
    with (
        pytest.raises(CuveeError, match=r"the server did not start; its log ends with\nno such model"),
        serving(tmp_path / "log", tmp_path, ()),
    ):
        pass


@pytest.mark.nightly  # the server is that of test_serve; here it is asked by another client
def test_vllms_own_client_asks_a_real_server(tmp_path: Path) -> None:
    need_vllm()
    small = (
        "--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len=256", "--num-prompts=4",
        "--prefix-repetition-suffix-len=16", "--prefix-repetition-num-prefixes=2", "--prefix-repetition-output-len=4",
    )  # fmt: skip
    sizes = ("--max-model-len", "512", "--kv-cache-memory-bytes", str(64 << 20))
    arguments = (*clients._arguments("cuvee lossless", tmp_path / "store", None), *sizes)
    with serving(tmp_path / "log", bundled_model_path(), arguments) as url:
        measured = clients._measured(url, bundled_model_path(), small, tmp_path / "cold")
    assert len(measured["first_token_seconds"]) == 4 and 0 < measured["p50"] < measured["p99"]
    assert measured["hit_rate"] > 0.4  # the second request of each prefix
