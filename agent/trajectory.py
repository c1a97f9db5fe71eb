"""The state of one conversation, as a fold of its events.

Live running and resuming go through the same `apply`, so a conversation that was killed at any
point and replayed from its journal is in the state it would have been in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from agent.messages import (
    Event,
    FinishReason,
    Message,
    ReplyEvent,
    ResultEvent,
    ResumedEvent,
    ToolCall,
    Usage,
)

Status = Literal[
    "completed",
    "max_turns",
    "length",
    "refusal",
    "repeat",
    "errors",
    "budget",
    "timeout",
    "context_exceeded",
    "awaiting_input",
    "cannot_complete",
    "cancelled",
    "failed",
]
"""How a conversation ended; `completed` alone means that the model gave its final answer."""

_CALLS_NOT_RUN: frozenset[FinishReason] = frozenset({"length", "refusal", "context_exceeded"})
"""A reply that ended like this is cut or withheld: its tool calls cannot be trusted."""


class Trajectory:
    """A growing conversation: `messages` as sent and received, and what each turn cost.

    Messages are only ever appended. Results of one turn are appended together, in call order,
    once all of them are known.
    """

    def __init__(self, opening: Sequence[Message], events: Iterable[Event] = ()) -> None:
        self.messages: list[Message] = list(opening)
        self.call_ids = {
            call["id"] for message in opening for call in message.get("tool_calls", ())
        }
        self.replies: list[ReplyEvent] = []
        self.results: list[ResultEvent] = []
        self.resumes: list[ResumedEvent] = []
        self._results_of_turn: dict[int, ResultEvent] = {}
        for event in events:
            self.apply(event)

    @property
    def turns(self) -> int:
        """How many model replies were accepted."""
        return len(self.replies)

    def apply(self, event: Event) -> None:
        """Take one event into the conversation."""
        if event["kind"] == "reply":
            self.replies.append(event)
            self.messages.append(event["message"])
            self.call_ids.update(call["id"] for call in event["message"].get("tool_calls", ()))
            self._results_of_turn = {}
        elif event["kind"] == "result":
            self._results_of_turn[event["call"]] = event
            calls = self._calls()
            if len(self._results_of_turn) == len(calls):
                in_call_order = [self._results_of_turn[n] for n in range(len(calls))]
                self.results.extend(in_call_order)
                self.messages.extend(result["message"] for result in in_call_order)
        else:
            self.resumes.append(event)

    def open_calls(self) -> list[tuple[int, ToolCall]]:
        """The calls of the last reply that have no result yet, with their number in it."""
        return [(n, call) for n, call in enumerate(self._calls()) if n not in self._results_of_turn]

    def ending(self, max_turns: int | None) -> Status | None:
        """How the conversation has ended, or None while it goes on.

        Asked when no call is open. `max_turns` bounds the model replies; None means no bound.
        """
        if not self.replies:
            return "max_turns" if max_turns == 0 else None
        reply = self.replies[-1]
        match reply["finish_reason"]:
            case "length" | "refusal" | "context_exceeded" as cut:
                return cut
            case "stop" | "tool_calls" if not reply["message"].get("tool_calls"):
                # A blank answer is no answer: nothing in it could be trained on.
                return "completed" if reply["message"]["content"].strip() else "errors"
        if max_turns is not None and self.turns >= max_turns:
            return "max_turns"
        return None

    def final_text(self) -> str:
        """The text of the last reply, or "" where the last turn asked for tools or none came."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            return ""
        last = self.messages[-1]
        return "" if last.get("tool_calls") else last["content"]

    def usage(self) -> Usage | None:
        """Tokens summed over the turns; a count that any turn left unknown is None."""
        if not self.replies:
            return None
        usages = [reply["usage"] for reply in self.replies]
        return Usage(
            input_tokens=_sum_known(usages, "input_tokens"),
            output_tokens=_sum_known(usages, "output_tokens"),
            cache_read_tokens=_sum_known(usages, "cache_read_tokens"),
            cache_write_tokens=_sum_known(usages, "cache_write_tokens"),
            reasoning_tokens=_sum_known(usages, "reasoning_tokens"),
        )

    def cost_usd(self) -> float | None:
        """Dollars summed over the turns, or None where the price of any turn is unknown."""
        costs = [reply["cost_usd"] for reply in self.replies]
        known = [cost for cost in costs if cost is not None]
        return sum(known) if known and len(known) == len(costs) else None

    def to_record(self) -> dict[str, Any]:
        """The conversation's part of a record: JSON-ready, lossless.

        Keys: `messages`, `turns` (one per reply: turn, finish_reason, usage, cost_usd, model,
        response_id, started_at, duration_s), `tool_calls` (one per result, in call order: turn,
        call, name, is_error, started_at, duration_s), `resumes`, `usage`, `cost_usd`,
        `model_returned`.
        """
        return {
            "messages": self.messages,
            "turns": [
                {k: v for k, v in reply.items() if k not in ("kind", "message")}
                for reply in self.replies
            ],
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
            "resumes": [{k: v for k, v in r.items() if k != "kind"} for r in self.resumes],
            "usage": self.usage(),
            "cost_usd": self.cost_usd(),
            "model_returned": self.replies[-1]["model"] if self.replies else None,
        }

    def _calls(self) -> list[ToolCall]:
        if not self.replies or self.replies[-1]["finish_reason"] in _CALLS_NOT_RUN:
            return []
        return self.replies[-1]["message"].get("tool_calls", [])


def _sum_known(usages: Sequence[Usage | None], key: str) -> int | None:
    counts: list[int | None] = [None if usage is None else _count(usage, key) for usage in usages]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _count(usage: Mapping[str, Any], key: str) -> int | None:
    count = usage[key]
    return count if isinstance(count, int) else None


Journal = Callable[[Event], None]
"""Makes one event durable before it is used; returns when a process kill can no longer lose it."""
