"""Several replicas of one endpoint, no router: where conversations go, and when they move."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

import pytest

from agent.messages.message import Message
from agent.models.client import fleet as fleet_module
from agent.models.client import replicas as replicas_module
from agent.models.client.endpoint import open_model
from agent.models.client.replicas import FAILING_S, GONE, LIVE_S, Replicas
from agent.models.client.retrying import RetryingModel
from agent.models.connection import Connection, Replication, Share
from agent.models.errors import ModelError
from agent.models.model import ModelSettings, Request
from batch_trajectories.config.endpoint_config import EndpointConfig, read_endpoints
from tests.agent.models.test_unsupported_options import REPLIES
from tests.helpers.answering import Handler

URLS = [f"http://10.0.0.{n}:8000/v1" for n in range(12)]
NOT_REACHED = ModelError("connection", "refused", was_sent=False)
CUT = ModelError("connection", "cut")
FAILED = ModelError("overloaded", "503")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def replicas(urls: Sequence[str] = URLS, **given: Any) -> tuple[Replicas, Clock]:
    clock = Clock()
    known = Replicas(urls, now=clock, **given)
    for number in known.due():
        known.record_check(number, 200)
    return known, clock


def ids(count: int) -> list[str]:
    return [f"conversation {n}" for n in range(count)]


def ask(known: Replicas, conversation: str, error: ModelError | None = None) -> int:
    """One request from start to end."""
    number = known.choose(conversation)
    known.leave(number, conversation, error)
    return number


# Decisions


def test_every_process_of_every_start_chooses_alike_whatever_the_order() -> None:
    one, _ = replicas(share=Share(2, 300))
    other, _ = replicas(URLS, share=Share(2, 300))
    first = {id: ask(one, id) for id in ids(40)}
    assert {id: ask(other, id) for id in reversed(ids(40))} == first
    assert len(set(first.values())) > 6, "they are spread"


@pytest.mark.parametrize("expected", [0, 96])
def test_no_replica_has_much_more_than_the_mean(expected: int) -> None:
    known, _ = replicas(share=Share(1, expected))
    counts = Counter(ask(known, id) for id in ids(96))
    assert max(counts.values()) <= 10, "1.25 times the mean of 8"
    assert len(counts) == 12


def test_a_conversation_stays_while_others_come_and_go() -> None:
    known, clock = replicas()
    homes = {id: ask(known, id) for id in ids(24)}
    for n in range(200):
        clock.now += 1
        ask(known, f"other {n}")
    assert {id: ask(known, id) for id in homes} == homes


def test_what_was_long_silent_is_no_load() -> None:
    known, clock = replicas(URLS[:2])
    for id in ids(40):
        known.choose(id)  # in flight
    clock.now += LIVE_S + 1
    asked = Counter(ask(known, f"new {n}") for n in range(40))
    assert max(asked.values()) <= 25, "what is in flight still counts"
    clock.now += LIVE_S + 1
    known, clock = replicas(URLS[:2])
    old = Counter(ask(known, id) for id in ids(40))
    clock.now += LIVE_S + 1
    new = Counter(ask(known, f"more {n}") for n in range(8))
    assert max(new.values()) <= 5, old


def test_a_replica_that_is_gone_costs_only_its_own_conversations_their_place() -> None:
    known, _ = replicas()
    homes = {id: ask(known, id) for id in ids(60)}
    dead = homes[ids(1)[0]]
    ask(known, ids(1)[0], NOT_REACHED)
    moved = {id: ask(known, id) for id in homes}
    assert dead not in moved.values()
    assert all(moved[id] == homes[id] for id in homes if homes[id] != dead)
    known.record_check(dead, 200)
    assert {id: ask(known, id) for id in homes} == moved, "they stay where they are now"
    assert dead in {ask(known, f"new {n}") for n in range(60)}, "it takes new ones"


@pytest.mark.parametrize("error", [CUT, FAILED, ModelError("timeout", "late")])
def test_a_failure_is_looked_into_before_conversations_move(error: ModelError) -> None:
    known, _ = replicas()
    home = ask(known, "a")
    known.choose("a")
    assert known.leave(home, "a", error), "it has to be looked at"
    assert home in known.due()
    assert known.state(home) == "draining"
    assert known.choose("a") == home
    assert home not in {ask(known, f"new {n}") for n in range(200)}
    known.record_check(home, 200)
    assert known.state(home) == "up"


@pytest.mark.parametrize("status", [503, GONE, None])
def test_what_fails_and_is_not_well_is_gone(status: int | None) -> None:
    known, _ = replicas()
    home = ask(known, "a", FAILED)
    known.record_check(home, status)
    assert known.state(home) == "down"
    assert ask(known, "a") != home


def test_a_replica_that_drains_keeps_its_conversations_until_a_call_fails() -> None:
    known, _ = replicas()
    home = ask(known, "a")
    known.record_check(home, 503)
    assert [ask(known, "a") for _ in range(3)] == [home] * 3
    assert home not in {ask(known, f"new {n}") for n in range(200)}
    ask(known, "a", FAILED)
    assert ask(known, "a") != home


def test_a_late_look_alone_moves_nobody() -> None:
    known, clock = replicas()
    home = ask(known, "a")
    known.record_check(home, None)
    assert (known.state(home), ask(known, "a")) == ("draining", home)
    assert known.state(home) == "up", "a call was answered"
    known.record_check(home, None)
    clock.now += 1
    assert known.due() == [home], "it is looked at again soon"
    known.record_check(home, None)
    assert known.state(home) == "down"


@pytest.mark.parametrize("status", [200, 301, 401, 404, 405, 501])
def test_a_server_without_such_a_path_is_well(status: int) -> None:
    known, _ = replicas()
    known.record_check(3, status)
    assert known.state(3) == "up"


def test_calls_that_keep_failing_take_a_replica_out_however_well_it_says_it_is() -> None:
    """Not many at once: a replica that is full refuses what comes, and keeps what it has cached."""
    known, clock = replicas()
    home = ask(known, "a")
    for _ in range(20):
        assert ask(known, "a", FAILED) == home
        known.record_check(home, 200)
    clock.now += FAILING_S
    assert ask(known, "a", FAILED) == home
    assert ask(known, "a") != home


@pytest.mark.parametrize(
    "error",
    [
        ModelError("rate_limited", "429"),
        ModelError("bad_request", "no"),
        ModelError("context_exceeded", "long"),
        ModelError("overloaded", "busy", retry_after_s=2),
    ],
)
def test_limits_and_refusals_say_nothing_of_a_replica(error: ModelError) -> None:
    known, _ = replicas()
    home = ask(known, "a", error)
    assert known.state(home) == "up"


def test_while_all_are_gone_each_is_tried_and_looked_at_less_and_less() -> None:
    known, clock = replicas(URLS[:3])
    for _ in range(3):
        for n in range(3):
            known.record_check(n, GONE)
    assert {known.state(n) for n in range(3)} == {"down"}
    clock.now += 1
    assert known.due() == []
    tried = []
    for n in range(3):
        clock.now += 0.1
        tried.append(ask(known, f"new {n}", NOT_REACHED))
    assert sorted(tried) == [0, 1, 2]
    clock.now += 100
    assert known.due() == [0, 1, 2]


def test_a_request_that_is_broken_off_says_nothing_of_its_replica() -> None:
    known, _ = replicas()
    home = ask(known, "a", FAILED)
    known.record_check(home, 503)
    assert known.state(home) == "down"
    number = known.choose("a")
    known.record_check(number, None)
    known.leave(number, "a", None, is_answered=False)
    assert known.state(number) == "draining"


def test_requests_of_no_conversation_go_where_least_is_to_do() -> None:
    known, _ = replicas(URLS[:3])
    assert sorted(known.choose("") for _ in range(3)) == [0, 1, 2]


# Servers


class Server:
    """A replica that counts what it is asked, and that a test stops and starts."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.in_flight = self.most = 0
        self.health = 200
        self.status = 200
        self.is_silent = False
        self.speaks = threading.Event()
        self.goes_on = threading.Event()
        self.goes_on.set()
        self._lock = threading.Lock()
        self.port = 0
        self._server: ThreadingHTTPServer | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        me = self

        class Answering(Handler):
            def do_GET(self) -> None:
                if me.is_silent:
                    me.speaks.wait(30)
                    return  # who asked is gone
                self.send(me.health if self.path == "/health" else 404)

            def do_POST(self) -> None:
                self.body()
                with me._lock:
                    me.asked.append(self.headers["x-session-id"])
                    me.in_flight += 1
                    me.most = max(me.most, me.in_flight)
                me.goes_on.wait(30)
                with me._lock:
                    me.in_flight -= 1
                reply = REPLIES[self.path] if me.status == 200 else {"error": {"message": "no"}}
                self.send(me.status, json.dumps(reply).encode())

        class Reusing(ThreadingHTTPServer):
            request_queue_size = 64

        self._server = Reusing(("127.0.0.1", self.port), Answering)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


@contextmanager
def servers(count: int) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        made = [Server() for _ in range(count)]
        for one in made:
            stack.callback(one.stop)
        yield made


def model_at(
    running: Sequence[Server], *, share: Share | None = None, **more: Any
) -> RetryingModel:
    replication = Replication(tuple(one.url for one in running), **more)
    settings = ModelSettings(
        name="m",
        api="openai_chat",
        base_url=running[0].url,
        key_env=None,
        connection=Connection(replication=replication),
    )
    return open_model(settings, api_key="k", on_retry=lambda retry: None, share=share)


def turn(conversation: str) -> Request:
    return Request([Message(role="user", content="hi")], conversation=conversation)


def where(running: Sequence[Server]) -> dict[str, list[int]]:
    """The numbers of the replicas that each conversation was at."""
    seen: defaultdict[str, list[int]] = defaultdict(list)
    for number, server in enumerate(running):
        for conversation in server.asked:
            seen[conversation].append(number)
    return seen


def test_each_conversation_stays_at_one_replica_and_none_was_never_there() -> None:
    """One of the URLs has no server: it costs no call."""
    with servers(4) as running:
        running[3].stop()

        async def converse() -> None:
            model = model_at(running)
            for _ in range(3):
                await asyncio.gather(*(model.complete(turn(id)) for id in ids(30)))
            await model.close()

        asyncio.run(converse())
        seen = where(running[:3])
    assert all(len(at) == 3 and len(set(at)) == 1 for at in seen.values())
    assert len(seen) == 30
    assert {at[0] for at in seen.values()} == {0, 1, 2}


def test_a_replica_that_dies_moves_its_conversations_and_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with servers(3) as running:

        async def converse() -> tuple[int, int]:
            model = model_at(running)
            for _ in range(2):
                await asyncio.gather(*(model.complete(turn(id)) for id in ids(18)))
            running[0].stop()
            for _ in range(2):
                await asyncio.gather(*(model.complete(turn(id)) for id in ids(18)))
            before = len(running[0].asked)
            running[0].start()
            async with asyncio.timeout(60):
                n = 0
                while len(running[0].asked) == before:
                    n += 1
                    await model.complete(turn(f"new {n}"))
                    await asyncio.sleep(0.05)
            await model.close()
            return before, n

        asyncio.run(converse())
        seen = where(running)
    old = {id: seen[id] for id in ids(18)}
    assert all(len(at) == 4 for at in old.values()), "no request was lost or sent twice"
    assert all(len(set(at)) == (2 if at[0] == 0 else 1) for at in old.values())
    assert any(at[0] == 0 for at in old.values())


def test_a_replica_that_drains_gets_no_new_conversation() -> None:
    with servers(3) as running:
        running[1].health = 503

        async def converse() -> None:
            model = model_at(running)
            await asyncio.gather(*(model.complete(turn(id)) for id in ids(30)))
            await model.close()

        asyncio.run(converse())
        assert running[1].asked == []
        assert sum(len(one.asked) for one in running) == 30


def test_a_replica_that_fails_is_left_and_the_call_is_repeated_elsewhere() -> None:
    with servers(2) as running:

        async def converse() -> None:
            model = model_at(running)
            await model.complete(turn("a"))
            home = next(one for one in running if one.asked)
            home.status, home.health = 503, 503
            await model.complete(turn("a"))
            await model.complete(turn("a"))
            await model.close()

        asyncio.run(converse())
        counts = sorted(len(one.asked) for one in running)
    assert counts == [2, 2], "one refused, then two at the other"


@pytest.mark.parametrize(("of", "most"), [(1, 4), (2, 2), (3, 1)])
def test_a_replica_gets_no_more_at_once_than_its_part_of_the_limit(of: int, most: int) -> None:
    with servers(2) as running:
        for one in running:
            one.goes_on.clear()

        async def converse() -> None:
            model = model_at(running, max_in_flight=4, share=Share(of))
            calls = [asyncio.create_task(model.complete(turn(id))) for id in ids(20)]
            while sum(one.in_flight for one in running) < 2 * most:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            for one in running:
                one.goes_on.set()
            await asyncio.gather(*calls)
            await model.close()

        asyncio.run(converse())
        assert [one.most for one in running] == [most, most]
        assert sum(len(one.asked) for one in running) == 20


def test_rates_of_a_replica_spread_its_calls() -> None:
    now = [0.0]
    pace = fleet_module._Pace(60 / 2, now=lambda: now[0])
    assert [pace.reserve() for _ in range(3)] == [0.0, 2.0, 4.0]
    now[0] = 10.0
    assert pace.reserve() == 0.0
    assert fleet_module._Pace(None).reserve() == 0.0


def test_calls_at_a_replica_that_answers_nothing_any_more_are_made_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its machine is gone: nothing ends the connections."""
    monkeypatch.setattr(replicas_module, "LOST_S", 0.2)
    monkeypatch.setattr(replicas_module, "CHECK_EVERY_S", 0.1)
    monkeypatch.setattr(replicas_module, "_FIRST_CHECK_S", 0.05)
    monkeypatch.setattr(fleet_module, "_CHECK_TIMEOUT_S", 0.1)
    with servers(2) as running:
        for one in running:
            one.goes_on.clear()

        async def converse() -> None:
            model = model_at(running)
            call = asyncio.create_task(model.complete(turn("a")))
            while not any(one.asked for one in running):
                await asyncio.sleep(0.01)
            lost, other = sorted(running, key=lambda one: -len(one.asked))
            lost.is_silent = True
            other.goes_on.set()
            await call
            lost.speaks.set()
            lost.goes_on.set()
            await model.close()

        asyncio.run(converse())
        assert sorted(len(one.asked) for one in running) == [1, 1]


def test_models_of_one_endpoint_share_its_replicas() -> None:
    with servers(2) as running:
        replication = Replication(tuple(one.url for one in running))
        settings = [
            ModelSettings(
                name=name,
                api="openai_chat",
                base_url=running[0].url,
                key_env=None,
                connection=Connection(replication=replication),
            )
            for name in "ab"
        ]

        async def converse() -> int:
            fleets: dict[str, Any] = {}
            models = [
                open_model(one, api_key="k", on_retry=lambda retry: None, fleets=fleets)
                for one in settings
            ]
            for model in models:
                await model.complete(turn("a"))
            for model in models:
                await model.close()
            return len(fleets)

        assert asyncio.run(converse()) == 1
        assert sorted(len(one.asked) for one in running) == [0, 2]


# Options


URL = "http://10.0.0.1:8000/v1"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"base_urls": [URL], "base_url": URL}, "not with base_url"),
        ({"base_urls": [URL], "client": "azure"}, "not with base_url or client"),
        ({"base_urls": [URL, URL + "/"]}, "is there twice"),
        ({"base_urls": []}, "base_url is missing"),
        ({"base_urls": ["ftp://x"]}, "base_urls"),
        ({"base_url": URL, "health_path": "/up"}, "health_path: only with"),
        ({"base_url": URL, "replica_rpm": 5}, "replica_rpm: only with"),
        ({"base_urls": [URL], "health_path": "up"}, "health_path"),
    ],
)
def test_options_that_do_not_go_together_are_refused(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_endpoints({"e": entry})


def test_an_endpoint_of_replicas_is_known_by_the_first() -> None:
    entry = {"base_urls": [URL, "http://10.0.0.2:8000/v1/"], "replica_max_in_flight": 64}
    own = read_endpoints({"e": entry})["e"].to_endpoint()
    assert own.base_url == URL
    assert own.connection.replication == Replication(
        (URL, "http://10.0.0.2:8000/v1"), "/health", 64, None
    )


def test_a_stored_endpoint_without_replicas_is_read_again() -> None:
    """A run's stored config has all options, also those of replicas with their defaults."""
    for entry in ({"base_url": "http://a/v1"}, {"base_urls": ["http://a/v1", "http://b/v1"]}):
        config = EndpointConfig.model_validate(entry)
        assert EndpointConfig.model_validate(config.model_dump()) == config
