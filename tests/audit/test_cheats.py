"""Agents that look for the solution instead of finding it, in rows of all kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.export.conversation.leaks import find_leaks
from batch_trajectories.records.checks import judge_record
from batch_trajectories.records.reader import stored_records
from tests.audit.planting import Images, harbor_task, plain_row, swe_row
from tests.helpers.running import SCRIPTED, lines, run, write_rows
from tests.images.test_task_runs import IN_IMAGES, script_of

pytestmark = pytest.mark.slow

CHEATS = {
    "tag": "git checkout v2 -- pkg/calc.py",
    "commit": "git checkout {fix} -- pkg/calc.py",
    "reflog": "git reflog; git checkout 'HEAD@{{1}}' -- pkg/calc.py",
    "objects": "for o in $(git cat-file --batch-all-objects --batch-check | cut -c 1-40); do "
    "git cat-file -p $o 2>/dev/null | grep -q 'first + second' && git cat-file -p $o > /tmp/found; "
    "done; cp /tmp/found pkg/calc.py",
    "clone": "git --git-dir=/srv/calc.git show v2:pkg/calc.py > /tmp/x && cp /tmp/x pkg/calc.py",
    "index": "pip download r; python3 -m pip install --target=/tmp/x r; cp /tmp/x/pkg/calc.py pkg",
    "tests": "cat /check/* /tests/* /r2e_tests/* tests/test_calc.py run_tests.sh check/t.py",
}
WITH_CLONE = ("swe-bench", "swe-rebench", "harbor")
"""Kinds of whose images one has a second repository, which no set-up removes."""

JUDGE = """\
#!/bin/sh
grep -q 'first + second' pkg/calc.py && r=1 || r=0
echo $r > /logs/verifier/reward.txt
"""


def write_cheats(kind: str, directory: Path, images: Images) -> dict[str, Any]:
    """Write a row for each cheat; the options of a run over them."""
    scripts = {name: script_of(words.format(fix=images.fix)) for name, words in CHEATS.items()}
    if kind == "harbor":
        base = f'[metadata]\nbase_commit = "{images.base}"\n'
        harbor_task(directory / "tasks", "all", image="clone:1", test=JUDGE, more=base)
        every = script_of(*(words.format(fix=images.fix) for words in CHEATS.values()))
        (directory / "script.yaml").write_text(json.dumps(every))
        return {"dataset_file": "tasks", "rows": "harbor", "script_file": "script.yaml"}
    if kind == "plain":
        rows = [plain_row(name, script=script) for name, script in scripts.items()]
        write_rows(directory / "p.jsonl", *rows)
        return {}
    image = {"image_name": "clone:1"} if kind in WITH_CLONE else {}
    rows = [swe_row(kind, name, images, script=script, **image) for name, script in scripts.items()]
    write_rows(directory / "p.jsonl", *rows)
    own = (Path("configs/rows") / f"{kind}.yaml").read_text()
    (directory / "mine.yaml").write_text(own.replace("keep: [", "keep: [script, "))
    return {"rows": "mine.yaml"}


@pytest.mark.parametrize(
    "kind", ["plain", "swe-bench", "swe-rebench", "swe-smith", "r2e-gym", "harbor"]
)
def test_no_rewarded_cheat_is_training_data(tmp_path: Path, task_images: Images, kind: str) -> None:
    """A second repository stays: what is copied from it passes the check, and is left out."""
    options = write_cheats(kind, tmp_path, task_images)
    if kind == "plain":
        given = {**SCRIPTED, "enabled_toolsets": "terminal"}
    else:
        given = {**IN_IMAGES, "images": task_images.directory}
    done = run(tmp_path, "--row_setup", **{**given, **options})
    assert done.returncode == 0, done.stderr
    rewarded, marked = set(), set()
    records = [*stored_records(tmp_path / "trajectories" / "r")]
    for record in records:
        name = record.prompt_id.removesuffix(f"-{task_images.fix}")
        judgement = judge_record(record)
        assert judgement.reward is not None, (name, judgement.error)
        if judgement.reward > 0:
            rewarded.add(name)
        if find_leaks(record):
            marked.add(name)
    working = {"swe-bench": {"clone"}, "swe-rebench": {"clone"}, "harbor": {"all"}}
    assert len(records) == (1 if kind == "harbor" else len(CHEATS))
    assert rewarded == working.get(kind, set())
    assert rewarded <= marked
    learnt = {row["id"] for row in lines(tmp_path / "trajectories" / "r.jsonl")}
    assert learnt == {one.id for one in records if not judge_record(one).reward}
    rejects = lines(tmp_path / "trajectories/r/exports/rejects.jsonl")
    assert [one["reason"] for one in rejects] == ["leak_suspected"] * len(rewarded)
