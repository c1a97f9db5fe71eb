"""Prompt caches: what is counted, what is unknown, which turns miss, and no false alarm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from agent.models.model import Price
from batch_trajectories.export.conversation.own_work import AuthoredWork
from batch_trajectories.export.statistics.cache_use import (
    CAUSES,
    CacheUse,
    as_text,
    compute_cached_share,
    count_cached_tokens,
    missed_turns,
)
from batch_trajectories.export.statistics.health import Health, health_as_text, problems_in
from batch_trajectories.records.record_types import Record
from tests.helpers.stored import to_record

GROWS = 3000
PRICE = Price(input=3.0, output=15.0, cache_read=0.3, cache_write=3.75)

Counts = tuple[int | None, int | None]
"""Input tokens of a turn, and those from a cache."""


def turn(number: int, counts: Counts, **changes: Any) -> dict[str, Any]:
    """Turn `number`, ten seconds after the one before."""
    given, cached = counts
    usage = {"input_tokens": given, "output_tokens": 50, "cache_read_tokens": cached}
    return {
        "turn": number,
        "finish_reason": "tool_calls",
        "cost_usd": None,
        "usage": usage,
        "started_at": 10.0 * number,
        "duration_s": 5.0,
        "model": "m",
        **changes,
    }


def conversation(turns: Sequence[Mapping[str, Any]], **changes: Any) -> dict[str, Any]:
    said: list[dict[str, Any]] = [{"role": "user", "content": "work"}]
    for number, _ in enumerate(turns):
        call = {"id": f"c{number}", "function": {"name": "terminal", "arguments": "{}"}}
        said.append({"role": "assistant", "content": "", "tool_calls": [call]})
        said.append({"role": "tool", "content": "done", "tool_call_id": f"c{number}"})
    return {"messages": said, "turns": [*turns], "endpoint": "http://here/v1", **changes}


def growing(cached: Sequence[int | None], **changes: Any) -> dict[str, Any]:
    """Turns whose requests grow by GROWS tokens, with these tokens from a cache."""
    counts = [(GROWS * n, found) for n, found in enumerate(cached, 1)]
    return conversation([turn(n, one) for n, one in enumerate(counts, 1)], **changes)


def warm(turns: int) -> list[int]:
    """What a cache finds that keeps all: the request before."""
    return [GROWS * n for n in range(turns)]


COLD = [0, 2944, *[0] * 8]
"""One turn of ten finds what the one before left."""


def use_of(*records: Mapping[str, Any]) -> CacheUse:
    """The use of caches in records, which must not depend on how these are divided."""
    read = [of_line(one, number) for number, one in enumerate(records)]
    whole, first, second = CacheUse(), CacheUse(), CacheUse()
    for place, one in enumerate(read):
        whole.add(one)
        (first if place < len(read) // 3 else second).add(one)
    first.merge(second)
    assert first.to_json() == whole.to_json()
    assert first.misses() == whole.misses()
    return whole


def of_line(record: Mapping[str, Any], number: int = 0) -> Record:
    return to_record({"id": f"r{number}", **record})


def health_of(*records: Mapping[str, Any], price: Price | None = None) -> list[dict[str, Any]]:
    health = Health(1)
    for number, one in enumerate(records):
        health.add(read := of_line(one, number), AuthoredWork(read))
    return health.to_json(lambda _: price)


def is_alarmed(*records: Mapping[str, Any]) -> bool:
    return "cache_misses" in [one["name"] for one in problems_in(health_of(*records))]


def test_shares_are_by_endpoint_by_turn_and_of_what_requests_repeat() -> None:
    other = growing([0, 0, 0], endpoint="http://there/v1", model="n")
    counted = use_of(*[growing(warm(4))] * 3, other).to_json()
    here, there = counted["endpoints"]
    assert (here["endpoint"], here["model"], here["turns"]) == ("http://here/v1", "m", 12)
    assert (here["input_tokens"], here["cached_tokens"]) == (3 * 30_000, 3 * 18_000)
    assert (here["share"], here["repeated_share"]) == (60.0, 100.0)
    assert (here["later_turns"], here["missed_turns"]) == (9, 0)
    assert (there["share"], there["missed_turns"]) == (0.0, 0)
    first, second, later = counted["by_turn"]
    assert (first["from"], first["to"], first["share"]) == (1, 1, 0.0)
    assert (second["from"], second["to"], second["share"]) == (2, 2, 37.5)
    assert (later["from"], later["to"]) == (3, 4)


def test_misses_say_what_they_cost_and_their_likely_cause() -> None:
    (found,) = [
        one for one in health_of(*[growing(COLD)] * 4, price=PRICE) if one["name"] == "cache_misses"
    ]
    lost = 4 * sum(GROWS * n for n in range(2, 10))
    assert (found["name"], found["found"], found["is_problem"]) == ("cache_misses", 32, True)
    assert found["examples"] == ["r0", "r1", "r2"]
    (line,) = [one for one in health_as_text([found]) if "cache_misses" in one]
    assert f"{lost:,} tokens were computed again, for about ${lost * 2.7e-6:.4g} more" in line
    assert CAUSES["replicas"] in line
    (endpoint,) = use_of(*[growing(COLD)] * 4).to_json(lambda _: PRICE)["endpoints"]
    assert (endpoint["lost_tokens"], endpoint["cause"]) == (lost, "replicas")
    assert endpoint["lost_usd"] == pytest.approx(lost * 2.7e-6)


def test_tokens_that_were_written_once_more_cost_as_much_as_writing() -> None:
    def with_writes(number: int, read: int) -> dict[str, Any]:
        one = turn(number, (GROWS * number, read))
        one["usage"]["cache_write_tokens"] = GROWS * number - read
        return one

    cold = conversation([with_writes(n, 0) for n in range(1, 11)], api="anthropic_messages")
    (endpoint,) = use_of(cold).to_json(lambda _: PRICE)["endpoints"]
    assert (endpoint["missed_turns"], endpoint["later_turns"]) == (9, 9)
    assert endpoint["lost_usd"] == pytest.approx(endpoint["lost_tokens"] * 3.45e-6)
    assert is_alarmed(*[cold] * 3)


def test_without_a_price_the_money_is_unknown() -> None:
    found = {one["name"]: one for one in problems_in(health_of(*[growing(COLD)] * 4))}
    assert "computed again; likely" in found["cache_misses"]["problem"]
    assert use_of(growing(COLD)).to_json()["endpoints"][0]["lost_usd"] is None


def test_a_prefix_that_moves_is_told_from_replicas() -> None:
    """Each request has only its first 1,500 tokens in common with any other."""
    moving = growing([0, *[1500] * 9])
    assert use_of(*[moving] * 4).misses().cause == "prefix"
    assert use_of(*[growing(COLD)] * 4).misses().cause == "replicas"


def said_by_user(at: int, record: dict[str, Any]) -> dict[str, Any]:
    """The record with reasoning, and with a message of the user before turn `at`."""
    messages = record["messages"]
    for message in messages:
        if message["role"] == "assistant":
            message["reasoning"] = "I think."
    replies = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    messages.insert(replies[at - 1], {"role": "user", "content": "And now?"})
    return record


def test_reasoning_that_a_template_drops_is_a_cause() -> None:
    found = warm(10)
    for place in range(4, 10):
        found[place] = 1100
    records = [growing(found) for _ in range(4)]
    for record in records:
        for at in range(10, 4, -1):
            said_by_user(at, record)
    assert use_of(*records).misses().cause == "reasoning"
    shorter = [turn(n, (40_000 - 1000 * n, 1024 if n > 1 else 0)) for n in range(1, 11)]
    record = conversation(shorter)
    record["messages"][1]["reasoning"] = "I think."
    assert use_of(*[record] * 4).misses().cause == "reasoning"


def agents(turns: Sequence[Mapping[str, Any]], **changes: Any) -> dict[str, Any]:
    """A conversation of an agent that runs as a command."""
    record = conversation(turns, **changes)
    record["messages"].insert(0, {"role": "system", "content": "It is 12:05."})
    return record


def call(number: int, cached: int, **changes: Any) -> dict[str, Any]:
    request = {"at": 2 * number, **changes.pop("request", {})}
    return turn(number, (GROWS * number, cached), exchange=number - 1, request=request, **changes)


def test_an_agent_that_changes_tools_or_reasoning_is_named() -> None:
    changed = [call(n, 0, request={"tools": n % 2}) for n in range(1, 11)]
    changed[0]["usage"]["cache_read_tokens"] = 5
    assert use_of(agents(changed)).misses().cause == "tools"
    dropped = [
        call(n, 1100, request={"shown": [{"at": 2 * n - 2, "reasoning": ""}] if n > 1 else []})
        for n in range(1, 11)
    ]
    assert use_of(agents(dropped)).misses().cause == "reasoning"


def test_an_agent_with_the_time_in_its_system_prompt_is_named() -> None:
    turns = [{**call(n, 1100), "request": None} for n in range(1, 11)]
    rewritten = [
        {
            "exchanges": [n],
            "thread": "thread#9",
            "start": 0,
            "end": 1,
            "until": 2 * n + 2,
            "messages": [{"role": "system", "content": f"It is 12:{n:02}."}],
        }
        for n in range(9)
    ]
    turns[9]["request"] = {"at": 20}
    assert use_of(agents(turns, rewritten=rewritten)).misses().cause == "system"


def no_counts() -> dict[str, Any]:
    return growing([None] * 10)


def without_cache() -> dict[str, Any]:
    return growing([0] * 10)


def short_prompts() -> dict[str, Any]:
    """The last prompts are the first that are long enough to be kept."""
    return conversation([turn(n, (100 * n, 0 if n < 12 else 1100)) for n in range(1, 13)])


def gemini() -> dict[str, Any]:
    counts = [(400 * n, 0 if n < 10 else 3600) for n in range(1, 11)]
    turns = [turn(n, one) for n, one in enumerate(counts, 1)]
    return conversation(turns, model="gemini:gemini-2.5-pro")


def pauses() -> dict[str, Any]:
    """Six minutes pass before each request."""
    turns = growing(COLD)["turns"]
    return conversation([{**one, "started_at": 360.0 * one["turn"]} for one in turns])


def waits() -> dict[str, Any]:
    """Each request waits six minutes longer for a limit."""
    turns = growing(COLD)["turns"]
    return conversation(
        [{**one, "started_at": 10.0 * n, "waited_s": 360.0 * n} for n, one in enumerate(turns)]
    )


def batches() -> dict[str, Any]:
    turns = growing(COLD)["turns"]
    return conversation([{**one, "batch_item": f"b{one['turn']}"} for one in turns])


def resumed_conversation() -> dict[str, Any]:
    """A later process continued it after each turn."""
    resumes = [{"turn": n, "interrupted": [], "repeated": []} for n in range(1, 10)]
    return growing(COLD, resumes=resumes)


def branch() -> dict[str, Any]:
    """Of a branch only the first turn is its own; its parent paid for the others."""
    turns = [*growing(warm(9))["turns"], turn(10, (30_000, 1))]
    return conversation([{**one, "inherited": True} for one in turns[:9]] + turns[9:])


def summaries() -> dict[str, Any]:
    """A new summary stands for the older messages of each request."""
    turns = [turn(n, (20_000 + n, 1200), request={"summary": f"summary#{n}"}) for n in range(1, 11)]
    return conversation(turns)


def first_turns() -> dict[str, Any]:
    """Subagents of one turn each."""
    inner = [
        {**conversation([turn(1, (20_000, 0))]), "key": f"c{n}", "name": "helper"}
        for n in range(20)
    ]
    for one in inner:
        del one["endpoint"]
    return growing(warm(3), inner=inner)


def compacted_conversation() -> dict[str, Any]:
    """Older replies are shortened in each request."""
    return growing([0, *[1500] * 9], view_compacted=True, options={"compact_after": 1})


def agent_compacts() -> dict[str, Any]:
    """An agent replaces its messages by a summary, again and again."""
    turns = [{**call(n, 1500), "request": None} for n in range(1, 11)]
    rewritten = [
        {
            "exchanges": [n],
            "thread": "t",
            "start": 2,
            "end": 4,
            "until": 2 * n + 2,
            "messages": [{"role": "user", "content": f"So far: {n}"}],
        }
        for n in range(10)
    ]
    return agents(turns, rewritten=rewritten)


def agent_shortens() -> dict[str, Any]:
    """An agent clears results that are old."""
    return agents(
        [
            call(n, 1500, request={"shown": [{"at": 3, "content": f"cleared {n}"}]})
            for n in range(1, 11)
        ]
    )


def shrinks() -> dict[str, Any]:
    """Each request is shorter than the one before: whoever cut it did not mean to repeat it."""
    return conversation([turn(n, (60_000 - 3000 * n, 1200)) for n in range(1, 11)])


def imported_conversation() -> dict[str, Any]:
    return growing(COLD, imported={"format": "atif"})


def without_counts() -> dict[str, Any]:
    """Every second turn has no counts at all."""
    turns = growing(COLD)["turns"]
    return conversation([{**one, "usage": None} if one["turn"] % 2 else one for one in turns])


def only_marked() -> dict[str, Any]:
    """Only the system message is marked for the cache, so only that is kept."""
    turns = [turn(n, (GROWS * n, 1500 if n > 1 else 0)) for n in range(1, 11)]
    turns[0]["usage"]["cache_write_tokens"] = 1500
    for one in turns[1:]:
        one["usage"]["cache_write_tokens"] = 0
    return conversation(turns, api="anthropic_messages")


def whole_blocks() -> dict[str, Any]:
    """Caches keep whole blocks, and requests grow fast."""
    return growing([0, *[GROWS * n - 127 for n in range(1, 10)]])


def whole_blocks_of_short_prompt() -> dict[str, Any]:
    """A block is much of a short prompt."""
    counts = [(1100 + n, 900 if n > 1 else 0) for n in range(1, 11)]
    return conversation([turn(n, one) for n, one in enumerate(counts, 1)])


def almost_all() -> dict[str, Any]:
    """The last reply comes back in another form, such as without its reasoning."""
    counts = [(60_000 + 1000 * n, 58_500 + 1000 * n if n > 1 else 0) for n in range(1, 11)]
    return conversation([turn(n, one) for n, one in enumerate(counts, 1)])


def others_between() -> dict[str, Any]:
    """Every second turn belongs to the conversation that an agent has branched off."""
    turns = [turn(n, (GROWS * n, 0)) for n in range(1, 11)]
    return conversation([{**one, "inherited": True} if one["turn"] % 2 else one for one in turns])


def replica_lost() -> dict[str, Any]:
    """A replica dies in the middle, and its conversations begin anew elsewhere."""
    found = warm(12)
    found[6] = 0
    return growing(found)


SOUND = [
    no_counts,
    without_cache,
    short_prompts,
    gemini,
    pauses,
    waits,
    batches,
    resumed_conversation,
    branch,
    summaries,
    first_turns,
    compacted_conversation,
    agent_compacts,
    agent_shortens,
    shrinks,
    imported_conversation,
    without_counts,
    only_marked,
    whole_blocks,
    whole_blocks_of_short_prompt,
    almost_all,
    others_between,
    replica_lost,
]


@pytest.mark.parametrize("make", SOUND)
def test_what_is_no_miss_is_no_alarm(make: Any) -> None:
    records = [make() for _ in range(20)]
    assert not is_alarmed(*records), health_of(*records)
    # What was seen of a cache elsewhere changes nothing.
    other = growing(warm(10), endpoint="http://there/v1")
    assert not is_alarmed(*records, *[other] * 5)
    if make is not without_cache:
        assert not is_alarmed(*records, growing(warm(10), model=records[0].get("model", "m")))


def test_a_few_turns_are_no_alarm() -> None:
    assert not is_alarmed(growing(COLD), growing(COLD))
    assert is_alarmed(growing(COLD), growing(COLD), growing(COLD))


def test_short_prompts_are_not_among_what_could_be_cached() -> None:
    counted = use_of(conversation([turn(n, (100 * n, 0)) for n in range(1, 9)])).to_json()
    assert (counted["share"], counted["repeated_tokens"], counted["repeated_share"]) == (0, 0, None)


def test_scripted_turns_have_no_caches() -> None:
    record = growing(warm(4), api="scripted")
    assert use_of(record).to_json()["endpoints"] == []
    assert missed_turns(of_line(growing(COLD, api="scripted"))) == []
    assert [*as_text(use_of(record).to_json())] == []


def test_samples_of_a_prompt_do_not_miss_each_others_caches() -> None:
    one_turn = [growing([0], prompt_id="p", sample=n) for n in range(50)]
    assert not is_alarmed(*one_turn, *[growing(warm(8))] * 5)


def test_what_is_not_reported_is_unknown() -> None:
    record = of_line({**no_counts(), "usage": {"input_tokens": 9, "cache_read_tokens": None}})
    assert (count_cached_tokens(record), compute_cached_share(record), missed_turns(record)) == (
        None,
        None,
        [],
    )
    counted = use_of(no_counts()).to_json()
    assert (counted["share"], counted["unknown_turns"], counted["input_tokens"]) == (None, 10, 0)
    assert [*as_text(counted)] == ["prompt caches: unknown for 10 turns, nothing reports them"]


def test_servers_that_leave_out_zeros_have_zeros() -> None:
    """vLLM and SGLang say nothing of a request of which nothing was cached."""
    silent = growing([found or None for found in COLD])
    usage = {"input_tokens": GROWS * 55, "cache_read_tokens": None}
    record = of_line({**silent, "usage": usage})
    assert count_cached_tokens(record) == 2944
    assert missed_turns(record) == list(range(3, 11))
    counted = use_of(silent, no_counts()).to_json()
    assert (counted["unknown_turns"], counted["cached_tokens"]) == (0, 2944)
    assert is_alarmed(*[silent] * 4)


def test_a_missing_count_is_unknown_where_zeros_are_reported() -> None:
    """A gateway that has several providers behind it, of which one reports nothing."""
    mixed = [*warm(5), *[None] * 5]
    record = of_line({**growing(mixed), "usage": {"input_tokens": 9, "cache_read_tokens": None}})
    assert (count_cached_tokens(record), missed_turns(record)) == (None, [])
    assert use_of(growing(mixed)).to_json()["unknown_turns"] == 5
    assert not is_alarmed(*[growing(mixed)] * 10)


def test_a_conversation_inside_another_has_a_prefix_of_its_own() -> None:
    inner = {**growing(COLD), "key": "c1", "name": "helper"}
    del inner["endpoint"]
    counted = use_of(growing(warm(3), inner=[inner])).to_json()
    (endpoint,) = counted["endpoints"]
    assert (endpoint["later_turns"], endpoint["missed_turns"]) == (11, 8)
    inner["turns"] = [{**one, "model": "small"} for one in inner["turns"]]
    (_, elsewhere) = sorted(
        use_of(growing(warm(3), inner=[inner])).to_json()["endpoints"],
        key=lambda one: str(one["model"]),
    )
    assert (elsewhere["endpoint"], elsewhere["model"]) == (None, "small")
