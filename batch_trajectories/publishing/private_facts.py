"""Finds what must not be published: keys, and facts of the publisher's machine.

All files of a publication are searched before it gets its name. A finding says where it is and of
which kind, never the text itself.
"""

from __future__ import annotations

import getpass
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from agent.models.providers import find_provider
from batch_trajectories.basics.console import LongWork
from batch_trajectories.config.endpoints import is_secret_name
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.export.filters.filters import make_scanner

_MIN_SECRET = 8
"""The shortest value of a variable that is searched for, in characters."""

_COMMON_USERS = frozenset({"admin", "root", "user", "ubuntu", "test", "runner", "app", "dev"})
"""Names of users that say nothing about a person."""

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0"})

_PATH = "a path of this machine"

_SYSTEM = ("/bin/", "/dev/", "/etc/", "/lib/", "/opt/", "/proc/", "/sys/", "/usr/")

_BINARY = (".parquet", ".arrow")
_BATCH_ROWS = 64


class PrivatePlace(NamedTuple):
    """A place of a publication with something private."""

    path: str
    line: int
    """The line, or the row of a binary file, from 1."""
    kind: str


class PrivateFacts:
    """Searches texts for keys and for facts of this machine."""

    def __init__(
        self,
        config: RunConfig,
        paths: Collection[Path],
        *,
        environ: Mapping[str, str] = os.environ,
        allowed: Collection[str] = (),
    ) -> None:
        """`paths` are those of the run; `allowed` are texts that may be published."""
        self._allowed = [text for text in allowed if text]
        self._scan = make_scanner(with_detect_secrets=False)
        facts = dict(_values(config, environ)) | dict(_places(config, paths, environ))
        self._kinds = {text: kind for text, kind in facts.items() if text not in self._allowed}
        self._user = _user_name(environ)
        self._home = environ.get("HOME", "")
        if self._user:
            for home in ("home", "Users"):
                self._kinds.setdefault(f"/{home}/{self._user}", "a home directory")
        longest_first = sorted(self._kinds, key=len, reverse=True)
        # A path must end there: /home/al is not in /home/alice.
        parts = [
            re.escape(text) + (r"(?![\w-])" if text.startswith("/") else "")
            for text in longest_first
        ]
        self._pattern = re.compile("|".join(parts)) if parts else None

    def find_in(self, directory: Path, paths: Collection[str]) -> Iterator[PrivatePlace]:
        """The findings in files of a directory.

        `paths` lead to files of rows, whose text is that of conversations, and others, in which
        the name of the user counts, too.
        """
        total = sum((directory / path).stat().st_size for path in paths)
        with LongWork("searching for keys and paths", total=total, unit="B") as work:
            for path in paths:
                is_rows = "/" in path or path.startswith("prompts.")
                for number, text in enumerate(_texts(directory / path), start=1):
                    work.advance(len(text))
                    if kind := self._kind_in(text, is_conversation=is_rows):
                        yield PrivatePlace(path, number, kind)

    def _kind_in(self, text: str, *, is_conversation: bool) -> str | None:
        for allowed in self._allowed:
            text = text.replace(allowed, "")
        if self._pattern is not None and (found := self._pattern.search(text)):
            return self._kinds[found[0]]
        if kind := self._scan(text):
            return f"a secret ({kind})"
        if is_conversation:
            return None
        # Conversations in containers may say /root, and any name can be a word in them.
        if self._user and re.search(rf"\b{re.escape(self._user)}\b", text):
            return "the name of the user"
        if self._home.strip("/") and f"{self._home}/" in text:
            return _PATH
        return None


def _values(config: RunConfig, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The values of variables that hold credentials, or are named by the run."""
    named = {config.key_env, *config.env_from}
    for endpoint in config.endpoints.values():
        named |= {endpoint.key_env, *endpoint.headers_env.values()}
    for name, value in environ.items():
        if (name in named or is_secret_name(name)) and len(value) >= _MIN_SECRET:
            yield value, f"the value of the variable {name}"


def _places(
    config: RunConfig, paths: Collection[Path], environ: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Directories of this machine, and addresses of the publisher's servers."""
    given = [environ.get("HOME", ""), str(Path.cwd()), *map(str, paths)]
    for text in given:
        for path in {os.path.abspath(text), os.path.realpath(text)} if text else ():  # noqa: PTH100
            if _is_of_one_machine(path):
                yield path, _PATH
    for text in _find_texts(config.to_json()):
        path = text.partition(":")[0]
        if text.startswith("/") and path != config.workdir and _is_of_one_machine(path):
            yield path, _PATH
    urls = [config.base_url, *(url for e in config.endpoints.values() for url in _urls(e))]
    for url in urls:
        parts = urlsplit(url or "")
        if url and parts.hostname not in _LOOPBACK and not find_provider(url):
            yield parts.netloc, "the address of a server"


def _is_of_one_machine(path: str) -> bool:
    """Whether a path is none of those that many machines and images have."""
    return path.count("/") >= 2 and not path.startswith(_SYSTEM)


def _find_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _find_texts(one)


def _urls(endpoint: Any) -> Iterator[str | None]:
    yield endpoint.base_url
    yield from endpoint.base_urls


def _user_name(environ: Mapping[str, str]) -> str | None:
    """The name of the user; None if it says nothing about a person or is too short to find."""
    name = environ.get("USER") or environ.get("LOGNAME")
    if not name:
        try:
            name = getpass.getuser()
        except (KeyError, OSError):
            return None
    return None if name in _COMMON_USERS or len(name) < 3 else name


def _texts(path: Path) -> Iterator[str]:
    """The lines of a file, or the rows of a binary one as JSON."""
    if path.suffix not in _BINARY:
        with path.open("rb") as file:
            for line in file:
                yield line.decode(errors="replace")
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    with path.open("rb") as file:
        batches: Any = (
            pq.ParquetFile(file).iter_batches(batch_size=_BATCH_ROWS)
            if path.suffix == ".parquet"
            else pa.ipc.open_stream(file)
        )
        for batch in batches:
            for row in batch.to_pylist():
                yield json.dumps(row, ensure_ascii=False, default=str)
