"""An agent that users run as a command, such as a coding agent of their own.

Its command runs in the sandbox of a conversation. Its model calls go to a gateway, which relays
them to the endpoint of the run. Commands, texts and files can name what is known only then:
`PLACEHOLDERS`.
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


# MCP servers that a task brings, as agents that run as commands are told of them.
#
# A server has `name`, `transport` (`stdio`, `sse` or `streamable-http`), and `command` with
# `args`, or `url`. The agent starts or calls it, inside its sandbox. Source of the forms: the
# pages on MCP of Claude Code (`mcpServers` in ~/.claude.json) and of Codex (`mcp_servers` in
# ~/.codex/config.toml).

Form = Literal["mcpServers", "codex"]
"""How they are written: a JSON object of that key, or tables of TOML."""

Server = Mapping[str, Any]


def with_servers(text: str, form: Form, servers: Sequence[Server]) -> str:
    """A file of an agent, with the servers added. Raises `ValueError` where that cannot be."""
    return _WRITERS[form](text, servers)


def _as_json(text: str, servers: Sequence[Server]) -> str:
    written: Any = exact_json.loads(text) if text.strip() else {}
    if not isinstance(written, dict):
        raise ValueError("the file that names MCP servers must be a JSON object")
    told = {}
    for server in servers:
        if server["transport"] == "stdio":
            entry = {"type": "stdio", "command": server["command"], "args": [*server["args"]]}
        else:
            kind = "http" if server["transport"] == "streamable-http" else server["transport"]
            entry = {"type": kind, "url": server["url"]}
        told[server["name"]] = entry
    return exact_json.dumps({**written, "mcpServers": told}).decode()


def _as_toml(text: str, servers: Sequence[Server]) -> str:
    tables = [text.rstrip("\n")] if text else []
    for server in servers:
        if server["transport"] == "sse":
            raise ValueError(f"MCP server {server['name']!r}: codex does not know `sse`")
        lines = [f"[mcp_servers.{_quoted(server['name'])}]"]
        if server["transport"] == "stdio":
            arguments = ", ".join(map(_quoted, server["args"]))
            lines += [f"command = {_quoted(server['command'])}", f"args = [{arguments}]"]
        else:
            lines.append(f"url = {_quoted(server['url'])}")
        tables.append("\n".join(lines))
    return "\n\n".join(tables) + "\n"


def _quoted(text: str) -> str:
    """A basic string of TOML; JSON's escapes are some of its own."""
    return exact_json.dumps(text).decode().replace("\x7f", "\\u007f")


_WRITERS = {"mcpServers": _as_json, "codex": _as_toml}


PLACEHOLDERS = ("prompt", "gateway", "key", "model", "workspace", "home")
"""In braces: the prompt's text, the gateway's URL and the key for it, the model's name, the
directory that the command starts in, and its HOME."""

PER_ROW = ("command", "stdin", "env", "files", "final_call")
"""What a row can set for itself in its column `agent`."""

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
"""Kinds of tools that the Agent Client Protocol knows; `*`: all."""

NO_MEANING = frozenset({"programs", "memory_mb", "version", "volatile", "continues", "mcp"})
"""Fields that do not affect the data: runs continue where a preset changes them."""

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
"""What every agent is started with; `env` adds to it, and null removes a variable."""


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
    """What differs between two starts of an agent and does not decide a reply."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    fields: tuple[str, ...] = ()
    """Dotted paths of fields of request bodies."""
    texts: tuple[Pattern, ...] = ()
    """Regular expressions; what they match in messages and tools is ignored."""


class McpFile(BaseModel):
    """Where an agent reads which MCP servers there are."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    file: Annotated[str, AfterValidator(_relative)]
    """Its path in HOME; what `files` say of it stays."""
    form: Form
    """See `task_servers`."""


class CommandAgent(BaseModel):
    """How to run an agent, and what it says to models."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    name: str = Field("custom", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """The preset's or the file's, for records."""
    command: Annotated[_Command, Field(min_length=1)]
    """Its program, on the PATH or with a path, and arguments."""
    stdin: _Text = ""
    """Its standard input."""
    continues: _Command = ()
    """The command that goes on with its latest session, where `{prompt}` is the user's next
    message; (): it takes one message."""
    protocol: Literal["acp"] | None = None
    """How it gets its prompt: `acp` (Agent Client Protocol); None: as `{prompt}`."""
    rejects: Annotated[tuple[ToolKind, ...], BeforeValidator(split_commas)] = ()
    """With `acp`: for which kinds of tools it gets no permission when it asks for one."""
    env: dict[_Variable, _Text | None] = {}
    """Variables besides those that all agents get (PATH, HOME, URLs and keys of the gateway)."""
    files: dict[Annotated[str, AfterValidator(_relative)], str] = {}
    """Files in its HOME, by their paths there."""
    speaks: Annotated[tuple[Api, ...], BeforeValidator(split_commas), Field(min_length=1)]
    """The APIs that it calls models by."""
    version: _Command | None = None
    """The command that prints its version; None: its program with --version; []: none."""
    aliases: dict[str, str] = {}
    """Models by the names that it asks for, as `--model`; `*` stands for all other names."""
    volatile: VolatileConfig = Field(default_factory=VolatileConfig)
    mcp: McpFile | None = None
    """How it is told of the MCP servers of a task; None: it cannot be."""
    final_call: Pattern | None = None
    """Where it ends by a tool call instead of a text: what the arguments of that call match."""
    programs: tuple[Path, ...] = ()
    """Further files and directories of this machine that it needs in the sandbox, read-only."""
    memory_mb: PositiveInt = 500
    """What it takes; limits how many run at a time."""

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
        """Why it takes no further messages of a user, and what to do."""
        return (
            f"agent {self.name!r} has no `continues`, the command that goes on with its session, "
            "so it takes one message"
        )

    @property
    def found(self) -> str | None:
        """The version that its program printed; None if it was not asked."""
        return self._found

    def with_found(self, version: str | None) -> CommandAgent:
        """A copy with the version that its program printed."""
        agent = self.model_copy()
        agent._found = version
        return agent

    @property
    def version_command(self) -> tuple[str, ...]:
        """The command that prints its version; () if it has none."""
        return (self.command[0], "--version") if self.version is None else self.version

    @property
    def what_varies(self) -> Volatile:
        """For the gateway."""
        from agent.wires.wire import Volatile

        return Volatile(self.volatile.fields, self.volatile.texts)

    def environment(self, values: Mapping[str, str]) -> dict[str, str]:
        """Its variables, with the placeholders filled in."""
        given = {**_VARIABLES, **self.env}
        return {name: fill(text, values) for name, text in given.items() if text is not None}

    def acp_terms(self, values: Mapping[str, str]) -> dict[str, Any] | None:
        """What it is told by the Agent Client Protocol; None if it does not speak it."""
        if self.protocol is None:
            return None
        return {"prompt": values["prompt"], "rejects": self.rejects}

    def of_row(self, own: Any, servers: Sequence[Server] = ()) -> CommandAgent:
        """The agent of a row whose column `agent` is `own`, with the MCP servers of its task.

        Raises `ValueError`.
        """
        agent = self if own is None else self._of_row(own)
        if not servers:
            return agent
        if agent.mcp is None:
            raise ValueError(
                f"agent {agent.name!r} is not told of MCP servers; say in its file where it reads "
                "them (`mcp`)"
            )
        at = agent.mcp.file
        text = with_servers(agent.files.get(at, ""), agent.mcp.form, servers)
        told = agent.model_copy(update={"files": {**agent.files, at: text}})
        return told.with_found(agent.found)

    def _of_row(self, own: Any) -> CommandAgent:
        if not isinstance(own, dict):
            raise ValueError(f"`agent` must be an object with {', '.join(PER_ROW)}")
        if other := sorted(own.keys() - set(PER_ROW)):
            raise ValueError(f"`agent.{other[0]}`: a row can only set {', '.join(PER_ROW)}")
        fields = self.model_dump() | own
        for name in ("env", "files"):
            if isinstance(own.get(name), dict):
                fields[name] = {**getattr(self, name), **own[name]}
        agent = CommandAgent.model_validate(fields)
        same = agent.version_command == self.version_command
        return agent.with_found(self.found if same else None)

    def facts(self) -> dict[str, Any]:
        """What a record says of it."""
        described = exact_json.dumps(
            [self.command, self.stdin, self.env, self.files, *self._by_protocol().values()]
        )
        digest = hashlib.sha256(described).hexdigest()[:16]
        return {"name": self.name, "version": self.found, "command": digest}

    def meaning(self) -> dict[str, Any]:
        """What affects the data, JSON-ready."""
        fields = self.model_dump(mode="json", exclude={*NO_MEANING, "protocol", "rejects"})
        return {**fields, **self._by_protocol(), "found": self.found}

    def _by_protocol(self) -> dict[str, Any]:
        """What earlier versions did not know, where it is set."""
        if self.protocol is None:
            return {}
        return {"protocol": self.protocol, "rejects": [*self.rejects]}  # as JSON has it


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace the placeholders in a text; braces around anything else are left alone."""
    # At once: a prompt may hold a placeholder.
    return re.sub(
        r"\{(" + "|".join(PLACEHOLDERS) + r")\}",
        lambda match: values.get(match[1], match[0]),
        text,
    )
