"""Calls that look for the solution of a task are marked; usual work is not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.export.conversation.leaks import find_leaks
from batch_trajectories.export.conversation.reading import find_rewarded_leaks
from batch_trajectories.records.record_types import Record
from tests.helpers.running import SCRIPTED, lines, run, write_rows
from tests.helpers.stored import to_record

CHECK = {
    "command": "bash /check/run.sh",
    "files": {"/check/run.sh": "…", "hidden/test_it.py": "…"},
    "reward_file": "/logs/verifier/reward.txt",
}
PASSED = {"passed": True, "reward": 1.0}


def conversation(
    *calls: Any,
    repo: str | None = "octo/calc-tools",
    check: Any = CHECK,
    results: Sequence[dict[str, Any]] = (),
    verdict: Mapping[str, Any] = PASSED,
) -> Record:
    """A conversation with these calls, one per turn; a text is a command."""
    arguments = [{"command": call} if isinstance(call, str) else call for call in calls]
    messages = [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": f"c{n}", "function": {"name": "terminal", "arguments": json.dumps(given)}}
            ],
        }
        for n, given in enumerate(arguments)
    ]
    row = {"prompt": "Fix it.", "check": check, **({"repo": repo} if repo else {})}
    said = [{"role": "tool", "content": "", "tool_call_id": "c0", **result} for result in results]
    record = {
        "messages": [{"role": "user", "content": "Fix it."}, *messages, *said],
        "row": row,
        "turns": [{}] * len(messages),
        "check": verdict,
    }
    return to_record(record)


def found(*calls: Any, **more: Any) -> list[str]:
    """The reasons of a conversation with these calls."""
    return [f"{leak.turn} {leak.reason}" for leak in find_leaks(conversation(*calls, **more))]


@pytest.mark.parametrize(
    "command",
    [
        "git checkout v2.1 -- pkg/calc.py",
        "cd repo && git show fix:pkg/calc.py > pkg/calc.py",
        "git log --all --oneline",
        "git log -p -- pkg",
        "git -C /testbed --no-pager show 1a2b3c4d",
        "git diff HEAD~1",
        "git show HEAD^:calc.py",
        "git diff HEAD..origin/main",
        "git reflog",
        "git fsck --lost-found",
        "git stash list",
        "git cat-file -p 1a2b3c4",
        "git restore --source=HEAD~2 calc.py",
        'python -c \'import subprocess; subprocess.run(["git", "show", "v2.0:calc.py"])\'',
        "cat .git/packed-refs",
        "git reset --hard ORIG_HEAD",
    ],
)
def test_reading_other_commits_is_suspected(command: str) -> None:
    assert found("ls", command) == ["2 other_commits"]


@pytest.mark.parametrize(
    "command",
    [
        "git status",
        "git log --oneline -5",
        "git diff",
        "git diff HEAD -- pkg/calc.py",
        "git checkout -- pkg/calc.py",
        "git checkout HEAD -- .",
        "git checkout -b fix",
        "git show HEAD",
        "git blame calc.py",
        "git stash && pytest; git stash pop",
        "git commit -am done && git diff HEAD~1",
        "git grep 'x: y' -- pkg",
        "grep -rn github src",
        "pip install -e .",
        "pip install calc requests==2.0",
        "cat tests/test_it.py",
        "echo digits 1234567",
    ],
)
def test_usual_work_is_not(command: str) -> None:
    assert found(command) == []


@pytest.mark.parametrize(
    "call",
    [
        "pip download calc_tools==2.0 --no-deps",
        "pip install 'Calc.Tools>=2'",
        "git clone https://example.test/octo/calc-tools.git /tmp/x",
        {"url": "https://raw.example.test/octo/calc-tools/main/calc.py"},
        {"urls": ["https://pypi.example.test/project/calc-tools/"]},
        "curl -L https://codeload.example.test/Octo/Calc-Tools/tar.gz/v2",
    ],
)
def test_fetching_the_project_is_suspected(call: Any) -> None:
    assert found(call) == ["1 project_download"]


def test_pages_of_a_forge_are_suspected_where_the_project_is_unknown() -> None:
    page = {"url": "https://github.com/any/thing/pull/3"}
    assert found(page, repo=None) == ["1 project_download"]
    assert found(page) == []


@pytest.mark.parametrize(
    "command", ["cat /check/run.sh", "head hidden/test_it.py", "echo 1 > /logs/verifier/reward.txt"]
)
def test_touching_files_of_the_check_is_suspected(command: str) -> None:
    assert found(command) == ["1 checker_files"]
    assert found(command, check="make test") == []


def test_a_stash_or_commit_of_the_conversation_is_its_own() -> None:
    assert found("git stash", "pytest", "git stash pop") == []
    assert found("git add . && git commit -m a", "git show HEAD~1", "git log --all") == [
        "3 other_commits"
    ]


def test_conversations_without_a_check_are_not_looked_at() -> None:
    record = to_record({"messages": [], "row": {"check": CHECK}, "check": None})
    assert find_leaks(record) == []


@pytest.mark.parametrize(
    ("result", "verdict", "is_flaw"),
    [
        ({"details": {"exit_code": 0}}, PASSED, True),
        ({}, PASSED, True),
        ({}, {"passed": None, "reward": 0.4}, True),
        ({}, {"passed": False, "reward": 0.0}, False),
        ({}, {"passed": None, "reward": None, "error": "no result"}, False),
        ({"details": {"exit_code": 128}}, PASSED, False),
        ({"is_error": True}, PASSED, False),
    ],
)
def test_a_rewarded_leak_that_did_not_fail_is_a_flaw(
    result: dict[str, Any], verdict: dict[str, Any], is_flaw: bool
) -> None:
    record = conversation("git show v2.0:a.py", results=[result], verdict=verdict)
    assert bool(find_rewarded_leaks(record)) is is_flaw
    assert len(find_leaks(record)) == 1


def test_rows_filters_statistics_and_the_report_name_it(tmp_path: Path) -> None:
    def script(command: str) -> list[dict[str, Any]]:
        return [
            {"tool_calls": [{"name": "terminal", "arguments": {"command": command}}]},
            {"content": "done"},
        ]

    write_rows(
        tmp_path / "p.jsonl",
        {"id": "leaks", "prompt": "x", "check": "true", "script": script("git show v2.0:a.py")},
        {"id": "works", "prompt": "y", "check": "true", "script": script("git status")},
        {"id": "found", "prompt": "z", "check": "true", "script": script("git reflog || true")},
    )
    options = SCRIPTED | {"enabled_toolsets": "terminal", "sandbox": "local"}
    done = run(tmp_path, "--row_setup", **options)
    assert done.returncode == 0, done.stderr
    rows = {
        row["id"]: json.loads(row["metadata"])
        for row in lines(tmp_path / "trajectories" / "r.jsonl")
    }
    assert rows["leaks"]["leak_suspected"] == [
        {"turn": 1, "reason": "other_commits", "evidence": "git show v2.0:a.py"}
    ]
    assert "leak_suspected" not in rows["works"]
    assert rows.keys() == {"leaks", "works"}
    (rejected,) = lines(tmp_path / "trajectories/r/exports/rejects.jsonl")
    assert (rejected["id"], rejected["reason"]) == ("found", "leak_suspected")
    more = ("--format=openai", "--accept_rows=leak_suspected", "--output=all")
    assert run(tmp_path, "export", "r", *more).returncode == 0
    assert len(lines(tmp_path / "all/openai/train.jsonl")) == 3
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("formats: [openai]\nfilters: {leak_suspected: reject}\n")
    assert run(tmp_path, "export", "r", "--recipe=recipe.yaml").returncode == 0
    shown = run(tmp_path, "stats", "r").stdout
    assert "2  leak_suspected" in shown
    assert "health: leak_suspected: 2 of 3 conversations with a check" in shown
