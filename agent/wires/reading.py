"""Reading the body of a request, without reading again what an earlier request had."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from agent.messages.message import EARLIER, Message, Role, ToolCall
from agent.wires.wire import (
    NOTHING_VOLATILE,
    Earlier,
    Offer,
    Part,
    Volatile,
    WireError,
    WireRequest,
)
from batch_trajectories.basics import exact_json

# Digests of messages and requests, without what changes from start to start.
#
# The digest of a message covers its role, its text, its calls (names and parsed arguments) and,
# for a result, which call of the conversation it answers. It does not cover ids, reasoning,
# signatures or marks for the cache: agents make new ids, drop thoughts, write arguments again,
# and move the marks. Results that follow one reply have their digests in the order of its calls:
# agents put results in the order in which they came, which is another one when recorded replies
# are given again.

_SIZE = 16
_NEVER = frozenset({"cache_control"})
"""Keys that never decide a reply, wherever they are."""


def digest_of(value: Any) -> bytes:
    """The digest of a JSON value; the order of keys does not matter."""
    return digest_of_bytes(exact_json.dumps(value, option=orjson.OPT_SORT_KEYS))


def digest_of_bytes(written: bytes) -> bytes:
    """The digest of bytes."""
    return blake2b(written, digest_size=_SIZE).digest()


class CallsInOrder:
    """The tool calls of a conversation in order, by their ids; a later call can repeat an id."""

    def __init__(self, earlier: Sequence[Part] = ()) -> None:
        """`earlier` are the parts that come first, whose calls are only looked up if needed."""
        self._earlier = earlier
        self._known: dict[str, tuple[int, str]] = {}
        self._latest: Sequence[ToolCall] = ()
        self.count = earlier[-1].first_call + len(earlier[-1].calls) if earlier else 0
        """How many there are."""

    def add(self, calls: Iterable[ToolCall]) -> None:
        """Take the calls of the next message."""
        calls = [*calls]
        self._latest = calls or self._latest
        for call in calls:
            self._known[call["id"]] = self.count, call["function"]["name"]
            self.count += 1

    def rank(self, id: str) -> int | None:
        """Which call of the conversation the id means, from 0."""
        call = self._find(id)
        return None if call is None else call[0]

    def name(self, id: str) -> str:
        """The tool that the call is for; "" if there is no such call."""
        call = self._find(id)
        return "" if call is None else call[1]

    def latest(self) -> Sequence[ToolCall]:
        """The calls of the last message that has any."""
        earlier = (part.calls for part in reversed(self._earlier) if part.calls)
        return self._latest or next(earlier, ())

    def _find(self, id: str) -> tuple[int, str] | None:
        if id in self._known:
            return self._known[id]
        for part in reversed(self._earlier):
            for n, call in enumerate(reversed(part.calls), 1):
                if call["id"] == id:
                    return part.first_call + len(part.calls) - n, call["function"]["name"]
        return None


def message_digest(message: Message, calls: CallsInOrder, volatile: Volatile) -> bytes:
    """The digest of a message that follows `calls`."""
    form: list[Any] = [message["role"], cut(message["content"], volatile.texts).strip()]
    if made := message.get("tool_calls"):
        form += [
            [call["function"]["name"], _arguments(call["function"]["arguments"])] for call in made
        ]
    elif message["role"] == "tool":
        form += [calls.rank(message["tool_call_id"]), message.get("is_error", False)]
    return digest_of(form)


def runs_of_results(messages: Sequence[Message], first: int = 0) -> Iterator[tuple[int, list[int]]]:
    """The results after one reply, where there are several, from position `first` on.

    Each is the position of the first of them, and for each which call of the reply it answers. Runs
    with results of other calls, or with two of one call, are left out.
    """
    start = first
    while start < len(messages):
        end = start
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        if end - start > 1 and start > 0:
            made = [call["id"] for call in messages[start - 1].get("tool_calls", ())]
            answered = [message["tool_call_id"] for message in messages[start:end]]
            if {*answered} <= {*made} and len({*answered}) == len(answered):
                yield start, [made.index(id) for id in answered]
        start = end + 1


def in_order_of_calls(
    messages: Sequence[Message], digests: Sequence[bytes], first: int = 0
) -> list[bytes]:
    """The digests of the messages from `first` on, with those of results in the order of calls.

    `digests` are those of all the messages, in the order of the messages.
    """
    ordered = list(digests[first:])
    for start, answered in runs_of_results(messages, first):
        pairs = sorted(zip(answered, digests[start : start + len(answered)], strict=True))
        ordered[start - first : start - first + len(pairs)] = [digest for _, digest in pairs]
    return ordered


def _arguments(arguments: str) -> Any:
    """What the arguments say; agents write an empty text as an empty object."""
    try:
        parsed = exact_json.loads(arguments.strip() or "{}")
        exact_json.dumps(parsed)  # refuses a nesting that reading takes
    except (exact_json.JSONDecodeError, TypeError):
        return arguments.strip()
    return parsed


def cut(text: str, patterns: tuple[str, ...]) -> str:
    """The text without what the patterns match."""
    for pattern in _compiled(patterns):
        text = pattern.sub("", text)
    return text


@lru_cache(maxsize=64)
def _compiled(patterns: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern) for pattern in patterns)


def head_of(
    body: Mapping[str, Any], read_elsewhere: frozenset[str], fields: Sequence[str]
) -> dict[str, Any]:
    """The body's other fields that decide the reply: without the volatile `fields`, and marks."""
    head = {key: value for key, value in body.items() if key not in read_elsewhere}
    for path in fields:
        head = _without(head, path.split("."))
    kept: dict[str, Any] = without_marks(head)
    return kept


def without_marks(value: Any) -> Any:
    """The value without the keys that never decide a reply, such as `cache_control`."""
    if isinstance(value, dict):
        return {key: without_marks(inner) for key, inner in value.items() if key not in _NEVER}
    if isinstance(value, list):
        return [without_marks(inner) for inner in value]
    return value


def _without(value: Any, path: Sequence[str]) -> Any:
    """A copy of the value without what the path names."""
    name, rest = path[0], path[1:]
    if isinstance(value, dict):
        if name != "*" and name not in value:
            return value
        named = value if name == "*" else {name}
        members = {key: inner for key, inner in value.items() if key not in named}
        return members | {key: _without(value[key], rest) for key in named} if rest else members
    if isinstance(value, list) and name == "*":
        return [_without(inner, rest) for inner in value] if rest else []
    return value


Schemas = list[dict[str, Any]] | str
"""A tool's schemas in OpenAI form, or the name of a tool that the provider would run."""


class Layout(NamedTuple):
    """Where an API keeps each part of a request."""

    api: str
    read_part: Callable[[Any, CallsInOrder], list[Message]]
    """Reads a piece of the messages, which follows these calls. Raises `WireError`."""
    read_tool: Callable[[Mapping[str, Any]], Schemas]
    read_elsewhere: frozenset[str]
    """Fields of the body that are read elsewhere, or do not affect the reply."""
    messages: str
    """The field with the messages, for errors."""
    has_instructions: bool = False
    """Its system prompt is for one call."""


class Asked(NamedTuple):
    """What a request asks for, as its API has it."""

    model: Any
    system: Any
    """The system prompt that is not among the messages, if there is one."""
    messages: list[Any]
    tools: Any
    is_stream: bool
    max_tokens: Any
    follows: str = ""
    """The id of what it continues; see `WireRequest.follows`."""


def read_request(
    layout: Layout,
    body: Mapping[str, Any],
    wanted: Asked,
    volatile: Volatile,
    before: Sequence[WireRequest],
    earlier: Earlier,
) -> WireRequest:
    """The request with this body; a system prompt is the piece before its messages.

    What it continues by an id comes between them. Where that is unknown, the piece says so.
    """
    model, tools, max_tokens = wanted.model, wanted.tools, wanted.max_tokens
    if not isinstance(model, str) or not model:
        raise WireError("model: it must be the name of a model")
    first = int(bool(wanted.system))
    pieces = [("system", wanted.system), *wanted.messages] if first else wanted.messages
    if wanted.follows:
        known = earlier(wanted.follows) or (EARLIER, wanted.follows)
        pieces = [*pieces[:first], known, *wanted.messages]
        first += 1
    before = [request for request in before if request.api == layout.api]
    parts = _read_parts(layout, pieces, first, volatile, before)
    offer = next((known.offer for known in before if known.offer.raw == tools), None)
    if offer is None:
        offer = _read_offer(layout, tools)
    messages, digests = _joined(parts)
    _check_depth({key: body[key] for key in body.keys() - layout.read_elsewhere})
    head = digest_of(head_of(body, layout.read_elsewhere, volatile.fields))
    decides = (digest_of([layout.api, model]), head, offer.digest, *digests)
    return WireRequest(
        api=layout.api,
        model=model,
        messages=messages,
        tools=offer.tools,
        is_stream=wanted.is_stream,
        max_tokens=max_tokens if type(max_tokens) is int else None,
        key=digest_of_bytes(b"".join(decides)).hex(),
        server_tools=offer.server_tools,
        digests=digests,
        parts=parts,
        pieces=pieces,
        offer=offer,
        follows=wanted.follows,
        is_instructed=layout.has_instructions and bool(wanted.system),
    )


def unknown_earlier(api: str, id: str) -> Message:
    """Stands for messages that a call continues by an id, and that its model did not see or nobody
    knows."""
    message = Message(role="system", content=f"[earlier response {id}: unknown]")
    message["provider_blocks"] = {"api": api, "blocks": [{"type": EARLIER, "id": id}]}
    return message


def without_earlier(request: WireRequest) -> WireRequest:
    """The request, if the endpoint did not read what it continues: a message says so."""
    known = (n for n, piece in enumerate(request.pieces, 1) if isinstance(piece, Part))
    if not (place := next(known, 0)):
        return request
    before = request.parts[:place]
    message = unknown_earlier(request.api, request.follows)
    digest = message_digest(message, CallsInOrder(before), NOTHING_VOLATILE)
    part = Part(
        raw=(EARLIER, request.follows),
        messages=[message],
        digests=[digest],
        calls=[],
        first_call=CallsInOrder(before).count,
    )
    parts = [*before, part, *request.parts[place:]]
    messages, digests = _joined(parts)
    return replace(
        request,
        messages=messages,
        digests=digests,
        parts=parts,
        pieces=[*request.pieces[:place], part.raw, *request.pieces[place:]],
    )


def objects_in(value: Any, place: str) -> list[dict[str, Any]]:
    """A list of objects; raises `WireError` if it is something else."""
    if not isinstance(value, list) or not set(map(type, value)) <= {dict}:
        raise WireError(f"{place}: it must be a list of objects")
    return value


def function_tool(name: str, description: Any, parameters: Any) -> dict[str, Any]:
    """The schema of a tool in OpenAI form; without a schema of its arguments it takes none."""
    if not isinstance(parameters, dict) or not parameters:
        parameters = {"type": "object", "properties": {}}
    function = {"name": name, "description": str(description or ""), "parameters": parameters}
    return {"type": "function", "function": function}


def custom_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool whose input is free text: one argument, `input`."""
    given = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return function_tool(str(tool.get("name") or ""), tool.get("description"), given)


def placeholder(part: Mapping[str, Any]) -> str:
    """The text that stands for an image or an unknown part in a message."""
    written = exact_json.dumps(without_marks(part), option=orjson.OPT_SORT_KEYS)
    kind = part.get("type") or next(iter(part), "part")
    return f"[{kind}: {len(written)} bytes, digest {digest_of_bytes(written).hex()}]"


def message_of(
    api: str,
    role: Role,
    content: Any,
    show: Callable[[Mapping[str, Any]], str] = placeholder,
) -> Message:
    """A message with this content: a text, or parts, which `show` writes where they are not text.

    These are whole in `provider_blocks`. Raises `WireError`.
    """
    if isinstance(content, str):
        return Message(role=role, content=content)
    parts = objects_in(content, "content")
    others = [part for part in parts if not isinstance(part.get("text"), str)]
    texts = [part["text"] if isinstance(part.get("text"), str) else show(part) for part in parts]
    message = Message(role=role, content="\n".join(texts))
    if others:
        message["provider_blocks"] = {"api": api, "blocks": others}
    return message


def results_and_said(
    api: str,
    parts: Iterable[dict[str, Any]],
    read_result: Callable[[dict[str, Any], int], Message | None],
) -> list[Message]:
    """The results among the parts of a user's message, and what is said between and after them.

    `read_result` gets a part and how many results precede it; it returns None for other parts.
    """
    messages: list[Message] = []
    said: list[dict[str, Any]] = []
    results = 0
    for part in parts:
        result = read_result(part, results)
        if result is None:
            said.append(part)
            continue
        if said:
            messages.append(message_of(api, "user", said))
            said = []
        messages.append(result)
        results += 1
    if said or not messages:
        messages.append(message_of(api, "user", said))
    return messages


def path_of(path: str) -> str:
    """The path of a request without its query and trailing slash."""
    return path.partition("?")[0].rstrip("/")


def _joined(parts: Sequence[Part]) -> tuple[list[Message], list[bytes]]:
    messages = [message for part in parts for message in part.messages]
    digests = [digest for part in parts for digest in part.digests]
    return messages, in_order_of_calls(messages, digests)


def _read_offer(layout: Layout, tools: Any) -> Offer:
    schemas, by_provider = [], []
    _check_depth(tools)
    for tool in objects_in(tools or [], "tools"):
        read = layout.read_tool(tool)
        if isinstance(read, str):
            by_provider.append(read)
        else:
            schemas += read
    return Offer(tools, schemas, tuple(by_provider), digest_of(without_marks(tools)))


def _read_parts(
    layout: Layout,
    pieces: list[Any],
    first: int,
    volatile: Volatile,
    before: Sequence[WireRequest],
) -> list[Part]:
    """The parts, those of the earlier request taken over that the pieces repeat most of."""
    known, same = _most_alike(pieces, before)
    parts = list(known[:same])
    calls = CallsInOrder(known[:same])
    is_alike = True  # all calls so far have the ids that they had
    for n in range(same, len(pieces)):
        old = known[n] if is_alike and n < len(known) else None
        if isinstance(pieces[n], Part):
            part, is_alike = pieces[n], False
            calls.add(part.calls)
        elif old is not None and old.raw == pieces[n]:
            part = old
            calls.add(part.calls)
        else:
            try:
                part = _read_part(layout, pieces[n], calls, volatile)
            except WireError as error:
                raise WireError(
                    f"{layout.messages}[{n - first}]: {error}" if n >= first else str(error)
                ) from error
            is_alike = old is not None and _ids(old) == _ids(part)
        parts.append(part)
    return parts


def _most_alike(pieces: list[Any], before: Sequence[WireRequest]) -> tuple[Sequence[Part], int]:
    """The parts of the earlier request that the pieces repeat most of, and how many they repeat."""
    best: tuple[Sequence[Part], int] = ((), 0)
    for request in before:
        same = _repeated(pieces, request.pieces)
        if same > best[1]:
            best = (request.parts, same)
    return best


def _repeated(pieces: list[Any], earlier: list[Any]) -> int:
    """How many leading pieces an earlier request also had: mostly all, or all but the last."""
    limit = min(len(pieces), len(earlier))
    for same in (limit, limit - 1):
        if same > 0 and pieces[:same] == earlier[:same]:
            return same
    pairs = enumerate(zip(pieces, earlier, strict=False))
    return next((n for n, (piece, old) in pairs if piece != old), limit)


def _read_part(layout: Layout, piece: Any, calls: CallsInOrder, volatile: Volatile) -> Part:
    _check_depth(piece)
    messages = layout.read_part(piece, calls)
    digests, made, first_call = [], [], calls.count
    for message in messages:
        digests.append(message_digest(message, calls, volatile))
        if of_message := message.get("tool_calls"):
            calls.add(of_message)
            made += of_message
    return Part(raw=piece, messages=messages, digests=digests, calls=made, first_call=first_call)


def _check_depth(value: Any) -> None:
    """Refuse values that are nested too deeply to be recorded."""
    try:
        is_too_deep = exact_json.is_nested_too_deep(exact_json.dumps(value))
    except TypeError:
        is_too_deep = True
    if is_too_deep:
        raise WireError(f"it is nested deeper than {exact_json.MAX_NESTING} levels")


def _ids(part: Part) -> list[str]:
    return [call["id"] for call in part.calls]
