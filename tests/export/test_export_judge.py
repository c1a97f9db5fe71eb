"""The judge of answers: asked once per question, even after a crash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from batch_trajectories.export.dataset.build import Source
from batch_trajectories.export.dataset.checking import findings
from batch_trajectories.export.filters.verdicts import JudgeQuestions
from batch_trajectories.export.recipe import Judge, load_recipe
from batch_trajectories.runs.errors import ConfigError, EnvironmentStop, RunLocked
from testing.fake_endpoint import FakeEndpoint
from tests.cli.test_looking import on_terminal
from tests.export.test_hermes import assistant, record_of, user
from tests.exporting import exported, make_run, rejects, worked
from tests.running import command, lines, run, wait_until
from tests.stored import stored

EVEN_ARE_RIGHT = {"right": r"conversation [02468ace]", "wrong": r"conversation [13579bdf]"}
"""The fake endpoint names a hash of the question in its reply."""


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    with FakeEndpoint(latency_s=0.0, key="k-judge-secret") as started:
        yield started


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k-judge-secret")


def filters(endpoint: FakeEndpoint, **judge: Any) -> dict[str, Any]:
    asked = {"model": "j", "base_url": endpoint.openai_url, "key_env": "JUDGE_KEY"}
    given = {**asked, **EVEN_ARE_RIGHT, "call_attempts": 1, **judge}
    return {"exact_duplicates": False, "judge": given}


def answers(folder: Path, *texts: str) -> Source:
    return make_run(folder, *(record_of(user(), assistant(text)) for text in texts))


def verdicts(source: Source) -> list[dict[str, Any]]:
    return lines(source.run_dir / "verdicts.jsonl")


def test_each_question_is_asked_once_and_decides(tmp_path: Path, endpoint: FakeEndpoint) -> None:
    source = answers(tmp_path, *(f"Answer {n}" for n in range(12)), "Answer 0")
    given = filters(endpoint)
    first = rejects(source, formats="openai", filters=given)
    found = verdicts(source)
    assert [line["id"] for line in found if line["error"]] == []
    assert endpoint.journal()["requests"] == len(found) == 12, "the last one puts the first one's"
    wrong = {line["id"] for line in found if line["reply"].split()[4][0] in "13579bdf"}
    assert 0 < len(wrong) < 12
    assert {name for name in first if name != "t12"} == wrong
    assert set(first.values()) == {"judge"}
    assert ("t12" in first) == ("t0" in first)
    assert rejects(source, formats="openai", filters=given) == first
    assert endpoint.journal()["requests"] == 12
    assert list(findings(source, tmp_path / "out")) == []
    turned = {"right": EVEN_ARE_RIGHT["wrong"], "wrong": EVEN_ARE_RIGHT["right"]}
    other = rejects(source, formats="openai", filters=filters(endpoint, **turned))
    assert set(other).isdisjoint(first)
    assert endpoint.journal()["requests"] == 12, "how a reply is read is no part of the question"
    rejects(source, formats="openai", filters=filters(endpoint, prompt="Other: {answer}"))
    assert endpoint.journal()["requests"] == 24


def test_the_judge_sees_question_answer_and_expected_as_they_are(tmp_path: Path) -> None:
    """What a text holds is never taken for a place of the prompt."""
    record = worked("It is {expected}.", row={"expected": 4, "prompt": "{answer}?"})
    judge = Judge(model="openai:j", prompt="Q {question} A {answer} E {expected}")
    question = JudgeQuestions(judge).about(stored(record))
    assert question is not None
    assert question.text.startswith("Q ")
    assert question.text.endswith(" A It is {expected}. E 4")


def test_only_what_other_filters_keep_is_asked_about(
    tmp_path: Path, endpoint: FakeEndpoint
) -> None:
    early = record_of(user(), assistant("Hi."), status="length")
    forged = record_of(user(), assistant("a <tool_call> b"))
    source = make_run(tmp_path, early, forged, record_of(user(), assistant("Yes.")))
    exported(source, formats="openai", filters=filters(endpoint))
    assert [line["id"] for line in verdicts(source)] == ["t2"]


def test_failures_are_named_left_out_and_asked_again(
    tmp_path: Path, endpoint: FakeEndpoint
) -> None:
    source = answers(tmp_path, "Fine", "fault:http400", "fault:empty_text")
    given = filters(endpoint, prompt="{answer}", right="conversation", wrong="never said")
    directory, manifest = exported(source, formats="openai", filters=given)
    assert manifest["rejected_by_reason"] == {"judge_failed": 2}
    told = {line["id"]: line["detail"] for line in lines(directory / "rejects.jsonl")}
    assert "bad_request" in told["t1"]
    assert list(findings(source, directory)) == [], "a check asks nobody and finds the same"
    before = endpoint.journal()["requests"]
    exported(source, formats="openai", filters=given)
    failed = sum(line["reply"] is None for line in verdicts(source)[:3])
    assert endpoint.journal()["requests"] - before == failed


def test_a_reply_that_says_neither_is_a_failure_and_not_asked_again(
    tmp_path: Path, endpoint: FakeEndpoint
) -> None:
    source = answers(tmp_path, "One", "Two")
    for given in (filters(endpoint, right="Yes"), filters(endpoint, right=".", wrong=".")):
        found = rejects(source, formats="openai", filters=given)
        assert "judge_failed" in found.values()
    assert endpoint.journal()["requests"] == 2


@pytest.mark.parametrize("fault", ["http401", "http500"])
def test_an_endpoint_that_refuses_all_stops_the_export(tmp_path: Path, fault: str) -> None:
    source = answers(tmp_path, *(f"Answer {n}" for n in range(40)))
    with FakeEndpoint(latency_s=0.0, faults={fault: 1.0}) as endpoint:
        given = filters(endpoint, max_in_flight=4)
        with pytest.raises(EnvironmentStop, match=r"filters\.judge: "):
            exported(source, formats="openai", filters=given)
        assert endpoint.journal()["requests"] <= 8
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_calls_that_wait_for_the_same_endpoint_say_so_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = answers(tmp_path, *(f"Answer {n}" for n in range(8)))
    with FakeEndpoint(latency_s=0.0, faults={"http500": 1.0}) as endpoint:
        given = filters(endpoint, max_in_flight=8, call_attempts=2)
        with pytest.raises(EnvironmentStop):
            exported(source, formats="openai", filters=given)
    said = [line for line in capfd.readouterr().err.splitlines() if "attempt 1" in line]
    assert len(said) == 1
    assert said[0].startswith(f"filters.judge at {endpoint.openai_url}: overloaded: ")


def test_a_key_is_needed_where_something_is_to_be_asked(
    tmp_path: Path, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = answers(tmp_path, "A")
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match="JUDGE_KEY"):
        exported(source, formats="openai", filters=filters(endpoint))
    monkeypatch.setenv("JUDGE_KEY", "k-judge-secret")
    exported(source, formats="openai", filters=filters(endpoint))
    monkeypatch.delenv("JUDGE_KEY")
    _, manifest = exported(source, formats="openai", filters=filters(endpoint))
    assert manifest["tasks"] == 1


def test_the_key_is_in_no_file(tmp_path: Path, endpoint: FakeEndpoint) -> None:
    exported(answers(tmp_path, "A"), formats="openai", filters=filters(endpoint))
    held = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert held
    assert not any(b"k-judge-secret" in content for content in held)
    judge = {"model": "j", "base_url": "http://user:secret@127.0.0.1:1/v1"}
    with pytest.raises(ConfigError, match="should match pattern"):
        load_recipe(None, {"filters": {"judge": judge}})


def test_damage_is_named_and_a_torn_line_set_aside(tmp_path: Path, endpoint: FakeEndpoint) -> None:
    source = answers(tmp_path, "A", "B")
    path = source.run_dir / "verdicts.jsonl"
    exported(source, formats="openai", filters=filters(endpoint))
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:20])
    exported(source, formats="openai", filters=filters(endpoint))
    assert endpoint.journal()["requests"] == 3
    assert len(verdicts(source)) == 2
    assert (source.run_dir / "quarantine").is_dir()
    right = json.loads(first)
    damaged: list[Any] = [[], {**right, "key": []}, {**right, "reply": 5}, {**right, "reply": None}]
    for damage in damaged:
        path.write_bytes(json.dumps(damage).encode() + b"\n" + first)
        with pytest.raises(ConfigError, match=r"verdicts\.jsonl:1: not a verdict"):
            exported(source, formats="openai", filters=filters(endpoint))


def test_it_has_the_progress_line_of_runs(tmp_path: Path, endpoint: FakeEndpoint) -> None:
    source = answers(tmp_path, *(f"Answer {n}" for n in range(5)), "Answer 0")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"formats": "openai", "filters": filters(endpoint)}))
    argv = ("export", str(source.run_dir))
    shown = on_terminal(tmp_path, dict(os.environ), *argv, recipe=recipe)
    line = shown.replace("\r\n", "\n").split("judge j: 5")[0].rstrip("\n").rpartition("\r")[2]
    assert line.startswith("100%|██████████| 5/5 [")
    assert ", done 5, failed 0, running 0, " in line
    assert " calls/s, " in line
    assert "%|" not in on_terminal(tmp_path, dict(os.environ), *argv, recipe=recipe)


@pytest.mark.slow
def test_a_kill_between_verdicts_pays_no_question_twice(tmp_path: Path) -> None:
    """Only what was in flight when it came is asked again."""
    source = answers(tmp_path, *(f"Answer {n}" for n in range(40)))
    path = source.run_dir / "verdicts.jsonl"
    recipe = tmp_path / "recipe.yaml"
    with FakeEndpoint(latency_s=0.02, answers=0, key="k-judge-secret") as endpoint:
        given = filters(endpoint, max_in_flight=4)
        recipe.write_text(yaml.safe_dump({"formats": "openai", "filters": given}))
        argv = ("export", str(source.run_dir))
        for count in (6, 20):
            stored = path.read_bytes().count(b"\n") if path.exists() else 0
            endpoint.answer(endpoint.journal()["requests"] + count + 4 - stored)
            process = subprocess.Popen(command(*argv, recipe=recipe), cwd=tmp_path)
            try:
                wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") >= count)  # noqa: B023
                if count == 20:
                    with pytest.raises(RunLocked, match="another export"):
                        exported(source, formats="openai", filters=given)
            finally:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
        assert not (source.run_dir / "exports" / "dataset" / "manifest.json").exists()
        endpoint.answer(None)
        done = run(tmp_path, *argv, recipe=recipe)
        assert done.returncode == 0, done.stderr
        assert "asked, 0 failed" in done.stderr
        asked = endpoint.journal(full=True)["counts"]
    assert sum(one["asked"] - 1 for one in asked) <= 2 * 4
    assert len(asked) == 40
    keys = [line["key"] for line in verdicts(source)]
    assert len(keys) == len(set(keys)) == 40


def test_the_scripted_model_cannot_judge(tmp_path: Path) -> None:
    source = answers(tmp_path, "One")
    given = {"model": "scripted", "call_attempts": 1}
    with pytest.raises(ConfigError, match="'scripted' plays scripts of rows and judges nothing"):
        exported(source, formats="openai", filters={"judge": given})
    assert not (source.run_dir / "verdicts.jsonl").exists()
