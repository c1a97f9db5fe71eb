"""An image that was cut short is no verdict on its tasks, and no data."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.audit.planting import Images, audit, found, swe_row, verdicts
from tests.helpers.running import lines, run, write_rows
from tests.images.test_task_runs import IN_IMAGES, script_of

pytestmark = pytest.mark.slow


def test_a_cut_layer_is_named_and_its_tasks_are_judged_only_once_it_is_whole(
    tmp_path: Path, task_images: Images
) -> None:
    images = tmp_path / "images"
    shutil.copytree(task_images.directory, images, ignore=shutil.ignore_patterns(".*"))
    others = {path.name for path in images.glob("*/blobs/sha256/*") if "copy/" not in str(path)}
    own = [path for path in images.glob("copy/blobs/sha256/*") if path.name not in others]
    layer = max(own, key=lambda path: path.stat().st_size)
    whole = layer.read_bytes()
    layer.write_bytes(whole[: len(whole) // 2])
    rows = [
        swe_row("swe-bench", "whole", task_images, script=script_of("true")),
        swe_row("swe-bench", "cut", task_images, image_name="copy:1", script=script_of("true")),
    ]
    write_rows(tmp_path / "p.jsonl", *rows)
    options = {"rows": "swe-bench", "images": images, "sandbox": "bwrap", "repeats": 2}

    assert audit(tmp_path, **options)[0] == 1
    assert verdicts(tmp_path) == {"whole": "sound", "cut": "setup_fails"}
    assert f"{layer.name} is damaged" in found(tmp_path)["cut"]["why"]

    kinds = (Path("configs/rows") / "swe-bench.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(kinds.replace("keep: [", "keep: [script, "))
    done = run(tmp_path, "--row_setup", **{**IN_IMAGES, "images": images, "rows": "mine.yaml"})
    assert done.returncode == 1, done.stderr
    run_dir = tmp_path / "trajectories/r"
    assert [record["id"] for record in lines(run_dir / "records.jsonl")] == ["whole"]
    (failure,) = lines(run_dir / "failures.jsonl")
    assert (failure["id"], failure["class"]) == ("cut", "setup_failed")
    assert f"{layer.name} is damaged" in failure["message"]

    layer.write_bytes(whole)
    assert audit(tmp_path, "--fresh", **options)[0] == 1
    assert verdicts(tmp_path) == {"whole": "sound", "cut": "leaks_fix"}
