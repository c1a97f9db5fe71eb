"""Differences between requests are named, with the line of a file that has them ignored."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from agent.gateway.command_agent import CommandAgent
from batch_trajectories.agents.checking import Difference, differences


def messages(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text} for text in texts]}


def advice(difference: Difference) -> list[str]:
    """The expressions of the advice, as a file of an agent would have them."""
    texts = CommandAgent.model_validate(
        {
            "command": ["agent", "{prompt}"],
            "speaks": ["openai_chat"],
            **yaml.safe_load(difference.advice),
        }
    ).volatile.texts
    assert texts
    return [*texts]


def test_equal_requests_have_none() -> None:
    assert [*differences(messages("a", "b"), messages("a", "b"))] == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("It is 17:03 now.", "It is 17:04 now."),
        ("session=<ab12>, pid 7", "session=<ff00>, pid 8"),
        ("Files (2):\n  created 12\n", "Files (2):\n  created 13\n"),
        ('{"id": "x1", "n": 1}', '{"id": "y22", "n": 1}'),
    ],
)
def test_the_advice_for_texts_makes_them_equal(before: str, after: str) -> None:
    for difference in differences(messages("same", before), messages("same", after)):
        assert difference.path == "messages.1.content"
        for pattern in advice(difference):
            before, after = (re.sub(pattern, "", text) for text in (before, after))
    assert before == after


def test_the_advice_holds_on_another_day() -> None:
    texts = "(now 2026-11-29 16:03:25)", "(now 2026-11-29 16:03:26)"
    (difference,) = differences(messages(texts[0]), messages(texts[1]))
    (pattern,) = advice(difference)
    assert re.sub(pattern, "", "(now 2027-01-03 09:00:00)") == ""


def test_no_advice_ignores_a_whole_text() -> None:
    (difference,) = differences(messages("alpha"), messages("beta"))
    assert difference.advice == ""


def test_a_field_is_named_by_its_path() -> None:
    before, after = {"client": {"id": 1, "os": "linux"}}, {"client": {"id": 2, "os": "linux"}}
    assert [*differences(before, after)] == [
        Difference("client.id", "1", "2", 'volatile: {fields: ["client.id"]}')
    ]


def test_what_only_one_request_has_is_named() -> None:
    (difference,) = differences(messages("a"), messages("a", "b"))
    assert (difference.path, difference.before) == ("messages.1", "(nothing)")
    (difference,) = differences({"seed": 1}, {})
    assert difference == Difference("seed", "1", "(nothing)", 'volatile: {fields: ["seed"]}')
