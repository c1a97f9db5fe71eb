"""Who is answered: tokens and cookies, other sites, other names of this machine, paths."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.view.serving import read_password
from tests.helpers.running import PATIENCE_S, ROOT
from tests.view.serving import Viewer, viewing

LABEL = {"id": "endless#s1", "note": "from elsewhere"}


def cookie_of(viewer: Viewer) -> str:
    """The cookie that the printed address gives."""
    answer = viewer.ask("/", token=viewer.token, is_known=False)
    assert (answer.status, answer.headers["Location"]) == (303, "/")
    given = answer.headers["Set-Cookie"]
    assert "HttpOnly" in given
    assert "SameSite=Strict" in given
    return given.partition(";")[0]


def test_only_the_token_or_its_cookie_is_answered(viewer: Viewer) -> None:
    assert viewer.ask("/api/runs", is_known=False).status == 401
    assert viewer.ask("/api/runs", is_known=False, token=viewer.token).status == 401
    assert viewer.ask("/", token="guess", is_known=False).status == 401
    with_cookie = {"Cookie": cookie_of(viewer)}
    assert viewer.ask("/api/runs", is_known=False, headers=with_cookie).status == 200
    cookie = cookie_of(viewer)
    wrong = {"Cookie": cookie[:-1] + ("A" if cookie.endswith("_") else "_")}
    assert viewer.ask("/api/runs", is_known=False, headers=wrong).status == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "null"},
        {"Origin": "http://[::1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
    ids=str,
)
def test_a_page_of_another_origin_gets_nothing_even_with_the_cookie(
    viewer: Viewer, headers: dict[str, str]
) -> None:
    """Browsers send the cookie to all ports of a host."""
    given = {"Cookie": cookie_of(viewer), **headers}
    for path, body in (("/api/runs", None), ("/api/runs/r/labels", LABEL)):
        answer = viewer.ask(path, body, is_known=False, headers=given)
        assert answer.status == 403
        assert "Access-Control-Allow-Origin" not in answer.headers
    assert viewer.get("/runs/r/rows", label="note")["matching"] == 0


def test_a_form_of_another_site_changes_nothing(viewer: Viewer) -> None:
    given = {"Cookie": cookie_of(viewer), "Content-Type": "text/plain"}
    assert viewer.ask("/api/runs/r/labels", LABEL, is_known=False, headers=given).status == 415
    assert viewer.get("/runs/r/rows", label="note")["matching"] == 0


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_a_name_that_was_bound_to_this_machine_is_refused(viewer: Viewer, host: str) -> None:
    answer = viewer.ask("/api/runs", headers={"Host": host})
    assert answer.status in (400, 403)
    assert viewer.ask("/api/runs", headers={"Host": "localhost:9"}).status == 200


def test_no_key_or_name_leads_out_of_the_places(viewer: Viewer, runs: Path) -> None:
    (runs.parent / "secret.js").write_text("secret")
    for key in ("..", ".", "../..", str(runs / "r"), "r/../r", "r\0", "%2e%2e"):
        assert viewer.ask(f"/api/runs/{quote(key, safe='')}").status in (400, 404)
    for name in ("../../server.py", "%2e%2e/guard.py", "..%2f..%2fguard.py", "/etc/passwd"):
        answer = viewer.ask(f"/static/{name}")
        assert answer.status == 404


def test_all_answers_have_the_policy(viewer: Viewer) -> None:
    for path in ("/", "/api/runs", "/api/nothing"):
        headers = viewer.ask(path).headers
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_an_address_beyond_loopback_needs_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("0.0.0.0", "::", "10.1.2.3", "example.org"):
        with pytest.raises(ConfigError, match="password_env"):
            read_password(host, None)
    assert read_password("127.0.0.1", None) is None
    monkeypatch.setenv("VIEW_PASSWORD", "short")
    with pytest.raises(ConfigError, match="12"):
        read_password("0.0.0.0", "VIEW_PASSWORD")
    monkeypatch.setenv("VIEW_PASSWORD", "long enough, this")
    assert read_password("0.0.0.0", "VIEW_PASSWORD") == "long enough, this"


def test_with_a_password_the_token_is_worth_nothing(runs: Path) -> None:
    with viewing(runs, password="long enough, this") as viewer:
        refused = viewer.ask("/api/runs")
        assert (refused.status, refused.body["login"]) == (401, True)
        assert viewer.ask("/", token=viewer.token).status == 401
        assert viewer.ask("/api/login", {"password": "guess"}).status == 401
        answer = viewer.ask("/api/login", {"password": "long enough, this"})
        given = {"Cookie": answer.headers["Set-Cookie"].partition(";")[0]}
        assert viewer.ask("/api/runs", headers=given).status == 200


MALFORMED = (
    b"GARBAGE\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"POST /api/login HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /api/login HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\n"
    b"Content-Length: 5\r\n\r\nabcde",
    b"GET http://[bad/ HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nCookie: \xff\x01\r\n\r\n",
)


@pytest.mark.slow
def test_malformed_requests_print_nothing_and_an_interrupt_ends_in_a_sentence(runs: Path) -> None:
    """In the terminal of the command; the sentence of runs would be wrong here."""
    with subprocess.Popen(
        [sys.executable, ROOT / "batch_runner.py", "view", runs],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().split(":")[2].split("/")[0])
            for raw in MALFORMED:
                with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as peer:
                    peer.sendall(raw)
                    assert b" 400 " in peer.recv(100) or b"gzip" in raw
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=PATIENCE_S)[1]
        finally:
            process.kill()
    assert said == "open this address; Ctrl-C ends it\nview has ended; the runs are as they were\n"
    assert process.returncode == 128 + signal.SIGINT
