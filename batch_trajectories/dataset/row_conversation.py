"""The columns of the conversation: the prompt, and later messages of the user.

Each column is read on its own, and only if the run uses it: rows of other datasets may have
anything in columns that the run does not use.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ValidationError

from agent.messages.message import Message
from agent.models.scripted import parse_script
from agent.options import AgentOptions, Match, SimulatedUser
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.text import clip
from batch_trajectories.basics.validation import mistakes_in
from batch_trajectories.records.checks import EXPECTED, expected_column, expected_text

CHAT_COLUMNS = ("messages", "conversations")
"""Columns with a conversation instead of a `prompt`, as a list of messages or as its JSON text; the
run uses its beginning."""

ERROR_COLUMN = "row_error"
"""The column with the reason why a row has no prompt: its source cannot be used."""

TURNS_COLUMN = "user_turns"
"""The column with further messages of the user, each sent after an answer."""

REPLIES_COLUMN = "user_replies"
"""The column with replies of the user to tools that ask for one."""

USER_COLUMN = "simulated_user"
"""The column with settings of the row for the run's simulated user."""

FORK_COLUMN = "fork"
"""The column with the beginning of the conversation; see `row_fork.Fork`."""

USUAL_PROMPTS = (
    "question",
    "instruction",
    "problem_statement",
    "problem",
    "text",
    "query",
    "task",
    "input",
    "goal",
    "user_prompt",
)
"""Usual names of the column with the prompt, the likeliest first."""

USUAL_EXPECTED = (
    "answer",
    "final_answer",
    "expected_answer",
    "correct_answer",
    "reference_answer",
    "gold_answer",
    "ground_truth",
    "answerkey",
)
"""Usual names of the column with the expected answer, the likeliest first, in lower case."""

USUAL_BESIDE = frozenset(
    {
        "input",
        "context",
        "choices",
        "options",
        "passage",
        "document",
        "article",
        "table",
        "hint",
        "hints",
        "constraints",
        "code",
        "background",
    }
)
"""Usual names of further columns that the model has to see with the prompt."""

TOOL_COLUMNS = ("tools", "functions", "available_tools", "tool_definitions", "tool_schemas")
"""Usual names of columns with definitions of tools, which a run does not offer."""

_ROLES = {"human": "user", "user": "user", "system": "system"}


def user_writes_first(columns: Mapping[str, Any], options: AgentOptions) -> bool:
    """Whether a simulated user writes the first message of a row's conversation.

    `options` are those of the run.
    """
    row_user = columns.get(USER_COLUMN)
    if isinstance(row_user, dict) and "writes_first" in row_user:
        return row_user["writes_first"] is True
    user = options.simulated_user
    return user is not None and user.writes_first and columns.get(TURNS_COLUMN) is None


def messages_before_user(columns: Mapping[str, Any], system_prompt: str | None) -> list[Message]:
    """The messages of a conversation whose first user message a simulated user writes.

    They are at most a system message: that of the row's `prompt`, else `system_prompt`. Raises
    `ValueError` if the row has a message of the user, too.
    """
    if isinstance(error := columns.get(ERROR_COLUMN), str):
        raise ValueError(error)
    column = chat_column(columns)
    given = read_chat(columns, column) if column in CHAT_COLUMNS else columns.get(column)
    if given is None:
        return [Message(role="system", content=system_prompt)] if system_prompt else []
    messages = _prompt_messages(given) if isinstance(given, list) else []
    if [message["role"] for message in messages] != ["system"]:
        raise ValueError(
            f"`{column}`: the simulated user writes the first message (writes_first), so it can "
            f"only be a list with one system message; leave `{column}` out, or set "
            f"{USER_COLUMN}.writes_first to false"
        )
    if not messages[0]["content"].strip():
        raise ValueError(f"`{column}` has an empty message")
    return messages


def opening_messages(columns: Mapping[str, Any], system_prompt: str | None) -> list[Message]:
    """The first messages of a row's conversation.

    If the row has `messages` or `conversations` instead of a `prompt`, these are its system
    message and its first user message; the run generates the rest. A system message of the row
    replaces `system_prompt`. Raises `ValueError` with the reason if the row has neither text nor
    a list of chat messages that ends in a user message.
    """
    if "prompt" in columns:
        messages = _prompt_messages(columns["prompt"])
    elif (column := chat_column(columns)) in CHAT_COLUMNS:
        messages = _first_messages(column, read_chat(columns, column))
    else:
        if isinstance(error := columns.get(ERROR_COLUMN), str):
            raise ValueError(error)
        names = ", ".join(sorted(columns)[:8]) or "none"
        msg = f"no `prompt` field (fields: {names})"
        if renaming := propose_prompt(columns):
            [usual] = renaming.values()
            msg += f"; to take `{usual}` give --columns {shlex.quote(columns_option(renaming))}"
        raise ValueError(msg)
    _check_chat(messages)
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, Message(role="system", content=system_prompt))
    return messages


def propose_prompt(columns: Mapping[str, Any]) -> dict[str, str]:
    """The column that is likely to hold the prompt, {new name: old}; {} if there is none.

    Its name is a usual one, or differs from one with a meaning only by blanks and capitals. A row
    that has a prompt, or a conversation in its place, needs none.
    """
    if "prompt" in columns or chat_column(columns) in CHAT_COLUMNS:
        return {}
    for name in ("prompt", *CHAT_COLUMNS):
        found = _find_similar(name, columns)
        if found not in (None, name) and _may_be_prompt(columns[found]):
            return {name: found}
    similar = (_find_similar(name, columns) for name in USUAL_PROMPTS)
    found = next((name for name in similar if name and _may_be_prompt(columns[name])), None)
    return {} if found is None else {"prompt": found}


def propose_expected(columns: Mapping[str, Any]) -> dict[str, str]:
    """The column that is likely to hold the expected answer, as `propose_prompt` gives it."""
    if columns.get(expected_column(columns)) is not None:
        return {}
    for name in (EXPECTED, "target", *USUAL_EXPECTED):
        found = _find_similar(name, columns)
        if found and (expected_text({EXPECTED: columns[found]}) or "").strip():
            return {EXPECTED: found}
    return {}


def _find_similar(name: str, columns: Mapping[str, Any]) -> str | None:
    """The column with this name, in any case and with blanks around it; None if none has it."""
    if name in columns:
        return name
    return next((column for column in columns if column.strip().casefold() == name), None)


def columns_option(names: Mapping[str, str]) -> str:
    """The value of --columns that gives columns new names, {new: old}."""
    if any(old != old.strip() or {*old} & {*",="} for old in names.values()):
        return exact_json.dumps(dict(names)).decode()
    return ",".join(f"{new}={old}" for new, old in names.items())


def _may_be_prompt(value: Any) -> bool:
    """Whether a value is text, or a list of chat messages."""
    if isinstance(value, str):
        return True
    return isinstance(value, list) and bool(value) and all(map(_role, value))


def other_prompt_columns(columns: Mapping[str, Any], prompt: str) -> list[str]:
    """The columns that may belong to the prompt, too, by their names; `prompt` is its column."""
    return [
        name
        for name, value in columns.items()
        if name in USUAL_BESIDE
        and name != prompt
        and value
        and isinstance(value, str | list | dict)
    ]


def count_unused_turns(columns: Mapping[str, Any]) -> int:
    """Count the messages of the user after the first one, which are not sent.

    The row must be one that `RowRules.read` accepts.
    """
    column = chat_column(columns)
    if "prompt" in columns or column not in CHAT_COLUMNS:
        return 0
    roles = [_role(item) for item in read_chat(columns, column)]
    return max(0, roles.count("user") - 1)


def is_chat_as_text(prompt: Any) -> bool:
    """Whether a prompt is the JSON text of chat messages, which is sent as it is."""
    if not isinstance(prompt, str) or not prompt.lstrip().startswith("["):
        return False
    try:
        return _may_be_prompt(read_chat({"prompt": prompt}, "prompt"))
    except ValueError:
        return False


def defines_tools(value: Any) -> bool:
    """Whether the value of one of `TOOL_COLUMNS` is definitions of tools, or their JSON text."""
    if isinstance(value, str):
        return value.lstrip().startswith(("[", "{")) and '"name"' in value
    return isinstance(value, list) and any(isinstance(item, dict) for item in value)


def flatten_prompt(columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """The columns with the messages of the prompt as plain text (see `plain_message`).

    Text and a list of text parts then give the same prompt, as do a list of messages and its JSON
    text. The row must be one that `RowRules.read` accepts.
    """
    name = "prompt" if "prompt" in columns else chat_column(columns)
    given = columns.get(name) if name == "prompt" else read_chat(columns, name)
    if not isinstance(given, list):
        return columns
    messages = _plain(given, to_first_user=name != "prompt")
    return columns if messages == columns[name] else {**columns, name: messages}


def _plain(messages: list[Any], *, to_first_user: bool) -> list[Any]:
    """The messages as plain text, optionally only up to the first one of the user."""
    from agent.state.history import plain_message  # most prompts are texts

    plain = []
    for n, item in enumerate(messages):
        plain.append(plain_message(item) if isinstance(item, dict) else item)
        if to_first_user and _role(plain[-1]) == "user":
            return plain + messages[n + 1 :]
    return plain


def _role(item: Any) -> str | None:
    role = item.get("role", item.get("from")) if isinstance(item, dict) else None
    return _ROLES.get(role) if isinstance(role, str) else None


def json_type(value: Any) -> str:
    """The type of a JSON value, for a message."""
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case list():
            return "an array"
        case _:
            return "an object"


def chat_column(columns: Mapping[str, Any]) -> str:
    """The column that holds a conversation; `prompt` if the row has none.

    A list comes before a text, which may be anything.
    """
    lists = (name for name in CHAT_COLUMNS if isinstance(columns.get(name), list))
    texts = (name for name in CHAT_COLUMNS if _looks_like_json(columns.get(name)))
    return next(lists, None) or next(texts, "prompt")


def _looks_like_json(value: Any) -> bool:
    return isinstance(value, str) and value.lstrip().startswith(("[", "{"))


def read_chat(columns: Mapping[str, Any], name: str) -> list[Any]:
    """Read the conversation in a column: a list, or the JSON text of one. Raises `ValueError`."""
    given = columns[name]
    if isinstance(given, list):
        return given
    wanted = f"`{name}` is text; it must be a list of chat messages, or the JSON text of one"
    try:
        messages = exact_json.loads(given)
    except exact_json.JSONDecodeError as error:
        raise ValueError(f"{wanted} (not JSON: {error})") from error
    if not isinstance(messages, list):
        raise ValueError(f"{wanted} (got {json_type(messages)})")
    if exact_json.is_nested_too_deep(given.encode()):
        raise ValueError(f"`{name}`: nested deeper than {exact_json.MAX_NESTING} levels")
    return messages


def _prompt_messages(prompt: Any) -> list[Message]:
    if isinstance(prompt, str):
        return [Message(role="user", content=prompt)]
    if isinstance(prompt, list):
        plain = _plain(prompt, to_first_user=False)
        return [_chat_message(n, item) for n, item in enumerate(plain)]
    raise ValueError(f"`prompt` is {json_type(prompt)}; it must be text or a list of chat messages")


def _first_messages(column: str, given: list[Any]) -> list[Message]:
    messages: list[Message] = []
    for n, item in enumerate(_plain(given, to_first_user=True)):
        role = _role(item)
        if role is None:
            raise ValueError(
                f"{column}[{n}] must be a system or user message: no user message comes before it"
            )
        key = "content" if "content" in item or "value" not in item else "value"
        content = _read_text(f"{column}[{n}].{key}", item.get(key))
        messages.append(Message(role="user" if role == "user" else "system", content=content))
        if role == "user":
            return messages
    raise ValueError(f"`{column}` has no user message")


def _chat_message(n: int, item: Any) -> Message:
    role = item.get("role") if isinstance(item, dict) else None
    content = item.get("content") if isinstance(item, dict) else None
    match role:
        case "system" | "user" | "assistant" if isinstance(content, str | list):
            return Message(role=role, content=_read_text(f"prompt[{n}].content", content))
    raise ValueError(
        f"prompt[{n}] must be an object with `role` (system, developer, user or assistant) "
        "and `content` (text)"
    )


def _read_text(place: str, content: Any) -> str:
    """Read the content of a message, whose text parts are joined already. Raises `ValueError`."""
    if isinstance(content, str):
        return content
    got = json_type(content)
    if isinstance(content, list):
        from agent.state.history import is_text_part  # most prompts are texts

        other = next((part for part in content if not is_text_part(part)), None)
        kind = other.get("type") if isinstance(other, dict) else other
        got = f"a part of type {clip(repr(kind), max_chars=50)}" if content else "no parts"
    raise ValueError(f"{place} must be text, or a list of text parts ({got})")


def _check_chat(messages: list[Message]) -> None:
    if any(not message["content"].strip() for message in messages):
        raise ValueError(
            "`prompt` is empty" if len(messages) == 1 else "`prompt` has an empty message"
        )
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if not turns or turns[-1] != "user":
        raise ValueError("`prompt` must end in a user message")
    expected = ["user", "assistant"] * (len(turns) // 2) + ["user"]
    if turns != expected:
        raise ValueError(
            f"the roles of `prompt` must alternate user, assistant, …, user (got {roles})"
        )


def add_row_user(
    options: AgentOptions, columns: Mapping[str, Any], *, toolsets: Collection[str] | None = None
) -> AgentOptions:
    """Add the row's settings for its simulated user to the options. Raises `ValueError`.

    A row with further messages of its user has no simulated one. `toolsets` are those that the run
    has for simulated users; None: not known, and not checked.
    """
    from agent.models.resolve import SCRIPTED  # few runs have such users

    row_user = columns.get(USER_COLUMN)
    user = options.simulated_user
    if user is None:
        if row_user is not None:
            raise ValueError(
                f"`{USER_COLUMN}` needs a model for it: give --simulated_user, for example '{{}}'"
            )
        return options
    if columns.get(TURNS_COLUMN) is not None:
        if row_user is not None:
            raise ValueError(f"`{TURNS_COLUMN}` does not go together with `{USER_COLUMN}`")
        return options.model_copy(update={"simulated_user": None})
    if row_user is not None:
        if not isinstance(row_user, dict) or "model" in row_user:
            what = "sets its model, which only the config can" if isinstance(row_user, dict) else ""
            raise ValueError(f"`{USER_COLUMN}` {what or 'must be an object'}")
        try:
            user = SimulatedUser.model_validate({**user.model_dump(), **row_user})
        except ValidationError as error:
            raise ValueError(mistakes_in(error)[0].describe(USER_COLUMN)) from error
        if toolsets is not None and "enabled_toolsets" in row_user:
            _check_user_toolsets(user.enabled_toolsets, toolsets)
    if user.writes_first and options.preparation:
        raise ValueError(f"`{USER_COLUMN}.writes_first` does not go together with preparation")
    if not user.system_prompt.strip():
        raise ValueError(
            f"`{USER_COLUMN}.system_prompt`: missing; it says who the user is and what they want"
        )
    if user.script is not None or user.model == SCRIPTED:
        try:
            parse_script(user.script)
        except ValueError as error:
            raise ValueError(f"`{USER_COLUMN}`: {error}") from error
    return options.model_copy(update={"simulated_user": user})


def _check_user_toolsets(names: Collection[str], offered: Collection[str]) -> None:
    from toolsets.catalog.registry import ALL, NONE  # few rows name toolsets

    unknown = sorted({*names}.difference(offered, ALL, [NONE]))
    if unknown:
        known = ", ".join(sorted(offered)) or "none"
        raise ValueError(
            f"`{USER_COLUMN}.enabled_toolsets`: {', '.join(unknown)} not on offer; the config has "
            f"for its simulated users: {known}"
        )


def read_user_turns(columns: Mapping[str, Any], options: AgentOptions) -> tuple[str, ...]:
    """Read the further messages of the user. Raises `ValueError`."""
    if columns.get(TURNS_COLUMN) is None:
        return ()
    turns = read_texts(columns, TURNS_COLUMN)
    if not all(turn.strip() for turn in turns):
        raise ValueError(
            f"`{TURNS_COLUMN}[{[bool(turn.strip()) for turn in turns].index(False)}]` is empty"
        )
    if turns and options.completion_tools:
        raise ValueError(f"`{TURNS_COLUMN}` does not go together with completion_tools")
    return turns


def read_texts(columns: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Read a column that is a list of texts; () if it is missing. Raises `ValueError`."""
    texts = columns.get(name, [])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"`{name}` must be a list of texts")
    return tuple(texts)


def read_expected(columns: Mapping[str, Any], match: Match) -> str:
    """Read the text that the answer is compared with by the rule `match`. Raises `ValueError`."""
    from agent.loop.answers import why_unusable  # most runs compare no answers

    column, expected = expected_column(columns), expected_text(columns)
    if expected is None:
        got = json_type(columns.get(column))
        raise ValueError(f"`{column}` must be text or a number, for check_expected (got {got})")
    if (why := why_unusable(expected, match)) is not None:
        excerpt = clip(repr(expected), max_chars=50)
        raise ValueError(f"`{column}`: {excerpt} {why}, which check_expected needs")
    return expected
