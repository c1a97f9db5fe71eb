"""A command in a sandbox without network reaches a socket of this process, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.toolsets.test_sandbox import needs_bwrap
from toolsets.sandbox.base import ExecResult, Extras, Limits
from toolsets.sandbox.factory import make_sandbox
from toolsets.sandbox.programs import make_forward_command
from toolsets.workspace.workspace import Workspace

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_CONNECT = "import socket; s = socket.create_connection(('127.0.0.1', 8800)); "


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send back, in capitals, whatever comes until the other end stops sending."""
    while chunk := await reader.read(1 << 16):
        writer.write(chunk.upper())
        await writer.drain()
    writer.write(b"<end>")
    writer.close()


def start(
    tmp_path: Path, argv: list[str], answer: Answer = echo, name: str = "bwrap", **terms: Any
) -> ExecResult:
    async def once() -> ExecResult:
        directory = tmp_path / "gateway"
        directory.mkdir(parents=True)
        server = await asyncio.start_unix_server(answer, directory / "socket")
        sandbox = make_sandbox(
            name,
            Workspace(tmp_path / "ws"),
            Limits(timeout_s=30),
            extras=Extras({"/run/gateway": str(directory)}, "/home/user"),
        )
        given = {
            "argv": argv,
            "env": {"PATH": "/usr/bin:/bin", "HOME": "/home/user"},
            "inherits": False,
            "cwd": sandbox.home,
            "stdin": "",
            "files": {},
            "socket": "/run/gateway/socket",
            "port": 8800,
            "acp": None,
            **terms,
        }
        command, text = make_forward_command(given, in_image=False)
        try:
            return await sandbox.exec(command, stdin=text)
        finally:
            await sandbox.stop()
            server.close()

    return asyncio.run(once())


@needs_bwrap
def test_bytes_go_both_ways_and_ends_are_passed_on(tmp_path: Path) -> None:
    """Megabytes arrive whole; the end of what one side sends leaves the other direction open."""
    code = (
        _CONNECT
        + "import threading; n = 3 << 20\n"
        + "threading.Thread(target=lambda: (s.sendall(b'a' * n), s.shutdown(1))).start()\n"
        + "got = b''.join(iter(lambda: s.recv(65536), b''))\n"
        + "print(got == b'A' * n + b'<end>')"
    )
    result = start(tmp_path, ["/usr/bin/env", "python3", "-c", code])
    assert result.stdout == "True\n", result.stderr


@needs_bwrap
def test_the_exit_code_and_the_signal_are_those_of_the_command(tmp_path: Path) -> None:
    assert start(tmp_path / "a", ["/bin/sh", "-c", "exit 7"]).exit_code == 7
    assert start(tmp_path / "b", ["/bin/sh", "-c", "kill -9 $$"]).exit_code == 137


@needs_bwrap
def test_the_command_gets_its_input_files_and_variables_only(tmp_path: Path) -> None:
    result = start(
        tmp_path,
        ["/bin/sh", "-c", "cat; cat ~/deep/er/file; env | sort; pwd; touch ~/more; ls /home/user"],
        stdin="of the prompt\n",
        files={"/home/user/deep/er/file": "text\n"},
    )
    assert result.stdout.splitlines() == [
        "of the prompt",
        "text",
        "HOME=/home/user",
        "PATH=/usr/bin:/bin",
        "PWD=/workspace",
        "/workspace",
        "deep",
        "more",
    ]


@needs_bwrap
def test_without_input_the_command_reads_nothing(tmp_path: Path) -> None:
    """And from a device, not from a pipe, which some programs take for a part of their task."""
    result = start(tmp_path, ["/bin/sh", "-c", "readlink /proc/self/fd/0; cat"])
    assert result.stdout == "/dev/null\n"


@needs_bwrap
def test_there_is_no_other_way_out(tmp_path: Path) -> None:
    """Other ports are closed, and the socket's directory cannot be written."""
    code = "import socket; socket.create_connection(('127.0.0.1', 8801))"
    result = start(tmp_path / "a", ["/usr/bin/env", "python3", "-c", code])
    assert "ConnectionRefusedError" in result.stderr
    result = start(tmp_path / "b", ["/bin/sh", "-c", "touch /run/gateway/x || rm /run/gateway/*"])
    assert result.exit_code != 0
    assert result.stderr.count("Read-only file system") == 2


def test_a_command_that_cannot_start_is_named(tmp_path: Path) -> None:
    result = start(tmp_path, ["/no/such/program"], name="local", socket=None)
    assert result.exit_code == 126
    assert "cannot start /no/such/program" in result.stderr
