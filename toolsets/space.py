"""`TaskSpace`, the older name of `ToolContext`, which tools of users may import."""

from toolsets.context import ToolContext as TaskSpace

__all__ = ["TaskSpace"]
