"""A rows file: how the rows of a kind of dataset become rows of a run.

    options: {row_setup: true}   options of the run, unless they are given
    columns: {prompt: "{{problem_statement}}", ...}   see `dataset.rows_file`
    keep: [repo]                 columns of the dataset that stay; without it, all others do
    reference: {patch: ...}      the solution, which only `check_tasks` reads; see
                                 `audit.reference`

`--rows` takes the path of a rows file or the name of one in configs/rows.
"""

from __future__ import annotations

import keyword
import re
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import blake2b
from typing import Any

import jinja2
import yaml
from jinja2 import nodes
from jinja2.filters import FILTERS
from jinja2.runtime import LoopContext, StrictUndefined, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batch_trajectories.basics import exact_json
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.basics.presets import preset_or_path
from batch_trajectories.basics.text import clip
from batch_trajectories.basics.validation import did_you_mean
from batch_trajectories.basics.yaml_file import YamlFileError, construct, read_yaml_nodes
from batch_trajectories.dataset.row_conversation import ERROR_COLUMN
from batch_trajectories.dataset.scan import ID_COLUMNS

# Templates of a rows file: values that are filled in from the columns of a row.
#
# Texts are Jinja2; their variables are the columns, and `row` is all of them. A text that is one
# expression, `{{column}}`, is replaced by its value, which may be a list or an object. A value that
# contains `omit` is left out; `{{column?}}` is short for `{{column|default(omit)}}`. Three objects
# have a meaning:
#
# - {first_of: [VALUE, ...]}: the first value whose columns the row has;
# - {match: TEXT, cases: {TEXT: VALUE}, default: VALUE}: the value of the case that is the text;
# - {refuse: TEXT}: no value; the row is refused, and TEXT is the reason.
#
# Nothing in a row is read as a template. Templates cannot call, define or multiply anything, nor
# nest loops, so each ends, and none reaches beyond its row.

_MAX_CHARS = 1 << 26

_HOLE = re.compile(r"\{\{\s*([\w-]+(?:\.[\w-]+)*)\s*(\?)?\s*(?=\||\}\})")
"""The beginning of an expression: the path of a column, whose names may be any words."""

_STATEMENTS = (nodes.Output, nodes.If, nodes.For)
_REFUSED = (nodes.Call, nodes.Mul, nodes.Pow, nodes.Mod)
_JINJA_FILTERS = (
    "d",
    "default",
    "dictsort",
    "first",
    "int",
    "items",
    "last",
    "length",
    "sort",
    "trim",
)


class TemplateError(ValueError):
    """A template is wrong, or cannot be filled in from a row: place, field and reason."""


class _MissingColumnError(TemplateError):
    """The row lacks a column of a template."""


class Absent(Exception):
    """The value is left out."""


class MissingColumn(StrictUndefined):
    """A column that a row lacks: false as a condition, an error if its value is needed."""

    __slots__ = ()

    def __bool__(self) -> bool:  # type: ignore[override]
        return False

    @property
    def _undefined_message(self) -> str:
        return self._undefined_hint or f"the row has no `{self._undefined_name}`"


_OMIT = object()


def template_variables(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of templates for a row. A column that is null counts as missing."""
    present = {name: value for name, value in columns.items() if value is not None}
    return {**present, "omit": _OMIT, "row": columns}


def _require_value(value: Any) -> Any:
    """Return the value of an expression. Raises if there is none, or JSON cannot hold it."""
    if value is _OMIT:
        raise Absent
    if isinstance(value, Undefined):
        str(value)  # raises an error with its name
    exact_json.dumps(value)
    return value


def _to_text(value: Any) -> str:
    match value:
        case str():
            return value
        case bool() | int() | float():
            return exact_json.dumps(value).decode()
    _require_value(value)
    raise ValueError("a list or an object is not text; use the filter lines, quote or tojson")


def _may_be_json(text: str) -> bool:
    """Whether a text is JSON of an object or a list, perhaps with a mistake in it."""
    return text.lstrip()[:1] in ("{", "[")


def _parse_json(value: Any) -> Any:
    """Parse a text as JSON; return other values as they are."""
    if not isinstance(value, str):
        return value
    try:
        return exact_json.loads(value)
    except exact_json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error


def _to_json(value: Any) -> str:
    _require_value(value)
    return exact_json.dumps(value).decode()


def _text_between(value: Any, begin: str, end: str) -> str:
    """The text between two marks; the whole text if a mark is missing."""
    text = _to_text(value)
    _, sign, rest = text.partition(begin)
    inner, closed, _ = rest.partition(end)
    return inner.strip() if sign and closed else text


def _replace(value: Any, old: str, new: str) -> str:
    text = _to_text(value)
    _refuse_long(len(text) + text.count(old) * len(new))
    return text.replace(old, new)


def _refuse_long(chars: int) -> None:
    if chars > _MAX_CHARS:
        raise ValueError(f"gives more than {_MAX_CHARS:,} characters")


def _to_texts(value: Any) -> list[str]:
    return [_to_text(item) for item in value] if isinstance(value, list) else [_to_text(value)]


_FILTERS: dict[str, tuple[int, Callable[..., Any]]] = {
    "lower": (0, lambda value: _to_text(value).lower()),
    "upper": (0, lambda value: _to_text(value).upper()),
    "replace": (2, _replace),
    "after": (1, lambda value, mark: _to_text(value).rpartition(mark)[2]),
    "between": (2, _text_between),
    "json": (0, _parse_json),
    "tojson": (0, _to_json),
    "lines": (0, lambda value: "".join(f"{item}\n" for item in _to_texts(value))),
    "quote": (0, lambda value: " ".join(map(shlex.quote, _to_texts(value)))),
}
"""Our filters by name, with the number of their arguments, which are texts."""


class _Environment(ImmutableSandboxedEnvironment):
    """Compiles templates, and limits what they can do."""

    def __init__(self) -> None:
        super().__init__(
            undefined=MissingColumn,
            finalize=_to_text,
            keep_trailing_newline=True,
            trim_blocks=True,
            lstrip_blocks=True,
            # `{#` stands in shell scripts (${#names[@]}), and YAML has comments.
            comment_start_string="\0#",
            comment_end_string="#\0",
        )
        self.globals: dict[str, Any] = {}
        theirs = {name: FILTERS[name] for name in _JINJA_FILTERS}
        self.filters = {**theirs, **{name: ours for name, (_, ours) in _FILTERS.items()}}

    def compile_text(self, text: str) -> Callable[[dict[str, Any]], Any]:
        """Compile a text to a function. Raises `ValueError` and Jinja2's `TemplateError`."""
        if "{{" not in text and "{%" not in text:
            return lambda variables: text
        tree = self.parse(_HOLE.sub(_jinja_path, text).replace("\r", '{{"\\r"}}'))
        for node in tree.find_all(nodes.Node):
            self._check(node)
        match tree.body:
            case [nodes.Output(nodes=[only])] if not isinstance(only, nodes.TemplateData):
                # What is rendered is text; what is assigned keeps its type.
                tree.body = [nodes.Assign(nodes.Name("whole", "store"), only).set_lineno(1)]
        return partial(_render, self.from_string(tree))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """A member of an object of the row, never an attribute of a Python object."""
        return (super().getattr if isinstance(obj, LoopContext) else self.getitem)(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """A member of an object or list, which may be JSON text, as in CSV and Parquet."""
        value = None
        if isinstance(obj, str) and not _may_be_json(obj):
            hint = f"the text {clip(repr(obj), max_chars=50)} has no `{argument}`"
            return self.undefined(hint=hint, name=argument)
        if isinstance(obj := _parse_json(obj), Undefined):
            return obj
        if isinstance(obj, Mapping):
            value = obj.get(argument)
        elif isinstance(obj, list) and isinstance(argument, int):
            value = next(iter(obj[argument:][:1]), None)
        return self.undefined(name=argument) if value is None else value

    def _check(self, node: nodes.Node) -> None:
        """Raise `ValueError` for a node that templates cannot have."""
        match node:
            case nodes.Filter(name=name) if name not in self.filters:
                known = did_you_mean(name, self.filters) or f"known: {', '.join(self.filters)}"
                raise ValueError(f"unknown filter {name!r}; {known}")
            case nodes.Filter(name=name, args=given) if name in _FILTERS:
                if len(given) != (count := _FILTERS[name][0]):
                    raise ValueError(f"the filter {name} takes {count} texts (got {len(given)})")
            case nodes.For() if node.find(nodes.For) is not None:
                raise ValueError("a loop cannot be inside of another")
            case nodes.Stmt() if not isinstance(node, _STATEMENTS):
                raise ValueError("of Jinja2's blocks there are only {% if %} and {% for %}")
            case nodes.Expr() if isinstance(node, _REFUSED):
                raise ValueError("calls, `*`, `**` and `%` are not available; use filters")


def _jinja_path(hole: re.Match[str]) -> str:
    """Translate the path of a column to Jinja2, which knows no `?` and has reserved words."""
    names = hole[1].split(".")
    used = {"none", "true", "false", "self", "omit", "row", *keyword.kwlist}
    path = "".join(f'["{name}"]' for name in names)
    is_jinja = all(name.isidentifier() for name in names) and used.isdisjoint(names)
    return f"{{{{{hole[1] if is_jinja else f'row{path}'}{'|default(omit)' if hole[2] else ''}"


def _render(template: jinja2.Template, variables: dict[str, Any]) -> Any:
    context = template.new_context(variables, shared=True)
    parts = []
    size = 0
    for part in template.root_render_func(context):
        size += len(part)
        _refuse_long(size)
        parts.append(part)
    return _require_value(context.vars["whole"]) if "whole" in context.vars else "".join(parts)


_ENVIRONMENT = _Environment()


class Template:
    """A value of a rows file."""

    def __init__(self, node: yaml.Node, file: str, field: str) -> None:
        """Compile a node of a YAML file. Raises `TemplateError`."""
        self._place = f"{file}:{node.start_mark.line + 1}: {field}"
        self._shown = ""
        self._parts: dict[Any, Template] = {}
        """The templates of the items of a list, or of the members of an object."""
        self._fill: Callable[[dict[str, Any]], Any]
        match node:
            case yaml.SequenceNode():
                items = enumerate(node.value)
                self._parts = {n: Template(item, file, f"{field}[{n}]") for n, item in items}
                self._fill = lambda variables: [*self._present(variables).values()]
            case yaml.MappingNode():
                members = {str(key.value): value for key, value in node.value}
                self._parts = {
                    name: Template(member, file, f"{field}.{name}")
                    for name, member in members.items()
                }
                self._fill = self._object_filler(members)
            case _:
                self._fill = self._scalar_filler(construct(node))

    def value(self, variables: dict[str, Any]) -> Any:
        """Fill in the value for a row, whose variables are those of `template_variables`.

        Raises `TemplateError`, and `Absent` if the value is left out.
        """
        try:
            return self._fill(variables)
        except (TemplateError, Absent):
            raise
        except jinja2.UndefinedError as error:
            raise _MissingColumnError(f"{self._place}: {error}{self._shown}") from error
        except Exception as error:  # a template can raise anything
            raise TemplateError(f"{self._place}: {error}{self._shown}") from error

    def _object_filler(self, members: Mapping[str, yaml.Node]) -> Callable[[dict[str, Any]], Any]:
        names = {*members}
        if names == {"first_of"}:
            if not isinstance(members["first_of"], yaml.SequenceNode):
                raise TemplateError(f"{self._place}: first_of must be a list")
            return self._first
        if "match" in names and names <= {"match", "cases", "default"}:
            if not isinstance(members.get("cases"), yaml.MappingNode):
                raise TemplateError(f"{self._place}: match needs `cases`: a value for each text")
            return self._matching
        if names == {"refuse"}:
            return self._refuse
        return self._present

    def _scalar_filler(self, value: Any) -> Callable[[dict[str, Any]], Any]:
        if not isinstance(value, str):
            return lambda variables: value
        self._shown = f" in {clip(repr(value), max_chars=100)}"
        try:
            return _ENVIRONMENT.compile_text(value)
        except (ValueError, RecursionError, jinja2.TemplateError) as error:
            raise TemplateError(f"{self._place}: {error}{self._shown}") from error

    def _present(self, variables: dict[str, Any]) -> dict[Any, Any]:
        """The values of the parts that are not left out."""
        present = {}
        for name, part in self._parts.items():
            try:
                present[name] = part.value(variables)
            except Absent:
                continue
        return present

    def _first(self, variables: dict[str, Any]) -> Any:
        *optional, last = self._parts["first_of"]._parts.values()
        for choice in optional:
            try:
                return choice.value(variables)
            except (Absent, _MissingColumnError):
                continue
        return last.value(variables)

    def _refuse(self, variables: dict[str, Any]) -> Any:
        raise ValueError(_to_text(self._parts["refuse"].value(variables)))

    def _matching(self, variables: dict[str, Any]) -> Any:
        text = _to_text(self._parts["match"].value(variables))
        cases = self._parts["cases"]._parts
        chosen = cases.get(text, self._parts.get("default"))
        if chosen is None:
            known = did_you_mean(text, cases) or f"known: {', '.join(cases)}"
            raise ValueError(f"no case for {clip(repr(text), max_chars=200)}; {known}")
        return chosen.value(variables)


REFERENCE = "reference"
_KEYS = ("options", "columns", "keep", REFERENCE)
OPTIONS = ("row_setup", "workspace", "check_in")
"""Options that a rows file may set, because its rows need them. Others are up to the user."""


class RowsFile:
    """A rows file that was read."""

    def __init__(
        self,
        digest: str,
        columns: Mapping[str, Template],
        options: Mapping[str, Any],
        keep: frozenset[str] | None,
    ) -> None:
        self.digest = digest
        """12 hex digits over the content of the file."""
        self.is_ours = False
        """Whether the file comes with the program."""
        self.options = options
        self._columns = columns
        self._keep = keep

    def row(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Make the row of a run from a row of the dataset.

        If that fails, the row only has its id and the reason, as `row_error`.
        """
        if ERROR_COLUMN in columns:
            return dict(columns)
        made = {}
        variables = template_variables(columns)
        try:
            for name, template in self._columns.items():
                try:
                    made[name] = template.value(variables)
                except Absent:
                    continue
        except TemplateError as error:
            ids = {name: columns[name] for name in ID_COLUMNS if name in columns}
            return {**ids, ERROR_COLUMN: str(error)}
        keep = columns.keys() if self._keep is None else self._keep
        rest = {name: value for name, value in columns.items() if name in keep}
        return {**rest, **made}


def load_rows_file(name: str, *, with_solutions: bool = False) -> RowsFile:
    """Read a rows file; rows have a column `reference` only `with_solutions`.

    Raises `ConfigError`, which names the file, the line and the field.
    """
    try:
        path, is_ours = preset_or_path(name, "rows")
    except ValueError as error:
        raise ConfigError(f"--rows: {error}") from error
    shown = f"configs/rows/{name}.yaml" if is_ours else name
    try:
        content, node = read_yaml_nodes(path, "rows file", shown=shown)
    except YamlFileError as error:
        raise ConfigError(str(error)) from error
    try:
        digest = blake2b(content, digest_size=6).hexdigest()
        rows_file = _read(shown, digest, node, with_solutions=with_solutions)
    except TemplateError as error:
        raise ConfigError(str(error)) from error
    rows_file.is_ours = is_ours
    return rows_file


def _read(file: str, digest: str, node: yaml.Node | None, *, with_solutions: bool) -> RowsFile:
    if not isinstance(node, yaml.MappingNode):
        raise TemplateError(f"{file}: a rows file must have `key: value` lines")
    parts: dict[str, yaml.Node] = {}
    for key, value in node.value:
        place = f"{file}:{key.start_mark.line + 1}: {key.value}"
        if key.value not in _KEYS:
            hint = did_you_mean(str(key.value), _KEYS) or f"known: {', '.join(_KEYS)}"
            raise TemplateError(f"{place}: unknown key; {hint}")
        parts[key.value] = value
    columns = parts.get("columns")
    if not isinstance(columns, yaml.MappingNode):
        raise TemplateError(f"{file}: `columns` is missing: {{COLUMN: VALUE, ...}}")
    templates = {
        str(key.value): Template(value, file, f"columns.{key.value}")
        for key, value in columns.value
    }
    if (reference := parts.get(REFERENCE)) is not None:
        template = Template(reference, file, REFERENCE)
        if with_solutions:
            templates[REFERENCE] = template
    return RowsFile(digest, templates, _options(file, parts), _keep(file, parts))


def _options(file: str, parts: Mapping[str, yaml.Node]) -> dict[str, Any]:
    if (node := parts.get("options")) is None:
        return {}
    options = construct(node)
    if not isinstance(options, dict) or not options.keys() <= {*OPTIONS}:
        place = f"{file}:{node.start_mark.line + 1}: options"
        raise TemplateError(f"{place}: must be an object with any of {', '.join(OPTIONS)}")
    return dict(options)


def _keep(file: str, parts: Mapping[str, yaml.Node]) -> frozenset[str] | None:
    if (node := parts.get("keep")) is None:
        return None
    names = construct(node)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        place = f"{file}:{node.start_mark.line + 1}: keep"
        raise TemplateError(f"{place}: must be a list of columns")
    return frozenset(names)
