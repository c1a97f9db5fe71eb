"""Batch jobs on their way, in one process: what is asked twice after a crash at each step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Container, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from agent.messages.message import Message
from agent.models.batches.base import LostBatch, Undecided
from agent.models.batches.calls import live_body, open_batches, read_reply
from agent.models.client.endpoint import open_model
from agent.models.connection import DIRECT_CONNECTION, Connection
from agent.models.model import ModelSettings, Request
from agent.models.prices import estimate_cost
from agent.models.resolve import resolve_model
from batch_trajectories.basics.errors import Stopped
from batch_trajectories.batch_api.batch_log import (
    BatchJob,
    BatchLog,
    State,
    compute_batch_totals,
    free_unsent,
    load_reserved,
)
from batch_trajectories.batch_api.delivery import BatchDelivery
from batch_trajectories.batch_api.model import BatchAnswer, BatchApiClient, BatchApiModel, items_in
from batch_trajectories.batch_api.service import BatchCollector, CollectorLimits
from batch_trajectories.config.endpoints import Cost
from batch_trajectories.engine.messages import (
    CollectCall,
    make_call_id,
    model_label,
    parse_task_key,
)
from batch_trajectories.engine.worker.budget_share import WorkerBudget
from batch_trajectories.engine.worker.call_limiter import CallLimiter
from batch_trajectories.records.tasks import task_key
from tests.fakes.fake_batches import FakeBatches

pytestmark = pytest.mark.slow

DIALECTS = ("chat", "messages")
MODELS = {"chat": "openai:gpt-5-mini", "messages": "anthropic:claude-sonnet-4-5"}


def settings_for(api: FakeBatches, dialect: str) -> ModelSettings:
    return resolve_model(
        MODELS[dialect],
        base_url=api.anthropic_url if dialect == "messages" else api.openai_url,
        api=None,
        key_env="none",
        max_tokens=100,
    )


@dataclass
class Desks:
    """A collector with those who ask it."""

    office: BatchCollector
    settings: ModelSettings
    courier: BatchDelivery
    problems: list[str]
    said: list[str]
    asking: set[bytes] = field(default_factory=set)
    is_tail: bool = False

    async def ask(self, prompt: str, nth: int = 0) -> BatchAnswer:
        """Have one call made for the task that is called like its prompt."""
        id, body = self.call(prompt, nth)
        self.asking.add(parse_task_key(id))
        while True:
            answer: asyncio.Future[BatchAnswer] = asyncio.get_running_loop().create_future()

            def on_answer(
                _: str, how: str, reply: bytes, answer: asyncio.Future[BatchAnswer] = answer
            ) -> None:
                answer.set_result(BatchAnswer(how, reply))

            self.office.ask(id, model_label(self.settings), body, on_answer)
            found = await answer
            if found.how != "again":
                self.asking.discard(parse_task_key(id))
                return found

    def call(self, prompt: str, nth: int = 0) -> tuple[str, bytes]:
        request = Request([Message(role="user", content=prompt)])
        id = make_call_id(task_key(prompt, ""), prompt.encode(), nth)
        return id, live_body(request, self.settings)

    async def tick_on(self) -> None:
        while not self.problems:
            try:
                self.office.tick(len(self.asking), is_tail=self.is_tail)
            except Crash as crash:
                self.problems.append(str(crash))
            await asyncio.sleep(0.05)


class Crash(Exception):
    """The process ends here."""


class CrashingLedger(BatchLog):
    """Ends the process before or after one step is on disk."""

    def __init__(self, run_dir: Path, state: State, *, is_after: bool) -> None:
        super().__init__(run_dir, run_dir / "quarantine")
        self._state, self._is_after = state, is_after

    def note(self, job: BatchJob, state: State, **more: Any) -> None:
        if state != self._state or self._is_after:
            super().note(job, state, **more)
        if state == self._state:
            raise Crash(state)


@asynccontextmanager
async def office(
    run_dir: Path,
    api: FakeBatches,
    dialect: str = "chat",
    *,
    ledger: BatchLog | None = None,
    settled: Container[bytes] = (),
    limit: int = 100,
    connection: Connection = DIRECT_CONNECTION,
) -> AsyncIterator[Desks]:
    run_dir.mkdir(exist_ok=True)
    ledger = ledger or BatchLog(run_dir, run_dir / "quarantine")
    settings = replace(settings_for(api, dialect), connection=connection)
    jobs = ledger.load(settled)
    problems: list[str] = []
    said: list[str] = []
    courier = BatchDelivery(
        ledger,
        settings,
        open_batches(settings, api_key="none"),
        known=[job.batch for job in jobs],
        patience_s=1.0,
        say=said.append,
    )
    one = BatchCollector(
        ledger,
        jobs,
        {model_label(settings): courier},
        CollectorLimits(wait_s=60, max_requests=limit),
        on_problem=problems.append,
    )
    desks = Desks(office=one, settings=settings, courier=courier, problems=problems, said=said)
    ticking = asyncio.create_task(desks.tick_on())
    try:
        yield desks
    finally:
        ticking.cancel()
        await one.close(0)


async def all_of(desks: Desks, prompts: Sequence[str]) -> list[BatchAnswer]:
    """Ask all at a time; gives what was answered by the time of the answers or of a problem."""
    asking = [asyncio.create_task(desks.ask(prompt)) for prompt in prompts]
    while not all(one.done() for one in asking) and not desks.problems:
        await asyncio.sleep(0.02)
    answers = [one.result() for one in asking if one.done()]
    for one in asking:
        one.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    return answers


STATES: Sequence[State] = ("gathered", "sending", "created", "collected")


def test_a_crash_at_every_step(tmp_path: Path) -> None:
    """Side by side, so that lost batches of the same size are distinguished."""

    async def crash_and_go_on(
        api: FakeBatches, dialect: str, state: State, *, is_after: bool
    ) -> None:
        run_dir = tmp_path / f"{dialect}-{state}-{is_after}"
        run_dir.mkdir()
        prompts = [f"{state} {is_after} {n}" for n in range(3)]
        ledger = CrashingLedger(run_dir, state, is_after=is_after)
        async with office(run_dir, api, dialect, ledger=ledger) as desks:
            await all_of(desks, prompts)
            assert desks.problems
        async with office(run_dir, api, dialect) as desks:
            answers = await all_of(desks, prompts)
            assert not desks.problems
        assert [answer.how for answer in answers] == ["reply"] * 3

    async def crash_everywhere(dialect: str) -> None:
        with FakeBatches() as api:
            await asyncio.gather(
                *(
                    crash_and_go_on(api, dialect, state, is_after=is_after)
                    for state in STATES
                    for is_after in (False, True)
                )
            )
            assert not api.paid_twice
            assert api.paid.total() == 3 * 2 * len(STATES)

    async def both() -> None:
        await asyncio.gather(*map(crash_everywhere, DIALECTS))

    asyncio.run(both())


def test_a_lost_batch_of_anthropic_is_known_when_it_is_over(tmp_path: Path) -> None:
    """Until then it is unknown whose it is, and nothing is asked again."""
    items = tmp_path / "items"

    async def find() -> None:
        with FakeBatches(delay_s=1000) as api:
            batches = open_batches(settings_for(api, "messages"), api_key="none")
            body = b'{"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}'
            created = []
            for id in ("ours", "theirs", "other"):
                items.write_bytes(batches.line(id, body))
                created.append(await batches.create("w", items, ""))
            lost = LostBatch("w", "", frozenset({"ours"}), time.time())
            with pytest.raises(Undecided):
                await batches.find(lost, ())
            for batch in api.batches.values():
                batch.over_at = 0.0
            assert await batches.find(lost, ()) == created[0]
            assert await batches.find(lost, created[:1]) is None
            assert await batches.find(replace(lost, sent_at=time.time() + 7200), ()) is None
            await batches.close()

    asyncio.run(find())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_answers_are_those_of_their_calls(tmp_path: Path, dialect: str) -> None:
    """The results come in another order; what failed or expired is for a live call."""
    prompts = [f"prompt {n}" for n in range(20)]

    async def ask() -> tuple[list[BatchAnswer], ModelSettings]:
        with FakeBatches(errored=0.2, expired=0.2) as api:
            async with office(tmp_path, api, dialect) as desks:
                alone = [desks.office.in_batches]
                answers = await all_of(desks, prompts)
            assert alone == [(0, 0)]
            assert len(api.batches) == 1
            assert api.paid.total() == sum(answer.how == "reply" for answer in answers)
            return answers, desks.settings

    answers, settings = asyncio.run(ask())
    hows = [answer.how for answer in answers]
    assert {"reply", "live"} == set(hows)
    for prompt, answer in zip(prompts, answers, strict=True):
        if answer.how == "reply":
            key = conversation_of(prompt)
            assert key in read_reply(answer.reply, settings).message["content"]
    sums = compute_batch_totals(tmp_path)
    assert sums is not None
    assert (sums.calls, sums.failed, sums.live) == (
        hows.count("reply"),
        hows.count("live"),
        hows.count("live"),
    )
    assert sums.saved_usd == pytest.approx(sums.cost_usd, rel=0.1)


def conversation_of(prompt: str) -> str:
    from tests.fakes.fake_script import digest

    return digest(f"{prompt}\0", 8)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_creation_whose_answer_is_lost(tmp_path: Path, dialect: str) -> None:
    async def ask() -> None:
        with FakeBatches(deaf_creations=1) as api:
            async with office(tmp_path, api, dialect) as desks:
                answers = await all_of(desks, ["a", "b"])
            assert [answer.how for answer in answers] == ["reply", "reply"]
            assert len(api.batches) == 1

    asyncio.run(ask())


def client_of_openai(root: str, token_file: str) -> Any:
    """As a user's own function returns it: its token changes."""
    from openai import AsyncOpenAI

    async def token() -> str:
        return Path(token_file).read_text()

    return AsyncOpenAI(base_url=f"{root}/v1", api_key=token)


def client_of_anthropic(root: str, token_file: str) -> Any:
    from anthropic import AsyncAnthropic

    class Client(AsyncAnthropic):
        @property
        def auth_headers(self) -> dict[str, str]:
            return {"X-Api-Key": Path(token_file).read_text()}

    return Client(base_url=root, api_key="none")


def changing(api: FakeBatches, dialect: str, way: str) -> Connection:
    if way == "key_command":
        return Connection(key_command=("cat", str(api.token_file)))
    client = {"chat": client_of_openai, "messages": client_of_anthropic}[dialect]
    options = {"root": api.anthropic_url, "token_file": str(api.token_file)}
    return Connection(client=f"{__name__}:{client.__name__}", client_options=options)


@pytest.mark.parametrize("way", ["key_command", "client"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_step_of_a_batch_may_find_its_token_expired(
    tmp_path: Path, dialect: str, way: str
) -> None:
    async def ask() -> None:
        # Anthropic's client makes two requests for the results, each time it is asked.
        fake: dict[str, Any] = {"calls_per_token": 2 if dialect == "chat" else 4, "errored": 0.3}
        with FakeBatches(token_file=tmp_path / "token", delay_s=0.0, **fake) as api:
            connection = changing(api, dialect, way)
            prompts = [str(n) for n in range(8)]
            async with office(tmp_path / "run", api, dialect, connection=connection) as desks:
                hows = [answer.how for answer in await all_of(desks, prompts)]
            assert not desks.problems
            assert set(hows) == {"reply", "live"}
            assert len(api.batches) == 1
            # OpenAI: upload, creation, state, batch, two files. Anthropic: creation, results.
            assert api.refused >= (6 if dialect == "chat" else 2)
        files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
        assert files
        assert not [path for path in files if b"token-of-turn-" in path.read_bytes()]

    asyncio.run(ask())


@pytest.mark.parametrize("way", ["key_command", "client"])
def test_credentials_that_are_rejected_again_stop_the_run(tmp_path: Path, way: str) -> None:
    async def ask() -> None:
        with FakeBatches(token_file=tmp_path / "token", calls_per_token=1) as api:
            connection = changing(api, "chat", way)
            async with office(tmp_path / "run", api, connection=connection) as desks:
                assert not await all_of(desks, ["a"])
            assert "HTTP 401" in desks.problems[0]
            assert "token-of-turn-" not in desks.problems[0]
            assert not api.batches

    asyncio.run(ask())


def test_a_client_without_credentials_stops_the_run(tmp_path: Path) -> None:
    async def ask() -> None:
        with FakeBatches(token_file=tmp_path / "token") as api:
            connection = changing(api, "chat", "client")
            (tmp_path / "token").unlink()
            async with office(tmp_path / "run", api, connection=connection) as desks:
                assert not await all_of(desks, ["a"])
            assert "FileNotFoundError" in desks.problems[0]
            assert not api.batches

    asyncio.run(ask())


def test_results_are_fetched_from_the_endpoint_whatever_address_it_gives(tmp_path: Path) -> None:
    """The key goes nowhere else."""

    async def ask() -> None:
        with FakeBatches(results_root="http://127.0.0.1:1") as api:
            async with office(tmp_path, api, "messages") as desks:
                answers = await all_of(desks, ["a", "b"])
            assert [answer.how for answer in answers] == ["reply"] * 2

    asyncio.run(ask())


def test_a_wave_is_as_large_as_allowed(tmp_path: Path) -> None:
    async def ask() -> None:
        with FakeBatches() as api:
            async with office(tmp_path, api, limit=2) as desks:
                await all_of(desks, [str(n) for n in range(5)])
            assert sorted(len(batch.items) for batch in api.batches.values()) == [1, 2, 2]

    asyncio.run(ask())


def test_no_room_is_waited_for(tmp_path: Path) -> None:
    """A batch that the provider refuses for what is queued already comes again, later."""

    async def ask() -> None:
        with FakeBatches(full_creations=1) as api:
            async with office(tmp_path, api) as desks:
                asking = asyncio.create_task(all_of(desks, [str(n) for n in range(5)]))
                while not desks.said:
                    await asyncio.sleep(0.02)
                assert "no room for a batch of 5 calls" in desks.said[0]
                while len(list(tmp_path.glob("batches/*.items"))) < 2:
                    await asyncio.sleep(0.02)
                for _ in range(50):  # it would be there by then
                    await desks.courier.api.find(LostBatch("", "", frozenset(), 0.0), ())
                assert len(api.batches) == 1
                desks.courier.not_before = 0.0
                assert [answer.how for answer in await asking] == ["reply"] * 5
            sizes = sorted(len(batch.items) for batch in api.batches.values())
            assert sizes == [0, 1, 2, 2], "alone it may have been too large"

    asyncio.run(ask())


@pytest.mark.parametrize("status", [401, 404])
def test_an_endpoint_that_takes_no_batches_stops_the_run(tmp_path: Path, status: int) -> None:
    async def ask() -> None:
        with FakeBatches(refuse=status) as api:
            async with office(tmp_path, api) as desks:
                assert not await all_of(desks, ["a"])
                assert f"HTTP {status}" in desks.problems[0]
            api.refuse = 0
            async with office(tmp_path, api) as desks:
                assert [answer.how for answer in await all_of(desks, ["a"])] == ["reply"]

    asyncio.run(ask())


def test_an_unknown_batch_stops_the_run_with_a_message_that_says_what_to_do(
    tmp_path: Path,
) -> None:
    async def ask() -> None:
        with FakeBatches(delay_s=0.5) as api:
            async with office(tmp_path, api) as desks:
                asking = asyncio.create_task(desks.ask("a"))
                while not api.batches:
                    await asyncio.sleep(0.02)
                api.batches.clear()
                while not desks.problems:
                    await asyncio.sleep(0.02)
                assert "use the key" in desks.problems[0].lower()
                assert "remove batches.jsonl" in desks.problems[0]
                asking.cancel()

    asyncio.run(asyncio.wait_for(ask(), 30))


def test_near_the_end_calls_go_live_but_for_those_in_batches(tmp_path: Path) -> None:
    async def ask() -> None:
        with FakeBatches(delay_s=0.5) as api:
            async with office(tmp_path, api) as desks:
                first = asyncio.create_task(desks.ask("a"))
                while not api.batches:
                    await asyncio.sleep(0.02)
                desks.is_tail = True
                assert (await desks.ask("b")).how == "live"
                assert (await desks.ask("c")).how == "live"
                assert (await first).how == "reply"

    asyncio.run(ask())


def test_results_of_a_batch_can_be_asked_for_again(tmp_path: Path) -> None:
    """A worker died with a reply that it had not journaled; nobody pays for it again."""

    async def ask() -> None:
        with FakeBatches() as api:
            async with office(tmp_path, api) as desks:
                first = await all_of(desks, ["a", "b"])
                assert await all_of(desks, ["a"]) == first[:1]
            async with office(tmp_path, api) as desks:
                assert await all_of(desks, ["a"]) == first[:1]
                for prompt in ("a", "b"):
                    desks.office.forget(task_key(prompt, ""))
            assert len(api.batches) == 1
            assert not (tmp_path / "batches").exists()

    asyncio.run(ask())


@pytest.mark.parametrize("left", [b"{", b"", b"7\n"])
def test_lost_results_are_fetched_again(tmp_path: Path, left: bytes) -> None:
    async def ask() -> None:
        with FakeBatches() as api:
            async with office(tmp_path, api) as desks:
                first = await all_of(desks, ["a"])
            (results,) = (tmp_path / "batches").iterdir()
            results.write_bytes(left)
            before = compute_batch_totals(tmp_path)
            with (tmp_path / "batches.jsonl").open("ab") as file:
                file.write(b'{"kind":"collected"}\n{"kind":[]}\n7\n{"kind":"live","calls\n')
                file.write(b'{"kind":"gathered","wave":"w","model":"m","at":1,"items":[3]}\n')
            async with office(tmp_path, api) as desks:
                assert await all_of(desks, ["a"]) == first
            assert len(api.batches) == 1
            after = compute_batch_totals(tmp_path)
            assert before is not None
            assert after is not None
            assert (after.batches, after.calls, after.cost_usd) == (1, 1, before.cost_usd)

    asyncio.run(ask())


def test_a_call_cancelled_before_its_batch_is_not_sent(tmp_path: Path) -> None:
    async def ask() -> None:
        with FakeBatches() as api:
            async with office(tmp_path, api) as desks:
                id, body = desks.call("gone")
                desks.office.ask(id, model_label(desks.settings), body, lambda *_: None)
                desks.office.leave(parse_task_key(id))
                assert [answer.how for answer in await all_of(desks, ["a"])] == ["reply"]
            assert api.paid.total() == 1

    asyncio.run(ask())


def test_calls_in_batches_are_claimed_at_their_price() -> None:
    with FakeBatches() as api:
        settings = settings_for(api, "chat")
    request = Request([Message(role="user", content="x")])
    live, by_batch = (
        estimate_cost(request, settings),
        estimate_cost(request, settings, by_batch=True),
    )
    assert live.usd
    assert by_batch.usd == pytest.approx(live.usd / 2)
    assert by_batch.tokens == live.tokens


def test_a_reserve_is_held_until_a_batch_can_have_answered(tmp_path: Path) -> None:
    id = make_call_id(task_key("t", ""), b"asked", 0)
    job = BatchJob("w", "m", [id], reserves=[[0.5, 7]])
    ledger = BatchLog(tmp_path, tmp_path / "quarantine")
    steps: list[tuple[State, dict[str, Any]]] = [
        ("gathered", {"model": "m", "items": job.ids, "most": job.reserves}),
        ("sending", {"upload": "", "bytes": 1}),
        ("created", {"batch": "b"}),
    ]
    for step, fields in steps:
        ledger.note(job, step, **fields)
        if step == "gathered":
            continue
        assert not free_unsent(tmp_path, tmp_path / "quarantine")
        assert load_reserved(tmp_path, ()) == {parse_task_key(id): {id: Cost(0.5, 7)}}
        assert not load_reserved(tmp_path, {parse_task_key(id)}), "its conversation has ended"
    counts: dict[str, Any] = {"cost_usd": 0.1, "saved_usd": 0.1, "unpriced": 0}
    ledger.note(job, "collected", replies=1, failed=0, **counts)
    assert not load_reserved(tmp_path, ())
    ledger.close()


class Parent:
    """Answers the calls of a worker's desk as a test says."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.desk = BatchApiClient(self._send)

    def _send(self, call: CollectCall) -> None:
        self.asked.append(call.id)


@asynccontextmanager
async def model_of(
    parent: Parent, api: FakeBatches, used: set[str]
) -> AsyncIterator[BatchApiModel]:
    settings = settings_for(api, "chat")
    live = open_model(settings, api_key="none", on_retry=lambda message: None)
    budget = WorkerBudget(budget=None, report=lambda told: None)
    gate = CallLimiter(permits=0, budget=budget, on_refusal=lambda *_: None)
    try:
        yield BatchApiModel(
            live,
            client=parent.desk,
            limiter=gate,
            budget=budget,
            task=task_key("t", ""),
            used=used,
            held={},
        )
    finally:
        await live.close()


REQUEST = Request([Message(role="user", content="same")])


def test_a_call_has_the_same_id_until_its_reply_is_journaled() -> None:
    """Also where a task asks the same twice at a time, as subagents can."""

    async def ask() -> None:
        parent = Parent()
        with FakeBatches() as api:
            async with model_of(parent, api, set()) as model:
                calls = [asyncio.create_task(model.complete(REQUEST)) for _ in range(2)]
                await asyncio.sleep(0)
                first, second = parent.asked
                assert first != second
                parent.desk.on_answer(second, "live", b"")
                reply = await calls[1]
                assert reply.batch_item == second
                parent.desk.stop()
                with pytest.raises(Stopped):
                    await calls[0]
            again = Parent()
            async with model_of(again, api, {second}) as model:
                calls = [asyncio.create_task(model.complete(REQUEST)) for _ in range(2)]
                await asyncio.sleep(0)
                assert again.asked[0] == first
                assert again.asked[1] not in (first, second)
                again.desk.stop()
                await asyncio.gather(*calls, return_exceptions=True)

    asyncio.run(ask())


def test_an_unreadable_reply_is_requested_again_live() -> None:
    async def ask() -> None:
        parent = Parent()
        with FakeBatches() as api:
            async with model_of(parent, api, set()) as model:
                call = asyncio.create_task(model.complete(REQUEST))
                await asyncio.sleep(0)
                parent.desk.on_answer(parent.asked[0], "reply", b'{"choices": []}')
                assert (await call).message["content"]
            assert api.live.total() == 1

    asyncio.run(ask())


def test_journaled_items_are_found_in_inner_conversations_too() -> None:
    reply: Any = {"kind": "reply", "batch_item": "a"}
    inner: Any = {"kind": "sub", "event": {"kind": "sub", "event": {**reply, "batch_item": "b"}}}
    assert items_in([reply, inner, {"kind": "note"}, {"kind": "reply"}]) == {"a", "b"}  # type: ignore[list-item]
