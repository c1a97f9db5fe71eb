"""ContentDigest prompts: every bad line is named, every good one has an identity that lasts."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from batch_trajectories.basics.errors import DatasetChanged, DatasetError
from batch_trajectories.dataset.lines import ContentDigest, Row, read_rows
from batch_trajectories.dataset.row import RowRules
from batch_trajectories.dataset.row_conversation import opening_messages
from batch_trajectories.dataset.scan import scan, tasks
from batch_trajectories.records.tasks import BadRow, Task


def write(path: Path, *lines: object) -> Path:
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(texts) + b"\n")
    return path


def test_a_pipe_is_named_instead_of_waited_for(tmp_path: Path) -> None:
    """It is read more than once, and one without a writer never ends."""
    os.mkfifo(tmp_path / "p.jsonl")
    with pytest.raises(DatasetError, match=r"p\.jsonl is a pipe or device.*give a plain file"):
        scan(tmp_path / "p.jsonl", max_samples=None)


def all_tasks(path: Path, num_samples: int = 1, max_samples: int | None = None) -> list[Task]:
    return list(tasks(scan(path, max_samples=max_samples, num_samples=num_samples)))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not a JSON object: this looks like one over several lines"),
        (b'{"prompt": "a", "x": NaN}', "not JSON"),
        (b'{"prompt": "\\ud800"}', "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b'"text"', "the line is text; it must be a JSON object"),
        (b"[", "looks like a JSON array"),
        (b"{}", "no `prompt` field (fields: none)"),
        (b'{"question": "a"}', "no `prompt` field (fields: question)"),
        (b'{"prompt": 3}', "`prompt` is a number"),
        (b'{"prompt": null}', "`prompt` is null"),
        (b'{"prompt": "  "}', "`prompt` is empty"),
        (b'{"prompt": []}', "must end in a user message"),
        (b'{"prompt": ["a"]}', "prompt[0] must be an object"),
        (b'{"prompt": [{"role": "tool", "content": "a"}]}', "prompt[0] must be an object"),
        (b'{"prompt": [{"role": "assistant", "content": "a"}]}', "must end in a user message"),
        (
            b'{"prompt": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}',
            "must alternate",
        ),
        (b'{"prompt": "a", "n": 1' + b"0" * 5000 + b"}", "not JSON: number is infinity"),
        (b'{"prompt": "a", "script": [{"contents": "b"}]}', "script.0.contents"),
        (b'{"prompt": "a", "x": ' + b"[" * 260 + b"]" * 260 + b"}", "nested deeper than 100"),
        (b'{"prompt": ' + b"[" * 2000, "not JSON"),
    ],
)
def test_a_bad_line_has_a_reason_and_stops_nothing(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "before"}, line, {"prompt": "after"})
    rows = list(read_rows(path, RowRules(script="allowed"), ContentDigest()))
    assert isinstance(rows[0], Row)
    assert isinstance(rows[1], BadRow)
    assert isinstance(rows[2], Row)
    assert rows[1].line == 2
    assert reason in rows[1].reason


@pytest.mark.parametrize(
    "content",
    [
        b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}',
        b'{"prompt": "a"}\r\n\r\n  \r\n{"prompt": "b"}\r\n',
        '{"prompt": "a"}\n{"prompt": "b", "note": "\u2028 \u0085"}\n'.encode(),
    ],
    ids=["byte order mark", "windows line ends and blank lines", "unicode line separators"],
)
def test_unusual_files_are_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "p.jsonl").write_bytes(content)
    assert [task.columns["prompt"] for task in all_tasks(tmp_path / "p.jsonl")] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"\n \n", "the file is empty"),
        (b"\x1f\x8b\x08", "gzip"),
        (b"\xff\xfe{\x00", "UTF-16;"),
        ('{"prompt": "a"}'.encode("utf-32"), "-f UTF-32 "),
        ('{"prompt": "a"}'.encode("utf-16-le"), "-f UTF-16LE "),
        ('{"prompt": "a"}'.encode("utf-16-be"), "-f UTF-16BE "),
        (b"nonsense\n", "no usable row among 1; the first, line 1: not JSON"),
    ],
)
def test_a_file_without_a_usable_row_is_an_error(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(DatasetError, match=message):
        scan(tmp_path / "p.jsonl", max_samples=None)


def test_a_missing_file_and_a_directory_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no such dataset file"):
        scan(tmp_path / "absent", max_samples=None)
    with pytest.raises(DatasetError, match="is a directory"):
        scan(tmp_path, max_samples=None)


def test_own_ids_are_kept_and_repeated_ones_are_counted(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        {"id": "one", "prompt": "a"},
        {"task_id": 2, "prompt": "b"},
        {"id": "same", "prompt": "c"},
        {"id": "same", "prompt": "d"},
        {"id": "", "prompt": "e"},
    )
    ids = [task.id for task in all_tasks(path)]
    assert ids[:4] == ["one", "2", "same", "same#2"]
    assert ids[4].startswith("row-")


def test_appending_a_row_with_a_used_id_renames_no_task(tmp_path: Path) -> None:
    """Nor does raising --max_samples so that it comes into view: finished work stays finished."""
    rows = [{"id": "k", "prompt": "a"}, {"id": "l", "prompt": "b"}, {"id": "k", "prompt": "c"}]
    path = write(tmp_path / "p.jsonl", *rows)
    before = {task.key for task in all_tasks(path, max_samples=2)}
    assert before < {task.key for task in all_tasks(path)}


def test_a_column_called_script_is_only_read_by_the_scripted_model(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "x", "script": "echo hi"})
    assert len(all_tasks(path)) == 1
    with pytest.raises(DatasetError, match="script: "):
        scan(path, max_samples=None, rules=RowRules(script="allowed"))


def test_equal_rows_are_tasks_of_their_own(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", *[{"prompt": "again"}] * 3)
    first, second, third = (task.id for task in all_tasks(path))
    assert (second, third) == (f"{first}#2", f"{first}#3")


def test_identity_survives_reordering_inserting_and_more_samples(tmp_path: Path) -> None:
    rows = [{"prompt": str(n), "answer": n} for n in range(5)]
    before = {t.key for t in all_tasks(write(tmp_path / "a.jsonl", *rows))}
    after = write(tmp_path / "b.jsonl", {"prompt": "new"}, *reversed(rows))
    keys = {task.key for task in all_tasks(after, num_samples=2)}
    assert before < keys
    assert len(keys) == 12


@pytest.mark.parametrize("own", ["2026-01-01", "2026-01-01T00:00:00Z", "2026-01-01 10:00:00"])
def test_an_own_id_that_is_a_date_is_not_used(tmp_path: Path, own: str) -> None:
    """The Hugging Face loader would turn a column of such ids into timestamps."""
    path = write(tmp_path / "p.jsonl", {"id": own, "prompt": "x"}, {"id": "2026-x", "prompt": "y"})
    first, second = (task.id for task in all_tasks(path))
    assert first.startswith("row-")
    assert second == "2026-x"


def test_an_own_id_that_looks_generated_is_not_trusted(tmp_path: Path) -> None:
    """Otherwise sample 1 of "a" and sample 0 of "a#s1" would be one task."""
    path = write(tmp_path / "p.jsonl", {"id": "a", "prompt": "x"}, {"id": "a#s1", "prompt": "y"})
    ids = [task.id for task in all_tasks(path, num_samples=2)]
    assert len(set(ids)) == 4


def test_an_edited_prompt_under_the_same_id_is_new_work_and_a_new_column_is_not(
    tmp_path: Path,
) -> None:
    (before,) = all_tasks(write(tmp_path / "a.jsonl", {"id": "x", "prompt": "old"}))
    (edited,) = all_tasks(write(tmp_path / "b.jsonl", {"id": "x", "prompt": "new"}))
    (carried,) = all_tasks(write(tmp_path / "c.jsonl", {"id": "x", "prompt": "old", "tag": 1}))
    assert before.id == edited.id == carried.id
    assert before.key != edited.key
    assert before.key == carried.key


def test_max_samples_takes_the_first_valid_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", b"{", {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})
    assert [task.columns["prompt"] for task in all_tasks(path, max_samples=2)] == ["a", "b"]


def test_a_system_message_of_the_row_wins_over_the_config() -> None:
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "hi"}]
    assert opening_messages({"prompt": own}, "config")[0]["content"] == "mine"
    assert opening_messages({"prompt": "hi"}, "config")[0]["content"] == "config"
    assert len(opening_messages({"prompt": "hi"}, None)) == 1


PLAIN = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a\nb"}]
IN_PARTS = [
    {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
    {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}],
    },
]


@pytest.mark.parametrize("column", ["prompt", "messages"])
@pytest.mark.parametrize("more", [{}, {"id": "x"}])
def test_text_parts_and_developers_are_the_same_prompt_in_other_words(
    tmp_path: Path, column: str, more: dict[str, str]
) -> None:
    answer = {"role": "assistant", "content": [{"type": "text", "text": "c"}]}
    rest = [answer] if column == "messages" else []
    (plain,) = all_tasks(write(tmp_path / "a.jsonl", {column: [*PLAIN, *rest], **more}))
    (other,) = all_tasks(write(tmp_path / "b.jsonl", {column: [*IN_PARTS, *rest], **more}))
    assert opening_messages(other.columns, None) == PLAIN
    assert opening_messages(plain.columns, None) == PLAIN
    assert plain.key == other.key
    assert other.columns[column][:2] == IN_PARTS, "the row stays as it is"


def test_turns_after_the_prompt_are_part_of_its_identity(tmp_path: Path) -> None:
    """Runs that there are must find their rows again."""
    answer = {"role": "assistant", "content": [{"type": "text", "text": "c"}]}
    (task,) = all_tasks(write(tmp_path / "a.jsonl", {"id": "x", "messages": [*PLAIN, answer]}))
    (other,) = all_tasks(
        write(tmp_path / "b.jsonl", {"id": "x", "messages": [*PLAIN, {**answer, "content": "c"}]})
    )
    assert task.input_digest == "c3b5dd1ec85c3af3"
    assert task.key != other.key


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([{"type": "image_url", "image_url": {"url": "u"}}], "a part of type 'image_url'"),
        ([{"type": "text", "text": "a"}, {"type": "file"}], "a part of type 'file'"),
        ([], "no parts"),
    ],
)
@pytest.mark.parametrize("column", ["prompt", "messages", "conversations"])
def test_parts_that_are_not_text_are_named(content: object, reason: str, column: str) -> None:
    with pytest.raises(ValueError, match=reason) as error:
        opening_messages({column: [{"role": "user", "content": content}]}, None)
    assert str(error.value).startswith(f"{column}[0].content must be text")


def test_a_message_without_text_is_named_by_its_key() -> None:
    for message, place in (
        ({"role": "user", "content": None}, "content must be text, or a list of text parts (null)"),
        ({"role": "user"}, "content must be text, or a list of text parts (null)"),
        ({"from": "human", "value": {"a": 1}}, "value must be text"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"messages[0].{place}")):
            opening_messages({"messages": [message]}, None)
    with pytest.raises(ValueError, match="no user message comes before it"):
        opening_messages({"messages": [{"role": "assistant", "content": "a"}]}, None)


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_json_text_of_a_conversation_is_the_same_task_as_its_list(
    tmp_path: Path, column: str
) -> None:
    """Parquet and CSV often hold conversations as text."""
    messages = [*IN_PARTS, {"role": "assistant", "content": "c"}]
    (listed,) = all_tasks(write(tmp_path / "a.jsonl", {column: messages}))
    (text,) = all_tasks(write(tmp_path / "b.jsonl", {column: json.dumps(messages)}))
    assert opening_messages(text.columns, None) == PLAIN
    assert text.key == listed.key


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[{'role': 'user', 'content': 'a'}]", "the JSON text of one (not JSON: "),
        ('{"role": "user", "content": "a"}', "the JSON text of one (got an object)"),
        ("[" * 101 + "]" * 101, "nested deeper than 100 levels"),
        ("[]", "has no user message"),
    ],
)
def test_text_that_is_no_list_of_messages_is_refused_by_the_name_of_its_column(
    text: str, reason: str
) -> None:
    for column in ("messages", "conversations"):
        with pytest.raises(ValueError, match=re.escape(reason)) as error:
            RowRules().read({column: text, "answer": "a"})
        assert f"`{column}`" in str(error.value)


def test_text_in_a_chat_column_means_nothing_beside_a_prompt_or_a_list() -> None:
    chat = [{"role": "user", "content": "a"}]
    assert opening_messages({"prompt": "b", "messages": "any"}, None)[0]["content"] == "b"
    assert opening_messages({"messages": "any", "conversations": chat}, None) == chat
    with pytest.raises(ValueError, match="no `prompt` field"):
        opening_messages({"messages": ""}, None)
    with pytest.raises(ValueError, match="to take `question` give --columns prompt=question"):
        opening_messages({"question": "Why?", "conversations": "a summary of the talk"}, None)


def test_a_part_in_the_form_of_another_api_is_not_blamed() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image"}]
    with pytest.raises(ValueError, match="a part of type 'input_image'"):
        opening_messages({"messages": [{"role": "user", "content": parts}]}, None)


@pytest.mark.parametrize(
    "lines",
    [
        [{"prompt": "A"}, {"prompt": "b"}],
        [{"prompt": "bb"}, {"prompt": "a"}],
        [b"{", {"prompt": "a"}, {"prompt": "b"}],
        [],
    ],
    ids=["edited in place", "reordered", "a row before it", "emptied"],
)
def test_a_row_that_changes_after_the_scan_is_not_a_task(
    tmp_path: Path, lines: list[object]
) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "bb"})
    scanned = scan(path, max_samples=None)
    write(path, *lines)
    with pytest.raises(DatasetChanged, match="run the same command again"):
        list(tasks(scanned))
    with pytest.raises(DatasetChanged):
        list(tasks(scanned, [0, 1]))


def test_rows_that_are_appended_after_the_scan_wait_for_the_next(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "b"})
    scanned = scan(path, max_samples=None)
    write(path, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})
    assert [task.columns["prompt"] for task in tasks(scanned)] == ["a", "b"]
