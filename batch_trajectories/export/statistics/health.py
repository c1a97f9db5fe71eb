"""Health checks of the results of a run: are they worth training on?

Each check counts cases among turns, calls, conversations, prompts or the like; a share above the
limit of the check is a problem. `HEALTH_CHECKS` is the table of names and limits. Memory grows with
prompts (if they have several samples) and with small columns, not with records.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from agent.loop.rules import FINAL_SUMMARY
from agent.models.scripted import API as SCRIPTED
from batch_trajectories.export.conversation.leaks import find_leaks
from batch_trajectories.export.conversation.own_work import AuthoredWork
from batch_trajectories.export.conversation.turns import tool_names
from batch_trajectories.export.statistics.cache_use import CacheUse, PriceOf
from batch_trajectories.export.statistics.counts import KeyCounts
from batch_trajectories.records.checks import ended_by_wrong_answer, judge_record
from batch_trajectories.records.record_types import Record, StoredMessage, StoredTurn


class HealthCheck(NamedTuple):
    """A kind of problem, and its limit."""

    limit: float
    """The largest acceptable share."""
    least: int
    """Minimum number of turns, calls or the like; below it, nothing is a problem."""
    problem: str
    """The description of the problem, to be put after the count."""


HEALTH_CHECKS: Mapping[str, HealthCheck] = {
    "unfinished": HealthCheck(0.5, 10, "conversations did not end as completed"),
    "no_tokens": HealthCheck(
        0.01, 1, "conversations have replies but no output tokens: their cost is unknown"
    ),
    "hollow_turns": HealthCheck(0.01, 1, "turns have neither text nor reasoning nor a call"),
    "cut_turns": HealthCheck(0.02, 10, "turns were cut at the limit of tokens per reply"),
    "repeated_calls": HealthCheck(
        0.05, 10, "conversations made the same call 5 times or more in a row"
    ),
    "invalid_calls": HealthCheck(0.05, 20, "calls had arguments that their tool cannot take"),
    "interrupted_calls": HealthCheck(0.01, 20, "calls were interrupted by a stop of the run"),
    "failing_tools": HealthCheck(0, 1, "tools failed in every one of 10 calls or more"),
    "failing_prompts": HealthCheck(
        0, 1, "prompts were tried 3 times or more and never completed, always for the same reason"
    ),
    "cache_misses": HealthCheck(
        0.1,
        20,
        "turns lacked more than a tenth of what the request before had left in the prompt cache",
    ),
    "shrinking_inputs": HealthCheck(
        0.01,
        10,
        "longer requests had fewer input tokens than the ones before: the server may cut what does "
        "not fit (Ollama: raise num_ctx), or count only what its cache lacked",
    ),
    "leak_suspected": HealthCheck(
        0, 1, "conversations with a check made calls that look for its solution"
    ),
    "failed_checks": HealthCheck(0.02, 10, "checks gave no result"),
    "failed_scores": HealthCheck(0.02, 1, "scores of reward functions and judges failed"),
    "instant_passes": HealthCheck(
        0.02, 10, "checks passed in a tenth of the usual time or less: did any test run?"
    ),
    "constant_rewards": HealthCheck(
        0, 1, "values of a column have one reward in 20 conversations or more, against the odds"
    ),
}
"""The checks by name, in the order of the output."""

_FAILURES = {"invalid_calls": "invalid_arguments", "interrupted_calls": "interrupted"}
"""Checks of results, each with the kind of failure that it counts."""

_MAX_EXAMPLES = 3
_REPEATS = 5
_TOOL_CALLS = 10
_PROMPT_FAILURES = 3
_MIN_RECORDS_PER_VALUE = 20
_CHANCE = 0.001
"""Rewards are constant against the odds if chance alone would give that less often."""
_MAX_VALUES = 1000
"""Columns with more values than this are ignored: they describe single rows."""
_MAX_CHARS = 100
_ALL = "all rows"
_USUAL_CHECK_S = 1.0
"""Seconds; if checks usually take less, a fast check means nothing."""
_VARIED = ""
"""The ending of prompts that do not always fail in the same way."""


class _Rewards:
    """Counts rewards; `first` is the reward of all if `is_constant`."""

    __slots__ = ("count", "first", "is_constant", "total")

    def __init__(self) -> None:
        self.count, self.total, self.first, self.is_constant = 0, 0.0, 0.0, True

    def add(self, reward: float, count: int = 1) -> None:
        if self.count == 0:
            self.first = reward
        self.is_constant &= reward == self.first
        self.total += reward * count
        self.count += count

    def merge(self, other: _Rewards) -> None:
        if other.count:
            is_constant = self.is_constant and other.is_constant
            self.add(other.first, other.count)
            self.total += other.total - other.first * other.count
            self.is_constant &= is_constant


class Health:
    """The health checks of the records added so far."""

    def __init__(self, samples: int) -> None:
        """`samples` is the number of conversations per prompt."""
        self._samples = samples
        self._has_samples = samples >= _PROMPT_FAILURES
        self._failed_records: KeyCounts[str] = KeyCounts()
        """Records of failed attempts by prompt; failures.jsonl has these attempts, too."""
        self._found: KeyCounts[str] = KeyCounts()
        self._looked_at: KeyCounts[str] = KeyCounts()
        self._examples: dict[str, list[str]] = defaultdict(list)
        self._tool_calls: KeyCounts[str] = KeyCounts()
        self._tool_failures: KeyCounts[str] = KeyCounts()
        self._endings: dict[str, tuple[str, int]] = {}
        self._rewards: dict[str, dict[Any, _Rewards]] = defaultdict(dict)
        self._check_s = array("d")
        self._pass_s = array("d")
        self._passed_ids: list[str] = []
        self.caches = CacheUse()

    def add(self, record: Record, authored: AuthoredWork) -> None:
        """Check one record."""
        id, turns, counts = record.id, authored.turns, authored.counts
        is_completed = record.status == "completed"
        self._count("unfinished", id, not (is_completed or ended_by_wrong_answer(record)))
        if self._has_samples:
            ending = _VARIED if is_completed else f"{record.status}: {record.status_reason}"
            if record.error is not None:
                ending = _describe_failure(record.error.error_class)
                self._failed_records[record.prompt_id] += 1
            self._add_ending(record.prompt_id, ending, 1)
        if turns and record.api != SCRIPTED and record.imported is None:
            tokens = (record.usage or {}).get("output_tokens")
            self._count("no_tokens", id, not tokens)
        cut = sum([turn.finish_reason == "length" for turn in turns])
        self._count("cut_turns", id, cut, of=len(turns))
        self._count("hollow_turns", id, counts.hollow, of=counts.replies)
        for name, kind in _FAILURES.items():
            found = counts.failures.count(kind) if counts.failures else 0
            self._count(name, id, found, of=counts.results)
        self._add_calls(record, authored)
        self._add_inputs(record, turns)
        self.caches.add(record)
        judgement = judge_record(record)
        if judgement.reward is not None:
            self._add_reward(record, judgement.reward)
        if scores := record.scores:
            failed = sum(score.error is not None for score in scores)
            self._count("failed_scores", id, failed, of=len(scores))
        if (check := record.check) is not None:
            self._count("leak_suspected", id, bool(find_leaks(record)))
            self._count("failed_checks", id, judgement.error is not None)
            if check.duration_s is not None and check.error is None:
                self._check_s.append(check.duration_s)
                if judgement.verdict:
                    self._pass_s.append(check.duration_s)
                    self._passed_ids.append(id)

    def add_failures(self, failures: Iterable[Mapping[str, Any]]) -> None:
        """Check failed attempts, the lines of failures.jsonl, after all records are added."""
        for line in failures:
            if line.get("kind") == "attempt":
                prompt = self._prompt_id(line["id"])
                if is_known := self._failed_records[prompt] > 0:
                    self._failed_records[prompt] -= 1
                self._add_ending(prompt, _describe_failure(line["class"]), 1 - is_known)

    def _prompt_id(self, task_id: str) -> str:
        """The id of a task's prompt, which is the id of its first sample."""
        prompt, _, sample = task_id.rpartition("#s")
        is_sample = sample.isdecimal() and 0 < int(sample) < self._samples
        return prompt if prompt and is_sample and task_id not in self._endings else task_id

    def merge(self, other: Health) -> None:
        """Add the records of `other`, which come later."""
        self._found.merge(other._found)
        self._looked_at.merge(other._looked_at)
        for name, ids in other._examples.items():
            self._examples[name] = [*self._examples[name], *ids][:_MAX_EXAMPLES]
        self._tool_calls.merge(other._tool_calls)
        self._tool_failures.merge(other._tool_failures)
        self._failed_records.merge(other._failed_records)
        for prompt, (ending, count) in other._endings.items():
            self._add_ending(prompt, ending, count)
        for column, values in other._rewards.items():
            for value, rewards in values.items():
                self._rewards[column].setdefault(value, _Rewards()).merge(rewards)
        self._check_s.extend(other._check_s)
        self._pass_s.extend(other._pass_s)
        self._passed_ids += other._passed_ids
        self.caches.merge(other.caches)

    def to_json(self, price_of: PriceOf | None = None) -> list[dict[str, Any]]:
        """One object per check.

        Keys: `name`, `found`, `of`, `share` (null if `of` is 0), `limit`, `is_problem`, `problem`
        (a description) and up to three `examples`: ids of records or prompts, names of tools, or
        `column=value`. `price_of` is for the cost of tokens that caches missed.
        """
        self._conclude()
        results = {name: self._result(name, check) for name, check in HEALTH_CHECKS.items()}
        misses = results["cache_misses"]
        explanation = self.caches.misses(price_of).explanation
        if explanation and misses["is_problem"]:
            misses["problem"] += f": {explanation}"
        return [*results.values()]

    def _result(self, name: str, check: HealthCheck) -> dict[str, Any]:
        count, of = self._found[name], self._looked_at[name]
        share = count / of if of else None
        return {
            "name": name,
            "found": count,
            "of": of,
            "share": share,
            "limit": check.limit,
            "is_problem": share is not None and of >= check.least and share > check.limit,
            "problem": check.problem,
            "examples": self._examples[name][:_MAX_EXAMPLES],
        }

    def _count(self, name: str, example: str, found: int, *, of: int = 1) -> None:
        self._looked_at[name] += of
        if found:
            self._found[name] += found
            examples = self._examples[name]
            examples += [example] * min(found, _MAX_EXAMPLES - len(examples))

    def _add_inputs(self, record: Record, turns: Sequence[StoredTurn]) -> None:
        """Count requests that repeat the one before, and those of them with fewer tokens.

        Records of other programs are left out, and requests that may become shorter: by views and
        summaries, as templates drop the reasoning of earlier turns, or without tools at the end.
        """
        if record.imported is not None or record.view_compacted:
            return
        without_tools = {note.turn + 1 for note in record.notes if note.reason == FINAL_SUMMARY}
        shrunk = compared = 0
        for before, turn in pairwise(turns):
            if turn.exchange is not None or turn.request is not None or before.request is not None:
                continue
            if before.usage is None or turn.usage is None or turn.turn != before.turn + 1:
                continue
            if turn.turn in without_tools:
                continue
            had, has = before.usage.input_tokens, turn.usage.input_tokens
            if had is not None and has is not None:
                compared += 1
                shrunk += has < had
        if shrunk and any(message.reasoning for message in record.messages):
            return
        self._count("shrinking_inputs", record.id, shrunk, of=compared)

    def _add_calls(self, record: Record, authored: AuthoredWork) -> None:
        offered = tool_names(record.tools)
        made = 0
        for tool in authored.counts.tools:
            made += tool["count"]
            if (name := tool["tool"]) in offered:  # there can be any number of invented names
                self._tool_calls[name] += tool["success"] + tool["failure"]
                self._tool_failures[name] += tool["failure"]
        if made:
            is_found = made >= _REPEATS and _longest_run(authored.messages) >= _REPEATS
            self._count("repeated_calls", record.id, is_found)

    def _add_ending(self, prompt: str, ending: str, count: int) -> None:
        before, times = self._endings.get(prompt, (ending, 0))
        self._endings[prompt] = (ending if ending == before else _VARIED, times + count)

    def _add_reward(self, record: Record, reward: float) -> None:
        self._rewards[_ALL].setdefault(None, _Rewards()).add(reward)
        for column, value in record.row.items():
            is_small = isinstance(value, int) or (
                isinstance(value, str) and len(value) <= _MAX_CHARS
            )
            if is_small and len(self._rewards[column]) <= _MAX_VALUES:
                self._rewards[column].setdefault(value, _Rewards()).add(reward)

    def _conclude(self) -> None:
        """Count the checks that need all records."""
        for name in ("failing_tools", "failing_prompts", "instant_passes", "constant_rewards"):
            for counts in (self._found, self._looked_at, self._examples):
                counts.pop(name, None)
        for tool, calls in self._tool_calls.items():
            if calls >= _TOOL_CALLS:
                self._count("failing_tools", tool, self._tool_failures[tool] == calls)
        for prompt, (ending, times) in self._endings.items():
            if times >= _PROMPT_FAILURES:
                self._count("failing_prompts", prompt, ending != _VARIED)
        misses = self.caches.misses()
        self._looked_at["cache_misses"], self._found["cache_misses"] = misses.later, misses.missed
        self._examples["cache_misses"] = [*misses.examples]
        usual = _median(self._check_s)
        if usual >= _USUAL_CHECK_S:
            for seconds, id in sorted(zip(self._pass_s, self._passed_ids, strict=True)):
                self._count("instant_passes", id, seconds <= usual / 10)
        whole = self._rewards[_ALL].get(None, _Rewards())
        for column, values in self._rewards.items():
            if len(values) <= _MAX_VALUES:
                for value, rewards in values.items():
                    if rewards.count >= _MIN_RECORDS_PER_VALUE:
                        name = column if value is None else f"{column}={value}"
                        shown = f"{name}: {rewards.first:g} in {rewards.count:,}"
                        self._count("constant_rewards", shown, _is_suspect(rewards, whole))


def _describe_failure(error_class: str) -> str:
    return f"failed: {error_class}"


def problems_in(results: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The problems among the results of `Health.to_json`."""
    return [result for result in results if result["is_problem"]]


def health_as_text(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Format the problems as lines; without any, one line says so."""
    problems = problems_in(results)
    if not problems:
        looked_at = sum(result["of"] >= HEALTH_CHECKS[result["name"]].least for result in results)
        yield f"health: no problem found by {looked_at} checks"
    for result in problems:
        examples = "; ".join(result["examples"])
        yield (
            f"health: {result['name']}: {result['found']:,} of {result['of']:,} "
            f"{result['problem']} ({examples})"
        )


def _longest_run(messages: Iterable[StoredMessage]) -> int:
    """The length of the longest run of equal calls."""
    calls = [
        (call.function.name, call.function.arguments)
        for message in messages
        if message.role == "assistant"
        for call in message.tool_calls
    ]
    longest = run = 1
    for before, call in pairwise(calls):
        run = run + 1 if call == before else 1
        longest = max(longest, run)
    return longest


def _is_suspect(rewards: _Rewards, whole: _Rewards) -> bool:
    """Whether all rewards are the same, although this would rarely happen by chance."""
    if not rewards.is_constant:
        return False
    if rewards.count == whole.count:
        return True
    rest = whole.count - rewards.count
    mean = (whole.total - rewards.total) / rest
    # Taking rewards from 0 to 1 as a mix of zeros and ones: the share of this one among others.
    chance = mean if rewards.first >= 1 else 1 - mean
    return min(max(chance, 0.0), 1.0) ** rewards.count < _CHANCE


def _median(numbers: Sequence[float]) -> float:
    return sorted(numbers)[len(numbers) // 2] if numbers else 0.0
