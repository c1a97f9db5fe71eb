"""What a row says of its user: further messages, replies to tools, and who a simulated user is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from agent.models.resolve import SCRIPTED
from agent.models.scripted import parse_script
from agent.options import AgentOptions, SimulatedUser
from batch_trajectories.basics.validation import mistakes_in
from batch_trajectories.dataset.column_names import TURNS_COLUMN, USER_COLUMN


def with_user(options: AgentOptions, columns: Mapping[str, Any]) -> AgentOptions:
    """The options with what the row says of its simulated user. Raises `ValueError`.

    A row with further messages of its user has no simulated one.
    """
    own = columns.get(USER_COLUMN)
    user = options.simulated_user
    if user is None:
        if own is not None:
            raise ValueError(
                f"`{USER_COLUMN}` needs a model for it: give --simulated_user, for example '{{}}'"
            )
        return options
    if columns.get(TURNS_COLUMN) is not None:
        if own is not None:
            raise ValueError(f"`{TURNS_COLUMN}` does not go together with `{USER_COLUMN}`")
        return options.model_copy(update={"simulated_user": None})
    if own is not None:
        if not isinstance(own, dict) or "model" in own:
            what = "sets its model, which only the config can" if isinstance(own, dict) else ""
            raise ValueError(f"`{USER_COLUMN}` {what or 'must be an object'}")
        try:
            user = SimulatedUser.model_validate({**user.model_dump(), **own})
        except ValidationError as error:
            raise ValueError(mistakes_in(error)[0].describe(USER_COLUMN)) from error
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


def read_user_turns(columns: Mapping[str, Any], options: AgentOptions) -> tuple[str, ...]:
    """The user's further messages. Raises `ValueError`."""
    turns = read_texts(columns, TURNS_COLUMN)
    if not all(turn.strip() for turn in turns):
        raise ValueError(
            f"`{TURNS_COLUMN}[{[bool(turn.strip()) for turn in turns].index(False)}]` is empty"
        )
    if turns and options.completion_tools:
        raise ValueError(f"`{TURNS_COLUMN}` does not go together with completion_tools")
    return turns


def read_texts(columns: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A column that is a list of texts; () where it is missing. Raises `ValueError`."""
    texts = columns.get(name, [])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"`{name}` must be a list of texts")
    return tuple(texts)
