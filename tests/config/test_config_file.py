"""Slips in a config file and in flags: each is one line that names its place."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.config.loading import load_config
from batch_trajectories.config.run_config import RunConfig
from tests.helpers.running import command, run, write_prompts

FLAGS: dict[str, Any] = {"run_name": "r", "dataset_file": "p.jsonl"}


def read_refusal(tmp_path: Path, text: str = "", **flags: Any) -> str:
    """What is said of a config file with this text, and these flags on top."""
    (tmp_path / "run.yaml").write_text(text or "num_workers: 1\n")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "run.yaml", FLAGS | flags)
    return str(caught.value).replace(f"{tmp_path}/", "")


def test_a_key_that_is_given_twice_is_an_error_that_names_it(tmp_path: Path) -> None:
    text = "model: openai:cheap\nseed: 1\nmodel: openai:dear\n"
    assert read_refusal(tmp_path, text) == "run.yaml:3:1: not YAML: duplicate key 'model'"
    inner = read_refusal(tmp_path, "extra_body:\n  a: 1\n  a: 2")
    assert "run.yaml:3:3: not YAML: duplicate key 'a'" in inner


def test_a_key_that_is_given_with_and_without_dashes_is_named(tmp_path: Path) -> None:
    said = read_refusal(tmp_path, "num-workers: 8\nnum_workers: 1\n")
    assert said == "run.yaml:2: num_workers: given twice, once with dashes"


def test_a_mistake_is_named_with_its_line(tmp_path: Path) -> None:
    text = (
        "model: openai:m\n\nprices:\n  m: {output: 1,\n    input: much}\nmax-turns: x\nmodell: y\n"
    )
    said = read_refusal(tmp_path, text).splitlines()
    assert [line.partition(": ")[0] for line in said] == ["run.yaml:6", "run.yaml:5", "run.yaml:7"]
    (missing,) = read_refusal(tmp_path, "prices:\n  m:\n    input: 1\n").splitlines()
    assert missing == "run.yaml:2: prices, in m.output: is missing"


@pytest.mark.parametrize("key", ["max_turns", "num_samples", "max_cost_usd", "temperature"])
def test_true_is_not_the_number_1(tmp_path: Path, key: str) -> None:
    assert read_refusal(tmp_path, f"{key}: yes\n").startswith(
        f"run.yaml:1: {key}: must be a number, not true or false"
    )


def test_aliases_that_stand_for_billions_of_values_are_refused_where_they_are(
    tmp_path: Path,
) -> None:
    lines = [f"  a0: &a0 [{', '.join('x' * 9)}]"]
    lines += [f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    said = read_refusal(tmp_path, "\n".join(["extra_body:", *lines]))
    assert said.startswith("run.yaml:7:12: not YAML: the aliases up to here stand for more than")


def test_a_config_file_that_is_a_dataset_is_not_read_whole(tmp_path: Path) -> None:
    said = read_refusal(tmp_path, "a: " + "x" * (17 << 20))
    assert said == "run.yaml: not YAML: over 16 MiB; is it a dataset?"


def test_a_byte_that_is_not_utf8_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"seed: 1\nmodel: \xe9\n")
    with pytest.raises(ConfigError, match=r"run.yaml:2: cannot read this config file: 'utf-8'"):
        load_config(tmp_path / "run.yaml", FLAGS)


def test_a_key_that_is_not_text_is_named(tmp_path: Path) -> None:
    assert "run.yaml:1:17: not YAML: found unhashable key" in read_refusal(
        tmp_path, "system_prompt: {{ name }}\n"
    )


def test_merged_mappings_may_be_overridden(tmp_path: Path) -> None:
    text = "extra_body:\n  a: &a {x: 1, y: 1}\n  b: &b {<<: *a, x: 2}\n  c: {<<: *b, y: 3}\n"
    (tmp_path / "run.yaml").write_text(text)
    config = load_config(tmp_path / "run.yaml", FLAGS)
    assert config.extra_body == {
        "a": {"x": 1, "y": 1},
        "b": {"x": 2, "y": 1},
        "c": {"x": 2, "y": 3},
    }


def test_the_first_of_several_merged_mappings_wins(tmp_path: Path) -> None:
    text = "a: &a {long: 1}\n  b: &b {long: 2, other: 2}\n  c: {<<: [*a, *b]}\n"
    (tmp_path / "run.yaml").write_text(f"extra_body:\n  {text}")
    config = load_config(tmp_path / "run.yaml", FLAGS)
    assert (config.extra_body or {})["c"] == {"long": 1, "other": 2}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("{<<: 1}", "run.yaml:1:18: not YAML: `<<` merges a mapping, or a list of mappings"),
        ("&b {a: *b}", "run.yaml:1:20: not YAML: an alias inside of its anchor"),
        ("{a: !!binary aGVsbG8=}", "run.yaml:1: extra_body, in a"),
        ("[" * 3000 + "]" * 3000, "run.yaml: cannot read this config file: nested too deeply"),
    ],
)
def test_values_that_are_not_json_cannot_be_sent(tmp_path: Path, value: str, reason: str) -> None:
    assert read_refusal(tmp_path, f"extra_body: {value}\n").startswith(reason)


@pytest.mark.parametrize("key", ["messages", "stream", "tools", "n"])
def test_extra_body_cannot_overwrite_fields_of_the_program(tmp_path: Path, key: str) -> None:
    refusal = read_refusal(tmp_path, f"extra_body: {{top_k: 5, {key}: true}}\n")
    assert f"extra_body: {key}: not allowed in extra_body" in refusal


def test_a_port_that_is_none_uses_up_no_attempts(tmp_path: Path) -> None:
    assert "--base_url: Port out of range" in read_refusal(
        tmp_path, base_url="http://127.0.0.1:99999/v1"
    )


@pytest.mark.parametrize("url", ["http://me:canary@host/v1", "http://host/v1?key=canary"])
def test_a_secret_in_a_url_is_not_shown(tmp_path: Path, url: str) -> None:
    refusal = [read_refusal(tmp_path, base_url=url)]
    refusal += [read_refusal(tmp_path, f"base_url: {url}\n")]
    refusal += [read_refusal(tmp_path, f"endpoints: {{mine: {{base_url: '{url}'}}}}\n")]
    for message in refusal:
        assert "must not have a password, key or query" in message
        assert "canary" not in message


def test_a_flag_in_other_bytes_than_utf8_is_named(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 1)
    latin = os.fsdecode("Grüße".encode("latin-1"))
    done = run(tmp_path, system_prompt=latin, model="scripted", **FLAGS)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --system_prompt: not UTF-8 (got 'Gr")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"seed: 1{'0' * 5000}", "1:7: not YAML: not a value: Exceeds the limit (4300 digits)"),
        ("model: 2026-02-30", "1:8: not YAML: not a value: day is out of range for month"),
        ('system_prompt: "\\ud800"', "1:16: not YAML: half of a surrogate pair"),
        ('"\\ud800": 1', "1:1: not YAML: half of a surrogate pair"),
        ("models: &a {x: *a}", "1:16: not YAML: an alias inside of its anchor"),
        ("seed: 1\nmodel: a\x07", "2:9: not YAML: the character U+0007 is not allowed"),
        ('output_dir: "a\\0"', "1: output_dir: holds the character NUL"),
        ('prefill_messages: "a\\0"', "1: prefill_messages: holds the character NUL"),
        ("extra_body: {a: [.nan]}", "1: extra_body: holds a number that JSON cannot represent"),
    ],
)
def test_values_that_nothing_could_write_are_refused_with_their_place(
    tmp_path: Path, text: str, reason: str
) -> None:
    assert read_refusal(tmp_path, f"{text}\n").startswith(f"run.yaml:{reason}")


def test_half_a_surrogate_pair_is_refused_wherever_a_config_comes_from(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 1)
    done = run(tmp_path, "--tools=\udcff.py:x", model="scripted", **FLAGS)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --tools: not UTF-8 (got ")
    with pytest.raises(ValueError, match="system_prompt: half of a surrogate pair"):
        RunConfig(dataset_file=tmp_path / "p.jsonl", run_name="r", system_prompt="\ud800")


def test_an_empty_path_is_not_the_current_directory(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 1)
    done = run(tmp_path, dataset_file="", run_name="r", model="scripted")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --dataset_file: must not be empty")


def test_a_dataset_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.jsonl")
    done = run(tmp_path, **FLAGS, model="scripted")
    assert done.returncode == 2
    assert "p.jsonl is a pipe or device" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_result_that_could_not_be_written_is_reported(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command("errors"), stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.stderr == "error: cannot write the result: No space left on device\n"


def test_a_bare_name_is_a_preset_and_everything_else_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(Path("openai"), FLAGS).model == "responses:gpt-5-mini"
    for name in ("openai.yaml", "mine", "sub/openai"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("model: own:m")
        assert load_config(Path(name), FLAGS).model == "own:m"
    demo = load_config(Path("demo"), {"run_name": "r"})
    assert demo.dataset_file.is_file()
    with pytest.raises(ConfigError) as raised:
        load_config(Path("opnai"), FLAGS)
    assert str(raised.value) == "--config: no such preset: 'opnai'; did you mean 'openai'?"
    with pytest.raises(ConfigError, match="known: anthropic, careful, demo, ollama, openai"):
        load_config(Path("nothing"), FLAGS)


def test_the_file_of_approve_is_looked_for_beside_the_config_first(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    for place in ("rules.py:ask", "rules:ask"):
        config.write_text(f"approve: {place}\n")
        assert load_config(config, FLAGS).approve == place
    (tmp_path / "rules.py").touch()
    config.write_text("approve: rules.py:ask\n")
    assert load_config(config, FLAGS).approve == f"{tmp_path}/rules.py:ask"
    assert load_config(config, FLAGS | {"approve": "rules.py:no"}).approve == "rules.py:no"


def test_the_file_of_a_reward_is_looked_for_beside_the_config_first(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "graders.py").touch()
    config = tmp_path / "configs" / "run.yaml"
    config.write_text("reward: graders.py:style, elsewhere.py:length, graders:form\n")
    there = load_config(config, FLAGS).reward
    assert there == (f"{config.parent}/graders.py:style", "elsewhere.py:length", "graders:form")
    assert load_config(config, FLAGS | {"reward": "graders.py:other"}).reward == (
        "graders.py:other",
    )
