"""The columns of a row that name an image, say how to work in it, and judge what was done."""

from __future__ import annotations

import re
from typing import Any

import pytest

from batch_trajectories.dataset.columns import RowLimits
from batch_trajectories.dataset.row import RowRules, RowTask
from batch_trajectories.dataset.row_workspace import Check, Outcomes
from batch_trajectories.dataset.scan import input_digest
from toolsets.sandbox.base import ImageSpec

INSIDE = RowRules(with_setup=True, image="needed", inside=True)


def read(row: dict[str, Any], rules: RowRules = INSIDE) -> RowTask:
    return rules.read({"prompt": "x", "image": "i:1", **row})


class TestImage:
    @pytest.mark.parametrize("name", ["docker_image", "image", "image_name"])
    def test_each_usual_name_names_the_image(self, name: str) -> None:
        assert INSIDE.read({"prompt": "x", name: "a/b:1"}).image == ImageSpec("a/b:1")

    def test_the_row_says_how_to_work_in_it(self) -> None:
        row = {"workdir": "/app//src/.", "user": 1000, "env": {"A": "1"}, "network": True}
        assert read(row).image == ImageSpec("i:1", "/app/src", "1000", {"A": "1"}, network=False)
        allowed = RowRules(image="needed", inside=True, network=True)
        assert read({"network": True}, allowed).image == ImageSpec("i:1", network=True)
        assert read({}, allowed).image == ImageSpec("i:1", network=True)
        assert read({"network": False}, allowed).image == ImageSpec("i:1")

    def test_limits_are_megabytes(self) -> None:
        assert read({"limits": {"memory_mb": 4096.0}}).limits == RowLimits(4096)
        assert read({"limits": {"memory_mb": None, "disk_mb": 5}}).limits == RowLimits(None, 5)
        assert read({"limits": {"cpus": 0.5}}).limits == RowLimits(cpus=0.5)

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ({"workdir": "app"}, "`workdir`: 'app' is not an absolute path"),
            ({"workdir": "/app/../etc"}, "`workdir`: '/app/../etc' is not an absolute path"),
            ({"user": "-x"}, "`user`: '-x' is not a user"),
            ({"user": -1}, "`user`: -1 is not a user"),
            ({"user": True}, "`user`: True is not a user"),
            ({"env": ["A=1"]}, "`env` must be an object"),
            ({"env": {"A B": "1"}}, "`env`: 'A B' is not the name of a variable"),
            ({"env": {"A": 1}}, "`env.A` must be text"),
            ({"env": {"A": "${HOME}"}}, "`env.A` names the variable HOME of this machine; allow"),
            ({"network": "yes"}, "`network` must be true or false"),
            (
                {"limits": {"gpus": 2}},
                "`limits` must be an object with memory_mb, disk_mb and",
            ),
            ({"limits": {"cpus": 0}}, "`limits.cpus`: 0 is not a number of CPUs"),
            ({"limits": {"cpus": True}}, "`limits.cpus`: True is not a number of CPUs"),
            ({"limits": {"memory_mb": 0}}, "`limits.memory_mb`: 0 is not a number of megabytes"),
            ({"hide": "/tests"}, "`hide` must be a list of absolute paths"),
            ({"hide": ["tests"]}, "`hide` must be a list of absolute paths"),
            ({"hide": ["/"]}, "`hide` must be a list of absolute paths"),
            ({"hide": ["/t"], "check": "true"}, "`hide`: what is hidden is there again only in a"),
            ({"files": {"/etc/../x": "x"}}, "`files`: '/etc/../x' is not the path of a file"),
        ],
    )
    def test_impossible_values_make_a_bad_row(self, row: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            read(row)
        # Where the workspace is a directory of this machine, they are columns like any other.
        if "files" not in row:
            assert RowRules(with_setup=True, image="needed").read(
                {"prompt": "x", "image": "i:1", **row}
            ).image == ImageSpec("i:1")

    def test_only_variables_that_the_run_allows_are_filled_in(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TOKEN", "t0")
        monkeypatch.setenv("SECRET", "s3")
        monkeypatch.delenv("UNSET", raising=False)
        rules = RowRules(image="needed", inside=True, variables=frozenset(["TOKEN", "UNSET"]))
        env = {"A": "x-${TOKEN}-${UNSET:-u}-${SECRET:-none}", "B": "$TOKEN"}
        completion = read({"env": env}, rules).image
        assert completion is not None
        assert completion.env == {"A": "x-t0-u-none", "B": "$TOKEN"}
        with pytest.raises(ValueError, match=r"allow it: --env_from=SECRET"):
            read({"env": {"A": "${SECRET}"}}, rules)
        with pytest.raises(ValueError, match=r"`env.A`: the variable UNSET is not set"):
            read({"env": {"A": "${UNSET}"}}, rules)

    def test_what_decides_the_conversation_is_in_its_digest(self) -> None:
        row = {"prompt": "x", "image": "i:1"}
        changes: list[dict[str, Any]] = [
            {"workdir": "/a"},
            {"user": "u"},
            {"env": {}},
            {"network": True},
            {"hide": ["/t"]},
            {"limits": {}},
            {"image": "i:2"},
        ]
        digests = {input_digest({**row, **change}, INSIDE) for change in [{}, *changes]}
        assert len(digests) == len(changes) + 1
        assert input_digest({**row, "other": 1}, INSIDE) == input_digest(row, INSIDE)

    def test_a_further_name_of_the_image_does_not_change_an_old_row(self) -> None:
        rules = RowRules(image="needed")
        row = {"prompt": "x", "image": "i:1"}
        assert rules.rollout_columns({**row, "image_name": "n"}) == row
        named = {"prompt": "x", "image_name": "n"}
        assert rules.rollout_columns(named) == named


class TestCheck:
    def test_an_object_says_how_to_judge(self) -> None:
        check = {
            "command": "make test",
            "files": {"/tests/test.sh": "x", "a": "y"},
            "reward_file": ["/logs/reward.json", "reward.txt"],
            "timeout_s": 5,
            "env": {"A": "1"},
            "in": "fresh",
            "user": "root",
            "network": True,
        }
        rules = RowRules(with_setup=True, image="needed", inside=True, check_network=True)
        setup = read({"check": check}, rules).setup
        assert setup is not None
        assert setup.check == Check(
            "make test",
            {"/tests/test.sh": b"x", "a": b"y"},
            ("/logs/reward.json", "reward.txt"),
            timeout_s=5.0,
            env={"A": "1"},
            where="fresh",
            user="root",
            network=True,
        )
        without = read({"check": check}).setup
        assert without is not None
        assert without.check is not None
        assert not without.check.network

    def test_tests_are_named_by_patterns(self) -> None:
        pattern = r"^(?P<status>\w+) (?P<name>\S+)"
        tests = {"patterns": [[pattern]], "pass": [["a", "b"], ["c"]], "log": "/tmp/log"}
        setup = read({"check": {"command": "x", "tests": tests}}).setup
        assert setup is not None
        assert setup.check is not None
        assert setup.check.tests == Outcomes(
            patterns=(pattern,), log="/tmp/log", must_pass=("a", "b", "c")
        )

    @pytest.mark.parametrize(
        ("check", "message"),
        [
            ({"timeout_s": 0}, "`check.timeout_s`: 0 is not a number of seconds"),
            ({"timeout_s": float("inf")}, "`check.timeout_s`: inf is not a number of seconds"),
            ({"timeout_s": True}, "`check.timeout_s`: True is not"),
            ({"reward_file": []}, "`check.reward_file` is an empty list"),
            ({"reward_file": ["../x"]}, "`check.reward_file`: '../x' is not a path"),
            ({"in": "new"}, "`check.in` must be same or fresh (got 'new')"),
            ({"image": "v:1", "in": "fresh"}, "`check.image` does not go with `in: fresh`"),
            ({"image": "-v"}, "`check.image`: '-v' is not a valid image name"),
            ({"image": "v:1"}, "`check.artifacts` is missing: what the image gets of"),
            (
                {"image": "v:1", "artifacts": ["../a"]},
                "`check.artifacts.path`: '../a' is not a path",
            ),
            (
                {"image": "v:1", "artifacts": [{"source": "a"}]},
                "must be a list of paths, or of {",
            ),
            ({"artifacts": ["a"]}, "`check.artifacts` needs `check.image`: the image that it is"),
            ({"collect": [{"timeout_s": 1}]}, "`check.collect.command` is missing"),
            (
                {"collect": [{"command": "a", "timeout_s": 0}]},
                "`check.collect.timeout_s`: 0 is",
            ),
            ({"user": "a b"}, "`check.user`: 'a b' is not a user"),
            ({"network": 1}, "`check.network` must be true or false"),
            ({"env": {"A": None}}, "`check.env.A` must be text"),
            ({"unknown": 1}, "(got `unknown`)"),
            ({"unknown": None}, "(got `unknown`)"),
            ({"limits": {"gpus": None}, "image": "v:1", "artifacts": "a"}, "(got `gpus`)"),
            ({"tests": []}, "`check.tests` must be an object"),
            ({"tests": {"pass": ["a"]}}, "`check.tests.patterns` is missing"),
            ({"tests": {"patterns": ["("], "pass": ["a"]}}, "'(' is not a regular expression"),
            ({"tests": {"patterns": ["x"], "pass": ["a"]}}, "'x' lacks the group"),
            ({"tests": {"patterns": ["x"]}}, "`check.tests` needs the tests in `pass`"),
            ({"tests": {"pass": ["a"], "expected": {"a": "b"}}}, "and not in both"),
            ({"tests": {"pass": [1]}}, "`check.tests.pass` must be a list of texts"),
            ({"tests": {"expected": {"a": 1}}}, "`check.tests.expected` must be an object"),
        ],
    )
    def test_impossible_values_make_a_bad_row(self, check: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            read({"check": {"command": "x", **check}})

    @pytest.mark.parametrize("key", ["in", "user", "network"])
    def test_a_check_outside_an_image_runs_as_the_conversation_did(self, key: str) -> None:
        check = {"command": "x", key: {"in": "fresh", "user": "root", "network": True}[key]}
        with pytest.raises(ValueError, match=rf"`check\.{key}` needs --workspace=image"):
            RowRules(with_setup=True).read({"prompt": "x", "check": check})


def test_a_row_that_could_not_be_made_says_why() -> None:
    with pytest.raises(ValueError, match=r"^a/task\.toml: no gpus$"):
        RowRules().read({"id": "a", "row_error": "a/task.toml: no gpus"})
    assert RowRules().read({"prompt": "x", "row_error": "x"}).opening
