"""Checks values: patterns, paths and URLs; describes what pydantic rejected."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PosixPath
from typing import Annotated, Any, Final, NamedTuple
from urllib.parse import unquote

from pydantic import AfterValidator, ValidationError
from pydantic_core import PydanticCustomError

from batch_trajectories.basics.text import clip

_MAX_VALUE_CHARS = 200

UNKNOWN_KEY = "extra_forbidden"
"""The kind of a mistake: no field has that name."""

HOLDS_SECRET: Final = "holds_secret"
"""The kind of a mistake: the value must not be shown, since it may contain a secret."""


def _check_pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return value


Pattern = Annotated[str, AfterValidator(_check_pattern)]
"""A regular expression that can be compiled."""


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
"""`Path` leaves one of the two slashes. A directory of such a name is `./s3:/...`."""

_BUCKET = re.compile(r"(?:s3|gs|az)://[^/@?#\s]+(?:/[^@?#\s]*)?|file:///[^?#]+")

_FORMS = "s3://BUCKET/PATH, gs://BUCKET/PATH, az://CONTAINER/PATH or file:///PATH"


class UrlPath(PosixPath):
    """A URL in place of a path. It keeps both slashes, and names no file of this machine."""

    def __str__(self) -> str:
        return _SCHEME.sub(r"\1://", super().__str__(), count=1)


def is_url(value: object) -> bool:
    """Whether a value is a text that begins as a URL does."""
    return isinstance(value, str) and _SCHEME.match(value) is not None


def bucket_url(value: str) -> str:
    """Return the URL of a bucket or directory. Raises `ValueError`; keys in it are refused."""
    if _BUCKET.fullmatch(value) is None:
        raise PydanticCustomError(
            HOLDS_SECRET,
            f"must be {_FORMS}, without keys: these come from the environment, as "
            "AWS_ACCESS_KEY_ID",
        )
    return value


def path_or_url(value: Path) -> Path:
    """Make a path that is the URL of a bucket a `UrlPath`, and a file URL a plain path.

    Other paths stay. Raises `ValueError`.
    """
    if not is_url(text := str(value)):
        return value
    scheme, path = text.split(":", 1)
    slashes = "///" if scheme == "file" else "//"
    url = bucket_url(f"{scheme}:{slashes}{path.lstrip('/')}")
    return Path(unquote(url.removeprefix("file://"))) if scheme == "file" else UrlPath(url)


def resolve_function(place: Any, directory: Path) -> Any:
    """Find the file of FILE.py:ATTRIBUTE in `directory`, if it exists there.

    Other values stay: modules, and files of the current directory.
    """
    file = place.rpartition(":")[0] if isinstance(place, str) else ""
    is_there = file.endswith(".py") and (directory / file).is_file()
    return str(directory / place) if is_there else place


def resolve_beside(path: str, directory: Path) -> str:
    """Find a path in `directory`, if it exists there; otherwise return it as it is."""
    beside = directory / path
    return str(beside) if beside.exists() else path


def local_path(value: Any) -> Any:
    """Before-validator: a URL is no path; `s3://bucket` would be a directory `s3:` here."""
    if isinstance(value, str | Path) and is_url(str(value)):
        raise ValueError(
            "must be a path of this machine: URLs are not supported; mount the storage, or copy "
            "the files"
        )
    return value


class Mistake(NamedTuple):
    """One value that was rejected."""

    keys: tuple[str, ...]
    """Keys that lead to the value, from the outside in; empty if the whole value is wrong."""
    reason: str
    kind: str
    """Pydantic's name for the error."""
    value: Any

    @property
    def key(self) -> str:
        """The keys that lead to the value, joined by dots."""
        return ".".join(self.keys)

    def describe(self, place: str = "") -> str:
        """`place.key: reason`, without `place` if it is empty."""
        where = ".".join(filter(None, (place, *self.keys)))
        return f"{where}: {self.reason}" if where else self.reason

    def with_value(self) -> str:
        """The reason, and the value that was given; without the value if a key is missing."""
        if self.kind == "missing":
            return self.reason
        return f"{self.reason} (got {clip(repr(self.value), max_chars=_MAX_VALUE_CHARS)})"


def mistakes_in(error: ValidationError) -> list[Mistake]:
    """All rejected values, in the order of the fields; never empty."""
    mistakes = []
    for mistake in error.errors(include_url=False):
        reason = _reason(mistake["type"], mistake["msg"], mistake.get("ctx", {}))
        keys = tuple(key for key in map(str, mistake["loc"]) if not _UNION_MEMBER.fullmatch(key))
        mistakes.append(Mistake(keys, reason, mistake["type"], mistake["input"]))
    return mistakes


_UNION_MEMBER = re.compile(r"(?:function-\w+|constrained-\w+|dict|list|tuple|set|nullable)\[.*\]")
"""A name that pydantic puts among the keys: the one of several types that it has tried."""

_REASONS = {
    **dict.fromkeys(("string_type", "string_sub_type"), "must be a text"),
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    **dict.fromkeys(
        ("int_type", "int_parsing", "int_parsing_size", "int_from_float"), "must be a whole number"
    ),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    "finite_number": "must be a finite number",
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    **dict.fromkeys(("literal_error", "enum"), "must be {expected}"),
    **dict.fromkeys(("list_type", "tuple_type", "set_type", "frozen_set_type"), "must be a list"),
    **dict.fromkeys(
        ("dict_type", "mapping_type", "model_type", "model_attributes_type", "dataclass_type"),
        "must be an object",
    ),
    "too_short": "must have at least {min_length} items",
    "too_long": "must have at most {max_length} items",
    "path_type": "must be a path",
    "none_required": "must be null",
    "json_invalid": "is not valid JSON: {error}",
    "missing": "is missing",
    UNKNOWN_KEY: "unknown key",
}
"""Our messages for the kinds of errors of pydantic; `{...}` are facts that it adds."""

_PYDANTIC_PREFIX = re.compile(r"(?:Value error, |(?:[A-Z]\w+ )+should (?=\w))")


def _reason(kind: str, message: str, facts: Mapping[str, Any]) -> str:
    if (words := _REASONS.get(kind)) is not None:
        whole = {k: int(v) for k, v in facts.items() if isinstance(v, float) and v.is_integer()}
        return words.format_map({**facts, **whole})
    begins = _PYDANTIC_PREFIX.match(message)
    if begins is None:
        return message
    return ("must " if "should" in begins[0] else "") + message[begins.end() :]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Suggest the known name that is most like `name`; "" if none is close."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else ""
