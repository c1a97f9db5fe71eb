"""Run directories from somebody who means harm: no command runs code of theirs, reads files that
they name, waits for ever, obeys escape sequences, or calls what they wrote a bug of ours."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
import pytest

from batch_trajectories.basics.text import escape_controls
from batch_trajectories.records.files import add_checksum
from tests.helpers.running import SCRIPTED, run, write_rows

LOOK = {"tool_calls": [{"name": "read_file", "arguments": {"path": "a.txt"}}]}
ESCAPES = "\x1b]0;pwned\x07\x1b[2J\x9b31m\u202e\r"
COMMANDS: dict[str, tuple[str, ...]] = {
    "stats": ("stats", "r"),
    "show": ("show", "r"),
    "show one": ("show", "r", "p0"),
    "report": ("report", "r"),
    "compare": ("compare", "r", "o"),
    "export": ("export", "r"),
    "export a dataset": ("export", "r", "--format=hermes,openai"),
    "check a dataset": ("export", "r", "--check"),
    "verify": ("verify", "r"),
    "repair": ("verify", "r", "--repair"),
    "merge": ("merge", "r", "--into=m"),
    "retry": ("retry", "r", "--dry_run"),
    "status": ("status", "r"),
    "list": ("status",),
    "label": ("label", "r", "p0", "--verdict=keep"),
}


@pytest.fixture(scope="module")
def made() -> Iterator[Path]:
    with TemporaryDirectory() as directory:
        cwd = Path(directory)
        script = [LOOK, {"content": "y"}]
        rows = [{"id": f"p{n}", "prompt": "x", "script": script, "check": "true"} for n in (0, 1)]
        write_rows(cwd / "p.jsonl", *rows)
        done = run(cwd, "--row_setup", **SCRIPTED)
        assert done.returncode == 0, done.stderr
        assert run(cwd, "export", "r", "--format=openai").returncode == 0
        shutil.copytree(cwd / "trajectories" / "r", cwd / "trajectories" / "o")
        yield cwd


@pytest.fixture
def run_dir(made: Path, tmp_path: Path) -> Path:
    """A copy of the run that a stranger has written: nothing says that this user did."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "trajectories" / "r"
    change_run(path, lambda identity: identity.pop("mac"))
    return path


def change_run(run_dir: Path, change: Callable[[dict[str, Any]], object]) -> None:
    identity = json.loads((run_dir / "run.json").read_text())
    identity.pop("crc32", None)
    change(identity)
    (run_dir / "run.json").write_text(json.dumps(identity))


def change_records(run_dir: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """With checksums that fit, as whoever has the program can make."""
    lines = []
    for line in (run_dir / "records.jsonl").read_bytes().splitlines():
        record = orjson.loads(line)
        record.pop("crc32", None)
        change(record)
        lines.append(add_checksum(orjson.dumps(record)))
    (run_dir / "records.jsonl").write_bytes(b"".join(lines))
    (run_dir / "records.idx").unlink()


def setter(*keys: Any) -> Callable[[dict[str, Any]], None]:
    *outer, last, value = keys

    def change(place: Any) -> None:
        for key in outer:
            place = place[key]
        place[last] = value

    return change


def run_command(cwd: Path, *command: str) -> str:
    """What a command prints; it must end, and not by an error that is none of its own."""

    def too_long(*_: object) -> None:
        raise AssertionError(f"{command}: it does not end")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(30)
    try:
        done = run(cwd, *command)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    said = done.stdout + done.stderr
    assert "Traceback" not in said, said
    assert done.returncode in (0, 1, 2, 4, 6), said
    assert not set(said) & set("\x1b\x07\x9b\u202e"), "a terminal would obey"
    return said


RUN_JSON: tuple[tuple[Any, ...], ...] = (
    ("dataset", {}),
    ("dataset", "path", 5),
    ("dataset", "rows", "x"),
    ("dataset", "rows", 10**18),
    ("dataset", "bad_rows", -1),
    ("dataset", "source", {"x": 1}),
    ("history", [1]),
    ("history", [{"at": 1e300, "changes": {}}]),
    ("created", 1e300),
    ("run_name", ESCAPES),
    ("config", "run_name", "../../evil"),
    ("config", "num_samples", "x"),
    ("config", "num_samples", 10**15),
    ("config", "model", ["x"]),
    ("config", "model", ESCAPES),
    ("config", "shard", "x"),
    ("config", "accept_rows", ESCAPES),
    ("meaning", {"distribution": 5}),
    ("images", 5),
    ("api", ESCAPES),
    ("config", {}),
)


@pytest.mark.parametrize("keys", RUN_JSON, ids=lambda keys: ".".join(map(ascii, keys))[:60])
def test_any_run_json_is_used_or_refused_in_a_sentence(
    run_dir: Path, keys: tuple[Any, ...]
) -> None:
    change_run(run_dir, setter(*keys))
    cwd = run_dir.parents[1]
    for command in ("stats", "report", "export", "merge", "status", "list", "compare", "verify"):
        run_command(cwd, *COMMANDS[command])


RECORDS: tuple[tuple[Any, ...], ...] = (
    ("id", ESCAPES),
    ("status_reason", ESCAPES),
    ("model", ESCAPES),
    ("error", {"class": ESCAPES, "message": ESCAPES, "hint": None}),
    ("messages", []),
    ("messages", 0, "content", "</script><script>alert(1)</script>" + ESCAPES),
    ("turns", []),
    ("turns", 0, "cost_usd", 1e308),
    ("cost_usd", 1e308),
    ("finished_at", 1e300),
    ("started_at", 1e300),
    ("row", {"id": ESCAPES, "prompt": ESCAPES}),
    ("input_digest", "../../x"),
)


@pytest.mark.parametrize("keys", RECORDS, ids=lambda keys: ".".join(map(ascii, keys))[:60])
def test_any_record_is_used_or_refused_in_a_sentence(run_dir: Path, keys: tuple[Any, ...]) -> None:
    change_records(run_dir, setter(*keys))
    cwd = run_dir.parents[1]
    for command in ("stats", "show", "show one", "report", "compare", "export", "status"):
        run_command(cwd, *COMMANDS[command])


PIPES = (
    "run.json",
    "records.jsonl",
    "dataset.idx",
    "exports/manifest.json",
    "report.html",
    "exports/dataset/manifest.json",
    "exports/dataset/openai",
    "kept_workspaces",
    "batches",
    "inflight/x",
    "quarantine",
    "scores.jsonl",
    "labels.jsonl",
    "tasks.jsonl",
    "../r.jsonl",
)


@pytest.mark.parametrize("name", PIPES)
def test_no_command_waits_for_a_pipe(run_dir: Path, name: str) -> None:
    path = run_dir / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    for command in COMMANDS.values():
        run_command(run_dir.parents[1], *command)


def test_a_dataset_that_is_a_pipe_or_another_file_is_not_read(run_dir: Path) -> None:
    cwd = run_dir.parents[1]
    os.mkfifo(cwd / "pipe.jsonl")
    write_rows(cwd / "private.jsonl", {"id": "secret", "prompt": "x"})
    for name in ("pipe.jsonl", "private.jsonl"):
        change_run(run_dir, setter("dataset", "path", str(cwd / name)))
        (run_dir / "dataset.idx").unlink(missing_ok=True)
        said = run_command(cwd, *COMMANDS["export"])
        assert ("not started here by you" in said) or ("no plain file" in said) or "pipe" in said
        assert "secret" not in said
        assert run_command(cwd, *COMMANDS["merge"])
        assert not (cwd / "trajectories" / "m").exists()


def test_links_that_lead_out_are_not_read(run_dir: Path, made: Path) -> None:
    """A run of this user's may have them: its files can lie on another disk."""
    cwd = run_dir.parents[1]
    shutil.move(run_dir / "records.jsonl", cwd / "private.jsonl")
    (run_dir / "records.jsonl").symlink_to(cwd / "private.jsonl")
    for command in ("show", "stats", "export", "report", "merge", "status"):
        said = run_command(cwd, *COMMANDS[command])
        assert "records.jsonl is a link to a file outside of it" in said, command
    own = cwd / "trajectories" / "o"
    shutil.move(own / "records.jsonl", cwd / "mine.jsonl")
    (own / "records.jsonl").symlink_to(cwd / "mine.jsonl")
    assert run(cwd, "stats", "o").returncode == 0


def test_an_export_writes_through_no_link_of_theirs(run_dir: Path) -> None:
    cwd = run_dir.parents[1]
    (cwd / "mine").mkdir()
    dataset = run_dir / "exports" / "dataset"
    shutil.rmtree(dataset / "openai")
    manifest = {"schema_version": 1, "kind": "dataset", "unfinished": True, "paths": []}
    before = json.loads((dataset / "manifest.json").read_text())
    manifest["schema_version"] = before["schema_version"]
    (dataset / "manifest.json").write_text(json.dumps(manifest))
    (dataset / "openai").symlink_to(cwd / "mine")
    run_command(cwd, "export", "r", "--format=openai", "--shard_mb=1")
    assert not list((cwd / "mine").rglob("*"))


class TestRecipesOfTheirs:
    """The recipe in a manifest that came with a run has no function called and no file opened."""

    EVIL = "def f(record):\n    return [False] * len(record['turns'])\nopen('ran', 'w').close()\n"

    def received(self, run_dir: Path, recipe: dict[str, Any]) -> Path:
        cwd = run_dir.parents[1]
        (cwd / "evil.py").write_text(self.EVIL)
        path = run_dir / "exports" / "dataset" / "manifest.json"
        manifest = json.loads(path.read_text())
        for key, value in recipe.items():
            manifest["recipe"][key] = {**(manifest["recipe"][key] or {}), **value}
        path.write_text(json.dumps(manifest))
        return cwd

    @pytest.mark.parametrize(
        "recipe",
        [
            {"mask": {"function": "evil.py:f"}},
            {"filters": {"answer": {"match": "python", "function": "evil.py:f"}}},
            {"filters": {"evaluation_files": ["pipe.jsonl"]}},
            {"filters": {"tokenizer": "pipe.jsonl", "max_length": 5}},
            {"fit": {"template": "pipe.jsonl", "other_context": "mask"}},
        ],
        ids=lambda recipe: str(recipe)[:50],
    )
    def test_without_a_flag(self, run_dir: Path, recipe: dict[str, Any]) -> None:
        cwd = self.received(run_dir, recipe)
        os.mkfifo(cwd / "pipe.jsonl")
        said = run_command(cwd, *COMMANDS["check a dataset"])
        assert "you did not write this recipe here" in said
        assert "--trust_run" in said
        run_command(cwd, *COMMANDS["report"])
        run_command(cwd, *COMMANDS["verify"])
        assert not (cwd / "ran").exists()

    def test_a_report_says_what_it_does_not_show(self, run_dir: Path) -> None:
        cwd = self.received(run_dir, {"mask": {"function": "evil.py:f"}})
        assert "does not show what its function masks" in run_command(cwd, *COMMANDS["report"])
        assert not (cwd / "ran").exists()

    def test_with_the_flag_or_as_ones_own(self, run_dir: Path) -> None:
        cwd = self.received(run_dir, {"mask": {"function": "evil.py:f"}})
        assert run(cwd, "export", "r", "--check", "--trust_run").returncode == 1
        assert (cwd / "ran").exists()
        (cwd / "ran").unlink()
        (cwd / "mine.yaml").write_text("formats: [openai]\nmask: {function: evil.py:f}\n")
        assert run(cwd, "export", "r", "--recipe=mine.yaml").returncode == 0
        (cwd / "ran").unlink()
        done = run(cwd, "export", "r", "--check")
        assert done.returncode == 0, done.stderr
        assert (cwd / "ran").exists()
        run_command(cwd, *COMMANDS["report"])


def test_controls_are_escaped_and_json_stays_json() -> None:
    assert escape_controls("a\tb\nc") == "a\tb\nc"
    text = json.dumps({"a": ESCAPES + "\x7f"}, ensure_ascii=False)
    assert json.loads(escape_controls(text)) == json.loads(text)
    assert escape_controls("\x1b[2J\u202e") == "\\u001b[2J\\u202e"
