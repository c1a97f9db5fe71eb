"""Rows of `messages` and `tools` in OpenAI's form, as trainers take them and `openai` writes them.

Reasoning is in `reasoning_content`, `reasoning` or a <think> block; arguments are JSON text or an
object, `tools` a list or JSON text; null is as absent, as Parquet has it. Messages that are marked
(`weight: 0`, `loss: false`, `train: false`) carry no loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent.messages.message import Message, ProviderBlocks
from batch_trajectories.basics import exact_json
from batch_trajectories.runs.importing.conversation import (
    Dialogue,
    Foreign,
    Reader,
    Unreadable,
    of_metadata,
    read_messages,
    read_tools,
)

_API = "openai_chat"
_MARKS = ("weight", "loss", "train", "training")
_NOT_COLUMNS = ("id", "messages", "tools", "metadata", "prompt")
_LONGEST = 1000
_MEDIA = {"images": "image", "videos": "video", "audios": "audio"}
"""Columns of what the texts of a row only have places for, and what is in them."""


def _read(row: Mapping[str, Any]) -> Foreign:
    given = row.get("messages")
    if isinstance(given, str):
        given = json_in(given, "messages")
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given) or not given:
        raise Unreadable("messages: it must be a list of objects")
    items = [(None, f"messages[{n}]", _plain(message)) for n, message in enumerate(given)]
    read = [messages[0] for messages in read_messages(_API, items)]
    keep_media(row, read)
    own = [one for one in given if one.get("role") == "assistant"]
    quiet = [n for n, one in enumerate(own, 1) if any(_is_off(one.get(mark)) for mark in _MARKS)]
    return Foreign(
        Dialogue(read, [{} for _ in own], no_loss=quiet),
        _API,
        id=id_of(row),
        tools=tools_of(row),
        columns=columns_of(row),
        facts=of_metadata(metadata_in(row)),
    )


def keep_media(row: Mapping[str, Any], messages: Sequence[Message]) -> None:
    """Add pictures, videos and sounds in columns of a row to its first message of a user."""
    parts = [
        {"type": kind, "source": one if isinstance(one, str) else "bytes"}
        for column, kind in _MEDIA.items()
        if isinstance(found := row.get(column), list)
        for one in found
    ]
    first = next((message for message in messages if message["role"] == "user"), None)
    if parts and first is not None:
        known = first.get("provider_blocks") or ProviderBlocks(api=_API, blocks=[])
        first["provider_blocks"] = {**known, "blocks": [*known["blocks"], *parts]}


def id_of(row: Mapping[str, Any]) -> str | None:
    """The id of a row, None without one."""
    id = row.get("id")
    return str(id) if isinstance(id, str | int) and str(id) else None


def tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools of a row; None where it has no such column. Raises `Unreadable`."""
    tools = row.get("tools")
    if tools is None:
        return None
    return read_tools(
        _API, json_in(tools, "tools") if isinstance(tools, str) and tools else tools or []
    )


def columns_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Short columns of a row, to filter by."""
    return {
        name: value
        for name, value in row.items()
        if name not in _NOT_COLUMNS
        and (
            isinstance(value, bool | int | float)
            or (isinstance(value, str) and len(value) < _LONGEST)
        )
    }


def metadata_in(row: Mapping[str, Any]) -> Any:
    """The column `metadata`, as an object where it is JSON text."""
    metadata = row.get("metadata")
    if not isinstance(metadata, str):
        return metadata
    try:
        return exact_json.loads(metadata)
    except exact_json.JSONDecodeError:
        return None  # a text of other programs


def json_in(text: str, place: str) -> Any:
    """JSON in a column. Raises `Unreadable`."""
    try:
        return exact_json.loads(text)
    except exact_json.JSONDecodeError as error:
        raise Unreadable(f"{place}: not JSON: {error}") from error


def _plain(value: Any) -> Any:
    """The message without marks and without what is null."""
    return {k: _present(v) for k, v in value.items() if v is not None and k not in _MARKS}


def _present(value: Any) -> Any:
    if isinstance(value, list):
        return [_present(one) for one in value]
    if not isinstance(value, dict) or "arguments" in value:
        return value  # null in arguments means null
    return {key: _present(one) for key, one in value.items() if one is not None}


def _is_off(mark: Any) -> bool:
    return mark is not None and mark in (0, False)


def _is_row(row: Mapping[str, Any]) -> bool:
    return "messages" in row


READER = Reader(_is_row, row=_read)
