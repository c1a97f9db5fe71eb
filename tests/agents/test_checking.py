"""Agents that conform pass the check; one fault each is found and named."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from agent.gateway.command_agent import CommandAgent
from batch_trajectories.agents.checking import check_agent
from batch_trajectories.basics.errors import ConfigError
from tests.helpers.running import ROOT
from tests.toolsets.test_sandbox import needs_bwrap

pytestmark = [pytest.mark.slow, needs_bwrap]

_AGENT = ROOT / "tests/fakes/scripted_agent.py"
_SPEAKS = {
    "chat": "openai_chat",
    "messages": "anthropic_messages",
    "responses": "openai_responses",
}
_OWN = """
import json, os, subprocess, sys, urllib.request
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
run = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
tools = [{"type": "function", "function": {"name": "run", "parameters": run}}]
messages = [{"role": "user", "content": f"[session {os.urandom(4).hex()}] " + sys.argv[1]}]
while True:
    body = json.dumps({"model": "m", "messages": messages, "tools": tools}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages.append(message)
    if not message.get("tool_calls"):
        break
    for call in message["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        call["id"] = PREFIX + call["id"]
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout})
"""
"""An agent that names its session to the model, and that may change the ids of calls."""


def check(*, timeout_s: float = 120.0, **fields: Any) -> dict[str, list[str]]:
    """The findings by level."""
    given: dict[str, Any] = {"speaks": "openai_chat", "version": [], "aliases": {"m": "x"}}
    agent = CommandAgent.model_validate(given | fields)
    found = check_agent(agent, sandbox="bwrap", final_command=None, timeout_s=timeout_s)
    levels = ("ok", "note", "problem")
    return {level: [one.text for one in found if one.level == level] for level in levels}


def write_agent(tmp_path: Path, *, prefix: str = "") -> dict[str, Any]:
    program = tmp_path / "own_agent.py"
    program.write_text(_OWN.replace("PREFIX", repr(prefix)))
    return {"command": [sys.executable, str(program), "{prompt}"], "programs": [program]}


@pytest.mark.parametrize("dialect", _SPEAKS)
@pytest.mark.parametrize("how", ["whole", "stream"])
def test_an_agent_that_conforms_has_no_problem(dialect: str, how: str) -> None:
    flags = ["--stream"] if how == "stream" else []
    command = [sys.executable, str(_AGENT), dialect, *flags, "{prompt}"]
    found = check(command=command, programs=[_AGENT], speaks=_SPEAKS[dialect])
    assert found["problem"] == found["note"] == []
    assert found["ok"] == [
        f"3 model calls were answered ({_SPEAKS[dialect]})",
        "2 commands ran, and their results came back",
        "its conversation ended as completed",
        "killed and started again: 2 paid calls were used again",
        "its row is training data",
    ]


def test_a_call_that_the_gateway_refuses_is_named_with_the_reason(tmp_path: Path) -> None:
    (problem,) = check(**write_agent(tmp_path), aliases={})["problem"]
    assert problem.startswith(
        "no model call of it was answered: the gateway refused a request of it: the agent asks for "
        "model 'm', which this run does not have; add it to `aliases` of the agent, or have it ask "
        "for `{model}`; "
    )


@pytest.mark.parametrize("case", ["without a call", "between two calls"])
def test_the_log_of_an_agent_that_does_not_end_is_kept_and_named(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    given = write_agent(tmp_path)
    program = Path(given["command"][1])
    wait = "print('now it waits', flush=True); __import__('time').sleep(600)\n"
    text = program.read_text()
    begin = "while True:\n" if case == "without a call" else "    messages.append(message)\n"
    indent = begin[: len(begin) - len(begin.lstrip())]
    program.write_text(text.replace(begin, f"{indent}{wait}{begin}"))
    problem = check(**given, timeout_s=5.0)["problem"][-1]
    assert "--timeout_s; what it printed, and the log of its run, are in " in problem
    log = Path(re.findall(r"are in (\S+\.log)", problem)[0])
    assert log.parent == tmp_path
    assert "[stdout]\nnow it waits\n" in log.read_text()
    assert "Its agent: custom" in log.read_text()


def test_paths_are_those_of_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check works in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    program = Path(write_agent(tmp_path)["command"][1])
    program.write_text(f"#!{sys.executable}\n" + program.read_text())
    program.chmod(0o755)
    command = [f"./{program.name}", "{prompt}"]
    found = check(command=command, programs=[program.name])
    assert "2 commands ran, and their results came back" in found["ok"]


def test_a_request_that_differs_after_a_crash_is_found_and_the_advice_mends_it(
    tmp_path: Path,
) -> None:
    found = check(**write_agent(tmp_path))
    assert "after a kill it makes another call than before" in found["problem"][0]
    (note,) = found["note"]
    assert note.startswith("messages.0.content was '[session ")
    advice = r"\[session [^\s\"'<>,;]+"
    assert advice.replace("\\", "\\\\").replace('\\\\"', '\\\\\\"') in note
    assert check(**write_agent(tmp_path), volatile={"texts": [advice]})["problem"] == []


def test_changed_ids_of_calls_are_named(tmp_path: Path) -> None:
    texts = [r"\[session \w+"]
    found = check(**write_agent(tmp_path, prefix="my_"), volatile={"texts": texts})
    assert found["note"] == ["it changes the ids of calls: replies are found by their texts"]
    assert found["problem"] == []


def test_an_agent_that_asks_elsewhere_is_told_where_the_gateway_is(tmp_path: Path) -> None:
    found = check(**write_agent(tmp_path), env={"OPENAI_BASE_URL": "http://127.0.0.1:9/v1"})
    (problem,) = found["problem"]
    assert "Connection refused" in problem
    assert "{gateway}" in problem


def test_an_agent_that_ends_by_a_call_needs_final_call(tmp_path: Path) -> None:
    mine = write_agent(tmp_path)
    program = tmp_path / "own_agent.py"
    ending = program.read_text().replace("[session {os.urandom(4).hex()}] ", "")
    ending = ending.replace('not message.get("tool_calls")', '"THE_END" in str(message)')
    program.write_text(ending.replace('message["tool_calls"]', 'message.get("tool_calls", ())'))
    # Without it, the agent asks again and again, up to the limit of a conversation.
    (problem,) = check(**mine)["problem"]
    assert "max_turns" in problem
    assert check(**mine, final_call="THE_END")["problem"] == []


def test_a_program_that_is_not_there_is_an_error_and_no_finding() -> None:
    with pytest.raises(ConfigError, match=r"^agent 'custom': the program 'no-such-agent' was not"):
        check(command=["no-such-agent", "{prompt}"])
