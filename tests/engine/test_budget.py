"""The budget of a run: lent in shares, kept by the worst case, exact over all starts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.gateway.relay import read_free_reply
from agent.messages.message import Message
from agent.models.admission import CostEstimate
from agent.models.client.relayed import RelayRequest
from agent.models.dialects.openai_chat import read_reply
from agent.models.errors import Kind, ModelError
from agent.models.model import ModelSettings, Price, Request
from agent.models.prices import Reserves, estimate_cost
from batch_trajectories.basics.errors import Stopped
from batch_trajectories.config.endpoints import Cost
from batch_trajectories.engine.messages import GrantBudget, ReclaimBudget, ReportBudget
from batch_trajectories.engine.supervisor.budget import BudgetLog, RunBudget, sum_up_earlier_starts
from batch_trajectories.engine.worker.budget_share import WorkerBudget
from batch_trajectories.records.journal import Inflight
from batch_trajectories.records.records import load_index
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.helpers.builders import completion
from tests.helpers.running import (
    PATIENCE_S,
    WRITE_A_NOTE,
    kill_session,
    lines,
    run,
    started,
    summary,
    wait_until,
    workers_of,
    write_prompts,
)


def reply(cost_usd: float | None = 0.25, tokens: tuple[int | None, int | None] = (70, 30)) -> Any:
    usage = {"input_tokens": tokens[0], "output_tokens": tokens[1]}
    return completion(usage=usage, cost_usd=cost_usd)


def make_error(kind: Kind, **facts: Any) -> ModelError:
    error = ModelError(kind, "")
    for name, value in facts.items():
        setattr(error, name, value)
    return error


class TestClaim:
    SETTINGS = ModelSettings(
        name="claude-sonnet-4-5",
        api="anthropic_messages",
        base_url=None,
        key_env=None,
        provider="anthropic",
        max_tokens=1000,
    )

    def ask(self, **changed: Any) -> CostEstimate:
        request = Request([Message(role="user", content="é" * 5000)])
        return estimate_cost(request, replace(self.SETTINGS, **changed))

    def test_it_is_above_what_any_tokenizer_makes_of_the_request(self) -> None:
        claim = self.ask()
        assert claim.tokens is not None
        assert 10_000 + 1000 < claim.tokens < 14_000
        assert 2000 < claim.likely_input_tokens < 3000

    def test_dollars_count_all_input_as_written_into_the_cache(self) -> None:
        claim = self.ask()
        assert claim.usd is not None
        assert claim.tokens is not None
        # $3.75 per million tokens written into the cache, $15 per million of the reply
        assert claim.usd == pytest.approx((claim.tokens - 1000) * 3.75e-6 + 1000 * 15e-6)

    def test_without_a_limit_or_a_price_nothing_is_known(self) -> None:
        assert self.ask(max_tokens=None, api="openai_chat")[:2] == (None, None)
        assert self.ask(name="nobody-knows", provider=None).usd is None
        assert self.ask(name="nobody-knows", provider=None).tokens is not None

    @pytest.mark.parametrize(
        "extra_body",
        [
            {"cache_control": {"type": "ephemeral", "ttl": "1h"}},
            {"system": [{"type": "text", "text": "x", "cache_control": {"ttl": "1h"}}]},
        ],
    )
    def test_a_cache_of_an_hour_costs_twice_the_input(self, extra_body: Any) -> None:
        """Of the table and of own prices, in our requests, batches and those of agents."""
        request = Request([Message(role="user", content="é" * 5000)])
        settings = replace(self.SETTINGS, extra_body=extra_body)
        claim = estimate_cost(request, settings)
        assert claim.tokens is not None
        right = (claim.tokens - 1000) * 6e-6 + 1000 * 15e-6
        assert claim.usd == pytest.approx(right)
        assert estimate_cost(request, settings, by_batch=True).usd == pytest.approx(right / 2)
        own = replace(settings, prices={settings.name: Price(1.0, 2.0, 0.1, 1.25)})
        right = (claim.tokens - 1000) * 2e-6 + 1000 * 2e-6
        assert estimate_cost(request, own).usd == pytest.approx(right)

        def relayed(body: Any) -> CostEstimate:
            content = json.dumps(body).encode()
            asked = RelayRequest(
                path="", body=content, headers={}, max_tokens=1000, read=read_free_reply
            )
            claim = estimate_cost(asked, self.SETTINGS)
            assert claim.tokens is not None
            assert claim.usd is not None
            return claim._replace(usd=(claim.usd - 1000 * 15e-6) / (claim.tokens - 1000))

        assert relayed({"messages": [], **extra_body}).usd == pytest.approx(6e-6)
        said = "{'ttl': \"1h\"}"  # in a text it asks for nothing
        plain = {"cache_control": {"ttl": "5m"}, "messages": [{"content": said}]}
        assert relayed(plain).usd == pytest.approx(3.75e-6)

    def test_each_of_several_replies_may_be_as_long_as_the_limit(self) -> None:
        one, four = self.ask(), self.ask(extra_body={"n": 4})
        assert one.tokens is not None
        assert four.tokens is not None
        assert 3000 <= four.tokens - one.tokens < 3100

    def test_a_fee_of_openrouter_is_reserved(self) -> None:
        given = {"name": "anthropic/claude-sonnet-4.5", "provider": "openrouter"}
        claim = self.ask(**given)
        assert claim.tokens is not None
        right = 1.05 * ((claim.tokens - 1000) * 3.75e-6 + 1000 * 15e-6)
        assert claim.usd == pytest.approx(right)

    def test_more_is_reserved_once_a_call_has_used_more_than_its_own(self) -> None:
        request = Request([Message(role="user", content="x")])
        reserves = Reserves(self.SETTINGS)
        estimate = reserves.estimate(request)
        assert reserves.worst_case(estimate) == estimate
        assert estimate.usd is not None
        assert estimate.tokens is not None
        for factor in (0.5, 3.0, 2.0):
            reserves.learn(estimate, reply(factor * estimate.usd, (4 * estimate.tokens, 0)))
        raised = reserves.worst_case(estimate)
        assert raised.usd == pytest.approx(3 * estimate.usd)
        assert raised.tokens == 4 * estimate.tokens
        reserves.learn(estimate, reply(None, (None, None)))
        assert reserves.worst_case(estimate) == raised

    def test_max_tokens_in_the_extra_body_counts(self) -> None:
        claim = self.ask(extra_body={"max_tokens": 50_000})
        assert claim.tokens is not None
        assert claim.tokens > 60_000


class TestWorkerBudget:
    """One worker's side."""

    def test_the_unused_reserve_of_a_call_is_available_to_the_next(self) -> None:
        events: list[ReportBudget] = []

        async def use() -> None:
            budget = WorkerBudget(budget=Cost(usd=5.0), report=events.append)
            first = asyncio.create_task(budget.reserve(Cost(usd=1.0)))
            second = asyncio.create_task(budget.reserve(Cost(usd=1.0)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            budget.take_grant(Cost(usd=1.5))
            await asyncio.sleep(0)
            assert (first.done(), second.done()) == (True, False)
            budget.settle(Cost(usd=1.0), reply(0.25))
            await second

        asyncio.run(use())
        assert events[0].wanted == Cost(2.0)
        assert events[0].needs == [Cost(1.0)]

    @pytest.mark.parametrize(
        ("outcome", "spent"),
        [
            (reply(0.25), 0.25),
            (reply(None), 1.0),
            (ModelError("rate_limited", ""), 0.0),
            (ModelError("overloaded", ""), 0.0),
            (ModelError("connection", "", was_sent=False), 0.0),
            (ModelError("connection", ""), 1.0),
            (ModelError("timeout", ""), 1.0),
            (ModelError("malformed", ""), 1.0),
            (None, 1.0),
            (make_error("overloaded", had_begun=True), 1.0),
            (make_error("rate_limited", had_begun=True), 1.0),
            (make_error("context_exceeded", paid=reply(0.25)), 1.0),
            *((make_error("overloaded", reply=(status, b"")), 1.0) for status in (408, 504, 524)),
            *((make_error("overloaded", reply=(status, b"")), 0.0) for status in (500, 502, 529)),
            (reply(0.25, (0, 30)), 1.0),
            (reply(1.25, (0, 30)), 1.25),
            (reply(0.0, (0, 0)), 0.0),
            (reply(0.25, (None, None)), 0.25),
        ],
    )
    def test_an_unknown_cost_counts_as_the_worst_case(self, outcome: Any, spent: float) -> None:
        events: list[ReportBudget] = []

        async def use() -> None:
            budget = WorkerBudget(budget=Cost(usd=5.0), report=events.append)
            budget.take_grant(Cost(usd=2.0))
            await budget.reserve(Cost(usd=1.0))
            budget.settle(Cost(usd=1.0), outcome)
            budget.reclaim()
            await asyncio.sleep(0)

        asyncio.run(use())
        assert events[-1].returned == Cost(2.0 - spent)

    def test_a_reserve_of_an_earlier_start_serves_only_its_call(self) -> None:
        events: list[ReportBudget] = []

        async def use() -> None:
            budget = WorkerBudget(budget=Cost(usd=5.0), report=events.append)
            budget.take_over(Cost(usd=1.0))
            assert not budget.try_to_reserve(Cost(usd=0.5))
            budget.settle(Cost(usd=1.0), reply(0.25))
            assert budget.try_to_reserve(Cost(usd=0.5))
            budget.close()

        asyncio.run(use())
        assert events[-1].returned == Cost(0.25)

    def test_waiting_calls_are_refused_when_the_run_stops(self) -> None:
        async def use() -> None:
            budget = WorkerBudget(budget=Cost(tokens=5), report=lambda told: None)
            waiter = asyncio.create_task(budget.reserve(Cost(tokens=1)))
            await asyncio.sleep(0)
            budget.stop()
            with pytest.raises(Stopped):
                await waiter
            with pytest.raises(Stopped):
                await budget.reserve(Cost())

        asyncio.run(use())


def test_what_was_spent_without_a_budget_adds_to_unknown_costs_of_later_starts(
    tmp_path: Path,
) -> None:
    """The log has these alone; what records of an earlier start say must not hide them."""

    def left(known_usd: float) -> float:
        budget_log = BudgetLog(tmp_path, tmp_path)
        spent = max(known_usd, budget_log.balance.usd)
        budget = RunBudget(Cost(10.0), spent=Cost(spent), budget_log=budget_log)
        budget_log.append("lent", Cost(2.0))  # by a call that was cut off: no record says it
        budget_log.close()
        assert budget.budget is not None
        return 10.0 - spent

    assert [left(5.0), left(5.0), left(5.0)] == [5.0, 3.0, 1.0]


class Worker:
    """A worker's budget with calls of random size, and the pipe to its parent."""

    ready = True

    def __init__(self, bounds: Cost) -> None:
        self.to_parent: list[ReportBudget] = []
        self.from_parent: list[GrantBudget | ReclaimBudget] = []
        self.budget = WorkerBudget(budget=bounds, report=self.to_parent.append)

    def send(self, message: GrantBudget | ReclaimBudget) -> None:
        self.from_parent.append(message)

    def receive(self) -> None:
        for message in self.from_parent:
            if isinstance(message, GrantBudget):
                self.budget.take_grant(message.amount)
            else:
                self.budget.reclaim()
        self.from_parent.clear()


@given(
    cap=st.integers(1, 400),
    workers=st.integers(1, 3),
    calls=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), max_size=60),
    order=st.randoms(use_true_random=False),
)
def test_the_budget_is_never_overshot_and_never_stuck(
    cap: int, workers: int, calls: list[tuple[int, int]], order: Any
) -> None:
    """All calls are made, or the rest could not be paid for in the worst case."""

    async def play() -> tuple[int, bool]:
        bounds = Cost(tokens=cap)
        budget_log = BudgetLog(Path(directory), Path(directory))
        budget = RunBudget(bounds, spent=Cost(), budget_log=budget_log)
        hands: Any = [Worker(bounds) for _ in range(workers)]
        spent = [0]

        async def call(worker: Worker, reserve: int, used: int) -> None:
            await worker.budget.reserve(Cost(tokens=reserve))
            for _ in range(order.randrange(4)):
                await asyncio.sleep(0)
            used = min(reserve, used)
            spent[0] += used
            assert spent[0] <= cap
            worker.budget.settle(Cost(tokens=reserve), reply(0.0, (used, 0)))

        tasks = [asyncio.create_task(call(order.choice(hands), *sizes)) for sizes in calls]
        used_up = None
        while tasks and used_up is None and not all(task.done() for task in tasks):
            for worker in order.sample(hands, len(hands)):
                for told in worker.to_parent:
                    budget.on_worker_budget(worker, told)
                worker.to_parent.clear()
                budget.grant_shares(hands)
                worker.receive()
                await asyncio.sleep(0)
            used_up = budget.used_up(hands)
        for worker in hands:
            worker.budget.stop()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(result is None or isinstance(result, Stopped) for result in results), results
        waiting = [reserve for (reserve, _), result in zip(calls, results, strict=True) if result]
        if waiting:
            assert used_up is not None
            assert f"{spent[0]:,} of {cap:,} tokens" in used_up
            assert min(waiting) > cap - spent[0]
        for worker in hands:
            worker.budget.close()
            for told in worker.to_parent:
                budget.on_worker_budget(worker, told)
        assert budget_log.balance == Cost(tokens=spent[0])
        budget_log.close()
        assert BudgetLog(Path(directory), Path(directory)).balance == budget_log.balance
        return spent[0], bool(waiting)

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(asyncio.wait_for(play(), 20))


@pytest.mark.slow
def test_a_run_stops_at_its_budget_and_resumes_with_a_higher_one(tmp_path: Path) -> None:
    """256 conversations in flight, and a cap that falls into the middle of them."""
    write_prompts(tmp_path / "p.jsonl", 256)
    dataset = {"dataset_file": "p.jsonl", "run_name": "r", "enabled_toolsets": "file"}
    with FakeEndpoint(turns=3, latency_s=0.5, answers=0, **WRITE_A_NOTE) as endpoint:
        options: dict[str, Any] = {
            **dataset,
            "model": "openai:gpt-4o",
            "base_url": endpoint.openai_url,
            "key_env": "none",
            "num_workers": 2,
            "batch_size": 128,
            "max_tokens": 300,
            "start_in_flight": 256,
        }
        with started(tmp_path, **{**options, "run_name": "whole"}) as whole:
            wait_until(lambda: whole.poll() is not None or endpoint.journal()["in_flight"] == 256)
            endpoint.answer(None)
            assert whole.wait(PATIENCE_S) == 0, (tmp_path / "output.txt").read_text()
        cost = summary(tmp_path, "whole")["cost_usd"]
        assert summary(tmp_path, "whole")["last_start"]["calls"][0]["in_flight_max"] == 256

        cap = cost / 2
        stopped = run(tmp_path, **options, max_run_cost_usd=cap)
        assert stopped.returncode == 3, stopped.stderr
        assert "the budget of the run is used up" in stopped.stderr
        assert "Traceback" not in stopped.stderr
        spent = spent_in(tmp_path)
        assert cap * 0.5 < spent <= cap
        again = run(tmp_path, **options, max_run_cost_usd=cap)
        assert again.returncode == 3, again.stderr
        assert spent_in(tmp_path) <= cap
        assert summary(tmp_path, "r")["pending"] > 0

        done = run(tmp_path, **options, max_run_cost_usd=cost * 3)
        assert done.returncode == 0, done.stderr
        assert summary(tmp_path, "r")["cost_usd"] == pytest.approx(cost)
        assert len(lines(tmp_path / "trajectories" / "r.jsonl")) == 256


@pytest.mark.slow
def test_a_worker_that_dies_loses_its_share_of_the_budget_but_not_the_run(tmp_path: Path) -> None:
    """What it had under way may have been charged, so nobody else spends that money."""
    write_prompts(tmp_path / "p.jsonl", 120)
    with FakeEndpoint(turns=3, latency_s=0.05, answers=20, **WRITE_A_NOTE) as endpoint:
        options: dict[str, Any] = {
            "dataset_file": "p.jsonl",
            "run_name": "r",
            "enabled_toolsets": "file",
            "model": "openai:gpt-4o",
            "base_url": endpoint.openai_url,
            "key_env": "none",
            "num_workers": 2,
            "batch_size": 20,
            "max_tokens": 300,
            "max_run_cost_usd": 0.35,
        }
        with started(tmp_path, **options) as process:
            wait_until(lambda: endpoint.journal()["replies"] == 20)
            os.kill(workers_of(process.pid)[0], signal.SIGKILL)
            endpoint.answer(None)
            assert process.wait(PATIENCE_S) in (0, 3)
        assert spent_in(tmp_path) <= 0.35
        assert "died; another worker takes over" in (tmp_path / "output.txt").read_text()
        done = run(tmp_path, **{**options, "max_run_cost_usd": 5})
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_kills_of_the_whole_run_do_not_overshoot_it_either(tmp_path: Path) -> None:
    """What was lent and never given back may have been spent."""
    write_prompts(tmp_path / "p.jsonl", 60)
    with FakeEndpoint(turns=3, latency_s=0.2, text_chars=400, **WRITE_A_NOTE) as endpoint:
        options: dict[str, Any] = {
            "dataset_file": "p.jsonl",
            "run_name": "r",
            "enabled_toolsets": "file",
            "model": "m",
            "base_url": endpoint.openai_url,
            "key_env": "none",
            "num_workers": 2,
            "batch_size": 10,
            "max_tokens": 200,
            "max_run_tokens": 60_000,
        }
        for kill in range(1, 4):
            with started(tmp_path, **options) as process:
                wait_until(
                    lambda run=process, least=15 * kill: (
                        run.poll() is not None or endpoint.journal()["replies"] >= least
                    )
                )
                kill_session(process.pid)
        stopped = run(tmp_path, **options)
        assert stopped.returncode == 3, stopped.stderr
        asked_for = endpoint.journal()["requests"]
    # What each request took, at most, by the count of the endpoint.
    assert asked_for * 600 <= 60_000
    assert "the budget of the run is used up" in stopped.stderr


def test_attempts_that_were_replaced_count(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 4)
    with FakeEndpoint(turns=1, latency_s=0.0, faults={"http403": 0.5}) as endpoint:
        options: dict[str, Any] = {
            "dataset_file": "p.jsonl",
            "run_name": "r",
            "enabled_toolsets": "none",
            "model": "m",
            "base_url": endpoint.openai_url,
            "key_env": "none",
            "num_workers": 1,
        }
        run(tmp_path, **options, max_attempts=1)
    run_dir = tmp_path / "trajectories" / "r"
    entries = [entry for _, entry in load_index(run_dir).records()]
    budget_log = BudgetLog(run_dir, run_dir)
    inflight = Inflight(run_dir / "inflight")
    once = sum_up_earlier_starts(entries, inflight, budget_log)
    assert (
        sum_up_earlier_starts([*entries, *entries], inflight, budget_log).tokens
        == 2 * once.tokens
        > 0
    )
    held = [Cost(tokens=7), Cost(tokens=10**5)]  # beside what is known, and inside what is lent
    amount = sum_up_earlier_starts(entries, inflight, budget_log, held=held)
    assert amount.tokens == once.tokens + 7 + 10**5
    budget_log.append("lent", Cost(tokens=10**6))
    assert sum_up_earlier_starts(entries, inflight, budget_log, held=held).tokens == 10**6
    budget_log.close()


@pytest.mark.parametrize("cost", ["-1.0", "1e999", "true"])
def test_a_cost_that_is_none_is_not_believed(cost: str) -> None:
    body = (
        '{"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}], "usage": '
        f'{{"prompt_tokens": 1, "completion_tokens": 1, "cost": {cost}}}}}'
    )
    assert read_reply(body.encode()).cost_usd is None


def test_a_budget_in_tokens_needs_no_price(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 40)
    with FakeEndpoint(turns=1, latency_s=0.0) as endpoint:
        options: dict[str, Any] = {
            "dataset_file": "p.jsonl",
            "run_name": "r",
            "model": "m",
            "key_env": "none",
            "base_url": endpoint.openai_url,
            "enabled_toolsets": "none",
            "num_workers": 2,
            "max_run_tokens": 3000,
            "max_tokens": 500,
        }
        stopped = run(tmp_path, **options)
        assert stopped.returncode == 3, stopped.stderr
        parsed = summary(tmp_path, "r")
        assert 0 < parsed["input_tokens"] + parsed["output_tokens"] <= 3000
        assert 0 < parsed["done"] < 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "m", "max_run_cost_usd": 1, "max_tokens": 9}, "the price of model 'm'"),
        ({"model": "openai:gpt-4o", "max_run_cost_usd": 1}, "max_tokens is missing"),
        ({"model": "m", "max_run_tokens": 1000}, "max_tokens is missing"),
        (
            {"model": "m", "max_run_tokens": 1000, "extra_body": '{"max_tokens": null}'},
            "max_tokens is missing",
        ),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    write_prompts(tmp_path / "p.jsonl", 1)
    refused = run(
        tmp_path,
        "--dry_run",
        dataset_file="p.jsonl",
        run_name="r",
        enabled_toolsets="none",
        key_env="none",
        base_url="http://127.0.0.1:9/v1",
        **options,
    )
    assert refused.returncode == 2
    assert message in refused.stderr


def spent_in(tmp_path: Path) -> float:
    """Dollars in the records and in the journals of what is under way."""
    run_dir = tmp_path / "trajectories" / "r"
    journaled = {
        (line["task"], line["position"]): line["event"].get("cost_usd") or 0.0
        for segment in (run_dir / "inflight").glob("*.jsonl")
        for line in lines(segment)
    }
    finished = {record["id"]: record["cost_usd"] for record in lines(run_dir / "records.jsonl")}
    under_way = (cost for (task, _), cost in journaled.items() if task not in finished)
    return float(sum(finished.values()) + sum(under_way))
