"""Commands run in gVisor: `runsc` answers their system calls, not the kernel of this machine."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

from toolsets.sandbox.base import SandboxSettings
from toolsets.sandbox.cgroup import Group, make_group
from toolsets.sandbox.channel import Launch
from toolsets.sandbox.programs import python_bin, python_prefix
from toolsets.sandbox.served import ServedSandbox

HOME = "/workspace"
_THREADS = 100


class RunscSandbox(ServedSandbox):
    """Runs a task's commands in a container of gVisor around the workspace."""

    name = "runsc"
    summary = "gVisor, without a container engine"
    home = HOME

    @classmethod
    def problem(cls, settings: SandboxSettings) -> str | None:
        """See `Sandbox`."""
        del settings
        return _problem(os.environ.get("PATH"))

    def group(self) -> Group | None:
        """See `ServedSandbox`: gVisor's own threads count, too."""
        limits = self._limits
        return make_group(limits.processes + _THREADS, limits.memory_mb, limits.cpus)

    def launch(self, argv: Sequence[str], stack: ExitStack) -> Launch:
        """See `ServedSandbox`."""
        bundle = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="runsc-")))
        tmp = f"size={self._limits.tmp_mb}m"
        mounts = [
            {"destination": "/proc", "type": "proc"},
            {"destination": "/tmp", "type": "tmpfs", "options": [tmp]},
            _bind(self._workspace.root, HOME, "rw"),
            *(_bind(path, str(path), "ro") for path in _shown()),
        ]
        config = {
            "ociVersion": "1.0.2",
            "root": {"path": str(_root()), "readonly": True},
            "hostname": "sandbox",
            "mounts": mounts,
            "process": {
                "args": list(argv),
                "cwd": HOME,
                "env": [
                    f"PATH={python_bin()}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
                    *(f"HOME={HOME}", "LANG=C.UTF-8", "TERM=dumb", "MPLBACKEND=Agg"),
                ],
                "user": {"uid": os.getuid(), "gid": os.getgid()},
                "capabilities": {},
                "noNewPrivileges": True,
            },
        }
        (bundle / "config.json").write_text(json.dumps(config))
        network = "host" if self._limits.network else "none"
        return Launch(
            argv=[*_command(network), "run", f"--bundle={bundle}", f"task-{uuid.uuid4().hex}"],
            env={"PATH": os.environ.get("PATH", os.defpath)},
            cwd="/",
        )


def _command(network: str) -> list[str]:
    options = [f"--root={_root().parent / 'state'}", f"--network={network}"]
    # Limits are those of our control group; ptrace works wherever processes run.
    options += ["--ignore-cgroups", "--platform=ptrace"]
    return ["runsc", *options, *([] if os.getuid() == 0 else ["--rootless"])]


@cache
def _problem(path: str | None) -> str | None:
    if shutil.which("runsc", path=path) is None:
        return "sandbox runsc: the program runsc was not found; install gVisor"
    tried = [*_command("none"), "do", "true"]
    done = subprocess.run(tried, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode == 0:
        return None
    said = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
    return f"sandbox runsc: it does not work here: {said[-1][:300]}"


@cache
def _root() -> Path:
    """The root directory of all sandboxes of this process, which they see read-only."""
    made = Path(tempfile.mkdtemp(prefix="runsc-root-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    root = made / "root"
    for path in [HOME, "/tmp", "/proc", "/dev", "/etc", *map(str, _shown())]:
        (root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        if Path("/", name).is_symlink():
            (root / name).symlink_to(Path("/", name).readlink())
    (root / "etc/passwd").write_text(f"user:x:{os.getuid()}:{os.getgid()}::{HOME}:/bin/sh\n")
    return root


def _shown() -> list[Path]:
    """What of this machine commands see, read-only."""
    shown = [Path("/usr"), Path("/etc/alternatives"), python_prefix()]
    shown += [path for path in map(Path, ("/bin", "/lib", "/lib64")) if not path.is_symlink()]
    return [path for path in shown if path.is_dir()]


def _bind(source: Path, destination: str, mode: str) -> dict[str, Any]:
    options = ["bind", mode]
    return {"type": "bind", "source": str(source), "destination": destination, "options": options}
