"""Searches for the solution of a task in all places that an agent can read from the start.

It reads the prompt, all text files of the workspace or its image, packages and other archives, and
the objects of git repositories (except files of HEAD in the workspace's repository). It searches
for text that only a solved workspace has; of a patch, this is the new text of its hunks. Compiled
files are not read.
"""

from __future__ import annotations

import asyncio
import io
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from lzma import LZMAError
from typing import NamedTuple

from batch_trajectories.audit.reference import Reference, SolvedFile
from batch_trajectories.dataset.row import RowTask
from batch_trajectories.engine.worker.workspace_setup import SetupFailed, run_command
from toolsets.context import ToolContext
from toolsets.sandbox.commands import require_sandbox
from toolsets.sandbox.image_files import ImageFiles
from toolsets.workspace.workspace import PathError

_MIN_CHARS = 16
"""Minimum characters, without spaces, of a text that cannot occur by chance."""
_MAX_FILE_BYTES = 8 << 20
_MAX_ARCHIVE_BYTES = 32 << 20
_MAX_MEMBER_BYTES = 4 << 20
_MAX_UNPACKED_BYTES = 512 << 20
"""Maximum bytes that are unpacked from one archive."""
_MAX_LEAKS = 20
"""Maximum number of leaks that are reported."""
_MAX_CANDIDATES = 500
"""Maximum number of git objects with a line of the solution that are read."""
_NOT_FILES = ("/proc/", "/sys/", "/dev/")
_ARCHIVES = (".whl", ".zip", ".egg", ".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz")
_TIMEOUT_S = 1800.0
_LABELLED = (
    r"(?:\b(?:answer|solution|result|output|expected|target|label|key|truth|response|reply)s?\b"
    r"[^\n.]{{0,20}}?(?:\bis\b|\bare\b|\bwith\b|=|:|->|\u2192)|<(?:answer|solution)>|####|\\boxed\{{)"
    r"[\s\"'`*($]*{}(?!\w|\.\d)"
)
"""A pattern of an answer that is labelled as such, as datasets do (`#### 42`, `\\boxed{42}`)."""
_WORDS = r"(?<!\w){}(?!\w|\.\d)"
_MIN_ANSWER_CHARS = 4
"""Minimum characters of an answer that cannot occur in a prompt by chance; numbers need one
more."""
_NEAR_CHARS = 80
"""Distance from an answer within which marks of a list of choices are looked for."""
_OFFERED = re.compile(
    r"\b(?:one of|which of|either|choose|select|pick|choices?|options?|alternatives?)\b", re.I
)
_BEFORE_A_CHOICE = re.compile(
    r"(?:(?:^|\n)[ \t]*(?:[-*]|\(?\w{1,2}[.):])|\bor(?:\s+(?:an?|the))?|[/|])[\s\"'`*(]*$", re.I
)
_AFTER_A_CHOICE = re.compile(r"[\"'`*)]*\s*(?:or\b|[/|])", re.I)

# This script prints candidates: objects with a new line of the solution. Git prints a header before
# each object.
_GIT = r"""export LC_ALL=C GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory 'GIT_CONFIG_VALUE_0=*'
lines=$1 store=$2 most=$3
command -v git >/dev/null && command -v find >/dev/null || exit 0
mkdir -p "$store" || exit 0
own=$(git rev-parse --absolute-git-dir 2>/dev/null)
find / -xdev '(' -path /proc -o -path /sys -o -path /dev ')' -prune -o -name HEAD -type f -print \
    2>/dev/null | while IFS= read -r head; do
    repository=${head%/HEAD}
    [ -d "$repository/objects" ] && [ -d "$repository/refs" ] || continue
    git --git-dir="$repository" cat-file --batch-all-objects \
        --batch-check='%(objectname) %(objecttype)' 2>/dev/null |
        sed -n 's/ blob$//p' >"$store/blobs"
    if [ "$repository" = "$own" ]; then
        git ls-tree -r HEAD 2>/dev/null | sed 's/^[0-9]* blob \([0-9a-f]*\).*/\1/' >"$store/known"
        grep -vxFf "$store/known" "$store/blobs" >"$store/left"
        mv "$store/left" "$store/blobs"
    fi
    git --git-dir="$repository" cat-file --batch <"$store/blobs" 2>/dev/null |
        grep -aE -e '^[0-9a-f]{40,64} blob [0-9]+$' -e "$lines" |
        sed -nE -e '/^[0-9a-f]{40,64} blob [0-9]+$/{h;d;}' -e 'g;p' | cut -d' ' -f1 | sort -u |
        while read -r blob; do
            git --git-dir="$repository" cat-file blob "$blob" >"$store/$blob"
            printf '%s %s\n' "$blob" "$repository"
        done
done | head -n "$most"
"""


class SearchText(NamedTuple):
    """A text that only a solved workspace, or the check, has."""

    what: str
    path: str
    """The file that has the text when the task is solved."""
    parts: tuple[tuple[str, ...], ...]
    """Parts of the text, as consecutive lines. A leak has all parts in one file."""
    literal: str
    """The longest new line of the text."""

    def occurs_in(self, text: str) -> bool:
        """Whether a text has all parts, apart from spaces around lines; also one side of a diff."""
        if self.literal not in text:
            return False
        lines = text.splitlines()
        for side in (lines, _diff_side(lines, "+"), _diff_side(lines, "-")):
            joined = _join_lines(_strip_lines(side))
            if all(_join_lines(part) in joined for part in self.parts):
                return True
        return False


async def find_leaks(
    context: ToolContext, row: RowTask, reference: Reference | None, expected: str | None
) -> list[dict[str, str]]:
    """The places where the solution, or a file of the check, can be read.

    Each has `what`, a sentence, and `where`. Raises `SetupFailed` if no sandbox starts, or if the
    search takes too long.
    """
    prompt = "\n".join(message["content"] for message in row.opening)
    solution = _reference_texts(reference)
    leaks = [_leak("the prompt", sought) for sought in solution if sought.occurs_in(prompt)]
    if expected is not None and reveals_answer(prompt, expected):
        leaks.append({"what": "the prompt says the expected answer", "where": "prompt"})
    sought = [*solution, *_check_texts(row)]
    if sought:
        leaks += await asyncio.to_thread(lambda: list(_find_in_files(context, sought)))
    if solution:
        leaks += await _find_in_git(context, solution)
    return leaks[:_MAX_LEAKS]


def _reference_texts(reference: Reference | None) -> list[SearchText]:
    texts = {} if reference is None else reference.texts()
    return list(_search_texts("the solution", texts))


def _check_texts(row: RowTask) -> list[SearchText]:
    """The files of the check, except those that the row gives to the model."""
    check = row.check
    if row.setup is None or check is None:
        return []
    shown = set(row.setup.files.values())
    sought: list[SearchText] = []
    for path, content in check.files.items():
        if content in shown:
            continue
        text = content.decode(errors="replace")
        is_patch = path.endswith((".patch", ".diff"))
        texts = (
            Reference(patch=text).texts()
            if is_patch
            else {"": SolvedFile([text], text.splitlines())}
        )
        sought += _search_texts(f"{path} of the check", texts)
    return sought


def _search_texts(what: str, texts: Mapping[str, SolvedFile]) -> Iterator[SearchText]:
    """Search texts for files; texts that are too short to be recognized are left out."""
    for path, made in texts.items():
        parts = [tuple(_strip_lines(text.splitlines())) for text in made.texts]
        known = [line for part in parts for line in part]
        if sum(len(re.sub(r"\s", "", line)) for line in known) >= _MIN_CHARS:
            literal = max(_strip_lines(made.added) or known, key=len)
            yield SearchText(what, path, tuple(part for part in parts if part), literal)


def _join_lines(lines: Iterable[str]) -> str:
    return "\n" + "".join(f"{line}\n" for line in lines)


def _diff_side(lines: Iterable[str], mark: str) -> Iterator[str]:
    """The lines of one side of a diff: before (`-`) or after (`+`)."""
    return (line[1:] for line in lines if line[:1] in (mark, " "))


def _strip_lines(lines: Iterable[str]) -> list[str]:
    return [line for line in map(str.strip, lines) if line]


def reveals_answer(prompt: str, expected: str) -> bool:
    """Whether a prompt tells the expected answer, not just as one of several choices.

    A short word or number may occur by chance, so it counts only if it is labelled as the answer.
    Case and the amount of space do not matter, as in the comparison of answers.
    """
    words = expected.split()
    if not words:
        return False
    answer = r"\s+".join(map(re.escape, words))
    if re.search(_LABELLED.format(answer), prompt, re.I):
        return True
    is_number = re.fullmatch(r"[-+$]?[\d.,\s]+%?", expected.strip()) is not None
    min_chars = _MIN_ANSWER_CHARS + 1 if is_number else _MIN_ANSWER_CHARS
    if len("".join(words)) < min_chars or _OFFERED.search(prompt):
        return False
    return any(
        not _BEFORE_A_CHOICE.search(prompt[max(0, found.start() - _NEAR_CHARS) : found.start()])
        and not _AFTER_A_CHOICE.match(prompt[found.end() : found.end() + _NEAR_CHARS])
        for found in re.finditer(_WORDS.format(answer), prompt, re.I)
    )


def _leak(where: str, sought: SearchText) -> dict[str, str]:
    return {"what": f"{where} has {sought.what}", "where": where}


def _find_in_files(context: ToolContext, sought: Sequence[SearchText]) -> Iterator[dict[str, str]]:
    files = context.workspace
    top = "/" if isinstance(files, ImageFiles) else "."

    def is_text(path: str) -> bool:
        return not path.startswith(_NOT_FILES) and "/.git/" not in f"/{path}"

    literals = [one.literal.encode() for one in sought]
    for path, content in files.contents(top, is_text, *literals, max_bytes=_MAX_FILE_BYTES):
        text = content.decode(errors="replace")
        for one in sought:
            # The file that the solution changes may have the text already, unless it is outside.
            if (path != one.path or path.startswith("/")) and one.occurs_in(text):
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
                if one.occurs_in(member.decode(errors="replace")):
                    yield _leak(f"{path}: {name}", one)


def _members(content: bytes) -> Iterator[tuple[str, bytes]]:
    """The first bytes of each file in an archive; unreadable files are left out."""
    file = io.BytesIO(content)
    left = _MAX_UNPACKED_BYTES
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                for name in archive.namelist():
                    with archive.open(name) as member:
                        found = member.read(_MAX_MEMBER_BYTES)
                    yield name, found
                    if (left := left - len(found)) < 0:
                        return
            return
        file.seek(0)
        with tarfile.open(fileobj=file) as tar:
            for item in tar:
                if (left := left - item.size) < 0:  # to skip it is to unpack it
                    return
                if item.isreg() and (opened := tar.extractfile(item)) is not None:
                    yield item.name, opened.read(_MAX_MEMBER_BYTES)
    except (zipfile.BadZipFile, tarfile.TarError, OSError, EOFError, RuntimeError, ValueError):
        return  # damaged, or encrypted: nobody can read it
    except (KeyError, LZMAError, zlib.error):
        return  # damaged


async def _find_in_git(context: ToolContext, sought: Sequence[SearchText]) -> list[dict[str, str]]:
    """Git objects that have the solution; only images are searched, as only they bring any."""
    files = context.workspace
    if not isinstance(files, ImageFiles):
        return []
    store = f"/tmp/.objects-{files.root.name[:16]}"
    lines = "\n".join(re.sub(r"([\\.\[\]*^$+?(){}|])", r"\\\1", one.literal) for one in sought)
    argv = ["sh", "-c", _GIT, "sh", lines, store, str(_MAX_CANDIDATES)]
    result = await require_sandbox(context).exec(argv, timeout_s=_TIMEOUT_S)
    if result.timed_out:
        raise SetupFailed(f"the search of git objects timed out after {_TIMEOUT_S:.0f} s")
    places = []
    for line in result.stdout.splitlines():
        blob, _, repository = line.partition(" ")
        content = await asyncio.to_thread(files.read_bytes, f"{store}/{blob}", _MAX_FILE_BYTES)
        text = content.decode(errors="replace")
        places += [
            _leak(f"object {blob[:12]} of {repository}", x) for x in sought if x.occurs_in(text)
        ]
    await run_command(context, ["rm", "-rf", "--", store])
    return places
