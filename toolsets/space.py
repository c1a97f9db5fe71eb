"""The name that tools of users import: `TaskSpace` is `ToolContext`."""

from toolsets.context import ToolContext as TaskSpace

__all__ = ["TaskSpace"]
