"""The names of the columns of a row that mean something."""

from __future__ import annotations

CHAT_COLUMNS = ("messages", "conversations")

ERROR_COLUMN = "row_error"
"""Why a row has no prompt: what it was made from cannot be used."""

MODEL_COLUMN = "model"

AGENT_COLUMN = "agent"

MCP_COLUMN = "mcp_servers"
"""MCP servers of a Harbor task, which agents that run as commands start or call."""

TURNS_COLUMN = "user_turns"
"""Further messages of the user, each sent after an answer."""

USER_COLUMN = "simulated_user"
"""What differs from the run's simulated user."""

FORK_COLUMN = "fork"

SETUP_COLUMNS = ("files", "setup", "cwd", "check")

HISTORY_COLUMNS = ("base_commit", "keep_history")

TELLTALE_COLUMNS = ("check", "files", "setup", "base_commit")
"""Columns whose names other datasets hardly use: rows with them may need `row_setup`."""

IMAGE_COLUMNS = ("docker_image", "image", "image_name")
"""The first one in a row counts."""

INSIDE_COLUMNS = ("workdir", "user", "env", "network", "limits", "hide")
"""Columns that are read only if the workspace is a directory of the image."""
