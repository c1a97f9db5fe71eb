"""Datasets by recipe: what is left out and why, splits, shards, and that it can be proved."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tracemalloc
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from batch_trajectories.basics.errors import ConfigError, EnvironmentStop, RunLocked
from batch_trajectories.dataset.scan import scan
from batch_trajectories.export.dataset.checking import find_problems
from batch_trajectories.export.dataset.directory import (
    NoRows,
    derive_manifest,
    export_dataset,
    listed_files,
)
from batch_trajectories.export.dataset.runs import Source
from batch_trajectories.export.record_order import DuplicateTable, RecordOrder
from batch_trajectories.export.rows.filter_options import Filters
from batch_trajectories.export.rows.recipe import Recipe, load_recipe
from batch_trajectories.records.files import StorageError
from batch_trajectories.records.records import RecordFile
from tests.helpers.builders import assistant, call, record_of, result, user
from tests.helpers.exporting import (
    call_record,
    export_to_dataset,
    judged_record,
    make_run,
    rejects,
    rows,
)
from tests.helpers.running import command, ids, lines, run, wait_until, write_rows

FAILED = record_of(user(), status="failed", error={"class": "ModelError", "message": "gone"})
EARLY = record_of(
    user(), assistant("", call()), result("r"), status="max_turns", status_reason="3 turns"
)
KEY = "sk-ant-api03-" + "a1B2" * 8


def answer_record(text: str, **changes: Any) -> dict[str, Any]:
    return record_of(user(), assistant(text), **changes)


def left_out(source: Source, **filters: Any) -> dict[str, str]:
    """Why a filter alone leaves out which records."""
    filters = {"exact_duplicates": False, "status": "any", **filters}
    return rejects(source, formats="raw", filters=filters)


class TestFilters:
    def test_only_completed_conversations_are_kept_unless_asked_for(self, tmp_path: Path) -> None:
        source = make_run(tmp_path, call_record(), EARLY, FAILED)
        completed = {"exact_duplicates": False}
        reasons = rejects(source, formats="openai", filters=completed)
        assert reasons == {"t1": "status", "t2": "failed"}
        assert left_out(source) == {"t2": "failed"}
        assert left_out(source, status="max_turns,length") == {"t0": "status", "t2": "failed"}
        training_rows = rows(source, "openai", filters={"status": "max_turns"})
        assert [(row["id"], row["completed"]) for row in training_rows] == [("t1", False)]

    def test_reasoning_is_counted_over_the_turns_of_the_model(self, tmp_path: Path) -> None:
        half = record_of(
            user(), assistant("", call(), reasoning="Hm."), result("r"), assistant("Hi.")
        )
        source = make_run(
            tmp_path,
            call_record(),
            half,
            answer_record("<think>x</think>Hi."),
            answer_record("Hi."),
        )
        assert left_out(source, min_reasoning=0.5) == {"t3": "min_reasoning"}
        assert left_out(source, min_reasoning=0.6) == {f"t{n}": "min_reasoning" for n in (1, 3)}
        assert left_out(source, min_reasoning=0) == {}

    def test_failed_calls(self, tmp_path: Path) -> None:
        calls = [call(id=name) for name in "abc"]
        results = [result("r", id="a"), *(result("no", id=x, is_error=True) for x in "bc")]
        record = record_of(user(), assistant("", *calls), *results, assistant("Hi."))
        source = make_run(tmp_path, call_record(), record)
        assert left_out(source, max_tool_errors=2) == {}
        assert left_out(source, max_tool_errors=1) == {"t1": "max_tool_errors"}
        assert left_out(source, max_tool_error_share=0.7) == {}
        assert left_out(source, max_tool_error_share=0.5) == {"t1": "max_tool_error_share"}

    def test_invented_tools(self, tmp_path: Path) -> None:
        record = record_of(
            user(), assistant("", call(name="tmep")), result("no", is_error=True), assistant("Hi.")
        )
        source = make_run(tmp_path, call_record(), record)
        assert left_out(source) == {}
        assert left_out(source, invented_tools="reject") == {"t1": "invented_tools"}
        assert rejects(source, formats="openai") == {"t1": "unknown_tool"}

    def test_limits_of_turns_calls_and_tokens(self, tmp_path: Path) -> None:
        known = {"input_tokens": 10, "output_tokens": 5}
        source = make_run(
            tmp_path,
            call_record(usage=known),
            answer_record("Hi."),
            answer_record("Hi.", usage=None),
        )
        assert left_out(source, min_turns=2) == {"t1": "min_turns", "t2": "min_turns"}
        assert left_out(source, max_turns=1) == {"t0": "max_turns"}
        assert left_out(source, max_tool_calls=0) == {"t0": "max_tool_calls"}
        assert left_out(source, max_input_tokens=10) == {"t2": "max_input_tokens"}
        assert left_out(source, max_tokens=15) == {"t1": "max_tokens", "t2": "max_tokens"}
        assert left_out(source, max_tokens=14).keys() == {"t0", "t1", "t2"}

    def test_inherited_turns_of_a_branch_are_not_counted(self, tmp_path: Path) -> None:
        failed = (assistant("", call(id="a", name="tmep")), result("no", id="a", is_error=True))
        branch = record_of(
            user(),
            *failed,
            assistant("", call(), reasoning="Hm."),
            result("r"),
            assistant("Hi.", reasoning="So."),
        )
        branch["turns"][0]["inherited"] = True
        unanswered = record_of(user(), *failed, status="length")
        unanswered["turns"][0]["inherited"] = True
        source = make_run(tmp_path, branch, unanswered)
        assert left_out(source, max_turns=2, max_tool_calls=1, max_tool_errors=0) == {}
        assert left_out(source, max_tool_error_share=0.1, invented_tools="reject") == {}
        assert left_out(source, min_reasoning=1.0) == {"t1": "min_reasoning"}
        assert left_out(source, min_turns=1) == {"t1": "min_turns"}
        assert left_out(source, min_turns=3) == {f"t{n}": "min_turns" for n in (0, 1)}
        assert left_out(source, min_tool_calls=1) == {"t1": "min_tool_calls"}
        assert left_out(source, min_tool_calls=2) == {f"t{n}": "min_tool_calls" for n in (0, 1)}

    def test_rewards(self, tmp_path: Path) -> None:
        """One without a reward is kept by no bound: unknown is not good enough."""
        source = make_run(
            tmp_path, judged_record(1.0, "A"), judged_record(0.2, "B"), judged_record(None, "C")
        )
        assert left_out(source, min_reward=0.2) == {"t2": "min_reward"}
        assert left_out(source, max_reward=0.2) == {"t0": "max_reward", "t2": "max_reward"}
        name = "require_passed"
        assert left_out(source, require_passed="judged") == {"t1": name, "t2": name}
        assert left_out(source, require_passed="failed") == {"t0": name, "t2": name}
        # Names of earlier versions, as a manifest holds them.
        assert left_out(source, passed=True, require_passed=False) == {"t1": name, "t2": name}
        assert left_out(source, passed=False, judge=None) == {"t0": name, "t2": name}

    @pytest.mark.parametrize(
        ("match", "expected", "answer", "is_right"),
        [
            ("exact", "Forty two", " forty TWO ", True),
            ("exact", "42", "It is 42", False),
            ("numeric", "1,234.5", "So the sum of 3 is 1234.50.", True),
            ("numeric", 7, "7 of 8", False),
            ("numeric", 7, "none", False),
            ("numeric", "1e3", "1000.0005", True),
            ("regex", r"\b4\d\b", "about 42 or so", True),
            ("regex", r"^42$", "about 42", False),
        ],
    )
    def test_expected_answers(
        self, tmp_path: Path, match: str, expected: Any, answer: str, is_right: bool
    ) -> None:
        prompts = [{"expected": expected}, {}]
        source = make_run(
            tmp_path,
            answer_record(f"<think>0</think>{answer}"),
            answer_record("x"),
            prompts=prompts,
        )
        reasons = left_out(source, answer={"match": match})
        assert reasons == ({} if is_right else {"t0": "answer"}) | {"t1": "answer"}

    def test_an_expected_answer_that_is_not_a_pattern_is_named_with_its_row(
        self, tmp_path: Path
    ) -> None:
        source = make_run(
            tmp_path,
            answer_record("A"),
            answer_record("B"),
            prompts=[{"expected": "A"}, {"expected": "("}],
        )
        with pytest.raises(ConfigError, match=r"t1: 'expected' is '\(', no regular expression"):
            left_out(source, answer={"match": "regex"})

    def test_a_function_of_the_user_may_judge_answers(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "judge_of_mine.py").write_text(
            "def is_right(answer, record):\n    return answer == record['row']['want']\n"
        )
        monkeypatch.chdir(tmp_path)
        source = make_run(
            tmp_path, answer_record("A"), answer_record("B"), prompts=[{"want": "A"}, {"want": "A"}]
        )
        answer = {"match": "python", "function": "judge_of_mine:is_right"}
        assert left_out(source, answer=answer) == {"t1": "answer"}
        with pytest.raises(ConfigError, match=r"judge_of_mine:is_right.* t0: KeyError: 'want'"):
            left_out(make_run(tmp_path, answer_record("A")), answer=answer)
        for function in ("math:isnan", "sys:exit"):
            with pytest.raises(ConfigError, match=f"{function} failed for t0: TypeError"):
                left_out(source, answer={**answer, "function": function})
        for function in ("judge_of_mine:nothing", "no_such_module:f"):
            with pytest.raises(ConfigError, match="cannot import"):
                left_out(source, answer={**answer, "function": function})

    def test_overlap_with_questions_of_a_benchmark(self, tmp_path: Path) -> None:
        question = (
            "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
        )
        (tmp_path / "bench.jsonl").write_text(
            json.dumps({"q": f"Say: {question}!", "more": ["How many moons has Mars, please?"]})
        )
        benchmark_row = json.dumps({"text": "How many\nmoons has\tMars, please?"})
        source = make_run(
            tmp_path,
            answer_record(f"He said {question.upper()}"),
            answer_record(question.replace("seven", "7")),
            answer_record("I know how many moons has  Mars -- please"),
            record_of(user(), assistant("", call(benchmark_row)), result("1"), assistant("Done.")),
            prompts=[{}, {}, {}, {}],
        )
        files = [str(tmp_path / "bench.jsonl")]
        assert left_out(source, evaluation_files=files) == {
            "t0": "evaluation_files",
            "t2": "evaluation_files",
            "t3": "evaluation_files",
        }
        reasons = left_out(source, evaluation_files=files, evaluation_words=8)
        assert reasons.keys() == {"t0", "t2", "t3"}
        right = (tmp_path / "bench.jsonl").read_text()
        for name, content, place in (
            ("empty.txt", "too short\n", "empty.txt:"),
            ("bad.jsonl", f"{right}\n\n{{", "bad.jsonl:3: not JSON"),
        ):
            (tmp_path / name).write_text(content)
            with pytest.raises(ConfigError, match=place):
                left_out(source, evaluation_files=[str(tmp_path / name)])
        (tmp_path / "blank.jsonl").write_text(f"{right}\n\n")
        blank = [str(tmp_path / "blank.jsonl")]
        assert left_out(source, evaluation_files=blank).keys() == {"t0", "t2", "t3"}

    @pytest.mark.parametrize(
        "question",
        [
            "下列关于光合作用的说法中，哪一项是正确的？",
            "日本で一番高い山はどこですか",
            "ประเทศไทยมีกี่จังหวัด",
            "Сколько лун у планеты Марс?",
            "대한민국의 수도는 어디에 있는 도시입니까",
        ],
    )
    def test_questions_of_other_scripts(self, tmp_path: Path, question: str) -> None:
        (tmp_path / "bench.txt").write_text(f"{question}\n", encoding="utf-8")
        quoted = answer_record(f"Eh: “{question}” Yes.")
        source = make_run(
            tmp_path, quoted, answer_record(question[::-1]), answer_record(question[:8])
        )
        files = [str(tmp_path / "bench.txt")]
        assert left_out(source, evaluation_files=files) == {"t0": "evaluation_files"}

    @pytest.mark.parametrize(
        ("secret", "kind"),
        [
            ("sk-ant-api03-" + "a1B2" * 8, "anthropic key"),
            ("sk-proj-" + "a1B2" * 8, "openai key"),
            ("AKIA" + "A1B2" * 4, "aws access key"),
            ("ghp_" + "a1B2" * 9, "github token"),
            ("hf_" + "aBcD" * 8, "hugging face token"),
            ("-----BEGIN RSA PRIVATE KEY-----", "private key"),
            ("postgres://me:hunter22@db/x", "password in a url"),
        ],
    )
    def test_secrets_are_found_and_never_repeated(
        self, tmp_path: Path, secret: str, kind: str
    ) -> None:
        record = record_of(
            user(), assistant("", call()), result(f"key={secret} end"), assistant("Hi.")
        )
        plain = answer_record(
            "sk-learn-is-not-a-key-at-all, https://example.org/a:b@c, task-12345678901234567890x"
        )
        source = make_run(tmp_path, record, plain)
        assert left_out(source, secrets="patterns") == {"t0": "secrets"}
        (line,) = lines(tmp_path / "out" / "rejects.jsonl")
        assert line["detail"] == f"message 3 (tool): {kind}"
        assert secret not in (tmp_path / "out" / "rejects.jsonl").read_text()

    def test_secrets_at_the_beginning_of_a_line_of_json(self, tmp_path: Path) -> None:
        """There an escape precedes them, whose last letter is not part of a word."""
        text = f"keys:\n{KEY}\tend"
        records = [
            record_of(
                user(),
                assistant("", call(json.dumps({"city": text}))),
                result("r"),
                assistant("Hi."),
            ),
            record_of(
                user(),
                assistant("", call()),
                result(json.dumps([text.replace("\n", "\t")])),
                assistant("Hi."),
            ),
            record_of(user(), assistant("", call()), result(f'"\\u003c{KEY}"'), assistant("Hi.")),
        ]
        reasons = left_out(make_run(tmp_path, *records), secrets="patterns")
        assert reasons == {f"t{n}": "secrets" for n in range(3)}

    def test_secrets_are_found_in_all_that_atif_and_raw_hold(self, tmp_path: Path) -> None:
        """Conversations of subagents, replies set aside, columns that are lists or objects."""
        inner = answer_record(f"It is {KEY}.") | {"key": "c1", "name": "helper"}
        aside = {"turn": 1, "discarded": "length", "message": assistant("", reasoning=KEY)}
        source = make_run(
            tmp_path,
            answer_record(
                "A", inner=[answer_record("x") | {"key": "c0", "name": "planner", "inner": [inner]}]
            ),
            answer_record("B", discarded=[aside]),
            answer_record("C"),
            answer_record("D", check={"passed": True, "reward": 1.0, "stdout": KEY}),
            answer_record("E"),
            prompts=[{}, {}, {"origin": {"seen": [KEY]}}, {}, {}],
        )
        assert left_out(source, secrets="patterns") == {f"t{n}": "secrets" for n in range(4)}
        assert [line["detail"] for line in lines(tmp_path / "out" / "rejects.jsonl")] == [
            f"{place}: anthropic key"
            for place in (
                "conversation of planner, conversation of helper, message 2 (assistant)",
                "message 1 set aside (assistant), reasoning",
                "column origin",
                "check",
            )
        ]

    def test_detect_secrets_finds_more(self, tmp_path: Path) -> None:
        pytest.importorskip("detect_secrets")
        key = "SG." + "a1B2c3D4e5F6g7H8i9J0kL" + "." + "a1B2c3D4e5F6g7H8i9J0kLmN" * 2
        source = make_run(
            tmp_path, answer_record(f"key {key[:69]}"), answer_record("Nothing to see at 10.0.0.1")
        )
        assert left_out(source, secrets="patterns") == {}
        assert left_out(source, secrets="all") == {"t0": "secrets"}


class TestDuplicates:
    def test_equal_conversations_are_kept_once(self, tmp_path: Path) -> None:
        """Ids of calls and times are not words; results of tools are."""
        again = record_of(
            user(), assistant("", call(id="x9")), result("r", id="x9"), assistant("Hi.")
        )
        first = record_of(user(), assistant("", call()), result("r"), assistant("Hi."))
        other = record_of(user(), assistant("", call()), result("s"), assistant("Hi."))
        source = make_run(tmp_path, first, again, other)
        assert left_out(source, exact_duplicates=True) == {"t1": "exact_duplicates"}
        assert left_out(source) == {}

    @pytest.mark.parametrize(
        "text",
        [" ".join(f"w{n}" for n in range(200)), "".join(chr(0x4E00 + n) for n in range(200))],
    )
    def test_nearly_equal_conversations_are_kept_once(self, tmp_path: Path, text: str) -> None:
        pytest.importorskip("rensa")
        source = make_run(
            tmp_path,
            answer_record(text),
            answer_record(text + " end"),
            answer_record(text[: len(text) // 2]),
        )
        assert left_out(source, near_duplicates=0.9) == {"t1": "near_duplicates"}
        assert left_out(source, near_duplicates=0.3).keys() == {"t1", "t2"}
        assert left_out(source, near_duplicates=0.6) == {"t1": "near_duplicates"}


class TestSelection:
    def test_the_first_or_the_best_samples_of_each_prompt(self, tmp_path: Path) -> None:
        records = [judged_record(0.1, "A"), judged_record(None, "B"), judged_record(0.9, "C")] * 2
        source = make_run(tmp_path, *records, samples=3)
        assert left_out(source, first_n=2) == {"t0#s2": "first_n", "t1#s2": "first_n"}
        assert left_out(source, best_n=1) == {
            "t0": "best_n",
            "t0#s1": "best_n",
            "t1": "best_n",
            "t1#s1": "best_n",
        }
        two = {"best_n": 2, "exact_duplicates": False}
        assert [row["id"] for row in rows(source, "raw", filters=two)] == [
            "t0",
            "t0#s2",
            "t1",
            "t1#s2",
        ]

    def test_comparisons_see_all_samples_even_those_not_chosen(self, tmp_path: Path) -> None:
        source = make_run(tmp_path, judged_record(1.0, "A"), judged_record(0.0, "B"), samples=2)
        directory, _ = export_to_dataset(source, formats="openai,dpo", filters={"best_n": 1})
        assert ids(directory / "openai" / "train.jsonl") == ["t0"]
        (pair,) = lines(directory / "dpo" / "train.jsonl")
        assert pair["rejected"][-1]["content"] == "B"
        (line,) = lines(directory / "rejects.jsonl")
        assert (line["id"], line["format"], line["reason"]) == ("t0#s1", "openai", "best_n")

    @pytest.mark.parametrize("cap", [{"max_per": {"toolsets": 1}}, {"max_per_toolsets": 1}])
    def test_toolsets_are_balanced(self, tmp_path: Path, cap: dict[str, Any]) -> None:
        """The second is what recipes of earlier versions say."""
        sets = [["file"], ["file"], ["web"], ["file"], []]
        source = make_run(
            tmp_path, *(answer_record(str(n), toolsets=t) for n, t in enumerate(sets))
        )
        out = left_out(source, **cap)
        assert [*out.values()] == ["max_per"] * 2
        assert out.keys() < {"t0", "t1", "t3"}, "one of each other combination stays"


class TestSplits:
    SHARES = {"train": 0.7, "test": 0.3}  # noqa: RUF012

    def split_of(self, source: Source, **recipe: Any) -> dict[str, str]:
        directory, _ = export_to_dataset(source, formats="raw", splits=self.SHARES, **recipe)
        return {row_id: path.stem for path in (directory / "raw").iterdir() for row_id in ids(path)}

    def test_are_by_prompt_and_move_no_row_when_rows_are_added(self, tmp_path: Path) -> None:
        few = make_run(tmp_path, *[answer_record(str(n)) for n in range(60)], samples=2)
        before = self.split_of(few)
        assert all(before[f"t{n}"] == before[f"t{n}#s1"] for n in range(30))
        assert 4 <= list(before.values()).count("test") <= 32
        more = make_run(tmp_path, *[answer_record(str(n)) for n in range(80)], samples=2)
        assert before.items() <= self.split_of(more).items()
        assert self.split_of(more, split_seed=1) != self.split_of(more)

    def test_prompts_with_the_same_words_are_on_one_side(self, tmp_path: Path) -> None:
        prompts = [{"prompt": f"Same {n % 5}"} for n in range(40)]
        source = make_run(tmp_path, *[answer_record(str(n)) for n in range(40)], prompts=prompts)
        sides = self.split_of(source)
        assert set(sides.values()) == {"train", "test"}
        assert all(sides[f"t{n}"] == sides[f"t{n % 5}"] for n in range(40))

    def test_system_prompts_before_the_same_words_change_no_side(self, tmp_path: Path) -> None:
        prompts = [
            [{"role": "system", "content": str(n)}, user(f"Same {n % 5}")] for n in range(40)
        ]
        source = make_run(tmp_path, *[answer_record(str(n)) for n in range(40)], prompts=prompts)
        sides = self.split_of(source)
        assert all(sides[f"t{n}"] == sides[f"t{n % 5}"] for n in range(40))

    def test_samples_with_other_openings_are_on_one_side(self, tmp_path: Path) -> None:
        records = [record_of(user(f"Prepared {n}"), assistant(str(n))) for n in range(40)]
        sides = self.split_of(make_run(tmp_path, *records, samples=2))
        assert all(sides[f"t{n}"] == sides[f"t{n}#s1"] for n in range(20))

    def test_shards_have_a_size_and_hold_every_row_once(self, tmp_path: Path) -> None:
        source = make_run(tmp_path, *[answer_record("x" * 400 + str(n)) for n in range(30)])
        directory, _ = export_to_dataset(source, formats="openai", shard_mb=0.005)
        shards = sorted((directory / "openai" / "train").iterdir())
        count = len(shards)
        assert 5 <= count < 15
        assert shards[-1].name == f"train-{count - 1:05}-of-{count:05}.jsonl"
        assert max(path.stat().st_size for path in shards) <= 5000
        assert [i for path in shards for i in ids(path)] == [f"t{n}" for n in range(30)]


class TestManifest:
    def test_every_task_is_somewhere(self, tmp_path: Path) -> None:
        records = [call_record(), call_record(), EARLY, FAILED, answer_record("</think>")]
        source = make_run(tmp_path, *records, pending=2, more="not json\n")
        directory, manifest = export_to_dataset(
            source, formats="hermes,openai,llamafactory", filters={"status": "any"}
        )
        keys = ("discarded", "failed", "pending", "rejected", "selected")
        assert [manifest[key] for key in keys] == [1, 0, 2, 3, 2]
        assert sum(manifest[key] for key in keys) == manifest["tasks"] == 8
        assert manifest["rejected_by_reason"] == {
            "exact_duplicates": 1,
            "failed": 1,
            "marker_in_text": 1,
        }
        for part in manifest["formats"]:
            assert part["used"] + part["rejected"] == manifest["selected"]
            lengths = part["row_bytes"]
            assert lengths["p50"] <= lengths["p99"] <= lengths["max"]
        assert manifest["formats"][2]["rejected_by_reason"] == {"unfinished": 1}
        assert manifest["recipe"]["filters"]["status"] == ["any"]
        assert set(manifest["versions"]) == {"batch-trajectories"}
        for file in listed_files(manifest):
            content = (directory / file["path"]).read_bytes()
            assert hashlib.sha256(content).hexdigest() == file["sha256"]
            assert len(content) == file["bytes"]
        assert json.loads((directory / "manifest.json").read_bytes()) == manifest

    def test_the_same_records_and_recipe_give_the_same_bytes(self, tmp_path: Path) -> None:
        """In any order in which the records were finished."""
        formats = "hermes,llamafactory,openai,atif,dpo,kto,raw"
        records = [judged_record(n / 10, str(n)) for n in range(10)]

        def content(folder: Path, *, reverse: bool) -> dict[str, bytes]:
            folder.mkdir()
            source = make_run(folder, *records, samples=2)
            stored = source.run_dir / "records.jsonl"
            in_order = stored.read_bytes().splitlines(keepends=True)
            stored.write_bytes(b"".join(reversed(in_order) if reverse else in_order))
            directory, _ = export_to_dataset(
                source, formats=formats, splits={"train": 0.5, "test": 0.5}
            )
            files = [path for path in directory.rglob("*") if path.is_file()]
            return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}

        first, second = (content(tmp_path / x, reverse=x == "b") for x in "ab")
        assert first == second
        assert len(first) > 14

    def test_the_last_record_of_a_task_counts(self, tmp_path: Path) -> None:
        source = make_run(tmp_path, answer_record("First."))
        stored = source.run_dir / "records.jsonl"
        again = json.loads(stored.read_bytes())
        again["messages"][-1]["content"] = "Second."
        with stored.open("a") as file:
            file.write(json.dumps(again) + "\n")
        assert [row["messages"][-1]["content"] for row in rows(source, "openai")] == ["Second."]

    def test_prompts_that_are_gone_are_counted_and_their_records_left(self, tmp_path: Path) -> None:
        source = make_run(
            tmp_path, call_record(), call_record(), call_record(), samples=1, pending=1
        )
        kept = write_rows(tmp_path / "p.jsonl", *lines(tmp_path / "p.jsonl")[1:])
        shorter = replace(source, scan=scan(kept, max_samples=None))
        manifest = derive_manifest(shorter, Recipe.model_validate({"formats": "openai"}))
        assert (manifest["tasks"], manifest["gone"], manifest["pending"]) == (3, 1, 1)

    def test_samples_of_a_prompt_stay_together_although_one_is_missing(
        self, tmp_path: Path
    ) -> None:
        source = make_run(tmp_path, *[call_record()] * 6, samples=2)
        path = source.run_dir / "records.jsonl"
        content = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join([content[5], *content[:2], content[3]]))
        (source.run_dir / "records.idx").unlink(missing_ok=True)
        order = RecordOrder(source.run_dir, source.scan, num_samples=2)
        assert list(order.groups(by_prompt=True)) == [[[0, 1], [3], [5]]]
        assert list(order.groups(by_prompt=False)) == [[[0], [1], [3], [5]]]
        assert list(order.tasks_without_record()) == [2, 4]
        with order.open_reader() as read:
            assert read(5).line == content[5]
        with pytest.raises(ValueError, match="scan is for 2 samples"):
            RecordOrder(source.run_dir, source.scan, num_samples=1)

    def test_rejects_stand_in_the_order_of_the_dataset(self, tmp_path: Path) -> None:
        by_format = record_of(
            user(), assistant("", call()), result("</tool_response>"), assistant("Done.")
        )
        by_filter = call_record(status="turns_exhausted")
        source = make_run(tmp_path, by_format, by_filter, call_record(), by_filter, by_format)
        assert list(rejects(source, formats="openai").items()) == [
            ("t0", "marker_in_result"),
            ("t1", "status"),
            ("t3", "status"),
            ("t4", "marker_in_result"),
        ]

    def test_groups_hold_a_few_records_and_together_all(self, tmp_path: Path) -> None:
        long = record_of(user(), assistant("x" * 600_000))
        source = make_run(tmp_path, *[call_record()] * 21, *[long] * 7)
        order = RecordOrder(source.run_dir, source.scan, num_samples=1)
        groups = list(order.groups(by_prompt=False))
        assert [len(few) for few in groups] == [23, 2, 2, 1]
        assert [number for few in groups for [number] in few] == list(range(28))

    def test_a_record_of_another_task_in_its_place_stops_the_export(self, tmp_path: Path) -> None:
        source = make_run(tmp_path, *[call_record()] * 3)
        RecordFile(source.run_dir, tmp_path / "quarantine").close()
        path = source.run_dir / "records.jsonl"
        first, second, last = path.read_bytes().splitlines(keepends=True)
        assert len(first) == len(second)
        path.write_bytes(second + first + last)
        with pytest.raises(EnvironmentStop, match=r"jsonl:1: the record .* unreadable: the index"):
            export_to_dataset(source, formats="openai")

    def test_equal_hashes_are_compared(self) -> None:
        seen = DuplicateTable(3)
        compared: list[int] = []

        def differs(earlier: int) -> bool:
            compared.append(earlier)
            return False

        assert all(seen.is_new(number, 7, differs) for number in range(3))
        assert compared == [0, 0, 1]
        assert not seen.is_new(3, 7, lambda earlier: earlier == 1)

    def test_the_card_names_one_kind_of_file_per_config(self, tmp_path: Path) -> None:
        """Its loader opens all configs of a repository as one kind."""
        card = {"title": "Mine: a set", "license": "mit", "language": "en"}
        source = make_run(tmp_path, call_record(), judged_record(1.0, "A"))
        directory, _ = export_to_dataset(source, formats="openai,hermes,kto,atif,raw", card=card)
        front, body = (directory / "README.md").read_text().removeprefix("---\n").split("---\n", 1)
        header = yaml.safe_load(front)
        assert (header["pretty_name"], header["license"]) == ("Mine: a set", "mit")
        assert [one["config_name"] for one in header["configs"]] == ["openai", "hermes", "kto"]
        assert header["configs"][0]["default"] is True
        for config in header["configs"]:
            assert all((directory / one["path"]).is_file() for one in config["data_files"])
        for info, config in zip(header["dataset_info"], header["configs"], strict=True):
            row = lines(directory / config["config_name"] / "train.jsonl")[0]
            assert [feature["name"] for feature in info["features"]] == list(row)
        assert "&id" not in front
        assert "# Mine: a set" in body

    def test_of_a_format_without_rows_the_card_knows_no_lengths(self, tmp_path: Path) -> None:
        directory, _ = export_to_dataset(make_run(tmp_path, EARLY), formats="openai")
        assert "| openai | 0 | 0 | - | - | - |" in (directory / "README.md").read_text()

    def test_with_twins_the_card_names_these(self, tmp_path: Path) -> None:
        pytest.importorskip("pyarrow")
        directory, _ = export_to_dataset(
            make_run(tmp_path, call_record()), formats="openai,parquet", shard_mb=1
        )
        header = yaml.safe_load((directory / "README.md").read_text().split("---\n")[1])
        (config,) = header["configs"]
        assert config["data_files"] == [
            {"split": "train", "path": "openai_parquet/train/*.parquet"}
        ]
        assert "dataset_info" not in header


@pytest.mark.long  # tracing memory is slow
def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    def peak(count: int) -> int:
        folder = tmp_path / str(count)
        folder.mkdir()
        source = make_run(folder, *[answer_record(f"{n} " + "x" * 500) for n in range(count)])
        recipe = Recipe(formats=("openai", "hermes"), splits={"train": 0.5, "test": 0.5})
        tracemalloc.start()
        derive_manifest(source, recipe)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak_bytes

    peak(10)  # fills what is cached for good
    # Both are more than what is read at once. The texts of the others alone are 1,200,000 bytes.
    assert peak(4800) - peak(2400) < 300_000


def test_memory_does_not_grow_with_the_samples_that_are_left_out(tmp_path: Path) -> None:
    long = call_record("x" * 200_000, status="max_turns")
    source = make_run(tmp_path, call_record(), *[long] * 60, samples=61)
    tracemalloc.start()
    manifest = derive_manifest(source, Recipe(formats=("raw",), filters=Filters(best_n=1)))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (manifest["selected"], manifest["rejected"]) == (1, 60)
    assert peak_bytes < 6_000_000  # their texts alone are 12,000,000 bytes


class TestDirectory:
    def test_an_export_takes_the_place_of_the_one_before(self, tmp_path: Path) -> None:
        source = make_run(tmp_path, call_record())
        directory, _ = export_to_dataset(source, formats="openai,raw", shard_mb=1)
        (directory / "notes.txt").write_text("mine")
        export_to_dataset(source, formats="hermes")
        paths = {p.relative_to(directory).as_posix() for p in directory.rglob("*")}
        assert paths == {
            "hermes",
            "hermes/train.jsonl",
            "rejects.jsonl",
            "README.md",
            "manifest.json",
            "notes.txt",
        }

    def test_formats_that_an_export_does_not_write_stay_and_are_checked(
        self, tmp_path: Path
    ) -> None:
        source = make_run(tmp_path, call_record("A"), call_record("B"))
        directory, _ = export_to_dataset(source, formats="openai,llamafactory,parquet")
        before = {path: path.read_bytes() for path in directory.glob("*/*")}
        _, manifest = export_to_dataset(source, formats="raw", replace=False)
        assert {path: path.read_bytes() for path in before} == before
        assert {part["format"] for part in manifest["formats"]} == {"raw"}
        (first,) = manifest["earlier"]
        assert [part["format"] for part in first["formats"]] == ["openai", "llamafactory"]
        assert list(find_problems(source, directory)) == []
        card = (directory / "README.md").read_text()
        (header,) = yaml.safe_load_all(card.split("---")[1])
        assert {one["config_name"] for one in header["configs"]} >= {"openai"}

        # A second one takes some of the directories of the first: these are no longer its.
        _, manifest = export_to_dataset(source, formats="openai", tools="list", replace=False)
        assert [
            sorted({file["path"].partition("/")[0] for p in one["formats"] for file in p["files"]})
            for one in manifest["earlier"]
        ] == [["raw"], ["llamafactory", "llamafactory_parquet", "openai_parquet"]]
        assert list(find_problems(source, directory)) == []

        (directory / "raw" / "train.jsonl").write_text("{}\n")
        (directory / "llamafactory" / "dataset_info.json").unlink()
        assert {problem.partition(":")[0] for problem in find_problems(source, directory)} == {
            "raw/train.jsonl",
            "llamafactory/dataset_info.json",
        }
        export_to_dataset(source, formats="openai", replace=True)
        left = {path.name for path in directory.iterdir()}
        assert left == {"openai", "README.md", "manifest.json", "rejects.jsonl"}

    def test_records_that_changed_since_an_earlier_export_are_named(self, tmp_path: Path) -> None:
        export_to_dataset(make_run(tmp_path, call_record("A")), formats="raw")
        source = make_run(tmp_path, call_record("B"))
        directory, _ = export_to_dataset(source, formats="openai", replace=False)
        told = [problem.split(", and")[0] for problem in find_problems(source, directory)]
        assert told == [
            "raw/train.jsonl: belongs to an earlier export",
        ]

    @pytest.mark.parametrize("formats", ["openai", "kto", "openai,hermes"])
    def test_a_format_without_rows_leaves_the_files_of_the_last_export(
        self, tmp_path: Path, formats: str
    ) -> None:
        source = make_run(tmp_path, judged_record(1.0, "A"), judged_record(0.0, "B"))
        directory, _ = export_to_dataset(source, formats="openai,kto,hermes")
        before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
        with pytest.raises(NoRows, match="2 rejected as min_turns") as raised:
            export_to_dataset(source, formats=formats, filters={"min_turns": 9}, replace=False)
        assert raised.value.exit_code == 1
        after = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
        assert after == before
        export_to_dataset(source, formats=formats, filters={"min_turns": 9}, replace=True)

    def test_the_dataset_of_another_run_stays(self, tmp_path: Path) -> None:
        export_to_dataset(make_run(tmp_path, call_record(), name="a"), formats="raw")
        other = make_run(tmp_path, call_record(), name="b")
        with pytest.raises(ConfigError, match=r"holds a dataset of a;.*--replace"):
            export_to_dataset(other, formats="raw", replace=False)
        export_to_dataset(other, formats="raw", replace=True)

    def test_a_directory_with_other_things_is_left_alone(self, tmp_path: Path) -> None:
        source = make_run(tmp_path, call_record())
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("mine")
        with pytest.raises(ConfigError, match="files but no dataset"):
            export_to_dataset(source, formats="raw")
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]
        (tmp_path / "out" / "thesis.tex").rename(tmp_path / "out" / "manifest.json")
        with pytest.raises(ConfigError, match="cannot read it"):
            export_to_dataset(source, formats="raw")

    def test_of_many_files_that_go_a_few_are_named(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source = make_run(tmp_path, *(call_record(f"A{n}") for n in range(9)))
        export_to_dataset(source, formats="raw", shard_mb=1e-6)
        export_to_dataset(source, formats="raw")
        output = capsys.readouterr().err
        assert output.count("train-0") == 5
        assert "00004-of-00009.jsonl and 4 more" in output

    def test_a_manifest_that_points_outside_is_refused(self, tmp_path: Path) -> None:
        source = make_run(tmp_path, call_record())
        directory, manifest = export_to_dataset(source, formats="raw")
        manifest["rejects"]["path"] = "../p.jsonl"
        (directory / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(ConfigError, match="is outside"):
            export_to_dataset(source, formats="raw")
        assert source.scan.path.exists()

    def test_a_link_to_itself_is_an_error_of_the_machine(self, tmp_path: Path) -> None:
        source = make_run(tmp_path, call_record())
        directory, _ = export_to_dataset(source, formats="raw")
        (directory / "README.md").unlink()
        (directory / "README.md").symlink_to("README.md")
        with pytest.raises(StorageError, match="Too many levels of symbolic links"):
            export_to_dataset(source, formats="raw")

    def test_an_unreadable_record_leaves_the_dataset_as_it_was(self, tmp_path: Path) -> None:
        source = make_run(tmp_path, answer_record("A"), answer_record("B"))
        directory, _ = export_to_dataset(source, formats="raw")
        before = {p: p.read_bytes() for p in directory.rglob("*") if p.is_file()}
        stored = source.run_dir / "records.jsonl"
        # An index that fits records which were then overwritten.
        from batch_trajectories.records.records import RecordFile

        RecordFile(source.run_dir, source.run_dir / "quarantine").close()
        stored.write_bytes(b"#" * 39 + stored.read_bytes()[39:])
        with pytest.raises(EnvironmentStop, match="unreadable"):
            export_to_dataset(source, formats="openai")
        assert {p: p.read_bytes() for p in directory.rglob("*") if p.is_file()} == before

    def test_records_that_vanish_meanwhile_leave_their_index(self, tmp_path: Path) -> None:
        source = make_run(tmp_path, answer_record("A"))
        RecordFile(source.run_dir, tmp_path / "quarantine").close()
        order = RecordOrder(source.run_dir, source.scan, num_samples=1)
        (source.run_dir / "records.jsonl").unlink()
        with pytest.raises(EnvironmentStop), order.open_reader() as read:
            read(0)
        assert (source.run_dir / "records.idx").exists()

    def test_a_failure_while_files_are_moved_into_place_leaves_no_dataset(
        self, tmp_path: Path
    ) -> None:
        """Some are new then and some old; the next export makes one of them."""
        source = make_run(tmp_path, call_record())
        directory, _ = export_to_dataset(source, formats="hermes,raw")
        (directory / "openai" / "train.jsonl" / "in_the_way").mkdir(parents=True)
        with pytest.raises(StorageError, match="records are safe"):
            export_to_dataset(source, formats="openai,hermes")
        assert ["interrupted" in one for one in find_problems(source, directory)] == [True]
        (directory / "openai" / "train.jsonl" / "in_the_way").rmdir()
        (directory / "openai" / "train.jsonl").rmdir()
        export_to_dataset(source, formats="atif")
        assert list(find_problems(source, directory)) == []

    def test_two_exports_do_not_mix(self, tmp_path: Path) -> None:
        source = make_run(tmp_path, call_record())
        directory, _ = export_to_dataset(source, formats="raw")
        holder = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import fcntl, os, sys; fd = os.open(sys.argv[1], os.O_RDONLY);"
                "fcntl.flock(fd, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()",
                str(directory),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            with pytest.raises(RunLocked):
                export_to_dataset(source, formats="raw")
            holder.communicate()
        export_to_dataset(source, formats="raw")

    @pytest.mark.slow
    def test_a_killed_export_is_completed_by_the_next(self, tmp_path: Path) -> None:
        """Whenever it was killed; what it left is not taken for a dataset."""
        source = make_run(tmp_path, *[answer_record("x" * 2000 + str(n)) for n in range(700)])
        export_dataset(source, Recipe(formats=("raw",)), tmp_path / "out")
        for size in (0, 1_000_000):
            process = subprocess.Popen(
                command("export", source.run_dir, format="openai,hermes", output=tmp_path / "out"),
                stdout=subprocess.DEVNULL,
            )

            def written(size: int = size) -> int:
                staged = (tmp_path / "out").glob(".export.*/**/*.jsonl")
                with suppress(FileNotFoundError):  # published in between
                    return sum(path.stat().st_size for path in staged)
                return size + 1

            with process:
                wait_until(lambda p=process, s=size: written() > s or p.poll() is not None)
                process.kill()
        recipe = Recipe(formats=("hermes",))
        manifest = export_dataset(source, recipe, tmp_path / "out")
        assert list(find_problems(source, tmp_path / "out")) == []
        assert derive_manifest(source, recipe, earlier=manifest["earlier"]) == manifest
        assert (tmp_path / "out" / "raw" / "train.jsonl").exists()


class TestCheck:
    def check(self, source: Source) -> list[str]:
        return list(find_problems(source, source.run_dir.parent / "out"))

    def test_finds_nothing_in_what_was_just_written(self, tmp_path: Path) -> None:
        source = make_run(
            tmp_path, judged_record(1.0, "A"), judged_record(0.0, "B"), EARLY, samples=3
        )
        export_to_dataset(
            source, formats="hermes,openai,llamafactory,atif,dpo,kto,raw", shard_mb=0.002
        )
        assert self.check(source) == []

    @pytest.mark.parametrize(
        ("path", "change", "said"),
        [
            ("openai/train.jsonl", lambda b: b.replace(b"Done", b"Gone"), "was changed"),
            ("openai/train.jsonl", lambda b: b[:-1], "torn"),
            ("openai/train.jsonl", lambda b: b"\xff" + b, "not JSON"),
            ("openai/train.jsonl", lambda b: b + b"[1]\n", "not an object"),
            ("README.md", lambda b: b + b"!", "was changed"),
            ("openai/more.jsonl", lambda b: b"{}\n", "not in the manifest"),
        ],
    )
    def test_finds_what_was_done_to_a_file(
        self, tmp_path: Path, path: str, change: Any, said: str
    ) -> None:
        source = make_run(tmp_path, call_record())
        directory, _ = export_to_dataset(source, formats="openai")
        file = directory / path
        file.write_bytes(change(file.read_bytes() if file.exists() else b""))
        assert any(path in one and said in one for one in self.check(source))

    def test_finds_a_missing_file_and_a_forged_manifest(self, tmp_path: Path) -> None:
        source = make_run(tmp_path, call_record())
        directory, manifest = export_to_dataset(source, formats="openai")
        (directory / "openai" / "train.jsonl").unlink()
        assert "openai/train.jsonl: No such file or directory" in self.check(source)
        export_to_dataset(source, formats="openai")
        manifest["formats"][0]["used"] += 1
        manifest["pending"] += 1
        (directory / "manifest.json").write_text(json.dumps(manifest))
        problems = self.check(source)
        assert any("tasks" in one for one in problems)
        assert any(one.startswith("openai: 2 used") for one in problems)

    @pytest.mark.parametrize(
        ("before", "after", "told"),
        [
            ('"with_reasoning": 2', '"with_reasoning": 9', "manifest.json: statistics"),
            ('"no_reward": 1', '"no_reward": 2', "manifest.json: kto: rejected_by_reason"),
            ('"split": "train"', '"split": "test"', "the records put it into train"),
            ('"dataset_sha256": "', '"dataset_sha256": "0', "manifest.json: run"),
        ],
    )
    def test_finds_what_was_done_to_the_manifest(
        self, tmp_path: Path, before: str, after: str, told: str
    ) -> None:
        source = make_run(tmp_path, call_record())
        directory, _ = export_to_dataset(source, formats="openai,kto")
        path = directory / "manifest.json"
        path.write_text(path.read_text().replace(before, after))
        assert any(told in one for one in self.check(source)), path.read_text()

    @pytest.mark.parametrize("key", ["tasks", "formats", "sha256", "path", "used", "versions"])
    def test_a_manifest_that_lacks_something_is_named(self, tmp_path: Path, key: str) -> None:
        source = make_run(tmp_path, call_record())
        directory, _ = export_to_dataset(source, formats="openai")
        path = directory / "manifest.json"
        path.write_text(path.read_text().replace(f'"{key}":', '"other":', 1))
        for attempt in (self.check, lambda of: export_to_dataset(of, formats="openai")):
            with pytest.raises(ConfigError, match=rf"manifest\.json: .*{key}: .*export again"):
                attempt(source)

    def test_finds_that_the_records_have_gone_on(self, tmp_path: Path) -> None:
        source = make_run(tmp_path, call_record("A"), pending=1)
        export_to_dataset(source, formats="openai")
        source = make_run(tmp_path, call_record("A"), call_record("B"))
        problems = self.check(source)
        assert "pending: 1, but the records now give 0; export again" in problems
        assert "openai/train.jsonl: the records give other bytes; export again" in problems

    def test_finds_that_rows_of_parquet_are_others_now(self, tmp_path: Path) -> None:
        pytest.importorskip("pyarrow")
        export_to_dataset(make_run(tmp_path, call_record("A")), formats="parquet")
        problems = self.check(make_run(tmp_path, call_record("B")))
        assert (
            "openai_parquet/train.parquet: the records give other bytes; export again" in problems
        )

    def test_an_interrupted_export_is_none(self, tmp_path: Path) -> None:
        source = make_run(tmp_path, call_record())
        directory, manifest = export_to_dataset(source, formats="openai")
        under_way = {"schema_version": 1, "kind": "dataset", "unfinished": True, "paths": []}
        (directory / "manifest.json").write_text(json.dumps(under_way))
        (finding,) = self.check(source)
        assert "interrupted" in finding
        _, again = export_to_dataset(source, formats="openai")
        assert again == manifest


class TestRecipe:
    def test_flags_win_over_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "recipe.yaml"
        path.write_text("formats: [openai]\nreasoning: none\nfilters: {max_turns: 3}\n")
        recipe = load_recipe(path, {"reasoning": "last", "splits": "a=0.5, b=0.5"})
        assert (recipe.formats, recipe.reasoning) == (("openai",), "last")
        assert recipe.splits == {"a": 0.5, "b": 0.5}
        assert recipe.filters.max_turns == 3
        assert load_recipe(None, {}).formats == ("hermes",)

    def test_of_an_earlier_manifest_is_read(self) -> None:
        """It holds all keys of that version, with their defaults."""
        written = {"formats": ["openai"], "filters": {"max_turns": 3, "judge": None}}
        assert Recipe.model_validate(written).filters == Filters(max_turns=3)

    def test_questions_are_relative_to_the_file_that_names_them(self, tmp_path: Path) -> None:
        path = tmp_path / "recipe.yaml"
        path.write_text("filters: {evaluation_files: [q.txt]}\n")
        assert load_recipe(path, {}).filters.evaluation_files == (str(tmp_path / "q.txt"),)

    @pytest.mark.parametrize(
        ("content", "told"),
        [
            (
                "formats: [opnai]",
                "unknown format 'opnai'; did you mean 'openai'? known are atif, dpo, hermes",
            ),
            ("formats: []", "formats"),
            ("format: openai", "unknown key; did you mean 'formats'? known are formats, reasoning"),
            ("filters: {min_turn: 2}", "did you mean 'min_turns'? known are status, min_reasoning"),
            ("filters: {answer: {how: x}}", "known are column, match, tolerance, function"),
            ("filters: {answer: {match: python}}", "needs one"),
            (
                "filters: {judge: {model: j}}",
                "filters.judge: this key is gone; write `min_rew",
            ),
            ("filters: {status: [complete]}", "'completed', 'max_turns'"),
            ("filters: {status: []}", "filters.status"),
            ("split_seed: 100000000000000000000", "split_seed"),
            ("shard_mb: 1.0e+308", "shard_mb"),
            ("splits: {train: 0.9}", "shares must sum to 1 (got 0.9)"),
            ("splits: {a/b: 1}", "a name is letters"),
            ("{formats: [hermes], reasoning: field}", "hermes has no field for it"),
            ("{formats: [atif], reasoning: inline}", "atif has a field for it"),
            ("filters: {first_n: 1, best_n: 1}", "give one"),
            ("- openai", "a recipe must have `key: value` lines"),
            ("a: b: c", "not YAML"),
        ],
    )
    def test_mistakes_are_named(self, tmp_path: Path, content: str, told: str) -> None:
        path = tmp_path / "recipe.yaml"
        path.write_text(content)
        with pytest.raises(ConfigError) as caught:
            load_recipe(path, {})
        assert told in str(caught.value)
        assert "recipe.yaml" in str(caught.value)

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot read this recipe"):
            load_recipe(tmp_path / "none.yaml", {})


class TestCommand:
    def test_characters_that_a_terminal_cannot_show_are_escaped(self, tmp_path: Path) -> None:
        source = make_run(tmp_path, call_record())
        ascii_only = {"PYTHONIOENCODING": "ascii:strict"}
        done = run(
            tmp_path, "export", source.run_dir, env=ascii_only, format="raw", output="\u00e9"
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert "1 in \\xe9/raw/train.jsonl" in done.stdout

    def test_a_failed_export_prints_only_its_reason(self, tmp_path: Path) -> None:
        """Also where a library has a file open that it would write the end of."""
        pytest.importorskip("pyarrow")
        source = make_run(tmp_path, call_record("A"), call_record("B"))
        (tmp_path / "mine.py").write_text("def right(answer, record): return 1 / (answer == 'A')")
        answer = "{match: python, function: mine:right}"
        (tmp_path / "recipe.yaml").write_text(f"filters: {{answer: {answer}}}\n")
        done = run(
            tmp_path,
            "export",
            source.run_dir,
            recipe="recipe.yaml",
            format="kto,parquet,raw,openai",
        )
        assert done.returncode == 2
        (output,) = done.stderr.splitlines()
        assert "mine:right failed for t1: ZeroDivisionError: division by zero" in output
        assert list((source.run_dir / "exports" / "dataset").iterdir()) == []

    def test_writes_checks_and_warns_of_what_is_pending(self, tmp_path: Path) -> None:
        source = make_run(tmp_path, call_record("A"), call_record("B"), EARLY, pending=3)
        done = run(tmp_path, "export", source.run_dir, format="openai,atif")
        assert done.returncode == 0, done.stderr
        assert "3 pending tasks not in this export" in done.stderr
        assert "6 tasks = 3 pending, 1 rejected, 2 selected" in done.stdout
        dataset = source.run_dir / "exports" / "dataset"
        assert ids(dataset / "openai" / "train.jsonl") == ["t0", "t1"]
        assert not (tmp_path / "r.jsonl").exists()
        assert run(tmp_path, "export", source.run_dir, "--check").returncode == 0
        other = run(tmp_path, "export", source.run_dir, format="openai")
        assert (other.returncode, (dataset / "atif").exists()) == (0, True)
        other = run(tmp_path, "export", source.run_dir, "--replace", format="openai")
        assert "where this export replaces them: atif/train.jsonl" in other.stderr
        assert not (dataset / "atif").exists()
        (dataset / "README.md").unlink()
        sent = run(tmp_path, "export", source.run_dir, "--check", push_to_hub="a/b")
        assert sent.returncode == 2
        assert "--check only reads a dataset" in sent.stderr
        checked = run(tmp_path, "export", source.run_dir, "--check")
        assert (checked.returncode, checked.stdout) == (1, "")
        assert "README.md" in checked.stderr

    def test_require_passed_alone_is_of_the_training_file_and_stays(self, tmp_path: Path) -> None:
        write_rows(
            tmp_path / "p.jsonl", *({"id": n, "prompt": "Say 1.", "expected": n} for n in "12")
        )
        (tmp_path / "script.json").write_text(json.dumps([{"content": "1"}]))
        begun = run(
            tmp_path,
            "--check_expected",
            model="scripted",
            dataset_file="p.jsonl",
            run_name="r",
            script_file="script.json",
        )
        assert begun.returncode == 0, begun.stderr
        training = tmp_path / "trajectories" / "r.jsonl"
        done = run(tmp_path, "export", "r", "--require_passed")
        assert done.returncode == 0, done.stderr
        assert ids(training) == ["1"]
        assert not (tmp_path / "trajectories/r/exports/dataset").exists()
        assert run(tmp_path, "verify", "r").returncode == 0
        assert run(tmp_path, "export", "r").returncode == 0
        assert ids(training) == ["1"]

    def test_a_format_without_rows_ends_with_1(self, tmp_path: Path) -> None:
        source = make_run(tmp_path, call_record("A"), pending=1)
        done = run(tmp_path, "export", source.run_dir, format="openai,dpo")
        assert done.returncode == 1
        assert "no row of dpo: 2 tasks: 1 pending, 1 not used as" in done.stderr
        dataset = source.run_dir / "exports" / "dataset"
        assert ids(dataset / "openai" / "train.jsonl") == ["t0"]
        (tmp_path / "2").mkdir()
        empty = make_run(tmp_path / "2", EARLY, pending=1)
        done = run(tmp_path, "export", empty.run_dir)
        assert done.returncode == 1
        assert "the training file has no row: 2 tasks: 1 pending" in done.stderr

    @pytest.mark.parametrize(
        ("flags", "told"),
        [
            ({"format": "nope"}, "--format: unknown format 'nope'; "),
            ({"splits": "train"}, "--splits: must be NAME=SHARE"),
            ({"push_to_hub": "a/b", "format": "nope"}, "unknown format"),
            ({"format": "raw", "render": "x.jinja"}, "cannot read this chat template"),
            ({"splits": "a=0.5,a=1"}, "--splits: 'a' is given twice"),
            ({"output": "p.jsonl"}, "p.jsonl: not a directory; name another --output"),
            ({"output": "p.jsonl/x"}, "p.jsonl/x: not a directory; name another --output"),
            ({"render_rows": "5"}, "--render_rows needs --render FILE"),
            ({"render_rows": "-1"}, "--render_rows"),
        ],
    )
    def test_mistakes_end_with_2_and_write_nothing(
        self, tmp_path: Path, flags: dict[str, str], told: str
    ) -> None:
        if "render" in flags:
            pytest.importorskip("jinja2")
        source = make_run(tmp_path, call_record())
        options: dict[str, Any] = dict(flags)
        done = run(tmp_path, "export", source.run_dir, **options)
        assert done.returncode == 2
        assert told in done.stderr
        assert not (source.run_dir / "exports").exists()

    def test_a_push_is_shown_and_not_made(self, tmp_path: Path) -> None:
        source = make_run(tmp_path, call_record("A"), EARLY)
        done = run(tmp_path, "export", source.run_dir, format="openai", push_to_hub="me/mine")
        assert done.returncode == 0, done.stderr
        output = done.stdout.partition("would send ")[2].splitlines()
        assert output[0].endswith("to me/mine (private):")
        sent = [line.split()[-1] for line in output if line.startswith("   ")]
        assert sent == ["README.md", "manifest.json", "openai/train.jsonl", "rejects.jsonl"]
        assert "stays" in output[4]
        assert "nothing was sent" in output[-1]
        assert run(tmp_path, "export", source.run_dir, "--push_for_real").returncode == 2


def test_arguments_that_are_null_are_named_and_pointed_to_parquet(tmp_path: Path) -> None:
    """Axolotl drops them from JSON lines."""
    nested = record_of(
        user(), assistant("", call('{"a": [{"b": null}]}')), result("r"), assistant("Done.")
    )
    plain = record_of(
        user(), assistant("", call('{"a": "null"}')), result("r"), assistant("Done again.")
    )
    source = make_run(tmp_path, nested, plain)
    directory, manifest = export_to_dataset(source, formats="openai,llamafactory,parquet")
    counts = [part.get("rows_with_null_arguments") for part in manifest["formats"]]
    assert counts == [1, None]
    card = (directory / "README.md").read_text()
    assert "- arguments that are null in 1 row of `openai`: Axolotl" in card
    assert "| Axolotl | `openai_parquet/train.parquet` |" in card
    done = run(tmp_path, "export", str(source.run_dir), format="openai")
    assert "1 of these rows have arguments that are null, which Axolotl drops" in done.stdout
    (part,) = export_to_dataset(source, formats="openai", per_turn=True)[1]["formats"]
    assert part["rows_with_null_arguments"] == 2


def test_the_card_names_a_file_for_each_trainer(tmp_path: Path) -> None:
    source = make_run(tmp_path, call_record())
    card = (export_to_dataset(source, formats="openai,llamafactory")[0] / "README.md").read_text()
    for line in (
        "| TRL SFTTrainer | `openai/train.jsonl` |",
        "| Axolotl | `openai/train.jsonl` |",
        "| LLaMA-Factory | `llamafactory/train.jsonl` |",
    ):
        assert line in card
    assert "verl" not in card
    split = (
        export_to_dataset(source, formats="openai,hf", shard_mb=0.0001)[0] / "README.md"
    ).read_text()
    assert "| TRL SFTTrainer | `openai_hf` |" in split
