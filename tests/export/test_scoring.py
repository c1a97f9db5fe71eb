"""The command `score`: every record gets its score once, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import orjson
import pytest
import yaml

from batch_trajectories.engine.run_dir import write_run_json
from batch_trajectories.export.dataset.runs import Source
from batch_trajectories.records.files import add_checksum
from batch_trajectories.records.reader import stored_records
from batch_trajectories.scoring.asking import ask_all
from tests.cli.test_looking import on_terminal
from tests.helpers.answering import JSON, answering
from tests.helpers.exporting import call_record, make_run, rejects
from tests.helpers.running import PATIENCE_S, command, lines, run, wait_until

GRADERS = """
from pathlib import Path

def length(conversation, workspace, row):
    assert workspace is None
    if "fault" in row:
        raise ValueError(row["fault"])
    return len(conversation["messages"][-1]["content"])

def nothing(conversation, workspace, row):
    return {"calls": [0] * len(conversation["turns"])}

def of_answer(answer):
    return 1

def held(conversation, workspace, row):
    hold = Path("hold")
    while hold.exists() and int(conversation["id"][1:]) >= int(hold.read_text()):
        pass
    return 1
"""


def make(folder: Path, count: int, **changes: Any) -> Source:
    (folder / "graders.py").write_text(GRADERS)
    return make_run(folder, *(call_record(f"Answer {n}", **changes) for n in range(count)))


def scores(source: Source) -> list[dict[str, Any]]:
    return lines(source.run_dir / "scores.jsonl")


def counts(found: Any) -> tuple[int, int]:
    """How many scores a command gave, and how many failed."""
    words = found.stdout.splitlines()[0].rpartition(": ")[2].split()
    return int(words[0]), int(words[2])


class TestFunctions:
    def test_score_each_record_once_and_leave_records_as_they_are(self, tmp_path: Path) -> None:
        source = make(tmp_path, 12)
        before = (source.run_dir / "records.jsonl").read_bytes()
        done = run(tmp_path, "score", "r", reward="graders:length,graders:nothing", output_dir=".")
        assert done.returncode == 0, done.stderr
        assert counts(done) == (24, 0)
        found = scores(source)
        assert {line["id"] for line in found} == {f"t{n}" for n in range(12)}
        assert {line["source"] for line in found} == {"graders:length", "graders:nothing"}
        assert all(line["version"] and line["at"] for line in found)
        again = run(tmp_path, "score", "r", reward="graders:length", output_dir=".")
        assert counts(again) == (0, 0)
        assert (source.run_dir / "records.jsonl").read_bytes() == before
        first = next(stored_records(source.run_dir))
        given = {score.source: score for score in first.scores or ()}
        assert given["graders:length"].rewards == {"length": len("Answer 0")}
        assert given["graders:nothing"].turn_rewards == {"calls": [0, 0]}

    def test_that_fail_are_repeated_and_others_are_not(self, tmp_path: Path) -> None:
        (tmp_path / "graders.py").write_text(GRADERS)
        source = make_run(tmp_path, call_record(), call_record(), prompts=[{"fault": "x"}, {}])
        done = run(tmp_path, "score", "r", reward="graders:length", output_dir=".")
        assert (done.returncode, counts(done)) == (1, (2, 1))
        assert "\n          1  graders:length: ValueError: x (graders.py:7)\n" in done.stdout
        assert done.stderr == "", "failures are told once, grouped"
        output = run(tmp_path, "stats", "r", output_dir=".").stdout
        assert (
            "1 score failed; `show RUN ID` has the reason of each\n          1  graders:" in output
        )
        (failed,) = [line for line in scores(source) if line["error"]]
        assert (failed["id"], failed["rewards"]) == ("t0", None)
        assert failed["error"] == "ValueError: x (graders.py:7)"
        again = run(tmp_path, "score", "r", reward="graders:length", output_dir=".")
        assert (again.returncode, counts(again)) == (1, (1, 1))

    def test_that_fail_say_why_as_whole_texts(self, tmp_path: Path) -> None:
        """The file has the whole reason, a screen an excerpt that counts what it leaves out."""
        reason = f"{'expected ' * 400}'{'y' * 30}'"
        (tmp_path / "graders.py").write_text(GRADERS)
        prompts = [{"fault": reason}, {"fault": "no 'a'"}, {"fault": "no 'b'"}]
        make_run(tmp_path, *[call_record()] * 3, prompts=prompts)
        done = run(tmp_path, "score", "r", reward="graders:length", output_dir=".")
        whole = f"ValueError: {reason} (graders.py:7)"
        assert whole in [line["error"] for line in lines(tmp_path / "r" / "scores.jsonl")]
        output = run(tmp_path, "stats", "r", output_dir=".").stdout
        for screen in (done.stdout, output):
            assert "…" not in screen.partition("failed")[2]
            found = re.search(r"\n +1  (graders:length: .*)\n", screen)
            assert found is not None
            cut = re.fullmatch(
                r"(.*) \[\.\.\. ([0-9,]+) characters left out \.\.\.\] (.*)", found[1]
            )
            assert cut is not None
            told = f"graders:length: {whole}"
            left_out = len(told) - len(cut[1]) - len(cut[3])
            assert (told.startswith(cut[1]), told.endswith(cut[3])) == (True, True)
            assert int(cut[2].replace(",", "")) == left_out
            assert (
                "\n          2  graders:length: ValueError: no 'a' (graders.py:7), and similar\n"
                in screen
            )

    def test_that_changed_score_again(self, tmp_path: Path) -> None:
        source = make(tmp_path, 2)
        run(tmp_path, "score", "r", reward="graders:length", output_dir=".")
        (tmp_path / "graders.py").write_text(GRADERS.replace("[-1]", "[0]"))
        done = run(tmp_path, "score", "r", reward="graders:length", output_dir=".")
        assert counts(done) == (2, 0)
        first = next(stored_records(source.run_dir))
        assert [score.rewards for score in first.scores or ()] == [{"length": len("Be brief.")}]

    def test_of_the_run_itself_are_not_repeated(self, tmp_path: Path) -> None:
        source = make(tmp_path, 1)
        run(tmp_path, "score", "r", reward="graders:length", output_dir=".")
        (score,) = scores(source)
        kept = {key: score[key] for key in ("source", "version", "rewards", "error")}
        source = make_run(tmp_path, call_record("Answer 0", scores=[kept]), call_record())
        (source.run_dir / "scores.jsonl").unlink()
        done = run(tmp_path, "score", "r", reward="graders:length", output_dir=".")
        assert counts(done) == (1, 0)
        assert [line["id"] for line in scores(source)] == ["t1"]

    def test_do_not_see_conversations_that_failed(self, tmp_path: Path) -> None:
        error = {"class": "bad_request", "message": "no"}
        make(tmp_path, 2, status="failed", error=error)
        done = run(tmp_path, "score", "r", reward="graders:length", output_dir=".")
        assert counts(done) == (0, 0)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"reward": "graders:none"}, "cannot import 'graders:none'"),
            ({"reward": "graders:of_answer"}, "'graders:of_answer' must take (conversation, works"),
            ({"reward": " , "}, "give --reward MODULE:FUNCTION"),
            ({}, "give --reward MODULE:FUNCTION"),
            ({"reward": "graders:length", "reward_timeout_s": 0}, "reward_timeout_s"),
        ],
    )
    def test_must_be_given_and_found(self, tmp_path: Path, given: Any, message: str) -> None:
        source = make(tmp_path, 1)
        done = run(tmp_path, "score", "r", output_dir=".", **given)
        assert done.returncode == 2
        assert message in done.stderr
        assert not (source.run_dir / "scores.jsonl").exists()

    @pytest.mark.slow
    def test_survive_kills(self, tmp_path: Path) -> None:
        """What was on disk at a kill is not scored again, and a second command is refused."""
        source = make(tmp_path, 60)
        path = source.run_dir / "scores.jsonl"
        arguments = ("score", "r")
        options: dict[str, Any] = {"reward": "graders:held", "output_dir": "."}
        hold = tmp_path / "hold"
        for count in (1, 17, 40):
            hold.write_text(str(count))
            process = subprocess.Popen(command(*arguments, **options), cwd=tmp_path)
            try:
                wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") >= count)  # noqa: B023
                if count == 17:
                    refused = run(tmp_path, *arguments, **options)
                    assert refused.returncode == 5
                    assert "another `score` works on it" in refused.stderr
            finally:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
        hold.unlink()
        assert run(tmp_path, *arguments, **options).returncode == 0
        given = Counter(line["id"] for line in scores(source))
        assert given == Counter({f"t{n}": 1 for n in range(60)})
        assert json.loads(path.read_bytes().splitlines()[0])["crc32"]


PRICES = '{"j": {"input": 1000, "output": 1000}}'
"""A thousandth of a dollar per token."""


class Judge:
    """An endpoint that plays the judge, and its own log of what it answered."""

    def __init__(self, url: str, requests: list[JSON]) -> None:
        self.url = url
        self._asked = requests

    @property
    def asked(self) -> list[str]:
        """The last words of the questions, in order."""
        return [body["messages"][-1]["content"].split()[-1] for body in self._asked]

    def options(self, folder: Path, prompt: str = "Judge: {answer}", **more: Any) -> dict[str, Any]:
        file = folder / "judge.txt"
        file.write_text(prompt)
        return {
            "judge": "j",
            "judge_prompt": file,
            "base_url": f"{self.url}/v1",
            "key_env": "none",
            "output_dir": ".",
            "call_attempts": 1,
            **more,
        }


def judge_reply(text: str, *, tokens: tuple[int, int] | None = (20, 5)) -> JSON:
    message = {"role": "assistant", "content": text}
    usage = tokens and {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "x", "model": "j-1", "choices": [choice], **({"usage": usage} if usage else {})}


@contextmanager
def judging(answer: Callable[[str], tuple[int, JSON]]) -> Iterator[Judge]:
    """A judge that answers questions by their last word."""
    with answering(lambda _, body: answer(body["messages"][-1]["content"].split()[-1])) as found:
        yield Judge(*found)


def good(word: str) -> tuple[int, JSON]:
    return 200, judge_reply(f"I think.\n0.{word.rstrip('.')}")


def run_scoring(folder: Path, *command: str) -> str:
    done = run(folder, *command, output_dir=".")
    assert done.returncode == 0, done.stderr
    return done.stdout


class TestAJudge:
    def test_is_asked_once_about_each_record(self, tmp_path: Path) -> None:
        source = make(tmp_path, 8)
        before = (source.run_dir / "records.jsonl").read_bytes()
        with judging(good) as judge:
            options = judge.options(tmp_path, prices=PRICES)
            done = run(tmp_path, "score", "r", **options)
            assert (done.returncode, counts(done)) == (0, (8, 0)), done.stderr
            assert sorted(judge.asked) == [str(n) for n in range(8)]
            assert counts(run(tmp_path, "score", "r", **options)) == (0, 0)
            assert len(judge.asked) == 8
            other = judge.options(tmp_path, "Judge again: {answer}", prices=PRICES)
            assert counts(run(tmp_path, "score", "r", **other)) == (8, 0)
            assert len(judge.asked) == 16
        assert (source.run_dir / "records.jsonl").read_bytes() == before
        line = next(line for line in scores(source) if line["id"] == "t5")
        assert line["rewards"] == {"judge": 0.5}
        assert (line["reply"], line["model"]) == ("I think.\n0.5", "j-1")
        assert line["cost_usd"] == pytest.approx(0.025)
        assert line["source"] == "judge:j"

        # What it was paid is shown under its own name, apart from what the run has spent.
        assert "judges $0.4000" in run_scoring(tmp_path, "stats", "r")
        status = run_scoring(tmp_path, "status", "r")
        assert re.search(r"spent in total .*, judges \$0\.4000$", status, re.MULTILINE), status
        totals = json.loads(run_scoring(tmp_path, "status", "r", "--json"))
        assert (totals["judges_usd"], totals["judges_unknown"]) == (pytest.approx(0.4), 0)
        assert totals["spent_usd"] == 0, "the price of the model is unknown"
        cost = json.loads(run_scoring(tmp_path, "stats", "r", "--json"))["cost_usd"]
        assert cost["judges"] == pytest.approx(0.4)

    def test_sees_what_its_prompt_asks_for(self, tmp_path: Path) -> None:
        """A text that looks like a place of the prompt stays as it is."""
        prompt = "Q {question} E {expected} {row.by-us} C {conversation} {other} A {answer}"
        make_run(tmp_path, call_record("{question}"), prompts=[{"expected": 4, "by-us": [5]}])
        with answering(lambda *_: (200, judge_reply("1"))) as (url, bodies):
            done = run(tmp_path, "score", "r", **Judge(url, bodies).options(tmp_path, prompt))
        assert done.returncode == 0, done.stderr
        (text,) = (body["messages"][-1]["content"] for body in bodies)
        assert text.startswith("Q ")
        assert " E 4 [5] C [system]\nBe brief." in text
        assert '-> temp({"city"' in text
        assert text.endswith(" {other} A {question}")

    def test_scores_in_the_last_line_and_a_paid_reply_is_not_repeated(self, tmp_path: Path) -> None:
        replies: list[tuple[str, Any, Any, str | None]] = [
            ('{"a": 1, "b": 0.5}', {"a": 1, "b": 0.5}, None, None),
            ('Fine.\n```json\n{"turn_rewards": [0, 1]}\n```', {}, {"reward": [0, 1]}, None),
            ("As known.\n**RIGHT**", {"judge": 1}, None, None),
            ("WRONG", {"judge": 0}, None, None),
            ("RIGHT or WRONG", None, None, "JSON object, RIGHT or WRONG: 'RIGHT or WRONG'"),
            ("good", None, None, "is no number, JSON object, RIGHT or WRONG: 'good'"),
            ("", None, None, "is no number, JSON object, RIGHT or WRONG: ''"),
            ('{"a": "x"}', None, None, "the last line of the reply holds 'x'"),
            ('{"turn_rewards": [0]}', None, None, "and the conversation has 2 turns"),
        ]
        source = make(tmp_path, len(replies))
        with judging(lambda word: (200, judge_reply(replies[int(word)][0]))) as judge:
            options = judge.options(tmp_path)
            done = run(tmp_path, "score", "r", **options)
            assert (done.returncode, counts(done)) == (1, (9, 5)), done.stderr
            run(tmp_path, "score", "r", **options)
            assert len(judge.asked) == len(replies)
        by_id = {line["id"]: line for line in scores(source)}
        for n, (reply, rewards, by_turn, message) in enumerate(replies):
            line = by_id[f"t{n}"]
            assert (line["rewards"], line.get("turn_rewards")) == (rewards, by_turn), reply
            assert line["reply"] == reply
            assert (message or "None") in str(line["error"])

    def test_is_asked_only_about_what_a_recipe_can_keep(self, tmp_path: Path) -> None:
        """Rewards that a record lacks leave it in: they are what is asked for."""
        length = {"source": "m:length", "version": "1", "rewards": {"length": 900}, "error": None}
        source = make_run(
            tmp_path,
            call_record("early 0", status="length"),
            call_record("<tool_call> 1"),
            call_record("long 2", scores=[length]),
            call_record("secret sk-ant-api03-abcdefghijklmnopqrstuvwxyz0123456789 3"),
            call_record("good 4", scores=[{**length, "rewards": {"length": 9}}]),
            call_record("good 5"),
        )
        rewards = "{min_rewards: {judge: 1}, max_rewards: {length: 99}, require_passed: judged"
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(f"filters: {rewards}, secrets: patterns}}\nformats: openai\n")
        with judging(lambda word: (200, judge_reply(f"{int(word) % 2}"))) as judge:
            options = judge.options(tmp_path, recipe=recipe)
            done = run(tmp_path, "score", "r", **options)
            assert (done.returncode, counts(done)) == (0, (2, 0)), done.stderr
            assert sorted(judge.asked) == ["4", "5"]
        assert set(rejects(source, **yaml.safe_load(recipe.read_text()))) == {
            "t0",
            "t1",
            "t2",
            "t3",
            "t4",
            "t5",
        }

    def test_says_by_itself_whether_an_answer_is_right(self, tmp_path: Path) -> None:
        """Without a prompt of the user's, at the endpoint of the run."""
        source = make_run(
            tmp_path, call_record("Oslo"), call_record("Rome"), prompts=[{"expected": "Oslo"}]
        )

        def answer(_: str, body: JSON) -> tuple[int, JSON]:
            text = body["messages"][-1]["content"]
            is_right = "<expected>\nOslo\n" in text and "<answer>\nOslo\n" in text
            return 200, judge_reply("I know.\nRIGHT" if is_right else "WRONG")

        with answering(answer) as (url, bodies):
            identity = json.loads((source.run_dir / "run.json").read_text())
            identity["config"] |= {"model": "m", "base_url": f"{url}/v1", "key_env": "none"}
            write_run_json(source.run_dir, identity)
            done = run(tmp_path, "score", "r", judge="j", output_dir=".")
            assert done.returncode == 0, done.stderr
            assert [body["model"] for body in bodies] == ["j", "j"]
        reasons = rejects(source, formats="openai", filters={"min_rewards": {"judge": 1}})
        assert reasons == {"t1": "min_rewards"}

    def test_is_not_asked_again_what_an_export_has_asked(self, tmp_path: Path) -> None:
        """`verdicts.jsonl` was written by exports until version 0.1; its replies are paid for.

        The keys are those that it wrote for these questions.
        """
        source = make_run(tmp_path, *(call_record(f"Answer {n}") for n in range(4)))
        verdicts: list[JSON] = [
            {"key": key, "reply": reply, "cost_usd": 1.0, "at": 1.5}
            for key, reply in (
                ("06efb03ec8b18c771536f4adfada65f4", "Yes.\nRIGHT"),
                ("c7f591791206ddb33f67bf6f93c8e8e2", "RIGHT"),
                ("c7f591791206ddb33f67bf6f93c8e8e2", "WRONG"),
                ("0075723d4c04b891a57da9ba085fd207", "neither"),
                ("15c1b00ee726a66ba685b195dc8b18ed", None),
            )
        ]
        content = b"".join(add_checksum(orjson.dumps(line)) for line in verdicts)
        (source.run_dir / "verdicts.jsonl").write_bytes(content)
        options: dict[str, Any] = {
            "judge": "j",
            "base_url": "http://127.0.0.1:9/v1",
            "key_env": "none",
            "call_attempts": 1,
            "temperature": 0,
            "max_tokens": 50,
            "output_dir": ".",
        }
        done = run(tmp_path, "score", "r", **options)
        assert done.returncode == 4, "the endpoint of the other two is not there"
        assert "2 scores made of replies in verdicts.jsonl" in done.stderr
        found = {line["id"]: line["rewards"] for line in scores(source) if not line["error"]}
        assert found == {"t0": {"judge": 1.0}, "t1": {"judge": 0.0}}
        assert "judges $5.0000" in run_scoring(tmp_path, "stats", "r"), "once"
        (source.run_dir / "verdicts.jsonl").write_text("{}\n")
        done = run(tmp_path, "score", "r", **options)
        assert done.returncode == 2
        assert "verdicts.jsonl:1: not a verdict; `verify " in done.stderr

    @pytest.mark.slow
    def test_of_an_endpoint_that_waits_is_not_told_for_each_call(self, tmp_path: Path) -> None:
        make(tmp_path, 8)
        with judging(lambda _: (500, judge_reply(""))) as judge:
            options = judge.options(tmp_path, max_in_flight=8, call_attempts=2)
            done = run(tmp_path, "score", "r", **options)
        assert done.returncode == 4
        retries = [line for line in done.stderr.splitlines() if "attempt 1" in line]
        assert 0 < len(retries) < 8, "one message for all that wait at the same time"
        assert retries[0].startswith(f"--judge at {judge.url}/v1: a call failed in attempt 1, ")

    @pytest.mark.slow
    def test_has_the_progress_line_of_runs(self, tmp_path: Path) -> None:
        make(tmp_path, 3)
        with judging(lambda word: (400, judge_reply("")) if word == "1" else good(word)) as judge:
            options = judge.options(tmp_path, prices=PRICES)
            shown = on_terminal(tmp_path, dict(os.environ), "score", "r", returncode=1, **options)
        line = shown.replace("\r\n", "\n").split("judge j: 3")[0].rstrip("\n").rpartition("\r")[2]
        assert line.startswith("100%|██████████| 3/3 [")
        assert "done 2, failed 1 (bad_request 1), running 0, $0.05 of ~$0.05, " in line
        assert re.search(r", [0-9.]+ calls/s, tokens/s ", line), line

    def test_that_fails_is_asked_again(self, tmp_path: Path) -> None:
        source = make(tmp_path, 3)
        faults = {"1": 400}

        def answer(word: str) -> tuple[int, JSON]:
            status = faults.get(word)
            return good(word) if status is None else (status, {"error": {"message": "no"}})

        with judging(answer) as judge:
            options = judge.options(tmp_path)
            done = run(tmp_path, "score", "r", **options)
            assert (done.returncode, counts(done)) == (1, (3, 1))
            (failed,) = [line for line in scores(source) if line["error"]]
            assert failed["error"].startswith("bad_request: ")
            faults.clear()
            assert counts(run(tmp_path, "score", "r", **options)) == (1, 0)
        assert Counter(judge.asked) == {"0": 1, "1": 2, "2": 1}

    def test_that_refuses_the_key_stops_the_command(self, tmp_path: Path) -> None:
        make(tmp_path, 30)
        refused = (401, {"error": {"message": "no"}})
        with judging(lambda _: refused) as judge:
            done = run(tmp_path, "score", "r", **judge.options(tmp_path, max_in_flight=2))
            assert len(judge.asked) <= 4
        assert done.returncode == 4
        assert "--judge: auth: " in done.stderr

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"judge": "x:y"}, "unknown prefix 'x'"),
            ({"judge": "scripted"}, "cannot judge"),
            ({"prompt": "nothing"}, "judge.txt: has neither {answer} nor {conversation}"),
            ({"judge_prompt": "missing.txt"}, "missing.txt: cannot read it"),
            ({"key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY"),
            ({"prices": "{"}, "--prices: not JSON"),
            ({"prices": '{"j": {"input": -1}}'}, "--prices"),
            ({"temperature": -1}, "--temperature"),
            ({"max_judge_cost_usd": 1, "max_tokens": 5}, "the price of 'j' is unknown"),
            ({"max_judge_cost_usd": 1, "prices": PRICES}, "needs --max_tokens"),
            ({"reward": "m:f"}, "give --reward MODULE:FUNCTION, or --judge MODEL"),
        ],
    )
    def test_must_be_one_that_can_be_asked(
        self, tmp_path: Path, given: dict[str, Any], message: str
    ) -> None:
        make(tmp_path, 1)
        with judging(good) as judge:
            prompt = given.get("prompt", "Judge: {answer}")
            options = {**judge.options(tmp_path, prompt), **given}
            options.pop("prompt", None)
            if "x:y" in options.values():
                del options["base_url"]
            done = run(tmp_path, "score", "r", **options)
            assert judge.asked == []
        assert done.returncode == 2
        assert message in done.stderr


class TestCallsInFlight:
    @pytest.mark.parametrize("breaks", ["a call", "keeping"])
    def test_that_end_when_another_breaks_are_kept(self, breaks: str) -> None:
        """Their replies are paid for."""
        collected: list[int] = []

        async def ask(item: int) -> int:
            if item == 0 and breaks == "a call":
                raise ValueError("broken")
            if item == 2:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    return item  # it came before it could be cancelled
            return item

        def keep(found: list[int]) -> None:
            collected.extend(found)
            if breaks == "keeping" and 2 not in found:
                raise ValueError("broken")

        with pytest.raises(ValueError, match="broken"):
            asyncio.run(ask_all(range(3), ask, max_in_flight=3, keep=keep))
        assert sorted(collected) == ([1, 2] if breaks == "a call" else [0, 1, 2])

    @pytest.mark.parametrize("limit", [3, 9])
    def test_are_shown_while_none_ends(self, limit: int) -> None:
        async def ask_them() -> None:
            shown = asyncio.Event()

            async def ask(item: int) -> int:
                await shown.wait()
                return item

            def show(in_flight: int) -> None:
                seen.append(in_flight)
                shown.set()

            work = ask_all(range(4), ask, max_in_flight=limit, keep=collected.extend, show=show)
            await asyncio.wait_for(work, PATIENCE_S)

        seen: list[int] = []
        collected: list[int] = []
        asyncio.run(ask_them())
        assert seen[0] == min(limit, 4)
        assert sorted(collected) == list(range(4))

    def test_are_never_more_than_allowed(self) -> None:
        running = peak = 0

        async def ask(item: int) -> int:
            nonlocal running, peak
            running += 1
            peak = max(peak, running)
            await asyncio.sleep(0)
            running -= 1
            return item

        collected: list[int] = []
        asyncio.run(ask_all(range(50), ask, max_in_flight=4, keep=collected.extend))
        assert (peak, sorted(collected)) == (4, list(range(50)))


class TestABudget:
    def test_is_never_exceeded_and_can_be_raised(self, tmp_path: Path) -> None:
        source = make(tmp_path, 20)
        with judging(good) as judge:
            options = judge.options(tmp_path, prices=PRICES, max_tokens=5, max_in_flight=4)
            first = run(tmp_path, "score", "r", **options, max_judge_cost_usd=1.5)
            assert first.returncode == 3, first.stderr
            assert "--max_judge_cost_usd=1.5: $" in first.stderr
            spent = sum(line["cost_usd"] for line in scores(source))
            assert 0 < spent == pytest.approx(0.025 * len(judge.asked))
            assert spent <= 1.5
            count = len(judge.asked)
            again = run(tmp_path, "score", "r", **options, max_judge_cost_usd=1.5)
            assert (again.returncode, len(judge.asked)) == (3, count)
            assert run(tmp_path, "score", "r", **options, max_judge_cost_usd=90).returncode == 0
            assert len(judge.asked) == len(set(judge.asked)) == 20

    @pytest.mark.slow
    def test_counts_a_call_that_a_kill_has_cut_off(self, tmp_path: Path) -> None:
        """Its reply is lost, and may have been charged."""
        make(tmp_path, 1)
        release = Event()

        def late(word: str) -> tuple[int, JSON]:
            release.wait()
            return good(word)

        with judging(late) as judge:
            options = judge.options(tmp_path, prices=PRICES, max_tokens=5, max_judge_cost_usd=1.5)
            process = subprocess.Popen(command("score", "r", **options), cwd=tmp_path)
            try:
                wait_until(lambda: len(judge.asked) == 1)
            finally:
                process.kill()
                process.wait()
                release.set()
            done = run(tmp_path, "score", "r", **options)
            assert done.returncode == 3, done.stderr
            assert len(judge.asked) == 1

    def test_counts_a_call_of_unknown_cost_as_its_worst_case(self, tmp_path: Path) -> None:
        source = make(tmp_path, 3)
        with judging(lambda word: (200, judge_reply(f"0.{word}", tokens=None))) as judge:
            options = judge.options(tmp_path, prices=PRICES, max_tokens=5, max_in_flight=1)
            done = run(tmp_path, "score", "r", **options, max_judge_cost_usd=2)
            assert done.returncode == 3, done.stderr
            assert len(judge.asked) == len(scores(source)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_kills_at_random_moments_pay_no_reply_twice(tmp_path: Path, seed: int) -> None:
    """By the endpoint's own log: what was on disk at a kill is never asked again."""
    source = make(tmp_path, 60)
    path = source.run_dir / "scores.jsonl"
    draw = random.Random(seed)
    in_flight, kills = 4, 5
    on_disk: dict[str, int] = {}
    with judging(good) as judge:
        options = judge.options(
            tmp_path, prices=PRICES, max_tokens=5, max_in_flight=in_flight, max_judge_cost_usd=90
        )
        for _ in range(kills):
            count = len(judge.asked) + draw.randint(1, 12)
            process = subprocess.Popen(command("score", "r", **options), cwd=tmp_path)
            try:
                wait_until(lambda: len(judge.asked) >= count or process.poll() is not None)  # noqa: B023
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait()
            content = path.read_bytes() if path.exists() else b""
            counts = Counter(judge.asked)
            for line in content.split(b"\n")[:-1]:
                word = json.loads(line)["reply"].rpartition(".")[2]
                on_disk.setdefault(word, counts[word])
        done = run(tmp_path, "score", "r", **options)
        assert done.returncode == 0, done.stderr
        counts = Counter(judge.asked)
    assert on_disk
    assert {word: counts[word] for word in on_disk} == on_disk
    assert counts.total() - len(counts) <= kills * in_flight
    assert Counter(line["id"] for line in scores(source)) == {f"t{n}": 1 for n in range(60)}
    assert "judge_budget" not in run(tmp_path, "verify", source.run_dir).stdout
