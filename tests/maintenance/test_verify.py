"""`verify`: each kind of damage is found, named by file and line, and repaired without loss."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import orjson
import pytest

from batch_trajectories.api.results import write_results
from batch_trajectories.basics.text import plural
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.engine.run_dir import hold_lock, read_run_json
from batch_trajectories.maintenance.upkeep import VerifyResult, check
from batch_trajectories.records.files import add_checksum, read_object
from batch_trajectories.records.index import ROW_BYTES, make_mark
from batch_trajectories.records.tasks import task_key
from tests.helpers.running import SCRIPTED, ids, lines, run, write_rows

NOTE = {"tool_calls": [{"name": "write_file", "arguments": {"path": "n", "content": "1"}}]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of five tasks: three completed, one ended early, one rejected."""
    cwd = tmp_path_factory.mktemp("whole")
    rows: list[Any] = [
        {"id": f"p{n}", "prompt": "x", "script": [NOTE, {"content": f"y{n}"}]} for n in range(3)
    ]
    rows.append({"id": "endless", "prompt": "x", "script": [NOTE] * 9})
    odd: dict[str, Any] = {"tool_calls": [{"name": "fly"}]}
    rows.append({"id": "odd", "prompt": "x", "script": [odd, {"content": "no"}]})
    write_rows(cwd / "p.jsonl", *rows)
    assert run(cwd, **SCRIPTED, max_turns=3).returncode == 0
    return cwd / "trajectories" / "r"


@pytest.fixture
def path(whole: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    shutil.copytree(whole.parent, tmp_path / "trajectories")
    shutil.copy(whole.parent.parent / "p.jsonl", tmp_path)
    return tmp_path / "trajectories" / "r"


def run_check(path: Path, *, read_data: bool = True, repair: bool = False) -> VerifyResult:
    identity = read_run_json(path)
    config = RunConfig.model_validate(identity["config"])
    return check(path, identity, config, read_data=read_data, repair=repair, make=write_results)


def edit(file: Path, change: Callable[[list[bytes]], Any]) -> None:
    """Change the lines of a file in place."""
    content = file.read_bytes().splitlines(keepends=True)
    change(content)
    file.write_bytes(b"".join(content))


def without(line: bytes, **changes: Any) -> bytes:
    return add_checksum(orjson.dumps({**read_object(line), **changes}))


def put(number: int, line: bytes) -> Callable[[list[bytes]], Any]:
    return lambda content: content.__setitem__(number, line)


def edit_last_row(index: Path, *, turns: int) -> None:
    content = bytearray(index.read_bytes())
    content[32 - ROW_BYTES : 36 - ROW_BYTES] = turns.to_bytes(4, sys.byteorder)
    content[:ROW_BYTES] = make_mark(len(content), crc32(content[ROW_BYTES:]))
    index.write_bytes(content)


def flip_a_bit(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def mix_up_kept_scan(kept: Path) -> None:
    """As if another version of the program had distinguished rows in another way."""
    told = kept.read_bytes().split(b"\n", 1)[1]
    told = told[:-32] + told[-16:] + told[-32:-16]
    kept.write_bytes(blake2b(told, digest_size=32).hexdigest().encode() + b"\n" + told)


def append_a_row(index: Path) -> None:
    content = index.read_bytes()
    index.write_bytes(content + content[-ROW_BYTES:])


def change_record(number: int, **changes: Any) -> Callable[[list[bytes]], Any]:
    return lambda content: content.__setitem__(number, without(content[number], **changes))


def in_record_of_p1(old: bytes, new: bytes) -> Callable[[list[bytes]], Any]:
    def do(content: list[bytes]) -> None:
        (number,) = (n for n, line in enumerate(content) if line.startswith(b'{"id":"p1"'))
        assert old in content[number]
        content[number] = content[number].replace(old, new)

    return do


def same_length_other_text(content: list[bytes]) -> None:
    content[0] = content[0].replace(b"y0", b"z0")


def event_of(task: str) -> bytes:
    reply = {"kind": "reply", "turn": 1, "message": {"role": "assistant", "content": ""}}
    line = {"task": task, "input_digest": "d", "deal": 1, "position": 0, "event": reply}
    return orjson.dumps(line) + b"\n"


UNFINISHED = task_key("z", "d").hex()


def note_batch(path: Path, *steps: str, task: str = UNFINISHED, job: str = "w") -> None:
    """Note that a call of a task was in a batch, up to the last of these steps."""
    fields: dict[str, dict[str, Any]] = {
        "gathered": {"model": "m", "items": [f"{task}-0a"]},
        "sending": {"upload": "", "bytes": 1},
        "created": {"batch": "b1"},
        "collected": {"batch": "b1", "replies": 1, "failed": 0, "unpriced": 0}
        | {"cost_usd": 0.5, "saved_usd": 0.5},
    }
    with (path / "batches.jsonl").open("ab") as file:
        for step in steps:
            line = {"kind": step, "wave": job, "at": 1.5, **fields[step]}
            file.write(orjson.dumps(line) + b"\n")


def keep_results(path: Path, content: bytes) -> None:
    (path / "batches").mkdir()
    (path / "batches" / "w.results").write_bytes(content)


def all_of(*damages: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def do(path: Path) -> None:
        for damage in damages:
            damage(path)

    return do


LOAN = add_checksum(orjson.dumps({"kind": "lent", "usd": 1.5, "tokens": 0}))
VERDICT = add_checksum(orjson.dumps({"key": "k", "reply": "right", "error": None}))
RESULT = orjson.dumps({"id": f"{UNFINISHED}-0a", "reply": {}}) + b"\n"
ALL_STEPS = ("gathered", "sending", "created", "collected")


def replace_in(file: Path, old: bytes, new: bytes) -> None:
    file.write_bytes(file.read_bytes().replace(old, new))


def edit_json(file: Path, **changes: Any) -> None:
    said = orjson.loads(file.read_bytes())
    said.pop("crc32", None)
    file.write_bytes(orjson.dumps({**said, **changes}))


class Damage(NamedTuple):
    """One way to damage a run: what `verify` must say, and how many tasks then run again."""

    do: Callable[[Path], Any]
    message: str
    again: int = 0
    repaired: bool = True


def on(name: str, change: Callable[[list[bytes]], Any]) -> Callable[[Path], Any]:
    return lambda path: edit(path / name, change)


DAMAGES: dict[str, Damage] = {
    "torn record": Damage(
        on("records.jsonl", lambda c: c.append(b'{"id": "p')), "records.jsonl:6: an incomplete line"
    ),
    "zeros": Damage(
        on("records.jsonl", lambda c: c.__setitem__(1, b"\0" * (len(c[1]) - 1) + b"\n")),
        "records.jsonl:2: not a complete record",
        again=1,
    ),
    "a record without messages": Damage(
        on("records.jsonl", change_record(2, messages=None)),
        "records.jsonl:3: not a complete record",
        again=1,
    ),
    "a record twice": Damage(
        on("records.jsonl", lambda c: c.append(c[0])), "records.jsonl:6: a second record of"
    ),
    "a turn missing": Damage(
        on("records.jsonl", lambda c: c.__setitem__(0, without_turn(c[0]))),
        "records.jsonl:1: ",
        repaired=False,
    ),
    "a record of another schema": Damage(
        on("records.jsonl", change_record(0, schema_version=99)),
        "schema 99",
        repaired=False,
    ),
    "no index": Damage(lambda p: (p / "records.idx").unlink(), "records.idx:1: ends before"),
    "a wrong index": Damage(
        lambda p: edit_last_row(p / "records.idx", turns=7),
        "records.idx:5: does not match line 5 of records.jsonl",
    ),
    "a flipped bit of the index": Damage(
        lambda p: flip_a_bit(p / "records.idx", 3 * ROW_BYTES), "records.idx: checksum mismatch"
    ),
    "a flipped bit of a text": Damage(
        on("records.jsonl", in_record_of_p1(b'"content":"y1"', b'"content":"x1"')),
        ": not a complete record (id 'p1'; it was changed since it was written",
        again=1,
    ),
    "a flipped bit of an id": Damage(
        on("records.jsonl", in_record_of_p1(b'"id":"p1"', b'"id":"q1"')),
        ": not a complete record (id 'q1'",
        again=1,
    ),
    "a flipped bit of a checksum": Damage(
        on("records.jsonl", in_record_of_p1(b'"crc32"', b'"crc22"')),
        ": not a complete record (id 'p1'",
        again=1,
    ),
    "a record without its newline": Damage(
        on("records.jsonl", lambda c: c.__setitem__(-1, c[-1][:-1])),
        "records.jsonl:5: a complete line without its newline",
    ),
    "a changed loan": Damage(
        lambda p: (p / "budget.jsonl").write_bytes(LOAN.replace(b"1.5", b"1.7")),
        "budget.jsonl:1: not a line of the budget",
    ),
    "a changed verdict": Damage(
        lambda p: (p / "verdicts.jsonl").write_bytes(VERDICT.replace(b"right", b"rigit")),
        "verdicts.jsonl:1: not a verdict",
    ),
    "an index that goes on": Damage(
        lambda p: append_a_row(p / "records.idx"), "records.idx:6: continues"
    ),
    "a kept scan of another dataset": Damage(
        lambda p: mix_up_kept_scan(p / "dataset.idx"), "dataset.idx: does not match the dataset"
    ),
    "a failure that is none": Damage(
        lambda p: (p / "failures.jsonl").write_text('{"kind": 1}\n'), "failures.jsonl:1: not a"
    ),
    "a torn failure": Damage(
        lambda p: (p / "failures.jsonl").write_text('{"kind"'),
        "failures.jsonl:1: an incomplete line",
    ),
    "a journal of nobody": Damage(
        lambda p: (p / "inflight" / "worker-3-0.jsonl").touch(), "worker-3-0.jsonl: no unfinished"
    ),
    "a journal with garbage": Damage(
        lambda p: (p / "inflight" / "worker-3-0.jsonl").write_bytes(b"gone\n" + event_of("z")),
        "worker-3-0.jsonl:1: not an event",
    ),
    "a torn journal": Damage(
        lambda p: (p / "inflight" / "worker-3-0.jsonl").write_bytes(event_of("z") + b'{"t'),
        "worker-3-0.jsonl:2: an incomplete line",
    ),
    "a workspace of a finished task": Damage(
        lambda p: workspace_of_first(p).mkdir(parents=True), ": the files of a finished"
    ),
    "a step of a batch that is none": Damage(
        lambda p: (p / "batches.jsonl").write_text('{"kind": "gathered", "wave": 1}\n'),
        "batches.jsonl:1: not a step",
    ),
    "a torn step of a batch": Damage(
        all_of(
            lambda p: note_batch(p, "gathered"), lambda p: append(p / "batches.jsonl", b'{"kind"')
        ),
        "batches.jsonl:2: an incomplete line",
    ),
    "a batch that nobody takes": Damage(
        lambda p: note_batch(p, *ALL_STEPS[:3], task=workspace_of_first(p).name),
        "batches.jsonl:3: batch b1: 1 call paid for",
    ),
    "a batch of unknown calls": Damage(
        lambda p: note_batch(p, *ALL_STEPS[1:3]),
        "batches.jsonl:2: job w is created, but no earlier line has its calls",
        repaired=False,
    ),
    "a batch of two waves": Damage(
        all_of(
            lambda p: note_batch(p, *ALL_STEPS[:3], job="v"),
            lambda p: note_batch(p, *ALL_STEPS[:3]),
        ),
        "batches.jsonl:6: batch b1 of job w is also that of job v",
        repaired=False,
    ),
    "steps of a batch out of order": Damage(
        lambda p: note_batch(p, "gathered", "created"),
        "batches.jsonl:2: job w is created after it was gathered",
        repaired=False,
    ),
    "a batch that brought too much": Damage(
        all_of(
            lambda p: note_batch(p, *ALL_STEPS),
            on("batches.jsonl", lambda c: put(3, without(c[3], failed=2))(c)),
            lambda p: keep_results(p, RESULT),
        ),
        "batches.jsonl:4: job w has 1 call, but 1 replies and 2 failures",
        repaired=False,
    ),
    "results that are gone": Damage(
        lambda p: note_batch(p, *ALL_STEPS),
        "w.results: not the results of batch b1",
        repaired=False,
    ),
    "results that are short": Damage(
        all_of(lambda p: note_batch(p, *ALL_STEPS), lambda p: keep_results(p, b"")),
        "w.results: not the results of batch b1 (0 replies instead of 1)",
        repaired=False,
    ),
    "results that nobody needs": Damage(
        all_of(
            lambda p: note_batch(p, *ALL_STEPS, task=workspace_of_first(p).name),
            lambda p: keep_results(p, RESULT),
        ),
        "w.results: left over from a batch",
    ),
    "half a file": Damage(
        lambda p: (p / ".run.json.7.tmp").touch(), ".run.json.7.tmp: an incomplete file"
    ),
    "half a training file": Damage(
        lambda p: (p.parent / ".r.jsonl.7.tmp").touch(), ".r.jsonl.7.tmp: an incomplete file"
    ),
    "no summary": Damage(lambda p: (p / "summary.json").unlink(), "summary.json: missing"),
    "an empty summary": Damage(
        lambda p: (p / "summary.json").write_bytes(b""), "summary.json: unreadable"
    ),
    "an empty manifest": Damage(
        lambda p: (p / "exports" / "manifest.json").write_bytes(b""), "manifest.json: unreadable"
    ),
    "a wrong summary": Damage(
        lambda p: edit_json(p / "summary.json", done=9), "summary.json: it has done 9, the records"
    ),
    "no manifest": Damage(
        lambda p: (p / "exports" / "manifest.json").unlink(), "manifest.json: missing"
    ),
    "a manifest of other files": Damage(
        lambda p: replace_in(p / "exports" / "manifest.json", b"ended early", b"ended late"),
        "manifest.json: exports/partial.jsonl: no run has a file of 'conversations that ended l",
    ),
    "a manifest without hashes": Damage(
        lambda p: replace_in(p / "exports" / "manifest.json", b"sha256", b"sha512"),
        "manifest.json: unreadable",
    ),
    "a manifest that miscounts": Damage(
        lambda p: edit_json(p / "exports" / "manifest.json", pending=2), "manifest.json: pending 2"
    ),
    "no training file": Damage(lambda p: (p.parent / "r.jsonl").unlink(), "r.jsonl: missing"),
    "a short training file": Damage(
        lambda p: edit(p.parent / "r.jsonl", lambda c: c.pop()), "r.jsonl: "
    ),
    "another text in the training file": Damage(
        lambda p: edit(p.parent / "r.jsonl", same_length_other_text), "r.jsonl:1: not what the"
    ),
    "an edited meaning": Damage(
        lambda p: edit_json(p / "run.json", digest="0" * 16),
        "run.json: `digest` does not match",
        repaired=False,
    ),
}


def without_turn(line: bytes) -> bytes:
    return without(line, turns=json.loads(line)["turns"][1:])


def workspace_of_first(path: Path) -> Path:
    first = lines(path / "records.jsonl")[0]
    return path / "workspaces" / task_key(first["id"], first["input_digest"]).hex()


def append(file: Path, content: bytes) -> None:
    with file.open("ab") as opened:
        opened.write(content)


def test_batches_that_conversations_will_take_are_not_damage(path: Path) -> None:
    keep_results(path, RESULT)
    note_batch(path, *ALL_STEPS)
    note_batch(path, "gathered", "sending", job="v")
    assert not run_check(path).found


def test_a_finished_run_is_whole(path: Path) -> None:
    problems = run_check(path)
    assert (problems.found, problems.records, problems.owed) == ([], 5, "")
    assert "5 records, no problems found" in problems.describe()


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_repaired_and_costs_only_what_it_hit(path: Path, name: str) -> None:
    damage = DAMAGES[name]
    damage.do(path)
    before = content_of(path)
    problems = run_check(path)
    assert damage.message in problems.describe()
    assert problems.left == problems.found
    assert content_of(path) == before, "without --repair nothing is written"
    repaired = run_check(path, repair=True)
    assert (repaired.left == []) is damage.repaired, repaired.describe()
    message = f"to run {plural(damage.again, 'task')}"
    assert (message in repaired.owed) is bool(damage.again)
    assert len(set(ids(path / "records.jsonl"))) == 5 - damage.again
    readable = [line for line in before["records.jsonl"].splitlines() if is_whole(line)]
    kept = b"".join(content_of(path).values())
    assert all(line in kept for line in readable), "nothing readable is thrown away"


def content_of(path: Path) -> dict[str, bytes]:
    files = [file for file in path.rglob("*") if file.is_file()]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def is_whole(line: bytes) -> bool:
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return True


@pytest.mark.parametrize("name", ["torn record", "a record twice", "a journal with garbage"])
def test_a_second_repair_finds_nothing_and_writes_nothing(path: Path, name: str) -> None:
    DAMAGES[name].do(path)
    run_check(path, repair=True)
    before = content_of(path)
    again = run_check(path, repair=True)
    assert (again.found, again.left, again.repaired) == ([], [], False)
    ours = {"lock"}  # it says who held it last
    assert {k: v for k, v in content_of(path).items() if k not in ours} == {
        k: v for k, v in before.items() if k not in ours
    }


def test_empty_directories_that_a_copy_left_out_are_not_damage(path: Path) -> None:
    """`git` and some copying tools keep files only."""
    for name in ("inflight", "workspaces"):
        (path / name).rmdir()
    assert not run_check(path).found
    exported = run(path.parent.parent, "export", "r")
    assert exported.returncode == 0, exported.stderr


def test_without_read_data_the_contents_of_exports_are_taken_on_trust(path: Path) -> None:
    edit(path.parent / "r.jsonl", same_length_other_text)
    assert not run_check(path, read_data=False).found
    assert len(run_check(path).found) == 2


def test_a_run_that_was_moved_aside_is_judged_by_the_files_that_it_took_along(path: Path) -> None:
    assert (
        run(path.parent.parent, "--fresh", **SCRIPTED, max_turns=3, max_samples=1).returncode == 0
    )
    (aside,) = path.parent.glob("r.2*")
    assert not run_check(aside).found
    edit(aside / "r.jsonl", same_length_other_text)
    assert {problem.file for problem in run_check(aside).found} == {aside / "r.jsonl"}
    assert not run_check(aside, repair=True).left
    assert not run_check(aside).found


def test_a_failed_record_that_a_later_attempt_replaced_is_not_a_duplicate(path: Path) -> None:
    first = lines(path / "records.jsonl")[0]
    failed = {**first, "status": "failed", "error": {"class": "x", "message": "y"}}
    edit(path / "records.jsonl", lambda c: c.insert(0, orjson.dumps(failed) + b"\n"))
    edit(path / "records.jsonl", change_record(1, attempt=2))
    run_check(path, repair=True)
    assert not run_check(path).found
    assert len(lines(path / "records.jsonl")) == 6


def test_two_failed_records_of_one_attempt_are_a_contradiction(path: Path) -> None:
    first = lines(path / "records.jsonl")[0]
    failed = {**first, "status": "failed", "error": {"class": "x", "message": "y"}}
    edit(path / "records.jsonl", lambda c: c.insert(0, orjson.dumps(failed) + b"\n"))
    found = [problem.describe() for problem in run_check(path).found]
    assert any("records.jsonl:2: a second record of" in one for one in found)


def test_a_lost_dataset_leaves_the_rest_to_be_checked(path: Path) -> None:
    dataset = json.loads((path / "run.json").read_text())["dataset"]
    edit_json(path / "run.json", dataset={**dataset, "path": str(path / "gone.jsonl")})
    edit(path / "records.jsonl", put(1, b"x\n"))
    message = run_check(path).describe()
    assert "its tasks are unknown" in message
    assert "records.jsonl:2: not a complete record" in message


@pytest.mark.slow
def test_the_exit_code_says_what_verify_found(path: Path) -> None:
    """0 whole, 6 not, 5 worked on, 2 no run; and what --json holds."""
    cwd = path.parent.parent
    assert run(cwd, "verify", "r").returncode == 0
    os.truncate(path / "records.jsonl", (path / "records.jsonl").stat().st_size - 2)
    done = run(cwd, "verify", "r", "--json")
    assert done.returncode == 6
    problem = json.loads(done.stdout)["problems"][0]
    assert (problem["file"], problem["line"]) == ("trajectories/r/records.jsonl", 5)
    with hold_lock(path):
        for flags in ([], ["--repair"]):
            refused = run(cwd, "verify", "r", *flags)
            assert refused.returncode == 5
            assert f"pid {os.getpid()} on host" in refused.stderr
    repaired = run(cwd, "verify", "r", "--repair", "--read_data")
    assert repaired.returncode == 0
    assert "to run 1 task:" in repaired.stdout
    assert run(cwd, "verify", "nothing").returncode == 2
    assert run(cwd, **SCRIPTED, max_turns=3).returncode == 0
    assert len(ids(path / "records.jsonl")) == 5


def test_a_number_that_no_index_can_hold_is_named(path: Path) -> None:
    model = lines(path / "records.jsonl")[-1]["model"]
    # The file is as long as before, so its index seems to be that of these records.
    edit(path / "records.jsonl", change_record(-1, attempt=-1, model=model[1:]))
    (found, *_) = [problem.describe() for problem in run_check(path, read_data=False).found]
    assert "records.jsonl:5: not a complete record" in found
