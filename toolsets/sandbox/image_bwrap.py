"""Runs commands in an unpacked image, in namespaces of their own by bubblewrap.

All conversations share the image's tree. Changes of a conversation are in a directory of its own
above the tree (an overlay) and last until the workspace is removed. If the kernel mounts no
overlays, each conversation gets a copy of the tree.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Lock
from typing import Literal

from batch_trajectories.basics.errors import HostError
from toolsets.images.bases import find_base, keep_base, remove_bases, remove_work, use_base
from toolsets.images.layers import resolve
from toolsets.images.names import ImageError
from toolsets.images.registry.names import parse_name
from toolsets.images.store import ImageStore, UnpackedImage, find_user
from toolsets.sandbox.base import (
    Extras,
    ImageSpec,
    Limits,
    SandboxError,
    SandboxSettings,
)
from toolsets.sandbox.bwrap import FORK_SERVER, BwrapSandbox, launch
from toolsets.sandbox.channel import Launch
from toolsets.sandbox.fork_servers import SandboxTemplate
from toolsets.sandbox.image_files import ImageSandbox, ImageSandboxes
from toolsets.sandbox.inside.boot import BOOT, make_frame
from toolsets.sandbox.inside.namespaces import MEASURED
from toolsets.sandbox.programs import program
from toolsets.workspace.removal import remove_tree
from toolsets.workspace.workspace import HOME, OPAQUE, TEMPORARY, Workspace

Layering = Literal["overlay", "copy"]

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_EXTRA_FILES_ROOT = "/shown"
"""The directory in which a fork server has the files of the machine that its sandboxes see."""
_MAX_MARKED = 20_000
"""Maximum number of files of a layer that are marked; a comparison takes not much longer."""
_PROBE = ".probe"
_PROBE_TIMEOUT_S = 30
_TRYING = Lock()
_overlay_problems: dict[tuple[Path, Path], str | None] = {}
"""The results of `overlay_problem` for pairs of directories, which need not be tried again."""
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID")


class BwrapImages(ImageSandboxes):
    """Sandboxes in the images of a directory; see `ImageSandboxes`."""

    def __init__(self, settings: SandboxSettings, run_dir: Path) -> None:
        """Keep the settings. Without `settings.images` only `problem` may be called."""
        self._pulls = settings.pull == "missing"
        self._image_store = (
            None if settings.images is None else ImageStore(settings.images, is_filled=self._pulls)
        )
        self._registry = settings.registry
        self._layers = run_dir / "workspaces"

    @property
    def _store(self) -> ImageStore:
        assert self._image_store is not None
        return self._image_store

    def problem(self) -> str | None:
        """See `ImageSandboxes`."""
        if problem := BwrapSandbox.problem(SandboxSettings()):
            return problem
        if self._image_store is None:
            return (
                "--workspace=image with --sandbox=bwrap needs --images=DIR, the images' directory"
            )
        return self._store.problem()

    async def fetch(self, reference: str) -> None:
        """See `ImageSandboxes`."""
        if not self._pulls or await asyncio.to_thread(self._store.has, reference):
            return
        from toolsets.images.registry.pulling import Puller  # most runs pull nothing
        from toolsets.images.registry.settings import RegistrySettings

        settings = self._registry or RegistrySettings()
        async with Puller(self._store.directory, settings) as puller:
            layout = await puller.pull(reference)
        await asyncio.to_thread(self._store.add_fetched, layout)

    def problem_of_image(self, reference: str) -> str | None:
        """See `ImageSandboxes`."""
        try:
            if self._pulls and not self._store.has(reference):
                parse_name(reference)
            else:
                self._store.find(reference)
        except ImageError as error:
            return str(error)
        return None

    def digests(self, references: Collection[str]) -> dict[str, str]:
        """See `ImageSandboxes`."""
        by_name = {}
        for reference in references:
            with suppress(ImageError):
                by_name[reference] = self._store.find(reference).config_digest
        return by_name

    def warning(self) -> str | None:
        """See `ImageSandboxes`."""
        if (why := self._find_problem_of_overlays()) is None:
            return None
        return (
            f"warning: each conversation gets a copy of its image: the kernel mounts no overlays "
            f"for {self._layers} ({why}); use a kernel from 5.11 on and a local file system"
        )

    def has_overlays(self) -> bool:
        """See `ImageSandboxes`."""
        return self._find_problem_of_overlays() is None

    def _find_problem_of_overlays(self) -> str | None:
        self._layers.mkdir(parents=True, exist_ok=True, mode=0o700)
        return _find_overlay_problem(self._layers, self._store.unpacked)

    def trust_overlays(self) -> None:
        """See `ImageSandboxes`."""
        _overlay_problems[self._layers, self._store.unpacked] = None

    def make(
        self, workspace: Workspace, limits: Limits, spec: ImageSpec, extras: Extras | None = None
    ) -> BwrapImageSandbox:
        """See `ImageSandboxes`."""
        image = self._store.unpack(spec.reference)
        return BwrapImageSandbox(workspace, limits, image=image, spec=spec, extras=extras)

    def remove_leftovers(self) -> int:
        """Remove bases that no conversation uses; returns 0, as there are no containers."""
        if self._layers.exists():
            remove_bases(self._layers)
        return 0


class BwrapImageSandbox(BwrapSandbox, ImageSandbox):
    """Runs a task's commands in an image, as the user of the image.

    A command sees the image with the changes of its own conversation, and nothing of this machine.
    Only one user exists inside: all files seem to be its own. Root of an image keeps the
    capabilities that package managers need, over its own files only.
    """

    lies_in_workspace = True
    has_own_python = True
    """Cells run in the image's Python, with the packages that the image has."""
    is_continued = False
    can_change_all = True
    memory_dir = "/dev/shm"

    def __init__(
        self,
        workspace: Workspace,
        limits: Limits,
        *,
        image: UnpackedImage,
        spec: ImageSpec,
        extras: Extras | None = None,
    ) -> None:
        """`workspace` keeps the changes of the conversation. Raises `ImageError`.

        HOME is that of the image's user, whatever `extras` say.
        """
        super().__init__(workspace, limits, extras)
        self._image = image
        self.image_digest = image.digest
        self.is_continued = (workspace.root / "upper").exists()
        self._layering = find_layering(workspace.root.parent, image.path.parent)
        self._starts_entrypoint = spec.starts_entrypoint
        self._network = spec.network or limits.network
        self._user = find_user(image, spec.user)
        self.home = _workdir(image, spec.workdir)
        self._env = {
            "PATH": _PATH,
            "HOME": self._user.home,
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "USER": self._user.name,
            "MPLBACKEND": "Agg",
            **image.env,
            **spec.env,
        }
        self.user_home = self._env["HOME"]

    @property
    def entrypoint(self) -> tuple[str, ...]:
        """See `ServedSandbox`."""
        return self._image.entrypoint if self._starts_entrypoint else ()

    @property
    def measured(self) -> str:
        """The directory with the changes of the conversation; the image itself does not count."""
        return f"/proc/self/fd/{MEASURED}"

    def launch(self, argv: Sequence[str], stack: ExitStack) -> Launch:
        """Raise `HostError`: sandboxes in images are always forked."""
        raise HostError("sandboxes cannot be forked here, which images need; see run.log")

    def has_survived(self) -> bool:
        """See `ImageSandbox`."""
        root = self._workspace.root
        base = find_base(root)
        return root.exists() and (base is None or root.with_name(base).exists())

    @property
    def shares_bases(self) -> bool:  # type: ignore[override]
        """See `ImageSandbox`."""
        # An entrypoint changes files at its start, for each conversation.
        return not self.entrypoint and self._layering == "overlay"

    def begin_from_base(self, base: str) -> bool:
        """See `ImageSandbox`."""
        self._workspace.make()
        return use_base(self._workspace.root, base)

    def save_base(self, base: str) -> None:
        """See `ImageSandbox`."""
        keep_base(self._workspace.root, base)

    @property
    def is_made_at_once(self) -> bool:
        """See `ImageSandbox`."""
        return self._layering == "overlay"

    def make(self) -> None:
        """See `ImageSandbox`."""
        if self._layering == "copy":
            self._workspace.make()
            _copy(self._image.rootfs, self._workspace.root)

    def discard(self) -> None:
        """Remove what the kernel left beside the layer; see `ImageSandbox`."""
        remove_work(self._workspace.root)

    def layer_mark(self, path: str) -> str | None:
        """See `ImageSandbox`."""
        if self._layering == "copy":
            return None
        digest = hashlib.sha256()
        try:
            upper = self._workspace.root / "upper"
            if upper.exists():  # else no sandbox has begun
                _mark_layer(upper, path, digest.update)
        except OSError:
            return None
        return digest.hexdigest()

    @property
    def origin(self) -> Hashable | None:
        """See `ImageSandbox`."""
        if (layers := self.layers) is None or self.entrypoint:
            return None
        with suppress(FileNotFoundError), os.scandir(layers[0]) as own:
            if next(own, None) is not None:
                return None
        return (*layers[1:], self.home, self._user, *sorted(self._env.items()))

    @property
    def layers(self) -> Sequence[Path] | None:
        """See `ImageSandbox`."""
        if self._layering == "copy":
            return None
        root = self._workspace.root
        base = find_base(root)
        below = [] if base is None else [root.with_name(base) / "upper"]
        return [root / "upper", *below, self._image.rootfs]

    def template(self) -> SandboxTemplate:
        """See `ServedSandbox`."""
        layers, network = self._workspace.root.parent, self._network
        images = self._image.path.parent
        binds = {} if self._extras is None else self._extras.binds
        # Files beside a layer belong to its conversation. Every fork server sees all layers.
        own = {at for at, path in binds.items() if Path(path).parent == layers}
        shown = tuple((at, path) for at, path in binds.items() if at not in own)
        return SandboxTemplate(
            key=("bwrap-image", layers, images, network, shown),
            is_confined=True,
            is_tried=False,  # `overlay_problem` has tried it
            launch=lambda argv, stack: _launch(
                argv, stack, network=network, layers=layers, images=images, shown=shown
            ),
            request={
                "env": self._env,
                "workspace": self._workspace.root.name,
                "tmp_bytes": self._limits.tmp_mb << 20,
                "network": network,
                "image": {
                    "tree": str(self._image.rootfs.relative_to(images)),
                    "base": find_base(self._workspace.root),
                    "is_copied": self._layering == "copy",
                    "workdir": self.home,
                    "uid": self._user.uid,
                    "gid": self._user.gid,
                    "shown": {
                        at: f"{HOME}/{Path(path).name}" if at in own else f"{_EXTRA_FILES_ROOT}{at}"
                        for at, path in binds.items()
                    },
                },
            },
        )


def _mark_layer(upper: Path, path: str, add: Callable[[bytes], None]) -> None:
    """Add the state of the files that a layer has in a directory; raises `OSError`.

    No link is followed.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    left = _MAX_MARKED
    with ExitStack() as stack:

        def open_directory(name: str, parent: int | None) -> int:
            fd = os.open(name, flags, dir_fd=parent)
            stack.callback(os.close, fd)
            return fd

        fd = open_directory(str(upper), None)
        for name in filter(None, path.split("/")):
            try:
                fd = open_directory(name, fd)
            except FileNotFoundError:
                return
            # The mark of a directory that was made anew: it hides the image's.
            with suppress(OSError):
                add(b"opaque" + os.getxattr(fd, OPAQUE))
        for root, directories, names, at in os.fwalk(".", dir_fd=fd):
            directories[:] = sorted(name for name in directories if name != ".git")
            for name in (*directories, *sorted(names)):
                status = os.lstat(name, dir_fd=at)
                # No command can set the time of the status (ctime).
                numbers = (*status[:2], status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                add(repr((root, name, numbers)).encode())
                left -= 1
                if left < 0:
                    raise OSError(errno.E2BIG, "too many files to be marked")


def find_layering(layers: Path, images: Path) -> Layering:
    """Return how conversations with changes in `layers` share the trees in `images`."""
    return "overlay" if _find_overlay_problem(layers, images) is None else "copy"


def _find_overlay_problem(layers: Path, images: Path) -> str | None:
    """Return the result of `overlay_problem`, from the first time that these were tried."""
    with _TRYING:  # all conversations of a worker ask at once
        if (layers, images) not in _overlay_problems:
            _overlay_problems[layers, images] = overlay_problem(layers, images)
        return _overlay_problems[layers, images]


def overlay_problem(layers: Path, images: Path) -> str | None:
    """Try to mount an overlay; return why that fails, or None if it works."""
    # fuse-overlayfs is no alternative: its own root would become the file system that it serves, so
    # a command that sets an attribute of a file would hang.
    with ExitStack() as stack:
        try:
            tree = images / _PROBE
            tree.mkdir(mode=0o700, exist_ok=True)
            layer = Path(tempfile.mkdtemp(dir=layers, prefix=TEMPORARY))
            stack.callback(remove_tree, layer)
            probe = _launch(
                ["python3", "-I", "-S", "-c", BOOT, "0", tree.name, layer.name],
                stack,
                network=False,
                layers=layers,
                images=images,
            )
            done = subprocess.run(
                probe.argv,
                env=dict(probe.env),
                cwd=probe.cwd,
                pass_fds=tuple(probe.pass_fds),
                input=make_frame(program("namespaces")),
                capture_output=True,
                timeout=_PROBE_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired, SandboxError) as error:
            return str(error)
    if done.returncode == 0:
        return None
    errors = done.stderr.decode(errors="replace").strip().splitlines()
    return (errors or ["it failed without a message"])[-1][:300]


def _launch(
    argv: Sequence[str],
    stack: ExitStack,
    *,
    network: bool,
    layers: Path,
    images: Path,
    shown: Sequence[tuple[str, str]] = (),
) -> Launch:
    options = [*FORK_SERVER, "--dir", "/tmp", "--ro-bind", str(images), "/images"]
    for at, path in shown:
        options += ["--ro-bind", path, f"{_EXTRA_FILES_ROOT}{at}"]
    for name in _CAPABILITIES:
        options += ["--cap-add", f"CAP_{name}"]
    return launch(argv, stack, network, options, str(layers))


def _workdir(image: UnpackedImage, given: str | None) -> str:
    """Return the path of the workspace; raises `ImageError` if it cannot be a directory."""
    workdir = given or image.workdir
    names = [name for name in workdir.split("/") if name not in ("", ".")]
    if not workdir.startswith("/") or ".." in names or "\0" in workdir:
        raise ImageError(f"the working directory {workdir!r} must be an absolute path")
    path = image.rootfs / resolve(image.rootfs, names)
    if os.path.lexists(path) and not path.is_dir():
        raise ImageError(f"the working directory {workdir!r} of the image is not a directory")
    return "/" + "/".join(names)


def _copy(tree: Path, layer: Path) -> None:
    """Copy the tree of an image for one conversation, completely or not at all."""
    if (layer / "upper").exists():
        return
    making = layer / "copying"
    remove_tree(making)
    try:
        shutil.copytree(tree, making, symlinks=True)
        making.rename(layer / "upper")
    except OSError as error:
        with suppress(OSError):
            remove_tree(making)
        raise SandboxError(f"an image cannot be copied: {error}") from error
