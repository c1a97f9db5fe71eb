"""Scores the token ids of a run by a teacher: `score RUN --teacher MODEL`.

One request per segment, which is a row of `rl`: it gives the figures of all its turns. The figures
are on disk before anything else is done with their reply, so a kill loses only calls in flight. A
failed call leaves nothing, and the next command repeats it. A paid reply whose figures do not fit
is kept with its cost, and its segment is asked again by the next command.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import NamedTuple

import msgspec
import orjson

from agent.messages.message import Message, Usage
from agent.models.admission import CallAdmission, CostEstimate, Permit
from agent.models.client.endpoint import open_model
from agent.models.client.relayed import RelayRequest
from agent.models.client.reply_bodies import MAX_REPLY_BYTES
from agent.models.client.retrying import RetryingModel
from agent.models.errors import ENDPOINT_FAILURES, ModelError
from agent.models.model import Completion, ModelSettings
from agent.models.prices import add_cost, has_known_price
from agent.models.resolve import read_key
from agent.session import run_here
from batch_trajectories.basics.console import say
from batch_trajectories.basics.errors import ConfigError, EnvironmentStop
from batch_trajectories.basics.text import first_few
from batch_trajectories.config.models import resolve_settings
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.engine.supervisor.progress import Progress
from batch_trajectories.export.conversation.validity import Rejected
from batch_trajectories.export.formats.rl import SampledSegment, sampled_segments
from batch_trajectories.export.statistics.counts import Reasons
from batch_trajectories.records.files import lock_directory, repair_tail
from batch_trajectories.records.names import QUARANTINE, TEACHER_BUDGET_FILE, TEACHER_FILE
from batch_trajectories.records.reader import stored_records
from batch_trajectories.records.record_types import Record
from batch_trajectories.scoring.asking import RetryMessages, ask_all
from batch_trajectories.scoring.by_judge import JudgeBudget, OutOfBudget
from batch_trajectories.scoring.score_file import Wanted
from batch_trajectories.teacher.figures import (
    FigureFile,
    Figures,
    read_figure_lines,
    segment_key,
    unpack_floats,
)
from batch_trajectories.teacher.servers import SERVERS, InferenceServer, MisfitReply, TeacherReply
from batch_trajectories.teacher.tokenizers import compare_tokenizers

_MAX_SHOWN_FAILURES = 10
_MAX_LISTED_NAMES = 10
_CHANCE = -8.0
"""Tokens with a mean log-probability below this are hardly likelier than random ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherOptions:
    """The options of a command that asks a teacher."""

    top: int = 0
    """The number of most likely tokens at each place; 0: only the sampled ones."""
    tokenizer: Path | None = None
    """The tokenizer of the run's model."""
    teacher_tokenizer: Path | None = None
    same_tokenizer: bool = False
    """The user states that both tokenizers are the same."""
    subagents: bool = False
    discarded: bool = False
    max_in_flight: int = 16
    max_requests: int | None = None
    """Maximum requests of this command, with retries; None: no limit."""


class TeacherResult(NamedTuple):
    """The counts of a finished command."""

    segments: int
    """Segments that have figures now and had none."""
    tokens: int
    """Sampled tokens of these segments."""
    scored_before: int
    """Segments that had figures before."""
    failed: Mapping[str, int]
    """Reasons why segments have no figures, with counts."""
    left_out: Mapping[str, int]
    """Reasons why records have no segments, with counts."""
    mean_logprob: float | None
    """The mean log-probability of the sampled tokens that were scored; None without any."""

    @property
    def is_hardly_chance(self) -> bool:
        """Whether the teacher finds the tokens so unlikely that they may not be its own."""
        return self.mean_logprob is not None and self.mean_logprob < _CHANCE


def score_by_teacher(
    run_dir: Path, config: RunConfig, options: TeacherOptions, *, wanted: Wanted | None = None
) -> TeacherResult:
    """Ask the model of `config` for the figures of all segments of `wanted` records that lack them.

    `max_run_cost_usd` of `config` limits the dollars of all teachers of this run. Raises
    `ConfigError`, `EnvironmentStop`, `OutOfBudget`, `RunLocked` and `RunDirError`.
    """
    settings, server = _settings(config)
    tokenizer = _common_tokenizer(run_dir, options)
    refusal = f"{run_dir / TEACHER_FILE}: another `score` works on it; wait until it has ended"
    with lock_directory(run_dir, refusal):
        repair_tail(run_dir / TEACHER_FILE, run_dir / QUARANTINE)
        scoring = _Scoring(
            run_dir,
            settings,
            server,
            options=options,
            tokenizer=tokenizer,
            wanted=wanted,
            dataset_file=config.dataset_file,
        )
        with scoring.counting(), _gate(run_dir, config, options, scoring.known_usd) as gate:
            run_here(scoring.score_all(gate))
    return scoring.result()


def _settings(config: RunConfig) -> tuple[ModelSettings, InferenceServer]:
    """The settings of calls to the teacher, from the root of its server."""
    try:
        settings = resolve_settings(config, config.model)
    except ValueError as error:
        raise ConfigError(f"--teacher: {error}") from error
    kind = settings.reference.partition(":")[0]
    if (server := SERVERS.get(kind)) is None:
        raise ConfigError(
            f"--teacher: {config.model!r} does not say which server it is at. Only vLLM and SGLang "
            f"give log-probabilities of given tokens: write vllm:{settings.name} or "
            f"sglang:{settings.name}"
        )
    if config.max_run_cost_usd is not None and not has_known_price(settings):
        raise ConfigError(
            f"--max_teacher_cost_usd: the price of {config.model!r} is unknown; give --prices "
            f'\'{{"{settings.name}": {{"input": ..., "output": ...}}}}\', in dollars per million '
            "tokens"
        )
    connection = settings.connection
    if (several := connection.replication) is not None:
        several = msgspec.structs.replace(several, urls=tuple(map(_root, several.urls)))
        connection = replace(connection, replication=several)
    root = _root(settings.base_url or "")
    return replace(settings, base_url=root, connection=connection), server


def _root(base_url: str) -> str:
    """The root of a server: `/generate` of SGLang is beside `/v1`, not in it."""
    return base_url.rstrip("/").removesuffix("/v1")


def _common_tokenizer(run_dir: Path, options: TeacherOptions) -> str | None:
    """The digest of the tokenizer of the run's model and the teacher; None if the user states it.

    Raises `ConfigError`.
    """
    given = (options.tokenizer, options.teacher_tokenizer)
    if options.same_tokenizer:
        if any(given):
            raise ConfigError(
                "--same_tokenizer states what --tokenizer and --teacher_tokenizer prove; leave it "
                "out, or leave both of them out"
            )
        return None
    student, teacher = given
    if student is None or teacher is None:
        raise ConfigError(
            f"{run_dir}: a run records token ids, and not the tokenizer that made them. A teacher "
            "with another tokenizer would score other tokens. Give --tokenizer DIR and "
            "--teacher_tokenizer DIR (each with a tokenizer.json), which are compared, or state "
            "--same_tokenizer"
        )
    return compare_tokenizers(student, teacher)


class _Segment(NamedTuple):
    """A segment to be scored."""

    key: str
    record: Record
    sampled: SampledSegment

    @property
    def where(self) -> str:
        """The segment for messages: its record and turns."""
        turns = self.sampled.turns
        span = f"{turns[0]}" if len(turns) == 1 else f"{turns[0]} to {turns[-1]}"
        return f"{self.record.id}, {'turn' if len(turns) == 1 else 'turns'} {span}"


class _Scoring:
    """The work of one command."""

    def __init__(
        self,
        run_dir: Path,
        settings: ModelSettings,
        server: InferenceServer,
        *,
        options: TeacherOptions,
        tokenizer: str | None,
        wanted: Wanted | None,
        dataset_file: Path | str | None,
    ) -> None:
        """`dataset_file` is that of the run, for a message."""
        self._run_dir = run_dir
        self._dataset_file = dataset_file
        self._settings = settings
        self._server = server
        self._options = options
        self._wanted = wanted
        self._file = FigureFile(run_dir)
        self._about = {
            "teacher": settings.name,
            "server": settings.reference.partition(":")[0],
            "tokenizer": tokenizer,
        }
        self._names = {settings.name}
        """The names that the server may give to the model in its replies."""
        self._done: set[bytes] = set()
        self.known_usd = 0.0
        """The cost of all replies of teachers before this command, as far as known."""
        self._read_done()
        self._known = self._segments = self._tokens = 0
        self._sum = 0.0
        self._has_answered = bool(self._done)
        self._shown_failures = 0
        self._failed = Reasons()
        self._left_out = Reasons()
        self._progress: Progress | None = None
        self._cost_usd = 0.0

    def _read_done(self) -> None:
        """Find the segments that have figures. Raises `ConfigError` for another tokenizer."""
        for _, line in read_figure_lines(self._file.path):
            self.known_usd += line.get("cost_usd") or 0.0
            if line["teacher"] != self._settings.name or line["error"] is not None:
                continue
            mine, theirs = self._about["tokenizer"], line.get("tokenizer")
            if mine is not None and theirs is not None and mine != theirs:
                raise ConfigError(
                    f"--tokenizer: {self._file.path} has figures of {line['teacher']!r} for "
                    f"another tokenizer (digest {theirs}, now {mine}); give the tokenizer of the "
                    "run's model, as before"
                )
            if line["top"] >= self._options.top:
                self._done.add(bytes.fromhex(line["segment"]))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is to be done, and show progress while the block lasts."""
        total = self._count()
        self._progress = Progress(total=total, tasks="segments", turns="calls")
        try:
            yield
        finally:
            self._progress.close()
            self._file.close()
            cost = f", ${self._cost_usd:.4f}" if self._cost_usd else ""
            say(f"teacher {self._settings.reference}: {self._segments:,} scored{cost}")

    def _count(self) -> int:
        """The number of segments that lack figures. Raises `ConfigError` if the run has none."""
        total = 0
        models: set[str] = set()
        with_ids = records = 0
        seen: set[bytes] = set()
        for record in self._records(doing="counting"):
            records += 1
            try:
                segments = [*self._find_segments(record)]
            except Rejected as rejected:
                self._left_out.add(f"{rejected.reason.value}: {rejected.detail}")
                continue
            with_ids += 1
            models.update(filter(None, (turn.model for turn in record.turns if turn.has_ids)))
            for segment in segments:
                key = bytes.fromhex(segment.key)
                total += key not in self._done and key not in seen
                self._known += key in self._done
                seen.add(key)
        if records and not with_ids:
            raise ConfigError(
                f"{self._run_dir}: no turn has token ids, so there is nothing to score. Ids cannot "
                "be added later. Run the prompts again at an endpoint that gives them: "
                f"python batch_runner.py --dataset_file={quote(str(self._dataset_file))} "
                "--run_name=NEW_NAME --model=vllm:NAME --base_url=URL --token_ids"
            )
        if len(models) > 1 and not self._options.same_tokenizer:
            raise ConfigError(
                f"{self._run_dir}: token ids of {len(models)} models: "
                f"{first_few(sorted(models), _MAX_LISTED_NAMES)}. --tokenizer speaks of one; state "
                "--same_tokenizer if all of them and the teacher have the same"
            )
        return total

    def _records(self, doing: str | None = None) -> Iterator[Record]:
        for record in stored_records(self._run_dir, doing=doing):
            if record.status != "failed" and (self._wanted is None or self._wanted(record)):
                yield record

    def _find_segments(self, record: Record) -> Iterator[_Segment]:
        options = self._options
        for sampled in sampled_segments(
            record, subagents=options.subagents, discarded=options.discarded
        ):
            yield _Segment(segment_key(sampled.ids, sampled.sampled), record, sampled)

    def _find_unscored(self) -> Iterator[_Segment]:
        """The segments that lack figures, each once."""
        asked: set[bytes] = set()
        for record in self._records():
            try:
                segments = [*self._find_segments(record)]
            except Rejected:
                continue  # counted before
            for segment in segments:
                key = bytes.fromhex(segment.key)
                if key not in self._done and key not in asked:
                    asked.add(key)
                    yield segment

    async def score_all(self, gate: CallAdmission | None) -> None:
        """Ask for the figures of all segments that lack them."""
        progress = self._progress
        assert progress is not None
        on_retry = RetryMessages(self._settings.base_url, progress.say, "--teacher")
        key = read_key(self._settings)
        lookup = open_model(self._settings, api_key=key, on_retry=on_retry)
        try:
            self._names |= await _request_names(lookup, self._settings)
        finally:
            await lookup.close()
        model = open_model(self._settings, api_key=key, on_retry=on_retry, gate=gate)

        async def ask(segment: _Segment) -> None:
            await self._ask(model, segment)

        try:
            await ask_all(
                self._find_unscored(),
                ask,
                max_in_flight=self._options.max_in_flight,
                keep=lambda _: None,
                show=lambda in_flight: progress.show(in_flight, ""),
            )
        finally:
            await model.close()

    async def _ask(self, model: RetryingModel, segment: _Segment) -> None:
        if segment.sampled.sampled[0] == 0:
            self._fail(segment, "no_context", "its first token has no token before it")
            return
        # A reply that is too large is paid for, cannot be read, and would be asked for again.
        least = self._server.least_reply_bytes(segment.sampled, self._options.top)
        if least > MAX_REPLY_BYTES:
            size = f"{len(segment.sampled.ids):,} tokens with --top_logprobs={self._options.top}"
            limit = f"{MAX_REPLY_BYTES >> 20:,} MiB"
            self._fail(segment, "too_large", f"the reply about {size} would be over {limit}")
            return
        reply: TeacherReply | None = None

        def read(body: bytes) -> Completion:
            nonlocal reply
            reply = self._server.read(body, segment.sampled, self._options.top)
            return _completion(reply.model, reply.usage)

        try:
            completion = await model.complete(self._request(segment, read))
        except MisfitReply as misfit:
            paid = add_cost(_completion(None, misfit.usage), self._settings)
            self._append(segment, paid, None, error=str(misfit))
            self._fail(segment, "misfit", str(misfit))
            if not self._has_answered:
                raise EnvironmentStop(self._stop_message(segment, str(misfit))) from misfit
            return
        except ModelError as error:
            self._fail(segment, error.kind, str(error))
            is_silent = not self._has_answered and error.kind in ENDPOINT_FAILURES
            if error.action == "stop_run" or is_silent:
                raise EnvironmentStop(self._stop_message(segment, str(error))) from error
            return
        assert reply is not None
        if reply.model is not None and reply.model not in self._names:
            other = f"the reply is by the model {reply.model!r}, not {self._settings.name!r}"
            self._append(segment, completion, None, error=other)
            self._fail(segment, "other_model", other)
            raise EnvironmentStop(self._stop_message(segment, other))
        self._append(segment, completion, reply.figures, error=None)
        self._count_scored(segment, reply.figures)

    def _request(self, segment: _Segment, read: Callable[[bytes], Completion]) -> RelayRequest:
        body = self._server.body(self._settings.name, segment.sampled, self._options.top)
        return _TokenRequest(
            path=self._server.path,
            body=orjson.dumps(body),
            headers={},
            max_tokens=1,
            read=read,
            tokens=len(segment.sampled.ids),
        )

    def _append(
        self,
        segment: _Segment,
        completion: Completion,
        figures: Figures | None,
        *,
        error: str | None,
    ) -> None:
        self._file.append(
            {
                **self._about,
                "segment": segment.key,
                "id": segment.record.id,
                "turns": segment.sampled.turns,
                "top": self._options.top,
                "tokens": len(segment.sampled.sampled),
                "error": error,
                "model": completion.model,
                "usage": completion.usage,
                "cost_usd": completion.cost_usd,
            },
            figures,
        )
        assert self._progress is not None
        usage = completion.usage
        self._cost_usd += completion.cost_usd or 0.0
        self._progress.add(
            {
                "turns": 1,
                "input_tokens": (usage and usage["input_tokens"]) or 0,
                "output_tokens": (usage and usage["output_tokens"]) or 0,
                "cost_usd": completion.cost_usd or 0.0,
                "cost_unknown": completion.cost_usd is None,
            }
        )

    def _count_scored(self, segment: _Segment, figures: Figures) -> None:
        assert self._progress is not None
        self._has_answered = True
        self._done.add(bytes.fromhex(segment.key))
        self._segments += 1
        self._tokens += len(segment.sampled.sampled)
        self._sum += sum(unpack_floats(figures.logprobs))
        self._progress.count_ended_task(failure=None)

    def _fail(self, segment: _Segment, kind: str, message: str) -> None:
        assert self._progress is not None
        self._failed.add(f"{kind}: {message}")
        self._progress.count_ended_task(failure=kind)
        self._shown_failures += 1
        if self._shown_failures <= _MAX_SHOWN_FAILURES:
            self._progress.say(f"{self._run_dir}: {segment.where}: {kind}: {message}")

    def _stop_message(self, segment: _Segment, problem: str) -> str:
        return (
            f"--teacher at {self._settings.base_url}: {self._run_dir}: {segment.where}: {problem}. "
            "Finished figures are saved; fix the problem and run the same command again to "
            "continue."
        )

    def result(self) -> TeacherResult:
        """The counts of the command."""
        return TeacherResult(
            segments=self._segments,
            tokens=self._tokens,
            scored_before=self._known,
            failed=self._failed.to_json(),
            left_out=self._left_out.to_json(),
            mean_logprob=self._sum / self._tokens if self._tokens else None,
        )


class _TokenRequest(RelayRequest, frozen=True, kw_only=True):
    """A request of known length: its JSON has several bytes for each token."""

    tokens: int

    def size(self, settings: ModelSettings) -> int:
        """See `Request`."""
        return self.tokens


def _completion(model: str | None, usage: Usage | None) -> Completion:
    """A reply without its one token, which nobody reads."""
    return Completion(
        message=Message(role="assistant", content=""),
        finish_reason="length",
        usage=usage,
        model=model,
        response_id=None,
    )


async def _request_names(model: RetryingModel, settings: ModelSettings) -> set[str]:
    """The names under which the server serves the weights of the teacher.

    Raises `ConfigError` if it does not serve them, and `EnvironmentStop`.
    """
    roots: dict[str, str] = {}

    def read(body: bytes) -> Completion:
        try:
            entries = orjson.loads(body)["data"]
            roots.update({str(entry["id"]): str(entry.get("root")) for entry in entries})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError("malformed", f"/v1/models is no list of models: {error!r}") from error
        return _completion(None, None)

    try:
        await model.complete(
            RelayRequest(
                method="GET", path="/v1/models", body=b"", headers={}, max_tokens=None, read=read
            )
        )
    except ModelError as error:
        raise EnvironmentStop(
            f"--teacher at {settings.base_url}: cannot list its models: {error.kind}: {error}. "
            f"{settings.key_source}"
        ) from error
    if settings.name not in roots:
        known = first_few(sorted(roots), _MAX_LISTED_NAMES) or "nothing"
        raise ConfigError(
            f"--teacher: {settings.base_url} serves {known}, and not {settings.name!r}; give the "
            "name that it has there"
        )
    root = roots[settings.name]
    return {name for name, its_root in roots.items() if its_root == root}


class _RequestLimit:
    """Lets a limited number of requests through; see `CallAdmission`."""

    has_answered = False

    def __init__(self, limit: int, budget: CallAdmission | None) -> None:
        """`budget` admits the requests that are let through; None: all."""
        self._limit = self._left = limit
        self._budget = budget
        self._in_flight = 0
        self._ended = asyncio.Event()

    async def enter(self, claim: Callable[[], CostEstimate]) -> Permit:
        """Let a request through; raises `OutOfBudget` once the limit is reached.

        Waits before that until all requests in flight have ended, because they are paid for.
        """
        if not self._left:
            while self._in_flight:
                self._ended.clear()
                await self._ended.wait()
            raise OutOfBudget(
                f"--max_teacher_requests={self._limit:,}: so many requests were sent. Finished "
                "figures are saved; run the same command again to continue."
            )
        self._left -= 1
        self._in_flight += 1
        try:
            permit = None if self._budget is None else await self._budget.enter(claim)
        except BaseException:
            self._end()
            raise
        return _LimitedPermit(permit, self._end)

    def _end(self) -> None:
        self._in_flight -= 1
        self._ended.set()


class _LimitedPermit:
    """The permission for one request among a limited number."""

    def __init__(self, permit: Permit | None, end: Callable[[], None]) -> None:
        self._permit = permit
        self._end = end
        self.sent_at = time.monotonic() if permit is None else permit.sent_at

    def leave(self, outcome: Completion | ModelError | None) -> None:
        """See `Permit.leave`."""
        self._end()
        if self._permit is not None:
            self._permit.leave(outcome)


@contextmanager
def _gate(
    run_dir: Path, config: RunConfig, options: TeacherOptions, known_usd: float
) -> Iterator[CallAdmission | None]:
    """The limits of a command; None without any."""
    budget = None
    if config.max_run_cost_usd is not None:
        budget = JudgeBudget(
            run_dir,
            config.max_run_cost_usd,
            known_usd=known_usd,
            log_name=TEACHER_BUDGET_FILE,
            option="--max_teacher_cost_usd",
        )
    try:
        limit = options.max_requests
        yield budget if limit is None else _RequestLimit(limit, budget)
    finally:
        if budget is not None:
            budget.close()
