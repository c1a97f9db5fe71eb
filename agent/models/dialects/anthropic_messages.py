"""The Anthropic messages dialect. As in `openai_chat`, bodies are written here, not by an SDK."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from agent.messages.message import Message, ToolCall, Usage
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
from agent.models.errors import ModelError
from agent.models.model import Completion, ModelSettings, Request, StreamHandler
from agent.models.parsing import (
    RAW_ARGUMENTS,
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

# Streams of the Anthropic messages dialect.
#
# Other servers speak it, too, and some number their blocks differently: all of them 0, a start for
# each token, text for the block of a call. So the content of a part decides to which block it
# belongs, and the index only if several are possible.

_INPUT = "partial_json"
"""The field in which a block holds the text of its input until it is whole."""

_DELTA_BLOCKS: Mapping[str, str] = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "thinking",
    "citations_delta": "text",
}
"""The type of block to which a delta belongs, for deltas of one type of block only."""

_NEEDS_NO_START = frozenset({"text_delta", "thinking_delta"})
"""Deltas that can begin a block, since the start of such a block has no further content."""

_HAVE_NO_INPUT = frozenset({"text", "thinking", "redacted_thinking"})
"""Types of blocks that have no input."""

_KNOWN_DELTAS = frozenset({*_DELTA_BLOCKS, "input_json_delta"})
_DELTA_FIELDS = frozenset({"type", "text", "thinking", "signature", "citation", _INPUT})
_DELTA_EVENT_FIELDS = frozenset({"type", "delta", "usage"})
"""Fields with rules of their own; all other fields are merged as they come."""


class MessagesAssembly:
    """Puts one message together from its events; see `Assembly`."""

    def __init__(self, on_delta: StreamHandler) -> None:
        self._emit = on_delta
        self._message: dict[str, Any] = {}
        self._usage: dict[str, Any] = {}
        self._blocks: list[_Block] = []
        """The blocks in the order in which they began."""
        self._latest: dict[int | None, _Block] = {}
        """The latest block by its index."""
        self._flaw = ""
        """The reason why the message cannot be put together; "" if it can."""
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
                self._begin(_block_index(part), block)
            case {"type": "content_block_delta", "delta": dict(delta)}:
                self._add_delta(_block_index(part), delta)
            case {"type": "content_block_stop"}:
                if (stopped := self._latest.get(_block_index(part))) is not None:
                    self._stop(stopped)
            case {"type": "message_stop"}:
                self._take_head({}, part.get("usage"))
                self.is_over = True
            case {"type": "error"}:  # without a field `error`, which the stream reader looks for
                self._message["error"] = dict(part)
                self.is_over = True
            case {"type": "message", "content": list()}:
                self._take_head(part, part.get("usage"))
                self._take_whole(part)
                self.is_over = True

    def finish(self) -> bytes:
        """See `Assembly.finish`."""
        if self._flaw:
            return to_body(incomplete_body(self._flaw, {**self._message, "usage": self._usage}))
        blocks = self._blocks
        if len(self._latest) == len(blocks) and None not in self._latest:
            blocks = [block for _, block in sorted(self._latest.items(), key=_sort_key)]
        content = [_build(block) for block in blocks]
        return to_body({**self._message, "content": content, "usage": self._usage or None})

    def _take_head(self, fields: Mapping[str, Any], usage: Any) -> None:
        self._message.update({key: value for key, value in fields.items() if value is not None})
        if isinstance(usage, dict):
            update_counts(self._usage, usage)

    def _take_whole(self, message: Mapping[str, Any]) -> None:
        """Add the blocks of a message that comes in one piece."""
        for block in objects_among(message.get("content")):
            self._begin(len(self._blocks), block)
            self._stop(self._blocks[-1])

    def _begin(self, n: int | None, fields: Mapping[str, Any]) -> None:
        """Begin a block, or continue one if a server sends a start for each token."""
        last = self._latest.get(n)
        if last is not None and not last.is_stopped and _continues(last, fields):
            kind = str(fields["type"])
            if kind == "tool_use" and fields.get("input"):
                last.fields["input"] = fields["input"]
            elif text := _text(fields, kind):
                last.append(kind, text)
                self._emit_start(fields)
            return
        self.has_reason = False
        block = self._latest[n] = _Block(fields)
        self._blocks.append(block)
        self._emit_start(fields)

    def _stop(self, block: _Block) -> None:
        if not block.is_stopped and block.fields.get("type") == "tool_use":
            self._emit_call("tool_use_stop", block.fields)
        block.is_stopped = True

    def _emit_start(self, block: Mapping[str, Any]) -> None:
        """Pass on the content of a block's start: mostly nothing, at some servers all of it."""
        if block.get("type") == "tool_use":
            self._emit_call("tool_use_start", block)
            if given := block.get("input"):
                text = given if isinstance(given, str) else json.dumps(given)
                self._emit_input(block, text)
        elif text := _text(block, "thinking"):
            self._emit({"type": "thinking_delta", "text": text})
        elif block.get("type") == "text" and (text := _text(block, "text")):
            self._emit({"type": "text_delta", "text": text})

    def _add_delta(self, n: int | None, delta: Mapping[str, Any]) -> None:
        kind = _text(delta, "type")
        block = self._latest.get(n)
        block_type = _DELTA_BLOCKS.get(kind)
        if block is None or (block_type is not None and block.fields.get("type") != block_type):
            block = self._find_block(n, kind, block_type)
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
                    self._emit({"type": "text_delta", "text": text})
            case "thinking_delta":
                if text := _text(delta, "thinking"):
                    block.append("thinking", text)
                    self._emit({"type": "thinking_delta", "text": text})
            case "input_json_delta":
                given = delta.get(_INPUT)
                # Some servers send the object itself, as in replies that are not streamed.
                text = (
                    _text(delta, _INPUT)
                    if given is None or isinstance(given, str)
                    else json.dumps(given)
                )
                if text:
                    block.append(_INPUT, text)
                    if block.fields.get("type") == "tool_use":
                        self._emit_input(block.fields, text)
            case "signature_delta":
                known, text = _text(block.fields, "signature"), _text(delta, "signature")
                # It comes in one piece, in several, or repeats the start of its block.
                block.fields["signature"] = text if text.startswith(known) else known + text
            case "citations_delta":
                if not isinstance(block.fields.get("citations"), list):
                    block.fields["citations"] = []
                block.fields["citations"].append(delta.get("citation"))
            case _:
                self._add_unknown(block, kind, delta)

    def _add_unknown(self, block: _Block, kind: str, delta: Mapping[str, Any]) -> None:
        """Add a delta of an unknown kind: the field after which it is named comes in pieces."""
        growing_field = kind.removesuffix("_delta")
        for key, value in delta.items():
            if key == growing_field and isinstance(value, str):
                block.append(key, value)
            elif key != "type":
                block.fields[key] = value

    def _find_block(self, n: int | None, kind: str, block_type: str | None) -> _Block | None:
        """Find the block for a delta whose index `n` names no block, or one of another type.

        A text or a thought continues the last block if that has its type and was begun for this
        index; if not, it begins a block. None if there is no block for the delta.
        """
        if block_type is None:
            return None
        last = self._blocks[-1] if self._blocks else None
        if last is not None and last.fields.get("type") == block_type and last.beside == n:
            return last
        if kind not in _NEEDS_NO_START:
            return next(
                (b for b in reversed(self._blocks) if b.fields.get("type") == block_type), None
            )
        block = _Block({"type": block_type, block_type: ""})
        block.beside = n
        self._blocks.append(block)
        self._latest.setdefault(n, block)
        return block

    def _emit_call(
        self, kind: Literal["tool_use_start", "tool_use_stop"], block: Mapping[str, Any]
    ) -> None:
        tool_id, tool_name = str(block.get("id") or ""), str(block.get("name") or "")
        self._emit({"type": kind, "tool_id": tool_id, "tool_name": tool_name})

    def _emit_input(self, block: Mapping[str, Any], text: str) -> None:
        tool_id = str(block.get("id") or "")
        self._emit({"type": "tool_use_delta", "tool_id": tool_id, "tool_input": text})


class _Block(PartialObject):
    """One block as far as it has arrived."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.is_stopped = False
        self.beside: int | None = -1
        """The index of the deltas that began this block without a start; -1: it had a start."""


def _block_index(part: Mapping[str, Any]) -> int | None:
    index = part.get("index")
    return index if isinstance(index, int) else None


def _sort_key(entry: tuple[int | None, _Block]) -> int:
    """The index of a block; all blocks have different ones."""
    return entry[0] or 0


def _continues(block: _Block, start: Mapping[str, Any]) -> bool:
    """Whether a start with the index of an open block only continues that block."""
    kind = block.fields.get("type")
    if kind != start.get("type"):
        return False
    if kind == "tool_use":
        return bool(start.get("id")) and start.get("id") == block.fields.get("id")
    return kind in ("text", "thinking")


def _build(block: PartialObject) -> dict[str, Any]:
    """Build the block as in a whole reply; an input that is not a JSON object stays text."""
    built = block.build()
    text = built.pop(_INPUT, "")
    if text.strip():
        try:
            given = exact_json.loads_with_surrogates(text)
        except ValueError:
            given = text
        built["input"] = given if isinstance(given, dict) else text
    return built


def _text(fields: Mapping[str, Any], key: str) -> str:
    value = fields.get(key)
    return value if isinstance(value, str) else ""


API = "anthropic_messages"

_VERSION = "2026-10-21"
"""The version of the API that version 2 of Anthropic's client uses, with a bearer token."""

_SAMPLING_VERSION = "2023-06-01"
"""The last version that accepts the fields of `_SAMPLING`; its key is in `x-api-key`."""

_SAMPLING = frozenset({"temperature", "top_p", "top_k"})

_BLOCK_FIELDS: Mapping[str, frozenset[str]] = {
    "text": frozenset({"text", "citations"}),
    "thinking": frozenset({"thinking", "signature"}),
    "redacted_thinking": frozenset({"data"}),
    "tool_use": frozenset({"id", "name", "input", "caller"}),
    "tool_result": frozenset({"tool_use_id", "content", "is_error"}),
}
"""The fields of each kind of block.

The API refuses them in any other kind ("Extra inputs are not permitted"). Fields of no kind are
sent back as they came.
"""

_ALL_BLOCK_FIELDS = frozenset().union(*_BLOCK_FIELDS.values())

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
"""Counts that are read; all others are stored as they came."""


def make_headers(settings: ModelSettings, api_key: str) -> dict[str, str]:
    """The headers with the API's version, and with the key in the form of that version."""
    samples = settings.temperature is not None or settings.top_p is not None
    if samples or _SAMPLING.intersection(settings.extra_body or {}):
        return {"x-api-key": api_key, "anthropic-version": _SAMPLING_VERSION}
    return {"Authorization": f"Bearer {api_key}", "anthropic-version": _VERSION}


def request_body(settings: ModelSettings, request: Request) -> dict[str, Any]:
    """The JSON body of one request; the system message has its own field."""
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
"""Types of blocks that can have a cache mark."""


def _mark_cache(body: dict[str, Any]) -> None:
    """Add cache marks to parts that the next request repeats; a mark covers all before it."""
    # The first mark: tools and system message, which all conversations of a run have in common.
    # The API puts the tools first.
    mark = {"cache_control": {"type": "ephemeral"}}
    if (body.get("system") or "").strip():
        body["system"] = [{"type": "text", "text": body["system"], **mark}]
    elif "tools" in body:
        body["tools"][-1].update(mark)
    # The second mark: the last message, so that the next turn reads the history from the cache and
    # does not pay for all of it again. Without tools there is mostly no further turn.
    if "tools" not in body or not body["messages"]:
        return
    last = body["messages"][-1]
    content = last["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    # Blank texts and thoughts cannot be marked.
    if blocks and blocks[-1].get("type") in _MARKED and not _is_blank(blocks[-1]):
        # Blocks of replies belong to the record, so they are copied.
        last["content"] = [*blocks[:-1], {**blocks[-1], **mark}]


def _effort(effort: str | None) -> dict[str, Any]:
    if effort is None:
        return {}
    if effort == "none":
        return {"thinking": {"type": "disabled"}}
    known = "low" if effort == "minimal" else effort
    return {"thinking": {"type": "adaptive"}, "output_config": {"effort": known}}


def to_api_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Convert messages into alternating ones of user and assistant, without the system message.

    Successive messages of one role become one. Empty assistant messages are left out, since the API
    refuses them.
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
    if role == "assistant":  # its blank blocks are gone already
        return blocks
    sent = [block for block in blocks if not _is_blank(block)] or blocks[:1]
    if len(sent) == 1 and sent[0]["type"] == "text":
        text: str = sent[0]["text"]
        return text
    return sent


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
    """The blocks of an assistant message: verbatim if this API wrote them, or else built anew.

    Reasoning of another API is left out, since this API refuses thinking without its signature.
    """
    blocks = message.get("provider_blocks")
    if blocks is not None and blocks["api"] == API:
        sent = (clean for block in blocks["blocks"] for clean in _clean_block(block))
        return [_ensure_object_input(block) for block in sent if not _is_blank(block)]
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


def _clean_block(block: dict[str, Any]) -> list[dict[str, Any]]:
    """Remove null fields and fields of other kinds from a block.

    Some servers put a text into the block of a call; it becomes a block before the call.
    """
    kind = block.get("type")
    allowed = _BLOCK_FIELDS.get(str(kind))
    if allowed is None:
        return [block]
    others = _ALL_BLOCK_FIELDS - allowed
    if others.isdisjoint(block) and None not in block.values():
        return [block]
    kept = {key: block[key] for key in block if key not in others and block[key] is not None}
    if kind == "tool_use":
        kept.setdefault("input", block.get("input"))
        if text := text_or_none(block.get("text")):
            return [{"type": "text", "text": text}, kept]
    return [kept]


def _ensure_object_input(block: dict[str, Any]) -> dict[str, Any]:
    """Replace an input that is no object by one, since the API accepts only objects."""
    # Some servers send other inputs, and a stream cut by the token limit leaves a text.
    if "input" not in block or isinstance(block["input"], dict):
        return block
    given = block["input"]
    text = given if isinstance(given, str) else exact_json.dumps(given).decode()
    return {**block, "input": _input_object(text)}


def _is_blank(block: Mapping[str, Any]) -> bool:
    # The API sends text blocks of white space, but refuses to take them back.
    return block.get("type") == "text" and not str(block.get("text") or "").strip()


def _input_object(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object, which the API demands."""
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

    Raises `ModelError("malformed")` if the reply may be incomplete: a cut reply has no stop reason.
    """
    reply = parse_object(body)
    blocks = reply.get("content")
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise ModelError("malformed", "the reply's content is not a list of blocks")
    message = read_blocks(blocks)
    ending = read_ending("stop_reason", reply, message)
    raw_usage, usage = find_usage(reply), usage_in(reply)
    return Completion(
        message=message,
        finish_reason=ending.reason,
        usage=usage,
        model=text_or_none(reply.get("model")),
        response_id=text_or_none(reply.get("id")),
        cost_usd=reported_cost(reply),
        hour_cache_writes=hour_writes_in(reply, usage),
        unknown_ending=ending.word,
        extra=make_extra(
            reply=unknown_in(reply, _REPLY_FIELDS) | dict(ending.unknown),
            usage=add_plain_counts(raw_usage, usage, uncounted_in(raw_usage, _USAGE_FIELDS)),
        ),
    )


def read_blocks(blocks: Sequence[dict[str, Any]]) -> Message:
    """Build the message from content blocks; it holds them verbatim if they have further data."""
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
    """Whether the blocks are at most one text, then calls, without further fields."""
    plain = ({"type", "text"}, {"type", "id", "name", "input"})
    kinds = [block.get("type") for block in blocks]
    return kinds[1:].count("text") == 0 and all(
        block.keys() <= plain[kind == "tool_use"] and kind in ("text", "tool_use")
        for kind, block in zip(kinds, blocks, strict=True)
    )


def _read_call(block: Mapping[str, Any]) -> ToolCall:
    given = block.get("input")
    # A missing input is recorded as null.
    given = "null" if given is None else given
    return make_call(block.get("id"), block.get("name"), given)


def usage_in(reply: Mapping[str, Any]) -> Usage | None:
    """The token counts in a reply's body."""
    # In this API `input_tokens` excludes cache reads and writes; records include them.
    return read_usage(find_usage(reply), is_fresh=True)


DIALECT = Dialect(
    path="/v1/messages",
    headers=make_headers,
    body=request_body,
    read=read_reply,
    usage=usage_in,
    assembly=MessagesAssembly,
)
