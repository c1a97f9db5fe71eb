"""Networks, services and machines that fail: never the model's result."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path

import pytest
from helping import use
from loopback import KEY, Fault, Loopback

from batch_trajectories.basics.errors import HostError, SandboxLost
from toolsets.sandbox.base import ExecResult, Sandbox, SandboxError, SandboxSettings

RPC = "POST /process.Process"


async def work(sandbox: Sandbox) -> list[str]:
    """Calls with state in the shell, and files in both directions."""
    root = sandbox._workspace.root  # type: ignore[attr-defined]
    root.mkdir(exist_ok=True)
    said = []
    for n in range(6):
        (root / f"in{n}").write_text(f"{n}" * 50_000)
        result = await sandbox.run(
            "shell", f"X=${{X}}{n}; echo $X; wc -c < in{n}; cat in{n} > out{n}"
        )
        assert (result.exit_code, result.stderr) == (0, "")
        said.append(result.stdout)
        assert (root / f"out{n}").read_text() == f"{n}" * 50_000
    return said


EXPECTED = [f"{'012345'[: n + 1]}\n50000\n" for n in range(6)]


@pytest.mark.parametrize(
    "fault",
    [
        Fault("POST /v2/sandboxes", 429, headers={"Retry-After": "1"}),
        Fault("POST /v2/sandboxes", 500, times=3),
        Fault("POST /v2/sandboxes", 503, after=True),
        Fault("POST /v2/sandboxes", after=True),
        Fault("POST /files", 502, times=3),
        Fault("POST /files", after=True, times=2),
        Fault("GET /files", 429, times=2),
        Fault("GET /files", bytes_before=700, times=2),
        Fault(f"{RPC}/Start", 502, times=3),
        Fault(f"{RPC}/Start", bytes_before=10, times=2),
        Fault(f"{RPC}/SendInput", 502, times=3),
        Fault(f"{RPC}/SendInput", after=True, times=4),
        Fault(f"{RPC}/SendInput", 504, after=True, times=4),
        Fault("DELETE", 500, times=2),
        Fault("DELETE", after=True),
    ],
    ids=lambda one: f"{one.matches.split('/')[-1]}-{one.status}-{one.after}-{one.bytes_before}",
)
def test_a_request_that_fails_is_repeated(service: Loopback, root: Path, fault: Fault) -> None:
    service.faults = [fault]
    assert use(root, work) == EXPECTED
    assert fault.seen == fault.times
    assert service.machines == {}, "a machine is left"


def test_a_stream_that_breaks_loses_and_doubles_nothing(service: Loopback, root: Path) -> None:
    """The long stream of the server on the machine is cut again and again, in mid-answer."""
    chosen = random.Random(7)

    def cut(name: str) -> Fault | None:
        if name in (f"{RPC}/Connect", f"{RPC}/Start"):
            return Fault("", bytes_before=chosen.randrange(200, 200_000))
        return None

    async def act(sandbox: Sandbox) -> list[str]:
        script = "X=$((X+1)); echo $X; head -c 40000 /dev/zero | tr '\\0' a"
        return [(await sandbox.run("shell", script)).stdout for _ in range(12)]

    service.on_request = cut
    assert use(root, act) == [f"{n}\n" + "a" * 40_000 for n in range(1, 13)]
    assert service.requests.count(f"{RPC}/Connect") > 5
    assert len(service.made) == 1


def test_a_stream_that_always_breaks_is_a_lost_machine(service: Loopback, root: Path) -> None:
    """The command has long ended when its time is over: only its answer never comes."""

    async def act(sandbox: Sandbox) -> None:
        await sandbox.run("shell", "true")
        service.on_request = lambda name: Fault("", 502) if "Connect" in name else None
        with pytest.raises(SandboxLost):
            await sandbox.run("shell", "head -c 90000 /dev/zero | tr '\\0' a; sleep 1", timeout_s=2)

    service.faults = [Fault(f"{RPC}/Start", bytes_before=50_000, times=3)]
    use(root, act)


def test_faults_everywhere_change_no_result(service: Loopback, root: Path) -> None:
    chosen = random.Random(11)

    def fail(name: str) -> Fault | None:
        if chosen.random() > 0.15:
            return None
        kinds = [Fault("", status) for status in (429, 500, 502, 503, 504, None)]
        kinds += [Fault("", 502, after=True), Fault("", after=True), Fault("", bytes_before=9)]
        return chosen.choice(kinds)

    service.on_request = fail
    assert use(root, work) == EXPECTED
    service.on_request = None
    assert service.machines == {}


def test_a_machine_that_fails_is_no_result(service: Loopback, root: Path) -> None:
    """Its files are those after the last call, and the next call has a new machine."""

    async def act(sandbox: Sandbox) -> ExecResult:
        await sandbox.run("shell", "echo kept > file; X=1")
        [id] = service.machines
        asyncio.get_running_loop().call_later(1.0, service.break_off, id)
        with pytest.raises(SandboxLost, match=f"machine {id} is gone"):
            await sandbox.run("shell", "sleep 30")
        return await sandbox.run("shell", "cat file; echo .$X.")

    result = use(root, act)
    assert result.stdout == "kept\n..\n"
    assert len(service.made) == 2


def test_a_machine_that_ends_between_calls_is_no_result(service: Loopback, root: Path) -> None:
    async def act(sandbox: Sandbox) -> None:
        await sandbox.exec(["true"])
        service.break_off(*service.machines)
        with pytest.raises(SandboxLost):
            await sandbox.exec(["true"])

    use(root, act)


def test_a_command_that_breaks_its_machine_is_the_models_doing(
    service: Loopback, root: Path
) -> None:
    """It kills all processes that it can, as our server there; files are not lost."""

    async def act(sandbox: Sandbox) -> ExecResult:
        with pytest.raises(SandboxError, match="the next call starts a new one"):
            await sandbox.run(
                "shell", "echo kept > file; pkill -9 -f 'toolsets|BOOT|exec' ; sleep 9"
            )
        return await sandbox.run("shell", "cat file")

    try:
        result = use(root, act)
    except SandboxLost:
        pytest.skip("it has also killed the machine's own server")
    assert result.stdout == "kept\n"


def test_nothing_that_fails_shows_the_key(
    service: Loopback, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the server repeats it."""
    monkeypatch.setattr("batch_trajectories_e2b.sandbox._OPEN_PATIENCE_S", 1.0)
    service.faults = [Fault("POST", 500, times=99)]
    with pytest.raises(HostError, match=re.escape("you sent [E2B_API_KEY]")) as caught:
        use(root, work)
    assert KEY not in str(caught.value)


def test_too_many_machines_say_what_to_do(
    service: Loopback, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batch_trajectories_e2b.sandbox._OPEN_PATIENCE_S", 1.0)
    service.max_machines = 0
    with pytest.raises(HostError, match="fewer conversations at a time") as caught:
        use(root, work)
    assert not isinstance(caught.value, SandboxLost)


def test_a_template_that_is_missing_is_named(service: Loopback, root: Path) -> None:
    with pytest.raises(HostError, match="template 'gone' not found"):
        use(root, work, SandboxSettings(image="gone"))
    assert use(root, work, SandboxSettings(image="other")) == EXPECTED
    assert [one["templateID"] for one in service.made] == ["other"]


def test_an_older_server_is_asked_in_its_way(service: Loopback, root: Path) -> None:
    service.knows_v2 = False
    assert use(root, work) == EXPECTED
    assert [one["secure"] for one in service.made] == [True]
