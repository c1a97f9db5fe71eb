"""Tools that an agent can call, the toolsets that group them, and the sandboxes they run in.

context     ToolContext, the first argument of every tool function
space       TaskSpace, the older name of ToolContext
tool        Tool and ToolResult; makes a tool of a function and its docstring
toolbox     the tools of one conversation; runs their calls
workspace/  the directory that a conversation works in
images/     container images: found, and unpacked once
net/        what web tools and browser may reach
sandbox/    where commands run: bwrap, docker, or plain processes
builtin/    the tools of `file`, `terminal` and `python`
web/        the tools of `web`
browser/    the tools of `browser`, and the Chromium behind them
catalog/    all toolsets, and the choice of those a task gets
mcp/        MCP servers as toolsets

Other rooms import browser/process, builtin/command_result, catalog/custom,
catalog/distributions, catalog/places, catalog/registry, context, mcp/mcp_settings, mcp/servers,
net/web_settings, tool, toolbox.
"""
