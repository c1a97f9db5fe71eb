"""Commands run in an unpacked image, in namespaces of their own by bubblewrap.

All conversations share the image's tree; what one changes is in a directory of its own above it
(an overlay), which lasts until the workspace is removed. Where the kernel mounts no overlays, each
conversation gets a copy of the tree.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Literal

from batch_trajectories.basics.errors import HostError
from toolsets.images.bases import base_of, keep_base, remove_bases, remove_work, use_base
from toolsets.images.layers import resolve
from toolsets.images.names import ImageError
from toolsets.images.store import ImageStore, UnpackedImage, user_of
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
from toolsets.sandbox.inside.boot import BOOT, framed
from toolsets.sandbox.inside.namespaces import MEASURED
from toolsets.sandbox.programs import program
from toolsets.workspace.removal import remove_tree
from toolsets.workspace.workspace import HOME, OPAQUE, TEMPORARY, Workspace

Layering = Literal["overlay", "copy"]

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SHOWN = "/shown"
"""Where a fork server has what of the machine its sandboxes show."""
_MAX_MARKED = 20_000
"""Files of a layer; a comparison takes not much longer."""
_PROBE = ".probe"
_PROBE_TIMEOUT_S = 30
_TRYING = Lock()
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID")


class BwrapImages(ImageSandboxes):
    """See `ImageSandboxes`: images of a directory."""

    def __init__(self, settings: SandboxSettings, run_dir: Path) -> None:
        """Without a directory of images only `problem` may be asked."""
        self._of_run = None if settings.images is None else ImageStore(settings.images)
        self._run_dir = run_dir

    @property
    def _store(self) -> ImageStore:
        assert self._of_run is not None
        return self._of_run

    def problem(self) -> str | None:
        """See `ImageSandboxes`."""
        if problem := BwrapSandbox.problem(SandboxSettings()):
            return problem
        if self._of_run is None:
            return (
                "--workspace=image with --sandbox=bwrap needs --images=DIR, the images' directory"
            )
        return self._store.problem()

    def problem_of_image(self, reference: str) -> str | None:
        """See `ImageSandboxes`."""
        try:
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
        layers = self._run_dir / "workspaces"
        layers.mkdir(parents=True, exist_ok=True, mode=0o700)
        if layering_of(layers, self._store.unpacked) == "overlay":
            return None
        why = overlay_problem(layers, self._store.unpacked)
        return (
            f"warning: each conversation gets a copy of its image: the kernel mounts no overlays "
            f"for {layers} ({why}); use a kernel from 5.11 on and a local file system"
        )

    def make(
        self, workspace: Workspace, limits: Limits, spec: ImageSpec, extras: Extras | None = None
    ) -> BwrapImageSandbox:
        """See `ImageSandboxes`."""
        image = self._store.unpack(spec.reference)
        return BwrapImageSandbox(workspace, limits, image=image, spec=spec, extras=extras)

    def remove_leftovers(self) -> int:
        """See `ImageSandboxes`: here what several conversations began with."""
        if (layers := self._run_dir / "workspaces").exists():
            remove_bases(layers)
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
        """`workspace` keeps what the conversation changes. Raises `ImageError`.

        HOME is that of the image's user, whatever `extras` say.
        """
        super().__init__(workspace, limits, extras)
        self._image = image
        self.image_digest = image.digest
        self.is_continued = (workspace.root / "upper").exists()
        self._layering = layering_of(workspace.root.parent, image.path.parent)
        self._starts_entrypoint = spec.starts_entrypoint
        self._network = spec.network or limits.network
        self._user = user_of(image, spec.user)
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
        """What the conversation has changed: the image itself does not count."""
        return f"/proc/self/fd/{MEASURED}"

    def launch(self, argv: Sequence[str], stack: ExitStack) -> Launch:
        """Images only run in sandboxes that are forked."""
        raise HostError("sandboxes cannot be forked here, which images need; see run.log")

    def is_kept(self) -> bool:
        """See `ImageSandbox`."""
        root = self._workspace.root
        base = base_of(root)
        return root.exists() and (base is None or root.with_name(base).exists())

    @property
    def shares_bases(self) -> bool:  # type: ignore[override]
        """See `ImageSandbox`: an entrypoint changes files at its start, for each conversation."""
        return not self.entrypoint and self._layering == "overlay"

    def begin_above(self, base: str) -> bool:
        """See `ImageSandbox`."""
        self._workspace.make()
        return use_base(self._workspace.root, base)

    def keep_as(self, base: str) -> None:
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
        """See `ImageSandbox`: what is kept is in the workspace's directory."""
        remove_work(self._workspace.root)

    def layer_mark(self, path: str) -> str | None:
        """See `ImageSandbox`: of files in the layer, what only a change of them changes."""
        if self._layering == "copy":
            return None
        digest = hashlib.sha256()
        try:
            upper = self._workspace.root / "upper"
            if upper.exists():  # or no sandbox has begun
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
        base = base_of(root)
        below = [] if base is None else [root.with_name(base) / "upper"]
        return [root / "upper", *below, self._image.rootfs]

    def template(self) -> SandboxTemplate:
        """See `ServedSandbox`."""
        layers, network = self._workspace.root.parent, self._network
        images = self._image.path.parent
        binds = {} if self._extras is None else self._extras.binds
        # What lies beside a layer is its conversation's own, and every fork server has all layers.
        own = {at for at, path in binds.items() if Path(path).parent == layers}
        shown = tuple((at, path) for at, path in binds.items() if at not in own)
        return SandboxTemplate(
            key=("bwrap-image", layers, images, network, shown),
            is_confined=True,
            is_tried=False,  # `overlay_problem` has tried it
            launch=lambda argv, stack: _launch(argv, stack, network, layers, images, shown),
            request={
                "env": self._env,
                "workspace": self._workspace.root.name,
                "tmp_bytes": self._limits.tmp_mb << 20,
                "network": network,
                "image": {
                    "tree": str(self._image.rootfs.relative_to(images)),
                    "base": base_of(self._workspace.root),
                    "is_copied": self._layering == "copy",
                    "workdir": self.home,
                    "uid": self._user.uid,
                    "gid": self._user.gid,
                    "shown": {
                        at: f"{HOME}/{Path(path).name}" if at in own else f"{_SHOWN}{at}"
                        for at, path in binds.items()
                    },
                },
            },
        )


def _mark_layer(upper: Path, path: str, add: Callable[[bytes], None]) -> None:
    """Add what a layer has beneath a directory of its image; raises `OSError`.

    Status changes (ctime) can be set by no command. No link is followed.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    left = _MAX_MARKED
    with ExitStack() as stack:

        def opened(name: str, parent: int | None) -> int:
            fd = os.open(name, flags, dir_fd=parent)
            stack.callback(os.close, fd)
            return fd

        fd = opened(str(upper), None)
        for name in filter(None, path.split("/")):
            try:
                fd = opened(name, fd)
            except FileNotFoundError:
                return
            # Beneath a directory that was made anew there is nothing of the image.
            with suppress(OSError):
                add(b"opaque" + os.getxattr(fd, OPAQUE))
        for root, directories, names, at in os.fwalk(".", dir_fd=fd):
            directories[:] = sorted(name for name in directories if name != ".git")
            for name in (*directories, *sorted(names)):
                status = os.lstat(name, dir_fd=at)
                numbers = (*status[:2], status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                add(repr((root, name, numbers)).encode())
                left -= 1
                if left < 0:
                    raise OSError(errno.E2BIG, "too many files to be marked")


def layering_of(layers: Path, images: Path) -> Layering:
    """How conversations that keep their changes in `layers` share the trees in `images`."""
    with _TRYING:  # all conversations of a worker ask at once
        return _layering_of(layers, images)


@cache
def _layering_of(layers: Path, images: Path) -> Layering:
    return "copy" if overlay_problem(layers, images) else "overlay"


def overlay_problem(layers: Path, images: Path) -> str | None:
    """Why the kernel mounts no overlay there, found by mounting one; None where it does."""
    # No fuse-overlayfs instead: the root of its process would become the file system that it
    # serves, so a command that sets an attribute of a file would hang.
    with ExitStack() as stack:
        try:
            tree = images / _PROBE
            tree.mkdir(mode=0o700, exist_ok=True)
            layer = Path(tempfile.mkdtemp(dir=layers, prefix=TEMPORARY))
            stack.callback(remove_tree, layer)
            tried = _launch(
                ["python3", "-I", "-S", "-c", BOOT, "0", tree.name, layer.name],
                stack,
                False,
                layers,
                images,
            )
            done = subprocess.run(
                tried.argv,
                env=dict(tried.env),
                cwd=tried.cwd,
                pass_fds=tuple(tried.pass_fds),
                input=framed(program("namespaces")),
                capture_output=True,
                timeout=_PROBE_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired, SandboxError) as error:
            return str(error)
    said = done.stderr.decode(errors="replace").strip().splitlines()
    return None if done.returncode == 0 else (said or ["it failed without a message"])[-1][:300]


def _launch(
    argv: Sequence[str],
    stack: ExitStack,
    network: bool,
    layers: Path,
    images: Path,
    shown: Sequence[tuple[str, str]] = (),
) -> Launch:
    options = [*FORK_SERVER, "--dir", "/tmp", "--ro-bind", str(images), "/images"]
    for at, path in shown:
        options += ["--ro-bind", path, f"{_SHOWN}{at}"]
    for name in _CAPABILITIES:
        options += ["--cap-add", f"CAP_{name}"]
    return launch(argv, stack, network, options, str(layers))


def _workdir(image: UnpackedImage, given: str | None) -> str:
    """The workspace; raises `ImageError` where it cannot be a directory."""
    workdir = given or image.workdir
    names = [name for name in workdir.split("/") if name not in ("", ".")]
    if not workdir.startswith("/") or ".." in names or "\0" in workdir:
        raise ImageError(f"the working directory {workdir!r} must be an absolute path")
    path = image.rootfs / resolve(image.rootfs, names)
    if os.path.lexists(path) and not path.is_dir():
        raise ImageError(f"the working directory {workdir!r} of the image is not a directory")
    return "/" + "/".join(names)


def _copy(tree: Path, layer: Path) -> None:
    """Give a conversation a tree of its own, complete or not at all."""
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
