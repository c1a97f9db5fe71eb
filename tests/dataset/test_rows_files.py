"""Rows files: rows of known kinds of datasets become rows of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agent.options import AgentOptions, SimulatedUser
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.basics.presets import presets
from batch_trajectories.config.loading import load_config
from batch_trajectories.dataset.row import RowRules, RowTask
from batch_trajectories.dataset.row_workspace import RowSetup
from batch_trajectories.dataset.rows_file import load_rows_file
from tests.helpers.playing import say
from tests.helpers.running import SCRIPTED, lines, run, write_rows
from toolsets.sandbox.base import ImageSpec

INSIDE = RowRules(with_setup=True, image="needed", inside=True, check_in="fresh")

ROWS: dict[str, dict[str, Any]] = {
    "swe-bench": {
        "instance_id": "Django__django-11",
        "repo": "django/django",
        "base_commit": "c0ffee",
        "problem_statement": "It breaks.",
        "patch": "the solution",
        "test_patch": "diff --git a/tests/a.py b/tests/a.py\n",
        "FAIL_TO_PASS": '["test_a (m.C)"]',
        "PASS_TO_PASS": ["test_b (m.C)"],
    },
    "swe-smith": {
        "instance_id": "o__r.0123abcd.lm__1",
        "repo": "swesmith/o__r.0123abcd",
        "image_name": "org/swesmith.x86_64.o__r.0123abcd",
        "patch": "the bug",
        "problem_statement": "It breaks.",
        "FAIL_TO_PASS": ["t/test_a.py::test_a"],
        "PASS_TO_PASS": ["t/test_a.py::test_b"],
    },
    "r2e-gym": {
        "repo_name": "numpy",
        "commit_hash": "c0ffee",
        "docker_image": "org/numpy_final:c0ffee",
        "prompt": "how the issue was written",
        "problem_statement": "Fix:\n[ISSUE]\nIt breaks.\n[/ISSUE]\nThanks.",
        "parsed_commit_content": "the solution",
        "expected_output_json": '{"TestA.test_a": "PASSED"}',
    },
    "swe-rebench": {
        "instance_id": "o__r-1",
        "repo": "o/r",
        "base_commit": "c0ffee",
        "image_name": "docker.io/org/o__r:1",
        "problem_statement": "It breaks.",
        "patch": "the solution",
        "test_patch": "diff --git a/t/a.go b/t/a.go\n",
        "install_config": {"test_cmd": ["go test ./..."], "log_parser": "parse_log_gotest"},
        "FAIL_TO_PASS": ["TestA"],
        "PASS_TO_PASS": "[]",
    },
}
"""A row of each kind, with the columns that decide."""

IMAGES = {
    "swe-bench": "docker.io/swebench/sweb.eval.x86_64.django_1776_django-11:latest",
    "swe-smith": "org/swesmith.x86_64.o_1776_r.0123abcd",
    "r2e-gym": "org/numpy_final:c0ffee",
    "swe-rebench": "docker.io/org/o__r:1",
}


def rows_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return str(path)


def load_columns(tmp_path: Path, columns: str, row: dict[str, Any]) -> dict[str, Any]:
    return load_rows_file(rows_file(tmp_path, f"columns:\n  {columns}\nkeep: []\n")).row(row)


def setup_of(row: dict[str, Any]) -> RowSetup:
    setup = INSIDE.read(row).setup
    assert setup is not None
    return setup


class TestPresets:
    @pytest.mark.parametrize("name", ROWS)
    def test_a_row_of_each_kind_can_be_used(self, name: str) -> None:
        row = load_rows_file(name).row(ROWS[name])
        task = INSIDE.read(row)
        assert task.image is not None
        assert task.image.reference == IMAGES[name]
        assert task.opening[-1]["content"].endswith("\n\nIt breaks.")
        assert "the solution" not in json.dumps(row)
        check = setup_of(row).check
        assert check is not None
        assert check.tests is not None

    def test_there_is_a_row_for_each_preset(self) -> None:
        assert presets("rows").keys() == {*ROWS, "harbor", "tau2"}

    def test_swe_bench_takes_the_image_that_a_row_names(self) -> None:
        row = load_rows_file("swe-bench").row({**ROWS["swe-bench"], "image_name": "own:1"})
        assert INSIDE.read(row).image == ImageSpec("own:1", "/testbed", None, row["env"])

    def test_swe_bench_runs_tests_as_the_repository_does(self) -> None:
        made = load_rows_file("swe-bench").row
        django = setup_of(made(ROWS["swe-bench"])).check
        other = setup_of(made({**ROWS["swe-bench"], "repo": "psf/requests"})).check
        assert django is not None
        assert other is not None
        assert b"runtests.py" in django.files["/check/tests.sh"]
        assert other.files["/check/tests.sh"].startswith(b"pytest ")
        assert django.tests is not None
        assert django.tests.must_pass == ("test_a (m.C)", "test_b (m.C)")

    def test_swe_bench_runs_the_script_of_a_row(self) -> None:
        """And refuses what it could not read the output of."""
        new = {**ROWS["swe-bench"], "image": "new:1", "eval_script": "#!/bin/bash\ntox\n"}
        check = setup_of(load_rows_file("swe-bench").row(new | {"log_parser": "parse_log_gotest"}))
        assert check.check is not None
        assert check.check.files["/check/run.sh"] == b"#!/bin/bash\ntox\n"
        assert check.check.tests is not None
        assert "--- " in check.check.tests.patterns[0]
        other = load_rows_file("swe-bench").row(new | {"log_parser": "parse_log_karma"})
        with pytest.raises(ValueError, match="no case for 'parse_log_karma'"):
            INSIDE.read(other)

    def test_swe_smith_hides_the_bug_and_the_tests(self) -> None:
        setup = setup_of(load_rows_file("swe-smith").row(ROWS["swe-smith"]))
        assert setup.hidden == ("/check",)
        names = b"t/test_a.py::test_a\nt/test_a.py::test_b\n"
        assert setup.files == {"/check/names.txt": names, "/check/bug.patch": b"the bug"}

    def test_r2e_gym_hides_its_tests_and_expects_each_status(self) -> None:
        setup = setup_of(load_rows_file("r2e-gym").row(ROWS["r2e-gym"]))
        assert "/r2e_tests" in setup.hidden
        assert setup.check is not None
        assert setup.check.tests is not None
        assert setup.check.tests.expected == {"TestA.test_a": "PASSED"}

    def test_swe_rebench_names_a_parser_that_it_lacks(self) -> None:
        config = json.dumps({"test_cmd": "x", "log_parser": "parse_log_maven"})
        row = load_rows_file("swe-rebench").row({**ROWS["swe-rebench"], "install_config": config})
        with pytest.raises(
            ValueError,
            match=r"swe-rebench\.yaml:\d+: columns\.check\.tests\.patt"
            r"erns: no case for 'parse_log_maven'; ",
        ):
            INSIDE.read(row)
        assert row.keys() == {"instance_id", "row_error"}

    def test_swe_rebench_names_the_tests_of_the_first_version(self) -> None:
        first = {"test_cmd": "pytest -rA", "log_parser": "parse_log_pytest"}
        row = {**ROWS["swe-rebench"], "install_config": first, "docker_image": "org/one:1"}
        del row["image_name"]
        made = load_rows_file("swe-rebench").row(row)
        assert made["docker_image"] == "org/one:1"
        assert made["check"]["files"]["/check/tests.sh"] == "pytest -rA $tests"


TAU2: dict[str, Any] = {
    "id": "0",
    "description": {"purpose": "Tests a refund.", "notes": None},
    "user_scenario": {
        "persona": None,
        "instructions": {
            "domain": "retail",
            "reason_for_call": "The kettle leaks.",
            "known_info": "You are Ann.",
            "unknown_info": None,
            "task_instructions": "Ask for a refund.",
        },
    },
    "initial_state": None,
    "evaluation_criteria": {"actions": [], "reward_basis": ["DB"]},
}
"""A task with the members of tau2-bench."""


class TestTau2:
    RULES = RowRules(options=AgentOptions(simulated_user=SimulatedUser()), with_setup=True)

    def read(self, **changes: Any) -> RowTask:
        return self.RULES.read(load_rows_file("tau2").row({**TAU2, **changes}))

    def instructions(self, **changes: Any) -> str:
        user = self.read(**changes).spec.options.simulated_user
        assert user is not None
        assert user.writes_first
        return user.system_prompt

    def test_the_scenario_is_the_user(self) -> None:
        assert self.instructions() == (
            "Instructions:\nDomain: retail\nReason for call:\nThe kettle leaks.\n"
            "Known info:\nYou are Ann.\nTask instructions:\nAsk for a refund."
        )
        plain = {"persona": "You are brief.", "instructions": "Ask for a refund."}
        assert self.instructions(user_scenario=plain) == (
            "Persona:\nYou are brief.\n\nInstructions:\nAsk for a refund."
        )

    def test_no_other_part_of_a_task_is_lost(self) -> None:
        row = load_rows_file("tau2").row({**TAU2, "ticket": "Refund."})
        assert {**TAU2, "ticket": "Refund."}.items() <= row.items()
        data = {"agent_data": {"orders": {"W1": ["<x>"]}}}
        setup = self.read(initial_state={"initialization_data": data}).setup
        assert setup is not None
        assert json.loads(setup.files["initialization_data.json"]) == data
        for tools, toolsets in (([], ("none",)), (None, ("phone",))):
            user = SimulatedUser(enabled_toolsets=("phone",))
            rules = replace(self.RULES, options=AgentOptions(simulated_user=user))
            read = rules.read(load_rows_file("tau2").row({**TAU2, "user_tools": tools}))
            assert read.spec.options.simulated_user is not None
            assert read.spec.options.simulated_user.enabled_toolsets == toolsets

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"initial_state": {"initialization_actions": [{"func_name": "turn_data_off"}]}},
                r"tau2\.yaml:\d+: columns\.initial_state\.cases\.actions: "
                "initial_state.initialization_actions are calls",
            ),
            (
                {"initial_state": {"message_history": [{"role": "user", "content": "Hi."}]}},
                "initial_state.message_history begins the conversation",
            ),
            ({"user_tools": ["pay"]}, "user_tools names tools of the user one by one"),
            ({"user_scenario": {"instructions": {"a": 1}}}, "a list or an object is not text"),
            ({"user_scenario": None}, "has no `user_scenario`"),
        ],
    )
    def test_what_a_row_cannot_carry_is_refused_by_name(
        self, changes: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            self.read(**changes)


class TestTemplates:
    @pytest.mark.parametrize(
        ("template", "value"),
        [
            ('"{{list}}"', ["a b", "c"]),
            ('"{{list|quote}} x"', "'a b' c x"),
            ('"{{list|lines}}"', "a b\nc\n"),
            ('"{{text|json}}"', {"n": {"m": 1}}),
            ('"{{text.n.m}}"', 1),
            ('"<{{object.name|lower}}>"', "<x>"),
            ('\'{{object.name|replace("X", ", ")}}\'', ", "),
            ("'{{path|after(\"/\")}}'", "c"),
            ("[1, '{{none?}}', '{{n}}']", [1, 7]),
            ("{a: '{{none?}}', b: true, c: '{{n}} {{flag}}'}", {"b": True, "c": "7 true"}),
            ("{first_of: ['{{none}}', '{{null}}', 'last']}", "last"),
            ("{match: '{{n}}', cases: {'7': seven}}", "seven"),
            ("{match: '{{n}}', cases: {'8': eight}, default: '{{n}}'}", 7),
            ("{match: 1, other: 2}", {"match": 1, "other": 2}),
            ('"{ {n} } ${VAR} {}"', "{ {n} } ${VAR} {}"),
            # Names that mean something else in Jinja2.
            ("'{{my-name|lower}} ${#all[@]} {{my-name?}}'", "x ${#all[@]} X"),
            ("['{{7}}', '{{object.0}}', '{{object.items}}', '{{self}}']", ["seven", 0, [1], "me"]),
            ('"a\\r\\n{{n}}\\n"', "a\r\n7\n"),
            # What Jinja2 offers beyond that.
            ("'{{none or n}}'", 7),
            ("'{{none|default(\"x\")}}'", "x"),
            ("['{{n if flag else omit}}', '{{n if none else omit}}', '{{omit?}}']", [7]),
            ('\'{{list[1]}} {{row["my-name"]}} {{text.n["m"] + 1}}\'', "c X 2"),
            ("'{% if none %}a{% elif n == 7 and \"b\" in path %}b{% endif %}'", "b"),
            (
                '"{% for x in json|json %}\\n{{loop.index}}{{x}}\\n{% endfor %}\\n"',
                "1p\n2q\n",
            ),
            ("'{% for k, v in object|dictsort %}{{k}}{% endfor %}'", "0itemsname"),
            # An object as the text of a file, which no quote or "<" changes.
            ("{a.json: '{{markup|tojson}}'}", {"a.json": '{"a":["<b>&\'",1,null]}'}),
            ("'{{list|tojson}} {{n|tojson}}{{path|tojson}}'", '["a b","c"] 7"a/b/c"'),
            # A plain text has no members.
            ("'{% if path.n %}a{% else %}{{path}}{% endif %}'", "a/b/c"),
            ("['{{path.n?}}', '{{path.n or n}}']", [7]),
            ("{first_of: ['{{path.n}}', '{{path}}']}", "a/b/c"),
            ("{match: '{{n}}', cases: {'7': 1, '8': {refuse: no}}}", 1),
        ],
    )
    def test_values_are_filled_in(self, tmp_path: Path, template: str, value: Any) -> None:
        row = {
            "list": ["a b", "c"],
            "text": '{"n": {"m": 1}}',
            "path": "a/b/c",
            "n": 7,
            "flag": True,
            "object": {"name": "X", "0": 0, "items": [1]},
            "null": None,
            "my-name": "X",
            "7": "seven",
            "self": "me",
            "json": '["p", "q"]',
            "markup": {"a": ["<b>&'", 1, None]},
        }
        assert load_columns(tmp_path, f"made: {template}", row) == {"made": value}

    @pytest.mark.parametrize("text", ["123", "[1]", "None", "1e5", "{{n}}", "{% if %}", "{# x #}"])
    def test_a_columns_text_stays_text(self, tmp_path: Path, text: str) -> None:
        """It is neither a number nor a template, whatever it looks like."""
        filled = load_columns(
            tmp_path, "made: ['{{t}}', '{{t or 1}}', '<{{t}}>']", {"t": text, "n": 1}
        )
        assert filled == {"made": [text, text, f"<{text}>"]}

    @pytest.mark.parametrize(
        ("template", "message"),
        [
            ("'{{none}}'", "mine.yaml:2: columns.made: the row has no `none`"),
            ("\n    inner: ['{{none}}']", "mine.yaml:3: columns.made.inner[0]: the row has no"),
            ("'{{bad|json}}'", "mine.yaml:2: columns.made: not JSON: unexpected end of data: "),
            ("'{{gone.a.b}}'", "columns.made: the row has no `gone` in '{{gone.a.b}}'"),
            ("'x {{list}}'", "mine.yaml:2: columns.made: a list or an object is not text"),
            ("{match: '{{bad}}', cases: {good: 1}}", "no case for '{'; known: good"),
            ("'{{ {\"a\": [1, gone]} }}'", "columns.made: Type is not JSON serializable: Mis"),
            ("'{{bad < 1}}'", "columns.made: '<' not supported between"),
            ("'{{1e999 + 1}}'", "columns.made: name 'inf' is not defined"),
            ("'{{id.__class__}}'", "columns.made: the text 'a' has no `__class__` in"),
            ("'{% if bad.member %}a{% endif %}'", "columns.made: not JSON: "),
            ("'{{bad.member?}}'", "columns.made: not JSON: "),
            ("'{{gone|tojson}}'", "columns.made: the row has no `gone`"),
            ("{refuse: 'no {{id}} here'}", "mine.yaml:2: columns.made: no a here"),
            ("{first_of: [{refuse: 'no {{id}} here'}, 'x']}", "first_of[0]: no a here"),
            ("'{{list.__class__.__mro__}}'", "the row has no `__class__` in '{{list.__c"),
            ("'{% for a in l %}{{long}}{% endfor %}'", "columns.made: gives more than 67,108,864"),
            ("'{{long|replace(\"x\", long)}}'", "columns.made: gives more than 67,108,864 char"),
            # What is wrong in the first choice is not hidden by the second.
            ("{first_of: ['{{bad|json}}', 'x']}", "columns.made.first_of[0]: not JSON: "),
        ],
    )
    def test_a_row_that_cannot_fill_one_says_which(
        self, tmp_path: Path, template: str, message: str
    ) -> None:
        row = {"id": "a", "bad": "{", "list": [], "l": [0] * 1000, "long": "x" * 100_000}
        found = load_columns(tmp_path, f"made: {template}", row)
        assert found.keys() == {"id", "row_error"}
        assert message in found["row_error"]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("columns: [", "mine.yaml:1:11: not YAML"),
            ("- a", "mine.yaml: a rows file must have `key: value` lines"),
            ("keep: []", "mine.yaml: `columns` is missing"),
            ("columns: {}\ncolums: {}", "mine.yaml:2: colums: unknown key; did you mean 'columns'"),
            ("columns: {}\nkeep: a", "mine.yaml:2: keep: must be a list of columns"),
            ("columns: {}\noptions: {model: x}", "mine.yaml:2: options: must be an object with"),
            ("columns:\n  a: '{{b|lowr}}'", "mine.yaml:2: columns.a: unknown filter 'lowr'; did"),
            ("columns:\n  a: '{{b|after}}'", "columns.a: the filter after takes 1 texts"),
            ("columns:\n  a: '{{b c}}'", "mine.yaml:2: columns.a: expected token 'end of print "),
            ("columns:\n  a: '{{b.lower()}}'", "mine.yaml:2: columns.a: calls, `*`, `**` and `%`"),
            ("columns:\n  a: '{{9**9**9}}'", "mine.yaml:2: columns.a: calls, `*`, `**` and `%`"),
            ("columns:\n  a: '{{b|map(\"c\")}}'", "mine.yaml:2: columns.a: unknown filter 'map'"),
            (f"columns:\n  a: '{'{% for b in c %}' * 2}{'{% endfor %}' * 2}'", "a loop cannot be"),
            (f"columns:\n  a: '{'{{' + '(' * 9999}'", "mine.yaml:2: columns.a: maximum recursion"),
            ("columns:\n  a: '{% set b = 1 %}'", "of Jinja2's blocks there are only {% if %} and"),
            ("columns:\n  a: '{% include \"/etc/passwd\" %}'", "columns.a: of Jinja2's blocks"),
            ("columns:\n  a: {b: 1,\n    b: 2}", "mine.yaml:3:5: not YAML: duplicate key 'b'"),
            ("columns: {}\ncolumns: {}", "mine.yaml:2:1: not YAML: duplicate key 'columns'"),
            (f"columns: {{a: 1{'0' * 5000}}}", "mine.yaml:1:14: not YAML: not a value: Exceeds"),
            ("columns: &a {b: *a}", "mine.yaml:1:17: not YAML: an alias inside of its anchor"),
            ("columns: {a: \0}", "mine.yaml:1:14: not YAML: the character U+0000"),
            ("columns:\n  a: {first_of: x}", "mine.yaml:2: columns.a: first_of must be a list"),
            ("columns:\n  a: {match: x}", "mine.yaml:2: columns.a: match needs `cases`"),
        ],
    )
    def test_a_mistake_is_named_with_its_line(
        self, tmp_path: Path, text: str, message: str
    ) -> None:
        with pytest.raises(ConfigError) as raised:
            load_rows_file(rows_file(tmp_path, text))
        assert message in str(raised.value)


def test_an_unknown_kind_names_the_known_ones(tmp_path: Path) -> None:
    refused = run(tmp_path, **SCRIPTED, rows="swe-bnch")
    assert refused.returncode == 2
    assert "--rows: no such preset: 'swe-bnch'; did you mean 'swe-bench'?" in refused.stderr


def test_options_of_a_rows_file_are_defaults(tmp_path: Path) -> None:
    path = rows_file(tmp_path, "columns: {}\noptions: {row_setup: true, check_in: fresh}")
    given = {"dataset_file": "p", "run_name": "r", "rows": path}
    config = load_config(None, given)
    assert (config.row_setup, config.check_in) == (True, "fresh")
    assert not load_config(None, {**given, "row_setup": False}).row_setup
    # A run on disk states all options: it can be read when the rows file is gone.
    stored = config.model_dump(mode="json")
    Path(path).unlink()
    assert type(config).model_validate(stored).row_setup
    with pytest.raises(ConfigError, match=r"mine\.yaml: cannot read this rows file: No such file"):
        load_config(None, given)


def test_a_run_makes_its_rows_once(tmp_path: Path) -> None:
    path = rows_file(
        tmp_path,
        "columns:\n  prompt: 'Solve: {{question}}'\n  setup: ['echo {{n|quote}} > n.txt']\n"
        "  check: grep -q 7 n.txt\noptions: {row_setup: true}\nkeep: [id, script]\n",
    )
    rows = [
        {"id": "a", "question": "one", "n": 7, "script": [say("x")]},
        {"id": "b", "n": 7, "script": [say("x")]},
        {"id": "c", "question": "three", "n": 8, "script": [say("x")]},
    ]
    write_rows(tmp_path / "p.jsonl", *rows)
    done = run(tmp_path, **SCRIPTED, sandbox="local", rows="mine.yaml")
    assert done.returncode == 0, done.stderr
    assert "p.jsonl: row 2: discarded: mine.yaml:2: columns.prompt: the row has no `question`" in (
        done.stderr
    )
    records = {r["id"]: r for r in lines(tmp_path / "trajectories" / "r" / "records.jsonl")}
    assert {id: r["check"]["passed"] for id, r in records.items()} == {"a": True, "c": False}
    assert records["a"]["messages"][0]["content"] == "Solve: one"
    assert "question" not in records["a"]["row"]
    # An edit of the rows file is an edit of the rows.
    Path(path).write_text(Path(path).read_text().replace("Solve: ", "Please solve: "))
    again = run(tmp_path, **SCRIPTED, sandbox="local", rows="mine.yaml")
    assert again.returncode == 0, again.stderr
    records = {r["id"]: r for r in lines(tmp_path / "trajectories" / "r" / "records.jsonl")}
    assert records["a"]["messages"][0]["content"] == "Please solve: one"


def test_look_shows_rows_as_a_run_makes_them(tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", ROWS["r2e-gym"], {**ROWS["r2e-gym"], "docker_image": None})
    shown = run(tmp_path, "look", "p.jsonl", "--rows=r2e-gym", "--rows=1")
    assert shown.returncode == 0, shown.stderr
    assert "p.jsonl: 1 of 2 rows can be used" in shown.stdout
    assert "columns.docker_image: the row has no `docker_image`" in shown.stdout
    assert "To run it: --dataset_file=p.jsonl --rows=r2e-gym" in shown.stdout
    assert shown.stdout.count("\nrow ") == 1
    refused = run(tmp_path, "look", "p.jsonl", "--rows=1", "--rows=2")
    assert refused.returncode == 2


def test_look_names_the_option_that_rows_with_a_user_need(tmp_path: Path) -> None:
    refused = {**TAU2, "user_tools": ["pay"]}
    write_rows(tmp_path / "p.jsonl", TAU2, refused)
    shown = run(tmp_path, "look", "p.jsonl", "--rows=tau2").stdout
    assert "p.jsonl: 1 of 2 rows can be used" in shown
    assert "user_tools names tools of the user one by one" in shown
    assert "--dataset_file=p.jsonl --rows=tau2 --simulated_user='{}'" in shown


def test_variables_that_rows_may_name_must_be_set(tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [say("x")]})
    refused = run(tmp_path, **SCRIPTED, env_from="NOT_SET_ANYWHERE")
    assert refused.returncode == 2
    assert "--env_from=NOT_SET_ANYWHERE: this variable is not set" in refused.stderr
