"""MCP servers as toolsets: real servers, their deaths, their manners, and what they may know."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.cli.listings import tools_as_text
from batch_trajectories.config.fingerprint import data_options
from batch_trajectories.config.loading import load_config
from batch_trajectories.engine.plan import make_plan
from run_agent import AIAgent
from tests.helpers.playing import call, calls, say
from tests.helpers.running import (
    PATIENCE_S,
    ROOT,
    SCRIPTED,
    lines,
    run,
    started,
    wait_until,
    workers_of,
    write_rows,
)
from toolsets.catalog.registry import collect_tools
from toolsets.context import ToolContext
from toolsets.mcp.mcp_settings import McpError, McpServer, expand, read_servers
from toolsets.mcp.servers import McpServers, list_servers, make_check
from toolsets.tool import MAX_RESULT_CHARS, ArgumentsError, ToolResult
from toolsets.toolbox import Toolbox
from toolsets.workspace.workspace import Workspace

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="the extra `mcp` is missing")

RAW = [sys.executable, "-S", str(ROOT / "tests" / "helpers/raw_mcp_server.py")]

SDK_SERVER = '''
import sys
from mcp.server import MCPServer

app = MCPServer("own")


@app.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@app.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("boom")


app.run()
'''


def server(*more: str, **settings: Any) -> McpServer:
    return McpServer(command=(*RAW, *more), **{"restart_pause_s": 0, **settings})


class Toolboxes:
    """Toolboxes of several tasks beside the servers that they share."""

    def __init__(self, root: Path, servers: McpServers, timeout_s: float) -> None:
        self._root = root
        self._timeout_s = timeout_s
        self._tools = collect_tools(servers.toolsets())
        self.open: dict[str, Toolbox] = {}

    def of(self, task: str) -> Toolbox:
        if task not in self.open:
            context = ToolContext(Workspace(self._root / task))
            self.open[task] = Toolbox(self._tools, context, call_timeout_s=self._timeout_s)
        return self.open[task]


def play(
    root: Path,
    servers: Mapping[str, McpServer],
    *wanted: tuple[str, str, dict[str, Any]],
    timeout_s: float = 20.0,
) -> list[ToolResult]:
    """Call tools one after the other, each given as (task, name, arguments)."""

    async def work() -> list[ToolResult]:
        listed = {}
        for name, loaded in (await list_servers(servers)).items():
            assert isinstance(loaded, McpServer), loaded
            listed[name] = loaded
        pool = McpServers(listed)
        toolboxes = Toolboxes(root, pool, timeout_s)
        pool.open()
        try:
            return [
                await toolboxes.of(task).call(name, json.dumps(arguments))
                for task, name, arguments in wanted
            ]
        finally:
            for toolbox in toolboxes.open.values():
                await toolbox.close(remove_workspace=True)
            await pool.close()

    return asyncio.run(work())


def refusal(**servers: McpServer) -> str:
    """Why the first server that cannot be used cannot."""
    for loaded in asyncio.run(list_servers(servers)).values():
        if isinstance(loaded, McpError):
            return str(loaded)
    raise AssertionError("all of them can be used")


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and not yet reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_a_server_of_the_sdk(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SDK_SERVER)
    own = McpServer(command=(sys.executable, str(tmp_path / "server.py")))
    added, long, wrong, unknown, failed = play(
        tmp_path,
        {"own": own},
        ("t", "own__add", {"a": 2}),
        ("t", "own__add", {"a": 10**30}),
        ("t", "own__add", {"a": "two"}),
        ("t", "own__nope", {}),
        ("t", "own__fail", {}),
    )
    assert (added.content, added.is_error) == ("3", False)
    assert long.content == str(10**30 + 1), "an integer keeps its digits on both ways"
    assert wrong.content.startswith("Error: invalid arguments for own__add: a: 'two' is not of")
    assert wrong.details["failure"] == "invalid_arguments"
    assert unknown.details["failure"] == "unknown_tool"
    assert failed.is_error
    assert "failure" not in failed.details, "a failure that the tool itself reports"


def test_arguments_are_checked_before_the_server_sees_them(tmp_path: Path) -> None:
    wrong, refused, long = play(
        tmp_path,
        {"raw": server()},
        ("t", "raw__die", {"count": -1, "more": 1}),
        ("t", "raw__refuse", {}),
        ("t", "raw__big", {}),
    )
    assert wrong.content.splitlines() == [
        "Error: invalid arguments for raw__die: arguments: Additional properties are not allowed "
        "('more' was unexpected)",
        "count: -1 is less than the minimum of 0",
        "Arguments it takes: text, count",
    ]
    assert refused.content == "Error executing raw__refuse: not today"
    assert MAX_RESULT_CHARS < len(long.content) < MAX_RESULT_CHARS + 100


@pytest.mark.slow
def test_a_hundred_deaths(tmp_path: Path) -> None:
    """A limited number of restarts, an error result for each call; other calls work."""
    wanted: list[tuple[str, str, dict[str, Any]]] = [("t", "raw__die", {})] * 100
    results = play(
        tmp_path,
        {"raw": server(max_restarts=3), "other": server()},
        *wanted,
        ("t", "raw__echo", {"text": "hi"}),
        ("t", "other__echo", {"text": "hi"}),
    )
    contents = [result.content for result in results]
    died = "Error executing raw__die: the server 'raw' died during the call"
    gone = "the server 'raw' is gone: it died 4 times; its tools cannot be used any more"
    assert contents[:4] == [died] * 4
    assert contents[4:100] == [f"Error executing raw__die: {gone}"] * 96
    assert contents[100:] == [f"Error executing raw__echo: {gone}", "hi"]


@pytest.mark.long
def test_a_hundred_restarts(tmp_path: Path) -> None:
    wanted = [("t", "raw__die", {}), ("t", "raw__echo", {"text": "hi"})] * 100
    results = play(tmp_path, {"raw": server(max_restarts=100)}, *wanted)
    assert [result.is_error for result in results] == [True, False] * 100


def test_a_server_per_task_that_dies_affects_only_its_task(tmp_path: Path) -> None:
    contents = [
        result.content
        for result in play(
            tmp_path,
            {"raw": server(per_task=True, max_restarts=0)},
            ("a", "raw__die", {}),
            ("a", "raw__echo", {"text": "hi"}),
            ("b", "raw__echo", {"text": "hi"}),
        )
    ]
    assert "died during the call" in contents[0]
    assert "is gone: it died 1 times" in contents[1]
    assert contents[2] == "hi"


@pytest.mark.slow
def test_garbage_is_passed_over_and_its_end_is_a_new_server(tmp_path: Path) -> None:
    noisy = {"raw": server("--noise")}
    said, waited, again = play(
        tmp_path,
        noisy,
        ("t", "raw__echo", {"text": "hi"}),
        ("t", "raw__garbage", {}),
        ("t", "raw__echo", {"text": "there"}),
        timeout_s=8,  # the last call starts a server, too
    )
    assert (said.content, again.content) == ("hi", "there")
    assert waited.details["failure"] == "timeout"


@pytest.mark.slow
def test_a_flood_of_garbage_ends_the_server(tmp_path: Path) -> None:
    flood, again = play(
        tmp_path,
        {"raw": server()},
        ("t", "raw__flood", {}),
        ("t", "raw__echo", {"text": "hi"}),
        timeout_s=120,
    )
    assert "died during the call" in flood.content
    assert again.content == "hi"


@pytest.mark.slow
def test_a_server_that_never_answers_is_replaced_in_the_end(tmp_path: Path) -> None:
    results = play(
        tmp_path,
        {"raw": server()},
        *[("t", "raw__hang", {})] * 3,
        ("t", "raw__echo", {"text": "hi"}),
        timeout_s=3,
    )
    assert [result.details.get("failure") for result in results] == ["timeout"] * 3 + [None]


def test_an_unusable_server_is_an_error_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = refusal(raw=server("--slow", start_timeout_s=1))
    assert slow.startswith("mcp: the server 'raw' did not start within 1 s (started ")
    assert refusal(raw=McpServer(command=("no-such-program",))) == (
        "mcp: the server 'raw' did not start: Connection closed "
        "(cannot start 'no-such-program': No such file or directory)"
    )
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    missing = refusal(raw=server(env_from=["NO_SUCH_KEY"]))
    assert "needs the environment variable NO_SUCH_KEY; set it" in missing
    closed = refusal(raw=McpServer(url="http://127.0.0.1:9/mcp"))
    assert closed.startswith("mcp: the server 'raw' did not start: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--twice"], "mcp: server 'raw' has two tools called 'raw__echo'"),
        (["--tool=a.b", "--tool=a_b"], "mcp: server 'raw' has two tools called 'raw__a_b'"),
        ([f"--tool={'x' * 70}"], "is too long for endpoints"),
        (["--broken"], "mcp: the schema of raw__echo is not a JSON Schema"),
    ],
)
def test_tools_that_cannot_be_offered_are_refused(arguments: list[str], message: str) -> None:
    loaded = asyncio.run(list_servers({"raw": server(*arguments)}))["raw"]
    assert isinstance(loaded, McpServer)
    with pytest.raises(McpError, match=message):
        McpServers({"raw": loaded}).toolsets()


def test_a_schema_too_deep_to_be_read_is_named_at_once() -> None:
    """The SDK cannot read the message, so that no answer comes."""
    named = refusal(raw=server("--deep=98", start_timeout_s=PATIENCE_S))
    assert "lists a tool whose schema is nested too deeply to be read" in named


def test_a_schema_too_deep_to_be_checked_is_named() -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(1000):
        schema = {"properties": {"a": schema}}
    with pytest.raises(McpError, match="the schema of t is nested too deeply to be checked"):
        make_check(schema, "t")


BACKTRACKING = "^(a|aa)+$"


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        ({"properties": {"p": {"pattern": BACKTRACKING}}}, {"p": "a" * 60 + "!"}),
        ({"patternProperties": {BACKTRACKING: False}}, {"a" * 60 + "!": 1}),
        (
            {"patternProperties": {BACKTRACKING: {}}, "additionalProperties": False},
            {"a" * 60 + "!": 1},
        ),
        (
            {"patternProperties": {BACKTRACKING: {}}, "unevaluatedProperties": False},
            {"a" * 60 + "!": 1},
        ),
    ],
)
def test_a_pattern_that_takes_too_long_is_left_to_the_server(
    schema: dict[str, Any], arguments: dict[str, Any]
) -> None:
    """A search without a limit would hold up the worker for ever."""
    make_check({"type": "object", **schema}, "t")(arguments)


@pytest.mark.parametrize("keyword", ["anyOf", "allOf", "oneOf"])
def test_references_that_double_with_each_level_are_left_to_the_server(keyword: str) -> None:
    names = [f"#/$defs/n{n}" for n in range(40)]
    inner = {f"n{n}": {keyword: [{"$ref": name}] * 2} for n, name in enumerate(names[1:])}
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": names[0]}, "b": {"type": "string"}},
        "$defs": {**inner, "n39": {"type": "integer"}},
    }
    check = make_check(schema, "t")
    check({"a": "no number"})
    with pytest.raises(ArgumentsError, match="b: 1 is not of type 'string'"):
        check({"b": 1})


def test_patterns_are_checked() -> None:
    check = make_check(
        {
            "properties": {"p": {"pattern": "^a+$"}, "q": {}},
            "patternProperties": {"^x": {"type": "integer"}},
            "additionalProperties": False,
        },
        "t",
    )
    check({"p": "aa", "q": 1, "x1": 2})
    with pytest.raises(ArgumentsError) as refused:
        check({"p": "b", "x1": "no", "y": 3})
    assert str(refused.value).splitlines() == [
        "arguments: Additional properties are not allowed ('y' was unexpected)",
        "p: 'b' does not match '^a+$'",
        "x1: 'no' is not of type 'integer'",
    ]


def test_a_server_knows_no_more_than_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_CANARY", "tweet")
    monkeypatch.setenv("WANTED", "yes")
    given = server(env={"OWN": "1"}, env_from=["WANTED"])
    (told,) = play(tmp_path, {"raw": given}, ("t", "raw__env", {}))
    environment = json.loads(told.content)
    # Python itself may set LC_CTYPE where there is no LANG.
    assert set(environment) - {"LC_CTYPE"} <= {"PATH", "HOME", "LANG", "OWN", "WANTED"}
    assert (environment["OWN"], environment["WANTED"]) == ("1", "yes")
    assert "tweet" not in told.content


def test_a_server_per_task_works_in_its_workspace(tmp_path: Path) -> None:
    """The model's path of the workspace goes in, and only that comes out."""
    own = server("{workspace}/data", cwd="{workspace}", env={"ROOT": "{workspace}"})
    assert own.is_per_task
    first, second = play(
        tmp_path,
        {"raw": own},
        ("a", "raw__where", {"text": "/workspace/x"}),
        ("b", "raw__env", {}),
    )
    assert json.loads(first.content) == [["/workspace/data"], "/workspace/x", "/workspace"]
    assert json.loads(second.content)["ROOT"] == "/workspace"
    (raw,) = play(tmp_path, {"raw": server(per_task=False)}, ("a", "raw__where", {"text": "/x"}))
    assert json.loads(raw.content)[2] == str(Path.cwd())


def test_a_server_per_task_ends_with_its_task(tmp_path: Path) -> None:
    async def work() -> None:
        loaded = (await list_servers({"raw": server(per_task=True)}))["raw"]
        assert isinstance(loaded, McpServer)
        toolboxes = Toolboxes(tmp_path, McpServers({"raw": loaded}), 20)
        told = await toolboxes.of("a").call("raw__pids", "{}")
        pid, _ = json.loads(told.content)
        assert is_alive(pid)
        await toolboxes.of("a").close(remove_workspace=True)
        assert not is_alive(pid)

    asyncio.run(work())


def test_settings_that_contradict_each_other_are_refused() -> None:
    for settings, message in [
        ({}, "either `command` or `url`"),
        ({"command": "x", "url": "http://h"}, "either `command` or `url`"),
        ({"url": "ftp://h"}, "must start with http"),
        ({"url": "http://u:p@h"}, "must not contain a password"),
        ({"command": "x", "headers_env": {"A": "B"}}, "needs `url`"),
        ({"command": ["x", "{workspace}"], "per_task": False}, "needs a server per task"),
        ({"command": ["x"], "effects": "workspace"}, "needs a server per task"),
        ({"command": "x", "headers": {"A": "B"}}, "`headers` needs `url`"),
        ({"url": "http://h", "headers": {"A": "${input:key}"}}, "only \\${NAME}"),
        ({"url": "http://h", "type": "sse"}, "`type`: 'sse' is none of stdio, http"),
        ({"url": "http://h", "type": "stdio"}, "needs `command`"),
        ({"command": "x", "type": ["stdio"]}, "is none of"),
    ]:
        with pytest.raises(ValueError, match=message):
            McpServer.model_validate(settings)


def test_published_settings_are_read_as_they_stand() -> None:
    """As `.mcp.json` of Claude Code, Cursor and VS Code has them."""
    web = {"type": "http", "url": "${BASE:-http://h}/mcp", "headers": {"X-Key": "Bearer ${KEY}"}}
    own = {"type": "stdio", "command": "npx", "args": ["-y", "${PACKAGE}"], "env": {"K": "${KEY}"}}
    for wrapper in ("mcpServers", "servers"):
        servers = read_servers({wrapper: {"web": web, "own": own}})
        assert servers["own"].argv == ("npx", "-y", "${PACKAGE}")
        assert servers["web"].expands
        mistakes: list[tuple[dict[str, Any], str]] = [
            ({wrapper: {"web": {**web, "autoApprove": []}}}, "autoApprove"),
            ({wrapper: {"web": {**web, "httpUrl": "http://h"}}}, "httpUrl"),
            ({wrapper: {"web": web}, "more": 1}, "`more`: it is unknown beside"),
            ({wrapper: {"web": {**web, "type": "sse"}}}, "web.*`type`: 'sse'"),
            ({wrapper: {"own": {**own, "args": ["${workspaceFolder:-x}${1}"]}}}, "only"),
        ]
        for wrong, named in mistakes:
            with pytest.raises(ValueError, match=f"(?s){named}") as caught:
                read_servers(wrong)
            assert "expands" not in str(caught.value)  # a key that its user never wrote
    assert read_servers({"servers": {"command": "x"}})["servers"].argv == ("x",)
    values = {"A": "", "B": "b"}
    assert expand("${A:-d}${B}${env:B} $B", values.__getitem__, values) == "dbb $B"


HTTP_SERVER = '''
from mcp.server import MCPServer
from mcp.server.mcpserver import Context

app = MCPServer("web")


@app.tool()
def header(ctx: Context) -> str:
    """Return a header of the request."""
    return str((ctx.headers or {}).get("x-key"))
'''


@contextmanager
def http_server() -> Iterator[str]:
    """A server of the SDK that speaks HTTP on a free port, in a thread of this process."""
    import uvicorn

    names: dict[str, Any] = {}
    exec(HTTP_SERVER, names)  # the SDK wants names that it can look up
    app = names["app"].streamable_http_app()
    serving = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", ws="none"))
    thread = threading.Thread(target=serving.run)
    thread.start()
    try:
        wait_until(lambda: serving.started)
        port = serving.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        serving.should_exit = True
        thread.join()


def test_a_server_over_http_gets_its_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEB_KEY", "k1")
    with http_server() as url:
        web = McpServer(url=url, headers_env={"X-Key": "WEB_KEY"})
        (told,) = play(tmp_path, {"web": web}, ("t", "web__header", {}))
        assert told.content == "k1"
        monkeypatch.setenv("WEB_URL", url)
        entry = {"type": "http", "url": "${WEB_URL}", "headers": {"X-Key": "Bearer ${WEB_KEY}"}}
        (tmp_path / ".mcp.json").write_text(json.dumps({"mcpServers": {"web": entry}}))
        config = load_config(
            None, {"mcp": str(tmp_path / ".mcp.json"), "dataset_file": "x.jsonl", "run_name": "r"}
        )
        assert config.mcp is not None
        (told,) = play(tmp_path, config.mcp, ("t", "web__header", {}))
        assert told.content == "Bearer k1"
        assert "Bearer" not in json.dumps(config.to_json()["mcp"])
        monkeypatch.delenv("WEB_KEY")
        assert "needs the environment variable WEB_KEY" in refusal(**config.mcp)
    with pytest.raises(ConfigError, match=r"none\.json: neither JSON nor a file"):
        load_config(None, {"mcp": "none.json", "dataset_file": "x.jsonl", "run_name": "r"})


def write_config(cwd: Path, servers: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    options = {**SCRIPTED, "enabled_toolsets": list(servers), "mcp": dict(servers), **more}
    (cwd / "run.yaml").write_text(yaml.safe_dump(options))
    return {"config": "run.yaml"}


@pytest.mark.slow
def test_a_run_with_servers(tmp_path: Path) -> None:
    """They are offered, called and recorded, and no key of theirs is written."""
    script = [calls(call("raw__echo", text="hi"), call("raw__env")), say("done")]
    write_rows(tmp_path / "p.jsonl", *({"id": n, "prompt": "x", "script": script} for n in "ab"))
    raw = {"command": RAW, "env": {"TOKEN": "s3cr3t-value"}}
    given = write_config(tmp_path, {"raw": raw})
    done = run(tmp_path, **given, env={"SECRET_CANARY": "tweet"})
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / "trajectories" / "r"
    for record in lines(run_dir / "records.jsonl"):
        said = [m["content"] for m in record["messages"] if m["role"] == "tool"]
        assert said[0] == "hi"
        assert json.loads(said[1])["TOKEN"] == "s3cr3t-value"
        assert "tweet" not in said[1]
        assert record["toolsets"] == ["raw"]
    assert "s3cr3t" not in (run_dir / "run.json").read_text() + (run_dir / "run.log").read_text()
    assert (
        "The MCP server raw offers the tool 'echo', described as 'Say it again.'"
        in (run_dir / "run.log").read_text()
    )


def test_the_tools_of_servers_are_part_of_the_run_s_fingerprint(tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [say("done")]})

    def meaning(*more: str) -> Any:
        write_config(tmp_path, {"raw": {"command": [*RAW, *more], "env": {"A": more[0]}}})
        return data_options(make_plan(load_config(tmp_path / "run.yaml", {})).config)["mcp"]["raw"]

    first = meaning("{workspace}")
    assert first == meaning("{workspace}"), "a path that is new each time does not count"
    assert first["per_task"]
    assert first["tools"] != meaning("{workspace}", "--tool=new")["tools"]


def test_a_start_without_its_server_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [say("done")]})
    write_config(tmp_path, {"raw": {"command": "no-such-program"}})
    with pytest.raises(ConfigError, match="mcp: the server 'raw' did not start: "):
        make_plan(load_config(tmp_path / "run.yaml", {}))
    unused = make_plan(load_config(tmp_path / "run.yaml", {"enabled_toolsets": "file"}))
    assert unused.toolsets == ["file"]


@pytest.mark.slow
def test_no_server_survives_its_worker(tmp_path: Path) -> None:
    """After a SIGKILL of the worker neither the server nor its child is there any more."""
    script = [calls(call("raw__pids")), calls(call("raw__hang")), say("done")]
    write_rows(tmp_path / "p.jsonl", {"id": "a", "prompt": "x", "script": script})
    raw = {"command": RAW}
    with started(tmp_path, **write_config(tmp_path, {"raw": raw})) as process:
        inflight = tmp_path / "trajectories" / "r" / "inflight"

        def found() -> list[int]:
            with suppress(OSError, IndexError, ValueError, KeyError):
                for journal in inflight.iterdir():
                    for line in journal.read_text().splitlines():
                        message = json.loads(line)["event"].get("message", {})
                        if message.get("name") == "raw__pids":
                            return list(json.loads(message["content"]))
            return []

        wait_until(found)
        pids = found()
        assert len(pids) == 2
        assert all(map(is_alive, pids))
        (worker,) = workers_of(process.pid)
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, pids)))


def test_the_list_of_tools_says_which_are_available(tmp_path: Path) -> None:
    (tmp_path / "my_tools.py").write_text(
        'def shout(text: str) -> str:\n    """Say it louder. Much."""\n    return text\n'
    )
    given = write_config(
        tmp_path, {"raw": {"command": RAW}, "gone": {"command": "no-such-program"}}
    )
    shown = run(tmp_path, "tools", "--json", **given, tools="my_tools:shout")
    assert shown.returncode == 0, shown.stderr
    parsed = json.loads(shown.stdout)
    text = tools_as_text(parsed)
    assert "my_tools: Tools of my_tools\n  shout  Say it louder\n" in text
    assert "  raw__echo     Say it again\n" in text
    assert "gone: Tools of the MCP server gone\n  not available: mcp: the server" in text
    by_name = {entry["name"]: entry for entry in parsed}
    assert not by_name["gone"]["available"]
    assert by_name["my_tools"]["available"]
    assert by_name["raw"]["tools"][0]["name"] == "raw__big"
    assert by_name["file"]["tools"][0]["parameters"]["type"] == "object"


def test_an_agent_with_servers(tmp_path: Path) -> None:
    script = [calls(call("raw__echo", text="hi")), say("done")]
    agent = AIAgent(
        "scripted", script=script, mcp={"raw": {"command": RAW}}, enabled_toolsets="raw"
    )
    for _ in range(2):  # each prompt has an event loop of its own
        assert agent.run_conversation("x")["messages"][2]["content"] == "hi"
    with pytest.raises(ValueError, match="mcp: bad name"):
        AIAgent("scripted", script=script, mcp={"bad name": {"command": "x"}})


NPM = os.environ.get("MCP_NPM_DIR")


@pytest.mark.long
@pytest.mark.skipif(
    NPM is None, reason="MCP_NPM_DIR names no directory with the two servers from npm"
)
def test_servers_of_others(tmp_path: Path) -> None:
    """The two reference servers: `npm i @modelcontextprotocol/server-{everything,filesystem}`."""
    binaries = Path(str(NPM)) / "node_modules" / ".bin"
    servers = {
        "any": McpServer(command=("node", str(binaries / "mcp-server-everything"))),
        "fs": McpServer(command=("node", str(binaries / "mcp-server-filesystem"), "{workspace}")),
    }
    note = {"path": "/workspace/note.txt"}
    results = play(
        tmp_path,
        servers,
        ("a", "any__echo", {"message": "hi"}),
        ("a", "any__get-sum", {"a": 1, "b": "2"}),
        ("a", "any__get-tiny-image", {}),
        ("a", "fs__write_file", {**note, "content": "of a"}),
        ("a", "fs__read_text_file", note),
        ("b", "fs__read_text_file", note),
        ("b", "fs__read_text_file", {"path": "/etc/passwd"}),
        ("b", "fs__list_allowed_directories", {}),
    )
    contents = [result.content for result in results]
    assert contents[0] == "Echo: hi"
    assert results[1].details["failure"] == "invalid_arguments"
    assert "[image image/png, " in contents[2]
    assert contents[3:5] == ["Successfully wrote to /workspace/note.txt", "of a"]
    assert results[5].is_error, "each task has its own files"
    assert "outside allowed directories" in contents[6]
    assert contents[7] == "Allowed directories:\n/workspace"
