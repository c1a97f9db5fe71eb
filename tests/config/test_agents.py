"""A run can name an agent; options that mean nothing with it are refused before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agent.models.model import ModelSettings
from agent.wires.reading import remove_matches
from batch_runner import main
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.basics.presets import presets
from batch_trajectories.config.agents import find_model
from batch_trajectories.config.fingerprint import (
    data_options,
    digest_options,
    fill_defaults,
    stored_meaning,
)
from batch_trajectories.config.loading import load_config
from batch_trajectories.config.models import set_up_models
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.engine.worker.agent_program import (
    check_agent_of_node,
    check_agent_program,
    free_memory_mb,
)
from tests.toolsets.test_sandbox import needs_bwrap

AGENT: dict[str, Any] = {"command": ["sh", "-c", "{prompt}"], "speaks": ["openai_chat"]}


def config(**options: Any) -> RunConfig:
    given = {
        "dataset_file": Path("p.jsonl"),
        "run_name": "r",
        "model": "m",
        "base_url": "http://127.0.0.1:1/v1",
        "agent": AGENT,
        **options,
    }
    return load_config(None, given)


@pytest.mark.parametrize("name", presets("agents"))
def test_a_preset_is_valid_and_named_after_its_file(name: str) -> None:
    agent = config(agent=name).agent
    assert agent is not None
    assert agent.name == name


def test_the_list_of_agents_says_where_their_installation_is_described(tmp_path: Path) -> None:
    listed = CliRunner().invoke(main, ["agents"], env={"PATH": str(tmp_path)})
    assert listed.exit_code == 0, listed.output
    assert "codex " in listed.stdout
    assert "how to install them: docs/reference/presets.md" in listed.stderr


UUID = "51180b64-6f44-4828-a5ab-{n:012}"
LISTING = "The directory listing of current working directory is:\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "claude-code",
            "agentId: a05ff74d97c1f02c{n} (use SendMessage with to: 'a05ff{n}', summary)",
        ),
        ("claude-code", "<usage>subagent_tokens: 11882\ntool_uses: 2\nduration_ms: 68{n}</usage>"),
        ("claude-code", f"/home/user/.claude/projects/-workspace/{UUID}/tool-results/bxj{{n}}.txt"),
        ("codex", "Chunk ID: 18a7{n}f\nWall time: 0.{n} seconds\nOutput:\n"),
        ("opencode", '<task id="ses_df721baa4ffecKrYA18coy345{n}" state="completed">'),
        ("opencode", "saved to: /home/user/.local/share/opencode/tool-output/tool_208e2X{n}\n"),
        ("qwen-code", "Exit Code: 0\nSignal: 0\nProcess Group PGID: 18{n}"),
        ("cn", "Today's date: 2026-11-2{n}"),
        ("hermes-agent", "Conversation started: Tuesday, November 2{n}, 2026"),
        ("pi", "Current date: 2026-11-2{n}\nCurrent working directory: /workspace"),
        ("pi", "[Showing lines 28002-30000. Full output: /tmp/pi-bash-1866cd16221dc05{n}.log]"),
        ("kimi-code", "Exit code: 0\nWall time: 0.12{n}\n"),
        ("kimi-code", f"/.kimi-code/sessions/w/session_{UUID}/agents/main/wire.jsonl"),
        ("kimi-code", 'next_step: Use TaskOutput(task_id="bash-9vuu907{n}")'),
        ("kimi-code", f"{LISTING}\n```\n├── task00.log\n└── task00{{n}}.log\n```"),
        ("openhands", "The current date and time is: 2026-11-27T19:07:37.74424{n}"),
        ("hermes-agent", "Host: Linux (6.18.4{n}-generic)"),
        ("qwen-code", "/home/user/.qwen/tmp/c52dd/run_shell_command_babbb251fa7{n}.output"),
        (
            "gemini-cli",
            f"/tmp/workspace/tool-outputs/session-{UUID}/run_shell_command_1795445{{n}}.txt",
        ),
    ],
)
def test_a_preset_knows_what_its_agent_makes_anew_with_each_start(name: str, text: str) -> None:
    """Texts that the agents were seen to write."""
    agent = config(agent=name).agent
    assert agent is not None
    left = {remove_matches(text.format(n=n), agent.volatile_values.texts) for n in range(10)}
    assert len(left) == 1


@pytest.mark.parametrize("name", ["kimi-code", "kimi-code-acp"])
def test_files_that_another_subagent_adds_are_no_other_call(name: str) -> None:
    agent = config(agent=name).agent
    assert agent is not None
    listed = ("(empty directory)", "└── a.log", "├── a.log\n├── b\n│   └── c\n└── d")
    texts = [f"{LISTING}\n```\n{files}\n```\n\n# Project" for files in listed]
    assert len({remove_matches(text, agent.volatile_values.texts) for text in texts}) == 1


def test_a_run_continues_where_its_preset_knows_more() -> None:
    meaning = data_options(config())
    then = {**meaning, "agent": {**meaning["agent"], "volatile": {"fields": [], "texts": ["a"]}}}
    assert fill_defaults(then) == fill_defaults(meaning)
    other = {**meaning, "agent": {**meaning["agent"], "command": ["bash"]}}
    assert fill_defaults(other) != fill_defaults(meaning)


def test_a_run_continues_where_its_agent_is_described_as_before_and_not_by_another_protocol() -> (
    None
):
    """Stored configs of earlier versions have no protocol, and lists where we have tuples."""
    meaning = data_options(config())
    assert not {"protocol", "rejects"} & meaning["agent"].keys()
    by_acp = data_options(config(agent={**AGENT, "protocol": "acp", "rejects": "fetch"}))
    assert by_acp["agent"] == {**meaning["agent"], "protocol": "acp", "rejects": ["fetch"]}


def test_an_agent_can_be_a_file_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("command: [run, '{prompt}']\nspeaks: openai_chat\n")
    (tmp_path / "run.yaml").write_text("agent: mine.yaml\n")
    loaded = load_config(tmp_path / "run.yaml", {"dataset_file": "p", "run_name": "r"})
    assert loaded.agent is not None
    assert loaded.agent.name == "mine"


def test_the_file_of_an_agent_can_be_a_part_of_a_config(tmp_path: Path) -> None:
    """As docs/agents.md shows it."""
    file = tmp_path / "mine.yaml"
    file.write_text("agent:\n  command: [run, '{prompt}']\n  speaks: openai_chat\n")
    loaded = config(agent=str(file)).agent
    assert loaded is not None
    assert (loaded.name, loaded.command) == ("mine", ("run", "{prompt}"))


def test_a_missing_key_is_named_without_all_the_others() -> None:
    with pytest.raises(ConfigError) as caught:
        config(agent={"speaks": "openai_chat", "env": {"A": "x" * 50}})
    assert str(caught.value) == "--agent, in command: is missing"


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ("codx", "no such preset: 'codx'; did you mean 'codex'?"),
        ("no.yaml", "no.yaml: "),
        ("{", "not JSON"),
        ({"command": ["x", "{prompt}"]}, "speaks"),
    ],
)
def test_a_wrong_agent_is_explained(agent: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(agent=agent)
    assert "agent" in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.5},
        {"system_prompt": "You are"},
        {"enabled_toolsets": "file"},
        {"disabled_toolsets": "file"},
        {"tools": "x.py:tools"},
        {"distribution": "default"},
        {"extra_body": {"a": 1}},
        {"reasoning_effort": "low"},
        {"check_expected": True},
        {"plan": True},
        {"text_protocol": "react"},
        {"forks": True},
        {"batch_api": True},
        {"stream_replies": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_an_option_that_means_nothing_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))}: means nothing with agent"):
        config(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"agent": {**AGENT, "env": {"K": "sk-abcdefgh"}}}, "agent.env.K: seems to hold a secret"),
    ],
)
def test_what_cannot_be_done_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**options)


def test_runs_of_before_had_no_limit_on_repeats() -> None:
    """It stood in their fingerprints, and meant nothing."""
    today = config()
    agent = {k: v for k, v in today.to_json()["agent"].items() if k != "continues"}
    before = {"agent": agent, "base_url": today.base_url}
    meaning = {**data_options(today), "repeat_limit": 3}
    assert data_options(today)["repeat_limit"] == 0
    assert stored_meaning({"meaning": meaning, "config": before})["repeat_limit"] == 0
    own = {"meaning": meaning, "config": today.to_json()}
    assert stored_meaning(own)["repeat_limit"] == 3


def test_limits_of_an_agent_are_its_own_unless_they_are_given() -> None:
    assert (config().max_turns, config().max_conversation_s) == (200, 3600.0)
    assert config(max_turns=7).max_turns == 7
    assert load_config(None, {"dataset_file": "p", "run_name": "r"}).max_turns == 20


def test_an_endpoint_of_another_dialect_is_refused() -> None:
    """Bodies are relayed as they are, so the endpoint must speak what the agent speaks."""
    with pytest.raises(ConfigError) as caught:
        set_up_models(config(api="anthropic_messages"))
    assert "agent 'custom' speaks openai_chat, but 'm' is called by anthropic_messages" in str(
        caught.value
    )


def test_a_server_of_the_users_own_speaks_what_the_agent_speaks() -> None:
    setup = set_up_models(config(agent={**AGENT, "speaks": "anthropic_messages"}))["m"]
    assert setup.settings.api == "anthropic_messages"


def test_gemini_is_only_for_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests are relayed to the provider's own root, not to that of its chat API."""
    monkeypatch.setenv("GEMINI_API_KEY", "x")
    google = {"model": "gemini:g", "base_url": None, "api": "gemini"}
    setup = set_up_models(config(agent={**AGENT, "speaks": "gemini"}, **google))["gemini:g"]
    assert setup.settings.base_url == "https://generativelanguage.googleapis.com"
    with pytest.raises(ConfigError, match="the API gemini is only for agents"):
        set_up_models(config(agent=None, **google))


def test_aliases_are_models_of_the_run() -> None:
    agent = {**AGENT, "aliases": {"small*": "other", "*": "{model}"}}
    run = config(agent=agent)
    setup = set_up_models(run)["m"]
    assert run.agent is not None
    assert [model.name for model in setup.models()] == ["m", "other", "m"]

    def asked(name: str) -> ModelSettings | None:
        assert run.agent is not None
        return find_model(run.agent, setup.settings, setup.aliases, name)

    assert [one and one.name for one in map(asked, ("m", "small-2", "unknown"))] == [
        "m",
        "other",
        "m",
    ]
    without = config()
    assert without.agent is not None
    assert find_model(without.agent, setup.settings, {}, "unknown") is None


def test_an_alias_needs_a_price_where_there_is_a_budget() -> None:
    agent = {**AGENT, "aliases": {"small": "other"}}
    prices = {"m": {"input": 1, "output": 1}}
    with pytest.raises(ConfigError, match="the price of model 'other' is unknown"):
        set_up_models(config(agent=agent, prices=prices, max_run_cost_usd=1, max_tokens=10))


def program(path: Path, version: str) -> Path:
    path.write_text(f"#!/bin/sh\necho 'agent {version} (build)'\n")
    path.chmod(0o755)
    return path


@needs_bwrap
def test_the_version_is_read_in_the_sandbox_and_fixed_for_the_run(tmp_path: Path) -> None:
    path = program(tmp_path / "agent", "1.2.3")
    agent = {**AGENT, "command": [str(path), "{prompt}"]}
    first = check_agent_program(config(agent=agent))
    assert first.agent is not None
    assert first.agent.found_version == "1.2.3"
    program(path, "1.2.4")
    second = check_agent_program(config(agent=agent))
    assert digest_options(data_options(first)) != digest_options(data_options(second))


@needs_bwrap
def test_a_version_may_be_printed_as_errors_are(tmp_path: Path) -> None:
    path = tmp_path / "agent"
    path.write_text("#!/bin/sh\necho 0.73.1 >&2\n")
    path.chmod(0o755)
    agent = check_agent_program(config(agent={**AGENT, "command": [str(path), "{prompt}"]})).agent
    assert agent is not None
    assert agent.found_version == "0.73.1"


@needs_bwrap
def test_another_version_on_a_node_is_refused(tmp_path: Path) -> None:
    path = program(tmp_path / "agent", "1.2.3")
    agent = {**AGENT, "command": [str(path), "{prompt}"]}
    driver = check_agent_program(config(agent=agent, executor="ray"))
    assert driver.concurrency is None, "the memory of a node is not this one's"
    check_agent_of_node(driver)
    program(path, "1.2.4")
    message = "is version 1.2.4 on this node, but 1.2.3 where the run was started"
    with pytest.raises(ConfigError, match=message):
        check_agent_of_node(driver)


@needs_bwrap
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exec sh -c 'echo broken 1.2 >&2; exit 3'", "printed no version (exit code 3): broken"),
        ("exit 0", "(exit code 0): no output; set `version` of the agent to the command that does"),
        ("cat /proc/version > /home/user/v && ls $HOME", "printed no version"),
    ],
)
def test_an_agent_that_does_not_start_there_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "agent"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    with pytest.raises(ConfigError) as caught:
        check_agent_program(config(agent={**AGENT, "command": [str(path), "{prompt}"]}))
    assert message in str(caught.value)


def test_an_agent_that_is_not_installed_is_refused() -> None:
    with pytest.raises(ConfigError, match="agent 'custom': the program 'no-such' was not found"):
        check_agent_program(config(agent={**AGENT, "command": ["no-such", "{prompt}"]}))


def test_a_script_that_is_not_executable_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text("#!/usr/bin/env python3\n")
    with pytest.raises(ConfigError, match=f"'{path}' is not executable: chmod \\+x {path}"):
        check_agent_program(config(agent={**AGENT, "command": [str(path), "{prompt}"]}))


def test_a_shim_is_refused_where_the_sandbox_does_not_show_what_it_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shims").mkdir()
    program(tmp_path / "shims" / "python3", "1.2.3")
    monkeypatch.setenv("PATH", f"{tmp_path / 'shims'}:/usr/bin:/bin")
    (tmp_path / "agent").write_text("#!/usr/bin/env python3\n")
    (tmp_path / "agent").chmod(0o755)
    agent = {**AGENT, "command": [str(tmp_path / "agent"), "{prompt}"], "version": []}
    with pytest.raises(ConfigError, match=f"version manager in {tmp_path}/shims, .* virtual env"):
        check_agent_program(config(agent=agent))
    check_agent_program(config(agent=agent, sandbox="local"))


def test_no_more_agents_run_than_fit_into_memory() -> None:
    free = free_memory_mb()
    assert free is not None
    agent = {**AGENT, "version": [], "memory_mb": free}  # a second one would not fit
    one = check_agent_program(config(agent=agent))
    assert (one.num_workers, one.concurrency) == (1, 1)
    given = check_agent_program(config(agent=agent, concurrency=5))
    assert (given.num_workers, given.concurrency) == (4, 5)


@pytest.mark.parametrize("word", ["agent.py", "./agent.py"])
def test_a_relative_path_means_the_same_in_command_and_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    script = tmp_path / "agents" / "agent.py"
    script.parent.mkdir()
    script.touch()
    given = {"command": ["python3", word, "{prompt}"], "programs": ["agent.py"]}
    agent = AGENT | given | {"version": ["python3", word, "-V"]}
    (script.parent / "mine.yaml").write_text(json.dumps(agent))
    monkeypatch.chdir(tmp_path)
    read = config(agent="agents/mine.yaml").agent
    assert read is not None
    assert read.command == ("python3", str(script), "{prompt}")
    assert read.version_command == ("python3", str(script), "-V")
    monkeypatch.chdir(script.parent)
    inline = config(agent=json.dumps({"name": "mine", **agent})).agent
    assert inline is not None
    assert inline.command == read.command


@pytest.mark.parametrize("is_in_config", [False, True], ids=["agent_file", "config_file"])
def test_programs_are_looked_for_beside_the_file_that_names_them_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_config: bool
) -> None:
    """Then in the current directory; what is nowhere stays as it was written."""
    here, beside = tmp_path / "here", tmp_path / "files"
    (beside / "data").mkdir(parents=True)
    here.mkdir()
    for path in (beside / "both.py", here / "both.py", here / "only_here.py"):
        path.touch()
    absolute = str(here / "only_here.py")
    programs = ["data", "both.py", "only_here.py", "nowhere.py", absolute]
    file = beside / "my.yaml"
    file.write_text(json.dumps({"agent": {**AGENT, "programs": programs}}))
    monkeypatch.chdir(here)
    given = {"dataset_file": "p.jsonl", "run_name": "r", "model": "openai:m"}
    if is_in_config:
        agent = load_config(Path("../files/my.yaml"), given).agent
    else:
        agent = config(agent="../files/my.yaml").agent
    assert agent is not None
    found = ["../files/data", "../files/both.py", "only_here.py", "nowhere.py", absolute]
    assert [*map(str, agent.programs)] == found
