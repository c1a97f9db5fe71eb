"""JSON in which an integer keeps all its digits, however many they are.

orjson reads integers beyond 64 bits as floats without a word and refuses to write them. It does all
the work here too, except where such an integer is there.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import orjson

JSONDecodeError = orjson.JSONDecodeError

_DIGITS = 19
_LONG = re.compile(rb"(?<![0-9A-Za-z_.\"])[0-9]{%d}" % _DIGITS)
"""Digits that can be an integer: not those of a fraction (0.0001239776611328125) or of a name."""
_RUN = re.compile(rb"[0-9]+")
_STEP = 6
_FEW = 16
"""As many places are looked at one by one faster than all of a text."""
_DIGITS_AS_ZERO = bytes(ord("0") if byte in b"0123456789" else byte for byte in range(256))

_INT64 = range(-(2**63), 2**63)
_64_BITS = range(-(2**63), 2**64)


def loads(text: str | bytes) -> Any:
    """Read JSON as `orjson.loads` does, but integers as what they are.

    Raises `JSONDecodeError` for what orjson refuses, and for integers of more digits than Python
    converts (4,300).
    """
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if not has_long_digits(text):
            raise
        try:
            return _checked(_read_slowly(text))
        except (ValueError, TypeError, RecursionError):
            raise error from None  # it was not, or not only, for the length of an integer
    return _read_slowly(text) if has_long_digits(text) else value


def dumps(value: Any, *, option: int | None = None) -> bytes:
    """Write JSON as `orjson.dumps` does, and integers of any size. Raises `TypeError` as that."""
    try:
        return orjson.dumps(value, option=option)
    except TypeError:
        try:
            return orjson.dumps(_with_long_integers(value), option=option)
        except (ValueError, RecursionError) as error:
            raise TypeError(str(error)) from error


def loads_leniently(body: bytes) -> Any:
    """Read JSON, and what some servers send as such, for what was paid for must not be lost.

    A half of an emoji becomes U+FFFD, and a number that none of ours can hold (NaN, 1e400) the text
    that it was written as. Raises `ValueError` and `RecursionError`.
    """
    return _mended(_lenient_decoder.decode(body.decode()))


def loads_part(text: str) -> Any:
    """Read a part of a stream, in which halves of an emoji stay until both are there.

    Raises `ValueError` and `RecursionError`.
    """
    return _part_decoder.decode(text)


def loads_with_halves(text: str) -> Any:
    """Read JSON as `loads`, with the halves of emoji that are in it."""
    return _read_slowly(text)


def within_64_bits(value: Any) -> Any:
    """The value with each integer that no signed 64 bits hold as the text of its digits."""
    if isinstance(value, dict):
        return {key: within_64_bits(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [within_64_bits(member) for member in value]
    return str(value) if type(value) is int and value not in _INT64 else value


def has_long_digits(text: str | bytes) -> bool:
    """Whether there may be an integer of 19 digits or more, as every one beyond 64 bits is."""
    if len(text) < _DIGITS:
        return False
    raw = text.encode(errors="replace") if isinstance(text, str) else text
    # Every sixth byte shows three digits of such a run; a look at all bytes costs several times as
    # much as to read the JSON.
    sample = raw[::_STEP].translate(_DIGITS_AS_ZERO)
    at = -1
    for _ in range(_FEW):
        at = sample.find(b"000", at + 1)
        if at < 0:
            return False
        if _LONG.search(raw, max(0, at * _STEP - _DIGITS), at * _STEP + 2 * _DIGITS):
            return True
    digits = raw.translate(_DIGITS_AS_ZERO)
    at = digits.find(b"0" * _DIGITS)
    while at >= 0:
        if _LONG.match(raw, at):
            return True
        at = digits.find(b"0" * _DIGITS, _RUN.match(raw, at).end())  # type: ignore[union-attr]
    return False


def _read_slowly(text: str | bytes) -> Any:
    try:
        return _exact_decoder.decode(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError) as error:
        raise orjson.JSONDecodeError(str(error), "", 0) from None


def _checked(value: Any) -> Any:
    """The value; raises `TypeError` where it holds what JSON cannot, such as half an emoji."""
    dumps(value)
    return value


def _with_long_integers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_long_integers(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_with_long_integers(member) for member in value]
    if type(value) is int and value not in _64_BITS:
        return orjson.Fragment(str(value))
    return value


def _mended(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_mended(key): _mended(member) for key, member in value.items()}
    if isinstance(value, list):
        return [_mended(member) for member in value]
    return value


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"number out of range: {digits[:40]}")
    return number


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _float_or_text(digits: str) -> float | str:
    number = float(digits)
    return digits if math.isinf(number) else number


def _integer_or_text(digits: str) -> int | str:
    try:
        return int(digits)
    except ValueError:  # more digits than Python converts
        return digits


_exact_decoder = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse)
_lenient_decoder = json.JSONDecoder(
    parse_float=_float_or_text, parse_int=_integer_or_text, parse_constant=str
)
_part_decoder = json.JSONDecoder(parse_constant=str)
