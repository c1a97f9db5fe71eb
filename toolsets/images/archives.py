"""Reads images in a directory: OCI layouts, archives of them, and archives of `docker save`.

A layout or an archive may hold several images. Nothing in them is trusted: sizes are limited, and
configurations and layers are compared with their digests. `add_to_layout` writes a layout; a crash
leaves the layout as it was.
"""

from __future__ import annotations

import hashlib
import os
import platform
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson

from batch_trajectories.basics.process import lock_file
from toolsets.images.layers import MAGIC_GZIP, MAGIC_ZSTD
from toolsets.images.names import DIGEST, ImageError, full_name

_MAX_DOCUMENT_BYTES = 16 << 20
_MAX_NESTING = 3
_ARCHIVES = (".tar", ".tar.gz", ".tgz")
NAME = "org.opencontainers.image.ref.name"
"""The annotation with the name of an image."""
_NAME_ANNOTATIONS = (NAME, "io.containerd.image.name")
INDEX_DIGEST = "batch-trajectories.index.digest"
"""The annotation with the digest by which a registry named an image. It may be the digest of a list
of manifests."""
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le", "s390x": "s390x"}

Opener = Callable[[str], AbstractContextManager[IO[bytes]]]


@dataclass(frozen=True, slots=True)
class StoredImage:
    """One image of a layout or archive."""

    source: Path
    """The directory of the layout, or the archive."""
    digest: str
    """The digest of the manifest; of the configuration, if `docker save` wrote no manifest."""
    names: frozenset[str]
    """The names of the image, as `full_name` returns them."""
    config: str
    """The path of the configuration within the source."""
    config_digest: str
    layers: tuple[str, ...]
    """The paths of the layers within the source, the lowest first."""

    def configuration(self) -> dict[str, Any]:
        """Return the image's configuration; raises `ImageError`."""
        with open_source(self.source) as open_member:
            raw = _read_document_bytes(open_member, self.config, self.source)
        if f"sha256:{hashlib.sha256(raw).hexdigest()}" != self.config_digest:
            raise ImageError(f"{self.source}: {self.config} is damaged: its digest differs")
        return _parse_object(raw, self.source, self.config)


def find_images(directory: Path) -> Iterator[StoredImage | ImageError]:
    """Yield the images of a directory: a layout, or a tree of layouts and archives.

    Yields an error for each source that cannot be read; the other images are still usable.
    """
    for source, name in _find_sources(directory):
        try:
            with open_source(source) as open_member:
                yield from _read_images(source, name, open_member)
        except (ImageError, tarfile.TarError, zlib.error, OSError, EOFError) as error:
            first_line = str(error).partition("\n")[0].rstrip(":")
            yield error if isinstance(error, ImageError) else ImageError(f"{source}: {first_line}")


def read_images(source: Path) -> list[StoredImage]:
    """Return the images of one layout or archive. Raises `ImageError` if it cannot be read."""
    try:
        with open_source(source) as open_member:
            return list(_read_images(source, source.name, open_member))
    except (tarfile.TarError, zlib.error, OSError, EOFError) as error:
        raise ImageError(f"{source}: {str(error).partition(chr(10))[0]}") from error


@contextmanager
def open_source(source: Path) -> Iterator[Opener]:
    """Return a function that opens the files of a layout or an archive by their path in it."""
    if source.is_dir():
        yield lambda name: _open_file(source, name)
        return
    if not source.is_file():  # a pipe would never end
        raise ImageError(f"{source}: neither a file nor a directory")
    with tarfile.open(source) as archive:
        yield lambda name: _open_member(archive, source, name)


@contextmanager
def _open_file(source: Path, name: str) -> Iterator[IO[bytes]]:
    path = source / name
    try:
        # Links of a store of blobs are fine: a layout is written by the user, not by an image.
        with path.open("rb") as file:
            yield file
    except FileNotFoundError:
        raise ImageError(f"{source}: {name} is missing") from None


@contextmanager
def _open_member(archive: tarfile.TarFile, source: Path, name: str) -> Iterator[IO[bytes]]:
    for path in (name, f"./{name}"):
        try:
            file = archive.extractfile(path)
        except KeyError:
            continue
        if file is not None:
            with closing(file):
                yield file
            return
    raise ImageError(f"{source}: {name} is missing")


def _find_sources(directory: Path) -> Iterator[tuple[Path, str]]:
    """Yield the layouts and archives beneath a directory, each with its path as a name."""
    if (directory / "index.json").is_file():
        yield directory, directory.name
        return
    for parent, folders, files in os.walk(directory, followlinks=True):
        here = Path(parent)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        layouts = [name for name in folders if (here / name / "index.json").is_file()]
        archives = sorted(name for name in files if name.endswith(_ARCHIVES))
        for name in [*layouts, *archives]:
            path = (here / name).relative_to(directory).as_posix()
            for ending in _ARCHIVES if name in archives else ():
                path = path.removesuffix(ending)
            yield here / name, path
        folders[:] = [name for name in folders if name not in layouts]


def _read_images(source: Path, file_name: str, open_member: Opener) -> Iterator[StoredImage]:
    """Yield the images of a source; `file_name` names an image that has no name of its own."""
    try:
        index = _read_document(open_member, "index.json", source)
    except ImageError:
        if source.is_dir():
            raise
        yield from _read_saved_images(source, file_name, open_member)
        return
    images = list(_find_manifests(open_member, index, source, frozenset()))
    for digest, names in images:
        path = _blob_path(digest, source)
        raw = _read_document_bytes(open_member, path, source)
        if f"sha256:{hashlib.sha256(raw).hexdigest()}" != digest:
            raise ImageError(f"{source}: {path} is damaged: its digest differs")
        manifest = _parse_object(raw, source, path)
        try:
            config = str(manifest["config"]["digest"])
            layers = [str(layer["digest"]) for layer in manifest["layers"]]
        except (KeyError, TypeError):
            raise ImageError(f"{source}: {path} is not the manifest of an image") from None
        full_names = set(map(full_name, names))
        if not any(map(DIGEST.fullmatch, names)):  # else a registry has named it
            full_names |= {full_name(f"{file_name}:{name}") for name in names}
            if len(images) == 1:
                full_names.add(full_name(file_name))
        yield StoredImage(
            source=source,
            digest=digest,
            names=frozenset(full_names),
            config=_blob_path(config, source),
            config_digest=config,
            layers=tuple(_blob_path(layer, source) for layer in layers),
        )


def _find_manifests(
    open_member: Opener,
    index: Mapping[str, Any],
    source: Path,
    names: frozenset[str],
    depth: int = 0,
) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the digests and names of the manifests for this machine.

    `names` are the names of the index itself, which its manifests share.
    """
    entries = index.get("manifests")
    if not isinstance(entries, list):
        raise ImageError(f"{source}: index.json has no list `manifests`")
    keys = (*_NAME_ANNOTATIONS, INDEX_DIGEST)
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("digest"), str):
            raise ImageError(f"{source}: index.json has an entry without a digest")
        target = entry.get("platform")
        if isinstance(target, dict) and (
            target.get("os") != "linux" or target.get("architecture") != machine()
        ):
            continue
        annotations = entry.get("annotations")
        found = [annotations.get(key) for key in keys] if isinstance(annotations, dict) else []
        entry_names = names | {name for name in found if isinstance(name, str) and name}
        if "index" in str(entry.get("mediaType")) or "manifest.list" in str(entry.get("mediaType")):
            if depth >= _MAX_NESTING:
                raise ImageError(f"{source}: indexes are nested too deeply")
            inner = _read_document(open_member, _blob_path(entry["digest"], source), source)
            yield from _find_manifests(open_member, inner, source, entry_names, depth + 1)
        else:
            yield entry["digest"], entry_names


def _read_saved_images(source: Path, file_name: str, open_member: Opener) -> Iterator[StoredImage]:
    """Yield the images of an archive in the older form of `docker save`."""
    raw = _read_document_bytes(open_member, "manifest.json", source)
    try:
        entries = orjson.loads(raw)
        for entry in entries:
            config = str(entry["Config"])
            names = frozenset(map(full_name, entry.get("RepoTags") or ()))
            digest = hashlib.sha256(_read_document_bytes(open_member, config, source)).hexdigest()
            if len(entries) == 1:
                names |= {full_name(file_name)}
            layers = tuple(map(str, entry["Layers"]))
            yield StoredImage(
                source=source,
                digest=f"sha256:{digest}",
                names=names,
                config=config,
                config_digest=f"sha256:{digest}",
                layers=layers,
            )
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise ImageError(f"{source}: manifest.json is not what `docker save` writes") from error


def _blob_path(digest: str, source: Path) -> str:
    if not DIGEST.fullmatch(digest):
        raise ImageError(f"{source}: {digest[:100]!r} is not a digest that is supported")
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def _read_document(open_member: Opener, name: str, source: Path) -> dict[str, Any]:
    return _parse_object(_read_document_bytes(open_member, name, source), source, name)


def _read_document_bytes(open_member: Opener, name: str, source: Path) -> bytes:
    with open_member(name) as file:
        raw = file.read(_MAX_DOCUMENT_BYTES + 1)
    if len(raw) > _MAX_DOCUMENT_BYTES:
        raise ImageError(f"{source}: {name} is larger than {_MAX_DOCUMENT_BYTES >> 20} MiB")
    return raw


def _parse_object(raw: bytes, source: Path, name: str) -> dict[str, Any]:
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ImageError(f"{source}: {name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ImageError(f"{source}: {name} is not a JSON object")
    return value


def machine() -> str:
    """The architecture of this machine, by the name that images have for it."""
    name = platform.machine()
    return _MACHINES.get(name, name)


# Writing an OCI layout that many images share: each layer is in it once.

_MEDIA_TYPE = "application/vnd.oci.image"
_ENGINE_ID = "batch-trajectories.engine.id"
_PIECE_BYTES = 1 << 20


def add_to_layout(layout: Path, name: str, engine_id: str, save: Callable[[Path], object]) -> None:
    """Add an image of an engine to a layout; create the layout if it is missing.

    `save` writes the image as an archive. It is called only if the layout has no image with this
    id, maybe by other names. Raises `ImageError`.
    """
    layout.mkdir(parents=True, exist_ok=True)
    with lock_file(layout / ".lock"):
        index = _read_index(layout)
        entries: list[dict[str, Any]] = index["manifests"]
        known = next((e for e in entries if _annotations(e).get(_ENGINE_ID) == engine_id), None)
        if known is None:
            archive = layout / ".saved.tar"
            archive.unlink(missing_ok=True)  # a killed start may have left it
            try:
                save(archive)
                known = _add_archive(layout, archive)
            finally:
                archive.unlink(missing_ok=True)
        entry = {**known, "annotations": {NAME: name, _ENGINE_ID: engine_id}}
        index["manifests"] = [e for e in entries if _annotations(e).get(NAME) != name] + [entry]
        _write(layout / "oci-layout", orjson.dumps({"imageLayoutVersion": "1.0.0"}))
        _write(layout / "index.json", orjson.dumps(index))


def _read_index(layout: Path) -> dict[str, Any]:
    path = layout / "index.json"
    if not path.exists():
        return {"schemaVersion": 2, "manifests": []}
    try:
        index = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ImageError(f"{path}: not JSON: {error}") from error
    if not isinstance(index, dict) or not isinstance(index.get("manifests"), list):
        raise ImageError(f"{path}: not the index of an OCI layout")
    return index


def _annotations(entry: dict[str, Any]) -> dict[str, Any]:
    return entry.get("annotations") or {}


def _add_archive(layout: Path, archive: Path) -> dict[str, Any]:
    """Add the only image of an archive; return its entry for an index."""
    (image,) = read_images(archive)
    configuration = image.configuration()
    diff_ids = configuration["rootfs"]["diff_ids"]
    with open_source(archive) as open_member:
        with open_member(image.config) as file:
            config = _write_blob(layout, file, "config.v1+json")
        layers = []
        for path, diff_id in zip(image.layers, diff_ids, strict=True):
            with open_member(path) as file:
                layers.append(_write_blob(layout, file, _layer_type(file), diff_id))
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{_MEDIA_TYPE}.manifest.v1+json",
        "config": config,
        "layers": layers,
    }
    raw = orjson.dumps(manifest)
    digest = hashlib.sha256(raw).hexdigest()
    _write(layout / "blobs" / "sha256" / digest, raw)
    kind = manifest["mediaType"]
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(raw)}


def _layer_type(file: IO[bytes]) -> str:
    magic = file.read(4)
    file.seek(0)
    if magic.startswith(MAGIC_GZIP):
        return "layer.v1.tar+gzip"
    return "layer.v1.tar+zstd" if magic == MAGIC_ZSTD else "layer.v1.tar"


def _write_blob(layout: Path, file: IO[bytes], kind: str, diff_id: str = "") -> dict[str, Any]:
    """Add a blob, unless it exists; return its entry for a manifest."""
    blobs = layout / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    # The digest of an uncompressed layer is its diff id, so it need not be read.
    existing = blobs / diff_id.removeprefix("sha256:")
    if kind.endswith(".tar") and existing.is_file():
        digest, size = existing.name, existing.stat().st_size
    else:
        making = blobs / ".making"
        hashed = hashlib.sha256()
        with making.open("wb") as out:
            while piece := file.read(_PIECE_BYTES):
                hashed.update(piece)
                out.write(piece)
            size = out.tell()
            out.flush()
            os.fsync(out.fileno())  # later starts trust the name and do not read the blob again
        digest = hashed.hexdigest()
        making.replace(blobs / digest)
    return {"mediaType": f"{_MEDIA_TYPE}.{kind}", "digest": f"sha256:{digest}", "size": size}


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
