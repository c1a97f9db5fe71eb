"""Look for the solution of a task where an agent could read it, before it has done anything.

Looked through are the prompt, all text files of the workspace or its image, packages and other
archives, and the objects of git repositories: those of the workspace's own that are not in the
history of HEAD, and all of others. What counts is text that only a solved workspace has: of a
patch, what its hunks make of a file. Compiled files are not read.
"""

from __future__ import annotations

import asyncio
import io
import re
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from batch_trajectories.runs.audit.reference import Reference
from batch_trajectories.runs.dataset.row import RowTask
from batch_trajectories.runs.worker.workspace_setup import run_command
from toolsets.builtin.command_result import sandbox_of
from toolsets.context import ToolContext
from toolsets.sandbox.image_files import ImageFiles
from toolsets.workspace.workspace import PathError

_LEAST = 16
"""Characters, without spaces, of a text that is not there by chance."""
_MAX_FILE_BYTES = 8 << 20
_MAX_ARCHIVE_BYTES = 32 << 20
_MAX_MEMBER_BYTES = 4 << 20
_MOST = 20
"""Files and objects that are named."""
_NOT_FILES = ("/proc/", "/sys/", "/dev/")
_ARCHIVES = (".whl", ".zip", ".egg", ".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz")
_TIMEOUT_S = 1800.0
_ANSWER = r"\b(?:answer|solution|result)\b[^\n.]{{0,20}}?(?:\bis\b|=|:)[\s\"'`*($]*{}(?!\w)"

_GIT = """\
export LC_ALL=C GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory 'GIT_CONFIG_VALUE_0=*'
line=$1 store=$2 most=$3
command -v git >/dev/null && command -v find >/dev/null || exit 0
mkdir -p "$store" || exit 0
own=$(git rev-parse --absolute-git-dir 2>/dev/null)
find / -xdev '(' -path /proc -o -path /sys -o -path /dev ')' -prune -o -name HEAD -type f -print \\
    2>/dev/null | while IFS= read -r head; do
    repository=${head%/HEAD}
    [ -d "$repository/objects" ] && [ -d "$repository/refs" ] || continue
    git --git-dir="$repository" cat-file --batch-all-objects \\
        --batch-check='%(objectname) %(objecttype)' 2>/dev/null |
        sed -n 's/ blob$//p' >"$store/blobs"
    if [ "$repository" = "$own" ]; then
        git rev-list --objects HEAD 2>/dev/null | cut -d' ' -f1 >"$store/known"
        grep -vxFf "$store/known" "$store/blobs" >"$store/left"
        mv "$store/left" "$store/blobs"
    fi
    git --git-dir="$repository" cat-file --batch <"$store/blobs" 2>/dev/null |
        grep -qaF -e "$line" || continue
    while read -r blob; do
        if git --git-dir="$repository" cat-file blob "$blob" | grep -qaF -e "$line"; then
            git --git-dir="$repository" cat-file blob "$blob" >"$store/$blob"
            printf '%s %s\\n' "$blob" "$repository"
        fi
    done <"$store/blobs"
done | head -n "$most"
"""


class Sought(NamedTuple):
    """A text that only a solved workspace or the check has."""

    what: str
    path: str
    """The file that has it when the task is solved."""
    parts: tuple[tuple[str, ...], ...]
    """Lines that follow one another; all parts are in one file."""

    @property
    def literal(self) -> str:
        """Its longest line."""
        return max((line for part in self.parts for line in part), key=len)

    def is_in(self, text: str) -> bool:
        """Whether a text has all parts, whatever the space around lines."""
        lines = _joined(_lines(text))
        return all(_joined(part) in lines for part in self.parts)


async def find_leaks(
    context: ToolContext, row: RowTask, reference: Reference | None, expected: str | None
) -> list[dict[str, str]]:
    """Where the solution, or a file of the check, can be read: `what` in words, and `where`.

    Raises `SetupFailed` where no sandbox starts.
    """
    prompt = "\n".join(message["content"] for message in row.opening)
    solution = _of_reference(reference)
    found = [_leak("the prompt", sought) for sought in solution if sought.is_in(prompt)]
    if expected is not None and _says(prompt, expected):
        found.append({"what": "the prompt says the expected answer", "where": "prompt"})
    sought = [*solution, *_of_check(row)]
    if sought:
        found += await asyncio.to_thread(lambda: [*_in_files(context, sought)])
    for one in solution:
        found += await _in_objects(context, one)
    return found[:_MOST]


def _of_reference(reference: Reference | None) -> list[Sought]:
    texts = {} if reference is None else reference.texts()
    return [*_seekable("the solution", texts)]


def _of_check(row: RowTask) -> list[Sought]:
    """The files of the check that the row itself does not give to the model."""
    check = None if row.setup is None else row.setup.check
    if row.setup is None or check is None:
        return []
    shown = set(row.setup.files.values())
    found: list[Sought] = []
    for path, content in check.files.items():
        if content in shown:
            continue
        text = content.decode(errors="replace")
        is_patch = path.endswith((".patch", ".diff"))
        texts = Reference(patch=text).texts() if is_patch else {"": [text]}
        found += _seekable(f"{path} of the check", texts)
    return found


def _seekable(what: str, texts: Mapping[str, Sequence[str]]) -> Iterator[Sought]:
    """Those texts that are long enough to be recognized."""
    for path, parts in texts.items():
        lines = tuple(part for part in (tuple(_lines(text)) for text in parts) if part)
        if sum(len(re.sub(r"\s", "", line)) for part in lines for line in part) >= _LEAST:
            yield Sought(what, path, lines)


def _joined(lines: Iterable[str]) -> str:
    return "\n" + "".join(f"{line}\n" for line in lines)


def _lines(text: str) -> list[str]:
    """The lines of a text that are not empty, without the space around them."""
    return [line for line in map(str.strip, text.splitlines()) if line]


def _says(prompt: str, expected: str) -> bool:
    return re.search(_ANSWER.format(re.escape(expected.strip())), prompt, re.I) is not None


def _leak(where: str, sought: Sought) -> dict[str, str]:
    return {"what": f"{where} has {sought.what}", "where": where}


def _in_files(context: ToolContext, sought: Sequence[Sought]) -> Iterator[dict[str, str]]:
    files = context.workspace
    top = "/" if isinstance(files, ImageFiles) else "."

    def is_text(path: str) -> bool:
        return not path.startswith(_NOT_FILES) and "/.git/" not in f"/{path}"

    for one in sought:
        literal = one.literal.encode()
        for path, content in files.contents(top, is_text, literal, max_bytes=_MAX_FILE_BYTES):
            if path != one.path and one.is_in(content.decode(errors="replace")):
                yield _leak(path, one)
    archives = [
        entry.path
        for entry in files.walk(top)
        if entry.kind == "file"
        and entry.path.endswith(_ARCHIVES)
        and is_text(entry.path)
        and entry.size_bytes <= _MAX_ARCHIVE_BYTES
    ]
    for path in archives:
        try:
            content = files.read_bytes(path, _MAX_ARCHIVE_BYTES)
        except PathError:
            continue  # it may not be read, also not by an agent
        for name, member in _members(content):
            for one in sought:
                if one.is_in(member.decode(errors="replace")):
                    yield _leak(f"{path}: {name}", one)


def _members(content: bytes) -> Iterator[tuple[str, bytes]]:
    """The files in an archive, of each the first bytes; what cannot be read is left out."""
    file = io.BytesIO(content)
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                for name in archive.namelist():
                    with archive.open(name) as member:
                        yield name, member.read(_MAX_MEMBER_BYTES)
            return
        file.seek(0)
        with tarfile.open(fileobj=file) as tar:
            for item in tar:
                if item.isreg() and (opened := tar.extractfile(item)) is not None:
                    yield item.name, opened.read(_MAX_MEMBER_BYTES)
    except (zipfile.BadZipFile, tarfile.TarError, OSError, EOFError, RuntimeError, ValueError):
        return  # damaged, or encrypted: nobody can read it


async def _in_objects(context: ToolContext, sought: Sought) -> list[dict[str, str]]:
    """Objects of git that have the solution, in images; elsewhere no repository is brought."""
    files = context.workspace
    if not isinstance(files, ImageFiles):
        return []
    store = f"/tmp/.objects-{files.root.name[:16]}"
    argv = ["sh", "-c", _GIT, "sh", sought.literal, store, str(_MOST)]
    result = await sandbox_of(context).exec(argv, timeout_s=_TIMEOUT_S)
    found = []
    for line in result.stdout.splitlines():
        blob, _, repository = line.partition(" ")
        content = await asyncio.to_thread(files.read_bytes, f"{store}/{blob}", _MAX_FILE_BYTES)
        if sought.is_in(content.decode(errors="replace")):
            found.append(_leak(f"object {blob[:12]} of {repository}", sought))
    await run_command(context, ["rm", "-rf", "--", store])
    return found
