"""JSON as it stands in a row: read strictly, written in one spacing, never taken for a tag.

What a model or a tool wrote keeps its order and its digits; what a strict reader would refuse or
read differently is not JSON here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import orjson

from export.row_rules import Reason, Rejected

_CONTROL_TAILS = r"[|｜][^|｜<>\s]{1,40}[|｜]>|(?:start|end)_of_turn>|/?s>|(?:bos|eos|pad|unk)>"

CONTROL_TOKEN = re.compile(rf"<(?:{_CONTROL_TAILS})|\[/?INST\]")
"""What the tokenizers of known models read as one token of structure, wherever it stands."""

TOOL_CALL = re.compile(r"</?tool_call>")
TOOL_RESPONSE = re.compile(r"</?tool_response>")
"""The tags that chat templates put around calls and results."""

_MARKER_IN_JSON = re.compile(
    rf"<(?=/?(?:tool_call|tool_response|think|tools)>|{_CONTROL_TAILS})|\[(?=/?INST\])"
)
"""The start of a tag of the format or of a control token. In JSON it stands inside a string."""

_MAX_DEPTH = 100
"""Deepest JSON that is written as JSON: widely used readers refuse more than 128 levels."""

_TOO_DEEP = f"nested deeper than {_MAX_DEPTH} levels"

_write_slowly = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


class _Digits(str):
    """A number in the digits it came in."""

    __slots__ = ()


def write_json(value: Any) -> str:
    """JSON text of a value, non-ASCII as it is; raises ValueError for numbers that JSON has not."""
    return _written(value, 0)


def arguments_json(call: Mapping[str, Any], *, where: str) -> str:
    """The arguments of a call as a JSON object, blank ones as an empty one; raises Rejected."""
    sent = call["function"]["arguments"]
    if not sent.strip():
        return "{}"
    place = f"{where} ({call['function']['name']})"
    try:
        arguments = _respaced_json(sent)
    except ValueError as e:
        raise Rejected(Reason.ARGUMENTS_NOT_JSON, f"{place}: {e}") from e
    if not arguments.startswith("{"):
        raise Rejected(Reason.ARGUMENTS_NOT_OBJECT, f"{place}: {arguments[:40]!r}")
    return arguments


def content_json(text: str) -> str:
    """A result that is a JSON object or list as that value, any other as a JSON string."""
    if text.lstrip().startswith(("{", "[")):
        try:
            return _respaced_json(text)
        except ValueError:
            pass
    return write_json(text)


def escape_markers(json_text: str) -> str:
    """JSON text in which no string holds a tag of the format, and that reads the same."""
    if "<" not in json_text and "INST]" not in json_text:
        return json_text
    return _MARKER_IN_JSON.sub(_escaped, json_text)


def _escaped(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


def _respaced_json(text: str) -> str:
    """JSON `text` with the separators of the format, every number in the digits it came in.

    Raises ValueError for all that a strict reader refuses or reads differently: NaN, numbers out
    of range, repeated keys, too deep nesting.
    """
    try:
        return _written(_strict_decoder.decode(text), 1)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def _written(value: Any, depth: int) -> str:
    """JSON of a value; `depth` is that of the value, or 0 where depth does not count."""
    kind = type(value)
    if kind is str:
        return _text(value)
    if kind is int:
        return str(value)
    if kind is _Digits:
        return str.__str__(value)
    if kind is dict:
        inner = _deeper(depth)
        members = [f"{_key(key)}: {_written(member, inner)}" for key, member in value.items()]
        return f"{{{', '.join(members)}}}"
    if kind is list:
        inner = _deeper(depth)
        return f"[{', '.join([_written(element, inner) for element in value])}]"
    return _write_slowly(value)


@lru_cache(maxsize=4096)
def _key(key: str) -> str:
    return _text(key)


def _deeper(depth: int) -> int:
    if depth > _MAX_DEPTH:
        raise ValueError(_TOO_DEEP)
    return depth + 1 if depth else 0


def _text(text: str) -> str:
    """A string as JSON; orjson and the standard library write it alike, the former faster."""
    try:
        return orjson.dumps(text).decode()
    except (TypeError, UnicodeDecodeError):  # halves of surrogate pairs
        return _write_slowly(text)


def _finite(digits: str) -> _Digits:
    if math.isinf(float(digits)):
        raise ValueError(f"number out of range: {digits[:40]}")
    return _Digits(digits)


def _integer(digits: str) -> int | _Digits:
    return _Digits(digits) if digits == "-0" else int(digits)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("an object repeats a key")
    return members


_strict_decoder = json.JSONDecoder(
    parse_float=_finite,
    parse_int=_integer,
    parse_constant=_refuse_constant,
    object_pairs_hook=_object,
)
