"""The guides are followed as they stand: files saved, commands run, output compared."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import count
from pathlib import Path
from threading import Lock

import pytest

from tests.fakes.fake_endpoint import FakeEndpoint
from tests.fakes.fake_images import layer_of_tree, make_repository, tree_of_programs, write_layout
from tests.faults.test_disk import small_disk
from tests.faults.test_process import asking
from tests.helpers.answering import JSON, answering
from tests.helpers.builders import assistant, chat_reply
from tests.helpers.guides import GUIDES, GuideBlock, Reader, blocks_of
from tests.helpers.running import ROOT, run, started, wait_until, write_prompts
from toolsets.sandbox.factory import sandbox_problem

Place = Callable[[Path], AbstractContextManager[str]]
"""Prepares the reader's directory; gives the address of an endpoint, or no text."""

PAGES = pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)


def test_there_are_the_eight_guides_and_they_are_short() -> None:
    assert len(GUIDES) == 8
    for page in GUIDES:
        prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        words = len(prose.split())
        assert 400 <= words <= 1200, f"{page.name}: {words} words"


@PAGES
def test_every_block_is_saved_run_or_compared(page: Path) -> None:
    """Data without a file name would be read by nobody; output needs commands before it."""
    before = ""
    for block in blocks_of(page):
        if block.file is None:
            assert block.language in ("bash", "sh", "text"), f"{page.name}:{block.line}"
        if block.language == "text":
            assert before == "bash", f"{page.name}:{block.line}: output of no command"
        before = block.language


@PAGES
def test_anchors_of_links_are_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text()):
        text = (page.parent / target if target else page).read_text()
        names = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        anchors = {
            re.sub(r"[^\w\- ]", "", name).strip().lower().replace(" ", "-") for name in names
        }
        anchors |= set(re.findall(r'<a id="([^"]+)"', text))
        assert anchor in anchors, f"{page.name}: {target}#{anchor}"


@contextmanager
def nothing(_: Path) -> Iterator[str]:
    yield ""


def playing(**options: object) -> Place:
    """A fake endpoint with these options."""

    @contextmanager
    def place(_: Path) -> Iterator[str]:
        with FakeEndpoint(**{"turns": 2, "latency_s": 0.0, **options}) as endpoint:  # type: ignore[arg-type]
            yield endpoint.openai_url

    return place


@contextmanager
def right_and_wrong(_: Path) -> Iterator[str]:
    """Answers each prompt right and wrong in turn, never twice in the same words."""
    right = {"How much is 17": "391", "How many primes": "168", "Which planet": "B"}
    asked, lock = Counter[str](), Lock()

    def answer(_path: str, body: JSON) -> tuple[int, JSON]:
        prompt = body["messages"][-1]["content"]
        with lock:
            asked[prompt] += 1
            number = asked[prompt]
        value = next(value for start, value in right.items() if prompt.startswith(start))
        value = value if number % 2 else {"B": "C"}.get(value, "7")
        thought = f"I try way {number} of {len(prompt)}."
        return 200, chat_reply(assistant(f"The answer is {value}.", reasoning=thought))

    with answering(answer) as (url, _requests):
        yield f"{url}/v1"


@contextmanager
def refusing_at_first(_: Path) -> Iterator[str]:
    """Refuses the first calls for their rate."""
    asked = count()

    def answer(_path: str, _body: JSON) -> tuple[int, JSON]:
        if next(asked) < 12:
            return 429, {"error": {"message": "Too many requests"}}
        return 200, chat_reply("Yes.")

    with answering(answer) as (url, _requests):
        yield f"{url}/v1"


@contextmanager
def parser_off(_: Path) -> Iterator[str]:
    """Leaves each tool call in the text, as a server without a parser does."""
    text = '<tool_call>\n{"name": "list_files", "arguments": {}}\n</tool_call>'
    with answering(lambda *_: (200, chat_reply(assistant(text)))) as (url, _requests):
        yield f"{url}/v1"


@contextmanager
def image_of_calc(directory: Path) -> Iterator[str]:
    """The image that the guide builds with podman, made of this machine's files."""
    tree, project = directory.parent / "tree", directory.parent / "project"
    tree.mkdir()
    tree_of_programs(tree)
    make_repository(project / "testbed", {"calc.py": "def add(a, b):\n    return a - b\n"})
    layers = [layer_of_tree(tree), layer_of_tree(project)]
    config = {"WorkingDir": "/testbed", "Env": ["PATH=/usr/bin:/bin"]}
    write_layout(directory / "images/calc", layers, name="localhost/calc:1", config=config)
    yield ""


@contextmanager
def full_disk(directory: Path) -> Iterator[str]:
    with small_disk(directory / "small", "size=100k"), playing(turns=3)(directory) as url:
        yield url


PLACES: Mapping[tuple[str, str | None], Place] = {
    ("answers-to-sft-and-dpo", None): right_and_wrong,
    ("bring-your-own-agent", None): playing(tool="bash", arguments='{"command": "ls"}'),
    ("first-dataset", None): playing(),
    ("rl-with-token-ids", None): playing(tokens="vllm", reasoning_chars=30),
    ("software-engineering", None): image_of_calc,
    ("when-something-goes-wrong", "The server refuses calls (rate limits)"): refusing_at_first,
    ("when-something-goes-wrong", "The account is out of credit"): playing(faults={"quota": 1.0}),
    ("when-something-goes-wrong", "The key is wrong"): playing(key="another"),
    ("when-something-goes-wrong", "The server does not parse tool calls"): parser_off,
    ("when-something-goes-wrong", "No reasoning"): playing(),
    ("when-something-goes-wrong", "The disk is full"): full_disk,
}
"""By page and heading (None: the whole page) what answers at `$ENDPOINT` and is there before."""

NEEDS_BWRAP = ("bring-your-own-agent", "software-engineering", "first-dataset")


def follow(page: Path, reader: Reader, blocks: list[GuideBlock]) -> None:
    """Paste blocks; each heading of a page may have its own endpoint."""
    with ExitStack() as whole:
        reader.endpoint = whole.enter_context(
            PLACES.get((page.stem, None), nothing)(reader.directory)
        )
        by_heading: dict[str, list[GuideBlock]] = {}
        for block in blocks:
            by_heading.setdefault(block.heading, []).append(block)
        for heading, of_heading in by_heading.items():
            with ExitStack() as stack:
                if (place := PLACES.get((page.stem, heading))) is not None:
                    reader.endpoint = stack.enter_context(place(reader.directory))
                if reader.endpoint:
                    reader.env["ENDPOINT"] = reader.endpoint
                for block in of_heading:
                    reader.read(block)


@pytest.mark.slow
@PAGES
def test_a_guide_leads_where_it_says(page: Path, tmp_path: Path) -> None:
    if page.stem in NEEDS_BWRAP and (problem := sandbox_problem("bwrap")):
        pytest.skip(problem)
    follow(page, Reader(directory=tmp_path / "here"), blocks_of(page))


@pytest.mark.slow
def test_calls_wait_for_a_dead_server_in_the_words_of_the_guide(tmp_path: Path) -> None:
    text = (ROOT / "docs/guides/when-something-goes-wrong.md").read_text()
    (shown,) = re.findall(r"`(waiting for [^`]*giving up[^`]*)`", " ".join(text.split()))
    words = re.escape(shown).replace(re.escape("..."), "[^ ]*").replace("57", r"\d+")
    write_prompts(tmp_path / "p.jsonl", 40)
    with FakeEndpoint(turns=3, latency_s=0.1) as endpoint:
        given = asking(endpoint)
        with started(tmp_path, **given):
            finished = tmp_path / "trajectories/r/records.jsonl"
            wait_until(lambda: finished.exists() and finished.stat().st_size > 0)
            endpoint.__exit__()
            wait_until(lambda: re.search(words, run(tmp_path, "status", "r").stdout) is not None)


def test_every_place_belongs_to_a_heading() -> None:
    for stem, heading in PLACES:
        text = (ROOT / f"docs/guides/{stem}.md").read_text()
        assert heading is None or f"## {heading}\n" in text
