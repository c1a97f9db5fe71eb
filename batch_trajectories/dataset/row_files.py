"""The files and paths that rows name."""

from __future__ import annotations

import base64
import binascii
from pathlib import PurePosixPath
from typing import Any

from toolsets.workspace.workspace import HOME

_FORMS = ("base64", "text")
_ROOT = PurePosixPath(".")


class Executable(bytes):
    """The content of a file that may be run."""


def read_files(raw: Any, name: str, *, inside: bool) -> dict[str, bytes]:
    """Files by path: in the workspace or, `inside` an image, also absolute.

    Raises `ValueError` with the reason.
    """
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ValueError(f"`{name}` must be an object that maps paths to contents")
    files = {}
    for path, content in raw.items():
        files[read_path(path, name, inside=inside)] = _content(content, f"{name}.{path}")
    for path in files:
        if beneath := files.keys() & set(map(str, PurePosixPath(path).parents)):
            raise ValueError(f"`{name}`: {min(beneath)!r} is a file, so {path!r} cannot be in it")
    return files


def read_path(raw: Any, name: str, *, inside: bool) -> str:
    """The path of a file; see `read_files`. Raises `ValueError` with the reason."""
    if inside and isinstance(raw, str) and raw.startswith("/"):
        path = absolute_path(raw)
        if path is None or path == "/":
            raise ValueError(f"`{name}`: {raw!r} is not the path of a file, without `..`")
        return path
    relative = _in_workspace(raw)
    if relative is None or relative == _ROOT:
        raise ValueError(f"`{name}`: {raw!r} is not a path in the workspace")
    return str(relative)


def read_directory(raw: Any, name: str) -> str:
    """A directory of the workspace; None is its root. Raises `ValueError` with the reason."""
    path = _in_workspace("." if raw is None else raw)
    if path is None:
        raise ValueError(
            f"`{name}` must be a directory in the workspace: a relative path, or one in /workspace"
        )
    return str(path)


def absolute_path(raw: Any) -> str | None:
    """A path of an image without `.`, `..` and repeated slashes; None if it is not one."""
    if not isinstance(raw, str) or not raw.startswith("/") or "\0" in raw:
        return None
    names = [name for name in raw.split("/") if name not in ("", ".")]
    return None if ".." in names else "/" + "/".join(names)


def _in_workspace(raw: Any) -> PurePosixPath | None:
    """The path relative to the workspace; None if it is outside."""
    if not isinstance(raw, str) or not raw or "\0" in raw:
        return None
    path = PurePosixPath(raw)
    if path.is_absolute():
        if not path.is_relative_to(HOME):
            return None
        path = path.relative_to(HOME)
    return None if ".." in path.parts else path


def _content(raw: Any, place: str) -> bytes:
    if isinstance(raw, str):
        return raw.encode("utf-8", "replace")
    if isinstance(raw, dict):
        is_executable = raw.get("executable", False)
        texts = {name: text for name, text in raw.items() if name != "executable"}
        if isinstance(is_executable, bool) and len(texts) == 1:
            [(form, text)] = texts.items()
            if form in _FORMS and isinstance(text, str):
                content = (
                    _decoded(text, place) if form == "base64" else text.encode(errors="replace")
                )
                return Executable(content) if is_executable else content
    raise ValueError(
        f'`{place}` must be text, {{"base64": …}} or {{"text": …}}; the objects may have '
        "`executable`: true or false"
    )


def _decoded(text: str, place: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"`{place}`: not base64: {error}") from error
