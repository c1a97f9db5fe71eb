"""Parses a record into a `Conversation`, once for all formats, which only render it.

In a conversation, reasoning is separate from text, arguments are JSON objects, a turn that the
provider paused is one turn, and the final answer is text however the model gave it. A record that
breaks a rule raises Rejected; no turn is repaired, shortened or invented.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import msgspec

from agent.messages.leaked_calls import find_leaked_call, has_stray_thought, may_leak
from agent.messages.message import (
    EARLIER_RESPONSE,
    opens_reasoning,
    part_kind,
    placeholder_parts,
    provider_call,
    split_inline_reasoning,
)
from agent.state.final_answer import RESERVED_TOOLS
from batch_trajectories.export.conversation.authors import (
    assign_authors,
    ends_with_call,
    is_agent_conversation,
    order_messages,
)
from batch_trajectories.export.conversation.ending import is_answered, rewrite_ending
from batch_trajectories.export.conversation.metadata import record_metadata
from batch_trajectories.export.conversation.own_work import (
    AuthoredWork,
    WorkCounts,
    failure_kind,
    interrupted_calls,
    is_reasoning_hidden,
    tool_stats,
)
from batch_trajectories.export.conversation.row_json import (
    MARKER,
    Token,
    control_token,
    holds_marker,
    parse_arguments,
    read_arguments,
    write_json,
)
from batch_trajectories.export.conversation.tolerance import Flaw, Tolerance
from batch_trajectories.export.conversation.turns import (
    Call,
    Conversation,
    Entry,
    Result,
    Turn,
    UserMessage,
    compute_once,
    tool_names,
)
from batch_trajectories.export.conversation.validity import (
    Reason,
    Rejected,
    check_conversation,
    check_finished,
)
from batch_trajectories.records.checks import has_passed_later_check
from batch_trajectories.records.record_types import (
    Record,
    StoredCall,
    StoredMessage,
    StoredTurn,
    Tools,
)

# Conversations of the usual shape are read in one pass, twice as fast as by the general reader.
#
# The usual shape: a prompt, then turns of this run's model, each with calls of offered tools and
# their results in the same order, and at last an answer in text. Nothing was inherited or attached,
# and no text may be read as structure. `_read_any` reads all other conversations by all rules; for
# the usual shape it gives the same result.


def read_usual_entries(record: Record, authored: AuthoredWork) -> list[Entry] | None:
    """Read a completed conversation of the usual shape; None if it has another shape.

    Sets the start and the counts of `authored`.
    """
    messages, turns = record.messages, authored.turns
    offered = compute_once(record.tools, _unreserved_names)
    prompt_at = 1 if messages and messages[0].role == "system" else 0
    if (
        offered is None
        or record.agent is not None
        or len(turns) != len(record.turns)
        or len(messages) == prompt_at
        or messages[0].provider_blocks is not None
    ):
        return None
    prompt = messages[prompt_at]
    text = prompt.content
    if prompt.role != "user" or prompt.provider_blocks is not None or not text or text.isspace():
        return None
    start = prompt_at + 1
    reader = _UsualReader(messages, offered, start=start)
    entries: list[Entry] = [UserMessage(text)]
    for number, stored in enumerate(turns, start=1):
        turn = reader.read_turn(number, stored, is_last=number == len(turns))
        if turn is None:
            return None
        entries.append(turn)
    whole_text = "\n".join([text, *reader.texts])
    if not reader.is_at_end or holds_marker(whole_text):
        return None
    may_hold_markup = may_leak(whole_text) or "[/THINK]" in whole_text
    if may_hold_markup and _holds_server_markup(entries, offered):
        return None
    authored.set_known(start, reader.counts())
    return entries


class _UsualReader:
    """Reads the turns of one conversation of the usual shape, and counts what is in them."""

    def __init__(
        self, messages: Sequence[StoredMessage], offered: Collection[str], *, start: int
    ) -> None:
        """`start` is the index of the first reply, `offered` are the names of the tools."""
        self._messages = messages
        self._offered = offered
        self._next = start
        """The index of the next message to read."""
        self.texts: list[str] = []
        """Text and reasoning of the replies so far."""
        self._stats: dict[str, dict[str, Any]] = {}
        self._failures: list[str] = []
        self._replies = 0
        self._results = 0
        self._with_reasoning = 0
        self._hidden = 0
        self._with_token_ids = 0
        self._started_at = math.inf
        self._ended_at = -math.inf

    @property
    def is_at_end(self) -> bool:
        """Whether all messages were read."""
        return self._next == len(self._messages)

    def read_turn(self, number: int, stored: StoredTurn, *, is_last: bool) -> Turn | None:
        """Read a reply and the results of its calls; None if they have another shape."""
        if self.is_at_end:
            return None
        message = self._messages[self._next]
        self._next += 1
        text, blocks, wanted = message.content, message.provider_blocks, message.tool_calls
        if message.role != "assistant" or "<" in text:
            return None
        if blocks is not None and (
            placeholder_parts("assistant", blocks.blocks) or any(map(provider_call, blocks.blocks))
        ):
            return None
        # All replies but the last one have calls; the last one has text.
        is_blank = not text or text.isspace()
        if is_last == bool(wanted) or (is_last and is_blank):
            return None
        reasoning = message.reasoning or ""
        self.texts += (text, reasoning)
        hides_reasoning = False
        if reasoning and not reasoning.isspace():
            self._with_reasoning += 1
        else:
            reasoning = ""
            hides_reasoning = is_reasoning_hidden(message, stored.reasoning_tokens)
            self._hidden += hides_reasoning
        self._count_turn(stored)
        calls: list[Call] = []
        results: list[Result] = []
        if wanted and not self._read_calls(wanted, calls, results):
            return None
        return Turn(
            number=number,
            reasoning=reasoning,
            text="" if is_blank else text,
            calls=calls,
            results=results,
            replies=1,
            author="model",
            hides_reasoning=hides_reasoning,
        )

    def _count_turn(self, stored: StoredTurn) -> None:
        self._replies += 1
        if stored.started_at < self._started_at:
            self._started_at = stored.started_at
        if (end := stored.started_at + stored.duration_s) > self._ended_at:
            self._ended_at = end
        if stored.tokens is not None:
            self._with_token_ids += stored.has_ids

    def _read_calls(
        self, wanted: Sequence[StoredCall], calls: list[Call], results: list[Result]
    ) -> bool:
        """Read the calls of a reply, and the next messages as their results, into the lists.

        Returns False if they have another shape.
        """
        stored_results = self._messages[self._next : self._next + len(wanted)]
        if len(stored_results) < len(wanted):
            return False
        self._next += len(wanted)
        self._results += len(wanted)
        for call, result in zip(wanted, stored_results, strict=True):
            function = call.function
            name = function.name
            if (
                name not in self._offered
                or result.role != "tool"
                or result.tool_call_id != call.id
                or result.provider_blocks is not None
            ):
                return False
            try:
                calls.append(Call(call.id, name, *parse_arguments(function.arguments)))
            except ValueError:  # no JSON object
                return False
            is_error = bool(result.is_error)
            results.append(Result(call.id, name, result.content, is_error))
            if (stats := self._stats.get(name)) is None:
                stats = {"tool": name, "count": 0, "success": 0, "failure": 0}
                self._stats[name] = stats
            stats["count"] += 1
            stats["failure" if is_error else "success"] += 1
            if is_error:
                self._failures.append(failure_kind(result.details))
        has_repeated_ids = len(calls) > 1 and len({call.id for call in calls}) < len(calls)
        return not has_repeated_ids

    def counts(self) -> WorkCounts:
        """The counts of all turns so far."""
        return WorkCounts(
            tools=[self._stats[name] for name in sorted(self._stats)],
            replies=self._replies,
            with_reasoning=self._with_reasoning,
            hidden=self._hidden,
            failures=self._failures,
            hollow=0,
            results=self._results,
            with_token_ids=self._with_token_ids,
            started_at=self._started_at,
            ended_at=self._ended_at,
        )


def _holds_server_markup(entries: list[Entry], tools: Collection[str]) -> bool:
    for entry in entries:
        if type(entry) is Turn:
            has_calls = bool(entry.calls)
            if has_stray_thought(entry.text):
                return True
            if find_leaked_call(entry.text, entry.reasoning, has_calls=has_calls, tools=tools):
                return True
    return False


def _unreserved_names(tools: Tools) -> frozenset[str] | None:
    """The names of tools; None if one of the tools ends a conversation."""
    names = tool_names(tools)
    return names if RESERVED_TOOLS.isdisjoint(names) else None


def read_conversation(record: Record, authored: AuthoredWork | None = None) -> Conversation:
    """Parse a record; raises Rejected if it breaks a rule of all formats.

    `authored` is that of the record; None: it is made here. A record that ended early is parsed,
    too, with `completed` false; the caller decides where it belongs.
    """
    if is_agent_conversation(record):
        record = order_messages(record)
        authored = None
    authored = authored or AuthoredWork(record)
    if not authored.turns:
        raise Rejected(Reason.NO_REPLY, f"status {record.status}: the model never replied")
    completed = record.status == "completed"
    run_flaws = find_run_flaws(record)
    usual = read_usual_entries(record, authored) if completed and not run_flaws else None
    if usual is None:
        completed = completed or has_passed_later_check(record)
        messages, tools, entries, flaws, completion = _read_any(record, authored, run_flaws)
        system = joined_system_prompt(messages)
        has_others = any(type(e) is Turn and e.author != "model" for e in entries)
    else:
        messages, tools, entries, flaws = record.messages, record.tools, usual, ()
        completion, has_others = "text", False
        system = joined_system_prompt(messages) if messages[0].role == "system" else ""
    is_rewritten = completion == "final_answer"
    stats = tool_stats(messages[authored.start :]) if is_rewritten else authored.counts.tools
    # Notes on a parent's turns are in the parent's row.
    noted: Sequence[StoredMessage] = record.messages
    if len(authored.turns) < len(record.turns):
        noted = authored.messages
    read = Conversation(
        system=system,
        entries=entries,
        tools=tools,
        completed=completed,
        record=record,
        authored=authored,
        metadata=record_metadata(
            record,
            completion=completion if completed else None,
            stats=stats,
            noted=noted,
            finish_reason=record.turns[-1].finish_reason,
        ),
        num_tool_calls=sum([tool["count"] for tool in stats]),
        flaws=flaws,
        has_other_authors=has_others,
    )
    masked_turns = None if record.imported is None else record.imported.get("no_loss")
    return _mask_imported(read, masked_turns) if masked_turns else read


def _mask_imported(conversation: Conversation, turns: Sequence[int]) -> Conversation:
    """Mask the replies with these numbers, which the source of an imported conversation masks."""
    replies = conversation.replies_by_turn
    entries = [
        msgspec.structs.replace(entry, masked=("marked in its source",))
        if isinstance(entry, Turn)
        and any(reply.turn in turns for reply in replies.get(entry.number, ()))
        else entry
        for entry in conversation.entries
    ]
    return msgspec.structs.replace(conversation, entries=entries)


def refuse_all_masked(conversation: Conversation) -> None:
    """Raise Rejected for an imported conversation if its source masks every turn."""
    # The format kto does not call this: its rows may hold conversations that are not learnt.
    if conversation.record.imported is None:
        return
    turns = [entry for entry in conversation.entries if isinstance(entry, Turn)]
    if any(turn.masked for turn in turns) and not any(turn.has_loss for turn in turns):
        raise Rejected(Reason.ALL_MASKED, "its source says that none of its turns carries loss")


class _ReadMessages(NamedTuple):
    """The parts of a record as its row shows them."""

    messages: Sequence[StoredMessage]
    tools: Tools
    entries: Sequence[Entry]
    flaws: Sequence[Flaw]
    completion: str | None


def _read_any(record: Record, authored: AuthoredWork, run_flaws: Sequence[Flaw]) -> _ReadMessages:
    """Read a conversation of any shape; `run_flaws` are those of `find_run_flaws`.

    Raises Rejected.
    """
    answered = is_answered(record)
    messages, tools, completion, invented = rewrite_ending(
        record.messages, record.tools, answered=answered
    )
    flaws = [Flaw(Reason.UNKNOWN_TOOL, detail) for detail in invented]
    flaws += run_flaws
    entries = read_entries(messages, tools, flaws)
    if answered and not ends_with_call(record):
        check_finished(messages)
    entries = assign_authors(entries, record, authored)
    if completion == "final_answer":
        last = entries[-1]
        assert isinstance(last, Turn)  # it holds the answer
        entries = [*entries[:-1], msgspec.structs.replace(last, replies=last.replies - 1)]
    entries = mark_hidden_reasoning(
        entries, record.messages, [turn.reasoning_tokens for turn in record.turns]
    )
    return _ReadMessages(
        messages=messages, tools=tools, entries=entries, flaws=flaws, completion=completion
    )


def find_run_flaws(record: Record) -> list[Flaw]:
    """The flaws that the run of a conversation causes, whatever its messages say; see `Reason`."""
    if record.check is None and not record.resumes and record.fork is None:
        return []  # mostly
    flaws = []
    if interrupted := interrupted_calls(record):
        flaws.append(Flaw(Reason.INTERRUPTED, f"calls {interrupted} were interrupted by a crash"))
    return [*flaws, *find_rewarded_leaks(record)]


def find_rewarded_leaks(record: Record) -> list[Flaw]:
    """The flaw of a conversation that has a reward and looked for the solution; else empty."""
    if record.check is None:
        return []
    from batch_trajectories.export.conversation.leaks import rewarded_leak

    if (leak := rewarded_leak(record)) is None:
        return []
    return [Flaw(Reason.LEAK_SUSPECTED, f"turn {leak.turn}: {leak.reason}: {leak.evidence}")]


def read_entries(
    messages: Sequence[StoredMessage],
    tools: Tools,
    flaws: list[Flaw],
    *,
    as_sent: bool = False,
) -> list[Entry]:
    """Read user messages and turns as entries; system messages are left out. Raises Rejected.

    A turn that the provider paused is one entry with its continuation. Flaws are added to `flaws`.
    `as_sent`: results stay in the order of the messages; else they get the order of their calls.
    """
    flaws += find_part_flaws(messages)
    flaws[:0] = find_parser_flaws(messages, tools)  # other formats call its tags by other names
    for detail in check_conversation(messages, tool_names(tools)):
        flaws.append(Flaw(Reason.UNKNOWN_TOOL, detail))
    entries: list[Entry] = []
    number = 1
    may_be_flawed = _may_be_flawed(messages)
    parts: list[StoredMessage] = []
    results: dict[str | None, StoredMessage] = {}
    for message in messages:
        role = message.role
        if role == "tool":
            results[message.tool_call_id] = message
            continue
        if parts and (results or role != "assistant"):
            entries.append(_read_turn(parts, results, number, flaws, may_be_flawed=may_be_flawed))
            number += 1
            parts, results = [], {}
        if role == "assistant":
            parts.append(message)
        elif role == "user":
            entries.append(UserMessage(_user_text(message, flaws, turn=number)))
    if parts:
        entries.append(_read_turn(parts, results, number, flaws, may_be_flawed=may_be_flawed))
    return [*map(_sort_results, entries, repeat(messages))] if as_sent else entries


def find_parser_flaws(messages: Sequence[StoredMessage], tools: Tools) -> list[Flaw]:
    """A flaw for each reply whose text has a tool call or a thought that a server should split off.

    See `agent.messages.leaked_calls`. Raises Rejected for a reply that has only a tool call in its
    reasoning.
    """
    flaws = find_leaked_calls(messages, tools)
    for number, message in enumerate(messages, start=1):
        text = message.content
        if message.role == "assistant" and has_stray_thought(text) and not MARKER.search(text):
            flaws.append(Flaw(Reason.MARKER_IN_TEXT, f"message {number}: a thought in its text"))
    return flaws


def find_leaked_calls(messages: Sequence[StoredMessage], tools: Tools) -> list[Flaw]:
    """A flaw for each reply with a tool call in its text or reasoning.

    Raises Rejected for a reply that has nothing else.
    """
    names = tool_names(tools)
    flaws = []
    for number, message in enumerate(messages, start=1):
        if message.role != "assistant":
            continue
        leak = find_leaked_call(
            message.content, message.reasoning, has_calls=bool(message.tool_calls), tools=names
        )
        if leak is None:
            continue
        flaw = Flaw(Reason.LEAKED_CALL, f"message {number}: {leak.describe()}")
        if not message.tool_calls and not split_inline_reasoning(message.content).rest.strip():
            raise Rejected(flaw.reason, flaw.detail)
        flaws.append(flaw)
    return flaws


def _sort_results(entry: Entry, messages: Sequence[StoredMessage]) -> Entry:
    """Put the results of a turn in the order of the messages."""
    if isinstance(entry, UserMessage) or len(entry.results) < 2:
        return entry
    order = {message.tool_call_id: n for n, message in enumerate(messages)}
    results = sorted(entry.results, key=lambda result: order[result.id])
    return msgspec.structs.replace(entry, results=results)


def _may_be_flawed(messages: Sequence[StoredMessage]) -> bool:
    """Whether any text of user or model may hold a tag or control token."""
    texts: list[str] = []
    for message in messages:
        if message.role in ("assistant", "user"):
            texts += (message.content, message.reasoning or "")
    return holds_marker("\n".join(texts))


def find_part_flaws(messages: Iterable[StoredMessage]) -> list[Flaw]:
    """A flaw for each content part that is not text, and for each call that a provider ran.

    Raises Rejected if earlier messages are unknown.
    """
    flaws = []
    for number, message in enumerate(messages, start=1):
        if message.provider_blocks is None:
            continue
        for part in placeholder_parts(message.role, message.provider_blocks.blocks):
            kind = part_kind(part)
            if kind == EARLIER_RESPONSE:
                raise Rejected(
                    Reason.EARLIER_RESPONSE_UNKNOWN,
                    f"message {number}: what precedes response {part.get('id')} is unknown",
                )
            reason = Reason.HAS_IMAGES if kind == "image" else Reason.HAS_FILES
            what = part.get("type") or part.get("kind") or next(iter(part), "part")
            flaws.append(Flaw(reason, f"message {number}: a part of the type {what!r}"))
        if message.role == "assistant":
            called = filter(None, map(provider_call, message.provider_blocks.blocks))
            flaws += (
                Flaw(
                    Reason.PROVIDER_CALL,
                    f"message {number}: the provider ran {name!r}, and rows cannot show it",
                )
                for name in called
            )
    return flaws


def refuse_control_tokens(text: str, tolerance: Tolerance, *, where: str) -> None:
    """Raise Rejected for text with a control token that is not accepted."""
    if token := control_token(text):
        tolerance.refuse([_token_flaw(token, where)])


def _token_flaw(token: Token, where: str) -> Flaw:
    return Flaw(Reason.CONTROL_TOKEN, f"{where}: {token.text!r}", token)


def joined_system_prompt(messages: Iterable[StoredMessage]) -> str:
    """The texts of all system messages, joined; "" without any."""
    texts = [message.content for message in messages if message.role == "system"]
    return "\n\n".join(text for text in texts if text.strip())


def mark_hidden_reasoning(
    entries: list[Entry],
    messages: Iterable[StoredMessage],
    reasoning_tokens: Sequence[int | None],
) -> list[Entry]:
    """Mark the turns whose reasoning the API hides.

    `messages` are those of the record; `reasoning_tokens` belong to its last replies.
    """
    for entry in entries:
        if isinstance(entry, Turn) and not entry.reasoning:
            break
    else:
        return entries
    replies = [message for message in messages if message.role == "assistant"]
    # Replies of the prompt come first and have no usage.
    tokens_by_reply = [*[None] * len(replies), *reasoning_tokens][-len(replies) :]
    marked = []
    end = 0
    is_hidden = False
    for entry in entries:
        if isinstance(entry, Turn):
            start, end = end, end + entry.replies
            made = list(zip(replies[start:end], tokens_by_reply[start:end], strict=True))
            if made:  # else the answer belongs to the previous reply
                is_hidden = any(is_reasoning_hidden(*reply) for reply in made)
            if is_hidden and not entry.reasoning:
                entry = msgspec.structs.replace(entry, hides_reasoning=True)
        marked.append(entry)
    return marked


def _user_text(message: StoredMessage, flaws: list[Flaw], *, turn: int) -> str:
    text = message.content
    if not text or text.isspace():
        raise Rejected(Reason.EMPTY_VALUE, f"user message before turn {turn}: blank")
    if token := control_token(text):
        flaws.append(_token_flaw(token, f"user message before turn {turn}"))
    return text


def _read_turn(
    messages: Sequence[StoredMessage],
    results: Mapping[str | None, StoredMessage],
    number: int,
    flaws: list[Flaw],
    *,
    may_be_flawed: bool,
) -> Turn:
    """Read a turn from its `messages`: one, or several if the provider paused.

    `results` belong to the calls of the last message, by id of the call.
    """
    if len(messages) == 1:
        reasoning, text = _split_reasoning(messages[0], number)
    else:
        parts = [_split_reasoning(message, number) for message in messages]
        reasoning, text = (_join_parts(texts) for texts in zip(*parts, strict=True))
    if may_be_flawed:
        _find_structure(reasoning, flaws, number, "reasoning")
        _find_structure(text, flaws, number, "text")
    tool_calls = messages[-1].tool_calls
    if not text or text.isspace():
        text = ""
        if not tool_calls:
            raise Rejected(
                Reason.REASONING_ONLY if reasoning else Reason.EMPTY_VALUE,
                f"turn {number}: neither text nor calls",
            )
    try:
        calls = [
            Call(call.id, call.function.name, *parse_arguments(call.function.arguments))
            for call in tool_calls
        ]
    except ValueError:
        calls = [_read_call(call, flaws, number, n) for n, call in enumerate(tool_calls, start=1)]
    answers = [
        Result(
            id=call.id,
            name=call.name,
            content=result.content,
            is_error=bool(result.is_error),
            own_chars=result.own_chars,
        )
        for call in calls
        if (result := results.get(call.id)) is not None
    ]
    return Turn(
        number=number,
        reasoning=reasoning,
        text=text,
        calls=calls,
        results=answers,
        replies=len(messages),
    )


def _read_call(call: StoredCall, flaws: list[Flaw], number: int, position: int) -> Call:
    """Read a call whose arguments may be no JSON object, which adds a flaw."""
    try:
        arguments = read_arguments(call, where=f"turn {number}, call {position}")
    except Rejected as rejected:
        flaws.append(Flaw(rejected.reason, rejected.detail))
        arguments = write_json(call.function.arguments), {}
    return Call(call.id, call.function.name, *arguments)


def _find_structure(text: str, flaws: list[Flaw], number: int, where: str) -> None:
    """Add a flaw for tags and control tokens in a model's own text."""
    if "<" in text and (marker := MARKER.search(text)):
        flaws.append(Flaw(Reason.MARKER_IN_TEXT, f"turn {number}: {marker[0]} in its {where}"))
    if token := control_token(text):
        flaws.append(_token_flaw(token, f"turn {number}, {where}"))


def _split_reasoning(message: StoredMessage, number: int) -> tuple[str, str]:
    """Reasoning and text of a reply; equal reasoning in its field and inline is taken once."""
    apart, text = message.reasoning or "", message.content
    if apart.isspace():
        apart = ""
    if "<" not in text:
        return apart, text
    inline, text = split_inline_reasoning(text)
    if opens_reasoning(text):
        raise Rejected(Reason.UNCLOSED_THINK, f"turn {number}: begins {text.lstrip()[:40]!r}")
    if not inline or apart.strip() == inline:
        return apart and (inline or apart), text
    return f"{apart}\n\n{inline}" if apart else inline, text


def _join_parts(parts: Sequence[str]) -> str:
    """Join the parts that are not blank by blank lines."""
    *earlier, last = [part for part in parts if part.strip()] or [""]
    return "\n\n".join([*(part.rstrip() for part in earlier), last])
