"""The server of a recording, which turns each session of model calls into a record.

A session begins with its first model call. It ends after a silence, by a request (DELETE
/sessions/NAME), or with the recording. A session that a crash interrupts continues at the next
start; if no further call comes, it ends after the silence.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import orjson
from aiohttp import web

from agent.gateway.relay import CallLimits, Relay
from agent.gateway.server import Gateway, make_server, read_body, request_key
from agent.loop.rules import Finish, refusal_ending
from agent.messages.message import Event, Message, reply_in
from agent.models.conversation_id import task_conversation_id
from agent.models.errors import ModelError
from agent.state.trajectory import Status, Trajectory
from agent.wires.agent_conversations import find_conversations
from agent.wires.wire import WireError
from agent.wires.wires import WIRES, find_wires
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.errors import EnvironmentStop, HostError, Stopped
from batch_trajectories.basics.text import plural
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.row import RowRules
from batch_trajectories.dataset.scan import Scan, make_task, scan, tasks
from batch_trajectories.engine.parser_signs import WARNING_OF_THOUGHT, parser_signs, warning_of_call
from batch_trajectories.engine.record import (
    Provenance,
    as_stored,
    describe_missing_tokens,
    describe_missing_usage,
    make_record,
)
from batch_trajectories.recording.upstream import Models, Upstream
from batch_trajectories.records.failures import Failure, FailureFile
from batch_trajectories.records.files import AppendFile, StorageError, make_directory, repair_tail
from batch_trajectories.records.journal import Inflight, JournalWriter
from batch_trajectories.records.records import RecordFile
from batch_trajectories.records.tasks import Task

# The sessions of a recording: each is a row of its dataset, and becomes a record.

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_SESSION_PATH = re.compile(r"/sessions/([^/?]+)(/[^?]*)?(\?.*)?")

DEFAULT_SESSION = "session"
"""The name of the session of requests without a name or key."""


class BadSessionName(ValueError):
    """The name of a session is not valid."""


def split_session(request: web.BaseRequest) -> tuple[str, str]:
    """Return the name of a request's session, and the path of the request within the session.

    The path /sessions/NAME/... names the session, or else the API key, of which only a digest is
    kept. Raises `BadSessionName`.
    """
    path = request.raw_path
    if match := _SESSION_PATH.fullmatch(path):
        name, rest, query = match.groups()
        if not _NAME.fullmatch(name):
            raise BadSessionName(
                f"{name!r} is no name of a session: letters, digits and ._:- only, up to 128"
            )
        return name, (rest or "/") + (query or "")
    key = request_key(request)
    if not key:
        return DEFAULT_SESSION, path
    return f"key-{hashlib.blake2b(key.encode(), digest_size=6).hexdigest()}", path


class SessionFile:
    """`sessions.jsonl`: the dataset of a recording, one row per session, with its first prompt."""

    def __init__(self, path: Path, rules: RowRules, quarantine: Path) -> None:
        """Open the file, or create it. Raises `StorageError`."""
        make_directory(path.parent, is_inside=False, parents=True)
        self.path = path
        self._rules = rules
        repair_tail(path, quarantine)
        self._file = AppendFile(path)
        self._seen: Counter[str] = Counter()
        self.tasks = list(tasks(self.scan()))
        """The rows of all sessions so far."""
        for task in self.tasks:
            self._seen[task.columns["id"]] += 1

    def scan(self) -> Scan:
        """Scan the file as a dataset, which may be empty."""
        return scan(self.path, max_samples=None, rules=self._rules, may_be_empty=True)

    def begin(self, name: str, prompt: str) -> Task:
        """Write the row of a new session. A name that was used before gets a number."""
        self._seen[name] += 1
        columns = {"id": name, "prompt": prompt}
        self._file.append(exact_json.dumps(columns, option=orjson.OPT_APPEND_NEWLINE))
        return make_task(columns, self._rules, occurrence=self._seen[name])

    def sync(self) -> None:
        """Make the rows survive a power loss."""
        self._file.sync()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


log = logging.getLogger(__name__)

_SILENCE_CHECK_S = 0.5
_FAREWELL_S = 5.0
"""Time to tell programs that the recording stops; most make their next call sooner."""
_FAREWELL_CHECK_S = 0.05


class Session:
    """One conversation under way."""

    def __init__(
        self,
        name: str,
        task: Task,
        gateway: Gateway,
        trajectory: Trajectory,
    ) -> None:
        self.name = name
        self.task = task
        self.gateway = gateway
        self.trajectory = trajectory
        self.heard_at = time.monotonic()
        """The monotonic time of the last request, or of the end of its answer."""
        self.watcher: asyncio.Task[None] | None = None

    @property
    def silent_s(self) -> float:
        """Seconds since the last request; 0 while a call is in flight."""
        return 0.0 if self.gateway.relay.in_flight else time.monotonic() - self.heard_at


class Recorder:
    """Records sessions until it is stopped. Needs a running event loop."""

    def __init__(
        self,
        config: RunConfig,
        models: Models,
        upstream: Upstream,
        *,
        sessions: SessionFile,
        records: RecordFile,
        failures: FailureFile,
        inflight: Inflight,
        journal: JournalWriter,
        provenance: Provenance,
        run_key: str,
        silence_s: float,
        say: Callable[[str], object],
    ) -> None:
        self._config = config
        self._rules = config.row_rules(models.settings.api)
        self._models = models
        self._upstream = upstream
        self._file = sessions
        self._records = records
        self._failures = failures
        self._inflight = inflight
        self._journal = journal
        self._provenance = provenance
        self._run_key = run_key
        self._silence_s = silence_s
        self._say = say
        self._said_messages: set[str] = set()
        self._sessions: dict[str, Session] = {}
        """The open sessions by name."""
        self._lobby = self._make_gateway("(no session)", Trajectory(()), _refuse_event)
        """The gateway for requests outside sessions: probes, and requests that are not calls."""
        self._is_stopping = False
        self._refused_sessions: set[str] = set()
        """The names of sessions that got an answer since the recording began to stop."""
        self.stopped = asyncio.Event()
        self.stopped_by: str | None = None
        """The reason that the recording cannot continue; then its sessions stay open. Else None."""

    def reopen_sessions(self, tasks: Sequence[Task]) -> None:
        """Open the sessions that an earlier start left, with their journaled events."""
        for task in tasks:
            events = self._inflight.events(task.key)
            self._open_session(task.columns["id"], task, events)

    async def serve(self, host: str, port: int) -> None:
        """Serve until `stop` or `halt`; then end all sessions, or leave them for the next start."""
        loop = asyncio.get_running_loop()
        server = make_server(self._handle)
        try:
            listener = await loop.create_server(server, host, port)
        except OSError as error:
            number = error.errno or 0  # negative where a name has no address
            why = os.strerror(number) if number > 0 else error
            raise EnvironmentStop(
                f"cannot listen at {host}:{port}: {why}; give another --port (0: any) or --host"
            ) from error
        place, number = listener.sockets[0].getsockname()[:2]
        self._say(f"recording at http://{place}:{number}; Ctrl-C ends the recording")
        try:
            while not self.stopped.is_set():
                await self._finish_silent_sessions()
                try:
                    async with asyncio.timeout(_SILENCE_CHECK_S):
                        await self.stopped.wait()
                except TimeoutError:
                    continue
            if self.stopped_by is not None:
                await self._refuse_for_farewell()
        finally:
            self._is_stopping = True
            listener.close()
            if self.stopped_by is not None:
                self._upstream.stop()
            try:
                await self._leave_sessions()
            finally:
                server.pre_shutdown()
                await server.shutdown(1.0)

    async def _refuse_for_farewell(self) -> None:
        """Refuse calls for a moment, so that programs learn the reason that the recording stops.

        Ends early once all open sessions have made a request.
        """
        # A closed connection would give no reason.
        self._upstream.stop()
        until = time.monotonic() + _FAREWELL_S
        while time.monotonic() < until and not all(map(self._has_heard, self._sessions.values())):
            await asyncio.sleep(_FAREWELL_CHECK_S)

    def _has_heard(self, session: Session) -> bool:
        return session.name in self._refused_sessions or session.gateway.relay.ended.is_set()

    async def _leave_sessions(self) -> None:
        """Leave all sessions at the same time; raise the first failure once all are left."""
        left = map(self._leave_session, [*self._sessions.values()])
        for failure in await asyncio.gather(*left, return_exceptions=True):
            if failure is not None:
                raise failure

    def stop(self) -> None:
        """End the recording: all sessions become records."""
        self.stopped.set()

    def halt(self, reason: str) -> None:
        """Stop the recording; the next start resumes its sessions."""
        if self.stopped_by is None:
            self.stopped_by = reason
        self._is_stopping = True
        self.stopped.set()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            name, path = split_session(request)
        except BadSessionName as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        if request.method == "DELETE" and path.rstrip("/") in ("", "/session"):
            return await self._handle_delete(request, name)
        session = self._sessions.get(name)
        if session is None and not self._is_stopping:
            prompt = await _read_prompt(request, path)
            session = self._sessions.get(name)  # another request may have begun it meanwhile
            if session is None and prompt is not None:
                session = self._open_session(name, self._file.begin(name, prompt), [])
        if session is None:
            return await self._lobby.handle(request, path)
        session.heard_at = time.monotonic()
        try:
            return await session.gateway.handle(request, path)
        finally:
            session.heard_at = time.monotonic()
            if self.stopped_by is not None:
                self._refused_sessions.add(name)

    def _open_session(self, name: str, task: Task, events: list[Event]) -> Session:
        trajectory = self._rules.read(task.columns).trajectory(events)
        assignment = self._inflight.next_assignment(task.key)
        positions = itertools.count(len(events))

        def journal(event: Event) -> None:
            self._journal.append(
                task.id,
                task.input_digest,
                event,
                assignment=assignment,
                position=next(positions),
            )
            if (reply := reply_in(event)) is None:
                return
            self._say_once(describe_missing_usage(reply))
            if self._config.token_ids:
                self._say_once(describe_missing_tokens(reply))

        conversation = task_conversation_id(self._run_key, task.key)
        gateway = self._make_gateway(task.id, trajectory, journal, conversation)
        session = Session(name, task, gateway, trajectory)
        session.watcher = asyncio.create_task(self._watch(session))
        self._sessions[name] = session
        return session

    def _say_once(self, message: str | None) -> None:
        if message is not None and message not in self._said_messages:
            self._said_messages.add(message)
            self._say(message)

    def _make_gateway(
        self,
        name: str,
        trajectory: Trajectory,
        journal: Callable[[Event], None],
        conversation: str = "",
    ) -> Gateway:
        options = self._config.agent_options
        relay = Relay(
            route=self._upstream.route,
            trajectory=trajectory,
            journal=journal,
            # `max_turns` has a default, which is for conversations of this program.
            limits=CallLimits.from_options(options, has_turn_limit="max_turns" in options.given()),
            is_stopping=lambda: self._is_stopping,
            why_stopping=lambda: self.stopped_by,
            ends_with=partial(self._stops_recording, name),
            is_live=True,  # somebody may watch
            conversation=conversation,
        )
        return Gateway(relay, wires=tuple(WIRES), models=self._upstream.list_models)

    def _stops_recording(self, name: str, error: ModelError) -> bool:
        log.warning("Session %s: a call failed: %s: %s", name, error.kind, error)
        return not error.was_passed_on and self._upstream.has_failed(error)

    async def _watch(self, session: Session) -> None:
        """Stop the recording if a failure of a session concerns all sessions."""
        await session.gateway.relay.ended.wait()
        failure = session.gateway.relay.failure
        if isinstance(failure, ModelError) and self._upstream.has_failed(failure):
            self.halt(self._upstream.calls.describe(failure))
        elif isinstance(failure, StorageError | HostError):
            self.halt(str(failure))

    async def _handle_delete(self, request: web.BaseRequest, name: str) -> web.StreamResponse:
        """Handle DELETE /sessions/NAME, or /session with its key, and end that session.

        The body can set `status` and `reason`.
        """
        session = self._sessions.get(name)
        if session is None:
            return web.json_response({"error": {"message": f"no session {name!r}"}}, status=404)
        content = await request.read()
        try:
            given = exact_json.loads(content or b"{}")
            status, reason = given.get("status", ""), given.get("reason")
        except (exact_json.JSONDecodeError, AttributeError):
            status = reason = None
        if status not in ("", *get_args(Status)) or not isinstance(reason, str | None):
            message = f"status must be one of {', '.join(get_args(Status))}, and reason a text"
            return web.json_response({"error": {"message": message}}, status=400)
        end = Finish(status, reason) if status else None
        record = await self._finish_session(session, end, done=Finish("completed", reason))
        if record is None:
            message = "the recording is stopping; the session continues at its next start"
            return web.json_response({"error": {"message": message}}, status=409)
        facts = {name: record[name] for name in ("id", "status", "api_calls", "cost_usd")}
        return web.json_response(facts)

    async def _finish_silent_sessions(self) -> None:
        silent = [one for one in self._sessions.values() if one.silent_s > self._silence_s]
        await asyncio.gather(*(self._finish_session(session) for session in silent))

    async def _leave_session(self, session: Session) -> None:
        if self.stopped_by is None:
            await self._finish_session(session)
            return
        try:
            await self._close_session(session)
        except Exception as error:
            log.info(
                "Session %s stays in the journal until the next start: %s", session.task.id, error
            )

    async def _close_session(self, session: Session) -> None:
        """Wait for the calls of a session, but not longer than `grace_s` if the recording ends."""
        if session.watcher is not None:
            session.watcher.cancel()
        try:
            async with asyncio.timeout(self._config.grace_s if self._is_stopping else None):
                await session.gateway.close()
        except TimeoutError:
            log.warning("Session %s ended before its last call was answered.", session.task.id)

    async def _finish_session(
        self, session: Session, end: Finish | None = None, done: Finish | None = None
    ) -> dict[str, Any] | None:
        """Turn a session into a record, and return that; None if it stays for the next start.

        `end` is the ending that its program gave. `done` is used without one, unless the last reply
        was cut off, or there is none and the call failed.
        """
        if self._sessions.get(session.name) is not session:
            return None
        del self._sessions[session.name]
        task = session.task
        relay = session.gateway.relay
        failure: Failure | None = None
        try:
            await self._close_session(session)
        except ModelError as error:
            if self._upstream.has_failed(error):
                self.halt(self._upstream.calls.describe(error))
                return None
            failure = self._make_failure(task, error.kind, str(error))
        except Stopped:
            return None
        except (StorageError, HostError) as error:
            self.halt(str(error))
            return None
        refusal = relay.last_refusal
        if refusal is not None and not _has_replies(session):
            failure = self._make_failure(task, refusal.kind, refusal.message)
            end = Finish("failed")
        else:
            if failure is not None:
                end = Finish("failed")
            end = relay.ending or end or _find_ending(session, done)
        if end.status == "failed" and failure is None:
            message = end.reason or "the program that held the session says that it failed"
            failure = self._make_failure(task, "session_failed", message)
        record = self._store_record(session, end, failure)
        if (signs := parser_signs(record)) is not None:
            self._say_once(warning_of_call(signs["call"]) if signs["call"] else None)
            self._say_once(WARNING_OF_THOUGHT if signs["thought"] else None)
        self._say(f"{task.id}: {record['status']} after {plural(record['api_calls'], 'call')}")
        return record

    def _store_record(
        self, session: Session, end: Finish, failure: Failure | None
    ) -> dict[str, Any]:
        """Write the record of a session that has ended, durably, and drop its journal."""
        task = session.task
        record = make_record(
            task,
            session.trajectory,
            end=end,
            spec=self._rules.read(task.columns).spec,
            setup=self._models.setup,
            failure=failure,
            attempt=self._config.max_attempts,
            provenance=self._provenance,
        )
        if failure is not None:
            self._failures.append(failure)
            self._failures.sync()
        self._file.sync()
        self._records.add(as_stored(record))
        self._records.sync()
        self._journal.finish(task.key)
        self._inflight.finish(task.key)
        return record

    def _make_failure(self, task: Task, error_class: str, message: str) -> Failure:
        # The recorded program is not ours to start again, so this was the last attempt.
        attempt = self._config.max_attempts
        return Failure(
            id=task.id,
            input_digest=task.input_digest,
            attempt=attempt,
            error_class=error_class,
            message=message,
        )


def _refuse_event(event: Event) -> None:
    raise AssertionError(f"{event['kind']}: belongs to no session")


async def _read_prompt(request: web.BaseRequest, path: str) -> str | None:
    """Read the first text of the user in a model call; None if the request is not a call."""
    wires = find_wires(WIRES)
    wire = next((w for w in wires if w.operation(request.method, path) == "call"), None)
    if wire is None:
        return None
    try:
        body = exact_json.loads(await read_body(request))
        parsed = wire.read(path, body) if isinstance(body, dict) else None
    except (exact_json.JSONDecodeError, WireError, web.HTTPRequestEntityTooLarge):
        return None
    return None if parsed is None else _first_text(parsed.messages) or "(no text)"


def _first_text(messages: Sequence[Message]) -> str:
    return next((one["content"] for one in messages if one["role"] == "user"), "").strip()


def _has_replies(session: Session) -> bool:
    calls = session.trajectory.agent_calls
    return calls is not None and bool(calls.exchanges)


def _find_ending(session: Session, done: Finish | None) -> Finish:
    """Find the ending of a session whose program gave none; see `Recorder._end`."""
    calls = session.trajectory.agent_calls
    prompt = session.task.columns["prompt"]
    main = None if calls is None else find_conversations(calls, prompt).main
    if calls is None or main is None:
        return done or Finish("cancelled", "it ended before its first reply")
    reply = calls.exchanges[main.call_numbers[-1]]["reply"]
    match reply["finish_reason"]:
        case "length" | "refusal" | "context_exceeded" as cut:
            return Finish(cut)
    last = session.gateway.relay.last_refusal
    if last is not None and (end := refusal_ending(last.kind, last.message)) is not None:
        return end
    if done is not None and last is None:
        return done
    if reply["message"].get("tool_calls") or reply["finish_reason"] != "stop":
        why = "" if last is None else f"; its last call failed: {last.kind}: {last.message}"
        return Finish("cancelled", f"it ended before a final answer{why}")
    return done or Finish("completed")
