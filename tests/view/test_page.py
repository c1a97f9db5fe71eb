"""The page of `view` in a browser, against a real server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from batch_trajectories.dataset.scan import scan
from batch_trajectories.export.dataset.runs import Source
from batch_trajectories.export.statistics.health import HEALTH_CHECKS
from batch_trajectories.report.page.frame import read_part
from tests.audit.planting import audit, plain_row
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.helpers.exporting import rows
from tests.helpers.running import (
    SCRIPTED,
    command,
    lines,
    run,
    started,
    wait_until,
    write_prompts,
    write_rows,
)
from tests.view.page_runs import PAYLOADS, make_hostile, make_kinds, make_pairs, make_rich

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

pytestmark = pytest.mark.browser

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
AXE = Path(os.environ.get("AXE_CORE", ".ci/axe/node_modules/axe-core/axe.min.js"))
PATIENCE_MS = 120_000
SCHEMES = ("light", "dark")
PHONE, WIDE = {"width": 390, "height": 844}, {"width": 1920, "height": 1080}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra `browser`")
    if CHROMIUM is None:
        pytest.skip("needs a Chromium in PATH (Debian: apt install chromium)")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM)
        yield chromium
        chromium.close()


@contextmanager
def server_of(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The address of a server for the runs in a folder, and its process."""
    process = subprocess.Popen(
        command("view", folder, who="ann"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().decode().strip(), process
    finally:
        process.terminate()
        process.communicate(timeout=60)


@contextmanager
def serve_runs(folder: Path) -> Iterator[str]:
    """The address of such a server."""
    with server_of(folder) as (address, _):
        yield address


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("view")
    make_rich(folder)
    make_hostile(folder)
    make_pairs(folder, 100)
    make_kinds(folder)
    return folder


@pytest.fixture(scope="module")
def address(browser: Browser, folder: Path) -> Iterator[str]:
    with serve_runs(folder) as address:
        yield address


@contextmanager
def open_page(browser: Browser, address: str, place: str, **options: Any) -> Iterator[Page]:
    """The opened page; at the end it must have complained of nothing, and asked only its server."""
    context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **options})
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(dialog.message))
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    page.goto(address)
    go(page, place)
    yield page
    # The browser writes down a server that is gone, that what is in flight has no record yet, and a
    # run that cannot be read.
    own = re.compile(r"status of 40[49]|net::ERR_(CONNECTION_REFUSED|INCOMPLETE_CHUNKED_ENCODING)")
    assert [text for text in complaints if not own.search(text)] == []
    here = address.partition("?")[0]
    assert all(url.startswith(here) for url in urls)
    assert page.evaluate("window.pwned ?? parent.pwned ?? ({}).pwned") is None
    context.close()


def go(page: Page, place: str) -> None:
    page.wait_for_selector("html[data-ready]", state="attached")
    page.evaluate("hash => { location.hash = hash }", place)


def charts(page: Page) -> None:
    """Go to the tab with the charts."""
    page.get_by_role("tab", name="Charts").click()


def conversations(page: Page) -> None:
    """Go to the tab with the table."""
    page.get_by_role("tab", name="Conversations").click()


def ids(page: Page) -> list[str]:
    return [text or "" for text in page.locator("#rows a").all_text_contents()]


def read(page: Page, run: str, id: str) -> None:
    """Go to a conversation."""
    go(page, f"#{run}/{quote(id, safe='')}")
    page.locator("#reader-title", has_text=re.compile(f"^{re.escape(id)} ")).wait_for()


def source_of(run_dir: Path, samples: int) -> Source:
    dataset = run_dir.with_name(f"{run_dir.name}_prompts.jsonl")
    return Source(run_dir, scan(dataset, max_samples=None, num_samples=samples), samples)


ALL_SHOWN = re.compile("^12 shown")


def test_runs_are_listed_and_compared_by_keyboard(browser: Browser, address: str) -> None:
    with open_page(browser, address, "#") as page:
        page.locator("#runs-rows a").first.wait_for()
        names = page.locator("#runs-rows th a").all_text_contents()
        assert sorted(names) == ["hostile", "kinds", "pairs", "rich"]
        for key in ("j", "x", "j", "x", "c"):
            page.keyboard.press(key)
        page.locator("#compare table.sums").wait_for()
        heads = page.locator("#compare table.sums thead th").all_text_contents()
        assert heads == names[:2]


@pytest.mark.slow
def test_a_run_that_is_not_there_shows_no_other(browser: Browser, address: str) -> None:
    with open_page(browser, address, "#rich") as page:
        page.locator("#rows a").first.wait_for()
        go(page, "#none")
        page.locator("#trouble", has_text="no such run").wait_for()
        page.locator("#runs-rows a").first.wait_for()
        assert page.locator("#rows").is_hidden()
        page.locator("#runs-rows").get_by_role("link", name="rich").click()
        page.locator("#rows a").first.wait_for()


@pytest.mark.slow
def test_a_server_that_is_gone_is_named(browser: Browser, folder: Path) -> None:
    with (
        server_of(folder) as (address, process),
        open_page(browser, address, "#") as page,
    ):
        page.locator("#runs-rows a").first.wait_for()
        process.kill()
        page.locator("#trouble", has_text="does not answer").wait_for()


def test_words_that_were_cleared_do_not_come_back(browser: Browser, address: str) -> None:
    """The search waits for 120 ms without a key; what is done meanwhile counts from then on."""
    clear = """() => {
      const type = (text) => {
        document.querySelector("#query").value = text;
        document.querySelector("#query").dispatchEvent(new Event("input", { bubbles: true }));
      };
      type("nothing has this");
      document.querySelector("#filters").reset();
      return document.querySelector("#query").value;
    }"""
    tick = """() => {
      document.querySelector("#query").value = "";
      document.querySelector("#query").dispatchEvent(new Event("input", { bubbles: true }));
      document.querySelector("#by-inside").click();
      return document.querySelector("#query").value;
    }"""
    pick = """(bar) => {
      document.querySelector("#query").value = "";
      document.querySelector("#query").dispatchEvent(new Event("input", { bubbles: true }));
      bar.dispatchEvent(new MouseEvent("click", { bubbles: true }));
      return document.querySelector("#query").value;
    }"""
    with open_page(browser, address, "#rich") as page:
        page.locator("#found", has_text=ALL_SHOWN).wait_for()
        page.fill("#query", "t1#s1")
        page.locator("#found", has_text="1 of 12 shown").wait_for()
        charts(page)
        assert page.get_by_role("button", name="Filter by not passed: 1").evaluate(pick) == ""
        page.locator("#found", has_text="6 of 12 shown").wait_for()
        page.wait_for_timeout(300)
        assert page.input_value("#query") == ""
        page.get_by_role("button", name="Clear").click()
        page.locator("#found", has_text=ALL_SHOWN).wait_for()
        page.fill("#query", "nothing has this")
        page.locator("#found", has_text="0 of 12 shown").wait_for()
        assert page.evaluate(tick) == ""
        page.locator("#found", has_text=ALL_SHOWN).wait_for()
        assert page.evaluate(clear) == ""
        page.wait_for_timeout(300)
        assert page.input_value("#query") == ""


def test_filters_are_of_the_server_and_charts_follow(browser: Browser, address: str) -> None:
    with open_page(browser, address, "#rich") as page:
        page.locator("#found", has_text="12 shown").wait_for()
        charts(page)
        page.get_by_role("button", name="Filter by not passed: 6").click()
        page.locator("#found", has_text="6 of 12 shown").wait_for()
        page.locator("#tiles dd", has_text=re.compile("^6$")).first.wait_for()
        conversations(page)
        assert ids(page) == [f"t{n}#s1" for n in range(6)]
        page.get_by_role("button", name="Clear").click()
        page.locator("#found", has_text=ALL_SHOWN).wait_for()  # the next count is the same again
        page.locator("#more-filters").click()
        page.fill("#by-where", "turns > 5")
        page.keyboard.press("Enter")
        page.locator("#found", has_text="6 of 12 shown").wait_for()
        assert ids(page) == [f"t{n}" for n in range(6)]
        page.fill("#by-where", "mood = good")
        page.keyboard.press("Enter")
        page.get_by_text('There is no column "mood"').wait_for()
        page.get_by_role("button", name="Clear").click()
        page.check("#by-inside")
        page.fill("#query", "primes.py::test_one")
        page.locator("#found", has_text=re.compile("^[06] of 12 shown")).wait_for()
        page.get_by_role("button", name="Clear").click()
        page.get_by_role("button", name="Turns", exact=True).click()
        page.locator('#heads th[aria-sort="descending"]').wait_for()
        page.locator("#rows tr[data-place='0'] a", has_text=re.compile(r"^t\d$")).wait_for()


def test_a_conversation_shows_results_as_what_they_are(browser: Browser, address: str) -> None:
    with open_page(browser, address, "#") as page:
        read(page, "rich", "t0")
        turn = page.locator("#reader > .messages > article")
        assert page.locator(".diff .added").all_text_contents()[-1].startswith("+    return n > 1")
        tables = page.locator(".as-table table")
        assert tables.count() == 2
        assert tables.first.locator("td").all_text_contents()[:3] == [
            "Oslo",
            "717710",
            "cold, nice",
        ]
        page.locator(".as-table button").first.click()
        assert tables.count() == 1
        page.locator(".tree summary", has_text="step 3: 2 keys").click()
        page.locator(".tree .tree summary", has_text="lines: 2 items").wait_for()
        page.get_by_text("output of the check").click()
        page.locator("details.check dd", has_text="3 passed").wait_for()
        assert "900 in · 60 out" in (turn.nth(2).text_content() or "")
        page.get_by_text("request of this turn: 4 messages, those above").click()
        page.locator("details.request article", has_text="How many primes").wait_for()


def test_colours_are_drawn_and_binary_data_is_folded(browser: Browser, address: str) -> None:
    """The text with its escapes is a click away; a long list is drawn in parts."""
    with open_page(browser, address, "#") as page:
        read(page, "kinds", "t0")
        coloured = page.locator("pre", has_text="test_a.py")
        assert coloured.text_content() == "starts\ntest_a.py .F\nblue"
        for colour, text in (("bold", "starts"), ("green", "."), ("red", "F"), ("blue", "blue")):
            assert coloured.locator(f".ansi-{colour}").all_text_contents() == [text]
        page.get_by_role("button", name="as text").first.click()
        page.get_by_text("⟨U+001B⟩[32m.").wait_for()
        binary = page.locator("details.binary")
        assert binary.locator("summary").text_content() == "binary data, 360 characters"
        assert "⟨U+0000⟩" not in page.locator("#reader").inner_text()
        binary.locator("summary").click()
        binary.get_by_text("⟨U+0000⟩").wait_for()
        tree = page.locator(".tree > li")
        assert tree.first.inner_text() == "0: 2 keys · n 0"
        assert tree.count() == 25
        page.get_by_role("button", name="476 more").click()
        assert tree.count() == 97
        assert page.evaluate("document.activeElement.textContent") == "24: 2 keys · n 24"


def test_pictures_are_drawn_and_no_address_is_asked_for(browser: Browser, address: str) -> None:
    """Those that are stored, as pixels; what is no picture of pixels is named."""
    with open_page(browser, address, "#") as page:
        read(page, "kinds", "t0")
        asked, shown = page.locator("article.user img"), page.locator(".call img")
        for picture in (asked, shown):
            picture.wait_for()
            assert picture.evaluate("one => one.decode().then(() => one.naturalWidth)") == 1
        words = page.locator("article.user .pictures p").all_text_contents()
        assert words == [
            "not loaded: https://example.com/a.png",
            "a file, not shown: image/svg+xml",
            "a picture or file that an earlier message has",
        ]


def test_a_turn_of_a_long_conversation_is_shown_and_stays(browser: Browser, address: str) -> None:
    """Of 500 turns: by a link, and by keys; while it is read, the page says so."""
    with open_page(browser, address, "#") as page:
        read(page, "kinds", "t0")
        page.route(
            "**/record?id=t1*",
            lambda route: page.wait_for_timeout(800) or route.continue_(),
            times=1,
        )
        go(page, "#kinds/t1/400")
        page.locator("#reader", has_text="Reading t1 …").wait_for()
        turn = page.locator("#reader article[data-turn='400']")
        turn.wait_for()
        places = [place_of(turn)]
        for _ in range(4):
            page.wait_for_timeout(150)
            places.append(place_of(turn))
        assert len(set(places)) == 1, places
        for number in range(401, 411):
            page.keyboard.press("j")
            assert page.evaluate("document.activeElement.dataset.turn") == str(number)
            at = page.evaluate("document.activeElement.getBoundingClientRect().top")
            assert abs(at - places[0]) <= 2


def place_of(element: Any) -> int:
    return int(element.bounding_box()["y"])


def test_samples_stand_side_by_side(browser: Browser, address: str) -> None:
    with open_page(browser, address, "#") as page:
        read(page, "rich", "t0")
        page.locator("#siblings tr", has_text="t0#s1").wait_for()
        page.keyboard.press("s")
        page.locator("#pair").wait_for()
        assert not page.locator("#reader > aside").is_visible()
        assert page.locator("#pair article.parts").evaluate_all(
            "all => all.map(one => one.dataset.turn)"
        ) == ["2", "2"]
        page.keyboard.press("s")
        page.locator("#pair").wait_for(state="detached")


def test_decisions_are_labels_and_can_be_undone(
    browser: Browser, address: str, folder: Path
) -> None:
    labels = folder / "rich" / "labels.jsonl"
    with open_page(browser, address, "#") as page:
        read(page, "rich", "t1")
        said = page.locator("#decide-words")
        page.keyboard.press("1")
        said.get_by_text("decided: keep").wait_for()
        page.keyboard.press("j")
        page.keyboard.press("j")
        page.keyboard.press("j")
        page.keyboard.press("x")
        said.get_by_text("no loss on turn 1").wait_for()
        page.keyboard.press("m")
        page.keyboard.type("short, and right")
        page.keyboard.press("Enter")
        said.get_by_text("note kept").wait_for()
        page.fill("#who", "bob")
        page.keyboard.press("Tab")
        page.locator(".labels", has_text="ann: ").wait_for()
        page.locator("body").click(position={"x": 2, "y": 2})
        page.keyboard.press("2")
        page.locator(".labels", has_text="they differ").wait_for()
        page.keyboard.press("u")
        said.get_by_text("undone: decided: reject").wait_for()
        page.locator(".labels", has_text="they differ").wait_for(state="detached")
        shown = page.locator(".labels li").all_inner_texts()
        assert shown == ["ann: ✓ keep · no loss on 1 · “short, and right”"]
    told = [(line["who"], line.get("verdict", "-")) for line in lines(labels)]
    assert told == [
        ("ann", "keep"),
        ("ann", "-"),
        ("ann", "-"),
        ("bob", "reject"),
        ("bob", None),
    ]


def test_a_note_is_written_on_where_the_cursor_is_when_an_answer_comes(
    browser: Browser, address: str
) -> None:
    with open_page(browser, address, "#") as page:
        read(page, "rich", "t4")
        held: list[Route] = []
        page.route("**/labels", lambda route: held.append(route))
        page.keyboard.press("1")
        page.keyboard.press("m")
        page.keyboard.type("short right")
        for _ in "right":
            page.keyboard.press("ArrowLeft")
        # Answered here, so that other tests find no label of this one.
        take_route(page, held).fulfill(json={"labels": [], "verdict": None, "before": {}})
        page.locator("#decide-words").get_by_text("decided: keep").wait_for()
        page.keyboard.type("and ")
        assert page.input_value("#note") == "short and right"
        assert not held, "half a note is not saved"
        with page.expect_request("**/labels") as asked:
            page.keyboard.press("Enter")
        assert asked.value.post_data_json["note"] == "short and right"
        take_route(page, held).fulfill(json={"labels": [], "verdict": None, "before": {}})
        page.locator("#decide-words").get_by_text("note kept").wait_for()


def take_route(page: Page, held: list[Route]) -> Route:
    """Wait for a request that is held: Playwright tells of it before its handler runs."""
    while not held:
        page.wait_for_timeout(10)
    return held.pop()


@pytest.mark.slow
def test_a_review_by_keyboard_alone_ends_as_training_data(
    browser: Browser, address: str, folder: Path
) -> None:
    """Of 200 conversations, two samples of each prompt: the files hold what was decided."""
    with open_page(browser, address, "#pairs") as page:
        page.locator("#found", has_text="200 shown").wait_for()
        page.keyboard.press("n")
        kept, pairs = [], []
        for number in range(200):
            prompt, sample = divmod(number, 2)
            id = f"t{prompt}" + ("#s1" if sample else "")
            page.locator("#reader-title", has_text=re.compile(f"^{id} ")).wait_for()
            key = "1" if number % 3 == 0 else "2" if number % 3 == 1 else "3"
            page.keyboard.press(key)
            page.locator(
                f'#decide button[aria-keyshortcuts="{key}"][aria-pressed="true"]'
            ).wait_for()
            if key == "1":
                kept.append(id)
            if sample == 0 and prompt % 4 == 0:
                page.locator("#siblings tr", has_text="#s1").wait_for()
                page.keyboard.press("4" if prompt % 8 == 0 else "5")
                page.locator("#decide-words", has_text="is better than").wait_for()
                pairs.append(
                    (
                        f"Answer {number + (prompt % 8 != 0)}.",
                        f"Answer {number + (prompt % 8 == 0)}.",
                    )
                )
            page.keyboard.press("n")
        page.locator("#decide-words", has_text="left undecided").wait_for()
    source = source_of(folder / "pairs", 2)
    sft = rows(source, "openai", filters={"label": "keep"})
    assert sorted(row["id"] for row in sft) == sorted(kept)
    dpo = rows(source, "dpo", preference={"by": "label"})
    made = [
        tuple(
            row[side][-1]["content"][-len(a) :]
            for side, a in zip(("chosen", "rejected"), pair, strict=True)
        )
        for row, pair in zip(dpo, pairs, strict=True)
    ]
    assert made == pairs


@pytest.mark.slow
def test_hostile_texts_stay_texts(browser: Browser, address: str) -> None:
    """In the table, filters, conversation, request and samples; each fold is unfolded."""
    with open_page(browser, address, "#hostile") as page:
        page.locator("#found", has_text=f"{len(PAYLOADS)} shown").wait_for()
        for number, text in enumerate(PAYLOADS):
            read(page, "hostile", f"t{number}")
            for _ in range(2):
                page.locator("#reader details").evaluate_all(
                    "all => all.forEach(one => { one.open = true })"
                )
            page.locator("#reader details.request .inner").first.wait_for()
            made = "img, script, iframe, form, style, b, a[href^='javascript'], [onload], [onerror]"
            assert page.locator(f"#reader :is({made})").count() == 0
            shown = page.locator("#reader").text_content() or ""
            assert not set("\x1b\u202e\u2066\x07") & set(shown)
            assert visible(text[:200]) in shown
            assert page.evaluate("document.documentElement.scrollWidth") <= 1200


def visible(text: str) -> str:
    return re.sub(r"[\x1b\x07\u202a\u202e\u2066\u200f]", lambda c: f"⟨U+{ord(c[0]):04X}⟩", text)


def test_a_run_that_works_moves_and_is_steered(browser: Browser, tmp_path: Path) -> None:
    """It is paused and resumed, one conversation is stopped, and its end is seen as it comes."""
    write_prompts(tmp_path / "p.jsonl", 6)
    with FakeEndpoint(turns=3, latency_s=0.0, answers=6) as endpoint:
        given: dict[str, Any] = {
            "dataset_file": "p.jsonl",
            "run_name": "r",
            "base_url": endpoint.openai_url,
            "key_env": "none",
            "num_workers": 1,
            "batch_size": 6,
            "model": "openai:m",
            "enabled_toolsets": "none",
        }
        with (
            started(tmp_path, **given) as process,
            serve_runs(tmp_path / "trajectories") as address,
        ):
            wait_until(lambda: int(endpoint.journal()["requests"]) >= 12)
            with open_page(browser, address, "#r") as page:
                answer, filters = page.locator("#steer-answer"), page.locator("#filters")
                page.locator("#flight-count", has_text="6").wait_for()
                top = place_of(filters)
                page.locator("#pause").click()
                answer.get_by_text("paused").wait_for()
                assert place_of(filters) == top, "an answer moves nothing"
                page.locator("#pause", has_text="Resume").wait_for()
                page.locator("#pause").click()
                page.locator("#pause", has_text="Pause").wait_for()
                page.locator("#limits-fold > summary").click()
                page.fill("#limit-max_in_flight", "2")
                page.locator("#limits button").click()
                answer.get_by_text("max_in_flight 2 until").wait_for()
                page.locator("#flight > summary").click()
                page.get_by_role("button", name="stop p0005").click()
                answer.get_by_text("p0005").wait_for()
                assert place_of(filters) == top, "nor does the list of what is in flight"
                go(page, "#r/p0000")
                page.locator("#live", has_text="waiting for the model").wait_for()
                assert page.locator(".verdict-head").inner_text().startswith("Question number 0")
                page.locator("article[data-turn='1']").wait_for()
                assert "undefined" not in page.locator("#reader").inner_text()
                assert page.locator(".turn-mark").count() == 0
                endpoint.answer(None)
                page.locator("#decide").wait_for()
                assert page.locator("#live").count() == 0
                page.keyboard.press("Escape")
                page.locator("#run-state").wait_for(state="hidden")
                assert place_of(filters) == top, "nor does the end of the run"
                page.keyboard.press("g")
                page.locator("#runs-rows td", has_text="1 failed").wait_for()
            assert process.wait(60) == 1


PLACES = {
    "runs": "#",
    "run": "#rich",
    "charts": "#rich?tab=charts",
    "details": "#rich?tab=details",
    "conversation": "#rich/t0",
    "kinds": "#kinds/t0",
    "hostile": "#hostile/t11",
    "comparison": "#=compare/rich/pairs",
}


def wait_until_drawn(page: Page, name: str) -> None:
    """Wait until a place is drawn, and open what it can show."""
    waits = {
        "runs": "#runs-rows a",
        "run": "#rows a",
        "charts": "#charts figure",
        "details": "#funnel",
        "conversation": "#siblings tr",
        "kinds": "#reader img",
        "hostile": "#reader article",
        "comparison": "#compare table",
    }
    page.locator(waits[name]).first.wait_for()
    if name == "conversation":
        page.keyboard.press("s")
        page.locator("#pair").wait_for()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_stands_in_the_way_of_screen_readers(
    browser: Browser, address: str, scheme: str
) -> None:
    if not AXE.exists():
        pytest.skip(f"needs axe-core: npm install --prefix .ci/axe axe-core ({AXE})")
    for view in (PHONE, WIDE):
        with open_page(browser, address, "#", color_scheme=scheme, viewport=view) as page:
            page.evaluate(AXE.read_text())
            for name, place in PLACES.items():
                go(page, place)
                wait_until_drawn(page, name)
                check(page, name)
                if name == "conversation":
                    page.keyboard.press("s")
                    page.locator("#reader details").evaluate_all(
                        "all => all.forEach(one => { one.open = true })"
                    )
                    page.locator("#reader details.request .inner").first.wait_for()
                    page.keyboard.press("1")
                    page.locator(".labels").wait_for()
                    check(page, "unfolded")
                    page.keyboard.press("u")
            page.keyboard.press("?")
            check(page, "keys")


def check(page: Page, name: str) -> None:
    found = page.evaluate("axe.run()")
    said = [
        (rule["id"], [node["target"] for node in rule["nodes"]][:4], rule["nodes"][0]["any"][:1])
        for rule in found["violations"]
    ]
    assert said == [], name


@pytest.mark.slow
def test_the_page_fits_a_phone_and_a_wide_screen(
    browser: Browser, address: str, tmp_path: Path
) -> None:
    """Pictures for people; SCREENSHOTS names a directory that keeps them."""
    directory = Path(os.environ.get("SCREENSHOTS", tmp_path))
    directory.mkdir(parents=True, exist_ok=True)
    for scheme in SCHEMES:
        for kind, view in (("phone", PHONE), ("wide", WIDE)):
            with open_page(browser, address, "#", color_scheme=scheme, viewport=view) as page:
                for name, place in PLACES.items():
                    go(page, place)
                    wait_until_drawn(page, name)
                    assert page.evaluate("document.documentElement.scrollWidth") <= view["width"]
                    picture = directory / f"view-{name}-{kind}-{scheme}.png"
                    page.screenshot(path=picture)
                    assert picture.stat().st_size > 8_000


def test_a_page_without_its_token_says_what_to_do(browser: Browser, address: str) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(address.partition("?")[0])
    page.locator("#no-token h2", has_text="This address lacks its token").wait_for()
    said = page.locator("#no-token").inner_text()
    assert f"{address.partition('?')[0]}?token=…" in said
    assert "prints a new token" in said
    assert page.locator("#trouble").is_hidden()
    assert page.locator("#runs").is_hidden()
    context.close()


def test_the_page_says_what_it_reads_and_nothing_moves(browser: Browser, address: str) -> None:
    """Until the rows come the places are as high as with them."""
    with open_page(browser, address, "#") as page:
        page.locator("#runs-rows a").first.wait_for()
        page.route(
            "**/api/runs/rich",
            lambda route: page.wait_for_timeout(800) or route.continue_(),
            times=1,
        )
        go(page, "#rich")
        page.locator("#sentence", has_text="Reading rich …").wait_for()
        before = page.locator("#tabs").bounding_box()
        page.locator("#rows a").first.wait_for()
        after = page.locator("#tabs").bounding_box()
        assert before is not None
        assert after is not None
        assert abs(before["y"] - after["y"]) <= 4
        assert page.locator("#sentence").text_content() == "12 conversations, 6 passed"


def test_runs_are_listed_with_their_worth_and_audits_apart(
    browser: Browser, folder: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    for name in ("rich", "tasks"):
        shutil.copytree(folder / "rich", runs / name)
        path = runs / name / "run.json"
        identity = json.loads(path.read_text())
        if name == "tasks":
            identity["config"]["audit"] = True
            verdicts = ["sound", "sound", "flaky", "no_check", "flaky", "sound"]
            tasks = [{"id": f"t{n}", "verdict": verdict} for n, verdict in enumerate(verdicts)]
            write_rows(runs / name / "tasks.jsonl", *tasks)
        path.write_text(json.dumps({**identity, "run_name": name}))
    with serve_runs(runs) as address, open_page(browser, address, "#") as page:
        page.locator("#runs-rows a").first.wait_for()
        heads = page.locator("#runs thead").first.locator("th").all_text_contents()
        wanted = ["Run", "Model", "Rows", "State", "Passed", "Training rows", "Cost", "Age"]
        assert heads[1:] == wanted
        assert page.locator("#runs-rows th a").all_text_contents() == ["rich"]
        assert page.locator("#audits-rows th a").all_text_contents() == ["tasks"]
        cells = page.locator("#runs-rows td").all_inner_texts()
        assert cells[2] == "6\n2 samples each"
        assert cells[5] == "–", "nothing was exported yet"
        page.keyboard.press("j")
        page.keyboard.press("j")
        assert page.evaluate("document.activeElement.textContent") == "tasks"
        page.keyboard.press("Enter")
        page.locator("#sentence", has_text="6 tasks audited, 3 sound").wait_for()
        names = page.locator("#numbers dt").all_text_contents()
        assert names == ["Tasks", "Sound", "Steps", "Against their task", "Time"]
        problem = page.locator("#problems.bad li").inner_text()
        assert problem.startswith("3 tasks with a defect")
        assert "2 flaky, 1 no_check; `report tasks` shows each" in problem
        page.keyboard.press("g")
        sound = page.locator("#audits-rows td[data-name='Sound']", has_text="3")
        sound.wait_for()
        assert sound.inner_text() == "3\n50%"


def test_problems_are_said_in_words_and_in_few_on_a_phone(browser: Browser, address: str) -> None:
    """No name of a check, in the list or above the table."""
    with open_page(browser, address, "#", viewport=PHONE) as page:
        row = page.locator("#runs-rows tr", has=page.get_by_role("link", name="rich"))
        row.locator(".problems", has_text="12 of 12 without token counts").wait_for()
        assert "no_tokens" not in page.locator("#runs").inner_text()
        go(page, "#rich")
        page.locator("#rows a").first.wait_for()
        line = page.locator("#problems li[data-name='no_tokens']")
        assert line.inner_text().replace("\n", " ").startswith("12 of 12 without token counts such")
        page.set_viewport_size(WIDE)
        assert "12 of 12 conversations have replies but no output tokens" in line.inner_text()
        assert "no_tokens:" not in line.inner_text()


def test_every_health_check_has_few_words() -> None:
    page = read_part("overview.js")
    words = page[page.index("const SHORT_PROBLEMS") : page.index("const shortProblem")]
    assert re.findall(r"(\w+): \"", words) == [*HEALTH_CHECKS]


def test_a_cascade_names_its_models_in_order(
    browser: Browser, folder: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(folder / "rich", runs / "rich")
    path = runs / "rich" / "run.json"
    identity = json.loads(path.read_text())
    identity["config"] |= {"model": None, "models": ["small", "large"], "escalate_after": 1}
    path.write_text(json.dumps(identity))
    with serve_runs(runs) as address, open_page(browser, address, "#") as page:
        page.locator("#runs-rows td.model", has_text="small → large").wait_for()


def test_a_run_that_is_partly_read_says_so(browser: Browser, address: str) -> None:
    """What is counted of some records is not said of the run."""

    def half(route: Route) -> None:
        answer = route.fetch()
        said = answer.json()
        said["index"] |= {"is_complete": False, "bytes": said["index"]["of_bytes"] // 2}
        route.fulfill(response=answer, json=said)

    with open_page(browser, address, "#") as page:
        page.locator("#runs-rows a").first.wait_for()
        page.route("**/api/runs/rich", half)
        page.route("**/api/events*", lambda route: route.fulfill(status=204))
        go(page, "#rich")
        page.locator("#found", has_text="12 shown, 50% read").wait_for()
        time = page.locator("#numbers div", has_text="Time")
        assert time.locator("dd").inner_text() == "–"
        page.unroute_all(behavior="wait")


@pytest.mark.parametrize("most_height", [15_000_000, 3_000])
def test_the_row_in_view_stays_when_others_come_before_it(
    browser: Browser, folder: Path, tmp_path: Path, most_height: int
) -> None:
    """Also where rows are so many that a pixel of the table is several of them."""
    runs = tmp_path / "runs"
    shutil.copytree(folder / "pairs", runs / "pairs")
    records = runs / "pairs" / "records.jsonl"
    all_lines = records.read_bytes().splitlines(keepends=True)
    later = all_lines[1:80:2]  # the second samples of the first prompts
    records.write_bytes(b"".join(line for line in all_lines if line not in later))

    def lower(route: Route) -> None:
        answer = route.fetch()
        assert "MOST_HEIGHT = 15_000_000" in answer.text()
        body = answer.text().replace("15_000_000", str(most_height))
        route.fulfill(response=answer, body=body)

    in_view = """() => {
        const { left, bottom } = document.querySelector("#heads th").getBoundingClientRect();
        const row = document.elementFromPoint(left + 300, bottom + 4).closest("tr");
        return [row.querySelector("a")?.textContent, row.getBoundingClientRect().top];
    }"""
    with serve_runs(runs) as address, browser.new_context() as context:
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.route("**/static/page.js", lower)
        page.goto(address)
        go(page, "#pairs")
        page.locator("#found", has_text="160 shown").wait_for()
        page.evaluate("document.getElementById('scroller').scrollTop = 1500")
        page.wait_for_timeout(500)
        id, top = page.evaluate(in_view)
        assert id is not None
        with records.open("ab") as file:
            file.writelines(later)
        page.locator("#found", has_text="200 shown").wait_for()
        page.wait_for_timeout(500)
        assert page.evaluate(in_view) == [id, pytest.approx(top, abs=2)]
        page.unroute_all(behavior="wait")


def test_a_run_that_was_left_is_shown_with_its_rows_again(browser: Browser, address: str) -> None:
    with open_page(browser, address, "#rich") as page:
        page.locator("#found", has_text=ALL_SHOWN).wait_for()
        page.keyboard.press("g")
        page.locator("#runs-rows a").first.wait_for()
        go(page, "#rich")
        page.locator("#found", has_text=ALL_SHOWN).wait_for()


def test_a_run_that_writes_its_files_keeps_its_numbers(browser: Browser, tmp_path: Path) -> None:
    """A large one says none between its last conversation and its end."""
    rows = [{"id": f"q{n}", "prompt": "Go.", "script": [{"content": "yes"}]} for n in range(12)]
    write_rows(tmp_path / "p.jsonl", *rows)
    assert run(tmp_path, **SCRIPTED).returncode == 0
    with serve_runs(tmp_path / "trajectories") as address, open_page(browser, address, "#") as page:
        page.locator("#runs-rows a").first.wait_for()
        (said,) = page.evaluate("fetch('/api/runs').then(answer => answer.json())")["runs"]
        assert said["done"] == 12
        said |= dict.fromkeys(("tasks", "done", "failed")) | {"state": "running"}
        page.route(
            "**/api/events?run=r*",
            lambda route: route.fulfill(
                content_type="text/event-stream",
                body=f"event: run\ndata: {json.dumps(said)}\n\n",
            ),
        )
        go(page, "#r")
        page.locator("#state-line", has_text="all ended, writing its files").wait_for()
        assert page.locator("#sentence").text_content() == "12 conversations, 12 completed"
        page.unroute_all(behavior="wait")


def test_a_row_is_chosen_in_the_run_that_was_read_only(browser: Browser, address: str) -> None:
    with open_page(browser, address, "#") as page:
        read(page, "rich", "t2")
        page.keyboard.press("Escape")
        page.locator("#rows tr.selected", has_text="t2").wait_for()
        read(page, "rich", "t2")
        go(page, "#pairs")
        page.locator("#rows a", has_text="t5").first.wait_for()
        page.locator("#rows tr.selected").wait_for(state="detached")  # the other run has a t5, too


def test_runs_of_one_dataset_are_drawn_beside_each_other(browser: Browser, tmp_path: Path) -> None:
    """What share of each passed, the latest at the right; red where nothing did."""
    for name, right in (("first", 0), ("second", 9)):
        rows = [
            {
                "id": f"q{n}",
                "prompt": f"Say {n}",
                "expected": "yes",
                "script": [{"content": "yes" if n < right else "no"}],
            }
            for n in range(12)
        ]
        write_rows(tmp_path / "p.jsonl", *rows)
        given = {**SCRIPTED, "run_name": name}
        assert run(tmp_path, "--check_expected", **given).returncode == 0
    with serve_runs(tmp_path / "trajectories") as address, open_page(browser, address, "#") as page:
        figure = page.locator("#trends figure")
        figure.wait_for()
        assert "p.jsonl" in figure.inner_text()
        assert "0% → 75% passed" in figure.inner_text()
        row = page.locator("#runs-rows tr", has_text="first")
        assert "none passed" in row.inner_text()
        row.locator(".status.bad").wait_for()


def test_the_address_of_a_filtered_run_shows_the_same(browser: Browser, address: str) -> None:
    """Also filters that only a server has; samples stand together until columns are sorted."""
    with open_page(browser, address, "#rich") as page:
        page.locator("#found", has_text=ALL_SHOWN).wait_for()
        assert ids(page)[:3] == ["t0", "t0#s1", "t1"]
        assert page.locator("#rows .badge").first.text_content() == "1 of 2 passed"
        page.select_option("#by-flag", "passed")
        page.locator("#found", has_text="6 of 12 shown").wait_for()
        page.locator("#more-filters").click()
        page.fill("#by-where", "turns > 5")
        page.keyboard.press("Enter")
        page.wait_for_function("location.hash.includes('where=')")
        place = page.evaluate("location.hash")
    with open_page(browser, address, place) as page:
        page.locator("#found", has_text="6 of 12 shown").wait_for()
        assert page.input_value("#by-where") == "turns > 5"
        assert page.locator("#by-where").is_visible(), "a filter that works is seen"
        page.locator("#rows a").first.click()
        page.locator("#reader-title").wait_for()
        page.keyboard.press("Escape")
        page.locator("#found", has_text="6 of 12 shown").wait_for()


def test_steps_of_an_audit_have_names_and_say_what_they_show(
    browser: Browser, tmp_path: Path
) -> None:
    """A check that passes without any work is no success."""
    write_rows(tmp_path / "p.jsonl", plain_row("fine"), plain_row("empty", check="true"))
    code, said = audit(tmp_path, repeats=1)
    assert code == 1, said
    with serve_runs(tmp_path / "trajectories") as address, open_page(browser, address, "#") as page:
        go(page, "#audit")
        page.locator("#found", has_text="12 shown").wait_for()
        heads = page.locator("#heads th").all_inner_texts()
        assert heads == ["Verdict", "Task", "Step", "Result"]
        first = page.locator("#rows tr", has=page.get_by_role("link", name="empty", exact=True))
        assert "against its task" in first.inner_text()
        assert "untouched 1" in first.inner_text()
        assert "2 of 6 as expected" in first.inner_text()
        last = page.locator("#rows tr", has=page.get_by_role("link", name="fine#s5", exact=True))
        assert "tamper path" in last.inner_text()
        assert "failed: exit code 1: AssertionError" in last.inner_text()
        page.get_by_role("button", name="1 task with a defect").click()
        page.locator("#found", has_text="4 of 12 shown").wait_for()
        page.fill("#query", "startup")
        page.locator("#found", has_text="1 of 12 shown").wait_for()
        page.locator("#rows a").first.click()
        page.locator("#reader .call.is-error", has_text="sitecustomize.py").wait_for()
        page.locator("#siblings tr", has_text="reference 1").wait_for()
        assert page.locator("#siblings button").count() == 0, "no conversations to compare"
        assert page.locator("#decide").count() == 0, "no conversation to decide about"


def test_a_run_that_cannot_be_read_is_named_in_the_list(
    browser: Browser, folder: Path, tmp_path: Path
) -> None:
    """The page shows nothing of the run that was open before."""
    runs = tmp_path / "runs"
    for name in ("rich", "torn"):
        shutil.copytree(folder / "rich", runs / name)
    (runs / "torn" / "run.json").write_text("{")
    with serve_runs(runs) as address, open_page(browser, address, "#rich") as page:
        page.locator("#found", has_text=ALL_SHOWN).wait_for()
        go(page, "#torn")
        page.locator("#trouble", has_text="torn/run.json: cannot read it").wait_for()
        page.locator("#runs-rows .status.bad", has_text="unreadable").wait_for()
        assert page.locator("#crumb").count() == 0
        page.wait_for_timeout(1500)
        assert "cannot read it" in page.locator("#trouble").inner_text()


def test_a_damaged_record_is_a_problem_of_its_run(
    browser: Browser, folder: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(folder / "rich", runs / "rich")
    records = runs / "rich" / "records.jsonl"
    first, *others = records.read_bytes().splitlines(keepends=True)
    records.write_bytes(b"".join([b"[" + first[1:], *others]))
    with serve_runs(runs) as address, open_page(browser, address, "#rich") as page:
        page.locator("#found", has_text="11 shown").wait_for()
        problem = page.locator("#problems.bad li").first
        assert problem.inner_text().startswith("1 record cannot be read")
        assert "`verify rich` names it" in problem.inner_text()


def test_conversations_that_failed_lead_to_their_attempts(browser: Browser, tmp_path: Path) -> None:
    """A failed conversation has no row in the table."""
    asked = ["fault:none_such", "Question 1"]
    write_rows(tmp_path / "p.jsonl", *({"id": f"q{n}", "prompt": p} for n, p in enumerate(asked)))
    with FakeEndpoint(turns=1, latency_s=0.0) as endpoint:
        given = {"base_url": endpoint.openai_url, "key_env": "none", "model": "openai:m"}
        done = run(tmp_path, **{**SCRIPTED, **given, "enabled_toolsets": "none"})
    assert done.returncode == 1, done.stderr
    with (
        serve_runs(tmp_path / "trajectories") as address,
        open_page(browser, address, "#r") as page,
    ):
        page.get_by_role("button", name="1 conversation failed").click()
        page.locator("#errors-table", has_text="bad_request").wait_for()
        assert page.evaluate("document.activeElement.closest('#errors') !== null")


def test_what_drops_over_the_page_closes(browser: Browser, address: str) -> None:
    """Escape closes a panel and goes back to its button; a click elsewhere closes it as well."""
    with open_page(browser, address, "#rich") as page:
        page.locator("#found", has_text=ALL_SHOWN).wait_for()
        boxes = page.locator("#column-boxes")
        page.locator("#columns > summary").click()
        boxes.get_by_label("Turns").uncheck()
        assert boxes.is_visible(), "several can be chosen"
        page.keyboard.press("Escape")
        assert boxes.is_hidden()
        assert page.evaluate("document.activeElement.parentElement.id") == "columns"
        page.keyboard.press("Enter")
        assert boxes.is_visible()
        page.locator("#sentence").click()
        assert boxes.is_hidden()


@pytest.mark.parametrize("width", [1024, 1200, 1440])
def test_filters_stay_one_line_while_rows_are_read(
    browser: Browser, address: str, width: int
) -> None:
    view = {"width": width, "height": 900}
    with open_page(browser, address, "#rich", viewport=view) as page:
        page.locator("#found", has_text=ALL_SHOWN).wait_for()
        before = page.locator("#scroller").bounding_box()
        page.evaluate("found.textContent = '1,673 of 20,000 shown, 83.4% read'")
        assert page.locator("#scroller").bounding_box() == before
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_phone_shows_the_answer_of_each_sample(browser: Browser, address: str) -> None:
    with open_page(browser, address, "#pairs", viewport=PHONE) as page:
        page.locator("#found", has_text="200 shown").wait_for()
        rows = page.locator("#rows tr:not(.gap)")
        assert "→ Answer 1." in rows.nth(1).inner_text()


def test_runs_without_a_difference_are_said_to_have_none(
    browser: Browser, folder: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    for name in ("one", "other"):
        shutil.copytree(folder / "pairs", runs / name)
    with serve_runs(runs) as address, open_page(browser, address, "#=compare/one/other") as page:
        page.get_by_text("The same options, and no task ended differently.").wait_for()
        lines = page.locator("#compare .sums tbody th").all_inner_texts()
        assert "turns" in lines
        assert "mean reward" not in lines, "no run has one"
        assert "a task" not in page.locator("#compare .sums").inner_text()
