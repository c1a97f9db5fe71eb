"""Diffs of conversations, which fresh checks judge, whatever the model did to its repository."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.dataset.row_workspace import Check, RowSetup
from batch_trajectories.engine.worker.diffs.changes import begin_diff, is_unchanged
from batch_trajectories.engine.worker.diffs.git import DiffError
from batch_trajectories.engine.worker.diffs.making import make_diff
from tests.fakes.fake_images import make_repository
from tests.helpers.running import records_by_id, run, write_rows
from tests.images.conftest import CALC
from tests.images.test_image_runs import FIXED, OPTIONS, row, terminal
from tests.images.test_image_sandbox import out, sandbox_in
from toolsets.context import ToolContext
from toolsets.sandbox.base import ImageSpec
from toolsets.sandbox.image_files import ImageFiles
from toolsets.workspace.workspace import Workspace

pytestmark = pytest.mark.slow

FIX = "sed -i 's/a - b/a + b/' pkg/calc.py"
LARGE = "head -c 3000000 /dev/urandom > data.bin"
FRESH = {"command": f"python3 -c '{FIXED}'", "in": "fresh"}

RIGHT = {
    "a process that fills the limit": f"{FIX}; for n in {{1..27}}; do sleep 600 & done",
    "a large file": f"{FIX}; {LARGE}",
    "a repository within": f"{FIX}; mkdir new; cp pkg/calc.py new; cd new; git init -q .",
    "a new repository": f"{FIX}; rm -rf .git; git init -q .; git add -A",
    "no repository": f"{FIX}; rm -rf .git",
    "no git": f"{FIX}; rm $(command -v git)",
    "another git": f"{FIX}; printf '#!/bin/sh\\nexit 0\\n' > $(command -v git)",
    "commits and packs": f"{FIX}; git -c user.name=m -c user.email=m@m commit -qam x; git gc -q",
    "an index that is locked": f"{FIX}; touch .git/index.lock",
    "a time as before": f"cp -p pkg/calc.py /tmp/old; {FIX}; touch -r /tmp/old pkg/calc.py",
    "another file of the same time": f"cp -p pkg/calc.py new; {FIX}; touch -r new pkg/calc.py; "
    "mv new /tmp; mv pkg/calc.py new; mv /tmp/new pkg/calc.py; mv -f new pkg/calc.py",
    "names like patterns": f"{FIX}; for name in ':(exclude)pkg' ':!x' '*' '!x' '#x' -n '[a]' ' '; "
    'do echo x > "./$name"; done',
}
"""What a model did that fixed the bug."""

ODD = "\"$(printf '\\377.txt')\""
NESTED = "git init -q sub; echo 1 > sub/a"
SUBMODULE = (
    "git init -q 'ü b'; cd 'ü b'; echo 1 > a; git add a; git -c user.name=m -c user.email=m@m "
    "commit -qm a; cd ..; git add 'ü b'; git -c user.name=m -c user.email=m@m commit -qm b"
)
SET_UP = {
    "a repository that went": (NESTED, f"{FIX}; rm -r sub"),
    "a repository that became a file": (NESTED, f"{FIX}; rm -r sub; echo x > sub"),
    "a repository that became a link": (NESTED, f"{FIX}; rm -r sub; ln -s pkg sub"),
    "a submodule": (SUBMODULE, f"{FIX}; echo 2 > 'ü b/a'; echo 3 > 'ü b/b'"),
    "a submodule that went": (SUBMODULE, f"{FIX}; rm -r 'ü b'"),
    "no context": ("git config diff.context 0; git config diff.orderFile nowhere", FIX),
    "line ends": (
        "git config core.autocrlf input; git config core.safecrlf true",
        f"{FIX}; printf 'x\\r\\n' > new",
    ),
    "names that are not UTF-8": (f"echo x > {ODD}", f"{FIX}; touch {ODD}; echo x > new"),
}
"""How a workspace was set up, and what a model did there that fixed the bug."""
UNCARRIED = {
    "as long as before": ("python:1", "true", f"echo bb > {ODD}"),
    "a mode": ("python:1", "true", f"chmod +x {ODD}"),
    "a file that went": ("python:1", "true", f"rm {ODD}"),
    "another name": ("python:1", "true", f"mv {ODD} \"$(printf '\\376.txt')\""),
    "another target": (
        "python:1",
        "ln -s \"$(printf '\\377')\" link",
        "ln -sfn \"$(printf '\\376')\" link",
    ),
    "within a directory": (
        "python:1",
        "mkdir \"$(printf '\\377')\"; echo aa > \"$(printf '\\377')/a\"",
        "echo bb > \"$(printf '\\377')/a\"",
    ),
    "a link with such a name": (
        "python:1",
        "ln -s xa \"$(printf '\\377')\"",
        "ln -sfn xb \"$(printf '\\377')\"",
    ),
    "a closed directory": ("agent:1", "mkdir closed; echo 1 > closed/a", "chmod 0 closed"),
    "a new closed directory": ("agent:1", "true", "mkdir new; echo 1 > new/a; chmod 300 new"),
}
"""An image, how a workspace was set up, and what a model did besides its fix."""


CHANGES = """
echo '*.log' > .gitignore; echo x > a.log; mkdir -p deep/er; echo y > deep/er/b.log
printf 'no newline' > 'deep/er/a b'; printf '\\0\\1' > bin; : > empty; echo x > 'q"uo\\te'
echo '#!/bin/sh' > run.sh; chmod 755 run.sh; ln -s pkg/calc.py link; ln -s nowhere broken
rm -r pkg; echo x > pkg
touch -d @0 one; mkdir one.d; echo x > one.d/x; mkdir nothing
mkdir -p sub/deep; git init -q sub; echo x > sub/deep/f
git add -A; git -c user.name=m -c user.email=m@m commit -qm changed; echo z > unstaged
"""


def diff_of(
    images: Path,
    tmp_path: Path,
    *commands: str,
    then: str = "true",
    hidden: tuple[str, ...] = (),
    check: Check | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """What a conversation changed with `commands`, and what is said `then` on both sides."""

    async def use() -> tuple[dict[str, Any], list[str]]:
        contexts = []
        for name in ("worked", "fresh"):
            layer = tmp_path / name
            sandbox = sandbox_in(images, layer, ImageSpec("python:1"))
            files = ImageFiles(Workspace(layer), sandbox)
            contexts.append((sandbox, ToolContext(files, sandbox)))
        (worked, one), (fresh, other) = contexts
        try:
            await out(worked, "\n".join(commands))
            diff = await make_diff(
                one,
                other,
                RowSetup(files={}, commands=(), start_dir=".", check=check, hidden=hidden),
            )
            return diff, [await out(sandbox, then) for sandbox in (worked, fresh)]
        finally:
            await worked.stop()
            await fresh.stop()

    return asyncio.run(use())


def test_a_diff_holds_all_that_git_would_keep(images: Path, tmp_path: Path) -> None:
    listed = "git -c safe.directory=* ls-files -s | sort; find . -name '*.log'"
    as_git = "cd /testbed; rm -rf sub/.git; git add -A; " + listed
    diff, (worked, fresh) = diff_of(images, tmp_path, CHANGES, then=as_git)
    assert diff["truncated"] is False
    assert worked.splitlines() == [*fresh.splitlines(), "./a.log", "./deep/er/b.log"]
    assert "+++ b/sub/deep/f" in diff["patch"]
    # Also by git apply, elsewhere.
    make_repository(tmp_path / "again", CALC)
    applied = subprocess.run(
        ["git", "apply"], cwd=tmp_path / "again", input=diff["patch"].encode(), check=True
    )
    assert applied.returncode == 0
    script = f"git add -A; {listed}"
    again = subprocess.run(
        ["sh", "-c", script], cwd=tmp_path / "again", capture_output=True, text=True, check=True
    )
    assert again.stdout.strip().splitlines() == fresh.splitlines()


def test_what_is_not_the_models_is_no_change(images: Path, tmp_path: Path) -> None:
    """What it did not have, its repository's own files, and times alone."""
    did = "cd /testbed; rm -r pkg; rm -r .git; touch calc.py; rm calc.py; echo x > pkg"
    diff, _ = diff_of(images, tmp_path, did, hidden=("/testbed/pkg/",))
    assert diff == {"patch": "", "truncated": False}


def test_many_files_are_carried_and_ignored_ones_are_not(images: Path, tmp_path: Path) -> None:
    did = (
        "cd /testbed; echo '*.o' > .gitignore; for n in {1..2100}; do : > long-$n.o; done; "
        "for n in {1..60}; do echo $n > long-$n; done"
    )
    diff, (worked, fresh) = diff_of(images, tmp_path, did, then="ls -A /testbed | wc -l")
    assert diff["patch"].count("new file mode") == 61
    assert int(worked) == int(fresh) + 2100


def test_files_of_the_image_are_judged_whatever_the_diff_says(images: Path, tmp_path: Path) -> None:
    did = (
        "cd /testbed; rm pkg/calc.py; mkdir pkg/calc.py; echo x > pkg/calc.py/x; "
        f"mkdir long; for n in {{1..1500}}; do : > long/{'x' * 60}$n.pth; done; echo y > kept"
    )
    then = "cd /testbed; cat kept; find . -name '*.pth' | wc -l; find pkg -type f -name '[cx]*'"
    check = Check("true", from_image=("calc.py", "*.pth"))
    diff, said = diff_of(images, tmp_path, did, then=then, check=check)
    assert diff["patch"].count("new file mode") == 1502
    assert diff["patch"].count("deleted file mode") == 1
    assert [text.split() for text in said] == [
        ["y", "1500", "pkg/calc.py/x"],
        ["y", "0", "pkg/calc.py"],
    ]


def test_a_diff_copies_nothing_of_the_image(images: Path, tmp_path: Path) -> None:
    """Git marks objects that it finds as new, and a layer gets a copy of each marked file."""
    did = "cd /testbed; echo >> pkg/calc.py; git add -A"
    diff_of(images, tmp_path, did)
    upper = tmp_path / "fresh/upper"
    copied = [str(path.relative_to(upper)) for path in upper.rglob("*") if path.is_file()]
    assert copied == ["testbed/pkg/calc.py"]


@pytest.mark.parametrize(
    "did",
    [
        "echo >> pkg/calc.py",
        "chmod +x pkg/calc.py",
        "rm pkg/calc.py",
        "mv pkg new",
        "cp -p pkg/calc.py x; echo 1 > pkg/calc.py; cp -p x pkg/calc.py; rm x",
        "cd /; rm -rf testbed",
        "cd /; cp -a testbed x; rm -rf testbed; mkdir testbed",
        "cp -a pkg/calc.py x; rm pkg/calc.py; ln -s ../x pkg/calc.py",
    ],
)
def test_every_change_is_noticed(images: Path, tmp_path: Path, did: str) -> None:
    async def use() -> tuple[bool, bool]:
        sandbox = sandbox_in(images, tmp_path / "layer", ImageSpec("python:1"))
        context = ToolContext(ImageFiles(Workspace(tmp_path / "layer"), sandbox), sandbox)
        try:
            await out(sandbox, "echo x > /testbed/made; echo x > /testbed/pkg/made")
            await begin_diff(context, is_needed=True)
            await out(sandbox, "cat pkg/calc.py; git status; git gc; echo x > /tmp/x")
            before = is_unchanged(context)
            await out(sandbox, did)
            return before, is_unchanged(context)
        finally:
            await sandbox.stop()

    assert asyncio.run(use()) == (True, False)


def test_a_diff_without_a_repository_fails(images: Path, tmp_path: Path) -> None:
    with pytest.raises(DiffError, match="has no repository"):
        asyncio.run(_nowhere(images, tmp_path))


async def _nowhere(images: Path, tmp_path: Path) -> None:
    sandbox = sandbox_in(images, tmp_path / "l", ImageSpec("python:1", workdir="/tmp"))
    try:
        context = ToolContext(ImageFiles(Workspace(tmp_path / "l"), sandbox), sandbox)
        await make_diff(context, context, None)
    finally:
        await sandbox.stop()


def check_right_fixes(tmp_path: Path, **options: Any) -> None:
    """A right fix passes its fresh check, whatever else its model did."""
    rows = [row(name, "python:1", terminal(did), check=FRESH) for name, did in RIGHT.items()]
    rows.append(row("none", "python:1", terminal("rm -rf .git"), check=FRESH))
    write_rows(tmp_path / "p.jsonl", *rows)
    done = run(tmp_path, "--row_setup", **options, max_processes=30)
    assert done.returncode == 0, done.stderr
    done_records = records_by_id(tmp_path)
    assert {
        name: record["check"].get("error") for name, record in done_records.items()
    } == dict.fromkeys(done_records)
    rewards = {name: record["check"]["reward"] for name, record in done_records.items()}
    assert rewards == {**dict.fromkeys(RIGHT, 1.0), "none": 0.0}
    assert {record["check"]["in"] for record in done_records.values()} == {"fresh"}
    for name in RIGHT:
        assert "+    return a + b" in done_records[name]["diff"]["patch"], name
        assert not done_records[name]["diff"]["truncated"]
    assert "+++ b/new/calc.py" in done_records["a repository within"]["diff"]["patch"]
    assert done_records["none"]["diff"] == {"patch": "", "truncated": False}
    assert not [*(tmp_path / "trajectories/r/workspaces").iterdir()]


@pytest.mark.slow
def test_a_right_fix_passes_its_fresh_check(images: Path, tmp_path: Path) -> None:
    check_right_fixes(tmp_path, **OPTIONS, images=images)


@pytest.mark.slow
def test_a_right_fix_passes_wherever_the_repository_is_special(
    images: Path, tmp_path: Path
) -> None:
    check_special_repositories(tmp_path, **OPTIONS, images=images)


def check_special_repositories(tmp_path: Path, **options: Any) -> None:
    """A right fix passes its fresh check, and its diff has the context that `git apply` needs."""
    rows = [
        row(
            name, "python:1", terminal(did), check=FRESH, setup=set_up, env={"GIT_DIFF_OPTS": "-u0"}
        )
        for name, (set_up, did) in SET_UP.items()
    ]
    write_rows(tmp_path / "p.jsonl", *rows)
    done = run(tmp_path, "--row_setup", **options)
    assert done.returncode == 0, done.stderr
    checks = {name: record["check"] for name, record in records_by_id(tmp_path).items()}
    assert {name: check.get("error") for name, check in checks.items()} == dict.fromkeys(SET_UP)
    assert {name: check["reward"] for name, check in checks.items()} == dict.fromkeys(SET_UP, 1.0)
    for record in records_by_id(tmp_path).values():
        assert "\n def add(a, b):\n-    return a - b\n" in record["diff"]["patch"]


@pytest.mark.slow
def test_what_cannot_be_carried_is_no_reward(images: Path, tmp_path: Path) -> None:
    much = f"{FIX}; head -c 80000000 /dev/zero > data.bin"
    odd = f"{FIX}; python3 -c \"open(b'\\\\xff', 'w')\""
    rows = [
        row("much", "python:1", terminal(much), check=FRESH),
        row("odd", "python:1", terminal(odd), check=FRESH),
        row("same", "python:1", terminal(odd), check={**FRESH, "in": "same"}),
        *(
            row(
                name,
                image,
                terminal(f"{FIX}; {did}"),
                check=FRESH,
                setup=f"{before}; echo aa > {ODD}",
            )
            for name, (image, before, did) in UNCARRIED.items()
        ),
    ]
    write_rows(tmp_path / "p.jsonl", *rows)
    done = run(tmp_path, "--row_setup", **OPTIONS, images=images)
    assert done.returncode == 0, done.stderr
    done_records = records_by_id(tmp_path)
    assert done_records["much"]["check"]["reward"] is done_records["odd"]["check"]["reward"] is None
    assert "at most 64 MiB can be carried" in done_records["much"]["check"]["error"]
    assert "is not UTF-8" in done_records["odd"]["check"]["error"]
    for name in UNCARRIED:
        check = done_records[name]["check"]
        assert check["reward"] is None, name
        where = "the directory cannot be read" if "agent:1" in UNCARRIED[name] else "is not UTF-8"
        assert where in check["error"], check["error"]
    assert done_records["same"]["check"]["reward"] == 1.0
    assert "is not UTF-8" in done_records["same"]["diff"]["error"]


@pytest.mark.slow
def test_what_a_verifier_cannot_be_given_is_no_reward(images: Path, tmp_path: Path) -> None:
    check = {"command": "test ! -e pkg/closed/a", "image": "python:1", "artifacts": ["pkg"]}
    did = "mkdir pkg/closed; echo 1 > pkg/closed/a; chmod 300 pkg/closed"
    rows = [
        row("closed", "agent:1", terminal(did), check=check),
        row("left out", "agent:1", terminal(did), check=check),
        row("open", "agent:1", terminal("true"), check=check),
    ]
    rows[1]["check"] = check | {"artifacts": [{"path": "pkg", "exclude": ["closed"]}]}
    write_rows(tmp_path / "p.jsonl", *rows)
    done = run(tmp_path, "--row_setup", **OPTIONS, images=images)
    assert done.returncode == 0, done.stderr
    checks = {name: record["check"] for name, record in records_by_id(tmp_path).items()}
    assert {name: one["reward"] for name, one in checks.items()} == {
        "closed": None,
        "left out": 1.0,
        "open": 1.0,
    }
    assert "pkg/closed: the directory cannot be read" in checks["closed"]["error"]


@pytest.mark.slow
def test_a_fresh_check_without_a_repository_is_refused_before_any_call(
    images: Path, tmp_path: Path
) -> None:
    refused = {
        "none": ({"workdir": "/tmp"}, "needs git and a repository"),
        "of other files": (
            {"setup": "git config core.worktree /tmp"},
            "needs git and a repository",
        ),
        "of all files": ({"setup": "git init -q /", "workdir": "/etc"}, "is the whole image"),
    }
    rows = [row(name, "python:1", check=FRESH, **more) for name, (more, _) in refused.items()]
    write_rows(tmp_path / "p.jsonl", *rows)
    done = run(tmp_path, "--row_setup", **OPTIONS, images=images, max_attempts=1)
    assert done.returncode == 1, done.stderr
    for name, (_, why) in refused.items():
        record = records_by_id(tmp_path)[name]
        assert record["error"] is not None, name
        assert why in record["error"]["message"]
        assert record["turns"] == []
