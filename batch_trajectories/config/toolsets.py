"""The toolsets that a run can name: built-in ones, the user's own, and MCP servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from batch_trajectories.config.run_config import RunConfig
from toolsets.catalog.registry import ALL, TOOLSETS, Toolset, catalog

if TYPE_CHECKING:
    from toolsets.mcp.mcp_settings import McpServer
    from toolsets.mcp.servers import McpServers


def build_catalog(config: RunConfig, servers: McpServers | None = None) -> Mapping[str, Toolset]:
    """All toolsets that `config` can name; tools of MCP servers call `servers`.

    Raises `ValueError` with a message for the user.
    """
    added: list[Toolset] = []
    if config.tools:
        from toolsets.catalog.custom import load_custom_toolsets

        added += load_custom_toolsets(config.tools)
    if config.mcp:
        from toolsets.mcp.servers import McpServers

        added += (servers or McpServers(config.mcp)).toolsets()
    return catalog(added) if added else TOOLSETS


def list_mcp_tools(config: RunConfig) -> RunConfig:
    """Start the MCP servers that conversations may use, and store their tools in the config.

    All conversations are then offered the same tools, even if a server changes its list. Blocks.
    Raises `McpError`.
    """
    if not config.mcp:
        return config
    wanted = {name: server for name, server in config.mcp.items() if _is_wanted(name, config)}
    from agent.session import run_here  # takes long to import, and few runs have MCP servers
    from toolsets.mcp.mcp_settings import McpError
    from toolsets.mcp.servers import list_servers

    by_server = run_here(list_servers(wanted))
    listed: dict[str, McpServer] = {}
    for name, server in by_server.items():
        if isinstance(server, McpError):
            raise server
        listed[name] = server
    return config.model_copy(update={"mcp": {**config.mcp, **listed}})


def find_unused_toolsets(config: RunConfig) -> list[str]:
    """The toolsets of `--tools` and `--mcp` that no conversation or subagent is offered."""
    if not (config.tools or config.mcp):
        return []
    own = [name for name in build_catalog(config) if name not in TOOLSETS]
    return [name for name in own if not _is_wanted(name, config)]


def _is_wanted(name: str, config: RunConfig) -> bool:
    """Whether any conversation, subagent or simulated user may be offered this toolset."""
    selected = config.selected_toolsets()
    names = {*(ALL if selected is None else selected)}
    for subagent in config.subagents:
        names.update(subagent.enabled_toolsets)
    if config.simulated_user is not None:
        names.update(config.simulated_user.enabled_toolsets)
    return name not in config.disabled_toolsets and not names.isdisjoint((name, *ALL))
