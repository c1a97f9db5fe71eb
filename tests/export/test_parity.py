"""Chat templates, judged by whether they train what inference saw."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.export.dataset.checking import find_problems
from batch_trajectories.export.dataset.directory import add_parity
from batch_trajectories.export.rows.recipe import Recipe
from batch_trajectories.export.templates import parity as judging
from batch_trajectories.export.templates.parity import (
    check_parity_options,
    describe_judgements,
    judge_templates,
)
from batch_trajectories.export.templates.template_names import find_templates
from tests.helpers.builders import assistant, call, record_of, result, user
from tests.helpers.exporting import export_to_dataset, make_run
from tests.helpers.running import run

ASKED_TWICE = (
    user("Q1"),
    assistant("Look.", call('{"city": "Oslo"}'), reasoning="First"),
    result("r1"),
    assistant("A1", reasoning="Second"),
    user("Q2"),
    assistant("A2", reasoning="Third"),
)

LAST = "{% set ns = namespace(u=0) %}{% for m in messages %}{% if m.role == 'user' %}\
{% set ns.u = loop.index0 %}{% endif %}{% endfor %}"
CALLS = "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ ARGS }}]{% endfor %}"
END = "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def template(thought: str, arguments: str = "c.function.arguments | tojson") -> str:
    """A small template; `thought` says which reasoning it shows."""
    calls = CALLS.replace("ARGS", arguments)
    return (
        LAST + "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
        "{% generation %}" + thought + "{{ m.content }}" + calls + "<end>{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}" + END
    )


THOUGHT = "{% if m.KEY %}({{ m.KEY }}){% endif %}"
KEPT = THOUGHT.replace("KEY", "reasoning_content")
DROPPED = "{% if loop.index0 > ns.u %}" + KEPT + "{% endif %}"


def measure_parity(folder: Path, text: str, **recipe: Any) -> dict[str, Any]:
    file = folder / "t.jinja"
    file.write_text(text)
    source = make_run(folder, record_of(*ASKED_TWICE))
    directory, manifest = export_to_dataset(source, formats="openai", **recipe)
    (found,) = judge_templates(directory, manifest, find_templates(str(file)), max_length=None)
    return found


def test_a_template_that_keeps_all_is_proved(tmp_path: Path) -> None:
    found = measure_parity(tmp_path, template(KEPT))
    assert (found["turns"], found["same"], found["is_proved"]) == (3, 3, True)
    assert (found["with_reasoning"], found["reasoning_lost"]) == (3, 0)
    assert (found["stop_token"], found["mend"]) == ("trained", None)


def test_a_stop_token_outside_the_generation_block_is_not_trained(tmp_path: Path) -> None:
    text = template(KEPT).replace("<end>{% endgeneration %}", "{% endgeneration %}<end>")
    assert measure_parity(tmp_path, text)["stop_token"] == "not trained"


def test_reasoning_that_is_dropped_changes_contexts_and_is_mended(tmp_path: Path) -> None:
    found = measure_parity(tmp_path, template(DROPPED))
    # The answer to the first question follows a turn whose reasoning inference saw.
    assert (found["turns"], found["same"], found["causes"]) == (3, 2, {"context": 1})
    assert found["reasoning_lost"] == 2
    assert found["mend"] == "--segments --reasoning since_user"
    assert found["mended"]["same"] == found["mended"]["turns"] == 3
    assert "mended by --segments" in "\n".join(describe_judgements([found]))


@pytest.mark.parametrize(
    "recipe",
    [{"segments": True, "reasoning": "since_user"}, {"per_turn": True, "reasoning": "field"}],
)
def test_the_options_that_mend_prove_the_dataset(tmp_path: Path, recipe: dict[str, Any]) -> None:
    found = measure_parity(tmp_path, template(DROPPED), **recipe)
    assert (found["turns"], found["same"], found["reasoning_lost"]) == (3, 3, 0)
    assert found["is_proved"]


def test_a_template_that_refuses_objects_wants_arguments_as_text(tmp_path: Path) -> None:
    found = measure_parity(tmp_path, template(KEPT, "'' + c.function.arguments"))
    assert sum(found["refused"].values()) == 1
    assert found["same"] == 0
    assert found["mend"] == "--arguments text"


def test_a_template_that_takes_one_call_per_turn_is_refused_and_mended(tmp_path: Path) -> None:
    one_only = "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    file = tmp_path / "t.jinja"
    file.write_text(template(one_only.replace("m.tool_calls", "(m.tool_calls or [])") + KEPT))
    said = (
        user(),
        assistant("", call("{}"), call("{}", id="c2"), reasoning="Both"),
        result("a"),
        result("b", id="c2"),
        assistant("Done."),
    )
    directory, manifest = export_to_dataset(make_run(tmp_path, record_of(*said)), formats="openai")
    (found,) = judge_templates(directory, manifest, find_templates(str(file)), max_length=None)
    assert found["refused"] == {"one call": 1}
    assert found["mend"] == "--parallel_calls split"
    directory, manifest = export_to_dataset(
        make_run(tmp_path, record_of(*said)), formats="openai", parallel_calls="split"
    )
    (found,) = judge_templates(directory, manifest, find_templates(str(file)), max_length=None)
    assert found["is_proved"]


def test_the_key_of_reasoning_is_found_and_can_be_exported(tmp_path: Path) -> None:
    text = template(THOUGHT.replace("KEY", "thinking"))
    found = measure_parity(tmp_path, text)
    assert found["reasoning_lost"] == 3
    assert found["mend"] == "--reasoning_key thinking"
    assert measure_parity(tmp_path, text, reasoning_key="thinking")["is_proved"]


def test_a_generation_prompt_that_rows_do_not_have_is_named(tmp_path: Path) -> None:
    text = template(KEPT).replace(
        "{% if add_generation_prompt %}<assistant>",
        "\
{% if add_generation_prompt %}<assistant><think>",
    )
    assert measure_parity(tmp_path, text)["causes"] == {"generation_prompt": 3}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "took"),
        ("{% set x = 'x' * 9999999999 %}", "too much memory"),
    ],
)
def test_a_hostile_template_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    if why == "took":
        monkeypatch.setattr(judging, "_RENDER_S", 0.05)
    found = measure_parity(tmp_path, text)
    assert why in found["failed"]
    assert not found["is_proved"]
    assert "not judged" in next(describe_judgements([found]))


def _waits(*_: object, **__: object) -> str:
    time.sleep(0.1)  # as for a processor that is busy
    return "First Second Third"


def _spins(*_: object, **__: object) -> str:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})  # as in the middle of C code
    while True:
        pass


@pytest.mark.parametrize(("renders", "failed"), [(_waits, None), (_spins, "took more than")])
def test_only_time_on_a_processor_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renders: Any, failed: str | None
) -> None:
    monkeypatch.setattr(judging, "_RENDER_S", 0.05)
    monkeypatch.setattr(judging, "_STUCK_S", 1)
    monkeypatch.setattr(judging, "load_chat", lambda _: renders)
    found = measure_parity(tmp_path, "said")
    if failed is None:
        assert found["is_proved"]
    else:
        assert failed in found["failed"]


def test_manifest_and_card_say_what_was_proved_and_the_check_knows_it(tmp_path: Path) -> None:
    source = make_run(tmp_path, record_of(*ASKED_TWICE))
    recipe = Recipe.model_validate({"formats": "openai", "filters": {"exact_duplicates": False}})
    for name, thought in (("keeps", KEPT), ("drops", DROPPED)):
        (tmp_path / f"{name}.jinja").write_text(template(thought))
    templates = find_templates(f"{tmp_path}/keeps.jinja,{tmp_path}/drops.jinja")
    check_parity_options(recipe, templates, None)
    directory, manifest = export_to_dataset(source, formats="openai")
    add_parity(
        directory,
        manifest,
        recipe,
        judge_templates(directory, manifest, templates, max_length=None),
    )
    card = (directory / "README.md").read_text()
    assert "in 1 of them every turn is learnt in the context that inference has: `keeps`" in card
    assert "| drops | 3 | 1 | 2 | 0 | --segments --reasoning since_user |" in card
    assert list(find_problems(source, directory)) == []


def test_the_command_says_it(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(template(DROPPED))
    source = make_run(tmp_path, record_of(*ASKED_TWICE))
    done = run(tmp_path, "export", source.run_dir, format="openai", parity="t.jinja")
    assert done.returncode == 0, done.stderr
    assert "t: 2 of 3 turns in the context of inference; 2 of 3 lose reasoning" in done.stdout
    assert "mended by --segments --reasoning since_user: nothing differs" in done.stdout
    done = run(tmp_path, "export", source.run_dir, format="hermes", parity="t.jinja")
    assert "--parity renders rows of the format openai" in done.stderr


def test_a_directory_of_a_tokenizer_or_of_files_is_read(tmp_path: Path) -> None:
    (tmp_path / "b.jinja").write_text("b")
    (tmp_path / "a.jinja").write_text("a")
    assert [one.name for one in find_templates(str(tmp_path))] == ["a", "b"]
    student = tmp_path / "student"
    student.mkdir()
    (student / "chat_template.jinja").write_text("x")
    (student / "tokenizer.json").write_text("{}")
    (one,) = find_templates(str(student))
    assert (one.name, one.tokenizer) == ("student", student / "tokenizer.json")


@pytest.mark.parametrize(
    ("recipe", "max_length", "why"),
    [
        ({"per_turn": True}, None, "add --reasoning field"),
        ({"reasoning": "last"}, None, "take out"),
        ({}, 100, "no tokenizer.json beside it"),
    ],
)
def test_what_cannot_be_judged_is_refused(
    tmp_path: Path, recipe: dict[str, Any], max_length: int | None, why: str
) -> None:
    (tmp_path / "t.jinja").write_text("x")
    made = Recipe.model_validate({"formats": "openai", **recipe})
    with pytest.raises(ConfigError, match=why):
        check_parity_options(made, find_templates(f"{tmp_path}/t.jinja"), max_length)


def test_an_unknown_name_says_where_names_come_from() -> None:
    with pytest.raises(ConfigError, match="--parity"):
        find_templates("no-such-template")


@pytest.mark.parametrize(
    ("text", "options", "recipe"),
    [
        (
            template(
                "{% if m.tool_calls and m.content %}{{ raise_exception('text') }}{% endif %}" + KEPT
            ),
            "--call_text reasoning",
            {"call_text": "reasoning"},
        ),
        (
            template(
                "{{ m.reasoning_content and '<think>\n' ~ m.reasoning_content or '' }}"
            ).replace("%}<assistant>{% endif", "%}<assistant><think>\n{% endif"),
            "--empty_think text",
            {"empty_think": "text"},
        ),
    ],
)
def test_options_that_mend_leave_no_difference_where_an_export_applies_them(
    tmp_path: Path, text: str, options: str, recipe: dict[str, Any]
) -> None:
    file = tmp_path / "t.jinja"
    file.write_text(text)
    said = (*ASKED_TWICE[:4], user("Q2"), assistant("A2"))
    source = make_run(tmp_path, record_of(*said))
    directory, manifest = export_to_dataset(source, formats="openai")
    (found,) = judge_templates(directory, manifest, find_templates(str(file)), max_length=None)
    assert (found["mend"], found["is_proved"]) == (options, False)
    directory, manifest = export_to_dataset(source, formats="openai", **recipe)
    (found,) = judge_templates(directory, manifest, find_templates(str(file)), max_length=None)
    assert found["is_proved"], found


def test_what_no_option_mends_is_said_with_its_reason(tmp_path: Path) -> None:
    found = measure_parity(
        tmp_path, template("{% if not m.tool_calls %}" + KEPT + "{% endif %}{{ '' }}")
    )
    assert found["mend"] == "--reasoning inline"
    dropped = measure_parity(
        tmp_path, template("").replace("{{ m.content }}", "{{ m.content[-2:] }}")
    )
    assert dropped["left"] == [
        "it shows no reasoning in 2 answers",
        "it shows no reasoning in 1 turns with calls",
    ]
    assert "what is left" in "\n".join(describe_judgements([dropped]))
