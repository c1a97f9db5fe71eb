"""The same conversations give the same bytes in every format, however they came about."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.fake_endpoint import FakeEndpoint
from tests.helpers.running import WRITE_A_NOTE, kill_repeatedly, lines, run, write_rows
from tests.program.test_run import options

FORMATS = "hermes,llamafactory,openai,atif,dpo,kto,parquet"


@pytest.mark.slow
@pytest.mark.long
def test_workers_kills_and_resumes_leave_no_trace(tmp_path: Path) -> None:
    """Samples are judged by their row, so that pairs and labels are made too."""
    collected = []
    with FakeEndpoint(turns=3, latency_s=0.05, reasoning_chars=40, **WRITE_A_NOTE) as endpoint:
        for name, workers in (("one", 1), ("four", 4)):
            collected.append(export_hashes(finish(tmp_path / name, endpoint, workers)))
        for attempt in range(3):
            folder = prepare(tmp_path / f"killed{attempt}")
            kill_repeatedly(folder, run_options(endpoint, 2), endpoint, [9, 9])
            run(folder, **run_options(endpoint, 2))
            records = lines(folder / "trajectories" / "r" / "records.jsonl")
            resumes = [resume for record in records for resume in record["resumes"]]
            # A call that was cut off is told as such: another conversation, not another export.
            if resumes and not any(resume["interrupted"] for resume in resumes):
                break
        collected.append(export_hashes(folder))
    assert collected[0] == collected[1] == collected[2]
    made = {path.split("/")[0] for path in collected[0]}
    assert {"hermes", "openai_parquet", "llamafactory_parquet", "atif", "kto"} <= made


def run_options(endpoint: FakeEndpoint, workers: int) -> dict[str, Any]:
    return options(endpoint, num_workers=workers, num_samples=2, config="c.yaml")


def prepare(folder: Path) -> Path:
    folder.mkdir()
    rows = [{"id": f"p{n}", "prompt": f"Question {n}", "expected": "Answer"} for n in range(8)]
    write_rows(folder / "p.jsonl", *rows)
    (folder / "c.yaml").write_text("check_expected: true\n")
    return folder


def finish(folder: Path, endpoint: FakeEndpoint, workers: int) -> Path:
    done = run(prepare(folder), **run_options(endpoint, workers))
    assert done.returncode == 0, done.stderr
    return folder


def export_hashes(folder: Path) -> dict[str, str]:
    """A hash of each file of a dataset, that of atif without its times."""
    run_dir = folder / "trajectories" / "r"
    recipe = folder / "recipe.yaml"
    recipe.write_text("filters: {status: any}\n")
    flags: dict[str, Any] = {"format": FORMATS, "recipe": recipe, "splits": "a=0.5,b=0.5"}
    done = run(folder, "export", str(run_dir), **flags)
    assert done.returncode == 0, done.stderr
    directory = run_dir / "exports" / "dataset"
    hashes = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and name != "manifest.json":
            content = path.read_bytes()
            if name.startswith("atif/"):
                content = json.dumps([_timeless(row) for row in lines(path)]).encode()
            hashes[name] = hashlib.sha256(content).hexdigest()
    return hashes


def _timeless(row: dict[str, Any]) -> dict[str, Any]:
    for step in row["steps"]:
        step.pop("timestamp", None)
    return row
