"""Streams of the OpenAI chat dialect.

Servers differ in how they send tool calls: with an index, with ids alone or with neither, with
the role, name or id repeated in each part, and with arguments in one piece or many.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agent.models.bodies.assembly import Growing, to_body
from agent.models.bodies.unknown_fields import merge, unknown_in
from agent.models.stream_events import StreamHandler
from batch_trajectories.basics.exact_json import objects_among

_CALL_FIELDS = frozenset({"id", "type", "function", "index"})
_FUNCTION_FIELDS = frozenset({"name", "arguments"})
_CHOICE_FIELDS = frozenset({"index", "delta", "finish_reason"})
_PLAIN_CHOICE = _CHOICE_FIELDS | {"logprobs"}  # which is mostly there, and null
_PART_FIELDS = frozenset(
    {"id", "object", "created", "model", "choices", "usage", "error", "obfuscation"}
)
"""What is put together by rules of its own, or says nothing; all else is merged as it comes."""

_MAX_OTHERS = 127
"""Further choices of one reply that are kept, which is all that OpenAI gives."""

_TEXTS = ("reasoning_content", "reasoning", "content", "refusal")
"""Within one part, reasoning comes first."""
_DELTA_FIELDS = frozenset(
    {"role", "type", "tool_calls", "reasoning_details", "thinking_blocks", *_TEXTS}
)
_DETAIL_TEXTS = {"reasoning.text": "text", "reasoning.summary": "summary"}
"""Kinds of reasoning details that arrive in parts, and the field that grows."""


class ChatAssembly:
    """Puts one `chat.completion` together from its chunks; see `Assembly`."""

    def __init__(self, on_delta: StreamHandler) -> None:
        self._tell = on_delta
        self._reply: dict[str, Any] = {}
        self._choice: dict[str, Any] = {}
        self._has_choice = False
        self._others: dict[int, ChatAssembly] = {}
        self._message = Growing({"role": "assistant"})
        self._content: list[Growing] = []
        """Thoughts and texts of a content in parts; empty where it is a text."""
        self._unknown: dict[str, Any] = {}
        """Fields of the message that are not known here."""
        self._details: list[Growing] = []
        self._blocks: list[Growing] = []
        self._calls: list[_Call] = []
        self._by_index: dict[str, _Call] = {}
        self._by_id: dict[str, _Call] = {}
        self._finish_reason: Any = None

    def add(self, part: Mapping[str, Any]) -> None:
        """See `Assembly.add`."""
        for key in ("id", "model", "usage"):
            if part.get(key):
                self._reply[key] = part[key]
        if not part.keys() <= _PART_FIELDS:
            merge(self._reply, unknown_in(part, _PART_FIELDS))
        for choice in objects_among(part.get("choices")):
            if index := choice.get("index"):
                self._add_other(index, choice)
                continue
            self._has_choice = True
            if choice.get("logprobs") or not choice.keys() <= _PLAIN_CHOICE:
                merge(self._choice, unknown_in(choice, _CHOICE_FIELDS))
            if isinstance(delta := choice.get("delta"), dict):
                self._add_delta(delta)
            self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def finish(self) -> bytes:
        """See `Assembly.finish`. The calls end here: nothing in the stream marks their ends."""
        if self._finish_reason is not None:
            for call in self._calls:
                self._tell({"type": "tool_use_stop", "tool_id": call.id, "tool_name": call.name})
        return to_body(self._built())

    def _built(self) -> dict[str, Any]:
        message = self._message.build() | self._unknown
        if self._content:
            message["content"] = [_built_part(part) for part in self._content]
        if self._details:
            message["reasoning_details"] = [detail.build() for detail in self._details]
        if self._blocks:
            message["thinking_blocks"] = [block.build() for block in self._blocks]
        if self._calls:
            message["tool_calls"] = [call.build() for call in self._calls]
        whole = {**self._choice, "message": message, "finish_reason": self._finish_reason}
        choices = [whole] if self._has_choice else []
        for index, other in self._others.items():
            choices += [{"index": index, **choice} for choice in other._built()["choices"]]
        return {**self._reply, "choices": choices}

    def _add_other(self, index: Any, choice: Mapping[str, Any]) -> None:
        """Take a part of a further choice, where the user's own fields ask for several."""
        if isinstance(index, int) and index not in self._others and len(self._others) < _MAX_OTHERS:
            self._others[index] = ChatAssembly(lambda _: None)
        if isinstance(index, int) and index in self._others:
            self._others[index].add({"choices": [{**choice, "index": 0}]})

    def _add_delta(self, delta: Mapping[str, Any]) -> None:
        if not delta.keys() <= _DELTA_FIELDS:
            merge(self._unknown, unknown_in(delta, _DELTA_FIELDS))
        texts = {key: text for key in _TEXTS if (text := _text_of(delta.get(key)))}
        thought, content = "", delta.get("content")
        if self._content or isinstance(content, list):
            thought = self._add_content(content, texts.get("content", ""))
        for key, text in texts.items():
            self._message.append(key, text)
        details = [
            self._add_detail(detail) for detail in objects_among(delta.get("reasoning_details"))
        ]
        for block in objects_among(delta.get("thinking_blocks")):
            self._add_block(block)
        # Some servers say the same thought under two or three names.
        named = texts.get("reasoning_content") or texts.get("reasoning")
        thought = named or "".join(details) or thought
        if thought:
            self._tell({"type": "thinking_delta", "text": thought})
        for key in ("content", "refusal"):
            if key in texts:
                self._tell({"type": "text_delta", "text": texts[key]})
        for call in objects_among(delta.get("tool_calls")):
            self._add_call(call)

    def _add_content(self, content: Any, text: str) -> str:
        """Take a part of a content that is a list with thoughts; returns the new thought.

        Before its first thought a content is a text.
        """
        thought = thought_in(content)
        if thought and not self._content and (before := self._message.build().get("content")):
            self._content.append(Growing({"type": "text", "text": before}))
        for kind, piece in (("thinking", thought), ("text", text)):
            if piece and (thought or self._content):
                if not self._content or self._content[-1].fields["type"] != kind:
                    self._content.append(Growing({"type": kind}))
                self._content[-1].append(kind, piece)
        return thought

    def _add_detail(self, detail: Mapping[str, Any]) -> str:
        """Take a part of `reasoning_details`; returns its text."""
        key = _DETAIL_TEXTS.get(str(detail.get("type")))
        if key is None:
            self._details.append(Growing(detail))
            return ""
        if not self._details or _place(self._details[-1].fields) != _place(detail):
            self._details.append(Growing({}))
        grown = self._details[-1]
        for name in detail.keys() - {key}:
            if detail[name] is not None or name not in grown.fields:
                grown.fields[name] = detail[name]
        text = _text_of(detail.get(key))
        grown.append(key, text)
        return text

    def _add_block(self, part: Mapping[str, Any]) -> None:
        """Take a part of `thinking_blocks`: nothing but a signature marks the end of one."""
        last = self._blocks[-1].fields if self._blocks else {"signature": True}
        if last.get("signature") or last.get("type") != part.get("type") or "data" in part:
            self._blocks.append(Growing({}))
        block = self._blocks[-1]
        block.fields.update({key: part[key] for key in part if key != "thinking"})
        if "thinking" in part:
            block.append("thinking", _text_of(part["thinking"]))

    def _add_call(self, part: Mapping[str, Any]) -> None:
        given = part.get("function")
        function: Mapping[str, Any] = given if isinstance(given, dict) else {}
        call = self._call_of(part, function.get("name"))
        if not call.id and part.get("id"):
            call.id = str(part["id"])
            known = self._by_id.get(call.id)
            if known is None or known.place < call.place:
                self._by_id[call.id] = call
        if not part.keys() <= _CALL_FIELDS:
            merge(call.unknown, unknown_in(part, _CALL_FIELDS))
        if not function.keys() <= _FUNCTION_FIELDS:
            merge(call.unknown_of_function, unknown_in(function, _FUNCTION_FIELDS))
        if not call.name and (name := function.get("name")):
            call.name = str(name)
            self._tell({"type": "tool_use_start", "tool_id": call.id, "tool_name": call.name})
        if arguments := _arguments_of(function.get("arguments")):
            call.arguments.append(arguments)
            self._tell({"type": "tool_use_delta", "tool_id": call.id, "tool_input": arguments})

    def _call_of(self, part: Mapping[str, Any], name: Any) -> _Call:
        """The call that a part belongs to, by its index, else its id, else the latest one.

        A part with a name and an id of its own begins a call, whatever its index: some servers
        give all calls the same. An id alone does not: some servers invent one for every part.
        """
        index, id = part.get("index"), part.get("id")
        last = self._calls[-1] if self._calls else None
        if index is not None:
            call = self._by_index.get(repr(index))
        else:
            call = (self._by_id.get(id) if isinstance(id, str) else None) or last
        if call is not None and call.name and name:
            is_repeated = call.id == id if id else index is not None and call.name == name
            call = call if is_repeated else None
        if call is None:
            call = _Call(len(self._calls))
            self._calls.append(call)
            if index is not None:
                self._by_index[repr(index)] = call
        return call


class _Call:
    """One tool call as far as it is known."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.id = ""
        self.name = ""
        self.arguments: list[str] = []
        self.unknown: dict[str, Any] = {}
        self.unknown_of_function: dict[str, Any] = {}

    def build(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        function |= self.unknown_of_function
        return {"id": self.id, "type": "function", "function": function, **self.unknown}


def _place(detail: Mapping[str, Any]) -> tuple[Any, Any]:
    """What two parts of one reasoning detail have in common."""
    return detail.get("type"), detail.get("index")


def thought_in(content: Any) -> str:
    """The reasoning in a content that is a list of parts, as Mistral's models write it."""
    if isinstance(content, str):
        return ""  # as nearly always
    thoughts = [part.get("thinking") for part in objects_among(content)]
    return "".join(map(_text_of, thoughts))


def _built_part(part: Growing) -> dict[str, Any]:
    """A part of a content in the form of Mistral: a thought is a list of texts."""
    built = part.build()
    if built["type"] != "thinking":
        return built
    return {**built, "thinking": [{"type": "text", "text": built["thinking"]}]}


def _text_of(value: Any) -> str:
    """Text as it is, or that of a list of parts."""
    if isinstance(value, list):
        return "".join(_text_of(part.get("text")) for part in objects_among(value))
    return value if isinstance(value, str) else ""


def _arguments_of(value: Any) -> str:
    """Some servers send the object itself, as they do where nothing is streamed."""
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
