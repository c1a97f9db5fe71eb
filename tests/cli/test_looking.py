"""Looking at runs from a terminal: show, compare, and what status says beside the accounts."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agent.messages.message import Event, Message, NoteEvent, ReplyEvent, ResultEvent, SubEvent
from batch_trajectories.api.stored_run import StoredRun, conversations_in_flight
from batch_trajectories.basics.errors import ConfigError, EnvironmentStop, RunDirError
from batch_trajectories.engine.run_dir import hold_lock
from batch_trajectories.records.failures import WORKER_DIED, Failure, FailureFile, failures_by_class
from batch_trajectories.records.journal import JournalWriter
from batch_trajectories.records.tasks import task_key
from batch_trajectories.report.comparison import as_text, compare
from batch_trajectories.report.conversation_text import ConversationText, turn_as_json
from batch_trajectories.report.page.writer import write_report
from batch_trajectories.report.status import list_runs, run_status
from tests.helpers.running import (
    PATIENCE_S,
    SCRIPTED,
    command,
    records,
    run,
    started,
    wait_until,
    write_rows,
)
from tests.helpers.stored import to_record
from tests.report.test_report import HOSTILE_ID, ROWS

HOLD = '''
import time
from pathlib import Path


def hold(path: str) -> str:
    """Wait for a file."""
    while not Path(path).exists():
        time.sleep(0.01)
    return "there"
'''


@pytest.fixture(scope="module")
def cwd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of the same rows, the second with a turn less."""
    cwd = tmp_path_factory.mktemp("looking")
    write_rows(cwd / "p.jsonl", *ROWS)
    for name, turns in (("r", 3), ("other", 2)):
        done = run(cwd, **{**SCRIPTED, "run_name": name}, max_turns=turns, repeat_limit=9)
        assert done.returncode == 0, done.stderr
    return cwd


def show(cwd: Path, *args: object) -> str:
    done = run(cwd, "show", *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_show_is_a_conversation_that_can_be_read(cwd: Path) -> None:
    text = show(cwd, "r", "plain")
    assert text.startswith("plain  completed\nscripted · 2 turns · 1 call (1 failed) · ")
    _, _, rest = text.partition("=== user\n")
    assert rest.startswith("Look into the room.\n")
    assert "--> read_file" in rest
    assert "    path: missing.txt\n<-- failed: " in rest
    assert rest.endswith("  | It is empty.\nNothing there.\n")


def test_no_text_of_a_model_acts_on_the_terminal(cwd: Path) -> None:
    text = show(cwd, "r", HOSTILE_ID)
    assert not set(text) & set("\x1b\x07\u202e\x9b")
    assert text.count("⟨U+001B⟩[31mred⟨U+001B⟩]0;title⟨U+0007⟩ ⟨U+202E⟩back") >= 7


def test_a_prefix_of_an_id_is_enough_if_it_is_unique(cwd: Path) -> None:
    run_dir = cwd / "trajectories" / "r"
    assert StoredRun(run_dir).record("pl")["id"] == "plain"
    with pytest.raises(RunDirError, match="no conversation that has ended has the id 'nobody'"):
        StoredRun(run_dir).record("nobody")
    with pytest.raises(RunDirError, match=r"several ids begin with .*plain"):
        StoredRun(run_dir).record("")
    missing = run(cwd, "show", "r", "nobody")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr.startswith(
        "error: trajectories/r: no conversation that has ended has the id 'nobody'"
    )


def test_show_without_an_id_lists_the_last_ones(cwd: Path, tmp_path: Path) -> None:
    head, *listed = show(cwd, "r").splitlines()
    assert head == f"trajectories/r: {len(ROWS)} finished conversations, latest first"
    assert sorted(line.split()[0] for line in listed if "⟨" not in line) == sorted(
        row["id"] for row in ROWS if row["id"] != HOSTILE_ID
    )
    (plain,) = [line for line in listed if line.startswith("plain ")]
    assert plain.endswith("  completed, 2 turns")
    assert not set("".join(listed)) & set("\x1b\x07\u202e\x9b")
    assert run(cwd, "show", "r", "--turn=1").returncode == 2
    write_rows(tmp_path / "p.jsonl", *({"id": f"q{n:02}", "prompt": "Go."} for n in range(45)))
    (tmp_path / "script.yaml").write_text("- content: Done.\n")
    assert run(tmp_path, **SCRIPTED, script_file="script.yaml").returncode == 0
    many = show(tmp_path, "r").splitlines()
    assert (len(many), many[-1]) == (42, "and 5 more; --json lists all")
    ids = [entry["id"] for entry in json.loads(show(tmp_path, "r", "--json"))]
    assert sorted(ids) == [f"q{n:02}" for n in range(45)]


@pytest.mark.slow
def test_status_after_the_end_says_nothing_is_in_flight(tmp_path: Path) -> None:
    """The conversation of a failed attempt lies in the journal until the next start."""
    script = [{"tool_calls": [{"name": "list_files", "arguments": {}}]}]
    write_rows(tmp_path / "p.jsonl", {"id": "short", "prompt": "Go.", "script": script})
    assert run(tmp_path, **SCRIPTED).returncode == 1
    text = run(tmp_path, "status", "r").stdout
    assert "in flight" not in text
    assert "\nunfinished 1, the next start continues them\n  short " in text


@pytest.mark.parametrize("name", ["status", "report", "export", "show"])
@pytest.mark.parametrize("run_name", ["nope", "trajectories/nope"])
def test_a_run_that_is_not_there_is_one_line_with_those_that_are(
    cwd: Path, name: str, run_name: str
) -> None:
    done = run(cwd, name, run_name, *(["x"] if name == "show" else []))
    assert (done.returncode, done.stderr) == (
        2,
        "error: trajectories/nope: there is no such run. Runs in trajectories: other, r. "
        "--output_dir names another directory\n",
    )


def test_status_without_a_run_lists_the_runs(cwd: Path, tmp_path: Path) -> None:
    listed = run(cwd, "status").stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["other", "r"]
    assert re.match(r"r +not running, done 3 of 3, begun \d{4}-\d\d-\d\d \d\d:\d\d", listed[1])
    parsed = json.loads(run(cwd, "status", "--json").stdout)
    assert [(one["name"], one["tasks"], one["pending"]) for one in parsed] == [
        ("other", 3, 0),
        ("r", 3, 0),
    ]
    assert run(cwd, "status", "--watch").returncode == 2
    none = run(tmp_path, "status")
    assert (none.returncode, none.stderr) == (
        2,
        "error: trajectories: no runs in this directory; --output_dir names another\n",
    )


def test_a_running_run_is_listed_with_its_progress(cwd: Path, tmp_path: Path) -> None:
    copy = tmp_path / "trajectories" / "r"
    shutil.copytree(cwd / "trajectories" / "r", copy)
    state = {"total": 9, "done": 4, "failed": {"timeout": 1}}
    for pid, expected in ((os.getpid(), [9, 4, 1, 4]), (1, [None] * 4)):
        (copy / "progress.json").write_text(json.dumps({"pid": pid, **state}))
        with hold_lock(copy):
            (found,) = list_runs(tmp_path / "trajectories")
        counts = [found[key] for key in ("state", "tasks", "done", "failed", "pending")]
        assert counts == ["running", *expected], "what an earlier process left is not of this one"


def test_status_of_a_run_that_was_cut_off_says_what_to_do(cwd: Path, tmp_path: Path) -> None:
    rows = [*ROWS, {"id": "new", "prompt": "Hi", "script": [{"content": "Hi."}]}]
    copy = tmp_path / "trajectories" / "r"
    shutil.copytree(cwd / "trajectories" / "r", copy)
    write_rows(copy / "dataset.jsonl", *rows)
    written = json.loads((copy / "run.json").read_text())
    written["dataset"]["path"] = str(tmp_path / "p.jsonl")  # which is not there
    del written["crc32"]
    (copy / "run.json").write_text(json.dumps(written))
    head = run(tmp_path, "status", "r").stdout.splitlines()[0]
    assert head == "trajectories/r: not running; `resume r` continues the pending tasks"


def test_status_in_the_moment_in_which_a_start_locks_the_run(cwd: Path, tmp_path: Path) -> None:
    shutil.copytree(cwd, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "trajectories" / "r"
    with hold_lock(path):
        os.truncate(path / "lock", 0)
        status = run(tmp_path, "status", "r")
        verify = run(tmp_path, "verify", "r")
    assert status.returncode == 0, status.stderr
    assert ": running (pid None on None)" in status.stdout
    assert "another process is working on this run" in verify.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", [["show", "r", "p"], ["compare", "r", "r"], ["report", "r"]])
def test_a_pipe_in_place_of_records_is_named(cwd: Path, tmp_path: Path, command: list[str]) -> None:
    copied = tmp_path / "trajectories" / "r"
    shutil.copytree(cwd / "trajectories" / "r", copied)
    (copied / "records.jsonl").unlink()
    os.mkfifo(copied / "records.jsonl")
    done = run(tmp_path, *command)
    assert done.returncode == 2, done.stderr
    assert "records.jsonl: not a plain file; put the file of this run back" in done.stderr


def test_one_turn_alone(cwd: Path) -> None:
    text = show(cwd, "r", "plain", "--turn=2")
    assert "Nothing there." in text
    assert "read_file" not in text
    (record,) = (line for line in records(cwd) if line["id"] == "plain")
    turn = turn_as_json(to_record(record), 1)
    assert turn["turn"] == record["turns"][0]
    assert [message["role"] for message in turn["messages"]] == ["assistant", "tool"]
    with pytest.raises(ConfigError, match="--turn 3: plain has 2 turns"):
        turn_as_json(to_record(record), 3)
    with pytest.raises(ConfigError, match="--turn 3: plain has turns 1 to 2"):
        list(ConversationText(to_record(record), colours=False).text(turn=3))


def test_json_is_the_record(cwd: Path) -> None:
    (record,) = (line for line in records(cwd) if line["id"] == HOSTILE_ID)
    assert json.loads(show(cwd, "r", HOSTILE_ID, "--json")) == record
    assert StoredRun(cwd / "trajectories" / "r").record(HOSTILE_ID) == record


def test_subagents_and_summaries_of_a_conversation_are_shown(tmp_path: Path) -> None:
    """Preparation first, a subagent under its call, notes and replies set aside where they were."""
    look = {"tool_calls": [{"name": "list_files", "arguments": {}}]}
    script = [
        {"content": "@room := empty"},
        {"tool_calls": [{"name": "helper", "arguments": {"task": "Look."}}]},
        {"content": "I looked."},
        {"content": ""},
        look,
        look,
        {"content": "Done."},
    ]
    write_rows(tmp_path / "p.jsonl", {"id": "a", "prompt": "Go.", "script": script})
    helper = json.dumps([{"name": "helper", "description": "Helps.", "max_turns": 2}])
    done = run(tmp_path, **SCRIPTED, subagents=helper, preparation="Look around.")
    assert done.returncode == 0, done.stderr
    text = show(tmp_path, "r", "a")
    places = [
        text.index(part)
        for part in (
            "unusual: inner conversations, notes, discarded replies",
            "    conversation of preparation (preparation#1)",
            "    @room := empty",
            "\n=== user\nGo.",
            "--> helper",
            "    conversation of helper (call_2_0)",
            "    I looked.",
            "\n<--\n    I looked.",
            "(set aside before: ",
            "--> list_files",
            "(written into it by the runtime: repeat)",
            "\nDone.",
        )
    ]
    assert places == sorted(places)


@pytest.mark.slow
def test_a_terminal_gets_colours_through_its_pager(cwd: Path, tmp_path: Path) -> None:
    """Only the escapes are there that we wrote, and NO_COLOR leaves those out too."""
    pager = tmp_path / "less"
    pager.write_text("#!/bin/sh\necho paged\nexec cat\n")
    pager.chmod(0o755)
    env = {k: v for k, v in os.environ.items() if k not in ("LESS", "NO_COLOR")}
    env |= {"PAGER": "less", "PATH": f"{tmp_path}:{env['PATH']}", "TERM": "xterm"}
    coloured = on_terminal(cwd, env, "show", "r", HOSTILE_ID)
    assert coloured.startswith("paged")
    assert "\x1b[36m\x1b[1m=== turn 1" in coloured
    assert "\x1b[31mred" not in coloured
    plain = on_terminal(cwd, env | {"NO_COLOR": "1"}, "show", "r", HOSTILE_ID)
    assert plain.startswith("paged")
    assert "\x1b" not in plain


def on_terminal(
    cwd: Path, env: dict[str, str], *args: object, returncode: int = 0, **options: object
) -> str:
    """What a command that ends with `returncode` writes to a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command(*args, **options), cwd=cwd, env=env, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        output = b""
        while chunk := read_terminal(ours):
            output += chunk
        assert process.wait(timeout=PATIENCE_S) == returncode
    os.close(ours)
    return output.decode()


def read_terminal(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    except OSError:  # the other side is closed
        return b""


def test_compare_shows_what_ended_differently(cwd: Path) -> None:
    parsed = json.loads(run(cwd, "compare", "r", "other", "--json").stdout)
    assert parsed["changed"] == [{"id": HOSTILE_ID, "from": "completed", "to": "max_turns"}]
    assert [one["statuses"] for one in parsed["runs"]] == [
        {"completed": 2, "max_turns": 1},
        {"completed": 1, "max_turns": 2},
    ]
    assert parsed["options"] == {"max_turns": [3, 2]}
    assert parsed["same_dataset"]
    assert parsed["both"] == 3
    assert parsed["paired"]["turns"] == pytest.approx(-2 / 3)
    text = run(cwd, "compare", "r", "other").stdout
    assert "completed -> max_turns: 1: x/<b>#?%</b> ⟨U+001B⟩[1m" in text
    assert "option max_turns: 3 -> 2" in text
    run_dir = cwd / "trajectories" / "r"
    assert "all of them have the same status" in as_text(
        compare(StoredRun(run_dir), StoredRun(run_dir))
    )


@pytest.mark.slow
def test_compare_says_which_tasks_only_one_run_has(cwd: Path, tmp_path: Path) -> None:
    write_rows(
        tmp_path / "p.jsonl", ROWS[1], {"id": "new", "prompt": "Hi", "script": [{"content": "Hi."}]}
    )
    assert run(tmp_path, **SCRIPTED).returncode == 0
    found = compare(*(StoredRun(folder / "trajectories" / "r") for folder in (cwd, tmp_path)))
    assert found["only"][1] == ["new"]
    assert set(found["only"][0]) == {HOSTILE_ID, "endless"}
    assert not found["same_dataset"]


@pytest.mark.slow
def test_status_says_what_is_in_flight_and_watches_it_end(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HOLD)
    turns = [
        {"tool_calls": [{"name": "list_files", "arguments": {}}]},
        {"tool_calls": [{"name": "hold", "arguments": {"path": str(tmp_path / "go")}}]},
        {"content": "Done."},
    ]
    write_rows(
        tmp_path / "p.jsonl",
        {"id": "held", "prompt": "Wait.", "script": turns},
        {"id": "quick", "prompt": "Go.", "script": turns[2:]},
    )
    options = {**SCRIPTED, "enabled_toolsets": "file,mine", "tools": "mine:hold"}
    with started(tmp_path, **options) as process:
        wait_until(lambda: in_flight(tmp_path) == [("held", 2, "hold", "tools", ["hold"])])
        # The run writes its progress now and then.
        wait_until(lambda: (status(tmp_path)["progress"] or {}).get("done") == 1)
        parsed = status(tmp_path)
        assert parsed["progress"]["running"] == 1
        assert parsed["tasks"] == 2
        assert parsed["in_flight"][0]["idle_s"] >= 0
        assert [task["id"] for task in parsed["slowest"]] == ["quick"]
        text = run(tmp_path, "status", "r").stdout
        assert "\nthis start: left " in text
        assert "done 1, failed 0, running 1, " in text
        assert "in flight: 1, longest without an event first\n  held " in text
        assert "2 turns  runs hold, " in text
        watching = subprocess.Popen(
            command("status", "r", "--json", "--watch", "0.1"), cwd=tmp_path, stdout=subprocess.PIPE
        )
        assert watching.stdout is not None
        first = json.loads(watching.stdout.readline())
        assert first["holder"]["pid"] == process.pid
        (tmp_path / "go").touch()
        rest = [json.loads(line) for line in watching.stdout]
        assert process.wait(timeout=PATIENCE_S) == 0
    watching.stdout.close()
    assert watching.wait(timeout=PATIENCE_S) == 0
    assert [one["holder"] is None for one in rest] == [*[False] * (len(rest) - 1), True]
    assert rest[-1]["in_flight"] == []
    assert {task["id"] for task in rest[-1]["slowest"]} == {"held", "quick"}


def test_status_skips_an_unreadable_record(cwd: Path, tmp_path: Path) -> None:
    """It is left out of the slowest tasks, and named by the commands that need it."""
    for path in (cwd / "trajectories" / "other").glob("r*.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    content = bytearray((tmp_path / "records.jsonl").read_bytes())
    second = content.index(b"\n") + 1
    content[second + 400 : second + 440] = b'"' * 40
    (tmp_path / "records.jsonl").write_bytes(content)
    assert run_status(StoredRun(tmp_path))["slowest_of"] == 2
    with pytest.raises(
        EnvironmentStop,
        match=r"records.jsonl:2: the record \('.*'\) is unreadable: it was changed",
    ):
        write_report(StoredRun(tmp_path))
    assert not list(tmp_path.glob("report*"))


def status(cwd: Path) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(run(cwd, "status", "r", "--json").stdout)
    return parsed


def in_flight(cwd: Path) -> list[tuple[Any, ...]]:
    if not (cwd / "trajectories" / "r" / "run.json").exists():
        return []
    keys = ("id", "turns", "tool", "doing", "calls")
    return [tuple(task[key] for key in keys) for task in status(cwd)["in_flight"]]


def reply(turn: int, *tools: str, at: float) -> ReplyEvent:
    message = Message(role="assistant", content="")
    if tools:
        message["tool_calls"] = [
            {"id": f"{turn}.{n}", "type": "function", "function": {"name": name, "arguments": ""}}
            for n, name in enumerate(tools)
        ]
    return ReplyEvent(
        kind="reply",
        turn=turn,
        message=message,
        finish_reason="stop",
        usage=None,
        cost_usd=None,
        model=None,
        response_id=None,
        started_at=at - 1,
        duration_s=1.0,
    )


def result(turn: int, call: int, *, at: float) -> ResultEvent:
    message = Message(role="tool", content="", name="t", is_error=False, tool_call_id="x")
    return ResultEvent(
        kind="result", turn=turn, call=call, message=message, started_at=at, duration_s=0.0
    )


def write_journal(run_dir: Path, *assignments: list[tuple[int, Event]], task: str = "a") -> None:
    """Write the events of one task with their positions, each assignment by a worker of its own."""
    inflight = run_dir / "inflight"
    inflight.mkdir(exist_ok=True)
    for assignment, events in enumerate(assignments):
        number = len(list(inflight.iterdir()))
        writer = JournalWriter(inflight, number, on_storage_error=lambda error: None)
        for position, event in events:
            writer.append(task, "digest", event, assignment=assignment, position=position)
        writer.close()


def test_a_call_without_a_result_is_in_progress(tmp_path: Path) -> None:
    events: list[Event] = [reply(1, "x", "y", at=100.0), result(1, 1, at=103.0)]
    write_journal(tmp_path, list(enumerate(events)))
    (one,) = conversations_in_flight(tmp_path / "inflight", settled=(), now=110.0)
    assert one == {
        "id": "a",
        "turns": 1,
        "tool": "y",
        "doing": "tools",
        "calls": ["x"],
        "idle_s": 7.0,
    }
    assert (
        conversations_in_flight(tmp_path / "inflight", settled={task_key("a", "digest")}, now=110.0)
        == []
    )


def test_the_model_is_waited_for_when_all_calls_are_answered(tmp_path: Path) -> None:
    discarded = reply(2, "z", at=105.0)
    discarded["discarded"] = "unusable"
    note = NoteEvent(kind="note", turn=1, reason="repeat", text="", at=104.0)
    inner = SubEvent(kind="sub", key="k", name="n", event=reply(7, "q", at=109.0))
    events: list[Event] = [reply(1, "x", at=100.0), result(1, 0, at=103.0), note, discarded, inner]
    write_journal(tmp_path, list(enumerate(events)))
    (one,) = conversations_in_flight(tmp_path / "inflight", settled=(), now=110.0)
    assert (one["doing"], one["turns"], one["tool"], one["idle_s"]) == ("model", 1, "x", 1.0)


def test_a_later_assignment_replaces_what_it_could_not_use(tmp_path: Path) -> None:
    before: list[Event] = [
        reply(1, "x", at=100.0),
        result(1, 0, at=101.0),
        reply(2, "old", at=102.0),
    ]
    write_journal(tmp_path, list(enumerate(before)), [(2, reply(2, "new", at=200.0))])
    torn = tmp_path / "inflight" / "worker-9-0.jsonl"
    torn.write_bytes(b'{"task":"a","input_dig')
    (one,) = conversations_in_flight(tmp_path / "inflight", settled=(), now=200.0)
    assert (one["turns"], one["calls"]) == (2, ["new"])


def test_errors_have_a_count_and_the_last_example(tmp_path: Path) -> None:
    file = FailureFile(tmp_path, tmp_path)
    for n, kind in enumerate(("timeout", "timeout", WORKER_DIED)):
        file.append(
            Failure(
                id=f"t{n}", input_digest="d", attempt=1, error_class=kind, message=f"message {n}"
            )
        )
    file.close()
    with (tmp_path / "failures.jsonl").open("ab") as torn:
        torn.write(b'{"kind":"attempt","cla')
    collected = [
        {key: one[key] for key in ("class", "count", "id")} for one in failures_by_class(tmp_path)
    ]
    assert collected == [
        {"class": "timeout", "count": 2, "id": "t1"},
        {"class": WORKER_DIED, "count": 1, "id": "t2"},
    ]
