"""`--only_sound`: of a dataset only the rows that an audit found sound.

A row is known by what makes its task (see `task_digest`), so a verdict does not outlive a change of
the row, of its rows file or of its image.
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
from batch_trajectories.engine.run_dir import directory_of, read_run_json

UNKNOWN, CHANGED, REPLACED = "not in the audit", "changed since", "image replaced since"


class SoundRows:
    """Which rows an audit found sound, and how many rows had each verdict."""

    def __init__(
        self,
        name: str,
        *,
        verdicts: Mapping[str, str],
        ids: frozenset[str],
        replaced: frozenset[str],
    ) -> None:
        """`verdicts` by digest, the `ids` of all rows, and digests whose image was `replaced`."""
        self._name = name
        self._verdicts = verdicts
        self._ids = ids
        self._replaced = replaced
        decides = repr((sorted(verdicts.items()), sorted(replaced))).encode()
        self.digest = blake2b(decides, digest_size=8).hexdigest()
        self.counts: Counter[str] = Counter()

    def takes(self, columns: Mapping[str, Any]) -> bool:
        """Whether a row is to be used; a bad row is, too: the scan names it."""
        if ERROR_COLUMN in columns:
            return True
        verdict = self._verdict_of(columns)
        self.counts[verdict] += 1
        return verdict == SOUND

    def _verdict_of(self, columns: Mapping[str, Any]) -> str:
        digest = task_digest(columns)
        if digest in self._replaced:
            return REPLACED
        if digest in self._verdicts:
            return self._verdicts[digest]
        ids = {str(columns[name]) for name in ID_COLUMNS if name in columns}
        return CHANGED if ids & self._ids else UNKNOWN

    def to_json(self) -> dict[str, Any]:
        """For the description of the dataset: the audit, and rows by verdict."""
        return {"audit": self._name, "digest": self.digest, "rows": dict(self.counts)}


def describe_sound(told: Mapping[str, Any]) -> str:
    """What `to_json` says, in a line."""
    rows = dict(told["rows"])
    used = rows.pop(SOUND, 0)
    left = ", ".join(f"{count:,} {name}" for name, count in sorted(rows.items())) or "none"
    return f"--only_sound={told['audit']}: {plural(used, 'sound row')}; left out: {left}"


def read_sound_rows(config: RunConfig) -> SoundRows | None:
    """The rows that `--only_sound` allows; None without it.

    Raises `ConfigError` where there is no audit, or one with other options of tasks.
    """
    if config.only_sound is None:
        return None
    name = config.only_sound
    path = directory_of(name, config.output_dir)
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
        # Of rows with the same task, one may lack the solution that the other proves it by.
        if known == NO_REFERENCE or (known == SOUND and line.verdict != NO_REFERENCE):
            verdicts[line.digest] = line.verdict
    others = replaced_images(config, dict(line.image for line in lines if line.image))
    replaced = frozenset(line.digest for line in lines if line.image and line.image[0] in others)
    ids = frozenset(line.id for line in lines)
    return SoundRows(name, verdicts=verdicts, ids=ids, replaced=replaced)


class _Line(NamedTuple):
    """The fields of a line of tasks.jsonl that count here."""

    id: str
    verdict: str
    digest: str
    image: tuple[str, str] | None
    """Its reference and digest."""
    has_check: bool
    """Its row has a check."""


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
