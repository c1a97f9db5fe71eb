"""Runs with toolset web: settings reach the workers, pages stay the same, keys stay secret."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.playing import call, calls, say
from tests.helpers.running import lines, run, write_rows
from tests.helpers.websites import Answer, site
from toolsets.web.web_tools import web_problem

pytestmark = pytest.mark.skipif(web_problem() is not None, reason=str(web_problem()))

OPTIONS: dict[str, Any] = {
    "run_name": "r",
    "dataset_file": "p.jsonl",
    "model": "scripted",
    "enabled_toolsets": "web",
}


def test_all_workers_see_the_same_page_and_no_key_is_written(tmp_path: Path) -> None:
    with site() as web, site() as provider:
        web.pages["/"] = lambda visit: Answer(f"visit {len(web.visits)}".encode())
        results = {"results": [{"title": "T", "url": web.url(), "content": "C"}]}
        provider.pages["/"] = Answer(json.dumps(results).encode())
        script = [
            calls(call("web_search", query="q")),
            calls(call("web_fetch", url=web.url())),
            say("x"),
        ]
        rows = [{"id": f"p{n}", "prompt": "x", "script": script} for n in range(8)]
        write_rows(tmp_path / "p.jsonl", *rows)
        done = run(
            tmp_path,
            **OPTIONS,
            num_workers=2,
            web_allow=f"127.0.0.1:{web.port}",
            web_search_provider="tavily",
            env={"TAVILY_API_KEY": "canary-key-77", "TAVILY_SEARCH_URL": provider.url()},
        )
    assert done.returncode == 0, done.stderr
    records = lines(tmp_path / "trajectories" / "r" / "records.jsonl")
    collected = {
        message["content"]
        for record in records
        for message in record["messages"]
        if message["role"] == "tool"
    }
    assert len(records) == 8
    assert len(collected) == 2
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("web_cache" in path.parts for path in written)
    assert not any(b"canary-key-77" in path.read_bytes() for path in written)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"web_search_provider": "brave"}, "needs its key in the variable BRAVE_API_KEY"),
        ({"web_allow": "http://x"}, "web_allow: 'http://x' "),
        ({"web_search_url": "http://x"}, "no longer an option; set the variable TAVILY_SEARCH_URL"),
    ],
)
def test_missing_keys_and_packages_are_reported_before_the_run(
    tmp_path: Path, options: dict[str, str], message: str
) -> None:
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [say("x")]})
    done = run(tmp_path, "--dry_run", **OPTIONS, **options, env={"BRAVE_API_KEY": ""})
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "trajectories").exists()
