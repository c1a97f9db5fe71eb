"""The failures of model calls, and what the caller has to do about each: one table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

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
    "bad_request",
    "not_found",
    "forbidden",
    "auth",
    "no_credit",
    "blocked",
]


class Rule(NamedTuple):
    """The consequence of one kind of failure, and its meaning in the user's words."""

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
    "no_credit": Rule(
        "stop_run", "the account has no credit left, or has reached a limit on its spending (402)"
    ),
    "blocked": Rule(
        "stop_run", "the provider takes no calls from this account until its owner has acted"
    ),
}

SAYS_MORE_OF_THE_ENDPOINT: frozenset[Kind] = frozenset(
    {"overloaded", "connection", "timeout", "malformed", "not_found", "forbidden"}
)
"""While an endpoint has never answered, these failures are its own and not the task's."""

_UNANSWERED: frozenset[Kind] = frozenset({"connection", "timeout", "malformed"})
"""Failures by which the endpoint did not say that it refuses the request."""

_KINDS: Mapping[Kind, tuple[str, ...]] = {
    "no_credit": (
        "insufficient_quota",
        "insufficient_credits",
        "billing_error",
        "billing_hard_limit_reached",
        "billing_not_active",
        "contract_spend_limit_reached",
        "enforced_spend_limit_reached",
        "linked_organization_billing_unavailable",
        "linked_organization_spend_limit_reached",
        "user_profile_billing_not_authorized",
        "user_profile_not_billable",
    ),
    "blocked": (
        "access_terminated",
        "account_deactivated",
        "organization_on_hold",
        # The key by which the customer has the workspace encrypted.
        "cmek_key_disabled",
        "cmek_key_network_blocked",
        "sandbox_egress_restricted",
    ),
    "auth": (
        "api_key_scope_missing",
        "authentication_error",
        "claude_code_key_creator_not_member",
        "invalid_api_key",
        "organization_level_scoped_api_key_required",
    ),
    "forbidden": (
        "claude_code_version_too_old",
        "organization_not_enrolled_in_beta",
        "organization_type_not_supported",
        "parent_organization_required",
        "workspace_human_review_disabled",
        "workspace_policy_violation",
    ),
    "context_exceeded": ("context_length_exceeded",),
    "rate_limited": ("ramp_limit_exceeded",),
    "overloaded": ("request_body_timeout",),
}
"""Codes that are more specific than their status, or contradict it."""

_KIND_OF_CODE = {code: kind for kind, codes in _KINDS.items() for code in codes}

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
        is_lasting: bool = False,
        code: str = "",
        param: str = "",
    ) -> None:
        """`was_sent` False means that the request certainly never reached the endpoint.

        `is_lasting` marks failures that rarely pass by themselves, such as an unknown host: an
        endpoint that has never answered is then given up sooner.
        """
        super().__init__("".join(c if c.isprintable() else " " for c in message))
        self.kind: Kind = kind
        self.retry_after_s = retry_after_s
        self._was_sent = was_sent
        self.is_lasting = is_lasting
        self.code = code
        """The code, or else the type, that the endpoint gave to the error; "" for none."""
        self.param = param
        """The field of the request that the endpoint named beside it; "" for none."""
        self.endpoint: str | None = None
        """The base URL that was asked, where it is known."""
        self.paid: Completion | None = None
        """What an unusable reply still cost, where it says so; without its text."""
        self.reply: tuple[int, bytes] | None = None
        """Status and body by which the endpoint refused the request, if that is how it failed."""
        self.has_answered_others = False
        """The endpoint answered another call while this one was under way, or just before."""
        self.was_passed_on = False
        """The caller has parts of the reply already, so that the call cannot be repeated."""
        self.key_source = ""
        """Where the credentials come from, as a sentence."""

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
        """Whether too many calls may have caused it: not a reply that is cut or malformed."""
        if self.kind in ("connection", "timeout"):
            return not self._was_sent
        return self.kind in ("rate_limited", "overloaded")

    @property
    def may_have_cost(self) -> bool:
        """Whether the endpoint may charge for the attempt although its reply cannot be used."""
        return self._was_sent and self.kind in _UNANSWERED


def kind_of(status: int | None, codes: Iterable[str], message: str) -> Kind:
    """Classify an error by its codes, else by its status, else by its words.

    `codes` are what the body gives as the error's codes and type, `message` its text; the status
    is None where it is unknown. Texts are searched only for what no prompt would hold, because some
    servers quote the request.
    """
    for code in codes:
        if (kind := _KIND_OF_CODE.get(code)) is not None:
            return kind
    text = message.lower()
    if status is None or not 400 <= status < 600:
        return "malformed"
    if status == 402 or _says(text, _NO_CREDIT_WORDS):
        return "no_credit"
    if status == 429:
        return "rate_limited"
    if status in (408, 409) or status >= 500:
        return "overloaded"
    if status in (400, 413, 422) and _says(text, _CONTEXT_WORDS):
        return "context_exceeded"
    if status == 401:
        return "auth"
    if status == 403:
        return "forbidden"
    if status == 404:
        return "not_found"
    return "bad_request"


def _says(text: str, phrases: tuple[str, ...]) -> bool:
    return any(word in text for word in phrases)
