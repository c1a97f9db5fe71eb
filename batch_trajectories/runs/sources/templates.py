"""Templates of a rows file: values that are filled in from the columns of a row.

A text may contain `{{column}}`, `{{column.member}}` and `{{column|filter|filter("text")}}`. A text
that is only that is replaced by the value itself, which may be a list or an object. `?` after the
column allows it to be absent: what contains it is then left out. Two objects have a meaning:

    {first_of: [VALUE, ...]}                    the first whose columns the row has
    {match: TEXT, cases: {TEXT: VALUE}, default: VALUE}
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from batch_trajectories.basics import exact_json
from batch_trajectories.basics.text import clip
from batch_trajectories.basics.validation import did_you_mean
from batch_trajectories.basics.yaml_file import construct

_HOLE = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
_PATH = re.compile(r"\s*(?P<path>[\w-]+(?:\.[\w-]+)*)\s*(?P<optional>\?)?\s*")
_FILTER = re.compile(r"""\|\s*(?P<name>\w+)\s*(?:\((?P<given>(?:"[^"]*"|[^")])*)\))?\s*""")
_GIVEN = re.compile(r'\s*"([^"]*)"\s*(?:,|$)')

_SPECIAL = {"first_of": {"first_of"}, "match": {"match", "cases", "default"}}


class TemplateError(ValueError):
    """A template is wrong, or cannot be filled in from a row: place, field and reason."""


class _NoColumn(ValueError):
    """The row lacks a column."""


class _Missing(TemplateError):
    """The row lacks a column of a template."""


class Absent(Exception):
    """The row lacks a column that may be absent."""


def _json(value: Any) -> Any:
    """The value that a text holds as JSON; other values as they are."""
    if not isinstance(value, str):
        return value
    try:
        return exact_json.loads(value)
    except exact_json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error


def _between(value: Any, begin: str, end: str) -> str:
    """The text between two marks; all of it if it lacks them."""
    text = _text(value)
    _, found, rest = text.partition(begin)
    inner, closed, _ = rest.partition(end)
    return inner.strip() if found and closed else text


def _text(value: Any) -> str:
    match value:
        case str():
            return value
        case bool() | int() | float():
            return exact_json.dumps(value).decode()
    raise ValueError("a list or an object is not text; use the filter lines or quote")


def _items(value: Any) -> list[str]:
    return [_text(item) for item in value] if isinstance(value, list) else [_text(value)]


_FILTERS: dict[str, tuple[int, Callable[..., Any]]] = {
    "lower": (0, lambda value: _text(value).lower()),
    "replace": (2, lambda value, old, new: _text(value).replace(old, new)),
    "after": (1, lambda value, mark: _text(value).rpartition(mark)[2]),
    "between": (2, _between),
    "json": (0, _json),
    "lines": (0, lambda value: "".join(f"{item}\n" for item in _items(value))),
    "quote": (0, lambda value: " ".join(map(shlex.quote, _items(value)))),
}
"""The filters by name, with the number of texts that they take."""


@dataclass(frozen=True, slots=True)
class _Hole:
    """What stands between `{{` and `}}`."""

    path: tuple[str, ...]
    optional: bool
    filters: tuple[tuple[str, tuple[str, ...]], ...]

    def value(self, columns: Mapping[str, Any]) -> Any:
        found: Any = columns
        for n, name in enumerate(self.path):
            if n and isinstance(found, str):
                found = _json(found)  # an object as text, as CSV and Parquet often have it
            found = found.get(name) if isinstance(found, Mapping) else None
        if found is None:
            if self.optional:
                raise Absent
            raise _NoColumn(f"the row has no `{'.'.join(self.path)}`")
        for name, given in self.filters:
            try:
                found = _FILTERS[name][1](found, *given)
            except ValueError as error:
                raise ValueError(f"`{'.'.join(self.path)}`, filter {name}: {error}") from error
        return found


class Template:
    """A value of a rows file."""

    def __init__(self, node: yaml.Node, file: str, field: str = "") -> None:
        """Compile a node of a YAML file. Raises `TemplateError`."""
        self._place = f"{file}:{node.start_mark.line + 1}: {field or 'the file'}"
        self._fill = self._compiled(node, file, field)

    def value(self, columns: Mapping[str, Any]) -> Any:
        """The value for a row. Raises `TemplateError`, and `Absent` where it is left out."""
        try:
            return self._fill(columns)
        except TemplateError:
            raise
        except _NoColumn as error:
            raise _Missing(f"{self._place}: {error}") from error
        except ValueError as error:
            raise TemplateError(f"{self._place}: {error}") from error

    def _compiled(
        self, node: yaml.Node, file: str, field: str
    ) -> Callable[[Mapping[str, Any]], Any]:
        match node:
            case yaml.MappingNode():
                members = self._members(node, file, field)
                special = next((name for name in _SPECIAL if name in members), None)
                if special is not None and members.keys() <= _SPECIAL[special]:
                    return self._special(special, node, members, file, field)
                return lambda columns: dict(_present(members, columns))
            case yaml.SequenceNode():
                items = [Template(item, file, f"{field}[{n}]") for n, item in enumerate(node.value)]
                return lambda columns: [
                    value for _, value in _present(dict(enumerate(items)), columns)
                ]
            case _:
                value = construct(node)
                return self._filled(value) if isinstance(value, str) else lambda columns: value

    def _members(self, node: yaml.MappingNode, file: str, field: str) -> dict[str, Template]:
        members: dict[str, Template] = {}
        for key, value in node.value:
            name = str(key.value)
            inner = f"{field}.{name}" if field else name
            members[name] = Template(value, file, inner)
        return members

    def _special(
        self,
        name: str,
        node: yaml.MappingNode,
        members: dict[str, Template],
        file: str,
        field: str,
    ) -> Callable[[Mapping[str, Any]], Any]:
        nodes = {str(key.value): value for key, value in node.value}
        if name == "first_of":
            if not isinstance(nodes["first_of"], yaml.SequenceNode):
                raise TemplateError(f"{self._place}: first_of must be a list")
            choices = [
                Template(item, file, f"{field}.first_of[{n}]")
                for n, item in enumerate(nodes["first_of"].value)
            ]
            return lambda columns: _first(choices, columns)
        if not isinstance(nodes.get("cases"), yaml.MappingNode):
            raise TemplateError(f"{self._place}: match needs `cases`: what to take for each text")
        cases = self._members(nodes["cases"], file, f"{field}.cases")
        default = members.get("default")

        def choose(columns: Mapping[str, Any]) -> Any:
            found = _text(members["match"].value(columns))
            chosen = cases.get(found, default)
            if chosen is None:
                known = did_you_mean(found, cases) or f"known: {', '.join(cases)}"
                raise ValueError(f"no case for {clip(repr(found), max_chars=200)}; {known}")
            return chosen.value(columns)

        return choose

    def _filled(self, text: str) -> Callable[[Mapping[str, Any]], Any]:
        parts = _HOLE.split(text)
        holes = [self._hole(inner) for inner in parts[1::2]]
        if not holes:
            return lambda columns: text
        if len(holes) == 1 and not parts[0] and not parts[2]:
            return holes[0].value
        texts = parts[0::2]

        def fill(columns: Mapping[str, Any]) -> str:
            filled = [texts[0]]
            for hole, after in zip(holes, texts[1:], strict=True):
                filled += [_text(hole.value(columns)), after]
            return "".join(filled)

        return fill

    def _hole(self, inner: str) -> _Hole:
        begun = _PATH.match(inner)
        position = begun.end() if begun else 0
        filters = []
        while begun and (found := _FILTER.match(inner, position)):
            given = tuple(_GIVEN.findall(found["given"] or ""))
            filters.append((found["name"], given))
            position = found.end()
        if begun is None or position != len(inner):
            raise TemplateError(
                f"{self._place}: {{{{{clip(inner, max_chars=100)}}}}} is not a template: write "
                '{{column}}, {{column.member}} or {{column|filter("text")}}'
            )
        for name, given in filters:
            if name not in _FILTERS:
                known = did_you_mean(name, _FILTERS) or f"known: {', '.join(_FILTERS)}"
                raise TemplateError(f"{self._place}: unknown filter {name!r}; {known}")
            if len(given) != _FILTERS[name][0]:
                msg = f"the filter {name} takes {_FILTERS[name][0]} texts in quotes"
                raise TemplateError(f"{self._place}: {msg} (got {len(given)})")
        return _Hole(tuple(begun["path"].split(".")), begun["optional"] is not None, tuple(filters))


def _present(members: Mapping[Any, Template], columns: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """The values of those members that the row has the columns for."""
    found = []
    for name, member in members.items():
        try:
            found.append((name, member.value(columns)))
        except Absent:
            continue
    return found


def _first(choices: list[Template], columns: Mapping[str, Any]) -> Any:
    *optional, last = choices
    for choice in optional:
        try:
            return choice.value(columns)
        except (Absent, _Missing):
            continue
    return last.value(columns)
