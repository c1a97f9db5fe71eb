"""Real agents, killed at random moments and resumed: `python -m tests.real.agents --agents=codex`.

Each agent completes tasks against a model on loopback, while the run's process group, a worker or
an agent is killed, and streams are cut. The tasks read, write and edit files, keep lists, make
several calls at once and calls that fail, and start subagents; every fourth task shows a picture;
in every second one the context is full on the way, and agents that can do so go on with a summary.
At the end the records, the rows of every format (see `wire_rows`), and the token ids of agents that
speak chat completions are compared with the endpoint's own log. A reply that is in no record was on
its way to the agent when something was killed: no later request shows it. Agents must be on the
PATH; `own` is the loop of this project, with summaries and a subagent.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from batch_trajectories.basics.presets import presets
from tests.fakes.agent_endpoint import ALL, PICTURE, STEPS, AgentEndpoint, Exchange
from tests.helpers.agent_images import IMAGE, in_image
from tests.helpers.running import ROOT, lines, session_of, wait_until, workers_of, write_rows
from tests.helpers.wire_rows import Log, check_conversations, check_ids, check_segments
from toolsets.sandbox.inside.processes import descendants

_SECRET = "the-key-of-the-run"
_CHAT = "openai_chat"
_OWN = "own"
_SHOWS_PICTURES = (
    '"limit":',
    '"attachment": true, "modalities": {"input": ["text", "image"], "output": ["text"]}, "limit":',
)
"""What opencode has to be told of a model that sees them."""
_KILLS = ("group", "worker", "agent")
_SILENCE_S = 300.0
"""Without a call of any agent in so long, the check fails."""
_SPARE_STARTS = 3
_WITHOUT_TOOLS = ("aider",)
"""Agents that take edits from the texts of replies."""
_CUT_EVERY = 7
"""Of so many streams, one is cut after its first part."""
_CLOCK = "clock"
_OWN_REPLIES = {"qwen-code": (1, 2), "aider": (3,)}
"""With how many replies that no model wrote an agent begins a conversation, at once and later."""
_PICTURE_EVERY = 4
_CALL_ID = re.compile(r"call_\d+_[0-9a-f]{16}")
"""Of the endpoint; Gemini has none."""
_FORWARDER = re.compile(rb"python3[\d.]*\0-I\0-S\0-c")
"""In an image it is started by its version."""
_FULL_AT = 6
"""The step whose reply says that the context is full."""
COMPACTING = {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "150000", "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": "50"}
"""The environment in which agents go on with a summary at the sizes that the endpoint says."""
_OF_OWN = {
    "enabled_toolsets": "terminal,file",
    "summarize_over_messages": 8,
    "summarize_keep": 4,
    "subagents": json.dumps(
        [
            {
                "name": "agent",
                "description": "Works on a task.",
                "system_prompt": "Work on the task.",
                "enabled_toolsets": ["terminal"],
                "max_turns": 9,
            }
        ]
    ),
}


class Outcome(NamedTuple):
    """What became of one agent's tasks."""

    agent: str
    version: str
    tasks: int
    kills: int
    starts: int
    """Of agents, all together."""
    calls: int
    """Replies that the endpoint has sent."""
    recorded: int
    set_aside: int
    diverged: int
    """Tasks that made another call while recorded ones were left."""
    compacted: int
    """Conversations that went on with a summary."""
    lost: int
    """Replies that were on their way when something was killed."""
    learnt: int
    """Turns that rows of segments learn: each is a request of the log with its reply."""
    whole: int
    """Turns that rows of whole conversations learn: each is a reply of the log."""
    pictures: int
    """Conversations that hold one."""
    ids: int
    """Turns of the others that rows of token ids learn: each has prompt and ids of the log."""
    seconds: float


def run_agent(
    agent: str,
    *,
    tasks: int,
    kills: int,
    seed: int,
    at_once: int,
    clock: bool,
    keep: bool,
    is_in_image: bool,
) -> Outcome:
    """Run one agent's tasks to their ends, and check everything; raises `AssertionError`."""
    directory = Path(tempfile.mkdtemp(prefix=f"real-{agent}-"))
    began = time.monotonic()
    rng = random.Random(seed)
    rows = []
    for n in range(tasks):
        steps = STEPS if n % _PICTURE_EVERY == 1 else STEPS - 1
        work = f"steps=3 run={_CLOCK}" if clock else f"steps={steps} run={ALL}"
        full = "" if clock or n % 2 else f" full={_FULL_AT}"
        prompt = f"Work on this, please. [task{n:02} {work}{full}]"
        rows.append(
            {"id": f"p{n:02}", "prompt": prompt} | ({"image": IMAGE} if is_in_image else {})
        )
    write_rows(directory / "p.jsonl", *rows)
    with AgentEndpoint(
        reasoning="Let me think.",
        latency_s=0.2,
        event_s=0.02,
        log=directory.with_suffix(".log") if keep else None,
        cut_every=_CUT_EVERY,
        tokens="vllm",
    ) as endpoint:
        command = _command(agent, directory, endpoint, at_once, is_in_image)
        done, starts = 0, 0
        while True:
            starts += 1
            # Each start ends by a kill, but for one that completes and few with failed tasks.
            assert starts <= kills + _SPARE_STARTS, _output(directory)
            with (directory / "output.txt").open("ab") as output:
                process = subprocess.Popen(
                    command,
                    cwd=directory,
                    env=os.environ | {"THE_KEY": _SECRET},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            try:
                kinds = _KILLS[:-1] if agent == _OWN else _KILLS
                done = _disturb(process, endpoint, rng, done, kills, kinds)
            finally:
                was_killed = process.poll() is None
                if was_killed:
                    _end_group(process)
            if was_killed:
                continue
            # What was killed just before the end may still be ending.
            wait_until(lambda leader=process.pid: not session_of(leader))
            if process.returncode == 0:
                break
            if process.returncode not in (1, -signal.SIGKILL):
                raise AssertionError(_output(directory))
        outcome = _check(agent, directory, endpoint, tasks=tasks, kills=done, began=began)
    if not keep:
        shutil.rmtree(directory)
    return outcome


def _output(directory: Path) -> str:
    return (directory / "output.txt").read_text()[-2000:]


def _api_of(agent: str) -> str:
    return _CHAT if agent == _OWN else str(_preset(agent)["speaks"])


def _preset(agent: str) -> dict[str, Any]:
    described = presets("agents")[agent].read_text().replace(*_SHOWS_PICTURES)
    return dict(yaml.safe_load(described))


def _command(
    agent: str, directory: Path, endpoint: AgentEndpoint, at_once: int, is_in_image: bool
) -> list[str]:
    api = _api_of(agent)
    root = endpoint.url if api in ("anthropic_messages", "gemini") else f"{endpoint.url}/v1"
    given: dict[str, Any] = {"sandbox": "bwrap", **_OF_OWN}
    if agent != _OWN:
        preset = _preset(agent)
        preset["env"] = {**preset.get("env", {}), **COMPACTING}
        file = directory / f"{agent}.yaml"
        given = {"agent": file}
        if is_in_image:
            images = directory / "images"
            preset = in_image(preset, images)
            given |= {"workspace": "image", "images": images}
        file.write_text(yaml.safe_dump(preset))
    given |= {
        "dataset_file": "p.jsonl",
        "run_name": "r",
        "model": "test-model",
        "base_url": root,
        "api": api,
        "key_env": "THE_KEY",
        "num_workers": 2,
        "concurrency": at_once,
        "max_attempts": 50,
        "prices": json.dumps({"test-model": {"input": 1, "output": 2}}),
    }
    flags = [f"--{name}={value}" for name, value in given.items()]
    if api == _CHAT:
        flags.append("--token_ids")
    if is_in_image:
        flags.append("--row_setup")
    return [sys.executable, str(ROOT / "batch_runner.py"), *flags]


def _disturb(
    process: subprocess.Popen[bytes],
    endpoint: AgentEndpoint,
    rng: random.Random,
    done: int,
    kills: int,
    kinds: Sequence[str],
) -> int:
    """Kill at random moments until the run ends or its group has to be killed.

    Every second moment has a call in flight. Returns how many kills there have been.
    """
    while done < kills:
        moment = len(endpoint.exchanges) + rng.randint(1, 6)
        if not _wait(process, endpoint, moment):
            return done
        time.sleep(rng.uniform(0, 1))  # a moment of no meaning for anybody
        if process.poll() is not None:
            return done
        _look_for_the_key(process.pid)
        if done % 2:
            wait_until(lambda: endpoint.making or process.poll() is not None, timeout_s=_SILENCE_S)
        kind = kinds[done % len(kinds)]
        if kind == "group":
            return done + 1
        victims = workers_of(process.pid) if kind == "worker" else list(_agents_of(process.pid))
        if victims:
            _kill(rng.choice(victims))
            done += 1
    _wait(process, endpoint, sys.maxsize)
    return done


def _wait(process: subprocess.Popen[bytes], endpoint: AgentEndpoint, replies: int) -> bool:
    """Wait until there have been so many replies; False where the run has ended before."""
    seen, since = 0, time.monotonic()
    while (count := len(endpoint.exchanges)) < replies:
        if process.poll() is not None:
            return False
        if count > seen:
            seen, since = count, time.monotonic()
        assert time.monotonic() < since + _SILENCE_S, "no agent has made a call for a long time"
        time.sleep(0.01)
    return True


def _end_group(process: subprocess.Popen[bytes]) -> None:
    for pid in session_of(process.pid):
        _kill(pid)
    process.wait()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _agents_of(leader: int) -> Iterator[int]:
    """The processes in the sandboxes of a run that are children of our forwarder."""
    for pid, _ in descendants(leader):
        try:
            parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
            command_line = Path(f"/proc/{parent}/cmdline").read_bytes()
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if _FORWARDER.search(command_line) and b"ANTHROPIC_BASE_URL" in environment:
            yield pid


def _look_for_the_key(leader: int) -> None:
    """No process in a sandbox has the key, in its environment or its arguments."""
    for pid in _agents_of(leader):
        for file in ("environ", "cmdline"):
            try:
                text = Path(f"/proc/{pid}/{file}").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            assert _SECRET.encode() not in text, f"the key is in {file} of the agent"


def _check(
    agent: str, directory: Path, endpoint: AgentEndpoint, *, tasks: int, kills: int, began: float
) -> Outcome:
    run_dir = directory / "trajectories" / "r"
    records = lines(run_dir / "records.jsonl")
    assert Counter(record["id"] for record in records) == {f"p{n:02}": 1 for n in range(tasks)}
    assert {record["status"] for record in records} == {"completed"}
    sent = {_id_of(one.reply): one.reply for one in endpoint.exchanges}
    assert len(sent) == len(endpoint.exchanges)
    assert {one.key for one in endpoint.exchanges} == {_SECRET}
    seen = [_check_record(agent, record, sent) for record in records]
    recorded = sum(map(len, seen))
    _check_lost(endpoint.exchanges, {id for ids in seen for id in ids})
    set_aside = sum(len(record.get("set_aside", ())) for record in records)
    volatile = [] if agent == _OWN else _preset(agent).get("volatile", {}).get("texts", [])
    log = Log(endpoint.exchanges, volatile)
    learnt = check_segments(directory, log)
    assert learnt == recorded - set_aside, (learnt, recorded, set_aside)
    whole = check_conversations(directory, log)
    having = [record["id"] for record in records if _has_picture(record)]
    ids = 0
    if _api_of(agent) == _CHAT:
        ids = check_ids(directory, log)
        due = [record for record in records if record["id"] not in having]
        parts = [part for record in due for part in (record, *_inside(record))]
        turns = [turn for part in parts if part.get("name") != "summary" for turn in part["turns"]]
        assert ids == sum(not turn.get("inherited") for turn in turns), ids
    for path in directory.rglob("*"):
        if path.is_file():
            assert _SECRET.encode() not in path.read_bytes(), f"the key is in {path}"
    assert not list((run_dir / "workspaces").iterdir())
    agents = [record.get("agent") or {"version": "", "starts": 1} for record in records]
    return Outcome(
        agent=agent,
        version=agents[0]["version"],
        tasks=tasks,
        kills=kills,
        starts=sum(one["starts"] for one in agents),
        calls=len(sent),
        recorded=recorded,
        set_aside=set_aside,
        diverged=sum(record.get("diverged_at") is not None for record in records),
        compacted=sum(_is_compacted(record) for record in records),
        lost=len(sent) - recorded,
        learnt=learnt,
        whole=whole,
        pictures=len(having),
        ids=ids,
        seconds=round(time.monotonic() - began, 1),
    )


def _has_picture(record: dict[str, Any]) -> bool:
    shown = (one.get("provider_blocks") for one in record["messages"] if one["role"] != "assistant")
    return any(PICTURE in json.dumps(blocks) for blocks in shown)


def _check_lost(exchanges: Sequence[Exchange], recorded: set[str]) -> None:
    """What is not recorded has reached no agent: no request has the ids of its calls."""
    shown = {id for one in exchanges for id in _CALL_ID.findall(json.dumps(one.request))}
    for one in exchanges:
        if _id_of(one.reply) not in recorded:
            delivered = shown & {*_CALL_ID.findall(json.dumps(one.reply))}
            assert not delivered, f"call {one.number} was answered and not recorded: {delivered}"


def _check_record(agent: str, record: dict[str, Any], sent: dict[str, Any]) -> list[str]:
    """Compare a record with what the endpoint has sent; return the ids of its replies."""
    aside = record.get("set_aside", [])
    # What was paid for before a divergence is named as set aside, and only then.
    assert bool(aside) == (record.get("diverged_at") is not None), record["id"]
    parts = [record, *_inside(record)]
    turns = [turn for part in parts for turn in part["turns"] if not turn.get("inherited")]
    seen = [turn["response_id"] for turn in (*turns, *aside)]
    # Streams that were cut have said what they cost: they are paid for, and nobody got them.
    cut = [one["response_id"] for one in record["discarded"]]
    assert not set(cut) & set(seen), record["id"]
    assert len(set(seen)) == len(seen) == record["api_calls"] - len(cut), record["id"]
    assert set(seen) <= set(sent), record["id"]
    names = {one["name"] for one in record.get("threads", ())}
    is_compacted = _is_compacted(record)
    more = {"before compaction", "branch"} if is_compacted else set()
    assert names <= {"main", "subagent", "side", *more}, (record["id"], names)
    assert is_compacted or not record.get("rewritten"), record["id"]
    assert not record["messages"][-1]["content"].startswith("<summary>"), record["id"]
    for part in parts:
        replies = [message for message in part["messages"] if message["role"] == "assistant"]
        own = len(replies) - len(part["turns"])
        assert own in (0, *_OWN_REPLIES.get(agent, ())), record["id"]
        for turn, message in zip(part["turns"], replies[own:], strict=True):
            text, calls = _said(sent[turn["response_id"]])
            made = [
                (call["function"]["name"], json.loads(call["function"]["arguments"]))
                for call in message.get("tool_calls", ())
            ]
            assert (message["content"], made) == (text, calls), record["id"]
    if f"run={_CLOCK}" in record["row"]["prompt"]:
        return seen
    assert not aside, record["id"]
    task = record["prompt_id"].replace("p", "task")
    if agent in _WITHOUT_TOOLS:
        said = [m["content"] for m in record["messages"] if m["role"] == "assistant"]
        assert any(f"alpha of {task}" in text for text in said), (record["id"], said)
        return seen
    results = [m["content"] for part in parts for m in part["messages"] if m["role"] == "tool"]
    assert any(f"{task}-1" in result for result in results), (record["id"], results)
    assert any(f"{task}-3" in result for result in results), (record["id"], results)
    return seen


def _inside(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for inner in part.get("inner", ()):
        yield inner
        yield from _inside(inner)


def _is_compacted(record: dict[str, Any]) -> bool:
    names = [one["name"] for one in (*record.get("threads", ()), *record["inner"])]
    return any(name in ("before compaction", "summary") for name in names)


def _id_of(reply: dict[str, Any]) -> str:
    return str(reply.get("id") or reply["responseId"])


def _said(reply: dict[str, Any]) -> tuple[str, list[tuple[str, Any]]]:
    """The text and the calls of a reply, by a reader of its own."""
    text, calls = "", []
    if "choices" in reply:
        message = reply["choices"][0]["message"]
        made = [call["function"] for call in message.get("tool_calls", ())]
        return message["content"] or "", [(f["name"], json.loads(f["arguments"])) for f in made]
    if "candidates" in reply:
        for part in reply["candidates"][0]["content"]["parts"]:
            if "functionCall" in part:
                calls.append((part["functionCall"]["name"], part["functionCall"]["args"]))
            elif not part.get("thought"):
                text += part["text"]
        return text, calls
    for item in reply.get("content") or reply["output"]:
        match item["type"]:
            case "text":
                text += item["text"]
            case "tool_use":
                calls.append((item["name"], item["input"]))
            case "message":
                text += item["content"][0]["text"]
            case "function_call":
                calls.append((item["name"], json.loads(item["arguments"])))
    return text, calls


def main(argv: Sequence[str] | None = None) -> None:
    """Run the agents that were named, one after the other: a line each, and one of all."""
    parser = argparse.ArgumentParser(prog="real_agents", description=__doc__)
    every = ",".join(presets("agents"))
    parser.add_argument("--agents", default=every, help="presets, with commas")
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--at_once", type=int, default=2, help="conversations per worker, of two")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clock", action="store_true", help="every command prints the time")
    parser.add_argument(
        "--in_image", action="store_true", help="in an image of this machine's programs"
    )
    parser.add_argument("--keep", action="store_true", help="keep the run's files")
    given = parser.parse_args(argv)
    totals: Counter[str] = Counter()
    for agent in given.agents.split(","):
        outcome = run_agent(
            agent,
            tasks=given.tasks,
            kills=given.kills,
            seed=given.seed,
            at_once=given.at_once,
            clock=given.clock,
            keep=given.keep,
            is_in_image=given.in_image,
        )
        print(json.dumps(outcome._asdict()), flush=True)
        totals += Counter({k: v for k, v in outcome._asdict().items() if isinstance(v, int)})
    print(json.dumps({"agent": "all", **totals}), flush=True)


if __name__ == "__main__":
    main()
