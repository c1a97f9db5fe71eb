"""Checks that pass although no test ran."""

from __future__ import annotations

import pytest

from batch_trajectories.audit.verdicts import explain_hollow_pass

HOLLOW = {
    "pytest, none": "collected 0 items\n\n==== no tests ran in 0.01s ====",
    "pytest, skipped": "ss  [100%]\n2 skipped in 0.01s",
    "pytest, deselected": "==== 3 deselected, 1 warning in 0.02s ====",
    "unittest, none": "\n----\nRan 0 tests in 0.000s\n\nOK",
    "unittest, skipped": "s\n----\nRan 2 tests in 0.000s\n\nOK (skipped=2)",
    "go, none": "ok  \texample.org/a\t0.02s [no tests to run]\n?   \tb.org/b\t[no test files]",
    "go, skipped": "--- SKIP: TestA (0.00s)\nok  \texample.org/a\t0.002s",
    "cargo": "test result: ok. 0 passed; 0 failed; 3 ignored; 0 measured; finished in 0.00s",
    "jest": "Tests:       3 skipped, 3 total\nTime:        1 s",
}
TESTED = {
    "pytest": "==== 1 passed, 2 skipped in 0.01s ====",
    "pytest, quiet": "..  [100%]\n2 passed in 0.01s",
    "pytest, xfail": "1 xfailed in 0.01s",
    "two runs": "1 skipped in 0.01s\n1 passed in 0.01s",
    "unittest": "Ran 3 tests in 0.000s\n\nOK (skipped=2)",
    "go": "ok  \texample.org/a\t0.002s",
    "cargo": "test result: ok. 0 passed; 0 failed\ntest result: ok. 2 passed; 0 failed;",
    "jest": "Tests:       1 skipped, 2 passed, 3 total",
    "no runner": "all good",
    "nothing": "",
}


@pytest.mark.parametrize("output", HOLLOW.values(), ids=HOLLOW)
def test_a_pass_without_a_test_is_hollow(output: str) -> None:
    assert explain_hollow_pass({"stdout": output, "stderr": ""})
    assert explain_hollow_pass({"stdout": "", "stderr": output})


@pytest.mark.parametrize("output", TESTED.values(), ids=TESTED)
def test_a_pass_with_a_test_is_not(output: str) -> None:
    assert explain_hollow_pass({"stdout": output, "stderr": ""}) is None


@pytest.mark.parametrize(
    ("command", "is_hollow"),
    [
        ("python3 -m pytest -q t.py 2>&1 || python3 t.py", False),
        ("pytest t.py || true", True),
        ("(pytest t.py || :)", True),
        ("pytest t.py; true", True),
        ("make || pytest t.py", True),
    ],
)
def test_a_program_that_runs_in_place_of_pytest_decides(command: str, is_hollow: bool) -> None:
    none = {"stdout": "==== no tests ran in 0.01s ====", "stderr": ""}
    assert (explain_hollow_pass(none, command) is not None) == is_hollow
    skipped = {"stdout": "2 skipped in 0.01s", "stderr": ""}
    assert explain_hollow_pass(skipped, command)


def test_statuses_of_named_tests_count_before_the_output() -> None:
    tests = {"statuses": {"SKIPPED": 2}}
    assert explain_hollow_pass({"tests": tests, "stdout": "2 passed in 0.01s"})
    tests["statuses"] = {"SKIPPED": 2, "PASSED": 1}
    assert explain_hollow_pass({"tests": tests, "stdout": "no tests ran in 0.01s"}) is None
