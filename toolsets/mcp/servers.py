"""MCP servers as toolsets: tools are named `server__tool`; arguments are checked before a call."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from batch_trajectories.basics.errors import HostError, install_command
from batch_trajectories.basics.per_loop import PerLoop
from batch_trajectories.basics.text import clip
from toolsets.catalog.registry import Toolset
from toolsets.context import ToolContext
from toolsets.mcp.connection import Link, StartError
from toolsets.mcp.mcp_settings import ListedTool, McpError, McpServer
from toolsets.tool import TOOL_NAME, ArgumentsError, Tool, ToolResult
from toolsets.workspace.workspace import HOME

_STARTS_AT_A_TIME = 4


async def list_servers(servers: Mapping[str, McpServer]) -> dict[str, McpServer | McpError]:
    """Start each server, list its tools and stop it again.

    Returns each server with its tools, or the reason why it cannot be used.
    """
    if servers and find_spec("mcp") is None:
        missing = McpError(f"mcp: the MCP SDK is missing: {install_command('mcp')}")
        return dict.fromkeys(servers, missing)
    starts = asyncio.Semaphore(_STARTS_AT_A_TIME)
    tasks = [_probe(name, server, starts) for name, server in servers.items()]
    return dict(zip(servers, await asyncio.gather(*tasks), strict=True))


class McpServers(PerLoop["_Links"]):
    """The servers of one process, each started at the first call of one of its tools.

    Servers of a single task are closed with its context.
    """

    def __init__(self, servers: Mapping[str, McpServer]) -> None:
        super().__init__(_Links, _close_links)
        self._servers = servers

    def toolsets(self) -> tuple[Toolset, ...]:
        """Return one toolset per server; it is empty if the server was not asked for its tools.

        Raises `McpError` for tools that cannot be offered.
        """
        return tuple(self._toolset(name, server) for name, server in self._servers.items())

    def _toolset(self, name: str, server: McpServer) -> Toolset:
        tools = tuple(self._tool(name, server, listed) for listed in server.listed or ())
        names = [tool.name for tool in tools]
        for tool in tools:
            if names.count(tool.name) > 1:
                raise McpError(f"mcp: server {name!r} has two tools called {tool.name!r}")
        return Toolset(name, f"Tools of the MCP server {name}.", tools)

    def _tool(self, name: str, server: McpServer, listed: ListedTool) -> Tool:
        tool_name = listed.full_name(name)
        if not TOOL_NAME.fullmatch(tool_name):
            raise McpError(
                f"mcp: server {name!r}: the tool name {clip(tool_name, max_chars=100)!r} is too "
                "long for endpoints, which allow 64 characters; give the server a shorter name"
            )

        async def call(context: ToolContext, /, **arguments: Any) -> ToolResult:
            link = self._link(name, server, context)
            if not server.is_per_task:
                return _as_result(await link.call(listed.name, arguments))
            await asyncio.to_thread(context.workspace.make)
            result = await link.call(listed.name, _translate(arguments, context))
            return _as_result(result, roots=_roots(context), home=context.home)

        return Tool(
            name=tool_name,
            description=listed.description,
            parameters=dict(listed.input_schema),
            function=call,
            arguments_model=None,
            idempotent=listed.is_idempotent,
            effects="none" if listed.is_read_only else server.effects,
            sequential=not listed.is_read_only,
            check=make_check(listed.input_schema, tool_name),
        )

    def _link(self, name: str, server: McpServer, context: ToolContext) -> Link:
        links = self.shared()
        if server.is_per_task:
            key = f"mcp:{name}"
            link = context.held.get(key)
            if not isinstance(link, Link):
                link = Link(name, server, starts=links.starts, workspace=context.workspace.root)
                context.held[key] = link
            return link
        if name not in links.shared:
            links.shared[name] = Link(name, server, starts=links.starts, workspace=None)
        return links.shared[name]


@dataclass(slots=True)
class _Links:
    """The servers that the tasks of one event loop share."""

    shared: dict[str, Link] = field(default_factory=dict)
    starts: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_STARTS_AT_A_TIME))


async def _close_links(links: _Links) -> None:
    await asyncio.gather(*(link.close() for link in links.shared.values()))


async def _probe(name: str, server: McpServer, starts: asyncio.Semaphore) -> McpServer | McpError:
    with tempfile.TemporaryDirectory(prefix="mcp-") as directory:
        link = Link(name, server, starts=starts, workspace=Path(directory))
        try:
            async with asyncio.timeout(2 * server.start_timeout_s):
                listed = await link.list_tools()
            # The path differs at each start; with it, the config fingerprint of a run would too.
            return server.with_listed_tools(tuple(_remove_path(tool, directory) for tool in listed))
        except (StartError, HostError) as error:
            return McpError(f"mcp: {error}")
        except Exception as error:
            message = " ".join(str(error).split()) or type(error).__name__
            return McpError(f"mcp: the server {name!r} does not list its tools: {message}")
        finally:
            await link.close()


def _remove_path(tool: ListedTool, directory: str) -> ListedTool:
    schema = json.dumps(tool.input_schema).replace(directory, HOME)
    description = tool.description.replace(directory, HOME)
    return replace(tool, description=description, input_schema=json.loads(schema))


def _roots(context: ToolContext) -> tuple[str, ...]:
    """Return the paths of the workspace that a server may print, the longest first."""
    root = context.workspace.root
    return tuple(sorted({str(root), str(root.resolve())}, key=len, reverse=True))


def _translate(value: Any, context: ToolContext) -> Any:
    """Replace the workspace path that the model sees by the real path in all arguments."""
    if isinstance(value, dict):
        return {key: _translate(inner, context) for key, inner in value.items()}
    if isinstance(value, list):
        return [_translate(inner, context) for inner in value]
    if isinstance(value, str) and (value == context.home or value.startswith(f"{context.home}/")):
        return str(context.workspace.root) + value[len(context.home) :]
    return value


def _as_result(result: Any, *, roots: tuple[str, ...] = (), home: str = "") -> ToolResult:
    """Convert a result of the SDK: its texts, and a mark for other content."""
    parts = [_as_text(block) for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    content = "\n".join(parts)
    for root in roots:
        content = content.replace(root, home)
    return ToolResult(content, is_error=bool(result.is_error))


def _as_text(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type == "resource_link":
        return f"[resource {block.uri}]"
    if block.type == "resource":
        text = getattr(block.resource, "text", None)
        return f"[resource {block.resource.uri}]" if text is None else str(text)
    return f"[{block.type} {block.mime_type}, {len(block.data) * 3 // 4} bytes]"


_MAX_PROBLEMS = 10
_MAX_PROBLEM_CHARS = 300
_PATTERN_TIMEOUT_S = 0.2
"""Maximum duration of a search, for which all conversations of the worker wait."""
_CHECK_TIMEOUT_S = 1.0
"""Maximum duration of the check of all arguments of a call."""


class _CheckTimeoutError(Exception):
    """A check takes longer than its time limit."""


def make_check(schema: Mapping[str, Any], tool_name: str) -> Callable[[dict[str, Any]], None]:
    """Return a check of arguments by a server's schema; raises `McpError` if it is invalid.

    The server itself must check references to other documents, and patterns and references that
    take too long.
    """
    import jsonschema
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
        if '"pattern' in json.dumps(schema):
            kind = jsonschema.validators.extend(kind, _Patterns(kind.VALIDATORS).keywords())
        limit = _Limit()
        kind = jsonschema.validators.extend(kind, limit.keywords(kind.VALIDATORS))
    except jsonschema.SchemaError as error:
        raise McpError(
            f"mcp: the schema of {tool_name} is not a JSON Schema: {error.message}"
        ) from error
    except RecursionError:
        raise McpError(
            f"mcp: the schema of {tool_name} is nested too deeply to be checked; have the server "
            "list a flatter one, or leave the server out"
        ) from None
    # The default registry would fetch references from the network.
    validator = kind(schema, registry=Registry())

    def check(arguments: dict[str, Any]) -> None:
        limit.until = time.monotonic() + _CHECK_TIMEOUT_S
        try:
            problems = sorted(validator.iter_errors(arguments), key=lambda error: error.json_path)
        except (Unresolvable, _CheckTimeoutError):
            return
        except RecursionError:
            raise ArgumentsError("the JSON is nested too deeply") from None
        lines = [
            f"{'.'.join(map(str, problem.absolute_path)) or 'arguments'}: "
            f"{clip(problem.message, max_chars=_MAX_PROBLEM_CHARS)}"
            for problem in problems[:_MAX_PROBLEMS]
        ]
        if lines:
            raise ArgumentsError("\n".join(lines))

    return check


class _Limit:
    """The time limit of a check; each keyword of JSON Schema compares the clock with it."""

    def __init__(self) -> None:
        self.until = 0.0

    def keywords(self, unlimited: Mapping[str, Any]) -> dict[str, Any]:
        """Return functions of jsonschema that raise `_CheckTimeoutError` after the time limit."""
        return {name: self._limit(function) for name, function in unlimited.items()}

    def _limit(self, function: Any) -> Any:
        def keyword(*arguments: Any) -> Any:
            if time.monotonic() > self.until:
                raise _CheckTimeoutError
            return function(*arguments)

        return keyword


class _Patterns:
    """The keywords of JSON Schema that search with patterns, with a time limit."""

    def __init__(self, keywords: Mapping[str, Any]) -> None:
        """`keywords` are the functions of jsonschema."""
        # A server can write patterns that search for ever, and jsonschema has no limit.
        self._unlimited = keywords
        self._unusable: set[str] = set()

    def keywords(self) -> dict[str, Any]:
        """Return the functions for `jsonschema.validators.extend`."""
        return {
            "pattern": self._pattern,
            "patternProperties": self._pattern_properties,
            "additionalProperties": self._additional_properties,
            "unevaluatedProperties": lambda *_: (),  # left to the server
        }

    def _matches(self, pattern: str, text: str) -> bool | None:
        """Whether a pattern is found; None if the pattern cannot be used."""
        import regex

        if pattern in self._unusable:
            return None
        try:
            return regex.search(pattern, text, timeout=_PATTERN_TIMEOUT_S) is not None
        except (TimeoutError, regex.error):
            self._unusable.add(pattern)
            return None

    def _pattern(self, validator: Any, pattern: str, value: Any, _: Any) -> Iterator[Any]:
        from jsonschema import ValidationError

        if validator.is_type(value, "string") and self._matches(pattern, value) is False:
            yield ValidationError(f"{value!r} does not match {pattern!r}")

    def _pattern_properties(
        self, validator: Any, patterns: Mapping[str, Any], value: Any, _: Any
    ) -> Iterator[Any]:
        if not validator.is_type(value, "object"):
            return
        for pattern, schema in patterns.items():
            for key, inner in value.items():
                if self._matches(pattern, key):
                    yield from validator.descend(inner, schema, path=key, schema_path=pattern)

    def _additional_properties(
        self, validator: Any, allowed: Any, value: Any, schema: Mapping[str, Any]
    ) -> Iterator[Any]:
        patterns = schema.get("patternProperties", {})
        if validator.is_type(value, "object"):
            # Leave out keys that match or may match, so that jsonschema does not search them.
            value = {
                key: inner
                for key, inner in value.items()
                if all(self._matches(pattern, key) is False for pattern in patterns)
            }
            schema = {key: inner for key, inner in schema.items() if key != "patternProperties"}
        yield from self._unlimited["additionalProperties"](validator, allowed, value, schema)
