"""Opens a model for calls: its endpoint, with retries around it."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Container, Mapping, MutableMapping
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import msgspec

from agent.models.admission import CallAdmission
from agent.models.client.key_command import RenewableKey
from agent.models.client.relayed import RelayRequest
from agent.models.client.retrying import Retry, RetryingModel
from agent.models.client.transport import Transport
from agent.models.connection import Share
from agent.models.dialects.dialect import RELAYED, get_dialect, read_own_reply
from agent.models.dialects.token_ids import FIELDS
from agent.models.endpoint_words import load_words
from agent.models.errors import ModelError
from agent.models.model import Completion, ModelSettings, Request

if TYPE_CHECKING:
    from agent.models.client.fleet import Fleet


# Options that a model refuses: the call is repeated without them, and the log says so once.
#
# Reasoning models take no temperature, some take no effort, and the limit on a reply's tokens has
# two names in the chat dialect. Only a 400 that names one of our own options as unsupported
# counts; values out of range, and values in `extra_body`, are for the user to fix.
#
# Two more refusals are treated in the same way. A thinking model that demands the reasoning of
# earlier replies gets a blank text if they have none. An endpoint that refuses the id of a
# conversation gets no id.

log = logging.getLogger(__name__)

_SESSION = "session_headers"
"""The name used here for all headers with the id of a conversation: they are refused together."""

_OPTION_BY_FIELD: Mapping[str, str] = {
    # First: if it cannot be combined with the temperature, the temperature stays.
    "top_p": "top_p",
    "temperature": "temperature",
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "reasoning_effort": "reasoning_effort",
    "reasoning.effort": "reasoning_effort",
    "reasoning": "reasoning_effort",
    "output_config.effort": "reasoning_effort",
    "output_config": "reasoning_effort",
    "thinking.type": "reasoning_effort",
    "effort parameter": "reasoning_effort",
    "adaptive thinking": "reasoning_effort",
    **dict.fromkeys(FIELDS, "token_ids"),
    **dict.fromkeys(("stream_options", "stream_options.include_usage"), "stream_options"),
    "reasoning_content": "blank_reasoning",
    "prompt_cache_key": "cache_key_apis",
    _SESSION: "session_headers",
}
"""The option behind each name that an error may give to a field."""

_REASONING = "reasoning_content"

_MISSES_REASONING = re.compile(rf"{_REASONING}\b[^.;]{{0,60}}?\b(?:missing|must be passed)", re.I)
"""The message by which DeepSeek and Moonshot demand the reasoning of earlier replies."""

_INSTEAD: Mapping[str, Any] = {_REASONING: True, "prompt_cache_key": (), _SESSION: ()}
"""The values that replace refused options; options that are not listed become None."""

_CONVERSATION_FIELDS = frozenset({_SESSION, "prompt_cache_key"})
"""The fields that say which conversation a request belongs to."""

_ADDED_TO_RELAYED = _CONVERSATION_FIELDS | frozenset(FIELDS)
"""The fields that this program adds to the requests of other programs."""

_CHAT_BOUNDS = frozenset({"max_tokens", "max_completion_tokens"})

_CODES = frozenset(
    {"unsupported_parameter", "unsupported_value", "unknown_parameter", "extra_forbidden"}
)

_WORDS = (
    "unsupported|not support(?:ed)?|not permitted|extra_forbidden|unrecognized|unknown|unexpected"
    "|n't support|only supports|deprecated|cannot both be specified|may only be set"
)


@cache
def _refusal_pattern(field: str) -> re.Pattern[str]:
    """The pattern of a text with `field` and a word of refusal close together."""
    # Close together, because some servers quote the request, with all its fields.
    name = rf"(?<![\w.]){re.escape(field)}(?![\w.]*\w)"
    return re.compile(rf"{name}[^.;]{{0,60}}?(?:{_WORDS})|(?:{_WORDS})[^.;]{{0,40}}?{name}", re.I)


_FIELDS_IN_TEXTS = tuple(
    field for field in _OPTION_BY_FIELD if field not in ("reasoning", _REASONING, _SESSION)
)
"""Fields that are looked for in the text of an error.

"reasoning" is not: it counts only as the `param` of an error, since other errors use the word, too.
"""


class UnsupportedOptions:
    """The options that the endpoint of one adapter is known to refuse."""

    def __init__(self, settings: ModelSettings, say: Callable[[str], None] | None = None) -> None:
        """`say` shows a message to the user, if no other process has shown it; None: log it."""
        self._settings = settings
        self._say = say or log.warning
        self._refused: frozenset[str] = frozenset()
        self._takes_ids = False
        """A request with the id of a conversation in its headers was answered."""
        self._has_tried_without = False
        """A refused request was sent again without such headers."""

    @property
    def settings(self) -> ModelSettings:
        """The settings without the options that were refused."""
        return remove_options(self._settings, self._refused)

    async def ask(
        self,
        attempt: Callable[[ModelSettings], Awaitable[Completion]],
        *,
        has_id: bool = False,
        sent: Container[str] | None = None,
    ) -> Completion:
        """Make an attempt with the settings, and again without the options that are refused.

        Refusals are remembered once an attempt without them was answered. `has_id`: the request
        carries the id of its conversation, if the settings say so. `sent` are the fields that this
        program has put into the request; None: all. Raises the error of `attempt` if it names no
        option, or one that is left out already.
        """
        refused, errors = self._refused, dict[str, ModelError]()
        while True:
            settings = remove_options(self._settings, refused)
            try:
                completion = await attempt(settings)
            except ModelError as error:
                field = refused_field(error)
                if has_id and field is None and self._refuses_ids(error, settings):
                    field = _SESSION
                if field is not None and field in refused & _CHAT_BOUNDS:
                    # Gateways name the field that they passed on, not the one that they received.
                    (field,) = _CHAT_BOUNDS - {field}
                if field is None or field in refused or not (sent is None or field in sent):
                    raise
                if not _is_removable(field, settings):
                    raise
                refused |= {field}
                errors[field] = error
            else:
                self._takes_ids |= has_id and bool(settings.session_headers)
                for field, reason in errors.items():
                    self._remember(field, reason)
                return completion

    def _refuses_ids(self, error: ModelError, settings: ModelSettings) -> bool:
        """Whether a request may have been refused for the headers with the id of a conversation.

        Firewalls do not say which header they dislike. So until such a request was answered, the
        first one that is refused is sent once without them.
        """
        headers = settings.session_headers
        if not headers or error.kind not in ("bad_request", "forbidden"):
            return False
        message = f"{error.param or ''} {error}".lower()
        if any(header.lower() in message for header in headers):
            return True
        if self._takes_ids or self._has_tried_without:
            return False
        self._has_tried_without = True
        return True

    def _remember(self, field: str, error: ModelError) -> None:
        if field in self._refused:  # another call, made at the same time, was quicker
            return
        self._refused |= {field}
        now = remove_options(self._settings, self._refused)
        option = _OPTION_BY_FIELD[field]
        what = f"--{option}={getattr(self._settings, option)}"
        instead = f"with {now.max_tokens_name}" if getattr(now, option) else "without it"
        if option == "stream_options":
            what, instead = "stream_options", "without them, so streams may lack token counts,"
        if field == _REASONING:
            what, instead = "replies without reasoning", "with a blank one in them"
        elif field in _CONVERSATION_FIELDS:
            self._remember_no_id(field, error)
            return
        log.warning(
            "The model %s at %s refuses %s. It is asked %s from now on: %s",
            self._settings.name,
            self._settings.base_url,
            what,
            instead,
            error,
        )

    def _remember_no_id(self, field: str, error: ModelError) -> None:
        where = field if field != _SESSION else ", ".join(self._settings.session_headers)
        place = f"{self._settings.name} at {self._settings.base_url}"
        log.info(
            "The model %s refuses the id of a conversation and is asked without it from now on: %s",
            place,
            error,
        )
        # The same text in all workers, so without the error, which may have an id of the request.
        self._say(
            f"{place} refuses the id of a conversation ({where}): asked without it from now on, so "
            "a router in front of it cannot keep a conversation where its prompt is cached"
        )


def refused_field(error: ModelError) -> str | None:
    """The field that the endpoint does not support, or whose absence it refuses; None if none."""
    if error.kind != "bad_request":
        return None
    if _MISSES_REASONING.search(str(error)):
        return _REASONING
    if error.param:
        is_meant = error.param in _OPTION_BY_FIELD and (
            error.code in _CODES or _is_refused_in(error.param, str(error))
        )
        return error.param if is_meant else None
    return next((field for field in _FIELDS_IN_TEXTS if _is_refused_in(field, str(error))), None)


def _is_refused_in(field: str, text: str) -> bool:
    return field in _FIELDS_IN_TEXTS and _refusal_pattern(field).search(text) is not None


def _is_removable(field: str, settings: ModelSettings) -> bool:
    """Whether the field is in the request only because of an option, which can be left out."""
    option = _OPTION_BY_FIELD[field]
    if field == _SESSION:
        return bool(settings.session_headers)
    if field == "prompt_cache_key":
        return settings.takes_cache_key and field not in (settings.extra_body or {})
    is_demanded = option == "max_tokens" and settings.api == "anthropic_messages"
    is_demanded |= (
        option == "max_tokens"
        and settings.needs_bound
        and (settings.api != "openai_chat" or settings.max_tokens_name is not None)
    )
    is_in_extra_body = field.partition(".")[0] in (settings.extra_body or {})
    return getattr(settings, option) is not None and not is_demanded and not is_in_extra_body


def remove_options(settings: ModelSettings, refused: frozenset[str]) -> ModelSettings:
    """Remove the options behind `refused`; a limit on tokens is first sent by its other name."""
    if not refused:
        return settings
    changes: dict[str, Any] = {_OPTION_BY_FIELD[field]: _INSTEAD.get(field) for field in refused}
    limits = refused & _CHAT_BOUNDS
    if settings.api == "openai_chat" and len(limits) == 1:
        (other,) = _CHAT_BOUNDS - limits
        changes |= {"max_tokens": settings.max_tokens, "max_tokens_name": other}
    return replace(settings, **changes)


# A model behind an endpoint. It sends each call once; `retrying` decides about retries.


class EndpointModel:
    """Asks one model of one endpoint, in the dialect of its settings."""

    def __init__(
        self,
        settings: ModelSettings,
        api_key: str | RenewableKey,
        say: Callable[[str], None] | None = None,
        share: Share | None = None,
        fleets: MutableMapping[str, Fleet] | None = None,
    ) -> None:
        """Open the transports; see `open_model` for `say`, `share` and `fleets`."""
        self._dialect = get_dialect(settings.api)
        self._refusals = UnsupportedOptions(settings, say)
        self._fleet: Fleet | None = None
        at_each = (replace(settings, base_url=url) for url in settings.urls)
        self._transports = [Transport(one, api_key) for one in at_each]
        if (replication := settings.connection.replication) is not None:
            from agent.models.client.fleet import Fleet  # most endpoints have one URL

            known = {} if fleets is None else fleets
            if settings.endpoint not in known:
                known[settings.endpoint] = Fleet(replication, self._transports, share or Share())
            self._fleet = known[settings.endpoint]

    @property
    def settings(self) -> ModelSettings:
        """See `Adapter`."""
        return self._refusals.settings

    async def complete(self, request: Request) -> Completion:
        """See `Model.complete`."""
        if self._fleet is None:
            return await self._complete(request, self._transports[0])
        unreached = set[int]()
        while True:
            try:
                async with self._fleet.choose_replica(request, unreached) as number:
                    return await self._complete(request, self._transports[number])
            except ModelError as error:
                # Nothing was sent, so another replica can be asked in the same attempt.
                if not unreached or error.kind != "connection" or not error.is_by_load:
                    raise
                if len(unreached) == self._fleet.size:
                    raise

    async def _complete(self, request: Request, transport: Transport) -> Completion:
        has_id = bool(request.conversation)
        if isinstance(request, RelayRequest):
            relay = partial(self._relay, request, transport)
            return await self._refusals.ask(relay, has_id=has_id, sent=_ADDED_TO_RELAYED)
        ask = partial(self._ask, request, transport)
        return await self._refusals.ask(ask, has_id=has_id)

    async def _ask(
        self, request: Request, transport: Transport, settings: ModelSettings
    ) -> Completion:
        dialect = self._dialect
        assembly = None if request.on_delta is None else dialect.assembly(request.on_delta)
        body = dialect.body(settings, request)
        conversation = request.conversation
        reply = await transport.post(dialect.path, body, settings, assembly, conversation)
        return read_own_reply(settings, reply, body)

    async def _relay(
        self, request: RelayRequest, transport: Transport, settings: ModelSettings
    ) -> Completion:
        """Send another program's request, with the fields that this program adds.

        These are the id of the conversation and the fields that ask for token ids, unless the
        endpoint refuses them.
        """
        if request.conversation and not request.has_cache_key and settings.takes_cache_key:
            request = request.with_cache_key()
        if settings.token_ids and request.asking_for_tokens is not None:
            request = msgspec.structs.replace(request, body=request.asking_for_tokens)
        return request.read(await transport.relay(request, settings))

    async def close(self) -> None:
        """See `Adapter.close`."""
        if self._fleet is not None:
            await self._fleet.close()
        for transport in self._transports:
            await transport.close()


def load_client(settings: ModelSettings) -> None:
    """Import the modules that `open_model` and calls need, so that forked processes share them."""
    if settings.api in RELAYED:
        get_dialect(settings.api)
        load_words()


def open_model(
    settings: ModelSettings,
    *,
    api_key: str | RenewableKey,
    on_retry: Callable[[Retry], None],
    gate: CallAdmission | None = None,
    say: Callable[[str], None] | None = None,
    share: Share | None = None,
    fleets: MutableMapping[str, Fleet] | None = None,
) -> RetryingModel:
    """Open a model in the running event loop; see `RetryingModel`.

    `gate` admits its calls; None: at once. `say` shows a message to the user, if no other process
    has shown it; None: log it. `share` is the share of this process in the limits of a run; None:
    all. `fleets` are the replicas of endpoints, which several models can share; new ones are added.
    """
    adapter = EndpointModel(settings=settings, api_key=api_key, say=say, share=share, fleets=fleets)
    known = api_key if isinstance(api_key, str) else ""
    return RetryingModel(adapter, settings, api_key=known, on_retry=on_retry, gate=gate)
