"""The digest of a tokenizer, by which a teacher is refused that reads other tokens.

Runs record token ids and no tokenizer, so both files are given by the user, or he states that the
tokenizers are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from batch_trajectories.basics import exact_json
from batch_trajectories.basics.errors import ConfigError

_FILE = "tokenizer.json"


def compare_tokenizers(student: Path, teacher: Path) -> str:
    """The digest that two tokenizers have in common; each is a tokenizer.json or its directory.

    Raises `ConfigError` if one cannot be read, or if an id stands for different tokens.
    """
    ours, theirs = (
        _read_tokens(student, "--tokenizer"),
        _read_tokens(teacher, "--teacher_tokenizer"),
    )
    if ours != theirs:
        differing = sorted(
            id for id in ours.keys() | theirs.keys() if ours.get(id) != theirs.get(id)
        )
        first = differing[0]
        raise ConfigError(
            f"--teacher_tokenizer: {teacher}: {len(differing):,} ids stand for other tokens than "
            f"in {student}. The first is id {first}: {_show(theirs.get(first))}, not "
            f"{_show(ours.get(first))}. This teacher would score tokens that the run's model did "
            "not sample; choose a teacher with the same tokenizer"
        )
    return _digest(ours)


def _read_tokens(path: Path, option: str) -> dict[int, str]:
    """The token of each id, with those that were added to the vocabulary."""
    file = path / _FILE if path.is_dir() else path
    try:
        content = exact_json.loads(file.read_bytes())
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, Mapping):
            tokens = {int(id): str(token) for token, id in vocabulary.items()}
        else:
            tokens = {id: str(piece[0]) for id, piece in enumerate(vocabulary)}
        added = content.get("added_tokens") or ()
        return tokens | {int(token["id"]): str(token["content"]) for token in added}
    except OSError as error:
        raise ConfigError(f"{option}: cannot read {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(
            f"{option}: {file} is no {_FILE} of the package tokenizers ({error!r}); if the "
            "tokenizers are the same, state it by --same_tokenizer"
        ) from error


def _digest(tokens: Mapping[int, str]) -> str:
    content: list[Any] = sorted(tokens.items())
    return blake2b(exact_json.dumps(content), digest_size=16).hexdigest()


def _show(token: str | None) -> str:
    return "no token" if token is None else repr(token)
