"""Containers that a run has left, found by their names and removed.

A container that is kept for its conversation has the name `bt-RUN-WORKSPACE`, one around a
directory `bt-RUN-WORKSPACE.RANDOM`: that is of use to none but the process that started it.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import os
import re
import secrets
import select
import shutil
from pathlib import Path

import orjson

from toolsets.sandbox.base import SandboxError, SandboxSettings
from toolsets.sandbox.containers.engine import RUN_LABEL, ask_engine, run_program, words_of

log = logging.getLogger(__name__)

_ENDED = (b"exited", b"stopped", b"dead")
_END_TIMEOUT_S = 10.0
"""For a monitor to end after its container; it takes some milliseconds."""
_UNNAMED = "<none>"
_ID = re.compile(r"[0-9a-f]{64}")


def run_label(run_dir: Path) -> str:
    """The name of a run among the containers of this machine."""
    return hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:12]


def plain_name(name: str) -> str:
    """The name of a workspace as part of the name of a container or an image."""
    return re.sub("[^A-Za-z0-9_-]", "-", name)


def name_around(workspace: Path) -> str:
    """A name for a container around a workspace, which lies in `workspaces/` of its run."""
    run = run_label(workspace.parent.parent)
    return f"bt-{run}-{plain_name(workspace.name)}.{secrets.token_hex(4)}"


def remove_containers(settings: SandboxSettings, run_dir: Path) -> int:
    """Remove containers of a run that nobody uses; return how many there were.

    Those are the ones whose workspaces are gone, and ended ones around directories. Images of their
    files go with them, as those do that a killed `commit` left without a name. Raises
    `SandboxError`.
    """
    engine, workspaces = settings.engine, run_dir / "workspaces"
    if not workspaces.is_dir() or shutil.which(engine) is None:
        return 0
    prefix = f"bt-{run_label(run_dir)}-"
    # Podman lists what a killed `create` has left half made only where it is asked to.
    half_made = ("--external",) if engine == "podman" else ()
    listed = ("--filter", f"name={prefix}", "--format", "{{.Names}} {{.State}}")
    done = ask_engine(engine, ["ps", "--all", *half_made, *listed])
    if done.returncode != 0:
        raise SandboxError(f"sandbox {engine}: ps: {words_of(done)}")
    paths = {plain_name(path.name) for path in workspaces.iterdir()}
    for id in _half_made(engine, run_label(run_dir)) if engine == "podman" else ():
        ask_engine(engine, ["rmi", "--force", id])
    count = 0
    for line in done.stdout.splitlines():
        raw, _, state = line.partition(b" ")
        name = raw.decode()
        workspace, is_around, _ = name.removeprefix(prefix).partition(".")
        if workspace in paths and not (is_around and state.lower() in _ENDED):
            continue
        count += 1
        ask_engine(engine, ["rm", "--force", "--volumes", name])
        if not is_around:
            ask_engine(engine, ["rmi", "--force", f"localhost/{name}:files"])
    for id, name in _images(engine, run_label(run_dir)):
        if name == _UNNAMED:
            ask_engine(engine, ["rmi", id])  # where nothing is made of it
        elif name.startswith(prefix) and name.removeprefix(prefix) not in paths:
            ask_engine(engine, ["rmi", "--force", f"localhost/{name}:files"])
    if engine == "podman":
        count += _end_forgotten(settings, prefix)
    return count


def _images(engine: str, run: str) -> list[tuple[str, str]]:
    """The id and the name of each image that was made of a container of a run."""
    by_label = ("--filter", f"label={RUN_LABEL}={run}", "--format", "{{.ID}} {{.Repository}}")
    done = ask_engine(engine, ["images", *by_label])
    if done.returncode != 0:
        log.warning("images of the run are not removed: %s images: %s", engine, words_of(done))
    listed = (line.partition(" ") for line in done.stdout.decode().splitlines())
    return [(id, name.removeprefix("localhost/")) for id, _, name in listed]


def _half_made(engine: str, run: str) -> list[str]:
    """Images without a manifest whose configuration has the label of a run.

    Where a killed `commit` has left one, Podman can list no image, and remove none by name. Only
    the files of Podman's storage tell of them. That of the configuration is written before the
    manifest; what has neither could be anybody's.
    """
    place = ask_engine(
        engine, ["info", "--format", "{{.Store.GraphRoot}}/{{.Store.GraphDriverName}}"]
    )
    directory = Path(f"{place.stdout.decode().strip()}-images")
    collected = []
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
        for image in orjson.loads((directory / "images.json").read_bytes()):
            if image.get("names") or "manifest" in image.get("big-data-names", ()):
                continue
            name = base64.b64encode(f"sha256:{image['id']}".encode()).decode()
            if _run_of(directory / image["id"] / f"={name}") == run:
                collected.append(image["id"])
    return collected


def _run_of(configuration: Path) -> str | None:
    """The run that an image's configuration names."""
    try:
        described = orjson.loads(configuration.read_bytes())
        return str(described["config"]["Labels"][RUN_LABEL])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _end_forgotten(settings: SandboxSettings, prefix: str) -> int:
    """End containers of a run that Podman has forgotten while they live; return how many.

    A removal that was killed has noted that the container is being stopped, and the next one takes
    that for stopped. What is left are its processes and `conmon`, which watches them.
    """
    monitors = _monitors(prefix)
    try:
        if not monitors:
            return 0
        # Asked after the monitors were found, so that it knows each of a container that it has.
        done = ask_engine(settings.engine, ["ps", "--all", "--no-trunc", "--format", "{{.ID}}"])
        found = ask_engine(settings.engine, ["info", "--format", "{{.Host.OCIRuntime.Path}}"])
        runtime = shutil.which(settings.runtime or found.stdout.decode().strip())
        if done.returncode != 0 or found.returncode != 0 or runtime is None:
            raise SandboxError(f"sandbox {settings.engine}: {words_of(done)}")
        known = set(done.stdout.decode().split())
        return sum(_end(runtime, id, handle) for id, handle in monitors if id not in known)
    finally:
        for _, handle in monitors:
            os.close(handle)


def _monitors(prefix: str) -> list[tuple[str, int]]:
    """The id of each container whose name begins so and is watched by `conmon`, and its handle.

    Only processes of this user outside of all sandboxes count: others can call themselves anything.
    """
    collected = []
    own = _namespaces("self")
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended, or is another's
            if path.stat().st_uid != os.geteuid():
                continue
            if not (path / "cmdline").read_bytes().partition(b"\0")[0].endswith(b"conmon"):
                continue
            handle = os.pidfd_open(int(path.name))
            try:
                # Read while the handle is open: until it ends the number is that process's own.
                program = (path / "exe").readlink().name
                argv = (path / "cmdline").read_bytes().decode().split("\0")
                id, name = (argv[argv.index(option) + 1] for option in ("-c", "-n"))
                is_ours = (
                    program == "conmon" and name.startswith(prefix) and bool(_ID.fullmatch(id))
                )
                if is_ours and _namespaces(path.name) == own and not _has_ended(handle, 0):
                    collected.append((id, os.dup(handle)))
            finally:
                os.close(handle)
    return collected


def _namespaces(process: str) -> list[str]:
    """The namespaces of a process in which sandboxes differ."""
    spaces = Path(f"/proc/{process}/ns")
    return [str((spaces / kind).readlink()) for kind in ("pid", "mnt", "user")]


def _end(runtime: str, id: str, monitor: int) -> bool:
    """End a container by its runtime, which knows its processes; `conmon` ends when they have."""
    done = run_program([runtime, "delete", "--force", id], runtime, _END_TIMEOUT_S)
    if _has_ended(monitor, _END_TIMEOUT_S):
        return True
    log.warning("container %s lives, and podman does not know it: %s", id[:12], words_of(done))
    return False


def _has_ended(handle: int, within_s: float) -> bool:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(within_s * 1000))
