"""The loopback service, as E2B's own client sees it: else it would only prove our assumptions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from loopback import Loopback

e2b = pytest.importorskip("e2b")


@pytest.fixture
def machine(service: Loopback) -> Iterator[e2b.Sandbox]:
    """A machine that the client has made."""
    machine = e2b.Sandbox.create(metadata={"made_by": "the client"}, timeout=60)
    yield machine
    machine.kill()


def test_a_command_has_its_output_its_user_and_its_exit_code(machine: e2b.Sandbox) -> None:
    done = machine.commands.run("echo out; echo err >&2; whoami; pwd")
    assert (done.stdout, done.stderr) == ("out\nuser\n/home/user\n", "err\n")
    with pytest.raises(e2b.CommandExitException) as caught:
        machine.commands.run("exit 3")
    assert caught.value.exit_code == 3


def test_a_command_reads_its_input_and_outlives_its_stream(machine: e2b.Sandbox) -> None:
    started = machine.commands.run("cat; echo end", background=True, stdin=True)
    started.disconnect()
    again = machine.commands.connect(started.pid)
    machine.commands.send_stdin(started.pid, "one\n")
    machine.commands.close_stdin(started.pid)
    assert again.wait().stdout == "one\nend\n"


def test_a_command_can_be_killed(machine: e2b.Sandbox) -> None:
    started = machine.commands.run("sleep 60", background=True)
    assert [one.pid for one in machine.commands.list()] == [started.pid]
    assert machine.commands.kill(started.pid)
    with pytest.raises(e2b.CommandExitException):
        started.wait()
    assert not machine.commands.kill(99999)


def test_files_go_there_and_back(machine: e2b.Sandbox) -> None:
    content = bytes(range(256)) * 1000
    machine.files.write("/home/user/deep/er/file", content)
    assert bytes(machine.files.read("/home/user/deep/er/file", format="bytes")) == content
    with pytest.raises(e2b.NotFoundException):
        machine.files.read("/home/user/missing")


def test_machines_are_listed_by_metadata_renewed_and_killed(
    service: Loopback, machine: e2b.Sandbox
) -> None:
    other = e2b.Sandbox.create(metadata={"made_by": "another"})
    query = e2b.SandboxQuery(metadata={"made_by": "the client"})
    assert [one.sandbox_id for one in e2b.Sandbox.list(query).next_items()] == [machine.sandbox_id]
    machine.set_timeout(600)
    assert service.renewals == [machine.sandbox_id]
    assert other.kill()
    assert not other.kill()
    assert set(service.machines) == {machine.sandbox_id}


def test_what_is_not_allowed_is_refused(service: Loopback, machine: e2b.Sandbox) -> None:
    with pytest.raises(e2b.AuthenticationException):
        e2b.Sandbox.create(api_key="e2b_" + "0" * 40)
    with pytest.raises(e2b.SandboxException):
        e2b.Sandbox.create(template="missing")
    service.max_machines = 1
    with pytest.raises(e2b.RateLimitException):
        e2b.Sandbox.create()
    service.break_off(machine.sandbox_id)
    with pytest.raises(e2b.SandboxException):
        machine.commands.run("true")
