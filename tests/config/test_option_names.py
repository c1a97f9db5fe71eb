"""Options that are gone, and names that other programs give to ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agent.options import AgentOptions, row_options
from batch_runner import main
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.basics.option_names import FIXED, FORMER, describe_unknown, rename_former
from batch_trajectories.cli.run import estimate, run
from batch_trajectories.config.fingerprint import (
    data_options,
    fill_defaults,
    stored_meaning,
    update_names,
)
from batch_trajectories.config.loading import ONLY_FLAGS, load_config
from batch_trajectories.config.run_config import RunConfig
from run_agent import AIAgent

FLAGS: dict[str, Any] = {"dataset_file": "p.jsonl", "run_name": "r", "model": "openai:m"}


def old_run_json(**former: Any) -> dict[str, Any]:
    """A run.json of an earlier version, with these options in it."""
    config = load_config(None, FLAGS)
    return {
        "config": {**config.to_json(), **former},
        "meaning": {**data_options(config), **former},
    }


def test_no_name_is_of_today() -> None:
    assert not FORMER.keys() & RunConfig.model_fields.keys()


@pytest.mark.parametrize("name", [name for name, one in FORMER.items() if not one.is_accepted])
def test_a_name_that_is_gone_is_refused_with_what_to_do(tmp_path: Path, name: str) -> None:
    (tmp_path / "run.yaml").write_text(f"{name}: 1\n")
    for file, flags, place in (
        (tmp_path / "run.yaml", {}, f"{tmp_path / 'run.yaml'}:1: {name}"),
        (None, {name: "1"}, f"--{name}"),
    ):
        with pytest.raises(ConfigError) as raised:
            load_config(file, {**FLAGS, **flags})
        assert str(raised.value) == f"{place}: no longer an option; {FORMER[name].advice}"


def test_a_config_file_is_told_which_options_are_only_flags(tmp_path: Path) -> None:
    """`ONLY_FLAGS` are all options of `run` and `estimate` that no config has."""
    own = {
        name.removeprefix("--")
        for command in (run, estimate)
        for param in command.params
        if param.name not in {*RunConfig.model_fields, *FORMER}
        for name in param.opts
    }
    assert own <= ONLY_FLAGS
    assert ONLY_FLAGS - own == {"help"}
    for written, name in (("fresh", "fresh"), ("dry-run", "dry_run"), ("pilot", "pilot")):
        (tmp_path / "run.yaml").write_text(f"max_turns: 3\n{written}: true\n")
        with pytest.raises(ConfigError) as raised:
            load_config(tmp_path / "run.yaml", FLAGS)
        place = f"{tmp_path / 'run.yaml'}:2: {name}"
        assert str(raised.value) == f"{place}: only on the command line: --{name}"


def test_rows_and_python_are_told_too() -> None:
    advice = "no longer an option; a step of a plan has 5 replies"
    with pytest.raises(ValueError, match=f"`agent_options.plan_step_turns`: {advice}"):
        row_options(AgentOptions(), {"agent_options": {"plan_step_turns": 5}})
    with pytest.raises(ValueError, match=f"plan_step_turns: {advice}"):
        AIAgent(model="scripted", script=[], enabled_toolsets=["none"], plan_step_turns=5)
    assert (
        describe_unknown("max_turn", ["max_turns"], "")
        == "unknown option; did you mean 'max_turns'?"
    )


def test_names_of_other_programs_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "prefill.json").write_text('[{"role": "user", "content": "Hi"}]')
    (tmp_path / "run.yaml").write_text(
        "prefill_messages_file: prefill.json\napi_key_env: MINE\nresume: true\n"
        "reasoning_effort: high\nreasoning-disabled: true\n"
    )
    config = load_config(tmp_path / "run.yaml", FLAGS)
    assert [message.content for message in config.prefill_messages] == ["Hi"]
    assert (config.key_env, config.reasoning_effort) == ("MINE", "none")
    config = load_config(None, {**FLAGS, "reasoning_effort": "low", "reasoning_disabled": "false"})
    assert config.reasoning_effort == "low"


@pytest.mark.parametrize(
    ("former", "today"),
    [
        ({"reasoning_disabled": True, "reasoning_effort": "high"}, {"reasoning_effort": "none"}),
        ({"reasoning_disabled": False, "reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"blank_reasoning": True, "plan_step_turns": 5, "preparation_attempts": 2}, {}),
        ({"batch_live_share": 0.5, "ray_scratch_dir": "/x", "web_search_url": "http://x"}, {}),
        ({"prefill_messages_file": "p.json"}, {}),
    ],
)
def test_stored_runs_mean_what_they_meant(former: dict[str, Any], today: dict[str, Any]) -> None:
    run = json.loads(json.dumps(old_run_json(**former)))
    now = fill_defaults(data_options(load_config(None, {**FLAGS, **today})))
    assert stored_meaning(run) == json.loads(json.dumps(now))
    read = RunConfig.model_validate(update_names(run["config"], None))
    assert read.reasoning_effort == today.get("reasoning_effort")
    assert read.prefill_messages == ()


def test_a_run_with_another_value_of_what_is_fixed_now_differs() -> None:
    run = old_run_json(plan_step_turns=7)
    now = fill_defaults(data_options(load_config(None, FLAGS)))
    differing = {name for name in now if stored_meaning(run).get(name) != now[name]}
    assert differing == {"plan_step_turns"}
    assert now["plan_step_turns"] == FIXED["plan_step_turns"] == 5


def test_what_the_user_gives_now_is_not_mixed_with_what_is_gone() -> None:
    given = {"web_search_url": "x", "api_key_env": "A"}
    assert rename_former(given) == {"web_search_url": "x", "key_env": "A"}
    assert rename_former(given, is_stored=True) == {"key_env": "A"}


@pytest.mark.parametrize("flag", ["--compact_after=1", "--result_references"])
def test_an_option_without_a_flag_says_where_to_set_it(flag: str) -> None:
    done = CliRunner().invoke(main, ["run", flag, "--dataset_file=p.jsonl", "--run_name=r"])
    assert done.exit_code == 2
    assert "cannot be given as a flag. Set " in done.output
