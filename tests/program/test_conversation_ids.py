"""The ids of conversations as an endpoint sees them, in whole runs: kills, samples, recordings."""

from __future__ import annotations

import json
import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock
from typing import Any

import pytest

from tests.helpers.answering import JSON, Handler, listening
from tests.helpers.running import (
    PATIENCE_S,
    lines,
    records_by_id,
    run,
    session_of,
    started,
    wait_until,
    write_rows,
)
from tests.program.test_record import recording, stop

HEADERS = ("x-session-affinity", "x-session-id", "x-smg-routing-key", "x-dynamo-session-id")
TURNS = 4
HELPER = {"name": "helper", "description": "Helps.", "system_prompt": "You help.", "max_turns": 5}


class Fleet:
    """An endpoint that keeps the id of each request by its first words, and holds replies."""

    url: str
    openai_url: str

    def __init__(self) -> None:
        self.ids: defaultdict[str, list[str]] = defaultdict(list)
        self.requests = 0
        self.answers = 10**9
        """How many requests are answered before the others wait."""
        self.refuses = False
        """Requests with an id are refused, by another message each time."""
        self.is_down = False
        """Every request fails (503), and it says that it is not well."""
        self.failed_turns: set[int] = set()
        """The turns whose requests failed while it was down; the first is 0."""
        self._goes_on = Event()
        self._lock = Lock()

    def take(self, headers: Any, body: JSON) -> JSON:
        """The reply to a request."""
        first = next(m["content"] for m in body["messages"] if m["role"] == "user")
        ids = {headers[name] for name in HEADERS}
        with self._lock:
            self.requests += 1
            self.ids[first].append(ids.pop())
            is_held = self.requests > self.answers
        assert not ids, "one id by all names"
        if is_held:
            self._goes_on.wait(PATIENCE_S)
        done = sum(m["role"] == "tool" for m in body["messages"])
        names = {one["function"]["name"] for one in body.get("tools", ())}
        message: JSON = {"role": "assistant", "content": "Done."}
        if done < TURNS and "write_file" in names:
            call = {"name": "write_file", "arguments": f'{{"path": "{done}", "content": "x"}}'}
            if "helper" in names and done == 1:
                call = {"name": "helper", "arguments": '{"task": "Find it."}'}
            calls = [{"id": f"c{done}", "type": "function", "function": call}]
            message |= {"content": None, "tool_calls": calls}
        return {"choices": [{"message": message, "finish_reason": "stop"}]}

    def release(self) -> None:
        """Answer what waits; its readers are dead."""
        self._goes_on.set()
        self._goes_on = Event()


@contextmanager
def fleet() -> Iterator[Fleet]:
    world = Fleet()

    class Answering(Handler):
        def do_GET(self) -> None:
            self.send(503 if world.is_down else 200)

        def do_POST(self) -> None:
            body = json.loads(self.body())
            status, reply = 200, {}
            if world.is_down:
                world.requests += 1
                world.failed_turns.add(sum(m["role"] == "tool" for m in body["messages"]))
                status, reply = 503, {"error": {"message": "down"}}
            elif world.refuses and HEADERS[0] in self.headers:
                world.requests += 1
                message = f"request {world.requests}: {HEADERS[0]} is not allowed here"
                status, reply = 400, {"error": {"message": message}}
            else:
                reply = world.take(self.headers, body)
            try:
                self.send(status, json.dumps(reply).encode())
            except OSError:
                return  # the run was killed

    with listening(Answering) as url:
        world.url, world.openai_url = url, f"{url}/v1"
        try:
            yield world
        finally:
            world.release()


def options(world: Fleet, **more: Any) -> dict[str, Any]:
    return {
        "run_name": "r",
        "dataset_file": "p.jsonl",
        "model": "m",
        "base_url": world.openai_url,
        "enabled_toolsets": "file",
        "num_workers": 2,
        **more,
    }


@pytest.mark.slow
def test_a_conversation_keeps_its_id_over_turns_and_kills(tmp_path: Path) -> None:
    """Main conversations and subagents, three kills; no id says anything of prompt or run."""
    write_rows(tmp_path / "p.jsonl", *({"id": f"q{n}", "prompt": f"Prompt {n}"} for n in range(3)))
    with fleet() as world:
        given = options(world, subagents=json.dumps([HELPER]))
        for _ in range(3):
            world.answers = world.requests + 4
            with started(tmp_path, **given) as process:
                wait_until(lambda: world.requests > world.answers or process.poll() is not None)
                assert process.poll() is None
                os.killpg(process.pid, signal.SIGKILL)
                wait_until(lambda: not session_of(process.pid))
            world.release()
        world.answers = 10**9
        done = run(tmp_path, **given)
        assert done.returncode == 0, done.stderr
    mains = {first: set(ids) for first, ids in world.ids.items() if first.startswith("Prompt")}
    assert len(mains) == 3
    assert all(len(ids) == 1 for ids in mains.values()), mains
    assert sum(len(world.ids[first]) for first in mains) >= 3 * (TURNS + 1)
    every = {id for ids in world.ids.values() for id in ids}
    assert len(every) == 6, "each conversation, and each subagent"
    assert all(len(id) == 32 and id.isalnum() for id in every)
    text = (tmp_path / "trajectories/r/records.jsonl").read_text()
    assert not any(id in text for id in every), "records do not depend on it"


def test_samples_and_runs_have_ids_of_their_own(tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", {"id": "q", "prompt": "Prompt"})
    with fleet() as world:
        for name in ("a", "b"):
            given = options(world, run_name=name, num_samples=2, num_workers=1)
            assert run(tmp_path, **given).returncode == 0
    ids = world.ids["Prompt"]
    assert len(ids) == 2 * 2 * (TURNS + 1)
    assert len(set(ids)) == 4


def test_a_run_of_an_earlier_version_gets_a_key_when_it_continues(tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", {"id": "q", "prompt": "Prompt"})
    path = tmp_path / "trajectories/r/run.json"
    with fleet() as world:
        assert run(tmp_path, **options(world, num_workers=1)).returncode == 0
        old = json.loads(path.read_text())
        key = old.pop("conversation_key")
        del old["crc32"]
        path.write_text(json.dumps(old))
        write_rows(tmp_path / "p.jsonl", *({"id": id, "prompt": "Prompt"} for id in "qr"))
        assert run(tmp_path, **options(world, num_workers=1)).returncode == 0
    assert len(set(world.ids["Prompt"])) == 2
    new = json.loads(path.read_text())["conversation_key"]
    assert new
    assert new != key
    assert len(lines(path.with_name("records.jsonl"))) == 2


def test_an_endpoint_that_refuses_ids_is_told_of_once(tmp_path: Path) -> None:
    """Not once per worker."""
    write_rows(tmp_path / "p.jsonl", *({"id": f"q{n}", "prompt": f"Prompt {n}"} for n in range(4)))
    with fleet() as world:
        world.refuses = True
        done = run(tmp_path, **options(world))
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("refuses the id of a conversation") == 1
    assert {id for ids in world.ids.values() for id in ids} == {None}


def test_replicas_without_a_router_in_a_whole_run(tmp_path: Path) -> None:
    """Two workers; one URL has no server, and one server fails all it is asked."""
    rows = ({"id": f"q{n:02}", "prompt": f"Prompt {n}"} for n in range(12))
    write_rows(tmp_path / "p.jsonl", *rows)
    with fleet() as one, fleet() as two, fleet() as bad:
        bad.is_down = True
        urls = [one.openai_url, two.openai_url, bad.openai_url, "http://127.0.0.1:9/v1"]
        entry = {"base_urls": urls, "replica_max_in_flight": 4}
        given = options(one, model="fleet:m", endpoints=json.dumps({"fleet": entry}))
        del given["base_url"]
        done = run(tmp_path, **given)
        assert done.returncode == 0, done.stderr
        seen = {first: len(ids) for first, ids in one.ids.items()}
        assert not seen.keys() & two.ids.keys(), "each conversation was at one replica"
        seen |= {first: len(ids) for first, ids in two.ids.items()}
    assert seen == {f"Prompt {n}": TURNS + 1 for n in range(12)}
    assert one.ids
    assert two.ids
    assert bad.failed_turns <= {0}, "who has left it does not come back"
    found = lines(tmp_path / "trajectories/r/records.jsonl")
    assert {record["endpoint"] for record in found} == {one.openai_url}


def test_a_limit_that_workers_cannot_share_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", {"id": "q", "prompt": "Prompt"})
    entry = {"base_urls": ["http://127.0.0.1:9/v1"], "replica_max_in_flight": 1}
    given: dict[str, Any] = {"run_name": "r", "dataset_file": "p.jsonl", "model": "fleet:m"}
    done = run(tmp_path, **given, num_workers=2, endpoints=json.dumps({"fleet": entry}))
    assert done.returncode == 2
    assert "replica_max_in_flight: 1 cannot be divided among 2 workers" in done.stderr


def test_each_session_of_a_recording_has_an_id(tmp_path: Path) -> None:
    with fleet() as world:
        given: Any = world
        with recording(tmp_path, given, key_env="none") as recorder:
            recorder.talk("First.", at="/sessions/one")
            recorder.talk("First.", at="/sessions/two")
            assert stop(recorder.process) == 0
    assert len(set(world.ids["First."])) == 2
    assert len(records_by_id(tmp_path)) == 2


def test_a_recording_has_replicas_too(tmp_path: Path) -> None:
    with fleet() as one, fleet() as two:
        entry = {"base_urls": [one.openai_url, two.openai_url, "http://127.0.0.1:9/v1"]}
        given: Any = one
        more = {"upstream": "fleet", "endpoints": json.dumps({"fleet": entry})}
        with recording(tmp_path, given, **more) as recorder:
            for n in range(6):
                messages: list[Any] = [{"role": "user", "content": f"Prompt {n}"}]
                for _ in range(2):
                    recorder.call(messages, at=f"/sessions/s{n}")
                    messages.append({"role": "user", "content": "On."})
            assert stop(recorder.process) == 0
        assert not one.ids.keys() & two.ids.keys()
        counts = [len(ids) for world in (one, two) for ids in world.ids.values()]
    assert counts == [2] * 6
