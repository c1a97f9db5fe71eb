"""Reads JSON strictly and writes the JSON of rows, with one spacing and with tags escaped.

Keys keep their order and numbers their digits. Text that a strict reader would refuse, or read
differently, does not count as JSON.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import orjson

from batch_trajectories.basics.exact_json import has_long_digits, stringify_large_integers
from batch_trajectories.export.conversation.validity import Reason, Rejected
from batch_trajectories.records.record_types import StoredCall

_TEMPLATE_TAILS = r"[|｜][^|｜<>\s]{1,40}[|｜]>|(?:start|end)_of_turn>"
_CONTROL_TAILS = rf"{_TEMPLATE_TAILS}|/?s>|(?:bos|eos|pad|unk)>"

_CONTROL_TOKEN = re.compile(rf"<(?:{_CONTROL_TAILS})|\[/?INST\]")
"""Control tokens of known models' tokenizers, wherever they are in a text."""

_TEMPLATE_TOKEN = re.compile(rf"<(?:{_TEMPLATE_TAILS})")
"""Control tokens with no other meaning; the others are HTML or plain words too."""

# Searching for a pattern with one first letter is many times faster than for one with two, so the
# patterns are split. Brackets are more frequent than words in capitals.
_CONTROL_IN_ANGLES = re.compile(rf"<(?:{_CONTROL_TAILS})")
_CONTROL_IN_BRACKETS = re.compile(r"\[/?INST\]")
_END_IN_BRACKETS = re.compile(r"INST\]")

TOOL_CALL = re.compile(r"</?tool_call>")
TOOL_RESPONSE = re.compile(r"</?tool_response>")
"""Tags that chat templates put around results; `TOOL_CALL` has those around calls."""

MARKER = re.compile(r"</?(?:tool_call|tool_response|think|(?i:reasoning_scratchpad))>")
"""A tag that, in a model's own text, would be read as structure or reasoning."""

_STRUCTURE_IN_ANGLES = re.compile(rf"<(?:/?(?:tool_call|tool_response)>|{_CONTROL_TAILS})")

_MARKER_IN_ANGLES = re.compile(rf"<(?=/?(?:tool_call|tool_response|think|tools)>|{_CONTROL_TAILS})")
_MARKER_IN_BRACKETS = re.compile(r"\[(?=/?INST\])")
"""The start of a tag of the format or of a control token; in JSON it is inside a string."""

_MAX_PLACES = 16
"""Maximum places that are checked one by one; beyond it one search by pattern is faster."""

_MAX_DEPTH = 100
"""Maximum depth of JSON: widely used readers refuse more than 128 levels."""

_TOO_DEEP = f"nested deeper than {_MAX_DEPTH} levels"

_write_slowly = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False).encode
_write_compactly = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
).encode
"""Parsed JSON has no circular references."""

_ROW_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_PASSTHROUGH_SUBCLASS

_LINE_ENDS = {char.encode(): json.dumps(char)[1:-1].encode() for char in "\x85\u2028\u2029"}
"""Characters that end a line for `str.splitlines`, by which some trainers read JSON lines, each
with its escape. JSON itself escapes all other such characters."""

_ATOMIC_TYPES = frozenset((str, int, bool, type(None)))
"""Types whose values have one shortest spelling, unlike floats (`1e9`)."""

_STRINGS = frozenset((str,))


class SharedText(str):
    """Text that many rows share, so that it is escaped only once."""

    __slots__ = ("_json",)
    _json: orjson.Fragment

    def __reduce__(self) -> tuple[type[SharedText], tuple[str]]:
        return SharedText, (str(self),)  # other processes escape it themselves

    def as_json(self) -> orjson.Fragment:
        """The JSON of this text. Raises TypeError for halves of surrogate pairs."""
        try:
            return self._json
        except AttributeError:
            self._json = orjson.Fragment(orjson.dumps(str(self)))
            return self._json


class _Digits(str):
    """A number with its original digits."""

    __slots__ = ()


def write_json(value: Any) -> str:
    """The JSON of a value as models read it: with spaces, non-ASCII text unescaped.

    Raises ValueError for NaN and infinity.
    """
    return _string_json(value) if type(value) is str else _write_slowly(value)


def compact_json(value: Any) -> str:
    """The compact JSON of a value, for programs. `value` must not hold NaN or infinity."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # halves of surrogate pairs, integers beyond 64 bits
        return _write_compactly(value)


def dumps_row(row: Mapping[str, Any]) -> bytes:
    """A row as one line of UTF-8 JSON; halves of surrogate pairs become U+FFFD."""
    # A row holds no NaN or infinity: the readers of records and arguments refuse them.
    try:
        line = orjson.dumps(row, _json_of_repeated, _ROW_OPTIONS)
    except TypeError:  # halves of surrogate pairs, integers beyond 64 bits
        units = f"{_write_compactly(row)}\n".encode("utf-16-le", "surrogatepass")
        line = units.decode("utf-16-le", "replace").encode()
    if not line.isascii():  # a fiftieth of the time of these searches
        for char, escaped in _LINE_ENDS.items():
            line = line.replace(char, escaped)
    return line


def _json_of_repeated(value: Any) -> orjson.Fragment:
    if type(value) is not SharedText:
        raise TypeError(value)
    return value.as_json()


class Token(NamedTuple):
    """A control token in a text."""

    text: str
    is_markup: bool
    """True for a token that only some tokenizers know, such as `<s>` of Llama 2."""


def control_token(text: str) -> Token | None:
    """The first control token in a text, preferably one that is not markup; None without any."""
    # Most texts have none of the characters with which tokens begin.
    if ("<" in text and _has_in_angles(text, _CONTROL_IN_ANGLES)) or (
        "[" in text and _has_in_brackets(text)
    ):
        if match := _TEMPLATE_TOKEN.search(text):
            return Token(match[0], is_markup=False)
        if match := _CONTROL_TOKEN.search(text):
            return Token(match[0], is_markup=True)
    return None


def holds_structure(text: str) -> bool:
    """Whether a text holds a control token, or a tag of calls or results."""
    return ("<" in text and _has_in_angles(text, _STRUCTURE_IN_ANGLES)) or (
        "[" in text and _has_in_brackets(text)
    )


def holds_marker(text: str) -> bool:
    """Whether a text holds a control token, or a tag that is structure or reasoning."""
    return ("<" in text and MARKER.search(text) is not None) or control_token(text) is not None


def _has_in_angles(text: str, pattern: re.Pattern[str]) -> bool:
    """Whether a text holds a match of a pattern that begins with an angle bracket."""
    at = text.find("<")
    for _ in range(_MAX_PLACES):
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


def read_arguments(call: StoredCall, *, where: str) -> tuple[str, Mapping[str, Any]]:
    """The arguments of a call: the JSON text of an object, and its value. Raises Rejected.

    Numbers in the text keep their digits. In the value, an integer beyond 64 bits is a string of
    its digits, as loaders would round it or refuse the whole file. Blank arguments are an empty
    object.
    """
    try:
        return parse_arguments(call.function.arguments)
    except ValueError as e:
        is_json = isinstance(e, _NotAnObject)
        raise Rejected(
            Reason.ARGUMENTS_NOT_OBJECT if is_json else Reason.ARGUMENTS_NOT_JSON,
            f"{where} ({call.function.name}): {e}",
        ) from e


class _NotAnObject(ValueError):
    """Arguments that are JSON, but not an object."""


def parse_arguments(sent: str) -> tuple[str, Mapping[str, Any]]:
    """Read the text of arguments as `read_arguments` does; raises ValueError."""
    if not sent or sent.isspace():
        return "{}", {}
    text, value = _respace(sent)
    if not text.startswith("{"):
        raise _NotAnObject(repr(text[:40]))
    if value is None:
        value = json.loads(text)
    elif _STRINGS.issuperset(map(type, value.values())):
        return text, value
    return text, stringify_large_integers(value) if has_long_digits(text) else value


def is_object(sent: str) -> bool:
    """Whether the text of arguments is a JSON object."""
    try:
        parse_arguments(sent)
    except ValueError:
        return False
    return True


def content_json(text: str) -> str:
    """The JSON of a result: an object or list as it is, any other text as a string."""
    if text.lstrip().startswith(("{", "[")):
        try:
            return _respace(text)[0]
        except ValueError:
            pass
    return write_json(text)


def escape_markers(json_text: str) -> str:
    """Escape the tags of the format in the strings of JSON, which keeps its meaning."""
    if "<" in json_text and _has_in_angles(json_text, _MARKER_IN_ANGLES):
        json_text = _MARKER_IN_ANGLES.sub(r"\\u003c", json_text)
    if "[" in json_text and _has_in_brackets(json_text):
        json_text = _MARKER_IN_BRACKETS.sub(r"\\u005b", json_text)
    return json_text


def _respace(text: str) -> tuple[str, Any]:
    """JSON `text` with the separators of the format, and its value; numbers keep their digits.

    The value is None if only the text was computed. Raises ValueError for text that a strict reader
    refuses or reads differently: NaN, numbers out of range, repeated keys, too deep nesting.
    """
    # Text that orjson reads and writes back unchanged is strict; that is the usual case.
    try:
        value = orjson.loads(text)
        spaced = _write_exactly(value)
    except (ValueError, TypeError):
        pass
    else:
        if spaced == text or _is_compact(text, value, spaced):
            return spaced, value
    try:
        return _write_exactly(_strict_decoder.decode(text)), None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def _is_compact(text: str, value: Any, spaced: str) -> bool:
    """Whether JSON `text` is the compact form of its value; `spaced` is the form with spaces."""
    if type(value) is dict and _ATOMIC_TYPES.issuperset(map(type, value.values())):
        # Any other spelling is longer: blanks, needless escapes, repeated keys, minus zero.
        return len(text) == len(spaced) - 2 * len(value) + 1
    return orjson.dumps(value).decode() == text


def _write_exactly(value: Any, depth: int = 1) -> str:
    """The JSON of a value at a nesting `depth`; raises ValueError if it is too deep."""
    kind = type(value)
    if kind is str:
        return _string_json(value)
    if kind is int:
        return str(value)
    if kind is _Digits:
        return str.__str__(value)
    if kind is dict:
        if depth > _MAX_DEPTH:
            raise ValueError(_TOO_DEEP)
        if not value:
            return "{}"
        parts = ["{"]  # joined once, as some are long
        for key, member in value.items():
            text = (
                _string_json(member) if type(member) is str else _write_exactly(member, depth + 1)
            )
            parts += (_key_json(key), text, ", ")
        parts[-1] = "}"
        return "".join(parts)
    if kind is list:
        if depth > _MAX_DEPTH:
            raise ValueError(_TOO_DEEP)
        return f"[{', '.join([_write_exactly(element, depth + 1) for element in value])}]"
    return orjson.dumps(value).decode()


@lru_cache(maxsize=4096)
def name_json(name: str) -> str:
    """The JSON of a name, which many texts repeat."""
    return _string_json(name)


@lru_cache(maxsize=4096)
def _key_json(key: str) -> str:
    return f"{_string_json(key)}: "


def _string_json(text: str) -> str:
    # Both libraries write the same; orjson is faster.
    try:
        return orjson.dumps(text).decode()
    except (TypeError, UnicodeDecodeError):  # halves of surrogate pairs
        return _write_slowly(text)


def _parse_float(digits: str) -> _Digits:
    if math.isinf(float(digits)):
        raise ValueError(f"number out of range: {digits[:40]}")
    return _Digits(digits)


def _parse_int(digits: str) -> int | _Digits:
    return _Digits(digits) if digits == "-0" else int(digits)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _parse_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("an object repeats a key")
    return members


_strict_decoder = json.JSONDecoder(
    parse_float=_parse_float,
    parse_int=_parse_int,
    parse_constant=_refuse_constant,
    object_pairs_hook=_parse_object,
)
