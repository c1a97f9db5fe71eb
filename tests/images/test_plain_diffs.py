"""Diffs that git makes of contents, in a sandbox that conversations share."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.engine.worker.diffs import plain
from batch_trajectories.engine.worker.diffs.changes import Known, begin_diff, find_changes
from batch_trajectories.engine.worker.diffs.diffs import Diffs, Openings
from batch_trajectories.engine.worker.diffs.making import make_diff
from batch_trajectories.engine.worker.diffs.plain import (
    EMPTY_TREE,
    Blob,
    Differ,
    Objects,
    make_plain,
)
from tests.fakes.fake_images import make_repository
from tests.images.test_image_sandbox import out, sandbox_in
from toolsets.context import ToolContext
from toolsets.sandbox.base import ImageSpec
from toolsets.sandbox.image_bwrap import BwrapImageSandbox
from toolsets.sandbox.image_files import ImageFiles
from toolsets.workspace.workspace import Workspace

TOP = "/testbed"
FIX = "echo 'x = 1' >> pkg/calc.py"
PLAIN = {
    "an edit": FIX,
    "new files": "mkdir -p a/b; printf 'no end' > a/b/c; : > empty; ln -s nowhere l; echo x > a-b",
    "removed": "rm -r pkg; echo x > y",
    "other kinds": "rm pkg/calc.py; mkdir pkg/calc.py; echo x > pkg/calc.py/x; rm pkg/__init__.py; "
    "ln -s ../x pkg/__init__.py",
    "modes": "chmod 755 pkg/calc.py; echo x > new; chmod 711 new",
    "binary files": "printf '\\\\0\\\\1\\\\2' > bin; printf '\\\\0' >> pkg/calc.py",
    "something ignored": f"echo x > a.pyc; mkdir pkg/made; echo y > pkg/made/b.pyc; {FIX}",
    "only what is ignored": "echo x > a.pyc",
    "odd names": "echo x > 'ö\"\\'; echo y > $'n\\nl\\t'; echo z > ' '",
    "the repository": f"{FIX}; git config core.abbrev 20; touch .git/index.lock; echo '*.py' > "
    ".git/info/exclude; echo '*.py binary' > .git/info/attributes",
    "times": "touch pkg/calc.py",
}
OTHERS = {
    "rules": f"echo '*.txt' > .gitignore; echo x > a.txt; {FIX}",
    "attributes": f"echo '*.py binary' > .gitattributes; {FIX}",
    "line ends": "printf 'a\\r\\n' > a.txt",
    "a filter": "echo x > a.filtered",
    "an identifier": "echo '$Id: x$' > a.id",
    "much": "head -c 5000000 /dev/zero > zeros",
    "names that git refuses": f"mkdir .GIT 'GIT~1'; echo x > .GIT/x; echo x > GIT~1/x; {FIX}",
    "a pattern": "echo x > ':(top)a'",
}
SET_UP = (
    "mkdir -p .git/info; echo '*.pyc' >> .git/info/exclude; "
    "printf '*.filtered filter=x\\n*.id ident\\n' > .git/info/attributes; "
    "git config filter.x.clean 'tr a-z A-Z'; git config core.quotePath false; "
    "git config diff.external false"
)


def contexts_in(images: Path, *layers: Path) -> list[ToolContext]:
    sandboxes = [sandbox_in(images, layer, ImageSpec("python:1")) for layer in layers]
    return [
        ToolContext(ImageFiles(Workspace(layer), sandbox), sandbox)
        for layer, sandbox in zip(layers, sandboxes, strict=True)
    ]


async def run_in(context: ToolContext, command: str) -> None:
    assert isinstance(context.sandbox, BwrapImageSandbox)
    await out(context.sandbox, command)


def test_objects_are_those_of_git(tmp_path: Path) -> None:
    files = {"a": "1", "a-b": "2", "a.b/c": "3", "a0/b/c/d": "4", "a0/b/c0": "5", "ö/x": ""}
    root = tmp_path / "repository"
    make_repository(root, files)
    (root / "a").chmod(0o755)
    (root / "a0/link").symlink_to("b/ö")
    objects = Objects()
    blobs = {path: Blob(b"100644", content.encode()) for path, content in files.items()}
    blobs |= {"a": Blob(b"100755", b"1"), "a0/link": Blob(b"120000", "b/ö".encode())}
    name = objects.add_tree(blobs)

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("add", "-A")
    assert git("write-tree") == name
    store = tmp_path / "objects"
    for path, raw in objects.files.items():
        (store / path).parent.mkdir(parents=True, exist_ok=True)
        (store / path).write_bytes(raw)
    listed = [git(f"--git-dir={root}/.git", "ls-tree", "-r", name)]
    subprocess.run(["git", "init", "-q", "--bare", tmp_path / "other"], check=True)
    read = ["git", f"--git-dir={tmp_path}/other", "ls-tree", "-r", name]
    env = {"GIT_OBJECT_DIRECTORY": str(store), "PATH": "/usr/bin:/bin"}
    listed.append(subprocess.run(read, env=env, check=True, capture_output=True, text=True).stdout)
    assert listed[0] == listed[1].strip()
    assert Objects().add_tree({}) == EMPTY_TREE


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PLAIN, *OTHERS])
def test_which_diffs_are_made_of_contents(
    images: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that can be, and each is the one that git makes of files in a fresh workspace."""

    async def made() -> tuple[bytes | None, dict[str, Any]]:
        contexts = contexts_in(images, *(tmp_path / one for one in ("worked", "fresh", "general")))
        worked, fresh, general = contexts
        try:
            for context in contexts:
                await run_in(context, SET_UP)
            await run_in(worked, f"cd {TOP}; {(PLAIN | OTHERS)[name]}")
            changes, nested = await find_changes(worked, fresh, TOP, None, Known())
            found = await make_plain(changes, Differ(fresh, TOP, nested))
            monkeypatch.setattr(BwrapImageSandbox, "memory_dir", None)
            return found and found.patch, await make_diff(worked, general, None)
        finally:
            for context in contexts:
                await context.close(remove=True)

    patch, diff = asyncio.run(made())
    assert (patch is not None) == (name in PLAIN)
    if patch is not None:
        assert patch.decode() == diff["patch"]


def diffs_of(
    images: Path, tmp_path: Path, *did: str, kinds: int = 1
) -> tuple[list[dict[str, Any] | None], int]:
    """The diffs of conversations of one worker at the same time; how many workspaces it opened.

    `kinds`: of how many images they are for the worker.
    """
    opened: list[str] = []

    def opens(name: str) -> Callable[[], Awaitable[ToolContext]]:
        async def open_it() -> ToolContext:
            opened.append(name)
            return contexts_in(images, tmp_path / f"{len(opened)}-{name}")[0]

        return open_it

    async def one(diffs: Diffs, number: int, command: str) -> dict[str, Any] | None:
        layer = tmp_path / f"worked-{number}"
        context = contexts_in(images, layer)[0]
        await begin_diff(context, is_needed=True, known=diffs.known)
        await run_in(context, f"cd {TOP}; {command}")
        await context.close(remove=False)

        async def reopened() -> ToolContext:
            return contexts_in(images, layer)[0]

        opening = Openings(opens("fresh"), reopened, opens("shared"), f"image {number % kinds}")
        return await diffs.make(context, None, opening, is_afresh=False)

    async def use() -> list[dict[str, Any] | None]:
        diffs = Diffs()
        try:
            tasks = [one(diffs, number, command) for number, command in enumerate(did)]
            return await asyncio.gather(*tasks)
        finally:
            await diffs.close()

    made = asyncio.run(use())
    assert not [*tmp_path.glob("*-shared"), *tmp_path.glob("*-fresh")]
    return made, len(opened)


@pytest.mark.slow
def test_a_mode_counts_as_git_counts_it(images: Path, tmp_path: Path) -> None:
    """What its owner may not run is no program, whoever else may."""

    async def made() -> dict[str, Any]:
        worked, fresh = contexts_in(images, tmp_path / "worked", tmp_path / "fresh")
        try:
            for context in (worked, fresh):
                await run_in(context, f"cd {TOP}; chmod 645 pkg/calc.py; touch -d @1 pkg/calc.py")
            await run_in(worked, f"cd {TOP}; chmod 755 pkg/calc.py")
            return await make_diff(worked, fresh, None)
        finally:
            for context in (worked, fresh):
                await context.close(remove=True)

    expected = "diff --git a/pkg/calc.py b/pkg/calc.py\nold mode 100644\nnew mode 100755\n"
    assert asyncio.run(made())["patch"] == expected


@pytest.mark.slow
def test_one_workspace_makes_the_diffs_of_many_conversations(images: Path, tmp_path: Path) -> None:
    did = [f"echo {n} >> pkg/calc.py; echo {n} > new{n}" for n in range(6)]
    made, opened = diffs_of(images, tmp_path, *did, "true", f"{FIX}; echo '*.x' > .gitignore")
    assert opened == 2  # the last one is carried to a fresh workspace
    for number, diff in enumerate(made[:6]):
        assert diff is not None
        assert diff["patch"].count(f"\n+{number}\n") == 2
        assert diff["patch"].count("diff --git") == 2
    assert made[6] == {"patch": "", "truncated": False}
    assert made[7] is not None
    assert "+x = 1" in made[7]["patch"]


@pytest.mark.slow
def test_a_workspace_that_failed_or_made_many_diffs_is_replaced(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "_MAX_DIFFS", 2)
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
    made, opened = diffs_of(images, tmp_path / "a", *[FIX] * 4)
    assert opened == 2
    assert [diff and diff["patch"].count("x = 1") for diff in made] == [1] * 4
    monkeypatch.setattr(plain, "SHOWN_AS", "--no-such-option")
    made, opened = diffs_of(images, tmp_path / "b", FIX, FIX)
    assert opened == 4
    assert [diff and diff["patch"].count("x = 1") for diff in made] == [1] * 2


@pytest.mark.slow
def test_workspaces_of_many_images_are_ended_once_each(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where several conversations find at the same time that too many are open."""
    monkeypatch.setattr(plain, "_MAX_OPEN", 1)
    made, _ = diffs_of(images, tmp_path, *[FIX] * 8, kinds=4)
    assert [diff and diff["patch"].count("x = 1") for diff in made] == [1] * 8
