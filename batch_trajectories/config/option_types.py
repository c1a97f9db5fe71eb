"""Types of options."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from agent.options import Float, parse_json, split_commas
from batch_trajectories.basics.text import valid_utf8
from batch_trajectories.basics.validation import bucket_url, is_url, local_path, path_or_url
from batch_trajectories.config.stop_rules import check_stop_rules

if TYPE_CHECKING:
    from agent.gateway.command_agent import CommandAgent
    from batch_trajectories.config.endpoint_config import EndpointConfig
    from toolsets.images.registry.settings import RegistrySettings
    from toolsets.mcp.mcp_settings import McpServer

Resource = Annotated[Float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Weight = Annotated[Float, Field(ge=0, allow_inf_nan=False)]
Names = Annotated[tuple[str, ...], BeforeValidator(split_commas)]

RowFlaw = Literal[
    "has_images",
    "has_files",
    "provider_call",
    "control_token",
    "unknown_tool",
    "interrupted",
    "leak_suspected",
    "leaked_call",
    "arguments_not_json",
    "arguments_not_object",
    "marker_in_text",
    "marker_in_arguments",
    "marker_in_result",
]
"""Reasons why exports reject rows that some formats can represent."""

AcceptedRows = Annotated[tuple[RowFlaw, ...], BeforeValidator(split_commas)]

StopIf = Annotated[Names, AfterValidator(check_stop_rules)]


LocalPath = Annotated[Path, BeforeValidator(local_path)]


def url_or_absolute_path(value: str) -> str:
    """Check a URL as `bucket_url` does, or make a path absolute. Raises `ValueError`."""
    return bucket_url(value) if is_url(value) else str(Path(value).absolute())


def refuse_empty(value: Any) -> Any:
    """Before-validator: an empty path, as of an unset shell variable, is not the directory `.`."""
    if value == "":
        raise ValueError("must not be empty")
    return value


Place = Annotated[Path, BeforeValidator(refuse_empty), AfterValidator(path_or_url)]
"""A path of this machine, or the URL of a bucket."""


def is_text(value: Any) -> bool:
    """Whether all texts in a value can be written: none holds half of a surrogate pair."""
    match value:
        case str() | Path():
            return valid_utf8(str(value)) == str(value)
        case dict():
            return all(map(is_text, value)) and all(map(is_text, value.values()))
        case list() | tuple():
            return all(map(is_text, value))
    return True


def holds_nul(value: Any) -> bool:
    """Whether a text in a value has the character NUL, which no path or command may have."""
    match value:
        case str() | Path():
            return "\0" in str(value)
        case dict():
            return any(map(holds_nul, value)) or any(map(holds_nul, value.values()))
        case list() | tuple():
            return any(map(holds_nul, value))
    return False


def running(default: Any, help: str, **more: Any) -> Any:
    """A field that does not affect the data; it may change from start to start."""
    return Field(default, description=help, **more)


def parse_columns(value: Any) -> Any:
    """Before-validator: `prompt=problem,expected=answer`, as flags give it, or JSON."""
    return _assignments(value, "ROW_COLUMN=SOURCE_COLUMN")


_NAME_CHARS, _NAME_BYTES = 120, 200
"""Limits of a run's name. File systems allow 255 bytes, and our suffixes take up to 50."""


def plain_name(value: str) -> str:
    """Return `value` if it is a valid name of a run. Raises `ValueError`."""
    if not value or not all(c.isalnum() or c in "._-" for c in value) or value[0] in ".-":
        raise ValueError(
            "must be letters, digits, '.', '_' and '-' only, starting with a letter, digit or '_'"
        )
    if len(value) > _NAME_CHARS or (size := len(value.encode())) > _NAME_BYTES:
        has = f"{len(value)} characters" if len(value) > _NAME_CHARS else f"{size} bytes in UTF-8"
        raise ValueError(
            f"is too long: it has {has}; names of files may have {_NAME_CHARS} characters and "
            f"{_NAME_BYTES} bytes of it"
        )
    return value


def parse_resources(value: Any) -> Any:
    """Before-validator: `num_cpus=1,memory=4e9`, as flags give it, or JSON, becomes a mapping."""
    return _assignments(value, "NAME=AMOUNT, such as num_cpus=1")


def _assignments(value: Any, form: str) -> Any:
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("{"):
        return parse_json(value)
    assignments: dict[str, str] = {}
    for part in filter(None, map(str.strip, value.split(","))):
        name, sign, given = map(str.strip, part.partition("="))
        if not sign or not name or not given:
            raise ValueError(f"{part!r}: give {form}")
        if name in assignments:
            raise ValueError(f"{name!r} is given twice")
        assignments[name] = given
    return assignments


# Options that few runs have: their readers are imported only if one is given.


def _read_agent(value: Any) -> CommandAgent | None:
    if value is None:
        return None
    from batch_trajectories.config.agents import read_agent

    return read_agent(value)


def _read_endpoints(entries: dict[str, Any]) -> dict[str, EndpointConfig]:
    if not entries:
        return {}
    from batch_trajectories.config.endpoint_config import read_endpoints

    return read_endpoints(entries)


def _parse_servers(value: Any) -> Any:
    """Before-validator: JSON, as flags give it, or the path of a file with JSON (`.mcp.json`)."""
    if isinstance(value, str) and not value.lstrip().startswith("{") and value.strip():
        try:
            value = Path(value).read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"{value}: neither JSON nor a file that can be read: {error.strerror}"
            ) from error
    return parse_json(value)


def _read_servers(entries: dict[str, Any] | None) -> dict[str, McpServer] | None:
    if not entries:
        return entries
    from toolsets.mcp.mcp_settings import read_servers

    return read_servers(entries)


def _read_registry(given: Any) -> RegistrySettings | None:
    if given is None:
        return None
    from toolsets.images.registry.settings import RegistrySettings

    return RegistrySettings.model_validate(given)


if TYPE_CHECKING:
    OwnAgent = CommandAgent | None
    Registry = RegistrySettings | None
    Endpoints = dict[str, EndpointConfig]
    McpServers = dict[str, McpServer] | None
else:
    OwnAgent = Annotated[Any, BeforeValidator(_read_agent)]
    Registry = Annotated[Any, BeforeValidator(parse_json), AfterValidator(_read_registry)]
    Endpoints = Annotated[
        dict[str, Any], BeforeValidator(parse_json), AfterValidator(_read_endpoints)
    ]
    McpServers = Annotated[
        dict[str, Any] | None, BeforeValidator(_parse_servers), AfterValidator(_read_servers)
    ]
