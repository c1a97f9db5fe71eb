"""The format `prompts`: a row per prompt, for trainers that make their own rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from batch_trajectories.export.dataset.checking import find_problems
from batch_trajectories.export.dataset.runs import Source
from tests.helpers.builders import assistant, call, record_of, result, user
from tests.helpers.exporting import export_to_dataset, make_run, rejects


def record_with_prompt(text: str, reward: float | None, **changes: Any) -> dict[str, Any]:
    check = None if reward is None else {"passed": reward > 0, "reward": reward}
    system = {"role": "system", "content": "Be brief."}
    return record_of(system, user(text), assistant("\n\nA."), check=check, **changes)


def prompts_of(source: Source, **recipe: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    directory, manifest = export_to_dataset(source, formats="prompts", filters={}, **recipe)
    table = pq.read_table(directory / "prompts" / "train.parquet")
    (part,) = manifest["formats"]
    return table.to_pylist(), part


def test_a_prompt_has_one_row_in_the_columns_of_verl(tmp_path: Path) -> None:
    row = {"prompt": "Q", "expected": 42, "data_source": "sums"}
    prompts = [row, "R"]
    records = [
        record_with_prompt("Q", 1.0),
        record_with_prompt("Q", 0.0, status="max_turns"),
        record_with_prompt("R", None),
        record_with_prompt("R", None),
    ]
    prompt_rows, part = prompts_of(make_run(tmp_path, *records, samples=2, prompts=prompts))
    system = {"role": "system", "content": "Be brief."}
    assert prompt_rows == [
        {
            "prompt": [system, {"role": "user", "content": "Q"}],
            "data_source": "sums",
            "reward_model": {"style": "rule", "ground_truth": "42"},
            "extra_info": {"index": 0, "id": "t0", "samples": 2, "mean_reward": 0.5},
        },
        {
            "prompt": [system, {"role": "user", "content": "R"}],
            "data_source": "r",
            "reward_model": {"style": "rule", "ground_truth": None},
            "extra_info": {"index": 1, "id": "t1", "samples": 2, "mean_reward": None},
        },
    ]
    assert (part["rows"], part["used"]) == (2, 4)


def test_a_prompt_with_calls_is_rejected_by_name(tmp_path: Path) -> None:
    record = record_of(user(), assistant("", call()), result("ok"), assistant("Done."))
    record["turns"] = record["turns"][1:]  # the first reply came with the prompt
    assert rejects(make_run(tmp_path, record), formats="prompts") == {"t0": "not_text"}


def test_a_prompt_with_a_token_of_templates_is_rejected_by_name(tmp_path: Path) -> None:
    source = make_run(tmp_path, record_with_prompt("Hi <|im_start|>system", 1.0))
    assert rejects(source, formats="prompts") == {"t0": "control_token"}


def test_the_file_can_be_checked_and_hides_no_others_from_the_card(tmp_path: Path) -> None:
    source = make_run(tmp_path, record_with_prompt("Q", 1.0), record_with_prompt("R", 1.0))
    directory, _ = export_to_dataset(source, formats="openai,prompts")
    assert [*find_problems(source, directory)] == []
    header = yaml.safe_load((directory / "README.md").read_text().split("---")[1])
    assert [config["config_name"] for config in header["configs"]] == ["openai"]
    assert header["configs"][0]["data_files"][0]["path"] == "openai/train.jsonl"
