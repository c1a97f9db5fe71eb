"""A trajectory as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from textwrap import indent
from typing import Any

import click

from agent.messages.message import (
    USER_TURN,
    split_inline_reasoning,
    user_key,
)
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.basics.text import plural
from batch_trajectories.export.conversation.own_work import (
    failure_kind,
    first_reply,
    users_with_calls,
)
from batch_trajectories.records.checks import judge_record
from batch_trajectories.records.record_types import (
    AgentFacts,
    InnerRecord,
    Record,
    StoredCall,
    StoredConversation,
    StoredMessage,
    StoredTurn,
    StoredUsage,
)
from batch_trajectories.report.facts import find_flags, make_table_row
from batch_trajectories.report.formatting import count, dollars, moment, one_line, plain, seconds

_STEP = "    "
_ID_CHARS = 200


class _Blocks:
    """A record, or an inner conversation of one, as blocks of text."""

    def __init__(self, conversation: StoredConversation, *, colours: bool) -> None:
        """`colours` adds the escapes that colour a terminal."""
        record = self._conversation = conversation
        self._colours = colours
        self._turns = record.turns
        self._results = {
            message.tool_call_id: message for message in record.messages if message.role == "tool"
        }
        self._seconds = {(call.turn, call.call): call.duration_s for call in record.tool_calls}
        self._inner = {inner.key: inner for inner in record.inner}

    def blocks(self, only: int | None = None) -> Iterator[str]:
        messages = self._conversation.messages
        first = first_reply(messages, turns=len(self._turns))
        calls = {call.id for message in messages for call in message.tool_calls}
        users = self._calls_of_users()
        for key, inner in self._inner.items() if only is None else ():
            # That of a stage, not of a subagent; calls of the user are beside its messages.
            if key not in calls and key not in users:
                yield from self._inside(inner)
        sent = [note for note in self._conversation.notes if note.reason == USER_TURN]
        replies = written = 0
        answered: set[str] = set()
        for n, message in enumerate(messages):
            turn = None
            if n >= first and message.role == "assistant":
                turn = self._turns[replies]
                replies += 1
            answered.update(call.id for call in message.tool_calls)
            if message.tool_call_id in answered:
                continue  # shown under its call
            further = sent[written].text if written < len(sent) and n > first else None
            user = None
            if message.role == "user" and further and message.content.startswith(further):
                written += 1
                user = users.pop(user_key(written), None)
            elif message.role == "user" and n < first:
                user = users.pop(user_key(0), None)
            if user is not None and only is None:
                yield from self._inside(user)
            if only is None or (turn is not None and turn.turn == only):
                yield from self._message(message, turn)
        for user in users.values() if only is None else ():  # of a message that was not sent
            yield from self._inside(user)

    def _calls_of_users(self) -> dict[str, InnerRecord]:
        """The conversations in which a simulated user called tools, by key."""
        return {inner.key: inner for inner in users_with_calls(self._conversation)}

    def _message(self, message: StoredMessage, turn: StoredTurn | None) -> Iterator[str]:
        title = message.role if turn is None else f"turn {turn.turn}"
        facts = "" if turn is None else f" · {_facts(turn)}"
        yield ""
        yield self._paint(f"=== {title}", fg="cyan", bold=True) + self._paint(facts, dim=True)
        if turn is not None:
            for reply in self._conversation.discarded:
                if reply.turn == turn.turn:
                    yield self._paint(f"(set aside before: {plain(reply.discarded)})", dim=True)
        inline = split_inline_reasoning(message.content)
        for reasoning in filter(None, (message.reasoning, inline.reasoning)):
            yield self._paint(indent(plain(reasoning), "  | ", lambda _: True), dim=True)
        if inline.rest.strip():
            yield plain(inline.rest)
        yield from self._notes(message)
        for n, call in enumerate(message.tool_calls):
            took = None if turn is None else self._seconds.get((turn.turn, n))
            yield from self._call(call, took)

    def _call(self, call: StoredCall, took: float | None) -> Iterator[str]:
        time = "" if took is None else self._paint(f" {seconds(took)}", dim=True)
        yield self._paint(f"--> {one_line(call.function.name, _ID_CHARS)}", fg="yellow") + time
        yield from _values(call.function.arguments)
        if call.id in self._inner:
            yield from self._inside(self._inner[call.id])
        result = self._results.get(call.id)
        if result is None:
            yield "<-- no result"
            return
        failure = ""
        if result.is_error:
            failure = self._paint(f" failed: {plain(failure_kind(result.details))}", fg="red")
        yield self._paint("<--", fg="yellow") + failure
        yield from _values(result.content)
        yield from self._notes(result)

    def _notes(self, message: StoredMessage) -> Iterator[str]:
        if message.notes:
            names = plain(", ".join(message.notes))
            yield self._paint(f"(written into it by the runtime: {names})", dim=True)

    def _inside(self, inner: InnerRecord) -> Iterator[str]:
        yield ""
        title = plain(f"{_STEP}conversation of {inner.name} ({inner.key})")
        yield self._paint(title, fg="magenta")
        blocks = _Blocks(inner, colours=self._colours).blocks()
        yield from (indent(block, _STEP) for block in blocks)

    def _paint(self, text: str, **style: Any) -> str:
        return click.style(text, **style) if self._colours and text else text


class ConversationText(_Blocks):
    """A record as text."""

    def __init__(self, record: Record, *, colours: bool) -> None:
        """`colours` adds the escapes that colour a terminal."""
        super().__init__(record, colours=colours)
        self._record = record

    def text(self, *, turn: int | None = None) -> Iterator[str]:
        """The head, then a block per message; with `turn`, only of that turn.

        Raises `ConfigError` if there is no such turn.
        """
        numbers = [each.turn for each in self._turns]
        if turn is not None and turn not in numbers:
            has = f"turns 1 to {numbers[-1]}" if numbers else "no turns"
            raise ConfigError(f"--turn {turn}: {self._record.id} has {has}")
        yield from self._head()
        yield from self.blocks(turn)

    def _head(self) -> Iterator[str]:
        record, row = self._record, make_table_row(self._record)
        usage = record.usage or {}
        colour = "green" if row["status"] == "completed" else "red"
        status = self._paint(plain(row["status"]), fg=colour)
        yield f"{self._paint(one_line(record.id, _ID_CHARS), bold=True)}  {status}"
        failed = f" ({row['failed_calls']} failed)" if row["failed_calls"] else ""
        share = row["cached_share"]
        cached = "" if share is None else f" ({100 * share:.1f}% cached)"
        yield (
            f"{plain(record.model or 'unknown')} · {plural(row['turns'], 'turn')} · "
            f"{plural(row['calls'], 'call')}{failed} · "
            f"{count(usage.get('input_tokens'))} tokens in{cached}, "
            f"{count(usage.get('output_tokens'))} out · {dollars(record.cost_usd)} · "
            f"{seconds(row['duration_s'])} at work · ended {moment(record.finished_at)}"
        )
        if record.status_reason:
            yield plain(record.status_reason)
        if (error := record.error) is not None:
            yield self._paint(plain(f"{error.error_class}: {error.message}"), fg="red")
        if row["reward"] is not None:
            result = "passed" if row["passed"] else "not passed"
            yield f"{result}, reward {row['reward']:g}"
        if (without := judge_record(record).error) is not None:
            yield self._paint(plain(f"check without result: {without}"), fg="red")
        if row["rewards"]:
            named = (f"{name} {reward:g}" for name, reward in row["rewards"].items())
            yield plain(f"rewards: {', '.join(named)}")
        for score in record.scores or ():
            if score.error is not None:
                yield self._paint(plain(f"{score.source}: {score.error}"), fg="red")
        if record.agent is not None:
            yield plain(_agent(record, record.agent))
        if missed := row["missed_turns"]:
            turns = ", ".join(map(str, missed))
            yield f"{plural(len(missed), 'turn')} missed the prompt cache: {turns}"
        # The verdict stands above.
        if flags := [name for name in find_flags(record) if name not in ("passed", "not passed")]:
            yield f"unusual: {', '.join(flags)}"


def turn_as_json(record: Record, turn: int) -> dict[str, Any]:
    """One turn of a record: `id`, `turn` (its numbers), `messages` (from its reply on).

    Raises `ConfigError` if there is no such turn.
    """
    messages = record.messages
    first = first_reply(messages, turns=len(record.turns))
    starts = [n for n in range(first, len(messages)) if messages[n].role == "assistant"]
    for place, (start, numbers) in enumerate(zip(starts, record.turns, strict=True)):
        if numbers.turn == turn:
            end = starts[place + 1] if place + 1 < len(starts) else len(messages)
            whole = record.as_dict()
            shown = whole["messages"][start:end]
            return {"id": record.id, "turn": whole["turns"][place], "messages": shown}
    raise ConfigError(f"--turn {turn}: {record.id} has {len(starts)} turns")


def _agent(record: Record, agent: AgentFacts) -> str:
    """A line about the agent that held the conversation."""
    name = " ".join(filter(None, (agent.name, agent.version)))
    facts = [f"agent: {name}" if name else "agent", plural(agent.starts, "start")]
    if agent.exit_code is not None:
        facts.append(f"exit code {agent.exit_code}")
    facts += [
        f"{thread.name} ({thread.key}): {plural(thread.calls, 'call')}" for thread in record.threads
    ]
    if record.set_aside:
        facts.append(f"{plural(len(record.set_aside), 'call')} set aside")
    if record.diverged_at is not None:
        facts.append(f"diverged after {plural(record.diverged_at, 'answered call')}")
    if agent.stripped_tools:
        facts.append(f"without {', '.join(agent.stripped_tools)}")
    return " · ".join(facts)


def _facts(turn: StoredTurn) -> str:
    usage = turn.usage or StoredUsage()
    cached = f" ({count(usage.cache_read_tokens)} cached)" if usage.cache_read_tokens else ""
    return (
        f"{count(usage.input_tokens)} in{cached}, {count(usage.output_tokens)} out · "
        f"{dollars(turn.cost_usd)} · {seconds(turn.duration_s)} · {plain(str(turn.finish_reason))}"
    )


def _values(text: str) -> Iterable[str]:
    """The values of a JSON object by name; the text itself if it is no JSON object."""
    try:
        values = exact_json.loads(text)
    except exact_json.JSONDecodeError:
        values = None
    if not isinstance(values, dict) or not values:
        yield indent(plain(text), _STEP)
        return
    for name, value in values.items():
        shown = value if isinstance(value, str) else exact_json.dumps(value).decode()
        if "\n" in shown:
            yield f"{_STEP}{plain(name)}:"
            yield indent(plain(shown), _STEP * 2)
        else:
            yield f"{_STEP}{plain(name)}: {plain(shown)}"
