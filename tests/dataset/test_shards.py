"""`--shard`: jobs that know nothing of each other split a dataset, and `merge` makes it whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest

from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.dataset.scan import Scan, scan, tasks
from batch_trajectories.dataset.shards import Shard, parse_shard
from batch_trajectories.maintenance.merge import common_config
from tests.faults.oracle import judge_run_dir, resume_and_judge
from tests.helpers.running import SCRIPTED, run, write_rows

SHARDS = 3


def dataset() -> list[Any]:
    """Own ids, rows without any, repeated ones, and two that cannot be used."""
    script = [{"content": "y"}]
    own = [{"id": f"p{n}", "prompt": f"q{n}", "script": script} for n in range(10)]
    plain = [{"prompt": f"r{n}", "script": script} for n in range(5)]
    return [*own[:5], {"prompt": 3}, *plain, *own[3:], plain[1], {"id": "bad"}]


def shard_options(name: str, shard: int | None = None, **more: Any) -> dict[str, Any]:
    only = {} if shard is None else {"shard": f"{shard}/{SHARDS}"}
    return {**SCRIPTED, "run_name": name, "num_samples": 2, **only, **more}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs whole (all of the dataset) and s0, s1, s2 (its shards)."""
    cwd = tmp_path_factory.mktemp("parts")
    write_rows(cwd / "p.jsonl", *dataset())
    assert run(cwd, **shard_options("whole")).returncode == 0
    for shard in range(SHARDS):
        done = run(cwd, **shard_options(f"s{shard}", shard))
        assert done.returncode == 0, done.stderr
    return cwd


@pytest.fixture
def cwd(parts: Path, tmp_path: Path) -> Path:
    shutil.copytree(parts, tmp_path, dirs_exist_ok=True)
    return tmp_path


class TestWhichShard:
    def scans(self, path: Path, count: int, **more: Any) -> list[Scan]:
        more = {"max_samples": None, **more}
        return [scan(path, **more, shard=Shard(index, count)) for index in range(count)]

    def test_every_task_and_bad_row_is_in_exactly_one(self, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "p.jsonl", *dataset())
        whole = scan(path, max_samples=None, num_samples=2)
        expected = sorted(task.id for task in tasks(whole))
        for count in (2, 3, 7, 50):
            parts = self.scans(path, count, num_samples=2)
            found = [task.id for part in parts for task in tasks(part)]
            assert sorted(found) == expected
            assert sum(part.rows for part in parts) == whole.rows
            bad = [row.line for part in parts for row in part.bad_rows]
            assert sorted(bad) == [row.line for row in whole.bad_rows]
            assert {part.sha256 for part in parts} == {whole.sha256}

    def test_the_samples_of_a_prompt_and_rows_that_repeat_it_are_together(
        self, tmp_path: Path
    ) -> None:
        path = write_rows(tmp_path / "p.jsonl", *dataset())
        holders: dict[str, set[int]] = {}
        for index, part in enumerate(self.scans(path, SHARDS, num_samples=3)):
            for task in tasks(part):
                holders.setdefault(task.id.partition("#")[0], set()).add(index)
        assert all(len(found) == 1 for found in holders.values())

    def test_rows_that_are_added_move_no_other(self, tmp_path: Path) -> None:
        before = write_rows(tmp_path / "a.jsonl", *dataset())
        more = [{"id": f"new{n}", "prompt": "x"} for n in range(20)]
        after = write_rows(tmp_path / "b.jsonl", *more, *dataset())
        for old, new in zip(self.scans(before, 4), self.scans(after, 4), strict=True):
            then, now = ({t.key for t in tasks(s)} for s in (old, new))
            assert then <= now

    def test_max_samples_limits_the_dataset_and_not_each_shard(self, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "p.jsonl", *dataset())
        first = {task.id for task in tasks(scan(path, max_samples=6))}
        parts = self.scans(path, SHARDS, max_samples=6)
        assert {task.id for part in parts for task in tasks(part)} == first

    def test_shards_are_of_about_one_size(self, tmp_path: Path) -> None:
        rows = [{"id": f"p{n}", "prompt": "x"} for n in range(4000)]
        parts = self.scans(write_rows(tmp_path / "p.jsonl", *rows), 8)
        assert all(430 < part.rows < 570 for part in parts)

    @pytest.mark.parametrize("text", ["3/3", "8", "-1/3", "1/0", "a/b", "0/1000000"])
    def test_an_invalid_shard_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match=text):
            parse_shard(text)


def test_a_shard_counts_only_its_own_tasks(cwd: Path) -> None:
    counted = {"tasks": 0, "discarded": 0}
    for shard in range(SHARDS):
        run_dir = cwd / "trajectories" / f"s{shard}"
        summary = json.loads((run_dir / "summary.json").read_text())
        assert summary["shard"] == f"{shard}/{SHARDS}"
        assert summary["pending"] == summary["failed"] == summary["gone"] == 0
        judge_run_dir(run_dir, tasks=summary["done"])
        for key in counted:
            counted[key] += summary[key]
    whole = json.loads((cwd / "trajectories" / "whole" / "summary.json").read_text())
    assert counted == {key: whole[key] for key in counted}
    assert whole["discarded"] == 4
    assert whole["shard"] is None
    assert f"(shard 1/{SHARDS} of the dataset)" in run(cwd, "status", "s1").stdout


def test_a_run_keeps_to_its_shard(cwd: Path) -> None:
    for name, shard, message in (
        ("s1", 2, "this run is for shard 1/3, now shard 2/3 is"),
        ("whole", 0, "this run is for the whole dataset, now shard 0/3 is"),
    ):
        refused = run(cwd, **shard_options(name, shard))
        assert refused.returncode == 2
        assert message in refused.stderr
    refused = run(cwd, **shard_options("new", shard=SHARDS))
    assert refused.returncode == 2
    assert "shards are numbered from 0 to n-1" in refused.stderr


def test_merged_shards_are_the_run_of_the_whole(cwd: Path) -> None:
    merged = run(cwd, "merge", "s2", "s0", "s1", into="m")
    assert merged.returncode == 0, merged.stderr
    for file in ("whole.jsonl", "whole/exports/partial.jsonl", "whole/exports/rejects.jsonl"):
        twin = file.replace("whole", "m")
        path = cwd / "trajectories"
        assert (path / file).read_bytes() == (path / twin).read_bytes()
    tasks_of_all = json.loads((cwd / "trajectories/whole/summary.json").read_text())["done"]
    identity = json.loads((cwd / "trajectories" / "m" / "run.json").read_text())
    assert identity["config"]["shard"] is None
    assert identity["digest"] == run_json(cwd, "whole")["digest"] == run_json(cwd, "s1")["digest"]
    resume_and_judge(cwd, shard_options("m"), tasks=tasks_of_all)


@pytest.mark.slow
def test_shards_that_make_no_whole_are_refused(cwd: Path) -> None:
    shutil.copytree(cwd / "trajectories" / "s0", cwd / "trajectories" / "twin")
    other = run_json(cwd, "s1") | {"digest": "0" * 16, "meaning": {"seed": 9}}
    put_run_json(cwd, "other", other)
    edited = run_json(cwd, "s1")
    edited["dataset"]["sha256"] = "0" * 64
    put_run_json(cwd, "edited", edited)
    halves = run_json(cwd, "s1")
    halves["config"]["shard"] = "1/2"
    put_run_json(cwd, "halves", halves)
    for names, message in (
        (["s0", "s2"], "1 of 3 shards are missing: 1/3; name their runs too"),
        (["s0", "s1", "s2", "twin"], "s0 and {place}/twin are both shard 0/3; merge one of them"),
        (["s0", "other", "s2"], "other: its config differs"),
        (["s0", "edited", "s2"], "edited: its dataset has other rows"),
        (["s0", "halves", "s2"], "halves is shard 1/2 but {place}/s0 one of 3"),
        (["s0", "whole"], "whole is not a shard but others are"),
    ):
        place = cwd / "trajectories"
        found = [(place / name, run_json(cwd, name)) for name in names]
        with pytest.raises(ConfigError) as refused:
            common_config(found, run_name="m", output_dir=place, dataset_file=None)
        assert message.format(place=place) in str(refused.value)


@pytest.mark.slow
def test_a_shard_that_is_missing_is_named(cwd: Path) -> None:
    refused = run(cwd, "merge", "s0", into="m")
    assert refused.returncode == 2
    assert "2 of 3 shards are missing: 1/3, 2/3" in refused.stderr
    assert not (cwd / "trajectories" / "m").exists()


@pytest.mark.slow
def test_a_gap_that_is_wanted_is_work_for_the_merged_run(cwd: Path) -> None:
    merged = run(cwd, "merge", "s0", "s2", "--allow_gaps", into="m")
    assert merged.returncode == 0, merged.stderr
    whole = json.loads((cwd / "trajectories" / "whole" / "summary.json").read_text())
    resume_and_judge(cwd, shard_options("m"), tasks=whole["done"])
    training = (cwd / "trajectories" / "m.jsonl").read_bytes()
    assert training == (cwd / "trajectories" / "whole.jsonl").read_bytes()


@pytest.mark.slow
def test_a_shard_without_rows_is_complete(tmp_path: Path) -> None:
    rows = [{"id": "p", "prompt": "x", "script": [{"content": "y"}]}]
    write_rows(tmp_path / "p.jsonl", *rows)
    done = [run(tmp_path, **shard_options(f"e{n}", shard=n)) for n in range(SHARDS)]
    assert [one.returncode for one in done] == [0] * SHARDS
    assert sum("0 prompts x 2 = 0 tasks" in one.stdout for one in done) == SHARDS - 1


def run_json(cwd: Path, name: str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads((cwd / "trajectories" / name / "run.json").read_text())
    parsed.pop("crc32", None)
    return parsed


def put_run_json(cwd: Path, name: str, content: dict[str, Any]) -> None:
    """A copy of s1 that says other things of itself."""
    shutil.copytree(cwd / "trajectories" / "s1", cwd / "trajectories" / name)
    (cwd / "trajectories" / name / "run.json").write_bytes(orjson.dumps(content))
