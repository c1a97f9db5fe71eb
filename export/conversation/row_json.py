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
from typing import Any, NamedTuple

import orjson

from export.conversation.validity import Reason, Rejected
from toolsets.exact_json import has_long_digits, within_64_bits

_TEMPLATE_TAILS = r"[|｜][^|｜<>\s]{1,40}[|｜]>|(?:start|end)_of_turn>"
_CONTROL_TAILS = rf"{_TEMPLATE_TAILS}|/?s>|(?:bos|eos|pad|unk)>"

_CONTROL_TOKEN = re.compile(rf"<(?:{_CONTROL_TAILS})|\[/?INST\]")
"""What the tokenizers of known models read as one token of structure, wherever it stands."""

_TEMPLATE_TOKEN = re.compile(rf"<(?:{_TEMPLATE_TAILS})")
"""Those of them that nobody writes for anything else: the others are HTML, or words of a few."""

# A pattern that begins with one letter is searched for many times faster than one that begins
# with either of two, so these stand for parts of patterns. Brackets are more frequent than words
# in capitals.
_CONTROL_IN_ANGLES = re.compile(rf"<(?:{_CONTROL_TAILS})")
_CONTROL_IN_BRACKETS = re.compile(r"\[/?INST\]")
_END_IN_BRACKETS = re.compile(r"INST\]")

TOOL_CALL = re.compile(r"</?tool_call>")
TOOL_RESPONSE = re.compile(r"</?tool_response>")
"""The tags that chat templates put around calls and results."""

_STRUCTURE_IN_ANGLES = re.compile(rf"<(?:/?(?:tool_call|tool_response)>|{_CONTROL_TAILS})")

_MARKER_IN_ANGLES = re.compile(rf"<(?=/?(?:tool_call|tool_response|think|tools)>|{_CONTROL_TAILS})")
_MARKER_IN_BRACKETS = re.compile(r"\[(?=/?INST\])")
"""The start of a tag of the format or of a control token. In JSON it stands inside a string."""

_FEW = 16
"""As many places are looked at one by one faster than a pattern is searched for in a text."""

_MAX_DEPTH = 100
"""Deepest JSON that is written as JSON: widely used readers refuse more than 128 levels."""

_TOO_DEEP = f"nested deeper than {_MAX_DEPTH} levels"

_write_slowly = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False).encode
_write_compactly = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
).encode
"""What is parsed JSON holds no part of itself."""

_ROW_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_PASSTHROUGH_SUBCLASS

_SHORTEST = frozenset((str, int, bool, type(None)))
"""What is written in the shortest way that there is, which floats are not: `1e9`."""


class Repeated(str):
    """Text that stands in many rows, and is escaped once for all of them."""

    __slots__ = ("_json",)
    _json: orjson.Fragment

    def as_json(self) -> orjson.Fragment:
        """Its JSON. Raises TypeError for halves of surrogate pairs."""
        try:
            return self._json
        except AttributeError:
            self._json = orjson.Fragment(orjson.dumps(str(self)))
            return self._json


class _Digits(str):
    """A number in the digits it came in."""

    __slots__ = ()


def write_json(value: Any) -> str:
    """JSON text of a value as a model reads it: spaced, non-ASCII as it is.

    Raises ValueError for numbers that JSON has not.
    """
    return _text(value) if type(value) is str else _write_slowly(value)


def compact_json(value: Any) -> str:
    """JSON text that only programs read. No number of `value` may be infinite or none at all."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # halves of surrogate pairs, integers beyond 64 bits
        return _write_compactly(value)


def dumps_row(row: Mapping[str, Any]) -> bytes:
    """A row as one line of UTF-8 JSON; halves of surrogate pairs become U+FFFD.

    Its numbers are those of a record and of arguments, whose readers refuse what JSON has not.
    """
    try:
        return orjson.dumps(row, _json_of_repeated, _ROW_OPTIONS)
    except TypeError:  # halves of surrogate pairs, integers beyond 64 bits
        units = f"{_write_compactly(row)}\n".encode("utf-16-le", "surrogatepass")
        return units.decode("utf-16-le", "replace").encode()


def _json_of_repeated(value: Any) -> orjson.Fragment:
    if type(value) is not Repeated:
        raise TypeError(value)
    return value.as_json()


class Token(NamedTuple):
    """A token of structure in a text."""

    text: str
    is_markup: bool
    """It is structure to the tokenizers of some models alone, as `<s>` is to that of Llama 2."""


def control_token(text: str) -> Token | None:
    """A token of structure in a text, the first that is no markup; None where it holds none."""
    # The letters that tokens begin with are looked for first: most texts have neither.
    if ("<" in text and _has_in_angles(text, _CONTROL_IN_ANGLES)) or (
        "[" in text and _has_in_brackets(text)
    ):
        if found := _TEMPLATE_TOKEN.search(text):
            return Token(found[0], is_markup=False)
        if found := _CONTROL_TOKEN.search(text):
            return Token(found[0], is_markup=True)
    return None


def holds_structure(text: str) -> bool:
    """Whether a text holds a token of structure, or a tag of calls or results."""
    return ("<" in text and _has_in_angles(text, _STRUCTURE_IN_ANGLES)) or (
        "[" in text and _has_in_brackets(text)
    )


def _has_in_angles(text: str, pattern: re.Pattern[str]) -> bool:
    """Whether a text holds a match of a pattern that begins with an angle bracket."""
    at = text.find("<")
    for _ in range(_FEW):
        if at < 0:
            return False
        if pattern.match(text, at):
            return True
        at = text.find("<", at + 1)
    return at >= 0 and pattern.search(text, at) is not None


def _has_in_brackets(text: str) -> bool:
    return (
        _END_IN_BRACKETS.search(text) is not None and _CONTROL_IN_BRACKETS.search(text) is not None
    )


def read_arguments(call: Mapping[str, Any], *, where: str) -> tuple[str, Mapping[str, Any]]:
    """The arguments of a call: JSON text of an object, and its value; raises Rejected.

    The text has every number in the digits it came in. In the value an integer beyond 64 bits is
    the text of its digits: one alone would have loaders refuse the whole file, or round it. Blank
    arguments are an empty object.
    """
    sent = call["function"]["arguments"]
    if not sent.strip():
        return "{}", {}
    try:
        text, value = _respaced(sent)
    except ValueError as e:
        place = f"{where} ({call['function']['name']})"
        raise Rejected(Reason.ARGUMENTS_NOT_JSON, f"{place}: {e}") from e
    if not text.startswith("{"):
        place = f"{where} ({call['function']['name']})"
        raise Rejected(Reason.ARGUMENTS_NOT_OBJECT, f"{place}: {text[:40]!r}")
    if value is None:
        value = json.loads(text)
    return text, within_64_bits(value) if has_long_digits(text) else value


def content_json(text: str) -> str:
    """A result that is a JSON object or list as that value, any other as a JSON string."""
    if text.lstrip().startswith(("{", "[")):
        try:
            return _respaced(text)[0]
        except ValueError:
            pass
    return write_json(text)


def escape_markers(json_text: str) -> str:
    """JSON text in which no string holds a tag of the format, and that reads the same."""
    if "<" in json_text and _has_in_angles(json_text, _MARKER_IN_ANGLES):
        json_text = _MARKER_IN_ANGLES.sub(r"\\u003c", json_text)
    if "[" in json_text and _has_in_brackets(json_text):
        json_text = _MARKER_IN_BRACKETS.sub(r"\\u005b", json_text)
    return json_text


def _respaced(text: str) -> tuple[str, Any]:
    """JSON `text` with the separators of the format, every number in the digits it came in.

    Beside it stands its value, if that was found on the way. Raises ValueError for all that a
    strict reader refuses or reads differently: NaN, numbers out of range, repeated keys, too deep
    nesting.
    """
    # What a lax reader and a writer give back to the letter was strict: most of what there is.
    try:
        value = orjson.loads(text)
        spaced = _written(value)
    except (ValueError, TypeError):
        pass
    else:
        if spaced == text or _is_compact(text, value, spaced):
            return spaced, value
    try:
        return _written(_strict_decoder.decode(text)), None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def _is_compact(text: str, value: Any, spaced: str) -> bool:
    """Whether JSON `text` is what is written of its value, without the blanks of `spaced`."""
    if type(value) is dict and _SHORTEST.issuperset(map(type, value.values())):
        # All other spellings are longer: blanks, needless escapes, repeated keys, minus zero.
        return len(text) == len(spaced) - 2 * len(value) + 1
    return orjson.dumps(value).decode() == text


def _written(value: Any, depth: int = 1) -> str:
    """JSON of a value that is `depth` levels deep; raises ValueError where that is too deep."""
    kind = type(value)
    if kind is str:
        return _text(value)
    if kind is int:
        return str(value)
    if kind is _Digits:
        return str.__str__(value)
    if kind is dict:
        if depth > _MAX_DEPTH:
            raise ValueError(_TOO_DEEP)
        if not value:
            return "{}"
        parts = ["{"]  # joined once, for some are long
        for key, member in value.items():
            text = _text(member) if type(member) is str else _written(member, depth + 1)
            parts += (_key(key), text, ", ")
        parts[-1] = "}"
        return "".join(parts)
    if kind is list:
        if depth > _MAX_DEPTH:
            raise ValueError(_TOO_DEEP)
        return f"[{', '.join([_written(element, depth + 1) for element in value])}]"
    return orjson.dumps(value).decode()


@lru_cache(maxsize=4096)
def _key(key: str) -> str:
    return f"{_text(key)}: "


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
