"""A run that works: its events, the tail of a conversation, and what people ask of it."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.fake_endpoint import FakeEndpoint
from tests.helpers.running import WRITE_A_NOTE, started, wait_until, write_prompts
from tests.view.serving import Viewer, viewing

RUN = "/runs/r"


class Heard:
    """The events of a stream so far, by kind."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def of(self, kind: str) -> list[Any]:
        return [data for of_kind, data in self.events if of_kind == kind]

    def last(self, kind: str) -> Any:
        return self.of(kind)[-1] if self.of(kind) else None


@contextmanager
def listening(viewer: Viewer, query: str) -> Iterator[Heard]:
    """Hear the events of a server in another thread."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{viewer.port}/api/events?{query}",
        headers={"Authorization": f"Bearer {viewer.token}"},
    )
    heard = Heard()
    response = urllib.request.urlopen(request, timeout=60)

    def listen() -> None:
        kind = ""
        try:
            for line in response:
                name, _, value = line.decode().rstrip("\n").partition(": ")
                if name == "event":
                    kind = value
                elif name == "data":
                    heard.events.append((kind, json.loads(value)))
        except (OSError, ValueError, AttributeError):
            return  # closed below

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield heard
    finally:
        response.close()
        thread.join(10)


@pytest.mark.slow
def test_a_run_is_watched_steered_and_read_to_its_end(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 12)
    runs = tmp_path / "trajectories"
    with FakeEndpoint(turns=3, latency_s=0.0, answers=6, **WRITE_A_NOTE) as endpoint:
        given: dict[str, Any] = {
            "dataset_file": "p.jsonl",
            "run_name": "r",
            "base_url": endpoint.openai_url,
            "key_env": "none",
            "num_workers": 1,
            "batch_size": 4,
            "model": "openai:m",
            "enabled_toolsets": "file",
            "max_attempts": 2,
        }
        with started(tmp_path, **given) as process:
            wait_until(lambda: int(endpoint.journal()["requests"]) >= 10)
            with viewing(runs) as viewer:
                flying = viewer.get(f"{RUN}/in_flight")["conversations"]
                id = next(one["id"] for one in flying if one["turns"])
                other = next(one["id"] for one in flying if one["id"] != id)
                with listening(viewer, f"run=r&id={id}") as heard:
                    wait_until(lambda: (heard.last("run") or {}).get("now") is not None)
                    found = heard.last("run")
                    assert (found["state"], found["tasks"]) == ("running", 12)
                    assert found["can_steer"]
                    assert {one["doing"] for one in flying} <= {"model", "tools"}
                    wait_until(lambda: heard.last("live") is not None)
                    live = viewer.get(f"{RUN}/live", id=id)
                    assert not live["is_over"]
                    roles = [message["role"] for message in live["messages"]]
                    assert roles[:3] == ["user", "assistant", "tool"]
                    assert live["messages"][0]["content"] == f"Question number {int(id[1:])}"
                    said = viewer.post(f"{RUN}/steer", {"do": "pause"})["answer"]
                    assert said.startswith("paused")
                    wait_until(lambda: heard.last("run")["state"] == "paused")
                    refused = viewer.ask(
                        f"/api{RUN}/steer", {"do": "limits", "max_run_cost_usd": 1}
                    )
                    assert refused.status == 409
                    said = viewer.post(f"{RUN}/steer", {"do": "limits", "max_in_flight": 2})[
                        "answer"
                    ]
                    assert "max_in_flight 2" in said
                    said = viewer.post(f"{RUN}/steer", {"do": "stop", "id": other})["answer"]
                    assert "is stopped" in said
                    viewer.post(f"{RUN}/steer", {"do": "resume"})
                    endpoint.answer(None)  # only now: the run could end before it has answered
                    process.wait(timeout=120)
                    wait_until(lambda: heard.last("run")["state"] == "not running")
                    wait_until(lambda: heard.last("index")["rows"] >= 11)  # one was stopped
                    wait_until(lambda: heard.last("live")["is_over"])
                    assert len({data["rows"] for data in heard.of("index")}) > 1, (
                        "rows came one by one"
                    )
                    record = viewer.get(f"{RUN}/record", id=id)["record"]
                    assert record["messages"][: len(live["messages"])] == live["messages"]
    log = (runs / "r" / "run.log").read_text()
    assert "asked for `pause`. Done: paused" in log
