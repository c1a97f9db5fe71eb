"""Namespaces for a sandbox that the fork server has forked, and the end of its privileges.

The fork server runs inside bubblewrap, as root of a user namespace. It sees no more of the machine
than a sandbox does, apart from the directory of all workspaces. A sandbox gives up that directory
and all privileges before it runs any command; see `toolsets.sandbox.bwrap`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct

_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC = 1, 2, 4, 8
_REMOUNT, _BIND, _MOVE, _REC, _PRIVATE = 1 << 5, 1 << 12, 1 << 13, 1 << 14, 1 << 18
_DETACH = 2
_SET_DUMPABLE, _CAPBSET_DROP = 4, 24
_CAPABILITIES_V3 = 0x20080522
_SIOCSIFFLAGS = 0x8914
_UP_AND_RUNNING = 0x41
_PROC_READ_ONLY = ("sys", "sysrq-trigger", "irq", "bus")
"""Where a process that is root of the machine could write without any capability."""
_WORKSPACE = "/workspace"
_USER = 1000

_libc = ctypes.CDLL(None, use_errno=True)
# Looked up here, once for all sandboxes that are forked later.
_CALLS = {
    name: getattr(_libc, name)
    for name in ("unshare", "setns", "mount", "umount2", "prctl", "capset")
}


def fork_as_first(own_namespace: int) -> int:
    """As `os.fork`, the child being process 1 of a new PID namespace."""
    _call("unshare", _NEWPID)
    try:
        pid = os.fork()
    except OSError:
        _call("setns", own_namespace, _NEWPID)
        raise
    if pid:
        # For the next one: a process that was given a namespace for its children gets no other.
        _call("setns", own_namespace, _NEWPID)
    return pid


def enter(workspace: str, tmp_bytes: int, network: bool) -> None:
    """Confine this process to the workspace of that name; raises `OSError`."""
    if "/" in workspace or workspace in ("", ".", ".."):
        raise ValueError(f"not the name of a workspace: {workspace!r}")
    _call("unshare", _NEWNS | _NEWCGROUP | _NEWUTS | _NEWIPC | (0 if network else _NEWNET))
    _mount("none", "/", None, _REC | _PRIVATE)
    # A mount is made at /tmp and moved, so that what it replaces can be detached, not only hidden.
    # The old /proc goes after the new one is there: the kernel grants a new one only beside it.
    _mount("proc", "/tmp", "proc", _NOSUID | _NODEV | _NOEXEC)
    old_proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    _replace("/proc")
    for path in (f"/proc/{name}" for name in _PROC_READ_ONLY):
        if os.path.exists(path):
            _mount(path, path, None, _BIND | _REC)
            flags = _BIND | _REMOUNT | _RDONLY | _NOSUID | _NODEV | _NOEXEC
            _mount("none", path, None, flags)
    _call("umount2", b"/dev/pts", _DETACH)
    _mount("devpts", "/dev/pts", "devpts", _NOSUID | _NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    _mount(f"{_WORKSPACE}/{workspace}", "/tmp", None, _BIND | _REC)
    _replace(_WORKSPACE)
    for path in ("/tmp", "/dev/shm"):
        _mount("tmpfs", path, "tmpfs", _NOSUID | _NODEV, f"mode=0755,size={tmp_bytes}")
    if not network:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            up = struct.pack("16sh22x", b"lo", _UP_AND_RUNNING)
            fcntl.ioctl(any_socket.fileno(), _SIOCSIFFLAGS, up)
    _drop_privileges(old_proc)
    os.close(old_proc)


def _drop_privileges(writable_proc: int) -> None:
    """Become an ordinary user of a user namespace in which no other can be made."""
    _call("unshare", _NEWUSER)
    _call("prctl", _SET_DUMPABLE, 1, 0, 0, 0)  # or the maps would not be ours to write
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{_USER} 0 1")
    _write("/proc/self/gid_map", f"{_USER} 0 1")
    _write("sys/user/max_user_namespaces", "0", writable_proc)
    for capability in range(64):
        try:
            _call("prctl", _CAPBSET_DROP, capability, 0, 0, 0)
        except OSError as error:
            if error.errno != errno.EINVAL or capability == 0:
                raise
            break  # the system has no more
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0)
    _call("capset", header, (ctypes.c_uint32 * 6)())


def _replace(path: str) -> None:
    """Detach what is mounted at `path`, and move there what is mounted at /tmp."""
    _call("umount2", path.encode(), _DETACH)
    _mount("/tmp", path, None, _MOVE)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    _call(
        "mount",
        source.encode(),
        target.encode(),
        None if kind is None else kind.encode(),
        ctypes.c_ulong(flags),
        options.encode(),
    )


def _call(name: str, *arguments: object) -> None:
    if _CALLS[name](*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _write(path: str, text: str, directory: int | None = None) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
