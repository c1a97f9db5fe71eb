"""The interface between conversations and models: requests, replies and settings."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol, Required, TypedDict

import msgspec

from agent.messages.message import FinishReason, Message, Usage
from agent.messages.tokens import SampledTokens
from agent.models.connection import DIRECT_CONNECTION, Connection
from agent.models.deadline import Deadline
from agent.models.providers import NO_KEY, OWN_SERVERS_HEADERS, PLACEHOLDER, find_provider
from batch_trajectories.basics import exact_json

# Events for a caller while a conversation runs.
#
# The record of a conversation is the same with and without a handler.

_log = logging.getLogger(__name__)

StreamEventType = Literal[
    "turn_start",
    "text_delta",
    "thinking_delta",
    "tool_use_start",
    "tool_use_delta",
    "tool_use_stop",
    "tool_result",
]


class StreamEvent(TypedDict, total=False):
    """One event; the keys besides `type` depend on the type.

    turn_start       turn_index (from 0; not sent for the first turn)
    text_delta, thinking_delta   text: the next part
    tool_use_start   tool_id, tool_name
    tool_use_delta   tool_id, tool_input: the next part of the arguments' JSON
    tool_use_stop    tool_id, tool_name
    tool_result      tool_id, tool_name, tool_output, is_error, duration_ms
    """

    type: Required[StreamEventType]
    turn_index: int
    text: str
    tool_id: str
    tool_name: str
    tool_input: str
    tool_output: str
    is_error: bool
    duration_ms: int


StreamHandler = Callable[[StreamEvent], None]
"""Called in the event loop; it must not block."""


def guard_handler(handler: StreamHandler) -> StreamHandler:
    """Wrap `handler`: after it has raised, it is not called again, and no paid reply is lost."""
    has_failed = False

    def forward(event: StreamEvent) -> None:
        nonlocal has_failed
        if has_failed:
            return
        try:
            handler(event)
        except Exception:
            has_failed = True
            _log.exception("The stream handler failed and is not called again.")

    return forward


def ignore_event(event: StreamEvent) -> None:
    """Ignore an event: a handler for callers that want no events."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One complete, validated model reply."""

    message: Message
    finish_reason: FinishReason
    usage: Usage | None
    model: str | None
    """The model id as the endpoint returned it."""
    response_id: str | None
    cost_usd: float | None = None
    """Dollars that the call cost; None if the endpoint does not say and the price is unknown."""
    extra: Mapping[str, Any] | None = None
    """Unknown fields of the reply, by their place: "reply", "choice", "choices" (further ones) and
    "usage", and under the text protocol "message".

    They describe the reply and are never sent. Unknown fields of the message and its tool calls are
    in the message.
    """
    tokens: SampledTokens | None = None
    """Token ids and log-probabilities, if they were asked for and the endpoint gave any."""
    token_texts: Mapping[int, str] = field(default_factory=dict, compare=False)
    """Texts of this model's tokens by id, as far as they are known."""
    sampling: Mapping[str, Any] | None = None
    """The sampling options of the request, with tokens; see `TurnTokens`."""
    unknown_ending: str | None = None
    """The API's word for why the reply ended, if the word is unknown; `extra` has it, too."""
    batch_item: str | None = None
    """The id of the batch item that asked for the reply; see `batch_api.service`."""
    hour_cache_writes: int = 0
    """The part of `cache_write_tokens` that is cached for an hour, which costs more."""


class PointedTokens(NamedTuple):
    """Tokens of the input that a request's bytes do not show, such as a picture at a URL."""

    most: int
    likely: int


NOTHING_POINTED = PointedTokens(0, 0)


class Request(msgspec.Struct, frozen=True):
    """One call of a model."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas in OpenAI form."""
    tool_choice: Literal["auto", "none"] = "auto"
    """The choice of the model: with "none" the tools are listed, but must not be called."""
    on_delta: StreamHandler | None = None
    """Gets the reply's parts as they arrive; None requests the reply in one piece. It must not
    raise: see `agent.models.model.guard_handler`."""
    deadline: Deadline | None = None
    """The time limit, which pauses while the call waits for its turn; None: no limit."""
    on_unreadable: Callable[[Completion], None] | None = None
    """Gets each reply that was charged for and cannot be read, before the call is repeated."""
    conversation: str = ""
    """The id of the conversation, see `agent.models.conversation_id`; "" for a call of none."""

    def pointed(self) -> PointedTokens:
        """The tokens of input that the request only points at, such as a picture at a URL."""
        return NOTHING_POINTED

    def size(self, settings: ModelSettings) -> int:
        """The approximate bytes of the request: at least as many as it has tokens."""
        return len(exact_json.dumps([self.messages, self.tools, settings.extra_body]))

    def reply_bound(self, settings: ModelSettings) -> int | None:
        """The limit on the tokens of all replies to the request together; None: no limit."""
        bound = settings.reply_bound
        return bound and bound * requested_replies(settings.extra_body or {})

    def asks_for_hour_writes(self, settings: ModelSettings) -> bool:
        """Whether input may be written into a cache that is kept for an hour; see `HOUR_TTL`."""
        return bool(settings.extra_body) and HOUR_TTL in exact_json.dumps(settings.extra_body)


HOUR_TTL = b'"1h"'
"""A cache's lifetime of an hour, as a request's JSON has it; in a text its quotes are escaped."""


def generation_config(body: Mapping[str, Any]) -> dict[str, Any]:
    """Gemini's `generationConfig`, with names in camelCase; Google also takes snake_case."""
    config: dict[str, Any] = {}
    for name in ("generation_config", "generationConfig"):
        given = body.get(name)
        for key, value in given.items() if isinstance(given, dict) else ():
            first, *others = key.split("_")
            config["".join([first, *(other.capitalize() for other in others)])] = value
    return config


def requested_replies(body: Mapping[str, Any]) -> int:
    """The number of replies that a body asks for; each may be as long as its limit."""
    counts = [body.get("n"), body.get("best_of"), generation_config(body).get("candidateCount")]
    prompts = body.get("prompt")
    is_list = isinstance(prompts, list) and not all(type(prompt) is int for prompt in prompts)
    times = len(prompts) if is_list and prompts else 1
    return times * max([1, *(count for count in counts if type(count) is int)])


class ConversationChanged(Exception):
    """The conversation was changed just before a request: the next step has to be decided again."""


class Model(Protocol):
    """A model that can be asked for the next assistant message."""

    async def complete(self, request: Request) -> Completion:
        """Ask for the next message.

        The reply is the same whether or not its parts are streamed. Raises `ModelError` if the
        endpoint failed, and `ConversationChanged` if the caller has to decide again.
        """
        ...


class Adapter(Model, Protocol):
    """A model behind one API."""

    @property
    def settings(self) -> ModelSettings:
        """The user's settings without the options that the endpoint has refused so far."""
        ...

    async def close(self) -> None:
        """Release connections; the model cannot be used afterwards."""
        ...


_ANTHROPIC_MAX_TOKENS = 16_000
"""The limit on a reply, which this API requires: room for thinking, within each model's maximum."""


_BOUNDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""Names of the limit on a reply's tokens in the APIs."""


class Price(NamedTuple):
    """The price of a model, in dollars per million tokens."""

    input: float
    output: float
    cache_read: float
    """Price of input that came from the provider's cache."""
    cache_write: float
    """Price of input that was written into the provider's cache."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The settings that decide how a model is called; they hold no secrets."""

    name: str
    """The model id that the endpoint knows."""
    api: str
    """The dialect, see `agent.models.providers.Api`; or scripted."""
    base_url: str | None
    """Root of the endpoint; None for scripted."""
    key_env: str | None
    """Environment variable that holds the key; None if no key is needed."""
    connection: Connection = DIRECT_CONNECTION
    """Headers, proxy and credentials beyond the key."""
    reference: str = ""
    """The model as the user wrote it."""
    provider: str | None = None
    """Provider id for the price table; None lets the table guess from the model's name."""
    prices: Mapping[str, Price] = field(default_factory=dict, hash=False)
    """The user's own prices, by a model's reference or name; they win over the table."""
    endpoint_prices: Mapping[str, Price] = field(default_factory=dict, hash=False)
    """Prices at this endpoint alone, by the model's name; they win over all others."""
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    """Limit on one reply's tokens; see `reply_bound`."""
    max_tokens_name: str | None = None
    """Chat dialect: the name of the limit if the endpoint has refused the usual name; else None."""
    usual_max_tokens_name: str = "max_tokens"
    """Chat dialect: the provider's name for the limit."""
    reasoning_field: str | None = "reasoning_content"
    """Chat dialect: see `Provider.reasoning_field`."""
    session_headers: tuple[str, ...] = OWN_SERVERS_HEADERS
    """The headers that carry the id of the conversation."""
    cache_key_apis: tuple[str, ...] | None = None
    """See `Provider.cache_key_apis`; None: the APIs of the provider at the base URL."""
    extra_body: Mapping[str, Any] | None = field(default=None, hash=False)
    """Fields merged into each request body as they are, such as {"thinking": …}."""
    reasoning_effort: str | None = None
    """none, minimal, low, medium, high, xhigh or max; None leaves it to the endpoint."""
    blank_reasoning: bool = False
    """OpenAI dialect: give assistant messages without reasoning a blank one.

    Some providers of thinking models refuse a history with messages that have none.
    """
    stream_options: bool | None = True
    """Chat dialect: ask for token counts in a stream; None: the endpoint refuses the option."""
    token_ids: bool | None = None
    """Chat dialect: ask for token ids and log-probabilities; None: do not."""
    prompt_caching: bool = True
    """Anthropic: put the system message and the tools into the prompt cache."""
    attempt_timeout_s: float = 600.0
    """Maximum seconds of one attempt of a call, from its first byte to its last."""
    idle_timeout_s: float = 120.0
    """Maximum seconds of silence within a streamed reply once it has begun."""
    call_attempts: int = 8
    """Attempts of one call before the task's attempt fails; rate limits do not count."""
    call_timeout_s: float = 3600.0
    """Seconds after the beginning of a call in which it is retried, without waits for a turn."""
    needs_bound: bool = False
    """Whether each request must limit the reply's tokens, because a budget depends on the limit."""
    stream_replies: bool = False
    """Stream replies even if nothing shows them: some proxies cut silent connections."""

    @property
    def endpoint(self) -> str:
        """The endpoint whose limits the calls count against: one base URL with one key."""
        return endpoint_id(self.base_url, self.key_env, self.connection)

    @property
    def urls(self) -> tuple[str, ...]:
        """The base URLs of all replicas."""
        replication = self.connection.replication
        return (self.base_url or "",) if replication is None else replication.urls

    @property
    def own_price(self) -> Price | None:
        """The user's own price of the model; None if there is none."""
        return (
            self.endpoint_prices.get(self.name)
            or self.prices.get(self.reference)
            or self.prices.get(self.name)
        )

    @property
    def takes_cache_key(self) -> bool:
        """Whether bodies carry the id of the conversation as `prompt_cache_key`."""
        apis = self.cache_key_apis
        return self.api in (_cache_key_apis(self.base_url or "") if apis is None else apis)

    @property
    def key_variable(self) -> str:
        """The environment variable that may hold the key."""
        # Without `key_env`, as for a bare name at a base URL, the key is optional: self-hosted
        # servers mostly want none.
        return self.key_env or "OPENAI_API_KEY"

    @property
    def key_source(self) -> str:
        """The origin of the credentials, as a sentence for messages."""
        if self.connection.client is not None:
            return f"The credentials are those of client {self.connection.client}."
        if self.connection.key_command:
            return f"The key is what key_command {self.connection.key_command[0]!r} prints."
        if self.connection.headers_env:
            names = ", ".join(self.connection.headers_env.values())
            return f"The credentials are in the environment variables of headers_env: {names}."
        if self.key_env == NO_KEY:
            return "No key is sent (see --key_env)."
        if self.key_env is None:
            return f"The key is that of {self.key_variable}, if it is set (see --key_env)."
        return f"The key is that of the environment variable {self.key_variable} (see --key_env)."

    def describe_key_source(self, api_key: str) -> str:
        """The origin of `api_key`, which was sent, as a sentence for messages."""
        connection = self.connection
        if connection.client is not None or connection.key_command or connection.headers_env:
            return self.key_source
        in_environment = os.environ.get(self.key_variable, "").strip()
        if api_key and api_key == in_environment and self.key_env != NO_KEY:
            return (
                f"The key is that of the environment variable {self.key_variable} (see --key_env)."
            )
        if api_key in ("", PLACEHOLDER):
            return "No key was sent (see --key_env)."
        return "The key is the one given as api_key."

    @property
    def destination(self) -> str:
        """The place to which conversations are sent, and the credentials used, for messages."""
        client = self.connection.client
        place = f"client {client}" if client is not None else ", ".join(self.urls)
        return f"{place}, model {self.name}. {self.key_source}"

    @property
    def reply_bound(self) -> int | None:
        """The limit that requests set on one reply's tokens; None: no limit."""
        given = [value for name, value in (self.extra_body or {}).items() if name in _BOUNDS]
        if given:
            bounds = [bound for bound in given if isinstance(bound, int)]
            return max(bounds) if len(bounds) == len(given) else None
        if self.max_tokens is None and self.api == "anthropic_messages":
            return _ANTHROPIC_MAX_TOKENS
        return self.max_tokens


@lru_cache(maxsize=64)
def _cache_key_apis(base_url: str) -> tuple[str, ...]:
    known = find_provider(base_url)
    return () if known is None else known.cache_key_apis


def endpoint_id(base_url: str | None, key_env: str | None, connection: Connection) -> str:
    """See `ModelSettings.endpoint`."""
    return f"{base_url} {key_env}{connection.account}"


def endpoint_url(endpoint: str) -> str:
    """The base URL in a `ModelSettings.endpoint`."""
    return endpoint.split(" ")[0]
