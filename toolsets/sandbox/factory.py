"""Finds sandboxes by name: those of this program and of installed packages.

A sandbox that does not work is refused; no other sandbox replaces it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from batch_trajectories.basics.validation import did_you_mean
from toolsets.sandbox import SANDBOXES
from toolsets.sandbox.base import Extras, Limits, Sandbox, SandboxError, SandboxSettings
from toolsets.workspace.workspace import Workspace

if TYPE_CHECKING:
    from importlib import metadata

    from toolsets.sandbox.image_files import ImageSandboxes

__all__ = [
    "ENTRY_POINTS",
    "NO_AGENTS",
    "find_sandbox_class",
    "image_sandboxes",
    "make_sandbox",
    "sandbox_problem",
]

ENTRY_POINTS = "batch_trajectories.sandboxes"
"""The entry point group in which installed packages offer subclasses of `Sandbox` by name."""

NO_AGENTS = (
    "agents that are commands cannot run in it; use bwrap, or for container images bwrap with "
    "--workspace=image and --images=DIR, or docker"
)


@cache
def find_sandbox_class(name: str) -> type[Sandbox]:
    """Return the class of the sandbox with this name. Raises `SandboxError`.

    Imports no module but that of the sandbox.
    """
    if name in SANDBOXES:
        kind: type[Sandbox] = resolve_name(SANDBOXES[name].sandbox)
        return kind
    from importlib import metadata

    entries = metadata.entry_points(group=ENTRY_POINTS)  # reads a file of each package
    matching = [entry for entry in entries if entry.name == name]
    if not matching:
        known = sorted({*SANDBOXES, *entries.names})
        hint = (meant := did_you_mean(name, known)) and f" ({meant})"
        raise SandboxError(
            f"--sandbox: unknown sandbox {name!r}{hint}; known: {', '.join(known)}, and those of "
            f"packages that you install (entry points {ENTRY_POINTS})"
        )
    offers = {f"{entry.value} of {_distribution(entry)}": entry for entry in matching}
    if len(offers) > 1:
        raise SandboxError(
            f"sandbox {name}: several packages offer it: {', '.join(offers)}; uninstall all but one"
        )
    [(offer, entry)] = offers.items()
    try:
        loaded = entry.load()
    except (Exception, SystemExit) as error:  # a package may do anything when imported
        raise SandboxError(
            f"sandbox {name}: cannot load {offer}: {type(error).__name__}: {error}"
        ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, Sandbox)):
        raise SandboxError(f"sandbox {name}: {offer} is no subclass of `Sandbox`")
    if missing := ", ".join(sorted(loaded.__abstractmethods__)):
        raise SandboxError(f"sandbox {name}: {offer} does not define {missing}")
    if getattr(loaded, "name", None) != name:
        raise SandboxError(f"sandbox {name}: {offer} has another `name`")
    return loaded


def _distribution(entry: metadata.EntryPoint) -> str:
    return "an unknown package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def image_sandboxes(name: str, settings: SandboxSettings, run_dir: Path) -> ImageSandboxes | None:
    """Return the maker of a run's sandboxes in images; None if there is none.

    Imports no module but that of the sandbox. Raises `SandboxError` for an unknown name.
    """
    if name not in SANDBOXES:
        find_sandbox_class(name)  # raises for an unknown name
        return None
    if (class_path := SANDBOXES[name].images) is None:
        return None
    kind: type[ImageSandboxes] = resolve_name(class_path)
    return kind(settings, run_dir)


def sandbox_problem(name: str, settings: SandboxSettings | None = None) -> str | None:
    """Return None if the sandbox works here, else one sentence that says what to do."""
    try:
        return find_sandbox_class(name).problem(settings or SandboxSettings())
    except SandboxError as error:
        return str(error)


def make_sandbox(
    name: str,
    workspace: Workspace,
    limits: Limits,
    settings: SandboxSettings | None = None,
    *,
    extras: Extras | None = None,
) -> Sandbox:
    """Return a sandbox around `workspace`; raises `SandboxError` if it does not work here."""
    kind = find_sandbox_class(name)
    if extras is not None and not kind.takes_extras:
        raise SandboxError(f"sandbox {name}: {NO_AGENTS}")
    return kind.create(workspace, limits, settings or SandboxSettings(), extras)
