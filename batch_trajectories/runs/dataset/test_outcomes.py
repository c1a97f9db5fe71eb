"""Reads which tests passed from what a command printed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from batch_trajectories.runs.dataset.row_check import Outcomes

_TIMEOUT_S = 30.0

_ESCAPES = r"\x1b\[[0-?]*[ -/]*[@-~]|\r"

MISSING = "missing"
"""The status of a test that the output does not name."""


class PatternTimeout(Exception):
    """A pattern takes too long to search an output."""


def outcomes(patterns: Iterable[str], output: str) -> dict[str, str]:
    """The status of each test; the last line that names a test counts. Raises `PatternTimeout`."""
    import regex

    plain = regex.sub(_ESCAPES, "", output)
    lines: list[tuple[int, str, str]] = []
    for pattern in patterns:
        try:
            matches = regex.finditer(
                pattern, plain, flags=regex.MULTILINE, timeout=_TIMEOUT_S, concurrent=True
            )
            lines += ((match.start(), match["name"], match["status"]) for match in matches)
        except TimeoutError as error:
            raise PatternTimeout(f"{pattern!r} took more than {_TIMEOUT_S:g} s") from error
    lines.sort(key=lambda item: item[0])
    return {_plain(name): status for _, name, status in lines}


def statuses_of(tests: Outcomes, by_test: Mapping[str, str]) -> dict[str, str]:
    """The status of each test that is named."""
    named, key = (tests.must_pass, _plain) if tests.expected is None else (tests.expected, _exact)
    ran = {key(name): status for name, status in by_test.items()}
    return {name: ran.get(key(name), MISSING) for name in named}


def wrong_outcomes(tests: Outcomes, by_test: Mapping[str, str]) -> dict[str, str]:
    """The tests that did not end as they should, with the status they have."""
    if tests.expected is None:
        statuses = statuses_of(tests, by_test)
        return {name: got for name, got in statuses.items() if got not in tests.passed}
    expected = {_exact(name): status for name, status in tests.expected.items()}
    ran = {_exact(name): status for name, status in by_test.items()}
    names = dict.fromkeys([*expected, *ran])
    return {name: ran.get(name, MISSING) for name in names if ran.get(name) != expected.get(name)}


def _plain(name: str) -> str:
    """A name as all are compared: some datasets join the parts with a dot."""
    return name.strip().replace("::", ".")


def _exact(name: str) -> str:
    """A name of `expected`, which may still have colours and the message of a failure."""
    import regex

    return _plain(regex.sub(_ESCAPES, "", name)).split(" - ")[0]
