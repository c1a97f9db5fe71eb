"""Writing an OCI layout that many images share: each layer is in it once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import orjson

from batch_trajectories.basics.locked import locked
from toolsets.images.archives import images_of, opener
from toolsets.images.layers import MAGIC_GZIP, MAGIC_ZSTD
from toolsets.images.names import ImageError

_TYPE = "application/vnd.oci.image"
_NAME = "org.opencontainers.image.ref.name"
_OF_ENGINE = "batch-trajectories.engine.id"
_PIECE_BYTES = 1 << 20


def add_to_layout(layout: Path, name: str, engine_id: str, save: Callable[[Path], object]) -> None:
    """Add an image of an engine to a layout, which is made where it is missing.

    `save` writes it as an archive; it is called only if the layout has no image with this id, which
    may have other names. Raises `ImageError`.
    """
    layout.mkdir(parents=True, exist_ok=True)
    with locked(layout / ".lock"):
        index = _index(layout)
        entries: list[dict[str, Any]] = index["manifests"]
        known = next((e for e in entries if _notes(e).get(_OF_ENGINE) == engine_id), None)
        if known is None:
            archive = layout / ".saved.tar"
            archive.unlink(missing_ok=True)  # of a start that was killed
            try:
                save(archive)
                known = _added(layout, archive)
            finally:
                archive.unlink(missing_ok=True)
        entry = {**known, "annotations": {_NAME: name, _OF_ENGINE: engine_id}}
        index["manifests"] = [e for e in entries if _notes(e).get(_NAME) != name] + [entry]
        _write(layout / "oci-layout", orjson.dumps({"imageLayoutVersion": "1.0.0"}))
        _write(layout / "index.json", orjson.dumps(index))


def _index(layout: Path) -> dict[str, Any]:
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


def _notes(entry: dict[str, Any]) -> dict[str, Any]:
    return entry.get("annotations") or {}


def _added(layout: Path, archive: Path) -> dict[str, Any]:
    """Add the one image of an archive; return how an index names it."""
    (image,) = images_of(archive)
    described = image.configuration()
    diff_ids = described["rootfs"]["diff_ids"]
    with opener(archive) as open_member:
        with open_member(image.config) as file:
            config = _write_blob(layout, file, "config.v1+json")
        layers = []
        for path, diff_id in zip(image.layers, diff_ids, strict=True):
            with open_member(path) as file:
                layers.append(_write_blob(layout, file, _layer_type(file), diff_id))
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{_TYPE}.manifest.v1+json",
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
    """Add a blob, unless it is there; return how a manifest names it."""
    blobs = layout / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    known = blobs / diff_id.removeprefix("sha256:")
    if kind.endswith(".tar") and known.is_file():
        digest, size = known.name, known.stat().st_size
    else:
        making = blobs / ".making"
        hashed = hashlib.sha256()
        with making.open("wb") as out:
            while piece := file.read(_PIECE_BYTES):
                hashed.update(piece)
                out.write(piece)
            size = out.tell()
            out.flush()
            os.fsync(out.fileno())  # a blob is known by its name from then on
        digest = hashed.hexdigest()
        making.replace(blobs / digest)
    return {"mediaType": f"{_TYPE}.{kind}", "digest": f"sha256:{digest}", "size": size}


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
