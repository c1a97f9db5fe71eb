"""Converts between the flat format, our messages, and the APIs of two providers.

A flat session that is converted to our messages and back is the same, except for its times and for
fields with their default: `is_error` false, `api` Anthropic's.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from agent.flat.format import FlatMessage, check_messages, is_assistants, is_foreign, with_time
from agent.messages.message import Message, ProviderBlocks, ToolCall
from agent.models.dialects import anthropic_messages, openai_chat
from agent.models.model import Completion
from agent.models.parsing import parse_object
from batch_trajectories.basics import exact_json

JSON_OUTPUT = "json_output"
"""In the details of a tool message: its content is the JSON of an output that is not a text."""


def to_messages(flat: Sequence[FlatMessage]) -> list[Message]:
    """The conversation in the form of models, loops and exports, without times.

    Consecutive items of the assistant become one message. If content, reasoning and calls alone
    would lose their order, signatures or opaque blocks, `provider_blocks` keep them.

    Raises `ValueError` as `check_messages` does.
    """
    check_messages(flat)
    names = {item["id"]: item["name"] for item in flat if item.get("type") == "tool_call"}
    messages: list[Message] = []
    for of_assistant, run in groupby(flat, is_assistants):
        if of_assistant:
            for part in _parts(run):
                messages += _assistant_messages(part)
        else:
            messages += [_other_message(item, names) for item in run]
    return messages


def from_messages(
    messages: Sequence[Message], times: Sequence[float | None] | None = None
) -> list[FlatMessage]:
    """The flat form of a conversation, without fields that the model neither saw nor wrote.

    `times` are epoch seconds, one per message, or None if unknown. Raises `ValueError` if their
    number is not that of the messages.
    """
    if times is None:
        times = [None] * len(messages)
    flat = []
    for message, at in zip(messages, times, strict=True):
        for item in _items(message):
            flat.append(item if at is None else with_time(item, at))
    return flat


def to_api_messages(messages: Sequence[FlatMessage]) -> list[dict[str, Any]]:
    """Messages for the Anthropic API, user and assistant in turn, without the system message.

    Raises `ValueError` as `to_messages` does.
    """
    return anthropic_messages.to_api_messages(to_messages(messages))


def read_response(response: Mapping[str, Any]) -> Completion:
    """A response of the Anthropic API as a reply with all blocks except empty texts.

    A response without a `stop_reason` counts as complete: a fake API need not give one. Raises
    `ModelError` if the response is an error, cut or malformed.
    """
    body = _to_bytes({"stop_reason": "end_turn", **response})
    completion = anthropic_messages.read_reply(body)
    # Parsed again: the reader keeps the order of the blocks only if there are thoughts.
    blocks = [block for block in parse_object(body)["content"] if not _is_empty_text(block)]
    completion.message["provider_blocks"] = {"api": anthropic_messages.API, "blocks": blocks}
    return completion


def parse_response(response: Mapping[str, Any]) -> list[FlatMessage]:
    """The items of a response of the Anthropic API, in the order of its blocks.

    Raises `ModelError` as `read_response` does.
    """
    return [with_time(item) for item in _items(read_response(response).message)]


def to_openai_messages(messages: Sequence[FlatMessage]) -> list[dict[str, Any]]:
    """Messages for the OpenAI chat API, with the system message.

    Raises `ValueError` as `to_messages` does.
    """
    return openai_chat.to_api_messages(to_messages(messages))


def parse_openai_response(response: Mapping[str, Any]) -> list[FlatMessage]:
    """The items of a response of the OpenAI chat API: thoughts, then text, then calls.

    Raises `ModelError` if the response is an error, cut or malformed.
    """
    message = openai_chat.read_reply(_to_bytes(response)).message
    return [with_time(item) for item in _items(message)]


def _to_bytes(response: Mapping[str, Any]) -> bytes:
    """As JSON that may have half characters, which the readers accept."""
    return json.dumps(response).encode()


def _is_empty_text(block: Mapping[str, Any]) -> bool:
    return block.get("type") == "text" and not block.get("text")


def _parts(run: Iterable[FlatMessage]) -> list[list[FlatMessage]]:
    """Split where blocks of another API begin: they are the start of their message."""
    parts: list[list[FlatMessage]] = []
    for item in run:
        if not parts or (is_foreign(item) and item["api"] != parts[-1][-1].get("api")):
            parts.append([])
        parts[-1].append(item)
    return parts


def _assistant_messages(part: Sequence[FlatMessage]) -> list[Message]:
    """One message; or two, if blocks of another API come before items that API cannot have."""
    untimed = [{k: v for k, v in item.items() if k != "ts"} for item in part]
    foreign = [item for item in untimed if is_foreign(item)]
    own = untimed[len(foreign) :]
    blocks = [_to_block(item) for item in own]
    message = anthropic_messages.read_blocks(blocks)
    if not foreign:
        if _items(message) != own:
            message["provider_blocks"] = {"api": anthropic_messages.API, "blocks": blocks}
        return [message]
    verbatim = ProviderBlocks(api=foreign[0]["api"], blocks=[_to_block(item) for item in foreign])
    of_message = verbatim["blocks"][: -_add_to_calls(message, verbatim["blocks"][-1]) or None]
    if of_message:
        message["provider_blocks"] = ProviderBlocks(api=verbatim["api"], blocks=of_message)
    if _items(message) == untimed:
        return [message]
    lead = Message(role="assistant", content="", provider_blocks=verbatim)
    return [lead, *_assistant_messages(own)]


def _add_to_calls(message: Message, block: Mapping[str, Any]) -> bool:
    """If a block is one that `_of_calls` wrote, add it to the calls; returns whether it was."""
    calls, fields = message.get("tool_calls", []), block.get("tool_calls")
    if not calls or block.keys() != {"tool_calls"} or not isinstance(fields, list):
        return False
    if len(fields) != len(calls) or not all(
        isinstance(unknown, dict) and isinstance(unknown.get("function", {}), dict)
        for unknown in fields
    ):
        return False
    for call, unknown in zip(calls, fields, strict=True):
        openai_chat.add_to_call(call, unknown)
    return True


def _of_calls(message: Message) -> list[FlatMessage]:
    """The fields of calls that the flat format does not have, as an opaque block."""
    unknown = [openai_chat.unknown_of_call(call) for call in message.get("tool_calls", ())]
    if not any(unknown):
        return []
    block = {"tool_calls": copy.deepcopy(unknown)}
    return [{"type": "opaque", "api": openai_chat.API, "block": block}]


def _other_message(item: FlatMessage, names: Mapping[str, str]) -> Message:
    """The message of system, user or tool; `names` are those of the tools by call id."""
    if "role" in item:
        return Message(role=item["role"], content=item["content"])
    output = item["output"]
    message = Message(
        role="tool",
        tool_call_id=item["id"],
        name=names[item["id"]],
        content=output if isinstance(output, str) else exact_json.dumps(output).decode(),
        is_error=item.get("is_error", False),
    )
    if not isinstance(output, str):
        message["details"] = {JSON_OUTPUT: True}
    return message


def _to_block(item: FlatMessage) -> dict[str, Any]:
    match item:
        case {"role": "assistant"}:
            return {"type": "text", "text": item["content"]}
        case {"type": "thinking"}:
            signature = {k: v for k, v in item.items() if k == "signature"}
            return {"type": "thinking", "thinking": item["content"], **signature}
        case {"type": "tool_call"}:
            # An input that is not an object is kept as text, as in a reply that was cut.
            given = item["input"]
            given = copy.deepcopy(given) if isinstance(given, dict) else _write_arguments(given)
            return {"type": "tool_use", "id": item["id"], "name": item["name"], "input": given}
        case _:
            return copy.deepcopy(item["block"])


def _items(message: Message) -> list[FlatMessage]:
    """One message in the flat format, without times."""
    match message["role"]:
        case "assistant":
            return _assistant_items(message)
        case "tool":
            is_error = {"is_error": True} if message.get("is_error") else {}
            id, output = message["tool_call_id"], _read_output(message)
            return [{"type": "tool_result", "id": id, "output": output, **is_error}]
        case role:
            return [{"role": role, "content": message["content"]}]


def _assistant_items(message: Message) -> list[FlatMessage]:
    calls = [_call_item(call) for call in message.get("tool_calls", ())]
    verbatim = message.get("provider_blocks") or {"api": "", "blocks": []}
    if verbatim["api"] == anthropic_messages.API:
        # The calls as they were run: their names may have been repaired.
        in_order = iter(calls)
        return [
            next(in_order) if block.get("type") == "tool_use" else _block_item(block)
            for block in verbatim["blocks"]
        ]
    items: list[FlatMessage] = []
    reasoning = message.get("reasoning")
    # A block with only the reasoning is redundant: the chat API gets the reasoning anyway.
    redundant = {"api": openai_chat.API, "blocks": [{"reasoning_content": reasoning}]}
    if reasoning is None or verbatim != redundant:
        items += [
            {"type": "opaque", "api": verbatim["api"], "block": copy.deepcopy(block)}
            for block in verbatim["blocks"]
        ]
    items += _of_calls(message)
    if reasoning:
        items.append({"type": "thinking", "content": reasoning})
    if message["content"]:
        items.append({"role": "assistant", "content": message["content"]})
    return items + calls


def _block_item(block: Mapping[str, Any]) -> FlatMessage:
    match block.get("type"):
        case "text":
            return {"role": "assistant", "content": str(block.get("text") or "")}
        case "thinking":
            item = {"type": "thinking", "content": str(block.get("thinking") or "")}
            return item | {k: v for k, v in block.items() if k == "signature" and v is not None}
        case _:
            return {"type": "opaque", "block": copy.deepcopy(dict(block))}


def _call_item(call: ToolCall) -> FlatMessage:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    return {
        "type": "tool_call",
        "name": name,
        "id": call["id"],
        "input": _read_arguments(arguments),
    }


def _read_arguments(arguments: str) -> Any:
    """The JSON that a model wrote, or its text if it is not JSON or nested too deep."""
    if exact_json.is_nested_too_deep(arguments.encode(errors="replace")):
        return arguments
    try:
        return exact_json.loads(arguments or "{}")
    except exact_json.JSONDecodeError:
        return arguments


def _write_arguments(given: Any) -> str:
    """The text that `_read_arguments` reads `given` from."""
    if isinstance(given, str) and _read_arguments(given) == given:
        return given
    return exact_json.dumps(given).decode()


def _read_output(message: Message) -> Any:
    if JSON_OUTPUT in message.get("details", {}):
        try:
            return exact_json.loads(message["content"])
        except exact_json.JSONDecodeError:
            # A note of the runtime follows the JSON, and the model saw both as one text.
            pass
    return message["content"]
