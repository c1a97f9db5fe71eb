"""What checks by real trainers say of labels, without a trainer: each token is a character."""

from __future__ import annotations

import pytest

from tests.fakes.trainers.labels import Labels

ROW = {
    "id": "r",
    "messages": [
        {"role": "user", "content": "question one"},
        {
            "role": "assistant",
            "content": "masked words",
            "weight": 0,
            "tool_calls": [{"function": {"name": "read_file", "arguments": {"path": "étude one"}}}],
        },
        {"role": "tool", "content": "result one"},
        {"role": "assistant", "reasoning_content": "thoughts", "content": 'an "answer"'},
    ],
}
TEXT = (
    '<user>question one<assistant>masked words{"name": "read_file", "path": "\\u00e9tude one"}'
    '<tool>result one<assistant>thoughts</think>{"text": "an \\"answer\\""}<end>'
)
ANSWER = TEXT.index("thoughts")


class Characters:
    """Ids are positions in the text."""

    def __init__(self, text: str = TEXT) -> None:
        self._text = text

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self._text[n] for n in ids]


def labels(*, changed: str = "", mark: bool = True, text: str = TEXT) -> str:
    """What is said where only the answer carries loss, but for the places of `changed`."""
    marks = [n >= ANSWER for n in range(len(text))]
    if changed:
        begin = TEXT.index(changed)
        marks[begin : begin + len(changed)] = [mark] * len(changed)
    checked = Labels(Characters())
    checked.add(ROW, range(len(text)), marks)
    return str(checked)


def test_all_of_learnt_turns_carries_loss_and_nothing_else() -> None:
    told = labels()
    assert "all 21 of the texts of 1 turns" in told
    assert "none of the 35 of 1 masked turns" in told
    assert "none of the 22 of others" in told


@pytest.mark.parametrize(
    ("changed", "mark", "why"),
    [
        ("ked wo", True, "message 1: 6 of 12 tokens carry loss: 'masked words'"),
        ("tude", True, "message 1: 4 of 14 tokens carry loss"),
        ("{", True, "message 1: 1 of "),  # what surrounds the texts of a masked turn
        ("sult", True, "message 2: 4 of 10 tokens carry loss"),
        ("question", True, "message 0: 8 of 12 tokens carry loss"),
        ("ough", False, "message 3: 4 of 8 tokens have no loss"),
        ("answer", False, "message 3: 6 of 13 tokens have no loss"),
    ],
)
def test_a_part_on_the_wrong_side_is_named(changed: str, mark: bool, why: str) -> None:
    with pytest.raises(AssertionError) as raised:
        labels(changed=changed, mark=mark)
    assert why in str(raised.value)


def test_a_learnt_text_that_is_not_there_is_named() -> None:
    with pytest.raises(AssertionError, match="message 3: not shown: 'an"):
        labels(text=TEXT[: TEXT.index("an ")])


def test_texts_of_masked_turns_that_are_not_there_are_counted() -> None:
    """Trainers may leave out the reasoning of earlier turns, which the model saw."""
    assert "1 masked turns (0 of their texts are not shown)" in labels()
    without = TEXT.replace("masked words", "")
    checked = Labels(Characters(without))
    begin = without.index("thoughts")
    checked.add(ROW, range(len(without)), [n >= begin for n in range(len(without))])
    assert "1 masked turns (1 of their texts are not shown)" in str(checked)
