"""Reports endpoints that do not answer, and stops a run whose endpoint refuses everything.

If an endpoint has never answered, the rows are not the cause: a server without a tool parser
refuses every request with tools. Such a run stops, and no task is marked as failed.

If an endpoint that has answered before refuses many requests alike and answers none between them,
the account or the server has changed. The run stops as well, but each of these tasks has failed
once: if a row really is wrong, it ends after `--max_attempts`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from agent.models.model import endpoint_url
from batch_trajectories.engine.executor import WorkerHandle
from batch_trajectories.engine.messages import FromWorker, TaskFailed, TaskFinished
from batch_trajectories.records.failures import Failure

_MIN_REFUSALS = 10
"""Number of refusals after which no task begins until all calls in flight have ended."""

_REFUSALS = frozenset({"bad_request", "forbidden", "not_found", "overloaded"})
"""Failures by which an endpoint that answered before may refuse all further requests. Some say with
a 500 that an account is empty."""

_VALUE = re.compile(r"(?<!HTTP )\b[\w-]*\d[\w-]*")
"""Numbers and ids in a message, such as the id of the request."""
_ALIKE_CHARS = 40
"""Length of the beginning of a message that names its cause; some servers repeat the request
after it."""

_REMEDIES = (
    (
        ("enable-auto-tool-choice", "tool-call-parser", "tool call parser"),
        "The server has no parser for tool calls: start vLLM with --enable-auto-tool-choice and "
        "--tool-call-parser NAME (SGLang: --tool-call-parser NAME)",
    ),
    (("--jinja",), "Start llama-server with --jinja, without which it takes no tools"),
    (
        ("not support tool", "tool use is not supported", "tools is not supported"),
        "This model takes no tools: choose another one, or --text_protocol=react",
    ),
    (
        ("maximum context length", "max_tokens", "max_completion_tokens", "max_output_tokens"),
        "Check --max_tokens",
    ),
)
_OTHERWISE = (
    "Check --model, sampling options and --extra_body, and what the server needs for requests with "
    "tools (vLLM: --enable-auto-tool-choice and --tool-call-parser NAME)"
)


class Refused(NamedTuple):
    """A task that failed because its request was refused."""

    worker: WorkerHandle
    message: TaskFinished | TaskFailed
    reason: str
    """The endpoint's message."""


class Refusals:
    """The refusals of a start, until a call is answered."""

    def __init__(self, endpoints: Collection[str], *, has_answered: bool) -> None:
        """`endpoints` are the run's; `has_answered`: they have answered earlier starts."""
        self._urls = sorted({*map(endpoint_url, endpoints)})
        self._is_decided = has_answered or not endpoints
        """An endpoint has answered, so a refusal concerns a single row."""
        self._held: list[Refused] = []
        self._alike: list[str] = []
        """Messages of the latest failures, all of one kind, since a call was last answered."""

    def on_reply(self) -> None:
        """Note that a call was answered."""
        self._is_decided = True
        self._alike.clear()

    def hold_back(self, worker: WorkerHandle, message: FromWorker) -> bool:
        """Hold back an early `bad_request` failure until it is known whether the endpoint works.

        Return True if the message is held back; `decide` returns it later.
        """
        if not isinstance(message, TaskFinished | TaskFailed):
            return False
        failure = message.failure
        if failure is None:
            if isinstance(message, TaskFinished) and message.fields.turns:
                self.on_reply()  # this message comes before the load report with the reply
            return False
        if self._is_decided:
            self._count(failure)
            return False
        if failure.error_class != "bad_request":
            return False
        self._held.append(Refused(worker, message, reason=failure.message))
        return True

    def _count(self, failure: Failure) -> None:
        """Count a failure at an endpoint that has answered before."""
        if failure.error_class not in _REFUSALS:
            return
        if self._alike and _outline(self._alike[-1]) != _outline(failure.message):
            self._alike.clear()
        self._alike.append(failure.message)

    @property
    def has_held_back(self) -> bool:
        """Whether messages are held back."""
        return bool(self._held)

    @property
    def has_enough(self) -> bool:
        """Whether to begin no more tasks until it is known if the endpoint answers."""
        return len(self._held if not self._is_decided else self._alike) >= _MIN_REFUSALS

    def decide(self, *, is_last: bool) -> tuple[list[Refused], str | None]:
        """Return the messages to handle now, and the reason to stop the run instead, if there is
        one.

        `is_last`: no call is in flight, and no further one is needed to judge.
        """
        if self._is_decided and is_last and len(self._alike) >= _MIN_REFUSALS:
            reason, self._alike = self._describe_change(), []
            return [], reason
        if not self._is_decided and not (is_last and self._held):
            return [], None
        if not self._is_decided:
            self._is_decided = True
            kinds = {_outline(refused.reason) for refused in self._held}
            if len(self._held) > 1 and len(kinds) == 1:
                return [], self._describe()
        held, self._held = self._held, []
        return held, None

    def _describe_change(self) -> str:
        return (
            f"{', '.join(self._urls)}: the last {len(self._alike)} requests were refused alike, "
            f"and none was answered between them: {self._alike[-1]}. Look at the account and the "
            f"server, then run the same command again. These {len(self._alike)} tasks have failed "
            "once; if only their rows are refused, they are given up after --max_attempts"
        )

    def _describe(self) -> str:
        first = self._held[0]
        reason = first.reason.lower()
        remedy = next(
            (advice for phrases, advice in _REMEDIES if any(word in reason for word in phrases)),
            _OTHERWISE,
        )
        return (
            f"{', '.join(self._urls)}: the first {len(self._held)} requests were refused alike, "
            f"and none was answered: {first.reason}. {remedy}; then run the same command "
            "again. No task was marked as failed; if only these rows are refused, put others first"
        )


def _outline(message: str) -> str:
    """The common part of messages of one kind: without ids, and without the request after it."""
    return _VALUE.sub("", message)[:_ALIKE_CHARS]


_FORGET_S = 90.0
"""Workers report an outage at least once a minute while it lasts."""

_MAX_CHARS = 200


class _Outage(NamedTuple):
    message: str
    heard_at: float
    ends_at: float
    """Approximately when the first call is given up."""


class Outages:
    """The outages of a run's endpoints, by base URL."""

    def __init__(self, proven: Iterable[str], *, say: Callable[[str], None]) -> None:
        """`proven` have answered in earlier starts; `say` shows a message to the user."""
        self._say = say
        self._answered = set(proven)
        self._outages: dict[str, _Outage] = {}
        self._has_warned = False

    def note(self, url: str, message: str, left_s: float) -> None:
        """A call failed and is retried for `left_s`; the first is reported at once."""
        now = time.monotonic()
        known = self._outages.get(url)
        ends_at = now + left_s
        if known is not None and now < known.ends_at:
            ends_at = min(ends_at, known.ends_at)
        self._outages[url] = _Outage(message[:_MAX_CHARS], now, ends_at)
        if not self._has_warned and url not in self._answered:
            self._has_warned = True
            self._say(f"waiting for {url}: no call has succeeded yet (see --base_url): {message}")

    def on_replies(self, url: str) -> None:
        """The endpoint has answered calls."""
        self._answered.add(url)
        self._outages.pop(url, None)

    def has_answered(self, url: str) -> bool:
        """Whether the endpoint has answered any call, also of earlier starts."""
        return url in self._answered

    def are_all(self) -> bool:
        """Whether calls fail and no endpoint has ever answered."""
        return bool(self._outages) and not self._answered

    def describe(self) -> str:
        """Text for the progress line; "" if there is no outage."""
        now = time.monotonic()
        for url, outage in list(self._outages.items()):
            if now - outage.heard_at > _FORGET_S:
                del self._outages[url]
        return ", ".join(
            f"waiting for {url}: {outage.message}"
            f" (giving up in {max(0.0, outage.ends_at - now):.0f} s)"
            for url, outage in self._outages.items()
        )
