"""`import` of sessions loses nothing in silence.

Each text of a realistic session is replaced by a mark, one after the other. The mark must be in the
record, or the session is refused with the name of the field, or the field is among those that are
known to say nothing of the conversation. The same is done with fields that no format has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.importing import claude_code_fields, codex_fields
from batch_trajectories.importing.conversation import SourceConversation, SourceRow, Unreadable
from batch_trajectories.importing.readers import atif, claude_code, codex, openai, sharegpt
from tests.helpers.running import ROOT

AT = "2026-11-24T04:40:26.659Z"
MARK = "ZQMARKQZ"

Rows = list[dict[str, Any]]
At = tuple[str | int, ...]


def session_of(reader: Any, name: str) -> Callable[[Path, Rows], SourceConversation]:
    def read(directory: Path, rows: Rows) -> SourceConversation:
        path = directory / f"{name}.jsonl"
        found: SourceConversation = reader.READER.session(
            path, [SourceRow(*one) for one in enumerate(rows, 1)]
        )
        return found

    return read


def row_of(reader: Any) -> Callable[[Path, Rows], SourceConversation]:
    def read(directory: Path, rows: Rows) -> SourceConversation:
        del directory
        found: SourceConversation = reader.READER.row(rows[0])
        return found

    return read


def describe_record(found: SourceConversation) -> str:
    """All that a record says of it, and what was left out and named."""
    content = [found.conversation.to_record(0.0), found.tools, found.facts, found.columns]
    return json.dumps([content, found.imported, found.agent, found.id, [*map(str, found.problems)]])


def texts(value: Any, at: At = ()) -> Iterator[At]:
    """Where the texts are."""
    members: Any = ()
    if isinstance(value, dict):
        members = value.items()
    elif isinstance(value, list):
        members = enumerate(value)
    elif isinstance(value, str):
        yield at
    for key, one in members:
        yield from texts(one, (*at, key))


def objects(value: Any, at: At = ()) -> Iterator[At]:
    """Where the objects are."""
    if isinstance(value, dict):
        yield at
        for key, one in value.items():
            yield from objects(one, (*at, key))
    elif isinstance(value, list):
        for n, one in enumerate(value):
            yield from objects(one, (*at, n))


def change_row(rows: Rows, at: At, value: Any) -> Rows:
    copy: Any = deepcopy(rows)
    place = copy
    for key in at[:-1]:
        place = place[key]
    place[at[-1]] = value
    return copy  # type: ignore[no-any-return]


def path_of(rows: Rows, at: At) -> str:
    """What its line is, and the keys of a place, without numbers."""
    row = rows[int(at[0])]
    inner = row.get("attachment") or row.get("payload") or {}
    kind = inner.get("type") or row.get("subtype") or row.get("type")
    return f"{kind}:" + ".".join(str(key) for key in at if isinstance(key, str))


def is_aside(path: str, aside: Sequence[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in aside)


def is_named(refusal: str, at: At) -> bool:
    """Whether a refusal names the field, or shows what is wrong with it."""
    keys = [str(key) for key in at if isinstance(key, str)]
    return MARK in refusal or any(key in refusal for key in keys)


def user_line(uuid: str, parent: str | None, content: Any, **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": content}
    return line("user", uuid, parent, message=message, **more)


def line(kind: str, uuid: str, parent: str | None, **more: Any) -> dict[str, Any]:
    head = {"sessionId": "s", "timestamp": AT, "uuid": uuid, "parentUuid": parent, "version": "2"}
    return {"type": kind, **head, "cwd": "/w", "gitBranch": "main", "userType": "external", **more}


def wrote(uuid: str, parent: str, id: str, content: Any, **more: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"id": id, "type": "message", "role": "assistant"}
    message["model"] = "claude-x"
    message |= {"content": content, "stop_reason": "end_turn", "stop_sequence": None}
    message["usage"] = {"input_tokens": 5, "output_tokens": 3, "service_tier": "standard"}
    return line("assistant", uuid, parent, message=message, requestId="req", **more)


PICTURE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
CLAUDE_CODE: Rows = [
    {"type": "queue-operation", "operation": "enqueue", "sessionId": "s", "content": "later"},
    user_line(
        "u1", None, "Do it", promptId="p", permissionMode="default", origin={"kind": "human"}
    ),
    {
        "type": "attachment",
        "attachment": {"type": "skill_listing", "content": "- a skill", "names": ["a"]},
        "uuid": "t0",
        "parentUuid": "u1",
        "sessionId": "s",
        "timestamp": AT,
    },
    wrote("a1", "t0", "m1", [{"type": "thinking", "thinking": "Hm.", "signature": "sig"}]),
    wrote("a2", "a1", "m1", [{"type": "text", "text": "I look."}], effort="high"),
    wrote(
        "a3",
        "a2",
        "m1",
        [
            {
                "type": "tool_use",
                "id": "c1",
                "name": "Read",
                "input": {"file": "a"},
                "caller": {"type": "direct"},
            }
        ],
    ),
    user_line(
        "r1",
        "a3",
        [
            {
                "type": "tool_result",
                "tool_use_id": "c1",
                "is_error": False,
                "content": [
                    {"type": "text", "text": "seen"},
                    {"type": "image", "source": PICTURE},
                    {"type": "tool_reference", "tool_name": "Write"},
                ],
            }
        ],
        toolUseResult={"file": {"content": "seen"}},
        sourceToolAssistantUUID="a3",
    ),
    {
        "type": "attachment",
        "attachment": {
            "type": "queued_command",
            "commandMode": "prompt",
            "origin": {"kind": "human"},
            "prompt": [{"type": "text", "text": "And that"}, {"type": "image", "source": PICTURE}],
        },
        "uuid": "q1",
        "parentUuid": "r1",
        "sessionId": "s",
        "timestamp": AT,
    },
    line("system", "y1", "q1", subtype="local_command", content="<local-command-stdout>o"),
    line("system", "y2", "y1", subtype="turn_duration", durationMs=5, slug="x"),
    user_line("u2", "y2", [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]),
    wrote("a4", "u2", "m2", "Done."),
    {"type": "ai-title", "aiTitle": "A title", "sessionId": "s"},
]


def item(**payload: Any) -> dict[str, Any]:
    return {"timestamp": AT, "type": "response_item", "payload": payload}


def event(**payload: Any) -> dict[str, Any]:
    return {"timestamp": AT, "type": "event_msg", "payload": payload}


META = {"id": "c", "cwd": "/w", "cli_version": "1", "base_instructions": {"text": "Code."}}
CODEX: Rows = [
    {"timestamp": AT, "type": "session_meta", "payload": {**META, "originator": "codex-tui"}},
    {"timestamp": AT, "type": "turn_context", "payload": {"model": "gpt-x", "summary": "auto"}},
    {"timestamp": AT, "type": "world_state", "payload": {"full": True, "state": {"a": "b"}}},
    item(type="message", role="developer", content=[{"type": "input_text", "text": "Rules"}]),
    item(
        type="message",
        role="user",
        content=[
            {"type": "input_text", "text": "Do it"},
            {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "high"},
        ],
        internal_chat_message_metadata_passthrough={"turn_id": "t"},
    ),
    event(type="user_message", message="Do it"),
    item(
        type="reasoning",
        id="rs",
        summary=[{"type": "summary_text", "text": "Short"}],
        content=[{"type": "reasoning_text", "text": "Long"}],
        encrypted_content="enc",
    ),
    item(type="local_shell_call", call_id="l", status="completed", action={"command": ["ls"]}),
    item(type="function_call_output", call_id="l", output="files"),
    item(type="function_call", name="sh", namespace="mcp", arguments='{"n":"v"}', call_id="f"),
    item(type="function_call_output", call_id="f", output=[{"type": "input_text", "text": "one"}]),
    item(type="custom_tool_call", name="patch", input="*** Begin", call_id="p"),
    item(type="custom_tool_call_output", call_id="p", output={"content": "no", "success": False}),
    item(type="tool_search_call", call_id="s", execution="client", arguments={"query": "cal"}),
    item(type="tool_search_output", call_id="s", status="completed", tools=[{"name": "find"}]),
    item(
        type="agent_message",
        author="/root/a",
        recipient="/root",
        content=[{"type": "input_text", "text": "Sender: /root/a"}],
    ),
    event(type="token_count", info={"last_token_usage": {"input_tokens": 7, "output_tokens": 2}}),
    item(type="message", role="assistant", content=[{"type": "output_text", "text": "Done."}]),
]

ATIF: Rows = [
    {
        "schema_version": "ATIF-v1.8",
        "session_id": "s",
        "trajectory_id": "t",
        "agent": {"name": "a", "version": "1", "model_name": "m", "extra": {"by": "x"}},
        "steps": [
            {"step_id": 1, "source": "system", "message": "Be good."},
            {
                "step_id": 2,
                "source": "user",
                "timestamp": AT,
                "message": [
                    {"type": "text", "text": "Do it"},
                    {"type": "image", "source": {"media_type": "image/png", "path": "a.png"}},
                ],
            },
            {
                "step_id": 3,
                "source": "agent",
                "timestamp": AT,
                "model_name": "m",
                "message": [{"type": "text", "text": "mid"}, {"type": "text", "text": "dle"}],
                "reasoning_content": "Hm.",
                "reasoning_effort": "high",
                "llm_call_count": 1,
                "tool_calls": [
                    {"tool_call_id": "c", "function_name": "look", "arguments": {"at": "x"}}
                ],
                "observation": {
                    "results": [
                        {
                            "source_call_id": "c",
                            "content": "seen",
                            "subagent_trajectory_ref": [{"trajectory_id": "sub"}],
                        }
                    ]
                },
                "metrics": {"prompt_tokens": 9, "extra": {"m": "n"}},
                "extra": {"mine": "1"},
            },
            {"step_id": 4, "source": "agent", "message": "Done."},
        ],
        "notes": "kept",
        "continued_trajectory_ref": "t2.json",
        "extra": {"of": "all"},
        "final_metrics": {"total_steps": 4, "extra": {"f": "g"}},
        "subagent_trajectories": [
            {
                "schema_version": "ATIF-v1.8",
                "trajectory_id": "sub",
                "agent": {"name": "b", "version": "1"},
                "steps": [
                    {"step_id": 1, "source": "user", "message": "Look"},
                    {"step_id": 2, "source": "agent", "message": "Looked."},
                ],
            }
        ],
    }
]

MINI: Rows = [
    {
        "trajectory_format": "mini-swe-agent-1.1",
        "messages": [
            {"role": "system", "content": "Be good."},
            {"role": "user", "content": [{"type": "text", "text": "Do it"}]},
            {
                "role": "assistant",
                "content": "```bash\nls\n```",
                "extra": {
                    "response": {
                        "id": "r",
                        "choices": [
                            {
                                "message": {
                                    "content": "```bash\nls\n```",
                                    "reasoning_content": "Because.",
                                }
                            }
                        ],
                    }
                },
            },
            {"role": "user", "content": "files"},
            {"role": "assistant", "content": "Done.", "reasoning_content": "Hm."},
        ],
    }
]

CHAT: Rows = [
    {
        "tools": [{"type": "function", "function": {"name": "look", "description": "Look."}}],
        "messages": [
            {"role": "system", "content": "Be good."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "Do"}, {"type": "text", "text": "it"}],
            },
            {
                "role": "assistant",
                "reasoning": "Hm.",
                "refusal": None,
                "content": [{"type": "text", "text": "mid"}, {"type": "text", "text": "dle"}],
                "tool_calls": [
                    {
                        "id": "c",
                        "type": "function",
                        "function": {"name": "look", "arguments": '{"a":"b"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "seen"}]},
            {"role": "assistant", "content": "Done.", "reasoning_details": [{"data": "enc"}]},
        ],
    }
]

SHAREGPT: Rows = [
    {
        "system": "Be good.",
        "conversations": [
            {"from": "human", "value": "Do it"},
            {"from": "function_call", "value": '{"name":"look","arguments":{"a":"b"}}'},
            {"from": "observation", "value": "seen"},
            {"from": "gpt", "value": "Done.", "thinking_blocks": [{"type": "t", "data": "enc"}]},
        ],
    }
]

FORMATS: Mapping[str, tuple[Callable[[Path, Rows], SourceConversation], Rows, Sequence[str]]] = {
    "claude_code": (
        session_of(claude_code, "s"),
        CLAUDE_CODE,
        (
            "queue-operation:*",
            "ai-title:*",
            "skill_listing:attachment.*",
            "*:uuid",
            "*:parentUuid",
            "*:sessionId",
            "*:timestamp",
            "*:version",
            "*:gitBranch",
            "*:userType",
            "*:cwd",
            "*:promptId",
            "*:permissionMode",
            "*:origin.*",
            "*:effort",
            "*:requestId",
            "*:slug",
            "user:sourceToolAssistantUUID",
            "user:toolUseResult.*",
            "queued_command:attachment.commandMode",
            "queued_command:attachment.origin.*",
            "assistant:message.id",
            "assistant:message.type",
            "assistant:message.model",
            "assistant:message.stop_reason",
            "assistant:message.usage.*",
            "turn_duration:*",
        ),
    ),
    "codex": (
        session_of(codex, "s"),
        CODEX,
        (
            "*:timestamp",
            "session_meta:payload.originator",
            "turn_context:payload.summary",
            "world_state:*",
            "session_meta:payload.base_instructions.hologram",
            "session_meta:payload.hologram",
            "turn_context:payload.hologram",
            "*:payload.internal_chat_message_metadata_passthrough.*",
            "user_message:payload.message",
            "local_shell_call:payload.status",
            "user_message:payload.hologram",
            "token_count:payload.*",
            "tool_search_output:payload.status",
            "agent_message:payload.author",
            "agent_message:payload.recipient",
        ),
    ),
    "atif": (row_of(atif), ATIF, ("*:steps.timestamp",)),
    "mini": (
        row_of(openai),
        MINI,
        ("None:messages.extra.*", "*:trajectory_format"),
    ),
    "openai": (row_of(openai), CHAT, ()),
    "sharegpt": (row_of(sharegpt), SHAREGPT, ()),
}
"""A reader, a session, and the fields that say nothing of the conversation."""


@pytest.mark.parametrize("name", FORMATS)
def test_each_text_of_a_session_is_recorded_or_named(name: str, tmp_path: Path) -> None:
    read, rows, aside = FORMATS[name]
    read(tmp_path, rows)
    lost = []
    for at in texts(rows):
        if is_aside(path_of(rows, at), aside):
            continue
        try:
            found = describe_record(read(tmp_path, change_row(rows, at, MARK)))
        except Unreadable as error:
            if not is_named(str(error), at):
                lost.append(f"{at}: the refusal does not name it: {error}")
            continue
        if MARK not in found:
            lost.append(f"{at}: neither in the record nor refused")
    assert not lost, "\n".join(lost)


@pytest.mark.parametrize("name", FORMATS)
def test_a_field_that_no_session_has_is_recorded_or_refused_by_name(
    name: str, tmp_path: Path
) -> None:
    read, rows, aside = FORMATS[name]
    lost = []
    for at in objects(rows):
        if not at or is_aside(f"{path_of(rows, at)}.hologram", aside):
            continue
        try:
            found = describe_record(read(tmp_path, change_row(rows, (*at, "hologram"), MARK)))
        except Unreadable as error:
            if "hologram" not in str(error):
                lost.append(f"{at}: the refusal does not name it: {error}")
            continue
        if MARK not in found:
            lost.append(f"{at}: neither in the record nor refused")
    assert not lost, "\n".join(lost)


def contents(found: SourceConversation) -> list[str]:
    return [message["content"] for message in found.conversation.messages]


def refusal(name: str, directory: Path, rows: Rows) -> str:
    with pytest.raises(Unreadable) as caught:
        FORMATS[name][0](directory, rows)
    return f"{caught.value.line}: {caught.value}"


def claude_code_with(*rows: dict[str, Any]) -> Rows:
    """A short session, with lines before its last reply."""
    head = user_line("u", None, "Hi")
    parent = "u"
    placed = []
    for n, row in enumerate(rows):
        placed.append({**line("user", f"x{n}", parent), **row})
        parent = f"x{n}"
    return [head, *placed, wrote("end", parent, "m", "Done.")]


def attachment(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": "attachment", "attachment": {"type": kind, **more}}


@pytest.mark.parametrize(
    ("row", "said_then"),
    [
        (attachment("queued_command", prompt="Stop", commandMode="prompt"), ["Stop"]),
        (attachment("queued_command", prompt=[{"type": "text", "text": "Stop"}]), ["Stop"]),
        (
            attachment(
                "queued_command",
                prompt="<task-notification>x",
                commandMode="task-notification",
                isMeta=True,
                source_uuid="s",
            ),
            ["<task-notification>x"],
        ),
        (
            {"type": "system", "subtype": "local_command", "content": "<command-name>"},
            ["<command-name>"],
        ),
        (attachment("skill_listing", content="- a", skillCount=1), []),
        (attachment("hook_success", stdout="ok", hookName="Stop"), []),
        (attachment("file", filename="a", content={"file": {"content": "x"}}), []),
        ({"type": "system", "subtype": "turn_duration", "durationMs": 1}, []),
        ({"type": "system", "subtype": "api_error", "error": {"message": "overloaded"}}, []),
        ({"type": "system", "subtype": "future", "count": 3}, []),
        ({"type": "progress", "data": {"type": "bash_progress", "output": "x"}}, []),
        ({"type": "worktree-state", "worktreeSession": {"worktreeName": "x"}}, []),
        ({"type": "future-state", "on": True}, []),
        (
            {
                "type": "user",
                "message": {"role": "user", "content": [{"type": "text", "text": "Ho"}]},
            },
            ["Ho"],
        ),
    ],
)
def test_lines_of_claude_code_that_are_known_are_read_or_left_out(
    tmp_path: Path, row: dict[str, Any], said_then: list[str]
) -> None:
    found = FORMATS["claude_code"][0](tmp_path, claude_code_with(row))
    assert contents(found) == ["Hi", *said_then, "Done."]


def result(content: Any, **more: Any) -> dict[str, Any]:
    part = {"type": "tool_result", "tool_use_id": "c", "content": content, **more}
    return {"type": "user", "message": {"role": "user", "content": [part]}}


def reply(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    message = {"id": "r", "role": "assistant", "model": "m", "content": [*parts], **more}
    return {"type": "assistant", "message": message}


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (attachment("hologram", content="x"), "2: attachment.type: 'hologram'"),
        (
            attachment("teammate_mailbox", messages=[{"text": "x"}]),
            "attachment.type: 'teammate_mailbox'",
        ),
        (attachment("queued_command"), "attachment.prompt: it is missing"),
        (attachment("queued_command", prompt=7), "attachment.prompt: it must be text"),
        (attachment("queued_command", prompt="x", aside="y"), "attachment.aside"),
        (attachment("queued_command", prompt=[{"type": "hologram", "text": "x"}]), "prompt[0]"),
        ({"type": "attachment", "attachment": "x"}, "attachment: it must be an object"),
        (attachment("queued_command", prompt="x") | {"uuid": None}, "uuid: it is missing"),
        (
            {"type": "hologram", "content": "x"},
            "2: type: 'hologram' is unknown, and the line has cont",
        ),
        ({"type": "marble-origami-commit", "summary": "x"}, "type: 'marble-origami-commit'"),
        ({"type": ["user"], "content": "x"}, "is unknown, and the line has content"),
        ({"type": "system", "subtype": "hologram", "content": "x"}, "subtype: 'hologram'"),
        ({"type": "system", "subtype": "local_command", "content": ["x"]}, "content: it must be"),
        (result([{"type": "hologram", "text": "x"}]), "message.content[0].content[0]"),
        (result("x", aside="y"), "message.content[0].aside"),
        (result({"x": "y"}), "message.content[0].content: it must be text"),
        (result([{"type": "text", "text": "x", "aside": "y"}]), "content[0].content[0].aside"),
        (result([{"type": "image", "text": "x"}]), "content[0].content[0].text"),
        (result([{"type": "text"}]), "content[0].content[0].text: it must be text"),
        (reply({"type": "hologram", "text": "x"}), "message.content[0]: a part of type 'hologram'"),
        (reply({"type": "server_tool_use", "name": "x"}), "a part of type 'server_tool_use'"),
        (reply({"type": "fallback"}), "a part of type 'fallback'"),
        (reply({"type": "text", "text": "x", "aside": "y"}), "message.content[0].aside"),
        (reply({"type": "thinking", "thinking": "x", "aside": "y"}), "message.content[0].aside"),
        (reply({"type": "text", "text": "x"}, reasoning="y"), "message.reasoning"),
        (reply({"type": "text", "text": "x"}) | {"thought": "y"}, "thought: it is unknown"),
        ({"type": "user", "message": {"role": "user", "content": "x"}, "said": "y"}, "said"),
        (
            {"type": "user", "message": {"role": "user", "content": "x", "said": "y"}},
            "message.said",
        ),
        ({"type": "user", "message": "x"}, "message: it must be an object"),
        ({"type": "user", "message": {"role": "robot", "content": "x"}}, "message.role: 'robot'"),
        ({"type": "user", "uuid": None, "message": {"role": "user", "content": "x"}}, "uuid"),
        ({"type": "robot", "message": {"content": "x"}}, "type: 'robot' with a message"),
    ],
)
def test_lines_of_claude_code_that_are_unknown_are_refused_by_name(
    tmp_path: Path, row: dict[str, Any], named: str
) -> None:
    assert named in refusal("claude_code", tmp_path, claude_code_with(row))


def queue(operation: str, content: str | None, **more: Any) -> dict[str, Any]:
    row = {"type": "queue-operation", "operation": operation, "sessionId": "s", "timestamp": AT}
    return {**row, **({} if content is None else {"content": content}), **more}


def test_a_message_that_only_the_queue_of_claude_code_has_is_read(tmp_path: Path) -> None:
    """The desktop client writes no attachment; a copy of one that has is no second message."""
    first, *rest = claude_code_with(attachment("queued_command", prompt="Two [pasted]"))

    def read(*rows: dict[str, Any]) -> list[str]:
        return contents(FORMATS["claude_code"][0](tmp_path, [first, *rows, *rest[-1:]]))

    why = {"reason": "absorbed_mid_turn"}
    assert read(queue("enqueue", "One"), queue("remove", "One", **why)) == ["Hi", "One", "Done."]
    assert read(queue("remove", "One")) == ["Hi", "Done."], "its user took it back"
    assert read(queue("dequeue", None), queue("remove", None, **why)) == ["Hi", "Done."]
    known = [queue("remove", "Two [#1]", **why), rest[0], queue("remove", "One", reason="other")]
    rest[-1] = {**rest[-1], "parentUuid": rest[0]["uuid"]}
    assert read(*known) == ["Hi", "Two [pasted]", "Done."]
    with pytest.raises(Unreadable, match="nothing says which of the attachments"):
        read(*known, queue("remove", "One", **why))


def test_a_result_that_requests_show_in_another_form_has_that_form(tmp_path: Path) -> None:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    one = {"kind": "tool-result", "toolUseId": "c", "replacement": "<persisted-output>"}
    replaced = {"type": "content-replacement", "sessionId": "s", "replacements": [one]}
    rows = claude_code_with(reply(call), result([{"type": "text", "text": "long"}]))
    found = FORMATS["claude_code"][0](tmp_path, [*rows, replaced])
    assert contents(found) == ["Hi", "", "<persisted-output>", "Done."]
    odd = {**replaced, "replacements": [{**one, "kind": "hologram"}]}
    assert "replacements[0]" in refusal("claude_code", tmp_path, [*rows, odd])


def test_a_message_of_claude_code_for_its_screen_is_left_out(tmp_path: Path) -> None:
    row = {"type": "user", "isVirtual": True, "message": {"role": "user", "content": "Screen"}}
    found = FORMATS["claude_code"][0](tmp_path, claude_code_with(row))
    assert contents(found) == ["Hi", "Done."]


def test_an_unknown_line_of_a_subagent_leaves_it_out_by_name(tmp_path: Path) -> None:
    """The session itself is read."""
    subagents = tmp_path / "s" / "subagents"
    subagents.mkdir(parents=True)
    rows = claude_code_with(reply({"type": "hologram"}))
    lines = "".join(json.dumps({**row, "isSidechain": True}) + "\n" for row in rows)
    (subagents / "agent-1.jsonl").write_text(lines)
    found = FORMATS["claude_code"][0](tmp_path, claude_code_with())
    (problem,) = found.problems
    assert str(problem).startswith("agent-1.jsonl:2: message.content[0]: a part of type 'hologram'")
    assert str(problem).endswith("the whole subagent is left out")


def codex_with(*rows: dict[str, Any]) -> Rows:
    """A short session, with lines before its last reply."""
    first = item(type="message", role="user", content=[{"type": "input_text", "text": "Hi"}])
    last = item(
        type="message", role="assistant", content=[{"type": "output_text", "text": "Done."}]
    )
    return [{"timestamp": AT, "type": "session_meta", "payload": {"id": "c"}}, first, *rows, last]


CALLED = item(type="function_call", name="sh", arguments="{}", call_id="f")


@pytest.mark.parametrize(
    ("rows", "messages"),
    [
        ([item(type="ghost_snapshot", ghost_commit={"id": "x"})], []),
        ([item(type="compaction_trigger")], []),
        ([CALLED, item(type="function_call_output", call_id="f", output="o")], ["", "o"]),
        (
            [CALLED, item(type="function_call_output", call_id="f", output={"content": "o"})],
            ["", "o"],
        ),
        (
            [
                item(type="local_shell_call", id="l", action={"command": ["ls"]}),
                item(type="function_call_output", call_id="l", output="o"),
            ],
            ["", "o"],
        ),
        (
            [
                item(
                    type="tool_search_call", call_id="t", execution="client", arguments={"q": "x"}
                ),
                item(type="tool_search_output", call_id="t", tools=[{"name": "find"}]),
            ],
            ["", '[{"name": "find"}]'],
        ),
        (
            [
                item(
                    type="agent_message",
                    author="/root/a",
                    content=[{"type": "input_text", "text": "Found."}],
                )
            ],
            ["Found."],
        ),
        ([event(type="exec_command_end", aggregated_output="x")], []),
        ([event(type="future_tick", count=1)], []),
        ([{"timestamp": AT, "type": "world_state", "payload": {"state": {"a": "b"}}}], []),
        ([{"timestamp": AT, "type": "future", "ordinal": 7, "payload": {}}], []),
        ([{"record_type": "state"}], []),
    ],
)
def test_lines_of_codex_that_are_known_are_read_or_left_out(
    tmp_path: Path, rows: Rows, messages: list[str]
) -> None:
    found = FORMATS["codex"][0](tmp_path, codex_with(*rows))
    assert contents(found) == ["Hi", *messages, "Done."]


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (item(type="hologram_call", name="x"), "3: payload.type: 'hologram_call' is unknown"),
        (item(type="hologram", text="x"), "payload.type: 'hologram' is unknown"),
        (item(type="mcp_call", name="x", output="y"), "payload.type: 'mcp_call' is unknown"),
        (item(type="file_search_call", queries=["x"]), "payload.type: 'file_search_call'"),
        (
            item(type="web_search_call", status="completed", action={"query": "x"}),
            "payload.type: 'web_search_call' is a call that the provider ran",
        ),
        (
            item(type="tool_search_call", execution="server", arguments={}),
            "payload.type: 'tool_search_call' is a call that the provider ran",
        ),
        (item(type=["message"], role="user"), "payload.type: ['message'] is unknown"),
        (
            item(type="message", role="user", content=[{"type": "hologram", "text": "x"}]),
            "content[0]",
        ),
        (item(type="message", role="user", content=[{"text": "x"}]), "payload.content[0]"),
        (item(type="message", role="user", content=["x"]), "payload.content[0]"),
        (item(type="message", role="user", content={"x": 1}), "payload.content: it must be text"),
        (item(type="message", role="robot", content="x"), "robot"),
        (item(type="message", role="user", content="x", said="y"), "payload.said"),
        (item(type="message", role="assistant", content="x", reasoning="y"), "payload.reasoning"),
        (
            item(
                type="message",
                role="assistant",
                content=[{"type": "input_image", "image_url": "x"}],
            ),
            "payload.content[0]: a part of type 'input_image'",
        ),
        (
            item(
                type="message",
                role="user",
                content=[{"type": "input_text", "text": "x", "aside": "y"}],
            ),
            "payload.content[0].aside",
        ),
        (item(type="reasoning", summary=[{"type": "hologram", "text": "x"}]), "payload.summary[0]"),
        (item(type="reasoning", content=[{"type": "image", "data": "x"}]), "payload.content[0]"),
        (item(type="reasoning", summary=[], thought="x"), "payload.thought"),
        (item(type="reasoning", summary="x"), "payload.summary: it must be a list of parts"),
        (item(type="reasoning", summary=[], content="x"), "payload.content: it must be a list"),
        (item(type="function_call", name="x", arguments="{}", call_id="c", why="y"), "payload.why"),
        (
            item(type="function_call_output", call_id="c", output=[{"type": "x"}]),
            "payload.output[0]",
        ),
        (
            item(type="function_call_output", call_id="c", output={"text": "x"}),
            "payload.output.text",
        ),
        (item(type="function_call_output", call_id="c", output=7), "payload.output: it must be"),
        (item(type="local_shell_call", call_id="c", action={}, why="y"), "payload.why"),
        (event(type="hologram", text="x"), "payload.type: 'hologram' is an unknown event"),
        (event(type="thread_rolled_back", num_turns=1), "thread_rolled_back"),
        (event(type="agent_reasoning_raw_content", text="x"), "payload.text: reasoning"),
        (
            {"timestamp": AT, "type": "hologram", "payload": {"text": "x"}},
            "type: 'hologram' is unknown, and the line has payload",
        ),
        (
            {"timestamp": AT, "type": "inter_agent_communication", "payload": {"content": "x"}},
            "type: 'inter_agent_communication' is unknown",
        ),
        ({"timestamp": AT, "type": "realtime_item", "payload": {"text": "x"}}, "realtime_item"),
        ({"timestamp": AT, "type": "compacted", "payload": {}}, "payload.message: it must be text"),
        (
            {"timestamp": AT, "type": "compacted", "payload": {"replacement_history": ["x"]}},
            "payload.replacement_history: it must be a list of objects",
        ),
        (
            {
                "timestamp": AT,
                "type": "compacted",
                "payload": {"replacement_history": [{"type": "hologram_call"}]},
            },
            "payload.replacement_history[0].type: 'hologram_call'",
        ),
        (
            {"timestamp": AT, "type": "response_item", "payload": "x"},
            "payload: it must be an object",
        ),
        (item(type="ghost_snapshot") | {"aside": "x"}, "aside: it is unknown"),
    ],
)
def test_lines_of_codex_that_are_unknown_are_refused_by_name(
    tmp_path: Path, row: dict[str, Any], named: str
) -> None:
    assert named in refusal("codex", tmp_path, codex_with(row))


def test_a_result_of_codex_that_says_so_is_an_error(tmp_path: Path) -> None:
    output = {"content": "no", "success": False}
    rows = [CALLED, item(type="function_call_output", call_id="f", output=output)]
    found = FORMATS["codex"][0](tmp_path, codex_with(*rows))
    assert [m["is_error"] for m in found.conversation.messages if m["role"] == "tool"] == [True]


def test_reasoning_of_open_models_is_read_from_the_events_of_codex(tmp_path: Path) -> None:
    """Its items lack it."""
    rows = [
        event(type="agent_reasoning_raw_content", text="One."),
        event(type="agent_reasoning_raw_content", text="Two."),
        item(type="reasoning", summary=[]),
        CALLED,
        item(type="function_call_output", call_id="f", output="o"),
        item(type="reasoning", summary=[]),
    ]
    found = FORMATS["codex"][0](tmp_path, codex_with(*rows))
    replies = [m for m in found.conversation.messages if m["role"] == "assistant"]
    assert [m["reasoning"] for m in replies] == ["One.", "Two."]


def test_the_first_versions_of_codex_have_their_instructions_in_a_bare_line(tmp_path: Path) -> None:
    rows: Rows = [
        {"id": "c", "timestamp": AT, "instructions": "Code.", "git": {"branch": "main"}},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"record_type": "state"},
    ]
    found = FORMATS["codex"][0](tmp_path, rows)
    assert (contents(found), found.id) == (["Code.", "Hi"], "c")


def atif_with(agent_step: Mapping[str, Any], **more: Any) -> Rows:
    steps = [{"step_id": 1, "source": "user", "message": "Hi"}]
    steps.append({"step_id": 2, "source": "agent", "message": "Done.", **agent_step})
    document = {"schema_version": "ATIF-v1.8", "agent": {"name": "a", "version": "1"}}
    return [{**document, "steps": steps, **more}]


def step_with_call(call: Mapping[str, Any] | None = None, **given: Any) -> dict[str, Any]:
    made = {"tool_call_id": "c", "function_name": "f", "arguments": {}, **(call or {})}
    return {
        "tool_calls": [made],
        "observation": {"results": [{"source_call_id": "c", **given}]},
    }


REFERS = [{"trajectory_id": "sub"}]


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (atif_with({"hologram": "x"}), "steps[1].hologram"),
        (atif_with({"loss_weight": 0}), "steps[1].loss_weight"),
        (atif_with({"train": False}), "steps[1].train"),
        (atif_with({}, hologram="x"), "hologram: it is unknown"),
        (atif_with({}, agent={"name": "a", "version": "1", "prompt": "x"}), "agent.prompt"),
        (
            atif_with({"source": "user", "tool_calls": step_with_call()["tool_calls"]}),
            "steps[1].tool_calls",
        ),
        (atif_with({"source": "user", "reasoning_content": "x"}), "steps[1].reasoning_content"),
        (atif_with({"source": "system", "reasoning_content": "x"}), "steps[1].reasoning_content"),
        (atif_with(step_with_call({"why": "x"}, content="o")), "steps[1].tool_calls[0].why"),
        (
            atif_with(step_with_call(content="o", error="x")),
            "steps[1].observation.results[0].error",
        ),
        (atif_with({"observation": {"results": [], "text": "x"}}), "steps[1].observation.text"),
        (
            atif_with(step_with_call(content="o", subagent_trajectory_ref=REFERS)),
            "subagent_trajectory_ref[0].traj",
        ),
        (
            atif_with(step_with_call(subagent_trajectory_ref=[{"trajectory_path": "a.json"}])),
            "results[0].content: it is missing, and subagent_trajectory_ref",
        ),
        (
            atif_with(
                step_with_call(
                    content="o", subagent_trajectory_ref=[{"trajectory_id": "x", "b": 1}]
                )
            ),
            "subagent_trajectory_ref[0].b",
        ),
        (atif_with({"message": [{"type": "hologram", "text": "x"}]}), "steps[1].message[0]"),
        (atif_with({"message": [{"text": "x"}]}), "steps[1].message[0]"),
        (atif_with({"message": [{"type": "text"}]}), "steps[1].message[0].text"),
        (atif_with({"message": [{"type": "text", "text": "x", "b": "y"}]}), "message[0].b"),
        (atif_with({"message": [{"type": "image", "text": "x"}]}), "message[0].text"),
        (atif_with({"message": 7}), "steps[1].message"),
        (atif_with({"source": "robot"}), "steps[1].source"),
        (atif_with(step_with_call(content=[{"type": "hologram"}])), "results[0].content[0]"),
        (
            atif_with({}, subagent_trajectories=atif_with({"b": "x"})),
            "subagent_trajectories[0].steps[1].b",
        ),
        (atif_with({}, subagent_trajectories=atif_with({}, b="x")), "subagent_trajectories[0].b"),
    ],
)
def test_what_a_document_of_atif_has_beside_its_format_is_refused_by_name(
    tmp_path: Path, rows: Rows, named: str
) -> None:
    assert named in refusal("atif", tmp_path, rows)


@pytest.mark.parametrize(
    "rows",
    [
        atif_with({"metrics": {"prompt_tokens": 1, "extra": {"a": "b"}}, "extra": {"c": "d"}}),
        atif_with({"reasoning_effort": 0.5, "llm_call_count": None, "is_copied_context": None}),
        atif_with(
            {}, notes="x", continued_trajectory_ref="b.json", final_metrics={"total_steps": 2}
        ),
        atif_with(step_with_call({"extra": {"a": "b"}}, content="o", extra={"is_error": True})),
        atif_with(step_with_call(content=None)),
        atif_with(
            step_with_call(content="", subagent_trajectory_ref=[{"trajectory_path": "a.json"}])
        ),
        atif_with({"hologram": None, "tool_calls": None, "observation": None}),
        atif_with({"source": "user", "tool_calls": [], "model_name": None}),
    ],
)
def test_what_a_document_of_atif_can_have_is_read(tmp_path: Path, rows: Rows) -> None:
    assert FORMATS["atif"][0](tmp_path, rows).conversation.messages[0]["content"] == "Hi"


@pytest.mark.parametrize(
    ("more", "no_loss"),
    [
        ({"llm_call_count": 0}, [1]),  # what a program decided, as the RFC of the format says
        ({"extra": {"loss": False}}, [1]),
        ({"extra": {"loss": 0}}, [1]),
        ({"llm_call_count": 1, "extra": {"loss": 1}}, []),
    ],
)
def test_a_step_of_atif_that_nobody_is_to_learn_has_no_loss(
    tmp_path: Path, more: dict[str, Any], no_loss: list[int]
) -> None:
    assert FORMATS["atif"][0](tmp_path, atif_with(more)).conversation.no_loss == no_loss


def test_texts_of_a_reply_are_one_text_and_those_of_others_are_lines(tmp_path: Path) -> None:
    """A model writes on where a part ends. Parts of a prompt are separate, as with `record`."""
    parts = [{"type": "text", "text": "mid"}, {"type": "text", "text": "dle"}]
    (atif_row,) = atif_with({"message": parts})
    atif_row["steps"][0]["message"] = parts
    chat_row = {
        "messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": parts}]
    }
    assert contents(FORMATS["atif"][0](tmp_path, [atif_row])) == ["mid\ndle", "middle"]
    assert contents(FORMATS["openai"][0](tmp_path, [chat_row])) == ["mid\ndle", "middle"]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("is_inside", [True, False])
def test_reasoning_that_mini_swe_agent_stores_with_a_response_is_read(
    tmp_path: Path, key: str, is_inside: bool
) -> None:
    given: dict[str, Any] = {key: "Because."}
    message = {"content": "Done.", **({"provider_specific_fields": given} if is_inside else given)}
    extra = {"response": {"choices": [{"message": message}]}}
    reply = {"role": "assistant", "content": "Done.", "extra": extra}
    rows: Rows = [{"messages": [{"role": "user", "content": "Hi"}, reply]}]
    (_, last) = FORMATS["mini"][0](tmp_path, rows).conversation.messages
    assert last["reasoning"] == "Because."
    rows[0]["messages"][1] |= {"provider_specific_fields": given, "extra": {}}
    (_, last) = FORMATS["mini"][0](tmp_path, rows).conversation.messages
    assert last["reasoning"] == "Because."
    del rows[0]["messages"][1]["provider_specific_fields"]
    rows[0]["messages"][1] |= {"reasoning_content": "Its own.", "extra": extra}
    (_, last) = FORMATS["mini"][0](tmp_path, rows).conversation.messages
    assert last["reasoning"] == "Its own."


def test_a_thought_of_swe_agent_that_its_reply_lacks_is_refused(tmp_path: Path) -> None:
    def read(thought: str) -> SourceConversation:
        reply = {"role": "assistant", "content": 'First.\nThen:\n{"a": "b\\"c"}'}
        reply |= {"message_type": "action", "action": "ls", "agent": "main", "thought": thought}
        messages = [{"role": "user", "content": "Hi"}, reply]
        return FORMATS["openai"][0](tmp_path, [{"messages": messages}])

    for thought in ("First.\nThen:", "Then:", 'b"c', ""):
        assert contents(read(thought))[0] == "Hi"
    with pytest.raises(Unreadable, match=r"messages\[1\]\.thought"):
        read("Nowhere.")


def test_what_inspect_says_of_hidden_thoughts_is_reasoning(tmp_path: Path) -> None:
    hidden = {"type": "reasoning", "reasoning": "enc", "redacted": True, "summary": "In short."}
    text = {"type": "text", "text": "Done.", "internal": {"id": "msg"}}
    reply = {"role": "assistant", "content": [hidden, text]}
    rows: Rows = [{"messages": [{"role": "user", "content": "Hi"}, reply]}]
    (_, last) = FORMATS["openai"][0](tmp_path, rows).conversation.messages
    assert (last["reasoning"], last["content"]) == ("In short.", "Done.")
    hidden["hologram"] = "x"
    assert "messages[1].content[0].hologram" in refusal("openai", tmp_path, rows)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"is_error": "yes"}, "messages[2].is_error"),
        ({"error": {"message": "x"}}, "messages[2].error"),
    ],
)
def test_marks_of_results_that_are_unknown_are_refused(
    tmp_path: Path, more: dict[str, Any], named: str
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "o", **more},
    ]
    assert named in refusal("openai", tmp_path, [{"messages": messages}])


def test_all_that_is_left_out_is_documented() -> None:
    page = (ROOT / "docs" / "import.md").read_text()
    lists = (
        claude_code_fields.ASIDE,
        claude_code_fields.ASIDE_OF_SYSTEM,
        claude_code_fields.REMINDERS,
        codex_fields.ASIDE,
        codex_fields.EVENTS,
    )
    named = {name for names in lists for name in names}
    assert sorted(name for name in named if f"`{name}`" not in page) == []
