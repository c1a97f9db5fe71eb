"""`--live`: what it draws, and that the terminal is as it was, however the run ends."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.test_looking import HOLD, read_terminal
from tests.helpers.running import (
    PATIENCE_S,
    SCRIPTED,
    command,
    ids,
    kill_session,
    session_of,
    wait_until,
    write_rows,
)

pytest.importorskip("rich", reason="needs the extra `live`")

ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"
HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"
ESCAPE = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """What a process wrote to the terminal that it runs on."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int) -> None:
        self.process = process
        self._fd = fd
        self.written = b""

    def read_until(self, text: str) -> None:
        def found() -> bool:
            if text.encode() not in ESCAPE.sub(b"", self.written):
                self.written += read_terminal(self._fd)
            return text.encode() in ESCAPE.sub(b"", self.written)

        wait_until(found)

    def read_to_the_end(self) -> int:
        while chunk := read_terminal(self._fd):
            self.written += chunk
        return self.process.wait(timeout=PATIENCE_S)

    def assert_is_as_it_was(self) -> None:
        for on, off in ((ENTER, LEAVE), (SHOW, HIDE)):
            assert self.written.count(on) == self.written.count(off) == 1
        assert self.written.index(ENTER) < self.written.index(LEAVE)
        assert self.written.index(HIDE) < self.written.index(SHOW)


@contextmanager
def live(cwd: Path, **more: object) -> Iterator[Terminal]:
    """A run on a terminal of its own whose only conversation waits for the file `go`."""
    (cwd / "mine.py").write_text(HOLD)
    turns = [
        {"tool_calls": [{"name": "hold", "arguments": {"path": str(cwd / "go")}}]},
        {"content": "Done."},
    ]
    row = {"id": "x [bold]held\x1b[31m", "prompt": "Wait.", "script": turns}
    write_rows(cwd / "p.jsonl", row, {"prompt": 3})
    options = {**SCRIPTED, "enabled_toolsets": "mine", "tools": "mine:hold", **more}
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    process = subprocess.Popen(
        command("run", "--live", **options),
        cwd=cwd,
        env={**os.environ, "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        kill_session(process.pid)
        process.wait()
        os.close(ours)


@pytest.mark.slow
def test_the_screen_shows_the_status_and_goes(tmp_path: Path) -> None:
    with live(tmp_path) as terminal:
        terminal.read_until("runs hold, ")
        terminal.read_until("this start: done 0, failed 0, running 1, ")
        text = ESCAPE.sub(b"", terminal.written).decode()
        assert "x [bold]held⟨U+001B⟩[31m" in text
        assert "discarded          1  bad rows" in text
        (tmp_path / "go").touch()
        assert terminal.read_to_the_end() == 0
        terminal.assert_is_as_it_was()
    after = terminal.written.partition(LEAVE)[2].decode()
    assert "  done               1  completed 1\r\n" in after
    assert len(ids(tmp_path / "trajectories" / "r.jsonl")) == 1


@pytest.mark.slow
def test_an_interrupt_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    """As by Ctrl-C: the signal goes to all processes of the terminal."""
    with live(tmp_path, grace_s=0) as terminal:
        terminal.read_until("runs hold, ")
        os.killpg(terminal.process.pid, signal.SIGINT)
        assert terminal.read_to_the_end() == 130
        terminal.assert_is_as_it_was()
    after = terminal.written.partition(LEAVE)[2].decode()
    assert "stopping: running turns get 0 s to finish" in after


@pytest.mark.slow
def test_a_killed_run_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    with live(tmp_path) as terminal:
        terminal.read_until("runs hold, ")
        terminal.process.kill()
        assert terminal.read_to_the_end() == -signal.SIGKILL
        terminal.assert_is_as_it_was()


def started_at(pid: int) -> tuple[int, int]:
    """The time at which a process began; the last of a run is its view."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]), pid


@pytest.mark.slow
def test_a_view_that_dies_does_not_stop_the_run(tmp_path: Path) -> None:
    with live(tmp_path) as terminal:
        terminal.read_until("runs hold, ")
        view = max(session_of(terminal.process.pid), key=started_at)
        os.kill(view, signal.SIGKILL)
        (tmp_path / "go").touch()
        assert terminal.read_to_the_end() == 0
        terminal.assert_is_as_it_was()


def test_without_a_terminal_there_are_plain_lines(tmp_path: Path) -> None:
    row = {"id": "a", "prompt": "x", "script": [{"content": "Yes."}]}
    write_rows(tmp_path / "p.jsonl", row)
    done = subprocess.run(
        command("run", "--live", **SCRIPTED), cwd=tmp_path, capture_output=True, timeout=60
    )
    assert done.returncode == 0
    assert done.stderr == b"--live needs a terminal; showing plain lines instead\n"
