"""The Responses dialect of OpenAI. As in `openai_chat`, bodies are written here, not by an SDK.

Nothing is stored at the endpoint: every request has the whole conversation, with thoughts in
encrypted form. Reasoning models show their thoughts only if `extra_body` asks for {"reasoning":
{"summary": "auto"}}.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import orjson

from agent.messages.message import Message, ToolCall, Usage, split_inline_reasoning
from agent.models.dialects.dialect import (
    Dialect,
    ReplyEnding,
    incomplete_body,
    make_extra,
    read_ending,
    to_body,
    uncounted_in,
    unknown_in,
)
from agent.models.dialects.openai_chat import cache_key, is_openai, make_headers
from agent.models.error_bodies import error_behind_200
from agent.models.errors import ModelError
from agent.models.model import Completion, ModelSettings, Request, StreamHandler
from agent.models.parsing import (
    get_object,
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
from batch_trajectories.basics.exact_json import objects_among

# Streams of the Responses dialect.
#
# The last event of a stream has the whole reply. Some servers leave items out of it. These are
# taken from earlier events, or from their parts if no event had them whole. A stream without a
# last event was cut.

_ENDS = frozenset(
    {
        "response.completed",
        "response.incomplete",
        "response.failed",
        "response.cancelled",
        "response.done",
    }
)
"""Types of events that end a stream; OpenRouter and other relays send `response.done`."""

_STATUSES = frozenset({"completed", "incomplete", "failed"})
"""Statuses of a reply that has ended."""


class ResponsesAssembly:
    """Builds one reply from its events; see `Assembly`."""

    def __init__(self, on_delta: StreamHandler) -> None:
        self._emit = on_delta
        self._reply: dict[str, Any] = {}
        """The reply as the last event has it."""
        self._items: dict[int, _Item] = {}
        """The items of the output by their index."""
        self._places: dict[str, tuple[Any, ...]] = {}
        """The place of the latest text of each kind; another place begins a paragraph."""
        self.has_reason = False
        self.is_over = False

    def add(self, part: Mapping[str, Any]) -> None:
        """See `Assembly.add`."""
        match part:
            case {
                "type": "response.output_text.delta" | "response.refusal.delta" as kind,
                "delta": str(text),
            }:
                item = self._find_item(part, "message")
                item.add(_DELTA_PARTS[kind], part.get("content_index"), text)
                self._emit_text("text_delta", text, part.get("output_index"))
            case {
                "type": "response.reasoning_summary_text.delta"
                | "response.reasoning_text.delta" as kind,
                "delta": str(text),
            }:
                keys = ("output_index", "type", "summary_index", "content_index")
                index = part.get("summary_index", part.get("content_index"))
                self._find_item(part, "reasoning").add(_DELTA_PARTS[kind], index, text)
                self._emit_text("thinking_delta", text, *map(part.get, keys))
            case {"type": "response.function_call_arguments.delta", "delta": str(text)}:
                item = self._find_item(part, "function_call")
                item.add("arguments", None, text)
                self._emit_input(item, text)
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
        reported = self._reply.get("output")
        items = [item for _, item in sorted(self._items.items())]
        if not all(item.has_begun for item in items):
            known = _texts_in([reported, [item.whole for item in items]])
            # Parts for a wrong index are no item if another item repeats their text.
            items = [item for item in items if item.has_begun or not item.is_repeated_in(known)]
        if any(not item.has_begun and item.fields["type"] == "function_call" for item in items):
            return to_body(incomplete_body("arguments for a call that never began", self._reply))
        is_incomplete = not reported or (isinstance(reported, list) and len(reported) < len(items))
        output = [item.build() for item in items] if is_incomplete else reported
        if isinstance(output, list) and self._reply:
            known = _texts_in(output)
            missing = [item for item in items if not item.is_repeated_in(known)]
            if missing and len(output) != len(items):
                return to_body(incomplete_body("its end lacks what its parts said", self._reply))
            if missing:
                output = [
                    item.build_from_parts(whole) if item in missing else whole
                    for item, whole in zip(items, output, strict=True)
                ]
        return to_body({**self._reply, "output": output})

    def _find_item(self, part: Mapping[str, Any], kind: str) -> _Item:
        """Find the item of a part by its index, else the latest of its kind; begin one if none."""
        n = part.get("output_index")
        if not isinstance(n, int):
            latest = [m for m, item in self._items.items() if item.fields.get("type") == kind]
            n = max(latest, default=len(self._items))
        if n not in self._items:
            self._items[n] = _Item({"type": kind})
        return self._items[n]

    def _emit_text(
        self, kind: Literal["text_delta", "thinking_delta"], text: str, *place: Any
    ) -> None:
        # Texts of different places become paragraphs, as in the record.
        if not text:
            return
        between = "\n\n" if self._places.get(kind, place) != place else ""
        self._places[kind] = place
        self._emit({"type": kind, "text": between + text})

    def _begin(self, part: Mapping[str, Any], fields: Mapping[str, Any]) -> _Item:
        n = part.get("output_index")
        n = n if isinstance(n, int) else len(self._items)
        item = self._items.get(n)
        if item is None:
            item = self._items[n] = _Item(fields)
        elif not item.has_begun:
            item.fields = {**item.fields, **fields}
        if not item.has_begun and fields.get("type") == "function_call":
            self._emit({"type": "tool_use_start", "tool_id": item.id, "tool_name": item.name})
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
                self._emit_input(item, arguments)
            self._emit({"type": "tool_use_stop", "tool_id": item.id, "tool_name": item.name})

    def _open_item(self, fields: Mapping[str, Any]) -> int:
        """The index of the item to which an end without an index belongs."""
        kind = fields.get("type")
        open_items = (
            n
            for n, item in self._items.items()
            if item.whole is None and item.fields.get("type") == kind
        )
        return next(open_items, len(self._items))

    def _emit_input(self, item: _Item, text: str) -> None:
        if text and item.has_begun:
            item.is_passed_on = True
            self._emit({"type": "tool_use_delta", "tool_id": item.id, "tool_input": text})


_DELTA_PARTS: Mapping[str, str] = {
    "response.output_text.delta": "output_text",
    "response.refusal.delta": "refusal",
    "response.reasoning_summary_text.delta": "summary_text",
    "response.reasoning_text.delta": "reasoning_text",
}
"""The type of the part of an item to which an event adds text, by the type of the event."""

_LISTS: Mapping[str, str] = {
    "output_text": "content",
    "refusal": "content",
    "summary_text": "summary",
    "reasoning_text": "content",
}
"""The list of an item that holds a part, by the type of the part."""


def _texts_in(value: Any) -> list[str]:
    """All texts in a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [text for one in value for text in _texts_in(one)]
    return [value] if isinstance(value, str) else []


class _Item:
    """One item of the output as far as it has arrived."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = dict(fields)
        self.whole: dict[str, Any] | None = None
        """The whole item, from an event at its end; None before."""
        self.has_begun = False
        self.is_passed_on = False
        """The handler has received the arguments of the call."""
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
        """Append text to the part of this type at `index`, or to the arguments."""
        place = (kind, index if isinstance(index, int) else 0)
        self._texts.setdefault(place, []).append(text)

    def is_repeated_in(self, known: Sequence[str]) -> bool:
        """Whether the `known` texts contain all text of the parts of this item."""
        texts = ["".join(pieces) for pieces in self._texts.values()]
        return all(any(_contains(one, text) for one in known) for text in texts)

    def build_from_parts(self, end: Any) -> Any:
        """Build the item from its parts, if its `end` only leaves out text that they have.

        Otherwise returns `end`: for the API, it is the reply.
        """
        whole = {} if self.whole is None else self.whole
        if self.is_repeated_in(_texts_in(whole)):
            return whole
        built = self._build({**self.fields, **whole, **(end if isinstance(end, dict) else {})})
        known = _texts_in(built)
        is_incomplete = all(any(_contains(one, text) for one in known) for text in _own_texts(end))
        return built if is_incomplete else end

    def build(self) -> dict[str, Any]:
        """Build the item; from its parts if no event had it whole."""
        return self._build(self.fields) if self.whole is None else self.whole

    def _build(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Build the item with these fields, and with the texts of its parts."""
        built = dict(fields)
        for key in {_LISTS[kind] for kind, _ in self._texts if kind in _LISTS}:
            built[key] = [part for part in built.get(key) or () if not _is_text_part(part)]
        for (kind, _), pieces in sorted(self._texts.items(), key=lambda entry: entry[0]):
            if kind == "arguments":
                built["arguments"] = "".join(pieces)
                continue
            key = "refusal" if kind == "refusal" else "text"
            built[_LISTS[kind]].append({"type": kind, key: "".join(pieces)})
        return built


def _is_text_part(part: Any) -> bool:
    """Whether a part of an item is a text; in announced items such parts are empty."""
    return isinstance(part, dict) and part.get("type") in _LISTS


def _own_texts(item: Any) -> list[str]:
    """The texts of an item, or the arguments of its call."""
    if not isinstance(item, dict):
        return []
    parts = [part for key in ("content", "summary") for part in objects_among(item.get(key))]
    texts = [part.get("text") or part.get("refusal") for part in parts]
    return [text for text in (*texts, item.get("arguments")) if isinstance(text, str)]


def _contains(text: str, part: str) -> bool:
    """Whether a text contains another one, apart from white space."""
    # Some servers strip white space, or write arguments again.
    return part in text or "".join(part.split()) in "".join(text.split())


API = "openai_responses"

_DOES_NOT_REASON = re.compile(r"(?:^|/)(?:gpt-3|gpt-4|chatgpt)|-chat")
"""Names of models that refuse requests for encrypted thoughts, since they do not reason."""

_PLAIN_FIELDS: Mapping[str, frozenset[str]] = {
    "message": frozenset({"type", "id", "status", "role", "content"}),
    "function_call": frozenset({"type", "id", "status", "call_id", "name", "arguments"}),
    "output_text": frozenset({"type", "text"}),
}
"""Fields of items and parts that the record has, too, or that are never needed again."""


_REPLY_FIELDS = frozenset(
    {
        "id",
        "object",
        "created_at",
        "completed_at",
        "model",
        "status",
        "output",
        "output_text",
        "usage",
        "error",
        "incomplete_details",
        # What follows repeats the request.
        "background",
        "conversation",
        "include",
        "instructions",
        "max_output_tokens",
        "max_tool_calls",
        "metadata",
        "parallel_tool_calls",
        "previous_response_id",
        "prompt",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning",
        "safety_identifier",
        "store",
        "temperature",
        "text",
        "tool_choice",
        "tools",
        "top_logprobs",
        "top_p",
        "truncation",
        "user",
    }
)
_USAGE_FIELDS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("input_tokens", "output_tokens", "total_tokens", "cost"), ()),
    "input_tokens_details": ("cached_tokens", "cache_write_tokens"),
    "output_tokens_details": ("reasoning_tokens",),
}
"""Fields and counts that are read or known already; all others are stored as they came."""


def request_body(settings: ModelSettings, request: Request) -> dict[str, Any]:
    """The JSON body of one request; the system message has its own field."""
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
    accepted = AcceptedThoughts(
        stored=(settings.extra_body or {}).get("store") is True, readable=not is_openai(settings)
    )
    body["input"] = to_api_items(messages, accepted)
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
    _add_extra(body, settings.extra_body or {})
    return body


def _tool_to_api(tool: Mapping[str, Any]) -> dict[str, Any]:
    # By default this API makes schemas strict, and then refuses or rewrites ours.
    function = tool["function"]
    return {
        "type": "function",
        "name": function["name"],
        "description": function["description"],
        "parameters": function["parameters"],
        "strict": False,
    }


def _add_extra(body: dict[str, Any], extra: Mapping[str, Any]) -> None:
    """Add the fields of `extra_body`; a summary asked for there keeps the effort of the options."""
    ours, theirs = body.get("reasoning"), extra.get("reasoning")
    body.update(extra)
    if isinstance(ours, dict) and isinstance(theirs, Mapping):
        body["reasoning"] = {**ours, **theirs}


class AcceptedThoughts(NamedTuple):
    """The kinds of thoughts without encrypted content that an endpoint accepts in a history."""

    stored: bool = False
    """The endpoint accepts all thoughts: it stores replies and finds thoughts by their ids."""
    readable: bool = True
    """Whether the endpoint accepts thoughts whose text it sent (`content`), as vLLM does."""


_USUALLY_ACCEPTED = AcceptedThoughts()


def to_api_items(
    messages: Sequence[Message], accepted: AcceptedThoughts = _USUALLY_ACCEPTED
) -> list[dict[str, Any]]:
    """Convert messages to items of this API; the record is not altered."""
    return [item for message in messages for item in _items(message, accepted)]


def _items(message: Message, accepted: AcceptedThoughts) -> list[dict[str, Any]]:
    match message["role"]:
        case "assistant":
            return _assistant_items(message, accepted)
        case "tool":
            id, output = message["tool_call_id"], message["content"]
            return [{"type": "function_call_output", "call_id": id, "output": output}]
        case role:
            return [{"role": role, "content": message["content"]}]


def _assistant_items(message: Message, accepted: AcceptedThoughts) -> list[dict[str, Any]]:
    """The items of an assistant message: verbatim if this API wrote them, or else built anew.

    Reasoning of another API is left out: it is neither encrypted nor known to the endpoint.
    """
    blocks = message.get("provider_blocks")
    if blocks is not None and blocks["api"] == API:
        kept = _remove_lost_thoughts(_remove_open_thought(blocks["blocks"]), accepted)
        return [_remove_nulls(_remove_logprobs(item)) for item in kept]
    items: list[dict[str, Any]] = []
    if message["content"]:
        items.append({"role": "assistant", "content": message["content"]})
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        item = {"type": "function_call", "call_id": call["id"]}
        items.append({**item, "name": name, "arguments": arguments})
    return items


def _remove_lost_thoughts(
    items: list[dict[str, Any]], accepted: AcceptedThoughts
) -> list[dict[str, Any]]:
    """Remove thoughts that the endpoint does not accept, and the ids of items after them."""
    # By the id of an item OpenAI knows that a thought preceded it, and refuses the item without it.
    kept: list[dict[str, Any]] = []
    is_lost = False
    for item in items:
        if item.get("type") == "reasoning":
            if _is_accepted(item, accepted):
                kept.append(item)
            else:
                is_lost = True
        elif is_lost and "id" in item:
            kept.append({key: item[key] for key in item if key != "id"})
        else:
            kept.append(item)
    return kept


def _is_accepted(thought: Mapping[str, Any], accepted: AcceptedThoughts) -> bool:
    if thought.get("encrypted_content") or accepted.stored:
        return True
    return accepted.readable and any(_texts(thought.get("content")))


def _remove_nulls(item: dict[str, Any]) -> dict[str, Any]:
    # Self-hosted servers write null for fields that an item does not have; OpenAI refuses some.
    if None not in item.values():
        return item
    return {key: item[key] for key in item if item[key] is not None}


def _remove_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    # Log-probabilities can be many times as long as the text.
    parts = item.get("content")
    if not isinstance(parts, list) or not any(p.get("logprobs") for p in objects_among(parts)):
        return item
    shown = [
        {key: part[key] for key in part if key != "logprobs"} if isinstance(part, dict) else part
        for part in parts
    ]
    return {**item, "content": shown}


def _remove_open_thought(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    # The API refuses a thought at the end, as in a reply that was cut while the model reasoned.
    ends = (n for n, item in enumerate(items, 1) if item.get("type") != "reasoning")
    return items[: max(ends, default=0)]


def read_reply(body: bytes) -> Completion:
    """Validate and normalise one reply body.

    Raises `ModelError`: "malformed" if the reply may be incomplete, or the error that the endpoint
    reports.
    """
    _raise_if_failed(body)
    reply = parse_object(body)
    output = reply.get("output")
    if not isinstance(output, list) or not all(isinstance(item, dict) for item in output):
        raise ModelError("malformed", "the reply's output is not a list of items")
    message = read_output(output)
    ending = _read_ending(reply, message)
    finish_reason = ending.reason
    if finish_reason == "stop":
        if any(part.get("type") == "refusal" for item in output for part in _parts(item)):
            finish_reason = "refusal"
        elif "tool_calls" in message:
            finish_reason = "tool_calls"
    raw_usage = find_usage(reply)
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
        extra=make_extra(
            reply=unknown_in(reply, _REPLY_FIELDS) | dict(ending.unknown),
            usage=add_plain_counts(raw_usage, usage, uncounted_in(raw_usage, _USAGE_FIELDS)),
        ),
    )


def conversation_id_in(reply: Mapping[str, Any]) -> str:
    """The id of the endpoint's conversation that a reply belongs to; "" for none."""
    return text_or_none(get_object(reply, "conversation").get("id")) or ""


def usage_in(reply: Mapping[str, Any]) -> Usage | None:
    """The token counts in a reply's body."""
    return read_usage(find_usage(reply))


def _raise_if_failed(body: bytes) -> None:
    """Raise the error that a failed reply reports; `parse_object` checks all other bodies."""
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


def _read_ending(reply: Mapping[str, Any], message: Message) -> ReplyEnding:
    """Read why a reply ended; a completed one may still turn out to end in calls."""
    status = reply.get("status")
    if status == "completed":
        return ReplyEnding("stop", {})
    if status != "incomplete":
        raise ModelError("malformed", f"the reply's status is {status!r}")
    return read_ending("reason", get_object(reply, "incomplete_details"), message)


def read_output(output: list[dict[str, Any]]) -> Message:
    """Build the message from items; it holds them verbatim if they have further data."""
    texts, thoughts = [], []
    calls: list[ToolCall] = []
    for item in output:
        match item.get("type"):
            case "message":
                parts = (part.get("text") or part.get("refusal") for part in _parts(item))
                texts.append("".join(text for text in parts if isinstance(text, str)))
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
    """The parts of a message item; empty for any other item."""
    content = item.get("content") if item.get("type") == "message" else []
    if isinstance(content, str):  # some servers send the text itself
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
    """Read the call of a tool that only requests of agents can offer, as one with free text."""
    if kind == "custom_tool_call":
        return make_call(item["call_id"], item.get("name"), {"input": item.get("input")})
    given = {k: v for k, v in item.items() if k not in ("type", "id", "status", "call_id")}
    return make_call(item["call_id"], kind.removesuffix("_call"), given)


def _is_plain(item: Mapping[str, Any]) -> bool:
    """Whether a message is only one text, or a call has no further fields."""
    parts = _parts(item)
    return len(parts) <= 1 and all(
        {key for key, value in one.items() if value}
        <= _PLAIN_FIELDS.get(str(one.get("type")), frozenset())
        for one in (item, *parts)
    )


DIALECT = Dialect(
    path="/responses",
    headers=make_headers,
    body=request_body,
    read=read_reply,
    usage=usage_in,
    assembly=ResponsesAssembly,
)
