"""Rows of token ids: what was sampled, split where a prompt does not begin with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agent.messages.tokens import SampledTokens, encode_tokens, pack_ids, pack_logprobs
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.export.formats.rl import make_rows
from tests.helpers.builders import assistant, call, record_of, result, user
from tests.helpers.exporting import export_to_dataset, make_run, rejects, rows
from tests.helpers.running import ROOT
from tests.helpers.stored import to_record

JSON = dict[str, Any]
TRAINING = ROOT / "docs" / "training.md"
FIRST = ([1, 2], [3, 4])
SECOND = ([1, 2, 3, 4, 5], [6])
UNNAMED = {"sampled": None, "shown": None}
"""Texts at a split where the record has none."""


def play_record(
    *tokens: tuple[list[int], list[int]] | None, logprobs: bool = True, **changes: Any
) -> JSON:
    """A record with a turn for each prompt and completion; None: a turn without ids."""
    messages = [user()]
    for number in range(1, len(tokens)):
        messages += [assistant("", call("{}", id=f"c{number}")), result("ok", id=f"c{number}")]
    record = record_of(*messages, assistant("Done."), **changes)
    given: list[JSON] = record["turns"]
    assert len(given) == len(tokens)
    for number, (turn, one) in enumerate(zip(given, tokens, strict=True)):
        turn |= {"turn": number + 1, "model": "m-2026"}
        if one is not None:
            prompt, completion = map(pack_ids, one)
            values = [-float(id) for id in one[1]]
            sampled = SampledTokens(prompt, completion, pack_logprobs(values) if logprobs else None)
            turn["tokens"] = encode_tokens(sampled, given[:number])
    return record


def test_one_row_where_each_prompt_begins_with_what_was_sampled() -> None:
    record = play_record(FIRST, SECOND, check={"passed": True, "reward": 0.75})
    assert make_rows(to_record(record)) == [
        {
            "id": record["id"],
            "group_id": record["prompt_id"],
            "sample": record["sample"],
            "segment": 0,
            "segments": 1,
            "split": None,
            "turns": [1, 2],
            "turns_without_ids": [],
            "prompt_ids": [1, 2],
            "response_ids": [3, 4, 5, 6],
            "loss_mask": [1, 1, 0, 1],
            "logprobs": [-3.0, -4.0, 0.0, -6.0],
            "reward": 0.75,
            "status": "completed",
            "finish_reasons": [turn["finish_reason"] for turn in record["turns"]],
            "policy_versions": [turn["model"] for turn in record["turns"]],
            "sampling": [None, None],
        }
    ]


def test_a_row_holds_rewards_by_name_and_those_of_its_turns() -> None:
    score = {"source": "m:f", "version": "1", "error": None, "rewards": {"style": 0.25}}
    by_turn = {"format": [0.0, 0.5, 1.0]}
    drifted = (FIRST, ([1, 2, 3, 9, 5], [6]), ([1, 2, 3, 9, 5, 6, 7], [8]))
    check = {"passed": True, "reward": 0.75}
    record = play_record(*drifted, check=check, scores=[{**score, "turn_rewards": by_turn}])
    first, second = make_rows(to_record(record), "style")
    assert first["reward"] == second["reward"] == 0.25
    assert first["rewards"] == {"reward": 0.75, "style": 0.25}
    assert first["turn_rewards"] == {"format": [0.0]}
    assert second["turn_rewards"] == {"format": [0.5, 1.0]}


def test_a_row_per_segment_where_a_prompt_has_drifted() -> None:
    first, second = make_rows(
        to_record(play_record(FIRST, ([1, 2, 3, 9, 5], [6]), ([1, 2, 3, 9, 5, 6, 7], [8])))
    )
    assert (first["prompt_ids"], first["response_ids"]) == ([1, 2], [3, 4])
    assert (first["segment"], first["segments"], first["split"]) == (0, 2, None)
    assert (second["prompt_ids"], second["response_ids"]) == ([1, 2, 3, 9, 5], [6, 7, 8])
    assert (second["loss_mask"], second["turns"]) == ([1, 0, 1], [2, 3])
    assert second["split"] == {**UNNAMED, "shared": 3, "expected": 4}


def test_a_shorter_prompt_is_a_split_too() -> None:
    assert [row["split"] for row in make_rows(to_record(play_record(FIRST, ([1, 2, 3], [6]))))] == [
        None,
        {**UNNAMED, "shared": 3, "expected": 4},
    ]


def test_a_turn_without_ids_is_context_and_counted() -> None:
    (row,) = make_rows(to_record(play_record(FIRST, None, ([1, 2, 3, 4, 5, 50, 51], [6]))))
    assert row["turns"] == [1, 3]
    assert row["turns_without_ids"] == [2]
    assert row["response_ids"] == [3, 4, 5, 50, 51, 6]
    assert row["loss_mask"] == [1, 1, 0, 0, 0, 1]


def test_there_are_no_logprobs_where_one_turn_has_none() -> None:
    record = play_record(FIRST, SECOND)
    del record["turns"][1]["tokens"]["logprobs"]
    (row,) = make_rows(to_record(record))
    assert row["logprobs"] is None
    assert row["loss_mask"] == [1, 1, 0, 1]


def test_turns_of_a_parent_are_context() -> None:
    record = play_record(FIRST, SECOND)
    record["turns"][0]["inherited"] = True
    (row,) = make_rows(to_record(record))
    assert row["prompt_ids"] == [1, 2, 3, 4, 5]
    assert (row["response_ids"], row["loss_mask"], row["turns"]) == ([6], [1], [2])


def test_the_version_of_the_weights_wins_over_the_name_of_the_model() -> None:
    record = play_record(FIRST, SECOND)
    record["turns"][1]["extra"] = {"choice": {"meta_info": {"weight_version": 12}}}
    (row,) = make_rows(to_record(record))
    assert row["policy_versions"] == [record["turns"][0]["model"], "12"]


def test_logprobs_are_those_of_the_record_to_the_last_bit() -> None:
    record = play_record(FIRST)
    packed = pack_logprobs([-0.1, -1e-7])
    record["turns"][0]["tokens"] = encode_tokens(
        SampledTokens(pack_ids([1]), pack_ids([2, 3]), packed), []
    )
    (row,) = make_rows(to_record(record))
    assert pack_logprobs(row["logprobs"]) == packed
    assert row["logprobs"] == [-0.100000001, -1.00000001e-07]


def test_the_reward_is_the_one_that_the_recipe_names(tmp_path: Path) -> None:
    check = {"passed": True, "reward": 1.0, "rewards": {"style": 0.25}}
    source = make_run(tmp_path, play_record(FIRST, check=check))
    assert [row["reward"] for row in rows(source, "rl", reward_name="style")] == [0.25]


def test_a_record_without_ids_is_rejected_and_counted(tmp_path: Path) -> None:
    source = make_run(tmp_path, play_record(None, None), play_record(FIRST, SECOND))
    assert rejects(source, formats="rl") == {"t0": "no_token_ids"}
    _, manifest = export_to_dataset(source, formats="rl")
    (part,) = manifest["formats"]
    assert (part["rows"], part["used"], part["rejected"]) == (1, 1, 1)


def test_the_manifest_counts_splits_and_turns_without_ids(tmp_path: Path) -> None:
    drifted = play_record(FIRST, ([1, 9], [6]), None)
    _, manifest = export_to_dataset(
        make_run(tmp_path, drifted, play_record(FIRST, SECOND)), formats="rl"
    )
    (part,) = manifest["formats"]
    assert (part["rows"], part["used"]) == (3, 2)
    assert (part["split"], part["turns_without_ids"]) == (1, 1)


def test_the_texts_at_splits_are_in_rows_and_counted(tmp_path: Path) -> None:
    texts = {"sampled": "\n\nx", "shown": "\nx"}
    drifted = play_record(FIRST, ([1, 9], [6]))
    drifted["turns"][1]["tokens"]["split"] = texts
    _, row = make_rows(to_record(drifted))
    assert row["split"] == {"shared": 1, "expected": 4, **texts}
    _, manifest = export_to_dataset(
        make_run(tmp_path, drifted, play_record(FIRST, ([7], [8]))), formats="rl"
    )
    (part,) = manifest["formats"]
    assert (part["split"], part["split_texts"]) == (2, [{**texts, "rows": 1}])


def test_a_branch_whose_first_own_turn_is_split_counts(tmp_path: Path) -> None:
    """The segment before is its parent's, and no row of its own."""
    branch = play_record(FIRST, ([1, 9], [6]))
    branch["turns"][0]["inherited"] = True
    (row,) = make_rows(to_record(branch))
    assert (row["segment"], row["split"]["shared"]) == (0, 1)
    (part,) = export_to_dataset(make_run(tmp_path, branch), formats="rl")[1]["formats"]
    assert (part["rows"], part["split"]) == (1, 1)


def with_discarded(**changes: Any) -> JSON:
    """A record whose second turn was asked for three times; one reply came without its ids."""
    record = play_record(FIRST, SECOND, check={"passed": True, "reward": 0.75}, **changes)
    for why, ids in (("blank", [70]), ("unreadable", None), ("bad_arguments", [80, 81])):
        reply = {**record["turns"][1], "message": assistant(""), "discarded": why}
        del reply["tokens"]
        if ids is not None:
            logprobs = pack_logprobs([-1.5] * len(ids))
            sampled = SampledTokens(pack_ids([1, 2, 3, 4, 5]), pack_ids(ids), logprobs)
            reply["tokens"] = encode_tokens(sampled, record["turns"][:1])
        record.setdefault("discarded", []).append(reply)
    return record


def test_discarded_replies_are_samples_of_their_own() -> None:
    record = with_discarded()
    assert len(make_rows(to_record(record))) == 1
    whole, *others = make_rows(to_record(record), discarded=True)
    assert (whole["discarded"], whole["reward"]) == (None, 0.75)
    assert [row["discarded"] for row in others] == ["blank", "bad_arguments"]
    for number, (row, ids) in enumerate(zip(others, ([70], [80, 81]), strict=True), 1):
        assert row["id"] == f"{record['id']}#discarded{number}"
        assert (row["group_id"], row["reward"]) == (record["prompt_id"], None)
        assert (row["prompt_ids"], row["response_ids"]) == ([1, 2, 3, 4, 5], ids)
        assert (row["loss_mask"], row["logprobs"]) == ([1] * len(ids), [-1.5] * len(ids))
        assert (row["turns"], row["segments"], row["split"]) == ([2], 1, None)
        assert row.keys() == whole.keys()


def test_discarded_replies_of_a_conversation_that_began_again_are_no_samples() -> None:
    """The turns that they follow are gone."""
    record = with_discarded()
    lost = {**record["discarded"][0], "discarded": "workspace_lost"}
    record["discarded"].insert(2, lost)
    assert [row["discarded"] for row in make_rows(to_record(record), discarded=True)] == [
        None,
        "bad_arguments",
    ]


def test_discarded_replies_are_counted_and_written_by_choice(tmp_path: Path) -> None:
    source = make_run(tmp_path, with_discarded(), play_record(FIRST))
    for chosen, count in ((False, 2), (True, 4)):
        (part,) = export_to_dataset(source, formats="rl", discarded=chosen)[1]["formats"]
        assert (part["rows"], part["used"], part["discarded_replies"]) == (count, 2, 2)
    with pytest.raises(ValueError, match="discarded: only rl has rows"):
        export_to_dataset(source, formats="openai", discarded=True)


def with_subagents(**changes: Any) -> JSON:
    """A record with two subagents, one of which has one, a stage, and one of another model."""

    def inner(name: str, key: str, *tokens: Any, **more: Any) -> JSON:
        return {**play_record(*tokens), "name": name, "key": key, **more}

    nested = inner("reader", "n1", ([70], [71]))
    first = inner("searcher", "c1", ([50, 51], [52]), ([50, 51, 52, 53], [54]), inner=[nested])
    second = inner("searcher", "c2", ([60], [61]), ([60, 99], [62]))
    other = inner("reader", "c3", ([80], [81]))
    other["turns"][0]["model"] = "another"
    stages = [
        inner(name, f"{name}#1", ([90], [91]))
        for name in ("preparation", "summary", "simulated_user")
    ]
    record = play_record(FIRST, SECOND, **changes)
    return {**record, "inner": [*stages, first, second, other, inner("reader", "c4", None)]}


def test_conversations_of_subagents_are_trajectories_of_their_own() -> None:
    score = {"source": "m:f", "version": "1", "error": None, "rewards": {"style": 0.25}}
    check = {"passed": True, "reward": 0.75}
    record = with_subagents(check=check, scores=[{**score, "turn_rewards": {"format": [0.0, 1.0]}}])
    assert [row.keys() & {"thread", "thread_id"} for row in make_rows(to_record(record))] == [set()]
    training_rows = make_rows(to_record(record), subagents=True)
    threads = [
        (row["thread"], row["thread_id"], row["segment"], row["segments"]) for row in training_rows
    ]
    assert threads == [
        ("main", None, 0, 1),
        ("searcher", "c1", 0, 1),
        ("reader", "n1", 0, 1),
        ("searcher", "c2", 0, 2),
        ("searcher", "c2", 1, 2),
    ]
    for key in ("id", "group_id", "sample", "status", "reward", "rewards"):
        assert len({str(row[key]) for row in training_rows}) == 1
    assert training_rows[1]["prompt_ids"] == [50, 51]
    assert (training_rows[1]["response_ids"], training_rows[1]["loss_mask"]) == (
        [52, 53, 54],
        [1, 0, 1],
    )
    assert (training_rows[1]["turns"], training_rows[4]["turns"]) == ([1, 2], [2])
    by_turn = [row.get("turn_rewards") for row in training_rows]
    assert by_turn == [{"format": [0.0, 1.0]}, None, None, None, None], "those are of main turns"


def test_rows_of_subagents_are_asked_for_and_counted(tmp_path: Path) -> None:
    source = make_run(tmp_path, with_subagents(), play_record(FIRST))
    (part,) = export_to_dataset(source, formats="rl")[1]["formats"]
    assert (part["rows"], part["used"], part["split"]) == (2, 2, 0)
    assert "subagents_left_out" not in part
    _, manifest = export_to_dataset(source, formats="rl", subagents=True)
    (part,) = manifest["formats"]
    assert (part["rows"], part["used"], part["split"]) == (6, 2, 1)
    assert part["subagents_left_out"] == 2
    with pytest.raises(ValueError, match="subagents: only rl has rows"):
        export_to_dataset(source, formats="openai", subagents=True)


def test_damaged_tokens_are_a_reason(tmp_path: Path) -> None:
    record = play_record(FIRST)
    record["turns"][0]["tokens"]["shared"] = 7
    assert rejects(make_run(tmp_path, record), formats="rl") == {"t0": "no_token_ids"}


def test_failures_and_equal_samples_are_rows(tmp_path: Path) -> None:
    """A group of samples is whole, unless the recipe says otherwise."""
    records = [
        play_record(FIRST, SECOND),
        play_record(FIRST, SECOND),
        play_record(FIRST, SECOND, status="max_turns"),
    ]
    source = make_run(tmp_path, *records, samples=3)
    training_rows = rows(source, "rl", filters={})
    assert [(row["group_id"], row["sample"]) for row in training_rows] == [
        ("t0", 0),
        ("t0", 1),
        ("t0", 2),
    ]
    assert len(rows(source, "rl", filters={"status": ["completed"]})) == 2
    assert len(rows(source, "rl", filters={"exact_duplicates": True})) == 1


def test_other_formats_keep_their_defaults(tmp_path: Path) -> None:
    source = make_run(tmp_path, play_record(FIRST), play_record(FIRST, status="max_turns"))
    _, manifest = export_to_dataset(source, formats="rl,openai")
    assert manifest["selected"] == 1


def test_texts_that_break_other_formats_do_not_matter(tmp_path: Path) -> None:
    record = play_record(FIRST)
    record["messages"][-1]["content"] = "<think>never closed"
    assert len(rows(make_run(tmp_path, record), "rl")) == 1


@pytest.mark.parametrize("api", ["anthropic_messages", "openai_responses"])
def test_an_api_without_ids_is_refused(api: str, tmp_path: Path) -> None:
    from batch_trajectories.basics.errors import ConfigError
    from batch_trajectories.config.models import set_up_models

    config = RunConfig.model_validate(
        {
            "dataset_file": tmp_path / "p",
            "run_name": "r",
            "model": "m",
            "api": api,
            "base_url": "http://127.0.0.1:1",
            "token_ids": True,
            "enabled_toolsets": "none",
        }
    )
    with pytest.raises(ConfigError, match=f"token_ids: no reply of the API {api} has token ids"):
        set_up_models(config)


def documented_functions() -> JSON:
    """The functions of docs/training.md."""
    blocks = re.findall(r"```python\n# rl.py\n(.*?)```", TRAINING.read_text(), re.DOTALL)
    names: JSON = {}
    exec(blocks[0], names)
    return names


@pytest.fixture
def exported_rows(tmp_path: Path) -> tuple[list[JSON], JSON]:
    """Rows of two samples of one prompt and one of another, and the functions for trainers."""
    check = {"passed": True, "reward": 0.5}
    records = [
        play_record(FIRST, SECOND, check=check),
        play_record(FIRST, ([1, 9], [6]), check=check),
        play_record(FIRST, check=check),
        play_record(SECOND, check=check),
    ]
    directory, _ = export_to_dataset(
        make_run(tmp_path, *records, samples=2), formats="rl", filters={}
    )
    functions = documented_functions()
    return functions["rows"](directory / "rl" / "train.jsonl"), functions


def test_what_verl_reads(exported_rows: tuple[list[JSON], JSON]) -> None:
    rows, functions = exported_rows
    for row in rows:
        read = functions["to_verl"](row)
        assert len(read["response_ids"]) == len(read["response_mask"]) > 0
        assert len(read["response_logprobs"]) == len(read["response_ids"])
        assert (read["reward_score"], read["extra_fields"]) == (0.5, {"uid": row["group_id"]})
    assert [functions["to_verl"](row)["num_turns"] for row in rows] == [2, 1, 1, 1, 1]


def test_what_prime_rl_reads(exported_rows: tuple[list[JSON], JSON]) -> None:
    """Its arrays have one length, and there are logprobs where the mask is set."""
    rows, functions = exported_rows
    read = [functions["to_prime_rl"](row) for row in rows]
    assert read[0] == {
        "token_ids": [1, 2, 3, 4, 5, 6],
        "mask": [False, False, True, True, False, True],
        "logprobs": [0.0, 0.0, -3.0, -4.0, 0.0, -6.0],
    }
    for sample in read:
        assert len({len(array) for array in sample.values()}) == 1


def test_what_skyrl_reads(exported_rows: tuple[list[JSON], JSON]) -> None:
    """Lists of one length; beside each response a mask and logprobs of its length."""
    rows, functions = exported_rows
    read = functions["to_skyrl"](rows)
    lists = [value for value in read.values() if value is not None]
    assert {len(value) for value in lists} == {len(rows)}
    for key in ("loss_masks", "rollout_logprobs"):
        assert list(map(len, read[key])) == list(map(len, read["response_ids"]))
    assert read["is_last_step"] == [True, False, True, True, True]


def test_what_slime_reads(exported_rows: tuple[list[JSON], JSON]) -> None:
    """A mask and logprobs for the response, which ends the tokens; groups are numbers."""
    rows, functions = exported_rows
    read = functions["to_slime"](rows)
    assert [sample["group_index"] for sample in read] == [0, 0, 0, 1, 1]
    assert [sample["rollout_id"] for sample in read] == [0, 1, 1, 2, 3]
    for sample, row in zip(read, rows, strict=True):
        assert sample["tokens"][-sample["response_length"] :] == row["response_ids"]
        assert len(sample["loss_mask"]) == sample["response_length"]
        assert len(sample["rollout_log_probs"]) == sample["response_length"]
        assert sample["status"] == "completed"
