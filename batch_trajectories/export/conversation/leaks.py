"""Finds calls that look for the solution of a checked task: `leak_suspected`.

It is a suspicion by the text of the call alone: a reader has to judge whether the call found
anything. Even a failed attempt would teach a model to look for solutions.

- `other_commits`: git commands that read commits, stashes or objects other than the task's state
- `project_download`: the task's project from a package index, a clone or a page of its repository
- `checker_files`: files of the check, which the model was not told about

Only conversations with a check are searched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import orjson

from batch_trajectories.basics.text import clip
from batch_trajectories.records.checks import judge_record
from batch_trajectories.records.record_types import Record, StoredMessage

Reason = Literal["other_commits", "project_download", "checker_files"]

_MAX_EVIDENCE = 200
_MAX_ARGUMENTS = 100_000
"""Maximum number of characters of a call's arguments that are searched."""

_BREAKS = re.compile(r"[\"'`,\[\](){}]+")
"""Separators between the words of a command in code or JSON."""

_GIT = re.compile(
    r"\bgit((?: +(?:-[Cc] +\S+|--?[\w-]+(?:=\S+)?))*) +([a-z][a-z-]*)([^;|&\n<>]*)", re.ASCII
)
_OBJECT_COMMANDS = frozenset(
    (
        "reflog",
        "fsck",
        "cat-file",
        "ls-remote",
        "rev-list",
        "cherry-pick",
        "bisect",
        "verify-pack",
        "unpack-objects",
        "fast-export",
        "format-patch",
        "whatchanged",
        "archive",
    )
)
"""Commands of git that are useful only with other commits."""

_REVISION_COMMANDS = frozenset(
    ("log", "show", "diff", "checkout", "restore", "reset", "switch", "grep", "worktree", "merge")
)
_REVISION = re.compile(
    r"""(?x) ^(?: [0-9a-f]{7,40} | v?\d+(?:\.\d+)+\S*        # hashes, tags of versions
        | (?:ORIG_|FETCH_|MERGE_)HEAD | stash@\S* | (?:origin|upstream|refs|tags|remotes)/\S+
        | --(?:all|branches|tags|remotes|reflog|walk-reflogs) | \S+\.\.\S* )
        (?: [~^:@]\S* )? $"""
)
_EARLIER_COMMIT = re.compile(r"^(?:HEAD|@)(?:[~^@]\S*)")
_FILE_AT_REVISION = re.compile(r"^(?!HEAD:|:|--)[^\s:=]+:[\w./]")
"""`REVISION:path`, for the commands that take it."""

_PATCHES = frozenset(("-p", "-u", "--patch"))
_GIT_FILES = re.compile(r"\.git/(?:objects|packed-refs|logs|refs|ORIG_HEAD|FETCH_HEAD)\b")
_INSTALL = re.compile(
    r"\b(?:pip3?|pipx|uv(?: +pip)?|conda|mamba|npm|yarn|pnpm|cargo|gem|go)"
    r" +(?:install|download|wheel|add|pack|view|get|fetch|index|i)\b([^;|&\n<>]*)"
)
_URL = re.compile(r"(?:https?|git|ssh)://\S+|git@\S+")
_FORGES = re.compile(
    r"github(?:usercontent)?\.com/\S+/\S+|gitlab\.com/\S+/\S+|bitbucket\.org/\S+/\S+"
)


class Leak(NamedTuple):
    """A call that looked for the solution."""

    turn: int
    """The turn of the call, from 1; in a branch inherited turns count, too."""
    reason: Reason
    evidence: str
    """The suspicious part of the call's arguments."""


def find_leaks(record: Record, *, ended_well: bool = False) -> list[Leak]:
    """The suspicious calls of a conversation with a check, in their order.

    With `ended_well` only calls whose result is no error; commands must have exit code 0.
    """
    if record.check is None:
        return []
    results = record.messages if ended_well else ()
    failed = {m.tool_call_id for m in results if m.role == "tool" and _has_failed(m)}
    inherited = sum(turn.inherited is not None for turn in record.turns)
    replies = [message for message in record.messages if message.role == "assistant"]
    prior = max(0, len(replies) - len(record.turns))
    search = _Search(record.row)
    leaks = []
    for turn, reply in enumerate(replies[prior:], 1):
        for id, reason, evidence in search.find_in(reply):
            if turn > inherited and id not in failed:
                leaks.append(Leak(turn, reason, clip(evidence.strip(), max_chars=_MAX_EVIDENCE)))
    return leaks


def rewarded_leak(record: Record) -> Leak | None:
    """The first suspicious call that ended well, if the conversation has a reward above 0."""
    if not (judge_record(record).reward or 0) > 0:
        return None
    return next(iter(find_leaks(record, ended_well=True)), None)


def _has_failed(result: StoredMessage) -> bool:
    return bool(result.is_error) or result.details.get("exit_code") not in (None, 0)


class _Search:
    """Searches the calls of one conversation, which must be given in order."""

    def __init__(self, row: dict[str, Any]) -> None:
        self._project, self._owner = _find_project(row)
        self._checker = _checker_files(row)
        self._has_stashed = self._has_committed = False

    def find_in(self, reply: StoredMessage) -> Iterator[tuple[str, Reason, str]]:
        """The suspicious calls of a reply: id of the call, reason and evidence."""
        for call in reply.tool_calls:
            for reason, evidence in self._find_in_arguments(call.function.arguments):
                yield call.id, reason, evidence

    def _find_in_arguments(self, arguments: str) -> Iterator[tuple[Reason, str]]:
        text = "\n".join(_texts(arguments))
        plain = _BREAKS.sub(" ", text)
        for git in _GIT.finditer(plain):
            if self._reads_other_commits(git[2], git[3].split()):
                yield "other_commits", git[0]
        if (path := _GIT_FILES.search(text)) is not None:
            yield "other_commits", path[0]
        for got in _INSTALL.finditer(plain):
            if any(self._is_project(word) for word in got[1].split()):
                yield "project_download", got[0]
        for url in _URL.finditer(plain):
            if self._is_project_url(url[0]):
                yield "project_download", url[0]
        if self._checker is not None and (path := self._checker.search(text)) is not None:
            yield "checker_files", path[0]

    def _reads_other_commits(self, command: str, words: Sequence[str]) -> bool:
        if command == "commit":
            self._has_committed = True
        if command == "stash":
            is_push = not words or words[0] in ("push", "save") or words[0].startswith("-")
            self._has_stashed |= is_push
            return not is_push and not self._has_stashed
        if command in _OBJECT_COMMANDS:
            return True
        if command not in _REVISION_COMMANDS or words[:1] == ["-b"]:
            return False
        if self._has_committed:  # revisions may be its own commits
            return any(word in ("--all", "--reflog") for word in words)
        before = words[: words.index("--")] if "--" in words else words
        if command in ("checkout", "show", "restore") and "--" in words:
            revisions = [w for w in before if not w.startswith("-") and w not in ("HEAD", "@")]
            if revisions:
                return True
        if command == "log" and any(
            word in _PATCHES or word[:2] in ("-S", "-G", "-L") for word in before
        ):
            return True
        return any(
            _REVISION.match(word.removeprefix("--source="))
            or _EARLIER_COMMIT.match(word.removeprefix("--source="))
            or (command in ("show", "diff", "grep") and _FILE_AT_REVISION.match(word))
            for word in before
        )

    def _is_project(self, word: str) -> bool:
        name = re.split(r"[=<>~!@]", word, maxsplit=1)[0]
        return self._project is not None and _normalize_name(name) == self._project

    def _is_project_url(self, url: str) -> bool:
        if self._project is None:
            return _FORGES.search(url) is not None
        parts = [
            _normalize_name(part) for part in re.split(r"[/?#:]", url.removesuffix(".git").lower())
        ]
        if self._owner is not None and self._owner in parts and self._project in parts:
            return True
        return self._project in parts and bool(re.search(r"pypi|pythonhosted|npmjs|crates", url))


def _texts(arguments: str) -> Iterator[str]:
    """The texts in a call's arguments; a list of strings, such as argv, is one text."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        value = arguments
    waiting = [value]
    left = _MAX_ARGUMENTS
    while waiting and left > 0:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            if value and all(isinstance(part, str) for part in value):
                value = " ".join(value)
            else:
                waiting += value
        if isinstance(value, str):
            yield value[:left]
            left -= len(value)


def _find_project(row: dict[str, Any]) -> tuple[str | None, str | None]:
    """Name and owner of the repository in the columns of SWE datasets; None if unknown."""
    for column in ("repo", "repo_name", "repository"):
        if isinstance(name := row.get(column), str) and name.strip():
            owner, _, project = name.lower().removesuffix(".git").rstrip("/").rpartition("/")
            return _normalize_name(project), _normalize_name(owner.rpartition("/")[2]) or None
    return None, None


def _normalize_name(name: str) -> str:
    """The form of a name by which package indexes compare names."""
    return re.sub(r"[-_.]+", "-", name.lower())


def _checker_files(row: dict[str, Any]) -> re.Pattern[str] | None:
    """A pattern of the paths of the check's files, without paths that the prompt names."""
    check = row.get("check")
    if not isinstance(check, dict):
        return None
    files = check.get("files")
    rewards = check.get("reward_file")
    paths = [*(files if isinstance(files, dict | list) else ())]
    paths += rewards if isinstance(rewards, list) else [rewards]
    prompt = str(row.get("prompt", ""))
    candidates = {path for path in paths if isinstance(path, str) and path.strip("./")}
    wanted = sorted({path for path in candidates if path not in prompt}, reverse=True)
    if not wanted:
        return None
    return re.compile(rf"(?<![\w./-])(?:{'|'.join(map(re.escape, wanted))})(?![\w-])")
