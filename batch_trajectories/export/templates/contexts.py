"""Renders rows of `openai` by a chat template, and compares the context of each learnt turn.

The context of inference is the text of the messages before a turn, with the generation prompt. The
turn is learnt in the same context if the text of its row begins with this one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from batch_trajectories.export.templates.rendering import EOS, Chat, strip_marks

Message = Mapping[str, Any]


class LearntTurn(NamedTuple):
    """A turn that is learnt."""

    at: int
    """The position of the turn in the row."""
    before: Sequence[Message]
    """The messages that inference was given."""
    reasoning: str


class TrainerRow(NamedTuple):
    """A row as a trainer gets it."""

    messages: Sequence[Message]
    tools: Sequence[Any]
    turns: Sequence[LearntTurn]


def read_trainer_row(row: Mapping[str, Any], tools: Sequence[Any], key: str) -> TrainerRow:
    """Read a row of `openai`; `key` is the key of reasoning in its messages."""
    messages = row["messages"]
    learnt = (
        LearntTurn(n, messages[:n], message.get(key) or "")
        for n, message in enumerate(messages)
        if message["role"] == "assistant" and message.get("weight") != 0
    )
    return TrainerRow(messages, tools, [*learnt])


@dataclass(slots=True)
class ParityCounts:
    """Counts of how a template renders rows."""

    rows: int = 0
    turns: int = 0
    same: int = 0
    """Turns whose context in training is that of inference."""
    causes: Counter[str] = field(default_factory=Counter)
    """The other turns by cause: the `context` differs, or only the `generation_prompt`."""
    with_reasoning: int = 0
    reasoning_lost: int = 0
    lost_in: Counter[str] = field(default_factory=Counter)
    """Turns whose reasoning is lost, by kind: `turns with calls` and `answers`."""
    refused: Counter[str] = field(default_factory=Counter)
    """Rows that the template refuses, by its message."""
    stops: Counter[bool] = field(default_factory=Counter)
    """Rows by whether the token that ends the last turn carries loss, if the template says it."""

    @property
    def is_clean(self) -> bool:
        """Whether every turn is learnt as it was sampled."""
        return not self.refused and self.same == self.turns and not self.reasoning_lost

    def add(self, chat: Chat, rows: Iterable[TrainerRow], keep: Callable[[str], None]) -> bool:
        """Render and count the rows of a conversation; returns whether nothing differs.

        `keep` is called with the text of each row.
        """
        is_same = True
        for row in rows:
            self.rows += 1
            self.turns += len(row.turns)
            self.with_reasoning += sum(bool(turn.reasoning) for turn in row.turns)
            try:
                text, trained = strip_marks(chat(row.messages, row.tools))
            except MemoryError:
                raise
            except Exception as error:  # a template can raise anything
                why = str(error) or type(error).__name__
                self.refused[why[:200]] += 1
                is_same = False
                continue
            keep(text.replace(EOS, ""))
            is_same &= self._compare(chat, row, text)
            self._count_stop(row, text, trained)
        return is_same

    def _compare(self, chat: Chat, row: TrainerRow, text: str) -> bool:
        is_same = True
        begin = 0
        for turn in row.turns:
            cause = find_difference(chat, turn, row.tools, text)
            if cause is None:
                self.same += 1
            else:
                self.causes[cause] += 1
                is_same = False
            if reasoning := turn.reasoning.strip():
                found_at = text.find(reasoning, begin)
                begin = begin if found_at < 0 else found_at + len(reasoning)
                if found_at < 0:
                    self.reasoning_lost += 1
                    has_calls = row.messages[turn.at].get("tool_calls")
                    self.lost_in["turns with calls" if has_calls else "answers"] += 1
                is_same &= found_at >= 0
        return is_same

    def _count_stop(self, row: TrainerRow, text: str, trained: Sequence[tuple[int, int]]) -> None:
        last = row.messages[-1]
        answer = str(last.get("content") or "").strip()
        if not trained or not answer or last["role"] != "assistant" or last.get("tool_calls"):
            return
        begin, end = trained[-1]
        _, found, after = text[begin:end].rpartition(answer)
        if found:
            self.stops[bool(after.strip())] += 1

    def describe_differences(self) -> Iterator[str]:
        """Describe the remaining differences, a line for each cause."""
        for why, rows in self.refused.most_common(1):
            yield f"the template refuses {rows:,} of {self.rows:,} rows: {why}"
        if turns := self.causes["context"]:
            yield f"it shows what precedes {turns:,} turns otherwise in training than at inference"
        if turns := self.causes["generation_prompt"]:
            yield f"it begins {turns:,} turns otherwise than its generation prompt does"
        for kind, turns in self.lost_in.most_common():
            yield f"it shows no reasoning in {turns:,} {kind}"

    def to_json(self) -> dict[str, Any]:
        """The counts, for the manifest."""
        stop = {True: "trained", False: "not trained"}
        return {
            "rows": self.rows,
            "refused": dict(sorted(self.refused.items())),
            "turns": self.turns,
            "same": self.same,
            "causes": dict(sorted(self.causes.items())),
            "with_reasoning": self.with_reasoning,
            "reasoning_lost": self.reasoning_lost,
            "stop_token": stop[self.stops[True] > self.stops[False]] if self.stops else "unknown",
        }


def find_difference(chat: Chat, turn: LearntTurn, tools: Sequence[Any], text: str) -> str | None:
    """The cause of a difference between the context of a turn and its row; None without one.

    `text` is that of the row; causes are those of `ParityCounts.causes`. Raises nothing.
    """
    try:
        context, _ = strip_marks(chat(turn.before, tools, is_prompt=True))
        if text.startswith(context):
            return None
        plain, _ = strip_marks(chat(turn.before, tools))
    except Exception:  # as above: inference had no such context
        return "context"
    return "generation_prompt" if text.startswith(plain) else "context"
