"""The model calls of one agent: each is answered from the journal, or made and recorded."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from agent.gateway.answers import Answer, Answers, Refusal
from agent.gateway.pointing import Replies, check_pointed, pointed_at
from agent.loop.rules import Finish, end_by_repeats, unknown_use
from agent.messages.message import (
    UNREADABLE,
    AgentRestartedEvent,
    AnsweredEvent,
    ExchangeEvent,
    Message,
)
from agent.models.client.relayed import RelayRequest
from agent.models.client.retrying import RetryingModel
from agent.models.conversation_id import id_within
from agent.models.dialects.dialect import Assembly, read_reply
from agent.models.dialects.openai_chat import API as CHAT
from agent.models.dialects.token_ids import (
    asking_body,
    asks_for_ids,
    part_without_tokens,
    with_tokens,
    without_tokens,
)
from agent.models.errors import ModelError
from agent.models.model import (
    NOTHING_POINTED,
    Completion,
    ModelSettings,
    Pointed,
    replies_asked_for,
)
from agent.models.parsing import load_object
from agent.models.providers import AGENTS_SESSION_HEADERS
from agent.models.usage import NOTHING_USED
from agent.options import AgentOptions
from agent.state.events import Clock, exchange_event, reply_event
from agent.state.tally import Tally
from agent.state.trajectory import Journal, Kept, Trajectory
from agent.wires.base import Wire
from agent.wires.reading import cut, without_earlier
from agent.wires.threads import Threads, opening_of
from agent.wires.wire import NOTHING_VOLATILE, Volatile, WireError, WireRequest
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.errors import Stopped

# What is sent to the endpoint for a call of an agent.


class AgentCall(NamedTuple):
    """One agent request."""

    wire: Wire
    path: str
    headers: Mapping[str, str]
    content: bytes
    """The body as it came."""
    body: dict[str, Any]
    """The same, read; half an emoji is U+FFFD here, as records have it."""
    is_repeat: bool
    """The agent says that it made this request before."""
    has_halves: bool = False
    """`content` holds half an emoji, as programs write that cut texts."""


def make_request(
    call: AgentCall,
    settings: ModelSettings,
    name: str | None,
    request: WireRequest | None,
    replies: Replies,
    conversation: str = "",
) -> RelayRequest:
    """The request to send: the agent's own, unless a part of it has to change.

    `name` is what the model is called at its endpoint, if the agent calls it otherwise;
    `request` is None for a request that costs nothing. `replies` are the agent's recorded calls.
    `conversation` is our id of its thread; one that the agent sends itself counts instead.
    Raises `WireError`, under a budget also for a request that can cost more than is known.
    """
    wire, path, content, body = call.wire, call.path, call.content, call.body
    write: Callable[[Any], bytes] = exact_json.dumps
    if call.has_halves:  # what is sent has them as the agent does, also where a part changes
        body, write = exact_json.loads_with_halves(content), exact_json.dumps_with_halves
    max_tokens: int | None = 0
    bound, tools = None, False
    if request is not None:
        max_tokens, tools = request.max_tokens, bool(request.server_tools)
        if max_tokens is None and settings.needs_bound:
            max_tokens = bound = settings.reply_bound
            if bound is None:
                raise WireError(
                    "the request does not limit the reply's tokens, so the budget of the run "
                    "cannot be kept: set its limit, or --max_tokens"
                )
    if name is not None or bound is not None or tools:
        path, body = wire.rewritten(
            path, body, model=name, max_tokens=bound, without_server_tools=tools
        )
        content = write(body)
    if request is not None and settings.needs_bound:
        check_pointed(wire, body, settings, replies)
    asking = None
    read: Callable[[bytes], Completion] = free
    if request is not None:
        read, is_chat = wire.read_reply, wire.layout.api == CHAT
        if is_chat and settings.token_ids:
            asking = asking_body(settings, body)
        if asking is not None or (is_chat and asks_for_ids(body)):
            read = partial(_read_tokens, settings, asking or body)
    own = session_ids_in(call.headers, settings)
    return RelayRequest(
        path=wire.upstream_path(path),
        body=content,
        headers=wire.request_headers(call.headers) | own,
        conversation=next(iter(own.values()), conversation),
        has_cache_key=request is None or "prompt_cache_key" in body or not settings.takes_cache_key,
        max_tokens=None if max_tokens is None else max_tokens * replies_asked_for(body),
        read=read,
        unasked=None if request is None else call.wire.assembly,
        pointing=point_at_nothing
        if request is None
        else partial(pointed_at, wire, body, settings, replies),
        asking_for_tokens=None if asking is None else write(asking),
    )


def session_ids_in(headers: Mapping[str, str], settings: ModelSettings) -> dict[str, str]:
    """The ids that an agent gives its conversation itself, by header, the best known first.

    Anything but ASCII is no id that could be sent on in a body.
    """
    names = (*map(str.lower, settings.session_headers), *AGENTS_SESSION_HEADERS)
    given = {name: headers[name] for name in names if headers.get(name)}
    return {name: value for name, value in given.items() if value.isascii()}


def point_at_nothing() -> Pointed:
    """What a request points at that costs nothing."""
    return NOTHING_POINTED


def free(body: bytes) -> Completion:
    """The completion of a reply that no model wrote."""
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
    """The reply to a relayed request that asked for token ids."""
    return with_tokens(read_reply(CHAT, body), settings, sent)


# Whether an agent makes the same call with the same result again and again.


def find_repeats(messages: Sequence[Message], limit: int, volatile: Volatile) -> Finish | None:
    """The ending if the last `limit` turns made one call with one result; see `Tally.streak`.

    Texts that differ from start to start of the agent do not make a result another one.
    """
    turns: list[tuple[Message, dict[str, Message]]] = []
    results: dict[str, Message] = {}
    for message in reversed(messages):
        if message["role"] == "tool":
            text = cut(message["content"], volatile.texts)
            result = message.copy()
            result["content"] = text
            results.setdefault(message["tool_call_id"], result)
        elif message.get("tool_calls"):
            turns.append((message, results))
            results = {}
        if len(turns) == limit:
            break
    tally = Tally()
    for message, found in reversed(turns):
        calls = [call for call in message["tool_calls"] if call["id"] in found]
        tally.count_turn(calls, [found[call["id"]] for call in calls])
    if tally.streak < limit:
        return None
    return end_by_repeats(tally)


log = logging.getLogger(__name__)

_STOP = 400
"""The status that ends every agent: 402, 429 and 5xx have some of them ask again."""


_FAILED_UPSTREAM = 502
"""The status of a call without a usable reply, which the agent may repeat."""


_MODEL_IN_PATH = re.compile(r"/models/([^/:?]+)")


class RefusedModel(Exception):
    """An agent asked for a model that the run does not have; the message says what to do."""


class Route(NamedTuple):
    """The model that answers a call."""

    model: RetryingModel
    name: str | None = None
    """The model's name at its endpoint, if the agent uses another."""


@dataclass(frozen=True, slots=True)
class CallLimits:
    """What the calls of one agent may use; None: no limit. A call in flight can exceed it."""

    max_calls: int | None = None
    max_tokens: int | None = None
    max_cost_usd: float | None = None
    repeats: int = 0
    """Equal calls of tools with equal results in a row; 0: no limit."""

    @classmethod
    def of(cls, options: AgentOptions, *, has_turn_limit: bool = True) -> CallLimits:
        """Those of a conversation's options."""
        return cls(
            max_calls=options.max_turns if has_turn_limit else None,
            max_tokens=options.max_total_tokens,
            max_cost_usd=options.max_cost_usd,
        )


NO_LIMITS = CallLimits()


def is_attempt_over(error: ModelError) -> bool:
    """Whether an agent gets no more replies after a failed call: its attempt is repeated later."""
    if error.kind in ("not_found", "forbidden"):
        return True
    return not error.was_passed_on and error.action in ("retry", "stop_run")


class Relay:
    """Answers the calls of one agent, whose conversation is `trajectory`."""

    def __init__(
        self,
        *,
        route: Callable[[str, str], Route],
        trajectory: Trajectory,
        journal: Journal,
        kept: Kept = None,
        limits: CallLimits = NO_LIMITS,
        volatile: Volatile = NOTHING_VOLATILE,
        is_stopping: Callable[[], bool] = lambda: False,
        why_stopping: Callable[[], str | None] = lambda: None,
        ends_with: Callable[[ModelError], bool] = is_attempt_over,
        is_live: bool = False,
        conversation: str = "",
    ) -> None:
        """`route` gives the model for a dialect and the name that the agent asked for; it raises
        `RefusedModel`. `ends_with` says whether a failed call is the last one; after others the
        agent gets the error and can make further calls. `why_stopping` is told to agents whose
        calls are refused because all work is stopping.

        `is_live`: streams are passed on as they come. Otherwise the agent gets them whole, so that
        one that is cut can be asked for again; few agents do that themselves. `conversation` is
        the id of the whole; each thread has one of its own, made from it.
        """
        self._route = route
        self._trajectory = trajectory
        self._journal = journal
        self._kept = kept
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
        self.answers = Answers()
        self.ending: Finish | None = None
        """Why calls were refused; None if none was."""
        self.failure: Exception | None = None
        """What ends the attempt, or the run: raised by `close`."""
        self.last_error: ModelError | None = None
        """Why the last call has no reply, if the endpoint refused it."""
        self.last_refusal: Refusal | None = None
        """The same, also for a model that nothing knows."""
        self.refused: str | None = None
        """Why the gateway itself refused a request; the last reason, None if it refused none."""
        self.ended = asyncio.Event()
        """Set with `ending` or `failure`: the agent gets no more replies."""

    @property
    def exchanges(self) -> Sequence[ExchangeEvent]:
        """The calls that were recorded, in order."""
        return self._threads.exchanges

    @property
    def in_flight(self) -> int:
        """How many calls are being made."""
        return len(self._calls)

    def answer(self, call: AgentCall) -> Answer:
        """The reply to a model call, perhaps still to come. Raises `WireError`."""
        wanted = self._threads.read(call.wire, call.path, call.body)
        if reply := self.answers.join(wanted, is_repeat=call.is_repeat):
            log.debug("a call is asked for again: it gets the same reply")
            return reply
        if refusal := self._stop():
            return Answer(refusal)
        if known := self._recorded(wanted):
            wire, body, reply = call.wire, known["body"], self.answers.begin(wanted)
            reply.finish(wire.stream_of(body) if wanted.is_stream else [wire.whole(body)])
            return reply
        if refusal := self._limit(wanted):
            return Answer(refusal)
        try:
            route = self._route(call.wire.api, wanted.model)
        except RefusedModel as error:
            self.refused = str(error)
            self.last_refusal = Refusal(_STOP, "model", self.refused)
            return Answer(self.last_refusal)
        conversation = id_within(self._conversation, opening_of(wanted))
        settings = route.model.settings
        request = make_request(
            call, settings, route.name, wanted, lambda: self.exchanges, conversation
        )
        reply = self.answers.begin(wanted)
        task = asyncio.create_task(self._make(call.wire, wanted, route.model, request, reply))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return reply

    async def count_tokens(self, call: AgentCall) -> Answer:
        """The reply to a request that costs nothing and is not recorded."""
        if refusal := self._stop():
            return Answer(refusal)
        in_path = _MODEL_IN_PATH.search(call.path)
        name = in_path[1] if in_path else str(call.body.get("model"))
        try:
            route = self._route(call.wire.api, name)
            request = make_request(call, route.model.settings, route.name, None, lambda: ())
            return await ask_freely(route.model, request)
        except RefusedModel as error:
            return Answer(Refusal(_STOP, "model", str(error)))
        except Exception as error:
            return Answer(self._fail(error))

    async def close(self) -> None:
        """Wait for the calls in flight, up to their time limits, and record them.

        Raises what made further calls impossible: `ModelError`, or what the journal or the limiter
        raised.
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

    def _stop(self) -> Refusal | None:
        """The refusal of all calls, if no more are to be made."""
        if self.failure is not None:
            return self._refusal_by(self.failure)
        if self._is_stopping():
            return self._stopped()
        if self.ending is not None:
            return Refusal(_STOP, self.ending.status, self.ending.reason or "no more model calls")
        return None

    def _limit(self, wanted: WireRequest) -> Refusal | None:
        """The refusal of a new call, if a limit is reached."""
        self.ending = self._reached()
        if self.ending is None and self._limits.repeats:
            self.ending = find_repeats(wanted.messages, self._limits.repeats, self._volatile)
        if self.ending is None:
            return None
        self.ended.set()
        return self._stop()

    def _reached(self) -> Finish | None:
        limits, spent = self._limits, self._trajectory
        limit = limits.max_calls
        if limit is not None and len(self._threads.live) + len(self._calls) >= limit:
            return Finish("max_turns", f"the agent has made all of its {limit} model calls")
        dollars, tokens = limits.max_cost_usd, limits.max_tokens
        if end := unknown_use(spent, dollars, tokens):
            return end
        if dollars is not None and spent.spent_usd >= dollars:
            return Finish("budget", f"${spent.spent_usd:.6f} of ${dollars:.6f} are spent")
        if tokens is not None and spent.spent_tokens >= tokens:
            return Finish("budget", f"{spent.spent_tokens:,} of {tokens:,} tokens are used")
        return None

    def _recorded(self, wanted: WireRequest) -> ExchangeEvent | None:
        """The recorded call whose reply answers this request, if there is one.

        Records that an earlier start's call was answered again.
        """
        if self._is_resumed and (again := self._asked_again(wanted)):
            return again
        if known := self._threads.unanswered(wanted.key):
            self._record(AnsweredEvent(kind="answered", exchange=known["number"]))
        return known

    def _asked_again(self, wanted: WireRequest) -> ExchangeEvent | None:
        """The call that the first request after a crash repeats, if its reply was the last one.

        It may not have arrived. A request that repeats an earlier call shows that the program
        starts again.
        """
        self._is_resumed = False
        threads = self._threads
        if not threads.live:
            return None
        equal = [event for event in threads.exchanges if event["key"] == wanted.key]
        for event in equal:
            thread, end = threads.end_of(event["number"])
            if end == len(thread.messages):
                return event
        if equal:
            self._record(AgentRestartedEvent(kind="agent_restarted", at=time.time()))
        return None

    async def _make(
        self,
        wire: Wire,
        wanted: WireRequest,
        model: RetryingModel,
        request: RelayRequest,
        reply: Answer,
    ) -> None:
        """Make a call, record it, and only then end the reply."""
        try:
            reply.finish(await self._ask(wire, wanted, model, request, reply))
            self.last_error = self.last_refusal = self.refused = None
            return
        except ModelError as error:
            refusal = self._refuse(error)
        except Exception as error:
            refusal = self._fail(error)
        except asyncio.CancelledError:
            reply.fail(self._stopped())
            self.answers.forget(reply)
            raise
        reply.fail(refusal)
        self.answers.forget(reply)

    async def _ask(
        self,
        wire: Wire,
        wanted: WireRequest,
        model: RetryingModel,
        request: RelayRequest,
        reply: Answer,
    ) -> list[bytes]:
        """The last parts of the reply, once it is recorded."""
        held: list[bytes] = []
        bodies: list[bytes] = []

        is_asking = request.asking_for_tokens is not None
        own = load_object(request.body) if is_asking else {}

        is_closed = False

        def begin() -> Assembly:
            nonlocal is_closed
            held.clear()  # what a stream brought that was cut
            is_closed = False
            return wire.assembly()

        def on_event(raw: bytes, data: str | None) -> bool:
            if is_asking and data is not None:
                raw = part_without_tokens(raw, data, own)
            if self._is_live and not held and not (data is not None and wire.last_event(data)):
                reply.add(raw)
                return True
            nonlocal is_closed
            is_closed = is_closed or (data is not None and wire.is_closing(data))
            held.append(raw)
            return False

        def pay(unreadable: Completion) -> None:
            turn = self._trajectory.turns + 1
            self._record(reply_event(turn, unreadable, Clock(), discarded=UNREADABLE))

        read = partial(_keep, bodies, request.read)

        def read_once(body: bytes) -> Completion:
            try:
                return read(body)
            except ModelError as error:  # the parts that the agent has cannot be taken back
                error.was_passed_on = bool(reply.parts)
                raise

        request = replace(request, read=read_once, on_unreadable=pay)
        if wanted.is_stream:
            request = replace(request, assembly=begin, on_event=on_event)
        clock = Clock()
        completion = await model.complete(request)
        body = load_object(bodies[-1])
        if is_asking:
            body = without_tokens(body, own)
        if not wire.has_followed(wanted, body):
            log.warning("the endpoint has not read the earlier response %s", wanted.follows)
            wanted = without_earlier(wanted)
        self._record(exchange_event(self._threads, wanted, completion, body, clock))
        if self._kept is not None:
            await self._kept()
        if not wanted.is_stream:
            return [exact_json.dumps(body)] if is_asking else bodies[-1:]
        # An endpoint without streams answers in one piece.
        if not (reply.parts or held):
            return wire.stream_of(body)
        # An endpoint may leave a stream open after its reply, which the agent waits for.
        return [*held, wire.closing] if wire.closing and not is_closed else held

    def _record(self, event: Any) -> None:
        self._journal(event)
        self._trajectory.apply(event)

    def _refuse(self, error: ModelError) -> Refusal:
        """The reply to an agent whose call has failed for the last time."""
        if self._ends_with(error):
            return self._fail(error)
        self.last_error = error
        self.last_refusal = _refusal_of(error)
        return self.last_refusal

    def _fail(self, error: Exception) -> Refusal:
        """No further call can be made."""
        if self.failure is None:
            self.failure = error
            self.ended.set()
        return self._refusal_by(error)

    def _refusal_by(self, failure: Exception) -> Refusal:
        if isinstance(failure, Stopped):
            return self._stopped()
        why = str(failure).strip() or type(failure).__name__
        return Refusal(_STOP, "failed", f"no more model calls: {why}")

    def _stopped(self) -> Refusal:
        why = self._why_stopping() or "the run is stopping"
        return Refusal(_STOP, "stopped", f"{why}; it can be resumed")


async def ask_freely(model: RetryingModel, request: RelayRequest) -> Answer:
    """The endpoint's answer to a request that costs nothing, or its refusal."""
    bodies: list[bytes] = []
    try:
        await model.complete(replace(request, read=partial(_keep, bodies, free)))
    except ModelError as error:
        return Answer(_refusal_of(error))
    reply = Answer()
    reply.finish(bodies[-1:])
    return reply


def make_free_request(path: str, headers: Mapping[str, str]) -> RelayRequest:
    """A GET request for `path`, below the root of an endpoint; see `ask_freely`."""
    return RelayRequest(method="GET", path=path, body=b"", headers=headers, max_tokens=0, read=free)


def _keep(bodies: list[bytes], read: Callable[[bytes], Completion], body: bytes) -> Completion:
    bodies.append(body)
    return read(body)


def _refusal_of(error: ModelError) -> Refusal:
    if error.reply is not None:
        status, body = error.reply
        return Refusal(status, error.kind, str(error), body)
    status = _FAILED_UPSTREAM if error.action == "retry" else _STOP
    return Refusal(status, error.kind, str(error))
