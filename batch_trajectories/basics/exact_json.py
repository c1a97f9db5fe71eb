"""JSON that keeps integers exact, whatever their size; and how deep JSON is nested.

orjson silently reads integers beyond 64 bits as floats and refuses to write them. Only values with
such integers are read and written by slower code here; orjson does the rest.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import chain
from typing import Any

import orjson

from batch_trajectories.basics.text import valid_utf8

JSONDecodeError = orjson.JSONDecodeError

MAX_NESTING = 100
"""Deepest JSON that is accepted from a dataset or an endpoint. orjson does not write more than
about 250 levels, and widely used readers of training files refuse 128."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
"""A JSON string. Possessive: backtracking would take a hundred times the memory of the text."""
_BRACES = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))

_DIGITS = 19
_LONG_INTEGER = re.compile(rb"(?<![0-9A-Za-z_.\"])[0-9]{%d}" % _DIGITS)
"""19 digits that may belong to an integer, not to a fraction (0.0001239776611328125) or a name."""
_DIGIT_RUN = re.compile(rb"[0-9]+")
_SAMPLE_STEP = 6
_MIN_CHECKS = 16
"""Number of candidates up to which checking each is faster than scanning the whole text."""
_DIGITS_AS_ZERO = bytes(ord("0") if byte in b"0123456789" else byte for byte in range(256))

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")

_INT64 = range(-(2**63), 2**63)
_64_BITS = range(-(2**63), 2**64)


def loads(text: str | bytes) -> Any:
    """Read JSON as `orjson.loads` does, but keep integers exact.

    Raises `JSONDecodeError` for what orjson refuses, and for integers of more digits than Python
    converts (4,300).
    """
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if not has_long_digits(text):
            raise
        try:
            value = loads_with_surrogates(text)
            dumps(value)  # refuses what JSON cannot hold, such as half an emoji
        except (ValueError, TypeError, RecursionError):
            raise error from None  # the length of an integer was not the only reason
        return value
    return loads_with_surrogates(text) if has_long_digits(text) else value


def dumps(value: Any, *, option: int | None = None) -> bytes:
    """Write JSON as `orjson.dumps` does, with integers of any size. Raises `TypeError`."""
    try:
        return orjson.dumps(value, option=option)
    except TypeError:
        try:
            return orjson.dumps(_with_long_integers(value), option=option)
        except (ValueError, RecursionError) as error:
            raise TypeError(str(error)) from error


def loads_leniently(body: bytes) -> Any:
    """Read a paid reply that is not quite JSON, as some servers send it.

    Half an emoji and bytes that are not UTF-8 become U+FFFD; a number that is out of range (NaN,
    1e400) becomes its text; control characters in texts are kept. Raises `ValueError` and
    `RecursionError`.
    """
    return _with_valid_text(_lenient_decoder.decode(body.decode(errors="replace")))


def loads_part(text: str) -> Any:
    """Read a part of a stream; half an emoji is kept, since the other half may follow.

    Control characters in texts are kept, too. Raises `ValueError` and `RecursionError`.
    """
    return _part_decoder.decode(text)


def loads_with_surrogates(text: str | bytes) -> Any:
    """Read JSON as `loads` does, but accept half an emoji."""
    try:
        return _exact_decoder.decode(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError) as error:
        raise orjson.JSONDecodeError(str(error), "", 0) from None


def loads_with_valid_text(text: str | bytes) -> Any:
    """Read JSON as `loads` does; half an emoji, as programs write that cut texts, becomes U+FFFD.

    Raises `JSONDecodeError`.
    """
    try:
        return loads(text)
    except orjson.JSONDecodeError as error:
        try:
            value = _with_valid_text(loads_with_surrogates(text))
            dumps(value)  # refuses a nesting that reading takes
        except (ValueError, TypeError, RecursionError):
            raise error from None  # half an emoji was not the only reason
        return value


def dumps_with_surrogates(value: Any) -> bytes:
    """Write JSON whose texts may hold half an emoji, in ASCII."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def is_nested_too_deep(json_text: bytes) -> bool:
    """Whether JSON is nested deeper than `MAX_NESTING`; nearly free if it has few brackets."""
    if json_text.count(b"[") + json_text.count(b"{") <= MAX_NESTING:
        return False
    brackets = _STRING.sub(b"", json_text).translate(_BRACES, _NO_BRACKETS)
    # Each round removes the innermost level, everywhere at once.
    for _ in range(MAX_NESTING):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def repeated_key_path(text: bytes) -> str | None:
    """The path of a key that an object in JSON has twice, such as `messages[0].content`.

    `text` must be valid JSON. This is slower than `loads`, which takes the last value of such a
    key. None if no key is repeated.
    """
    if is_nested_too_deep(text):
        return None
    repeated: dict[int, tuple[dict[str, Any], str]] = {}  # kept, so that no other has its id

    def read(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            keys = [key for key, _ in pairs]
            repeated[id(made)] = made, next(key for key in keys if keys.count(key) > 1)
        return made

    inside: list[tuple[str, Any]] = [("", json.loads(text, object_pairs_hook=read))]
    while inside:
        place, value = inside.pop()
        if isinstance(value, list):
            inside += [(f"{place}[{n}]", one) for n, one in enumerate(value)][::-1]
        elif isinstance(value, dict):
            before = f"{place}." if place else ""
            if id(value) in repeated:
                return before + repeated[id(value)][1]
            inside += [(before + key, one) for key, one in value.items()][::-1]
    return None


def repeated_key(content: bytes, read: Mapping[str, Any]) -> str | None:
    """A key that a JSON object, or an object directly in it, has twice; None if there is none.

    `read` is `content` as it was read, with only one of the two values.
    """
    inner = (value for value in read.values() if isinstance(value, dict))
    written = (b'"%b"' % key.encode() for key in chain(read, *inner))
    # Most keys are written once, and nowhere else: to scan a body takes milliseconds.
    if b"\\u00" not in content and all(content.count(key) == 1 for key in written):
        return None
    return _repeated_key(content.decode(), levels=2)


def _repeated_key(text: str, *, levels: int) -> str | None:
    keys: set[str] = set()
    at = text.index("{") + 1
    while (at := _skip_space(text, at)) < len(text) and text[at] == '"':
        key, at = _DECODER.raw_decode(text, at)
        if key in keys:
            return str(key)
        keys.add(key)
        at = _skip_space(text, _skip_space(text, at) + 1)
        value, end = _DECODER.raw_decode(text, at)
        has_more = levels > 1 and isinstance(value, dict)
        if has_more and (inner := _repeated_key(text[at:end], levels=levels - 1)) is not None:
            return inner
        at = _skip_space(text, end) + 1
    return None


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def objects_among(value: Any) -> list[dict[str, Any]]:
    """The objects in a list; none of anything else."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def infinite_number_in(value: Any) -> str | None:
    """The place of a NaN or an infinity in a value, such as `a[0].b is nan`; None if it has none.

    JSON has no such number, and orjson writes null in its place.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return f"it is {value}"
    inside: list[tuple[str, Any]] = [("", value)]
    seen: set[int] = set()  # a value may hold itself
    while inside:
        place, value = inside.pop()
        if isinstance(value, dict | list | tuple):
            if id(value) in seen:
                continue
            seen.add(id(value))
        if isinstance(value, Enum):
            inside.append((place, value.value))
        elif isinstance(value, float):
            if not math.isfinite(value):
                return f"{place} is {value}"
        elif isinstance(value, dict):
            before = f"{place}." if place else ""
            for key, member in reversed(value.items()):
                if isinstance(key, float) and not math.isfinite(key):
                    return f"a key is {key}"
                inside.append((f"{before}{key}", member))
        elif isinstance(value, list | tuple):
            inside += [(f"{place}[{n}]", one) for n, one in enumerate(value)][::-1]
        elif is_dataclass(value) and not isinstance(value, type):
            before = f"{place}." if place else ""
            members = [(field.name, getattr(value, field.name, None)) for field in fields(value)]
            inside += [(before + name, member) for name, member in reversed(members)]
    return None


def stringify_large_integers(value: Any) -> Any:
    """Replace each integer in a value beyond signed 64 bits by the text of its digits."""
    if isinstance(value, dict):
        return {key: stringify_large_integers(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [stringify_large_integers(member) for member in value]
    return str(value) if type(value) is int and value not in _INT64 else value


def has_long_digits(text: str | bytes) -> bool:
    """Whether there may be an integer of 19 digits or more, as every one beyond 64 bits is."""
    if len(text) < _DIGITS:
        return False
    raw = text.encode(errors="replace") if isinstance(text, str) else text
    # Every sixth byte: a run of 19 digits shows at least three of them, and all 13 bytes from the
    # first of these to the last are digits, which is rare in floats. Scanning all bytes would cost
    # several times as much as reading the JSON.
    sample = raw[::_SAMPLE_STEP].translate(_DIGITS_AS_ZERO)
    at = sample.find(b"000")
    looks = max(_MIN_CHECKS, len(raw) >> 8)
    while at >= 0 and looks:
        first = at * _SAMPLE_STEP
        if raw[first : first + 2 * _SAMPLE_STEP + 1].isdigit() and _LONG_INTEGER.search(
            raw, max(0, first - _SAMPLE_STEP), first + 2 * _DIGITS
        ):
            return True
        looks -= 1
        if not looks:
            return _holds_long_integer(raw)
        at = sample.find(b"000", at + 1)
    return False


def _holds_long_integer(raw: bytes) -> bool:
    """Do the check of `has_long_digits` for a text with many digits: look at all bytes."""
    digits = raw.translate(_DIGITS_AS_ZERO)
    at = digits.find(b"0" * _DIGITS)
    while at >= 0:
        if _LONG_INTEGER.match(raw, at):
            return True
        at = digits.find(b"0" * _DIGITS, _DIGIT_RUN.match(raw, at).end())  # type: ignore[union-attr]
    return False


def _with_long_integers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_long_integers(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_with_long_integers(member) for member in value]
    if type(value) is int and value not in _64_BITS:
        return orjson.Fragment(str(value))
    return value


def _with_valid_text(value: Any) -> Any:
    if isinstance(value, str):
        return valid_utf8(value)
    if isinstance(value, dict):
        return {valid_utf8(key): _with_valid_text(member) for key, member in value.items()}
    if isinstance(value, list):
        return [_with_valid_text(member) for member in value]
    return value


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"number out of range: {digits[:40]}")
    return number


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _float_or_text(digits: str) -> float | str:
    number = float(digits)
    return digits if math.isinf(number) else number


def _integer_or_text(digits: str) -> int | str:
    try:
        return int(digits)
    except ValueError:  # more digits than Python converts
        return digits


_exact_decoder = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse_constant)
_lenient_decoder = json.JSONDecoder(
    parse_float=_float_or_text, parse_int=_integer_or_text, parse_constant=str, strict=False
)
_part_decoder = json.JSONDecoder(parse_constant=str, strict=False)
