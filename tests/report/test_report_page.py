"""The report page in a browser: it is read from disk, by mouse and by keyboard, and asks nobody."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import orjson
import pytest

from batch_trajectories.api.stored_run import StoredRun
from batch_trajectories.report.page.writer import embedded, write_report
from tests.audit.planting import audit, plain_row
from tests.export.test_cache_use import COLD, GROWS, growing, warm
from tests.helpers.exporting import make_run
from tests.helpers.running import SCRIPTED, lines, run, write_rows
from tests.report.test_report import HOSTILE_ID, ROWS, Scripts

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

pytestmark = pytest.mark.browser

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
MANY = 120


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra `browser`")
    if CHROMIUM is None:
        pytest.skip("needs a Chromium in PATH (Debian: apt install chromium)")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("page")
    script = [{"content": "Yes."}]
    more = [{"id": f"p{n:03}", "prompt": f"Question {n}", "script": script} for n in range(MANY)]
    write_rows(cwd / "p.jsonl", *ROWS, *more)
    done = run(cwd, **SCRIPTED, max_turns=3, repeat_limit=9)
    assert done.returncode == 0, done.stderr
    return cwd / "trajectories" / "r"


@pytest.fixture(scope="module")
def report(run_dir: Path) -> Path:
    """All in one file, under a name that an address has to escape."""
    return write_report(StoredRun(run_dir), run_dir / "one #1?.html").path


@pytest.fixture(scope="module")
def large_report(run_dir: Path) -> Path:
    """The same with its data beside it."""
    return write_report(StoredRun(run_dir), run_dir / "many #1?.html", inline_bytes=0).path


@pytest.fixture(scope="module")
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    context.set_default_timeout(10_000)
    yield context
    context.close()


@contextmanager
def opened(context: BrowserContext, report: Path) -> Iterator[Page]:
    """The opened report; at the end it must have complained of nothing and asked nobody."""
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(dialog.message))
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    page.goto(report.as_uri())
    page.wait_for_selector("html[data-ready]", state="attached")
    yield page
    assert complaints == []
    here = quote(str(report.parent))
    assert all(address.startswith(f"file://{here}/") for address in urls)
    assert page.evaluate("window.pwned") is None
    page.close()


@pytest.fixture
def page(context: BrowserContext, report: Path) -> Iterator[Page]:
    with opened(context, report) as page:
        yield page


@pytest.fixture
def large_page(context: BrowserContext, large_report: Path) -> Iterator[Page]:
    with opened(context, large_report) as page:
        yield page


def shown_ids(page: Page) -> list[str]:
    return [text or "" for text in page.locator("#rows a").all_text_contents()]


def test_only_the_rows_in_view_are_drawn(page: Page) -> None:
    assert page.locator("#found").text_content() == f"{MANY + 3} shown"
    assert len(shown_ids(page)) < 60
    page.locator("#scroller").evaluate("element => { element.scrollTop = 1e9 }")
    last = page.locator(f'#rows tr[aria-rowindex="{MANY + 4}"]')
    last.wait_for()
    assert len(shown_ids(page)) < 60


@pytest.mark.parametrize("width", [1000, 1200, 1600])
def test_no_number_is_cut(context: BrowserContext, report: Path, width: int) -> None:
    longest = {"Turns": "1,000", "Calls": "100 10 failed", "In": "123M", "Out": "12.3k"}
    longest |= {"Cost": "$0.000042", "Time": "59 min 59 s"}
    with opened(context, report) as page:
        page.set_viewport_size({"width": width, "height": 800})
        heads = page.locator("#heads th").all_text_contents()
        cells = page.locator("#rows tr:not(.gap)").first.locator("td")
        for head, text in longest.items():
            cell = cells.nth(heads.index(head))
            cell.evaluate("(cell, text) => cell.replaceChildren(text)", text)
            assert cell.evaluate("cell => cell.clientWidth - cell.scrollWidth") >= 0, head


def test_the_funnel_leads_from_rows_to_training_rows(page: Page, run_dir: Path) -> None:
    steps = StoredRun(run_dir).funnel()
    lines = [
        re.sub(r"\s+", " ", text).strip()
        for text in page.locator("#funnel-table tr").all_inner_texts()
    ]
    rows, tasks, completed = steps["steps"]
    assert lines[0] == f"rows {rows['count']}"
    assert f"tasks {tasks['count']}" in lines
    for reason, count in tasks["lost"].items():
        assert f"{count} left out: {reason}" in lines
    assert f"completed {completed['count']}" in lines
    assert not any(line.startswith("passed") for line in lines), "nothing was checked or scored"
    (training,) = steps["exports"]
    assert f"exported {training['rows']} rows of hermes in r.jsonl" in "\n".join(lines)
    assert training["lost"]
    for reason, count in training["lost"].items():
        assert f"{count} left out: {reason}" in lines


def test_filters_and_charts_narrow_the_table(page: Page) -> None:
    page.select_option("#by-status", "max_turns")
    assert shown_ids(page) == ["endless"]
    assert page.locator("#tiles dd").first.text_content() == f"1of {MANY + 3} tasks"
    page.click("text=Clear")
    page.select_option("#by-flag", "failed calls")
    assert set(shown_ids(page)) == {"plain", visible(HOSTILE_ID)}
    page.click("text=Clear")
    page.get_by_role("button", name="Filter by list_files").click()
    assert shown_ids(page) == ["endless"]
    assert page.input_value("#by-tool") == "list_files"


def test_search_takes_all_words(page: Page) -> None:
    page.keyboard.press("/")
    page.keyboard.type("QUESTION p09")
    page.locator("#found", has_text=f"10 of {MANY + 3} shown").wait_for()
    assert sorted(shown_ids(page)) == [f"p{n:03}" for n in range(90, 100)]
    page.keyboard.press("Escape")
    assert page.locator("#found").text_content() == f"{MANY + 3} shown"


@pytest.mark.parametrize("opened_at", ["", "#p003"])
def test_the_search_has_the_focus_when_its_key_is_handled(page: Page, opened_at: str) -> None:
    """Later, a browser with much to do would lose what is typed."""
    page.evaluate("place => { location.hash = place }", opened_at)
    if opened_at:
        page.locator("#reader-title").wait_for()
    focused = page.evaluate(
        """() => {
            document.dispatchEvent(new KeyboardEvent("keydown", { key: "/", bubbles: true }));
            return document.activeElement.id;
        }"""
    )
    assert focused == "query"
    assert page.locator("#list").is_visible()


def test_columns_sort_both_ways_and_back(page: Page) -> None:
    before = shown_ids(page)
    heads = page.get_by_role("columnheader", name="Turns")
    heads.get_by_role("button").click()
    assert heads.get_attribute("aria-sort") == "descending"
    assert shown_ids(page)[0] in ("endless", visible(HOSTILE_ID))
    heads.get_by_role("button").click()
    assert heads.get_attribute("aria-sort") == "ascending"
    assert shown_ids(page)[0].startswith("p")
    heads.get_by_role("button").click()
    assert shown_ids(page) == before


def test_keys_lead_through_the_table_and_a_conversation(page: Page) -> None:
    ids = shown_ids(page)
    for key in ("j", "j", "ArrowDown", "k"):
        page.keyboard.press(key)
    page.keyboard.press("Enter")
    page.wait_for_selector("#reader .messages")
    assert title_of(page) == ids[1]
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.className") == "message user"
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.dataset.turn") == "1"
    page.keyboard.press("k")
    assert page.evaluate("document.activeElement.className") == "message user"
    page.keyboard.press("ArrowRight")
    wait_for_title(page, ids[2])
    page.keyboard.press("ArrowLeft")
    wait_for_title(page, ids[1])
    page.keyboard.press("Escape")
    page.wait_for_selector("#list:not([hidden])")
    assert page.evaluate("document.activeElement.textContent") == ids[1]
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#help").is_visible()


def edited(report: Path, name: str, change: Callable[[Any], None]) -> Path:
    """A copy of a report with other data in the script element `name`."""
    head, start, rest = report.read_text().partition(f'id="{name}">')
    data, end, tail = rest.partition("</script>")
    parsed = orjson.loads(data)
    change(parsed)
    copy = report.with_name(f"edited {name}.html")
    copy.write_bytes(
        f"{head}{start}".encode() + embedded(orjson.dumps(parsed)) + f"{end}{tail}".encode()
    )
    return copy


RESULTS = {
    '{"exit_code": 12345678901234567890, "out": "one\\ntwo", "more": {"x": 1.0}}': (
        'exit_code12345678901234567890outone\ntwomore{\n  "x": 1.0\n}'
    ),
    '[1, {"a": null}]': '[\n  1,\n  {\n    "a": null\n  }\n]',
    "12345678901234567890": "12345678901234567890",
    "{not json}": "{not json}",
    "{}": "{}",
}


def test_a_result_that_is_json_is_shown_by_name(context: BrowserContext, report: Path) -> None:
    """Texts as texts, numbers as they were written; other results stay as they are."""

    def change(records: Any) -> None:
        (plain,) = (record for record in records if record["id"] == "plain")
        before, reply, result, *after = plain["messages"]
        calls = [{**reply["tool_calls"][0], "id": f"c{n}"} for n in range(len(RESULTS))]
        results = [
            {**result, "tool_call_id": f"c{n}", "content": text} for n, text in enumerate(RESULTS)
        ]
        plain["messages"] = [before, {**reply, "tool_calls": calls}, *results, *after]

    with opened(context, edited(report, "records-data", change)) as page:
        go_to(page, "plain")
        assert page.locator(".call .result").all_text_contents() == list(RESULTS.values())


def test_no_label_of_a_chart_is_cut(context: BrowserContext, report: Path) -> None:
    """As of a run of 20,000 rows with long names of tools."""
    place = Scripts(report.read_text()).json("meta-data")["columns"].index("tools")

    def change(rows: Any) -> None:
        rows[0][place] = {"search_and_replace_in_files": [20000, 12345], "wwwwwwwwww": [9999, 9998]}

    with opened(context, edited(report, "rows-data", change)) as page:
        assert "20K, 12.3K failed" in page.locator("#charts").inner_text()
        cut = page.locator("#charts svg text").evaluate_all(
            """texts => texts.filter(text => {
              const view = text.ownerSVGElement.getBoundingClientRect();
              const box = text.getBoundingClientRect();
              return box.left < view.left - 0.5 || box.right > view.right + 0.5;
            }).map(text => text.textContent)"""
        )
        assert cut == []


def test_a_conversation_shows_all_that_was_said(page: Page) -> None:
    """Calls stand beside their results, errors are marked, reasoning unfolds."""
    go_to(page, "plain")
    call = page.locator(".call.is-error")
    assert call.locator("h4 code").text_content() == "read_file"
    assert call.locator(".arguments dd").text_content() == "missing.txt"
    assert "missing.txt" in (call.locator(".result").text_content() or "")
    facts = page.locator("article[data-turn='2'] h3 .soft").text_content() or ""
    assert re.fullmatch(r"0 in · 0 out · \$0 · \d+ ms · stop", facts)
    assert not page.get_by_text("It is empty.").is_visible()
    page.keyboard.press("t")
    page.get_by_text("It is empty.").wait_for()
    page.keyboard.press("e")
    assert page.evaluate("document.activeElement.className") == "call is-error"


def test_data_files_beside_the_page_are_loaded_on_demand(large_page: Page) -> None:
    """Rows and a conversation come out of the files; the conversation as text too."""
    page = large_page
    assert page.locator("#found").text_content() == f"{MANY + 3} shown"
    go_to(page, HOSTILE_ID)
    text = page.locator("#reader").text_content() or ""
    assert "</pre></ScRiPt\n> answer" in text
    assert page.locator("#reader :is(img, script, b)").count() == 0


def test_the_training_row_marks_what_carries_loss(page: Page) -> None:
    go_to(page, "plain")
    page.keyboard.press("l")
    turns = page.locator("details.training section")
    turns.first.wait_for()
    kinds = turns.evaluate_all("all => all.map(one => one.className)")
    assert kinds == ["context", "context", "loss", "context", "loss"]
    last = turns.last.locator(".text").text_content()
    assert last == "<think>\nIt is empty.\n</think>\nNothing there."
    summary = page.locator("details.training > summary").text_content() or ""
    assert re.fullmatch(
        r"training row, in the training file: loss on \d+ of [\d,]+ characters", summary
    )
    page.keyboard.press("l")
    assert not turns.first.is_visible()
    go_to(page, HOSTILE_ID)
    wait_for_title(page, visible(HOSTILE_ID))
    page.locator("details.training > summary", has_text="no training row: ").wait_for()


def test_turns_that_the_dataset_masks_are_not_marked(
    context: BrowserContext, run_dir: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    (tmp_path / "masks.py").write_text(
        "def first(record):\n    return [n == 0 and '<b>' for n in range(len(record['turns']))]\n"
    )
    recipe.write_text(f"formats: [openai]\nmask: {{function: '{tmp_path}/masks.py:first'}}\n")
    masked = shutil.copytree(run_dir, tmp_path / "trajectories" / "r")
    run(tmp_path, "export", "r", recipe=recipe)
    report = write_report(StoredRun(masked)).path
    with opened(context, report) as page:
        assert "function: <b>" in (page.locator("#funnel-table").text_content() or "")
        go_to(page, "plain")
        page.keyboard.press("l")
        turns = page.locator("details.training section")
        turns.first.wait_for()
        kinds = turns.evaluate_all("all => all.map(one => one.className)")
        assert kinds == ["context", "context", "context", "context", "loss"]
        title = turns.nth(2).locator("h5").text_content()
        assert title == "gpt · masked in the dataset: function: <b>"
        summary = page.locator("details.training > summary").text_content() or ""
        assert summary.endswith("; the dataset masks 1 turn")


def test_rows_are_found_by_where_they_were_exported_to(page: Page) -> None:
    page.select_option("#by-flag", "a partial row")
    assert shown_ids(page) == ["endless"]
    page.select_option("#by-flag", "no row: rejected")
    assert shown_ids(page) == [visible(HOSTILE_ID)]


def test_a_run_without_checks_has_no_place_for_them(page: Page) -> None:
    names = page.locator("#tiles dt, #charts b, #heads button").all_text_contents()
    assert not {"Passed", "Checks", "Rewards", "Check"} & set(names)
    page.goto(f"{page.url.partition('#')[0]}#plain")
    facts = page.locator("#reader dl.facts dt").all_inner_texts()
    assert "toolsets" in facts
    assert "check" not in facts


def test_checks_and_rewards_are_shown_and_can_be_filtered(
    context: BrowserContext, tmp_path: Path
) -> None:
    """In a tile, two charts, a column to sort by, and the filters."""
    rewards = {"bad": 0.25, "good": 1, "none": None}
    script = [{"content": "Yes."}]
    rows: list[dict[str, Any]] = [
        {"id": name, "prompt": name, "script": script} for name in rewards
    ]
    for row, reward in zip(rows, rewards.values(), strict=True):
        if reward is not None:
            row["check"] = f"echo '{{\"reward\": {reward}}}'; test {reward} = 1"
    write_rows(tmp_path / "p.jsonl", *rows)
    done = run(tmp_path, "--row_setup", **{**SCRIPTED, "sandbox": "local"})
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / "trajectories" / "r"
    with opened(context, write_report(StoredRun(run_dir), run_dir / "report.html").path) as page:
        tile = page.locator("#tiles div", has_text="Passed").locator("dd")
        assert tile.text_content() == "50%1 of 2 checked or scored, mean reward 0.625"
        assert page.locator("#charts b", has_text="Rewards").count() == 1
        page.get_by_role("button", name="Check", exact=True).click()
        assert shown_ids(page) == ["good", "bad", "none"]
        names = page.locator("#heads th").all_text_contents()
        [position] = [n for n, name in enumerate(names, start=1) if name.startswith("Check")]
        cells = page.locator(f"#rows tr:not(.gap) td:nth-child({position})").all_text_contents()
        assert cells == ["✓ 1", "✗ 0.25", ""]
        page.get_by_role("button", name="Filter by not passed: 1").click()
        assert shown_ids(page) == ["bad"]
        assert page.input_value("#by-flag") == "not passed"
        page.select_option("#by-flag", "not checked or scored")
        assert shown_ids(page) == ["none"]
        page.select_option("#by-flag", "passed")
        page.click("text=good")
        assert "passed, reward 1" in (page.locator("#reader dl").first.text_content() or "")


def test_groups_rewards_by_name_and_judges_are_shown(
    context: BrowserContext, tmp_path: Path
) -> None:
    """In tiles, rewards also in the facts of a conversation."""
    row = {"id": "p", "prompt": "x", "script": [{"content": "Yes."}]}
    row["check"] = 'echo \'{"reward": 1, "style": 0.25}\''
    write_rows(tmp_path / "p.jsonl", row)
    done = run(tmp_path, "--row_setup", **{**SCRIPTED, "sandbox": "local", "num_samples": 2})
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / "trajectories" / "r"
    paid = [{"key": "k", "reply": "yes", "cost_usd": cost, "at": 1} for cost in (2.5, None)]
    content = b"".join(orjson.dumps(line) + b"\n" for line in paid)
    (run_dir / "verdicts.jsonl").write_bytes(content)
    with opened(context, write_report(StoredRun(run_dir), run_dir / "report.html").path) as page:
        tiles = page.locator("#tiles div").all_text_contents()
        assert "Judges$2.50for scores, unknown for 1" in tiles, tiles
        assert "Mean style0.252 in all, std 0; within 1 prompt 0, 1 all equal" in tiles
        assert "pass@2100%pass@1 100%" in tiles
        page.locator("#rows tr:not(.gap) a").first.click()
        assert "rewardsreward 1, style 0.25" in (
            page.locator("#reader dl").first.text_content() or ""
        )


def test_raw_json_is_the_record(page: Page, run_dir: Path) -> None:
    go_to(page, "endless")
    page.keyboard.press("r")
    raw = page.locator("details.raw pre")
    raw.wait_for()
    (record,) = (line for line in lines(run_dir / "records.jsonl") if line["id"] == "endless")
    assert page.evaluate("text => JSON.parse(text)", raw.text_content()) == as_numbers(record)


def test_hostile_texts_stay_texts(page: Page) -> None:
    """No markup, no escape code, no turned direction; not in names, ids, arguments or results."""
    go_to(page, HOSTILE_ID)
    for fold in page.locator("#reader details").all():
        fold.evaluate("fold => { fold.open = true }")
        fold.locator(":scope > summary + *").wait_for()
    text = page.locator("#reader").text_content() or ""
    for part in ("prompt", "thought", "said", "inline", "answer"):
        assert f"</pre></ScRiPt\n> {part}" in text, part
    assert "⟨U+001B⟩[31mred⟨U+001B⟩]0;title⟨U+0007⟩ ⟨U+202E⟩back" in text
    assert text.count("window.pwned = 1") >= 7
    assert page.locator("#reader :is(img, script, b)").count() == 0
    assert "__proto__" in (page.locator(".call dt").all_text_contents())
    assert page.evaluate("({}).polluted") is None


def test_a_link_leads_to_a_turn(context: BrowserContext, report: Path) -> None:
    page = context.new_page()
    page.goto(f"{report.as_uri()}#plain/2")
    page.wait_for_selector("article[data-turn='2']:focus")
    page.goto(f"{report.as_uri()}#nobody")
    page.get_by_text("There is no trajectory nobody in this report.").wait_for()
    page.close()


def test_files_of_another_report_are_noticed(
    context: BrowserContext, run_dir: Path, tmp_path: Path
) -> None:
    write_report(StoredRun(run_dir), tmp_path / "page.html", inline_bytes=0)
    old = (tmp_path / "page.html").read_bytes()
    write_report(StoredRun(run_dir), tmp_path / "page.html", inline_bytes=0)
    (tmp_path / "page.html").write_bytes(old)
    page = context.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    page.get_by_text("belong to a later report").wait_for()
    shutil.rmtree(tmp_path / "page_files")
    page.goto((tmp_path / "page.html").as_uri())
    page.get_by_text("Cannot read page_files/rows.js").wait_for()
    page.close()


COUNT_LINES = """element => {
  const range = document.createRange();
  range.selectNodeContents(element);
  return range.getClientRects().length;
}"""


def test_the_page_fits_a_small_screen(browser: Browser, report: Path) -> None:
    """Neither table nor conversation is wider than the screen, no number or name of the funnel is
    broken into lines, and the dark is dark."""
    context = browser.new_context(viewport={"width": 360, "height": 640}, color_scheme="dark")
    page = context.new_page()
    for place in ("", "#endless", f"#{quote(HOSTILE_ID, safe='')}"):
        page.goto(f"{report.as_uri()}{place}")
        page.wait_for_selector("html[data-ready]", state="attached")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        if not place:
            cells = page.locator("#funnel-table .number, #funnel-table th").all()
            assert len(cells) > 5
            assert max(word.evaluate(COUNT_LINES) for word in cells) == 1
        texts = page.locator("article .text").all()
        assert all(text.evaluate("e => e.scrollWidth <= e.clientWidth") for text in texts)
    back = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert back == "rgb(20, 23, 27)"
    context.close()


def test_the_page_can_be_looked_at(browser: Browser, report: Path, tmp_path: Path) -> None:
    """Pictures for people, light and dark; SCREENSHOTS names a directory that keeps them."""
    directory = Path(os.environ.get("SCREENSHOTS", tmp_path))
    directory.mkdir(parents=True, exist_ok=True)
    for scheme in ("light", "dark"):
        context = browser.new_context(viewport={"width": 1200, "height": 1000}, color_scheme=scheme)
        page = context.new_page()
        for place in ("", "#plain", f"#{quote(HOSTILE_ID, safe='')}"):
            page.goto(f"{report.as_uri()}{place}")
            page.wait_for_selector("html[data-ready]", state="attached")
            if place:
                page.keyboard.press("l")
            name = {"": "table", "#plain": "conversation"}.get(place, "hostile")
            picture = directory / f"report-{name}-{scheme}.png"
            page.screenshot(path=picture)
            assert picture.stat().st_size > 10_000
        context.close()


def visible(text: str) -> str:
    return text.replace("\x1b", "⟨U+001B⟩")


def title_of(page: Page) -> str:
    return (page.locator("#reader-title").text_content() or "").rpartition(" ")[0]


def wait_for_title(page: Page, title: str) -> None:
    page.locator("#reader-title", has_text=title).wait_for()


def go_to(page: Page, record_id: str) -> None:
    page.evaluate("hash => { location.hash = hash }", quote(record_id, safe=""))
    page.wait_for_selector("#reader .messages")


def as_numbers(value: Any) -> Any:
    """As a script reads JSON: 1.0 is 1."""
    if isinstance(value, dict):
        return {key: as_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def test_tasks_of_an_audit_are_filtered_by_verdict_and_evidence(
    context: BrowserContext, tmp_path: Path
) -> None:
    given = "It must read\ndef add(a, b):\n    return a + b\n"
    tasks = [
        plain_row("fine"),
        plain_row("leaking", prompt=given),
        plain_row("empty", check="true", prompt=given),
    ]
    write_rows(tmp_path / "p.jsonl", *tasks)
    code, said = audit(tmp_path, repeats=1)
    assert code == 1, said
    run_dir = tmp_path / "trajectories" / "audit"
    with opened(context, write_report(StoredRun(run_dir), run_dir / "report.html").path) as page:
        assert shown_ids(page) == ["fine", "leaking", "empty"]
        page.get_by_role("button", name="Filter by sound: 1").click()
        assert shown_ids(page) == ["fine"]
        page.click("text=Clear")
        page.select_option("#by-flag", "leaks_fix")
        assert shown_ids(page) == ["leaking", "empty"]
        page.select_option("#by-tool", "untouched")
        assert shown_ids(page) == ["empty"]
        page.click("text=Clear")
        page.fill("#query", "prompt has")
        page.locator("#found", has_text="1 of 3 shown").wait_for()
        page.click("text=leaking")
        page.locator("#reader .is-error").wait_for()
        (evidence,) = page.locator("#reader .is-error").all_text_contents()
        assert "the prompt has the solution" in evidence
        tampered = page.locator("#reader .call", has_text="tamper startup").text_content() or ""
        assert "sitecustomize.py" in tampered
        assert "AssertionError" in tampered


def test_prompt_caches_are_shown_by_endpoint_turn_and_conversation(
    context: BrowserContext, tmp_path: Path
) -> None:
    usage = {"input_tokens": GROWS * 55, "output_tokens": 500}
    cold = growing(COLD, usage={**usage, "cache_read_tokens": sum(COLD)}, status="completed")
    kept = growing(warm(10), usage={**usage, "cache_read_tokens": sum(warm(10))})
    source = make_run(tmp_path, *[cold] * 3, kept)
    identity = orjson.loads((source.run_dir / "run.json").read_bytes())
    identity["dataset"] |= {"rows": 4, "bad_rows": 0}
    (source.run_dir / "run.json").write_bytes(orjson.dumps({**identity, "run_name": "r"}))
    report = write_report(StoredRun(source.run_dir), tmp_path / "caches.html").path
    with opened(context, report) as page:
        problem = page.locator("#health-table tr", has_text="cache_misses").inner_text()
        assert "24 of 36" in problem
        page.locator("#caches summary").click()
        (line,) = page.locator("#caches-table tbody tr").all_inner_texts()
        cells = [cell.strip() for cell in line.split("\t")]
        assert cells[:1] == ["m at http://here/v1"]
        assert cells[-2:] == ["24 of 36", "396K"]
        assert page.locator("#caches-turns").inner_text().startswith("By turn: 1: 0.0%, 2: ")
        page.get_by_role("button", name="Cached").click()
        cached = page.locator("#rows tr:not(.gap)", has_text="t3").locator("td", has_text="81.8%")
        assert cached.evaluate("cell => cell.clientWidth - cell.scrollWidth") >= 0
        missed = page.locator("#rows td", has_text="✗8")
        assert missed.first.evaluate("cell => cell.clientWidth - cell.scrollWidth") >= 0
        page.select_option("#by-flag", "a cache miss")
        page.wait_for_function("document.getElementById('found').textContent === '3 of 4 shown'")
        page.locator("#rows a").first.click()
        tags = page.locator("article .tag", has_text="missed the cache")
        assert tags.count() == 8
        assert (
            "1.8% of the tokens in, missed by 8 turns" in page.locator(".facts").first.inner_text()
        )
