"""Agents that run as commands: recorded as the wire had it, and resumed without paying twice."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.agent_endpoint import AgentEndpoint, Exchange
from tests.helpers.running import (
    PATIENCE_S,
    ROOT,
    kill_session,
    lines,
    run,
    sorted_records,
    started,
    wait_until,
    workers_of,
    write_rows,
)
from tests.toolsets.test_sandbox import BOTH, needs_bwrap
from toolsets.sandbox.inside.processes import descendants

SCRIPT = ROOT / "tests/fakes/scripted_agent.py"
PYTHON = f"{sys.base_prefix}/bin/python3"
"""The one that every sandbox shows."""
APIS = {
    "chat": "openai_chat",
    "messages": "anthropic_messages",
    "responses": "openai_responses",
}
PRICES = json.dumps({"m": {"input": 1, "output": 2}})


@pytest.fixture
def endpoint() -> Iterator[AgentEndpoint]:
    with AgentEndpoint(reasoning="Let me think.") as endpoint:
        yield endpoint


def scripted_agent(dialect: str = "chat", *flags: str, **fields: Any) -> dict[str, Any]:
    """The agent of `tests/fakes/`."""
    return {
        "command": [PYTHON, str(SCRIPT), dialect, *flags, "{prompt}"],
        "speaks": APIS[dialect],
        "programs": [str(SCRIPT)],
        "version": [PYTHON, "--version"],
        "env": {"MODEL": "{model}"},
        "volatile": {"fields": ["metadata", "prompt_cache_key"]},
        "memory_mb": 40,
        **fields,
    }


def shell(script: str, **fields: Any) -> dict[str, Any]:
    """An agent that is a shell script, which gets the prompt as its first argument."""
    return scripted_agent(command=["sh", "-c", script, "sh", "{prompt}"], **fields)


def posting(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """An agent that makes one request, and prints no more than how it failed."""
    script = f"""
import os, urllib.request as r
r.urlopen(r.Request(os.environ["OPENAI_BASE_URL"] + "/{path}", {json.dumps(body).encode()!r}))"""
    return scripted_agent(command=[PYTHON, "-c", script, "{prompt}"])


def options(endpoint: AgentEndpoint, agent: dict[str, Any], **more: Any) -> dict[str, Any]:
    api = agent["speaks"]
    root = endpoint.url if api == "anthropic_messages" else f"{endpoint.url}/v1"
    return {
        "agent": json.dumps(agent),
        "dataset_file": "p.jsonl",
        "run_name": "r",
        "model": "m",
        "base_url": root,
        "api": api,
        "key_env": "none",
        "num_workers": 1,
        "prices": PRICES,
        **more,
    }


def prompt(name: str, steps: int, run: str = "") -> str:
    return f"Please work. [{name} steps={steps}{run and f' run={run}'}]"


def read_exchanges(endpoint: AgentEndpoint, task: str) -> list[Exchange]:
    return endpoint.of_task(task)


def nothing_is_left(tmp_path: Path) -> None:
    assert not list((tmp_path / "trajectories" / "r" / "workspaces").iterdir())
    wait_until(lambda: not any(str(tmp_path).encode() in line for line in _command_lines()))


def _command_lines() -> Iterator[bytes]:
    """The command lines of all processes."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError):
            yield path.read_bytes()


def by_acp(dialect: str = "chat", **fields: Any) -> dict[str, Any]:
    """The same agent, which gets its prompt by the Agent Client Protocol."""
    command = [PYTHON, str(SCRIPT), dialect, "--acp"]
    return scripted_agent(dialect, command=command, protocol="acp", **fields)


@needs_bwrap
def test_an_agent_of_the_client_protocol_gets_its_prompt_and_permissions(
    tmp_path: Path, endpoint: AgentEndpoint
) -> None:
    write_rows(tmp_path / "p.jsonl", {"id": "p0", "prompt": prompt("t0", 2)})
    done = run(tmp_path, **options(endpoint, by_acp()))
    assert done.returncode == 0, done.stderr
    (record,) = sorted_records(tmp_path)
    assert (record["status"], record["agent"]["exit_code"]) == ("completed", 0)
    results = [m["content"] for m in record["messages"] if m["role"] == "tool"]
    assert results == ["t0-1\n", "t0-1\nt0-2\n"]
    said = record["agent"]["stdout"].splitlines()
    command = "[execute] echo t0-{n} >> notes.txt && cat notes.txt"
    assert said == [
        "a line that is no message",
        command.format(n=1),
        command.format(n=2),
        "Finished t0 in 2 steps.",
    ]


@needs_bwrap
def test_what_the_agents_file_rejects_it_may_not_do(
    tmp_path: Path, endpoint: AgentEndpoint
) -> None:
    rows = [{"id": f"p{n}", "prompt": prompt(f"t{n}", 1)} for n in range(2)]
    write_rows(tmp_path / "p.jsonl", *rows)
    done = run(tmp_path, **options(endpoint, by_acp(rejects=["execute", "fetch"])))
    assert done.returncode == 0, done.stderr
    for record in sorted_records(tmp_path):
        results = [m["content"] for m in record["messages"] if m["role"] == "tool"]
        assert results == ["the user does not permit it"]
        assert "[rejected] echo" in record["agent"]["stdout"]


@pytest.mark.slow
@needs_bwrap
def test_an_agent_of_the_client_protocol_is_killed_and_pays_once(
    tmp_path: Path, endpoint: AgentEndpoint
) -> None:
    write_rows(tmp_path / "p.jsonl", {"id": "p0", "prompt": prompt("t0", 4)})
    endpoint.answers = 3
    given = options(endpoint, by_acp("messages"))
    with started(tmp_path, **given):
        wait_until(lambda: len(endpoint.exchanges) == 3 and endpoint.waiting == 1)
    endpoint.answer_all()
    done = run(tmp_path, **given)
    assert done.returncode == 0, done.stderr
    (record,) = sorted_records(tmp_path)
    # The one that was in flight is paid twice.
    assert len(record["turns"]) == 5
    assert len(endpoint.exchanges) <= 6
    assert record["agent"]["starts"] == 2
    assert record.get("diverged_at") is None


@pytest.mark.slow
@needs_bwrap
@pytest.mark.parametrize(
    ("agent", "reason"),
    [
        ("head -n 1 > /dev/null", "initialize: the agent ended without an answer"),
        ("exit 3", "ended with exit code 3"),
        (
            'read line; echo \'{"jsonrpc": "2.0", "id": 1, "error": {"code": 7}}\'',
            'initialize: {"code": 7}',
        ),
    ],
)
def test_an_agent_that_does_not_speak_the_client_protocol_fails_with_a_reason(
    tmp_path: Path, endpoint: AgentEndpoint, agent: str, reason: str
) -> None:
    write_rows(tmp_path / "p.jsonl", {"id": "p0", "prompt": prompt("t0", 1)})
    given = by_acp() | {"command": ["sh", "-c", agent]}
    done = run(tmp_path, **options(endpoint, given, max_attempts=1))
    assert done.returncode == 1
    (failure,) = lines(tmp_path / "trajectories" / "r" / "failures.jsonl")
    assert reason in failure["message"]


@needs_bwrap
@pytest.mark.parametrize(
    ("dialect", "flags"),
    [
        pytest.param("messages", ("--stream",), id="messages-stream"),
        pytest.param("chat", (), id="chat"),
        pytest.param("responses", ("--stream",), id="responses-stream", marks=pytest.mark.slow),
        pytest.param("messages", (), id="messages", marks=pytest.mark.slow),
        pytest.param("chat", ("--stream",), id="chat-stream", marks=pytest.mark.slow),
        pytest.param("responses", (), id="responses", marks=pytest.mark.slow),
    ],
)
def test_a_record_is_what_the_wire_had(
    tmp_path: Path, endpoint: AgentEndpoint, dialect: str, flags: tuple[str, ...]
) -> None:
    """The endpoint's log decides: every call, its reply and its results, in order."""
    write_rows(
        tmp_path / "p.jsonl", *({"id": f"p{n}", "prompt": prompt(f"t{n}", n)} for n in (1, 3))
    )
    done = run(tmp_path, **options(endpoint, scripted_agent(dialect, *flags)))
    assert done.returncode == 0, done.stderr
    for record, steps in zip(sorted_records(tmp_path), (1, 3), strict=True):
        exchanges = read_exchanges(endpoint, f"t{steps}")
        assert record["status"] == "completed"
        assert len(exchanges) == len(record["turns"]) == steps + 1
        own = [message for message in record["messages"] if message["role"] == "assistant"]
        sent = [_reply(one) for one in exchanges]
        assert [(m["content"], m.get("reasoning"), _calls(m)) for m in own] == sent
        results = [m["content"] for m in record["messages"] if m["role"] == "tool"]
        assert results == _results(exchanges[-1].request)
        assert record["messages"][0]["role"] == "system"
        assert [tool["function"]["name"] for tool in record["tools"]] == ["bash"]
        assert (record["set_aside"], record["diverged_at"]) == ([], None)
        agent = record["agent"]
        assert (agent["name"], agent["exit_code"], agent["starts"]) == ("custom", 0, 1)
        assert agent["stdout"] == f"Finished t{steps} in {steps} steps.\n"
    assert len(lines(tmp_path / "trajectories" / "r.jsonl")) == 2
    nothing_is_left(tmp_path)


def _calls(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        (call["id"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]


def _reply(exchange: Exchange) -> tuple[str, str | None, list[tuple[str, Any]]]:
    """Text, reasoning and calls of a reply, read here from its body."""
    body = exchange.reply
    if "choices" in body:
        message = body["choices"][0]["message"]
        return message["content"] or "", message.get("reasoning_content"), _calls(message)
    text, thought, calls = "", None, []
    for block in body.get("content") or body["output"]:
        match block["type"]:
            case "text":
                text += block["text"]
            case "thinking":
                thought = block["thinking"]
            case "tool_use":
                calls.append((block["id"], block["input"]))
            case "message":
                text = block["content"][0]["text"]
            case "reasoning":
                thought = block["summary"][0]["text"]
            case "function_call":
                calls.append((block["call_id"], json.loads(block["arguments"])))
    return text, thought, calls


def _results(request: dict[str, Any]) -> list[str]:
    collected = []
    for message in request.get("messages") or request["input"]:
        if message.get("role") == "tool":
            collected.append(message["content"])
        elif message.get("type") == "function_call_output":
            collected.append(message["output"])
        elif isinstance(message.get("content"), list):
            collected += [b["content"] for b in message["content"] if b["type"] == "tool_result"]
    return collected


@pytest.mark.slow
@BOTH
def test_an_agent_runs_in_each_sandbox(name: str, tmp_path: Path, endpoint: AgentEndpoint) -> None:
    """Its HOME is not its workspace, and both are as empty as at first."""
    write_rows(tmp_path / "p.jsonl", {"id": "p", "prompt": prompt("t", 1)})
    agent = shell(f'ls -A . "$HOME" | grep -v : ; {PYTHON} {SCRIPT} chat "$1" && touch "$HOME/x"')
    done = run(tmp_path, **options(endpoint, agent, sandbox=name))
    assert done.returncode == 0, done.stderr
    (record,) = sorted_records(tmp_path)
    assert record["status"] == "completed"
    assert record["agent"]["stdout"].split("\n") == ["", "Finished t in 1 steps.", ""]
    nothing_is_left(tmp_path)


@needs_bwrap
@pytest.mark.parametrize("victim", [pytest.param("group", marks=pytest.mark.slow), "worker"])
def test_calls_before_a_kill_are_not_paid_again(
    tmp_path: Path, endpoint: AgentEndpoint, victim: str
) -> None:
    """Each start begins at the first workspace; equal calls get the recorded replies."""
    write_rows(tmp_path / "p.jsonl", {"id": "p", "prompt": prompt("t", 5)})
    given = options(endpoint, scripted_agent("messages", "--stream"))
    endpoint.answers = 3
    with started(tmp_path, **given) as process:
        wait_until(lambda: len(endpoint.exchanges) == 3 and endpoint.waiting == 1)
        paid = [one.reply["id"] for one in endpoint.exchanges]
        if victim == "group":
            kill_session(process.pid)
            process.wait()
        else:
            os.kill(workers_of(process.pid)[0], signal.SIGKILL)
            wait_until(lambda: endpoint.waiting > 1)
            endpoint.answer_all()
            assert process.wait(timeout=PATIENCE_S) == 0
    endpoint.answer_all()
    assert run(tmp_path, **given).returncode == 0
    (record,) = sorted_records(tmp_path)
    assert record["status"] == "completed"
    assert [turn["response_id"] for turn in record["turns"]][:3] == paid
    assert record["api_calls"] == len(record["turns"]) == 6
    assert (record["set_aside"], record["diverged_at"]) == ([], None)
    assert record["agent"]["starts"] == 2
    assert len(set(endpoint.sessions)) == 1, "one id over both starts"
    assert endpoint.sessions[0]
    nothing_is_left(tmp_path)


@pytest.mark.slow
@needs_bwrap
def test_an_agent_that_diverges_says_where(tmp_path: Path, endpoint: AgentEndpoint) -> None:
    """The clock differs in each start, so the second call is another; its first reply is kept."""
    write_rows(tmp_path / "p.jsonl", {"id": "p", "prompt": prompt("t", 3, "clock")})
    given = options(endpoint, scripted_agent())
    endpoint.answers = 3
    with started(tmp_path, **given) as process:
        wait_until(lambda: len(endpoint.exchanges) == 3 and endpoint.waiting == 1)
        kill_session(process.pid)
        process.wait()
    endpoint.answer_all()
    assert run(tmp_path, **given).returncode == 0
    (record,) = sorted_records(tmp_path)
    assert record["status"] == "completed"
    assert record["diverged_at"] == 1
    assert [one["number"] for one in record["set_aside"]] == [1, 2]
    assert len(record["turns"]) == 4
    assert record["api_calls"] == 6
    costs = [one["cost_usd"] for one in (*record["turns"], *record["set_aside"])]
    assert record["cost_usd"] == pytest.approx(sum(costs))


_ASK = """
import json, os, sys, urllib.request
model, said = sys.argv[1:]
body = {"model": model, "messages": [{"role": "user", "content": said}]}
key = os.environ["OPENAI_API_KEY"]
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers))
"""
"""Makes one call without tools."""


@pytest.mark.slow
@needs_bwrap
@pytest.mark.parametrize("then", ["kill -9 $$", "python3 ~/ask.py unknown 'Now work.'"])
def test_an_agent_that_ends_after_its_call_for_a_title_has_done_nothing(
    tmp_path: Path, endpoint: AgentEndpoint, then: str
) -> None:
    """By a signal, or because its next call is refused."""
    write_rows(tmp_path / "p.jsonl", {"id": "p", "prompt": prompt("t", 1)})
    agent = shell(f'python3 ~/ask.py m "$1" && {then}', files={"ask.py": _ASK})
    done = run(tmp_path, **options(endpoint, agent, max_attempts=1))
    assert done.returncode == 1
    (failure,) = lines(tmp_path / "trajectories" / "r" / "failures.jsonl")
    assert (failure["class"], len(endpoint.exchanges)) == ("agent_failed", 1)


@pytest.mark.slow
@needs_bwrap
@pytest.mark.parametrize(
    ("then", "is_done"),
    [
        ("kill -9 $$", False),
        ("kill -11 $$", True),
        ("python3 ~/ask.py unknown 'Go on.'", False),
        ("python3 ~/ask.py unknown 'A title?' || true", True),
    ],
)
def test_an_agent_that_could_not_go_on_after_a_text_was_not_done(
    tmp_path: Path, endpoint: AgentEndpoint, then: str, is_done: bool
) -> None:
    """The text can be the summary of a compaction. One that crashes at its end was done."""
    write_rows(tmp_path / "p.jsonl", {"id": "p", "prompt": prompt("t", 0)})
    tools = [{"type": "function", "function": {"name": "x", "parameters": {"type": "object"}}}]
    with_tools = _ASK.replace("key =", f"body['tools'] = {tools}\nkey =")
    agent = shell(f'python3 ~/ask.py m "$1" && {then}', files={"ask.py": with_tools})
    done = run(tmp_path, **options(endpoint, agent, max_attempts=1))
    assert len(endpoint.exchanges) == 1
    (record,) = lines(tmp_path / "trajectories" / "r" / "records.jsonl")
    assert record["status"] == ("completed" if is_done else "failed")
    assert done.returncode == (0 if is_done else 1)


@pytest.mark.slow
@needs_bwrap
def test_a_killed_agent_is_a_failed_attempt_and_the_next_continues(
    tmp_path: Path, endpoint: AgentEndpoint
) -> None:
    write_rows(tmp_path / "p.jsonl", {"id": "p", "prompt": prompt("t", 3)})
    given = options(endpoint, scripted_agent())
    endpoint.answers = 2
    with started(tmp_path, **given) as process:
        wait_until(lambda: endpoint.waiting == 1 and len(endpoint.exchanges) == 2)
        os.kill(_agent_of(process.pid), signal.SIGKILL)
        endpoint.answer_all()
        assert process.wait(timeout=PATIENCE_S) == 1
    (failure,) = lines(tmp_path / "trajectories" / "r" / "failures.jsonl")
    assert failure["class"] == "agent_failed"
    assert "ended with exit code 137 before a final answer" in failure["message"]
    totals = json.loads((tmp_path / "trajectories/r/summary.json").read_text())
    assert (totals["failed"], totals["turns"], totals["tokens_unknown"]) == (1, 3, 1)
    assert totals["cost_usd"] == totals["spent_usd"] > 0
    assert (
        "Task p ended as failed after 3 turns" in (tmp_path / "trajectories/r/run.log").read_text()
    )
    assert run(tmp_path, **given).returncode == 0
    (record,) = sorted_records(tmp_path)
    assert record["status"] == "completed"
    # The call in flight was paid for, so it was recorded after the agent's end.
    assert (len(endpoint.exchanges), record["api_calls"]) == (4, 4)


def _agent_of(leader: int) -> int:
    """The process of the agent below a run."""
    for pid, _ in descendants(leader):
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(SCRIPT).encode() in arguments:
            return pid
    raise AssertionError("no agent is running")


@pytest.mark.slow
@needs_bwrap
def test_ctrl_c_stops_agents_at_once_and_the_same_command_continues(
    tmp_path: Path, endpoint: AgentEndpoint
) -> None:
    write_rows(tmp_path / "p.jsonl", {"id": "p", "prompt": prompt("t", 1)})
    agent = shell(f'{PYTHON} {SCRIPT} chat "$1"; [ -e /run/go ] || exec sleep 600')
    given = options(endpoint, agent, grace_s=300)
    with started(tmp_path, **given) as process:
        wait_until(lambda: len(endpoint.exchanges) == 2)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(timeout=PATIENCE_S) == 130
    assert not records_or_none(tmp_path)
    assert run(tmp_path, **(given | {"max_conversation_s": 5})).returncode in (0, 2)


def records_or_none(tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "trajectories" / "r" / "records.jsonl"
    return lines(path) if path.exists() else []


def one_record(tmp_path: Path, endpoint: AgentEndpoint, agent: dict[str, Any], **more: Any) -> Any:
    write_rows(tmp_path / "p.jsonl", {"id": "p", "prompt": prompt("t", 3)})
    run(tmp_path, **options(endpoint, agent, max_attempts=1, **more))
    (record,) = sorted_records(tmp_path)
    return record


LIMITS: dict[str, tuple[dict[str, Any], str, str, int]] = {
    "calls": ({"max_turns": 2}, "max_turns", "all of its 2 model calls", 2),
    "dollars": ({"max_cost_usd": 0.0001}, "budget", "are spent", 1),
    "tokens": ({"max_total_tokens": 100}, "budget", "tokens are used", 1),
}


@pytest.mark.slow
@needs_bwrap
@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_ends_the_agent(tmp_path: Path, endpoint: AgentEndpoint, limit: str) -> None:
    given, status, message, calls = LIMITS[limit]
    record = one_record(tmp_path, endpoint, scripted_agent(), **given)
    assert record["status"] == status
    assert message in record["status_reason"]
    assert "HTTP 400" in record["agent"]["stderr"]
    assert len(endpoint.exchanges) == record["api_calls"] == calls


@pytest.mark.slow
@needs_bwrap
def test_a_conversation_has_so_many_seconds(tmp_path: Path, endpoint: AgentEndpoint) -> None:
    agent = shell(f'{PYTHON} {SCRIPT} chat "$1"; exec sleep 600')
    record = one_record(tmp_path, endpoint, agent, max_conversation_s=3)
    assert record["status"] == "time_limit"
    assert record["agent"]["timed_out"]
    assert record["api_calls"] == 4


@pytest.mark.slow
@needs_bwrap
def test_an_agent_that_fills_its_workspace_has_failed(
    tmp_path: Path, endpoint: AgentEndpoint
) -> None:
    """Also after a final answer: it was not done."""
    agent = shell(f'{PYTHON} {SCRIPT} chat "$1"; head -c 60M /dev/zero > big; exec sleep 600')
    record = one_record(tmp_path, endpoint, agent, workspace_mb=20)
    assert record["status"] == "failed"
    message = "was ended because its workspace is over --workspace_mb: it holds "
    assert message in record["error"]["message"]
    assert record["api_calls"] == 4


FAILURES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "exit code": (
        lambda: shell("echo no luck >&2; exit 3"),
        "exit code 3 before its first model call: no luck",
    ),
    "exit 0 without an answer": (
        lambda: shell("echo fine"),
        "exit code 0 before its first model call: fine",
    ),
    "unknown model": (
        lambda: scripted_agent(env={"MODEL": "other"}),
        "asks for model 'other', which this run does not have",
    ),
    "unknown model, and only the status is printed": (
        lambda: posting("chat/completions", {"model": "other", "messages": []}),
        "the gateway refused a request of it: the agent asks for model 'other', which this run "
        "does not have; add it to `aliases`",
    ),
    "another API": (
        lambda: posting("messages", {"model": "m", "messages": []}),
        "POST /v1/messages: `speaks` of the agent does not name anthropic_messages",
    ),
    "no model call": (
        lambda: posting("completions/chat", {}),
        "refused a request of it: POST /v1/completions/chat: the gateway answers model calls only",
    ),
    "a file that its sandbox does not show": (
        lambda: scripted_agent(programs=[]),
        f"its sandbox does not show {SCRIPT}: name the whole path in `command`, and in `programs`",
    ),
    "a program by a relative path": (
        lambda: scripted_agent(command=[PYTHON, SCRIPT.name, "chat", "{prompt}"]),
        f"it starts in a workspace of its own: name the whole path {SCRIPT} in `command`",
    ),
}


@pytest.mark.slow
@needs_bwrap
@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_is_a_record_with_a_reason(
    tmp_path: Path, endpoint: AgentEndpoint, case: str
) -> None:
    agent, message = FAILURES[case]
    record = one_record(tmp_path, endpoint, agent())
    assert record["status"] == "failed"
    assert record["error"]["class"] == "agent_failed"
    assert message in record["error"]["message"]


@pytest.mark.slow
@needs_bwrap
def test_a_check_judges_what_the_agent_left(tmp_path: Path, endpoint: AgentEndpoint) -> None:
    """And `files` and `setup` are there for every start."""
    row = {
        "id": "p",
        "prompt": prompt("t", 2),
        "files": {"given.txt": "x"},
        "setup": "cp given.txt copied.txt",
        "check": "test -e copied.txt && test $(wc -l < notes.txt) = 2",
    }
    write_rows(tmp_path / "p.jsonl", row)
    assert run(tmp_path, "--row_setup", **options(endpoint, scripted_agent())).returncode == 0
    (record,) = sorted_records(tmp_path)
    assert record["check"]["passed"]


@needs_bwrap
def test_no_key_is_in_the_sandbox(
    tmp_path: Path, endpoint: AgentEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The endpoint gets the run's key; whatever the agent can read does not hold it."""
    monkeypatch.setenv("MY_KEY", "the-secret-key")
    look = "cat /proc/*/environ /proc/*/cmdline /run/gateway/* 2>/dev/null; env; set"
    agent = shell(f'{look}; {PYTHON} {SCRIPT} chat "$1"')
    record = one_record(tmp_path, endpoint, agent, key_env="MY_KEY")
    assert record["status"] == "completed"
    assert {one.key for one in endpoint.exchanges} == {"the-secret-key"}
    run_dir = tmp_path / "trajectories"
    texts = [path.read_bytes() for path in run_dir.rglob("*") if path.is_file()]
    assert not [text for text in texts if b"the-secret-key" in text]
    assert "OPENAI_API_KEY=placeholder" in record["agent"]["stdout"].replace("'", "")


@pytest.mark.slow
@needs_bwrap
def test_a_row_brings_its_own_agent(tmp_path: Path, endpoint: AgentEndpoint) -> None:
    own = {
        "command": [
            "sh",
            "-c",
            f"echo own; {shlex.join([PYTHON, str(SCRIPT)])} chat '{{prompt}}'",
        ]
    }
    write_rows(
        tmp_path / "p.jsonl",
        {"id": "a", "prompt": prompt("t1", 1)},
        {"id": "b", "prompt": prompt("t2", 1), "agent": own},
    )
    assert run(tmp_path, **options(endpoint, scripted_agent())).returncode == 0
    first, second = sorted_records(tmp_path)
    assert second["agent"]["stdout"] == "own\nFinished t2 in 1 steps.\n"
    assert first["agent"]["command"] != second["agent"]["command"]


@pytest.mark.slow
@needs_bwrap
def test_all_commands_read_a_run_of_agents(tmp_path: Path, endpoint: AgentEndpoint) -> None:
    write_rows(
        tmp_path / "p.jsonl", *({"id": f"p{n}", "prompt": prompt(f"t{n}", n)} for n in (1, 2))
    )
    given = options(endpoint, scripted_agent())
    plan = run(tmp_path, "--dry_run", **given)
    assert plan.returncode == 0, plan.stderr
    assert "agent      custom 3." in plan.stdout
    assert "first      p1, the command of custom:" in plan.stdout
    assert run(tmp_path, "estimate", pilot=2, **given).returncode == 0
    refused = run(tmp_path, "fork", "r", at_turn=1, n=2, run_name="b")
    assert refused.returncode == 2
    assert (
        "RUN was made with the agent 'custom', which cannot start in the middle" in refused.stderr
    )
    for arguments in (
        ("verify", "r"),
        ("status", "r"),
        ("stats", "r"),
        ("report", "r"),
        ("show", "r"),
        ("export", "r", "--format=openai,llamafactory,atif"),
        ("merge", "r", "--into=both"),
    ):
        done = run(tmp_path, *arguments)
        assert done.returncode == 0, (arguments, done.stderr)


@pytest.mark.slow
@needs_bwrap
@pytest.mark.parametrize("stream", [(), ("--stream",)], ids=["whole", "stream"])
def test_calls_that_continue_a_response_by_its_id_are_one_conversation(
    tmp_path: Path, endpoint: AgentEndpoint, stream: tuple[str, ...]
) -> None:
    """Killed in the middle, too: the replayed reply has the id that the endpoint knows."""
    write_rows(tmp_path / "p.jsonl", {"id": "p", "prompt": prompt("t", 3)})
    given = options(endpoint, scripted_agent("responses", "--by_id", *stream))
    endpoint.answers = 2
    with started(tmp_path, **given) as process:
        wait_until(lambda: endpoint.waiting == 1 and len(endpoint.exchanges) == 2)
        kill_session(process.pid)
    endpoint.answer_all()
    assert run(tmp_path, **given).returncode == 0
    (record,) = sorted_records(tmp_path)
    assert (record["status"], record["api_calls"], record["diverged_at"]) == ("completed", 4, None)
    assert [(one["name"], one["calls"]) for one in record["threads"]] == [("main", 4)]
    last = max(read_exchanges(endpoint, "t"), key=lambda one: len(one.request["input"]))
    assert [m["content"] for m in record["messages"] if m["role"] == "tool"] == _results(
        last.request
    )
    ids = [turn["response_id"] for turn in record["turns"]]
    assert {one.reply["id"] for one in read_exchanges(endpoint, "t")} >= {*ids}
    assert [message["role"] for message in record["messages"]].count("system") == 1
    (row,) = lines(tmp_path / "trajectories/r.jsonl")
    assert [turn["from"] for turn in row["conversations"]] == [
        "system",
        "human",
        *("gpt", "tool") * 3,
        "gpt",
    ]


@needs_bwrap
def test_an_endpoint_that_ignores_ids_gives_no_training_data(
    tmp_path: Path, endpoint: AgentEndpoint
) -> None:
    endpoint.keeps = False
    write_rows(tmp_path / "p.jsonl", {"id": "p", "prompt": prompt("t", 1)})
    run(tmp_path, **options(endpoint, scripted_agent("responses", "--by_id")))
    (record,) = sorted_records(tmp_path)
    assert [(one["name"], one["calls"]) for one in record["threads"]] == [("main", 2)]
    assert "has not read the earlier response" in (tmp_path / "trajectories/r/run.log").read_text()
    assert not lines(tmp_path / "trajectories/r.jsonl")
    (reject,) = lines(tmp_path / "trajectories/r/exports/rejects.jsonl")
    assert "earlier_response_unknown" in json.dumps(reject)
