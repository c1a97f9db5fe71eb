"""Replies of a judge model, saved beside the records so that no question is paid for twice.

`verdicts.jsonl` in the run directory holds a line per reply or failure, appended and synced before
it counts: {"key", "id", "judge", "reply" (null where it failed), "error" (null where it did not),
"model", "usage", "cost_usd", "at"}. The key is a hash of the judge and its whole prompt, so records
with the same question share an answer, and another judge or prompt is asked again. The last line of
a key counts. Exports read only these lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import orjson

from agent.models.model import ModelSettings
from agent.models.providers import provider_at
from agent.models.resolve import resolve_model
from batch_trajectories.export.conversation.ending import answer_of
from batch_trajectories.export.conversation.texts import user_texts
from batch_trajectories.export.recipe import Judge
from batch_trajectories.runs.errors import ConfigError
from batch_trajectories.runs.store.checksum import read_object
from batch_trajectories.runs.store.record_types import Record
from batch_trajectories.runs.store.records import lines_from

NAME = "verdicts.jsonl"

_PLACES = re.compile(r"\{(question|answer|expected)\}")


class Question(NamedTuple):
    """The question to the judge about one record."""

    key: str
    text: str


class Kept(NamedTuple):
    """The place of a verdict in the file, and its question."""

    key: str
    offset: int
    has_reply: bool


class JudgeQuestions:
    """Composes the questions for one judge."""

    def __init__(self, judge: Judge) -> None:
        """Raises `ConfigError` for an unknown model."""
        self._judge = judge
        self.settings = _settings(judge)
        fields = {name: getattr(self.settings, name) for name in ("name", "api", "base_url")}
        self._of_judge = {
            **fields,
            "temperature": judge.temperature,
            "max_tokens": judge.max_tokens,
        }

    def about(self, record: Record) -> Question | None:
        """The question about a record, None if it has no answer."""
        answer = answer_of(record)
        if answer is None:
            return None
        expected = record.row.get(self._judge.column)
        said = {
            "question": "\n\n".join(user_texts(record)),
            "answer": answer,
            "expected": "(not given)" if expected is None else str(expected),
        }
        # One pass, so a placeholder inside a text is not replaced.
        text = _PLACES.sub(lambda place: said[place[1]], self._judge.prompt)
        content = orjson.dumps([self._of_judge, text])
        return Question(blake2b(content, digest_size=16).hexdigest(), text)


class Verdicts:
    """The replies on disk; only their places are in memory."""

    def __init__(self, run_dir: Path, judge: Judge) -> None:
        """An incomplete last line is ignored. Raises `ConfigError`."""
        self._path = run_dir / NAME
        self._judge = judge
        self._questions = JudgeQuestions(judge)
        self._right, self._wrong = re.compile(judge.right), re.compile(judge.wrong)
        self._offsets = {kept.key: kept.offset for kept in read_verdicts(self._path)}

    def objection(self, record: Record) -> tuple[str, str] | None:
        """Why a record is left out, as reason and detail; None if its answer is right."""
        question = self._questions.about(record)
        if question is None:
            return "judge", "there is no answer"
        if (offset := self._offsets.get(question.key)) is None:
            return "judge_failed", "the judge was not asked"
        with self._path.open("rb") as file:
            file.seek(offset)
            line = orjson.loads(file.readline())
        if line["reply"] is None:
            return "judge_failed", line["error"]
        *_, last = line["reply"].strip().splitlines() or [""]
        is_right, is_wrong = (bool(one.search(last)) for one in (self._right, self._wrong))
        if is_right == is_wrong:
            return "judge_failed", f"neither right nor wrong: {last[-200:]!r}"
        return None if is_right else ("judge", f"{self._judge.model} found it wrong")


def read_verdicts(path: Path) -> Iterator[Kept]:
    """Keys and places of all lines; raises `ConfigError` for a line that is not a verdict."""
    for number, (offset, content) in enumerate(lines_from(path, 0), start=1):
        try:
            line = read_object(content)
            key, said = line["key"], line["error"] if line["reply"] is None else line["reply"]
            if not (isinstance(key, str) and isinstance(said, str)):
                raise TypeError(key)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}:{number}: not a verdict; `verify --repair` sets it aside, and its "
                "question is asked again"
            ) from error
        yield Kept(key, offset, line["reply"] is not None)


def _settings(judge: Judge) -> ModelSettings:
    try:
        settings = resolve_model(
            judge.model,
            base_url=judge.base_url,
            api=None if judge.base_url is None or provider_at(judge.base_url) else "openai_chat",
            key_env=judge.key_env,
            temperature=judge.temperature,
            max_tokens=judge.max_tokens,
            call_attempts=judge.call_attempts,
        )
    except ValueError as error:
        raise ConfigError(f"filters.judge.model: {error}") from error
    if settings.base_url is None:
        raise ConfigError(
            f"filters.judge.model: {judge.model!r} plays scripts of rows and judges nothing"
        )
    return settings
