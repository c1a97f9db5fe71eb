"""What looks like structure and is not: in every format it is text, or the row is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.builders import assistant, call, record_of, result, user
from tests.helpers.exporting import export_to_dataset, make_run
from tests.helpers.running import lines
from tests.helpers.stored import ROW_FORMATS

FORGED = ("</think>", "<tool_call>", "</tool_call>", "</tool_response>", "<|im_start|>", "[INST]")
PLAIN = ("\u2028", "\u0085", "\ufeff", "\u0000", "\U0001f600")
PLACES = ("prompt", "system", "reasoning", "text", "arguments", "result")
FORMATS = (*ROW_FORMATS, "kto", "raw")
"""All that hold the text of one conversation; a pair holds those of kto."""


def forge(place: str, token: str) -> dict[str, Any]:
    """A record that holds `token` in one place."""
    here = {name: f"a {token} b" if name == place else "plain" for name in PLACES}
    arguments = json.dumps({"city": here["arguments"]}, ensure_ascii=False)
    return record_of(
        {"role": "system", "content": here["system"]},
        user(here["prompt"]),
        assistant(here["text"], call(arguments), reasoning=here["reasoning"]),
        result(here["result"]),
        assistant("Done.", reasoning="So."),
        check={"passed": True, "reward": 1.0},
    )


def texts(value: Any) -> list[str]:
    """All strings of a row, those in its JSON columns too."""
    if isinstance(value, dict):
        return [text for member in value.values() for text in texts(member)]
    if isinstance(value, list):
        return [text for element in value for text in texts(element)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("name", FORMATS)
def test_is_text_or_refused(tmp_path: Path, name: str) -> None:
    cases = [(place, token) for place in PLACES for token in FORGED]
    source = make_run(tmp_path, *(forge(*case) for case in cases))
    directory, manifest = export_to_dataset(source, formats=name, system="saved")
    rows = {row["id"]: row for row in _rows(directory, name)}
    refused = {line["id"]: line["reason"] for line in lines(directory / "rejects.jsonl")}
    assert len(rows) + len(refused) == len(cases) == manifest["tasks"]
    for number, (place, token) in enumerate(cases):
        if (row := rows.get(f"t{number}")) is None:
            assert refused[f"t{number}"] in (
                "control_token",
                "marker_in_text",
                "marker_in_arguments",
                "marker_in_result",
            )
            continue
        if name in ("atif", "raw"):  # documents, which nothing tokenizes
            continue
        spoken = "\n".join(texts([row.get("conversations"), row.get("messages")]))
        assert "<|im_start|>" not in spoken, (place, token)
        if name == "hermes":
            _, human, said, answered, last = row["conversations"]
            assert said["value"].count("<tool_call>") == said["value"].count("</tool_call>") == 1
            assert said["value"].count("</think>") == last["value"].count("</think>") == 1
            assert answered["value"].count("</tool_response>") == 1
            assert (token in human["value"]) == (place == "prompt")
            assert "[INST]" not in answered["value"]
            body = answered["value"].removeprefix("<tool_response>\n")
            parsed = json.loads(body.removesuffix("\n</tool_response>"))["content"]
            assert parsed == (f"a {token} b" if place == "result" else "plain")
        if name == "llamafactory":
            kinds = [turn["from"] for turn in row["conversations"]]
            assert kinds == ["system", "human", "function_call", "observation", "gpt"]


@pytest.mark.parametrize("name", ["openai", "kto"])
def test_ids_of_calls_are_not_structure(tmp_path: Path, name: str) -> None:
    """There are templates that spell them out."""
    record = record_of(
        user(),
        assistant("", call(id="c<|im_end|>")),
        result("r", id="c<|im_end|>"),
        assistant("Done."),
        check={"reward": 1},
    )
    _, manifest = export_to_dataset(make_run(tmp_path, record), formats=name)
    assert manifest["formats"][0]["rejected_by_reason"] == {"control_token": 1}


@pytest.mark.parametrize("name", ["hermes", "openai", "llamafactory"])
def test_structure_is_found_behind_many_other_tags(tmp_path: Path, name: str) -> None:
    forgeries = [forge("result", "<b>" * count + "<|im_start|>") for count in (15, 16, 17, 100)]
    directory, manifest = export_to_dataset(make_run(tmp_path, *forgeries), formats=name)
    if name == "hermes":
        values = [row["conversations"][3]["value"] for row in _rows(directory, name)]
        assert len(values) == 4
        assert not any("<|im_start|>" in value for value in values)
    else:
        assert manifest["formats"][0]["rejected_by_reason"] == {"control_token": 4}


@pytest.mark.parametrize("name", FORMATS)
def test_odd_characters_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    cases = [(place, token) for place in ("prompt", "reasoning", "result") for token in PLAIN]
    source = make_run(tmp_path, *(forge(*case) for case in cases))
    directory, _ = export_to_dataset(source, formats=name)
    rows = {row["id"]: row for row in _rows(directory, name)}
    for number, (place, token) in enumerate(cases):
        told = "\n".join(texts(rows[f"t{number}"]))
        written = json.dumps(token, ensure_ascii=False)[1:-1]
        assert f"a {token} b" in told or f"a {written} b" in told, (place, token)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "raw"])
@pytest.mark.parametrize("arguments", ['{"a": NaN}', '{"a": 1e999}', '{"a": 1, "a": 2}', "[1]"])
def test_arguments_that_readers_distinguish_are_rejected(
    tmp_path: Path, name: str, arguments: str
) -> None:
    record = record_of(
        user(), assistant("", call(arguments)), result("r"), assistant("Done."), check={"reward": 1}
    )
    directory, manifest = export_to_dataset(make_run(tmp_path, record), formats=name)
    assert set(manifest["rejected_by_reason"]) <= {"arguments_not_json", "arguments_not_object"}
    assert manifest["rejected"] == 1
    assert not list(_rows(directory, name))


def _rows(directory: Path, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for path in (directory / name).glob("*.jsonl") if (directory / name).is_dir() else ():
        # Split at line feeds alone, as readers of JSON lines do.
        rows += [json.loads(line) for line in path.read_bytes().decode().split("\n") if line]
    for row in rows:
        row.setdefault("id", row.get("session_id"))
    return rows
