"""Token ids of an agent's calls: each turn has what was sent for it, whatever the agent changes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from aiohttp import web

from agent.messages.message import AgentRestartedEvent
from agent.messages.tokens import has_ids
from agent.models.dialects.dialect import read_reply
from agent.models.dialects.token_ids import take_tokens
from agent.models.model import ModelSettings
from agent.state.events import Clock, exchange_event
from agent.state.trajectory import Trajectory
from batch_trajectories.basics import exact_json
from tests.agent.gateway.relaying import ask, events_of, reply_of, run_gateway, stream
from tests.agent.gateway.talking import JSON, ChatTalk, Recording, Said, Talk
from tests.fakes.fake_tokens import Template, add_tokens, refusal
from tests.helpers.stored import token_turns_of

PROMPT = "Count the files."
SETTINGS = ModelSettings("m", "openai_chat", "http://127.0.0.1:1/v1", None, token_ids=True)
FIELDS = ("logprobs", "prompt_token_ids", "token_ids", "meta_info")
ASKS = {"return_token_ids": True, "logprobs": True, "temperature": 0.5}


class TokenRecording(Recording):
    """A gateway whose endpoint gives token ids."""

    def __init__(self) -> None:
        super().__init__(PROMPT)
        self.sent: list[tuple[list[int], list[int]]] = []
        """Prompt and completion of each call."""

    def relay(self, talk: Talk, said: Said, *, echo: bool = True) -> JSON:
        body = {**talk.body(), **ASKS}
        wire, request = self.read(talk)
        reply = talk.reply(said)
        plain = {**reply, "choices": [dict(choice) for choice in reply["choices"]]}
        add_tokens(plain, body, "vllm", Template())
        self.sent.append((plain["prompt_token_ids"], plain["choices"][0]["token_ids"]))
        completion = read_reply(wire.api, exact_json.dumps(plain))
        completion = take_tokens(completion, SETTINGS, body)
        self.take(exchange_event(self.threads, request, completion, reply, Clock()))
        talk.hear(reply)
        return reply

    def check(self) -> list[list[bool]]:
        """Compare all turns with what was sent; whether each continues the one before."""
        record = self.trajectory.to_record()
        again = Trajectory([{"role": "user", "content": PROMPT}], self.events)
        assert again.to_record() == record
        return [[*self._continued(one)] for one in (record, *record["inner"])]

    def _continued(self, record: dict[str, Any]) -> Iterator[bool]:
        sequence: list[int] = []
        for turn in token_turns_of(record):
            stored = record["turns"][turn.number]
            prompt = sequence[: turn.shared] + turn.prompt
            assert (prompt, turn.completion) == self.sent[stored["exchange"]]
            assert stored["tokens"]["sampling"] == {"temperature": 0.5}
            assert turn.logprobs is not None
            yield turn.shared == turn.previous_length
            sequence = prompt + turn.completion


class ExactTalk(ChatTalk):
    """Repeats replies as they came."""

    def hear(self, reply: JSON) -> None:
        message = reply["choices"][0]["message"]
        self.items.append({**message, "content": message["content"] or ""})


@pytest.fixture
def worked() -> tuple[TokenRecording, ChatTalk]:
    """A recording after three calls."""
    recording, talk = TokenRecording(), ExactTalk()
    talk.say(PROMPT)
    for command in ("ls", "wc", "du"):
        recording.relay(talk, Said("Now.", command))
        talk.result(f"ran {command}")
    return recording, talk


def test_prompts_of_a_conversation_are_stored_as_what_they_add(
    worked: tuple[TokenRecording, ChatTalk],
) -> None:
    recording, talk = worked
    recording.relay(talk, Said("Done."))
    assert recording.check() == [[True] * 4]


def test_a_conversation_that_repeats_replies_behind_changed_messages_has_their_own_prompts(
    worked: tuple[TokenRecording, ChatTalk],
) -> None:
    """The agent shortens an old result: later replies were sampled after the whole one."""
    recording, talk = worked
    talk.items[2]["content"] = "[old]"
    recording.relay(talk, Said("Done."))
    assert recording.check() == [[True, True, True, False]]


def test_a_conversation_without_an_earlier_turn_has_the_prompts_that_were_sent(
    worked: tuple[TokenRecording, ChatTalk],
) -> None:
    """The turn before is another one than when the reply was recorded."""
    recording, talk = worked
    del talk.items[1:3]
    recording.relay(talk, Said("Done."))
    (main, *_) = recording.check()
    assert len(main) == 3
    assert main[0]  # nothing is before it


def test_any_changes_leave_each_turn_what_was_sent() -> None:
    for seed in range(60):
        draw = random.Random(seed)
        recording = TokenRecording()
        talks = [ExactTalk(system=f"Agent {n}.") for n in range(2)]
        for talk in talks:
            talk.say(PROMPT)
        for step in range(8):
            talk = draw.choice(talks)
            places = [n for n, item in enumerate(talk.items) if item["role"] == "tool"]
            change = draw.random()
            if places and change < 0.25:
                talk.items[draw.choice(places)]["content"] = f"[cut {step}]"
            elif places and change < 0.4:
                place = draw.choice(places)
                del talk.items[place - 1 : place + 1]
            recording.relay(talk, Said("Now.", f"step {step}"))
            talk.result(f"ran {step}")
            if draw.random() < 0.1:
                recording.restart()
        recording.check()


@pytest.mark.parametrize("style", ["vllm", "sglang"])
@pytest.mark.parametrize("is_live", [False, True])
@pytest.mark.parametrize("more", [{}, {"stream": True, "stream_options": {"include_usage": True}}])
@pytest.mark.parametrize("asks", [{}, {"logprobs": True}])
def test_an_agent_gets_the_tokens_that_it_asked_for_and_no_others(
    style: str, more: JSON, asks: JSON, *, is_live: bool
) -> None:
    """All are recorded, and a restart answers with the same. SGLang has none in streams."""
    api = "openai_chat"

    async def play(request: web.BaseRequest, content: bytes, n: int) -> web.StreamResponse:
        body = orjson.loads(content)
        assert refusal(body, style) is None
        reply = reply_of(api, text="Done \N{SNOWMAN}.")
        add_tokens(reply, body, style, Template())
        if body.get("stream"):
            return await stream(request, events_of(api, reply))
        return web.json_response(reply)

    settings = {"token_ids": True, "reference": f"{style}:m"}

    async def run() -> None:
        async with run_gateway(api, play, settings=settings, is_live=is_live) as world:
            status, said = await world.read(ask(**more, **asks))
        assert status == 200
        assert said.endswith(b"data: [DONE]\n\n" if more else b"}")
        assert [field for field in FIELDS if f'"{field}"'.encode() in said] == [*asks]
        (exchange,) = world.exchanges
        assert has_ids(exchange["reply"])
        assert [field for field in FIELDS if field in str(exchange["body"])] == [*asks]
        restarted = [*world.events, AgentRestartedEvent(kind="agent_restarted", at=0.0)]
        async with run_gateway(api, play, events=restarted, settings=settings) as world:
            status, again = await world.read(ask(**more, **asks))
        assert world.endpoint.asked == []
        assert [field for field in FIELDS if f'"{field}"'.encode() in again] == [*asks]

    asyncio.run(run())
