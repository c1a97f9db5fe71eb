"""Container images made of this machine's files: no network, no container program.

`tree_of_programs` gives the files of an image, `write_layout` an OCI layout, and `write_saved` an
archive as `docker save` writes it. Layers are lists of `Entry`, so tests can write hostile ones.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

_MEDIA = "application/vnd.oci.image"
_CACHES = "__pycache__"
_LEFT_OUT = ("test", "tests", "idlelib", "lib2to3", "ensurepip", "tkinter")
_PROGRAMS = (
    "bash",
    "sh",
    "env",
    "ls",
    "cat",
    "head",
    "tail",
    "sed",
    "grep",
    "mkdir",
    "rm",
    "cp",
    "mv",
    "touch",
    "id",
    "find",
    "sort",
    "wc",
    "chmod",
    "chown",
    "pwd",
    "dirname",
    "basename",
    "tr",
    "cut",
    "true",
    "false",
    "sleep",
    "ln",
    "dd",
    "stat",
    "mknod",
    "uname",
    "date",
    "tar",
    "xargs",
)
MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


@dataclass(frozen=True, slots=True)
class Entry:
    """One member of a layer."""

    path: str
    content: bytes = b""
    kind: bytes = tarfile.REGTYPE
    link: str = ""
    mode: int = 0o644
    device: tuple[int, int] = (0, 0)


def directory(path: str, mode: int = 0o755) -> Entry:
    """A directory of a layer."""
    return Entry(path, kind=tarfile.DIRTYPE, mode=mode)


def symlink(path: str, target: str) -> Entry:
    """A symlink of a layer."""
    return Entry(path, kind=tarfile.SYMTYPE, link=target, mode=0o777)


def layer_of(entries: Iterable[Entry]) -> bytes:
    """An uncompressed layer."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            member = tarfile.TarInfo(entry.path)
            member.type, member.mode, member.linkname = entry.kind, entry.mode, entry.link
            member.devmajor, member.devminor = entry.device
            member.size = len(entry.content) if entry.kind == tarfile.REGTYPE else 0
            archive.addfile(member, io.BytesIO(entry.content))
    return buffer.getvalue()


def layer_of_tree(root: Path, *, owner: int = 0) -> bytes:
    """An uncompressed layer with all files of a directory, which belong to one user."""
    buffer = io.BytesIO()

    def owned(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = owner
        member.uname = member.gname = ""
        return member

    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.add(root, arcname=".", filter=owned)
    return buffer.getvalue()


def write_layout(
    path: Path, layers: Sequence[bytes], *, name: str, config: Mapping[str, Any] | None = None
) -> str:
    """Write an OCI layout with one image; return the digest of its manifest."""
    blobs = path / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def blob(content: bytes, kind: str) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        return {
            "mediaType": f"{_MEDIA}.{kind}",
            "digest": f"sha256:{digest}",
            "size": len(content),
        }

    described = json.dumps(_config(layers, config)).encode()
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{_MEDIA}.manifest.v1+json",
        "config": blob(described, "config.v1+json"),
        "layers": [blob(_compressed(raw), "layer.v1.tar+gzip") for raw in layers],
    }
    entry = blob(json.dumps(manifest).encode(), "manifest.v1+json")
    entry["annotations"] = {"org.opencontainers.image.ref.name": name}
    index = {"schemaVersion": 2, "manifests": [entry]}
    (path / "index.json").write_text(json.dumps(index))
    (path / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))
    return str(entry["digest"])


@lru_cache(maxsize=4)
def _compressed(layer: bytes) -> bytes:
    """Images of tests share their large layers."""
    return gzip.compress(layer, 1, mtime=0)


def write_saved(
    path: Path, layers: Sequence[bytes], *, name: str, config: Mapping[str, Any] | None = None
) -> None:
    """Write an archive as `docker save` writes it."""
    described = json.dumps(_config(layers, config)).encode()
    config_name = f"{hashlib.sha256(described).hexdigest()}.json"
    names = [f"{number}/layer.tar" for number in range(len(layers))]
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": names}]
    files = {
        "manifest.json": json.dumps(manifest).encode(),
        config_name: described,
        **dict(zip(names, layers, strict=True)),
    }
    path.write_bytes(layer_of(Entry(name, content) for name, content in files.items()))


def tree_of_programs(
    root: Path,
    *,
    with_python: bool = True,
    with_git: bool = True,
    with_shell: bool = True,
    with_caches: bool = False,
) -> None:
    """Make the root directory of an image with programs of this machine.

    `with_caches`: with the compiled modules of Python, as most images have them.
    """
    programs = {name: shutil.which(name) for name in _PROGRAMS}
    if with_git:
        programs["git"] = shutil.which("git")
    if not with_shell:
        programs = {"cat": programs["cat"]}
    needed = {Path(found) for found in programs.values() if found}
    python = Path(sys.executable).resolve()
    libraries = Path(sysconfig.get_path("stdlib"))
    if with_python:
        needed |= {python, *(libraries / "lib-dynload").glob("*.so")}
    shared = {library for program in needed for library in _libraries(program)}
    for name in ("bin", "lib", "lib64", "sbin"):
        (root / "usr" / name).mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(f"usr/{name}")
    for path in (needed | shared) - {python}:
        _put(root, path)
    for name in ("tmp", "etc", "root", "run", "home"):
        (root / name).mkdir(exist_ok=True)
    (root / "tmp").chmod(0o1777)
    (root / "etc/passwd").write_text(
        "root:x:0:0:root:/root:/bin/sh\nagent:x:1234:1234::/home/agent:/bin/sh\n"
    )
    (root / "etc/group").write_text("root:x:0:\nagent:x:1234:\n")
    if with_python:
        own = root / str(libraries).lstrip("/")
        left_out = [*_LEFT_OUT, *([] if with_caches else [_CACHES])]
        skipped = shutil.ignore_patterns(*left_out, "config-*", "site-packages", "dist-packages")
        shutil.copytree(libraries, own, ignore=skipped, dirs_exist_ok=True)
        binary = root / str(python).lstrip("/")
        binary.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(python, binary)
        (root / "usr/bin/python3").symlink_to(python)


def put_program(root: Path, program: Path) -> None:
    """Add a program of this machine to an image, with its libraries."""
    _put(root, program)
    put_libraries(root, program)


def put_libraries(root: Path, program: Path) -> None:
    """Add what a program needs, which itself is elsewhere."""
    for library in _libraries(program):
        if not os.path.lexists(root / os.path.realpath(library).lstrip("/")):
            _put(root, library)


def make_repository(path: Path, files: Mapping[str, str]) -> None:
    """Make a git repository with one commit."""
    for name, content in files.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    git = ["git", "-C", str(path), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    # An empty template: sample hooks are only noise.
    for command in (["init", "-q", "-b", "main", "--template="], ["add", "-A"]):
        subprocess.run([*git, *command], check=True)
    subprocess.run([*git, "commit", "-qm", "start"], check=True)


def _config(layers: Sequence[bytes], config: Mapping[str, Any] | None) -> dict[str, Any]:
    diff_ids = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
    return {
        "architecture": MACHINE,
        "os": "linux",
        "config": {"Env": ["PATH=/usr/bin:/bin"], **(config or {})},
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
        "history": [{"created_by": "testing"} for _ in layers],
    }


def _libraries(program: Path) -> list[Path]:
    done = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False)
    return [Path(word) for word in done.stdout.split() if word.startswith("/")]


def _put(root: Path, path: Path) -> None:
    parent = os.path.realpath(path.parent)
    target = root / parent.lstrip("/") / path.name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path.resolve(), target)
