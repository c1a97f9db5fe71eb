"""The limit on model calls: how it grows and shrinks, how it is shared, who waits at the gate."""

from __future__ import annotations

import asyncio
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.models.admission import CostEstimate
from agent.models.errors import ModelError
from batch_trajectories.basics.errors import Stopped
from batch_trajectories.config.endpoints import Cost, EndpointLimits
from batch_trajectories.engine.messages import Load, ReportBudget, SetLimits
from batch_trajectories.engine.supervisor.limiter import MAX_COOL_DOWN_S, Limiter
from batch_trajectories.engine.supervisor.limits import RunLimits, describe_calls, divide_calls
from batch_trajectories.engine.worker.budget_share import WorkerBudget
from batch_trajectories.engine.worker.call_limiter import CallLimiter, TokenBucket
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.helpers.builders import completion
from tests.helpers.running import lines, run, write_prompts


class TestLimiter:
    def test_it_doubles_per_round_until_the_first_refusal(self) -> None:
        limiter = Limiter(start=4, ceiling=100)
        for expected in (8, 16, 32, 64, 100, 100):
            limiter.on_replies(limiter.limit, is_needed=True)
            assert limiter.limit == expected
        assert not limiter.is_probed

    def test_it_grows_only_where_calls_wait(self) -> None:
        limiter = Limiter(start=4, ceiling=100)
        limiter.on_replies(50, is_needed=False)
        assert limiter.limit == 4

    def test_a_refusal_cuts_once_per_round(self) -> None:
        """Calls that were sent before the cut say nothing about the limit since."""
        limiter = Limiter(start=100, ceiling=100)
        for _ in range(20):
            limiter.on_refusal(None, sent_at=1.0, now=2.0)
        assert limiter.limit == 85
        limiter.on_refusal(None, sent_at=2.5, now=3.0)
        assert limiter.limit == 72
        assert limiter.refused == 21

    def test_after_a_cut_it_grows_by_one_per_round_and_slowly_where_it_was_refused(self) -> None:
        limiter = Limiter(start=100, ceiling=1000)
        limiter.on_refusal(None, sent_at=0.0, now=1.0)
        rounds = 0
        while limiter.limit < 95:
            limiter.on_replies(limiter.limit, is_needed=True)
            rounds += 1
        assert 9 <= rounds <= 12
        while limiter.limit < 98:
            limiter.on_replies(limiter.limit, is_needed=True)
            rounds += 1
        assert rounds >= 17

    def test_it_never_falls_below_one(self) -> None:
        limiter = Limiter(start=2, ceiling=10)
        for n in range(50):
            limiter.on_refusal(None, sent_at=n + 0.5, now=n + 1.0)
        assert limiter.limit == 1

    @pytest.mark.parametrize(("share", "level"), [(0.03, 4), (0.3, 4), (0.9, 1)])
    def test_a_share_of_calls_that_is_refused_whatever_the_load_leaves_a_few_calls(
        self, share: float, level: int
    ) -> None:
        """One slow reply must not hold up everything; but where most are refused, one is enough."""
        limiter, draw, now, lowest = Limiter(start=64, ceiling=64), random.Random(1), 0.0, 64
        for _ in range(600):
            for _ in range(limiter.limit):
                if draw.random() < share:
                    limiter.on_refusal(None, sent_at=now + 0.1, now=now + 0.2)
                else:
                    limiter.on_replies(1, is_needed=True)
            now += 1.0
            lowest = min(lowest, limiter.limit)
        assert lowest >= 4 if level == 4 else lowest == 1

    @pytest.mark.parametrize(
        ("error", "by_load"),
        [
            (ModelError("overloaded", "503"), 1),
            (ModelError("connection", "no connection", was_sent=False), 1),
            (ModelError("connection", "cut"), 0),
            (ModelError("timeout", "silent"), 0),
            (ModelError("malformed", "no JSON"), 0),
        ],
    )
    def test_only_failures_by_load_hold_it_up(self, error: ModelError, by_load: int) -> None:
        async def fail() -> Load:
            gate = CallLimiter(
                permits=1,
                budget=WorkerBudget(budget=None, report=lambda report: None),
                on_refusal=lambda retry_after_s, sent_at: None,
            )
            permit = await gate.enter(lambda: CostEstimate(None, None, 0))
            permit.leave(error)
            return gate.take_load()

        load = asyncio.run(fail())
        assert (load.failures, load.overloads) == (1, by_load)

    def test_after_failures_the_limit_grows_only_after_enough_replies(self) -> None:
        limiter = Limiter(start=4, ceiling=100)
        limiter.on_failures(1)
        limiter.on_replies(10, is_needed=True)
        assert limiter.limit == 4
        limiter.on_replies(4, is_needed=True)
        assert limiter.limit == 8

    def test_an_outage_holds_it_up_for_some_rounds_only(self) -> None:
        limiter = Limiter(start=40, ceiling=100)
        limiter.on_failures(5000)
        limiter.on_replies(130, is_needed=True)
        assert limiter.limit == 40
        limiter.on_replies(1, is_needed=True)
        assert limiter.limit == 41

    def test_it_grows_beside_a_failure_now_and_then(self) -> None:
        """Two calls in a hundred fail, and few are refused: the limit must not stay at one."""
        limiter = Limiter(start=1, ceiling=64)
        limiter.on_refusal(None, sent_at=0.0, now=1.0)
        for _ in range(200):
            limiter.on_replies(49, is_needed=True)
            limiter.on_failures(1)
        assert limiter.limit > 40

    @pytest.mark.parametrize(("share", "least"), [(0.03, 58), (0.09, 40), (0.17, 30)])
    @pytest.mark.parametrize("seed", range(5))
    def test_refusals_by_chance_leave_the_limit_and_the_other_calls_alone(
        self, share: float, least: int, seed: int
    ) -> None:
        """They are as many after a cut as before, so the endpoint is not full."""
        limiter, draw, now = Limiter(start=64, ceiling=80), random.Random(seed), 0.0
        limits, pauses_s = [], 0.0
        for _ in range(300):
            for _ in range(limiter.limit):
                if draw.random() < share:
                    limiter.on_refusal(1.0, sent_at=now + 0.1, now=now + 0.2)
                else:
                    limiter.on_replies(1, is_needed=True)
            pauses_s += max(0.0, limiter.cool_down_until - now - 0.2)
            now += 2.0
            limits.append(limiter.limit)
        assert sum(limits[20:]) / len(limits[20:]) >= least
        assert share > 0.03 or pauses_s < 10

    def test_a_cut_for_the_first_call_is_undone_when_others_are_answered(self) -> None:
        limiter = Limiter(start=64, ceiling=1000)
        limiter.on_refusal(None, sent_at=0.0, now=0.1)
        assert limiter.limit == 54
        limiter.on_replies(100, is_needed=True)
        limiter.on_refusal(None, sent_at=0.2, now=0.3)
        assert limiter.limit == 64
        limiter.on_replies(64, is_needed=True)
        assert limiter.limit == 128, "no limit is known"

    @pytest.mark.parametrize("start", [10, 64, 256])
    def test_a_full_endpoint_is_still_found(self, start: int) -> None:
        """It refuses what is beyond 40 calls in flight."""
        limiter, now, refused, answered = Limiter(start=start, ceiling=256), 0.0, 0, 0
        for turn in range(300):
            sent = limiter.limit
            for _ in range(max(0, sent - 40)):
                limiter.on_refusal(None, sent_at=now + 0.1, now=now + 0.2)
            limiter.on_replies(min(sent, 40), is_needed=True)
            if turn > 100:
                refused, answered = refused + max(0, sent - 40), answered + min(sent, 40)
            now += 1.0
        assert 36 <= limiter.limit <= 46
        assert refused / (refused + answered) < 0.06

    def test_a_retry_after_of_one_call_among_many_pauses_none_of_the_others(self) -> None:
        limiter = Limiter(start=64, ceiling=64)
        limiter.on_replies(200, is_needed=True)
        limiter.on_refusal(30.0, sent_at=0.0, now=1.0)
        assert limiter.cool_down_until < 1.0
        assert limiter.limit == 64
        for _ in range(20):
            limiter.on_refusal(30.0, sent_at=0.5, now=1.5)
        assert limiter.cool_down_until == 31.5
        assert limiter.limit < 64

    @pytest.mark.parametrize(("seconds", "pause"), [(2.0, 2.0), (86_400.0, MAX_COOL_DOWN_S)])
    def test_a_retry_after_pauses_all_calls(self, seconds: float, pause: float) -> None:
        limiter = Limiter(start=4, ceiling=4)
        limiter.on_refusal(seconds, sent_at=0.0, now=100.0)
        limiter.on_refusal(0.5, sent_at=0.0, now=100.0)
        assert limiter.cool_down_until == 100.0 + pause


@given(st.integers(0, 500), st.lists(st.integers(0, 300), min_size=1, max_size=9))
def test_shares_sum_to_the_limit_and_serve_demand_first(limit: int, demands: list[int]) -> None:
    shares = divide_calls(limit, demands)
    assert sum(shares) == limit
    pairs = list(zip(shares, demands, strict=True))
    short = [share for share, wanted in pairs if share < wanted]
    if short:
        assert all(share <= wanted for share, wanted in pairs)
        assert max(shares) <= min(short) + len(shares)


def test_a_limit_below_the_number_of_workers_starves_none() -> None:
    shares = [divide_calls(1, [5, 5, 5], turn=turn) for turn in range(3)]
    assert [sum(of_worker) for of_worker in zip(*shares, strict=True)] == [1, 1, 1]
    assert divide_calls(1, [0, 5, 0], turn=2) == [0, 1, 0]


REPLY = completion(usage={"input_tokens": 30, "output_tokens": 10}, cost_usd=0.5)


def open_gate(**more: Any) -> CallLimiter:
    budget = WorkerBudget(budget=None, report=lambda told: None)
    return CallLimiter(**{"permits": 1, "budget": budget, "on_refusal": lambda *_: None, **more})


def no_claim() -> CostEstimate:
    raise AssertionError("nothing depends on it, and counting costs time")


class TestGate:
    def test_permits_limit_calls_in_flight_first_come_first_served(self) -> None:
        async def use() -> list[int]:
            gate = open_gate(permits=2)
            order: list[int] = []

            async def attempt(n: int) -> None:
                permit = await gate.enter(no_claim)
                order.append(n)
                assert gate.take_load().in_flight <= 2
                await asyncio.sleep(0)
                permit.leave(REPLY)

            await asyncio.gather(*map(attempt, range(9)))
            assert gate.take_load().in_flight == 0
            return order

        assert asyncio.run(use()) == list(range(9))

    def test_a_waiter_that_is_called_off_takes_no_permit(self) -> None:
        async def use() -> None:
            gate = open_gate()
            permit = await gate.enter(no_claim)
            waiters = [asyncio.create_task(gate.enter(no_claim)) for _ in range(3)]
            await asyncio.sleep(0)
            waiters[0].cancel()
            permit.leave(REPLY)
            waiters[1].cancel()
            await asyncio.gather(*waiters[:2], return_exceptions=True)
            await asyncio.wait_for(waiters[2], 5)
            assert gate.take_load().in_flight == 1

        asyncio.run(use())

    def test_refusals_are_reported_at_once_and_failures_counted(self) -> None:
        events: list[tuple[float | None, float]] = []

        async def use() -> list[float]:
            gate = open_gate(permits=3, on_refusal=lambda *refusal: events.append(refusal))
            sent = []
            for error in (
                ModelError("rate_limited", "", retry_after_s=2.0),
                ModelError("overloaded", ""),
                ModelError("bad_request", ""),
            ):
                permit = await gate.enter(no_claim)
                sent.append(permit.sent_at)
                permit.leave(error)
            load = gate.take_load()
            assert (load.replies, load.failures) == (0, 1)
            assert not gate.has_answered
            return sent

        sent = asyncio.run(use())
        assert events == [(2.0, sent[0])]

    def test_a_cool_down_ends_by_itself(self) -> None:
        async def use() -> None:
            gate = open_gate(permits=0)
            waiter = asyncio.create_task(gate.enter(no_claim))
            await asyncio.sleep(0)
            gate.allow(1, cool_down_s=0.05)
            await asyncio.sleep(0)
            assert not waiter.done()
            await asyncio.wait_for(waiter, 5)

        asyncio.run(use())

    def test_calls_during_a_cool_down_start_when_it_is_over(self) -> None:
        async def use() -> None:
            gate = open_gate()
            gate.allow(1, cool_down_s=0.05)
            await asyncio.wait_for(gate.enter(no_claim), 5)

        asyncio.run(use())

    def test_after_its_part_of_shared_rates_has_ended_no_call_goes_until_it_has_a_new_one(
        self,
    ) -> None:
        async def use() -> None:
            gate = open_gate()
            gate.allow(1, cool_down_s=0.0, rates_s=0.0)
            waiter = asyncio.create_task(gate.enter(no_claim))
            await asyncio.sleep(0)
            assert not waiter.done()
            gate.allow(1, cool_down_s=0.0, rates_s=60.0)
            await asyncio.wait_for(waiter, 5)

        asyncio.run(use())

    def test_stopping_turns_all_away(self) -> None:
        async def use() -> None:
            gate = open_gate(permits=0)
            waiter = asyncio.create_task(gate.enter(no_claim))
            await asyncio.sleep(0)
            gate.stop()
            with pytest.raises(Stopped):
                await waiter
            with pytest.raises(Stopped):
                await gate.enter(no_claim)

        asyncio.run(use())

    def test_tokens_per_minute_hold_back_what_comes_too_early(self) -> None:
        """60 per second: the first call leaves a debt, which the true count makes smaller."""

        async def use() -> None:
            gate = open_gate(permits=9, tpm=3600.0)
            permit = await gate.enter(lambda: CostEstimate(None, None, 60 * 3600))
            waiter = asyncio.create_task(gate.enter(lambda: CostEstimate(None, None, 1)))
            await asyncio.sleep(0)
            assert not waiter.done()
            permit.leave(REPLY)
            await asyncio.wait_for(waiter, 5)

        asyncio.run(use())


def test_a_call_that_waits_for_budget_reserves_what_is_known_at_its_turn() -> None:
    """A call before it has shown that its model costs more than was expected."""
    reports: list[ReportBudget] = []
    usd = 1.0

    async def use() -> None:
        nonlocal usd
        budget = WorkerBudget(budget=Cost(usd=9.0), report=reports.append)
        gate = CallLimiter(permits=9, budget=budget, on_refusal=lambda *_: None)
        waiter = asyncio.create_task(gate.enter(lambda: CostEstimate(usd, 1, 1)))
        await asyncio.sleep(0)
        usd = 3.0
        budget.take_grant(Cost(usd=2.5))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiter.done()
        assert reports[-1].needs == [Cost(0.5)]
        budget.take_grant(Cost(usd=0.5))
        permit = await waiter
        assert permit.worst_case == Cost(usd=3.0)
        permit.leave(None)
        budget.close()

    asyncio.run(use())
    assert reports[-1].returned == Cost()


class TestPace:
    def test_what_is_taken_is_waited_off_before_the_next(self) -> None:
        pace = TokenBucket(60.0, now=0.0)
        assert pace.wait_s(now=0.0) == 0.0
        pace.take(1)
        assert pace.wait_s(now=0.0) == pytest.approx(1.0, abs=0.01)
        pace.take(10)
        assert pace.wait_s(now=0.0) == pytest.approx(11.0, abs=0.01)
        assert pace.wait_s(now=11.5) == 0.0

    def test_workers_take_their_first_turns_one_after_the_other(self) -> None:
        """12 per minute among 4 workers: 3 a minute each, and never more than 12 together."""
        starts = [TokenBucket(3.0, now=0.0, initial=1 - n / 4).wait_s(now=0.0) for n in range(4)]
        assert starts == pytest.approx([0.0, 5.0, 10.0, 15.0], abs=0.01)

    def test_what_was_not_used_is_not_made_up_for(self) -> None:
        pace = TokenBucket(600.0, now=0.0)
        taken = 0
        while not pace.wait_s(now=3600.0):
            pace.take(1)
            taken += 1
        assert taken <= 11

    def test_over_a_minute_it_is_as_much_as_was_allowed(self) -> None:
        pace, now, taken = TokenBucket(300.0, now=0.0), 0.0, 0
        while now < 60:
            if wait_s := pace.wait_s(now=now):
                now += wait_s
            else:
                pace.take(1)
                taken += 1
        assert 295 <= taken <= 307

    def test_without_a_limit_nothing_waits(self) -> None:
        pace = TokenBucket(None, now=0.0)
        pace.take(10**9)
        assert pace.wait_s(now=0.0) == 0.0
        pace.change(60.0, now=0.0)
        assert pace.wait_s(now=0.0) > 0

    def test_what_was_sent_without_a_limit_is_no_debt(self) -> None:
        """`limits --rpm` of a run without one: the next call waits its turn, not for all before."""
        pace = TokenBucket(None, now=0.0)
        pace.take(1000)
        pace.change(60.0, now=5.0)
        assert pace.wait_s(now=5.0) == pytest.approx(1.0, abs=0.01)


class FakeWorker:
    """A worker that starts as many calls as it may, and ends them when the test says so."""

    ready = True

    def __init__(self) -> None:
        self.permits = self.in_flight = self.told = 0
        self.sent: list[SetLimits] = []

    def send(self, message: SetLimits) -> None:
        self.sent.append(message)

    def take_in(self) -> None:
        for message in self.sent:
            self.permits, self.told = message.permits, message.number
            self.in_flight = max(self.in_flight, self.permits)
        self.sent.clear()

    def load(self, replies: int) -> Load:
        return Load(in_flight=self.in_flight, waiting=20, limits_number=self.told, replies=replies)


@given(limit=st.integers(1, 12), moves=st.lists(st.tuples(st.integers(0, 3), st.booleans())))
def test_calls_of_all_workers_together_never_exceed_the_limit(
    limit: int, moves: list[tuple[int, bool]]
) -> None:
    """However late workers learn their shares, and in any order of ending calls."""
    limits = RunLimits({"u k": EndpointLimits(start=limit, ceiling=limit, rpm=None, tpm=None)})
    workers: list[Any] = [FakeWorker() for _ in range(4)]
    for number, ends in moves:
        limits.share(workers)
        worker = workers[number]
        worker.take_in()
        if ends and worker.in_flight > worker.permits:
            worker.in_flight -= 1
        limits.on_load(worker, "u k", worker.load(1))
        assert sum(one.in_flight for one in workers) <= limit
    for _ in range(3):  # and all of it is used
        limits.share(workers)
        for worker in workers:
            worker.take_in()
            worker.in_flight = min(worker.in_flight, worker.permits)
            limits.on_load(worker, "u k", worker.load(0))
    limits.share(workers)
    for worker in workers:
        worker.take_in()
    assert sum(worker.permits for worker in workers) == limit


@pytest.mark.slow
def test_a_limit_on_calls_in_flight_holds_across_workers(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 16)
    with FakeEndpoint(turns=1, latency_s=0.3) as endpoint:
        done = run(
            tmp_path,
            dataset_file="p.jsonl",
            run_name="r",
            model="m",
            key_env="none",
            base_url=endpoint.openai_url,
            enabled_toolsets="none",
            num_workers=4,
            max_in_flight=2,
        )
        assert done.returncode == 0, done.stderr
        assert endpoint.journal()["max_in_flight"] == 2


@pytest.mark.slow
def test_a_run_finds_the_limit_of_its_endpoint(tmp_path: Path) -> None:
    """Every conversation completes; no refusal uses up an attempt; the summary says what held."""
    write_prompts(tmp_path / "p.jsonl", 60)
    with FakeEndpoint(
        turns=3,
        latency_s=0.05,
        capacity=6,
        tool="write_file",
        arguments='{"path": "n{turn}", "content": "{turn}"}',
    ) as endpoint:
        done = run(
            tmp_path,
            dataset_file="p.jsonl",
            run_name="r",
            model="m",
            key_env="none",
            base_url=endpoint.openai_url,
            enabled_toolsets="file",
            num_workers=2,
            batch_size=15,
        )
        journal = endpoint.journal()
    assert done.returncode == 0, done.stderr
    assert len(lines(tmp_path / "trajectories" / "r.jsonl")) == 60
    assert journal["faults"]["http429"] > 0
    log = (tmp_path / "trajectories" / "r" / "run.log").read_text()
    assert "limited by endpoint" in log


def test_workers_that_use_up_their_cores_are_what_limits() -> None:
    limits = RunLimits({"u k": EndpointLimits(start=9, ceiling=9, rpm=None, tpm=None)})
    for _ in range(3):
        limits.on_busy(0.4)
    assert limits.describe() == ""
    for _ in range(20):
        limits.on_busy(0.98)
    assert limits.describe() == "workers at 97% of a core"
    assert limits.report()[0]["limited_by"] == "workers"


@pytest.mark.parametrize(
    ("conversations", "tool_calls", "limited_by"),
    [
        (0, 0, "conversations"),
        (3, 5, "conversations"),
        (9, 5, "tools"),
        (9, 0, "between_calls"),
    ],
)
def test_a_run_is_limited_only_by_what_it_has(
    conversations: int, tool_calls: int, limited_by: str
) -> None:
    """A run without tool calls is not limited by tools, three conversations not by a limit of 9."""
    limits = RunLimits({"u k": EndpointLimits(start=9, ceiling=9, rpm=None, tpm=None)})
    limits.on_conversations(conversations)
    limits.on_conversations(0)
    limits.on_tool_calls(tool_calls)
    report = limits.report()[0]
    assert report["limited_by"] == limited_by
    assert ("tool" in describe_calls(report)) == (limited_by == "tools")


def test_a_pause_of_the_endpoint_is_told() -> None:
    limits = RunLimits({"u k": EndpointLimits(start=9, ceiling=9, rpm=None, tpm=None)})
    assert limits.pause_s() == 0.0
    limits.on_refusal("u k", retry_after_s=60.0, sent_at=time.monotonic())
    assert 50.0 < limits.pause_s() <= 60.0
    assert re.search(r"paused by the endpoint for [56]\d s", limits.describe())
