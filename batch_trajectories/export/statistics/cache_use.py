"""Computes how much input of models came from prompt caches, and which turns missed the caches.

Everything is computed from the token counts of turns. A count that an endpoint does not report is
unknown, not zero. But vLLM and SGLang leave out a count of zero: if an endpoint has reported cached
tokens and never a zero, a missing count is taken as zero.

A request repeats the request before it in the conversation, so a cache can serve these tokens
again. A turn misses the cache if more than a tenth of these tokens were not cached, and more than
the block size of caches explains. Nothing is expected of the first turn of a conversation, after a
summary or another new beginning, after a resume or a pause that outlives caches, of prompts too
short for caches, and of endpoints without a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from agent.models.model import Price
from agent.models.scripted import API as SCRIPTED
from batch_trajectories.export.statistics.counts import KeyCounts
from batch_trajectories.records.record_types import (
    Record,
    StoredConversation,
    StoredMessage,
    StoredRewrite,
    StoredTurn,
)

PriceOf = Callable[[str], Price | None]
"""A function that gives the price of a model by its name in the config; None if unknown."""

_MIN_TOKENS = 1024
"""Anthropic and OpenAI cache no prompt with fewer tokens than this."""
_MIN_TOKENS_BY_MODEL = {"gemini": 4096}
"""Larger minimums, by part of the model's name."""
_LIFETIME_S = 300.0
"""Anthropic and OpenAI may drop cached prompts that were not used for this time."""
_GROUPS_OF_TURNS = 8
"""Number of groups: turn 1, turn 2, turns 3 to 4, 5 to 8, and so on."""
_GROUP_OF = [0, *(min((n - 1).bit_length(), _GROUPS_OF_TURNS - 1) for n in range(1, 129))]
"""The group of a turn, by the turn's number."""
_MAX_EXAMPLES = 3
_TOLERATED = 0.1
_BLOCK_TOKENS = 256
"""Maximum block size of caches. They keep whole blocks, so the end of a prompt may be missing."""
_RARE = 0.02
_MILLION = 1_000_000

TOOLS, SYSTEM, REASONING, REPLICAS, PREFIX = "tools", "system", "reasoning", "replicas", "prefix"

CAUSES: Mapping[str, str] = {
    TOOLS: "the agent changes its list of tools from request to request",
    SYSTEM: "the agent changes its system prompt from request to request (a date, a counter)",
    REASONING: "reasoning of earlier turns is dropped, by the agent or by the chat template",
    REPLICAS: (
        "other turns found theirs, so there are several replicas and no id of the conversation "
        "that leads to the same one (docs/fleets.md), or their caches are too small"
    ),
    PREFIX: (
        "no turn found what the one before had, so something near the beginning differs in each "
        "request (a date in the system prompt, the order of tools), or prompts are not kept"
    ),
}
"""Explanations of the likely causes of misses."""


class TurnUse(NamedTuple):
    """The use of a cache by one turn."""

    part: StoredConversation
    turn: StoredTurn
    input: int
    read: int | None
    """Tokens from a cache; None if the endpoint did not say."""
    written: int
    repeated: int
    """Tokens that the request before had, if a cache could still have them; else 0."""
    expected: int
    """The part of `repeated` that must have been in the cache."""
    before: StoredTurn | None
    """The turn of the request before; None if there is none."""

    @property
    def is_missed(self) -> bool:
        """Whether too many of the expected tokens did not come from the cache."""
        lacking = self.expected - (self.read or 0)
        return lacking > _BLOCK_TOKENS and lacking > _TOLERATED * self.expected


class _Sums:
    """Sums over turns."""

    __slots__ = (
        "causes",
        "examples",
        "found",
        "grown",
        "input",
        "input_by_turn",
        "later",
        "lost",
        "lost_written",
        "missed",
        "read",
        "read_by_turn",
        "repeated",
        "turns",
        "written",
    )

    def __init__(self) -> None:
        self.turns = self.input = self.read = self.written = 0
        self.repeated = self.found = 0
        """Tokens that requests repeated, and the number of these that came from a cache."""
        self.later = self.missed = 0
        """Turns that should have found something in a cache, and the turns of these that missed
        it."""
        self.lost = self.lost_written = 0
        """Tokens that were missed, and the number of these that were paid for as written again."""
        self.causes: KeyCounts[str] = KeyCounts()
        """Missed tokens by the cause that records tell; "" if they tell none."""
        self.examples: list[str] = []
        self.grown = 0
        """Turns that found more than the common beginning of all requests of their conversation."""
        self.input_by_turn = [0] * _GROUPS_OF_TURNS
        self.read_by_turn = [0] * _GROUPS_OF_TURNS

    def add(self, record: Record, uses: Sequence[TurnUse], least: int) -> None:
        """Count turns of a conversation, each of which found at least `least` tokens."""
        # Local names are faster than attributes, and records have many turns.
        given = found = repeated = found_again = later = grown = 0
        more = least + max(_BLOCK_TOKENS, _TOLERATED * least)
        input_by_turn, read_by_turn = self.input_by_turn, self.read_by_turn
        for use in uses:
            number, read, same = use.turn.turn, use.read or 0, use.repeated
            given += use.input
            found += read
            group = _GROUP_OF[number] if number < len(_GROUP_OF) else _GROUPS_OF_TURNS - 1
            input_by_turn[group] += use.input
            read_by_turn[group] += read
            if same:
                repeated += same
                found_again += read if read < same else same
                if expected := use.expected:
                    later += 1
                    grown += read > more
                    if expected - read > _BLOCK_TOKENS and use.is_missed:
                        self._add_miss(record, use)
        self.turns += len(uses)
        self.input += given
        self.read += found
        self.written += sum([use.written for use in uses])
        self.repeated += repeated
        self.found += found_again
        self.later += later
        self.grown += grown

    def _add_miss(self, record: Record, use: TurnUse) -> None:
        lost = use.expected - (use.read or 0)
        self.missed += 1
        self.lost += lost
        self.lost_written += min(lost, use.written)
        self.causes[_find_cause(record, use)] += lost
        if len(self.examples) < _MAX_EXAMPLES and record.id not in self.examples:
            self.examples.append(record.id)

    def merge(self, other: _Sums) -> None:
        for name in self.__slots__:
            ours, theirs = getattr(self, name), getattr(other, name)
            if isinstance(ours, int):
                setattr(self, name, ours + theirs)
        self.causes.merge(other.causes)
        self.examples = [*dict.fromkeys([*self.examples, *other.examples])][:_MAX_EXAMPLES]
        for mine, their in (
            (self.input_by_turn, other.input_by_turn),
            (self.read_by_turn, other.read_by_turn),
        ):
            mine[:] = [a + b for a, b in zip(mine, their, strict=True)]

    @property
    def has_cache(self) -> bool:
        """Whether any turn has read from a cache or written to one."""
        return bool(self.read or self.written)

    @property
    def cause(self) -> str | None:
        """The likely cause of most missed tokens; None without misses."""
        if not self.lost:
            return None
        # If a prefix changes, all turns of a conversation find the text before the change.
        usual = REPLICAS if self.grown > _RARE * self.later else PREFIX
        tokens_by_cause: KeyCounts[str] = KeyCounts()
        for name, tokens in self.causes.items():
            tokens_by_cause[name or usual] += tokens
        return max(tokens_by_cause, key=lambda name: tokens_by_cause[name])


class _EndpointUse:
    """Counts the turns at one endpoint, with and without counts of cached tokens."""

    def __init__(self) -> None:
        self._reported, self._unreported = _Sums(), _Sums()
        self._zeros = 0
        self.unknown = 0
        """Number of turns without any count of tokens."""

    def add(self, record: Record, uses: Sequence[TurnUse]) -> None:
        """Count the turns of a conversation."""
        least = min([use.read or 0 for use in uses if use.expected], default=0)
        reported = [use for use in uses if use.read is not None]
        self._reported.add(record, reported, least)
        self._zeros += sum([use.read == 0 for use in reported])
        if len(reported) < len(uses):
            self._unreported.add(record, [use for use in uses if use.read is None], least)

    def merge(self, other: _EndpointUse) -> None:
        self._reported.merge(other._reported)
        self._unreported.merge(other._unreported)
        self._zeros += other._zeros
        self.unknown += other.unknown

    def sums(self) -> tuple[_Sums, int]:
        """The sums over turns with known cached tokens, and the number of the other turns."""
        whole = _Sums()
        whole.merge(self._reported)
        if self._reported.read and not self._zeros:
            whole.merge(self._unreported)
            return whole, self.unknown
        return whole, self.unknown + self._unreported.turns


class Misses(NamedTuple):
    """The misses of caches at all endpoints."""

    missed: int
    later: int
    """Number of turns that should have found something in a cache."""
    lost: int
    """Number of tokens that were computed again."""
    usd: float | None
    """Additional cost of these tokens compared with cached ones; None if unknown."""
    cause: str | None
    examples: Sequence[str]
    """Ids of records with misses."""

    @property
    def explanation(self) -> str:
        """A sentence on the cost and the likely cause; "" without misses."""
        if self.cause is None:
            return ""
        dollars = "" if self.usd is None else f", for about ${self.usd:.4g} more"
        return f"{self.lost:,} tokens were computed again{dollars}; likely {CAUSES[self.cause]}"


class CacheUse:
    """The use of caches in the records added so far."""

    def __init__(self) -> None:
        self._at: dict[tuple[str | None, str | None], _EndpointUse] = {}

    def add(self, record: Record) -> None:
        """Count a record, with the conversations inside it."""
        if record.api == SCRIPTED:
            return
        models = {turn.model for turn in record.turns}
        for part in walk_conversations(record):
            if not (turns := part.own_turns):
                continue
            if part is record or all(turn.model in models for turn in turns):
                counted = self._get_use(record.endpoint, record.model)
            else:  # a subagent or a simulated user with a model of its own
                counted = self._get_use(None, turns[0].model)
            counted.add(record, _turn_uses(record, part))
            counted.unknown += sum([_input_tokens(turn) is None for turn in turns])

    def merge(self, other: CacheUse) -> None:
        """Add the records of `other`, which come later."""
        for (endpoint, model), counted in other._at.items():
            self._get_use(endpoint, model).merge(counted)

    def misses(self, price_of: PriceOf | None = None) -> Misses:
        """The misses at all endpoints with a cache."""
        found = []
        for (_, model), counted in self._at.items():
            sums, _ = counted.sums()
            if sums.has_cache and sums.later:
                found.append((sums, _lost_usd(sums, model, price_of)))
        dollars = [usd for sums, usd in found if sums.lost]
        known = [usd for usd in dollars if usd is not None]
        worst = max((sums for sums, _ in found), key=lambda sums: sums.lost, default=None)
        return Misses(
            missed=sum(sums.missed for sums, _ in found),
            later=sum(sums.later for sums, _ in found),
            lost=sum(sums.lost for sums, _ in found),
            usd=sum(known) if known and len(known) == len(dollars) else None,
            cause=None if worst is None else worst.cause,
            examples=[*dict.fromkeys(id for sums, _ in found for id in sums.examples)][
                :_MAX_EXAMPLES
            ],
        )

    def to_json(self, price_of: PriceOf | None = None) -> dict[str, Any]:
        """The value of `caches` in `stats --json`. Shares are percentages, null if unknown.

        - `turns`, `input_tokens`, ...: see `_shares`
        - `unknown_turns`: turns whose cached tokens are unknown
        - `by_turn`: for groups of turns `from`, `to`, `input_tokens`, `cached_tokens`, `share`
        - `endpoints`: for each `endpoint` and `model` (null if unknown) the first two, and
          `later_turns` (turns that should have found something), `missed_turns`, `lost_tokens`,
          `lost_usd` and `cause`
        """
        whole, unknown = _Sums(), 0
        endpoints = []
        for (endpoint, model), counted in self._at.items():
            sums, missing = counted.sums()
            whole.merge(sums)
            unknown += missing
            endpoints.append(
                {
                    "endpoint": endpoint,
                    "model": model,
                    "unknown_turns": missing,
                    **_shares(sums),
                    **_misses_to_json(sums, model, price_of),
                }
            )
        by_turn = zip(whole.input_by_turn, whole.read_by_turn, strict=True)
        return {
            "unknown_turns": unknown,
            **_shares(whole),
            "by_turn": [
                {
                    "from": 1 if group < 1 else 2 ** (group - 1) + 1,
                    "to": None if group == _GROUPS_OF_TURNS - 1 else 2**group,
                    "input_tokens": given,
                    "cached_tokens": read,
                    "share": _percent(read, given),
                }
                for group, (given, read) in enumerate(by_turn)
                if given
            ],
            "endpoints": sorted(endpoints, key=lambda one: -one["input_tokens"]),
        }

    def _get_use(self, endpoint: str | None, model: str | None) -> _EndpointUse:
        return self._at.setdefault((endpoint, model), _EndpointUse())


def walk_conversations(part: StoredConversation) -> Iterator[StoredConversation]:
    """A conversation and those inside it, at any depth."""
    yield part
    for inner in part.inner:
        yield from walk_conversations(inner)


def missed_turns(record: Record) -> list[int]:
    """The numbers of turns that missed a cache, as far as this record alone can tell."""
    if record.api == SCRIPTED:
        return []
    usages = [turn.usage for turn in record.own_turns if turn.usage is not None]
    if not any(usage.cache_read_tokens or usage.cache_write_tokens for usage in usages):
        return []
    uses = _turn_uses(record, record)
    is_silence_zero = 0 not in [use.read for use in uses]
    return [
        use.turn.turn for use in uses if use.is_missed and (use.read is not None or is_silence_zero)
    ]


def count_cached_tokens(record: Record) -> int | None:
    """The number of input tokens of a record that came from a cache; None if unknown."""
    read = (record.usage or {}).get("cache_read_tokens")
    if read is not None or record.api == SCRIPTED:
        return read
    usages = [turn.usage for part in walk_conversations(record) for turn in part.own_turns]
    known = [usage.cache_read_tokens for usage in usages if usage is not None]
    counts = [count for count in known if count is not None]
    is_silence_zero = len(known) == len(usages) and bool(counts) and all(counts)
    return sum(counts) if is_silence_zero else None


def compute_cached_share(record: Record) -> float | None:
    """The share of a record's input tokens that came from a cache, 0 to 1; None if unknown."""
    given, read = (record.usage or {}).get("input_tokens"), count_cached_tokens(record)
    return min(1.0, read / given) if given and read is not None else None


def as_text(caches: Mapping[str, Any]) -> Iterator[str]:
    """Describe the value of `CacheUse.to_json`, in lines."""
    if not caches["endpoints"]:
        return
    if not caches["input_tokens"]:
        yield f"prompt caches: unknown for {caches['unknown_turns']:,} turns, nothing reports them"
        return
    yield f"prompt caches: {_describe(caches)}"
    several = len(caches["endpoints"]) > 1
    for one in caches["endpoints"] if several else ():
        yield f"  {one['model'] or 'model unknown'} at {one['endpoint'] or '?'}: {_describe(one)}"
    groups = [
        f"{_turns(one)} {one['share']:.1f}%" for one in caches["by_turn"] if one["input_tokens"]
    ]
    if len(groups) > 1:
        yield f"  by turn: {', '.join(groups)}"


def _describe(counts: Mapping[str, Any]) -> str:
    if counts["share"] is None:
        return f"unknown for {counts['unknown_turns']:,} turns"
    parts = [f"{counts['share']:.1f}% of {counts['input_tokens']:,} input tokens"]
    if counts["repeated_share"] is not None:
        parts.append(
            f"{counts['repeated_share']:.1f}% of the {counts['repeated_tokens']:,} that the "
            "request before already had"
        )
    if unknown := counts["unknown_turns"]:
        parts.append(f"unknown for {unknown:,} turns")
    return ", ".join(parts)


def _turns(group: Mapping[str, Any]) -> str:
    first, last = group["from"], group["to"]
    return f"{first}+" if last is None else f"{first}" if first == last else f"{first}-{last}"


def _shares(sums: _Sums) -> dict[str, Any]:
    """`turns`, `input_tokens`, `cached_tokens`, `share`, `repeated_tokens`, `repeated_share`."""
    return {
        "turns": sums.turns,
        "input_tokens": sums.input,
        "cached_tokens": sums.read,
        "share": _percent(sums.read, sums.input),
        "repeated_tokens": sums.repeated,
        "repeated_share": _percent(sums.found, sums.repeated),
    }


def _misses_to_json(sums: _Sums, model: str | None, price_of: PriceOf | None) -> dict[str, Any]:
    is_counted = sums.has_cache
    return {
        "later_turns": sums.later if is_counted else 0,
        "missed_turns": sums.missed if is_counted else 0,
        "lost_tokens": sums.lost if is_counted else 0,
        "lost_usd": _lost_usd(sums, model, price_of) if is_counted else None,
        "cause": sums.cause if is_counted else None,
    }


def _lost_usd(sums: _Sums, model: str | None, price_of: PriceOf | None) -> float | None:
    """Additional cost of the lost tokens compared with cached ones; None if unknown."""
    if not sums.lost or price_of is None or model is None:
        return None
    if (price := price_of(model)) is None:
        return None
    fresh = (sums.lost - sums.lost_written) * (price.input - price.cache_read)
    again = sums.lost_written * (price.cache_write - price.cache_read)
    return max(0.0, fresh + again) / _MILLION


def _turn_uses(record: Record, part: StoredConversation) -> list[TurnUse]:
    """The use of caches by each turn whose input tokens are known."""
    if record.api == SCRIPTED:
        return []
    # Times in imported sessions cannot be relied on. Shortened views change earlier messages on
    # purpose.
    is_shortened = part is record and record.view_compacted and _has_option(record, "compact_after")
    expects = record.imported is None and not is_shortened
    least = _least_tokens(record.model)
    rewrites = {number: one for one in record.rewritten or () for number in one.exchanges}
    resumed = {resume.turn for resume in part.resumes}
    uses = []
    before: StoredTurn | None = None
    following, latest = 0, 0.0  # the turn after the one before; until when a cache keeps that
    for turn in part.own_turns:
        usage = turn.usage
        if usage is None or (given := usage.input_tokens) is None:
            continue
        number, began = turn.turn, turn.started_at + (turn.waited_s or 0.0)
        repeated = expected = 0
        if (
            before is not None
            and expects
            and number == following
            and began <= latest
            and turn.batch_item is None
            and before.turn not in resumed
            and not _breaks_prefix(part, before, turn, rewrites)
        ):
            repeated, expected = _repeated_tokens(record, before, given)
            if repeated < least:
                repeated = expected = 0
        read, written = usage.cache_read_tokens, usage.cache_write_tokens or 0
        uses.append(
            TurnUse(
                part=part,
                turn=turn,
                input=given,
                read=read,
                written=written,
                repeated=repeated,
                expected=expected,
                before=before,
            )
        )
        before, following, latest = turn, number + 1, began + _LIFETIME_S
    return uses


def _repeated_tokens(record: Record, before: StoredTurn, given: int) -> tuple[int, int]:
    """The tokens of a request that the request before had, and those of these that must be cached.

    The reply is left out: not all servers cache it, and not all of it is sent again.
    """
    usage = before.usage
    if usage is None or usage.input_tokens is None:
        return 0, 0
    repeated = min(given, usage.input_tokens)
    kept = (usage.cache_read_tokens or 0) + (usage.cache_write_tokens or 0)
    if usage.cache_write_tokens or record.api == "anthropic_messages":
        return repeated, min(repeated, kept)  # only what was marked is kept
    return repeated, repeated


def _breaks_prefix(
    part: StoredConversation,
    before: StoredTurn,
    turn: StoredTurn,
    rewrites: Mapping[int, StoredRewrite],
) -> bool:
    """Whether a request is meant not to repeat the request before it."""
    if turn.exchange is None:
        if turn.request is not before.request and _summary(turn) != _summary(before):
            return True
    else:
        was, now = rewrites.get(before.exchange or 0), rewrites.get(turn.exchange)
        if was is not now and not (_is_of_system(part, was) and _is_of_system(part, now)):
            return True
        if turn.request is not None:
            for patch in turn.request.shown:
                is_system = part.messages[patch.at].role == "system"
                if not is_system and (patch.content is not None or patch.tool_calls is not None):
                    return True  # the agent has shortened what it repeats
    return (_input_tokens(turn) or 0) < (_input_tokens(before) or 0) and not _has_reasoning(part)


def _summary(turn: StoredTurn) -> str | None:
    return None if turn.request is None else turn.request.summary


def _is_of_system(part: StoredConversation, rewrite: StoredRewrite | None) -> bool:
    """Whether a request had the recorded messages, except for the system prompt."""
    if rewrite is None:
        return True
    replaced = part.messages[rewrite.start : rewrite.end]
    return all(message.role == "system" for message in (*replaced, *rewrite.messages))


def _find_cause(record: Record, use: TurnUse) -> str:
    """The cause of a miss as far as the record tells it; "" if it does not."""
    turn, before, part = use.turn, use.before, use.part
    assert before is not None
    if turn.exchange is not None:
        for one in record.rewritten or ():
            if (turn.exchange in one.exchanges) != (before.exchange in one.exchanges):
                return SYSTEM
        now, was = turn.request, before.request
        if now is not None:
            if now.tools != (None if was is None else was.tools):
                return TOOLS
            for patch in now.shown:
                return SYSTEM if part.messages[patch.at].role == "system" else REASONING
    given, had = use.input, _input_tokens(before) or 0
    if _has_reasoning(part) and (given < had or _follows_user(part, turn)):
        return REASONING
    return ""


def _follows_user(part: StoredConversation, turn: StoredTurn) -> bool:
    """Whether a turn answers a user message: templates drop the reasoning before such a message."""
    messages = part.messages
    replies = [n for n, message in enumerate(messages) if message.role == "assistant"]
    reply = replies[turn.turn - 1 - len(part.turns)] if len(replies) >= len(part.turns) else 0
    return reply > 0 and messages[reply - 1].role == "user"


def _has_reasoning(part: StoredConversation) -> bool:
    return any(_reasons(message) for message in part.messages)


def _reasons(message: StoredMessage) -> bool:
    return message.role == "assistant" and bool(message.reasoning)


def _has_option(record: Record, name: str) -> bool:
    return bool((record.options or {}).get(name))


def _least_tokens(model: str | None) -> int:
    name = (model or "").lower()
    return next(
        (least for part, least in _MIN_TOKENS_BY_MODEL.items() if part in name), _MIN_TOKENS
    )


def _input_tokens(turn: StoredTurn) -> int | None:
    return None if turn.usage is None else turn.usage.input_tokens


def _percent(part: int, whole: int) -> float | None:
    return round(100 * part / whole, 2) if whole else None
