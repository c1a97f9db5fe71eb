"""Reads declared columns of a row, and defines the types of values that several columns have.

A column group is a dataclass whose fields are columns, or keys of one column. `read_value` makes it
of the JSON values of a row: null is as good as absent, and a mistake names the column.
"""

from __future__ import annotations

import base64
import binascii
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import PurePosixPath
from typing import Annotated, Any, NamedTuple, TypeVar, get_type_hints

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    Strict,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    WrapValidator,
)

from batch_trajectories.basics.text import clip
from batch_trajectories.basics.validation import mistakes_in
from toolsets.workspace.workspace import HOME

T = TypeVar("T")

_MAX_VALUE_CHARS = 200

_UNKNOWN_KEY = "unexpected_keyword_argument"
"""Pydantic's name for a key that is no field of a dataclass."""

_ROOT = PurePosixPath(".")

_ENCODINGS = ("base64", "text")

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)

_VARIABLE = re.compile(r"\$\{(?P<name>[A-Za-z_]\w*)(?::-(?P<default>[^}]*))?\}", re.ASCII)

_PREDICATE = re.compile(r"(?:must|is|are|needs|names|does) ")
"""Beginning of a reason that forms a sentence with the name of its column."""


class ValuePermissions(NamedTuple):
    """Permissions of the run for the values of its rows."""

    in_image: bool = False
    """Whether the workspace is a directory of the row's image, so paths may be absolute."""
    variables: Collection[str] = ()
    """The variables of this machine that rows may name."""


DEFAULT_PERMISSIONS = ValuePermissions()
"""A workspace of this machine, and no variables."""


def read_value(
    kind: Any, raw: Any, place: str = "", permissions: ValuePermissions = DEFAULT_PERMISSIONS
) -> Any:
    """Read `raw` as a value of type `kind`. Raises `ValueError` with the reason.

    `place` names the column; "" if `raw` is a row, whose keys are the columns.
    """
    try:
        return _reader(kind).validate_python(raw, context=permissions)
    except ValidationError as error:
        raise ValueError(_describe_mistake(error, place)) from error


@cache
def _reader(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _describe_mistake(error: ValidationError, place: str) -> str:
    """The first mistake, as a sentence or after a colon; items of lists have no name."""
    keys = [place, *(key for key in error.errors()[0]["loc"] if isinstance(key, str))]
    reason = mistakes_in(error)[0].reason
    separator = " " if _PREDICATE.match(reason) else ": "
    return f"`{'.'.join(filter(None, keys))}`{separator}{reason}"


def read_group(
    group: type[T], columns: Mapping[str, Any], permissions: ValuePermissions = DEFAULT_PERMISSIONS
) -> T:
    """Read a group of columns of a row. Raises `ValueError` with the reason."""
    kind: Any = group
    given = {name: columns[name] for name in column_names(kind) if columns.get(name) is not None}
    value: T = read_value(kind, given, permissions=permissions) if given else kind()
    return value


@cache
def column_names(group: Any) -> tuple[str, ...]:
    """The columns of a group, or the keys of an object."""
    names = []
    for name, hint in get_type_hints(group, include_extras=True).items():
        marks = getattr(hint, "__metadata__", ())
        names.append(next((mark.alias for mark in marks if getattr(mark, "alias", None)), name))
    return tuple(names)


def explain_mistakes(text: str, convert: Callable[[Any], Any] | None = None) -> WrapValidator:
    """Report a value that the library refuses by `text`, in which `{}` stands for the value.

    `convert` is called with the value before it is read, if a column accepts several forms.
    """

    def validate(raw: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(raw if convert is None else convert(raw))
        except ValidationError as error:
            mistake = mistakes_in(error)[0]
            if mistake.kind == "value_error":  # raised by a validator of ours, with a text of ours
                raise
            unknown = f" (got `{mistake.keys[-1]}`)" if mistake.kind == _UNKNOWN_KEY else ""
            excerpt = clip(repr(raw), max_chars=_MAX_VALUE_CHARS)
            raise ValueError(text.replace("{}", excerpt) + unknown) from error

    return WrapValidator(validate)


def to_list(raw: Any) -> list[Any]:
    """Return a list as it is, and another value as a list of one item."""
    return list(raw) if isinstance(raw, list | tuple) else [raw]


def object_reader(group: type, text_key: str | None = None) -> Callable[[Any], Any]:
    """Make a reader of objects that leaves out keys that are null.

    A text stands for an object whose only key is `text_key`.
    """

    def as_object(raw: Any) -> Any:
        if isinstance(raw, str) and text_key is not None:
            return {text_key: raw}
        if not isinstance(raw, dict):
            return raw
        names = column_names(group)
        return {key: value for key, value in raw.items() if value is not None or key not in names}

    return as_object


def objects_reader(group: type, text_key: str) -> Callable[[Any], Any]:
    """Make a reader of one object or a list of objects; see `object_reader`."""
    return lambda raw: [*map(object_reader(group, text_key), to_list(raw))]


class ClosedObject:
    """A base of objects that may have no other keys than the declared fields."""

    __slots__ = ()
    __pydantic_config__ = ConfigDict(extra="forbid")


def _flatten(raw: Any) -> list[Any]:
    return [text for item in to_list(raw) for text in to_list(item)]


Text = Annotated[str, Strict()]

Texts = Annotated[tuple[Text, ...], explain_mistakes("must be a list of texts", _flatten)]
"""A text, a list of texts, or a list of lists of texts."""

Flag = Annotated[bool, Strict(), explain_mistakes("must be true or false")]

Seconds = Annotated[
    float,
    Strict(),
    Field(gt=0, allow_inf_nan=False),
    explain_mistakes("{} is not a number of seconds above 0"),
]


# Paths and files.


class Executable(bytes):
    """The content of a file that may be run."""


def absolute_path(raw: Any) -> str | None:
    """A path of an image without `.`, `..` and repeated slashes; None if it is not one."""
    if not isinstance(raw, str) or not raw.startswith("/") or "\0" in raw:
        return None
    names = [name for name in raw.split("/") if name not in ("", ".")]
    return None if ".." in names else "/" + "/".join(names)


def _workspace_path(raw: Any) -> PurePosixPath | None:
    """The path relative to the workspace; None if it leads outside."""
    if not isinstance(raw, str) or not raw or "\0" in raw:
        return None
    path = PurePosixPath(raw)
    if path.is_absolute():
        if not path.is_relative_to(HOME):
            return None
        path = path.relative_to(HOME)
    return None if ".." in path.parts else path


def _file_path(raw: Any, info: ValidationInfo[ValuePermissions]) -> str:
    if info.context.in_image and isinstance(raw, str) and raw.startswith("/"):
        path = absolute_path(raw)
        if path is None or path == "/":
            raise ValueError(f"{raw!r} is not the path of a file, without `..`")
        return path
    relative = _workspace_path(raw)
    if relative is None or relative == _ROOT:
        raise ValueError(f"{raw!r} is not a path in the workspace")
    return str(relative)


def _directory(raw: Any) -> str | None:
    path = _workspace_path(raw)
    return None if path is None else str(path)


def _check_paths(raw: Any, info: ValidationInfo[ValuePermissions]) -> Any:
    if not isinstance(raw, dict):
        return raw
    files = {_file_path(path, info): content for path, content in raw.items()}
    for path in files:
        if beneath := files.keys() & set(map(str, PurePosixPath(path).parents)):
            raise ValueError(f"{min(beneath)!r} is a file, so {path!r} cannot be in it")
    return files


def _content(raw: Any) -> bytes:
    if isinstance(raw, str):
        return raw.encode("utf-8", "replace")
    if isinstance(raw, dict):
        is_executable = raw.get("executable", False)
        texts = {name: text for name, text in raw.items() if name != "executable"}
        if isinstance(is_executable, bool) and len(texts) == 1:
            [(encoding, text)] = texts.items()
            if encoding in _ENCODINGS and isinstance(text, str):
                content = (
                    _decode_content(text) if encoding == "base64" else text.encode(errors="replace")
                )
                return Executable(content) if is_executable else content
    raise ValueError(
        'must be text, {"base64": …} or {"text": …}; the objects may have `executable`: true or '
        "false"
    )


def _decode_content(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from error


FilePath = Annotated[str, BeforeValidator(_file_path)]
"""A path in the workspace; it may be absolute if the workspace is a directory of an image."""

Directory = Annotated[
    str,
    explain_mistakes(
        "must be a directory in the workspace: a relative path, or one in /workspace", _directory
    ),
]

Files = Annotated[
    dict[str, Annotated[bytes, PlainValidator(_content)]],
    BeforeValidator(_check_paths),
    explain_mistakes("must be an object that maps paths to contents"),
]
"""{PATH: text, {"base64": …} or {"text": …}}; the objects may have `executable`: true."""


# Variables.


def _check_names(raw: Any) -> Any:
    for name in raw if isinstance(raw, dict) else ():
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a variable")
    return raw


def _fill_variables(raw: Any, info: ValidationInfo[ValuePermissions]) -> str:
    """Replace the names of this machine's variables in a text by their values."""
    if not isinstance(raw, str) or "\0" in raw:
        raise ValueError("must be text without NUL")
    variables = info.context.variables

    def fill_variable(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        if name in variables and name in os.environ:
            return os.environ[name]
        if default is not None:
            return default
        if name in variables:
            raise ValueError(f"the variable {name} is not set on this machine")
        raise ValueError(f"names the variable {name} of this machine; allow it: --env_from={name}")

    return _VARIABLE.sub(fill_variable, raw)


Variables = Annotated[
    dict[str, Annotated[str, BeforeValidator(_fill_variables)]],
    BeforeValidator(_check_names),
    explain_mistakes("must be an object that maps names of variables to texts"),
]
"""{NAME: TEXT}, where `${NAME}` is a variable of this machine that the run allows."""


# Images, and how to work in them.


def _user(raw: Any) -> Any:
    return str(raw) if isinstance(raw, int) and not isinstance(raw, bool) and raw >= 0 else raw


def _whole_number(raw: Any) -> Any:
    return int(raw) if isinstance(raw, float) and math.isfinite(raw) else raw


ImageName = Annotated[
    str,
    Strict(),
    # No name of an image may look like an option of the container engine.
    Field(pattern=r"^[A-Za-z0-9][\w.:/@-]*$"),
    explain_mistakes("{} is not a valid image name"),
]

ImagePath = Annotated[
    str, explain_mistakes("{} is not an absolute path without `..`", absolute_path)
]

User = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9_][\w.-]*(:[A-Za-z0-9_][\w.-]*)?$"),
    explain_mistakes("{} is not a user: give NAME, UID, NAME:GROUP or UID:GID", _user),
]

Megabytes = Annotated[
    int,
    Strict(),
    Field(ge=1, lt=2**31),
    explain_mistakes("{} is not a number of megabytes, 1 or more", _whole_number),
]


@dataclass(frozen=True, slots=True)
class RowLimits(ClosedObject):
    """Limits of a row; None: as much as the run allows."""

    memory_mb: Megabytes | None = None
    disk_mb: Megabytes | None = None
    cpus: (
        Annotated[
            float,
            Strict(),
            Field(ge=0.01, lt=2**31),  # the least that container engines take
            explain_mistakes("{} is not a number of CPUs, 0.01 or more"),
        ]
        | None
    ) = None


Limits = Annotated[
    RowLimits,
    explain_mistakes(
        "must be an object with memory_mb, disk_mb and cpus", object_reader(RowLimits)
    ),
]
