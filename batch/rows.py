"""The lines of a dataset file, one at a time: usable rows, and bad ones with their reason.

Memory holds one line, whatever the size of the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson

from agent.messages import Message
from agent.models.names import SCRIPTED
from agent.models.scripted import parse_script
from agent.nesting import MAX_NESTING, is_nested_deeper
from batch.errors import DatasetError

MAX_LINE_BYTES = 256 << 20
"""A longer line is a bad row: it is no prompt, and memory must stay bounded."""

_LONG_INTEGER = re.compile(rb"\d{19,}")
_INT64 = range(-(2**63), 2**64)


class Row(NamedTuple):
    """A usable row: its physical line number (from 1) and its columns."""

    line: int
    columns: dict[str, Any]


class BadRow(NamedTuple):
    """A line that cannot be used, and why."""

    line: int
    reason: str


ScriptUse = Literal["ignored", "allowed", "needed"]
"""What a row's `script` column is: a column like any other, or the turns to be played."""


def script_use(api: str, *, has_script_file: bool) -> ScriptUse:
    """What a row's `script` column is to a model of this API."""
    if api != SCRIPTED:
        return "ignored"
    return "allowed" if has_script_file else "needed"


def read_rows(path: Path, *, scripts: ScriptUse) -> Iterator[Row | BadRow]:
    """Read a JSONL file; blank lines are skipped.

    Raises `DatasetError` where the file as a whole cannot be read.
    """
    for line, text in _lines(path):
        if len(text) >= MAX_LINE_BYTES:
            yield BadRow(line, f"longer than {MAX_LINE_BYTES >> 20} MiB")
        elif text := text.strip():
            yield _read_row(line, text, scripts)


def opening_messages(columns: dict[str, Any], system_prompt: str | None) -> list[Message]:
    """The messages that the conversation of a row starts with.

    A system message of the row's own takes the place of `system_prompt`. Raises `ValueError`
    with the reason where `prompt` is neither text nor a list of chat messages that ends in one
    of the user.
    """
    if "prompt" not in columns:
        names = ", ".join(sorted(columns)[:8]) or "none"
        msg = f"no `prompt` field (fields: {names})"
        raise ValueError(msg)
    prompt = columns["prompt"]
    if isinstance(prompt, str):
        messages = [Message(role="user", content=prompt)]
    elif isinstance(prompt, list):
        messages = [_chat_message(n, item) for n, item in enumerate(prompt)]
    else:
        msg = f"`prompt` is {_kind(prompt)}; it must be text or a list of chat messages"
        raise ValueError(msg)
    _check_chat(messages)
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, Message(role="system", content=system_prompt))
    return messages


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        if path.is_dir():
            msg = f"{path} is a directory; give the JSONL file itself"
            raise DatasetError(msg)
        with path.open("rb", buffering=1 << 20) as file:
            start = file.read(4)
            file.seek(0)
            if start.startswith(b"\x1f\x8b"):
                msg = f"{path} is gzip-compressed; unpack it first (gzip -d)"
                raise DatasetError(msg)
            if start.startswith((b"\xff\xfe", b"\xfe\xff")):
                msg = f"{path} is UTF-16; convert it to UTF-8 first (iconv -t UTF-8)"
                raise DatasetError(msg)
            if start.startswith(b"\xef\xbb\xbf"):
                file.seek(3)
            number = 0
            while text := file.readline(MAX_LINE_BYTES):
                number += 1
                whole = text.endswith(b"\n")
                yield number, text
                while not whole and len(text) == MAX_LINE_BYTES:
                    text = file.readline(MAX_LINE_BYTES)
                    whole = text.endswith(b"\n")
    except FileNotFoundError:
        msg = f"{path}: no such dataset file"
        raise DatasetError(msg) from None
    except OSError as error:
        msg = f"{path}: cannot read the dataset: {error.strerror or error}"
        raise DatasetError(msg) from error


def _read_row(line: int, text: bytes, scripts: ScriptUse) -> Row | BadRow:
    try:
        columns = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        return BadRow(line, _why_not_json(text, error))
    if not isinstance(columns, dict):
        return BadRow(line, f"the line is {_kind(columns)}; it must be a JSON object")
    if _LONG_INTEGER.search(text) and (number := _integer_beyond_64_bits(text)):
        return BadRow(line, f"the integer {number}… does not fit 64 bits; write it as text")
    if is_nested_deeper(text, MAX_NESTING):
        return BadRow(line, f"nested deeper than {MAX_NESTING} levels")
    try:
        opening_messages(columns, None)
        if scripts != "ignored" and "script" in columns:
            parse_script(columns["script"])
        elif scripts == "needed":
            msg = "no `script` field, which the scripted model plays (or give --script_file)"
            return BadRow(line, msg)
    except ValueError as error:
        return BadRow(line, str(error))
    return Row(line, columns)


def _why_not_json(text: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        text.decode()
    except UnicodeDecodeError as decoding:
        return f"not UTF-8: {decoding.reason} at byte {decoding.start}"
    if text[:1] == b"[" or text in (b"]", b"],"):
        return "not a JSON object: this looks like a JSON array; write one object per line"
    return f"not JSON: {error}"


def _integer_beyond_64_bits(text: bytes) -> str | None:
    """The parser turns such integers into floats without a word, so they are looked for."""
    found: list[str] = []

    def check(digits: str) -> int:
        # int() refuses thousands of digits, which no 64-bit integer has.
        if len(digits) > 20 or int(digits) not in _INT64:
            found.append(digits[:20])
        return 0

    try:
        json.loads(text, parse_int=check)
    except RecursionError:
        return None
    return found[0] if found else None


def _chat_message(n: int, item: Any) -> Message:
    role = item.get("role") if isinstance(item, dict) else None
    content = item.get("content") if isinstance(item, dict) else None
    match role:
        case "system" | "user" | "assistant" if isinstance(content, str):
            return Message(role=role, content=content)
    msg = (
        f"prompt[{n}] must be an object with `role` (system, user or assistant) "
        "and `content` (text)"
    )
    raise ValueError(msg)


def _check_chat(messages: list[Message]) -> None:
    if any(not message["content"].strip() for message in messages):
        msg = "`prompt` is empty" if len(messages) == 1 else "`prompt` holds an empty message"
        raise ValueError(msg)
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if not turns or turns[-1] != "user":
        msg = "`prompt` must end in a user message"
        raise ValueError(msg)
    expected = ["user", "assistant"] * (len(turns) // 2) + ["user"]
    if turns != expected:
        msg = f"the roles of `prompt` must alternate user, assistant, …, user (got {roles})"
        raise ValueError(msg)


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case list():
            return "an array"
        case _:
            return "an object"
