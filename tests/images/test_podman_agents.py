"""Agents that run as commands in containers of a real Podman; Docker differs by its name only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.agent_endpoint import AgentEndpoint
from tests.helpers.running import kill_session, records_by_id, run, started, wait_until, write_rows
from tests.images.conftest import podman
from tests.images.test_agent_images import FIXED, work
from tests.images.test_podman_runs import assert_nothing_is_left
from tests.program.test_agent_runs import SCRIPT, options, prompt, scripted_agent

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("engine")]


@pytest.fixture
def endpoint() -> Iterator[AgentEndpoint]:
    with AgentEndpoint() as endpoint:
        yield endpoint


def in_container(endpoint: AgentEndpoint, *, inside: bool = True, **fields: Any) -> dict[str, Any]:
    """The options of a run whose agent is run by the Python of an image.

    `inside`: its workspace is the image's; else a directory of this machine is mounted.
    """
    agent = scripted_agent(
        **{
            "command": ["python3", str(SCRIPT), "chat", "--stream", "{prompt}"],
            "version": ["python3", "--version"],
            **fields,
        }
    )
    more = {"workspace": "image"} if inside else {"docker_image": "localhost/python:1"}
    return options(endpoint, agent, sandbox="docker", container_engine="podman", **more)


def test_an_agent_works_in_the_container_of_its_row(
    tmp_path: Path, endpoint: AgentEndpoint
) -> None:
    """As the image's user, who reaches the gateway with and without a network, and nothing else."""
    write_rows(
        tmp_path / "p.jsonl",
        work("root", "python:1", check=FIXED),
        work("user", "agent:1", check=FIXED),
        work("wide", "agent:1", check=FIXED, network=True),
        work("unfixed", "python:1", steps=0, check=FIXED),
    )
    shown = (
        "cat ~/note; id -u; test -S /run/gateway/socket && echo socket; "
        "(: > /run/gateway/x) 2> /dev/null || echo locked"
    )
    given = in_container(
        endpoint,
        command=["sh", "-c", f'{shown}; exec python3 "$@"', "sh", str(SCRIPT), "chat", "{prompt}"],
        files={"note": "{workspace} {home}\n"},
    )
    done = run(tmp_path, "--row_setup", "--network", **given)
    assert done.returncode == 0, done.stderr
    found = records_by_id(tmp_path)
    passed = {name: record["check"]["passed"] for name, record in found.items()}
    assert passed == {"root": True, "user": True, "wide": True, "unfixed": False}
    assert "+    return a + b" in found["user"]["diff"]["patch"]
    said = {name: record["agent"]["stdout"].splitlines()[:4] for name, record in found.items()}
    assert said["root"] == ["/testbed /root", "0", "socket", "locked"]
    assert said["user"] == ["/home/agent/work /home/agent", "1234", "socket", "locked"]
    assert found["root"]["agent"]["version"].startswith("3.")
    assert len(endpoint.of_task("user")) == found["user"]["api_calls"] == 3
    assert_nothing_is_left(tmp_path)


def test_an_agent_works_in_a_directory_of_this_machine(
    tmp_path: Path, endpoint: AgentEndpoint
) -> None:
    row = {"id": "p", "prompt": prompt("p", 2), "check": "grep p-2 notes.txt"}
    write_rows(tmp_path / "p.jsonl", row)
    shown = 'echo "$HOME $PWD"; : > ~/mine && ls -A ~'
    command = ["sh", "-c", f'{shown}; exec python3 "$@"', "sh", str(SCRIPT), "chat", "{prompt}"]
    given = in_container(endpoint, inside=False, command=command)
    done = run(tmp_path, "--row_setup", **given)
    assert done.returncode == 0, done.stderr
    record = records_by_id(tmp_path)["p"]
    assert (record["status"], record["check"]["passed"]) == ("completed", True)
    assert record["agent"]["stdout"].splitlines()[:2] == ["/home/user /workspace", "mine"]
    assert record["agent"]["version"].startswith("3.")
    assert podman("ps", "--all", "--quiet") == ""


@pytest.mark.parametrize("inside", [True, False])
def test_a_killed_agent_begins_again_in_a_new_container(
    tmp_path: Path, endpoint: AgentEndpoint, inside: bool
) -> None:
    row = work("t", "python:1", steps=4, check=FIXED)
    if not inside:
        row = {"id": "t", "prompt": prompt("t", 4), "check": "test $(wc -l < notes.txt) = 4"}
    write_rows(tmp_path / "p.jsonl", row)
    given = in_container(endpoint, inside=inside)
    endpoint.answers = 3
    with started(tmp_path, "--row_setup", **given) as process:
        wait_until(lambda: len(endpoint.exchanges) == 3 and endpoint.waiting == 1, timeout_s=120)
        paid = [one.reply["id"] for one in endpoint.exchanges]
        kill_session(process.pid)
        process.wait()
    endpoint.answer_all()
    done = run(tmp_path, "--row_setup", **given)
    assert done.returncode == 0, done.stderr
    record = records_by_id(tmp_path)["t"]
    assert (record["status"], record["check"]["passed"]) == ("completed", True)
    assert [turn["response_id"] for turn in record["turns"]][:3] == paid
    assert (record["api_calls"], record["set_aside"], record["diverged_at"]) == (5, [], None)
    assert record["agent"]["starts"] == 2
    if inside:
        assert_nothing_is_left(tmp_path)


def test_an_agent_that_the_container_lacks_fails_before_any_call(
    tmp_path: Path, endpoint: AgentEndpoint
) -> None:
    write_rows(tmp_path / "p.jsonl", work("p", "python:1"))
    given = in_container(endpoint, command=["no-such-agent", "{prompt}"], version=[])
    done = run(tmp_path, **given, max_attempts=1)
    assert done.returncode == 1, done.stderr
    error = records_by_id(tmp_path)["p"]["error"]
    assert error["class"] == "agent_failed"
    assert "cannot start no-such-agent" in error["message"]
    assert not endpoint.exchanges
