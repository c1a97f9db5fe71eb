"""Reads YAML files that people write: one error for each mistake, with its line and column."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from toolsets.text import valid_utf8


class YamlFileError(ValueError):
    """A file cannot be read, or is not YAML; the message begins with the file, line and column."""


class _Composer(yaml.SafeLoader):
    """Refuses what YAML would change silently, and text that is not Unicode."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._around: list[Any] = []
        """The anchors of the nodes that are being composed."""

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent) and self.peek_event().anchor in self._around:
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "an alias inside of its anchor", mark)
        return super().compose_node(parent, index)

    def compose_sequence_node(self, anchor: Any) -> yaml.SequenceNode:
        self._around.append(anchor)
        node = super().compose_sequence_node(anchor)
        self._around.pop()
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Later, keys of merged mappings (`<<`) are among those of the file.
        self._around.append(anchor)
        node = super().compose_mapping_node(anchor)
        self._around.pop()
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise _error(f"duplicate key {key.value!r}", key)
            seen.add(key.value)
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        if valid_utf8(node.value) != node.value:
            raise _error("half of a surrogate pair (\\ud800 to \\udfff) is not text", node)
        return node


class _Constructor(yaml.constructor.SafeConstructor):
    """Reports scalars that look like a date or a number and are none."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except ValueError as error:  # such as the date 2026-02-30, or an integer of 5,000 digits
            raise _error(f"not a value: {error}", node) from error


def _error(problem: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def read_yaml(path: Path, kind: str) -> Any:
    """The content of a YAML file, which errors call a `kind`. Raises `YamlFileError`."""
    with _errors_of(str(path), kind):
        return construct(_compose(path.read_bytes()))


def read_yaml_nodes(path: Path, kind: str, *, shown: str) -> tuple[bytes, yaml.Node | None]:
    """The bytes of a YAML file, and its nodes, which know their lines; errors call it `shown`."""
    with _errors_of(shown, kind):
        content = path.read_bytes()
        node = _compose(content)
        construct(node)
        return content, node


def construct(node: yaml.Node | None) -> Any:
    """The value of a node."""
    return None if node is None else _Constructor().construct_document(node)


def _compose(content: bytes) -> yaml.Node | None:
    loader = _Composer(content.decode())
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


@contextmanager
def _errors_of(shown: str, kind: str) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise YamlFileError(f"{shown}: cannot read this {kind}: {reason}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = "" if mark is None else f":{mark.line + 1}:{mark.column + 1}"
        raise YamlFileError(f"{shown}{place}: not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise YamlFileError(f"{shown}: not YAML: {error}") from error
    except RecursionError as error:
        raise YamlFileError(f"{shown}: cannot read this {kind}: nested too deeply") from error
