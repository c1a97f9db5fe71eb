"""The toolsets that come along: what their tools do, and how a selection finds them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.sandbox_conformance import cut_off
from tests.helpers.running import ROOT
from toolsets.catalog.registry import (
    TOOLSETS,
    Toolset,
    UnavailableToolset,
    UnknownToolset,
    collect_tools,
    resolve_toolsets,
)
from toolsets.context import ToolContext
from toolsets.sandbox.base import Limits
from toolsets.sandbox.factory import make_sandbox, sandbox_problem
from toolsets.tool import Tool, ToolResult, tool
from toolsets.toolbox import Toolbox
from toolsets.workspace.workspace import Workspace

BWRAP_PROBLEM = sandbox_problem("bwrap")
needs_bwrap = pytest.mark.skipif(BWRAP_PROBLEM is not None, reason=str(BWRAP_PROBLEM))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "ws").mkdir()
    return tmp_path / "ws"


class InOneLoop(Toolbox):
    """A toolbox whose calls run in one event loop: its sandbox and the fork server belong to it."""

    runner: asyncio.Runner


@pytest.fixture(params=[pytest.param("bwrap", marks=needs_bwrap), "local"])
def sandboxed(request: pytest.FixtureRequest, root: Path) -> Iterator[Toolbox]:
    workspace = Workspace(root)
    context = ToolContext(workspace, make_sandbox(request.param, workspace, Limits(timeout_s=20)))
    toolbox = InOneLoop(collect_tools(list(TOOLSETS.values())), context)
    with asyncio.Runner() as toolbox.runner:
        yield toolbox
        toolbox.runner.run(toolbox.close(remove_workspace=False))


@pytest.fixture
def files(root: Path) -> Toolbox:
    return Toolbox(collect_tools([TOOLSETS["file"]]), ToolContext(Workspace(root)))


def call(toolbox: Toolbox, name: str, **arguments: Any) -> ToolResult:
    called = toolbox.call(name, json.dumps(arguments))
    return toolbox.runner.run(called) if isinstance(toolbox, InOneLoop) else asyncio.run(called)


def test_what_is_written_is_read_back(files: Toolbox, root: Path) -> None:
    written = call(files, "write_file", path="new/ä.txt", content="ä\nb\n")
    assert written.content == "wrote 5 bytes to new/ä.txt"
    assert call(files, "read_file", path="/workspace/new/ä.txt").content == "ä\nb\n"
    assert (root / "new" / "ä.txt").read_bytes() == "ä\nb\n".encode()


def test_a_long_file_is_read_in_parts(files: Toolbox, root: Path) -> None:
    (root / "long").write_text("".join(f"{n}\n" for n in range(1, 51)))
    first = call(files, "read_file", path="long", max_lines=20)
    assert first.content.endswith("19\n20\n[lines 1-20 of 50; go on with start_line=21]")
    last = call(files, "read_file", path="long", start_line=49)
    assert last.content == "49\n50\n"
    assert call(files, "read_file", path="long", start_line=51).is_error


def test_reading_has_a_limit_in_characters(files: Toolbox, root: Path) -> None:
    (root / "wide").write_text(("x" * 1000 + "\n") * 500)
    (root / "one").write_text("x" * 1_000_000)
    for name, note in (("wide", "go on with start_line="), ("one", "characters cut")):
        content = call(files, "read_file", path=name).content
        assert note in content
        assert len(content) < 70_000
    (root / "huge").write_bytes(b"x" * (10 << 20) + b"y")
    assert "is larger than" in call(files, "read_file", path="huge").content


def test_empty_and_binary_files(files: Toolbox, root: Path) -> None:
    (root / "empty").write_bytes(b"")
    (root / "binary").write_bytes(b"\x7fELF\0\1")
    empty = call(files, "read_file", path="empty")
    assert (empty.content, empty.is_error) == ("", False)
    assert "is a binary file" in call(files, "read_file", path="binary").content


def test_a_patch_replaces_the_one_place_and_keeps_other_bytes(files: Toolbox, root: Path) -> None:
    (root / "f").write_bytes(b"a\r\n\xff b b\n")
    done = call(files, "patch_file", path="f", old_text=" b\n", new_text=" é\n")
    assert done.content == "replaced the text at line 2 of f"
    assert (root / "f").read_bytes() == b"a\r\n\xff b \xc3\xa9\n"


@pytest.mark.parametrize(("old", "found"), [("x", 0), ("b", 2), ("aa", 3)])
def test_an_ambiguous_patch_changes_nothing(
    files: Toolbox, root: Path, old: str, found: int
) -> None:
    (root / "f").write_text("aaaa b b")
    result = call(files, "patch_file", path="f", old_text=old, new_text="y")
    assert f"occurs {found} times" in result.content
    assert result.is_error
    assert (root / "f").read_text() == "aaaa b b"


def test_listing_marks_what_an_entry_is(files: Toolbox, root: Path) -> None:
    assert call(files, "list_files").content == "[no files]"
    (root / "d").mkdir()
    (root / "d" / "f").write_bytes(b"123")
    (root / "l").symlink_to("/etc/passwd")
    assert call(files, "list_files").content == "d/\nl (symlink)"
    assert call(files, "list_files", recursive=True).content == "d/\nd/f (3 bytes)\nl (symlink)"
    for matching in ("f", "d/*"):
        assert (
            call(files, "list_files", recursive=True, matching=matching).content == "d/f (3 bytes)"
        )
    for number in range(1001):
        (root / "d" / str(number)).touch()
    many = call(files, "list_files", path="d")
    assert many.content.endswith("[only the first 1000 entries; list a directory beneath]")
    assert many.details["truncated"]


def test_search_finds_literal_text_by_line(files: Toolbox, root: Path) -> None:
    (root / "a.txt").write_text("one\n  TWO.* \nthree\n")
    (root / "sub").mkdir()
    (root / "sub" / "b.txt").write_text("two.*\n")
    (root / "binary").write_bytes(b"\0two.*")
    assert call(files, "search_files", text="two.*").content == "sub/b.txt:1: two.*"
    both = call(files, "search_files", text="two.*", ignore_case=True).content
    assert both == "a.txt:2: TWO.*\nsub/b.txt:1: two.*"
    assert call(files, "search_files", text="TWO", path="a.txt").content == "a.txt:2: TWO.*"
    assert call(files, "search_files", text="four").content == "[no matches]"
    assert call(files, "search_files", text="^tw[oO]", is_regex=True).content == (
        "sub/b.txt:1: two.*"
    )
    by_name = {"text": "two", "ignore_case": True}
    assert call(files, "search_files", **by_name, matching="b.*").content == "sub/b.txt:1: two.*"
    assert call(files, "search_files", **by_name, matching="sub/*").content == "sub/b.txt:1: two.*"
    assert call(files, "search_files", **by_name, matching="*.py").content == "[no matches]"
    (root / "many").write_text("four\n" * 300)
    many = call(files, "search_files", text="four").content.split("\n")
    assert len(many) == 201
    assert "only the first 200" in many[-1]


@pytest.mark.slow
def test_a_regular_expression_cannot_hold_the_worker(files: Toolbox, root: Path) -> None:
    """Without a bound this one runs for longer than anyone lives."""
    (root / "a.txt").write_text("a" * 64 + "\n")
    hostile = call(files, "search_files", text="(a|a)*b|(a|aa)+$^", is_regex=True)
    assert hostile.is_error
    assert "takes too long; make it simpler" in hostile.content
    wrong = call(files, "search_files", text="(", is_regex=True)
    assert wrong.is_error
    assert "the regular expression '(' is wrong: missing )" in wrong.content


def test_terminal_reports_a_failing_command_without_being_an_error(sandboxed: Toolbox) -> None:
    result = call(sandboxed, "terminal", command="echo out; echo err >&2; (exit 3)")
    assert json.loads(result.content) == {"exit_code": 3, "stdout": "out\n", "stderr": "err\n"}
    assert not result.is_error
    assert result.details["exit_code"] == 3


def test_terminal_and_files_share_the_workspace(sandboxed: Toolbox) -> None:
    call(sandboxed, "write_file", path="a/in.txt", content="hello")
    result = call(sandboxed, "terminal", command='tr a-z A-Z < a/in.txt > "$HOME/out.txt"; pwd')
    home = json.loads(result.content)["stdout"].strip()
    assert call(sandboxed, "read_file", path=f"{home}/out.txt").content == "HELLO", "as it is"


def test_terminal_timeout_is_an_error_that_keeps_the_output(sandboxed: Toolbox) -> None:
    result = cut_off(
        lambda timeout_s: call(
            sandboxed, "terminal", command="echo begun; touch begun; sleep 60", timeout_s=timeout_s
        ),
        lambda _: (sandboxed._context.workspace.root / "begun").exists(),
    )
    content = json.loads(result.content)
    assert content.pop("error").startswith("stopped")
    assert content.pop("note").startswith("[the shell was killed; its state")
    assert content == {"exit_code": None, "stdout": "begun\n", "stderr": "", "timed_out": True}
    assert result.is_error


def test_terminal_output_stays_json_however_much_there_is(sandboxed: Toolbox) -> None:
    command = "head -c 300000 /dev/urandom; yes '\"' | head -c 300000 >&2"
    result = call(sandboxed, "terminal", command=command)
    assert set(json.loads(result.content)) == {"exit_code", "stdout", "stderr"}
    assert len(result.content) <= 100_000
    assert result.details["truncated"]


def test_python_imports_from_the_workspace_and_reports_its_lines(sandboxed: Toolbox) -> None:
    call(sandboxed, "write_file", path="mine.py", content="VALUE = 41\n")
    call(sandboxed, "write_file", path="traceback.py", content="raise SystemExit\n")
    code = "import mine\nprint(mine.VALUE + 1)\ndef f():\n    return 1 / 0\nf()\n"
    result = json.loads(call(sandboxed, "python", code=code).content)
    assert result["stdout"] == "42\n"
    assert result["exit_code"] == 1
    assert 'File "<cell 1>", line 4, in f\n    return 1 / 0\n' in result["stderr"]
    assert result["stderr"].count("File ") == 2
    assert result["stderr"].endswith("ZeroDivisionError: division by zero\n")


def test_python_takes_long_code_and_has_no_input(sandboxed: Toolbox) -> None:
    code = "#" * 3_000_000 + "\nimport sys, pickle\nclass A: pass\n"
    code += "print(type(pickle.loads(pickle.dumps(A()))).__name__, repr(sys.stdin.read()))\n"
    result = json.loads(call(sandboxed, "python", code=code).content)
    assert (result["stdout"], result["stderr"]) == ("A ''\n", "")


def test_python_shows_syntax_errors_and_exit_codes(sandboxed: Toolbox) -> None:
    broken = json.loads(call(sandboxed, "python", code="x = (\n").content)
    assert broken["exit_code"] == 1
    assert broken["stderr"].startswith('  File "<cell 1>", line 1')
    ended = json.loads(call(sandboxed, "python", code="raise SystemExit(4)").content)
    assert ended == {"exit_code": 4, "stdout": "", "stderr": ""}


def test_commands_without_a_sandbox_are_refused(root: Path) -> None:
    toolbox = Toolbox(collect_tools([TOOLSETS["terminal"]]), ToolContext(Workspace(root)))
    result = call(toolbox, "terminal", command="true")
    assert result.content == "Error executing terminal: this task has no sandbox to run commands in"


def named_tool(name: str, answer: str = "") -> Tool:
    @tool(name=name)
    def give(context: ToolContext) -> str:
        """Give."""
        return answer

    return give


A, B, C = named_tool("a"), named_tool("b"), named_tool("c")
KNOWN = {
    "base": Toolset("base", "", (A,), needs_sandbox=False),
    "more": Toolset("more", "", (A, B), needs_sandbox=True, includes=("base", "circle")),
    "circle": Toolset("circle", "", (C,), needs_sandbox=False, includes=("more",)),
}


@pytest.mark.parametrize(
    ("enabled", "disabled", "toolsets", "tools"),
    [
        (None, [], ["base", "circle", "more"], "abc"),
        (["all"], [], ["base", "circle", "more"], "abc"),
        (["*", "base"], [], ["base", "circle", "more"], "abc"),
        (["none"], [], [], ""),
        ([], [], [], ""),
        (["base", "base"], [], ["base"], "a"),
        (["circle"], [], ["base", "circle", "more"], "abc"),
        (None, ["base"], ["circle", "more"], "bc"),
        (["base"], ["more"], [], ""),
        (None, ["all"], [], ""),
    ],
)
def test_selection_of_toolsets(
    enabled: list[str] | None, disabled: list[str], toolsets: list[str], tools: str
) -> None:
    resolved = resolve_toolsets(enabled, disabled, known=KNOWN)
    assert [toolset.name for toolset in resolved] == toolsets
    assert "".join(tool.name for tool in collect_tools(resolved)) == tools


def test_unknown_toolsets_are_named_with_the_known_ones() -> None:
    with pytest.raises(UnknownToolset, match="'wib'; known: browser, file, python, terminal, web"):
        resolve_toolsets(["wib"])
    with pytest.raises(UnknownToolset, match="'wib'; known: browser, file, python, terminal, web"):
        resolve_toolsets(None, ["wib"])


RESTRICTED = {
    "asked": Toolset("asked", "", (B,), needs_sandbox=False, in_all=False),
    "broken": Toolset("broken", "", (C,), needs_sandbox=False, problem=lambda: "install it"),
    "plain": Toolset("plain", "", (A,), needs_sandbox=False),
}


@pytest.mark.parametrize(
    ("enabled", "disabled", "toolsets"),
    [
        (None, [], ["plain"]),
        (["all"], [], ["plain"]),
        (["all", "asked"], [], ["asked", "plain"]),
        (["asked"], [], ["asked"]),
        (["asked", "plain"], ["all"], []),
        (["broken", "plain"], ["broken"], ["plain"]),
    ],
)
def test_all_leaves_out_what_cannot_work_here_or_must_be_asked_for(
    enabled: list[str] | None,
    disabled: list[str],
    toolsets: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    resolved = resolve_toolsets(enabled, disabled, known=RESTRICTED)
    assert [toolset.name for toolset in resolved] == toolsets
    warnings = [record.getMessage() for record in caplog.records]
    is_all = enabled is None or "all" in enabled
    assert warnings == (["The toolset broken is not offered: install it"] if is_all else [])


def test_a_named_toolset_that_cannot_work_here_is_an_error() -> None:
    for enabled in (["broken"], ["all", "broken"]):
        with pytest.raises(UnavailableToolset, match="'broken' cannot be offered: install it"):
            resolve_toolsets(enabled, known=RESTRICTED)


@pytest.mark.parametrize(
    "package",
    [
        "ddgs",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("trafilatura", "lxml_html_clean")
        ),
    ],
)
def test_without_its_extra_the_web_is_not_offered(package: str) -> None:
    """In a process of its own, where the package cannot be imported."""
    code = f"""
import sys
sys.modules[{package!r}] = None
from run_agent import AIAgent
AIAgent("scripted", sandbox="local")
AIAgent("scripted", enabled_toolsets="web")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stderr.splitlines()[-1] == (
        "toolsets.catalog.registry.UnavailableToolset: toolset 'web' cannot be offered: "
        "it needs further packages: pip install 'batch-trajectories[web]'"
    )


def test_two_tools_of_one_name_in_different_toolsets_are_an_error() -> None:
    other = Toolset("other", "", (named_tool("a", "another"),), needs_sandbox=False)
    with pytest.raises(ValueError, match="toolsets base and other both have a tool 'a'"):
        collect_tools([KNOWN["base"], other])


def test_toolsets_that_run_commands_say_so() -> None:
    assert {name for name, t in TOOLSETS.items() if t.needs_sandbox} == {"python", "terminal"}
    assert all(name == toolset.name for name, toolset in TOOLSETS.items())
    assert all(toolset.description for toolset in TOOLSETS.values())
