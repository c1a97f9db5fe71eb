"""Keys and passwords in text, found by their shape."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from batch_trajectories.basics.errors import missing

Scanner = Callable[[str], str | None]
"""Returns the kind of secret in a text, never the secret."""

# Lookaheads have a limited length: a text of many key prefixes would take quadratic time.
_KINDS = {
    "anthropic key": r"sk-ant-[\w-]{20,}",
    "openai key": r"sk-(?=[\w-]{0,100}\d)[A-Za-z0-9][\w-]{19,}",
    "openrouter key": r"sk-or-v1-[0-9a-f]{32,}",
    "aws access key": r"AKIA[0-9A-Z]{16}\b|ASIA[0-9A-Z]{16}\b",
    "github token": r"gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{50,}",
    "gitlab token": r"glpat-[\w-]{20,}",
    "google key": r"AIza[\w-]{35}",
    "hugging face token": r"hf_[A-Za-z0-9]{30,}",
    "slack token": r"xox[abeoprs]-[\w-]{10,}",
    "stripe key": r"rk_live_[A-Za-z0-9]{20,}|sk_live_[A-Za-z0-9]{20,}",
    "npm token": r"npm_[A-Za-z0-9]{36}",
    "pypi token": r"pypi-[\w-]{50,}",
    "search provider key": r"tvly-[\w-]{20,}|BSA[\w-]{28}\b",
    "private key": r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY",
    "signed token": r"eyJ[\w-]{10,500}\.eyJ[\w-]{10,}\.[\w-]{10,}",
}

_IN_URL = r"://[^\s/:@]{1,64}:[^\s/:@]{3,64}@"

_BEGINS = r"(?:(?<![\w-])|(?<=\\[bfnrt])|(?<=\\u[0-9a-fA-F]{4}))"
"""Not within a word. Arguments and many results are JSON, whose escapes end in letters."""

_PATTERNS = {
    **{kind: re.compile(f"{_BEGINS}(?:{pattern})") for kind, pattern in _KINDS.items()},
    "password in a url": re.compile(rf"(?<=[a-z0-9+.]){_IN_URL}"),
}

_ANY = re.compile("|".join([*_KINDS.values(), _IN_URL]))
"""Finds in one pass that there is nothing, as in most texts: all of its parts begin with one
letter, so that places where none of these stands are skipped."""

_OF_WORDS = (
    "KeywordDetector",
    "Base64HighEntropyString",
    "HexHighEntropyString",
    "IPPublicDetector",
)
"""Detectors that report ordinary words, hashes and addresses."""


def make_scanner(*, with_detect_secrets: bool) -> Scanner:
    """A scanner by the patterns here, and by those of detect-secrets if asked for.

    Raises `ConfigError` if that is not installed.
    """
    if not with_detect_secrets:
        return _by_pattern
    try:
        from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
    except ImportError as error:
        raise missing("filters.secrets: all", "quality") from error
    plugins: list[Any] = [
        plugin()
        for plugin in get_mapping_from_secret_type_to_class().values()
        if plugin.__name__ not in _OF_WORDS
    ]

    def scan(text: str) -> str | None:
        if kind := _by_pattern(text):
            return kind
        for line in text.splitlines():
            for plugin in plugins:
                if any(plugin.analyze_string(line)):
                    return str(plugin.secret_type)
        return None

    return scan


def _by_pattern(text: str) -> str | None:
    if not _ANY.search(text):
        return None
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.search(text)), None)
