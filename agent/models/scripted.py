"""The scripted model: plays given turns, offline and deterministic. No model is behind it.

A script is a list of turns, played in order. A turn is an object with any of

    reasoning    text
    content      text
    tool_calls   list of {"name": …, "arguments": object or raw text}
    finish_reason  one of agent.messages.message.FinishReason; by default what the turn implies

Records of such runs carry `"api": "scripted"` and `"model_returned": "scripted"`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from agent.messages.message import FinishReason, Message, ToolCall, Usage
from agent.models.errors import ModelError
from agent.models.model import Completion, Request, StreamHandler
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.validation import mistakes_in

API = "scripted"


class ScriptedCall(BaseModel):
    """One tool call of a scripted turn."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    name: str
    arguments: dict[str, Any] | str = Field(default_factory=dict)


class ScriptedTurn(BaseModel):
    """One turn of a script: a reply that the scripted model gives."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    reasoning: str = ""
    content: str = ""
    tool_calls: list[ScriptedCall] = Field(default_factory=list)
    finish_reason: FinishReason | None = None


_SCRIPT: TypeAdapter[list[ScriptedTurn]] = TypeAdapter(
    Annotated[list[ScriptedTurn], Field(min_length=1)], config=ConfigDict(defer_build=True)
)


def parse_script(turns: Any) -> list[ScriptedTurn]:
    """Check a script that came from a file or a row.

    Raises `ValueError` naming the turn and key that is wrong.
    """
    try:
        exact_json.dumps(turns)
        return _SCRIPT.validate_python(turns)
    except TypeError as error:
        raise ValueError(f"script: it cannot be written as JSON: {error}") from error
    except ValidationError as error:
        raise ValueError(mistakes_in(error)[0].describe("script")) from error


class ScriptedModel:
    """Plays one script, a turn per call, from turn number `start` (from 0) on.

    A conversation that is resumed starts after the replies that it already has.
    """

    def __init__(self, script: Sequence[ScriptedTurn], *, start: int = 0) -> None:
        self._script = script
        self._next = start

    async def complete(self, request: Request) -> Completion:
        """See `Model.complete`. Raises `ModelError("bad_request")` after the last turn."""
        number = self._next
        if number >= len(self._script):
            raise ModelError("bad_request", f"the script ends after turn {len(self._script)}")
        self._next += 1
        turn = self._script[number]
        message = Message(role="assistant", content=turn.content)
        if turn.reasoning:
            message["reasoning"] = turn.reasoning
        if turn.tool_calls:
            message["tool_calls"] = [
                _to_call(call, f"call_{number + 1}_{n}") for n, call in enumerate(turn.tool_calls)
            ]
        if request.on_delta is not None:
            _stream(message, request.on_delta)
        return Completion(
            message=message,
            finish_reason=turn.finish_reason or ("tool_calls" if turn.tool_calls else "stop"),
            usage=_NO_USAGE,
            model=API,
            response_id=None,
            cost_usd=0.0,
        )


_NO_USAGE: Usage = {
    "input_tokens": 0,
    "output_tokens": 0,
    "cache_read_tokens": 0,
    "cache_write_tokens": 0,
    "reasoning_tokens": 0,
}
"""The usage of a scripted reply: no model ran, so the counts are zero, not unknown."""


def _to_call(call: ScriptedCall, id: str) -> ToolCall:
    arguments = call.arguments
    if not isinstance(arguments, str):
        arguments = exact_json.dumps(arguments).decode()
    return {
        "id": id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _stream(message: Message, handler: StreamHandler) -> None:
    """Pass a reply to the handler as if it had arrived in parts: reasoning, text and calls."""
    if reasoning := message.get("reasoning"):
        handler({"type": "thinking_delta", "text": reasoning})
    if message["content"]:
        handler({"type": "text_delta", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        id, function = call["id"], call["function"]
        handler({"type": "tool_use_start", "tool_id": id, "tool_name": function["name"]})
        handler({"type": "tool_use_delta", "tool_id": id, "tool_input": function["arguments"]})
        handler({"type": "tool_use_stop", "tool_id": id, "tool_name": function["name"]})
