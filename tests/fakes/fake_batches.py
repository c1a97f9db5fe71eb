"""The batch APIs of OpenAI and Anthropic on the loopback interface, with their live calls beside.

Replies are those of the fake endpoint: they depend on the request alone. What was paid is counted
by conversation and turn, here and not in the run that is judged; a reply in a batch is paid as soon
as the batch is created, whether or not anybody fetches it.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import orjson
from aiohttp import web

from tests.fakes.fake_answers import DIALECTS, Refused, read_ask
from tests.fakes.fake_script import JSON, Ask, BaseUrls, Key, Options, digest, play

_MOST_BYTES = 300 * 2**20


@dataclass
class _Batch:
    id: str
    created_at: float
    over_at: float
    items: list[tuple[str, str, JSON]]
    """Custom id, what becomes of it (succeeded, errored, expired), and the reply or the error."""
    fields: JSON = field(default_factory=dict)
    failure: JSON | None = None

    @property
    def is_over(self) -> bool:
        return time.time() >= self.over_at

    def count(self, *outcomes: str) -> int:
        return sum(outcome in outcomes for _, outcome, _ in self.items)


@dataclass(kw_only=True)
class FakeBatches(BaseUrls):
    """Both APIs in a thread of this process, for the time of a `with` block."""

    options: Options = field(default_factory=Options)
    """How replies look; its faults are not played."""
    delay_s: float = 0.2
    """From creation to the end of a batch."""
    create_s: float = 0.0
    """How long a creation takes before it is done, and again until it is answered."""
    answer_s: float | None = None
    """How long the second takes, where that differs."""
    answers: int | None = None
    """How many live calls get a reply; the rest waits."""
    errored: float = 0.0
    expired: float = 0.0
    """Shares of items that end so; the same ones each time."""
    deaf_creations: int = 0
    """So many creations are carried out, and their connection is cut instead of an answer."""
    full_creations: int = 0
    """So many batches of OpenAI fail because too much is queued."""
    refuse: int = 0
    """Status with which creations are refused; 0 for none."""
    token_file: Path | None = None
    """Where the token is that each request must bring; None for any."""
    calls_per_token: int = 2
    """One request in so many finds that the token has changed on its way; the first one does."""
    results_root: str = ""
    """Where results are, as Anthropic says it; "" for its own place."""

    def __post_init__(self) -> None:
        self.paid: Counter[Key] = Counter()
        """Replies in batches, by conversation and turn."""
        self.live: Counter[Key] = Counter()
        """Replies to live calls, likewise."""
        self.batches: dict[str, _Batch] = {}
        self.bodies: list[JSON] = []
        """The requests in batches."""
        self._files: dict[str, bytes] = {}
        self._numbers = itertools.count(1)
        self._arrived = itertools.count(1)
        self.refused = 0
        """Requests whose token was no longer taken."""
        self._change_token(0)

    def __enter__(self) -> Self:
        ready = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(ready),))
        self._thread.start()
        if not ready.wait(60):
            raise RuntimeError("the batch APIs did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    @property
    def paid_twice(self) -> dict[Key, int]:
        """What was in a batch that brought its reply, and was asked once more anywhere."""
        times = {key: n + (key in self.live) for key, n in self.paid.copy().items()}
        return {key: n for key, n in times.items() if n > 1}

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=_MOST_BYTES, middlewares=[self._check_token])
        app.router.add_post("/v1/files", self._upload)
        app.router.add_delete("/v1/files/{id}", self._delete)
        app.router.add_get("/v1/files/{id}/content", self._content)
        app.router.add_post("/v1/batches", self._create_openai)
        app.router.add_get("/v1/batches", self._list_openai)
        app.router.add_get("/v1/batches/{id}", self._show_openai)
        batches = "/v1/messages/batches"
        app.router.add_post(batches, self._create_anthropic)
        app.router.add_get(batches, self._list_anthropic)
        app.router.add_get(batches + "/{id}", self._show_anthropic)
        app.router.add_get(batches + "/{id}/results", self._results)
        for path in DIALECTS:
            app.router.add_post(path, self._answer)
        # What a client that was killed has sent is carried out all the same.
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=False, shutdown_timeout=0.1
        )
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        ready.set()
        await self._end.wait()
        await runner.cleanup()

    def _change_token(self, turn: int) -> None:
        self._token = f"token-of-turn-{turn}-0123456789"
        if self.token_file is not None:
            # Whole at every moment: clients read it while it changes.
            written = self.token_file.with_suffix(".new")
            written.write_text(self._token)
            written.replace(self.token_file)

    @web.middleware
    async def _check_token(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self.token_file is not None:
            turn, since = divmod(next(self._arrived) - 1, self.calls_per_token)
            if not since:
                self._change_token(turn + 1)
            headers = request.headers
            if self._token not in headers.get("authorization", headers.get("x-api-key", "")):
                self.refused += 1
                said = f"no longer: {dict(headers)}"
                return web.json_response({"error": {"message": said}}, status=401)
        return await handler(request)

    # Live calls.

    async def _answer(self, request: web.Request) -> web.Response:
        try:
            ask = read_ask(request.path, _plain(request), await request.read(), self.options)
        except Refused as refused:
            error = DIALECTS[request.path].error(refused.status, str(refused))
            return web.json_response(error, status=refused.status)
        while self.answers is not None and self.live.total() >= self.answers:
            if request.transport is None or request.transport.is_closing():
                return web.Response()  # nobody waits for it any more
            await asyncio.sleep(0.005)
        self.live[ask.key] += 1
        return web.json_response(self._reply(ask))

    def _reply(self, ask: Ask) -> JSON:
        return ask.dialect.body(play(ask, self.options))

    # What both have in common.

    def _play(
        self, path: str, headers: dict[str, str], id: str, body: JSON
    ) -> tuple[str, str, JSON]:
        self.bodies.append(body)
        dialect = DIALECTS[path]
        try:
            ask = read_ask(path, headers, orjson.dumps(body), self.options)
        except Refused as refused:
            return id, "errored", dialect.error(refused.status, str(refused))
        point = int(digest(f"item {ask.key}", 6), 16) / 2**48
        if point < self.errored:
            return id, "errored", dialect.error(500, "as was asked for")
        if point < self.errored + self.expired:
            return id, "expired", {}
        self.paid[ask.key] += 1
        return id, "succeeded", self._reply(ask)

    async def _begin(self, items: list[tuple[str, str, JSON]], **fields: Any) -> _Batch:
        id = f"batch_{next(self._numbers)}"
        now = time.time()
        # Neither API promises an order.
        random.Random(id).shuffle(items)
        batch = self.batches[id] = _Batch(
            id=id, created_at=now, over_at=now + self.delay_s, items=items, fields=fields
        )
        await asyncio.sleep(self.create_s if self.answer_s is None else self.answer_s)
        return batch

    def _cut(self, request: web.Request) -> bool:
        """Whether this creation gets no answer."""
        if not self.deaf_creations:
            return False
        self.deaf_creations -= 1
        if request.transport is not None:
            request.transport.abort()
        return True

    def _page(self, request: web.Request, after: str) -> tuple[list[_Batch], bool]:
        listed = sorted(self.batches.values(), key=lambda one: -int(one.id.partition("_")[2]))
        if after in request.query:
            ids = [one.id for one in listed]
            listed = listed[ids.index(request.query[after]) + 1 :]
        limit = min(2, int(request.query["limit"]))  # so that there are several pages
        return listed[:limit], len(listed) > limit

    # OpenAI.

    async def _upload(self, request: web.Request) -> web.Response:
        form = await request.post()
        file = form["file"]
        assert form["purpose"] == "batch"
        assert isinstance(file, web.FileField)
        id = f"file-{next(self._numbers)}"
        self._files[id] = file.file.read()
        return web.json_response({"id": id, "object": "file"})

    async def _delete(self, request: web.Request) -> web.Response:
        if self._files.pop(request.match_info["id"], None) is None:
            return web.json_response(_openai_error(404, "no such file"), status=404)
        return web.json_response({"id": request.match_info["id"], "deleted": True})

    async def _create_openai(self, request: web.Request) -> web.Response:
        body = await request.json()
        await asyncio.sleep(self.create_s)
        if self.refuse:
            return web.json_response(_openai_error(self.refuse, "refused"), status=self.refuse)
        lines = self._files.get(body["input_file_id"])
        if lines is None:
            return web.json_response(_openai_error(400, "no such file"), status=400)
        fields = {name: body[name] for name in ("endpoint", "input_file_id", "metadata")}
        items = [orjson.loads(line) for line in lines.splitlines()]
        assert len({item["custom_id"] for item in items}) == len(items)
        if self.full_creations:
            self.full_creations -= 1
            batch = await self._begin([], **fields)
            error = {"code": "token_limit_exceeded", "message": "Enqueued token limit reached"}
            batch.failure = {"object": "list", "data": [error]}
            return web.json_response(_openai(batch))
        assert {item["url"] for item in items} == {body["endpoint"]}
        played = [
            self._play(item["url"], _plain(request), item["custom_id"], item["body"])
            for item in items
        ]
        batch = await self._begin(played, **fields)
        if self._cut(request):
            return web.Response()
        return web.json_response(_openai(batch))

    async def _list_openai(self, request: web.Request) -> web.Response:
        found, more = self._page(request, "after")
        data = [_openai(batch) for batch in found]
        return web.json_response({"object": "list", "data": data, "has_more": more})

    async def _show_openai(self, request: web.Request) -> web.Response:
        batch = self.batches.get(request.match_info["id"])
        if batch is None:
            return web.json_response(_openai_error(404, "no such batch"), status=404)
        return web.json_response(_openai(batch))

    async def _content(self, request: web.Request) -> web.StreamResponse:
        kind, _, id = request.match_info["id"].partition("-")
        wanted = ("succeeded",) if kind == "output" else ("errored", "expired")

        async def lines() -> AsyncIterator[JSON]:
            for custom_id, outcome, body in self.batches[id].items:
                if outcome not in wanted:
                    continue
                line: JSON = {"id": f"req_{custom_id}", "custom_id": custom_id, "error": None}
                if outcome == "expired":
                    error = {"code": "batch_expired", "message": "This request expired."}
                    yield {**line, "response": None, "error": error}
                else:
                    status = 200 if outcome == "succeeded" else 500
                    yield {**line, "response": {"status_code": status, "body": body}}

        return await _stream(request, lines())

    # Anthropic.

    async def _create_anthropic(self, request: web.Request) -> web.Response:
        body = await request.json()
        await asyncio.sleep(self.create_s)
        if self.refuse:
            error = DIALECTS["/v1/messages"].error(self.refuse, "refused")
            return web.json_response(error, status=self.refuse)
        items = body["requests"]
        assert len({item["custom_id"] for item in items}) == len(items)
        assert all(len(item["custom_id"]) <= 64 for item in items)
        played = [
            self._play("/v1/messages", _plain(request), item["custom_id"], item["params"])
            for item in items
        ]
        batch = await self._begin(played)
        if self._cut(request):
            return web.Response()
        return web.json_response(self._anthropic(batch))

    async def _list_anthropic(self, request: web.Request) -> web.Response:
        found, more = self._page(request, "after_id")
        data = [self._anthropic(batch) for batch in found]
        last = data[-1]["id"] if data else None
        return web.json_response({"data": data, "has_more": more, "last_id": last})

    async def _show_anthropic(self, request: web.Request) -> web.Response:
        batch = self.batches.get(request.match_info["id"])
        if batch is None:
            error = DIALECTS["/v1/messages"].error(404, "no such batch")
            return web.json_response(error, status=404)
        return web.json_response(self._anthropic(batch))

    def _anthropic(self, batch: _Batch) -> JSON:
        over = batch.is_over
        path = f"/v1/messages/batches/{batch.id}/results"
        counts = {name: batch.count(name) * over for name in ("succeeded", "errored", "expired")}
        return {
            "id": batch.id,
            "type": "message_batch",
            "processing_status": "ended" if over else "in_progress",
            "request_counts": {
                "processing": 0 if over else len(batch.items),
                **counts,
                "canceled": 0,
            },
            "created_at": datetime.fromtimestamp(batch.created_at, UTC).isoformat(),
            "results_url": f"{self.results_root}{path}" if over else None,
        }

    async def _results(self, request: web.Request) -> web.StreamResponse:
        batch = self.batches[request.match_info["id"]]
        assert batch.is_over

        async def lines() -> AsyncIterator[JSON]:
            for custom_id, outcome, body in batch.items:
                more = {"succeeded": {"message": body}, "errored": {"error": body}}
                result = {"type": outcome, **more.get(outcome, {})}
                yield {"custom_id": custom_id, "result": result}

        return await _stream(request, lines())


def _plain(request: web.Request) -> dict[str, str]:
    return {name.lower(): value for name, value in request.headers.items()}


async def _stream(request: web.Request, lines: AsyncIterator[JSON]) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    async for line in lines:
        await response.write(orjson.dumps(line) + b"\n")
    await response.write_eof()
    return response


def _openai_error(status: int, message: str) -> JSON:
    return {"error": {"message": message, "type": "invalid_request_error", "code": None}}


def _openai(batch: _Batch) -> JSON:
    status = "in_progress"
    if batch.failure is not None:
        status = "failed"
    elif batch.is_over:
        status = "expired" if batch.count("expired") else "completed"
    done = batch.is_over and batch.failure is None
    failed = batch.count("errored", "expired")
    return {
        "id": batch.id,
        "object": "batch",
        "status": status,
        "errors": batch.failure,
        "created_at": int(batch.created_at),
        **batch.fields,
        "output_file_id": f"output-{batch.id}" if done and batch.count("succeeded") else None,
        "error_file_id": f"error-{batch.id}" if done and failed else None,
        "request_counts": {
            "total": len(batch.items),
            "completed": batch.count("succeeded") if done else 0,
            "failed": failed if done else 0,
        },
    }
