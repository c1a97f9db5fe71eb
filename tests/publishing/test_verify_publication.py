"""What is wrong with a received publication is named, and nothing of it is followed or run."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.exporting import call_record, make_run
from tests.helpers.running import run


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A publication, in a directory of its own."""
    make_run(tmp_path, call_record(), call_record("Other."))
    place = tmp_path / "received" / "OUT"
    done = run(tmp_path, "publish", tmp_path / "r", place, format="openai,parquet", license="mit")
    assert done.returncode == 0, done.stderr
    return place


def verify(place: Path, *args: object, code: int, **options: Any) -> str:
    done = run(place.parent, "verify", place, *args, **options)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def change_manifest(place: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((place / "manifest.json").read_text())
    change(manifest)
    (place / "manifest.json").write_text(json.dumps(manifest))


def forge(place: Path, name: str, content: bytes) -> None:
    """Replace a file, and its entry in the manifest, as whoever forges a publication would."""
    (place / name).write_bytes(content)

    def fit(manifest: dict[str, Any]) -> None:
        for file in manifest["other_files"]:
            if file["path"] == name:
                file |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    change_manifest(place, fit)


def test_says_that_it_is_whole_and_what_it_would_start(out: Path) -> None:
    said = verify(out, code=0)
    digest = hashlib.sha256((out / "manifest.json").read_bytes()).hexdigest()
    assert "as published" in said
    assert digest in said
    assert "license mit" in said
    assert "reproduce.sh would start a run with" in said
    verify(out, code=0, sha256=digest)
    assert "its sha256 is" in verify(out, code=6, sha256="0" * 64)


def test_prints_json(out: Path) -> None:
    facts = json.loads(verify(out, "--json", code=0))
    assert (facts["problems"], facts["differences"]) == ([], [])


@pytest.mark.parametrize(
    "name", ["openai/train.jsonl", "openai_parquet/train.parquet", "prompts.jsonl", "README.md"]
)
def test_names_a_changed_file(out: Path, name: str) -> None:
    path = next(out.rglob(Path(name).name)) if "parquet" in name else out / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert f"{path.relative_to(out)}: its content is not what was published" in verify(out, code=6)


def test_names_what_is_missing_and_what_was_added(out: Path) -> None:
    (out / "run.yaml").unlink()
    (out / "openai" / "more.jsonl").write_text("{}\n")
    (out / ".hidden").write_text("")
    said = verify(out, code=6)
    assert "run.yaml: No such file" in said
    assert "openai/more.jsonl: not in the manifest" in said
    assert ".hidden: not in the manifest" in said


def test_names_what_it_cannot_show(out: Path) -> None:
    """A name of a file cannot forge a line, and one that is no UTF-8 is shown."""
    (out / "a\nOUT: as published").write_text("")
    Path(os.fsdecode(os.fsencode(out) + b"/\xff")).write_bytes(b"")
    said = verify(out, code=6)
    assert "\nOUT: as published" not in said
    assert said.count("not in the manifest") == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
def test_names_a_directory_that_cannot_be_read(out: Path) -> None:
    (out / "openai").chmod(0)
    assert "openai: Permission denied" in verify(out, code=6)
    (out / "openai").chmod(0o700)


def test_takes_what_a_download_from_the_hub_adds(out: Path) -> None:
    (out / ".gitattributes").write_text("")
    (out / ".cache" / "huggingface").mkdir(parents=True)
    (out / ".cache" / "huggingface" / "x.metadata").write_text("")
    verify(out, code=0)


def test_counts_rows(out: Path) -> None:
    def more(manifest: dict[str, Any]) -> None:
        part = next(one for one in manifest["formats"] if one["format"] == "openai")
        for file in part["files"]:
            file["rows"] += 1
        part["rows"] += 1

    change_manifest(out, more)
    said = verify(out, code=6)
    assert "openai/train.jsonl: 2 rows, but the manifest says 3" in said
    assert ".parquet: 2 rows, but the manifest says 3" in said


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/hostname", "openai/../../secret", "a//b", "./a", "a\\b", ".ssh/x"]
)
def test_refuses_names_that_lead_elsewhere(out: Path, name: str) -> None:
    (out.parent / "secret").write_text("mine")
    change_manifest(out, lambda manifest: manifest["other_files"][0].update(path=name))
    said = verify(out, code=2)
    assert repr(name) in said


@pytest.mark.parametrize("place", ["prompts.jsonl", "openai", "more"])
def test_refuses_links(out: Path, place: str) -> None:
    path = out / place
    aside = out.parent / "aside"
    if path.exists():
        path.rename(aside)
    else:
        aside.write_text("")
    path.symlink_to(aside)
    assert f"{place}: a link" in verify(out, code=6)


def test_refuses_a_link_in_the_place_of_the_manifest(out: Path) -> None:
    (out / "manifest.json").rename(out.parent / "m.json")
    (out / "manifest.json").symlink_to(out.parent / "m.json")
    assert "manifest.json: cannot read it" in verify(out, code=2)


def test_refuses_pipes_without_waiting(out: Path) -> None:
    (out / "README.md").unlink()
    os.mkfifo(out / "README.md")
    assert "README.md: not a plain file" in verify(out, code=6)


def test_does_not_read_files_of_another_size(out: Path) -> None:
    os.truncate(out / "prompts.jsonl", 1 << 42)  # it would take hours to read
    assert "prompts.jsonl: 4,398,046,511,104 bytes, published were" in verify(out, code=6)


def test_refuses_a_huge_file_although_the_manifest_has_its_size(out: Path) -> None:
    os.truncate(out / "prompts.jsonl", 1 << 42)

    def fit(manifest: dict[str, Any]) -> None:
        for file in manifest["other_files"]:
            if file["path"] == "prompts.jsonl":
                file["bytes"] = 1 << 42

    change_manifest(out, fit)
    assert "prompts.jsonl: 4,398,046,511,104 bytes are too many" in verify(out, code=6)


def test_does_not_read_a_huge_manifest(out: Path) -> None:
    os.truncate(out / "manifest.json", 1 << 40)
    assert "too many for a manifest" in verify(out, code=2)


@pytest.mark.parametrize(
    "content", [b"[]", b"{}", b"\xff", b'{"kind": "dataset"}', b"[" * 100_000, b'{"a": 1e999}']
)
def test_refuses_what_is_no_manifest(out: Path, content: bytes) -> None:
    (out / "manifest.json").write_bytes(content)
    verify(out, code=2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", ["evil.py:TOOLS"]),
        ("mcp", {"x": {"command": ["sh", "-c", "touch /tmp/x"]}}),
        ("agent", "evil.yaml"),
        ("reward", ["os:system"]),
        ("approve", "os:system"),
        ("base_url", "http://evil.example/v1"),
        ("endpoints", {"e": {"base_url": "http://evil.example/v1"}}),
        ("key_env", "AWS_SECRET_ACCESS_KEY"),
        ("env_from", ["HOME"]),
        ("dataset_file", "/etc/passwd"),
        ("script_file", "../../x"),
        ("sandbox", "local"),
        ("mirror", "s3://evil/x"),
        ("prefill_messages", "/etc/passwd"),
        ("subagents", "/etc/passwd"),
        ("images", "s3://evil/x"),
        ("no_such_option", 1),
    ],
)
def test_a_config_that_acts_is_named(out: Path, name: str, value: object) -> None:
    """Whoever forges a publication can make all digests fit; its job must still be harmless."""
    options = yaml.safe_load((out / "run.yaml").read_text())
    forge(out, "run.yaml", yaml.safe_dump({**options, name: value}).encode())
    assert f"run.yaml: {name}: a publication has no such option" in verify(out, code=6)


def test_another_script_is_named(out: Path) -> None:
    forge(out, "reproduce.sh", b"#!/bin/sh\ntouch stolen\n")
    assert "reproduce.sh: not the script" in verify(out, code=6)
    assert not [*out.parent.rglob("stolen")]


@pytest.mark.parametrize("function", ["/tmp/evil.py:late", "evil.py:late", "os:system"])
def test_a_recipe_that_acts_is_named(out: Path, function: str) -> None:
    recipe = yaml.safe_load((out / "recipe.yaml").read_text())
    changed = yaml.safe_dump({**recipe, "mask": {"function": function}}).encode()
    forge(out, "recipe.yaml", changed)
    assert "recipe.yaml: mask.function: " in verify(out, code=6)


def test_names_the_options_that_a_start_lacks(out: Path) -> None:
    """A stranger who forgets one would pay for another job."""
    need = {"name": "base_url", "what": "the URL of a server"}
    change_manifest(out, lambda manifest: manifest["publication"].update(needs=[need]))
    assert "give --base_url=...: the URL of a server" in verify(out, code=6, given="--seed=1")
    verify(out, code=0, given="--base-url=http://localhost:1/v1 --seed=1")
    verify(out, code=0)


def test_compares_the_rows_of_two(out: Path, tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    make_run(tmp_path / "again", call_record(), call_record("Other."))
    run(tmp_path, "publish", tmp_path / "again" / "r", tmp_path / "two", format="openai,parquet")
    assert "the same rows" in verify(out, code=0, same_as=tmp_path / "two")
    make_run(tmp_path / "again", call_record(), call_record("Another."))
    options: dict[str, Any] = {"format": "openai,parquet"}
    run(tmp_path, "publish", tmp_path / "again" / "r", tmp_path / "two", "--replace", **options)
    said = verify(out, code=6, same_as=tmp_path / "two")
    assert "not the same: openai/train.jsonl: other rows" in said


def test_a_run_and_a_dataset_are_no_publications(tmp_path: Path) -> None:
    make_run(tmp_path, call_record())
    assert run(tmp_path, "export", tmp_path / "r", format="openai").returncode == 0
    dataset = tmp_path / "r" / "exports" / "dataset"
    assert "no publication" in verify(dataset, code=2)
    assert "no publication" in verify(tmp_path / "r", code=2, sha256="0" * 64)
