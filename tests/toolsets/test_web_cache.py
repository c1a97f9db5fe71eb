"""What was fetched stays the same for a run: after restarts, and between its processes."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import PATIENCE_S, ROOT
from tests.helpers.websites import Answer, Site, Visit, site
from toolsets.context import ToolContext
from toolsets.net.web_settings import WebSettings
from toolsets.toolbox import Toolbox
from toolsets.web.web_tools import WebCache, web_fetch
from toolsets.workspace.workspace import Workspace

FETCH = """
import sys
from pathlib import Path
from tests.toolsets.test_web_cache import fetch
url, cache, allow = sys.argv[1:]
print(fetch(Path(cache), url, allow))
"""


def fetch(cache: Path, url: str, allow: str, **arguments: Any) -> str:
    settings = WebSettings(cache_dir=cache, allow=(allow,))
    toolbox = Toolbox([web_fetch], ToolContext(Workspace(cache.parent / "ws"), web=settings))
    arguments["url"] = url
    return asyncio.run(toolbox.call("web_fetch", json.dumps(arguments))).content


def counting(served: Site, path: str = "/") -> None:
    served.pages[path] = lambda visit: Answer(f"visit {len(served.visits)}".encode())


def files_of(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file() and path.name != ".lock"]


def test_a_page_is_loaded_once(tmp_path: Path) -> None:
    with site() as web:
        counting(web)
        counting(web, "/?a=2")
        allow = f"127.0.0.1:{web.port}"
        first = fetch(tmp_path / "c", web.url(), allow)
        assert first.endswith("visit 1")
        assert fetch(tmp_path / "c", web.url("/#part"), allow) == first
        assert fetch(tmp_path / "c", web.url(), allow, offset=6).endswith("\n1")
        assert fetch(tmp_path / "c", web.url("/?a=2"), allow).endswith("visit 2")
        assert fetch(tmp_path / "d", web.url(), allow).endswith("visit 3")
    assert fetch(tmp_path / "c", web.url(), allow) == first
    assert {path.stat().st_mode & 0o777 for path in files_of(tmp_path / "c")} == {0o600}


def test_failures_are_not_kept(tmp_path: Path) -> None:
    with site() as web:
        web.pages["/"] = Answer(b"", status=503)
        allow = f"127.0.0.1:{web.port}"
        assert "HTTP 503" in fetch(tmp_path / "c", web.url(), allow)
        counting(web)
        assert fetch(tmp_path / "c", web.url(), allow).endswith("visit 2")


@pytest.mark.slow
def test_processes_that_load_a_page_at_once_see_the_same(tmp_path: Path) -> None:
    together = threading.Barrier(3)
    numbers = itertools.count()

    def page(visit: Visit) -> Answer:
        together.wait(PATIENCE_S)  # nobody gets the page before all have asked for it
        return Answer(f"answer {next(numbers)}".encode())

    with site() as web:
        web.pages["/"] = page
        argv = [sys.executable, "-c", FETCH, web.url(), str(tmp_path / "c")]
        processes = [
            subprocess.Popen([*argv, f"127.0.0.1:{web.port}"], cwd=ROOT, stdout=subprocess.PIPE)
            for _ in range(3)
        ]
        outputs = {process.communicate(timeout=PATIENCE_S)[0] for process in processes}
        assert len(web.visits) == 3
    assert len(outputs) == 1
    assert b"answer " in outputs.pop()
    assert len(files_of(tmp_path / "c")) == 1


def test_the_cache_stays_below_its_limit_and_keeps_the_newest(tmp_path: Path) -> None:
    cache = WebCache(tmp_path, max_bytes=16 * 4000)
    for n in range(400):
        assert cache.put(f"key {n}", "x" * 900) == "x" * 900
        assert cache.get(f"key {n}") is not None
    assert 16 * 2000 < sum(path.stat().st_size for path in files_of(tmp_path)) <= 16 * 4000
    assert cache.get("key 0") is None
    assert cache.put("large", "x" * 5000) == "x" * 5000
    assert cache.get("large") is None
    assert cache.get("key 399") is not None


def test_the_first_value_stays(tmp_path: Path) -> None:
    cache = WebCache(tmp_path, max_bytes=1 << 20)
    assert cache.put("k\ud800", ["a"]) == ["a"]
    assert cache.put("k\ud800", ["b"]) == ["a"]


def test_a_torn_cache_entry_is_fetched_again(tmp_path: Path) -> None:
    cache = WebCache(tmp_path, max_bytes=1 << 20)
    cache.put("k", "value")
    [path] = files_of(tmp_path)
    for torn in (b"", path.read_bytes()[:-3], b"[1]"):
        path.write_bytes(torn)
        assert cache.get("k") is None
        assert cache.put("k", "new") == "new"
        assert cache.get("k") == "new"


def test_leftovers_of_a_crash_are_removed_by_the_next_writer(tmp_path: Path) -> None:
    """Half a file that nobody would ever read or count."""
    cache = WebCache(tmp_path, max_bytes=1 << 20)
    cache.put("k", "value")
    [path] = files_of(tmp_path)
    path.unlink()
    (path.parent / "tmpabc.tmp").write_bytes(b"half")
    cache.put("k", "value")
    assert files_of(tmp_path) == [path]
