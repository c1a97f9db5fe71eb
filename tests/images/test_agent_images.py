"""Agents that run as commands in the images of their rows."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.agent_endpoint import AgentEndpoint
from tests.helpers.running import (
    PATIENCE_S,
    kill_session,
    lines,
    records_by_id,
    run,
    started,
    wait_until,
    write_rows,
)
from tests.images.test_image_runs import assert_nothing_is_left
from tests.program.test_agent_runs import SCRIPT, options, prompt, scripted_agent
from toolsets.sandbox.inside.processes import descendants

FIXED = "python3 -c 'from pkg.calc import add; assert add(5, 2) == 7'"
OUTSIDE = "ls -d /shown /images /workspace 2> /dev/null"
"""Lists what only the fork server may see."""


@pytest.fixture
def endpoint() -> Iterator[AgentEndpoint]:
    with AgentEndpoint() as endpoint:
        yield endpoint


def in_image(images: Path, endpoint: AgentEndpoint, **fields: Any) -> dict[str, Any]:
    """The options of a run whose agent is run by the Python of the image."""
    agent = scripted_agent(
        **{
            "command": ["python3", str(SCRIPT), "chat", "--stream", "{prompt}"],
            "version": ["python3", "--version"],
            **fields,
        }
    )
    return options(endpoint, agent, workspace="image", images=images, sandbox="bwrap")


def work(name: str, image: str, steps: int = 2, **columns: Any) -> dict[str, Any]:
    return {"id": name, "prompt": prompt(name, steps, "fix"), "image": image, **columns}


@pytest.mark.slow
def test_an_agent_works_in_the_image_of_its_row(
    images: Path, tmp_path: Path, endpoint: AgentEndpoint
) -> None:
    """With the image's user, variables and programs, its own HOME, and the gateway's socket."""
    write_rows(
        tmp_path / "p.jsonl",
        work("root", "python:1", check=FIXED),
        work("user", "agent:1", check=FIXED),
        work("unfixed", "python:1", steps=0, check=FIXED),
    )
    given = in_image(
        images,
        endpoint,
        command=[
            "sh",
            "-c",
            f'{OUTSIDE}; cat ~/note; echo "$GREETING $PWD $HOME"; exec python3 "$@"',
            "sh",
            str(SCRIPT),
            "chat",
            "{prompt}",
        ],
        files={"note": "{workspace} {home}\n"},
    )
    done = run(tmp_path, "--row_setup", **given)
    assert done.returncode == 0, done.stderr
    done_records = records_by_id(tmp_path)
    passed = {name: record["check"]["passed"] for name, record in done_records.items()}
    assert passed == {"root": True, "user": True, "unfixed": False}
    assert "+    return a + b" in done_records["user"]["diff"]["patch"]
    said = {name: record["agent"]["stdout"].splitlines() for name, record in done_records.items()}
    assert said["root"] == [
        "/testbed /root",
        "hi /testbed /root",
        "Finished root in 2 steps.",
    ]
    assert said["user"][:2] == ["/home/agent/work /home/agent", " /home/agent/work /home/agent"]
    assert done_records["root"]["agent"]["version"].startswith("3.")
    assert len(endpoint.of_task("user")) == done_records["user"]["api_calls"] == 3
    assert_nothing_is_left(tmp_path)


@pytest.mark.slow
def test_an_image_needs_no_python_for_an_agent(
    images: Path, tmp_path: Path, endpoint: AgentEndpoint
) -> None:
    """The agent is a shell script that writes HTTP."""
    script = (
        'body=\'{"model": "m", "messages": [{"role": "user", "content": "Hello"}]}\'\n'
        "exec 3<>/dev/tcp/127.0.0.1/8800\n"
        'printf "POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n'
        'Content-Type: application/json\\r\\nContent-Length: ${#body}\\r\\n\\r\\n$body" >&3\n'
        "cat <&3 > /dev/null\n"
        "ls -A /.host; ls /run/gateway; (: > /run/gateway/x) 2> /dev/null || echo read-only"
    )
    write_rows(tmp_path / "p.jsonl", {"id": "p", "prompt": "Hello", "image": "shell:1"})
    given = in_image(
        images, endpoint, command=["bash", "-c", script, "{prompt}"], version=[], programs=[]
    )
    done = run(tmp_path, **given)
    assert done.returncode == 0, done.stderr
    record = records_by_id(tmp_path)["p"]
    assert record["status"] == "completed", record["agent"]
    assert record["agent"]["stdout"].splitlines()[-2:] == ["socket", "read-only"]
    assert_nothing_is_left(tmp_path)


@pytest.mark.slow
def test_the_limits_of_a_row_are_those_of_its_agent(
    images: Path, tmp_path: Path, endpoint: AgentEndpoint
) -> None:
    write_rows(tmp_path / "p.jsonl", work("p", "python:1", limits={"memory_mb": 200}))
    script = "python3 -c 'import time; x = bytearray(500 << 20); time.sleep(20)'"
    given = in_image(images, endpoint, command=["sh", "-c", script, "{prompt}"], version=[])
    run(tmp_path, **given, max_attempts=1)
    error = records_by_id(tmp_path)["p"]["error"]
    assert error["class"] == "agent_failed"
    assert "used more memory than its limit of 200 MB" in error["message"]


@pytest.mark.slow
def test_an_agent_that_the_image_lacks_fails_before_any_call(
    images: Path, tmp_path: Path, endpoint: AgentEndpoint
) -> None:
    write_rows(tmp_path / "p.jsonl", work("p", "python:1"))
    given = in_image(images, endpoint, command=["no-such-agent", "{prompt}"], version=[])
    done = run(tmp_path, **given, max_attempts=1)
    assert done.returncode == 1, done.stderr
    error = records_by_id(tmp_path)["p"]["error"]
    assert error["class"] == "agent_failed"
    assert "cannot start no-such-agent" in error["message"]
    assert not endpoint.exchanges


@pytest.mark.slow
def test_a_killed_agent_begins_again_in_a_new_copy_of_its_image(
    images: Path, tmp_path: Path, endpoint: AgentEndpoint
) -> None:
    """What its first start changed is gone, so that its calls repeat and are not paid again."""
    write_rows(tmp_path / "p.jsonl", work("t", "python:1", steps=4, check=FIXED))
    given = in_image(images, endpoint)
    endpoint.answers = 3
    with started(tmp_path, "--row_setup", **given) as process:
        wait_until(lambda: len(endpoint.exchanges) == 3 and endpoint.waiting == 1)
        paid = [one.reply["id"] for one in endpoint.exchanges]
        kill_session(process.pid)
        process.wait()
    endpoint.answer_all()
    assert run(tmp_path, "--row_setup", **given).returncode == 0
    record = records_by_id(tmp_path)["t"]
    assert (record["status"], record["check"]["passed"]) == ("completed", True)
    assert [turn["response_id"] for turn in record["turns"]][:3] == paid
    assert (record["api_calls"], record["set_aside"], record["diverged_at"]) == (5, [], None)
    assert record["agent"]["starts"] == 2
    assert_nothing_is_left(tmp_path)


@pytest.mark.slow
def test_a_stop_while_an_agent_says_its_version_is_no_failed_attempt(
    images: Path, tmp_path: Path, endpoint: AgentEndpoint
) -> None:
    """Nor does the agent start afterwards, only to have all its calls refused."""
    write_rows(tmp_path / "p.jsonl", work("p", "python:1", steps=1))
    version = ["sh", "-c", "sleep 600; echo 1.0"]
    with started(tmp_path, **in_image(images, endpoint, version=version), grace_s=300) as process:
        wait_until(lambda: _is_below(process.pid, b"sleep\x00600\x00"))
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(timeout=PATIENCE_S) == 130
    assert not endpoint.exchanges
    assert not lines(tmp_path / "trajectories" / "r" / "failures.jsonl")
    given = in_image(images, endpoint, version=["sh", "-c", "echo 1.0"])
    assert run(tmp_path, **given, accept_config_change="agent").returncode == 0
    assert records_by_id(tmp_path)["p"]["attempt"] == 1


def _is_below(leader: int, command: bytes) -> bool:
    """Whether a process with this command line runs below a run."""
    for pid, _ in descendants(leader):
        with suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{pid}/cmdline").read_bytes() == command:
                return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "status"), [("/tmp", "completed"), ("/workspace", "failed"), ("/proc", "failed")]
)
def test_links_of_an_image_lead_nowhere_else(
    images: Path, tmp_path: Path, endpoint: AgentEndpoint, target: str, status: str
) -> None:
    """What an agent is shown is mounted once the image is all that there is."""
    setup = f"rm -rf /run && ln -s {target} /run"
    write_rows(tmp_path / "p.jsonl", work("p", "python:1", setup=setup), work("other", "python:1"))
    done = run(tmp_path, "--row_setup", **in_image(images, endpoint), max_attempts=1)
    assert done.returncode in (0, 1), done.stderr
    done_records = records_by_id(tmp_path)
    assert done_records["other"]["status"] == "completed"
    assert done_records["p"]["status"] == status
    if status == "failed":
        assert done_records["p"]["error"]["class"] == "agent_failed"
        assert "the sandbox did not start" in done_records["p"]["error"]["message"]
    assert_nothing_is_left(tmp_path)
