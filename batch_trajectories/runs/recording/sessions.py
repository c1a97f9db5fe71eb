"""The sessions of a recording: each is a row of its dataset, and becomes a record."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from pathlib import Path

import orjson
from aiohttp import web

from agent.gateway.server import key_of
from batch_trajectories.basics import exact_json
from batch_trajectories.runs.dataset.row import RowRules
from batch_trajectories.runs.dataset.scan import Scan, scan, task_of, tasks
from batch_trajectories.runs.store.files import AppendFile, make_directory, repair_tail
from batch_trajectories.runs.store.tasks import Task

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_OF_PATH = re.compile(r"/sessions/([^/?]+)(/[^?]*)?(\?.*)?")

DEFAULT = "session"
"""The session of requests that name none."""


class BadName(ValueError):
    """Not a valid name for a session."""


def session_of(request: web.BaseRequest) -> tuple[str, str]:
    """The session that a request belongs to, and its path within it.

    Sessions are named by the path, /sessions/NAME/..., or else by the API key, of which only a
    digest is kept. Raises `BadName`.
    """
    path = request.raw_path
    if match := _OF_PATH.fullmatch(path):
        name, rest, query = match.groups()
        if not _NAME.fullmatch(name):
            raise BadName(
                f"{name!r} is no name of a session: letters, digits and ._:- only, up to 128"
            )
        return name, (rest or "/") + (query or "")
    key = key_of(request)
    if not key:
        return DEFAULT, path
    return f"key-{hashlib.blake2b(key.encode(), digest_size=6).hexdigest()}", path


class SessionFile:
    """`sessions.jsonl`: the dataset of a recording, one row per session, with its first prompt."""

    def __init__(self, path: Path, rules: RowRules, quarantine: Path) -> None:
        """Open the file, and create it if it is new. Raises `StorageError`."""
        make_directory(path.parent, is_inside=False, parents=True)
        self.path = path
        self._rules = rules
        repair_tail(path, quarantine)
        self._file = AppendFile(path)
        self._seen: Counter[str] = Counter()
        self.tasks = list(tasks(self.scan()))
        """The rows of all sessions so far."""
        for task in self.tasks:
            self._seen[task.columns["id"]] += 1

    def scan(self) -> Scan:
        """The file as a dataset; it may be empty."""
        return scan(self.path, max_samples=None, rules=self._rules, may_be_empty=True)

    def begin(self, name: str, prompt: str) -> Task:
        """A new session, on disk. A name that was used before gets a number."""
        self._seen[name] += 1
        columns = {"id": name, "prompt": prompt}
        self._file.append(exact_json.dumps(columns, option=orjson.OPT_APPEND_NEWLINE))
        return task_of(columns, self._rules, occurrence=self._seen[name])

    def sync(self) -> None:
        """Make the rows survive a power loss."""
        self._file.sync()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
