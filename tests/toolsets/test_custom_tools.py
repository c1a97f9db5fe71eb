"""A user's own tools: plain functions become tools, toolsets and part of a run's meaning."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field

from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.config.loading import load_config
from batch_trajectories.engine.plan import make_plan
from run_agent import AIAgent
from tests.helpers.playing import call, calls, say
from tests.helpers.running import SCRIPTED, lines, run, write_rows
from toolsets.catalog.custom import (
    CustomToolError,
    import_function,
    load_custom_toolsets,
    make_toolsets,
)
from toolsets.catalog.registry import Toolset
from toolsets.context import ToolContext
from toolsets.tool import Tool, tool

MODULE = '''
from typing import Literal

from toolsets.context import ToolContext


def get_weather(city: str, unit: Literal["C", "F"] = "C") -> dict:
    """Look up the weather
    of today.

    Args:
        city: Name of the city,
            in English.
        unit: Of the temperature.

    Returns:
        What it is like.
    """
    return {"city": city, "degrees": 20, "unit": unit}


async def note(space: ToolContext, text: str) -> str:
    """Write a note into the workspace."""
    space.workspace.write_bytes("note.txt", text.encode())
    return "noted"


ALL = [get_weather, note]
'''


def written(cwd: Path, module: str, text: str) -> str:
    (cwd / f"{module}.py").write_text(text)
    return module


def only(function: Any) -> Tool:
    return make_toolsets([("own", function)])[0].tools[0]


WAITING = """
import asyncio, threading

together = threading.Barrier(30)


def meet() -> str:
    \"\"\"Wait until all 15 calls of both kinds wait.\"\"\"
    together.wait(30)
    return "met"


async def meet_in_a_thread() -> str:
    \"\"\"Wait in a thread of the loop.\"\"\"
    return await asyncio.to_thread(meet)


ALL = [meet, meet_in_a_thread]
"""


def test_calls_that_wait_in_threads_do_not_wait_for_each_other(tmp_path: Path) -> None:
    written(tmp_path, "waiting", WAITING)
    both = [call(name) for name in ("meet", "meet_in_a_thread") for _ in range(15)]
    write_rows(
        tmp_path / "p.jsonl",
        {"id": "a", "prompt": "x", "script": [calls(*both), say("done")]},
    )
    given = {**SCRIPTED, "enabled_toolsets": "waiting", "tools": "waiting:ALL"}
    done = run(tmp_path, **given, tool_timeout_s=10)
    assert done.returncode == 0, done.stderr
    record = lines(tmp_path / "trajectories" / "r" / "records.jsonl")[0]
    assert {m["content"] for m in record["messages"] if m["role"] == "tool"} == {"met"}


def test_plain_functions_work_in_a_run_beside_the_built_in_tools(tmp_path: Path) -> None:
    written(tmp_path, "my_tools", MODULE)
    script = [
        calls(call("get_weather", city="Ulm"), call("note", text="hello")),
        calls(call("read_file", path="note.txt"), call("get_weather", city="Ulm", unit="K")),
        say("done"),
    ]
    write_rows(tmp_path / "p.jsonl", {"id": "a", "prompt": "x", "script": script})
    given = {**SCRIPTED, "enabled_toolsets": "file,my_tools", "tools": "my_tools:ALL"}
    done = run(tmp_path, **given)
    assert done.returncode == 0, done.stderr
    record = lines(tmp_path / "trajectories" / "r" / "records.jsonl")[0]
    results = [m["content"] for m in record["messages"] if m["role"] == "tool"]
    assert json.loads(results[0]) == {"city": "Ulm", "degrees": 20, "unit": "C"}
    assert results[1:3] == ["noted", "hello"]
    assert results[3].startswith("Error: invalid arguments for get_weather: unit: Input should be")
    assert record["toolsets"] == ["file", "my_tools"]
    row = lines(tmp_path / "trajectories" / "r.jsonl")[0]
    assert "get_weather" in row["conversations"][0]["value"]


@pytest.mark.parametrize(
    ("enabled", "is_named"), [("file", True), ("none", True), ("file,my_tools", False)]
)
def test_a_start_names_own_tools_that_nobody_is_offered(
    tmp_path: Path, enabled: str, *, is_named: bool
) -> None:
    written(tmp_path, "my_tools", MODULE)
    write_rows(tmp_path / "p.jsonl", {"id": "a", "prompt": "x", "script": [say("done")]})
    given = {**SCRIPTED, "enabled_toolsets": enabled, "tools": "my_tools:ALL"}
    done = run(tmp_path, "--dry_run", **given)
    assert done.returncode == 0, done.stderr
    warning = "no conversation is offered the toolset 'my_tools'; add it to --enabled_toolsets"
    assert (warning in done.stderr) == is_named, done.stderr


def test_a_changed_schema_is_another_run(tmp_path: Path) -> None:
    module = written(tmp_path, "my_tools", MODULE)
    write_rows(tmp_path / "p.jsonl", {"id": "a", "prompt": "x", "script": [say("done")]})
    given = {**SCRIPTED, "enabled_toolsets": "my_tools", "tools": "my_tools:ALL"}
    assert run(tmp_path, **given).returncode == 0
    written(tmp_path, module, MODULE.replace("20", "30"))
    assert run(tmp_path, **given).returncode == 0, "what a tool does is not what it is said to do"
    written(tmp_path, module, MODULE.replace("of today", "of tomorrow"))
    done = run(tmp_path, **given)
    assert done.returncode == 2
    assert "tools: the run has {'my_tools': '" in done.stderr


@pytest.mark.slow
def test_a_distribution_can_draw_own_toolsets(tmp_path: Path) -> None:
    written(tmp_path, "my_tools", MODULE)
    (tmp_path / "d.yaml").write_text("my_tools: 100\nfile: 100\n")
    write_rows(tmp_path / "p.jsonl", {"id": "a", "prompt": "x", "script": [say("done")]})
    given = {key: value for key, value in SCRIPTED.items() if key != "enabled_toolsets"}
    done = run(tmp_path, **given, tools="my_tools:ALL", distribution="d.yaml")
    assert done.returncode == 0, done.stderr
    record = lines(tmp_path / "trajectories" / "r" / "records.jsonl")[0]
    assert record["toolsets"] == ["file", "my_tools"]


BROKEN = '''
def untyped(city):
    """Lack a hint."""


def silent(city: str) -> str:
    return city


def fine(city: str) -> str:
    """Be fine."""
    return city


def grün(city: str) -> str:
    """Have a name that no endpoint takes."""
    return city


def other(city: str) -> str:
    """Have a name that is there already."""
    return city


other.__name__ = "fine"
NOTHING = []
NUMBER = 3
'''


TAKEN = '''
from toolsets.catalog.registry import Toolset
from toolsets.tool import tool


def read_file(path: str) -> str:
    """Read."""
    return ""


READ = tool()(read_file)
FINISH = tool(name="final_answer")(read_file)
SET = Toolset("file", "Mine.", (READ,))
'''


@pytest.fixture(scope="module")
def unusable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with modules that hold what cannot be a tool."""
    place = tmp_path_factory.mktemp("unusable")
    written(place, "broken", BROKEN)
    written(place, "leaves", "import sys; sys.exit(3)")
    written(place, "taken", TAKEN)
    return write_rows(place / "p.jsonl", {"prompt": "x", "script": [say("done")]}).parent


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("no_such:f", "tools: cannot import 'no_such:f': ModuleNotFoundError"),
        ("broken:nope", "tools: cannot import 'broken:nope': AttributeError"),
        ("broken:untyped", "broken.py:2: tool untyped: parameter 'city' has no type hint"),
        ("broken:silent", "broken.py:6: tool silent: the function has no docstring"),
        ("broken:grün", "broken.py:15: tool 'grün': not a valid tool name"),
        ("broken:NOTHING", "tools: broken: the list has no tools"),
        ("broken:NUMBER", "tools: broken: 3 is not a tool; give a function"),
        ("broken:fine,broken:other", "broken.py:20: toolset 'broken' has two tools called 'fine'"),
        ("unknown", "tools: 'unknown' is neither MODULE:ATTRIBUTE, nor FILE.py:ATTRIBUTE, nor"),
        ("leaves:f", "tools: cannot import 'leaves:f': SystemExit: 3"),
        ("taken:SET", "the toolset name 'file' is that of a built-in toolset"),
        ("taken:READ", "toolsets file and taken both have a tool 'read_file'; disable or rename"),
        ("taken:FINISH", "the tool name 'final_answer' is reserved"),
    ],
)
def test_unusable_tools_are_a_one_line_error_with_their_place(
    unusable: Path, monkeypatch: pytest.MonkeyPatch, tools: str, message: str
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(unusable)])
    given = {**SCRIPTED, "enabled_toolsets": "all", "sandbox": "local", "tools": tools}
    with pytest.raises(ConfigError) as caught:
        make_plan(load_config(None, {**given, "dataset_file": unusable / "p.jsonl"}))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_start_with_tools_that_cannot_be_used_is_refused(unusable: Path) -> None:
    done = run(unusable, "--dry_run", **SCRIPTED, tools="broken:untyped")
    assert (done.returncode, done.stdout) == (2, "")
    assert "broken.py:2: tool untyped: parameter 'city' has no type hint" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_entry_point_is_named_by_its_name(tmp_path: Path) -> None:
    """An installed package is a directory with metadata on the path."""
    written(tmp_path, "my_tools", MODULE)
    package = tmp_path / "weather-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: weather\nVersion: 1\n")
    (package / "entry_points.txt").write_text(
        "[batch_trajectories.tools]\nweather = my_tools:get_weather\n"
    )
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [say("done")]})
    given = {**SCRIPTED, "enabled_toolsets": "weather", "tools": "weather"}
    done = run(tmp_path, "--dry_run", env={"PYTHONPATH": str(tmp_path)}, **given)
    assert done.returncode == 0, done.stderr
    assert "toolsets   weather (get_weather)" in done.stdout


def test_descriptions_come_from_the_docstring_and_from_the_hints() -> None:
    def look(
        schema: str,
        size: Annotated[int, Field(ge=1, description="How big.")],
        shade: str | None = None,
    ) -> str:
        """Look around.

        Twice.

        Args:
            schema: What to look
                for.
            size: Not this one.
            ghost: No parameter.
        """
        return f"{schema} {size} {shade}"

    made = only(look)
    assert made.description == "Look around.\n\nTwice."
    properties = made.parameters["properties"]
    assert properties["schema"] == {"description": "What to look for.", "type": "string"}
    assert properties["size"] == {"description": "How big.", "minimum": 1, "type": "integer"}
    assert "description" not in properties["shade"]
    assert made.parameters["required"] == ["schema", "size"]
    assert made.parse_arguments('{"schema": "x", "size": 2}')["shade"] is None


def test_what_else_a_docstring_holds_hides_no_argument() -> None:
    def look(city: str, unit: str) -> str:
        """Look: around.

        Note:
            Only once a day.

        Args:
            city (str): A name:
                in English.

            unit: One of:

                C or F.
        Returns:
            unit: Not this one.
        """
        return city + unit

    made = only(look)
    assert made.description == "Look: around.\n\nNote: Only once a day."
    described = {name: one["description"] for name, one in made.parameters["properties"].items()}
    assert described == {"city": "A name: in English.", "unit": "One of:\n\nC or F."}


def test_the_workspace_is_given_only_to_functions_that_ask_for_it() -> None:
    def with_space(context: ToolContext, city: str) -> str:
        """Take both."""
        return city

    def without() -> str:
        """Take nothing."""
        return ""

    assert (only(with_space).takes_context, only(without).takes_context) == (True, False)
    assert list(only(with_space).parameters["properties"]) == ["city"]
    assert only(without).parse_arguments("{}") == {}


def test_own_tools_and_toolsets_keep_their_settings() -> None:
    @tool(name="say", idempotent=True)
    def speak(text: str) -> str:
        """Speak."""
        return text

    def plain(text: str) -> str:
        """Be plain."""
        return text

    mine: Any = (speak, plain)
    (loaded,) = make_toolsets([("m", Toolset("mine", "Mine.", mine))])
    assert (loaded.name, [one.name for one in loaded.tools]) == ("mine", ["say", "plain"])
    assert loaded.tools[0] is speak
    with pytest.raises(CustomToolError, match="is not a tool"):
        make_toolsets([("m", [print])])


def test_places_of_one_module_are_one_toolset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, "two_places", MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    (loaded,) = load_custom_toolsets(("two_places:note", "two_places:get_weather"))
    assert (loaded.name, len(loaded.tools)) == ("two_places", 2)


def test_an_agent_takes_functions(tmp_path: Path) -> None:
    def shout(text: str) -> str:
        """Say it louder."""
        return text.upper()

    script = [calls(call("shout", text="ho")), say("done")]
    agent = AIAgent(
        "scripted", script=script, tools=[shout], enabled_toolsets="own", output_dir=tmp_path
    )
    assert agent.run_conversation("x")["messages"][2]["content"] == "HO"


def test_a_file_can_hold_tools_and_is_found_beside_the_config(tmp_path: Path) -> None:
    beside = tmp_path / "sub"
    beside.mkdir()
    source = 'def price(item: str) -> int:\n    """Tell."""\n    return 7\n'
    (beside / "shop.py").write_text(source)
    (beside / "run.yaml").write_text("tools: shop.py:price\nrun_name: r\ndataset_file: p\n")
    config = load_config(tmp_path / "sub" / "run.yaml", {})
    [toolset] = load_custom_toolsets(config.tools or ())
    assert (toolset.name, [tool.name for tool in toolset.tools]) == ("shop", ["price"])
    for place, message in (
        (f"{tmp_path}/sub/shop.py:cost", "cannot import '.*shop.py:cost': AttributeError"),
        (f"{tmp_path}/none.py:cost", "there is no file .*none.py, seen from /"),
    ):
        with pytest.raises(CustomToolError, match=message):
            load_custom_toolsets((place,))
    with pytest.raises(CustomToolError, match=r"names no function or list; give .*shop.py:NAME"):
        import_function(f"{tmp_path}/sub/shop.py", "--reward")
