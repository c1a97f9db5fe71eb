"""Runs a command as a container of a usual Kubernetes cluster would: it can make no namespaces.

    python -m tests.helpers.without_namespaces COMMAND...

The process keeps its user but has no capabilities, and system calls that make or enter namespaces
or mount anything fail, as with the seccomp profile `RuntimeDefault` of containerd and Docker.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

_NUMBERS = {
    "x86_64": {"clone": 56, "other": (155, 165, 166, 272, 308)},
    "aarch64": {"clone": 220, "other": (39, 40, 41, 97, 268)},
}
"""`clone`; and pivot_root, mount, umount2, unshare and setns."""
_CLONE3 = 435
_NEW_MOUNT_CALLS = range(428, 434)
_NAMESPACE_FLAGS = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
_PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 22, 24, 38, 47
_MODE_FILTER, _CLEAR_ALL, _LAST_CAPABILITY = 2, 4, 40
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def _filter() -> bytes:
    """Return the program that the kernel runs for each system call."""
    numbers = _NUMBERS[platform.machine()]
    program = [(_LOAD, 0, 0, 0)]  # the number of the call

    def refuse(test: int, value: int, number: int) -> None:
        program.append((test, 0, 1, value))
        program.append((_RETURN, 0, 0, _ERRNO | number))

    # A C library that gets this falls back to `clone`, whose flags a filter can see.
    refuse(_EQUAL, _CLONE3, errno.ENOSYS)
    for number in (*numbers["other"], *_NEW_MOUNT_CALLS):  # type: ignore[misc]
        refuse(_EQUAL, number, errno.EPERM)
    program.append((_EQUAL, 0, 3, numbers["clone"]))  # type: ignore[arg-type]
    program.append((_LOAD, 0, 0, 16))  # the low half of the first argument
    refuse(_ANY_BIT, _NAMESPACE_FLAGS, errno.EPERM)
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *step) for step in program)


def forbid_namespaces() -> None:
    """Take the right to make namespaces from this process and all that it starts."""
    libc = ctypes.CDLL(None, use_errno=True)

    def prctl(*arguments: int | ctypes.c_void_p) -> None:
        padded = [*arguments, *[0] * (5 - len(arguments))]
        if libc.prctl(*(ctypes.c_ulong(one) if isinstance(one, int) else one for one in padded)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    prctl(_PR_CAP_AMBIENT, _CLEAR_ALL)
    if os.geteuid() == 0:
        for capability in range(_LAST_CAPABILITY + 1):
            prctl(_PR_CAPBSET_DROP, capability)
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    raw = _filter()
    code = ctypes.create_string_buffer(raw, len(raw))
    fprog = struct.pack("HxxxxxxP", len(raw) // 8, ctypes.addressof(code))
    prctl(
        _PR_SET_SECCOMP,
        _MODE_FILTER,
        ctypes.cast(ctypes.create_string_buffer(fprog), ctypes.c_void_p),
    )


if __name__ == "__main__":
    forbid_namespaces()
    os.execvp(sys.argv[1], sys.argv[1:])
