"""Filters that look at one record at a time.

The reason of a rejection is the name of the filter in the recipe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from agent.loop.answers import matches
from agent.options import Match
from batch_trajectories.basics.errors import ConfigError, missing_extra
from batch_trajectories.export.conversation.ending import find_answer
from batch_trajectories.export.conversation.leaks import find_leaks
from batch_trajectories.export.conversation.metadata import view_counts
from batch_trajectories.export.conversation.own_work import AuthoredWork, interrupted_calls
from batch_trajectories.export.conversation.rewards import judgement_with_reward, training_reward
from batch_trajectories.export.conversation.texts import conversation_texts
from batch_trajectories.export.conversation.turns import tool_names
from batch_trajectories.export.conversation.validity import Rejection
from batch_trajectories.export.rows.filter_options import AnswerCheck, Filters
from batch_trajectories.records.checks import (
    CHECK_FAILED,
    EXPECTED,
    ended_by_wrong_answer,
    expected_column,
    find_question,
    has_passed_later_check,
)
from batch_trajectories.records.record_types import Record, StoredError
from batch_trajectories.records.scores import agreed_verdict
from toolsets.catalog.custom import CustomToolError, import_function

if TYPE_CHECKING:
    from batch_trajectories.export.filters.contamination import Contamination


# Keys and passwords in text, found by their form.

Scanner = Callable[[str], str | None]
"""A function that returns the kind of secret in a text, never the secret; None without any."""

# Lookaheads have a limited length: a text of many key prefixes would take quadratic time.
_KINDS = {
    "anthropic key": r"sk-ant-[\w-]{20,}",
    "openai key": r"sk-(?=[\w-]{0,100}\d)[A-Za-z0-9][\w-]{19,}",
    "openrouter key": r"sk-or-v1-[0-9a-f]{32,}",
    "aws access key": r"AKIA[0-9A-Z]{16}\b|ASIA[0-9A-Z]{16}\b",
    "github token": r"gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{50,}",
    "gitlab token": r"glpat-[\w-]{20,}",
    "google key": r"AIza[\w-]{35}",
    "hugging face token": r"hf_[A-Za-z0-9]{30,}",
    "slack token": r"xox[abeoprs]-[\w-]{10,}",
    "stripe key": r"rk_live_[A-Za-z0-9]{20,}|sk_live_[A-Za-z0-9]{20,}",
    "npm token": r"npm_[A-Za-z0-9]{36}",
    "pypi token": r"pypi-[\w-]{50,}",
    "search provider key": r"tvly-[\w-]{20,}|BSA[\w-]{28}\b",
    "private key": r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY",
    "signed token": r"eyJ[\w-]{10,500}\.eyJ[\w-]{10,}\.[\w-]{10,}",
}

_IN_URL = r"://[^\s/:@]{1,64}:[^\s/:@]{3,64}@"

_WORD_START = r"(?:(?<![\w-])|(?<=\\[bfnrt])|(?<=\\u[0-9a-fA-F]{4}))"
"""The start of a word. Arguments and many results are JSON, whose escapes end in letters."""

_PATTERNS = {
    **{kind: re.compile(f"{_WORD_START}(?:{pattern})") for kind, pattern in _KINDS.items()},
    "password in a url": re.compile(rf"(?<=[a-z0-9+.]){_IN_URL}"),
}

_ANY = re.compile("|".join([*_KINDS.values(), _IN_URL]))
"""A quick search, which finds nothing in most texts. Each alternative begins with a fixed letter,
so the search skips to these letters."""

_WORD_DETECTORS = (
    "KeywordDetector",
    "Base64HighEntropyString",
    "HexHighEntropyString",
    "IPPublicDetector",
)
"""Detectors that are not used, as they report ordinary words, hashes and addresses."""


def make_scanner(*, with_detect_secrets: bool) -> Scanner:
    """A scanner by the patterns of this module, and by those of detect-secrets if asked for.

    Raises `ConfigError` if detect-secrets is needed and not installed.
    """
    if not with_detect_secrets:
        return _scan_by_pattern
    try:
        from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
    except ImportError as error:
        raise missing_extra("filters.secrets: all", "quality") from error
    plugins: list[Any] = [
        plugin()
        for plugin in get_mapping_from_secret_type_to_class().values()
        if plugin.__name__ not in _WORD_DETECTORS
    ]

    def scan(text: str) -> str | None:
        if kind := _scan_by_pattern(text):
            return kind
        for line in text.splitlines():
            for plugin in plugins:
                if any(plugin.analyze_string(line)):
                    return str(plugin.secret_type)
        return None

    return scan


def _scan_by_pattern(text: str) -> str | None:
    if not _ANY.search(text):
        return None
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.search(text)), None)


_NO_ANSWER = "there is no answer"


_COUNT_FILTERS = (
    "min_reasoning",
    "hidden_reasoning",
    "max_tool_errors",
    "max_tool_error_share",
    "invented_tools",
    "min_turns",
    "max_turns",
    "min_tool_calls",
    "max_tool_calls",
    "max_input_tokens",
    "max_output_tokens",
    "max_tokens",
)
"""Filters that need counts of the model's work."""

_GROUP_FILTERS = frozenset(
    (
        "control_tokens",
        "exact_duplicates",
        "near_duplicates",
        "evaluation_words",
        "evaluation_text",
        "evaluation_search",
        "first_n",
        "best_n",
        "pass_rate",
        "max_per",
        "balance",
        "min_length",
        "max_length",
        "tokenizer",
    )
)
"""Filters that are applied elsewhere, and options that filter nothing by themselves."""


class RecordFilters:
    """The filters of a recipe that look at one record at a time."""

    def __init__(
        self,
        filters: Filters,
        *,
        threshold: float,
        reward_name: str | None = None,
        with_comparisons: bool = False,
        with_unscored: bool = False,
    ) -> None:
        """Load benchmarks, scanners and functions. Raises `ConfigError`.

        `reward_name` is the reward that counts. `with_comparisons` keeps records that only
        preferences use; see `row_rejection`. `with_unscored` keeps records that lack a reward which
        a filter compares.
        """
        self._with_comparisons = with_comparisons
        self._with_unscored = with_unscored
        self._filters = filters
        self._threshold = threshold
        self._reward_name = reward_name
        self.is_idle = filters.model_fields_set <= _GROUP_FILTERS
        """Whether no filter needs more of a record than its status."""
        self._counts = any(getattr(filters, name) not in (None, "keep") for name in _COUNT_FILTERS)
        self._wrong = None if filters.answer is None else _make_answer_check(filters.answer)
        self.evaluation: Contamination | None = None
        """The benchmarks to compare records with; None without any."""
        if filters.evaluation_files:
            from batch_trajectories.export.filters.contamination import Contamination

            self.evaluation = Contamination(filters)
        elif filters.evaluation_columns or filters.evaluation_text:
            name = "columns" if filters.evaluation_columns else "text"
            raise ConfigError(f"filters.evaluation_{name}: needs evaluation_files")
        self._scanner: Scanner | None = None
        if filters.secrets != "off":
            self._scanner = make_scanner(with_detect_secrets=filters.secrets == "all")

    def rejection(self, record: Record) -> Rejection | None:
        """The reason of the first filter that leaves a record out; None if the record is kept."""
        if self.is_idle and record.status == "completed":
            return None
        return next(self._rejections(record), None)

    def passed(self, record: Record) -> bool | None:
        """Whether a record passed; None if nothing judged it."""
        return judgement_with_reward(record, self._reward_name).is_good(self._threshold)

    def row_rejection(self, record: Record) -> Rejection | None:
        """The reason why a record is only part of preferences; None if it has a row of its own."""
        status = record.status
        if (
            self._filters.status is None
            and status != "completed"
            and not has_passed_later_check(record)
        ):
            return _status_rejection(record)
        if (rejection := self._label_rejection(record)) is not None:
            return rejection
        if self._filters.require_passed is True:
            judgement = judgement_with_reward(record, self._reward_name)
            if judgement.error is not None:
                return Rejection(CHECK_FAILED, judgement.error)
            if judgement.is_good(self._threshold) is False:
                return Rejection("require_passed", f"did not pass, reward {judgement.reward:g}")
        return None

    def _label_rejection(self, record: Record) -> Rejection | None:
        wanted = self._filters.label
        if wanted is None:
            return None
        verdict = agreed_verdict(record.labels)
        rejecting = [label.who for label in record.labels if label.verdict == "reject"]
        is_out = verdict != "keep" if wanted == "keep" else rejecting
        if not is_out:
            return None
        by = f" by {', '.join(rejecting)}" if rejecting else ""
        return Rejection("label", f"{verdict or 'no verdict'}{by}")

    def _rejections(self, record: Record) -> Iterator[Rejection]:
        filters = self._filters
        status = record.status
        if status == "failed":
            error = record.error or StoredError("unknown", "")
            yield Rejection("failed", f"{error.error_class}: {error.message}")
        if filters.status is None:
            if status != "completed" and not ended_by_wrong_answer(record):
                yield _status_rejection(record)
        elif status not in filters.status and "any" not in filters.status:
            yield _status_rejection(record)
        if not self._with_comparisons and (why := self.row_rejection(record)) is not None:
            yield why
        if filters.shortened_views == "reject" and record.view_compacted:
            seen = view_counts(record).get("view_compacted", 0)
            yield Rejection("shortened_views", f"{seen} replies did not see the whole conversation")
        if filters.leak_suspected == "reject" and (leaks := find_leaks(record)):
            leak = leaks[0]
            yield Rejection("leak_suspected", f"turn {leak.turn}: {leak.reason}: {leak.evidence}")
        if (limit := filters.max_interrupted_calls) is not None:
            interrupted = len(interrupted_calls(record))
            if interrupted > limit:
                yield Rejection("max_interrupted_calls", f"{interrupted} calls were interrupted")
        if self._counts:
            yield from _count_rejections(record, filters)
        yield from self._reward_rejections(record)
        if self.evaluation is not None and (overlap := self.evaluation.overlap(record)):
            yield overlap
        if self._scanner is not None:
            for place, text in conversation_texts(record):
                if kind := self._scanner(text):
                    yield Rejection("secrets", f"{place}: {kind}")

    def _reward_rejections(self, record: Record) -> Iterator[Rejection]:
        filters = self._filters
        judgement = judgement_with_reward(record, self._reward_name)
        reward = judgement.reward
        detail = "no reward" if reward is None else f"reward {reward:g}"
        if self._is_outside(reward, least=filters.min_reward):
            yield Rejection("min_reward", detail)
        if self._is_outside(reward, highest=filters.max_reward):
            yield Rejection("max_reward", detail)
        for name, least in filters.min_rewards.items():
            if self._is_outside(given := training_reward(record, name), least=least):
                yield Rejection("min_rewards", _describe_reward(name, given))
        for name, highest in filters.max_rewards.items():
            if self._is_outside(given := training_reward(record, name), highest=highest):
                yield Rejection("max_rewards", _describe_reward(name, given))
        if isinstance(filters.require_passed, str):
            is_good = judgement.is_good(self._threshold)
            is_wanted = is_good is (filters.require_passed == "judged")
            is_unscored = is_good is None and judgement.error is None
            if not is_wanted and not (is_unscored and self._with_unscored):
                outcome = {
                    None: "neither checked nor scored",
                    True: "passed",
                    False: "did not pass",
                }[is_good]
                if judgement.error is not None:
                    yield Rejection(CHECK_FAILED, judgement.error)
                yield Rejection("require_passed", outcome)
        if self._wrong is not None and (wrong := self._wrong(record)):
            yield Rejection("answer", wrong)

    def _is_outside(
        self, reward: float | None, *, least: float | None = None, highest: float | None = None
    ) -> bool:
        if least is None and highest is None:
            return False
        if reward is None:
            return not self._with_unscored
        return (least is not None and reward < least) or (highest is not None and reward > highest)


def _describe_reward(name: str, reward: float | None) -> str:
    return f"no reward {name!r}" if reward is None else f"{name} {reward:g}"


def _status_rejection(record: Record) -> Rejection:
    reason = record.status_reason or "ended early"
    return Rejection("status", f"{record.status}: {reason}")


def _count_rejections(record: Record, filters: Filters) -> Iterator[Rejection]:
    authored = AuthoredWork(record)
    turns, replies = len(authored.turns), authored.messages
    if filters.min_reasoning is not None:
        counts = authored.counts
        share = counts.with_reasoning / counts.replies if counts.replies else 0.0
        if share < filters.min_reasoning:
            yield Rejection("min_reasoning", f"{share:.2f} of the turns hold reasoning")
    if filters.hidden_reasoning == "reject" and (hidden := authored.counts.hidden):
        yield Rejection("hidden_reasoning", f"the reasoning of {hidden} turns is hidden")
    results = [message for message in replies if message.role == "tool"]
    errors = sum(bool(message.is_error) for message in results)
    if filters.max_tool_errors is not None and errors > filters.max_tool_errors:
        yield Rejection("max_tool_errors", f"{errors} calls failed")
    if (limit := filters.max_tool_error_share) is not None and errors > limit * len(results):
        yield Rejection("max_tool_error_share", f"{errors} of {len(results)} calls failed")
    calls = [call for message in replies for call in message.tool_calls]
    if filters.invented_tools == "reject":
        offered = tool_names(record.tools)
        for call in calls:
            if (name := call.function.name) not in offered:
                yield Rejection("invented_tools", f"{name!r} was not on offer")
    usage = record.usage or {}
    read, written = usage.get("input_tokens"), usage.get("output_tokens")
    both = None if read is None or written is None else read + written
    yield from _bound_rejections("turns", turns, filters.min_turns, filters.max_turns)
    yield from _bound_rejections(
        "tool_calls", len(calls), filters.min_tool_calls, filters.max_tool_calls
    )
    yield from _bound_rejections("input_tokens", read, None, filters.max_input_tokens)
    yield from _bound_rejections("output_tokens", written, None, filters.max_output_tokens)
    yield from _bound_rejections("tokens", both, None, filters.max_tokens)


def _bound_rejections(
    what: str, count: int | None, least: int | None, highest: int | None
) -> Iterator[Rejection]:
    subject = what.replace("_", " ")
    if least is not None and (count is None or count < least):
        yield Rejection(f"min_{what}", f"{count} {subject}")
    if highest is not None and (count is None or count > highest):
        yield Rejection(f"max_{what}", f"{'unknown' if count is None else count} {subject}")


def _make_answer_check(check: AnswerCheck) -> Callable[[Record], str | None]:
    """A function that says what is wrong with the answer of a record; None if it is right."""
    if check.function:
        return _make_function_check(check.function)
    how: Match = "auto"
    if check.match == "numeric":
        how = "number"
    elif check.match != "regex" and check.match != "python":
        how = check.match

    def is_right(answer: str, expected: str, question: str) -> bool:
        if check.match == "regex":
            return re.search(expected, answer) is not None
        return matches(answer, expected, how, question, tolerance=check.tolerance)

    def wrong(record: Record) -> str | None:
        if (answer := find_answer(record)) is None:
            return _NO_ANSWER
        column = expected_column(record.row) if check.column == EXPECTED else check.column
        if (expected := record.row.get(column)) is None:
            return f"the row has no {column!r}"
        try:
            question = find_question(record)
            right = is_right(answer, str(expected), question)
        except re.error as error:
            raise ConfigError(
                f"filters.answer: {record.id}: {column!r} is {expected!r}, no regular "
                f"expression: {error}; fix that row"
            ) from error
        return None if right else f"not the {column!r} of the row"

    return wrong


def _make_function_check(function: str) -> Callable[[Record], str | None]:
    """A function that asks a user's function what is wrong with the answer of a record."""
    try:
        hook = import_function(function, "filters.answer.function")
    except CustomToolError as error:
        raise ConfigError(str(error)) from error

    def wrong(record: Record) -> str | None:
        if (answer := find_answer(record)) is None:
            return _NO_ANSWER
        try:
            right = bool(hook(answer, record.as_dict()))
        except (Exception, SystemExit) as error:  # a user's code may raise anything
            raise ConfigError(
                f"filters.answer.function: {function} failed for {record.id}: "
                f"{type(error).__name__}: {error}; it is called with the answer and the record"
            ) from error
        return None if right else f"{function} says no"

    return wrong
