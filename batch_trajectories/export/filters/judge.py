"""Asks a judge model about the answers of a run that it has not judged yet.

A limited number of questions is in flight at a time. A reply counts once its line in
`verdicts.jsonl` is synced, so a kill loses only the questions in flight. A failure is a line too:
its record is left out as `judge_failed`, and the next export asks again. Rejected credentials, no
credit, and an endpoint that fails before its first answer stop the export.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from agent.models.client.open_model import open_model
from agent.models.errors import ModelError
from agent.models.model import Model, ModelSettings, Request
from agent.models.resolve import read_key
from agent.session import run_here
from batch_trajectories.export.filters.asking import (
    JudgeCalls,
    RetryMessages,
    ask_all,
    stop_where_useless,
)
from batch_trajectories.export.filters.verdicts import NAME, JudgeQuestions, Question, read_verdicts
from batch_trajectories.export.recipe import Judge
from batch_trajectories.runs.errors import ConfigError
from batch_trajectories.runs.store.checksum import with_checksum
from batch_trajectories.runs.store.files import AppendFile, alone_in, repair_tail
from batch_trajectories.runs.store.record_types import Record


class _Asked(NamedTuple):
    """One question with its outcome."""

    line: dict[str, Any]
    failure: ModelError | None


def ask_judge(run_dir: Path, judge: Judge, records: Callable[[], Iterable[Record]]) -> None:
    """Ask about each of `records` whose question has no reply on disk.

    They are read twice, so that the progress line knows their number. Raises `ConfigError` without
    a key, `EnvironmentStop`, and `RunLocked`.
    """
    questions = JudgeQuestions(judge)
    path = run_dir / NAME
    refusal = f"{path}: another export asks the judge now; wait until it has ended"
    with alone_in(run_dir, refusal):
        repair_tail(path, run_dir / "quarantine")
        answered = {kept.key for kept in read_verdicts(path) if kept.has_reply}
        has_answered = bool(answered)
        total = sum(1 for _ in _unanswered(records(), questions, set(answered)))
        if not total:
            return
        try:
            api_key = read_key(questions.settings)
        except ValueError as error:
            raise ConfigError(f"filters.judge: {error}") from error
        with (
            closing(AppendFile(path)) as file,
            closing(JudgeCalls(judge.model, total=total)) as calls,
        ):
            asking = _Asking(judge, questions.settings, file, calls, has_answered=has_answered)
            run_here(asking.ask_all(api_key, _unanswered(records(), questions, answered)))


def _unanswered(
    records: Iterable[Record], questions: JudgeQuestions, answered: set[str]
) -> Iterator[tuple[str, Question]]:
    """Ids of records with their questions, each question once."""
    for record in records:
        question = questions.about(record)
        if question is not None and question.key not in answered:
            answered.add(question.key)
            yield record.id, question


class _Asking:
    """The questions of one export."""

    def __init__(
        self,
        judge: Judge,
        settings: ModelSettings,
        file: AppendFile,
        calls: JudgeCalls,
        *,
        has_answered: bool,
    ) -> None:
        self._judge = judge
        self._settings = settings
        self._file = file
        self._calls = calls
        self._has_answered = has_answered

    async def ask_all(self, api_key: str, questions: Iterable[tuple[str, Question]]) -> None:
        """Keep `max_in_flight` questions at the endpoint until all are answered."""
        model = open_model(
            self._settings,
            api_key=api_key,
            on_retry=RetryMessages("filters.judge", self._settings.base_url, self._calls.say),
        )
        try:
            await ask_all(
                questions,
                lambda asked: self._ask(model, asked[0], *asked[1]),
                max_in_flight=self._judge.max_in_flight,
                keep=self._keep,
                show=self._calls.show,
            )
        finally:
            await model.close()

    async def _ask(self, model: Model, record_id: str, key: str, text: str) -> _Asked:
        line = {"key": key, "id": record_id, "judge": self._judge.model}
        try:
            reply = await model.complete(Request([{"role": "user", "content": text}]))
        except ModelError as error:
            return _Asked({**line, "reply": None, "error": f"{error.kind}: {error}"}, error)
        answer = {
            "reply": reply.message.get("content") or "",
            "error": None,
            "model": reply.model,
            "usage": reply.usage,
            "cost_usd": reply.cost_usd,
        }
        return _Asked({**line, **answer}, None)

    def _keep(self, found: list[_Asked]) -> None:
        at = time.time()
        lines = (with_checksum(orjson.dumps({**asked.line, "at": at})) for asked in found)
        self._file.append(b"".join(lines))
        self._file.sync()
        for asked in found:
            if asked.failure is None:
                self._calls.replied(asked.line)
            self._calls.ended(None if asked.failure is None else asked.failure.kind)
        failures = [asked.failure for asked in found if asked.failure is not None]
        self._has_answered = self._has_answered or len(failures) < len(found)
        stop_where_useless(
            failures,
            has_answered=self._has_answered,
            asked_by="filters.judge",
            advice="Finished verdicts are saved; fix the problem and export again to continue.",
        )
