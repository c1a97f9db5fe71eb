"""Finds secrets that a config states in the clear: names and values that look like credentials."""

from __future__ import annotations

import re

_WORDS = frozenset(
    {
        *("apikey", "auth", "authorization", "bearer", "cookie", "credential", "credentials"),
        *("key", "passwd", "password", "pwd", "secret", "sig", "signature", "token"),
    }
)
"""Words of names whose values are credentials."""

_ABOUT = frozenset(
    {
        *("endpoint", "env", "file", "header", "id", "name", "path", "provider", "scope", "type"),
        *("uri", "url", "variable", "vault", "version"),
    }
)
"""Last words of names that say where a credential is, such as `token_file`."""

_PREFIX = (
    r"(?:^|[\s=:/\"'])(?:sk-|sk_|pk-|gsk_|xai-|hf_|nvapi-|csk-|fw_|ghp_|github_pat_|glpat-|AIza|ya29\."
    r"|AKIA|ASIA|ABSK|eyJ[A-Za-z0-9_-]{10,}\.|Bearer\s+\S|Basic\s+\S)"
)
"""How the keys of known providers begin, a JSON web token, and the two usual schemes."""

_LONG_WORD = r"[A-Za-z0-9+/_]{28,}"


def names_secret(name: str) -> bool:
    """Whether what has this name is a credential, such as `api-key` or `aws_secret_key`."""
    words = re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower())
    return words[-1] not in _ABOUT and not _WORDS.isdisjoint(words)


def is_secret(value: str) -> bool:
    """Whether a text looks like a credential: it begins like one, or is long and random."""
    if re.search(_PREFIX, value):
        return True
    return any(
        re.search(r"\d", word) and re.search(r"[a-z]", word) and re.search(r"[A-Z]", word)
        for word in re.findall(_LONG_WORD, value)
    )
