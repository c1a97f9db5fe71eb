"""MCP servers as toolsets."""
