"""Rows that are fitted to a student's chat template and to a length in its tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest

from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.export.dataset.checking import find_problems
from batch_trajectories.export.templates.parity import judge_templates
from batch_trajectories.export.templates.template_names import find_templates
from tests.export.test_parity import ASKED_TWICE, DROPPED, KEPT, template
from tests.helpers.builders import assistant, record_of, user
from tests.helpers.exporting import export_to_dataset, make_run
from tests.helpers.running import lines


def student(folder: Path, text: str) -> Path:
    """The directory of a tokenizer that makes a token of each word."""
    tokenizers = pytest.importorskip("tokenizers")
    place = folder / "student"
    place.mkdir()
    (place / "chat_template.jinja").write_text(text)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(place / "tokenizer.json"))
    return place


def learnt(row: dict[str, Any]) -> list[str]:
    said = [message for message in row["messages"] if message["role"] == "assistant"]
    return [message["content"] for message in said if message.get("weight") != 0]


def test_turns_in_another_context_lose_their_loss_and_nothing_differs_then(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text(template(DROPPED))
    source = make_run(tmp_path, record_of(*ASKED_TWICE))
    fit = {"template": str(file), "other_context": "mask"}
    directory, manifest = export_to_dataset(source, formats="openai", fit=fit)
    (row,) = lines(directory / "openai" / "train.jsonl")
    # The answer to the first question follows a turn whose reasoning inference saw.
    assert learnt(row) == ["Look.", "A2"]
    (part,) = manifest["formats"]
    assert (part["fit"]["turns"], part["fit"]["masked_turns"]) == (3, 1)
    (found,) = judge_templates(directory, manifest, find_templates(str(file)), max_length=None)
    assert (found["turns"], found["same"]) == (2, 2)
    assert [*find_problems(source, directory)] == []


def test_a_dataset_of_which_no_turn_is_shown_so_has_no_rows(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{% if add_generation_prompt %}other{% endif %}{{ messages | length }}")
    source = make_run(tmp_path, record_of(*ASKED_TWICE))
    fit = {"template": str(file), "other_context": "mask"}
    directory, manifest = export_to_dataset(source, formats="openai", fit=fit)
    assert not (directory / "openai" / "train.jsonl").exists()
    assert manifest["formats"][0]["rejected_by_reason"] == {"all_masked": 1}


def test_rows_above_a_length_are_left_out_by_name_or_cut_after_a_turn(tmp_path: Path) -> None:
    place = student(tmp_path, template(KEPT))
    long = (user("Q"), assistant("a " * 10), user("R"), assistant("b " * 200))
    short = (user("Q"), assistant("A"))
    source = make_run(tmp_path, record_of(*long), record_of(*short))
    fit: dict[str, Any] = {"template": str(place), "max_length": 50}
    directory, manifest = export_to_dataset(source, formats="openai", fit=fit)
    assert [row["id"] for row in lines(directory / "openai" / "train.jsonl")] == ["t1"]
    assert manifest["formats"][0]["rejected_by_reason"] == {"too_long": 1}
    (reject,) = map(json.loads, (directory / "rejects.jsonl").read_text().splitlines())
    assert (reject["id"], reject["reason"]) == ("t0", "too_long")
    directory, manifest = export_to_dataset(
        source, formats="openai", fit={**fit, "too_long": "cut"}
    )
    cut, _ = lines(directory / "openai" / "train.jsonl")
    assert [message["role"] for message in cut["messages"]] == ["user", "assistant"]
    assert (manifest["formats"][0]["fit"]["cut"], manifest["formats"][0]["fit"]["rows_cut"]) == (
        1,
        ["t0"],
    )


def test_of_rows_per_turn_only_the_long_ones_are_left_out(tmp_path: Path) -> None:
    place = student(tmp_path, template(KEPT))
    source = make_run(
        tmp_path, record_of(user("Q"), assistant("A"), user("R"), assistant("b " * 200))
    )
    fit = {"template": str(place), "max_length": 50}
    directory, manifest = export_to_dataset(source, formats="openai", per_turn=True, fit=fit)
    assert [learnt(row) for row in lines(directory / "openai" / "train.jsonl")] == [["A"]]
    assert manifest["formats"][0]["fit"]["left_out"] == 1


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ({"fit": {"template": "t"}}, "does nothing"),
        ({"formats": "openai,hermes", "fit": {"template": "t", "max_length": 9}}, "not hermes"),
    ],
)
def test_what_cannot_be_fitted_is_refused(recipe: dict[str, Any], why: str, tmp_path: Path) -> None:
    source = make_run(tmp_path, record_of(*ASKED_TWICE))
    with pytest.raises(ValueError, match=why):
        export_to_dataset(source, **{"formats": "openai", **recipe})


def test_a_length_needs_a_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text(template(KEPT))
    source = make_run(tmp_path, record_of(*ASKED_TWICE))
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        export_to_dataset(source, formats="openai", fit={"template": str(file), "max_length": 9})


def test_lengths_are_those_of_a_byte_level_tokenizer_that_was_trained(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    place = student(tmp_path, template(KEPT))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    texts = [f"{'Größe ' * n}is {n * 7919}." for n in range(1, 21)]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(place / "tokenizer.json"))
    source = make_run(tmp_path, *(record_of(user("Q"), assistant(text)) for text in texts))
    directory, manifest = export_to_dataset(source, formats="openai")
    plain = jinja2.Template(
        template(KEPT).replace("{% generation %}", "").replace("{% endgeneration %}", "")
    )
    ours = {
        row["id"]: len(tokenizer.encode(plain.render(row), add_special_tokens=False).ids)
        for row in lines(directory / "openai" / "train.jsonl")
    }
    lengths = sorted(ours.values())
    assert len({*lengths}) == 20
    above = lengths[-4]
    (found,) = judge_templates(directory, manifest, find_templates(str(place)), max_length=above)
    said = found["lengths"]
    assert (said["p50"], said["max"], said["above"]) == (lengths[round(9.5)], lengths[-1], 3)
    assert {*said["rows_above"]} == {id for id, length in ours.items() if length > above}
    fit = {"template": str(place), "max_length": above}
    directory, manifest = export_to_dataset(source, formats="openai", fit=fit)
    kept = {row["id"] for row in lines(directory / "openai" / "train.jsonl")}
    assert kept == {id for id, length in ours.items() if length <= above}
