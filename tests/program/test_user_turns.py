"""Conversations with several messages of the user, in whole runs: kills, checks and costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from batch_trajectories.report.facts import find_flags
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.helpers.answering import JSON, answering
from tests.helpers.playing import call, calls, say
from tests.helpers.running import SCRIPTED, WRITE_A_NOTE, lines, records, run, write_rows
from tests.helpers.stored import to_record
from tests.helpers.user_models import STOP, TASKS, kill_and_finish, number_replies, user_options


@pytest.mark.slow
def test_turns_of_the_user_survive_kills(tmp_path: Path) -> None:
    turns = ["And then?", "Is that all?"]
    rows = [
        {"id": f"p{n:02}", "prompt": f"Question {n}", "user_turns": turns} for n in range(TASKS)
    ]
    write_rows(tmp_path / "p.jsonl", *rows)
    with FakeEndpoint(turns=2, latency_s=0.05, answers=0, **WRITE_A_NOTE) as endpoint:
        kill_and_finish(tmp_path, user_options(endpoint), endpoint, calls=TASKS * 4)
    for record in records(tmp_path):
        roles = [message["role"] for message in record["messages"]]
        assert roles == ["user", "assistant", "tool", "assistant", *["user", "assistant"] * 2]
        assert [m["content"] for m in record["messages"] if m["role"] == "user"][1:] == turns
    for row in lines(tmp_path / "trajectories" / "r.jsonl"):
        said = [turn["value"] for turn in row["conversations"] if turn["from"] == "human"]
        assert said[1:] == turns


@pytest.mark.slow
def test_a_simulated_user_survives_kills(tmp_path: Path) -> None:
    """Each reply of the user's model has a number: none that was stored is paid for again."""

    def write(messages: list[JSON], number: int) -> str:
        written = sum(message["role"] == "assistant" for message in messages)
        return STOP if written == 3 else f"More, please ({number})."

    rows = [
        {"id": f"p{n:02}", "prompt": f"Question {n}", "simulated_user": {"system_prompt": f"#{n}"}}
        for n in range(TASKS)
    ]
    write_rows(tmp_path / "p.jsonl", *rows)
    with (
        answering(number_replies(write)) as (url, requests),
        FakeEndpoint(turns=2, latency_s=0.05, answers=0, **WRITE_A_NOTE) as endpoint,
    ):
        config = {
            "endpoints": {"user": {"base_url": f"{url}/v1", "key_env": "none"}},
            "simulated_user": {"model": "user:u"},
            "prices": {"m": {"input": 1, "output": 1}, "user:u": {"input": 100, "output": 100}},
        }
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
        given = user_options(endpoint, config="run.yaml")
        in_flight = kill_and_finish(tmp_path, given, endpoint, calls=TASKS * 4)
    stored = []
    for record in records(tmp_path):
        users = [m["content"] for m in record["messages"] if m["role"] == "user"]
        assert len(users) == 3
        inner = record["inner"]
        assert [one["key"] for one in inner] == [f"simulated_user#{n}" for n in (1, 2, 3)]
        assert [one["messages"][-1]["content"] for one in inner] == [*users[1:], STOP]
        assert inner[0]["messages"][0]["content"].startswith(f"#{int(record['id'][1:])}\n")
        assert [len(one["messages"]) for one in inner] == [2, 1, 1]
        assert all(one["cost_usd"] == 15 * 100 / 1e6 for one in inner)
        assert record["cost_usd"] > sum(one["cost_usd"] for one in inner)
        stored += [turn["response_id"] for one in inner for turn in one["turns"]]
    assert len(stored) == len(set(stored)) == TASKS * 3
    assert len(requests) - len(stored) <= in_flight


def test_a_conversation_too_long_for_its_users_model_ends_with_a_reason_of_its_own(
    tmp_path: Path,
) -> None:
    """Its answers are kept: it ended at a limit, as others do."""

    def refuse(path: str, body: JSON) -> tuple[int, JSON]:
        return 400, {"error": {"message": "This model's maximum context length is 512 tokens."}}

    row = {"id": "p1", "prompt": "Hello.", "script": [say("What can I do?")]}
    write_rows(tmp_path / "p.jsonl", {**row, "simulated_user": {"system_prompt": "You are Ann."}})
    with answering(refuse) as (url, requests):
        config = {
            "endpoints": {"user": {"base_url": f"{url}/v1", "key_env": "none"}},
            "simulated_user": {"model": "user:u"},
        }
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
        done = run(tmp_path, **SCRIPTED, config="run.yaml")
    assert (done.returncode, len(requests)) == (0, 1), done.stderr
    [record] = records(tmp_path)
    assert record["status"] == "user_context_exceeded"
    assert record["status_reason"].startswith("the simulated user ended as context_exceeded: ")
    assert "maximum context length is 512" in record["status_reason"]
    assert [m["content"] for m in record["messages"]] == ["Hello.", "What can I do?"]
    [entries] = lines(tmp_path / "trajectories" / "r" / "exports" / "partial.jsonl")
    assert entries["id"] == "p1"
    stats = json.loads(run(tmp_path, "stats", "r", "--json").stdout)
    tasks = next(step for step in stats["funnel"]["steps"] if step["name"] == "tasks")
    assert tasks["lost"] == {"user_context_exceeded": 1}


POLICY = "You book flights. Ask for a confirmation before you change bookings.json."
BOOKING = json.dumps({"flight": "A1"})
CHECK = {
    "command": "python3 hidden.py",
    "files": {
        "hidden.py": "import json\nassert json.load(open('bookings.json')) == {'flight': 'B2'}\n"
    },
}


def write_booking(flight: str) -> dict[str, Any]:
    content = json.dumps({"flight": flight})
    return calls(call("write_file", path="bookings.json", content=content))


def test_a_dataset_can_mix_simulated_users_and_fixed_messages(tmp_path: Path) -> None:
    ann = {"system_prompt": "You are Ann.", "script": [say("Which?"), say(STOP)]}
    answers = [say("One."), say("Two."), say("Three.")]
    write_rows(
        tmp_path / "p.jsonl",
        {"id": "fixed", "prompt": "A", "user_turns": ["B", "C"], "script": answers},
        {"id": "played", "prompt": "A", "simulated_user": ann, "script": answers},
    )
    done = run(tmp_path, **SCRIPTED, simulated_user='{"model": "scripted"}')
    assert done.returncode == 0, done.stderr
    said = {
        record["id"]: [m["content"] for m in record["messages"] if m["role"] == "user"]
        for record in records(tmp_path)
    }
    assert said == {"fixed": ["A", "B", "C"], "played": ["A", "Which?"]}


def test_a_policy_a_user_with_a_scenario_and_a_check_of_the_end(tmp_path: Path) -> None:
    """Rows as those of tau-bench: the user confirms, and the files decide the reward."""
    row = {
        "prompt": "Hello, I have to change my flight.",
        "files": {"bookings.json": BOOKING},
        "check": CHECK,
        "simulated_user": {
            "system_prompt": "You are Ann. You want flight B2 in the place of A1.",
            "script": [say("To B2, please."), say("Yes."), say(STOP)],
        },
    }
    asks = [say("To which flight?"), say("From A1 to B2: is that right?")]
    write_rows(
        tmp_path / "p.jsonl",
        {**row, "id": "right", "script": [*asks, write_booking("B2"), say("It is done.")]},
        {**row, "id": "wrong", "script": [*asks, write_booking("C3"), say("It is done.")]},
    )
    done = run(
        tmp_path,
        "--row_setup",
        **SCRIPTED,
        system_prompt=POLICY,
        sandbox="local",
        simulated_user='{"model": "scripted"}',
    )
    assert done.returncode == 0, done.stderr
    found = {record["id"]: record for record in records(tmp_path)}
    assert {id: record["status"] for id, record in found.items()} == {
        "right": "completed",
        "wrong": "completed",
    }
    assert found["right"]["check"]["passed"]
    assert not found["wrong"]["check"]["passed"]
    assert "notes" not in find_flags(to_record(found["right"])), "the user's messages are none"
    users = [m["content"] for m in found["right"]["messages"] if m["role"] == "user"]
    assert users == [row["prompt"], "To B2, please.", "Yes."]
