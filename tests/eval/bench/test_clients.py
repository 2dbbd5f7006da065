"""Other people's benchmarks: which are run against what, what is read of them, and what is left when one fails."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
from tests.integrations.vllm.engines import need_vllm

from cuvee.calibration.bundled import bundled_model_path
from cuvee.codec.errors import CuveeError, InputError
from cuvee.eval.bench.clients import clients_bench as run_module
from cuvee.eval.bench.clients import workloads as workloads_module
from cuvee.eval.bench.clients.clients_bench import COLD, RESTART, WARM, ClientsRun, run_clients
from cuvee.eval.bench.clients.server import Server
from cuvee.eval.bench.clients.variants import BASELINE, VARIANTS, choose_variants
from cuvee.eval.bench.clients.workloads import (
    WORKLOADS,
    LMCacheWorkload,
    PrefixRepetition,
    choose_workloads,
)

LOSSLESS = next(variant for variant in VARIANTS if variant.quality == "lossless")


def test_arms_that_need_a_profile_are_left_out_or_refused_without_one() -> None:
    assert [variant.name for variant in choose_variants((), None)] == [
        variant.name for variant in VARIANTS if not variant.learned
    ]
    assert choose_variants((), Path("p")) == VARIANTS
    # The baseline is always there, and variants keep their order.
    assert [variant.name for variant in choose_variants(["cuvee high", "cuvee lossless"], Path("p"))] == [
        BASELINE, "cuvee lossless", "cuvee high",
    ]  # fmt: skip
    with pytest.raises(InputError, match="profile: 'cuvee high' needs one of the model: give --profile"):
        choose_variants(["cuvee high"], None)
    with pytest.raises(InputError, match=r"variant: must be one of 'no cache', .*, got 'cuvee'"):
        choose_variants(["cuvee"], None)


def test_the_command_of_an_arm_is_what_vllm_takes() -> None:
    none, own, raw, lossless, high, *_ = VARIANTS
    assert none.command(Path("s"), None) == ["--no-enable-prefix-caching"]
    assert own.command(Path("s"), None) == []
    flag, transfer = lossless.command(Path("/s"), Path("/p"))
    extra = {"store": "file:///s", "quality": "lossless"}
    assert flag == "--kv-transfer-config" and json.loads(transfer)["kv_connector_extra_config"] == extra
    off, flag, transfer, *_ = raw.command(Path("/s"), None)
    assert off == "--no-enable-prefix-caching" and json.loads(transfer) == {
        "kv_connector": "ExampleConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": "/s"},
    }  # fmt: skip
    assert [variant.stores for variant in VARIANTS[:5]] == [False, False, True, True, True]
    transfer = json.loads(high.command(Path("/s"), Path("/p"))[1])
    assert transfer["kv_connector_extra_config"] == {"store": "file:///s", "quality": "high", "profile": "/p"}


def test_workloads_whose_client_is_missing_are_left_out_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads_module, "find_spec", lambda _: object())
    monkeypatch.setattr(workloads_module, "_lmcache", lambda: None)
    assert [workload.name for workload in choose_workloads(())] == ["prefix_repetition"]
    with pytest.raises(InputError, match="'long-doc-qa' needs LMCache's client: pip install lmcache-cli"):
        choose_workloads(["long-doc-qa"])
    monkeypatch.setattr(workloads_module, "_lmcache", lambda: "/bin/lmcache")
    assert [workload.name for workload in choose_workloads(())] == [w.name for w in WORKLOADS]
    monkeypatch.setattr(workloads_module, "find_spec", lambda _: None)
    with pytest.raises(InputError, match="'prefix_repetition' needs vLLM's client: pip install vllm"):
        choose_workloads(["prefix_repetition"])
    monkeypatch.setattr(workloads_module, "_lmcache", lambda: None)
    with pytest.raises(InputError, match="no benchmark client is installed"):
        choose_workloads(())
    with pytest.raises(InputError, match=r"workload: must be one of prefix_repetition, long-doc-qa.*, got 'rag'"):
        choose_workloads(["rag"])


def test_the_command_of_lmcaches_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads_module, "_lmcache", lambda: "/bin/lmcache")
    (qa,) = choose_workloads(["long-doc-qa"])
    command = qa.command("http://s", "m", tmp_path, 1)
    assert command[:5] == ["/bin/lmcache", "bench", "engine", "--engine-url", "http://s"] and "--no-warmup" in command
    assert command[command.index("--output-dir") + 1] == str(tmp_path)


def test_what_vllms_client_writes_is_read(tmp_path: Path) -> None:
    workload, file = PrefixRepetition(), tmp_path / "requests.json"
    with pytest.raises(CuveeError, match="prefix_repetition left no result that can be read"):
        workload.read(tmp_path)
    file.write_text(json.dumps({"errors": ["", ""], "ttfts": [0.5, 1]}))
    assert workload.read(tmp_path) == [0.5, 1.0]
    file.write_text(json.dumps({"errors": ["", "refused"], "ttfts": [0.5, 0]}))
    with pytest.raises(CuveeError, match="1 of 2 requests failed; the first: refused"):
        workload.read(tmp_path)
    file.write_text(json.dumps({"errors": [], "ttfts": []}))
    with pytest.raises(CuveeError, match="made no request"):
        workload.read(tmp_path)
    for broken in ("[", "{}", '{"errors": null, "ttfts": []}'):
        file.write_text(broken)
        with pytest.raises(CuveeError, match="left no result that can be read"):
            workload.read(tmp_path)


def test_what_lmcaches_client_writes_is_read(tmp_path: Path) -> None:
    workload, file = LMCacheWorkload("long-doc-qa", (), 0.1), tmp_path / "bench_results.csv"
    with pytest.raises(CuveeError, match="long-doc-qa left no result that can be read"):
        workload.read(tmp_path)
    file.write_text("request_id,successful,ttft,error\nd1,True,0.25,\nd2,True,0.5,\n")
    assert workload.read(tmp_path) == [0.25, 0.5]
    file.write_text("request_id,successful,ttft,error\nd1,True,0.25,\nd2,False,0,timed out\n")
    with pytest.raises(CuveeError, match="1 of 2 requests failed; the first: timed out"):
        workload.read(tmp_path)
    file.write_text("request_id,successful\nd1,True\n")
    with pytest.raises(CuveeError, match="left no result that can be read"):
        workload.read(tmp_path)


@dataclass(frozen=True)
class Scripted:
    """A workload whose client is a line of Python, run as a process like any other."""

    name: str = "scripted"
    code: str = ""

    def check(self) -> None: ...

    def command(self, url: str, model: str, folder: Path, seed: int) -> list[str]:
        return [sys.executable, "-c", self.code, str(folder), url]

    def read(self, folder: Path) -> list[float]:
        return [float(line) for line in (folder / "seconds").read_text().split()]


WRITES = "import sys; open(sys.argv[1] + '/seconds', 'w').write('0.1 0.2 0.3')"


class FakeServer:
    """What `Server` shows; it dies when it is told to. Started with a store or without, as its arguments say."""

    started: list[Sequence[str]] = []  # noqa: RUF012
    dies_with: str | None = None
    model = "model"
    url = "http://nowhere"

    def __init__(self, log: Path, model: Path, arguments: Sequence[str]) -> None:
        self.started.append(arguments)
        self._dead = self.dies_with is not None and any(self.dies_with in argument for argument in arguments)
        self._tokens = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def check(self) -> None:
        if self._dead:
            raise CuveeError("the server died")

    def complete(self, prompt: str, max_tokens: int) -> str:
        return prompt[:40] if not any("high" in a for arguments in self.started[-1:] for a in arguments) else "other"

    def counters(self) -> Mapping[str, float]:
        self._tokens += 100
        return {
            "vllm:prompt_tokens_total": self._tokens,
            "vllm:prefix_cache_hits_total": self._tokens / 4,
            "vllm:external_prefix_cache_hits_total": self._tokens / 2,
            "vllm:cuvee_raw_bytes_total": 300.0,
            "vllm:cuvee_stored_bytes_total": 100.0,
        }


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeServer]:
    monkeypatch.setattr(run_module, "Server", FakeServer)
    monkeypatch.setattr(FakeServer, "started", [])
    return FakeServer


def a_run(tmp_path: Path, *workloads: Any, variants: Sequence[Any] = (*VARIANTS[:2], *VARIANTS[3:6])) -> ClientsRun:
    return ClientsRun(tmp_path, variants, workloads, Path("profile"), ("--dtype", "bfloat16"), tmp_path / "out")


def test_every_arm_meets_every_workload(tmp_path: Path, fake: type[FakeServer]) -> None:
    report = run_clients(a_run(tmp_path, Scripted(code=WRITES), Scripted("second", WRITES)))
    variants = report["variants"]
    phases = {name: list(variants[name]["workloads"]["second"]) for name in variants}
    assert phases[BASELINE] == [COLD] and phases["vLLM's prefix cache"] == [COLD, WARM]
    assert phases["cuvee lossless"] == phases["cuvee balanced"] == [COLD, WARM, RESTART]
    measured = variants["cuvee lossless"]["workloads"]["second"][RESTART]
    assert measured["p50"] == 0.2 and measured["p99"] == pytest.approx(0.298) and measured["p50_ratio"] == 1
    assert measured["prompt_tokens"] == 100 and measured["hit_rate"] == 0.75
    assert variants["cuvee lossless"]["disk"]["ratio"] == 3 and "disk" not in variants[BASELINE]
    assert "bytes_per_1000_tokens" not in variants["cuvee lossless"]["disk"]  # a token's size was not given
    assert variants["cuvee lossless"]["same_answers"][RESTART] == {"equal": 1.0, "leading": 1.0}
    assert list(variants["vLLM's prefix cache"]["same_answers"]) == [COLD, WARM]
    assert variants["cuvee high"]["same_answers"][COLD]["equal"] == 0
    assert len(fake.started) == 2 + 3 * 2
    out = tmp_path / "out"
    assert json.loads((out / "data.json").read_text()) == report
    assert "| cuvee lossless | after a restart | 200 | 1.00 | 298 | 1.00 | 75% |" in (out / "report.md").read_text()
    assert "<svg" in (out / "plot.svg").read_text()
    assert not list((out / "stores").iterdir())


def test_an_arm_whose_server_dies_is_named_and_the_others_are_kept(tmp_path: Path, fake: type[FakeServer]) -> None:
    fake.dies_with = "lossless"
    try:
        report = run_clients(a_run(tmp_path, Scripted(code=WRITES)))
    finally:
        fake.dies_with = None
    assert report["variants"]["cuvee lossless"]["error"] == "the server died"
    assert [name for name, found in report["variants"].items() if "error" in found] == ["cuvee lossless"]
    assert "| cuvee lossless | the server died |" in (tmp_path / "out" / "report.md").read_text()
    fake.dies_with = "--no-enable-prefix-caching"
    try:
        with pytest.raises(CuveeError, match="without a cache failed, so nothing can be compared: the server died"):
            run_clients(a_run(tmp_path, Scripted(code=WRITES)))
    finally:
        fake.dies_with = None


@pytest.mark.parametrize(
    ("code", "said"),
    [("raise SystemExit(3)", "the client ended with status 3"), ("import time; time.sleep(60)", "no end within 1 s")],
)
def test_a_client_that_fails_leaves_the_rest(
    tmp_path: Path, fake: type[FakeServer], monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    monkeypatch.setattr(run_module, "_CLIENT_SECONDS", 1)
    report = run_clients(a_run(tmp_path, Scripted("bad", code), Scripted("good", WRITES), variants=VARIANTS[:2]))
    for found in report["variants"].values():
        assert said in found["workloads"]["bad"][COLD]["error"] and found["workloads"]["good"][COLD]["p50"] == 0.2
    assert f"| no cache | cold | failed: {said}" in (tmp_path / "out" / "report.md").read_text()


def test_what_is_measured_is_kept_whatever_ends_the_run(
    tmp_path: Path, fake: type[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: FakeServer, prompt: str, max_tokens: int) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeServer, "complete", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_clients(a_run(tmp_path, Scripted(code=WRITES)))
    kept = json.loads((tmp_path / "out" / "data.json").read_text())
    assert kept["variants"][BASELINE]["workloads"]["scripted"][COLD]["p50"] == 0.2


def test_a_server_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = subprocess.Popen
    code = "import sys; print('no such model'); sys.exit(4)"
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: begun([sys.executable, "-c", code], **options))
    with pytest.raises(CuveeError, match=r"the server did not start; .*log ends with\nno such model"):
        Server(tmp_path / "log", tmp_path, ()).__enter__()


@pytest.mark.slow
def test_vllms_own_client_asks_a_real_server(tmp_path: Path) -> None:
    need_vllm()
    workload = PrefixRepetition(prefix=256, suffix=16, output=4, prefixes=2, prompts=4)
    sizes = ("--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory-bytes", str(64 << 20))
    with Server(
        tmp_path / "log", bundled_model_path(), (*sizes, *LOSSLESS.command(tmp_path / "store", None))
    ) as server:
        measured = run_module._run_workload(workload, COLD, server, tmp_path)
        assert "error" not in measured, measured
        assert len(measured["first_token_seconds"]) == 4 and 0 < measured["p50"] < measured["p99"]
        assert 4 * (256 + 16) <= measured["prompt_tokens"] < 5 * (256 + 16)
        assert measured["hit_rate"] > 0.4  # the second request of each prefix
        answer = server.complete("The harbour", 8)
        assert answer and answer == server.complete("The harbour", 8)
        disk = run_module._disk(tmp_path / "store", server.counters(), 100)
        assert disk["ratio"] > 1.2
        assert disk["bytes_per_1000_tokens"] >= 1000 * 100 / disk["ratio"]  # files have headers, too
        with pytest.raises(CuveeError, match="the server did not answer: HTTP Error 400"):
            server.complete("The harbour " * 600, 8)
    with pytest.raises(CuveeError, match="the server died with status"):
        server.counters()


def test_the_command_refuses_bad_input_before_it_starts_anything(tmp_path: Path) -> None:
    (tmp_path / "something").write_text("")
    for arguments, said in (
        (["--variant", "cuvee small"], "needs one of the model"),
        (["--workload", "none"], "must be one of"),
        (["--out", str(tmp_path)], "is not empty"),
    ):
        command = [sys.executable, "-m", "cuvee.eval.bench.clients", "--model", "m", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (1, "") and said in done.stderr and "Traceback" not in done.stderr
