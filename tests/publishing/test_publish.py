"""What a publication holds, what it must not hold, and how it gets its name."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.engine.origin import ACTIVE, HARMLESS
from batch_trajectories.publishing.published_config import (
    CHECKED,
    DROPPED,
    KEPT,
    NEEDED,
    find_foreign_options,
    publish_config,
)
from tests.helpers.exporting import call_record, make_run
from tests.helpers.running import SCRIPTED, command, lines, run, write_rows

KEY = "sk-ant-api03-" + "Zm9vYmFyYmF6" * 4


def publish(folder: Path, *args: object, ok: bool = True, **options: Any) -> str:
    """Publish the run `r` of a folder into OUT; returns what the command said."""
    done = run(folder, "publish", folder / "r", folder / "OUT", *args, **options)
    assert (done.returncode == 0) is ok, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def contents(directory: Path) -> dict[str, bytes]:
    """All files of a directory by their path in it."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def check_refusal(said: str, folder: Path, kind: str) -> None:
    """Check that nothing was published, and that the refusal names its kind but not the text."""
    assert kind in said
    assert not (folder / "OUT").exists()
    assert not list(folder.glob(".OUT*"))


def test_holds_the_job_and_its_facts(tmp_path: Path) -> None:
    make_run(tmp_path, call_record(), call_record("Other."))
    said = publish(tmp_path, format="openai,hermes", license="mit")
    found = contents(tmp_path / "OUT")
    assert {*found} == {
        "README.md",
        "hermes/train.jsonl",
        "manifest.json",
        "openai/train.jsonl",
        "prompts.jsonl",
        "recipe.yaml",
        "reproduce.sh",
        "run.yaml",
    }
    assert found["prompts.jsonl"] == (tmp_path / "p.jsonl").read_bytes()
    manifest = json.loads(found["manifest.json"])
    facts = manifest["publication"]
    assert (facts["license"], facts["seeds"]["run"]) == ("mit", 0)
    assert {"versions", "prices", "spent_usd", "tokens", "prompts", "needs"} <= {*facts}
    assert b"license: mit" in found["README.md"]
    assert "sha256 of manifest.json" in said
    listed = [file for part in manifest["formats"] for file in part["files"]]
    listed += manifest["other_files"]
    assert {file["path"] for file in listed} | {"manifest.json"} == {*found}


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    make_run(tmp_path, call_record())
    publish(tmp_path, format="openai")
    before = contents(tmp_path / "OUT")
    publish(tmp_path, "--replace", format="openai")
    assert contents(tmp_path / "OUT") == before


def test_refuses_to_replace_unless_asked_and_never_other_files(tmp_path: Path) -> None:
    make_run(tmp_path, call_record())
    publish(tmp_path, format="openai")
    assert "--replace" in publish(tmp_path, format="openai", ok=False)
    for file in (tmp_path / "OUT").rglob("*"):
        if file.is_file():
            file.unlink()
    (tmp_path / "OUT" / "letter.txt").write_text("mine")
    assert "other files" in publish(tmp_path, "--replace", format="openai", ok=False)
    assert (tmp_path / "OUT" / "letter.txt").read_text() == "mine"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "LINK").symlink_to(tmp_path / "elsewhere")
    done = run(tmp_path, "publish", tmp_path / "r", tmp_path / "LINK", "--replace", format="openai")
    assert (done.returncode, [*(tmp_path / "elsewhere").iterdir()]) == (2, [])


# Planted secrets: none may be in any byte of a publication.


def test_a_row_with_a_key_is_left_out(tmp_path: Path) -> None:
    make_run(tmp_path, call_record(f"The key is {KEY}"), call_record("Fine."))
    publish(tmp_path, format="openai")
    assert len(lines(tmp_path / "OUT" / "openai" / "train.jsonl")) == 1
    assert not any(KEY.encode() in content for content in contents(tmp_path / "OUT").values())


@pytest.mark.parametrize("form", ["openai", "parquet", "hf"])
@pytest.mark.parametrize(
    ("planted", "kind"),
    [
        ("see {home}/notes.txt", "path of this machine"),
        ("in {run}/workspaces", "path of this machine"),
        ("/home/marlene7/x", "a home directory"),
        ("token={value}", "the value of the variable OWN_TOKEN"),
    ],
)
def test_a_row_with_a_fact_of_the_machine_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, planted: str, kind: str
) -> None:
    home = tmp_path / "homes" / "marlene7"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USER", "marlene7")
    monkeypatch.setenv("OWN_TOKEN", "plain-words-only")
    text = planted.format(home=home, run=tmp_path / "r", value="plain-words-only")
    make_run(tmp_path, call_record("Fine."), call_record(f"It is {text}"))
    said = publish(tmp_path, format=form, ok=False)
    check_refusal(said, tmp_path, kind)
    assert "plain-words-only" not in said


def test_a_prompt_with_a_key_stops_it(tmp_path: Path) -> None:
    make_run(tmp_path, call_record(), prompts=[f"Use {KEY} for it"])
    said = publish(tmp_path, format="openai", ok=False)
    check_refusal(said, tmp_path, "prompts.jsonl, line 1: a secret")
    assert KEY not in said


def test_the_home_of_root_counts_where_no_conversation_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers have it, too, so rows may hold it."""
    monkeypatch.setenv("HOME", "/root")
    make_run(tmp_path, call_record("It is /root/x"))
    publish(tmp_path, format="openai")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("formats: [openai]\ncard: {prompt_source: from /root/x}\n")
    said = publish(tmp_path, "--replace", recipe=recipe, ok=False)
    assert "README.md, line" in said
    assert "a path of this machine" in said


def test_paths_that_the_config_names_count(tmp_path: Path) -> None:
    make_run(tmp_path, call_record("See /secret7/rewards.py"))
    identity = json.loads((tmp_path / "r" / "run.json").read_text())
    identity["config"]["reward"] = ["/secret7/rewards.py:late"]
    (tmp_path / "r" / "run.json").write_text(json.dumps(identity))
    said = publish(tmp_path, format="openai", ok=False)
    check_refusal(said, tmp_path, "openai/train.jsonl, line 1: a path of this machine")


def test_a_text_can_be_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "marlene7")
    make_run(tmp_path, call_record("It is /home/marlene7/x"))
    publish(tmp_path, format="openai", allow="/home/marlene7")


def test_the_config_is_published_without_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers, programs, plug-ins and variables become needs, which name them without places."""
    monkeypatch.setenv("SHOP_KEY", "unremarkable words")
    tools = tmp_path / "plugins" / "shop.py"
    tools.parent.mkdir()
    tools.write_text("")
    config = RunConfig(
        dataset_file=tmp_path / "p.jsonl",
        run_name="secret_name",
        output_dir=tmp_path / "runs",
        model="own:m",
        endpoints={
            "own": {
                "base_url": "http://gpu7.internal.example:8000/v1",
                "key_command": [str(tmp_path / "key.sh")],
                "headers_env": {"X-Shop": "SHOP_KEY"},
            }
        },
        env_from="SHOP_KEY",
        reward=f"{tools}:late",
        images=tmp_path / "images",
        workspace="image",
        web_allow="gpu7.internal.example",
        sandbox="local",
        ephemeral_system_prompt="whisper",
        mirror="s3://private-bucket/r",
        shared_limits=str(tmp_path / "limits"),
        temperature=0.5,
        seed=7,
    )
    published = publish_config(config, name="shop", with_prompts=True)
    text = yaml.safe_dump(published.options) + repr(published.needs)
    for private in (
        str(tmp_path),
        "gpu7",
        "key.sh",
        "whisper",
        "unremarkable",
        "secret_name",
        "private-bucket",
        "mirror",
    ):
        assert private not in text, private
    needed = {need.name for need in published.needs}
    assert {"endpoints", "env_from", "reward", "images", "web_allow", "sandbox"} <= needed
    assert "ephemeral_system_prompt" in needed
    assert (published.options["temperature"], published.options["seed"]) == (0.5, 7)
    assert not [*find_foreign_options(published.options)]


def test_a_server_of_the_publisher_is_a_need_and_a_provider_is_not(tmp_path: Path) -> None:
    given: dict[str, Any] = {"dataset_file": "p.jsonl", "run_name": "r", "model": "m"}
    own = publish_config(
        RunConfig(base_url="http://10.0.0.7:8000/v1", **given), name="shop", with_prompts=True
    )
    assert "base_url" not in own.options
    assert [need.name for need in own.needs] == ["base_url"]
    public = publish_config(
        RunConfig(base_url="https://api.openai.com/v1", **given), name="shop", with_prompts=True
    )
    assert public.options["base_url"] == "https://api.openai.com/v1"


def test_a_key_in_the_body_of_requests_is_refused(tmp_path: Path) -> None:
    config = RunConfig(
        dataset_file=tmp_path / "p.jsonl",
        run_name="r",
        model="openai:m",
        extra_body={"metadata": {"api_key": "words"}},
    )
    with pytest.raises(Exception, match=r"extra_body\.metadata\.api_key"):
        publish_config(config, name="shop", with_prompts=True)


def test_each_option_that_acts_is_decided_on() -> None:
    """Each is published, needed or dropped; a new one must be added to one of these."""
    kinds = [KEPT, CHECKED, DROPPED, {*NEEDED}]
    assert frozenset().union(*kinds) == {*ACTIVE}
    assert sum(map(len, kinds)) == len(ACTIVE)
    assert not {*HARMLESS} & {*ACTIVE}


def test_paths_of_the_recipe_become_names(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "bench.txt").write_text("what is the question of the bench then\n")
    recipe = tmp_path / "private" / "recipe.yaml"
    recipe.write_text("formats: [openai]\nfilters: {evaluation_files: [bench.txt]}\n")
    make_run(tmp_path, call_record())
    said = publish(tmp_path, recipe=recipe)
    assert "filters.evaluation_files: bench.txt, sha256" in said
    found = contents(tmp_path / "OUT")
    assert yaml.safe_load(found["recipe.yaml"])["filters"]["evaluation_files"] == ["bench.txt"]
    assert not any(b"private" in content for content in found.values())
    assert run(tmp_path, "verify", tmp_path / "OUT").returncode == 0


# Prompts of which only digests are published.

SECRET_PROMPT = 'A riddle that\nnobody "outside" may read, by contract.'


@pytest.mark.parametrize("form", ["openai", "hermes", "llamafactory", "dpo", "kto"])
def test_digests_alone_leave_no_prompt(tmp_path: Path, form: str) -> None:
    script = [{"content": f"You asked: {SECRET_PROMPT} I say no."}]
    row = {"id": "p1", "prompt": SECRET_PROMPT, "note": "gold", "script": script}
    row |= {"expected": "no", "user_turns": ["And a second secret question, please?"]}
    script.append({"content": "no"})
    write_rows(tmp_path / "p.jsonl", row)
    options = {**SCRIPTED, "enabled_toolsets": "none", "output_dir": tmp_path, "num_samples": 2}
    done = run(tmp_path, "--check_expected", **options)
    assert done.returncode == 0, done.stderr
    publish(tmp_path, format=form, prompts="digests")
    found = contents(tmp_path / "OUT")
    assert "prompts.jsonl" not in found
    for content in found.values():
        for private in (b"riddle", b"outside", b"by contract", b"second secret", b"gold"):
            assert private not in content
    (digests,) = lines(tmp_path / "OUT" / "prompts.digests.jsonl")
    if found.get(f"{form}/train.jsonl"):
        assert f"sha256:{digests['texts'][0]}".encode() in found[f"{form}/train.jsonl"]
    assert run(tmp_path, "verify", tmp_path / "OUT").returncode == 0


def test_digests_alone_refuse_formats_that_show_prompts_otherwise(tmp_path: Path) -> None:
    make_run(tmp_path, call_record())
    said = publish(tmp_path, format="parquet", prompts="digests", ok=False)
    assert "parquet" in said


# A kill leaves the old publication or the new one under the name, or none; never half of one.


@pytest.mark.slow
def test_a_kill_leaves_no_half_publication(tmp_path: Path) -> None:
    make_run(tmp_path, *(call_record(f"Answer {n}. " + "word " * 200) for n in range(300)))
    line = command("publish", tmp_path / "r", tmp_path / "OUT", "--replace", format="openai,hermes")
    began = time.monotonic()
    subprocess.run(line, cwd=tmp_path, check=True, capture_output=True)
    took = time.monotonic() - began
    whole = contents(tmp_path / "OUT")
    draw = random.Random(5)
    for _ in range(12):
        process = subprocess.Popen(
            line, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=took * draw.uniform(0.5, 1.0))
        process.kill()
        process.wait()
        if (tmp_path / "OUT").exists():
            assert contents(tmp_path / "OUT") == whole
    subprocess.run(line, cwd=tmp_path, check=True, capture_output=True)
    assert contents(tmp_path / "OUT") == whole
    assert not list(tmp_path.glob(".OUT*"))


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    """The next `publish` finds the old publication aside and puts it back."""
    make_run(tmp_path, call_record())
    publish(tmp_path, format="openai")
    before = contents(tmp_path / "OUT")
    (tmp_path / "OUT").rename(tmp_path / ".OUT.replaced")
    (tmp_path / ".OUT.publishing" / "OUT").mkdir(parents=True)
    (tmp_path / ".OUT.publishing" / "OUT" / "half").write_text("")
    said = publish(tmp_path, format="openai", ok=False)
    assert "--replace" in said
    assert contents(tmp_path / "OUT") == before
    assert not list(tmp_path.glob(".OUT*"))
