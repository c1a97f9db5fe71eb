"""Toolset browser: what the model sees, what may be reached, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from run_agent import AIAgent
from tests.helpers.playing import call as planned
from tests.helpers.playing import calls, say
from tests.helpers.running import lines, run, wait_until, write_rows
from tests.helpers.websites import Answer, Site, site
from toolsets.browser.browser_tools import BROWSER_TOOLS
from toolsets.browser.process import REFUSED, VARIABLE, Browsers, Proxy, browser_problem
from toolsets.catalog.registry import UnavailableToolset, resolve_toolsets
from toolsets.context import ToolContext
from toolsets.net.guard import Guard
from toolsets.net.web_settings import WebSettings
from toolsets.tool import ToolResult
from toolsets.toolbox import Toolbox
from toolsets.workspace.workspace import Workspace

needs_browser = pytest.mark.skipif(browser_problem() is not None, reason=str(browser_problem()))

HTML = "text/html; charset=utf-8"
Call = Callable[..., Awaitable[ToolResult]]


def page(body: str) -> Answer:
    return Answer(f"<!doctype html><title>T</title>{body}".encode(), HTML)


@pytest.fixture
def web() -> Iterator[Site]:
    with site() as served:
        yield served


@asynccontextmanager
async def conversation(
    root: Path, allow: tuple[str, ...], browsers: Browsers | None = None
) -> AsyncIterator[Call]:
    """The tools of one conversation, called without their prefix."""
    context = ToolContext(Workspace(root / "w"), web=WebSettings(allow=allow), browsers=browsers)
    toolbox = Toolbox(BROWSER_TOOLS, context)

    async def call(name: str, **arguments: Any) -> ToolResult:
        return await toolbox.call(f"browser_{name}", json.dumps(arguments))

    try:
        yield call
    finally:
        await toolbox.close(remove_workspace=False)


def ref(result: ToolResult, text: str) -> str:
    """The ref of the element whose line in a snapshot holds some words."""
    assert not result.is_error, result.content
    line = next(line for line in result.content.splitlines() if text in line)
    return str(re.findall(r"\[ref=(\w+)\]", line)[0])


@needs_browser
@pytest.mark.slow
def test_a_conversation_with_pages(web: Site, tmp_path: Path) -> None:
    """Opening, typing, choosing, submitting, going back, scrolling, pictures: with refs alone."""
    web.pages["/"] = page(
        "<h1>Shop</h1><form action=/found><input name=q aria-label=Search>"
        "<select name=s aria-label=Size><option>small<option>large</select><button>Go</button>"
        "</form><p><a href=/more>More</a></p><img src=/i.png alt=Dog>"
    )
    web.pages["/more"] = page(
        "<div style='height:5000px'>tall</div><script>addEventListener('scroll', () =>"
        "document.body.append('scrolled ' + (scrollY > 100)), {once: true})</script>"
    )
    web.pages["/found?q=red+hat&s=large"] = page(
        "<p id=p>results</p><script>addEventListener('keydown', e => p.append(e.key))</script>"
    )

    async def play() -> None:
        async with conversation(tmp_path, web.allow) as call:
            first = await call("navigate", url=web.url())
            assert first.content.startswith(f"Title: T\nURL: {web.url()}\n")
            assert 'heading "Shop"' in first.content
            typed = await call("type", ref=ref(first, '"Search"'), text="red hat")
            assert "red hat" in typed.content
            chosen = await call("select", ref="@" + ref(typed, '"Size"'), option="large")
            found = await call("click", ref=ref(chosen, '"Go"'))
            assert "results" in found.content
            assert "results" in (await call("press", key="x")).content
            assert "resultsx" in (await call("snapshot")).content
            again = await call("back")
            assert 'heading "Shop"' in again.content
            images = json.loads((await call("get_images")).content)
            assert [(one["url"], one["alt"]) for one in images] == [(web.url("/i.png"), "Dog")]
            tall = await call("click", ref=ref(again, '"More"'))
            assert "scrolled" not in tall.content
            await call("scroll", direction="down")
            assert "scrolled true" in (await call("snapshot")).content
            shot = await call("screenshot", path="shots/one.png")
            assert shot.details["path"] == "shots/one.png"
            assert (tmp_path / "w/shots/one.png").read_bytes().startswith(b"\x89PNG")
            assert (await call("screenshot", path="one.txt")).is_error
            outside = await call("screenshot", path="../one.png")
            assert "outside the workspace" in outside.content

    asyncio.run(play())


@needs_browser
@pytest.mark.slow
def test_a_long_page_is_shown_in_parts(web: Site, tmp_path: Path) -> None:
    web.pages["/"] = page("".join(f"<p>line {n}</p>" for n in range(1500)))

    async def play() -> None:
        async with conversation(tmp_path, web.allow) as call:
            shown = await call("navigate", url=web.url())
            seen = ""
            while shown.details["truncated"]:
                assert len(shown.content) < 20_500
                mark = re.search(r"\n\[characters .* offset=(\d+) goes on\]$", shown.content)
                assert mark
                seen += shown.content[: mark.start()]
                shown = await call("snapshot", offset=int(mark[1]))
            seen += shown.content
            assert [int(n) for n in re.findall(r"line (\d+)", seen)] == [*range(1500)]
            beyond = await call("snapshot", offset=10**6)
            assert "the snapshot has only" in beyond.content

    asyncio.run(play())


@needs_browser
def test_only_what_is_permitted_is_reached(web: Site, tmp_path: Path) -> None:
    """Redirects, parts of a page, sockets and frames go the same way as a page itself."""
    with site() as secret, socket.socket(type=socket.SOCK_DGRAM) as stun:
        stun.bind(("127.0.0.1", 0))
        stun.setblocking(False)
        secret.pages["/"] = page("secret")
        hidden = f"{secret.host}:{secret.port}"
        by_name = f"localhost:{secret.port}"
        web.redirect("/away", secret.url())
        web.redirect("/file", "file:///etc/passwd")
        web.pages["/parts"] = page(
            f"<img src=http://{hidden}/i><iframe src=http://{hidden}/></iframe>"
            f"<script src=http://{by_name}/s></script><link rel=stylesheet href=http://{hidden}/c>"
            f"<script>new WebSocket('ws://{hidden}/w');"
            f"navigator.sendBeacon('http://{by_name}/b', 'x');"
            f"fetch('http://{hidden}/f', {{mode: 'no-cors'}}).catch(() =>"
            " document.body.append('fetch failed'));"
            f"const urls = 'stun:127.0.0.1:{stun.getsockname()[1]}';"
            "const peer = new RTCPeerConnection({iceServers: [{urls}]});"
            "peer.createDataChannel('x');"
            "peer.createOffer().then(offer => peer.setLocalDescription(offer));"
            "</script>"
            "<a href=file:///etc/passwd>file</a><a href='data:text/html,data'>data</a>"
        )

        async def play() -> None:
            async with conversation(tmp_path, web.allow) as call:
                for url in (secret.url(), f"http://{by_name}/", web.url("/away")):
                    refused = await call("navigate", url=url)
                    assert refused.is_error
                    assert refused.content.endswith(REFUSED), refused.content
                for url in ("file:///etc/passwd", "data:text/html,x", "chrome://version", "x"):
                    assert (await call("navigate", url=url)).is_error
                assert "root:" not in (await call("navigate", url=web.url("/file"))).content
                shown = await call("navigate", url=web.url("/parts"))
                assert "fetch failed" in (await call("snapshot")).content
                for name in ("file", "data"):
                    there = await call("click", ref=ref(shown, f'"{name}"'))
                    assert f"URL: {web.url('/parts')}\n" in there.content

        asyncio.run(play())
        assert not secret.visits
        with pytest.raises(BlockingIOError):
            stun.recv(1)


@needs_browser
@pytest.mark.slow
def test_dialogs_new_tabs_downloads_and_errors_are_reported_to_the_model(
    web: Site, tmp_path: Path
) -> None:
    """Dialogs, new tabs, downloads, errors of the server, refs that are none."""
    web.pages["/"] = page(
        "<button onclick=\"alert('Hi')\">A</button><a href=/tab target=_blank>B</a>"
        "<a href=/zip>C</a><a href=http://127.0.0.1:9999/>E</a>"
        "<script>onbeforeunload = e => 'stay'</script>"
    )
    web.pages["/tab"] = page("in the tab")
    web.pages["/zip"] = Answer(b"PK", "application/zip")

    async def play() -> None:
        async with conversation(tmp_path, web.allow) as call:
            nothing = await call("snapshot")
            assert "no page is open" in nothing.content
            shown = await call("navigate", url=web.url())
            clicked = await call("click", ref=ref(shown, '"A"'))
            assert "a dialog (alert), which was dismissed: Hi" in clicked.content
            tab = await call("click", ref=ref(shown, '"B"'))
            assert "Note: a new tab was opened" in tab.content
            assert "in the tab" in tab.content
            assert f"URL: {web.url()}\n" in (await call("back")).content
            same = await call("click", ref=ref(shown, '"C"'))
            assert f"URL: {web.url()}\nNote: a download was refused\n" in same.content
            lost = await call("click", ref=ref(shown, '"E"'))
            assert "http://127.0.0.1:9999/: refused" in lost.content
            shown = await call("back")
            assert "file to download" in (await call("navigate", url=web.url("/zip"))).content
            assert "is not a ref" in (await call("click", ref="button")).content
            gone = await call("click", ref="e999")
            assert "has the ref e999 now" in gone.content
            missing = await call("navigate", url=web.url("/missing"))
            assert "Note: the server answered with HTTP 404" in missing.content

    asyncio.run(play())
    assert not [*tmp_path.rglob("*.zip")]


@pytest.mark.long
@needs_browser
def test_a_page_that_does_not_answer_is_closed(web: Site, tmp_path: Path) -> None:
    web.pages["/"] = page("<button onclick='for(;;);'>D</button>")

    async def play() -> None:
        async with conversation(tmp_path, web.allow) as call:
            shown = await call("navigate", url=web.url())
            stuck = await call("click", ref=ref(shown, '"D"'))
            assert "does not answer and was closed" in stuck.content
            assert not (await call("navigate", url=web.url())).is_error

    asyncio.run(play())


@needs_browser
@pytest.mark.slow
def test_conversations_share_a_browser_and_no_cookies(web: Site, tmp_path: Path) -> None:
    """The browser ends with its last user; when it is killed, it is started again."""
    web.pages["/"] = lambda visit: Answer(
        str(visit.headers.get("Cookie")).encode(), "text/plain", headers={"Set-Cookie": "a=b"}
    )

    async def play() -> None:
        browsers = Browsers(web.allow)
        browsers.open()
        async with (
            conversation(tmp_path / "1", (), browsers) as one,
            conversation(tmp_path / "2", (), browsers) as other,
        ):
            shown = await asyncio.gather(
                one("navigate", url=web.url()), other("navigate", url=web.url())
            )
            assert all("None" in result.content for result in shown)
            assert "a=b" in (await one("navigate", url=web.url())).content
            (chromium,) = launchers(os.getpid())
            os.kill(chromium, signal.SIGKILL)
            await until_gone([chromium])
            assert (await one("snapshot")).is_error
            assert "None" in (await one("navigate", url=web.url())).content
            assert "None" in (await other("navigate", url=web.url())).content
        running = [pid for driver in drivers(os.getpid()) for pid in [driver, *descendants(driver)]]
        assert len(running) > 1
        await browsers.close()
        await until_gone(running)

    asyncio.run(play())


@needs_browser
@pytest.mark.slow
def test_no_secret_is_in_an_environment(
    web: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY_API_KEY", "canary-88")
    web.pages["/"] = page("x")

    async def play() -> None:
        async with conversation(tmp_path, web.allow) as call:
            assert not (await call("navigate", url=web.url())).is_error
            read = []
            for pid in descendants(os.getpid()):
                with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                    read.append(Path(f"/proc/{pid}/environ").read_bytes())
            assert len(read) > 5
            assert not any(b"canary-88" in environment for environment in read)

    asyncio.run(play())
    assert "PLAYWRIGHT_NODEJS_PATH" not in os.environ


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("with_bwrap", [True, False])
def test_a_killed_worker_leaves_nothing(web: Site, tmp_path: Path, with_bwrap: bool) -> None:
    """Neither processes nor files, also where it could not be confined by bwrap."""
    web.pages["/"] = page("<script>for(;;);</script>")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    program = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from tests.toolsets.test_browser import conversation\n"
        "async def main():\n"
        "    async with conversation(Path(sys.argv[1]), (sys.argv[2],)) as call:\n"
        "        await call('navigate', url='http://' + sys.argv[2])\n"
        "asyncio.run(main())\n"
    )
    env = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(Path.cwd())}
    if not with_bwrap:
        env["PATH"] = path_without_bwrap(tmp_path / "bin")
    worker = subprocess.Popen([sys.executable, "-c", program, str(tmp_path), web.allow[0]], env=env)
    try:
        wait_until(lambda: any(visit.path == "/" for visit in web.visits))
        running = descendants(worker.pid)
        assert len(running) > 5
        # Held up, so that it cannot be what ends the browser.
        shell, driver = [pid for pid in running if b"run-driver" in command_of(pid)]
        os.kill(driver, signal.SIGSTOP)
    finally:
        worker.kill()
        worker.wait()
    try:
        wait_until(lambda: alive(running) == [shell, driver])
    finally:
        os.kill(driver, signal.SIGCONT)
    wait_until(lambda: not alive(running))
    wait_until(lambda: not [*temporary.iterdir()])


@pytest.mark.long
@needs_browser
def test_a_page_that_eats_memory_harms_no_other(web: Site, tmp_path: Path) -> None:
    web.pages["/"] = page("fine")
    web.pages["/eat"] = page(
        "<script>const all = []; try { for (;;) all.push(new Uint8Array(1 << 26).fill(1)) }"
        "catch { document.title = `refused after ${all.length}` }</script>"
    )

    async def play() -> None:
        browsers = Browsers(web.allow)
        async with (
            conversation(tmp_path / "1", (), browsers) as one,
            conversation(tmp_path / "2", (), browsers) as other,
        ):
            await other("navigate", url=web.url())
            greedy = await one("navigate", url=web.url("/eat"))
            assert "crashed" in greedy.content or int(greedy.content.split()[3]) < 32
            assert "fine" in (await other("snapshot")).content
            assert "fine" in (await one("navigate", url=web.url())).content

    asyncio.run(play())


@needs_browser
@pytest.mark.slow
def test_a_run_with_the_browser(web: Site, tmp_path: Path) -> None:
    web.pages["/"] = page("<h1>Welcome</h1>")
    script = [
        calls(planned("browser_navigate", url=web.url())),
        calls(planned("browser_screenshot")),
        say("done"),
    ]
    rows = [{"id": f"p{n}", "prompt": "x", "script": script} for n in range(3)]
    write_rows(tmp_path / "p.jsonl", *rows)
    done = run(
        tmp_path,
        run_name="r",
        dataset_file="p.jsonl",
        model="scripted",
        enabled_toolsets="browser",
        web_allow=web.allow[0],
        num_workers=1,
    )
    assert done.returncode == 0, done.stderr
    records = lines(tmp_path / "trajectories" / "r" / "records.jsonl")
    for record in records:
        told = [message for message in record["messages"] if message["role"] == "tool"]
        assert 'heading "Welcome"' in told[0]["content"]
        assert told[1]["content"].startswith("Saved screenshot.png")
    assert len(records) == 3


@pytest.mark.long
@needs_browser
def test_an_agent_with_the_browser(web: Site) -> None:
    web.pages["/"] = page("<h1>Welcome</h1>")
    agent = AIAgent(
        model="scripted",
        enabled_toolsets=["browser"],
        web=WebSettings(allow=web.allow),
        script=[calls(planned("browser_navigate", url=web.url())), say("done")],
    )
    result = agent.run_conversation("x")
    told = [one["content"] for one in result["messages"] if one["role"] == "tool"]
    assert 'heading "Welcome"' in told[0]


def test_it_must_be_named_and_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "browser" not in {toolset.name for toolset in resolve_toolsets(None)}
    monkeypatch.setenv(VARIABLE, "/nowhere/chromium")
    with pytest.raises(UnavailableToolset, match="toolset 'browser' cannot be offered: "):
        resolve_toolsets(["browser"])


def test_the_proxy_judges_the_address_it_connects_to() -> None:
    """By SOCKS 5: names, addresses of both families, and what is none of it."""

    async def ask(port: int, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\x05\x01\x00" + request)
        writer.write_eof()
        answer = await reader.read()
        writer.close()
        return answer

    async def play(web: Site) -> None:
        def to(kind: bytes, port: int = web.port) -> bytes:
            return b"\x05\x01\x00" + kind + port.to_bytes(2, "big")

        name = b"\x03\x09localhost"
        address = b"\x01" + socket.inet_aton("127.0.0.1")
        inside = b"\x04" + socket.inet_pton(socket.AF_INET6, "::ffff:169.254.169.254")
        proxy = Proxy(Guard((f"127.0.0.1:{web.port}",)))
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        port = listener.getsockname()[1]
        await proxy.serve(listener)
        for refused in (to(name), to(inside), to(address, 9)):
            assert (await ask(port, refused))[:4] == b"\x05\x00\x05\x02"
        assert proxy.failure("localhost", web.port) == REFUSED
        assert (await ask(port, to(b"\x03\x0cnope.invalid")))[:4] == b"\x05\x00\x05\x04"
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x05\x02\x00" + address, b"\x05\x01\x00\x09"):
            assert await ask(port, garbage) == b"\x05\x00"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\x05\x01\x00" + to(address) + b"GET / HTTP/1.0\r\n\r\n")
        assert b"404" in await reader.read()
        writer.close()
        idle = await asyncio.open_connection("127.0.0.1", port)
        await proxy.close()
        assert await idle[0].read() == b""
        idle[1].close()

    with site() as web:
        asyncio.run(play(web))


def descendants(pid: int) -> list[int]:
    """All processes beneath one."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, pending = [], [pid]
    while pending:
        children = parents.get(pending.pop(), [])
        found += children
        pending += children
    return found


def drivers(pid: int) -> list[int]:
    """The processes of playwright's drivers beneath one."""
    below = [(one, command_of(one)) for one in descendants(pid)]
    return [one for one, said in below if b"run-driver" in said and said[:3] != b"sh\0"]


def launchers(pid: int) -> list[int]:
    """What stands between playwright's driver and the browser: a process per running browser."""
    return [child for driver in drivers(pid) for child in descendants(driver)[:1]]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def alive(pids: list[int]) -> list[int]:
    """Those that still run; a zombie does not."""
    return [pid for pid in pids if command_of(pid)]


async def until_gone(pids: list[int]) -> None:
    await asyncio.to_thread(wait_until, lambda: not alive(pids))


def path_without_bwrap(directory: Path) -> str:
    """A PATH that has everything but bwrap."""
    directory.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            if program.name != "bwrap" and not (directory / program.name).is_symlink():
                (directory / program.name).symlink_to(program)
    return str(directory)
