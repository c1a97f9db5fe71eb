"""System calls that no command of a sandbox may make, as a program for the kernel's filter.

Each is a way into the kernel that tasks do not need: past other limits (io_uring), to what all
users of the machine share (keys), to the host of a virtual machine (AF_VSOCK), or with many defects
in the past. To a command the kernel seems to lack them, so programs use others.

The program is classic BPF over `struct seccomp_data` (linux/seccomp.h): number, architecture,
address, six arguments. Numbers are those of the kernel's tables (arch/*/entry/syscalls and
asm-generic/unistd.h).
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Mapping

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_X32 = 0x40000000
"""The first number of x32, another table of system calls for the same architecture."""
_FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6 and AF_NETLINK, which lists addresses and routes."""
_SOCKETCALLS = (1, 8)
"""Calls of `socketcall`: socket and socketpair, whose family is not in an argument."""
_IO_URING = (425, 426, 427)

# By the machine's name: the architectures whose programs it runs. Each has the numbers of add_key,
# request_key, keyctl, perf_event_open, bpf, userfaultfd, open_by_handle_at, init_module,
# delete_module, finit_module, kexec_load and kexec_file_load; then those that make sockets.
_TABLES: Mapping[str, Mapping[int, tuple[tuple[int, ...], tuple[int, ...], int | None]]] = {
    "x86_64": {
        0xC000003E: (
            (248, 249, 250, 298, 321, 323, 304, 175, 176, 313, 246, 320),
            (41, 53),
            None,
        ),
        0x40000003: ((286, 287, 288, 336, 357, 374, 342, 128, 129, 350, 283), (359, 360), 102),
    },
    "aarch64": {
        0xC00000B7: (
            (217, 218, 219, 241, 280, 282, 265, 105, 106, 273, 104, 294),
            (198, 199),
            None,
        ),
        0x40000028: ((309, 310, 311, 364, 386, 388, 371, 128, 129, 379, 347, 401), (281, 288), 102),
    },
}


def filter_program(machine: str) -> bytes | None:
    """Return the filter for a machine, as `bwrap --seccomp` reads it; None if unknown."""
    if (tables := _TABLES.get(machine)) is None:
        return None
    steps: list[tuple[int, int, int, int]] = [(_LOAD, 0, 0, _ARCHITECTURE)]
    for architecture, (numbers, sockets, socketcall) in tables.items():
        block = _block((*numbers, *_IO_URING), sockets, socketcall)
        steps.append((_EQUAL, 0, len(block), architecture))
        steps += block
    steps.append(_refuse(errno.ENOSYS))
    return b"".join(struct.pack("=HBBI", code, yes, no, value) for code, yes, no, value in steps)


def _block(
    numbers: tuple[int, ...], sockets: tuple[int, ...], socketcall: int | None
) -> list[tuple[int, int, int, int]]:
    """Return the steps for one architecture. A jump states how many steps it skips."""
    families = [(_LOAD, 0, 0, _FIRST_ARGUMENT)]
    families += [(_EQUAL, len(_FAMILIES) - n, 0, family) for n, family in enumerate(_FAMILIES)]
    families += [_refuse(errno.EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]
    older = [(_LOAD, 0, 0, _FIRST_ARGUMENT)]
    older += [(_EQUAL, len(_SOCKETCALLS) - n, 0, kind) for n, kind in enumerate(_SOCKETCALLS)]
    older += [(_RETURN, 0, 0, _ALLOW), _refuse(errno.EAFNOSUPPORT)]
    rules = [(_AT_LEAST, _X32), *((_EQUAL, number) for number in numbers)]
    # The steps after the tests: allow, refuse, check the family, check `socketcall`.
    steps = [(_LOAD, 0, 0, _NUMBER)]
    tests = len(rules) + len(sockets) + (socketcall is not None)
    for n, (code, value) in enumerate(rules):
        steps.append((code, tests - n, 0, value))
    for n, number in enumerate(sockets, len(rules)):
        steps.append((_EQUAL, tests - n + 1, 0, number))
    if socketcall is not None:
        steps.append((_EQUAL, 2 + len(families), 0, socketcall))
    steps += [(_RETURN, 0, 0, _ALLOW), _refuse(errno.ENOSYS), *families]
    return steps + (older if socketcall is not None else [])


def _refuse(number: int) -> tuple[int, int, int, int]:
    return (_RETURN, 0, 0, _ERROR | number)
