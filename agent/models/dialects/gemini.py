"""Replies of Gemini's generateContent. Its requests are only relayed, never written here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from agent.messages.message import FinishReason, Message, ToolCall, Usage
from agent.models.dialects.dialect import (
    Dialect,
    PartialObject,
    make_extra,
    read_ending,
    to_body,
    unknown_in,
)
from agent.models.dialects.gemini_calls import is_open, join_calls
from agent.models.errors import ModelError
from agent.models.model import Completion, ModelSettings, Request, StreamHandler
from agent.models.parsing import get_object, make_call, parse_object, text_or_none
from agent.models.usage import count_or_none, drop_impossible, read_total
from batch_trajectories.basics.exact_json import objects_among

# Streams of Gemini's generateContent: each part is a reply with the new content.

_TEXT_FIELDS = frozenset({"text", "thought", "thoughtSignature"})


class GeminiAssembly:
    """Puts one reply together from its parts; see `Assembly`."""

    def __init__(self, on_delta: StreamHandler) -> None:
        self._emit = on_delta
        self._reply: dict[str, Any] = {}
        self._candidates: dict[int, _Candidate] = {}
        self.has_reason = False
        self.is_over = False
        """Always False: only the end of the connection ends the stream."""

    def add(self, part: Mapping[str, Any]) -> None:
        """See `Assembly.add`."""
        for key, value in part.items():
            if key == "usageMetadata" and isinstance(value, dict):
                self._reply[key] = {**self._reply.get(key, {}), **value}
            elif key != "candidates" and value is not None:
                self._reply[key] = value
        for candidate in objects_among(part.get("candidates")):
            index = candidate.get("index")
            place = index if isinstance(index, int) else 0
            self._candidates.setdefault(place, _Candidate()).add(candidate)
            self.has_reason = all(one.has_reason for one in self._candidates.values())
            if not place:
                self._emit_parts(candidate)

    def finish(self) -> bytes:
        """See `Assembly.finish`."""
        whole = [self._candidates[n].build() for n in sorted(self._candidates)]
        return to_body({**({"candidates": whole} if whole else {}), **self._reply})

    def _emit_parts(self, candidate: Mapping[str, Any]) -> None:
        content = candidate.get("content")
        for part in objects_among(content.get("parts")) if isinstance(content, dict) else ():
            if isinstance(text := part.get("text"), str) and text:
                kind = "thinking_delta" if part.get("thought") else "text_delta"
                self._emit({"type": kind, "text": text})  # type: ignore[typeddict-item]


class _Candidate:
    """One candidate as far as it has arrived."""

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}
        self._content: dict[str, Any] = {}
        self._parts: list[PartialObject] = []

    @property
    def has_reason(self) -> bool:
        """Whether the parts so far say why the candidate ended."""
        return bool(self._fields.get("finishReason"))

    def add(self, given: Mapping[str, Any]) -> None:
        for key, value in given.items():
            if key != "content" and value is not None:
                self._fields[key] = value
        content = given.get("content")
        if not isinstance(content, dict):
            return
        self._content |= {key: value for key, value in content.items() if key != "parts"}
        for part in objects_among(content.get("parts")):
            self._add_part(part)

    def _add_part(self, part: Mapping[str, Any]) -> None:
        # Successive texts are one text, up to a signature, which ends a text.
        last = self._parts[-1].fields if self._parts else {}
        text = part.get("text")
        continues = (
            isinstance(text, str)
            and "text" in last
            and part.keys() | last.keys() <= _TEXT_FIELDS
            and bool(part.get("thought")) == bool(last.get("thought"))
            and "thoughtSignature" not in last
        )
        if not continues:
            self._parts.append(PartialObject(part))
            return
        self._parts[-1].append("text", str(text))
        if "thoughtSignature" in part:
            last["thoughtSignature"] = part["thoughtSignature"]

    def build(self) -> dict[str, Any]:
        content = dict(self._content)
        if self._parts:
            content["parts"] = join_calls(part.build() for part in self._parts)
        return {**({"content": content} if content else {}), **self._fields}


API = "gemini"

PATH = "/v1beta/models"

_REPLY_FIELDS = frozenset(
    {"candidates", "usageMetadata", "modelVersion", "responseId", "promptFeedback", "error"}
)
_CANDIDATE_FIELDS = frozenset({"content", "finishReason", "index"})
"""Fields that are read, or tell nothing about the reply; all others are stored as they came."""

_COUNTS = (
    "promptTokenCount",
    "candidatesTokenCount",
    "thoughtsTokenCount",
    "toolUsePromptTokenCount",
    "totalTokenCount",
)

_PLAIN_PART = frozenset({"text", "thought", "functionCall"})


def make_headers(settings: ModelSettings, api_key: str) -> dict[str, str]:
    """The headers with the key."""
    del settings
    return {"x-goog-api-key": api_key}


def request_body(settings: ModelSettings, request: Request) -> NoReturn:
    """Raise `ModelError`: this program writes no requests in this dialect."""
    del request
    raise ModelError(
        "bad_request", f"the API {API} only relays the calls of agents; use gemini:{settings.name}"
    )


def read_reply(body: bytes) -> Completion:
    """Validate and normalise one reply body.

    Raises `ModelError("malformed")` if the reply may be incomplete: a cut reply has no finish
    reason.
    """
    reply = parse_object(body)
    candidates = reply.get("candidates")
    blocked = get_object(reply, "promptFeedback").get("blockReason")
    if not candidates and blocked:
        return _completion(reply, Message(role="assistant", content=""), finish_reason="refusal")
    if not isinstance(candidates, list) or not candidates or not isinstance(candidates[0], dict):
        raise ModelError("malformed", "the reply has no candidates")
    candidate = candidates[0]
    parts = _join_parts(get_object(candidate, "content").get("parts") or [])
    message = _read_joined(parts)
    ending = read_ending("finishReason", candidate, message)
    finish_reason = ending.reason
    if finish_reason != "length" and any(map(is_open, parts)):
        raise ModelError("malformed", "the arguments of a call do not end")
    if finish_reason == "stop" and "tool_calls" in message:
        finish_reason = "tool_calls"
    return _completion(
        reply,
        message,
        finish_reason=finish_reason,
        candidate=candidate,
        others=candidates[1:],
        unknown=ending.unknown,
    )


def _completion(
    reply: Mapping[str, Any],
    message: Message,
    *,
    finish_reason: FinishReason,
    candidate: Mapping[str, Any] = MappingProxyType({}),
    others: Sequence[Any] = (),
    unknown: Mapping[str, Any] = MappingProxyType({}),
) -> Completion:
    usage = usage_in(reply)
    return Completion(
        message=message,
        finish_reason=finish_reason,
        usage=usage,
        model=text_or_none(reply.get("modelVersion")),
        response_id=text_or_none(reply.get("responseId")),
        extra=make_extra(
            reply=unknown_in(reply, _REPLY_FIELDS),
            choice={**unknown_in(candidate, _CANDIDATE_FIELDS), **unknown},
            choices=list(others),
            usage=_differing_counts(reply, usage),
        ),
    )


def read_parts(parts: Any) -> Message:
    """Build the message from the parts of a content; it holds them verbatim if they have more."""
    return _read_joined(_join_parts(parts))


def _join_parts(parts: Any) -> list[dict[str, Any]]:
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise ModelError("malformed", "the parts of the content are not a list of objects")
    return join_calls(parts)


def _read_joined(parts: list[dict[str, Any]]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for part in parts:
        if isinstance(call := part.get("functionCall"), dict):
            calls.append(make_call(call.get("id"), call.get("name"), call.get("args") or {}))
        elif isinstance(text := part.get("text"), str):
            (thoughts if part.get("thought") else texts).append(text)
    message = Message(role="assistant", content="".join(texts))
    if reasoning := "\n\n".join(filter(None, (thought.strip() for thought in thoughts))):
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = calls
    if not all(part.keys() <= _PLAIN_PART for part in parts):
        message["provider_blocks"] = {"api": API, "blocks": parts}
    return message


def usage_in(reply: Mapping[str, Any]) -> Usage | None:
    """The token counts in a reply's body."""
    # In this API the output excludes the reasoning; records include it.
    raw = reply.get("usageMetadata")
    if not isinstance(raw, dict):
        return None
    counts = (count_or_none(raw.get(name)) for name in _COUNTS)
    given, written, reasoning, tool_input, total = counts
    if written is None and reasoning is None and given is None:
        return None
    given, made = read_total(
        given if given is None else given + (tool_input or 0),
        (written or 0) + (reasoning or 0),
        total,
    )
    cached = count_or_none(raw.get("cachedContentTokenCount"))
    given, made = drop_impossible(given, made, cached)
    return Usage(
        input_tokens=given,
        output_tokens=made,
        cache_read_tokens=cached,
        cache_write_tokens=None,
        reasoning_tokens=reasoning,
    )


def _differing_counts(reply: Mapping[str, Any], usage: Usage | None) -> dict[str, Any]:
    """The counts as they came, if their sum differs from the total; see `agent.models.usage`."""
    raw = get_object(reply, "usageMetadata")
    total = count_or_none(raw.get("totalTokenCount"))
    counted = sum(count_or_none(raw.get(name)) or 0 for name in _COUNTS[:-1])
    return {} if usage is None or not total or total == counted else dict(raw)


DIALECT = Dialect(
    path=PATH,
    headers=make_headers,
    body=request_body,
    read=read_reply,
    usage=usage_in,
    assembly=GeminiAssembly,
)
