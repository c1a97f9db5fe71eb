"""Messages, and the events that a conversation is made of.

A message has the shape of the OpenAI chat API, with `reasoning` beside it on assistants and
`is_error` on tool results. An event is one thing that cost money or time, or that the model was
shown, and must survive a crash. Events are what the journal holds; replaying them gives the
conversation back exactly.
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
    """One tool call of an assistant message; `id` is unique within its conversation.

    Fields that are not known here (such as `extra_content`, which holds signatures) stand in it and
    in its function as they came, and go back with it to the API that they came from.
    """

    id: str
    type: Literal["function"]
    function: FunctionCall


class ProviderBlocks(TypedDict):
    """Parts of a reply that go back to the provider verbatim (signatures, encrypted thoughts).

    In the chat dialect it is one object with all fields of the message that are not known here.
    `api` names the adapter that wrote `blocks` and that alone may read them; whether they hold
    thoughts that nobody can read, `agent.reasoning` knows.
    """

    api: str
    blocks: list[dict[str, Any]]


class Message(TypedDict, total=False):
    """One message; which keys beside `role` and `content` are present depends on the role.

    Assistant: `reasoning`, `tool_calls`, `provider_blocks`, each absent where there is none, and
    `repairs` where something of it is not as the model wrote it ({"call": id, "name": as written},
    {"call": "", "cut": what was cut off}), and `unusable`: why nothing in it can be acted on.
    Tool: `tool_call_id`, `name`, `is_error`, and `details` (machine facts such as an exit code,
    never shown to the model). `notes` names the notes that the runtime, not a tool or a user,
    added to the content.
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
    notes: list[str]
    unusable: str
    repairs: list[dict[str, str]]


MOST_TOKENS = 2**44
"""No call takes so many: a larger count is an endpoint's mistake, and its sums fit no 64 bits."""


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


UNREADABLE = "unreadable"
"""A reply whose body was charged for and holds no reply: asked for again at once."""

OUT_OF_PLACE = "out_of_place"
"""A reply whose ground in the journal was lost, by a power loss or damage: asked for again."""

PAID_ALONE = frozenset({UNREADABLE, OUT_OF_PLACE})
"""Why replies were discarded that are held for what they cost alone: no rule looks at them."""


class ReplyEvent(TypedDict):
    """One model reply. `turn` counts from 1; times are epoch seconds and seconds.

    `discarded` says why a reply is no part of the conversation although it was paid for: it was
    unusable and the model was asked again. It then has the number of the turn that it would
    have been. `inherited` marks a reply of the conversation that this one is a branch of: it was
    paid for there.
    """

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
    discarded: NotRequired[str]
    extra: NotRequired[dict[str, Any]]
    """What the reply held beyond that, such as token ids; see `Completion.extra`."""
    inherited: NotRequired[bool]
    waited_s: NotRequired[float]
    """How much of it was waiting for a turn; only where `max_conversation_s` needs to know."""
    batch_item: NotRequired[str]
    """The item of a batch that brought the reply, or should have: then a live call did."""


class CutEvent(TypedDict):
    """A model call that was cut off, because the time of the conversation was over.

    Its reply would have been that of turn `turn`, and may have cost.
    """

    kind: Literal["cut"]
    turn: int
    started_at: float
    duration_s: float
    waited_s: NotRequired[float]


class ResultEvent(TypedDict):
    """The result of call number `call` (from 0) of turn `turn`.

    With `reply`, it takes the place of an earlier one in which the tool had asked the user:
    its message holds both, and what the user said between them.
    """

    kind: Literal["result"]
    turn: int
    call: int
    message: Message
    started_at: float
    duration_s: float
    reply: NotRequired[str]


class NoteEvent(TypedDict):
    """Words of the runtime to the model after turn `turn`; `reason` names the rule that wrote them.

    They become part of the last message, where that is a tool result or the user's, else a
    message of the user: so roles alternate as every API and every trainer wants it.
    """

    kind: Literal["note"]
    turn: int
    reason: str
    text: str
    at: float


class OpeningEvent(TypedDict):
    """The messages that the conversation starts with, where they are not those of the prompt."""

    kind: Literal["opening"]
    messages: list[Message]


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


class ForkedEvent(TypedDict):
    """The conversation goes on from here as a branch of another one, after its turn `turn`.

    `run` and `record` name the other one, `branch` is the number of this branch (from 0), and
    `inherited` says what the other had cost until then ({"api_calls", "usage", "cost_usd"}).
    `replay` says how its tool calls were repeated to restore the workspace: {"replayed": calls,
    "different": [{"turn", "call", "name", "result", "is_error"}], "skipped": [{"turn", "call",
    "name", "why"}]}. What the model sees are the results of the other, whatever came of these.
    """

    kind: Literal["forked"]
    run: str
    record: str
    turn: int
    branch: int
    inherited: dict[str, Any]
    replay: dict[str, Any]


class SubEvent(TypedDict):
    """An event of a conversation inside this one.

    `key` tells which: the id of the call that a subagent answers, or the stage it belongs to
    ("preparation#1", "summary#2"); `name` is the subagent's or the stage's.
    """

    kind: Literal["sub"]
    key: str
    name: str
    event: Event


Event = (
    ReplyEvent
    | CutEvent
    | ResultEvent
    | NoteEvent
    | OpeningEvent
    | ResumedEvent
    | ForkedEvent
    | SubEvent
)


def is_paid_alone(event: Event) -> bool:
    """Whether an event is a reply that is held for what it cost alone; see `PAID_ALONE`."""
    return event["kind"] == "reply" and event.get("discarded") in PAID_ALONE
