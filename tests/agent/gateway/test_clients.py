"""The providers' own clients take what a gateway writes, and their types are what agents send.

They are imported where they are used: each pytest process imports this file, and they take seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
from pydantic import TypeAdapter

from agent.models.dialects.dialect import read_reply
from agent.wires.base import Wire
from agent.wires.wires import WIRES
from batch_trajectories.basics import exact_json
from tests.agent.gateway.talking import TALKS, Said
from tests.helpers.answering import Handler, listening

pytestmark = pytest.mark.slow

JSON = dict[str, Any]

PARAMS = {
    "openai_chat": ("openai.types.chat.completion_create_params", "CompletionCreateParams"),
    "openai_responses": ("openai.types.responses.response_create_params", "ResponseCreateParams"),
    "anthropic_messages": ("anthropic.types.message_create_params", "MessageCreateParams"),
}
EVENTS = {
    "openai_chat": ("openai.types.chat", "ChatCompletionChunk"),
    "anthropic_messages": ("anthropic.types", "RawMessageStreamEvent"),
}
SAID = [
    Said("Done."),
    Said("", "ls"),
    Said("Now.", 'echo "é"', thought="Hm."),
]


@contextmanager
def playing(wire: Wire, reply: JSON, *, status: int = 200) -> Iterator[str]:
    """An endpoint that streams `reply`, or with another status refuses."""

    class Playing(Handler):
        def do_POST(self) -> None:
            self.body()
            self.send_response(status)
            kind = "text/event-stream" if status == 200 else "application/json"
            self.send_header("content-type", kind)
            self.end_headers()
            if status != 200:
                self.wfile.write(wire.write_error(status, "budget", "The budget is spent."))
                return
            for event in (wire.keepalive, *wire.write_stream(reply)):
                self.wfile.write(event)
                self.wfile.write(wire.keepalive)

    with listening(Playing) as url:
        yield url


def ask_chat(url: str) -> JSON:
    client = import_module("openai").OpenAI(api_key="k", base_url=f"{url}/v1", max_retries=0)
    messages = [{"role": "user", "content": "Hi."}]
    with client.chat.completions.stream(model="m", messages=messages) as stream:
        stream.until_done()
        final: JSON = stream.get_final_completion().to_dict()
    return final


def ask_messages(url: str) -> JSON:
    client = import_module("anthropic").Anthropic(api_key="k", base_url=url, max_retries=0)
    messages = [{"role": "user", "content": "Hi."}]
    with client.messages.stream(model="m", messages=messages, max_tokens=9) as stream:
        final: JSON = stream.get_final_message().to_dict()
    return final


def ask_responses(url: str) -> JSON:
    client = import_module("openai").OpenAI(api_key="k", base_url=f"{url}/v1", max_retries=0)
    with client.responses.stream(model="m", input="Hi.") as stream:
        final: JSON = stream.get_final_response().to_dict()
    return final


ASK: dict[str, Callable[[str], JSON]] = {
    "openai_chat": ask_chat,
    "anthropic_messages": ask_messages,
    "openai_responses": ask_responses,
}
EACH = pytest.mark.parametrize("api", ASK)


@EACH
@pytest.mark.parametrize("said", SAID, ids=lambda said: said.text or "call")
def test_a_client_reads_from_a_stream_what_the_reply_says(api: str, said: Said) -> None:
    """Keep-alives between the events do no harm."""
    wire = WIRES[api]
    reply = TALKS[api]().reply(said)
    with playing(wire, reply) as url:
        final = ASK[api](url)
    expected = read_reply(wire.api, exact_json.dumps(reply))
    completion = read_reply(wire.api, exact_json.dumps(final))
    assert completion.message["content"] == expected.message["content"]
    assert completion.message.get("tool_calls") == expected.message.get("tool_calls")
    assert (completion.finish_reason, completion.usage) == (expected.finish_reason, expected.usage)


@EACH
def test_a_client_raises_the_words_of_a_refusal(api: str) -> None:
    wire = WIRES[api]
    with (
        playing(wire, {}, status=400) as url,
        pytest.raises(Exception, match=r"The budget is spent\.") as caught,
    ):
        ASK[api](url)
    assert type(caught.value).__name__ == "BadRequestError"


@EACH
def test_what_the_agents_of_these_tests_send_has_the_declared_type(api: str) -> None:
    module, name = PARAMS[api]
    adapter: TypeAdapter[Any] = TypeAdapter(getattr(import_module(module), name + "Streaming"))
    talk = TALKS[api]()
    talk.say("Hi.")
    talk.hear(talk.reply(Said("Now.", "ls")))
    talk.result("a")
    body = talk.body()
    body.pop("client_metadata", None)  # which only Codex sends
    adapter.validate_python(body)


@pytest.mark.parametrize("api", EVENTS)
@pytest.mark.parametrize("said", SAID, ids=lambda said: said.text or "call")
def test_the_events_of_a_stream_have_the_declared_types(api: str, said: Said) -> None:
    module, name = EVENTS[api]
    adapter: TypeAdapter[Any] = TypeAdapter(getattr(import_module(module), name))
    for event in WIRES[api].write_stream(TALKS[api]().reply(said)):
        data = event.decode().partition("data: ")[2].strip()
        if data != "[DONE]":
            adapter.validate_python(exact_json.loads(data))
