"""Relays the model calls of one agent: each is answered from the journal, or made and recorded.

A reply ends for the agent only when it is on disk: after a crash, no reply that the agent has read
is lost or paid again.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from agent.gateway.answers import Answer, Answers, Refusal
from agent.gateway.pointing import Replies, check_pointed, count_pointed
from agent.loop.rules import Finish, repeat_ending, unknown_cost_ending
from agent.messages.message import (
    UNREADABLE,
    AgentRestartedEvent,
    AnsweredEvent,
    ExchangeEvent,
    Message,
)
from agent.models.client.relayed import RelayRequest
from agent.models.client.retrying import RetryingModel
from agent.models.conversation_id import inner_conversation_id
from agent.models.dialects.dialect import Assembly, read_reply
from agent.models.dialects.openai_chat import API as CHAT
from agent.models.dialects.token_ids import (
    add_token_request,
    asks_for_ids,
    remove_tokens,
    remove_tokens_from_event,
    take_tokens,
)
from agent.models.errors import ModelError
from agent.models.model import (
    Completion,
    ModelSettings,
    requested_replies,
)
from agent.models.parsing import load_object
from agent.models.providers import AGENTS_SESSION_HEADERS
from agent.models.usage import NOTHING_USED
from agent.options import AgentOptions
from agent.state.events import Clock, exchange_event, reply_event
from agent.state.tally import Tally
from agent.state.trajectory import Journal, Trajectory, WaitUntilPersisted
from agent.wires.base import Wire
from agent.wires.reading import mark_earlier_unread, remove_matches
from agent.wires.threads import Threads, opening_digest
from agent.wires.wire import NOTHING_VOLATILE, Volatile, WireError, WireRequest
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.errors import Stopped

# The requests that are sent to the endpoint for the calls of an agent.


class AgentCall(NamedTuple):
    """One request of an agent, read as JSON."""

    wire: Wire
    path: str
    headers: Mapping[str, str]
    content: bytes
    """The body as it came."""
    body: dict[str, Any]
    """The parsed body; half an emoji is U+FFFD here, as in records."""
    is_repeat: bool
    """Whether the agent says that it has made this request before."""
    has_halves: bool = False
    """Whether `content` holds half an emoji, as written by programs that cut texts."""


class _Content(NamedTuple):
    """A request that is sent on, perhaps changed."""

    path: str
    body: Mapping[str, Any]
    """The parsed body, with halves of emojis."""
    content: bytes


def make_request(
    call: AgentCall,
    settings: ModelSettings,
    name: str | None,
    request: WireRequest,
    replies: Replies,
    conversation: str = "",
) -> RelayRequest:
    """Make the request to send: the agent's own, unless a part of it has to change.

    `name` is the model's name at its endpoint, None if the agent uses it, too. `replies` are the
    agent's recorded calls. `conversation` is the id of the call's thread; an id that the agent
    sends itself has precedence. Raises `WireError`, under a budget also if the request can cost
    more than is known.
    """
    wire, max_tokens, bound = call.wire, request.max_tokens, None
    if max_tokens is None and settings.needs_bound:
        max_tokens = bound = settings.reply_bound
        if bound is None:
            raise WireError(
                "the request does not limit the reply's tokens, so the budget of the run "
                "cannot be kept: set its limit, or --max_tokens"
            )
    path, body, content = _rewrite(
        call, name, max_tokens=bound, without_server_tools=bool(request.server_tools)
    )
    if settings.needs_bound:
        check_pointed(wire, body, settings, replies)
    asking = None
    read: Callable[[bytes], Completion] = wire.read_reply
    if wire.layout.api == CHAT:
        if settings.token_ids:
            asking = add_token_request(settings, body)
        if asking is not None or asks_for_ids(body):
            read = partial(_read_tokens, settings, asking or body)
    sessions = session_ids_in(call.headers, settings)
    return RelayRequest(
        path=wire.upstream_path(path),
        body=content,
        headers=wire.request_headers(call.headers) | sessions,
        conversation=next(iter(sessions.values()), conversation),
        has_cache_key="prompt_cache_key" in body or not settings.takes_cache_key,
        max_tokens=None if max_tokens is None else max_tokens * requested_replies(body),
        read=read,
        unasked=wire.assembly,
        pointing=partial(count_pointed, wire, body, settings, replies),
        asking_for_tokens=None if asking is None else _write(call, asking),
    )


def make_count_request(call: AgentCall, settings: ModelSettings, name: str | None) -> RelayRequest:
    """Make the request to send for one that counts tokens, which costs nothing.

    `name` is the model's name at its endpoint, None if the agent uses it, too.
    """
    path, _, content = _rewrite(call, name)
    sessions = session_ids_in(call.headers, settings)
    return RelayRequest(
        path=call.wire.upstream_path(path),
        body=content,
        headers=call.wire.request_headers(call.headers) | sessions,
        conversation=next(iter(sessions.values()), ""),
        max_tokens=0,
        read=read_free_reply,
    )


def _rewrite(
    call: AgentCall,
    name: str | None,
    *,
    max_tokens: int | None = None,
    without_server_tools: bool = False,
) -> _Content:
    """Change a request; see `Wire.rewrite`. If nothing changes, the bytes stay as they came."""
    body = exact_json.loads_with_surrogates(call.content) if call.has_halves else call.body
    if name is None and max_tokens is None and not without_server_tools:
        return _Content(call.path, body, call.content)
    path, body = call.wire.rewrite(
        call.path,
        body,
        model=name,
        max_tokens=max_tokens,
        without_server_tools=without_server_tools,
    )
    return _Content(path, body, _write(call, body))


def _write(call: AgentCall, body: Mapping[str, Any]) -> bytes:
    """Write a body, with halves of emojis if the agent sent some."""
    return exact_json.dumps_with_surrogates(body) if call.has_halves else exact_json.dumps(body)


def session_ids_in(headers: Mapping[str, str], settings: ModelSettings) -> dict[str, str]:
    """Return the ids that an agent sends for its conversation, by header, the best known first."""
    names = (*map(str.lower, settings.session_headers), *AGENTS_SESSION_HEADERS)
    given = {name: headers[name] for name in names if headers.get(name)}
    # Other ids could not be sent on in a body.
    return {name: value for name, value in given.items() if value.isascii()}


def read_free_reply(body: bytes) -> Completion:
    """Read a reply that no model wrote; see `RelayRequest.read`."""
    message = Message(role="assistant", content="")
    return Completion(
        message=message,
        finish_reason="stop",
        usage=NOTHING_USED,
        model=None,
        response_id=None,
        cost_usd=0.0,
    )


def _read_tokens(settings: ModelSettings, sent: Mapping[str, Any], body: bytes) -> Completion:
    """Read the reply to a relayed request that asked for token ids."""
    return take_tokens(read_reply(CHAT, body), settings, sent)


# Agents that make the same tool call with the same result again and again.


def find_repeats(messages: Sequence[Message], limit: int, volatile: Volatile) -> Finish | None:
    """Return the ending if the last `limit` turns made the same call with the same result.

    Volatile texts in results make no difference. Returns None if the turns differ; see
    `Tally.repeated_turns`.
    """
    turns: list[tuple[Message, dict[str, Message]]] = []
    results: dict[str, Message] = {}
    for message in reversed(messages):
        if message["role"] == "tool":
            text = remove_matches(message["content"], volatile.texts)
            result = message.copy()
            result["content"] = text
            results.setdefault(message["tool_call_id"], result)
        elif message.get("tool_calls"):
            turns.append((message, results))
            results = {}
        if len(turns) == limit:
            break
    tally = Tally()
    for message, answered in reversed(turns):
        calls = [call for call in message["tool_calls"] if call["id"] in answered]
        tally.count_turn(calls, [answered[call["id"]] for call in calls])
    if tally.repeated_turns < limit:
        return None
    return repeat_ending(tally)


log = logging.getLogger(__name__)

_STOP = 400
"""The HTTP status that ends every agent: some of them repeat a call after 402, 429 and 5xx."""


_FAILED_UPSTREAM = 502
"""The HTTP status of a call without a usable reply, which the agent may repeat."""


_MODEL_IN_PATH = re.compile(r"/models/([^/:?]+)")


class RefusedModel(Exception):
    """An agent asked for a model that the run does not have; the message says what to do."""


class Route(NamedTuple):
    """The model that answers a call."""

    model: RetryingModel
    name: str | None = None
    """The model's name at its endpoint; None if the agent uses it, too."""


@dataclass(frozen=True, slots=True)
class CallLimits:
    """The limits on all calls of one agent. A call in flight can exceed them. None: no limit."""

    max_calls: int | None = None
    max_tokens: int | None = None
    max_cost_usd: float | None = None
    repeats: int = 0
    """Maximum equal tool calls with equal results in a row; 0: no limit."""

    @classmethod
    def from_options(cls, options: AgentOptions, *, has_turn_limit: bool = True) -> CallLimits:
        """Return the limits that the options of a conversation set."""
        return cls(
            max_calls=options.max_turns if has_turn_limit else None,
            max_tokens=options.max_total_tokens,
            max_cost_usd=options.max_cost_usd,
        )


NO_LIMITS = CallLimits()


def is_attempt_over(error: ModelError) -> bool:
    """Whether a failed call ends the attempt of its agent, which is repeated later."""
    if error.kind in ("not_found", "forbidden"):
        return True
    return not error.was_passed_on and error.action in ("retry", "stop_run")


class _RelayedCall:
    """One call on its way to the endpoint, and the parts of its reply on their way back."""

    def __init__(
        self,
        wire: Wire,
        wanted: WireRequest,
        request: RelayRequest,
        reply: Answer,
        *,
        is_live: bool,
    ) -> None:
        """`reply` gets the parts of a stream as they come if the call `is_live`."""
        self.wire = wire
        self.wanted = wanted
        self.reply = reply
        self._is_live = is_live
        self._read_reply = request.read
        self._asks_for_tokens = request.asking_for_tokens is not None
        self._agent_body = load_object(request.body) if self._asks_for_tokens else {}
        self._content = b""
        """The body of the latest reply that was read."""
        self._buffered: list[bytes] = []
        """The events that wait until the reply is recorded."""
        self._is_closed = False
        """Whether the closing event of the stream has come."""
        request = replace(request, read=self._read)
        if wanted.is_stream:
            request = replace(request, assembly=self._begin_attempt, on_event=self._take_event)
        self.request = request

    def body(self) -> dict[str, Any]:
        """The body of the reply, without token ids that the agent did not ask for.

        A body that is not valid JSON is repaired, also for the agent.
        """
        try:
            body = exact_json.loads(self._content)
        except exact_json.JSONDecodeError:
            body = load_object(self._content)
            self._content = exact_json.dumps(body)  # agents read only valid JSON
        return remove_tokens(body, self._agent_body) if self._asks_for_tokens else body

    def last_parts(self, body: dict[str, Any]) -> list[bytes]:
        """Return the parts that end the reply; `body` is its body."""
        if not self.wanted.is_stream:
            return [exact_json.dumps(body) if self._asks_for_tokens else self._content]
        # An endpoint without streams answers in one piece.
        if not (self.reply.parts or self._buffered):
            return self.wire.write_stream(body)
        # An endpoint may leave a stream open after its reply, but the agent waits for the end.
        if self.wire.closing and not self._is_closed:
            return [*self._buffered, self.wire.closing]
        return self._buffered

    def _read(self, body: bytes) -> Completion:
        self._content = body
        try:
            return self._read_reply(body)
        except ModelError as error:  # the parts that the agent has cannot be taken back
            error.was_passed_on = bool(self.reply.parts)
            raise

    def _begin_attempt(self) -> Assembly:
        self._buffered.clear()  # events of a stream that was cut
        self._is_closed = False
        return self.wire.assembly()

    def _take_event(self, raw: bytes, data: str | None) -> bool:
        """Pass an event on, or buffer it; see `OnEvent`."""
        if self._asks_for_tokens and data is not None:
            raw = remove_tokens_from_event(raw, data, self._agent_body)
        if self._is_live and not self._buffered and not self._ends_reply(data):
            self.reply.add(raw)
            return True
        self._is_closed = self._is_closed or (data is not None and self.wire.is_closing(data))
        self._buffered.append(raw)
        return False

    def _ends_reply(self, data: str | None) -> bool:
        return data is not None and self.wire.ends_reply(data)


class Relay:
    """Answers the model calls of one agent, and records them in `trajectory`."""

    def __init__(
        self,
        *,
        route: Callable[[str, str], Route],
        trajectory: Trajectory,
        journal: Journal,
        wait_until_persisted: WaitUntilPersisted = None,
        limits: CallLimits = NO_LIMITS,
        volatile: Volatile = NOTHING_VOLATILE,
        is_stopping: Callable[[], bool] = lambda: False,
        why_stopping: Callable[[], str | None] = lambda: None,
        ends_with: Callable[[ModelError], bool] = is_attempt_over,
        is_live: bool = False,
        conversation: str = "",
    ) -> None:
        """Relay calls for one agent.

        `route` returns the model for a dialect and the name that the agent sent, or raises
        `RefusedModel`. `wait_until_persisted` waits until the journal is on disk. `ends_with`
        decides whether a failed call is the last one; after other failures the agent gets the error
        and can make further calls. `why_stopping` returns the reason that agents get while all work
        stops.

        If `is_live`, streams are passed on as they come. Otherwise the agent gets them
        whole, so that the relay can repeat one that is cut. `conversation` is the id of the whole
        conversation, from which the ids of threads are made.
        """
        self._route = route
        self._trajectory = trajectory
        self._journal = journal
        self._wait_until_persisted = wait_until_persisted
        self._limits = limits
        self._volatile = volatile
        self._is_stopping = is_stopping
        self._why_stopping = why_stopping
        self._ends_with = ends_with
        self._is_live = is_live
        self._conversation = conversation
        self._calls: set[asyncio.Task[None]] = set()
        if trajectory.agent_calls is None:
            trajectory.agent_calls = Threads()
        self._threads = trajectory.agent_calls
        self._threads.volatile = volatile
        self._is_resumed = bool(self._threads.exchanges)
        """Whether the next request is the first one after a crash."""
        self.answers = Answers()
        self.ending: Finish | None = None
        """The ending of the conversation for which calls were refused; None if none was."""
        self.failure: Exception | None = None
        """The error that ends the attempt, or the run; `close` raises it. None without one."""
        self.last_error: ModelError | None = None
        """The error of the last call, if the endpoint refused it; else None."""
        self.last_refusal: Refusal | None = None
        """The refusal of the last call, by the endpoint or for an unknown model; else None."""
        self.refused: str | None = None
        """The latest reason for which the gateway itself refused a request; None without one."""
        self.ended = asyncio.Event()
        """Set with `ending` or `failure`: the agent gets no more replies."""

    @property
    def exchanges(self) -> Sequence[ExchangeEvent]:
        """The recorded calls, in order."""
        return self._threads.exchanges

    @property
    def in_flight(self) -> int:
        """The number of calls that wait for the endpoint."""
        return len(self._calls)

    def answer(self, call: AgentCall) -> Answer:
        """Return the reply to a model call, which may not be complete yet. Raises `WireError`."""
        wanted = self._threads.read(call.wire, call.path, call.body)
        if reply := self.answers.join(wanted, is_repeat=call.is_repeat):
            log.debug("The agent made a call again and gets the same reply.")
            return reply
        if refusal := self._refuse_all():
            return Answer(refusal)
        if known := self._take_recorded(wanted):
            wire, body, reply = call.wire, known["body"], self.answers.begin(wanted)
            reply.finish(wire.write_stream(body) if wanted.is_stream else [wire.write_whole(body)])
            return reply
        if refusal := self._refuse_over_limit(wanted):
            return Answer(refusal)
        try:
            route = self._route(call.wire.api, wanted.model)
        except RefusedModel as error:
            self.refused = str(error)
            self.last_refusal = Refusal(_STOP, "model", self.refused)
            return Answer(self.last_refusal)
        conversation = inner_conversation_id(self._conversation, opening_digest(wanted))
        settings = route.model.settings
        request = make_request(
            call, settings, route.name, wanted, lambda: self.exchanges, conversation
        )
        reply = self.answers.begin(wanted)
        relayed = _RelayedCall(call.wire, wanted, request, reply, is_live=self._is_live)
        task = asyncio.create_task(self._make(relayed, route.model))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return reply

    async def count_tokens(self, call: AgentCall) -> Answer:
        """Return the reply to a request that counts tokens, which is free and not recorded."""
        if refusal := self._refuse_all():
            return Answer(refusal)
        in_path = _MODEL_IN_PATH.search(call.path)
        name = in_path[1] if in_path else str(call.body.get("model"))
        try:
            route = self._route(call.wire.api, name)
            request = make_count_request(call, route.model.settings, route.name)
            return await send_free_request(route.model, request)
        except RefusedModel as error:
            return Answer(Refusal(_STOP, "model", str(error)))
        except Exception as error:
            return Answer(self._fail(error))

    async def close(self) -> None:
        """Wait for the calls in flight, up to their time limits, and record them.

        Raises the error that made further calls impossible: `ModelError`, or an error of the
        journal or the limiter.
        """
        calls = [*self._calls]
        try:
            if calls:
                await asyncio.wait(calls)
        except asyncio.CancelledError:
            for task in calls:
                task.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            raise
        if self.failure is not None:
            raise self.failure

    def _refuse_all(self) -> Refusal | None:
        """Return the refusal of every call if no more may be made; else None."""
        if self.failure is not None:
            return self._failure_refusal(self.failure)
        if self._is_stopping():
            return self._stopping_refusal()
        if self.ending is not None:
            return Refusal(_STOP, self.ending.status, self.ending.reason or "no more model calls")
        return None

    def _refuse_over_limit(self, wanted: WireRequest) -> Refusal | None:
        """End the conversation and refuse a new call if a limit is reached; else return None."""
        self.ending = self._reached_limit()
        if self.ending is None and self._limits.repeats:
            self.ending = find_repeats(wanted.messages, self._limits.repeats, self._volatile)
        if self.ending is None:
            return None
        self.ended.set()
        return self._refuse_all()

    def _reached_limit(self) -> Finish | None:
        limits, spent = self._limits, self._trajectory
        limit = limits.max_calls
        if limit is not None and len(self._threads.live) + len(self._calls) >= limit:
            return Finish("max_turns", f"the agent has made all of its {limit} model calls")
        dollars, tokens = limits.max_cost_usd, limits.max_tokens
        if end := unknown_cost_ending(spent, dollars, tokens):
            return end
        if dollars is not None and spent.spent_usd >= dollars:
            return Finish("budget", f"${spent.spent_usd:.6f} of ${dollars:.6f} are spent")
        if tokens is not None and spent.spent_tokens >= tokens:
            return Finish("budget", f"{spent.spent_tokens:,} of {tokens:,} tokens are used")
        return None

    def _take_recorded(self, wanted: WireRequest) -> ExchangeEvent | None:
        """Find the recorded call whose reply answers this request; None if there is none.

        Records that an earlier start's call is answered again.
        """
        if self._is_resumed and (last := self._take_last(wanted)):
            return last
        if known := self._threads.find_set_aside(wanted.key):
            self._record(AnsweredEvent(kind="answered", exchange=known["number"]))
        return known

    def _take_last(self, wanted: WireRequest) -> ExchangeEvent | None:
        """Find the last call of a thread if the first request after a crash repeats it; else None.

        A request that repeats an earlier call shows that the program starts again.
        """
        # The reply to the last call may not have reached the program.
        self._is_resumed = False
        threads = self._threads
        if not threads.live:
            return None
        equal = [event for event in threads.exchanges if event["key"] == wanted.key]
        for event in equal:
            thread, end = threads.thread_and_end(event["number"])
            if end == len(thread.messages):
                return event
        if equal:
            self._record(AgentRestartedEvent(kind="agent_restarted", at=time.time()))
        return None

    async def _make(self, call: _RelayedCall, model: RetryingModel) -> None:
        """Make a call, record it, and only then end the reply."""
        reply = call.reply
        try:
            reply.finish(await self._complete(call, model))
            self.last_error = self.last_refusal = self.refused = None
            return
        except ModelError as error:
            refusal = self._refuse(error)
        except Exception as error:
            refusal = self._fail(error)
        except asyncio.CancelledError:
            reply.fail(self._stopping_refusal())
            self.answers.forget(reply)
            raise
        reply.fail(refusal)
        self.answers.forget(reply)

    async def _complete(self, call: _RelayedCall, model: RetryingModel) -> list[bytes]:
        """Make a call and record it; return the parts that end the reply."""
        clock = Clock()
        request = replace(call.request, on_unreadable=self._record_unreadable)
        completion = await model.complete(request)
        body, wanted = call.body(), call.wanted
        if not call.wire.has_read_earlier(wanted, body):
            log.warning(
                "The endpoint has not read the earlier response %s; the record says so.",
                wanted.follows,
            )
            wanted = mark_earlier_unread(wanted)
        self._record(exchange_event(self._threads, wanted, completion, body, clock))
        if self._wait_until_persisted is not None:
            await self._wait_until_persisted()
        return call.last_parts(body)

    def _record_unreadable(self, unreadable: Completion) -> None:
        """Record a reply that was paid for but cannot be used."""
        turn = self._trajectory.turns + 1
        self._record(reply_event(turn, unreadable, Clock(), discarded=UNREADABLE))

    def _record(self, event: Any) -> None:
        self._journal(event)
        self._trajectory.apply(event)

    def _refuse(self, error: ModelError) -> Refusal:
        """Return the refusal for an agent whose call failed after all retries."""
        if self._ends_with(error):
            return self._fail(error)
        self.last_error = error
        self.last_refusal = _error_refusal(error)
        return self.last_refusal

    def _fail(self, error: Exception) -> Refusal:
        """Note that no further call can be made, and return the refusal."""
        if self.failure is None:
            self.failure = error
            self.ended.set()
        return self._failure_refusal(error)

    def _failure_refusal(self, failure: Exception) -> Refusal:
        if isinstance(failure, Stopped):
            return self._stopping_refusal()
        why = str(failure).strip() or type(failure).__name__
        return Refusal(_STOP, "failed", f"no more model calls: {why}")

    def _stopping_refusal(self) -> Refusal:
        why = self._why_stopping() or "the run is stopping"
        return Refusal(_STOP, "stopped", f"{why}; it can be resumed")


async def send_free_request(model: RetryingModel, request: RelayRequest) -> Answer:
    """Return the endpoint's answer to a request that costs nothing, or its refusal."""
    bodies: list[bytes] = []

    def read(body: bytes) -> Completion:
        bodies.append(body)
        return read_free_reply(body)

    try:
        await model.complete(replace(request, read=read))
    except ModelError as error:
        return Answer(_error_refusal(error))
    reply = Answer()
    reply.finish(bodies[-1:])
    return reply


def make_free_request(path: str, headers: Mapping[str, str]) -> RelayRequest:
    """Make a GET request for `path`, below the root of an endpoint; see `send_free_request`."""
    return RelayRequest(
        method="GET", path=path, body=b"", headers=headers, max_tokens=0, read=read_free_reply
    )


def _is_json(body: bytes) -> bool:
    """Whether the body of an error is JSON, as clients expect it, and not a page of a proxy."""
    try:
        return isinstance(exact_json.loads(body), dict | list)
    except exact_json.JSONDecodeError:
        return False


def _error_refusal(error: ModelError) -> Refusal:
    if error.reply is not None:
        status, body = error.reply
        return Refusal(status, error.kind, str(error), body if _is_json(body) else None)
    status = _FAILED_UPSTREAM if error.action == "retry" else _STOP
    return Refusal(status, error.kind, str(error))
