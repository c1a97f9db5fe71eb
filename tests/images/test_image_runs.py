"""Runs whose rows name images: checks, diffs, kills, resumes, and what is left."""

from __future__ import annotations

import contextlib
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import kill_session, records_by_id, run, started, wait_until, write_rows

FIXED = "from pkg.calc import add; assert add(5, 2) == 7"
INTERRUPTED = "touch /testbed/begun; sleep 1000"


def terminal(command: str) -> dict[str, Any]:
    return {"tool_calls": [{"name": "terminal", "arguments": {"command": command}}]}


def using(tool: str, **arguments: Any) -> dict[str, Any]:
    return {"tool_calls": [{"name": tool, "arguments": arguments}]}


def row(name: str, image: str, *turns: dict[str, Any], **columns: Any) -> dict[str, Any]:
    script = [*turns, {"content": "Done."}]
    return {"id": name, "prompt": f"Fix {name}.", "image": image, "script": script, **columns}


FIXES = (
    row(
        "by a command",
        "python:1",
        terminal("sed -i s/-/+/ pkg/calc.py"),
        check={"command": f"python3 -c '{FIXED}'", "in": "fresh"},
    ),
    row(
        "by the file tools",
        "agent:1",
        using("read_file", path="pkg/calc.py"),
        using("patch_file", path="pkg/calc.py", old_text="a - b", new_text="a + b"),
        check=f"python3 -c '{FIXED}'",
    ),
    row(
        "without Python",
        "shell:1",
        terminal(
            "echo 'echo $(($1 + $2))' > sum.sh; git add -A; git -c user.name=m -c "
            "user.email=m@example.org commit -qm fixed"
        ),
        check={"command": 'test "$(sh sum.sh 5 2)" = 7', "in": "fresh"},
    ),
    row(
        "not at all",
        "python:1",
        using("list_files", path="."),
        check=f"python3 -c '{FIXED}'",
    ),
    row(
        "with hidden tests",
        "python:1",
        terminal("ls /tests || sed -i s/-/+/ pkg/calc.py"),
        check={"command": "python3 /tests/hidden.py", "files": {"/tests/hidden.py": FIXED}},
        env={"PYTHONPATH": "/testbed"},
    ),
)

OPTIONS: dict[str, Any] = {
    "run_name": "r",
    "dataset_file": "p.jsonl",
    "model": "scripted",
    "enabled_toolsets": "file,terminal,python",
    "num_workers": 2,
    "sandbox": "bwrap",
    "workspace": "image",
}
FLAGS = ("--row_setup",)


def assert_nothing_is_left(cwd: Path) -> None:
    assert list((cwd / "trajectories/r/workspaces").iterdir()) == []
    mounts = Path("/proc/self/mounts").read_text()
    assert str(cwd) not in mounts


def test_python_is_not_offered_in_an_image_without_it(tmp_path: Path, images: Path) -> None:
    call = using("python", code="1 + 1")
    write_rows(tmp_path / "p.jsonl", row("with", "python:1", call), row("without", "shell:1", call))
    done = run(tmp_path, *FLAGS, images=images, **OPTIONS)
    assert done.returncode == 0, done.stderr
    found = records_by_id(tmp_path)
    offered = {
        name: (
            record["toolsets"],
            "python" in {tool["function"]["name"] for tool in record["tools"]},
        )
        for name, record in found.items()
    }
    assert offered == {
        "with": (["file", "python", "terminal"], True),
        "without": (["file", "terminal"], False),
    }
    with_it, without = (found[name]["messages"][-2]["content"] for name in ("with", "without"))
    assert json.loads(with_it)["value"] == "2"
    assert "python" in without
    log = (tmp_path / "trajectories/r/run.log").read_text()
    assert log.count("shell:1, which has no python3") == 1


def run_fixes(cwd: Path, **options: Any) -> dict[str, Any]:
    """The records of `FIXES` and of a row without an image, whose checks are as they should."""
    write_rows(cwd / "p.jsonl", *FIXES, row("lost", "missing:1"))
    done = run(cwd, *FLAGS, max_attempts=1, **options)
    assert done.returncode in (0, 1), done.stderr
    done_records = records_by_id(cwd)
    passed = {
        name: record["check"] and record["check"]["passed"] for name, record in done_records.items()
    }
    assert passed == {
        "by a command": True,
        "by the file tools": True,
        "without Python": True,
        "not at all": False,
        "with hidden tests": True,
        "lost": None,
    }
    return done_records


@pytest.mark.slow
def test_rows_are_worked_on_in_their_images(images: Path, tmp_path: Path) -> None:
    found = run_fixes(tmp_path, images=images, **OPTIONS)
    lost = found["lost"]["error"]
    assert lost["class"] == "setup_failed"
    assert "image 'missing:1' is not in" in lost["message"]
    assert found["lost"]["api_calls"] == 0
    for name in ("by a command", "by the file tools"):
        assert "+    return a + b" in found[name]["diff"]["patch"]
    # Also what the model committed.
    assert "+echo $(($1 + $2))" in found["without Python"]["diff"]["patch"]
    assert found["not at all"]["diff"] == {"patch": "", "truncated": False}
    assert_nothing_is_left(tmp_path)


GRADERS = """
def read(conversation, workspace, row):
    calc = workspace / "pkg" / "calc.py"
    assert str(calc) == "/testbed/pkg/calc.py"
    assert calc.exists() and calc.is_file() and not calc.is_dir()
    assert workspace.is_dir() and not (workspace / "none").exists()
    names = [path.name for path in workspace.iterdir()]
    assert names == sorted(names) and "pkg" in names, names
    found = [str(path.relative_to(workspace)) for path in workspace.rglob("*.py")]
    assert "pkg/calc.py" in found, found
    assert (workspace / "/tmp/outside").read_bytes() == b"\\xff\\n"
    return {"fixed": float("a + b" in calc.read_text()), "check": conversation["check"]["reward"]}

def missing(conversation, workspace, row):
    try:
        (workspace / "none").read_text()
    except FileNotFoundError:
        return 1

def opened(conversation, workspace, row):
    with open(workspace / "pkg" / "calc.py") as file:
        return 1

def idle(conversation, workspace, row):
    return len(conversation["messages"])
"""


@pytest.mark.slow
def test_reward_functions_read_the_files_in_the_image(images: Path, tmp_path: Path) -> None:
    run_with_rewards(tmp_path, images=images, **OPTIONS)
    assert_nothing_is_left(tmp_path)


def run_with_rewards(tmp_path: Path, **options: Any) -> None:
    """A run whose reward functions find what its conversation left in the image."""
    (tmp_path / "graders.py").write_text(GRADERS)
    command = terminal("sed -i s/-/+/ pkg/calc.py; printf '\\377\\n' > /tmp/outside")
    check = {"command": f"python3 -c '{FIXED}'", "in": "fresh"}
    write_rows(tmp_path / "p.jsonl", row("a", "python:1", command, check=check))
    reward = ",".join(f"graders:{name}" for name in ("read", "missing", "opened", "idle"))
    done = run(tmp_path, *FLAGS, reward=reward, **options)
    assert done.returncode == 0, done.stderr
    read, missing, opened, idle = records_by_id(tmp_path)["a"]["scores"]
    assert (read["error"], read["rewards"]) == (None, {"fixed": 1, "check": 1})
    assert missing["rewards"] == {"missing": 1}
    assert (
        "TypeError: /testbed/pkg/calc.py is inside an image: use its read_text" in opened["error"]
    )
    assert idle["rewards"] == {"idle": 4}


def kill(process: Any) -> None:
    kill_session(process.pid)
    process.wait()


NOT_UNDONE = {**OPTIONS, "max_rebuild_s": 0}


def run_interrupted(cwd: Path, images: Path) -> Path:
    """A run that was killed in the second turn; returns the workspace of its conversation."""
    turns = (
        terminal("echo kept > /opt-file; sed -i s/-/+/ pkg/calc.py"),
        terminal(INTERRUPTED),
        terminal("cat /opt-file"),
    )
    check = f"python3 -c '{FIXED}'"
    write_rows(cwd / "p.jsonl", row("a", "python:1", *turns, check=check))
    return start_and_kill(cwd, images)


def start_and_kill(cwd: Path, images: Path) -> Path:
    """Start the run and kill it in the second turn."""
    workspaces = cwd / "trajectories/r/workspaces"
    with started(cwd, *FLAGS, images=images, **NOT_UNDONE) as process:
        wait_until(lambda: list(workspaces.glob("*/upper/testbed/begun")))
        kill(process)
    (workspace,) = workspaces.iterdir()
    return workspace


@pytest.mark.slow
def test_a_killed_conversation_continues_with_its_files(images: Path, tmp_path: Path) -> None:
    run_interrupted(tmp_path, images)
    done = run(tmp_path, *FLAGS, images=images, **NOT_UNDONE)
    assert done.returncode == 0, done.stderr
    record = records_by_id(tmp_path)["a"]
    assert [resume["workspace_kept"] for resume in record["resumes"]] == [True]
    assert "kept" in record["messages"][-2]["content"]
    assert record["check"]["passed"]
    assert "+    return a + b" in record["diff"]["patch"]
    assert "restarts" not in record
    assert_nothing_is_left(tmp_path)


@pytest.mark.slow
def test_a_conversation_whose_layer_is_gone_begins_again(images: Path, tmp_path: Path) -> None:
    """Its paid replies stay in the record; no turn follows from files that are not there."""
    workspace = run_interrupted(tmp_path, images)
    workspace.rename(tmp_path / "gone")
    # The second turn is cut off soon this time.
    options = {**NOT_UNDONE, "command_timeout_s": 4, "accept_config_change": "command_timeout_s"}
    done = run(tmp_path, *FLAGS, images=images, **options)
    assert done.returncode == 0, done.stderr
    record = records_by_id(tmp_path)["a"]
    assert [restart["reason"] for restart in record["restarts"]] == ["the workspace was lost"]
    assert [reply["discarded"] for reply in record["discarded"]] == ["workspace_lost"] * 2
    assert record["resumes"] == []
    assert len(record["turns"]) == 4
    assert record["api_calls"] == 6
    assert "kept" in record["messages"][-2]["content"]
    assert record["check"]["passed"]
    assert_nothing_is_left(tmp_path)


@pytest.mark.slow
def test_a_conversation_that_began_again_continues_after_a_kill(
    images: Path, tmp_path: Path
) -> None:
    """Its events from before the new beginning are not its conversation."""
    run_interrupted(tmp_path, images).rename(tmp_path / "gone")
    start_and_kill(tmp_path, images)
    done = run(tmp_path, *FLAGS, images=images, **NOT_UNDONE)
    assert done.returncode == 0, done.stderr
    record = records_by_id(tmp_path)["a"]
    assert len(record["restarts"]) == 1
    assert [resume["workspace_kept"] for resume in record["resumes"]] == [True]
    assert len(record["turns"]) == 4
    assert record["api_calls"] == 6
    assert "kept" in record["messages"][-2]["content"]
    assert record["check"]["passed"]


WAITING = """
from pathlib import Path
from time import sleep
from toolsets.context import ToolContext
from toolsets.tool import tool

@tool(effects="workspace")
def write(context: ToolContext) -> str:
    \"""Write a file, and wait.\"""
    context.workspace.write_bytes("begun", b"")
    while not Path("go").exists():
        sleep(0.01)
    return "written"
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_kept", [True, False])
def test_a_cut_off_call_is_undone_in_an_image(images: Path, tmp_path: Path, is_kept: bool) -> None:
    """Also where the layer is gone: the image, its set-up and the calls make it again."""
    (tmp_path / "waiting.py").write_text(WAITING)
    turns = (
        terminal(
            "test ! -e begun; echo $? > /opt-file; made=$(cat /set); cd pkg; sed -i s/-/+/ calc.py"
        ),
        {"tool_calls": [{"name": "write", "arguments": {}}]},
        terminal("cat /opt-file; echo $made; pwd"),
    )
    check = f"python3 -c '{FIXED}'"
    write_rows(
        tmp_path / "p.jsonl", row("a", "python:1", *turns, setup="echo up > /set", check=check)
    )
    options = {**OPTIONS, "tools": "waiting:write", "enabled_toolsets": "waiting,terminal"}
    workspaces = tmp_path / "trajectories/r/workspaces"
    with started(tmp_path, *FLAGS, images=images, **options) as process:
        wait_until(lambda: list(workspaces.glob("*/upper/testbed/begun")))
        kill(process)
    (workspace,) = workspaces.iterdir()
    if not is_kept:
        workspace.rename(tmp_path / "gone")
    (tmp_path / "go").touch()
    done = run(tmp_path, *FLAGS, images=images, **options)
    assert done.returncode == 0, done.stderr
    record = records_by_id(tmp_path)["a"]
    (resume,) = record["resumes"]
    assert (resume["interrupted"], resume["rebuild"]["calls"]) == ([], 1)
    last = json.loads(record["messages"][-2]["content"])
    assert (last["stdout"], last.get("note")) == ("0\nup\n/testbed/pkg\n", None)
    assert record["check"]["passed"]
    assert "restarts" not in record
    assert_nothing_is_left(tmp_path)


@pytest.mark.slow
def test_a_setup_that_was_killed_is_done_again(images: Path, tmp_path: Path) -> None:
    """Not a second time on what the first one left."""
    write_rows(
        tmp_path / "p.jsonl",
        row(
            "a",
            "python:1",
            setup="test ! -e /once && touch /once; test -e /go || "
            "{ touch /testbed/begun; sleep 1000; }",
            check="true",
        ),
    )
    workspaces = tmp_path / "trajectories/r/workspaces"
    with started(tmp_path, *FLAGS, images=images, **OPTIONS) as process:
        wait_until(lambda: list(workspaces.glob("*/upper/testbed/begun")))
        kill(process)
    (layer,) = workspaces.glob("*/upper")
    assert (layer / "once").exists()
    assert list(workspaces.glob("*.half"))
    options = {**OPTIONS, "command_timeout_s": 4, "accept_config_change": "command_timeout_s"}
    done = run(tmp_path, *FLAGS, images=images, max_attempts=1, **options)
    assert done.returncode in (0, 1), done.stderr
    # It timed out waiting, so `test ! -e /once` held again.
    assert "timed out" in records_by_id(tmp_path)["a"]["error"]["message"]
    assert_nothing_is_left(tmp_path)


@pytest.mark.slow
def test_killed_at_random_moments(images: Path, tmp_path: Path) -> None:
    draw = random.Random(7)
    turns = [terminal(f"echo {n} >> log") for n in range(8)]
    check = "test $(wc -l < log) -ge 8 && python3 -c 'import pkg.calc'"
    rows = [row(f"c{n}", ("python:1", "agent:1")[n % 2], *turns, check=check) for n in range(6)]
    write_rows(tmp_path / "p.jsonl", *rows)
    inflight = tmp_path / "trajectories/r/inflight"

    def journaled() -> int:
        found = 0
        for path in inflight.glob("*.jsonl"):
            with contextlib.suppress(FileNotFoundError):  # its conversations have ended
                found += path.read_bytes().count(b"\n")
        return found

    for _ in range(10):
        before = journaled() if inflight.exists() else 0
        with started(tmp_path, *FLAGS, images=images, **OPTIONS) as process:
            wanted = before + draw.randint(1, 20)
            wait_until(lambda wanted=wanted: journaled() >= wanted or process.poll() is not None)
            kill(process)
    done = run(tmp_path, *FLAGS, images=images, **OPTIONS)
    assert done.returncode == 0, done.stderr
    done_records = records_by_id(tmp_path)
    assert len(done_records) == 6
    for record in done_records.values():
        assert record["status"] == "completed"
        assert "restarts" not in record
        # A call that was interrupted may have run or not.
        interruptions = sum(len(resume["interrupted"]) for resume in record["resumes"])
        assert record["check"]["passed"] or interruptions
    assert_nothing_is_left(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sandbox": "local"},
            "sandbox local: it cannot work in images; use --sandbox=bwrap or docker",
        ),
        ({"workspace": "directory", "images": "x"}, "images: needs --workspace=image"),
        ({"workdir": "app", "images": "x"}, "workdir: must be an absolute path"),
        ({}, "--images=DIR"),
        (
            {"images": "nowhere"},
            "nowhere is not a directory; put the images there, as docs/images.md shows",
        ),
        ({"images": "."}, "`podman save`; put the images there, as docs/images.md shows"),
        (
            {"mcp": '{"m": {"command": ["x", "{workspace}"]}}', "images": "."},
            "mcp: m: {workspace} is a directory of this machine",
        ),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    write_rows(tmp_path / "p.jsonl", row("a", "python:1"))
    done = run(tmp_path, "--dry_run", **{**OPTIONS, **options})
    assert done.returncode != 0
    assert message in done.stderr


def test_a_dry_run_names_images_that_are_missing(images: Path, tmp_path: Path) -> None:
    judged = row("d", "python:1", check={"command": "true", "image": "no:1", "artifacts": ["x"]})
    rows = [row("a", "python:1"), row("b", "no:1"), row("c", "no:1"), judged]
    write_rows(tmp_path / "p.jsonl", *rows)
    done = run(tmp_path, "--dry_run", *FLAGS, images=images, **OPTIONS)
    assert done.returncode == 0, done.stderr
    assert f"3 rows will fail; the first: image 'no:1' is not in {images}" in done.stdout
    write_rows(tmp_path / "p.jsonl", row("a", "python:1"))
    assert "will fail" not in run(tmp_path, "--dry_run", images=images, **OPTIONS).stdout


def test_a_history_that_is_not_removed_without_row_setup_is_named(
    images: Path, tmp_path: Path
) -> None:
    write_rows(tmp_path / "p.jsonl", row("a", "python:1", base_commit="HEAD"))
    given: dict[str, Any] = {"model": "scripted", "dataset_file": "p.jsonl", "run_name": "r"}
    cases: Any = (({"workspace": "image", "images": images}, True), ({}, False))
    for inside, names_it in cases:
        warned = run(tmp_path, "--dry_run", **given, **inside).stderr
        assert ("without --row_setup: base_commit (1 row)" in warned) == names_it


@pytest.mark.slow
def test_rows_need_an_image(images: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", {"id": "a", "prompt": "x", "script": [{"content": "Done."}]})
    done = run(tmp_path, images=images, on_bad_row="fail", **OPTIONS)
    assert done.returncode != 0
    assert "give --docker_image" in done.stderr
    named = run(tmp_path, images=images, docker_image="shell:1", workdir="/tmp", **OPTIONS)
    assert named.returncode == 0, named.stderr


@pytest.mark.slow
def test_why_a_setup_failed_is_said_at_once_in_the_summary_and_by_status(
    images: Path, tmp_path: Path
) -> None:
    """Grouped by reason: what differs between the tasks is not another one."""
    write_rows(
        tmp_path / "p.jsonl",
        *(row(f"gone {n}", f"gone-{n}:1", terminal("true")) for n in range(3)),
        row("refused", "python:1", terminal("true"), setup="echo no licence >&2; exit 3"),
        row("fine", "python:1", terminal("true")),
    )
    done = run(tmp_path, *FLAGS, images=images, **OPTIONS, max_attempts=1)
    assert done.returncode == 1
    assert "refused: attempt 1 failed (setup_failed): `setup`: " in done.stderr
    totals = done.stderr + done.stdout
    assert re.search(r"\n +3  setup_failed: image 'gone-\d:1' is not in ", totals)
    assert re.search(r"\n +1  setup_failed: `setup`: .* exit code 3: no licence\n", totals)
    summary = json.loads((tmp_path / "trajectories/r/summary.json").read_bytes())
    assert [reason["count"] for reason in summary["reasons"]] == [3, 1]
    status = run(tmp_path, "status", "trajectories/r")
    assert "setup_failed: image 'gone-" in status.stdout
