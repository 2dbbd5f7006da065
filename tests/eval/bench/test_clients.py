"""Other people's benchmarks: which are run against what, what is read of them, and what is left when one fails."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
from rich.console import Console
from tests.integrations.vllm.engines import need_vllm

from cuvee.calibration.bundled import bundled_model_path
from cuvee.codec.errors import CuveeError, InputError
from cuvee.eval.bench import clients
from cuvee.eval.bench.clients import BASELINE, COLD, RESTART, VARIANTS, WARM, WORKLOADS, Server, choose, run_clients

VLLM, LMCACHE = WORKLOADS[0], WORKLOADS[1]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "find_spec", lambda _: object())
    monkeypatch.setattr(clients, "_lmcache", lambda: "/bin/lmcache")


@pytest.mark.usefixtures("installed")
def test_variants_and_workloads_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    lossless = [name for name in VARIANTS if "high" not in name and "balanced" not in name]
    assert choose((), (), None) == (lossless, list(WORKLOADS))
    # The baseline is always there, and variants keep their order.
    chosen = choose(["cuvee high", "cuvee lossless"], ["long-doc-qa"], Path("p"))
    assert chosen == ([BASELINE, "cuvee lossless", "cuvee high"], [LMCACHE])
    for variants, workloads, said in (
        (["cuvee high"], [], "profile: 'cuvee high' needs one of the model: give --profile"),
        (["cuvee"], [], "variant: must be one of 'no cache', .*, got 'cuvee'"),
        ([], ["rag"], "workload: must be one of prefix_repetition, .*, got 'rag'"),
    ):
        with pytest.raises(InputError, match=said):
            choose(variants, workloads, None)
    monkeypatch.setattr(clients, "_lmcache", lambda: None)
    assert choose((), (), None)[1] == [VLLM]
    with pytest.raises(InputError, match="'long-doc-qa' needs its client: pip install lmcache-cli"):
        choose((), ["long-doc-qa"], None)
    monkeypatch.setattr(clients, "find_spec", lambda _: None)
    with pytest.raises(InputError, match="no benchmark client is installed"):
        choose((), (), None)


@pytest.mark.usefixtures("installed")
def test_the_commands_are_what_servers_and_clients_take(tmp_path: Path) -> None:
    assert clients._arguments(BASELINE, tmp_path, None)[-1] == "--no-enable-prefix-caching"
    transfer = json.loads(clients._arguments("cuvee high", Path("/s"), Path("/p"))[-1])
    extra = {"store": "file:///s", "quality": "high", "profile": "/p"}
    assert transfer["kv_connector_extra_config"] == extra and transfer["kv_connector"] == "CuveeConnector"
    command = LMCACHE.command("http://s", "m", tmp_path)
    assert command[:5] == ["/bin/lmcache", "bench", "engine", "--engine-url", "http://s"]
    assert command[command.index("--output-dir") + 1] == str(tmp_path)
    assert f"--result-dir={tmp_path}" in VLLM.command("http://s", "m", tmp_path)


CSV = "request_id,successful,ttft,error\nd1,True,0.5,\n"


@pytest.mark.parametrize(
    ("workload", "file", "right", "failed", "broken"),
    [
        (VLLM, "requests.json", '{"errors": ["", ""], "ttfts": [0.5, 1]}', '{"errors": ["", "no"], "ttfts": [0.5, 0]}',
         ("[", "{}", '{"errors": null, "ttfts": []}')),
        (LMCACHE, "bench_results.csv", f"{CSV}d2,True,1,\n", f"{CSV}d2,False,0,no\n",
         ("request_id,successful\nd1,True\n",)),
    ],
)  # fmt: skip
def test_what_clients_write_is_read(
    tmp_path: Path, workload: clients.Workload, file: str, right: str, failed: str, broken: Sequence[str]
) -> None:
    with pytest.raises(CuveeError, match="left no result that can be read"):
        workload.read(tmp_path)
    (tmp_path / file).write_text(right)
    assert workload.read(tmp_path) == [0.5, 1.0]
    (tmp_path / file).write_text(failed)
    with pytest.raises(CuveeError, match="1 of 2 requests failed: no"):
        workload.read(tmp_path)
    for text in broken:
        (tmp_path / file).write_text(text)
        with pytest.raises(CuveeError, match="left no result that can be read"):
            workload.read(tmp_path)


@dataclass(frozen=True)
class Scripted:
    """A workload whose client is a line of Python, run as a process like any other."""

    name: str
    code: str = "import sys; open(sys.argv[1] + '/seconds', 'w').write('0.1 0.2 0.3')"

    def command(self, url: str, model: str, folder: Path) -> list[str]:
        return [sys.executable, "-c", self.code, str(folder)]

    def read(self, folder: Path) -> list[float]:
        return [float(line) for line in (folder / "seconds").read_text().split()]


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
    monkeypatch.setattr(clients, "Server", FakeServer)
    monkeypatch.setattr(FakeServer, "started", [])
    return FakeServer


def test_every_variant_meets_every_workload(
    tmp_path: Path, fake: type[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "fails_with", "high")
    workloads: Any = [Scripted("good"), Scripted("bad", "raise SystemExit('no tokenizer')")]
    names = [BASELINE, "vLLM's prefix cache", "cuvee lossless", "cuvee high"]
    report = json.loads(json.dumps(run_clients(tmp_path, names, workloads, Path("p"), None)))
    found = report["variants"]
    assert [list(found[name]["good"]) for name in names[:3]] == [[COLD], [COLD, WARM], [COLD, WARM, RESTART]]
    measured = found["cuvee lossless"]["good"][RESTART]
    assert measured["p50"] == 0.2 and measured["p99"] == pytest.approx(0.298)
    assert measured["prompt_tokens"] == 100 and measured["hit_rate"] == 0.25
    assert found[BASELINE]["bad"][COLD] == {"error": "the client ended with status 1: no tokenizer"}
    assert found["cuvee high"]["good"][COLD]["error"].startswith("the server did not start")
    assert len(fake.started) == 1 + 1 + 2 + 2
    out = io.StringIO()
    clients.show_clients(report).print(Console(file=out, width=200))
    assert "failed: the client ended" in out.getvalue() and "failed: the server did not start" in out.getvalue()


def test_a_client_that_does_not_end(tmp_path: Path, fake: type[FakeServer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_CLIENT_SECONDS", 0.2)
    workloads: Any = [Scripted("slow", "import time; time.sleep(60)")]
    report = run_clients(tmp_path, [BASELINE], workloads, None, None)
    assert report["variants"][BASELINE]["slow"][COLD] == {"error": "no end within 0.2 s"}


def test_a_server_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = subprocess.Popen
    code = "import sys; print('no such model'); sys.exit(4)"
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: begun([sys.executable, "-c", code], **options))
    with pytest.raises(CuveeError, match=r"the server did not start; .*log ends with\nno such model"):
        Server(tmp_path / "log", tmp_path, ()).__enter__()


@pytest.mark.nightly  # the server is that of test_serve; here it is asked by another client
def test_vllms_own_client_asks_a_real_server(tmp_path: Path) -> None:
    need_vllm()
    small = ("--prefix-repetition-prefix-len=256", "--prefix-repetition-suffix-len=16", "--num-prompts=4",
             "--prefix-repetition-num-prefixes=2", "--prefix-repetition-output-len=4")  # fmt: skip
    workload = clients.Workload("small", "vllm", ("--dataset-name", "prefix_repetition", *small))
    sizes = ("--max-model-len", "512", "--kv-cache-memory-bytes", str(64 << 20))
    arguments = (*clients._arguments("cuvee lossless", tmp_path / "store", None), *sizes)
    with Server(tmp_path / "log", bundled_model_path(), arguments) as server:
        measured = clients._measured(server, workload, tmp_path / "cold")
        assert "error" not in measured, measured
        assert len(measured["first_token_seconds"]) == 4 and 0 < measured["p50"] < measured["p99"]
        assert measured["hit_rate"] > 0.4  # the second request of each prefix
    with pytest.raises(CuveeError, match="the server did not answer"):
        server.counters()
