"""Prompts of which only digests are published: in a file of their own and in the rows.

    prompts.digests.jsonl   {"id", "row", "texts"}: sha256 of the row and of each text of its prompt

In rows, a text that is a prompt becomes `sha256:HEX` wherever it stands whole, and longer texts
lose it where they quote it. `columns` of the metadata are emptied. A row in which no prompt is
found is an error, so that none is published unnoticed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson

from batch_trajectories.basics import exact_json
from batch_trajectories.basics.console import LongWork
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.dataset.row_conversation import opening_messages, read_user_turns
from batch_trajectories.dataset.scan import Scan, tasks
from batch_trajectories.export.conversation.row_json import compact_json, dumps_row
from batch_trajectories.export.rows.recipe import Recipe
from batch_trajectories.export.rows.row_files import HashingFile, Written
from batch_trajectories.records.files import open_temporary

DIGESTS_FILE = "prompts.digests.jsonl"

_FORMATS = frozenset({"dpo", "hermes", "kto", "llamafactory", "openai"})
"""Formats whose rows are texts in JSON lines."""

_MIN_QUOTED = 24
"""The shortest prompt that is looked for inside of other texts, in characters."""

_KEPT_KEYS = frozenset({"id", "tools"})
"""Columns of rows that hold no prompt."""


def check_formats(recipe: Recipe) -> None:
    """Raise `ConfigError` for formats from whose rows prompts cannot be taken."""
    others = [one for one in recipe.formats if one not in _FORMATS]
    if others:
        raise ConfigError(
            f"--prompts=digests: rows of {others[0]} would show the prompts in another form; "
            f"choose formats among {', '.join(sorted(_FORMATS))}"
        )


def prompt_texts(columns: Mapping[str, Any], scan: Scan) -> tuple[str, ...]:
    """The texts of the user in a row of the dataset. Raises `ConfigError` if it has none."""
    try:
        messages = opening_messages(columns, None)
        later = read_user_turns(columns, scan.rules.options)
    except ValueError as error:
        raise ConfigError(f"--prompts=digests: a row has no prompt to withhold: {error}") from error
    found = [message["content"] for message in messages if message["role"] == "user"]
    return tuple(text for text in (*found, *later) if text)


def write_digests(scan: Scan, path: Path) -> dict[str, tuple[str, ...]]:
    """Write the digests of all prompts; returns the texts of each prompt by its id."""
    texts: dict[str, tuple[str, ...]] = {}
    with open_temporary(path, path) as file:
        for task in tasks(scan, range(0, scan.tasks, scan.num_samples)):
            found = texts[task.prompt_id] = prompt_texts(task.columns, scan)
            row = exact_json.dumps(task.columns, option=orjson.OPT_SORT_KEYS)
            line = {
                "id": task.prompt_id,
                "row": sha256(row).hexdigest(),
                "texts": [_digest(text) for text in found],
            }
            file.write(orjson.dumps(line) + b"\n")
    return texts


def withhold_prompts(
    directory: Path, manifest: dict[str, Any], texts: Mapping[str, Sequence[str]]
) -> None:
    """Replace the prompts in all rows of a dataset; updates the manifest. Raises `ConfigError`."""
    for part in manifest["formats"]:
        for file in part["files"]:
            path = directory / file["path"]
            written = _rewrite(path, file["path"], texts)
            file |= written.to_json()


def _rewrite(path: Path, name: str, texts: Mapping[str, Sequence[str]]) -> Written:
    temporary = path.with_name(f".{path.name}.tmp")
    target = HashingFile(open_temporary(temporary, path))
    rows = 0
    with path.open("rb") as file, LongWork(f"withholding prompts in {name}", unit="rows") as work:
        for line in file:
            rows += 1
            target.write(dumps_row(_withhold_prompts(exact_json.loads(line), texts, name)))
            work.advance()
    digest = target.finish()
    temporary.replace(path)
    return Written(path=name, rows=rows, size=target.size, sha256=digest)


def _withhold_prompts(
    row: dict[str, Any], texts: Mapping[str, Sequence[str]], name: str
) -> dict[str, Any]:
    metadata = exact_json.loads(row["metadata"])
    # A row of a pair has the id of its prompt.
    prompt_id = metadata.get("prompt_id") or row["id"]
    replacing = _Replacing(texts.get(prompt_id, ()))
    made = {
        key: value if key in _KEPT_KEYS else replacing.replace(value)
        for key, value in row.items()
        if key != "metadata"
    }
    if not replacing.count:
        raise ConfigError(
            f"{name}: {row['id']}: its prompt was not found in the row, so it cannot be withheld; "
            "leave the conversation out by a filter of the recipe"
        )
    if "columns" in metadata:
        metadata["columns"] = {}
    # The order of keys stays: readers compare rows as bytes.
    return {
        key: compact_json(replacing.replace(metadata)) if key == "metadata" else made[key]
        for key in row
    }


class _Replacing:
    """Replaces the texts of one prompt by their digests, and counts how often."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._marks = {text.strip(): f"sha256:{_digest(text)}" for text in texts if text.strip()}
        quoted = {
            form: mark
            for text, mark in self._marks.items()
            if len(text) >= _MIN_QUOTED
            for form in (text, _escape(text, ascii=False), _escape(text, ascii=True))
        }
        self._quoted = sorted(quoted.items(), key=lambda pair: -len(pair[0]))
        self.count = 0

    def replace(self, value: Any) -> Any:
        """The value with all texts replaced, also inside of lists and objects."""
        match value:
            case str():
                return self._replace_in_text(value)
            case list():
                return [self.replace(one) for one in value]
            case dict():
                return {key: self.replace(one) for key, one in value.items()}
        return value

    def _replace_in_text(self, text: str) -> str:
        if (mark := self._marks.get(text.strip())) is not None:
            self.count += 1
            return mark
        for quoted, mark in self._quoted:
            if quoted in text:
                self.count += 1
                text = text.replace(quoted, mark)
        return text


def _escape(text: str, *, ascii: bool) -> str:
    """The text as it stands inside of a JSON string."""
    return json.dumps(text, ensure_ascii=ascii)[1:-1]


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()
