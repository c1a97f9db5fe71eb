"""Several user turns and simulated users in whole runs: real processes, kills, a scripted user."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.playing import call, calls, say
from tests.running import SCRIPTED, lines, run, started, wait_until, write_rows

PROMPTS = 12


class Endpoint(ThreadingHTTPServer):
    """Answers model "agent" with a call, then a text, and model "user" with a wish or its stop.

    `asked` and `answered` count requests by model and messages: a reply that a run has stored is
    never asked for again.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock = threading.Lock()
        self.asked: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def replies(self) -> int:
        with self.lock:
            return self.answered.total()

    def asked_again(self) -> int:
        """Replies that left in full and were asked for again."""
        with self.lock:
            return sum(count - 1 for count in self.answered.values())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        # Without ids, which a run makes.
        key = json.dumps([body["model"], [(m["role"], m.get("content")) for m in body["messages"]]])
        with self.server.lock:
            self.server.asked[key] += 1
        replied = sum(message["role"] == "assistant" for message in body["messages"])
        message = _user(replied) if body["model"] == "user" else _agent(body["messages"])
        usage = {"prompt_tokens": 10, "completion_tokens": 5}
        finish = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "message": message, "finish_reason": finish}
        reply = json.dumps({"model": body["model"], "choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)
        with self.server.lock:
            self.server.answered[key] += 1

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def _agent(messages: list[dict[str, Any]]) -> dict[str, Any]:
    if messages[-1]["role"] == "tool":
        return {"role": "assistant", "content": f"done after {len(messages)} messages"}
    number = sum(message["role"] == "user" for message in messages)
    arguments = json.dumps({"path": f"n{number}", "content": str(number)})
    function = {"name": "write_file", "arguments": arguments}
    made = {"id": f"call_{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [made]}


def _user(replied: int) -> dict[str, Any]:
    # The first assistant message of a user's conversation is the prompt.
    words = f"wish {replied}" if replied < 4 else "###STOP###"
    return {"role": "assistant", "content": words}


@contextmanager
def endpoint() -> Iterator[Endpoint]:
    with Endpoint() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def records(cwd: Path) -> dict[str, dict[str, Any]]:
    return {record["id"]: record for record in lines(cwd / "trajectories" / "r" / "records.jsonl")}


@pytest.mark.parametrize("kind", ["user_turns", "simulated_user"])
def test_kills_at_random_moments_repeat_no_stored_reply(tmp_path: Path, kind: str) -> None:
    """Each kill may cost the calls in flight, and nothing that was stored."""
    own: dict[str, Any] = {"user_turns": ["wish 1", "wish 2", "wish 3"]}
    given: dict[str, Any] = {}
    if kind == "simulated_user":
        own = {kind: {"system_prompt": "You have three wishes."}}
        given[kind] = json.dumps({"model": "openai:user"})
    rows = [{"id": f"p{n}", "prompt": f"Question {n}", **own} for n in range(PROMPTS)]
    if kind == "simulated_user":
        for n, row in enumerate(rows):
            row[kind] = {"system_prompt": f"You are user {n} and have three wishes."}
    write_rows(tmp_path / "p.jsonl", *rows)
    draw = random.Random(kind)
    kills, in_flight = 4, 4
    with endpoint() as server:
        given |= {
            **SCRIPTED,
            **{"model": "openai:agent", "base_url": server.url, "key_env": "none"},
            **{"num_workers": 2, "batch_size": in_flight // 2},
        }
        for _ in range(kills):
            enough = server.replies() + draw.randint(3, 20)
            with started(tmp_path, **given) as process:
                wait_until(lambda enough=enough: server.replies() >= enough)
                os.killpg(process.pid, signal.SIGKILL)
        done = run(tmp_path, **given)
        assert done.returncode == 0, done.stderr
        assert server.asked_again() <= kills * in_flight
        paid = server.replies()
    found = records(tmp_path)
    assert len(found) == PROMPTS
    recorded = 0
    for record in found.values():
        assert (record["status"], record["status_reason"]) == ("completed", None)
        said = [m["content"] for m in record["messages"] if m["role"] == "user"]
        assert said[1:] == ["wish 1", "wish 2", "wish 3"]
        assert [turn["turn"] for turn in record["turns"]] == list(range(1, 9))
        assert {user["reason"] for user in record["user_turns"]} == {kind}
        recorded += record["api_calls"]
        if kind == "simulated_user":
            (inner,) = record["inner"]
            assert (inner["name"], inner["model_returned"]) == ("simulated_user", "user")
            assert inner["usage"]["output_tokens"] == 20
            assert len(inner["turns"]) == 4
    assert paid - recorded <= kills * in_flight
    rows = lines(tmp_path / "trajectories" / "r.jsonl")
    assert len(rows) == PROMPTS
    for row in rows:
        turns = [turn["from"] for turn in row["conversations"]]
        assert turns == ["system", *["human", "gpt", "tool", "gpt"] * 4]


POLICY = "You are the agent of an airline. Policy: only change seats in bookings.json."
SCENARIO = "You are Ana and want seat 12A. Say so when asked, and say ###STOP### once it is done."


def airline(**user: Any) -> dict[str, Any]:
    """A row as in docs/conversations.md: policy, scenario, check of the final state."""
    checked = "import json; assert json.load(open('bookings.json'))['ana'] == '12A'"
    return {
        "id": "ana",
        "prompt": [
            {"role": "system", "content": POLICY},
            {"role": "user", "content": "I want another seat."},
        ],
        "files": {"bookings.json": '{"ana": "20C"}'},
        "simulated_user": {"system_prompt": SCENARIO, **user},
        "check": f'{sys.executable} -c "{checked}"',
    }


def test_a_policy_a_scripted_user_and_a_check_of_the_final_state(tmp_path: Path) -> None:
    change = calls(call("write_file", path="bookings.json", content='{"ana": "12A"}'))
    script = [calls(call("read_file", path="bookings.json")), say("Which seat?"), change,
              say("You have 12A now.")]  # fmt: skip
    user = [say("12A, please."), say("Thanks! ###STOP###")]
    idle = {**airline(script=[say("Never mind. ###STOP###")]), "id": "idle"}
    write_rows(
        tmp_path / "p.jsonl",
        {**airline(script=user), "script": script},
        {**idle, "script": script[:2]},
    )
    config = {**SCRIPTED, "row_setup": True, "sandbox": "local"}
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump({**config, "simulated_user": {"model": "scripted", "max_turns": 5}})
    )
    done = run(tmp_path, config="run.yaml")
    assert done.returncode == 0, done.stderr
    found = records(tmp_path)
    assert found["ana"]["check"]["reward"] == 1
    assert found["idle"]["check"]["reward"] == 0
    shown = [m["content"] for m in found["ana"]["messages"] if m["role"] == "user"]
    assert shown == ["I want another seat.", "12A, please."]
    assert found["ana"]["messages"][0]["content"] == POLICY
    (inner,) = found["ana"]["inner"]
    assert POLICY not in json.dumps(inner), "the user does not know the policy"
    formats = "openai,llamafactory,atif"
    exported = run(tmp_path, "export", "r", "--format", formats)
    assert exported.returncode == 0, exported.stderr
    texts = [p.read_text() for p in (tmp_path / "trajectories" / "r" / "exports").rglob("*.jsonl")]
    texts.append((tmp_path / "trajectories" / "r.jsonl").read_text())
    assert sum("12A, please." in text for text in texts) >= 4
    for text in texts:
        assert "Thanks! ###STOP###" not in text.replace(json.dumps(user)[1:-1], "")


@pytest.mark.slow
def test_a_wrong_row_is_named_with_its_file_line_and_field(tmp_path: Path) -> None:
    good = {"prompt": "x", "script": [say("done")]}
    write_rows(
        tmp_path / "p.jsonl",
        good,
        {**good, "user_turns": ["y", 2]},
        {**good, "simulated_user": {"system_prompt": "x", "turns": 3}},
    )
    done = run(tmp_path, **SCRIPTED)
    assert done.returncode == 0
    assert "p.jsonl:2: skipped: `user_turns[1]` must be text that is not blank" in done.stderr
    assert "p.jsonl:3: skipped: `simulated_user.turns`" in done.stderr


@pytest.mark.slow
def test_a_wrong_key_of_the_config_is_named(tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [say("done")]})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**SCRIPTED, "simulated_user": {"stopp": 1}}))
    done = run(tmp_path, config="run.yaml")
    assert done.returncode == 2
    assert "simulated_user" in done.stderr
    assert "stopp" in done.stderr
