"""Token ids and log-probabilities: how they are asked for, read and stored."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import orjson
import pytest

from agent.messages.message import Message, ToolCall
from agent.messages.tokens import (
    SampledTokens,
    encode_tokens,
    missing_token_data,
    pack_ids,
    pack_logprobs,
    token_turns,
)
from agent.models.batches import calls
from agent.models.dialects import openai_chat
from agent.models.dialects.dialect import read_own_reply
from agent.models.dialects.openai_chat import ChatAssembly
from agent.models.model import Completion, ModelSettings, Request
from agent.models.resolve import resolve_sibling
from batch_trajectories.records.record_types import StoredTokens
from tests.agent.models.test_unsupported_options import ask, openai_error, refusing, serving

JSON = dict[str, Any]
OWN = ModelSettings("m", "openai_chat", "http://127.0.0.1:1/v1", None, token_ids=True)
ASKED = Request([Message(role="user", content="Hi")])
STREAMED = Request(ASKED.messages, on_delta=lambda _: None)
BOTH = {"logprobs": True, "top_logprobs": 0}
VLLM = {"return_token_ids": True}
SGLANG = {"return_meta_info": True, "return_prompt_token_ids": True}


def content(*texts: str, **more: Any) -> JSON:
    return {"content": [{"token": text, "logprob": -0.5, **more} for text in texts]}


def body(choice: JSON, **more: Any) -> JSON:
    message = {"role": "assistant", "content": "ab"}
    return {"choices": [{"message": message, "finish_reason": "stop", **choice}], **more}


def read(reply: JSON) -> Completion:
    return read_own_reply(OWN, orjson.dumps(reply))


def requested_fields(reference: str, base_url: str, request: Request) -> JSON:
    settings = ModelSettings(
        "m", "openai_chat", base_url, None, token_ids=True, reference=reference
    )
    made = openai_chat.request_body(settings, request)
    return {key: made[key] for key in made.keys() & {*BOTH, *VLLM, *SGLANG}}


@pytest.mark.parametrize(
    ("reference", "request_", "expected"),
    [
        ("m", ASKED, BOTH | VLLM | SGLANG),
        ("m", STREAMED, BOTH | VLLM),
        ("vllm:m", ASKED, BOTH | VLLM),
        ("sglang:m", ASKED, BOTH | SGLANG),
        ("sglang:m", STREAMED, BOTH),
    ],
)
def test_a_server_of_the_users_own_is_asked_in_its_words(
    reference: str, request_: Request, expected: JSON
) -> None:
    assert requested_fields(reference, "http://127.0.0.1:1/v1", request_) == expected


def test_a_provider_is_asked_only_for_what_its_api_has() -> None:
    assert requested_fields("openai:m", "https://api.openai.com/v1", ASKED) == BOTH


def test_nothing_is_asked_for_without_the_option() -> None:
    settings = ModelSettings("m", "openai_chat", "http://127.0.0.1:1/v1", None)
    made = openai_chat.request_body(settings, ASKED)
    assert not made.keys() & {*BOTH, *VLLM, *SGLANG}


def test_fields_of_the_user_win() -> None:
    settings = ModelSettings(
        "m",
        "openai_chat",
        "http://127.0.0.1:1/v1",
        None,
        token_ids=True,
        extra_body={"top_logprobs": 5},
    )
    assert openai_chat.request_body(settings, ASKED)["top_logprobs"] == 5


def test_a_sibling_is_asked_too() -> None:
    assert resolve_sibling("ollama:x", OWN).token_ids


def test_the_reply_of_vllm() -> None:
    reply = body(
        {"token_ids": [7, 2**32 - 1], "logprobs": content("a", "b"), "stop_reason": 5},
        prompt_token_ids=[1, 2, 3],
        kv_transfer_params={"x": 1},
    )
    completion = read(reply)
    expected = SampledTokens(
        pack_ids([1, 2, 3]), pack_ids([7, 2**32 - 1]), pack_logprobs([-0.5, -0.5])
    )
    assert completion.tokens == expected
    assert completion.extra == {
        "reply": {"kv_transfer_params": {"x": 1}},
        "choice": {"stop_reason": 5},
    }


def test_a_stream_of_vllm_gives_the_same() -> None:
    assembly = ChatAssembly(lambda _: None)
    assembly.add({"prompt_token_ids": [1, 2], "choices": [{"index": 0, "delta": {}}]})
    for n, text in enumerate("ab"):
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
        assembly.add({"choices": [{**choice, "token_ids": [n], "logprobs": content(text)}]})
    assembly.add({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    completion = read_own_reply(OWN, assembly.finish())
    assert completion.tokens == SampledTokens(
        pack_ids([1, 2]), pack_ids([0, 1]), pack_logprobs([-0.5, -0.5])
    )
    assert completion.extra is None


def test_the_reply_of_sglang() -> None:
    meta = {"output_token_logprobs": [[-0.5, 7, None], [-0.5, 8, "b"]], "weight_version": "3"}
    choice = {"prompt_token_ids": [1], "meta_info": meta, "logprobs": content("a", "b")}
    completion = read(body(choice))
    assert completion.tokens == SampledTokens(
        pack_ids([1]), pack_ids([7, 8]), pack_logprobs([-0.5, -0.5])
    )
    assert completion.extra == {"choice": {"meta_info": {"weight_version": "3"}}}


def test_ids_that_come_twice_are_kept_once() -> None:
    meta = {"output_token_logprobs": [[-0.5, 7, None]]}
    choice = {"prompt_token_ids": [1], "meta_info": meta, "token_ids": [7]}
    completion = read(body(choice, prompt_token_ids=[1]))
    assert completion.tokens == SampledTokens(pack_ids([1]), pack_ids([7]), pack_logprobs([-0.5]))
    assert completion.extra is None


def test_ids_that_contradict_each_other_are_all_kept() -> None:
    meta = {"output_token_logprobs": [[-0.5, 7, None]]}
    other = content("a")
    other["content"][0]["logprob"] = -0.75
    choice = {"prompt_token_ids": [2], "meta_info": meta, "token_ids": [8], "logprobs": other}
    completion = read(body(choice, prompt_token_ids=[1]))
    assert completion.tokens == SampledTokens(pack_ids([1]), pack_ids([7]), pack_logprobs([-0.5]))
    assert completion.extra == {
        "choice": {"prompt_token_ids": [2], "token_ids": [8], "logprobs": other}
    }


def test_logprobs_alone_keep_the_texts_of_their_tokens() -> None:
    entry = {"bytes": [195, 164], "top_logprobs": []}
    completion = read(body({"logprobs": content("ä", **entry)}))
    assert completion.tokens == SampledTokens(logprobs=pack_logprobs([-0.5]), texts=["ä"])
    assert completion.extra is None


@pytest.mark.parametrize(
    "choice",
    [
        {"token_ids": [1, -1]},
        {"token_ids": [1.5]},
        {"token_ids": [2**32]},
        {"token_ids": "abc"},
        {"logprobs": {"content": [{"token": "a", "logprob": None}]}},
        {"logprobs": {"content": [{"token": 1, "logprob": -0.5}]}},
        {"logprobs": {"content": [{"token": "a", "logprob": 1e300}]}},
        {"logprobs": {"content": [None]}},
        {"logprobs": content("a") | {"refusal": [{"token": "a", "logprob": -1.0}]}},
        {"meta_info": {"output_token_logprobs": [[-0.5, None, "a"]]}},
        {"meta_info": {"output_token_logprobs": [[-0.5]]}},
    ],
)
def test_what_cannot_be_packed_stays_as_it_came(choice: JSON) -> None:
    completion = read(body(copy.deepcopy(choice)))
    assert completion.tokens is None
    assert completion.extra == {"choice": choice}


@pytest.mark.parametrize("ids", [None, [7]])
@pytest.mark.parametrize(
    "more",
    [{"top_logprobs": [{"token": "b", "logprob": -1.0}]}, {"bytes": [200]}, {"other": 1}],
)
def test_logprobs_that_say_more_are_packed_and_stay(more: JSON, ids: list[int] | None) -> None:
    """With `top_logprobs`, say, which a user asks for by `extra_body`."""
    logprobs = content("a", **more)
    is_plain = ids is not None and "bytes" in more  # an id says what bytes say
    completion = read(
        body({"logprobs": copy.deepcopy(logprobs)} | ({"token_ids": ids} if ids else {}))
    )
    assert completion.tokens is not None
    assert completion.tokens.logprobs == pack_logprobs([-0.5])
    assert completion.tokens.texts == (None if ids else ["a"])
    assert completion.extra == (None if is_plain else {"choice": {"logprobs": logprobs}})


def test_newlines_around_the_text_of_a_reply_are_not_sent_back() -> None:
    """Templates write their own; the record keeps those of the wire."""
    said = [
        Message(role="user", content="\nHi\n"),
        Message(role="assistant", content="\n\nLook.\n", tool_calls=[call_of("c")]),
        Message(role="tool", content="\nr\n", tool_call_id="c", name="f", is_error=False),
        Message(role="assistant", content="\n\n", tool_calls=[call_of("d")]),
        Message(role="tool", content="r", tool_call_id="d", name="f", is_error=False),
        Message(role="assistant", content="\n A\n\nB \n"),
    ]
    sent = openai_chat.request_body(OWN, Request(said))["messages"]
    texts = [message["content"] for message in sent]
    assert texts == ["\nHi\n", "Look.", "\nr\n", None, "r", " A\n\nB "]
    assert said[1]["content"] == "\n\nLook.\n"
    plain = openai_chat.request_body(replace(OWN, token_ids=None), Request(said))["messages"]
    assert [message["content"] for message in plain] == [message["content"] for message in said]


def call_of(id: str) -> ToolCall:
    return ToolCall(id=id, type="function", function={"name": "f", "arguments": "{}"})


def test_the_texts_at_a_split_are_named() -> None:
    texts = {1: "a", 2: "b", 3: "\n\n", 4: "\n"}
    turns = turns_of(SampledTokens(pack_ids([1]), pack_ids([3, 2]), None))
    prompt = pack_ids([1, 4, 4, 2, 9])
    stored = encode_tokens(SampledTokens(prompt, pack_ids([5])), turns, texts)
    assert stored["split"] == {"sampled": "\n\nb", "shown": "\n\nb[9]"}
    assert "split" not in encode_tokens(SampledTokens(pack_ids([1, 3, 2, 9])), turns, texts)


def test_a_turn_has_the_options_that_it_was_sampled_with() -> None:
    options = {
        "temperature": 0.6,
        "top_p": None,
        "top_k": 20,
        "logit_bias": {"5": 1},
        "stream": True,
    }
    completion = read_own_reply(OWN, orjson.dumps(body({"token_ids": [7]})), options)
    assert completion.sampling == {"temperature": 0.6, "top_k": 20, "logit_bias": True}


def test_other_numbers_of_logprobs_than_ids_stay_as_they_came() -> None:
    completion = read(body({"token_ids": [1], "logprobs": content("a", "b")}))
    assert completion.tokens == SampledTokens(completion=pack_ids([1]))
    assert completion.extra == {"choice": {"logprobs": content("a", "b")}}


def test_replies_keep_all_as_it_came_without_the_option() -> None:
    settings = ModelSettings("m", "openai_chat", "http://127.0.0.1:1/v1", None)
    reply = body({"token_ids": [7]}, prompt_token_ids=[1])
    completion = read_own_reply(settings, orjson.dumps(reply))
    assert completion.tokens is None
    assert completion.extra == {"reply": {"prompt_token_ids": [1]}, "choice": {"token_ids": [7]}}


@pytest.mark.parametrize("field", [*BOTH, *VLLM, *SGLANG])
def test_an_endpoint_that_refuses_them_is_asked_without(
    field: str, caplog: pytest.LogCaptureFixture
) -> None:
    error = openai_error(None, None, f"'{field}' is not supported with this model")
    with caplog.at_level(logging.WARNING), serving(refusing(field, error)) as (root, requests):
        ask(root, "openai_chat", times=2, token_ids=True)
    assert [len(sent.keys() & {*BOTH, *VLLM, *SGLANG}) for sent in requests] == [5, 0, 0]
    assert "refuses --token_ids=True" in caplog.text


def test_calls_by_batches_ask_and_read_the_same() -> None:
    assert orjson.loads(calls.live_body(ASKED, OWN)).keys() >= {*BOTH, *VLLM}
    reply = orjson.dumps(body({"token_ids": [7]}))
    assert calls.read_reply(reply, OWN).tokens == SampledTokens(completion=pack_ids([7]))


def test_records_hold_at_most_24_bytes_per_token() -> None:
    ids = [150_000 + n for n in range(500)]
    sampled = SampledTokens(pack_ids(ids * 2), pack_ids(ids), pack_logprobs([-1.25] * 500))
    turns = turns_of(sampled)
    again = sampled._replace(prompt=pack_ids(ids * 4))
    turns.append({"tokens": encode_tokens(again, turns)})
    assert len(orjson.dumps(turns[0]["tokens"])) < 1500 * 24 / 2
    assert len(orjson.dumps(turns[1]["tokens"])) < 1000 * 24 / 2


def turns_of(*sampled: SampledTokens | None) -> list[JSON]:
    """Turns that hold these tokens."""
    turns: list[JSON] = []
    for one in sampled:
        turns.append({} if one is None else {"tokens": encode_tokens(one, turns)})
    return turns


def stored_in(turns: list[JSON]) -> list[StoredTokens | None]:
    return [msgspec.convert(turn.get("tokens"), StoredTokens | None) for turn in turns]


def test_a_prompt_is_stored_as_what_it_adds() -> None:
    first = SampledTokens(pack_ids([1, 2]), pack_ids([3]), pack_logprobs([-1.5]))
    second = SampledTokens(pack_ids([1, 2, 3, 4]), pack_ids([5]), None)
    drifted = SampledTokens(pack_ids([1, 2, 9, 4]), pack_ids([6]), pack_logprobs([-2.0]))
    turns = turns_of(first, None, second, drifted)
    assert [turn.get("tokens", {}).get("shared") for turn in turns] == [0, None, 3, 2]
    assert list(token_turns(stored_in(turns))) == [
        (0, 0, 0, [1, 2], [3], [-1.5]),
        (2, 3, 3, [4], [5], None),
        (3, 2, 5, [9, 4], [6], [-2.0]),
    ]
    assert [missing_token_data(turn) for turn in turns] == [
        "",
        "prompt token ids, token ids, logprobs",
        "logprobs",
        "",
    ]


def test_any_turns_are_read_back() -> None:
    draws = random.Random(7)

    def conversation() -> Iterator[SampledTokens | None]:
        prompt: list[int] = []
        for _ in range(12):
            keep = draws.randrange(len(prompt) + 1) if draws.random() < 0.3 else len(prompt)
            prompt = prompt[:keep] + [draws.randrange(4) for _ in range(draws.randrange(5))]
            reply = [draws.randrange(2**32) for _ in range(draws.randrange(4))]
            logprobs = pack_logprobs([draws.random() for _ in reply])
            yield SampledTokens(pack_ids(prompt), pack_ids(reply), logprobs)
            prompt = prompt + reply

    for _ in range(200):
        given = list(conversation())
        sequence: list[int] = []
        for turn, sampled in zip(token_turns(stored_in(turns_of(*given))), given, strict=True):
            assert turn.previous_length == len(sequence)
            prompt = sequence[: turn.shared] + turn.prompt
            assert sampled is not None
            assert pack_ids(prompt) == sampled.prompt
            assert pack_ids(turn.completion) == sampled.completion
            if turn.shared < turn.previous_length:  # no more is shared than that
                assert prompt[turn.shared : turn.shared + 1] != sequence[turn.shared :][:1]
            sequence = prompt + turn.completion


@pytest.mark.parametrize("change", [{"shared": 1}, {"completion": "AAA="}, {"logprobs": ""}])
def test_tokens_of_no_such_form_are_refused(change: JSON) -> None:
    (turn,) = turns_of(SampledTokens(pack_ids([1]), pack_ids([2]), pack_logprobs([-1.0])))
    turn["tokens"] |= change
    with pytest.raises(ValueError, match="token"):
        list(token_turns(stored_in([turn])))
