"""Mirrors in emulators of S3 (moto) and Azure (Azurite), which `MIRROR_EMULATORS` names.

A directory with `bin/python`, which has moto[server] and azure-storage-blob, and with
`node_modules/.bin/azurite-blob`; see .ci/run.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="needs the extra `mirror`")

from batch_trajectories.basics.errors import RunLocked
from batch_trajectories.runs.mirror.bucket import Bucket, BucketFailed
from batch_trajectories.runs.mirror.copies import copy_of
from tests.mirror.test_lease import LINE, a_run, an_empty_run, content_of, mirrored
from tests.running import wait_until

EMULATORS = Path(os.environ.get("MIRROR_EMULATORS", ""))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not EMULATORS.is_absolute(), reason="MIRROR_EMULATORS names no emulators"),
]

# The published account of the emulator.
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

_CREATE = {
    "s3": "import boto3; boto3.client('s3').create_bucket(Bucket='bucket')",
    "az": "import os\nfrom azure.storage.blob import BlobServiceClient as C\n"
    "C(os.environ['AZURE_ENDPOINT'], os.environ['AZURE_STORAGE_ACCOUNT_KEY'])"
    ".create_container('bucket')",
}


@pytest.fixture(params=["s3", "az"])
def bucket_url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """An empty bucket of a running emulator."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    python, endpoint = str(EMULATORS / "bin" / "python"), f"http://127.0.0.1:{port}"
    variables = {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AZURE_STORAGE_ACCOUNT_NAME": "devstoreaccount1",
        "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
        "AZURE_ENDPOINT": f"{endpoint}/devstoreaccount1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    azurite = [str(EMULATORS / "node_modules" / ".bin" / "azurite-blob"), "--silent"]
    azurite += ["--blobPort", str(port), "--inMemoryPersistence", "--disableTelemetry"]
    line = {
        "s3": [python, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        "az": [*azurite, "--skipApiVersionCheck"],
    }[request.param]
    with (tmp_path / "emulator.log").open("wb") as log:
        emulator = subprocess.Popen(line, cwd=tmp_path, stdout=log, stderr=log)
    try:
        wait_until(lambda: _listens(port))
        subprocess.run([python, "-c", _CREATE[request.param]], check=True)
        yield f"{request.param}://bucket/runs"
    finally:
        emulator.kill()
        emulator.wait()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_bucket_keeps_a_run_and_has_one_writer(bucket_url: str, tmp_path: Path) -> None:
    run_dir = a_run(tmp_path / "a")
    first = mirrored(bucket_url, run_dir)
    second = mirrored(bucket_url, an_empty_run(tmp_path / "b"))
    with pytest.raises(RunLocked, match="has taken over this run"):
        first.close()
    with (tmp_path / "b/r/records.jsonl").open("ab") as file:
        file.write(LINE)
    second.close()
    expected = content_of(run_dir) | {"records.jsonl": LINE * 2}
    assert content_of(copy_of(f"{bucket_url}/r")) == expected
    mirrored(bucket_url, tmp_path / "b/r").close()
    assert content_of(copy_of(f"{bucket_url}/r")) == expected


def test_a_bucket_that_is_not_there_is_named(bucket_url: str) -> None:
    missing = bucket_url.replace("bucket", "nobucket")
    with pytest.raises(BucketFailed, match=missing):
        Bucket(missing).create("parts/1", b"")
