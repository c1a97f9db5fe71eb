"""Help and shell completion: which options each help shows, and what a shell is offered."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from agent.options import AgentOptions
from batch_runner import main
from batch_trajectories.cli.command_line import COMMAND_GROUPS, COMMANDS
from batch_trajectories.cli.option_groups import (
    COMMON_OPTIONS,
    OF_CONVERSATIONS,
    OF_STARTS,
    OPTION_GROUPS,
)
from batch_trajectories.config.run_config import RunConfig
from tests.helpers.playing import call, calls, say
from tests.helpers.running import PATIENCE_S, ROOT, SCRIPTED, command, lines, run, write_rows


def test_every_option_of_a_run_has_one_group() -> None:
    grouped = [name for names in OPTION_GROUPS.values() for name in names]
    assert len(grouped) == len(set(grouped))
    set_by_commands = {"audit", "checked_run"}
    own = set(RunConfig.model_fields) - set(AgentOptions.model_fields)
    assert set(grouped) == own - set_by_commands


def test_every_command_has_one_group_and_is_where_it_says() -> None:
    assert len(COMMANDS) == sum(map(len, COMMAND_GROUPS.values()))
    assert {name: main.import_command(name).name for name in COMMANDS} == {
        name: name for name in COMMANDS
    }


def options_in(text: str) -> list[str]:
    """The options that a help text lists, in order, without the examples."""
    return re.findall(r"^  --(\w+)", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("message", "own"),
    [([], []), (["run"], []), (["estimate"], ["pilot"]), (["fork"], ["at_turn"])],
)
def test_help_shows_the_common_options_and_how_to_see_the_rest(
    tmp_path: Path, message: list[str], own: list[str]
) -> None:
    text = run(tmp_path, *message, "--help").stdout
    command = main.import_command(message[0] if message else "run")
    known = {param.name for param in command.get_params(click.Context(command))}
    common = ["config" if n == "config_file" else n for n in COMMON_OPTIONS if n in known]
    shown = options_in(text)
    assert shown[: len(own)] == own
    assert shown[-len(common) :] == common
    assert "options, in groups, with --help_all." in text


@pytest.mark.parametrize("option", ["--help_all", "--help-all"])
@pytest.mark.parametrize("message", [[], ["run"], ["estimate"]])
def test_help_all_shows_every_option(tmp_path: Path, message: list[str], option: str) -> None:
    done = run(tmp_path, *message, option)
    assert done.returncode == 0, done.stderr
    command = main.import_command(message[0] if message else "run")
    params = command.get_params(click.Context(command))
    shown = [param for param in params if not getattr(param, "hidden", False)]
    every = {name.removeprefix("--") for param in shown for name in param.opts}
    assert set(options_in(done.stdout)) == every


def test_help_has_all_groups_and_examples(tmp_path: Path) -> None:
    text = run(tmp_path, "--help_all").stdout
    titles = [*COMMAND_GROUPS, OF_STARTS, *OPTION_GROUPS, OF_CONVERSATIONS]
    places = [text.index(f"\n{title}:\n") for title in titles]
    assert places == sorted(places)
    assert "\n  Examples:\n" in text
    start = text[places[len(COMMAND_GROUPS)] : places[len(COMMAND_GROUPS) + 1]]
    assert "--dry_run" in start
    assert "--model" not in start


def completions(cwd: Path, *message: str) -> list[str]:
    """What bash offers for the last of the words behind the program's name."""
    env = {
        "_BATCH_RUNNER_PY_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(("batch_runner.py", *message)),
        "COMP_CWORD": str(len(message)),
    }
    done = run(cwd, env=env)
    assert done.returncode == 0, done.stderr
    return [line.partition(",")[2] for line in done.stdout.splitlines()]


def test_a_shell_is_offered_commands_options_values_and_runs(tmp_path: Path) -> None:
    for name in ("mine", "other"):
        (tmp_path / "trajectories" / name).mkdir(parents=True)
        (tmp_path / "trajectories" / name / "run.json").touch()
    assert completions(tmp_path, "s") == ["score", "show", "stats", "status", "stop"]
    assert completions(tmp_path, "--max_tu") == ["--max_turns"]
    assert completions(tmp_path, "run", "--container_engine", "") == ["docker", "podman"]
    assert completions(tmp_path, "run", "--accept_rows", "unk") == ["unknown_tool"]
    assert completions(tmp_path, "status", "m") == ["mine"]
    assert completions(tmp_path, "compare", "mine", "") == ["mine", "other"]
    assert completions(tmp_path, "estimate", "--pi") == ["--pilot"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_is_valid_shell(tmp_path: Path, shell: str) -> None:
    """Where the shell is installed it reads the script; elsewhere it must at least be there."""
    done = run(tmp_path, env={"_BATCH_RUNNER_PY_COMPLETE": f"{shell}_source"})
    assert done.returncode == 0, done.stderr
    assert f"{shell}_complete" in done.stdout
    if (path := shutil.which(shell)) is not None:
        script = tmp_path / "script"
        script.write_text(done.stdout)
        check = ["--no-execute"] if shell == "fish" else ["-n"]
        subprocess.run([path, *check, str(script)], check=True, env=dict(os.environ))


def test_bash_completes_with_the_script(tmp_path: Path) -> None:
    """Bash itself, through the function that the script defines."""
    program = tmp_path / "batch-runner"
    program.write_text("#!/bin/sh\nexec " + " ".join(command()) + ' "$@"\n')
    program.chmod(0o755)
    source = run(tmp_path, env={"_BATCH_RUNNER_PY_COMPLETE": "bash_source"}).stdout
    source = source.replace("batch_runner.py", "batch-runner")
    (tmp_path / "script").write_text(source)
    script = (
        "complete() { :; }; compopt() { :; }; source ./script; "
        "COMP_WORDS=(batch-runner statu); COMP_CWORD=1; "
        '_batch_runnerpy_completion ./batch-runner statu; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "status\n", done.stderr


def test_a_config_that_is_not_yaml_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model: x\nseed: [\n")
    done = run(tmp_path, config="c.yaml")
    assert done.returncode == 2
    assert done.stderr.startswith("error: c.yaml:3:1: not YAML: ")
    assert done.stderr.count("\n") == 1
    missing = run(tmp_path, config="none.yaml")
    assert missing.stderr == (
        "error: none.yaml: cannot read this config file: No such file or directory\n"
    )


LIST_OPTIONS = ("enabled_toolsets", "disabled_toolsets", "tools", "web_allow", "worker_resources")


@pytest.mark.parametrize("name", [*LIST_OPTIONS, "preparation_toolsets", "accept_config_change"])
def test_a_list_that_is_given_in_parts_is_the_whole_list(name: str) -> None:
    read = main.import_command("run").make_context("run", [f"--{name}=a=1", f"--{name}=b=2,c=3"])
    given = read.params[name]
    assert (given if isinstance(given, str) else ",".join(given)) == "a=1,b=2,c=3"
    assert main.import_command("run").make_context("run", []).params[name] in (None, ())


def test_formats_and_splits_of_an_export_can_be_given_in_parts() -> None:
    arguments = ["r", "--format=dpo", "--format=kto", "--splits=train=0.9", "--splits=test=0.1"]
    read = main.import_command("export").make_context("export", arguments)
    assert read.params["format"] == "dpo,kto"
    assert read.params["splits"] == "train=0.9,test=0.1"


def test_own_tools_that_are_given_one_by_one_are_all_offered(tmp_path: Path) -> None:
    names = ("x", "y")
    text = "".join(f'def {n}(a: str) -> str:\n    """Do {n}."""\n    return a\n' for n in names)
    (tmp_path / "mine.py").write_text(text)
    script = [calls(call("x", a="1"), call("y", a="2")), say("done")]
    write_rows(tmp_path / "p.jsonl", {"id": "a", "prompt": "x", "script": script})
    given = {**SCRIPTED, "enabled_toolsets": "mine"}
    done = run(tmp_path, "--tools=mine:x", "--tools=mine:y", **given)
    assert done.returncode == 0, done.stderr
    (record,) = lines(tmp_path / "trajectories" / "r" / "records.jsonl")
    assert [m["content"] for m in record["messages"] if m["role"] == "tool"] == ["1", "2"]


@pytest.mark.parametrize(
    "args",
    [
        ["--dataset_file=p.jsonl", "--run_name=r", "--output_dir=s3://bucket/runs"],
        ["status", "r", "--output_dir=s3://bucket"],
        ["report", "r", "--output=file:///tmp/r.html"],
    ],
    ids=lambda args: args[-1],
)
def test_urls_are_no_paths(args: list[str], tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [{"content": "y"}]})
    refused = (
        run(tmp_path, *args, "--model=scripted") if args[0][0] == "-" else run(tmp_path, *args)
    )
    assert refused.returncode == 2
    assert "must be a path of this machine: URLs are not supported" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]


@pytest.mark.parametrize(
    ("word", "meant"),
    [("exprot", "did you mean 'export'?"), ("prompts.jsonl", "options of a run begin with `--`")],
)
def test_a_command_that_is_none_says_what_may_be_meant(word: str, meant: str) -> None:
    done = CliRunner().invoke(main, [word, "x"])
    assert done.exit_code == 2
    assert f"there is no command '{word}'; {meant}" in done.stderr


@pytest.mark.slow
def test_ids_are_found_where_the_locale_has_only_ascii(tmp_path: Path) -> None:
    """With LC_ALL=C and Python's UTF-8 mode switched off, as in some schedulers' jobs."""
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    rows = [
        {"id": id, "prompt": "x", "script": [{"content": "fine"}]}
        for id in ("z\u00fcrich-\u6f22", "b")
    ]
    write_rows(tmp_path / "w\u00f6rter.jsonl", *rows)
    given = {**SCRIPTED, "dataset_file": "w\u00f6rter.jsonl"}
    done = run(tmp_path, **given, env=env)
    assert done.returncode == 0, done.stderr
    shown = run(tmp_path, "show", "r", rows[0]["id"], env=env)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("z\u00fcrich-\u6f22")
    note = {"verdict": "keep", "note": "sch\u00f6n", "who": "J\u00fcrgen"}
    labelled = run(tmp_path, "label", "r", rows[0]["id"], **note, env=env)
    assert labelled.returncode == 0, labelled.stderr
    (label,) = lines(tmp_path / "trajectories" / "r" / "labels.jsonl")
    assert (label["id"], label["note"], label["who"]) == (
        rows[0]["id"],
        "sch\u00f6n",
        "J\u00fcrgen",
    )


@pytest.mark.parametrize(
    "args",
    [
        ("--run_name=r", "--dataset_file=p.jsonl", "--model=scripted"),
        ("show", "r"),
        ("look", "p.jsonl"),
        ("status",),
    ],
    ids=lambda args: args[0],
)
@pytest.mark.slow
def test_a_current_directory_that_was_removed_is_named(
    tmp_path: Path, args: tuple[str, ...]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    removing = f"rmdir '{gone}' && exec \"$@\""
    argv = ["sh", "-c", removing, "sh", sys.executable, str(ROOT / "batch_runner.py"), *args]
    done = subprocess.run(argv, cwd=gone, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode in (2, 4), done.stderr
    assert done.stderr.count("the current directory was removed") == 1, done.stderr
    assert "Traceback" not in done.stderr
