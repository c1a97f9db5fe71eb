"""The record of a finished conversation as a type: decoded and checked in one pass.

`engine/record.py` says what its keys mean. Only keys that the program reads are fields
here; a stored line keeps all others, and what copies records copies lines. A field without a value
in an older record has its default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TypedDict

import msgspec

from agent.messages.message import Role
from batch_trajectories.basics import exact_json
from batch_trajectories.records.files import (
    CHECKSUM_KEY,
    DamagedLine,
    read_object,
    strip_checksum,
    verify_checksum,
)

# Small parts of a record, which have no parts of their own; see `record_types`.

Number = int | float

KEPT_STEP_FIELDS = (
    "timestamp",
    "model_name",
    "reasoning_effort",
    "llm_call_count",
    "metrics",
    "extra",
)
"""Fields of an imported ATIF step that its turn keeps as they came, in `atif` of its `extra`."""


class StoredPart(msgspec.Struct, gc=False, omit_defaults=True):
    """A part of a record. It is in no reference cycle, so the garbage collector skips it."""


class UsageSums(TypedDict, total=False):
    """Tokens of all paid calls; a dictionary, because rows show it as it is."""

    input_tokens: int | None
    output_tokens: int | None
    cache_read_tokens: int | None
    cache_write_tokens: int | None
    reasoning_tokens: int | None


class ToolRun(StoredPart):
    """The outcome of call number `call` (from 0) of a turn."""

    turn: int
    call: int
    name: str
    is_error: bool
    started_at: Number
    duration_s: Number | None


class Resume(StoredPart):
    """A resume of the conversation by a later start."""

    interrupted: list[str]
    turn: int | None = None
    """Number of turns before the resume."""
    workspace_kept: bool | None = None


class StoredFork(StoredPart):
    """The parent of a branch: its run and record, the turn it continues after, and its number."""

    turn: int
    run: str | None = None
    record: str | None = None
    branch: int | None = None


class StoredThread(StoredPart):
    """One conversation of an agent that runs as a command."""

    key: str
    name: str
    calls: int
    model: str | None = None


class StoredTokens(StoredPart):
    """The sampled tokens of a turn; see `agent.messages.tokens`."""

    shared: int = 0
    prompt: str | None = None
    completion: str | None = None
    logprobs: str | None = None
    texts: list[str] | None = None
    split: dict[str, str] | None = None
    sampling: dict[str, Any] | None = None


class StoredUsage(StoredPart):
    """Tokens of a call; None is unknown."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_tokens: int | None = None
    cache_write_tokens: int | None = None
    reasoning_tokens: int | None = None


class StoredError(StoredPart, rename={"error_class": "class"}):
    """The error that failed a task."""

    error_class: str
    message: str | None = None


class AgentFacts(StoredPart):
    """Facts about the agent that held the conversation."""

    name: str | None = None
    version: str | None = None
    starts: int = 0
    stripped_tools: Sequence[str] = ()
    exit_code: int | None = None
    timed_out: bool | None = None
    stdout: str | None = None
    stderr: str | None = None


# Long texts of a row that its conversation repeats: a record stores each once, among the
# messages.
#
# "row":{"id":"p1","prompt":null}, … ,"row_texts":[[["prompt"],[0,"content"]]]
#
# Each item of `row_texts` is the place of a text in the row and that in the messages. Records
# without long texts, and those of earlier versions, have no such key.

ROW_TEXTS = "row_texts"
_MIN_SHARED_CHARS = 4096
"""The shortest text that is worth a reference, in characters."""

Step = str | int
Texts = Sequence[tuple[list[Step], list[Step]]]


def share_texts(record: dict[str, Any]) -> dict[str, Any]:
    """The record as it is stored: long texts of its row refer to the same texts in its messages."""
    in_row = dict(_long_texts(record["row"]))
    if not in_row:
        return record
    place_of = {text: list(place) for place, text in _long_texts(record["messages"])}
    texts: Texts = [(list(p), place_of[text]) for p, text in in_row.items() if text in place_of]
    if not texts:
        return record
    row = deepcopy(record["row"])
    for place, _ in texts:
        _find_parent(row, place)[place[-1]] = None
    return {**record, "row": row, ROW_TEXTS: texts}


def restore_texts(row: dict[str, Any], messages: Sequence[Any], texts: Texts) -> None:
    """Put the texts back into a stored row. Raises `ValueError` for a place that does not exist."""
    for place, source in texts:
        try:
            _find_parent(row, place)[place[-1]] = _find_value(messages, source)
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"`{ROW_TEXTS}` names a place that does not exist: {error}") from error


def _long_texts(value: Any, *place: Step) -> Iterator[tuple[tuple[Step, ...], str]]:
    if isinstance(value, str):
        if len(value) >= _MIN_SHARED_CHARS:
            yield place, value
    elif isinstance(value, Mapping):
        for key, member in value.items():
            yield from _long_texts(member, *place, key)
    elif isinstance(value, list):
        for number, member in enumerate(value):
            yield from _long_texts(member, *place, number)


def _find_parent(value: Any, place: Sequence[Step]) -> Any:
    return _find_value(value, place[:-1])


def _find_value(value: Any, place: Sequence[Step]) -> Any:
    for step in place:
        value = getattr(value, str(step)) if isinstance(value, msgspec.Struct) else value[step]
    return value


Tools = Sequence[Mapping[str, Any]]
"""Tools as they were offered. Records with the same tools share one list: never change it."""

_TOOLS, _END = b'"tools":', b"}\n"
_NO_JSON = msgspec.Raw(b"")
"""Stands for JSON that a record lacks."""
_NO_DETAILS: Mapping[str, Any] = MappingProxyType({})  # shared: what a line lacks takes no time


class StoredFunction(StoredPart):
    """Name and arguments of a call, as the model wrote them."""

    name: str
    arguments: str


class StoredCall(StoredPart):
    """One tool call of an assistant message."""

    id: str
    function: StoredFunction
    extra_content: Any = None


class StoredBlocks(StoredPart):
    """Parts of a reply that go back to the provider verbatim."""

    api: str = ""
    blocks: Sequence[dict[str, Any]] = ()


class StoredMessage(StoredPart):
    """One message; see `agent.messages.message.Message`."""

    role: Role
    content: str
    reasoning: str | None = None
    tool_calls: Sequence[StoredCall] = ()
    provider_blocks: StoredBlocks | None = None
    tool_call_id: str | None = None
    name: str | None = None
    is_error: bool | None = None
    details: Mapping[str, Any] = _NO_DETAILS
    notes: list[str] | None = None
    repairs: list[dict[str, str]] | None = None
    unusable: str | None = None
    own_chars: int | None = None
    """Set where `export.conversation.authors` adds others' words to a result: the length of its own
    text; no key of records."""


class StoredPatch(StoredPart):
    """Replacements for parts of the message at position `at`; None: a part is as recorded."""

    at: int
    message_at: int | None = None
    """The position of the recorded result that stands there instead."""
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[StoredCall] | None = None


class StoredRequest(StoredPart):
    """The request that a turn answered: see `agent.state.agent_record`, and `summary`."""

    at: int | None = None
    shown: Sequence[StoredPatch] = ()
    tools: int | None = None
    summary: str | None = None
    """The key of the summary that stood for older messages."""
    exchange: int | None = None


class StoredTurn(StoredPart):
    """One accepted reply of the model, without its message."""

    turn: int
    finish_reason: str | None
    usage: StoredUsage | None
    cost_usd: Number | None
    started_at: Number
    duration_s: Number
    model: str | None = None
    response_id: str | None = None
    tokens: StoredTokens | None = None
    extra: dict[str, Any] | None = None
    inherited: bool | None = None
    """Set if a branch has the turn from its parent."""
    waited_s: Number | None = None
    batch_item: str | None = None
    exchange: int | None = None
    """The number of the call, for an agent that runs as a command."""
    request: StoredRequest | None = None

    @property
    def reasoning_tokens(self) -> int | None:
        """Number of reasoning tokens; None if unknown."""
        return None if self.usage is None else self.usage.reasoning_tokens

    @property
    def has_ids(self) -> bool:
        """Whether the token ids of both its prompt and its completion are known."""
        ids = self.tokens
        return ids is not None and ids.prompt is not None and ids.completion is not None


class CutCall(StoredPart):
    """A model call that the time limit of its conversation cut off."""

    started_at: Number
    duration_s: Number
    waited_s: Number | None = None


class DiscardedReply(StoredTurn, kw_only=True):
    """A paid reply that is not part of the conversation, with the reason."""

    discarded: str
    message: StoredMessage


class Note(StoredPart):
    """A text of the runtime for the model after a turn."""

    turn: int
    reason: str
    text: str | None = None


class CheckResult(StoredPart):
    """The result of the row's check; see `run_check`."""

    passed: Any = None
    reward: Any = None
    rewards: dict[str, Number] | None = None
    turn_rewards: dict[str, list[Number | None]] | None = None
    exit_code: Any = None
    stdout: Any = None
    stderr: Any = None
    tests: Any = None
    duration_s: Number | None = None
    error: str | None = None


class Score(StoredPart):
    """A score of a function or a judge; see `records.checks`."""

    source: str
    version: str | None
    error: str | None
    rewards: dict[str, Number] | None
    turn_rewards: dict[str, list[Number | None]] | None = None
    at: Number | None = None
    question: str | None = None
    reply: str | None = None
    model: str | None = None
    usage: StoredUsage | None = None
    cost_usd: Number | None = None
    check: dict[str, Any] | None = None
    """The result of a check after the run, which replaces the record's; only from `check`."""
    image: dict[str, str] | None = None
    """The image that this check ran in."""


class Label(StoredPart):
    """The decisions of one reviewer about a record; see `records.scores`."""

    who: str
    at: Number | None = None
    verdict: str | None = None
    no_loss: list[int] | None = None
    note: str | None = None
    over: dict[str, str] | None = None


class StoredRewrite(StoredPart):
    """Messages that an agent showed in another form than its conversation has."""

    exchanges: list[int]
    thread: str
    start: int
    end: int
    messages: list[StoredMessage]
    until: int | None = None
    """The position of the last one's reply; None in records of earlier versions."""
    requests: Sequence[StoredRequest] = ()


class AbandonedCall(StoredPart):
    """A call of an earlier start of an agent that its last start did not make."""

    number: int
    added: list[StoredMessage]
    message: StoredMessage


class _Schema(StoredPart):
    name: str
    description: Any = None
    parameters: Any = None


class _OfferedTool(StoredPart):
    function: _Schema


class StoredConversation(StoredPart):
    """Fields that records and the conversations inside them share; see `Trajectory.to_record`."""

    messages: list[StoredMessage]
    turns: list[StoredTurn]
    tool_calls: list[ToolRun]
    notes: tuple[Note, ...]
    discarded: tuple[DiscardedReply, ...]
    inner: tuple[InnerRecord, ...]
    resumes: tuple[Resume, ...]
    api_calls: int
    usage: UsageSums | None
    cost_usd: Number | None
    model_returned: str | None
    cut_calls: Sequence[CutCall] = ()

    @property
    def own_turns(self) -> list[StoredTurn]:
        """The turns, without those that a branch shares with its parent, which come first."""
        turns = self.turns
        if not turns or turns[0].inherited is None:
            return turns
        return [turn for turn in turns if turn.inherited is None]

    @property
    def own_tool_calls(self) -> list[ToolRun]:
        """The tool calls, without those that a branch shares with its parent."""
        first = len(self.turns) - len(self.own_turns)
        return [call for call in self.tool_calls if call.turn > first] if first else self.tool_calls


class InnerRecord(StoredConversation, kw_only=True):
    """A conversation inside another: of a subagent, a stage or an agent's thread."""

    key: str
    name: str
    raw_tools: msgspec.Raw = msgspec.field(name="tools", default=_NO_JSON)
    """Tools that were offered; only in conversations of an agent."""


class Record(StoredConversation, kw_only=True):
    """The record of one finished task."""

    id: str
    status: str
    status_reason: str | None
    error: StoredError | None
    prompt_id: str
    sample: int
    input_digest: str
    attempt: int
    row: dict[str, Any]
    """The whole row, with the texts that the line holds only among its messages."""
    row_texts: Texts = ()
    raw_tools: msgspec.Raw = msgspec.field(name="tools")
    model: str | None
    api: str
    endpoint: str | None = None
    toolsets: list[str]
    sandbox: str | None
    seed: int | None
    config_digest: str
    finished_at: Number
    check: CheckResult | None = None
    scores: list[Score] | None = None
    diff: dict[str, Any] | None = None
    audit: dict[str, Any] | None = None
    workspace: dict[str, str] | None = None
    image: dict[str, str] | None = None
    options: dict[str, Any] | None = None
    view_compacted: bool = False
    view_trimmed: bool = False
    fork: StoredFork | None = None
    threads: Sequence[StoredThread] = ()
    set_aside: Sequence[AbandonedCall] = ()
    rewritten: list[StoredRewrite] | None = None
    offers: msgspec.Raw = _NO_JSON
    """Lists of tools; see `StoredRequest.tools`."""
    inner_tools: msgspec.Raw = _NO_JSON
    """Tools that conversations inside this one were offered, by the names of these."""
    diverged_at: int | None = None
    agent: AgentFacts | None = None
    versions: dict[str, Any] | None = None
    imported: dict[str, Any] | None = None
    """The origin of an imported record; see `importing`."""
    schema_version: Any = None
    labels: Sequence[Label] = msgspec.field(default=(), name="(labels)")
    """Decisions of people about the record; not a key of the line."""
    line: bytes = msgspec.field(default=b"", name="(line)")
    """The line that the record was decoded from."""
    tools: Any = msgspec.field(default=None, name="(tools)")
    """The tools that the model was offered, `Tools`; made of `raw_tools`."""

    def splice(self, members: Mapping[str, bytes]) -> bytes:
        """The JSON of the line with this object's scores and check, and with `members`.

        The values of `members` are JSON; they replace or add keys. Everything else is copied
        without being parsed, which is fast.
        """
        given = self._later_scores()
        if not (given or self.row_texts):  # mostly, and then one cut is often enough
            before, key, after = self.line.rpartition(_TOOLS)
            own_tools, rest = bytes(self.raw_tools), strip_checksum(after)
            if key not in before and rest.startswith(own_tools) and rest.endswith(_END):
                new = dict(members)
                tools, rest = new.pop("tools", own_tools), rest[len(own_tools) : -len(_END)]
                added = [b',"%b":%b' % (name.encode(), json) for name, json in new.items()]
                return b"".join((before, key, tools, rest, *added, b"}"))
        places = _members_in(self.line)
        places.pop(CHECKSUM_KEY, None)
        if places.pop(ROW_TEXTS, None) is not None:
            places["row"] = msgspec.Raw(msgspec.json.encode(self.row))
        for name, value in given.items():
            places[name] = msgspec.Raw(msgspec.json.encode(value))
        places |= {name: msgspec.Raw(json) for name, json in members.items()}
        return msgspec.json.encode(places)

    def as_dict(self) -> dict[str, Any]:
        """Everything in the line, including keys that are not fields, with this object's scores and
        check."""
        given: dict[str, Any] = msgspec.to_builtins(self._later_scores())
        return self._content() | given

    def whole_line(self) -> bytes:
        """The line without its checksum and references: the same for the same conversation."""
        if not self.row_texts:
            return strip_checksum(self.line)
        return exact_json.dumps(self._content()) + b"\n"

    def _content(self) -> dict[str, Any]:
        content = read_object(self.line)
        if content.pop(ROW_TEXTS, None) is not None:
            content["row"] = self.row
        return content

    def _later_scores(self) -> dict[str, Any]:
        """The scores, and the check of the last that has one."""
        if self.scores is None:
            return {}
        checks = [score.check for score in self.scores if score.check is not None]
        return {"scores": self.scores, **({"check": checks[-1]} if checks else {})}


_decode = msgspec.json.Decoder(Record).decode
_members_in = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def decode_record(line: bytes) -> Record:
    """The record of a line of records.jsonl. Raises `DamagedLine`, which names the field."""
    if not verify_checksum(line):
        read_object(line)  # the parts that are no fields are damaged or whole, too
    try:
        record = _decode(line)
        record.tools = _shared_tools(bytes(record.raw_tools))
        if record.row_texts:
            restore_texts(record.row, record.messages, record.row_texts)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        read_object(line)  # what is no JSON is described there
        raise _describe_damage(error) from error
    for message in record.messages:
        if message.tool_call_id is None and message.role == "tool":
            place = f"messages[{record.messages.index(message)}]"
            raise DamagedLine(f"`{place}`: object missing required field `tool_call_id`")
    record.line = line
    return record


def stored_messages(messages: Sequence[Mapping[str, Any]]) -> list[StoredMessage]:
    """Messages of a conversation that is not stored yet, in the form of records."""
    return msgspec.convert(messages, list[StoredMessage])


def _describe_damage(error: Exception) -> DamagedLine:
    problem, _, path = str(error).partition(" - at ")
    field = path.strip("`").removeprefix("$").removeprefix(".")
    where = f"`{field}`: " if field else ""
    return DamagedLine(f"{where}{problem[:1].lower()}{problem[1:]}")


class _SharedTools:
    """Gives records with equal tools the same list."""

    def __init__(self) -> None:
        self._last: tuple[bytes, Tools] = b"", ()

    def __call__(self, json: bytes) -> Tools:
        """The tools of a record. Raises `msgspec.ValidationError`."""
        last, tools = self._last
        if json != last:  # comparing takes a tenth of the time of hashing
            tools = _parse_tools(json)
            self._last = json, tools
        return tools


_shared_tools = _SharedTools()


@lru_cache(maxsize=64)
def _parse_tools(json: bytes) -> Tools:
    tools: list[dict[str, Any]] = exact_json.loads(json)
    try:
        msgspec.convert(tools, list[_OfferedTool])
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at ")
        raise msgspec.ValidationError(f"{problem} - at `$.tools{path.strip('`')[1:]}`") from None
    return tools
