"""A task has one shell and one interpreter, which keep their state, within bounds that hold."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.sandbox_conformance import cut_off
from tests.helpers.running import ROOT, wait_until
from tests.toolsets.test_sandbox import (
    KEEP_ALIVE,
    alive,
    has_no_writer,
    needs_bwrap,
    workspace,
)
from toolsets.catalog.registry import TOOLSETS, collect_tools
from toolsets.context import ToolContext
from toolsets.sandbox.base import Limits
from toolsets.sandbox.cgroup import make_group, refusals_here
from toolsets.sandbox.channel import Channel, Gone, Launch
from toolsets.sandbox.factory import make_sandbox
from toolsets.sandbox.programs import python_bin
from toolsets.tool import ToolResult
from toolsets.toolbox import Toolbox
from toolsets.workspace.workspace import Workspace

__all__ = ["alive", "workspace"]  # fixtures

LOST = "its state (variables, functions, current directory) is lost; files are kept"
TOOLS = collect_tools(list(TOOLSETS.values()))


class Task:
    """One task, with its tools and an event loop."""

    def __init__(
        self,
        kind: str,
        root: Path,
        limits: Limits,
        *,
        resumed: bool = False,
        call_timeout_s: float = 60,
    ) -> None:
        self.kind = kind
        self.limits = limits
        self.workspace = Workspace(root)
        self.sandbox = make_sandbox(kind, self.workspace, limits)
        self._context = ToolContext(self.workspace, self.sandbox, resumed=resumed)
        self.limit_calls(call_timeout_s)
        self._runner = asyncio.Runner()

    def limit_calls(self, timeout_s: float) -> None:
        """Give later calls this time."""
        self.toolbox = Toolbox(TOOLS, self._context, call_timeout_s=timeout_s)

    def call(
        self, name: str, *, conversation: Sequence[dict[str, Any]] = (), **arguments: Any
    ) -> ToolResult:
        calling = self.toolbox.call(name, json.dumps(arguments), conversation=conversation)
        return self._runner.run(calling)

    def sh(self, command: str, **arguments: Any) -> dict[str, Any]:
        result = self.call("terminal", command=command, **arguments)
        return dict(json.loads(result.content))

    def out(self, command: str) -> str:
        shown = self.sh(command)
        assert (shown["exit_code"], shown["stderr"]) == (0, ""), shown
        return str(shown["stdout"])

    def py(self, code: str, **arguments: Any) -> dict[str, Any]:
        return dict(json.loads(self.call("python", code=code, **arguments).content))

    def close(self) -> None:
        self._runner.run(self.toolbox.close(remove_workspace=False))
        self._runner.close()


@pytest.fixture(
    params=[
        pytest.param("bwrap", marks=needs_bwrap),
        pytest.param("local", marks=pytest.mark.slow),
    ]
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def task(kind: str, tmp_path: Path) -> Iterator[Task]:
    made = Task(kind, tmp_path / "ws", Limits(timeout_s=20))
    yield made
    made.close()


def small(kind: str, root: Path, **limits: Any) -> Task:
    return Task(kind, root, Limits(**{"timeout_s": 20, **limits}))


def test_a_shell_keeps_directory_variables_functions_and_options(task: Task) -> None:
    task.out("mkdir d; cd d; X=1; export Y=2; f() { echo f$1; }; alias q='echo q'; set -o pipefail")
    assert task.out('basename "$PWD"; echo $X; sh -c "echo $Y"; f 3; q').split() == [
        "d",
        "1",
        "2",
        "f3",
        "q",
    ]
    assert task.sh("false | true")["exit_code"] == 1
    assert task.out("echo $?") == "1\n"


@needs_bwrap
def test_a_command_after_one_that_failed_starts_no_process_of_ours(tmp_path: Path) -> None:
    """Process numbers show it: they are counted in the sandbox's own namespace."""
    task = small("bwrap", tmp_path / "ws")
    start = "sleep 0 & wait; echo $!"
    first = int(task.out(start))
    assert int(task.out(start)) == first + 1
    for exit_code in (1, 7):
        assert task.sh(f"(exit {exit_code})")["exit_code"] == exit_code  # one process of its own
    assert int(task.out(start)) == first + 4
    task.close()


def test_a_command_reaches_the_shell_as_it_is_in_any_locale(task: Task) -> None:
    odd = "\\n \\\\ \\c é日𝄞 %s %b 'x' " + "y" * 5000
    for locale in ("", "export LC_ALL=C", "export LC_ALL=POSIX; set -o posix"):
        task.sh(locale)
        assert task.out(f"cat <<'END'\n{odd}\nEND\n") == f"{odd}\n"


def test_redirections_and_traces_do_not_outlast_a_call(task: Task) -> None:
    task.sh("exec >log 2>&1 </etc/passwd; echo logged")
    assert task.out("cat log; cat") == "logged\n"
    task.sh("set -x")
    assert task.sh("echo a")["stderr"].lstrip("+") == " echo a\n"


@pytest.mark.parametrize(
    ("command", "code"), [("exit 3", 3), ("set -e; false", 1), ("exec sh -c 'exit 4'", 4)]
)
def test_a_shell_that_ends_says_so_and_is_replaced(task: Task, command: str, code: int) -> None:
    task.out("X=1")
    ended = task.sh(f"echo out; {command}")
    assert (ended["exit_code"], ended["stdout"]) == (code, "out\n")
    assert ended["note"] == f"[the shell ended; {LOST}; the next call starts a new one]"
    after = task.sh("echo .$X.")
    assert after == {"exit_code": 0, "stdout": "..\n", "stderr": ""}


def test_a_command_that_signals_its_group_reaches_the_shell_and_no_further(task: Task) -> None:
    assert task.out("trap '' TERM; kill 0; echo here") == "here\n"
    assert task.sh("trap - TERM; kill 0")["exit_code"] == 143
    assert task.py("1")["value"] == "1"


def test_syntax_errors_cost_no_state(task: Task) -> None:
    task.out("X=1")
    broken = task.sh("if then")
    assert broken["exit_code"] == 2
    assert "syntax error" in broken["stderr"]
    assert task.out("echo $X") == "1\n"


def test_a_shell_other_than_bash_keeps_its_state_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (python_bin() / "bash").exists():
        pytest.skip("this Python stands beside a bash, and so would be found with it")
    (tmp_path / "bin").mkdir()
    for name in ("sh", "cat", "mkdir"):
        (tmp_path / "bin" / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    task = small("local", tmp_path / "ws")
    try:
        task.out("X='a\\n\nb'\nmkdir d\ncd d")
        assert task.out('printf %s "$X"; echo "${PWD##*/}[$BASH_VERSION]"') == "a\\n\nbd[]\n"
        assert task.sh("(exit 5)")["exit_code"] == 5
        assert task.out("echo $?") == "5\n"
        started = task.sh("echo up", background=True)
        wait_until(lambda: Path(started["output_file"]).read_text() == "up\n")
    finally:
        task.close()


def test_a_timeout_spares_what_ran_before_and_kills_what_did_not(task: Task, alive: int) -> None:
    task.out("X=1; sleep 1000 & echo $! > before")
    script = f"echo begun; trap '' INT TERM; (setsid sh -c '{KEEP_ALIVE}' &); sleep 1000"
    late = cut_off(
        lambda timeout_s: task.call("terminal", command=script, timeout_s=timeout_s),
        lambda _: (task.workspace.root / "started").exists(),
    )
    shown = json.loads(late.content)
    assert late.is_error
    assert (shown["stdout"], shown["exit_code"], shown["timed_out"]) == ("begun\n", None, True)
    assert shown["note"] == f"[the shell was killed; {LOST}; the next call starts a new one]"
    assert has_no_writer(alive)
    assert task.out("kill -0 $(cat before) && echo .$X.") == "..\n"


def test_background_processes_run_on_and_can_be_listed_and_stopped(task: Task) -> None:
    task.out("X=5")
    started = task.sh("echo $X; sleep 1000; echo late", background=True)
    name = started["output_file"].rpartition("/")[2]
    wait_until(lambda: (task.workspace.root / ".background" / name).read_text() == "5\n")
    assert str(started["process_id"]) in task.out("jobs -l")
    read = task.call("read_file", path=started["output_file"])
    assert read.content == "5\n"
    assert task.sh(started["stop"])["exit_code"] == 0
    assert "error" not in task.sh("wait", timeout_s=10)
    assert "Running" not in task.out("jobs -l")
    assert task.out("echo $-").count("m") == 0, "job control is as it was"


def test_a_result_says_how_much_ran_on_after_its_call(task: Task) -> None:
    """Then the workspace changes without calls, so that repeating them does not restore it."""

    def running(name: str, **arguments: Any) -> int:
        return int(task.call(name, **arguments).details["running"])

    thread = "import threading; go = threading.Event(); threading.Thread(target=go.wait).start()"
    assert running("terminal", command="cat <(echo a) | cat; (sleep 0; echo b)") == 0
    assert running("python", code="1") == 0
    far = "setsid sh -c 'echo $$ > far; exec sleep 1000'"
    assert running("terminal", command=f"sleep 1000 & ({far} &)") == 2
    assert running("python", code=thread) == 3
    wait_until(lambda: (task.workspace.root / "far").exists())
    task.call("terminal", command="kill %1 $(cat far); wait")
    gone = "while kill -0 $(cat far) 2> /dev/null; do sleep 0.1; done"
    assert running("terminal", command=gone, timeout_s=30) == 0
    assert running("python", code="go.set(); threading.enumerate()[-1].join()") == 0


def test_output_of_the_background_neither_blocks_nor_kills_it(task: Task) -> None:
    task.out("(head -c 1000000 /dev/zero | tr '\\0' x; echo; touch written) &")
    wait_until((task.workspace.root / "written").exists)
    shown = task.sh("echo now")
    assert shown["stdout"].endswith("x\nnow\n"), "as on a terminal"
    assert "bytes cut" in shown["stdout"]


def test_a_call_does_not_wait_for_the_end_of_a_leaked_pipe(task: Task) -> None:
    assert task.sh("sleep 1000 & echo done", timeout_s=10)["stdout"] == "done\n"
    assert task.py("import os\nos.system('sleep 1000 &')\nprint('done')")["stdout"] == "done\n"


def test_an_endless_writer_in_the_background_does_not_hold_up_calls(task: Task) -> None:
    """What a call takes of its output is bounded, also where more is always there."""
    task.out("for n in 1 2 3 4 5 6; do cat /dev/zero & done")
    assert task.sh("echo now", timeout_s=10)["exit_code"] == 0
    assert task.sh("kill $(jobs -p)", timeout_s=10)["exit_code"] == 0


def test_commands_have_no_input_and_no_terminal(task: Task) -> None:
    assert task.out("cat; read x || echo none; (: < /dev/tty) 2>/dev/null || echo no tty") == (
        "none\nno tty\n"
    )
    assert task.py("input()")["stderr"].endswith("EOFError: EOF when reading a line\n")


def test_output_of_any_bytes_becomes_text(task: Task) -> None:
    shown = task.sh(r"printf 'a\0b\377\033[31mred\n'; printf '\303' >&2")
    assert shown["stdout"] == "a\ufffdb\ufffd\x1b[31mred\n"
    assert shown["stderr"] == "\ufffd"


def test_processes_of_a_command_cannot_reach_the_channel_of_calls(task: Task) -> None:
    """Only the shell itself holds its control, and what it could forge is its own result."""
    look = "import os\nprint(sorted(int(fd) for fd in os.listdir('/proc/self/fd'))[:-1])"
    assert task.out(f'python3 -c "{look}"') == "[0, 1, 2]\n"
    seen = task.py("import os\nos.system('ls /proc/self/fd')")["stdout"]
    assert seen.split() == ["0", "1", "2", "3"]


@needs_bwrap
def test_the_server_of_a_sandbox_cannot_be_looked_into(tmp_path: Path) -> None:
    task = small("bwrap", tmp_path / "ws")
    try:
        script = (
            "readlink /proc/$PPID/fd/0 && echo open; (: < /proc/$PPID/mem) && echo open; "
            "cat /proc/$PPID/environ && echo open; cat /proc/1/cmdline"
        )
        shown = task.sh(script)["stdout"]
        assert "open\n" not in shown
        assert str(tmp_path) not in shown
    finally:
        task.close()


@needs_bwrap
def test_no_command_can_end_or_stop_the_server_of_bwrap(tmp_path: Path) -> None:
    task = small("bwrap", tmp_path / "ws")
    try:
        task.py("x = 1")
        for name in ("KILL", "STOP", "INT", "TERM", "HUP", "USR1", "PIPE", "SEGV"):
            assert task.sh(f"kill -{name} 1")["exit_code"] == 0, name
        assert task.py("x")["value"] == "1"
    finally:
        task.close()


def test_a_command_that_ends_the_server_costs_its_task_the_sandbox(tmp_path: Path) -> None:
    task = small("local", tmp_path / "ws")
    try:
        task.py("x = 1")
        ended = task.call("terminal", command="touch file; kill -9 $PPID")
        assert ended.is_error
        assert "the sandbox ended, with all that ran in it; the next call" in ended.content
        assert task.out("ls") == "file\n"
        after = task.py("'x' in globals()")
        assert after["value"] == "False"
        assert after["note"].startswith("[new interpreter: the sandbox ended, with all that ran")
        assert "note" not in task.py("1")
    finally:
        task.close()


LIES = {
    "no JSON": ("0, 0, 0, 2, *b'{{'", "said what it may not"),
    "too long": ("255, 0, 0, 0, *b'x'", "said more than it may"),
    "for another call": ("0, 0, 0, 8, *b'{\"id\":9}'", "answered what it was not asked"),
    "unknown field": ('0, 0, 0, 14, *b\'{"id":1,"a":1}\'', "said what it may not"),
    "no answer": ("", "ended"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_a_server_says_is_checked(lie: str, tmp_path: Path) -> None:
    """A process that reached it could say anything; here a program does so in its place."""
    said, complaint = LIES[lie]
    answer = "b'\\0\\0\\0\\x08{\"id\":0}'"
    liar = f"import os; os.read(0, 9); os.write(1, {answer}); os.write(1, bytes([{said}]))"
    if said:  # it stays to be asked, for who has gone cannot be told anything
        liar += "; [*iter(lambda: os.read(0, 999), b'')]"

    async def ask() -> None:
        launch = Launch([sys.executable, "-c", liar], {}, str(tmp_path))
        channel = Channel(None, output_bytes=1000)
        channel.launch(launch)
        try:
            await channel.begin({}, "")
            await channel.ask({"id": 1}, 10)
        finally:
            await channel.close()

    with pytest.raises(Gone, match=complaint):
        asyncio.run(ask())


def test_requests_that_wait_for_room_in_the_socket_are_all_sent(tmp_path: Path) -> None:
    """As when hundreds of sandboxes start at the same moment."""
    drain = "[*iter(lambda: os.read(0, 1 << 16), b'')]"

    async def ask() -> None:
        begin, go = os.pipe()
        code = f"import os; os.read({begin}, 1); {drain}"
        channel = Channel(None, output_bytes=1000)
        channel.launch(Launch([sys.executable, "-c", code], {}, str(tmp_path), (begin,)))
        os.close(begin)
        try:
            sent = [asyncio.create_task(channel.send({"n": n}, [])) for n in range(1000)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert len([task for task in sent if not task.done()]) > 1
            os.write(go, b"\n")
            await asyncio.wait_for(asyncio.gather(*sent), 20)
        finally:
            os.close(go)
            await channel.close()

    asyncio.run(ask())


@pytest.mark.long
def test_a_server_that_is_stopped_does_not_stop_the_worker(tmp_path: Path) -> None:
    task = small("local", tmp_path / "ws")
    try:
        result = task.call("terminal", command="kill -STOP $PPID; sleep 100", timeout_s=0.2)
        assert "did not react and was ended" in result.content
        assert task.out("echo again") == "again\n"
    finally:
        task.close()


def test_after_a_call_is_cut_off_the_next_says_that_the_state_is_lost(
    kind: str, tmp_path: Path
) -> None:
    task = Task(kind, tmp_path / "ws", Limits())
    begun = task.workspace.root / "begun"

    def call(timeout_s: float) -> ToolResult:
        task.out("X=1")
        task.limit_calls(timeout_s)
        result = task.call("terminal", command="touch begun; sleep 1000")
        task.limit_calls(60)
        return result

    try:
        cut = cut_off(call, lambda _: begun.exists())
        assert "no result within " in cut.content
        after = task.sh("echo .$X.; ls")
        assert after["stdout"] == "..\nbegun\n"
        assert after["note"].startswith(
            "[new shell: the sandbox was ended with a call that was cut off, with all that ran"
        )
        assert "note" not in task.sh("true")
    finally:
        task.close()


def test_after_a_resume_the_model_is_informed_that_its_shell_is_new(
    kind: str, tmp_path: Path
) -> None:
    """Only where it had one, and once."""
    answered = [{"role": "tool", "name": "terminal", "content": "{}"}]
    task = Task(kind, tmp_path / "ws", Limits(), resumed=True)
    try:
        parsed = json.loads(task.call("terminal", command="true", conversation=answered).content)
        assert parsed["note"] == f"[new shell: the one before ended between the calls; {LOST}]"
        again = json.loads(task.call("terminal", command="true", conversation=answered).content)
        assert "note" not in again
        other = json.loads(task.call("python", code="1", conversation=answered).content)
        assert "note" not in other
    finally:
        task.close()


def test_an_interpreter_keeps_its_state_and_shows_values_like_a_notebook(task: Task) -> None:
    assert task.py("import math\nx = 41\ndef f(n):\n    return n + 1") == {
        "exit_code": 0,
        "stdout": "",
        "stderr": "",
    }
    assert task.py("print('out')\nf(x)") == {
        "exit_code": 0,
        "value": "42",
        "stdout": "out\n",
        "stderr": "",
    }
    assert "value" not in task.py("None")
    assert task.py("_")["value"] == "42"


def test_an_exception_keeps_the_state_and_so_does_sys_exit(task: Task) -> None:
    task.py("x = 1")
    failed = task.py("x = 2\nraise ValueError('no')")
    assert (failed["exit_code"], failed["stderr"].splitlines()[-1]) == (1, "ValueError: no")
    assert task.py("import sys\nsys.exit('bye')")["stderr"] == "bye\n"
    assert task.py("sys.exit(7)")["exit_code"] == 7
    assert task.py("x")["value"] == "2"


def interrupt(task: Task, code: str, mark: str) -> dict[str, Any]:
    """The result of code that is interrupted after it has made a file."""
    first = f"print('begun', flush=True)\nopen({mark!r}, 'w').close()\n"
    return cut_off(
        lambda timeout_s: task.py(first + code, timeout_s=timeout_s),
        lambda _: (task.workspace.root / mark).exists(),
    )


def test_code_that_takes_too_long_is_interrupted_and_keeps_its_state(task: Task) -> None:
    task.py("x = 1\nimport os, time")
    codes = ("time.sleep(1000)", "os.system('sleep 1000')", "while True: pass")
    for number, code in enumerate(codes):
        late = interrupt(task, code, f"begun{number}")
        assert (late["timed_out"], late["stdout"]) == (True, "begun\n")
        assert "note" not in late
    assert task.py("x")["value"] == "1"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local"])
def test_code_that_cannot_be_interrupted_is_killed_and_says_so(task: Task) -> None:
    task.py("x = 1")
    ignore = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    code = ignore + "open('begun', 'w').close()\nwhile True: pass"
    killed = cut_off(
        lambda timeout_s: task.py(code, timeout_s=timeout_s),
        lambda _: (task.workspace.root / "begun").exists(),
    )
    assert killed["note"] == f"[the interpreter was killed; {LOST}; the next call starts a new one]"
    assert task.py("'x' in globals()")["value"] == "False"


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [("import os\nos._exit(3)", 3), ("import ctypes\nctypes.string_at(0)", 139)],
)
def test_an_interpreter_that_crashes_is_replaced(task: Task, code: str, exit_code: int) -> None:
    crashed = task.py(f"print('last words')\n{code}")
    assert (crashed["exit_code"], crashed["stdout"]) == (exit_code, "last words\n")
    assert crashed["note"].startswith("[the interpreter ended; ")
    assert task.py("1 + 1")["value"] == "2"


def test_an_interpreter_that_ended_between_calls_says_so(task: Task) -> None:
    code = "import os, threading\ndef end():\n    open('go').read()\n    os._exit(3)\n"
    task.py(f"{code}os.mkfifo('go')\nthreading.Thread(target=end).start()")
    task.out("echo > go")
    wait_until(lambda: "python3" not in task.out("ps -o comm --ppid $PPID").split())
    late = task.py("1")
    assert late["exit_code"] == 3
    assert late["note"].startswith("[the interpreter ended; ")
    assert task.py("1 + 1")["value"] == "2"


def test_cells_that_fork_thread_or_return_floods(task: Task) -> None:
    code = (
        "import os\nif os.fork() == 0:\n    print('child')\nelse:\n    os.wait(); print('parent')"
    )
    forked = task.py(code)
    assert (forked["exit_code"], forked["stdout"]) == (0, "child\nparent\n")
    long = task.py("'x' * 10_000_000")
    assert "characters cut" in long["value"]
    assert len(long["value"]) < 70_000
    odd = task.py("class A:\n    def __repr__(self): return '\\ud800\\0'\nA()")
    assert odd["exit_code"] == 0
    raising = task.py("class B:\n    def __repr__(self): raise SystemExit(9)\nB()")
    assert raising["exit_code"] == 9
    assert task.py("1")["value"] == "1"


def test_open_figures_are_saved_to_files(task: Task) -> None:
    """With a stand-in for matplotlib that has what is used of it."""
    source = (
        "opened = []\n"
        "class Figure:\n    def savefig(self, name): open(name, 'w').write('png')\n"
        "def figure(n=None):\n"
        "    if n is None: opened.append(len(opened) + 1)\n    return Figure()\n"
        "def get_fignums(): return list(opened)\n"
        "def close(which): opened.clear()\n"
    )
    task.call("write_file", path="matplotlib/__init__.py", content="")
    task.call("write_file", path="matplotlib/pyplot.py", content=source)
    first = task.py("import matplotlib.pyplot as plt\nplt.figure(); plt.figure();")
    assert first["plots"] == ["plot-1.png", "plot-2.png"]
    assert task.py("fig = plt.figure()")["plots"] == ["plot-3.png"]
    assert "plots" not in task.py("1")
    assert task.out("ls *.png | wc -l").strip() == "3"


def test_a_workspace_that_is_too_large_stops_what_fills_it(kind: str, tmp_path: Path) -> None:
    task = small(kind, tmp_path / "ws", workspace_mb=20)
    try:
        fill = "i=0; while :; do i=$((i+1)); head -c 2000000 /dev/zero > f$i; sleep 0.05; done"
        stopped = task.call("terminal", command=fill)
        shown = json.loads(stopped.content)
        assert stopped.is_error
        assert shown["error"].startswith("stopped: the workspace is over its limit (")
        assert shown["note"].startswith("[the shell was killed; ")
        small_step = task.sh("touch one-more")
        assert small_step["error"].startswith("the workspace is over its limit (")
        assert "error" not in task.sh("rm f*"), "removing is not stopped"
    finally:
        task.close()


def test_memory_of_a_cell_is_limited_and_its_state_survives(kind: str, tmp_path: Path) -> None:
    task = small(kind, tmp_path / "ws", memory_mb=256)
    try:
        task.py("x = 1")
        failed = task.py("y = bytearray(600 << 20)")
        assert failed["stderr"].endswith("MemoryError\n")
        assert task.py("x")["value"] == "1"
    finally:
        task.close()


def test_processes_of_a_task_are_limited_where_possible(kind: str, tmp_path: Path) -> None:
    if kind == "local" or os.getuid() == 0:
        if (group := make_group(30, 512)) is None:
            pytest.skip("no control groups can be made here, and nothing else bounds this user")
        asyncio.run(group.close())
    task = small(kind, tmp_path / "ws", processes=30)
    try:
        bomb = "import os, time\nfor n in range(100):\n    if os.fork() == 0: time.sleep(1000)"
        assert "BlockingIOError: [Errno 11]" in task.py(bomb)["stderr"]
        refused = task.call("terminal", command="true")
        assert "the sandbox ran too many processes and was ended, with all" in refused.content
        # Without a process for `sleep`, which may be one too many.
        assert task.sh("f() { f | f & }; f; while :; do :; done", timeout_s=0.5)["timed_out"]
        assert task.py("1 + 1")["value"] == "2"
    finally:
        task.close()


def test_no_secret_of_the_worker_is_in_a_session(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "canary-7f3a")
    task = small(kind, tmp_path / "ws")
    try:
        assert "canary" not in task.out("env; cat /proc/$$/environ")
        assert "canary" not in task.py("import os\nprint(os.environ)")["stdout"]
    finally:
        task.close()


def test_sessions_die_with_a_worker_that_is_killed(
    kind: str, workspace: Workspace, alive: int
) -> None:
    worker = f"""
import asyncio, pathlib
from toolsets.sandbox.base import Limits
from toolsets.sandbox.factory import make_sandbox
from toolsets.workspace.workspace import Workspace
async def main():
    sandbox = make_sandbox({kind!r}, Workspace(pathlib.Path({str(workspace.root)!r})), Limits())
    hold = "(exec 9>alive; setsid sleep 1000) &"
    await sandbox.run("shell", hold)
    await sandbox.run("python", "import os\\nos.system('(exec 9>alive; sleep 1000) &')")
    await sandbox.run("shell", "exec 9>alive; touch started; sleep 1000")
asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", worker], cwd=ROOT)
    wait_until((workspace.root / "started").exists)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert has_no_writer(alive)


def test_groups_of_dead_workers_are_removed_by_the_next(tmp_path: Path) -> None:
    code = "from toolsets.sandbox.cgroup import make_group; print(*make_group(9, 64).paths)"
    made = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip("no control groups can be made here")
        made.append([Path(path) for path in done.stdout.split()])
    assert not any(path.exists() for path in made[0])
    for path in made[1]:
        with contextlib.suppress(FileNotFoundError):  # another test's worker was faster
            path.rmdir()


def of_our_own(root: Path) -> set[str]:
    """What could leak: children, descriptors, mounts beneath `root`, groups of this process."""
    paths = {f"descriptor {path.name}" for path in Path("/proc/self/fd").iterdir()}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == os.getpid():
            paths.add(f"child {path.parent.name}")
    paths |= {m for m in Path("/proc/self/mounts").read_text().splitlines() if str(root) in m}
    # Path.glob would fail where another test removes a group meanwhile.
    groups = (path for path, _, _ in os.walk("/sys/fs/cgroup"))
    paths |= {path for path in groups if "/trajectories-" in path and f"-{os.getpid()}-" in path}
    return paths


@pytest.mark.parametrize(
    "tasks", [20, pytest.param(200, marks=pytest.mark.long)], ids=["20", "200"]
)
@pytest.mark.slow
def test_many_tasks_at_once_leave_nothing_behind(kind: str, tmp_path: Path, tasks: int) -> None:
    async def one(number: int) -> list[str]:
        workspace = Workspace(tmp_path / f"ws{number}")
        context = ToolContext(workspace, make_sandbox(kind, workspace, Limits()))
        toolbox = Toolbox(TOOLS, context)
        seen = []
        for n in range(10):
            command = f"X=$((X + {n})); echo {number}:$X; (setsid sleep 1000 &)"
            result = await toolbox.call("terminal", json.dumps({"command": command}))
            seen.append(json.loads(result.content)["stdout"])
        await toolbox.close(remove_workspace=True)
        return seen

    async def all_of_them() -> list[list[str]]:
        return await asyncio.gather(*map(one, range(tasks)))

    refusals_here()  # the counters of this process stay open
    before = of_our_own(tmp_path)
    marker = len(processes_with(str(tmp_path)))
    for number, seen in enumerate(asyncio.run(all_of_them())):
        assert seen == [f"{number}:{n * (n + 1) // 2}\n" for n in range(10)]
    # What there was before may end meanwhile: earlier tests have started it.
    wait_until(lambda: of_our_own(tmp_path) <= before)
    wait_until(lambda: len(processes_with(str(tmp_path))) == marker)
    assert not list(tmp_path.iterdir())


def processes_with(text: str) -> list[int]:
    """Processes whose current directory is beneath a path."""
    collected = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if str(link.readlink()).startswith(text):
                collected.append(int(link.parent.name))
        except OSError:
            continue
    return collected
