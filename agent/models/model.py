"""The seam between a conversation and whatever answers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from agent.messages import FinishReason, Message, Usage
from agent.stream import StreamHandler


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
    """What this call cost, where the endpoint said so or its price is known."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a model is asked with."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas in OpenAI form."""
    tool_choice: Literal["auto", "none"] = "auto"
    """With "none" the tools are told but must not be called."""
    on_delta: StreamHandler | None = None
    """Told of the reply's parts as they arrive; None asks for the reply in one piece. It must not
    raise: see `agent.stream.guarded`."""


class Overtaken(Exception):
    """What had to be done before a request has changed what is to be asked, or whether."""


class Model(Protocol):
    """A model that can be asked for the next assistant message."""

    async def complete(self, request: Request) -> Completion:
        """Ask for the next message.

        The reply is the same whether or not its parts are streamed. Raises `ModelError` where
        the endpoint failed, and `Overtaken` where the caller has to decide anew.
        """
        ...

    async def close(self) -> None:
        """Release connections; the model cannot be used afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Everything that decides how a model is asked. Holds no secrets."""

    name: str
    """The model id that the endpoint knows."""
    api: str
    """The dialect: openai_chat, openai_responses, anthropic_messages or scripted."""
    base_url: str | None
    """Root of the endpoint; None for scripted."""
    key_env: str | None
    """Environment variable that holds the key; None where no key is needed."""
    provider: str | None = None
    """Provider id for the price table; None lets the table guess from the model's name."""
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    """Bound on one reply's tokens; None sends none (Anthropic demands one: 16,000)."""
    extra_body: Mapping[str, Any] | None = None
    """Fields merged into each request body as they are, such as {"thinking": …}."""
    reasoning_effort: str | None = None
    """none, minimal, low, medium, high, xhigh or max; None leaves it to the endpoint."""
    blank_reasoning: bool = False
    """OpenAI dialect: give assistant messages without reasoning a blank one.

    Some providers of thinking models refuse a history in which it is missing.
    """
    prompt_caching: bool = True
    """Anthropic: have the system message and the tools kept in the prompt cache."""
    attempt_timeout_s: float = 600.0
    """Deadline of one attempt of one call, first byte to last."""
    idle_timeout_s: float = 120.0
    """Longest silence within a streamed reply once it has begun."""
    call_attempts: int = 8
    """Attempts of one call before the task's attempt fails; rate limits do not count."""
    call_timeout_s: float = 3600.0
    """Deadline of one call with all its attempts and waits."""
