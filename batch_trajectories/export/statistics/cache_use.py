"""How much of the input of model calls came from prompt caches, and where caches were missed.

All is computed from the token counts of turns. A count that an endpoint does not report is unknown,
never zero. vLLM and SGLang leave it out where it is zero: of an endpoint that has reported cached
tokens and never a zero, a missing count is one.

A request repeats the one before it in its conversation, so a cache that served that one can serve
as many tokens again. A turn misses if it lacks more than a tenth of them, and more than blocks of a
cache explain. Nothing is expected of the first turn of a conversation, after a summary or another
new beginning, after a resume or a pause that outlives caches, of prompts too short to be kept, and
of endpoints that have no cache.
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
"""The price of a model by its name as the user wrote it; None if it is unknown."""

_MIN_TOKENS = 1024
"""Prompts with fewer tokens are kept by no cache of Anthropic or OpenAI."""
_MIN_TOKENS_BY_MODEL = {"gemini": 4096}
"""Larger minimums, by a part of the model's name."""
_LIFETIME_S = 300.0
"""Anthropic and OpenAI may drop what was not used for so long."""
_GROUPS_OF_TURNS = 8
"""Turn 1, 2, 3 to 4, 5 to 8, and so on."""
_GROUP_OF = [0, *(min((n - 1).bit_length(), _GROUPS_OF_TURNS - 1) for n in range(1, 129))]
"""Of the number of a turn."""
_MAX_EXAMPLES = 3
_TOLERATED = 0.1
_BLOCK_TOKENS = 256
"""Caches keep whole blocks; so many tokens at the end of a prompt can be missing."""
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
"""Likely causes of misses, in words."""


class TurnUse(NamedTuple):
    """What one turn tells of caches."""

    part: StoredConversation
    turn: StoredTurn
    input: int
    read: int | None
    """Tokens from a cache; None if the endpoint did not say."""
    written: int
    repeated: int
    """Tokens that the request before had, where a cache could still have them; else 0."""
    expected: int
    """As many of them as must have been in the cache."""
    before: StoredTurn | None
    """The turn of that request."""

    @property
    def is_missed(self) -> bool:
        """Whether it lacks too much of what it should have found."""
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
        """Tokens that requests repeated, and how many of these came from a cache."""
        self.later = self.missed = 0
        """Turns that should have found something, and those that missed it."""
        self.lost = self.lost_written = 0
        """Tokens that those missed, and how many of these were paid for as written once more."""
        self.causes: KeyCounts[str] = KeyCounts()
        """Tokens that were lost, by what records say of the cause; "" where they say nothing."""
        self.examples: list[str] = []
        self.grown = 0
        """Turns that found more than what all requests of their conversation begin with."""
        self.input_by_turn = [0] * _GROUPS_OF_TURNS
        self.read_by_turn = [0] * _GROUPS_OF_TURNS

    def add(self, record: Record, uses: Sequence[TurnUse], least: int) -> None:
        """Count turns of a conversation, each of which found at least `least` tokens.

        Sums are kept in names of their own until the end: records have many turns.
        """
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
        """Whether anything was ever kept."""
        return bool(self.read or self.written)

    @property
    def cause(self) -> str | None:
        """The likely cause of most misses; None without any."""
        if not self.lost:
            return None
        # Where a prefix moves, all turns of a conversation find what is before that place.
        usual = REPLICAS if self.grown > _RARE * self.later else PREFIX
        named: KeyCounts[str] = KeyCounts()
        for name, tokens in self.causes.items():
            named[name or usual] += tokens
        return max(named, key=lambda name: named[name])


class _EndpointUse:
    """The turns at one endpoint, as far as it counts cached tokens."""

    def __init__(self) -> None:
        self._reported, self._unreported = _Sums(), _Sums()
        self._zeros = 0
        self.unknown = 0
        """Turns without any count of tokens."""

    def add(self, record: Record, uses: Sequence[TurnUse]) -> None:
        """Count the turns of a conversation."""
        least = min([use.read or 0 for use in uses if use.expected], default=0)
        told = [use for use in uses if use.read is not None]
        self._reported.add(record, told, least)
        self._zeros += sum([use.read == 0 for use in told])
        if len(told) < len(uses):
            self._unreported.add(record, [use for use in uses if use.read is None], least)

    def merge(self, other: _EndpointUse) -> None:
        self._reported.merge(other._reported)
        self._unreported.merge(other._unreported)
        self._zeros += other._zeros
        self.unknown += other.unknown

    def sums(self) -> tuple[_Sums, int]:
        """The sums over the turns whose cached tokens are known, and the number of the others."""
        whole = _Sums()
        whole.merge(self._reported)
        if self._reported.read and not self._zeros:
            whole.merge(self._unreported)
            return whole, self.unknown
        return whole, self.unknown + self._unreported.turns


class Misses(NamedTuple):
    """Turns that missed the cache, of all endpoints."""

    missed: int
    later: int
    """Turns that should have found something."""
    lost: int
    """Tokens that were computed again."""
    usd: float | None
    """What these cost more than cached ones; None if it is unknown."""
    cause: str | None
    examples: Sequence[str]
    """Ids of records."""

    @property
    def explanation(self) -> str:
        """What they cost, and the likely cause."""
        if self.cause is None:
            return ""
        dollars = "" if self.usd is None else f", for about ${self.usd:.4g} more"
        return f"{self.lost:,} tokens were computed again{dollars}; likely {CAUSES[self.cause]}"


class CacheUse:
    """The use of caches in the records given to `add` so far."""

    def __init__(self) -> None:
        self._at: dict[tuple[str | None, str | None], _EndpointUse] = {}

    def add(self, record: Record) -> None:
        """Count one record, with the conversations inside it."""
        if record.api == SCRIPTED:
            return
        models = {turn.model for turn in record.turns}
        for part in conversations_of(record):
            if not (turns := part.own_turns):
                continue
            if part is record or all(turn.model in models for turn in turns):
                counted = self._counted(record.endpoint, record.model)
            else:  # a subagent or a simulated user with a model of its own
                counted = self._counted(None, turns[0].model)
            counted.add(record, _turn_uses(record, part))
            counted.unknown += sum([_input_tokens(turn) is None for turn in turns])

    def merge(self, other: CacheUse) -> None:
        """Add the records of `other`, which come after those of this one."""
        for (endpoint, model), counted in other._at.items():
            self._counted(endpoint, model).merge(counted)

    def misses(self, price_of: PriceOf | None = None) -> Misses:
        """Turns that missed the cache, at all endpoints that have one."""
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
        """As `stats --json` shows it; shares are percentages, null where nothing is known.

        Keys: those of `_shares`, `unknown_turns` (without a known count), `by_turn` (`from`, `to`,
        `input_tokens`, `cached_tokens`, `share`), and `endpoints`: `endpoint` and `model` (null if
        unknown), the same, and of turns that missed the cache `later_turns` (how many should have
        found something), `missed_turns`, `lost_tokens`, `lost_usd` and `cause`.
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

    def _counted(self, endpoint: str | None, model: str | None) -> _EndpointUse:
        return self._at.setdefault((endpoint, model), _EndpointUse())


def conversations_of(part: StoredConversation) -> Iterator[StoredConversation]:
    """A conversation and those inside it, at any depth."""
    yield part
    for inner in part.inner:
        yield from conversations_of(inner)


def missed_turns(record: Record) -> list[int]:
    """The numbers of the record's own turns that missed a cache, as far as it tells itself."""
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


def cached_tokens_of(record: Record) -> int | None:
    """How many input tokens of a record came from a cache; None if that is unknown."""
    read = (record.usage or {}).get("cache_read_tokens")
    if read is not None or record.api == SCRIPTED:
        return read
    usages = [turn.usage for part in conversations_of(record) for turn in part.own_turns]
    known = [usage.cache_read_tokens for usage in usages if usage is not None]
    counts = [count for count in known if count is not None]
    is_silence_zero = len(known) == len(usages) and bool(counts) and all(counts)
    return sum(counts) if is_silence_zero else None


def cached_share_of(record: Record) -> float | None:
    """Which share of a record's input tokens came from a cache, up to 1; None if unknown."""
    given, read = (record.usage or {}).get("input_tokens"), cached_tokens_of(record)
    return min(1.0, read / given) if given and read is not None else None


def as_text(caches: Mapping[str, Any]) -> Iterator[str]:
    """What `CacheUse.to_json` says, as lines."""
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
    """`turns`, `input_tokens`, `cached_tokens`, `share`, and the same of what requests repeated."""
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
    """What the lost tokens cost more than cached ones; None if it is unknown."""
    if not sums.lost or price_of is None or model is None:
        return None
    if (price := price_of(model)) is None:
        return None
    fresh = (sums.lost - sums.lost_written) * (price.input - price.cache_read)
    again = sums.lost_written * (price.cache_write - price.cache_read)
    return max(0.0, fresh + again) / _MILLION


def _turn_uses(record: Record, part: StoredConversation) -> list[TurnUse]:
    """The turns of a conversation whose input is counted."""
    if record.api == SCRIPTED:
        return []
    # What others report of their sessions has no times that can be relied on. Shortened views
    # change what was said before, as they are meant to.
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
    """How many tokens of a request the one before had, and how many of these must be kept.

    The reply is left out: not all servers keep it, and not all of it comes back.
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
    """Whether a request does not repeat the one before it, as it is meant to."""
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
    """Whether a request was shown as recorded, but for its system prompt."""
    if rewrite is None:
        return True
    replaced = part.messages[rewrite.start : rewrite.end]
    return all(message.role == "system" for message in (*replaced, *rewrite.messages))


def _find_cause(record: Record, use: TurnUse) -> str:
    """What a record says of the cause of a miss; "" if nothing."""
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
    """Whether a turn answers a message of the user, before which templates drop reasoning."""
    messages = part.messages
    replies = [n for n, message in enumerate(messages) if message.role == "assistant"]
    place = replies[turn.turn - 1 - len(part.turns)] if len(replies) >= len(part.turns) else 0
    return place > 0 and messages[place - 1].role == "user"


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
