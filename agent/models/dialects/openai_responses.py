"""The Responses dialect of OpenAI. Bodies are ours for the reasons given in `openai_chat`.

Nothing is kept at the endpoint: every request brings the whole conversation, and thoughts travel
with it in encrypted form. Reasoning models show their thoughts only if `extra_body` asks
for {"reasoning": {"summary": "auto"}}.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from agent.messages.message import Message, ToolCall, Usage
from agent.messages.reasoning import split_inline_reasoning
from agent.models.bodies.dialect import Dialect
from agent.models.bodies.endings import ReplyEnding, read_ending
from agent.models.bodies.unknown_fields import extra_of, uncounted_in, unknown_in
from agent.models.dialects.openai_chat import cache_key, headers_of, is_openai
from agent.models.dialects.openai_responses_stream import ResponsesAssembly
from agent.models.error_bodies import error_behind_200
from agent.models.errors import ModelError
from agent.models.model import Completion, ModelSettings, Request
from agent.models.parsing import (
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
from batch_trajectories.basics.exact_json import objects_among

API = "openai_responses"

_DOES_NOT_REASON = re.compile(r"(?:^|/)(?:gpt-3|gpt-4|chatgpt)|-chat")
"""Names of models that refuse to be asked for encrypted thoughts, since they have none."""

_PLAIN_FIELDS: Mapping[str, frozenset[str]] = {
    "message": frozenset({"type", "id", "status", "role", "content"}),
    "function_call": frozenset({"type", "id", "status", "call_id", "name", "arguments"}),
    "output_text": frozenset({"type", "text"}),
}
"""What an item or a part may hold that the record holds too, or that is never needed again."""


_REPLY_FIELDS = frozenset(
    {
        *("id", "object", "created_at", "completed_at", "model", "status", "output", "output_text"),
        *("usage", "error", "incomplete_details"),
        # What follows repeats the request.
        *("background", "conversation", "include", "instructions", "max_output_tokens"),
        *("max_tool_calls", "metadata", "parallel_tool_calls", "previous_response_id", "prompt"),
        *("prompt_cache_key", "prompt_cache_retention", "reasoning", "safety_identifier", "store"),
        *("temperature", "text", "tool_choice", "tools", "top_logprobs", "top_p", "truncation"),
        *("user",),
    }
)
_USAGE_FIELDS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("input_tokens", "output_tokens", "total_tokens", "cost"), ()),
    "input_tokens_details": ("cached_tokens", "cache_write_tokens"),
    "output_tokens_details": ("reasoning_tokens",),
}
"""What is read of a reply, or known already; all else is kept as it came."""


def request_body(settings: ModelSettings, request: Request) -> dict[str, Any]:
    """The JSON body of one request; the system message travels beside the others."""
    messages = list(request.messages)
    body: dict[str, Any] = {
        "model": settings.name,
        "store": False,
    }
    if not _DOES_NOT_REASON.search(settings.name):
        body["include"] = ["reasoning.encrypted_content"]
    if settings.takes_cache_key:
        body["prompt_cache_key"] = request.conversation or cache_key(messages)
    if messages and messages[0]["role"] == "system":
        body["instructions"] = messages.pop(0)["content"]
    keeps = KeptThoughts(
        stored=(settings.extra_body or {}).get("store") is True, readable=not is_openai(settings)
    )
    body["input"] = to_api_items(messages, keeps)
    if request.tools:
        body["tools"] = [_tool_to_api(tool) for tool in request.tools]
        if request.tool_choice == "none":
            body["tool_choice"] = "none"
    for key in ("temperature", "top_p"):
        if (value := getattr(settings, key)) is not None:
            body[key] = value
    if settings.max_tokens is not None:
        body["max_output_tokens"] = settings.max_tokens
    if settings.reasoning_effort is not None:
        body["reasoning"] = {"effort": settings.reasoning_effort}
    body["stream"] = request.on_delta is not None
    _merge(body, settings.extra_body or {})
    return body


def _tool_to_api(tool: Mapping[str, Any]) -> dict[str, Any]:
    """This API makes schemas strict where nothing is said, and then refuses or rewrites ours."""
    function = tool["function"]
    return {
        "type": "function",
        "name": function["name"],
        "description": function["description"],
        "parameters": function["parameters"],
        "strict": False,
    }


def _merge(body: dict[str, Any], extra: Mapping[str, Any]) -> None:
    """Put the user's own fields in. Who asks there for summaries still means the effort."""
    ours, theirs = body.get("reasoning"), extra.get("reasoning")
    body.update(extra)
    if isinstance(ours, dict) and isinstance(theirs, Mapping):
        body["reasoning"] = {**ours, **theirs}


class KeptThoughts(NamedTuple):
    """Which thoughts without encrypted content an endpoint takes back."""

    stored: bool = False
    """All of them: it stores replies and finds thoughts by their ids."""
    readable: bool = True
    """Those whose text it sent (`content`), as vLLM reads it; OpenAI itself refuses them."""


_OF_ANY_SERVER = KeptThoughts()


def to_api_items(
    messages: Sequence[Message], keeps: KeptThoughts = _OF_ANY_SERVER
) -> list[dict[str, Any]]:
    """The messages as items of this API; the record is not altered."""
    return [item for message in messages for item in _items(message, keeps)]


def _items(message: Message, keeps: KeptThoughts) -> list[dict[str, Any]]:
    match message["role"]:
        case "assistant":
            return _assistant_items(message, keeps)
        case "tool":
            id, output = message["tool_call_id"], message["content"]
            return [{"type": "function_call_output", "call_id": id, "output": output}]
        case role:
            return [{"role": role, "content": message["content"]}]


def _assistant_items(message: Message, keeps: KeptThoughts) -> list[dict[str, Any]]:
    """The items as they came where they came from this API, else the same said in its words.

    Reasoning of another API is left out: it is neither encrypted nor known to the endpoint.
    """
    blocks = message.get("provider_blocks")
    if blocks is not None and blocks["api"] == API:
        kept = _without_lost_thoughts(_without_open_thought(blocks["blocks"]), keeps)
        return [_without_nulls(_without_logprobs(item)) for item in kept]
    items: list[dict[str, Any]] = []
    if message["content"]:
        items.append({"role": "assistant", "content": message["content"]})
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        item = {"type": "function_call", "call_id": call["id"]}
        items.append({**item, "name": name, "arguments": arguments})
    return items


def _without_lost_thoughts(
    items: list[dict[str, Any]], keeps: KeptThoughts
) -> list[dict[str, Any]]:
    """The items without thoughts that the endpoint cannot take back.

    What follows one goes without its id: by the id OpenAI knows that a thought came before it, and
    refuses the item without the thought.
    """
    kept: list[dict[str, Any]] = []
    is_lost = False
    for item in items:
        if item.get("type") == "reasoning":
            if _is_taken_back(item, keeps):
                kept.append(item)
            else:
                is_lost = True
        elif is_lost and "id" in item:
            kept.append({key: item[key] for key in item if key != "id"})
        else:
            kept.append(item)
    return kept


def _is_taken_back(thought: Mapping[str, Any], keeps: KeptThoughts) -> bool:
    if thought.get("encrypted_content") or keeps.stored:
        return True
    return keeps.readable and any(_texts(thought.get("content")))


def _without_nulls(item: dict[str, Any]) -> dict[str, Any]:
    """Self-hosted servers write null for what an item does not have; OpenAI refuses some of it."""
    if None not in item.values():
        return item
    return {key: item[key] for key in item if item[key] is not None}


def _without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    """They describe what was said, and can be many times as long."""
    parts = item.get("content")
    if not isinstance(parts, list) or not any(p.get("logprobs") for p in objects_among(parts)):
        return item
    shown = [
        {key: part[key] for key in part if key != "logprobs"} if isinstance(part, dict) else part
        for part in parts
    ]
    return {**item, "content": shown}


def _without_open_thought(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A reply cut while it reasoned: a thought that leads to nothing is refused."""
    ends = (n for n, item in enumerate(items, 1) if item.get("type") != "reasoning")
    return items[: max(ends, default=0)]


def read_reply(body: bytes) -> Completion:
    """Validate and normalise one reply body.

    Raises `ModelError`: "malformed" where the reply cannot be known to be complete, and what the
    endpoint says itself where it failed.
    """
    _raise_if_failed(body)
    reply = parse_object(body)
    output = reply.get("output")
    if not isinstance(output, list) or not all(isinstance(item, dict) for item in output):
        raise ModelError("malformed", "the reply's output is not a list of items")
    message = read_output(output)
    ending = _why_ended(reply, message)
    finish_reason = ending.reason
    if finish_reason == "stop":
        if any(part.get("type") == "refusal" for item in output for part in _parts(item)):
            finish_reason = "refusal"
        elif "tool_calls" in message:
            finish_reason = "tool_calls"
    raw_usage = usage_of_reply(reply)
    usage = read_usage(raw_usage)
    return Completion(
        message=message,
        finish_reason=finish_reason,
        usage=usage,
        model=text_or_none(reply.get("model")),
        response_id=text_or_none(reply.get("id")),
        cost_usd=reported_cost(reply),
        hour_cache_writes=hour_writes_in(reply, usage),
        unknown_ending=ending.word,
        extra=extra_of(
            reply=unknown_in(reply, _REPLY_FIELDS) | dict(ending.unknown),
            usage=counts_beside(raw_usage, usage, uncounted_in(raw_usage, _USAGE_FIELDS)),
        ),
    )


def conversation_of(reply: Mapping[str, Any]) -> str:
    """The id of the endpoint's conversation that a reply belongs to; "" for none."""
    return text_or_none(object_of(reply, "conversation").get("id")) or ""


def usage_in(reply: Mapping[str, Any]) -> Usage | None:
    """The token counts in a reply's body."""
    return read_usage(usage_of_reply(reply))


def _raise_if_failed(body: bytes) -> None:
    """A reply that failed says why; anything else is left to `parse_object`."""
    try:
        reply = orjson.loads(body)
    except orjson.JSONDecodeError:
        return
    if not isinstance(reply, dict) or reply.get("status") != "failed":
        return
    error = reply.get("error")
    given = error if isinstance(error, dict) else {}
    if not isinstance(given.get("message"), str):
        given = {**given, "message": "the reply failed, and gives no reason"}
    raise error_behind_200({"error": given}, "a reply that failed")


def _why_ended(reply: Mapping[str, Any], message: Message) -> ReplyEnding:
    """What the endpoint says of it; a complete reply may still turn out to end in calls."""
    status = reply.get("status")
    if status == "completed":
        return ReplyEnding("stop", {})
    if status != "incomplete":
        raise ModelError("malformed", f"the reply's status is {status!r}")
    reason = object_of(reply, "incomplete_details").get("reason")
    return read_ending("reason", reason, message)


def read_output(output: list[dict[str, Any]]) -> Message:
    """The message that the items make up, kept verbatim where it alone would say less."""
    texts, thoughts = [], []
    calls: list[ToolCall] = []
    for item in output:
        match item.get("type"):
            case "message":
                said = (part.get("text") or part.get("refusal") for part in _parts(item))
                texts.append("".join(text for text in said if isinstance(text, str)))
            case "reasoning":
                thoughts += _texts(item.get("summary")) + _texts(item.get("content"))
            case "function_call":
                calls.append(_read_call(item))
            case str(kind) if kind.endswith("_call") and "call_id" in item:
                calls.append(_read_other_call(kind, item))
    inline, text = split_inline_reasoning("\n\n".join(filter(None, texts)))
    message = Message(role="assistant", content=text)
    if reasoning := "\n\n".join(dict.fromkeys(filter(None, [*thoughts, inline]))):
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = calls
    kinds = [item.get("type") for item in output]
    if inline is not None or "message" in kinds[1:] or not all(map(_is_plain, output)):
        message["provider_blocks"] = {"api": API, "blocks": output}
    return message


def _parts(item: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parts of a message item, none of any other; some servers send the text itself."""
    content = item.get("content") if item.get("type") == "message" else []
    if isinstance(content, str):
        return [{"type": "output_text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise ModelError("malformed", "the content of the reply's message is not a list of parts")
    return content


def _texts(parts: Any) -> list[str]:
    parts = parts if isinstance(parts, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return [text.strip() for text in texts if isinstance(text, str)]


def _read_call(item: Mapping[str, Any]) -> ToolCall:
    return make_call(item.get("call_id"), item.get("name"), item.get("arguments"))


def _read_other_call(kind: str, item: Mapping[str, Any]) -> ToolCall:
    """The call of a tool that only agents' own requests can offer, such as one with free text."""
    if kind == "custom_tool_call":
        return make_call(item["call_id"], item.get("name"), {"input": item.get("input")})
    given = {k: v for k, v in item.items() if k not in ("type", "id", "status", "call_id")}
    return make_call(item["call_id"], kind.removesuffix("_call"), given)


def _is_plain(item: Mapping[str, Any]) -> bool:
    """Whether a message has nothing to it but one text, and a call nothing but itself."""
    parts = _parts(item)
    return len(parts) <= 1 and all(
        {key for key, value in one.items() if value}
        <= _PLAIN_FIELDS.get(str(one.get("type")), frozenset())
        for one in (item, *parts)
    )


DIALECT = Dialect(
    path="/responses",
    headers=headers_of,
    body=request_body,
    read=read_reply,
    usage=usage_in,
    assembly=ResponsesAssembly,
)
