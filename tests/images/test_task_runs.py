"""Runs of software-engineering tasks: rows of all kinds, their images, checks and rewards."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.dataset.test_harbor import write_task
from tests.fakes.fake_images import Entry, layer_of, layer_of_tree, make_repository, write_layout
from tests.helpers.playing import call, calls, say
from tests.helpers.running import (
    SCRIPTED,
    kill_session,
    lines,
    records_by_id,
    run,
    session_of,
    started,
    wait_until,
    write_rows,
)
from tests.images.conftest import CALC

pytestmark = pytest.mark.slow

IN_IMAGES: dict[str, Any] = {**SCRIPTED, "sandbox": "bwrap", "enabled_toolsets": "file,terminal"}

PYTEST = """\
#!/usr/bin/env python3
import os, runpy, sys
sys.path.insert(0, os.getcwd())
for path in [word for word in sys.argv[1:] if word.endswith(".py")]:
    try:
        found = runpy.run_path(path)
    except Exception as error:
        print(f"ERROR {path} - {error!r}")
        continue
    for name in [name for name in found if name.startswith("test_")]:
        try:
            found[name]()
            print(f"PASSED {path}::{name}")
        except Exception as error:
            print(f"FAILED {path}::{name} - {error!r}")
"""
"""Runs the test functions of files, and prints of them what pytest prints with -rA."""

TEST_ADD = "from pkg.calc import add\n\ndef test_add():\n    assert add(2, 2) == 4\n"
TEST_PATCH = (
    "diff --git a/tests/test_calc.py b/tests/test_calc.py\nnew file mode 100644\n--- /dev/null\n"
    "+++ b/tests/test_calc.py\n@@ -0,0 +1,4 @@\n"
    + "".join(f"+{line}\n" for line in TEST_ADD.splitlines())
)
NAME = "tests/test_calc.py::test_add"

FIX = "sed -i 's/a - b/a + b/' pkg/calc.py"


def script_of(*commands: str) -> list[Any]:
    """A conversation that runs commands, one for each turn."""
    return [*(calls(call("terminal", command=command)) for command in commands), say("done")]


def results_of(record: Any) -> list[Any]:
    return [json.loads(m["content"]) for m in record["messages"] if m["role"] == "tool"]


@pytest.fixture(scope="module")
def task_images(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The images of all tests, and one for each kind of rows."""
    directory = tmp_path_factory.mktemp("task_images")
    for name in ("python", "shell", "agent"):
        (directory / name).symlink_to(images / name)
    programs = layer_of_tree(images.with_name("trees") / "python")
    tools = layer_of([Entry("usr/bin/pytest", PYTEST.encode(), mode=0o755)])
    good = {name: text.replace("a - b", "a + b") for name, text in CALC.items()}
    r2e = [
        Entry("r2e_tests/test_1.py", TEST_ADD.encode()),
        Entry("testbed/run_tests.sh", b"pytest -rA r2e_tests/test_1.py\n"),
    ]
    for name, project, more in (
        ("swe", CALC, []),
        ("smith", {**good, "tests/test_calc.py": TEST_ADD}, []),
        ("r2e", CALC, [layer_of(r2e)]),
    ):
        tree = tmp_path_factory.mktemp(name)
        make_repository(tree / "testbed", project)
        layers = [programs, tools, layer_of_tree(tree), *more]
        write_layout(directory / name, layers, name="1", config={"WorkingDir": "/testbed"})
    return directory


def run_kind(
    tmp_path: Path, task_images: Path, kind: str, row: dict[str, Any], *extra: str
) -> dict[str, Any]:
    """The record of a row whose model fixes the bug, and of one whose model does nothing."""
    rows = [
        {**row, "instance_id": f"{row['instance_id']}-{n}", "script": script}
        for n, script in enumerate([script_of("ls -a / .", FIX), script_of("true")])
    ]
    write_rows(tmp_path / "p.jsonl", *rows)
    # The rows file of a user, who wants the scripts, too.
    own = (Path("configs/rows") / f"{kind}.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(own.replace("keep: [", "keep: [script, instance_id, "))
    done = run(tmp_path, *extra, **IN_IMAGES, rows="mine.yaml", images=task_images)
    assert done.returncode == 0, done.stderr
    return records_by_id(tmp_path)


def check_kind(records: dict[str, Any]) -> None:
    fixed, broken = records.values()
    if not fixed["check"]["passed"]:
        fixed, broken = broken, fixed
    assert fixed["check"]["reward"] == 1.0, fixed["check"]
    assert fixed["check"]["tests"]["wrong"] == 0
    assert (broken["check"]["reward"], broken["check"]["passed"]) == (0.0, False)
    assert broken["check"]["tests"]["first_wrong"]
    assert fixed["id"].endswith("-0") or "id" in fixed["row"]
    assert "+    return a + b" in fixed["diff"]["patch"]
    assert broken["diff"]["patch"] == ""
    listing = results_of(fixed)[0]["stdout"].split()
    assert not {"check", "r2e_tests", "run_tests.sh", "check.log"} & {*listing}


def test_swe_bench(tmp_path: Path, task_images: Path) -> None:
    row = {
        "instance_id": "o__r",
        "repo": "o/r",
        "base_commit": "main",
        "image_name": "swe:1",
        "problem_statement": "add is wrong",
        "test_patch": TEST_PATCH,
        "FAIL_TO_PASS": json.dumps([NAME]),
        "PASS_TO_PASS": "[]",
    }
    check_kind(run_kind(tmp_path, task_images, "swe-bench", row))


def test_swe_bench_with_its_own_script(tmp_path: Path, task_images: Path) -> None:
    script = (
        "#!/bin/bash\nset -uxo pipefail\ncd /testbed\ngit apply -v - <<'EOF_1'\n"
        f"{TEST_PATCH}EOF_1\n: '>>>>> Start Test Output'\npytest -rA tests/test_calc.py\n"
        ": '>>>>> End Test Output'\nrm -r tests\n"
    )
    row = {
        "instance_id": "o__r",
        "repo": "o/r",
        "base_commit": "main",
        "image": "swe:1",
        "problem_statement": "add is wrong",
        "test_patch": TEST_PATCH,
        "eval_script": script,
        "log_parser": "parse_log_pytest",
        "FAIL_TO_PASS": json.dumps([NAME]),
        "PASS_TO_PASS": "[]",
    }
    check_kind(run_kind(tmp_path, task_images, "swe-bench", row))


def test_swe_rebench(tmp_path: Path, task_images: Path) -> None:
    row = {
        "instance_id": "o__r",
        "repo": "o/r",
        "base_commit": "main",
        "image_name": "swe:1",
        "problem_statement": "add is wrong",
        "test_patch": TEST_PATCH,
        "install_config": {
            "test_cmd": "pytest -rA tests/test_calc.py",
            "log_parser": "parse_log_pytest",
        },
        "FAIL_TO_PASS": [NAME],
        "PASS_TO_PASS": [],
    }
    check_kind(run_kind(tmp_path, task_images, "swe-rebench", row))


def test_swe_smith(tmp_path: Path, task_images: Path) -> None:
    """Without a branch of the instance in the image, `patch` is applied."""
    bug = (
        "diff --git a/pkg/calc.py b/pkg/calc.py\n--- a/pkg/calc.py\n+++ b/pkg/calc.py\n"
        "@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a + b\n+    return a - b\n"
    )
    row = {
        "instance_id": "o__r.bug",
        "repo": "o/r",
        "image_name": "smith:1",
        "patch": bug,
        "problem_statement": "add is wrong",
        "FAIL_TO_PASS": [NAME],
        "PASS_TO_PASS": [],
    }
    records = run_kind(tmp_path, task_images, "swe-smith", row)
    check_kind(records)


def test_r2e_gym(tmp_path: Path, task_images: Path) -> None:
    row = {
        "instance_id": "x",
        "repo_name": "r",
        "docker_image": "r2e:1",
        "commit_hash": "c",
        "problem_statement": "[ISSUE]\nadd is wrong\n[/ISSUE]",
        "expected_output_json": json.dumps({"test_add": "PASSED"}),
    }
    check_kind(run_kind(tmp_path, task_images, "r2e-gym", row))


REWARD = "cd {place} && {test} && r=1 || r=0; echo $r > /logs/verifier/reward.txt"
PLACES = {
    "python:1": ("/testbed", 'python3 -c "from pkg.calc import add; assert add(2, 2) == 4"', FIX),
    "agent:1": (
        "/home/agent/work",
        'python3 -c "from pkg.calc import add; assert add(2, 2) == 4"',
        FIX,
    ),
    "shell:1": ("/app", '[ "$(sh sum.sh 2 2)" = 4 ]', "sed -i 's/-/+/' sum.sh"),
}
"""For each image where its project is, how it is tested, and what fixes it."""


def test_harbor_tasks(tmp_path: Path, task_images: Path) -> None:
    """Fourteen tasks of all shapes; what cannot run is refused, and one gives no reward."""
    tasks = tmp_path / "tasks"
    for n, (image, (place, test, _)) in enumerate(PLACES.items()):
        for name, shell in (("bash", "bash"), ("sh", "sh")):
            task = f'[environment]\ndocker_image = "{image}"\n[verifier]\nuser = "root"\n'
            test_sh = f"#!/bin/{shell}\n" + REWARD.format(place=place, test=test)
            write_task(tasks / f"{n}-{name}", task, **{"tests/test.sh": test_sh})
    json_reward = 'echo \'{"reward": 1, "speed": 2.5}\' > /logs/verifier/reward.json\n'
    environment = '[environment]\ndocker_image = "python:1"\n'
    own = 'env = { A = "${A:-one}" }\nworkdir = "/tmp"\n[agent]\ntimeout_sec = 99\n'
    write_task(tasks / "json", environment + own, **{"tests/test.sh": f"#!/bin/sh\n{json_reward}"})
    write_task(tasks / "silent", environment, **{"tests/test.sh": "#!/bin/sh\nexit 3\n"})
    elf = "/tests/true && echo 1 > /logs/verifier/reward.txt\n"
    write_task(tasks / "elf", environment, **{"tests/test.sh": elf})
    shutil.copy(shutil.which("true") or "", tasks / "elf" / "tests" / "true")
    write_task(tasks / "lacking", environment, **{"tests/test.sh": "#!/usr/bin/ruby\n1"})
    write_task(tasks / "compose", environment, **{"environment/compose.yaml": "services: {}"})
    write_task(tasks / "windows", environment + 'os = "windows"\n')
    write_task(tasks / "gpus", environment + "gpus = 2\n")
    write_task(tasks / "hosts", environment + 'network_mode = "allowlist"\n')
    fixes = " || ".join(f"{{ cd {place} && {fix}; }}" for place, _, fix in PLACES.values())
    (tmp_path / "turns.yaml").write_text(
        json.dumps(script_of(f"ls /tests; ls /logs; echo $A; pwd; {fixes}"))
    )
    done = run(
        tmp_path,
        **{**IN_IMAGES, "dataset_file": "tasks"},
        rows="harbor",
        images=task_images,
        script_file="turns.yaml",
        max_attempts=1,
    )
    assert done.returncode == 1, done.stderr
    assert "tasks: 10 of 14 rows can run" in done.stderr
    assert "gpus/task.toml:3: environment.gpus: GPUs are not supported" in done.stderr
    assert "no network without --network, though 10 rows asked for it" in done.stderr
    records = records_by_id(tmp_path)
    rewards = {id: (r["check"] or {}).get("reward") for id, r in records.items()}
    assert rewards == {
        **{f"{n}-{name}": 1.0 for n in range(3) for name in ("bash", "sh")},
        "json": 1.0,
        "elf": 1.0,
        "silent": None,
        "lacking": None,
    }
    assert records["lacking"]["turns"] == []
    lacking = "tests/test.sh needs /usr/bin/ruby, which the image does not have"
    assert lacking in records["lacking"]["error"]["message"]
    assert records["json"]["check"]["rewards"] == {"reward": 1.0, "speed": 2.5}
    assert "one\n/tmp\n" in results_of(records["json"])[0]["stdout"]
    assert records["silent"]["status"] == "completed"
    assert "/logs/verifier/reward.json" in records["silent"]["check"]["error"]
    assert "cannot access '/tests'" in results_of(records["0-sh"])[0]["stderr"]


VERIFIED = """\
#!/bin/sh
cd /testbed && {test} && grep -q alive /logs/artifacts/state && test ! -e /testbed/pkg/a.tmp \\
    && test ! -e /left && test -d /testbed/.git && r=1 || r=0
echo $r > /logs/verifier/reward.txt
"""
SEPARATE = """\
artifacts = [{{source = "pkg", exclude = ["*.tmp"]}}, ".git", "/missing"]
[environment]
docker_image = "python:1"
[environment.healthcheck]
command = "test -e {ready}"
interval_sec = 0.01
[verifier]
environment_mode = "separate"
[[verifier.collect]]
command = "kill -0 $(cat /tmp/pid) && echo alive > /logs/artifacts/state"
[[verifier.collect]]
command = "exit 7"
"""


def test_harbor_tasks_with_verifiers_of_their_own(tmp_path: Path, task_images: Path) -> None:
    """A verifier gets the artifacts alone, in an image that the model could not change."""
    test = PLACES["python:1"][1]
    tasks = tmp_path / "tasks"
    files = {"tests/test.sh": VERIFIED.format(test=test)}
    write_task(tasks / "copy", SEPARATE.format(ready="/testbed"), **files)
    write_task(tasks / "dead", SEPARATE.format(ready="/never"), **files)
    service = "sleep 1000 & echo $! > /tmp/pid"
    cheat = "touch /left pkg/a.tmp; printf '#!/bin/sh\\nexit 0\\n' > /usr/bin/python3"
    for name, script in {
        "fixed": script_of(FIX, "touch /left pkg/a.tmp", service),
        "cheated": script_of(cheat, service),
        "stopped": script_of(FIX),
    }.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps(script))
    options = {**IN_IMAGES, "dataset_file": "tasks"}
    rewards = {}
    for name in ("fixed", "cheated", "stopped"):
        done = run(
            tmp_path,
            **{**options, "run_name": name},
            rows="harbor",
            images=task_images,
            script_file=f"{name}.yaml",
            max_attempts=1,
        )
        assert done.returncode == 1, done.stderr
        directory = tmp_path / "trajectories" / name
        assert (
            "the command 'exit 7' of `check.collect` failed (exit code 7)"
            in (directory / "run.log").read_text()
        )
        records = {r["id"]: r for r in lines(directory / "records.jsonl")}
        assert "the health check failed 3 times" in records["dead"]["error"]["message"]
        assert records["copy"]["check"]["in"] == "image"
        rewards[name] = records["copy"]["check"]["reward"]
    assert rewards == {"fixed": 1.0, "cheated": 0.0, "stopped": 0.0}


def forty_tasks(kills: int) -> list[dict[str, Any]]:
    """Tasks in three images and three ways to judge them; every fourth model fixes nothing.

    The others succeed in a run that is killed so many times.
    """
    rows = []
    for n in range(40):
        image, (_, test, fix) = list(PLACES.items())[n % 3]
        checks: list[dict[str, Any]] = [
            {"command": test},
            {
                "command": "/tests/test.sh",
                "files": {"/tests/test.sh": f"#!/bin/sh\n{test} && r=1 || r=0; echo $r > /tmp/r"},
                "reward_file": ["/logs/none.json", "/tmp/r"],
                "user": "root",
            },
            {
                "command": f"({test} && echo PASSED t || echo FAILED t) > /logs/log",
                "tests": {
                    "log": "/logs/log",
                    "patterns": ["^(?P<status>[A-Z]+) (?P<name>.)$"],
                    "pass": ["t"],
                },
                "in": "fresh",
                "user": "root",
            },
        ]
        # Once more than the run is killed: a call that a kill cut off is not repeated.
        work = "true" if n % 4 == 0 else fix
        times = range(kills + 1)
        commands = ["id -u; echo 1 > /tmp/r", *(f"id -u; {work}; : {time}" for time in times)]
        rows.append(
            {
                "id": f"t{n:02}",
                "prompt": "Fix it.",
                "image": image,
                "check": checks[n // 3 % 3],
                "script": script_of(*commands),
            }
        )
    return rows


def sizes(run_dir: Path) -> int:
    """The bytes of all journals and records."""
    total = 0
    for path in [*run_dir.glob("inflight/*.jsonl"), run_dir / "records.jsonl"]:
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def kill_often(cwd: Path, kills: int, **options: Any) -> None:
    """Start a run and kill it, again and again, each time after it has written a random amount."""
    draw = random.Random(kills)
    run_dir = cwd / "trajectories" / "r"
    for number in range(kills):
        wanted = draw.randint(0, 40_000)
        grown, last = 0, sizes(run_dir)

        def has_grown(wanted: int = wanted) -> bool:
            nonlocal grown, last
            now = sizes(run_dir)
            grown, last = grown + max(0, now - last), now  # journals are removed, too
            return grown >= wanted

        with started(cwd, "--row_setup", **options) as process:
            wait_until(lambda: has_grown() or process.poll() is not None, timeout_s=300)
            assert process.poll() is None, "the run ended before it was killed"
            # All its processes, or the one whose end the others have to notice.
            if number % 2:
                kill_session(process.pid)
            else:
                os.kill(process.pid, signal.SIGKILL)
            process.wait()
            wait_until(lambda leader=process.pid: not session_of(leader))


def judge_forty_tasks(cwd: Path) -> None:
    """Each has its one record, with the reward that it should have; nothing else is left."""
    run_dir = cwd / "trajectories" / "r"
    assert len(lines(run_dir / "records.jsonl")) == 40
    records = records_by_id(cwd)
    rewards = {id: record["check"]["reward"] for id, record in records.items()}
    assert rewards == {f"t{n:02}": float(n % 4 != 0) for n in range(40)}
    for n in range(40):
        said = [m["content"] for m in records[f"t{n:02}"]["messages"] if m["role"] == "tool"]
        # A note may follow the JSON; the result of a call that was cut off is text.
        decode = json.JSONDecoder().raw_decode
        users = {decode(text)[0]["stdout"] for text in said if text.startswith("{")}
        assert users == {"1234\n" if n % 3 == 1 else "0\n"}
    assert not [*(run_dir / "workspaces").iterdir()]
    wait_until(lambda: not _processes_of(run_dir))


def _processes_of(run_dir: Path) -> list[str]:
    """The mounts and command lines of other processes that name a run directory."""
    collected = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if int(process.name) != os.getpid():
                collected.append((process / "mountinfo").read_text())
                collected.append((process / "cmdline").read_text(errors="replace"))
    return [text for text in collected if str(run_dir) in text]


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.long)])
def test_forty_tasks_over_three_images_are_killed_and_resumed(
    tmp_path: Path, task_images: Path, kills: int
) -> None:
    write_rows(tmp_path / "p.jsonl", *forty_tasks(kills))
    options: dict[str, Any] = {
        **IN_IMAGES,
        "workspace": "image",
        "images": task_images,
        "num_workers": 2,
        "batch_size": 6,
    }
    kill_often(tmp_path, kills, **options)
    done = run(tmp_path, "--row_setup", **options)
    assert done.returncode == 0, done.stderr
    judge_forty_tasks(tmp_path)
    assert not [*task_images.glob(".unpacked-*/*.tmp")]
