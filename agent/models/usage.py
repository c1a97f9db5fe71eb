"""Reads the tokens and dollars that replies report, in the spellings of all servers.

Servers of one API spell counts in the manner of another, and proxies give several spellings side
by side. Equal kinds mean the same tokens, so only the largest count is taken. Counts that are read
here under other names than the API's own also stay in `Completion.extra`, unchanged.

Sources: OpenAI's and Anthropic's references; DeepSeek (`prompt_cache_hit_tokens`), Moonshot
(`cached_tokens`, usage in a choice), Groq (`x_groq`), LiteLLM's `Usage`, DashScope's context cache
(`cache_creation_input_tokens`), docs.x.ai/developers/cost-tracking, OpenRouter's usage accounting,
DeepInfra (`estimated_cost`) and Perplexity (an object as `cost`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agent.messages.message import MAX_TOKEN_COUNT, Usage
from agent.models.parsing import get_object
from batch_trajectories.basics.exact_json import objects_among

_KINDS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "cached_tokens",
            "prompt_cache_hit_tokens",
            "cache_read_input_tokens",
            "cache_read_tokens",
            "cacheReadInputTokens",
        ),
        "read",
    ),
    **dict.fromkeys(
        (
            "cache_write_tokens",
            "cache_write_input_tokens",
            "cache_creation_tokens",
            "cache_creation_input_tokens",
            "cacheWriteInputTokens",
            # Objects with a count for each lifetime: Anthropic's name, and LiteLLM's.
            "cache_creation",
            "cache_creation_token_details",
        ),
        "written",
    ),
    **dict.fromkeys(("reasoning_tokens", "thinking_tokens"), "reasoning"),
}
"""The kinds of counts by their names, beside the plain counts or in their details."""

_PLACES: Mapping[str, str] = {
    **_KINDS,
    "prompt_tokens": "prompt",
    "input_tokens": "fresh",
    "completion_tokens": "made",
    "output_tokens": "made",
    "total_tokens": "total",
    # Bedrock's Converse, and gateways that pass its counts or those of JavaScript clients on.
    "inputTokens": "fresh",
    "promptTokens": "prompt",
    "outputTokens": "made",
    "completionTokens": "made",
    "totalTokens": "total",
    **dict.fromkeys(
        (
            "prompt_tokens_details",
            "input_tokens_details",
            "completion_tokens_details",
            "output_tokens_details",
        ),
        "details",
    ),
}
"""The kinds of all fields that a usage object may hold."""

_BY_LIFETIME = ("cache_creation", "cache_creation_token_details")
_INPUT_DETAILS = ("prompt_tokens_details", "input_tokens_details")
_HOUR_WRITES = "ephemeral_1h_input_tokens"
_FRESH = frozenset({"cache_read_input_tokens", "cache_creation_input_tokens"})
"""Anthropic's own names: beside them, `input_tokens` excludes cache reads and writes."""

_PLAIN = frozenset(
    {"prompt_tokens", "completion_tokens", "total_tokens", "input_tokens", "output_tokens"}
)
_BILLED_APART = frozenset({"compaction", "advisor_message"})
"""Kinds of Anthropic's `iterations` that the other counts of its usage leave out."""

_COSTS = frozenset({"cost", "total_cost", "estimated_cost", "cost_in_usd_ticks"})
_TICKS_PER_DOLLAR = 10**10


NOTHING_USED = Usage(
    input_tokens=0,
    output_tokens=0,
    cache_read_tokens=0,
    cache_write_tokens=0,
    reasoning_tokens=0,
)
"""The usage of a reply for which no model was called."""


def count_or_none(value: Any) -> int | None:
    """Read a count of tokens; None for a value that cannot be one. 12.0 is read as 12."""
    # Counts in records of earlier versions are also read by this function.
    if type(value) is float and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value < MAX_TOKEN_COUNT else None


def find_usage(reply: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The object with the counts in the body of a reply; None if there is none."""
    # Moonshot puts it into the choice, and Groq's streams into `x_groq`.
    usage = reply.get("usage")
    if usage and isinstance(usage, dict):
        return usage
    in_choices = [
        one
        for choice in objects_among(reply.get("choices"))
        if (one := get_object(choice, "usage"))
    ]
    elsewhere = _sum_choices(in_choices) or get_object(get_object(reply, "x_groq"), "usage")
    return elsewhere or (usage if isinstance(usage, dict) else None)


def _sum_choices(usages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The sum of the usages of a reply's choices, which have the prompt in common."""
    if len(usages) < 2:
        return usages[0] if usages else {}
    whole = {key: value for one in usages for key, value in one.items() if value}
    whole.pop("total_tokens", None)  # the total of one choice is less than the sum
    for key in ("completion_tokens", "output_tokens"):
        if counts := _counts(one.get(key) for one in usages):
            whole[key] = sum(counts)
    return whole


def read_usage(raw: Mapping[str, Any] | None, *, is_fresh: bool = False) -> Usage | None:
    """The token counts in a usage object of the OpenAI or Anthropic APIs; None without one.

    `is_fresh`: `input_tokens` excludes cache reads and writes, as in Anthropic's API.
    """
    if raw is None:
        return None
    found: dict[str, int] = {}
    _find(raw, _PLACES, found)
    prompt, fresh, total = found.get("prompt"), found.get("fresh"), found.get("total")
    made, read, written = found.get("made"), found.get("read"), found.get("written")
    reasoning = found.get("reasoning")
    cached = (read or 0) + (written or 0)
    if fresh is not None and cached:
        is_anthropic = prompt is None and total is None and not raw.keys().isdisjoint(_FRESH)
        fresh += cached if is_fresh or is_anthropic else 0
    given = prompt if fresh is None or (prompt or 0) > fresh else fresh
    given, made = _add_uncounted(given, made, total, cached=cached, reasoning=reasoning or 0)
    if "iterations" in raw:
        given, made, read, written = _add_iterations(raw, given, made, read, written)
    given, made = drop_impossible(given, made, cached)
    return Usage(
        input_tokens=given,
        output_tokens=made,
        cache_read_tokens=read,
        cache_write_tokens=written,
        reasoning_tokens=reasoning,
    )


def drop_impossible(
    given: int | None, made: int | None, cached: int | None
) -> tuple[int | None, int | None]:
    """Input and output, None for an input of 0, and for an output of 0 beside it.

    Each call has input, so a server that says 0 does not count. 0 would cost nothing. Tokens that
    were `cached` are input, too.
    """
    given = given if given != 0 else cached or None
    return given, made if given or made else None


def read_total(
    given: int | None, made: int | None, total: int | None
) -> tuple[int | None, int | None]:
    """Input and output; tokens that `total` counts beyond both are added to the output."""
    return _add_uncounted(given, made, total, cached=0, reasoning=0)


def add_plain_counts(
    raw: Mapping[str, Any] | None, usage: Usage | None, uncounted: dict[str, Any]
) -> dict[str, Any]:
    """Add the plain counts of `raw` to `uncounted`, unchanged, if `usage` differs from them."""
    if usage is None or raw is None:
        return uncounted
    made, total = usage["output_tokens"], count_or_none(raw.get("total_tokens"))
    is_said = made in (raw.get("completion_tokens"), raw.get("output_tokens"))
    if is_said and (not total or total == (usage["input_tokens"] or 0) + (made or 0)):
        return uncounted
    return {**uncounted, **{key: raw[key] for key in raw.keys() & _PLAIN if raw[key]}}


def hour_writes_in(reply: Mapping[str, Any], usage: Usage | None) -> int:
    """The tokens that a reply's request wrote into a cache of an hour."""
    if usage is None or not usage["cache_write_tokens"]:
        return 0
    raw = find_usage(reply) or {}
    return sum(_largest_count(_hour_writes(one)) or 0 for one in (raw, *_find_separate_bills(raw)))


def reported_cost(reply: Mapping[str, Any]) -> float | None:
    """The dollars that a reply reports as its cost; None if it reports none that is possible."""
    raw = find_usage(reply)
    if raw is None or raw.keys().isdisjoint(_COSTS):
        return None
    costs = [_dollars(raw.get(name)) for name in ("total_cost", "estimated_cost")]
    ticks = _dollars(raw.get("cost_in_usd_ticks"))
    costs.append(None if ticks is None else ticks / _TICKS_PER_DOLLAR)
    cost = raw.get("cost")
    if isinstance(cost, dict):
        cost = cost.get("total_cost") if cost.get("currency", "USD") == "USD" else None
    cost = _dollars(cost)
    if raw.get("is_byok") is True:
        # OpenRouter with the user's own provider key: `cost` is only the fee of OpenRouter.
        upstream = _dollars(get_object(raw, "cost_details").get("upstream_inference_cost"))
        cost = None if cost is None or upstream is None else cost + upstream
    known = [one for one in (*costs, cost) if one is not None]
    return max(known, default=None)


def _find(raw: Mapping[str, Any], kinds: Mapping[str, str], found: dict[str, int]) -> None:
    """Put the largest count of each kind into `found`, in one pass, as it runs for every reply."""
    for name, value in raw.items():
        kind = kinds.get(name)
        if kind is None or value is None:
            continue
        if kind == "details":
            if isinstance(value, dict):
                _find(value, _KINDS, found)
            continue
        count = sum(_counts(value.values())) if isinstance(value, dict) else count_or_none(value)
        if count is not None and count > found.get(kind, -1):
            found[kind] = count


def _add_uncounted(
    given: int | None, made: int | None, total: int | None, *, cached: int, reasoning: int
) -> tuple[int | None, int | None]:
    """Input and output, with tokens that were counted apart from both.

    xAI and Gemini's OpenAI endpoint do not count reasoning as output, so only the total shows it.
    Some proxies do not count cached tokens as input.
    """
    if total is not None:
        if given is None and made is not None:
            given = max(0, total - made)
        elif given is not None and made is None:
            made = max(0, total - given)
        beside = total - (given or 0) - (made or 0)
        if cached and beside in (cached, cached + reasoning):
            given = (given or 0) + cached
            beside -= cached
        if made is not None and beside > 0:
            made += beside
    if made is not None and reasoning > made:
        made += reasoning
    return given, made


def _add_iterations(
    raw: Mapping[str, Any],
    given: int | None,
    made: int | None,
    read: int | None,
    written: int | None,
) -> tuple[int | None, int | None, int | None, int | None]:
    """Input, output, cache reads and writes, with the iterations that Anthropic bills apart."""
    for one in (read_usage(part, is_fresh=True) for part in _find_separate_bills(raw)):
        if one is not None:
            given = (given or 0) + (one["input_tokens"] or 0)
            made = (made or 0) + (one["output_tokens"] or 0)
            read = _sum(read, one["cache_read_tokens"])
            written = _sum(written, one["cache_write_tokens"])
    return given, made, read, written


def _find_separate_bills(raw: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    iterations = raw.get("iterations")
    return [
        {key: value for key, value in one.items() if key != "iterations"}
        for one in (iterations if isinstance(iterations, list) else ())
        if isinstance(one, dict) and one.get("type") in _BILLED_APART
    ]


def _sum(one: int | None, other: int | None) -> int | None:
    return one if other is None else (one or 0) + other


def _lifetime_counts(places: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [get_object(place, name) for place in places for name in _BY_LIFETIME if name in place]


def _hour_writes(raw: Mapping[str, Any]) -> list[Any]:
    """The counts of cache writes for an hour, from all places where they can stand."""
    places = (raw, *(get_object(raw, details) for details in _INPUT_DETAILS))
    return [one.get(_HOUR_WRITES) for one in _lifetime_counts(places)]


def _counts(values: Iterable[Any]) -> list[int]:
    return [count for value in values if (count := count_or_none(value)) is not None]


def _largest_count(values: Iterable[Any]) -> int | None:
    return max(_counts(values), default=None)


def _dollars(value: Any) -> float | None:
    """Read an amount of dollars; None for a value that cannot be one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        amount = float(value)
    except OverflowError:
        return None
    return amount if math.isfinite(amount) and amount >= 0 else None
