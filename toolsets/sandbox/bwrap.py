"""Runs commands in namespaces of their own by bubblewrap: no network, no host files, no secrets.

If this process dies, the kernel ends every process of its sandboxes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import IO

from batch_trajectories.basics.errors import HostError, machine_failure_in
from toolsets.sandbox.base import Extras, SandboxError, SandboxSettings
from toolsets.sandbox.channel import Launch
from toolsets.sandbox.first_process import proc_problem
from toolsets.sandbox.fork_servers import SandboxTemplate
from toolsets.sandbox.inside.system_calls import filter_program
from toolsets.sandbox.programs import LOCALE, python_bin, python_prefix
from toolsets.sandbox.served import ServedSandbox
from toolsets.workspace.workspace import HOME

_INSTALL = "install bubblewrap (on Debian and Ubuntu: apt-get install bubblewrap)"
_ALLOW = (
    "allow unprivileged user namespaces for bwrap (sysctl kernel.unprivileged_userns_clone, "
    "kernel.apparmor_restrict_unprivileged_userns, or the container's seccomp profile)"
)
_UNSHARE = [
    "--unshare-all",
    "--unshare-user",
    "--die-with-parent",
    "--new-session",
    # Our server is process 1 itself: nothing in the sandbox can kill it or look into it. The bwrap
    # outside waits for it, so no ended process is left over.
    "--as-pid-1",
    "--hostname",
    "sandbox",
    "--cap-drop",
    "ALL",
]
_USER = ["--uid", "1000", "--gid", "1000"]
# Root of its own user namespace, so that it can mount /dev/pts. The capabilities are those that
# `toolsets.sandbox.inside.namespaces` needs: mounts, the loopback device, a map of users.
FORK_SERVER = ["--uid", "0", "--gid", "0"]
for _capability in ("CAP_SYS_ADMIN", "CAP_NET_ADMIN", "CAP_SETFCAP"):
    FORK_SERVER += ["--cap-add", _capability]
_MARK = {"BATCH_TRAJECTORIES": "sandbox"}
"""The environment of bwrap itself, by which `end_orphans` recognizes our processes."""
_COMM = b"bwrap\n"
_PASSWD = b"root:x:0:0:root:/root:/usr/sbin/nologin\nuser:x:1000:1000:user:/workspace:/bin/sh\n"
_GROUP = b"root:x:0:\nuser:x:1000:\n"
_ETC = ["ld.so.cache", "alternatives", "nsswitch.conf", "localtime"]
# Not all of /etc/ssl, which holds private keys on some machines.
_ETC_NETWORK = ["resolv.conf", "hosts", "ssl/certs", "ssl/openssl.cnf", "pki/tls/certs"]


class BwrapSandbox(ServedSandbox):
    """Runs a task's commands in namespaces of their own around the workspace.

    A command sees /usr and the running Python read-only, the workspace at /workspace, a /tmp of the
    task's own, and nothing else of the machine. The kernel refuses system calls that tasks do not
    need (`inside.system_calls`). When the sandbox is stopped or this process dies, the kernel ends
    every process in it.

    The server inside is process 1, which commands cannot reach; they can only forge the result of
    their own task. A fork server in bubblewrap forks it, and it then separates itself from all
    other sandboxes. The result equals a sandbox that bubblewrap alone makes
    (`tests/toolsets/test_sandbox_siblings.py` compares them). Forked sandboxes share memory that
    none of them can write: the addresses and the hash seed of their server and interpreter.
    """

    name = "bwrap"
    takes_extras = True
    home = HOME

    @classmethod
    def problem(cls, settings: SandboxSettings) -> str | None:
        """See `Sandbox`."""
        del settings
        if (problem := proc_problem()) is not None:
            return f"sandbox bwrap: {problem}"
        return bwrap_problem()

    @classmethod
    def prepare(cls) -> None:
        """Try bwrap before an event loop runs, and end sandboxes that dead processes left."""
        if bwrap_problem() is None:
            end_orphans()

    @property
    def max_processes(self) -> int | None:
        """The limit on processes; None if the kernel cannot count them per sandbox."""
        # Linux counts processes per user namespace from 5.14 on, but never those of root.
        is_counted = os.getuid() != 0 and _kernel_version() >= (5, 14)
        return self._limits.processes if is_counted else None

    def launch(self, argv: Sequence[str], stack: ExitStack) -> Launch:
        """See `ServedSandbox`."""
        options = [*_USER]
        if _probe(_bwrap(), ("--disable-userns",)) is None:
            options.append("--disable-userns")
        extras = self._extras or Extras()
        for sized in ("/tmp", "/dev/shm", *([extras.home] if extras.home else [])):
            options += ["--size", str(self._limits.tmp_mb << 20), "--tmpfs", sized]
        for inside, path in extras.binds.items():
            options += ["--ro-bind", path, inside]
        # A process that is root of the machine could write there without any capability.
        for name in ("sys", "sysrq-trigger"):
            options += ["--ro-bind-try", f"/proc/{name}", f"/proc/{name}"]
        return launch(argv, stack, self._limits.network, options, str(self._workspace.root))

    def template(self) -> SandboxTemplate | None:
        """See `ServedSandbox`."""
        if self._extras is not None:
            return None
        root, network = self._workspace.root, self._limits.network
        return SandboxTemplate(
            key=("bwrap", root.parent, network),
            is_confined=True,
            # The fork server mounts the directory of all workspaces as its own.
            launch=lambda argv, stack: launch(
                argv, stack, network, [*FORK_SERVER, "--dir", "/tmp"], str(root.parent)
            ),
            request={
                "env": {},
                "workspace": root.name,
                "tmp_bytes": self._limits.tmp_mb << 20,
                "network": network,
            },
        )


@cache
def _kernel_version() -> tuple[int, ...]:
    """Return the first two numbers of the kernel's version."""
    return tuple(int(n) for n in re.findall(r"\d+", os.uname().release)[:2])


def bwrap_problem() -> str | None:
    """Return None if bwrap works here, else what to do about it.

    Raises `HostError` if the machine has no process left to try it.
    """
    return _find_problem(os.environ.get("PATH"))


@cache
def _find_problem(path: str | None) -> str | None:
    bwrap = shutil.which("bwrap", path=path)
    if bwrap is None:
        return f"sandbox bwrap: the program bwrap was not found; {_INSTALL}"
    failure = _probe(bwrap, ("--disable-userns",))
    if failure is not None:
        failure = _probe(bwrap, ())
    if failure is not None and os.strerror(errno.EAGAIN) in failure:
        raise HostError(f"cannot try the sandbox bwrap: {machine_failure_in(failure)}")
    return failure and f"sandbox bwrap: it does not work here ({failure}); {_ALLOW}"


def end_orphans() -> None:
    """Kill processes of sandboxes whose bwrap was killed while it started."""
    # A child of bwrap waits for bwrap at first, and asks to die with it only later.
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(int(process.name))
            try:
                if _is_orphan(process):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)


def _is_orphan(process: Path) -> bool:
    """Whether the process is a bwrap of ours inside a sandbox whose outer bwrap has ended."""
    if (process / "comm").read_bytes() != _COMM:
        return False
    status = (process / "status").read_text()
    parent = re.search(r"^PPid:\t(\d+)$", status, re.M)
    is_first_inside = re.search(r"^NSpid:.*\t1$", status, re.M)
    if not parent or not is_first_inside:
        return False
    mark = b"".join(f"{name}={value}\0".encode() for name, value in _MARK.items())
    return (
        mark in (process / "environ").read_bytes()
        and Path("/proc", parent[1], "comm").read_bytes() != _COMM
    )


def _bwrap() -> str:
    if (program := shutil.which("bwrap")) is None:
        raise SandboxError(f"the sandbox is gone: bwrap was not found; {_INSTALL}")
    return program


def launch(
    argv: Sequence[str], stack: ExitStack, network: bool, options: Sequence[str], home: str
) -> Launch:
    """Return how to start `argv` in bwrap, with `home` as /workspace."""
    passwd, group = (stack.enter_context(_make_file(text)) for text in (_PASSWD, _GROUP))
    options = [
        *_UNSHARE,
        *(["--share-net"] if network else []),
        *system_options(),
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        *options,
        "--symlink",
        "../tmp",
        "/var/tmp",
        *python_options(),
    ]
    for name in [*_ETC, *(_ETC_NETWORK if network else [])]:
        options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    options.append("--clearenv")
    for name, value in _env().items():
        options += ["--setenv", name, value]
    options += ["--ro-bind-data", str(passwd.fileno()), "/etc/passwd"]
    options += ["--ro-bind-data", str(group.fileno()), "/etc/group"]
    options += ["--bind", home, HOME, "--chdir", HOME]
    files = [passwd, group]
    if (refused := filter_program(platform.machine())) is not None:
        files.append(stack.enter_context(_make_file(refused)))
        options += ["--seccomp", str(files[-1].fileno())]
    # Last, because the options before make directories.
    options += ["--remount-ro", "/dev", "--remount-ro", "/"]
    # In a file, because commands can see the arguments of process 1, with paths of the host.
    packed = b"".join(os.fsencode(option) + b"\0" for option in options)
    args = stack.enter_context(_make_file(packed))
    return Launch(
        argv=[_bwrap(), "--args", str(args.fileno()), "--", *argv],
        # The environment of bwrap itself, which runs as long as the sandbox: it has no secrets.
        env=_MARK,
        cwd="/",
        pass_fds=[file.fileno() for file in (args, *files)],
    )


def _env() -> dict[str, str]:
    return {
        "PATH": f"{python_bin()}:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
        "HOME": HOME,
        **LOCALE,
        "TERM": "dumb",
        "USER": "user",
        "MPLBACKEND": "Agg",
    }


@cache
def system_options() -> tuple[str, ...]:
    options = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            options += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            options += ["--ro-bind", str(path), str(path)]
    return tuple(options)


def python_options() -> list[str]:
    prefix = python_prefix()
    if prefix.is_relative_to("/usr"):
        return []
    return ["--ro-bind", str(prefix), str(prefix)]


@cache
def _probe(bwrap: str, extra: tuple[str, ...]) -> str | None:
    """Try to make a sandbox; return bwrap's error message, or None if it works."""
    options = [*_UNSHARE, *_USER, *extra, *system_options(), "--proc", "/proc", "--dev", "/dev"]
    try:
        done = subprocess.run(
            [bwrap, *options, "--", "true"],
            env=_MARK,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    return _first_line(done.stderr.decode(errors="replace")) or f"exit code {done.returncode}"


@contextlib.contextmanager
def _make_file(content: bytes) -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        yield file


def _first_line(text: str) -> str:
    with contextlib.suppress(IndexError):
        return text.splitlines()[0][:300]
    return ""
