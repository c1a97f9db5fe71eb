"""Asks Docker or Podman for images and containers through its command line."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from batch_trajectories.basics.process import lock_file
from batch_trajectories.basics.text import single_line
from toolsets.images.names import ImageError
from toolsets.sandbox import Pull
from toolsets.sandbox.base import SandboxError

RUN_LABEL = "batch-trajectories.run"
"""The key of the label that names the run of a container."""

_INSTALL = "install Docker, or Podman (--container_engine=podman)"
_ENGINE = (
    "PATH",
    "HOME",
    "TMPDIR",
    "XDG_RUNTIME_DIR",
    "XDG_CONFIG_HOME",
    "XDG_DATA_HOME",
    "DOCKER_HOST",
    "DOCKER_CONFIG",
    "DOCKER_CONTEXT",
    "DOCKER_TLS_VERIFY",
    "DOCKER_CERT_PATH",
    "CONTAINER_HOST",
    "CONTAINERS_CONF",
    "CONTAINERS_STORAGE_CONF",
    "STORAGE_DRIVER",
    "CONTAINERS_REGISTRIES_CONF",
    "REGISTRY_AUTH_FILE",
)
"""Environment variables that the command line needs; the container gets none of them."""
_LAYOUT = "built"
"""The name of the layout for built images, in a directory of images."""
_MAX_RUN_ROOT = 50
"""Maximum length of a run root that Podman accepts as `--runroot`."""
# Podman reads a longer one from storage.conf. But its clean-up after a container gets the run root
# as `--runroot`, and then fails. Seen with 4.3.
_TIMEOUT_S = 120
_PULL_TIMEOUT_S = 3600


def docker_problem(image: str | None, engine: str = "docker") -> str | None:
    """Return None if the engine works and has the image, else what to do.

    With `image` None only the engine is asked.
    """
    if shutil.which(engine) is None:
        return f"sandbox docker: the program {engine} was not found; {_INSTALL}"
    arguments = ["version"]
    if image is not None:
        arguments = ["image", "inspect", "--format", "{{.Id}}", image]
    try:
        done = ask_engine(engine, arguments)
    except SandboxError as error:
        return str(error)
    if done.returncode == 0:
        return None
    if image is None:
        return f"sandbox docker: the engine does not answer: {error_text(done)}"
    return f"sandbox docker: image {image!r}: {error_text(done)} ({engine} pull {image}?)"


def engine_warning(engine: str) -> str | None:
    """Return why the engine is slow, for the user; None if no reason is known."""
    run_root = ""
    podman_format = "{{.Store.RunRoot}}\n{{.Store.GraphDriverName}}"
    done = ask_engine(engine, ["info", "--format", podman_format])
    if done.returncode == 0:
        run_root, _, driver = done.stdout.decode().strip().partition("\n")
    else:  # Docker does not know this format
        driver = ask_engine(engine, ["info", "--format", "{{.Driver}}"]).stdout.decode().strip()
    if len(run_root) > _MAX_RUN_ROOT:
        return (
            f"warning: the run root of {engine} has more than {_MAX_RUN_ROOT} characters "
            f"({run_root}), so {engine} cannot clean up after its containers, and each takes "
            "seconds to end; set a shorter `runroot` in storage.conf"
        )
    if driver == "vfs":
        return (
            f"warning: {engine} stores images with `vfs`, which copies the whole image for "
            "each conversation; configure `overlay` storage"
        )
    return None


def image_config(engine: str, image: str, pull: Pull) -> tuple[dict[str, Any], str]:
    """Return the configuration of an image and its digest; pull it as `pull` says.

    Only one process of this user pulls at a time. Raises `ImageError` with the engine's message.
    """
    config = find_config(engine, image)
    if config is None and pull == "missing":
        with lock_file(_pull_lock_path(image)):
            config = find_config(engine, image)
            if config is None:
                done = ask_engine(engine, ["pull", "--quiet", image], timeout_s=_PULL_TIMEOUT_S)
                if done.returncode != 0:
                    raise ImageError(f"image {image!r} cannot be pulled: {error_text(done)}")
                config = find_config(engine, image)
    if config is None:
        raise ImageError(f"image {image!r}: {engine} does not have it (--pull=missing pulls it)")
    return config


def image_digests(engine: str) -> dict[str, str]:
    """Return the digests of the configurations of all images, by `full_name`."""
    from toolsets.images.names import full_name  # only where images are saved

    named = "{{.ID}} {{.Repository}}:{{.Tag}}"
    done = ask_engine(engine, ["images", "--no-trunc", "--format", named])
    if done.returncode != 0:
        raise SandboxError(f"sandbox {engine}: images: {error_text(done)}")
    listed = (line.partition(" ") for line in done.stdout.decode().splitlines())
    return {full_name(name): _complete_digest(id) for id, _, name in listed}


def build_image(
    engine: str, image: str, directory: Path, dockerfile: Path, *, timeout_s: float
) -> None:
    """Build an image, unless the engine has it. Raises `ImageError` with its message."""
    if find_config(engine, image) is not None:
        return
    arguments = ["build", "--tag", image, "--file", str(dockerfile), str(directory)]
    try:
        done = ask_engine(engine, arguments, timeout_s=timeout_s)
    except SandboxError as error:
        raise ImageError(str(error)) from error
    if done.returncode != 0:
        raise ImageError(f"{dockerfile}: {engine} cannot build it: {error_text(done)}")


def save_image(engine: str, image: str, directory: Path) -> None:
    """Add an image of the engine to the OCI layout in a directory of images.

    Does nothing if an image there has this name. Raises `ImageError` with the engine's message.
    """
    from toolsets.images.archives import add_to_layout  # they read archives, which few runs need
    from toolsets.images.store import ImageStore

    def save(archive: Path) -> None:
        arguments = ["save", "--output", str(archive), image]
        done = ask_engine(engine, arguments, timeout_s=_PULL_TIMEOUT_S)
        if done.returncode != 0:
            raise ImageError(f"image {image!r}: {engine} cannot save it: {error_text(done)}")

    try:
        ImageStore(directory).find(image)
    except ImageError:
        layout = directory if (directory / "index.json").is_file() else directory / _LAYOUT
        _, digest = image_config(engine, image, "never")
        add_to_layout(layout, image, digest, save)


def find_config(engine: str, image: str) -> tuple[dict[str, Any], str] | None:
    done = ask_engine(engine, ["image", "inspect", "--format", "{{.Id}} {{json .Config}}", image])
    if done.returncode != 0:
        return None
    digest, _, raw = done.stdout.partition(b" ")
    config = orjson.loads(raw)
    return config if isinstance(config, dict) else {}, _complete_digest(digest.decode())


def _complete_digest(text: str) -> str:
    """Return a digest in Docker's form; Podman leaves out the name of the hash."""
    return text if ":" in text else f"sha256:{text}"


def _pull_lock_path(image: str) -> Path:
    """Return the lock file that a process of this user holds while it pulls an image."""
    directory = Path(tempfile.gettempdir()) / f"batch-trajectories-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory / f"{hashlib.sha256(image.encode()).hexdigest()[:32]}.lock"


def engine_program(engine: str) -> str:
    if (program := shutil.which(engine)) is None:
        raise SandboxError(f"the sandbox is gone: {engine} was not found; {_INSTALL}")
    return program


def engine_environment() -> dict[str, str]:
    """Return the environment for all commands of the engine."""
    return {name: os.environ[name] for name in _ENGINE if name in os.environ}


def ask_engine(
    engine: str, arguments: Sequence[str], timeout_s: float = _TIMEOUT_S
) -> subprocess.CompletedProcess[bytes]:
    return run_program([engine_program(engine), *arguments], f"sandbox {engine}", timeout_s)


def run_program(
    argv: Sequence[str], name: str, timeout_s: float
) -> subprocess.CompletedProcess[bytes]:
    """Run a program; raises `SandboxError` with a message that begins with `name`."""
    try:
        return subprocess.run(
            argv,
            env=engine_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"{name}: {error}") from error


def error_text(done: subprocess.CompletedProcess[bytes]) -> str:
    return single_line(done.stderr.decode(errors="replace")) or "it said nothing"
