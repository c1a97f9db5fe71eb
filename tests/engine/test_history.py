"""What is left of a repository's history before a conversation begins, with real repositories."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from batch_trajectories.engine.worker.history import history_problem, remove_history
from batch_trajectories.engine.worker.workspace_setup import SetupFailed
from toolsets.context import ToolContext
from toolsets.sandbox.base import ExecResult

pytestmark = pytest.mark.slow

GIT = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "gc.auto=0"]
GIT += ["-c", "protocol.file.allow=always"]
BAD, GOOD = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"


class HereSandbox:
    """Runs commands in a directory of this machine."""

    def __init__(self, home: Path, path: str | None = None) -> None:
        self._home = home
        self._env = {
            **os.environ,
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_CONFIG_SYSTEM": "/dev/null",
        }
        if path is not None:
            self._env["PATH"] = path

    async def exec(
        self, argv: Sequence[str], *, timeout_s: float | None = None, stdin: bytes = b""
    ) -> ExecResult:
        done = subprocess.run(
            [shutil.which(argv[0]) or argv[0], *argv[1:]],
            cwd=self._home,
            env=self._env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        return ExecResult(
            exit_code=done.returncode,
            stdout=done.stdout,
            stderr=done.stderr,
            timed_out=False,
            truncated=False,
            duration_s=0.0,
        )


def context_of(repository: Path, path: str | None = None) -> ToolContext:
    found: Any = SimpleNamespace(sandbox=HereSandbox(repository, path))
    return cast(ToolContext, found)


def git(repository: Path, *arguments: str) -> str:
    done = subprocess.run(
        [*GIT, "-C", str(repository), *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def commit(repository: Path, text: str, *, file: str = "calc.py") -> str:
    (repository / file).write_text(text)
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", text.split()[0])
    return git(repository, "rev-parse", "HEAD")


def remove(repository: Path, base: str) -> None:
    context = context_of(repository)
    asyncio.run(remove_history(context, base))
    assert asyncio.run(history_problem(context, base)) is None


def find_problem(repository: Path, base: str) -> str | None:
    return asyncio.run(history_problem(context_of(repository), base))


def objects(repository: Path) -> set[str]:
    """All objects of a repository, whether anything names them or not."""
    listed = git(
        repository, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)", "--unordered"
    )
    return set(listed.split())


def ancestors(repository: Path, commit: str) -> set[str]:
    """The objects of a commit and of those before it."""
    return {line[:40] for line in git(repository, "rev-list", "--objects", commit).splitlines()}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two commits, then `base`, then the fix; the tree is that of `base`."""
    made = tmp_path / "repository"
    made.mkdir()
    git(made, "init", "-q", "-b", "main")
    commit(made, "first\n")
    git(made, "tag", "-a", "v0", "-m", "zero")
    commit(made, "second\n")
    git(made, "tag", "light")
    git(made, "branch", "base", commit(made, BAD))
    git(made, "tag", "-a", "v2", "-m", "two", commit(made, GOOD))
    git(made, "checkout", "-q", "-B", "work", "base")
    return made


def assert_only_ancestors(repository: Path, base: str) -> None:
    kept = ancestors(repository, base)
    assert objects(repository) == kept
    assert git(repository, "rev-parse", "HEAD") == base
    assert git(repository, "status", "--porcelain") == ""
    git(repository, "fsck", "--strict")


def test_later_commits_are_gone_with_all_that_names_them(repository: Path, tmp_path: Path) -> None:
    """Branches, tags, remotes, notes, stashes, reflogs, FETCH_HEAD, ORIG_HEAD, loose and packed."""
    base, fix = git(repository, "rev-parse", "base"), git(repository, "rev-parse", "v2")
    git(repository, "notes", "add", "-m", "fixed by a + b", base)
    (repository / "calc.py").write_text(GOOD)
    git(repository, "stash")
    git(repository, "gc", "-q")
    loose = commit(repository, GOOD + "# loose\n")
    git(repository, "reset", "-q", "--hard", base)
    git(repository, "update-ref", "refs/original/x", loose)
    git(tmp_path, "clone", "-q", "--bare", str(repository), "origin.git")
    git(repository, "remote", "add", "origin", str(tmp_path / "origin.git"))
    git(repository, "fetch", "-q", "origin")
    git(repository, "symbolic-ref", "refs/remotes/origin/HEAD", "refs/remotes/origin/main")
    git(repository, "update-ref", "refs/replace/" + base, fix)
    own = repository / ".git"
    for name in ("MERGE_HEAD", "CHERRY_PICK_HEAD"):
        (own / name).write_text(f"{fix}\n")
    (own / "rebase-merge").mkdir()
    (own / "rebase-merge/orig-head").write_text(f"{fix}\n")
    (own / "lfs").mkdir()
    assert fix in objects(repository)
    assert "of base_commit" in str(find_problem(repository, base))
    remove(repository, base)
    assert_only_ancestors(repository, base)
    assert git(repository, "symbolic-ref", "HEAD") == "refs/heads/work"
    refs = git(repository, "for-each-ref", "--format=%(refname)").split()
    assert refs == ["refs/heads/work", "refs/tags/light", "refs/tags/v0"]
    assert git(repository, "log", "--format=%s").split() == ["def", "second", "first"]
    assert git(repository, "describe", "--tags") == "light-1-g" + base[:7]
    assert (
        git(repository, "remote")
        == git(repository, "reflog")
        == git(repository, "stash", "list")
        == ""
    )
    left = {path.name for path in own.iterdir()}
    assert left <= {"HEAD", "config", "description", "hooks", "index", "info", "objects", "refs"}
    content = b"".join(path.read_bytes() for path in own.rglob("*") if path.is_file())
    assert fix.encode() not in content


def test_a_clean_repository_keeps_its_objects_where_they_are(repository: Path) -> None:
    """An image whose makers removed the history costs no copy of it."""
    base = git(repository, "rev-parse", "base")
    git(repository, "remote", "add", "origin", "https://example.org/o/r")
    remove(repository, base)
    packs = {path: path.stat().st_ino for path in (repository / ".git/objects").rglob("*.pack")}
    git(repository, "remote", "add", "origin", "https://example.org/o/r")
    remove(repository, base)
    assert packs == {p: p.stat().st_ino for p in (repository / ".git/objects").rglob("*.pack")}
    assert git(repository, "remote") == ""


def test_uncommitted_changes_stay_and_what_was_staged_is_only_in_the_files(
    repository: Path,
) -> None:
    base = git(repository, "rev-parse", "base")
    (repository / "new.py").write_text(GOOD)
    git(repository, "add", "new.py")
    (repository / "new.py").unlink()
    (repository / "calc.py").write_text("set up\n")
    git(repository, "checkout", "-q", "--detach")
    remove(repository, base)
    assert objects(repository) == ancestors(repository, base)
    assert git(repository, "rev-parse", "--abbrev-ref", "HEAD") == "HEAD"
    assert git(repository, "status", "--porcelain") == "M calc.py"
    assert (repository / "calc.py").read_text() == "set up\n"


def test_a_commit_of_the_set_up_becomes_one_commit_on_base(repository: Path) -> None:
    """And holds the files as they are, not as any commit had them."""
    base = git(repository, "rev-parse", "base")
    commit(repository, GOOD)
    commit(repository, "pin\n", file="setup.cfg")
    (repository / "calc.py").write_text(BAD)
    (repository / "untracked").write_text("x")
    remove(repository, base)
    assert git(repository, "rev-parse", "HEAD^") == base
    assert git(repository, "log", "-1", "--format=%s %an") == "Start setup"
    assert git(repository, "show", "HEAD:calc.py") == BAD.strip()
    assert git(repository, "show", "HEAD:setup.cfg") == "pin"
    assert objects(repository) == ancestors(repository, "HEAD")
    assert git(repository, "status", "--porcelain") == "?? untracked"
    git(repository, "fsck", "--strict")


def test_a_clean_commit_of_the_set_up_stays(repository: Path) -> None:
    """As SWE-bench's images have one, often an empty one."""
    base = git(repository, "rev-parse", "base")
    remove(repository, base)
    git(repository, "commit", "-q", "--allow-empty", "-m", "SWE-bench")
    head = git(repository, "rev-parse", "HEAD")
    remove(repository, base)
    assert git(repository, "rev-parse", "HEAD") == head


def test_the_fix_as_the_only_commit_after_base_is_no_set_up(repository: Path) -> None:
    base = git(repository, "rev-parse", "base")
    remove(repository, base)
    fix = commit(repository, GOOD)
    (repository / "calc.py").write_text(BAD)
    remove(repository, base)
    assert_only_ancestors(repository, base)
    assert fix not in objects(repository)


@pytest.mark.parametrize("base", ["", "0123456789012345678901234567890123456789", "nothing^"])
def test_without_base_commit_no_history_is_left(repository: Path, base: str) -> None:
    remove(repository, base)
    assert git(repository, "log", "--all", "--format=%s") == "Start"
    assert git(repository, "show", "HEAD:calc.py") == BAD.strip()
    assert objects(repository) == ancestors(repository, "HEAD")
    assert git(repository, "status", "--porcelain") == ""


def test_a_repository_without_commits_is_no_failure(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "a.txt").write_text("a")
    remove(tmp_path, "main")
    assert git(tmp_path, "status", "--porcelain") == "?? a.txt"


def test_alternates_and_other_worktrees_are_gone(repository: Path, tmp_path: Path) -> None:
    base = git(repository, "rev-parse", "base")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", "--shared", str(repository), str(clone))
    git(clone, "checkout", "-q", base)
    git(clone, "worktree", "add", "-q", "--detach", str(tmp_path / "other tree"), "origin/main")
    remove(clone, base)
    assert_only_ancestors(clone, base)
    assert not (tmp_path / "other tree").exists()
    assert not (repository / ".git/objects").exists()


def test_a_shallow_clone_stays_shallow(repository: Path, tmp_path: Path) -> None:
    base = git(repository, "rev-parse", "base")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", "--depth=2", f"file://{repository}", str(clone), "-b", "main")
    git(clone, "checkout", "-q", base)
    remove(clone, base)
    assert_only_ancestors(clone, base)
    assert git(clone, "rev-list", "--count", "HEAD") == "1"


def test_a_partial_clone_is_not_fetched(repository: Path, tmp_path: Path) -> None:
    base = git(repository, "rev-parse", "base")
    git(repository, "config", "uploadpack.allowFilter", "true")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", "--filter=blob:none", f"file://{repository}", str(clone))
    git(clone, "checkout", "-q", base)
    shutil.rmtree(repository)
    remove(clone, base)
    assert git(clone, "status", "--porcelain") == ""
    assert git(clone, "log", "--format=%s").split() == ["def", "second", "first"]


def test_submodules_keep_the_history_of_their_commit(repository: Path, tmp_path: Path) -> None:
    """And those that are not checked out, which no command of the task needs, are gone."""
    library = tmp_path / "library"
    library.mkdir()
    git(library, "init", "-q", "-b", "main")
    commit(library, "old\n", file="lib.py")
    for name in ("lib one", "left"):
        git(repository, "submodule", "--quiet", "add", str(library), name)
    git(repository, "commit", "-qm", "submodules")
    base = git(repository, "rev-parse", "HEAD")
    fix = commit(library, "new\n", file="lib.py")
    git(repository / "lib one", "fetch", "-q")
    git(repository, "submodule", "--quiet", "deinit", "left")
    git(repository, "gc", "-q")
    assert fix in objects(repository / "lib one")
    remove(repository, base)
    assert_only_ancestors(repository, base)
    assert fix not in objects(repository / "lib one")
    assert (repository / "lib one/lib.py").read_text() == "old\n"
    assert [path.name for path in (repository / ".git/modules").iterdir()] == ["lib one"]


def test_what_cannot_be_removed_fails_the_setup(repository: Path, tmp_path: Path) -> None:
    base = git(repository, "rev-parse", "base")
    linked = tmp_path / "linked"
    git(repository, "worktree", "add", "-q", "--detach", str(linked), base)
    with pytest.raises(SetupFailed, match=r"linked worktree .*; `keep_history: true`"):
        asyncio.run(remove_history(context_of(linked), base))
    (repository / ".git/HEAD").write_text("damaged")
    with pytest.raises(SetupFailed, match="git cannot read"):
        asyncio.run(remove_history(context_of(repository), base))


def test_a_repository_without_git_fails_and_no_repository_does_not(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "work").mkdir()
    asyncio.run(remove_history(context_of(tmp_path / "work", str(tmp_path / "bin")), "x"))
    asyncio.run(remove_history(context_of(tmp_path / "work"), "x"))
    (tmp_path / ".git").mkdir()
    with pytest.raises(SetupFailed, match=r"git cannot read .*not found"):
        asyncio.run(remove_history(context_of(tmp_path / "work", str(tmp_path / "bin")), "x"))
