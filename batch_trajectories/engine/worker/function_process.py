"""The program of a process that calls one reward function.

Arguments: process id of the parent, MODULE:FUNCTION or FILE.py:FUNCTION. Each line of standard
input is a request, {"record", "workspace"}, or with "home" if the workspace is inside an image;
each line of standard output answers one: the keys `rewards`, `turn_rewards` and `error` of a score,
or `machine` if the machine failed. Before that, lines with "files" ask about files inside the
image, and the next line of input answers. The first line of output is {"version"} or {"error"}:
whether the function could be imported. What the function itself prints goes to standard error. The
process ends with its input, or with its parent.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath, PurePosixPath
from typing import IO, Any, ClassVar

import orjson

from batch_trajectories.basics import exact_json
from batch_trajectories.basics.errors import machine_failure
from batch_trajectories.basics.process import die_with_parent
from batch_trajectories.basics.text import clip, valid_utf8
from batch_trajectories.records.checks import parse_rewards
from toolsets.catalog.custom import CustomToolError, import_function

_MAX_CHARS = 100_000
"""A reason is stored whole; the limit is for functions that put a whole file into their error."""
_VERSION_CHARS = 16


def main() -> None:
    """Answer requests until the input ends."""
    parent, reference = sys.argv[1:]
    die_with_parent(int(parent))
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    try:
        function = import_function(reference, "--reward")
        _check_arguments(function, reference)
    except CustomToolError as error:
        _send(replies, {"error": str(error)})
        return
    _send(replies, {"version": digest_source(function)})
    name = reference.rpartition(":")[2].rpartition(".")[2]

    def ask(request: dict[str, Any]) -> dict[str, Any]:
        _send(replies, {"files": request})
        answered: dict[str, Any] = orjson.loads(sys.stdin.buffer.readline())
        return answered

    while line := sys.stdin.buffer.readline():
        sys.stdout.flush()
        os.ftruncate(2, 0)  # only the output of this call is of interest
        os.lseek(2, 0, os.SEEK_SET)
        request = exact_json.loads(line)
        workspace = request["workspace"] and Path(request["workspace"])
        if (home := request.get("home")) is not None:
            # This file runs as `__main__`; functions that import the class get it from its module.
            from batch_trajectories.engine.worker.function_process import ImagePath

            ImagePath.ask = staticmethod(ask)
            workspace = ImagePath(home)
        _send(replies, _call(function, name, request["record"], workspace))


def _check_arguments(function: Callable[..., Any], reference: str) -> None:
    try:
        inspect.signature(function).bind(None, None, None)
    except TypeError as error:
        raise CustomToolError(
            f"--reward: {reference!r} must take (conversation, workspace, row): {error}"
        ) from error
    except ValueError:
        return  # code in C need not say what it takes


def digest_source(function: Callable[..., Any]) -> str:
    """A digest of the file that defines a function, so a changed function has another version."""
    module = sys.modules.get(getattr(inspect.unwrap(function), "__module__", ""))
    file = getattr(module, "__file__", None)
    if file is None:
        return "unknown"
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:_VERSION_CHARS]


def _call(
    function: Callable[..., Any], name: str, record: dict[str, Any], workspace: PurePath | None
) -> dict[str, Any]:
    row = record.pop("row")
    turns = sum("inherited" not in turn for turn in record["turns"])
    try:
        result = function(record, workspace, row)
        if inspect.isawaitable(result):
            import asyncio  # takes longer than most functions

            result = asyncio.run(_wait_result(result))
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        if (message := machine_failure(error)) is not None:
            return {"machine": message}
        return {"rewards": None, "error": _describe(error)}
    try:
        return {**parse_rewards(result, name=name, turns=turns).to_json(), "error": None}
    except ValueError as error:
        return {
            "rewards": None,
            "error": f"what it returned {clip(str(error), max_chars=_MAX_CHARS)}",
        }


async def _wait_result(awaitable: Any) -> Any:
    return await awaitable


def _describe(error: BaseException) -> str:
    """Type and message of an error, and the line that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    message = clip(valid_utf8(f"{type(error).__name__}: {error}"), max_chars=_MAX_CHARS)
    return f"{message} ({Path(last.filename).name}:{last.lineno})"


def _send(replies: IO[bytes], reply: dict[str, Any]) -> None:
    line = memoryview(orjson.dumps(reply) + b"\n")
    while line:
        line = line[replies.write(line) :]


Ask = Callable[[dict[str, Any]], dict[str, Any]]
"""Makes a request to the worker; see `answer` of `engine.worker.reward_functions`."""


class ImagePath(PurePosixPath):
    """Reads like a `pathlib.Path`. The calls of a process are made one after the other."""

    ask: ClassVar[Ask]

    def read_bytes(self) -> bytes:
        """The content of a regular file. Raises `OSError`."""
        return base64.b64decode(self._request("read")["content"])

    def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The content of a text file. Raises `OSError` and `UnicodeDecodeError`."""
        return self.read_bytes().decode(encoding, errors)

    def is_file(self) -> bool:
        """Whether the path is a regular file that the conversation's user can read."""
        with contextlib.suppress(OSError):
            self._request("probe")
            return True
        return False

    def is_dir(self) -> bool:
        """Whether the path is a directory that the conversation's user can read."""
        with contextlib.suppress(OSError):
            self._request("listing")
            return True
        return False

    def exists(self) -> bool:
        """Whether the path is a file or a directory."""
        return self.is_file() or self.is_dir()

    def iterdir(self) -> Iterator[ImagePath]:
        """The paths in a directory, sorted by name. Raises `OSError`."""
        for name in self._request("listing")["names"]:
            yield self / name.rpartition("/")[2]

    def rglob(self, pattern: str) -> Iterator[ImagePath]:
        """The paths beneath a directory that match a pattern without `**`. Raises `OSError`."""
        for name in self._request("walk")["names"]:
            if (path := self / name).match(pattern):
                yield path

    def __fspath__(self) -> str:
        """Refused: `open` would look for the path on this machine."""
        raise TypeError(
            f"{self} is inside an image: use its read_text, read_bytes, iterdir or rglob"
        )

    def _request(self, op: str) -> dict[str, Any]:
        reply = ImagePath.ask({"op": op, "path": str(self)})
        if "missing" in reply:
            raise FileNotFoundError(reply["missing"])
        if "error" in reply:
            raise OSError(reply["error"])
        return reply
