"""Reads YAML files that people write: one error for each mistake, with its line and column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from batch_trajectories.basics.text import valid_utf8

_MAX_BYTES = 16 << 20
"""The largest file that is read: a dataset or a device may be given by mistake."""

_MAX_ALIASED = 100_000
"""The most values that aliases may stand for. A few lines of aliases to aliases can stand for
billions of values, and everything that walks the content would visit them."""


class YamlFileError(ValueError):
    """A file cannot be read, or is not YAML; the message begins with the file, line and column."""


class _Composer(yaml.SafeLoader):
    """Composes nodes; refuses duplicate keys, too many aliases, and text that is not Unicode."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._around: list[Any] = []
        """The anchors of the nodes that are being composed."""
        self._values = self._aliased = 0
        """Number of values so far, and how many of them only aliases stand for."""
        self._sizes: dict[str, int] = {}
        """Number of values below each anchor."""

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        parser: Any = self  # whose methods have no types
        event = parser.peek_event()
        if isinstance(event, yaml.AliasEvent):
            self._count_alias(event)
            return super().compose_node(parent, index)
        before = self._values
        self._values += 1
        node = super().compose_node(parent, index)
        if event.anchor is not None:
            self._sizes[event.anchor] = self._values - before
        return node

    def _count_alias(self, event: Any) -> None:
        problem = ""
        if event.anchor in self._around:
            problem = "an alias inside of its anchor"
        size = self._sizes.get(event.anchor, 0)
        self._values += size
        self._aliased += size
        if self._aliased > _MAX_ALIASED:
            problem = f"the aliases up to here stand for more than {_MAX_ALIASED:,} values"
        if problem:
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)

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
                raise _error_at(f"duplicate key {key.value!r}", key)
            seen.add(key.value)
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        if valid_utf8(node.value) != node.value:
            raise _error_at("half of a surrogate pair (\\ud800 to \\udfff) is not text", node)
        return node


class _Constructor(yaml.constructor.SafeConstructor):
    """Constructs values: reports invalid dates and numbers, and merges by the rule of YAML.

    https://yaml.org/type/merge.html: a key of the mapping itself wins, then the first mapping of a
    list. PyYAML 6.0.4 lets the last of the list win, and a merged key that was overridden once
    return with its first value.
    """

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        sources: list[yaml.Node] = []
        unmerged = []
        for key, value in node.value:
            if key.tag != "tag:yaml.org,2002:merge":
                unmerged.append((key, value))
            elif isinstance(value, yaml.SequenceNode):
                sources += value.value
            else:
                sources.append(value)
        merged: dict[Any, tuple[yaml.Node, yaml.Node]] = {}
        for source in reversed(sources):
            if not isinstance(source, yaml.MappingNode):
                raise _error_at("`<<` merges a mapping, or a list of mappings", source)
            self.flatten_mapping(source)
            merged |= {_key_identity(key): (key, value) for key, value in source.value}
        merged |= {_key_identity(key): (key, value) for key, value in unmerged}
        node.value = list(merged.values())

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except ValueError as error:  # such as the date 2026-02-30, or an integer of 5,000 digits
            raise _error_at(f"not a value: {error}", node) from error


def _key_identity(key: yaml.Node) -> Any:
    """A value that only equal keys share; a key that is no scalar equals no other key."""
    return (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key)


def _error_at(problem: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def read_yaml(path: Path, kind: str) -> Any:
    """Read a YAML file; errors call it a `kind`. Raises `YamlFileError`."""
    with _translate_errors(str(path), kind):
        return construct(_compose(_read(path)))


def read_yaml_nodes(path: Path, kind: str, *, shown: str) -> tuple[bytes, yaml.Node | None]:
    """Read the bytes of a YAML file, and its nodes, which know their lines.

    Errors call the file `shown`. Raises `YamlFileError`.
    """
    with _translate_errors(shown, kind):
        content = _read(path)
        node = _compose(content)
        construct(node)
        return content, node


def find_line(path: Path, keys: Sequence[str]) -> int | None:
    """The line where the value at these keys begins.

    If a key is missing, it is the line of the last key before it. Dashes in keys count as
    underscores. None if the first key is missing. Raises `OSError` and `YAMLError`.
    """
    node, line = _compose(_read(path)), None
    for key in keys:
        if isinstance(node, yaml.SequenceNode) and key.isdecimal() and int(key) < len(node.value):
            node = node.value[int(key)]
            line = node.start_mark.line + 1
            continue
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        matching = [(k, v) for k, v in pairs if str(k.value).replace("-", "_") == key]
        if not matching:
            break
        (found, node) = matching[-1]
        line = found.start_mark.line + 1
    return line


def construct(node: yaml.Node | None) -> Any:
    """The value of a node."""
    return None if node is None else _Constructor().construct_document(node)


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise yaml.YAMLError(f"over {_MAX_BYTES >> 20} MiB; is it a dataset?")
    return content


def _compose(content: bytes) -> yaml.Node | None:
    text = content.decode()
    try:
        loader = _Composer(text)
    except yaml.reader.ReaderError as error:
        raise _make_end_error(
            f"the character U+{ord(text[error.position]):04X} is not allowed",
            text[: error.position],
        ) from error
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def _make_end_error(problem: str, before: str) -> yaml.MarkedYAMLError:
    """An error at the end of the text `before`."""
    line = before.count("\n")
    column = len(before) - before.rfind("\n") - 1
    mark = yaml.Mark("", len(before), line, column, None, 0)
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


@contextmanager
def _translate_errors(shown: str, kind: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise YamlFileError(f"{shown}: cannot read this {kind}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise YamlFileError(f"{shown}:{line}: cannot read this {kind}: {error}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = "" if mark is None else f":{mark.line + 1}:{mark.column + 1}"
        raise YamlFileError(f"{shown}{place}: not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise YamlFileError(f"{shown}: not YAML: {error}") from error
    except RecursionError as error:
        raise YamlFileError(f"{shown}: cannot read this {kind}: nested too deeply") from error
