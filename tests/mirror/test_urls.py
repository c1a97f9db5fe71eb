"""Datasets and exports at URLs: brought once by version, sent whole with the manifest last."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

pytest.importorskip("obstore", reason="needs the extra `mirror`")

from batch_trajectories.basics.bucket import Bucket
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.dataset.source import parse_source
from tests.helpers.running import SCRIPTED, ids, run
from tests.mirror.emulators import Emulated, needs_emulators
from tests.mirror.proxy import Fault

SECRET = "a-secret-of-the-bucket"


@pytest.fixture(autouse=True)
def session_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A credential that no message may show."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", SECRET)


def test_without_the_extra_a_dataset_at_a_url_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"s3://bucket/data.* pip install .*\[mirror\]"):
        parse_source(Path("s3://bucket/data/p.jsonl"))


def test_a_key_in_a_url_is_refused_and_not_shown(tmp_path: Path) -> None:
    url = "s3://key:pass-word@bucket/p.jsonl"
    for option in ("dataset_file", "mirror", "images"):
        done = run(tmp_path, "--dry_run", **{**SCRIPTED, option: url})
        assert done.returncode == 2
        assert f"--{option}: must be s3://BUCKET/PATH" in done.stderr
        assert "pass-word" not in done.stderr


def rows_of(*names: str) -> bytes:
    rows = [{"id": n, "prompt": f"Say {n}.", "script": [{"content": "Done."}]} for n in names]
    return b"".join(orjson.dumps(row) + b"\n" for row in rows)


def brought(bucket: Emulated, name: str) -> int:
    """How often an object has been read."""
    return sum(
        request.method == "GET" and request.path.endswith(name) for request in bucket.proxy.requests
    )


@pytest.mark.slow
@needs_emulators
def test_a_dataset_is_brought_once_by_version(bucket: Emulated, tmp_path: Path) -> None:
    """One that has changed is treated like a changed file."""
    objects = Bucket(f"{bucket.url}/data")
    objects.upload("a.jsonl", rows_of("a", "b"))
    objects.upload("more/c.jsonl.gz", gzip.compress(rows_of("c")))
    objects.upload("_notes.jsonl", b"no rows")
    given = {**SCRIPTED, "dataset_file": f"{bucket.url}/data"}
    shown = run(tmp_path, "look", f"{bucket.url}/data/a.jsonl")
    assert shown.returncode == 0, shown.stderr
    assert "Say a." in shown.stdout
    before = brought(bucket, "a.jsonl")
    for _ in range(2):
        done = run(tmp_path, **given)
        assert done.returncode == 0, done.stderr
        assert brought(bucket, "a.jsonl") == before + 1
    training = tmp_path / "trajectories/r.jsonl"
    assert ids(training) == ["a", "b", "c"]
    note = next((tmp_path / "trajectories/r").glob("dataset-*.json")).read_text()
    assert f"{bucket.url}/data" in note
    assert SECRET not in note

    objects.upload("a.jsonl", rows_of("a", "b", "d"))
    assert run(tmp_path, **given).returncode == 0
    assert ids(training) == ["a", "b", "d", "c"]
    objects.upload("a.jsonl", rows_of("a", "b", "d").replace(b"Say b.", b"Ask b."))
    assert run(tmp_path, **given).returncode == 0
    assert b"Ask b." in training.read_bytes()
    objects.upload("a.jsonl", rows_of("a"))
    refused = run(tmp_path, **given)
    assert refused.returncode == 2
    assert "dataset_file" in refused.stderr
    missing = run(tmp_path, **{**given, "dataset_file": f"{bucket.url}/other"})
    assert missing.returncode == 2
    assert "no such object" in missing.stderr
    bucket.proxy.fail(Fault("answers", 403, "AccessDenied"))
    stopped = run(tmp_path, **given)
    assert stopped.returncode == 4
    assert "403" in stopped.stderr


@pytest.mark.slow
@needs_emulators
def test_a_dataset_is_exported_to_a_url_with_its_manifest_last(
    bucket: Emulated, tmp_path: Path
) -> None:
    (tmp_path / "p.jsonl").write_bytes(rows_of("a", "b"))
    assert run(tmp_path, **SCRIPTED).returncode == 0
    url = f"{bucket.url}/sets/one"

    def exported(*more: str, **options: Any) -> str:
        done = run(tmp_path, "export", "r", *more, **options, output=url)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    assert f"{url}/openai/train.jsonl" in exported(format="openai,hermes")
    run(tmp_path, "export", "r", format="openai,hermes", output=str(tmp_path / "local"))
    local = {
        str(path.relative_to(tmp_path / "local")): path.read_bytes()
        for path in (tmp_path / "local").rglob("*")
        if path.is_file()
    }
    there = Bucket(url)
    assert {file.name: there.read(file.name) for file in there.list_files()} == local
    sent = [one.path for one in bucket.proxy.requests if one.method == "PUT"]
    assert sent[-1].endswith("manifest.json")
    assert "all files match" in exported("--check")

    assert "removed from" not in exported(format="openai")
    assert there.read("hermes/train.jsonl") == local["hermes/train.jsonl"]
    assert "all files match" in exported("--check")
    assert "removed from" in exported("--replace", format="openai")
    assert not [file for file in there.list_files() if file.name.startswith("hermes/")]
    Bucket(f"{bucket.url}/sets").upload("two/else.txt", b"")
    refused = run(tmp_path, "export", "r", format="openai", output=f"{bucket.url}/sets/two")
    assert refused.returncode == 2
    assert "holds else.txt but no dataset" in refused.stderr

    # What is cut off says that it is not finished, and the next export finishes it.
    bucket.proxy.fail(Fault("answers", 500, "InternalError", method="PUT", skips=2))
    cut_off = run(tmp_path, "export", "r", format="openai,hermes", output=url)
    assert cut_off.returncode == 4
    bucket.proxy.fail(None)
    manifest = there.read("manifest.json")
    assert manifest is not None
    assert orjson.loads(manifest)["unfinished"]
    assert "removed from" not in exported(format="openai,hermes")
    assert {file.name: there.read(file.name) for file in there.list_files()} == local
