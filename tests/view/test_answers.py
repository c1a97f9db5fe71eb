"""Rows, charts, conversations and labels of a real run, and requests that are wrong."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.api.stored_run import StoredRun
from batch_trajectories.export.conversation.own_work import AuthoredWork
from batch_trajectories.records.reader import stored_records
from batch_trajectories.records.scores import Labels
from batch_trajectories.report.facts import make_table_row
from batch_trajectories.view import api
from tests.helpers.running import wait_until
from tests.view.conftest import ROWS
from tests.view.serving import Viewer

RUN = "/runs/r"


def facts_of(runs: Path) -> list[dict[str, Any]]:
    return [make_table_row(record, AuthoredWork(record)) for record in stored_records(runs / "r")]


def test_the_list_has_the_run(viewer: Viewer) -> None:
    (found,) = viewer.get("/runs")["runs"]
    assert (found["key"], found["state"], found["done"]) == ("r", "not running", 2 * len(ROWS))
    assert found["can_label"]
    assert not found["can_steer"]


def test_rows_are_those_of_the_report(viewer: Viewer, runs: Path) -> None:
    expected = facts_of(runs)
    answer = viewer.get(f"{RUN}/rows", limit=500)
    assert answer["matching"] == answer["total"] == len(expected)
    for row, facts in zip(answer["rows"], expected, strict=True):
        tools = {name: list(counts) for name, counts in facts["tools"].items()}
        wanted = facts | {"tools": tools, "failures": dict(facts["failures"])}
        assert {key: row[key] for key in wanted} == wanted


def test_pages_join_to_all_rows(viewer: Viewer) -> None:
    whole = [row["id"] for row in viewer.get(f"{RUN}/rows", limit=500)["rows"]]
    pages = [
        row["id"]
        for offset in range(0, len(whole) + 5, 5)
        for row in viewer.get(f"{RUN}/rows", offset=offset, limit=5)["rows"]
    ]
    assert pages == whole
    assert [r["id"] for r in viewer.get(f"{RUN}/rows", down=1, limit=500)["rows"]] == whole[::-1]


@pytest.mark.parametrize(
    ("query", "keeps"),
    [
        ({"status": "max_turns"}, lambda row: row["status"] == "max_turns"),
        ({"status": ["max_turns", "completed"]}, lambda row: True),
        ({"tool": "read_file"}, lambda row: "read_file" in row["tools"]),
        ({"flag": "failed calls"}, lambda row: row["failed_calls"] > 0),
        ({"flag": "turns without reasoning"}, lambda row: row["reasoned"] < row["turns"]),
        ({"passed": "none", "model": "scripted"}, lambda row: True),
        ({"q": "QUOKKA it"}, lambda row: row["id"].startswith("missing")),
        ({"q": "etc/passwd"}, lambda row: "etc/passwd" in row["prompt"]),
        ({"where": "turns:ge:3"}, lambda row: row["turns"] >= 3),
        ({"where": ["turns:lt:3", "id:has:MISS"]}, lambda row: row["id"].startswith("missing")),
        ({"where": "reward:null:"}, lambda row: True),
        ({"reward_min": "0"}, lambda row: False),
        ({"ids": ["missing", "endless#s1"]}, lambda row: row["id"] in ("missing", "endless#s1")),
        ({"label": "keep"}, lambda row: False),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_filters_leave_what_they_say(
    viewer: Viewer, runs: Path, query: dict[str, Any], keeps: Any
) -> None:
    expected = [row["id"] for row in facts_of(runs) if keeps(row)]
    answer = viewer.get(f"{RUN}/rows", limit=500, **query)
    assert [row["id"] for row in answer["rows"]] == expected
    assert viewer.get(f"{RUN}/charts", **query)["count"] == len(expected)


@pytest.mark.parametrize("column", ["id", "turns", "cost_usd", "passed", "finished_at", "error"])
def test_rows_are_sorted_with_unknown_values_last(viewer: Viewer, runs: Path, column: str) -> None:
    for down in (0, 1):
        rows = viewer.get(f"{RUN}/rows", order=column, down=down, limit=500)["rows"]
        values = [row[column] for row in rows]
        known = [value for value in values if value is not None]
        assert values == known + [None] * (len(values) - len(known))
        assert known == sorted(known, reverse=bool(down))


def test_charts_are_those_of_the_rows(viewer: Viewer, runs: Path) -> None:
    rows = facts_of(runs)
    charts = viewer.get(f"{RUN}/charts")
    assert dict(charts["statuses"]) == Counter(row["status"] for row in rows)
    calls: Counter[str] = Counter()
    for row in rows:
        calls.update({name: counts[0] for name, counts in row["tools"].items()})
    assert {name: n for name, n, _ in charts["tools"]} == calls
    assert charts["sums"]["turns"] == sum(row["turns"] for row in rows)
    of_turns = charts["histograms"]["turns"]
    assert sum(of_turns["heights"]) == len(rows)
    assert len(of_turns["edges"]) == len(of_turns["heights"]) + 1
    assert sum(charts["over_time"]["heights"]) == len(rows)
    reasoned = charts["reasoning"]
    assert sum(reasoned.values()) == sum(row["turns"] > 0 for row in rows)


def test_a_record_is_as_stored_whatever_its_id(viewer: Viewer, runs: Path) -> None:
    stored = StoredRun(runs / "r")
    for row in ROWS:
        found = viewer.get(f"{RUN}/record", id=row["id"])
        assert found["record"] == stored.record(row["id"])
        assert found["row"]["id"] == row["id"]
        assert found["form"]["file"] == found["row"]["exported"]
        (main,) = found["requests"]
        assert [turn["turn"] for turn in main["turns"]] == [
            turn["turn"] for turn in found["record"]["turns"]
        ]
    request = viewer.get(f"{RUN}/request", id="missing", turn=2)
    assert [message["role"] for message in request["messages"]] == ["user", "assistant", "tool"]
    assert request["reply"]["content"] == "It is a quokka."


def test_what_stands_around_a_record_follows_filter_and_order(viewer: Viewer) -> None:
    query = {"tool": "write_file", "order": "id", "down": 1}
    ids = [row["id"] for row in viewer.get(f"{RUN}/rows", limit=500, **query)["rows"]]
    around = viewer.get(f"{RUN}/record", id=ids[3], who="ann", **query)["around"]
    assert (around["place"], around["before"], around["after"]) == (3, ids[2], ids[4])
    assert around["undecided"] == ids[4]
    assert viewer.get(f"{RUN}/record", id="missing", **query)["around"]["place"] is None


def test_siblings_part_where_they_differ(viewer: Viewer) -> None:
    siblings = viewer.get(f"{RUN}/siblings", id="missing")["siblings"]
    assert [(one["id"], one["same_turns"]) for one in siblings] == [
        ("missing", 2),
        ("missing#s1", 2),
    ]


def test_words_are_found_in_whole_conversations(viewer: Viewer) -> None:
    def found(words: str) -> list[str]:
        answer = viewer.get(f"{RUN}/rows", text=words, limit=500)
        if not answer["text"]["is_complete"]:
            return ["..."]
        return sorted(row["id"] for row in answer["rows"])  # the two ran at once

    wait_until(lambda: found("quokka") != ["..."])
    assert found("quokka") == ["missing", "missing#s1"]
    assert found("Quok* it") == ["missing", "missing#s1"]
    assert found('"a quokka"') == ["missing", "missing#s1"]
    assert found('"quokka a"') == []
    assert found("none.txt") == ["missing", "missing#s1"]  # arguments of a call
    for row in ROWS[:15]:
        viewer.ask(f"/api{RUN}/rows", text=row["prompt"])  # whatever it is: no error of SQLite
    assert viewer.ask(f"/api{RUN}/rows", text="'\" --").status == 400


@pytest.mark.parametrize(
    "query",
    [
        {"where": "nothing:eq:1"},
        {"where": "turns"},
        {"where": "turns:like:1"},
        {"where": "turns:gt:many"},
        {"where": "tools:has:x"},
        {"label": "perhaps"},
        {"passed": "maybe"},
        {"reward_min": "nan"},
        {"order": "flags"},
        {"limit": "-1"},
        {"offset": "ten"},
        {"offset": "9" * 30},
    ],
    ids=str,
)
def test_wrong_parameters_are_named(viewer: Viewer, query: dict[str, Any]) -> None:
    answer = viewer.ask(f"/api{RUN}/rows", **query)
    assert answer.status == 400
    assert next(iter(query)) in answer.body["error"]


@pytest.mark.parametrize("length", [9_000, 70_000, 2_000_000])
def test_a_long_address_is_answered_or_refused_in_json(viewer: Viewer, length: int) -> None:
    """Browsers send up to 2 MB."""
    answer = viewer.ask("/api/runs/r/rows", q="x" * length)
    assert answer.status == (200 if length < 64 << 10 else 414)
    if answer.status == 414:
        assert answer.body == {"error": "the address is longer than 64 KiB"}


def test_labels_are_lines_and_can_be_undone(viewer: Viewer, runs: Path) -> None:
    path = f"{RUN}/labels"
    shown = viewer.get(f"{RUN}/record", id="missing")["row"]
    said = {"id": "missing", "record": shown["record"], "verdict": "keep", "no_loss": [1]}
    first = viewer.post(path, said)
    assert first["before"] == {"verdict": None, "no_loss": None}
    viewer.post(path, {"id": "missing", "verdict": "reject", "who": "ben"})
    viewer.post(path, {"id": "missing", "over": ["missing#s1"], "note": "<b>"})
    row = viewer.get(f"{RUN}/record", id="missing")["row"]
    assert row["verdict"] == "disputed"
    ann = next(label for label in row["labels"] if label["who"] == "ann")
    assert (ann["verdict"], ann["no_loss"], ann["note"]) == ("keep", [1], "<b>")
    assert list(ann["over"]) == ["missing#s1"]
    assert viewer.get(f"{RUN}/rows", label="disputed")["matching"] == 1
    assert viewer.get(f"{RUN}/rows", label="none")["matching"] == 2 * len(ROWS) - 1
    assert viewer.get(f"{RUN}/rows", undecided_by="ben")["matching"] == 2 * len(ROWS) - 1
    labels = viewer.get(path)["labels"]
    assert labels["reviewers"] == {"ann": 1, "ben": 1}
    assert labels["agreement"][0]["same"] == 0
    viewer.post(path, {"id": "missing", **first["before"]})
    viewer.post(path, {"id": "missing", "over": None, "note": None})
    viewer.post(path, {"id": "missing", "verdict": None, "who": "ben"})
    assert viewer.get(f"{RUN}/rows", label="any")["matching"] == 0
    assert len((runs / "r" / "labels.jsonl").read_bytes().splitlines()) == 6


def test_ids_that_a_label_repeats_are_read_once(
    viewer: Viewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request of a megabyte must not read the disk 60,000 times."""
    reads = 0

    def read(*given: Any) -> Any:
        nonlocal reads
        reads += 1
        return original(*given)

    original = vars(api)["read_found"]
    monkeypatch.setattr(api, "read_found", read)
    path = f"{RUN}/labels"
    many = {"over": ["missing#s1"] * 60_000, "no_loss": [2, 1] * 10_000}
    (label,) = viewer.post(path, {"id": "missing", **many})["labels"]
    assert (list(label["over"]), label["no_loss"]) == (["missing#s1"], [1, 2])
    assert reads == 2
    different = [f"missing#s{n}" for n in range(2000)]
    answer = viewer.ask(f"/api{path}", {"id": "missing", "over": different})
    assert answer.status == 400
    assert answer.body == {"error": "over: 2,000 different ids; up to 1,000 are possible"}
    viewer.post(path, {"id": "missing", "over": None, "no_loss": None})


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"id": "missing"}, 400),
        ({"id": "missing", "verdict": "perhaps"}, 400),
        ({"id": "missing", "no_loss": [0]}, 400),
        ({"id": "missing", "no_loss": [99]}, 400),
        ({"id": "missing", "note": "x" * 20_000}, 400),
        ({"id": "missing", "over": ["endless"]}, 400),
        ({"id": "missing", "over": ["missing"]}, 400),
        ({"id": "missing", "verdict": "keep", "who": "a\nb"}, 400),
        ({"id": "nobody", "verdict": "keep"}, 404),
        ({"id": "missing", "record": "0" * 32, "verdict": "keep"}, 409),
        ([], 400),
    ],
    ids=str,
)
def test_a_decision_that_is_wrong_is_not_written(
    viewer: Viewer, runs: Path, body: Any, status: int
) -> None:
    file = runs / "r" / "labels.jsonl"
    before = file.read_bytes() if file.exists() else b""
    assert viewer.ask(f"/api{RUN}/labels", body).status == status
    assert (file.read_bytes() if file.exists() else b"") == before


def test_two_reviewers_at_once_lose_nothing(viewer: Viewer, runs: Path) -> None:
    ids = [row["id"] for row in viewer.get(f"{RUN}/rows", limit=10)["rows"]]

    def decide(who: str, verdict: str) -> None:
        for id in ids:
            viewer.post(f"{RUN}/labels", {"id": id, "verdict": verdict, "who": who})

    both = [threading.Thread(target=decide, args=pair) for pair in (("cy", "keep"), ("di", "fix"))]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    labels = Labels(runs / "r")
    verdicts = Counter(
        (label.who, label.verdict) for _, of_record in labels.by_record() for label in of_record
    )
    assert verdicts["cy", "keep"] == verdicts["di", "fix"] == len(ids)


def test_facts_of_the_whole_run_come_and_runs_are_compared(viewer: Viewer) -> None:
    wait_until(lambda: viewer.get(RUN)["facts"] is not None)
    facts = viewer.get(RUN)["facts"]
    assert facts["as_of"]["records"] == 2 * len(ROWS)
    assert facts["funnel"]["steps"][0]["count"] == len(ROWS)
    assert viewer.ask("/api/compare", run=["r"]).status == 400
    assert viewer.ask("/api/compare", run=["r", "nothing"]).status == 404


def test_steering_what_does_not_work_is_refused(viewer: Viewer) -> None:
    refused = viewer.ask(f"/api{RUN}/steer", {"do": "pause"})
    assert refused.status == 409
    assert "no process works on this run" in refused.body["error"]
    assert viewer.ask(f"/api{RUN}/steer", {"do": "explode"}).status == 400
    assert viewer.ask(f"/api{RUN}/steer", {"do": "stop"}).status == 400
