"""Messages, and the events that a conversation is made of.

A message has the form of the OpenAI chat API, plus `reasoning` for assistants and `is_error` for
tool results. An event records a cost in money or time, or a text that the model was shown: it must
survive a crash. The journal is a list of events; replaying them restores the conversation exactly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, NotRequired, Required, TypedDict

from batch_trajectories.basics import exact_json
from batch_trajectories.basics.exact_json import objects_among

Role = Literal["system", "user", "assistant", "tool"]

FinishReason = Literal["stop", "tool_calls", "length", "refusal", "pause", "context_exceeded"]
"""The reason why a model's reply ended, in the same words for every API."""


class FunctionCall(TypedDict):
    """A function and its arguments, as the model wrote them: unparsed and unrepaired."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """One tool call of an assistant message; `id` is unique within its conversation.

    Unknown fields of the call and of its function (such as `extra_content` with signatures) are
    kept verbatim, and sent back to the API that they came from.
    """

    id: str
    type: Literal["function"]
    function: FunctionCall


class ProviderBlocks(TypedDict):
    """Parts of a reply that go back to the provider verbatim (signatures, encrypted thoughts).

    `api` names the dialect that wrote `blocks`; only that dialect may read them. In the chat
    dialect `blocks` is one object with all unknown fields of the message. Messages of an agent that
    are no replies have their pictures and files here; see `PartStore`.
    """

    api: str
    blocks: list[dict[str, Any]]


class Message(TypedDict, total=False):
    """One message; the keys besides `role` and `content` depend on the role.

    Assistant: `reasoning`, `tool_calls`, `provider_blocks`, each absent if empty; `repairs`, if a
    part is not as the model wrote it ({"call": id, "name": as written},
    {"call": "", "cut": the text that was cut off}); and `unusable`, if the reply has no usable
    step: the reason. Tool: `tool_call_id`, `name`, `is_error`, and `details` (facts such as an exit
    code, never shown to the model). `notes` names the notes that the runtime added to the content.
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


TOOL_TEXT_END = "own_chars"
"""Key in the details of a result: where the tool's text ends, if other text follows it."""

TOOL_TEXT_START = "own_from"
"""Key in the details of a result: where the tool's last text begins, if other text precedes it."""

MAX_TOKEN_COUNT = 2**44
"""Maximum count of tokens: a larger one is an endpoint's mistake, and sums could overflow."""


class Usage(TypedDict):
    """Tokens of one model call. Every count may be None: unknown is not zero.

    For every API, `input_tokens` includes cache reads and writes, and `output_tokens` includes
    reasoning, even if the provider counts differently.
    """

    input_tokens: int | None
    output_tokens: int | None
    cache_read_tokens: int | None
    cache_write_tokens: int | None
    reasoning_tokens: int | None


UNREADABLE = "unreadable"
"""A reply that was paid for and cannot be read: the model was asked again at once."""

OUT_OF_PLACE = "out_of_place"
"""A reply whose earlier events the journal lost (power loss, damage): the model was asked again."""

WORKSPACE_LOST = "workspace_lost"
"""A reply of a conversation that began again because the files of its workspace were lost."""

COST_ONLY = frozenset({UNREADABLE, OUT_OF_PLACE, WORKSPACE_LOST})
"""Reasons of discarded replies that the rules ignore: only the cost of the reply matters."""


class TurnTokens(TypedDict, total=False):
    """The tokens of a reply as they were sampled; `agent.messages.tokens` reads and writes them.

    A key is absent if the endpoint did not give it.
    """

    shared: int
    """The number of tokens, from the start, that the prompt shares with an earlier turn.

    That turn is the latest one that has ids of its prompt and its completion; 0 without one.
    """
    prompt: str
    """Ids of the prompt after the first `shared`."""
    completion: str
    """Ids of the reply."""
    logprobs: str
    """Log-probabilities of the reply's tokens."""
    texts: list[str]
    """The reply's tokens as texts, if their ids are unknown."""
    split: dict[str, str]
    """The texts at the first token that differs from the earlier turn: `sampled` there, and
    `shown` in this prompt. Absent if none differs, or if the texts of ids are unknown."""
    sampling: dict[str, Any]
    """Options of the request that change the distribution that tokens are sampled from. An option
    that is absent was left to the endpoint."""


class ReplyEvent(TypedDict):
    """One model reply. `turn` counts from 1; times are epoch seconds and seconds.

    `discarded` says why a paid reply is not part of the conversation: it was unusable and the
    model was asked again. Its `turn` is the turn that it would have been. `inherited` marks a
    reply that a branch took over from its parent conversation, which paid for it.
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
    """Other data of the reply; see `Completion.extra`."""
    tokens: NotRequired[TurnTokens]
    """The tokens of the reply; present with option `token_ids`, if the endpoint gave any."""
    inherited: NotRequired[bool]
    waited_s: NotRequired[float]
    """Seconds of `duration_s` spent waiting for limits or a batch, if any.

    Records of earlier versions have it only with `max_conversation_s`.
    """
    batch_item: NotRequired[str]
    """The id of the batch item that asked for this reply, even if a live call brought it."""


class CutEvent(TypedDict):
    """A model call for turn `turn` that the time limit of the conversation cut off.

    The endpoint may have charged for it.
    """

    kind: Literal["cut"]
    turn: int
    started_at: float
    duration_s: float
    waited_s: NotRequired[float]


class ResultEvent(TypedDict):
    """The result of call number `call` (from 0) of turn `turn`.

    With `reply`, it replaces the result in which the tool asked the user: its message has that
    result, the user's reply, and the result of the second call.
    """

    kind: Literal["result"]
    turn: int
    call: int
    message: Message
    started_at: float
    duration_s: float
    reply: NotRequired[str]


class BeganEvent(TypedDict):
    """A tool call is about to start; calls that may be repeated have no such event.

    After a crash it tells calls that may have run from calls that were still waiting.
    """

    kind: Literal["began"]
    call_id: str


class NoteEvent(TypedDict):
    """A text of the runtime for the model after turn `turn`; `reason` names the rule that wrote it.

    It is appended to the last message if that is a tool result or a user message, else it becomes
    a user message: roles must alternate for every API and trainer. `USER_TURN` is the exception:
    the next message of the user, which follows an answer.
    """

    kind: Literal["note"]
    turn: int
    reason: str
    text: str
    at: float


class OpeningEvent(TypedDict):
    """The messages that the conversation starts with, in place of the messages of the prompt."""

    kind: Literal["opening"]
    messages: list[Message]


class Rebuild(TypedDict, total=False):
    """The rebuild of the workspace, with all sessions, as of the last result, or why it failed.

    Rebuilt: `calls` earlier calls were repeated in a fresh workspace, in `duration_s` seconds, with
    equal results. Otherwise `why` is the reason; `turn`, `call` and `name` identify the call that
    prevented it, and `result` is its differing result, shortened.
    """

    calls: int
    duration_s: float
    why: str
    turn: int
    call: int
    name: str
    result: str


class ResumedEvent(TypedDict):
    """A later process resumed the conversation after `turn` turns.

    `interrupted` lists the ids of calls that may have run before the crash and were not run
    again; `repeated` lists calls that were run (again) because their tool is idempotent; `rebuilt`
    lists calls that were undone and run again. `workspace_kept` is False if the workspace was lost.
    """

    kind: Literal["resumed"]
    turn: int
    interrupted: list[str]
    repeated: list[str]
    workspace_kept: NotRequired[bool]
    rebuilt: NotRequired[list[str]]
    rebuild: NotRequired[Rebuild]
    """Present if calls had to be undone."""


class RestartedEvent(TypedDict):
    """The conversation begins again with its opening after `turn` turns; `reason` says why.

    The replies until then were paid for and remain as discarded replies.
    """

    kind: Literal["restarted"]
    turn: int
    reason: str
    at: float


class ForkedEvent(TypedDict):
    """The conversation continues its parent from here, as a branch after its turn `turn`.

    `run` and `record` name the parent, `branch` is the number of this branch (from 0), and
    `inherited` is the cost of the parent until then ({"api_calls", "usage", "cost_usd"}).
    `replay` says how its tool calls were repeated to restore the workspace: {"replayed": calls,
    "different": [{"turn", "call", "name", "result", "is_error"}], "skipped": [{"turn", "call",
    "name", "why"}]}. The model sees the results of the parent, even where these differ.
    """

    kind: Literal["forked"]
    run: str
    record: str
    turn: int
    branch: int
    inherited: dict[str, Any]
    replay: dict[str, Any]


class ExchangeEvent(TypedDict):
    """One model call of an agent that runs as a command, as it was relayed, and its reply.

    `number` counts from 0 in the order of completion. `key` identifies all that decides the reply
    (see `agent.wires.reading`). `asked` is the model name that the agent asked for.

    The request's messages, the system prompt included, are a prefix and `added`. The prefix is the
    first `shared` messages of thread `of`; if `of` is absent, of `thread`. If `of` is present or
    `shared` is 0, this call starts thread `thread`; if not, the prefix has the thread's last reply.
    `echoes` lists the messages of `added` that repeat the reply of a recorded call: [index in
    `added`, number of the call].
    """

    kind: Literal["exchange"]
    number: int
    key: str
    dialect: str
    """A dialect's name, as in `ModelSettings.api`, or one of `NON_CHAT_CALLS`."""
    asked: str
    thread: int
    shared: int
    of: NotRequired[int]
    added: list[Message]
    echoes: NotRequired[list[list[int]]]
    shown: NotRequired[list[list[Any]]]
    """Changes since the thread's previous call among the messages that the request shows
    otherwise than they are recorded: [position, patch]; see `agent.wires.thread`."""
    tools: NotRequired[list[dict[str, Any]]]
    """Schemas in OpenAI form, if they differ from the schemas of the thread's previous call."""
    stripped: NotRequired[list[str]]
    """Tools of the provider's own, which were removed from the request."""
    reply: ReplyEvent
    """The reply; its `turn` counts turns within the thread, not within the task."""
    instructed: NotRequired[bool]
    """The first message holds instructions for this call only.

    A later call that continues this reply by id does not inherit it.
    """
    ids: NotRequired[list[str]]
    """The ids of the reply's calls as the agent got them, if the record needs others."""
    body: dict[str, Any]
    """The body of the reply, to answer an equal call; that of a stream, as one whole body."""


class AgentRestartedEvent(TypedDict):
    """The agent's command starts again: its calls are set aside until it makes equal ones."""

    kind: Literal["agent_restarted"]
    at: float


class AnsweredEvent(TypedDict):
    """A call equal to the recorded call `exchange` got its reply, unpaid.

    The recorded call is no longer set aside.
    """

    kind: Literal["answered"]
    exchange: int


class AgentExitEvent(TypedDict):
    """The agent's command ended.

    `stdout` and `stderr` are head and tail of its output. `exit_code` is None if it was killed
    because its time was up.
    """

    kind: Literal["agent_exit"]
    exit_code: int | None
    stdout: str
    stderr: str
    duration_s: float
    timed_out: bool


USER_TURN = "user_turn"
"""The reason of a note that is a message of the user, not of the runtime."""

PREPARATION = "preparation"
SUMMARY = "summary"
SIMULATED_USER = "simulated_user"
STAGES = frozenset({PREPARATION, SUMMARY, SIMULATED_USER})
"""Names of inner conversations that are not subagents."""

EMBEDDINGS = "embeddings"
COMPLETION = "completion"
NON_CHAT_CALLS = frozenset({EMBEDDINGS, COMPLETION})
"""Names of an agent's calls that are no chats: embeddings, and OpenAI's legacy completions."""


def summary_key(upto: int) -> str:
    """The key of the inner conversation that sums up the first `upto` messages."""
    return f"{SUMMARY}#{upto}"


def summary_upto(key: str) -> int:
    """The number of messages that the summary with this key stands for; see `summary_key`."""
    return int(key.rpartition("#")[2])


def user_key(number: int) -> str:
    """The key of the conversation in which a simulated user writes its message `number`."""
    return f"{SIMULATED_USER}#{number}"


class SubEvent(TypedDict):
    """An event of a conversation inside this one.

    `key` is the id of the call that a subagent answers, or a stage ("preparation#1",
    "summary#2", "simulated_user#1"); `name` is that of the subagent or the stage.
    """

    kind: Literal["sub"]
    key: str
    name: str
    event: Event


AgentEvent = ExchangeEvent | AgentRestartedEvent | AnsweredEvent | AgentExitEvent
"""An event of an agent that runs as a command."""

Event = (
    ReplyEvent
    | CutEvent
    | BeganEvent
    | ResultEvent
    | NoteEvent
    | OpeningEvent
    | ResumedEvent
    | RestartedEvent
    | ForkedEvent
    | SubEvent
    | AgentEvent
)


def call_failure(result: Message) -> str | None:
    """The kind of a call's failure; None if it succeeded, or if the tool reports the failure."""
    failure = result.get("details", {}).get("failure") if result.get("is_error") else None
    return failure if isinstance(failure, str) else None


def reply_in(event: Event) -> ReplyEvent | None:
    """The model reply in an event, also of an inner conversation or an agent's call."""
    match event["kind"]:
        case "reply":
            return event
        case "exchange":
            return event["reply"]
        case "sub":
            return reply_in(event["event"])
    return None


def is_cost_only(event: Event) -> bool:
    """Whether an event is a discarded reply that the rules ignore; see `COST_ONLY`."""
    return event["kind"] == "reply" and event.get("discarded") in COST_ONLY


# Reasoning that a model wrote at the start of its text, and reasoning that is encrypted.

_OPENING = re.compile(
    r"\s*<(?P<tag>think|thinking|reasoning|REASONING_SCRATCHPAD)>(?P<text>.*?)</(?P=tag)>",
    re.DOTALL,
)

_OPENS = re.compile(r"\s*<(?:think|thinking|reasoning|REASONING_SCRATCHPAD)>")


class InlineReasoning(NamedTuple):
    """A text split into the reasoning at its start, or None, and the rest."""

    reasoning: str | None
    rest: str


def split_inline_reasoning(text: str) -> InlineReasoning:
    """Take the leading think blocks out of `text`; several are joined by a blank line.

    A block that is never closed stays in the text: the end of the reasoning is unknown.
    """
    thoughts = []
    end = 0
    while match := _OPENING.match(text, end):
        thoughts.append(match["text"].strip())
        end = match.end()
    if not thoughts:
        return InlineReasoning(None, text)
    return InlineReasoning("\n\n".join(filter(None, thoughts)) or None, text[end:].lstrip())


def opens_reasoning(text: str) -> bool:
    """Whether `text`, without its leading closed blocks, begins with an unclosed block."""
    return _OPENS.match(text) is not None


def hides_reasoning(
    blocks: Iterable[Mapping[str, Any]], extras: Iterable[Any], reasoning_tokens: int | None
) -> bool:
    """Whether the model reasoned for a reply that has no readable reasoning.

    `blocks` are the provider blocks of the reply, `extras` the `extra_content` of its calls. The
    signs are a redacted or encrypted thought, the signature of a thought, or a count of reasoning
    tokens; None if the count is unknown.
    """
    if reasoning_tokens:
        return True
    hidden = [kind for block in blocks for kind in _find_hidden_thoughts(block)]
    # Gateways count only the readable text of Anthropic's thoughts: their zero decides nothing.
    if "thinking" in hidden:
        return True
    # Other APIs encrypt empty thoughts, too: a count of zero decides.
    return reasoning_tokens is None and (bool(hidden) or any(map(_is_google_signature, extras)))


def _find_hidden_thoughts(block: Mapping[str, Any]) -> Iterator[str]:
    """The kind of each encrypted or signed thought in a verbatim block."""
    kind = block.get("type")
    if kind in ("thinking", "redacted_thinking"):
        if block.get("signature") or block.get("data"):
            yield "thinking"
    elif kind == "reasoning":
        if block.get("encrypted_content"):
            yield "reasoning"
    elif kind is None:  # a message of the OpenAI chat dialect
        if _is_google_signature(block.get("extra_content")):
            yield "reasoning"
        for thought in objects_among(block.get("thinking_blocks")):
            yield from _find_hidden_thoughts(thought)
        for detail in objects_among(block.get("reasoning_details")):
            if detail.get("data") or detail.get("signature"):
                yield "reasoning"


def _is_google_signature(extra: Any) -> bool:
    """Whether extra content of a call or a message is Gemini's signature of a thought."""
    google = extra.get("google") if isinstance(extra, dict) else None
    return isinstance(google, dict) and bool(google.get("thought_signature"))


# Parts of messages that are not text: pictures, documents and others, stored as they came.
#
# A message of an agent has them in `provider_blocks`; its text has a placeholder for each. A
# large part is stored once, however often it is shown: `{"repeats": digest}` replaces it
# elsewhere.

REPEATS = "repeats"
"""Key of the object that replaces a part which was stored before."""

EARLIER_RESPONSE: Literal["earlier_response"] = "earlier_response"
"""The type of a part that replaces messages which only the endpoint has."""

_LARGE = 1000
"""Bytes of JSON from which on a part is stored once."""

_IN_GEMINI = ("inlineData", "inline_data", "fileData", "file_data")

_KIND_KEYS = frozenset(("type", "kind", *_IN_GEMINI))
"""Keys by which the kind of a part is recognized."""


def part_kind(part: Mapping[str, Any]) -> Literal["image", "file", "earlier_response"]:
    """The kind of a part: a picture, messages that only the endpoint has, or any other file."""
    kind = str(part.get("type", ""))
    if kind == EARLIER_RESPONSE:
        return EARLIER_RESPONSE
    if "image" in kind or kind == "computer_screenshot":
        return "image"
    kind = str(part.get("kind", ""))
    for key in _IN_GEMINI:
        if key in part and isinstance(data := part[key], dict):
            kind = str(data.get("mimeType") or data.get("mime_type") or kind)
            break
    return "image" if kind.startswith("image") else "file"


def placeholder_parts(
    role: Role, blocks: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """The parts of a message that have placeholders in its text; in a reply only pictures do."""
    if role != "assistant":
        return blocks
    return [
        block
        for block in blocks
        if not _KIND_KEYS.isdisjoint(block) and part_kind(block) == "image"
    ]


_GEMINI_CALLS = ("executableCode", "executable_code", "toolCall", "tool_call")


def provider_call(block: Mapping[str, Any]) -> str | None:
    """Name the tool of a call that the provider itself ran; None for other blocks of a reply.

    Such a call and its result are in the reply. No program can make the call again, and rows that
    have only texts and calls of the program lack it. Blocks of Anthropic (`server_tool_use`,
    `mcp_tool_use`), items of the Responses API without a `call_id`, and parts of Gemini.
    """
    kind = block.get("type")
    if not isinstance(kind, str):
        return next((key for key in _GEMINI_CALLS if key in block), None)
    if kind in ("server_tool_use", "mcp_tool_use"):
        return str(block.get("name") or kind)
    if kind.endswith("_call") and "call_id" not in block:
        return str(block.get("name") or kind.removesuffix("_call"))
    return None


class PartStore:
    """The large parts of the messages so far, by digest."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Any]] = {}

    def deduplicate(self, messages: Sequence[Message]) -> list[Message]:
        """Replace each large part that came before by its digest."""
        return [_map_parts(message, self._once) for message in messages]

    def restore(self, messages: Sequence[Message]) -> list[Message]:
        """Replace each digest by the part that it stands for."""
        return [_map_parts(message, self._whole) for message in messages]

    def _once(self, part: dict[str, Any]) -> dict[str, Any]:
        if (digest := _part_digest(part)) is None:
            return part
        if digest in self._known:
            return {REPEATS: digest, "kind": part_kind(part)}
        self._known[digest] = part
        return part

    def _whole(self, part: dict[str, Any]) -> dict[str, Any]:
        if REPEATS in part:
            return self._known.get(part[REPEATS], part)
        if digest := _part_digest(part):
            self._known.setdefault(digest, part)
        return part


def _map_parts(message: Message, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Message:
    given = message.get("provider_blocks")
    if given is None or message["role"] == "assistant":
        return message
    blocks = [change(block) for block in given["blocks"]]
    return {**message, "provider_blocks": {**given, "blocks": blocks}}


def _part_digest(part: Mapping[str, Any]) -> str | None:
    """The digest of a large part; None for a small one."""
    # Agents move their cache marks from message to message.
    bare = {key: value for key, value in part.items() if key != "cache_control"}
    written = exact_json.dumps(bare)
    return blake2b(written, digest_size=16).hexdigest() if len(written) >= _LARGE else None
