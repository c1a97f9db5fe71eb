"""Selects the rows of a dataset that an audit found sound: `--only_sound`.

A row is found by the digest of its task (see `task_digest`). So a verdict no longer counts after a
change of the row, its rows file or its image.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from batch_trajectories.audit.audited import SAME_IN_RUNS
from batch_trajectories.audit.verdicts import NO_REFERENCE, SOUND, TASKS_FILE, task_digest
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.errors import ConfigError, RunDirError
from batch_trajectories.basics.text import plural
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.config.sandboxes import replaced_images
from batch_trajectories.dataset.row_conversation import ERROR_COLUMN
from batch_trajectories.dataset.scan import ID_COLUMNS
from batch_trajectories.engine.run_dir import find_run_dir, read_run_json

UNKNOWN, CHANGED, REPLACED = "not in the audit", "changed since", "image replaced since"


class SoundRows:
    """Selects rows by the verdicts of an audit, and counts the rows by verdict."""

    def __init__(
        self,
        name: str,
        *,
        verdicts: Mapping[str, str],
        ids: frozenset[str],
        replaced: frozenset[str],
    ) -> None:
        """`verdicts` are by digest of the task, `ids` those of all audited rows.

        `replaced` are digests of tasks whose image was replaced since.
        """
        self._name = name
        self._verdicts = verdicts
        self._ids = ids
        self._replaced = replaced
        decides = repr((sorted(verdicts.items()), sorted(replaced))).encode()
        self.digest = blake2b(decides, digest_size=8).hexdigest()
        self.counts: Counter[str] = Counter()

    def accepts(self, columns: Mapping[str, Any]) -> bool:
        """Whether to use a row. Bad rows are used, too: the scan reports them."""
        if ERROR_COLUMN in columns:
            return True
        verdict = self._find_verdict(columns)
        self.counts[verdict] += 1
        return verdict == SOUND

    def _find_verdict(self, columns: Mapping[str, Any]) -> str:
        digest = task_digest(columns)
        if digest in self._replaced:
            return REPLACED
        if digest in self._verdicts:
            return self._verdicts[digest]
        ids = {str(columns[name]) for name in ID_COLUMNS if name in columns}
        return CHANGED if ids & self._ids else UNKNOWN

    def to_json(self) -> dict[str, Any]:
        """The audit and the number of rows by verdict, for the description of the dataset."""
        return {"audit": self._name, "digest": self.digest, "rows": dict(self.counts)}


def describe_sound(counts: Mapping[str, Any]) -> str:
    """Describe the value of `SoundRows.to_json` in a line."""
    rows = dict(counts["rows"])
    used = rows.pop(SOUND, 0)
    left = ", ".join(f"{count:,} {name}" for name, count in sorted(rows.items())) or "none"
    return f"--only_sound={counts['audit']}: {plural(used, 'sound row')}; left out: {left}"


def read_sound_rows(config: RunConfig) -> SoundRows | None:
    """Read the audit of `--only_sound`; None without this option.

    Raises `ConfigError` if there is no such audit, or if its options of tasks differ.
    """
    if config.only_sound is None:
        return None
    name = config.only_sound
    path = find_run_dir(name, config.output_dir)
    try:
        options = read_run_json(path)["config"]
        lines = [*_read(path / TASKS_FILE)]
    except (OSError, RunDirError, orjson.JSONDecodeError) as error:
        raise ConfigError(
            f"--only_sound={name}: no audit at {path}: {error}; `check_tasks --run_name={name}` "
            "makes it"
        ) from error
    now = config.to_json()
    for option in SAME_IN_RUNS:
        before = options.get(option, RunConfig.model_fields[option].get_default())
        if before != now[option]:
            raise ConfigError(
                f"--only_sound={name}: the audit had {option}={before!r}, this run has "
                f"{now[option]!r}: its verdicts hold for the same tasks only"
            )
    if not config.row_setup and any(line.has_check for line in lines):
        raise ConfigError(f"--only_sound={name}: its rows have checks; add --row_setup")
    verdicts: dict[str, str] = {}
    for line in lines:
        known = verdicts.get(line.digest, NO_REFERENCE)
        # Several rows may have the same task, and only some of them the solution that proves it.
        if known == NO_REFERENCE or (known == SOUND and line.verdict != NO_REFERENCE):
            verdicts[line.digest] = line.verdict
    others = replaced_images(config, dict(line.image for line in lines if line.image))
    replaced = frozenset(line.digest for line in lines if line.image and line.image[0] in others)
    ids = frozenset(line.id for line in lines)
    return SoundRows(name, verdicts=verdicts, ids=ids, replaced=replaced)


class _Line(NamedTuple):
    """The fields of a line of tasks.jsonl that select rows."""

    id: str
    verdict: str
    digest: str
    image: tuple[str, str] | None
    """Reference and digest of the image; None without one."""
    has_check: bool
    """Whether the row has a check."""


def _read(path: Path) -> Iterator[_Line]:
    with path.open("rb") as file:
        for content in file:
            line = exact_json.loads(content)
            image = line["image"] and (line["image"]["reference"], line["image"]["digest"])
            has_check = any("command" in step for step in line["steps"])
            yield _Line(
                id=line["id"],
                verdict=line["verdict"],
                digest=line["digest"],
                image=image,
                has_check=has_check,
            )
