"""The state of one conversation, computed from its events.

Live runs and resumes use the same `Trajectory.apply`. So a conversation that was killed at any
point, and is replayed from its journal, has the same state as before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from agent.messages.message import (
    COST_ONLY,
    SUMMARY,
    USER_TURN,
    WORKSPACE_LOST,
    CutEvent,
    Event,
    ForkedEvent,
    Message,
    NoteEvent,
    ReplyEvent,
    RestartedEvent,
    ResultEvent,
    ResumedEvent,
    ToolCall,
    Usage,
    split_inline_reasoning,
    summary_upto,
)
from agent.models.deadline import TimeAtWork
from agent.state.final_answer import FinalAnswer, parse_final_answer
from agent.state.tally import Tally, sum_cost, sum_usage

if TYPE_CHECKING:
    from agent.wires.threads import Threads

CONTINUE_CUT = "continue_cut"
"""The note that asks for the rest of a text that was cut by the token limit."""

Status = Literal[
    "completed",
    "max_turns",
    "length",
    "refusal",
    "leaked_call",
    "repeat",
    "errors",
    "budget",
    "time_limit",
    "context_exceeded",
    "user_context_exceeded",
    "awaiting_input",
    "cannot_complete",
    "cancelled",
    "failed",
    "wrong_answer",
]
"""The ending of a conversation; only `completed` means that the model gave its final answer."""

SHARED_LIMITS: frozenset[Status] = frozenset({"budget", "time_limit"})
"""Endings by a limit that inner conversations share: they end the outer conversation, too."""


class Trajectory:
    """A growing conversation: `messages` as sent and received, and the cost of each turn.

    Messages are only appended, except that a note goes into the last message if that is a tool
    result or a user message. The results of one turn are appended together, in call order, once
    all of them are known.
    """

    def __init__(self, opening: Sequence[Message], events: Iterable[Event] = ()) -> None:
        self.discarded: list[ReplyEvent] = []
        """Unusable replies, after which the model was asked again."""
        self.cut: list[CutEvent] = []
        """Model calls that were cut off."""
        self.resumes: list[ResumedEvent] = []
        self.restarts: list[RestartedEvent] = []
        self.forked: ForkedEvent | None = None
        """The parent of a branch; None for other conversations."""
        self.agent_calls: Threads | None = None
        """The calls of an agent that runs as a command; None without such events."""
        self._outer: Trajectory | None = None
        self.spent_usd = 0.0
        """Dollars of all replies with a known price, inner conversations included."""
        self.unpriced = 0
        """Replies whose price is unknown."""
        self.spent_tokens = 0
        """Known input and output tokens of all replies, inner conversations included."""
        self.uncounted = 0
        """Replies whose tokens are not all known."""
        self._at_work = TimeAtWork()
        # Added only when somebody asks: most conversations have no time limit.
        self._not_added: list[ReplyEvent | CutEvent | ResultEvent] = []
        """Events that `seconds_at_work` has yet to add to `_at_work`."""
        self._first_opening = opening
        self._begin(opening)
        for event in events:
            self.apply(event)

    def _begin(self, opening: Sequence[Message]) -> None:
        """Set the fields that belong to one attempt; a restart begins another attempt."""
        self.replies: list[ReplyEvent] = []
        """The replies that are part of the conversation."""
        self.results: list[ResultEvent] = []
        self.started_calls: set[str] = set()
        """The ids of open calls that were started; see `BeganEvent`."""
        self.notes: list[NoteEvent] = []
        self.summarized: dict[int, str] = {}
        """The key of the summary that a request had for older messages, by the index of its reply.

        Replies without such a summary are absent.
        """
        self.replies_used = 0
        """The number of user replies that were given to tools that asked."""
        self.inner: dict[str, InnerConversation] = {}
        """Conversations inside this one by key (see `SubEvent`)."""
        self.tally = Tally()
        self.reasks = 0
        """Replies discarded since the last accepted one."""
        self.new_notes: list[NoteEvent] = []
        """The notes since the last reply."""
        self.is_reopened = False
        """Whether an event has replaced the messages that the conversation starts with."""
        self._results_of_turn: dict[int, ResultEvent] = {}
        self._notes_of: Counter[str] = Counter()
        self._text_before = ""
        """The beginning of the answer, if replies were cut by the token limit and continued."""
        self._open(opening)

    @property
    def turns(self) -> int:
        """The number of accepted model replies."""
        return len(self.replies)

    def apply(self, event: Event) -> None:
        """Take one event into the conversation."""
        match event["kind"]:
            case "reply":
                self._apply_reply(event)
            case "cut":
                self.outermost()._not_added.append(event)
                self.cut.append(event)
            case "result":
                self._apply_result(event)
            case "began":
                self.started_calls.add(event["call_id"])
            case "note":
                self._apply_note(event)
            case "opening":
                self._open(event["messages"])
                self.is_reopened = True
            case "resumed":
                self.resumes.append(event)
            case "restarted":
                self._restart(event)
            case "forked":
                self.forked = event
                self._not_added.clear()  # the time of its parent does not count
            case "sub":
                self.begin_inner(event["key"], event["name"]).apply(event["event"])
            case "exchange" | "agent_restarted" | "answered" | "agent_exit":
                if event["kind"] == "exchange":
                    self._pay(event["reply"])
                if self.agent_calls is None:
                    # Few runs have agents that call.
                    from agent.wires.threads import Threads

                    self.agent_calls = Threads()
                self.agent_calls.apply(event)

    def begin_inner(self, key: str, name: str) -> Trajectory:
        """Begin the inner conversation `key`, or return it if it has begun; see `SubEvent`."""
        if key not in self.inner:
            inner = self.inner[key] = InnerConversation(name)
            inner.trajectory._outer = self
        return self.inner[key].trajectory

    def outermost(self) -> Trajectory:
        """The outermost conversation around this one, or this one."""
        return self if self._outer is None else self._outer.outermost()

    def seconds_at_work(self) -> float:
        """The time of all model and tool calls, inner conversations included."""
        for event in self._not_added:
            began, ended = event["started_at"], event["started_at"] + event["duration_s"]
            if event["kind"] != "result":
                began += event.get("waited_s", 0.0)
            self._at_work.add(began, ended)
        self._not_added.clear()
        return self._at_work.seconds

    def count_notes(self, reason: str) -> int:
        """The number of notes that rule `reason` has written."""
        return self._notes_of.get(reason, 0)

    def open_calls(self) -> list[tuple[int, ToolCall]]:
        """The calls of the last reply that have no result yet, with their numbers."""
        calls = self.last_calls()
        if len(self._results_of_turn) == len(calls):
            return []
        return [(n, call) for n, call in enumerate(calls) if n not in self._results_of_turn]

    def last_calls(self) -> list[ToolCall]:
        """The calls of the last reply."""
        return self.replies[-1]["message"].get("tool_calls", []) if self.replies else []

    def last_results(self) -> list[ResultEvent]:
        """The known results of the last reply's calls, in call order."""
        return [self._results_of_turn[n] for n in sorted(self._results_of_turn)]

    def final_call(self) -> FinalAnswer | None:
        """The last reply's successful call of a reserved tool; None if it has none."""
        for n, call in enumerate(self.last_calls()):
            result = self._results_of_turn.get(n)
            if result is None or result["message"]["is_error"]:
                continue
            function = call["function"]
            if finish := parse_final_answer(function["name"], function["arguments"]):
                # In the text of the result, references to other results are resolved.
                return FinalAnswer(finish.tool, result["message"]["details"]["text"])
        return None

    def final_text(self) -> str:
        """The answer of the last reply; "" if it called tools, or if there is no reply.

        A text that was cut and continued is one answer. Reasoning is not part of it.
        """
        if not self.replies:
            return ""
        if finish := self.final_call():
            return finish.text
        if self.last_calls():
            return ""
        text = self._text_before + self.replies[-1]["message"]["content"]
        return split_inline_reasoning(text).rest

    def last_reasoning(self) -> str | None:
        """The reasoning of the last reply; None without a reply or without reasoning."""
        return self.replies[-1]["message"].get("reasoning") if self.replies else None

    def usage(self) -> Usage | None:
        """Tokens of all paid replies; a count is None if it is unknown for any reply."""
        return sum_usage(list(self._paid_replies()))

    def cost_usd(self) -> float | None:
        """Dollars of all paid replies; None if the price of any is unknown."""
        return sum_cost(list(self._paid_replies()))

    def api_calls(self) -> int:
        """The number of paid replies, unusable ones and inner conversations included."""
        return sum(1 for _ in self._paid_replies())

    def to_record(self) -> dict[str, Any]:
        """The conversation's part of a record: JSON-ready, lossless.

        Keys: `messages`, `turns` (one per reply: turn, finish_reason, usage, cost_usd, model,
        response_id, started_at, duration_s, batch_item, extra, tokens; see `ReplyEvent`; with
        `request` {"summary": key} if a summary stood for older messages),
        `tool_calls` (one per result, in call order: turn, call, name, is_error, started_at,
        duration_s), `notes` (turn, reason, text, at), `cut_calls` (model calls that were cut off,
        if any), `discarded` (unusable replies, whole, with the reason), `inner` (one per subagent
        or stage: key, name, and the keys of a record), `resumes`, `restarts` (turn, reason, at; if
        any), `api_calls`, `usage` and `cost_usd` (of all paid replies), `model_returned`. A branch
        also has `fork` (see `ForkedEvent`), and `inherited` in the turns of its parent. An agent
        that runs as a command has the keys of `agent_record`.
        """
        record = {
            "messages": self.messages,
            "turns": [self._turn(n, reply) for n, reply in enumerate(self.replies)],
            "tool_calls": [
                {
                    "turn": result["turn"],
                    "call": result["call"],
                    "name": result["message"]["name"],
                    "is_error": result["message"]["is_error"],
                    "started_at": result["started_at"],
                    "duration_s": result["duration_s"],
                }
                for result in self.results
            ],
            "notes": [_drop_kind(note) for note in self.notes],
            "discarded": [_drop_kind(reply) for reply in self.discarded],
            "inner": [
                {"key": key, "name": inner.name, **inner.trajectory.to_record()}
                for key, inner in self.inner.items()
            ],
            "resumes": [_drop_kind(resume) for resume in self.resumes],
            "api_calls": self.api_calls(),
            "usage": self.usage(),
            "cost_usd": self.cost_usd(),
            "model_returned": self.replies[-1]["model"] if self.replies else None,
        }
        if self.restarts:
            record["restarts"] = [_drop_kind(restart) for restart in self.restarts]
        if self.cut:
            record["cut_calls"] = [_drop_kind(cut) for cut in self.cut]
        if self.agent_calls is not None:
            record = self._add_agent(record, self.agent_calls)
        return record if self.forked is None else record | {"fork": _drop_kind(self.forked)}

    def _turn(self, n: int, reply: ReplyEvent) -> dict[str, Any]:
        turn = {k: v for k, v in reply.items() if k not in ("kind", "message")}
        if n in self.summarized:
            turn["request"] = {"summary": self.summarized[n]}
        return turn

    def _add_agent(self, record: dict[str, Any], threads: Threads) -> dict[str, Any]:
        """Add an agent's conversations to the record; its sums are still of all calls."""
        from agent.state.agent_record import agent_record

        agent = agent_record(threads, self.messages[-1]["content"] if self.messages else "")
        fields = ("notes", "discarded", "resumes", "api_calls", "usage", "cost_usd")
        unchanged = {key: record[key] for key in fields}
        return {**record, **agent, **unchanged, "inner": [*record["inner"], *agent["inner"]]}

    def _open(self, opening: Sequence[Message]) -> None:
        self.messages: list[Message] = list(opening)
        self.opening_length = len(opening)
        """The number of messages that the conversation started with; the last one is its task."""
        self.call_ids = {
            call["id"] for message in opening for call in message.get("tool_calls", ())
        }

    def _restart(self, event: RestartedEvent) -> None:
        # Replies that were paid for remain, as discarded replies.
        lost = [r for r in self._paid_replies() if not any(r is d for d in self.discarded)]
        self.discarded += [{**reply, "discarded": WORKSPACE_LOST} for reply in lost]
        self.restarts.append(event)
        self._begin(self._first_opening)

    def _apply_reply(self, event: ReplyEvent) -> None:
        self._pay(event)
        self.outermost()._not_added.append(event)
        if "discarded" in event:
            self.discarded.append(event)
            self.reasks += event["discarded"] not in COST_ONLY
            return
        message = event["message"]
        if any(note["reason"] == CONTINUE_CUT for note in self.new_notes):
            self._text_before += self.replies[-1]["message"]["content"]
        else:
            self._text_before = ""
        self.reasks = 0
        self.new_notes = []
        if self.inner and (summary := self._summary()) is not None:
            self.summarized[len(self.replies)] = summary
        self.replies.append(event)
        self.messages.append(message)
        self._results_of_turn = {}
        if calls := message.get("tool_calls"):
            self.call_ids.update(call["id"] for call in calls)
        else:
            self.tally.count_text(unusable="unusable" in message)

    def _summary(self) -> str | None:
        """The key of the latest summary that was written; None if there is none."""
        written = [
            key
            for key, inner in self.inner.items()
            if inner.name == SUMMARY and inner.trajectory.final_text().strip()
        ]
        return max(written, key=summary_upto, default=None)

    def _pay(self, event: ReplyEvent) -> None:
        if "inherited" in event:
            return
        self.spent_usd += event["cost_usd"] or 0.0
        self.unpriced += event["cost_usd"] is None
        usage = event["usage"]
        counts = (usage.get("input_tokens"), usage.get("output_tokens")) if usage else (None,)
        self.spent_tokens += sum(count or 0 for count in counts)
        self.uncounted += None in counts
        if self._outer is not None:
            self._outer._pay(event)

    def _apply_result(self, event: ResultEvent) -> None:
        if event["message"]["tool_call_id"] not in self.inner:
            # A subagent's calls are counted one by one.
            self.outermost()._not_added.append(event)
        self.started_calls.discard(event["message"]["tool_call_id"])
        self._results_of_turn[event["call"]] = event
        if "reply" in event:
            self._apply_continued(event)
            return
        calls = self.last_calls()
        if len(self._results_of_turn) == len(calls):
            in_call_order = [self._results_of_turn[n] for n in range(len(calls))]
            messages = [result["message"] for result in in_call_order]
            self.results.extend(in_call_order)
            self.messages.extend(messages)
            self.tally.count_turn(calls, messages)

    def _apply_continued(self, event: ResultEvent) -> None:
        """Replace the result in which the tool asked the user by `event`."""
        self.replies_used += 1
        from_end = event["call"] - len(self.last_calls())
        self.messages[from_end] = event["message"]
        self.results[from_end] = event
        self.tally.count_continued(event["message"])

    def _apply_note(self, event: NoteEvent) -> None:
        self.notes.append(event)
        self.new_notes.append(event)
        self._notes_of[event["reason"]] += 1
        last = self.messages[-1]
        if event["reason"] == USER_TURN:
            self.messages.append(Message(role="user", content=event["text"]))
        elif last["role"] in ("tool", "user"):
            last = last.copy()
            last["content"] += "\n\n" + event["text"]
            last["notes"] = [*last.get("notes", ()), event["reason"]]
            self.messages[-1] = last
        else:
            note = Message(role="user", content=event["text"], notes=[event["reason"]])
            self.messages.append(note)

    def _paid_replies(self) -> Iterator[ReplyEvent]:
        for reply in (*self.replies, *self.discarded):
            if "inherited" not in reply:
                yield reply
        if self.agent_calls is not None:
            for exchange in self.agent_calls.exchanges:
                yield exchange["reply"]
        for inner in self.inner.values():
            yield from inner.trajectory._paid_replies()


class InnerConversation:
    """A subagent's or a stage's conversation inside another one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.trajectory = Trajectory(())


def _drop_kind(event: Event) -> dict[str, Any]:
    return {k: v for k, v in event.items() if k != "kind"}


Journal = Callable[[Event], None]
"""Persists an event before it is used: after it returns, a killed process does not lose it."""

WaitUntilPersisted = Callable[[], Awaitable[None]] | None
"""Waits until all events so far are on disk; None: they are on disk at once."""
