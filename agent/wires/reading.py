"""Reads the body of a request, and reuses the parts that an earlier request has in common."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from agent.messages.message import EARLIER_RESPONSE, Message, Role, ToolCall
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

# Digests of messages and requests, without the values that change from start to start.
#
# The digest of a message covers its role, its text, its calls (names and parsed arguments) and,
# for a result, the number of the call that it answers. It does not cover ids, reasoning,
# signatures or marks for the cache: agents make new ids, drop reasoning, write arguments anew,
# and move the marks. The digests of the results that follow one reply are in the order of its
# calls: agents send results in the order in which they came, which differs if recorded replies are
# given again.

_DIGEST_BYTES = 16
_MARKS = frozenset({"cache_control"})
"""Keys that never decide a reply, at any place of a body."""


def digest_json(value: Any) -> bytes:
    """Return the digest of a JSON value; the order of keys does not matter."""
    return digest_of_bytes(exact_json.dumps(value, option=orjson.OPT_SORT_KEYS))


def digest_of_bytes(written: bytes) -> bytes:
    return blake2b(written, digest_size=_DIGEST_BYTES).digest()


class CallsInOrder:
    """The tool calls of a conversation in order, by id. A later call can repeat an id."""

    def __init__(self, earlier: Sequence[Part] = ()) -> None:
        """`earlier` are the first parts of the conversation."""
        self._earlier = earlier
        self._known: dict[str, tuple[int, str]] = {}
        self._latest: Sequence[ToolCall] = ()
        self.count = earlier[-1].first_call + len(earlier[-1].calls) if earlier else 0
        """The number of calls so far."""

    def add(self, calls: Iterable[ToolCall]) -> None:
        """Add the calls of the next message."""
        calls = [*calls]
        self._latest = calls or self._latest
        for call in calls:
            self._known[call["id"]] = self.count, call["function"]["name"]
            self.count += 1

    def rank(self, id: str) -> int | None:
        """The number of the call with this id, from 0; None if there is no such call."""
        call = self._find(id)
        return None if call is None else call[0]

    def name(self, id: str) -> str:
        """The name of the tool that the call is for; "" if there is no such call."""
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
    """Return the digest of a message that follows `calls`."""
    form: list[Any] = [message["role"], remove_matches(message["content"], volatile.texts).strip()]
    if made := message.get("tool_calls"):
        form += [
            [call["function"]["name"], _parse_arguments(call["function"]["arguments"])]
            for call in made
        ]
    elif message["role"] == "tool":
        form += [calls.rank(message["tool_call_id"]), message.get("is_error", False)]
    return digest_json(form)


def runs_of_results(messages: Sequence[Message], first: int = 0) -> Iterator[tuple[int, list[int]]]:
    """Find each run of several results after one reply, from position `first` on.

    Yields the position of its first result, and for each result the number of the reply's call that
    it answers. Runs with results of other calls, or with two of one call, are left out.
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


def order_by_calls(
    messages: Sequence[Message], digests: Sequence[bytes], first: int = 0
) -> list[bytes]:
    """Return the digests of the messages from `first` on, those of results in the order of calls.

    `digests` has one per message, in the order of the messages.
    """
    ordered = list(digests[first:])
    for start, answered in runs_of_results(messages, first):
        pairs = sorted(zip(answered, digests[start : start + len(answered)], strict=True))
        ordered[start - first : start - first + len(pairs)] = [digest for _, digest in pairs]
    return ordered


def _parse_arguments(arguments: str) -> Any:
    """Parse the arguments of a call; return them as text if they are not JSON."""
    try:
        parsed = exact_json.loads(arguments.strip() or "{}")  # agents write "" as {}
        exact_json.dumps(parsed)  # refuses deep nesting that `loads` accepts
    except (exact_json.JSONDecodeError, TypeError):
        return arguments.strip()
    return parsed


def remove_matches(text: str, patterns: tuple[str, ...]) -> str:
    """Remove the matches of the patterns from a text."""
    for pattern in _compile_patterns(patterns):
        text = pattern.sub("", text)
    return text


@lru_cache(maxsize=64)
def _compile_patterns(patterns: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern) for pattern in patterns)


def deciding_fields(
    body: Mapping[str, Any], read_elsewhere: frozenset[str], fields: Sequence[str]
) -> dict[str, Any]:
    """Return the fields of the body that decide the reply, without those that are `read_elsewhere`.

    The volatile `fields` and marks for the cache are left out.
    """
    head = {key: value for key, value in body.items() if key not in read_elsewhere}
    for path in fields:
        head = _remove_path(head, path.split("."))
    kept: dict[str, Any] = remove_marks(head)
    return kept


def remove_marks(value: Any) -> Any:
    """Return the value without the keys that never decide a reply, such as `cache_control`."""
    if isinstance(value, dict):
        return {key: remove_marks(inner) for key, inner in value.items() if key not in _MARKS}
    if isinstance(value, list):
        return [remove_marks(inner) for inner in value]
    return value


def _remove_path(value: Any, path: Sequence[str]) -> Any:
    """Return a copy of the value without the fields that the path names."""
    name, rest = path[0], path[1:]
    if isinstance(value, dict):
        if name != "*" and name not in value:
            return value
        named = value if name == "*" else {name}
        members = {key: inner for key, inner in value.items() if key not in named}
        return members | {key: _remove_path(value[key], rest) for key in named} if rest else members
    if isinstance(value, list) and name == "*":
        return [_remove_path(inner, rest) for inner in value] if rest else []
    return value


Schemas = list[dict[str, Any]] | str
"""A tool's schemas in OpenAI form, or the name of a tool that the provider would run."""


class Layout(NamedTuple):
    """The form of an API's requests, and the functions that read their parts."""

    api: str
    read_part: Callable[[Any, CallsInOrder], list[Message]]
    """Reads a piece of the messages that follows these calls. Raises `WireError`."""
    read_tool: Callable[[Mapping[str, Any]], Schemas]
    read_elsewhere: frozenset[str]
    """The fields of the body that are read elsewhere, or do not affect the reply."""
    messages: str
    """The name of the field with the messages, for errors."""
    has_instructions: bool = False
    """Whether the system prompt is for one call only."""


class CallFields(NamedTuple):
    """The fields of a request, in the form of its API."""

    model: Any
    system: Any
    """The system prompt that is not among the messages, if there is one."""
    messages: list[Any]
    tools: Any
    is_stream: bool
    max_tokens: Any
    follows: str = ""
    """The id of the reply or conversation that it continues; see `WireRequest.follows`."""


def read_request(
    layout: Layout,
    body: Mapping[str, Any],
    fields: CallFields,
    volatile: Volatile,
    before: Sequence[WireRequest],
    earlier: Earlier,
) -> WireRequest:
    """Read a request from its body and its `fields`. Raises `WireError`.

    Its pieces are the system prompt, the messages that it continues by an id, and its messages. If
    the id is unknown, a message says so.
    """
    model, tools, max_tokens = fields.model, fields.tools, fields.max_tokens
    if not isinstance(model, str) or not model:
        raise WireError("model: it must be the name of a model")
    first = int(bool(fields.system))
    pieces = [("system", fields.system), *fields.messages] if first else fields.messages
    if fields.follows:
        known = earlier(fields.follows) or (EARLIER_RESPONSE, fields.follows)
        pieces = [*pieces[:first], known, *fields.messages]
        first += 1
    before = [request for request in before if request.api == layout.api]
    parts = _read_parts(layout, pieces, first, volatile, before)
    offer = next((known.offer for known in before if known.offer.raw == tools), None)
    if offer is None:
        offer = _read_offer(layout, tools)
    messages, digests = _join(parts)
    _check_depth({key: body[key] for key in body.keys() - layout.read_elsewhere})
    head = digest_json(deciding_fields(body, layout.read_elsewhere, volatile.fields))
    decides = (digest_json([layout.api, model]), head, offer.digest, *digests)
    return WireRequest(
        api=layout.api,
        model=model,
        messages=messages,
        tools=offer.tools,
        is_stream=fields.is_stream,
        max_tokens=max_tokens if type(max_tokens) is int else None,
        key=digest_of_bytes(b"".join(decides)).hex(),
        server_tools=offer.server_tools,
        digests=digests,
        parts=parts,
        pieces=pieces,
        offer=offer,
        follows=fields.follows,
        is_instructed=layout.has_instructions and bool(fields.system),
    )


def unknown_earlier_message(api: str, id: str) -> Message:
    """Make the message that stands for messages that a call continues by an id.

    They are unknown, or the model did not read them.
    """
    message = Message(role="system", content=f"[earlier response {id}: unknown]")
    message["provider_blocks"] = {"api": api, "blocks": [{"type": EARLIER_RESPONSE, "id": id}]}
    return message


def mark_earlier_unread(request: WireRequest) -> WireRequest:
    """Replace the messages that a request continues by an id, which the endpoint did not read.

    A message that says so takes their place.
    """
    known = (n for n, piece in enumerate(request.pieces, 1) if isinstance(piece, Part))
    if not (place := next(known, 0)):
        return request
    before = request.parts[:place]
    message = unknown_earlier_message(request.api, request.follows)
    digest = message_digest(message, CallsInOrder(before), NOTHING_VOLATILE)
    part = Part(
        raw=(EARLIER_RESPONSE, request.follows),
        messages=[message],
        digests=[digest],
        calls=[],
        first_call=CallsInOrder(before).count,
    )
    parts = [*before, part, *request.parts[place:]]
    messages, digests = _join(parts)
    return replace(
        request,
        messages=messages,
        digests=digests,
        parts=parts,
        pieces=[*request.pieces[:place], part.raw, *request.pieces[place:]],
    )


def require_objects(value: Any, place: str) -> list[dict[str, Any]]:
    """Return the value if it is a list of objects. Raises `WireError` if it is not."""
    if not isinstance(value, list) or not set(map(type, value)) <= {dict}:
        raise WireError(f"{place}: it must be a list of objects")
    return value


def function_tool(name: str, description: Any, parameters: Any) -> dict[str, Any]:
    """Return the schema of a tool in OpenAI form.

    If `parameters` is no schema, the tool takes no arguments.
    """
    if not isinstance(parameters, dict) or not parameters:
        parameters = {"type": "object", "properties": {}}
    function = {"name": name, "description": str(description or ""), "parameters": parameters}
    return {"type": "function", "function": function}


def custom_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool whose input is free text: its one argument is `input`."""
    given = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return function_tool(str(tool.get("name") or ""), tool.get("description"), given)


def placeholder(part: Mapping[str, Any]) -> str:
    """Return the text that stands for an image or an unknown part in a message."""
    written = exact_json.dumps(remove_marks(part), option=orjson.OPT_SORT_KEYS)
    kind = part.get("type") or next(iter(part), "part")
    return f"[{kind}: {len(written)} bytes, digest {digest_of_bytes(written).hex()}]"


def make_message(
    api: str,
    role: Role,
    content: Any,
    show: Callable[[Mapping[str, Any]], str] = placeholder,
) -> Message:
    """Make a message with this content: a text, or a list of parts.

    `show` writes parts that are not text; they are whole in `provider_blocks`. Raises `WireError`.
    """
    if isinstance(content, str):
        return Message(role=role, content=content)
    parts = require_objects(content, "content")
    others = [part for part in parts if not isinstance(part.get("text"), str)]
    texts = [part["text"] if isinstance(part.get("text"), str) else show(part) for part in parts]
    message = Message(role=role, content="\n".join(texts))
    if others:
        message["provider_blocks"] = {"api": api, "blocks": others}
    return message


def split_results(
    api: str,
    parts: Iterable[dict[str, Any]],
    read_result: Callable[[dict[str, Any], int], Message | None],
) -> list[Message]:
    """Split the parts of a user's message into results and messages of the user between them.

    `read_result` gets a part and the number of results before it; it returns None for other parts.
    """
    messages: list[Message] = []
    others: list[dict[str, Any]] = []
    results = 0
    for part in parts:
        result = read_result(part, results)
        if result is None:
            others.append(part)
            continue
        if others:
            messages.append(make_message(api, "user", others))
            others = []
        messages.append(result)
        results += 1
    if others or not messages:
        messages.append(make_message(api, "user", others))
    return messages


def strip_query(path: str) -> str:
    """Return the path of a request without its query and trailing slash."""
    return path.partition("?")[0].rstrip("/")


def _join(parts: Sequence[Part]) -> tuple[list[Message], list[bytes]]:
    messages = [message for part in parts for message in part.messages]
    digests = [digest for part in parts for digest in part.digests]
    return messages, order_by_calls(messages, digests)


def _read_offer(layout: Layout, tools: Any) -> Offer:
    schemas, by_provider = [], []
    _check_depth(tools)
    for tool in require_objects(tools or [], "tools"):
        read = layout.read_tool(tool)
        if isinstance(read, str):
            by_provider.append(read)
        else:
            schemas += read
    return Offer(tools, schemas, tuple(by_provider), digest_json(remove_marks(tools)))


def _read_parts(
    layout: Layout,
    pieces: list[Any],
    first: int,
    volatile: Volatile,
    before: Sequence[WireRequest],
) -> list[Part]:
    """Read the pieces; reuse the parts of the earlier request that has most pieces in common."""
    known, same = _find_most_alike(pieces, before)
    parts = list(known[:same])
    calls = CallsInOrder(known[:same])
    is_alike = True  # all calls so far have the same ids as in the earlier request
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
            is_alike = old is not None and _call_ids(old) == _call_ids(part)
        parts.append(part)
    return parts


def _find_most_alike(
    pieces: list[Any], before: Sequence[WireRequest]
) -> tuple[Sequence[Part], int]:
    """Return the parts of the earlier request with most pieces in common, and their number."""
    best: tuple[Sequence[Part], int] = ((), 0)
    for request in before:
        same = _count_repeated(pieces, request.pieces)
        if same > best[1]:
            best = (request.parts, same)
    return best


def _count_repeated(pieces: list[Any], earlier: list[Any]) -> int:
    """Count the first pieces that an earlier request also had."""
    # Mostly these are all, or all but the last: try that before comparing one by one.
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
        if message_calls := message.get("tool_calls"):
            calls.add(message_calls)
            made += message_calls
    return Part(raw=piece, messages=messages, digests=digests, calls=made, first_call=first_call)


def _check_depth(value: Any) -> None:
    """Raise `WireError` for a value that is nested too deeply to be recorded."""
    try:
        is_too_deep = exact_json.is_nested_too_deep(exact_json.dumps(value))
    except TypeError:
        is_too_deep = True
    if is_too_deep:
        raise WireError(f"it is nested deeper than {exact_json.MAX_NESTING} levels")


def _call_ids(part: Part) -> list[str]:
    return [call["id"] for call in part.calls]
