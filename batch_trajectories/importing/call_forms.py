"""Tools and calls in the forms of published files, read as those of OpenAI's chat API.

A form that is not known is refused with its place; no key with a value is left out.
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
"""Where a tool has the schema of its arguments: OpenAI, Anthropic, MCP."""
_ARGUMENTS = ("arguments", "parameters", "args", "input")
"""Where a call has its arguments."""
_OF_CALLS = frozenset({"id", "type", "index", "extra_content", "call_id", "tool_call_id"})
"""Keys of a call beside its function."""
_TOOL_TYPES = ("function", "custom", "tool")
_CALL_TYPES = ("function", "custom", "function_call", "tool_call", "tool_use", "tool")
_ODD_NUMBER = re.compile(r"[0-9][.eE]|-0")
"""What numbers hold that can be written in several ways."""


class ForeignCall(NamedTuple):
    """A call of a source."""

    id: str
    """"" without one."""
    name: str
    arguments: str
    extra: Mapping[str, Any]
    """What a provider wants back with it."""


class Digits(str):
    """A number with the digits that it was written with."""

    __slots__ = ()


def parsed(text: str, place: str, *, keeps_digits: bool = False) -> Any:
    """A value that is written as JSON or as a literal of Python. Raises `Unreadable`.

    `keeps_digits`: numbers that are written in another way than Python does are `Digits`.
    """
    try:
        return _loads(text, keeps_digits=keeps_digits)
    except exact_json.JSONDecodeError as error:
        value = _literal(text)
        if value is None:
            raise Unreadable(f"{place}: not JSON: {error}") from error
        return value


def parsed_lines(text: str, place: str, *, keeps_digits: bool = False) -> list[Any]:
    """The values of a text: one list, or one value after the other. Raises `Unreadable`."""
    try:
        return [*_values(text, keeps_digits=keeps_digits)]
    except ValueError:
        value = parsed(text, place, keeps_digits=keeps_digits)
        return value if isinstance(value, list) else [value]


def json_text(value: Any) -> str:
    """A value of a source as JSON, as models read it."""
    return valid_utf8(_written(value))


def _written(value: Any) -> str:
    if isinstance(value, dict):
        members = (f"{_written(str(key))}: {_written(one)}" for key, one in value.items())
        return f"{{{', '.join(members)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_written, value))}]"
    return str(value) if isinstance(value, Digits) else json.dumps(value, ensure_ascii=False)


def tools_of(given: Any, place: str) -> list[dict[str, Any]]:
    """The schemas of tools: a list, one tool, or the text of either. Raises `Unreadable`."""
    if isinstance(given, str):
        given = parsed_lines(given, place) if given.strip() else []
        if len(given) == 1 and isinstance(given[0], list):
            (given,) = given
    if isinstance(given, dict):
        given = [given]
    if not isinstance(given, list):
        raise Unreadable(f"{place}: it must be a list of objects")
    tools = []
    for n, tool in enumerate(given):
        where = f"{place}[{n}]"
        tools.append(_tool(parsed(tool, where) if isinstance(tool, str) else tool, where))
    return tools


def _tool(tool: Any, place: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise Unreadable(f"{place}: it must be an object")
    if isinstance(custom := tool.get("custom"), dict):
        refuse_unknown(tool, ("type", "custom"), place)
        return _custom(custom, f"{place}.custom")
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
        return _custom(tool, place)
    else:
        _refuse_type(tool, _TOOL_TYPES, place)
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not name:
        raise Unreadable(f"{place}.name: it must be the name of a tool")
    if not isinstance(description, str | None):
        raise Unreadable(f"{place}.description: it must be text")
    found = [key for key in _SCHEMAS if function.get(key) is not None]
    if len(found) > 1:
        raise Unreadable(f"{place}.{found[1]}: the tool has {found[0]}, too")
    schema = function[found[0]] if found else None
    if isinstance(schema, str):
        schema = parsed(schema, f"{place}.{found[0]}")
    if not isinstance(schema, dict | None):
        raise Unreadable(f"{place}.{found[0]}: it must be an object")
    rest = {
        key: value
        for key, value in function.items()
        if key not in _SCHEMAS and (function is not tool or key != "type")
    }
    made = function_tool(name, description, schema)
    return {**made, "function": {**rest, **made["function"]}}


def _custom(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A tool whose input is free text. Raises `Unreadable` for a grammar of that text."""
    is_free = tool.get("format") in (None, {"type": "text"})
    refuse_unknown(tool, ("type", "name", "description", *(["format"] * is_free)), place)
    return custom_tool(tool)


def calls_of(given: Any, place: str) -> list[ForeignCall]:
    """The calls of a reply: a list, one call, or the text of either. Raises `Unreadable`."""
    if isinstance(given, str):
        given = parsed_lines(given, place, keeps_digits=True)
        if len(given) == 1 and isinstance(given[0], list):
            (given,) = given
    if isinstance(given, dict):
        given = [given]
    if not isinstance(given, list):
        raise Unreadable(f"{place}: it must be a list of calls")
    return [call_of(call, f"{place}[{n}]") for n, call in enumerate(given)]


def call_of(call: Any, place: str) -> ForeignCall:
    """A call, with its function inside it or not. Raises `Unreadable`."""
    if isinstance(call, str):
        call = parsed(call, place, keeps_digits=True)
    if not isinstance(call, dict):
        raise Unreadable(f"{place}: it must be an object")
    function, inside = call, place
    if isinstance(call.get("function"), dict):
        function, inside = call["function"], f"{place}.function"
        refuse_unknown(call, (*_OF_CALLS, "function"), place)
    elif isinstance(call.get("custom"), dict):
        function, inside = call["custom"], f"{place}.custom"
        refuse_unknown(call, (*_OF_CALLS, "custom"), place)
    _refuse_type(call, _CALL_TYPES, place)
    names = [key for key in ("name", "function", "tool_name") if isinstance(function.get(key), str)]
    if len(names) != 1 or not function[names[0]]:
        raise Unreadable(f"{inside}.name: it must be the name of a tool")
    found = [key for key in _ARGUMENTS if function.get(key) is not None]
    if len(found) > 1:
        raise Unreadable(f"{inside}.{found[1]}: the call has {found[0]}, too")
    own = _OF_CALLS if function is call else frozenset[str]()
    refuse_unknown(function, (*own, names[0], *_ARGUMENTS), inside)
    arguments = function[found[0]] if found else {}
    if function is not call and inside.endswith(".custom"):
        arguments = {"input": arguments or ""}
    ids = [call[key] for key in ("id", "call_id", "tool_call_id") if not is_blank(call.get(key))]
    return ForeignCall(
        str(ids[0]) if ids else "",
        function[names[0]],
        arguments if isinstance(arguments, str) else json_text(arguments),
        {} if is_blank(call.get("extra_content")) else {"extra_content": call["extra_content"]},
    )


def _refuse_type(value: Mapping[str, Any], known: Sequence[str], place: str) -> None:
    """Raise `Unreadable` for a kind of tool or call that may be read in another way."""
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
    """JSON values that follow each other. Raises `ValueError`."""
    decoder, at = json.JSONDecoder(), 0
    while text := text[at:].strip():
        _, at = decoder.raw_decode(text)
        yield _loads(text[:at], keeps_digits=keeps_digits)


def _literal(text: str) -> Any:
    """What a list or dict of Python says, as JSON has it; None where it is none."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not know
            value = ast.literal_eval(text.strip())
        # Tuples become lists; sets, bytes and complex numbers are no JSON.
        return exact_json.loads_with_valid_text(json.dumps(value, allow_nan=False))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
