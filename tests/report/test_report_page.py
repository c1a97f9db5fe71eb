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
from batch_trajectories.report.page.writer import embed_json, write_report
from tests.audit.planting import audit, plain_row
from tests.export.test_cache_use import COLD, GROWS, growing, warm
from tests.helpers.exporting import make_run
from tests.helpers.running import SCRIPTED, lines, run, write_rows
from tests.program.test_user_tools import SCREEN, USER
from tests.program.test_user_tools import play as play_user
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
def open_report(context: BrowserContext, report: Path) -> Iterator[Page]:
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
    with open_report(context, report) as page:
        yield page


@pytest.fixture
def large_page(context: BrowserContext, large_report: Path) -> Iterator[Page]:
    with open_report(context, large_report) as page:
        yield page


def charts(page: Page) -> None:
    """Go to the tab with the charts, whose drawing a filter waits for."""
    page.get_by_role("tab", name="Charts").click()


def text_of(page: Page, selector: str) -> str:
    return page.locator(selector).text_content() or ""


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
    longest = {"Turns": "1,000", "Calls": "100 10 failed", "Time": "59 min 59 s"}
    longest |= {"Ended": "12-31 23:59:59"}
    with open_report(context, report) as page:
        page.set_viewport_size({"width": width, "height": 800})
        go_to_state(page, "columns=status id turns failed_calls duration_s finished_at")
        heads = page.locator("#heads th").all_text_contents()
        cells = page.locator("#rows tr:not(.gap)").first.locator("td")
        for head, text in longest.items():
            cell = cells.nth(heads.index(head))
            cell.evaluate("(cell, text) => cell.replaceChildren(text)", text)
            assert cell.evaluate("cell => cell.clientWidth - cell.scrollWidth") >= 0, head


def test_the_funnel_leads_from_rows_to_training_rows(page: Page, run_dir: Path) -> None:
    steps = StoredRun(run_dir).funnel()
    page.get_by_role("tab", name="Details").click()
    lines = [
        re.sub(r"\s+", " ", text).strip()
        for text in page.locator("#funnel-table tr").all_inner_texts()
    ]
    rows, tasks, completed = steps["steps"]
    assert lines[0] == f"rows {rows['count']}"
    assert f"tasks {tasks['count']}" in lines
    for reason, count in tasks["lost"].items():
        assert f"{count} of these: {reason}" in lines
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
    charts(page)
    assert page.locator("#tiles dd").first.text_content() == f"1of {MANY + 3} tasks"
    page.click("text=Clear")
    page.get_by_role("tab", name="Conversations").click()
    page.select_option("#by-flag", "failed calls")
    assert set(shown_ids(page)) == {"plain", visible(HOSTILE_ID)}
    page.click("text=Clear")
    charts(page)
    page.get_by_role("button", name="Filter by list_files").click()
    page.get_by_role("tab", name="Conversations").click()
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


def edit_report(report: Path, name: str, change: Callable[[Any], None]) -> Path:
    """A copy of a report with other data in the script element `name`."""
    head, start, rest = report.read_text().partition(f'id="{name}">')
    data, end, tail = rest.partition("</script>")
    parsed = orjson.loads(data)
    change(parsed)
    copy = report.with_name(f"edited {name}.html")
    copy.write_bytes(
        f"{head}{start}".encode() + embed_json(orjson.dumps(parsed)) + f"{end}{tail}".encode()
    )
    return copy


RESULTS = {
    '{"code": 12345678901234567890, "out": "one\\ntwo", "no": null, "more": {"x": 1.0}}': (
        'code12345678901234567890outone\ntwomore{\n  "x": 1.0\n}'
    ),
    '{"exit_code": 2, "stdout": "", "stderr": "not there"}': "stderrnot there",
    '{"exit_code": 0, "stdout": "3 passed", "stderr": ""}': "3 passed",
    '{"exit_code": 0, "stdout": "", "stderr": ""}': "no output",
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

    with open_report(context, edit_report(report, "records-data", change)) as page:
        go_to(page, "plain")
        assert page.locator(".call .result").all_text_contents() == list(RESULTS.values())
        codes = page.locator(".call h4 .badge")
        assert codes.all_text_contents() == ["exit 2", "exit 0", "exit 0"]
        assert "bad" in (codes.first.get_attribute("class") or "")


def test_no_label_of_a_chart_is_cut(context: BrowserContext, report: Path) -> None:
    """As of a run of 20,000 rows with long names of tools."""
    place = Scripts(report.read_text()).json("meta-data")["columns"].index("tools")

    def change(rows: Any) -> None:
        rows[0][place] = {"search_and_replace_in_files": [20000, 12345], "wwwwwwwwww": [9999, 9998]}

    with open_report(context, edit_report(report, "rows-data", change)) as page:
        charts(page)
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
    assert re.fullmatch(r"\d+ ms · stop", facts), "tokens and costs that are 0 are left out"
    page.get_by_text("It is empty.").wait_for()
    page.keyboard.press("t")
    page.keyboard.press("t")
    page.get_by_text("It is empty.").wait_for(state="hidden")
    page.keyboard.press("t")
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
    with open_report(context, report) as page:
        assert "function: <b>" in text_of(page, "#funnel-table")
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
    charts(page)
    shown = "#numbers dt, #tiles dt, #charts b, #heads button"
    names = page.locator(shown).all_text_contents()
    assert not {"Passed", "Checks", "Rewards", "Verdict", "Reward", "Expected"} & set(names)
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
    with open_report(
        context, write_report(StoredRun(run_dir), run_dir / "report.html").path
    ) as page:
        charts(page)
        tile = page.locator("#tiles div", has_text="Passed").locator("dd")
        assert tile.text_content() == "50%1 of 2 checked or scored, mean reward 0.625"
        assert page.locator("#charts b", has_text="Rewards").count() == 1
        page.get_by_role("tab", name="Conversations").click()
        page.get_by_role("button", name="Reward", exact=True).click()
        assert shown_ids(page) == ["good", "bad", "none"]
        names = page.locator("#heads th").all_text_contents()
        assert names[0] == "Verdict"
        [position] = [n for n, name in enumerate(names, start=1) if name.startswith("Reward")]
        cells = page.locator(f"#rows tr:not(.gap) td:nth-child({position})").all_text_contents()
        assert cells == ["1", "0.25", ""]
        verdicts = page.locator("#rows tr:not(.gap) td:first-child").all_text_contents()
        assert verdicts == ["✓ passed", "✗ not passed", "completed"]
        charts(page)
        page.get_by_role("button", name="Filter by not passed: 1").click()
        page.get_by_role("tab", name="Conversations").click()
        assert shown_ids(page) == ["bad"]
        assert page.input_value("#by-flag") == "not passed"
        page.select_option("#by-flag", "not checked or scored")
        assert shown_ids(page) == ["none"]
        page.select_option("#by-flag", "passed")
        page.locator("#rows a", has_text="good").click()
        assert "passed, reward 1" in text_of(page, "#reader aside dl")


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
    with open_report(
        context, write_report(StoredRun(run_dir), run_dir / "report.html").path
    ) as page:
        charts(page)
        tiles = page.locator("#tiles div").all_text_contents()
        assert "Judges$2.50for scores, unknown for 1" in tiles, tiles
        assert "Mean style0.252 in all, std 0; within 1 prompt 0, 1 all equal" in tiles
        assert "pass@2100%pass@1 100%" in tiles
        page.get_by_role("tab", name="Conversations").click()
        page.locator("#rows tr:not(.gap) a").first.click()
        assert "rewardsreward 1, style 0.25" in text_of(page, "#reader aside dl")


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
    page.get_by_text("There is no conversation nobody in this report.").wait_for()
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
            page.get_by_role("tab", name="Details").click()
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


def go_to_state(page: Page, state: str) -> None:
    """Open an address with what it says of the table."""
    page.evaluate("hash => { location.hash = hash }", f"?{state}")


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
        plain_row("broken", setup="exit 3"),
    ]
    write_rows(tmp_path / "p.jsonl", *tasks)
    code, said = audit(tmp_path, repeats=1)
    assert code == 1, said
    run_dir = tmp_path / "trajectories" / "audit"
    with open_report(
        context, write_report(StoredRun(run_dir), run_dir / "report.html").path
    ) as page:
        assert shown_ids(page) == ["fine", "leaking", "empty", "broken"]
        assert text_of(page, "#sentence") == "4 tasks audited, 1 sound"
        problem = page.locator("#problems.bad li")
        assert problem.inner_text().startswith("3 tasks with a defect")
        assert "1 setup_fails" in problem.inner_text()
        assert page.locator("#numbers dd").all_inner_texts() == ["4", "1\n25%", "3\n75%"]
        assert page.locator("#rows .badge").count() == 0, "steps are no samples"
        charts(page)
        page.get_by_role("button", name="Filter by sound: 1").click()
        page.get_by_role("tab", name="Tasks").click()
        assert shown_ids(page) == ["fine"]
        page.click("text=Clear")
        page.select_option("#by-flag", "leaks_fix")
        assert shown_ids(page) == ["leaking", "empty"]
        page.select_option("#by-tool", "untouched")
        assert shown_ids(page) == ["empty"]
        page.click("text=Clear")
        page.fill("#query", "prompt has")
        page.locator("#found", has_text="1 of 4 shown").wait_for()
        page.locator("#rows a", has_text="leaking").click()
        page.locator("#reader .is-error").wait_for()
        step, all_of_it = page.locator("#reader .call").first, page.locator("#reader")
        widths = [one.evaluate("one => one.clientWidth") for one in (step, all_of_it)]
        assert widths[0] > 0.9 * widths[1], "there are no facts beside it"
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
    with open_report(context, report) as page:
        problem = page.locator("#problems li[data-name='cache_misses']").inner_text()
        assert "24 of 36" in problem
        page.get_by_role("tab", name="Details").click()
        (line,) = page.locator("#caches-table tbody tr").all_inner_texts()
        cells = [cell.strip() for cell in line.split("\t")]
        assert cells[:1] == ["m at http://here/v1"]
        assert cells[-2:] == ["24 of 36", "396K"]
        assert page.locator("#caches-turns").inner_text().startswith("By turn: 1: 0.0%, 2: ")
        page.get_by_role("tab", name="Conversations").click()
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
            "1.8% of the tokens in, missed by 8 turns" in page.locator("aside").first.inner_text()
        )


DESKTOP, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
LONG_THOUGHT = "I add. " * 100


def sums(count: int, right: int) -> list[dict[str, Any]]:
    """Rows with an expected answer, of which the first ones are answered right."""
    return [
        {
            "id": f"sum-{n:02}",
            "prompt": f"What is {n} and {n}?",
            "expected": str(2 * n),
            "script": [
                {"reasoning": LONG_THOUGHT, "tool_calls": [{"name": "list_files"}]},
                {"reasoning": "Done.", "content": str(2 * n + (n >= right))},
            ],
        }
        for n in range(count)
    ]


def report_of(cwd: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    write_rows(cwd / "p.jsonl", *rows)
    done = run(cwd, "--check_expected", **SCRIPTED, **options)
    assert done.returncode == 0, done.stderr
    return write_report(StoredRun(cwd / "trajectories" / "r")).path


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of 20 prompts with 3 samples each, of which 8 prompts pass."""
    return report_of(tmp_path_factory.mktemp("judged"), sums(20, 8), num_samples=3)


@pytest.fixture(scope="module")
def hopeless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run where nothing passed."""
    return report_of(tmp_path_factory.mktemp("hopeless"), sums(20, 0))


def in_view(page: Page, selector: str, height: int) -> int:
    """How many of these elements are whole on the first screen."""
    boxes = page.locator(selector).evaluate_all(
        "all => all.map(e => e.getBoundingClientRect().bottom)"
    )
    return sum(bottom <= height for bottom in boxes)


def test_the_first_screen_says_what_a_run_is_worth(context: BrowserContext, judged: Path) -> None:
    """A sentence, five numbers, and at least eight conversations; on a phone at least one."""
    with open_report(context, judged) as page:
        page.set_viewport_size(DESKTOP)
        assert text_of(page, "#sentence") == "60 conversations, 24 passed, 24 training rows"
        names = page.locator("#numbers dt").all_text_contents()
        assert names == ["Done", "Passed", "Training rows", "Cost", "Time"]
        assert page.locator("#numbers dd").nth(1).inner_text().split("\n") == ["40%", "24 of 60"]
        assert page.locator("#problems li").first.is_visible()
        assert in_view(page, "#rows tr:not(.gap)", DESKTOP["height"]) >= 8
        page.set_viewport_size(PHONE)
        assert in_view(page, "#rows tr:not(.gap)", PHONE["height"]) >= 1
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        page.set_viewport_size({"width": 1200, "height": 800})


def test_a_problem_leads_to_its_conversations(context: BrowserContext, hopeless: Path) -> None:
    """Where nothing passed, the page says so in red, with the reason that most share."""
    with open_report(context, hopeless) as page:
        assert text_of(page, "#sentence") == "20 conversations, none passed, no training row"
        problems = page.locator("#problems.bad li")
        assert "None of 20 judged conversations passed" in problems.first.inner_text()
        assert "20 ended as wrong_answer" in problems.first.inner_text()
        assert "The training file has no row" in problems.nth(1).inner_text()
        assert "20 left out: wrong_answer" in problems.nth(1).inner_text()
        charts(page)
        page.get_by_role("button", name="None of 20 judged").click()
        assert page.input_value("#by-flag") == "not passed"
        assert len(shown_ids(page)) == 20


def test_signs_that_a_run_gives_nothing_are_problems(
    context: BrowserContext, tmp_path: Path
) -> None:
    """As `status` and the end of the run name them."""
    rows = [{**row, "script": row["script"][1:]} for row in sums(30, 30)]
    with open_report(context, report_of(tmp_path, rows)) as page:
        problem = page.locator("#problems.bad li", has_text="called a tool")
        assert problem.inner_text().startswith("None of 30 conversations called a tool")
        problem.get_by_role("button").click()
        assert page.input_value("#by-flag") == "no tool call"


def test_charts_are_a_second_tab_without_empty_ones(context: BrowserContext, judged: Path) -> None:
    """The arrow keys change tabs; what no conversation has is not drawn; colours say who passed."""
    with open_report(context, judged) as page:
        assert page.locator("#charts").is_hidden()
        page.get_by_role("tab", name="Conversations").focus()
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.id") == "tab-charts"
        page.locator("#charts figure").first.wait_for()
        drawn = page.locator("#charts figcaption b").all_text_contents()
        assert {"Statuses", "Checks", "Tools", "Time at work"} <= set(drawn)
        assert not {"Cost", "Tokens in", "Rewards", "Turns"} & set(drawn)
        work = page.locator("#charts figure", has_text="Time at work").locator("rect")
        assert set(work.evaluate_all("all => all.map(e => e.className.baseVal)")) == {"good", "bad"}


def test_samples_of_a_prompt_stand_together(context: BrowserContext, judged: Path) -> None:
    with open_report(context, judged) as page:
        assert shown_ids(page)[:4] == ["sum-00", "sum-00#s1", "sum-00#s2", "sum-01"]
        first = page.locator("#rows tr:not(.gap)").first
        assert first.locator(".badge").text_content() == "3 of 3 passed"
        second = page.locator("#rows tr:not(.gap)").nth(1)
        assert "What is" not in (second.text_content() or ""), "the prompt is said once"
        page.select_option("#by-flag", "not passed")
        assert shown_ids(page)[:2] == ["sum-08", "sum-08#s1"]
        badge = page.locator("#rows tr:not(.gap)").first.locator(".badge")
        assert badge.text_content() == "0 of 3 passed"


def test_columns_are_those_that_the_run_has(context: BrowserContext, judged: Path) -> None:
    """Verdict first, then prompt, answer and expected; not costs where nothing costs anything."""
    with open_report(context, judged) as page:
        heads = page.locator("#heads th").all_text_contents()
        assert heads == ["Verdict", "Prompt", "Answer", "Expected", "Turns", "Calls", "Time"]
        cells = page.locator("#rows tr:not(.gap)").first.locator("td").all_text_contents()
        assert cells[2:4] == ["0", "0"]
        page.locator("#columns summary").click()
        page.get_by_label("Turns").uncheck()
        page.get_by_label("Ended").check()
        heads = page.locator("#heads th").all_text_contents()
        assert heads == ["Verdict", "Prompt", "Answer", "Expected", "Calls", "Time", "Ended"]
        page.get_by_role("button", name="Usual columns").click()
        assert page.locator("#heads th").last.text_content() == "Time"


def test_the_prompt_has_room_beside_many_columns(context: BrowserContext, judged: Path) -> None:
    """What is least asked for is left out until there is room, and can be chosen."""
    with open_report(context, judged) as page:
        page.set_viewport_size({"width": 995, "height": 800})
        page.locator("#heads th", has_text="Time").wait_for(state="detached")
        prompt = page.locator("#heads th", has_text="Prompt")
        assert prompt.evaluate("head => head.clientWidth") >= 200
        assert not page.get_by_label("Time").is_checked()
        page.set_viewport_size({"width": 1440, "height": 900})
        page.locator("#heads th", has_text="Time").wait_for()


def test_an_address_shows_the_same_to_a_colleague(context: BrowserContext, judged: Path) -> None:
    """Filters, order, columns and tab are in it, also in that of a conversation."""
    with open_report(context, judged) as page:
        page.select_option("#by-flag", "not passed")
        page.get_by_role("button", name="Turns").click()
        page.fill("#query", "sum-1")
        page.locator("#found", has_text="30 of 60 shown").wait_for()
        page.locator("#columns summary").click()
        page.get_by_label("Time").uncheck()
        page.locator("#rows a").first.click()
        page.locator("#reader-title").wait_for()
        address = page.url
    with open_report(context, judged) as page:
        page.goto(address)
        page.reload()
        page.locator("#reader-title").wait_for()
        page.keyboard.press("Escape")
        page.locator("#found", has_text="30 of 60 shown").wait_for()
        assert page.input_value("#by-flag") == "not passed"
        assert page.input_value("#query") == "sum-1"
        assert page.locator("#heads th[aria-sort]").get_attribute("aria-sort") == "descending"
        assert "Time" not in page.locator("#heads th").all_text_contents()
        charts(page)
        page.locator("#charts figure").first.wait_for()
        address = page.url
    with open_report(context, judged) as page:
        page.goto(address)
        page.reload()
        page.locator("#charts figure").first.wait_for()


@pytest.mark.parametrize(
    "state",
    [
        "columns=none%20__proto__&sort=constructor&tab=toString",
        "status=%3Cimg%20src%3Dx%20onerror%3Dwindow.pwned%3D1%3E&constructor=1&query=%00",
        "%",
    ],
)
def test_an_address_that_says_nonsense_shows_the_page(
    context: BrowserContext, judged: Path, state: str
) -> None:
    with open_report(context, judged) as page:
        go_to_state(page, state)
        page.wait_for_function("document.getElementById('found').textContent.includes('shown')")
        assert page.locator("#heads th").first.text_content() == "Verdict"
        assert page.locator("#list").is_visible()


def test_a_conversation_begins_with_prompt_and_verdict(
    context: BrowserContext, judged: Path
) -> None:
    """Two lines; short reasoning is open, long one is folded; a bar marks what is learnt."""
    with open_report(context, judged) as page:
        page.set_viewport_size(DESKTOP)
        go_to(page, "sum-01")
        head = page.locator(".verdict-head")
        said = [" ".join(line.split()) for line in head.locator("p").all_inner_texts()]
        assert said == ["What is 1 and 1?", "✓ passed answer 2 expected 2"]
        assert (head.bounding_box() or {"height": 99})["height"] < 75
        folds = page.locator("details.reasoning")
        assert folds.evaluate_all("all => all.map(e => e.open)") == [False, True]
        learnt = page.locator("article.learnt")
        assert learnt.count() == 2
        assert learnt.first.evaluate("e => getComputedStyle(e).borderLeftWidth") == "4px"
        facts = page.locator("aside dl").bounding_box()
        messages = page.locator("#reader > .messages").bounding_box()
        assert facts is not None
        assert messages is not None
        assert facts["x"] > messages["x"] + messages["width"]
        go_to(page, "sum-15")
        wait_for_title(page, "sum-15")
        assert page.locator("article.learnt").count() == 0, "it is not in the training file"
        page.set_viewport_size({"width": 1200, "height": 800})


def test_a_long_result_is_folded_at_a_sentence(context: BrowserContext, report: Path) -> None:
    text = "This is a sentence of some length. " * 200

    def change(records: Any) -> None:
        (plain,) = (record for record in records if record["id"] == "plain")
        for message in plain["messages"]:
            if message["role"] == "tool":
                message["content"] = text

    with open_report(context, edit_report(report, "records-data", change)) as page:
        go_to(page, "plain")
        shown = page.locator(".call .result").first
        assert re.search(r"length\.… show all 7,000 characters$", shown.text_content() or "")
        assert len(shown.text_content() or "") < 1600
        shown.get_by_role("button").click()
        assert shown.text_content() == text


def test_calls_of_the_user_are_folded_before_the_message_that_they_led_to(
    context: BrowserContext, tmp_path: Path
) -> None:
    assert play_user(tmp_path).returncode == 0
    path = write_report(StoredRun(tmp_path / "trajectories" / "r"), tmp_path / "user.html").path
    with open_report(context, path) as page:
        page.locator("#rows a").first.click()
        folds = page.locator("#reader details.user")
        assert [text.split(" (")[0] for text in folds.locator("summary").all_inner_texts()] == [
            "the user called tools: 1 call, 2 turns",
            "the user called tools: 2 calls, 2 turns",
            "the user called tools: 1 call, 2 turns",
        ]
        first = folds.first
        assert first.evaluate("fold => fold.nextElementSibling.textContent") == "userData is off."
        assert not first.evaluate("fold => fold.open"), "it is the user's, not the agent's"
        first.locator("summary").first.click()
        first.get_by_text(SCREEN).first.wait_for()
        assert not first.locator(".loss, .learnt").count()
        last = folds.last.evaluate("fold => fold.previousElementSibling.textContent")
        assert "It is on." in last


def test_calls_before_a_first_message_of_the_user_are_folded_before_it(
    context: BrowserContext, tmp_path: Path
) -> None:
    begun = play_user(tmp_path, user={**USER, "writes_first": True}, prompt=None)
    assert begun.returncode == 0, begun.stderr
    path = write_report(StoredRun(tmp_path / "trajectories" / "r"), tmp_path / "user.html").path
    with open_report(context, path) as page:
        page.locator("#rows a").first.click()
        first = page.locator("#reader details.user").first
        assert "(simulated_user#0)" in first.inner_text()
        assert first.evaluate("fold => fold.nextElementSibling.textContent") == "userData is off."
