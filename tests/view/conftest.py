"""A real run to look at, and a cache of its own for its index."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import SCRIPTED, run, write_rows
from tests.view.serving import Viewer, viewing

HOSTILE = [
    "</script><script>window.pwned=1</script>",
    "<img src=x onerror=window.pwned=1>",
    "javascript:alert(1)",
    "'\"><svg onload=alert(1)>",
    "{{7*7}} ${7*7} <%= 7*7 %>",
    "../../../../etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "\x1b[31mred\x1b]0;title\x07",
    "\u202eevil\u2028line",
    "a' OR 1=1; DROP TABLE words; --",
    'words" OR "x',
    "data:text/html,<script>alert(1)</script>",
    "\r\nSet-Cookie: a=b\r\nevent: run\ndata: {}",
    "__proto__",
    "%00%0a%0d",
]
"""Texts and ids that would act if they were anything but text."""

ROWS: list[dict[str, Any]] = [
    *(
        {
            "id": f"h{number} {text}",
            "prompt": f"Say {text}",
            "script": [
                {
                    "reasoning": "Look.",
                    "tool_calls": [
                        {"name": "write_file", "arguments": {"path": "f.txt", "content": text}}
                    ],
                },
                {"content": f"Answer {number}: {text}"},
            ],
        }
        for number, text in enumerate(HOSTILE)
    ),
    {
        "id": "missing",
        "prompt": "Read what is not there.",
        "script": [
            {"tool_calls": [{"name": "read_file", "arguments": {"path": "none.txt"}}]},
            {"content": "It is a quokka."},
        ],
    },
    {
        "id": "endless",
        "prompt": "Go on.",
        "script": [{"tool_calls": [{"name": "list_files"}]}] * 4,
    },
]


@pytest.fixture(autouse=True, scope="package")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where indexes go in these tests."""
    path = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(path))
        yield path


@pytest.fixture(scope="package")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the run `r`, whose texts and ids are hostile."""
    cwd = tmp_path_factory.mktemp("view")
    write_rows(cwd / "p.jsonl", *ROWS)
    done = run(cwd, **SCRIPTED, max_turns=3, repeat_limit=9, num_samples=2)
    assert done.returncode == 0, done.stderr
    return cwd / "trajectories"


@pytest.fixture(scope="package")
def viewer(runs: Path) -> Iterator[Viewer]:
    with viewing(runs) as viewer:
        yield viewer
