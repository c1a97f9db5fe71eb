"""Brings images of registries into a directory of images.

Each image gets an OCI layout of its own, whose blobs are those that all images share:

    DIRECTORY/registry/HOST/NAME/index.json      the image; there once all its layers are there
    DIRECTORY/registry/HOST/NAME/planned.json    the same, before that
    DIRECTORY/registry/.blobs/sha256/DIGEST      manifests, configurations, layers
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import orjson

from batch_trajectories.basics.errors import HostError, machine_failure
from batch_trajectories.basics.text import first_few
from toolsets.images.archives import INDEX_DIGEST, NAME, machine
from toolsets.images.layers import MAX_BYTES
from toolsets.images.names import DIGEST, ImageError
from toolsets.images.registry.blobs import BlobStore, PartialBlob, write_durably
from toolsets.images.registry.client import Place, Progressed, RegistryClient
from toolsets.images.registry.names import RegistryName, parse_name
from toolsets.images.registry.settings import RegistrySettings
from toolsets.images.registry.transport import FailedForNow, RequestRefused

DIRECTORY = "registry"
_BLOBS = ".blobs"
_INDEX, _PLANNED = "index.json", "planned.json"
_POLL_S = 0.1
_MAX_NAME_BYTES = 200
_PIECE_BYTES = 1 << 20
_MAX_MANIFEST_BYTES, _MAX_CONFIG_BYTES = 4 << 20, 16 << 20
_MAX_NESTING = 3
_MAX_LAYERS = 1000
_PLATFORMS_SHOWN = 20
_WRONG_CONTENTS = 3
"""Number of complete downloads with another digest after which a blob is given up."""

_LISTS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_LAYERS = (
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.oci.image.layer.v1.tar+zstd",
    "application/vnd.oci.image.layer.nondistributable.v1.tar",
    "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
    "application/vnd.oci.image.layer.nondistributable.v1.tar+zstd",
    "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.docker.image.rootfs.diff.tar.gzip",
    "application/vnd.docker.image.rootfs.diff.tar.zstd",
    "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip",
)
_VARIANTS = {"arm64": ("v8", None), "amd64": (None, "v1")}
"""The variants of a processor that every machine with it can run, the best first."""


class BlobEntry(NamedTuple):
    """A blob in a manifest."""

    digest: str
    size: int


class Manifest(NamedTuple):
    """The parts of an image."""

    config: BlobEntry
    layers: list[BlobEntry]

    @property
    def size(self) -> int:
        """The size of all parts; a layer that occurs twice counts once."""
        return sum(blob.size for blob in {self.config, *self.layers})


class Puller:
    """Fetches images into a directory of images; use it as `async with`.

    An image is fetched by one process at a time, and a layer once for all images that have it.
    """

    def __init__(
        self, directory: Path, settings: RegistrySettings, *, is_ahead: bool = False
    ) -> None:
        """`is_ahead`: what is fetched is needed later, so it leaves room for what is needed now."""
        self._directory = directory / DIRECTORY
        self._client = RegistryClient(settings)
        max_bytes = None if settings.max_gb is None else int(settings.max_gb * 1e9)
        self.blobs = BlobStore(
            self._directory / _BLOBS,
            parallel=settings.parallel,
            max_bytes=max_bytes,
            is_ahead=is_ahead,
        )

    async def __aenter__(self) -> Self:
        try:
            self.blobs.make()
        except OSError as error:
            raise ImageError(f"{self._directory}: {error.strerror}") from error
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.__aexit__(*error)

    async def plan(self, reference: str) -> Manifest | None:
        """Fetch what says of which layers an image consists.

        None if another process is fetching the image. Raises `ImageError` and `HostError`.
        """
        name = parse_name(reference)
        layout = self._directory / _path(name)
        with _as_image_error(name):
            async with _lock_directory(layout, waits=False) as is_ours:
                return await self._plan(name, layout) if is_ours else None

    async def pull(self, reference: str) -> Path:
        """Have an image here, and return its layout. Raises `ImageError` and `HostError`."""
        name = parse_name(reference)
        layout = self._directory / _path(name)
        if (layout / _INDEX).exists():
            return layout
        with _as_image_error(name):
            async with _lock_directory(layout, waits=True):
                if not (layout / _INDEX).exists():
                    await self._pull(name, layout)
        return layout

    async def _pull(self, name: RegistryName, layout: Path) -> None:
        manifest = await self._plan(name, layout)
        try:
            async with asyncio.TaskGroup() as group:
                for blob in dict.fromkeys(manifest.layers):
                    group.create_task(self._fetch(name, blob))
        except ExceptionGroup as errors:
            failed = list(errors.exceptions)
            host = [error for error in failed if isinstance(error, HostError)]
            if not host and any(isinstance(error, ImageError) for error in failed):
                # A tag may have moved on: the next attempt asks what it means now.
                (layout / _PLANNED).unlink(missing_ok=True)
            raise (host or failed)[0] from None
        with suppress(FileExistsError):
            (layout / "blobs").symlink_to(Path("..", "..", _BLOBS))
        write_durably(layout / "oci-layout", orjson.dumps({"imageLayoutVersion": "1.0.0"}))
        (layout / _PLANNED).rename(layout / _INDEX)

    async def _plan(self, name: RegistryName, layout: Path) -> Manifest:
        """Return the parts of an image; asks the registry unless an earlier attempt did."""
        if (index := _read_index(layout)) is not None:
            known = index["manifests"][0]["digest"]
            with suppress(FileNotFoundError):
                raw = self.blobs.path(known).read_bytes()
                return _parse_manifest(_parse(raw, known), known)
        raw, kind = await self._read_manifest(name, name.target, "")
        named, depth = f"sha256:{hashlib.sha256(raw).hexdigest()}", 0
        while kind in _LISTS:
            if (depth := depth + 1) > _MAX_NESTING:
                raise ImageError("its lists of manifests are nested too deeply")
            chosen = _choose(_parse(raw, name.target))
            raw, kind = await self._read_manifest(name, chosen["digest"], chosen["mediaType"])
        digest = self.blobs.put(raw)
        manifest = _parse_manifest(_parse(raw, digest), digest)
        await self._fetch_config(name, manifest)
        notes = {NAME: _shown_name(name), INDEX_DIGEST: named}
        entry = {"mediaType": kind, "digest": digest, "size": len(raw), "annotations": notes}
        planned = {"schemaVersion": 2, "manifests": [entry]}
        write_durably(layout / _PLANNED, orjson.dumps(planned))
        return manifest

    async def _read_manifest(self, name: RegistryName, target: str, kind: str) -> tuple[bytes, str]:
        """Return a manifest or a list of manifests, whose digest is right, and its media type."""
        accept = ", ".join((kind,) if kind else (*_LISTS, *_MANIFESTS))
        raw, sent = await self._client.read(
            name, "manifests", target, accept=accept, max_bytes=_MAX_MANIFEST_BYTES
        )
        digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
        if DIGEST.fullmatch(target) and digest != target:
            raise ImageError(f"the registry sends another manifest than {target}")
        content = _parse(raw, target)
        kind = str(content.get("mediaType") or kind or sent)
        if kind not in (*_LISTS, *_MANIFESTS):
            if content.get("schemaVersion") == 1:
                raise ImageError("it is stored in Docker's schema 1 of 2013; push it again")
            if kind and "json" not in kind:
                raise ImageError(f"its manifest has the type {kind[:100]!r}, which is not known")
            kind = _LISTS[0] if "manifests" in content else _MANIFESTS[0]
        return raw, kind

    async def _fetch_config(self, name: RegistryName, manifest: Manifest) -> None:
        if manifest.config.size > _MAX_CONFIG_BYTES:
            raise ImageError(f"its configuration is larger than {_MAX_CONFIG_BYTES >> 20} MiB")
        await self._fetch(name, manifest.config)
        described = _parse(self.blobs.path(manifest.config.digest).read_bytes(), "configuration")
        rootfs = described.get("rootfs")
        ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
        if not isinstance(ids, list) or len(ids) != len(manifest.layers):
            raise ImageError("its configuration does not list its layers")

    async def _fetch(self, name: RegistryName, blob: BlobEntry) -> None:
        wrong = 0

        async def once(place: Place, partial: PartialBlob) -> None:
            nonlocal wrong
            before = partial.offset
            try:
                await self._download(place, name, partial)
            except ImageError as error:
                raise RequestRefused(200, f"{place.registry}: {error}") from None
            except FailedForNow as error:
                if partial.offset > before:
                    raise Progressed(str(error)) from None
                raise
            if partial.is_right:
                return
            if partial.offset < partial.size:
                early = f"{place.address.host}: the download of {blob.digest} ended early"
                raise (Progressed if partial.offset > before else FailedForNow)(early)
            await asyncio.to_thread(partial.restart)
            wrong += 1
            message = f"{place.registry}: the digest of {blob.digest} is not that of its content"
            if wrong >= _WRONG_CONTENTS:
                raise RequestRefused(200, message)
            raise FailedForNow(message)

        async def download(partial: PartialBlob) -> None:
            if not partial.is_right:
                await self._client.retry(name, lambda place: once(place, partial))

        await self.blobs.fetch(blob.digest, blob.size, download)

    async def _download(self, place: Place, name: RegistryName, partial: PartialBlob) -> None:
        """Append what one answer has of a blob."""
        async with self._client.open_blob(place, name, partial.digest, partial.offset) as answer:
            if answer.status == 416 or (
                answer.status == 206 and _first_byte(answer.headers) != partial.offset
            ):
                await asyncio.to_thread(partial.restart)
                raise FailedForNow(f"{place.address.host}: it sends another part than asked for")
            if answer.status == 200 and partial.offset:
                await asyncio.to_thread(partial.restart)
            async for piece in answer.content.iter_chunked(_PIECE_BYTES):
                await asyncio.to_thread(partial.append, piece)


def find_layout(directory: Path, reference: str) -> Path | None:
    """Return the layout of an image that was fetched into a directory of images, if it was."""
    with suppress(ImageError):
        layout = directory / DIRECTORY / _path(parse_name(reference))
        if (layout / _INDEX).exists():
            return layout
    return None


def fetched_layers(directory: Path, known: set[Path]) -> Iterator[tuple[str, list[str]]]:
    """Yield the digests of configurations of fetched images, with the ids of their layers.

    Also of images whose layers are not there yet. Passes over the layouts in `known`, and adds all
    that are seen.
    """
    blobs = directory / DIRECTORY / _BLOBS / "sha256"
    for host in _subdirectories(directory / DIRECTORY):
        for layout in _subdirectories(host):
            if layout in known or (index := _read_index(layout)) is None:
                continue
            with suppress(OSError, KeyError, TypeError, orjson.JSONDecodeError):
                digest = index["manifests"][0]["digest"].removeprefix("sha256:")
                config = orjson.loads((blobs / digest).read_bytes())["config"]["digest"]
                described = orjson.loads((blobs / config.removeprefix("sha256:")).read_bytes())
                known.add(layout)
                yield config, [str(one) for one in described["rootfs"]["diff_ids"]]


def _read_index(layout: Path) -> dict[str, Any] | None:
    """Return what is known of an image; None if that is nothing yet."""
    for name in (_PLANNED, _INDEX):
        with suppress(FileNotFoundError, orjson.JSONDecodeError):
            index: dict[str, Any] = orjson.loads((layout / name).read_bytes())
            return index
    return None


def _subdirectories(directory: Path) -> list[Path]:
    with suppress(FileNotFoundError), os.scandir(directory) as entries:
        return [
            Path(entry.path)
            for entry in entries
            if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
        ]
    return []


def _path(name: RegistryName) -> Path:
    """The path of an image's layout, readable if it is not too long."""
    label = f"{name.repository.replace('/', '+')}"
    label += f"@{name.digest}" if name.digest else f":{name.tag}"
    if len(label) > _MAX_NAME_BYTES:
        label = hashlib.sha256(label.encode()).hexdigest()
    return Path(name.registry.lower(), label)


def _shown_name(name: RegistryName) -> str:
    """The name of a layout's image. Without a tag, a name would mean the tag `latest`."""
    if name.tag is None:
        return str(name.digest)
    return f"{name.registry}/{name.repository}:{name.tag}"


@asynccontextmanager
async def _lock_directory(layout: Path, *, waits: bool) -> AsyncIterator[bool]:
    """Hold the lock of an image; yield False if another process has it and nobody waits."""
    layout.mkdir(parents=True, exist_ok=True)
    fd = os.open(layout, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waits:
                    await asyncio.sleep(_POLL_S)
                    continue
                yield False
                return
            yield True
            return
    finally:
        os.close(fd)


@contextmanager
def _as_image_error(name: RegistryName) -> Iterator[None]:
    """Name the image in errors inside a `with` block."""
    try:
        yield
    except ImageError as error:
        if str(name) in str(error):
            raise
        raise ImageError(f"image '{name}': {error}") from error
    except OSError as error:
        if (message := machine_failure(error)) is not None:
            raise HostError(message) from error
        raise ImageError(f"image '{name}': {error}") from error


def _parse(raw: bytes, what: str) -> dict[str, Any]:
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ImageError(f"{what}: the registry sends no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ImageError(f"{what}: the registry sends no JSON object")
    return value


def _choose(index: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of a list of manifests for this machine."""
    entries = index.get("manifests")
    if not isinstance(entries, list):
        raise ImageError("its list of manifests has no `manifests`")
    wanted = machine()
    order: tuple[str | None, ...] = _VARIANTS.get(wanted, (None,))
    found: dict[str | None, dict[str, Any]] = {}
    offered = []
    for entry in entries:
        platform = entry.get("platform") if isinstance(entry, dict) else None
        if not isinstance(platform, dict):
            continue
        offered.append(f"{platform.get('os')}/{platform.get('architecture')}")
        if (platform.get("os"), platform.get("architecture")) == ("linux", wanted):
            variant = platform.get("variant")
            found.setdefault(None if variant is None else str(variant), entry)
    for variant in (*order, *found):
        if (entry := found.get(variant)) is not None:
            if not isinstance(entry.get("digest"), str) or not DIGEST.fullmatch(entry["digest"]):
                raise ImageError("its list of manifests has a digest that is not of SHA-256")
            kind = entry.get("mediaType") or ""
            if not isinstance(kind, str) or not kind.isprintable():
                raise ImageError(f"its list has the type {str(kind)[:100]!r}, which is not known")
            return {**entry, "mediaType": kind}
    names = list(dict.fromkeys(offered))
    there = first_few([name[:100] for name in names], _PLATFORMS_SHOWN) or "nothing"
    raise ImageError(f"it is not made for linux/{wanted}; there is {there}")


def _parse_manifest(content: dict[str, Any], digest: str) -> Manifest:
    layers = content.get("layers")
    if not isinstance(layers, list) or len(layers) > _MAX_LAYERS:
        raise ImageError(f"{digest} is not the manifest of an image")
    for layer in layers:
        kind = layer.get("mediaType") if isinstance(layer, dict) else None
        if kind not in _LAYERS:
            raise ImageError(f"a layer has the type {str(kind)[:100]!r}, which cannot be unpacked")
    manifest = Manifest(_parse_blob(content.get("config")), [_parse_blob(one) for one in layers])
    if manifest.size > MAX_BYTES:
        raise ImageError(
            f"it has {manifest.size / 1e9:.3g} GB; at most {MAX_BYTES >> 30} GiB are unpacked"
        )
    return manifest


def _parse_blob(entry: Any) -> BlobEntry:
    match entry:
        case {"digest": str(digest), "size": int(size)} if size >= 0 and DIGEST.fullmatch(digest):
            return BlobEntry(digest, size)
    raise ImageError("its manifest has an entry without a size, or without a digest of SHA-256")


def _first_byte(headers: Any) -> int | None:
    """The offset at which a partial answer begins; None if it does not say."""
    first = str(headers.get("Content-Range", "")).removeprefix("bytes ").partition("-")[0].strip()
    return int(first) if first.isdecimal() else None
