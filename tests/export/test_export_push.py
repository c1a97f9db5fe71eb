"""A dataset sent to a hub: a loopback server that answers as the real one does."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.export.test_export_dataset import EARLY
from tests.helpers.answering import Handler, listening
from tests.helpers.exporting import call_record, make_run
from tests.helpers.running import run

pytest.importorskip("huggingface_hub")


@contextmanager
def hub(
    *, status: int = 200, files: Sequence[str] = ()
) -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """The address of a hub whose repository has `files`, and what it was sent: paths and bodies."""
    received: list[tuple[str, bytes]] = []

    class Hub(Handler):
        def do_GET(self) -> None:
            body = self.body()
            received.append((self.path, body))
            self.send(status, json.dumps(self._answer(body)).encode())

        do_POST = do_GET

        def do_HEAD(self) -> None:
            is_there = any(self.path.endswith(f"/{name}") for name in files)
            error = {} if is_there else {"X-Error-Code": "EntryNotFound"}
            headers: dict[str, Any] = {"etag": "1" * 40, "x-repo-commit": "1" * 40, **error}
            self.send(200 if is_there else 404, **headers)

        def _answer(self, body: bytes) -> Any:
            if "/tree/" in self.path:
                return [{"type": "file", "path": f, "oid": "1" * 40, "size": 1} for f in files]
            if "preupload" in self.path:
                told = {"uploadMode": "regular", "shouldIgnore": False}
                return {"files": [{"path": f["path"], **told} for f in json.loads(body)["files"]]}
            url = "http://127.0.0.1/datasets/me/mine"
            commit = {"commitUrl": f"{url}/commit/1", "commitOid": "1" * 40, "success": True}
            return {"url": url, "errors": [], "warnings": [], **commit}

    with listening(Hub) as url:
        yield url, received


def push(folder: Path, address: str) -> Any:
    source = make_run(folder, call_record(), EARLY)
    env = {
        "HF_ENDPOINT": address,
        "HF_TOKEN": "hf_of_a_test",
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    options = {"format": "openai", "push_to_hub": "me/mine"}
    return run(folder, "export", source.run_dir, "--push_for_real", env=env, **options)


def test_sends_what_was_shown_to_a_private_repository(tmp_path: Path) -> None:
    with hub() as (address, received):
        done = push(tmp_path, address)
    assert done.returncode == 0, done.stderr
    assert "commit/1" in done.stdout
    created = json.loads(dict(received)["/api/repos/create"])
    assert (created["type"], created["visibility"]) == ("dataset", "private")
    (commit,) = [body for path, body in received if "/commit/" in path]
    files = [json.loads(line)["value"] for line in commit.splitlines()[1:]]
    assert [file["path"] for file in files] == ["README.md", "manifest.json", "openai/train.jsonl"]
    dataset = tmp_path / "r" / "exports" / "dataset"
    for file in files:
        assert base64.b64decode(file["content"]) == (dataset / file["path"]).read_bytes()


def test_a_refusal_of_the_hub_is_an_error(tmp_path: Path) -> None:
    with hub(status=401) as (address, _):
        done = push(tmp_path, address)
    assert (done.returncode, "the hub refused" in done.stderr) == (4, True)
    assert "Traceback" not in done.stderr


@pytest.mark.long  # the library tries again for some seconds
def test_an_unreachable_hub_is_an_error(tmp_path: Path) -> None:
    with hub() as (address, _):
        pass
    done = push(tmp_path, address)
    assert (done.returncode, "cannot reach the hub" in done.stderr) == (4, True)
    assert "Traceback" not in done.stderr
