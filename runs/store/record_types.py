"""The types of a record's fields, so that a record edited by hand is refused by name.

Readers index records without checks of their own. A damaged record has a wrong checksum; one that
was edited and sealed again is found here. Only what readers rely on is described; other keys may
hold anything.
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

import msgspec

from agent.messages import Role
from runs.store.checksum import DamagedLine

Number = int | float


class _Function(msgspec.Struct, gc=False):
    name: str
    arguments: str


class _Call(msgspec.Struct, gc=False):
    id: str
    function: _Function


class _Message(msgspec.Struct, gc=False):
    role: Role
    content: str
    reasoning: str | None = None
    tool_calls: list[_Call] = []
    provider_blocks: dict[str, Any] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    is_error: bool | None = None
    details: dict[str, Any] = {}
    notes: list[str] | None = None
    repairs: list[dict[str, str]] | None = None
    unusable: str | None = None


class _Tokens(msgspec.Struct, gc=False):
    shared: int = 0
    prompt: str = ""
    completion: str = ""
    logprobs: str = ""
    texts: list[str] = []
    split: dict[str, str] = {}
    sampling: dict[str, Any] = {}


class _Usage(msgspec.Struct, gc=False):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_tokens: int | None = None
    cache_write_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Turn(msgspec.Struct, gc=False):
    turn: int
    finish_reason: str | None
    usage: _Usage | None
    cost_usd: Number | None
    started_at: Number
    duration_s: Number
    model: str | None = None
    response_id: str | None = None
    tokens: _Tokens | None = None
    extra: dict[str, Any] | None = None


class _Discarded(msgspec.Struct, gc=False):
    discarded: str
    message: _Message
    turn: int = 0
    usage: _Usage | None = None
    cost_usd: Number | None = None


class _ToolCall(msgspec.Struct, gc=False):
    turn: int
    call: int
    name: str
    is_error: bool
    started_at: Number
    duration_s: Number | None


class _Note(msgspec.Struct, gc=False):
    turn: int
    reason: str


class Resume(TypedDict):
    """A resume of the conversation, as rows need it."""

    interrupted: list[str]
    workspace_kept: NotRequired[bool | None]


class CheckResult(TypedDict):
    """The result of a check, as rows need it."""

    passed: NotRequired[Any]
    reward: NotRequired[Any]
    error: NotRequired[str | None]
    rewards: NotRequired[dict[str, Number] | None]
    turn_rewards: NotRequired[dict[str, list[Number | None]] | None]


class Score(TypedDict):
    """A score of a function or a judge; see `runs.store.checks`."""

    source: str
    version: str | None
    error: str | None
    rewards: NotRequired[dict[str, Number] | None]
    turn_rewards: NotRequired[dict[str, list[Number | None]] | None]


class _Schema(msgspec.Struct, gc=False):
    name: str
    description: Any = None
    parameters: Any = None


class OfferedTool(msgspec.Struct, gc=False):
    """A tool as it was offered."""

    function: _Schema


class _Error(msgspec.Struct, rename={"error_class": "class"}, gc=False):
    error_class: str
    message: str | None = None


class _Fork(msgspec.Struct, gc=False):
    turn: int
    run: str | None = None
    record: str | None = None
    branch: int | None = None


class _Thread(msgspec.Struct, gc=False):
    key: str
    name: str
    calls: int
    model: str | None = None


class _Rewritten(msgspec.Struct, gc=False):
    exchanges: list[int]
    thread: str
    start: int
    end: int
    messages: list[_Message]


class _Agent(msgspec.Struct, gc=False):
    name: str | None = None
    version: str | None = None
    starts: int = 0
    stripped_tools: list[str] = []
    exit_code: int | None = None
    timed_out: bool | None = None


class _Conversation(msgspec.Struct, gc=False):
    messages: list[_Message]
    turns: list[_Turn]
    tool_calls: list[_ToolCall]
    notes: list[_Note]
    discarded: list[_Discarded]
    inner: list[_Inner]
    resumes: list[Resume]
    api_calls: int
    usage: _Usage | None
    cost_usd: Number | None
    model_returned: str | None


class _Inner(_Conversation, gc=False):
    key: str
    name: str
    tools: list[OfferedTool] | None = None


class _Record(_Conversation, kw_only=True, gc=False):
    id: str
    status: str
    status_reason: str | None
    error: _Error | None
    prompt_id: str
    sample: int
    input_digest: str
    attempt: int
    row: dict[str, Any]
    tools: list[OfferedTool]
    model: str | None
    api: str
    toolsets: list[str]
    sandbox: str | None
    seed: int | None
    config_digest: str
    finished_at: Number
    check: CheckResult | None = None
    scores: list[Score] | None = None
    options: dict[str, Any] | None = None
    view_compacted: bool = False
    view_trimmed: bool = False
    fork: _Fork | None = None
    threads: list[_Thread] = []
    set_aside: list[dict[str, Any]] = []
    rewritten: list[_Rewritten] | None = None
    agent: _Agent | None = None


def check_types(record: dict[str, Any]) -> None:
    """Raise `DamagedLine`, which names the field, if readers cannot use a record."""
    try:
        found = msgspec.convert(record, _Record)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at ")
        field = place.strip("`").removeprefix("$").removeprefix(".")
        where = f"`{field}`: " if field else ""
        msg = f"{where}{what[:1].lower()}{what[1:]}"
        raise DamagedLine(msg) from error
    for number, message in enumerate(found.messages):
        if message.role == "tool" and message.tool_call_id is None:
            msg = f"`messages[{number}]`: object missing required field `tool_call_id`"
            raise DamagedLine(msg)
