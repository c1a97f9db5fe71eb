"""Streams of the Responses dialect.

Their last event brings the whole reply. Some servers leave items out of it: those are taken from
the events before, and from their parts where no event brought an item whole. A stream without a
last event was cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from agent.models.bodies.assembly import incomplete, to_body
from agent.models.stream_events import StreamHandler

_ENDS = frozenset(
    {"response.completed", "response.incomplete", "response.failed", "response.cancelled"}
)
"""Types of the events that end a stream."""

_STATUSES = frozenset({"completed", "incomplete", "failed"})


class ResponsesAssembly:
    """Finds one reply among its events; see `Assembly`."""

    def __init__(self, on_delta: StreamHandler) -> None:
        self._tell = on_delta
        self._reply: dict[str, Any] = {}
        self._items: dict[int, _Item] = {}
        self._places: dict[str, tuple[Any, ...]] = {}
        self.has_reason = False
        self.is_over = False

    def add(self, part: Mapping[str, Any]) -> None:
        """See `Assembly.add`."""
        match part:
            case {
                "type": "response.output_text.delta" | "response.refusal.delta" as kind,
                "delta": str(text),
            }:
                item = self._item(part, "message")
                item.add(_TEXT_OF[kind], part.get("content_index"), text)
                self._tell_text("text_delta", text, part.get("output_index"))
            case {
                "type": "response.reasoning_summary_text.delta"
                | "response.reasoning_text.delta" as kind,
                "delta": str(text),
            }:
                keys = ("output_index", "type", "summary_index", "content_index")
                index = part.get("summary_index", part.get("content_index"))
                self._item(part, "reasoning").add(_TEXT_OF[kind], index, text)
                self._tell_text("thinking_delta", text, *map(part.get, keys))
            case {"type": "response.function_call_arguments.delta", "delta": str(text)}:
                item = self._item(part, "function_call")
                item.add("arguments", None, text)
                self._tell_input(item, text)
            case {"type": "response.output_item.added", "item": dict(fields)}:
                self._begin(part, fields)
            case {"type": "response.output_item.done", "item": dict(fields)}:
                self._end(part, fields)
            case {"type": str(kind), "response": dict(reply)} if kind in _ENDS:
                self._reply = reply
                self.has_reason = self.is_over = True
            case {"type": "error"}:
                self._reply = {"status": "failed", "error": dict(part)}
                self.has_reason = self.is_over = True
            case {"object": "response", "status": str(status), "output": list()} if (
                status in _STATUSES
            ):
                self._reply = dict(part)  # in one piece
                self.has_reason = self.is_over = True

    def finish(self) -> bytes:
        """See `Assembly.finish`."""
        given = self._reply.get("output")
        items = [item for _, item in sorted(self._items.items())]
        if not all(item.has_begun for item in items):
            known = _texts_in([given, [item.whole for item in items]])
            # Parts for a wrong index are no item if another one says the same.
            items = [item for item in items if item.has_begun or not item.is_repeated_in(known)]
        if any(not item.has_begun and item.fields["type"] == "function_call" for item in items):
            return to_body(incomplete("arguments for a call that never began", self._reply))
        is_less = not given or (isinstance(given, list) and len(given) < len(items))
        output = [item.build() for item in items] if is_less else given
        return to_body({**self._reply, "output": output})

    def _item(self, part: Mapping[str, Any], kind: str) -> _Item:
        """The item that a part belongs to, by its index, else the latest one of its kind."""
        n = part.get("output_index")
        if not isinstance(n, int):
            latest = [m for m, item in self._items.items() if item.fields.get("type") == kind]
            n = max(latest, default=len(self._items))
        if n not in self._items:
            self._items[n] = _Item({"type": kind})
        return self._items[n]

    def _tell_text(
        self, kind: Literal["text_delta", "thinking_delta"], text: str, *place: Any
    ) -> None:
        """Texts of different places are paragraphs, as they are in the record."""
        if not text:
            return
        between = "\n\n" if self._places.get(kind, place) != place else ""
        self._places[kind] = place
        self._tell({"type": kind, "text": between + text})

    def _begin(self, part: Mapping[str, Any], fields: Mapping[str, Any]) -> _Item:
        n = part.get("output_index")
        n = n if isinstance(n, int) else len(self._items)
        item = self._items.get(n)
        if item is None:
            item = self._items[n] = _Item(fields)
        elif not item.has_begun:
            item.fields = {**item.fields, **fields}
        if not item.has_begun and fields.get("type") == "function_call":
            self._tell({"type": "tool_use_start", "tool_id": item.id, "tool_name": item.name})
        item.has_begun = True
        return item

    def _end(self, part: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
        n = part.get("output_index")
        if not isinstance(n, int):
            part = {**part, "output_index": self._open_item(fields)}
        item = self._begin(part, fields)
        item.whole = dict(fields)
        if fields.get("type") == "function_call":
            arguments = fields.get("arguments")
            if not item.is_passed_on and isinstance(arguments, str):
                self._tell_input(item, arguments)
            self._tell({"type": "tool_use_stop", "tool_id": item.id, "tool_name": item.name})

    def _open_item(self, fields: Mapping[str, Any]) -> int:
        """The place of the item that an end without an index belongs to."""
        kind = fields.get("type")
        open_items = (
            n
            for n, item in self._items.items()
            if item.whole is None and item.fields.get("type") == kind
        )
        return next(open_items, len(self._items))

    def _tell_input(self, item: _Item, text: str) -> None:
        if text and item.has_begun:
            item.is_passed_on = True
            self._tell({"type": "tool_use_delta", "tool_id": item.id, "tool_input": text})


_TEXT_OF: Mapping[str, str] = {
    "response.output_text.delta": "output_text",
    "response.refusal.delta": "refusal",
    "response.reasoning_summary_text.delta": "summary_text",
    "response.reasoning_text.delta": "reasoning_text",
}
"""By the type of an event, the type of the part of an item that it adds to."""

_LISTS: Mapping[str, str] = {
    "output_text": "content",
    "refusal": "content",
    "summary_text": "summary",
    "reasoning_text": "content",
}
"""By the type of a part, the list of an item that it stands in."""


def _texts_in(value: Any) -> list[str]:
    """All texts in a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [text for one in value for text in _texts_in(one)]
    return [value] if isinstance(value, str) else []


class _Item:
    """One item of the output as far as it is known."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = dict(fields)
        self.whole: dict[str, Any] | None = None
        """The item as an event brought it at its end."""
        self.has_begun = False
        self.is_passed_on = False
        """The handler got the arguments of the call."""
        self._texts: dict[tuple[str, Any], list[str]] = {}

    @property
    def id(self) -> str:
        """The id of a call."""
        return str(self.fields.get("call_id") or "")

    @property
    def name(self) -> str:
        """The name of a call's function."""
        return str(self.fields.get("name") or "")

    def add(self, kind: str, index: Any, text: str) -> None:
        """Add to the part of this type at `index`, or to the arguments."""
        place = (kind, index if isinstance(index, int) else 0)
        self._texts.setdefault(place, []).append(text)

    def is_repeated_in(self, known: Sequence[str]) -> bool:
        """Whether the `known` texts have all that the parts of this item say."""
        texts = ["".join(pieces) for pieces in self._texts.values()]
        return all(any(text in one for one in known) for text in texts)

    def build(self) -> dict[str, Any]:
        """The item; from its parts if no event brought it whole."""
        if self.whole is not None:
            return self.whole
        built = dict(self.fields)
        for (kind, _), pieces in sorted(self._texts.items(), key=lambda entry: entry[0]):
            if kind == "arguments":
                built["arguments"] = "".join(pieces)
                continue
            key = "refusal" if kind == "refusal" else "text"
            listed = built[_LISTS[kind]] if isinstance(built.get(_LISTS[kind]), list) else []
            # Parts that an event announced are empty there.
            known = [part for part in listed if isinstance(part, dict) and part.get(key)]
            built[_LISTS[kind]] = [*known, {"type": kind, key: "".join(pieces)}]
        return built
