"""Streams of the Anthropic messages dialect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from agent.models.bodies.assembly import Growing, to_body
from agent.models.bodies.unknown_fields import merge, unknown_in
from agent.models.stream_events import StreamHandler
from batch_trajectories.basics import exact_json

_INPUT = "partial_json"
"""Where a block holds the text of its input until it is whole."""

_KNOWN_DELTAS = frozenset({"text_delta", "thinking_delta", "input_json_delta", "citations_delta"})
_DELTA_FIELDS = frozenset({"type", "text", "thinking", "citation", _INPUT})
_DELTA_EVENT_FIELDS = frozenset({"type", "delta", "usage"})
"""What is put together by rules of its own; all else is merged as it comes."""


class MessagesAssembly:
    """Puts one message together from its events; see `Assembly`."""

    def __init__(self, on_delta: StreamHandler) -> None:
        self._tell = on_delta
        self._message: dict[str, Any] = {}
        self._usage: dict[str, Any] = {}
        self._blocks: dict[Any, Growing] = {}

    def add(self, part: Mapping[str, Any]) -> None:
        """See `Assembly.add`."""
        match part:
            case {"type": "message_start", "message": dict(message)}:
                self._take_head(message, message.get("usage"))
            case {"type": "message_delta", "delta": dict(delta)}:
                self._take_head(delta, part.get("usage"))
                merge(self._message, unknown_in(part, _DELTA_EVENT_FIELDS))
            case {"type": "content_block_start", "index": int(n), "content_block": dict(block)}:
                self._blocks[n] = Growing(block)
                self._tell_start(block)
            case {"type": "content_block_delta", "index": int(n), "delta": dict(delta)}:
                if n in self._blocks:
                    self._add_delta(self._blocks[n], delta)
            case {"type": "content_block_stop", "index": int(n)}:
                block = self._blocks[n].fields if n in self._blocks else {}
                if block.get("type") == "tool_use":
                    self._tell_call("tool_use_stop", block)

    def finish(self) -> bytes:
        """See `Assembly.finish`."""
        content = [_built(self._blocks[n]) for n in sorted(self._blocks)]
        return to_body({**self._message, "content": content, "usage": self._usage or None})

    def _take_head(self, fields: Mapping[str, Any], usage: Any) -> None:
        self._message.update({key: value for key, value in fields.items() if value is not None})
        if isinstance(usage, dict):
            _update_counts(self._usage, usage)

    def _tell_start(self, block: Mapping[str, Any]) -> None:
        """Mostly a block is empty at its start; some servers send all of it there."""
        if block.get("type") == "tool_use":
            self._tell_call("tool_use_start", block)
            if given := block.get("input"):
                text = given if isinstance(given, str) else json.dumps(given)
                self._tell_input(block, text)
        elif text := _text(block, "thinking"):
            self._tell({"type": "thinking_delta", "text": text})
        elif block.get("type") == "text" and (text := _text(block, "text")):
            self._tell({"type": "text_delta", "text": text})

    def _add_delta(self, block: Growing, delta: Mapping[str, Any]) -> None:
        if not delta.keys() <= _DELTA_FIELDS and _text(delta, "type") in _KNOWN_DELTAS:
            merge(block.fields, unknown_in(delta, _DELTA_FIELDS))
        match delta.get("type"):
            case "text_delta":
                if text := _text(delta, "text"):
                    block.append("text", text)
                    self._tell({"type": "text_delta", "text": text})
            case "thinking_delta":
                if text := _text(delta, "thinking"):
                    block.append("thinking", text)
                    self._tell({"type": "thinking_delta", "text": text})
            case "input_json_delta":
                if text := _text(delta, _INPUT):
                    block.append(_INPUT, text)
                    if block.fields.get("type") == "tool_use":
                        self._tell_input(block.fields, text)
            case "citations_delta":
                if not isinstance(block.fields.get("citations"), list):
                    block.fields["citations"] = []
                block.fields["citations"].append(delta.get("citation"))
            case _:
                # Signatures, and kinds that are not known here, come whole.
                whole = {key: value for key, value in delta.items() if key != "type"}
                block.fields.update(whole)

    def _tell_call(
        self, kind: Literal["tool_use_start", "tool_use_stop"], block: Mapping[str, Any]
    ) -> None:
        tool_id, tool_name = str(block.get("id") or ""), str(block.get("name") or "")
        self._tell({"type": kind, "tool_id": tool_id, "tool_name": tool_name})

    def _tell_input(self, block: Mapping[str, Any], text: str) -> None:
        tool_id = str(block.get("id") or "")
        self._tell({"type": "tool_use_delta", "tool_id": tool_id, "tool_input": text})


def _built(block: Growing) -> dict[str, Any]:
    """The block as a whole reply has it; an input that is not a JSON object stays text."""
    built = block.build()
    text = built.pop(_INPUT, "")
    if text.strip():
        try:
            given = exact_json.loads_with_halves(text)
        except ValueError:
            given = text
        built["input"] = given if isinstance(given, dict) else text
    return built


def _update_counts(known: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Later counts are totals and win; but some servers leave out or zero what they said before."""
    for key, value in given.items():
        if isinstance(value, dict) and isinstance(known.get(key), dict):
            _update_counts(known[key], value)
        elif value or known.get(key) is None:
            known[key] = value


def _text(fields: Mapping[str, Any], key: str) -> str:
    value = fields.get(key)
    return value if isinstance(value, str) else ""
