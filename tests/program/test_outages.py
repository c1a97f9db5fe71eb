"""Endpoints that cannot be reached: what is said, how long it is waited for, and how to end it."""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import pytest

from agent.models.client.endpoint import EndpointModel
from agent.models.client.retrying import Retry, RetryingModel
from agent.models.connection import UnusableProxy
from agent.models.errors import ModelError
from agent.models.model import Completion, ModelSettings, Request
from agent.models.resolve import UnknownModel, resolve_model
from batch_trajectories.engine.supervisor.refusals import Outages
from run_agent import AIAgent
from tests.helpers.answering import Handler, answering, listening
from tests.helpers.builders import chat_reply, completion
from tests.helpers.running import (
    PATIENCE_S,
    lines,
    run,
    started,
    wait_until,
    write_prompts,
    write_rows,
)

NOBODY = "http://a-name-that-is-none.invalid/v1"
URL = "http://127.0.0.1:1/v1"
SETTINGS = ModelSettings(name="m", api="openai_chat", base_url=URL, key_env=None)
GO = Request([{"role": "user", "content": "Go."}])
OPTIONS = {"run_name": "r", "dataset_file": "p.jsonl", "enabled_toolsets": "none"}
VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts follow each other at once."""

    async def sleep(seconds: float) -> None:
        """No time passes."""

    monkeypatch.setattr(asyncio, "sleep", sleep)


class Unreachable:
    """An adapter whose attempts fail as the test says, unless they are to be answered."""

    settings = SETTINGS

    def __init__(self, error: ModelError) -> None:
        self.error: ModelError | None = error
        self.attempts = 0

    async def complete(self, request: Request) -> Completion:
        self.attempts += 1
        if self.error is not None:
            raise self.error
        return completion("hi", cost_usd=0.0)

    async def close(self) -> None:
        """Nothing to release."""


class OpenGate:
    """Lets every attempt through, to an endpoint that has answered somebody."""

    has_answered = True

    @property
    def sent_at(self) -> float:
        return time.monotonic()

    async def enter(self, claim: Callable[[], Any]) -> OpenGate:
        return self

    def leave(self, outcome: object) -> None:
        """Nothing is counted."""


async def attempts_of(model: RetryingModel, adapter: Unreachable) -> int:
    before = adapter.attempts
    with suppress(ModelError):
        await model.complete(GO)
    return adapter.attempts - before


@pytest.mark.usefixtures("no_pauses")
def test_lasting_failures_are_retried_less_until_the_endpoint_has_answered() -> None:
    lasting = ModelError("connection", "no such name", is_lasting=True)
    passing = ModelError("connection", "refused")

    async def ask() -> list[int]:
        adapter = Unreachable(lasting)
        model = RetryingModel(adapter, SETTINGS, api_key="", on_retry=retries.append)
        counts = [await attempts_of(model, adapter)]
        adapter.error = passing
        counts.append(await attempts_of(model, adapter))
        adapter.error = None
        counts.append(await attempts_of(model, adapter))
        adapter.error = lasting
        counts.append(await attempts_of(model, adapter))
        gated = RetryingModel(
            adapter, SETTINGS, api_key="", on_retry=retries.append, gate=OpenGate()
        )
        return [*counts, await attempts_of(gated, adapter)]

    retries: list[Retry] = []
    assert asyncio.run(ask()) == [4, 8, 1, 8, 8]
    assert [retry.attempt for retry in retries[:3]] == [1, 2, 3]
    assert [round(retry.left_s - retry.wait_s) for retry in retries[:3]] == [7, 4, 0]
    assert re.fullmatch(
        r"a call failed in attempt 1, .* in .* s and given up in \d+ s: connection: no such name",
        str(retries[0]),
    )


FAILURES = {
    "in an outage": (ModelError("connection", "refused", was_sent=False), False, 0.5),
    "by load that others do not meet": (ModelError("overloaded", "busy"), True, 8.0),
    "of a reply, while others are answered": (ModelError("connection", "cut"), True, 0.25),
    "with a pause that was asked for": (
        ModelError("overloaded", "busy", retry_after_s=10.0),
        True,
        0.5,
    ),
}
"""A failure, whether the endpoint answers others, and how far a pause may be from its mean."""


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("case", FAILURES)
def test_the_time_that_is_left_is_that_of_the_pauses_to_come(case: str) -> None:
    error, answers_others, off_by = FAILURES[case]

    async def ask() -> None:
        adapter = Unreachable(error)
        model = RetryingModel(adapter, SETTINGS, api_key="", on_retry=retries.append)
        if answers_others:
            model._answered_at = math.inf
        await attempts_of(model, adapter)

    retries: list[Retry] = []
    asyncio.run(ask())
    assert len(retries) == 7
    for n, retry in enumerate(retries):
        later = [one.wait_s for one in retries[n + 1 :]]
        assert retry.left_s - retry.wait_s == pytest.approx(sum(later), abs=off_by * len(later) + 1)


@pytest.mark.slow
def test_an_unknown_host_name_stops_a_new_run_after_few_attempts(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 3)
    given: dict[str, Any] = {**OPTIONS}
    done = run(tmp_path, **given, model="openai:m", base_url=NOBODY, key_env="none")
    assert done.returncode == 4
    assert "its name cannot be resolved" in done.stderr
    log = (tmp_path / "trajectories/r/run.log").read_text()
    assert "failed in attempt 3," in log
    assert "failed in attempt 4," not in log


@pytest.mark.slow
def test_a_limit_of_a_day_stops_the_run_and_fails_no_task(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 6)
    answered = iter(range(2))

    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if next(answered, None) is not None:
            return 200, chat_reply("Done.")
        return 429, {"error": {"message": "Rate limit exceeded: free-models-per-day"}}

    given: dict[str, Any] = {**OPTIONS, "model": "openai:m", "key_env": "none", "batch_size": 2}
    with answering(answer) as (root, _):
        for _ in range(4):
            done = run(tmp_path, **given, base_url=root, num_workers=1, call_timeout_s=2)
            assert done.returncode == 4, done.stderr
            assert "Set --rpm, --tpm" in done.stderr
    assert not lines(tmp_path / "trajectories" / "r" / "failures.jsonl")
    assert len(lines(tmp_path / "trajectories" / "r" / "records.jsonl")) == 2


@pytest.mark.slow
def test_a_call_that_alone_is_refused_for_too_long_fails_its_task(tmp_path: Path) -> None:
    write_rows(
        tmp_path / "p.jsonl",
        {"id": "big", "prompt": "big"},
        *({"prompt": f"{n}"} for n in range(9)),
    )

    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if "big" in str(body["messages"]):
            return 429, {"error": {"message": "This request would exceed your rate limit."}}
        time.sleep(1.5)
        return 200, chat_reply("Done.")

    given: dict[str, Any] = {**OPTIONS, "model": "openai:m", "key_env": "none", "batch_size": 2}
    with answering(answer) as (root, _):
        done = run(tmp_path, **given, base_url=root, num_workers=1, call_timeout_s=4)
    assert done.returncode == 1, done.stderr
    (failure,) = lines(tmp_path / "trajectories" / "r" / "failures.jsonl")
    assert (failure["id"], failure["class"]) == ("big", "rate_limited")
    assert len(lines(tmp_path / "trajectories" / "r" / "records.jsonl")) == 9


def limit_told(run_dir: Path) -> str:
    with suppress(FileNotFoundError, orjson.JSONDecodeError):
        return str(orjson.loads((run_dir / "progress.json").read_bytes())["limit"])
    return ""


@pytest.mark.slow
def test_a_server_that_is_down_is_shown_with_a_count_down_and_left_at_a_signal(
    tmp_path: Path,
) -> None:
    """It asks for a minute's pause; neither that nor the grace is waited for."""
    write_prompts(tmp_path / "p.jsonl", 3)

    class Refusing(Handler):
        def do_POST(self) -> None:
            self.body()
            self.send(503, b"", **{"retry-after": "60"})

    def seconds() -> int:
        match = re.search(r"\(giving up in (\d+) s\)", limit_told(tmp_path / "trajectories/r"))
        return int(match[1]) if match else 0

    with listening(Refusing) as root:
        given: dict[str, Any] = {
            "run_name": "r",
            "dataset_file": "p.jsonl",
            "enabled_toolsets": "none",
            "model": "openai:m",
            "base_url": f"{root}/v1",
            "key_env": "none",
            "grace_s": 300,
        }
        with started(tmp_path, **given) as process:
            wait_until(lambda: seconds() > 0)
            first = seconds()
            assert f"waiting for {root}/v1: overloaded: HTTP 503" in limit_told(
                tmp_path / "trajectories/r"
            )
            wait_until(lambda: seconds() < first)
            os.kill(process.pid, signal.SIGTERM)
            process.wait(timeout=PATIENCE_S)
    output = (tmp_path / "output.txt").read_text()
    assert "no call has succeeded yet" in output
    assert "no call has succeeded yet" in output
    summary = orjson.loads((tmp_path / "trajectories/r/summary.json").read_bytes())
    assert (summary["pending"], summary["failed"]) == (3, 0)


def test_outages_are_shown_until_calls_are_answered() -> None:
    events: list[str] = []
    outages = Outages((), say=events.append)
    assert (outages.describe(), outages.are_all()) == ("", False)
    outages.note(URL, "connection: refused", 50.4)
    outages.note(URL, "connection: reset", 500.0)
    assert outages.describe() == f"waiting for {URL}: connection: reset (giving up in 50 s)"
    assert outages.are_all()
    assert len(events) == 1
    outages.on_replies(URL)
    assert (outages.describe(), outages.are_all()) == ("", False)
    outages.note(URL, "connection: refused", 9.4)
    assert outages.describe().endswith("refused (giving up in 9 s)")
    assert not outages.are_all()
    assert len(events) == 1


def test_an_outage_of_an_endpoint_that_has_answered_is_shown_but_no_new_message() -> None:
    outages = Outages((URL,), say=pytest.fail)
    outages.note(URL, "connection: refused", 50.4)
    assert outages.describe()
    assert not outages.are_all()


def ask(base_url: str) -> ModelError:
    async def complete() -> None:
        settings = ModelSettings(name="m", api="openai_chat", base_url=base_url, key_env=None)
        adapter = EndpointModel(settings, "sk-of-the-test-1")
        try:
            await adapter.complete(GO)
        finally:
            await adapter.close()

    with pytest.raises(ModelError) as caught:
        asyncio.run(complete())
    return caught.value


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize(
    ("proxy", "message"),
    [
        ("http://me:hidden@127.0.0.1:1", "refused"),
        ("http://me:hidden@a-proxy-that-is-none.invalid:3128", "its name cannot be resolved"),
    ],
)
def test_a_proxy_that_cannot_be_reached_is_named(
    scheme: str, proxy: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = f"{scheme}_proxy"
    monkeypatch.setenv(variable, proxy)
    error = ask(f"{scheme}://a-name-that-is-none.invalid/v1")
    assert str(error).startswith(f"the proxy http://{proxy.rpartition('@')[2]} ({variable}): ")
    assert message in str(error)
    advice = f". Correct it, unset {variable}, or add a-name-that-is-none.invalid to NO_PROXY"
    assert str(error).endswith(advice)
    assert (error.kind, error.is_lasting) == ("connection", "invalid" in proxy)
    assert "hidden" not in str(error)


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize(
    ("status", "message"), [(407, "wants a user and a password"), (502, ""), (504, "")]
)
def test_a_proxy_that_refuses_is_named(
    scheme: str, status: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(Handler):
        def do_POST(self) -> None:
            self.body()
            self.send(status)

        do_CONNECT = do_POST

    with listening(Refusing) as proxy:
        monkeypatch.setenv("ALL_PROXY", proxy)
        error = ask(f"{scheme}://a-name-that-is-none.invalid/v1")
    assert f"the proxy {proxy} (ALL_PROXY)" in str(error)
    assert message in str(error)
    assert f"HTTP {status}" in str(error)
    assert error.action == "retry"
    assert error.is_lasting == (status == 407 or scheme == "https")


SOCKS = ("socks5://me:hidden@127.0.0.1:1080", "socks5h://127.0.0.1:1080", "socks4://127.0.0.1:1")


@pytest.mark.parametrize("proxy", SOCKS)
@pytest.mark.parametrize("variable", ["all_proxy", "ALL_PROXY", "http_proxy"])
def test_socks_is_refused_by_name(
    proxy: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An HTTP request to such a port would show it the key."""
    monkeypatch.setenv(variable, proxy)
    message = rf"the proxy socks\S+ \({variable}\) cannot be used for {URL}.* SOCKS .*NO_PROXY"
    where: dict[str, Any] = {"base_url": URL, "api": None, "key_env": None}
    with pytest.raises(UnusableProxy, match=message) as caught:
        resolve_model("m", **where)
    assert "hidden" not in str(caught.value)
    with pytest.raises(ValueError, match=message):
        AIAgent("m", base_url=URL, api_key="k")
    with pytest.raises(UnusableProxy):
        EndpointModel(SETTINGS, "k")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert resolve_model("m", **where).base_url == URL


def test_a_run_is_refused_before_any_call_where_only_socks_leads_out(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 3)
    given: dict[str, Any] = {**OPTIONS}
    done = run(tmp_path, **given, model="m", base_url=URL, env={"ALL_PROXY": SOCKS[0]})
    assert done.returncode == 2
    assert "SOCKS" in done.stderr
    assert "hidden" not in done.stderr


def test_a_model_without_an_endpoint_needs_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", SOCKS[0])
    assert resolve_model("scripted", base_url=None, api=None, key_env=None).base_url is None
    with pytest.raises(UnknownModel):
        resolve_model("what:m", base_url=None, api=None, key_env=None)
