"""`import`: conversations of other programs become records, and what cannot be read is named."""

from __future__ import annotations

import gzip
import json
import secrets
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.api.stored_run import StoredRun
from batch_trajectories.basics.errors import ConfigError, DatasetError
from batch_trajectories.export.dataset.directory import export_dataset
from batch_trajectories.export.dataset.runs import Source
from batch_trajectories.export.rows.recipe import Recipe
from batch_trajectories.importing.conversation import SourceConversation, parse_time
from batch_trajectories.importing.importing import (
    ImportEnd,
    digest_of_messages,
    import_conversations,
)
from batch_trajectories.importing.sources import read_conversations
from batch_trajectories.records.reader import stored_records
from tests.fakes.fake_hub import REPOSITORY, fake_hub
from tests.helpers.running import ids, lines, run, write_rows
from tests.helpers.stored import row_in
from tests.stored_runs.test_stored_runs import COMMITS, HERE

AT = "2026-11-24T04:40:26.659Z"


def take(cwd: Path, *sources: Path, name: str = "r") -> tuple[ImportEnd, Path]:
    end, config, _ = import_conversations(sources, name, cwd / "runs")
    return end, config.run_dir


def export_file(run_dir: Path, name: str, out: Path, **recipe: Any) -> Path:
    stored = StoredRun(run_dir)
    source = Source(stored.path, stored.scan, stored.config.num_samples)
    given = {"formats": name, "filters": {"status": "any"}, **recipe}
    export_dataset(source, Recipe.model_validate(given), out)
    (file,) = (out / name).glob("train.*")
    return file


def only_record(run_dir: Path) -> Any:
    (record,) = stored_records(run_dir)
    return record


@pytest.fixture(params=[COMMITS[0], pytest.param(COMMITS[1], marks=pytest.mark.slow)])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A finished run of an earlier commit."""
    copied = tmp_path / "stored"
    shutil.copytree(HERE / str(request.param) / "finished", copied)
    identity = json.loads((copied / "run.json").read_text())
    identity["dataset"]["path"] = str(HERE / "finished.jsonl")
    identity.pop("crc32", None)
    (copied / "run.json").write_text(json.dumps(identity))
    return copied


@pytest.mark.parametrize(
    "name", ["atif", *(pytest.param(n, marks=pytest.mark.slow) for n in ("openai", "hermes"))]
)
def test_rows_are_equal_after_an_import_and_another_export(
    stored: Path, tmp_path: Path, name: str
) -> None:
    before = export_file(stored, name, tmp_path / "before")
    end, run_dir = take(tmp_path, before)
    assert not end.unreadable
    after = {
        row["id"] if name != "atif" else row["session_id"]: row
        for row in lines(export_file(run_dir, name, tmp_path / "after"))
    }
    rows = lines(before)
    assert len(rows) == 7 == len(after)
    for row in rows:
        if name == "atif":
            assert row == after[row["session_id"]]
        else:
            turns = "messages" if name == "openai" else "conversations"
            same = (turns, "tools", "completed")
            assert [row[key] for key in same] == [after[row["id"]][key] for key in same]


def document(*steps: dict[str, Any], **more: Any) -> dict[str, Any]:
    agent = {"name": "terminus-2", "version": "2", "model_name": "m"}
    numbered = [{"step_id": n, **step} for n, step in enumerate(steps, start=1)]
    return {
        "schema_version": "ATIF-v1.4",
        "session_id": "s",
        "agent": agent,
        "steps": numbered,
    } | more


def step(message: Any, source: str = "agent", **more: Any) -> dict[str, Any]:
    return {"source": source, "message": message, **more}


def test_a_document_of_another_program_is_a_record_with_all_that_it_says(tmp_path: Path) -> None:
    call = {"tool_call_id": "c", "function_name": "look", "arguments": {"at": "x", "n": 2**70}}
    picture = {"type": "image", "source": {"media_type": "image/png", "path": "a.png"}}
    seen = [{"type": "text", "text": "seen"}, picture]
    metrics = {"prompt_tokens": 9, "completion_tokens": 3, "cost_usd": 0.5, "logprobs": [-0.5]}
    inner = document(step("Go", "user"), step("Gone."), trajectory_id="sub")
    refers = [{"trajectory_id": "sub"}]
    given = document(
        step("Be good.", "system"),
        step("Do it", "user", timestamp=AT),
        step("Copied.", is_copied_context=True, observation={"results": [{"content": "$ ls"}]}),
        step(
            "",
            reasoning_content="Hm.",
            timestamp=AT,
            reasoning_effort="high",
            metrics=metrics,
            tool_calls=[call],
            observation={
                "results": [
                    {"source_call_id": "c", "content": seen, "subagent_trajectory_ref": refers}
                ]
            },
        ),
        step("Unlearnt.", extra={"loss": False, "mine": 1}),
        subagent_trajectories=[inner],
        notes="kept",
    )
    (tmp_path / "t.json").write_text(json.dumps(given, indent=1))
    end, run_dir = take(tmp_path, tmp_path / "t.json")
    assert (end.completed, end.unreadable) == (1, [])
    record = only_record(run_dir)
    assert [m.role for m in record.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert json.loads(record.messages[4].tool_calls[0].function.arguments) == call["arguments"]
    assert record.messages[5].provider_blocks.blocks == [picture]
    turn = record.turns[0]
    assert (len(record.turns), turn.usage.input_tokens, turn.cost_usd) == (2, 9, 0.5)
    assert (record.inner[0].key, record.inner[0].messages[1].content) == ("c", "Gone.")
    assert record.imported["no_loss"] == [2]
    assert (record.cost_usd, record.agent.name) == (None, "terminus-2")
    write_rows(tmp_path / "plain.jsonl", document(*given["steps"][:2], *given["steps"][4:]))
    _, plain = take(tmp_path, tmp_path / "plain.jsonl", name="plain")
    again = row_in("atif", only_record(plain))
    assert again["steps"] == [
        {**one, "step_id": n}
        for n, one in enumerate(
            [
                {k: v for k, v in one.items() if one["source"] == "agent" or k != "timestamp"}
                for one in (*given["steps"][:2], *given["steps"][4:])
            ],
            start=1,
        )
    ]
    marks = [m.get("weight") for m in row_in("openai", only_record(plain))["messages"]]
    assert marks == [None, None, 0]


def test_a_time_without_a_zone_is_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the machine: the same document would be another record elsewhere."""
    monkeypatch.setenv("TZ", "XST-5")
    time.tzset()
    try:
        assert parse_time("1970-01-01T00:01:00", "here") == 60
        assert parse_time("1970-01-01T00:01:00+00:01", "here") == 0
    finally:
        monkeypatch.undo()
        time.tzset()


def test_results_that_name_no_call_answer_those_of_their_step(tmp_path: Path) -> None:
    """Terminus-2 shows its terminal once for all commands of a step, as its own documents say."""

    def ran(*ids: str, results: list[dict[str, Any]]) -> dict[str, Any]:
        calls = [{"tool_call_id": id, "function_name": "keys", "arguments": {}} for id in ids]
        return step("", tool_calls=calls, observation={"results": results})

    refers = [{"session_id": "s2", "trajectory_path": "summary.json"}]
    given = document(
        step("Do it", "user"),
        ran("a", "b", results=[{"content": "$ both"}]),
        step(
            "Summed up.", "system", observation={"results": [{"subagent_trajectory_ref": refers}]}
        ),
        ran("c", "d", results=[{"content": "1"}, {"content": "2"}, {"content": "later"}]),
        ran("e", "f", results=[{"content": "six", "source_call_id": "f"}]),
    )
    write_rows(tmp_path / "t.jsonl", given)
    end, run_dir = take(tmp_path, tmp_path / "t.jsonl")
    assert not end.unreadable
    found = [(m.role, m.tool_call_id, m.content) for m in only_record(run_dir).messages]
    assert [one for one in found if one[0] != "assistant"] == [
        ("user", None, "Do it"),
        ("tool", "a", ""),
        ("tool", "b", "$ both"),
        ("system", None, "Summed up."),
        ("tool", "c", "1"),
        ("tool", "d", "2"),
        ("user", None, "later"),
        ("tool", "f", "six"),  # e was interrupted
    ]


def session(*rows: dict[str, Any], id: str = "s1") -> Iterable[dict[str, Any]]:
    """Lines of Claude Code, each after the one before, unless it says otherwise."""
    parent = None
    for n, row in enumerate(rows):
        uuid = row.get("uuid", f"u{n}")
        yield {"sessionId": id, "timestamp": AT, "uuid": uuid, "parentUuid": parent, **row}
        parent = uuid


def user_line(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "user", "message": {"role": "user", "content": content}, **more}


def wrote(id: str, block: dict[str, Any], stop: str = "tool_use", **more: Any) -> dict[str, Any]:
    usage = {"input_tokens": 5, "cache_read_input_tokens": 2, "output_tokens": 3}
    message: dict[str, Any] = {"id": id, "role": "assistant", "model": "claude-x"}
    message |= {"content": [block], "stop_reason": stop, "usage": usage}
    return {"type": "assistant", "message": message, **more}


def synthetic_line(block: dict[str, Any]) -> dict[str, Any]:
    """What Claude Code wrote in a model's place."""
    usage = {"input_tokens": 0, "output_tokens": 0}
    message: dict[str, Any] = {"id": secrets.token_hex(), "role": "assistant"}
    message |= {"model": "<synthetic>"}
    message |= {"content": [block], "stop_reason": "stop_sequence", "usage": usage}
    return {"type": "assistant", "message": message, "isApiErrorMessage": False}


def use(id: str, name: str = "Bash") -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": {"command": id}}


def gave(id: str, content: Any = "ok") -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": content}


@pytest.mark.parametrize("of_its_own", [True, False])
def test_a_session_of_claude_code_is_one_record(tmp_path: Path, of_its_own: bool) -> None:
    """Its subagents have files of their own, or, in earlier versions, lines in the same file."""
    text = {"type": "text", "text": "Done."}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    rows = session(
        user_line("First"),
        wrote("m0", {"type": "text", "text": "Hello"}, "end_turn", uuid="hello"),
        user_line("And", uuid="and"),
        {
            "type": "system",
            "subtype": "compact_boundary",
            "parentUuid": None,
            "compactMetadata": {
                "preservedMessages": {"anchorUuid": "top", "uuids": ["hello", "and"]}
            },
        },
        user_line("Summary", isCompactSummary=True, isVisibleInTranscriptOnly=True, uuid="top"),
        user_line("Rewound"),
        wrote("gone", text),
        user_line("Go on", parentUuid="top", uuid="on"),
        wrote("m1", thought),
        wrote("m1", use("a"), uuid="a"),
        user_line([gave("a")], uuid="ra"),  # it came while the reply was still being written
        wrote("m1", use("b", "Task"), parentUuid="a", uuid="b"),
        user_line([gave("b", [{"type": "text", "text": "found"}])], parentUuid="b"),
        wrote("cut", thought),
        wrote("cut2", thought, "end_turn"),
        wrote("x", text, isApiErrorMessage=True),
        wrote("retried", text),
        wrote("part", {"type": "text", "text": "Do"}, "end_turn"),
        wrote("y", text, isApiErrorMessage=True),
        user_line("Again"),
        wrote("open", thought),
        synthetic_line({"type": "text", "text": "Tw"}),
        user_line([{"type": "text", "text": "[Request interrupted by user]"}]),
        user_line("Now"),
        wrote("early", {"type": "text", "text": "Three"}),
        user_line([{"type": "text", "text": "[Request interrupted by user]"}]),
        synthetic_line({"type": "text", "text": "No response requested."}),
        user_line("End"),
        wrote("m2", text, "end_turn"),
    )
    side = [
        {**line, "uuid": f"side-{n}", "parentUuid": f"side-{n - 1}" if n else None}
        for n, line in enumerate(
            session(user_line("Search", isSidechain=True), wrote("s0", text, isSidechain=True))
        )
    ]
    subagents = tmp_path / "projects" / "p" / "s1" / "subagents"
    subagents.mkdir(parents=True)
    write_rows(tmp_path / "projects" / "p" / "s1.jsonl", *rows, *(() if of_its_own else side))
    if of_its_own:
        write_rows(subagents / "agent-1.jsonl", *side)
    end, run_dir = take(tmp_path, tmp_path / "projects")
    assert (end.completed, end.unreadable) == (1, [])
    record = only_record(run_dir)
    assert [m.content for m in record.messages] == [
        "Summary",
        "Hello",
        "And",
        "Go on",
        "",
        "ok",
        "found",
        "Do",
        "Again",
        "Tw",
        "[Request interrupted by user]",
        "Now",
        "Three",
        "[Request interrupted by user]",
        "No response requested.",
        "End",
        "Done.",
    ]
    assert record.messages[4].reasoning == "Hm."
    assert [call.id for call in record.messages[4].tool_calls] == ["a", "b"]
    assert [(turn.response_id, turn.finish_reason) for turn in record.turns] == [
        ("m1", "tool_calls"),
        ("part", "stop"),
        (None, "stop"),
        ("early", "tool_calls"),
        (None, "stop"),
        ("m2", "stop"),
    ]
    assert record.imported["no_loss"] == [2, 3, 4, 5]
    assert record.turns[0].usage.input_tokens == 7
    assert record.usage["input_tokens"] == 6 * 7, "no call was made for words in a model's place"
    assert [(one.name, one.messages[0].content) for one in record.inner] == [
        ("before compaction", "First"),
        ("subagent", "Search"),
    ]
    row = row_in("openai", record)
    assert [tool["function"]["name"] for tool in json.loads(row["tools"])] == ["Bash", "Task"]
    assert json.loads(row["metadata"])["imported"]["tools_called"] is True


def test_a_session_of_codex_is_one_record(tmp_path: Path) -> None:
    def item(**payload: Any) -> dict[str, Any]:
        return {"timestamp": AT, "type": "response_item", "payload": payload}

    def text(role: str, words: str) -> dict[str, Any]:
        kind = "output_text" if role == "assistant" else "input_text"
        return item(type="message", role=role, content=[{"type": kind, "text": words}])

    summary = text("user", "Summary")["payload"]
    counts = {"last_token_usage": {"input_tokens": 7, "output_tokens": 2}}
    meta = {"id": "c1", "cwd": "/w", "base_instructions": {"text": "Code."}, "cli_version": "1"}
    write_rows(
        tmp_path / "rollout-1.jsonl",
        {"timestamp": AT, "type": "session_meta", "payload": meta},
        {"timestamp": AT, "type": "turn_context", "payload": {"model": "gpt-x"}},
        text("user", "First"),
        text("assistant", "Hello"),
        {"timestamp": AT, "type": "compacted", "payload": {"replacement_history": [summary]}},
        item(
            type="reasoning",
            summary=[{"type": "summary_text", "text": "Hm."}],
            internal_chat_message_metadata_passthrough={"turn_id": "t"},
        ),
        item(type="function_call", name="sh", arguments='{"n":1}', call_id="a"),
        item(type="function_call", name="sh", arguments='{"n":2}', call_id="b"),
        item(type="function_call_output", call_id="b", output="two"),
        item(type="function_call_output", call_id="a", output="one"),
        {"timestamp": AT, "type": "event_msg", "payload": {"type": "token_count", "info": counts}},
        text("assistant", "Done."),
    )
    end, run_dir = take(tmp_path, tmp_path / "rollout-1.jsonl")
    assert (end.completed, end.unreadable) == (1, [])
    record = only_record(run_dir)
    assert [m.content for m in record.messages] == ["Code.", "Summary", "", "two", "one", "Done."]
    assert [call.id for call in record.messages[2].tool_calls] == ["a", "b"]
    assert [(turn.model, turn.usage and turn.usage.input_tokens) for turn in record.turns] == [
        ("gpt-x", 7),
        ("gpt-x", None),
    ]
    assert [one.name for one in record.inner] == ["before compaction"]
    assert row_in("hermes", record)["id"] == "c1"


def test_replies_that_were_cut_off_in_a_session_of_codex_are_not_learnt(tmp_path: Path) -> None:
    """Of those that broke off within their reasoning, requests of the real API show nothing."""
    lines: list[dict[str, Any]] = []

    def item(read: int | None = None, **payload: Any) -> None:
        sequence = {"metadata": {"sampled_through_sequence": read}} if read is not None else {}
        lines.append({"timestamp": AT, "type": "response_item", "payload": payload, **sequence})

    def thought(read: int, words: str) -> None:
        item(read, type="reasoning", summary=[{"type": "summary_text", "text": words}])

    def text(read: int, words: str) -> None:
        content = [{"type": "output_text", "text": words}]
        item(read, type="message", role="assistant", content=content)

    def user(words: str) -> None:
        item(type="message", role="user", content=[{"type": "input_text", "text": words}])

    def told(total: int) -> None:
        info = {"total_token_usage": {"total_tokens": total}}
        info["last_token_usage"] = {"input_tokens": total, "output_tokens": 1}
        payload = {"type": "token_count", "info": info}
        lines.append({"timestamp": AT, "type": "event_msg", "payload": payload})

    def whole(id: str) -> None:
        payload = {"response_id": id, "usage": {"input_tokens": 7, "output_tokens": 2}}
        lines.append({"timestamp": AT, "type": "token_usage_record", "payload": payload})

    meta = {"id": "c1", "cwd": "/w", "base_instructions": {"text": "Code."}, "cli_version": "1"}
    lines.append({"timestamp": AT, "type": "session_meta", "payload": meta})
    user("First")
    thought(1, "gone")
    thought(2, "Hm.")
    text(2, "One")
    whole("r1")
    told(9)
    user("Second")
    thought(6, "Part")
    text(6, "Two, ")  # a kill
    told(9)
    user("Go on.")
    text(9, "Th")  # an error; the agent asks again by itself
    told(9)
    text(10, "Three")
    whole("r3")
    user("And?")
    thought(14, "gone, too")
    user("Well?")
    text(15, "Four")
    item(15, type="function_call", name="sh", arguments="{}", call_id="a")
    whole("r4")
    user("So?")
    text(20, "Five")
    whole("r5")
    write_rows(tmp_path / "rollout-1.jsonl", *lines)
    end, run_dir = take(tmp_path, tmp_path / "rollout-1.jsonl")
    assert (end.completed, end.unreadable) == (1, [])
    record = only_record(run_dir)
    assert record.status == "completed"
    assert [
        (m.reasoning, m.content) for m in record.messages if m.role in ("assistant", "tool")
    ] == [
        ("Hm.", "One"),
        ("Part", "Two, "),
        (None, "Th\n\nThree"),
        (None, "Four"),
        (None, "aborted"),
        (None, "Five"),
    ]
    assert [
        (turn.response_id, turn.usage and turn.usage.input_tokens) for turn in record.turns
    ] == [
        ("r1", 7),
        (None, None),
        ("r3", 7),
        ("r4", 7),
        ("r5", 7),
    ]
    assert record.imported is not None
    assert record.imported["no_loss"] == [2, 3]
    write_rows(tmp_path / "rollout-1.jsonl", *lines[:9])
    _, killed = take(tmp_path / "killed", tmp_path / "rollout-1.jsonl")
    assert only_record(killed).status == "cancelled"


def test_what_cannot_be_read_is_named_and_the_rest_is_taken_once(tmp_path: Path) -> None:
    good = {"messages": [user_line("Hi")["message"], {"role": "assistant", "content": "Yes."}]}
    wrong = document(step("Hi", "user"), step(1))
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(
            [
                json.dumps(good),
                '{"messages": [{"role"',
                "",
                json.dumps({"messages": [{"role": "robot", "content": "Hi"}]}),
                "[1]",
                json.dumps(good | {"tools": 7}),
                json.dumps(good | {"id": 5}),
            ]
        )
    )
    write_rows(tmp_path / "atif.jsonl", wrong, document(step("No user.")))
    write_rows(tmp_path / "other.jsonl", {"some": "thing"})
    sources = [tmp_path / f"{name}.jsonl" for name in ("rows", "atif", "other")]
    end, run_dir = take(tmp_path, *sources)
    assert (end.completed, end.already_recorded) == (2, 0)
    named = [what.removeprefix(f"{tmp_path}/") for what in end.unreadable]
    assert [what.split(" ")[:2] for what in named] == [
        ["rows.jsonl:2:", "not"],
        ["rows.jsonl:4:", "messages[0].role:"],
        ["rows.jsonl:5:", "not"],
        ["rows.jsonl:6:", "tools:"],
        ["atif.jsonl:1:", "steps[1].message:"],
        ["atif.jsonl:2:", "no"],
        ["other.jsonl:", "its"],
    ]
    # Killed after a row, before its record.
    records = run_dir / "records.jsonl"
    records.write_bytes(records.read_bytes().splitlines(keepends=True)[0])
    again, _ = take(tmp_path, *sources)
    assert (again.completed, again.already_recorded, len(again.unreadable)) == (1, 1, 7)
    write_rows(
        tmp_path / "rows.jsonl",
        {**good, "messages": [*good["messages"], user_line("?")["message"]]},
    )
    changed, _ = take(tmp_path, tmp_path / "rows.jsonl")
    assert changed.changed == [f"{tmp_path}/rows.jsonl:1"]
    assert len(list(stored_records(run_dir))) == 2


def test_a_damaged_file_of_a_directory_is_named(tmp_path: Path) -> None:
    good = {"messages": [user_line("Hi")["message"], {"role": "assistant", "content": "Yes."}]}
    directory = tmp_path / "all"
    directory.mkdir()
    (directory / "a.jsonl.gz").write_bytes(gzip.compress(json.dumps(good).encode())[:-9])
    write_rows(directory / "b.jsonl", good)
    write_rows(directory / "result.json", {"of": "another program"})
    end, _ = take(tmp_path, directory)
    assert (end.completed, len(end.unreadable)) == (1, 1)
    assert "a.jsonl.gz: cannot read the dataset" in end.unreadable[0]
    with pytest.raises(DatasetError, match=r"none\.jsonl: no such file"):
        take(tmp_path, tmp_path / "none.jsonl", name="other")
    assert not (tmp_path / "runs" / "other").exists()


@pytest.mark.parametrize(
    ("column", "reason"),
    [("images", "has_images"), ("videos", "has_files"), ("audios", "has_files")],
)
def test_rows_with_pictures_in_a_column_are_no_text(
    tmp_path: Path, column: str, reason: str
) -> None:
    """As LLaMA-Factory and TRL have them: the texts have only places for them."""
    said = {"role": "assistant", "content": "A cat."}
    turns = [{"from": "human", "value": "<image>What is it?"}, {"from": "gpt", "value": "A cat."}]
    rows: list[dict[str, Any]] = [
        {"id": "m", "messages": [{"role": "user", "content": "What is it?"}, said]},
        {"id": "s", "conversations": turns},
    ]
    for row in rows:
        whole, plain = {**row, column: ["cat.png"]}, {**row, "id": row["id"] * 2, column: []}
        write_rows(tmp_path / f"{row['id']}.jsonl", whole, plain)
    done = run(tmp_path, "import", "m.jsonl", "s.jsonl", run_name="r")
    assert done.returncode == 0, done.stdout
    exports = tmp_path / "trajectories/r/exports"
    rejected = {row["id"]: row["reason"] for row in lines(exports / "rejects.jsonl")}
    assert rejected == {"m": reason, "s": reason}
    assert sorted(ids(tmp_path / "trajectories/r.jsonl")) == ["mm", "ss"]


@pytest.mark.slow
def test_an_imported_run_is_a_run_for_other_commands(tmp_path: Path) -> None:
    good = {"messages": [user_line("Hi")["message"], {"role": "assistant", "content": "Yes."}]}
    write_rows(tmp_path / "rows.jsonl", good, {"messages": []})
    imported = run(tmp_path, "import", "rows.jsonl", "--run_name=r", output_dir="trajectories")
    assert imported.returncode == 1, imported.stderr
    assert "rows.jsonl:2: messages: it must be a list of objects" in imported.stdout
    assert len(lines(tmp_path / "trajectories" / "r.jsonl")) == 1
    reward = "def brief(conversation, workspace, row):\n    return 0.25\n"
    (tmp_path / "reward.py").write_text(reward)
    (tmp_path / "trajectories").rename(tmp_path / "moved")
    for command in ("verify", "stats", "report", "status", "score", "export"):
        more = ["--reward=reward.py:brief"] if command == "score" else []
        done = run(tmp_path, command, "r", *more, output_dir="moved")
        assert done.returncode == 0, (command, done.stdout + done.stderr)


@pytest.mark.slow
def test_rows_of_the_hub_are_imported(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
    parquet.write_table(pa.table({"messages": [messages]}), tmp_path / "p.parquet")
    files = {"data/train-0.parquet": (tmp_path / "p.parquet").read_bytes()}
    with fake_hub(files) as (environment, _):
        env = {"HF_HOME": str(tmp_path / "home"), **environment}
        source = f"hf:{REPOSITORY}:train"
        done = run(tmp_path, "import", source, "--run_name=r", output_dir="runs", env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert only_record(tmp_path / "runs" / "r").messages[1].content == "Yes."


def _side(session: str, *, is_sidechain: bool = True) -> str:
    """A short session file of Claude Code, or that of a subagent."""
    head = {"sessionId": session, "isSidechain": is_sidechain, "timestamp": AT}
    rows = [
        {**head, "type": "user", "uuid": "a", "message": {"role": "user", "content": "Go."}},
        {
            **head,
            "type": "assistant",
            "uuid": "b",
            "parentUuid": "a",
            "message": {"id": "m", "role": "assistant", "model": "c", "content": "Done."},
        },
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_files_of_a_directory_are_left_out_only_where_a_session_has_them(tmp_path: Path) -> None:
    """Another format may have such a name, and a session's own file may be gone."""
    row = {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}
    directory = tmp_path / "d"
    for name, text in {
        "agent-rows.jsonl": json.dumps(row) + "\n",
        "s.jsonl": _side("s", is_sidechain=False),
        "agent-1.jsonl": _side("s"),
        "s/subagents/agent-2.jsonl": _side("s"),
        "agent-3.jsonl": _side("gone"),
        "lost/subagents/agent-4.jsonl": _side("lost"),
    }.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    end, run_dir = take(tmp_path, directory)
    assert not end.unreadable
    found = {record.id: len(record.inner) for record in stored_records(run_dir)}
    assert found == {"agent-rows-1": 0, "s": 2, "gone": 0, "lost": 0}


def _document(**more: Any) -> dict[str, Any]:
    steps = [{"source": "user", "message": "Go."}, {"source": "agent", "message": "Done."}]
    agent = {"name": "a", "version": "1"}
    return {"schema_version": "ATIF-v1.6", "agent": agent, "steps": steps, **more}


def test_subagents_that_one_call_started_are_all_kept(tmp_path: Path) -> None:
    names = ["u1", "u2"]
    reference = [{"trajectory_id": name} for name in names]
    document = _document(session_id="s")
    document["steps"][1] |= {
        "tool_calls": [{"tool_call_id": "c", "function_name": "f", "arguments": {}}],
        "observation": {
            "results": [
                {"source_call_id": "c", "content": "o", "subagent_trajectory_ref": reference}
            ]
        },
    }
    document["steps"].append({"source": "agent", "message": "End."})
    document["subagent_trajectories"] = [
        _document(trajectory_id=name, extra={"name": name}) for name in names
    ]
    file = tmp_path / "a.json"
    file.write_text(json.dumps(document))
    end, run_dir = take(tmp_path, file)
    assert not end.unreadable
    (after,) = lines(export_file(run_dir, "atif", tmp_path / "after"))
    kept = [(one["trajectory_id"], one["extra"]) for one in after["subagent_trajectories"]]
    assert kept == [(name, {"name": name}) for name in names]
    (result,) = after["steps"][1]["observation"]["results"]
    assert result["subagent_trajectory_ref"] == reference


def test_a_mistake_in_a_subagent_is_named_and_too_many_levels_are_refused(tmp_path: Path) -> None:
    wrong = _document(subagent_trajectories=[_document(steps=[{"source": "user"}])])
    deep = _document()
    for _ in range(200):
        deep = _document(subagent_trajectories=[deep])
    for name, document in {"wrong": wrong, "deep": deep}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    end, _ = take(tmp_path, tmp_path / "wrong.json", tmp_path / "deep.json")
    first, second = end.unreadable
    assert "wrong.json:1: subagent_trajectories[0].steps[0]: " in first
    assert "deep.json:1: subagent_trajectories: more than 20" in second


def test_all_that_is_unreadable_can_be_read_up(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"messages": 5}\n' * 30)
    end, _ = take(tmp_path, file)
    assert end.unreadable_file is not None
    assert end.unreadable_file.read_text().splitlines() == end.unreadable
    assert f"all of them: {end.unreadable_file}" in end.describe()
    assert "mend these places, or delete there what is no part" in end.describe()
    (tmp_path / "empty.jsonl").touch()
    end, _ = take(tmp_path, tmp_path / "empty.jsonl", name="s")
    assert end.unreadable == [f"{tmp_path}/empty.jsonl: it is empty"]


def test_an_import_into_a_run_of_its_own_or_a_bad_name_is_refused(
    stored: Path, tmp_path: Path
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "Q"}]}\n')
    before = sorted(stored.rglob("*"))
    with pytest.raises(ConfigError, match="import into another --run_name"):
        import_conversations([file], stored.name, stored.parent)
    assert sorted(stored.rglob("*")) == before
    with pytest.raises(ConfigError, match=r"--run_name: must be letters"):
        import_conversations([file], "../r", tmp_path / "runs")


def test_a_session_with_a_line_that_cannot_be_read_is_left_out_whole(tmp_path: Path) -> None:
    """Without the line it would be another conversation. Half an emoji is read: Node writes it."""
    done = wrote("m1", {"type": "text", "text": "Done."}, "end_turn")
    rows = [json.dumps(row) for row in session(user_line("Hello"), user_line("Cut HERE."), done)]
    torn = [rows[0], rows[1][:40], rows[2]]
    odd = [rows[0], rows[1].replace('"user"', '"robot"', 1), rows[2]]
    empty = [rows[0], rows[1].replace('"message": {', '"message": 7, "x": {'), rows[2]]
    files = {"half": rows, "torn": torn, "odd": odd, "list": [*rows, "[1]"], "empty": empty}
    for name, some in files.items():
        text = "\n".join(some).replace('"s1"', json.dumps(name)).replace("HERE", "\\ud83d")
        (tmp_path / f"{name}.jsonl").write_text(text)
    end, run_dir = take(tmp_path, *[tmp_path / f"{name}.jsonl" for name in files])
    record = only_record(run_dir)
    assert [m.content for m in record.messages] == ["Hello", "Cut \ufffd.", "Done."]
    assert [what.rpartition("/")[2].partition(": ")[0] for what in end.unreadable] == [
        "torn.jsonl:2",
        "odd.jsonl:2",
        "list.jsonl:4",
        "empty.jsonl:2",
    ]
    assert "type: 'robot' with a message" in end.unreadable[1]
    assert "its whole session is left out" in end.unreadable[0]


def test_a_subagent_with_a_line_that_cannot_be_read_is_left_out_whole(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_text(_side("s", is_sidechain=False))
    subagents = tmp_path / "s" / "subagents"
    subagents.mkdir(parents=True)
    for name, line in {"a": "{", "b": "7", "c": ""}.items():
        first, rest = _side("s").split("\n", 1)
        (subagents / f"agent-{name}.jsonl").write_text(f"{first}\n{line}\n{rest}")
    end, run_dir = take(tmp_path, tmp_path / "s.jsonl")
    assert len(only_record(run_dir).inner) == 1
    assert [what.count("the whole subagent is left out") for what in end.unreadable] == [1, 1]
    assert "agent-a.jsonl:2: not JSON" in end.unreadable[0]


SHORT = {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}


def test_equal_conversations_without_ids_are_one_record(tmp_path: Path) -> None:
    other = {"messages": [*SHORT["messages"], {"role": "user", "content": "More?"}]}
    rows = [SHORT, other, SHORT, {**SHORT, "id": "x"}]
    write_rows(tmp_path / "a.jsonl", *rows)
    write_rows(tmp_path / "b.jsonl", SHORT)
    end, run_dir = take(tmp_path, tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert (end.completed, end.ended_early, end.repeated, end.already_recorded) == (2, 1, 2, 0)
    assert "2 equal to one before them, left out" in end.describe()
    assert [record.id for record in stored_records(run_dir)] == ["a-1", "a-2", "x"]
    assert [row["id"] for row in lines(run_dir / "imported/conversations.jsonl")] == [
        "a-1",
        "a-2",
        "x",
    ]
    again, _ = take(tmp_path, tmp_path / "b.jsonl", tmp_path / "a.jsonl")
    assert (again.completed, again.already_recorded, again.changed) == (0, 5, [])
    # Killed after a row, before its record: the record still belongs to the row.
    for file in run_dir.glob("records.*"):
        file.unlink()
    again, _ = take(tmp_path, tmp_path / "b.jsonl", tmp_path / "a.jsonl")
    assert (again.completed, again.ended_early, again.repeated) == (2, 1, 2)
    assert {record.id: record.row for record in stored_records(run_dir)} == {
        row["id"]: row for row in lines(run_dir / "imported/conversations.jsonl")
    }
    done = run(tmp_path, "import", "a.jsonl", "--run_name=fresh", output_dir="runs")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no longer in the dataset" not in done.stdout + done.stderr


def test_places_say_whether_they_are_lines_elements_or_rows(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    wrong = {"messages": [{"role": "bot", "content": "x"}]}
    (tmp_path / "a.json").write_text(json.dumps([SHORT, wrong], indent=1))
    (tmp_path / "b.unknown").write_text(json.dumps([SHORT, wrong]))
    write_rows(tmp_path / "c.json", SHORT, wrong)
    parquet.write_table(pa.table({"messages": [wrong["messages"]]}), tmp_path / "d.parquet")
    names = ("a.json", "b.unknown", "c.json", "d.parquet")
    end, run_dir = take(tmp_path, *[tmp_path / name for name in names])
    assert [what.removeprefix(f"{tmp_path}/").partition(": ")[0] for what in end.unreadable] == [
        "a.json, element 2",
        "b.unknown, element 2",
        "c.json:2",
        "d.parquet, row 1",
    ]
    # An earlier version named elements as lines: a changed one is still recognized.
    rows = run_dir / "imported/conversations.jsonl"
    rows.write_text(rows.read_text().replace("a.json, element 1", "a.json:1"))
    (tmp_path / "a.json").write_text(json.dumps([{**SHORT, "id": "other"}]))
    end, _ = take(tmp_path, tmp_path / "a.json")
    assert end.changed == [f"{tmp_path}/a.json, element 1"]


@pytest.mark.parametrize("name", ["a.json", "a.traj", "a.txt", "a", "a.jsonl"])
def test_a_document_is_read_under_any_name(tmp_path: Path, name: str) -> None:
    for n, indent in enumerate((None, 1, "\t")):
        (tmp_path / name).write_text(json.dumps({**SHORT, "id": str(n)}, indent=indent))
        end, _ = take(tmp_path, tmp_path / name, name=f"r{n}")
        assert (end.completed, end.unreadable) == (1, [])
    text = json.dumps(SHORT, indent=1)
    (tmp_path / name).write_text(text[:-9])
    end, _ = take(tmp_path, tmp_path / name, name="cut")
    (wrong,) = end.unreadable
    assert wrong.startswith(f"{tmp_path}/{name}:9: not JSON")
    (tmp_path / name).write_text(
        f'{{"messages": [\n{json.dumps(SHORT)}\n'
    )  # the first line is torn
    end, _ = take(tmp_path, tmp_path / name, name="torn")
    assert (end.completed, len(end.unreadable)) == (1, 1)


def test_a_trajectory_of_swe_agent_is_its_history(tmp_path: Path) -> None:
    history = [
        {"role": "system", "content": "Fix it.", "agent": "main", "message_type": "system_prompt"},
        {"role": "user", "content": [{"type": "text", "text": "Bug."}], "agent": "main"},
        {
            "role": "assistant",
            "content": "I look.",
            "thought": "I look.",
            "action": "ls",
            "agent": "main",
            "message_type": "action",
            "thinking_blocks": [],
            "tool_calls": [{"function": {"name": "bash", "arguments": "{}"}, "id": "c"}],
        },
        {
            "role": "tool",
            "content": "a.py",
            "agent": "main",
            "message_type": "observation",
            "tool_call_ids": ["c"],
        },
    ]
    given = {"trajectory": [{"action": "ls"}], "history": history, "info": {"exit_status": "x"}}
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "case__1.traj").write_text(json.dumps(given, indent=2))
    end, run_dir = take(tmp_path, tmp_path / "all")
    assert not end.unreadable
    record = only_record(run_dir)
    assert [m.content for m in record.messages] == ["Fix it.", "Bug.", "I look.", "a.py"]
    assert record.messages[3].name == "bash"


def test_pictures_that_are_bytes_in_a_table_are_noted(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name, picture in {"a": b"png", "b": {"bytes": b"png", "path": None}}.items():
        table = pa.table({"messages": [SHORT["messages"]], "image": [picture]})
        parquet.write_table(table, tmp_path / f"{name}.parquet")
        _, run_dir = take(tmp_path, tmp_path / f"{name}.parquet", name=name)
        (part,) = only_record(run_dir).messages[0].provider_blocks.blocks
        assert part == {"type": "image", "source": "bytes"}


def test_a_row_with_two_conversations_is_read_only_as_the_user_says(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "Other?"}, {"from": "gpt", "value": "O."}]
    write_rows(
        tmp_path / "a.jsonl", {**SHORT, "conversations": None}, {**SHORT, "conversations": turns}
    )
    end, _ = take(tmp_path, tmp_path / "a.jsonl")
    assert (end.completed, end.unreadable) == (
        1,
        [f"{tmp_path}/a.jsonl:2: it is also a row of sharegpt; --format says which is read"],
    )
    end, _, _ = import_conversations([tmp_path / "a.jsonl"], "s", tmp_path, format="sharegpt")
    assert (end.completed, len(end.unreadable)) == (1, 1)
    write_rows(tmp_path / "mixed.jsonl", SHORT, {"conversations": turns})
    end, run_dir = take(tmp_path, tmp_path / "mixed.jsonl", name="mixed")
    assert (end.completed, end.unreadable) == (2, [])
    formats = [record.imported["format"] for record in stored_records(run_dir)]  # type: ignore[index]
    assert formats == ["openai", "sharegpt"]


@pytest.mark.parametrize("kind", ["server_tool_use", "mcp_tool_use", "image", "hologram", None])
def test_a_reply_of_claude_code_with_a_part_that_no_row_holds_is_refused(
    tmp_path: Path, kind: str | None
) -> None:
    """Its row would lack what the provider's tool did, or what nobody knows."""
    text = {"type": "text", "text": "found"}
    part: dict[str, Any] = {"type": kind, "id": "x", "name": "web_search", "input": {}}
    rows = session(user_line("Find it."), wrote("m1", part), wrote("m1", text, stop="end_turn"))
    (tmp_path / "p").mkdir()
    write_rows(tmp_path / "p" / "s1.jsonl", *rows)
    end, run_dir = take(tmp_path, tmp_path / "p")
    assert (end.completed, len(end.unreadable)) == (0, 1)
    assert f"message.content[0]: a part of type {kind!r}" in str(end.unreadable[0])
    assert not lines(run_dir / "records.jsonl")


def _answer(text: str, **columns: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Q?"}, {"role": "assistant", "content": text}]
    return {"messages": messages, **columns}


def test_conversations_with_other_marks_and_columns_are_not_equal(tmp_path: Path) -> None:
    marked: list[dict[str, Any]] = [
        {"weight": 0},
        {"weight": 1},
        {"score": 0.1},
        {"score": 0.9},
        {"label": False},
        {},
    ]
    write_rows(tmp_path / "a.jsonl", *[_answer("A.", **one) for one in (*marked, *marked)])
    end, run_dir = take(tmp_path, tmp_path / "a.jsonl")
    assert (end.completed, end.repeated) == (6, 6)
    again, _ = take(tmp_path, tmp_path / "a.jsonl")
    assert (again.already_recorded, again.changed) == (12, [])
    quiet = [(record.imported or {}).get("no_loss") for record in stored_records(run_dir)]
    assert quiet == [[1], None, None, None, [1], None]


def test_rows_of_an_earlier_version_are_known_by_their_places(tmp_path: Path) -> None:
    """Their digests took no marks and columns."""
    write_rows(tmp_path / "a.jsonl", _answer("A.", score=1), _answer("B.", weight=0))
    _, run_dir = take(tmp_path, tmp_path / "a.jsonl")
    found = [read for _, read in read_conversations(tmp_path / "a.jsonl", None)]
    path = run_dir / "imported/conversations.jsonl"
    digests = [digest_of_messages(read) for read in found if isinstance(read, SourceConversation)]
    old = [
        {**row, "imported_digest": digest} for row, digest in zip(lines(path), digests, strict=True)
    ]
    write_rows(path, *old)
    for file in run_dir.glob("records.*"):
        file.unlink()
    end, _ = take(tmp_path, tmp_path / "a.jsonl")
    assert (end.completed, end.changed) == (2, [])
    assert lines(path) == old


def test_bad_examples_of_kto_are_bad_in_kto_and_in_no_other_format(tmp_path: Path) -> None:
    """Of two equal conversations the one that is to be learnt stays."""
    rows = [
        _answer("Bad.", label=False, id="bad"),
        _answer("Good.", label=True, id="good"),
        _answer("Both.", weight=0, id="off"),
        _answer("Both.", weight=1, id="on"),
        {
            "id": "tag",
            "conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "B2."}],
            "kto_tag": False,
        },
    ]
    write_rows(tmp_path / "a.jsonl", *rows)
    done = run(tmp_path, "import", "a.jsonl", run_name="r")
    assert done.returncode == 0, done.stdout + done.stderr
    assert ids(tmp_path / "trajectories/r.jsonl") == ["good", "on"]
    rejected = lines(tmp_path / "trajectories/r/exports/rejects.jsonl")
    assert {row["id"]: row["reason"] for row in rejected} == dict.fromkeys(
        ("bad", "off", "tag"), "all_masked"
    )
    for name in ("openai", "hermes", "llamafactory"):
        done = run(tmp_path, "export", "r", format=name, output=f"out/{name}")
        assert ids(tmp_path / f"out/{name}/{name}/train.jsonl") == ["good", "on"], done.stderr
    run(tmp_path, "export", "r", format="kto", output="out/kto")
    assert {row["id"]: row["label"] for row in lines(tmp_path / "out/kto/kto/train.jsonl")} == {
        "bad": False,
        "good": True,
        "tag": False,
    }


def test_a_picture_of_the_system_has_its_row_rejected(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "S"}, {"type": "image_url", "image_url": {"url": "u"}}]
    rows = [_answer("A.", id="message"), _answer("A.", id="column", system=parts)]
    rows[0]["messages"].insert(0, {"role": "system", "content": parts})
    rows += [
        _answer("A.", id=column, **{column: value})
        for column, value in {
            "image_path": "a",
            "photo": {"bytes": None, "path": "a.png"},
            "media": ["m"],
            "video_url": "u",
            "front": [{"bytes": None, "path": "a"}],
            "icon": "data:image/a",
        }.items()
    ]
    write_rows(tmp_path / "a.jsonl", *rows)
    done = run(tmp_path, "import", "a.jsonl", run_name="r")
    assert done.returncode == 0, done.stdout + done.stderr
    rejected = lines(tmp_path / "trajectories/r/exports/rejects.jsonl")
    files = ("media", "video_url", "front", "icon")
    assert {row["id"]: row["reason"] for row in rejected} == {
        row["id"]: "has_files" if row["id"] in files else "has_images" for row in rows
    }


def test_a_user_says_which_columns_are_metadata(tmp_path: Path) -> None:
    more = {"generations": ["a"], "label": "3", "weight": 0.5, "prompt": "Other.", "img": "a.png"}
    write_rows(tmp_path / "a.jsonl", _answer("A.", **more))
    done = run(tmp_path, "import", "a.jsonl", run_name="r")
    assert done.returncode == 1
    assert "a.jsonl:1: generations: the column is unknown: ['a']; so are prompt;" in done.stdout
    columns = "generations,weight, label,prompt,img"
    done = run(tmp_path, "import", "a.jsonl", run_name="r", metadata=columns)
    assert done.returncode == 0, done.stdout + done.stderr
    row = only_record(tmp_path / "trajectories/r").row
    kept = {"label": "3", "weight": 0.5, "img": "a.png"}
    assert {name: row.get(name) for name in more} == {**dict.fromkeys(more), **kept, "prompt": "Q?"}
    end, _, _ = import_conversations(
        [tmp_path / "a.jsonl"], "api", tmp_path, metadata=["weight", "img"]
    )
    (said,) = end.unreadable
    assert said.endswith("add --metadata=generations,prompt")


def test_a_torn_value_of_a_table_spoils_its_row_only(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [json.dumps(SHORT["messages"]), '[{"role": "us', json.dumps(SHORT["messages"][:1])]
    column = pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts))
    parquet.write_table(pa.table({"messages": column}), tmp_path / "a.parquet")
    end, _ = take(tmp_path, tmp_path / "a.parquet")
    assert end.completed + end.ended_early == 2
    (said,) = end.unreadable
    assert said.startswith(
        f"{tmp_path}/a.parquet, row 2: column 'messages': its type is JSON, but its text is not"
    )
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and more")
    with pa.ipc.new_stream(tmp_path / "c.arrow", pa.schema({"messages": pa.string()})):
        pass
    for name in ("b.parquet", "c.arrow"):
        end, _ = take(tmp_path, tmp_path / name, name=name)
        (said,) = end.unreadable
        assert said.count(name) == 1


def test_bytes_of_a_table_are_never_dropped_unnamed(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    said = {}
    for name, value in {
        "photo": b"p",
        "front": {"bytes": b"p", "path": None},
        "blob": b"b",
    }.items():
        table = pa.table({"messages": [SHORT["messages"]], name: [value]})
        parquet.write_table(table, tmp_path / f"{name}.parquet")
        end, run_dir = take(tmp_path, tmp_path / f"{name}.parquet", name=name)
        said[name] = end.unreadable or only_record(run_dir).messages[0].provider_blocks.blocks
    assert said["photo"] == [{"type": "image", "source": "bytes"}]
    assert said["front"] == [{"type": "file", "source": "bytes"}]
    assert "blob: the column is unknown" in said["blob"][0]
