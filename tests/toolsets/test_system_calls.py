"""System calls that commands of a sandbox cannot make, and those that they need."""

from __future__ import annotations

import asyncio
import json
import platform
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.toolsets.test_sandbox import needs_bwrap
from toolsets.sandbox.base import Extras, Limits
from toolsets.sandbox.factory import make_sandbox
from toolsets.sandbox.inside.system_calls import filter_program
from toolsets.workspace.workspace import Workspace

NUMBERS = {
    "x86_64": {
        "io_uring_setup": 425,
        "io_uring_enter": 426,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "bpf": 321,
        "perf_event_open": 298,
        "userfaultfd": 323,
        "kexec_load": 246,
    },
    "aarch64": {
        "io_uring_setup": 425,
        "io_uring_enter": 426,
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "bpf": 280,
        "perf_event_open": 241,
        "userfaultfd": 282,
        "kexec_load": 104,
    },
}

TRY = """
import ctypes, errno, json, socket
libc = ctypes.CDLL(None, use_errno=True)
found = {}
for name, number in %s.items():
    ctypes.set_errno(0)
    libc.syscall(number, 0, 0, 0, 0, 0)
    found[name] = errno.errorcode.get(ctypes.get_errno())
for family in ("VSOCK", "ALG", "PACKET", "BLUETOOTH", "CAN", "TIPC", "RDS", "KEY"):
    try:
        socket.socket(getattr(socket, "AF_" + family, 15), socket.SOCK_DGRAM, 0)
        found[family] = "open"
    except OSError as error:
        found[family] = errno.errorcode[error.errno]
for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK):
    kind = socket.SOCK_RAW if family == socket.AF_NETLINK else socket.SOCK_STREAM
    socket.socket(family, kind).close()
socket.socketpair()
print(json.dumps(found))
"""


def run_verdict(program: bytes, number: int, architecture: int, first: int = 0) -> int:
    """What a filter says of a call, as the kernel would run it; see `bpf(4)`."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, first, 0, 0, 0, 0, 0)
    steps = list(struct.iter_unpack("=HBBI", program))
    at = value = 0
    while True:
        code, yes, no, k = steps[at]
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from("=I", data, k)
        elif code == 0x06:
            return int(k)
        else:
            assert code in (0x15, 0x35)
            at += yes if (value == k if code == 0x15 else value >= k) else no


ALLOWED, NO_SUCH, NO_FAMILY = 0x7FFF0000, 0x00050000 | 38, 0x00050000 | 97


@pytest.mark.parametrize(
    ("machine", "architecture", "refused", "sockets", "allowed"),
    [
        ("x86_64", 0xC000003E, (425, 426, 250, 298, 321, 0x40000001), (41, 53), (0, 165, 424)),
        ("x86_64", 0x40000003, (425, 286, 287, 288, 336, 357, 374, 283), (359, 360), (3, 21, 358)),
        ("aarch64", 0xC00000B7, (425, 217, 219, 241, 280, 282, 294), (198, 199), (63, 40, 200)),
        ("aarch64", 0x40000028, (425, 309, 311, 364, 386, 388), (281, 288), (3, 282, 389)),
    ],
)
def test_programs_of_all_architectures_are_judged_alike(
    machine: str,
    architecture: int,
    refused: tuple[int, ...],
    sockets: tuple[int, ...],
    allowed: tuple[int, ...],
) -> None:
    program = filter_program(machine)
    assert program is not None
    assert {run_verdict(program, number, architecture) for number in refused} == {NO_SUCH}
    assert {run_verdict(program, number, architecture) for number in allowed} == {ALLOWED}
    for number in sockets:
        verdicts = {f: run_verdict(program, number, architecture, f) for f in range(50)}
        assert [f for f, verdict in verdicts.items() if verdict == ALLOWED] == [1, 2, 10, 16]
        assert {*verdicts.values()} == {ALLOWED, NO_FAMILY}
    assert run_verdict(program, 0, 0xC0000015) == NO_SUCH


def test_sockets_of_old_programs_are_made_by_a_call_that_hides_the_family() -> None:
    program = filter_program("x86_64")
    assert program is not None
    verdicts = {kind: run_verdict(program, 102, 0x40000003, kind) for kind in range(1, 21)}
    assert [kind for kind, verdict in verdicts.items() if verdict != ALLOWED] == [1, 8]
    assert filter_program("riscv64") is None


@needs_bwrap
@pytest.mark.skipif(platform.machine() not in NUMBERS, reason="no filter for this machine")
@pytest.mark.parametrize("extras", [None, Extras()], ids=["forked", "launched"])
def test_what_tasks_do_not_need_is_refused(tmp_path: Path, extras: Extras | None) -> None:
    numbers = NUMBERS[platform.machine()]

    async def use() -> Any:
        sandbox = make_sandbox("bwrap", Workspace(tmp_path / "w"), Limits(), extras=extras)
        try:
            return await sandbox.run("python", TRY % numbers)
        finally:
            await sandbox.stop()

    result = asyncio.run(use())
    assert result.exit_code == 0, result.stderr
    parsed = json.loads(result.stdout)
    assert {name: parsed.pop(name) for name in numbers} == dict.fromkeys(numbers, "ENOSYS")
    assert set(parsed.values()) == {"EAFNOSUPPORT"}
