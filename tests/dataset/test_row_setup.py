"""Rows that bring the state their task starts from, and the check that judges its end."""

from __future__ import annotations

import base64
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.basics.text import single_line
from batch_trajectories.dataset.row import RowRules
from batch_trajectories.dataset.row_workspace import Check, RowSetup, read_row_setup
from tests.helpers.playing import call, calls, say
from tests.helpers.running import SCRIPTED, lines, run, write_rows

READ = calls(call("read_file", path="src/a.py"))
ANSWER = say("done")


def records_of(
    tmp_path: Path, *rows: dict[str, Any], with_setup: bool = True, **options: Any
) -> list[Any]:
    script = [READ, ANSWER]
    write_rows(tmp_path / "p.jsonl", *({"prompt": "x", "script": script, **row} for row in rows))
    flags = ("--row_setup",) if with_setup else ("--no_row_setup",)
    done = run(tmp_path, *flags, **{**SCRIPTED, "sandbox": "local", **options})
    assert done.returncode in (0, 1), done.stderr
    return lines(tmp_path / "trajectories" / "r" / "records.jsonl")


def record_of(tmp_path: Path, row: dict[str, Any], **more: Any) -> Any:
    [record] = records_of(tmp_path, row, **more)
    return record


class TestColumns:
    def test_files_and_commands_are_read(self) -> None:
        row = read_row_setup(
            {
                "files": {"a": "é", "b": {"base64": base64.b64encode(b"\xff").decode()}},
                "setup": "make",
                "check": {"command": "pytest", "files": {"t.py": "x"}},
            }
        )
        assert row.files == {"a": "é".encode(), "b": b"\xff"}
        assert row.commands == ("make",)
        assert row.check == Check("pytest", {"t.py": b"x"})
        assert read_row_setup({}) == RowSetup({}, (), ".", None)

    @pytest.mark.parametrize(
        ("columns", "message"),
        [
            ({"files": ["a"]}, "`files` must be an object"),
            ({"files": {"a": 1}}, "`files.a` must be text"),
            ({"files": {"a": {"base64": "?"}}}, "`files.a`: not base64"),
            ({"setup": [1]}, "`setup` must be a command"),
            ({"setup": {"a": 1}}, "`setup` must be a command"),
            ({"cwd": "../x"}, "`cwd` must be a directory in the workspace"),
            ({"cwd": "/etc"}, "or one in /workspace"),
            ({"cwd": 1}, "`cwd` must be a directory"),
            ({"check": 1}, "`check` must be a command"),
            ({"check": {"files": {}}}, "`check` must be a command"),
            ({"check": {"command": "x", "reward": 1}}, "`check` must be a command"),
            ({"check": {"command": "x", "files": {"t": 1}}}, "`check.files.t` must be text"),
        ],
    )
    def test_impossible_values_make_a_bad_row(self, columns: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            RowRules(with_setup=True).read({"prompt": "x", **columns})
        # Without the option they are columns like any other.
        assert RowRules().read({"prompt": "x", **columns}).setup is None

    def test_they_are_part_of_what_the_conversation_is(self) -> None:
        columns = {"prompt": "x", "files": {"a": "1"}, "check": "true", "other": 1}
        assert RowRules(with_setup=True).rollout_columns(columns).keys() == {
            "prompt",
            "files",
            "check",
        }
        assert RowRules().rollout_columns(columns).keys() == {"prompt"}


def test_a_task_starts_from_its_row_and_is_judged_at_its_end(tmp_path: Path) -> None:
    script = [READ, calls(call("write_file", path="out.txt", content="42")), ANSWER]
    record = record_of(
        tmp_path,
        {
            "files": {"src/a.py": "print(6 * 7)\n"},
            "setup": ["echo b > b.txt", "test -f src/a.py"],
            "check": {
                "command": "cmp want.txt out.txt && test -f b.txt && echo '{\"reward\": 0.75}'",
                "files": {"want.txt": "42"},
            },
            "script": script,
        },
    )
    assert record["status"] == "completed"
    assert record["messages"][2]["content"] == "print(6 * 7)\n"
    assert record["check"].items() >= {"passed": True, "reward": 0.75, "exit_code": 0}.items()
    assert "cmp want.txt" not in (tmp_path / "trajectories" / "r.jsonl").read_text()
    told = [str(message["content"]) for message in record["messages"]]
    assert not any("want.txt" in text or "cmp" in text for text in told)


def test_the_exit_code_judges_and_a_reward_may_grade(tmp_path: Path) -> None:
    judged: dict[str, tuple[bool, float]] = {
        "test -f src/a.py": (True, 1.0),
        "test -f nothing": (False, 0.0),
        "echo '{\"reward\": 0.5}'; false": (False, 0.5),
        'echo \'{"reward": "high"}\'': (True, 1.0),
    }
    rows = [{"files": {"src/a.py": "a"}, "check": check} for check in judged]
    collected = {
        record["row"]["check"]: (record["check"]["passed"], record["check"]["reward"])
        for record in records_of(tmp_path, *rows)
    }
    assert collected == judged


@pytest.mark.parametrize("sandbox", ["bwrap", pytest.param("local", marks=pytest.mark.slow)])
def test_shells_and_interpreters_start_in_the_row_s_directory(tmp_path: Path, sandbox: str) -> None:
    script = [
        calls(
            call("terminal", command="pwd; cat a.py"), call("python", code="open('a.py').read()")
        ),
        ANSWER,
    ]
    record = record_of(
        tmp_path,
        {
            "files": {"src/a.py": "42"},
            "cwd": "/workspace/src",
            "check": "test -d src",
            "script": script,
        },
        sandbox=sandbox,
        enabled_toolsets="terminal,python",
    )
    shell, python = (json.loads(m["content"]) for m in record["messages"] if m["role"] == "tool")
    assert shell["stdout"].endswith("/src\n42")
    assert python["value"] == "'42'"
    assert record["check"]["passed"]


@pytest.mark.slow
def test_a_check_that_takes_too_long_gives_no_reward(tmp_path: Path) -> None:
    record = record_of(tmp_path, {"check": "sleep 60"}, command_timeout_s=0.3)
    assert (record["check"]["passed"], record["check"]["reward"]) == (None, None)
    assert record["status"] == "completed"


def test_a_set_up_that_fails_is_a_failure_with_its_output(tmp_path: Path) -> None:
    record = record_of(tmp_path, {"setup": "echo no such thing >&2; exit 3"}, max_attempts=1)
    assert record["status"] == "failed"
    assert record["error"]["class"] == "setup_failed"
    assert "ended with exit code 3: no such thing" in record["error"]["message"]
    assert record["check"] is None
    assert record["turns"] == []


def test_why_a_set_up_failed_is_one_line_wherever_there_is_only_one(tmp_path: Path) -> None:
    """The line that helps may be the first, the last or one between; failures.jsonl has all."""
    setup = "printf 'ERROR: no foo\\n\\n[notice] a new pip\\n' >&2; exit 3"
    write_rows(tmp_path / "p.jsonl", {"id": "a", "prompt": "x", "script": [ANSWER], "setup": setup})
    given = {**SCRIPTED, "sandbox": "local", "max_attempts": 1}
    done = run(tmp_path, "--row_setup", **given)
    assert done.returncode == 1, done.stderr
    told = "ended with exit code 3: ERROR: no foo | [notice] a new pip"
    place = tmp_path / "trajectories" / "r"
    shown, totals = (done.stderr + done.stdout).split("1 prompt x 1", 1)
    assert re.search(rf"a: attempt 1 failed \(setup_failed\): .*{re.escape(told)}\n", shown)
    assert re.search(rf" 1  setup_failed: .*{re.escape(told)}\n", totals)
    [reason] = json.loads((place / "summary.json").read_bytes())["reasons"]
    assert reason["message"].endswith(told)
    log = (place / "run.log").read_text()
    assert re.search(
        rf"Task a ended as failed after 0 turns \(.*\): setup_failed: .*{re.escape(told)}", log
    )
    status = run(tmp_path, "status", "r").stdout
    assert re.search(rf"setup_failed 1, the last: a: .*{re.escape(told)}\n", status)
    [failure] = lines(place / "failures.jsonl")
    assert failure["message"].endswith("ERROR: no foo\n\n[notice] a new pip")


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("", ""),
        ("  one \n", "one"),
        ("0123456789" * 5, "0123456789012345 [...] 4567890123456789"),
        ("first\n\n  second\tline\r\nlast", "first | second line | last"),
        ("first\n" + "x" * 40 + "\nwhy\nlast", "first | [...] | why | last"),
        ("f" * 40 + "\n" + "l" * 40, "ffffffff [...] ffffffff | llllllll [...] llllllll"),
    ],
)
def test_a_message_in_a_line(message: str, line: str) -> None:
    """The first line, and as many of the last as fit."""
    assert single_line(message, max_chars=32) == line


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"../out": "x"}, "'../out' is not a path in the workspace"),
        ({"/etc/passwd": "x"}, "'/etc/passwd' is not a path in the workspace"),
        ({"a/../../out": "x"}, "is not a path in the workspace"),
        ({"": "x"}, "'' is not a path in the workspace"),
        ({".": "x"}, "'.' is not a path in the workspace"),
        ({"a": "x", "a/b": "y"}, "'a' is a file, so 'a/b' cannot be in it"),
    ],
)
def test_files_of_a_row_stay_in_the_workspace(files: dict[str, str], message: str) -> None:
    for columns in ({"files": files}, {"check": {"command": "true", "files": files}}):
        with pytest.raises(ValueError, match=re.escape(message)):
            read_row_setup(columns)


def test_empty_columns_are_as_good_as_none() -> None:
    assert read_row_setup(dict.fromkeys(("files", "setup", "cwd", "check"))) == read_row_setup({})
    assert read_row_setup({"files": {"/workspace/a": "x"}}).files == {"a": b"x"}


def test_files_and_processes_of_the_model_cannot_influence_the_check(tmp_path: Path) -> None:
    """Neither what is in the place of the check's file, nor a process that rewrites it."""
    tamper = "(while sleep 0.05; do echo 'exit 0' > a/b/hidden.sh; done) >/dev/null 2>&1 &"
    rows = [
        {"script": [calls(call("terminal", command=tamper)), ANSWER]},
        {"script": [calls(call("write_file", path="a/b/hidden.sh/x", content="")), ANSWER]},
        {"script": [calls(call("write_file", path="a", content="")), ANSWER]},
    ]
    check = {"command": "sleep 0.4; sh a/b/hidden.sh", "files": {"a/b/hidden.sh": "exit 7"}}
    records = records_of(
        tmp_path, *({**row, "check": check} for row in rows), enabled_toolsets="file,terminal"
    )
    assert [record["check"]["exit_code"] for record in records] == [7, 7, 7]
    assert {record["status"] for record in records} == {"completed"}


@pytest.mark.slow
def test_without_the_option_nothing_of_a_row_is_run(tmp_path: Path) -> None:
    row = {"setup": f"touch {tmp_path}/touched", "check": f"touch {tmp_path}/touched"}
    record = record_of(tmp_path, row, with_setup=False)
    assert record["check"] is None
    assert not (tmp_path / "touched").exists()


def test_commands_of_rows_need_a_sandbox_that_works(tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [ANSWER]})
    nowhere = {**os.environ, "PATH": str(tmp_path)}
    refused = run(tmp_path, "--row_setup", **SCRIPTED, env=nowhere)
    assert refused.returncode == 2
    assert "bwrap" in refused.stderr
    assert "`setup` and `check` are commands, too" in refused.stderr
