"""Shards of a dataset that share a budget, killed at random."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
import pytest

from batch_trajectories.runs.config.amounts import Cost
from batch_trajectories.runs.sharing.ledger import Ledger
from batch_trajectories.runs.supervisor.budget import BudgetLog
from testing.fake_endpoint import FakeEndpoint
from tests.faults.test_process import asking
from tests.running import (
    PATIENCE_S,
    WRITE_A_NOTE,
    kill_session,
    lines,
    started,
    write_prompts,
)

SHARDS = 3
PROMPTS = 90
TURNS = 3


def least_of_turns(place: Path) -> list[int]:
    """The least that the call of each turn takes; conversations differ by a token."""
    taken = [
        [turn["usage"]["input_tokens"] + turn["usage"]["output_tokens"] for turn in turns]
        for path in place.glob("*/trajectories/r/records.jsonl")
        for record in lines(path)
        if len(turns := record["turns"]) == TURNS
    ]
    return [min(of_turn) for of_turn in zip(*taken, strict=True)]


def asked_by_turn(journal: Path) -> Counter[int]:
    events = map(orjson.loads, journal.read_bytes().splitlines())
    return Counter(event["turn"] for event in events if event["event"] == "asked")


def end_of(place: Path, given: dict[str, Any], dice: random.Random, kills: int) -> list[int]:
    """Exit codes of all shards; each is killed `kills` times first, and started again."""
    codes: list[int] = []
    with ExitStack() as stack:
        left = dict.fromkeys(range(SHARDS), kills)
        living = {n: stack.enter_context(_shard(place, given, n)) for n in left}
        while any(left.values()):
            time.sleep(dice.uniform(0.3, 1.5))  # the moment of the kill, which is at random
            number = dice.choice([n for n in left if left[n]])
            kill_session(living[number].pid)
            left[number] -= 1
            living[number] = stack.enter_context(_shard(place, given, number))
        codes += [process.wait(PATIENCE_S) for process in living.values()]
    return codes


def _shard(place: Path, given: dict[str, Any], number: int) -> Any:
    directory = place / str(number)
    directory.mkdir(exist_ok=True)
    write_prompts(directory / "p.jsonl", PROMPTS)
    return started(directory, **given, shard=f"{number}/{SHARDS}")


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [int(os.environ.get("SHARED_ROUNDS", "1"))])
def test_shards_that_are_killed_never_spend_more_than_their_budget(
    rounds: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then the budget is raised, and all work is done; what was not spent is nobody's."""
    dice = random.Random(5)
    for number in range(rounds):
        place = tmp_path / str(number)
        place.mkdir()
        journal = place / "asked.jsonl"
        with FakeEndpoint(
            turns=TURNS, latency_s=0.15, journal_path=str(journal), **WRITE_A_NOTE
        ) as endpoint:
            given = asking(
                endpoint, shared_limits=place / "shared", max_tokens=300, max_run_tokens=90_000
            )
            codes = end_of(place, given, dice, kills=2)
            assert set(codes) <= {0, 3}
            tight = asked_by_turn(journal)
            given["max_run_tokens"] = 10**7
            assert end_of(place, given, dice, kills=1) == [0] * SHARDS
        least = least_of_turns(place)
        spent = sum(n * least[turn - 1] for turn, n in tight.items())
        assert spent <= 90_000
        done = [record["id"] for n in range(SHARDS) for record in _records(place / str(n))]
        assert sorted(done) == [f"p{n:04}" for n in range(PROMPTS)]

        ledger = Ledger(str(place / "shared"))
        ledger.refresh()
        accounts = {member.tokens for member in ledger.members.values()}
        logs = [place / str(n) / "trajectories/r" for n in range(SHARDS)]
        balances = [BudgetLog(path, path / "quarantine").balance for path in logs]
        assert accounts == {balance.tokens for balance in balances}
        assert not any(member.is_open for member in ledger.members.values())
        with capsys.disabled():
            print(
                f"\nround {number}: exit codes {codes}, {spent:,} of 90,000 tokens in "
                f"{tight.total()} calls; {ledger.number} entries; at the end "
                f"{sum(balances, Cost()).tokens:,} tokens"
            )


def _records(place: Path) -> list[dict[str, Any]]:
    return lines(place / "trajectories/r/records.jsonl")
