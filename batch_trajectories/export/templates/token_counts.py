"""Lengths in the student's tokens."""

from __future__ import annotations

from pathlib import Path

from batch_trajectories.basics.errors import ConfigError

TEMPLATES = ("chat_template.jinja", "tokenizer_config.json")
TOKENIZER = "tokenizer.json"


class Tokens:
    """Counts the tokens of texts."""

    def __init__(self, tokenizer: Path) -> None:
        """`tokenizer` is a tokenizer.json. Raises `ConfigError`."""
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError(
                f"{tokenizer}: lengths need the package tokenizers: pip install tokenizers"
            ) from error
        try:
            self._tokenizer = Tokenizer.from_file(str(tokenizer))
        except Exception as error:  # the library raises no narrower class
            raise ConfigError(f"{tokenizer}: cannot read this tokenizer: {error}") from error

    def of(self, text: str) -> int:
        """The number of tokens of a text."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)
