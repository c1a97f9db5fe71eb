"""Tools and calls in the forms of published files, read as those of OpenAI's chat API.

An unknown form is refused with its place; no key with a value is dropped.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from agent.wires.reading import custom_tool, function_tool
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.text import valid_utf8
from batch_trajectories.importing.conversation import Unreadable, is_blank, refuse_unknown

_SCHEMAS = ("parameters", "input_schema", "inputSchema")
"""Keys under which OpenAI, Anthropic and MCP have the schema of a tool's arguments."""
_ARGUMENTS = ("arguments", "parameters", "args", "input")
"""Keys under which calls have their arguments."""
_CALL_KEYS = frozenset({"id", "type", "index", "extra_content", "call_id", "tool_call_id"})
"""Keys of a call beside its function."""
_TOOL_TYPES = ("function", "custom", "tool")
_CALL_TYPES = ("function", "custom", "function_call", "tool_call", "tool_use", "tool")
_ODD_NUMBER = re.compile(r"[0-9][.eE]|-0")
"""Matches numbers that can be written in several ways."""


class ForeignCall(NamedTuple):
    """A call of a source."""

    id: str
    """The id of the call; "" without one."""
    name: str
    arguments: str
    extra: Mapping[str, Any]
    """Fields that a provider expects back with the call."""


class Digits(str):
    """A number with the digits that it was written with."""

    __slots__ = ()


def parse_value(text: str, place: str, *, keeps_digits: bool = False) -> Any:
    """Parse JSON or a Python literal. Raises `Unreadable`.

    With `keeps_digits`, numbers that Python would write differently become `Digits`.
    """
    try:
        return _loads(text, keeps_digits=keeps_digits)
    except exact_json.JSONDecodeError as error:
        value = _parse_literal(text)
        if value is None:
            raise Unreadable(f"{place}: not JSON: {error}") from error
        return value


def parse_values(text: str, place: str, *, keeps_digits: bool = False) -> list[Any]:
    """Parse a text that is one list, or one value after the other. Raises `Unreadable`."""
    try:
        return [*_values(text, keeps_digits=keeps_digits)]
    except ValueError:
        value = parse_value(text, place, keeps_digits=keeps_digits)
        return value if isinstance(value, list) else [value]


def json_text(value: Any) -> str:
    """Write a value of a source as JSON, in the form that models read."""
    return valid_utf8(_write_value(value))


def _write_value(value: Any) -> str:
    if isinstance(value, dict):
        members = (f"{_write_value(str(key))}: {_write_value(one)}" for key, one in value.items())
        return f"{{{', '.join(members)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_write_value, value))}]"
    return str(value) if isinstance(value, Digits) else json.dumps(value, ensure_ascii=False)


def read_tool_schemas(given: Any, place: str) -> list[dict[str, Any]]:
    """Read the schemas of tools: a list, one tool, or the text of either.

    Raises `Unreadable`.
    """
    if isinstance(given, str):
        given = parse_values(given, place) if given.strip() else []
        if len(given) == 1 and isinstance(given[0], list):
            (given,) = given
    if isinstance(given, dict):
        given = [given]
    if not isinstance(given, list):
        raise Unreadable(f"{place}: it must be a list of objects")
    tools = []
    for n, tool in enumerate(given):
        where = f"{place}[{n}]"
        tools.append(_read_tool(parse_value(tool, where) if isinstance(tool, str) else tool, where))
    return tools


def _read_tool(tool: Any, place: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise Unreadable(f"{place}: it must be an object")
    if isinstance(custom := tool.get("custom"), dict):
        refuse_unknown(tool, ("type", "custom"), place)
        return _read_custom_tool(custom, f"{place}.custom")
    function, kind = tool, tool.get("type")
    if "function" in tool:
        function, place = tool["function"], f"{place}.function"
        if not isinstance(function, dict):
            raise Unreadable(f"{place}: it must be an object")
        outside = place.removesuffix(".function")
        refuse_unknown(tool, ("type", "function"), outside)
        _refuse_type(tool, _TOOL_TYPES, outside)
    elif kind not in (None, "function", "custom") and not any(key in tool for key in _SCHEMAS):
        raise Unreadable(f"{place}.type: {kind!r} is a tool of a provider, without a schema")
    elif kind == "custom" and not any(key in tool for key in _SCHEMAS):
        return _read_custom_tool(tool, place)
    else:
        _refuse_type(tool, _TOOL_TYPES, place)
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not name:
        raise Unreadable(f"{place}.name: it must be the name of a tool")
    if not isinstance(description, str | None):
        raise Unreadable(f"{place}.description: it must be text")
    found = [key for key in _SCHEMAS if function.get(key) is not None]
    if len(found) > 1:
        raise Unreadable(f"{place}.{found[1]}: the tool has {found[0]} as well; keep one of them")
    schema = function[found[0]] if found else None
    if isinstance(schema, str):
        schema = parse_value(schema, f"{place}.{found[0]}")
    if not isinstance(schema, dict | None):
        raise Unreadable(f"{place}.{found[0]}: it must be an object")
    rest = {
        key: value
        for key, value in function.items()
        if key not in _SCHEMAS and (function is not tool or key != "type")
    }
    made = function_tool(name, description, schema)
    return {**made, "function": {**rest, **made["function"]}}


def _read_custom_tool(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Read a tool whose input is free text. Raises `Unreadable` if a grammar restricts it."""
    known = {"type", "name", "description"}
    if tool.get("format") in (None, {"type": "text"}):
        known.add("format")
    refuse_unknown(tool, known, place)
    return custom_tool(tool)


def read_calls(given: Any, place: str) -> list[ForeignCall]:
    """Read the calls of a reply: a list, one call, or the text of either.

    Raises `Unreadable`.
    """
    if isinstance(given, str):
        given = parse_values(given, place, keeps_digits=True)
        if len(given) == 1 and isinstance(given[0], list):
            (given,) = given
    if isinstance(given, dict):
        given = [given]
    if not isinstance(given, list):
        raise Unreadable(f"{place}: it must be a list of calls")
    return [read_call(call, f"{place}[{n}]") for n, call in enumerate(given)]


def read_call(call: Any, place: str) -> ForeignCall:
    """Read a call, whose function may be an object inside it. Raises `Unreadable`."""
    if isinstance(call, str):
        call = parse_value(call, place, keeps_digits=True)
    if not isinstance(call, dict):
        raise Unreadable(f"{place}: it must be an object")
    function, inside = call, place
    if isinstance(call.get("function"), dict):
        function, inside = call["function"], f"{place}.function"
        refuse_unknown(call, (*_CALL_KEYS, "function"), place)
    elif isinstance(call.get("custom"), dict):
        function, inside = call["custom"], f"{place}.custom"
        refuse_unknown(call, (*_CALL_KEYS, "custom"), place)
    _refuse_type(call, _CALL_TYPES, place)
    names = [key for key in ("name", "function", "tool_name") if isinstance(function.get(key), str)]
    if len(names) != 1 or not function[names[0]]:
        raise Unreadable(f"{inside}.name: it must be the name of a tool")
    found = [key for key in _ARGUMENTS if function.get(key) is not None]
    if len(found) > 1:
        raise Unreadable(f"{inside}.{found[1]}: the call has {found[0]} as well; keep one of them")
    own = _CALL_KEYS if function is call else frozenset[str]()
    refuse_unknown(function, (*own, names[0], *_ARGUMENTS), inside)
    arguments = function[found[0]] if found else {}
    if function is not call and inside.endswith(".custom"):
        arguments = {"input": arguments or ""}
    ids = [call[key] for key in ("id", "call_id", "tool_call_id") if not is_blank(call.get(key))]
    return ForeignCall(
        id=str(ids[0]) if ids else "",
        name=function[names[0]],
        arguments=arguments if isinstance(arguments, str) else json_text(arguments),
        extra={}
        if is_blank(call.get("extra_content"))
        else {"extra_content": call["extra_content"]},
    )


def _refuse_type(value: Mapping[str, Any], known: Sequence[str], place: str) -> None:
    """Raise `Unreadable` for an unknown type of tool or call."""
    if not is_blank(kind := value.get("type")) and kind not in known:
        raise Unreadable(f"{place}.type: {kind!r} is none of {', '.join(known)}")


def _loads(text: str, *, keeps_digits: bool) -> Any:
    value = exact_json.loads_with_valid_text(text)
    if not keeps_digits or not _ODD_NUMBER.search(text):
        return value
    decoder = json.JSONDecoder(parse_float=Digits, parse_int=_integer)
    return decoder.decode(text)


def _integer(digits: str) -> int | Digits:
    return Digits(digits) if digits == "-0" else int(digits)


def _values(text: str, *, keeps_digits: bool) -> Iterator[Any]:
    """Yield JSON values that follow each other. Raises `ValueError`."""
    decoder, at = json.JSONDecoder(), 0
    while text := text[at:].strip():
        _, at = decoder.raw_decode(text)
        yield _loads(text[:at], keeps_digits=keeps_digits)


def _parse_literal(text: str) -> Any:
    """Parse a list or dict of Python as JSON values; return None if the text is none."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not know
            value = ast.literal_eval(text.strip())
        # Tuples become lists; sets, bytes and complex numbers are no JSON.
        return exact_json.loads_with_valid_text(json.dumps(value, allow_nan=False))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
