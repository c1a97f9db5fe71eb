"""Servers that leave tool calls or thoughts in texts: said at once, and not paid for in silence."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.engine.parser_signs import ParserSigns, parser_signs
from batch_trajectories.engine.supervisor.parser_watch import ParserWatch
from tests.helpers.answering import JSON, answering
from tests.helpers.builders import assistant, call, chat_reply, record_of, result, user
from tests.helpers.running import lines, run, write_prompts

LEAK = "I look.\n<tool_call>\n<function=list_files>\n</function>\n</tool_call>"
OPTIONS: JSON = {
    "run_name": "r",
    "dataset_file": "p.jsonl",
    "model": "m",
    "key_env": "none",
    "num_workers": 1,
    "batch_size": 4,
    "enabled_toolsets": "file",
    "sandbox": "local",
}


def signs(**changes: Any) -> ParserSigns:
    plain = ParserSigns(
        endpoint="m at u", call=None, thought=False, reads_calls=False, reads_thoughts=False
    )
    return {**plain, **changes}  # type: ignore[typeddict-item] # the test's own keys


def watch(*ended: ParserSigns, **options: Any) -> tuple[list[str], str | None]:
    said: list[str] = []
    watching = ParserWatch(said.append, **{"may_stop": True, **options})
    for one in ended:
        watching.on_ended(one)
    return said, watching.problem()


CALL = signs(call="a tool call of Qwen3-Coder in the text: '<function=f>'. vLLM: remedy")
THOUGHT = signs(thought=True)


@pytest.mark.parametrize(
    ("one", "named", "proof", "keeps"),
    [
        (CALL, "vLLM: remedy", signs(reads_calls=True), "leaked_call"),
        (THOUGHT, "--reasoning-parser", signs(reads_thoughts=True), "marker_in_text"),
    ],
)
def test_what_is_said_and_when_a_run_stops(
    one: ParserSigns, named: str, proof: ParserSigns, keeps: str
) -> None:
    said, problem = watch(*[one] * 9, signs())
    assert (len(said), problem) == (1, None)
    assert named in said[0]
    assert "1 of 1 so far" in said[0]
    said, problem = watch(*[one] * 10, *[signs()] * 10)
    assert (len(said), "10 of 10 so far" in said[1]) == (2, True)
    assert problem is not None
    assert "10 of the first 20" in problem
    assert named in problem
    assert watch(*[one] * 10, *[signs()] * 11)[1] is None, "most ended otherwise"
    assert watch(proof, *[one] * 30)[1] is None, "the server reads some"
    assert watch(*[one] * 30, may_stop=False)[1] is None, "an agent's calls are its own"
    assert watch(*[one] * 30, accepts=(keeps,))[1] is None, "the user keeps such rows"
    other = {**proof, "endpoint": "other"}
    assert watch(other, *[one] * 10)[1] is not None, "another server proves nothing"  # type: ignore[arg-type]


def test_the_sums_are_repeated_at_the_end() -> None:
    said: list[str] = []
    watching = ParserWatch(said.append, may_stop=True)
    for one in (CALL, THOUGHT, signs()):
        watching.on_ended(one)
    watching.on_ended(None)
    said.clear()
    watching.tell_sums()
    assert [text.partition(": ")[2][:30] for text in said] == [
        "1 of 3 conversations ended as ",
        "1 of 3 conversations have </th",
    ]


def test_only_what_this_model_wrote_is_a_sign() -> None:
    of_row = assistant(LEAK.replace("list_files", "temp"), call(id="c0"), reasoning="Hm.")
    own = [user(), assistant("a</think>b"), user(), assistant("Ok.")]
    record = record_of(user(), of_row, result("9", id="c0"), *own)
    record |= {"api": "openai_chat", "model": "m", "endpoint": "u"}
    record["turns"] = record["turns"][:2]
    assert parser_signs(record) == signs(thought=True)
    assert parser_signs({**record, "api": "scripted"}) is None
    assert parser_signs({**record, "turns": []}) is None
    leaked = {**record, "turns": [{}] * 3, "messages": record["messages"]}
    found = parser_signs(leaked)
    assert found is not None
    assert found["reads_calls"]
    assert "--tool-call-parser qwen3_coder" in (found["call"] or "")


def reply(text: str, **more: Any) -> JSON:
    message = {"role": "assistant", "content": text, **more}
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
    return chat_reply(message, usage=usage, model="m")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "remedy", "reason"),
    [
        (LEAK, "--enable-auto-tool-choice --tool-call-parser qwen3_coder", "leaked_call"),
        ("So.\n</think>\n\nHello.", "--reasoning-parser NAME", "marker_in_text"),
    ],
)
def test_a_run_of_nothing_else_stops_and_the_rest_is_pending(
    tmp_path: Path, text: str, remedy: str, reason: str
) -> None:
    write_prompts(tmp_path / "p.jsonl", 60)
    with answering(lambda path, body: (200, reply(text))) as (url, asked):
        stopped = run(tmp_path, **OPTIONS, base_url=url)
    assert stopped.returncode == 4, stopped.stderr
    assert len(asked) < 60, "how many were in flight depends on the machine"
    assert "1 of 1 so far" in stopped.stderr
    assert "run the same command again" in stopped.stderr
    run_dir = tmp_path / "trajectories" / "r"
    assert stopped.stderr.count(remedy) >= 2
    assert remedy in (run_dir / "run.log").read_text()
    records = lines(run_dir / "records.jsonl")
    assert len(records) == len(asked)
    assert not lines(tmp_path / "trajectories" / "r.jsonl")
    rejected = lines(run_dir / "exports" / "rejects.jsonl")
    assert {one["reason"] for one in rejected} == {reason}
    if reason == "leaked_call":
        assert {record["status"] for record in records} == {"leaked_call"}
    with answering(lambda path, body: (200, reply("Hello."))) as (url, asked_again):
        done = run(tmp_path, **OPTIONS, base_url=url)
    assert done.returncode == 0, done.stderr
    assert len(asked_again) == 60 - len(records), "what is recorded is not paid again"


@pytest.mark.slow
def test_a_server_that_reads_most_calls_is_only_reported(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 30)
    turns = itertools.count()
    good = {"name": "list_files", "arguments": "{}"}
    called = [{"id": "c1", "type": "function", "function": good}]

    def answer(path: str, body: JSON) -> tuple[int, JSON]:
        if next(turns) == 0:
            return 200, reply("", tool_calls=called)
        return 200, reply("Done." if body["messages"][-1]["role"] == "tool" else LEAK)

    with answering(answer) as (url, _):
        done = run(tmp_path, **{**OPTIONS, "batch_size": 1}, base_url=url)
    assert done.returncode == 0, done.stderr
    assert "1 of " in done.stderr
    assert "29 of 30 conversations ended as leaked_call" in done.stderr
    assert len(lines(tmp_path / "trajectories" / "r.jsonl")) == 1
