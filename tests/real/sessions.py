"""Sessions of real agents are imported: `python -m tests.real.sessions --agents=codex`.

Each agent completes tasks against a model on loopback, as somebody uses it, without this project
around it: with subagents, pictures, several calls at once, calls that fail, cut streams and a
context that is full on the way; every second session is killed and continued. `import` reads the
session files, and each reply of the endpoint's log must be a turn of a record, with the results
that the agent sent for its calls, and each record what its last request showed. Agents must be on
the PATH.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from batch_trajectories.basics.presets import presets
from batch_trajectories.importing.importing import import_conversations
from batch_trajectories.records.reader import stored_records
from batch_trajectories.records.record_types import Record
from tests.fakes.agent_endpoint import ALL, STEPS, AgentEndpoint
from tests.helpers.running import wait_until
from tests.helpers.wire_forms import Atom, in_reply, in_request, in_row, steps, texts_of
from tests.real.agents import COMPACTING

_WORK = "/workspace"
_KILLED_AFTER = 3
"""Replies of a session, when it is killed: that many, and two more for each session before it."""
_STARTS = 5
_AT_ONCE = 2
"""Calls of an agent that can be in flight: of subagents."""
_ENDED = "aborted"
"""Codex shows this result directly after each call that a kill ended, rows after all of them."""
_UNSTORED = 4
"""Replies before a kill that an agent may not have stored: it writes a moment later."""


class Agent(NamedTuple):
    """How sessions of an agent are begun, continued and found."""

    begin: Sequence[str]
    go_on: Sequence[str]
    sessions: str


AGENTS = {
    "claude-code": Agent(
        ("claude", "-p", "--dangerously-skip-permissions"), ("--continue",), ".claude/projects"
    ),
    "codex": Agent(
        (
            "codex",
            "exec",
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
        ),
        ("resume", "--last", "-"),
        ".codex/sessions",
    ),
}


def run_agent(name: str, directory: Path, tasks: int) -> str:
    """Run and import the sessions of an agent; what was found. Raises `AssertionError`."""
    homes = []
    kills = []
    log = directory / "log.jsonl"
    rng = random.Random(name)
    with AgentEndpoint(
        reasoning="Let me think.", latency_s=0.05, event_s=0.01, cut_every=7, log=log
    ) as endpoint:
        for n in range(tasks):
            home = directory / f"home{n}"
            homes.append(home)
            work = directory / f"work{n}"
            work.mkdir(parents=True)
            full = " full=6" if n % 4 > 1 else ""
            prompt = f"Work on this, please. [task{n} steps={STEPS} run={ALL}{full}]"
            session = _started(name, home, work, endpoint, AGENTS[name].begin, prompt)
            if n % 2:
                enough = len(endpoint.exchanges) + _KILLED_AFTER + 2 * n
                wait_until(
                    lambda enough=enough, session=session: (
                        len(endpoint.exchanges) >= enough or session.poll() is not None
                    ),
                    timeout_s=300,
                )
                time.sleep(rng.uniform(0, 0.6))  # within a reply or a command, or between them
                session.kill()
                session.wait()
                kills.append(len(endpoint.exchanges))
            again = (*AGENTS[name].begin, *AGENTS[name].go_on)
            for _ in range(_STARTS):  # an agent may give up where a stream was cut
                if session.wait(timeout=300) == 0:
                    break
                session = _started(name, home, work, endpoint, again, "Go on.")
            assert session.wait(timeout=300) == 0, (directory / "output.txt").read_text()[-3000:]
    sources = [home / AGENTS[name].sessions for home in homes]
    end, config, _ = import_conversations(sources, "r", directory / "runs")
    assert not end.unreadable, end.unreadable
    assert end.completed == tasks, end
    return _compared(config.run_dir, endpoint, kills)


def _started(
    name: str,
    home: Path,
    work: Path,
    endpoint: AgentEndpoint,
    command: Sequence[str],
    prompt: str,
) -> subprocess.Popen[bytes]:
    """An agent in namespaces of its own, so that a kill ends all that it started."""
    preset = yaml.safe_load(presets("agents")[name].read_text())

    def filled(text: str) -> str:
        return text.replace("{model}", "test-model").replace("{gateway}", endpoint.url)

    for path, text in preset.get("files", {}).items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(filled(text))
    home.mkdir(exist_ok=True)
    given = {key: filled(value) for key, value in preset.get("env", {}).items()}
    keys = {"OPENAI_API_KEY": "k", "ANTHROPIC_API_KEY": "k", "ANTHROPIC_BASE_URL": endpoint.url}
    own = {"HOME": str(home), "IS_SANDBOX": "1"}
    sandbox = ["bwrap", "--die-with-parent", "--unshare-pid", "--proc", "/proc"]
    sandbox += ["--bind", str(work), _WORK]
    for path in Path("/").iterdir():
        if path.is_symlink():
            sandbox += ["--symlink", str(path.readlink()), str(path)]
        elif str(path) not in ("/proc", _WORK):
            sandbox += ["--dev-bind", str(path), str(path)]
    with (home.parent / "output.txt").open("ab") as output:
        process = subprocess.Popen(
            [*sandbox, "--chdir", _WORK, *command],
            env={**os.environ, **keys, **own, **given, **COMPACTING},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
        )
    assert process.stdin is not None
    process.stdin.write(prompt.encode())
    process.stdin.close()
    return process


def _compared(run_dir: Path, endpoint: AgentEndpoint, kills: Sequence[int]) -> str:
    """Compare records with the log, both ways; how many turns and results are the same.

    `kills`: how many replies there were at each.
    """
    sent = {one.reply["id"]: one.reply for one in endpoint.exchanges}
    asked = {one.reply["id"]: one.request for one in endpoint.exchanges}
    shown = {call: text for one in endpoint.exchanges for call, text in _results(one.request)}
    turns: list[str] = []
    results = inner = 0
    for record in stored_records(run_dir):
        inner += len(record.inner)
        quiet = (record.imported or {}).get("no_loss", [])
        cut: list[int] = []
        for part in (record, *record.inner):
            replies = [message for message in part.messages if message.role == "assistant"]
            own = len(replies) - len(part.turns)
            for turn, message in zip(part.turns, replies[own:], strict=True):
                id = str(turn.response_id)
                begun, _, words = str(message.content).rpartition("\n\n")
                is_joined = begun != "" and (part is not record or turn.turn in quiet)
                if part is record and (is_joined or id not in sent):
                    cut.append(turn.turn)
                if id not in sent:
                    continue
                calls = [
                    {"function": {"name": c.function.name, "arguments": c.function.arguments}}
                    for c in message.tool_calls or ()
                ]
                # Codex asks again where a stream was cut, and then shows the model both as one.
                content = words if is_joined else message.content
                row: dict[str, Any] = {"role": "assistant", "content": content}
                row |= {"reasoning_content": message.reasoning, "tool_calls": calls}
                assert _plain(in_row([row])) == _plain(in_reply(sent[id])), (id, row)
                turns.append(id)
            for message in part.messages:
                if message.role == "tool" and message.tool_call_id in shown:
                    row = {"role": "tool", "content": message.content}
                    said = ("said", shown[message.tool_call_id])
                    assert steps(in_row([row])) == steps([said]), message.tool_call_id
                    results += 1
        assert quiet == cut, "a stream that was cut is learnt"
        _check_context(record, asked[str(record.turns[-1].response_id)])
    assert len({*turns}) == len(turns)
    # A session does not hold the call that wrote a summary, nor what a kill cut off.
    unseen = sent.keys() - turns
    summaries = {id for id in unseen if "<summary>" in json.dumps(sent[id])}
    order = [*sent]
    cut_off = {id for n in kills for id in order[max(0, n - _UNSTORED) : n + _AT_ONCE]}
    lost = [sent[id] for id in unseen - summaries - cut_off]
    assert not lost, lost
    return (
        f"{len(turns)} of {len(sent)} replies are turns of records, {results} results as they were "
        f"sent, {inner} conversations inside; {len(summaries)} summaries and "
        f"{len(unseen - summaries)} replies just before a kill are in no session"
    )


def _check_context(record: Record, request: Mapping[str, Any]) -> None:
    """What a record shows before its last reply stood in that request, with all that a model said.

    Requests hold more of others: reminders and instructions, which are not those of the session.
    """
    before = msgspec.to_builtins([one for one in record.messages[:-1] if one.role != "system"])
    own, sent = (
        [(kind, value) for kind, value in atoms if kind != "thought" and value not in ("", _ENDED)]
        for atoms in (in_row(before), in_request(request))
    )
    found = json.loads(_plain(sent))
    groups = [[*group] for _, group in groupby(own, lambda atom: atom[0] == "said")]
    assert len(groups) == len(found), (groups, found)
    for group, step in zip(groups, found, strict=True):
        if group[0][0] == "said":
            lost = [text for _, text in group if "".join(text.split()) not in step[1]]
            assert not lost, (lost, step)
        else:
            ((_, words, _, calls),) = json.loads(_plain(group))
            # Claude Code sends parallel calls back in the order in which they ended.
            assert (words, _sorted(calls)) == (step[1], _sorted(step[3])), (group, step)


def _sorted(calls: Iterable[Any]) -> list[str]:
    return sorted(map(json.dumps, calls))


def _plain(atoms: Iterable[Atom]) -> str:
    """In one form, without what Claude Code changes in arguments before it stores them."""
    return steps(atoms).replace(f"cd {_WORK} && ", "").replace(', "replace_all": false', "")


def _results(request: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Ids of the calls whose results a request has, and their texts."""
    for message in request.get("messages", ()):
        for block in message["content"] if isinstance(message["content"], list) else ():
            if block["type"] == "tool_result":
                yield block["tool_use_id"], _text(block.get("content"))
    for item in request.get("input", ()):
        if item.get("type") in ("function_call_output", "custom_tool_call_output"):
            yield item["call_id"], _text(item["output"])


def _text(content: Any) -> str:
    return content if isinstance(content, str) else texts_of(content)


def main() -> None:
    """Run the agents that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", default=",".join(AGENTS))
    parser.add_argument("--tasks", type=int, default=4)
    asked = parser.parse_args()
    for name in asked.agents.split(","):
        directory = Path(tempfile.mkdtemp(prefix=f"sessions-{name}-"))
        print(f"{name}: {run_agent(name, directory, asked.tasks)}", flush=True)


if __name__ == "__main__":
    main()
