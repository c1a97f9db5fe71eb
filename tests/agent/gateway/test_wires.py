"""What agents send is read, and what they get is written, as their own clients know it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.models.dialects.dialect import get_dialect, read_reply
from agent.models.model import ignore_event
from agent.wires.base import Wire
from agent.wires.wire import NOTHING_VOLATILE, Volatile, WireError, WireRequest
from agent.wires.wires import WIRES
from batch_trajectories.basics import exact_json
from tests.agent.gateway.talking import PATHS, TALKS, Said, Talk, api_of, path_for
from tests.helpers.builders import chat_reply

JSON = dict[str, Any]
CALM = settings(deadline=None, derandomize=True, database=None)
EACH = pytest.mark.parametrize("api", TALKS)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
SAID = st.builds(
    Said, TEXTS, st.one_of(st.none(), TEXTS), st.one_of(st.just(""), st.just("Hm."), TEXTS)
).filter(lambda said: said.text or said.command is not None)


def key_of(talk: Talk, volatile: Volatile = NOTHING_VOLATILE) -> str:
    return WIRES[api_of(talk)].read(path_for(talk), talk.body(), volatile).key


def assemble(wire: Wire, events: list[bytes]) -> JSON:
    """The body that a stream's events make up, parsed as clients parse them."""
    assembly = get_dialect(wire.api).assembly(ignore_event)
    for event in events:
        assert event.endswith(b"\n\n")
        data = [line for line in event.decode().split("\n") if line.startswith("data: ")]
        for line in data:
            if line != "data: [DONE]":
                assembly.add(json.loads(line.removeprefix("data: ")))
    body: JSON = json.loads(assembly.finish())
    return body


def drop_nulls(body: JSON) -> JSON:
    """A body without nulls, and what a stream does not bring."""
    return {
        key: value
        for key, value in body.items()
        if value is not None and key not in ("object", "created")
    }


@EACH
@given(said=SAID)
@CALM
def test_a_reply_is_the_same_streamed_and_in_one_piece(api: str, said: Said) -> None:
    """Answers from the journal may be asked for in the other way than the recorded call was."""
    wire, reply = WIRES[api], TALKS[api]().reply(said)
    once = assemble(wire, wire.write_stream(reply))
    assert assemble(wire, wire.write_stream(once)) == once
    assert read_reply(api, exact_json.dumps(once)) == read_reply(api, exact_json.dumps(reply))
    assert read_reply(api, wire.write_whole(once)) == read_reply(api, wire.write_whole(reply))


@pytest.mark.parametrize("order", [("reasoning", "content"), ("content", "reasoning_content")])
def test_text_and_reasoning_are_streamed_again_in_the_order_in_which_they_came(
    order: tuple[str, str],
) -> None:
    wire = WIRES["openai_chat"]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", **dict.fromkeys(order, "Said."), "tool_calls": [call]}
    reply = chat_reply(said)
    events = [json.loads(e.partition(b"data: ")[2]) for e in wire.write_stream(reply)[:-1]]
    keys = [key for event in events for key in event["choices"][0]["delta"]]
    in_one = order[0] != "content"  # clients read the reasoning of a part before its text
    assert len(events) == (2 if in_one else 3)
    assert [key for key in keys if key in order] == [*order]
    assert [*assemble(wire, wire.write_stream(reply))["choices"][0]["message"]] == [*said]


@EACH
@given(said=SAID)
@CALM
def test_only_the_end_of_a_stream_waits(api: str, said: Said) -> None:
    """From the event that ends the reply on, all have to wait; text before it does not."""
    wire = WIRES[api]
    events = wire.write_stream(TALKS[api]().reply(said))
    data = [event.decode().partition("data: ")[2].strip() for event in events]
    ends = [wire.ends_reply(one) for one in data]
    assert ends.index(True) >= 1
    body = assemble(wire, events[: ends.index(True)])
    with pytest.raises(Exception, match=r"finish_?[rR]eason|stop_reason|status"):
        read_reply(api, exact_json.dumps(body))


@EACH
def test_keys_ignore_what_changes_from_start_to_start(api: str) -> None:
    """Two starts differ in ids, sessions, marks for the cache and in how arguments are written."""

    def start(*, thought: str) -> Talk:
        talk = TALKS[api]()
        talk.say("Count.")
        talk.hear(talk.reply(Said("Now.", 'ls "a"', thought=thought)))
        talk.result("a b")
        return talk

    one, other = start(thought="A."), start(thought="B.")
    assert one.body() != other.body()
    assert key_of(one) == key_of(other)


@EACH
@pytest.mark.parametrize("change", ["model", "text", "system", "tools", "limit", "result"])
def test_keys_cover_what_decides_the_reply(api: str, change: str) -> None:
    def talk(**fields: Any) -> Talk:
        made = TALKS[api](**fields)
        made.say("Count it." if change == "text" and fields.get("model") == "other" else "Count.")
        return made

    plain = talk()
    plain.hear(plain.reply(Said("", "ls")))
    plain.result("a")
    changed = copy.deepcopy(plain)
    match change:
        case "model":
            changed.model = "m-2"
        case "system":
            changed.system = "You rest."
        case "tools":
            changed.has_tools = False
        case "text":
            changed.say("And more.")
        case "result":
            changed = talk()
            changed.hear(changed.reply(Said("", "ls")))
            changed.result("b")
        case "limit":
            wire = WIRES[api]
            path, body = wire.rewrite(PATHS[api], plain.body(), max_tokens=10)
            assert wire.read(path, body).key != key_of(plain)
            return
    assert key_of(changed) != key_of(plain)


@EACH
def test_volatile_texts_are_cut_from_the_key_and_kept_in_the_messages(api: str) -> None:
    def talk(seconds: str) -> Talk:
        made = TALKS[api]()
        made.say("Count.")
        made.hear(made.reply(Said("", "ls")))
        made.result(f"Wall time: {seconds} seconds\na b")
        return made

    volatile = Volatile(texts=(r"Wall time: [0-9.]+ seconds",))
    one, other = talk("0.01"), talk("0.02")
    assert key_of(one) != key_of(other)
    assert key_of(one, volatile) == key_of(other, volatile)
    request = WIRES[api].read(PATHS[api], one.body(), volatile)
    assert "Wall time: 0.01" in request.messages[-1]["content"]


def test_volatile_fields_are_left_out_of_the_key() -> None:
    wire = WIRES["openai_chat"]
    body = ChatBody(session={"id": "a", "kind": "k"}, steps=[{"at": 1, "n": 1}])
    other = ChatBody(session={"id": "b", "kind": "k"}, steps=[{"at": 2, "n": 1}])
    changed = ChatBody(session={"id": "b", "kind": "other"}, steps=[{"at": 2, "n": 1}])
    volatile = Volatile(fields=("session.id", "steps.*.at"))
    keys = [wire.read("/v1/chat/completions", one, volatile).key for one in (body, other, changed)]
    assert keys[0] == keys[1] != keys[2]


def ChatBody(**fields: Any) -> JSON:
    return {"model": "m", "messages": [{"role": "user", "content": "Hi."}], **fields}


@EACH
@given(said=st.lists(SAID, min_size=1, max_size=4), edited=st.booleans())
@CALM
def test_a_request_reads_the_same_with_and_without_earlier_ones(
    api: str, said: list[Said], edited: bool
) -> None:
    """What a request repeats of an earlier one is not read again."""
    wire, talk = WIRES[api], TALKS[api]()
    before: list[WireRequest] = []
    talk.say("Count.")
    for n, one in enumerate(said):
        request = wire.read(PATHS[api], talk.body(), NOTHING_VOLATILE, before)
        alone = wire.read(PATHS[api], talk.body())
        assert (request.key, request.messages) == (alone.key, alone.messages)
        assert (request.digests, request.tools) == (alone.digests, alone.tools)
        before = [request]
        if edited and n == 1:
            talk.system = "You rest."
        talk.hear(talk.reply(one))
        if one.command is None:
            talk.say("More.")
        else:
            talk.result("a")


@EACH
def test_what_a_request_repeats_is_not_read_again(api: str) -> None:
    wire, talk = WIRES[api], TALKS[api]()
    talk.say("Count.")
    first = wire.read(PATHS[api], talk.body())
    talk.hear(talk.reply(Said("Done.")))
    talk.say("More.")
    second = wire.read(PATHS[api], talk.body(), NOTHING_VOLATILE, [first])
    assert second.parts[0] is first.parts[0]
    assert second.offer is first.offer


@EACH
def test_a_body_is_rewritten_only_where_it_must_be(api: str) -> None:
    wire, talk = WIRES[api], TALKS[api]()
    talk.say("Count.")
    body = talk.body()
    kept = copy.deepcopy(body)
    path, new = wire.rewrite(PATHS[api], body, model="other", max_tokens=100)
    assert body == kept
    request = wire.read(path, new)
    assert (request.model, request.max_tokens) == ("other", 100)
    if api == "gemini":
        assert wire.upstream_path(path) == "/v1beta/models/other:streamGenerateContent?alt=sse"
    _, more = wire.rewrite(PATHS[api], body, max_tokens=10**6)
    assert wire.read(PATHS[api], more).max_tokens == 8000
    _, same = wire.rewrite(PATHS[api], body, without_server_tools=True)
    assert same == body


@pytest.mark.parametrize(
    ("api", "name"),
    [
        ("openai_chat", "max_tokens"),
        ("openai_chat", "max_completion_tokens"),
        ("anthropic_messages", "max_tokens"),
        ("openai_responses", "max_output_tokens"),
    ],
)
def test_a_limit_that_is_not_a_number_is_replaced(api: str, name: str) -> None:
    """Whatever a body asks for, a run with a budget can limit the reply."""
    _, new = WIRES[api].rewrite(PATHS[api], {"model": "m", name: "9000"}, max_tokens=100)
    assert new == {"model": "m", name: 100}


@EACH
def test_keys_and_connections_of_agents_are_not_passed_on(api: str) -> None:
    headers = {
        "Authorization": "Bearer sk",
        "X-Api-Key": "sk",
        "x-goog-api-key": "sk",
        "Cookie": "a=b",
        "Host": "localhost",
        "Connection": "keep-alive",
        "Content-Length": "1",
        "Accept-Encoding": "gzip",
        "User-Agent": "agent",
        "X-Claude-Code-Session-Id": "1",
        "Anthropic-Beta": "a,b",
        "OpenAI-Beta": "c",
    }
    kept = {"anthropic_messages": {"anthropic-beta": "a,b"}, "gemini": {}}
    assert WIRES[api].request_headers(headers) == kept.get(api, {"openai-beta": "c"})


@EACH
def test_errors_have_the_words(api: str) -> None:
    wire = WIRES[api]
    whole = json.loads(wire.write_error(400, "budget", "The budget is spent."))
    assert "The budget is spent." in whole["error"]["message"]
    assert b"The budget is spent." in wire.write_stream_error(400, "budget", "The budget is spent.")


@EACH
@pytest.mark.parametrize("damage", ["model", "messages"])
def test_a_body_that_is_no_request_is_refused_with_the_place(api: str, damage: str) -> None:
    wire, talk = WIRES[api], TALKS[api]()
    talk.say("Count.")
    body = talk.body()
    path = PATHS[api]
    field = {"openai_responses": "input", "gemini": "contents"}.get(api, "messages")
    if damage == "messages":
        body[field] = [{"role": "user", "content": "Hi."}, {"role": "nobody", "content": "x"}]
        if api == "gemini":
            body[field] = [{"role": "nobody", "parts": []}]
    elif api == "gemini":
        path = path.replace("models/m:", "models/:")
    else:
        del body["model"]
    with pytest.raises(WireError, match=field if damage == "messages" else "model"):
        wire.read(path, body)


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", "/v1/chat/completions", ("openai_chat", "call")),
        ("POST", "/chat/completions", ("openai_chat", "call")),
        ("GET", "/v1/chat/completions", ("openai_chat", "other")),
        ("POST", "/v1/messages?beta=true", ("anthropic_messages", "call")),
        ("POST", "/v1/messages/count_tokens", ("anthropic_messages", "count_tokens")),
        ("POST", "/v1/responses", ("openai_responses", "call")),
        ("GET", "/v1/responses", ("openai_responses", "other")),
        ("POST", "/v1/responses/input_tokens", ("openai_responses", "count_tokens")),
        ("POST", "/v1/responses/compact", ("openai_responses", "other")),
        ("POST", "/v1beta/models/m-1:generateContent", ("gemini", "call")),
        ("POST", "/v1beta/models/m-1:countTokens", ("gemini", "count_tokens")),
        ("POST", "/v1beta/models/m-1:embedContent", ("gemini", "other")),
        ("POST", "/v1/messages/batches", ("anthropic_messages", "other")),
        ("HEAD", "/", None),
        ("GET", "/v1/models", None),
    ],
)
def test_paths_name_the_dialect(method: str, path: str, expected: Any) -> None:
    found = [(wire.api, wire.operation(method, path)) for wire in WIRES.values()]
    assert [each for each in found if each[1]] == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("api", "fields", "names"),
    [
        (
            "openai_chat",
            {"web_search_options": {}, "tool_choice": "auto"},
            ("web_search_options",),
        ),
        (
            "anthropic_messages",
            {
                "tools": [
                    {"type": "web_search_20250305", "name": "web_search"},
                    {"type": "bash_20250124", "name": "bash"},
                ],
                "mcp_servers": [{"type": "url", "url": "https://127.0.0.1/", "name": "files"}],
                "tool_choice": {"type": "tool", "name": "web_search"},
            },
            ("web_search", "files"),
        ),
        (
            "openai_responses",
            {
                "tools": [
                    {"type": "web_search"},
                    {"type": "mcp", "server_label": "files", "server_url": "https://127.0.0.1/"},
                    {"type": "function", "name": "bash", "parameters": {}},
                ],
                "tool_choice": {"type": "web_search"},
            },
            ("web_search", "files"),
        ),
        (
            "gemini",
            {
                "tools": [
                    {"googleSearch": {}, "functionDeclarations": [{"name": "bash"}]},
                    {"codeExecution": {}},
                ],
                "tool_choice": "auto",
            },
            ("googleSearch", "codeExecution"),
        ),
    ],
)
def test_tools_that_the_provider_would_run_are_named_and_removed(
    api: str, fields: JSON, names: tuple[str, ...]
) -> None:
    wire, talk = WIRES[api], TALKS[api]()
    talk.say("Count.")
    body = talk.body() | fields
    assert wire.read(PATHS[api], body).server_tools == names
    _, new = wire.rewrite(PATHS[api], body, without_server_tools=True)
    request = wire.read(PATHS[api], new)
    assert request.server_tools == ()
    assert [tool["function"]["name"] for tool in request.tools] == ["bash"]
    assert new["tool_choice"] in ("auto", {"type": "auto"})


def test_images_are_readable_in_the_text_and_whole_beside_it() -> None:
    url = {"url": "data:image/png;base64,AAAA"}
    image = {"type": "image_url", "image_url": url}
    parts = [{"type": "text", "text": "See:"}, image]
    body = {"model": "m", "messages": [{"role": "user", "content": parts}]}
    [message] = WIRES["openai_chat"].read("/v1/chat/completions", body).messages
    assert message["content"].startswith("See:\n[image_url: ")
    assert message["provider_blocks"] == {"api": "openai_chat", "blocks": [image]}
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    block = {"type": "image", "source": source}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block], "is_error": True}
    body = {"model": "m", "messages": [{"role": "user", "content": [result]}]}
    [message] = WIRES["anthropic_messages"].read("/v1/messages", body).messages
    assert message["role"] == "tool"
    assert message["is_error"]
    assert message["content"].startswith("[image: ")
    assert message["provider_blocks"]["blocks"] == [block]


def test_results_whose_ids_no_call_has_are_in_the_order_of_calls() -> None:
    """Subagents of Gemini CLI repeat calls without ids, and give the results ids of their own."""

    def made(name: str, **id: str) -> JSON:
        return {"functionCall": {"name": name, "args": {}, **id}}

    def result(name: str, id: str) -> JSON:
        return {"functionResponse": {"name": name, "id": id, "response": {"output": id}}}

    def ids(calls: list[JSON], results: list[JSON]) -> list[tuple[str, Any]]:
        turns = [("user", [{"text": "Go."}]), ("model", calls), ("user", results)]
        contents = [{"role": role, "parts": parts} for role, parts in turns]
        request = WIRES["gemini"].read(PATHS["gemini"], {"contents": contents})
        _, reply, *said = request.messages
        assert [one["content"] for one in said] == ["u#0-0", "u#0-1"]
        found = [call["id"] for call in reply["tool_calls"]]
        return [*zip(found, [one["tool_call_id"] for one in said], strict=True)]

    both = [result("bash", "u#0-0"), result("read", "u#0-1")]
    assert ids([made("bash"), made("read")], both) == [("call_0", "call_0"), ("call_1", "call_1")]
    own = [made("bash", id="u#0-0"), made("read", id="u#0-1")]
    assert ids(own, both) == [("u#0-0", "u#0-0"), ("u#0-1", "u#0-1")]
    # A result of another tool answers none of them.
    assert ids([made("edit"), made("read")], both) == [("call_0", "u#0-0"), ("call_1", "call_1")]


def test_tools_with_free_text_are_tools_with_one_argument() -> None:
    """Codex patches files with one; its calls and results have types of their own."""
    wire = WIRES["openai_responses"]
    call = {"type": "custom_tool_call", "id": "c", "call_id": "call_1", "name": "apply_patch"}
    call["input"] = "*** Begin Patch"
    body = {
        "model": "m",
        "tools": [{"type": "custom", "name": "apply_patch", "description": "Patches."}],
        "input": [
            {"role": "user", "content": "Patch it."},
            call,
            {"type": "custom_tool_call_output", "call_id": "call_1", "output": "Done."},
        ],
    }
    request = wire.read("/v1/responses", body)
    [tool] = request.tools
    assert tool["function"]["parameters"]["required"] == ["input"]
    _, made, result = request.messages
    [read] = made["tool_calls"]
    assert json.loads(read["function"]["arguments"]) == {"input": "*** Begin Patch"}
    assert (result["tool_call_id"], result["name"]) == ("call_1", "apply_patch")
    reply = {"id": "r", "status": "completed", "output": [call]}
    completion = read_reply(wire.api, exact_json.dumps(reply))
    assert completion.message["tool_calls"] == made["tool_calls"]
    assert completion.finish_reason == "tool_calls"
    assert assemble(wire, wire.write_stream(reply)) == reply


@pytest.mark.parametrize("schema", [True, [], "object", 1])
def test_a_schema_that_is_no_object_is_recorded_as_one(schema: Any) -> None:
    """Some servers take any; the readers of records need objects."""
    function = {"name": "f", "parameters": schema, "description": ["Does it."]}
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "Go."}],
        "tools": [{"type": "function", "function": function}],
    }
    [tool] = WIRES["openai_chat"].read("/v1/chat/completions", body).tools
    assert tool["function"] == {
        "name": "f",
        "description": "['Does it.']",
        "parameters": {"type": "object", "properties": {}},
    }
