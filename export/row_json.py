"""JSON as it stands in a row: read strictly, written in one spacing, never taken for a tag.

What a model or a tool wrote keeps its order and its digits; what a strict reader would refuse or
read differently is not JSON here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

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

_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))

write_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
"""JSON text of a value, non-ASCII as it is; raises ValueError for numbers that JSON has not."""


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
        _strict_decoder.decode(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    pieces = _pieces(text)
    structure = '"'.join(pieces[::2])
    if _is_too_deep(structure):
        raise ValueError(_TOO_DEEP)
    for white in " \t\n\r":
        structure = structure.replace(white, "")
    pieces[::2] = structure.replace(",", ", ").replace(":", ": ").split('"')
    if "\\u" in text or "\\/" in text:  # every other escape is written as it came
        strings = '","'.join(pieces[1::2])
        pieces[1::2] = _pieces(write_json(json.loads(f'["{_reveal(strings)}"]')))[1::2]
    return _reveal('"'.join(pieces))


def _pieces(json_text: str) -> list[str]:
    """Valid JSON cut at its quotes: strings at the odd places, what is between them at the even.

    Escaped backslashes and quotes are hidden behind control characters, which JSON cannot hold.
    """
    return json_text.replace("\\\\", "\0").replace('\\"', "\1").split('"')


def _reveal(hidden: str) -> str:
    return hidden.replace("\1", '\\"').replace("\0", "\\\\")


def _is_too_deep(structure: str) -> bool:
    brackets = structure.encode().translate(_SQUARE, _NO_BRACKETS)
    for _ in range(_MAX_DEPTH):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")  # the innermost level, everywhere at once
    return bool(brackets)


def _finite(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"number out of range: {digits[:40]}")
    return number


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("an object repeats a key")
    return members


_strict_decoder = json.JSONDecoder(
    parse_float=_finite, parse_constant=_refuse_constant, object_pairs_hook=_object
)
