"""The OpenAI chat dialect: OpenAI, OpenRouter, vLLM, Ollama, llama.cpp, DeepSeek and others.

Bodies are written and read here, not by an SDK: its typed parameters cost more than all the rest of
a call and grow with the history, and its reply objects accept incomplete replies.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any
from urllib.parse import urlsplit

import orjson

from agent.messages.message import Message, ToolCall, Usage, split_inline_reasoning
from agent.models.dialects.dialect import (
    Dialect,
    PartialObject,
    incomplete_body,
    make_extra,
    merge,
    read_ending,
    to_body,
    uncounted_in,
    unknown_in,
    update_counts,
)
from agent.models.dialects.token_ids import request_fields, trim_messages
from agent.models.endpoint_words import find_ending
from agent.models.error_bodies import error_behind_200, says_error
from agent.models.errors import ModelError
from agent.models.model import Completion, ModelSettings, Request, StreamHandler
from agent.models.parsing import (
    RAW_ARGUMENTS,
    get_object,
    input_object,
    make_call,
    parse_object,
    text_or_none,
)
from agent.models.usage import (
    add_plain_counts,
    find_usage,
    hour_writes_in,
    read_usage,
    reported_cost,
)
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.exact_json import objects_among

# Streams of the OpenAI chat dialect.
#
# Servers send tool calls in many ways: with an index, with one index for all, with ids alone or
# with neither; with the role, name or id repeated in each part; with a name in pieces; and with
# arguments in one piece or many, or after an empty object.

_CALL_FIELDS = frozenset({"id", "type", "function", "index"})
_FUNCTION_FIELDS = frozenset({"name", "arguments"})
_STREAMED_CHOICE_FIELDS = frozenset({"index", "delta", "finish_reason", "message"})
_PLAIN_CHOICE = _STREAMED_CHOICE_FIELDS | {"logprobs"}  # which is mostly there, and null
_PART_FIELDS = frozenset(
    {"id", "object", "created", "model", "choices", "usage", "error", "obfuscation"}
)
"""Fields with rules of their own, or without meaning; all others are merged as they come."""

_MAX_OTHERS = 127
"""Maximum further choices of one reply that are stored: OpenAI sends no more."""

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
"""Fields of a part with text, in the order in which they are passed on: reasoning comes first."""
_DELTA_FIELDS = frozenset(
    {"role", "type", "tool_calls", "reasoning_details", "thinking_blocks", *_TEXTS}
)
_DETAIL_TEXTS = {"reasoning.text": "text", "reasoning.summary": "summary"}
"""Kinds of reasoning details that arrive in parts, each with the field that grows."""


class ChatAssembly:
    """Puts one `chat.completion` together from its chunks; see `Assembly`."""

    def __init__(self, on_delta: StreamHandler) -> None:
        self._emit = on_delta
        self._reply: dict[str, Any] = {}
        self._choice: dict[str, Any] = {}
        self._has_choice = False
        self._others: dict[int, ChatAssembly] = {}
        self._message = PartialObject({"role": "assistant"})
        self._content: list[PartialObject] = []
        """Thoughts and texts of a content in parts; empty if the content is a text."""
        self._unknown: dict[str, Any] = {}
        """Unknown fields of the message."""
        self._details: list[PartialObject] = []
        self._blocks: list[PartialObject] = []
        self._calls: list[_Call] = []
        self._by_index: dict[str, _Call] = {}
        self._by_id: dict[str, _Call] = {}
        self._finish_reason: Any = None
        self._flaw = ""
        """The reason why the reply cannot be put together; "" if it can."""
        self._goes_on = False
        """Content followed a finish reason, so none is taken for the end of the reply."""
        self.has_reason = False
        self.is_over = False

    def add(self, part: Mapping[str, Any]) -> None:
        """See `Assembly.add`."""
        for key in ("id", "model"):
            if part.get(key):
                self._reply[key] = part[key]
        if usage := part.get("usage"):
            self._add_usage(usage)
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

    def _add_usage(self, usage: Any) -> None:
        known = self._reply.get("usage")
        if isinstance(usage, dict) and isinstance(known, dict):
            update_counts(known, usage)
        else:
            self._reply["usage"] = dict(usage) if isinstance(usage, dict) else usage

    def _update_reason(self) -> None:
        # A reply of several choices has ended once each of them has.
        self.has_reason = (
            self._finish_reason is not None
            and find_ending(self._finish_reason) != "open"
            and not self._goes_on
            and all(other.has_reason for other in self._others.values())
        )

    def _add_whole(self, message: Mapping[str, Any]) -> None:
        """Add a whole message, which some servers send in place of the parts, or after them."""
        texts = {key: value for key in _TEXTS if (value := _read_text(message.get(key)))}
        before = self._message.build()
        if len(before) == 1 and not (self._calls or self._content or self._details):
            self._add_delta(message)
            return
        for key, text in texts.items():
            if key not in before:  # the parts lack this text
                self._message.append(key, text)
            elif before[key] != text:
                self._flaw = "the parts of the stream say something else than the whole message"
        calls = message.get("tool_calls")
        if calls and not self._calls:
            self._add_calls(calls)
        elif calls and len(calls) != len(self._calls):
            self._flaw = "the parts of the stream have other calls than the whole message in it"

    def finish(self) -> bytes:
        """See `Assembly.finish`."""
        self._sort_calls()
        self._calls = [call for call in self._calls if not call.is_empty]
        if any(not (call.is_named or call.is_custom) for call in self._calls):
            self._flaw = self._flaw or "arguments for a call that has no name"
        if self._flaw:
            return to_body(incomplete_body(self._flaw, self._reply))
        if self._finish_reason is not None:
            for call in self._calls:  # nothing in the stream marks the end of a call
                self._emit({"type": "tool_use_stop", "tool_id": call.id, "tool_name": call.name})
        return to_body(self._build())

    def _sort_calls(self) -> None:
        """Put the calls in the order of their indices, if each has one of its own."""
        by_index = [(index, call) for index, call in self._by_index.items() if index.isdecimal()]
        if len(by_index) == len(self._calls):
            self._calls = [call for _, call in sorted(by_index, key=lambda one: int(one[0]))]

    def _build(self) -> dict[str, Any]:
        message = self._message.build() | self._unknown
        if self._content:
            message["content"] = [_build_part(part) for part in self._content]
        if self._details:
            message["reasoning_details"] = [detail.build() for detail in self._details]
        if self._blocks:
            message["thinking_blocks"] = [block.build() for block in self._blocks]
        if self._calls:
            message["tool_calls"] = [call.build() for call in self._calls]
        whole = {**self._choice, "message": message}
        if self._finish_reason is not None:
            whole["finish_reason"] = self._finish_reason
        choices = [whole] if self._has_choice else []
        for index, other in self._others.items():
            choices += [{"index": index, **choice} for choice in other._build()["choices"]]
        return {**self._reply, "choices": choices}

    def _add_other(self, index: Any, choice: Mapping[str, Any]) -> None:
        """Add a part of a further choice, if `extra_body` asks for several choices."""
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
        if self._content or isinstance(content, list | dict):
            thought = self._add_content(content, texts.get("content", ""))
        for key, text in texts.items():
            self._message.append(key, text)
        details = [
            self._add_detail(detail) for detail in objects_among(delta.get("reasoning_details"))
        ]
        for block in objects_among(delta.get("thinking_blocks")):
            self._add_block(block)
        # Some servers send the same thought in two or three fields.
        named = next((texts[key] for key in THOUGHTS if key in texts), "")
        thought = named or "".join(details) or thought
        if thought:
            self._emit({"type": "thinking_delta", "text": thought})
        for key in ("content", "refusal"):
            if key in texts:
                self._emit({"type": "text_delta", "text": texts[key]})
        if parts := delta.get("tool_calls"):
            self._add_calls(parts)

    def _add_content(self, content: Any, text: str) -> str:
        """Add a part of a content that is a list; returns the new thought."""
        # Until there are several parts, or one that is no text, the content is a text.
        thought = thought_in(content)
        parts = content if isinstance(content, list) else [content or ""]
        if not self._content and len(parts) < 2 and all(map(is_text, parts)):
            return thought
        if not self._content and (before := self._message.build().get("content")):
            self._content.append(PartialObject({"type": "text", "text": before}))
        for place, part in enumerate(parts):
            self._add_part(part, is_first=place == 0)
        return thought

    def _add_part(self, part: Any, *, is_first: bool) -> None:
        """Add a part of a content; the first part of a chunk may continue a text or a thought.

        A part that is neither is stored as it is.
        """
        if isinstance(part, dict) and is_thought(part):
            kind, piece = "thinking", thought_text(part)
        elif is_text(part):
            kind, piece = "text", _read_text(part)
        else:
            self._content.append(PartialObject(part if isinstance(part, dict) else {"text": part}))
            return
        if not piece:
            return
        last = self._content[-1].fields.get("type") if self._content else None
        if last != kind or not is_first:
            self._content.append(PartialObject({"type": kind}))
        self._content[-1].append(kind, piece)

    def _add_detail(self, detail: Mapping[str, Any]) -> str:
        """Add a part of `reasoning_details`; returns its text."""
        key = _DETAIL_TEXTS.get(str(detail.get("type")))
        if key is None:
            self._details.append(PartialObject(detail))
            return ""
        grown = next(
            (
                one
                for one in reversed(self._details)
                if _detail_key(one.fields) == _detail_key(detail)
            ),
            None,
        )
        if grown is None:
            grown = PartialObject({})
            self._details.append(grown)
        for name in detail.keys() - {key}:
            if detail[name] is not None or name not in grown.fields:
                grown.fields[name] = detail[name]
        text = _read_text(detail.get(key))
        grown.append(key, text)
        return text

    def _add_block(self, part: Mapping[str, Any]) -> None:
        """Add a part of `thinking_blocks`."""
        # Only a signature marks the end of a block.
        last = self._blocks[-1].fields if self._blocks else {"signature": True}
        if last.get("signature") or last.get("type") != part.get("type") or "data" in part:
            self._blocks.append(PartialObject({}))
        block = self._blocks[-1]
        block.fields.update({key: part[key] for key in part if key != "thinking"})
        if "thinking" in part:
            block.append("thinking", _read_text(part["thinking"]))

    def _add_calls(self, parts: Any) -> None:
        """Add the parts of calls in one chunk; two parts with a name in it are two calls."""
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            self._flaw = "the tool_calls of a part are not a list of objects"
            return
        begun: list[_Call] = []
        for part in parts:
            given = part.get("function")
            function: Mapping[str, Any] = given if isinstance(given, dict) else {}
            name, arguments = function.get("name"), _read_arguments(function.get("arguments"))
            call = self._find_call(part)
            is_new = call is None or (bool(name) and call in begun)
            if not is_new and call is not None and (name or part.get("id")):
                is_new = _begins_another(call, part, name, arguments)
            if is_new or call is None:
                call = self._begin_call(part)
            if name:
                begun.append(call)
            self._extend_call(call, part, function, arguments)

    def _extend_call(
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
                self._emit({"type": "tool_use_start", "tool_id": call.id, "tool_name": call.name})
        if arguments and call.add_arguments(arguments):
            self._emit({"type": "tool_use_delta", "tool_id": call.id, "tool_input": arguments})

    def _find_call(self, part: Mapping[str, Any]) -> _Call | None:
        """Find the call that a part names by its index or id, else the latest one; None if none."""
        # Some servers give all calls the same index, others the same id: whatever differs counts.
        # An id alone begins no call, since some servers invent one for every part.
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

    def _begin_call(self, part: Mapping[str, Any]) -> _Call:
        call = _Call(len(self._calls))
        self._calls.append(call)
        if (index := part.get("index")) is not None:
            self._by_index[repr(index)] = call
        return call


class _Call:
    """One tool call as far as it has arrived."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.id = ""
        self.name = ""
        self.is_named = False
        """Whether a part had a name for the call; it may be empty, as models write such calls."""
        self.arguments: list[str] = []
        self.unknown: dict[str, Any] = {}
        self.unknown_of_function: dict[str, Any] = {}

    def add_to_name(self, name: str) -> None:
        """Add a name or a piece of it; some servers repeat the name, or all of it so far."""
        self.is_named = True
        if name.startswith(self.name):
            self.name = name
        else:
            self.name += name

    def add_arguments(self, text: str) -> bool:
        """Add a piece of the arguments; returns False if it only repeats them."""
        if (
            len(self.arguments) == 1
            and self.arguments[0] in _EMPTY_ARGUMENTS
            and text.lstrip()[:1] == "{"
        ):
            self.arguments.clear()
        elif text[0] == "{" and self._is_repeated_by(text):
            is_more = len(text) > sum(map(len, self.arguments))
            self.arguments = [text]
            return is_more
        self.arguments.append(text)
        return True

    def _is_repeated_by(self, text: str) -> bool:
        """Whether a piece repeats all arguments so far; no JSON repeats its own beginning."""
        known = "".join(self.arguments)
        if not known or not text.startswith(known):
            return False
        return len(known) >= _MIN_REPEATED_CHARS or (known == text and self.has_whole_arguments())

    @property
    def is_empty(self) -> bool:
        """Whether the parts gave nothing but an id."""
        return not (self.name or self.arguments or self.unknown or self.unknown_of_function)

    @property
    def is_custom(self) -> bool:
        """Whether the call is one of a tool that takes free text."""
        return isinstance(self.unknown.get("custom"), dict) and not (self.name or self.arguments)

    def has_whole_arguments(self) -> bool:
        """Whether the arguments so far are a complete JSON value."""
        if not self.arguments or self.arguments[-1].rstrip()[-1:] not in _VALUE_ENDS:
            return False
        try:
            orjson.loads("".join(self.arguments))
        except orjson.JSONDecodeError:
            return False
        return True

    def build(self) -> dict[str, Any]:
        if self.is_custom:
            return {"id": self.id, "type": "custom", **self.unknown}
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        function |= self.unknown_of_function
        return {"id": self.id, "type": "function", "function": function, **self.unknown}


_EMPTY_ARGUMENTS = ("{}", "null")
"""Arguments that some servers send before the real ones."""

_MIN_REPEATED_CHARS = 3
"""Length from which on the beginning of an object cannot stand elsewhere in it."""

_VALUE_ENDS = tuple('}]"')
"""Last characters of the JSON values that arguments can be."""


def _begins_another(call: _Call, part: Mapping[str, Any], name: Any, arguments: str) -> bool:
    """Whether a part with a name or an id begins another call, although `call` was found for it.

    It does if its id differs, or if the arguments so far are a whole JSON value. A name before any
    argument continues the name.
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


def _detail_key(detail: Mapping[str, Any]) -> tuple[Any, Any]:
    """The fields that are equal in all parts of one reasoning detail."""
    return detail.get("type"), detail.get("index")


def thought_in(content: Any) -> str:
    """The reasoning in a content that is a list of parts, as Mistral's models write it."""
    if isinstance(content, str):  # nearly always
        return ""
    return "".join(thought_text(part) for part in objects_among(content) if is_thought(part))


def is_text(part: Any) -> bool:
    """Whether a part of a content is a text and no thought."""
    if isinstance(part, dict):
        return isinstance(part.get("text"), str) and not is_thought(part)
    return isinstance(part, str)


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
        return next((text for key in _THOUGHT_TEXTS if (text := thought_text(value.get(key)))), "")
    return ""


_THOUGHT_TEXTS = ("thinking", "reasoning", "text", "content", "summary")
"""Fields of a part of reasoning that hold its text."""


def _build_part(part: PartialObject) -> dict[str, Any]:
    """Build a part of a content in Mistral's form, in which a thought is a list of texts."""
    built = part.build()
    if built.get("type") != "thinking" or not isinstance(built.get("thinking"), str):
        return built
    return {**built, "thinking": [{"type": "text", "text": built["thinking"]}]}


def _text_at(key: str, delta: Mapping[str, Any]) -> str:
    value = delta[key]
    if isinstance(value, str):
        return value
    return thought_text(value) if key in THOUGHTS else _read_text(value)


def _read_text(value: Any) -> str:
    """The text of a value: a text, or a list of parts, whose thoughts are left out."""
    if isinstance(value, dict):
        value = [value]
    if isinstance(value, list):
        parts = (part for part in value if isinstance(part, str) or not _is_thought(part))
        return "".join(
            part if isinstance(part, str) else _read_text(part.get("text")) for part in parts
        )
    return value if isinstance(value, str) else ""


def _is_thought(part: Any) -> bool:
    return not isinstance(part, dict) or is_thought(part)


def _read_arguments(value: Any) -> str:
    # Some servers send the object itself, as in replies that are not streamed.
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


API = "openai_chat"

_REASONING_FIELDS = (*THOUGHTS, "reasoning_details")

_VERBATIM_FIELDS = (*_REASONING_FIELDS, "thinking_blocks")
"""Fields that are sent back verbatim; LiteLLM puts signed thoughts of other APIs into them."""

_THOUGHT_FIELDS = frozenset(_VERBATIM_FIELDS)


_MESSAGE_FIELDS = frozenset({"role", "type", "content", "tool_calls", "refusal", *_VERBATIM_FIELDS})
_PLAIN_FIELDS = _MESSAGE_FIELDS - _THOUGHT_FIELDS
_PLAIN_MESSAGE = frozenset({"role", "content", "tool_calls", "refusal", "reasoning_content"})
_CHOICE_FIELDS = frozenset({"index", "message", "finish_reason"})
_REPLY_FIELDS = frozenset({"id", "object", "created", "model", "choices", "usage", "error"})
"""Fields that are read, or tell nothing about the reply; all others are stored as they came."""

_USAGE_FIELDS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens", "cost"), ()),
    "prompt_tokens_details": ("cached_tokens", "cache_write_tokens"),
    "completion_tokens_details": ("reasoning_tokens",),
}

_NOT_SENT = frozenset(
    {
        "annotations",
        "content_filter_results",
        "logprobs",
        "prompt_token_ids",
        "token_ids",
        "tool_calls",
        "function_call",
    }
)
"""Unknown fields of a message that are not sent back: they only describe it, or are its calls.

Calls are sent from `Message.tool_calls`.
"""

_PAYER_HEADERS = (("OpenAI-Organization", "OPENAI_ORG_ID"), ("OpenAI-Project", "OPENAI_PROJECT_ID"))
"""Headers, each with the variable from which OpenAI's own clients read it."""


def make_headers(settings: ModelSettings, api_key: str) -> dict[str, str]:
    """The headers with the key, and at OpenAI with the organization and project that pay."""
    headers = {"Authorization": f"Bearer {api_key}"}
    if is_openai(settings):
        headers |= {
            header: os.environ[name] for header, name in _PAYER_HEADERS if os.environ.get(name)
        }
    return headers


def request_body(settings: ModelSettings, request: Request) -> dict[str, Any]:
    """The JSON body of one request."""
    body: dict[str, Any] = {
        "model": settings.name,
        "messages": to_api_messages(
            request.messages, settings.reasoning_field, blank_reasoning=settings.blank_reasoning
        ),
    }
    if not is_openai(settings):
        body["messages"] = _ensure_object_arguments(body["messages"], request.messages)
    if settings.token_ids:
        body["messages"] = trim_messages(body["messages"])
    if settings.takes_cache_key:
        body["prompt_cache_key"] = request.conversation or cache_key(request.messages)
    if request.tools:
        body["tools"] = list(request.tools)
        if request.tool_choice == "none":
            body["tool_choice"] = "none"
    for key in ("temperature", "top_p"):
        if (value := getattr(settings, key)) is not None:
            body[key] = value
    if settings.max_tokens is not None:
        body[settings.max_tokens_name or settings.usual_max_tokens_name] = settings.max_tokens
    body.update(_effort(settings))
    body["stream"] = request.on_delta is not None
    if body["stream"] and settings.stream_options:
        body["stream_options"] = {"include_usage": True}
    if settings.token_ids:
        body.update(request_fields(settings, streams=request.on_delta is not None))
    body.update(settings.extra_body or {})
    return body


def _ensure_object_arguments(
    views: list[dict[str, Any]], messages: Sequence[Message]
) -> list[dict[str, Any]]:
    """Replace arguments that are no object by one, in `views`, the API form of `messages`."""
    # vLLM, SGLang and templates parse the arguments in a history, and refuse a request if they
    # cannot. Only calls that failed can have such arguments.
    failed = {message["tool_call_id"] for message in messages if message.get("is_error")}
    if not failed:
        return views
    return [
        {**view, "tool_calls": [_ensure_object(call, failed) for call in view["tool_calls"]]}
        if "tool_calls" in view
        else view
        for view in views
    ]


def _ensure_object(call: ToolCall, failed: Container[str]) -> ToolCall:
    arguments = call["function"]["arguments"]
    if call["id"] not in failed or input_object(arguments) is not None:
        return call
    given = exact_json.dumps({RAW_ARGUMENTS: arguments}).decode()
    return {**call, "function": {**call["function"], "arguments": given}}


def is_openai(settings: ModelSettings) -> bool:
    """Whether the endpoint is OpenAI itself, in any region."""
    return _is_openai(settings.base_url or "")


@lru_cache(maxsize=64)
def _is_openai(base_url: str) -> bool:
    host = urlsplit(base_url).hostname or ""
    return host == "api.openai.com" or host.endswith(".api.openai.com")


def cache_key(messages: Sequence[Message]) -> str:
    """A cache key that all turns of a conversation have in common, for one that has no id."""
    # Without a key, OpenAI uses the prompt's first tokens, which a whole run has in common.
    opening = []
    for message in messages:
        opening.append(message["content"])
        if message["role"] == "user":
            break
    return blake2b(orjson.dumps(opening), digest_size=16).hexdigest()


def _effort(settings: ModelSettings) -> dict[str, Any]:
    effort = settings.reasoning_effort
    if effort is None:
        return {}
    if settings.provider == "openrouter":
        return {"reasoning": {"enabled": False} if effort == "none" else {"effort": effort}}
    return {"reasoning_effort": effort}


def to_api_messages(
    messages: Sequence[Message],
    reasoning_field: str | None = "reasoning_content",
    *,
    blank_reasoning: bool = False,
) -> list[dict[str, Any]]:
    """Convert messages to the form of this API, with roles in an order that each server accepts."""
    views: list[dict[str, Any]] = []
    for message in messages:
        view = to_api(message, reasoning_field)
        if views and _is_continued(views[-1], view["role"]):
            view = _join_messages(views.pop(), view)
        views.append(view)
    for view in views if blank_reasoning else ():
        if view["role"] == "assistant" and not view.keys() & set(_REASONING_FIELDS):
            view[reasoning_field or "reasoning_content"] = " "
    return views


def _is_continued(earlier: Mapping[str, Any], role: str) -> bool:
    """Whether a message of `role` continues the earlier one; open calls need results first."""
    is_speech = role in ("user", "assistant") and "tool_calls" not in earlier
    return is_speech and earlier["role"] == role


def _join_messages(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    # Two user messages are paragraphs; an assistant continues where it was interrupted.
    between = "\n\n" if later["role"] == "user" else ""
    contents = [content for content in (earlier["content"], later["content"]) if content]
    joined = {**earlier, **later}
    for key in earlier.keys() & later.keys() & _THOUGHT_FIELDS:
        joined[key] = _join_thoughts(earlier[key], later[key])
    if any(isinstance(content, list) for content in contents):
        return {**joined, "content": [part for one in contents for part in _as_parts(one)]}
    content = between.join(contents)
    return {**joined, "content": content or later["content"]}


def _join_thoughts(earlier: Any, later: Any) -> Any:
    """Join two thoughts of one field; the later one alone if they have no common form."""
    if isinstance(earlier, str) and isinstance(later, str):
        return "\n\n".join(filter(None, (earlier, later)))
    if isinstance(earlier, list) and isinstance(later, list):
        return [*earlier, *later]
    return later


def _as_parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def to_api(message: Message, reasoning_field: str | None = "reasoning_content") -> dict[str, Any]:
    """Convert one recorded message to the form of this API; the record is not altered.

    Reasoning goes back verbatim, in the field in which it came: signed or encrypted thoughts stay
    valid, and no server sees a field that it does not know. Reasoning from another API goes into
    `reasoning_field`; None: it is left out.
    """
    match message["role"]:
        case "assistant":
            view: dict[str, Any] = {"role": "assistant", "content": message["content"]}
            if calls := message.get("tool_calls"):
                view["tool_calls"] = calls
                # None, as OpenAI has it. Beside an empty text some templates show no calls, and
                # LiteLLM shows the model a sentence of its own.
                view["content"] = message["content"] or None
            blocks = message.get("provider_blocks")
            if blocks is not None and blocks["api"] == API:
                block = blocks["blocks"][0]
                view.update((key, block[key]) for key in block if key not in _NOT_SENT)
            elif reasoning_field and (reasoning := message.get("reasoning")):
                view[reasoning_field] = reasoning
            return view
        case "tool":
            return {
                "role": "tool",
                "tool_call_id": message["tool_call_id"],
                "content": message["content"],
            }
        case role:
            return {"role": role, "content": message["content"]}


def read_reply(body: bytes) -> Completion:
    """Validate and normalise one reply body.

    Raises `ModelError("malformed")` if the reply may be incomplete: a cut reply has no finish
    reason.
    """
    reply = parse_object(body)
    choices = reply.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ModelError("malformed", "the reply has no choices")
    choice = choices[0]
    if says_error(choice):
        raise error_behind_200(choice, "the reply's choice")
    raw = choice.get("message")
    if not isinstance(raw, dict):
        raise ModelError("malformed", "the reply's choice has no message")
    message = read_message(raw)
    ending = read_ending("finish_reason", choice, message)
    finish_reason = ending.reason
    if isinstance(raw.get("refusal"), str) and not message["content"].strip():
        message["content"], finish_reason = raw["refusal"], "refusal"
    raw_usage = find_usage(reply)
    usage = read_usage(raw_usage)
    return Completion(
        message=message,
        finish_reason=finish_reason,
        usage=usage,
        model=text_or_none(reply.get("model")),
        response_id=text_or_none(reply.get("id")),
        cost_usd=reported_cost(reply),
        unknown_ending=ending.word,
        hour_cache_writes=hour_writes_in(reply, usage),
        extra=make_extra(
            reply=unknown_in(reply, _REPLY_FIELDS),
            choice=unknown_in(choice, _CHOICE_FIELDS) | dict(ending.unknown),
            choices=choices[1:],
            usage=add_plain_counts(raw_usage, usage, uncounted_in(raw_usage, _USAGE_FIELDS)),
        ),
    )


def read_message(raw: Mapping[str, Any]) -> Message:
    """Read an assistant message of this API. Raises `ModelError("malformed")`."""
    given = raw.get("content")
    received, thought = flat_text(given), thought_in(given)
    inline, text = split_inline_reasoning(received)
    message = Message(role="assistant", content=text)
    if reasoning := _join_reasoning(raw, thought, inline):
        message["reasoning"] = reasoning
    if calls := raw.get("tool_calls"):
        if not isinstance(calls, list):
            raise ModelError("malformed", "the reply's tool_calls are not a list")
        message["tool_calls"] = [_read_call(call) for call in calls]
    elif isinstance(call := raw.get("function_call"), dict) and call.get("name"):
        # The form before `tool_calls`, which some servers still use.
        message["tool_calls"] = [make_call("", call["name"], call.get("arguments"))]
    verbatim: dict[str, Any] = {}
    if not raw.keys() <= _PLAIN_FIELDS:
        verbatim = {key: raw[key] for key in _VERBATIM_FIELDS if raw.get(key)}
        verbatim |= unknown_in(raw, _MESSAGE_FIELDS)
    if isinstance(given, list) and not all(map(is_text, given)):
        verbatim["content"] = given
    elif inline is not None:
        verbatim["content"] = received
    if verbatim:
        message["provider_blocks"] = {"api": API, "blocks": [verbatim]}
    return message


def _join_reasoning(raw: Mapping[str, Any], *inside: str | None) -> str:
    """Join all reasoning of one message by blank lines; thoughts that are repeated count once.

    `inside` are the thoughts in its content.
    """
    if raw.keys() <= _PLAIN_MESSAGE and not any(inside):  # mostly
        return thought_text(raw.get("reasoning_content")).strip()
    sources: list[Sequence[str | None]] = [
        [thought_text(raw[key])] for key in THOUGHTS if key in raw
    ]
    if details := raw.get("reasoning_details"):
        sources.append([_detail_text(detail) for detail in objects_among(details)])
    if blocks := raw.get("thinking_blocks"):
        sources.append([thought_text(block) for block in objects_among(blocks)])
    sources += [[thought] for thought in inside]
    texts = [[part.strip() for part in parts if part and part.strip()] for parts in sources]
    return "\n\n".join(_remove_repeats([parts for parts in texts if parts]))


def _remove_repeats(sources: Sequence[Sequence[str]]) -> Sequence[str]:
    """The parts of thoughts from several fields, without parts that only repeat others."""
    # Servers mirror a thought in a second field, whole or in parts, and with other white space.
    if len(sources) < 2:
        return sources[0] if sources else ()
    kept: dict[str, str] = {}
    for parts in sources:
        before = dict(kept)
        for part in parts:
            text = _remove_white_space(part)
            if any(text in known for known in before):
                continue
            for known in before:
                if known in text:  # the part contains that thought
                    kept.pop(known, None)
            kept[text] = part
    return list(kept.values())


def _detail_text(detail: Mapping[str, Any]) -> str:
    return thought_text(detail.get("summary") or detail.get("content") or detail.get("text"))


def _remove_white_space(text: str) -> str:
    return "".join(text.split())


def _read_call(call: Any) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) and isinstance(call, dict) and call.get("type") == "custom":
        return _read_custom_call(call)
    if not isinstance(function, dict):
        raise ModelError("malformed", "a tool call of the reply has no function")
    made = make_call(call.get("id"), function.get("name"), function.get("arguments"))
    made.update(unknown_in(call, _CALL_FIELDS))  # type: ignore[typeddict-item]
    made["function"].update(unknown_in(function, _FUNCTION_FIELDS))  # type: ignore[typeddict-item]
    return made


def _read_custom_call(call: Mapping[str, Any]) -> ToolCall:
    """Read the call of a tool that takes free text, which only requests of agents can offer."""
    custom = get_object(call, "custom")
    return make_call(call.get("id"), custom.get("name"), {"input": custom.get("input")})


def flat_text(content: Any, between: str = "") -> str:
    """The text of a content; `between` is put between the texts of a list.

    A model's texts are pieces of one text; those of other roles are mostly texts of their own.
    """
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and not is_thought(part) else part
            for part in content
        ]
        return between.join(part for part in parts if isinstance(part, str))
    if isinstance(content, dict) and isinstance(content.get("text"), str):
        return str(content["text"])
    return ""


def usage_in(reply: Mapping[str, Any]) -> Usage | None:
    """The token counts in a reply's body."""
    return read_usage(find_usage(reply))


DIALECT = Dialect(
    path="/chat/completions",
    headers=make_headers,
    body=request_body,
    read=read_reply,
    usage=usage_in,
    assembly=ChatAssembly,
)
