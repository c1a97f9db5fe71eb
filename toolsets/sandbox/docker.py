"""Commands run in a container of their own, from an image that the run or the row names.

The engine, Docker or Podman, is asked through its command line. A container around a directory of
this machine is removed when its sandbox stops; its image needs `python3`. A container whose own
files are the workspace is kept, stopped, until its conversation has ended.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import orjson

from batch_trajectories.basics.locked import locked
from toolsets.images.image_error import ImageError
from toolsets.sandbox.base import Limits, SandboxError
from toolsets.sandbox.cgroup import Group
from toolsets.sandbox.channel import Launch
from toolsets.sandbox.image import ImageSpec
from toolsets.sandbox.inside.boot import BOOT
from toolsets.sandbox.programs import inside_python
from toolsets.sandbox.served import ServedSandbox
from toolsets.workspace.workspace import Workspace

Pull = Literal["never", "missing"]

HOME = "/workspace"

_INSTALL = "install Docker, or Podman (--container_engine=podman)"
_ENGINE = (
    *("PATH", "HOME", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME"),
    *("DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"),
    *("CONTAINER_HOST", "CONTAINERS_CONF", "CONTAINERS_STORAGE_CONF", "STORAGE_DRIVER"),
    *("CONTAINERS_REGISTRIES_CONF", "REGISTRY_AUTH_FILE"),
)
"""What the command line needs of the environment to find the engine; the container gets nothing."""
_LAYOUT = "built"
"""The layout for images that were built, in a directory of images."""
_RUN_LABEL = "batch-trajectories.run"
_TIMEOUT_S = 120
_PULL_TIMEOUT_S = 3600
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID")
_DEFAULTS = {"LANG": "C.UTF-8", "TERM": "dumb", "MPLBACKEND": "Agg"}


class DockerSandbox(ServedSandbox):
    """Runs a task's commands in one container around the workspace.

    The container has no network unless that is allowed, no capabilities, limited memory and
    processes, and is removed when it is stopped or this process dies: its server ends with its
    standard input. Commands run as the user of this process, so that the workspace stays theirs.
    """

    name = "docker"
    home = HOME
    watches_memory = False
    """The engine does."""

    def __init__(
        self, workspace: Workspace, limits: Limits, *, image: str, engine: str = "docker"
    ) -> None:
        """`image` is one that the engine has; it is not pulled."""
        super().__init__(workspace, limits)
        self._image = image
        self._engine = engine

    def group(self) -> Group | None:
        """The engine limits processes and memory."""
        return None

    def launch(self, argv: Sequence[str], stack: ExitStack) -> Launch:
        """See `ServedSandbox`."""
        program = _program(self._engine)
        options = ["run", "--rm", "--interactive", "--init", "--pull", "never"]
        options += [*_limits(self._limits, self._limits.network), "--cap-drop", "ALL"]
        options += [
            *("--user", f"{os.getuid()}:{os.getgid()}"),
            *("--tmpfs", f"/tmp:rw,exec,size={self._limits.tmp_mb}m"),
            *("--volume", f"{self._workspace.root}:{HOME}", "--workdir", HOME),
            *("--env", f"HOME={HOME}", "--env", "LANG=C.UTF-8", "--env", "MPLBACKEND=Agg"),
            *("--entrypoint", ""),
        ]
        return Launch(
            argv=[program, *options, self._image, *argv], env=_engine_environment(), cwd="/"
        )


class DockerImageSandbox(DockerSandbox):
    """Runs a task's commands in a container whose own files are the workspace.

    Commands run as the image's user; root has the capabilities that package managers need, others
    have none. The server runs in the Python of this machine, which the container sees read-only, so
    the image needs none.
    """

    has_own_python = True
    """Cells run in the image's Python, with the packages that the image has."""
    is_continued = False
    keeps_its_size = True
    """What the image has in the workspace does not count."""
    user_home = None

    def __init__(
        self,
        workspace: Workspace,
        limits: Limits,
        *,
        spec: ImageSpec,
        engine: str,
        run: str,
        config: Mapping[str, Any],
        digest: str,
    ) -> None:
        """`run` names the run among all on this machine; `config` and `digest` are the image's."""
        super().__init__(workspace, limits, image=spec.reference, engine=engine)
        self._spec = spec
        self._run = run
        self._config = config
        self.image_digest = digest
        self.home = spec.workdir or str(config.get("WorkingDir") or "/")
        self._container = f"bt-{run}-{_plain(workspace.root.name)}"

    def launch(self, argv: Sequence[str], stack: ExitStack) -> Launch:
        """See `ServedSandbox`."""
        started = [_program(self._engine), "start", "--attach", "--interactive", self._container]
        return Launch(argv=started, env=_engine_environment(), cwd="/")

    def is_kept(self) -> bool:
        """See `ImageSandbox`."""
        if not self._workspace.root.exists():
            return False
        return self._state() is not None or self._has_files()

    def make(self) -> None:
        """Create the container, unless there is one.

        One with other options, as a check may have, is created from an image of its files.
        """
        self._workspace.make()
        options = self._options()
        digest = hashlib.sha256(orjson.dumps(options)).hexdigest()
        state = self._state()
        self.is_continued = state is not None
        if state is not None and state["Config"]["Labels"].get(f"{_RUN_LABEL}.options") == digest:
            if state["State"]["Running"]:  # by a process that was killed a moment ago
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
        labels = {_RUN_LABEL: self._run, f"{_RUN_LABEL}.options": digest}
        named = [item for pair in labels.items() for item in ("--label", "=".join(pair))]
        self._ask(
            *("create", "--interactive", "--pull", "never", "--name", self._container),
            *(*named, *options, "--entrypoint", argv[0], image, *argv[1:]),
        )

    def discard(self) -> None:
        """See `ImageSandbox`."""
        self._ask("rm", "--force", "--volumes", self._container, fails=True)
        self._ask("rmi", "--force", self._files, fails=True)

    def layer_mark(self, path: str) -> str | None:
        """See `ImageSandbox`: the layer is the engine's."""
        del path
        return None

    @property
    def entrypoint(self) -> tuple[str, ...]:
        """See `ServedSandbox`."""
        found = self._config.get("Entrypoint") if self._spec.starts_entrypoint else None
        return tuple(map(str, found or ()))

    @property
    def can_change_all(self) -> bool:
        """See `ImageSandbox`; who else the image calls its root only the engine knows."""
        user = self._spec.user or str(self._config.get("User") or "")
        return user.partition(":")[0] in ("", "0", "root")

    @property
    def _files(self) -> str:
        """The image of its files, while it gets other options, and from then on."""
        return f"localhost/{self._container}:files"

    def _has_files(self) -> bool:
        """Whether there is that image: a kill may have left it without a container."""
        return _config_of(self._engine, self._files) is not None

    def _options(self) -> list[str]:
        known = {str(item).partition("=")[0] for item in self._config.get("Env") or ()}
        env = {name: text for name, text in _DEFAULTS.items() if name not in known} | dict(
            self._spec.env
        )
        options = _limits(self._limits, self._spec.network or self._limits.network)
        options += ["--cap-drop", "ALL", "--shm-size", f"{self._limits.tmp_mb}m"]
        # Podman gives added ones to any user, as ambient capabilities.
        for capability in _CAPABILITIES if self.can_change_all else ():
            options += ["--cap-add", capability]
        if self._spec.user is not None:
            options += ["--user", self._spec.user]
        for source, target in inside_python().mounts:
            options += ["--volume", f"{source}:{target}:ro"]
        for name, text in env.items():
            options += ["--env", f"{name}={text}"]
        # The server goes to the workspace, which commands may have removed when it starts again.
        return [*options, "--workdir", "/"]

    def _state(self) -> Any:
        done = _ask(self._engine, ["container", "inspect", self._container])
        if done.returncode != 0:
            return None
        return orjson.loads(done.stdout)[0]

    def _ask(self, *arguments: str, fails: bool = False) -> None:
        """Ask the engine; raises `SandboxError` with its words unless it may fail."""
        done = _ask(self._engine, arguments)
        if done.returncode != 0 and not fails:
            raise SandboxError(f"sandbox {self._engine}: {arguments[0]}: {_words(done)}")


def docker_problem(image: str | None, engine: str = "docker") -> str | None:
    """Return None where the engine answers and has the image, else what to do about it.

    With `image` None only the engine is asked.
    """
    if shutil.which(engine) is None:
        return f"sandbox docker: the program {engine} was not found; {_INSTALL}"
    asked = ["version"]
    if image is not None:
        asked = ["image", "inspect", "--format", "{{.Id}}", image]
    try:
        done = _ask(engine, asked)
    except SandboxError as error:
        return str(error)
    if done.returncode == 0:
        return None
    if image is None:
        return f"sandbox docker: the engine does not answer: {_words(done)}"
    return f"sandbox docker: image {image!r}: {_words(done)} ({engine} pull {image}?)"


def engine_warning(engine: str) -> str | None:
    """What makes the engine slow, in words for the user; None if nothing is known."""
    for field in ("{{.Driver}}", "{{.Store.GraphDriverName}}"):  # Docker's and Podman's
        done = _ask(engine, ["info", "--format", field])
        if done.returncode == 0 and done.stdout.strip() == b"vfs":
            return (
                f"warning: {engine} stores images with `vfs`, which copies the whole image for "
                "each conversation; configure `overlay` storage"
            )
    return None


def image_config(engine: str, image: str, pull: Pull) -> tuple[dict[str, Any], str]:
    """The configuration of an image and its digest; it is pulled where it is missing and may be.

    One process of this user pulls at a time. Raises `ImageError` with the engine's words.
    """
    found = _config_of(engine, image)
    if found is None and pull == "missing":
        with locked(_lock_of(image)):
            found = _config_of(engine, image)
            if found is None:
                done = _ask(engine, ["pull", "--quiet", image], timeout_s=_PULL_TIMEOUT_S)
                if done.returncode != 0:
                    raise ImageError(f"image {image!r} cannot be pulled: {_words(done)}")
                found = _config_of(engine, image)
    if found is None:
        raise ImageError(f"image {image!r}: {engine} does not have it (--pull=missing pulls it)")
    return found


def image_digests(engine: str) -> dict[str, str]:
    """The digests of the configurations of all images that the engine has, by `full_name`."""
    from toolsets.images.names import full_name  # only where images are saved

    done = _ask(engine, ["images", "--no-trunc", "--format", "{{.ID}} {{.Repository}}:{{.Tag}}"])
    if done.returncode != 0:
        raise SandboxError(f"sandbox {engine}: images: {_words(done)}")
    listed = (line.partition(" ") for line in done.stdout.decode().splitlines())
    return {full_name(name): _digest(found) for found, _, name in listed}


def build_image(
    engine: str, image: str, directory: Path, dockerfile: Path, *, timeout_s: float
) -> None:
    """Build an image, unless the engine has it. Raises `ImageError` with the engine's words."""
    if _config_of(engine, image) is not None:
        return
    asked = ["build", "--tag", image, "--file", str(dockerfile), str(directory)]
    try:
        done = _ask(engine, asked, timeout_s=timeout_s)
    except SandboxError as error:
        raise ImageError(str(error)) from error
    if done.returncode != 0:
        raise ImageError(f"{dockerfile}: {engine} cannot build it: {_words(done)}")


def save_image(engine: str, image: str, directory: Path) -> None:
    """Add an image of the engine to the OCI layout in a directory of images.

    Does nothing where one there has this name. Raises `ImageError` with the engine's words.
    """
    from toolsets.images.layouts import add_to_layout  # they read archives, which few runs need
    from toolsets.images.store import ImageStore

    def save(archive: Path) -> None:
        asked = ["save", "--output", str(archive), image]
        done = _ask(engine, asked, timeout_s=_PULL_TIMEOUT_S)
        if done.returncode != 0:
            raise ImageError(f"image {image!r}: {engine} cannot save it: {_words(done)}")

    try:
        ImageStore(directory).find(image)
    except ImageError:
        layout = directory if (directory / "index.json").is_file() else directory / _LAYOUT
        _, digest = image_config(engine, image, "never")
        add_to_layout(layout, image, digest, save)


def run_label(run_dir: Path) -> str:
    """The name of a run among the containers of this machine."""
    return hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:12]


def remove_containers(engine: str, run_dir: Path) -> int:
    """Remove containers of a run whose workspaces are gone; return how many there were."""
    run = run_label(run_dir)
    listed = ["ps", "--all", "--filter", f"label={_RUN_LABEL}={run}", "--format", "{{.Names}}"]
    done = _ask(engine, listed)
    if done.returncode != 0:
        raise SandboxError(f"sandbox {engine}: ps: {_words(done)}")
    workspaces = run_dir / "workspaces"
    if not workspaces.is_dir():
        return 0
    kept = {_plain(path.name) for path in workspaces.iterdir()}
    names = done.stdout.decode().split()
    left = [name for name in names if name.removeprefix(f"bt-{run}-") not in kept]
    for name in left:
        _ask(engine, ["rm", "--force", "--volumes", name])
        _ask(engine, ["rmi", "--force", f"localhost/{name}:files"])
    prefix = f"localhost/bt-{run}-"
    listed = ["images", "--filter", f"reference={prefix}*", "--format", "{{.Repository}}"]
    for image in _ask(engine, listed).stdout.decode().split():
        if image.removeprefix(prefix) not in kept:
            _ask(engine, ["rmi", "--force", f"{image}:files"])
    return len(left)


def _plain(name: str) -> str:
    """The name of a workspace as part of the name of an image."""
    return name.replace(".", "-")


def _config_of(engine: str, image: str) -> tuple[dict[str, Any], str] | None:
    done = _ask(engine, ["image", "inspect", "--format", "{{.Id}} {{json .Config}}", image])
    if done.returncode != 0:
        return None
    digest, _, raw = done.stdout.partition(b" ")
    config = orjson.loads(raw)
    return config if isinstance(config, dict) else {}, _digest(digest.decode())


def _digest(found: str) -> str:
    """As Docker writes it; Podman leaves the name of the hash out."""
    return found if ":" in found else f"sha256:{found}"


def _lock_of(image: str) -> Path:
    """The file whose lock a process of this user has while it pulls an image."""
    directory = Path(tempfile.gettempdir()) / f"batch-trajectories-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory / f"{hashlib.sha256(image.encode()).hexdigest()[:32]}.lock"


def _limits(limits: Limits, network: bool) -> list[str]:
    # An engine refuses more than the machine has.
    cpus = () if limits.cpus is None else ("--cpus", f"{min(limits.cpus, os.cpu_count() or 1):g}")
    return [
        *cpus,
        *("--network", "bridge" if network else "none"),
        *("--security-opt", "no-new-privileges"),
        *("--memory", f"{limits.memory_mb}m", "--pids-limit", str(limits.processes)),
    ]


def _program(engine: str) -> str:
    if (found := shutil.which(engine)) is None:
        raise SandboxError(f"the sandbox is gone: {engine} was not found; {_INSTALL}")
    return found


def _engine_environment() -> dict[str, str]:
    """The environment in which the engine is asked, for every purpose the same."""
    return {name: os.environ[name] for name in _ENGINE if name in os.environ}


def _ask(
    engine: str, arguments: Sequence[str], timeout_s: float = _TIMEOUT_S
) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            [_program(engine), *arguments],
            env=_engine_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"sandbox {engine}: {error}") from error


def _words(done: subprocess.CompletedProcess[bytes]) -> str:
    said = done.stderr.decode(errors="replace").strip().splitlines()
    return said[-1][:300] if said else "it said nothing"
