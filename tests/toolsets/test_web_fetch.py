"""web_fetch: what may be reached, what bounds it, and what becomes of a page."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from batch_trajectories.basics.errors import ToolError
from run_agent import AIAgent
from tests.helpers.playing import call as planned
from tests.helpers.playing import calls, say
from tests.helpers.websites import Answer, Site, Visit, site
from toolsets.context import ToolContext
from toolsets.net.guard import Guard
from toolsets.net.web_settings import WebSettings
from toolsets.tool import ToolResult
from toolsets.toolbox import Toolbox
from toolsets.web.http import MAX_REDIRECTS, download, read_page
from toolsets.web.web_tools import web_fetch, web_problem
from toolsets.workspace.workspace import Workspace

needs_extra = pytest.mark.skipif(web_problem() is not None, reason=str(web_problem()))

ARTICLE = b"""<!doctype html>
<html><head><title>Cats &amp;
 dogs</title><style>p { color: red }</style></head>
<body><nav><a href="/start">Start page</a></nav>
<main><h1>About cats</h1>
<p>Cats are animals that sleep most of the day, as <a href="../sources?n=1">a study</a> found, and
they hunt in the remaining hours, which is why they are kept on farms and in granaries.</p>
<ul><li>They sleep.</li><li>They hunt.</li></ul></main>
<script>alert("no")</script></body></html>"""


@pytest.fixture
def web() -> Iterator[Site]:
    with site() as served:
        yield served


def fetch(
    settings: WebSettings | None, url: str, *, root: Path = Path("unused"), **arguments: Any
) -> ToolResult:
    toolbox = Toolbox([web_fetch], ToolContext(Workspace(root), web=settings))
    return asyncio.run(toolbox.call("web_fetch", json.dumps({"url": url, **arguments})))


def text_of(result: ToolResult) -> str:
    """The text of a page below the lines that say its title and address."""
    assert not result.is_error, result.content
    return result.content.partition("\n\n")[2]


@needs_extra
def test_a_page_becomes_markdown_with_title_and_absolute_links(web: Site) -> None:
    web.pages["/pets/cats"] = Answer(ARTICLE, "text/html; charset=utf-8")
    result = fetch(WebSettings(allow=web.allow), web.url("/pets/cats#part"))
    assert result.content.startswith(f"Title: Cats & dogs\nURL: {web.url('/pets/cats')}\n\n")
    text = text_of(result)
    assert "# About cats" in text
    assert f"[a study]({web.url('/sources?n=1')})" in text
    assert "- They sleep.\n- They hunt." in text
    assert "alert" not in text
    assert "Start page" not in text
    assert result.details["type"] == "text/html"


@needs_extra
@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"<p>Hello</p>", "Hello"),
        (b"<footer>A <b>bold</b> word<div>next</div><!-- no --></footer>", "A bold word\nnext"),
        (b"<html><head><title>T</title><script>x()</script></head></html>", "[no text]"),
        (b"", "[no text]"),
        (b"\x00\x01 not html"[2:], "not html"),
    ],
)
def test_a_page_without_a_main_part_becomes_plain_text(web: Site, body: bytes, text: str) -> None:
    web.pages["/"] = Answer(body, "text/html")
    assert text_of(fetch(WebSettings(allow=web.allow), web.url())) == text


@needs_extra
def test_a_page_too_long_for_markdown_becomes_plain_text(web: Site) -> None:
    web.pages["/"] = Answer(b"<body>" + b"<p>x <i>y</i></p>" * 150_000, "text/html")
    result = fetch(WebSettings(allow=web.allow), web.url(), max_chars=7)
    assert text_of(result).startswith("x y\nx y\n[characters 0-7 of 599999; ")


@pytest.mark.parametrize(
    ("content_type", "body", "text"),
    [
        ("application/json", '{"a": "é"}'.encode(), '{"a": "é"}'),
        ("application/feed+json; charset=utf-8", b"[1]", "[1]"),
        ("text/plain; charset=latin-1", "é".encode("latin-1"), "é"),
        ("text/plain; charset=no-such", "é".encode(), "é"),
        ("text/markdown", b"# A\n\n<b>b</b>\n", "# A\n\n<b>b</b>\n"),
        ("text/plain", "a\ud800b".encode("utf-8", "surrogatepass"), None),
        ("text/plain", "é\n".encode("utf-16"), "é\n"),
        ("text/plain; charset=shift_jis", "髙①".encode("cp932"), "髙①"),
        ("text/plain; charset=gb2312", "镕€".encode("gb18030"), "镕€"),
        ("text/plain; charset=us-ascii", b"\x93a\x94", "\u201ca\u201d"),
        ("text/plain; charset=euc-kr", "가".encode("euc-kr") + b"\xff", "가\ufffd"),
        ("text/plain; charset=utf-16le", "é\n".encode("utf-16-le"), "é\n"),
        (None, b"whatever it is", "whatever it is"),
        ("application/octet-stream", b"#!/bin/sh\n", "#!/bin/sh\n"),
    ],
)
def test_text_and_json_stay_as_they_are(
    web: Site, content_type: str | None, body: bytes, text: str | None
) -> None:
    web.pages["/"] = Answer(body, content_type)
    got = text_of(fetch(WebSettings(allow=web.allow), web.url()))
    got.encode()
    assert text is None or got == text


@pytest.mark.parametrize(
    "codec",
    ["punycode", "idna", "utf-7", "unicode_escape", "raw_unicode_escape", "undefined", "cp037"],
)
def test_only_the_webs_encodings_are_codecs(codec: str) -> None:
    """Python has others: some take hours for a few megabytes, others read what is not there."""
    body = rb"\u0041+AGE-abc-xn--d" + "é".encode() + b"\xff"
    page = read_page("http://x/", "text/plain", codec, body)
    assert page.text == body.decode("utf-8", "replace")


@pytest.mark.parametrize("charset", [None, "utf-8", "UTF8", "utf-16", "latin1", "no-such"])
@pytest.mark.parametrize("form", ["utf-8-sig", "utf-16", "utf-16-be"])
def test_a_byte_order_mark_wins_and_is_no_text(charset: str | None, form: str) -> None:
    mark = b"\xfe\xff" if form == "utf-16-be" else b""
    page = read_page("http://x/", "application/json", charset, mark + '{"a": "é"}'.encode(form))
    assert page.text == '{"a": "é"}'


def test_a_mark_of_another_encoding_is_no_text() -> None:
    body = "\ufeffé".encode("gb18030")
    assert read_page("http://x/", "text/plain", "gb18030", body).text == "é"


@needs_extra
@pytest.mark.parametrize(
    ("content_type", "head", "encoding"),
    [
        ("text/html", '<meta charset="windows-1251">', "cp1251"),
        ("text/html; charset=koi8-r", '<meta charset="windows-1251">', "koi8-r"),
        ("text/html", "", "utf-8"),
        ("text/html", '<?xml version="1.0" encoding="latin-1"?>', "utf-8"),
        (None, "<!DOCTYPE html>", "utf-8"),
        (None, "<!DOCTYPE html>", "utf-8-sig"),
        ("text/html", '<meta charset="utf-16">', "utf-8"),
        ("text/html", '<meta charset="punycode">', "utf-8"),
    ],
)
def test_charsets_are_found(web: Site, content_type: str | None, head: str, encoding: str) -> None:
    web.pages["/"] = Answer(f"{head}<html><p>привет</p></html>".encode(encoding), content_type)
    assert text_of(fetch(WebSettings(allow=web.allow), web.url())) == "привет"


@pytest.mark.parametrize(
    ("content_type", "body", "named"),
    [
        ("application/pdf", b"%PDF-1.7", "its type is application/pdf"),
        ("image/png", b"\x89PNG", "its type is image/png"),
        ("application/octet-stream", b"\0" * 10, "binary (application/octet-stream)"),
        ("text/plain", b"%PDF-1.7", "binary (text/plain)"),
        (None, b"a\0b", "binary (of no stated type)"),
    ],
)
def test_values_that_are_not_text_are_named(
    web: Site, content_type: str | None, body: bytes, named: str
) -> None:
    web.pages["/"] = Answer(body, content_type)
    result = fetch(WebSettings(allow=web.allow), web.url())
    assert result.is_error
    assert named in result.content


def test_a_long_page_is_read_piece_by_piece(web: Site) -> None:
    whole = "".join(f"{n} é " for n in range(1000))
    web.pages["/"] = Answer(whole.encode())
    settings = WebSettings(allow=web.allow)
    read = ""
    while True:
        text = text_of(fetch(settings, web.url(), offset=len(read), max_chars=999))
        piece, note, rest = text.partition("\n[characters ")
        read += piece
        if not note:
            break
        assert f"of {len(whole)}; go on with offset={len(read)}]" in rest
    assert read == whole
    late = fetch(settings, web.url(), offset=len(whole))
    assert late.is_error
    assert f"has only {len(whole)} characters" in late.content


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file:///etc/passwd", "only http and https"),
        ("ftp://example.com/x", "only http and https"),
        ("example.com/x", "only http and https"),
        ("http:///x", "no host"),
        ("http://user:pw@example.com/", "user name or password"),
        ("http://user@example.com/", "user name or password"),
        ("http://example.com:99999/", "not a URL"),
        ("http://[::1/", "not a URL"),
        ("http://example.com/" + "x" * 9000, "longer than 8192"),
    ],
)
def test_only_plain_web_addresses_are_fetched(url: str, message: str) -> None:
    result = fetch(WebSettings(), url)
    assert result.is_error
    assert message in result.content


SPELLINGS = (
    "127.0.0.1 localhost localhost. LOCALHOST 127.1 2130706433 0x7f000001 0177.0.0.1 0 0.0.0.0 "
    "127.0.0.1. [::ffff:127.0.0.1] [::ffff:7f00:1] 127%2e0.0.1"
)


@pytest.mark.parametrize("host", SPELLINGS.split())
def test_loopback_is_refused_however_it_is_spelled(web: Site, host: str) -> None:
    result = fetch(WebSettings(), f"http://{host}:{web.port}/")
    assert result.is_error
    assert web.visits == []


PUBLIC = ["1.1.1.1", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101", "2002:101:101::1"]
SPECIAL = (
    "127.0.0.1 127.8.8.8 0.0.0.0 10.0.0.1 172.16.0.1 192.168.0.1 100.64.0.1 169.254.169.254 "
    "100.100.100.200 168.63.129.16 192.0.0.192 192.0.2.1 198.18.0.1 203.0.113.9 224.0.0.1 "
    "239.255.255.250 240.0.0.1 255.255.255.255 :: ::1 ::7f00:1 ::ffff:10.0.0.1 64:ff9b::a00:1 "
    "2002:7f00:1::1 fc00::1 fd00:ec2::254 fe80::1 fe80::1%eth0 fec0::1 ff02::1 2001:db8::1 2001::1"
)


def test_the_guard_knows_public_addresses_from_others() -> None:
    guard = Guard(())
    assert [ip for ip in PUBLIC if not guard.permits("x.test", 80, ip)] == []
    assert [ip for ip in SPECIAL.split() if guard.permits("x.test", 80, ip)] == []


@pytest.mark.parametrize(
    ("entry", "host", "port", "address", "permits"),
    [
        ("docs.lan", "docs.lan", 8080, "10.0.0.1", True),
        ("Docs.LAN.", "docs.lan", 80, "10.0.0.1", True),
        ("docs.lan", "www.docs.lan", 80, "10.0.0.1", False),
        ("docs.lan:8080", "docs.lan", 8080, "10.0.0.1", True),
        ("docs.lan:8080", "docs.lan", 80, "10.0.0.1", False),
        ("10.0.0.1", "docs.lan", 80, "10.0.0.1", False),
        ("10.0.0.0/8", "docs.lan", 80, "10.9.9.9", True),
        ("10.0.0.0/8", "docs.lan", 80, "11.0.0.1", True),
        ("10.0.0.0/8", "docs.lan", 80, "192.168.0.1", False),
        ("fd00::/8", "docs.lan", 80, "fd00::1", True),
        ("[::1]:8080", "::1", 8080, "::1", True),
        ("[0:0::1]", "::1", 8080, "::1", True),
        ("::1", "::1", 443, "::1", True),
    ],
)
def test_what_is_allowed_beside_public_addresses(
    entry: str, host: str, port: int, address: str, permits: bool
) -> None:
    assert Guard([entry]).permits(host, port, address) is permits


@pytest.mark.parametrize(
    "entry",
    ["", "a b", "http://x", "x:", "x:0", "x:99999", "x:y", "10.0.0.1/8", "[::1", "[::1]8", "u@x"],
)
def test_an_entry_that_means_nothing_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match=r"^web_allow: "):
        WebSettings(allow=(entry,))


def test_a_redirect_to_loopback_is_refused(web: Site) -> None:
    with site() as inner:
        for path, host in [("/a", "127.0.0.1"), ("/b", "localhost"), ("/c", "[::ffff:127.0.0.1]")]:
            web.redirect(path, f"http://{host}:{inner.port}/secret")
            result = fetch(WebSettings(allow=web.allow), web.url(path))
            assert result.is_error
            assert "refused, because its host is not at a public address" in result.content
        assert inner.visits == []
    web.redirect("/file", "file:///etc/passwd")
    web.redirect("/user", f"http://u:p@127.0.0.1:{web.port}/")
    assert "only http and https" in fetch(WebSettings(allow=web.allow), web.url("/file")).content
    assert "user name" in fetch(WebSettings(allow=web.allow), web.url("/user")).content


def test_redirects_are_followed_so_far_and_no_further(web: Site) -> None:
    web.pages["/0"] = Answer(b"arrived")
    for n in range(1, MAX_REDIRECTS + 2):
        web.redirect(f"/{n}", f"{n - 1}")
    settings = WebSettings(allow=web.allow)
    result = fetch(settings, web.url(f"/{MAX_REDIRECTS}"))
    assert result.content == f"URL: {web.url('/0')}\n\narrived"
    late = fetch(settings, web.url(f"/{MAX_REDIRECTS + 1}"))
    assert late.is_error
    assert "more than 5 redirects" in late.content


def test_cookies_last_as_long_as_one_fetch(web: Site) -> None:
    web.pages["/in"] = Answer(b"", None, 302, {"Location": "/page", "Set-Cookie": "seen=1"})
    web.pages["/page"] = lambda visit: Answer(visit.headers.get("Cookie", "none").encode())
    with site("localhost") as named:  # cookies are not kept for addresses
        named.pages = web.pages
        settings = WebSettings(allow=("localhost",))
        assert text_of(fetch(settings, named.url("/in"))) == "seen=1"
        assert text_of(fetch(settings, named.url("/page"))) == "none"


class Turning(AbstractResolver):
    """Gives another address each time it is asked, as an attacker's name server does; or none."""

    def __init__(self, *addresses: str) -> None:
        self.asked: list[str] = []
        self._addresses = itertools.cycle(addresses)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        self.asked.append(host)
        address = next(self._addresses, None)
        if address is None:
            raise OSError(socket.EAI_NONAME, "no such name")
        return [
            ResolveResult(
                hostname=host, host=address, port=port, family=socket.AF_INET, proto=0, flags=0
            )
        ]

    async def close(self) -> None:
        pass


def test_a_name_that_turns_to_loopback_is_refused(web: Site) -> None:
    resolver = Turning("127.0.0.1")
    with pytest.raises(ToolError, match="not at a public address"):
        asyncio.run(download(f"http://innocent.test:{web.port}/", WebSettings(), resolver=resolver))
    assert web.visits == []


def test_the_address_that_was_judged_is_the_one_connected_to(web: Site) -> None:
    """The name leads to the permitted address once; where it leads later does not count."""
    other = "127.0.0.3"
    resolver = Turning("127.0.0.1", other)
    web.pages["/"] = lambda visit: Answer(visit.headers["Host"].encode())
    settings = WebSettings(allow=("127.0.0.1/32",))
    url = f"http://turning.test:{web.port}/"
    got = asyncio.run(download(url, settings, resolver=resolver))
    assert got.body == f"turning.test:{web.port}".encode()
    assert resolver.asked == ["turning.test"]
    with pytest.raises(ToolError, match="not at a public address"):
        asyncio.run(download(url, settings, resolver=resolver))
    assert len(web.visits) == 1


def test_a_redirect_resolves_its_host_again(web: Site) -> None:
    resolver = Turning("127.0.0.1", "127.0.0.3")
    web.redirect("/", "/secret")
    with pytest.raises(ToolError, match="not at a public address"):
        asyncio.run(
            download(
                f"http://turning.test:{web.port}/",
                WebSettings(allow=("127.0.0.1/32",)),
                resolver=resolver,
            )
        )
    assert [visit.path for visit in web.visits] == ["/"]


def endless_gzip() -> Iterator[bytes]:
    """A gzip stream that never ends: a kilobyte of it is a megabyte of zeros."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    head = packer.compress(b"\0") + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    yield head
    while True:
        yield block


@pytest.mark.parametrize(
    ("pieces", "encoding"),
    [(endless_gzip(), "gzip"), (itertools.repeat(bytes(1 << 20)), "identity")],
)
def test_a_bomb_is_stopped_early(web: Site, pieces: Iterator[bytes], encoding: str) -> None:
    web.pages["/"] = Answer(pieces, headers={"Content-Encoding": encoding})
    settings = WebSettings(allow=web.allow, timeout_s=60)
    fetch(settings, web.url("/none"))  # what is loaded once is no part of what a bomb costs
    tracemalloc.start()
    result = fetch(settings, web.url())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert f"the page is larger than {5 * 1024 * 1024} bytes" in result.content
    assert peak < 32 * 1024 * 1024


def test_a_page_that_never_ends_is_given_up(web: Site) -> None:
    released = iter(lambda: b"x", b"")

    def drip(visit: Visit) -> Answer:
        return Answer(itertools.islice(released, 1), headers={"Content-Length": "100"})

    stuck = socket.create_server(("127.0.0.1", 0))
    port = stuck.getsockname()[1]
    with stuck:
        result = fetch(
            WebSettings(allow=("127.0.0.1",), timeout_s=0.2), f"http://127.0.0.1:{port}/"
        )
    assert result.content.endswith(f"http://127.0.0.1:{port}/: not loaded within 0.2 s")
    web.pages["/"] = drip
    assert "ClientPayloadError" in fetch(WebSettings(allow=web.allow), web.url()).content


def test_failures_have_a_readable_message(web: Site) -> None:
    settings = WebSettings(allow=("127.0.0.1",))
    assert fetch(settings, web.url("/none")).content.endswith("/none: HTTP 404 Not Found")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nobody listens, and nobody else gets the port
        result = fetch(settings, f"http://127.0.0.1:{silent.getsockname()[1]}/")
    assert result.content.endswith("cannot connect to its host")
    with pytest.raises(ToolError, match="its host has no known address"):
        asyncio.run(download("http://no.test/", settings, resolver=Turning()))
    tls = fetch(settings, f"https://127.0.0.1:{web.port}/")
    assert tls.is_error


@needs_extra
def test_an_agent_obeys_its_web_settings(web: Site, tmp_path: Path) -> None:
    web.pages["/"] = Answer(b"forty-two")
    script = [calls(planned("web_fetch", url=web.url())), say("done")]
    for allow, content in [(web.allow, "forty-two"), ((), "not at a public address")]:
        agent = AIAgent(
            "scripted",
            enabled_toolsets="web",
            script=script,
            web=WebSettings(allow=allow, cache_dir=tmp_path / f"cache{len(allow)}"),
        )
        result = agent.run_conversation("What does it say?")
        assert content in result["messages"][-2]["content"]


@pytest.mark.parametrize(
    "element",
    [
        "<p>",
        *(
            pytest.param(element, marks=pytest.mark.slow)
            for element in ("<a href=x>", "<em>x</em>", "<br>", "<h1>x</h1>")
        ),
    ],
)
def test_a_page_of_very_many_elements_does_not_hold_a_worker(element: str) -> None:
    """Its main part is not looked for, which would take a minute and more."""
    body = b"<title>T</title><p>Hello.</p>" + element.encode() * (1_900_000 // len(element))
    began_at = time.process_time()
    page = read_page("http://x/", "text/html", None, body)
    assert time.process_time() - began_at < 8
    assert page.title == "T"
    assert page.text.startswith("Hello.")
