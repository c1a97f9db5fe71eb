"""What can go wrong with a model call, and what each failure asks of the caller: one table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Action = Literal["retry", "end", "fail_task", "stop_run"]

Kind = Literal[
    "rate_limited",
    "overloaded",
    "connection",
    "timeout",
    "malformed",
    "context_exceeded",
    "bad_request",
    "not_found",
    "forbidden",
    "auth",
    "no_credit",
]


class Rule(NamedTuple):
    """What a failure of one kind leads to, and what it means in a user's words."""

    action: Action
    meaning: str


RULES: Mapping[Kind, Rule] = {
    "rate_limited": Rule("retry", "the endpoint asked for fewer calls (429)"),
    "overloaded": Rule("retry", "the endpoint is failing or overloaded (5xx, 529, 408, 409)"),
    "connection": Rule("retry", "the connection failed or was cut"),
    "timeout": Rule("retry", "no complete reply within the attempt's time"),
    "malformed": Rule("retry", "the reply was not a complete chat reply"),
    "context_exceeded": Rule("end", "the conversation no longer fits the model's context"),
    "bad_request": Rule("fail_task", "the endpoint refused this request (4xx)"),
    "not_found": Rule("fail_task", "the endpoint does not know this model or path (404)"),
    "forbidden": Rule("fail_task", "the endpoint does not allow this request (403)"),
    "auth": Rule("stop_run", "the endpoint rejected the credentials (401)"),
    "no_credit": Rule("stop_run", "the account has no credit left (402)"),
}

SAYS_MORE_OF_THE_ENDPOINT: frozenset[Kind] = frozenset(
    {"overloaded", "connection", "timeout", "malformed", "not_found", "forbidden"}
)
"""While an endpoint has never answered, these failures are its own and not the task's."""

_UNANSWERED: frozenset[Kind] = frozenset({"connection", "timeout", "malformed"})
"""Failures by which the endpoint did not say that it refuses the request."""

_SHORTEST_KEY = 8

_NO_CREDIT_CODES = ("insufficient_quota", "billing_error", "insufficient_credits")
_NO_CREDIT_WORDS = ("credit balance is too low",)
_CONTEXT_WORDS = (
    "context_length_exceeded",
    "context length",
    "context window",
    "context size",
    "context limit",
    "prompt is too long",
    "too many tokens",
)


class ModelError(Exception):
    """A model call failed. `kind` decides what happens next (see `RULES`).

    `retry_after_s` is what the endpoint asked for, None where it said nothing usable. The
    message may quote the endpoint, so what a terminal would obey is taken out of it.
    """

    def __init__(
        self,
        kind: Kind,
        message: str,
        *,
        retry_after_s: float | None = None,
        was_sent: bool = True,
        code: str = "",
        param: str = "",
    ) -> None:
        """`was_sent` False tells that the request certainly never reached the endpoint."""
        super().__init__("".join(c if c.isprintable() else " " for c in message))
        self.kind: Kind = kind
        self.retry_after_s = retry_after_s
        self._was_sent = was_sent
        self.code = code
        """The code, or else the type, that the endpoint gave to the error; "" for none."""
        self.param = param
        """The field of the request that the endpoint named beside it; "" for none."""
        self.endpoint: str | None = None
        """The base URL that was asked, where it is known."""
        self.key_env: str | None = None
        """The environment variable of the key that it was asked with."""

    @property
    def action(self) -> Action:
        """What the caller has to do."""
        return RULES[self.kind].action

    @property
    def may_have_cost(self) -> bool:
        """Whether the endpoint may charge for the attempt although nobody could use its reply."""
        return self._was_sent and self.kind in _UNANSWERED


def kind_of_status(status: int, code: str, message: str) -> Kind:
    """Classify an HTTP error by its status and, where that is not enough, the body's words.

    `code` is what the body gives as the error's code or type, `message` its text. Texts are
    searched only for what no prompt would hold, because some servers quote the request.
    """
    text = message.lower()
    if status == 402 or code in _NO_CREDIT_CODES or _says(text, _NO_CREDIT_WORDS):
        return "no_credit"
    if status == 429:
        return "rate_limited"
    if status in (408, 409) or status >= 500:
        return "overloaded"
    if status in (400, 413, 422) and (code in _CONTEXT_WORDS or _says(text, _CONTEXT_WORDS)):
        return "context_exceeded"
    if status == 401:
        return "auth"
    if status == 403:
        return "forbidden"
    if status == 404:
        return "not_found"
    return "bad_request"


def _says(text: str, words: tuple[str, ...]) -> bool:
    return any(word in text for word in words)


def redact(text: str, secret: str) -> str:
    """Take a key out of a text. Short ones are placeholders, and common words besides."""
    return text.replace(secret, "[API key]") if len(secret) >= _SHORTEST_KEY else text
