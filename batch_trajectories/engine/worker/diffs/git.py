"""Runs git in the sandbox of an image."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from batch_trajectories.basics.errors import ToolError
from batch_trajectories.basics.text import clip
from toolsets.context import ToolContext
from toolsets.sandbox.base import ExecResult, Sandbox
from toolsets.sandbox.image_files import ImageSandbox

TIMEOUT_S = 600.0
_ARGUMENTS_BYTES = 64 << 10

# `safe.directory`: the files may belong to another user than commands. Modes are those on disk.
# Names of objects are not looked for among refs, of which repositories can have thousands.
_CONFIG = {
    "safe.directory": "*",
    "core.fileMode": "true",
    "core.fsmonitor": "false",
    "core.hooksPath": "/dev/null",
    "core.warnAmbiguousRefs": "false",
    "core.safecrlf": "false",
}
VARIABLES = {"LC_ALL": "C", "GIT_CONFIG_COUNT": str(len(_CONFIG))}
"""The environment of git, beside that of the sandbox."""
for _number, (_key, _value) in enumerate(_CONFIG.items()):
    VARIABLES |= {f"GIT_CONFIG_KEY_{_number}": _key, f"GIT_CONFIG_VALUE_{_number}": _value}
GIT = (
    "set -e; umask 077; unset GIT_DIFF_OPTS; export "
    + " ".join(f"{name}='{value}'" for name, value in VARIABLES.items())
    + "; "
)
AT_TOP = GIT + 'cd "$1"; shift; '
AT_STORE = AT_TOP + "store=$1; shift; "
# What the repository configures is not asked: `git apply` takes no diff without context.
SHOWN_AS = (
    "--binary --no-color --no-ext-diff --no-textconv --no-renames --src-prefix=a/ --dst-prefix=b/ "
    "--unified=3 --inter-hunk-context=0 -O/dev/null"
)


class DiffError(Exception):
    """The changes of a conversation cannot be copied to a fresh workspace."""


async def run(
    sandbox: Sandbox,
    script: str,
    *arguments: str,
    stdin: bytes = b"",
    timeout_s: float = TIMEOUT_S,
) -> ExecResult:
    """Run a script, which must end with 0. Raises `DiffError`."""
    argv = ["sh", "-c", script, "sh", *arguments]
    result = await sandbox.exec(argv, timeout_s=timeout_s, stdin=stdin)
    if result.exit_code != 0:
        output = clip((result.stderr or result.stdout).strip(), max_chars=500)
        how = "it timed out" if result.timed_out else f"exit code {result.exit_code}"
        raise DiffError(f"the diff cannot be made: {output or how}")
    return result


def encode_paths(paths: Iterable[str]) -> bytes:
    """Paths as git reads them with `-z`."""
    return b"".join(path.encode() + b"\0" for path in sorted(paths))


def batches(paths: Iterable[str]) -> Iterator[list[str]]:
    """Paths that fit into the arguments of a command."""
    some: list[str] = []
    size = 0
    for path in paths:
        size += len(path.encode()) + 1
        if some and size > _ARGUMENTS_BYTES:
            yield some
            some, size = [], len(path.encode()) + 1
        some.append(path)
    if some:
        yield some


def uppermost(paths: Iterable[str]) -> Sequence[str]:
    """Paths in their order, without the paths beneath another."""
    found: list[str] = []
    for path in sorted(paths, key=lambda path: path.split("/")):
        if not found or not path.startswith(f"{found[-1]}/"):
            found.append(path)
    return found


def image_sandbox(context: ToolContext) -> ImageSandbox:
    """The sandbox of a workspace in an image. Raises `ToolError`."""
    if context.sandbox is None:
        raise ToolError("there is no sandbox to run commands in")
    return cast("ImageSandbox", context.sandbox)
