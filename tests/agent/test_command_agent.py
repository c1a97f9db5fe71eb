"""An agent that runs as a command is described by a few checked fields."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from agent.gateway.command_agent import CommandAgent, fill_placeholders

VALUES = {
    "prompt": "Say {gateway} and {x}",
    "gateway": "http://127.0.0.1:8800",
    "key": "placeholder",
    "model": "m",
    "workspace": "/workspace",
    "home": "/home/user",
}


def agent(**fields: Any) -> CommandAgent:
    given = {"command": ["run", "{prompt}"], "speaks": "openai_chat", **fields}
    return CommandAgent.model_validate(given)


def test_placeholders_are_filled_once_and_other_braces_stay() -> None:
    assert fill_placeholders('{"m": {model}} {home} {prompt}', VALUES) == (
        '{"m": m} /home/user Say {gateway} and {x}'
    )


def test_every_agent_gets_the_gateway_and_no_key() -> None:
    env = agent(env={"MODEL": "{model}", "TZ": None}).environment(VALUES)
    assert env["OPENAI_BASE_URL"] == "http://127.0.0.1:8800/v1"
    assert env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8800"
    assert env["GOOGLE_GEMINI_BASE_URL"] == "http://127.0.0.1:8800"
    assert {env[name] for name in env if name.endswith("_KEY")} == {"placeholder"}
    assert env["MODEL"] == "m"
    assert "TZ" not in env


def test_a_command_can_be_one_text() -> None:
    assert agent(command="run --task '{prompt}'").command == ("run", "--task", "{prompt}")


@pytest.mark.parametrize(
    ("fields", "place", "message"),
    [
        ({"command": ["run"]}, (), "{prompt} is missing"),
        ({"command": []}, ("command",), "at least 1 item"),
        ({"speaks": "pigeon"}, ("speaks", 0), "Input should be 'openai_chat'"),
        ({"files": {"../x": ""}}, ("files", "../x", "[key]"), "relative to HOME"),
        ({"files": {"/etc/x": ""}}, ("files", "/etc/x", "[key]"), "relative to HOME"),
        ({"final_call": "("}, ("final_call",), "not a regular expression"),
        ({"volatile": {"texts": ["["]}}, ("volatile", "texts", 0), "not a regular expression"),
        ({"comand": ["x"]}, ("comand",), "Extra inputs"),
        ({"rejects": "fetch"}, (), "`protocol: acp`"),
        ({"protocol": "acp", "rejects": "fech"}, ("rejects", 0), "Input should be 'read'"),
        ({"protocol": "acp", "stdin": "{prompt}"}, (), "leave it out"),
        ({"protocol": "acp", "continues": ["run", "{prompt}"]}, (), "leave it out"),
    ],
)
def test_a_mistake_is_named(fields: dict[str, Any], place: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        agent(**fields)
    error = caught.value.errors()[0]
    assert error["loc"] == place
    assert message in error["msg"]


def test_a_row_changes_its_own_agent() -> None:
    """Variables and files are added to those of the run; the rest is replaced."""
    base = agent(env={"A": "1"}, files={"f": "1"}).with_version("1.2")
    own = base.with_row({"env": {"B": "2"}, "stdin": "{prompt}", "command": ["other"]})
    assert own.env == {"A": "1", "B": "2"}
    assert own.files == {"f": "1"}
    assert own.command == ("other",)
    assert own.found_version is None  # of another program
    assert base.with_row({"env": {"B": "2"}}).found_version == "1.2"
    assert base.with_row(None) is base


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ("codex", "`agent` must be an object with command, stdin"),
        ({"speaks": "openai_chat"}, "`agent.speaks`: a row can only set command"),
        ({"command": ["x"]}, "{prompt} is missing"),
    ],
)
def test_a_row_cannot_change_everything(own: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("{", "\\{").replace(".", "\\.")):
        agent().with_row(own)


def test_what_affects_the_data_is_in_its_meaning() -> None:
    base = agent().with_version("1.2")
    assert base.data_fields() != base.with_version("1.3").data_fields()
    assert base.data_fields() != agent(env={"A": "1"}).with_version("1.2").data_fields()
    assert base.data_fields() == agent(memory_mb=100).with_version("1.2").data_fields()
    assert base.data_fields() == agent(volatile={"texts": ["a"]}).with_version("1.2").data_fields()
