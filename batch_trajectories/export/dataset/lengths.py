"""Lengths of conversations in the tokens of the model that is trained."""

from __future__ import annotations

from pathlib import Path

from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.export.conversation.style import Style, styled
from batch_trajectories.export.conversation.turns import Conversation
from batch_trajectories.export.rows.format import RowFormat, format_named
from batch_trajectories.export.templates.rendering import EOS, load_chat, tools_in, without_marks
from batch_trajectories.export.templates.token_counts import TEMPLATES, TOKENIZER, Tokens
from batch_trajectories.runs.store.record_types import Record

OPTION = "filters.tokenizer"


class TokenLengths:
    """Counts the tokens of conversations, as rows of `openai` that a chat template renders."""

    def __init__(self, directory: Path, style: Style) -> None:
        """`directory` is that of a tokenizer with its template. Raises `ConfigError`."""
        files = (directory / name for name in TEMPLATES)
        template = next((file for file in files if file.is_file()), None)
        if template is None or not (directory / TOKENIZER).is_file():
            raise ConfigError(
                f"{OPTION}: {directory} must be a directory with {TOKENIZER} and "
                f"{' or '.join(TEMPLATES)}; save the student's tokenizer there"
            )
        self._chat = load_chat(template)
        self._tokens = Tokens(directory / TOKENIZER)
        format = format_named("openai")
        assert isinstance(format, RowFormat)
        self._format = format
        self._style = format.limit(style)

    def of(self, conversation: Conversation) -> int:
        """Tokens of the whole conversation. Raises `Rejected` if it has no row of `openai`.

        Raises `ConfigError` if the template refuses the row.
        """
        row = self._format.row_of(styled(conversation, self._style), self._style)
        try:
            text, _ = without_marks(self._chat(row["messages"], tools_in(row), False))
        except Exception as error:  # a template can raise anything
            raise ConfigError(
                f"{OPTION}: its chat template refuses {row['id']}: {error}; see what --parity says"
            ) from error
        return self._tokens.of(text.replace(EOS, ""))


def characters_in(record: Record) -> int:
    """The characters of all texts and calls of a record."""
    count = 0
    for message in record.messages:
        count += len(message.content) + len(message.reasoning or "")
        count += sum(len(call.function.arguments) for call in message.tool_calls)
    return count
