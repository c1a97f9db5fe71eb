"""Checks the arguments of a call against the schema that a server gave its tool."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from batch_trajectories.basics.text import clip
from toolsets.mcp.mcp_settings import McpError
from toolsets.tool import ArgumentsError

_MAX_PROBLEMS = 10
_MAX_PROBLEM_CHARS = 300
_PATTERN_TIMEOUT_S = 0.2
"""All conversations of the worker wait for a search."""


def check_by(schema: Mapping[str, Any], tool_name: str) -> Callable[[dict[str, Any]], None]:
    """A check of arguments against a server's schema; raises `McpError` for an invalid schema.

    What cannot be checked here is left to the server: references to other documents, and patterns
    that take too long.
    """
    import jsonschema
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
        if '"pattern' in json.dumps(schema):
            kind = jsonschema.validators.extend(kind, _Patterns(kind.VALIDATORS).keywords())
    except jsonschema.SchemaError as error:
        raise McpError(
            f"mcp: the schema of {tool_name} is not a JSON Schema: {error.message}"
        ) from error
    except RecursionError:
        raise McpError(
            f"mcp: the schema of {tool_name} is nested too deeply to be checked; have the server "
            "list a flatter one, or leave the server out"
        ) from None
    # The default registry would fetch references from the network.
    validator = kind(schema, registry=Registry())

    def check(arguments: dict[str, Any]) -> None:
        try:
            problems = sorted(validator.iter_errors(arguments), key=lambda error: error.json_path)
        except Unresolvable:
            return
        except RecursionError:
            raise ArgumentsError("the JSON is nested too deeply") from None
        lines = [
            f"{'.'.join(map(str, problem.absolute_path)) or 'arguments'}: "
            f"{clip(problem.message, max_chars=_MAX_PROBLEM_CHARS)}"
            for problem in problems[:_MAX_PROBLEMS]
        ]
        if lines:
            raise ArgumentsError("\n".join(lines))

    return check


class _Patterns:
    """The keywords of JSON Schema that search with patterns, with a time limit.

    A server can write patterns that search for ever, and jsonschema has no limit.
    """

    def __init__(self, keywords: Mapping[str, Any]) -> None:
        """`keywords` are those of jsonschema."""
        self._unlimited = keywords
        self._unusable: set[str] = set()

    def keywords(self) -> dict[str, Any]:
        """Functions in the form of jsonschema."""
        return {
            "pattern": self._pattern,
            "patternProperties": self._pattern_properties,
            "additionalProperties": self._additional_properties,
            "unevaluatedProperties": lambda *_: (),  # left to the server
        }

    def _matches(self, pattern: str, text: str) -> bool | None:
        """Whether a pattern is found; None for one that cannot be used."""
        import regex

        if pattern in self._unusable:
            return None
        try:
            return regex.search(pattern, text, timeout=_PATTERN_TIMEOUT_S) is not None
        except (TimeoutError, regex.error):
            self._unusable.add(pattern)
            return None

    def _pattern(self, validator: Any, pattern: str, value: Any, _: Any) -> Iterator[Any]:
        from jsonschema import ValidationError

        if validator.is_type(value, "string") and self._matches(pattern, value) is False:
            yield ValidationError(f"{value!r} does not match {pattern!r}")

    def _pattern_properties(
        self, validator: Any, patterns: Mapping[str, Any], value: Any, _: Any
    ) -> Iterator[Any]:
        if not validator.is_type(value, "object"):
            return
        for pattern, schema in patterns.items():
            for key, inner in value.items():
                if self._matches(pattern, key):
                    yield from validator.descend(inner, schema, path=key, schema_path=pattern)

    def _additional_properties(
        self, validator: Any, allowed: Any, value: Any, schema: Mapping[str, Any]
    ) -> Iterator[Any]:
        patterns = schema.get("patternProperties", {})
        if validator.is_type(value, "object"):
            # Without those that match, or may match, nothing is left to be searched.
            value = {
                key: inner
                for key, inner in value.items()
                if all(self._matches(pattern, key) is False for pattern in patterns)
            }
            schema = {key: inner for key, inner in schema.items() if key != "patternProperties"}
        yield from self._unlimited["additionalProperties"](validator, allowed, value, schema)
