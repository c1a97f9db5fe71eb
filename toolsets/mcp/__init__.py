"""MCP servers as toolsets.

mcp_settings    the `mcp` entries of a config
argument_check  checks arguments against the schema of a server
connection      one connection to one server
servers         servers as toolsets
mcp_launcher    starts a server, and kills it when its worker dies
"""
