"""Chat templates by name: copies that are shipped, installed trainers, and models on the hub."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.export.templates import template_names
from batch_trajectories.export.templates.rendering import EOS, load_chat, strip_marks
from batch_trajectories.export.templates.template_names import describe_missing, find_templates
from tests.fakes.fake_hub import REPOSITORY, REVISION, fake_hub
from tests.helpers.builders import assistant, call, record_of, result, user
from tests.helpers.exporting import make_run
from tests.helpers.running import run

SHIPPED = Path(template_names.__file__).with_name("shipped")
TABLE = tomllib.loads((SHIPPED / "templates.toml").read_text())
COPIES = {one["name"]: one for one in TABLE["template"]}
WITHHELD = {name for group in TABLE["withheld"] for name in group["names"]}

without_trainers = pytest.mark.skipif(
    any(find_spec(name) for name in ("trl", "axolotl")),
    reason="a trainer is installed, whose templates are taken",
)


def test_each_copy_is_the_file_that_the_table_says() -> None:
    """Source, version, license and digest are known of every file that is shipped."""
    files = {str(path.relative_to(SHIPPED)): path for path in SHIPPED.glob("*/*.jinja")}
    assert {one["file"] for one in COPIES.values()} == files.keys()
    for one in COPIES.values():
        assert sha256(files[one["file"]].read_bytes()).hexdigest() == one["sha256"], one["name"]
        assert one["license"] == "Apache-2.0"
        assert one["package"] in ("trl", "axolotl")
        assert one["version"]
        assert one["models"]
    assert "Apache License" in (SHIPPED / "Apache-2.0.txt").read_text()
    assert not COPIES.keys() & WITHHELD


@without_trainers
def test_names_need_no_trainer() -> None:
    """All names with a copy can be given, and say where the copy comes from."""
    (found,) = find_templates("qwen3")
    assert (found.name, found.source) == ("qwen3", "copy of TRL 1.16.0, Apache-2.0")
    assert [one.name for one in find_templates("axolotl:qwen3, gptoss")] == [
        "axolotl:qwen3",
        "gptoss",
    ]
    all_of_both = find_templates("all,axolotl:all")
    assert [one.name for one in all_of_both] == [*COPIES]
    for one in all_of_both:
        load_chat(one.path)
    missing = "\n".join(describe_missing("all,qwen3,axolotl:all"))
    assert "all: 17 templates of TRL that are shipped; without " in missing
    assert "(pip install trl)" in missing
    assert "axolotl:all: 4 templates of Axolotl that are shipped" in missing
    assert [*describe_missing("qwen3")] == []


@without_trainers
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("qwne3", "did you mean 'qwen3'"),
        ("llama3_1", "its models do not all have the Apache License 2.0: pip install trl, or give"),
        ("axolotl:llama4", "pip install axolotl, or give hf:ORG/MODEL"),
        ("qwen3_8", "the license of its models was not checked"),
        ("llamafactory:qwen3", "LLaMA-Factory builds prompts by its own code"),
        ("swift:qwen3", "ms-swift builds prompts by its own code"),
        ("hf:qwen3", "write hf:ORG/MODEL"),
    ],
)
def test_a_name_without_a_template_says_why_and_what_can_be_given(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        find_templates(name)


def test_a_copy_that_was_changed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was proved by it would be proved by no template of a trainer."""
    shutil.copytree(SHIPPED, tmp_path / "shipped")
    monkeypatch.setattr(template_names, "_SHIPPED", tmp_path / "shipped")
    assert find_templates("qwen3")
    with (tmp_path / "shipped/trl/qwen3.jinja").open("a") as file:
        file.write(" ")
    with pytest.raises(ConfigError, match=r"qwen3\.jinja: it is not the template that was shipped"):
        find_templates("qwen3")
    assert find_templates("gptoss")


def test_an_installed_trainer_comes_before_the_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own templates are those that train; a copy stands for what it lacks."""
    templates = tmp_path / "trl" / "chat_templates"
    templates.mkdir(parents=True)
    (tmp_path / "trl" / "__init__.py").touch()
    for name in ("qwen3", "llama3_1"):
        (templates / f"{name}.jinja").write_text("theirs")
    monkeypatch.syspath_prepend(tmp_path)
    found = {one.name: one for one in find_templates("all")}
    assert found["qwen3"].path == templates / "qwen3.jinja"
    assert found["qwen3"].source.endswith("installed")
    assert found["llama3_1"].path == templates / "llama3_1.jinja"
    assert found["gptoss"].path == SHIPPED / "trl/gptoss.jinja"
    assert [*describe_missing("all")] == []


SAID = (
    user("Q1"),
    assistant("Look.", call('{"city": "Oslo"}'), reasoning="First"),
    result("r1"),
    assistant("A1", reasoning="Second"),
)


@without_trainers
def test_the_command_and_the_manifest_say_which_template_it_was(tmp_path: Path) -> None:
    source = make_run(tmp_path, record_of(*SAID))
    done = run(tmp_path, "export", source.run_dir, format="openai", parity="qwen3,all")
    assert done.returncode == 0, done.stderr
    digest = COPIES["qwen3"]["sha256"]
    assert f"its template: copy of TRL 1.16.0, Apache-2.0, SHA-256 {digest[:12]}" in done.stdout
    assert "not covered: LLaMA-Factory" in done.stdout
    assert "all: 17 templates of TRL that are shipped" in done.stdout
    manifest = json.loads((source.run_dir / "exports/dataset/manifest.json").read_bytes())
    judged = {one["template"]: one for one in manifest["parity"]}
    assert judged["qwen3"]["sha256"] == digest
    assert judged["qwen3"]["source"] == "copy of TRL 1.16.0, Apache-2.0"
    assert judged["qwen3"]["is_proved"]
    assert len(judged) == 17


@pytest.mark.slow
def test_the_template_of_a_model_is_taken_from_the_hub_and_then_from_its_cache(
    tmp_path: Path,
) -> None:
    """The manifest names the commit; without the hub, a model that is not cached is named."""
    source = make_run(tmp_path, record_of(*SAID))
    text = (SHIPPED / "trl/qwen3.jinja").read_text()
    files = {"tokenizer_config.json": json.dumps({"chat_template": text}).encode()}
    asked = {"format": "openai", "parity": f"hf:{REPOSITORY}"}
    home = {"HF_HOME": str(tmp_path / "home")}
    with fake_hub(files, kind="model") as (environment, paths):
        env = {**home, **environment}
        fetched = run(tmp_path, "export", source.run_dir, env=env, **asked)
        assert fetched.returncode == 0, fetched.stderr
        assert paths
        unknown = run(tmp_path, "export", source.run_dir, env=env, format="openai", parity="hf:a/b")
        assert (unknown.returncode, "the hub refuses it" in unknown.stderr) == (2, True)
    again = run(tmp_path, "export", source.run_dir, env=env, **asked)
    assert again.stdout == fetched.stdout
    manifest = json.loads((source.run_dir / "exports/dataset/manifest.json").read_bytes())
    (judged,) = manifest["parity"]
    assert judged["source"] == f"hf:{REPOSITORY}@{REVISION}"
    assert judged["sha256"] == COPIES["qwen3"]["sha256"]
    gone = run(tmp_path, "export", source.run_dir, env=env, format="openai", parity="hf:a/b")
    assert (gone.returncode, "not in the cache" in gone.stderr) == (4, True)


# The packages of the trainers, and the library that renders for them.


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the trainers' packages, and with transformers and what it needs."""
    folder = tmp_path_factory.mktemp("packages")
    versions = {f"{one['package']}=={one['version']}" for one in COPIES.values()}
    pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder)]
    for wanted in (["--no-deps", *sorted(versions)], ["transformers==5.19.0"]):
        done = subprocess.run([*pip, *wanted], capture_output=True, text=True, timeout=600)
        if done.returncode:
            pytest.skip(f"pip cannot install {wanted}: {done.stderr[-300:]}")
    return folder


@pytest.mark.slow
def test_the_copies_are_those_of_the_trainers_packages(packages: Path) -> None:
    """Each is byte for byte that of the package; every other template is said to be withheld."""
    for one in COPIES.values():
        assert (packages / one["path"]).read_bytes() == (SHIPPED / one["file"]).read_bytes()
    theirs = {path.stem for path in (packages / "trl/chat_templates").glob("*.jinja")}
    axolotl = packages / "axolotl/utils/chat_templates/templates"
    theirs |= {f"axolotl:{path.stem}" for path in axolotl.glob("*.jinja")}
    assert theirs == COPIES.keys() | WITHHELD


RENDER = """
import json, sys
from pathlib import Path
from transformers.utils.chat_template_utils import render_jinja_template

for path, messages, tools, is_prompt in json.loads(sys.stdin.read()):
    rendered, _ = render_jinja_template(
        conversations=[messages],
        tools=tools,
        chat_template=Path(path).read_text(),
        add_generation_prompt=is_prompt,
        bos_token="",
        eos_token="<END>",
    )
    print(json.dumps(rendered[0]))
"""


@pytest.mark.slow
def test_the_trainers_library_renders_the_same_text(packages: Path) -> None:
    """TRL and Axolotl render through transformers: the same text as here, for each copy."""
    tool = {"name": "look", "description": "Look.", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": tool}]
    asked = {"role": "user", "content": "Q1 ü <b>"}
    called: dict[str, Any] = {
        "id": "c1",
        "type": "function",
        "function": {"name": "look", "arguments": {"city": "Oslo", "deep": {"n": [1, None]}}},
    }
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be kind."},
        asked,
        {"role": "assistant", "content": "", "reasoning_content": "R", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "name": "look", "content": '{"a": "é"}'},
        {"role": "assistant", "content": "A1", "reasoning_content": "Then"},
    ]
    cases: list[tuple[str, list[dict[str, Any]], list[Any], bool]] = [
        (str(SHIPPED / one["file"]), messages[:length], tools, is_prompt)
        for one in COPIES.values()
        for length, is_prompt in ((5, False), (4, True), (2, True))
    ]
    done = subprocess.run(
        [sys.executable, "-c", RENDER],
        input=json.dumps(cases),
        env={"PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    theirs = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(theirs) == len(cases) == 63
    for (path, said, offered, is_prompt), text in zip(cases, theirs, strict=True):
        ours, _ = strip_marks(load_chat(Path(path))(said, offered, is_prompt=is_prompt))
        assert ours.replace(EOS, "<END>") == text, path
