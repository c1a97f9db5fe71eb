"""The sandboxes by name: which there are, whether they work here, and how to make one.

A sandbox that was asked for and does not work is refused; none ever stands in for another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from toolsets.bwrap import BwrapSandbox, bwrap_problem
from toolsets.execution import ExecResult, Limits, Sandbox, SandboxError
from toolsets.local import LocalSandbox
from toolsets.workspace import Workspace

__all__ = [
    "SANDBOXES",
    "ExecResult",
    "Limits",
    "Sandbox",
    "SandboxError",
    "make_sandbox",
    "sandbox_problem",
]

SANDBOXES: Mapping[str, Callable[[Workspace, Limits], Sandbox]] = MappingProxyType(
    {"bwrap": BwrapSandbox, "local": LocalSandbox}
)
"""How to make each sandbox."""


def sandbox_problem(name: str) -> str | None:
    """Return None if the sandbox works here, else one sentence that says what to do."""
    if name not in SANDBOXES:
        return f"unknown sandbox {name!r}; known: {', '.join(sorted(SANDBOXES))}"
    return bwrap_problem() if name == "bwrap" else None


def make_sandbox(name: str, workspace: Workspace, limits: Limits) -> Sandbox:
    """Return a sandbox around `workspace`; raises `SandboxError` if it does not work here."""
    problem = sandbox_problem(name)
    if problem is not None:
        raise SandboxError(problem)
    return SANDBOXES[name](workspace, limits)
