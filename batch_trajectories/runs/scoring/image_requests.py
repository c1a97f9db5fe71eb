"""Answers what a reward function asks about the files inside a conversation's image."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from batch_trajectories.basics.errors import ToolError
from toolsets.context import ToolContext
from toolsets.workspace.workspace import PathError

_MAX_FILE_BYTES = 32 << 20


class Inside(NamedTuple):
    """The workspace of a conversation that is inside an image."""

    home: str
    """Its path in the image."""
    open: Callable[[], Awaitable[ToolContext]]
    """Opens it; a sandbox starts when it is first used. Raises `ToolError`."""


def answer(context: ToolContext, request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request of `ImagePath`; waits, so call it in a thread. Raises `HostError`.

    `op` is "read" (`content`), "probe" (whether a file can be read), "listing" or "walk" (`names`).
    What failed is `missing` or `error`.
    """
    files, path = context.workspace, request["path"]
    try:
        match request["op"]:
            case "probe":
                files.read_bytes(path, 1)
                return {}
            case "read":
                content = files.read_bytes(path, _MAX_FILE_BYTES + 1)
                if len(content) > _MAX_FILE_BYTES:
                    return {"error": f"path {path!r} is larger than {_MAX_FILE_BYTES} bytes"}
                return {"content": base64.b64encode(content).decode()}
            case "listing":
                return {"names": [entry.path for entry in files.listing(path)]}
        return {"names": [entry.path for entry in files.walk(path)]}
    except PathError as error:
        return {"missing" if error.is_missing else "error": str(error)}
    except ToolError as error:
        return {"error": str(error)}
