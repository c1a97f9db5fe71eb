"""Commands run in namespaces of their own by bubblewrap: no network, no host files, no secrets."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from toolsets.execution import ExecResult, Limits, SandboxError
from toolsets.interpreter import python_bin, python_prefix
from toolsets.process import Spawn, check_argv, input_file, run_process
from toolsets.rlimits import limited
from toolsets.workspace import Workspace

HOME = "/workspace"

_INSTALL = "install bubblewrap (on Debian and Ubuntu: apt-get install bubblewrap)"
_ALLOW = (
    "allow unprivileged user namespaces for bwrap (sysctl kernel.unprivileged_userns_clone, "
    "kernel.apparmor_restrict_unprivileged_userns, or the container's seccomp profile)"
)
_UNSHARE = [
    *("--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"),
    *("--cap-drop", "ALL", "--uid", "1000", "--gid", "1000", "--hostname", "sandbox"),
]
_PASSWD = b"root:x:0:0:root:/root:/usr/sbin/nologin\nuser:x:1000:1000:user:/workspace:/bin/sh\n"
_GROUP = b"root:x:0:\nuser:x:1000:\n"
_ETC = ["ld.so.cache", "alternatives", "nsswitch.conf", "localtime"]
# Not all of /etc/ssl, which holds private keys on some machines.
_ETC_NETWORK = ["resolv.conf", "hosts", "ssl/certs", "ssl/openssl.cnf", "pki/tls/certs"]


class BwrapSandbox:
    """Runs each command in a fresh set of namespaces around the workspace.

    A command sees /usr and the running Python read-only, the workspace at /workspace, a /tmp of
    its own, and nothing else of the machine. When the command ends, when time is up and when
    this process dies the kernel ends every process the command started, whatever it did to get
    away. Not bounded: the number of processes, and the workspace's total size.
    """

    name = "bwrap"
    home = HOME

    def __init__(self, workspace: Workspace, limits: Limits) -> None:
        self._workspace = workspace
        self._limits = limits

    async def exec(
        self, argv: Sequence[str], *, timeout_s: float | None = None, stdin: bytes = b""
    ) -> ExecResult:
        """Run one command in the workspace."""
        check_argv(argv)
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SandboxError(f"the sandbox is gone: bwrap was not found; {_INSTALL}")
        self._workspace.make()
        with input_file(stdin) as file, input_file(_PASSWD) as passwd, input_file(_GROUP) as group:
            spawn = Spawn(
                argv=[
                    bwrap,
                    *confinement(bwrap, self._limits),
                    *("--ro-bind-data", str(passwd.fileno()), "/etc/passwd"),
                    *("--ro-bind-data", str(group.fileno()), "/etc/group"),
                    *("--bind", str(self._workspace.root), HOME, "--chdir", HOME),
                    # Last, because mounting needs directories to be made.
                    *("--remount-ro", "/dev", "--remount-ro", "/", "--"),
                    *limited(argv, self._limits),
                ],
                # bwrap stays in the sandbox as process 1, whose first environment commands can
                # read, so clearing theirs would not be enough.
                env={},
                cwd="/",
                stdin=file.fileno(),
                pass_fds=[passwd.fileno(), group.fileno()],
            )
            result = await run_process(
                spawn,
                timeout_s=self._limits.command_timeout_s(timeout_s),
                output_bytes=self._limits.output_bytes,
            )
        if result.exit_code == 1 and result.stderr.startswith("bwrap: "):
            raise SandboxError(f"the sandbox did not start: {_first_line(result.stderr)}")
        return result

    async def stop(self) -> None:
        """Nothing outlives an `exec`, so there is nothing to release."""


def bwrap_problem() -> str | None:
    """Return None where bwrap works, else what to do about it."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        return f"sandbox bwrap: the program bwrap was not found; {_INSTALL}"
    failure = _probe(bwrap, ("--disable-userns",))
    if failure is not None:
        failure = _probe(bwrap, ())
    return failure and f"sandbox bwrap: it does not work here ({failure}); {_ALLOW}"


def confinement(bwrap: str, limits: Limits) -> list[str]:
    """Return the options that make every sandbox, apart from its workspace."""
    options = [*_UNSHARE, *(["--share-net"] if limits.network else [])]
    if _probe(bwrap, ("--disable-userns",)) is None:
        options.append("--disable-userns")
    options += _system()
    options += ["--proc", "/proc", "--dev", "/dev"]
    for sized in ("/tmp", "/dev/shm"):
        options += ["--size", str(limits.tmp_mb << 20), "--tmpfs", sized]
    options += ["--symlink", "../tmp", "/var/tmp"]
    options += _python()
    for name in [*_ETC, *(_ETC_NETWORK if limits.network else [])]:
        options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    options.append("--clearenv")
    for name, value in _env().items():
        options += ["--setenv", name, value]
    return options


def _env() -> dict[str, str]:
    return {
        "PATH": f"{python_bin()}:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
        "HOME": HOME,
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "USER": "user",
    }


@cache
def _system() -> tuple[str, ...]:
    options = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            options += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            options += ["--ro-bind", str(path), str(path)]
    return tuple(options)


def _python() -> list[str]:
    prefix = python_prefix()
    if prefix.is_relative_to("/usr"):
        return []
    return ["--ro-bind", str(prefix), str(prefix)]


@cache
def _probe(bwrap: str, extra: tuple[str, ...]) -> str | None:
    """Return None if a sandbox can be made, else bwrap's complaint."""
    options = [*_UNSHARE, *extra, *_system(), "--proc", "/proc", "--dev", "/dev"]
    try:
        done = subprocess.run(
            [bwrap, *options, "--", "true"],
            env={},
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


def _first_line(text: str) -> str:
    with contextlib.suppress(IndexError):
        return text.splitlines()[0][:300]
    return ""
