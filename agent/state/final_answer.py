"""The two reserved tools with which a model can end its task.

No other tool may have their names. They are offered only with `completion_tools`; a call of one
ends the conversation once the other calls of its turn have results.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from batch_trajectories.basics import exact_json

FINAL_ANSWER = "final_answer"
CANNOT_COMPLETE = "cannot_complete"
RESERVED_TOOLS = frozenset({FINAL_ANSWER, CANNOT_COMPLETE})

_TEXT_ARGUMENTS = {FINAL_ANSWER: "answer", CANNOT_COMPLETE: "reason"}


class FinalAnswer(NamedTuple):
    """The text of a call of one of the two reserved tools."""

    tool: Literal["final_answer", "cannot_complete"]
    text: str


def _schema(name: str, description: str, parameter: str, meaning: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {parameter: {"type": "string", "description": meaning}},
                "required": [parameter],
                "additionalProperties": False,
            },
        },
    }


SCHEMAS: tuple[Mapping[str, Any], ...] = (
    _schema(
        FINAL_ANSWER,
        "Give the final answer and end the task.",
        "answer",
        "The whole answer, as the user is to read it.",
    ),
    _schema(
        CANNOT_COMPLETE,
        "End the task without an answer, because it cannot be done.",
        "reason",
        "Why it cannot be done.",
    ),
)


def parse_final_answer(name: str, arguments: str) -> FinalAnswer | None:
    """Read a call of a reserved tool; None for other tools and for unusable arguments."""
    match name:
        case "final_answer" | "cannot_complete":
            text = _text(arguments, _TEXT_ARGUMENTS[name])
            return FinalAnswer(name, text) if text else None
    return None


def _text(arguments: str, key: str) -> str:
    try:
        loaded = exact_json.loads(arguments)
    except exact_json.JSONDecodeError:
        return ""
    text = loaded.get(key) if isinstance(loaded, dict) else None
    return text.strip() if isinstance(text, str) else ""
