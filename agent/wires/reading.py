"""Reading the body of a request, without reading again what an earlier request had."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import orjson

from agent.messages.message import Message, Role
from agent.messages.parts import EARLIER
from agent.wires.canonical import (
    CallsInOrder,
    digest_of,
    digest_of_bytes,
    head_of,
    in_order_of_calls,
    message_digest,
    without_marks,
)
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
    part = Part((EARLIER, request.follows), [message], [digest], [], CallsInOrder(before).count)
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
    return Part(piece, messages, digests, made, first_call)


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
