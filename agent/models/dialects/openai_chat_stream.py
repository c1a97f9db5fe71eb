"""Streams of the OpenAI chat dialect.

Servers differ in how they send tool calls: with an index, with one index for all, with ids alone or
with neither, with the role, name or id repeated in each part, with a name in pieces, and with
arguments in one piece or many, or after an empty object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from agent.models.bodies.assembly import Growing, incomplete, to_body
from agent.models.bodies.unknown_fields import merge, unknown_in
from agent.models.stream_events import StreamHandler
from batch_trajectories.basics.exact_json import objects_among

_CALL_FIELDS = frozenset({"id", "type", "function", "index"})
_FUNCTION_FIELDS = frozenset({"name", "arguments"})
_STREAMED_CHOICE_FIELDS = frozenset({"index", "delta", "finish_reason", "message"})
_PLAIN_CHOICE = _STREAMED_CHOICE_FIELDS | {"logprobs"}  # which is mostly there, and null
_PART_FIELDS = frozenset(
    {"id", "object", "created", "model", "choices", "usage", "error", "obfuscation"}
)
"""What is put together by rules of its own, or says nothing; all else is merged as it comes."""

_MAX_OTHERS = 127
"""Further choices of one reply that are kept, which is all that OpenAI gives."""

THOUGHTS = (
    "reasoning_content",
    "reasoning",
    "reasoning_text",
    "thinking",
    "thinking_content",
    "thought",
)
"""Fields of a message in which servers put its reasoning, mostly as a text; OpenAI has none."""

_TEXTS = (*THOUGHTS, "content", "refusal")
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
        self._flaw = ""
        """Why the reply cannot be put together; "" if it can."""
        self._goes_on = False
        """Something followed a finish reason, so that none is taken for the end."""
        self.has_reason = False
        self.is_over = False

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
                merge(self._choice, unknown_in(choice, _STREAMED_CHOICE_FIELDS))
            if isinstance(delta := choice.get("delta"), dict):
                self._goes_on = self._goes_on or (self.has_reason and any(delta.values()))
                self._add_delta(delta)
            if isinstance(message := choice.get("message"), dict):
                self._add_whole(message)
            if reason := choice.get("finish_reason"):
                self._finish_reason = reason
                self._update_reason()

    def _update_reason(self) -> None:
        """Several choices have ended once each of them has."""
        self.has_reason = (
            self._finish_reason is not None
            and not self._goes_on
            and all(other.has_reason for other in self._others.values())
        )

    def _add_whole(self, message: Mapping[str, Any]) -> None:
        """Take a message in one piece: instead of all parts, or after them, as some servers do."""
        texts = {key: value for key in _TEXTS if (value := _text_of(message.get(key)))}
        before = self._message.build()
        if len(before) == 1 and not (self._calls or self._content or self._details):
            self._add_delta(message)
        elif any(before.get(key) != text for key, text in texts.items()):
            self._flaw = "the parts of the stream say something else than the whole message in it"

    def finish(self) -> bytes:
        """See `Assembly.finish`. The calls end here: nothing in the stream marks their ends."""
        self._sort_calls()
        self._calls = [call for call in self._calls if call.name or call.arguments]
        if any(not call.is_named for call in self._calls):
            self._flaw = self._flaw or "arguments for a call that has no name"
        if self._flaw:
            return to_body(incomplete(self._flaw, self._reply))
        if self._finish_reason is not None:
            for call in self._calls:
                self._tell({"type": "tool_use_stop", "tool_id": call.id, "tool_name": call.name})
        return to_body(self._built())

    def _sort_calls(self) -> None:
        """Put the calls in the order of their indices, if each has one of its own."""
        by_index = [(index, call) for index, call in self._by_index.items() if index.isdecimal()]
        if len(by_index) == len(self._calls):
            self._calls = [call for _, call in sorted(by_index, key=lambda one: int(one[0]))]

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
            self._update_reason()

    def _add_delta(self, delta: Mapping[str, Any]) -> None:
        if not delta.keys() <= _DELTA_FIELDS:
            merge(self._unknown, unknown_in(delta, _DELTA_FIELDS))
        texts = {key: text for key in _TEXTS if key in delta and (text := _text_at(key, delta))}
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
        named = next((texts[key] for key in THOUGHTS if key in texts), "")
        thought = named or "".join(details) or thought
        if thought:
            self._tell({"type": "thinking_delta", "text": thought})
        for key in ("content", "refusal"):
            if key in texts:
                self._tell({"type": "text_delta", "text": texts[key]})
        if parts := delta.get("tool_calls"):
            self._add_calls(list(objects_among(parts)))

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
        grown = next(
            (one for one in reversed(self._details) if _place(one.fields) == _place(detail)), None
        )
        if grown is None:
            grown = Growing({})
            self._details.append(grown)
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

    def _add_calls(self, parts: Sequence[Mapping[str, Any]]) -> None:
        """Take the parts of calls in one chunk; two with a name in one chunk are two calls."""
        begun: list[_Call] = []
        for part in parts:
            given = part.get("function")
            function: Mapping[str, Any] = given if isinstance(given, dict) else {}
            name, arguments = function.get("name"), _arguments_of(function.get("arguments"))
            call = self._find(part)
            is_new = call is None or (bool(name) and call in begun)
            if not is_new and call is not None and (name or part.get("id")):
                is_new = _is_another(call, part, name, arguments)
            if is_new or call is None:
                call = self._begin(part)
            if name:
                begun.append(call)
            self._add_to(call, part, function, arguments)

    def _add_to(
        self, call: _Call, part: Mapping[str, Any], function: Mapping[str, Any], arguments: str
    ) -> None:
        if not call.id and part.get("id"):
            call.id = str(part["id"])
            known = self._by_id.get(call.id)
            if known is None or known.place < call.place:
                self._by_id[call.id] = call
        if not part.keys() <= _CALL_FIELDS:
            merge(call.unknown, unknown_in(part, _CALL_FIELDS))
        if not function.keys() <= _FUNCTION_FIELDS:
            merge(call.unknown_of_function, unknown_in(function, _FUNCTION_FIELDS))
        if (name := function.get("name")) is not None and not call.arguments:
            is_new = not call.name
            call.add_to_name(str(name))
            if is_new and call.name:
                self._tell({"type": "tool_use_start", "tool_id": call.id, "tool_name": call.name})
        if arguments and call.add_arguments(arguments):
            self._tell({"type": "tool_use_delta", "tool_id": call.id, "tool_input": arguments})

    def _find(self, part: Mapping[str, Any]) -> _Call | None:
        """The call that a part names by its index or its id, else the latest one; None for none.

        Some servers give all calls one index, and others one id: what tells calls apart counts. An
        id alone begins no call, for some servers invent one for every part.
        """
        index, id = part.get("index"), part.get("id")
        by_index = None if index is None else self._by_index.get(repr(index))
        if not id:
            if index is not None:
                return by_index
            return self._calls[-1] if self._calls else None
        if by_index is not None and by_index.id == id:
            return by_index
        if isinstance(id, str) and (by_id := self._by_id.get(id)) is not None:
            function = part.get("function")
            has_name = isinstance(function, dict) and bool(function.get("name"))
            return None if index is not None and by_index is None and has_name else by_id
        if index is not None:
            return by_index
        return self._calls[-1] if self._calls else None

    def _begin(self, part: Mapping[str, Any]) -> _Call:
        call = _Call(len(self._calls))
        self._calls.append(call)
        if (index := part.get("index")) is not None:
            self._by_index[repr(index)] = call
        return call


class _Call:
    """One tool call as far as it is known."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.id = ""
        self.name = ""
        self.is_named = False
        """A part gave it a name, which may be empty: models write such calls, too."""
        self.arguments: list[str] = []
        self.unknown: dict[str, Any] = {}
        self.unknown_of_function: dict[str, Any] = {}

    def add_to_name(self, name: str) -> None:
        """Take a name, or a piece of one: some servers repeat it, or all of it so far."""
        self.is_named = True
        if name.startswith(self.name):
            self.name = name
        else:
            self.name += name

    def add_arguments(self, text: str) -> bool:
        """Take a piece of the arguments; False if it says what is known.

        Some servers begin with an empty object, and send the real arguments after it.
        """
        if len(self.arguments) == 1 and self.arguments[0] == "{}" and text.lstrip()[:1] == "{":
            self.arguments.clear()
        elif text[0] == "{" and "".join(self.arguments) == text and self.has_whole_arguments():
            return False
        self.arguments.append(text)
        return True

    def has_whole_arguments(self) -> bool:
        """Whether the arguments so far are a JSON value, to which nothing can be added."""
        if not self.arguments or self.arguments[-1].rstrip()[-1:] not in _ENDS_OF_VALUES:
            return False
        try:
            orjson.loads("".join(self.arguments))
        except orjson.JSONDecodeError:
            return False
        return True

    def build(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        function |= self.unknown_of_function
        return {"id": self.id, "type": "function", "function": function, **self.unknown}


_ENDS_OF_VALUES = tuple('}]"')
"""Last characters of a JSON value that arguments can be."""


def _is_another(call: _Call, part: Mapping[str, Any], name: Any, arguments: str) -> bool:
    """Whether a part with a name or an id begins a call of its own, although `call` was found.

    It does if its id is another, or if the arguments so far are a whole JSON value. A name before
    any argument continues the name.
    """
    id = part.get("id")
    has_other_id = bool(id) and bool(call.id) and id != call.id
    if not name:
        # The name of a call may follow its id; an id that a server invents comes with arguments.
        return has_other_id and not arguments and call.has_whole_arguments()
    if not call.name:
        return has_other_id
    if has_other_id:
        return True
    if not call.arguments:
        return False
    if id and id == call.id and name == call.name:
        known = "".join(call.arguments)
        return bool(arguments) and known not in ("{}", arguments) and call.has_whole_arguments()
    return name != call.name or call.has_whole_arguments()


def _place(detail: Mapping[str, Any]) -> tuple[Any, Any]:
    """What two parts of one reasoning detail have in common."""
    return detail.get("type"), detail.get("index")


def thought_in(content: Any) -> str:
    """The reasoning in a content that is a list of parts, as Mistral's models write it."""
    if isinstance(content, str):
        return ""  # as nearly always
    return "".join(thought_text(part) for part in objects_among(content) if is_thought(part))


def is_thought(part: Mapping[str, Any]) -> bool:
    """Whether a part of a content is reasoning."""
    return "thinking" in part or part.get("type") in ("thinking", "reasoning", "reasoning_text")


def thought_text(value: Any) -> str:
    """The text of reasoning in any form: a text, a part that holds one, or a list of these."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(map(thought_text, value))
    if isinstance(value, dict):
        return next(
            (text for key in _TEXTS_OF_THOUGHT if (text := thought_text(value.get(key)))), ""
        )
    return ""


_TEXTS_OF_THOUGHT = ("thinking", "reasoning", "text", "content", "summary")
"""Fields of a part of reasoning that hold its text."""


def _built_part(part: Growing) -> dict[str, Any]:
    """A part of a content in the form of Mistral: a thought is a list of texts."""
    built = part.build()
    if built["type"] != "thinking":
        return built
    return {**built, "thinking": [{"type": "text", "text": built["thinking"]}]}


def _text_at(key: str, delta: Mapping[str, Any]) -> str:
    value = delta[key]
    if isinstance(value, str):
        return value
    return thought_text(value) if key in THOUGHTS else _text_of(value)


def _text_of(value: Any) -> str:
    """Text as it is, or that of a list of parts, without the thoughts in it."""
    if isinstance(value, list):
        parts = (part for part in value if isinstance(part, str) or not _is_thought(part))
        return "".join(
            part if isinstance(part, str) else _text_of(part.get("text")) for part in parts
        )
    return value if isinstance(value, str) else ""


def _is_thought(part: Any) -> bool:
    return not isinstance(part, dict) or is_thought(part)


def _arguments_of(value: Any) -> str:
    """Some servers send the object itself, as they do where nothing is streamed."""
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
