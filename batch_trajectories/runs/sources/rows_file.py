"""A rows file: how the rows of a kind of dataset become rows of a run.

    options: {row_setup: true}   options of the run, unless they are given
    columns: {prompt: "{{problem_statement}}", ...}   see `runs.sources.templates`
    keep: [repo]                 columns of the dataset that stay; without it, all others do
    reference: {patch: ...}      the solution, which only `check_tasks` reads; see
                                 `runs.audit.reference`

`--rows` takes the path of a rows file or the name of one in configs/rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import yaml

from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.basics.presets import preset_or_path
from batch_trajectories.basics.validation import did_you_mean
from batch_trajectories.basics.yaml_file import YamlFileError, construct, read_yaml_nodes
from batch_trajectories.runs.dataset.column_names import ERROR_COLUMN
from batch_trajectories.runs.dataset.scan import ID_COLUMNS
from batch_trajectories.runs.sources.templates import (
    Absent,
    Template,
    TemplateError,
    variables_of,
)

REFERENCE = "reference"
_KEYS = ("options", "columns", "keep", REFERENCE)
OPTIONS = ("row_setup", "workspace", "check_in")
"""What rows need to be used as they are; everything else is for the user to decide."""


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
        """Whether it comes with the program."""
        self.options = options
        self._columns = columns
        self._keep = keep

    def row(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """The row of a run that a row of the dataset becomes.

        Where it cannot become one, it only has its id and `row_error`, the reason.
        """
        if ERROR_COLUMN in columns:
            return dict(columns)
        made = {}
        variables = variables_of(columns)
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
