"""Tools that an agent can call, the toolsets that group them, and the sandboxes they run in.

errors      ToolError and HostError: failures of a tool, failures of the machine
extras      how to install an optional dependency
installed   where a program of the user's is, and what it needs to run
exact_json  JSON with integers of any size; how deep it is nested
locked      a lock that processes of this machine wait for
text        cutting and decoding text
validation  checks values; describes what pydantic rejected
yaml_file   reads YAML files; its errors name line and column
per_loop    resources that the conversations of an event loop share
context     ToolContext, the first argument of every tool function
space       TaskSpace, the older name of ToolContext
docstring   descriptions of parameters from a docstring
signature   a function's signature as a schema
tool        Tool and ToolResult; makes a tool of a function
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

Other rooms import only the modules in `SEAM`.
"""

SEAM = (
    "browser.process",
    "builtin.command_result",
    "catalog.custom",
    "catalog.distributions",
    "catalog.places",
    "catalog.registry",
    "context",
    "errors",
    "exact_json",
    "extras",
    "images.image_error",
    "installed",
    "mcp.mcp_settings",
    "mcp.servers",
    "net.web_settings",
    "sandbox.base",
    "sandbox.cgroup",
    "sandbox.docker",
    "sandbox.factory",
    "sandbox.image",
    "sandbox.image_files",
    "sandbox.programs",
    "text",
    "tool",
    "toolbox",
    "validation",
    "workspace.removal",
    "workspace.workspace",
    "yaml_file",
)
