"""Whole runs against an endpoint with every fault: nothing partial is kept, and nothing hangs."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agent.models.errors import RULES
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.fakes.fake_faults import FAULTS, REPLY_FAULTS, RETRY_AFTER, STREAM_FAULTS
from tests.fakes.fake_script import digest
from tests.helpers.running import WRITE_A_NOTE, command, lines, write_prompts, write_rows

ENDS_THE_RUN = ("http401", "http402", "quota")
WAITS_FOR_A_MINUTE = ("http429_3600",)
PLAYED = [
    fault for fault in FAULTS if fault not in (*ENDS_THE_RUN, *WAITS_FOR_A_MINUTE, *STREAM_FAULTS)
]
HALVES = (PLAYED[::2], PLAYED[1::2])
"""All faults at 2 % each would leave no reply without one."""
RATE = 0.02
CALL_ATTEMPTS = 8
"""The default."""
DIALECTS = ("openai", "anthropic")
LACKING = {
    "openai": {"pause", "context_stop"},
    "anthropic": {"other_reasoning"},
}

Said = tuple[str, str, tuple[str, ...]]
"""Thoughts and text without white space, and the calls, of one turn."""


class Figures(NamedTuple):
    """What one run came to."""

    calls: int
    faults: Counter[str]
    retries: int
    statuses: Mapping[str, int]
    failures: Mapping[str, int]
    rows: int
    wall_s: float


def run_with_faults(
    cwd: Path,
    dialect: str,
    faults: Iterable[str],
    *,
    prompts: int,
    workers: int,
    timeout_s: float,
    seed: int,
) -> Figures:
    """Run all prompts, with these faults from the second prompt on, and check the outcome."""
    cwd.mkdir()
    given: dict[str, Any] = {
        "run_name": "r",
        "dataset_file": "p.jsonl",
        "enabled_toolsets": "file",
        "model": f"{dialect}:m",
        "key_env": "none",
        "num_workers": workers,
        "batch_size": 32,
        "max_attempts": 1,
        "attempt_timeout_s": timeout_s,
    }
    plays: dict[str, Any] = {"turns": 4, "latency_s": 0.0, "reasoning_chars": 60, **WRITE_A_NOTE}
    write_prompts(cwd / "p.jsonl", 1)
    with FakeEndpoint(**plays) as endpoint:
        url = endpoint.openai_url if dialect == "openai" else endpoint.anthropic_url
        assert finish(cwd, **given, base_url=url) == 0, "the endpoint has answered once"
        port = endpoint.port
    write_prompts(cwd / "p.jsonl", prompts)
    journal = cwd / "journal.jsonl"
    rates = dict.fromkeys(faults, RATE)
    plays |= {"port": port, "faults": rates, "seed": seed, "journal_path": str(journal)}
    with FakeEndpoint(**plays) as endpoint:
        code = finish(cwd, **given, base_url=url)
        counts = endpoint.journal()
    assert code in (0, 1), (cwd / "output.txt").read_text()
    events = lines(journal)
    assert_nobody_is_left_over(cwd, prompts, events)
    assert_rows_are_what_was_delivered(cwd, events)
    summary = json.loads((cwd / "trajectories/r/summary.json").read_text())
    return Figures(
        calls=counts["requests"],
        faults=Counter(counts["faults"]),
        retries=(cwd / "trajectories/r/run.log").read_text().count(" failed in attempt "),
        statuses=summary["statuses"],
        failures=summary["failures"],
        rows=len(lines(cwd / "trajectories/r.jsonl")),
        wall_s=events[-1]["at"] - events[0]["at"],
    )


def finish(cwd: Path, **options: Any) -> int:
    """Carry a run to its end; far longer than it may take, it is stuck."""
    with (cwd / "output.txt").open("ab") as output:
        done = subprocess.run(
            command(**options), cwd=cwd, stdout=output, stderr=output, timeout=900
        )
    return done.returncode


def assert_nobody_is_left_over(cwd: Path, prompts: int, events: list[dict[str, Any]]) -> None:
    """Every task is done, or failed with a class that says why; never for a rate of calls."""
    records = lines(cwd / "trajectories/r/records.jsonl")
    assert sorted(record["id"] for record in records) == [f"p{n:04}" for n in range(prompts)]
    by_conversation = defaultdict(list)
    for event in events:
        by_conversation[event["conversation"]].append(event)
    for record in records:
        if record["status"] != "failed":
            continue
        kind = record["error"]["class"]
        assert kind in RULES, record["error"]
        assert kind != "rate_limited"
        if RULES[kind].action == "retry":
            tried = since_the_last_reply(by_conversation[conversation_of(record["messages"])])
            assert tried >= CALL_ATTEMPTS, "refusals for the rate of calls were held against it"


def conversation_of(messages: Iterable[Mapping[str, Any]]) -> str:
    """The endpoint's name for a conversation."""
    prompt = next(message["content"] for message in messages if message["role"] == "user")
    return digest(f"{prompt}\0", 8)


def since_the_last_reply(events: list[dict[str, Any]]) -> int:
    """How often a call was tried, but for refusals that asked for fewer calls."""
    tried = 0
    for event in reversed(events):
        if event["event"] == "answered":
            break
        tried += event["event"] == "asked"
        tried -= event["event"] == "fault" and event["kind"] in RETRY_AFTER
    return tried


def assert_rows_are_what_was_delivered(cwd: Path, events: list[dict[str, Any]]) -> None:
    """Every turn of every exported row is a reply that left the endpoint whole, to the letter."""
    delivered: dict[str, set[Said]] = defaultdict(set)
    paused: dict[str, set[Said]] = defaultdict(set)
    for event in events:
        if event["event"] == "answered":
            place = paused if event["finish"] == "pause_turn" else delivered
            place[event["conversation"]].add(journaled_reply(event))
    rows = lines(cwd / "trajectories/r.jsonl") + lines(cwd / "trajectories/r/exports/partial.jsonl")
    for row in rows:
        assert json.loads(row["tools"])
        assert json.loads(row["metadata"])["prompt_id"] == row["id"]
        turns = row["conversations"]
        name = digest(f"{turns[1]['value']}\0", 8)
        if not delivered[name]:
            assert row["id"] == "p0000", "the one that was done before"
            continue
        for n, turn in enumerate(turns):
            if turn["from"] != "gpt":
                continue
            said = row_reply(turn["value"])
            while said not in delivered[name]:
                first = next((one for one in paused[name] if begins(said, one)), None)
                assert first is not None, f"{row['id']}: nobody said {turn['value']!r}"
                said = without(said, first)
                if not any(said):
                    break
            assert_calls_have_results(turns, n)


def assert_calls_have_results(turns: list[dict[str, str]], n: int) -> None:
    calls = blocks("tool_call", turns[n]["value"])
    if calls:
        assert turns[n + 1]["from"] == "tool"
        results = [json.loads(text) for text in blocks("tool_response", turns[n + 1]["value"])]
        assert len({result["tool_call_id"] for result in results}) == len(results) == len(calls)
        assert [result["name"] for result in results] == [json.loads(c)["name"] for c in calls]


def journaled_reply(event: Mapping[str, Any]) -> Said:
    """What the endpoint said, by its journal."""
    calls = [(call["name"], call["arguments"]) for call in event["calls"]]
    return (
        drop_spaces(event["thought"]),
        drop_spaces(event["text"]),
        tuple(canonical(name, arguments) for name, arguments in calls),
    )


def row_reply(value: str) -> Said:
    """What the model said, by a row."""
    calls = [json.loads(text) for text in blocks("tool_call", value)]
    rest = re.sub(r"<(think|tool_call)>.*?</\1>", "", value, flags=re.DOTALL)
    return (
        drop_spaces("".join(blocks("think", value))),
        drop_spaces(rest),
        tuple(canonical(call["name"], json.dumps(call["arguments"])) for call in calls),
    )


def blocks(tag: str, value: str) -> list[str]:
    return re.findall(rf"<{tag}>(.*?)</{tag}>", value, flags=re.DOTALL)


def canonical(name: str, arguments: str) -> str:
    try:
        return json.dumps([name, json.loads(arguments)])
    except ValueError:
        return json.dumps([name, arguments])


def drop_spaces(text: str) -> str:
    return "".join(text.split())


def begins(said: Said, first: Said) -> bool:
    return all(whole[: len(part)] == part for whole, part in zip(said, first, strict=True))


def without(said: Said, first: Said) -> Said:
    """A reply that paused and its continuation: a row has both in one turn."""
    (thoughts, text, calls), (thought, begun, called) = said, first
    return thoughts[len(thought) :], text[len(begun) :], calls[len(called) :]


@pytest.mark.slow
def test_a_run_through_every_fault(tmp_path: Path) -> None:
    """The short form: half of the faults in each dialect, some 200 calls each."""
    with ThreadPoolExecutor() as pool:
        runs = [
            pool.submit(
                run_with_faults,
                tmp_path / dialect,
                dialect,
                half,
                prompts=50,
                workers=1,
                timeout_s=1.5,
                seed=100,  # one in which nobody has so much bad luck that it waits for long
            )
            for dialect, half in zip(DIALECTS, HALVES, strict=True)
        ]
        for figures in (run.result() for run in runs):
            assert figures.calls >= 150
            assert len(figures.faults) >= 20
            assert figures.statuses["completed"] >= 10


@pytest.mark.slow
def test_no_credit_stops_the_run_although_it_comes_as_a_429(tmp_path: Path) -> None:
    """Waiting would not help; nothing counts as failed, and the rest is not asked for."""
    rows = [{"id": f"p{n}", "prompt": "fault:quota" if n == 3 else f"{n}?"} for n in range(40)]
    write_rows(tmp_path / "p.jsonl", *rows)
    with FakeEndpoint(turns=1, latency_s=0.0) as endpoint:
        code = finish(
            tmp_path,
            run_name="r",
            dataset_file="p.jsonl",
            enabled_toolsets="none",
            model="openai:m",
            key_env="none",
            num_workers=1,
            batch_size=4,
            base_url=endpoint.openai_url,
        )
        assert endpoint.journal()["requests"] < 40
    assert code == 4
    assert "no credit left" in (tmp_path / "output.txt").read_text()
    summary = json.loads((tmp_path / "trajectories/r/summary.json").read_text())
    assert (summary["failed"], summary["done"] + summary["pending"]) == (0, 40)


@pytest.mark.long
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("half", [0, 1])
def test_a_long_run_through_every_fault(
    tmp_path: Path, half: int, dialect: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the faults over 2,600 calls or more, 10,400 in all four; prints what came of it."""
    figures = run_with_faults(
        tmp_path / "run", dialect, HALVES[half], prompts=560, workers=2, timeout_s=2.0, seed=1
    )
    with capsys.disabled():
        print(f"\n{dialect} {figures}")
    assert figures.calls >= 2_600
    assert set(figures.faults) == set(HALVES[half]) - LACKING[dialect]
    assert (
        figures.retries
        > sum(count for kind, count in figures.faults.items() if kind not in REPLY_FAULTS) * 0.5
    )
