"""A run's budget against an endpoint that bills as a provider does: the bill never exceeds it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import orjson
import pytest

from tests.helpers.answering import JSON, Handler, listening
from tests.helpers.running import PATIENCE_S, lines, run, started, wait_until, write_prompts
from tests.program.test_record import Recording, stop

OUT = 300
"""The limit on a reply's tokens, all of which are used."""

OWN = {"input": 3.0, "output": 15.0, "cache_read": 0.3, "cache_write": 3.75}
"""Dollars per million tokens where the user says them."""


class Provider(NamedTuple):
    """How a provider counts and bills a call whose request has as many tokens."""

    model: str
    bill: Callable[[int], tuple[JSON | None, float]]
    """The usage that it reports, and the dollars that it bills."""
    is_known: bool = False
    """The price is that of the table."""
    api: str = "openai_chat"
    extra_body: JSON | None = None
    fault: str = ""
    """What happens to every second reply, which is billed all the same."""


def _dollars(fresh: float, read: float = 0, written: float = 0, out: float = OUT) -> float:
    rates = (OWN["input"], OWN["cache_read"], OWN["cache_write"], OWN["output"])
    return sum(n * rate for n, rate in zip((fresh, read, written, out), rates, strict=True)) / 1e6


def _byok(size: int) -> tuple[JSON, float]:
    upstream = (size * 2.5 + OUT * 10) / 1e6
    usage = {
        "prompt_tokens": size,
        "completion_tokens": OUT,
        "total_tokens": size + OUT,
        "cost": 0.05 * upstream,
        "is_byok": True,
        "cost_details": {"upstream_inference_cost": upstream},
    }
    return usage, 1.05 * upstream


def _xai(size: int) -> tuple[JSON, float]:
    dollars = (size * 3 + OUT * 15) / 1e6
    usage = {
        "prompt_tokens": size,
        "completion_tokens": 7,
        "total_tokens": size + OUT,
        "completion_tokens_details": {"reasoning_tokens": OUT - 7},
        "cost_in_usd_ticks": round(dollars * 10**10),
    }
    return usage, dollars


def _gemini(size: int) -> tuple[JSON, float]:
    usage = {"prompt_tokens": size, "completion_tokens": 7, "total_tokens": size + OUT}
    return usage, _dollars(size)


def _one_hour(size: int) -> tuple[JSON, float]:
    usage = {
        "input_tokens": 5,
        "output_tokens": OUT,
        "cache_read_input_tokens": 0,
        "cache_creation_input_tokens": size - 5,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": size - 5},
    }
    return usage, (5 * 3 + (size - 5) * 6 + OUT * 15) / 1e6


def _deepseek(size: int) -> tuple[JSON, float]:
    hit = size // 2
    usage = {
        "prompt_tokens": size,
        "completion_tokens": OUT,
        "total_tokens": size + OUT,
        "prompt_cache_hit_tokens": hit,
        "prompt_cache_miss_tokens": size - hit,
    }
    return usage, _dollars(size - hit, hit)


def _litellm(size: int) -> tuple[JSON, float]:
    written = size // 2
    usage = {
        "prompt_tokens": size,
        "completion_tokens": OUT,
        "total_tokens": size + OUT,
        "prompt_tokens_details": {"cached_tokens": 0, "cache_creation_tokens": written},
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": 0,
    }
    return usage, _dollars(size - written, 0, written)


def _silent(size: int) -> tuple[None, float]:
    return None, _dollars(size)


def _zeros(size: int) -> tuple[JSON, float]:
    return {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}, _dollars(size)


def _half(size: int) -> tuple[JSON, float]:
    return {"prompt_tokens": 0, "completion_tokens": OUT}, _dollars(size)


def _said(size: int) -> tuple[JSON, float]:
    return {"prompt_tokens": size, "completion_tokens": OUT}, _dollars(size)


def _dear(size: int) -> tuple[JSON, float]:
    """Dearer than any estimate: another provider, of whose price the table knows nothing."""
    return {"prompt_tokens": size, "completion_tokens": OUT, "cost": 0.05}, 0.05


HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
PROVIDERS = {
    "byok": Provider("openrouter:openai/gpt-4o", _byok, is_known=True),
    "xai": Provider("x:grok-4", _xai, is_known=True),
    "gemini": Provider("m", _gemini),
    "one_hour": Provider(
        "anthropic:claude-sonnet-4-5",
        _one_hour,
        is_known=True,
        api="anthropic_messages",
        extra_body=HOUR,
    ),
    "deepseek": Provider("m", _deepseek),
    "litellm": Provider("m", _litellm),
    "silent": Provider("m", _silent),
    "zeros": Provider("m", _zeros),
    "half": Provider("m", _half),
    "504": Provider("m", _said, fault="504"),
    "cut": Provider("m", _said, fault="cut"),
    "error after the first parts": Provider("m", _silent, fault="error"),
    "malformed": Provider("m", _silent, fault="malformed"),
}


class Endpoint:
    """Replies, and adds up what it bills."""

    def __init__(self, provider: Provider) -> None:
        self.provider = provider
        self.dollars = 0.0
        self.replies = 0
        self._lock = Lock()

    def charge(self, size: int) -> tuple[JSON | None, bool]:
        """Bill a request of as many bytes: its usage, and whether its reply has the fault."""
        usage, dollars = self.provider.bill(size // 2)
        with self._lock:
            self.dollars += dollars
            self.replies += 1
            return usage, bool(self.provider.fault) and self.replies % 2 == 0

    def handler(self) -> type[Handler]:
        """For `listening`."""
        endpoint = self

        class Billing(Handler):
            def do_POST(self) -> None:
                raw = self.body()
                body = json.loads(raw)
                usage, is_faulty = endpoint.charge(len(raw))
                fault = endpoint.provider.fault if is_faulty else ""
                is_streamed = bool(body.get("stream"))
                if fault == "504":
                    self.send(504, b"upstream request timeout", "text/plain")
                elif endpoint.provider.api == "anthropic_messages":
                    self._messages(usage, is_streamed)
                elif is_streamed:
                    self._stream(_chunks(usage, fault), is_cut=fault == "cut")
                else:
                    self._whole(usage, fault)

            def _whole(self, usage: JSON | None, fault: str) -> None:
                message = {"role": "assistant", "content": "Yes."}
                choice = {"message": message, "finish_reason": "stop"}
                if fault == "error":
                    choice["finish_reason"] = "error"
                reply: JSON = {"model": "m", "choices": [choice], "usage": usage}
                if fault == "error":
                    reply["error"] = {"code": 503, "message": "overloaded"}
                content = json.dumps(reply).encode()
                if fault == "malformed":
                    content = content[:-20]
                if fault == "cut":
                    self.send_response(200)
                    self.send_header("content-type", "application/json")
                    self.send_header("content-length", str(len(content) + 9))
                    self.end_headers()
                    self.wfile.write(content)
                    self.close_connection = True
                else:
                    self.send(200, content)

            def _messages(self, usage: JSON | None, is_streamed: bool) -> None:
                if is_streamed:
                    self._stream(_events(usage))
                    return
                blocks = [{"type": "text", "text": "Yes."}]
                reply = {"content": blocks, "stop_reason": "end_turn", "usage": usage}
                self.send(200, json.dumps(reply).encode())

            def _stream(self, parts: list[JSON], *, is_cut: bool = False) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                for part in parts[:1] if is_cut else parts:
                    self.wfile.write(b"data: " + json.dumps(part).encode() + b"\n\n")
                if not is_cut:
                    self.wfile.write(b"data: [DONE]\n\n")
                self.close_connection = True

        return Billing


def _chunks(usage: JSON | None, fault: str) -> list[JSON]:
    first = {"choices": [{"delta": {"role": "assistant", "content": "Yes."}}]}
    if fault == "error":
        return [first, {"error": {"code": 429, "message": "too many requests upstream"}}]
    last: JSON = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
    if fault == "malformed":
        last["choices"][0]["finish_reason"] = 7
    return [first, last, {"choices": [], "usage": usage}]


def _events(usage: JSON | None) -> list[JSON]:
    delta = {"type": "text_delta", "text": "Yes."}
    block = {"type": "text", "text": ""}
    return [
        {"type": "message_start", "message": {"usage": {**(usage or {}), "output_tokens": 1}}},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage},
        {"type": "message_stop"},
    ]


@contextmanager
def billing(provider: Provider) -> Iterator[tuple[Endpoint, str]]:
    endpoint = Endpoint(provider)
    with listening(endpoint.handler()) as url:
        yield endpoint, url if provider.api == "anthropic_messages" else url + "/v1"


def options(provider: Provider, url: str, **more: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "run_name": "r",
        "base_url": url,
        "key_env": "none",
        "api": provider.api,
        **more,
    }
    if not provider.is_known:
        given["prices"] = json.dumps({"m": OWN})
    return given


@pytest.mark.slow
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", PROVIDERS)
def test_the_bill_never_exceeds_the_budget(tmp_path: Path, name: str, is_streamed: bool) -> None:
    provider = PROVIDERS[name]
    config: JSON = {"call_attempts": 2, "max_attempts": 1}
    if provider.extra_body:
        config["extra_body"] = provider.extra_body
    write_prompts(tmp_path / "p.jsonl", 60)
    with billing(provider) as (endpoint, url):
        config["endpoints"] = {"x": {"base_url": url, "key_env": "none", "provider": "x-ai"}}
        (tmp_path / "c.yaml").write_text(json.dumps(config))
        given = options(
            provider,
            url,
            dataset_file="p.jsonl",
            config="c.yaml",
            model=provider.model,
            enabled_toolsets="none",
            num_workers=1,
            batch_size=4,
            max_tokens=OUT,
            max_run_cost_usd=0.08,
        )
        if provider.model.startswith("x:"):
            given = {name: given[name] for name in given if name not in ("base_url", "key_env")}
        done = run(tmp_path, *(["--stream_replies"] if is_streamed else []), **given)
    assert done.returncode == 3, done.stderr
    assert 0.02 < endpoint.dollars <= 0.08
    run_dir = tmp_path / "trajectories" / "r"
    charged = sum(
        line["usd"] if line["kind"] == "lent" else -line["usd"]
        for line in lines(run_dir / "budget.jsonl")
    )
    assert charged >= endpoint.dollars - 1e-9


@pytest.mark.slow
def test_a_call_dearer_than_its_reserve_raises_that_of_the_next(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 20)
    with billing(Provider("m", _dear)) as (endpoint, url):
        given: dict[str, Any] = {
            "run_name": "r",
            "dataset_file": "p.jsonl",
            "base_url": url,
            "key_env": "none",
            "model": "openrouter:openai/gpt-4o",
            "enabled_toolsets": "none",
            "num_workers": 1,
            "batch_size": 1,
            "max_tokens": OUT,
            "max_run_cost_usd": 0.12,
        }
        done = run(tmp_path, **given)
        assert done.returncode == 3, done.stderr
        assert endpoint.dollars == pytest.approx(0.1)
    log = (tmp_path / "trajectories" / "r" / "run.log").read_text()
    assert "A call of openai/gpt-4o cost $0.050000, and at most $0.0" in log


@pytest.mark.slow
@pytest.mark.parametrize("name", ["byok", "gemini", "one_hour", "silent", "half", "malformed"])
def test_the_same_through_record(tmp_path: Path, name: str) -> None:
    provider = PROVIDERS[name]
    upstream, _, model = provider.model.rpartition(":")
    with billing(provider) as (endpoint, url):
        given = options(provider, url, upstream=upstream or "openai", port=0, call_attempts=2)
        given["max_run_cost_usd"] = 0.08
        if provider.is_known:
            given.pop("api")
        with started(tmp_path, "record", **given) as process:
            output = tmp_path / "output.txt"
            wait_until(lambda: "recording at" in output.read_text())
            port = int(output.read_text().split("recording at http://127.0.0.1:")[1].split(";")[0])
            world = Recording(process, port)
            is_chat = provider.api == "openai_chat"
            path = "/v1/chat/completions" if is_chat else "/v1/messages"
            for number in range(60):
                text = f"Question {number}. " + 40 * "Think about it. "
                content = [{"type": "text", "text": text, **(provider.extra_body or {})}]
                body = {
                    "model": model,
                    "max_tokens": OUT,
                    "stream": False,
                    "messages": [{"role": "user", "content": content}],
                }
                try:
                    status, _ = world.ask("POST", f"/sessions/s{number}{path}", body)
                except (http.client.HTTPException, OSError):
                    break
                if status == 400:
                    break
            if process.poll() is None and name == "malformed":
                stop(process)
            else:
                assert process.wait(timeout=PATIENCE_S) == 3
    assert 0.02 < endpoint.dollars <= 0.08


@pytest.mark.slow
def test_a_reply_without_usage_charges_its_tokens_in_full(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 20)
    with billing(PROVIDERS["silent"]) as (endpoint, url):
        given = options(
            PROVIDERS["silent"],
            url,
            dataset_file="p.jsonl",
            model="m",
            enabled_toolsets="none",
            num_workers=1,
            max_tokens=OUT,
            max_run_tokens=8000,
        )
        done = run(tmp_path, **given)
    assert done.returncode == 3, done.stderr
    assert 0 < endpoint.replies <= 8000 / (1000 + OUT)
    records = lines(tmp_path / "trajectories" / "r" / "records.jsonl")
    assert all(record["usage"]["input_tokens"] is None for record in records if record["usage"])
    assert orjson.loads((tmp_path / "trajectories/r/summary.json").read_bytes())["pending"] > 0


@pytest.mark.slow
def test_the_context_of_a_stored_response_is_reserved_too(tmp_path: Path) -> None:
    """The endpoint bills all that came before, and the request has only its id."""
    tokens: dict[str, int] = {}
    dollars = 0.0

    class Storing(Handler):
        def do_POST(self) -> None:
            nonlocal dollars
            raw = self.body()
            earlier = json.loads(raw).get("previous_response_id")
            size = len(raw) // 2 + tokens.get(earlier, 0)
            id = f"resp_{len(tokens)}"
            tokens[id] = size + OUT
            dollars += _dollars(size)
            said = {"type": "output_text", "text": "Yes."}
            item = {"type": "message", "role": "assistant", "content": [said]}
            usage = {"input_tokens": size, "output_tokens": OUT, "total_tokens": size + OUT}
            reply = {"id": id, "status": "completed", "output": [item], "usage": usage}
            reply["previous_response_id"] = earlier
            self.send(200, json.dumps(reply).encode())

    with listening(Storing) as url:
        given = options(Provider("m", _said, api="openai_responses"), f"{url}/v1")
        given |= {"upstream": "responses", "port": 0, "max_run_cost_usd": 0.31}
        given.pop("api")
        with started(tmp_path, "record", **given) as process:
            output = tmp_path / "output.txt"
            wait_until(lambda: "recording at" in output.read_text())
            port = int(output.read_text().split("recording at http://127.0.0.1:")[1].split(";")[0])
            world = Recording(process, port)
            body: JSON = {"model": "m", "max_output_tokens": OUT, "stream": False}
            for number in range(60):
                body["input"] = f"Question {number}."
                try:
                    status, reply = world.ask("POST", "/sessions/s/v1/responses", body)
                except (http.client.HTTPException, OSError):
                    break
                if status == 400:
                    break
                body["previous_response_id"] = reply["id"]
            assert process.wait(timeout=PATIENCE_S) == 3
    assert len(tokens) > 5
    assert 0.2 < dollars <= 0.31
