"""Rewards by name in exports: filters, preferences and metadata, whoever gave them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from batch_trajectories.basics.errors import ConfigError, RunDirError
from batch_trajectories.export.dataset.runs import Source
from batch_trajectories.export.rows.recipe import load_recipe
from batch_trajectories.records.files import add_checksum
from batch_trajectories.records.reader import stored_records
from batch_trajectories.records.scores import read_scores, score_key
from tests.helpers.exporting import call_record, judged_record, make_run, rejects, rows
from tests.helpers.running import run


def score(**more: Any) -> dict[str, Any]:
    return {"source": "m:f", "version": "1", "error": None, "rewards": {}, **more}


def add_scores(source: Source, *scores: dict[str, Any] | None) -> Path:
    """Append a score for each record, in order; None: the record gets none."""
    path = source.run_dir / "scores.jsonl"
    with path.open("ab") as file:
        for stored, given in zip(stored_records(source.run_dir), scores, strict=True):
            if given is not None:
                line = {"record": score_key(stored), "id": stored.id, **given}
                file.write(add_checksum(orjson.dumps(line)))
    return path


def metadata(row: dict[str, Any]) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(row["metadata"])
    return {key: parsed[key] for key in ("reward", "rewards", "turn_rewards") if key in parsed}


class TestMetadata:
    def test_holds_all_rewards_by_name(self, tmp_path: Path) -> None:
        check = {"passed": True, "reward": 1.0, "rewards": {"reward": 1.0, "style": 0.5}}
        own = score(rewards={"f": 2.0}, turn_rewards={"f": [0.0, 1.0]})
        source = make_run(
            tmp_path, call_record(check=check, scores=[own]), judged_record(0.5, "b"), call_record()
        )
        given = [metadata(row) for row in rows(source, "openai")]
        assert given == [
            {
                "reward": 1.0,
                "rewards": {"reward": 1.0, "style": 0.5, "f": 2.0},
                "turn_rewards": {"f": [0.0, 1.0]},
            },
            {"reward": 0.5},
            {},
        ]

    @pytest.mark.parametrize("name", ["hermes", "llamafactory", "openai", "kto"])
    def test_holds_scores_given_after_the_run(self, tmp_path: Path, name: str) -> None:
        source = make_run(tmp_path, call_record())
        add_scores(source, score(rewards={"f": 0.75}))
        (row,) = rows(source, name)
        assert metadata(row) == {"reward": 0.75, "rewards": {"f": 0.75}}

    def test_of_atif_holds_them_too(self, tmp_path: Path) -> None:
        source = make_run(tmp_path, call_record())
        add_scores(source, score(rewards={"f": 0.75}))
        (document,) = rows(source, "atif")
        assert document["extra"]["rewards"] == {"f": 0.75}

    def test_of_the_plain_path_with_long_integers(self, tmp_path: Path) -> None:
        """Such records are read twice, and their scores must survive that."""
        source = make_run(tmp_path, call_record(), prompts=[{"prompt": "x", "big": 2**70}])
        add_scores(source, score(rewards={"f": 0.75}))
        (row,) = rows(source, "hermes", filters={})
        assert metadata(row) == {"reward": 0.75, "rewards": {"f": 0.75}}


class TestScores:
    def test_the_last_of_a_source_counts(self, tmp_path: Path) -> None:
        record = call_record(
            scores=[score(rewards={"f": 1.0}), score(source="m:g", rewards={"g": 1.0})]
        )
        source = make_run(tmp_path, record)
        add_scores(source, score(rewards={"f": 2.0}))
        add_scores(source, score(rewards={"f": 3.0}, version="2"))
        (stored,) = stored_records(source.run_dir)
        assert [found.rewards for found in stored.scores or ()] == [{"g": 1.0}, {"f": 3.0}]

    def test_are_of_one_record_not_of_its_task(self, tmp_path: Path) -> None:
        """A task that ran again has a record that nothing has scored."""
        source = make_run(tmp_path, call_record(finished_at=1.5))
        add_scores(source, score(rewards={"f": 2.0}))
        assert metadata(rows(source, "openai")[0]) == {"reward": 2.0, "rewards": {"f": 2.0}}
        source = make_run(tmp_path, call_record(finished_at=2.5))
        assert metadata(rows(source, "openai")[0]) == {}

    def test_a_damaged_line_is_named_and_can_be_set_aside(self, tmp_path: Path) -> None:
        source = make_run(tmp_path, call_record(), call_record())
        path = add_scores(source, score(rewards={"f": 2.0}), score(rewards={"f": 3.0}))
        path.write_bytes(path.read_bytes().replace(b'"f":2', b'"f":4'))
        with pytest.raises(RunDirError, match=r"scores\.jsonl:1: not a score"):
            list(stored_records(source.run_dir))
        done = run(tmp_path, "verify", source.run_dir)
        assert done.returncode == 6
        assert "scores.jsonl:1: not a score" in done.stdout
        run(tmp_path, "verify", source.run_dir, "--repair")
        assert [line["rewards"] for _, line in read_scores(path)] == [{"f": 3.0}]

    def test_an_unfinished_line_does_not_count(self, tmp_path: Path) -> None:
        source = make_run(tmp_path, call_record())
        path = add_scores(source, score(rewards={"f": 2.0}))
        path.write_bytes(path.read_bytes()[:-5])
        assert next(stored_records(source.run_dir)).scores is None


class TestFilters:
    def make(self, folder: Path) -> Source:
        """Two samples of a prompt; which is better depends on the reward."""
        check = {"passed": True, "reward": 1.0}
        source = make_run(
            folder,
            call_record("a", check=check),
            call_record("b", check=check | {"reward": 0.5}),
            samples=2,
        )
        add_scores(source, score(rewards={"style": 0.1}), score(rewards={"style": 0.9}))
        return source

    @pytest.mark.parametrize(
        ("filters", "left_out"),
        [
            ({"min_rewards": {"style": 0.5}}, {"t0#0": "min_rewards"}),
            ({"max_rewards": {"style": 0.5}}, {"t0#1": "max_rewards"}),
            ({"min_rewards": {"reward": 0.75}}, {"t0#1": "min_rewards"}),
            ({"min_rewards": {"none": 0}}, {"t0#0": "min_rewards", "t0#1": "min_rewards"}),
            ({"min_reward": 0.75}, {"t0#1": "min_reward"}),
            ({"best_n": 1}, {"t0#1": "best_n"}),
        ],
    )
    def test_know_rewards_by_name(
        self, tmp_path: Path, filters: dict[str, Any], left_out: dict[str, str]
    ) -> None:
        source = self.make(tmp_path)
        filters = {"exact_duplicates": False, **filters}
        reasons = rejects(source, formats="openai", filters=filters)
        assert list(reasons.values()) == list(left_out.values())
        assert [id[-1] for id in reasons] == [id[-1] for id in left_out]

    @pytest.mark.parametrize(
        ("filters", "kept"), [({"min_reward": 0.75}, ["b"]), ({"best_n": 1}, ["b"])]
    )
    def test_use_the_named_reward(
        self, tmp_path: Path, filters: dict[str, Any], kept: list[str]
    ) -> None:
        source = self.make(tmp_path)
        filters = {"exact_duplicates": False, **filters}
        exported = rows(source, "openai", reward_name="style", filters=filters)
        assert [row["messages"][-1]["content"] for row in exported] == kept

    def test_pairs_and_labels_use_the_named_reward(self, tmp_path: Path) -> None:
        source = self.make(tmp_path)
        (pair,) = rows(source, "dpo")
        assert pair["chosen"][-1]["content"] == "a"
        (pair,) = rows(source, "dpo", reward_name="style")
        assert pair["chosen"][-1]["content"] == "b"
        assert [row["label"] for row in rows(source, "kto")] == [True, True]
        assert [row["label"] for row in rows(source, "kto", reward_name="style")] == [False, True]

    def test_a_name_that_nothing_has_leaves_all_out(self, tmp_path: Path) -> None:
        source = self.make(tmp_path)
        reasons = rejects(source, formats="dpo", reward_name="none")
        assert set(reasons.values()) == {"no_reward"}

    def test_wrong_values_are_named_with_file_and_field(self, tmp_path: Path) -> None:
        recipe = tmp_path / "r.yaml"
        recipe.write_text("filters:\n  min_rewards: {style: high}\n")
        with pytest.raises(ConfigError, match=r"r\.yaml:2: filters\.min_rewards\.style: .*high"):
            load_recipe(recipe, {})
