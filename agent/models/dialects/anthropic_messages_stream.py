"""Streams of the Anthropic messages dialect.

Other servers speak it, too, and some number their blocks otherwise: all of them 0, a start for
each token, text for the block of a call. What a part says decides where it belongs, and the index
only where that leaves a choice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from agent.models.bodies.assembly import Growing, incomplete, to_body
from agent.models.bodies.unknown_fields import merge, unknown_in
from agent.models.stream_events import StreamHandler
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.exact_json import objects_among

_INPUT = "partial_json"
"""Where a block holds the text of its input until it is whole."""

_TEXT_OF_BLOCK: Mapping[str, str] = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "thinking",
    "citations_delta": "text",
}
"""Deltas that belong to blocks of one type only, and that type."""

_NEEDS_NO_START = frozenset({"text_delta", "thinking_delta"})
"""Deltas that say all that a block of their own would have said at its start."""

_HAVE_NO_INPUT = frozenset({"text", "thinking", "redacted_thinking"})
"""Types of blocks that an input cannot belong to."""

_KNOWN_DELTAS = frozenset({*_TEXT_OF_BLOCK, "input_json_delta"})
_DELTA_FIELDS = frozenset({"type", "text", "thinking", "signature", "citation", _INPUT})
_DELTA_EVENT_FIELDS = frozenset({"type", "delta", "usage"})
"""What is put together by rules of its own; all else is merged as it comes."""


class MessagesAssembly:
    """Puts one message together from its events; see `Assembly`."""

    def __init__(self, on_delta: StreamHandler) -> None:
        self._tell = on_delta
        self._message: dict[str, Any] = {}
        self._usage: dict[str, Any] = {}
        self._blocks: list[_Block] = []
        """In the order in which they began."""
        self._latest: dict[int | None, _Block] = {}
        """The latest block with an index."""
        self._flaw = ""
        """Why the message cannot be put together; "" if it can."""
        self.has_reason = False
        self.is_over = False

    def add(self, part: Mapping[str, Any]) -> None:
        """See `Assembly.add`."""
        match part:
            case {"type": "message_start", "message": dict(message)}:
                self._take_head(message, message.get("usage"))
                self._take_whole(message)
            case {"type": "message_delta", "delta": dict(delta)}:
                self._take_head(delta, part.get("usage"))
                self.has_reason = bool(self._message.get("stop_reason"))
                merge(self._message, unknown_in(part, _DELTA_EVENT_FIELDS))
            case {"type": "content_block_start", "content_block": dict(block)}:
                self._begin(_index_of(part), block)
            case {"type": "content_block_delta", "delta": dict(delta)}:
                self._add_delta(_index_of(part), delta)
            case {"type": "content_block_stop"}:
                if (stopped := self._latest.get(_index_of(part))) is not None:
                    self._stop(stopped)
            case {"type": "message_stop"}:
                self.is_over = True
            case {"type": "error"}:  # without an `error` in it, which would have been seen before
                self._message["error"] = dict(part)
                self.is_over = True
            case {"type": "message", "content": list()}:
                self._take_head(part, part.get("usage"))
                self._take_whole(part)
                self.is_over = True

    def finish(self) -> bytes:
        """See `Assembly.finish`."""
        if self._flaw:
            return to_body(incomplete(self._flaw, {**self._message, "usage": self._usage}))
        blocks = self._blocks
        if len(self._latest) == len(blocks) and None not in self._latest:
            blocks = [block for _, block in sorted(self._latest.items(), key=_place_of)]
        content = [_built(block) for block in blocks]
        return to_body({**self._message, "content": content, "usage": self._usage or None})

    def _take_head(self, fields: Mapping[str, Any], usage: Any) -> None:
        self._message.update({key: value for key, value in fields.items() if value is not None})
        if isinstance(usage, dict):
            _update_counts(self._usage, usage)

    def _take_whole(self, message: Mapping[str, Any]) -> None:
        """Take the blocks of a message that comes in one piece."""
        for block in objects_among(message.get("content")):
            self._begin(len(self._blocks), block)
            self._stop(self._blocks[-1])

    def _begin(self, n: int | None, fields: Mapping[str, Any]) -> None:
        """Begin a block; a start for each token continues the one before."""
        last = self._latest.get(n)
        if last is not None and not last.is_stopped and _continues(last, fields):
            kind = str(fields["type"])
            if kind == "tool_use" and fields.get("input"):
                last.fields["input"] = fields["input"]
            elif text := _text(fields, kind):
                last.append(kind, text)
                self._tell_start(fields)
            return
        self.has_reason = False
        block = self._latest[n] = _Block(fields)
        self._blocks.append(block)
        self._tell_start(fields)

    def _stop(self, block: _Block) -> None:
        if not block.is_stopped and block.fields.get("type") == "tool_use":
            self._tell_call("tool_use_stop", block.fields)
        block.is_stopped = True

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

    def _add_delta(self, n: int | None, delta: Mapping[str, Any]) -> None:
        kind = _text(delta, "type")
        block = self._latest.get(n)
        of_type = _TEXT_OF_BLOCK.get(kind)
        if block is None or (of_type is not None and block.fields.get("type") != of_type):
            block = self._own_block(n, kind, of_type)
        elif kind == "input_json_delta" and block.fields.get("type") in _HAVE_NO_INPUT:
            block = None
        if block is None:
            self._flaw = self._flaw or f"a {kind} for block {n}, to which it cannot belong"
            return
        if kind in _KNOWN_DELTAS and not delta.keys() <= _DELTA_FIELDS:
            merge(block.fields, unknown_in(delta, _DELTA_FIELDS))
        match kind:
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
            case "signature_delta":
                known, text = _text(block.fields, "signature"), _text(delta, "signature")
                block.fields["signature"] = known if text in known else known + text
            case "citations_delta":
                if not isinstance(block.fields.get("citations"), list):
                    block.fields["citations"] = []
                block.fields["citations"].append(delta.get("citation"))
            case _:
                self._add_unknown(block, kind, delta)

    def _add_unknown(self, block: _Block, kind: str, delta: Mapping[str, Any]) -> None:
        """Add a delta of a kind that is not known here: what it is named after comes in pieces."""
        grows = kind.removesuffix("_delta")
        for key, value in delta.items():
            if key == grows and isinstance(value, str):
                block.append(key, value)
            elif key != "type":
                block.fields[key] = value

    def _own_block(self, n: int | None, kind: str, of_type: str | None) -> _Block | None:
        """The block for a delta whose index names none, or one of another type; None for none.

        A text or a thought continues the last block if that is of its type and has this index, and
        is a block of its own otherwise.
        """
        if of_type is None:
            return None
        last = self._blocks[-1] if self._blocks else None
        if last is not None and last.fields.get("type") == of_type and last.beside == n:
            return last
        if kind not in _NEEDS_NO_START:
            return next(
                (b for b in reversed(self._blocks) if b.fields.get("type") == of_type), None
            )
        block = _Block({"type": of_type, of_type: ""})
        block.beside = n
        self._blocks.append(block)
        self._latest.setdefault(n, block)
        return block

    def _tell_call(
        self, kind: Literal["tool_use_start", "tool_use_stop"], block: Mapping[str, Any]
    ) -> None:
        tool_id, tool_name = str(block.get("id") or ""), str(block.get("name") or "")
        self._tell({"type": kind, "tool_id": tool_id, "tool_name": tool_name})

    def _tell_input(self, block: Mapping[str, Any], text: str) -> None:
        tool_id = str(block.get("id") or "")
        self._tell({"type": "tool_use_delta", "tool_id": tool_id, "tool_input": text})


class _Block(Growing):
    """One block as far as it is known."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.is_stopped = False
        self.beside: int | None = -1
        """The index for which the parts of this block were sent, if that began no such block; -1
        for a block that began by itself."""


def _index_of(part: Mapping[str, Any]) -> int | None:
    index = part.get("index")
    return index if isinstance(index, int) else None


def _place_of(entry: tuple[int | None, _Block]) -> int:
    """Where a block stands among others that all have numbers of their own."""
    return entry[0] or 0


def _continues(block: _Block, start: Mapping[str, Any]) -> bool:
    """Whether a start with the index of an open block says no more than that it goes on."""
    kind = block.fields.get("type")
    if kind != start.get("type"):
        return False
    if kind == "tool_use":
        return bool(start.get("id")) and start.get("id") == block.fields.get("id")
    return kind in ("text", "thinking")


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
