"""Runs that give nothing to train on: what shows it, what is said, and when they stop."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest

from batch_trajectories.config.stop_rules import parse_stop_rules
from batch_trajectories.engine.hopeless import EndingCounts, broken_rule, find_signs
from tests.helpers.answering import JSON, answering
from tests.helpers.running import lines, run, write_rows

SHOWING: dict[str, EndingCounts] = {
    "no_pass": EndingCounts(ended=30, judged=30),
    "failed": EndingCounts(ended=30, failed=27, reasons=Counter(timeout=20, bad_request=7)),
    "same_ending": EndingCounts(ended=30, reasons=Counter(max_turns=27, length=1)),
    "rejected": EndingCounts(ended=30, looked_at=30, rejected=Counter(no_reasoning=29, no_call=1)),
    "no_call": EndingCounts(ended=30, offers_tools=True),
}


@pytest.mark.parametrize("sign", SHOWING)
def test_each_sign_is_found_alone(sign: str) -> None:
    [seen] = find_signs(SHOWING[sign])
    assert seen.sign == sign
    assert str(seen.found) in seen.text or seen.text.startswith("none of 30")


@pytest.mark.parametrize(
    "outcomes",
    [
        EndingCounts(),
        EndingCounts(ended=29, judged=29, offers_tools=True, looked_at=29, rejected=Counter(a=29)),
        EndingCounts(ended=3000, judged=3000, passed=1),
        EndingCounts(ended=30, failed=26, reasons=Counter(timeout=26)),
        EndingCounts(ended=30, looked_at=30, rejected=Counter(no_reasoning=29)),
        EndingCounts(ended=30, offers_tools=True, tool_calls=1),
        EndingCounts(
            ended=50, failed=25, offers_tools=True
        ),  # failed attempts say nothing of calls
        EndingCounts(ended=30),
    ],
)
def test_a_run_with_hope_shows_none(outcomes: EndingCounts) -> None:
    assert find_signs(outcomes) == []


@pytest.mark.parametrize(
    ("rule", "stops", "goes_on"),
    [
        ("no_pass:5", EndingCounts(judged=5), EndingCounts(judged=4)),
        ("no_pass:5", EndingCounts(judged=5), EndingCounts(judged=50, passed=1)),
        ("no_call:5", EndingCounts(ended=5, offers_tools=True), EndingCounts(ended=5)),
        ("failed:50%", EndingCounts(ended=30, failed=15), EndingCounts(ended=30, failed=14)),
        ("failed:50%", EndingCounts(ended=30, failed=30), EndingCounts(ended=29, failed=29)),
        (
            "rejected:90%",
            EndingCounts(looked_at=30, rejected=Counter(a=27)),
            EndingCounts(looked_at=30, rejected=Counter(a=26)),
        ),
        (
            "same_ending:90%",
            EndingCounts(ended=30, reasons=Counter(length=27)),
            EndingCounts(ended=30, reasons=Counter(length=15, max_turns=15)),
        ),
    ],
)
def test_when_a_rule_stops_a_run(rule: str, stops: EndingCounts, goes_on: EndingCounts) -> None:
    rules = parse_stop_rules((rule,))
    seen = broken_rule(stops, rules)
    assert seen is not None
    assert rule.startswith(seen.sign)
    assert broken_rule(goes_on, rules) is None
    assert broken_rule(stops, parse_stop_rules(("none",))) is None


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        ("no_pass", "no_pass:N"),
        ("nopass:30", "'nopass' is unknown"),
        ("no_pass:50%", "needs a number of conversations"),
        ("no_pass:0", "needs a number"),
        ("failed:30", "needs a share"),
        ("failed:0%", "needs a share"),
        ("rejected:101%", "needs a share"),
        ("", "is no rule"),
    ],
)
def test_a_wrong_rule_is_refused_with_what_may_be_given(rule: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        parse_stop_rules((rule,))


def _answer(path: str, body: JSON) -> tuple[int, JSON]:
    message = {"role": "assistant", "content": "There are 168 primes below 1000."}
    usage = {"prompt_tokens": 10, "completion_tokens": 5}
    return 200, {"model": "m", "choices": [{"message": message, "finish_reason": "stop"}]} | {
        "usage": usage
    }


@pytest.mark.slow
def test_a_hopeless_run_warns_stops_and_resumes(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}?", "expected": "banana"} for number in range(120)]
    write_rows(tmp_path / "p.jsonl", *rows)
    run_dir = tmp_path / "trajectories" / "r"
    with answering(_answer) as (url, _):
        options: dict[str, Any] = {
            "dataset_file": "p.jsonl",
            "run_name": "r",
            "model": "m",
            "base_url": url,
            "key_env": "none",
            "enabled_toolsets": "none",
            "num_workers": 1,
            "batch_size": 4,
        }
        stopped = run(tmp_path, "--check_expected", **options, stop_if="no_pass:30")
        assert stopped.returncode == 7, stopped.stderr
        assert "--stop_if=no_pass" in stopped.stderr
        assert "warning: none of 30 judged" in stopped.stderr
        assert "WARNING: none of" in stopped.stdout
        assert 30 <= len(lines(run_dir / "records.jsonl")) <= 50
        summary = orjson.loads((run_dir / "summary.json").read_bytes())
        assert [sign["sign"] for sign in summary["signs"]] == ["no_pass"]
        assert summary["signs"][0]["found"] == summary["done"]
        shown = run(tmp_path, "status", "r")
        assert "WARNING: none of" in shown.stdout

        # Another start counts from nothing: it can be right again.
        again = run(tmp_path, "--check_expected", **options, stop_if="no_pass:30")
        assert again.returncode == 7
        done = len(lines(run_dir / "records.jsonl"))
        assert 60 <= done <= 100

        # Who asks for silence gets it.
        ended = run(tmp_path, "--check_expected", **options, stop_if="none")
        assert ended.returncode == 0
        assert "warning" not in ended.stderr.lower()
        assert "WARNING" not in ended.stdout
        assert len(lines(run_dir / "records.jsonl")) == 120


@pytest.mark.slow
def test_rejected_rows_and_missing_calls_are_seen_while_the_run_works(tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", *[{"prompt": f"{number}?"} for number in range(80)])
    with answering(_answer) as (url, _):
        stopped = run(
            tmp_path,
            "--require_reasoning",
            dataset_file="p.jsonl",
            run_name="r",
            model="m",
            base_url=url,
            key_env="none",
            enabled_toolsets="file",
            sandbox="local",
            num_workers=1,
            batch_size=4,
            stop_if="rejected:90%",
        )
    assert stopped.returncode == 7, stopped.stderr
    assert "give no training row, all as no_reasoning" in stopped.stderr
    assert "none of 30 conversations called a tool" in stopped.stderr
