"""The failures of model calls, and the action that each requires: one table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

from agent.models.endpoint_words import find_phrase, load_words, own_words

if TYPE_CHECKING:
    from agent.models.model import Completion

Action = Literal["retry", "end", "fail_task", "stop_run"]

Kind = Literal[
    "rate_limited",
    "overloaded",
    "connection",
    "timeout",
    "malformed",
    "context_exceeded",
    "filtered",
    "bad_request",
    "not_found",
    "forbidden",
    "auth",
    "no_credit",
    "blocked",
]


class Rule(NamedTuple):
    """The consequence of one kind of failure, its meaning in the user's words, and what to do."""

    action: Action
    meaning: str
    remedy: str
    """Advice to a person about failures of this kind, as one or two sentences."""


RULES: Mapping[Kind, Rule] = {
    "rate_limited": Rule(
        "retry",
        "the endpoint asked for fewer calls (429)",
        "Set --rpm, --tpm or --max_in_flight to what your account allows.",
    ),
    "overloaded": Rule(
        "retry",
        "the endpoint is failing or overloaded (5xx, 529, 408, 409, 499)",
        "Wait until it works again. If the server is yours, read its log.",
    ),
    "connection": Rule(
        "retry",
        "the connection failed or was cut",
        "Check --base_url, the network and the proxy. If the server is yours, check that it runs.",
    ),
    "timeout": Rule(
        "retry",
        "no complete reply within the attempt's time",
        "Raise --attempt_timeout_s, or ask for shorter replies with --max_tokens.",
    ),
    "malformed": Rule(
        "retry",
        "the reply was not a complete chat reply",
        "Check that --base_url and --api fit the server. If the server is yours, read its log.",
    ),
    "context_exceeded": Rule(
        "end",
        "the conversation no longer fits the model's context",
        "Lower --max_tokens, --max_turns or --observation_chars, or summarize with "
        "--summarize_over_tokens.",
    ),
    "filtered": Rule(
        "end",
        "a filter of the provider withholds the reply, or refuses the request",
        "Change the prompt, or use a model without this filter.",
    ),
    "bad_request": Rule(
        "fail_task",
        "the endpoint refused this request (4xx)",
        "Read what it refuses, and change or remove that option or that part of the row.",
    ),
    "not_found": Rule(
        "fail_task",
        "the endpoint does not know this model or path (404)",
        "Check the name in --model, then --base_url (most servers want /v1 at its end) and --api.",
    ),
    "forbidden": Rule(
        "fail_task",
        "the endpoint does not allow this request (403)",
        "Get access to this model for the key, or use another key or model.",
    ),
    "auth": Rule(
        "stop_run",
        "the endpoint refused the credentials (401)",
        "Put a valid key into the variable of --key_env. `endpoints` lists which keys are set.",
    ),
    "no_credit": Rule(
        "stop_run",
        "the account has no credit left, or has reached a limit on its spending",
        "Add credit or raise the limit at the provider.",
    ),
    "blocked": Rule(
        "stop_run",
        "the provider takes no calls from this account until its owner has acted",
        "Look for a message of the provider to the owner of the account, or use another account.",
    ),
}

ENDPOINT_FAILURES: frozenset[Kind] = frozenset(
    {"overloaded", "connection", "timeout", "malformed", "not_found", "forbidden"}
)
"""Failures that are the endpoint's and not the task's while the endpoint has never answered."""

_UNANSWERED: frozenset[Kind] = frozenset({"connection", "timeout", "malformed"})
"""Failures in which the endpoint did not refuse the request."""

_BROAD: frozenset[str] = frozenset({"rate_limited", "overloaded", "bad_request"})
"""Kinds whose codes are vague: the message of such an error may name a narrower kind."""

_TIMED_OUT = frozenset({408, 504, 524})
"""Statuses of a proxy that stopped waiting for the model; the model's work may be charged."""

_BY_PHRASE: tuple[Kind, ...] = ("no_credit", "context_exceeded", "filtered", "blocked", "malformed")
"""Kinds that are recognized by phrases in the message, in the order of the search."""


class ModelError(Exception):
    """A model call failed; `kind` decides about the next action (see `RULES`).

    `retry_after_s` are the seconds that the endpoint asks to wait; None if it asks for none. The
    message may quote the endpoint, so control characters are removed from it.
    """

    def __init__(
        self,
        kind: Kind,
        message: str,
        *,
        retry_after_s: float | None = None,
        was_sent: bool = True,
        is_lasting: bool = False,
        code: str = "",
        param: str = "",
    ) -> None:
        """Make the error of one failed call.

        `was_sent` False: the request certainly never reached the endpoint. `is_lasting`: the
        failure rarely passes by itself, such as an unknown host, so an endpoint that has never
        answered is given up sooner.
        """
        super().__init__("".join(c if c.isprintable() else " " for c in message))
        self.kind: Kind = kind
        self.retry_after_s = retry_after_s
        self._was_sent = was_sent
        self.is_lasting = is_lasting
        self.code = code
        """The code, or else the type, that the endpoint gave to the error; "" for none."""
        self.param = param
        """The field of the request that the endpoint complained about; "" for none."""
        self.endpoint: str | None = None
        """The base URL that was asked; None if it is unknown."""
        self.paid: Completion | None = None
        """The unusable reply without its text, if its body tells its cost; else None."""
        self.had_begun = False
        """The endpoint had accepted the request, or sent parts of a reply, before it failed."""
        self.reply: tuple[int, bytes] | None = None
        """Status and body with which the endpoint refused the request; None: it did not."""
        self.has_answered_others = False
        """The endpoint answered another call during this one, or just before it."""
        self.was_passed_on = False
        """The caller has received parts of the reply, so the call cannot be repeated."""
        self.key_source = ""
        """A sentence that says whose credentials were sent, if any; "" if it is unknown."""

    @property
    def action(self) -> Action:
        """The action that the caller has to take."""
        return RULES[self.kind].action

    @property
    def may_pass(self) -> bool:
        """Whether the call should be repeated."""
        return self.action == "retry" and not self.was_passed_on

    @property
    def is_by_load(self) -> bool:
        """Whether too many calls may have caused the failure; a cut or malformed reply is none."""
        if self.kind in ("connection", "timeout"):
            return not self._was_sent
        return self.kind in ("rate_limited", "overloaded")

    @property
    def may_have_cost(self) -> bool:
        """Whether the endpoint may charge for the attempt although its reply cannot be used."""
        if not self._was_sent:
            return False
        if self.kind in _UNANSWERED or self.paid is not None or self.had_begun:
            return True
        return self.reply is not None and self.reply[0] in _TIMED_OUT


def classify_error(
    status: int | None, codes: Iterable[str], message: str, request: bytes = b""
) -> Kind:
    """Classify an error by its codes, else by phrases in its message, else by its status.

    `codes` are the codes and types in the body, the narrowest first. Phrases that also stand in the
    `request` do not count: some servers quote it. The status is None if it is unknown.
    """
    known = load_words().codes
    kinds = [cast(Kind, known[code.lower()]) for code in codes if code.lower() in known]
    if narrow := next((kind for kind in kinds if kind not in _BROAD), None):
        return narrow
    # A refused key or an unknown path has nothing to do with the conversation.
    if status not in (401, 404):
        own = own_words(message)
        for kind in _BY_PHRASE:
            if find_phrase(kind, own, request):
                return kind
    if kinds:
        return kinds[0]
    return _kind_of_status(status)


_CONTEXT = (
    r"(?:context (?:length|window|size)|must be <=|: \d[\d,]* \+ \d[\d,]* >)\D{0,30}?(\d[\d,]*)"
)
"""The size of a model's context in an error: vLLM, SGLang and OpenAI, then Text Generation
Inference, then Anthropic."""

_PROMPT = (
    r"(\d[\d,]*) (?:input tokens|(?:tokens )?(?:in|from) (?:the|your) (?:input|messages|prompt)"
    r"|of text input|`inputs` tokens|\+ \d[\d,]* >)"
)
"""The size of the prompt in such an error, in the same order; "of text input" is OpenRouter's."""


def blame_reply_limit(error: ModelError) -> None:
    """Make a refused first request a `bad_request`, if it is refused for the limit on its reply.

    Prompt and limit together exceed the model's context, of which the prompt needs less than half.
    Then most prompts will be refused; a longer prompt, or a later request, simply has no room.
    """
    if error.kind != "context_exceeded":
        return
    message = str(error).lower()
    context, prompt = re.search(_CONTEXT, message), re.search(_PROMPT, message)
    if context and prompt and 2 * _number(prompt[1]) < _number(context[1]):
        error.kind = "bad_request"


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _kind_of_status(status: int | None) -> Kind:
    if status is None or not 400 <= status < 600:
        return "malformed"
    if status in (408, 409, 499) or status >= 500:
        return "overloaded"
    return _KIND_OF_STATUS.get(status, "bad_request")


_KIND_OF_STATUS: Mapping[int, Kind] = {
    401: "auth",
    402: "no_credit",
    403: "forbidden",
    404: "not_found",
    429: "rate_limited",
}
