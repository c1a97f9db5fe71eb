"""The questions of benchmarks, from all that can be a dataset, and from plain text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

import orjson

from batch_trajectories.basics.console import LongWork
from batch_trajectories.basics.errors import ConfigError, DatasetError
from batch_trajectories.export.conversation.texts import strings_in
from batch_trajectories.runs.dataset.lines import TOO_LONG
from batch_trajectories.runs.sources.kept_dataset import rows_of_source
from batch_trajectories.runs.sources.source import HUB_PREFIX, DataSource, has_rows, source_of

OPTION = "filters.evaluation_files"


class EvaluationSet:
    """The rows of one benchmark."""

    def __init__(self, name: str) -> None:
        """`name` is a path or `hf:...`. Raises `ConfigError`, or `EnvironmentStop` for a hub."""
        self.path = Path(name)
        self.name = name if name.startswith(HUB_PREFIX) else PurePath(name).name
        self.revision: str | None = None
        """The commit of a dataset of the hub."""
        self._source: DataSource | None = None
        if name.startswith(HUB_PREFIX) or self.path.is_dir() or has_rows(self.path.name):
            self._source = _checked(lambda: source_of(Path(name)))
            if self._source.hub is not None:
                from batch_trajectories.runs.sources.hub import revision_of

                hub = self._source.hub
                self.revision = _checked(lambda: revision_of(hub))

    def rows(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Number and columns of each row; lines of text have the column `text`.

        Raises as the constructor does.
        """
        with LongWork(f"reading {self.name}", unit="rows") as work:
            try:
                for number, row in self._read():
                    work.advance()
                    yield number, row
            except DatasetError as error:
                raise ConfigError(f"{OPTION}: {error}") from error
            except OSError as error:
                raise ConfigError(
                    f"{OPTION}: {error.filename or self.path}: cannot read these evaluation "
                    f"questions: {error.strerror or error}"
                ) from error

    def _read(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        source = self._source
        if source is None:
            with self.path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    yield number, {"text": self._decoded(line, number)}
            return
        if source.tasks:
            # Also those that could not run here.
            for number, task in enumerate(source.tasks, start=1):
                told = task.path / "instruction.md"
                text = self._decoded(told.read_bytes(), number) if told.is_file() else ""
                yield number, {"id": task.id, "instruction": text}
            return
        for number, row in enumerate(rows_of_source(source, set(), self.revision), start=1):
            if isinstance(row, bytes):
                row = self._parsed(row, number)
            yield number, row if isinstance(row, dict) else {"text": row}

    def _decoded(self, text: bytes, number: int) -> str:
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise self._no_question("UTF-8", number) from error

    def _parsed(self, line: bytes, number: int) -> Any:
        if line == TOO_LONG:
            raise self._no_question("short enough", number)
        try:
            return orjson.loads(line) if line.strip() else {}
        except orjson.JSONDecodeError as error:
            raise self._no_question("JSON", number) from error

    def _no_question(self, kind: str, number: int) -> ConfigError:
        return ConfigError(
            f"{OPTION}: {self.path}:{number}: not {kind}, so it is not a question; fix or remove "
            "that line"
        )


def texts_in(row: Mapping[str, Any], columns: Iterable[str] | None) -> Iterator[str]:
    """All texts of a row, or of some of its columns."""
    for name in row if columns is None else columns:
        yield from strings_in(row.get(name))


def _checked(read: Any) -> Any:
    try:
        return read()
    except DatasetError as error:
        raise ConfigError(f"{OPTION}: {error}") from error
