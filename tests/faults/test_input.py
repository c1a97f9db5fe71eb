"""What datasets hold, and what changes between one start and the next.

Each kind of bad row and file alone is in tests/dataset/test_dataset.py, a changed config in
tests/program/test_run.py.
"""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.faults.oracle import finished_lines, judge_run_dir, resume_and_judge
from tests.helpers.running import SCRIPTED, ids, run, write_rows

SAY = [{"content": "y"}]
SOUND: list[Any] = [
    {"prompt": "nul \0, separators \u2028 \u2029 \u0085, right to left \u202e", "script": SAY},
    {"prompt": "the same", "script": SAY},
    {"prompt": "the same", "script": SAY},
    {"id": "twice", "prompt": "a", "script": SAY},
    {"id": "twice", "prompt": "b", "script": SAY},
    {"prompt": [{"role": "user", "content": "chat"}], "script": SAY, "x": 2**63 - 1},
]
BAD = [
    b'{"prompt": NaN}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "a", "x": 1' + b"0" * 40 + b"}",
    b'{"prompt": "a", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b"\xff",
    b'{"prompt": ""}',
    b'{"prompt": 1}',
    b"{}",
    b"[]",
    b'{"prompt": "a"',
]


def write_all(path: Path) -> None:
    """Sound and bad rows in turn, the last without a newline."""
    lines = [orjson.dumps(row) for row in SOUND]
    mixed = [line for pair in zip(BAD, [*lines, *[b"  "] * 9], strict=False) for line in pair]
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join(mixed))


@pytest.mark.slow
def test_odd_rows_cost_only_themselves_and_every_reader_reads_the_rest(tmp_path: Path) -> None:
    write_all(tmp_path / "p.jsonl")
    done = run(tmp_path, **SCRIPTED)
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / "trajectories" / "r"
    judge_run_dir(run_dir, tasks=len(SOUND))
    for number in range(len(BAD)):
        assert f"p.jsonl:{2 * number + 1}: discarded: " in done.stderr
    for line in (tmp_path / "trajectories" / "r.jsonl").read_bytes().splitlines():
        assert orjson.loads(line) == json.loads(line)
    resume_and_judge(tmp_path, SCRIPTED, tasks=len(SOUND))


@pytest.mark.long
def test_a_dataset_that_was_edited_is_followed(tmp_path: Path) -> None:
    """Reordered, appended, edited, deleted: only what is new runs, nothing mixes."""
    rows = [{"id": f"p{n}", "prompt": "x", "script": SAY} for n in range(4)]
    write_rows(tmp_path / "p.jsonl", *rows)
    assert run(tmp_path, **SCRIPTED).returncode == 0
    run_dir = tmp_path / "trajectories" / "r"
    before = finished_lines(run_dir / "records.jsonl")
    edited = [rows[2], rows[0], {"id": "new", "prompt": "x", "script": SAY}]
    write_rows(tmp_path / "p.jsonl", *edited)
    assert run(tmp_path, **SCRIPTED).returncode == 0
    after = finished_lines(run_dir / "records.jsonl")
    assert after.keys() - before.keys() == {"new"}
    assert before.items() <= after.items()
    assert ids(tmp_path / "trajectories" / "r.jsonl") == ["p2", "p0", "new"]
    judge_run_dir(run_dir, tasks=5)


def test_a_run_of_another_version_is_refused(tmp_path: Path) -> None:
    """Another version's run is never misread and never mixed."""
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": SAY})
    assert run(tmp_path, **SCRIPTED).returncode == 0
    path = tmp_path / "trajectories" / "r" / "run.json"
    path.write_bytes(orjson.dumps({**orjson.loads(path.read_bytes()), "schema_version": 99}))
    for args in ([], ["verify", "r"]):
        refused = run(tmp_path, *args, **({} if args else SCRIPTED))
        assert refused.returncode == 2
        assert "written by another version of this program (schema 99" in refused.stderr


@pytest.mark.parametrize("content", [b'{"config": 5}', b"[]", b'{"schema_version": null}'])
def test_a_run_json_of_another_program_is_said_to_be_one(tmp_path: Path, content: bytes) -> None:
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": SAY})
    path = tmp_path / "trajectories" / "r" / "run.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    refused = run(tmp_path, **SCRIPTED)
    assert refused.returncode == 2
    assert (
        "r/run.json: not written by this program (it has no `schema_version`); restore it from a "
        "copy, or start over with --fresh" in refused.stderr
    )


@pytest.mark.long
def test_a_huge_line_and_many_rows_take_limited_memory(tmp_path: Path) -> None:
    """A line has 100 MB, and there are half a million rows."""
    with (tmp_path / "p.jsonl").open("wb") as file:
        file.write(b'{"prompt": "' + b"x" * (100 << 20) + b'"}\n')
        file.writelines(b'{"prompt": "%d"}\n' % n for n in range(500_000))
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, before[1]))
    try:
        checked = run(
            tmp_path, "--dry_run", **{**SCRIPTED, "model": "m"}, base_url="http://127.0.0.1:9/v1"
        )
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert checked.returncode == 0, checked.stderr
    assert "500001 usable rows" in checked.stdout
