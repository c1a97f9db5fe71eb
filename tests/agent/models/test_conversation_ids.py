"""Each request says which conversation it belongs to, in the words that its endpoint reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.messages.message import Message
from agent.models.client.endpoint import open_model
from agent.models.client.prepared import session_headers
from agent.models.client.relayed import RelayRequest
from agent.models.conversation_id import inner_conversation_id, new_run_key, task_conversation_id
from agent.models.dialects import openai_chat, openai_responses
from agent.models.errors import ModelError
from agent.models.model import ModelSettings, Request
from agent.models.providers import OWN_SERVERS_HEADERS, PROVIDERS, SESSION_HEADERS
from agent.models.resolve import resolve_model
from batch_trajectories.config.endpoint_config import read_endpoints
from tests.agent.models.test_unsupported_options import PATHS, REPLIES
from tests.helpers.answering import JSON, Handler, listening

ID = "0123456789abcdef0123456789abcdef"
QUESTION = Message(role="user", content="hi")


class Asked(dict[str, str]):
    """The headers of a request, with names in lower case."""

    body: JSON


Refuse = Callable[[Asked], tuple[int, JSON] | None]


@contextmanager
def endpoint(refuse: Refuse = lambda asked: None) -> Iterator[tuple[str, list[Asked]]]:
    """An endpoint of all dialects: its root, and what it was asked."""
    seen: list[Asked] = []

    class Recording(Handler):
        def do_POST(self) -> None:
            asked = Asked({name.lower(): value for name, value in self.headers.items()})
            asked.body = json.loads(self.body())
            seen.append(asked)
            status, reply = refuse(asked) or (200, REPLIES[self.path])
            self.send(status, json.dumps(reply).encode())

    with listening(Recording) as root:
        yield root, seen


def ask(
    root: str, api: str = "openai_chat", *, times: int = 1, request: Any = None, **fields: Any
) -> None:
    """Ask a model at the endpoint, one time after the other."""
    settings = ModelSettings(name="m", api=api, base_url=root + PATHS[api], key_env=None, **fields)

    async def ask_all() -> None:
        model = open_model(settings, api_key="sk-canary", on_retry=lambda retry: None)
        try:
            for _ in range(times):
                await model.complete(request or Request([QUESTION], conversation=ID))
        finally:
            await model.close()

    asyncio.run(ask_all())


def test_an_id_depends_on_run_task_and_place_and_tells_nothing_else() -> None:
    run, other = new_run_key(), new_run_key()
    mine = task_conversation_id(run, b"task")
    ids = [
        mine,
        task_conversation_id(run, b"other"),
        task_conversation_id(other, b"task"),
        inner_conversation_id(mine, "call_1"),
        inner_conversation_id(mine, "call_2"),
        inner_conversation_id(inner_conversation_id(mine, "call_1"), "call_1"),
    ]
    assert len(set(ids)) == len(ids)
    assert all(8 <= len(id) <= 64 and id.isascii() and id.isalnum() for id in ids)
    assert (task_conversation_id(run, b"task"), inner_conversation_id(mine, "call_1")) == (
        ids[0],
        ids[3],
    )
    assert task_conversation_id("", b"task") == inner_conversation_id("", "call_1") == "", (
        "no key, no id"
    )


@pytest.mark.parametrize("api", PATHS)
@pytest.mark.parametrize("handler", [None, lambda event: None])
def test_a_plain_server_gets_the_id_by_all_names_that_routers_read(api: str, handler: Any) -> None:
    with endpoint() as (root, seen):
        ask(root, api, request=Request([QUESTION], on_delta=handler, conversation=ID))
    assert {seen[0].get(name) for name in OWN_SERVERS_HEADERS} == {ID}
    assert "prompt_cache_key" not in seen[0].body


def test_a_request_of_no_conversation_has_no_id() -> None:
    with endpoint() as (root, seen):
        ask(root, request=Request([QUESTION]))
    assert not seen[0].keys() & SESSION_HEADERS.keys()


def test_every_provider_that_is_sent_an_id_says_where_it_reads_it() -> None:
    for row in PROVIDERS.values():
        assert bool(row.session_source) == bool(row.session_headers or row.cache_key_apis), row
        assert set(row.session_headers) <= SESSION_HEADERS.keys()


@pytest.mark.parametrize(
    ("model", "base_url", "headers", "keys"),
    [
        ("openai:m", None, (), {"openai_chat", "openai_responses"}),
        ("openrouter:a/m", None, ("x-session-id",), set()),
        ("fireworks:m", None, ("x-session-affinity",), set()),
        ("xai:m", None, ("x-grok-conv-id",), {"openai_responses"}),
        ("mistral:m", None, (), {"openai_chat"}),
        ("anthropic:m", None, (), set()),
        ("groq:m", None, (), set()),
        ("vllm:m", None, OWN_SERVERS_HEADERS, set()),
        ("litellm:m", None, ("x-litellm-session-id", *OWN_SERVERS_HEADERS), set()),
        ("m", "http://10.0.0.1/v1", OWN_SERVERS_HEADERS, set()),
        ("openai:m", "http://10.0.0.1/v1", OWN_SERVERS_HEADERS, set()),
        ("anthropic:m", "http://10.0.0.1", OWN_SERVERS_HEADERS, set()),
        ("m", "https://openrouter.ai/api/v1", ("x-session-id",), set()),
    ],
)
def test_each_provider_gets_the_names_that_it_reads(
    model: str, base_url: str | None, headers: Any, keys: set[str]
) -> None:
    settings = resolve_model(model, base_url=base_url, api=None, key_env=None)
    assert settings.session_headers == headers
    assert set(settings.cache_key_apis or ()) == keys


@pytest.mark.parametrize("dialect", [openai_chat, openai_responses])
def test_the_id_is_the_cache_key_where_the_api_takes_one(dialect: Any) -> None:
    prefix = "openai" if dialect is openai_chat else "responses"
    settings = resolve_model(f"{prefix}:m", base_url=None, api=None, key_env=None)
    body = dialect.request_body(settings, Request([QUESTION], conversation=ID))
    assert body["prompt_cache_key"] == ID


@pytest.mark.parametrize(
    ("given", "headers", "keys"),
    [
        ("X-User-ID", ("X-User-ID",), ("openai_chat", "openai_responses")),
        ("none", (), ()),
        (False, (), ()),
    ],
)
def test_an_endpoint_names_another_header_or_none(given: Any, headers: Any, keys: Any) -> None:
    entry = {"base_url": "https://api.openai.com/v1", "session_header": given}
    own = read_endpoints({"e": entry})["e"].to_endpoint()
    settings = resolve_model("e:m", base_url=None, api=None, key_env=None, endpoints={"e": own})
    assert (settings.session_headers, settings.cache_key_apis) == (headers, keys)


@pytest.mark.parametrize("name", ["a b", "", "Authorization", "content-length", "x-é"])
def test_what_cannot_be_a_session_header_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="session_header"):
        read_endpoints({"e": {"base_url": "http://h/v1", "session_header": name}})


def test_headers_of_the_user_and_of_an_agent_win() -> None:
    added = session_headers({"X-Session-ID": "mine"}, ("x-session-id", "x-session-affinity"), ID)
    assert added == {"x-session-affinity": ID}


def test_a_retry_has_the_same_id() -> None:
    times = iter([(503, {"error": {"message": "later"}}), None])
    with endpoint(lambda asked: next(times)) as (root, seen):
        ask(root)
    assert [asked["x-session-id"] for asked in seen] == [ID, ID]


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "header x-session-affinity is not allowed"),
        (403, "Request blocked: X-SESSION-AFFINITY"),
        (400, "blocked by policy 949110"),
        (422, "no"),
    ],
)
@pytest.mark.parametrize("api", PATHS)
def test_a_server_that_refuses_the_id_gets_none_and_the_log_says_so_once(
    api: str, status: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(asked: Asked) -> tuple[int, JSON] | None:
        return (status, {"error": {"message": message}}) if "x-session-affinity" in asked else None

    with endpoint(refuse) as (root, seen):
        ask(root, api, times=3)
    assert [bool(asked.keys() & SESSION_HEADERS.keys()) for asked in seen] == [True] + [False] * 3
    assert [one.getMessage().count("the id of a conversation") for one in caplog.records] == [1]


def test_a_cache_key_that_is_refused_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(asked: Asked) -> tuple[int, JSON] | None:
        message = "Extra inputs are not permitted: prompt_cache_key"
        is_there = "prompt_cache_key" in asked.body
        return (400, {"error": {"message": message}}) if is_there else None

    with endpoint(refuse) as (root, seen):
        ask(root, times=2, cache_key_apis=("openai_chat",))
    assert ["prompt_cache_key" in asked.body for asked in seen] == [True, False, False]
    assert all(asked["x-session-id"] == ID for asked in seen), "the headers were not refused"
    assert len(caplog.records) == 1


def test_an_error_about_something_else_is_raised_as_it_came() -> None:
    """The first one is tried once more, as it may be about the headers; no later one is."""
    refused = (400, {"error": {"message": "the picture is too large"}})
    with endpoint(lambda asked: refused) as (root, seen):
        for _ in range(2):
            with pytest.raises(ModelError, match="the picture is too large"):
                ask(root)
    assert len(seen) == 4
    answers = iter([None, refused])
    match = "the picture is too large"
    with (
        endpoint(lambda asked: next(answers)) as (root, seen),
        pytest.raises(ModelError, match=match),
    ):
        ask(root, times=2)
    assert len(seen) == 2, "the headers were taken before"


def relay_request(headers: Mapping[str, str] = {}, **fields: Any) -> RelayRequest:
    body = b' {"model": "m", "messages": []}'
    return RelayRequest(
        path="/chat/completions",
        body=body,
        headers=headers,
        max_tokens=1,
        read=openai_chat.read_reply,
        conversation=ID,
        **fields,
    )


def test_relayed_requests_have_the_id_too(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(asked: Asked) -> tuple[int, JSON] | None:
        refused = (400, {"error": {"message": "x-session-affinity: unknown header"}})
        return refused if "x-session-affinity" in asked else None

    with endpoint() as (root, seen):
        ask(root, request=relay_request({"x-session-id": "its-own"}, has_cache_key=False))
        key = ("openai_chat",)
        ask(root, request=relay_request(has_cache_key=False), cache_key_apis=key)
        ask(root, request=relay_request(), cache_key_apis=key)
    assert (seen[0]["x-session-id"], seen[0]["x-session-affinity"]) == ("its-own", ID)
    assert [asked.body.get("prompt_cache_key") for asked in seen] == [None, ID, None]
    with endpoint(refuse) as (root, seen):
        ask(root, request=relay_request(), times=2)
    assert ["x-session-affinity" in asked for asked in seen] == [True, False, False]
    assert len(caplog.records) == 1


def test_keys_that_commands_print_do_not_cost_the_id(tmp_path: Path) -> None:
    """Requests are prepared anew for each key; the id is in all of them."""
    keys = tmp_path / "keys"
    keys.write_text("old\nnew\n")
    script = f"sed -n 1p {keys}; sed -i 1d {keys}"

    def refuse(asked: Asked) -> tuple[int, JSON] | None:
        is_old = asked["authorization"] == "Bearer old"
        return (401, {"error": {"message": "expired"}}) if is_old else None

    entry = {"key_command": ["sh", "-c", script], "base_url": "http://x/v1"}
    connection = read_endpoints({"e": entry})["e"].to_endpoint().connection
    with endpoint(refuse) as (root, seen):
        ask(root, connection=connection)
    assert [asked["x-session-id"] for asked in seen] == [ID, ID]
