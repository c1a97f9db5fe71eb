"""Emulators of S3 (moto) and Azure (Azurite), which `MIRROR_EMULATORS` names, behind a proxy.

A directory with `bin/python`, which has moto[server] and azure-storage-blob, and with
`node_modules/.bin/azurite-blob`; see .ci/run.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers.running import wait_until
from tests.mirror.proxy import Proxy, proxy_before, to_s3

EMULATORS = Path(os.environ.get("MIRROR_EMULATORS", ""))

needs_emulators = pytest.mark.skipif(
    not EMULATORS.is_absolute(), reason="MIRROR_EMULATORS names no emulators"
)

# The published account of the emulator.
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

_IN_S3 = (
    "import boto3, sys\nboto3.client('s3', endpoint_url=sys.argv[1]).create_bucket(Bucket='bucket')"
)
_IN_AZURE = (
    "import sys\nfrom azure.storage.blob import BlobServiceClient as C\n"
    "C(sys.argv[1] + '/devstoreaccount1', sys.argv[2]).create_container('bucket')"
)


class Emulated(NamedTuple):
    """An empty bucket of a running emulator."""

    url: str
    """A place in it."""
    proxy: Proxy


@contextmanager
def run_emulator(kind: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulated]:
    """A bucket of `s3`, `az` or `gs`; the environment has what leads to it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    python, endpoint = str(EMULATORS / "bin" / "python"), f"http://127.0.0.1:{port}"
    azurite = [str(EMULATORS / "node_modules" / ".bin" / "azurite-blob"), "--silent"]
    azurite += ["--blobPort", str(port), "--inMemoryPersistence", "--disableTelemetry"]
    moto = [python, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    line = [*azurite, "--skipApiVersionCheck"] if kind == "az" else moto
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with (place / "emulator.log").open("wb") as log:
        emulator = subprocess.Popen(line, cwd=place, stdout=log, stderr=log)
    try:
        wait_until(lambda: _listens(port))
        creating = _IN_AZURE if kind == "az" else _IN_S3
        subprocess.run([python, "-c", creating, endpoint, _KEY], check=True)
        with proxy_before(port, to_s3 if kind == "gs" else dict) as (proxy, front):
            _lead_to(f"http://127.0.0.1:{front}", monkeypatch)
            yield Emulated(f"{kind}://bucket/runs", proxy)
    finally:
        emulator.kill()
        emulator.wait()


def _lead_to(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of_google = {"gcs_base_url": endpoint, "disable_oauth": True}
    unused = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    variables = {
        "AWS_ENDPOINT_URL": endpoint,
        "AZURE_STORAGE_ACCOUNT_NAME": "devstoreaccount1",
        "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
        "AZURE_ENDPOINT": f"{endpoint}/devstoreaccount1",
        "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(of_google | unused),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True
