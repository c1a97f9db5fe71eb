"""Images in a bucket: brought once by version to the user's cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore", reason="needs the extra `mirror`")

from batch_trajectories.basics.bucket import Bucket
from tests.helpers.running import records_by_id, run, write_rows
from tests.images.test_image_runs import OPTIONS, row, terminal
from tests.mirror.emulators import needs_emulators, run_emulator

pytestmark = [pytest.mark.slow, needs_emulators]


@pytest.mark.parametrize("kind", ["s3", "az"])
def test_a_run_works_in_images_of_a_bucket(
    kind: str, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_rows(tmp_path / "p.jsonl", row("a", "shell:1", terminal("cat sum.sh")))
    with run_emulator(kind, tmp_path, monkeypatch) as bucket:
        url = f"{bucket.url}/images"
        objects = Bucket(url, of_files=True)
        layout = [path for path in (images / "shell").rglob("*") if path.is_file()]
        for path in layout:
            objects.upload(f"shell/{path.relative_to(images / 'shell')}", path)
        options: dict[str, Any] = {**OPTIONS, "images": url}
        done = run(tmp_path, **options)
        assert done.returncode == 0, done.stderr
        assert "echo" in str(records_by_id(tmp_path)["a"]["messages"])

        def read() -> int:
            return sum("blobs" in one.path and one.method == "GET" for one in bucket.proxy.requests)

        before = read()
        assert before
        more = row("b", "shell:1", terminal("cat sum.sh"))
        write_rows(tmp_path / "p.jsonl", row("a", "shell:1", terminal("cat sum.sh")), more)
        assert run(tmp_path, **options).returncode == 0
        assert read() == before

        # An image that is gone from the bucket is gone here.
        objects.remove([file.name for file in objects.list_files()])
        objects.upload("other.txt", b"")
        gone = run(tmp_path, "--dry_run", **options)
        assert gone.returncode == 2
        assert "holds no image" in gone.stderr
