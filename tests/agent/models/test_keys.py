"""A key that an endpoint sends back is in no reply, no message and no file."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from pathlib import Path
from typing import Any

import orjson
import pytest

from agent.models.batches.calls import open_batches
from agent.models.client.endpoint import EndpointModel
from agent.models.dialects.dialect import DIALECTS
from agent.models.errors import ModelError
from agent.models.keys import MARK, Key
from agent.models.model import ModelSettings, Request
from tests.agent.models.by_dialect import SAMPLES
from tests.helpers.answering import Handler, listening
from tests.helpers.running import run, write_prompts

KEY = "sk-canary/Zq7+Xw_0123456789"
PIECE = KEY[:8]
CHAT = "openai_chat"


def encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


FORMS = {
    "as it is": KEY,
    "with its slash escaped": KEY.replace("/", "\\/"),
    "in a URL": KEY.replace("/", "%2F").replace("+", "%2B"),
    "spelt out": "".join(f"\\u{ord(letter):04x}" for letter in KEY),
    "in part spelt out": KEY.replace("k", "\\u006B"),
    **{f"in base64, after {n}": encode("user:"[:n] + KEY + ", so.") for n in range(4)},
    "in the base64 of URLs": base64.urlsafe_b64encode(f"??>>{KEY}".encode()).decode(),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_key_is_taken_out_in_every_form(form: str) -> None:
    body = b'{"a": "\xc3\xa9 ' + form.encode() + b' z"}'
    cleaned = orjson.loads(Key(KEY).remove_from(body))["a"]
    assert MARK in cleaned
    assert cleaned.startswith("\xe9 ")
    assert cleaned.endswith(" z")
    pieces = [text[at : at + 12] for text in (form, KEY) for at in range(len(text) - 11)]
    assert not [piece for piece in pieces if piece in cleaned]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_a_key_is_removed_from_text_that_is_not_utf_8(encoding: str) -> None:
    assert KEY.encode(encoding) not in Key(KEY).remove_from(f"no {KEY}".encode(encoding))


def test_an_object_without_a_key_is_returned_as_it_is() -> None:
    for body in (b'{"a": 1}', b'{"a": "caf\\u00e9 \\u003c"}', b"\\u00 no JSON", b"\0", b"[" * 500):
        assert Key(KEY).remove_from(body) is body


@pytest.mark.parametrize("key", ["no-key", "EMPTY", "password", "not-needed", "lm-studio", ""])
def test_a_placeholder_is_not_a_secret(key: str) -> None:
    """It may be a word of a reply, and that is data."""
    body = f"say {key} here".encode()
    assert Key(key).remove_from(body) is body
    assert Key(key).remove_from_text(f"say {key} here") == f"say {key} here"


def events(dialect: str, text: str) -> list[dict[str, Any]]:
    """The parts of a reply that says the text, cut in the middle."""
    return SAMPLES[dialect].events((text[: len(text) // 2], text[len(text) // 2 :]))


def ask(
    dialect: str, body: bytes, *, status: int = 200, type: str = "application/json", **headers: str
) -> Any:
    """What an endpoint makes the program say that answers so: its reply, or the error."""

    class Answering(Handler):
        def do_POST(self) -> None:
            self.body()
            self.send(status, body, type, **headers)

    async def complete(root: str) -> Any:
        settings = ModelSettings(name="m", api=dialect, base_url=root, key_env=None)
        adapter = EndpointModel(settings, KEY)
        on_delta = (lambda event: None) if type == "text/event-stream" else None
        try:
            return await adapter.complete(
                Request([{"role": "user", "content": "Go."}], on_delta=on_delta)
            )
        except ModelError as error:
            return error
        finally:
            await adapter.close()

    with listening(Answering) as root:
        return asyncio.run(complete(root))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_reply_that_echoes_the_key_is_read_without_it(
    dialect: str, caplog: pytest.LogCaptureFixture
) -> None:
    text, arguments = f"It is {KEY}.", json.dumps({"key": KEY})
    with caplog.at_level(logging.WARNING):
        reply = ask(dialect, orjson.dumps(SAMPLES[dialect].whole(text, arguments)))
    assert reply.message["content"] == f"It is {MARK}."
    [call] = reply.message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"key": MARK}
    assert KEY not in str(reply)
    assert "sent the API key back" in caplog.text


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_key_that_comes_in_two_parts_of_a_stream_is_taken_out(dialect: str) -> None:
    sent = "".join(f"data: {json.dumps(part)}\n\n" for part in events(dialect, KEY))
    reply = ask(dialect, sent.encode(), type="text/event-stream")
    assert reply.message["content"] == MARK


CUT = [b"x" * 188 + b" ", b"x" * 488 + b" ", b""]
"""Before the key: the key lies where messages are cut to size, or it comes first."""


@pytest.mark.parametrize("before", CUT, ids=len)
@pytest.mark.parametrize("status", [200, 400, 401, 500])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_no_piece_of_the_key_is_in_an_error(dialect: str, status: int, before: bytes) -> None:
    for body in (
        before + KEY.encode(),
        orjson.dumps({"error": {"message": before.decode() + KEY, "code": KEY}}),
        orjson.dumps([before.decode() + KEY]),
        orjson.dumps({"status": "failed", "error": {"message": before.decode() + KEY}}),
    ):
        error = ask(dialect, body, status=status)
        assert isinstance(error, ModelError)
        assert PIECE not in f"{error} {error.code} {error.param}"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_no_piece_of_the_key_is_in_an_error_of_a_stream(dialect: str) -> None:
    for error in ({"message": "x" * 490 + KEY}, "x" * 490 + KEY):
        sent = f"data: {json.dumps({'error': error})}\n\n".encode()
        assert PIECE not in str(ask(dialect, sent, type="text/event-stream"))


def test_an_error_about_a_redirect_does_not_show_the_key() -> None:
    error = ask(CHAT, b"", status=307, location=f"http://127.0.0.1/?key={KEY}")
    assert MARK in str(error)
    assert PIECE not in str(error)


def test_results_of_batches_are_read_without_the_key() -> None:
    """Only newlines end its lines."""
    batch = orjson.dumps({"id": "b1", "status": "completed", "output_file_id": "f1"})

    def line(text: str) -> bytes:
        return orjson.dumps(
            {"custom_id": "i", "response": {"status_code": 200, "body": {"text": text}}}
        )

    lines = line(f"\u2028\x85{KEY}") + b"\n\n" + line(KEY)

    class Serving(Handler):
        def do_GET(self) -> None:
            self.send(200, lines if self.path.endswith("/files/f1/content") else batch)

    async def read(root: str) -> list[Any]:
        settings = ModelSettings(name="m", api="openai_chat", base_url=root, key_env=None)
        batches = open_batches(settings, api_key=KEY)
        try:
            return [orjson.loads(item.reply or b"") async for item in batches.results("b1")]
        finally:
            await batches.close()

    with listening(Serving) as root:
        assert asyncio.run(read(root)) == [{"text": f"\u2028\x85{MARK}"}, {"text": MARK}]


@pytest.mark.slow
@pytest.mark.parametrize("stream_replies", [True, False])
def test_no_file_of_a_run_holds_a_piece_of_the_key(tmp_path: Path, stream_replies: bool) -> None:
    """Neither of replies that were used, nor of those that were tried again or failed."""
    write_prompts(tmp_path / "p.jsonl", 6)
    authorizations: list[str] = []

    class Answering(Handler):
        def do_POST(self) -> None:
            body = orjson.loads(self.body())
            authorizations.append(self.headers["authorization"])
            n = len(authorizations)
            if n % 3 == 2:
                self.send(200, b"x" * 190 + KEY.encode(), "text/html")
            elif "3" in body["messages"][-1]["content"]:
                self.send(400, b"x" * 490 + KEY.encode(), "text/html")
            elif stream_replies:
                parts = "".join(f"data: {json.dumps(part)}\n\n" for part in events(CHAT, KEY))
                self.send(200, parts.encode(), "text/event-stream")
            else:
                choice = {"message": {"content": f"I am {KEY}"}, "finish_reason": "stop"}
                self.send(200, orjson.dumps({"choices": [choice]}))

    with listening(Answering) as root:
        given = {
            "run_name": "r",
            "dataset_file": "p.jsonl",
            "enabled_toolsets": "none",
            "model": "openai:m",
            "base_url": f"{root}/v1",
            "key_env": "MY_KEY",
            "num_workers": 1,
            "batch_size": 1,
            "max_in_flight": 1,
            "max_attempts": 1,
        }
        flags = ["--stream_replies"] * stream_replies
        done = run(tmp_path, *flags, **given, env={"MY_KEY": KEY})
    assert done.returncode == 1, done.stderr
    assert set(authorizations) == {f"Bearer {KEY}"}
    assert PIECE not in done.stdout + done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if PIECE.encode() in path.read_bytes()]
    [records] = [path for path in files if path.name == "records.jsonl"]
    assert records.read_bytes().count(MARK.encode()) >= 5


@pytest.mark.parametrize(
    ("key_env", "message"),
    [
        ("none", "No key is sent (see --key_env)."),
        (None, "The key is that of OPENAI_API_KEY, if it is set (see --key_env)."),
        ("MY_KEY", "The key is that of the environment variable MY_KEY (see --key_env)."),
    ],
)
def test_a_refusal_says_whose_key_was_sent(key_env: str | None, message: str) -> None:
    settings = ModelSettings(name="m", api="openai_chat", base_url="http://x", key_env=key_env)
    assert settings.key_source.startswith(message)
    assert "variable none" not in settings.key_source


@pytest.mark.parametrize(
    ("key_env", "api_key", "message"),
    [
        (None, "no-key", "No key was sent (see --key_env)."),
        ("none", "no-key", "No key was sent (see --key_env)."),
        (None, "sk-set-here", "The key is that of the environment variable OPENAI_API_KEY"),
        ("MY_KEY", "sk-of-mine", "The key is that of the environment variable MY_KEY"),
        ("none", "sk-given", "The key is the one given as api_key."),
        ("MY_KEY", "sk-given", "The key is the one given as api_key."),
    ],
)
def test_a_failed_call_says_whose_key_it_carried(
    key_env: str | None, api_key: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-set-here")
    monkeypatch.setenv("MY_KEY", "sk-of-mine")
    settings = ModelSettings(name="m", api="openai_chat", base_url="http://x", key_env=key_env)
    assert settings.describe_key_source(api_key).startswith(message)
