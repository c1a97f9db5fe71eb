"""What a run may spend, and at what rate: never more than all of them together may."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.basics.errors import EnvironmentStop, RunDirError, RunLocked
from batch_trajectories.config.endpoints import Cost, EndpointLimits
from batch_trajectories.engine import shared_limits as module
from batch_trajectories.engine.messages import SetLimits
from batch_trajectories.engine.shared_limits import Ledger, Member, SharedLimits
from batch_trajectories.engine.supervisor.limits import RunLimits
from batch_trajectories.records.names import SHARED_NOTE
from tests.engine.test_limiter import FakeWorker
from tests.helpers.running import wait_until

LIMIT = Cost(tokens=1000)


class Runs:
    """Runs that share limits, each in a directory of its own."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.shared = str(place / "shared")
        self.begun: list[SharedLimits] = []
        self.said: list[str] = []

    def start(
        self, name: str, *, spent: int = 0, parts: int = 1, limit: Cost = LIMIT
    ) -> SharedLimits:
        run_dir = self.place / name
        run_dir.mkdir(exist_ok=True)
        (run_dir / "lock").touch()
        run = SharedLimits(self.shared, run_dir, limit, parts=parts, say=self.said.append)
        self.counted = run.join(Cost(tokens=spent)).tokens
        run.begin()
        self.begun.append(run)
        return run

    def accounts(self) -> dict[str, int]:
        ledger = Ledger(self.shared)
        ledger.refresh()
        return {member.name: member.tokens for member in ledger.members.values()}

    def shares(self) -> dict[str, float]:
        ledger = Ledger(self.shared)
        ledger.refresh()
        return {member.name: member.share for member in ledger.members.values()}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(module, "_SETTLE_S", 0.01)
    runs = Runs(tmp_path)
    yield runs
    for run in runs.begun:
        die(run)


def die(run: SharedLimits) -> None:
    """As if its process were killed: it writes nothing more."""
    with run._news:
        run._is_stopping = True
        run._news.notify()
    assert run._thread is not None
    run._thread.join()


def grant(run: SharedLimits, need: int, *, returned: int = 0) -> int:
    """What a run gets when it needs so much; 0 if that is refused."""
    run.ask(Cost(tokens=need), returned=Cost(tokens=returned), waits=False)
    got = Cost()

    def is_answered() -> bool:
        nonlocal got
        got += run.take()
        return got != Cost() or run.is_refused

    wait_until(is_answered)
    run.ask(None, returned=Cost(), waits=False)
    return got.tokens


def test_a_run_takes_a_part_of_what_is_left_and_never_more(runs: Runs) -> None:
    first = runs.start("a")
    assert grant(first, 10) == 1000 // 8
    second = runs.start("b")
    assert grant(second, 10) == (1000 - 125) // 16
    assert grant(second, 900) == 0
    assert grant(second, 800) == 800
    assert grant(first, 10, returned=0) > 0
    assert sum(runs.accounts().values()) <= 1000
    first.close(Cost(tokens=100))
    assert grant(second, 100) >= 100


def test_what_a_killed_run_has_not_spent_comes_back_where_it_is_started_again(runs: Runs) -> None:
    first = runs.start("a")
    assert grant(first, 600) == 600
    die(first)
    second = runs.start("b")
    assert grant(second, 500) == 0
    runs.start("a", spent=50)
    assert runs.counted == 50
    assert grant(second, 500) == 500
    assert runs.accounts() == {"a": 50, "b": 500}


def test_a_start_that_is_killed_as_it_joins_is_no_other_member_later(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "lock").touch()
    shared = str(tmp_path / "shared")
    for spent in (5, 7):  # the first is killed before it begins
        counted = SharedLimits(shared, tmp_path / "a", LIMIT, parts=1).join(Cost(tokens=spent))
        assert counted.tokens == spent
    ledger = Ledger(shared)
    ledger.refresh()
    assert [member.tokens for member in ledger.members.values()] == [7]


def test_a_run_whose_budget_is_not_that_of_the_others_is_told_of_both(runs: Runs) -> None:
    runs.start("a").close(Cost())
    runs.start("b")
    assert runs.said == []
    runs.start("c", limit=Cost(2.5, 5000))
    runs.start("d", limit=Cost())
    assert [message.partition("; ")[0].partition(": this run ")[2] for message in runs.said] == [
        "has the budget $2.50 and 5,000 tokens, but a has 1,000 tokens",
        "has the budget none, but a has 1,000 tokens",
    ]


def test_entries_of_earlier_versions_have_no_budgets(runs: Runs) -> None:
    ledger = Ledger(runs.shared)
    ledger.append({"x": Member("x", "start", is_open=False)})
    runs.start("a", limit=Cost(5.0))
    assert runs.said == []


@pytest.mark.slow
def test_on_another_disk_all_that_a_run_could_have_spent_counts_as_spent(runs: Runs) -> None:
    first = runs.start("a")
    assert grant(first, 600) == 600
    die(first)
    note = (runs.place / "a" / SHARED_NOTE).read_bytes()
    (runs.place / "a").rename(runs.place / "gone")
    (runs.place / "a").mkdir()
    (runs.place / "a" / SHARED_NOTE).write_bytes(note)
    runs.start("a", spent=50)
    assert runs.counted == 600
    assert runs.accounts() == {"a": 600}


@pytest.mark.slow
def test_of_two_starts_of_a_run_the_first_stops(runs: Runs) -> None:
    first = runs.start("a")
    runs.start("a")
    wait_until(lambda: first.problem is not None)
    assert isinstance(first.problem, RunLocked)


@pytest.mark.slow
def test_only_where_all_runs_wait_the_budget_is_used_up(runs: Runs) -> None:
    first, second = runs.start("a"), runs.start("b")
    assert grant(first, 900) == 900
    for run in (first, second):
        run.ask(Cost(tokens=200), returned=Cost(), waits=run is second)
    wait_until(lambda: second.is_refused and _waits(runs, "b"))
    assert not second.is_used_up
    first.ask(Cost(tokens=200), returned=Cost(), waits=True)
    wait_until(lambda: all(run.is_used_up for run in (first, second)))
    first.ask(Cost(tokens=200), returned=Cost(tokens=400), waits=True)
    wait_until(lambda: not second.is_used_up)


def _waits(runs: Runs, name: str) -> bool:
    ledger = Ledger(runs.shared)
    ledger.refresh()
    return any(member.waits for member in ledger.members.values() if member.name == name)


@pytest.mark.slow
def test_parts_of_the_rates_never_sum_to_more_than_all(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part of a run that died goes to the others, and each new one gets a part."""
    monkeypatch.setattr(module, "_BEAT_S", 0.3)
    monkeypatch.setattr(module, "_ENTRY_EVERY_S", 0.1)
    names = ["a", "b", "c"]
    begun = [runs.start(name, parts=3) for name in names]
    third = 1 / 3
    wait_until(lambda: runs.shares() == pytest.approx(dict.fromkeys(names, third)))
    die(begun[0])
    runs.start("d")
    wait_until(lambda: runs.shares() == pytest.approx({"a": 0, "b": third, "c": third, "d": third}))
    assert rates_of(begun[1]).rpm == pytest.approx(20.0)
    assert rates_of(begun[0]).rates_s == 0.0
    begun[1].close(Cost())
    wait_until(lambda: runs.shares() == pytest.approx({"a": 0, "b": 0, "c": 0.5, "d": 0.5}))
    numbers = sorted(Path(runs.shared).glob("?" * 12))
    ledger = Ledger(runs.shared)
    for path in numbers:
        members = ledger._read(path.read_bytes(), int(path.name)).values()
        assert sum(member.share for member in members) < 1.0001


def rates_of(run: SharedLimits) -> SetLimits:
    """What the only worker of a run is told."""
    of_endpoint = EndpointLimits(start=4, ceiling=4, rpm=60.0, tpm=None)
    worker: Any = FakeWorker()
    RunLimits({"u k": of_endpoint}, run).share([worker])
    sent: SetLimits = worker.sent[0]
    return sent


@pytest.mark.slow
def test_of_runs_that_write_at_once_one_is_first(tmp_path: Path) -> None:
    """Each adds 1 to one account; no addition is lost."""
    place = str(tmp_path / "shared")

    def add() -> None:
        ledger = Ledger(place)
        for _ in range(10):
            while True:
                ledger.refresh()
                tokens = sum(member.tokens for member in ledger.members.values())
                if ledger.append({"a": Member("a", "s", tokens=tokens + 1)}):
                    break

    threads = [threading.Thread(target=add) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ledger = Ledger(place)
    ledger.refresh()
    assert (ledger.number, ledger.members["a"].tokens) == (30, 30)


def test_a_damaged_entry_and_a_place_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path / "shared"))
    assert ledger.append({"a": Member("a", "s")})
    entry = tmp_path / "shared" / "000000000001"
    entry.write_bytes(entry.read_bytes().replace(b'"a"', b'"b"', 1))
    with pytest.raises(RunDirError, match="000000000001: damaged"):
        Ledger(str(tmp_path / "shared")).refresh()
    with pytest.raises(EnvironmentStop, match="File exists"):
        Ledger(str(entry)).append({})


def test_a_damaged_entry_is_named_when_a_run_leaves(runs: Runs) -> None:
    run = runs.start("a")
    newest = max(Path(runs.shared).glob("0*"))
    for later in range(1, 5):  # the run may write an entry of its own at the same time
        newest.with_name(f"{int(newest.name) + later:012}").write_bytes(b"{}\n")
    problem = run.close(Cost())
    assert problem is not None
    assert "damaged" in problem
