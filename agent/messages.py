"""Messages, and the events that a conversation is made of.

A message has the shape of the OpenAI chat API, with `reasoning` beside it on assistants and
`is_error` on tool results. An event is one thing that cost money or time and must survive a
crash: a model reply, a tool result, or the mark that a conversation was taken up again. Events
are what the journal holds; replaying them gives the conversation back exactly.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, Required, TypedDict

Role = Literal["system", "user", "assistant", "tool"]

FinishReason = Literal["stop", "tool_calls", "length", "refusal", "pause", "context_exceeded"]
"""Why a model reply ended, in one vocabulary for every API."""


class FunctionCall(TypedDict):
    """What the model asked for; `arguments` is its text, unparsed and unrepaired."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """One tool call of an assistant message; `id` is unique within its conversation."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ProviderBlocks(TypedDict):
    """Parts of a reply that go back to the provider verbatim (signatures, encrypted thoughts).

    `api` names the adapter that wrote `blocks` and that alone may read them.
    """

    api: str
    blocks: list[dict[str, Any]]


class Message(TypedDict, total=False):
    """One message; which keys beside `role` and `content` are present depends on the role.

    Assistant: `reasoning`, `tool_calls`, `provider_blocks`, each absent where there is none.
    Tool: `tool_call_id`, `name`, `is_error`, and `details` (machine facts such as an exit code,
    never shown to the model).
    """

    role: Required[Role]
    content: Required[str]
    reasoning: str
    tool_calls: list[ToolCall]
    provider_blocks: ProviderBlocks
    tool_call_id: str
    name: str
    is_error: bool
    details: dict[str, Any]


class Usage(TypedDict):
    """Tokens of one model call. Every count may be None: unknown is not zero.

    `input_tokens` includes cache reads and writes, and `output_tokens` includes reasoning, on
    every API, whatever the provider's own habit of counting.
    """

    input_tokens: int | None
    output_tokens: int | None
    cache_read_tokens: int | None
    cache_write_tokens: int | None
    reasoning_tokens: int | None


class ReplyEvent(TypedDict):
    """One accepted model reply. `turn` counts from 1; times are epoch seconds and seconds."""

    kind: Literal["reply"]
    turn: int
    message: Message
    finish_reason: FinishReason
    usage: Usage | None
    cost_usd: float | None
    model: str | None
    response_id: str | None
    started_at: float
    duration_s: float


class ResultEvent(TypedDict):
    """The result of call number `call` (from 0) of turn `turn`."""

    kind: Literal["result"]
    turn: int
    call: int
    message: Message
    started_at: float
    duration_s: float


class ResumedEvent(TypedDict):
    """The conversation was taken up after `turn` turns by a later process.

    `interrupted` lists the ids of calls that may have run before the crash and were not run
    again; `repeated` those that were run (again) because their tool says that this is safe.
    `workspace_kept` is False where the tool's files did not survive.
    """

    kind: Literal["resumed"]
    turn: int
    interrupted: list[str]
    repeated: list[str]
    workspace_kept: NotRequired[bool]


Event = ReplyEvent | ResultEvent | ResumedEvent
