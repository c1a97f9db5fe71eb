"""No process is left for others to collect, and process 1 collects what others leave."""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.playing import call, calls, say
from tests.helpers.running import (
    PATIENCE_S,
    ROOT,
    SCRIPTED,
    lines,
    run,
    session_of,
    started,
    wait_until,
    write_rows,
)
from tests.helpers.running import command as command_of
from tests.toolsets.test_sandbox import BOTH

# Run in a process that gets every orphan, as process 1 does. None may be left to it.
ADOPTING = """
import asyncio, ctypes, json, os, sys
from pathlib import Path
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
asyncio.run(work(*sys.argv[1:]))
try:
    pid, status = os.waitpid(-1, 0)
except ChildProcessError:
    print("none")
else:
    sys.exit(f"process {pid} was left with {status}")
"""
SANDBOX = """
from toolsets.sandbox.base import Limits
from toolsets.sandbox.factory import make_sandbox
from toolsets.workspace.workspace import Workspace

async def work(name, root, command):
    sandbox = make_sandbox(name, Workspace(Path(root)), Limits())
    await sandbox.run("python", "1")
    calling = asyncio.ensure_future(sandbox.run("shell", command))
    while not (Path(root) / "begun").exists():
        await asyncio.sleep(0.01)
    if command.endswith("cut off"):
        calling.cancel()
    await asyncio.wait({calling})
    await sandbox.stop()
"""
MCP = """
from toolsets.mcp.servers import McpServers, list_servers
from toolsets.mcp.mcp_settings import McpServer
from toolsets.catalog.registry import collect_tools
from toolsets.context import ToolContext
from toolsets.toolbox import Toolbox
from toolsets.workspace.workspace import Workspace

async def work(root, *argv):
    Path(root).mkdir()
    servers = McpServers(await list_servers({"raw": McpServer(command=argv, per_task=True)}))
    servers.open()
    toolbox = Toolbox(collect_tools(servers.toolsets()), ToolContext(Workspace(Path(root))))
    told = await toolbox.call("raw__pids", "{}")  # it starts a child, which it leaves behind
    assert not told.is_error, told.content
    await toolbox.close(remove_workspace=True)
    await servers.close()
"""

ENDINGS = {
    "in order": "(sleep 1000 &); sleep 1000 & touch begun",
    "a session of its own": "setsid nohup sleep 1000 >/dev/null 2>&1 & touch begun",
    "cut off": "touch begun; (setsid sleep 1000 &) ; sleep 1000; : cut off",
}


def adopting(program: str, *argv: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program + ADOPTING, *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.stdout + done.stderr


@BOTH
@pytest.mark.parametrize(
    "ending",
    ["cut off", *(pytest.param(e, marks=pytest.mark.slow) for e in ENDINGS if e != "cut off")],
)
def test_a_sandbox_leaves_no_process_to_others(name: str, ending: str, tmp_path: Path) -> None:
    assert adopting(SANDBOX, name, str(tmp_path / "ws"), ENDINGS[ending]) == "none\n"


@pytest.mark.long
def test_a_sandbox_that_is_ended_by_force_leaves_none(tmp_path: Path) -> None:
    stopped = "touch begun; kill -STOP $PPID; sleep 1000 # cut off"
    assert adopting(SANDBOX, "local", str(tmp_path / "ws"), stopped) == "none\n"


@pytest.mark.slow
def test_an_mcp_server_leaves_none(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="the extra `mcp` is not installed")
    raw = str(ROOT / "tests" / "helpers/raw_mcp_server.py")
    assert adopting(MCP, str(tmp_path / "ws"), sys.executable, "-S", raw) == "none\n"


AS_FIRST = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]


@cache
def first_place_problem() -> str | None:
    try:
        done = subprocess.run([*AS_FIRST, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        return str(error)
    return done.stderr or None


needs_first_place = pytest.mark.skipif(
    first_place_problem() is not None, reason=f"no namespace: {first_place_problem()}"
)


def as_first(code: str) -> list[str]:
    head = "import os, signal, subprocess, sys, time; from pathlib import Path; "
    module = "batch_trajectories.basics.process"
    leave = f"from {module} import fork_if_init; fork_if_init()\n"
    return [*AS_FIRST, sys.executable, "-c", head + leave + code]


@needs_first_place
def test_process_1_collects_what_others_leave() -> None:
    code = """
def states():
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        yield int(path.parent.name), fields[0], int(fields[1])
assert os.getpid() != 1
for _ in range(20):
    subprocess.run(["sh", "-c", "(sleep 0.01 &)"], check=True)
own = subprocess.Popen(["sh", "-c", "exit 9"])
while any(parent == 1 and pid != os.getpid() for pid, _, parent in states()):
    time.sleep(0.01)
assert own.wait() == 9  # what is ours is left to us
sys.exit(7)
"""
    done = subprocess.run(as_first(code), cwd=ROOT, timeout=PATIENCE_S, check=False)
    assert done.returncode == 7


@needs_first_place
def test_process_1_passes_signals_on() -> None:
    code = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print("ready", flush=True)
signal.pause()
"""
    with subprocess.Popen(as_first(code), cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        first = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        subprocess.run(["kill", "-TERM", first.strip()], check=True)
        assert process.wait(PATIENCE_S) == 5


@needs_first_place
def test_process_1_ends_by_the_signal_of_its_child() -> None:
    killed = subprocess.run(
        as_first("os.kill(os.getpid(), signal.SIGKILL)"), cwd=ROOT, timeout=PATIENCE_S, check=False
    )
    assert killed.returncode == 128 + signal.SIGKILL


@needs_first_place
@pytest.mark.slow
def test_a_run_as_process_1_has_no_dead_children(tmp_path: Path) -> None:
    # It waits for the end of all dead processes: those that nobody collects stay.
    look = """
import os, time
def states():
    for name in os.listdir("/proc"):
        try:
            yield open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[0]
        except OSError:
            continue
while "Z" in states():
    time.sleep(0.01)
print("none")
"""
    command = f"(sleep 0 &); python3 -c '{look}'"
    # One after the other, so that each has those before it behind it.
    write_rows(
        tmp_path / "p.jsonl",
        *(
            {
                "prompt": f"{n}",
                "script": [calls(call("terminal", command=command)), say("ok")],
            }
            for n in range(6)
        ),
    )
    flags = {**SCRIPTED, "enabled_toolsets": "terminal", "sandbox": "local", "batch_size": 1}
    done = subprocess.run(
        [*AS_FIRST, *command_of(**flags)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    records = lines(tmp_path / "trajectories" / "r" / "records.jsonl")
    told = [m["content"] for record in records for m in record["messages"] if m["role"] == "tool"]
    assert len(told) == 6
    assert all('"stdout":"none\\n"' in content for content in told), told


def test_each_worker_loads_the_users_tools_itself(tmp_path: Path) -> None:
    """Workers are forked before that: what a module makes at import, such as a generator of random
    numbers, would be the same in all of them."""
    (tmp_path / "own.py").write_text(
        "import os\n\nLOADED_BY = os.getpid()\n\n\n"
        "def is_loaded_here() -> bool:\n"
        '    """Say whether this process has loaded the tool."""\n'
        "    return LOADED_BY == os.getpid()\n"
    )
    script = [{"tool_calls": [{"name": "is_loaded_here", "arguments": {}}]}, {"content": "yes"}]
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": script})
    given = {**SCRIPTED, "enabled_toolsets": "own", "tools": "own.py:is_loaded_here"}
    done = run(tmp_path, **given)
    assert done.returncode == 0, done.stderr
    (record,) = lines(tmp_path / "trajectories" / "r" / "records.jsonl")
    assert record["messages"][-2]["content"] == "true"


@pytest.mark.slow
def test_a_plan_that_fails_leaves_no_worker(tmp_path: Path) -> None:
    """Workers are forked before the plan is made; a tool that cannot be loaded refuses it."""
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [{"content": "yes"}]}, {})
    with started(tmp_path, tools="own.py:missing", **{**SCRIPTED, "num_workers": 2}) as process:
        assert process.wait(timeout=PATIENCE_S) == 2
        wait_until(lambda: not session_of(process.pid))
