"""The Anthropic messages dialect. Bodies are ours for the reasons given in `openai_chat`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent.messages.message import Message, ToolCall, Usage
from agent.models.bodies.dialect import Dialect
from agent.models.bodies.endings import read_ending
from agent.models.bodies.unknown_fields import extra_of, uncounted_in, unknown_in
from agent.models.dialects.anthropic_messages_stream import MessagesAssembly
from agent.models.errors import ModelError
from agent.models.model import Completion, ModelSettings, Request
from agent.models.parsing import (
    RAW_ARGUMENTS,
    input_object,
    make_call,
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

API = "anthropic_messages"

_VERSION = "2026-10-21"
"""Of the API; version 2 of Anthropic's own client sends it, and the key as a bearer token."""

_SAMPLING_VERSION = "2023-06-01"
"""The version that still takes what later ones refuse; the client of its time sent `x-api-key`."""

_SAMPLING = frozenset({"temperature", "top_p", "top_k"})

_FIELDS_OF_KINDS: Mapping[str, frozenset[str]] = {
    "text": frozenset({"text", "citations"}),
    "thinking": frozenset({"thinking", "signature"}),
    "redacted_thinking": frozenset({"data"}),
    "tool_use": frozenset({"id", "name", "input", "caller"}),
    "tool_result": frozenset({"tool_use_id", "content", "is_error"}),
}
"""What belongs to one kind of block. The API refuses it in any other ("Extra inputs are not
permitted"); fields that no kind here has are sent back as they came."""

_FIELDS_OF_ANY_KIND = frozenset().union(*_FIELDS_OF_KINDS.values())

_REPLY_FIELDS = frozenset(
    {"id", "type", "role", "model", "content", "stop_reason", "usage", "error"}
)
_USAGE_FIELDS: Mapping[str, Sequence[str]] = {
    "input_tokens": (),
    "output_tokens": (),
    "cost": (),
    "cache_read_input_tokens": (),
    "cache_creation_input_tokens": (),
    "output_tokens_details": ("thinking_tokens",),
}
"""What is read of a reply; all else is kept as it came."""


def headers_of(settings: ModelSettings, api_key: str) -> dict[str, str]:
    """The version of the API that is meant, and the key in the header that goes with it."""
    samples = settings.temperature is not None or settings.top_p is not None
    if samples or _SAMPLING.intersection(settings.extra_body or {}):
        return {"x-api-key": api_key, "anthropic-version": _SAMPLING_VERSION}
    return {"Authorization": f"Bearer {api_key}", "anthropic-version": _VERSION}


def request_body(settings: ModelSettings, request: Request) -> dict[str, Any]:
    """The JSON body of one request; the system message travels beside the others."""
    body: dict[str, Any] = {
        "model": settings.name,
        "max_tokens": settings.reply_bound,
        "messages": to_api_messages(request.messages),
    }
    if request.messages and request.messages[0]["role"] == "system":
        body["system"] = request.messages[0]["content"]
    if request.tools:
        body["tools"] = [_tool_to_api(tool) for tool in request.tools]
        if request.tool_choice == "none":
            body["tool_choice"] = {"type": "none"}
    if settings.prompt_caching:
        _mark_cache(body)
    for key in ("temperature", "top_p"):
        if (value := getattr(settings, key)) is not None:
            body[key] = value
    body.update(_effort(settings.reasoning_effort))
    body["stream"] = request.on_delta is not None
    body.update(settings.extra_body or {})
    return body


_MARKED = frozenset({"text", "tool_use", "tool_result"})
"""Types of blocks, of those that are sent from here, that can have a cache mark."""


def _mark_cache(body: dict[str, Any]) -> None:
    """Mark what the next request repeats. A mark keeps all before it.

    The API puts the tools before the system message, which all conversations of a run have in
    common. The last message has the second mark if there are tools, so that each turn reads what
    the one before wrote: otherwise the whole history is paid for in full each turn. Without tools
    there is mostly no further turn. Blank texts and thoughts cannot be marked.
    """
    mark = {"cache_control": {"type": "ephemeral"}}
    if (body.get("system") or "").strip():
        body["system"] = [{"type": "text", "text": body["system"], **mark}]
    elif "tools" in body:
        body["tools"][-1].update(mark)
    if "tools" not in body or not body["messages"]:
        return
    last = body["messages"][-1]
    content = last["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if blocks and blocks[-1].get("type") in _MARKED and not _is_blank(blocks[-1]):
        # The blocks of replies are those of the record: they are not to change.
        last["content"] = [*blocks[:-1], {**blocks[-1], **mark}]


def _effort(effort: str | None) -> dict[str, Any]:
    if effort is None:
        return {}
    if effort == "none":
        return {"thinking": {"type": "disabled"}}
    known = "low" if effort == "minimal" else effort
    return {"thinking": {"type": "adaptive"}, "output_config": {"effort": known}}


def to_api_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """User and assistant messages in turns; what one role says in a row becomes one message.

    An assistant message with nothing in it is left out: it would be refused.
    """
    turns: list[tuple[str, list[dict[str, Any]]]] = []
    for message in messages:
        if message["role"] == "system":
            continue
        role = "assistant" if message["role"] == "assistant" else "user"
        blocks = _assistant_blocks(message) if role == "assistant" else [_user_block(message)]
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)
        elif blocks:
            turns.append((role, blocks))
    return [{"role": role, "content": _content(role, blocks)} for role, blocks in turns]


def _content(role: str, blocks: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    if role == "assistant":  # its blank ones are gone already
        return blocks
    said = [block for block in blocks if not _is_blank(block)] or blocks[:1]
    if len(said) == 1 and said[0]["type"] == "text":
        text: str = said[0]["text"]
        return text
    return said


def _user_block(message: Message) -> dict[str, Any]:
    if message["role"] == "user":
        return {"type": "text", "text": message["content"]}
    return {
        "type": "tool_result",
        "tool_use_id": message["tool_call_id"],
        "content": message["content"],
        "is_error": message["is_error"],
    }


def _assistant_blocks(message: Message) -> list[dict[str, Any]]:
    """The blocks as they came where they came from this API, else the same said in its words.

    Reasoning of another API is left out: thinking without its signature is refused.
    """
    blocks = message.get("provider_blocks")
    if blocks is not None and blocks["api"] == API:
        sent = (own for block in blocks["blocks"] for own in _own_blocks(block))
        return [_with_object(block) for block in sent if not _is_blank(block)]
    built: list[dict[str, Any]] = []
    if message["content"].strip():
        built.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        built.append(
            {
                "type": "tool_use",
                "id": call["id"],
                "name": call["function"]["name"],
                "input": _input_object(call["function"]["arguments"]),
            }
        )
    return built


def _own_blocks(block: dict[str, Any]) -> list[dict[str, Any]]:
    """A block with its own fields only; the text within a call is a block before it.

    Some servers put what they say after a call into the block of the call, and null for all that a
    block does not have.
    """
    kind = block.get("type")
    own = _FIELDS_OF_KINDS.get(str(kind))
    if own is None:
        return [block]
    others = _FIELDS_OF_ANY_KIND - own
    if others.isdisjoint(block) and None not in block.values():
        return [block]
    kept = {key: block[key] for key in block if key not in others and block[key] is not None}
    if kind == "tool_use":
        kept.setdefault("input", block.get("input"))
        if text := text_or_none(block.get("text")):
            return [{"type": "text", "text": text}, kept]
    return [kept]


def _with_object(block: dict[str, Any]) -> dict[str, Any]:
    """Only objects are accepted as inputs, though some servers send others.

    A stream that the token limit cut leaves one that is text.
    """
    if "input" not in block or isinstance(block["input"], dict):
        return block
    given = block["input"]
    text = given if isinstance(given, str) else exact_json.dumps(given).decode()
    return {**block, "input": _input_object(text)}


def _is_blank(block: Mapping[str, Any]) -> bool:
    """The API gives text blocks of white space and refuses to take them back."""
    return block.get("type") == "text" and not str(block.get("text") or "").strip()


def _input_object(arguments: str) -> dict[str, Any]:
    """This API takes objects only."""
    parsed = input_object(arguments)
    return {RAW_ARGUMENTS: arguments} if parsed is None else parsed


def _tool_to_api(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    return {
        "name": function["name"],
        "description": function["description"],
        "input_schema": function["parameters"],
    }


def read_reply(body: bytes) -> Completion:
    """Validate and normalise one reply body.

    Raises `ModelError("malformed")` where the reply cannot be known to be complete; a missing
    stop reason is how a cut reply looks.
    """
    reply = parse_object(body)
    blocks = reply.get("content")
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise ModelError("malformed", "the reply's content is not a list of blocks")
    message = read_blocks(blocks)
    ending = read_ending("stop_reason", reply.get("stop_reason"), message)
    raw_usage, usage = usage_of_reply(reply), usage_in(reply)
    return Completion(
        message=message,
        finish_reason=ending.reason,
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


def read_blocks(blocks: Sequence[dict[str, Any]]) -> Message:
    """The message that content blocks make up, kept verbatim where it alone would say less."""
    texts, thoughts = [], []
    calls: list[ToolCall] = []
    for block in blocks:
        match block.get("type"):
            case "text":
                texts.append(str(block.get("text") or ""))
            case "thinking":
                thoughts.append(str(block.get("thinking") or "").strip())
            case "tool_use":
                texts.append(text_or_none(block.get("text")) or "")
                if thought := text_or_none(block.get("thinking")):
                    thoughts.append(thought.strip())
                calls.append(_read_call(block))
    message = Message(role="assistant", content="".join(texts))
    if reasoning := "\n\n".join(filter(None, thoughts)):
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = calls
    if not _is_plain(blocks):
        message["provider_blocks"] = {"api": API, "blocks": list(blocks)}
    return message


def _is_plain(blocks: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the blocks are one text at most, then calls, with nothing else to them."""
    plain = ({"type", "text"}, {"type", "id", "name", "input"})
    kinds = [block.get("type") for block in blocks]
    return kinds[1:].count("text") == 0 and all(
        block.keys() <= plain[kind == "tool_use"] and kind in ("text", "tool_use")
        for kind, block in zip(kinds, blocks, strict=True)
    )


def _read_call(block: Mapping[str, Any]) -> ToolCall:
    given = block.get("input")
    # A missing input is recorded as null, as the API has it.
    given = "null" if given is None else given
    return make_call(block.get("id"), block.get("name"), given)


def usage_in(reply: Mapping[str, Any]) -> Usage | None:
    """The token counts in a reply's body.

    Here `input_tokens` excludes what went through the cache; the record's includes it.
    """
    return read_usage(usage_of_reply(reply), is_fresh=True)


DIALECT = Dialect(
    path="/v1/messages",
    headers=headers_of,
    body=request_body,
    read=read_reply,
    usage=usage_in,
    assembly=MessagesAssembly,
)
