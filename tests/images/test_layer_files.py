"""What layers say of a workspace, which must be what its sandbox says."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from batch_trajectories.dataset.row_workspace import RowSetup
from batch_trajectories.engine.worker.diffs.changes import Known, begin_diff, find_start
from batch_trajectories.engine.worker.diffs.making import make_diff
from tests.fakes.fake_images import make_repository
from tests.images.conftest import CALC
from tests.images.test_diffs import CHANGES, FIX, RIGHT
from tests.images.test_image_sandbox import out, sandbox_in
from toolsets.context import ToolContext
from toolsets.sandbox.base import ImageSpec
from toolsets.sandbox.image_bwrap import BwrapImageSandbox
from toolsets.sandbox.image_files import FileState, ImageFiles
from toolsets.sandbox.layer_files import Differences, NotComparable, differences
from toolsets.workspace.workspace import Workspace

pytestmark = pytest.mark.slow

TOP = "/testbed"
UNNAMED = ("echo x > $'\\xff'", "echo x > '\ufffd'")
DID = {
    "all kinds": CHANGES,
    "directories made anew": "mv pkg x; mkdir pkg; echo y > pkg/new; cp -a pkg pkg2",
    "a directory for a file": "rm pkg/calc.py; mkdir pkg/calc.py; ln -s pkg x",
    "names": "echo y > 'a b'; mkdir -p $'n\\nl/d'; ln pkg/calc.py hard",
    "nothing": "true",
    **RIGHT,
}
"""What is done in the workspace, after the set-up of both."""
SET_UP = "echo one > set-up; rm pkg/__init__.py; mkdir -p made/here; echo two > made/here/it"
PLAIN = {
    "an edit": FIX,
    "a mode": "chmod 755 pkg/calc.py",
    "new files": "echo x > new; mkdir -p a/b; printf 'no end' > a/b/c; : > empty; ln -s nowhere l",
    "binary files": 'for n in {0..255}; do printf "\\\\x$(printf %x $n)"; done > bin; '
    "printf '\\0' >> pkg/calc.py",
    "attributes": "printf '*.py binary\\n*.txt text\\n' > .gitattributes; "
    "printf '1\\r\\n2\\r\\n' > a.txt; echo >> pkg/calc.py",
    "an odd name": "echo x > ':(top)a'; echo x > 'ö\"\\'; echo x >> pkg/calc.py",
    "something ignored": "echo x > a.pyc; echo y > b; echo >> pkg/calc.py",
    "nothing that counts": "touch pkg/calc.py; mkdir empty",
    "a new link to a directory": "ln -s pkg link; echo >> pkg/__init__.py",
}


async def compare(
    images: Path, tmp_path: Path, did: str, set_up: str
) -> tuple[Differences, dict[str, FileState], dict[str, FileState]]:
    """What layers say of two workspaces, and what their sandboxes say of each."""
    tmp_path.mkdir(exist_ok=True)
    sandboxes = [sandbox_in(images, tmp_path / n, ImageSpec("python:1")) for n in ("one", "other")]
    trees = []
    try:
        for sandbox in sandboxes:
            await out(sandbox, f"cd {TOP}; {set_up}")
        await out(sandboxes[0], did)
        for sandbox, name in zip(sandboxes, ("one", "other"), strict=True):
            files = ImageFiles(Workspace(tmp_path / name), sandbox)
            trees.append(await asyncio.to_thread(files.tree, TOP))
    finally:
        for sandbox in sandboxes:
            await sandbox.stop()
    one, other = (sandbox.layers for sandbox in sandboxes)
    assert one is not None
    assert other is not None
    return differences(one, other, TOP), trees[0], trees[1]


@pytest.mark.parametrize("set_up", ["true", SET_UP])
@pytest.mark.parametrize("name", DID)
def test_layers_say_what_sandboxes_say(
    images: Path, tmp_path: Path, name: str, set_up: str
) -> None:
    found, ended, begun = asyncio.run(compare(images, tmp_path, DID[name], set_up))
    differing = {path for path in {*ended, *begun} if ended.get(path) != begun.get(path)}
    assert differing <= {*found.ended, *found.begun}
    for said, known in ((found.ended, ended), (found.begun, begun)):
        assert said.items() <= known.items()
        missing = {*found.ended, *found.begun} - said.keys()
        assert not missing & known.keys()
    files = {path for path, state in found.ended.items() if state.kind == "file"}
    assert {path: len(data) for path, data in found.files.read_all(TOP, sorted(files)).items()} == {
        path: found.ended[path].size for path in files
    }


def test_what_a_sandbox_could_not_read_is_not_compared(images: Path, tmp_path: Path) -> None:
    for number, did in enumerate(("chmod 300 pkg", "chmod 200 pkg/calc.py", *UNNAMED)):
        with pytest.raises(NotComparable):
            asyncio.run(compare(images, tmp_path / str(number), did, "true"))


def test_a_link_in_a_layer_leads_nowhere(images: Path, tmp_path: Path) -> None:
    """Paths of the conversation are never resolved out here."""
    with pytest.raises(NotComparable):
        asyncio.run(compare(images, tmp_path, f"mv {TOP} /x; ln -s / {TOP}", "true"))
    secret = tmp_path / "secret"
    secret.write_text("x")
    did = f"cd {TOP}; ln -s {secret} link; ln -s {tmp_path} pkg2"
    found, _, _ = asyncio.run(compare(images, tmp_path / "again", did, "true"))
    assert {path: state.kind for path, state in found.ended.items()} == {
        "link": "link",
        "pkg2": "link",
    }


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_change_has_the_diff_that_the_general_way_makes(
    images: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def made(place: str) -> tuple[object, str]:
        layers = [tmp_path / f"{place}-{root}" for root in ("worked", "fresh")]
        sandboxes = [sandbox_in(images, layer, ImageSpec("python:1")) for layer in layers]
        worked, fresh = (
            ToolContext(ImageFiles(Workspace(layer), sandbox), sandbox)
            for layer, sandbox in zip(layers, sandboxes, strict=True)
        )
        try:
            for sandbox in sandboxes:
                await out(sandbox, "mkdir -p .git/info; echo '*.pyc' >> .git/info/exclude")
            await out(sandboxes[0], f"cd {TOP}; {PLAIN[name]}")
            diff = await make_diff(worked, fresh, RowSetup({}, (), ".", None))
            listed = "cd /testbed; find . -path ./.git -prune -o -type f -printf '%m %p %s\\n'"
            return diff, await out(sandboxes[1], f"{listed} | sort; ls -A /tmp")
        finally:
            for sandbox in sandboxes:
                await sandbox.stop()

    plain = asyncio.run(made("plain"))
    monkeypatch.setattr(BwrapImageSandbox, "memory_dir", None)
    monkeypatch.setattr(BwrapImageSandbox, "layers", None)
    assert plain == asyncio.run(made("general"))


def test_what_is_known_of_an_image_holds_for_unchanged_workspaces_only(
    images: Path, tmp_path: Path
) -> None:
    known = Known()

    async def begun(name: str, spec: ImageSpec, before: str | None = None) -> tuple[bool, bool]:
        """Whether it has a repository, and whether that was looked for."""
        sandbox = sandbox_in(images, tmp_path / name, spec)
        context = ToolContext(ImageFiles(Workspace(tmp_path / name), sandbox), sandbox)
        try:
            if before is not None:
                await out(sandbox, before)
            await begin_diff(context, is_needed=False, known=known)
            return find_start(tmp_path / name) is not None, (tmp_path / name / "upper").exists()
        finally:
            await sandbox.stop()

    async def use() -> list[tuple[bool, bool]]:
        python = ImageSpec("python:1")
        return [
            await begun("a", python),
            await begun("b", python),
            await begun("c", python, "rm -r .git"),
            await begun("d", python),
            await begun("e", ImageSpec("python:1", workdir="/tmp")),
            await begun("f", ImageSpec("python:1", env={"GIT_CEILING_DIRECTORIES": "/"})),
        ]

    assert asyncio.run(use()) == [
        (True, True),
        (True, False),
        (False, True),
        (True, False),
        (False, True),
        (True, True),
    ]


def test_no_overlay_waits_for_the_disk_and_each_begins_again(images: Path, tmp_path: Path) -> None:
    async def said(command: str) -> str:
        sandbox = sandbox_in(images, tmp_path / "l", ImageSpec("python:1"))
        try:
            return await out(sandbox, command)
        finally:
            await sandbox.stop()

    assert "volatile" in asyncio.run(said("grep ' / ' /proc/self/mounts; echo x > kept"))
    assert asyncio.run(said("cat kept; sync kept; rm kept")).strip() == "x"
    assert not asyncio.run(said("cat kept 2>/dev/null || true")).strip()


def test_a_repository_elsewhere_is_compared(tmp_path: Path) -> None:
    """Layers of any depth, with marks of what was removed and of directories made anew."""
    image, base, one, other = (tmp_path / name for name in ("image", "base", "one", "other"))
    make_repository(image / "top", {**CALC, "gone/a": "x", "anew/old": "x"})
    for layer in (base, one, other):
        (layer / "top").mkdir(parents=True)
    (base / "top/in-base").write_text("x")
    (one / "top/anew").mkdir()
    os.setxattr(one / "top/anew", "user.overlay.opaque", b"y")
    (one / "top/anew/new").write_text("y")
    found = differences([one, base, image], [other, image], "/top")
    assert set(found.ended) == {"in-base", "anew", "anew/new"}
    assert set(found.begun) == {"anew", "anew/old"}
    assert found.files.read_all("/top", ["in-base"]) == {"in-base": b"x"}
    assert differences([one, base, image], [one, base, image], "/top").ended == {}
