"""Rows through chat templates: what comes out, and what is reported as dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.export.templates.rendering import Rendered, load_template
from tests.helpers.builders import assistant, call, record_of, result, user
from tests.helpers.exporting import call_record, export_to_dataset, make_run
from tests.helpers.running import lines, run

pytest.importorskip("jinja2")

ALL = """
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for m in messages %}<{{ m.role }}>{{ m.reasoning_content or "" }}|{{ m.content }}
{%- for c in m.tool_calls or [] %}{% generation %}{{ c.function.name }}
{{- c.function.arguments | tojson }}{% endgeneration %}{% endfor %}
{% endfor %}"""

CHINESE = "北京"


def render(folder: Path, template: str, record: dict[str, Any], **recipe: Any) -> Rendered:
    (folder / "t.jinja").write_text(template)
    directory, _ = export_to_dataset(make_run(folder, record), formats="openai", **recipe)
    (row,) = lines(directory / "openai" / "train.jsonl")
    return load_template(folder / "t.jinja")(row)


def test_a_template_that_shows_all_drops_nothing(tmp_path: Path) -> None:
    record = record_of(
        user(CHINESE),
        assistant("", call(f'{{"city": "{CHINESE}"}}')),
        result("r"),
        assistant("Hi."),
    )
    output = render(tmp_path, ALL, record)
    assert output.dropped == []
    assert f'temp{{"city": "{CHINESE}"}}' in output.text
    assert "<user>" in output.text
    ((begin, end),) = output.trained
    assert output.text[begin:end] == f'temp{{"city": "{CHINESE}"}}'


def test_templates_choose_how_json_is_written(tmp_path: Path) -> None:
    template = (
        "{{ {'b': messages[0].content, 'a': 1} | tojson(ensure_ascii=True, sort_keys=True) }}"
    )
    record = record_of(user(CHINESE), assistant("Hi."))
    assert render(tmp_path, template, record).text == '{"a": 1, "b": "\\u5317\\u4eac"}'


@pytest.mark.parametrize(
    ("change", "dropped"),
    [
        ((' or ""', ' and ""'), [f"message {n} (assistant), reasoning" for n in (3, 5)]),
        (
            ("{{- c.function.arguments | tojson }}", ""),
            [
                "message 3 (assistant), call 1, argument city",
                "message 3 (assistant), call 1, argument n",
            ],
        ),
        (("{{ c.function.name }}", ""), ["message 3 (assistant), call 1, name"]),
        (("{{ tool | tojson }}", "{{ tool.function.name }}"), ["tool 1, description"]),
        (
            ("{%- for m in messages %}", "{%- for m in messages[1:] %}"),
            ["message 1 (system), content"],
        ),
        (
            ("|{{ m.content }}", "|{{ '' if m.tool_calls else m.content }}"),
            ["message 3 (assistant), content"],
        ),
    ],
)
def test_messages_that_a_template_drops_are_named(
    tmp_path: Path, change: tuple[str, str], dropped: list[str]
) -> None:
    template = ALL.replace(*change)
    assert template != ALL
    assert render(tmp_path, template, call_record()).dropped == dropped


def test_a_second_call_that_is_left_out_is_named_although_it_says_the_same(tmp_path: Path) -> None:
    """A text that is elsewhere too does not prove that it was rendered."""
    calls = [call('{"city": "A"}', id=name) for name in "ab"]
    results = [result("r", id=name) for name in "ab"]
    record = record_of(user(), assistant("", *calls), *results, assistant("Hi."))
    first_only = ALL.replace("in m.tool_calls or []", "in (m.tool_calls or [])[:1]")
    assert render(tmp_path, first_only, record).dropped == [
        "message 2 (assistant), call 2, argument city",
        "message 2 (assistant), call 2, name",
    ]
    assert render(tmp_path, first_only, record, parallel_calls="split").dropped == []


def test_inline_reasoning_that_is_stripped_is_named(tmp_path: Path) -> None:
    strips = ALL.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    output = render(tmp_path, strips, call_record(), reasoning="inline")
    assert output.dropped == [f"message {n} (assistant), reasoning" for n in (3, 5)]
    assert render(tmp_path, ALL, call_record(), reasoning="inline").dropped == []


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system') }}",
        "{{ messages[0].content + 1 }}",
        "{{ [].append(1) }}",
        "{{ 1 / 0 }}",
        "{% for n in range(1000000) %}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_refused_template_is_an_error_and_renders_nothing(tmp_path: Path, template: str) -> None:
    """Templates come from strangers, so they run in a sandbox."""
    output = render(tmp_path, template, call_record())
    assert output.text == ""
    assert "refuses the row" in output.dropped[0]


def test_a_tokenizer_config_holds_its_template(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": "{{ messages | length }}"}))
    row = {"messages": [{"role": "user", "content": "Hi."}], "tools": "[]"}
    found = load_template(path)(row)
    assert found == Rendered("1", [], ["message 1 (user), content"])
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    path.write_text(json.dumps({"chat_template": named}))
    assert load_template(path)(row).text == "t"
    for content in ("{}", "{", "[]", "null"):
        path.write_text(content)
        with pytest.raises(ConfigError, match="cannot read this chat template"):
            load_template(path)


def test_newer_tokenizers_have_their_template_beside_them(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer_config.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"no chat_template\.jinja beside it"):
        load_template(path)
    (tmp_path / "chat_template.jinja").write_text("beside")
    row = {"messages": [{"role": "user", "content": "Hi."}], "tools": "[]"}
    assert load_template(path)(row).text == "beside"


def test_the_command_shows_rows_and_sums_up_what_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(ALL.replace(' or ""', ' and ""'))
    source = make_run(tmp_path, call_record("A"), call_record("B"))
    options: dict[str, Any] = {"format": "openai", "render": "t.jinja", "render_rows": 1}
    done = run(tmp_path, "export", source.run_dir, **options)
    assert done.returncode == 0, done.stderr
    end = "=== dropped by the template in 2 rows"
    _, shown, output = done.stdout.partition("=== t0\n")[2].partition(end)
    assert "dropped: message 3 (assistant), reasoning" in done.stdout
    assert "=== t1" not in done.stdout
    assert shown
    assert "carry loss: 30 of " in done.stdout
    assert output.splitlines()[1].split(maxsplit=1) == ["2", "message (assistant), reasoning"]
    done = run(tmp_path, "export", source.run_dir, format="raw", render="t.jinja")
    assert (done.returncode, "add it to --format" in done.stderr) == (2, True)
