"""One record in every format: what each holds, and what never becomes structure in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from batch_trajectories.export.conversation.reading import read_conversation
from batch_trajectories.export.conversation.row_json import dumps_row
from batch_trajectories.export.conversation.style import Style, apply_style
from batch_trajectories.export.conversation.turns import Conversation
from batch_trajectories.export.conversation.validity import Rejected
from batch_trajectories.export.rows.format import load_format
from batch_trajectories.export.rows.messages import render_messages
from batch_trajectories.records.checks import judge_record
from tests.export.test_hermes import arguments_of
from tests.helpers.builders import TEMP, assistant, call, ended_by, final, record_of, result, user
from tests.helpers.exporting import (
    call_record,
    export_to_dataset,
    judged_record,
    make_run,
    rejects,
    rows,
)
from tests.helpers.running import lines
from tests.helpers.stored import ROW_FORMATS, row_in, to_record, to_row, written_row

PARALLEL = record_of(
    user(),
    assistant(
        "Both.", call('{"city": "A"}', id="a"), call('{"city": "B"}', id="b"), reasoning="Two."
    ),
    result("1", id="a"),
    result("2", id="b"),
    assistant("Done."),
)


def read_turns(record: dict[str, Any], **style: Any) -> list[tuple[str, str]]:
    turns = written_row(record, "llamafactory", **style)["conversations"]
    return [(turn["from"], turn["value"]) for turn in turns]


def refusal(record: dict[str, Any], name: str = "openai") -> str:
    with pytest.raises(Rejected) as caught:
        written_row(record, name)
    return caught.value.reason.value


class TestOpenai:
    def test_messages_hold_what_was_said_and_no_absent_key(self) -> None:
        training_row = written_row(call_record())
        assert list(training_row) == [
            "id",
            "messages",
            "tools",
            "completed",
            "num_turns",
            "num_tool_calls",
            "has_reasoning",
            "metadata",
        ]
        arguments = {"city": "Oslo", "n": 1.5}
        tool_call = {
            "id": "c1",
            "type": "function",
            "function": {"name": "temp", "arguments": arguments},
        }
        assert training_row["messages"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Go."},
            {
                "role": "assistant",
                "content": "Looking.",
                "reasoning_content": "Which city?",
                "tool_calls": [tool_call],
            },
            {"role": "tool", "tool_call_id": "c1", "name": "temp", "content": '{"c": 9}'},
            {"role": "assistant", "content": "Done.", "reasoning_content": "Now I know."},
        ]
        assert json.loads(training_row["tools"]) == [TEMP]

    def test_without_tools_the_list_is_an_empty_one(self) -> None:
        assert written_row(record_of(user(), assistant("Hi."), tools=[]))["tools"] == "[]"

    def test_content_beside_calls_alone_is_blank_and_never_null(self) -> None:
        record = record_of(user(), assistant("", call()), result("r"), assistant("Hi."))
        assert written_row(record)["messages"][1]["content"] == ""

    def test_metadata_is_that_of_the_hermes_row(self) -> None:
        assert (
            written_row(call_record())["metadata"] == to_row(to_record(call_record()))["metadata"]
        )


class TestReasoning:
    @pytest.mark.parametrize(
        ("style", "found"),
        [
            ("field", ["Which city?", "Now I know."]),
            ("last", [None, "Now I know."]),
            ("none", [None, None]),
        ],
    )
    def test_the_style_decides_which_reasoning_is_kept(
        self, style: Any, found: list[str | None]
    ) -> None:
        training_row = written_row(call_record(), reasoning=style)
        turns = [m for m in training_row["messages"] if m["role"] == "assistant"]
        assert [turn.get("reasoning_content") for turn in turns] == found
        assert training_row["has_reasoning"] is any(found)
        counts = {"assistant_turns": 2, "with_reasoning": sum(map(bool, found))}
        assert json.loads(training_row["metadata"])["reasoning"] == counts

    def test_inline_reasoning_is_in_the_content_and_nowhere_else(self) -> None:
        turns = written_row(call_record(), reasoning="inline")["messages"][2::2]
        assert [turn["content"] for turn in turns] == [
            "<think>\nWhich city?\n</think>\n\nLooking.",
            "<think>\nNow I know.\n</think>\n\nDone.",
        ]
        assert not any("reasoning_content" in turn for turn in turns)

    def test_none_leaves_empty_blocks_in_hermes_and_none_elsewhere(self) -> None:
        values = [
            t["value"]
            for t in written_row(call_record(), "hermes", reasoning="none")["conversations"]
        ]
        assert values[2].startswith("<think>\n</think>\nLooking.")
        assert read_turns(call_record(), reasoning="none")[-1] == ("gpt", "Done.")


class TestParallelCalls:
    def test_split_makes_one_turn_per_call_with_its_result(self) -> None:
        messages = written_row(PARALLEL, parallel_calls="split")["messages"]
        told = [(m["role"], m["content"], m.get("reasoning_content")) for m in messages]
        assert told == [
            ("user", "Go.", None),
            ("assistant", "Both.", "Two."),
            ("tool", "1", None),
            ("assistant", "", None),
            ("tool", "2", None),
            ("assistant", "Done.", None),
        ]
        assert [c["id"] for m in messages for c in m.get("tool_calls", ())] == ["a", "b"]

    def test_a_call_without_result_stays_last(self) -> None:
        calls = [call(id=name) for name in ("a", "b", "c")]
        record = record_of(user(), assistant("", *calls), result("2", id="b"), status="length")
        messages = written_row(record, parallel_calls="split")["messages"]
        ids = [[c["id"] for c in m["tool_calls"]] for m in messages if m["role"] == "assistant"]
        assert ids == [["b"], ["a", "c"]]

    def test_atif_keeps_a_turn_whole(self, tmp_path: Path) -> None:
        """Its steps are replies of the model, with what each of them cost."""
        source = make_run(tmp_path, PARALLEL)
        (document,) = rows(source, "atif", parallel_calls="split")
        assert len(document["steps"]) == 3


def test_the_system_prompt_can_be_left_out_or_added(tmp_path: Path) -> None:
    assert written_row(call_record(), system="omit")["messages"][0]["role"] == "user"
    assert read_turns(call_record())[0] == ("system", "Be brief.")
    assert read_turns(call_record(), system="omit")[0] == ("human", "Go.")
    plain, added = (
        written_row(call_record(), "hermes", system=system)["conversations"][0]["value"]
        for system in ("omit", "saved")
    )
    assert added == f"{plain}\n\nBe brief."
    assert written_row(call_record(), "hermes")["conversations"][0]["value"] == plain


def test_long_tool_results_lose_their_middle() -> None:
    record = record_of(user(), assistant("", call()), result("a" * 50 + "b" * 50), assistant("Hi."))
    (content,) = [
        m["content"]
        for m in written_row(record, max_tool_chars=10)["messages"]
        if m["role"] == "tool"
    ]
    assert content == "aaaaa\n[... 90 characters cut ...]\nbbbbb"
    assert written_row(record, max_tool_chars=100) == written_row(record)


class TestLlamafactory:
    def test_calls_are_json_behind_their_thoughts(self) -> None:
        record = record_of(
            user(), assistant("", call('{"a":1}'), reasoning="Hm."), result("r"), assistant("Hi.")
        )
        assert read_turns(record) == [
            ("human", "Go."),
            ("function_call", '<think>\nHm.\n</think>\n\n{"name": "temp", "arguments": {"a": 1}}'),
            ("observation", "r"),
            ("gpt", "Hi."),
        ]

    def test_text_beside_calls_precedes_one_block_that_is_a_list(self) -> None:
        kind, value = read_turns(PARALLEL)[1]
        assert kind == "function_call"
        thoughts, _, rest = value.partition("</think>\n\n")
        text, _, block = rest.partition("<tool_call>")
        assert (thoughts, text) == ("<think>\nTwo.\n", "Both.\n")
        calls = json.loads(block.removesuffix("</tool_call>"))
        assert [one["arguments"]["city"] for one in calls] == ["A", "B"]

    def test_several_results_are_one_turn(self) -> None:
        assert read_turns(PARALLEL)[2] == ("observation", "1\n</tool_response>\n<tool_response>\n2")

    def test_turns_alternate_and_end_with_the_model(self) -> None:
        """Its loader empties rows that do not, and drops them."""
        record = record_of(user(), assistant("", call()), result("r"), status="max_turns")
        assert refusal(record, "llamafactory") == "unfinished"

    def test_no_value_is_blank(self) -> None:
        """S: its loader and others choke on them."""
        record = record_of(user(), assistant("", call()), result(" "), assistant("Hi."))
        assert all(value.strip() for _, value in read_turns(record))

    def test_without_tools_the_column_is_blank(self) -> None:
        training_row = written_row(record_of(user(), assistant("Hi."), tools=[]), "llamafactory")
        assert training_row["tools"] == ""

    def test_dataset_info_names_all_tags_and_columns(self, tmp_path: Path) -> None:
        """Its loader takes every tag that is left out for none."""
        source = make_run(tmp_path, *[call_record(f"{n}.") for n in range(12)])
        directory, _ = export_to_dataset(
            source, formats="llamafactory", splits={"train": 0.5, "test": 0.5}
        )
        info = json.loads((directory / "llamafactory" / "dataset_info.json").read_bytes())
        assert {k: v["file_name"] for k, v in info.items()} == {
            "r_train": "train.jsonl",
            "r_test": "test.jsonl",
        }
        entry = info["r_train"]
        assert entry["formatting"] == "sharegpt"
        assert entry["columns"] == {"messages": "conversations", "tools": "tools"}
        assert len(entry["tags"]) == 7

    def test_shards_are_a_folder(self, tmp_path: Path) -> None:
        source = make_run(tmp_path, *[call_record(f"{n}.") for n in range(4)])
        directory, _ = export_to_dataset(source, formats="llamafactory", shard_mb=0.003)
        info = json.loads((directory / "llamafactory" / "dataset_info.json").read_bytes())
        assert {k: v["file_name"] for k, v in info.items()} == {"r_train": "train"}
        shards = sorted((directory / "llamafactory" / "train").iterdir())
        assert len(shards) > 1
        assert sum(len(lines(path)) for path in shards) == 4


class TestAtif:
    def test_steps_are_messages_and_turns_with_what_they_cost(self, tmp_path: Path) -> None:
        usage = {"input_tokens": 7, "output_tokens": 3, "cache_read_tokens": None}
        turn = {
            "usage": usage,
            "finish_reason": "stop",
            "started_at": 0.0,
            "duration_s": 1.0,
            "cost_usd": None,
        }
        record = call_record(versions={"batch-trajectories": "1.2"}, turns=[turn, turn])
        (document,) = rows(make_run(tmp_path, record), "atif")
        assert document["schema_version"] == "ATIF-v1.8"
        assert document["agent"]["version"] == "1.2"
        assert document["agent"]["tool_definitions"] == [TEMP]
        assert [step["step_id"] for step in document["steps"]] == [1, 2, 3, 4]
        assert [step["source"] for step in document["steps"]] == ["system", "user", *["agent"] * 2]
        assert document["steps"][2] == {
            "step_id": 3,
            "source": "agent",
            "message": "Looking.",
            "timestamp": "1970-01-01T00:00:00+00:00",
            "reasoning_content": "Which city?",
            "tool_calls": [
                {
                    "tool_call_id": "c1",
                    "function_name": "temp",
                    "arguments": {"city": "Oslo", "n": 1.5},
                }
            ],
            "observation": {"results": [{"source_call_id": "c1", "content": '{"c": 9}'}]},
            "llm_call_count": 1,
            "metrics": {"prompt_tokens": 7, "completion_tokens": 3},
        }
        assert document["final_metrics"] == {"total_prompt_tokens": 10, "total_steps": 4}

    def test_failed_calls_and_given_turns_are_marked(self) -> None:
        record = record_of(
            user(),
            assistant("Earlier."),
            user("More."),
            assistant("", call()),
            result("no", is_error=True),
            assistant("Hi."),
        )
        record["turns"] = record["turns"][1:]
        steps = written_row(record, "atif")["steps"]
        assert [step.get("is_copied_context") for step in steps] == [None, True, None, None, None]
        assert steps[3]["observation"]["results"][0]["extra"] == {"is_error": True}
        assert "metrics" not in steps[1]

    def test_a_paused_turn_is_one_step_of_several_calls_of_the_model(self) -> None:
        record = record_of(user(), assistant("One,"), assistant("two."))
        for turn, tokens in zip(record["turns"], (3, 4), strict=True):
            turn["usage"] = {"input_tokens": tokens, "output_tokens": None}
        step = written_row(record, "atif")["steps"][1]
        assert (step["llm_call_count"], step["metrics"]) == (2, {"prompt_tokens": 7})

    def test_an_answer_by_a_call_is_a_step_that_cost_nothing_of_its_own(self) -> None:
        record = ended_by(assistant("", call(id="c2"), final("14")))
        for turn, started_at in zip(record["turns"], (10.0, 20.0), strict=True):
            turn["started_at"] = started_at
        steps = written_row(record, "atif")["steps"]
        assert [step.get("llm_call_count") for step in steps] == [None, 1, 1, None]
        assert steps[2]["timestamp"].endswith("00:00:20+00:00")
        assert steps[-1]["message"] == "14"

    def test_subagents_are_documents_that_their_calls_refer_to(self) -> None:
        record = record_of(
            user(),
            assistant("", call(id="a"), call(id="b"), call(id="c")),
            result("4", id="a"),
            result("no", id="b"),
            result("5", id="c"),
            assistant("Done."),
        )
        deep = _inner("c9", "deepest", user("Deep."), assistant("Deeper."))
        good = _inner(
            "a",
            "helper",
            {"role": "system", "content": "Help."},
            user("Do."),
            assistant("", call(id="c9"), reasoning="Hm."),
            result("6", id="c9"),
            assistant("4"),
            inner=[deep],
        )
        broken = _inner("b", "helper", user("Do."), assistant("", call("{not", id="x")))
        silent = _inner("c", "helper", user("Do."))
        stage = _inner("preparation#1", "preparation", user("Look."), assistant("x := 1"))
        record["inner"] = [stage, good, broken, silent]
        document = written_row(record, "atif")
        results = document["steps"][1]["observation"]["results"]
        assert [one.get("subagent_trajectory_ref") for one in results] == [
            [{"trajectory_id": "row-1-0/a"}],
            None,
            None,
        ]
        first, second = document["subagent_trajectories"]
        assert first["trajectory_id"] == "row-1-0/preparation#1"
        assert second["trajectory_id"] == "row-1-0/a"
        assert second["session_id"] == document["session_id"] == "row-1-0"
        assert second["agent"]["name"] == "helper"
        assert [step["source"] for step in second["steps"]] == ["system", "user", "agent", "agent"]
        assert second["steps"][2]["reasoning_content"] == "Hm."
        (deepest,) = second["subagent_trajectories"]
        (answered,) = second["steps"][2]["observation"]["results"]
        assert answered["subagent_trajectory_ref"] == [{"trajectory_id": deepest["trajectory_id"]}]
        assert deepest["trajectory_id"] == "row-1-0/a/c9"
        assert "include" in document["notes"]
        left_out = {one["key"]: one["reason"] for one in document["extra"]["subagents_left_out"]}
        assert left_out.keys() == {"b", "c"}
        assert left_out["b"].startswith("arguments_not_json: ")
        assert left_out["c"].startswith("no_reply: ")
        training_row = written_row(record, "atif", reasoning="none")["subagent_trajectories"][1]
        assert "reasoning_content" not in training_row["steps"][2]

    def test_atif_has_no_document_of_a_simulated_user(self) -> None:
        """What it wrote are user messages: as an agent's steps they would be trained on."""
        said = _inner("simulated_user#1", "simulated_user", user("Hi."), assistant("More."))
        document = written_row(call_record(inner=[said]), "atif")
        assert "subagent_trajectories" not in document
        assert "More." not in json.dumps(document)


def _inner(
    key: str, name: str, *messages: dict[str, Any], inner: list[Any] | None = None
) -> dict[str, Any]:
    """The conversation of a subagent, as a record holds it."""
    made = record_of(*messages)
    kept = ("messages", "turns", "usage", "model_returned", "api_calls", "resumes")
    members = {name: made[name] for name in kept}
    return {"key": key, "name": name, **members, "inner": inner or [], "cost_usd": None}


class TestRewards:
    @pytest.mark.parametrize(
        ("check", "reward", "has_passed"),
        [
            ({"passed": True, "reward": 0.2}, 0.2, True),
            ({"passed": False}, 0.0, False),
            ({"passed": True, "reward": None}, 1.0, True),
            ({"reward": 0.7}, 0.7, True),
            ({"reward": float("nan"), "passed": False}, 0.0, False),
            ({}, None, None),
            (None, None, None),
        ],
    )
    def test_come_from_the_check(self, check: Any, reward: Any, has_passed: Any) -> None:
        record = call_record(check=check)
        assert judge_record(to_record(record)).reward == reward
        assert judge_record(to_record(record)).is_good(0.5) is has_passed

    @pytest.mark.parametrize(
        ("changes", "reward"),
        [
            ({"status": "completed"}, 1.0),
            ({"status": "errors", "status_reason": "not the expected answer in 3 attempts"}, 0.0),
            ({"status": "max_turns", "notes": [{"turn": 1, "reason": "expected"}]}, 0.0),
            ({"status": "max_turns"}, 0.0),
            ({"status": "length"}, 0.0),
            ({"status": "failed"}, None),
            ({"status": "cancelled"}, None),
            ({"status": "user_context_exceeded"}, None),
            ({"status": "completed", "options": {}}, None),
            ({"status": "completed", "row": {"prompt": "Go."}}, None),
        ],
    )
    def test_else_from_the_expected_answer(self, changes: Any, reward: Any) -> None:
        told = {"options": {"check_expected": True}, "row": {"prompt": "Go.", "expected": "7"}}
        assert judge_record(to_record(call_record(**(told | changes)))).reward == reward

    def test_are_in_the_metadata(self) -> None:
        assert json.loads(written_row(judged_record(0.25, "Hi."))["metadata"])["reward"] == 0.25
        assert "reward" not in json.loads(written_row(call_record())["metadata"])


class TestPreferences:
    def test_the_sides_of_a_pair_differ(self, tmp_path: Path) -> None:
        """The only difference of two samples may be what a style leaves out."""

        def sample(reward: float, reasoning: str, answer: str = "Yes.") -> dict[str, Any]:
            check = {"passed": reward > 0.5, "reward": reward}
            message = assistant("", call(id=f"c{reward}"), reasoning=reasoning)
            told = result("r", id=f"c{reward}")
            return record_of(user(), message, told, assistant(answer), check=check)

        source = make_run(tmp_path, sample(1.0, "so"), sample(0.0, "or so"), samples=2)
        (pair,) = rows(source, "dpo")
        assert pair["chosen"] != pair["rejected"]
        assert rejects(source, formats="dpo", reasoning="none") == {
            "t0": "no_pair",
            "t0#s1": "no_pair",
        }
        more = (sample(1.0, "so"), sample(0.0, "or so"), sample(0.5, "", "No."))
        (pair,) = rows(make_run(tmp_path, *more, samples=3), "dpo", reasoning="none")
        assert (pair["chosen"][-1]["content"], pair["rejected"][-1]["content"]) == ("Yes.", "No.")

    def test_a_pair_is_the_best_and_the_worst_sample_of_a_prompt(self, tmp_path: Path) -> None:
        records = [
            judged_record(0.5, "B"),
            judged_record(1.0, "A"),
            judged_record(0.0, "C"),
            judged_record(None, "D"),
        ]
        source = make_run(tmp_path, *records, samples=4)
        (pair,) = rows(source, "dpo")
        assert pair["id"] == "t0"
        assert [m["role"] for m in pair["prompt"]] == ["system", "user"]
        answers = [pair[side][-1]["content"] for side in ("chosen", "rejected")]
        assert answers == ["A", "C"]
        assert pair["chosen"][0]["tool_calls"][0]["function"]["arguments"] == {
            "city": "Oslo",
            "n": 1.5,
        }
        assert rejects(source, formats="dpo") == {"t0": "no_pair", "t0#s3": "no_reward"}
        _, manifest = export_to_dataset(source, formats="dpo")
        (part,) = manifest["formats"]
        assert (part["rows"], part["used"], part["rejected"]) == (1, 2, 2)

    def test_equal_rewards_and_single_samples_make_none(self, tmp_path: Path) -> None:
        records = [
            judged_record(1.0, "A"),
            judged_record(1.0, "B"),
            judged_record(1.0, "C"),
            judged_record(0.9, "D"),
        ]
        source = make_run(tmp_path, *records, samples=2)
        assert [pair["id"] for pair in rows(source, "dpo")] == ["t1"]
        assert rows(source, "dpo", preference={"min_margin": 0.2}) == []

    def test_samples_that_were_offered_other_tools_are_not_compared(self, tmp_path: Path) -> None:
        other = {**judged_record(0.0, "B"), "tools": [TEMP, TEMP]}
        source = make_run(tmp_path, judged_record(1.0, "A"), other, samples=2)
        assert rows(source, "dpo") == []
        groups = [
            judged_record(0.8, "C"),
            other,
            judged_record(0.3, "D"),
            {**other, **judged_record(0.9, "E")},
        ]
        groups[3]["tools"] = other["tools"]
        (pair,) = rows(make_run(tmp_path, *groups, samples=4), "dpo")
        assert [pair[side][-1]["content"] for side in ("chosen", "rejected")] == ["E", "B"]
        (pair,) = rows(make_run(tmp_path, judged_record(1.0, "A"), *groups[:3], samples=4), "dpo")
        assert [pair[side][-1]["content"] for side in ("chosen", "rejected")] == ["A", "D"]
        (pair,) = rows(make_run(tmp_path, groups[0], groups[2], groups[3], samples=3), "dpo")
        assert [pair[side][-1]["content"] for side in ("chosen", "rejected")] == ["C", "D"]

    def test_kto_labels_every_judged_sample(self, tmp_path: Path) -> None:
        """The check says whether it passed; else the reward is compared with the threshold."""
        by_reward = call_record("C", check={"reward": 0.4})
        source = make_run(tmp_path, judged_record(1.0, "A"), judged_record(0.0, "B"), by_reward)
        assert [row["label"] for row in rows(source, "kto")] == [True, False, False]
        lenient = rows(source, "kto", preference={"threshold": 0.3})
        assert [row["label"] for row in lenient] == [True, False, True]
        assert lenient[0]["completion"][-1]["content"] == "A"

    def test_the_turns_of_the_prompt_are_not_completion(self, tmp_path: Path) -> None:
        record = record_of(
            user(), assistant("Given."), user("On."), assistant("Own."), check={"reward": 1.0}
        )
        record["turns"] = record["turns"][1:]
        (training_rows,) = rows(make_run(tmp_path, record), "kto")
        assert [m["content"] for m in training_rows["prompt"]] == ["Go.", "Given.", "On."]
        assert [m["content"] for m in training_rows["completion"]] == ["Own."]

    def test_later_user_messages_are_part_of_the_completion(self, tmp_path: Path) -> None:
        record = record_of(
            user(), assistant("A."), user("On."), assistant("B."), check={"reward": 1.0}
        )
        (training_rows,) = rows(make_run(tmp_path, record), "kto")
        assert [m["content"] for m in training_rows["prompt"]] == ["Go."]
        assert [m["content"] for m in training_rows["completion"]] == ["A.", "On.", "B."]


def test_raw_rows_are_the_records_to_the_byte(tmp_path: Path) -> None:
    """Those that break rules of other formats too."""
    source = make_run(
        tmp_path,
        call_record(),
        record_of(user(), assistant("", call("{")), result("r"), assistant("Hi.")),
    )
    directory, _ = export_to_dataset(source, formats="raw")
    stored = (source.run_dir / "records.jsonl").read_bytes()
    assert (directory / "raw" / "train.jsonl").read_bytes() == stored


class TestParquet:
    def test_twins_hold_the_rows_under_a_plain_schema(self, tmp_path: Path) -> None:
        pq = pytest.importorskip("pyarrow.parquet")
        source = make_run(tmp_path, call_record(), PARALLEL)
        directory, manifest = export_to_dataset(source, formats="hermes,openai,parquet")
        table = pq.read_table(directory / "hermes_parquet" / "train.parquet")
        assert table.to_pylist() == lines(directory / "hermes" / "train.jsonl")
        file = directory / "openai_parquet" / "train.parquet"
        assert pq.ParquetFile(file).metadata.metadata is None
        table = pq.read_table(file)
        (first, _), written = table.to_pylist(), lines(directory / "openai" / "train.jsonl")
        function = first["messages"][2]["tool_calls"][0]["function"]
        assert json.loads(function["arguments"]) == {"city": "Oslo", "n": 1.5}
        assert first["messages"][1]["reasoning_content"] is None
        assert [m["content"] for m in first["messages"]] == [
            m["content"] for m in written[0]["messages"]
        ]
        assert [part["format"] for part in manifest["formats"]] == ["hermes", "openai"]

    def test_rows_beyond_a_batch_and_a_group_are_all_there(self, tmp_path: Path) -> None:
        pq = pytest.importorskip("pyarrow.parquet")
        long = "x" * 400_000
        records = [record_of(user(), assistant(f"{n} {long}")) for n in range(50)]
        directory, _ = export_to_dataset(make_run(tmp_path, *records), formats="openai,parquet")
        file = pq.ParquetFile(directory / "openai_parquet" / "train.parquet")
        assert file.num_row_groups == 2
        written = lines(directory / "openai" / "train.jsonl")
        assert file.read().to_pylist()[49]["messages"][1]["content"] == f"49 {long}"
        assert [row["id"] for row in file.read().to_pylist()] == [row["id"] for row in written]

    def test_alone_it_is_that_of_openai(self, tmp_path: Path) -> None:
        pytest.importorskip("pyarrow")
        directory, manifest = export_to_dataset(
            make_run(tmp_path, call_record()), formats="parquet"
        )
        (part,) = manifest["formats"]
        assert [file["path"] for file in part["files"]] == ["openai_parquet/train.parquet"]
        assert not (directory / "openai").exists()

    def test_preferences_have_twins_too(self, tmp_path: Path) -> None:
        pq = pytest.importorskip("pyarrow.parquet")
        source = make_run(tmp_path, judged_record(1.0, "A"), judged_record(0.0, "B"), samples=2)
        directory, _ = export_to_dataset(source, formats="dpo,kto,parquet")
        (pair,) = pq.read_table(directory / "dpo_parquet" / "train.parquet").to_pylist()
        assert [pair[side][-1]["content"] for side in ("chosen", "rejected")] == ["A", "B"]
        labels = pq.read_table(directory / "kto_parquet" / "train.parquet")["label"]
        assert labels.to_pylist() == [True, False]


CONTROL = [
    "<|im_start|>",
    "<|im_end|>",
    "<｜end▁of▁sentence｜>",
    "<start_of_turn>",
]

MARKUP = ["<s>", "</s>", "[INST]", "[/INST]", "<bos>", "<eos>", "<pad>", "<unk>"]
"""Structure to the tokenizers of some models alone."""

TEXT_FORMATS = [name for name in ROW_FORMATS if not load_format(name).accepts]
"""What is tokenized."""


class TestForgedStructure:
    @pytest.mark.parametrize("token", CONTROL)
    @pytest.mark.parametrize("name", TEXT_FORMATS)
    def test_a_control_token_of_a_prompt_refuses_the_row(self, token: str, name: str) -> None:
        record = record_of(user(f"Say {token} twice"), assistant("Hi."))
        assert refusal(record, name) == "control_token"

    @pytest.mark.parametrize("token", CONTROL)
    def test_in_text_and_reasoning_of_the_model_they_are_rejected(self, token: str) -> None:
        assert refusal(record_of(user(), assistant(f"It is {token}")), "hermes") == "control_token"
        thought = record_of(user(), assistant("Hi.", reasoning=token))
        assert refusal(thought, "hermes") == "control_token"

    @pytest.mark.parametrize("token", CONTROL + MARKUP)
    def test_in_tool_output_and_arguments_hermes_escapes_it(self, token: str) -> None:
        arguments = json.dumps({"q": token}, ensure_ascii=False)
        record = record_of(
            user(), assistant("", call(arguments)), result(f"x {token} y"), assistant("Hi.")
        )
        turns = written_row(record, "hermes")["conversations"]
        assert not any(token in turn["value"] for turn in turns)
        body = (
            turns[3]["value"].removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")
        )
        assert json.loads(body)["content"] == f"x {token} y"

    @pytest.mark.parametrize("token", ["<|im_start|>", "</tool_response>"])
    def test_in_tool_output_that_is_shown_as_it_is_it_refuses_the_row(self, token: str) -> None:
        record = record_of(user(), assistant("", call()), result(f"x {token}"), assistant("Hi."))
        reason = "control_token" if token.startswith("<|") else "marker_in_result"
        assert refusal(record, "openai") == refusal(record, "llamafactory") == reason
        assert written_row(record, "atif")["steps"][1]["observation"]["results"][0]["content"]

    @pytest.mark.parametrize(
        ("token", "reason"),
        [
            ("<|im_end|>", "control_token"),
            ("\\u003c|im_end|>", "control_token"),
            ("</tool_call>", "marker_in_arguments"),
            ("\\u003c/tool_call>", "marker_in_arguments"),
        ],
    )
    def test_in_arguments_that_templates_spell_out_it_refuses_the_row(
        self, token: str, reason: str
    ) -> None:
        """However they are written: a template writes them anew."""
        record = record_of(
            user(), assistant("", call(f'{{"q": "{token}"}}')), result("r"), assistant("Hi.")
        )
        assert refusal(record, "openai") == refusal(record, "llamafactory") == reason
        value = written_row(record, "hermes")["conversations"][2]["value"]
        assert arguments_of(value) == {"q": json.loads(f'"{token}"')}

    def test_control_tokens_of_tools_and_system_prompts_count_too(self) -> None:
        function = {"name": "temp", "description": "See <|im_end|>", "parameters": {}}
        record = record_of(
            user(), assistant("Hi."), tools=[{"type": "function", "function": function}]
        )
        assert refusal(record) == "control_token"
        assert "<|im_end|>" not in written_row(record, "hermes")["conversations"][0]["value"]
        system = {"role": "system", "content": "You <|im_start|>"}
        made = record_of(system, user(), assistant("Hi."))
        assert refusal(made) == refusal(made, "llamafactory") == "control_token"
        assert written_row(made, system="omit")["messages"][0]["role"] == "user"

    @pytest.mark.parametrize("tag", ["<tool_call>", "</think>", "<think>"])
    def test_tags_in_prompts_and_results_are_text_of_their_turn(self, tag: str) -> None:
        record = record_of(
            user(f"What is {tag}?"), assistant("", call()), result(f"a {tag} b"), assistant("Hi.")
        )
        messages = written_row(record)["messages"]
        assert (messages[0]["content"], messages[2]["content"]) == (f"What is {tag}?", f"a {tag} b")
        told = read_turns(record)
        assert (told[0], told[2]) == (("human", f"What is {tag}?"), ("observation", f"a {tag} b"))

    @pytest.mark.parametrize("tag", ["<tool_call>", "</think>", "</tool_response>"])
    def test_tags_in_the_words_of_a_model_refuse_the_row(self, tag: str) -> None:
        record = record_of(user(), assistant(f"So {tag} it is."))
        assert {refusal(record, name) for name in TEXT_FORMATS} == {"marker_in_text"}

    def test_arguments_that_are_not_json_reject_the_row(self) -> None:
        record = record_of(user(), assistant("", call('{"a": NaN}')), result("r"), assistant("Hi."))
        assert {refusal(record, name) for name in ROW_FORMATS} == {"arguments_not_json"}

    def test_lone_surrogates_become_replacement_characters(self) -> None:
        record = record_of(
            user(), assistant("", call('{"q": "\\ud800"}')), result("r"), assistant("Hi.")
        )
        call_made = written_row(record)["messages"][1]["tool_calls"][0]
        assert call_made["function"]["arguments"] == {"q": "\ufffd"}

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
    @given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
    @example("a\x85b\u2028c\u2029d\x0b\x0c\x1c\x1d\x1ee")
    def test_any_text_is_one_line_that_reads_back_or_a_rejection(self, text: str) -> None:
        """U+2028 and the like end no line; what a prompt or a tool says comes back as it was."""
        record = record_of(user(text), assistant("", call()), result(text), assistant("Hi."))
        try:
            line = dumps_row(row_in("openai", to_record(record)))
        except Rejected:
            return
        assert len(line.decode().splitlines()) == 1  # as NeMo AutoModel reads JSON lines
        parsed = json.loads(line)["messages"]
        assert (parsed[0]["content"], parsed[2]["content"]) == (text, text)


def test_all_formats_say_the_same(tmp_path: Path) -> None:
    """The texts of one record are in every format."""
    for name in ROW_FORMATS:
        text = json.dumps(written_row(call_record(), name), ensure_ascii=False)
        for part in ("Go.", "Looking.", "Which city?", "Oslo", "Now I know.", "Done."):
            assert part in text, name


def test_rendering_a_conversation_does_not_change_it() -> None:
    conversation: Conversation = read_conversation(to_record(PARALLEL))
    before = render_messages(conversation, Style())
    for style in (Style(reasoning="none"), Style(parallel_calls="split"), Style(max_tool_chars=1)):
        apply_style(conversation, style)
    assert render_messages(conversation, Style()) == before
