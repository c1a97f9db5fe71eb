"""The OpenAI chat dialect: OpenAI, OpenRouter, vLLM, Ollama, llama.cpp, DeepSeek and others.

Request and reply bodies are ours: to build the typed parameters of an SDK costs more than all the
rest of a call and grows with the history, and its reply objects let incomplete replies through.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any
from urllib.parse import urlsplit

import orjson

from agent.messages.message import Message, ToolCall, Usage
from agent.messages.reasoning import split_inline_reasoning
from agent.models.bodies.dialect import Dialect
from agent.models.bodies.endings import read_ending
from agent.models.bodies.token_ids import request_fields, without_outer_newlines
from agent.models.bodies.unknown_fields import extra_of, uncounted_in, unknown_in
from agent.models.dialects.openai_chat_stream import (
    THOUGHTS,
    ChatAssembly,
    is_thought,
    thought_in,
    thought_text,
)
from agent.models.error_bodies import error_behind_200
from agent.models.errors import ModelError
from agent.models.model import Completion, ModelSettings, Request
from agent.models.parsing import (
    RAW_ARGUMENTS,
    input_object,
    make_call,
    object_of,
    parse_object,
    text_or_none,
)
from agent.models.usage import (
    counts_beside,
    hour_writes_in,
    read_usage,
    reported_cost,
    usage_of_reply,
)
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.exact_json import objects_among

API = "openai_chat"

_REASONING_FIELDS = (*THOUGHTS, "reasoning_details")

_VERBATIM_FIELDS = (*_REASONING_FIELDS, "thinking_blocks")
"""What goes back as it came. LiteLLM puts signed thoughts of other APIs beside their text."""

_CALL_FIELDS = frozenset({"id", "type", "function", "index"})
_FUNCTION_FIELDS = frozenset({"name", "arguments"})
_MESSAGE_FIELDS = frozenset({"role", "type", "content", "tool_calls", "refusal", *_VERBATIM_FIELDS})
_PLAIN_MESSAGE = frozenset({"role", "content", "tool_calls", "refusal", "reasoning_content"})
_CHOICE_FIELDS = frozenset({"index", "message", "finish_reason"})
_REPLY_FIELDS = frozenset({"id", "object", "created", "model", "choices", "usage", "error"})
"""What is read of each, or says nothing of the reply. All else is kept as it came."""

_USAGE_FIELDS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens", "cost"), ()),
    "prompt_tokens_details": ("cached_tokens", "cache_write_tokens"),
    "completion_tokens_details": ("reasoning_tokens",),
}

_NOT_SENT = frozenset(
    {
        *("annotations", "content_filter_results", "logprobs", "prompt_token_ids", "token_ids"),
        *("tool_calls", "function_call"),
    }
)
"""Fields of a message that describe it: they are kept, and no endpoint wants them back. Calls are
sent from where they are recorded."""

_PAYS = (("OpenAI-Organization", "OPENAI_ORG_ID"), ("OpenAI-Project", "OPENAI_PROJECT_ID"))
"""Headers, and the variables that OpenAI's own clients read them from."""


def headers_of(settings: ModelSettings, api_key: str) -> dict[str, str]:
    """The key, and at OpenAI who pays, where a key belongs to several organizations or projects."""
    headers = {"Authorization": f"Bearer {api_key}"}
    if is_openai(settings):
        headers |= {header: os.environ[name] for header, name in _PAYS if os.environ.get(name)}
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
        body["messages"] = _with_objects(body["messages"], request.messages)
    if settings.token_ids:
        body["messages"] = without_outer_newlines(body["messages"])
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


def _with_objects(views: list[dict[str, Any]], messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The `views` of `messages`, with an object for arguments that are none.

    vLLM, SGLang and templates parse the arguments in a history, and refuse the request where they
    cannot. Only failed calls are looked at.
    """
    failed = {message["tool_call_id"] for message in messages if message.get("is_error")}
    if not failed:
        return views
    return [
        {**view, "tool_calls": [_with_object(call, failed) for call in view["tool_calls"]]}
        if "tool_calls" in view
        else view
        for view in views
    ]


def _with_object(call: ToolCall, failed: Container[str]) -> ToolCall:
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
    """The same for all turns of a conversation that has no id.

    With neither, OpenAI goes by the prompt's first tokens, which a whole run has in common.
    """
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
    """The messages in the form of this API, with roles in an order that every server takes."""
    views: list[dict[str, Any]] = []
    for message in messages:
        view = to_api(message, reasoning_field)
        if views and _is_continued(views[-1], view["role"]):
            view = _joined(views.pop(), view)
        views.append(view)
    for view in views if blank_reasoning else ():
        if view["role"] == "assistant" and not view.keys() & set(_REASONING_FIELDS):
            view[reasoning_field or "reasoning_content"] = " "
    return views


def _is_continued(earlier: Mapping[str, Any], role: str) -> bool:
    """Whether a message of `role` continues the earlier one; open calls need results first."""
    is_speech = role in ("user", "assistant") and "tool_calls" not in earlier
    return is_speech and earlier["role"] == role


def _joined(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Two user messages are paragraphs; an assistant continues where it was interrupted."""
    between = "\n\n" if later["role"] == "user" else ""
    said = [content for content in (earlier["content"], later["content"]) if content]
    if any(isinstance(content, list) for content in said):
        return {**earlier, **later, "content": [part for one in said for part in _as_parts(one)]}
    content = between.join(said)
    return {**earlier, **later, "content": content or later["content"]}


def _as_parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def to_api(message: Message, reasoning_field: str | None = "reasoning_content") -> dict[str, Any]:
    """One recorded message in the form of this API; the record is not altered.

    Reasoning goes back in the field that it came in, verbatim, so that signed or encrypted
    thoughts stay valid and no server sees a field that it does not know itself. Reasoning from
    elsewhere goes as `reasoning_field`, and nowhere where that is None.
    """
    match message["role"]:
        case "assistant":
            view: dict[str, Any] = {"role": "assistant", "content": message["content"]}
            if calls := message.get("tool_calls"):
                view["tool_calls"] = calls
                # As OpenAI says it: some templates show no calls, and LiteLLM shows the model a
                # sentence of its own, where there is an empty text beside them.
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

    Raises `ModelError("malformed")` where any part is missing without which the reply cannot be
    known to be complete; a missing finish reason is how a cut reply looks.
    """
    reply = parse_object(body)
    choices = reply.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ModelError("malformed", "the reply has no choices")
    choice = choices[0]
    if choice.get("error"):
        raise error_behind_200(choice, "the reply's choice")
    raw = choice.get("message")
    if not isinstance(raw, dict):
        raise ModelError("malformed", "the reply's choice has no message")
    message = read_message(raw)
    ending = read_ending("finish_reason", choice.get("finish_reason"), message)
    finish_reason = ending.reason
    if isinstance(raw.get("refusal"), str) and not message["content"].strip():
        message["content"], finish_reason = raw["refusal"], "refusal"
    raw_usage = usage_of_reply(reply)
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
        extra=extra_of(
            reply=unknown_in(reply, _REPLY_FIELDS),
            choice=unknown_in(choice, _CHOICE_FIELDS) | dict(ending.unknown),
            choices=choices[1:],
            usage=counts_beside(raw_usage, usage, uncounted_in(raw_usage, _USAGE_FIELDS)),
        ),
    )


def read_message(raw: Mapping[str, Any]) -> Message:
    """An assistant message of this API. Raises `ModelError("malformed")`."""
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
        # The form that came before `tool_calls`; some servers still answer in it.
        message["tool_calls"] = [make_call("", call["name"], call.get("arguments"))]
    verbatim = {key: raw[key] for key in _VERBATIM_FIELDS if raw.get(key)}
    verbatim |= unknown_in(raw, _MESSAGE_FIELDS)
    if thought or inline is not None:
        verbatim["content"] = given if thought else received
    if verbatim:
        message["provider_blocks"] = {"api": API, "blocks": [verbatim]}
    return message


def _join_reasoning(raw: Mapping[str, Any], *inside: str | None) -> str:
    """All reasoning of one message, joined by blank lines. What is said twice is one thought.

    `inside` are thoughts from within its content.
    """
    if raw.keys() <= _PLAIN_MESSAGE and not any(inside):
        return thought_text(raw.get("reasoning_content")).strip()  # as mostly
    sources: list[Sequence[str | None]] = [
        [thought_text(raw[key])] for key in THOUGHTS if key in raw
    ]
    if details := raw.get("reasoning_details"):
        sources.append([_detail_text(detail) for detail in objects_among(details)])
    if blocks := raw.get("thinking_blocks"):
        sources.append([thought_text(block) for block in objects_among(blocks)])
    sources += [[thought] for thought in inside]
    texts = [[part.strip() for part in parts if part and part.strip()] for parts in sources]
    return "\n\n".join(_without_repeats([parts for parts in texts if parts]))


def _without_repeats(sources: Sequence[Sequence[str]]) -> Sequence[str]:
    """The parts of thoughts from several fields, less those that only repeat others.

    Servers mirror a thought in a second field, whole or in parts, and with other white space.
    """
    if len(sources) < 2:
        return sources[0] if sources else ()
    kept: dict[str, str] = {}
    for parts in sources:
        before = dict(kept)
        for part in parts:
            text = _squeezed(part)
            if any(text in known for known in before):
                continue
            for known in before:
                if known in text:  # the part says all of that, and more
                    kept.pop(known, None)
            kept[text] = part
    return list(kept.values())


def _detail_text(detail: Mapping[str, Any]) -> str:
    return thought_text(detail.get("summary") or detail.get("content") or detail.get("text"))


def _squeezed(text: str) -> str:
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
    """The call of a tool whose input is free text, which only agents' own requests can offer."""
    custom = object_of(call, "custom")
    return make_call(call.get("id"), custom.get("name"), {"input": custom.get("input")})


def unknown_of_call(call: ToolCall) -> dict[str, Any]:
    """What a call holds beyond what every API has; `add_to_call` puts it back."""
    unknown = unknown_in(call, _CALL_FIELDS)
    if of_function := unknown_in(call["function"], _FUNCTION_FIELDS):
        unknown["function"] = of_function
    return unknown


def add_to_call(call: ToolCall, unknown: Mapping[str, Any]) -> None:
    """Give a call what `unknown_of_call` said of it."""
    call["function"].update(unknown.get("function", {}))
    call.update(unknown_in(unknown, _CALL_FIELDS))  # type: ignore[typeddict-item]


def flat_text(content: Any) -> str:
    """Content as text: parts of a list are joined by newlines, as their servers mean them."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and not is_thought(part) else part
            for part in content
        ]
        return "\n".join(part for part in parts if isinstance(part, str))
    if isinstance(content, dict) and isinstance(content.get("text"), str):
        return str(content["text"])
    return ""


def usage_in(reply: Mapping[str, Any]) -> Usage | None:
    """The token counts in a reply's body."""
    return read_usage(usage_of_reply(reply))


DIALECT = Dialect(
    path="/chat/completions",
    headers=headers_of,
    body=request_body,
    read=read_reply,
    usage=usage_in,
    assembly=ChatAssembly,
)
