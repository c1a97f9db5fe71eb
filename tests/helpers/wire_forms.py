"""What the requests of a log and the messages of rows say, in one form, by readers of their own.

A conversation is a list of steps. What is not the model's, up to its next words, is one text: rows
join what agents send in a row. White space, ids of calls, and how arguments are written do not
count. A picture is a picture: rows have placeholders.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Atom = tuple[str, Any]
"""`said` and a text of the other side, `thought`, `text`, or `call` with name and arguments."""


_PICTURE = "[picture]"
_THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_CALLS = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_PLACEHOLDER = re.compile(r"\[\w+: \d+ bytes, digest [0-9a-f]+\]")


def steps(atoms: Iterable[Atom]) -> str:
    """The conversation in one form, for comparisons."""
    found: list[list[Any]] = []
    for kind, value in atoms:
        words = "".join(value.split()) if isinstance(value, str) else value
        if words in ("", None):
            continue
        side = "said" if kind == "said" else "model"
        if not found or found[-1][0] != side:
            found.append([side, "", "", []] if side == "model" else [side, ""])
        step = found[-1]
        if kind == "call":
            step[3].append(words)
        else:
            step[2 if kind == "thought" else 1] += words
    return json.dumps(found, sort_keys=True)


def in_row(messages: Iterable[Mapping[str, Any]]) -> Iterator[Atom]:
    """The messages of a row of `openai`, or of a chat request."""
    for message in messages:
        content = message.get("content")
        text = content if isinstance(content, str) else texts_of(content)
        if message["role"] != "assistant":
            yield "said", _PLACEHOLDER.sub(_PICTURE, text)
            continue
        yield "thought", message.get("reasoning_content") or message.get("reasoning") or ""
        yield "text", text
        for call in message.get("tool_calls") or ():
            yield "call", _made(call["function"]["name"], call["function"]["arguments"])


def in_sharegpt(turns: Iterable[Mapping[str, Any]]) -> Iterator[Atom]:
    """The turns of a row of `hermes` or `llamafactory`."""
    for turn in turns:
        value = turn["value"]
        if turn["from"] not in ("gpt", "function_call"):
            yield "said", value
            continue
        for thought in _THOUGHT.findall(value):
            yield "thought", thought
        value = _THOUGHT.sub("", value)
        calls = _CALLS.findall(value)
        if turn["from"] == "function_call" and not calls:  # beside no text they have no tags
            value, calls = "", [value]
        yield "text", _CALLS.sub("", value)
        for text in calls:
            made = json.loads(text)
            for call in made if isinstance(made, list) else [made]:
                yield "call", _made(call["name"], call["arguments"])


def of_model(atoms: Iterable[Atom]) -> str:
    """What the model alone said, in one form."""
    return steps(atom for atom in atoms if atom[0] != "said")


def in_request(request: Mapping[str, Any]) -> Iterator[Atom]:
    """All that the model was shown, in any dialect of `AgentEndpoint`."""
    if "input" in request:
        yield "said", request.get("instructions") or ""
        yield from _items(request["input"])
    elif "contents" in request:
        yield "said", texts_of((request.get("systemInstruction") or {}).get("parts"))
        for content in request["contents"]:
            yield from _parts(content["parts"], "text" if content["role"] == "model" else "said")
    elif any("role" in m and m["role"] == "tool" for m in request["messages"]) or (
        "system" not in request
    ):
        yield from in_row(request["messages"])
    else:
        system = request["system"]
        yield "said", system if isinstance(system, str) else texts_of(system)
        for message in request["messages"]:
            content = message["content"]
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
            yield from _blocks(blocks, "text" if message["role"] == "assistant" else "said")


def in_reply(reply: Mapping[str, Any]) -> Iterator[Atom]:
    """What the model replied."""
    if "choices" in reply:
        yield from in_row([{"role": "assistant", **reply["choices"][0]["message"]}])
    elif "output" in reply:
        yield from _items(reply["output"])
    elif "candidates" in reply:
        yield from _parts(reply["candidates"][0]["content"]["parts"], "text")
    else:
        yield from _blocks(reply["content"], "text")


def _items(items: Iterable[Mapping[str, Any]]) -> Iterator[Atom]:
    for item in items:
        match item.get("type", "message"):
            case "message":
                content = item["content"]
                text = content if isinstance(content, str) else texts_of(content)
                yield "text" if item["role"] == "assistant" else "said", text
            case "reasoning":
                yield "thought", texts_of(item.get("summary"))
            case "function_call" | "custom_tool_call":
                yield "call", _made(item["name"], item.get("arguments", item.get("input")))
            case "function_call_output" | "custom_tool_call_output":
                output = item["output"]
                yield "said", output if isinstance(output, str) else texts_of(output)
            case other:
                raise AssertionError(f"unknown item {other}")


def _blocks(blocks: Iterable[Mapping[str, Any]], kind: str) -> Iterator[Atom]:
    for block in blocks:
        match block["type"]:
            case "text":
                yield kind, block["text"]
            case "thinking":
                yield "thought", block["thinking"]
            case "tool_use":
                yield "call", _made(block["name"], block["input"])
            case "tool_result":
                content = block.get("content") or ""
                yield "said", content if isinstance(content, str) else texts_of(content)
            case "image":
                yield kind, _PICTURE
            case other:
                raise AssertionError(f"unknown block {other}")


def _parts(parts: Iterable[Mapping[str, Any]], kind: str) -> Iterator[Atom]:
    for part in parts:
        if "functionCall" in part:
            yield "call", _made(part["functionCall"]["name"], part["functionCall"]["args"])
        elif "functionResponse" in part:
            yield "said", _output(part["functionResponse"]["response"])
        elif "inlineData" in part:
            yield kind, _PICTURE
        else:
            yield "thought" if part.get("thought") else kind, part["text"]


def _output(response: Mapping[str, Any]) -> str:
    values = [*response.values()]
    is_text = len(values) == 1 and isinstance(values[0], str)
    return values[0] if is_text else json.dumps(response, ensure_ascii=False)


def texts_of(parts: Any) -> str:
    """The texts of parts of a message; a picture is one word."""
    return "\n".join(part.get("text", _PICTURE) for part in parts or ())


def _made(name: str, arguments: Any) -> list[Any]:
    given = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    return [name, given]
