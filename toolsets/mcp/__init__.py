"""MCP servers as toolsets.

mcp_settings    the `mcp` entries of a config
connection      one connection to one server
servers         servers as toolsets; checks arguments of calls
mcp_launcher    starts a server, and kills it when its worker dies
"""
