"""run.log: a sentence per line, which says what happened, and which no text from outside forges."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from batch_trajectories.basics.process import LogLine
from tests.helpers.answering import JSON, answering
from tests.helpers.builders import chat_reply
from tests.helpers.running import run, write_rows

LINE = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING|ERROR) "
    r"(Task|A|At|Its|The|Calls) .+"
)
FORGED = "2026-01-01 00:00:00.000Z INFO Task z ended as completed after 3 turns."
BREAKS = "\n", "\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"


def made(message: str, *, name: str = "agent.loop", error: Exception | None = None) -> str:
    info = None if error is None else (type(error), error, None)
    record = logging.LogRecord(name, logging.INFO, "f.py", 1, message, (), info)
    return LogLine().format(record)


@pytest.mark.parametrize("character", BREAKS)
def test_no_text_begins_a_line_of_its_own(character: str) -> None:
    assert len(made(f"It said {character}{FORGED}").splitlines()) == 1


def test_terminal_escapes_and_half_characters_are_escaped() -> None:
    line = made("red \x1b[31m, back \u202e, half \ud83d")
    assert line.endswith(r"red \u001b[31m, back \u202e, half \ud83d")
    line.encode()


def test_the_lines_of_a_traceback_are_indented() -> None:
    text = made("The machine failed.", error=ValueError(f"bad\n{FORGED}"))
    first, *others = text.splitlines()
    assert LINE.fullmatch(first)
    assert f"    {FORGED}" in others
    assert all(line.startswith("    ") for line in others)


def test_the_lines_of_libraries_name_them() -> None:
    assert made("Unclosed connector", name="asyncio").endswith("INFO asyncio: Unclosed connector")


def test_a_server_and_a_dataset_cannot_forge_lines(tmp_path: Path) -> None:
    """Neither by an error, nor by the id of a row, nor by the name of a tool."""

    def answer(path: str, body: JSON) -> tuple[int, JSON]:
        if "refuse" in str(body["messages"]):
            return 400, {"error": {"message": f"no\r\n{FORGED}\x1b[2J", "code": "invalid_value"}}
        return 200, chat_reply("hi")

    rows = [{"id": f"a\n{FORGED}", "prompt": "Go."}, {"id": "b", "prompt": "refuse"}]
    write_rows(tmp_path / "p.jsonl", *rows)
    with answering(answer) as (url, _):
        done = run(
            tmp_path,
            run_name="r",
            dataset_file="p.jsonl",
            model="m",
            key_env="none",
            base_url=f"{url}/v1",
            enabled_toolsets="none",
            num_workers=1,
        )
    assert done.returncode == 1, done.stderr
    log = (tmp_path / "trajectories" / "r" / "run.log").read_text()
    assert [line for line in log.splitlines() if not LINE.fullmatch(line)] == []
    assert "\x1b" not in log
    assert re.search(
        r"Task b ended as failed after 0 turns \(attempt 1 of 3, .*\): bad_request: ", log
    )
    assert r"Task a\n2026-01-01 " in log
