"""The unpacked images of this user: the first process that needs an image unpacks it once.

An unpacked image is complete or absent, even after a power loss.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import takewhile
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import orjson

from batch_trajectories.basics.errors import (
    HostError,
    machine_failure,
    stop_on_machine_failure,
)
from batch_trajectories.basics.process import lock_file
from batch_trajectories.basics.text import first_few
from batch_trajectories.basics.validation import UrlPath
from toolsets.images.archives import StoredImage, find_images, open_source, read_images
from toolsets.images.layers import STATE, TREE, Unpacking, read_inside
from toolsets.images.names import ImageError, full_name, parse_digest
from toolsets.workspace.removal import remove_tree

_log = logging.getLogger(__name__)

_CONFIG, _NEW_CONFIG = "config.json", "config.json.new"
_MAX_LISTED_NAMES = 5
_HOW_TO_FILL = "put the images there, as docs/images.md shows"


@dataclass(frozen=True, slots=True)
class UnpackedImage:
    """An image as a directory tree, which must not be changed, and its configuration."""

    path: Path
    """The directory that contains the tree."""
    digest: str
    """The digest of the image's configuration."""
    env: dict[str, str]
    workdir: str
    user: str
    entrypoint: tuple[str, ...] = ()

    @property
    def rootfs(self) -> Path:
        """The directory tree."""
        return self.path / TREE


class ImageStore:
    """The images of a directory, and their unpacked trees.

    Unpacked images are in a directory beneath it that only this user may enter. Images at a URL are
    downloaded to a directory of the user's cache.
    """

    def __init__(self, directory: Path, *, is_filled: bool = False) -> None:
        """Never raises; `problem` reports what is wrong with the directory.

        `is_filled`: images are added while the store is used, see `add_fetched`.
        """
        self._is_filled = is_filled
        self._url = str(directory) if isinstance(directory, UrlPath) else None
        if self._url is not None:
            from batch_trajectories.basics.bucket import cache_directory  # few images have URLs

            directory = cache_directory(self._url, "images")
        self.directory = directory.absolute()
        self.unpacked = self.directory / f".unpacked-{os.getuid()}"
        self._known: dict[str, UnpackedImage] = {}
        """Unpacked images by reference: many conversations ask for the same image."""
        self._changing = Lock()
        self._known_layers: dict[str, list[str]] = {}
        """The part of `_layers` that was read so far."""
        self._seen_layouts: set[Path] = set()
        """Layouts of fetched images that are part of `_known_layers`."""

    def problem(self) -> str | None:
        """Return why no image can be used; None if images can be used.

        Downloads what has changed at a URL. Raises `ConfigError` without the extra `mirror`, and
        `EnvironmentStop` if the bucket or the disk fails.
        """
        if self._url is not None:
            if self._is_filled:
                return (
                    f"--images: images are pulled into a directory of this machine, not into "
                    f"{self._url}; give another directory, or leave --pull=missing out"
                )
            self._download(self._url)
        if self._is_filled and not self.directory.exists():
            try:
                self.directory.mkdir(parents=True)
            except OSError as error:
                return f"--images: {self.directory} cannot be made: {error.strerror}"
        if not self.directory.is_dir():
            return f"--images: {self.directory} is not a directory; {_HOW_TO_FILL}"
        try:
            self._make_directory()
        except (ImageError, HostError) as error:
            return f"--images: {error}"
        if not self._is_filled and not self._images and not self._problems:
            return (
                f"--images: {self.directory} holds no image: neither OCI layouts nor archives "
                f"(*.tar, *.tar.gz) of `docker save` or `podman save`; {_HOW_TO_FILL}"
            )
        return None

    def find(self, reference: str) -> StoredImage:
        """Return the image that a name or digest means; raises `ImageError` if there is none."""
        matching = self._group_names.get(parse_digest(reference) or full_name(reference), [])
        if len({image.config_digest for image in matching}) > 1:
            places = ", ".join(sorted(str(image.source) for image in matching))
            raise ImageError(f"image {reference!r}: several have this name ({places})")
        if matching:
            return matching[0]
        names = sorted({name for image in self._images for name in image.names})
        known = first_few(names, _MAX_LISTED_NAMES) or "none"
        msg = f"image {reference!r} is not in {self.directory} (there: {known})"
        if self._problems:
            msg += f"; not readable there: {self._problems[0]}"
        raise ImageError(msg)

    def has(self, reference: str) -> bool:
        """Whether an image has this name or digest; several count, too."""
        name = parse_digest(reference) or full_name(reference)
        with self._changing:
            return bool(self._group_names.get(name))

    def add_fetched(self, layout: Path) -> None:
        """Add the image of a layout beneath the directory that was not there before.

        Raises `ImageError` if it cannot be read.
        """
        images = read_images(layout)
        with self._changing:
            known = {image.source for image in self._images}
            for image in images:
                if image.source not in known:
                    self._scan[0].append(image)
                    self._add_names(self._group_names, image)

    def unpack(self, reference: str) -> UnpackedImage:
        """Return the image that a name or digest means, unpacked by this or another process.

        Raises `HostError`, and `ImageError` if the image is missing, damaged or refused.
        """
        known = self._known.get(reference)
        if known is None or not (known.path / _CONFIG).exists():
            known = self._known[reference] = self._find_unpacked(reference)
        return known

    def _find_unpacked(self, reference: str) -> UnpackedImage:
        image = self.find(reference)
        place = self.unpacked / image.digest.removeprefix("sha256:")
        try:
            if not (place / _CONFIG).exists():
                self._make_directory()
                with lock_file(place.with_suffix(".lock")):
                    if not (place / _CONFIG).exists():
                        self._unpack(image, place)
            config = orjson.loads((place / _CONFIG).read_bytes())
            if "entrypoint" not in config:  # unpacked by an earlier version
                config = _settings(image.configuration())
                with lock_file(place.with_suffix(".lock")):
                    (place / _NEW_CONFIG).write_bytes(orjson.dumps(config))
                    (place / _NEW_CONFIG).replace(place / _CONFIG)
            named = {name: config[name] for name in ("env", "workdir", "user")}
            entrypoint = tuple(config["entrypoint"])
            return UnpackedImage(place, image.config_digest, **named, entrypoint=entrypoint)
        except OSError as error:
            if (message := machine_failure(error)) is not None:
                raise HostError(f"image {reference!r}: {message}") from error
            raise ImageError(f"image {reference!r}: {error}") from error
        except ImageError as error:
            raise ImageError(f"image {reference!r} in {image.source}: {error}") from error

    def _download(self, url: str) -> None:
        from batch_trajectories.basics.bucket import download_all

        with stop_on_machine_failure():
            download_all(url, self.directory)

    def _is_whole(self) -> bool:
        from batch_trajectories.basics.bucket import is_complete

        return is_complete(self.directory)

    @cached_property
    def _scan(self) -> tuple[list[StoredImage], list[ImageError]]:
        if self._url is not None and not self._is_whole():
            self._download(self._url)  # a worker on another machine than the parent
        images = list(find_images(self.directory))
        problems = [item for item in images if isinstance(item, ImageError)]
        for problem in problems:
            _log.warning("An image cannot be read and is not used: %s", problem)
        return [item for item in images if isinstance(item, StoredImage)], problems

    @property
    def _images(self) -> list[StoredImage]:
        return self._scan[0]

    @cached_property
    def _group_names(self) -> dict[str, list[StoredImage]]:
        """The images by name and digest."""
        found: dict[str, list[StoredImage]] = {}
        for image in self._images:
            self._add_names(found, image)
        return found

    @staticmethod
    def _add_names(found: dict[str, list[StoredImage]], image: StoredImage) -> None:
        for name in {*image.names, image.digest, image.config_digest}:
            found.setdefault(name, []).append(image)

    @property
    def _problems(self) -> list[ImageError]:
        return self._scan[1]

    def _make_directory(self) -> None:
        try:
            self.unpacked.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ImageError(
                f"images are unpacked into {self.unpacked}, which cannot be made: {error.strerror}"
            ) from error
        status = self.unpacked.lstat()
        if (
            not stat.S_ISDIR(status.st_mode)
            or status.st_uid != os.getuid()
            or status.st_mode & 0o077
        ):
            raise ImageError(
                f"{self.unpacked} must be a directory that only this user may enter (mode 0700)"
            )

    @property
    def _layers(self) -> dict[str, list[str]]:
        """The ids of the layers of all readable images, by the digest of the configuration."""
        layers = self._known_layers
        with self._changing:
            for image in self._images:
                if image.config_digest not in layers:
                    with suppress(ImageError, OSError, tarfile.TarError):
                        ids = _diff_ids(image.configuration(), len(image.layers))
                        layers[image.config_digest] = ids
            if self._is_filled:
                from toolsets.images.registry.pulling import fetched_layers

                layers.update(fetched_layers(self.directory, self._seen_layouts))
            return dict(layers)

    def _unpack(self, image: StoredImage, place: Path) -> None:
        _log.info("The image %s of %s is unpacked.", image.digest, image.source)
        config = image.configuration()
        diff_ids = _diff_ids(config, len(image.layers))
        others = [ids for digest, ids in self._layers.items() if digest != image.config_digest]
        shared = max((_count_common(diff_ids, ids) for ids in others), default=0)
        with _rename_when_complete(place) as making:
            unpacking = self._fill(making / TREE, image, diff_ids, shared)
            unpacking.finish()
            (making / _CONFIG).write_bytes(orjson.dumps(_settings(config)))

    def _fill(self, root: Path, image: StoredImage, diff_ids: list[str], shared: int) -> Unpacking:
        """Unpack the layers with these ids into `root`; the first `shared` are linked to a base."""
        base = self._make_base(image, diff_ids[:shared]) if shared else None
        unpacking = Unpacking(root, base)
        with open_source(image.source) as open_member:
            for name, diff_id in list(zip(image.layers, diff_ids, strict=False))[shared:]:
                with open_member(name) as layer:
                    unpacking.add(layer, diff_id)
        return unpacking

    def _make_base(self, image: StoredImage, diff_ids: list[str]) -> Path:
        """Return the directory of a tree of layers with which several images begin."""
        name = hashlib.sha256(" ".join(diff_ids).encode()).hexdigest()
        place = self.unpacked / f"{name}.base"
        with lock_file(place.with_suffix(".base.lock")):
            if not (place / STATE).exists():
                lower = (_count_common(diff_ids, ids) for ids in self._layers.values())
                shared = max((count for count in lower if count < len(diff_ids)), default=0)
                with _rename_when_complete(place) as making:
                    self._fill(making / TREE, image, diff_ids, shared).keep(making)
        return place


@contextmanager
def _rename_when_complete(place: Path) -> Iterator[Path]:
    """Yield a directory that is renamed to `place` once it is complete."""
    making = place.with_suffix(f"{place.suffix}.tmp")
    remove_tree(making)  # of a process that was killed
    remove_tree(place)
    making.mkdir(mode=0o700)
    try:
        yield making
        # A power loss must not leave a tree of empty files that looks complete.
        os.sync()
        making.rename(place)
    except BaseException:
        remove_tree(making)
        raise


def _count_common(one: list[str], other: list[str]) -> int:
    """Return the number of layers with which both images begin."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in pairs)


def _diff_ids(config: dict[str, Any], layers: int) -> list[str]:
    rootfs = config.get("rootfs")
    ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if not isinstance(ids, list) or len(ids) != layers:
        raise ImageError("its configuration does not list its layers")
    return [str(item) for item in ids]


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of an image's configuration that conversations need."""
    own = config.get("config")
    own = own if isinstance(own, dict) else {}
    pairs = (item.partition("=") for item in _texts(own, "Env"))
    return {
        "env": {name: value for name, mark, value in pairs if name and mark},
        "workdir": _text(own, "WorkingDir") or "/",
        "user": _text(own, "User"),
        "entrypoint": _texts(own, "Entrypoint"),
    }


def _texts(config: dict[str, Any], key: str) -> list[str]:
    """Return a list of texts of a configuration. Raises `ImageError` for anything else."""
    given = config.get(key) or []
    if not isinstance(given, list):
        raise ImageError(f"its configuration has a {key} that is no list")
    return [_checked_text(one, key) for one in given]


def _text(config: dict[str, Any], key: str) -> str:
    return _checked_text(config.get(key) or "", key)


def _checked_text(value: Any, key: str) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ImageError(f"its configuration has {key} with {str(value)[:100]!r}, which is no text")
    return value


# Users of an image: its /etc/passwd and /etc/group.


class User(NamedTuple):
    """The user that runs commands."""

    name: str
    uid: int
    gid: int
    home: str


def find_user(image: UnpackedImage, name: str | None) -> User:
    """Return the user that `name` means in an image, as `USER` in a Dockerfile.

    None means the image's own user. Raises `ImageError` for an unknown name.
    """
    return _user_in(image.rootfs, name or image.user or "0")


@lru_cache(1024)  # many conversations ask for the same
def _user_in(rootfs: Path, name: str) -> User:
    wanted, _, group = name.partition(":")
    known = _table(rootfs, "/etc/passwd", 6)
    entry = next((row for row in known if wanted in (row[0], row[2])), None)
    if entry is None and not wanted.isdecimal():
        raise ImageError(f"user {wanted!r} is not in /etc/passwd of the image")
    try:
        uid, gid = (int(wanted), 0) if entry is None else (int(entry[2]), int(entry[3]))
        if group:
            gid = int(group) if group.isdecimal() else _group(rootfs, group)
    except ValueError as error:
        raise ImageError(f"/etc/passwd of the image: {wanted!r} has no numbers") from error
    home = entry[5] if entry is not None and entry[5].startswith("/") else "/"
    return User(wanted if entry is None else entry[0], uid, gid, home)


def _group(rootfs: Path, name: str) -> int:
    for row in _table(rootfs, "/etc/group", 3):
        if row[0] == name:
            return int(row[2])
    raise ImageError(f"group {name!r} is not in /etc/group of the image")


def _table(rootfs: Path, path: str, columns: int) -> list[list[str]]:
    text = (read_inside(rootfs, path) or b"").decode("utf-8", "replace")
    rows = (line.split(":") for line in text.splitlines())
    return [row for row in rows if len(row) >= columns]
