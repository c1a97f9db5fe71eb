"""Docker or Podman, asked through its command line: images and containers."""

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

from batch_trajectories.basics.process import locked
from batch_trajectories.basics.text import in_a_line
from toolsets.images.names import ImageError
from toolsets.sandbox.base import Pull, SandboxError

RUN_LABEL = "batch-trajectories.run"
"""The label of containers that names their run."""

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
"""What the command line needs of the environment to find the engine; the container gets nothing."""
_LAYOUT = "built"
"""The layout for images that were built, in a directory of images."""
_MAX_RUN_ROOT = 50
"""Podman reads a longer one from storage.conf, and refuses it as `--runroot`, which is how its own
clean-up after a container gets it; seen with 4.3."""
_TIMEOUT_S = 120
_PULL_TIMEOUT_S = 3600


def docker_problem(image: str | None, engine: str = "docker") -> str | None:
    """Return None where the engine answers and has the image, else what to do about it.

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
        return f"sandbox docker: the engine does not answer: {words_of(done)}"
    return f"sandbox docker: image {image!r}: {words_of(done)} ({engine} pull {image}?)"


def engine_warning(engine: str) -> str | None:
    """What makes the engine slow, in words for the user; None if nothing is known."""
    run_root = ""
    of_podman = "{{.Store.RunRoot}}\n{{.Store.GraphDriverName}}"
    done = ask_engine(engine, ["info", "--format", of_podman])
    if done.returncode == 0:
        run_root, _, driver = done.stdout.decode().strip().partition("\n")
    else:  # that of Docker
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
    """The configuration of an image and its digest; it is pulled where it is missing and may be.

    One process of this user pulls at a time. Raises `ImageError` with the engine's words.
    """
    config = config_of(engine, image)
    if config is None and pull == "missing":
        with locked(_lock_of(image)):
            config = config_of(engine, image)
            if config is None:
                done = ask_engine(engine, ["pull", "--quiet", image], timeout_s=_PULL_TIMEOUT_S)
                if done.returncode != 0:
                    raise ImageError(f"image {image!r} cannot be pulled: {words_of(done)}")
                config = config_of(engine, image)
    if config is None:
        raise ImageError(f"image {image!r}: {engine} does not have it (--pull=missing pulls it)")
    return config


def image_digests(engine: str) -> dict[str, str]:
    """The digests of the configurations of all images that the engine has, by `full_name`."""
    from toolsets.images.names import full_name  # only where images are saved

    named = "{{.ID}} {{.Repository}}:{{.Tag}}"
    done = ask_engine(engine, ["images", "--no-trunc", "--format", named])
    if done.returncode != 0:
        raise SandboxError(f"sandbox {engine}: images: {words_of(done)}")
    listed = (line.partition(" ") for line in done.stdout.decode().splitlines())
    return {full_name(name): _digest(id) for id, _, name in listed}


def build_image(
    engine: str, image: str, directory: Path, dockerfile: Path, *, timeout_s: float
) -> None:
    """Build an image, unless the engine has it. Raises `ImageError` with the engine's words."""
    if config_of(engine, image) is not None:
        return
    arguments = ["build", "--tag", image, "--file", str(dockerfile), str(directory)]
    try:
        done = ask_engine(engine, arguments, timeout_s=timeout_s)
    except SandboxError as error:
        raise ImageError(str(error)) from error
    if done.returncode != 0:
        raise ImageError(f"{dockerfile}: {engine} cannot build it: {words_of(done)}")


def save_image(engine: str, image: str, directory: Path) -> None:
    """Add an image of the engine to the OCI layout in a directory of images.

    Does nothing where one there has this name. Raises `ImageError` with the engine's words.
    """
    from toolsets.images.archives import add_to_layout  # they read archives, which few runs need
    from toolsets.images.store import ImageStore

    def save(archive: Path) -> None:
        arguments = ["save", "--output", str(archive), image]
        done = ask_engine(engine, arguments, timeout_s=_PULL_TIMEOUT_S)
        if done.returncode != 0:
            raise ImageError(f"image {image!r}: {engine} cannot save it: {words_of(done)}")

    try:
        ImageStore(directory).find(image)
    except ImageError:
        layout = directory if (directory / "index.json").is_file() else directory / _LAYOUT
        _, digest = image_config(engine, image, "never")
        add_to_layout(layout, image, digest, save)


def config_of(engine: str, image: str) -> tuple[dict[str, Any], str] | None:
    done = ask_engine(engine, ["image", "inspect", "--format", "{{.Id}} {{json .Config}}", image])
    if done.returncode != 0:
        return None
    digest, _, raw = done.stdout.partition(b" ")
    config = orjson.loads(raw)
    return config if isinstance(config, dict) else {}, _digest(digest.decode())


def _digest(text: str) -> str:
    """As Docker writes it; Podman leaves the name of the hash out."""
    return text if ":" in text else f"sha256:{text}"


def _lock_of(image: str) -> Path:
    """The file whose lock a process of this user has while it pulls an image."""
    directory = Path(tempfile.gettempdir()) / f"batch-trajectories-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory / f"{hashlib.sha256(image.encode()).hexdigest()[:32]}.lock"


def engine_program(engine: str) -> str:
    if (program := shutil.which(engine)) is None:
        raise SandboxError(f"the sandbox is gone: {engine} was not found; {_INSTALL}")
    return program


def engine_environment() -> dict[str, str]:
    """The environment in which the engine is asked, for every purpose the same."""
    return {name: os.environ[name] for name in _ENGINE if name in os.environ}


def ask_engine(
    engine: str, arguments: Sequence[str], timeout_s: float = _TIMEOUT_S
) -> subprocess.CompletedProcess[bytes]:
    return run_program([engine_program(engine), *arguments], f"sandbox {engine}", timeout_s)


def run_program(
    argv: Sequence[str], name: str, timeout_s: float
) -> subprocess.CompletedProcess[bytes]:
    """Run the engine, or what it runs itself; raises `SandboxError`, which begins with `name`."""
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


def words_of(done: subprocess.CompletedProcess[bytes]) -> str:
    return in_a_line(done.stderr.decode(errors="replace")) or "it said nothing"
