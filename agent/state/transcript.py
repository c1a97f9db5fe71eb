"""The transcript of one conversation: a JSONL file that grows with it.

Lines by `type`: `request` (model, messages, tools), then every event of the conversation
(`response`, `tool_result`, `note`, `opening`, `resumed`, `sub`), `error` if the endpoint failed,
and `accounting` at the end. It contains no API keys.
"""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path
from typing import Any

from agent.messages.message import Event
from batch_trajectories.basics import exact_json

_TYPES = {"reply": "response", "result": "tool_result"}


class Transcript:
    """An open transcript; its lines survive a crash of the process."""

    def __init__(self, directory: Path, run_id: str | None) -> None:
        """Create `directory` and open `<run_id>.jsonl` in it; without an id, a name by time."""
        directory.mkdir(parents=True, exist_ok=True)
        now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        name = run_id or f"{now}-{uuid.uuid4().hex[:8]}"
        self.path = directory / f"{_plain(name)}.jsonl"
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.fchmod(self._fd, 0o600)

    def write(self, type: str, **fields: Any) -> None:
        """Append one line."""
        os.write(self._fd, exact_json.dumps({"type": type, **fields}) + b"\n")

    def write_event(self, event: Event) -> None:
        """Append one event of the conversation."""
        fields = {k: v for k, v in event.items() if k != "kind"}
        self.write(_TYPES.get(event["kind"], event["kind"]), **fields)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _plain(name: str) -> str:
    """A file name that stays in its directory."""
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in name).lstrip(".") or "run"
