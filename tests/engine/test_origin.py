"""Runs that were not started here: what their run.json says of code, keys and addresses is not
used without a flag."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from batch_trajectories.api.stored_run import StoredRun
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.engine import origin
from batch_trajectories.engine.run_dir import read_run_json, was_started_here
from tests.helpers.answering import answering
from tests.helpers.builders import chat_reply
from tests.helpers.running import SCRIPTED, lines, run, write_rows

LOOK = {"tool_calls": [{"name": "read_file", "arguments": {"path": "a.txt"}}]}
SAY = [LOOK, {"content": "y"}]


def start(cwd: Path, **options: Any) -> Path:
    """Start a run of this user, of two conversations with checks."""
    rows = [{"id": f"p{n}", "prompt": "x", "script": SAY, "check": "true"} for n in (0, 1)]
    write_rows(cwd / "p.jsonl", *rows)
    done = run(cwd, "--row_setup", **{**SCRIPTED, **options})
    assert done.returncode == 0, done.stderr
    return cwd / "trajectories" / "r"


def start_run(cwd: Path, **options: Any) -> Path:
    """A finished run of this user, made once for these options and copied."""
    made = _MADE.get(str(options))
    if made is None:
        made = _MADE[str(options)] = TemporaryDirectory()
        start(Path(made.name), **options)
    shutil.copytree(made.name, cwd, dirs_exist_ok=True)
    return cwd / "trajectories" / "r"


_MADE: dict[str, TemporaryDirectory[str]] = {}


def receive_run(run_dir: Path, **changes: Any) -> None:
    """The run as a stranger gives it away, with a config and a checksum of theirs."""
    identity = json.loads((run_dir / "run.json").read_text())
    identity["config"] |= changes
    identity.pop("crc32", None)
    (run_dir / "run.json").write_text(json.dumps(identity))


class TestMarks:
    def test_a_run_is_this_users_from_its_start(self, tmp_path: Path) -> None:
        run_dir = start(tmp_path)
        assert was_started_here(run_dir)
        assert StoredRun(run_dir).is_own
        moved = tmp_path / "elsewhere"
        shutil.copytree(run_dir, moved)
        assert was_started_here(moved), "runs may be moved"

    def test_one_that_was_edited_is_not(self, tmp_path: Path) -> None:
        run_dir = start_run(tmp_path)
        receive_run(run_dir, temperature=0.5)
        assert not was_started_here(run_dir)

    def test_nor_one_of_another_user_or_an_earlier_version(self, tmp_path: Path) -> None:
        run_dir = start(tmp_path)
        other = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path / "config")}
        done = run(tmp_path, "score", "r", judge="j", env=other)
        assert done.returncode == 2
        identity = json.loads((run_dir / "run.json").read_text())
        del identity["mac"], identity["crc32"]
        (run_dir / "run.json").write_text(json.dumps(identity))
        assert not was_started_here(run_dir)

    def test_its_own_command_marks_it(self, tmp_path: Path) -> None:
        run_dir = start_run(tmp_path)
        receive_run(run_dir, sandbox="docker")
        assert not was_started_here(run_dir)
        start(tmp_path)
        assert was_started_here(run_dir)
        assert read_run_json(run_dir)["config"]["sandbox"] == "bwrap", "that of the command"

    def test_the_key_is_for_this_user_alone(self, tmp_path: Path) -> None:
        start(tmp_path)
        key = Path(os.environ["XDG_CONFIG_HOME"], "batch-trajectories", "run_key")
        assert (key.stat().st_mode & 0o777, len(key.read_bytes())) == (0o600, 32)
        assert [path.name for path in key.parent.iterdir()] == ["run_key"]

    def test_without_a_place_for_the_key_runs_are_nobodys(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        nowhere = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path / "file")}
        rows = [{"id": "p0", "prompt": "x", "script": SAY}]
        write_rows(tmp_path / "p.jsonl", *rows)
        assert run(tmp_path, **SCRIPTED, env=nowhere).returncode == 0
        assert not was_started_here(tmp_path / "trajectories" / "r")

    def test_merging_a_received_run_does_not_mark_it(self, tmp_path: Path) -> None:
        run_dir = start_run(tmp_path)
        assert run(tmp_path, "merge", "r", into="own").returncode == 0
        assert was_started_here(tmp_path / "trajectories" / "own")
        receive_run(run_dir, grace_s=1)
        assert run(tmp_path, "merge", "r", into="theirs").returncode == 0
        assert not was_started_here(tmp_path / "trajectories" / "theirs")


def test_every_option_is_known_to_act_or_not() -> None:
    """A new option belongs in one of the lists; what runs code or names something is active."""
    active, harmless = set(origin.ACTIVE), set(origin.HARMLESS)
    assert not active & harmless
    assert RunConfig.model_fields.keys() == active | harmless


FREE_TEXT = {
    # Texts for a model, names of columns and of this run, and numbers by name.
    "columns",
    "ephemeral_system_prompt",
    "preparation",
    "run_name",
    "shard",
    # Rules of a fixed form.
    "stop_if",
    "system_prompt",
    "disabled_toolsets",
    "model_budgets",
    "worker_resources",
    # A path inside of the image.
    "workdir",
}


def test_an_option_that_can_hold_any_text_is_active() -> None:
    """Names of files, modules, variables and addresses are texts; numbers and choices are none."""
    config = RunConfig.model_json_schema()

    def holds_text(schema: Any) -> bool:
        if "$ref" in schema:
            schema = config["$defs"][schema["$ref"].rpartition("/")[2]]
        if "enum" in schema or "const" in schema:
            return False
        if schema.get("type") == "object" or not schema.get("type"):
            inner = schema.get("anyOf") or schema.get("allOf") or schema.get("oneOf")
            return any(map(holds_text, inner)) if inner else True
        if schema["type"] == "array":
            return holds_text(schema.get("items", {})) or any(
                map(holds_text, schema.get("prefixItems", []))
            )
        return bool(schema["type"] == "string")

    texts = {name for name, schema in config["properties"].items() if holds_text(schema)}
    assert texts - FREE_TEXT <= set(origin.ACTIVE)
    assert "script_file" in texts
    assert "max_turns" not in texts


class TestScore:
    def test_a_stranger_gets_neither_key_nor_conversations(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever run.json names: nothing is asked there, and no command runs."""
        monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
        monkeypatch.setenv("SECRET", "mine")
        run_dir = start_run(tmp_path)
        with answering(lambda *_: (200, chat_reply("RIGHT"))) as (url, bodies):
            at = f"{url}/v1"
            mark = tmp_path / "ran"
            named: dict[str, dict[str, Any]] = {
                "j": {"base_url": at, "key_env": "SECRET", "model": "m"},
                "own:j": {"endpoints": {"own": {"base_url": at, "key_env": "SECRET"}}},
                "cmd:j": {
                    "endpoints": {"cmd": {"base_url": at, "key_command": ["touch", str(mark)]}}
                },
                "head:j": {
                    "endpoints": {"head": {"base_url": at, "headers_env": {"x-a": "SECRET"}}}
                },
                "code:j": {"endpoints": {"code": {"client": "evil:client"}}},
            }
            for name, changes in named.items():
                receive_run(run_dir, **{"base_url": None, "endpoints": {}, **changes})
                done = run(tmp_path, "score", "r", judge=name)
                assert done.returncode == 2, done.stderr
                assert "--trust_run" in done.stderr
                assert "not started here by you" in done.stderr
            assert not bodies
            assert not mark.exists()
            receive_run(run_dir, base_url=at, model="openai:m", key_env=None, endpoints={})
            monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
            done = run(tmp_path, "score", "r", judge="openai:j", call_attempts=1)
            assert done.returncode == 4
            assert "to be sent to http://127.0.0.1:9/v1" in done.stderr
            assert not bodies
            monkeypatch.delenv("OPENAI_BASE_URL")
            done = run(tmp_path, "score", "r", "--trust_run", judge="j", call_attempts=1)
            assert done.returncode == 0, done.stderr
            assert f"2 conversations to be sent to {at}, model j" in done.stderr
            assert len(bodies) == 2

    def test_a_provider_is_asked_at_its_own_host(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also for a run of this user's that had a --base_url."""
        monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
        monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
        with answering(lambda *_: (200, chat_reply("RIGHT"))) as (url, bodies):
            given = {**SCRIPTED, "model": "openai:m", "base_url": f"{url}/v1"}
            write_rows(tmp_path / "p.jsonl", {"id": "p0", "prompt": "x"})
            assert run(tmp_path, **given).returncode == 0
            asked = len(bodies)
            done = run(tmp_path, "score", "r", judge="openai:j", call_attempts=1)
            assert (done.returncode, len(bodies)) == (4, asked)
            assert "to be sent to http://127.0.0.1:9/v1" in done.stderr
            assert "OPENAI_API_KEY" in done.stderr
            done = run(tmp_path, "score", "r", judge="openai:j", base_url=f"{url}/v1")
            assert (done.returncode, len(bodies)) == (0, asked + 1)

    def test_its_prices_do_not_count(self, tmp_path: Path) -> None:
        run_dir = start_run(tmp_path)
        receive_run(run_dir, prices={"j": {"input": 0, "output": 0}})
        at: dict[str, Any] = {"base_url": "http://127.0.0.1:9/v1", "key_env": "none"}
        done = run(tmp_path, "score", "r", judge="j", max_tokens=5, max_judge_cost_usd=1, **at)
        assert "the price of 'j' is unknown" in done.stderr


class TestCheck:
    def test_commands_of_a_stranger_run_in_a_sandbox(self, tmp_path: Path) -> None:
        run_dir = start_run(tmp_path, keep_workspaces=1)
        mark = tmp_path / "ran"
        write_rows(
            tmp_path / "new.jsonl",
            *({"id": f"p{n}", "prompt": "x", "check": f"touch {mark}"} for n in (0, 1)),
        )
        evil = {"tools": ["evil.py:T"], "reward": ["evil.py:f"], "env_from": ["HOME"]}
        (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w')\n")
        receive_run(run_dir, sandbox="local", **evil)
        done = run(tmp_path, "check", "r", dataset_file="new.jsonl")
        assert not mark.exists(), done.stderr
        assert 'not used: sandbox="local", env_from=["HOME"]' in done.stderr
        assert "--trust_run" in done.stderr
        again = (tmp_path / "new.jsonl").read_text().replace("touch", "exec touch")
        (tmp_path / "again.jsonl").write_text(again)
        done = run(tmp_path, "check", "r", "--trust_run", dataset_file="again.jsonl")
        assert mark.exists(), done.stdout + done.stderr
        assert 'used: sandbox="local", env_from=["HOME"]' in done.stderr

    def test_options_that_are_given_are_the_users(self, tmp_path: Path) -> None:
        run_dir = start_run(tmp_path, keep_workspaces=1)
        receive_run(run_dir, sandbox="local")
        done = run(tmp_path, "check", "r", sandbox="local")
        assert "--trust_run" not in done.stderr

    def test_a_run_of_this_users_is_judged_as_before(self, tmp_path: Path) -> None:
        start_run(tmp_path, keep_workspaces=1)
        done = run(tmp_path, "check", "r")
        assert (done.returncode, done.stderr.count("not started here")) == (0, 0), done.stderr


class TestFork:
    FORK = ("fork", "r", "--at_turn=1", "--n=1", "--run_name=b")

    @pytest.mark.parametrize(
        "evil",
        [
            {"sandbox": "local"},
            {"tools": ["evil.py:T"]},
            {"reward": ["evil.py:f"]},
            {"approve": "evil.py:f"},
            {"mcp": {"m": {"command": "touch", "args": ["ran"]}}},
            {"base_url": "http://127.0.0.1:9/v1"},
            {"key_env": "SECRET"},
            {"extra_body": {"mcp_servers": [{"url": "http://127.0.0.1:9"}]}},
            {"endpoints": {"e": {"base_url": "http://127.0.0.1:9/v1", "key_command": ["x"]}}},
            {"mirror": "s3://theirs/b"},
            {"model": "openai:gpt-9"},
            {"models": {"openai:gpt-9": 1}},
            {"script_file": "secrets.yaml"},
            {"web_search_provider": "tavily"},
            {"enabled_toolsets": ["file", "web"]},
            {"preparation_toolsets": ["browser"]},
            {"distribution": "web.yaml"},
            {"distribution": "research"},
            {"rows": "secrets.yaml"},
            {"only_sound": "/elsewhere"},
            {"checked_run": "/elsewhere"},
            {"executor": "ray"},
            {"simulated_user": {"model": "openai:gpt-9"}},
            {"subagents": [{"name": "a", "description": "x", "model": "openai:gpt-9"}]},
            {"subagents": [{"name": "a", "description": "x", "enabled_toolsets": ["web"]}]},
        ],
        ids=lambda evil: next(iter(evil)),
    )
    def test_refuses_what_a_stranger_names(self, tmp_path: Path, evil: dict[str, Any]) -> None:
        run_dir = start_run(tmp_path)
        (tmp_path / "evil.py").write_text("open('ran', 'w')\n")
        receive_run(run_dir, **{"sandbox": "bwrap", **evil})
        done = run(tmp_path, *self.FORK)
        assert done.returncode == 2
        assert f"not used: {next(iter(evil))}=" in done.stderr
        assert not (tmp_path / "ran").exists()
        assert not (tmp_path / "trajectories" / "b").exists()

    @pytest.mark.parametrize(
        "evil",
        [
            {"agent": "secrets.yaml"},
            {"mcp": "secrets.json"},
            {"prefill_messages": "secrets.json"},
            {"endpoints": "secrets.json"},
        ],
        ids=lambda evil: next(iter(evil)),
    )
    @pytest.mark.parametrize("command", ["stats", "show", "export", "check", "report", "merge"])
    def test_no_command_opens_a_file_in_the_place_of_an_option(
        self, tmp_path: Path, evil: dict[str, Any], command: str
    ) -> None:
        """As a flag such an option is the name of a file; a run holds what was in it."""
        run_dir = start_run(tmp_path)
        for name in ("secrets.yaml", "secrets.json"):
            os.mkfifo(tmp_path / name)  # whoever opens it waits for ever
        receive_run(run_dir, **evil)
        more: dict[str, Any] = {"into": "m"} if command == "merge" else {}
        done = run(tmp_path, command, "r", **more)
        assert done.returncode == 2, done.stderr
        assert f"config.{next(iter(evil))}" in done.stderr

    def test_says_where_conversations_go_before_the_first_call(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run_dir = start_run(tmp_path)
        with answering(lambda *_: (200, chat_reply("y"))) as (url, bodies):
            at = f"{url}/v1"
            receive_run(run_dir, model="m", base_url=at, key_env="none", max_turns=3)
            done = run(tmp_path, *self.FORK)
            assert done.returncode == 2
            assert 'model="m"' in done.stderr
            assert not bodies
            done = run(tmp_path, *self.FORK, "--trust_run")
            assert done.returncode == 0, done.stderr
            sent = f"its conversations are sent to {at}, model m"
            assert sent in done.stderr
            assert bodies
            given = run(
                tmp_path,
                "fork",
                "r",
                "--at_turn=1",
                "--n=1",
                run_name="c",
                model="n",
                base_url=at,
                key_env="none",
            )
            assert given.returncode == 0, given.stderr
            assert f"are sent to {at}, model n" in given.stderr
            assert bodies[-1]["model"] == "n"

    def test_takes_the_rest_and_what_is_given(self, tmp_path: Path) -> None:
        run_dir = start_run(tmp_path)
        receive_run(run_dir, output_dir=str(tmp_path / "theirs"), temperature=0.5)
        done = run(tmp_path, *self.FORK, sandbox="local")
        assert done.returncode == 0, done.stderr
        assert not (tmp_path / "theirs").exists()
        forked = tmp_path / "trajectories" / "b"
        assert len(lines(forked / "records.jsonl")) == 2
        assert read_run_json(forked)["config"]["temperature"] == 0.5
        assert was_started_here(forked)

    @pytest.mark.parametrize("agent", ["touch x", [1], {"name": ["x"]}])
    def test_an_agent_of_any_form_is_refused_in_a_sentence(
        self, tmp_path: Path, agent: Any
    ) -> None:
        run_dir = start_run(tmp_path)
        receive_run(run_dir, agent=agent)
        refused = run(tmp_path, "fork", run_dir, run_name="f")
        assert refused.returncode == 2, refused.stderr
        assert "Traceback" not in refused.stderr
