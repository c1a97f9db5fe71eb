"""Prices of the user's own: what they decide, and where they are checked and shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from agent.messages.message import Message
from agent.models.model import Completion, ModelSettings, Price, Request
from agent.models.prices import add_cost, estimate_cost, has_known_price, price
from agent.models.resolve import resolve_sibling
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.config.endpoints import PriceConfig
from batch_trajectories.config.fingerprint import data_options
from batch_trajectories.config.loading import load_config
from batch_trajectories.config.models import called_models, set_up_models
from batch_trajectories.config.run_config import RunConfig
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.helpers.builders import completion
from tests.helpers.running import lines, run, write_prompts

LOCAL = {"base_url": "http://127.0.0.1:8000/v1"}
OWN = {"input": 0.5, "output": 1.5}


def config(**fields: Any) -> RunConfig:
    given = {"dataset_file": "p.jsonl", "run_name": "r", "enabled_toolsets": "none", **fields}
    return load_config(None, given)


def settings(**fields: Any) -> ModelSettings:
    return called_models(set_up_models(config(**fields)))[0]


def reply(cost_usd: float | None = None, **counts: int) -> Completion:
    return completion(usage=counts, cost_usd=cost_usd)


class TestWhatACallCosts:
    KNOWN = ModelSettings(
        name="gpt-4o", api="openai_chat", base_url=None, key_env=None, provider="openai"
    )
    OWN = replace(KNOWN, prices={"gpt-4o": Price(2.0, 10.0, 0.5, 3.0)})

    def test_each_kind_of_token_has_its_price(self) -> None:
        amount = price(
            reply(
                input_tokens=1_000_000,
                cache_read_tokens=200_000,
                cache_write_tokens=100_000,
                output_tokens=50_000,
                reasoning_tokens=40_000,  # a part of the output, and no more than that
            ),
            self.OWN,
        )
        assert amount == pytest.approx(0.7 * 2 + 0.2 * 0.5 + 0.1 * 3 + 0.05 * 10)

    def test_calls_by_batches_cost_half(self) -> None:
        said = reply(input_tokens=1_000_000, output_tokens=0)
        assert price(said, self.OWN, by_batch=True) == 1.0

    def test_counts_that_contradict_each_other_leave_it_unknown(self) -> None:
        assert price(reply(input_tokens=1, cache_read_tokens=2, output_tokens=1), self.OWN) is None
        assert price(reply(output_tokens=1), self.OWN) is None

    def test_it_wins_over_the_table_and_over_what_the_endpoint_says(self) -> None:
        said = reply(cost_usd=7.0, input_tokens=1_000_000, output_tokens=0)
        assert add_cost(said, self.OWN).cost_usd == 2.0
        assert add_cost(said, self.KNOWN).cost_usd == 7.0

    def test_a_claim_counts_the_dearest_kind_of_input(self) -> None:
        request = Request([Message(role="user", content="x" * 1000)])
        amount = estimate_cost(request, replace(self.OWN, max_tokens=1000))
        assert amount.usd is not None
        assert amount.tokens is not None
        assert amount.usd == pytest.approx((amount.tokens - 1000) * 3e-6 + 1000 * 10e-6)
        free = replace(self.OWN, prices={"gpt-4o": Price(0, 0, 0, 0)}, max_tokens=9)
        assert estimate_cost(request, free).usd == 0.0

    @pytest.mark.parametrize(("read", "written"), [(None, None), (0.0, 4.0)])
    def test_what_is_left_out_costs_as_input_does(
        self, read: float | None, written: float | None
    ) -> None:
        amount = PriceConfig(input=1.0, output=2.0, cache_read=read, cache_write=written).to_price()
        assert amount == Price(1.0, 2.0, 1.0 if read is None else read, written or 1.0)


class TestWhoseTheyAre:
    def test_a_model_is_named_as_the_user_writes_it_or_as_the_endpoint_knows_it(self) -> None:
        for name in ("openai:gpt-5-mini", "gpt-5-mini"):
            model = settings(model="openai:gpt-5-mini", key_env="none", prices={name: OWN})
            assert model.own_price == Price(0.5, 1.5, 0.5, 0.5)
        assert settings(model="openai:gpt-5", key_env="none", prices={"x": OWN}).own_price is None

    def test_an_endpoint_has_its_own(self) -> None:
        dear = {"input": 5, "output": 6}
        loaded = config(
            models={"gpu1:m": 1, "gpu2:m": 1},
            endpoints={"gpu1": {**LOCAL, "prices": {"m": dear}}, "gpu2": LOCAL},
            prices={"m": OWN},
        )
        one, other = called_models(set_up_models(loaded))
        assert one.own_price == Price(5, 6, 5, 5)
        assert other.own_price == Price(0.5, 1.5, 0.5, 0.5)
        # A sibling at the same endpoint is another model, and what is said of it counts.
        assert resolve_sibling("m", replace(one, name="n")).own_price == one.own_price
        assert resolve_sibling("n", one).own_price is None
        elsewhere = resolve_sibling("openai:m", one)
        assert elsewhere.own_price == Price(0.5, 1.5, 0.5, 0.5)

    def test_they_do_not_affect_the_data(self) -> None:
        plain = config(model="gpu:m", endpoints={"gpu": LOCAL})
        with_prices = config(
            model="gpu:m", endpoints={"gpu": {**LOCAL, "prices": {"m": OWN}}}, prices={"m": OWN}
        )
        assert data_options(plain) == data_options(with_prices)

    @pytest.mark.parametrize(
        ("prices", "message"),
        [
            ({"m": {"input": -1, "output": 1}}, r"m.input: must be at least 0"),
            ({"m": {"input": "inf", "output": 1}}, r"m.input: .*finite"),
            ({"m": {"input": 1}}, r"m.output: is missing"),
            ({"m": {**OWN, "cached": 1}}, r"m.cached: unknown key"),
            ({"m": 3}, r"[ .]m: must be an object"),
        ],
    )
    def test_a_slip_is_named(self, prices: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            config(prices=prices)
        with pytest.raises(ConfigError, match=message):
            config(endpoints={"a": {**LOCAL, "prices": prices}})

    def test_a_free_model_has_a_known_price(self) -> None:
        model = settings(model="m", base_url="http://h/v1", prices={"m": {"input": 0, "output": 0}})
        assert has_known_price(model)


@pytest.mark.slow
def test_a_budget_in_dollars_works_where_only_the_user_knows_the_price(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 20)
    with FakeEndpoint(turns=1, latency_s=0.0) as endpoint:
        asked_for: dict[str, Any] = {
            "dataset_file": "p.jsonl",
            "run_name": "r",
            "enabled_toolsets": "none",
            "model": "m",
            "base_url": endpoint.openai_url,
            "key_env": "none",
            "num_workers": 1,
            "max_tokens": 100,
            "max_run_cost_usd": 100,
            "max_cost_usd": 50,
        }
        refused = run(tmp_path, **asked_for)
        assert refused.returncode == 2
        assert "prices: {m: {input: ..., output: ...}}" in refused.stderr
        # Of nobody's table: dollars per token, so that the sums are plain to see.
        own = orjson.dumps({"m": {"input": 1_000, "output": 100_000, "cache_read": 0}}).decode()
        seen = run(tmp_path, "--dry_run", **asked_for, prices=own)
        assert "your prices: $1000 in and $100000 out per million tokens ($0 cache" in seen.stdout
        stopped = run(tmp_path, **asked_for, prices=own)
    assert stopped.returncode == 3, stopped.stderr
    assert "(max_run_cost_usd) are spent" in stopped.stderr
    records = lines(tmp_path / "trajectories" / "r" / "records.jsonl")
    assert 0 < len(records) < 20
    for record in records:
        usage = record["usage"]
        fresh = usage["input_tokens"] - (usage["cache_read_tokens"] or 0)
        assert record["cost_usd"] == pytest.approx(fresh * 1e-3 + usage["output_tokens"] * 0.1)
