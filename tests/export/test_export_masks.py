"""Turns that carry no loss by the recipe's `mask`, and failures that are rows with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from batch_trajectories.api.stored_run import StoredRun
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.export.conversation.reading import read_conversation
from batch_trajectories.export.conversation.style import Style
from batch_trajectories.export.dataset.checking import find_problems
from batch_trajectories.export.dataset.directory import export_dataset
from batch_trajectories.export.formats.openai import make_row
from batch_trajectories.export.masking import Mask, Masks
from batch_trajectories.export.rows.recipe import Recipe, load_recipe
from batch_trajectories.export.statistics.funnel import format_funnel
from batch_trajectories.report.page.writer import masks_of_dataset, training_form
from tests.export.test_export_agents import agents_record
from tests.export.test_export_loss import mixed_record
from tests.export.test_export_rl import FIRST, SECOND, play_record
from tests.helpers.builders import OFFERED, assistant, call, final, record_of, result, user
from tests.helpers.exporting import export_to_dataset, make_run, rejects, rows, why
from tests.helpers.running import lines, run
from tests.helpers.stored import to_record

NO_LOSS = (0, False)
SCORE: dict[str, Any] = {"source": "m:f", "version": "1", "error": None, "rewards": {}}


def failed_result(kind: str = "exception", *, id: str = "c1") -> dict[str, Any]:
    return {**result("Error", id=id, is_error=True), "details": {"failure": kind}}


def looping_record(**changes: Any) -> dict[str, Any]:
    """Six turns: a call, one that fails, its repetition, another, a refused one, the answer."""
    return record_of(
        user(),
        assistant("One", call('{"city": "A"}', id="c1")),
        result("1", id="c1"),
        assistant("Two", call('{"city": "B"}', id="c2")),
        failed_result(id="c2"),
        assistant("Three", call('{ "city": "B" }', id="c3")),
        failed_result(id="c3"),
        assistant("Four", call('{"city": "C"}', id="c4")),
        result("4", id="c4"),
        assistant("Five", call('{"town": 1}', id="c5")),
        failed_result("invalid_arguments", id="c5"),
        assistant("Six"),
        **changes,
    )


def mask_reasons(record: dict[str, Any], **mask: Any) -> dict[int, tuple[str, ...]]:
    """The reasons by turn."""
    return dict(Masks(Mask.model_validate(mask), threshold=0.5).masked_turns(to_record(record)))


def learnt(row: dict[str, Any]) -> list[str]:
    """The texts of the turns that carry loss."""
    said = [m for m in row["messages"] if m["role"] == "assistant"]
    assert all((m.get("weight"), m.get("loss")) in (NO_LOSS, (None, None)) for m in said)
    return [m["content"] for m in said if "weight" not in m]


def test_calls_and_their_results_give_reasons() -> None:
    assert mask_reasons(looping_record(), failed_call=True) == {
        2: ("failed_call",),
        3: ("failed_call",),
        5: ("failed_call",),
    }
    assert mask_reasons(looping_record(), repeated_call=True) == {3: ("repeated_call",)}
    assert mask_reasons(looping_record(), bad_arguments=True) == {5: ("bad_arguments",)}
    assert mask_reasons(looping_record(), failed_call=True, repeated_call=True)[3] == (
        "failed_call",
        "repeated_call",
    )


def test_a_call_is_repeated_only_right_after_it_and_with_the_same_result() -> None:
    def asked(*results: str, between: bool = False, same: bool = True) -> dict[str, Any]:
        messages = [user()]
        for n, text in enumerate(results):
            arguments = "{}" if same else json.dumps({"n": n})
            messages += [assistant("", call(arguments, id=f"c{n}")), result(text, id=f"c{n}")]
            messages += [assistant("Well."), user("Go on.")] if between else []
        return record_of(*messages, assistant("Done."))

    assert mask_reasons(asked("r", "r", "r"), repeated_call=True).keys() == {2, 3}
    assert mask_reasons(asked("r", "s"), repeated_call=True) == {}
    assert mask_reasons(asked("r", "r", same=False), repeated_call=True) == {}
    assert mask_reasons(asked("r", "r", between=True), repeated_call=True) == {}


def test_a_note_of_the_runtime_does_not_hide_that_a_call_is_repeated() -> None:
    again = result("r\n\nYou did this.\n\nHurry.", id="c2")
    tagged = {**result("r [stored as x]", id="c3"), "details": {"own_chars": 1}}
    record = record_of(
        user(),
        assistant("", call()),
        result("r"),
        assistant("", call(id="c2")),
        again,
        assistant("", call(id="c3")),
        tagged,
        assistant("Done."),
    )
    texts = ("You did this.", "Hurry.")
    record["notes"] = [{"turn": 2, "reason": "repeat", "text": text} for text in texts]
    assert mask_reasons(record, repeated_call=True).keys() == {2, 3}


@pytest.mark.parametrize(
    ("kind", "reasons"),
    [
        ("interrupted", ("interrupted_result",)),
        ("not_run", ()),
        ("denied", ("failed_call",)),
        ("timeout", ("failed_call",)),
        ("unknown_tool", ("failed_call", "bad_arguments")),
    ],
)
def test_a_call_that_was_cut_off_has_not_failed(kind: str, reasons: tuple[str, ...]) -> None:
    record = record_of(user(), assistant("", call()), failed_result(kind), assistant("Done."))
    found = mask_reasons(record, failed_call=True, bad_arguments=True, interrupted_result=True)
    assert found == ({1: reasons} if reasons else {})


def test_what_was_repaired_is_masked() -> None:
    repaired = {**assistant("", call()), "repairs": [{"call": "c1", "name": "Temp"}]}
    record = record_of(user(), repaired, result("1"), assistant("Done."))
    assert mask_reasons(record, bad_arguments=True) == {1: ("bad_arguments",)}


def test_rewards_of_turns_have_bounds_by_name() -> None:
    by_turn = {"reward": [0.4, 0.5, None, 1, 0, 1], "style": [1, 1, 1, 1, 0.2, 1]}
    record = looping_record(scores=[{**SCORE, "turn_rewards": by_turn}])
    assert mask_reasons(record, turn_reward=0.5).keys() == {1, 5}
    assert mask_reasons(record, turn_reward={"style": 0.5}).keys() == {5}
    assert mask_reasons(record, turn_reward={"style": 0.5, "reward": 0.5}) == {
        1: ("turn_reward",),
        5: ("turn_reward",),
    }


def test_leaks_and_wrong_answers_are_masked() -> None:
    look = assistant("", call(json.dumps({"command": "git log -p"})))
    record = record_of(user(), look, result("r"), assistant("No."))
    record["check"] = {"passed": False, "reward": 0.0}
    assert mask_reasons(record, leak_suspected=True, wrong_answer=True) == {
        1: ("leak_suspected",),
        2: ("wrong_answer",),
    }
    assert mask_reasons({**record, "check": {"passed": True}}, wrong_answer=True) == {}
    assert mask_reasons({**record, "status": "max_turns"}, wrong_answer=True) == {}


def test_turns_of_other_models_are_masked() -> None:
    record = agents_record(model="openai:m")
    for turn, model in zip(record["turns"], ("small", "m", "m"), strict=True):
        turn["model"] = model
    assert mask_reasons(record, model="own_model") == {1: ("model",)}


def test_turns_of_a_parent_have_no_reasons() -> None:
    record = mixed_record()
    for message in record["messages"]:
        if message["role"] == "tool":
            message["is_error"] = True
    assert mask_reasons(record, failed_call=True) == {3: ("failed_call",)}


class TestFunction:
    @pytest.fixture(autouse=True)
    def here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        code = "def f(record):\n    return eval(record['row']['gives'])\n"
        (tmp_path / "masks_of_mine.py").write_text(code)
        monkeypatch.chdir(tmp_path)

    def found(self, gives: str) -> dict[int, tuple[str, ...]]:
        record = record_of(user(), assistant("", call()), result("r"), assistant("Done."))
        record["row"] = {"gives": gives}
        return mask_reasons(record, function="masks_of_mine.py:f")

    def test_it_says_for_each_turn_whether_and_why(self) -> None:
        assert self.found("[True, 'too vague']") == {
            1: ("function",),
            2: ("function: too vague",),
        }
        assert self.found("[None, False]") == {}

    @pytest.mark.parametrize(
        ("gives", "words"),
        [
            ("[True]", r"gave 1 items for row-1-0; it must return a list with an item .* 2 turns"),
            ("None", "gave None for row-1-0"),
            ("[1, 2]", "gave 1 for a turn of row-1-0; give true, false, null or a reason"),
            ("['', None]", "gave '' for a turn"),
            ("1/0", "failed for row-1-0: ZeroDivisionError"),
        ],
    )
    def test_what_else_it_gives_stops_the_export(self, gives: str, words: str) -> None:
        with pytest.raises(ConfigError, match=f"mask.function: masks_of_mine.py:f {words}"):
            self.found(gives)

    def test_one_that_is_not_there_stops_it_before_the_first_row(self) -> None:
        with pytest.raises(ConfigError, match=r"mask.function: cannot import 'no_such:f'"):
            Masks(Mask(function="no_such:f"), threshold=0.5)


ALL = {"failed_call": True, "repeated_call": True, "bad_arguments": True}


def test_rows_with_marks_hold_all_turns_and_mark_the_masked(tmp_path: Path) -> None:
    source = make_run(tmp_path, looping_record(), record_of(user(), assistant("Hi.")))
    directory, manifest = export_to_dataset(source, formats="openai,atif,parquet", mask=ALL)
    first, second = lines(directory / "openai" / "train.jsonl")
    assert (learnt(first), learnt(second)) == (["One", "Four", "Six"], ["Hi."])
    reasons = [
        {"turn": 2, "reasons": ["failed_call"]},
        {"turn": 3, "reasons": ["failed_call", "repeated_call"]},
        {"turn": 5, "reasons": ["failed_call", "bad_arguments"]},
    ]
    assert json.loads(first["metadata"])["masked"] == reasons
    assert "masked" not in json.loads(second["metadata"])
    document = lines(directory / "atif" / "train.jsonl")[0]
    marked = [step["extra"] for step in document["steps"] if "extra" in step]
    assert marked == [{"loss": False, "masked": one["reasons"]} for one in reasons]
    counts = {
        "turns": 3,
        "of": 7,
        "by_reason": {"failed_call": 3, "bad_arguments": 1, "repeated_call": 1},
    }
    assert [part["masked"] for part in manifest["formats"]] == [counts, counts]
    assert list(find_problems(source, directory)) == []


def test_rows_per_turn_leave_masked_turns_out_but_for_the_context(tmp_path: Path) -> None:
    source = make_run(tmp_path, looping_record())
    directory, manifest = export_to_dataset(
        source, formats="openai,llamafactory", per_turn=True, mask=ALL
    )
    found = lines(directory / "openai" / "train.jsonl")
    assert [(row["id"], learnt(row)) for row in found] == [
        ("t0#t1", ["One"]),
        ("t0#t4", ["Four"]),
        ("t0#t6", ["Six"]),
    ]
    ends = [row["conversations"][-1] for row in lines(directory / "llamafactory" / "train.jsonl")]
    assert [end["from"] for end in ends] == ["function_call", "function_call", "gpt"]
    assert [part["masked"]["turns"] for part in manifest["formats"]] == [3, 3]


BROKEN = '{"city": "Li'


def test_a_mask_of_bad_arguments_keeps_the_row_where_the_format_can_hold_them(
    tmp_path: Path,
) -> None:
    """An agent does not say why a call failed: the arguments themselves mask the turn."""
    said = (
        user(),
        assistant("", call(BROKEN)),
        result("no"),
        assistant("", call('{"city": "Lima", "n": null}', id="c2")),
        result("9", id="c2"),
        assistant("Nine."),
    )
    source = make_run(tmp_path, record_of(*said))
    mask = {"bad_arguments": True}
    (told,) = why(source, formats="openai", mask=mask).values()
    assert told.endswith("--arguments=text --accept_rows=arguments_not_json keeps such rows")
    directory, manifest = export_to_dataset(
        source, formats="openai,parquet,hf", mask=mask, arguments="text"
    )
    (row,) = lines(directory / "openai" / "train.jsonl")
    calls = [
        one["function"]["arguments"] for m in row["messages"] for one in m.get("tool_calls", ())
    ]
    assert calls == [BROKEN, '{"city": "Lima", "n": null}']
    marks = [m.get("weight") for m in row["messages"] if m["role"] == "assistant"]
    assert marks == [0, None, None]
    assert json.loads(row["metadata"])["masked"] == [{"turn": 1, "reasons": ["bad_arguments"]}]
    assert list(find_problems(source, directory)) == []
    # All arguments in Parquet can be read as JSON.
    (twin,) = parquet.read_table(directory / "openai_parquet" / "train.parquet").to_pylist()
    calls = [
        one["function"]["arguments"] for m in twin["messages"] for one in m["tool_calls"] or ()
    ]
    assert [*map(json.loads, calls)] == [BROKEN, {"city": "Lima", "n": None}]
    assert "rows_with_null_arguments" not in manifest["formats"][0]
    made = rows(source, "openai", mask=mask, arguments="text", per_turn=True)
    assert [one["id"] for one in made] == ["t0#t2", "t0#t3"]


def test_a_conversation_of_masked_turns_alone_has_no_row(tmp_path: Path) -> None:
    """Trainers drop such rows, some of them with an error."""
    bad = record_of(user(), assistant("", call()), failed_result(), status="max_turns")
    source = make_run(tmp_path, bad, record_of(user(), assistant("Hi.")))
    for per_turn in (False, True):
        found = rejects(
            source,
            formats="openai",
            per_turn=per_turn,
            mask={"failed_call": True},
            filters={"status": "any"},
        )
        assert found == {"t0": "all_masked"}


def test_an_answer_that_came_with_calls_is_masked_with_them(tmp_path: Path) -> None:
    turn = assistant("", call(id="c1"), final("A"))
    record = record_of(
        user(),
        assistant("First", call(id="c0")),
        result("r", id="c0"),
        turn,
        failed_result(),
        result("ok", id="f"),
        tools=OFFERED,
    )
    (row,) = rows(make_run(tmp_path, record), "openai", mask={"failed_call": True})
    assert learnt(row) == ["First"]
    assert [m["content"] for m in row["messages"] if "weight" in m] == ["", "A"]


def test_all_parts_of_a_turn_whose_calls_are_split_are_masked(tmp_path: Path) -> None:
    turn = assistant("Two", call(id="a"), call('{"city": 1}', id="b"))
    record = record_of(user(), turn, failed_result(id="a"), result("r", id="b"), assistant("Done."))
    source = make_run(tmp_path, record)
    (row,) = rows(source, "openai", parallel_calls="split", mask={"failed_call": True})
    assert learnt(row) == ["Done."]


def test_token_ids_keep_their_place_with_a_mask_of_0(tmp_path: Path) -> None:
    record = play_record(FIRST, SECOND)
    record["messages"][2] |= {"is_error": True, "details": {"failure": "exception"}}
    (row,) = rows(make_run(tmp_path, record), "rl", mask={"failed_call": True})
    assert (row["prompt_ids"], row["response_ids"]) == ([1, 2], [3, 4, 5, 6])
    assert row["loss_mask"] == [0, 0, 0, 1]
    assert row["logprobs"] == [-3.0, -4.0, 0.0, -6.0]
    assert (row["turns"], row["masked"]) == ([1, 2], [["failed_call"], []])
    record["status"] = "max_turns"
    (row,) = rows(make_run(tmp_path, record), "rl", mask={"failed_call": True})
    assert "masked" not in rows(make_run(tmp_path, record), "rl")[0]


def test_subagents_turns_are_masked_too(tmp_path: Path) -> None:
    inner = play_record(FIRST, SECOND)
    inner["messages"][2]["is_error"] = True
    record = play_record(FIRST, SECOND) | {"inner": [{**inner, "key": "c1", "name": "helper"}]}
    found = rows(make_run(tmp_path, record), "rl", subagents=True, mask={"failed_call": True})
    assert [(row["thread"], row["loss_mask"]) for row in found] == [
        ("main", [1, 1, 0, 1]),
        ("helper", [0, 0, 0, 1]),
    ]


def answered_record(words: str, *, passed: bool | None = None, **changes: Any) -> dict[str, Any]:
    check = None if passed is None else {"passed": passed, "reward": float(passed)}
    return record_of(
        user(), assistant("Look", call()), result("r"), assistant(words), check=check, **changes
    )


def test_failures_are_rows_by_choice_masked_and_with_their_provenance(tmp_path: Path) -> None:
    early = record_of(
        user(), assistant("Look", call()), result("r"), status="max_turns", status_reason="1 turn"
    )
    source = make_run(
        tmp_path,
        answered_record("Right", passed=True),
        answered_record("Wrong", passed=False),
        early,
        answered_record("Unknown"),
        record_of(user(), status="failed", error={"class": "ModelError", "message": "gone"}),
    )
    assert len(rows(source, "openai")) == 3
    directory, manifest = export_to_dataset(source, formats="openai", include="not_passed")
    found = lines(directory / "openai" / "train.jsonl")
    assert [learnt(row) for row in found] == [
        ["Look", "Right"],
        ["Look"],
        ["Look"],
        ["Look", "Unknown"],
    ]
    told = [json.loads(row["metadata"]) for row in found]
    assert [one.get("included") for one in told] == [None, "not_passed", "not_passed", None]
    assert [(one["status"], one.get("reward")) for one in told] == [
        ("completed", 1.0),
        ("completed", 0.0),
        ("max_turns", None),
        ("completed", None),
    ]
    (part,) = manifest["formats"]
    assert part["not_passed"] == 2
    assert part["masked"] == {"turns": 1, "of": 7, "by_reason": {"wrong_answer": 1}}
    assert manifest["rejected_by_reason"] == {"failed": 1}
    assert list(find_problems(source, directory)) == []


def make_planted_run(folder: Path) -> Any:
    """Ten conversations of ten turns and a dollar each; four pass.

    Of the failing ones, 24 % of the turns call what fails or answer wrongly.
    """
    records = []
    for number in range(10):
        has_passed = number < 4
        messages = [user()]
        for n in range(9):
            is_bad = not has_passed and n in ((3, 7) if number < 9 else (3,))
            arguments = json.dumps({"city": f"{number} {n}"})
            messages.append(assistant(f"T{n}", call(arguments, id=f"c{n}")))
            messages.append(failed_result(id=f"c{n}") if is_bad else result(f"r{n}", id=f"c{n}"))
        check = {"passed": has_passed, "reward": float(has_passed)}
        records.append(record_of(*messages, assistant("End."), check=check, cost_usd=1.0))
    return make_run(folder, *records)


def test_a_dollar_trains_more_turns(tmp_path: Path) -> None:
    source = make_planted_run(tmp_path)
    plain = rows(source, "openai", filters={"require_passed": True, "exact_duplicates": False})
    more = rows(source, "openai", include="not_passed")
    dollars = 10.0
    before, after = (sum(len(learnt(row)) for row in found) / dollars for found in (plain, more))
    assert (before, after) == (4.0, 8.3)
    assert after / before >= 1.7


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("mask: {}", "r.yaml:1: mask: masks nothing; set one of turn_reward, failed_call"),
        (
            "mask: {faild_call: true}",
            "r.yaml:1: mask.faild_call: unknown key; did you mean 'failed_call'?",
        ),
        ("mask: {failed_call: 3}", "r.yaml:1: mask.failed_call: "),
        ("mask: {turn_reward: high}", "r.yaml:1: mask.turn_reward: "),
        ("mask: {turn_reward: true}", "r.yaml:1: mask.turn_reward.reward: must be a number"),
        ("mask: {turn_reward: {style: .nan}}", "r.yaml:1: mask.turn_reward.style: "),
        ("mask: {model: mine}", "r.yaml:1: mask.model: must be 'own_model'"),
        ("mask: {function: f}", "r.yaml:1: mask.function: "),
        ("mask: [failed_call]", "r.yaml:1: mask: "),
        (
            "mask: {failed_call: true}\nformats: [hermes]",
            "r.yaml: mask: hermes cannot say which turns carry no loss; choose openai",
        ),
        ("mask: {failed_call: true}\nformats: [openai, dpo]", "r.yaml: mask: dpo cannot say"),
        (
            "mask: {failed_call: true}\nformats: llamafactory",
            "llamafactory cannot say which turns carry no loss; add per_turn",
        ),
        ("include: passed", "r.yaml:1: include.0: must be 'not_passed'"),
        (
            "include: not_passed\nfilters: {passed: true}",
            "r.yaml: include: not_passed and filters.require_passed exclude each other",
        ),
    ],
)
def test_a_recipe_that_cannot_be_is_refused_in_one_line(
    tmp_path: Path, recipe: str, words: str
) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(recipe if "formats" in recipe else f"{recipe}\nformats: [openai]")
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, {})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bound_for_a_reward_that_no_turn_has_is_a_mistake(tmp_path: Path) -> None:
    record = looping_record(scores=[{**SCORE, "turn_rewards": {"style": [1] * 6}}])
    source = make_run(tmp_path, record)
    with pytest.raises(ConfigError, match=r"rewards named 'stile' \(known: style\)"):
        export_to_dataset(source, formats="openai", mask={"turn_reward": {"stile": 0.5}})


def test_the_command_says_what_was_masked(tmp_path: Path) -> None:
    source = make_planted_run(tmp_path)
    done = run(tmp_path, "export", source.run_dir, format="openai", include="not_passed")
    assert done.returncode == 0, done.stderr
    assert "       17 of 100 turns carry no loss" in done.stdout
    assert "       11   failed_call" in done.stdout
    assert "        6 of the conversations did not pass" in done.stdout
    card = (source.run_dir / "exports" / "dataset" / "README.md").read_text()
    assert "17 of 100 turns carry no loss (failed_call 11, wrong_answer 6); marked" in card
    assert "6 conversations did not pass" in card


def test_the_funnel_and_the_report_show_the_masks_of_the_dataset(tmp_path: Path) -> None:
    source = make_run(tmp_path, looping_record(), record_of(user(), assistant("Hi.")))
    directory = source.run_dir / "exports" / "dataset"
    export_dataset(source, Recipe(formats=("openai",), mask=Mask(repeated_call=True)), directory)
    stored_run = StoredRun(source.run_dir)
    (found,) = stored_run.funnel()["exports"]
    assert found["masked"] == {"turns": 1, "of": 7, "by_reason": {"repeated_call": 1}}
    told = list(format_funnel(stored_run.funnel()))
    assert told[-2:] == [
        "  masked               1  of 7 turns carry no loss",
        "                       1  repeated_call",
    ]
    masks = masks_of_dataset(source.run_dir)
    form = training_form(to_record(looping_record()), key_of=len, style=Style(), masks=masks)
    assert form["masked"] == {"3": ("repeated_call",)}


def test_a_report_says_where_the_function_of_a_mask_is_gone_or_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_run(tmp_path, looping_record())
    directory = source.run_dir / "exports" / "dataset"
    (tmp_path / "masks_of_page.py").write_text("def f(record):\n    return [1 < 2] * 5 + [None]\n")
    monkeypatch.chdir(tmp_path)
    export_dataset(
        source, Recipe(formats=("openai",), mask=Mask(function="masks_of_page.py:f")), directory
    )
    masks = masks_of_dataset(source.run_dir)
    short = record_of(user(), assistant("Hi."))
    form = training_form(to_record(short), key_of=len, style=Style(), masks=masks)
    assert "gave 6 items for row-1-0" in form["masked"]["1"][0]
    (tmp_path / "masks_of_page.py").unlink()
    assert masks_of_dataset(source.run_dir) is None
    assert "mask.function: there is no file masks_of_page.py" in capsys.readouterr().err


def test_recipes_of_earlier_manifests_are_read() -> None:
    old = Recipe(formats=("openai",)).model_dump(mode="json")
    new = Recipe(formats=("openai",), mask=Mask(failed_call=True)).model_dump(mode="json")
    assert Recipe.model_validate(new).mask == Mask(failed_call=True)
    del old["mask"], old["include"]
    assert Recipe.model_validate(old) == Recipe(formats=("openai",))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["good", "fails", "interrupted"]), max_size=8), st.integers(0, 2))
def test_exactly_the_masked_turns_are_marked(kinds: list[str], brought: int) -> None:
    messages = [part for n in range(brought) for part in (user(f"Q{n}"), assistant(f"P{n}"))]
    messages.append(user())
    for n, kind in enumerate(kinds):
        messages.append(assistant(f"A{n}", call(json.dumps({"n": n}), id=f"c{n}")))
        messages.append(
            result("r", id=f"c{n}")
            if kind == "good"
            else failed_result("exception" if kind == "fails" else "interrupted", id=f"c{n}")
        )
    record = record_of(*messages, assistant("End."))
    del record["turns"][:brought]
    mask = Mask(failed_call=True, interrupted_result=True)
    conversation = Masks(mask, threshold=0.5).apply(read_conversation(to_record(record)))
    good = [f"A{n}" for n, kind in enumerate(kinds) if kind == "good"]
    assert learnt(make_row(conversation, Style())) == [*good, "End."]


def test_functions_and_templates_are_looked_for_beside_the_recipe_first(tmp_path: Path) -> None:
    here = tmp_path / "my recipes"
    here.mkdir()
    recipe = here / "r.yaml"
    recipe.write_text(
        "formats: [openai]\n"
        "mask: {function: own.py:late}\n"
        "filters: {answer: {match: python, function: own.py:right}}\n"
        "fit: {template: own.jinja, other_context: mask}\n"
    )

    def read() -> tuple[str | None, ...]:
        read = load_recipe(recipe, {})
        assert read.mask is not None
        assert read.filters.answer is not None
        assert read.fit is not None
        return read.mask.function, read.filters.answer.function, read.fit.template

    assert read() == ("own.py:late", "own.py:right", "own.jinja")
    (here / "own.py").touch()
    (here / "own.jinja").touch()
    there = (f"{here}/own.py:late", f"{here}/own.py:right", f"{here}/own.jinja")
    assert read() == there
