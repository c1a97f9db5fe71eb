"""Confines a forked sandbox by namespaces, and drops its privileges.

The fork server runs inside bubblewrap, as root of a user namespace. It sees no more of the machine
than a sandbox does, apart from the directory of all workspaces. A sandbox gives up that directory
and all privileges before it runs any command; see `toolsets.sandbox.bwrap`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import stat
import struct
import sys
from typing import Any

from toolsets.sandbox.inside.processes import check_descriptor

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
"""Parts of /proc that root of the machine could write without any capability."""
_VOLATILE = "work/incompat/volatile"
_WORKSPACE = "/workspace"
_IMAGES = "/images"
_USER = 1000
_PACKAGE_MANAGER = (0, 1, 3, 6, 7)
"""CAP_CHOWN, DAC_OVERRIDE, FOWNER, SETGID and SETUID: what root of an image needs to install."""
MEASURED = 200
"""The descriptor of the directory with a conversation's changes of its image."""

_libc = ctypes.CDLL(None, use_errno=True)
# Look up the functions once here, for all sandboxes that are forked later.
for _name in ("unshare", "setns", "mount", "umount2", "prctl", "capset"):
    getattr(_libc, _name)


def fork_as_first(own_namespace: int) -> int:
    """Fork as `os.fork`; the child is process 1 of a new PID namespace."""
    _call("unshare", _NEWPID)
    try:
        pid = os.fork()
    except OSError:
        _call("setns", own_namespace, _NEWPID)
        raise
    if pid:
        # Else the next `unshare` fails: a process gets only one new namespace for its children.
        _call("setns", own_namespace, _NEWPID)
    return pid


def enter(workspace: str, tmp_bytes: int, network: bool) -> None:
    """Confine this process to the workspace of this name; raises `OSError`."""
    _check_name(workspace)
    _call("unshare", _NEWNS | _NEWCGROUP | _NEWUTS | _NEWIPC | (0 if network else _NEWNET))
    _mount("none", "/", None, _REC | _PRIVATE)
    # Mount at /tmp first and move the mount: so the old mount can be detached, not only hidden.
    # Detach the old /proc last: the kernel allows a new one only while a full one is visible.
    _mount("proc", "/tmp", "proc", _NOSUID | _NODEV | _NOEXEC)
    old_proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    _replace("/proc")
    _protect("/proc")
    _own_terminals("/dev/pts")
    _mount(f"{_WORKSPACE}/{workspace}", "/tmp", None, _BIND | _REC)
    _replace(_WORKSPACE)
    for path in ("/tmp", "/dev/shm"):
        _mount("tmpfs", path, "tmpfs", _NOSUID | _NODEV, f"mode=0755,size={tmp_bytes}")
    _start_loopback(network)
    _drop_privileges(old_proc, _USER, _USER, ())
    os.close(old_proc)


def enter_image(layer: str, tmp_bytes: int, network: bool, image: dict[str, Any]) -> None:
    """Confine this process to an image, with the changes of a conversation above it.

    `image` has "tree" (the tree's directory beneath /images), "base" (the base beside the layer, or
    None), "is_copied" (the layer holds a copy of the tree, not only the changes), "workdir", "uid",
    "gid" and "shown" (paths in the image, each with the file or directory that is visible there,
    read-only). Raises `OSError`.
    """
    trees = [f"{_IMAGES}/{image['tree']}"]
    for name in (layer, *image["tree"].split("/")):
        _check_name(name)
    if image["base"] is not None:
        _check_name(image["base"])
        trees.insert(0, f"{_WORKSPACE}/{image['base']}/upper")
    _call("unshare", _NEWNS | _NEWCGROUP | _NEWUTS | _NEWIPC | (0 if network else _NEWNET))
    _mount("none", "/", None, _REC | _PRIVATE)
    names = _nameservers() if network else None
    layer = f"{_WORKSPACE}/{layer}"
    _mount_tree(layer, *trees, is_copied=image["is_copied"])
    for name in ("proc", "dev"):
        if not stat.S_ISDIR(os.lstat(f"/tmp/{name}").st_mode):
            raise OSError(errno.ENOTDIR, f"/{name} of the image is not a directory")
    old_proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    _mount("proc", "/tmp/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    _protect("/tmp/proc")
    _mount("/dev", "/tmp/dev", None, _BIND | _REC)
    _own_terminals("/tmp/dev/pts")
    _mount("tmpfs", "/tmp/dev/shm", "tmpfs", _NOSUID | _NODEV, f"mode=1777,size={tmp_bytes}")
    _start_loopback(network)
    shown = {at: os.open(path, os.O_PATH | os.O_CLOEXEC) for at, path in image["shown"].items()}
    os.chdir("/tmp")
    _call("pivot_root", b".", b".")
    # From here on links of the image stay inside of it. The old root can be used until it is
    # detached.
    for at, fd in shown.items():
        _show(fd, at)
    _call("umount2", b".", _DETACH)
    os.chdir("/")
    # An earlier command may have put a file in place of the directory: then calls fail.
    with contextlib.suppress(OSError):
        os.makedirs(image["workdir"], exist_ok=True)
    if names is not None:
        with contextlib.suppress(OSError):
            _write_nameservers(names)
    uid, gid = image["uid"], image["gid"]
    _drop_privileges(old_proc, uid, gid, _PACKAGE_MANAGER if uid == 0 else ())
    os.close(old_proc)


def main() -> None:
    """Try whether an overlay can be mounted; the arguments are the names of a tree and a layer."""
    tree, layer = sys.argv[2:]
    _call("unshare", _NEWNS)
    _mount("none", "/", None, _REC | _PRIVATE)
    layer = f"{_WORKSPACE}/{layer}"
    _mount_tree(layer, f"{_IMAGES}/{tree}", is_copied=False)
    os.mkdir("/tmp/made")  # fails on some file systems that cannot hold layers


def _mount_tree(layer: str, *trees: str, is_copied: bool) -> None:
    """Mount the conversation's files at /tmp, and open the directory that is measured.

    Of the trees below its layer, the first one is the uppermost.
    """
    upper, work = f"{layer}/upper", f"{layer}/work"
    for path in (upper, work):
        os.makedirs(path, exist_ok=True)
    if is_copied:
        _mount(upper, "/tmp", None, _BIND)
        _mount("none", "/tmp", None, _BIND | _REMOUNT | _NOSUID | _NODEV)
    else:
        # "volatile": never wait for the disk, as workspaces are made anew after a power loss. The
        # kernel refuses to mount where an earlier such mount has left its mark: remove it.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{work}/{_VOLATILE}/dirty")
            os.rmdir(f"{work}/{_VOLATILE}")
            os.rmdir(f"{work}/{os.path.dirname(_VOLATILE)}")
        below = ":".join(trees)
        layers = f"lowerdir={below},upperdir={upper},workdir={work},userxattr,volatile"
        _mount("overlay", "/tmp", "overlay", _NOSUID | _NODEV, layers)
    mode = stat.S_IMODE(os.stat("/tmp").st_mode)
    if mode & 0o555 != 0o555:
        os.chmod("/tmp", mode | 0o555)  # else not even our server could use a path
    # A read-only mount of its own, from which ".." does not lead to other layers.
    _mount(upper, upper, None, _BIND)
    _mount("none", upper, None, _BIND | _REMOUNT | _RDONLY | _NOSUID | _NODEV)
    measured = os.open(upper, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    check_descriptor(MEASURED)
    os.dup2(measured, MEASURED, inheritable=False)
    os.close(measured)


def _show(fd: int, at: str) -> None:
    """Mount an open file or directory read-only at a path, and close it."""
    is_directory = stat.S_ISDIR(os.fstat(fd).st_mode)
    os.makedirs(at if is_directory else os.path.dirname(at), exist_ok=True)
    if not is_directory:
        os.close(os.open(at, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC))
    _mount(f"/proc/self/fd/{fd}", at, None, _BIND)
    _mount("none", at, None, _BIND | _REMOUNT | _RDONLY | _NOSUID | _NODEV)
    os.close(fd)


def _nameservers() -> bytes | None:
    try:
        with open("/etc/resolv.conf", "rb") as file:
            return file.read()
    except OSError:
        return None


def _write_nameservers(content: bytes) -> None:
    """Give the image the nameservers of this machine, in place of its own file or link."""
    os.makedirs("/etc", exist_ok=True)
    if os.path.lexists("/etc/resolv.conf"):
        os.unlink("/etc/resolv.conf")
    with open("/etc/resolv.conf", "wb") as file:
        file.write(content)


def _protect(proc: str) -> None:
    """Make the parts of a /proc read-only that root of the machine could write."""
    for path in (f"{proc}/{name}" for name in _PROC_READ_ONLY):
        if os.path.exists(path):
            _mount(path, path, None, _BIND | _REC)
            flags = _BIND | _REMOUNT | _RDONLY | _NOSUID | _NODEV | _NOEXEC
            _mount("none", path, None, flags)


def _own_terminals(path: str) -> None:
    _call("umount2", path.encode(), _DETACH)
    _mount("devpts", path, "devpts", _NOSUID | _NOEXEC, "newinstance,ptmxmode=0666,mode=620")


def _start_loopback(network: bool) -> None:
    if network:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        up = struct.pack("16sh22x", b"lo", _UP_AND_RUNNING)
        fcntl.ioctl(any_socket.fileno(), _SIOCSIFFLAGS, up)


def _check_name(name: str) -> None:
    if "/" in name or name in ("", ".", ".."):
        raise ValueError(f"not a name: {name!r}")


def _drop_privileges(writable_proc: int, uid: int, gid: int, kept: tuple[int, ...]) -> None:
    """Become a user of a user namespace in which no other can be made, with `kept` capabilities."""
    _call("unshare", _NEWUSER)
    _call("prctl", _SET_DUMPABLE, 1, 0, 0, 0)  # else this process could not write its maps
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{uid} 0 1")
    _write("/proc/self/gid_map", f"{gid} 0 1")
    _write("sys/user/max_user_namespaces", "0", writable_proc)
    for capability in range(64):
        if capability in kept:
            continue
        try:
            _call("prctl", _CAPBSET_DROP, capability, 0, 0, 0)
        except OSError as error:
            if error.errno != errno.EINVAL or capability == 0:
                raise
            break  # the kernel has no further capability
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0)
    mask = sum(1 << capability for capability in kept)
    _call("capset", header, (ctypes.c_uint32 * 6)(mask, mask))


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
    if getattr(_libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _write(path: str, text: str, directory: int | None = None) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
