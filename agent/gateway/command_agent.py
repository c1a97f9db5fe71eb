"""The description of an agent that runs as a command, such as a coding agent of the user.

Its command runs in the sandbox of a conversation. Its model calls go to a gateway, which relays
them to the endpoint of the run. Commands, texts and files can contain `PLACEHOLDERS` for values
that are known only when it runs.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    model_validator,
)

from agent.models.providers import Api
from agent.options import PositiveInt, split_commas
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.validation import Pattern

if TYPE_CHECKING:
    from agent.wires.wire import Volatile


# Files that tell an agent about the MCP servers of its task.
#
# A server has `name`, `transport` (`stdio`, `sse` or `streamable-http`), and `command` with
# `args`, or `url`. The agent starts or calls it, inside its sandbox. Source of the forms: the
# pages on MCP of Claude Code (`mcpServers` in ~/.claude.json) and of Codex (`mcp_servers` in
# ~/.codex/config.toml).

Form = Literal["mcpServers", "codex"]
"""The form of the file: a JSON object with the key `mcpServers`, or tables of Codex's TOML."""

Server = Mapping[str, Any]


def add_servers(text: str, form: Form, servers: Sequence[Server]) -> str:
    """Add MCP servers to the text of a file. Raises `ValueError` if the form does not allow it."""
    return _WRITERS[form](text, servers)


def _as_json(text: str, servers: Sequence[Server]) -> str:
    written: Any = exact_json.loads(text) if text.strip() else {}
    if not isinstance(written, dict):
        raise ValueError("the file that names MCP servers must be a JSON object")
    entries = {}
    for server in servers:
        if server["transport"] == "stdio":
            entry = {"type": "stdio", "command": server["command"], "args": [*server["args"]]}
        else:
            kind = "http" if server["transport"] == "streamable-http" else server["transport"]
            entry = {"type": kind, "url": server["url"]}
        entries[server["name"]] = entry
    return exact_json.dumps({**written, "mcpServers": entries}).decode()


def _as_toml(text: str, servers: Sequence[Server]) -> str:
    tables = [text.rstrip("\n")] if text else []
    for server in servers:
        if server["transport"] == "sse":
            raise ValueError(f"MCP server {server['name']!r}: codex does not know `sse`")
        lines = [f"[mcp_servers.{_quote_toml(server['name'])}]"]
        if server["transport"] == "stdio":
            arguments = ", ".join(map(_quote_toml, server["args"]))
            lines += [f"command = {_quote_toml(server['command'])}", f"args = [{arguments}]"]
        else:
            lines.append(f"url = {_quote_toml(server['url'])}")
        tables.append("\n".join(lines))
    return "\n\n".join(tables) + "\n"


def _quote_toml(text: str) -> str:
    """Write a basic string of TOML, which knows the escapes of JSON."""
    return exact_json.dumps(text).decode().replace("\x7f", "\\u007f")


_WRITERS = {"mcpServers": _as_json, "codex": _as_toml}


PLACEHOLDERS = ("prompt", "gateway", "key", "model", "workspace", "home")
"""Names that stand in braces for the text of the prompt, the URL and the key of the gateway, the
name of the model, the directory that the command starts in, and its HOME."""

PER_ROW = ("command", "stdin", "env", "files", "final_call")
"""The fields that a row can set in its column `agent`."""

ToolKind = Literal[
    "read",
    "edit",
    "delete",
    "move",
    "search",
    "execute",
    "think",
    "fetch",
    "switch_mode",
    "other",
    "*",
]
"""Kinds of tools in the Agent Client Protocol; `*`: all."""

FIELDS_WITHOUT_EFFECT = frozenset(
    {"programs", "memory_mb", "version", "volatile", "continues", "mcp"}
)
"""Fields that do not affect the data: a run continues if a preset changes them."""

_VARIABLES: Mapping[str, str] = {
    "OPENAI_BASE_URL": "{gateway}/v1",
    "OPENAI_API_BASE": "{gateway}/v1",
    "ANTHROPIC_BASE_URL": "{gateway}",
    "GOOGLE_GEMINI_BASE_URL": "{gateway}",
    "OPENAI_API_KEY": "{key}",
    "ANTHROPIC_API_KEY": "{key}",
    "GEMINI_API_KEY": "{key}",
    "TZ": "UTC",
    "IS_SANDBOX": "1",
}
"""Environment variables of every agent; `env` adds others, and null removes one."""


def _split_command(value: Any) -> Any:
    return shlex.split(value) if isinstance(value, str) else value


def _plain(value: str) -> str:
    if "\0" in value:
        raise ValueError("cannot contain a NUL character")
    return value


def _relative(value: str) -> str:
    path = PurePosixPath(_plain(value))
    if path.is_absolute() or ".." in path.parts or not path.name:
        raise ValueError(f"{value!r}: must be a path relative to HOME")
    return str(path)


_Text = Annotated[str, AfterValidator(_plain)]
_Command = Annotated[tuple[_Text, ...], BeforeValidator(_split_command)]
_Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class VolatileConfig(BaseModel):
    """Values that differ between two starts of an agent and do not decide a reply."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    fields: tuple[str, ...] = ()
    """Dotted paths of fields of request bodies."""
    texts: tuple[Pattern, ...] = ()
    """Regular expressions; their matches in messages and tools are ignored."""


class McpFile(BaseModel):
    """The file from which an agent reads its MCP servers."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    file: Annotated[str, AfterValidator(_relative)]
    """The path in HOME; the file's other content comes from `files`."""
    form: Form
    """The form in which servers are written."""


class CommandAgent(BaseModel):
    """The command of an agent, and the models that it calls."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    name: str = Field("custom", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """The name of the preset or the file, for records."""
    command: Annotated[_Command, Field(min_length=1)]
    """The program, on the PATH or with a path, and its arguments."""
    stdin: _Text = ""
    """The standard input of the command."""
    continues: _Command = ()
    """The command that continues the latest session with `{prompt}`, the user's next message.
    (): the agent takes one message only."""
    protocol: Literal["acp"] | None = None
    """The way an agent gets its prompt: `acp` (Agent Client Protocol); None: as `{prompt}`."""
    rejects: Annotated[tuple[ToolKind, ...], BeforeValidator(split_commas)] = ()
    """The kinds of tools for which permission is refused; only with `acp`."""
    env: dict[_Variable, _Text | None] = {}
    """Variables besides those that all agents get (PATH, HOME, URLs and keys of the gateway)."""
    files: dict[Annotated[str, AfterValidator(_relative)], str] = {}
    """The texts of files in HOME, by their paths there."""
    speaks: Annotated[tuple[Api, ...], BeforeValidator(split_commas), Field(min_length=1)]
    """The APIs by which the agent calls models."""
    version: _Command | None = None
    """The command that prints the version; None: the program with --version; []: none."""
    aliases: dict[str, str] = {}
    """Models (as for `--model`) by the names that the agent sends; `*`: all other names."""
    volatile: VolatileConfig = Field(default_factory=VolatileConfig)
    mcp: McpFile | None = None
    """The file that gets the MCP servers of a task; None: the agent cannot use any."""
    final_call: Pattern | None = None
    """Matches the arguments of the tool call that ends the agent; None: a text ends it."""
    programs: tuple[Path, ...] = ()
    """Further files and directories of this machine that the sandbox shows read-only."""
    memory_mb: PositiveInt = 500
    """Memory of one agent; limits how many run at a time."""

    _found: str | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _gets_the_prompt(self) -> CommandAgent:
        texts = (*self.command, self.stdin, *self.files.values(), *self.env.values())
        if self.protocol == "acp":
            if self.stdin:
                raise ValueError("`stdin` is taken by the Agent Client Protocol: leave it out")
            if self.continues:
                raise ValueError("`continues` means nothing with `protocol: acp`: leave it out")
            return self
        if self.rejects:
            raise ValueError("`rejects` is for agents that ask for permission: `protocol: acp`")
        if not any("{prompt}" in (text or "") for text in texts):
            raise ValueError("{prompt} is missing: give it in `command`, `stdin`, `env` or `files`")
        if self.continues and "{prompt}" not in " ".join((*self.continues, self.stdin)):
            raise ValueError("{prompt} is missing: give it in `continues` or `stdin`")
        return self

    @property
    def why_one_message(self) -> str:
        """The reason that the agent takes only one message, and a remedy."""
        return (
            f"agent {self.name!r} has no `continues`, the command that goes on with its session, "
            "so it takes one message"
        )

    @property
    def found_version(self) -> str | None:
        """The version that the program printed; None if it was not asked."""
        return self._found

    def with_version(self, version: str | None) -> CommandAgent:
        """Return a copy with the version that the program printed."""
        agent = self.model_copy()
        agent._found = version
        return agent

    @property
    def version_command(self) -> tuple[str, ...]:
        """The command that prints the version; () if there is none."""
        return (self.command[0], "--version") if self.version is None else self.version

    @property
    def volatile_values(self) -> Volatile:
        """The volatile values, as the gateway takes them."""
        from agent.wires.wire import Volatile

        return Volatile(self.volatile.fields, self.volatile.texts)

    def environment(self, values: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables, with the placeholders filled in."""
        given = {**_VARIABLES, **self.env}
        return {
            name: fill_placeholders(text, values)
            for name, text in given.items()
            if text is not None
        }

    def acp_terms(self, values: Mapping[str, str]) -> dict[str, Any] | None:
        """Return the terms of the Agent Client Protocol; None if the agent does not speak it."""
        if self.protocol is None:
            return None
        return {"prompt": values["prompt"], "rejects": self.rejects}

    def with_row(self, column: Any, servers: Sequence[Server] = ()) -> CommandAgent:
        """Return the agent of a row, with the fields of its column `agent` and the MCP servers.

        `column` is None if the row has no such column. Raises `ValueError`.
        """
        agent = self if column is None else self._with_column(column)
        if not servers:
            return agent
        if agent.mcp is None:
            raise ValueError(
                f"agent {agent.name!r} is not told of MCP servers; say in its file where it reads "
                "them (`mcp`)"
            )
        path = agent.mcp.file
        text = add_servers(agent.files.get(path, ""), agent.mcp.form, servers)
        changed = agent.model_copy(update={"files": {**agent.files, path: text}})
        return changed.with_version(agent.found_version)

    def _with_column(self, column: Any) -> CommandAgent:
        if not isinstance(column, dict):
            raise ValueError(f"`agent` must be an object with {', '.join(PER_ROW)}")
        if other := sorted(column.keys() - set(PER_ROW)):
            raise ValueError(f"`agent.{other[0]}`: a row can only set {', '.join(PER_ROW)}")
        fields = self.model_dump() | column
        for name in ("env", "files"):
            if isinstance(column.get(name), dict):
                fields[name] = {**getattr(self, name), **column[name]}
        agent = CommandAgent.model_validate(fields)
        same = agent.version_command == self.version_command
        return agent.with_version(self.found_version if same else None)

    def record_facts(self) -> dict[str, Any]:
        """Return the facts about the agent that records hold."""
        described = exact_json.dumps(
            [self.command, self.stdin, self.env, self.files, *self._protocol_fields().values()]
        )
        digest = hashlib.sha256(described).hexdigest()[:16]
        return {"name": self.name, "version": self.found_version, "command": digest}

    def data_fields(self) -> dict[str, Any]:
        """Return the fields that affect the data, JSON-ready."""
        fields = self.model_dump(
            mode="json", exclude={*FIELDS_WITHOUT_EFFECT, "protocol", "rejects"}
        )
        return {**fields, **self._protocol_fields(), "found": self.found_version}

    def _protocol_fields(self) -> dict[str, Any]:
        """Return the fields that earlier versions did not know; {} if they are not set."""
        if self.protocol is None:
            return {}
        return {"protocol": self.protocol, "rejects": [*self.rejects]}  # as JSON has it


def fill_placeholders(text: str, values: Mapping[str, str]) -> str:
    """Replace the placeholders in a text; braces around anything else are left alone."""
    # In one pass, because a prompt may contain a placeholder.
    return re.sub(
        r"\{(" + "|".join(PLACEHOLDERS) + r")\}",
        lambda match: values.get(match[1], match[0]),
        text,
    )
