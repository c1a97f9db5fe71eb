"""Health checks: each finds what it is for, alone, and nothing in sound records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.export.conversation.own_work import AuthoredWork
from batch_trajectories.export.statistics.health import (
    HEALTH_CHECKS,
    Health,
    health_as_text,
    problems_in,
)
from tests.helpers.running import run, write_rows
from tests.helpers.stored import to_record

TOOLS = [{"type": "function", "function": {"name": "terminal", "parameters": {}}}]


def record(number: int, **changes: Any) -> dict[str, Any]:
    """A sound conversation of two turns with a call; its rewards alternate."""
    call = {"id": f"c{number}", "function": {"name": "terminal", "arguments": f'{{"n": {number}}}'}}
    return {
        "id": f"r{number}",
        "prompt_id": f"p{number}",
        "tools": TOOLS,
        "messages": [
            {"role": "user", "content": "work"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "done", "tool_call_id": f"c{number}"},
            {"role": "assistant", "content": "ready"},
        ],
        "turns": [{"finish_reason": "tool_calls"}, {"finish_reason": "stop"}],
        "usage": {"output_tokens": 10},
        "check": {"passed": number % 2 == 0, "reward": float(number % 2 == 0), "duration_s": 20.0},
        "row": {"repo": f"repo{number % 2 + number % 3}", "id": f"p{number}"},
        **changes,
    }


def results(
    records: Iterable[Mapping[str, Any]], *, samples: int = 1, failures: Any = ()
) -> list[dict[str, Any]]:
    """The results of the checks, which must not depend on how the records are divided."""
    read = [to_record(one) for one in records]
    whole = Health(samples)
    first, second = Health(samples), Health(samples)
    for place, one in enumerate(read):
        whole.add(one, AuthoredWork(one))
        (first if place < len(read) // 3 else second).add(one, AuthoredWork(one))
    first.merge(second)
    for health in (whole, first):
        health.add_failures(failures)
    found = whole.to_json()
    assert first.to_json() == found == whole.to_json()
    return found


def problems(records: Iterable[Mapping[str, Any]], **given: Any) -> dict[str, Mapping[str, Any]]:
    """The problems by the name of their check."""
    return {one["name"]: one for one in problems_in(results(records, **given))}


def assistant_message(content: str, *calls: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **more}


def result(number: int, failure: str) -> dict[str, Any]:
    return {
        "role": "tool",
        "content": "failed",
        "tool_call_id": f"c{number}",
        "is_error": True,
        "details": {"failure": failure},
    }


def with_result(number: int, failure: str) -> dict[str, Any]:
    of = record(number)
    return {**of, "messages": [*of["messages"][:2], result(number, failure), of["messages"][3]]}


def repeating(number: int) -> dict[str, Any]:
    call = {"id": "c", "function": {"name": "terminal", "arguments": "{}"}}
    turns = [
        m
        for _ in range(5)
        for m in (assistant_message("", call), {**result(0, "x"), "tool_call_id": "c"})
    ]
    return record(number, messages=[{"role": "user", "content": "work"}, *turns], turns=[{}] * 5)


def leaking(number: int) -> dict[str, Any]:
    call = {
        "id": f"c{number}",
        "function": {"name": "terminal", "arguments": '{"command": "git reflog"}'},
    }
    of = record(number)
    return {**of, "messages": [of["messages"][0], assistant_message("", call), *of["messages"][2:]]}


def lost_turns() -> list[dict[str, Any]]:
    """Turns of which one in ten finds in the cache what the one before left."""
    return [
        {
            "turn": n,
            "usage": {"input_tokens": 5000, "cache_read_tokens": 4000 * (n % 10 == 0)},
            "started_at": n,
        }
        for n in range(3, 40)
    ]


CHECKED = {"passed": True, "reward": 1.0}
SCORE = {"source": "m:f", "version": "1", "error": None, "rewards": {"f": 1.0}}
FAILED_SCORE = {**SCORE, "error": "ValueError", "rewards": None}


def inputs(*tokens: int) -> list[dict[str, Any]]:
    """Turns with these numbers of input tokens."""
    return [
        {"turn": n, "usage": {"input_tokens": count, "output_tokens": 5}}
        for n, count in enumerate(tokens, start=1)
    ]


FOUND: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "unfinished": (
        [record(n, status="max_turns" if n % 3 else "completed") for n in range(30)],
        {},
        "r1",
    ),
    "no_tokens": (
        [record(n, usage=None if n == 4 else {"output_tokens": 1}) for n in range(30)],
        {},
        "r4",
    ),
    "hollow_turns": (
        [
            record(n) if n != 7 else record(n, messages=[assistant_message(" ")], turns=[{}])
            for n in range(30)
        ],
        {},
        "r7",
    ),
    "cut_turns": (
        [
            record(n, turns=[{}, {"finish_reason": "length" if n in (2, 3) else "stop"}])
            for n in range(30)
        ],
        {},
        "r2",
    ),
    "repeated_calls": ([repeating(n) if n < 2 else record(n) for n in range(30)], {}, "r0"),
    "invalid_calls": (
        [with_result(n, "invalid_arguments") if n < 3 else record(n) for n in range(30)],
        {},
        "r0",
    ),
    "interrupted_calls": (
        [with_result(n, "interrupted") if n == 5 else record(n) for n in range(30)],
        {},
        "r5",
    ),
    "failing_tools": ([with_result(n, "error") for n in range(30)], {}, "terminal"),
    "failing_prompts": (
        [
            record(n, prompt_id=f"p{n // 3}", status="length" if n < 3 else "completed")
            for n in range(30)
        ],
        {"samples": 3},
        "p0",
    ),
    "cache_misses": (
        [
            record(n, turns=[{}, {}, *lost_turns()] if n == 1 else record(n)["turns"])
            for n in range(30)
        ],
        {},
        "r1",
    ),
    "shrinking_inputs": (
        [record(n, turns=inputs(1513, 4086, 4076 if n == 2 else 4100)) for n in range(30)],
        {},
        "r2",
    ),
    "leak_suspected": ([leaking(n) if n == 6 else record(n) for n in range(30)], {}, "r6"),
    "failed_checks": (
        [
            record(n, check={"error": "no file"} if n == 9 else record(n)["check"])
            for n in range(30)
        ],
        {},
        "r9",
    ),
    "failed_scores": (
        [record(n, scores=[FAILED_SCORE if n == 3 else SCORE]) for n in range(30)],
        {},
        "r3",
    ),
    "instant_passes": (
        [
            record(n, check={**record(n)["check"], "duration_s": 0.1 if n == 8 else 20})
            for n in range(30)
        ],
        {},
        "r8",
    ),
    "constant_rewards": (
        [
            record(
                n,
                row={"repo": "a" if n < 30 else "b"},
                check=CHECKED if n < 30 else record(n)["check"],
            )
            for n in range(90)
        ],
        {},
        "repo=a: 1 in 30",
    ),
}


def test_sound_records_have_no_problem() -> None:
    found = results([record(n) for n in range(60)], samples=4)
    assert [one["name"] for one in found] == list(HEALTH_CHECKS)
    assert problems_in(found) == []
    assert list(health_as_text(found)) == ["health: no problem found by 12 checks"]


@pytest.mark.parametrize("name", HEALTH_CHECKS)
def test_each_check_finds_its_problem_and_no_other(name: str) -> None:
    records, given, example = FOUND[name]
    listed = problems(records, **given)
    assert list(listed) == [name]
    assert listed[name]["examples"][0] == example
    (line,) = health_as_text([listed[name]])
    assert line.startswith(f"health: {name}: {listed[name]['found']} of {listed[name]['of']} ")


def test_imported_conversations_need_no_tokens() -> None:
    """The source of an import never had tokens; conversations of the run itself still count."""
    origin = {"format": "messages", "file": "old.jsonl", "line": 1}
    imported = [record(n, usage=None, imported=origin) for n in range(30)]
    assert problems(imported) == {}
    listed = problems([*imported, record(30, usage=None)])
    assert (listed["no_tokens"]["found"], listed["no_tokens"]["of"]) == (1, 1)


def test_attempts_that_always_fail_for_one_reason_are_a_problem() -> None:
    def attempts(prompt: str, *classes: str) -> list[dict[str, Any]]:
        return [{"kind": "attempt", "id": prompt, "class": name} for name in classes]

    failures = [
        *attempts("alike", "setup_failed", "setup_failed", "setup_failed"),
        *attempts("varied", "setup_failed", "timeout", "setup_failed"),
        *attempts("seldom", "setup_failed", "setup_failed"),
    ]
    listed = problems([record(n) for n in range(30)], failures=failures)
    assert listed["failing_prompts"]["examples"] == ["alike"]
    assert (listed["failing_prompts"]["found"], listed["failing_prompts"]["of"]) == (1, 2)


def test_prompts_whose_samples_all_fail_by_the_endpoint_are_a_problem() -> None:
    """Of a sample without attempts left there are a record and a line, of others lines alone."""
    prompts = {
        "refused": ("bad_request", "bad_request", "bad_request"),
        "two of three": ("bad_request", "bad_request", ""),
        "varied": ("bad_request", "timeout", "bad_request"),
        "twice": ("bad_request", "bad_request"),
    }
    failures, records = [], [record(n) for n in range(30)]
    for prompt, classes in prompts.items():
        for n, kind in enumerate(classes):
            id = f"{prompt}#s{n}" if n else prompt
            error = {"class": kind, "message": f"HTTP 400: no (request {n})"} if kind else None
            status = "failed" if kind else "completed"
            if kind:
                failures.append({"kind": "attempt", "id": id, "class": kind})
            ended = record(len(records), id=id, prompt_id=prompt, status=status, error=error)
            records.append(ended)
    failures += [
        {"kind": "attempt", "id": id, "class": "bad_request"}
        for id in ("retried", "retried#s1", "retried#s2", "own#s7", "own#s7", "own#s8")
    ]
    listed = problems(records, failures=failures, samples=3)
    assert listed["failing_prompts"]["examples"] == ["refused", "retried"]
    assert listed["failing_prompts"]["found"] == 2


def test_a_hard_value_of_a_column_is_no_problem_where_rewards_are_rare() -> None:
    """One in ten passes: twenty failures of one repository are chance."""
    rows = [{"repo": "hard" if n < 20 else "other"} for n in range(120)]
    checks = [
        {"passed": n in range(20, 30), "reward": float(n in range(20, 30))} for n in range(120)
    ]
    records = [
        record(n, row=row, check=check)
        for n, (row, check) in enumerate(zip(rows, checks, strict=True))
    ]
    assert problems(records) == {}


def test_the_command_names_problems_and_fails_on_demand(tmp_path: Path) -> None:
    missing = {"tool_calls": [{"name": "read_file", "arguments": {"path": "none"}}]}
    rows = (
        {"id": f"p{n}", "prompt": "x", "script": [missing, {"content": "y"}]} for n in range(10)
    )
    write_rows(tmp_path / "p.jsonl", *rows)
    done = run(
        tmp_path, dataset_file="p.jsonl", run_name="r", model="scripted", enabled_toolsets="file"
    )
    assert done.returncode == 0, done.stderr
    shown = run(tmp_path, "stats", "r")
    assert shown.returncode == 0
    assert "health: failing_tools: 1 of 1 tools failed in every one of 10 calls" in shown.stdout
    assert run(tmp_path, "stats", "r", "--fail_on=failing_tools").returncode == 6
    assert run(tmp_path, "stats", "r", "--fail_on=all", "--json").returncode == 6
    assert run(tmp_path, "stats", "r", "--fail_on=cut_turns, unfinished").returncode == 0
    refused = run(tmp_path, "stats", "r", "--fail_on=hollow")
    assert refused.returncode == 2
    assert "no health check is called 'hollow'" in refused.stderr


def test_dropped_reasoning_and_views_may_make_inputs_shorter() -> None:
    thought = [*record(0)["messages"][:3], assistant_message("ready", reasoning="Hm.")]
    turns = inputs(1513, 4086, 4076)
    shorter = [{**one, "request": {"summary": "So far."}} for one in turns]
    for changes in (
        {"messages": thought, "turns": turns},
        {"view_compacted": True, "turns": turns},
        {"turns": shorter},
        {"turns": [turns[0], turns[2]]},
        {"turns": turns, "notes": [{"turn": 2, "reason": "final_summary"}]},
    ):
        assert not problems(record(n, **changes) for n in range(30)), changes
