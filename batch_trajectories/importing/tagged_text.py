"""Reads calls and results in the tags of model texts.

The dialect of the Hermes and Qwen models (`<tools>`, `<tool_call>`, `<tool_response>`) in the forms
that public sets have, and the `<function=NAME>` blocks of OpenHands and the Agent Data Protocol.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from batch_trajectories.basics.text import clip
from batch_trajectories.importing.call_forms import (
    ForeignCall,
    json_text,
    parse_value,
    read_calls,
    read_tool_schemas,
)
from batch_trajectories.importing.conversation import Unreadable
from batch_trajectories.importing.row_columns import unite_tools

CALL = "<tool_call>"
RESULT = "<tool_response>"

_CALLS = re.compile(r"<tool_call>(?=\s*[\[{])")
_TOOLS = re.compile(r"<tools>(.*?)</tools>", re.DOTALL)
_HERMES = "You are a function calling AI model."
"""The beginning of the system prompt of Nous Research; see `hermes_system_prompt.txt`."""
_QWEN = "# Tools\n\nYou may call one or more functions"
"""The beginning of the section that Qwen's chat template adds to a system prompt."""
_EXAMPLE = re.compile(r".*?<tool_call>\s*\n.*?\n\s*</tool_call>", re.DOTALL)
"""Matches the instructions after the tools in both, which end with an example call."""
_XML_CALL = re.compile(r"<function=([^>\s]+)>\s*(.*?)\s*</function>", re.DOTALL)
_XML_ARGUMENT = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_MAX_TEXT_CHARS = 40


class TaggedReply(NamedTuple):
    """A reply with its calls taken out of the text."""

    text: str
    calls: list[ForeignCall]


class TaggedResult(NamedTuple):
    """A result: id and name of its call ("" if unknown), its text, and the parsed value."""

    id: str
    name: str
    text: str
    value: Any


class TaggedSystem(NamedTuple):
    """A system prompt without its list of tools, and the tools; None without a list."""

    text: str
    tools: list[dict[str, Any]] | None


def has_calls(text: str) -> bool:
    """Whether a reply holds calls in tags."""
    return _CALLS.search(text) is not None


def read_reply(text: str, place: str) -> TaggedReply:
    """Take the calls out of a reply. Raises `Unreadable` for text between or after them."""
    begin = _CALLS.search(text)
    if begin is None:
        return TaggedReply(text, [])
    calls: list[ForeignCall] = []
    for body in _blocks(text[begin.start() :], "tool_call", place):
        calls += read_calls(body, f"{place}: {CALL}")
    return TaggedReply(_text_before(text[: begin.start()]), calls)


def read_function_call(text: str, place: str) -> TaggedReply:
    """Read the text of an entry that is a call: JSON, or words and calls in tags.

    Raises `Unreadable`.
    """
    if text.lstrip()[:1] in ("{", "["):
        try:
            return TaggedReply("", read_calls(text, place))
        except Unreadable:
            if not has_calls(text):  # words before them may begin like JSON
                raise
    if has_calls(text):
        return read_reply(text, place)
    if begin := _XML_CALL.search(text):
        return _read_xml(text, begin.start(), place)
    shown = clip(text, max_chars=_MAX_TEXT_CHARS)
    raise Unreadable(f"{place}: neither JSON nor a known form of a call: {shown!r}")


def _read_xml(text: str, begin: int, place: str) -> TaggedReply:
    calls = []
    end = begin
    for match in _XML_CALL.finditer(text, begin):
        _refuse_words(text[end : match.start()], place)
        arguments = {one[1]: one[2] for one in _XML_ARGUMENT.finditer(match[2])}
        _refuse_words(_XML_ARGUMENT.sub("", match[2]), place)
        calls.append(ForeignCall("", match[1], json_text(arguments), {}))
        end = match.end()
    _refuse_words(text[end:], place)
    return TaggedReply(_text_before(text[:begin]), calls)


def _refuse_words(text: str, place: str) -> None:
    if text.strip():
        shown = clip(text.strip(), max_chars=_MAX_TEXT_CHARS)
        raise Unreadable(f"{place}: text between or after its calls: {shown!r}")


def _text_before(text: str) -> str:
    """Return the text before calls, without the line break before them."""
    return text.removesuffix("\n") if text.strip() else ""


def read_results(text: str, place: str) -> list[TaggedResult]:
    """Read the results of an entry, in order. Raises `Unreadable`."""
    if not text.lstrip().startswith(RESULT):
        return [TaggedResult("", "", text, text)]
    return [_result(body) for body in _blocks(text, "tool_response", place)]


def _result(body: str) -> TaggedResult:
    try:
        value = parse_value(body, "", keeps_digits=True)
    except Unreadable:
        return TaggedResult("", "", body, body)
    keys = {"tool_call_id", "name", "content"}
    if isinstance(value, dict) and "content" in value and len(value) > 1 and value.keys() <= keys:
        content, id, name = value["content"], value.get("tool_call_id"), value.get("name")
        text = content if isinstance(content, str) else json_text(content)
        return TaggedResult(str(id or ""), str(name or ""), text, content)
    return TaggedResult("", "", body, value)


def read_system(text: str, place: str) -> TaggedSystem:
    """Split a system prompt into its tools and its text without the words of the format.

    Raises `Unreadable` for a list of tools that cannot be read.
    """
    offers = [
        (match, read_tool_schemas(match[1].strip(), f"{place}: <tools>"))
        for match in _TOOLS.finditer(text)
        if match[1].strip().startswith(("[", "{"))
    ]
    if not offers:
        return TaggedSystem(text, None)
    tools: list[dict[str, Any]] = []
    for _, offered in offers:
        tools = unite_tools(tools, offered, f"{place}: <tools>")
    first = offers[0][0]
    before, after = text[: first.start()], text[first.end() :]
    own, marker, _ = before.partition(_QWEN)
    if before.lstrip().startswith(_HERMES):
        own, marker = "", _HERMES
    # Tags that offer nothing are words, but for those that the format itself writes.
    filled = [match for match, offered in offers if offered]
    if not marker:
        return (
            TaggedSystem(_cut_matches(text, filled), tools) if tools else TaggedSystem(text, None)
        )
    example = _EXAMPLE.match(after)
    end = first.end() + (example.end() if example else 0)
    rest = _cut_matches(text, [match for match in filled if match.start() >= end], end)
    parts = (own.rstrip(), rest.removeprefix("\n\n"))
    return TaggedSystem("\n\n".join(one for one in parts if one.strip()), tools)


def _cut_matches(text: str, matches: Sequence[re.Match[str]], start: int = 0) -> str:
    """Return a text from `start` on without these matches and the white space around them."""
    if not matches:
        return text[start:]
    bounds = [start, *(bound for match in matches for bound in match.span()), len(text)]
    pieces = [text[a:b] for a, b in zip(bounds[::2], bounds[1::2], strict=True)]
    pieces = [pieces[0].rstrip(), *map(str.strip, pieces[1:-1]), pieces[-1].lstrip()]
    return "\n".join(filter(None, pieces))


def _blocks(text: str, tag: str, place: str) -> Iterator[str]:
    """Yield the bodies between tags; JSON bodies may contain tags. Raises `Unreadable`."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    decoder = json.JSONDecoder()
    rest = text.strip()
    while rest:
        if not rest.startswith(opening):
            shown = clip(rest, max_chars=_MAX_TEXT_CHARS)
            raise Unreadable(f"{place}: text between or after {opening} blocks: {shown!r}")
        rest = rest.removeprefix(opening)
        body = rest.lstrip()
        try:
            _, end = decoder.raw_decode(body)
            is_json = body[end:].lstrip().startswith(closing)
        except (ValueError, RecursionError):
            is_json = False
        if is_json:
            yield body[:end]
            rest = body[end:].lstrip().removeprefix(closing).lstrip()
            continue
        words, found, rest = rest.partition(closing)
        if not found:
            raise Unreadable(f"{place}: a {opening} block is not closed")
        yield words.removeprefix("\n").removesuffix("\n")
        rest = rest.lstrip()


def reads_as_failure(value: Any) -> bool:
    """Whether a result in tags reads like that of a failed call; tags have no sign of errors."""
    if isinstance(value, dict):
        inner = value.get("content")
        has_inner_error = isinstance(inner, dict) and inner.get("error") is not None
        return value.get("error") is not None or has_inner_error or value.get("success") is False
    if isinstance(value, str):
        return not value.strip() or value.lstrip().lower().startswith("error")
    return False
