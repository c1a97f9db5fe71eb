"""Runs commands in a container of their own, from an image that the run or the row names.

The engine, Docker or Podman, is asked through its command line. A container around a directory of
this machine is removed when its sandbox stops; its image needs `python3`. A container whose own
files are the workspace is kept, stopped, until its conversation has ended. `remove_containers`
removes containers that a crash left.
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
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import orjson

from toolsets.sandbox.base import (
    Extras,
    ImageSpec,
    Limits,
    SandboxError,
    SandboxSettings,
)
from toolsets.sandbox.channel import Launch
from toolsets.sandbox.containers.engine import (
    RUN_LABEL,
    ask_engine,
    docker_problem,
    engine_environment,
    engine_program,
    engine_warning,
    error_text,
    find_config,
    image_config,
    image_digests,
    run_program,
)
from toolsets.sandbox.image_files import ImageSandbox, ImageSandboxes
from toolsets.sandbox.inside.boot import BOOT
from toolsets.sandbox.programs import inside_python
from toolsets.sandbox.served import ServedSandbox
from toolsets.workspace.workspace import HOME, Workspace

# Containers that a run has left, found by their names and removed.
#
# A container that is kept for its conversation has the name `bt-RUN-WORKSPACE`, one around a
# directory `bt-RUN-WORKSPACE.RANDOM`, of which only the process that started it makes use.

log = logging.getLogger(__name__)

_ENDED = (b"exited", b"stopped", b"dead")
_END_TIMEOUT_S = 10.0
"""Seconds for a monitor to end after its container; usually it takes milliseconds."""
_UNNAMED = "<none>"
_ID = re.compile(r"[0-9a-f]{64}")


def run_label(run_dir: Path) -> str:
    """Return the name of a run, unique on this machine, for its containers."""
    return hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:12]


def plain_name(name: str) -> str:
    """Return a workspace's name in the characters of a container's or image's name."""
    return re.sub("[^A-Za-z0-9_-]", "-", name)


def make_container_name(workspace: Path) -> str:
    """Return a new name for a container around a workspace in `workspaces/` of its run."""
    run = run_label(workspace.parent.parent)
    return f"bt-{run}-{plain_name(workspace.name)}.{secrets.token_hex(4)}"


def remove_containers(settings: SandboxSettings, run_dir: Path) -> int:
    """Remove containers of a run that nobody uses; return their number.

    Nobody uses a container whose workspace was removed, or an ended one around a directory. Images
    of their files are removed, too, and images without a name that a killed `commit` left. Raises
    `SandboxError`.
    """
    engine, workspaces = settings.engine, run_dir / "workspaces"
    if not workspaces.is_dir() or shutil.which(engine) is None:
        return 0
    prefix = f"bt-{run_label(run_dir)}-"
    # Podman lists containers that a killed `create` left half made only with --external.
    half_made = ("--external",) if engine == "podman" else ()
    listed = ("--filter", f"name={prefix}", "--format", "{{.Names}} {{.State}}")
    done = ask_engine(engine, ["ps", "--all", *half_made, *listed])
    if done.returncode != 0:
        raise SandboxError(f"sandbox {engine}: ps: {error_text(done)}")
    paths = {plain_name(path.name) for path in workspaces.iterdir()}
    for id in _list_half_made(engine, run_label(run_dir)) if engine == "podman" else ():
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
    for id, name in _list_images(engine, run_label(run_dir)):
        if name == _UNNAMED:
            ask_engine(engine, ["rmi", id])  # fails if other images are made of it
        elif name.startswith(prefix) and name.removeprefix(prefix) not in paths:
            ask_engine(engine, ["rmi", "--force", f"localhost/{name}:files"])
    if engine == "podman":
        count += _end_forgotten(settings, prefix)
    return count


def _list_images(engine: str, run: str) -> list[tuple[str, str]]:
    """Return the id and the name of each image that was made of a container of a run."""
    by_label = ("--filter", f"label={RUN_LABEL}={run}", "--format", "{{.ID}} {{.Repository}}")
    done = ask_engine(engine, ["images", *by_label])
    if done.returncode != 0:
        log.warning(
            "The images of the run are not removed, because `%s images` failed: %s",
            engine,
            error_text(done),
        )
    listed = (line.partition(" ") for line in done.stdout.decode().splitlines())
    return [(id, name.removeprefix("localhost/")) for id, _, name in listed]


def _list_half_made(engine: str, run: str) -> list[str]:
    """Return images without a manifest whose configuration has the label of a run."""
    # After a killed `commit`, Podman can list no image, and remove none by name. Only the files of
    # its storage show such an image. Its configuration is written before its manifest; an image
    # with neither could belong to anybody.
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
            if _read_run_label(directory / image["id"] / f"={name}") == run:
                collected.append(image["id"])
    return collected


def _read_run_label(configuration: Path) -> str | None:
    """Return the run that an image's configuration names; None if it names none."""
    try:
        described = orjson.loads(configuration.read_bytes())
        return str(described["config"]["Labels"][RUN_LABEL])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _end_forgotten(settings: SandboxSettings, prefix: str) -> int:
    """End living containers of a run that Podman no longer knows; return their number."""
    # A killed removal has noted that the container is being stopped, and the next removal believes
    # that it was. Its processes are left, and `conmon`, which watches them.
    monitors = _find_monitors(prefix)
    try:
        if not monitors:
            return 0
        # Ask after the monitors were found: so each container that Podman knows is in the list.
        done = ask_engine(settings.engine, ["ps", "--all", "--no-trunc", "--format", "{{.ID}}"])
        found = ask_engine(settings.engine, ["info", "--format", "{{.Host.OCIRuntime.Path}}"])
        runtime = shutil.which(settings.runtime or found.stdout.decode().strip())
        if done.returncode != 0 or found.returncode != 0 or runtime is None:
            raise SandboxError(f"sandbox {settings.engine}: {error_text(done)}")
        known = set(done.stdout.decode().split())
        return sum(
            _end_container(runtime, id, handle) for id, handle in monitors if id not in known
        )
    finally:
        for _, handle in monitors:
            os.close(handle)


def _find_monitors(prefix: str) -> list[tuple[str, int]]:
    """Return the id of each container watched by a `conmon`, and a handle of that `conmon`.

    Only containers whose names begin with `prefix`.
    """
    # Only processes of this user outside of all sandboxes: others can call themselves anything.
    collected = []
    own = _namespaces("self")
    for path in Path("/proc").glob("[0-9]*"):
        # The process may have ended, or belong to another user.
        with contextlib.suppress(OSError, ValueError, IndexError):
            if path.stat().st_uid != os.geteuid():
                continue
            if not (path / "cmdline").read_bytes().partition(b"\0")[0].endswith(b"conmon"):
                continue
            handle = os.pidfd_open(int(path.name))
            try:
                # Read after opening the handle: if that process still lives, these are its files.
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
    """Return the namespaces of a process in which sandboxes differ."""
    spaces = Path(f"/proc/{process}/ns")
    return [str((spaces / kind).readlink()) for kind in ("pid", "mnt", "user")]


def _end_container(runtime: str, id: str, monitor: int) -> bool:
    """End a container by its runtime; return False if its `conmon` still runs then."""
    done = run_program([runtime, "delete", "--force", id], runtime, _END_TIMEOUT_S)
    if _has_ended(monitor, _END_TIMEOUT_S):
        return True
    log.warning(
        "The container %s lives although podman does not know it: %s", id[:12], error_text(done)
    )
    return False


def _has_ended(handle: int, within_s: float) -> bool:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(within_s * 1000))


_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID")
_NAME_IN_USE = (b" is already in use by ", b" is in use: ")
"""Error messages of engines for a name in use. Podman's second one is for a half-removed
container."""
_NO_STOP_TIMEOUT = ("--stop-timeout", "0")
"""Kill the container at once when it is removed."""
# The first process does not hear SIGTERM, so a removal would wait ten seconds. If that removal is
# killed meanwhile, Podman removes the container the next time without ending it.
_DEFAULTS = {"LANG": "C.UTF-8", "TERM": "dumb", "MPLBACKEND": "Agg"}


class DockerSandbox(ServedSandbox):
    """Runs a task's commands in one container around the workspace.

    The container has no network unless it is allowed, no capabilities, and limited memory and
    processes. It is removed when it is stopped or this process dies, because its server ends with
    its standard input. Commands run as the user of this process, who owns the workspace.
    """

    name = "docker"
    needs_image = True
    limits_itself = True
    takes_extras = True
    has_own_loopback = True
    home = HOME

    @classmethod
    def problem(cls, settings: SandboxSettings) -> str | None:
        """See `Sandbox`."""
        return docker_problem(settings.image, settings.engine)

    @classmethod
    def create(
        cls,
        workspace: Workspace,
        limits: Limits,
        settings: SandboxSettings,
        extras: Extras | None = None,
    ) -> DockerSandbox:
        """See `Sandbox`. If the engine lacks the image, the start of the sandbox fails."""
        if settings.image is None:
            raise SandboxError("sandbox docker: no image was named")
        return DockerSandbox(
            workspace=workspace,
            limits=limits,
            settings=settings,
            image=settings.image,
            extras=extras,
        )

    def __init__(
        self,
        workspace: Workspace,
        limits: Limits,
        settings: SandboxSettings,
        image: str,
        extras: Extras | None = None,
    ) -> None:
        """`image` must be one that the engine has; it is not pulled."""
        super().__init__(workspace, limits, extras)
        self._settings = settings
        self._engine = settings.engine
        self._image = image

    def launch(self, argv: Sequence[str], stack: ExitStack) -> Launch:
        """See `ServedSandbox`."""
        program = engine_program(self._engine)
        options = ["run", "--rm", "--interactive", "--init", "--pull", "never", *_NO_STOP_TIMEOUT]
        options += ["--name", make_container_name(self._workspace.root)]
        options += [*self._common_options(self._limits.network), "--cap-drop", "ALL"]
        options += [
            "--user",
            f"{os.getuid()}:{os.getgid()}",
            "--tmpfs",
            f"/tmp:rw,exec,size={self._limits.tmp_mb}m",
            "--volume",
            f"{self._workspace.root}:{HOME}",
            "--workdir",
            HOME,
            "--env",
            f"HOME={HOME}",
            "--env",
            "LANG=C.UTF-8",
            "--env",
            "MPLBACKEND=Agg",
            "--entrypoint",
            "",
        ]
        if self._extras is not None and (own := self._extras.home) is not None:
            options += ["--tmpfs", f"{own}:rw,exec,mode=1777,size={self._limits.tmp_mb}m"]
        return _launch([program, *options, self._image, *argv])

    def _common_options(self, network: bool) -> list[str]:
        limits, runtime = self._limits, self._settings.runtime
        # An engine refuses a limit above the number of CPUs of the machine.
        cpus = None if limits.cpus is None else min(limits.cpus, os.cpu_count() or 1)
        return [
            *(() if runtime is None else ("--runtime", runtime)),
            *(() if cpus is None else ("--cpus", f"{cpus:g}")),
            "--network",
            "bridge" if network else "none",
            "--security-opt",
            "no-new-privileges",
            "--memory",
            f"{limits.memory_mb}m",
            "--pids-limit",
            str(limits.processes),
            *self._mounts(),
        ]

    def _mounts(self) -> list[str]:
        """Return the options that mount files of this machine read-only."""
        binds = {} if self._extras is None else self._extras.binds
        return [item for at, path in binds.items() for item in ("--volume", f"{path}:{at}:ro")]


def _launch(argv: list[str]) -> Launch:
    # If Podman reads a reset, it does not tell the container that its input has ended.
    return Launch(argv=argv, env=engine_environment(), cwd="/", reads_to_its_end=True)


class EngineImages(ImageSandboxes):
    """Sandboxes in images that the engine has; see `ImageSandboxes`."""

    def __init__(self, settings: SandboxSettings, run_dir: Path) -> None:
        self._settings = settings
        self._run_dir = run_dir

    def problem(self) -> str | None:
        """See `ImageSandboxes`."""
        return docker_problem(None, self._settings.engine)

    def digests(self, references: Collection[str]) -> dict[str, str]:
        """See `ImageSandboxes`."""
        from toolsets.images.names import full_name  # few runs have images

        engine = self._settings.engine
        if len(references) > 1:  # for one, a list of all images would take longer
            # Podman cannot list images if a killed `commit` left half of one.
            with suppress(SandboxError):
                known = image_digests(engine)
                by_name = {reference: known.get(full_name(reference)) for reference in references}
                return {reference: digest for reference, digest in by_name.items() if digest}
        found = {reference: find_config(engine, reference) for reference in references}
        return {reference: one[1] for reference, one in found.items() if one is not None}

    def warning(self) -> str | None:
        """See `ImageSandboxes`."""
        return engine_warning(self._settings.engine)

    def make(
        self, workspace: Workspace, limits: Limits, spec: ImageSpec, extras: Extras | None = None
    ) -> DockerImageSandbox:
        """See `ImageSandboxes`."""
        settings = self._settings
        config, digest = image_config(settings.engine, spec.reference, settings.pull)
        run = run_label(self._run_dir)
        return DockerImageSandbox(
            workspace,
            limits,
            settings,
            spec=spec,
            run=run,
            config=config,
            digest=digest,
            extras=extras,
        )

    def remove_leftovers(self) -> int:
        """See `ImageSandboxes`."""
        return remove_containers(self._settings, self._run_dir)


class DockerImageSandbox(DockerSandbox, ImageSandbox):
    """Runs a task's commands in a container whose own files are the workspace.

    Commands run as the image's user. Root has the capabilities that package managers need; other
    users have none. The server runs in the Python of this machine, which the container sees
    read-only, so the image needs none.
    """

    has_own_python = True
    """Cells run in the image's Python, with the packages that the image has."""
    is_continued = False
    keeps_its_size = True
    """Files of the image in the workspace do not count."""
    user_home = None

    def __init__(
        self,
        workspace: Workspace,
        limits: Limits,
        settings: SandboxSettings,
        *,
        spec: ImageSpec,
        run: str,
        config: Mapping[str, Any],
        digest: str,
        extras: Extras | None = None,
    ) -> None:
        """`run` is the run's label; `config` and `digest` are the image's.

        HOME is that of the image's user, whatever `extras` say.
        """
        super().__init__(workspace, limits, settings, spec.reference, extras)
        self._spec = spec
        self._run = run
        self._config = config
        self.image_digest = digest
        self.home = spec.workdir or str(config.get("WorkingDir") or "/")
        self._container = f"bt-{run}-{plain_name(workspace.root.name)}"

    def launch(self, argv: Sequence[str], stack: ExitStack) -> Launch:
        """See `ServedSandbox`."""
        program = engine_program(self._engine)
        return _launch([program, "start", "--attach", "--interactive", self._container])

    def has_survived(self) -> bool:
        """See `ImageSandbox`."""
        if not self._workspace.root.exists():
            return False
        return self._state() is not None or self._has_files()

    def make(self) -> None:
        """Create the container, unless it exists.

        If it has other options, as for a check, commit its files to an image and create it from
        that.
        """
        self._workspace.make()
        options = self._options()
        digest = hashlib.sha256(orjson.dumps(options)).hexdigest()
        state = self._state()
        self.is_continued = state is not None
        if state is not None and state["Config"]["Labels"].get(f"{RUN_LABEL}.options") == digest:
            if state["State"]["Running"]:  # the process that started it was killed a moment ago
                self._ask("kill", self._container, fails=True)
                self._ask("wait", self._container, fails=True)
            return
        image = self._image
        if state is not None:
            self._ask("commit", self._container, self._files)
            self._ask("rm", "--force", self._container)
        if state is not None or self._has_files():
            image = self._files
        argv = [*inside_python().command, "-I", "-S", "-c", BOOT, "0"]
        labels = {RUN_LABEL: self._run, f"{RUN_LABEL}.options": digest}
        named = [item for pair in labels.items() for item in ("--label", "=".join(pair))]
        create = (
            "create",
            "--interactive",
            "--pull",
            "never",
            "--name",
            self._container,
            *_NO_STOP_TIMEOUT,
            *named,
            *options,
            "--entrypoint",
            argv[0],
            image,
            *argv[1:],
        )
        done = ask_engine(self._engine, create)
        if done.returncode != 0 and any(message in done.stderr for message in _NAME_IN_USE):
            # A kill has left half a container, which the engine does not list.
            self._ask("rm", "--force", "--volumes", self._container)
            done = ask_engine(self._engine, create)
        self._check("create", done)

    def discard(self) -> None:
        """See `ImageSandbox`."""
        self._ask("rm", "--force", "--volumes", self._container, fails=True)
        self._ask("rmi", "--force", self._files, fails=True)

    @property
    def entrypoint(self) -> tuple[str, ...]:
        """See `ServedSandbox`."""
        command = self._config.get("Entrypoint") if self._spec.starts_entrypoint else None
        return tuple(map(str, command or ()))

    @property
    def can_change_all(self) -> bool:
        """See `ImageSandbox`. Only the users 0 and `root` count as root."""
        user = self._spec.user or str(self._config.get("User") or "")
        return user.partition(":")[0] in ("", "0", "root")

    @property
    def _files(self) -> str:
        """The name of the image with the container's files, made when its options change."""
        return f"localhost/{self._container}:files"

    def _has_files(self) -> bool:
        """Whether the image with the container's files exists."""
        return find_config(self._engine, self._files) is not None

    def _options(self) -> list[str]:
        known = {str(item).partition("=")[0] for item in self._config.get("Env") or ()}
        env = {name: text for name, text in _DEFAULTS.items() if name not in known} | dict(
            self._spec.env
        )
        options = self._common_options(self._spec.network or self._limits.network)
        options += ["--cap-drop", "ALL", "--shm-size", f"{self._limits.tmp_mb}m"]
        # Only for root: Podman gives added capabilities to any user, as ambient ones.
        for capability in _CAPABILITIES if self.can_change_all else ():
            options += ["--cap-add", capability]
        if self._spec.user is not None:
            options += ["--user", self._spec.user]
        for name, text in env.items():
            options += ["--env", f"{name}={text}"]
        # The server enters the workspace itself: commands may have removed it before a new start.
        return [*options, "--workdir", "/"]

    def _mounts(self) -> list[str]:
        """See `DockerSandbox`; includes the Python that the server runs in."""
        mounts = {at: path for path, at in inside_python().mounts}
        if self._extras is not None:
            mounts |= self._extras.binds
        return [item for at, path in mounts.items() for item in ("--volume", f"{path}:{at}:ro")]

    def _state(self) -> Any:
        done = ask_engine(self._engine, ["container", "inspect", self._container])
        if done.returncode != 0:
            return None
        return orjson.loads(done.stdout)[0]

    def _ask(self, *arguments: str, fails: bool = False) -> None:
        """Run a command of the engine; raise `SandboxError` if it fails, unless `fails`."""
        done = ask_engine(self._engine, arguments)
        if not fails:
            self._check(arguments[0], done)

    def _check(self, command: str, done: CompletedProcess[bytes]) -> None:
        if done.returncode != 0:
            raise SandboxError(f"sandbox {self._engine}: {command}: {error_text(done)}")
