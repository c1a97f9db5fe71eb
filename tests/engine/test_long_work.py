"""Long work says how far it is, and short work says nothing."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import ClassVar

import pytest

from batch_trajectories.api.stored_run import StoredRun
from batch_trajectories.basics import console
from batch_trajectories.basics.console import PLAIN_EVERY_S, LongWork, hide_progress, track_progress
from tests.helpers.exporting import call_record, make_run
from tests.helpers.running import SCRIPTED, run, write_rows


class Clock:
    """Time that passes when it is told to."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(console, "time", clock)
    return clock


def work_for(clock: Clock, seconds: float, *, total: int | None = None) -> str:
    """What ten steps that take so long in all say."""
    with redirect_stderr(io.StringIO()) as said:
        for _ in track_progress(range(10), "verify", total=total):
            clock.now += seconds / 10
    return said.getvalue()


def test_short_work_says_nothing(clock: Clock) -> None:
    assert work_for(clock, 1.9, total=10) == ""


def test_a_log_gets_a_line_after_two_seconds_and_then_now_and_then(clock: Clock) -> None:
    lines = work_for(clock, 30.0, total=10).splitlines()
    assert lines[0] == "verify: 1 of 10 records in 3 s, about 27 s left"
    assert lines[1:] == [
        "verify: 5 of 10 records in 15 s, about 15 s left",
        "verify: 9 of 10 records in 27 s, about 3 s left",
    ]
    assert PLAIN_EVERY_S >= 10
    assert work_for(clock, 30.0).startswith("verify: 1 records in 3 s\n")


def test_bytes_are_told_in_millions(clock: Clock) -> None:
    with (
        redirect_stderr(io.StringIO()) as said,
        LongWork("read", total=5_000_000, unit="B") as work,
    ):
        clock.now += 4
        work.reach(1_000_000)
    assert said.getvalue() == "read: 1 of 5 MB in 4 s, about 16 s left\n"


def test_a_terminal_gets_a_line_that_goes_away(clock: Clock) -> None:
    with redirect_stderr(Terminal()) as said:
        for _ in track_progress(range(10), "verify", total=10):
            clock.now += 1
    assert "verify:  20%|" in said.getvalue()
    assert said.getvalue().endswith("\r")


def test_only_the_outer_of_two_works_is_shown(clock: Clock) -> None:
    with redirect_stderr(io.StringIO()) as said, LongWork("outer") as outer:
        for _ in track_progress(range(3), "inner"):
            clock.now += 3
        outer.advance(3)
    assert said.getvalue() == "outer: 3 records in 9 s\n"
    with redirect_stderr(io.StringIO()) as said, hide_progress():
        work_for(clock, 30.0)
        assert said.getvalue() == ""


def test_work_that_is_left_in_the_middle_does_not_hide_the_next(clock: Clock) -> None:
    for _ in track_progress(range(3), "left"):
        break
    with pytest.raises(ZeroDivisionError):
        print([1 // n for n in track_progress(range(3), "failed")])
    assert work_for(clock, 5.0).startswith("verify: ")


def test_a_notebook_is_known_by_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shell:
        config: ClassVar[dict[str, object]] = {"IPKernelApp": {}}

    class IPython:
        get_ipython = staticmethod(Shell)

    assert not console.is_notebook()
    monkeypatch.setitem(sys.modules, "IPython", IPython)
    assert console.is_interactive()


@pytest.fixture
def all_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_SILENT_S", 0.0)
    monkeypatch.setattr(console, "PLAIN_EVERY_S", 0.0)


@pytest.mark.usefixtures("all_is_long")
def test_statistics_are_watched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_run(tmp_path, call_record(), call_record())
    StoredRun(source.run_dir).statistics()
    assert "statistics: 2 of 2 records in 0 s" in capsys.readouterr().err


@pytest.mark.slow
def test_every_long_command_is_watched(tmp_path: Path) -> None:
    """With a limit of no seconds; each command says what it does."""
    write_rows(
        tmp_path / "p.jsonl",
        *({"id": f"p{n}", "prompt": "x", "script": [{"content": "y"}]} for n in range(3)),
    )
    (tmp_path / "graders.py").write_text("def one(conversation, workspace, row):\n    return 1\n")
    (tmp_path / "sitecustomize.py").write_text(
        "import batch_trajectories.basics.console as it\nit._SILENT_S = it.PLAIN_EVERY_S = 0.0\n"
    )
    env = {"PYTHONPATH": str(tmp_path)}
    said = run(tmp_path, **SCRIPTED, env=env).stderr
    assert "reading p.jsonl: " in said
    assert "export: 3 of 3 records in 0 s" in said
    for args, label in (
        (("export", "r"), "export: 3 of 3 records"),
        (("export", "r", "--format=openai"), "export: 3 of 3 records"),
        (("export", "r", "--check"), "reading openai/train.jsonl: "),
        (("report", "r"), "report: 3 of 3 records"),
        (("verify", "r"), "reading records.jsonl: "),
        (("score", "r", "--reward=graders:one"), "score: 3 of 3 records"),
        (("compare", "r", "r"), "reading r: 3 records"),
        (("merge", "r", "--into=m"), "merging r: 3 records"),
    ):
        assert label in run(tmp_path, *args, env=env).stderr, args
