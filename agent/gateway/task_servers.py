"""MCP servers that a task brings, as agents that run as commands are told of them.

A server has `name`, `transport` (`stdio`, `sse` or `streamable-http`), and `command` with `args`,
or `url`. The agent starts or calls it, inside its sandbox. Source of the forms: the pages on MCP of
Claude Code (`mcpServers` in ~/.claude.json) and of Codex (`mcp_servers` in ~/.codex/config.toml).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from batch_trajectories.basics import exact_json

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
