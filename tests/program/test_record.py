"""`record`: the calls of a program that runs elsewhere become records of a run."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.fakes.fake_endpoint import FakeEndpoint
from tests.helpers.answering import answering
from tests.helpers.running import (
    PATIENCE_S,
    Process,
    lines,
    records_by_id,
    run,
    started,
    wait_until,
)

KEY = "sk-the-real-key-0123456789"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
PRICES = json.dumps({"m": {"input": 1.0, "output": 1.0}})


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEndpoint]:
    """Replies with a tool call, then with a text; it wants its key."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with FakeEndpoint(latency_s=0.0, turns=2, reasoning_chars=40, key=KEY) as running:
        yield running


class Recording:
    """The command, and a program that talks to it."""

    def __init__(self, process: Process, port: int) -> None:
        self.process = process
        self._port = port

    def ask(
        self, method: str, path: str, body: Any = None, key: str = "k"
    ) -> tuple[int, dict[str, Any]]:
        """One request and its reply."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        headers = {"Authorization": f"Bearer {key}"}
        content = None if body is None else json.dumps(body)
        try:
            connection.request(method, path, body=content, headers=headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read() or b"{}")
        finally:
            connection.close()

    def call(self, messages: list[Any], *, key: str = "k", at: str = "", **more: Any) -> Any:
        """A model call whose reply is added to the messages, with results of its calls."""
        body = {"model": "m", "messages": messages, "tools": TOOLS, "max_tokens": 50, **more}
        status, reply = self.ask("POST", at + "/v1/chat/completions", body, key)
        assert status == 200, reply
        message = reply["choices"][0]["message"]
        messages.append({key: message[key] for key in message if key != "reasoning_content"})
        for call in message.get("tool_calls", ()):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "fine"})
        return message

    def talk(self, prompt: str, **where: Any) -> list[Any]:
        """A whole conversation."""
        messages = [{"role": "user", "content": prompt}]
        while self.call(messages, **where).get("tool_calls"):
            continue
        return messages


def options(endpoint: FakeEndpoint, **more: Any) -> dict[str, Any]:
    given = {"run_name": "r", "upstream": "openai", "base_url": endpoint.openai_url, "port": 0}
    return {**given, "prices": PRICES, **more}


@contextmanager
def recording(tmp_path: Path, endpoint: FakeEndpoint, **more: Any) -> Iterator[Recording]:
    with run_record(tmp_path, options(endpoint, **more)) as world:
        yield world


@contextmanager
def run_record(tmp_path: Path, given: dict[str, Any]) -> Iterator[Recording]:
    output = tmp_path / "output.txt"
    seen = output.stat().st_size if output.exists() else 0
    with started(tmp_path, "record", **given) as process:

        def ports() -> list[str]:
            text = output.read_text()[seen:] if output.exists() else ""
            assert process.poll() is None, text
            return re.findall(r"recording at http://127\.0\.0\.1:(\d+);", text)

        wait_until(ports)
        yield Recording(process, int(ports()[0]))


def stop(process: Process, number: int = signal.SIGINT) -> int:
    """End the recording as a user does."""
    os.kill(process.pid, number)
    return process.wait(timeout=PATIENCE_S)


def test_sessions_become_records(tmp_path: Path, endpoint: FakeEndpoint) -> None:
    """One per path or key; ended by a call or with the recording; rows for training."""
    with recording(tmp_path, endpoint) as world:
        said = world.talk("First.", at="/sessions/one")
        assert world.ask("DELETE", "/sessions/one")[1]["status"] == "completed"
        world.talk("Second.", key="some-key")
        world.talk("Third.", at="/sessions/one")
        world.call([{"role": "user", "content": "Fourth."}], at="/sessions/cut")
        status, _ = world.ask("DELETE", "/sessions/none")
        assert status == 404
        assert stop(world.process) == 0
    done_records = records_by_id(tmp_path)
    by_key = next(name for name in done_records if name.startswith("key-"))
    assert set(done_records) == {"one", "one#2", "cut", by_key}
    assert done_records["one"]["messages"][-1]["content"] == said[-1]["content"]
    assert done_records["one"]["row"] == {"id": "one", "prompt": "First."}
    assert [done_records[name]["status"] for name in ("one", "one#2", by_key, "cut")] == [
        "completed",
        "completed",
        "completed",
        "cancelled",
    ]
    rows = lines(tmp_path / "trajectories/r.jsonl")
    assert [row["id"] for row in rows] == ["one", by_key, "one#2"]
    assert [turn["from"] for turn in rows[0]["conversations"][1:]] == [
        "human",
        "gpt",
        "tool",
        "gpt",
    ]
    assert "<think>\nThought" in rows[0]["conversations"][2]["value"]
    everything = b"".join(
        path.read_bytes() for path in (tmp_path / "trajectories").rglob("*") if path.is_file()
    )
    assert KEY.encode() not in everything
    assert b"some-key" not in everything
    checked = run(tmp_path, "verify", "r")
    assert checked.returncode == 0, checked.stdout


def test_a_program_says_how_its_session_ended(tmp_path: Path, endpoint: FakeEndpoint) -> None:
    """Only with a status that records can have."""
    with recording(tmp_path, endpoint) as world:
        world.talk("Go.", at="/sessions/a")
        status, said = world.ask("DELETE", "/sessions/a", {"status": "splendid"})
        assert (status, "completed" in str(said)) == (400, True)
        given = {"status": "failed", "reason": "the tests fail"}
        assert world.ask("DELETE", "/sessions/a", given)[0] == 200
        assert world.ask("POST", "/sessions/a%20b/v1/chat/completions", {})[0] == 400
        assert stop(world.process, signal.SIGTERM) == 1
    (record,) = records_by_id(tmp_path).values()
    assert (record["status"], record["status_reason"]) == ("failed", "the tests fail")


def test_a_session_whose_last_reply_was_cut_is_completed_only_if_its_program_says_so(
    tmp_path: Path, endpoint: FakeEndpoint
) -> None:
    """Half an answer, or what a filter has left of one, is no training data by default."""
    ends = {"length": "length", "refusal": "refusal", "none": "completed", "said": "completed"}
    with recording(tmp_path, endpoint) as world:
        for name, end in ends.items():
            fault = "length" if name == "said" else name
            prompt = "Go." if fault == "none" else f"fault:{fault}"
            world.call([{"role": "user", "content": prompt}], at=f"/sessions/{name}")
            given = {"status": "completed"} if name == "said" else None
            assert world.ask("DELETE", f"/sessions/{name}", given)[1]["status"] == end
        messages = [{"role": "user", "content": "Go."}]
        world.call(messages, at="/sessions/refused")
        refused = {"model": "m", "messages": [{"role": "user", "content": "fault:http400"}]}
        assert world.ask("POST", "/sessions/refused/v1/chat/completions", refused)[0] == 400
        assert world.ask("DELETE", "/sessions/refused")[1]["status"] == "cancelled"
        assert stop(world.process) == 0
    ends["refused"] = "cancelled"
    assert {name: record["status"] for name, record in records_by_id(tmp_path).items()} == ends
    assert [row["id"] for row in lines(tmp_path / "trajectories/r.jsonl")] == ["none", "said"]


def test_the_list_of_models_is_the_endpoints_own(tmp_path: Path, endpoint: FakeEndpoint) -> None:
    """Asked with the real key, before and within a session, which it does not begin."""
    with recording(tmp_path, endpoint) as world:
        for at in ("", "/sessions/one"):
            status, said = world.ask("GET", f"{at}/v1/models?limit=5")
            assert (status, said["data"]) == (200, [{"id": "fake-model", "query": "limit=5"}])
            world.talk("First.", at="/sessions/one")
        assert stop(world.process) == 0
    assert set(records_by_id(tmp_path)) == {"one"}


def test_a_list_of_models_is_asked_for_once(tmp_path: Path, endpoint: FakeEndpoint) -> None:
    """An endpoint that has none says so for each request: a program need not wait for it."""
    paths: list[str] = []

    class Lacking(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(501)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "no list"}}')

    with ThreadingHTTPServer(("127.0.0.1", 0), Lacking) as server:
        Thread(target=server.serve_forever).start()
        try:
            base_url = f"http://127.0.0.1:{server.server_port}/v1"
            with recording(tmp_path, endpoint, base_url=base_url) as world:
                said = world.ask("GET", "/v1/models")
                assert said == (501, {"error": {"message": "no list"}})
                assert stop(world.process) == 0
        finally:
            server.shutdown()
    assert paths == ["/v1/models"]


@pytest.mark.slow
def test_silence_ends_a_session(tmp_path: Path, endpoint: FakeEndpoint) -> None:
    """The recording goes on; the same name begins another session."""
    with recording(tmp_path, endpoint, silence_s=0.2) as world:
        world.talk("Go.", at="/sessions/a")
        wait_until(lambda: len(lines(tmp_path / "trajectories/r/records.jsonl")) == 1)
        world.talk("Go.", at="/sessions/a")
        assert stop(world.process) == 0
    assert set(records_by_id(tmp_path)) == {"a", "a#2"}


def test_after_a_kill_a_session_continues_where_it_was(
    tmp_path: Path, endpoint: FakeEndpoint
) -> None:
    """Its calls are not paid again; one that repeats the last request gets the same reply."""
    messages: list[Any] = [{"role": "user", "content": "Go."}]
    with recording(tmp_path, endpoint) as world:
        world.call(messages, at="/sessions/a")
        world.call([{"role": "user", "content": "Stay."}], at="/sessions/b")
        os.kill(world.process.pid, signal.SIGKILL)
        world.process.wait(timeout=PATIENCE_S)
    with recording(tmp_path, endpoint) as world:
        again = world.call([{"role": "user", "content": "Go."}], at="/sessions/a")
        assert again["tool_calls"][0]["id"] == messages[1]["tool_calls"][0]["id"]
        assert endpoint.journal()["replies"] == 2
        world.call(messages, at="/sessions/a")
        assert stop(world.process) == 0
    done_records = records_by_id(tmp_path)
    assert done_records["a"]["status"] == "completed"
    assert (done_records["a"]["api_calls"], done_records["b"]["api_calls"]) == (2, 1)
    assert done_records["a"]["set_aside"] == []
    assert endpoint.journal()["replies"] == 3


@pytest.mark.slow
def test_after_a_kill_a_program_that_starts_again_is_answered_from_the_journal(
    tmp_path: Path, endpoint: FakeEndpoint
) -> None:
    """From its first call on; the endpoint hears nothing of it."""
    with recording(tmp_path, endpoint) as world:
        said = world.talk("Go.", at="/sessions/a")
        os.kill(world.process.pid, signal.SIGKILL)
        world.process.wait(timeout=PATIENCE_S)
    with recording(tmp_path, endpoint) as world:
        assert world.talk("Go.", at="/sessions/a") == said
        assert stop(world.process) == 0
    assert endpoint.journal()["replies"] == 2
    (record,) = records_by_id(tmp_path).values()
    assert (record["api_calls"], record["set_aside"]) == (2, [])


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_call_costs_at_most_that_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program asks again; the record has the call once."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with FakeEndpoint(latency_s=0.0, answers=1, turns=2, key=KEY) as endpoint:
        messages: list[Any] = [{"role": "user", "content": "Go."}]
        with recording(tmp_path, endpoint) as world:
            world.call(messages, at="/sessions/a")
            asking = Thread(target=_ask_in_vain, args=(world, [*messages]))
            asking.start()
            wait_until(lambda: endpoint.journal()["in_flight"])
            os.kill(world.process.pid, signal.SIGKILL)
            world.process.wait(timeout=PATIENCE_S)
            asking.join()
        endpoint.answer(None)
        with recording(tmp_path, endpoint) as world:
            world.call(messages, at="/sessions/a")
            assert stop(world.process) == 0
        assert endpoint.journal()["replies"] <= 3
    (record,) = records_by_id(tmp_path).values()
    assert (record["status"], record["api_calls"]) == ("completed", 2)


def _ask_in_vain(world: Recording, messages: list[Any]) -> None:
    with pytest.raises((http.client.HTTPException, OSError)):
        world.call(messages, at="/sessions/a")


def test_the_budget_stops_a_recording_which_then_continues(
    tmp_path: Path, endpoint: FakeEndpoint
) -> None:
    """Exit code 3; the session is not over: a higher budget takes it up."""
    with recording(tmp_path, endpoint, max_run_tokens=2500) as world:
        messages = [{"role": "user", "content": "Go."}]
        world.call(messages, at="/sessions/a")
        body = {"model": "m", "messages": messages, "tools": TOOLS, "max_tokens": 2000}
        status, said = world.ask("POST", "/sessions/a/v1/chat/completions", body)
        assert status == 400, said
        assert world.process.wait(timeout=PATIENCE_S) == 3
    assert not records_by_id(tmp_path)
    with recording(tmp_path, endpoint, max_run_tokens=100_000) as world:
        world.call(messages, at="/sessions/a", max_tokens=2000)
        assert stop(world.process) == 0
    (record,) = records_by_id(tmp_path).values()
    assert (record["status"], record["api_calls"]) == ("completed", 2)


def test_all_programs_are_told_why_a_recording_stops(
    tmp_path: Path, endpoint: FakeEndpoint
) -> None:
    """By the refusal of their next call, also those that did not use up the budget."""
    with recording(tmp_path, endpoint, max_run_tokens=2500) as world:
        sessions = {name: [{"role": "user", "content": f"Go {name}."}] for name in "abc"}
        for name, messages in sessions.items():
            world.call(messages, at=f"/sessions/{name}")
        for name, messages in sessions.items():
            body = {"model": "m", "messages": messages, "tools": TOOLS, "max_tokens": 2000}
            status, said = world.ask("POST", f"/sessions/{name}/v1/chat/completions", body)
            assert status == 400, said
            assert "used" in said["error"]["message"], "and not nothing behind the colon"
            assert "2,500" in said["error"]["message"]
        assert world.process.wait(timeout=PATIENCE_S) == 3


@pytest.mark.parametrize(
    ("limit", "most"),
    [({"max_run_cost_usd": 1.2}, 1_200_000), ({"max_run_tokens": 900_000}, 900_000)],
)
def test_what_requests_only_point_at_is_within_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: dict[str, Any], most: int
) -> None:
    """At an endpoint that bills pictures, followed replies and files, at a dollar a million."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    held: dict[str, int] = {}

    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        read = 9000 * json.dumps(body).count("input_image")
        read += held.get(body.get("previous_response_id") or "", 0)
        read += 10**7 * sum(name in json.dumps(body) for name in ("input_file", "pmpt", "conv_"))
        id = f"resp_{len(held)}"
        held[id] = read + 40
        usage = {"input_tokens": read, "output_tokens": 40, "total_tokens": read + 40}
        text = {"type": "output_text", "text": "y", "annotations": []}
        said = {"type": "message", "role": "assistant", "content": [text], "id": f"m{id}"}
        reply = {"id": id, "object": "response", "status": "completed", "model": "m"}
        following = {"previous_response_id": body.get("previous_response_id")}
        return 200, {**reply, **following, "output": [said], "usage": usage}

    picture = {"type": "input_image", "image_url": "https://example.com/a.png"}
    looks = [{"role": "user", "content": [picture] * 30}]
    file = [{"role": "user", "content": [{"type": "input_file", "file_id": "file-1"}]}]
    with answering(answer) as (url, bodies):
        place = {"base_url": f"{url}/v1", "upstream": "responses"}
        given = {"run_name": "r", "port": 0, "prices": PRICES, **place, **limit}
        with run_record(tmp_path, given) as world:
            at, plain = "/sessions/a/v1/responses", {"model": "m", "max_output_tokens": 50}
            for pointing in ({"prompt": {"id": "pmpt_1"}}, {"conversation": "conv_1"}):
                status, said = world.ask("POST", at, {**plain, "input": "x", **pointing})
                assert (status, "budget of the run" in said["error"]["message"]) == (400, True)
            assert world.ask("POST", at, {**plain, "input": file})[0] == 400
            assert not bodies
            status, said = world.ask("POST", at, {**plain, "input": looks})
            assert status == 200, said
            while status == 200:
                following = {"previous_response_id": said["id"], "input": "Go on."}
                status, said = world.ask("POST", at, {**plain, **following})
            assert status == 400, said
            assert world.process.wait(timeout=PATIENCE_S) == 3
        assert len(bodies) >= 2
        assert sum(held.values()) <= most


def test_a_model_without_a_price_is_refused_under_a_budget(
    tmp_path: Path, endpoint: FakeEndpoint
) -> None:
    """Before it is called; others go on."""
    with recording(tmp_path, endpoint, max_run_cost_usd=1.0) as world:
        body = {"model": "nobody-knows", "max_tokens": 9, "messages": [{"role": "user"}]}
        body["messages"] = [{"role": "user", "content": "Go."}]
        status, said = world.ask("POST", "/sessions/a/v1/chat/completions", body)
        assert status == 400
        assert "price" in said["error"]["message"]
        world.talk("Go.", at="/sessions/a")
        assert stop(world.process) == 0
    assert endpoint.journal()["replies"] == 2


def test_rejected_credentials_stop_the_recording(
    tmp_path: Path, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 4, with the variable that holds the key; the session waits for the next start."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong-0123456789")
    with recording(tmp_path, endpoint) as world:
        body = {"model": "m", "messages": [{"role": "user", "content": "Go."}]}
        assert world.ask("POST", "/sessions/a/v1/chat/completions", body)[0] == 400
        assert world.process.wait(timeout=PATIENCE_S) == 4
    assert "OPENAI_API_KEY" in (tmp_path / "output.txt").read_text()
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with recording(tmp_path, endpoint) as world:
        world.talk("Go.", at="/sessions/a")
        assert stop(world.process) == 0
    (record,) = records_by_id(tmp_path).values()
    assert record["status"] == "completed"


@pytest.mark.parametrize("at", ["/v1/chat/completions", "/v1/messages"])
def test_a_session_continues_after_a_call_without_a_usable_reply(
    tmp_path: Path, endpoint: FakeEndpoint, at: str
) -> None:
    """The program gets an error in the words of its API, and asks again or something else."""
    with recording(tmp_path, endpoint, call_attempts=1) as world:
        world.talk("Hello.", at="/sessions/other")
        messages = [{"role": "user", "content": "fault:null"}]
        body = {"model": "m", "messages": messages, "max_tokens": 50}
        status, reply = world.ask("POST", f"/sessions/a{at}", body)
        assert status == 502
        assert "malformed" in json.dumps(reply["error"])
        world.talk("Go.", at="/sessions/a")
        assert stop(world.process) == 0
    done_records = records_by_id(tmp_path)
    assert {name: record["status"] for name, record in done_records.items()} == {
        "a": "completed",
        "other": "completed",
    }
    assert (
        "Session a: a call failed: malformed: " in (tmp_path / "trajectories/r/run.log").read_text()
    )


@pytest.mark.slow
def test_an_api_that_the_endpoint_lacks_fails_only_sessions_that_speak_it(
    tmp_path: Path, endpoint: FakeEndpoint
) -> None:
    """Once the endpoint has answered in another API; its root URL has never answered then."""
    with recording(tmp_path, endpoint, call_attempts=2) as world:
        world.talk("Go.", at="/sessions/a")
        messages = [{"role": "user", "content": "fault:null"}]
        body = {"model": "m", "messages": messages, "max_tokens": 50}
        assert world.ask("POST", "/sessions/b/v1/messages", body)[0] == 502
        assert world.ask("DELETE", "/sessions/b")[1]["status"] == "failed"
        world.talk("Go on.", at="/sessions/c")
        assert stop(world.process) == 1
    assert {name: one["status"] for name, one in records_by_id(tmp_path).items()} == {
        "a": "completed",
        "b": "failed",
        "c": "completed",
    }


def test_a_session_whose_only_call_was_refused_has_failed(
    tmp_path: Path, endpoint: FakeEndpoint
) -> None:
    """Also where the recording itself refuses it; no further attempt can change that."""
    with recording(tmp_path, endpoint, max_run_cost_usd=1) as world:
        messages = [{"role": "user", "content": "Go."}]
        body = {"model": "unpriced", "messages": messages, "max_tokens": 50}
        assert world.ask("POST", "/sessions/a/v1/chat/completions", body)[0] == 400
        assert world.ask("DELETE", "/sessions/a")[1]["status"] == "failed"
        assert stop(world.process) == 1
    error = records_by_id(tmp_path)["a"]["error"]
    assert error["class"] == "model"
    assert error["message"].startswith("the price of model 'unpriced' is unknown")
    output = (tmp_path / "output.txt").read_text()
    assert "1  model: the price of model 'unpriced' is unknown" in output
    assert "--max_attempts" not in output


def test_a_recording_is_a_run_of_its_own(tmp_path: Path, endpoint: FakeEndpoint) -> None:
    """It takes no dataset; an upstream that is unknown is refused before anything is written."""
    ended = run(tmp_path, "record", dataset_file="p.jsonl", **options(endpoint))
    assert ended.returncode == 2
    assert "dataset_file" in ended.stderr
    ended = run(tmp_path, "record", run_name="r", upstream="opnai")
    assert ended.returncode == 2
    assert "openai" in ended.stderr
    assert not (tmp_path / "trajectories/r").exists()


def test_a_port_that_is_in_use_is_named(tmp_path: Path, endpoint: FakeEndpoint) -> None:
    ended = run(tmp_path, "record", **options(endpoint, port=endpoint.port))
    assert ended.returncode == 4
    message = f"127.0.0.1:{endpoint.port}: Address already in use; give another --port"
    assert message in ended.stderr


def test_calls_that_the_server_left_in_texts_are_reported_once(
    tmp_path: Path, endpoint: FakeEndpoint
) -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    reply = {"id": "c", "model": "m", "choices": [choice], "usage": usage}

    class Leaking(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            content = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Leaking)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    with recording(tmp_path, endpoint, base_url=url) as program:
        for name in ("a", "b"):
            program.call([{"role": "user", "content": "Go."}], at=f"/sessions/{name}")
            program.ask("DELETE", f"/sessions/{name}")
        assert stop(program.process) == 0
    server.shutdown()
    server.server_close()
    output = (tmp_path / "output.txt").read_text()
    assert output.count("--tool-call-parser hermes") == 1
    assert {one["status"] for one in records_by_id(tmp_path).values()} == {"completed"}
    rejected = lines(tmp_path / "trajectories/r/exports/rejects.jsonl")
    assert [one["reason"] for one in rejected] == ["leaked_call"] * 2


def test_replies_without_token_counts_are_reported_once(
    tmp_path: Path, endpoint: FakeEndpoint
) -> None:
    choice = {"message": {"role": "assistant", "content": "Done."}, "finish_reason": "stop"}
    uncounted = {"id": "c", "model": "m", "choices": [choice]}
    with (
        answering(lambda path, body: (200, uncounted)) as (url, _),
        recording(tmp_path, endpoint, base_url=f"{url}/v1") as program,
    ):
        for name in ("a", "b"):
            program.call([{"role": "user", "content": "Go."}], at=f"/sessions/{name}")
            program.ask("DELETE", f"/sessions/{name}")
        assert stop(program.process) == 0
    assert (tmp_path / "output.txt").read_text().count("include_usage") == 1
