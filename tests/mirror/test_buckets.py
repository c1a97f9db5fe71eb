"""Mirrors in emulators of buckets; see `emulators`."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="needs the extra `mirror`")

from batch_trajectories.basics.bucket import Bucket, BucketFailed
from batch_trajectories.basics.errors import RunLocked
from batch_trajectories.mirror.copies import update_copy
from tests.mirror.emulators import Emulated, needs_emulators
from tests.mirror.proxy import Fault
from tests.mirror.test_lease import LINE, a_run, an_empty_run, content_of, open_mirror

pytestmark = [pytest.mark.slow, needs_emulators]


@pytest.fixture
def bucket_url(bucket: Emulated) -> str:
    return bucket.url


def test_a_bucket_keeps_a_run_and_has_one_writer(bucket_url: str, tmp_path: Path) -> None:
    run_dir = a_run(tmp_path / "a")
    first = open_mirror(bucket_url, run_dir)
    second = open_mirror(bucket_url, an_empty_run(tmp_path / "b"))
    with pytest.raises(RunLocked, match="has taken over this run"):
        first.close()
    with (tmp_path / "b/r/records.jsonl").open("ab") as file:
        file.write(LINE)
    second.close()
    expected = content_of(run_dir) | {"records.jsonl": LINE * 2}
    assert content_of(update_copy(f"{bucket_url}/r")) == expected
    open_mirror(bucket_url, tmp_path / "b/r").close()
    assert content_of(update_copy(f"{bucket_url}/r")) == expected


def test_a_bucket_that_is_not_there_is_named(bucket_url: str) -> None:
    missing = bucket_url.replace("bucket", "nobucket")
    with pytest.raises(BucketFailed, match=missing):
        Bucket(missing).create("parts/1", b"")


def test_a_conflict_is_no_other_start(bucket: Emulated, tmp_path: Path) -> None:
    """S3 answers so to two writes at once, and Azure where a container is being removed."""
    mirror = open_mirror(bucket.url, a_run(tmp_path))
    bucket.proxy.fail(Fault("answers", 409, "ConditionalRequestConflict", method="PUT"))
    with pytest.raises(BucketFailed, match="there is no such object"):
        Bucket(bucket.url).create("r/parts/000000000009", LINE)
    bucket.proxy.fail(None)
    mirror.close()
