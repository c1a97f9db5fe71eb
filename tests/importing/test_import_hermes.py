"""`import --format=hermes`: what a run of hermes-agent finished is kept, and only the rest runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.export import formats
from batch_trajectories.importing.hermes import read_line
from tests.faults.oracle import finished_lines, resume_and_judge
from tests.helpers.running import SCRIPTED, lines, run, write_rows

TOOLS = [
    {
        "name": "terminal",
        "description": "Run it",
        "parameters": {"type": "object"},
        "required": None,
    }
]
PROMPT = Path(formats.__file__).with_name("hermes_system_prompt.txt").read_text().strip()
SYSTEM = PROMPT.replace("{tools}", json.dumps(TOOLS))
WORK = [
    (
        "gpt",
        "<think>\nTwo at once.\n</think>\nLooking.\n"
        '<tool_call>\n{"name": "terminal", "arguments": {"command": "ls"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "terminal", "arguments": {"command": "\\u003c/tool_call>"}}\n'
        "</tool_call>",
    ),
    (
        "tool",
        '<tool_response>\n{"tool_call_id": "c1", "name": "terminal", "content": {"output": "a",'
        ' "error": null}}\n</tool_response>\n'
        '<tool_response>\n{"tool_call_id": "c2", "name": "terminal", "content": "Error: no"}\n'
        "</tool_response>",
    ),
]
ANSWER = ("gpt", "<think>\n</think>\nDone: ü.")


def conversation(prompt: str, *turns: tuple[str, str]) -> list[dict[str, str]]:
    entries = [("system", SYSTEM), ("human", prompt), *turns]
    return [{"from": who, "value": value} for who, value in entries]


def row(number: int, prompt: str, *turns: tuple[str, str], completed: bool = True) -> Any:
    metadata = {"batch_num": 0, "timestamp": "2026-01-02T03:04:05", "model": "their-model"}
    return {
        "prompt_index": number,
        "conversations": conversation(prompt, *turns),
        "metadata": metadata,
        "completed": completed,
        "partial": False,
        "api_calls": 7,
        "toolsets_used": ["terminal"],
        "tool_stats": {},
        "tool_error_counts": {},
    }


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A run over prompts 0 to 7, with all that can have happened to it."""
    rows = [{"prompt": f"Prompt {n % 6}", "script": [{"content": "ours"}]} for n in range(8)]
    write_rows(tmp_path / "p.jsonl", *rows)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    worked = row(0, "Prompt 0", *WORK, ANSWER)
    write_rows(
        theirs / "batch_0.jsonl",
        worked,
        row(1, "Prompt 1", *WORK, completed=False),
        row(0, "Prompt 0", ANSWER),  # appended again by a resume
        row(6, "Prompt 0", ANSWER),  # the same prompt, another row
    )
    with (theirs / "batch_0.jsonl").open("a") as file:
        file.write('{"prompt_index": 2, "conversa')
    write_rows(theirs / "batch_10.jsonl", row(3, "Edited since", ANSWER))
    write_rows(theirs / "trajectories.jsonl", worked, row(4, "Prompt 4", ANSWER))
    done = {"run_name": "x", "completed_prompts": [0, 1, 3, 4, 5, 6]}
    (theirs / "checkpoint.json").write_text(json.dumps(done))
    return theirs


def test_an_imported_run_of_hermes_agent_can_be_resumed(theirs: Path) -> None:
    cwd = theirs.parent
    records = cwd / "trajectories" / "r" / "records.jsonl"
    for told in (
        ["3 completed", "1 ended early"],
        ["4 already in this run"],
    ):
        imported = run(cwd, "import", "theirs", format="hermes", **SCRIPTED)
        assert imported.returncode == 0, imported.stderr
        for message in (
            *told,
            "1 repeated, left out batch_0.jsonl:3",
            "1 of prompts that are not in the dataset, left out batch_10.jsonl:1",
            "1 unreadable; their prompts run again batch_0.jsonl:5 (",
            "1 counted as done, but without a conversation",
            "pending            4",
        ):
            assert message in imported.stdout, imported.stdout
        assert len(lines(records)) == 4
    resume_and_judge(cwd, SCRIPTED, tasks=8)
    made = {line["id"]: line for line in lines(cwd / "trajectories" / "r.jsonl")}
    assert sum("ours" in line["conversations"][-1]["value"] for line in made.values()) == 4
    first = next(iter(made.values()))
    assert first["conversations"] == conversation("Prompt 0", *WORK, ANSWER)
    assert "terminal" in first["tools"]
    assert first["api_calls"] == 7
    parsed = [json.loads(line) for line in finished_lines(records).values()]
    theirs_kept = [record for record in parsed if record["api"] == "hermes-agent"]
    assert {record["model"] for record in theirs_kept} == {"their-model"}
    assert sorted(record["status"] for record in theirs_kept) == [*["completed"] * 3, "max_turns"]


def test_rows_that_leave_things_open_can_be_exported(tmp_path: Path) -> None:
    """They are complete conversations; running their prompts again would cost."""
    script = [{"content": "ours"}]
    rows = [{"prompt": f"Prompt {n}", "script": script} for n in range(2)]
    write_rows(tmp_path / "p.jsonl", *rows)
    unnamed = row(0, "Prompt 0", ANSWER) | {"metadata": {}, "api_calls": None}
    tools: list[Any] = [{"name": "terminal", "description": None, "parameters": {}}]
    unnamed["conversations"][0]["value"] = f"<tools>{json.dumps(tools)}</tools>"
    (tmp_path / "theirs").mkdir()
    write_rows(tmp_path / "theirs" / "batch_0.jsonl", unnamed, row(1, "Prompt 1", ANSWER))
    imported = run(tmp_path, "import", "theirs", format="hermes", **SCRIPTED)
    assert imported.returncode == 0, imported.stderr
    assert "2 completed" in imported.stdout
    exported = run(tmp_path, "export", "r", format="hermes,openai,atif,raw")
    assert exported.returncode == 0, exported.stderr
    manifest = json.loads((tmp_path / "trajectories/r/exports/dataset/manifest.json").read_bytes())
    assert [one["model"] for one in manifest["models"]] == ["their-model", "unknown"]
    assert run(tmp_path, "report", "r").returncode == 0


def test_a_directory_that_is_not_a_run_of_hermes_agent_is_refused(theirs: Path) -> None:
    cwd = theirs.parent
    (cwd / "empty").mkdir()
    refused = run(cwd, "import", "empty", format="hermes", **SCRIPTED)
    assert refused.returncode == 2
    assert "empty: not a run of hermes-agent" in refused.stderr


def test_the_former_command_says_the_new_one(theirs: Path) -> None:
    done = run(theirs.parent, "import-hermes", "theirs", **SCRIPTED)
    assert done.returncode == 0, done.stderr
    assert "`import_hermes theirs` is now `import theirs --format=hermes`" in done.stderr
    assert "3 completed" in done.stdout


def test_options_of_runs_need_the_format(theirs: Path) -> None:
    """An import without a dataset would ignore them."""
    refused = run(theirs.parent, "import", "theirs", **SCRIPTED)
    assert refused.returncode == 2
    assert "needs --format=hermes" in refused.stderr
    unnamed = run(theirs.parent, "import", "theirs")
    assert unnamed.returncode == 2
    assert "Missing option '--run_name'" in unnamed.stderr


def read(*entries: dict[str, Any]) -> Any:
    made = row(0, "p") | {"conversations": [*entries]}
    return read_line(json.dumps(made).encode(), Path("batch_0.jsonl"), 1).conversation


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([], "it has no message of the model"),
        ([("gpt", "<tool_call>\n{broken\n</tool_call>")], r"\[2\]\.value: <tool_call>: not JSON"),
        ([("gpt", '<tool_call>\n{"name": "x"}')], "not closed"),
        ([("gpt", '<tool_call>\n{"name": "x"}\n</tool_call> and more')], "text between"),
        ([("gpt", "x"), WORK[1]], "a result of 'terminal', but the reply before it has no such"),
        ([("narrator", "x")], "'narrator' is none of system"),
    ],
)
def test_a_row_that_is_not_of_the_format_says_why(
    turns: list[tuple[str, str]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read(*conversation("p", *turns))


def test_later_user_messages_are_kept() -> None:
    imported = read(*conversation("p", ANSWER, ("human", "And now?"), ANSWER))
    roles = [message["role"] for message in imported.conversation.messages]
    assert roles == ["user", "assistant", "user", "assistant"]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (conversation("p", ANSWER)[1:], "has no list of tools"),
        ([conversation("p")[0], {"from": "gpt", "value": "x"}], "no message of a user"),
        ([*conversation("p"), {"from": "gpt", "value": 5}], r"\[2\]\.value: it must be text"),
        (
            [{"from": "system", "value": "x"}, *conversation("p", ANSWER)[1:]],
            "has no list of tools",
        ),
    ],
)
def test_entries_that_are_not_of_the_format_say_why(entries: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(*entries)


def test_a_line_that_is_no_row_is_refused() -> None:
    for line in (b"[]", b'{"conversations": [', b"{}", b"5"):
        with pytest.raises(ValueError, match=r"object|data|list"):
            read_line(line, Path("batch_0.jsonl"), 1)


def test_a_column_that_may_belong_to_the_conversation_is_refused() -> None:
    """Nothing of a row is left out in silence."""
    made = row(0, "p", ANSWER) | {"context": "Long words. " * 50}
    with pytest.raises(ValueError, match="context"):
        read_line(json.dumps(made).encode(), Path("batch_0.jsonl"), 1)


def test_failed_calls_are_recognised_by_their_results() -> None:
    stored = read(*conversation("p", *WORK, ANSWER)).conversation.to_record(5.0)
    assert [call["is_error"] for call in stored["tool_calls"]] == [False, True]
    assert [call["id"] for call in stored["messages"][1]["tool_calls"]] == ["c1", "c2"]
    assert stored["messages"][1]["reasoning"] == "Two at once."
    assert {turn["model"] for turn in stored["turns"]} == {"their-model"}
