"""Shards of a dataset that share a budget, killed at random."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
import pytest

from batch_trajectories.config.endpoints import Cost
from batch_trajectories.engine.shared_limits import Ledger
from batch_trajectories.engine.supervisor.budget import BudgetLog
from batch_trajectories.records.files import read_json
from batch_trajectories.records.names import SHARED_NOTE
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.faults.test_process import asking
from tests.helpers.running import (
    PATIENCE_S,
    WRITE_A_NOTE,
    kill_session,
    lines,
    started,
    wait_until,
    write_prompts,
)
from tests.mirror.emulators import needs_emulators, run_emulator

SHARDS = 4
PROMPTS = 90
TURNS = 3
BUDGET_USD = 0.9
PRICE = 1e-5
"""Dollars per token, in and out."""


@pytest.fixture(params=["directory", pytest.param("s3", marks=needs_emulators)])
def shared(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Where the limits are."""
    if request.param == "directory":
        yield str(tmp_path / "shared")
        return
    pytest.importorskip("obstore", reason="needs the extra `mirror`")
    with run_emulator(request.param, tmp_path, monkeypatch) as bucket:
        yield bucket.url


def least_of_turns(place: Path) -> list[int]:
    """The least that the call of each turn takes; conversations differ by a token."""
    taken = [
        [turn["usage"]["input_tokens"] + turn["usage"]["output_tokens"] for turn in turns]
        for path in place.glob("*/trajectories/r/records.jsonl")
        for record in lines(path)
        if len(turns := record["turns"]) == TURNS
    ]
    return [min(of_turn) for of_turn in zip(*taken, strict=True)]


def asked_events(journal: Path) -> list[dict[str, Any]]:
    events = map(orjson.loads, journal.read_bytes().splitlines())
    return [event for event in events if event["event"] == "asked"]


class Shards:
    """Runs of the shards of a dataset, each in a directory of its own."""

    def __init__(self, place: Path, shared: str, given: dict[str, Any]) -> None:
        self.place = place
        self.shared = shared
        self.given = {**given, "shared_limits": shared}

    def start(self, number: int) -> Any:
        directory = self.place / str(number)
        directory.mkdir(exist_ok=True)
        write_prompts(directory / "p.jsonl", PROMPTS)
        return started(directory, **self.given, shard=f"{number}/{SHARDS}")

    def end(self, dice: random.Random, kills: int) -> list[int]:
        """Exit codes of all; each is killed `kills` times first, and started again."""
        codes: list[int] = []
        with ExitStack() as stack:
            left = dict.fromkeys(range(SHARDS), kills)
            living = {n: stack.enter_context(self.start(n)) for n in left}
            while any(left.values()):
                time.sleep(dice.uniform(0.3, 1.5))  # the moment of the kill, which is at random
                number = dice.choice([n for n in left if left[n]])
                kill_session(living[number].pid)
                self.check_account(number)
                left[number] -= 1
                living[number] = stack.enter_context(self.start(number))
            codes += [process.wait(PATIENCE_S) for process in living.values()]
        return codes

    def run_dir(self, number: int) -> Path:
        return self.place / str(number) / "trajectories/r"

    def balance(self, number: int) -> Cost:
        """What a run has spent and may still spend, as its directory says."""
        path = self.run_dir(number)
        return BudgetLog(path, path / "quarantine").balance

    def check_account(self, number: int) -> None:
        """Of a run that was killed: the others know of all that it may have spent."""
        note = read_json(self.run_dir(number) / SHARED_NOTE)
        if note is None:
            return  # it had not got so far
        ledger = Ledger(self.shared)
        ledger.refresh()
        member = ledger.members.get(note["id"])
        known = 0.0 if member is None else member.usd  # None: killed before its first entry
        assert self.balance(number).usd <= known + 1e-9

    def check_sums(self, after: int, limit: float) -> int:
        """No entry with a number above `after` sums to more than the limit; return the last's."""
        ledger = Ledger(self.shared)
        ledger.refresh()
        for number in range(after + 1, ledger.number + 1):
            content = ledger._objects.read(f"{number:012}")
            assert content is not None
            members = ledger._read(content, number).values()
            assert sum(member.usd for member in members) <= limit + 1e-9
        return ledger.number

    def records(self) -> list[dict[str, Any]]:
        paths = [self.run_dir(number) / "records.jsonl" for number in range(SHARDS)]
        return [record for path in paths for record in lines(path)]


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [int(os.environ.get("SHARED_ROUNDS", "1"))])
def test_shards_that_are_killed_never_spend_more_than_their_budget(
    rounds: int, shared: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then the budget is raised, and all work is done; what was not spent is nobody's."""
    dice = random.Random(5)
    for number in range(rounds):
        place = tmp_path / str(number)
        place.mkdir()
        journal = place / "asked.jsonl"
        of_round = f"{shared}/{number}"
        with FakeEndpoint(
            turns=TURNS, latency_s=0.15, journal_path=str(journal), **WRITE_A_NOTE
        ) as endpoint:
            prices = orjson.dumps({"openai:m": {"input": PRICE * 1e6, "output": PRICE * 1e6}})
            given = asking(
                endpoint, max_tokens=300, max_run_cost_usd=BUDGET_USD, prices=prices.decode()
            )
            shards = Shards(place, of_round, given)
            codes = shards.end(dice, kills=2)
            assert set(codes) <= {0, 3}
            tight = Counter(event["turn"] for event in asked_events(journal))
            entries = shards.check_sums(0, BUDGET_USD)
            shards.given["max_run_cost_usd"] = 100
            assert shards.end(dice, kills=1) == [0] * SHARDS
            shards.check_sums(entries, 100)
        least = least_of_turns(place)
        spent = PRICE * sum(n * least[turn - 1] for turn, n in tight.items())
        assert spent <= BUDGET_USD
        assert sorted(record["id"] for record in shards.records()) == [
            f"p{n:04}" for n in range(PROMPTS)
        ]

        ledger = Ledger(of_round)
        ledger.refresh()
        accounts = sorted(member.usd for member in ledger.members.values())
        balances = sorted(shards.balance(number).usd for number in range(SHARDS))
        assert accounts == pytest.approx(balances)
        assert not any(member.is_open for member in ledger.members.values())
        with capsys.disabled():
            print(
                f"\nround {number}: exit codes {codes}, ${spent:.3f} of ${BUDGET_USD:g} in "
                f"{tight.total()} calls; {ledger.number} entries; at the end ${sum(balances):.3f}"
            )


@pytest.mark.slow
def test_shards_share_their_rates(shared: str, tmp_path: Path) -> None:
    """Calls and tokens of all of them, also of one that is stopped, killed and started again."""
    journal = tmp_path / "asked.jsonl"
    rpm = 240
    with FakeEndpoint(turns=TURNS, journal_path=str(journal), **WRITE_A_NOTE) as endpoint:
        given = asking(endpoint, rpm=rpm, tpm=10**6, num_workers=1)
        shards = Shards(tmp_path, f"{shared}/limits", given)
        with ExitStack() as stack:
            living = [stack.enter_context(shards.start(number)) for number in range(SHARDS)]
            wait_until(lambda: endpoint.journal()["requests"] > 60)
            kill_session(living[0].pid)
            living[0] = stack.enter_context(shards.start(0))
            assert [process.wait(PATIENCE_S) for process in living] == [0] * SHARDS
    at = [event["at"] for event in asked_events(journal)]
    window_s = 15.0
    most = max(sum(begin <= other < begin + window_s for other in at) for begin in at)
    starts = SHARDS + 1
    # A worker begins with one call, and makes up for a pause of 2 s.
    assert most <= rpm / 60 * (window_s + 2) + starts
