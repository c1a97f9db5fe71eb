"""The settings of an MCP server, and the tools that it lists."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    StringConstraints,
    TypeAdapter,
    ValidationInfo,
    model_validator,
)

WORKSPACE = "{workspace}"
"""Placeholder for the task's workspace in a command, an environment and a `cwd`."""

ServerName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$")]
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


_VARIABLE = re.compile(r"\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_TYPES: Mapping[str, str] = {
    "stdio": "command",
    **dict.fromkeys(("http", "streamable-http", "streamable_http", "streamableHttp"), "url"),
}
"""The kinds of servers in published settings, each with the key that it requires."""


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class McpError(ValueError):
    """A server cannot be used; the message says which and why."""


class McpServer(BaseModel):
    """The command or address of a server, its environment, and limits on its restarts."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    command: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = ()
    """A server over standard streams: its program and arguments. Either this or `url`."""
    args: tuple[str, ...] = ()
    """Arguments after those of `command`."""
    env: dict[VariableName, str] = Field(default_factory=dict)
    """The server's environment, in addition to PATH, HOME and LANG."""
    env_from: tuple[VariableName, ...] = ()
    """Names of variables that are copied from the environment of this program, such as keys."""
    cwd: str | None = None
    url: str | None = None
    """A server over streamable HTTP: its endpoint. Either this or `command`."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Headers of requests; `${NAME}` stands for a variable."""
    headers_env: dict[str, VariableName] = Field(default_factory=dict)
    """Headers of requests, each with the variable that holds its value."""
    expands: bool = False
    """`${NAME}` and `${NAME:-DEFAULT}` stand for variables everywhere, as in published settings."""
    per_task: bool | None = None
    """Whether each conversation starts its own server; None: if settings mention the workspace."""
    effects: Literal["workspace", "elsewhere"] = "elsewhere"
    """The place of its tools' effects; see `Tool.effects`. Tools that only read have none."""
    start_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 10
    """Maximum number of restarts, per worker or, with `per_task`, per conversation."""
    restart_pause_s: Annotated[float, Field(ge=0, le=60)] = 1.0
    """Seconds before the first restart; doubled for each further one, up to 30 s."""

    _listed: tuple[ListedTool, ...] | None = PrivateAttr(None)

    @model_validator(mode="before")
    @classmethod
    def _read_published(cls, given: Any, info: ValidationInfo) -> Any:
        """Add `expands` to published settings, and remove `type`, which other keys imply.

        Raises `ValueError` if the type does not fit.
        """
        if not isinstance(given, dict):
            return given
        if info.context and info.context["expands"]:
            # Not in `read_servers`: an error would then show a key that its user never wrote.
            given = {"expands": True, **given}
        if "type" not in given:
            return given
        kind, rest = given["type"], {key: given[key] for key in given if key != "type"}
        needs = _TYPES.get(kind) if isinstance(kind, str) else None
        if needs is None:
            known = ", ".join(_TYPES)
            raise ValueError(f"`type`: {kind!r} is none of {known}: other servers cannot be used")
        if needs not in rest:
            raise ValueError(f"`type: {kind}` needs `{needs}`")
        return rest

    @model_validator(mode="after")
    def _is_one_of_two(self) -> McpServer:
        if bool(self.command) == bool(self.url):
            raise ValueError("give either `command` or `url`")
        texts = [*self.headers.values()]
        if self.expands:
            texts += [*self.argv, *self.env.values(), self.cwd or "", self.url or ""]
        for text in texts:
            if "${" in _VARIABLE.sub("", text):
                raise ValueError(f"{text!r}: only ${{NAME}} and ${{NAME:-DEFAULT}} are read")
        if any("\0" in part for part in self.argv):
            raise ValueError("a command cannot contain a NUL character")
        if self.url is not None:
            parts = urlsplit(self.url)
            is_known = not self.expands or "${" not in self.url
            if is_known and (parts.scheme not in ("http", "https") or not parts.hostname):
                raise ValueError("`url` must start with http:// or https://")
            if parts.password is not None:
                raise ValueError(
                    "`url` must not contain a password: it would be written into files"
                )
        elif self.headers_env or self.headers:
            raise ValueError(f"`headers{'_env' if self.headers_env else ''}` needs `url`")
        if self.per_task is False and self.mentions_workspace():
            raise ValueError(f"{WORKSPACE} needs a server per task; leave `per_task` out")
        if self.effects == "workspace" and not self.is_per_task:
            raise ValueError(
                f"`effects: workspace` needs a server per task: name {WORKSPACE} in its settings, "
                "or set `per_task: true`"
            )
        return self

    @property
    def argv(self) -> tuple[str, ...]:
        """The whole command."""
        return self.command + self.args

    @property
    def is_per_task(self) -> bool:
        """Whether each conversation starts its own server."""
        return self.mentions_workspace() if self.per_task is None else self.per_task

    @property
    def listed(self) -> tuple[ListedTool, ...] | None:
        """The tools that the server listed; None if it was not asked."""
        return self._listed

    def with_listed_tools(self, tools: tuple[ListedTool, ...]) -> McpServer:
        """Return a copy with the tools that the server listed."""
        server = self.model_copy()
        server._listed = tools
        return server

    def mentions_workspace(self) -> bool:
        """Whether the settings contain the placeholder of the workspace."""
        return any(WORKSPACE in part for part in (*self.argv, *self.env.values(), self.cwd or ""))


def read_servers(entries: dict[str, Any]) -> dict[str, McpServer]:
    """Read the `mcp` entries of a config, or those of a published `.mcp.json`, by name.

    Raises `ValueError`.
    """
    wrapper = next((name for name in ("mcpServers", "servers") if _is_wrapped(entries, name)), None)
    if wrapper is not None:
        others = entries.keys() - {wrapper, *(("inputs",) if wrapper == "servers" else ())}
        if others:
            raise ValueError(f"`{min(others)}`: it is unknown beside `{wrapper}`")
        entries = entries[wrapper]
    context = {"expands": wrapper is not None}
    return TypeAdapter(dict[ServerName, McpServer]).validate_python(entries, context=context)


def _is_wrapped(entries: Mapping[str, Any], name: str) -> bool:
    servers = entries.get(name)
    return isinstance(servers, dict) and all(isinstance(one, dict) for one in servers.values())


def expand(text: str, variable: Callable[[str], str], environment: Mapping[str, str]) -> str:
    """Replace variables in a text by their values, as a shell does.

    `variable` is called for a variable without a value and default; it returns a value or raises. A
    default also replaces an empty value.
    """

    def replacement(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        if default is not None:
            return environment.get(name) or default
        return variable(name)

    return _VARIABLE.sub(replacement, text)


@dataclass(frozen=True, slots=True)
class ListedTool:
    """A tool as its server lists it."""

    name: str
    description: str
    input_schema: Mapping[str, Any]
    is_read_only: bool
    is_idempotent: bool

    def full_name(self, server: str) -> str:
        """Return the name for models, `server__tool`, in characters that every endpoint accepts."""
        return re.sub(r"[^A-Za-z0-9_-]", "_", f"{server}__{self.name}")
