"""The report page as a file: all that is in it, and nothing of it can become markup."""

from __future__ import annotations

import json
import os
import re
import tracemalloc
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.api.stored_run import StoredRun
from batch_trajectories.basics.errors import RunDirError
from batch_trajectories.export.conversation.style import Style
from batch_trajectories.report.facts import make_table_row, seconds_at_work
from batch_trajectories.report.page.writer import embed_json, training_form, write_report
from tests.helpers.running import ROOT, SCRIPTED, lines, run, write_rows
from tests.helpers.stored import to_record

HOSTILE = (
    "</script><script>window.pwned = 1</script><!--<script> <img src=x onerror='window.pwned=2'> "
    "\x1b[31mred\x1b]0;title\x07 \u202eback \u2028 &lt; `${window.pwned = 3}` </pre></ScRiPt\n>"
)
"""Text that would act in a browser or a terminal if it were anything but text."""

HOSTILE_ID = "x/<b>#?%</b> \x1b[1m"

ROWS: list[dict[str, Any]] = [
    {
        "id": HOSTILE_ID,
        "prompt": f"{HOSTILE} prompt",
        "__proto__": {"polluted": HOSTILE},
        "script": [
            {
                "reasoning": f"{HOSTILE} thought",
                "content": f"{HOSTILE} said",
                "tool_calls": [
                    {"name": "write_file", "arguments": {"path": "f.txt", "content": HOSTILE}},
                    {"name": HOSTILE[:20], "arguments": {"__proto__": HOSTILE}},
                ],
            },
            {"tool_calls": [{"name": "read_file", "arguments": {"path": "f.txt"}}]},
            {"content": f"<think>{HOSTILE} inline</think>{HOSTILE} answer"},
        ],
    },
    {
        "id": "plain",
        "prompt": "Look into the room.",
        "script": [
            {"tool_calls": [{"name": "read_file", "arguments": {"path": "missing.txt"}}]},
            {"reasoning": "It is empty.", "content": "Nothing there."},
        ],
    },
    {
        "id": "endless",
        "prompt": f"Go on, {'w' * 400}.",
        "script": [{"tool_calls": [{"name": "list_files"}]}] * 4,
    },
]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run whose texts are hostile."""
    cwd = tmp_path_factory.mktemp("report")
    write_rows(cwd / "p.jsonl", *ROWS)
    done = run(cwd, **SCRIPTED, max_turns=3, repeat_limit=9)
    assert done.returncode == 0, done.stderr
    return cwd / "trajectories" / "r"


class Scripts(HTMLParser):
    """The script elements of a page, as a parser of HTML sees them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[dict[str, str | None], str]] = []
        self.tags: set[str] = set()
        self._is_inside = False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._is_inside = tag == "script"
        if self._is_inside:
            self.found.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self._is_inside = False

    def handle_data(self, data: str) -> None:
        if self._is_inside:
            attributes, before = self.found[-1]
            self.found[-1] = (attributes, before + data)

    def json(self, name: str) -> Any:
        return next(json.loads(text) for attrs, text in self.found if attrs.get("id") == name)


def records_in(page: Scripts) -> list[dict[str, Any]]:
    meta = page.json("meta-data")
    return [join_tools(record, meta) for record in page.json("records-data")]


def join_tools(record: dict[str, Any], meta: dict[str, Any]) -> dict[str, Any]:
    own = {key: value for key, value in record.items() if key != "training_form"}
    return own | {"tools": [meta["tools"][n] for n in record["tools"]]}


def test_the_page_holds_every_record_and_no_markup_of_theirs(run_dir: Path, tmp_path: Path) -> None:
    """A parser of HTML finds our four scripts, and in them the records, unchanged."""
    written = write_report(StoredRun(run_dir), tmp_path / "page.html")
    page = Scripts(written.path.read_text())
    assert [attrs.get("id") for attrs, _ in page.found] == [
        "meta-data",
        "rows-data",
        "records-data",
        None,
    ]
    assert not page.tags & {"b", "img", "link", "iframe"}
    assert records_in(page) == lines(run_dir / "records.jsonl")
    assert written.files is None
    assert written.rows == 3


def test_the_training_form_is_the_row_of_the_export(run_dir: Path, tmp_path: Path) -> None:
    """Word for word, wherever the row went; a reject has its reason."""
    page = Scripts(write_report(StoredRun(run_dir), tmp_path / "page.html").path.read_text())
    systems = page.json("meta-data")["systems"]
    forms = {record["id"]: record["training_form"] for record in page.json("records-data")}
    places = {
        "training": run_dir.with_suffix(".jsonl"),
        "partial": run_dir / "exports" / "partial.jsonl",
    }
    rows = {row["id"]: (name, row) for name, path in places.items() for row in lines(path)}
    for record_id, (name, row) in rows.items():
        form = forms.pop(record_id)
        assert form["file"] == name
        told = [{"from": speaker, "value": text} for speaker, text, _ in form["turns"]]
        assert [{"from": "system", "value": systems[form["system"]]}, *told] == row["conversations"]
        assert {(speaker, loss) for speaker, _, loss in form["turns"]} == {
            ("human", False),
            ("gpt", True),
            ("tool", False),
        }
    (reject,) = lines(run_dir / "exports" / "rejects.jsonl")
    form = forms.pop(reject["id"])
    assert (form["file"], form["reason"]) == ("rejects", reject["reason"])
    assert forms == {}
    assert len(systems) == 1


def test_turns_that_the_prompt_brought_along_are_counted(run_dir: Path) -> None:
    (record,) = (line for line in lines(run_dir / "records.jsonl") if line["id"] == "plain")
    brought = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    longer = record | {"messages": [*brought, *record["messages"]]}
    form = training_form(to_record(longer), key_of=len, style=Style())
    assert form["given"] == 1
    assert [loss for _, _, loss in form["turns"]] == [False, True, False, True, False, True]
    assert training_form(to_record(record), key_of=len, style=Style())["given"] == 0


def test_the_command_writes_report_html_into_the_run(run_dir: Path) -> None:
    done = run(run_dir.parent.parent, "report", "r")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trajectories/r/report.html: 3 conversations\n"
    assert (run_dir / "report.html").stat().st_mode & 0o777 == 0o600


def test_no_script_runs_but_ours(run_dir: Path, tmp_path: Path) -> None:
    """The policy forbids everything, names our script and style by hash, and allows no address."""
    page = write_report(StoredRun(run_dir), tmp_path / "page.html").path.read_text()
    match = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert match
    policy = dict(part.strip().partition(" ")[::2] for part in match[1].split(";"))
    assert policy["default-src"] == "'none'"
    assert re.fullmatch(r"'sha256-[\w+/=]+'", policy["script-src"])
    assert re.fullmatch(r"'sha256-[\w+/=]+'", policy["style-src"])
    assert policy["require-trusted-types-for"] == "'script'"
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", Scripts(page).found[3][1])


def test_a_large_report_keeps_its_data_in_files_beside_it(run_dir: Path, tmp_path: Path) -> None:
    """Beyond the bound every record is in a chunk, where its row says."""
    written = write_report(StoredRun(run_dir), tmp_path / "page.html", inline_bytes=0)
    assert written.files == tmp_path / "page_files"
    page = Scripts(written.path.read_text())
    meta = page.json("meta-data")
    assert page.json("records-data") == page.json("rows-data") == []
    pieces = {
        kind: calls_in(written.files / name, meta["report_id"], kind)
        for name, kind in (("rows.js", "rows"), ("chunk-0.js", "chunk"))
    }
    rows = [dict(zip(meta["columns"], row, strict=True)) for row in pieces["rows"]]
    records = [join_tools(pieces["chunk"][row["place"]], meta) for row in rows]
    assert [row["chunk"] for row in rows] == [0, 0, 0]
    assert records == lines(run_dir / "records.jsonl")
    assert [row["id"] for row in rows] == [record["id"] for record in records]
    assert "\n" not in (written.files / "chunk-0.js").read_text().rstrip("\n")
    assert {path.stat().st_mode & 0o777 for path in written.files.iterdir()} == {0o600}


def test_the_page_reads_what_rows_hold_and_all_of_it(run_dir: Path, tmp_path: Path) -> None:
    """A column of the table is a key in `facts.py` and a column in `table.js`: not one alone."""
    written = write_report(StoredRun(run_dir), tmp_path / "page.html")
    held = set(Scripts(written.path.read_text()).json("meta-data")["columns"])
    folder = ROOT / "batch_trajectories" / "report" / "page"
    of_runs = [path for path in folder.glob("*.js") if path.stem != "audit"]
    scripts = "\n".join(path.read_text() for path in of_runs)
    # What a script adds, rows of HTML, and what only rows of audits hold.
    of_pages = {"text", "group", "dataset", "classList", "step"}
    read = {*re.findall(r"\brow\.(\w+)", scripts), *re.findall(r"\bkey: \"(\w+)\"", scripts)}
    assert read - of_pages <= held
    named = {*read, *re.findall(r"[.\"](\w+)", scripts)}
    assert held <= named, "no script shows or uses these"


def calls_in(path: Path, report_id: str, kind: str) -> list[Any]:
    items = []
    for number, line in enumerate(path.read_text().split("\n")[:-1]):
        match = re.fullmatch(r'reportData\("(\w+)", "(\w+)", (\d+), String\.raw`([^`]*)`\);', line)
        assert match
        assert match.groups()[:3] == (report_id, kind, str(number))
        items += json.loads(match[4])
    return items


def test_files_of_an_earlier_report_go_and_those_of_others_stay(
    run_dir: Path, tmp_path: Path
) -> None:
    files = tmp_path / "page_files"
    write_report(StoredRun(run_dir), tmp_path / "page.html", inline_bytes=0)
    write_report(StoredRun(run_dir), tmp_path / "page.html")
    assert not files.exists()
    write_report(StoredRun(run_dir), tmp_path / "page.html", inline_bytes=0)
    (files / "notes.txt").write_text("mine")
    write_report(StoredRun(run_dir), tmp_path / "page.html", inline_bytes=0)
    assert sorted(path.name for path in files.iterdir()) == ["chunk-0.js", "notes.txt", "rows.js"]
    write_report(StoredRun(run_dir), tmp_path / "page.html")
    assert [path.name for path in files.iterdir()] == ["notes.txt"]


@pytest.mark.slow
def test_the_writer_holds_one_piece_at_a_time(run_dir: Path, tmp_path: Path) -> None:
    """Twenty times more data takes less than twice the memory."""
    (record,) = (line for line in lines(run_dir / "records.jsonl") if line["id"] == "plain")
    record["messages"][0]["content"] = "x" * 40_000
    peaks = []
    for count in (50, 1000):
        copy = tmp_path / str(count)
        copy.mkdir()
        (copy / "run.json").write_bytes((run_dir / "run.json").read_bytes())
        copies = (json.dumps(record | {"id": f"p{n}"}) for n in range(count))
        (copy / "records.jsonl").write_text("".join(line + "\n" for line in copies))
        tracemalloc.start()
        assert write_report(StoredRun(copy), inline_bytes=0).rows == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0]


def test_a_run_without_records_has_a_report(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes((run_dir / "run.json").read_bytes())
    assert write_report(StoredRun(tmp_path)).rows == 0
    assert (tmp_path / "report.html").exists()


def test_a_place_that_cannot_be_written_is_named(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"missing/page\.html: cannot write the report there"):
        write_report(StoredRun(run_dir), tmp_path / "missing" / "page.html")


def test_a_row_counts_what_the_model_did(run_dir: Path) -> None:
    by_id = {
        record["id"]: make_table_row(to_record(record))
        for record in lines(run_dir / "records.jsonl")
    }
    row = by_id["plain"]
    assert (row["status"], row["turns"], row["reasoned"]) == ("completed", 2, 1)
    assert (row["calls"], row["failed_calls"]) == (1, 1)
    assert row["tools"] == {"read_file": (1, 1)}
    assert sum(row["failures"].values()) == 1
    assert row["prompt"] == "Look into the room."
    assert row["answer"] == "Nothing there."
    assert by_id["endless"]["status"] == "max_turns"
    hostile = by_id[HOSTILE_ID]
    assert hostile["tools"]["(not offered)"] == (1, 1)
    assert hostile["failures"] == {"unknown_tool": 1}
    assert hostile["reasoned"] == 2


def test_time_at_work_is_that_of_the_limit_of_conversations() -> None:
    """Pauses and waits do not count; calls that overlap, also inner ones, count once."""
    tool = {"name": "t", "is_error": False}
    subagent = {
        "key": "1.0",
        "name": "sub",
        "turns": [{"started_at": 11.0, "duration_s": 1.0}],
    }
    record = {
        "turns": [
            {"started_at": 5.0, "duration_s": 3.0, "waited_s": 2.0},
            {"started_at": 800.0, "duration_s": 4.0},
        ],
        "tool_calls": [
            {**tool, "turn": 1, "call": 0, "started_at": 10.0, "duration_s": 2.0},
            {**tool, "turn": 1, "call": 1, "started_at": 10.5, "duration_s": 2.0},
            {**tool, "turn": 2, "call": 0, "started_at": 900.0, "duration_s": 1.0},
        ],
        "discarded": [
            {
                "started_at": 20.0,
                "duration_s": 0.25,
                "discarded": "cut",
                "message": {"role": "assistant", "content": ""},
            }
        ],
        "cut_calls": [{"turn": 3, "started_at": 950.0, "duration_s": 9.0, "waited_s": 8.0}],
        "inner": [subagent],
    }
    expected = (3.0 - 2.0) + 4.0 + 2.5 + 1.0 + 0.25 + 1.0
    assert seconds_at_work(to_record(record)) == pytest.approx(expected)


def test_embedded_json_is_the_same_json() -> None:
    text = json.dumps({HOSTILE: [HOSTILE, "<", "\\u003c", "\\<"]}, ensure_ascii=False)
    assert b"<" not in embed_json(text.encode())
    assert json.loads(embed_json(text.encode())) == json.loads(text)


def state_of(path: Path) -> tuple[int, ...]:
    """Which file a path names, and when it was written; not when it was last read."""
    stat = path.stat()
    return stat.st_ino, stat.st_mode, stat.st_size, stat.st_mtime_ns


def test_a_report_replaces_nothing_but_a_report(run_dir: Path, tmp_path: Path) -> None:
    """A slip in --output must not cost the records or the training file."""
    os.mkfifo(tmp_path / "pipe")
    for kept in (run_dir / "records.jsonl", run_dir.with_suffix(".jsonl"), tmp_path / "pipe"):
        before = state_of(kept)
        with pytest.raises(RunDirError, match="exists and is not a report"):
            write_report(StoredRun(run_dir), kept)
        assert state_of(kept) == before
    page = tmp_path / "page.html"
    page.touch()
    for _ in range(2):
        assert write_report(StoredRun(run_dir), page).path.read_text().startswith("<!doctype html>")


def test_a_dataset_has_the_name_that_the_user_gave(tmp_path: Path) -> None:
    """Not that of its copy as JSONL, which is a digest."""
    (tmp_path / "questions.csv").write_text("id,prompt\na,Hi\n")
    (tmp_path / "script.yaml").write_text("- content: Done.\n")
    given = {**SCRIPTED, "dataset_file": "questions.csv", "script_file": "script.yaml"}
    done = run(tmp_path, **given)
    assert done.returncode == 0, done.stderr
    path = write_report(StoredRun(tmp_path / "trajectories" / "r")).path
    assert Scripts(path.read_text()).json("meta-data")["dataset"] == "questions.csv"
