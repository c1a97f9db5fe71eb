"""The file tools: read, write, patch, list and search the workspace, within this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Annotated

from pydantic import Field

from batch_trajectories.basics.errors import ToolError
from batch_trajectories.basics.text import clip
from toolsets.context import ToolContext
from toolsets.tool import ToolResult, tool
from toolsets.workspace.files import Files, is_named
from toolsets.workspace.workspace import FileEntry

_MAX_FILE_BYTES = 10 * 1024 * 1024
_MAX_SHOWN_CHARS = 64 * 1024
_MAX_ENTRIES = 1000
_MAX_MATCHES = 200
_MAX_LINES_NAMED = 10
_MAX_LINE_CHARS = 300
_MAX_SEARCHED_BYTES = 200 * 1024 * 1024
_BINARY_PROBE_BYTES = 8192

_MAX_REGEX_S = 3.0
"""Time limit for all matches of one search."""

PathArgument = Annotated[str, Field(description="Path in the workspace.")]
NamePattern = Annotated[
    str | None,
    Field(description="Only files like this: *.py in any directory, or src/*.py by their path."),
]


@tool(idempotent=True, effects="workspace")
def read_file(
    context: ToolContext,
    path: PathArgument,
    start_line: Annotated[int, Field(ge=1, description="First line to show, from 1.")] = 1,
    max_lines: Annotated[int, Field(ge=1, description="How many lines to show at most.")] = 2000,
) -> ToolResult:
    """Read a text file. A long file is shown in part, with a note on how to read on."""
    content = _read_all(context.workspace, path).decode("utf-8", "replace")
    *ended, last = content.split("\n")
    lines = [f"{line}\n" for line in ended] + ([last] if last else [])
    if start_line > max(len(lines), 1):
        raise ToolError(f"path {path!r} has only {len(lines)} lines")
    shown: list[str] = []
    chars = 0
    for line in islice(lines, start_line - 1, start_line - 1 + max_lines):
        chars += len(line)
        if shown and chars > _MAX_SHOWN_CHARS:
            break
        shown.append(clip(line, max_chars=_MAX_SHOWN_CHARS))
    text = "".join(shown)
    end_line = start_line - 1 + len(shown)
    if end_line == len(lines):
        return ToolResult(text)
    note = f"[lines {start_line}-{end_line} of {len(lines)}; go on with start_line={end_line + 1}]"
    return ToolResult(text + note, details={"truncated": True})


@tool(idempotent=True, effects="workspace", sequential=True)
def write_file(
    context: ToolContext,
    path: PathArgument,
    content: Annotated[str, Field(description="The whole new content of the file.")],
) -> str:
    """Write a text file, replacing what it held; missing directories are made."""
    encoded = content.encode("utf-8", "replace")
    context.workspace.write_bytes(path, encoded)
    return f"wrote {len(encoded)} bytes to {path}"


@tool(effects="workspace", sequential=True)
def patch_file(
    context: ToolContext,
    path: PathArgument,
    old_text: Annotated[str, Field(description="Text that occurs exactly once in the file.")],
    new_text: Annotated[str, Field(description="Text to put in its place.")],
) -> str:
    """Replace one piece of a text file; the old text must occur exactly once."""
    # Works on bytes: the rest of a file that is not UTF-8 must not change.
    content = _read_all(context.workspace, path)
    old = old_text.encode("utf-8", "replace")
    if not old:
        raise ToolError("old_text is empty")
    starts = _starts(content, old)
    if len(starts) != 1:
        lines = [content.count(b"\n", 0, start) + 1 for start in starts[:_MAX_LINES_NAMED]]
        where = f" (lines {', '.join(map(str, lines))})" if lines else ""
        raise ToolError(
            f"old_text must occur exactly once in {path!r}; it occurs {len(starts)} times{where}"
        )
    before, after = content[: starts[0]], content[starts[0] + len(old) :]
    context.workspace.write_bytes(path, before + new_text.encode("utf-8", "replace") + after)
    first_line = before.count(b"\n") + 1
    return f"replaced the text at line {first_line} of {path}"


@tool(idempotent=True, effects="workspace")
def list_files(
    context: ToolContext,
    path: PathArgument = ".",
    recursive: Annotated[bool, Field(description="List subdirectories as well.")] = False,
    matching: NamePattern = None,
) -> ToolResult:
    """List a directory: one entry per line, directories end in "/", files show their size."""
    entries: Iterator[FileEntry] = (
        context.workspace.walk(path) if recursive else iter(context.workspace.listing(path))
    )
    if matching is not None:
        entries = (entry for entry in entries if is_named(entry.path, matching))
    lines = [_show(entry) for entry in islice(entries, _MAX_ENTRIES)]
    if next(entries, None) is None:
        return ToolResult("\n".join(lines) or "[no files]")
    lines.append(f"[only the first {_MAX_ENTRIES} entries; list a directory beneath]")
    return ToolResult("\n".join(lines), details={"truncated": True})


@tool(idempotent=True, effects="workspace")
def search_files(
    context: ToolContext,
    text: Annotated[str, Field(min_length=1, description="Text to find, literally.")],
    path: Annotated[str, Field(description="File or directory to search.")] = ".",
    ignore_case: Annotated[bool, Field(description="Let upper and lower case match.")] = False,
    is_regex: Annotated[
        bool, Field(description="The text is a Python regular expression, for within a line.")
    ] = False,
    matching: NamePattern = None,
) -> ToolResult:
    """Search text files line by line; each match is a line "path:line: text"."""
    finds = _finder(text, ignore_case=ignore_case, is_regex=is_regex)
    literal = b"" if is_regex or ignore_case else text.encode("utf-8", "replace")
    matches = _matches(context.workspace, path, finds, matching, literal)
    lines = list(islice(matches, _MAX_MATCHES))
    if next(matches, None) is None:
        return ToolResult("\n".join(lines) or "[no matches]")
    lines.append(f"[only the first {_MAX_MATCHES} matches; search a directory beneath]")
    return ToolResult("\n".join(lines), details={"truncated": True})


def _finder(text: str, *, ignore_case: bool, is_regex: bool) -> Callable[[str], bool]:
    """Return a function that tells whether a line matches."""
    if not is_regex:
        wanted = text.lower() if ignore_case else text
        return lambda line: wanted in (line.lower() if ignore_case else line)
    # Not `re`: a model's expression can take forever, and `re` has no timeout.
    import regex

    try:
        pattern = regex.compile(text, regex.IGNORECASE if ignore_case else 0)
    except regex.error as error:
        raise ToolError(f"the regular expression {text!r} is wrong: {error}") from error
    give_up = time.monotonic() + _MAX_REGEX_S

    def finds(line: str) -> bool:
        try:
            left_s = give_up - time.monotonic()
            return pattern.search(line, timeout=max(left_s, 0.001), concurrent=True) is not None
        except TimeoutError as error:
            raise ToolError(
                f"the regular expression {text!r} takes too long; make it simpler"
            ) from error

    return finds


def _matches(
    files: Files,
    path: str,
    finds: Callable[[str], bool],
    matching: str | None,
    literal: bytes,
) -> Iterator[str]:
    def is_wanted(file_path: str) -> bool:
        return matching is None or is_named(file_path, matching)

    searched_bytes = 0
    for file_path, content in files.contents(path, is_wanted, literal, max_bytes=_MAX_FILE_BYTES):
        searched_bytes += len(content)
        if not _is_binary(content):
            for number, line in enumerate(content.decode("utf-8", "replace").split("\n"), 1):
                if finds(line):
                    yield f"{file_path}:{number}: {clip(line.strip(), max_chars=_MAX_LINE_CHARS)}"
        if searched_bytes > _MAX_SEARCHED_BYTES:
            yield f"[stopped at {file_path}: enough searched; search a directory beneath]"
            return


def _starts(content: bytes, wanted: bytes) -> list[int]:
    """Return the positions of `wanted`, also overlapping ones: a patch could mean each of them."""
    starts = []
    start = content.find(wanted)
    while start >= 0:
        starts.append(start)
        start = content.find(wanted, start + 1)
    return starts


def _read_all(files: Files, path: str) -> bytes:
    content = files.read_bytes(path, _MAX_FILE_BYTES + 1)
    if len(content) > _MAX_FILE_BYTES:
        raise ToolError(f"path {path!r} is larger than {_MAX_FILE_BYTES} bytes")
    if _is_binary(content):
        raise ToolError(f"path {path!r} is a binary file")
    return content


def _is_binary(content: bytes) -> bool:
    return b"\0" in content[:_BINARY_PROBE_BYTES]


def _show(entry: FileEntry) -> str:
    if entry.kind == "dir":
        return f"{entry.path}/"
    if entry.kind == "file":
        return f"{entry.path} ({entry.size_bytes} bytes)"
    return f"{entry.path} ({'symlink' if entry.kind == 'link' else 'special file'})"
